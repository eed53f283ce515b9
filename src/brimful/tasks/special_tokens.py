"""Text to tokens with marks, and the special tokens of a chat template told apart from text that looks like them.

"<|im_end|>" in a question about chat formats means these letters: as a token it would end the turn. So the tokens with which a
template marks turns, and those that begin, end and pad a text, are the template's alone. All others, such as `<|action|>`,
`<think>` or `<|fim_prefix|>`, stand in a message because its author wants the token, and become tokens as in transformers.

If a conversation contains the letters of a token of the first kind, they are broken by a character that stands in no text
before the template prints them. All such tokens in the printed text are then the template's own. These are enclosed in two
more such characters, the broken ones repaired, and a second tokenizer that knows them in their enclosed form alone encodes the
text. Its other ids are those of the first.
"""

import json
import re
import threading
from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from tokenizers import AddedToken, Tokenizer

HIDDEN, OPEN, CLOSE = "\U0010fffe", "\U0010fffd", "\U000ffffd"
"""Characters that stand in no text: one breaks a special token in a message, two enclose those the template prints."""
_MODEL_WRITES = re.compile("think|reason|tool|func", re.IGNORECASE)
"""Special tokens that belong in the middle of a reply, also where the template prints them itself."""


@dataclass(slots=True)
class MarkedText:
    """A conversation as the template prints it."""

    text: str
    spans: list[tuple[int, int]]
    """Trained characters, in order and apart from each other."""
    append_eos: bool = False
    enclosed: bool = False
    """Whether its special tokens are enclosed in `OPEN` and `CLOSE`."""
    prompt_characters: int = 0
    """If positive, text before this has the tokens that it has alone, as when a reply is generated."""


def without_post_processor(tokenizer: Tokenizer) -> dict[str, Any]:
    """A tokenizer's JSON without what it adds to texts, how it truncates and pads them, and how it trims offsets."""
    return {**json.loads(tokenizer.to_str()), "post_processor": None, "truncation": None, "padding": None}


class Vocabulary:
    """Text to tokens with offsets, and special tokens told apart from text that looks like them."""

    def __init__(self, tokenizer: Any) -> None:
        self._backend = tokenizer.backend_tokenizer
        content = without_post_processor(self._backend)
        self._tokenizer = Tokenizer.from_str(json.dumps(content))
        self._added = [one for one in content["added_tokens"] if one["content"]]
        self.special = {one["content"]: one["id"] for one in self._added if one["special"]}
        self._special_ids = set(self.special.values())
        self.control: set[str] = set()
        """Special tokens that are the template's alone."""
        self._pattern = any_of([])
        self.edges = any_of([*self.special, OPEN])
        """Where a token may begin."""
        self._prefixes = self._ids("\na") != self._ids("\n") + self._ids("a")
        """Whether a text gets a space in front, as with SentencePiece. A reply that is tokenized alone would then begin with a token that the template does not write."""
        self._lock = threading.Lock()
        self._enclosed: tuple[Tokenizer, dict[int, int]] | None = None

    def _ids(self, text: str) -> list[int]:
        return list(self._tokenizer.encode(text, add_special_tokens=False).ids)

    def reserve(self, texts: Iterable[str], names: Iterable[str]) -> None:
        """Leave the special tokens that a template prints in these texts, and those with these names, to the template."""
        printed = {match[0] for text in texts for match in any_of(self.special).finditer(text)}
        found = (printed | set(names)) & self.special.keys()
        self.control |= {name for name in found if not _MODEL_WRITES.search(name)}
        self._pattern = any_of(self.control)

    def special_words(self, text: str, ids: Iterable[int]) -> tuple[list[str], list[str]]:
        """The special tokens whose letters are in this text: those that are the template's alone, and those that are among
        the text's ids."""
        names = self._names_by_id
        tokens = [
            names[one] for one in names.keys() & set(ids) if names[one] not in self.control and names[one] in text
        ]
        return sorted({match[0] for match in self._pattern.finditer(text)}), sorted(tokens)

    @cached_property
    def _names_by_id(self) -> dict[int, str]:
        return {number: name for name, number in self.special.items() if not _MODEL_WRITES.search(name)}

    def looks_special(self, content: Any) -> bool:
        """Whether a string in messages or tools contains the letters of a token that is the template's alone."""
        if isinstance(content, str):
            return self._pattern.search(content) is not None
        if isinstance(content, Mapping):
            return any(self.looks_special(one) for one in content.values())
        return isinstance(content, list | tuple) and any(self.looks_special(one) for one in content)

    def hide(self, content: Any) -> Any:
        """The same messages with each such token broken, so that those the template prints are the only ones."""
        if isinstance(content, str):
            return self._pattern.sub(lambda match: match[0][0] + HIDDEN + match[0][1:], content)
        if isinstance(content, Mapping):
            return {key: self.hide(value) for key, value in content.items()}
        return [self.hide(one) for one in content] if isinstance(content, list | tuple) else content

    def enclose(self, text: str) -> str:
        """Printed from hidden messages: the special tokens enclosed, the broken ones plain again."""
        return self._pattern.sub(lambda match: OPEN + match[0] + CLOSE, text).replace(HIDDEN, "")

    def encode(self, texts: Sequence[MarkedText]) -> list[tuple[list[int], list[bool]]]:
        """Tokens and marks of each text."""
        parts: list[str] = []
        for text in texts:
            prompt, rest = text.text[: text.prompt_characters], text.text[text.prompt_characters :]
            parts += [prompt, rest, text.text if prompt and self._prefixes else ""]
        enclosed = [text.enclosed for text in texts for _ in range(3)]
        encodings: list[Any] = [None] * len(parts)
        for kind in (False, True):
            numbers = [n for n, part in enumerate(parts) if part and enclosed[n] == kind]
            if numbers:
                tokenizer = self._with_enclosed()[0] if kind else self._tokenizer
                # Offsets are for marks, and cost ten times the tokens themselves.
                encode = tokenizer.encode_batch if any(text.spans for text in texts) else tokenizer.encode_batch_fast
                batch = encode([parts[n] for n in numbers], add_special_tokens=False)
                for n, encoding in zip(numbers, batch, strict=True):
                    encodings[n] = encoding
        return [self._join(text, *encodings[3 * n : 3 * n + 3]) for n, text in enumerate(texts)]

    def _join(self, text: MarkedText, prompt: Any, rest: Any, whole: Any) -> tuple[list[int], list[bool]]:
        before: list[int] = prompt.ids if prompt is not None else []
        encoding, ids = rest, list[int](rest.ids if rest is not None else [])
        shift = text.prompt_characters
        skipped = 0
        if whole is not None and whole.ids[: len(before)] == before:
            encoding, ids, shift, skipped = whole, whole.ids[len(before) :], 0, len(before)
        offsets = encoding.offsets[skipped:] if encoding is not None and text.spans else []
        if text.enclosed:
            renumber = self._with_enclosed()[1]
            before, ids = ([renumber.get(one, one) for one in part] for part in (before, ids))
        trained = [False] * len(ids)
        for start, end in text.spans:
            self._mark(trained, ids, offsets, start - shift, end - shift)
        return before + ids, [False] * len(before) + trained

    def _mark(self, trained: list[bool], ids: list[int], offsets: list[tuple[int, int]], start: int, end: int) -> None:
        """Mark the tokens that hold a character from `start` to `end`."""
        first = bisect_right(offsets, start, key=_second)
        last = bisect_left(offsets, end, key=_first)
        if first >= last:
            return
        # A special token may swallow white space beside it, and with it the edge of a reply.
        if offsets[first][0] < start and ids[first] in self._special_ids:
            first += 1
        if last > first and offsets[last - 1][1] > end and ids[last - 1] in self._special_ids:
            last -= 1
        trained[first:last] = [True] * (last - first)

    def _with_enclosed(self) -> tuple[Tokenizer, dict[int, int]]:
        """A tokenizer that knows special tokens only where they are enclosed, and what its ids are in the real one."""
        with self._lock:
            if self._enclosed is None:
                names = self.control
                kept = [one for one in self._added if one["content"] not in names]
                tokenizer = Tokenizer.from_str(
                    json.dumps({**without_post_processor(self._backend), "added_tokens": []})
                )
                aliases = {one["content"]: one["content"] for one in kept}
                aliases |= {name: OPEN + name + CLOSE for name in names}
                for one in self._added:
                    options = {key: one[key] for key in ("lstrip", "rstrip", "single_word")}
                    normalized = one["normalized"] and one["content"] not in names
                    token = AddedToken(
                        aliases[one["content"]], **options, normalized=normalized, special=one["special"]
                    )
                    tokenizer.add_special_tokens([token]) if one["special"] else tokenizer.add_tokens([token])
                numbers = ((tokenizer.token_to_id(aliases[one["content"]]), int(one["id"])) for one in self._added)
                self._enclosed = tokenizer, {own: real for own, real in numbers if own is not None}
            return self._enclosed


def any_of(texts: Iterable[str]) -> re.Pattern[str]:
    """Any of these texts, the longest first; no text at all if there are none."""
    return re.compile("|".join(map(re.escape, sorted(texts, key=len, reverse=True))) or "(?!)")


def _first(offsets: tuple[int, int]) -> int:
    return offsets[0]


def _second(offsets: tuple[int, int]) -> int:
    return offsets[1]
