"""Which rows a tokenizer is trained on: a random sample that fits the RAM.

**The sample** is uniform over all rows and read in one pass. Each row's number is hashed with the seed; the rows with the
smallest hashes are trained on, as many as fit, and those with the largest are held out to measure on. The result does not
depend on how rows come in chunks, and no total has to be known in advance.

**Memory** is predicted from the texts. The library keeps each distinct word and, for each distinct pair of neighbours, the
words it is in, so bytes per character vary widely: 20 for made-up Latin words, 140 for Chinese, 350 for random Han. A fixed
factor safe for all of them would use a third of the Chinese text that fits. So distinct words and pairs are counted while
rows are added until the prediction reaches the limit. Measured peaks of the process at 29,298 entries, limit and prediction
beside them:

    texts                              --host-limit   characters        measured     predicted
    3,000 real rows                    1 GiB           0.61 M, all        223 MiB      285 MiB
    3,000 real rows, Unigram           4 GiB           0.61 M, all        301 MiB      297 MiB
    Markov chain                       1 GiB           5.60 M             989 MiB    1,018 MiB
    Markov chain                       4 GiB          27.75 M           3,017 MiB    4,092 MiB
    random Han                         1 GiB           1.90 M             759 MiB    1,016 MiB
    random Han, frequent ones often    1 GiB           2.94 M, all        819 MiB      856 MiB
    made-up Latin words                1 GiB           4.01 M, all        207 MiB      275 MiB
"""

import re
from collections.abc import Callable
from itertools import pairwise
from typing import Literal

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from brimful.data.pipeline import GOLDEN, splitmix64
from brimful.data.tokenizer.vocabulary import normalized_texts
from brimful.errors import BadOption
from brimful.machine.host import Host
from brimful.units import MiB, flag_bytes, show_bytes

Kind = Literal["bpe", "unigram"]
Ints = npt.NDArray[np.int64]

LONGEST_TEXT = 100_000
"""Characters of one text that are used, so that a book in one row does not fill the sample."""
HELD_OUT_CHARACTERS, HELD_OUT_SHARE = 1_000_000, 1 / 50
"""Held out at most, about 5,000 rows of chat; of a small dataset one character in 50."""
MAX_CHARACTERS = 200_000_000
"""Used at most, however much RAM there is: the library counts pairs in 32 bits."""
READ_BYTES_PER_CHARACTER = 32
"""Training memory that must be there for each character that is read: 100 M characters for 4 GiB. How many of them can be
used is known later."""
BYTES_PER_WORD_CHARACTER, BYTES_PER_PAIR = 190, 300
"""Fitted to seven measured runs and rounded up."""
KIND_FACTOR: dict[Kind, float] = {"bpe": 1.0, "unigram": 1.1}
"""Unigram starts from twice as many byte pairs."""
OVERHEAD_BYTES = 128 * MiB
"""Beside the text: a chunk being read, the counts of words and pairs, the vocabulary."""
MIN_TRAINING_BYTES = 192 * MiB
"""Enough for the first batch of rows, were they as long as they may be."""

_SLACK = 1.5
"""How far the rows kept may exceed the sample before they are reduced: reducing copies all of them."""
_LARGEST_HASH = np.uint64(2**64 - 1)
_BATCH_CHARACTERS = 50_000
_HAN = r"㐀-䶿一-鿿豈-﫿\U00020000-\U0003FFFF"
_WORD = re.compile(rf"[{_HAN}]+| ?[^\W\d_{_HAN}]+")
"""Nearly `vocabulary.WORDS`, in Python's syntax; single characters cost nothing."""


def available_memory(host_limit_bytes: int, start_bytes: int, host: Host | None = None) -> tuple[int, int]:
    """The limit in effect (no more than is free), and what it leaves for training beside the process itself."""
    limit = min(host_limit_bytes, start_bytes + (host or Host.detect()).ram_available_bytes)
    training_bytes = limit - start_bytes - OVERHEAD_BYTES
    if training_bytes < MIN_TRAINING_BYTES:
        free = "" if limit == host_limit_bytes else f" (of which {show_bytes(limit)} are free)"
        raise BadOption(
            f"host_limit='{flag_bytes(host_limit_bytes)}'{free} is too small: Python and its libraries take "
            f"{show_bytes(start_bytes)}. Try: {flag_bytes(start_bytes + OVERHEAD_BYTES + MIN_TRAINING_BYTES)} or more."
        )
    return limit, training_bytes


class Sampler:
    """Takes all rows in order; keeps a uniform sample of them, and others held out."""

    def __init__(self, *, characters: int, seed: int) -> None:
        self.budget, self.seed = characters, seed
        self.rows_seen = self.characters_seen = self.rows_truncated = 0
        self._parts: list[pa.Table] = []
        """The fields, then each row's hash and its characters."""
        # Hashes of the first rows, from either end, that do not fit. So far all do.
        self._low, self._high = _LARGEST_HASH, np.uint64(0)

    @classmethod
    def within(cls, training_bytes: int, *, seed: int) -> "Sampler":
        """With the most characters that training could use within this memory."""
        return cls(characters=min(MAX_CHARACTERS, training_bytes // READ_BYTES_PER_CHARACTER), seed=seed)

    def add(self, rows: pa.RecordBatch) -> None:
        """The next rows: one string column per field."""
        hashes = row_hashes(self.rows_seen, rows.num_rows, self.seed)
        self.rows_seen += rows.num_rows
        lengths = [np.asarray(pc.utf8_length(field), dtype=np.int64) for field in rows.columns]
        self.characters_seen += int(sum(length.sum() for length in lengths))
        self.rows_truncated += int((np.max(lengths, axis=0) > LONGEST_TEXT).sum())
        wanted = (hashes < self._low) | (hashes > self._high)
        texts = [
            pc.utf8_slice_codeunits(pc.cast(field, pa.large_string()), 0, LONGEST_TEXT)
            for field in rows.filter(pa.array(wanted)).columns
        ]
        table = pa.table(texts, names=rows.schema.names)
        table = table.append_column("hash", pa.array(hashes[wanted]))
        self._parts.append(table.append_column("characters", pa.array(row_lengths(table.drop_columns("hash")))))
        if sum(pc.sum(part["characters"]).as_py() or 0 for part in self._parts) > _SLACK * (
            self.budget + HELD_OUT_CHARACTERS
        ):
            self._reduce()

    def finish(self) -> tuple[pa.Table, pa.Table]:
        """The rows to train on and those held out, a column per field, in order of their hashes."""
        rows, hashes, characters = self._sorted()
        share = int(min(HELD_OUT_CHARACTERS, self.characters_seen * HELD_OUT_SHARE))
        training = len(hashes) - _count_within(characters[::-1], share)
        held_out = rows.take(
            pa.array(range(training, len(hashes)), pa.int64())
        )  # a slice would keep all others in memory
        training = int(np.searchsorted(hashes[:training], self._low))
        sample = rows.slice(0, _count_within(characters[:training], self.budget))
        return sample.drop_columns(["hash", "characters"]), held_out.drop_columns(["hash", "characters"])

    def _reduce(self) -> None:
        """Drop what can no longer be in the sample or held out: both only shrink while more rows come."""
        rows, hashes, characters = self._sorted()
        low = _count_within(characters, self.budget)
        high = _count_within(characters[::-1], HELD_OUT_CHARACTERS)
        self._parts = [rows]
        if low + high < len(hashes):
            self._low, self._high = hashes[low], hashes[-1 - high]
            self._parts = [rows.slice(0, low), rows.slice(len(hashes) - high)]

    def _sorted(self) -> tuple[pa.Table, npt.NDArray[np.uint64], Ints]:
        """All rows kept, by ascending hash."""
        rows = pa.concat_tables(self._parts).combine_chunks()
        rows = rows.take(pa.array(np.argsort(np.asarray(rows["hash"]))))
        return rows, np.asarray(rows["hash"]), np.asarray(rows["characters"])


def row_hashes(first: int, count: int, seed: int) -> npt.NDArray[np.uint64]:
    """A 64-bit hash of each row's number: splitmix64, a bijection, so no two rows share one."""
    start = np.uint64(int(np.random.SeedSequence(seed).generate_state(1, np.uint64)[0]))
    return splitmix64(np.arange(first, first + count, dtype=np.uint64) * np.uint64(GOLDEN) + start)


def rows_that_fit(
    rows: pa.Table, training_bytes: int, kind: Kind, progress: Callable[[str], object]
) -> tuple[pa.Table, int]:
    """The first rows, as many as can be trained on, and the bytes that is predicted to take."""
    memory, kept, characters, predicted = TrainingMemory(), 0, 0, 0
    ends = np.cumsum(row_lengths(rows))
    marks = np.arange(_BATCH_CHARACTERS, ends[-1] + 1 if len(ends) else 0, _BATCH_CHARACTERS)
    edges = np.unique(np.concatenate([[0], np.searchsorted(ends, marks) + 1, [rows.num_rows]])).tolist()
    for first, last in pairwise(edges):
        for texts in normalized_texts(rows.slice(first, last - first))():
            memory.add(texts)
        needed = round(KIND_FACTOR[kind] * memory.bytes)
        if needed > training_bytes:
            return rows.take(pa.array(np.arange(kept))), predicted  # a slice would keep all of them in memory
        kept, predicted, characters = last, needed, int(ends[last - 1])
        progress(f"weighed {characters:,} characters: {show_bytes(predicted)} to train on them")
    return rows, predicted


class TrainingMemory:
    """Predicts the bytes that training on the texts added so far takes."""

    def __init__(self) -> None:
        self.word_characters = 0
        self._words: set[int] = set()
        self._pairs: set[int] = set()

    @property
    def bytes(self) -> int:
        return BYTES_PER_WORD_CHARACTER * self.word_characters + BYTES_PER_PAIR * len(self._pairs)

    def add(self, texts: list[str]) -> None:
        words = {word for text in texts for word in _WORD.findall(text)}
        new = [word for word in words if hash(word) not in self._words]
        self._words.update(map(hash, new))
        self.word_characters += sum(map(len, new))
        codes = np.frombuffer("\n".join(new).encode("utf-32-le"), dtype=np.uint32).astype(np.int64)
        pairs = np.unique(codes[:-1] << 32 | codes[1:])
        between = (pairs >> 32 == ord("\n")) | (pairs & 0xFFFFFFFF == ord("\n"))
        self._pairs.update(pairs[~between].tolist())


def row_lengths(rows: pa.Table) -> Ints:
    """Characters of each row, over all fields."""
    lengths = np.zeros(rows.num_rows, dtype=np.int64)
    for field in rows.columns:
        lengths += np.asarray(pc.utf8_length(field), dtype=np.int64)
    return lengths


def _count_within(characters: Ints, budget: int) -> int:
    """How many of the first rows stay within this many characters."""
    return int(np.searchsorted(np.cumsum(characters), budget, side="right"))
