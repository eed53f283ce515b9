"""Lightning's `Trainer.fit` with steps that survive out-of-memory. Two changed lines:

    from brimful.adapters.lightning import ExactSteps

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
import inspect
import logging
from collections.abc import Callable, Iterator, Mapping
from importlib import import_module
from importlib.util import find_spec
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from brimful.adapters.lightning_steps import HINT, MicroBatches
from brimful.errors import BadOption, BrimfulError, HalfUpdate, Inexact, MissingExtra, Unsuited, in_one_line
from brimful.memory.oom import is_oom
from brimful.plan.plan import Plan
from brimful.task import Loss
from brimful.train import suited
from brimful.train.options import StepOptions
from brimful.train.step import Stepper

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

    `plan` (from `brimful.fit`) cuts by predicted bytes; without one the whole batch is tried and the rest learnt. Options
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

    def on_fit_start(self, trainer: Any, pl_module: Any) -> None:
        suited.check_model(pl_module)
        suited.check_optimizer(pl_module, trainer.optimizers[0])

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
            except Inexact as error:
                raise Inexact(f"{error}; {HINT}") from None
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
            raise Unsuited(
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
        raise Unsuited(
            "automatic_optimization=False: with manual optimisation your training_step steps by itself, and a redone one would step "
            "twice; use automatic optimisation, or brimful.Stepper in a loop of your own"
        )
    if "dataloader_iter" in inspect.signature(module.training_step).parameters:
        raise Unsuited("training_step(dataloader_iter) takes batches that nobody can cut; take training_step(batch)")
    owner = next(base for base in type(module).__mro__ if "backward" in vars(base))
    if owner.__name__ != "LightningModule":
        raise Unsuited(
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
        raise Unsuited(
            f"{name}: only one device and DDP can redo a step, since sharded weights are gathered inside the forward; use "
            "Trainer(strategy='auto') or 'ddp'"
        )
    if getattr(strategy, "_layer_sync", None) is not None:
        raise Unsuited(
            "Trainer(sync_batchnorm=True): SyncBatchNorm talks to the other processes inside the forward, where one that runs out of "
            "memory would leave them waiting for ever; leave it out, or use GroupNorm or LayerNorm"
        )
    for option in ("ddp_comm_hook", "ddp_comm_wrapper", "model_averaging_period"):
        if getattr(strategy, f"_{option}", None) is not None:
            raise Unsuited(
                f"{name}({option}=…) changes what the DDP wrapper does, and there is none here; leave it out"
            )


def _half_update(trainer: Any, error: BaseException) -> HalfUpdate:
    saved = trainer.checkpoint_callback
    last = saved and (getattr(saved, "last_model_path", "") or getattr(saved, "best_model_path", ""))
    return HalfUpdate(
        f"memory ran out in step {trainer.global_step + 1} after its gradients were made, in a hook, in Lightning's clipping or in the "
        "optimizer's own step, so the weights may be half updated: go back to "
        f"{f'the last checkpoint, {last}' if last else 'your last checkpoint'} ({in_one_line(error)})"
    )
