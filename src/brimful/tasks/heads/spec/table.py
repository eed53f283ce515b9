"""A table of the spec file while it is read: every value is checked, and what is wrong is gathered, not raised.

A grid that takes an hour is started once; a spec with four mistakes should say four sentences, not one an attempt.
Whoever reads a table asks it for each key; a value that is wrong is noted and the default is handed out instead, so that
the reading goes on. The file as a whole is refused at the end, by whoever holds the list.
"""

import difflib
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class Kind:
    """What a value has to be: in words that follow "give", and as a test."""

    words: str
    good: Callable[[Any], bool]


def whole(least: int) -> Kind:
    return Kind(
        f"a whole number of at least {least}",
        lambda value: _number(value) and isinstance(value, int) and value >= least,
    )


def above(least: float) -> Kind:
    return Kind(f"a number above {least:g}", lambda value: _number(value) and value > least)


def at_least(least: float) -> Kind:
    return Kind(f"a number of at least {least:g}", lambda value: _number(value) and value >= least)


def share(*, zero: bool) -> Kind:
    """From 0 up to but without 1 (a dropout), or above 0 up to 1 (a factor)."""
    if zero:
        return Kind("a number from 0 on and below 1", lambda value: _number(value) and 0 <= value < 1)
    return Kind("a number above 0, up to 1", lambda value: _number(value) and 0 < value <= 1)


def one_of(names: Sequence[str]) -> Kind:
    return Kind(f"one of {', '.join(names)}", lambda value: isinstance(value, str) and value in names)


NUMBER = Kind("a number", lambda value: _number(value))
TEXT = Kind("a text", lambda value: isinstance(value, str) and value.strip() != "")
SHAPE = Kind(
    "a list of layer sizes, such as [256, 128]",
    lambda value: isinstance(value, list) and all(whole(1).good(one) for one in value),
)


class SpecTable:
    """One table, with the place in the file that its problems are told with."""

    def __init__(self, content: Mapping[str, Any], where: str, problems: list[str]) -> None:
        self.content, self.where, self.problems = content, where, problems

    def wrong(self, sentence: str) -> None:
        self.problems.append(f"{self.where}: {sentence}" if self.where else sentence)

    def only(self, known: Sequence[str], *, elsewhere: Sequence[str] = ()) -> None:
        """Keys that nobody asks for are mistakes. TOML gives a key below `[[datasets]]` to the dataset: that is told."""
        for key in self.content:
            if key in elsewhere:
                self.wrong(f"{key} belongs to the top of the file, above the first [table]")
            elif key not in known:
                self.wrong(f"unknown key {unknown(key, known)}")

    def one(self, key: str, default: Any, kind: Kind) -> Any:
        """The value, or the default where it is missing or wrong."""
        if key not in self.content:
            return default
        return self._good(key, self.content[key], default, kind)

    def some(self, key: str, default: Any, kind: Kind) -> tuple[Any, ...]:
        """One value or a list of them: a grid. A shape is a list itself, so its grid is a list of lists."""
        if key not in self.content:
            return (default,)
        asked = self.content[key]
        if not isinstance(asked, list) or (kind is SHAPE and not any(isinstance(one, list) for one in asked)):
            return (self._good(key, asked, default, kind),)
        if not asked:
            self.wrong(f"{key} is an empty list: give {kind.words}, or several in a list")
        values = [self._good(key, one, default, kind) for one in asked]
        if again := repeated(values):
            self.wrong(f"{key} has {shown(again[0])} twice")
        return tuple(values)

    def _good(self, key: str, value: Any, default: Any, kind: Kind) -> Any:
        if kind.good(value):
            return value
        self.wrong(f"{key} {shown(value)}: give {kind.words}")
        return default


def unknown(name: str, known: Sequence[str]) -> str:
    """`'dop', did you mean dpo? (known are dpo, bce)`."""
    meant = near(name, known)
    return f"{name!r}{f', did you mean {_or(meant)}?' if meant else ''} (known are {', '.join(known)})"


def near(name: str, known: Sequence[str], *, cutoff: float = 0.6) -> list[str]:
    """What may be meant, the likeliest first; case does not hide it."""
    by_lower = {one.lower(): one for one in known}
    return [by_lower[one] for one in difflib.get_close_matches(name.lower(), by_lower, n=3, cutoff=cutoff)]


def repeated(values: Iterable[Any]) -> list[Any]:
    """What was there before, in order. Lists and mappings are compared too, so there is no set."""
    seen: list[Any] = []
    again: list[Any] = []
    for value in values:
        (again if value in seen else seen).append(value)
    return again


def shown(value: Any) -> str:
    """A value as the file has it, short."""
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:59]}…"


def _or(names: Sequence[str]) -> str:
    return names[0] if len(names) == 1 else f"{', '.join(names[:-1])} or {names[-1]}"


def _number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)
