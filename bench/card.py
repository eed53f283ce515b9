"""All that only a GPU can show, in three calls of less than ten minutes on one H200, and a table of what was to be shown.

    bench/carry.sh pack                                   here, before the first call
    python3 bench/card.py 1                               there, with .carry carried; then 2 and 3
    python3 bench/card.py 3 --seconds 450                 where a call may take less than ten minutes: 30 s less than that
    python3 bench/card.py pretrain serve                  some parts, one after the other
    python3 bench/card.py --report results-1.tgz …        one section of RESULTS.md from all calls
    python3 bench/card.py --list                          parts and calls, with what each is expected to take
    python3 bench/card.py --tiny learn                    small models, also on a CPU, to see that a part runs

**Nothing is timed beside anything else.** What is timed runs alone, one part after the other. Parts in brackets time nothing: they
test, learn, compare losses or measure memory, so they share the GPU and the cores.

    call 1, 550 s   tests that fill the card 20, pretrain 160, pretrain-hf 30, causal 80, [other tests, learn, survive, losses, estimate] 260
    call 2, 535 s   sft 80, record 45, finetune-0.5b 95, finetune-1.5b 105, finetune-lora 100, finetune-qlora 110
    call 3, 540 s   full 55, serve 135, preference-t5 70, preference-qwen 90, causal-full 90, midrun 100

The seconds are estimates (5 s of imports a process, 4 s to build T5 base, 8 s a plan, 35 s to compile, speeds as in RESULTS.md). In each
call those come first that show most in their time, and what shares the GPU comes last: it takes what is left. A part that takes much
longer than expected is ended, and so is what runs after `--seconds`; its lines so far count. What a call did not come to can be named in a
later one, and each call ends with those cases of the estimate that none has measured. Parts share tokens, weights and compiled code in
`--scratch`, except where the time to compile is a figure.

Results go to `--output` (`$OUT`): `results.tgz`, written again every 15 seconds, has the benches' JSON lines, a log of each part and
`section.md`: a table of what the issues say must be shown (`claims.py`), then the benches' tables. It is printed last, after the ends of
the logs of parts that failed. Of a call that was cut off, `--report` makes it from the file. Packages of the peers and the chat rows come
from `bench/carry.sh`; they are unpacked first.
"""

import argparse
import json
import os
import signal
import subprocess
import sys
import tarfile
import tempfile
import threading
import time
from contextlib import suppress
from dataclasses import dataclass, field
from io import BytesIO
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
ROWS = ROOT / ".carry/chatlm/train_3k.parquet"
ESTIMATE_CALLS = 6
ESTIMATE_SECONDS = 240
"""After which they begin no further case. In half of it they trace, and then they measure."""
ROOM_GIB = 50
"""What these may use of the card together, beside three trainings of 20 to 24 GiB, and tests."""
WHOLE_CARD = tuple(
    f"tests/planning/test_gpu.py::{name}"
    for name in (
        "test_a_gpu_held_by_another_process_is_named_in_one_sentence",
        "test_a_gpu_nearly_full_says_who_holds_it",
    )
)
"""Tests that take all memory of the card, so nothing else can run beside them."""
REPORT_S = 12.0
"""What the section takes, within the time of the call."""
SAVE_EVERY_S = 15.0
STUCK_S = 10.0
"""A process that has been killed and is there this much later waits for a GPU that does not answer. Nothing waits for it."""
OVER = "the time of the call was over"


@dataclass(frozen=True)
class Part:
    """Commands that run one after the other."""

    about_s: int
    """Expected on an H200."""
    commands: list[list[str]] = field(default_factory=list)

    @property
    def most_s(self) -> float:
        return 30 + 1.6 * self.about_s


def pytest(*paths: str) -> list[str]:
    """Of files, not of folders: others in them need packages that a GPU machine lacks, and pytest then runs no test at all."""
    return ["-m", "pytest", "-m", "gpu", "-q", "-p", "no:cacheprovider", "--junitxml", "{results}/{part}.xml", *paths]


def train(
    cases: str, entries: str, *more: str, cache: str = "{own}/compiled", warm_s: float = 6, file: str = "train"
) -> list[str]:
    return ["train.py", "--data", str(ROWS), "--cases", cases, "--only", entries, "--cap", "20GiB", "--folder", "{scratch}/train",
            "--compile-cache", cache, "--output", f"{{results}}/{file}.jsonl", "--warm-seconds", str(warm_s), "--seconds-per-entry", "110", *more]  # fmt: skip


def sft(models: str, data: str, *more: str, limit: str = "24GiB", file: str = "sft") -> list[str]:
    return ["sft.py", "--models", models, "--data", data, "--limits", limit, "--rows", str(ROWS), "--folder", "{scratch}/sft",
            "--compile-cache", "{scratch}/compiled", "--output", f"{{results}}/{file}.jsonl", *more]  # fmt: skip


def finetune(model: str, data: str, settings: int, own: str = "brimful") -> list[str]:
    return sft(
        model,
        data,
        "--contestants",
        f"{own},trl,trl-tuned",
        "--most-settings",
        str(settings),
        "--seconds",
        "10",
        "--tuned-seconds",
        "5",
    )


def dpo(*more: str) -> list[str]:
    return ["dpo.py", "--limits", "20GiB", "--rows", str(ROWS), "--folder", "{scratch}/dpo", *more]


def preference(model: str, contestants: str, *more: str) -> list[str]:
    return dpo(
        "--models", model, "--contestants", contestants, "--seconds", "8", "--output", "{results}/dpo.jsonl", *more
    )


def serve(case: str, entries: str) -> list[str]:
    return ["serve.py", "--cases", case, "--entries", entries, "--clients", "64", "--device", "cuda", "--memory-limit", "20GiB",
            "--new-tokens", "64", "--seconds", "5", "--warm-seconds", "2", "--start-seconds", "60", "--output", "{results}/serve.jsonl"]  # fmt: skip


def estimate(part: int) -> list[str]:
    return [
        "estimate.py",
        "--limit",
        "24GiB",
        "--part",
        f"{part}/{ESTIMATE_CALLS}",
        "--room",
        "{scratch}/room",
        "--seconds",
        str(ESTIMATE_SECONDS),
        "--json",
        "{results}/{part}.json",
        "--resume",
        "{scratch}/{part}.json",
    ]


SHARED = "{scratch}/compiled"
PARTS: dict[str, Part] = {
    "tests-whole-card": Part(20, [pytest("tests/memory/test_gpu.py", *WHOLE_CARD)]),
    "pretrain": Part(160, [train("pretrain", "brimful", warm_s=24), train("pretrain", "brimful", "--seeds", "1,2")]),
    "pretrain-hf": Part(30, [train("pretrain,sft", "hf-tuned-32", "--per-process", "2")]),
    "tests-packing": Part(120, [pytest("tests/packing/test_gpu.py")]),
    "tests-planning": Part(110, [pytest("tests/planning/test_gpu.py", *(word for one in WHOLE_CARD for word in ("--deselect", one)))]),
    "tests-step": Part(90, [pytest("tests/step/test_gpu.py", "tests/step/test_graphs.py")]),
    "tests-training": Part(90, [pytest(*(f"tests/{name}/test_gpu.py" for name in ("training", "serving", "molecules")))]),
    "learn": Part(235, [dpo("--learn", "--output", "{results}/learn.json"), dpo("--prepare")]),
    "survive": Part(235, [sft("llama-8b-lora", "real", "--survive", file="survive"), sft("qwen2.5-0.5b,qwen2.5-1.5b", "long", "--prepare")]),
    "losses": Part(260, [train("pretrain", "brimful-padded", "--seeds", "0,1,2", "--steps", "50", warm_s=100, file="losses"),
                         sft("llama-8b-qlora", "real", "--contestants", "brimful", "--seconds", "5", limit="12GiB", file="sft-12gib")]),
    **{f"estimate-{part}": Part(250, [estimate(part)]) for part in range(ESTIMATE_CALLS)},
    "causal": Part(80, [train("causal", "brimful-compiled", cache=SHARED), train("causal", "hf-tuned-8,hf-tuned-16", "--per-process", "2")]),
    "sft": Part(80, [train("sft", "brimful", "--seeds", "0,1,2")]),
    "finetune-0.5b": Part(95, [finetune("qwen2.5-0.5b", "long", 3)]),
    "finetune-1.5b": Part(105, [finetune("qwen2.5-1.5b", "long", 3, own="brimful-bf16")]),
    "finetune-lora": Part(100, [finetune("llama-8b-lora", "real", 2)]),
    "finetune-qlora": Part(110, [finetune("llama-8b-qlora", "real", 2)]),
    "record": Part(45, [["record.py", "--width", "1024", "--layers", "6", "--rows", "256", "--length", "128", "--steps", "50", "--rounds", "3",
                         "--memory-limit", "40GiB", "--json", "{results}/record.json"]]),
    "full": Part(55, [train("full", "brimful", cache=SHARED)]),
    "midrun": Part(100, [["oom_midrun.py", "--recover", "--layout", "packed", "--json", "{results}/midrun.json"]]),
    "preference-qwen": Part(90, [preference("qwen2.5-0.5b", "brimful,trl-tuned", "--most-settings", "3", "--steps", "20")]),
    "preference-t5": Part(70, [preference("t5", "brimful,two-models", "--most-settings", "2")]),
    "serve": Part(135, [serve("t5", "brimful,one"), serve("causal", "brimful,transformers,transformers-cb")]),
    "causal-full": Part(90, [train("causal-full", "brimful-compiled", cache=SHARED), train("causal-full", "hf-8,hf-compile-8", "--per-process", "2")]),
    "levers": Part(230, [train("pretrain", "brimful-padded,brimful-packed,brimful-packed-compile,brimful-packed-compile-graph,brimful-checkpointing")]),
    "peers": Part(200, [train("pretrain", "hf-32,hf-grouped,hf-tuned,hf-auto,hf-compile,lightning,old-2", "--per-process", "7")]),
    "caps": Part(190, [train("pretrain", "brimful,hf-tuned-32", "--cap", "8GiB,none")]),
    "sft-compiled": Part(70, [train("sft", "brimful-compiled")]),
    "hf-seeds": Part(60, [train("pretrain,sft", "hf-tuned-32", "--seeds", "1,2", "--per-process", "4")]),
}  # fmt: skip
"""The last ones are in no call: name them where there is time."""
TESTS = ("tests-packing", "tests-planning", "tests-step", "tests-training")
ESTIMATES = tuple(f"estimate-{part}" for part in range(ESTIMATE_CALLS))
CALLS: tuple[tuple[tuple[str, ...], ...], ...] = (
    (("tests-whole-card",), ("pretrain",), ("pretrain-hf",), ("causal",), (*TESTS, "learn", "survive", "losses", *ESTIMATES)),
    (("sft",), ("record",), ("finetune-0.5b",), ("finetune-1.5b",), ("finetune-lora",), ("finetune-qlora",)),
    (("full",), ("serve",), ("preference-t5",), ("preference-qwen",), ("causal-full",), ("midrun",)),
)  # fmt: skip
"""Slots, one after the other. Parts of a slot run at the same time, so only those that time nothing share one."""
LAST = ESTIMATES
"""A slot at the end of each call, for the time that is left. They go on where they were."""


class Running:
    """A part's commands, in a thread."""

    def __init__(self, name: str, folder: Path, scratch: Path, *, tiny: bool, others: bool) -> None:
        self.name, self.log, self.seconds, self.problem = name, folder / f"{name}.log", 0.0, ""
        self.started = time.monotonic()
        self.until = self.started + PARTS[name].most_s * (10 if tiny else 1)
        self._killed = float("inf")
        self._folder, self._scratch, self._tiny, self._others = folder, scratch, tiny, others
        self._process: subprocess.Popen[bytes] | None = None
        self._ended = False
        self.thread = threading.Thread(target=self._run, daemon=True)
        self.thread.start()

    def _run(self) -> None:
        folder = tempfile.TemporaryDirectory(prefix=f"card-{self.name}-", ignore_cleanup_errors=True)
        with folder as own, self.log.open("w") as log:
            for command in PARTS[self.name].commands:
                if self._ended:
                    break
                places = {"scratch": self._scratch, "results": self._folder, "part": self.name, "own": own}
                words = [word.format(**places) for word in (smaller(command) if self._tiny else command)]
                if words[0].endswith(".py"):
                    words[0] = str(ROOT / "bench" / words[0])
                # A group, to end it as a whole, and no session: those outlive a call that is cut off, beside what the next one times.
                self._process = subprocess.Popen(
                    [sys.executable, *words], stdin=subprocess.DEVNULL, stdout=log, stderr=subprocess.STDOUT, cwd=ROOT,
                    env=environment(self._scratch, others=self._others), process_group=0,
                )  # fmt: skip
                if self._process.wait() and not self._ended:
                    self.problem = (
                        f"{command[0] if command[0] != '-m' else command[1]} ended with {self._process.returncode}"
                    )
        self.seconds = time.monotonic() - self.started

    def end(self, why: str) -> None:
        """With everything that it started."""
        self._ended, self.problem = True, self.problem or f"it was ended: {why}"
        self._killed = min(self._killed, time.monotonic())
        if self._process is not None and self._process.poll() is None:
            with suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)

    @property
    def is_over(self) -> bool:
        return not self.thread.is_alive() or time.monotonic() > self._killed + STUCK_S

    def facts(self) -> dict[str, object]:
        """What is known of it in the results."""
        if not self.thread.is_alive():
            return {"seconds": self.seconds, "problem": self.problem, "tiny": self._tiny}
        return {
            "seconds": time.monotonic() - self.started,
            "problem": self.problem or "it had not ended",
            "tiny": self._tiny,
        }


def environment(scratch: Path, *, others: bool = False) -> dict[str, str]:
    """Of a part; with others beside it, it takes two threads of the CPU."""
    paths = (ROOT / "src", ROOT / "bench", ROOT / ".carry/site", *filter(None, [os.environ.get("PYTHONPATH")]))
    compiled = scratch / "compiled"
    return {
        "PYTORCH_ALLOC_CONF": "expandable_segments:True", "TORCHINDUCTOR_CACHE_DIR": str(compiled / "inductor"),
        "TRITON_CACHE_DIR": str(compiled / "triton"), **os.environ, "PYTHONPATH": os.pathsep.join(map(str, paths)),
        "HF_HUB_OFFLINE": "1", "PYTHONUNBUFFERED": "1", "TOKENIZERS_PARALLELISM": "false", **({"OMP_NUM_THREADS": "2"} if others else {}),
    }  # fmt: skip


def smaller(command: list[str]) -> list[str]:
    """A dry run of the same command on any machine."""
    script = command[0]
    drop = {
        "record.py": ("--width", "--rows", "--length", "--layers", "--memory-limit"), "serve.py": ("--memory-limit",), "estimate.py": ("--part", "--seconds"),
    }.get(script, ())  # fmt: skip
    values = {
        "--warm-seconds": "0.3", "--seconds": "1", "--tuned-seconds": "0.3", "--steps": "6", "--rounds": "1", "--device": "cpu", "--clients": "4",
        **({"--limits": "none"} if script == "dpo.py" else {}),
    }  # fmt: skip
    more = {
        "-m": [], "record.py": [], "serve.py": ["--quick"], "estimate.py": ["--trace-only", "--only", "all-pairs"],
        "oom_midrun.py": ["--device", "cpu", "--lengths", "24,24", "--global-batch", "8", "--precision", "fp64", "--memory-limit", "50MiB", "--take", "40%"],
    }  # fmt: skip
    pairs = zip(["", *command], command, strict=False)
    kept = [values.get(before, word) for before, word in pairs if word not in drop and before not in drop]
    return [*kept, *more.get(script, ["--tiny"])]


def main(argv: list[str] | None = None) -> int:
    args = _arguments(argv)
    if args.list:
        print(show_plan())
        return 0
    if args.report:
        with tempfile.TemporaryDirectory(prefix="card-") as folder:
            merge(args.report, Path(folder))
            print(_section(Path(folder), args.scratch))
        return 0
    try:
        slots = slots_of(args.what)
    except KeyError as unknown:
        print(f"card: no part {unknown.args[0]}. Try: --list")
        return 2
    args.output.mkdir(parents=True, exist_ok=True)
    args.scratch.mkdir(parents=True, exist_ok=True)
    if not args.tiny and any((ROOT / ".carry").glob("*.whl")) and not (ROOT / ".carry/site").exists():
        subprocess.run(
            ["bash", str(ROOT / "bench/carry.sh"), "unpack"], env={**os.environ, "PYTHON": sys.executable}, check=True
        )
    (args.scratch / "room").write_text(str(ROOM_GIB * 2**30))
    with tempfile.TemporaryDirectory(prefix="card-") as folder:
        done = run(slots, Path(folder), args)
        for part in done:
            if part.problem and OVER not in part.problem:
                lines = part.log.read_text(errors="replace").splitlines()
                print("\n".join([f"== {part.name}: {part.problem}", *(line[:300] for line in lines[-12:])]), flush=True)
        section = _section(Path(folder), args.scratch)
        (Path(folder) / "section.md").write_text(section)
        _save(Path(folder), args.output, done)
        print(f"\n{section}", flush=True)
    return int(any(part.problem for part in done))


def slots_of(what: list[str]) -> list[tuple[str, ...]]:
    """What runs, one slot after the other: those of the calls and the parts that are named, or everything."""
    slots: list[tuple[str, ...]] = []
    words = what or [str(number) for number in range(1, len(CALLS) + 1)]
    for word in words:
        if word.isdecimal() and 0 < int(word) <= len(CALLS):
            slots += CALLS[int(word) - 1]
        elif word in PARTS:
            slots.append((word,))
        else:
            raise KeyError(word)
    return [*slots, LAST] if any(map(str.isdecimal, words)) else slots


def run(slots: list[tuple[str, ...]], folder: Path, args: argparse.Namespace) -> list[Running]:
    until, saved, done = time.monotonic() + args.seconds - REPORT_S, time.monotonic(), list[Running]()

    def stop(*_: object) -> None:
        nonlocal until
        until = time.monotonic()

    before = signal.signal(signal.SIGTERM, stop)  # whoever ends the call gets what there is
    try:
        for slot in slots:
            if time.monotonic() > until:
                print(f"no time left for {', '.join(slot)}", flush=True)
                continue
            left = [Running(name, folder, args.scratch, tiny=args.tiny, others=len(slot) > 1) for name in slot]
            done += left
            while left:
                time.sleep(0.2)
                now = time.monotonic()
                for part in left:
                    if now > min(until, part.until):
                        part.end(OVER if now > until else "it took too long")
                ended = [part for part in left if part.is_over]
                for part in ended:
                    facts, about = part.facts(), PARTS[part.name].about_s
                    print(
                        f"{part.name}: {facts['problem'] or 'done'} after {facts['seconds']:.0f} s, expected {about}",
                        flush=True,
                    )
                left = [part for part in left if part not in ended]
                if ended or now - saved > SAVE_EVERY_S:
                    _save(folder, args.output, done)
                    saved = now
    finally:
        signal.signal(signal.SIGTERM, before)
    return done


def _section(folder: Path, scratch: Path) -> str:
    """In a process of its own, which imports the benches."""
    command = [sys.executable, str(ROOT / "bench/claims.py"), str(folder)]
    try:
        done = subprocess.run(command, env=environment(scratch), capture_output=True, text=True, timeout=60)
    except subprocess.TimeoutExpired:
        return "claims.py did not end. Try: --report"
    return done.stdout + (done.stderr[-2000:] if done.returncode else "")


def _save(folder: Path, output: Path, parts: list[Running]) -> None:
    """The files as they are now. Some change or go meanwhile, and that must not end the call, nor a disk that is full."""
    with suppress(OSError):
        (folder / "parts.json").write_text(json.dumps({part.name: part.facts() for part in parts}))
        with tarfile.open(output / "results.part", "w:gz") as archive:
            for file in sorted(one for one in folder.iterdir() if one.is_file()):
                with suppress(FileNotFoundError):
                    content = file.read_bytes()
                    entry = tarfile.TarInfo(file.name)
                    entry.size, entry.mtime = len(content), int(time.time())
                    archive.addfile(entry, BytesIO(content))
        (output / "results.part").replace(output / "results.tgz")


def merge(archives: list[Path], folder: Path) -> None:
    """Files of several calls: lines one after the other, of other files the latest."""
    for archive in archives:
        with tarfile.open(archive) as opened:
            for member in opened.getmembers():
                stream, target = opened.extractfile(member), folder / Path(member.name).name
                if stream is None:
                    continue
                content = stream.read()
                if target.name == "parts.json" and target.exists():
                    content = json.dumps({**json.loads(target.read_text()), **json.loads(content)}).encode()
                elif target.suffix == ".jsonl" and target.exists():
                    content = target.read_bytes().rstrip() + b"\n" + content  # the last line may have been cut off
                target.write_bytes(content)


def show_plan() -> str:
    lines = []
    for number, slots in enumerate(CALLS, 1):
        total = sum(max(PARTS[name].about_s for name in slot) for slot in slots)
        lines.append(f"call {number}, about {total} s")
        lines += [f"  {' + '.join(slot)}: {max(PARTS[name].about_s for name in slot)} s" for slot in slots]
        lines.append(f"  {' + '.join(LAST)}: what is left")
    planned = {name for slots in CALLS for slot in slots for name in slot}
    lines += ["in no call", *(f"  {name}: {part.about_s} s" for name, part in PARTS.items() if name not in planned)]
    return "\n".join(lines)


def _arguments(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("what", nargs="*", metavar="CALL|PART", help="calls by number, or parts by name (all calls)")
    parser.add_argument(
        "--seconds", type=float, default=565.0, help="after which what still runs is ended (%(default)s)"
    )
    parser.add_argument("--output", type=Path, default=Path(os.environ.get("OUT", ROOT / ".carry/card")))
    parser.add_argument(
        "--scratch",
        type=Path,
        default=Path(tempfile.gettempdir()) / "brimful-card",
        help="tokens, weights and compiled code, kept for the next call",
    )
    parser.add_argument("--report", type=Path, nargs="+", metavar="FILE", help="print the section of these results.tgz")
    parser.add_argument("--tiny", action="store_true", help="small models, also on a CPU")
    parser.add_argument("--list", action="store_true", help="print parts and calls")
    return parser.parse_args(argv)


if __name__ == "__main__":
    sys.exit(main())
