"""What recording costs a step: one run with it and one without, in turns, in one process.

    python bench/record.py                                    a small model, also on a CPU
    python bench/record.py --width 1024 --layers 12 --rows 256 --length 128 --steps 300 --rounds 5       on a GPU

**with** is a run as it is. **without** leaves out what a `step` event has besides speed, loss and peak (memory of every rank,
padding, the split of the time, host memory), the thread that samples the machine, and log.txt. Both train with the same plan on the
same rows; a run's first steps are not counted. A step is the time from the end of one to the end of the next, without waiting
for the device in between. `figures` and `journal` are what the host does after every step to make and write its event, `sample` what
the thread does about every five seconds: it runs beside the training, so only what it holds of Python's lock can slow a step. All
three are CPU time, which other programs on the machine disturb little. The ratio is the median over the pairs of runs, with
their range; on a busy machine it says nothing, and the microseconds do.

Needs neither the CLI's packages nor data.
"""

import argparse
import json
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from torch import nn

from brimful.planning.planner import plan
from brimful.task import Loss, Task
from brimful.training import session
from brimful.training.events import Journal
from brimful.training.loop import Hook, Loop
from brimful.training.metrics import Speedometer, utilization
from brimful.training.monitor import EVERY_S, Monitor

WARM_STEPS = 10
WORDS = 1000


class Tagger(Task):
    """A transformer on rows of many lengths."""

    def __init__(self, options: argparse.Namespace) -> None:
        super().__init__()
        self.sizes = options
        self.global_batch, self.worst_shape = options.rows, (options.length,)

    def model(self) -> nn.Module:
        torch.manual_seed(0)
        width = self.sizes.width
        layer = nn.TransformerEncoderLayer(width, max(1, width // 64), 4 * width, dropout=0.0, batch_first=True)
        blocks = nn.TransformerEncoder(layer, self.sizes.layers, enable_nested_tensor=False)
        return nn.Sequential(nn.Embedding(WORDS, width), blocks, nn.Linear(width, WORDS))

    def loss(self, model: nn.Module, batch: Any) -> Loss:
        total = nn.functional.cross_entropy(
            model(batch["ids"]).flatten(0, 1), batch["labels"].flatten(), reduction="sum"
        )
        return Loss(total, (batch["labels"] != -100).sum())

    def shape(self, row: torch.Tensor) -> tuple[int, ...]:
        return (len(row),)

    def collate(self, rows: Sequence[torch.Tensor]) -> Any:
        padded: Callable[..., torch.Tensor] = nn.utils.rnn.pad_sequence
        return {"ids": padded(list(rows), batch_first=True), "labels": padded(list(rows), batch_first=True, padding_value=-100)}  # fmt: skip


@dataclass
class Timings:
    """Of one run, in seconds."""

    steps: list[float] = field(default_factory=list)
    figures: list[float] = field(default_factory=list)
    journal: list[float] = field(default_factory=list)
    samples: list[float] = field(default_factory=list)


class StepTimes(Hook):
    def __init__(self, timings: Timings) -> None:
        self._timings, self._last = timings, 0.0

    def after_step(self, loop: Loop, result: Any) -> None:
        now = time.perf_counter()
        if loop.step > WARM_STEPS:
            self._timings.steps.append(now - self._last)
        self._last = now


class Off:
    """In the place of the monitor and of the log."""

    host_bytes = machine_bytes = None

    def __init__(self, *_: Any, **__: Any) -> None: ...
    def __enter__(self) -> "Off":
        return self

    def __exit__(self, *_: Any) -> None: ...
    def __call__(self, event: Any) -> None: ...
    def status(self, phrase: str) -> None: ...


class PlainSpeedometer(Speedometer):
    """The figures of a step without recording."""

    def figures(
        self, rows: Any, result: Any, waited_s: float, *, steps_left: int, agreed_s: float = 0.0
    ) -> dict[str, Any]:
        lengths = self._lengths(rows)
        own = [float(lengths.sum()), 0.0 if self._flops is None else self._flops.count(lengths)]
        length, flops = (sum(column) for column in zip(*self._group.gather(own), strict=True))
        now = time.perf_counter()
        step_s, self._last = now - self._last, now
        self._step_s.append(step_s)
        return {
            "tokens": int(length),
            "seconds": result.seconds,
            "data_wait_s": waited_s,
            "peak_bytes": result.peak_bytes,
            "limit_bytes": self._limit_bytes,
            "rows_per_s": result.rows / (result.seconds + waited_s),
            "tokens_per_s": length / (result.seconds + waited_s),
            "mfu": utilization(flops, result.seconds, self._peak, self._group.size),
            "eta_s": steps_left * statistics.median(self._step_s),
        }


def timed(recording: bool, timings: Timings) -> ExitStack:
    """The parts of a run that record, replaced by ones that are timed, or by none."""
    base: type[Speedometer] = Speedometer if recording else PlainSpeedometer

    class TimedSpeedometer(base):  # type: ignore[misc, valid-type]
        def figures(self, *args: Any, **options: Any) -> dict[str, Any]:
            begun = time.thread_time()
            found: dict[str, Any] = super().figures(*args, **options)
            timings.figures.append(time.thread_time() - begun)
            return found

    class TimedJournal(Journal):
        def write(self, event: str, **fields: Any) -> None:
            begun = time.thread_time()
            super().write(event, **fields)
            if event == "step":
                timings.journal.append(time.thread_time() - begun)

    class TimedMonitor(Monitor):
        def _sample(self, *meters: Any) -> None:
            begun = time.thread_time()
            super()._sample(*meters)
            timings.samples.append(time.thread_time() - begun)

    stack = ExitStack()
    stack.enter_context(patch.object(session, "Speedometer", TimedSpeedometer))
    stack.enter_context(patch.object(session, "Journal", TimedJournal))
    if recording:
        stack.enter_context(patch.object(session, "Monitor", TimedMonitor))
    else:
        stack.enter_context(patch.object(session, "Monitor", Off))
        stack.enter_context(patch.object(session, "RunLog", Off))
    return stack


def run(options: argparse.Namespace, rows: list[torch.Tensor], folder: Path, *, recording: bool) -> Timings:
    timings = Timings()
    with timed(recording, timings):
        session.train(
            Tagger(options), rows, run=folder / ("with" if recording else "without"), plan=folder.parent / "plan.json", workers=0,
            max_steps=options.steps + WARM_STEPS, device=options.device, hooks=[StepTimes(timings)], keep=1, quiet=True,
        )  # fmt: skip
    return timings


def measure(options: argparse.Namespace) -> dict[str, Any]:
    draw = torch.Generator().manual_seed(0)
    lengths = torch.randint(1, options.length + 1, (4 * options.rows,), generator=draw).tolist()
    rows = [torch.randint(1, WORDS, (length,), generator=draw) for length in lengths]
    runs: dict[bool, list[Timings]] = {True: [], False: []}
    with tempfile.TemporaryDirectory() as path:
        limit = {} if options.memory_limit is None else {"memory_limit": options.memory_limit}
        found = plan(
            Tagger(options), data=rows, device=options.device, cache=False, micro_batch=options.micro_batch, **limit
        )
        found.save(Path(path) / "plan.json")
        for turn in range(options.rounds):
            folder = Path(path) / str(turn)
            for recording in (True, False) if turn % 2 else (False, True):
                runs[recording].append(run(options, rows, folder, recording=recording))
    steps = {recording: [statistics.median(one.steps) for one in runs[recording]] for recording in runs}
    ratios = [on / off for on, off in zip(steps[True], steps[False], strict=True)]

    def microseconds(name: str, recording: bool) -> float:
        return 1e6 * statistics.median(value for one in runs[recording] for value in getattr(one, name)[WARM_STEPS:])

    samples = [value for one in runs[True] for value in one.samples]
    figures_us, journal_us = (microseconds(name, True) - microseconds(name, False) for name in ("figures", "journal"))
    sample_us = 1e6 * statistics.median(samples)
    return {
        "device": found.device_name,
        "steps": options.steps,
        "rounds": options.rounds,
        "step_ms": {"with": 1e3 * statistics.median(steps[True]), "without": 1e3 * statistics.median(steps[False])},
        "ratio": statistics.median(ratios),
        "ratios": ratios,
        "figures_us": {"with": microseconds("figures", True), "without": microseconds("figures", False)},
        "journal_us": {"with": microseconds("journal", True), "without": microseconds("journal", False)},
        "sample_us": sample_us,
        "samples": len(samples),
        "sampling_share_of_a_core": sample_us / 1e6 / EVERY_S,
        "more_us_per_step": figures_us + journal_us,
        "share_of_a_step": {f"{ms:g} ms": (figures_us + journal_us) / 1e3 / ms + sample_us / 1e6 / EVERY_S for ms in options.step_ms},
    }  # fmt: skip


def show(found: dict[str, Any]) -> str:
    lines = [
        f"{found['rounds']} × {found['steps']} steps on {found['device']}      with   without",
        *(f"{name:<34}{found[key]['with']:>10.4g}{found[key]['without']:>10.4g}" for name, key in (
            ("step, ms", "step_ms"), ("figures, µs a step", "figures_us"), ("journal, µs a step", "journal_us"))),
        f"ratio {found['ratio']:.4f} (from {min(found['ratios']):.4f} to {max(found['ratios']):.4f})",
        f"sample: {found['sample_us'] / 1e3:.2f} ms of CPU time, {found['sampling_share_of_a_core']:.2%} of a core",
        f"{found['more_us_per_step']:.0f} µs more a step; with all the CPU time of the samples, "
        + ", ".join(f"{share:.2%} of a step of {ms}" for ms, share in found["share_of_a_step"].items()),
    ]  # fmt: skip
    return "\n".join(lines)


def main(words: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description="What recording costs a step.")
    for name, default in (("steps", 100), ("rounds", 4), ("width", 64), ("layers", 2), ("rows", 32), ("length", 32)):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--micro-batch", type=int, default=None, help="default: the number of rows")
    parser.add_argument("--memory-limit", default=None)
    parser.add_argument("--device", default="auto")
    parser.add_argument(
        "--step-ms", type=float, nargs="*", default=[76.0], help="steps to compare the microseconds with"
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write the figures there")
    options = parser.parse_args(words)
    options.micro_batch = options.micro_batch or options.rows
    found = measure(options)
    if options.json:
        options.json.write_text(json.dumps(found))
    print(show(found))


if __name__ == "__main__":
    main()
