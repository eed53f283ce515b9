"""CUDA tensors without CUDA: lets the step of a GPU run on a machine that has none.

torch's `FakeTensorMode` runs a program on tensors that have a shape, a dtype and a device, but no bytes. Without a GPU three things
stand in its way:

    autograd    asks the CUDA backend for its device and stream. A few lines of C++ answer instead (`load_shim`). They are compiled
                once, in 3 to 8 s, and are switched on only while a step is traced.
    autocast    switches itself off where no GPU is seen.
    kernels     torch chooses them for the machine it runs on: see `fake_kernels`.

It works with torch for CPUs and with torch for CUDA, whether or not there is a driver; a GPU that is there is not touched. Without a
C++ compiler the same step is traced on fake CPU tensors (`like_cuda` applies CUDA's rules), with a larger error.
"""

import ctypes
import hashlib
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch
import torch.cuda.amp.common
import torch.nn.functional as F
from torch._subclasses.fake_tensor import FakeTensorMode

from brimful.files import cache_folder

SHIM = r"""
#include <ATen/detail/CUDAHooksInterface.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>

// Says that CUDA exists, with one device and one stream, and does nothing.
struct Hooks final : public at::CUDAHooksInterface {
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
  bool hasPrimaryContext(c10::DeviceIndex) const override { return false; }
  void init() const override {}
};

struct Guard final : c10::impl::NoOpDeviceGuardImpl<c10::DeviceType::CUDA> {
  static constexpr auto kind = c10::DeviceType::CUDA;
  static c10::Stream stream() { return c10::Stream(c10::Stream::DEFAULT, c10::Device(kind, 0)); }
  c10::Device exchangeDevice(c10::Device) const override { return c10::Device(kind, 0); }
  c10::Device getDevice() const override { return c10::Device(kind, 0); }
  c10::Stream getStream(c10::Device) const noexcept override { return stream(); }
  c10::Stream getDefaultStream(c10::Device) const override { return stream(); }
  c10::Stream exchangeStream(c10::Stream) const noexcept override { return stream(); }
  void record(void**, const c10::Stream&, const c10::DeviceIndex, const c10::EventFlag) const override {}
  void block(void*, const c10::Stream&) const override {}
  bool queryEvent(void*) const override { return true; }
};

static Hooks hooks;
static Guard guard;
static void* hooks_before = nullptr;
static const c10::impl::DeviceGuardImplInterface* guard_before = nullptr;

// torch makes its hooks object once and keeps it. The class has no members, so another class can take the object's place
// by its table of virtual functions. Switching off puts back what was there.
extern "C" void pretend_cuda(int on) {
  auto& table = *reinterpret_cast<void**>(const_cast<at::CUDAHooksInterface*>(&at::detail::getCUDAHooks()));
  auto& registered = c10::impl::device_guard_impl_registry[static_cast<size_t>(c10::DeviceType::CUDA)];
  if (on && hooks_before == nullptr) {
    hooks_before = table;
    guard_before = registered.exchange(&guard);
    table = *reinterpret_cast<void**>(&hooks);
  } else if (!on && hooks_before != nullptr) {
    table = hooks_before;
    registered.store(guard_before);
    hooks_before = nullptr;
  }
}
"""
COMPILE_S = 120
"""A compiler that takes longer than this counts as missing."""
COMPILERS = ("c++", "g++", "clang++")


@lru_cache(maxsize=1)
def load_shim() -> Callable[[int], None] | str:
    """The switch that makes torch believe in a CUDA device (1) or not (0); or why there is none, as a phrase."""
    folder = Path(torch.__file__).parent
    version = (folder / "version.py").read_bytes()
    name = hashlib.sha256(version + str(folder).encode() + SHIM.encode()).hexdigest()[:16]
    library = cache_folder("estimate") / f"shim-{name}.so"
    if not library.is_file():
        problem = _build_shim(folder, library)
        if problem is not None:
            return problem
    try:
        switch: Callable[[int], None] = ctypes.CDLL(str(library)).pretend_cuda
    except (OSError, AttributeError) as error:
        return f"the compiled shim cannot be loaded ({error})"
    return switch


def _build_shim(folder: Path, library: Path) -> str | None:
    """Compile it with the system's C++ compiler. Returns why that did not work, or None."""
    compiler = next(filter(None, map(shutil.which, COMPILERS)), None)
    if compiler is None:
        return "there is no C++ compiler"
    if not (folder / "include" / "ATen").is_dir():
        return "this build of torch has no C++ headers"
    unfinished = library.with_suffix(f".{os.getpid()}.tmp")
    command = [
        compiler, "-O1", "-w", "-std=c++20", "-shared", "-fPIC", "-x", "c++", "-", "-o", str(unfinished),
        f"-I{folder / 'include'}", f"-L{folder / 'lib'}", "-lc10", "-ltorch_cpu", f"-Wl,-rpath,{folder / 'lib'}",
    ]  # fmt: skip
    try:
        library.parent.mkdir(parents=True, exist_ok=True)
        done = subprocess.run(command, input=SHIM, capture_output=True, text=True, timeout=COMPILE_S, check=False)
        if done.returncode:
            return f"{compiler} failed: {next(iter(done.stderr.strip().splitlines()), 'no message')}"
        unfinished.replace(library)
    except (OSError, subprocess.TimeoutExpired) as error:
        return f"{compiler} did not work ({error})"
    return None


@contextmanager
def fake_device(device: torch.device, *, has_bf16: bool) -> Iterator[FakeTensorMode]:
    """Programs in here compute on fake tensors. `device` is cuda where `load_shim` succeeded, else cpu."""
    mode = FakeTensorMode(allow_non_fake_inputs=True, allow_fallback_kernels=False)  # they would ask for a real GPU
    switch = load_shim() if device.type == "cuda" else None
    with ExitStack() as stack:
        for owner, name, function in (
            (torch.cuda.amp.common, "amp_definitely_not_available", lambda: False),
            (torch.cuda, "is_bf16_supported", lambda including_emulation=True: including_emulation or has_bf16),
            (torch.backends.cudnn, "is_acceptable", lambda tensor: False),  # without a warning that it is missing
            (torch.cuda, "current_device", lambda: 0),
            (torch.cuda, "synchronize", lambda device=None: None),
            (torch.cuda, "is_current_stream_capturing", lambda: False),
        ):
            stack.enter_context(replaced(owner, name, function))
        masks = sys.modules.get("transformers.masking_utils")
        if masks is not None and hasattr(masks, "is_tracing"):  # it would keep every mask, as for export
            stack.enter_context(replaced(masks, "is_tracing", lambda tensor=None: False))
        if callable(switch):
            switch(1)
            stack.callback(switch, 0)
            stack.enter_context(_whole_kernels())
        # Backward runs in this thread: torch starts its threads for devices once, maybe before there was a device.
        stack.enter_context(torch.autograd.set_multithreading_enabled(False))
        stack.enter_context(mode)
        if device.type == "cpu":
            stack.enter_context(like_cuda())
        yield mode


WHOLE = ("silu_backward", "mish_backward", "_fused_rms_norm")
"""Kernels of CUDA that torch for CPUs puts together from several operations, each with a result of its own: a U-Net took 20 % more."""

IN_PLACE = ("_fused_sgd_", "_fused_sgd_.tensor_lr", "_fused_adagrad_", "_fused_adagrad_.tensor_lr")
"""Fused optimizers without shapes in some versions of torch."""


@contextmanager
def _whole_kernels() -> Iterator[None]:
    """Register them for CUDA where they are missing, and the shapes of those that have none. They never run."""
    library = torch.library.Library("aten", "IMPL")
    try:
        for name in WHOLE:
            if not torch._C._dispatch_has_kernel_for_dispatch_key(f"aten::{name}", "CUDA"):
                library.impl(name, _never_run, "CUDA")
        for name, shapes in (
            ("_thnn_fused_gru_cell", _gru_cell),
            ("_thnn_fused_gru_cell_backward", _gru_cell_backward),
            *((name, _in_place) for name in IN_PLACE if _is_known(name)),
        ):
            if not torch._C._dispatch_has_kernel_for_dispatch_key(f"aten::{name}", "Meta"):
                library.impl(name, shapes, "Meta")
        yield
    finally:
        library._destroy()


def _gru_cell(gates: Any, hidden_gates: Any, hidden: Any, *biases: Any) -> tuple[Any, Any]:
    return torch.empty_like(hidden), hidden.new_empty((hidden.shape[0], 5 * hidden.shape[1]))


def _gru_cell_backward(grad: Any, workspace: Any, has_bias: bool) -> tuple[Any, ...]:
    gates, hidden_gates = (grad.new_empty((grad.shape[0], 3 * grad.shape[1])) for _ in range(2))
    biases = [one.new_empty(one.shape[1]) if has_bias else None for one in (gates, hidden_gates)]
    return gates, hidden_gates, torch.empty_like(grad), *biases


def _is_known(operation: str) -> bool:
    """Whether this version of torch has it."""
    name, _, overload = operation.partition(".")
    packet = getattr(torch.ops.aten, name, None)
    return packet is not None and (overload or "default") in packet.overloads()


def _in_place(*args: Any, **kwargs: Any) -> None:
    """Of an operation that changes what it is given and allocates nothing."""


def _never_run(*args: Any, **kwargs: Any) -> Any:
    raise NotImplementedError("this stands for a kernel of CUDA and computes nothing")


IN_FP32 = (
    *((F, name) for name in ("softmax", "log_softmax", "cross_entropy", "nll_loss", "layer_norm", "group_norm")),
    *((torch, name) for name in ("softmax", "log_softmax", "pow", "rsqrt")),
    *((torch.Tensor, name) for name in ("softmax", "log_softmax", "pow")),
)
"""What CUDA's autocast computes in fp32 and the CPU's does not."""


@contextmanager
def like_cuda() -> Iterator[None]:
    """CPU tensors follow CUDA's rules of autocast, and dropout keeps a mask of bytes.

    Functions are replaced: a mode of torch would not reach blocks that backward runs again.
    """
    with ExitStack() as stack:
        for owner, name in IN_FP32:
            stack.enter_context(replaced(owner, name, _in_fp32(getattr(owner, name))))
        stack.enter_context(replaced(F, "dropout", _dropout))
        yield


def _in_fp32(function: Callable[..., Any]) -> Callable[..., Any]:
    def run(*args: Any, **kwargs: Any) -> Any:
        if not torch.is_autocast_enabled("cpu"):
            return function(*args, **kwargs)
        floats = (one.float() if isinstance(one, torch.Tensor) and one.is_floating_point() else one for one in args)
        with torch.autocast("cpu", enabled=False):
            return function(*floats, **kwargs)

    return run


def _dropout(tensor: torch.Tensor, p: float = 0.5, training: bool = True, inplace: bool = False) -> torch.Tensor:
    return torch.native_dropout(tensor, p, True)[0] if training and p else tensor


@contextmanager
def replaced(owner: Any, name: str, function: Any) -> Iterator[None]:
    """Another function under this name of a module or class, in the block."""
    before = vars(owner).get(name)
    setattr(owner, name, function)
    try:
        yield
    finally:
        if before is None:
            delattr(owner, name)  # it was inherited, or not there
        else:
            setattr(owner, name, before)
