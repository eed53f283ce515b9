"""What can be asked of a clean, and how large its pieces may be within the memory asked for."""

from dataclasses import dataclass
from typing import Any

from brimful.errors import BadOption
from brimful.machine.host import Host
from brimful.units import GiB, MiB, parse_bytes

LEAST_HOST_BYTES = 384 * MiB
_KEY = ("min_chars", "max_chars", "max_tokens", "near", "seed")
"""What the work up to the split depends on: an interrupted clean goes on under other values of the rest."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CleanOptions:
    """The words that `brimful data clean` and `brimful.data.clean.run.clean` share."""

    columns: str | None = None
    """Which column is what, where the found ones are not meant: `prompt=question,response=answer`."""
    tokenizer: str | None = None
    """A folder with a tokenizer.json, to count tokens with."""
    min_chars: int | str | None = None
    """Drop rows with a side of fewer characters: one number for all sides, or one for each (`2,10`)."""
    max_chars: int | str | None = None
    """Drop rows with a side of more characters."""
    max_tokens: int | str | None = None
    """Drop rows with a side of more tokens, the closing eos counted."""
    near: float | None = 0.85
    """From which similarity on a row is a near duplicate of an earlier one. None keeps them."""
    valid: float = 0.01
    """Rows of valid.parquet: a share below 1, or a number."""
    test: float = 0
    """Rows of test.parquet, likewise."""
    seed: int = 0
    """Of the order of the rows, hence of the split."""
    host_limit: int | str = GiB
    """Memory to stay within, what Python and its libraries take at the start not counted."""
    max_bad: float = 0.0
    """The share of rows that may be broken."""
    overwrite: bool = False
    """Replace the outputs that are there already."""

    def __post_init__(self) -> None:
        problems = [problem for check in _CHECKS for problem in check(self)]
        if problems:
            raise BadOption("; ".join(problems))

    @property
    def host_limit_bytes(self) -> int:
        return parse_bytes(self.host_limit, flag="--host-limit")

    def key(self) -> dict[str, Any]:
        """What an interrupted clean must have been asked for to be gone on with."""
        return {name: getattr(self, name) for name in _KEY}


@dataclass(frozen=True, slots=True, kw_only=True)
class Budget:
    """How the memory is divided. No row that comes out depends on it."""

    threads: int
    segment_bytes: int
    """Rows and their hashes that are gathered before they are written; three copies of the text exist for a moment."""
    bucket_bytes: int
    """Text that is brought into order at a time; up to twice as much, three copies, and the next one read ahead."""
    duckdb_bytes: int
    """DuckDB keeps to it within 2 %: 301 MiB of 300 for 10 million rows, the rest is on disk."""

    @classmethod
    def of(cls, host_limit_bytes: int, cores: int | None = None) -> "Budget":
        """Within this limit, on so many cores; on those that this process may use unless given."""
        usable = cores or Host.detect().cores
        return cls(
            threads=max(1, min(usable, 8, host_limit_bytes // (192 * MiB))),
            segment_bytes=min(64 * MiB, host_limit_bytes // 32),
            bucket_bytes=min(64 * MiB, host_limit_bytes // 64),
            duckdb_bytes=host_limit_bytes // 6,
        )


def _limits(options: CleanOptions) -> list[str]:
    problems = []
    for flag, asked in (("min-chars", options.min_chars), ("max-chars", options.max_chars), ("max-tokens", options.max_tokens)):  # fmt: skip
        parts = [] if asked is None else str(asked).split(",")
        if not all(part.strip().isdecimal() and int(part) >= 1 for part in parts):
            problems.append(
                f"--{flag} {asked}: give a whole number from 1 on, or one for each side with commas between"
            )
    if options.max_tokens is not None and options.tokenizer is None:
        problems.append(f"--max-tokens {options.max_tokens}: tokens are counted with a tokenizer; give --tokenizer DIR")
    if options.tokenizer is not None and options.max_tokens is None:
        problems.append(f"--tokenizer {options.tokenizer}: it only counts tokens; give --max-tokens, too")
    return problems


def _shares(options: CleanOptions) -> list[str]:
    problems = []
    if options.near is not None and not 0.5 <= options.near <= 1:
        problems.append(f"--near {options.near:g}: give a similarity from 0.5 to 1, such as 0.85, or --no-near")
    if not 0 <= options.max_bad <= 1:
        problems.append(f"--max-bad {options.max_bad:g}: give a share from 0 to 1, such as 0.01")
    for flag, asked in (("valid", options.valid), ("test", options.test)):
        if not 0 <= asked < 2**53 or (asked >= 1 and asked != int(asked)):
            problems.append(f"--{flag} {asked:g}: give a share below 1, such as 0.01, or a whole number of rows")
    if options.valid < 1 and options.test < 1 and options.valid + options.test >= 1:
        problems.append(f"--valid {options.valid:g} --test {options.test:g}: together they leave no row for training")
    return problems


def _host(options: CleanOptions) -> list[str]:
    try:
        asked = options.host_limit_bytes
    except BadOption as error:
        return [str(error)]
    least = f"{LEAST_HOST_BYTES // MiB}MiB"
    return [f"--host-limit {options.host_limit}: cleaning needs {least} at least"] if asked < LEAST_HOST_BYTES else []


def _seed(options: CleanOptions) -> list[str]:
    good = isinstance(options.seed, int) and not isinstance(options.seed, bool) and 0 <= options.seed < 2**63
    return [] if good else [f"--seed {options.seed!r}: give a whole number from 0 on"]


_CHECKS = (_limits, _shares, _host, _seed)
