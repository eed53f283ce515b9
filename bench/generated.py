"""Chat rows by the million, made up: Chinese-like questions and answers with the lengths and faults of real ones.

Words of one to four characters, drawn by rank as words of a language are, with punctuation between; about 40 characters
a prompt and 166 a response, cut at 320, as in the real rows. Of every 100 rows one has an empty response, three repeat an
earlier row to the letter and three repeat one with a few characters changed. 10 million rows are about 2.5 GB of parquet.
"""

import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

CHUNK = 50_000
WORDS = 40_000
CHARACTERS = 3_500
"""Of the Han block, the first so many: how many a newspaper uses."""
SPACES = ("，", "。", "、", "？", "！", " ", "\n", "2024", "GPU", "the ")
LONGEST = 320


@dataclass(frozen=True, slots=True)
class Shares:
    """What is wrong with the rows, as shares of all."""

    empty: float = 0.01
    same: float = 0.03
    alike: float = 0.03


def generate(path: Path, rows: int, seed: int = 0, shares: Shares | None = None) -> None:
    """Write so many rows to a parquet file, whole or not at all."""
    if path.exists():
        return
    part = path.with_suffix(".part")
    schema = pa.schema([("prompt", pa.string()), ("response", pa.string())])
    with pq.ParquetWriter(part, schema, compression="zstd") as writer:
        for table in chunks(rows, seed, shares or Shares()):
            writer.write_table(table, row_group_size=CHUNK)
    os.replace(part, path)  # noqa: PTH105


def chunks(rows: int, seed: int, shares: Shares) -> Iterator[pa.Table]:
    draw = np.random.default_rng(seed)
    words, ranks = _words(draw)
    for start in range(0, rows, CHUNK):
        yield _chunk(min(CHUNK, rows - start), words, ranks, draw, shares)


def _words(draw: np.random.Generator) -> tuple[pa.Array, np.ndarray]:
    """Words, and 65,536 places of which each word has as many as its rank deserves."""
    lengths = draw.choice([1, 2, 3, 4], WORDS, p=[0.15, 0.6, 0.15, 0.1])
    often = 1 / np.arange(40, CHARACTERS + 40)
    letters = draw.choice(CHARACTERS, (WORDS, 4), p=often / often.sum())
    words = ["".join(chr(0x4E00 + c) for c in row[:length]) for row, length in zip(letters, lengths, strict=True)]
    weights = 1 / np.arange(10, WORDS + 10)
    ranks = np.searchsorted(np.cumsum(weights) / weights.sum(), (np.arange(65_536) + 0.5) / 65_536)
    everything = [*words, *SPACES]
    marks = draw.integers(WORDS, len(everything), 65_536)
    return pa.array(everything), np.where(draw.random(65_536) < 0.14, marks, np.minimum(ranks, WORDS - 1))


def _texts(count: int, mean: float, words: pa.Array, ranks: np.ndarray, draw: np.random.Generator) -> pa.Array:
    """Texts whose number of words is drawn as real lengths are: many short, some very long."""
    numbers = np.maximum(2, draw.lognormal(np.log(mean), 0.75, count)).astype(np.int64)
    offsets = np.concatenate([[0], np.cumsum(numbers)]).astype(np.int32)
    taken = words.take(pa.array(ranks[draw.integers(0, len(ranks), offsets[-1])]))
    return pc.utf8_slice_codeunits(pc.binary_join(pa.ListArray.from_arrays(offsets, taken), ""), 0, LONGEST)


def _chunk(count: int, words: pa.Array, ranks: np.ndarray, draw: np.random.Generator, shares: Shares) -> pa.Table:
    prompts, responses = (_texts(count, mean, words, ranks, draw) for mean in (14.0, 72.0))
    fate = draw.random(count)
    source = np.arange(count)
    again = (fate < shares.same + shares.alike) & (source > 0)
    source[again] = (draw.random(again.sum()) * source[again]).astype(np.int64)
    prompts, responses = prompts.take(pa.array(source)), responses.take(pa.array(source))
    alike = pa.array((fate >= shares.same) & again)
    responses = pc.if_else(alike, pc.binary_join_element_wise(responses, pa.scalar("谢谢"), ""), responses)
    empty = pa.array((fate > 1 - shares.empty) & ~again)
    return pa.table({"prompt": prompts, "response": pc.if_else(empty, "", responses)})
