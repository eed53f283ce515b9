"""Out-of-memory is recognised in every wording, never where it is not, and nothing of it stays behind."""

import gc
import re
import signal
import sys
import weakref
from contextlib import contextmanager, nullcontext

import numpy as np
import pytest
import torch

from brimful.memory import oom
from brimful.memory.ledger import Ledger, simulated_memory
from brimful.memory.oom import OutOfMemory, attempt, is_oom

CPU = torch.device("cpu")
WORDINGS = {
    "CUDA": torch.OutOfMemoryError(
        "CUDA out of memory. Tried to allocate 1.23 GiB. GPU 0 has a total capacity of 19.70 GiB of which 1.11 GiB is free."
    ),
    "CUDA as RuntimeError": RuntimeError("CUDA out of memory. Tried to allocate 20.00 MiB (GPU 0; 10.76 GiB total capacity)"),
    "CUDA runtime": RuntimeError("CUDA error: out of memory\nCUDA kernel errors might be asynchronously reported"),
    "CUDA driver": RuntimeError("CUDA driver error: out of memory"),
    "cuBLAS": RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"),
    "cuBLAS handle": RuntimeError("CUDA error: CUBLAS_STATUS_NOT_INITIALIZED when calling `cublasCreate(handle)`"),
    "cuDNN": RuntimeError("cuDNN error: CUDNN_STATUS_NOT_SUPPORTED. This error may appear if you passed in a non-contiguous input."),
    "cuDNN alloc": RuntimeError("cuDNN error: CUDNN_STATUS_ALLOC_FAILED"),
    "NCCL": RuntimeError("NCCL error: unhandled cuda error. Last error: Failed to CUDA calloc async 608 bytes"),
    "HIP": RuntimeError("HIP out of memory. Tried to allocate 2.00 GiB"),
    "MPS": RuntimeError("MPS backend out of memory (MPS allocated: 17.8 GB, other allocations: 384 KB, max allowed: 18.1 GB)."),
    "XPU": torch.OutOfMemoryError("XPU out of memory. Tried to allocate 4.00 GiB."),
    "XPU runtime": RuntimeError("level_zero backend failed with error: 39 (UR_RESULT_ERROR_OUT_OF_DEVICE_MEMORY)"),
    "XPU host": RuntimeError("level_zero backend failed with error: 38 (UR_RESULT_ERROR_OUT_OF_HOST_MEMORY)"),
    "CPU": RuntimeError("[enforce fail at alloc_cpu.cpp:127] err == 0. DefaultCPUAllocator: can't allocate memory: you tried to allocate 4 bytes."),
    "CPU on Windows": RuntimeError("[enforce fail at alloc_cpu.cpp:80] data. DefaultCPUAllocator: not enough memory: you tried to allocate 4 bytes."),
    "Python": MemoryError(),
    "the kernel": OSError(12, "Cannot allocate memory"),
}  # fmt: skip
OTHERS = {
    "illegal access": RuntimeError("CUDA error: an illegal memory access was encountered"),
    "illegal access that mentions memory": RuntimeError(
        "CUDA error: an illegal memory access was encountered; the device may be out of memory"
    ),
    "device-side assert": RuntimeError("CUDA error: device-side assert triggered (out of memory?)"),
    "misaligned address": RuntimeError("CUDA error: misaligned address, not out of memory"),
    "launch failure": RuntimeError("CUDA error: unspecified launch failure after out of memory"),
    "shapes": RuntimeError("mat1 and mat2 shapes cannot be multiplied (8x4 and 3x2)"),
    "shared memory of a kernel": RuntimeError(
        "out of resource: shared memory, Required: 266240, Hardware limit: 232448"
    ),
    "KeyError": KeyError("out of memory"),
    "ValueError": ValueError("this text is about running out of memory, CUDA out of memory"),
    "missing file": FileNotFoundError(2, "No such file or directory"),
}


def named(cases: dict[str, BaseException]) -> pytest.MarkDecorator:
    return pytest.mark.parametrize("error", cases.values(), ids=cases.keys())


@contextmanager
def at_most(seconds: float):
    """Ends a loop that never would."""

    def stop(*_: object) -> None:
        raise TimeoutError(f"still running after {seconds} s")

    before = signal.signal(signal.SIGALRM, stop)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


@named(WORDINGS)
def test_it_is_out_of_memory_in_the_words_of(error):
    assert is_oom(error)


@named(OTHERS)
def test_it_is_not_out_of_memory(error):
    assert not is_oom(error)


def test_what_this_torch_says_when_the_cpu_allocator_fails_is_out_of_memory():
    with pytest.raises(RuntimeError) as raised:
        torch.empty(2**60, dtype=torch.uint8)
    assert is_oom(raised.value)


def test_what_this_numpy_says_when_an_array_is_too_large_is_out_of_memory():
    with pytest.raises(MemoryError) as raised:
        np.empty(2**60, dtype=np.uint8)
    assert is_oom(raised.value)


def test_what_a_ledger_raises_is_out_of_memory():
    with Ledger(100), pytest.raises(RuntimeError) as raised:
        torch.zeros(100)
    assert is_oom(raised.value)


def raised_from(error: Exception, cause: BaseException) -> Exception:
    try:
        raise error from cause
    except Exception as made:
        return made


@pytest.mark.parametrize("error", [RuntimeError("step 7 failed"), ValueError("step 7 failed")], ids=type)
def test_an_error_raised_from_out_of_memory_is_out_of_memory(error):
    between = raised_from(KeyError("batch"), torch.OutOfMemoryError("CUDA out of memory."))
    assert is_oom(raised_from(error, between))


def test_an_error_raised_from_something_else_is_not():
    assert not is_oom(raised_from(RuntimeError("step 7 failed"), KeyError("batch")))


def test_an_error_met_while_handling_out_of_memory_is_not_itself_out_of_memory():
    try:
        try:
            raise torch.OutOfMemoryError("CUDA out of memory.")
        except torch.OutOfMemoryError:
            raise KeyError("the handler's own mistake")  # noqa: B904
    except KeyError as error:
        assert not is_oom(error)


def test_an_illegal_access_raised_from_out_of_memory_is_an_illegal_access():
    illegal = RuntimeError("CUDA error: an illegal memory access was encountered")
    assert not is_oom(raised_from(illegal, torch.OutOfMemoryError("CUDA out of memory.")))


def test_an_error_raised_from_an_illegal_access_is_no_out_of_memory():
    illegal = RuntimeError("CUDA error: an illegal memory access was encountered")
    assert not is_oom(raised_from(RuntimeError("step 7 failed"), illegal))


def test_an_error_raised_from_itself_is_judged_by_its_own_words():
    error = RuntimeError("step 7 failed")
    assert not is_oom(raised_from(error, error))


def test_attempt_hands_on_the_result():
    assert attempt(lambda: 42, CPU) == 42


def test_attempt_says_what_ran_out():
    def run() -> None:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 1.23 GiB.")

    assert attempt(run, CPU) == OutOfMemory("CUDA out of memory. Tried to allocate 1.23 GiB.")


class Wide(torch.nn.Module):
    def forward(self, batch: torch.Tensor) -> torch.Tensor:
        return batch.repeat(1, 1024)


def test_attempt_names_the_function_of_the_model_that_wanted_memory():
    with simulated_memory("1MiB"):
        failed = attempt(lambda: Wide()(torch.ones(1024, 4)), CPU)
    assert isinstance(failed, OutOfMemory)
    assert re.fullmatch(r"Wide\.forward \(test_oom\.py:\d+\)", failed.place)


def test_an_error_without_words_is_called_by_its_kind():
    def run() -> None:
        raise MemoryError

    assert attempt(run, CPU) == OutOfMemory("MemoryError")


@named(OTHERS)
def test_attempt_lets_other_errors_through(error):
    def run() -> None:
        raise error

    with pytest.raises(type(error)) as raised:
        attempt(run, CPU)
    assert raised.value is error


@pytest.mark.parametrize("stop", [KeyboardInterrupt, SystemExit])
def test_attempt_lets_the_user_stop(stop):
    def run() -> None:
        raise stop

    with pytest.raises(stop):
        attempt(run, CPU)


def fail(held: list[weakref.ref]) -> None:
    """Runs out of memory with a tensor in a local variable."""
    local = torch.zeros(10)
    held.append(weakref.ref(local))
    raise torch.OutOfMemoryError(f"CUDA out of memory with {len(local)} floats held")


def test_the_traceback_holds_the_tensors_inside_an_except_block():
    held = []
    try:
        fail(held)
    except torch.OutOfMemoryError:
        gc.collect()
        assert held[0]() is not None  # why cleaning up here would free nothing


def test_no_tensor_of_the_failed_function_outlives_attempt():
    held = []
    attempt(lambda: fail(held), CPU)
    assert held[0]() is None


def test_no_tensor_in_a_cycle_outlives_attempt():
    held = []

    def run() -> None:
        ring: list = [torch.zeros(10)]
        ring.append(ring)
        held.append(weakref.ref(ring[0]))
        raise torch.OutOfMemoryError("CUDA out of memory.")

    attempt(run, CPU)
    assert held[0]() is None


def test_no_tensor_of_an_error_behind_the_error_outlives_attempt():
    held, kept = [], []

    def run() -> None:
        try:
            fail(held)
        except torch.OutOfMemoryError as error:
            kept.append(error)  # as a logger might
            raise RuntimeError("step 7 failed") from error

    attempt(run, CPU)
    assert held[0]() is None


def test_no_tensor_outlives_attempt_even_if_someone_keeps_the_error():
    held, kept = [], []

    def run() -> None:
        try:
            fail(held)
        except torch.OutOfMemoryError as error:
            kept.append(error)
            raise

    attempt(run, CPU)
    assert held[0]() is None


def test_all_memory_is_back_after_attempt_when_backward_ran_out():
    weight = torch.zeros(1000, requires_grad=True)

    def step() -> None:
        weight.exp().exp().sum().backward()

    with Ledger(13_000) as ledger:
        assert isinstance(attempt(step, CPU), OutOfMemory)
        assert ledger.live_bytes == 4000


class Fails(torch.autograd.Function):
    """A backward for which there is no memory."""

    @staticmethod
    def forward(ctx, tensor):
        return tensor.clone()

    @staticmethod
    def backward(ctx, grad):
        raise torch.OutOfMemoryError("CUDA out of memory.")


def test_branches_that_a_failed_backward_did_not_reach_are_dropped():
    activations = []

    def run() -> None:
        leaf = torch.ones(1000, requires_grad=True)
        branches = []
        for number in range(8):
            factor = torch.ones(1000)
            activations.append(weakref.ref(factor))
            branch = leaf * factor
            branches.append((Fails.apply(branch) if number == 7 else branch).sum())
        sum(branches).backward()

    assert isinstance(attempt(run, CPU), OutOfMemory)
    assert [one() for one in activations] == [None] * 8


def test_attempt_ends_on_an_error_that_was_raised_from_itself():
    def run() -> None:
        try:
            raise torch.OutOfMemoryError("CUDA out of memory.")
        except torch.OutOfMemoryError as error:
            raise error from error

    with at_most(60.0):
        assert attempt(run, CPU) == OutOfMemory("CUDA out of memory.")


def test_the_caller_cleans_up_after_the_frames_are_dropped_and_before_the_cache_is_emptied(monkeypatch):
    held, done = [], []
    monkeypatch.setattr(oom.gc, "collect", lambda generation: done.append(f"collect {generation}"))
    monkeypatch.setattr(oom, "empty_cache", lambda device: done.append(f"empty the cache of {device}"))

    def clean() -> None:
        done.append("clean, tensors alive" if held[0]() is not None else "clean, tensors gone")

    attempt(lambda: fail(held), CPU, clean=clean)
    assert done == ["clean, tensors gone", "collect 2", "empty the cache of cpu"]


def test_a_quick_clean_up_leaves_old_objects_alone(monkeypatch):
    done = []
    monkeypatch.setattr(oom.gc, "collect", done.append)
    attempt(lambda: fail([]), CPU, thorough=False)
    assert done == [1]


def test_the_caller_cleans_up_outside_of_the_except_block():
    found = []
    attempt(lambda: fail([]), CPU, clean=lambda: found.append(sys.exc_info()[0]))
    assert found == [None]


def test_what_the_caller_lets_go_is_free_when_attempt_returns():
    holder = {}

    def run() -> None:
        ring: list = [torch.zeros(1000)]
        ring.append(ring)
        holder["kept"] = ring
        raise torch.OutOfMemoryError("CUDA out of memory.")

    with Ledger(100_000) as ledger:
        attempt(run, CPU, clean=holder.clear)
        assert ledger.live_bytes == 0


@pytest.mark.parametrize("error", [None, ValueError("other")], ids=["well", "other error"])
def test_the_caller_cleans_up_only_where_memory_ran_out(error):
    called = []

    def run() -> None:
        if error:
            raise error

    with pytest.raises(ValueError) if error else nullcontext():
        attempt(run, CPU, clean=lambda: called.append(1))
    assert called == []
