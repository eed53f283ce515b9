"""A talk in the terminal: questions, answers as they are written, and the conversation so far.

A question may have several lines: a line that ends in a backslash goes on, and so does everything between two lines of `\"\"\"`.
"""

import json
import re
import time
from collections import abc
from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from brimful.errors import BadOption, DoesNotFit, UserError
from brimful.languages import tr, translate
from brimful.serving.answer import Prompt
from brimful.serving.chat_model import ChatModel, Manner
from brimful.serving.engine import Engine, EngineOptions
from brimful.tasks.generate import GenerateOptions
from brimful.units import NOTHING

if TYPE_CHECKING:
    import torch

BLOCK = '"""'
_KEYS = "Type /help for all commands, /quit or Ctrl-D to end."
HELP: dict[Manner, str] = {
    "questions": f"Each line is one question; the model does not remember earlier ones.\n{_KEYS}",
    "conversation": f"The model remembers the conversation.\n{_KEYS}",
    "continuation": f"The model has no chat template: it continues each line as a text of its own.\n{_KEYS}",
}
COMMANDS = {
    "/new": "begin another conversation",
    "/system TEXT": "tell the model how to behave; without a text, take it back",
    "/save FILE": "write the talk to a file, as JSON if it ends in .json",
    "/help": "show this list",
    "/quit, Ctrl-D": "end the talk",
    "Ctrl-C": "stop the answer",
    "\\": "at the end of a line: the question goes on",
    BLOCK: "before and after a question of several lines",
}
OF_CONVERSATIONS = ("/new", "/system TEXT")
"""Commands that make sense only where the model remembers."""
QUIT = ("/quit", "/exit")
UNKNOWN = re.compile(r"/\w*( .*)?")
"""One line that begins like a command. A path such as /etc/hosts does not."""
LEAST_ROOM = 4
"""A conversation is shortened when less than this part of the context, or than `max_new_tokens`, is left for the answer."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Reply:
    """A question, its answer and the seconds that took."""

    prompt: str
    response: str
    seconds: float

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


class Chat:
    """A model that answers.

    An encoder-decoder was trained on single questions, so earlier ones are not passed on. A causal model is asked through
    its chat template and gets the whole conversation each time. One without a template continues the text.
    """

    def __init__(
        self, model: str | Path, options: GenerateOptions, *, device: "torch.device", autocast: "torch.dtype | None" = None,
        system: str | None = None,
    ) -> None:  # fmt: skip
        self.model = ChatModel(model, options, device=device, autocast=autocast)
        self.folder, self.device, self.manner = self.model.folder, self.model.device, self.model.manner
        self.options = options
        self.system: str | None = None
        """What the model is told before the conversation."""
        self.turns: list[tuple[str, str]] = []
        """Questions and answers that the model remembers."""
        self.transcript: list[dict[str, str]] = []
        """Everything that was said, also what the model no longer remembers."""
        self._saved = set[Path]()
        """Files of this talk."""
        self.turns_left_out = 0
        """Of the conversation so far, because the context was full when the last question was asked."""
        if system is not None:
            self.set_system(system)
        limit = self.model.generator.context_tokens
        self.context_tokens = limit
        """What a prompt and its answer may have together; None without a limit."""
        # Without a limit of the model's own, a single user needs none either: an answer that does not fit is an error.
        self._engine = Engine(self.model.generator, options=EngineOptions(context=None if limit else UNLIMITED)).start()

    @property
    def help(self) -> str:
        """What a user of the terminal should know."""
        return HELP[self.manner]

    @property
    def commands(self) -> str:
        """What can be typed beside questions, in the user's language."""
        shown = [name for name in COMMANDS if self.manner == "conversation" or name not in OF_CONVERSATIONS]
        return "\n".join(f"  {name:<14}{tr(COMMANDS[name])}" for name in shown)

    def close(self) -> None:
        self._engine.close()

    def begin(self) -> None:
        """Begin another conversation. The system message stays."""
        self.turns.clear()

    def set_system(self, text: str) -> None:
        """Tell the model how to behave, in a conversation that begins now. Empty text takes it back."""
        if self.model.template is None:
            raise BadOption(f"system={text!r} needs a chat template, and {self.folder} has none. Try: leave it out.")
        self.system = text.strip() or None
        self.begin()
        if self.system:
            self.transcript.append({"role": "system", "content": self.system})

    def save(self, path: str | Path) -> Path:
        """Write all messages of the talk to a file: JSON if it ends in .json, else text."""
        path = Path(path).expanduser()
        if path.exists() and path not in self._saved:
            raise BadOption(f"{path} exists and was not written by this talk. Try: another file.")
        if path.suffix == ".json":
            content = json.dumps({"messages": self.transcript}, ensure_ascii=False, indent=1) + "\n"
        else:
            content = "\n\n".join(f"{message['role']}:\n{message['content']}" for message in self.transcript) + "\n"
        try:
            path.write_text(content, encoding="utf-8")
        except OSError as error:
            raise BadOption(f"{path} cannot be written ({error.strerror or error}). Try: another file.") from None
        self._saved.add(path)
        return path

    def ask(self, question: str) -> abc.Generator[str]:
        """The answer in pieces of whole characters. Once it ends or is closed, the model remembers it."""
        text = question.encode("utf-8", "replace").decode()  # a terminal may pass on bytes that are not text
        ids, pieces = self._prompt(text), list[str]()
        try:
            for piece in self._pieces(ids):
                pieces.append(piece)
                yield piece
        except (GeneratorExit, KeyboardInterrupt):  # the user has seen what there is
            self._remember(text, "".join(pieces))
            raise
        self._remember(text, "".join(pieces))

    def reply(self, question: str, write: Callable[[str], object] = lambda _: None) -> Reply:
        """The whole answer. `write` is called with each piece of it as it comes."""
        started, pieces = time.perf_counter(), list[str]()
        with closing(self.ask(question)) as answer:
            for piece in answer:
                pieces.append(piece)
                write(piece)
        return Reply(prompt=question, response="".join(pieces), seconds=time.perf_counter() - started)

    def _pieces(self, ids: list[int]) -> abc.Generator[str]:
        generator, options = self.model.generator, self.options
        if options.beams > 1:  # sequences that are compared as a whole cannot stream
            yield generator.tokenizer.decode(self._searched(ids))
            return
        prompt = Prompt(
            tokens=ids, max_new_tokens=min(options.max_new_tokens, self._engine.room(len(ids))),
            temperature=options.temperature, top_p=options.top_p, repetition_penalty=options.repetition_penalty,
            seed=options.seed,
        )  # fmt: skip
        answer = self._engine.submit(prompt)
        try:
            yield from answer
        except DoesNotFit:
            raise self._out_of_memory(ids) from None
        finally:
            self._engine.cancel(answer)

    def _searched(self, ids: list[int]) -> list[int]:
        from brimful.memory.oom import is_oom

        try:
            return self.model.generator.answer_batch([ids])[0]
        except Exception as error:
            if not is_oom(error):
                raise
            raise self._out_of_memory(ids) from None

    def _out_of_memory(self, ids: list[int]) -> DoesNotFit:
        return DoesNotFit(
            f"out of memory while answering a question of {len(ids):,} tokens. "
            "Try: a shorter question, or a lower max_new_tokens=.",
            needed_bytes=0,
        )

    def _prompt(self, question: str) -> list[int]:
        """The tokens that the model is given; a causal model has room for one more at least."""
        limit, left_out = self.context_tokens, 0
        longest = limit if limit is None or self.manner == "questions" else limit - 1
        if self.manner == "conversation":
            ids, left_out = self._conversation(question)
        else:
            ids = self.model.text_prompt(question)
        if longest is not None and len(ids) > longest:
            raise BadOption(
                f"the question has {len(ids):,} tokens, but the model reads {longest:,} at most. Try: a shorter question."
            )
        del self.turns[:left_out]
        self.turns_left_out = left_out
        return ids

    def _conversation(self, question: str) -> tuple[list[int], int]:
        """The tokens of conversation and question, and how many of the oldest turns leave too little room for an answer."""
        limit, new = self.context_tokens, self.options.max_new_tokens
        for first in range(len(self.turns) + 1):
            ids = self.model.prompt(self._messages(self.turns[first:], question))
            if limit is None or len(ids) + min(new, limit // LEAST_ROOM) <= limit:
                break
        return ids, first

    def _messages(self, turns: Sequence[tuple[str, str]], question: str) -> list[dict[str, str]]:
        messages = [{"role": "system", "content": self.system}] if self.system else []
        for asked, answered in turns:
            messages += [{"role": "user", "content": asked}, {"role": "assistant", "content": answered}]
        return [*messages, {"role": "user", "content": question}]

    def _remember(self, question: str, answer: str) -> None:
        self.transcript += [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]
        if self.manner == "conversation" and answer.strip():  # many templates fail on an empty answer
            self.turns.append((question, answer))


UNLIMITED = 2**31


def talk(chat: Chat, read: Callable[[str], str], write: Callable[[str], object]) -> None:
    """Answer questions from `read` until it raises EOFError or returns /quit. Neither a failed question nor Ctrl-C ends it.

    `read` gets the prompt to show: "> ", or "… " where a question goes on.
    """
    while True:
        try:
            text = _read_question(read)
        except EOFError:
            return
        except KeyboardInterrupt:
            write(f"\n({tr('type /quit or Ctrl-D to end')})\n")
            continue
        if text in QUIT:
            return
        try:
            _answer_question(chat, text, write)
        except KeyboardInterrupt:
            write(" …\n")
        except UserError as error:
            write(f"({translate(str(error))})\n")


def answer_each(chat: Chat, read: Callable[[str], str], write: Callable[[str], object]) -> None:
    """The same for questions from a pipe: each is answered by itself, and the first that fails ends the talk."""
    while True:
        try:
            text = _read_question(read)
        except EOFError:
            return
        if text in QUIT:
            return
        chat.begin()
        _answer_question(chat, text, write)


def _read_question(read: Callable[[str], str]) -> str:
    """One line, or several: after a backslash at the end of a line, or between two lines of `BLOCK`."""
    line = read("> ").strip()
    if line.startswith(BLOCK):
        lines = [line.removeprefix(BLOCK)]
        while not lines[-1].endswith(BLOCK):
            lines.append(read("… ").rstrip())
        return "\n".join([*lines[:-1], lines[-1].removesuffix(BLOCK)]).strip()
    lines = [line]
    while lines[-1].endswith("\\"):
        lines[-1] = lines[-1].removesuffix("\\").rstrip()
        lines.append(read("… ").rstrip())
    return "\n".join(lines).strip()


def _answer_question(chat: Chat, text: str, write: Callable[[str], object]) -> None:
    command, _, rest = text.partition(" ")
    if text == "/help":
        write(f"{chat.commands}\n")
    elif command == "/save":
        if not rest.strip():
            raise BadOption("/save needs the name of a file. Try: /save talk.txt.")
        write(f"({tr('saved to {path}', path=chat.save(rest.strip()))})\n")
    elif text == "/new" and chat.manner == "conversation":
        chat.begin()
        write(f"({tr('a new conversation')})\n")
    elif command == "/system" and chat.manner == "conversation":
        chat.set_system(rest)
        began = (
            "a new conversation with this system message"
            if chat.system
            else "a new conversation without a system message"
        )
        write(f"({tr(began)})\n")
    elif UNKNOWN.fullmatch(text):
        write(f"({tr('there is no command {command} here', command=command)})\n{chat.commands}\n")
    elif text:
        reply = chat.reply(text, write)
        write("\n" if reply.response.strip() else f"{NOTHING}\n")
        if (count := chat.turns_left_out) and chat.manner == "conversation":
            full = f"the context is full: the model no longer sees the oldest {'turn' if count == 1 else f'{count:,} turns'}"
            write(f"({translate(full)})\n")
