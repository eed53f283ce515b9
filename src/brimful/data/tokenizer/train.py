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

import json
import re
import unicodedata
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import pyarrow as pa
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

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
