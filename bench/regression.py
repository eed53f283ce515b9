"""Checks that a change of the code leaves all results bit-identical. Record before the change, compare after it.

    python bench/regression.py record baseline.json           run all cases, write {case: fingerprint}
    python bench/regression.py compare baseline.json          run them again, exit with 1 if any differs
    python bench/regression.py compare baseline.json --only sweep --only plan-unet

A fingerprint holds the SHA-256 of the final weights as float64, the loss of every step with all its digits, the number of
micro-batches of each step, and for plans every number that does not come from a clock. For a case that differs, the parts
of its fingerprint that differ are printed.

Everything runs on the CPU with one thread. Timings are replaced by constants, because they decide how a step is split, and
with dropout the split decides the result:

- rows of different lengths are trained under a plan whose timed values are constants (`fixed_plan`);
- runs that make their own plan have a fixed micro-batch and rows of one length, so their split depends on nothing else;
- the run that is stopped by a signal may stop after any step: it must end as an uninterrupted run does.

Floating-point results depend on the processor and on the versions of torch and NumPy, so a baseline is valid on one machine
only and is not committed. The file says where it was recorded, and `compare` warns if that differs.

The functions under "Calls into Brimful" are the only ones that use names and flags of Brimful. When those change, change
these functions and leave the cases and the names in the file alone.
"""

import argparse
import copy
import hashlib
import json
import os
import platform
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

SCRATCH = tempfile.TemporaryDirectory(prefix="brimful-regression-")
FOLDER = Path(SCRATCH.name)
"""All files of all cases, deleted at the end."""
os.environ.update(
    OMP_NUM_THREADS="1", MKL_NUM_THREADS="1", CUDA_VISIBLE_DEVICES="", TOKENIZERS_PARALLELISM="false",
    BRIMFUL_CACHE=str(FOLDER / "cache"), HF_HOME=str(FOLDER / "hf"), HF_HUB_OFFLINE="1", TMPDIR=str(FOLDER),
    PYTHONDONTWRITEBYTECODE="1",
)  # fmt: skip

import numpy as np  # noqa: E402 - after the number of threads is set
import torch  # noqa: E402

torch.set_num_threads(1)

Fingerprint = dict[str, Any]
Weights = Mapping[str, torch.Tensor]

# ---- Calls into Brimful --------------------------------------------------------------------------------------------


def root() -> Path:
    """The checkout that is tested: the one whose `brimful` this Python imports."""
    import brimful

    return Path(brimful.__file__).parents[2]


def example_task(name: str) -> Any:
    from brimful.tasks.load import load_task

    return load_task(f"{root() / 'examples' / name}.py:task")


def chat_task(kind: str) -> Any:
    """`pretrain` or `sft`, tiny and with random weights: for plans only."""
    from brimful.tasks.load import load_task

    sft = {"freeze": "encoder+embeddings"} if kind == "sft" else {}
    return load_task(kind, options={"model": "chatlm-tiny", **sft})


def chat_rows(part: str) -> Path:
    """`train` (547 rows) or `valid` (53), which come with the package."""
    from brimful.tasks import demo

    return {"train": demo.train_file, "valid": demo.valid_file}[part]()


def make_plan(
    task: Any, *, rows: int, micro_batch: int, lengths: tuple[int, ...], limit: str, checkpointing: str = "auto"
) -> Any:
    """A plan for `rows` rows per step under a memory limit."""
    import brimful

    return brimful.plan(
        task, global_batch=rows, micro_batch=micro_batch, lengths=lengths, memory_limit=limit, checkpointing=checkpointing,
        device="cpu", cache=False,
    )  # fmt: skip


def fixed_plan(plan: Any) -> Any:
    """The plan with constants for its timings: the speed, and the cost of one more micro-batch (None stays None)."""
    return replace(plan, rows_per_s=100.0, overhead=None if plan.overhead is None else 100.0)


def plan_fields(plan: Any) -> Fingerprint:
    """Everything in a plan that does not depend on a clock. The phases of the memory model are sorted by their numbers."""
    model = plan.memory_model
    polynomials = [sorted([list(p), repr(value)] for p, value in one.terms.items()) for one in model.phases.values()]
    probes = [[one.rows, list(one.shape), sorted(one.phases.values())] for one in model.probes]
    return {
        "limit": plan.limit_bytes,
        "budget": plan.budget_bytes,
        "lengths": list(plan.shape),
        "rows_a_step": plan.global_batch,
        "rows_at_once": plan.micro_batch,
        "micro_batches": plan.accumulation,
        "rows_by_process": list(plan.deal),
        "largest": plan.largest_micro_batch,
        "peak_predicted": plan.predicted_peak_bytes,
        "peak_measured": plan.measured_peak_bytes,
        "peak_of_largest_predicted": plan.largest_predicted_peak_bytes,
        "peak_of_largest_measured": plan.largest_measured_peak_bytes,
        "peak_of_one_row_more": plan.one_more_predicted_peak_bytes,
        "exact": plan.choice("exactness").effective == "exact",
        "checkpointing": plan.levers.checkpointing,
        "precision": plan.levers.precision,
        "zone": plan.zone,
        "probes_run": plan.probes,
        "out_of_memory": plan.ooms,
        "warnings": len(plan.warnings),
        "model_polynomials": sorted(polynomials),
        "model_factors": [repr(model.margin), repr(model.reserved_ratio), repr(model.error)],
        "model_probes": probes,
    }


def make_stepper(model: Any, optimizer: Any, task: Any, plan: Any = None, **options: Any) -> Any:
    """`options` are micro_batch, clip_norm, grow_after and precision, each with the library's default."""
    import brimful

    return brimful.Stepper(model, optimizer, task, plan, **options)


def step_fields(result: Any) -> tuple[str, int, int]:
    """Loss, micro-batches and out-of-memory errors of one step."""
    return repr(result.loss), result.micro_batches, result.ooms


def limited_memory(limit: int) -> Any:
    """A context with a memory limit for CPU tensors. `set_limit` changes it."""
    import brimful

    return brimful.simulated_memory(limit)


def set_limit(memory: Any, limit: int) -> None:
    memory.limit_bytes = limit


def train_command(task: str, data: Path | None, run: Path, **options: Any) -> list[str]:
    """`brimful train` with options of this script. Without data the run is resumed."""
    flags = {
        "model": "--model", "valid": "--valid", "plan": "--plan", "steps": "--max-steps",
        "rows": "--global-batch", "micro_batch": "--micro-batch", "limit": "--memory-limit", "lr": "--lr", "mix": "--mix",
        "schedule": "--schedule", "warmup": "--warmup", "optimizer": "--optimizer", "processes": "--processes",
        "save_every": "--save-every", "eval_every": "--eval-every", "generate_rows": "--generate-rows",
        "label_smoothing": "--label-smoothing",
    }  # fmt: skip
    words = ["--run", str(run), "--resume"] if data is None else [task, str(data), "--run", str(run), "--no-cache"]
    flagged = [word for name, value in options.items() for word in (flags[name], str(value))]
    workers = [] if "plan" in options else ["--workers", "0"]  # part of a plan
    return [sys.executable, "-m", "brimful", "train", *words, "--device", "cpu", *workers, *flagged]


def example_name(name: str) -> str:
    """The task of an example, as the command line takes it."""
    return f"{root() / 'examples' / name}.py:task"


def save_plan(plan: Any, path: Path) -> Path:
    plan.save(path)
    return path


def run_events(run: Path, kind: str) -> list[dict[str, Any]]:
    """The run's events of one kind so far: `step`, `eval` or `resume`. An incomplete last line is ignored."""
    path = run / "events.jsonl"
    lines = path.read_text(encoding="utf-8").split("\n")[:-1] if path.exists() else []
    return [event for line in lines if line and (event := json.loads(line))["event"] == kind]


def run_fields(run: Path) -> Fingerprint:
    """The fingerprint of a finished run. The last event of a step counts: after a resume, steps may be repeated."""
    from safetensors.torch import load_file

    steps = list({event["step"]: event for event in run_events(run, "step")}.values())
    return {
        "weights": digest(load_file(run / "model" / "model.safetensors")),
        "losses": [repr(event["loss"]) for event in steps],
        "gradient_norms": [repr(event["grad_norm"]) for event in steps],
        "rates": [repr(event["lr"]) for event in steps],
        "micro_batches": [event["micro_batches"] for event in steps],
        "evaluated": [
            [event["step"], repr(event["loss"]), repr(event.get("chrf"))] for event in run_events(run, "eval")
        ],
    }


def sweep_rows(spec: Path, output: Path) -> Fingerprint:
    """Every result of a sweep with all digits, and a hash of the scores of the test molecules."""
    command = [sys.executable, "-m", "brimful", "sweep", str(spec), "--output", str(output), "--json"]
    flags = ["--device", "cpu", "--pack", "12", "--processes", "1", "--cache", str(FOLDER / "features")]
    report = json.loads(run_command([*command, *flags]))
    columns = ("auroc", "aupr_ood", "aupr_id", "fpr95_ood", "fpr95_id", "valid_auroc", "epochs", "best_epoch")
    rows = {}
    for row in report["rows"]:
        with np.load(output / "runs" / f"{row['run']}.npz") as arrays:
            scores = {name: torch.from_numpy(arrays[name]) for name in ("id_scores", "ood_scores", "curve", "loss")}
        name = " / ".join(str(row[key]) for key in ("dataset", "split", "encoder", "method", "seed"))
        rows[name] = [*(repr(row[column]) for column in columns), digest(scores)]
    return {"trained": report["trained"], **dict(sorted(rows.items()))}


# ---- Helpers, independent of Brimful ---------------------------------------------------------------------------------


def digest(tensors: Weights) -> str:
    """SHA-256 over name, shape and the float64 bytes of each tensor, by name."""
    sha256 = hashlib.sha256()
    for name in sorted(tensors):
        values = tensors[name].detach().cpu().to(torch.float64).contiguous()
        sha256.update(f"{name} {tuple(values.shape)} ".encode() + values.numpy().tobytes())
    return sha256.hexdigest()


def run_command(command: list[str]) -> str:
    """The output of a command. If it fails, its output is shown and the script ends."""
    process = subprocess.run(command, cwd=FOLDER, capture_output=True, text=True, check=False)
    if process.returncode:
        raise SystemExit(f"{' '.join(command)}\nexited with {process.returncode}:\n{process.stdout}\n{process.stderr}")
    return process.stdout


def text_file(name: str, lines: int, lengths: tuple[int, int]) -> Path:
    """Lines of words, each of a length between these two."""
    rng, path = random.Random(5), FOLDER / name
    words = ["plan", "memory", "step", "row", "cut", "batch", "limit", "peak"]
    texts = (" ".join(rng.choices(words, k=40))[: rng.randint(*lengths)] for _ in range(lines))
    path.write_text("".join(f"{text}\n" for text in texts), encoding="ascii")
    return path


def text_steps(steps: int, rows: int) -> list[list[torch.Tensor]]:
    """Steps of rows of 8 to 64 bytes."""
    lines = text_file("steps.txt", steps * rows, (8, 64)).read_bytes().splitlines()
    return [[torch.tensor(list(line)) for line in lines[s * rows : (s + 1) * rows]] for s in range(steps)]


def dummy_steps(task: Any, steps: int, rows: int, shape: tuple[int, ...]) -> list[list[Any]]:
    """Steps of rows from the example's own random batches."""
    batches = [task.dummy(rows, shape) for _ in range(steps)]
    return [[{name: part[row] for name, part in batch.items()} for row in range(rows)] for batch in batches]


def train_steps(
    task: Any, steps: Iterable[list[Any]], before: Callable[[int], None] | None = None, **options: Any
) -> Fingerprint:
    """The fingerprint of a new model trained on these steps. `before` is called with the number of each step, from 1."""
    torch.manual_seed(3)
    model = task.model().train()
    stepper = make_stepper(model, torch.optim.AdamW(model.parameters(), lr=1e-3), task, clip_norm=1.0, **options)
    results = []
    for number, rows in enumerate(steps, 1):
        if before is not None:
            before(number)
        results.append(step_fields(stepper.step(rows)))
    losses, splits, ooms = (list(part) for part in zip(*results, strict=True))
    return {"weights": digest(model.state_dict()), "losses": losses, "micro_batches": splits, "out_of_memory": ooms}


# ---- Cases -----------------------------------------------------------------------------------------------------------


@cache
def plan_of(name: str) -> Any:
    """The plans that are fingerprinted and that other cases train under."""
    if name == "causal-lm":
        return make_plan(example_task("causal_lm"), rows=16, micro_batch=6, lengths=(64,), limit="64MiB")
    if name == "causal-lm-checkpointed":
        task = example_task("causal_lm")
        return make_plan(task, rows=16, micro_batch=6, lengths=(64,), limit="64MiB", checkpointing="on")
    if name == "unet":
        return make_plan(example_task("unet"), rows=12, micro_batch=5, lengths=(48,), limit="32MiB")
    return make_plan(chat_task(name.removeprefix("chat-")), rows=32, micro_batch=8, lengths=(32, 32), limit="96MiB")


def plan_file(name: str) -> Path:
    return save_plan(fixed_plan(plan_of(name)), FOLDER / f"plan-{name}.json")


def chat_run(kind: str, run: Path, **options: Any) -> Fingerprint:
    options = {"plan": plan_file(f"chat-{kind}"), "valid": chat_rows("valid"), "rows": 32, "limit": "256MiB", **options}
    run_command(train_command(kind, chat_rows("train"), run, **options))
    return run_fields(run)


@cache
def pretrained() -> tuple[Path, Fingerprint]:
    run = FOLDER / "pretrained"
    return run, chat_run("pretrain", run, model="chatlm-tiny", steps=20, lr=2e-3, eval_every=10, generate_rows=8)


def chat_sft() -> Fingerprint:
    options = {"steps": 15, "lr": 1e-3, "eval_every": 15, "generate_rows": 8, "mix": "window:5", "label_smoothing": 0.1}
    return chat_run("sft", FOLDER / "tuned", model=pretrained()[0], schedule="linear", **options)


def step_image_classifier() -> Fingerprint:
    """BatchNorm, no plan, autocast."""
    torch.manual_seed(1)
    task = example_task("image_classifier")
    return train_steps(task, dummy_steps(task, 3, 10, ()), micro_batch=4, precision="bf16")


def step_unet() -> Fingerprint:
    torch.manual_seed(2)
    task = example_task("unet")
    return train_steps(task, dummy_steps(task, 5, 12, (48,)), plan=fixed_plan(plan_of("unet")))


def step_causal_lm(plan: str = "causal-lm") -> Fingerprint:
    """Dropout and rows of many lengths, split by predicted bytes."""
    return train_steps(example_task("causal_lm"), text_steps(8, 16), plan=fixed_plan(plan_of(plan)))


def step_oom_injected() -> Fingerprint:
    """Out of memory at chosen micro-batches of chosen steps, each once. Repeated micro-batches count as further ones."""
    due, now = {(2, 1), (3, 2), (3, 5), (7, 0)}, [0, 0]
    task = copy.copy(example_task("causal_lm"))
    loss = task.loss

    def failing(model: Any, batch: Any) -> Any:
        place, now[1] = (now[0], now[1]), now[1] + 1
        value = loss(model, batch)
        if place in due:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 1.23 GiB (injected)")
        return value

    def begin(step: int) -> None:
        now[:] = [step, 0]

    task.loss = failing
    return train_steps(task, text_steps(12, 16), begin, plan=fixed_plan(plan_of("causal-lm")), grow_after=3)


def step_oom_limit(plan: str | None = None) -> Fingerprint:
    """A memory limit that falls at the third step and rises again at the seventh. Without a plan, sizes are learned."""
    limits = {1: 64, 3: 26, 7: 64}  # MiB, from that step on
    with limited_memory(64 * 2**20) as memory:

        def move(step: int) -> None:
            if step in limits:
                set_limit(memory, limits[step] * 2**20)

        options = {} if plan is None else {"plan": fixed_plan(plan_of(plan))}
        return train_steps(example_task("causal_lm"), text_steps(12, 16), move, grow_after=3, **options)


LM_RUN: dict[str, Any] = {"rows": 16, "micro_batch": 6, "limit": "256MiB", "lr": 1e-3}


def lm_run(name: str, steps: int = 30, **options: Any) -> Fingerprint:
    """A run that makes its own plan. Its lines have one length, so their split depends on the micro-batch alone."""
    lines = text_file("lines.txt", 300, (48, 48))
    run_command(train_command(example_name("causal_lm"), lines, FOLDER / name, steps=steps, **LM_RUN, **options))
    return run_fields(FOLDER / name)


def lm_stopped() -> Fingerprint:
    """A run stopped by SIGTERM after its third step and resumed: as `lm-run`, and whether it was stopped at all."""
    run, lines = FOLDER / "lm-stopped", text_file("lines.txt", 300, (48, 48))
    command = train_command(example_name("causal_lm"), lines, run, steps=30, **LM_RUN)
    with (
        (FOLDER / "stopped.log").open("w") as log,
        subprocess.Popen(command, cwd=FOLDER, stdout=log, stderr=log) as process,
    ):
        while process.poll() is None and len(run_events(run, "step")) < 3:
            time.sleep(0.01)
        process.send_signal(signal.SIGTERM)
    if process.returncode:
        raise SystemExit(
            f"the run to be stopped exited with {process.returncode}:\n{(FOLDER / 'stopped.log').read_text()}"
        )
    stopped_early = len(run_events(run, "step")) < 30
    run_command(train_command("", None, run))
    return {"stopped_early": stopped_early, "resumed": len(run_events(run, "resume")), **run_fields(run)}


def sweep() -> Fingerprint:
    """24 heads (two splits × four methods × three seeds), and one method without training."""
    spec = FOLDER / "sweep.toml"
    spec.write_text(f"""
seeds = 3
methods = ["dpo", "bce", {{ name = "hinge", margin = 0.5 }}, "energy-oe", "knn"]
encoders = ["ecfp"]
[[datasets]]
file = "{root() / "examples" / "sweep" / "molecules.csv"}"
split = ["scaffold", "size"]
label = "acid"
[head]
hidden = [64, 32]
[train]
lr = 1e-3
batch = 64
epochs = 25
patience = 10
""")
    return sweep_rows(spec, FOLDER / "sweep")


CASES: dict[str, Callable[[], Fingerprint]] = {
    "plan-chat-sft": lambda: plan_fields(plan_of("chat-sft")),
    "plan-causal-lm": lambda: plan_fields(plan_of("causal-lm")),
    "plan-causal-lm-checkpointed": lambda: plan_fields(plan_of("causal-lm-checkpointed")),
    "plan-unet": lambda: plan_fields(plan_of("unet")),
    "step-causal-lm": step_causal_lm,
    "step-causal-lm-checkpointed": lambda: step_causal_lm("causal-lm-checkpointed"),
    "step-unet": step_unet,
    "step-image-classifier": step_image_classifier,
    "step-oom-injected": step_oom_injected,
    "step-oom-limit": step_oom_limit,
    "step-oom-limit-with-plan": lambda: step_oom_limit("causal-lm"),
    "chat-pretrain": lambda: pretrained()[1],
    "chat-sft": chat_sft,
    "lm-run": lambda: lm_run("lm-run"),
    "lm-run-stopped-and-resumed": lm_stopped,
    "lm-run-two-processes": lambda: lm_run("lm-two", 12, processes=2, schedule="wsd", optimizer="adafactor"),
    "sweep": sweep,
}

# ---- The command -----------------------------------------------------------------------------------------------------


def here() -> dict[str, str]:
    """What the results depend on besides the code."""
    info = Path("/proc/cpuinfo")
    models = [line for line in info.read_text().splitlines() if line.startswith("model name")] if info.exists() else []
    processor = models[0].split(":")[1].strip() if models else platform.processor()
    capability = torch.backends.cpu.get_cpu_capability()
    versions = {"python": platform.python_version(), "torch": torch.__version__, "numpy": np.__version__}
    return {"processor": processor, "vector_instructions": capability, **versions}


def record(path: Path, names: list[str]) -> int:
    cases = {}
    for name in names:
        began = time.perf_counter()
        cases[name] = CASES[name]()
        print(f"{name:30} {time.perf_counter() - began:6.1f} s", flush=True)
    path.write_text(json.dumps({"recorded_on": here(), "cases": cases}, indent=1) + "\n")
    return 0


def compare(path: Path, names: list[str]) -> int:
    before = json.loads(path.read_text())
    for what, now in here().items():
        if now != before["recorded_on"].get(what):
            print(
                f"{what} is {now} here and {before['recorded_on'].get(what)} in the baseline, so last digits may differ"
            )
    differ = 0
    for name in names:
        began, known = time.perf_counter(), before["cases"].get(name)
        now = json.loads(json.dumps(CASES[name]()))  # as it would be read back
        parts = [part for part in {**(known or {}), **now} if known is None or known.get(part) != now.get(part)]
        differ += bool(parts)
        verdict = "identical" if not parts else "not in the baseline" if known is None else "different"
        print(f"{name:30} {verdict:10} {time.perf_counter() - began:6.1f} s", flush=True)
        for part in parts if known is not None else ():
            print(f"    {part}: {short(known.get(part))} is now {short(now.get(part))}")
    print(f"{len(names) - differ} of {len(names)} cases are identical")
    return int(differ > 0)


def short(value: Any) -> str:
    text = json.dumps(value)
    return text if len(text) <= 160 else f"{text[:160]} …"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("command", choices=("record", "compare"))
    parser.add_argument("file", type=Path)
    parser.add_argument("--only", action="append", choices=list(CASES), metavar="NAME", help=", ".join(CASES))
    arguments = parser.parse_args()
    with SCRATCH:
        return {"record": record, "compare": compare}[arguments.command](
            arguments.file.resolve(), arguments.only or list(CASES)
        )


if __name__ == "__main__":
    sys.exit(main())
