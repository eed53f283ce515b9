"""`brimful fit TASK [DATA]`: probes, predicts, verifies, and prints the plan with every reason."""

import os
import sys
import tomllib
from contextlib import redirect_stdout
from pathlib import Path
from typing import Annotated, Any, Literal

from cyclopts import Parameter

from brimful.cli.output import progress, show
from brimful.errors import BadOption

Switch = Literal["auto", "on", "off"]
Precision = Literal["auto", "fp32", "bf16", "fp16"]
Flag = Annotated[bool, Parameter(negative="")]


def fit(
    task: str,
    data: str | None = None,
    /,
    *,
    size: str | None = None,
    global_batch: int | None = None,
    micro_batch: Literal["auto"] | int | None = None,
    memory_limit: str | None = None,
    host_limit: str | None = None,
    fill: float | None = None,
    device: str | None = None,
    processes: int | None = None,
    checkpointing: Switch | None = None,
    precision: Precision | None = None,
    workers: Literal["auto"] | int | None = None,
    prefetch: Literal["auto"] | int | None = None,
    pin_memory: Switch | None = None,
    lengths: str | None = None,
    allow_inexact: Annotated[bool | None, Parameter(negative="")] = None,
    cache: bool | None = None,
    seed: int | None = None,
    config: Path | None = None,
    json: Flag = False,
) -> None:
    """Find the fastest configuration of a task that fits the memory at hand, without one out-of-memory error.

    Probes a few small steps, models what each phase of a step costs, verifies with real steps at the chosen size, and
    prints every choice with what was asked, what it became and why.

    Parameters
    ----------
    task
        A built-in task (chatlm-pretrain, chatlm-sft) or your own, written file.py:name.
    data
        What the task's rows() reads, for the chat tasks a token store: its longest rows are fitted for, and its loader
        is timed. Without it, the task's worst shape.
    size
        Size of a built-in task: tiny or base.
    global_batch
        Rows per optimizer step, kept exactly; the task's own unless given.
    micro_batch
        Rows per forward and backward; a number is kept as a ceiling.
    memory_limit
        Cap on memory, such as 20GiB: a card's reserved bytes, or a virtual limit on the CPU.
    host_limit
        Cap on host RAM, such as 16GiB.
    fill
        The share of the limit to plan for, 0.85 unless given.
    device
        cpu, cuda, cuda:1, mps or xpu; the first accelerator unless given.
    processes
        How many processes share the global batch.
    checkpointing
        Gradient checkpointing: on, off, or auto (when it is faster, or nothing else fits).
    precision
        What the forward is autocast to; the task's own unless given.
    workers
        Loader workers of each process; timed on DATA unless given.
    prefetch
        Steps that each worker reads ahead.
    pin_memory
        Page-locked host memory: on, off, or auto (where it pays).
    lengths
        The lengths to fit for, such as 256,256; the task's worst unless given.
    allow_inexact
        Cut a task whose loss looks across rows all the same.
    cache
        Reuse a plan made under the same conditions, and keep this one.
    seed
        Of the dummy batches.
    config
        A TOML file with any of these options; flags win over it.
    json
        Print the plan as one JSON object.
    """
    given = {
        "size": size, "global_batch": global_batch, "micro_batch": micro_batch, "memory_limit": memory_limit,
        "host_limit": host_limit, "fill": fill, "device": device, "processes": processes, "checkpointing": checkpointing,
        "precision": precision, "workers": workers, "prefetch": prefetch, "pin_memory": pin_memory, "lengths": lengths, "allow_inexact": allow_inexact, "cache": cache, "seed": seed,
    }  # fmt: skip
    asked = {**_from_file(config, list(given)), **{name: value for name, value in given.items() if value is not None}}
    if "lengths" in asked:
        asked["lengths"] = _lengths(asked["lengths"])
    # Varying shapes fragment torch's default segments (20.0 GiB reserved for 15.4 in use); these can grow instead.
    if "PYTORCH_CUDA_ALLOC_CONF" not in os.environ:
        os.environ.setdefault("PYTORCH_ALLOC_CONF", "expandable_segments:True")
    from brimful.plan.fit import fit as make_plan
    from brimful.plan.options import FitOptions
    from brimful.report.plan_table import plan_table
    from brimful.tasks.load import load_task

    chosen_size = asked.pop("size", None)
    FitOptions.of(asked)  # mistakes come before the task's own imports
    with redirect_stdout(sys.stderr):  # what the task prints is not part of the result
        found = load_task(task, size=chosen_size)
        with progress(f"fit {found.name}") as say:
            plan = make_plan(found, data=data, progress=say, **asked)
    show(plan_table(plan), plan.to_json(), as_json=json)


def _from_file(path: Path | None, known: list[str]) -> dict[str, Any]:
    """The file's top-level keys, or those of its [fit] table."""
    if path is None:
        return {}
    try:
        content = tomllib.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise BadOption(f"--config {path}: {getattr(error, 'strerror', None) or error}") from None
    table = {key: value for key, value in content.items() if not isinstance(value, dict)} | content.get("fit", {})
    options = {key.replace("-", "_"): value for key, value in table.items()}
    unknown = [key for key in options if key not in known]
    if unknown:
        raise BadOption(f"--config {path}: unknown option {', '.join(unknown)}; known are {', '.join(known)}")
    return options


def _lengths(value: Any) -> tuple[int, ...]:
    parts = value if isinstance(value, list) else str(value).split(",")
    try:
        return tuple(int(part) for part in parts)
    except ValueError:
        raise BadOption(f"--lengths {value}: write whole numbers with commas between them, such as 256,256") from None
