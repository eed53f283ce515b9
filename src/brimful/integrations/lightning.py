"""Lightning's `Trainer.fit` with steps that survive out-of-memory. Two changed lines:

    from brimful.integrations.lightning import ExactSteps

    trainer = Trainer(max_epochs=3, callbacks=[ExactSteps()])

A batch of the train loader is one step, cut as memory demands, with the result of the plain Trainer on the whole batch.
Everything else stays Lightning's: steps, epochs, schedules, callbacks, loggers, validation, checkpoints and resuming.

    Lightning's closure       with ExactSteps
    strategy.training_step    `Stepper.backward`: your `training_step` and its backward for each micro-batch, redone when
                              memory runs out; then one sum over the processes, which no DDP wrapper does besides
    optimizer.zero_grad       finds nothing: the gradients are set aside
    strategy.backward         puts them back; `on_before_backward` and `on_after_backward` come once a step
    unscale, clip, step       Lightning's, out of reach: an out-of-memory error there ends the run with a sentence. The
                              optimizer's bytes are proven before it begins

**The loss** is a mean over rows, unless `training_step` says over what: `return {"loss": mean, "count": tokens}`, which the
plain Trainer takes as well, or `brimful.Loss(sum, count)`. A mean over tokens without a count is found before the first
cut and refused.

**`self.log`** reaches Lightning once a step and key: the mean of the micro-batches, weighted by their counts, or their sum,
smallest or largest where `reduce_fx` says so; tries that failed leave nothing. A torchmetrics object that is logged keeps
its exact value over the epoch; its value for the step is that weighted mean. `brimful/ooms` (of all
processes) and `brimful/micro_batches` are logged besides; every event goes to the logger `brimful` and to `on_event=`.

**What your hooks see.** `training_step`, `transfer_batch_to_device` and `on_after_batch_transfer` run once for each
micro-batch; whatever else they change (a counter, a list) is not put back after a failed try. All other hooks run once
a step. The batch stays on the host until it is cut, so `on_train_batch_start` and `_end` find it there, and so with what
`training_step` returned besides its loss, put together over the micro-batches; `ExactSteps(batch_on_device=True)` moves
the batch whole, as Lightning does, and then an out-of-memory error in that is out of reach too.

Lightning 2.5 to 2.6, as `lightning` or `pytorch_lightning`, on one device or with DDP however it is launched. When nothing
happens a step costs 1.1 ms more than Lightning's own 2.8 ms (a small model on one CPU core).
"""

import contextlib
import functools
import inspect
import logging
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from importlib import import_module
from importlib.util import find_spec
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only

from brimful.errors import (
    BadOption,
    BrimfulError,
    InexactSplit,
    MissingExtra,
    PartialUpdate,
    TaskError,
    UnsupportedModel,
    in_one_line,
)
from brimful.memory.oom import is_oom
from brimful.planning.plan import Plan
from brimful.step import checks
from brimful.step.interface import StepOptions, StepResult
from brimful.step.stepper import Stepper
from brimful.task import Loss, rows_of

# The micro-batches of one Lightning step: each runs `training_step`, and what it logs and returns is kept until the step is
# through, then told once.
#
# A try that failed leaves nothing behind: neither values logged nor the state of torchmetrics objects.


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


_PACKAGES = ("lightning.pytorch", "pytorch_lightning")
"""One library under two names, with classes of their own."""
_LIGHTNINGS = {
    "clip_norm": "Trainer(gradient_clip_val=…) clips",
    "precision": "Trainer(precision=…) sets it",
    "scaler": "Trainer's precision plugin has its own",
    "skip_nonfinite": "Lightning applies every step",
    "checkpoint": "Trainer's own checkpoints are named",
}
"""Options of the stepper that are Lightning's to decide here."""
_AUTOCAST = {"bf16-mixed": "bf16", "16-mixed": "fp16"}
"""What a plan calls Lightning's precisions; without autocast it is fp32."""

log = logging.getLogger("brimful")


def _callback_class() -> Any:
    """A callback for both packages: each Trainer asks whether it is one of its own."""
    installed = [name for name in _PACKAGES if find_spec(name.partition(".")[0])]
    if not installed:
        raise MissingExtra("lightning", "lightning")
    return type("Callback", tuple(import_module(name).Callback for name in installed), {})


_Callback: Any = _callback_class()


class ExactSteps(_Callback):
    """A callback that makes every training step of `Trainer.fit` survive out-of-memory.

    `plan` (from `brimful.plan`) cuts by predicted bytes; without one the whole batch is tried and the rest learnt. Options
    are Stepper's: `micro_batch`, `on_event`, `skip_oversized`, `allow_inexact`, `grow_after`, and `collate` for a loader
    that gives lists of rows. While it trains and after, `ooms` counts and `stepper.events` tells.
    """

    stepper: Stepper | None = None
    """The step behind `training_step`, from the first one on."""
    ooms = 0
    """Out-of-memory errors survived, on all processes."""

    def __init__(self, plan: Plan | None = None, *, batch_on_device: bool = False, **options: Any) -> None:
        _check_options(options)
        self.plan, self.batch_on_device = plan, batch_on_device
        self._options = {"rows_are": "local", **options}
        self._state: dict[str, Any] = {}
        self._made_for: tuple[Any, ...] = ()
        self._now: MicroBatches | None = None
        self._aside: list[tuple[nn.Parameter, Tensor]] = []

    def setup(self, trainer: Any, pl_module: Any, stage: str) -> None:
        """Before anything is on the device: refuse what cannot work, and take over the strategy's training step."""
        if stage != "fit":
            return
        _check_trainer(trainer, pl_module)
        self.stepper, self.ooms, self._state, self._made_for = None, 0, {}, ()
        if self.plan and self.plan.levers.precision != _AUTOCAST.get(trainer.precision, "fp32"):
            text = "the plan was made for %s, and Trainer(precision=%r) is trained with: its bytes are off"
            log.warning(text, self.plan.levers.precision, trainer.precision)
        _ExactStrategy(trainer.strategy, self)

    def on_plan_start(self, trainer: Any, pl_module: Any) -> None:
        checks.check_model(pl_module)
        checks.check_optimizer(pl_module, trainer.optimizers[0])

    def state_dict(self) -> dict[str, Any]:
        """What the next cuts depend on; the scaler is in Lightning's part of the checkpoint."""
        return {**self.stepper.state_dict(), "scaler": None, "ooms_of_all": self.ooms} if self.stepper else self._state

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self._state, self.ooms = state_dict, state_dict.get("ooms_of_all", 0)

    @property
    def in_micro_batch(self) -> bool:
        return self._now is not None

    def step(self, strategy: Any, plain: Callable[..., Any], batch: Any, *rest: Any) -> dict[str, Any]:
        """The exact gradients of this batch, set aside, and what `training_step` would have returned."""
        _check_accumulation(strategy.lightning_module.trainer)
        stepper = self._stepper(strategy)
        with self._micro_batches(strategy, plain, rest) as now:
            try:
                result = stepper.backward(batch)
            except InexactSplit as error:
                raise InexactSplit(f"{error}; {HINT}") from None
        self._aside = [(p, p.grad) for p in strategy.lightning_module.parameters() if p.grad is not None]
        stepper.model.zero_grad(set_to_none=True)
        self.ooms += result.ooms_of_all
        now.log_once(result, self.ooms)
        return now.outputs(result)

    def put_back(self) -> None:
        """The gradients, once Lightning has emptied what it takes for the last step's."""
        for param, gradient in self._aside:
            param.grad = gradient
        self._aside = []

    @contextlib.contextmanager
    def _micro_batches(self, strategy: Any, plain: Any, rest: tuple[Any, ...]) -> Iterator["MicroBatches"]:
        self._now = MicroBatches(strategy, plain, rest, moved=self.batch_on_device)
        try:
            with self._now.listening():
                yield self._now
        finally:
            self._now = None

    def _stepper(self, strategy: Any) -> Stepper:
        """The one there is, unless a callback froze or thawed weights or changed the optimizer since."""
        module, optimizer = strategy.lightning_module, strategy.optimizers[0]
        made_for = optimizer, *(param.requires_grad for param in module.parameters())
        if self.stepper is None or self._made_for != made_for:
            state = self.state_dict()
            self.stepper = Stepper(
                module,
                optimizer,
                self._named_loss(type(module).__name__),
                self.plan,
                precision="fp32",  # the strategy's training step opens autocast by itself
                scaler=getattr(strategy.precision_plugin, "scaler", None),
                **self._options,
            )
            self._made_for = made_for
            if state:
                self.stepper.load_state_dict(state)
        return self.stepper

    def _named_loss(self, name: str) -> Callable[[Any, Any], Loss]:
        def loss(_: nn.Module, batch: Any) -> Loss:
            assert self._now is not None
            return self._now.loss(batch)

        loss.__name__ = f"{name}.training_step"
        return loss


class _ExactStrategy:
    """Takes the place of some methods of a strategy; what does not train is left as it was."""

    TAKEN = (
        "batch_to_device",
        "training_step",
        "backward",
        "optimizer_step",
        "configure_ddp",
        "all_gather",
        "broadcast",
        "barrier",
    )

    def __init__(self, strategy: Any, exact: "ExactSteps") -> None:
        self._strategy, self._exact, self._made = strategy, exact, False
        for name in self.TAKEN:
            vars(strategy).pop(name, None)  # an earlier fit's
        self._plain: dict[str, Any] = {name: getattr(strategy, name, None) for name in self.TAKEN}
        for name in self.TAKEN:
            setattr(strategy, name, getattr(self, name))

    def batch_to_device(self, batch: Any, device: torch.device | None = None, dataloader_idx: int = 0) -> Any:
        if self._cuts and not self._exact.batch_on_device:
            return batch
        return self._plain["batch_to_device"](batch, device, dataloader_idx)

    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        plain = self._plain["training_step"]
        return self._exact.step(self._strategy, plain, *args) if self._cuts else plain(*args, **kwargs)

    def backward(self, closure_loss: Tensor, optimizer: Any, *args: Any, **kwargs: Any) -> Any:
        """The plugin's hooks around gradients that are there already."""
        plugin, module = self._strategy.precision_plugin, self._strategy.lightning_module
        loss = plugin.pre_backward(closure_loss, module)
        self._exact.put_back()
        self._made = True
        return plugin.post_backward(loss, module)

    def optimizer_step(self, *args: Any, **kwargs: Any) -> Any:
        """Runs the closure too; only what comes after its gradients may have touched a weight."""
        self._made = False
        try:
            return self._plain["optimizer_step"](*args, **kwargs)
        except Exception as error:
            if isinstance(error, BrimfulError) or not is_oom(error) or not self._made:
                raise
            raise _half_update(self._strategy.lightning_module.trainer, error) from error

    def configure_ddp(self) -> None:
        """No wrapper, which would reduce inside backward; only what it does first: everybody starts as process 0."""
        module = self._strategy.lightning_module
        with torch.no_grad():
            for tensor in (*module.parameters(), *module.buffers()):
                dist.broadcast(tensor.detach(), src=0)

    def all_gather(self, *args: Any, **kwargs: Any) -> Any:
        return self._together("all_gather")(*args, **kwargs)

    def broadcast(self, *args: Any, **kwargs: Any) -> Any:
        return self._together("broadcast")(*args, **kwargs)

    def barrier(self, *args: Any, **kwargs: Any) -> Any:
        return self._together("barrier")(*args, **kwargs)

    def _together(self, name: str) -> Any:
        if self._exact.in_micro_batch and self._strategy.world_size > 1:
            raise UnsupportedModel(
                f"training_step calls {name} of all processes, where one that runs out of memory would leave the others waiting "
                "for ever; move it to a hook that runs once a step, such as on_train_batch_end"
            )
        return self._plain[name]

    @property
    def _cuts(self) -> bool:
        """Not in validation, nor in the pass without backward that StochasticWeightAveraging ends with."""
        trainer = self._strategy.lightning_module.trainer
        return bool(trainer.training and not trainer.fit_loop._skip_backward)


def _check_options(options: Mapping[str, Any]) -> None:
    known = sorted({"plan", "batch_on_device"} | set(StepOptions.__dataclass_fields__) - set(_LIGHTNINGS))
    wrong = [f"{name}: {_LIGHTNINGS[name]}" for name in options if name in _LIGHTNINGS]
    wrong += [name for name in options if name not in known and name not in _LIGHTNINGS]
    if wrong:
        raise BadOption(f"ExactSteps has no option {', '.join(wrong)}; it has {', '.join(known)}")
    StepOptions(**options)


def _check_trainer(trainer: Any, module: Any) -> None:
    _check_accumulation(trainer)
    if any(type(callback).__name__ == "GradientAccumulationScheduler" for callback in trainer.callbacks):
        raise BadOption("GradientAccumulationScheduler: a batch of the loader is a whole step here; leave it out")
    if not module.automatic_optimization:
        raise UnsupportedModel(
            "automatic_optimization=False: with manual optimisation your training_step steps by itself, and a redone one would step "
            "twice; use automatic optimisation, or brimful.Stepper in a loop of your own"
        )
    if "dataloader_iter" in inspect.signature(module.training_step).parameters:
        raise UnsupportedModel(
            "training_step(dataloader_iter) takes batches that nobody can cut; take training_step(batch)"
        )
    owner = next(base for base in type(module).__mro__ if "backward" in vars(base))
    if owner.__name__ != "LightningModule":
        raise UnsupportedModel(
            f"{owner.__name__} overrides backward, which runs here once for each micro-batch and for the sum of the loss; move what "
            "it does into training_step or on_after_backward"
        )
    _check_strategy(trainer.strategy)


def _check_accumulation(trainer: Any) -> None:
    parts = trainer.accumulate_grad_batches
    if parts != 1:
        raise BadOption(
            f"accumulate_grad_batches={parts}: a batch of the loader is a whole step here, since memory no longer decides its size; "
            f"raise the loader's batch_size {parts} times and leave accumulate_grad_batches at 1"
        )


def _check_strategy(strategy: Any) -> None:
    name = type(strategy).__name__
    kinds = {base.__name__ for base in type(strategy).__mro__}
    if not kinds & {"SingleDeviceStrategy", "DDPStrategy"} or "XLA" in name:
        raise UnsupportedModel(
            f"{name}: only one device and DDP can redo a step, since sharded weights are gathered inside the forward; use "
            "Trainer(strategy='auto') or 'ddp'"
        )
    if getattr(strategy, "_layer_sync", None) is not None:
        raise UnsupportedModel(
            "Trainer(sync_batchnorm=True): SyncBatchNorm talks to the other processes inside the forward, where one that runs out of "
            "memory would leave them waiting for ever; leave it out, or use GroupNorm or LayerNorm"
        )
    for option in ("ddp_comm_hook", "ddp_comm_wrapper", "model_averaging_period"):
        if getattr(strategy, f"_{option}", None) is not None:
            raise UnsupportedModel(
                f"{name}({option}=…) changes what the DDP wrapper does, and there is none here; leave it out"
            )


def _half_update(trainer: Any, error: BaseException) -> PartialUpdate:
    saved = trainer.checkpoint_callback
    last = saved and (getattr(saved, "last_model_path", "") or getattr(saved, "best_model_path", ""))
    return PartialUpdate(
        f"memory ran out in step {trainer.global_step + 1} after its gradients were made, in a hook, in Lightning's clipping or in the "
        "optimizer's own step, so the weights may be half updated: go back to "
        f"{f'the last checkpoint, {last}' if last else 'your last checkpoint'} ({in_one_line(error)})"
    )
