"""Rows that are decoded together in a cache of fixed size, so that one CUDA graph computes each token.

A token of a model of 24 layers is about 1,200 operations (counted for Qwen2), which take the host longer to launch than a fast
card to run where the model is small. A graph is one launch, but it is bound to shapes and addresses. So the cache has room for more rows and tokens than there are, and what changes
from token to token is in small tensors beside it: how long each row is, and the column of the next token.

                    columns                      ▼ the next token of every row
    place 0   · · · · · t t t t t t t t t t t t  _ · · · ·
    place 1   · · · · · · · · · · · t t t t t t  _ · · · ·      · is masked
    place 2   · · · · · · · · · · · · · · · · ·  _ · · · ·      free: it sees only its own next token

A row that joins is copied into a free place, and one that leaves frees its place: nothing else moves. When the last column is
written, the rows move left over columns that none of them needs any more; else, and when there is no free place, larger tensors
replace these, and the token after the next is recorded again.

`replayable` compares tokens from a graph with those of the ordinary batch before the first request, and times both. A model that
cannot be recorded, because it reads numbers back from the device, or that keeps something else than plain keys and values, such
as a sliding window, is decoded in the ordinary way.
"""

import time
from collections.abc import Callable, Sequence
from statistics import median
from typing import Any

import torch
from transformers.cache_utils import Cache, CacheLayerMixin, DynamicLayer, EncoderDecoderCache

from brimful.errors import in_one_line
from brimful.memory.graphs import capture
from brimful.memory.oom import is_oom
from brimful.serving.batch import (
    Batch,
    CausalBatch,
    RowTokens,
    causal_scores,
    compare_scores,
    decoder_scores,
    prefill,
)
from brimful.task import Shape
from brimful.tasks.generate import Generator
from brimful.tasks.model_folder import text_config

ROW_BITS, LENGTH_BITS = 2, 3
"""Significant bits of the size of a cache, which is rounded up. Rows: 1, 2, 3, 4, 6, 8, 12 …, since a further row costs little.
Lengths: 64, 80, 96, 112, 128, 160 …, since each further column is read for each token."""
LEAST_LENGTH = 64
MOST_UNUSED = 4
"""A cache that is this many times larger than it has to be is replaced by a smaller one."""
MOST_OOMS = 2
"""Out-of-memory errors while recording, after which nothing is recorded any more."""
CHECKED_LENGTHS = (5, 9, 6)
CHECKED_TOKENS = 4
TIMED_ROWS, TIMED_TOKENS = 8, 8

Recorder = Callable[[Callable[[], torch.Tensor], torch.device], tuple[torch.Tensor, Callable[[], object]]]
"""Records work without running it. Returns the tensor that it writes, and what runs it."""


def record_launches(
    work: Callable[[], torch.Tensor], device: torch.device
) -> tuple[torch.Tensor, Callable[[], object]]:
    """A `Recorder` for CUDA. Unlike that of `memory/graphs.py` it leaves the peak statistics alone, which the engine reads."""
    with capture(device) as graph:
        scores = work()
    return scores, graph.replay


def fixed_size(rows: int, shape: Shape) -> tuple[int, Shape]:
    """The rows and lengths of the cache in which these are decoded."""
    return _rounded_up(rows, ROW_BITS), tuple(max(LEAST_LENGTH, _rounded_up(length, LENGTH_BITS)) for length in shape)


def _rounded_up(number: int, bits: int) -> int:
    unit = 1 << max(0, (number - 1).bit_length() - bits)
    return -(-number // unit) * unit


class Recordings:
    """Whether tokens may be recorded: shared by all batches of an engine."""

    def __init__(self, record: Recorder = record_launches) -> None:
        self.record = record
        self.problem = ""
        """Why nothing is recorded any more."""
        self._ooms = 0

    def failed(self, error: Exception) -> None:
        self._ooms += is_oom(error)
        if not is_oom(error) or self._ooms >= MOST_OOMS:
            self.problem = in_one_line(error)


class ReplayedBatch:
    """A batch like `CausalBatch` and `EncoderDecoderBatch`, made of one of them, which is used up."""

    def __init__(self, generator: Generator, batch: Batch, recordings: Recordings) -> None:
        self._generator, self._recordings = generator, recordings
        self._device = generator.device
        self.lengths: list[int] = []
        self.sources: list[int] = []
        """Tokens of each row's prompt, of an encoder-decoder."""
        self._places: list[int] = []
        """The place of each row in the cache."""
        self._end = 0
        """The column of the next token."""
        self._column = torch.zeros(1, dtype=torch.long, device=self._device)
        decoded, *sources = batch.caches
        self._layers: list[Any] = [_FixedLayer(layer, self._column) for layer in decoded.layers]
        self._source_layers: list[Any] = [_empty(layer) for layer in sources[0].layers] if sources else []
        self._cache: Any = Cache(layers=self._layers)
        if sources:
            self._cache = EncoderDecoderCache(self._cache, Cache(layers=self._source_layers))
            self._cache.is_updated = dict.fromkeys(range(len(self._source_layers)), True)
        self.size: tuple[int, Shape] = (0, ())
        """Rows and lengths that the cache has room for."""
        self._recorded: tuple[torch.Tensor, Callable[[], object]] | None = None
        self._warm = False
        """Whether a token was computed in this cache."""
        self.join(batch)

    @property
    def shape(self) -> Shape:
        """The padded lengths, as of the batches that are not replayed."""
        return (max(self.sources), max(self.lengths)) if self.sources else (max(self.lengths),)

    @property
    def cache_bytes(self) -> int:
        layers = [layer for layer in [*self._layers, *self._source_layers] if layer.is_initialized]
        return sum(layer.keys.nbytes + layer.values.nbytes for layer in layers)

    def step(self, tokens: torch.Tensor) -> torch.Tensor:
        """Append one token to each row. Returns the scores of the next, which the next step overwrites."""
        if self._end == self.size[1][-1]:
            self._make_room()
        self._tokens[self._index, 0] = tokens
        scores = self._next_scores()
        self._end += 1
        self.lengths = [length + 1 for length in self.lengths]
        in_order = self._places == list(range(len(self._places)))
        return scores[: len(self._places)] if in_order else scores[self._index]

    def join(self, other: Batch) -> None:
        """Copy the rows of `other`, which is used up, into free places. Layer by layer, so that only one is in memory twice."""
        own, longest = max(self.lengths, default=0), max(other.lengths)
        rows, shape = fixed_size(len(self.lengths) + len(other.lengths), _with_next(self._shape_with(other)))
        larger = rows > self.size[0] or any(map(int.__gt__, shape, self.size[1]))
        end = max(own if larger else self._end, longest)
        old, new = slice(self._end - own, self._end), slice(end - own, end)
        kept = self._new_size(rows, shape) if larger else None
        taken = set(self._places)
        places = [place for place in range(self.size[0]) if place not in taken][: len(other.lengths)]
        index = torch.tensor(places, device=self._device)
        for layer, more in zip(self._layers, other.caches[0].layers, strict=True):
            if kept is not None:
                _resize(layer, rows, shape[-1], kept, old, new)
            elif new != old:
                layer.move(old, new)
            _write(layer, index, slice(end - longest, end), more)
        self._end = end
        if not isinstance(other, CausalBatch):
            sources = slice(max(self.sources, default=0))
            for layer, more in zip(self._source_layers, other.caches[1].layers, strict=True):
                if kept is not None:
                    _resize(layer, rows, shape[0], kept, sources, sources)
                _write(layer, index, slice(max(other.sources)), more)
            self.sources = [*self.sources, *other.sources]
        self.lengths, self._places = [*self.lengths, *other.lengths], [*self._places, *places]
        self._write_state()

    def keep(self, rows: Sequence[int]) -> None:
        """Drop all rows but these."""
        self.lengths, self._places = ([one[row] for row in rows] for one in (self.lengths, self._places))
        self.sources = [self.sources[row] for row in rows] if self.sources else []
        size = fixed_size(len(rows), _with_next(self.shape))
        if _cells(*self.size) > MOST_UNUSED * _cells(*size):
            self._resize(*size)
        self._write_state()

    def _shape_with(self, other: Batch) -> Shape:
        return tuple(map(max, self.shape, other.shape)) if self.lengths else other.shape

    def _next_scores(self) -> torch.Tensor:
        """Those of all places. The first token in a cache is computed plainly, the second is recorded."""
        if self._recorded is None and self._warm and not self._recordings.problem:
            try:
                self._recorded = self._recordings.record(self._compute, self._device)
            except Exception as error:  # whatever a model does that a graph cannot
                self._recordings.failed(error)
        self._warm = True
        if self._recorded is None:
            return self._compute()
        scores, replay = self._recorded
        replay()
        return scores

    def _compute(self) -> torch.Tensor:
        """One token for each place: all that happens on the device, nothing else."""
        columns = torch.arange(self.size[1][-1], device=self._device)
        seen = (columns <= self._column) & (columns >= self._column - self._device_lengths[:, None])
        if self._source_layers:
            scores = decoder_scores(self._generator, self._cache, self._tokens, seen.long(), self._source_mask)
        else:
            positions = self._device_lengths[:, None]
            scores = causal_scores(self._generator, self._cache, self._tokens, seen.long(), positions)
        self._column.add_(1)
        self._device_lengths.add_(self._taken)
        return scores

    def _make_room(self) -> None:
        """The last column is written."""
        rows, shape = fixed_size(len(self.lengths), _with_next(self.shape))
        if shape[-1] > self.size[1][-1]:
            self._resize(rows, shape)
        else:
            self._shift(self._end - max(self.lengths))
        self._write_state()

    def _shift(self, columns: int) -> None:
        """Move all rows to the left by this many columns."""
        old = slice(self._end - max(self.lengths), self._end)
        for layer in self._layers:
            layer.move(old, slice(old.start - columns, old.stop - columns))
        self._end -= columns

    def _resize(self, rows: int, shape: Shape) -> None:
        """Replace the cache, layer by layer, so that only one is in memory twice."""
        longest = max(self.lengths)
        old, new = slice(self._end - longest, self._end), slice(longest)
        kept = self._new_size(rows, shape)
        for layer in self._layers:
            _resize(layer, rows, shape[-1], kept, old, new)
        sources = slice(max(self.sources, default=0))
        for source_layer in self._source_layers:
            _resize(source_layer, rows, shape[0], kept, sources, sources)
        self._end = longest

    def _new_size(self, rows: int, shape: Shape) -> torch.Tensor:
        """Drop the recorded token, and replace what is beside the cache. Returns the places that the rows had in the old one; in
        the new one they are at the beginning."""
        self._recorded, self._warm, self.size = None, False, (rows, shape)
        kept = torch.tensor(self._places, dtype=torch.long, device=self._device)
        self._places = list(range(len(self._places)))
        zeros = torch.zeros(rows, dtype=torch.long, device=self._device)
        self._tokens, self._device_lengths, self._taken = zeros[:, None].clone(), zeros.clone(), zeros
        self._source_mask = zeros.new_zeros((rows, shape[0])) if self._source_layers else zeros
        return kept

    def _write_state(self) -> None:
        """Bring the tensors beside the cache up to date. A free place sees something, too: nothing at all would give NaN, which
        stays in the cache."""
        self._index = torch.tensor(self._places, device=self._device)
        lengths, taken, sources = [0] * self.size[0], [0] * self.size[0], [1] * self.size[0]
        for row, place in enumerate(self._places):
            lengths[place], taken[place] = self.lengths[row], 1
            sources[place] = self.sources[row] if self.sources else 1
        self._column.fill_(self._end)
        self._device_lengths.copy_(torch.tensor(lengths))
        self._taken.copy_(torch.tensor(taken))
        if self._source_layers:
            columns = torch.arange(self.size[1][0], device=self._device)
            self._source_mask.copy_(columns < torch.tensor(sources, device=self._device)[:, None])


class _FixedLayer(CacheLayerMixin):
    """The keys and values of a layer. The next token's are written to a column that all layers share."""

    is_compileable = True  # then transformers leaves no mask out
    is_sliding = False

    def __init__(self, like: Any, column: torch.Tensor) -> None:
        super().__init__()
        self._column = column
        if like.is_initialized:  # others share the keys and values of another layer
            self.keys, self.values, self.is_initialized = like.keys[:0], like.values[:0], True

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        raise AssertionError("a layer without keys and values in the prompt has some in the answer")

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *_: Any, **__: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        assert self.keys is not None and self.values is not None
        self.keys.index_copy_(2, self._column, key_states.to(self.keys.dtype))
        self.values.index_copy_(2, self._column, value_states.to(self.values.dtype))
        return self.keys, self.values

    def get_seq_length(self) -> Any:
        return self._column[0]

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        assert self.keys is not None
        return self.keys.shape[2], 0

    def get_max_length(self) -> int:
        return -1 if self.keys is None else self.keys.shape[2]

    def move(self, old: slice, new: slice) -> None:
        if self.is_initialized:
            for tensor in (self.keys, self.values):
                assert tensor is not None
                tensor[:, :, new] = tensor[:, :, old].clone()


def _empty(like: Any) -> DynamicLayer:
    """A layer without rows, for keys and values of the same kind."""
    layer = DynamicLayer()
    layer.keys, layer.values, layer.is_initialized = like.keys[:0], like.values[:0], like.is_initialized
    return layer


def _write(layer: Any, places: torch.Tensor, columns: slice, more: Any) -> None:
    """Other columns are cleared: those of a row that was there before may be infinite, and even masked they would give NaN."""
    if layer.is_initialized:
        for tensor, part in ((layer.keys, more.keys), (layer.values, more.values)):
            tensor.index_fill_(0, places, 0)
            tensor[places, :, columns] = part
        more.keys = more.values = None


def _resize(layer: Any, rows: int, width: int, places: torch.Tensor, old: slice, new: slice) -> None:
    """Tensors of another size, with these rows and columns of the old ones."""
    if layer.is_initialized:
        for name in ("keys", "values"):
            before = getattr(layer, name)
            after = before.new_zeros((rows, before.shape[1], width, before.shape[3]))
            if len(places):
                after[: len(places), :, new] = before[places, :, old]
            setattr(layer, name, after)


def _with_next(shape: Shape) -> Shape:
    """With a column for the next token."""
    return (*shape[:-1], shape[-1] + 1)


def _cells(rows: int, shape: Shape) -> int:
    return rows * sum(shape)


@torch.no_grad()
def replayable(generator: Generator, recordings: Recordings, *, timed: bool = True) -> tuple[bool, str]:
    """Whether tokens are replayed, and why: rows that join and leave are compared with the ordinary batch, and both are timed."""
    rng = torch.Generator().manual_seed(0)
    vocabulary = text_config(generator.model.config).vocab_size

    def rows(lengths: Sequence[int]) -> list[RowTokens]:
        return [RowTokens(torch.randint(0, vocabulary, (length,), generator=rng).tolist()) for length in lengths]

    def tokens(count: int) -> torch.Tensor:
        return torch.randint(0, vocabulary, (count,), generator=rng).to(generator.device)

    first, second = rows(CHECKED_LENGTHS[:2]), rows(CHECKED_LENGTHS[2:])
    plain, _ = prefill(generator, first)
    if other := [layer for cache in plain.caches for layer in cache.layers if type(layer) is not DynamicLayer]:
        return False, f"{type(other[0]).__name__} in the model's cache has no fixed size"
    replayed = ReplayedBatch(generator, prefill(generator, first)[0], recordings)
    worst, alike = 0.0, True
    for change in ("nothing", "join", "leave"):
        if change == "join":
            plain.join(prefill(generator, second)[0])
            replayed.join(prefill(generator, second)[0])
        elif change == "leave":
            plain.keep([0, 2])
            replayed.keep([0, 2])
        for _ in range(CHECKED_TOKENS):
            next_tokens = tokens(len(plain.lengths))
            off, equal = compare_scores(replayed.step(next_tokens), plain.step(next_tokens), generator.device)
            worst, alike = max(worst, off), alike and equal
    if recordings.problem:
        return False, f"the model cannot be recorded ({recordings.problem})"
    if not alike:
        return False, f"a replayed token has other scores than a launched one (off by {worst:.2g} standard deviations)"
    if not timed:
        return True, f"as requested; scores are those of launched tokens (within {worst:.1g} standard deviations)"
    lengths = [max(CHECKED_LENGTHS)] * TIMED_ROWS
    plain, replayed = (
        prefill(generator, rows(lengths))[0],
        ReplayedBatch(generator, prefill(generator, rows(lengths))[0], recordings),
    )
    launched_s, replayed_s = (_seconds(batch, tokens(TIMED_ROWS)) for batch in (plain, replayed))
    times = f"a token of {TIMED_ROWS} rows takes {1e3 * replayed_s:.1f} ms replayed and {1e3 * launched_s:.1f} launched"
    return replayed_s < launched_s, times


def _seconds(batch: "Batch | ReplayedBatch", tokens: torch.Tensor) -> float:
    """Of one token, after those that record it."""
    seconds = []
    for _ in range(2 + TIMED_TOKENS):
        begin = time.perf_counter()
        batch.step(tokens)[0, 0].item()  # waits for the device
        seconds.append(time.perf_counter() - begin)
    return median(seconds[2:])
