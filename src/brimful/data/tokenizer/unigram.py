"""A Unigram vocabulary: start from twice as many byte-pair pieces, estimate, drop those that are missed least, repeat.

The library encodes with Unigram models, but its own trainer sums over a hash map in random order: four runs on the same
rows gave four different files (many scores, and once another piece among 20,000). Here counts are whole numbers and every
order is fixed. That is the reason; speed is not one. On the 3,000 real rows neither is clearly faster (one run each on a
busy box; the library's at 20,000 entries also took 7.3 s on another occasion). On 10,000 generated rows of 300 characters
this took 72 and 88 s, while the library's, run once and also on a busy box, was stopped after 200 s.

    entries     this               library's trainer    byte pairs
    20,000      1.527,  7.7 s      1.514, 21.0 s        1.560, 1.7 s      characters per token of valid_1k
     8,000      1.352, 13.7 s      1.351, 11.2 s        1.373, 1.3 s

Estimating is by each text's best segmentation. What dropping a piece costs is its count times the difference to the best
segmentation of the piece itself into others (Kudo 2018).
"""

import math
from collections.abc import Callable
from itertools import chain

import numpy as np
import numpy.typing as npt
from tokenizers import Tokenizer, models

from brimful.data.tokenizer.train import FIRST_PIECE, FIXED, UNKNOWN, Texts, finished

SEEDS = 2
"""Byte-pair entries to start from, for each entry asked for."""
_PASSES = 2
"""Estimates between two rounds of dropping."""
_KEPT = 0.75
"""Share of the pieces that a round keeps, until there are as many as asked for."""
_NEVER = -1000.0
"""The score of fixed entries. Their letters in a text (`<0x41>`, six characters of -17 at worst) cost less as letters."""
_UNSEEN = 0.5
"""The count of a piece that no segmentation uses."""

Counts = npt.NDArray[np.int64]
Scores = npt.NDArray[np.float64]


def train_unigram(
    texts: Texts, seeds: Tokenizer, *, vocab_size: int, progress: Callable[[str], object] = lambda phrase: None
) -> Tokenizer:
    """Prune the pieces of a byte-pair tokenizer down to `vocab_size` entries."""
    vocab: dict[str, int] = seeds.get_vocab()
    pieces = sorted(vocab, key=vocab.__getitem__)[FIRST_PIECE:]
    counts = _count(texts, seeds, len(pieces))
    while True:
        for _ in range(_PASSES):
            progress(f"estimating {len(pieces):,} pieces")
            counts = _count(texts, _tokenizer(pieces, _scores(counts)), len(pieces))
        if len(pieces) <= vocab_size - FIRST_PIECE:
            return _tokenizer(pieces, _scores(counts))
        kept = _worth_keeping(pieces, counts, keep=max(vocab_size - FIRST_PIECE, int(_KEPT * len(pieces))))
        pieces, counts = [pieces[number] for number in kept], counts[kept]


def _count(texts: Texts, tokenizer: Tokenizer, pieces: int) -> Counts:
    """How often each piece is used."""
    tokenizer.normalizer = None  # the texts are normalised already
    counts = np.zeros(FIRST_PIECE + pieces, dtype=np.int64)
    for batch in texts():
        encodings = tokenizer.encode_batch_fast(batch, add_special_tokens=False)
        ids = np.fromiter(chain.from_iterable(encoding.ids for encoding in encodings), np.int64)
        counts += np.bincount(ids, minlength=len(counts))
    return counts[FIRST_PIECE:]


def _scores(counts: Counts) -> Scores:
    """Log probabilities, rounded so that they are the same on every machine."""
    seen = np.maximum(counts, _UNSEEN)
    scores: Scores = np.round(np.log(seen / seen.sum()), 6)
    return scores


def _tokenizer(pieces: list[str], scores: Scores) -> Tokenizer:
    vocab = [*((entry, _NEVER) for entry in FIXED), *zip(pieces, scores.tolist(), strict=True)]
    return finished(models.Unigram(vocab, unk_id=UNKNOWN, byte_fallback=True))


def _worth_keeping(pieces: list[str], counts: Counts, *, keep: int) -> npt.NDArray[np.int64]:
    """Where the `keep` pieces are that would be missed most, in their order; single characters always stay."""
    score = dict(zip(pieces, _scores(counts).tolist(), strict=True))
    losses = [
        math.inf if len(piece) == 1 else count * (score[piece] - _best_without(piece, score))
        for piece, count in zip(pieces, counts.tolist(), strict=True)
    ]
    order = np.argsort(-np.array(losses), kind="stable")
    return np.sort(order[:keep])


def _best_without(piece: str, score: dict[str, float]) -> float:
    """The score of the best segmentation of a piece into other pieces."""
    best = [0.0]
    for end in range(1, len(piece) + 1):
        starts = range(end) if end < len(piece) else range(1, end)
        best.append(max(best[start] + score.get(piece[start:end], -math.inf) for start in starts))
    return best[-1]
