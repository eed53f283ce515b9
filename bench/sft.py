"""Fine-tuning language models on a small GPU: Brimful without a setting against TRL, TRL tuned by hand, Liger and Unsloth.

    python bench/sft.py --models qwen2.5-0.5b --limits 24GiB --data long --output sft.jsonl
    python bench/sft.py --models llama-8b-qlora --limits 12GiB,8GiB --contestants brimful,trl-tuned --seconds 20
    python bench/sft.py --survive --models llama-8b-lora --limits 24GiB   memory is taken away in the middle of the run
    python bench/sft.py --tiny --seconds 2                                a dry run of small models, also on a CPU
    python bench/sft.py --check                                           which packages are there
    python bench/sft.py --table sft.jsonl                                 the tables of earlier calls

`sft_cases.py` says what is trained, `sft_peers.py` how each trainer is driven. A limit is torch's cap on the process
(`set_per_process_memory_fraction`), which stands for a smaller card. A CPU has none.

    brimful       no setting: batch, packing, checkpointing, kernels, compilation are its plan's
    brimful-bf16  the same with `weights="bf16"`, which changes the training, so only a user can choose it; without it the weights,
                  gradients and optimizer state of 1.5B take 23 GiB, more than Brimful plans to fill of 24
    trl           TRL's defaults; after an out-of-memory error what a user tries next: bf16 weights, then half the batch, …;
                  8B begin with bf16 weights
    trl-tuned     the best of a small grid of batch, packing and checkpointing (`GRIDS`), as an expert finds it
    trl-liger     the same over fewer settings with Liger's kernels
    unsloth       with its own checkpointing, if it can be imported

Contestants of one trainer share a process, since its imports take as long as a setting; one that dies or hangs costs the line of
the setting it was at, and the next process goes on after that. Brimful has a process for each of its contestants. Each setting is
one line of JSON in `--output` as soon as it has ended; lines are appended, so calls may share a file.

**tokens/s** counts real tokens, never padding: the median over the second half of the steps, without the first three if
there are more. Steps are begun until `--seconds` after the first one (`--tuned-seconds` for a setting of a grid).
**peak** and **reserved** are the most in training steps. **predicted** is how far Brimful's prediction for those steps was
off. **OOMs** are all that the process met, planning and discarded settings included. **search** is what it took to find the
setting: Brimful's plan without its compilation, or all other settings a user had to run. **batch** says whether every
step had the global batch. **loss** is that of the first step, and **apart** the largest relative difference over the first
three steps from Brimful's (from the first contestant's where Brimful has none); it should be bf16 noise, below 1 %, and is
not given where a step had other rows. Equal losses do not prove equal training, so the weights that a contestant trains are
counted, too, and one that trains others is an error. A grid's best is the highest of several short measurements, which
favours it a little.
"""

import argparse
import contextlib
import importlib.util
import json
import os
import subprocess
import sys
import tempfile
import time
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from brimful.errors import UserError, in_one_line
from brimful.files import FileLock
from brimful.units import show_bytes
from train import GRACE_S, KILL_S, _caps, _show_cap, _some_of, python_path, read_results, still_needed

Setting = tuple[str, str, dict[str, Any]]
"""Its name, the trainer (`sft_peers.TRAINERS`), the trainer's options."""
BF16 = {"dtype": "bfloat16"}
NO_GC = {"gradient_checkpointing": False}
PACKED = {"packing": True}
FLEX = {"attention": "flex_attention"}
GRIDS: dict[str, dict[str, dict[str, Any]]] = {
    "small": {
        "packed 1": {"batch": 1, **PACKED, **NO_GC},
        "packed 4, checkpointing, flex": {"batch": 4, **PACKED, **FLEX},
        "batch 4": {"batch": 4, **NO_GC},
        "batch 16, checkpointing, grouped": {"batch": 16, "train_sampling_strategy": "group_by_length"},
        "packed 4, checkpointing": {"batch": 4, **PACKED},
        "batch 8": {"batch": 8, **NO_GC},
        "batch 16, checkpointing": {"batch": 16},
    },
    "8b": {
        "packed 2, checkpointing, flex": {"batch": 2, **PACKED, **FLEX},
        "batch 4, checkpointing, grouped": {"batch": 4, "train_sampling_strategy": "group_by_length"},
        "packed 1, checkpointing": {"batch": 1, **PACKED},
        "batch 8, checkpointing": {"batch": 8},
        "batch 2, checkpointing": {"batch": 2},
        "batch 1": {"batch": 1, **NO_GC},
    },
}
"""Settings of TRL that an expert would try, those first that promise most. Models below 2B have the first grid."""
LIGER = {
    "small": ("packed 4, checkpointing", "batch 8", "batch 16, checkpointing"),
    "8b": ("packed 1, checkpointing", "batch 2, checkpointing"),
}
"""The settings of the grid that are tried with Liger."""
SFT_CONTESTANTS = ("brimful", "brimful-bf16", "trl", "trl-tuned", "trl-liger", "unsloth")
MODELS = ("qwen2.5-0.5b", "qwen2.5-1.5b", "llama-8b-lora", "llama-8b-qlora")
DATA = ("real", "long")
NEEDED = {"brimful": (), "brimful-bf16": (), "trl": ("trl", "datasets"), "trl-tuned": ("trl", "datasets"),
          "trl-liger": ("trl", "datasets", "liger_kernel"), "unsloth": ("unsloth", "trl", "datasets")}  # fmt: skip
METHOD_NEEDS = {"qwen2.5-0.5b": (), "qwen2.5-1.5b": (), "llama-8b-lora": ("peft",), "llama-8b-qlora": ("peft", "bitsandbytes")}  # fmt: skip
IN_GRID = ("trl-tuned", "trl-liger", "unsloth")
"""All of their settings are run, each for a short time; of the others the first that runs."""
LADDERS = ("trl",)
COMPARED_STEPS = 3
LEFT_SHARE = 0.6
"""Of what a step needs beside the weights, what `--survive` leaves it."""
SURVIVE_STEPS, TAKE_AT, GIVE_BACK_AFTER = 24, 8, 8
ROOT = Path(__file__).resolve().parents[1]


def settings(contestant: str, model: str) -> list[Setting]:
    """What a contestant runs on this model, in order."""
    size = "8b" if "8b" in model else "small"
    needs_bf16 = BF16 if model in ("qwen2.5-1.5b", "llama-8b-lora") else {}  # 16 bytes a weight would not fit in 24 GiB
    if contestant == "brimful":
        return [("no setting", "brimful", {})]
    if contestant == "brimful-bf16":
        return [("bf16 weights", "brimful", {"weights": "bf16"})] if model.startswith("qwen") else []
    if contestant == "trl":
        quantized = model.endswith("qlora")  # its weights are in bf16 already
        steps = {"defaults": {}, "batch 4": {"batch": 4}, "batch 2": {"batch": 2}, "batch 1": {"batch": 1}}
        if quantized:
            return [(name, "trl", options) for name, options in steps.items()]
        later = {f"bf16 weights, {'batch 8' if name == 'defaults' else name}": {**options, **BF16} for name, options in steps.items()}  # fmt: skip
        first = {} if "8b" in model else {"defaults": {}}  # 30 GiB of weights in fp32 alone
        return [(name, "trl", options) for name, options in {**first, **later}.items()]
    if contestant == "unsloth":
        return [(f"batch {batch}", "unsloth", {"batch": batch}) for batch in (2, 8)]
    grid = GRIDS[size]
    names = LIGER[size] if contestant == "trl-liger" else tuple(grid)
    liger = {"use_liger_kernel": True} if contestant == "trl-liger" else {}
    return [(name, "trl", {**grid[name], **needs_bf16, **liger}) for name in names]


def main(argv: list[str] | None = None) -> int:
    args = _arguments(argv)
    if args.process:
        return run_jobs(json.load(sys.stdin))
    if args.check:
        print(_packages())
        return 0
    if args.table:
        print(show_tables(read_results(args.table)))
        return 0
    with tempfile.TemporaryDirectory(prefix="bench-sft-") as scratch:
        folder = (args.folder or Path(scratch)).resolve()
        output = (args.output or folder / "sft.jsonl").resolve()
        output.parent.mkdir(parents=True, exist_ok=True)
        before = len(read_results(output))
        try:
            _prepare(args, folder)
        except (UserError, OSError) as error:
            print(f"sft: the rows, tokens or weights could not be made: {error}", file=sys.stderr)
            return 2
        if args.prepare:
            return 0
        if args.survive:
            return _survive(args, folder, output)
        _compete(args, folder, output)
        print(show_tables(read_results(output)[before:]))
    return 0


def _prepare(args: argparse.Namespace, folder: Path) -> None:
    """Rows, tokens and weights, before anything is timed. In a process of its own, which leaves no memory on the GPU.

    Calls side by side share a folder, and models of one shape their weights, so one call writes at a time.
    """
    folder.mkdir(parents=True, exist_ok=True)
    with FileLock(folder / "prepare.lock", wait=True):
        _prepare_all(args, folder)


def _prepare_all(args: argparse.Namespace, folder: Path) -> None:
    for model in args.models:
        for data in args.data:
            started = time.perf_counter()
            code = f"from sft_cases import *; Case(model={model!r}, data={data!r}, folder=Path({str(folder)!r}), tiny={args.tiny}).prepare(Path({str(args.rows.resolve())!r}))"  # fmt: skip
            done = subprocess.run([sys.executable, "-c", code], cwd=Path(__file__).parent, env=_environment(folder, "trl"), capture_output=True, text=True)  # fmt: skip
            if done.returncode:
                raise OSError(done.stderr.strip().splitlines()[-1])
            _say(f"{model}, {data}: prepared in {time.perf_counter() - started:.1f} s")


def _compete(args: argparse.Namespace, folder: Path, output: Path) -> None:
    until = time.monotonic() + (args.total_seconds or float("inf"))
    for model in args.models:
        for data in args.data:
            for limit in args.limits:
                processes: dict[str, list[dict[str, Any]]] = {}
                for contestant in args.contestants:
                    tried = settings(contestant, model)[: args.most_settings if contestant in IN_GRID else None]
                    for setting in tried:
                        job = {
                            **_job(args, folder, output, model, data, limit, contestant, setting),
                            "settings": len(tried),
                        }
                        processes.setdefault(contestant if job["trainer"] == "brimful" else job["trainer"], []).append(
                            job
                        )
                for jobs in processes.values():
                    run_all(jobs, until, args)


def _job(
    args: argparse.Namespace, folder: Path, output: Path, model: str, data: str, limit: int | None, contestant: str, setting: Setting
) -> dict[str, Any]:  # fmt: skip
    name, trainer, options = setting
    return {
        "model": model, "data": data, "limit_bytes": limit, "contestant": contestant, "setting": name, "settings": 1, "trainer": trainer,
        "options": options, "seed": args.seed, "steps": args.steps, "tiny": args.tiny, "device": args.device,
        "warm_seconds": args.tuned_seconds if contestant in IN_GRID else args.seconds, "seconds": args.most_seconds,
        "workers": args.workers, "folder": str(folder), "output": str(output), "compile_cache": str(args.compile_cache or ""),
    }  # fmt: skip


def run_all(jobs: list[dict[str, Any]], until: float, args: argparse.Namespace) -> None:
    """In one process while it lives."""
    left: list[dict[str, Any]] = []
    for contestant in dict.fromkeys(job["contestant"] for job in jobs):
        own = [job for job in jobs if job["contestant"] == contestant]
        missing = [name for name in (*NEEDED[contestant], *METHOD_NEEDS[own[0]["model"]]) if not _is_there(name)]
        if missing:
            write_result(
                own[0], {"status": "skipped", "error": f"{', '.join(missing)} cannot be imported", "wall_s": 0.0}
            )
        else:
            left += own
    lines: list[dict[str, Any]] = []
    while left := still_needed(left, lines, LADDERS):
        if time.monotonic() > until:
            why = f"--total-seconds {args.total_seconds:g} were over"
            write_result(left[0], {"status": "skipped", "error": why, "wall_s": 0.0})
            return
        if until < float("inf"):
            left = [{**job, "until": time.time() + until - time.monotonic()} for job in left]
        lines += run_process(left)


def run_process(jobs: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Run these in a new process until they are done or it dies. Returns their lines; one that killed it has a line too."""
    output, started = Path(jobs[0]["output"]), time.perf_counter()
    before = len(read_results(output))
    problem = "the process ended early"
    with tempfile.TemporaryDirectory(prefix="bench-sft-") as scratch:
        process = subprocess.Popen(
            [sys.executable, __file__, "--process"], stdin=subprocess.PIPE, stdout=sys.stderr, text=True,
            env=_environment(Path(jobs[0]["compile_cache"] or scratch), jobs[0]["trainer"]),
        )  # fmt: skip
        try:
            process.communicate(json.dumps(jobs), timeout=sum(job["seconds"] + GRACE_S for job in jobs) + KILL_S)
            problem = f"the process ended with code {process.returncode}"
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
            problem = "the process did not answer any more and was killed"
    lines = read_results(output)[before:]
    if left := still_needed(jobs, lines, LADDERS):
        wall_s = time.perf_counter() - started - sum(line["wall_s"] for line in lines)
        write_result(left[0], {"status": "error", "error": problem, "wall_s": wall_s})
        lines = read_results(output)[before:]
    return lines


def _environment(cache: Path, trainer: str) -> dict[str, str]:
    """Of a process: growing segments, offline, its own compiled code, and what `carry.sh` unpacked."""
    sites = ("unsloth-site", "site") if trainer == "unsloth" else ("site",)
    return {
        "PYTORCH_ALLOC_CONF": "expandable_segments:True", **os.environ,
        "PYTHONPATH": python_path(*sites), "HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false",
        "UNSLOTH_DISABLE_STATISTICS": "1", "PYTHONUNBUFFERED": "1", "TORCHINDUCTOR_CACHE_DIR": str(cache / "inductor"),
        "TRITON_CACHE_DIR": str(cache / "triton"), "BRIMFUL_CACHE": str(cache / "brimful"),
    }  # fmt: skip


def _is_there(package: str) -> bool:
    places = [str(ROOT / ".carry" / name) for name in ("site", "unsloth-site")]
    sys.path.extend(places)
    try:
        return importlib.util.find_spec(package) is not None
    finally:
        del sys.path[-len(places) :]


def run_jobs(jobs: list[dict[str, Any]]) -> int:
    """In the process of the jobs: one after the other, each with the device to itself."""
    if jobs[0]["trainer"] == "unsloth":
        import unsloth  # noqa: F401 - it patches what is imported after it
    import gc

    import torch

    from train import _forget_accelerate

    before, climbed = dict(os.environ), set[str]()
    for job in jobs:
        if job["contestant"] in climbed:
            continue
        if time.time() > job.get("until", float("inf")):
            write_result(job, {"status": "skipped", "error": "--total-seconds were over", "wall_s": 0.0})
            continue
        result = run_job(job)
        write_result(job, result)
        if job["contestant"] in LADDERS and result["status"] == "ok":
            climbed.add(job["contestant"])
        os.environ.clear()
        os.environ.update(before)
        _forget_accelerate()
        if "torch._dynamo" in sys.modules:
            torch._dynamo.reset()
        gc.collect()
        if torch.cuda.is_available():
            torch.cuda.empty_cache()
    return 0


def run_job(job: dict[str, Any]) -> dict[str, Any]:
    """One setting: its figures, or why there are none."""
    import torch

    from brimful.memory.oom import is_oom
    from brimful.training.metrics import peak_flops
    from midrun_peers import quiet
    from sft_cases import Case
    from sft_peers import TRAINERS, Training
    from train import _cap, _compile_seconds, _device, _device_name, _time_limit, _workers
    from train_peers import Clock, Overdue

    device = _device(job["device"])
    _cap(device, job["limit_bytes"])
    case = Case(model=job["model"], data=job["data"], folder=Path(job["folder"]), tiny=job["tiny"])
    ceiling, how = peak_flops(device, torch.bfloat16 if device.type == "cuda" else torch.float32)
    _import(job["trainer"])
    compiled_s, ooms = _compile_seconds(), _ooms(device)
    clock = Clock(device=device, steps=job["steps"], seconds=job["seconds"], warm_seconds=job["warm_seconds"])
    disturbance = _Disturbance(job, device) if "take_at" in job else None
    training = Training(
        case=case, options=job["options"], clock=clock, seed=job["seed"], workers=_workers(job["workers"], device),
        hooks=() if disturbance is None else (disturbance.hook(),),
    )  # fmt: skip
    status, error, started = "ok", "", time.perf_counter()
    try:
        with quiet(), _time_limit(job["seconds"] + GRACE_S, Overdue):
            (TRAINERS[job["trainer"]] if disturbance is None else disturbance.around(TRAINERS[job["trainer"]]))(
                training
            )
    except Overdue:
        status, error = "stopped", f"step {len(clock.done) + 1} had not ended after {job['seconds'] + GRACE_S:g} s"
    except Exception as raised:
        status, error = ("OOM" if is_oom(raised) else "error"), in_one_line(raised)[:600]
        if os.environ.get("BENCH_TRACEBACK"):
            raise
    if status == "ok" and not clock.done:
        status, error = "error", "it ended without a step"
    figures = clock.figures(case, ceiling) if clock.done and status in ("ok", "stopped") else {"steps": len(clock.done)}  # type: ignore[arg-type]
    rows = [sum(len(part) for part in record.lengths) for record in clock.done]
    return {
        "status": status, "error": error, **figures, **training.notes, "ooms": _ooms(device) - ooms + (status == "OOM" and device.type == "cpu"),
        "rows_by_step": rows, "global_batch": case.global_batch, "global_batch_kept": bool(rows) and set(rows) == {case.global_batch},
        "same_rows": job["trainer"] == "brimful" or not (job["options"].get("packing") or "train_sampling_strategy" in job["options"]),
        "wall_s": time.perf_counter() - started, "compile_s": (_compile_seconds() - compiled_s) or None,
        "ceiling_flops_per_s": ceiling, "ceiling": how, "device_name": _device_name(device), "versions": _versions(),
        **({} if disturbance is None else disturbance.notes),
    }  # fmt: skip


def _ooms(device: Any) -> int:
    import torch

    return int(torch.cuda.memory_stats(device).get("num_ooms", 0)) if device.type == "cuda" else 0


def _import(trainer: str) -> None:
    """Now, so that imports are not timed."""
    import transformers
    import transformers.models.llama.modeling_llama
    import transformers.models.qwen2.modeling_qwen2

    if trainer == "brimful":
        import brimful.training.session  # noqa: F401
    elif trainer == "trl":
        import trl

        _ = trl.SFTTrainer, transformers.Trainer
    # Unsloth patches at import and must come first, so its trainer imports it


class _Disturbance:
    """Memory that goes away in the middle of a run, and comes back; or, for comparison, none.

    It leaves a step `LEFT_SHARE` of what it needs beside the weights, so the step cannot go on as planned.
    """

    def __init__(self, job: dict[str, Any], device: Any) -> None:
        from midrun_peers import Memory

        self.job, self.notes = job, {"taken_bytes": 0}
        self.memory = Memory(device, job["limit_bytes"] or 2**34, 0)

    def around(self, train: Any) -> Any:
        def limited(training: Any) -> None:
            with self.memory.limited():
                train(training)

        return limited

    def take(self, count: int) -> None:
        """As many bytes as can be had, at most `count`."""
        for share in (1.0, 0.95, 0.9, 0.8, 0.7):
            self.memory.take_bytes = self.notes["taken_bytes"] = int(share * count)
            with contextlib.suppress(RuntimeError):
                self.memory.take()
                return
        raise RuntimeError("hardly any memory could be taken away")

    def hook(self) -> Any:
        import torch

        import brimful

        outer, job, memory = self, self.job, self.memory

        class Take(brimful.Hook):
            peak_bytes = 0

            def after_step(self, loop: Any, result: Any) -> None:
                self.peak_bytes = max(self.peak_bytes, result.peak_bytes or 0)
                if loop.step == job["take_at"]:
                    loop.stepper.free_memory()  # as for an evaluation: what a CUDA graph holds cannot be taken
                    left = self._live() + LEFT_SHARE * (self.peak_bytes - self._live())
                    outer.take(int(memory.limit_bytes - left))
                elif job["take_at"] and loop.step == job["take_at"] + job["give_back_after"]:
                    memory.give_back()
                if loop.step == job["steps"]:
                    trained = [p.detach().to("cpu") for p in loop.stepper.model.parameters() if p.requires_grad]
                    torch.save(trained, job["weights"])

            def _live(self) -> int:
                return memory.ledger.live_bytes if memory.ledger else torch.cuda.memory_allocated(memory.device)

        return Take()


def _survive(args: argparse.Namespace, folder: Path, output: Path) -> int:
    """Brimful twice over the same rows: undisturbed, and with memory gone from one step to a later one."""
    steps = min(args.steps, SURVIVE_STEPS)
    failed = False
    for model in args.models:
        for data in args.data:
            for limit in args.limits:
                lines, weights = [], [folder / "calm.pt", folder / "disturbed.pt"]
                plan: dict[str, Any] = {}
                for name, take_at, file in zip(("undisturbed", "memory taken"), (0, TAKE_AT), weights, strict=True):
                    run = folder / f"survive-{model}-{data}-{time.time_ns()}"
                    # On a CPU the fastest split may be far from the limit, and then nothing is missed when memory goes
                    setting = (name, "brimful", {"run": str(run), **plan})
                    job = _job(args, folder, output, model, data, limit, f"survive, {name}", setting)
                    job |= {"steps": steps, "warm_seconds": None, "take_at": take_at, "give_back_after": GIVE_BACK_AFTER, "weights": str(file)}  # fmt: skip
                    lines += run_process([job])
                    plan = {"plan": str(run / "plan.json")} if (run / "plan.json").is_file() else {}
                print(show_survival(*lines, weights=weights))
                failed |= any(line["status"] != "ok" for line in lines)
    return int(failed)


def show_survival(calm: dict[str, Any], disturbed: dict[str, Any], *, weights: list[Path]) -> str:
    from oom_midrun import _markdown

    title = f"{calm['model']}, {calm['data']}, limit {_show_cap(calm['limit_bytes'])}: memory taken after step {TAKE_AT}, returned {GIVE_BACK_AFTER} steps later"  # fmt: skip
    problems = [f"{line['setting']}: {line['status']}: {line['error']}" for line in (calm, disturbed) if line["error"]]
    table = [("", "steps", "global batch", "taken", "OOMs survived", "tokens/s", "peak", "loss, first and last")]
    for line in (calm, disturbed):
        losses = line.get("loss") or []
        table.append((
            line["setting"], str(line.get("steps", 0)), "kept" if line.get("global_batch_kept") else "changed",
            show_bytes(line.get("taken_bytes", 0)), str(line.get("survived_ooms", "–")), f"{line.get('tokens_per_s', 0):,.0f}",
            _gib(line.get("peak_bytes")), f"{losses[0]:.5f}, {losses[-1]:.5f}" if losses else "–",
        ))  # fmt: skip
    return "\n".join([title, "", _markdown(table), "", *problems, _losses_apart(calm, disturbed, weights)])


def _losses_apart(calm: dict[str, Any], disturbed: dict[str, Any], weights: list[Path]) -> str:
    pairs = list(zip(calm.get("loss") or [], disturbed.get("loss") or [], strict=False))
    if not pairs or not all(file.is_file() for file in weights):
        return "nothing to compare"
    import torch

    from oom_midrun import distance

    before = max((abs(a - b) for a, b in pairs[:TAKE_AT]), default=0.0)
    after = max((abs(a - b) for a, b in pairs[TAKE_AT:]), default=0.0)
    ends = [[tensor.double() for tensor in torch.load(file)] for file in weights]
    return (
        f"losses apart: at most {before:.1e} before memory was taken and {after:.1e} from then on, over {len(pairs)} steps; "
        f"the trained weights end {distance(*ends):.1e} apart (relative L2)"
    )


def write_result(job: dict[str, Any], result: dict[str, Any]) -> None:
    """Append one line to the output, and say it in short on stderr."""
    names = ("model", "data", "limit_bytes", "contestant", "setting", "settings", "trainer", "options", "seed", "tiny")
    date = datetime.now(UTC).isoformat(timespec="seconds")
    with Path(job["output"]).open("a") as file:
        file.write(json.dumps({"date": date, **{name: job[name] for name in names}, **result}) + "\n")
    speed = f"{result['tokens_per_s']:,.0f} tokens/s" if "tokens_per_s" in result else f"{result['status']}: {result['error']}"  # fmt: skip
    where = f"{job['model']}, {job['data']}, {_show_cap(job['limit_bytes'])}"
    _say(f"{where}, {job['contestant']} ({job['setting']}): {speed}; {result['wall_s']:.0f} s")


HEAD = ("", "setting", "tokens/s", "× trl", "× tuned", "peak", "reserved", "predicted", "OOMs", "search", "compile", "batch", "padding", "useful", "loss", "apart", "steps")  # fmt: skip


def show_tables(results: list[dict[str, Any]]) -> str:
    """A table for each model, data and limit."""
    tables = []
    cases = dict.fromkeys((one["model"], one["data"], one["limit_bytes"]) for one in results)
    for model, data, limit in cases:
        lines = [one for one in results if (one["model"], one["data"], one["limit_bytes"]) == (model, data, limit)]
        lines = [one for one in lines if not one["contestant"].startswith("survive")]
        if not lines:
            continue
        about = next((one for one in lines if "device_name" in one), {})
        title = f"{model}, {data} rows, {about.get('device_name', 'unknown device')}, limit {_show_cap(limit)}, {about.get('global_batch', '?')} rows per step"  # fmt: skip
        tables.append(f"{title}{' (tiny)' if lines[0]['tiny'] else ''}\n\n{show_table(lines)}")
    return "\n\n".join(tables)


def show_table(lines: list[dict[str, Any]]) -> str:
    """One line for each contestant: its best setting that ran."""
    from oom_midrun import _markdown

    by_contestant: dict[str, list[dict[str, Any]]] = {}
    for line in lines:
        by_contestant.setdefault(line["contestant"], []).append(line)
    best = {name: best_of(some) for name, some in by_contestant.items()}
    reference = next((line for line in best.values() if line is not None and line.get("loss")), None)
    speed = {name: line["tokens_per_s"] for name, line in best.items() if line is not None}
    table = [HEAD]
    for name, some in by_contestant.items():
        table.append(_cells(name, some, best[name], reference, speed))
    problems = [f"{one['contestant']} ({one['setting']}): {one['status']}: {one['error'][:200]}" for one in lines if one["error"]]  # fmt: skip
    return "\n".join([_markdown(table), *([""] if problems else []), *problems])


def best_of(lines: list[dict[str, Any]]) -> dict[str, Any] | None:
    return max((line for line in lines if "tokens_per_s" in line), key=lambda line: line["tokens_per_s"], default=None)


def _cells(
    name: str, lines: list[dict[str, Any]], best: dict[str, Any] | None, reference: dict[str, Any] | None, speed: dict[str, float]
) -> tuple[str, ...]:  # fmt: skip
    ooms = str(sum(line.get("ooms", 0) for line in lines))
    if best is None:
        dashes = ["–"] * (len(HEAD) - 11)
        return (name, lines[-1]["status"], *["–"] * 6, ooms, f"{sum(line['wall_s'] for line in lines):.0f} s", *dashes, "0")  # fmt: skip
    ratio = lambda peer: f"{speed[name] / speed[peer]:.2f}" if peer in speed else "–"  # noqa: E731
    tried = sum(line["status"] != "skipped" for line in lines)  # a grid cut short is not tuned, and must not look so
    of = (
        "" if len(lines) == 1 else f" (of {tried})" if tried == len(lines) else f" (only {tried} of {len(lines)} tried)"
    )
    predicted = best.get("prediction_error")
    others = sum(line["wall_s"] for line in lines if line is not best)
    search = best["plan_s"] if best.get("plan_s") is not None else others
    return (
        name,
        f"{best['setting']}{of}",
        f"{best['tokens_per_s']:,.0f}",
        ratio("trl"),
        ratio("trl-tuned"),
        _gib(best.get("peak_bytes")),
        _gib(best.get("reserved_bytes")),
        "–" if predicted is None else f"{predicted:+.1%}",
        ooms,
        f"{search:.0f} s",
        "–" if not best.get("compile_s") else f"{best['compile_s']:.0f} s",
        "kept" if best["global_batch_kept"] else f"≈ {best['rows_per_step']}",
        "–" if best.get("padding") is None else f"{best['padding']:.0%}",
        "–" if best.get("useful_share") is None else f"{best['useful_share']:.0%}",
        f"{best['loss'][0]:.4f}",
        losses_apart(best, reference),
        str(best["steps"]),
    )


def losses_apart(line: dict[str, Any], reference: dict[str, Any] | None) -> str:
    """The largest relative difference of the first losses, where both trained on the same rows in the same steps."""
    if reference is None or line is reference or not (line["same_rows"] and line["global_batch_kept"] and reference["same_rows"]):  # fmt: skip
        return "–"
    pairs = list(zip(line["loss"], reference["loss"], strict=False))[:COMPARED_STEPS]
    return f"{max(abs(a - b) / abs(b) for a, b in pairs):.1e}"


def _gib(count: float | None) -> str:
    return "–" if count is None else f"{count / 2**30:.2f} GiB"


def _versions() -> dict[str, str]:
    from importlib import metadata

    from finders import _versions

    more = {}
    for package in ("trl", "peft", "liger_kernel", "bitsandbytes", "datasets", "unsloth", "triton"):
        try:
            more[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            more[package] = "not installed"
    return {**_versions(), **more}


def _packages() -> str:
    """Every package the contest needs, and whether a process of it can import it."""
    names = ("torch", "transformers", "accelerate", "tokenizers", "pyarrow", "pandas", "datasets", "trl", "peft", "liger_kernel", "bitsandbytes")  # fmt: skip
    code = (
        "import importlib, sys\n"
        "for name in sys.argv[1:]:\n"
        "    try: print(name, getattr(importlib.import_module(name), '__version__', 'there'))\n"
        "    except BaseException as error: print(name, 'MISSING:', type(error).__name__, str(error)[:200])\n"
    )
    shown = []
    for trainer, some in (("trl", names), ("unsloth", ("unsloth",))):
        done = subprocess.run([sys.executable, "-c", code, *some], env=_environment(ROOT, trainer), capture_output=True, text=True)  # fmt: skip
        shown.append(done.stdout.strip() or done.stderr.strip()[-500:])
    return "\n".join(shown)


def _say(phrase: str) -> None:
    print(phrase, file=sys.stderr, flush=True)


def _arguments(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--models", type=_some_of(list(MODELS)), default=list(MODELS), help=f"some of {', '.join(MODELS)} (all)")  # fmt: skip
    parser.add_argument("--limits", type=_caps, default=[24 * 2**30], help="memory of the process, such as 24GiB,12GiB,none (24GiB)")  # fmt: skip
    parser.add_argument("--data", type=_some_of(list(DATA)), default=list(DATA), help="real, long or both (both)")
    parser.add_argument("--contestants", type=_some_of(list(SFT_CONTESTANTS)), default=list(SFT_CONTESTANTS), help=f"some of {', '.join(SFT_CONTESTANTS)} (all)")  # fmt: skip
    parser.add_argument("--rows", type=Path, default=ROOT / ".carry/chatlm/train_3k.parquet", help="chat rows with prompt and response (%(default)s)")  # fmt: skip
    parser.add_argument("--seconds", type=float, default=15.0, help="after which, from its first step on, a contestant begins no further step (%(default)s)")  # fmt: skip
    parser.add_argument("--tuned-seconds", type=float, default=6.0, help="the same for a setting of a grid (%(default)s)")  # fmt: skip
    parser.add_argument("--most-seconds", type=float, default=150.0, help="the same from the start on, planning and compilation included (%(default)s)")  # fmt: skip
    parser.add_argument("--total-seconds", type=float, help="after which no further setting is started")
    parser.add_argument("--most-settings", type=int, metavar="N", help="try the first N settings of a grid (all)")
    parser.add_argument("--steps", type=int, default=100, help="optimizer steps at most (%(default)s)")
    parser.add_argument("--seed", type=int, default=0, help="of the order of rows and of adapters (%(default)s)")
    parser.add_argument("--workers", type=int, help="loader workers of the peers (4 on a GPU, 0 on a CPU)")
    parser.add_argument("--device", default="auto", help="cuda:0 or cpu (the first GPU, else the CPU)")
    parser.add_argument("--folder", type=Path, help="keep models and tokens there, for the next call")
    parser.add_argument("--compile-cache", type=Path, help="keep compiled code there between processes")
    parser.add_argument("--output", type=Path, help="append the results there, one JSON line for each setting")
    parser.add_argument("--prepare", action="store_true", help="only make rows, tokens and weights in --folder")
    parser.add_argument("--survive", action="store_true", help="Brimful alone, with memory taken away in the middle")
    parser.add_argument("--tiny", action="store_true", help="small models and steps of 8 rows")
    parser.add_argument("--check", action="store_true", help="print which packages are there")
    parser.add_argument("--table", type=Path, metavar="FILE", help="print the tables of an output file")
    parser.add_argument("--process", action="store_true", help=argparse.SUPPRESS)
    return parser.parse_args(argv)


if __name__ == "__main__":
    sys.exit(main())
