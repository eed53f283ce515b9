"""What the kernels of a card allocate, for steps that are traced on fake tensors.

torch chooses a kernel for the machine it runs on, and on a CPU that is another than on the card. The wrong attention kernel alone made
the predicted peak of a T5 step 12 to 32 % too low or too high. So attention calls the kernel that the card would use:

    flash             no mask, half precision, heads of at most 256 numbers, compute capability 8.0 and above
    memory-efficient  any mask whose last dimension is contiguous, aligned heads
    plain             everything else. It computes in fp32 and keeps the whole matrix of scores.

transformers 5.17 hands T5's position bias over with strides that only the plain one takes, 5.22 does not: 18.0 against 13.6 GiB
for 32 rows of 256+256. The step that is traced is that of the versions installed.

The kernels of packed rows (`packing.triton_kernels`) have no fake implementation where Triton is not installed, so their
allocations are made here: outputs, and what their backward holds meanwhile.
"""

import sys
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any, Literal

import torch
import torch.nn.functional as F

from brimful.estimation.fake_cuda import replaced
from brimful.packing import attention as packing_attention
from brimful.packing import causal_head, cross_entropy
from brimful.packing.sequence import BLOCK

ALIGNMENT = {2: 8, 4: 4}
"""By the bytes of a number: the head dimension must be a multiple of this for memory-efficient attention."""
FLASH_LARGEST_HEAD = 256
BIAS_SPLITS = 32
"""Partial sums of the position bias's gradient in the packed kernels, `SPLITS` there."""


AttentionChoice = Literal["card", "memory-efficient", "plain"]


@contextmanager
def card_kernels(
    *, has_flash: bool, attention: AttentionChoice = "card", chunked_loss: bool = True
) -> Iterator[Counter[str]]:
    """Attention and losses as on a card with or without flash attention. Yields the calls of each attention kernel.

    With another `attention` torch's kernels are those, where they can be. Without `chunked_loss` all logits are made at once.

    Functions are replaced: a mode of torch would not reach blocks that backward runs again.
    """
    calls = Counter[str]()

    def attend(*args: Any, **kwargs: Any) -> Any:
        return _attention(attention, has_flash, calls, *args, **kwargs)

    def attend_packed(*args: Any) -> Any:
        calls["packed"] += 1
        return _PackedAttention.apply(*args)

    with ExitStack() as stack:
        stack.enter_context(replaced(F, "scaled_dot_product_attention", attend))
        stack.enter_context(replaced(packing_attention, "kernel_attention", attend_packed))
        plain_losses = cross_entropy._loss_to_gradient
        stack.enter_context(replaced(cross_entropy, "_loss_to_gradient", partial(_losses, plain_losses)))
        starts = TWO_CHUNKS if chunked_loss else ONE_CHUNK
        stack.enter_context(replaced(cross_entropy, "chunk_starts", lambda tokens, chunk: starts))
        if not chunked_loss:
            stack.enter_context(replaced(cross_entropy, "_LinearCrossEntropy", _WholeCrossEntropy))
            stack.enter_context(replaced(causal_head, "chunk_size", lambda words, dtype: sys.maxsize))
        yield calls


TWO_CHUNKS, ONE_CHUNK = (0, 0), (0,)
"""Where the chunks of a loss begin, while tracing. A later chunk takes the place of the one before it, so two show the peak; with as
many as there really are, steps of different sizes would not have the same allocations."""


class _WholeCrossEntropy:
    """`linear_cross_entropy` as most programs compute it: all logits, in the precision of the head and then in fp32."""

    @staticmethod
    def apply(
        hidden: Any, weight: Any, bias: Any, labels: Any, dtype: torch.dtype, rule: Any, chunk: int, by_token: bool
    ) -> Any:
        logits = F.linear(hidden.to(dtype), weight.to(dtype), None if bias is None else bias.to(dtype))
        if rule.scale != 1:
            logits = logits * rule.scale
        if rule.softcap is not None:
            logits = rule.softcap * torch.tanh(logits / rule.softcap)
        return F.cross_entropy(
            logits.float(), labels, ignore_index=rule.ignore_index, label_smoothing=rule.smoothing,
            reduction="none" if by_token else "sum",
        )  # fmt: skip


def _attention(
    choice: AttentionChoice, has_flash: bool, calls: Counter[str], query: Any, key: Any, value: Any, attn_mask: Any = None,
    dropout_p: float = 0.0, is_causal: bool = False, scale: float | None = None, enable_gqa: bool = False,
) -> Any:  # fmt: skip
    device = query.device.type
    if torch.is_autocast_enabled(device):
        dtype = torch.get_autocast_dtype(device)
        query, key, value = (one.to(dtype) for one in (query, key, value))
        if attn_mask is not None and attn_mask.is_floating_point():
            attn_mask = attn_mask.to(dtype)
    kernel = attention_kernel(query, attn_mask, has_flash=has_flash, grouped=enable_gqa, choice=choice)
    calls[kernel] += 1
    with torch.autocast(device, enabled=False):  # as inside torch's own function: what follows keeps its precision
        if kernel == "flash":
            width = query.shape[-1]
            query, key, value = (F.pad(one, (0, -width % 8)) if width % 8 else one for one in (query, key, value))
            scale = width**-0.5 if scale is None else scale
            out = torch.ops.aten._scaled_dot_product_flash_attention(
                query, key, value, dropout_p, is_causal, False, scale=scale
            )[0]
            return out[..., :width]
        if kernel == "memory-efficient":
            mask = _as_scores(attn_mask, query, key)
            needs_grad = torch.is_grad_enabled() and any(one.requires_grad for one in (query, key, value))
            return torch.ops.aten._scaled_dot_product_efficient_attention(
                query, key, value, mask, needs_grad, dropout_p, is_causal, scale=scale
            )[0]
        return torch.ops.aten._scaled_dot_product_attention_math(
            query, key, value, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa
        )[0]


def attention_kernel(
    query: Any, mask: Any, *, has_flash: bool, grouped: bool = False, choice: AttentionChoice = "card"
) -> str:
    """The kernel that torch takes on such a card: flash, memory-efficient or plain."""
    if choice == "plain":
        return choice
    width, size = query.shape[-1], query.element_size()
    if choice == "card" and mask is None and size == 2 and width <= FLASH_LARGEST_HEAD and has_flash:
        return "flash"
    aligned = size in ALIGNMENT and width % ALIGNMENT[size] == 0
    if aligned and not grouped and (mask is None or mask.stride(-1) == 1):
        return "memory-efficient"
    return "plain"


def _as_scores(mask: Any, query: Any, key: Any) -> Any:
    """As torch prepares a mask: numbers to add, each row of scores beginning at a multiple of 8."""
    if mask is None:
        return None
    if mask.dtype is torch.bool:
        mask = torch.zeros_like(mask, dtype=query.dtype)  # torch makes it in one operation
    width = mask.shape[-1]
    if width % 8:
        mask = F.pad(mask, (0, -width % 8))[..., :width]
    return mask.expand(query.shape[0], query.shape[1], query.shape[2], key.shape[2])


class _PackedAttention(torch.autograd.Function):
    """The allocations of `triton_kernels.packed_attention` and of its backward."""

    @staticmethod
    def forward(ctx: Any, q: Any, k: Any, v: Any, bias: Any, sinks: Any, seed: Any, *others: Any) -> Any:
        out = q.new_empty((q.shape[0], q.shape[1], v.shape[2]))
        lse = q.new_empty((q.shape[1], q.shape[0]), dtype=torch.float32)
        ctx.save_for_backward(q, k, v, out, lse, bias, sinks, seed)
        return out, lse

    @staticmethod
    def backward(ctx: Any, grad: Any, _: Any) -> Any:
        q, k, v, _, lse, bias, sinks, _ = ctx.saved_tensors
        kept = [grad.contiguous()]
        dq, dk, dv = (one.new_empty(one.shape) for one in (q, k, v))
        kept.append(torch.empty_like(lse))
        dbias = dsinks = None
        if bias is not None and ctx.needs_input_grad[3]:
            tiles = 2 * -(-((bias.shape[1] + 1) // 2) // BLOCK) + 3
            partial = q.new_empty((BIAS_SPLITS, q.shape[1], tiles, BLOCK, BLOCK), dtype=torch.float32)
            kept += [partial, partial.sum(0)]
            dbias = torch.empty_like(bias)
        if sinks is not None and ctx.needs_input_grad[4]:
            dsinks = torch.empty_like(sinks)
        return dq, dk, dv, dbias, dsinks, *[None] * (len(ctx.needs_input_grad) - 5)


def _losses(plain: Any, logits: Any, words: int, labels: Any, *others: Any) -> Any:
    """The kernel writes gradients over the logits and allocates the losses alone. It serves half precision."""
    if logits.dtype not in packing_attention.HALF:
        return plain(logits, words, labels, *others)
    return logits.new_empty(labels.shape, dtype=torch.float32)
