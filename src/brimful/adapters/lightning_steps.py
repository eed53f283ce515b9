"""The micro-batches of one Lightning step: each runs `training_step`, and what it logs and returns is kept until the step is
through, then told once.

A try that failed leaves nothing behind: neither values logged nor the state of torchmetrics objects.
"""

import functools
import inspect
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from importlib import import_module
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only

from brimful.errors import TaskError
from brimful.memory.bare import rows_of
from brimful.task import Loss
from brimful.train.result import StepResult

_Metric: Any = import_module("torchmetrics").Metric
HINT = "where the loss is a mean over tokens or anything but rows, return {'loss': mean, 'count': how many} from training_step"


@dataclass(frozen=True, slots=True)
class _Call:
    """One call of `self.log`: its arguments, and its value as it was then."""

    arguments: dict[str, Any]
    value: Any


@dataclass(frozen=True, slots=True)
class _Said:
    """What a micro-batch said besides its loss."""

    rows: int | None
    count: Tensor | float
    logged: dict[str, _Call]
    extras: dict[str, Any]


class MicroBatches:
    """The micro-batches of one step: runs `training_step` on each, and keeps what it says until the step is through."""

    def __init__(self, strategy: Any, plain: Callable[..., Any], rest: tuple[Any, ...], *, moved: bool) -> None:
        self._strategy, self._plain, self._rest, self._moved = strategy, plain, rest, moved
        self._module = strategy.lightning_module
        self._log = self._module.log
        self._metrics = _Metrics(self._module)
        self._said: list[_Said] = []
        self._logged: dict[str, _Call] = {}
        self._dtype = torch.float32

    def loss(self, batch: Any) -> Loss:
        if all(param.grad is None for param in self._module.parameters()):  # so every try begins, and only a try
            self._said = []
            self._metrics.put_back()
        rows = _rows(batch)
        if not self._moved:
            batch = self._module._apply_batch_transfer_handler(batch, device=self._strategy.root_device)
        self._logged, self._metrics.touched = {}, True
        loss, extras = _read(self._plain(batch, *self._rest), rows, type(self._module).__name__)
        where = None if self._moved else "cpu"
        extras = tree_map_only(Tensor, lambda tensor: tensor.detach().to(where), extras)
        self._said.append(_Said(rows, _plain_number(loss.count), self._logged, extras))
        self._dtype = loss.sum.dtype
        return loss

    @contextmanager
    def listening(self) -> Iterator[None]:
        """`self.log` of the module speaks to us; `log_dict` goes through it."""
        own, function = vars(self._module).get("log"), self._module._current_fx_name
        self._module.log = self._hear
        try:
            yield
        finally:
            del self._module.log
            if own is not None:
                self._module.log = own
            self._module._current_fx_name = function  # a hook that ran out of memory left its own name there

    def log_once(self, result: StepResult, ooms: int) -> None:
        """What every micro-batch logged, once; in the precision that it was logged in."""
        with self._strategy.precision_plugin.train_step_context():
            for name in _in_order(said.logged for said in self._said):
                self._log(**_merged([(said, said.logged[name]) for said in self._said if name in said.logged]))
            if result.ooms_of_all or _logs_this_step(
                self._module.trainer
            ):  # each call costs as much as a small model's layer
                self._module.log("brimful/ooms", float(ooms), on_step=True, on_epoch=False)
                self._module.log("brimful/micro_batches", float(result.micro_batches), on_step=True, on_epoch=False)

    def outputs(self, result: StepResult) -> dict[str, Any]:
        """What `training_step` returned, over all micro-batches: the loss is the mean over all processes."""
        loss = torch.tensor(result.loss, dtype=self._dtype, device=self._strategy.root_device)
        names = _in_order(said.extras for said in self._said)
        return {"loss": loss, **{name: _joined(self._said, name) for name in names}}

    def _hear(self, *args: Any, **kwargs: Any) -> None:
        kind: Any = type(self._module)
        _, *bound = _signature_of_log(kind).bind(self._module, *args, **kwargs).arguments.items()
        arguments = dict(bound)
        self._logged[arguments["name"]] = _Call(arguments, _value_now(arguments["value"]))


@functools.cache
def _signature_of_log(kind: Any) -> inspect.Signature:
    return inspect.signature(kind.log)


def _logs_this_step(trainer: Any) -> bool:
    """As Lightning decides it."""
    every = trainer.log_every_n_steps
    return bool(not trainer.barebones and every and (trainer.global_step + 1) % every == 0)


class _Metrics:
    """The torchmetrics of a module as they were before the step; a failed try is not to be counted in them."""

    def __init__(self, module: nn.Module) -> None:
        self._saved = [(part, _copied(vars(part))) for part in module.modules() if isinstance(part, _Metric)]
        self.touched = False

    def put_back(self) -> None:
        if self.touched:
            for metric, saved in self._saved:
                vars(metric).update(_copied(saved))
        self.touched = False


def _copied(state: Mapping[str, Any]) -> dict[str, Any]:
    """Tensors and lists of them are changed in place; everything else is replaced."""
    return {
        name: value.clone() if isinstance(value, Tensor) else list(value) if isinstance(value, list) else value
        for name, value in state.items()
    }


def _value_now(value: Any) -> Any:
    """A metric's value for this micro-batch is overwritten by the next."""
    if isinstance(value, _Metric):
        return value._forward_cache
    return value.detach() if isinstance(value, Tensor) else value


def _plain_number(count: Any) -> Any:
    return count.detach() if isinstance(count, Tensor) else count


def _rows(batch: Any) -> int | None:
    try:
        return rows_of(batch)
    except TaskError:
        return None


def _read(given: Any, rows: int | None, name: str) -> tuple[Loss, dict[str, Any]]:
    """What `training_step` returned, as sum and count, and whatever came with them."""
    extras = dict(given) if isinstance(given, Mapping) else {}
    mean = extras.pop("loss", None) if isinstance(given, Mapping) else given
    if isinstance(mean, Loss):
        return mean, extras
    if not isinstance(mean, Tensor):
        raise TaskError(
            f"{name}.training_step returned {'no loss' if mean is None else f'a {type(mean).__name__}'} for a micro-batch; return a "
            "scalar tensor, a dict with one under 'loss', or brimful.Loss(sum, count); rows that count for nothing have 'count' 0"
        )
    mean = mean.to(torch.promote_types(mean.dtype, torch.float32))  # in fp16 a sum over 10,000 tokens is inf
    if extras.get("count") is None:
        if rows is None:
            raise TaskError(f"the rows of {name}'s batch cannot be told from its tensors: {HINT}")
        return Loss(sum=mean * rows, count=rows), extras
    count = torch.as_tensor(extras["count"], device=mean.device).detach()
    return Loss(sum=torch.where(count > 0, mean * count, torch.zeros_like(mean)), count=count), extras


def _in_order(mappings: Iterable[Mapping[str, Any]]) -> list[str]:
    return list(dict.fromkeys(name for mapping in mappings for name in mapping))


def _merged(calls: list[tuple[_Said, _Call]]) -> dict[str, Any]:
    """Several calls of `self.log` with one name, as one."""
    arguments = dict(calls[-1][1].arguments)
    values, weights = [call.value for _, call in calls], [said.count for said, _ in calls]
    if isinstance(arguments["value"], _Metric):
        if all(isinstance(value, Tensor) for value in values):
            arguments["value"]._forward_cache = _reduced(values, weights, "mean")
    elif len(calls) > 1:
        how = arguments.get("reduce_fx", "mean")
        arguments["value"] = _reduced(values, weights, str(getattr(how, "__name__", how)).lower())
    sizes = [call.arguments.get("batch_size") or said.rows for said, call in calls]
    if None not in sizes:
        arguments["batch_size"] = sum(sizes)
    return arguments


def _reduced(values: list[Any], weights: list[Any], how: str) -> Tensor:
    device = next((value.device for value in values if isinstance(value, Tensor)), None)
    parts = torch.stack([torch.as_tensor(value, device=device) for value in values])
    if how in ("min", "max"):
        return parts.amin(0) if how == "min" else parts.amax(0)
    if how == "sum":
        return parts.sum(0)
    parts = parts.to(torch.promote_types(parts.dtype, torch.float32))
    shape = (-1, *[1] * (parts.ndim - 1))
    counts = torch.stack([torch.as_tensor(weight, device=parts.device).to(parts.dtype) for weight in weights])
    counts = counts.reshape(shape)
    return torch.where(counts > 0, parts * counts, torch.zeros_like(parts)).sum(0) / counts.sum()


def _joined(said: list[_Said], name: str) -> Any:
    """An output besides the loss: rows one after the other, numbers as their mean, a count as its sum, or a list."""
    having = [one for one in said if name in one.extras]
    parts = [one.extras[name] for one in having]
    if len(parts) == 1:
        return parts[0]
    if all(
        isinstance(part, Tensor) and part.ndim and len(part) == one.rows
        for part, one in zip(parts, having, strict=True)
    ):
        return torch.cat(parts)
    if all(isinstance(part, (int, float)) or (isinstance(part, Tensor) and not part.ndim) for part in parts):
        return _reduced(parts, [one.count for one in having], "sum" if name == "count" else "mean")
    return parts
