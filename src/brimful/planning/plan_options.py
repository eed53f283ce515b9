"""What the user may set for a plan. Whatever is left alone is chosen; whatever is set is kept, or the plan is refused.

`brimful.plan` takes these fields as keywords, and the command line makes its flags from them and the docstring under
each. Torch is not imported here, so that `brimful --help` takes 0.3 s instead of 3.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal, get_args

from brimful.errors import BadOption
from brimful.task import Precision, Shape, Task
from brimful.units import is_number, is_whole, parse_bytes

AutoOnOff = Literal["auto", "on", "off"]
Checkpointed = Literal["off", "every-3", "every-2", "on", "offload"]
"""The blocks that run again in backward: none, every third, every second, or all; and all, with their inputs in host RAM."""
AutoCheckpointed = Literal["auto", "on", "every-2", "every-3", "off", "offload"]
Weights = Literal["fp32", "bf16"]


@dataclass(frozen=True, kw_only=True)
class PlanOptions:
    """The options of `brimful plan` and `brimful.plan`."""

    global_batch: int | None = None
    """Rows per optimizer step, over all micro-batches and processes. Default: the task's value."""
    micro_batch: int | Literal["auto"] = "auto"
    """Rows per forward and backward. A number is an upper bound that is never raised."""
    memory_limit: int | str | None = None
    """Memory to use at most, such as 20GiB: reserved bytes on a GPU, a simulated limit on the CPU. Default: what is free."""
    host_limit: int | str | None = None
    """Host RAM to use at most, such as 16GiB. Default: what this process may use."""
    fill: float = 0.85
    """The share of the memory limit to plan for."""
    device: str = "auto"
    """`cpu`, `cuda`, `cuda:1`, `mps` or `xpu`. Default: the first accelerator, else the CPU."""
    processes: int = 1
    """Processes that share the global batch."""
    layout: Literal["auto", "padded", "packed"] = "auto"
    """Rows of a micro-batch padded side by side, or packed end to end. `auto` packs where the task and the GPU can."""
    compile: AutoOnOff = "auto"
    """Compiled blocks. `auto` compiles packed steps on CUDA."""
    checkpointing: AutoCheckpointed = "auto"
    """Gradient checkpointing of every block, of every second or third, or of none; `offload` also moves what is kept of each
    block to host RAM. `auto` uses it if it is faster or if nothing else fits."""
    precision: Precision | None = None
    """The precision of autocast. Default: the task's value."""
    weights: Weights | None = None
    """The dtype of the weights, and so of gradients and most optimizer states. bf16 halves them, and rounds small updates away.
    Default: as the task makes them."""
    cuda_graphs: AutoOnOff = "auto"
    """Micro-batches of one size replayed as a CUDA graph. `auto` uses it where that is faster."""
    cudnn_attention: AutoOnOff = "auto"
    """cuDNN's attention kernels on CUDA. `auto` uses them only where all rows have one shape."""
    workers: int | Literal["auto"] = "auto"
    """Loader workers per process; 0 reads in the training process."""
    prefetch: int | Literal["auto"] = "auto"
    """Steps that each worker reads ahead."""
    pin_memory: AutoOnOff = "auto"
    """Pinned host memory, from which a GPU copies while it computes."""
    lengths: Shape | None = None
    """The lengths to plan for. Default: the longest in the data, else the task's worst shape."""
    allow_inexact: bool = False
    """Split a step even if that changes its result, because the loss looks across rows."""
    deterministic: bool = False
    """Let nothing that is timed decide: plan and split follow from the inputs, and torch's deterministic algorithms are used."""
    plan_seconds: float | None = None
    """Time for probes, after the first step. What does not fit into it is not tried. Default: 30 s on a GPU, 20 s on a CPU."""
    table: bool = False
    """Also try every other setting of the levers, and show all that was tried in a table."""
    cache: bool = True
    """Reuse a saved plan with the same key, and save this one."""
    seed: int = 0
    """Seed of the probe batches and of the temporary model."""

    def __post_init__(self) -> None:
        problems = list(_problems(self))
        if problems:
            raise BadOption(" ".join(problems))

    @property
    def memory_limit_bytes(self) -> int | None:
        return None if self.memory_limit is None else parse_bytes(self.memory_limit)

    def precision_for(self, task: Task) -> Precision:
        """bf16 weights compute in bf16: without autocast, they cannot be multiplied with rows of fp32."""
        return "bf16" if self.weights == "bf16" else self.precision or task.precision

    @property
    def host_limit_bytes(self) -> int | None:
        return None if self.host_limit is None else parse_bytes(self.host_limit)


_LEAST = {"global_batch": 1, "processes": 1, "micro_batch": 1, "workers": 0, "prefetch": 1, "seed": 0}
_WORDS = {
    "layout": ("auto", "padded", "packed"),
    "compile": get_args(AutoOnOff),
    "checkpointing": ("auto", *get_args(Checkpointed)),
    "cuda_graphs": get_args(AutoOnOff),
    "cudnn_attention": get_args(AutoOnOff),
    "pin_memory": get_args(AutoOnOff),
    "precision": (None, *get_args(Precision)),
    "weights": (None, *get_args(Weights)),
}


def _problems(options: PlanOptions) -> Iterator[str]:
    """One sentence for each value that cannot work."""
    whole = True
    for name, least in _LEAST.items():
        value = getattr(options, name)
        if value not in (None, "auto") and not is_whole(value, least):
            whole = False
            yield f"{name}={value!r} must be a whole number of at least {least}."
    fill = options.fill
    if not is_number(fill) or not 0 < fill <= 1:
        yield f"fill={fill!r} must be above 0 and at most 1."
    if whole and options.global_batch is not None and options.global_batch < options.processes:
        yield f"global_batch={options.global_batch} gives {options.processes} processes less than a row each. Try: fewer processes=."
    for name, words in _WORDS.items():
        value = getattr(options, name)
        if value not in words:
            yield f"{name}={value!r} must be one of {', '.join(filter(None, words))}."
    if options.weights == "bf16" and options.precision in ("fp32", "fp16"):
        yield f"weights='bf16' cannot be combined with precision={options.precision!r}. Try: precision='bf16'."
    lengths = options.lengths
    if lengths is not None and not (
        isinstance(lengths, (tuple, list)) and all(is_whole(length, 1) for length in lengths)
    ):
        yield f"lengths={lengths!r} must be whole numbers of at least 1. Try: lengths=(256, 256)."
    seconds = options.plan_seconds
    if seconds is not None and not (is_number(seconds) and seconds > 0):
        yield f"plan_seconds={seconds!r} must be a number above 0."
    elif seconds is not None and options.deterministic:
        yield "plan_seconds= cannot be combined with deterministic=True, where time decides nothing. Try: one of the two."
    for name in ("cache", "allow_inexact", "deterministic", "table"):
        if not isinstance(getattr(options, name), bool):
            yield f"{name}={getattr(options, name)!r} must be True or False."
    for name in ("memory_limit", "host_limit"):
        value = getattr(options, name)
        try:
            if value is not None:
                parse_bytes(value)
        except BadOption:
            yield f"{name}={value!r} must be a positive size, such as 20GiB or 512MiB."
