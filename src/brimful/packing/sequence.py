"""The rows of one side of a micro-batch, end to end in one sequence of a fixed number of tokens.

    tokens   7 3 9 1 | 4 1 | 8 8 2 1 | 0 0 0 0 0 0         three rows in a sequence of 16, the rest is filled
    starts   0         4     6         10                  where each row begins, and where the last one ends

A fixed number of tokens means few shapes: memory is the same for every micro-batch, the allocator reuses its blocks, and
compiled code serves all of them.
"""

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from brimful.errors import TaskError

BLOCK = 64
"""Tokens per tile of the attention kernels."""
FILL = -1
"""A tile of the tokens after the last row. Kernels write zeros there, and nothing reads them."""


class Boundaries(NamedTuple):
    """Where the rows of a sequence begin and end, for attention. All tensors are int32."""

    starts: Tensor
    """Of each row, and the end of the last one."""
    tiles: Tensor
    """One line per tile of `BLOCK` tokens: its row and its first token within the row. No tile reaches into a second row."""

    @property
    def rows(self) -> int:
        return len(self.starts) - 1

    def with_room(self, rows: int) -> "Boundaries":
        """The same in tensors of a size that depends only on the sequence and `rows`, which are at least its own: empty rows
        and tiles are added."""
        size = int(self.tiles[-1, 1])
        starts = self.starts[-1:].expand(rows - self.rows)
        tiles = self.tiles[-1:].expand(size // BLOCK + rows + 2 - len(self.tiles), 2)
        return Boundaries(torch.cat([self.starts, starts]), torch.cat([self.tiles, tiles]))


class SharedRows(NamedTuple):
    """Rows of which several begin with the same tokens: those are in the sequence once, and in attention once for each row."""

    rows: Boundaries
    """Of the sequence that attention runs over, in which nothing is shared."""
    copies: Tensor
    """Of each of its tokens, the place in the packed sequence."""
    back: Tensor
    """Of each token of the packed sequence, its place or one of its places in the other."""


class Positions(NamedTuple):
    """Some tokens of a sequence, such as those that are trained, in a tensor of one of a few sizes."""

    tokens: Tensor
    """Ascending. The last token of the sequence fills it up, at least once."""

    @property
    def size(self) -> int:
        """Of the sequence."""
        return int(self.tokens[-1]) + 1

    @property
    def chosen(self) -> int:
        """Without what fills it up."""
        return int((self.tokens < self.tokens[-1]).sum())

    def with_room(self, share: float = 1.0) -> "Positions":
        """The same in a tensor of a size that depends only on the sequence: this share of it. As it is, if that is too small."""
        room = _room(share, self.size)
        return self if self.chosen >= room else _filled_up(self.tokens[: self.chosen], room, self.size)

    def first(self, share: float) -> "Positions":
        """No more of them than `with_room(share)` has room for."""
        return _few_sizes(self.tokens[: min(self.chosen, _room(share, self.size) - 1)], self.size)


def positions(chosen: Tensor) -> Positions:
    """The positions of these tokens of a sequence. The last token must not be among them.

    >>> positions(torch.tensor([False, True, True, False])).tokens
    tensor([1, 2, 3, 3])
    """
    return _few_sizes(chosen.nonzero()[:, 0], len(chosen))


def _few_sizes(index: Tensor, size: int) -> Positions:
    unit = max(BLOCK, size // 16)
    return _filled_up(index, min(size, -(-(len(index) + 1) // unit) * unit), size)


def _filled_up(index: Tensor, room: int, size: int) -> Positions:
    return Positions(torch.cat([index, index.new_full((room - len(index),), size - 1)]))


def _room(share: float, size: int) -> int:
    return min(size, max(1, math.ceil(share * size / BLOCK)) * BLOCK)


def boundaries(lengths: Sequence[int], size: int) -> Boundaries:
    """The boundaries of rows of these lengths in a sequence of `size` tokens.

    >>> boundaries([4, 2, 4], 16).starts
    tensor([ 0,  4,  6, 10], dtype=torch.int32)
    """
    counts = np.asarray(lengths, dtype=np.int64)
    starts = np.concatenate([[0], np.cumsum(counts)])
    used = int(starts[-1])
    if used > size:
        raise TaskError(
            f"rows of {used} tokens do not fit a sequence of {size}. Try: return the number of tokens from shape(row)."
        )
    tiles_of_row = -(-counts // BLOCK)
    row = np.repeat(np.arange(len(counts)), tiles_of_row)
    first = np.arange(len(row)) - np.repeat(np.cumsum(tiles_of_row) - tiles_of_row, tiles_of_row)
    tiles = np.stack([row, first * BLOCK], axis=1)
    # The last tile is empty. A compiler makes a single tile a case of its own, and compiles again for it.
    fill = np.append(np.arange(used, size, BLOCK), size)
    tiles = np.concatenate([tiles, np.stack([np.full(len(fill), FILL), fill], axis=1)])
    return Boundaries(torch.from_numpy(starts.astype(np.int32)), torch.from_numpy(tiles.astype(np.int32)))


def end_to_end(rows: Sequence[Any], size: int, fill: int) -> Tensor:
    """The tokens of these rows in one sequence, filled up with `fill`."""
    sequence = np.full(size, fill, dtype=np.int64)
    tokens: NDArray[Any] = np.concatenate(rows)
    sequence[: len(tokens)] = tokens
    return torch.from_numpy(sequence)
