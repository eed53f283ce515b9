"""Saves state that a probe or a failed step may change, and restores it bit for bit.

Random state is a few kilobytes per generator. Weights and optimizer state are copied to host memory, so a snapshot of
them costs host RAM and no device memory. A model that is built only for probing needs none.
"""

import copy
import random
from collections import OrderedDict, defaultdict
from collections.abc import Callable, Iterable
from functools import partial
from types import BuiltinFunctionType, FunctionType, MethodType, ModuleType
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.optim import Optimizer
from torch.utils._python_dispatch import _disable_current_modes

from brimful.memory.oom import OutOfMemory, attempt

LARGEST_CONTAINER = 1000
"""Entries of a list or dict that is taken for state."""
CONSTANTS = (str, bytes, int, float, complex, type, FunctionType, BuiltinFunctionType, ModuleType, type(None))
CONTAINERS = (dict, OrderedDict, defaultdict, list, set)


class RandomState:
    """The generators of Python, NumPy, and torch for the CPU and the device, as they were at construction."""

    def __init__(self, device: torch.device) -> None:
        self._python = random.getstate()
        self._numpy: tuple[Any, ...] = np.random.get_state()  # type: ignore[assignment]
        self._torch = torch.get_rng_state()
        self._where = device
        self._device = None if device.type == "cpu" else torch.get_device_module(device).get_rng_state(device)

    def to_plain(self) -> dict[str, Any]:
        """Numbers, strings and tensors, for a file."""
        kind, keys, place, has_gauss, gauss = self._numpy
        return {
            "python": self._python,
            "numpy": [
                str(kind),
                torch.from_numpy(np.asarray(keys).astype(np.int64)),
                int(place),
                int(has_gauss),
                float(gauss),
            ],
            "torch": self._torch,
            "device": self._device,
        }

    @classmethod
    def of(cls, plain: dict[str, Any], device: torch.device) -> "RandomState":
        """The inverse of `to_plain`. For a device of another type its generator stays as it is now."""
        state = cls(device)
        state._python, state._torch = plain["python"], plain["torch"]
        kind, keys, *rest = plain["numpy"]
        state._numpy = (kind, keys.numpy().astype(np.uint32), *rest)
        if state._device is not None and plain["device"] is not None:
            state._device = plain["device"]
        return state

    def restore(self) -> None:
        random.setstate(self._python)
        np.random.set_state(self._numpy)
        torch.set_rng_state(self._torch)
        if self._device is not None:
            torch.get_device_module(self._where).set_rng_state(self._device, self._where)


class Buffers:
    """Copies of a model's buffers (BatchNorm's running statistics and counters), on the host if their device is full.

    Copied every time, since torch's version counters do not see what BatchNorm writes. A buffer that the model replaces
    by a new tensor is restored as the tensor it was.
    """

    def __init__(self, model: nn.Module) -> None:
        self._registries = [module._buffers for module in model.modules()]
        self._saved: dict[tuple[int, str], tuple[torch.Tensor, torch.Tensor] | None] = {}
        self.refresh()

    def refresh(self) -> None:
        """Copy the buffers as they are now, into the same memory as before where possible."""
        before, self._saved = self._saved, {}
        for place, buffers in enumerate(self._registries):
            for name, buffer in buffers.items():
                old = before.get((place, name))
                if buffer is None:
                    self._saved[place, name] = None
                else:
                    copied = old[1].copy_(buffer) if old and old[0] is buffer else _copy_somewhere(buffer)
                    self._saved[place, name] = buffer, copied

    def restore(self) -> None:
        with torch.no_grad():
            for (place, name), saved in self._saved.items():
                if saved is not None and not overlaps(saved[0]):
                    saved[0].copy_(saved[1])
                self._registries[place][name] = None if saved is None else saved[0]


def _copy_somewhere(buffer: torch.Tensor) -> torch.Tensor:
    copied = attempt(lambda: buffer.detach().clone(), buffer.device)
    if not isinstance(copied, OutOfMemory):
        return copied
    with _disable_current_modes():  # where the device is a simulated one, the host is not
        return _to_host(buffer)


def overlaps(tensor: torch.Tensor) -> bool:
    """Whether this is an expanded tensor: several elements share one number, so nothing can have written to it."""
    return any(stride == 0 and size > 1 for stride, size in zip(tensor.stride(), tensor.shape, strict=True))


class Attributes:
    """What objects hold in plain attributes: counters, generators, tensors cached by a forward.

    Containers are followed, and other objects one level deep. Those of torch are not, nor is a container of more than
    `LARGEST_CONTAINER` entries, which is data. Nothing here can restore what code keeps elsewhere: in a global variable, a
    closure or a cached function.
    """

    def __init__(self, *objects: Any, excluding: Iterable[torch.Tensor] = ()) -> None:
        """Tensors of `excluding`, and others in their memory, are saved elsewhere. The modules of a model are each an object of
        their own."""
        self._restore: list[Callable[[], object]] = []
        excluded = list(excluding)
        self._seen = {id(tensor) for tensor in excluded}
        self._storages = {tensor.untyped_storage().data_ptr() for tensor in excluded} - {0}
        self._roots = {id(one) for one in objects}
        self._alive: list[Any] = []
        """Keeps the ids in `_seen` from being used again."""
        for one in objects:
            self._save_object(one, levels=1)

    def restore(self) -> None:
        with torch.no_grad():
            for restore in self._restore:
                restore()

    def _save(self, value: Any, levels: int) -> None:
        if (
            isinstance(value, (*CONSTANTS, nn.Parameter, Optimizer))
            or id(value) in self._seen
            or id(value) in self._roots
        ):
            return
        if isinstance(value, torch.Tensor):
            self._remember(value)
            plain = type(value) is torch.Tensor and value.layout is torch.strided and not value.is_meta
            if plain and value.untyped_storage().data_ptr() not in self._storages:
                self._restore.append(partial(_write_back, value, _to_host(value)))
        elif isinstance(value, torch.Generator):
            self._restore.append(partial(value.set_state, value.get_state()))
        elif isinstance(value, random.Random):
            self._restore.append(partial(value.setstate, value.getstate()))
        elif isinstance(value, np.random.Generator):
            self._restore.append(partial(setattr, value.bit_generator, "state", value.bit_generator.state))
        elif isinstance(value, MethodType):
            self._save(value.__self__, levels)
        elif isinstance(value, tuple) or type(value) in CONTAINERS:
            self._save_container(value, levels)
        elif levels > 0 and not type(value).__module__.startswith("torch."):
            self._save_object(value, levels - 1)

    def _save_object(self, value: Any, levels: int) -> None:
        if isinstance(getattr(value, "__dict__", None), dict) and id(value) not in self._seen:
            self._remember(value)
            self._save_container(vars(value), levels)

    def _save_container(self, container: Any, levels: int) -> None:
        if len(container) > LARGEST_CONTAINER or id(container) in self._seen:
            return
        self._remember(container)
        if not isinstance(container, tuple):
            self._restore.append(partial(_refill, container, copy.copy(container)))
        for value in list(container.values() if isinstance(container, dict) else container):
            self._save(value, levels)

    def _remember(self, value: Any) -> None:
        self._seen.add(id(value))
        self._alive.append(value)


def _write_back(tensor: torch.Tensor, saved: torch.Tensor) -> None:
    if tensor.shape != saved.shape or tensor.dtype != saved.dtype:
        tensor.data = saved.to(tensor.device)
    elif not torch.equal(tensor.cpu(), saved) and not overlaps(tensor):
        tensor.copy_(saved)


def _refill(container: Any, saved: Any) -> None:
    """Give a container its entries back, unless it has just these."""
    if isinstance(container, list):
        if len(container) != len(saved) or any(now is not was for now, was in zip(container, saved, strict=True)):
            container[:] = saved
    elif isinstance(container, dict):
        if list(container) != list(saved) or any(container[key] is not value for key, value in saved.items()):
            container.clear()
            container.update(saved)
    elif container != saved:
        container.clear()
        container.update(saved)


class TrainingState:
    """Weights, buffers, gradients, modes and optimizer state, copied to the host: for the caller's own model."""

    def __init__(self, model: nn.Module, optimizer: Optimizer) -> None:
        trained = (p for p in model.parameters() if p.requires_grad)  # a frozen weight cannot change
        self._tensors = [(tensor, _to_host(tensor)) for tensor in (*trained, *model.buffers())]
        self._grads = [(p, None if p.grad is None else _to_host(p.grad)) for p in model.parameters()]
        self._modes = [(module, module.training) for module in model.modules()]
        self._optimizer = optimizer
        self._state = [(param, _copy(state)) for param, state in optimizer.state.items()]
        self._groups = [
            {key: copy.deepcopy(value) for key, value in group.items() if key != "params"}
            for group in optimizer.param_groups
        ]

    def restore(self) -> None:
        with torch.no_grad():
            for tensor, saved in self._tensors:
                tensor.copy_(saved)
        for param, grad in self._grads:
            param.grad = None if grad is None else grad.to(param.device, copy=True)
        for module, training in self._modes:
            module.training = training
        self._optimizer.state.clear()
        for key, state in self._state:
            self._optimizer.state[key] = {name: _restored(value) for name, value in state.items()}
        for group, options in zip(self._optimizer.param_groups, self._groups, strict=True):
            group.update(copy.deepcopy(options))


def _to_host(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().to("cpu", copy=True)


def _copy(state: dict[str, Any]) -> dict[str, Any]:
    """Tensors with the device they came from, and deep copies of everything else."""
    return {k: (_to_host(v), v.device) if isinstance(v, torch.Tensor) else copy.deepcopy(v) for k, v in state.items()}


def _restored(value: Any) -> Any:
    match value:
        case (torch.Tensor() as tensor, torch.device() as device):
            return tensor.to(device, copy=True)
    return copy.deepcopy(value)
