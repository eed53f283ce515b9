"""The allocation history of a training step on fake tensors: which bytes, when, for what, until when.

`trace_step` builds the task's model on the fake device, runs two optimizer steps of the size asked for through the same
`StepContext` that training uses, and returns their `History`. A dispatch mode sees each new storage, and a weak reference sees it
die; storages are counted, not operations, so views and in-place updates cost nothing, as on the card.

Whole numbers of a batch keep their values beside the fake tensors (`KnownValues`): transformers leaves a mask of ones out, and then
takes another attention kernel. What else a fake tensor cannot know is assumed, and every assumption is reported with the line that
needed it:

    .item(), bool(tensor)           1 or True
    nonzero, x[mask], masked_select every element counts, which is the most it can be
"""

import gc
import random
import re
import sys
import weakref
from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_iter

from brimful.errors import TaskError, UserError, in_one_line
from brimful.estimation.fake_cuda import fake_device
from brimful.estimation.fake_kernels import card_kernels
from brimful.memory.context import StepContext, tensors_of
from brimful.memory.history import FIRST_STEP, SECOND_STEP, History, Kind
from brimful.memory.layout import LAYOUTS, LayoutName
from brimful.memory.snapshot import RandomState
from brimful.planning.levers import EVERY, Lever, checkpointing, repeated_blocks
from brimful.planning.plan_options import Checkpointed, Weights
from brimful.planning.planner import describe
from brimful.task import Shape, Task, failure, map_tensors

_aten = torch.ops.aten
HEADS = ("lm_head", "score", "classifier", "output_projection", "embed_out")
"""Names of a model's last layer, whose output is counted with the loss."""
PRECISIONS: dict[torch.dtype | None, str] = {None: "fp32", torch.bfloat16: "bf16", torch.float16: "fp16"}
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
    optimizer: str = ""
    checkpointing: Lever | None = None
    weight_bytes: int = 0
    trained_bytes: int = 0
    largest_block_bytes: int = 0
    """Weights of the largest repeated block, which a sharded model gathers at once."""
    outside_blocks_bytes: int = 0
    """Weights in no repeated block, such as embeddings and head."""

    def count_weights(self, model: nn.Module) -> None:
        sizes = {id(param): param.nbytes for param in model.parameters()}
        blocks = [{id(param) for param in block.parameters()} for block in repeated_blocks(model)]
        self.weight_bytes = sum(sizes.values())
        self.trained_bytes = sum(param.nbytes for param in model.parameters() if param.requires_grad)
        self.largest_block_bytes = max((sum(sizes[one] for one in block) for block in blocks), default=0)
        self.outside_blocks_bytes = self.weight_bytes - sum(sizes[one] for one in set().union(*blocks))


class KnownValues:
    """The values of fake tensors of whole numbers that follow from the batch: masks, labels, and what is made of them."""

    NAMES = (
        "_to_copy alias all any bitwise_and bitwise_not bitwise_or clone cumsum detach eq expand ge gt le logical_and logical_not "
        "logical_or lt max min ne select slice sum unsqueeze view"
    )
    OPERATIONS = frozenset(getattr(_aten, name) for name in NAMES.split())
    MOST = 2**22
    """Elements of a tensor whose values are kept."""

    def __init__(self) -> None:
        self._real: dict[int, tuple[Any, torch.Tensor]] = {}

    def set(self, fake: torch.Tensor, real: torch.Tensor) -> None:
        whole = not fake.is_floating_point() and not fake.is_complex()
        if (whole and fake.numel() <= self.MOST) or fake.dim() == 0:
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
        if func.overloadpacket not in self.OPERATIONS or not isinstance(out, torch.Tensor):
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
            self.set(out, func(*real_args, **others))


class Tracer(TorchDispatchMode):
    """Records the storages of one kind of device as they come and go."""

    def __init__(self, device: str, notes: TraceNotes) -> None:
        super().__init__()
        self.values = KnownValues()
        self._device, self._notes = device, notes
        self.events: list[tuple[int, int]] = []
        self.marks: list[tuple[int, str]] = []
        self.kinds: list[Kind] = []
        self.origins: list[str] = []
        self._live: dict[int, tuple[int, Any]] = {}
        self._phase, self._in_model, self._after_head = "", False, False
        self._modules: list[str] = []
        self._resized: dict[int, int] = {}

    def mark(self, phase: str) -> None:
        """What follows belongs to this phase."""
        self._phase, self._in_model, self._after_head = phase, False, False
        self._modules.clear()
        self.marks.append((len(self.events), phase))

    def claim(self, tensors: Iterable[torch.Tensor], kind: Kind) -> None:
        """These tensors are of this kind, whatever made them."""
        for tensor in tensors:
            entry = self._live.get(tensor.untyped_storage()._cdata)
            if entry is not None:
                self.kinds[entry[0]] = kind

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

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
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
        for value in tree_iter(out):
            if isinstance(value, torch.Tensor):
                self._track(value, func)
        return out

    def _track(self, tensor: torch.Tensor, func: Any) -> None:
        if tensor.device.type != self._device:
            return
        try:
            storage = tensor.untyped_storage()
        except (NotImplementedError, RuntimeError):  # sparse tensors have none
            return
        key = storage._cdata
        if key in self._live:
            return
        index = len(self.kinds)
        self._live[key] = (index, weakref.ref(storage, lambda _: self._freed(key, index)))
        self.events.append((index, storage.nbytes()))
        self.kinds.append(self._kind(func))
        where = self._modules[-1] if self._modules else self.kinds[-1]
        self.origins.append(f"{where} {func.overloadpacket.__name__.lstrip('_')}".strip())

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
            self._notes.assumptions[f"a value of a tensor is read at {where}: 1 or True was assumed"] += 1
        return True if tensor.dtype is torch.bool else 1.0 if tensor.is_floating_point() else 1

    def _chosen(self, mask: torch.Tensor, what: str, *broadcast: torch.Tensor) -> int:
        """How many elements a mask chooses: known from the batch, or all, which is the most it can be."""
        known = self.values.get(mask)
        if known is not None and not broadcast:
            with _disable_current_modes():
                return int(known.count_nonzero())
        where = _user_frame() or "a library"
        self._notes.assumptions[f"{what} at {where}: every element was assumed to be chosen"] += 1
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


def trace_step(task: Task, rows: int, shape: Shape, setting: TracedSetting) -> tuple[History, TraceNotes]:
    """The history of a step of this size."""
    layout, notes, random_state = LAYOUTS[setting.layout], TraceNotes(), RandomState(torch.device("cpu"))
    batches = [layout.dummy(task, rows, shape) for _ in range(3)]  # real tensors, so that their values count
    model = describe(task)
    tracer, collects = Tracer(setting.device.type, notes), gc.isenabled()
    if not all(param.is_meta for param in model.parameters()):
        gc.collect()  # the model of the trace before has bytes, too, and may be in a cycle
    random.seed(0)  # so that every size leaves the same layers out
    gc.disable()  # what is freed, and when, must not depend on other objects of the process
    try:
        with ExitStack() as stack:
            mode = stack.enter_context(fake_device(setting.device, has_bf16=setting.has_flash))
            notes.attention = stack.enter_context(card_kernels(has_flash=setting.has_flash))
            stack.enter_context(tracer)
            tracer.mark("build")
            _put_on(model, setting.device)
            model.train()
            with _named_failures(task, "optimizer"):
                optimizer = task.optimizer(model)
            notes.optimizer = _use_card_optimizer(optimizer)
            lever = checkpointing(task, model)
            notes.checkpointing = lever
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
            del context, optimizer, fakes, model
        events, marks = _in_order(tracer), list(tracer.marks)  # what is freed from here on is no part of it
    finally:
        random_state.restore()
        if collects:
            gc.enable()
    return History(rows, tuple(shape), events, marks, tracer.kinds, tracer.origins), notes


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
    def mark(phase: str) -> None:
        if phase in ("forward", "optimizer"):
            tracer.claim((p.grad for p in context.params if p.grad is not None), "gradients")
        tracer.mark(phase)

    with _named_failures(context.task, "loss"):
        tracer.mark(FIRST_STEP)
        context.step(batches[:1], rows, mark)
        tracer.claim(tensors_of(list(context.optimizer.state.values())), "optimizer")
        tracer.mark(SECOND_STEP)
        context.step(batches[1:], 2 * rows, mark)


def _put_on(model: nn.Module, device: torch.device) -> None:
    """Replace the weights, buffers and other tensors of all modules by empty ones on the fake device. Tied ones stay tied."""
    made: dict[int, Any] = {}

    def moved(tensor: torch.Tensor) -> torch.Tensor:
        if id(tensor) not in made:
            made[id(tensor)] = (torch.empty_like(tensor, device=device, requires_grad=False), tensor)
        return made[id(tensor)][0]  # type: ignore[no-any-return]

    for module in model.modules():
        for name, param in list(module._parameters.items()):
            if param is not None:
                if id(param) not in made:
                    made[id(param)] = (_parameter_like(param, device), param)
                module._parameters[name] = made[id(param)][0]
                if type(param).__name__ == "Params4bit":
                    made[id(param)][0].quant_state = module.quant_state = _quant_state(module, device)
        for name, buffer in list(module._buffers.items()):
            if buffer is not None:
                module._buffers[name] = moved(buffer)
        for name, value in list(vars(module).items()):
            if isinstance(value, torch.Tensor):
                setattr(module, name, moved(value))


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


def _use_card_optimizer(optimizer: Any) -> str:
    """Set what torch decides by itself on a GPU: all weights in one call (`foreach`) where nothing else was chosen."""
    groups = optimizer.param_groups
    for group in groups:
        if "foreach" in group and group["foreach"] is None and not group.get("fused"):
            group["foreach"] = True
    kind = "fused" if groups[0].get("fused") else "foreach" if groups[0].get("foreach") else "one weight at a time"
    return f"{type(optimizer).__name__}, {kind}"


@contextmanager
def _named_failures(task: Task, method: str) -> Iterator[None]:
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
            f"task {task.name}: {error.func} depends on the values of tensors, which an estimate does not have. "
            "Try: brimful plan, on the GPU."
        ) from error
    except (UnsupportedOperatorException, UnsupportedFakeTensorException) as error:
        raise TaskError(_without_fake(task, in_one_line(error))) from error
    except Exception as error:
        if custom := re.search(r"no fake impl registered for <CustomOpDef\((\S+)\)>", str(error)):
            raise TaskError(_without_fake(task, custom[1])) from error
        raise TaskError(
            f"{failure(task, error, method, 'a fake GPU')} Try: the same batch on the CPU, then brimful plan on the GPU."
        ) from error


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
