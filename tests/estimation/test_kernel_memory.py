"""What kernels hold beside their results. Sizes follow from torch's sources and from the allocations of an H200."""

from itertools import chain

import pytest
import torch

from brimful.estimation.cards import find_card
from brimful.estimation.kernel_memory import held
from brimful.memory.temporaries import H200, temporary_bytes
from brimful.units import KiB, MiB

aten = torch.ops.aten


def meta(*shape, dtype=torch.float32):
    return torch.empty(shape, dtype=dtype, device="meta")


def taken(func, *args, processors=H200):
    """The bytes of everything that the operation holds, one after the other."""
    beside = held(func, args)
    every = (*beside.copies, *chain.from_iterable(temporaries for _, temporaries in beside.after))
    return [size for one in every if (size := temporary_bytes(one.rule, one.fixed, one.numbers, processors))]


def test_most_operations_hold_nothing():
    assert held(aten.mm.default, (meta(8, 8), meta(8, 8))) is None


@pytest.mark.parametrize(("side", "bytes_"), [(4096, [128 * MiB]), (512, [])])
def test_a_sum_over_rows_is_divided_over_thread_blocks(side, bytes_):
    """As allocated on an H200: the gradient of a bias is such a sum."""
    assert taken(aten.sum.dim_IntList, meta(side, side), [0]) == bytes_


def test_a_card_with_fewer_multiprocessors_divides_less():
    small, large = (
        sum(taken(aten.sum.dim_IntList, meta(16384, 512), [0], processors=find_card(name).processors))
        for name in ("RTX 3060", "H200")
    )
    assert 0 < small < large / 2


def test_a_sum_along_rows_has_a_result_in_each_warp():
    assert taken(aten.sum.dim_IntList, meta(4096, 512), [1]) == []


def test_a_tensor_that_is_not_contiguous_is_copied_first():
    across = meta(64, 32).mT
    assert taken(aten.native_layer_norm.default, across, [64], None, None, 1e-5) == [64 * 32 * 4]
    assert taken(aten.native_layer_norm.default, meta(32, 64), [64], None, None, 1e-5) == []
    assert taken(aten._softmax.default, across, -1, False) == [64 * 32 * 4]


def convolve(image, weight, *, stride=1, padding=1, groups=1, processors=H200):
    return taken(
        aten.convolution.default,
        image,
        weight,
        None,
        [stride, stride],
        [padding, padding],
        [1, 1],
        False,
        [0, 0],
        groups,
    )


def test_a_convolution_copies_image_output_and_filter_to_channels_last():
    both, weights = 2 * 8 * 64 * 32 * 32, 64 * 64 * 9
    assert convolve(meta(8, 64, 32, 32), meta(64, 64, 3, 3)) == [4 * (both + weights)]


def test_half_precision_copies_half():
    image, weight = (
        meta(8, 64, 32, 32, dtype=torch.bfloat16),
        meta(64, 64, 3, 3, dtype=torch.bfloat16),
    )
    assert convolve(image, weight) == [one // 2 for one in convolve(image.float(), weight.float())]


def test_an_image_that_has_its_channels_last_is_not_copied():
    image = meta(8, 64, 32, 32).to(memory_format=torch.channels_last)
    assert convolve(image, meta(64, 64, 3, 3).to(memory_format=torch.channels_last)) == []


@pytest.mark.parametrize(
    ("weight", "options"),
    [((64, 1, 3, 3), {"groups": 64}), ((64, 64, 1, 1), {"padding": 0})],
    ids=["a filter for each channel", "a product"],
)
def test_some_convolutions_need_no_workspace(weight, options):
    assert convolve(meta(8, 64, 32, 32), meta(*weight), **options) == []


def test_the_gradient_of_a_filter_adds_up_partial_sums():
    image, weight = meta(8, 64, 32, 32), meta(64, 64, 3, 3)
    args = (meta(8, 64, 32, 32), image, weight, None, [1, 1], [1, 1], [1, 1], False, [0, 0], 1)
    only_filter, only_data = (
        taken(aten.convolution_backward.default, *args, mask) for mask in ([False, True, False], [True, False, False])
    )
    copies, weights = 4 * 2 * image.numel(), 4 * weight.numel()
    assert only_data == [copies + weights]
    assert only_filter == [copies + weights + 14 * weights]


def flash(rows, queries, keys, *, dropout=0.0, processors=H200):
    query, key = (meta(rows, 8, length, 64, dtype=torch.bfloat16) for length in (queries, keys))
    return taken(aten._scaled_dot_product_flash_attention.default, query, key, key, dropout, processors=processors)


def test_flash_attention_divides_the_keys_of_few_queries():
    assert sum(flash(1, 64, 8192)) % (8 * 64 * 64 * 4) == 0
    assert sum(flash(1, 64, 8192)) > sum(flash(1, 64, 8192, processors=find_card("RTX 3060").processors)) > 0
    assert flash(32, 1024, 1024) == flash(1, 64, 8192, dropout=0.1) == []


def test_the_backward_of_flash_attention_adds_up_in_fp32():
    query = meta(2, 8, 100, 40, dtype=torch.bfloat16)
    other = query.transpose(1, 2).contiguous().transpose(1, 2)  # as attention returns its output
    held_bytes = taken(aten._scaled_dot_product_flash_attention_backward.default, other, query, query, query, other)
    assert held_bytes == [4 * 2 * 8 * 128, 4 * 2 * 8 * 128 * 64]  # lengths filled up to 128, heads to 64


def test_the_backward_of_memory_efficient_attention_has_parts_and_in_fp32_sums():
    full, half = (
        taken(aten._scaled_dot_product_efficient_attention_backward.default, *2 * (meta(2, 8, 128, 64, dtype=dtype),))
        for dtype in (torch.float32, torch.bfloat16)
    )
    parts = 2 * 8 * 2 * (64 * 64 * 4 + 16)
    assert (full, half) == ([4 * 2 * 8 * 128 * 64, parts], [parts])


def test_the_gradient_of_an_embedding_adds_up_parts_of_many_rows():
    few, many = (
        taken(aten.embedding_dense_backward.default, meta(count, 64), meta(count, dtype=torch.long), 1000)
        for count in (3072, 10_000)
    )
    assert few == [] and many == [4 * (10_000 // 10 + 1000) * 64]


def test_a_gradient_that_is_enlarged_again_is_copied_if_it_is_not_contiguous():
    grad = meta(2, 8, 8, 4).permute(0, 3, 1, 2)
    assert taken(aten.upsample_nearest2d_backward.default, grad, [8, 8], [2, 4, 4, 4]) == [2 * KiB]
