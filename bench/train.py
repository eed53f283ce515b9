"""Training speed side by side: Hugging Face's Trainer, Lightning and Brimful on the same rows, in one run under one cap.

    python bench/train.py --data data/chatlm/train_3k.parquet --cap 20GiB --output train.jsonl
    python bench/train.py --data … --cap 20GiB,8GiB,none --cases pretrain,sft --only hf-grouped,brimful-padded --seeds 0,1,2
    python bench/train.py --data … --tiny --cases pretrain,causal          a dry run of small models, also on a CPU
    python bench/train.py --list                                           the entries of every case
    python bench/train_plots.py train.jsonl --folder docs                  plots of what was measured

`train_cases.py` says what is trained, `train_peers.py` how each trainer is driven. Every entry runs in a process of its own
(`--per-process` puts several into one, to spare imports) and ends after `--steps` steps, `--seconds-per-entry`, or
`--warm-seconds` after its first step, whichever comes first. Its result is one line of JSON in `--output` as soon as it has ended; a failure is a result too. A table for each
case and cap follows at the end. Lines are appended, so several calls may share a file, and `--table FILE` prints its tables.

**rows/s** is the median over the second half of the steps, without the first three if there are more. A step is timed by
events on the GPU, without waiting for them. **run** is what `--steps` steps take from the built process: model, plan, compilation and warm-up are
in it, imports are not; `~` marks runs that were ended early and continued at the median step. **plan** is the time for
Brimful's plan without what it compiles, **compile** all that torch.compile took, before the first step or later. Compiled code is not reused
from earlier processes unless `--compile-cache` names a folder; run, plan, compile and first step are then those of the runs that found
nothing there. **peak** and **reserved** are the most during training steps,
without planning. **predicted** is how far the peak that Brimful's plan predicts for these steps is from theirs, and **OOMs**
are those that it survived in them. **padding** is the share of computed tokens that are not real. **useful** is the FLOP/s of the real rows
over the best matrix product that the same process measured; **computed** includes padding. All is in bf16 autocast on a
GPU. **loss** is the mean per token over the last ten steps that all entries of the table have, ± its standard deviation over the
seeds; the file has it for every step.

The cap is torch's on the process (`set_per_process_memory_fraction`); Brimful is also told it as its memory limit. A CPU has
none. All have `expandable_segments` on, which Brimful's command line sets for itself.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections import deque
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from brimful.errors import UserError, in_one_line
from brimful.units import parse_bytes

Entry = tuple[str, dict[str, Any]]
"""Which trainer (`train_peers.TRAINERS`), and its options."""

TUNED: dict[str, Any] = {"group_by_length": True, "cudnn_attention": False, "logging_nan_inf_filter": False}
"""What an expert adds: similar lengths together, no kernels that are prepared for every new shape, no wait per micro-batch."""

PACKED: dict[str, Any] = {"layout": "packed", "compile": "off", "cuda_graphs": "off", "checkpointing": "off"}
# The options of `brimful` entries are keywords of `brimful.train`. Each line adds a lever: rows alike in length in one step, then
# packed rows, for which their order does not matter any more, then compiled blocks, then CUDA graphs, then checkpointing. `brimful`
# has no setting, and compiles on a GPU unless the run is too short to win the time back; `brimful-compiled` compiles all the same.
BRIMFUL: dict[str, Entry] = {
    "brimful-padded": ("brimful", {"layout": "padded"}),
    "brimful-window": ("brimful", {"layout": "padded", "mix": "window:50"}),
    "brimful-packed": ("brimful", PACKED),
    "brimful-packed-compile": ("brimful", {**PACKED, "compile": "on"}),
    "brimful-packed-compile-graph": ("brimful", {**PACKED, "compile": "on", "cuda_graphs": "on"}),
    "brimful-checkpointing": ("brimful", {"layout": "packed", "compile": "on", "checkpointing": "on"}),
    "brimful": ("brimful", {}),
    "brimful-compiled": ("brimful", {"compile": "on"}),
}
CHAT: dict[str, Entry] = {
    "hf-32": ("hf", {"batch": 32}),
    "hf-grouped": ("hf", {"batch": 32, "group_by_length": True}),
    "hf-auto": ("hf", {"batch": 128, "auto_find_batch_size": True}),
    "hf-compile": ("hf", {"batch": 32, "torch_compile": True}),
    "lightning": ("lightning", {"batch": 32}),
    "hf-grouped-no-cudnn": ("hf", {"batch": 32, "group_by_length": True, "cudnn_attention": False}),
    "hf-tuned-32": ("hf", {"batch": 32, **TUNED}),
    "hf-tuned": ("hf", {"batch": 64, **TUNED}),
    "old-2": ("hf", {"batch": 2}),
    **BRIMFUL,
}
CAUSAL: dict[str, Entry] = {
    "hf-4": ("hf", {"batch": 4}),
    "hf-8": ("hf", {"batch": 8}),
    "hf-16": ("hf", {"batch": 16}),
    "hf-32": ("hf", {"batch": 32}),
    "hf-grouped-8": ("hf", {"batch": 8, "group_by_length": True}),
    "hf-grouped-16": ("hf", {"batch": 16, "group_by_length": True}),
    "hf-compile-8": ("hf", {"batch": 8, "torch_compile": True}),
    "hf-compile-16": ("hf", {"batch": 16, "torch_compile": True}),
    "hf-tuned-8": ("hf", {"batch": 8, **TUNED}),
    "hf-tuned-16": ("hf", {"batch": 16, **TUNED}),
    "hf-tuned-32": ("hf", {"batch": 32, **TUNED}),
    "hf-tuned-compile-32": ("hf", {"batch": 32, **TUNED, "torch_compile": True}),
    "hf-grouped-compile-16": ("hf", {"batch": 16, "group_by_length": True, "torch_compile": True}),
    "hf-auto": ("hf", {"batch": 64, "auto_find_batch_size": True}),
    "lightning": ("lightning", {"batch": 8}),
    "old-2": ("hf", {"batch": 2}),
    **BRIMFUL,
}
ENTRIES = {"pretrain": CHAT, "sft": CHAT, "full": CHAT, "causal": CAUSAL, "causal-full": CAUSAL}
BEST_HF = "hf, best of these"
LOSS_STEPS = 10
GRACE_S = 20
"""A step or a compilation that goes on this much longer than an entry may is interrupted from within."""
KILL_S = 100
"""After this much more, which imports and a stuck kernel may take, the process is killed."""


def main(argv: list[str] | None = None) -> int:
    args = _arguments(argv)
    if args.process:
        return run_jobs(json.load(sys.stdin))
    if args.list:
        print("\n".join(f"{case}: {', '.join(entries)}" for case, entries in ENTRIES.items()))
        return 0
    if args.table:
        print(show_tables(read_results(args.table)))
        return 0
    with tempfile.TemporaryDirectory(prefix="bench-train-") as scratch:
        folder = args.folder or Path(scratch)
        output = args.output or folder / "train.jsonl"
        output.parent.mkdir(parents=True, exist_ok=True)
        before = len(read_results(output))
        jobs = _jobs(args, folder, output)
        try:
            _prepare(jobs, args.data)
        except UserError as error:
            print(f"train: --data: {error}", file=sys.stderr)
            return 2
        if args.prepare:
            return 0
        _run_all(jobs, args)
        print(show_tables(read_results(output)[before:]))
    return 0


def _jobs(args: argparse.Namespace, folder: Path, output: Path) -> list[dict[str, Any]]:
    """Seeds outermost: if time runs out, every entry has been measured as often as the others."""
    return [
        {"case": case, "entry": entry, "trainer": ENTRIES[case][entry][0], "options": ENTRIES[case][entry][1],
         "cap_bytes": cap, "seed": seed, "steps": args.steps, "seconds": args.seconds_per_entry,
         "warm_seconds": args.warm_seconds, "tiny": args.tiny, "device": args.device, "workers": args.workers, "folder": str(folder), "output": str(output)}
        for seed in args.seeds for case in args.cases for cap in args.cap for entry in ENTRIES[case]
        if args.only is None or entry in args.only
    ]  # fmt: skip


def python_path(*sites: str) -> str:
    """Where a process finds Brimful, the benches and what `carry.sh` unpacked, whatever folder it starts in."""
    root = Path(__file__).resolve().parents[1]
    carried = [path for path in (root / ".carry" / name for name in sites or ("site",)) if path.is_dir()]
    own = [Path(one).absolute() for one in os.environ.get("PYTHONPATH", "").split(os.pathsep) if one]
    return os.pathsep.join(map(str, (root / "src", root / "bench", *carried, *own)))


def _prepare(jobs: list[dict[str, Any]], data: str) -> None:
    """Tokenize before anything is timed."""
    from train_cases import Case

    for name, folder, tiny in dict.fromkeys((job["case"], job["folder"], job["tiny"]) for job in jobs):
        Case(name=name, folder=Path(folder), tiny=tiny).prepare(data)


def _run_all(jobs: list[dict[str, Any]], args: argparse.Namespace) -> None:
    """Every job has a line in the output afterwards, whatever happened to its process."""
    left, until = deque(jobs), time.monotonic() + (args.total_seconds or float("inf"))
    while left:
        if time.monotonic() > until:
            for job in left:
                write_result(job, {"status": "skipped", "error": f"--total-seconds {args.total_seconds:g} were over"})
            return
        batch = [left.popleft() for _ in range(min(args.per_process, len(left)))]
        before = len(read_results(batch[0]["output"]))
        problem = _run_process(batch, args.compile_cache)
        done = len(read_results(batch[0]["output"])) - before
        if done < len(batch):  # it died in the first one without a line; the others have not begun
            write_result(batch[done], {"status": "error", "error": problem or "the process ended early"})
            left.extendleft(reversed(batch[done + 1 :]))


def _run_process(jobs: list[dict[str, Any]], compile_cache: Path | None) -> str:
    """Run these in a new process. Returns how it ended, if not as it should."""
    with tempfile.TemporaryDirectory(prefix="bench-train-") as scratch:
        cache = Path(compile_cache or scratch)
        environment = {
            "PYTORCH_ALLOC_CONF": "expandable_segments:True",
            **os.environ,
            "TORCHINDUCTOR_CACHE_DIR": str(cache / "inductor"),
            "TRITON_CACHE_DIR": str(cache / "triton"),
            "BRIMFUL_CACHE": str(cache / "brimful"),
            "TOKENIZERS_PARALLELISM": "false",
        }
        process = subprocess.Popen(
            [sys.executable, __file__, "--process"],
            stdin=subprocess.PIPE,
            stdout=sys.stderr,
            text=True,
            env=environment,
        )
        try:
            process.communicate(json.dumps(jobs), timeout=sum(job["seconds"] + GRACE_S for job in jobs) + KILL_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
            return "the process did not answer any more and was killed"
        return "" if process.returncode == 0 else f"the process ended with code {process.returncode}"


def run_jobs(jobs: list[dict[str, Any]]) -> int:
    """In the process of the jobs: one after the other, each with the device to itself."""
    import gc

    import torch

    before = dict(os.environ)
    for job in jobs:
        _import(job["trainer"])
        write_result(job, run_job(job))
        os.environ.clear()
        os.environ.update(before)  # accelerate keeps settings there, compilation among them
        torch.backends.cuda.enable_cudnn_sdp(True)
        _forget_accelerate()
        if "torch._dynamo" in sys.modules:
            torch._dynamo.reset()
        gc.collect()
        if torch.cuda.is_available():
            torch.cuda.empty_cache()
    return 0


def _forget_accelerate() -> None:
    if "accelerate" in sys.modules:
        from accelerate.state import AcceleratorState, GradientState

        AcceleratorState._reset_state(reset_partial_state=True)
        GradientState._reset_state()


def run_job(job: dict[str, Any]) -> dict[str, Any]:
    """One entry: its figures, or why there are none."""
    import torch

    from brimful.memory.oom import is_oom
    from brimful.training.metrics import peak_flops
    from midrun_peers import quiet
    from train_cases import Case
    from train_peers import TRAINERS, Clock, Overdue, Training

    device = _device(job["device"])
    case = Case(name=job["case"], folder=Path(job["folder"]), tiny=job["tiny"])
    _cap(device, job["cap_bytes"])
    ceiling, how = peak_flops(device, torch.bfloat16 if device.type == "cuda" else torch.float32)
    compiled_s, compiled_before = _compile_seconds(), _has_compiled_code()
    clock = Clock(device=device, steps=job["steps"], seconds=job["seconds"], warm_seconds=job["warm_seconds"])
    training = Training(
        case=case, options=job["options"], clock=clock, seed=job["seed"], workers=_workers(job["workers"], device),
        cap_bytes=job["cap_bytes"] if device.type == "cuda" else None,
    )  # fmt: skip
    status, error = "ok", ""
    try:
        with quiet(), _time_limit(job["seconds"] + GRACE_S, Overdue):
            TRAINERS[job["trainer"]](training)
    except Overdue:
        status, error = "stopped", f"step {len(clock.done) + 1} had not ended after {job['seconds'] + GRACE_S:g} s"
    except Exception as raised:
        status, error = ("OOM" if is_oom(raised) else "error"), in_one_line(raised)[:400]
    figures = clock.figures(case, ceiling) if clock.done and status in ("ok", "stopped") else {"steps": len(clock.done)}
    if status == "ok" and not clock.done:
        status, error = "error", "it ended without a step"
    return {
        "status": status, "error": error, **figures, **training.notes,
        "compile_s": (_compile_seconds() - compiled_s) or None, "compiled_before": compiled_before, "ceiling_flops_per_s": ceiling, "ceiling": how,
        "global_batch": case.global_batch, "device_name": _device_name(device), "versions": _versions(),
    }  # fmt: skip


def _compile_seconds() -> float:
    """What torch.compile has taken in this process, forward and backward."""
    if "torch._dynamo" not in sys.modules:
        return 0.0
    from torch._dynamo.utils import calculate_time_spent

    return calculate_time_spent()["total_wall_time"]


def _has_compiled_code() -> bool:
    """Whether an earlier run left any on disk, so that this one compiles less than a first run."""
    folders = [os.environ.get(name) for name in ("TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR")]
    return any(Path(folder).is_dir() and any(Path(folder).iterdir()) for folder in folders if folder)


def cold(runs: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Those that found no compiled code, for what the time to compile is part of; all of them if there are none."""
    return [one for one in runs if not one.get("compiled_before")] or runs


def _cap(device: Any, cap_bytes: int | None) -> None:
    import torch

    if device.type == "cuda":
        total = torch.cuda.get_device_properties(device).total_memory
        torch.cuda.set_per_process_memory_fraction(min(1.0, cap_bytes / total) if cap_bytes else 1.0, device)


def _import(trainer: str) -> None:
    """Now, so that imports are not timed."""
    import transformers
    import transformers.models.gpt2.modeling_gpt2
    import transformers.models.t5.modeling_t5

    if trainer == "hf":
        _ = transformers.Seq2SeqTrainer
    elif trainer == "lightning":
        from peers import _import_lightning

        _import_lightning()
    else:
        import brimful.training.session  # noqa: F401


def _time_limit(seconds: float, error: type[BaseException]) -> Any:
    """Interrupt what runs in this block after `seconds`, even a compilation."""
    import contextlib
    import signal

    def interrupt(*_: Any) -> None:
        raise error

    @contextlib.contextmanager
    def limited() -> Iterator[None]:
        before = signal.signal(signal.SIGALRM, interrupt)
        signal.setitimer(signal.ITIMER_REAL, seconds)
        try:
            yield
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0)
            signal.signal(signal.SIGALRM, before)

    return limited()


def _device(name: str) -> Any:
    import torch

    if name == "auto":
        name = "cuda:0" if torch.cuda.is_available() else "cpu"
    return torch.device(name)


def _device_name(device: Any) -> str:
    import torch

    return torch.cuda.get_device_name(device) if device.type == "cuda" else "CPU"


def _workers(wanted: int | None, device: Any) -> int:
    return wanted if wanted is not None else 4 if device.type == "cuda" else 0


def _versions() -> dict[str, str]:
    from finders import _versions

    return _versions()


def write_result(job: dict[str, Any], result: dict[str, Any]) -> None:
    """Append one line to the output, and say it in short on stderr."""
    named = {name: job[name] for name in ("case", "entry", "trainer", "options", "cap_bytes", "seed", "tiny")}
    date = datetime.now(UTC).isoformat(timespec="seconds")
    with Path(job["output"]).open("a") as file:
        file.write(json.dumps({"date": date, **named, **result}) + "\n")
    speed = f"{result['rows_per_s']:.4g} rows/s" if "rows_per_s" in result else f"{result['status']}: {result['error']}"
    cap = _show_cap(job["cap_bytes"])
    print(f"{job['case']}, {cap}, {job['entry']}, seed {job['seed']}: {speed}", file=sys.stderr, flush=True)


def read_results(path: Path | str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in Path(path).read_text().splitlines()] if Path(path).exists() else []


def still_needed(
    jobs: list[dict[str, Any]], lines: list[dict[str, Any]], ladders: tuple[str, ...]
) -> list[dict[str, Any]]:
    """Jobs of contestants that have no line yet. A ladder ends with the first of its settings that runs."""
    ran = {(line["contestant"], line["setting"]) for line in lines}
    climbed = {line["contestant"] for line in lines if line["contestant"] in ladders and line["status"] == "ok"}
    return [job for job in jobs if (job["contestant"], job["setting"]) not in ran and job["contestant"] not in climbed]


def show_tables(results: list[dict[str, Any]]) -> str:
    """A table for each case and cap: medians over the seeds."""
    tables = []
    for case, cap in dict.fromkeys((one["case"], one["cap_bytes"]) for one in results):
        some = [one for one in results if (one["case"], one["cap_bytes"]) == (case, cap)]
        about = next((one for one in some if "device_name" in one), {})
        title = f"{case}, {about.get('device_name', 'unknown device')}, cap {_show_cap(cap)}, {about.get('global_batch', '?')} rows per step"
        tables.append(f"{title}{' (tiny)' if some[0]['tiny'] else ''}\n\n{show_table(some)}")
    return "\n\n".join(tables)


HEAD = ("", "rows/s", "× best HF", "tokens/s", "run", "plan", "compile", "first step", "peak", "predicted", "reserved", "OOMs", "padding", "micro-batches", "useful", "computed", "loss", "seeds", "steps")  # fmt: skip


def show_table(results: list[dict[str, Any]]) -> str:
    from oom_midrun import _markdown

    by_entry: dict[str, list[dict[str, Any]]] = {}
    for one in results:
        by_entry.setdefault(one["entry"], []).append(one)
    speeds = {entry: _median(runs, "rows_per_s") for entry, runs in by_entry.items()}
    peers = [entry for entry, runs in by_entry.items() if runs[0]["trainer"] == "hf" and speeds[entry] is not None]
    best = max(peers, key=lambda entry: speeds[entry] or 0.0, default=None)
    measured = [one for one in results if one.get("loss")]
    last = min((len(one["loss"]) for one in measured), default=0)
    table = [HEAD, *(_cells(entry, runs, speeds.get(best or ""), last) for entry, runs in by_entry.items())]
    if best is not None:
        table.append((f"{BEST_HF}: {best}", *table[1 + list(by_entry).index(best)][1:]))
    problems = [
        f"{one['entry']}, seed {one['seed']}: {one['status']}: {one['error']}" for one in results if one["error"]
    ]
    return "\n".join([_markdown(table), *([""] if problems else []), *problems])


def _cells(entry: str, runs: list[dict[str, Any]], best: float | None, last: int) -> tuple[str, ...]:
    speed = _median(runs, "rows_per_s")
    if speed is None:
        return (entry, runs[0]["status"], *[""] * (len(HEAD) - 4), str(len(runs)), str(runs[0].get("steps", 0)))
    first = cold([one for one in runs if "rows_per_s" in one])

    def show(name: str, text: str, scale: float = 1.0, some: list[dict[str, Any]] = runs) -> str:
        return "–" if (found := _median(some, name)) is None else text.format(found * scale)

    early = "~" if any(one.get("run_s_extrapolated") for one in first) else ""
    losses = [statistics.mean(one["loss"][max(0, last - LOSS_STEPS) : last]) for one in runs if one.get("loss")]
    return (
        entry,
        f"{speed:.4g}",
        "–" if best is None else f"{speed / best:.2f}",
        show("tokens_per_s", "{:,.0f}"),
        early + show("run_s", "{:.1f} s", some=first),
        show("plan_s", "{:.1f} s", some=first),
        show("compile_s", "{:.1f} s", some=first),
        show("first_step_s", "{:.1f} s", some=first),
        show("peak_bytes", "{:.2f} GiB", 2**-30),
        show("prediction_error", "{:+.1%}"),
        show("reserved_bytes", "{:.2f} GiB", 2**-30),
        show("ooms", "{:g}"),
        show("padding", "{:.1%}"),
        show("micro_batches", "{:g}"),
        show("useful_share", "{:.1%}"),
        show("computed_share", "{:.1%}"),
        f"{statistics.mean(losses):.4f}" + (f" ± {statistics.stdev(losses):.4f}" if len(losses) > 1 else ""),
        str(len([one for one in runs if "rows_per_s" in one])),
        show("steps", "{:g}"),
    )


def _median(runs: list[dict[str, Any]], name: str) -> float | None:
    values = [one[name] for one in runs if one.get(name) is not None and "rows_per_s" in one]
    return statistics.median(values) if values else None


def _show_cap(cap_bytes: int | None) -> str:
    return "none" if cap_bytes is None else f"{cap_bytes / 2**30:g} GiB"


def _arguments(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument(
        "--data", default="data/chatlm/train_3k.parquet", help="rows of prompts and responses (%(default)s)"
    )
    parser.add_argument("--cases", type=_some_of(list(ENTRIES)), default=["pretrain"], help="some of %(choices)s".replace("%(choices)s", ", ".join(ENTRIES)))  # fmt: skip
    names = list(dict.fromkeys(entry for entries in ENTRIES.values() for entry in entries))
    parser.add_argument("--only", type=_some_of(names), help="entries, as --list shows them (all of the case)")
    parser.add_argument(
        "--cap", type=_caps, default=[None], help="memory of the process, such as 20GiB,8GiB,none (none)"
    )
    parser.add_argument(
        "--seeds", type=lambda text: [int(one) for one in text.split(",")], default=[0], help="such as 0,1,2 (0)"
    )
    parser.add_argument("--steps", type=int, default=300, help="optimizer steps of the run (%(default)s)")
    parser.add_argument(
        "--seconds-per-entry",
        type=float,
        default=60.0,
        help="after which an entry begins no further step (%(default)s)",
    )
    parser.add_argument("--warm-seconds", type=float, help="after which, from its first step on, it begins none either")
    parser.add_argument("--total-seconds", type=float, help="after which no further process is started")
    parser.add_argument("--per-process", type=int, default=1, help="entries that share a process (%(default)s)")
    parser.add_argument("--workers", type=int, help="loader workers of the peers (4 on a GPU, 0 on a CPU)")
    parser.add_argument("--compile-cache", type=Path, help="keep compiled code there between processes")
    parser.add_argument("--device", default="auto", help="cuda:0 or cpu (the first GPU, else the CPU)")
    parser.add_argument("--folder", type=Path, help="keep the tokenized rows there")
    parser.add_argument("--output", type=Path, help="append the results there, one JSON line for each")
    parser.add_argument("--prepare", action="store_true", help="only tokenize the rows into --folder")
    parser.add_argument("--tiny", action="store_true", help="small models and steps of 16 rows")
    parser.add_argument("--list", action="store_true", help="print the entries of every case")
    parser.add_argument("--table", type=Path, metavar="FILE", help="print the tables of an output file")
    parser.add_argument("--process", action="store_true", help=argparse.SUPPRESS)
    return parser.parse_args(argv)


def _some_of(known: list[str]) -> Any:
    def parse(text: str) -> list[str]:
        names = text.split(",")
        if unknown := [name for name in names if name not in known]:
            raise argparse.ArgumentTypeError(f"unknown {', '.join(unknown)}. Try: {', '.join(known)}")
        return names

    return parse


def _caps(text: str) -> list[int | None]:
    try:
        return [None if one == "none" else parse_bytes(one, flag="--cap") for one in text.split(",")]
    except UserError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


if __name__ == "__main__":
    sys.exit(main())
