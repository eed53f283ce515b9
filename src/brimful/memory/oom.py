"""How every kind of out-of-memory error is recognised, and how to clean up after one.

Cleaning up inside an `except` block frees nothing: the traceback still holds every frame, and the frames hold the tensors.
And a backward that fails leaves the branches that it had yet to compute in the queue of its thread, with their tensors, until the
next backward there. So `attempt` runs a function, leaves the block, clears the frames and the queue, and only then collects garbage
and empties the cache:

    result = attempt(lambda: step(rows), device)
    if isinstance(result, OutOfMemory):
        ...                                    # memory is free again; restoring random state is up to the caller

An illegal memory access is never taken for out-of-memory: the CUDA context is lost, and a retry would hang or compute
nonsense.
"""

import gc
import re
import traceback
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeVar

import torch

T = TypeVar("T")

_NEVER = ("illegal memory access", "device-side assert", "misaligned address", "unspecified launch failure")
_SIGNS = (
    "out of memory",  # CUDA, HIP, XPU and MPS allocators; "CUDA error: out of memory"
    "CUBLAS_STATUS_ALLOC_FAILED",
    "CUBLAS_STATUS_NOT_INITIALIZED",  # cuBLAS cannot create its handle on a full GPU
    "CUDNN_STATUS_NOT_SUPPORTED",  # a convolution whose workspace does not fit with any algorithm
    "CUDNN_STATUS_ALLOC_FAILED",
    "DefaultCPUAllocator: can't allocate memory",
    "DefaultCPUAllocator: not enough memory",
    "OUT_OF_DEVICE_MEMORY",  # XPU's runtime
    "OUT_OF_HOST_MEMORY",
    "UR_RESULT_ERROR_OUT_OF_RESOURCES",
    "Failed to CUDA calloc",  # NCCL
    "Cannot allocate memory",
)
_MODEL_CODE = ("brimful.packing", "brimful.tasks")
"""Brimful's own code that computes for a model. The rest of it only calls others."""


@dataclass(frozen=True, slots=True)
class OutOfMemory:
    """What remains of an out-of-memory error after its tensors are freed."""

    message: str
    place: str = field(default="", compare=False)
    """The innermost function of the model or the task: `T5Attention.forward (modeling_t5.py:431)`. Empty in backward, whose
    operations have no frames."""

    @property
    def asked(self) -> str:
        """The size of the block that there was no room for, as the error writes it: `2.00 GiB`; empty if it does not."""
        match = re.search(r"(?:[Tt]ried to allocate|asked for) ([\d.]+ \w+)", self.message)
        return match[1] if match else ""


def is_oom(error: BaseException) -> bool:
    """Whether this error, or one that it was raised from, means that memory ran out."""
    seen: list[BaseException] = []
    cause: BaseException | None = error
    while cause is not None and cause not in seen:
        if any(sign in str(cause) for sign in _NEVER):
            return False
        if isinstance(cause, (torch.OutOfMemoryError, MemoryError)):
            return True
        if isinstance(cause, (RuntimeError, OSError)) and any(sign in str(cause) for sign in _SIGNS):
            return True
        seen.append(cause)
        cause = cause.__cause__
    return False


def attempt(
    run: Callable[[], T], device: torch.device, clean: Callable[[], object] | None = None, *, thorough: bool = True
) -> T | OutOfMemory:
    """The result of `run`, or `OutOfMemory` with everything it held freed.

    `clean` drops what the caller holds (gradients) before the cache is emptied. With `thorough=False` only young objects
    are collected, which covers what a step leaves; with transformers imported that takes 1 ms instead of 200.
    """
    try:
        return run()
    except Exception as error:
        if not is_oom(error):
            raise
        message, place = str(error) or type(error).__name__, _place(error)
        _clear_frames(error)
    _clear_queue()
    if clean is not None:
        clean()
    gc.collect(2 if thorough else 1)
    empty_cache(device)
    return OutOfMemory(message, place)


def empty_cache(device: torch.device) -> None:
    """Return cached blocks to the device, if it has a cache."""
    if device.type not in ("cpu", "meta"):
        torch.accelerator.empty_cache()


def _clear_queue() -> None:
    """Let autograd drop what a failed backward left in the queue of this thread, which it does in the next one: here of a tensor
    without bytes. Two heads on a trunk kept all activations of the trunk: 17 MiB of an 18 MiB limit."""
    with torch.enable_grad():
        torch.zeros((), device="meta", requires_grad=True).backward()


def _place(error: BaseException) -> str:
    """Where the model was. Only names are read, because a frame keeps a copy of its locals once somebody has looked at them."""
    for frame, line in reversed(list(traceback.walk_tb(error.__traceback__))):
        name = str(frame.f_globals.get("__name__", ""))
        if name.startswith(_MODEL_CODE) or name.partition(".")[0] not in ("torch", "brimful"):
            return f"{frame.f_code.co_qualname} ({Path(frame.f_code.co_filename).name}:{line})"
    return ""


def _clear_frames(error: BaseException) -> None:
    """Clear the local variables of every frame in the traceback, and in those of the errors behind it."""
    seen: list[BaseException] = []
    behind: list[BaseException | None] = [error]
    while behind:
        one = behind.pop()
        if one is not None and one not in seen:
            seen.append(one)
            traceback.clear_frames(one.__traceback__)
            behind += [one.__cause__, one.__context__]
