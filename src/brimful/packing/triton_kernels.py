"""Attention inside the rows of a packed sequence, forward and backward, for NVIDIA and AMD cards.

A program handles one tile: up to `BLOCK` queries (or keys) of one row and one head. It loops over the tiles of the same row
on the other side, so tokens of other rows are never touched. Scores are kept in registers. What is dropped is decided by a
hash of (seed, row, head, query, key), which forward and backward compute alike, so no mask is stored.

The gradient of the position bias is a sum over all rows of scores at the same distance. Adding it up with atomics takes a
third of a training step and gives other bits in every run. `_bias_gradient` makes it a matter of registers instead: tiles
of a row that are equally far from the diagonal have the same distances at the same places, so one program walks through
all such tiles of many rows and adds them up.
"""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.library import custom_op

from brimful.packing.sequence import BLOCK

LOG2E = 1.4426950408889634
SPLITS = 32
"""Programs that share the rows of one head and distance in `_bias_gradient`."""


@triton.jit
def _kept(seed, row, head, queries, keys, threshold):
    """Which attention weights are kept: two rounds of a 32-bit integer hash."""
    key = (seed + tl.cast(row, tl.int64) * 0x9E3779B1 + tl.cast(head, tl.int64) * 0x85EBCA77).to(tl.uint32)
    key = (key ^ (key >> 16)) * 0x7FEB352D
    key = (key ^ (key >> 15)) * 0x846CA68B
    x = (queries[:, None].to(tl.uint32) * 0x9E3779B1 + keys[None, :].to(tl.uint32)) ^ key
    x = (x ^ (x >> 16)) * 0x7FEB352D
    x = (x ^ (x >> 15)) * 0x846CA68B
    x = x ^ (x >> 16)
    return x >= threshold


@triton.jit
def _scores(
    q,
    k,
    bias,
    head,
    queries,
    keys,
    scale,
    radius,
    length_k,
    CAUSAL: tl.constexpr,
    BIAS: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Scores times log2(e), so that exp2 gives the weights; -inf where a key must not be seen."""
    scores = tl.dot(q, tl.trans(k), input_precision=PRECISION) * scale
    if BIAS:
        distance = keys[None, :] - queries[:, None]
        near = (distance > -radius) & (distance < radius)
        scores += (
            tl.load(bias + head * (2 * radius - 1) + distance + radius - 1, mask=near, other=0.0) * 1.4426950408889634
        )
    seen = keys[None, :] < length_k
    if CAUSAL:
        seen = seen & (keys[None, :] <= queries[:, None])
    return tl.where(seen, scores, float("-inf"))


@triton.jit(do_not_specialize=["radius", "size_q"])
def _forward(
    Q, K, V, OUT, LSE, bias, seed, tiles, starts_q, starts_k,
    q_token, q_head, k_token, k_head, v_token, v_head, o_token, o_head,
    scale, radius, size_q, threshold, keep_scale,
    GROUP: tl.constexpr, D: tl.constexpr, DP: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    CAUSAL: tl.constexpr, BIAS: tl.constexpr, DROP: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    tile, head = tl.program_id(0), tl.program_id(1)
    row, first = tl.load(tiles + 2 * tile), tl.load(tiles + 2 * tile + 1)
    dim, queries = tl.arange(0, DP), first + tl.arange(0, BLOCK_M)
    if row == -1:
        at = OUT + queries[:, None] * o_token + head * o_head + dim[None, :]
        tl.store(
            at, tl.zeros((BLOCK_M, DP), OUT.dtype.element_ty), mask=(queries[:, None] < size_q) & (dim[None, :] < D)
        )
        tl.store(LSE + head * size_q + queries, tl.zeros((BLOCK_M,), tl.float32), mask=queries < size_q)
    else:
        start_q, start_k = tl.load(starts_q + row), tl.load(starts_k + row)
        length_q, length_k = tl.load(starts_q + row + 1) - start_q, tl.load(starts_k + row + 1) - start_k
        here = (queries[:, None] < length_q) & (dim[None, :] < D)
        q = tl.load(Q + (start_q + queries[:, None]) * q_token + head * q_head + dim[None, :], mask=here, other=0.0)
        top = tl.full((BLOCK_M,), float("-inf"), tl.float32)
        total = tl.zeros((BLOCK_M,), tl.float32)
        out = tl.zeros((BLOCK_M, DP), tl.float32)
        if DROP:
            key = tl.load(seed)
        end = tl.minimum(length_k, first + BLOCK_M) if CAUSAL else length_k
        for begin in range(0, end, BLOCK_N):
            keys = begin + tl.arange(0, BLOCK_N)
            there = (keys[:, None] < length_k) & (dim[None, :] < D)
            k = tl.load(
                K + (start_k + keys[:, None]) * k_token + (head // GROUP) * k_head + dim[None, :], mask=there, other=0.0
            )
            v = tl.load(
                V + (start_k + keys[:, None]) * v_token + (head // GROUP) * v_head + dim[None, :], mask=there, other=0.0
            )
            scores = _scores(q, k, bias, head, queries, keys, scale, radius, length_k, CAUSAL, BIAS, PRECISION)
            higher = tl.maximum(top, tl.max(scores, 1))
            weights = tl.exp2(scores - higher[:, None])
            shrink = tl.exp2(top - higher)
            total = total * shrink + tl.sum(weights, 1)
            if DROP:
                weights = tl.where(_kept(key, row, head, queries, keys, threshold), weights, 0.0)
            out = out * shrink[:, None] + tl.dot(weights.to(v.dtype), v, input_precision=PRECISION)
            top = higher
        if DROP:
            out = out * keep_scale
        total = tl.where(total == 0.0, 1.0, total)  # a row without keys
        out = out / total[:, None]
        tl.store(
            OUT + (start_q + queries[:, None]) * o_token + head * o_head + dim[None, :],
            out.to(OUT.dtype.element_ty),
            mask=here,
        )
        tl.store(LSE + head * size_q + start_q + queries, top + tl.log2(total), mask=queries < length_q)


@triton.jit(do_not_specialize=["radius", "size_q"])
def _query_gradient(
    Q, K, V, OUT, dO, dQ, LSE, DELTA, bias, seed, tiles, starts_q, starts_k,
    q_token, q_head, k_token, k_head, v_token, v_head, o_token, o_head, g_token, g_head, dq_token, dq_head,
    scale, radius, size_q, threshold, keep_scale,
    GROUP: tl.constexpr, D: tl.constexpr, DP: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    CAUSAL: tl.constexpr, BIAS: tl.constexpr, DROP: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    tile, head = tl.program_id(0), tl.program_id(1)
    row, first = tl.load(tiles + 2 * tile), tl.load(tiles + 2 * tile + 1)
    dim, queries = tl.arange(0, DP), first + tl.arange(0, BLOCK_M)
    if row == -1:
        at = dQ + queries[:, None] * dq_token + head * dq_head + dim[None, :]
        tl.store(
            at, tl.zeros((BLOCK_M, DP), dQ.dtype.element_ty), mask=(queries[:, None] < size_q) & (dim[None, :] < D)
        )
    else:
        start_q, start_k = tl.load(starts_q + row), tl.load(starts_k + row)
        length_q, length_k = tl.load(starts_q + row + 1) - start_q, tl.load(starts_k + row + 1) - start_k
        here = (queries[:, None] < length_q) & (dim[None, :] < D)
        token = start_q + queries[:, None]
        q = tl.load(Q + token * q_token + head * q_head + dim[None, :], mask=here, other=0.0)
        o = tl.load(OUT + token * o_token + head * o_head + dim[None, :], mask=here, other=0.0)
        do = tl.load(dO + token * g_token + head * g_head + dim[None, :], mask=here, other=0.0)
        lse = tl.load(LSE + head * size_q + start_q + queries, mask=queries < length_q, other=float("inf"))
        delta = tl.sum(o.to(tl.float32) * do.to(tl.float32), 1)
        tl.store(DELTA + head * size_q + start_q + queries, delta, mask=queries < length_q)
        dq = tl.zeros((BLOCK_M, DP), tl.float32)
        if DROP:
            key = tl.load(seed)
        end = tl.minimum(length_k, first + BLOCK_M) if CAUSAL else length_k
        for begin in range(0, end, BLOCK_N):
            keys = begin + tl.arange(0, BLOCK_N)
            there = (keys[:, None] < length_k) & (dim[None, :] < D)
            k = tl.load(
                K + (start_k + keys[:, None]) * k_token + (head // GROUP) * k_head + dim[None, :], mask=there, other=0.0
            )
            v = tl.load(
                V + (start_k + keys[:, None]) * v_token + (head // GROUP) * v_head + dim[None, :], mask=there, other=0.0
            )
            scores = _scores(q, k, bias, head, queries, keys, scale, radius, length_k, CAUSAL, BIAS, PRECISION)
            weights = tl.exp2(scores - lse[:, None])
            dweights = tl.dot(do, tl.trans(v), input_precision=PRECISION)
            if DROP:
                dweights = tl.where(_kept(key, row, head, queries, keys, threshold), dweights * keep_scale, 0.0)
            dscores = weights * (dweights - delta[:, None])
            dq += tl.dot(dscores.to(k.dtype), k, input_precision=PRECISION)
        dq = dq * (scale * 0.6931471805599453)
        tl.store(dQ + token * dq_token + head * dq_head + dim[None, :], dq.to(dQ.dtype.element_ty), mask=here)


@triton.jit(do_not_specialize=["radius", "size_q", "size_k"])
def _key_gradient(
    Q, K, V, dO, dK, dV, LSE, DELTA, bias, seed, tiles, starts_q, starts_k,
    q_token, q_head, k_token, k_head, v_token, v_head, g_token, g_head, dk_token, dk_head, dv_token, dv_head,
    scale, radius, size_q, size_k, threshold, keep_scale,
    GROUP: tl.constexpr, D: tl.constexpr, DP: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    CAUSAL: tl.constexpr, BIAS: tl.constexpr, DROP: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    tile, kv_head = tl.program_id(0), tl.program_id(1)
    row, first = tl.load(tiles + 2 * tile), tl.load(tiles + 2 * tile + 1)
    dim, keys = tl.arange(0, DP), first + tl.arange(0, BLOCK_N)
    if row == -1:
        zeros = tl.zeros((BLOCK_N, DP), dK.dtype.element_ty)
        fill = (keys[:, None] < size_k) & (dim[None, :] < D)
        tl.store(dK + keys[:, None] * dk_token + kv_head * dk_head + dim[None, :], zeros, mask=fill)
        tl.store(dV + keys[:, None] * dv_token + kv_head * dv_head + dim[None, :], zeros, mask=fill)
    else:
        start_q, start_k = tl.load(starts_q + row), tl.load(starts_k + row)
        length_q, length_k = tl.load(starts_q + row + 1) - start_q, tl.load(starts_k + row + 1) - start_k
        there = (keys[:, None] < length_k) & (dim[None, :] < D)
        token = start_k + keys[:, None]
        k = tl.load(K + token * k_token + kv_head * k_head + dim[None, :], mask=there, other=0.0)
        v = tl.load(V + token * v_token + kv_head * v_head + dim[None, :], mask=there, other=0.0)
        dk = tl.zeros((BLOCK_N, DP), tl.float32)
        dv = tl.zeros((BLOCK_N, DP), tl.float32)
        if DROP:
            key = tl.load(seed)
        for head in range(kv_head * GROUP, kv_head * GROUP + GROUP):
            begin_q = (first // BLOCK_M) * BLOCK_M if CAUSAL else 0
            for begin in range(begin_q, length_q, BLOCK_M):
                queries = begin + tl.arange(0, BLOCK_M)
                here = (queries[:, None] < length_q) & (dim[None, :] < D)
                q = tl.load(
                    Q + (start_q + queries[:, None]) * q_token + head * q_head + dim[None, :], mask=here, other=0.0
                )
                do = tl.load(
                    dO + (start_q + queries[:, None]) * g_token + head * g_head + dim[None, :], mask=here, other=0.0
                )
                lse = tl.load(LSE + head * size_q + start_q + queries, mask=queries < length_q, other=float("inf"))
                delta = tl.load(DELTA + head * size_q + start_q + queries, mask=queries < length_q, other=0.0)
                scores = _scores(q, k, bias, head, queries, keys, scale, radius, length_k, CAUSAL, BIAS, PRECISION)
                weights = tl.exp2(scores - lse[:, None])
                dweights = tl.dot(do, tl.trans(v), input_precision=PRECISION)
                if DROP:
                    kept = _kept(key, row, head, queries, keys, threshold)
                    dweights = tl.where(kept, dweights * keep_scale, 0.0)
                    used = tl.where(kept, weights * keep_scale, 0.0)
                else:
                    used = weights
                dv += tl.dot(tl.trans(used.to(do.dtype)), do, input_precision=PRECISION)
                dscores = weights * (dweights - delta[:, None])
                dk += tl.dot(tl.trans(dscores.to(q.dtype)), q, input_precision=PRECISION)
        dk = dk * (scale * 0.6931471805599453)
        tl.store(dK + token * dk_token + kv_head * dk_head + dim[None, :], dk.to(dK.dtype.element_ty), mask=there)
        tl.store(dV + token * dv_token + kv_head * dv_head + dim[None, :], dv.to(dV.dtype.element_ty), mask=there)


@triton.jit(do_not_specialize=["radius", "size_q", "rows", "lowest"])
def _bias_gradient(
    Q, K, V, dO, LSE, DELTA, bias, seed, starts_q, starts_k, PARTIAL,
    q_token, q_head, k_token, k_head, v_token, v_head, g_token, g_head,
    scale, radius, size_q, rows, lowest, threshold, keep_scale,
    GROUP: tl.constexpr, D: tl.constexpr, DP: tl.constexpr, B: tl.constexpr,
    CAUSAL: tl.constexpr, DROP: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Sum of the scores' gradients over all tiles of the program's rows that are `offset` tiles off the diagonal."""
    head, place, split = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    heads, places, splits = tl.num_programs(0), tl.num_programs(1), tl.num_programs(2)
    offset = lowest + place
    dim, inside = tl.arange(0, DP), tl.arange(0, B)
    total = tl.zeros((B, B), tl.float32)
    if DROP:
        key = tl.load(seed)
    for row in range(split, rows, splits):
        start_q, start_k = tl.load(starts_q + row), tl.load(starts_k + row)
        length_q, length_k = tl.load(starts_q + row + 1) - start_q, tl.load(starts_k + row + 1) - start_k
        begin = tl.maximum(0, -offset)
        end = tl.minimum(tl.cdiv(length_q, B), tl.cdiv(length_k, B) - offset)
        for block in range(begin, end):
            queries, keys = block * B + inside, (block + offset) * B + inside
            here = (queries[:, None] < length_q) & (dim[None, :] < D)
            there = (keys[:, None] < length_k) & (dim[None, :] < D)
            q = tl.load(Q + (start_q + queries[:, None]) * q_token + head * q_head + dim[None, :], mask=here, other=0.0)
            do = tl.load(
                dO + (start_q + queries[:, None]) * g_token + head * g_head + dim[None, :], mask=here, other=0.0
            )
            k = tl.load(
                K + (start_k + keys[:, None]) * k_token + (head // GROUP) * k_head + dim[None, :], mask=there, other=0.0
            )
            v = tl.load(
                V + (start_k + keys[:, None]) * v_token + (head // GROUP) * v_head + dim[None, :], mask=there, other=0.0
            )
            lse = tl.load(LSE + head * size_q + start_q + queries, mask=queries < length_q, other=float("inf"))
            delta = tl.load(DELTA + head * size_q + start_q + queries, mask=queries < length_q, other=0.0)
            scores = _scores(q, k, bias, head, queries, keys, scale, radius, length_k, CAUSAL, True, PRECISION)
            weights = tl.exp2(scores - lse[:, None])
            dweights = tl.dot(do, tl.trans(v), input_precision=PRECISION)
            if DROP:
                dweights = tl.where(_kept(key, row, head, queries, keys, threshold), dweights * keep_scale, 0.0)
            total += weights * (dweights - delta[:, None])
    at = PARTIAL + ((split * heads + head) * places + place) * B * B
    tl.store(at + inside[:, None] * B + inside[None, :], total)


def _empty_outputs(q: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    out = torch.empty((q.shape[0], q.shape[1], v.shape[2]), dtype=q.dtype, device=q.device)
    return out, torch.empty((q.shape[1], q.shape[0]), dtype=torch.float32, device=q.device)


def _empty_gradients(*tensors: Tensor) -> list[Tensor]:
    """Contiguous, whatever the strides of the tensors."""
    return [torch.empty(tensor.shape, dtype=tensor.dtype, device=tensor.device) for tensor in tensors]


def forward(
    q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, seed: Tensor | None,
    starts_q: Tensor, tiles_q: Tensor, starts_k: Tensor,
    *, scale: float, causal: bool, dropout: float, config: tuple[int, int] = (4, 2),
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """The output, and the log2 of the sum of weights that backward needs."""
    out, lse = _empty_outputs(q, v)
    _forward[(tiles_q.shape[0], q.shape[1])](
        q, k, v, out, lse, bias if bias is not None else q, seed if seed is not None else starts_q,
        tiles_q, starts_q, starts_k,
        *q.stride()[:2], *k.stride()[:2], *v.stride()[:2], *out.stride()[:2],
        scale * LOG2E, *_common(q, bias, dropout), **_constants(q, k, bias, causal, dropout),
        BLOCK_M=BLOCK, BLOCK_N=BLOCK, num_warps=config[0], num_stages=config[1],
    )  # fmt: skip
    return out, lse


def backward(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, bias: Tensor | None, seed: Tensor | None,
    starts_q: Tensor, tiles_q: Tensor, starts_k: Tensor, tiles_k: Tensor,
    *, scale: float, causal: bool, dropout: float, bias_needs_grad: bool, config: tuple[int, int] = (4, 2),
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """The gradients of q, k, v and the bias; that of the bias is empty unless it is needed."""
    dq, dk, dv = _empty_gradients(q, k, v)
    delta = torch.empty_like(lse)
    common, constants = _common(q, bias, dropout), _constants(q, k, bias, causal, dropout)
    table, key = bias if bias is not None else q, seed if seed is not None else starts_q
    strides = (*q.stride()[:2], *k.stride()[:2], *v.stride()[:2])
    blocks: dict[str, Any] = {"BLOCK_M": BLOCK, "BLOCK_N": BLOCK, "num_warps": config[0], "num_stages": config[1]}
    _query_gradient[(tiles_q.shape[0], q.shape[1])](
        q, k, v, out, grad, dq, lse, delta, table, key, tiles_q, starts_q, starts_k,
        *strides, *out.stride()[:2], *grad.stride()[:2], *dq.stride()[:2],
        scale * LOG2E, *common, **constants, **blocks,
    )  # fmt: skip
    radius, size_q, *drop = common
    _key_gradient[(tiles_k.shape[0], k.shape[1])](
        q, k, v, grad, dk, dv, lse, delta, table, key, tiles_k, starts_q, starts_k,
        *strides, *grad.stride()[:2], *dk.stride()[:2], *dv.stride()[:2],
        scale * LOG2E, radius, size_q, k.shape[0], *drop, **constants, **blocks,
    )  # fmt: skip
    if bias is None or not bias_needs_grad:
        return dq, dk, dv, q.new_empty(0)
    farthest = -(-radius // BLOCK)
    offsets = farthest if causal else 2 * farthest - 1
    partial = torch.empty((SPLITS, q.shape[1], offsets, BLOCK, BLOCK), dtype=torch.float32, device=q.device)
    constants.pop("BIAS")
    _bias_gradient[(q.shape[1], offsets, SPLITS)](
        q, k, v, grad, lse, delta, table, key, starts_q, starts_k, partial,
        *strides, *grad.stride()[:2], scale * LOG2E, radius, size_q, starts_q.shape[0] - 1, 1 - farthest, *drop,
        **constants, B=BLOCK, num_warps=config[0], num_stages=config[1],
    )  # fmt: skip
    return dq, dk, dv, _by_distance(partial.sum(0), radius).to(bias.dtype)


def _by_distance(tiles: Tensor, radius: int) -> Tensor:
    """From [head, offset, query, key], the first offset being the lowest, to [head, distance]: sums along the diagonals."""
    heads, offsets, block, _ = tiles.shape
    skewed = torch.nn.functional.pad(
        tiles.flip(2), (0, block)
    )  # line l moves l places to the right: diagonals are columns
    columns = skewed.reshape(heads, offsets, -1)[..., : block * (2 * block - 1)]
    columns = columns.reshape(heads, offsets, block, 2 * block - 1).sum(
        2
    )  # distances 1 - block … block - 1 of each offset
    table = tiles.new_zeros((heads, offsets + 1, block))
    table[:, :-1, 1:] += columns[..., : block - 1]
    table[:, 1:] += columns[..., block - 1 :]
    lowest = -(-(radius) // block) * block  # the first column is distance -lowest
    table = table.flatten(1)[:, lowest - radius + 1 :][:, : 2 * radius - 1]
    return torch.nn.functional.pad(table, (0, 2 * radius - 1 - table.shape[1]))


def _common(q: Tensor, bias: Tensor | None, dropout: float) -> tuple[int, int, int, float]:
    radius = (bias.shape[1] + 1) // 2 if bias is not None else 0
    return radius, q.shape[0], int(dropout * 2**32), 1.0 / (1.0 - dropout)


def _constants(q: Tensor, k: Tensor, bias: Tensor | None, causal: bool, dropout: float) -> dict[str, Any]:
    return {
        "GROUP": q.shape[1] // k.shape[1],
        "D": q.shape[2],
        "DP": max(16, triton.next_power_of_2(q.shape[2])),
        "CAUSAL": causal,
        "BIAS": bias is not None,
        "DROP": dropout > 0,
        "PRECISION": "ieee" if q.dtype == torch.float32 else "tf32",  # ignored in half precision
    }


@custom_op("brimful::packed_attention", mutates_args=())
def packed_attention(
    q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, seed: Tensor | None,
    starts_q: Tensor, tiles_q: Tensor, starts_k: Tensor, tiles_k: Tensor,
    scale: float, causal: bool, dropout: float,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    return forward(q, k, v, bias, seed, starts_q, tiles_q, starts_k, scale=scale, causal=causal, dropout=dropout)


@packed_attention.register_fake
def _(q, k, v, bias, seed, starts_q, tiles_q, starts_k, tiles_k, scale, causal, dropout):
    return _empty_outputs(q, v)


@custom_op("brimful::packed_attention_backward", mutates_args=())
def packed_attention_backward(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, bias: Tensor | None, seed: Tensor | None,
    starts_q: Tensor, tiles_q: Tensor, starts_k: Tensor, tiles_k: Tensor,
    scale: float, causal: bool, dropout: float, bias_needs_grad: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    return backward(
        grad, q, k, v, out, lse, bias, seed, starts_q, tiles_q, starts_k, tiles_k,
        scale=scale, causal=causal, dropout=dropout, bias_needs_grad=bias_needs_grad,
    )  # fmt: skip


@packed_attention_backward.register_fake
def _(grad, q, k, v, out, lse, bias, seed, sq, tq, sk, tk, scale, causal, dropout, bias_needs_grad):
    return (*_empty_gradients(q, k, v), torch.empty_like(bias) if bias_needs_grad else q.new_empty(0))


def _save(ctx, inputs, output):
    q, k, v, bias, seed, starts_q, tiles_q, starts_k, tiles_k, ctx.scale, ctx.causal, ctx.dropout = inputs
    ctx.save_for_backward(q, k, v, *output, bias, seed, starts_q, tiles_q, starts_k, tiles_k)


def _backward(ctx, grad, _):
    wants_bias = ctx.needs_input_grad[3]
    dq, dk, dv, dbias = packed_attention_backward(
        grad, *ctx.saved_tensors, ctx.scale, ctx.causal, ctx.dropout, wants_bias
    )
    return dq, dk, dv, dbias if wants_bias else None, *[None] * 8


packed_attention.register_autograd(_backward, setup_context=_save)


@triton.jit(do_not_specialize=["words", "width"])
def _cross_entropy(
    logits, labels, losses, factor, stride, words, width, ignore_index, smoothing, scale, cap,
    WORDS: tl.constexpr, SOFTCAP: tl.constexpr, SMOOTH: tl.constexpr, GRADIENT: tl.constexpr, SCALED: tl.constexpr,
):  # fmt: skip
    """One token per program: its loss, and if wanted the gradient of its logits in their place."""
    token = tl.program_id(0).to(tl.int64)
    label = tl.load(labels + token)
    line = logits + token * stride
    inside = tl.arange(0, WORDS)
    if label == ignore_index:
        tl.store(losses + token, 0.0)
        if GRADIENT:
            for begin in range(0, width, WORDS):
                tl.store(
                    line + begin + inside, tl.zeros((WORDS,), logits.dtype.element_ty), mask=begin + inside < width
                )
    else:
        top = tl.full((WORDS,), float("-inf"), tl.float32)
        total = tl.zeros((WORDS,), tl.float32)
        plain = tl.zeros((WORDS,), tl.float32)
        for begin in range(0, words, WORDS):
            here = begin + inside < words
            score = tl.load(line + begin + inside, mask=here, other=float("-inf")).to(tl.float32) * scale
            if SOFTCAP:
                score = tl.where(here, cap * (1.0 - 2.0 / (tl.exp(2.0 * score / cap) + 1.0)), float("-inf"))
            higher = tl.maximum(top, score)
            total = tl.where(here, total * tl.exp(top - higher) + tl.exp(score - higher), total)
            top = higher
            if SMOOTH:
                plain += tl.where(here, score, 0.0)
        highest = tl.max(top, 0)
        log_sum = highest + tl.log(tl.sum(total * tl.exp(top - highest), 0))
        aim = tl.load(line + label).to(tl.float32) * scale
        if SOFTCAP:
            aim = cap * (1.0 - 2.0 / (tl.exp(2.0 * aim / cap) + 1.0))
        loss = log_sum - (1.0 - smoothing) * aim
        if SMOOTH:
            loss -= smoothing * tl.sum(plain, 0) / words
        tl.store(losses + token, loss)
        if GRADIENT:
            for begin in range(0, width, WORDS):
                here = begin + inside < words
                score = tl.load(line + begin + inside, mask=here, other=0.0).to(tl.float32) * scale
                if SOFTCAP:
                    score = cap * (1.0 - 2.0 / (tl.exp(2.0 * score / cap) + 1.0))
                gradient = tl.exp(score - log_sum) - smoothing / words
                gradient -= tl.where(begin + inside == label, 1.0 - smoothing, 0.0)
                if SOFTCAP:
                    gradient *= 1.0 - (score / cap) * (score / cap)
                if SCALED:
                    gradient *= tl.load(factor)
                gradient = tl.where(here, gradient * scale, 0.0)
                tl.store(line + begin + inside, gradient.to(logits.dtype.element_ty), mask=begin + inside < width)


def cross_entropy(
    logits: Tensor, words: int, labels: Tensor,
    ignore_index: int, smoothing: float, scale: float, softcap: float | None, wanted: bool, factor: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """The sum of the losses over the first `words` columns. If wanted, `logits` are overwritten with their gradient."""
    losses = torch.empty(len(labels), dtype=torch.float32, device=logits.device)
    _cross_entropy[(len(labels),)](
        logits, labels, losses, losses if factor is None else factor, logits.stride(0), words, logits.shape[1], ignore_index, smoothing, scale, softcap or 1.0,
        WORDS=4096, SOFTCAP=softcap is not None, SMOOTH=smoothing > 0, GRADIENT=wanted, SCALED=factor is not None, num_warps=8,
    )  # fmt: skip
    return losses.sum()
