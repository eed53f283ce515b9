"""Sketches of texts: 128 numbers of which two texts share about as many as their character 4-grams (Jaccard).

One-permutation hashing (Li, Owen, Zhang 2012) with optimal densification (Shrivastava 2017): each 4-gram is hashed once,
its low bits choose one of 128 bins, and the bin keeps the least of the other bits. A bin that stays empty copies a full
one, in an order that is fixed for the bin. It costs 5 µs a row of 206 characters, all of it NumPy over many rows.
`rensa` 0.5 makes its sketches in 3 µs and hands them over as lists of Python integers, which costs 20 µs more and holds
the interpreter's lock: the whole of clean has 40.

Four characters: of copies of the real rows with 2 % of their characters changed, 79 / 61 / 41 % are still 0.85 alike in
3- / 4- / 5-grams, and the most alike of different rows 0.73 each; of long English texts 3-grams share half by chance.
A gram may reach over the end of its text into `GRAM - 1` marks, so a text of one character has a gram too.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import reduce
from typing import Final

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

# Texts as a tokenizer should see them: NFKC, no invisible characters, no runs of blanks, newlines or punctuation.
#
#     invisible characters out ─► NFKC ─► line ends, blanks, newlines ─► punctuation ─► strip
#
# The order makes it idempotent: taking out an invisible character can let an accent meet its letter, which NFKC then
# composes, and NFKC makes blanks and punctuation (U+3000, `！`, `…`) but no invisible character. What comes after NFKC
# shortens runs and never brings two different neighbours together. What stays as it is: English, digits, single blanks and
# tabs, the indentation of lines (code), brackets, quotes, `#` and backticks in any number.
#
# Works on whole Arrow arrays. Over 16,384 real rows NFKC costs 5 µs a row and each regular expression 1 to 4; so one
# expression finds the rows that need more than NFKC (about one in fifty), and the others run over those only: 8 µs a row.


MAX_RUN: Final = 3
"""Of one punctuation mark."""
MAX_INDENT: Final = 40
"""Blanks at the start of a line: ten levels of code."""

_BREAKS = r"\r\n|[\r\v\f\x{85}\x{2028}\x{2029}]"
_HIDDEN = (
    r"\x{0}-\x{8}\x{E}-\x{1F}\x{7F}-\x{84}\x{86}-\x{9F}"  # control characters but tab, newline and the breaks above
    r"\x{AD}\x{61C}\x{180E}\x{200B}-\x{200F}\x{202A}-\x{202E}\x{2060}-\x{206F}\x{FEFF}\x{FFF9}-\x{FFFB}"
    r"\x{1D173}-\x{1D17A}\x{E0001}\x{E0020}-\x{E007F}"
)
# A zero-width joiner makes one picture of several emoji, and in these scripts it and the non-joiner are spelling.
# Both classes hold only characters that NFKC leaves within the class: what is kept here is kept the next time.
_EMOJI = r"[\x{2190}-\x{21FF}\x{2600}-\x{27BF}\x{2B00}-\x{2BFF}\x{1F300}-\x{1FAFF}\x{FE0F}]"
_JOINED = r"[\x{620}-\x{6DC}\x{750}-\x{77F}\x{900}-\x{DFF}\x{1780}-\x{17DD}\x{1820}-\x{18AA}]"
_KEPT = (
    rf"{_EMOJI}+(?:\x{{200D}}{_EMOJI}+)+|{_JOINED}(?:[\x{{200C}}\x{{200D}}]{_JOINED}+)+"
    r"|\x{1F3F4}[\x{E0020}-\x{E007E}]+\x{E007F}"  # the flags of England, Scotland and Wales
)
_RUNS = (r"。、·—〜!?,", r".;:~-=_*")
"""RE2 knows no backreferences and nine groups: two expressions with a group for each mark."""

_NEEDS_VISIBLE = rf"[\r\v\f\x{{85}}\x{{2028}}\x{{2029}}{_HIDDEN}]"
_NEEDS_SHORT = "|".join([r"[ \t][ \t\n]", r"\n\n\n", *(f"[{mark}]{{{MAX_RUN + 1}}}" for mark in "".join(_RUNS))])
_BLANKS = (
    (r"[ \t]+\n", "\n"),
    (r"\n{3,}", "\n\n"),
    (r"([^ \t\n])[ \t]{2,}", r"\1 "),
    (rf"(\n[ \t]{{{MAX_INDENT}}})[ \t]+", r"\1"),
)


def _marks(marks: str) -> tuple[str, str]:
    """`(。。。)。+|(!!!)!+` and `\\1\\2`: of each run the first three."""
    runs = [f"([{mark}]{{{MAX_RUN}}})[{mark}]+" for mark in marks]
    return "|".join(runs), "".join(f"\\{number + 1}" for number in range(len(marks)))


_VISIBLE = ((_BREAKS, "\n"), (rf"({_KEPT})|[{_HIDDEN}]", r"\1"))
_SHORT = (*_BLANKS, *map(_marks, _RUNS))


def normalise(texts: pa.StringArray) -> pa.StringArray:
    """Each text, normalised; a text of nothing but blanks and invisible characters becomes ""."""
    texts = _where(texts, _NEEDS_VISIBLE, _VISIBLE)
    texts = pc.utf8_normalize(texts, form="NFKC")
    texts = _where(texts, _NEEDS_SHORT, _SHORT)
    return pc.utf8_trim_whitespace(texts)


def _where(texts: pa.StringArray, needs: str, steps: tuple[tuple[str, str], ...]) -> pa.StringArray:
    """Replace in those texts that match `needs`; the others are not touched."""
    found = pc.match_substring_regex(texts, needs)
    if not pc.any(found).as_py():
        return texts
    changed = reduce(lambda array, step: pc.replace_substring_regex(array, *step), steps, texts.filter(found))
    return pc.replace_with_mask(texts, found, changed)


GRAM: Final = 4
HASHES: Final = 128
RECALL: Final = 0.98
"""Of pairs exactly at the threshold, how many must share a band at least."""

_MARK = "\x1f"
"""Between the sides of a row and after it; no text holds it, it is a control character."""
_EMPTY = np.uint32(0xFFFFFFFF)
_MULTIPLY, _SPREAD, _SHIFT = np.uint64(0x9E3779B97F4A7C15), np.uint64(0xD6E8FEB86659FD93), np.uint64(32)
_CONSTANTS = np.random.Generator(np.random.PCG64(20120924))
_LENDERS = np.stack([_CONSTANTS.permutation(HASHES) for _ in range(HASHES)], axis=1)
"""By attempt and bin, the bin to copy from: each bin tries all others once, so a row with one gram is filled as well."""
_WEIGHTS = _CONSTANTS.integers(0, 2**63, HASHES, dtype=np.uint64) * np.uint64(2) + np.uint64(1)

_BLOCK = 2**18
"""Code points at a time: the arrays stay in the cache, and a text of any length takes no more of them."""

Bytes = npt.NDArray[np.uint8]
Slots = npt.NDArray[np.int64]
Words = npt.NDArray[np.uint64]


@dataclass(frozen=True, slots=True)
class Sketches:
    """Of a number of rows, in their order."""

    signatures: Bytes
    """Rows × 128, of each number the low byte: by chance one in 256 agrees (b-bit minwise hashing)."""
    bands: Words
    """Bands × rows: two rows that agree in a whole band are compared."""


def join(sides: Sequence[pa.StringArray]) -> pa.StringArray:
    """All sides of a row as one text that differs whenever a side does."""
    return pc.binary_join_element_wise(*sides, _MARK * (GRAM - 2), _MARK)


def band_rows(near: float) -> int:
    """How many numbers make a band: as many as still find 98 % of pairs exactly at the threshold.

    More of them mean fewer bands and fewer vain comparisons: 8 (16 bands) at 0.85, 7 at 0.8, 16 from 0.95 on.
    """
    return next((rows for rows in range(16, 2, -1) if 1 - (1 - near**rows) ** (HASHES // rows) >= RECALL), 2)


def sketch(joined: pa.StringArray, *, per_band: int) -> Sketches:
    """Of rows that `join` made, with bands of so many numbers."""
    codes, ends = _code_points(joined), np.cumsum(pc.utf8_length(joined).to_numpy(), dtype=np.int64)
    least = np.full((len(joined), HASHES), _EMPTY)
    for start in range(0, len(codes), _BLOCK):
        hashes, rows = _grams(codes, ends, start, min(len(codes), start + _BLOCK))
        bins = rows * HASHES + (hashes & np.uint64(HASHES - 1)).astype(np.int64)
        np.minimum.at(least.reshape(-1), bins, (hashes >> _SHIFT).astype(np.uint32))
    _densify(least)
    return Sketches(least.astype(np.uint8), _bands(least, per_band))


def alike(signatures: Bytes, others: Bytes) -> npt.NDArray[np.float64]:
    """The estimated Jaccard similarity of rows, one by one, less what agrees by chance."""
    agree: npt.NDArray[np.float64] = (signatures == others).mean(axis=1)
    return np.maximum(0.0, (agree - 1 / 256) / (1 - 1 / 256))


def _grams(codes: npt.NDArray[np.uint32], ends: Slots, start: int, stop: int) -> tuple[Words, Slots]:
    """The hashes of the grams that begin from `start` to `stop`, and the row each is in."""
    first, last = np.searchsorted(ends, [start, stop - 1], side="right")
    borders = np.minimum(ends[first : last + 1], stop) - start
    rows = np.repeat(np.arange(first, last + 1), np.diff(borders, prepend=0))
    # Grams that begin in the marks behind a row would reach into the next.
    marks = (ends[first : last + 1, None] - np.arange(1, GRAM)).reshape(-1) - start
    inside = np.ones(stop - start, dtype=bool)
    inside[marks[(marks >= 0) & (marks < stop - start)]] = False
    return _hashes(codes[start : stop + GRAM - 1], stop - start)[inside], rows[inside]


def _hashes(codes: npt.NDArray[np.uint32], count: int) -> Words:
    """Of each run of `GRAM` code points; at the very end, where there are no more, of whatever there is."""
    padded = np.zeros(count + GRAM - 1, dtype=np.uint64)
    padded[: len(codes)] = codes
    hashes = padded[:count].copy()
    for place in range(1, GRAM):
        hashes *= _MULTIPLY
        hashes += padded[place : place + count]
    hashes ^= hashes >> _SHIFT
    hashes *= _SPREAD
    hashes ^= hashes >> _SHIFT
    return hashes


def _code_points(joined: pa.StringArray) -> npt.NDArray[np.uint32]:
    _, offsets, values = joined.buffers()
    ends = np.frombuffer(offsets, dtype=np.int32)[joined.offset : joined.offset + len(joined) + 1]
    text = str(memoryview(values)[ends[0] : ends[-1]], "utf-8")
    return np.frombuffer(text.encode("utf-32-le"), dtype=np.uint32)


def _densify(least: npt.NDArray[np.uint32]) -> None:
    """Fill the empty bins, in place, from those that were full at first."""
    rows, bins = np.nonzero(least == _EMPTY)
    first = least.copy()
    for lenders in _LENDERS:
        if not len(rows):
            return
        lent = first[rows, lenders[bins]]
        least[rows, bins] = lent
        missing = lent == _EMPTY
        rows, bins = rows[missing], bins[missing]


def _bands(least: npt.NDArray[np.uint32], per_band: int) -> Words:
    bands = HASHES // per_band
    weighed = (least[:, : bands * per_band] + np.uint64(1)) * _WEIGHTS[: bands * per_band]
    sums: Words = weighed.reshape(len(least), bands, per_band).sum(axis=2, dtype=np.uint64)
    sums ^= sums >> _SHIFT
    sums *= _SPREAD
    return np.ascontiguousarray(sums.T)
