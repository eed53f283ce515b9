"""`brimful watch [RUN]`: a run in the terminal, while it trains or after it has ended.

The view uses the terminal's second screen and writes only lines that have changed, so it does not flicker and is light over
ssh: 1 kB a second at 80 × 24 and 16 kB at 200 × 60, and nothing once the run has ended. However it ends (q, Ctrl-C, a signal,
an error), the terminal is restored. Where the output is no terminal or cannot move its cursor, one frame is printed, as with
`--once`.
"""

import io
import json as json_
import math
import os
import select
import shutil
import signal
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack, suppress
from functools import partial
from pathlib import Path
from types import FrameType
from typing import Any, Self

from rich.console import Console
from rich.text import Text

from brimful.cli.flags import Switch
from brimful.cli.output import with_flags
from brimful.errors import BadOption
from brimful.languages import set_language, tr
from brimful.report.watch.run_snapshot import Snapshot
from brimful.report.watch.watch_canvas import ASCII, Glyphs, glyphs_for
from brimful.report.watch.watch_screen import frame
from brimful.report.watch.watcher import Watcher

LEAST_S = 1.0
"""Seconds between two looks at a run, at least."""
PAUSE_S = 3600.0
PRINTED_SIZE = (80, 36)
"""Columns and lines of a frame that goes to a file or a pipe."""
_BEGIN, _END = "\x1b[?1049h\x1b[?25l\x1b[?7l", "\x1b[?7h\x1b[?25h\x1b[?1049l"
"""The second screen, the cursor and the wrapping of long lines: on and off."""


def watch(
    run: Path | None = None,
    /,
    *,
    once: Switch = False,
    json: Switch = False,
    every: float = LEAST_S,
    ascii: Switch = False,
) -> None:
    """Watch a run: memory of every card, host RAM, speed, loss, checkpoints, out-of-memory errors.

    Reads the run's folder and nothing else, so it costs the run nothing and works for runs that have ended. q quits, p pauses.
    See docs/watch.md.

    Parameters
    ----------
    run
        The run's folder. Default: the newest in runs/, and the next one as soon as it begins.
    once
        Print one frame and exit, as without a terminal.
    json
        Print what is known of the run as one JSON object and exit.
    every
        Seconds between two looks, at least 1.
    ascii
        Draw with ASCII characters only, for terminals that show others badly.
    """
    if not (math.isfinite(every) and every >= LEAST_S):
        raise BadOption(f"every={every:g} must be at least {LEAST_S:g}. Try: every=1.")
    encoding = sys.stdout.encoding or "ascii"
    glyphs = ASCII if ascii else glyphs_for(encoding, os.environ)
    if not _has(encoding, "中"):
        set_language("en")
    console = Console()
    with Watcher(run) as watcher:
        if json:
            print(json_.dumps(watcher.look().to_json()), flush=True)
        elif once or not console.is_terminal or console.is_dumb_terminal or not sys.stdout.isatty():
            _print(watcher.look(), console, glyphs)
        else:
            with suppress(KeyboardInterrupt), FullScreen(console, encoding) as screen:
                _live(watcher, screen, glyphs, every)
            print(_last_words(watcher.look()), flush=True)


def _live(watcher: Watcher, screen: "FullScreen", glyphs: Glyphs, every: float) -> None:
    """Until q. A run that has ended is looked at again only to see whether it is resumed."""
    snapshot, paused = watcher.look(), False
    due = time.monotonic() + every
    while True:
        footer = f"{tr('q quit')}  {tr('p go on')}  {tr('PAUSED')}" if paused else f"{tr('q quit')}  {tr('p pause')}"
        screen.draw(partial(frame, snapshot, glyphs=glyphs, footer=footer, wording=with_flags))
        key = screen.wait(PAUSE_S if paused else max(0.0, due - time.monotonic()))
        if key == "q":
            return
        paused = paused != (key == "p")
        if not paused and time.monotonic() >= due:
            snapshot = watcher.look()
            due = time.monotonic() + every


def _print(snapshot: Snapshot, console: Console, glyphs: Glyphs) -> None:
    width, height = shutil.get_terminal_size(PRINTED_SIZE)
    lines = _ansi(frame(snapshot, width, height - 1, glyphs=glyphs, wording=with_flags), console)
    encoding = sys.stdout.encoding or "ascii"
    print("\n".join(line.rstrip() for line in lines).encode(encoding, "replace").decode(encoding), flush=True)


def _last_words(snapshot: Snapshot) -> str:
    """What stays in the terminal after the view is closed."""
    line = f"{snapshot.run}: {tr(snapshot.state_label or snapshot.state)}, {tr('step {step:,}', step=snapshot.step)}"
    command = snapshot.resume_command
    template = "Fix this first, then continue: {command}" if snapshot.fails_again else "To continue: {command}"
    text = f"{line}\n{tr(template, command=command)}" if command else line
    encoding = sys.stdout.encoding or "ascii"
    return text.encode(encoding, "replace").decode(encoding)


def _has(encoding: str, text: str) -> bool:
    try:
        text.encode(encoding)
    except (UnicodeError, LookupError):
        return False
    return True


def _ansi(lines: Sequence[Text], like: Console) -> list[str]:
    """The lines with the colours that this console has; none with NO_COLOR or in a file."""
    system: Any = like.color_system
    console = Console(
        file=io.StringIO(), force_terminal=like.is_terminal, color_system=system, no_color=like.no_color, width=1000,
        markup=False, highlight=False, emoji=False, legacy_windows=False,
    )  # fmt: skip
    drawn = []
    for line in lines:
        with console.capture() as capture:
            console.print(line, end="", no_wrap=True, overflow="ignore", crop=False)
        drawn.append(capture.get())
    return drawn


class FullScreen:
    """The terminal while it shows the view. A context manager that restores it.

    with FullScreen(Console(), "utf-8") as screen:
        screen.draw(lambda width, height: lines)
        key = screen.wait(1.0)
    """

    def __init__(self, console: Console, encoding: str) -> None:
        self._console, self._encoding = console, encoding
        self._out = sys.stdout.fileno()
        self._keys: int | None = sys.stdin.fileno() if sys.stdin is not None and sys.stdin.isatty() else None
        self._mode: Any = None
        self._drawn: tuple[tuple[int, int], list[str]] = ((0, 0), [])
        self._stack = ExitStack()
        self._woken = -1

    def __enter__(self) -> Self:
        with self._stack as stack:
            stack.callback(self._close)  # the last to run
            self._woken, wake = os.pipe()
            for fd in (self._woken, wake):
                os.set_blocking(fd, False)
                stack.callback(os.close, fd)
            stack.callback(signal.set_wakeup_fd, signal.set_wakeup_fd(wake, warn_on_full_buffer=False))
            handlers = {"SIGWINCH": lambda *_: None, "SIGTERM": _leave, "SIGHUP": _leave, "SIGTSTP": self._suspend}
            for name, handler in handlers.items():
                number = getattr(signal, name, None)  # Windows has few of them
                if number is not None:
                    stack.callback(signal.signal, number, signal.signal(number, handler))
            self._open()
            self._stack = stack.pop_all()
        return self

    def __exit__(self, *error: object) -> None:
        self._stack.close()

    def draw(self, lines_for: Callable[[int, int], Sequence[Text]]) -> None:
        """The lines that `lines_for(width, height)` returns, in one write; only those that have changed."""
        terminal = os.get_terminal_size(self._out)
        size = (terminal.columns or PRINTED_SIZE[0], terminal.lines or PRINTED_SIZE[1])  # some consoles do not say
        lines = _ansi(lines_for(*size), self._console)
        before = self._drawn[1] if self._drawn[0] == size else []
        lines += [""] * (size[1] - len(lines))
        pieces = []
        for row, line in enumerate(lines):
            if row >= len(before) or before[row] != line:
                pieces.append(f"\x1b[{row + 1};1H\x1b[2K{line}")
        self._drawn = (size, lines)
        if pieces:
            self._write("".join(pieces))

    def wait(self, seconds: float) -> str | None:
        """A key in lower case; "resize" if the window has another size or was covered; None if the time is over."""
        files = [self._woken, *([] if self._keys is None else [self._keys])]
        ready, _, _ = select.select(files, [], [], seconds)
        if self._woken in ready:
            with suppress(BlockingIOError):
                os.read(self._woken, 1024)
            return "resize"
        if self._keys is None or self._keys not in ready:
            return None
        try:
            keys = os.read(self._keys, 1024)
        except OSError:
            keys = b""
        if not keys:  # the terminal has gone
            return "q"
        return "" if keys.startswith(b"\x1b") else keys.decode(errors="replace")[-1].lower()

    def _open(self) -> None:
        if self._keys is not None:
            with suppress(ImportError):  # on Windows Ctrl-C quits
                import termios
                import tty

                self._mode = termios.tcgetattr(self._keys)
                tty.setcbreak(self._keys)
        self._drawn = ((0, 0), [])
        self._write(_BEGIN)

    def _close(self) -> None:
        empty = "".join(f"\x1b[{row + 1};1H\x1b[2K" for row in range(len(self._drawn[1])))
        with suppress(OSError):
            self._write(empty + _END)  # tmux copies wide lines of a window that was resized to its first screen
        if self._mode is not None and self._keys is not None:
            import termios

            with suppress(termios.error):
                termios.tcsetattr(self._keys, termios.TCSADRAIN, self._mode)
            self._mode = None

    def _suspend(self, number: int, _: FrameType | None) -> None:
        """Ctrl-Z: the shell gets its terminal back, and `fg` the view."""
        self._close()
        handler = signal.signal(number, signal.SIG_DFL)
        os.kill(os.getpid(), number)
        signal.signal(number, handler)
        self._open()

    def _write(self, text: str) -> None:
        content = text.encode(self._encoding, "replace")
        while content:
            content = content[os.write(self._out, content) :]


def _leave(number: int, _: FrameType | None) -> None:
    raise SystemExit(128 + number)
