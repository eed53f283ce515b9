"""A terminal of our own, for tests: a program runs in a pseudo-terminal, and what it writes becomes a screen.

It knows what `brimful watch` uses (cursor, erasing a line, the second screen, wide characters) and fails on anything else, so a new
sequence is a decision.
"""

import codecs
import fcntl
import os
import pty
import re
import select
import struct
import subprocess
import sys
import termios
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from rich.cells import get_character_cell_size

import brimful

HANGS_S = 60.0
"""A program that has not shown what is expected by then hangs."""
_SEQUENCE = re.compile(r"\x1b\[(\?)?([\d;]*)([a-zA-Z])")


class Screen:
    """Two screens of characters, as a terminal keeps them."""

    def __init__(self, columns: int, lines: int) -> None:
        self.columns, self.lines = columns, lines
        self.second, self.cursor_hidden = False, False
        self._cells: dict[bool, dict[tuple[int, int], str]] = {False: {}, True: {}}
        self._row = self._column = 0
        self._left = 0, 0
        self._rest = ""

    def write(self, text: str) -> None:
        text, self._rest = self._rest + text, ""
        place = 0
        while place < len(text):
            if text[place] == "\x1b":
                match = _SEQUENCE.match(text, place)
                if match is None:
                    self._rest = text[place:]
                    assert len(self._rest) < 32, f"unknown sequence {self._rest[:32]!r}"
                    return
                self._obey(*match.groups())
                place = match.end()
            else:
                self._put(text[place])
                place += 1

    def _obey(self, private: str | None, numbers: str, letter: str) -> None:
        if private:
            for number in numbers.split(";"):
                assert number in ("7", "25", "1049"), f"unknown mode {number}"
                if number == "1049":
                    self._switch(letter == "h")
                if number == "25":
                    self.cursor_hidden = letter == "l"
        elif letter == "H":
            row, column = (int(number) for number in numbers.split(";"))
            self._row, self._column = row - 1, column - 1
        elif letter == "K":
            assert numbers == "2"
            cells = self._cells[self.second]
            for place in [place for place in cells if place[0] == self._row]:
                del cells[place]
        else:
            assert letter == "m", f"unknown sequence {numbers}{letter}"

    def _switch(self, second: bool) -> None:
        """To the second screen, which is empty, or back to where the cursor was on the first."""
        if second and not self.second:
            self._left = self._row, self._column
        if self.second and not second:
            self._row, self._column = self._left
        self.second = second
        self._cells[True].clear()

    def resize(self, columns: int, lines: int) -> None:
        """What is outside then is gone."""
        self.columns, self.lines = columns, lines
        for cells in self._cells.values():
            for row, column in [place for place in cells if place[0] >= lines or place[1] >= columns]:
                del cells[row, column]

    def _put(self, character: str) -> None:
        if character == "\n":
            self._row += 1
        elif character == "\r":
            self._column = 0
        else:
            self._cells[self.second][self._row, self._column] = character
            self._column += get_character_cell_size(character)

    @property
    def text(self) -> list[str]:
        """The lines in view."""
        cells = self._cells[self.second]
        rows: list[str] = []
        for row in range(self.lines):
            line, column = "", 0
            while column < self.columns:
                character = cells.get((row, column), " ")
                line, column = line + character, column + get_character_cell_size(character)
            rows.append(line.rstrip())
        return rows

    @property
    def widest(self) -> int:
        """The last column that is used, from 1."""
        return max((column + get_character_cell_size(one) for (_, column), one in self._cells[self.second].items() if one != " "), default=0)  # fmt: skip


class Terminal:
    """`brimful` in a pseudo-terminal. A context manager that leaves nothing running."""

    def __init__(
        self,
        *arguments: str,
        columns: int = 80,
        lines: int = 24,
        cwd: Path | None = None,
        environment: Mapping[str, str] | None = None,
        command: Sequence[str] | None = None,
    ) -> None:
        self.screen = Screen(columns, lines)
        self.bytes_read = 0
        self._decoder = codecs.getincrementaldecoder("utf-8")()
        self._master, slave = pty.openpty()
        self.resize(columns, lines)
        self.mode_before = termios.tcgetattr(slave)
        self._slave = slave
        variables = {name: value for name, value in os.environ.items() if name not in ("LC_ALL", "LC_CTYPE", "NO_COLOR", "COLUMNS", "LINES")}  # fmt: skip
        variables |= {
            "PYTHONPATH": str(Path(brimful.__file__).parents[1]),
            "TERM": "xterm-256color",
            "LANG": "en_US.UTF-8",
            "PYTHONIOENCODING": "utf-8",
            "TZ": "UTC",
        }
        self.process = subprocess.Popen(
            command or [sys.executable, "-m", "brimful", *arguments],
            stdin=slave, stdout=slave, stderr=slave, cwd=cwd, env={**variables, **(environment or {})}, start_new_session=True,
            preexec_fn=lambda: fcntl.ioctl(slave, termios.TIOCSCTTY, 0),
        )  # fmt: skip

    def __enter__(self) -> "Terminal":
        return self

    def __exit__(self, *_: object) -> None:
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait()
        os.close(self._slave)
        os.close(self._master)

    def resize(self, columns: int, lines: int) -> None:
        """The kernel tells the program."""
        self.screen.resize(columns, lines)
        fcntl.ioctl(self._master, termios.TIOCSWINSZ, struct.pack("HHHH", lines, columns, 0, 0))

    def press(self, keys: str) -> None:
        os.write(self._master, keys.encode())

    def signal(self, number: int) -> None:
        os.kill(self.process.pid, number)

    def wait_for(self, condition: str | Callable[[Screen], bool]) -> list[str]:
        """The screen when it contains this text, or when this holds."""
        holds = (lambda screen: condition in "\n".join(screen.text)) if isinstance(condition, str) else condition
        end = time.monotonic() + HANGS_S
        while not holds(self.screen):
            assert time.monotonic() < end, f"never seen: {condition}\n" + "\n".join(self.screen.text)
            if not self._read(0.2) and self.process.poll() is not None:
                while self._read(0.1):
                    pass
                assert holds(self.screen), f"ended without: {condition}\n" + "\n".join(self.screen.text)
        return self.screen.text

    def settle(self) -> list[str]:
        """The screen after everything that is on its way has come."""
        while self._read(0.3):
            pass
        return self.screen.text

    def wait(self) -> int:
        """The exit code."""
        end = time.monotonic() + HANGS_S
        while self.process.poll() is None:
            assert time.monotonic() < end, "does not end\n" + "\n".join(self.screen.text)
            self._read(0.1)
        self.settle()
        return self.process.returncode

    @property
    def mode(self) -> list[object]:
        """How the terminal treats input: echo, lines."""
        return termios.tcgetattr(self._slave)

    def _read(self, seconds: float) -> bool:
        if not select.select([self._master], [], [], seconds)[0]:
            return False
        content = os.read(self._master, 65536)
        self.bytes_read += len(content)
        self.screen.write(self._decoder.decode(content))
        return True
