"""What kernels allocate while they run, beside their results: the sizes, at any size of the step.

A kernel of CUDA may take memory from torch's allocator and give it back before it returns. Often that is no polynomial in rows and
lengths, as the sizes of tensors are: it depends on how the kernel divides its work. So a `Temporary` keeps the numbers that it follows
from, which are polynomials, and the rule. As read in torch's sources and found in the allocations of an H200:

    bytes        a copy, or another buffer that is a polynomial
    reduction    a sum over many rows for few columns, such as the gradient of a bias, is divided over thread blocks, and each block
                 stores its part: 4,096 x 4,096 numbers summed to 4,096 take 128 MiB, 512 x 512 nothing
    convolution  cuDNN's tensor cores want channels last, so it copies what it reads and writes: image, output and weight. Gradients of
                 the weight add up to 8 MiB of partial sums. This is a model of what its heuristics chose: within 5 % for 143 of the 181
                 workspaces of 1 MiB and more in a U-Net and ResNet-50
    attention    flash attention of few queries over many keys divides the keys, and adds up the parts in fp32
    embedding    the gradient of more than 3,072 rows of an embedding adds up parts of rows
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

from brimful.units import MiB

WARP, REDUCTION_THREADS = 32, 512
LEAST_VALUES, MOST_VALUES = 16, 256
"""That one thread reduces, before and after the work is divided."""
MOST_INDEX_BYTES = 2**31 - 1
"""Larger tensors are reduced in parts."""
FILTER_SUMS, MOST_FILTER_SUM_BYTES, LEAST_FILTER_SUM_BYTES = 14, 8 * MiB, 1 * MiB
"""Partial sums of a filter's gradient in fp32, and their size at most and at least, which is twice that in half precision."""
MATRIX_SUMS = 64
"""Partial sums of the gradient of a 1 x 1 filter that needs no copies."""
SPLIT_BLOCK = 16384
"""Numbers of keys that a thread block of flash attention reads at once."""
EMBEDDING_PART = 10
"""Rows of an embedding's gradient that one thread adds up."""


class Processors(NamedTuple):
    """The multiprocessors of a card. Sums and attention are divided until all of them have work."""

    number: int
    threads: int
    """Of each multiprocessor."""


H200 = Processors(132, 2048)

Rule = Literal["bytes", "reduction", "convolution", "attention", "embedding"]
Direction = Literal["forward", "backward data", "backward filter"]


@dataclass(frozen=True)
class Temporary:
    """One allocation inside of a kernel."""

    rule: Rule
    fixed: tuple[int, ...]
    """What is the same at every size of the step."""
    numbers: tuple[int, ...]
    """What are polynomials in rows and lengths."""

    @property
    def bytes(self) -> int:
        """On an H200."""
        return temporary_bytes(self.rule, self.fixed, self.numbers)


def temporary_bytes(rule: Rule, fixed: tuple[int, ...], numbers: tuple[int, ...], processors: Processors = H200) -> int:
    """The size that follows from these numbers."""
    if any(number < 1 for number in numbers):
        return 0
    return _RULES[rule](fixed, numbers, processors)


def plain(tensor: Any) -> Temporary:
    """A copy of this tensor."""
    return Temporary("bytes", (), (tensor.numel() * tensor.element_size(),))


def reduction(
    shape: tuple[int, ...], strides: tuple[int, ...], dims: tuple[int, ...], *, element_bytes: int, sum_bytes: int
) -> Temporary:
    """Of a sum, mean or the like over these dimensions.

    Args:
        element_bytes: Of a number of the input.
        sum_bytes: Of a partial result: 4 for all floats but double.
    """
    kept = _joined([(shape[one], strides[one]) for one in reversed(range(len(shape))) if one not in dims])
    reduced = _joined(sorted(((shape[one], strides[one]) for one in dims), key=lambda pair: pair[1]))
    outputs, inputs = _product(kept), _product(reduced)
    if not reduced:
        return Temporary("reduction", (1, 0, 0, element_bytes, sum_bytes), (outputs, inputs))
    along_input = not kept or reduced[0][1] < kept[0][1]
    fastest = reduced[0][1] if along_input else kept[0][1]
    others = [stride for _, stride in (*reduced, *kept[1:])] if not along_input else []
    return Temporary(
        "reduction",
        (int(along_input), int(fastest == 1), int(len(reduced) == 1), element_bytes, sum_bytes),
        (outputs, inputs, *([kept[0][0], *others] if not along_input else [])),
    )


def convolution(
    direction: Direction, *, channels: int, output_channels: int, taps: int, weights: int, strided: bool, element_bytes: int,
    copies: bool, pixels: int, output_pixels: int, plane: int,
) -> Temporary:  # fmt: skip
    """The workspace of cuDNN.

    Args:
        taps: Positions of the filter: 9 of a 3 x 3 one.
        weights: Numbers of the filter.
        copies: False where the image lies with channels last already.
        pixels: Of all images.
        output_pixels: Of all outputs.
        plane: Pixels of one image.
    """
    way = ("forward", "backward data", "backward filter").index(direction)
    fixed = (way, channels, output_channels, taps, weights, int(strided), element_bytes, int(copies))
    return Temporary("convolution", fixed, (pixels, output_pixels, plane))


def attention_parts(heads: int, queries: int, keys: int, width: int) -> Temporary:
    """What flash attention adds up if it divides the keys. `heads` are those of all rows."""
    return Temporary("attention", (width,), (heads, queries, keys))


def _joined(dims: list[tuple[int, int]]) -> list[tuple[int, int]]:
    """Dimensions (size, stride), fastest first, without those of 1 and with neighbours joined where they lie behind each other."""
    result = list[tuple[int, int]]()
    for size, stride in dims:
        if size == 1:
            continue
        if result and result[-1][0] * result[-1][1] == stride:
            result[-1] = (result[-1][0] * size, result[-1][1])
        else:
            result.append((size, stride))
    return result


def _product(dims: list[tuple[int, int]]) -> int:
    result = 1
    for size, _ in dims:
        result *= size
    return result


def _reduction_bytes(fixed: tuple[int, ...], numbers: tuple[int, ...], processors: Processors) -> int:
    """As `setReduceConfig` in torch's `Reduce.cuh` divides the work, and `global_memory_size` of the result."""
    along_input, contiguous, one_dim, element_bytes, sum_bytes = fixed
    outputs, inputs, *vector_numbers = numbers
    while outputs * inputs * element_bytes > MOST_INDEX_BYTES:
        outputs, inputs = (outputs, -(-inputs // 2)) if inputs >= outputs else (-(-outputs // 2), inputs)
    vector, width, height_limit = 1, outputs, inputs
    if along_input:
        width, height_limit = inputs, outputs
        if contiguous and one_dim and width >= 128:
            width //= 8 if element_bytes == 2 else 4
    elif contiguous:
        vector = 4
        for number in vector_numbers:
            while number % vector:
                vector //= 2
        width //= vector
    threads = REDUCTION_THREADS // vector
    columns, rows = _power_of_2(min(width, threads)), _power_of_2(min(height_limit, threads))
    block_width = min(columns, WARP)
    block_height = min(rows, threads // block_width)
    block_width = min(columns, threads // block_height)
    step_input, step_output = (block_width, 1) if along_input else (1, block_width)
    if -(-inputs // step_input) < min(16 * block_height, MOST_VALUES):
        return 0  # each warp has outputs of its own
    step_input *= block_height
    values, grid = -(-inputs // step_input), -(-(outputs // vector) // step_output)
    most_blocks = processors.number * (processors.threads // (block_width * block_height))
    if values < MOST_VALUES or grid > most_blocks:
        return 0
    parts = max(min(-(-most_blocks // grid), -(-values // LEAST_VALUES)), -(-values // MOST_VALUES))
    if parts == 1:
        return 0
    return sum_bytes * outputs * parts * (1 if along_input else block_width * vector)


def _power_of_2(number: int) -> int:
    """The largest that is not above it."""
    return 1 << (max(1, number).bit_length() - 1)


def _convolution_bytes(fixed: tuple[int, ...], numbers: tuple[int, ...], _: Processors) -> int:
    way, channels, output_channels, taps, weights, strided, element_bytes, copies = fixed
    pixels, output_pixels, plane = numbers
    weight, group = weights * element_bytes, 16 // element_bytes
    aligned = plane % (group // 2 if element_bytes == 2 else group) == 0
    if channels < 4 and way == 0 and taps <= 9:
        return 0  # too few channels for tensor cores
    filled = channels if channels >= 4 or (way == 0 and element_bytes == 4) else group
    both = (pixels * filled + output_pixels * output_channels) * element_bytes * copies
    is_product = taps == 1 and not strided
    if way < 2:
        filter_copy = 0 if taps == 1 or not copies else weight * filled // channels
        return 0 if is_product and aligned else both + filter_copy
    least = LEAST_FILTER_SUM_BYTES * 4 // element_bytes
    sums = weight + max(least, min(FILTER_SUMS * weights * 4, MOST_FILTER_SUM_BYTES))
    if is_product and aligned:
        return min(MATRIX_SUMS * weight, both + sums)
    return both + sums


def _attention_bytes(fixed: tuple[int, ...], numbers: tuple[int, ...], processors: Processors) -> int:
    """As `num_splits_heuristic` of flash attention divides the keys."""
    (width,), (heads, queries, keys) = fixed, numbers
    blocks, key_blocks = heads * -(-queries // 64), -(-keys // max(64, SPLIT_BLOCK // _next_power_of_2(max(64, width))))
    places = 2 * processors.number
    if blocks >= 0.8 * places:
        return 0
    counts = [
        one
        for one in range(1, min(128, places, key_blocks) + 1)
        if one == 1 or -(-key_blocks // one) != -(-key_blocks // (one - 1))
    ]
    waves = [blocks * one / places for one in counts]
    shares = [wave / math.ceil(wave) for wave in waves]
    splits = next(count for count, share in zip(counts, shares, strict=True) if share >= 0.85 * max(shares))
    return 0 if splits == 1 else 4 * splits * heads * queries * -(-width // 32) * 32


def _embedding_bytes(fixed: tuple[int, ...], numbers: tuple[int, ...], _: Processors) -> int:
    least, rows, width = fixed
    (count,) = numbers
    return 0 if count <= least else 4 * (count // EMBEDDING_PART + min(count, rows)) * -(-width // WARP) * WARP


def _next_power_of_2(number: int) -> int:
    return 1 << (number - 1).bit_length()


_RULES: dict[Rule, Callable[[tuple[int, ...], tuple[int, ...], Processors], int]] = {
    "bytes": lambda fixed, numbers, processors: numbers[0],
    "reduction": _reduction_bytes,
    "convolution": _convolution_bytes,
    "attention": _attention_bytes,
    "embedding": _embedding_bytes,
}
