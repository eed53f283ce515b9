"""Generated chat rows: Chinese-like questions and answers with the lengths and defects of real ones.

Words of one to four characters with the frequencies of a language, and punctuation between them; on average 40 characters
per prompt and 166 per response, truncated at 320, as in real rows. Of 100 rows one has an empty response, three repeat an
earlier row exactly and three repeat one with a few characters changed. 10 million rows are about 2.5 GB of parquet.
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
"""The first of the Han block: as many as a newspaper uses."""
SEPARATORS = ("，", "。", "、", "？", "！", " ", "\n", "2024", "GPU", "the ")
MAX_CHARACTERS = 320


@dataclass(frozen=True, slots=True)
class Shares:
    """The share of rows with each defect."""

    empty: float = 0.01
    duplicate: float = 0.03
    near_duplicate: float = 0.03


def generate(path: Path, rows: int, seed: int = 0, shares: Shares | None = None) -> None:
    """Write rows to a parquet file, unless it exists."""
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
    """Words, and a table of 65,536 indices in which each word occurs by its frequency."""
    lengths = draw.choice([1, 2, 3, 4], WORDS, p=[0.15, 0.6, 0.15, 0.1])
    frequency = 1 / np.arange(40, CHARACTERS + 40)
    letters = draw.choice(CHARACTERS, (WORDS, 4), p=frequency / frequency.sum())
    words = ["".join(chr(0x4E00 + c) for c in row[:length]) for row, length in zip(letters, lengths, strict=True)]
    weights = 1 / np.arange(10, WORDS + 10)
    ranks = np.searchsorted(np.cumsum(weights) / weights.sum(), (np.arange(65_536) + 0.5) / 65_536)
    pieces = [*words, *SEPARATORS]
    marks = draw.integers(WORDS, len(pieces), 65_536)
    return pa.array(pieces), np.where(draw.random(65_536) < 0.14, marks, np.minimum(ranks, WORDS - 1))


def _texts(count: int, mean: float, words: pa.Array, ranks: np.ndarray, draw: np.random.Generator) -> pa.Array:
    """Texts with the lengths of real ones: many short, some very long."""
    numbers = np.maximum(2, draw.lognormal(np.log(mean), 0.75, count)).astype(np.int64)
    offsets = np.concatenate([[0], np.cumsum(numbers)]).astype(np.int32)
    pieces = words.take(pa.array(ranks[draw.integers(0, len(ranks), offsets[-1])]))
    return pc.utf8_slice_codeunits(pc.binary_join(pa.ListArray.from_arrays(offsets, pieces), ""), 0, MAX_CHARACTERS)


def _chunk(count: int, words: pa.Array, ranks: np.ndarray, draw: np.random.Generator, shares: Shares) -> pa.Table:
    prompts, responses = (_texts(count, mean, words, ranks, draw) for mean in (14.0, 72.0))
    chance = draw.random(count)
    source = np.arange(count)
    repeated = (chance < shares.duplicate + shares.near_duplicate) & (source > 0)
    source[repeated] = (draw.random(repeated.sum()) * source[repeated]).astype(np.int64)
    prompts, responses = prompts.take(pa.array(source)), responses.take(pa.array(source))
    changed = pa.array((chance >= shares.duplicate) & repeated)
    responses = pc.if_else(changed, pc.binary_join_element_wise(responses, pa.scalar("谢谢"), ""), responses)
    empty = pa.array((chance > 1 - shares.empty) & ~repeated)
    return pa.table({"prompt": prompts, "response": pc.if_else(empty, "", responses)})
