"""Who finds the batch size, how fast, at the price of how many out-of-memory errors, and does what it found run?

    python bench/finders.py                                          one CUDA card, capped to 20 GiB
    python bench/finders.py --device cpu --global-batch 256          the CPU under a virtual limit of 512 MiB

`accelerate.find_executable_batch_size`, Lightning's `Tuner.scale_batch_size` in both modes, a straight line through
small batches as Ultralytics draws it, and `brimful.fit`: one process, one task, its worst shape, one limit, one
precision, one optimizer, the same largest batch (`--global-batch`). On an H200 capped to 20 GiB, accelerate ran out of
memory 25 times in 91 s where a few probes and a check needed 6 s and no failure: that difference is what is measured.

**The clock** starts from a built model, after all imports and one common warm-up step. accelerate's documentation has
the model and optimizer built inside the decorated function, so it builds them again for every size it tries, on the host
and then moved, as scripts do: that is part of its seconds, and said apart. `--repeats N` runs all finders N times in turn; the run of median seconds stands.

**The limit** on CUDA is torch's cap on the process, for everyone. On the CPU each attempt to train runs under
`brimful.virtual_memory`, which raises the errors that the peers know and slows steps by 4–90 %; Brimful probes under a
ledger too but times without one. So on the CPU trust rows, OOMs and peaks; compare seconds only roughly.

**OOMs** are those met during the search. Afterwards every result is run in one and the same way: a new model, two full
steps (autocast, forward, backward, optimizer, gradients dropped) whose peak is read, then the median of five more (CPU:
three, without a ledger) for rows/s. A result that runs out of memory there is shown as such. Equal results share one
measurement: read twice, the same 34 rows gave 60 and 71 rows/s on a shared CPU.

**ultralytics-style.** Same as theirs: forward and backward without an optimizer step, a first-degree `numpy.polyfit` of
memory over 1, 2, 4, 8 and 16 rows, solved for a share of the limit, back to the last size that ran where one failed, no
check. Different: peaks of allocated bytes instead of reserved ones; Brimful's share of 0.85 instead of 0.6; clamped to
1 … `--global-batch` instead of replaced by 16 outside 1 … 1024; five sizes on any card (they add 32 and 64 from 16 GiB
on); linear (some of their releases fit logarithms).

**Brimful** predicts a step of several micro-batches, in which gradients are held while the next forward runs. Its
prediction compares with what its own probe measured (printed below the table), not with the plain step of the table. It
has two rows: `brimful` is the fastest size that fits, `brimful-largest` the largest; both come from the same fit.
"""

import argparse
import contextlib
import functools
import gc
import importlib.util
import inspect
import json
import logging
import platform
import statistics
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, dataclass, field, replace
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path
from typing import Any

import numpy as np
import torch

import brimful
from brimful.errors import BadOption, UserError
from brimful.memory.bare import Rig, rows_of, to_device
from brimful.memory.meter import Meter, meter
from brimful.memory.oom import OutOfMemory, attempt, is_oom
from brimful.plan.levers import checkpointing
from brimful.plan.options import FitOptions
from brimful.plan.prober import show_size
from brimful.plan.target import Target, find_target
from brimful.task import Shape, Task
from brimful.tasks.load import BUILT_IN, load_task
from brimful.units import KiB, show_bytes, show_rate

LINE_ROWS = (1, 2, 4, 8, 16)
"""The sizes that the straight line is drawn through."""
TIMED_STEPS = {"cpu": 3, "cuda": 5}
"""Full steps whose median is the speed at a result."""
DEFAULTS = {"cpu": ("tiny", "512MiB"), "cuda": ("base", "20GiB")}
"""The built-in tasks' size and the limit, unless given."""


@dataclass(frozen=True, kw_only=True)
class Contest:
    """What every finder is given, and the step that every result is measured with."""

    task: Task
    shape: Shape
    target: Target
    autocast: torch.dtype | None
    most: int
    """No finder may try more rows than this."""
    start: int
    """Where accelerate begins to come down from."""

    @property
    def device(self) -> torch.device:
        return self.target.device

    def build(self, *, on_host: bool = False) -> Rig:
        """A new model and optimizer on the device: made there, or on the host and moved as most scripts do."""
        torch.manual_seed(0)
        with torch.device("cpu" if on_host else self.device):
            model = self.task.model()
        model = model.to(self.device).train()
        optimizer = self.task.optimizer(model)
        return Rig(task=self.task, model=model, optimizer=optimizer, device=self.device, autocast=self.autocast)

    def batch(self, rows: int) -> Any:
        return self.task.dummy(rows, self.shape)

    def meter(self, rig: Rig) -> Meter:
        """Peaks as the card reports them, or as a ledger with the limit counts them."""
        limit_bytes = self.target.limit_bytes if self.device.type == "cpu" else None
        return meter(self.device, limit_bytes=limit_bytes, adopt=_held(rig), reserved=True)

    def clock(self, work: Callable[[], Any]) -> tuple[Any, float]:
        """What the work returns, and its seconds with the device's queue empty at both ends."""
        self._synchronise()
        start = time.perf_counter()
        result = work()
        self._synchronise()
        return result, time.perf_counter() - start

    def free(self) -> None:
        """What the last finder left in cycles and in the allocator's cache, so that the next starts as it did."""
        gc.collect()
        if self.device.type == "cuda":
            torch.cuda.empty_cache()

    def _synchronise(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)


@dataclass(frozen=True, kw_only=True)
class Result:
    """One line of the table: what a finder came back with, and how that ran. None is unknown."""

    finder: str
    rows: int | None = None
    ooms: int | None = None
    seconds: float | None = None
    ran: bool | None = None
    """Whether the finder itself ran full steps of at least so many rows."""
    predicted_peak_bytes: int | None = None
    checkpointed: bool = False
    peak_bytes: int | None = None
    reserved_bytes: int | None = None
    rows_per_s: float | None = None
    seconds_ratio: float | None = None
    """In units of Brimful's, as the next."""
    rows_per_s_ratio: float | None = None
    all_seconds: tuple[float, ...] = ()
    all_rows: tuple[int, ...] = ()
    note: str = ""
    problem: str = ""
    """Why something above is missing."""
    details: dict[str, Any] = field(default_factory=dict)


class Limit:
    """The limit as peers meet it: the card's cap, or a virtual one around each attempt. Counts how often they hit it.

    One ledger serves all attempts, so what a peer fails to free after one is in its way in the next, as on a card.
    """

    def __init__(self, target: Target) -> None:
        self._ledger = brimful.virtual_memory(target.limit_bytes) if target.device.type == "cpu" else None
        self._seen = 0

    @contextlib.contextmanager
    def attempt(self, held: Iterable[torch.Tensor] = ()) -> Iterator[None]:
        """Around whatever may run out of memory; `held` are tensors that exist before it begins."""
        try:
            if self._ledger is None:
                yield
                return
            self._ledger.adopt(held)
            with self._ledger:
                yield
        except Exception as error:
            self._seen += is_oom(error)
            raise

    @property
    def ooms(self) -> int:
        return self._seen if self._ledger is None else self._ledger.ooms


def full_step(rig: Rig, batch: Any) -> None:
    """What a plain training loop does once, and no more."""
    forward_backward(rig, batch)
    if rig.scaler:
        rig.scaler.step(rig.optimizer)
        rig.scaler.update()
    else:
        rig.optimizer.step()
    rig.optimizer.zero_grad(set_to_none=True)


def forward_backward(rig: Rig, batch: Any) -> None:
    with rig.opened():
        loss = rig.task.loss(rig.model, to_device(batch, rig.device))
    mean = loss.sum / loss.count
    (rig.scaler.scale(mean) if rig.scaler else mean).backward()


def _held(rig: Rig) -> Iterator[torch.Tensor]:
    """Weights, buffers and optimizer state: what lives through a step."""
    yield from rig.model.parameters()
    yield from rig.model.buffers()
    for state in rig.optimizer.state.values():
        yield from (value for value in state.values() if isinstance(value, torch.Tensor))


def find_with_accelerate(contest: Contest) -> list[Result]:
    """Down from the start by a tenth at each failure; two steps, since the optimizer's state appears in the first."""
    from accelerate.utils import find_executable_batch_size

    limit, tried, builds_s = Limit(contest.target), [], []

    @find_executable_batch_size(starting_batch_size=contest.start)
    def train(rows: int) -> int:
        tried.append(rows)
        with limit.attempt():
            rig, build_s = contest.clock(functools.partial(contest.build, on_host=True))
            builds_s.append(build_s)
            for _ in range(2):
                full_step(rig, contest.batch(rows))
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
    limit, ran, rig = Limit(contest.target), [], contest.build()
    module = _lightning_module(lightning, contest, rig, limit, ran)
    with tempfile.TemporaryDirectory(prefix="finders-") as folder, _quiet():
        returned, seconds = contest.clock(lambda: _scale(lightning, contest, module, mode, folder))
    if returned is None:
        raise RuntimeError("scale_batch_size returned nothing")
    rows, most = min(returned, contest.most), max(ran, default=0)
    note = f"never ran as many rows as it returned, only {most}" if rows > most else f"ran up to {most} rows"
    return [Result(finder=f"lightning-{mode}", rows=rows, ooms=limit.ooms, seconds=seconds, ran=rows <= most, note=note,
                   details={"returned": returned, "ran": sorted(set(ran))})]  # fmt: skip


def _import_lightning() -> Any:
    """Under either of its names. One that is installed and broken fails with its own error."""
    for name in ("lightning.pytorch", "pytorch_lightning"):
        if importlib.util.find_spec(name.partition(".")[0]) is not None:
            return importlib.import_module(name)
    raise ImportError("neither lightning nor pytorch_lightning is installed; pip install lightning")


def _lightning_module(lightning: Any, contest: Contest, rig: Rig, limit: Limit, ran: list[int]) -> Any:
    """The task as Lightning wants it, with automatic optimisation; every size that got through a step goes to `ran`."""

    class Module(lightning.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.batch_size = 2
            self.model = rig.model

        def train_dataloader(self) -> Any:
            rows = range(3 * contest.most)  # three full batches, one for each step of a trial
            collate = lambda picked: contest.batch(len(picked))  # noqa: E731
            return torch.utils.data.DataLoader(rows, batch_size=self.batch_size, collate_fn=collate)

        def transfer_batch_to_device(self, *args: Any) -> Any:
            with limit.attempt():
                return super().transfer_batch_to_device(*args)

        def training_step(self, batch: Any, _: int) -> torch.Tensor:
            self.rows = rows_of(batch)
            loss = contest.task.loss(self.model, batch)
            return loss.sum / loss.count

        def optimizer_step(self, *args: Any, **kwargs: Any) -> None:
            with limit.attempt(_held(rig)):  # forward and backward run in the closure, inside
                super().optimizer_step(*args, **kwargs)
            ran.append(self.rows)

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return rig.optimizer

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
    """Lightning's advice about workers and loggers is not what is measured."""
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
    rig = contest.build()
    result, seconds = contest.clock(lambda: _extrapolate(contest, _peaks(contest, rig)))
    return [replace(result, seconds=seconds)]


def _peaks(contest: Contest, rig: Rig) -> dict[int, int | None]:
    """The peak at each of the small sizes up to the first that fails; None for that one."""
    peaks: dict[int, int | None] = {}
    for rows in (rows for rows in LINE_ROWS if rows <= contest.most):
        peak = attempt(functools.partial(_forward_backward_peak, contest, rig, rows), contest.device)
        rig.model.zero_grad(set_to_none=True)
        if isinstance(peak, OutOfMemory):
            return {**peaks, rows: None}
        peaks[rows] = peak
    return peaks


def _forward_backward_peak(contest: Contest, rig: Rig, rows: int) -> int:
    batch = contest.batch(rows)
    with contest.meter(rig) as metered:
        metered.phase("step")
        forward_backward(rig, batch)
    return metered.reading().peak_bytes


def _extrapolate(contest: Contest, peaks: dict[int, int | None]) -> Result:
    read = {rows: peak for rows, peak in peaks.items() if peak is not None}
    if len(read) < 2:
        raise RuntimeError(f"no line goes through fewer than two sizes, and of {list(peaks)} rows {len(read)} fit")
    slope, fixed = np.polyfit(list(read), list(read.values()), 1)
    if slope <= 0:
        raise RuntimeError(f"memory does not grow from {min(read)} to {max(read)} rows: there is no line to follow")
    failed = len(peaks) - len(read)
    rows = int((contest.target.budget_bytes - fixed) / slope)
    rows = max(1, min(rows, max(read) if failed else contest.most))
    note = "predicts forward and backward alone; ran no full step of any size"
    return Result(finder="ultralytics-style", rows=rows, ooms=failed, ran=False, note=note, details={"peaks": peaks},
                  predicted_peak_bytes=int(slope * rows + fixed))  # fmt: skip


def find_with_brimful(contest: Contest) -> list[Result]:
    """Small probes, a model of each phase, a search, a verifying step."""
    rig = contest.build()
    asked = {"memory_limit": contest.target.limit_bytes, "global_batch": contest.most, "lengths": contest.shape}
    fit = functools.partial(brimful.fit, contest.task, model=rig.model, optimizer=rig.optimizer, cache=False, **asked)
    plan, seconds = contest.clock(fit)
    details = {key: value for key, value in plan.to_json().items() if key not in ("memory_model", "choices", "host")}
    on = plan.levers.checkpointing == "on"
    made = functools.partial(Result, ooms=plan.ooms, seconds=seconds, ran=True, checkpointed=on, details=details)
    predicted, measured = plan.largest_predicted_peak_bytes, plan.largest_measured_peak_bytes
    return [
        made(
            finder="brimful",
            rows=plan.micro_batch,
            predicted_peak_bytes=plan.predicted_peak_bytes,
            note=f"{_said(plan.predicted_peak_bytes, plan.measured_peak_bytes)}; checkpointing "
            f"{plan.levers.checkpointing}; {plan.fit_s:.1f} s in {plan.probes} probes and the timings",
        ),
        made(
            finder="brimful-largest",
            rows=plan.largest_micro_batch,
            predicted_peak_bytes=predicted,
            note=_said(predicted, measured),
        ),
    ]


def _said(predicted: int, measured: int) -> str:
    error = predicted / measured - 1
    return f"predicted {show_bytes(predicted)}, measured {show_bytes(measured)} by its own probe ({error:+.2%})"


FINDERS: dict[str, Callable[[Contest], list[Result]]] = {
    "accelerate": find_with_accelerate,
    "lightning-power": functools.partial(find_with_lightning, mode="power"),
    "lightning-binsearch": functools.partial(find_with_lightning, mode="binsearch"),
    "ultralytics-style": find_like_ultralytics,
    "brimful": find_with_brimful,
}


def compete(contest: Contest, finders: Iterable[str], repeats: int) -> list[Result]:
    """Every finder in turn, as often as asked; then every result measured."""
    runs: dict[str, list[list[Result]]] = {name: [] for name in finders}
    _warm_up(contest)
    for repeat in range(repeats):
        for name in runs:
            _say(f"{name}, run {repeat + 1} of {repeats} …")
            runs[name].append(_tried(contest, name))
            first = runs[name][-1][0]
            _say(f"  {first.problem or f'{first.rows} rows, {first.ooms} OOMs, {first.seconds:.1f} s'}")
    results = measure_all(contest, [result for name in runs for result in _median(runs[name])])
    return _with_ratios(results)


def _warm_up(contest: Contest) -> None:
    """One step of one row, so that no finder pays for the first use of a library; a failure is theirs to report."""
    try:
        full_step(contest.build(), contest.batch(1))
    except Exception as error:
        _say(f"warm-up: {_sentence(error)}")
    contest.free()


def _tried(contest: Contest, name: str) -> list[Result]:
    """What the finder returns, or one sentence on how it failed; its memory is free again either way."""
    try:
        results = FINDERS[name](contest)
    except Exception as error:
        results = [Result(finder=name, problem=_sentence(error))]
    contest.free()  # after the except block: inside it the traceback still holds the tensors
    return results


def _sentence(error: Exception) -> str:
    return f"{type(error).__name__}: {(str(error).splitlines() or [''])[0][:200]}"


def _median(runs: list[list[Result]]) -> list[Result]:
    """The run of median seconds among those that worked; how many did not is told with it."""
    worked = sorted((run for run in runs if not run[0].problem), key=lambda run: run[0].seconds)
    failed = [run[0].problem for run in runs if run[0].problem]
    if not worked:
        return runs[-1]
    problem = f"{len(failed)} of {len(runs)} runs failed: {failed[-1]}" if failed else ""
    seconds, rows = tuple(run[0].seconds for run in worked), tuple(run[0].rows for run in worked)
    median = worked[(len(worked) - 1) // 2]
    return [replace(result, problem=problem, all_seconds=seconds, all_rows=rows) for result in median]


def measure_all(contest: Contest, results: list[Result]) -> list[Result]:
    """Full steps of a new model at each result. Finders that agree share one measurement, and with it its noise."""
    known: dict[tuple[int, bool], dict[str, Any]] = {}
    measured = []
    for result in results:
        size = (result.rows, result.checkpointed)
        if result.rows is not None and size not in known:
            _say(f"measuring {show_size(result.rows, contest.shape)} …")
            known[size] = _measured_or_not(contest, *size)
        figures = dict(known.get(size, {}))
        problem = "; ".join(filter(None, (result.problem, figures.pop("problem", ""))))
        measured.append(replace(result, problem=problem, **figures))
    return measured


def _measured_or_not(contest: Contest, rows: int, checkpointed: bool) -> dict[str, Any]:
    try:
        result = attempt(lambda: _measured(contest, rows, checkpointed), contest.device)
    except Exception as error:
        result = {"problem": f"its result fails: {_sentence(error)}"}
    contest.free()
    if isinstance(result, OutOfMemory):
        return {"problem": f"its result runs out of memory: {result.message.splitlines()[0][:200]}"}
    return result


def _measured(contest: Contest, rows: int, checkpointed: bool) -> dict[str, Any]:
    rig, batch = contest.build(), contest.batch(rows)
    with checkpointing(contest.task, rig.model).set(checkpointed):
        with contest.meter(rig) as metered:
            metered.phase("steps")
            for _ in range(2):
                full_step(rig, batch)
        times = [contest.clock(lambda: full_step(rig, batch))[1] for _ in range(TIMED_STEPS[contest.device.type])]
    reading = metered.reading()
    speed = rows / statistics.median(times)
    return {"peak_bytes": reading.peak_bytes, "reserved_bytes": reading.reserved_bytes, "rows_per_s": speed}


def _with_ratios(results: list[Result]) -> list[Result]:
    base = next((result for result in results if result.finder == "brimful"), Result(finder="brimful"))
    return [
        replace(
            result,
            seconds_ratio=_ratio(result.seconds, base.seconds),
            rows_per_s_ratio=_ratio(result.rows_per_s, base.rows_per_s),
        )
        for result in results
    ]


def _ratio(value: float | None, base: float | None) -> float | None:
    return None if value is None or base is None else value / base


HEAD = ("finder", "rows", "OOMs", "seconds", "predicted", "measured", "reserved", "rows/s", "× seconds", "× rows/s")


def show_table(results: list[Result]) -> str:
    """The table, with Brimful's own line as the unit of the ratios, and a remark below for all that needs one."""
    table = [HEAD, *map(_cells, results)]
    widths = [max(map(len, column)) for column in zip(*table, strict=True)]
    pads = (str.ljust, *[str.rjust] * (len(HEAD) - 1))
    lines = ["  ".join(pad(*cell) for pad, *cell in zip(pads, row, widths, strict=True)) for row in table]
    remarks = [f"{result.finder}: {text}" for result in results for text in (result.problem, result.note) if text]
    return "\n".join([*lines, "", *remarks])


def _cells(result: Result) -> tuple[str, ...]:
    failed = "OOM" if "out of memory" in result.problem else "failed"
    return (
        result.finder,
        "failed" if result.rows is None else str(result.rows),
        _shown(result.ooms, str),
        _shown(result.seconds, "{:.1f}".format),
        _shown(result.predicted_peak_bytes, show_bytes),
        failed if result.peak_bytes is None and result.rows else _shown(result.peak_bytes, show_bytes),
        _shown(result.reserved_bytes, show_bytes),
        _shown(result.rows_per_s, show_rate),
        _shown(result.seconds_ratio, "{:.2f}".format),
        _shown(result.rows_per_s_ratio, "{:.2f}".format),
    )


def _shown(value: Any, show: Callable[[Any], str]) -> str:
    return "–" if value is None else show(value)


def facts(contest: Contest, repeats: int) -> dict[str, Any]:
    """When, where and on what this ran, in bytes and seconds."""
    return {
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "device": str(contest.device),
        "device_name": contest.target.name,
        "threads": torch.get_num_threads(),
        "versions": _versions(),
        "task": contest.task.name,
        "size": getattr(contest.task, "size", None),
        "shape": list(contest.shape),
        "precision": {None: "fp32", torch.bfloat16: "bf16", torch.float16: "fp16"}[contest.autocast],
        "limit_bytes": contest.target.limit_bytes,
        "fill": contest.target.fill,
        "global_batch": contest.most,
        "start": contest.start,
        "repeats": repeats,
    }


def _versions() -> dict[str, str]:
    found = {"python": platform.python_version(), "brimful": brimful.__version__, "torch": torch.__version__}
    for package in ("accelerate", "lightning", "pytorch-lightning", "transformers", "numpy"):
        try:
            found[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            found[package] = "not installed"
    return found


@contextlib.contextmanager
def capped(target: Target) -> Iterator[None]:
    """The limit as torch's cap on this process; 4 KiB above, so that its rounding down does not end below the limit."""
    if target.device.type != "cuda":
        yield
        return
    before = torch.cuda.memory.get_per_process_memory_fraction(target.device)
    total = torch.cuda.get_device_properties(target.device).total_memory
    torch.cuda.set_per_process_memory_fraction(min(1.0, (target.limit_bytes + 4 * KiB) / total), target.device)
    try:
        yield
    finally:
        torch.cuda.set_per_process_memory_fraction(before, target.device)


def prepare(args: argparse.Namespace) -> Contest:
    """The contest that the flags describe; refuses what cannot work before anything runs."""
    device = find_target(FitOptions(device=args.device)).device
    if device.type not in DEFAULTS:
        raise BadOption(f"--device {args.device}: this comparison knows cpu and cuda, not {device.type}")
    size, limit = DEFAULTS[device.type]
    task = load_task(args.task, size=args.size or (size if args.task in BUILT_IN else None))
    shape = task.worst_shape if args.lengths is None else args.lengths
    if len(shape) != len(task.worst_shape):
        raise BadOption(f"--lengths {shape}: task {task.name} has {len(task.worst_shape)}, {task.worst_shape} at worst")
    options = FitOptions(device=str(device), memory_limit=args.memory_limit or limit, lengths=shape)
    target = find_target(options)
    autocast, _ = target.autocast(None, task.precision)
    start = min(args.start, args.global_batch)
    if start < args.start:
        _say(f"--start {args.start}: accelerate starts with {start}, since --global-batch bounds everyone")
    return Contest(task=task, shape=shape, target=target, autocast=autocast, most=args.global_batch, start=start)


def main(argv: list[str] | None = None) -> int:
    args = _arguments(argv)
    try:
        contest = prepare(args)
    except UserError as error:
        print(f"finders: {error}", file=sys.stderr)
        return 2
    if args.json:
        args.json.parent.mkdir(parents=True, exist_ok=True)  # now, and not after minutes of work
    with capped(contest.target):
        results = compete(contest, args.finders, args.repeats)
    about = facts(contest, args.repeats)
    print(_title(contest, about), show_table(results), sep="\n\n")
    if args.json:
        everything = {**about, "results": [asdict(result) for result in results]}
        args.json.write_text(json.dumps(everything, indent=1) + "\n")
    return 0


def _title(contest: Contest, about: dict[str, Any]) -> str:
    versions = ", ".join(f"{name} {version}" for name, version in about["versions"].items())
    return "\n".join((
        f"{about['date']}, {about['device_name']} ({about['device']}, {about['threads']} CPU threads), limit "
        f"{show_bytes(about['limit_bytes'])}, {about['fill']:.0%} of it to fill",
        f"{' '.join(filter(None, (about['task'], about['size'])))}, {show_size(1, contest.shape)}, "
        f"{about['precision']}, at most {contest.most} rows, accelerate from {contest.start}, runs: {about['repeats']}",
        versions,
    ))  # fmt: skip


def _arguments(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--task", default="chatlm-sft", help="a built-in name or file.py:name (chatlm-sft)")
    parser.add_argument("--size", help="of a built-in task (base on cuda, tiny on the CPU)")
    parser.add_argument("--memory-limit", help="for everyone (20GiB on cuda, 512MiB on the CPU)")
    parser.add_argument("--device", default="auto", help="cpu, cuda or cuda:1 (the first card, else the CPU)")
    parser.add_argument("--lengths", type=_lengths, help="such as 256,256 (the task's worst shape)")
    parser.add_argument("--global-batch", type=_count, default=4096, help="no finder may go above it (4096)")
    parser.add_argument("--start", type=_count, default=512, help="the rows that accelerate starts with (512)")
    parser.add_argument("--finders", type=_finders, default=list(FINDERS), help=f"some of {','.join(FINDERS)} (all)")
    parser.add_argument("--repeats", type=_count, default=1, help="runs of each finder; the median stands (1)")
    parser.add_argument("--json", type=Path, metavar="PATH", help="write the figures there as well")
    return parser.parse_args(argv)


def _lengths(text: str) -> Shape:
    return tuple(_count(part) for part in text.split(","))


def _count(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number of at least 1")
    return int(text)


def _finders(text: str) -> list[str]:
    names = text.split(",")
    unknown = [name for name in names if name not in FINDERS]
    if unknown:
        raise argparse.ArgumentTypeError(f"unknown {', '.join(unknown)}; there are {', '.join(FINDERS)}")
    return names


def _say(phrase: str) -> None:
    print(phrase, file=sys.stderr, flush=True)


if __name__ == "__main__":
    sys.exit(main())
