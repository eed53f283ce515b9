"""How many requests may be answered at once: the bytes of a batch, predicted before a request joins it.

The forward-only memory model of `memory/forward.py` is fitted to a few small batches that do what the engine does: prefill,
decode, choose tokens. A request is admitted if both of these fit the budget:

    now       the cache of the rows that run (counted) + the prefill of those that join (predicted)
    at last   decoding all of them, each with as many tokens as it may get (predicted)

Every answer counts with its full length, because a batch that was admitted should not run out of memory later. The prediction
is of the padded batch: rows × the longest. If memory runs out all the same, the model is raised, and the engine halves the batch.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch

from brimful.memory.forward import Forward, next_phase
from brimful.memory.meter import has_peak_statistics
from brimful.planning.target import Target
from brimful.serving.batch import RowTokens, prefill
from brimful.serving.sampling import Sampling, choose
from brimful.task import Shape
from brimful.tasks.generate import PROBE_SOURCE, Generator
from brimful.tasks.model_folder import text_config

PROBE_ANSWER = 16
"""Tokens of an encoder-decoder's answer in the longest probe."""
DECODED = 2
"""Tokens that a probe decodes."""


class Admission:
    """The memory model of one engine and its budget. Used by the engine's thread alone."""

    def __init__(
        self, generator: Generator, target: Target, context_tokens: int, note: Callable[[str], object]
    ) -> None:
        self._generator, self._device = generator, generator.device
        longest = max(1, min(PROBE_SOURCE, context_tokens - DECODED))
        self._longest: Shape = (longest,) if generator.causal else (longest, PROBE_ANSWER)
        self._forward = Forward(
            self._work, generator.model, self._device, what="serving", limit_bytes=target.limit_bytes, fill=target.fill,
            note=note,
        )  # fmt: skip
        self._fill = target.fill

    def fit(self) -> None:
        """Probe. The budget before anything runs is the budget when nothing runs."""
        self._forward.fit(self._longest)

    @property
    def memory_model(self) -> dict[str, Any]:
        return self._forward.to_json()

    def budget(self, held_bytes: int) -> tuple[int, str]:
        """Bytes that batches may take, those of the cache that is held included, and the reason."""
        added, reason = self._forward.added_budget()
        return added + held_bytes, reason

    def needed_bytes(self, held_bytes: int, new: Sequence[Shape], final: Sequence[Shape]) -> float:
        """The peak if rows of the shapes `new` are prefilled now and all rows grow to their `final` shapes."""
        prefilled = self._forward.phase_bytes(len(new), widest(new), "forward") + held_bytes if new else 0.0
        return max(prefilled, self._forward.phase_bytes(len(final), widest(final), "decoding", "choosing"))

    def out_of_memory(self, predicted_bytes: float) -> None:
        """Raise the model to what was there and was not enough. Nothing is held any more."""
        self._forward.ooms += 1
        self._forward.correct(predicted_bytes, self.budget(0)[0] / self._fill)

    def measured(self, predicted_bytes: float, idle_bytes: int) -> None:
        """Where the device counts peaks: raise the model if the last batches took more than predicted."""
        if has_peak_statistics(self._device) and predicted_bytes:
            peak = torch.accelerator.max_memory_allocated(self._device) - idle_bytes
            self._forward.correct(predicted_bytes, peak)

    @torch.no_grad()
    def _work(self, rows: int, shape: Shape) -> None:
        """What the engine does with rows of this shape. All but one are shorter: without padding, no mask is made."""
        vocabulary = text_config(self._generator.model.config).vocab_size
        lengths = [shape[0] if row == 0 else -(-shape[0] // 2) for row in range(rows)]
        tokens = [torch.randint(0, vocabulary, (length,)).tolist() for length in lengths]
        answer = [] if self._generator.causal else tokens[0][:1] * (shape[1] - 1)
        batch, scores = prefill(self._generator, [RowTokens(one, answer) for one in tokens])
        next_phase("decoding")
        costly = [Sampling(temperature=1.0, top_p=0.5, seed=row, device=self._device) for row in range(rows)]
        for _ in range(DECODED):
            scores = batch.step(scores.argmax(-1))
        next_phase("choosing")
        choose(scores, costly)


def widest(shapes: Sequence[Shape]) -> Shape:
    """Rows side by side are as long as the longest, on every axis."""
    return tuple(max(lengths) for lengths in zip(*shapes, strict=True))
