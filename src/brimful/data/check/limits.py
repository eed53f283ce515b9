"""What is too long: limits as people write them, and tokens as `pack` will count them."""

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from brimful.errors import BadData, BadOption, in_one_line

_BATCH_ROWS = 1_024
"""Encodings carry every token's text as well: 20 KB for a row of 300 tokens."""

Counts = npt.NDArray[np.int64]


def limits(flag: str, asked: str | int | None, sides: Sequence[str]) -> tuple[int, ...] | None:
    """A limit for each side; one number goes for all of them."""
    if asked is None:
        return None
    try:
        numbers = [int(part) for part in str(asked).split(",")]
    except ValueError:
        numbers = []
    if not numbers or min(numbers) < 1:
        raise BadOption(f"{flag} {asked}: give a whole number from 1 on, or one for each side, such as 256,320")
    if len(numbers) not in (1, len(sides)):
        raise BadOption(
            f"{flag} {asked}: these are {len(numbers)} numbers, the sides are {', '.join(sides)}; give one number or one for each"
        )
    return tuple(numbers * len(sides) if len(numbers) == 1 else numbers)


class TokenCounter:
    """A tokenizer that only counts."""

    def __init__(self, folder: str) -> None:
        from tokenizers import Tokenizer

        file = Path(folder) / "tokenizer.json"
        if not file.is_file():
            raise BadData(
                f"--tokenizer {folder}: there is no tokenizer.json in it; `brimful data tokenizer` writes one"
            )
        try:
            self._tokenizer = Tokenizer.from_file(str(file))
        except Exception as error:  # the library raises nothing more special
            raise BadData(f"{file}: no tokenizer ({in_one_line(error)})") from None
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()
        self._tokenizer.encode_special_tokens = True  # "[EOS]" that somebody wrote is text

    def count(self, texts: pa.Array) -> Counts:
        """Tokens of each text and the eos behind it."""
        return np.concatenate([np.zeros(0, dtype=np.int64), *self._counts(texts.to_pylist())])

    def _counts(self, texts: Sequence[str]) -> list[Counts]:
        found = []
        for start in range(0, len(texts), _BATCH_ROWS):
            encodings = self._tokenizer.encode_batch_fast(
                list(texts[start : start + _BATCH_ROWS]), add_special_tokens=False
            )
            found.append(np.fromiter((len(one) + 1 for one in encodings), dtype=np.int64, count=len(encodings)))
        return found
