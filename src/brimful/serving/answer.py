"""A prompt, and its answer while it is being written: what the engine's thread and those who wait for it share.

The engine adds a token; the answer turns it into text that may be shown. Two things are held back: the first bytes of a
character, and the beginning of what may become a stop string. Text is decoded from a window of at most 64 tokens, so a token
late in a long answer costs what an early one does.

Nobody who reads an answer can make the engine wait: text piles up here, at most `max_new_tokens` of it.
"""

import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from brimful.errors import BrimfulError
from brimful.tasks.generate import INCOMPLETE_CHARACTER

WINDOW, CONTEXT = 64, 16
"""Tokens that are decoded at most, and that are left of them when there are more: enough before the newest to decode it right."""
BYTES = 3
"""Tokens at most that begin a character: it has four bytes at most, and the last one completes it."""
Finish = Literal["stop", "length"]


@dataclass(frozen=True, kw_only=True)
class Prompt:
    """What to answer, and how tokens are chosen. Validated by whoever makes it."""

    tokens: Sequence[int]
    max_new_tokens: int
    temperature: float = 0.0
    top_p: float = 1.0
    repetition_penalty: float = 1.0
    """Above 1, scores of tokens that were generated already are divided by it."""
    frequency_penalty: float = 0.0
    """Subtracted from the score of a token for each time it was generated."""
    presence_penalty: float = 0.0
    """Subtracted from the score of a token that was generated at all."""
    seed: int = 0
    """Of sampling; another number for each answer to the same prompt."""
    stop: tuple[str, ...] = ()
    """Texts that end the answer, which does not contain them."""
    top_logprobs: int | None = None
    """The most likely tokens whose log-probability is kept, beside that of the chosen one. None: nothing is kept."""


@dataclass(frozen=True, slots=True)
class Logprob:
    """How likely a token was by the model alone, without temperature and penalties."""

    token: int
    logprob: float
    top: Sequence[tuple[int, float]]
    """The most likely tokens with theirs, the likeliest first."""
    offset: int = 0
    """Characters of the answer before it."""


class Answer:
    """The answer to one prompt. Iterating waits for its pieces of text and raises what went wrong."""

    def __init__(
        self, prompt: Prompt, decode: Callable[[Sequence[int]], str], notify: Callable[[], object] = lambda: None
    ) -> None:
        """`notify` is called from the engine's thread when there is something new, and must not block."""
        self.prompt = prompt
        self.tokens: list[int] = []
        """Generated so far, without the token that ended the answer."""
        self.finish: Finish | None = None
        self.error: BrimfulError | None = None
        self.submitted_s = time.monotonic()
        self.first_token_s: float | None = None
        """Seconds from the submission to the first token."""
        self.cancelled = False
        self._text = AnswerText(decode, prompt.stop)
        self._pieces: deque[str] = deque()
        self._logprobs: deque[Logprob] = deque()
        self._published = self._taken = 0
        """Characters."""
        self._changed = threading.Condition()
        self._notify = notify

    @property
    def done(self) -> bool:
        return self.finish is not None or self.error is not None

    def __iter__(self) -> Iterator[str]:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._pieces or self.done)
                piece = self._pieces.popleft() if self._pieces else None
            if piece is not None:
                yield piece
            elif self.error is not None:
                raise self.error
            else:
                return

    def take(self) -> tuple[str, list[Logprob]]:
        """All text that came since the last call, and the tokens in it if their log-probabilities are kept."""
        with self._changed:
            text, logprobs = "".join(self._pieces), list[Logprob]()
            self._pieces.clear()
            self._taken += len(text)
            while self._logprobs and (self.done or self._logprobs[0].offset < self._taken):
                logprobs.append(self._logprobs.popleft())
        return text, logprobs

    def cancel(self) -> None:
        """Nobody waits any more. The engine drops the answer before its next token."""
        self.cancelled = True

    # The engine's side.

    def add(self, token: int, logprob: Logprob | None = None) -> bool:
        """Append a token. Returns whether a stop string is complete."""
        if self.first_token_s is None:
            self.first_token_s = time.monotonic() - self.submitted_s
        self.tokens.append(token)
        if logprob is not None:
            with self._changed:
                self._logprobs.append(replace(logprob, offset=self._published + len(self._text.held)))
        self._publish(self._text.add(token))
        return self._text.stopped

    def end(self, finish: Finish) -> None:
        self._publish(self._text.rest(), finish="stop" if self._text.stopped else finish)

    def fail(self, error: BrimfulError) -> None:
        self._publish("", error=error)

    def _publish(self, piece: str, *, finish: Finish | None = None, error: BrimfulError | None = None) -> None:
        """The last piece comes before the end, so whoever sees the end has it."""
        if not piece and finish is None and error is None:
            return
        with self._changed:
            if piece:
                self._pieces.append(piece)
                self._published += len(piece)
            while self._text.stopped and self._logprobs and self._logprobs[-1].offset >= self._published:
                self._logprobs.pop()  # of the stop string
            self.finish, self.error = finish, error
            self._changed.notify_all()
        self._notify()


class AnswerText:
    """Tokens to text in whole characters, up to a stop string."""

    def __init__(self, decode: Callable[[Sequence[int]], str], stop: Sequence[str] = ()) -> None:
        self.stopped = False
        self._decode, self._stop = decode, stop
        self._window: list[int] = []
        self._decoded = ""
        """The text of the window that was passed on."""
        self._pending = 0
        """The newest tokens of the window whose text was not passed on."""
        self.held = ""
        """Text that may be the beginning of a stop string."""

    def add(self, token: int) -> str:
        """The text that may be shown now."""
        self._window.append(token)
        self._pending += 1
        text, full = self._decode(self._window), len(self._window) > WINDOW
        if not text.endswith(INCOMPLETE_CHARACTER):
            self._pending = 0
        elif full and self._pending > BYTES:  # no character has more bytes, so this text is final
            text, self._pending = self._decode(self._window[:-BYTES]), BYTES
        else:
            text = self._decoded
        new, self._decoded = text[len(self._decoded) :], text
        if full:
            self._window = self._window[-CONTEXT:]
            self._decoded = self._decode(self._window[: len(self._window) - self._pending])
        return self._before_stop(new)

    def rest(self) -> str:
        """What was held back, when no more tokens come."""
        if self.stopped:
            return ""
        text = self._before_stop(self._decode(self._window)[len(self._decoded) :])
        held, self.held = self.held, ""
        return text if self.stopped else text + held

    def _before_stop(self, new: str) -> str:
        text = self.held + new
        ends = [place for stop in self._stop if (place := text.find(stop)) >= 0]
        if ends:
            self.stopped, self.held = True, ""
            return text[: min(ends)]
        held = max((_overlap(text, stop) for stop in self._stop), default=0)
        self.held = text[len(text) - held :]
        return text[: len(text) - held]


def _overlap(text: str, stop: str) -> int:
    """The length of the longest end of `text` that `stop` begins with."""
    return next((size for size in range(min(len(text), len(stop) - 1), 0, -1) if text.endswith(stop[:size])), 0)
