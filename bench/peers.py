"""The other finders, each used as its own documentation shows. `finders.py` says what is the same for all."""

import contextlib
import functools
import importlib.util
import inspect
import logging
import tempfile
import warnings
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import torch

from brimful.memory.context import StepContext
from brimful.memory.oom import OutOfMemory, attempt
from brimful.task import rows_of
from contest import Contest, Limit, Result, forward_backward, full_step, held

LINE_ROWS = (1, 2, 4, 8, 16)
"""The sizes that the straight line is drawn through."""


def find_with_accelerate(contest: Contest) -> list[Result]:
    """Down by a tenth at each failure; two steps, because the optimizer's state appears in the first."""
    from accelerate.utils import find_executable_batch_size

    limit, tried, builds_s = Limit(contest.target), [], []

    @find_executable_batch_size(starting_batch_size=contest.start)
    def train(rows: int) -> int:
        tried.append(rows)
        with limit.attempt():
            context, build_s = contest.clock(functools.partial(contest.build, on_host=True))
            builds_s.append(build_s)
            for _ in range(2):
                full_step(context, contest.batch(rows))
        return rows

    rows, seconds = contest.clock(train)
    build_s = sum(builds_s)
    note = f"{seconds - build_s:.1f} s without the {build_s:.1f} s of building the model {len(builds_s)} times"
    details = {"tried": tried, "build_s": build_s, "seconds_without_builds": seconds - build_s}
    return [Result(finder="accelerate", rows=rows, ooms=limit.ooms, seconds=seconds, ran=True, note=note,
                   details=details)]  # fmt: skip


def find_with_lightning(contest: Contest, mode: str) -> list[Result]:
    """Up from 2 by doubling; `binsearch` then halves the interval, and takes 5 % off what it finds."""
    lightning = _import_lightning()
    limit, ran, context = Limit(contest.target), [], contest.build()
    module = _lightning_module(lightning, contest, context, limit, ran)
    with tempfile.TemporaryDirectory(prefix="finders-") as folder, _quiet():
        returned, seconds = contest.clock(lambda: _scale(lightning, contest, module, mode, folder))
    if returned is None:
        raise RuntimeError("scale_batch_size returned nothing")
    rows, most = min(returned, contest.most), max(ran, default=0)
    note = f"never ran as many rows as it returned, only {most}" if rows > most else f"ran up to {most} rows"
    return [Result(finder=f"lightning-{mode}", rows=rows, ooms=limit.ooms, seconds=seconds, ran=rows <= most, note=note,
                   details={"returned": returned, "ran": sorted(set(ran))})]  # fmt: skip


def _import_lightning() -> Any:
    """Under either of its names. A broken installation fails with its own error."""
    for name in ("lightning.pytorch", "pytorch_lightning"):
        if importlib.util.find_spec(name.partition(".")[0]) is not None:
            return importlib.import_module(name)
    raise ImportError("neither lightning nor pytorch_lightning is installed; pip install lightning")


def _lightning_module(lightning: Any, contest: Contest, context: StepContext, limit: Limit, ran: list[int]) -> Any:
    """The task as a LightningModule with automatic optimization. Every size that completed a step is added to `ran`."""

    class Module(lightning.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.batch_size = 2
            self.model = context.model

        def train_dataloader(self) -> Any:
            rows = range(3 * contest.most)  # three full batches, one for each step of a trial
            collate = lambda rows: contest.batch(len(rows))  # noqa: E731
            return torch.utils.data.DataLoader(rows, batch_size=self.batch_size, collate_fn=collate)

        def transfer_batch_to_device(self, *args: Any) -> Any:
            with limit.attempt():
                return super().transfer_batch_to_device(*args)

        def training_step(self, batch: Any, _: int) -> torch.Tensor:
            self.rows = rows_of(batch)
            loss = contest.task.loss(self.model, batch)
            return loss.sum / loss.count

        def optimizer_step(self, *args: Any, **kwargs: Any) -> None:
            with limit.attempt(held(context)):  # forward and backward run in the closure, inside
                super().optimizer_step(*args, **kwargs)
            ran.append(self.rows)

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return context.optimizer

    return Module()


def _scale(lightning: Any, contest: Contest, module: Any, mode: str, folder: str) -> int | None:
    device = contest.device
    trainer = lightning.Trainer(
        accelerator="gpu" if device.type == "cuda" else "cpu",
        devices=[device.index or 0] if device.type == "cuda" else 1,
        precision={None: "32-true", torch.bfloat16: "bf16-mixed", torch.float16: "16-mixed"}[contest.autocast],
        default_root_dir=folder,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    tuner = importlib.import_module(f"{lightning.__name__}.tuner").Tuner(trainer)
    bounded = "max_val" in inspect.signature(tuner.scale_batch_size).parameters
    bound = {"max_val": contest.most + 1} if bounded else {}  # a size of max_val would be returned without being run
    return tuner.scale_batch_size(module, mode=mode, init_val=2, max_trials=25, steps_per_trial=3, **bound)


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Silence Lightning's advice about workers and loggers."""
    loggers = [logging.getLogger(name) for name in ("lightning.pytorch", "lightning.fabric", "pytorch_lightning")]
    levels = [logger.level for logger in loggers]
    for logger in loggers:
        logger.setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        for logger, level in zip(loggers, levels, strict=True):
            logger.setLevel(level)


def find_like_ultralytics(contest: Contest) -> list[Result]:
    """Forward and backward at five small sizes, a straight line, and where it crosses the share of the limit."""
    context = contest.build()
    result, seconds = contest.clock(lambda: _extrapolate(contest, _peaks(contest, context)))
    return [replace(result, seconds=seconds)]


def _peaks(contest: Contest, context: StepContext) -> dict[int, int | None]:
    """The peak at each of the small sizes up to the first that fails; None for that one."""
    peaks: dict[int, int | None] = {}
    for rows in (rows for rows in LINE_ROWS if rows <= contest.most):
        peak = attempt(functools.partial(_forward_backward_peak, contest, context, rows), contest.device)
        context.model.zero_grad(set_to_none=True)
        if isinstance(peak, OutOfMemory):
            return {**peaks, rows: None}
        peaks[rows] = peak
    return peaks


def _forward_backward_peak(contest: Contest, context: StepContext, rows: int) -> int:
    batch = contest.batch(rows)
    with contest.meter(context) as metered:
        metered.phase("step")
        forward_backward(context, batch)
    return metered.reading().peak_bytes


def _extrapolate(contest: Contest, peaks: dict[int, int | None]) -> Result:
    measured = {rows: peak for rows, peak in peaks.items() if peak is not None}
    if len(measured) < 2:
        raise RuntimeError(f"no line goes through fewer than two sizes, and of {list(peaks)} rows {len(measured)} fit")
    slope, fixed = np.polyfit(list(measured), list(measured.values()), 1)
    if slope <= 0:
        raise RuntimeError(
            f"memory does not grow from {min(measured)} to {max(measured)} rows: there is no line to follow"
        )
    failed = len(peaks) - len(measured)
    rows = int((contest.target.budget_bytes - fixed) / slope)
    rows = max(1, min(rows, max(measured) if failed else contest.most))
    note = "predicts forward and backward alone; ran no full step of any size"
    return Result(finder="ultralytics-style", rows=rows, ooms=failed, ran=False, note=note, details={"peaks": peaks},
                  predicted_peak_bytes=int(slope * rows + fixed))  # fmt: skip
