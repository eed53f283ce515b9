"""Log-probabilities of two replies to one prompt: what losses over preferences need.

    causal model, packed      prompt, chosen and rejected once each, end to end. Attention runs over prompt + chosen and
                              prompt + rejected, so rejected does not see chosen, and its positions continue those of the prompt
    T5, packed                one encoder pass for each prompt. In the decoder each reply is a row of its own; to the prompt,
                              both replies attend as one row
    padded                    prompt + chosen and prompt + rejected side by side; the encoder still runs once for each prompt

All of them are exact: a reply has the log-probability that it has alone. Logits are never all in memory. What a reply's last
token would predict is not needed, so packed causal rows leave it out of their input.

A batch of either kind has `lengths`, the tokens of the replies, [pair, 2]. The functions return log-probabilities of the same
shape, summed over the tokens of each reply: chosen first, rejected second.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from brimful.errors import TaskError
from brimful.packing import causal, t5
from brimful.packing.causal_head import head_losses
from brimful.packing.cross_entropy import linear_token_losses
from brimful.packing.sequence import BLOCK, SharedRows, boundaries, end_to_end
from brimful.task import IGNORED


def pack_causal(
    prompts: Sequence[Any], chosen: Sequence[Any], rejected: Sequence[Any], tokens: int, *, fill: int
) -> dict[str, Any]:
    """A packed batch of pairs for `causal_log_probabilities`.

    Args:
        prompts: The tokens of each prompt, at least one.
        chosen: The tokens of each preferred reply.
        rejected: The tokens of each other reply.
        tokens: At least the sum over the pairs of prompt and longer reply.
        fill: The token after the last reply.
    """
    p, c, r = (np.array([len(one) for one in side]) for side in (prompts, chosen, rejected))
    inputs = [part for pair in zip(prompts, (one[:-1] for one in chosen), (one[:-1] for one in rejected), strict=True) for part in pair]  # fmt: skip
    size = _size(sum(map(len, inputs)), 2 * tokens)
    begins = np.concatenate([[0], np.cumsum(p + c + r - 2)])[:-1]
    copies, back, at = [], [], []
    copied = 0
    for begin, prompt, one, other in zip(begins.tolist(), p.tolist(), c.tolist(), r.tolist(), strict=True):
        first = np.arange(begin, begin + prompt)
        replies = np.arange(begin + prompt, begin + prompt + one + other - 2)
        copies += [first, replies[: one - 1], first, replies[one - 1 :]]
        second = copied + prompt + one - 1 + prompt
        back += [np.arange(copied, copied + prompt + one - 1), np.arange(second, second + other - 1)]
        copied = second + other - 1
        at += [first[-1:], replies[: one - 1], first[-1:], replies[one - 1 :]]
    rows = [length for one, other in zip(p + c - 1, p + r - 1, strict=True) for length in (one, other)]
    attended = _size(copied, 2 * tokens)
    return {
        "input_ids": end_to_end(inputs, size, fill),
        "position_ids": end_to_end(
            [np.concatenate([np.arange(a), np.arange(a, a + b - 1), np.arange(a, a + d - 1)]) for a, b, d in zip(p, c, r, strict=True)], size, 0
        ),
        "packed_rows": SharedRows(
            boundaries(rows, attended), end_to_end(copies, attended, 0), end_to_end(back, size, 0)
        ),
        **_targets(at, chosen, rejected, size),
    }  # fmt: skip


def causal_log_probabilities(model: Any, batch: Mapping[str, Any]) -> Tensor:
    """Of a batch from `pack_causal`."""
    model, decoder = causal.model_parts(model)
    if reason := causal.cannot_pack(model.config):
        raise TaskError(f"{type(model).__name__} cannot be trained on packed rows: {reason}. Try: layout='padded'.")
    hidden = causal.packed_hidden(decoder, batch)
    losses = head_losses(model, decoder, hidden.index_select(0, batch["at"]), batch["labels"])
    return by_reply(losses, batch["reply"], batch["lengths"])


def padded_causal_log_probabilities(model: Any, batch: Mapping[str, Any]) -> Tensor:
    """Of a batch with `input_ids` and `labels`, [pair, 2, token], padded on the right; labels are -100 outside the replies."""
    model, decoder = causal.model_parts(model)
    causal.refuse_balancing_loss(model)
    hidden = decoder(input_ids=batch["input_ids"].flatten(0, 1), use_cache=False).last_hidden_state[:, :-1]
    labels = batch["labels"].flatten(0, 1)[:, 1:]
    reply, place = (labels != IGNORED).nonzero(as_tuple=True)
    losses = head_losses(model, decoder, hidden[reply, place], labels[reply, place])
    return by_reply(losses, reply, batch["lengths"])


def padded_encoder_decoder_log_probabilities(model: Any, batch: Mapping[str, Any], encoded: Tensor) -> Tensor:
    """Of a batch with `labels`, [pair, 2, token], -100 after the end of a reply. `encoded` is what the encoder made of the
    prompts, [pair, token, dim], for both replies."""
    model, decoder = causal.model_parts(model)
    labels = batch["labels"].flatten(0, 1)
    reply, place = (labels != IGNORED).nonzero(as_tuple=True)
    tokens = model.prepare_decoder_input_ids_from_labels(labels)
    encoded, mask = (one.repeat_interleave(2, 0) for one in (encoded, batch["attention_mask"]))
    hidden = decoder(
        input_ids=tokens, encoder_hidden_states=encoded, encoder_attention_mask=mask, use_cache=False
    ).last_hidden_state
    losses = head_losses(model, decoder, hidden[reply, place], labels[reply, place])
    return by_reply(losses, reply, batch["lengths"])


def pack_t5(
    prompts: Sequence[Any], chosen: Sequence[Any], rejected: Sequence[Any], tokens: Sequence[int], *, fill: int, start: int
) -> dict[str, Any]:  # fmt: skip
    """A packed batch of pairs for `t5_log_probabilities`. `tokens` are the size of the prompts' sequence, and half of the
    largest size of the replies'."""
    replies = [one for pair in zip(chosen, rejected, strict=True) for one in pair]
    lengths = [len(one) for one in replies]
    size = _size(sum(lengths), 2 * tokens[1])
    return {
        "source": end_to_end(prompts, tokens[0], fill),
        "source_rows": boundaries([len(one) for one in prompts], tokens[0]),
        "prompt_rows": boundaries([a + b for a, b in zip(lengths[::2], lengths[1::2], strict=True)], size),
        **t5.targets(replies, size, fill=fill, start=start),
        **_targets([np.arange(sum(lengths))], chosen, rejected, size),
    }


def t5_log_probabilities(model: Any, batch: Mapping[str, Any]) -> Tensor:
    """Of a batch from `pack_t5`."""
    hidden, scale = t5.decoded(model, batch)
    losses = linear_token_losses(
        hidden.index_select(0, batch["at"]), model.lm_head.weight, batch["labels"], logit_scale=scale
    )
    return by_reply(losses, batch["reply"], batch["lengths"])


def _targets(at: Sequence[Any], chosen: Sequence[Any], rejected: Sequence[Any], size: int) -> dict[str, Tensor]:
    """Where each token of a reply is predicted, what it is, and which reply it belongs to; filled up to one of a few sizes."""
    replies = [one for pair in zip(chosen, rejected, strict=True) for one in pair]
    lengths = np.array([len(one) for one in replies])
    count = _size(int(lengths.sum()), 2 * size)
    return {
        "at": end_to_end(at, count, 0),
        "labels": end_to_end(replies, count, IGNORED),
        "reply": end_to_end([np.repeat(np.arange(len(replies)), lengths)], count, 0),
        "lengths": torch.from_numpy(lengths.reshape(-1, 2)),
    }


def _size(used: int, most: int) -> int:
    """A sequence is filled up, so that there are few sizes."""
    unit = max(BLOCK, most // 16)
    return max(used, min(most, -(-used // unit) * unit))


def by_reply(losses: Tensor, reply: Tensor, lengths: Tensor) -> Tensor:
    """Log-probabilities summed over the tokens of each reply, in the shape of `lengths`."""
    total = losses.new_zeros(lengths.numel()).index_add(0, reply, losses)
    return -total.view(lengths.shape)
