"""What the user may fix. Everything left alone is chosen; everything given stays as given, or the fit refuses."""

from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Any, Literal, get_args

from brimful.errors import BadOption
from brimful.task import Precision, Shape
from brimful.units import parse_bytes

Lever3 = Literal["auto", "on", "off"]


@dataclass(frozen=True, kw_only=True)
class FitOptions:
    """The words that `brimful fit` and `brimful.fit` share. None means: not asked for."""

    global_batch: int | None = None
    """Rows per optimizer step, exact, over all micro-batches and processes. The task's own unless given."""
    micro_batch: int | Literal["auto"] = "auto"
    """Rows per forward and backward; a fixed number is a ceiling that is never raised."""
    memory_limit: int | str | None = None
    """Cap on the memory to use: reserved bytes on a GPU, a virtual limit on the CPU. What is free unless given."""
    host_limit: int | str | None = None
    """Cap on host RAM. What this process may use unless given."""
    fill: float = 0.85
    """The share of the limit to plan for."""
    device: str = "auto"
    """`cpu`, `cuda`, `cuda:1`, `mps`, `xpu`; the first accelerator, else the CPU, unless given."""
    processes: int = 1
    """How many processes share the global batch."""
    checkpointing: Lever3 = "auto"
    """Gradient checkpointing: only if it is faster or nothing else fits, always, or never."""
    precision: Precision | None = None
    """What the forward is autocast to. The task's own unless given."""
    cudnn_attention: Lever3 = "auto"
    """cuDNN's attention on a card: only where all rows have one shape, wherever torch would use it, or never."""
    workers: int | Literal["auto"] = "auto"
    """Loader workers of each process; 0 reads in the process itself."""
    prefetch: int | Literal["auto"] = "auto"
    """Steps that each worker reads ahead."""
    pin_memory: Lever3 = "auto"
    """Page-locked host memory, from which a card copies while it computes."""
    lengths: Shape | None = None
    """The lengths to fit for. The task's worst shape, or the data's, unless given."""
    allow_inexact: bool = False
    """Cut a task whose loss looks across rows all the same."""
    cache: bool = True
    """Reuse a plan whose key matches, and keep this one."""
    seed: int = 0
    """Of the dummy batches and the throwaway model."""

    def __post_init__(self) -> None:
        problems = [problem for check in _CHECKS for problem in check(self)]
        if problems:
            raise BadOption("; ".join(problems))

    @property
    def memory_limit_bytes(self) -> int | None:
        return None if self.memory_limit is None else parse_bytes(self.memory_limit, flag="--memory-limit")

    @property
    def host_limit_bytes(self) -> int | None:
        return None if self.host_limit is None else parse_bytes(self.host_limit, flag="--host-limit")

    @classmethod
    def of(cls, asked: dict[str, Any]) -> "FitOptions":
        """From keywords, with one clear sentence for a word that does not exist."""
        known = [field.name for field in fields(cls)]
        unknown = [word for word in asked if word not in known]
        if unknown:
            raise BadOption(f"unknown option {', '.join(map(repr, unknown))}; fit takes {', '.join(known)}")
        return cls(**asked)


def _whole_numbers(options: FitOptions) -> list[str]:
    asked = (
        ("--global-batch", options.global_batch, 1),
        ("--processes", options.processes, 1),
        ("--micro-batch", options.micro_batch, 1),
        ("--workers", options.workers, 0),
        ("--prefetch", options.prefetch, 1),
        ("--seed", options.seed, 0),
    )
    return [
        f"{flag} {value!r}: give a whole number of at least {least}"
        for flag, value, least in asked
        if value not in (None, "auto") and (not isinstance(value, int) or isinstance(value, bool) or value < least)
    ]


def _shares(options: FitOptions) -> list[str]:
    fill = options.fill
    good = isinstance(fill, (int, float)) and not isinstance(fill, bool) and 0 < fill <= 1
    problems = [] if good else [f"--fill {fill!r}: give a share above 0 and up to 1, such as 0.85"]
    processes, rows = options.processes, options.global_batch
    if not _whole_numbers(options) and rows is not None and rows < processes:
        problems.append(f"--global-batch {rows}: {processes} processes need at least a row each")
    return problems


def _words(options: FitOptions) -> list[str]:
    allowed = {
        "checkpointing": get_args(Lever3),
        "cudnn_attention": get_args(Lever3),
        "pin_memory": get_args(Lever3),
        "precision": (None, *get_args(Precision)),
    }
    return [
        f"--{name.replace('_', '-')} {getattr(options, name)}: one of {', '.join(filter(None, words))}"
        for name, words in allowed.items()
        if getattr(options, name) not in words
    ]


def _lengths(options: FitOptions) -> list[str]:
    if options.lengths is not None and not isinstance(options.lengths, (tuple, list)):
        return [f"--lengths {options.lengths!r}: give a tuple of whole numbers, such as (256, 256)"]
    lengths: Sequence[int] = options.lengths or ()
    bad = any(not isinstance(length, int) or length < 1 for length in lengths)
    return [f"--lengths {','.join(map(str, lengths))}: give whole numbers of at least 1"] if bad else []


def _switches(options: FitOptions) -> list[str]:
    return [
        f"--{name.replace('_', '-')} {getattr(options, name)!r}: give true or false"
        for name in ("cache", "allow_inexact")
        if not isinstance(getattr(options, name), bool)
    ]


def _sizes(options: FitOptions) -> list[str]:
    problems = []
    for flag, value in (("--memory-limit", options.memory_limit), ("--host-limit", options.host_limit)):
        try:
            if value is not None:
                parse_bytes(value, flag=flag)
        except BadOption as error:
            problems.append(str(error))
    return problems


_CHECKS = (_whole_numbers, _shares, _words, _lengths, _switches, _sizes)
