"""What can be asked of `data tokenizer`, and whether the model it is for can use the result: told before any training."""

from dataclasses import dataclass
from typing import Any, Literal, get_args

from brimful.data.tokenizer.train import FIXED, LEAST_VOCAB, SPECIAL
from brimful.errors import BadOption
from brimful.units import GiB

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
