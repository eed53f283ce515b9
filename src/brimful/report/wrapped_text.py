"""Text for tables whose lines may also end between two Chinese characters.

rich breaks lines at blanks only, so a Chinese sentence, which has few, leaves half of a column empty. Here a line may end after
any Chinese character, but not before closing punctuation, after an opening bracket, or between a number and its unit.
"""

import re
from itertools import accumulate
from typing import Any

from rich.cells import cell_len, chop_cells
from rich.console import Console
from rich.containers import Lines
from rich.text import Text

_WIDE = r"\u2e80-\u9fff\uf900-\ufaff\uff00-\uffef"
_UNIT = re.compile(
    rf"[（《「]*(?:\d[\d.,]* (?:[KMGT]?i?B|ms|min|s|h)(?![a-z])|[^\s{_WIDE}]+|[{_WIDE}])[，。；：、！？）》」/]*\s*|\s+"
)
"""What stays on one line: a figure with its unit, a word, or a Chinese character, with the punctuation that belongs to it."""


class WrappedText(Text):
    """A `Text` that wraps so."""

    def wrap(self, console: Console, width: int, **options: Any) -> Lines:
        if options.get("no_wrap") or self.no_wrap or not re.search(f"[{_WIDE}]", self.plain):
            return super().wrap(console, width, **options)
        return wrapped(self, width)


def wrapped(text: Text, width: int) -> Lines:
    """Its lines, each at most this wide."""
    lines = Lines()
    for line in text.split(allow_blank=True):
        lines.extend(line.divide(_line_ends(line.plain, width)))
    for line in lines:
        line.rstrip()
    return lines


def _line_ends(text: str, width: int) -> list[int]:
    """The offsets at which a line of this many columns ends."""
    ends, used = list[int](), 0
    for unit in _UNIT.finditer(text):
        taken = cell_len(unit[0].rstrip())
        if used and used + taken > width:
            ends.append(unit.start())
            used = 0
        if taken > width:  # a path without blanks
            *pieces, last = chop_cells(unit[0].rstrip(), width)
            starts = accumulate(map(len, pieces), initial=unit.start())
            ends += [start for start in starts if start > unit.start()]
            used = cell_len(last)
            continue
        used += cell_len(unit[0])
    return ends
