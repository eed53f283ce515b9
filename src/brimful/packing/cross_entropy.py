"""Cross-entropy of a linear head over a large vocabulary, without all logits in memory.

The logits of 28,000 tokens over 30,000 words take 3.3 GB in fp32, several times over. Here tokens go through the head in
chunks. A sum of losses has a gradient that depends on nothing that comes later but one factor, so the gradients of hidden
states and head are made chunk by chunk in the forward pass, and backward multiplies them by that factor: no logits are kept
and none are computed twice. In fp16 small gradients would vanish before the loss scale reaches them, so there the chunks are
computed again in backward, with the factor.

torch has `F.linear_cross_entropy` since 2.13. It is not used: a sum over bf16 comes out in bf16 (334 for 50 tokens), logits
have no factor and no cap, and with label smoothing they are all in memory at once.

`linear_token_losses` gives the loss of every token instead of their sum, for losses that are not a plain sum, such as those of
preferences. Each token then has a factor of its own, and only backward knows it. Gradients of hidden states are still made in
the forward pass; if the head is trained too, its chunks are computed again in backward.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from brimful.packing.attention import HAS_TRITON, has_kernels

CHUNK_BYTES, CHUNK_TOKENS = 128 * 2**20, 1024
"""Logits of one chunk, in bytes, unless that would be fewer tokens than this: the sum of the head's gradients is read and
written for every chunk. Small chunks also make memory grow in a straight line from few tokens on."""
ALIGNED = 8
"""For the kernel the vocabulary is filled up to a multiple of this: products with 29,298 columns run at half the speed of 29,304."""


def linear_cross_entropy(
    hidden: Tensor,
    weight: Tensor,
    labels: Tensor,
    bias: Tensor | None = None,
    *,
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
    logit_scale: float = 1.0,
    softcap: float | None = None,
    chunk: int | None = None,
) -> Tensor:
    """The sum of `F.cross_entropy(softcap(F.linear(hidden, weight, bias) * logit_scale), labels)`, in fp32 or wider.

    Args:
        hidden: [token, dim].
        weight: [word, dim], the head; may be tied to an embedding.
        labels: [token]; tokens labelled `ignore_index` do not count.
        bias: [word].
        ignore_index: The label of tokens without one.
        label_smoothing: Share of each label spread over the vocabulary.
        logit_scale: Factor of the logits.
        softcap: Logits become `softcap * tanh(logits / softcap)`.
        chunk: Tokens per chunk. Default: as many as have 128 MiB of logits, at least 1,024.
    """
    dtype = hidden.dtype
    if torch.is_autocast_enabled(hidden.device.type):
        dtype = torch.get_autocast_dtype(hidden.device.type)
    rule = _Rule(ignore_index, float(label_smoothing), float(logit_scale), softcap)
    chunk = chunk or chunk_size(weight.shape[0], dtype)
    total: Tensor = _LinearCrossEntropy.apply(hidden, weight, bias, labels, dtype, rule, chunk, False)
    return total


def linear_token_losses(
    hidden: Tensor,
    weight: Tensor,
    labels: Tensor,
    bias: Tensor | None = None,
    *,
    ignore_index: int = -100,
    logit_scale: float = 1.0,
    softcap: float | None = None,
    chunk: int | None = None,
) -> Tensor:
    """The same by token, [token]; 0 for tokens labelled `ignore_index`. The arguments are those of `linear_cross_entropy`."""
    dtype = hidden.dtype
    if torch.is_autocast_enabled(hidden.device.type):
        dtype = torch.get_autocast_dtype(hidden.device.type)
    rule = _Rule(ignore_index, 0.0, float(logit_scale), softcap)
    chunk = chunk or chunk_size(weight.shape[0], dtype)
    losses: Tensor = _LinearCrossEntropy.apply(hidden, weight, bias, labels, dtype, rule, chunk, True)
    return losses


def chunk_size(words: int, dtype: torch.dtype) -> int:
    """How many tokens have their logits computed at once, for a vocabulary of this size."""
    return max(CHUNK_TOKENS, CHUNK_BYTES // (words * dtype.itemsize))


def chunk_starts(tokens: int, chunk: int) -> Sequence[int]:
    """Where each chunk begins."""
    return range(0, tokens, chunk)


class _Rule(NamedTuple):
    """How logits and labels become a loss."""

    ignore_index: int
    smoothing: float
    scale: float
    softcap: float | None


class _LinearCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        labels: Tensor,
        dtype: torch.dtype,
        rule: _Rule,
        chunk: int,
        by_token: bool,
    ) -> Tensor:
        ctx.dtype, ctx.rule, ctx.chunk = dtype, rule, chunk
        wanted = tuple(ctx.needs_input_grad[:3])
        ctx.again, ctx.spent = dtype == torch.float16 or (by_token and any(wanted[1:])), False
        make = wanted if not ctx.again else (False, False, False)
        losses, *gradients = _run(hidden, weight, bias, labels, dtype, rule, chunk, make, None)
        ctx.wanted, ctx.by_token = wanted, by_token
        if ctx.again:
            ctx.save_for_backward(hidden, weight, bias, labels)
        else:
            ctx.save_for_backward(*gradients)
        return losses if by_token else losses.sum()

    @staticmethod
    def backward(ctx: Any, factor: Tensor) -> Any:
        if ctx.again:
            hidden, weight, bias, labels = ctx.saved_tensors
            _, *gradients = _run(hidden, weight, bias, labels, ctx.dtype, ctx.rule, ctx.chunk, ctx.wanted, factor)
        else:
            if ctx.spent:
                raise RuntimeError("linear_cross_entropy cannot run backward twice: its gradients were scaled in place")
            ctx.spent = True
            factor = factor[:, None] if ctx.by_token else factor
            gradients = [None if one is None else one.mul_(factor.to(one.dtype)) for one in ctx.saved_tensors]
        return *gradients, None, None, None, None, None


def _run(
    hidden: Tensor, weight: Tensor, bias: Tensor | None, labels: Tensor,
    dtype: torch.dtype, rule: _Rule, chunk: int, wanted: tuple[bool, bool, bool], factor: Tensor | None,
) -> tuple[Tensor, Tensor | None, Tensor | None, Tensor | None]:  # fmt: skip
    """The losses by token, and the gradients that are wanted of hidden states, head and bias. `factor` is one number, or one
    for each token."""
    wide = torch.promote_types(dtype, torch.float32)
    words = weight.shape[0]
    width = -(-words // ALIGNED) * ALIGNED if has_kernels(hidden.device, dtype) else words
    head, head_bias = weight.to(dtype), None if bias is None else bias.to(dtype)
    if width > words:  # a fill of nothing would still copy the head, 1 GiB of an 8B's
        head = F.pad(head, (0, 0, 0, width - words))
        head_bias = None if head_bias is None else F.pad(head_bias, (0, width - words))
    losses = torch.zeros(len(hidden), dtype=wide, device=hidden.device)
    d_hidden = torch.empty_like(hidden) if wanted[0] else None
    d_weight = torch.zeros(head.shape, dtype=wide, device=weight.device) if wanted[1] else None
    d_bias = torch.zeros(bias.shape, dtype=wide, device=weight.device) if wanted[2] and bias is not None else None
    for begin in chunk_starts(len(hidden), chunk):
        part, label = hidden[begin : begin + chunk].to(dtype), labels[begin : begin + chunk]
        logits = F.linear(part, head, head_bias)
        own = factor[begin : begin + chunk] if factor is not None and factor.ndim else factor
        losses[begin : begin + chunk] = _loss_to_gradient(logits, words, label, rule, any(wanted), own)
        if d_hidden is not None:
            d_hidden[begin : begin + chunk] = logits @ head
        if d_weight is not None:
            _add_product(d_weight, logits, part)
        if d_bias is not None:
            d_bias += logits[:, :words].sum(0, dtype=wide)
        del logits  # or two chunks would be held while the next one is computed
    d_weight = None if d_weight is None else d_weight[:words].to(weight.dtype)
    d_bias = None if d_bias is None or bias is None else d_bias.to(bias.dtype)
    return losses, d_hidden, d_weight, d_bias


def _add_product(total: Tensor, gradient: Tensor, part: Tensor) -> None:
    """`total += gradient.T @ part`, with the sum over tokens in `total`'s wider type."""
    if gradient.dtype == total.dtype:
        total.addmm_(gradient.mT, part)
    elif gradient.is_cuda:
        total += torch.mm(gradient.mT, part, out_dtype=total.dtype)
    else:
        total += gradient.mT @ part


def _loss_to_gradient(
    logits: Tensor, words: int, labels: Tensor, rule: _Rule, wanted: bool, factor: Tensor | None
) -> Tensor:
    """The losses over the first `words` columns, by token. If wanted, `logits` are overwritten with their gradient.

    The gradient is multiplied by `factor`, if any, before it is rounded to the precision of the logits.
    """
    if HAS_TRITON and has_kernels(logits.device, logits.dtype):
        from brimful.packing.triton_kernels import cross_entropy

        return cross_entropy(logits, words, labels, *rule, wanted, factor)
    ignore_index, smoothing, scale, softcap = rule
    counted = labels != ignore_index
    target = labels.where(counted, 0)[:, None]
    scores = logits.to(torch.promote_types(logits.dtype, torch.float32)) * scale
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    log_sum = scores.logsumexp(1, keepdim=True)
    losses = log_sum - (1 - smoothing) * scores.gather(1, target)
    if smoothing:
        losses = losses - smoothing * scores.mean(1, keepdim=True)
    if wanted:
        gradient = (scores - log_sum).exp()
        gradient -= smoothing / scores.shape[1]
        gradient.scatter_add_(1, target, gradient.new_full(target.shape, smoothing - 1))
        if softcap is not None:
            gradient *= 1 - (scores / softcap) ** 2
        if factor is not None:
            gradient *= factor[:, None] if factor.ndim else factor
        logits.copy_(gradient.mul_(scale).masked_fill_(~counted[:, None], 0.0))
    return losses[:, 0].masked_fill(~counted, 0.0)
