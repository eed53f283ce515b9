"""The memory of a training step at one setting, for any number of rows: traced at a few sizes, predicted at all others.

Tracing a step of T5 base takes 2 s whatever its size, since fake tensors have no bytes; predicting one takes 0.03 s. Three sizes show
how every allocation grows with the rows, four how it grows with rows and one length, six with two lengths. All are two rows or more:
with a dimension of 1 some operations are left out, and the order of allocations would not be that of the other sizes.
"""

import math
from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any

from brimful.errors import TaskError
from brimful.estimation.trace import TracedSetting, TraceNotes, trace_step
from brimful.memory.history import HistoriesDiffer, History, Peaks, SymbolicHistory
from brimful.memory.model import MICRO_PHASES, MemoryModel, Probe
from brimful.memory.temporaries import H200, Processors
from brimful.task import Shape, Task

ROWS = (2, 3, 5)
PARTS = ((1.0, 1.0), (1.0, 1.0), (0.5, 1.0), (1.0, 0.5), (0.75, 0.625), (0.625, 0.75))
"""Lengths of the six sizes, as shares of the longest row: of the first length, and of all others."""
ONE_LENGTH = (1.0, 1.0, 0.5, 0.75)
"""The same where rows have one length: with those of two the fits of a Llama, a GPT-2 and a CNN are no closer."""
STEP = 8
"""Lengths differ by multiples of this: kernels fill up a mask whose length is not one, so a length keeps what is left over."""
PACKED_TOKENS = 16384
"""Packed sizes have at least this many tokens, more than one chunk of the loss for any vocabulary above 4,096."""
SAFE = 1.03
"""Where sizes do not share one order of allocations, peaks are interpolated and raised by this factor."""


class StepMemory:
    """Predicts the memory of a step of `task` at one `setting`."""

    def __init__(
        self, task: Task, setting: TracedSetting, longest: Shape, *, lengths: bool, step_rows: int,
        like: "StepMemory | None" = None, progress: Callable[[str], object],
    ) -> None:  # fmt: skip
        """Args:
        longest: The longest row, or the mean one where rows are packed.
        lengths: Whether to predict other lengths, too.
        like: The memory of the same task at another setting. Where its allocations grow with the rows in a straight line, two sizes
            are enough.
        step_rows: Rows of the whole step in one process. A micro-batch of that many holds no gradients meanwhile.
        progress: Called with a phrase before each trace.
        """
        self.setting, self.step_rows, self.notes = setting, step_rows, TraceNotes()
        self._histories: list[History] = []
        packed = setting.layout == "packed"
        sizes = sizes_to_trace(longest, lengths=lengths, packed=packed)
        self.one_shape = False
        """Whether rows of other lengths could not be traced, as of a model of images that has one size."""
        try:
            self._trace(task, sizes[:2] if like is not None and like.is_linear and not lengths else sizes, progress)
        except TaskError:
            if not self._histories or all(shape == longest for _, shape in sizes):
                raise
            lengths, self.one_shape = False, True
            self._trace(task, sizes_to_trace(longest, lengths=False, packed=packed), progress)
        self._symbolic = _fitted(self._histories) or _fitted([one for one in self._histories if one.shape == longest])
        self.knows_lengths = lengths and self._symbolic is not None and self._symbolic.varies_lengths
        self.order_follows_lengths = self._symbolic is not None and len({one.shape for one in self._histories}) > 1 and not self.knows_lengths  # fmt: skip
        """Whether rows of other lengths take other operations, as in a loop over time, so that only one length is known."""
        self.peaks = lru_cache(maxsize=4096)(self._peaks)
        self._model = lru_cache(self._model_of_peaks)

    def _trace(self, task: Task, sizes: list[tuple[int, Shape]], progress: Callable[[str], object]) -> None:
        self._histories.clear()
        for number, (rows, shape) in enumerate(sizes, 1):
            size = f"{rows} rows{' of ' if shape else ''}{'+'.join(map(str, shape))}"
            progress(f"trace {self.setting.describe()} {number} of {len(sizes)}: {size}")
            history, self.notes = trace_step(task, rows, shape, self.setting, self.notes.build)
            self._histories.append(history)

    @property
    def has_convolutions(self) -> bool:
        return any(origin.endswith("convolution") for origin in self._histories[0].origins)

    @property
    def is_linear(self) -> bool:
        """Whether no allocation grows with the square of the rows."""
        return self._symbolic is not None and self._symbolic.is_linear

    @property
    def interpolates(self) -> bool:
        """Whether sizes differ in the order of their allocations, so that only peaks are interpolated."""
        return self._symbolic is None

    def _peaks(
        self, rows: int, shape: Shape, *, cublas_bytes: int | None = None, processors: Processors = H200, exchange_bytes: int = 0,
        phase_bytes: tuple[tuple[str, int], ...] = (), shards: int = 1, limit_bytes: int | None = None, expandable: bool = True,
        reserved: bool = True, largest: int = 0,
    ) -> Peaks:  # fmt: skip
        """The memory of a step in micro-batches of this size.

        Args:
            cublas_bytes: Of each workspace of cuBLAS on the card. None: of a Hopper.
            processors: Of the card.
            exchange_bytes: What is allocated all the time to exchange gradients with other GPUs.
            phase_bytes: The same throughout each of these phases alone.
            shards: Processes over which weights, gradients and optimizer state are divided.
            limit_bytes: Reserved bytes at most.
            expandable: Whether the allocator has expandable segments.
            reserved: Whether reserved bytes are wanted. Without the replay for them a size takes a few milliseconds.
            largest: How many of the largest blocks to name.
        """
        beside: dict[str, Any] = {
            "cublas_bytes": cublas_bytes, "processors": processors, "exchange_bytes": exchange_bytes, "phase_bytes": phase_bytes,
            "shards": shards,
        }  # fmt: skip
        if self._symbolic is not None:
            return self._symbolic.peaks(
                rows, shape, accumulates=rows < self.step_rows, limit_bytes=limit_bytes, expandable=expandable, reserved=reserved,
                largest=largest, **beside,
            )  # fmt: skip
        return self._interpolated(rows, shape, self._model(**beside), limit_bytes)

    def _interpolated(self, rows: int, shape: Shape, model: MemoryModel, limit_bytes: int | None) -> Peaks:
        whole = rows >= self.step_rows
        phases = {
            name: round(SAFE * law((rows, *shape)))
            for name, law in model.phases.items()
            if not whole or name not in MICRO_PHASES
        }
        phase = max(phases, key=lambda name: phases[name])
        reserved = round(model.reserved_ratio * phases[phase])
        return Peaks(
            allocated_bytes=phases[phase], reserved_bytes=reserved, kinds={}, phase=phase, phases=phases,
            fits=limit_bytes is None or reserved <= limit_bytes,
        )  # fmt: skip

    def _model_of_peaks(self, **beside: Any) -> MemoryModel:
        """Fitted to the traced sizes, as a plan fits one to its probes."""
        own = [
            (one, SymbolicHistory.fit([one]).peaks(one.rows, one.shape, accumulates=True, **beside))
            for one in self._histories
        ]
        return MemoryModel.fit(
            Probe(rows=one.rows, shape=one.shape, phases=peaks.phases, reserved_bytes=peaks.reserved_bytes)
            for one, peaks in own
        )

    def largest(self, shape: Shape, most_bytes: float, fits: Callable[[Peaks], bool], **options: Any) -> int:
        """The most rows of this shape whose peaks fit, 0 if not one row does.

        What is allocated is reserved, so rows that allocate more than `most_bytes` do not fit, and no replay is needed to know.
        """

        def allocated(rows: int) -> int:
            return self.peaks(rows, shape, reserved=False, **options).allocated_bytes

        if allocated(self.step_rows) <= most_bytes and fits(self.peaks(self.step_rows, shape, **options)):
            return self.step_rows  # it holds no gradients in its forward pass
        low, high = 0, 1
        while high < self.step_rows and allocated(high) <= most_bytes:
            low, high = high, min(2 * high, self.step_rows)
        while high - low > 1:
            middle = (low + high) // 2
            low, high = (middle, high) if allocated(middle) <= most_bytes else (low, middle)
        # Little more is reserved than allocated, so the answer is near: down until it fits, then up again by halves.
        low, rows, gap = 0, high - 1, 1
        while high - low > 1:
            peaks = self.peaks(rows, shape, **options)
            low, high = (rows, high) if fits(peaks) else (low, rows)
            if not low:
                row_bytes = (allocated(rows) - allocated(1)) / max(1, rows - 1)
                gap = max(2 * gap, math.ceil((peaks.reserved_bytes - most_bytes) / max(1.0, row_bytes)))
            rows = (low + high) // 2 if low else max(1, high - gap)
        return low


def _fitted(histories: Sequence[History]) -> SymbolicHistory | None:
    try:
        return SymbolicHistory.fit(histories) if len(histories) > 1 else None
    except HistoriesDiffer:
        return None


def sizes_to_trace(longest: Shape, *, lengths: bool, packed: bool = False) -> list[tuple[int, Shape]]:
    """Rows and shapes from which all others are predicted.

    >>> sizes_to_trace((256,), lengths=False)
    [(2, (256,)), (3, (256,)), (5, (256,))]
    >>> sizes_to_trace((256, 128), lengths=True)[2:4]
    [(5, (128, 128)), (2, (256, 64))]
    """
    shortest = min(others for _, others in PARTS) if lengths else 1.0
    times = -(-PACKED_TOKENS // int(ROWS[0] * max(1.0, shortest * longest[-1]))) if packed and longest else 1
    rows = [times * count for count in ROWS]
    if not lengths or not longest or min(longest) < 2 * STEP:
        return [(count, longest) for count in rows]
    parts = [(share, share) for share in ONE_LENGTH] if len(longest) == 1 else PARTS
    shapes = [
        tuple(_shortened(length, first if axis == 0 else others) for axis, length in enumerate(longest))
        for first, others in parts
    ]
    if len(set(shapes)) < 3:
        return [(count, longest) for count in rows]
    return list(zip(2 * rows, shapes, strict=False))


def _shortened(length: int, share: float) -> int:
    return length - STEP * round((1 - share) * length / STEP)
