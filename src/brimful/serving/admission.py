"""How many requests may be answered at once: the bytes of a batch, predicted before a request joins it.

The forward-only memory model of `memory/forward.py` is fitted to a few small batches that do what the engine does: prefill,
decode, choose tokens. A request is admitted if both of these fit the budget:

    now       the cache of the rows that run (counted) + the prefill of those that join (predicted)
    at last   decoding all of them, each with as many tokens as it may get (predicted)

Every answer counts with its full length, because a batch that was admitted should not run out of memory later. The prediction
is of the padded batch: rows × the longest. If memory runs out all the same, the engine halves the batch, and rows beside others
count for more until batches go well again. Often another program took the memory, so this must not last. A request alone is always
judged by the model as it is: else a few such errors would refuse everything for good.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from brimful.errors import DoesNotFit
from brimful.memory.forward import MAX_CORRECTION, Forward, next_phase, probe_sizes
from brimful.planning.target import Target
from brimful.serving.batch import RowTokens, prefill
from brimful.serving.sampling import Sampling, choose
from brimful.task import Shape
from brimful.tasks.generate import PROBE_SOURCE, Generator
from brimful.tasks.model_folder import text_config

PROBE_ANSWER = 128
"""Tokens of an encoder-decoder's answer in the longest probe."""
SHORTEST_PROBE = 8
"""Tokens of the longest probe at least."""
DECODED = 2
"""Tokens that a probe decodes."""


class Admission:
    """The memory model of one engine and its budget. Used by the engine's thread alone."""

    def __init__(
        self, generator: Generator, target: Target, context_tokens: int, note: Callable[[str], object]
    ) -> None:
        longest = max(1, min(PROBE_SOURCE, context_tokens - DECODED))
        self._longest: Shape = (longest,) if generator.causal else (longest, PROBE_ANSWER)
        self._forward = Forward(
            partial(dummy_batch, generator), generator.model, generator.device, what="serving", limit_bytes=target.limit_bytes, fill=target.fill,
            note=note,
        )  # fmt: skip
        self._fill = target.fill
        self._caution = 1.0
        """Raised by out-of-memory errors: batches of several rows count for this much more than predicted."""
        self.cache_size: Callable[[int, Shape], tuple[int, Shape]] = lambda rows, shape: (rows, shape)
        """Rows and lengths for which a batch of these has room in its cache."""

    def fit(self) -> None:
        """Probe, with shorter texts if not all probes fit: those that are left out would show what memory grows with."""
        longest = self._longest
        while True:
            smallest = max(longest) <= SHORTEST_PROBE
            try:
                complete = len(self._forward.fit(longest).probes) == len(probe_sizes(longest))
            except DoesNotFit:
                if smallest:
                    raise
                complete = False
            if complete or smallest:
                return
            longest = tuple(max(SHORTEST_PROBE, length // 2) for length in longest)

    @property
    def memory_model(self) -> dict[str, Any]:
        return self._forward.to_json()

    def budget(self, held_bytes: int) -> tuple[int, str]:
        """Bytes that batches may take, those of the cache that is held included, and the reason."""
        added, reason = self._forward.added_budget()
        return added + held_bytes, reason

    def needed_bytes(self, size: "BatchSize") -> float:
        """The peak of this batch, from now to its end."""
        caution = self._caution if size.rows > 1 else 1.0
        rows, final = self.cache_size(size.rows, size.final)
        decoding = caution * self._forward.phase_bytes(rows, final, "decoding", "choosing")
        held = float(size.held_bytes)
        if size.fixed is not None:
            decoding = max(decoding, caution * self._forward.phase_bytes(*size.fixed, "decoding", "choosing"))
            held = max(held, self._forward.phase_bytes(*size.fixed, "decoding"))
        if not size.new_rows:
            return decoding
        return max(decoding, caution * self._forward.phase_bytes(size.new_rows, size.prefilled, "forward") + held)

    def out_of_memory(self, predicted_bytes: float) -> None:
        """Count rows for more, up to what was there and was not enough. Nothing is held any more."""
        self._forward.ooms += 1
        available = self.budget(0)[0] / self._fill
        self._caution *= min(max(1.0, available / max(1.0, predicted_bytes)), MAX_CORRECTION)

    def clean(self) -> None:
        """Batches went well for a while: take back one such error."""
        self._caution = max(1.0, self._caution / MAX_CORRECTION)

    def measured(self, predicted_bytes: float, added_bytes: int) -> None:
        """Raise the model if the last batches took more than predicted."""
        if predicted_bytes:
            self._forward.correct(predicted_bytes, added_bytes)


@torch.no_grad()
def dummy_batch(generator: Generator, rows: int, shape: Shape) -> None:
    """What the engine does with rows of this shape. All but one are shorter: without padding, no mask is made."""
    vocabulary = text_config(generator.model.config).vocab_size
    lengths = [shape[0] if row == 0 else -(-shape[0] // 2) for row in range(rows)]
    tokens = [torch.randint(0, vocabulary, (length,)).tolist() for length in lengths]
    answer = [] if generator.causal else tokens[0][:1] * (shape[1] - 1)
    batch, scores = prefill(generator, [RowTokens(one, answer) for one in tokens])
    next_phase("decoding")
    costly = [Sampling(temperature=1.0, top_p=0.5, seed=row, device=generator.device) for row in range(rows)]
    for _ in range(DECODED):
        scores = batch.step(scores.argmax(-1))
    next_phase("choosing")
    choose(scores, costly)


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchSize:
    """What drives the memory of a batch: its rows as long as they may get, and those that are prefilled now."""

    held_bytes: int
    """Of the cache that there is."""
    fixed: tuple[int, Shape] | None = None
    """Rows and lengths of that cache if its size is fixed: it may be larger than its rows need, and the graph beside it keeps what
    a token takes."""
    rows: int = 0
    final: Shape = ()
    new_rows: int = 0
    prefilled: Shape = ()

    def with_row(self, final: Shape, prefilled: Shape = ()) -> "BatchSize":
        """With a further row, which is prefilled now if `prefilled` is given. Rows side by side are as long as the longest."""
        return BatchSize(
            held_bytes=self.held_bytes,
            fixed=self.fixed,
            rows=self.rows + 1,
            final=tuple(map(max, self.final or final, final)),
            new_rows=self.new_rows + bool(prefilled),
            prefilled=tuple(map(max, self.prefilled or prefilled, prefilled)) or self.prefilled,
        )
