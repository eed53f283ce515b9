"""Rows as a prompt and the chosen answer, and prompts as the tokens that a model reads: what `rejects.py` asks with."""

import hashlib
import json
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from brimful.data.read.source import BrokenRowLimit, RowProblem, Source
from brimful.errors import BadOption, BadRun
from brimful.tasks.model_folder import is_adapter, is_causal, read_config, resolve, tokenizer_of
from brimful.tasks.presets import PRESETS
from brimful.tasks.reject_filter import REASONS, Drops


@dataclass(frozen=True, slots=True, kw_only=True)
class Pair:
    """A row of the data: the last reply of a conversation, and what comes before it."""

    number: int
    """Among all rows that can be answered."""
    file: str
    line: int
    prompt: list[dict[str, Any]]
    chosen: dict[str, Any]
    tools: list[Any]

    @property
    def is_question(self) -> bool:
        """Whether texts say all of it."""
        plain = {"role", "content"}
        messages = [*self.prompt, self.chosen]
        return not self.tools and len(messages) == 2 and self.prompt[0]["role"] == "user" and all(set(one) == plain for one in messages)  # fmt: skip

    @property
    def prompt_text(self) -> str:
        """All messages before the reply, one below the other: as an encoder-decoder reads the prompts of pairs."""
        texts = (one.get("content") or "" for one in self.prompt)
        return "\n".join(text for text in texts if text.strip())

    def problem(self, message: str) -> RowProblem:
        return RowProblem(self.file, self.line, message)

    def output(self, rejected: str, form: str) -> dict[str, Any]:
        """The row for `brimful train dpo`."""
        if form == "texts":
            return {"prompt": self.prompt[0]["content"], "chosen": self.chosen["content"], "rejected": rejected}
        row = {"prompt": self.prompt, "chosen": [self.chosen], "rejected": [{"role": "assistant", "content": rejected}]}
        return {**row, "tools": self.tools} if self.tools else row


def read_pairs(source: Source, drops: Drops, bad_rows: BrokenRowLimit) -> Iterator[Pair]:
    """Every row with a prompt and a reply, each prompt once; the same ones each time. The others go to `drops`."""
    seen: set[bytes] = set()
    for chunk in source.chunks():
        bad_rows.add(chunk)
        for problem in chunk.broken:
            drops.add("broken", problem)
        for line, text in zip(chunk.lines.tolist(), chunk.rows.column(0).to_pylist(), strict=True):
            content = json.loads(text)
            pair = pair_of(len(seen), chunk.file, line, content["messages"], content.get("tools", []))
            if isinstance(pair, Pair):
                digest = hashlib.blake2b(json.dumps([pair.prompt, pair.tools]).encode(), digest_size=16).digest()
                if digest not in seen:
                    seen.add(digest)
                    yield pair
                    continue
                pair = "duplicate_prompt"
            drops.add(pair, RowProblem(chunk.file, line, REASONS[pair]))
    bad_rows.check()


def pair_of(number: int, file: str, line: int, messages: list[dict[str, Any]], tools: list[Any]) -> Pair | str:
    """The pair of a conversation, or the reason why there is none."""
    last = max((place for place, one in enumerate(messages) if one["role"] == "assistant"), default=None)
    if last is None or messages[last].get("tool_calls"):
        return "no_reply"
    pair = Pair(number=number, file=file, line=line, prompt=messages[:last], chosen=messages[last], tools=tools)
    if not any((one.get("content") or "").strip() for one in pair.prompt if one["role"] not in ("system", "developer")):
        return "no_prompt"
    return pair if (pair.chosen["content"] or "").strip() else "empty_chosen"


class Prompter:
    """A model's tokenizer: prompts to tokens, as the model was trained to read them, and answers to text."""

    def __init__(self, model: str, chat_template: str | None = None) -> None:
        if model in PRESETS:
            raise BadOption(f"{model} has new weights and answers nothing yet. Try: a model folder or a run.")
        self.folder = resolve(model)
        self.config = read_config(self.folder)
        self.tokenizer = tokenizer_of(self.folder, self.config)
        self.template: Any = None
        self.end_ids: tuple[int, ...] = (self.tokenizer.eos_id,)
        self.max_tokens = 0
        """Of the prompts of an encoder-decoder."""
        if is_causal(self.config):
            from brimful.tasks.chat_template import ChatTemplate

            self.template = ChatTemplate.load(self.folder, chat_template)
            self.end_ids = self.template.end_ids
        elif chat_template is not None:
            raise BadOption(
                f"chat_template={chat_template!r} is for causal models, not for an encoder-decoder. Try: leave it out."
            )
        else:
            self.max_tokens = _trained_length(self.folder)

    @property
    def key(self) -> list[Any]:
        """Changes with any file of the model and of its base, and with the template."""
        folders = [self.folder]
        if is_adapter(self.folder):
            from brimful.tasks.adapters import find_base

            folders.append(find_base(self.folder))
        files = [
            [str(file.resolve()), file.stat().st_size, file.stat().st_mtime_ns]
            for folder in folders
            for file in sorted(folder.iterdir())
            if file.is_file()
        ]
        return [files, self.template.fingerprint if self.template else self.max_tokens]

    def tokens(self, pair: Pair) -> tuple[list[int], bool]:
        """The prompt, and whether it is truncated. Raises `RowError` for one that the chat template refuses."""
        if self.template is not None:
            return self.template.prompt(pair.prompt, pair.tools or None), False
        ids = self.tokenizer.encode(pair.prompt_text)
        if len(ids) <= self.max_tokens:
            return ids, False
        return ids[-self.max_tokens :], True  # the end, where the question is, as in preference training


def _trained_length(folder: Path) -> int:
    """The most tokens of an encoder-decoder's prompts: as in its run, else the default of training."""
    from brimful.tasks.chat_scores import lengths_in_training
    from brimful.tasks.encoder_decoder import EncoderDecoder

    lengths = None
    with suppress(BadRun):  # an unreadable run.json does not matter here
        lengths = lengths_in_training(folder)
    return max(2, (lengths or EncoderDecoder.lengths)[0])
