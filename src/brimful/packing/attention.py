"""Attention inside each row of packed sequences.

    out = attention(q, k, v, rows, causal=True, scale=0.125)                  # self-attention of a causal model
    out = attention(q, k, v, target, source, scale=1.0)                       # cross-attention
    out = attention(q, k, v, rows, bias=table, scale=1.0, dropout=0.1)        # T5's encoder

On a GPU and in bf16 or fp16 this runs the kernels of `triton_kernels.py`. Elsewhere a plain implementation serves; it is
what tests compare the kernels with.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from brimful.packing.sequence import BLOCK, Boundaries

HALF = (torch.bfloat16, torch.float16)
HAS_TRITON = find_spec("triton") is not None
"""It comes with torch for GPUs, but not on Windows."""

_kernels_off = False


def has_kernels(device: torch.device, dtype: torch.dtype) -> bool:
    """Whether attention and loss run in the kernels there, if Triton is installed."""
    return device.type == "cuda" and dtype in HALF and not _kernels_off


@contextmanager
def without_kernels() -> Iterator[None]:
    """In here they run in torch's own operations, to compare with."""
    global _kernels_off
    before, _kernels_off = _kernels_off, True
    try:
        yield
    finally:
        _kernels_off = before


def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    queries: Boundaries,
    keys: Boundaries | None = None,
    *,
    scale: float,
    causal: bool = False,
    window: int | None = None,
    softcap: float | None = None,
    bias: Tensor | None = None,
    sinks: Tensor | None = None,
    dropout: float = 0.0,
) -> Tensor:
    """Softmax attention of every row to itself, or to the row of the same number in `keys`.

    Args:
        q: Queries, [token, head, dim].
        k: Keys, [token, head, dim]; the number of query heads is a multiple of theirs.
        v: Values, like the keys; their dim may be smaller.
        queries: Where the rows of `q` begin and end.
        keys: Where the rows of `k` and `v` do. Default: as in `q`.
        scale: Factor of the scores.
        causal: A token sees only itself and those before it in its row.
        window: Of those, only the last `window`, itself included. Needs `causal`.
        softcap: Scores become `softcap * tanh(scores / softcap)`, before the bias.
        bias: Added to the scores by distance, [head, 2 * radius - 1], from -(radius - 1) to radius - 1. Tokens farther
            apart have the outermost value.
        sinks: [head], the score of one more key that every query sees and that has no value (GPT-OSS).
        dropout: Share of attention weights to drop.

    Returns:
        [token, head, dim]; zeros after the last row.
    """
    keys = queries if keys is None else keys
    q, k, v = (side.to(_precision(v)) for side in (q, k, v))
    if has_kernels(q.device, q.dtype):
        seed = torch.randint(2**31, (1,), device=q.device) if dropout else None
        narrower = q.shape[2] - v.shape[2]  # DeepSeek's values: the kernels know one width
        out, _ = kernel_attention(
            q, k, F.pad(v, (0, narrower)) if narrower else v, bias, sinks, seed, queries.starts, queries.tiles, keys.starts, keys.tiles,
            scale, causal, window or 0, softcap or 0.0, dropout,
        )  # fmt: skip
        return out[..., : v.shape[2]] if narrower else out
    return _plain(q, k, v, queries, keys, scale, causal, window, softcap, bias, sinks, dropout)


def _precision(v: Tensor) -> torch.dtype:
    """As torch's own attention does it: under autocast queries and keys with rotary positions come in fp32, values do not."""
    if v.dtype != torch.float64 and torch.is_autocast_enabled(v.device.type):
        return torch.get_autocast_dtype(v.device.type)
    return v.dtype


def _reference(
    q: Tensor, k: Tensor, v: Tensor, queries: Boundaries, keys: Boundaries,
    scale: float, causal: bool, window: int | None, softcap: float | None, bias: Tensor | None, sinks: Tensor | None,
    dropout: float,
) -> Tensor:  # fmt: skip
    """Rows of equal lengths side by side, [row, head, token, dim]: nothing is padded, so a long row costs only itself."""
    starts_q, starts_k = queries.starts.tolist(), keys.starts.tolist()
    alike: dict[tuple[int, int], list[tuple[int, int]]] = {}
    for begin_q, end_q, begin_k, end_k in zip(starts_q, starts_q[1:], starts_k, starts_k[1:], strict=False):
        if end_q > begin_q and end_k > begin_k:
            alike.setdefault((end_q - begin_q, end_k - begin_k), []).append((begin_q, begin_k))
    places, parts = [], []
    for (length_q, length_k), begins in alike.items():
        first = torch.tensor(begins, device=q.device)
        at_q = first[:, :1] + torch.arange(length_q, device=q.device)
        at_k = first[:, 1:] + torch.arange(length_k, device=q.device)
        wide_q, wide_k, wide_v = (side[at].transpose(1, 2) for side, at in ((q, at_q), (k, at_k), (v, at_k)))
        out = _attend_in_blocks(wide_q, wide_k, wide_v, scale, causal, window, softcap, bias, sinks, dropout)
        places.append(at_q.flatten())
        parts.append(out.transpose(1, 2).flatten(0, 1).to(q.dtype))
    packed = torch.zeros((q.shape[0], q.shape[1], v.shape[2]), dtype=q.dtype, device=q.device)
    return packed.index_put((torch.cat(places),), torch.cat(parts)) if parts else packed


_plain = _reference


def leave_uncompiled() -> None:
    """Make compiled code call the plain implementation as it is. Its loops over rows would be compiled for every batch."""
    global _plain
    if _plain is _reference:
        _plain = torch.compiler.disable(_reference)


def _without_triton(
    q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, sinks: Tensor | None, seed: Tensor | None,
    starts_q: Tensor, tiles_q: Tensor, starts_k: Tensor, tiles_k: Tensor,
    scale: float, causal: bool, window: int, softcap: float, dropout: float,
) -> tuple[Tensor, None]:  # fmt: skip
    """In the place of the kernels."""
    rows = Boundaries(starts_q, tiles_q), Boundaries(starts_k, tiles_k)
    return _plain(q, k, v, *rows, scale, causal, window or None, softcap or None, bias, sinks, dropout), None


kernel_attention: Any = _without_triton
if HAS_TRITON:
    from brimful.packing import triton_kernels

    kernel_attention = triton_kernels.packed_attention


def _attend_in_blocks(
    q: Tensor, k: Tensor, v: Tensor,
    scale: float, causal: bool, window: int | None, softcap: float | None, bias: Tensor | None, sinks: Tensor | None,
    dropout: float,
) -> Tensor:  # fmt: skip
    """Of rows of one length, [row, head, token, dim]. Scores are computed for a block of queries, and again in backward, so that
    memory grows with the tokens, as with the kernels: with whole scores a row of 1,500 tokens among 31 of 50 took 204 MiB of the
    499 MiB of a T5's step, which no plan made for the mean row predicts."""
    parts = []
    for first in range(0, q.shape[2], BLOCK):
        end = min(first + BLOCK, k.shape[2]) if causal else k.shape[2]
        arguments: Any = q[:, :, first : first + BLOCK], k[:, :, :end], v[:, :, :end], first
        options: Any = scale, causal, window, softcap, bias, sinks, dropout
        if torch.is_grad_enabled():
            again: Any = {"use_reentrant": False, "preserve_rng_state": dropout > 0}
            parts.append(checkpoint(_attend_side_by_side, *arguments, *options, **again))
        else:
            parts.append(_attend_side_by_side(*arguments, *options))
    return torch.cat(parts, 2)


def _attend_side_by_side(
    q: Tensor, k: Tensor, v: Tensor, first: int,
    scale: float, causal: bool, window: int | None, softcap: float | None, bias: Tensor | None, sinks: Tensor | None,
    dropout: float,
) -> Tensor:  # fmt: skip
    """The queries from the `first` token of each row on."""
    k, v = (side.repeat_interleave(q.shape[1] // k.shape[1], dim=1) for side in (k, v))
    places = first + torch.arange(q.shape[2], device=q.device)
    distance = torch.arange(k.shape[2], device=q.device) - places[:, None]
    seen = (distance <= 0) if causal else torch.ones_like(distance, dtype=torch.bool)
    if window is not None:
        seen = seen & (distance > -window)
    if bias is None and softcap is None and sinks is None:
        return F.scaled_dot_product_attention(q, k, v, attn_mask=seen, dropout_p=dropout, scale=scale)
    scores = q @ k.mT * scale
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    if bias is not None:
        radius = (bias.shape[1] + 1) // 2
        scores = scores + bias[:, distance.clamp(1 - radius, radius - 1) + radius - 1].to(scores.dtype)
    scores = scores.masked_fill(~seen, -torch.inf)
    if sinks is not None:
        column = sinks.to(scores.dtype)[:, None, None].expand(*scores.shape[:-1], 1)
        scores = torch.cat([scores, column], -1)
    weights = scores.softmax(-1, dtype=torch.promote_types(scores.dtype, torch.float32))[..., : k.shape[2]]
    weights = F.dropout(weights, dropout)
    return weights.to(v.dtype) @ v
