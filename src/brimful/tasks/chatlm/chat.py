"""A trained model that is talked to: one question, one answer, piece by piece.

The model has only ever seen single questions, so each line stands for itself: nothing said before is remembered.
"""

import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from brimful.errors import BadOption, DoesNotFit, UserError
from brimful.tasks.chatlm.generate import GenerateOptions, Generator
from brimful.tasks.chatlm.model_folder import load_model, read_config, resolve, tokenizer_of

if TYPE_CHECKING:
    import torch

HELP = (
    "One line is one question; the model does not remember earlier ones. /quit or Ctrl-D ends, Ctrl-C stops an answer."
)
QUIT = ("/quit", "/exit")


@dataclass(frozen=True, slots=True, kw_only=True)
class Reply:
    """A question, the whole answer to it, and how long that took."""

    prompt: str
    response: str
    seconds: float

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


class Chat:
    """A model folder, opened for questions."""

    def __init__(
        self, model: str | Path, options: GenerateOptions, *, device: "torch.device", autocast: "torch.dtype | None" = None
    ) -> None:  # fmt: skip
        from brimful.memory.opened import opened

        self.folder, self.device = resolve(model), device
        config = read_config(self.folder)
        tokenizer = tokenizer_of(self.folder, config)
        self._longest: int | None = getattr(config, "max_position_embeddings", None)
        self._generator = Generator(
            load_model(self.folder, device), tokenizer, options, device=device,
            opened=lambda: opened(device, autocast),
        )  # fmt: skip

    def ask(self, question: str) -> Iterator[str]:
        """The answer in pieces of whole characters."""
        from brimful.memory.oom import is_oom

        text = question.encode("utf-8", "replace").decode()  # a terminal may hand over bytes that are no text
        ids = self._generator.tokenizer.encode(text)
        if self._longest is not None and len(ids) > self._longest:
            raise BadOption(
                f"the question has {len(ids):,} tokens and the model reads {self._longest:,}; ask a shorter one"
            )
        try:
            yield from self._generator.stream(ids)
        except Exception as error:
            if not is_oom(error):
                raise
            raise DoesNotFit(
                f"memory ran out while answering a question of {len(ids):,} tokens; ask a shorter one, or lower --max-new-tokens",
                needed_bytes=0,
            ) from None

    def reply(self, question: str, say: Callable[[str], object] = lambda _: None) -> Reply:
        """The whole answer; `say` hears each piece of it as it comes."""
        started, pieces = time.perf_counter(), list[str]()
        for piece in self.ask(question):
            pieces.append(piece)
            say(piece)
        return Reply(prompt=question, response="".join(pieces), seconds=time.perf_counter() - started)


def talk(chat: Chat, read: Callable[[], str], say: Callable[[str], object]) -> None:
    """Questions from `read` until it ends (EOFError) or says /quit; whatever goes wrong with one, the next is heard."""
    while True:
        try:
            line = read().strip()
        except EOFError:
            return
        if line in QUIT:
            return
        if line == "/help":
            say(f"{HELP}\n")
        elif line:
            _answer(chat, line, say)


def _answer(chat: Chat, line: str, say: Callable[[str], object]) -> None:
    try:
        chat.reply(line, say)
        say("\n")
    except KeyboardInterrupt:
        say(" …\n")
    except UserError as error:
        say(f"({error})\n")
