"""From texts to a tokenizer: NFKC, byte-pair merges within words, bytes for what is rare, and a decoder that adds nothing.

**Words are cut while training and not while encoding.** The trainer sees runs of Han characters, words with their leading
space, and every other character (digits, punctuation, symbols, white space) by itself, so no merge ever crosses those
borders; then cutting again at each encoding changes nothing and only costs time. On the 8,000 texts of the 4,000 real rows
the ids are the same to the last one. `encode_batch_fast` over train_3k twice, 2 threads of a busy box, best of 5 in turns,
29,298 entries trained on those rows with a first version of `WORDS`, characters per token of valid_1k. Rows/s moved by a
factor of three with what else ran on the box, so compare within the table only:

    pre-tokenizer while encoding                      rows/s     rows per CPU second   characters per token
    none (ours)                                       26,500     16,200                1.610
    one Split with a regular expression               15,300      9,900                1.610
    the same, Han runs of 16 characters at most       16,400      9,900                1.596
    Punctuation, Digits                               17,100      9,800                1.611
    Punctuation, Digits, Split at spaces, newlines    13,400      7,700                1.610
    Punctuation, Digits, FixedLength(8)               13,100      7,700                1.540

The library's word cache makes no difference here (25,000 rows/s without it): whole texts hardly ever come twice. Without
borders in training either, 1.791 characters a token, but then merges hold digits and punctuation.

**Rare characters go through bytes.** The alphabet is what covers 99.99 % of the sample, but at most half of the entries:
of 4,096 entries, 2,000 characters gave 1.241 characters per token, 2,500 gave 1.237, 3,500 gave 1.129 and 1,000 gave 1.094
(chosen on valid_1k, the same rows as above).

The library's NFKC is that of Unicode 9: 72 newer characters (such as U+32FF, the square era name Reiwa) stay as they are.
"""

import errno
import json
import math
import os
import re
import shutil
import unicodedata
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any, Literal, get_args

import numpy as np
import numpy.typing as npt
import pyarrow as pa
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

from brimful.data.store import sync
from brimful.data.tokens import MODEL_FILE, TokenizerFacts
from brimful.errors import BadData, BadOption
from brimful.units import GiB

SPECIAL = ("[PAD]", "[EOS]", "[SEP]", "[BOS]", "[CLS]", "[MASK]", "[UNK]")
"""With the ids 0 to 6, as the released ChatLM has them."""
BYTES = tuple(f"<0x{byte:02X}>" for byte in range(256))
FIXED = (*SPECIAL, *BYTES)
"""The first entries of every vocabulary."""
FIRST_BYTE, FIRST_PIECE, UNKNOWN = len(SPECIAL), len(FIXED), SPECIAL.index("[UNK]")
ALWAYS = ("\n", *map(chr, range(0x20, 0x7F)))
"""Characters of every alphabet."""
LEAST_VOCAB = 512
"""Fixed entries, ASCII and some 150 characters."""

WORDS = r"\p{Han}+| ?[[\p{L}\p{M}]&&[^\p{Han}]]+|[^\p{L}\p{M}]"
"""What a merge may not cross: a run of Han, another word with its leading space, any other character."""
_COVERAGE = 0.9999
_ALPHABET_LEAST = 2000
"""Of small vocabularies, characters may be more than half: at 1,024 entries every merge is worse than a character."""
_LONGEST_PIECE = 16
_MIN_FREQUENCY = 2
_BATCH_ROWS, _SLICE = 1024, 10_000
"""Rows and characters handed to the library at a time: it keeps an offset for each byte of a text while it splits it."""

Texts = Callable[[], Iterator[list[str]]]
"""The texts to train on, in lists, as often as asked."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Alphabet:
    """The characters that have entries of their own."""

    characters: tuple[str, ...]
    coverage: float
    """Their share of the sample."""


def normalised(rows: pa.Table) -> Texts:
    """All sides of all rows, normalised, in slices of at most 10,000 characters."""

    def texts() -> Iterator[list[str]]:
        for batch in rows.to_batches(max_chunksize=_BATCH_ROWS):
            whole = (unicodedata.normalize("NFKC", text) for side in batch.columns for text in side.to_pylist())
            yield [text[start : start + _SLICE] for text in whole for start in range(0, len(text), _SLICE)]

    return texts


def find_alphabet(texts: Texts, *, vocab_size: int) -> Alphabet:
    """ASCII and the most frequent characters, until they cover the sample or fill their share of the entries."""
    counts: Counter[str] = Counter()
    for batch in texts():
        counts.update("".join(batch))
    most = min(vocab_size - FIRST_PIECE, max(_ALPHABET_LEAST, vocab_size // 2))
    total = counts.total() or 1
    chosen = dict.fromkeys(ALWAYS)
    covered = sum(counts[character] for character in ALWAYS)
    for character in sorted(counts.keys() - set(ALWAYS), key=lambda one: (-counts[one], one)):
        if covered >= _COVERAGE * total or len(chosen) >= most:
            break
        chosen[character] = None
        covered += counts[character]
    return Alphabet(characters=tuple(sorted(chosen)), coverage=covered / total)


def without_rare(texts: Texts, alphabet: Alphabet) -> Texts:
    """The same texts, every character outside of the alphabet a newline: neither it nor its neighbours are merged over it."""
    rare = re.compile(f"[^{re.escape(''.join(alphabet.characters))}]")

    def common() -> Iterator[list[str]]:
        for batch in texts():
            yield [rare.sub("\n", text) for text in batch]

    return common


def train_bpe(texts: Texts, alphabet: Alphabet, *, vocab_size: int) -> Tokenizer:
    """One long native call. The same texts give the same entries in the same order."""
    learner = Tokenizer(models.BPE())
    learner.pre_tokenizer = pre_tokenizers.Split(Regex(WORDS), "isolated")
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size, min_frequency=_MIN_FREQUENCY, special_tokens=list(FIXED), show_progress=False,
        initial_alphabet=list(alphabet.characters), max_token_length=_LONGEST_PIECE,
    )  # fmt: skip
    learner.train_from_iterator(texts(), trainer)
    learnt: dict[str, Any] = json.loads(learner.to_str())["model"]
    merges = [(left, right) for left, right in learnt["merges"]]
    return finished(models.BPE(learnt["vocab"], merges, unk_token=SPECIAL[UNKNOWN], byte_fallback=True))


def finished(model: models.Model) -> Tokenizer:
    """Around the model: what is done to a text before and after. Bytes are entries, but no text is searched for them."""
    tokenizer = Tokenizer(model)
    tokenizer.normalizer = normalizers.NFKC()
    tokenizer.decoder = decoders.Sequence([decoders.ByteFallback(), decoders.Fuse()])
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in SPECIAL])
    tokenizer.encode_special_tokens = True
    return tokenizer


# What can be asked of `data tokenizer`, and whether the model it is for can use the result: told before any training.


Kind = Literal["bpe", "unigram"]
Expected = dict[str, Any]
"""Of the model's config: `vocab_size`, `pad_token_id`, `eos_token_id`, `decoder_start_token_id`; what is None is not known."""

VOCAB_SIZE = 29298
"""The released ChatLM's."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenizerOptions:
    """How to train a tokenizer."""

    vocab_size: int | None = None
    """Entries, the 7 special ones and 256 bytes counted. The model's unless given."""
    kind: Kind = "bpe"
    columns: str | None = None
    """Which columns make up which side, where the found ones are not meant: `prompt=question,response=answer`."""
    host_limit_bytes: int = 4 * GiB
    """The RAM that the whole process may take: it decides how many rows are used."""
    seed: int = 0
    """Of the sample."""
    max_bad: float = 0.0
    """The share of broken rows to put up with."""
    overwrite: bool = False
    """Replace a tokenizer that is there already."""

    def __post_init__(self) -> None:
        problems = []
        if self.vocab_size is not None and self.vocab_size < LEAST_VOCAB:
            problems.append(
                f"--vocab-size {self.vocab_size}: give at least {LEAST_VOCAB}; special tokens, bytes and ASCII take 359"
            )
        if self.kind not in get_args(Kind):
            problems.append(f"--kind {self.kind}: one of {', '.join(get_args(Kind))}")
        if self.host_limit_bytes <= 0:
            problems.append(f"--host-limit {self.host_limit_bytes}: give a size, such as 4GiB")
        if self.seed < 0:
            problems.append(f"--seed {self.seed}: give a whole number of at least 0")
        if not 0 <= self.max_bad <= 1:
            problems.append(f"--max-bad {self.max_bad}: give a share from 0 to 1, such as 0.01")
        if problems:
            raise BadOption("; ".join(problems))


@dataclass(frozen=True, slots=True, kw_only=True)
class IdCheck:
    """One figure of the tokenizer beside the model's."""

    name: str
    """As in config.json: `eos_token_id`."""
    tokenizer: int | None
    model: int | list[int] | None
    """None where the config does not say."""
    matches: bool | None
    """None where there is nothing to compare with."""


def asked_size(options: TokenizerOptions, expected: Expected | None) -> tuple[int, str]:
    """How many entries to train, and why."""
    if options.vocab_size is not None:
        return options.vocab_size, "as asked"
    known = (expected or {}).get("vocab_size")
    return (int(known), "the model's vocab_size") if known else (VOCAB_SIZE, "the released ChatLM's")


def check_ids(vocab_size: int, expected: Expected | None) -> tuple[IdCheck, ...]:
    """A tokenizer of ours with so many entries, against the model's config."""
    config = expected or {}
    size, start = config.get("vocab_size"), config.get("decoder_start_token_id")
    special = [("pad_token_id", SPECIAL.index("[PAD]")), ("eos_token_id", SPECIAL.index("[EOS]"))]
    return (
        IdCheck(name="vocab_size", tokenizer=vocab_size, model=size, matches=None if size is None else vocab_size <= size),
        *(_same(name, ours, config.get(name)) for name, ours in special),
        IdCheck(  # T5 starts with pad, BART with eos, others with bos: any special token will do, an ordinary one will not
            name="decoder_start_token_id", tokenizer=start if start in range(len(SPECIAL)) else None, model=start,
            matches=None if start is None else start in range(len(SPECIAL)),
        ),
    )  # fmt: skip


def refuse_misfit(vocab_size: int, expected: Expected | None, *, flag: str = "--model") -> None:
    """Before training: can the model use what will come out?"""
    by_name = {check.name: check for check in check_ids(vocab_size, expected) if check.matches is False}
    problems = []
    if "vocab_size" in by_name:
        size = by_name.pop("vocab_size").model
        problems.append(
            f"--vocab-size {vocab_size}: the model has a vocab_size of {size}; give {size} or less, or a larger {flag}"
        )
    if by_name:
        theirs = ", ".join(f"{name} {check.model}" for name, check in by_name.items())
        problems.append(
            f"{flag}: its config has {theirs}, but tokenizers made here have [PAD] 0, [EOS] 1 and special tokens up to {len(SPECIAL) - 1}; change the config"
        )
    if vocab_size < LEAST_VOCAB:
        problems.append(f"{flag}: its vocab_size of {vocab_size} has no room for the {len(FIXED)} special tokens and bytes and an alphabet; {LEAST_VOCAB} is the least")  # fmt: skip
    if problems:
        raise BadOption("; ".join(problems))


def _same(name: str, ours: int, theirs: int | list[int] | None) -> IdCheck:
    """A config may name several ids that end a text."""
    matches = None if theirs is None else ours in theirs if isinstance(theirs, list) else ours == theirs
    return IdCheck(name=name, tokenizer=ours, model=theirs, matches=matches)


# A Unigram vocabulary: start from twice as many byte-pair pieces, estimate, drop those that are missed least, repeat.
#
# The library encodes with Unigram models, but its own trainer sums over a hash map in random order: four runs on the same
# rows gave four different files (many scores, and once another piece among 20,000). Here counts are whole numbers and every
# order is fixed. That is the reason; speed is not one. On the 3,000 real rows neither is clearly faster (one run each on a
# busy box; the library's at 20,000 entries also took 7.3 s on another occasion). On 10,000 generated rows of 300 characters
# this took 72 and 88 s, while the library's, run once and also on a busy box, was stopped after 200 s.
#
#     entries     this               library's trainer    byte pairs
#     20,000      1.527,  7.7 s      1.514, 21.0 s        1.560, 1.7 s      characters per token of valid_1k
#      8,000      1.352, 13.7 s      1.351, 11.2 s        1.373, 1.3 s
#
# Estimating is by each text's best segmentation. What dropping a piece costs is its count times the difference to the best
# segmentation of the piece itself into others (Kudo 2018).


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


# The tokenizer's folder: made beside its place, renamed when whole; what transformers reads, and `report.json`.
#
# `AutoTokenizer.from_pretrained` loads it as a `PreTrainedTokenizerFast`, offline. `split_special_tokens` is in
# tokenizer_config.json because tokenizer.json cannot hold it: with it, the letters "[EOS]" in a user's text stay letters and
# do not end the text. Files are written as they are, without importing transformers (2 s, and torch with it).


_ROLES = {f"{token.strip('[]').lower()}_token": token for token in SPECIAL}
_CONFIG = {
    **_ROLES,
    "tokenizer_class": "PreTrainedTokenizerFast",
    "split_special_tokens": True,
    "clean_up_tokenization_spaces": False,
}
_DISK_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


def check_output(output: Path, *, overwrite: bool) -> None:
    """What is there already is refused, or replaced if that was asked for and it is a tokenizer."""
    if not output.exists() or (output.is_dir() and not any(output.iterdir())):
        return
    if not (output / MODEL_FILE).is_file():
        kind = "folder that is not a tokenizer" if output.is_dir() else "file"
        raise BadOption(f"--output {output} is an existing {kind}; name another folder")
    if not overwrite:
        raise BadOption(f"--output {output} is an existing tokenizer; name another folder, or add --overwrite")


def check_outside(output: Path, paths: Sequence[str]) -> None:
    """A tokenizer.json within a folder of rows would be read as rows the next time."""
    for path in paths:
        if Path(path).is_dir() and output.is_relative_to(Path(path).resolve()):
            raise BadOption(f"--output {output} lies inside {path}, whose files are read; name a folder outside of it")


@contextmanager
def folder_beside(output: Path, *, overwrite: bool) -> Iterator[Path]:
    """A folder to fill, which becomes the output when all went well and is gone otherwise."""
    part = output.with_name(f".{output.name}.{os.getpid()}.part")
    with _failures_told(output):
        check_output(output, overwrite=overwrite)
        part.mkdir(parents=True)  # before the long work, not after it
    try:
        yield part
        with _failures_told(output):
            _publish(part, output, overwrite=overwrite)
    finally:
        shutil.rmtree(part, ignore_errors=True)


def write_tokenizer(folder: Path, tokenizer: Tokenizer) -> TokenizerFacts:
    """What transformers and pack read; and what they find there."""
    _write(folder / MODEL_FILE, tokenizer.to_str(pretty=True))
    _write(folder / "tokenizer_config.json", _text(_CONFIG))
    _write(folder / "special_tokens_map.json", _text(_ROLES))
    return TokenizerFacts.read(folder)


def write_report(folder: Path, report: dict[str, Any]) -> None:
    _write(folder / "report.json", _text(report))


def _write(path: Path, text: str) -> None:
    """On the disk when this returns."""
    with _failures_told(path.parent):
        path.write_text(text, encoding="utf-8")
        sync(path)


def _publish(part: Path, output: Path, *, overwrite: bool) -> None:
    """An old tokenizer goes when the new one is in its place, and comes back if that fails."""
    check_output(output, overwrite=overwrite)
    old = part.with_suffix(".old")
    if (output / MODEL_FILE).is_file():
        output.rename(old)
    try:
        part.rename(output)
    except BaseException:
        if old.exists():
            old.rename(output)
        raise
    shutil.rmtree(old, ignore_errors=True)


@contextmanager
def _failures_told(path: Path) -> Iterator[None]:
    """A disk that is full or must not be written to is one sentence."""
    try:
        yield
    except OSError as error:
        if error.errno in _DISK_FULL:
            raise BadData(f"{path.parent}: the disk is full; free some space and run the same command again") from None
        raise BadData(
            f"{error.filename or path}: {error.strerror or error}; name another folder with --output"
        ) from None


def _text(content: dict[str, Any]) -> str:
    return json.dumps(content, indent=2, ensure_ascii=False) + "\n"
