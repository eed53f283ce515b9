"""Rows that are decoded together, which others can join and leave between two tokens.

A batch is the cache of a Hugging Face model and the length of every row in it. Rows are aligned at their end: what a row lacks
in length is padding on its left, which the attention mask hides, and its positions count from its own first token. So a row
that joins is padded to the longest, and after one that leaves the padding that nobody needs is cut off. Relative positions, such
as those of T5, follow from the distance to the end, which padding on the left does not change.

    prefill(prompts) ─► batch ─┐
                               ├─ join ─► step(tokens) ─► scores ─► … ─► keep(rows that go on)
    prefill(prompts) ─► batch ─┘

A long prompt is prefilled in pieces: its beginning, then `append`.

The price is padding: a cache of 63 short rows and a long one is as large as one of 64 long rows. Admission counts it that way.

Layers with a full cache and with a sliding window can be joined. A recurrent state cannot be padded on its left, and learned
positions that a decoder counts by itself (BART) are wrong for a row that joins later. `joinable` finds out by comparing joined
rows with the same rows alone, and such models answer one request at a time.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from transformers.cache_utils import (
    Cache,
    DynamicCache,
    DynamicLayer,
    DynamicSlidingWindowLayer,
    EncoderDecoderCache,
)
from transformers.modeling_outputs import BaseModelOutput

from brimful.tasks.generate import Generator
from brimful.tasks.model_folder import text_config

CACHE_NAMES = ("past_key_values", "cache_params")
"""What a model's forward calls its cache: of attention, and of recurrent models."""
JOINABLE_LAYERS = (DynamicLayer, DynamicSlidingWindowLayer)
CHECKED_LENGTHS = (5, 9, 6)
"""Prompt tokens of the rows that `joinable` compares."""
CHECKED_PIECE = 3
"""Tokens that the first of them begins with, before the others are appended."""
CHECKED_TOKENS = 3
TOLERANCE = {torch.float64: 1e-9, torch.float32: 1e-3}
HALF_TOLERANCE = 0.25
"""How far scores of joined rows may be from those alone, in standard deviations of the scores. A wrong position or mask moved
them by 0.5 to 2, rounding by 1e-6 in float32 and 0.02 in bfloat16."""


@dataclass(frozen=True, slots=True)
class RowTokens:
    """What a row is given: its prompt, and the tokens of its answer that are known already."""

    prompt: Sequence[int]
    answer: Sequence[int] = ()


class CausalBatch:
    """Rows of a decoder-only model."""

    def __init__(self, generator: Generator, cache: Cache, lengths: list[int]) -> None:
        self._generator, self.cache = generator, cache
        self.lengths = lengths
        """Tokens of each row in the cache."""
        self._device_lengths = torch.tensor(lengths, device=generator.device)

    @classmethod
    def prefill(cls, generator: Generator, rows: Sequence[RowTokens]) -> "tuple[CausalBatch, torch.Tensor]":
        """A batch of new rows, and the scores of the next token of each."""
        texts = [[*row.prompt, *row.answer] for row in rows]
        ids, mask = _padded(texts, generator.tokenizer.pad_id, generator.device, left=True)
        cache = DynamicCache(config=generator.model.config)
        batch = cls(generator, cache, [len(text) for text in texts])
        return batch, batch._scores(ids, mask, (mask.cumsum(-1) - 1).clamp_(min=0))

    @property
    def shape(self) -> tuple[int, ...]:
        """The padded lengths that drive its memory."""
        return (max(self.lengths),)

    def step(self, tokens: torch.Tensor) -> torch.Tensor:
        """Append one token to each row. Returns the scores of the next."""
        return self.append(tokens[:, None])

    def append(self, tokens: torch.Tensor) -> torch.Tensor:
        """Append as many tokens to each row as `tokens` has columns. Returns the scores of the next."""
        positions = self._device_lengths[:, None] + _places(self._device_lengths, tokens.shape[1])
        self.lengths = [length + tokens.shape[1] for length in self.lengths]
        self._device_lengths = self._device_lengths + tokens.shape[1]
        return self._scores(tokens, _left_mask(self._device_lengths, max(self.lengths)), positions)

    def join(self, other: Any) -> None:
        """Append the rows of `other`, which is used up."""
        length = max(*self.lengths, *other.lengths)
        _join_layers(self.cache, other.cache, length, left=True)
        self.lengths = [*self.lengths, *other.lengths]
        self._device_lengths = torch.cat([self._device_lengths, other._device_lengths])

    def keep(self, rows: Sequence[int]) -> None:
        """Drop all rows but these."""
        index = torch.tensor(rows, device=self._generator.device)
        self.lengths = [self.lengths[row] for row in rows]
        self._device_lengths = self._device_lengths[index]
        _keep_layers(self.cache, index, max(self.lengths), left=True)

    @property
    def cache_bytes(self) -> int:
        return _cache_bytes(self.cache)

    @property
    def caches(self) -> tuple[Cache, ...]:
        return (self.cache,)

    def _scores(self, ids: torch.Tensor, mask: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        return causal_scores(self._generator, self.cache, ids, mask, positions)


class EncoderDecoderBatch:
    """Rows of an encoder-decoder. The encoder runs once per row; prompts are padded on the right, answers on the left."""

    def __init__(
        self,
        generator: Generator,
        cache: EncoderDecoderCache,
        sources: list[int],
        lengths: list[int],
        mask: torch.Tensor,
    ) -> None:
        self._generator, self.cache = generator, cache
        self.sources = sources
        """Tokens of each row's prompt."""
        self.lengths = lengths
        """Tokens of each row in the decoder's cache."""
        self._mask = mask
        self._device_lengths = torch.tensor(lengths, device=generator.device)

    @classmethod
    def prefill(cls, generator: Generator, rows: Sequence[RowTokens]) -> "tuple[EncoderDecoderBatch, torch.Tensor]":
        pad, device = generator.tokenizer.pad_id, generator.device
        ids, mask = _padded([row.prompt for row in rows], pad, device, left=False)
        assert generator.start_id is not None
        answers = [[generator.start_id, *row.answer] for row in rows]
        decoded, _ = _padded(answers, pad, device, left=True)
        cache = generator.encoder_decoder_cache()
        lengths = [len(answer) for answer in answers]
        batch = cls(generator, cache, [len(row.prompt) for row in rows], lengths, mask)
        return batch, batch._scores(decoded, generator.model.get_encoder()(input_ids=ids, attention_mask=mask))

    @property
    def shape(self) -> tuple[int, ...]:
        return (max(self.sources), max(self.lengths))

    def step(self, tokens: torch.Tensor) -> torch.Tensor:
        self.lengths = [length + 1 for length in self.lengths]
        self._device_lengths = self._device_lengths + 1
        return self._scores(tokens[:, None])

    def join(self, other: Any) -> None:
        length, source = max(*self.lengths, *other.lengths), max(*self.sources, *other.sources)
        _join_layers(self.cache.self_attention_cache, other.cache.self_attention_cache, length, left=True)
        _join_layers(self.cache.cross_attention_cache, other.cache.cross_attention_cache, source, left=False)
        self.lengths, self.sources = [*self.lengths, *other.lengths], [*self.sources, *other.sources]
        self._device_lengths = torch.cat([self._device_lengths, other._device_lengths])
        self._mask = torch.cat([_widened(one, source) for one in (self._mask, other._mask)])

    def keep(self, rows: Sequence[int]) -> None:
        index = torch.tensor(rows, device=self._generator.device)
        self.lengths, self.sources = ([one[row] for row in rows] for one in (self.lengths, self.sources))
        self._device_lengths = self._device_lengths[index]
        self._mask = self._mask[index, : max(self.sources)]
        _keep_layers(self.cache.self_attention_cache, index, max(self.lengths), left=True)
        _keep_layers(self.cache.cross_attention_cache, index, max(self.sources), left=False)

    @property
    def cache_bytes(self) -> int:
        return sum(_cache_bytes(one) for one in self.caches)

    @property
    def caches(self) -> tuple[Cache, ...]:
        return (self.cache.self_attention_cache, self.cache.cross_attention_cache)

    def _scores(self, ids: torch.Tensor, encoded: Any = None) -> torch.Tensor:
        mask = _left_mask(self._device_lengths, max(self.lengths))
        return decoder_scores(self._generator, self.cache, ids, mask, self._mask, encoded)


Batch = CausalBatch | EncoderDecoderBatch


def causal_scores(
    generator: Generator, cache: Cache, ids: torch.Tensor, mask: torch.Tensor, positions: torch.Tensor
) -> torch.Tensor:
    """Scores of the token after `ids`, from a decoder-only model."""
    arguments = generator.forward_arguments
    if CACHE_NAMES[0] in arguments:
        optional = {CACHE_NAMES[0]: cache, "attention_mask": mask, "position_ids": positions}
    else:  # a recurrent model multiplies its input with a mask, and a row alone has no padding
        optional = {CACHE_NAMES[1]: cache}
    optional = {name: value for name, value in {**optional, "logits_to_keep": 1}.items() if name in arguments}
    return _last(generator.model(input_ids=ids, use_cache=True, **optional).logits)


def decoder_scores(
    generator: Generator, cache: EncoderDecoderCache, ids: torch.Tensor, mask: torch.Tensor, source_mask: torch.Tensor,
    encoded: Any = None,
) -> torch.Tensor:  # fmt: skip
    """The same of an encoder-decoder. `encoded` is needed for the first tokens of an answer only."""
    if encoded is None:  # the keys and values of the prompt are cached, and the model only asks how many there are
        shape = (*source_mask.shape, text_config(generator.model.config).hidden_size)
        nothing: Any = torch.zeros((), device=generator.device).expand(shape)
        encoded = BaseModelOutput(last_hidden_state=nothing)
    output = generator.model(
        encoder_outputs=encoded,
        attention_mask=source_mask,
        decoder_input_ids=ids,
        decoder_attention_mask=mask,
        past_key_values=cache,
        use_cache=True,
    )
    return _last(output.logits)


def prefill(generator: Generator, rows: Sequence[RowTokens]) -> tuple[Batch, torch.Tensor]:
    """A batch of new rows for this model, and the scores of the next token of each."""
    return (CausalBatch if generator.causal else EncoderDecoderBatch).prefill(generator, rows)


@torch.no_grad()
def joinable(generator: Generator) -> tuple[bool, str]:
    """Whether rows that begin at different times may share a batch, and why: three short ones are compared with themselves alone."""
    vocabulary = text_config(generator.model.config).vocab_size
    rng = torch.Generator().manual_seed(0)
    texts = torch.randint(0, vocabulary, (len(CHECKED_LENGTHS), max(CHECKED_LENGTHS)), generator=rng).tolist()
    prompts = [RowTokens(text[:length]) for text, length in zip(texts, CHECKED_LENGTHS, strict=True)]
    tokens = torch.randint(0, vocabulary, (CHECKED_TOKENS, len(prompts)), generator=rng).to(generator.device)
    alone = []
    for place, prompt in enumerate(prompts):
        batch, _ = prefill(generator, [prompt])
        if other := [layer for cache in batch.caches for layer in cache.layers if type(layer) not in JOINABLE_LAYERS]:
            return False, f"{type(other[0]).__name__} in the model's cache cannot be padded"
        steps = [
            batch.step(tokens[step, place : place + 1])[0] for step in range(0 if place == 0 else 1, CHECKED_TOKENS)
        ]
        alone.append(steps[-1])
    first = prompts[0].prompt
    batch, _ = prefill(generator, [RowTokens(first[:CHECKED_PIECE] if generator.causal else first)])
    if isinstance(batch, CausalBatch):
        batch.append(torch.tensor([first[CHECKED_PIECE:]], device=generator.device))
    batch.step(tokens[0, :1])
    other_batch, _ = prefill(generator, prompts[1:])
    batch.join(other_batch)
    batch.step(tokens[1])
    off, equal = compare_scores(batch.step(tokens[2]), torch.stack(alone), generator.device)
    if not equal:
        return False, f"joined rows give other scores than alone (off by {off:.2g} standard deviations)"
    return True, f"joined rows give the scores of the same rows alone (within {off:.1g} standard deviations)"


def compare_scores(scores: torch.Tensor, expected: torch.Tensor, device: torch.device) -> tuple[float, bool]:
    """How far scores are off, in standard deviations, and whether that may be rounding."""
    autocast = torch.get_autocast_dtype(device.type) if torch.is_autocast_enabled(device.type) else None
    off = float((scores.float() - expected.float()).abs().max() / expected.float().std())
    return off, off <= TOLERANCE.get(autocast or scores.dtype, HALF_TOLERANCE)  # NaN is not


def _last(scores: torch.Tensor) -> torch.Tensor:
    """Those of the last place, without holding on to the others."""
    return scores[:, -1] if scores.shape[1] == 1 else scores[:, -1].clone()


def _padded(
    texts: Sequence[Sequence[int]], pad: int, device: torch.device, *, left: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """The texts side by side, and their mask."""
    width = max(map(len, texts))
    empty = [[pad] * (width - len(text)) for text in texts]
    rows = [[*more, *text] if left else [*text, *more] for text, more in zip(texts, empty, strict=True)]
    ids = torch.tensor(rows, device=device)
    lengths = torch.tensor([len(text) for text in texts], device=device)
    return ids, _left_mask(lengths, width) if left else (_places(lengths, width) < lengths[:, None]).long()


def _left_mask(lengths: torch.Tensor, width: int) -> torch.Tensor:
    """1 at the last `lengths` places of each row."""
    return (_places(lengths, width) >= width - lengths[:, None]).long()


def _places(lengths: torch.Tensor, width: int) -> torch.Tensor:
    return torch.arange(width, device=lengths.device)[None, :]


def _widened(mask: torch.Tensor, width: int) -> torch.Tensor:
    return torch.nn.functional.pad(mask, (0, width - mask.shape[1]))


def _join_layers(cache: Any, other: Any, length: int, *, left: bool) -> None:
    """Layer by layer, so that only one is in memory twice."""
    for layer, more in zip(cache.layers, other.layers, strict=True):
        if not layer.is_initialized:  # one that shares the keys and values of another
            continue
        width = _width(layer, length)
        layer.keys = _stacked(layer.keys, more.keys, width, left=left)
        layer.values = _stacked(layer.values, more.values, width, left=left)
        more.keys = more.values = None
        if layer.is_sliding:
            layer.cumulative_length = length


def _stacked(one: torch.Tensor, other: torch.Tensor, width: int, *, left: bool) -> torch.Tensor:
    """The rows of both, padded to a width."""
    rows = one.shape[0] + other.shape[0]
    result = one.new_zeros((rows, one.shape[1], width, one.shape[3]))
    for place, part in ((slice(one.shape[0]), one), (slice(one.shape[0], None), other)):
        columns = slice(width - part.shape[2], None) if left else slice(part.shape[2])
        result[place, :, columns] = part
    return result


def _keep_layers(cache: Any, index: torch.Tensor, length: int, *, left: bool) -> None:
    for layer in cache.layers:
        if not layer.is_initialized:
            continue
        width = min(_width(layer, length), layer.keys.shape[2])
        columns = slice(layer.keys.shape[2] - width, None) if left else slice(width)
        layer.keys, layer.values = layer.keys[:, :, columns][index], layer.values[:, :, columns][index]
        if layer.is_sliding:
            layer.cumulative_length = length


def _width(layer: Any, length: int) -> int:
    """What a layer keeps of rows of this length."""
    return min(length, layer.sliding_window - 1) if layer.is_sliding else length


def _cache_bytes(cache: Cache) -> int:
    """Of keys and values, or of whatever else a layer keeps."""
    kept = (value for layer in cache.layers for value in vars(layer).values())
    tensors = (one for value in kept for one in (value.values() if isinstance(value, dict) else [value]))
    return sum(one.nbytes for one in tensors if isinstance(one, torch.Tensor))
