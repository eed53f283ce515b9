"""The allocation history of a training step on fake tensors: which bytes, when, for what, until when.

`trace_step` builds the task's model on the fake device, runs two optimizer steps of the size asked for through the same
`StepContext` that training uses, and returns their `History`. A dispatch mode sees each new storage, and a weak reference sees it
die; storages are counted, not operations, so views and in-place updates cost nothing, as on the card.

Whole numbers of a batch keep their values beside the fake tensors (`KnownValues`): transformers leaves a mask of ones out, and then
takes another attention kernel. What else a fake tensor cannot know is assumed, and every assumption is reported with the line that
needed it:

    .item(), bool(tensor), .numpy() 1 or True; numbers are finite, so that a check for NaN finds none
    nonzero, x[mask], masked_select every element counts, which is the most it can be
"""

import gc
import logging
import math
import random
import re
import sys
import traceback
import warnings
import weakref
from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_iter

from brimful.errors import TaskError, UserError, in_one_line, user_line
from brimful.estimation.cards import HOPPER_CUBLAS_BYTES
from brimful.estimation.fake_cuda import fake_device, replaced
from brimful.estimation.fake_kernels import AttentionChoice, card_kernels
from brimful.estimation.kernel_memory import Held, held
from brimful.memory.context import StepContext, tensors_of
from brimful.memory.history import CUBLAS, FIRST_STEP, SECOND_STEP, History, Kind
from brimful.memory.layout import LAYOUTS, LayoutName
from brimful.memory.snapshot import RandomState
from brimful.memory.temporaries import Temporary
from brimful.planning.levers import EVERY, Lever, checkpointing, repeated_blocks
from brimful.planning.plan_options import Checkpointed, Weights
from brimful.planning.planner import describe
from brimful.task import Shape, Task, failure, map_tensors
from brimful.units import MiB

_aten = torch.ops.aten
_DEVICE_OF = torch.ops.prim.device.default
_numpy, _data_ptr = torch.Tensor.numpy, torch.Tensor.data_ptr
_TRITON = str(Path(torch.__file__).parents[1] / "triton")
PRODUCTS = frozenset(
    getattr(_aten, name)
    for name in ("mm", "addmm", "bmm", "baddbmm", "addmv", "dot", "vdot", "_int_mm", "_scaled_mm", "_addmm_activation")
    if hasattr(_aten, name)
)
"""Operations that cuBLAS computes on a card. The others, such as `matmul` and `linear`, are made of these."""
CUBLAS_LT, CUBLAS_LT_BYTES = "cuBLASLt", 1 * MiB
"""On every card. Counted on an H200 with torch 2.11: models without biases do not have it."""
_ENGINE = torch.autograd.graph._engine_run_backward.__code__
_ADD, _DROPOUT = _aten.add.Tensor, _aten.native_dropout.default
QUANTIZED = ("Params4bit", "Int8Params")
"""Weights of bitsandbytes."""
HEADS = ("lm_head", "score", "classifier", "output_projection", "embed_out")
"""Names of a model's last layer, whose output is counted with the loss."""
OptimizerKernels = Literal["foreach", "fused"]
PRECISIONS: dict[torch.dtype | None, str] = {None: "fp32", torch.bfloat16: "bf16", torch.float16: "fp16"}
MOST_VALUES_READ = 3_000
"""By one line in one trace. A loop that goes on until a value is small enough would not end."""
BELOW = ("torch", "brimful", "weakref", "contextlib", "functools")
"""Packages between a program and this trace: the code that reads a value is above them."""


@dataclass(frozen=True, kw_only=True)
class TracedSetting:
    """How the step is run, besides its size."""

    device: torch.device
    """The fake device: cuda, or cpu where that is not possible."""
    has_flash: bool
    """Whether the card has flash attention and fast bf16: compute capability 8.0 and above."""
    autocast: torch.dtype | None
    weights: Weights | None = None
    """None: as the task makes them."""
    checkpointing: Checkpointed = "off"
    layout: LayoutName = "padded"
    attention: AttentionChoice = "card"
    """The kernels of torch that are used: those of the card, or others to compare."""
    optimizer: OptimizerKernels | None = None
    """None: as the task or torch chooses."""
    chunked_loss: bool = True
    """Whether losses that compute logits in chunks do so."""

    def describe(self) -> str:
        """`packed bf16 checkpointed`."""
        precision = PRECISIONS[self.autocast] if self.weights != "bf16" else "bf16 with bf16 weights"
        extra = {"off": "", "on": " checkpointed"}.get(self.checkpointing, f" checkpointed {self.checkpointing}")
        return f"{self.layout} {precision}{extra}"


@dataclass
class TraceNotes:
    """What a trace noticed beside the bytes."""

    assumptions: Counter[str] = field(default_factory=Counter)
    """Sentences about values that were assumed, with how often."""
    attention: Counter[str] = field(default_factory=Counter)
    """Calls of each attention kernel."""
    workspaces: Counter[str] = field(default_factory=Counter)
    """Of cuBLAS and cuBLASLt."""
    build: "Build | None" = None
    optimizer: str = ""
    other_optimizer: OptimizerKernels | None = None
    """The other way in which torch could compute the same optimizer, if there is one."""
    model: str = ""
    """The class of the model, below adapters."""
    is_compiled: bool = False
    """Whether `torch.compile` is used, which is left out."""
    is_recurrent: bool = False
    """Whether it has LSTMs, GRUs or RNNs of torch."""
    has_adapters: bool = False
    is_quantized: bool = False
    checkpointing: Lever | None = None
    weight_bytes: int = 0
    trained_bytes: int = 0
    largest_block_bytes: int = 0
    """Weights of the largest repeated block, which a sharded model gathers at once."""
    outside_blocks_bytes: int = 0
    """Weights in no repeated block, such as embeddings and head."""
    largest_outside_bytes: int = 0
    """The largest of those, such as the head, whose gradient is the first."""

    def describe_model(self, model: nn.Module) -> None:
        self.has_adapters = hasattr(model, "peft_config")
        base: Any = model
        if self.has_adapters and hasattr(base, "get_base_model"):
            base = base.get_base_model()
        self.is_compiled = any(_is_compiled(part) for part in model.modules())
        self.model = type(getattr(base, "_orig_mod", base)).__name__
        self.is_recurrent = any(isinstance(part, nn.RNNBase) for part in model.modules())
        self.is_quantized = any(type(param).__name__ in QUANTIZED for param in model.parameters())

    def count_weights(self, model: nn.Module) -> None:
        sizes = {id(param): param.nbytes for param in model.parameters()}
        blocks = [{id(param) for param in block.parameters()} for block in repeated_blocks(model)]
        self.weight_bytes = sum(sizes.values())
        self.trained_bytes = sum(param.nbytes for param in model.parameters() if param.requires_grad)
        self.largest_block_bytes = max((sum(sizes[one] for one in block) for block in blocks), default=0)
        outside = [size for param, size in sizes.items() if not any(param in block for block in blocks)]
        self.outside_blocks_bytes, self.largest_outside_bytes = sum(outside), max(outside, default=0)


@dataclass(frozen=True)
class Build:
    """What a model allocates while it is built on a device, as its code does on the meta device.

    A head that is tied to the embeddings is allocated first and dropped then. Without expandable segments the space that it leaves
    decides where later tensors go: BERT with Adafactor would have been 27 % too high.
    """

    events: list[tuple[int, int]]
    """As in a history: of weights and buffers, and of what was dropped again."""
    kept: list[int | None]
    """The number of each weight and buffer, in the order of `_tensors_of_model`."""


class BuildRecorder(TorchDispatchMode):
    """Records the storages of the meta device."""

    def __init__(self) -> None:
        super().__init__()
        self._events: list[tuple[int, int]] = []
        self._live: dict[int, tuple[int, Any]] = {}
        self._count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for value in tree_iter(out):
            if isinstance(value, torch.Tensor) and value.device.type == "meta":
                with suppress(NotImplementedError, RuntimeError):
                    self._add(value.untyped_storage())
        return out

    def _add(self, storage: torch.UntypedStorage) -> None:
        key, index = storage._cdata, self._count
        if key in self._live:
            return
        self._count += 1
        self._events.append((index, storage.nbytes()))
        self._live[key] = (index, weakref.ref(storage, lambda _: self._free(key, index)))

    def _free(self, key: int, index: int) -> None:
        if self._live.get(key, (None,))[0] == index:
            del self._live[key]
        self._events.append((index, -1))

    def build(self, model: nn.Module) -> Build:
        """Of the model that was built, without what else still lives."""
        sizes = {index: size for index, size in self._events if size >= 0}
        kept = list[int | None]()
        for tensor in _tensors_of_model(model):
            index = self._live.get(tensor.untyped_storage()._cdata, (None,))[0] if tensor.is_meta else None
            kept.append(index if index is not None and sizes[index] == tensor.nbytes and index not in kept else None)
        chosen = {index for index, size in self._events if size < 0} | {index for index in kept if index is not None}
        numbers = {index: number for number, index in enumerate(one for one in range(self._count) if one in chosen)}
        events = [(numbers[index], size) for index, size in self._events if index in chosen]
        return Build(events, [None if index is None else numbers[index] for index in kept])


class KnownValues:
    """The values of fake tensors of whole numbers that follow from the batch: masks, labels, and what is made of them."""

    NAMES = (
        "_to_copy alias all any bitwise_and bitwise_not bitwise_or clone cumsum detach eq expand ge gt le logical_and logical_not "
        "logical_or lt max min mul ne select slice sum unbind unsqueeze view"
    )
    OPERATIONS = frozenset(getattr(_aten, name) for name in NAMES.split())
    MOST = 2**22
    """Elements of a tensor whose values are kept."""

    def __init__(self) -> None:
        self._real: dict[int, tuple[Any, torch.Tensor]] = {}

    def set(self, fake: torch.Tensor, real: torch.Tensor) -> None:
        whole = not fake.is_floating_point() and not fake.is_complex()
        if (whole and real.numel() <= self.MOST) or fake.dim() == 0:
            key = id(fake)
            self._real[key] = (weakref.ref(fake, lambda _: self._real.pop(key, None)), real)

    def get(self, fake: Any) -> torch.Tensor | None:
        found = self._real.get(id(fake))
        return found[1] if found is not None and found[0]() is fake else None

    def follow(self, func: Any, args: Any, kwargs: Any, out: Any) -> None:
        """Compute the values of a result whose arguments are known. A single random number is 0.5."""
        if func is _aten.rand.default and out.dim() == 0:  # layers are left out by such a number, or not
            with _disable_current_modes():
                self.set(out, torch.tensor(0.5))
        is_finite = _finite(func, args)
        if is_finite is not None:
            with _disable_current_modes():
                self.set(
                    out, torch.tensor(is_finite).expand(out.shape if is_finite or out.numel() <= self.MOST else ())
                )
            return
        if func.overloadpacket not in self.OPERATIONS or not isinstance(out, (torch.Tensor, list)):
            return
        tensors = [one for one in args if isinstance(one, torch.Tensor)]
        values = [self.get(one) for one in tensors]
        if any(value is None for value in values) or len(tensors) != sum(
            isinstance(one, torch.Tensor) for one in tree_iter(args)
        ):
            return
        known = iter(values)
        real_args = [next(known) if isinstance(one, torch.Tensor) else one for one in args]
        others = {name: value for name, value in kwargs.items() if name not in ("device", "pin_memory", "non_blocking")}
        with _disable_current_modes(), suppress(Exception):
            for one, real in zip(tree_iter(out), tree_iter(func(*real_args, **others)), strict=True):
                self.set(one, real)


def _finite(func: Any, args: Any) -> bool | None:
    """What a test for NaN or infinity says of finite numbers; None for any other operation. `isfinite` is two such tests."""
    if func.overloadpacket in (_aten.isnan, _aten.isinf):
        return False
    if func.overloadpacket in (_aten.eq, _aten.ne):
        if args[0] is args[1]:
            return func.overloadpacket is _aten.eq
        if isinstance(args[1], float) and args[1] == math.inf:
            return func.overloadpacket is _aten.ne
    return None


class Tracer(TorchDispatchMode):
    """Records the storages of one kind of device as they come and go."""

    def __init__(self, task: str, device: str, notes: TraceNotes) -> None:
        super().__init__()
        self.values = KnownValues()
        self._task, self._device, self.notes = task, device, notes
        self.events: list[tuple[int, int]] = []
        self.marks: list[tuple[int, str]] = []
        self.kinds: list[Kind] = []
        self.origins: list[str] = []
        self.temporaries: dict[int, Temporary] = {}
        self._live: dict[int, tuple[int, Any]] = {}
        self._phase, self._in_model, self._after_head = "", False, False
        self._modules: list[str] = []
        self._cublas_handles = set[tuple[str, bool]]()
        self._unshared: tuple[int, int] | None = None
        self._adopted: int | None = None
        self._values_read = Counter[str]()

    def mark(self, phase: str) -> None:
        """What follows belongs to this phase."""
        self._phase, self._in_model, self._after_head = phase, False, False
        self._modules.clear()
        self.marks.append((len(self.events), phase))

    def claim(self, tensors: Iterable[tuple[str, torch.Tensor]], kind: Kind) -> None:
        """These tensors are of this kind and have these names, whatever made them."""
        for name, tensor in tensors:
            entry = self._live.get(tensor.untyped_storage()._cdata)
            if entry is not None:
                self.kinds[entry[0]], self.origins[entry[0]] = kind, name

    def built(self, build: Build) -> None:
        """The model was built; its weights follow by `adopt`."""
        self.events += build.events
        count = sum(size >= 0 for _, size in build.events)
        self.kinds += ["parameters"] * count
        self.origins += ["model"] * count

    def adopt(self, index: int | None) -> None:
        """The next storage is the one with this number. None: it is a new one."""
        self._adopted = index

    @contextmanager
    def modules(self, model: nn.Module) -> Iterator[None]:
        """Know which module runs, to name the origin of an allocation."""
        names = {part: name for name, part in model.named_modules()}

        def enter(module: nn.Module, _: Any) -> None:
            if module in names:
                self._modules.append(names[module])
                self._in_model = True

        def leave(module: nn.Module, _: Any, __: Any) -> None:
            if module in names and self._modules:
                self._after_head |= self._modules.pop().rpartition(".")[2] in HEADS

        handles = [
            nn.modules.module.register_module_forward_pre_hook(enter),
            nn.modules.module.register_module_forward_hook(leave),
        ]
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # two calls more for each operation otherwise

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is _DEVICE_OF:  # two of three calls
            return args[0].fake_device
        kwargs = kwargs or {}
        if func is _ADD and self._adds_in_place(args):
            return args[0]
        if func is _aten._local_scalar_dense.default:
            known = self.values.get(args[0])
            if known is None:
                return self._stand_in(args[0])
            with _disable_current_modes():
                return known.item()
        if func is _aten.nonzero.default:
            out = args[0].new_empty((self._chosen(args[0], "nonzero()"), args[0].dim()), dtype=torch.long)
        elif func is _aten.masked_select.default:
            out = args[0].new_empty((self._chosen(args[1], "masked_select()", *args),))
        elif func in (_aten.index.Tensor, _aten.index_put.default, _aten.index_put_.default):
            out = func(args[0], self._as_numbers(args[1]), *args[2:], **kwargs)
        else:
            out = func(*args, **kwargs)
            self.values.follow(func, args, kwargs, out)
        if not self._phase:
            return out
        results = [one for one in tree_iter(out) if isinstance(one, torch.Tensor)]
        beside = held(func, args) if results and results[0].device.type == self._device else None
        if beside is None:
            for one in results if func is not _DROPOUT else reversed(results):  # the mask is allocated first
                self._track(one, func)
            if func.overloadpacket in PRODUCTS:
                self._use_cublas(func, args, out)
        else:
            self._track_beside(func, results, beside)
        return out

    def calibrate(self) -> None:
        """Learn the counts of a gradient that nothing else holds."""
        start = torch.ones(2, device=self._device, requires_grad=True)
        twice = 2 * start
        (twice.sin() + twice.cos()).sum().backward()

    def _adds_in_place(self, args: Any) -> bool:
        """Whether autograd adds up two gradients of one tensor, and would do so in the memory of the first one on a card.

        It does where nothing else holds that one. Not with fake tensors, so they would count a gradient more wherever a tensor is used
        twice, as in every residual connection.
        """
        if torch._C._current_graph_task_id() == -1 or sys._getframe(2).f_code is not _ENGINE or len(args) < 2:
            return False
        first, second = args
        if not isinstance(first, torch.Tensor) or not isinstance(second, torch.Tensor) or first.shape != second.shape:
            return False
        counts = first._use_count(), torch._C._storage_Use_Count(first.untyped_storage()._cdata)  # type: ignore[attr-defined]
        if not self._phase:
            self._unshared = counts
        return counts == self._unshared and first.dtype == second.dtype

    def _track_beside(self, func: Any, results: list[torch.Tensor], beside: Held) -> None:
        copies = [self._take(func, one) for one in beside.copies]
        for place, one in enumerate(results, 1):
            self._track(one, func)
            for count, temporaries in beside.after:
                if count == place or place == len(results) < count:
                    self.events += [(index, -1) for index in [self._take(func, one) for one in temporaries]]
        self.events += [(index, -1) for index in copies]

    def _take(self, func: Any, temporary: Temporary) -> int:
        """What the operation that just ran would have taken on a card. Returns its number, with which it is freed."""
        index = len(self.kinds)
        self.temporaries[index] = temporary
        self.events.append((index, temporary.bytes))
        self.kinds.append("workspace")
        self.origins.append(self._origin(func))
        return index

    def _use_cublas(self, func: Any, args: Any, out: Any) -> None:
        """Each thread has a handle of cuBLAS, and torch gives each handle a workspace at its first product, for good.

        Backward runs in a thread of its own on a card, so most steps have two, and a step without products has none. The first product
        with a bias, which cuBLASLt computes, takes another one.
        """
        if out.device.type != self._device:
            return
        in_backward = torch._C._current_graph_task_id() != -1
        sizes = {CUBLAS: HOPPER_CUBLAS_BYTES}
        if func.overloadpacket is _aten.addmm and args[0].dim() == 1 and min(args[2].shape) > 1:
            sizes[CUBLAS_LT] = CUBLAS_LT_BYTES
        for origin, size in sizes.items():
            if (origin, in_backward) not in self._cublas_handles:
                self._cublas_handles.add((origin, in_backward))
                self.notes.workspaces[origin] += 1
                self.events.append((len(self.kinds), size))
                self.kinds.append("workspace")
                self.origins.append(origin)

    def _track(self, tensor: torch.Tensor, func: Any) -> None:
        if not isinstance(tensor, FakeTensor) or tensor.fake_device.type != self._device:
            return
        try:
            storage = tensor.untyped_storage()
        except (NotImplementedError, RuntimeError):  # sparse tensors have none
            return
        key = storage._cdata
        if key in self._live:
            return
        if self._adopted is not None:
            index, self._adopted = self._adopted, None
            self._live[key] = (index, weakref.ref(storage, lambda _: self._freed(key, index)))
            return
        index = len(self.kinds)
        self._live[key] = (index, weakref.ref(storage, lambda _: self._freed(key, index)))
        self.events.append((index, storage.nbytes()))
        self.kinds.append(self._kind(func))
        self.origins.append(self._origin(func))

    def _origin(self, func: Any) -> str:
        where = self._modules[-1] if self._modules else self.kinds[-1]
        return f"{where} {func.overloadpacket.__name__.lstrip('_')}".strip()

    def _freed(self, key: int, index: int) -> None:
        entry = self._live.get(key)
        if entry is not None and entry[0] == index:
            del self._live[key]
        self.events.append((index, -1))

    def _kind(self, func: Any) -> Kind:
        phase = self._phase
        if phase == "build":
            return "parameters"
        if phase == "optimizer":
            return "optimizer"
        if phase.endswith("head"):
            return "loss"
        if phase.endswith("forward"):
            if not self._modules:
                return "loss" if self._in_model else "batch"
            inner = self._modules[-1]
            if inner.rpartition(".")[2] in HEADS or (not inner and self._after_head):
                return "loss"
        return "activations"

    def _stand_in(self, tensor: torch.Tensor) -> Any:
        where = _user_frame()
        if where:
            self.notes.assumptions[f"a value of a tensor is read at {where}: 1 or True was assumed"] += 1
        self._values_read[where] += 1
        if self._values_read[where] > MOST_VALUES_READ:
            raise TaskError(
                f"task {self._task}: {where or 'a library'} reads values of tensors without an end, since an estimate has none and "
                "assumes 1 or True. Try: a loop with a fixed number of turns, or brimful plan, on the GPU."
            )
        return True if tensor.dtype is torch.bool else 1.0 if tensor.is_floating_point() else 1

    def as_numpy(self, tensor: torch.Tensor, *, force: bool = False) -> Any:
        """In place of `Tensor.numpy`: of a fake tensor the values if they are known, else ones."""
        if not isinstance(tensor, FakeTensor):
            return _numpy(tensor, force=force)
        known = self.values.get(tensor)
        with _disable_current_modes():
            if known is None or known.shape != tensor.shape:
                self._stand_in(tensor)
                known = torch.ones(tensor.shape, dtype=tensor.dtype)
            return _numpy(known)

    def as_address(self, tensor: torch.Tensor) -> int:
        """In place of `Tensor.data_ptr`: of a fake tensor a number that no other has."""
        if not isinstance(tensor, FakeTensor):
            return _data_ptr(tensor)
        if where := _user_frame():
            self.notes.assumptions[
                f"the address of a tensor is read at {where}: what a kernel of your own allocates is not covered"
            ] += 1
        return int(tensor.untyped_storage()._cdata)

    def _chosen(self, mask: torch.Tensor, what: str, *broadcast: torch.Tensor) -> int:
        """How many elements a mask chooses: known from the batch, or all, which is the most it can be."""
        known = self.values.get(mask)
        if known is not None and known.shape == mask.shape and not broadcast:
            with _disable_current_modes():
                return int(known.count_nonzero())
        where = _user_frame() or "a library"
        self.notes.assumptions[f"{what} at {where}: every element was assumed to be chosen, the most it can be"] += 1
        return torch.broadcast_shapes(*(one.shape for one in broadcast)).numel() if broadcast else mask.numel()

    def _as_numbers(self, indices: Any) -> list[Any]:
        """Masks among the indices replaced by the numbers of what they choose."""
        result = list[Any]()
        for one in indices:
            if isinstance(one, torch.Tensor) and one.dtype in (torch.bool, torch.uint8):
                count = self._chosen(one, "an index that is a mask")
                result += [one.new_empty((count,), dtype=torch.long) for _ in range(one.dim())]
            else:
                result.append(one)
        return result


def trace_step(
    task: Task, rows: int, shape: Shape, setting: TracedSetting, build: Build | None = None
) -> tuple[History, TraceNotes]:
    """The history of a step of this size. `build` is that of another size, so that all sizes have the same one."""
    layout, notes, random_state = LAYOUTS[setting.layout], TraceNotes(), RandomState(torch.device("cpu"))
    batches = [layout.dummy(task, rows, shape) for _ in range(3)]  # real tensors, so that their values count
    collects, recorder = gc.isenabled(), BuildRecorder()
    gc.disable()  # what is freed, and when, must not depend on other objects of the process
    with recorder if build is None else nullcontext():
        model = describe(task)
    notes.build = build or recorder.build(model)
    tracer = Tracer(task.name, setting.device.type, notes)
    if not all(param.is_meta for param in model.parameters()):
        gc.collect()  # the model of the trace before has bytes, too, and may be in a cycle
    random.seed(0)  # so that every size leaves the same layers out
    try:
        with ExitStack() as stack:
            stack.enter_context(_without_torch_log())
            mode = stack.enter_context(fake_device(setting.device, has_bf16=setting.has_flash))
            notes.attention = stack.enter_context(
                card_kernels(
                    has_flash=setting.has_flash, attention=setting.attention, chunked_loss=setting.chunked_loss
                )
            )
            stack.enter_context(tracer)
            stack.enter_context(
                replaced(torch.Tensor, "numpy", lambda *args, **kwargs: tracer.as_numpy(*args, **kwargs))
            )
            stack.enter_context(replaced(torch.Tensor, "data_ptr", lambda tensor: tracer.as_address(tensor)))
            stack.enter_context(torch.compiler.set_stance("force_eager"))
            stack.enter_context(warnings.catch_warnings())
            warnings.filterwarnings(
                "ignore", "Using `torch.compile"
            )  # hooks on all modules, which name what they allocate
            tracer.calibrate()
            tracer.mark("build")
            tracer.built(notes.build)
            _put_on(model, setting.device, tracer, notes.build)
            tracer.claim(model.named_parameters(), "parameters")
            tracer.claim(model.named_buffers(), "parameters")
            model.train()
            with _named_failures(task, "optimizer", notes):
                optimizer = task.optimizer(model)
            notes.optimizer, notes.other_optimizer = _use_card_optimizer(optimizer, setting.optimizer)
            lever = checkpointing(task, model)
            notes.checkpointing = lever
            notes.describe_model(model)
            notes.count_weights(model)
            stack.enter_context(lever.set(EVERY[setting.checkpointing]))
            context = StepContext(
                task=task,
                model=model,
                optimizer=optimizer,
                device=setting.device,
                autocast=setting.autocast,
                layout=layout,
            )
            stack.enter_context(tracer.modules(model))

            def fake(tensor: torch.Tensor) -> torch.Tensor:
                result: torch.Tensor = mode.from_tensor(tensor)
                tracer.values.set(result, tensor)
                return result

            fakes = [map_tensors(batch, fake) for batch in batches]
            _run(context, tracer, fakes, rows)
            events, marks = _in_order(tracer), list(tracer.marks)  # what is freed from here on is no part of it
            del context, optimizer, fakes, model
    finally:
        random_state.restore()
        if collects:
            gc.enable()
    return History(rows, tuple(shape), events, marks, tracer.kinds, tracer.origins, tracer.temporaries), notes


def _in_order(tracer: Tracer) -> list[tuple[int, int]]:
    """The events, with frees that follow each other sorted: autocast drops its copies of weights in any order."""
    breaks = {place for place, _ in tracer.marks}
    events, run = list[tuple[int, int]](), list[tuple[int, int]]()
    for place, event in enumerate(tracer.events):
        if event[1] >= 0 or place in breaks:
            events += sorted(run)
            run = []
        if event[1] < 0:
            run.append(event)
        else:
            events.append(event)
    return events + sorted(run)


def _run(context: StepContext, tracer: Tracer, batches: list[Any], rows: int) -> None:
    names = {id(param): name for name, param in context.model.named_parameters()}

    def mark(phase: str) -> None:
        if phase in ("forward", "optimizer"):
            tracer.claim(((names.get(id(p), ""), p.grad) for p in context.params if p.grad is not None), "gradients")
        tracer.mark(phase)

    with _named_failures(context.task, "loss", tracer.notes):
        tracer.mark(FIRST_STEP)
        context.step(batches[:1], rows, mark)
        for param, state in context.optimizer.state.items():
            tracer.claim(((names.get(id(param), "state"), one) for one in tensors_of(state)), "optimizer")
        tracer.mark(SECOND_STEP)
        context.step(batches[1:], 2 * rows, mark)


def _is_compiled(part: nn.Module) -> bool:
    return hasattr(part, "_orig_mod") or getattr(part, "_compiled_call_impl", None) is not None


def _tensors_of_model(model: nn.Module) -> list[torch.Tensor]:
    """The weights, buffers and other tensors of all modules. Tied ones count once."""
    found = dict[int, torch.Tensor]()
    for module in model.modules():
        for tensor in (*module._parameters.values(), *module._buffers.values(), *vars(module).values()):
            if isinstance(tensor, torch.Tensor):
                found.setdefault(id(tensor), tensor)
    return list(found.values())


def _put_on(model: nn.Module, device: torch.device, tracer: Tracer, build: Build) -> None:
    """Replace the weights, buffers and other tensors of all modules by empty ones on the fake device. Tied ones stay tied."""
    tensors, made = _tensors_of_model(model), dict[int, torch.Tensor]()
    for tensor, index in zip(tensors, build.kept, strict=True):
        tracer.adopt(index)
        if isinstance(tensor, nn.Parameter):
            made[id(tensor)] = _parameter_like(tensor, device)
        else:
            made[id(tensor)] = torch.empty_like(tensor, device=device, requires_grad=False)
    tracer.adopt(None)
    for module in model.modules():
        for name, param in list(module._parameters.items()):
            if param is not None:
                module._parameters[name] = made[id(param)]  # type: ignore[assignment]
                if type(param).__name__ == "Params4bit":
                    made[id(param)].quant_state = module.quant_state = _quant_state(module, device)  # type: ignore[attr-defined]
        for name, buffer in list(module._buffers.items()):
            if buffer is not None:
                module._buffers[name] = made[id(buffer)]
        for name, value in list(vars(module).items()):
            if isinstance(value, torch.Tensor):
                setattr(module, name, made[id(value)])


def _quant_state(layer: Any, device: torch.device) -> Any:
    """The scales of a 4-bit layer of bitsandbytes, quantized once more: a byte for 64 weights, a float for 256 of those."""
    from bitsandbytes.functional import QuantState

    def empty(size: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        return torch.empty(size, dtype=dtype, device=device)

    shape = torch.Size((layer.out_features, layer.in_features))
    blocks = -(-shape.numel() // 64)
    scales = QuantState(empty(-(-blocks // 256)), code=empty(256), blocksize=256, dtype=torch.float32)
    return QuantState(
        empty(blocks, torch.uint8), shape=shape, dtype=layer.compute_dtype or torch.float32, blocksize=64, code=empty(16),
        quant_type="nf4", offset=empty(1)[0], state2=scales,
    )  # fmt: skip


def _parameter_like(param: nn.Parameter, device: torch.device) -> nn.Parameter:
    empty = torch.empty_strided(param.size(), param.stride(), dtype=param.dtype, device=device)
    made = nn.Parameter(empty, requires_grad=param.requires_grad)
    for name, value in vars(param).items():  # what optimizers and libraries keep on a weight
        setattr(made, name, value)
    return made


def _use_card_optimizer(optimizer: Any, kernels: OptimizerKernels | None) -> tuple[str, OptimizerKernels | None]:
    """Set what torch decides by itself on a GPU: all weights in one call (`foreach`) where nothing else was chosen.

    Returns what it is, and the other way in which torch could compute it.
    """
    groups = optimizer.param_groups
    for group in groups:
        if kernels is not None:
            group.update({name: name == kernels for name in ("foreach", "fused") if name in group})
        elif "foreach" in group and group["foreach"] is None and not group.get("fused"):
            group["foreach"] = True
    first = groups[0]
    other: OptimizerKernels | None = None
    kind = "fused" if first.get("fused") else "foreach" if first.get("foreach") else "one weight at a time"
    if kind == "fused" and "foreach" in first:
        other = "foreach"
    elif kind == "foreach" and "fused" in first:
        other = "fused"
    return f"{type(optimizer).__name__}, {kind}", other


@contextmanager
def _named_failures(task: Task, method: str, notes: TraceNotes) -> Iterator[None]:
    """Turn what cannot be traced into a message that names the operation or the line."""
    from torch._subclasses.fake_tensor import (
        DataDependentOutputException,
        DynamicOutputShapeException,
        UnsupportedFakeTensorException,
        UnsupportedOperatorException,
    )

    try:
        yield
    except UserError:
        raise
    except (DataDependentOutputException, DynamicOutputShapeException) as error:
        raise TaskError(
            f"task {task.name}: {error.func}{user_line(error)} depends on the values of tensors, which an estimate does not have. "
            "Try: brimful plan, on the GPU."
        ) from error
    except (UnsupportedOperatorException, UnsupportedFakeTensorException) as error:
        raise TaskError(_without_fake(task, in_one_line(error))) from error
    except Exception as error:
        if custom := re.search(r"no fake impl registered for <CustomOpDef\((\S+)\)>", str(error)):
            raise TaskError(_without_fake(task, custom[1])) from error
        if any(frame.filename.startswith(_TRITON) for frame in traceback.extract_tb(error.__traceback__)):
            raise TaskError(_without_fake(task, f"a Triton kernel{user_line(error)}")) from error
        if "SparseTensorImpl" in str(error):
            raise TaskError(
                f"task {task.name}: gradients that are sparse tensors are not covered by an estimate. "
                "Try: sparse=False in the embedding, or brimful plan, on the GPU."
            ) from error
        assumed = "".join(f" Before that, {sentence}." for sentence in list(notes.assumptions)[-1:])
        raise TaskError(
            f"{failure(task, error, method, 'a fake GPU')}{assumed} Try: the same batch on the CPU, then brimful plan on the GPU."
        ) from error


@contextmanager
def _without_torch_log() -> Iterator[None]:
    """torch logs the traceback of each operation that fails on fake tensors. The error that follows says it in a sentence."""
    logger = logging.getLogger("torch._subclasses.fake_tensor")
    level = logger.level
    logger.setLevel(logging.CRITICAL)
    try:
        yield
    finally:
        logger.setLevel(level)


def _without_fake(task: Task, operation: str) -> str:
    return (
        f"task {task.name}: {operation} has no fake implementation, so its memory is unknown. "
        "Try: torch.library.register_fake for it, or brimful plan, on the GPU."
    )


def _user_frame() -> str:
    """`model.py:12` of the user's code that read the value; empty if a library did, which knows what it may leave out."""
    frame: Any = sys._getframe(2)
    while frame is not None and frame.f_code is not _run.__code__:
        path = Path(frame.f_code.co_filename)
        package = frame.f_globals.get("__name__", "").partition(".")[0]
        if package not in BELOW and path.suffix == ".py":
            return "" if {"site-packages", "dist-packages"} & set(path.parts) else f"{path.name}:{frame.f_lineno}"
        frame = frame.f_back
    return ""
