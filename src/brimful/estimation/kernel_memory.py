"""What an operation allocates on a card beside its results: copies that it needs and workspaces that it gives back.

A trace on fake tensors sees the results of an operation and nothing that its kernel takes meanwhile. `held` says what that is for the
operations of torch where it matters. Compared with every allocation of 14 steps on an H200 (torch 2.11, cuDNN 9.19), this is what was
missing: workspaces of convolutions made a U-Net 11 % too low and, since they leave segments behind, ResNet-50 10 % without expandable
segments; the parts of a sum made a loss of all pairs 18 % too low.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from brimful.memory.temporaries import Temporary, attention_parts, convolution, plain, reduction

_aten = torch.ops.aten
QUERY_BLOCK, COUNTER_BYTES = 64, 16
"""Rows of queries that the backward of memory-efficient attention adds up together, and the bytes of the counter for them."""
FLASH_ROUNDING, FLASH_HEAD_ROUNDING = 128, 32
"""Flash attention's backward adds up gradients of queries in fp32, for lengths and head sizes rounded up to these."""
LEAST_SORTED = 3072
"""The gradient of an embedding sorts more indices than this and adds up parts of rows."""


class Held(NamedTuple):
    """What one operation holds."""

    copies: tuple[Temporary, ...] = ()
    """From before its results are allocated until it is done."""
    after: tuple[tuple[int, tuple[Temporary, ...]], ...] = ()
    """Taken and given back, each together, once this many results are allocated."""


def held(func: Any, args: Any) -> Held | None:
    """What the operation holds beside its results; None, for most, is nothing."""
    rule = _RULES.get(func.overloadpacket)
    return None if rule is None else rule(args)


def _copies(*tensors: Any) -> tuple[Temporary, ...]:
    """Of those that are not contiguous."""
    return tuple(plain(one) for one in tensors if isinstance(one, torch.Tensor) and not one.is_contiguous())


def _contiguous(*places: int) -> Callable[[Any], Held]:
    """A kernel that copies these arguments where they are not contiguous."""

    def rule(args: Any) -> Held:
        return Held(_copies(*(args[place] for place in places)))

    return rule


def _upsample_backward(args: Any) -> Held:
    return Held(after=((1, _copies(args[0])),))


def _sum(tensor: torch.Tensor, dims: Any) -> tuple[Temporary, ...]:
    if not tensor.numel() or not tensor.dim():
        return ()
    chosen = tuple(one % tensor.dim() for one in dims) if dims else tuple(range(tensor.dim()))
    size = tensor.element_size()
    return (reduction(tuple(tensor.shape), tensor.stride(), chosen, element_bytes=size, sum_bytes=max(4, size)),)


def _reduction(args: Any) -> Held:
    dims = args[1] if len(args) > 1 and isinstance(args[1], (list, tuple)) else ()
    return Held(after=((1, _sum(args[0], dims)),))


def _is_channels_last(*tensors: torch.Tensor) -> bool:
    formats = {4: torch.channels_last, 5: torch.channels_last_3d}
    return any(
        one.dim() in formats and one.is_contiguous(memory_format=formats[one.dim()]) and not one.is_contiguous()
        for one in tensors
    )


def _convolution_copies(*tensors: torch.Tensor) -> tuple[Temporary, ...]:
    return () if _is_channels_last(*tensors[-2:]) else _copies(*tensors)


def _convolution(args: Any) -> Held:
    image, weight, _, stride, padding, dilation, transposed, output_padding, groups = args
    if image.device.type != "cuda" and image.dtype is torch.float64:
        return Held()
    size = _output_size(image, weight, stride, padding, dilation, transposed, output_padding)
    workspace = _workspace("backward data" if transposed else "forward", image, weight, stride, groups, size)
    return Held(_convolution_copies(image, weight), ((1, workspace),))


def _convolution_backward(args: Any) -> Held:
    grad, image, weight, _, stride, _, _, transposed, _, groups, mask = args
    size = grad.shape[2:]
    after = list[tuple[int, tuple[Temporary, ...]]]()
    if mask[0]:
        after.append((1, _workspace("forward" if transposed else "backward data", image, weight, stride, groups, size)))
    if mask[1]:
        after.append((1 + mask[0], _workspace("backward filter", image, weight, stride, groups, size)))
    if mask[2]:
        after.append((sum(mask), _sum(grad, (0, *range(2, grad.dim())))))
    return Held(_convolution_copies(grad, image, weight), tuple(after))


def _output_size(
    image: torch.Tensor, weight: torch.Tensor, stride: Any, padding: Any, dilation: Any, transposed: bool, extra: Any
) -> list[int]:
    result = []
    for axis, length in enumerate(image.shape[2:]):
        reach, step, pad, more = (
            dilation[axis % len(dilation)] * (weight.shape[2 + axis] - 1), stride[axis % len(stride)],
            padding[axis % len(padding)], extra[axis % len(extra)] if extra else 0,
        )  # fmt: skip
        result.append(
            (length - 1) * step - 2 * pad + reach + more + 1
            if transposed
            else (length + 2 * pad - reach - 1) // step + 1
        )
    return result


def _workspace(
    direction: Any, image: torch.Tensor, weight: torch.Tensor, stride: Any, groups: int, size: Any
) -> tuple[Temporary, ...]:
    if groups > 1 and groups == image.shape[1]:
        return ()  # torch has kernels of its own where each channel has its own filter
    inputs, outputs = image.shape[0], image.shape[0]
    plane = 1
    for length in image.shape[2:]:
        plane *= length
    for length in size:
        outputs *= length
    taps = 1
    for length in weight.shape[2:]:
        taps *= length
    is_transposed = image.shape[1] == weight.shape[0] and image.shape[1] != weight.shape[1] * groups
    output_channels = weight.shape[1] * groups if is_transposed else weight.shape[0]
    return (
        convolution(
            direction, channels=image.shape[1], output_channels=output_channels, taps=taps, weights=weight.numel(),
            strided=any(step > 1 for step in stride), element_bytes=image.element_size(),
            copies=not _is_channels_last(image, weight), pixels=inputs * plane, output_pixels=outputs, plane=plane,
        ),
    )  # fmt: skip


def _efficient_backward(args: Any) -> Held:
    grad, query = args[0], args[1]
    rows, heads, length, width = query.shape
    parts = rows * heads * -(-length // QUERY_BLOCK) * (QUERY_BLOCK * width * 4 + COUNTER_BYTES)
    sums = (Temporary("bytes", (), (4 * grad.numel(),)),) if grad.dtype is torch.float32 else ()
    return Held(after=((3, sums), (3, (Temporary("bytes", (), (parts,)),))))


def _flash(args: Any) -> Held:
    query, key = args[0], args[1]
    if len(args) > 3 and args[3]:
        return Held()  # with dropout
    rows, heads, length, width = query.shape
    return Held(after=((2, (attention_parts(rows * heads, length, key.shape[2], width),)),))


def _flash_backward(args: Any) -> Held:
    grad, query, out = args[0], args[1], args[4]
    rows, heads, length, width = query.shape
    rounded = -(-length // FLASH_ROUNDING) * FLASH_ROUNDING
    lengths = Temporary("bytes", (), (4 * rows * heads * rounded,))
    sums = Temporary(
        "bytes", (), (4 * rows * heads * rounded * -(-width // FLASH_HEAD_ROUNDING) * FLASH_HEAD_ROUNDING,)
    )
    return Held(_copies(grad.transpose(1, 2), out.transpose(1, 2)), ((3, (lengths, sums)),))


def _embedding_backward(args: Any) -> Held:
    grad, indices, weights = args[:3]
    return Held(
        _copies(grad), ((1, (Temporary("embedding", (LEAST_SORTED, weights, grad.shape[-1]), (indices.numel(),)),)),)
    )


_RULES: dict[Any, Callable[[Any], Held]] = {
    _aten.sum: _reduction,
    _aten.mean: _reduction,
    _aten.convolution: _convolution,
    _aten.convolution_backward: _convolution_backward,
    _aten._scaled_dot_product_flash_attention: _flash,
    _aten._scaled_dot_product_flash_attention_backward: _flash_backward,
    _aten._scaled_dot_product_efficient_attention_backward: _efficient_backward,
    _aten.embedding_dense_backward: _embedding_backward,
    _aten.native_layer_norm: _contiguous(0),
    _aten.native_layer_norm_backward: _contiguous(0, 1),
    _aten._softmax: _contiguous(0),
    _aten._log_softmax: _contiguous(0),
    _aten._softmax_backward_data: _contiguous(0, 1),
    _aten._log_softmax_backward_data: _contiguous(0, 1),
    _aten.max_pool2d_with_indices_backward: _contiguous(0),
    _aten.avg_pool2d_backward: _contiguous(0),
    **{
        getattr(_aten, f"upsample_{kind}_backward"): _upsample_backward
        for kind in ("nearest1d", "nearest2d", "nearest3d", "linear1d", "bilinear2d", "bicubic2d", "trilinear3d")
    },
}
