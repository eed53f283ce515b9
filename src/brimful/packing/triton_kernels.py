"""Attention inside the rows of a packed sequence, forward and backward, for NVIDIA and AMD cards.

A program handles one tile: up to `BLOCK` queries (or keys) of one row and one head. It loops over the tiles of the same row
on the other side, so tokens of other rows are never touched. Scores are kept in registers. What is dropped is decided by a
hash of (seed, row, head, query, key), which forward and backward compute alike, so no mask is stored.

The gradient of the position bias is a sum over all rows of scores at the same distance. Adding it up with atomics takes a
third of a training step and gives other bits in every run. `_bias_gradient` makes it a matter of registers instead: tiles
of a row that are equally far from the diagonal have the same distances at the same places, so one program walks through
all such tiles of many rows and adds them up. Beyond its radius the bias is the same at all distances, so the tiles there
share one more program.

Compiled code calls `packed_attention` as one opaque operation. As a `triton_op`, which lets it launch the kernels itself, a
step of T5 took the host 8 ms less and compiling 24 s more.
"""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.library import custom_op
from triton.runtime.errors import OutOfResources

from brimful.errors import TaskError
from brimful.packing.sequence import BLOCK

SPLITS = 32
"""Programs that share the rows of one head and distance in `_bias_gradient`."""
SETTINGS = [{"num_warps": 4, "num_stages": 2}, {"num_warps": 4, "num_stages": 1}]
SETTINGS_WIDE = [
    *({"num_warps": 8, "num_stages": stages} for stages in (2, 1)),
    *({"num_warps": 8, "num_stages": 1, "N": tokens} for tokens in (32, 16)),
]
"""For heads of more than 128, such as Gemma's of 256: two sums of 64 × 256 do not fit the registers of four warps. Backward takes
128 to 136 KiB of shared memory with 64 tokens of the other side at a time, 96 to 100 with 32, and 80 with 16."""
_setting: dict[tuple[str, int, torch.device], int] = {}
"""Of each kernel, by the width of a head: the setting that ran."""


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
def _row(starts, row):
    """Where a row begins, and its length."""
    start = tl.load(starts + row)
    return start, tl.load(starts + row + 1) - start


@triton.jit
def _at(tensor, start, tokens, head, per_token, per_head, dim):
    """Pointers to [token, dim] of one head, for tokens counted from the start of their row."""
    base = tensor + tl.cast(start, tl.int64) * per_token + tl.cast(head, tl.int64) * per_head
    return base + tokens[:, None] * per_token + dim[None, :]


@triton.jit
def _load(tensor, start, tokens, length, head, per_token, per_head, dim, D: tl.constexpr):
    """These tokens of a row; zeros beyond its length."""
    inside = (tokens[:, None] < length) & (dim[None, :] < D)
    return tl.load(_at(tensor, start, tokens, head, per_token, per_head, dim), mask=inside, other=0.0)


@triton.jit
def _store(tensor, value, start, tokens, length, head, per_token, per_head, dim, D: tl.constexpr):
    inside = (tokens[:, None] < length) & (dim[None, :] < D)
    at = _at(tensor, start, tokens, head, per_token, per_head, dim)
    tl.store(at, value.to(tensor.dtype.element_ty), mask=inside)


@triton.jit
def _fill(tensor, first, size, head, per_token, per_head, dim, D: tl.constexpr, DP: tl.constexpr, B: tl.constexpr):
    """Zeros for tokens after the last row."""
    zeros = tl.zeros((B, DP), tl.float32)
    _store(tensor, zeros, first, tl.arange(0, B), size - first, head, per_token, per_head, dim, D)


@triton.jit
def _scores(
    q, k, bias, head, queries, keys, length_k,
    SCALE: tl.constexpr, CAUSAL: tl.constexpr, WINDOW: tl.constexpr, SOFTCAP: tl.constexpr, RADIUS: tl.constexpr,
):  # fmt: skip
    """Scores times log2(e), so that exp2 gives the weights, -inf where a key must not be seen; and the softcap's slope."""
    scores = tl.dot(q, tl.trans(k)) * SCALE
    slope = 1.0
    if SOFTCAP > 0.0:
        capped = 1.0 - 2.0 / (tl.exp(scores * (2.0 / SOFTCAP)) + 1.0)  # tanh
        scores = SOFTCAP * capped
        slope = 1.0 - capped * capped
    scores = scores * 1.4426950408889634
    if RADIUS:
        distance = tl.maximum(tl.minimum(keys[None, :] - queries[:, None], RADIUS - 1), 1 - RADIUS)
        added = tl.load(bias + head * (2 * RADIUS - 1) + RADIUS - 1 + distance).to(
            tl.float32
        )  # a table of bf16 weights is bf16
        scores += added * 1.4426950408889634
    seen = keys[None, :] < length_k
    if CAUSAL:
        seen = seen & (keys[None, :] <= queries[:, None])
    if WINDOW:
        seen = seen & (keys[None, :] > queries[:, None] - WINDOW)
    return tl.where(seen, scores, float("-inf")), slope


@triton.jit
def _keys_seen(first, length_k, CAUSAL: tl.constexpr, WINDOW: tl.constexpr, B: tl.constexpr):
    """Where the keys begin and end that a tile of queries sees."""
    begin = tl.maximum(0, (first - WINDOW + 1) // B * B) if WINDOW else 0
    end = tl.minimum(length_k, first + B) if CAUSAL else length_k
    return begin, end


@triton.jit
def _queries_in_backward(
    Q, dO, LSE, DELTA, start, queries, length, size, head, q_token, q_head, g_token, g_head, dim, D: tl.constexpr
):
    """These queries of a row with their gradients. Those beyond its length have no weights."""
    q = _load(Q, start, queries, length, head, q_token, q_head, dim, D)
    do = _load(dO, start, queries, length, head, g_token, g_head, dim, D)
    lse = tl.load(LSE + head * size + start + queries, mask=queries < length, other=float("inf"))
    delta = tl.load(DELTA + head * size + start + queries, mask=queries < length, other=0.0)
    return q, do, lse, delta


@triton.jit
def _tile_gradient(
    q, k, v, do, lse, delta, bias, key, row, head, queries, keys, length_k,
    SCALE: tl.constexpr, CAUSAL: tl.constexpr, WINDOW: tl.constexpr, SOFTCAP: tl.constexpr, RADIUS: tl.constexpr,
    THRESHOLD: tl.constexpr, KEEP_SCALE: tl.constexpr,
):  # fmt: skip
    """The weights that were used, the gradient of the capped scores, and the softcap's slope."""
    scores, slope = _scores(q, k, bias, head, queries, keys, length_k, SCALE, CAUSAL, WINDOW, SOFTCAP, RADIUS)
    weights = tl.exp2(scores - lse[:, None])
    dweights = tl.dot(do, tl.trans(v))
    used = weights
    if THRESHOLD:
        kept = _kept(key, row, head, queries, keys, THRESHOLD)
        dweights = tl.where(kept, dweights * KEEP_SCALE, 0.0)
        used = tl.where(kept, weights * KEEP_SCALE, 0.0)
    return used, weights * (dweights - delta[:, None]), slope


@triton.jit(do_not_specialize=["size_q"])
def _forward(
    Q, K, V, OUT, LSE, bias, sinks, seed, tiles, starts_q, starts_k,
    q_token, q_head, k_token, k_head, v_token, v_head, o_token, o_head, size_q, SINKS: tl.constexpr,
    SCALE: tl.constexpr, CAUSAL: tl.constexpr, WINDOW: tl.constexpr, SOFTCAP: tl.constexpr, RADIUS: tl.constexpr,
    THRESHOLD: tl.constexpr, KEEP_SCALE: tl.constexpr, GROUP: tl.constexpr, D: tl.constexpr, DP: tl.constexpr, B: tl.constexpr,
    N: tl.constexpr,
):  # fmt: skip
    tile, head = tl.program_id(0), tl.program_id(1)
    row, first = tl.load(tiles + 2 * tile), tl.load(tiles + 2 * tile + 1)
    dim, queries = tl.arange(0, DP), first + tl.arange(0, B)
    if row == -1:
        _fill(OUT, first, size_q, head, o_token, o_head, dim, D, DP, B)
        tl.store(LSE + head * size_q + queries, tl.zeros((B,), tl.float32), mask=queries < size_q)
    else:
        start_q, length_q = _row(starts_q, row)
        start_k, length_k = _row(starts_k, row)
        q = _load(Q, start_q, queries, length_q, head, q_token, q_head, dim, D)
        top = tl.full((B,), float("-inf"), tl.float32)
        total = tl.zeros((B,), tl.float32)
        out = tl.zeros((B, DP), tl.float32)
        key = tl.load(seed) if THRESHOLD else 0
        begin_k, end_k = _keys_seen(first, length_k, CAUSAL, WINDOW, B)
        for begin in range(begin_k, end_k, N):
            keys = begin + tl.arange(0, N)
            k = _load(K, start_k, keys, length_k, head // GROUP, k_token, k_head, dim, D)
            v = _load(V, start_k, keys, length_k, head // GROUP, v_token, v_head, dim, D)
            scores, _ = _scores(q, k, bias, head, queries, keys, length_k, SCALE, CAUSAL, WINDOW, SOFTCAP, RADIUS)
            higher = tl.maximum(top, tl.max(scores, 1))
            safe = tl.where(higher == float("-inf"), 0.0, higher) if WINDOW else higher  # a tile before the window
            weights = tl.exp2(scores - safe[:, None])
            shrink = tl.exp2(top - safe)
            total = total * shrink + tl.sum(weights, 1)
            if THRESHOLD:
                weights = tl.where(_kept(key, row, head, queries, keys, THRESHOLD), weights, 0.0)
            out = out * shrink[:, None] + tl.dot(weights.to(v.dtype), v)
            top = higher
        if SINKS:  # a key that every query sees, without a value
            sink = tl.load(sinks + head).to(tl.float32) * 1.4426950408889634
            higher = tl.maximum(top, sink)
            shrink = tl.exp2(top - higher)
            total = total * shrink + tl.exp2(sink - higher)
            out = out * shrink[:, None]
            top = higher
        total = tl.where(total == 0.0, 1.0, total)  # a row without keys
        _store(OUT, out * KEEP_SCALE / total[:, None], start_q, queries, length_q, head, o_token, o_head, dim, D)
        tl.store(LSE + head * size_q + start_q + queries, top + tl.log2(total), mask=queries < length_q)


@triton.jit(do_not_specialize=["size_q"])
def _query_gradient(
    Q, K, V, OUT, dO, dQ, LSE, DELTA, bias, seed, tiles, starts_q, starts_k,
    q_token, q_head, k_token, k_head, v_token, v_head, o_token, o_head, g_token, g_head, dq_token, dq_head, size_q,
    SCALE: tl.constexpr, CAUSAL: tl.constexpr, WINDOW: tl.constexpr, SOFTCAP: tl.constexpr, RADIUS: tl.constexpr,
    THRESHOLD: tl.constexpr, KEEP_SCALE: tl.constexpr, GROUP: tl.constexpr, D: tl.constexpr, DP: tl.constexpr, B: tl.constexpr,
    N: tl.constexpr,
):  # fmt: skip
    """And `DELTA`, the sum of output times gradient of each query, which the other kernels need."""
    tile, head = tl.program_id(0), tl.program_id(1)
    row, first = tl.load(tiles + 2 * tile), tl.load(tiles + 2 * tile + 1)
    dim, queries = tl.arange(0, DP), first + tl.arange(0, B)
    if row == -1:
        _fill(dQ, first, size_q, head, dq_token, dq_head, dim, D, DP, B)
        tl.store(DELTA + head * size_q + queries, tl.zeros((B,), tl.float32), mask=queries < size_q)
    else:
        start_q, length_q = _row(starts_q, row)
        start_k, length_k = _row(starts_k, row)
        q = _load(Q, start_q, queries, length_q, head, q_token, q_head, dim, D)
        o = _load(OUT, start_q, queries, length_q, head, o_token, o_head, dim, D)
        do = _load(dO, start_q, queries, length_q, head, g_token, g_head, dim, D)
        lse = tl.load(LSE + head * size_q + start_q + queries, mask=queries < length_q, other=float("inf"))
        delta = tl.sum(o.to(tl.float32) * do.to(tl.float32), 1)
        tl.store(DELTA + head * size_q + start_q + queries, delta, mask=queries < length_q)
        dq = tl.zeros((B, DP), tl.float32)
        key = tl.load(seed) if THRESHOLD else 0
        begin_k, end_k = _keys_seen(first, length_k, CAUSAL, WINDOW, B)
        for begin in range(begin_k, end_k, N):
            keys = begin + tl.arange(0, N)
            k = _load(K, start_k, keys, length_k, head // GROUP, k_token, k_head, dim, D)
            v = _load(V, start_k, keys, length_k, head // GROUP, v_token, v_head, dim, D)
            _, dscores, slope = _tile_gradient(
                q, k, v, do, lse, delta, bias, key, row, head, queries, keys, length_k,
                SCALE, CAUSAL, WINDOW, SOFTCAP, RADIUS, THRESHOLD, KEEP_SCALE,
            )  # fmt: skip
            dq += tl.dot((dscores * slope).to(k.dtype), k)
        _store(dQ, dq * SCALE, start_q, queries, length_q, head, dq_token, dq_head, dim, D)


@triton.jit(do_not_specialize=["size_q", "size_k"])
def _key_gradient(
    Q, K, V, dO, dK, dV, LSE, DELTA, bias, seed, tiles, starts_q, starts_k,
    q_token, q_head, k_token, k_head, v_token, v_head, g_token, g_head, dk_token, dk_head, dv_token, dv_head,
    size_q, size_k,
    SCALE: tl.constexpr, CAUSAL: tl.constexpr, WINDOW: tl.constexpr, SOFTCAP: tl.constexpr, RADIUS: tl.constexpr,
    THRESHOLD: tl.constexpr, KEEP_SCALE: tl.constexpr, GROUP: tl.constexpr, D: tl.constexpr, DP: tl.constexpr, B: tl.constexpr,
    N: tl.constexpr,
):  # fmt: skip
    tile, kv_head = tl.program_id(0), tl.program_id(1)
    row, first = tl.load(tiles + 2 * tile), tl.load(tiles + 2 * tile + 1)
    dim, keys = tl.arange(0, DP), first + tl.arange(0, B)
    if row == -1:
        _fill(dK, first, size_k, kv_head, dk_token, dk_head, dim, D, DP, B)
        _fill(dV, first, size_k, kv_head, dv_token, dv_head, dim, D, DP, B)
    else:
        start_q, length_q = _row(starts_q, row)
        start_k, length_k = _row(starts_k, row)
        k = _load(K, start_k, keys, length_k, kv_head, k_token, k_head, dim, D)
        v = _load(V, start_k, keys, length_k, kv_head, v_token, v_head, dim, D)
        dk = tl.zeros((B, DP), tl.float32)
        dv = tl.zeros((B, DP), tl.float32)
        key = tl.load(seed) if THRESHOLD else 0
        begin_q = first // B * B if CAUSAL else 0
        end_q = tl.minimum(length_q, first + B + WINDOW) if WINDOW else length_q
        for head in range(kv_head * GROUP, kv_head * GROUP + GROUP):
            for begin in range(begin_q, end_q, N):
                queries = begin + tl.arange(0, N)
                q, do, lse, delta = _queries_in_backward(
                    Q, dO, LSE, DELTA, start_q, queries, length_q, size_q, head, q_token, q_head, g_token, g_head, dim, D,
                )  # fmt: skip
                used, dscores, slope = _tile_gradient(
                    q, k, v, do, lse, delta, bias, key, row, head, queries, keys, length_k,
                    SCALE, CAUSAL, WINDOW, SOFTCAP, RADIUS, THRESHOLD, KEEP_SCALE,
                )  # fmt: skip
                dv += tl.dot(tl.trans(used.to(do.dtype)), do)
                dk += tl.dot(tl.trans((dscores * slope).to(q.dtype)), q)
        _store(dK, dk * SCALE, start_k, keys, length_k, kv_head, dk_token, dk_head, dim, D)
        _store(dV, dv, start_k, keys, length_k, kv_head, dv_token, dv_head, dim, D)


@triton.jit(do_not_specialize=["size_q", "ends"])
def _bias_gradient(
    Q, K, V, dO, LSE, DELTA, bias, seed, starts_q, starts_k, PARTIAL,
    q_token, q_head, k_token, k_head, v_token, v_head, g_token, g_head, size_q, ends, NEAR: tl.constexpr,
    SCALE: tl.constexpr, CAUSAL: tl.constexpr, WINDOW: tl.constexpr, SOFTCAP: tl.constexpr, RADIUS: tl.constexpr,
    THRESHOLD: tl.constexpr, KEEP_SCALE: tl.constexpr, GROUP: tl.constexpr, D: tl.constexpr, DP: tl.constexpr, B: tl.constexpr,
):  # fmt: skip
    """Sum of the scores' gradients over all tiles of the program's rows that are `offset` tiles off the diagonal.

    More than `NEAR` tiles off, over all that are so far or farther.
    """
    head, place, split = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    heads, places, splits = tl.num_programs(0), tl.num_programs(1), tl.num_programs(2)
    offset = place - NEAR - 1
    least = tl.abs(offset)
    dim, inside = tl.arange(0, DP), tl.arange(0, B)
    total = tl.zeros((B, B), tl.float32)
    key = tl.load(seed) if THRESHOLD else 0
    for row in range(split, ends - 1, splits):
        start_q, length_q = _row(starts_q, row)
        start_k, length_k = _row(starts_k, row)
        tiles_q, tiles_k = tl.cdiv(length_q, B), tl.cdiv(length_k, B)
        most = tl.maximum(tiles_q, tiles_k) if least > NEAR else least + 1
        for far in range(least, most):
            off = -far if offset < 0 else far
            for block in range(tl.maximum(0, -off), tl.minimum(tiles_q, tiles_k - off)):
                queries, keys = block * B + inside, (block + off) * B + inside
                q, do, lse, delta = _queries_in_backward(
                    Q, dO, LSE, DELTA, start_q, queries, length_q, size_q, head, q_token, q_head, g_token, g_head, dim, D,
                )  # fmt: skip
                k = _load(K, start_k, keys, length_k, head // GROUP, k_token, k_head, dim, D)
                v = _load(V, start_k, keys, length_k, head // GROUP, v_token, v_head, dim, D)
                _, dscores, _ = _tile_gradient(
                    q, k, v, do, lse, delta, bias, key, row, head, queries, keys, length_k,
                    SCALE, CAUSAL, WINDOW, SOFTCAP, RADIUS, THRESHOLD, KEEP_SCALE,
                )  # fmt: skip
                total += dscores
    at = PARTIAL + ((split * heads + head) * places + place) * B * B
    tl.store(at + inside[:, None] * B + inside[None, :], total)


@custom_op("brimful::packed_attention", mutates_args=())
def packed_attention(
    q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, sinks: Tensor | None, seed: Tensor | None,
    starts_q: Tensor, tiles_q: Tensor, starts_k: Tensor, tiles_k: Tensor,
    scale: float, causal: bool, window: int, softcap: float, dropout: float,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """The output, and the log2 of the sum of weights that backward needs. Without a window or softcap they are 0."""
    q, k, v = map(_rows_of_dims, (q, k, v))
    out, lse = _empty_outputs(q, v)
    _launch(
        _forward, (tiles_q.shape[0], q.shape[1]),
        q, k, v, out, lse, bias if bias is not None else q, sinks if sinks is not None else q,
        seed if seed is not None else starts_q, tiles_q, starts_q, starts_k,
        *q.stride()[:2], *k.stride()[:2], *v.stride()[:2], *out.stride()[:2], q.shape[0],
        SINKS=sinks is not None, N=BLOCK, **_constants(q, k, bias, scale, causal, window, softcap, dropout),
    )  # fmt: skip
    return out, lse


@packed_attention.register_fake
def _(q, k, v, bias, sinks, seed, starts_q, tiles_q, starts_k, tiles_k, scale, causal, window, softcap, dropout):
    return _empty_outputs(q, v)


@custom_op("brimful::packed_attention_backward", mutates_args=())
def packed_attention_backward(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor,
    bias: Tensor | None, sinks: Tensor | None, seed: Tensor | None,
    starts_q: Tensor, tiles_q: Tensor, starts_k: Tensor, tiles_k: Tensor,
    scale: float, causal: bool, window: int, softcap: float, dropout: float, bias_needs_grad: bool, sinks_need_grad: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """The gradients of q, k, v, the bias and the sinks; those of the last two are empty unless they are needed."""
    grad, q, k, v = map(_rows_of_dims, (grad, q, k, v))
    dq, dk, dv = _empty_gradients(q, k, v)
    delta = torch.empty_like(lse)
    size_q = q.shape[0]
    constants = _constants(q, k, bias, scale, causal, window, softcap, dropout)
    table, key = bias if bias is not None else q, seed if seed is not None else starts_q
    strides = (*q.stride()[:2], *k.stride()[:2], *v.stride()[:2])
    _launch(
        _query_gradient, (tiles_q.shape[0], q.shape[1]),
        q, k, v, out, grad, dq, lse, delta, table, key, tiles_q, starts_q, starts_k,
        *strides, *out.stride()[:2], *grad.stride()[:2], *dq.stride()[:2], size_q, N=BLOCK, **constants,
    )  # fmt: skip
    _launch(
        _key_gradient, (tiles_k.shape[0], k.shape[1]),
        q, k, v, grad, dk, dv, lse, delta, table, key, tiles_k, starts_q, starts_k,
        *strides, *grad.stride()[:2], *dk.stride()[:2], *dv.stride()[:2], size_q, k.shape[0], N=BLOCK, **constants,
    )  # fmt: skip
    dsinks = q.new_empty(0)
    if sinks is not None and sinks_need_grad:
        share = torch.exp2(sinks.float()[:, None] * 1.4426950408889634 - lse)
        dsinks = -(share * delta).sum(1).to(sinks.dtype)
    if bias is None or not bias_needs_grad:
        return dq, dk, dv, q.new_empty(0), dsinks
    near = _near(constants["RADIUS"])
    places = near + 2 if causal else 2 * near + 3
    partial = torch.empty((SPLITS, q.shape[1], places, BLOCK, BLOCK), dtype=torch.float32, device=q.device)
    _launch(
        _bias_gradient, (q.shape[1], places, SPLITS),
        q, k, v, grad, lse, delta, table, key, starts_q, starts_k, partial,
        *strides, *grad.stride()[:2], size_q, starts_q.shape[0], NEAR=near, **constants,
    )  # fmt: skip
    return dq, dk, dv, _by_distance(partial.sum(0), constants["RADIUS"], causal).to(bias.dtype), dsinks


@packed_attention_backward.register_fake
def _(
    grad, q, k, v, out, lse, bias, sinks, seed, sq, tq, sk, tk,
    scale, causal, window, softcap, dropout, bias_needs_grad, sinks_need_grad,
):  # fmt: skip
    dbias = torch.empty_like(bias) if bias_needs_grad else q.new_empty(0)
    return (*_empty_gradients(q, k, v), dbias, torch.empty_like(sinks) if sinks_need_grad else q.new_empty(0))


def _rows_of_dims(tensor: Tensor) -> Tensor:
    """Kernels read the numbers of one token and head as neighbours. An expanded gradient, as of a sum, has stride 0."""
    return tensor if tensor.stride(-1) == 1 else tensor.contiguous()


def _launch(kernel: Any, grid: tuple[int, ...], *arguments: Any, **constants: Any) -> None:
    """With the first setting that the card has room for. Consumer cards have 99 KiB for a program, an H200 has 227."""
    device, wide = arguments[0].device, constants["DP"] > 128
    settings = [one for one in (SETTINGS_WIDE if wide else SETTINGS) if "N" in constants or "N" not in one]
    key = (kernel.__name__, constants["DP"], device)
    with torch.cuda.device_of(arguments[0]):  # Triton launches on the current card, whichever has the tensors
        for number in range(_setting.get(key, 0), len(settings)):
            try:
                kernel[grid](*arguments, **{**constants, **settings[number]})
            except OutOfResources as error:
                if number == len(settings) - 1:
                    raise TaskError(
                        f"attention with heads of {constants['D']} does not fit the shared memory of this card. "
                        "Try: layout='padded'."
                    ) from error
            else:
                _setting[key] = number
                return


def _empty_outputs(q: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    out = torch.empty((q.shape[0], q.shape[1], v.shape[2]), dtype=q.dtype, device=q.device)
    return out, torch.empty((q.shape[1], q.shape[0]), dtype=torch.float32, device=q.device)


def _empty_gradients(*tensors: Tensor) -> list[Tensor]:
    """Contiguous, whatever the strides of the tensors."""
    return [torch.empty(tensor.shape, dtype=tensor.dtype, device=tensor.device) for tensor in tensors]


def _near(radius: int) -> int:
    """Tiles farther from the diagonal than this hold only distances of `radius - 1` and more."""
    return max(0, -(-(radius - 2) // BLOCK))


def _by_distance(tiles: Tensor, radius: int, causal: bool) -> Tensor:
    """From [head, place, query, key], as `_bias_gradient` leaves it, to [head, distance]: sums along the diagonals."""
    near, heads = _near(radius), tiles.shape[0]
    far_before, far_after = tiles[:, 0].sum((1, 2)), 0.0 if causal else tiles[:, -1].sum((1, 2))
    tiles = tiles[:, 1:] if causal else tiles[:, 1:-1]
    offsets = tiles.shape[1]
    # line l moves l places to the right, so that diagonals become columns
    skewed = torch.nn.functional.pad(tiles.flip(2), (0, BLOCK))
    columns = skewed.reshape(heads, offsets, -1)[..., : BLOCK * (2 * BLOCK - 1)]
    columns = columns.reshape(heads, offsets, BLOCK, 2 * BLOCK - 1).sum(
        2
    )  # distances 1 - BLOCK … BLOCK - 1 of each offset
    table = tiles.new_zeros((heads, offsets + 1, BLOCK))
    table[:, :-1, 1:] += columns[..., : BLOCK - 1]
    table[:, 1:] += columns[..., BLOCK - 1 :]
    table = table.flatten(1)
    first, width = (near + 1) * BLOCK - (radius - 1), 2 * radius - 1  # the column of distance 1 - radius
    result = torch.nn.functional.pad(table[:, first : first + width], (0, max(0, first + width - table.shape[1])))
    result[:, 0] += table[:, :first].sum(1) + far_before
    result[:, -1] += table[:, first + width :].sum(1) + far_after
    return result


def _constants(
    q: Tensor, k: Tensor, bias: Tensor | None, scale: float, causal: bool, window: int, softcap: float, dropout: float
) -> dict[str, Any]:
    """Compiled into the kernels; the numbers among them are the same for every step of a model."""
    return {
        "SCALE": scale, "CAUSAL": causal, "WINDOW": window, "SOFTCAP": softcap,
        "RADIUS": 0 if bias is None else (bias.shape[1] + 1) // 2,
        "THRESHOLD": int(dropout * 2**32), "KEEP_SCALE": 1.0 / (1.0 - dropout),
        "GROUP": q.shape[1] // k.shape[1], "D": q.shape[2], "DP": max(16, triton.next_power_of_2(q.shape[2])), "B": BLOCK,
    }  # fmt: skip


def _save(ctx, inputs, output):
    q, k, v, bias, sinks, seed, starts_q, tiles_q, starts_k, tiles_k, *ctx.numbers = inputs
    ctx.save_for_backward(q, k, v, *output, bias, sinks, seed, starts_q, tiles_q, starts_k, tiles_k)


def _backward(ctx, grad, _):
    wanted = ctx.needs_input_grad[3:5]
    dq, dk, dv, *others = packed_attention_backward(grad, *ctx.saved_tensors, *ctx.numbers, *wanted)
    given = (one if wants else None for one, wants in zip(others, wanted, strict=True))
    return dq, dk, dv, *given, *[None] * 10


packed_attention.register_autograd(_backward, setup_context=_save)


@triton.jit(do_not_specialize=["words", "width"])
def _cross_entropy(
    logits, labels, losses, factor, factor_stride, stride, words, width, ignore_index, smoothing, scale, cap,
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
            safe = tl.where(higher == float("-inf"), 0.0, higher)
            total = total * tl.exp(top - safe) + tl.exp(score - safe)
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
                    gradient *= tl.load(factor + token * factor_stride)
                gradient = tl.where(here, gradient * scale, 0.0)
                tl.store(line + begin + inside, gradient.to(logits.dtype.element_ty), mask=begin + inside < width)


def cross_entropy(
    logits: Tensor, words: int, labels: Tensor,
    ignore_index: int, smoothing: float, scale: float, softcap: float | None, wanted: bool, factor: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """The losses over the first `words` columns, by token. If wanted, `logits` are overwritten with their gradient.

    `factor` of the gradient is one number, or one for each token.
    """
    losses = torch.empty(len(labels), dtype=torch.float32, device=logits.device)
    factor_stride = 0 if factor is None or not factor.ndim else factor.stride(0)
    with torch.cuda.device_of(logits):
        _cross_entropy[(len(labels),)](
            logits, labels, losses, losses if factor is None else factor, factor_stride, logits.stride(0), words, logits.shape[1],
            ignore_index, smoothing, scale, softcap or 1.0,
            WORDS=4096, SOFTCAP=softcap is not None, SMOOTH=smoothing > 0, GRADIENT=wanted, SCALED=factor is not None, num_warps=8,
        )  # fmt: skip
    return losses
