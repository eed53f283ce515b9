"""Every allocation of a training step, as a function of rows and lengths.

The order in which a step allocates and frees does not depend on its size, as long as no dimension is 1, and the size of each
allocation is a small polynomial in rows and lengths: most are a single product such as `3,072 × rows × length`. So a few traced
steps give the whole history of a step of any size. Adding it up gives the peak of every phase, and replaying it through
`allocator.CachingAllocator` what is reserved, in a tenth of a second and without running anything.

    histories of a few sizes ─► SymbolicHistory.fit ─► .peaks(rows, shape)

A history begins before the weights are allocated and holds two optimizer steps: one of a single micro-batch, in which the
optimizer allocates its state, and one of two micro-batches. The first micro-batch of the second step is what a step of one
micro-batch costs; the second one has gradients held beside it.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import cached_property
from itertools import combinations, combinations_with_replacement
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from brimful.memory.allocator import ROUNDING, CachingAllocator
from brimful.memory.model import MICRO_PHASES
from brimful.memory.temporaries import H200, Processors, Temporary, temporary_bytes
from brimful.task import Shape

Kind = Literal["parameters", "gradients", "optimizer", "activations", "loss", "batch", "exchange", "workspace"]
"""What a block holds. `exchange`: what is there for other GPUs, such as buckets of gradients and gathered weights."""
SHARDED: tuple[Kind, ...] = ("parameters", "gradients", "optimizer")
"""What sharded training divides over its processes."""

TOLERANCE, SLACK_BYTES = 2e-3, ROUNDING
"""A polynomial describes an allocation if no traced size is off by more than this share, or these bytes."""
EXACT_BYTES = 0.5
FIRST_STEP, SECOND_STEP = "step 1", "step 2"
"""Marks of a history: where its two steps begin."""
CUBLAS = "cuBLAS"
"""The origin of a workspace of cuBLAS, whose size is the card's and not the step's."""


class HistoriesDiffer(ValueError):
    """Two sizes of the step do not allocate in the same order."""


@dataclass(frozen=True)
class History:
    """What one traced program allocated and freed."""

    rows: int
    shape: Shape
    events: list[tuple[int, int]]
    """The number of an allocation with its bytes, or with -1 where it is freed."""
    marks: list[tuple[int, str]]
    """Where each phase begins: the number of events before it, and its name."""
    kinds: list[Kind]
    """Of each allocation."""
    origins: list[str]
    """Of each allocation: the module and the operation that made it."""
    temporaries: dict[int, Temporary] = field(default_factory=dict)
    """By the number of the allocation: what a kernel allocates while it runs."""

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_json(cls, content: dict[str, Any]) -> "History":
        lists = {
            "shape": tuple(content["shape"]),
            "events": [(index, size) for index, size in content["events"]],
            "marks": [(place, name) for place, name in content["marks"]],
            "temporaries": {
                int(index): Temporary(one["rule"], tuple(one["fixed"]), tuple(one["numbers"]))
                for index, one in content.get("temporaries", {}).items()
            },
        }
        return cls(**{**content, **lists})

    @property
    def order(self) -> list[tuple[int, bool]]:
        return [(index, size >= 0) for index, size in self.events]

    @cached_property
    def sizes(self) -> NDArray[np.float64]:
        """The bytes of each allocation."""
        return np.array([size for _, size in self.events if size >= 0], dtype=np.float64)


@dataclass(frozen=True, kw_only=True)
class Block:
    """One live allocation at the peak."""

    bytes: int
    kind: Kind
    origin: str


@dataclass(frozen=True, kw_only=True)
class Peaks:
    """The memory of a step of one size."""

    allocated_bytes: int
    reserved_bytes: int
    phases: dict[str, int]
    """Peak allocated bytes of each phase of the second step."""
    kinds: dict[Kind, int]
    """What is live at the peak."""
    phase: str
    """Where the peak is."""
    fits: bool = True
    """Whether all of it was within the limit, if there was one."""
    retries: int = 0
    """How often the allocator had to return cached memory to stay within it."""
    largest: tuple[Block, ...] = field(default=())
    """The largest blocks at the peak."""


class SymbolicHistory:
    """The history of a step whose sizes are polynomials in rows and lengths. See `fit`."""

    def __init__(
        self,
        first: History,
        powers: Sequence[tuple[int, ...]],
        coefficients: NDArray[np.float64],
        temporary_coefficients: Mapping[int, NDArray[np.float64]],
        unexplained: float,
        shapes: int,
    ) -> None:
        self._history, self._powers, self._coefficients, self._shapes = first, powers, coefficients, shapes
        self._temporary_coefficients = temporary_coefficients
        self._kinds = np.array(first.kinds)
        self._of_cublas = np.array([origin == CUBLAS for origin in first.origins])
        self.unexplained = unexplained
        """The share of the bytes in allocations that no simple polynomial describes: those are interpolated."""
        count = len(first.kinds)
        self._index = np.array([index for index, _ in first.events])
        self._sign = np.array([1 if size >= 0 else -1 for _, size in first.events])
        places = np.arange(len(first.events))
        self._allocated_at = np.zeros(count, dtype=np.int64)
        self._allocated_at[self._index[self._sign > 0]] = places[self._sign > 0]
        self._freed_at = np.full(count, len(first.events), dtype=np.int64)
        self._freed_at[self._index[self._sign < 0]] = places[self._sign < 0]

    @classmethod
    def fit(cls, histories: Sequence[History]) -> "SymbolicHistory":
        """Histories of different sizes of the same step. Raises `HistoriesDiffer` if their order is not the same."""
        first = histories[0]
        for other in histories[1:]:
            if other.order != first.order or other.marks != first.marks or _rules(other) != _rules(first):
                raise HistoriesDiffer(
                    f"{len(first.events):,} allocations and frees at {first.rows} rows of {first.shape}, "
                    f"{len(other.events):,} at {other.rows} rows of {other.shape}"
                )
        powers = _powers(len(first.shape))
        points = np.array([_features(powers, one.rows, one.shape) for one in histories])
        sizes = np.array([one.sizes for one in histories])
        sizes[:, list(first.temporaries)] = 0
        coefficients, explained = _fit(points, sizes)
        largest = sizes.max(axis=0)
        unexplained = float(largest[~explained].sum() / max(1.0, largest.sum()))
        temporaries = _fit_temporaries(points, histories)
        return cls(first, powers, coefficients, temporaries, unexplained, len({one.shape for one in histories}))

    def sizes(self, rows: int, shape: Shape, processors: Processors = H200) -> NDArray[np.int64]:
        """The bytes of each allocation in a step of this size, on a card with these processors."""
        features = np.array(_features(self._powers, rows, shape))
        result = np.maximum(0, np.rint(features @ self._coefficients)).astype(np.int64)
        for index, coefficients in self._temporary_coefficients.items():
            one = self._history.temporaries[index]
            result[index] = temporary_bytes(
                one.rule, one.fixed, tuple(np.rint(features @ coefficients).astype(int).tolist()), processors
            )
        return result

    def peaks(
        self,
        rows: int,
        shape: Shape,
        *,
        accumulates: bool,
        exchange_bytes: int = 0,
        cublas_bytes: int | None = None,
        processors: Processors = H200,
        phase_bytes: Sequence[tuple[str, int]] = (),
        shards: int = 1,
        limit_bytes: int | None = None,
        expandable: bool = False,
        reserved: bool = True,
        largest: int = 0,
    ) -> Peaks:
        """The memory of a step of one micro-batch of this size, or of several (`accumulates`).

        Args:
            exchange_bytes: What is allocated all the time to exchange gradients with other GPUs.
            cublas_bytes: Of each workspace of cuBLAS on the card. None: as in the history.
            processors: Of the card.
            phase_bytes: The same throughout each of these phases alone.
            shards: Processes over which weights, gradients and optimizer state are divided.
            limit_bytes: Reserved bytes at most.
            expandable: Whether the allocator has expandable segments.
            reserved: Whether to replay the allocator. Without it, reserved bytes are the allocated ones.
            largest: How many of the largest blocks at the peak to name.
        """
        sizes = self.sizes(rows, shape, processors)
        if cublas_bytes is not None:
            sizes = np.where(self._of_cublas, cublas_bytes, sizes)
        if shards > 1:
            sizes = np.where(self._of_kind(*SHARDED), -(-sizes // shards), sizes)
        blocks = -(-sizes // ROUNDING) * ROUNDING
        kept = self._kept(accumulates)
        changes = np.where(kept, self._sign * blocks[self._index], 0)
        live, beside = np.cumsum(changes) + exchange_bytes, dict(phase_bytes)
        phases, at = self._phase_peaks(live, beside, accumulates)
        phase = max(phases, key=lambda name: phases[name])
        peak = phases[phase]
        allocator = None
        if reserved:
            allocator = self._replayed(sizes, kept, exchange_bytes, beside, limit_bytes, expandable)
            peak = max(peak, allocator.peak_allocated_bytes)
        alive = kept[self._allocated_at] & (self._allocated_at <= at[phase]) & (self._freed_at > at[phase])
        kinds = Counter[Kind]({"exchange": exchange_bytes + beside.get(phase, 0)})
        for kind in set(self._history.kinds):
            kinds[kind] += int(blocks[alive & self._of_kind(kind)].sum())
        order = np.argsort(-blocks * alive)[:largest]
        named = tuple(
            Block(bytes=int(blocks[one]), kind=self._history.kinds[one], origin=self._history.origins[one])
            for one in order
            if alive[one]
        )
        return Peaks(
            allocated_bytes=int(peak),
            reserved_bytes=int(peak) if allocator is None else allocator.peak_reserved_bytes,
            phases={name: int(value) for name, value in phases.items()},
            kinds={kind: size for kind, size in kinds.items() if size},
            phase=phase,
            fits=allocator is None or not allocator.out_of_memory,
            retries=0 if allocator is None else allocator.retries,
            largest=named,
        )

    @property
    def varies_lengths(self) -> bool:
        """Whether it was fitted to more than one shape, so that other lengths can be asked for."""
        return self._shapes > 1

    @property
    def is_linear(self) -> bool:
        """Whether no allocation grows with the square of the rows."""
        squares = [index for index, powers in enumerate(self._powers) if powers[0] > 1]
        return not self._coefficients[squares].any()

    def _of_kind(self, *kinds: Kind) -> NDArray[np.bool_]:
        chosen: NDArray[np.bool_] = np.isin(self._kinds, kinds)
        return chosen

    def _segments(self) -> list[tuple[int, int, str]]:
        marks = self._history.marks
        ends = [place for place, _ in marks[1:]] + [len(self._history.events)]
        return [(start, end, name) for (start, name), end in zip(marks, ends, strict=True)]

    def _kept(self, accumulates: bool) -> NDArray[np.bool_]:
        """The events that happen: without accumulation the second micro-batch is left out.

        What it frees of earlier allocations would be freed by the optimizer's step, so those frees stay.
        """
        kept = np.ones(len(self._history.events), dtype=bool)
        if accumulates:
            return kept
        for start, end, name in self._segments():
            if name in MICRO_PHASES:
                kept[start:end] = False
        left_out = ~kept[self._allocated_at]
        kept |= (self._sign < 0) & ~left_out[self._index]
        kept &= ~left_out[self._index]
        return kept

    def _phase_peaks(
        self, live: NDArray[np.int64], beside: Mapping[str, int], accumulates: bool
    ) -> tuple[dict[str, int], dict[str, int]]:
        """The peak of each phase of the second step, and at which event it is."""
        peaks, at, begun = dict[str, int](), dict[str, int](), False
        for start, end, name in self._segments():
            begun = begun or name == SECOND_STEP
            if not begun or name in (SECOND_STEP, "idle") or (not accumulates and name in MICRO_PHASES):
                continue
            before = max(0, start - 1)
            place = before + int(np.argmax(live[before:end])) if end > before else before
            peak = int(live[place]) + beside.get(name, 0)
            if peak > peaks.get(name, -1):
                peaks[name], at[name] = peak, place
        return peaks, at

    def _replayed(
        self, sizes: NDArray[np.int64], kept: NDArray[np.bool_], exchange: int, beside: Mapping[str, int], limit: int | None,
        expandable: bool,
    ) -> CachingAllocator:  # fmt: skip
        allocator, bytes_of = CachingAllocator(limit_bytes=limit, expandable=expandable), sizes.tolist()
        first_step = next((place for place, name in self._history.marks if name == FIRST_STEP), 0)
        begins = {start: name for start, end, name in self._segments() if end > start and kept[start:end].any()}
        held = False
        for place, ((index, size), happens) in enumerate(zip(self._history.events, kept.tolist(), strict=True)):
            if place == first_step:
                allocator.forget_peak()  # a model may be built elsewhere, and take more meanwhile
                if exchange:
                    allocator.allocate("exchange", exchange)
            if beside and place in begins:
                if held:
                    allocator.free("phase")
                if held := beside.get(begins[place], 0) > 0:
                    allocator.allocate("phase", beside[begins[place]])
            if not happens or not bytes_of[index]:
                continue
            if size >= 0:
                allocator.allocate(index, bytes_of[index])
            else:
                allocator.free(index)
        return allocator


def _rules(history: History) -> list[tuple[int, str, tuple[int, ...], int]]:
    return [(index, one.rule, one.fixed, len(one.numbers)) for index, one in history.temporaries.items()]


def _fit_temporaries(points: NDArray[np.float64], histories: Sequence[History]) -> dict[int, NDArray[np.float64]]:
    """The polynomials of the numbers of each temporary: [product, number]."""
    places = list(histories[0].temporaries)
    if not places:
        return {}
    numbers = np.array(
        [[number for one in history.temporaries.values() for number in one.numbers] for history in histories]
    )
    coefficients, _ = _fit(points, numbers.astype(np.float64))
    lengths = [len(histories[0].temporaries[place].numbers) for place in places]
    return dict(zip(places, np.split(coefficients, np.cumsum(lengths)[:-1], axis=1), strict=True))


def _powers(lengths: int) -> list[tuple[int, ...]]:
    """Exponents of (rows, length 1, …): rows up to their square times products of at most two lengths, simple ones first."""
    products = [()] + [(one,) for one in range(lengths)] + list(combinations_with_replacement(range(lengths), 2))
    found = []
    for product in products:
        exponents = tuple(product.count(one) for one in range(lengths))
        found += [(rows, *exponents) for rows in (0, 1, 2)]
    return sorted(found, key=lambda powers: (sum(powers), powers[0]))


def _features(powers: Sequence[tuple[int, ...]], rows: int, shape: Shape) -> list[float]:
    values = (rows, *shape)
    return [float(np.prod([value**power for value, power in zip(values, one, strict=True)])) for one in powers]


def _fit(points: NDArray[np.float64], sizes: NDArray[np.float64]) -> tuple[NDArray[np.float64], NDArray[np.bool_]]:
    """For each allocation the simplest polynomial through its sizes: one product, else two, else a smooth one through all.

    Returns the coefficients, [product, allocation], and for which allocations one or two products were enough.
    """
    count, allocations = points.shape[1], sizes.shape[1]
    coefficients, explained = np.zeros((count, allocations)), np.zeros(allocations, dtype=bool)
    groups = [(one,) for one in range(count)] + list(combinations(range(count), 2))
    # Exactly first: 4 bytes × rows² at a few rows are also a constant within the slack, and a gibibyte at 16,384.
    for allowed in (np.full_like(sizes, EXACT_BYTES), np.maximum(SLACK_BYTES, TOLERANCE * sizes)):
        for group in groups:
            left = np.flatnonzero(~explained)
            if not len(left):
                break
            columns = points[:, group]
            if np.linalg.matrix_rank(columns / columns.max(axis=0)) < len(group):
                continue
            scale = columns.max(axis=0)
            found, *_ = np.linalg.lstsq(columns / scale, sizes[:, left], rcond=None)
            close = (np.abs(columns / scale @ found - sizes[:, left]) <= allowed[:, left]).all(axis=0)
            close &= (found >= -SLACK_BYTES).all(axis=0)
            coefficients[np.ix_(list(group), left[close])] = found[:, close] / scale[:, None]
            explained[left[close]] = True
    if not explained.all():
        left, scale = np.flatnonzero(~explained), points.max(axis=0)
        found, *_ = np.linalg.lstsq(points / scale, sizes[:, left], rcond=None)
        coefficients[:, left] = found / scale[:, None]
    return coefficients, explained
