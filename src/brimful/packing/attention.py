"""Attention inside each row of packed sequences.

    out = attention(q, k, v, rows, causal=True, scale=0.125)                  # self-attention of a causal model
    out = attention(q, k, v, target, source, scale=1.0)                       # cross-attention
    out = attention(q, k, v, rows, bias=table, scale=1.0, dropout=0.1)        # T5's encoder

On a GPU and in bf16 or fp16 this runs the kernels of `triton_kernels.py`. Elsewhere a plain implementation pads the rows; it
is what tests compare the kernels with.
"""

from importlib.util import find_spec

import torch
import torch.nn.functional as F
from torch import Tensor

from brimful.packing.sequence import Boundaries

if find_spec("triton") is not None:  # comes with torch for GPUs
    from brimful.packing.triton_kernels import packed_attention

HALF = (torch.bfloat16, torch.float16)


def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    queries: Boundaries,
    keys: Boundaries | None = None,
    *,
    scale: float,
    causal: bool = False,
    bias: Tensor | None = None,
    dropout: float = 0.0,
) -> Tensor:
    """Softmax attention of every row to itself, or to the row of the same number in `keys`.

    Args:
        q: Queries, [token, head, dim].
        k: Keys, [token, head, dim]; the number of query heads is a multiple of theirs.
        v: Values, like the keys.
        queries: Where the rows of `q` begin and end.
        keys: Where the rows of `k` and `v` do. Default: as in `q`.
        scale: Factor of the scores.
        causal: A token sees only itself and those before it in its row.
        bias: Added to the scores by distance, [head, 2 * radius - 1], from -(radius - 1) to radius - 1. No row may be
            longer than the radius.
        dropout: Share of attention weights to drop.

    Returns:
        [token, head, dim]; zeros after the last row.
    """
    keys = queries if keys is None else keys
    if q.is_cuda and q.dtype in HALF:
        seed = torch.randint(2**31, (1,), device=q.device) if dropout else None
        out, _ = packed_attention(
            q, k, v, bias, seed, queries.starts, queries.tiles, keys.starts, keys.tiles, scale, causal, dropout
        )
        return out
    return _reference(q, k, v, queries, keys, scale, causal, bias, dropout)


def _reference(
    q: Tensor, k: Tensor, v: Tensor, queries: Boundaries, keys: Boundaries,
    scale: float, causal: bool, bias: Tensor | None, dropout: float,
) -> Tensor:  # fmt: skip
    """Pads the rows, [row, head, token, dim], and takes the tokens out again."""
    at_q, seen_q = _padded_index(queries, q.shape[0])
    at_k, seen_k = _padded_index(keys, k.shape[0])
    group = q.shape[1] // k.shape[1]
    wide_q = q[at_q].transpose(1, 2)
    wide_k, wide_v = (t[at_k].transpose(1, 2).repeat_interleave(group, dim=1) for t in (k, v))
    scores = wide_q @ wide_k.mT * scale
    distance = torch.arange(at_k.shape[1], device=q.device) - torch.arange(at_q.shape[1], device=q.device)[:, None]
    if bias is not None:
        radius = (bias.shape[1] + 1) // 2
        scores = scores + bias[:, (distance + radius - 1).clamp(0, 2 * radius - 2)].to(scores.dtype)
    seen = seen_k[:, None, None, :]
    if causal:
        seen = seen & (distance <= 0)
    scores = scores.masked_fill(~seen, torch.finfo(scores.dtype).min)  # not -inf, since rows without tokens see nothing
    weights = F.dropout(scores.softmax(-1, dtype=torch.promote_types(scores.dtype, torch.float32)), dropout)
    out = (weights.to(v.dtype) @ wide_v).transpose(1, 2)
    packed = torch.zeros((q.shape[0], *out.shape[2:]), dtype=q.dtype, device=q.device)
    return packed.index_put((at_q[seen_q],), out[seen_q].to(q.dtype))


def _padded_index(rows: Boundaries, size: int) -> tuple[Tensor, Tensor]:
    """For [row, place]: the token there, and whether there is one."""
    starts = rows.starts.long()
    lengths = starts.diff()
    place = torch.arange(int(lengths.max()), device=starts.device)
    return (starts[:-1, None] + place).clamp(max=size - 1), place < lengths[:, None]
