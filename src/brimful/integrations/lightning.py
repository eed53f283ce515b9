"""Lightning's `Trainer.fit` with steps that survive out-of-memory. Two changed lines:

    from brimful.integrations.lightning import exact

    trainer = exact(Trainer)(max_epochs=3)       # or Trainer(max_epochs=3, callbacks=[ExactSteps()])

A batch of the train loader is one step, split as memory requires, with the result of the plain Trainer on the whole batch.
Everything else stays Lightning's: steps, epochs, schedules, callbacks, loggers, validation, checkpoints and resuming.

    Lightning's closure       with exact steps
    strategy.training_step    `Stepper.backward`: your `training_step` and its backward for each micro-batch, repeated when
                              memory runs out; then one sum over the processes, without a DDP wrapper
    optimizer.zero_grad       finds nothing: the gradients are set aside
    strategy.backward         puts them back; `on_before_backward` and `on_after_backward` run once a step
    unscale, clip, step       Lightning's. An out-of-memory error there ends the run; the optimizer's bytes are reserved

**The loss** is a mean over rows, unless `training_step` returns its count: `{"loss": mean, "count": tokens}`, which the plain
Trainer accepts too, or `brimful.Loss(sum, count)`. A mean over tokens without a count is refused before the first split.

**`self.log`** reaches Lightning once per step and key: the mean of the micro-batches weighted by their counts, or their sum,
minimum or maximum if `reduce_fx` says so. Failed attempts leave nothing. A logged torchmetrics object keeps its exact value
over the epoch; its value for the step is that weighted mean. `brimful/ooms` (of all processes) and `brimful/micro_batches`
are logged too.

**Your hooks.** `training_step`, `transfer_batch_to_device` and `on_after_batch_transfer` run once per micro-batch; what else
they change (a counter, a list) is not restored after a failed attempt. All other hooks run once a step. The batch stays on
the host until it is split, so `on_train_batch_start` and `_end` get it there. With `batch_on_device=True` the whole batch is
moved first, as Lightning does, and an out-of-memory error in that ends the run.

**Validation.** A batch that does not fit is validated in halves; what they log and return is merged as above, so a mean over
tokens needs a `count` in what `validation_step` returns. A row that does not fit, or a batch whose halves would log other values,
is left out with one warning, and training goes on (a callback that monitors a metric stops if no batch has logged it yet).

Lightning 2.5 to 2.6, as `lightning` or `pytorch_lightning`, on one device or with DDP. Without an error a step costs 1.1 ms
more than Lightning's own 2.8 ms (a small model on one CPU core).
"""

import contextlib
import functools
import inspect
import logging
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib import import_module
from importlib.util import find_spec
from typing import Any, TypeVar

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
    kind_of,
)
from brimful.memory.forward import Halving
from brimful.memory.oom import OutOfMemory, is_oom
from brimful.planning.plan import Plan
from brimful.step import checks
from brimful.step.checks import SPLIT_CHECK_ROWS
from brimful.step.recovery import GROW_AFTER
from brimful.step.result import Event, StepResult
from brimful.step.rows import BatchRows
from brimful.step.stepper import Stepper, check_stepper_options
from brimful.task import Loss, Task, rows_of

T = TypeVar("T")
logger = logging.getLogger("brimful")
_PACKAGES = [name for name in ("lightning.pytorch", "pytorch_lightning") if find_spec(name.partition(".")[0])]
"""One library under two names, with classes of their own."""
if not _PACKAGES:
    raise MissingExtra("lightning", "lightning")
_Callback: Any = type("Callback", tuple(import_module(name).Callback for name in _PACKAGES), {})
"""A callback of both packages: each Trainer checks for its own class."""
_Metric: Any = import_module("torchmetrics").Metric
_AUTOCAST = {"bf16-mixed": "bf16", "16-mixed": "fp16"}
"""What a plan calls Lightning's precisions. Without autocast it is fp32."""
HINT = "return {'loss': mean, 'count': count} from training_step"


def exact(
    trainer: type[T],
    *,
    plan: Plan | None = None,
    batch_on_device: bool = False,
    micro_batch: int | None = None,
    collate: Callable[[Sequence[Any]], Any] | None = None,
    skip_oversized: bool = False,
    allow_inexact: bool = False,
    grow_after: int = GROW_AFTER,
    on_event: Callable[[Event], object] | None = None,
) -> type[T]:
    """The same Trainer class, with steps that survive out-of-memory.

    The trainer has an attribute `exact_steps`, the callback that does it: `trainer.exact_steps.ooms`,
    `trainer.exact_steps.stepper.events`. The arguments are those of `ExactSteps`.
    """
    if not (isinstance(trainer, type) and any(issubclass(trainer, import_module(name).Trainer) for name in _PACKAGES)):
        raise BadOption(f"exact() takes a Trainer class, not {trainer!r}. Try: exact(Trainer)(max_epochs=…).")
    make = functools.partial(
        ExactSteps,
        plan,
        batch_on_device=batch_on_device,
        micro_batch=micro_batch,
        collate=collate,
        skip_oversized=skip_oversized,
        allow_inexact=allow_inexact,
        grow_after=grow_after,
        on_event=on_event,
    )
    make()  # options are checked now, not when the trainer is made

    def init(self: Any, *, callbacks: Any = None, **options: Any) -> None:
        self.exact_steps = make()
        listed = list(callbacks) if isinstance(callbacks, (list, tuple)) else [callbacks] * (callbacks is not None)
        super(made, self).__init__(callbacks=[*listed, self.exact_steps], **options)

    made: Any = type(f"Exact{trainer.__name__}", (trainer,), {"__init__": init})
    return made


class ExactSteps(_Callback):
    """The callback behind `exact`, which makes every training step of `Trainer.fit` survive out-of-memory."""

    stepper: Stepper | None = None
    """The stepper, from the first step on."""
    ooms = 0
    """Out-of-memory errors survived, on all processes."""

    def __init__(
        self,
        plan: Plan | None = None,
        *,
        batch_on_device: bool = False,
        micro_batch: int | None = None,
        collate: Callable[[Sequence[Any]], Any] | None = None,
        skip_oversized: bool = False,
        allow_inexact: bool = False,
        grow_after: int = GROW_AFTER,
        on_event: Callable[[Event], object] | None = None,
    ) -> None:
        """
        Args:
            plan: From `brimful.plan`: split by predicted bytes. Default: try the whole batch and learn from errors.
            batch_on_device: Move the whole batch to the device before it is split.
            collate: Turns rows into a batch, for a loader of lists of rows.
            micro_batch, skip_oversized, allow_inexact, grow_after, on_event: As in `brimful.Stepper`.
        """
        check_stepper_options(micro_batch=micro_batch, grow_after=grow_after, collate=collate, on_event=on_event)
        self.plan, self.batch_on_device = plan, batch_on_device
        self._step_options: dict[str, Any] = {
            "micro_batch": micro_batch,
            "collate": collate,
            "skip_oversized": skip_oversized,
            "allow_inexact": allow_inexact,
            "grow_after": grow_after,
            "on_event": on_event,
        }
        self._state: dict[str, Any] = {}
        self._made_for: tuple[Any, ...] = ()
        self._running: _MicroBatches | None = None
        self._set_aside: list[tuple[nn.Parameter, Tensor]] = []
        self._evaluation: _Evaluation | None = None

    def setup(self, trainer: Any, pl_module: Any, stage: str) -> None:
        """Before anything is on the device: refuse what cannot work, and replace the strategy's training step."""
        if stage != "fit":
            return
        _check_trainer(trainer, pl_module)
        self.stepper, self.ooms, self._state, self._made_for = None, 0, {}, ()
        if self.plan and self.plan.levers.precision != _AUTOCAST.get(trainer.precision, "fp32"):
            text = "the plan was made for %s, but the precision is %r, so its bytes are wrong"
            logger.warning(text, self.plan.levers.precision, trainer.precision)
        _PatchedStrategy(trainer.strategy, self)

    def on_fit_start(self, trainer: Any, pl_module: Any) -> None:
        checks.check_model(pl_module)
        checks.check_optimizer(pl_module, trainer.optimizers[0])

    def state_dict(self) -> dict[str, Any]:
        """What the next splits depend on. The scaler is in Lightning's part of the checkpoint."""
        return {**self.stepper.state_dict(), "scaler": None, "ooms_of_all": self.ooms} if self.stepper else self._state

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self._state, self.ooms = state_dict, state_dict.get("ooms_of_all", 0)

    def on_validation_start(self, trainer: Any, pl_module: Any) -> None:
        device = trainer.strategy.root_device
        halving = self._evaluation.halving if self._evaluation else Halving(device, what="validation")
        halving.begin_pass()
        self._evaluation = _Evaluation(trainer.strategy, halving)

    @property
    def running(self) -> str | None:
        """The method that runs on a part of a batch, of which the other processes know nothing."""
        if self._evaluation is not None and self._evaluation.in_part:
            return "validation_step"
        return None if self._running is None else "training_step"

    def evaluate(self, strategy: Any, validation_step: Callable[..., Any], *arguments: Any) -> Any:
        """What `validation_step` returns for a batch, in halves if it does not fit."""
        if self._evaluation is None or not arguments:
            return validation_step(*arguments)
        return self._evaluation.run(validation_step, *arguments)

    def step(self, strategy: Any, training_step: Callable[..., Any], batch: Any, *arguments: Any) -> dict[str, Any]:
        """Make the exact gradients of this batch and set them aside. Returns what `training_step` would have."""
        _check_accumulation(strategy.lightning_module.trainer)
        stepper = self._find_stepper(strategy)
        stepper.model.zero_grad(set_to_none=True)  # as Lightning does before every backward, applied or not
        self._running = running = _MicroBatches(strategy, training_step, arguments, moved=self.batch_on_device)
        try:
            result = stepper.backward(batch)
        except InexactSplit as error:
            raise InexactSplit(
                f"{str(error).removesuffix('.')}, or {HINT} if the loss is not a mean over rows."
            ) from None
        finally:
            self._running = None
        self._set_aside = [(p, p.grad) for p in strategy.lightning_module.parameters() if p.grad is not None]
        stepper.model.zero_grad(set_to_none=True)
        self.ooms += result.ooms_of_all
        running.log_once(result, self.ooms)
        return running.outputs(result)

    def restore_gradients(self) -> None:
        """Once Lightning has emptied what it takes for the gradients of the last step."""
        for param, gradient in self._set_aside:
            param.grad = gradient
        self._set_aside = []

    def _find_stepper(self, strategy: Any) -> Stepper:
        """The same one, unless a callback froze or unfroze weights or changed the optimizer."""
        module, optimizer = strategy.lightning_module, strategy.optimizers[0]
        made_for = optimizer, *(param.requires_grad for param in module.parameters())
        if self.stepper is None or self._made_for != made_for:
            state = self.state_dict()

            def loss(_: nn.Module, batch: Any) -> Loss:
                assert self._running is not None
                return self._running.loss(batch)

            loss.__name__ = f"{type(module).__name__}.training_step"
            self.stepper = Stepper(
                module,
                optimizer,
                loss,
                self.plan,
                precision="fp32",  # the strategy's training step opens autocast itself
                scaler=getattr(strategy.precision_plugin, "scaler", None),
                rows_are="local",
                **self._step_options,
            )
            self._made_for = made_for
            if state:
                self.stepper.load_state_dict(state)
        return self.stepper


class _PatchedStrategy:
    """Replaces some methods of a strategy while training, and calls the originals otherwise."""

    REPLACED = (
        "batch_to_device",
        "training_step",
        "validation_step",
        "backward",
        "optimizer_step",
        "configure_ddp",
        "all_gather",
        "broadcast",
        "barrier",
    )

    def __init__(self, strategy: Any, exact_steps: ExactSteps) -> None:
        self._strategy, self._exact_steps, self._has_gradients = strategy, exact_steps, False
        for name in self.REPLACED:
            vars(strategy).pop(name, None)  # of an earlier fit
        self._original: dict[str, Any] = {name: getattr(strategy, name, None) for name in self.REPLACED}
        for name in self.REPLACED:
            setattr(strategy, name, getattr(self, name))

    @property
    def _training(self) -> bool:
        """Not in validation, nor in the pass without backward that StochasticWeightAveraging ends with."""
        trainer = self._strategy.lightning_module.trainer
        return bool(trainer.training and not trainer.fit_loop._skip_backward)

    def batch_to_device(self, batch: Any, device: torch.device | None = None, dataloader_idx: int = 0) -> Any:
        if self._training and not self._exact_steps.batch_on_device:
            return batch
        return self._original["batch_to_device"](batch, device, dataloader_idx)

    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        original = self._original["training_step"]
        return self._exact_steps.step(self._strategy, original, *args) if self._training else original(*args, **kwargs)

    def validation_step(self, *args: Any, **kwargs: Any) -> Any:
        original = functools.partial(self._original["validation_step"], **kwargs)
        return self._exact_steps.evaluate(self._strategy, original, *args)

    def backward(self, closure_loss: Tensor, optimizer: Any, *args: Any, **kwargs: Any) -> Any:
        """The hooks of the precision plugin around gradients that exist already."""
        plugin, module = self._strategy.precision_plugin, self._strategy.lightning_module
        loss = plugin.pre_backward(closure_loss, module)
        self._exact_steps.restore_gradients()
        self._has_gradients = True
        return plugin.post_backward(loss, module)

    def optimizer_step(self, *args: Any, **kwargs: Any) -> Any:
        """Runs the closure too; only what comes after its gradients may have changed a weight."""
        self._has_gradients = False
        try:
            return self._original["optimizer_step"](*args, **kwargs)
        except Exception as error:
            if isinstance(error, BrimfulError) or not is_oom(error) or not self._has_gradients:
                raise
            trainer = self._strategy.lightning_module.trainer
            saved = trainer.checkpoint_callback
            path = saved and (getattr(saved, "last_model_path", "") or getattr(saved, "best_model_path", ""))
            raise PartialUpdate(
                f"memory ran out in step {trainer.global_step + 1} in a hook, in clipping or in the optimizer, so the weights may "
                f"be partly updated ({in_one_line(error)}). Try: resume from {path or 'your last checkpoint'}."
            ) from error

    def configure_ddp(self) -> None:
        """Without the wrapper, which would reduce inside backward; all processes start with the weights of the first."""
        module = self._strategy.lightning_module
        with torch.no_grad():
            for tensor in (*module.parameters(), *module.buffers()):
                dist.broadcast(tensor.detach(), src=0)

    def all_gather(self, *args: Any, **kwargs: Any) -> Any:
        return self._collective("all_gather")(*args, **kwargs)

    def broadcast(self, *args: Any, **kwargs: Any) -> Any:
        return self._collective("broadcast")(*args, **kwargs)

    def barrier(self, *args: Any, **kwargs: Any) -> Any:
        return self._collective("barrier")(*args, **kwargs)

    def _collective(self, name: str) -> Any:
        if self._exact_steps.running and self._strategy.world_size > 1:
            raise UnsupportedModel(
                f"{self._exact_steps.running} calls {name}, where a process that runs out of memory would leave the others waiting. "
                "Try: a hook that runs once a step, such as on_train_batch_end."
            )
        return self._original[name]


@dataclass(frozen=True, slots=True)
class _LogCall:
    """One call of `self.log`: its arguments, and its value at that time."""

    arguments: dict[str, Any]
    value: Any


@dataclass(frozen=True, slots=True)
class _Output:
    """What a micro-batch logged and returned besides its loss."""

    rows: int | None
    count: Tensor | float
    logged: dict[str, _LogCall]
    extras: dict[str, Any]


class _MicroBatches:
    """Runs `training_step` on each micro-batch of a step, and logs and returns once what it logged and returned.

    A failed attempt leaves nothing: neither logged values nor the state of torchmetrics objects.
    """

    def __init__(
        self, strategy: Any, training_step: Callable[..., Any], arguments: tuple[Any, ...], *, moved: bool
    ) -> None:
        self._strategy, self._training_step, self._arguments, self._moved = strategy, training_step, arguments, moved
        self._module = strategy.lightning_module
        metrics = (part for part in self._module.modules() if isinstance(part, _Metric))
        self._metrics = [(metric, _copy_state(vars(metric))) for metric in metrics]
        self._attempted = False
        self._outputs: list[_Output] = []
        self._dtype = torch.float32

    def loss(self, batch: Any) -> Loss:
        if all(param.grad is None for param in self._module.parameters()):  # at the beginning of every attempt
            if self._attempted:
                for metric, state in self._metrics:
                    vars(metric).update(_copy_state(state))
            self._attempted, self._outputs = True, []
        try:
            rows: int | None = rows_of(batch)
        except TaskError:
            rows = None
        with _recorded_log(self._module) as logged:
            if not self._moved:
                batch = self._module._apply_batch_transfer_handler(batch, device=self._strategy.root_device)
            loss, extras = _read(self._training_step(batch, *self._arguments), rows, type(self._module).__name__)
        device = None if self._moved else "cpu"
        extras = tree_map_only(Tensor, lambda tensor: tensor.detach().to(device), extras)
        count = loss.count.detach() if isinstance(loss.count, Tensor) else loss.count
        self._outputs.append(_Output(rows, count, logged, extras))
        self._dtype = loss.sum.dtype
        return loss

    def log_once(self, result: StepResult, ooms: int) -> None:
        """What every micro-batch logged, once; in the precision that it was logged in."""
        trainer = self._module.trainer
        every = trainer.log_every_n_steps
        logs = not trainer.barebones and every and (trainer.global_step + 1) % every == 0  # as Lightning decides it
        with self._strategy.precision_plugin.train_step_context():
            for name in _names(output.logged for output in self._outputs):
                calls = [(output, output.logged[name]) for output in self._outputs if name in output.logged]
                self._module.log(**_merge_calls(calls))
            if result.ooms_of_all or logs:  # each call costs as much as a layer of a small model
                self._module.log("brimful/ooms", float(ooms), on_step=True, on_epoch=False)
                self._module.log("brimful/micro_batches", float(result.micro_batches), on_step=True, on_epoch=False)

    def outputs(self, result: StepResult) -> dict[str, Any]:
        """What `training_step` returned, over all micro-batches. The loss is the mean over all processes."""
        loss = torch.tensor(result.loss, dtype=self._dtype, device=self._strategy.root_device)
        names = _names(output.extras for output in self._outputs)
        return {"loss": loss, **{name: _join_extras(self._outputs, name) for name in names}}


class _Evaluation:
    """Runs `validation_step` on each batch of one validation: whole, or in halves if the batch does not fit.

    What the halves log and return is merged as in training. Whether that is the value of the whole batch is tried out on four
    rows, since a mean over tokens without a count is not. What can be evaluated neither way is left out, with one warning.
    """

    in_part = False
    """Whether a part of a batch is running."""

    def __init__(self, strategy: Any, halving: Halving) -> None:
        self._strategy, self._module, self.halving = strategy, strategy.lightning_module, halving
        self._may_split: bool | None = None
        self._warned = False

    def run(self, validation_step: Callable[..., Any], batch: Any, *arguments: Any) -> Any:
        rows: BatchRows | None = None
        with contextlib.suppress(TaskError):  # not a tree of tensors with one first dimension
            rows = BatchRows(batch, Task(), ())
        number = 1 if rows is None else len(rows)

        def run(part: range) -> _Output:
            if rows is None or len(part) == number:
                return self._run(validation_step, batch, None if rows is None else number, arguments)
            self.in_part = True
            try:
                some = lambda part: self._run(validation_step, rows.batch(list(part)), len(part), arguments)  # noqa: E731
                if self._may_split is None:
                    self._may_split = self._try_split(len(part), some)
                if not self._may_split:
                    raise _NotSplit
                return some(part)
            finally:
                self.in_part = False

        outputs, left_out = list[_Output](), ""
        try:
            for _, output in self.halving.run(number, run):
                if isinstance(output, OutOfMemory):
                    left_out = "a single row does not fit" if rows else "a batch that cannot be split does not fit"
                else:
                    outputs.append(output)
        except _NotSplit:
            left_out = "a batch does not fit, and its halves may log other values"
        if left_out and not self._warned:
            self._warned = True
            remedy = "return a count from validation_step, a smaller batch_size, or more memory"
            logger.warning("validation: %s, so it is left out of the metrics. Try: %s.", left_out, remedy)
        with self._strategy.precision_plugin.val_step_context():
            for name in _names(output.logged for output in outputs):
                calls = [(output, output.logged[name]) for output in outputs if name in output.logged]
                self._module.log(**_merge_calls(calls))
        merged = {name: _join_extras(outputs, name) for name in _names(output.extras for output in outputs)}
        return merged.get("", merged or None)

    def _run(
        self, validation_step: Callable[..., Any], batch: Any, rows: int | None, arguments: tuple[Any, ...]
    ) -> _Output:
        """One call. If it fails, the module's torchmetrics objects are as before it."""
        metrics = [
            (metric, _copy_state(vars(metric))) for metric in self._module.modules() if isinstance(metric, _Metric)
        ]
        try:
            with _recorded_log(self._module) as logged:
                value = validation_step(batch, *arguments)
        except BaseException:
            for metric, state in metrics:
                vars(metric).update(state)
            raise
        extras = dict(value) if isinstance(value, Mapping) else {} if value is None else {"": value}
        count = extras.get("count")
        return _Output(rows, rows or 1 if count is None else torch.as_tensor(count).detach(), logged, extras)

    def _try_split(self, rows: int, run: Callable[[range], _Output]) -> bool:
        """Whether a few rows log the same values at once and in halves."""
        count = min(SPLIT_CHECK_ROWS, rows)
        if count < 2:
            return False
        metrics = [
            (metric, _copy_state(vars(metric))) for metric in self._module.modules() if isinstance(metric, _Metric)
        ]
        whole, halves = run(range(count)), [run(range(count // 2)), run(range(count // 2, count))]
        for metric, state in metrics:
            vars(metric).update(state)
        tolerance = 1e-4 if str(self._strategy.precision_plugin.precision).startswith(("32", "64")) else 2e-2
        for name, call in whole.logged.items():
            if isinstance(call.value, _Metric) or isinstance(call.arguments["value"], _Metric):
                continue  # adds up rows by itself
            merged = _merge_calls([(output, output.logged[name]) for output in halves if name in output.logged])[
                "value"
            ]
            one, other = (torch.as_tensor(value).double().cpu() for value in (call.value, merged))
            if not torch.allclose(one, other, rtol=tolerance, atol=tolerance * 1e-3, equal_nan=True):
                return False
        return True


class _NotSplit(Exception):
    """Halves of a batch would not log what the whole batch does."""


@contextlib.contextmanager
def _recorded_log(module: Any) -> Iterator[dict[str, _LogCall]]:
    """Collects the module's calls of `self.log`, which `log_dict` uses too, instead of making them."""
    own, function, logged = vars(module).get("log"), module._current_fx_name, dict[str, _LogCall]()

    kind: Any = type(module)

    def record(*args: Any, **kwargs: Any) -> None:
        _, *bound = _log_signature(kind).bind(module, *args, **kwargs).arguments.items()
        arguments = dict(bound)
        value = arguments["value"]
        if isinstance(value, _Metric):  # its value for this call is overwritten by the next
            value = value._forward_cache
        logged[arguments["name"]] = _LogCall(arguments, value.detach() if isinstance(value, Tensor) else value)

    module.log = record
    try:
        yield logged
    finally:
        del module.log
        if own is not None:
            module.log = own
        module._current_fx_name = function  # a hook that ran out of memory left its own name there


@functools.cache
def _log_signature(kind: Any) -> inspect.Signature:
    return inspect.signature(kind.log)


def _copy_state(state: Mapping[str, Any]) -> dict[str, Any]:
    """Tensors and lists of them are changed in place; everything else is replaced."""
    return {
        name: value.clone() if isinstance(value, Tensor) else list(value) if isinstance(value, list) else value
        for name, value in state.items()
    }


def _read(value: Any, rows: int | None, name: str) -> tuple[Loss, dict[str, Any]]:
    """What `training_step` returned, as sum and count, and whatever came with them."""
    extras = dict(value) if isinstance(value, Mapping) else {}
    mean = extras.pop("loss", None) if isinstance(value, Mapping) else value
    if isinstance(mean, Loss):
        return mean, extras
    if not isinstance(mean, Tensor):
        returned = "no loss" if mean is None else kind_of(mean)
        raise TaskError(
            f"{name}.training_step returned {returned} for a micro-batch. Try: return a scalar tensor, a dict with 'loss', or "
            "brimful.Loss(sum, count), with a count of 0 for rows that do not count."
        )
    mean = mean.to(torch.promote_types(mean.dtype, torch.float32))  # in fp16 a sum over 10,000 tokens is inf
    if extras.get("count") is None:
        if rows is None:
            raise TaskError(f"the rows of {name}'s batch cannot be counted. Try: {HINT}.")
        return Loss(sum=mean * rows, count=rows), extras
    count = torch.as_tensor(extras["count"], device=mean.device).detach()
    return Loss(sum=torch.where(count > 0, mean * count, torch.zeros_like(mean)), count=count), extras


def _names(mappings: Iterable[Mapping[str, Any]]) -> list[str]:
    return list(dict.fromkeys(name for mapping in mappings for name in mapping))


def _merge_calls(calls: list[tuple[_Output, _LogCall]]) -> dict[str, Any]:
    """Several calls of `self.log` with one name, as one."""
    arguments = dict(calls[-1][1].arguments)
    values, weights = [call.value for _, call in calls], [output.count for output, _ in calls]
    if isinstance(arguments["value"], _Metric):
        if all(isinstance(value, Tensor) for value in values):
            arguments["value"]._forward_cache = _reduce(values, weights, "mean")
    elif len(calls) > 1:
        reduction = arguments.get("reduce_fx", "mean")
        arguments["value"] = _reduce(values, weights, str(getattr(reduction, "__name__", reduction)).lower())
    sizes = [call.arguments.get("batch_size") or output.rows for output, call in calls]
    if None not in sizes:
        arguments["batch_size"] = sum(sizes)
    return arguments


def _reduce(values: list[Any], weights: list[Any], reduction: str) -> Tensor:
    device = next((value.device for value in values if isinstance(value, Tensor)), None)
    parts = torch.stack([torch.as_tensor(value, device=device) for value in values])
    if reduction in ("min", "max"):
        return parts.amin(0) if reduction == "min" else parts.amax(0)
    if reduction == "sum":
        return parts.sum(0)
    parts = parts.to(torch.promote_types(parts.dtype, torch.float32))
    counts = torch.stack([torch.as_tensor(weight, device=parts.device).to(parts.dtype) for weight in weights])
    counts = counts.reshape((-1, *[1] * (parts.ndim - 1)))
    return torch.where(counts > 0, parts * counts, torch.zeros_like(parts)).sum(0) / counts.sum()


def _join_extras(outputs: list[_Output], name: str) -> Any:
    """An output besides the loss: rows concatenated, numbers as their mean, a count as its sum, else a list."""
    having = [output for output in outputs if name in output.extras]
    parts = [output.extras[name] for output in having]
    if len(parts) == 1:
        return parts[0]
    pairs = zip(parts, having, strict=True)
    if all(isinstance(part, Tensor) and part.ndim and len(part) == output.rows for part, output in pairs):
        return torch.cat(parts)
    if all(isinstance(part, (int, float)) or (isinstance(part, Tensor) and not part.ndim) for part in parts):
        return _reduce(parts, [output.count for output in having], "sum" if name == "count" else "mean")
    return parts


def _check_trainer(trainer: Any, module: Any) -> None:
    _check_accumulation(trainer)
    if any(type(callback).__name__ == "GradientAccumulationScheduler" for callback in trainer.callbacks):
        raise BadOption(
            "GradientAccumulationScheduler cannot be used, since a batch of the loader is a whole step. Try: a larger batch_size."
        )
    if not module.automatic_optimization:
        raise UnsupportedModel(
            "with automatic_optimization=False training_step steps by itself, and a repeated one would step twice. "
            "Try: automatic optimization, or brimful.Stepper in a loop of your own."
        )
    if "dataloader_iter" in inspect.signature(module.training_step).parameters:
        raise UnsupportedModel("batches of training_step(dataloader_iter) cannot be split. Try: training_step(batch).")
    owner = next(base for base in type(module).__mro__ if "backward" in vars(base))
    if owner.__name__ != "LightningModule":
        raise UnsupportedModel(
            f"{owner.__name__} overrides backward, which runs once per micro-batch on the sum of the loss. "
            "Try: training_step or on_after_backward."
        )
    strategy = trainer.strategy
    name = type(strategy).__name__
    kinds = {base.__name__ for base in type(strategy).__mro__}
    if not kinds & {"SingleDeviceStrategy", "DDPStrategy"} or "XLA" in name:
        raise UnsupportedModel(
            f"{name} cannot repeat a step, since it communicates inside the forward. Try: strategy='auto' or 'ddp'."
        )
    if getattr(strategy, "_layer_sync", None) is not None:
        raise UnsupportedModel(
            "with sync_batchnorm=True SyncBatchNorm communicates inside the forward, so one process cannot repeat a step. "
            "Try: sync_batchnorm=False, GroupNorm or LayerNorm."
        )
    for option in ("ddp_comm_hook", "ddp_comm_wrapper", "model_averaging_period"):
        if getattr(strategy, f"_{option}", None) is not None:
            raise UnsupportedModel(f"{name}({option}=…) changes the DDP wrapper, which is not used here. Try: omit it.")


def _check_accumulation(trainer: Any) -> None:
    parts = trainer.accumulate_grad_batches
    if parts != 1:
        raise BadOption(
            f"accumulate_grad_batches={parts} cannot be used, since a batch of the loader is a whole step. "
            f"Try: a loader with {parts} times the batch_size and accumulate_grad_batches=1."
        )
