"""Whether features are bits. Their values tell, not their dtype: counts are often bytes, and bits are often floats."""

from typing import Any

import numpy as np

ROWS = 512
"""Looked at together: most features that are no bits show it in the first ones."""


def only_bits(matrix: np.ndarray[Any, np.dtype[Any]]) -> bool:
    """Nothing but 0 and 1, which need no unit."""
    parts = (matrix[start : start + ROWS] for start in range(0, len(matrix), ROWS))
    return all(bool(((part == 0) | (part == 1)).all()) for part in parts)
