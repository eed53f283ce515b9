"""Conversations to tokens through a model's own chat template, and which of those tokens are trained on.

Trained is what the model itself has to write: each reply of the assistant, its reasoning and tool calls where the template
shows them, and the token that ends the turn. Everything else is context. A template is a Jinja program that prints one text
and does not say which part of it is whose, so the replies are found in one of three ways, chosen when the template is loaded
and verified on sample conversations:

    generation tag       the template marks replies with {% generation %}; few do (3 of 41 that TRL ships)
    sentinel             the conversation is printed a second time with each reply replaced by a word that stands nowhere else;
                         what differs between the two texts is the reply, however the template trimmed or changed it (38 of 41)
    one row per reply    the text up to the generation prompt is the context, the rest the reply; earlier replies are context

Characters become tokens by the offsets of the tokenizer. A token that holds any character of a reply is trained. White space
between the generation prompt and the reply, or between the reply and the end of its turn, is trained as well, because the
model has to write it; white space after the end of the turn is not. Where a template prints nothing after the last reply,
the eos token is appended and trained.

Text that looks like a special token ("<|im_end|>" in a question about chat formats) means these letters: it is encoded as
plain text, so that a row cannot end a turn or begin one. Tokens that models write in the middle of a reply, such as <think>
and <tool_call>, stay tokens. No bos token is added to what the template prints.
"""

import hashlib
import json
import os
import re
import threading
from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cached_property
from itertools import pairwise
from pathlib import Path
from typing import Any, Literal, TypeAlias

from tokenizers import AddedToken, Tokenizer

from brimful.errors import BadData, BadModel, in_one_line
from brimful.files import file_sha256

Method: TypeAlias = Literal["generation tag", "sentinel", "one row per reply"]
Message: TypeAlias = Mapping[str, Any]
Conversation: TypeAlias = tuple[Sequence[Message], Sequence[Any] | None]
"""Messages and tools."""

CHATML = """\
{%- if tools %}
    {{- '<|im_start|>system\\n' }}
    {%- if messages[0].role == 'system' %}{{- messages[0].content + '\\n\\n' }}{%- endif %}
    {{- 'You may call these functions, one JSON object in <tool_call></tool_call> per call:' }}
    {%- for tool in tools %}{{- '\\n' }}{{- tool | tojson }}{%- endfor %}
    {{- '<|im_end|>\\n' }}
{%- endif %}
{%- for message in messages %}
    {%- if message.role == 'assistant' %}
        {{- '<|im_start|>assistant\\n' }}
        {%- generation %}
            {{- message.content or '' }}
            {%- for call in message.tool_calls or [] %}
                {%- set call = call.function or call %}
                {%- if message.content or not loop.first %}{{- '\\n' }}{%- endif %}
                {{- '<tool_call>\\n' }}{{- {'name': call.name, 'arguments': call.arguments} | tojson }}{{- '\\n</tool_call>' }}
            {%- endfor %}
            {{- '<|im_end|>' }}
        {%- endgeneration %}
        {{- '\\n' }}
    {%- elif not (tools and loop.first and message.role == 'system') %}
        {{- '<|im_start|>' + message.role + '\\n' + (message.content or '') + '<|im_end|>\\n' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}
"""
PLAIN = """\
{%- if bos_token is defined and bos_token %}{{- bos_token }}{%- endif %}
{%- for message in messages %}
    {%- if message.role == 'assistant' %}
        {{- 'Assistant:\\n' }}{%- generation %}{{- message.content + eos_token }}{%- endgeneration %}{{- '\\n\\n' }}
    {%- elif message.role == 'user' %}
        {{- 'User:\\n' + message.content + '\\n\\n' }}
    {%- elif message.role == 'system' %}
        {{- message.content + '\\n\\n' }}
    {%- else %}
        {{- raise_exception('this template knows the roles system, user and assistant only') }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- 'Assistant:\\n' }}{%- endif %}
"""
BUILT_IN = {"chatml": CHATML, "plain": PLAIN}
"""For models without a template: with tokens for turns (and tools), and with words alone for base models."""

_SENTINEL = "Vq8rJx2LmZReply{}Kd"
_HIDDEN, _OPEN, _CLOSE = "\U0010fffe", "\U0010fffd", "\U000ffffd"
"""Characters that stand in no text: one breaks a special token in a message, two enclose those the template prints."""
_TAG = re.compile(r"\{%[-+]?\s*generation\s*[-+]?%\}")
_MODEL_WRITES = re.compile("think|reason|tool|func", re.IGNORECASE)
"""Special tokens that belong in the middle of a reply."""
_REPLY_PARTS = ("content", "tool_calls", "function_call", "reasoning_content", "thinking", "reasoning")
_TRY_TEMPLATE = "Try: chat_template='chatml' (or 'plain' for a base model), or the path of a Jinja file."


class RowError(BadData):
    """One conversation cannot be encoded. The message names neither file nor line; the caller knows them."""


@dataclass(frozen=True, slots=True)
class Encoded:
    """A row: its tokens, and as many marks."""

    tokens: list[int]
    trained: list[bool]


@dataclass(slots=True)
class _Text:
    """A conversation as the template prints it."""

    text: str
    spans: list[tuple[int, int]]
    """Trained characters, in order and apart from each other."""
    append_eos: bool = False
    enclosed: bool = False
    """Whether its special tokens are enclosed in `_OPEN` and `_CLOSE`."""
    prompt_characters: int = 0
    """If positive, text before this is tokenized apart from the rest, as it is when a reply is generated."""


class ChatTemplate:
    """A tokenizer with its chat template: conversations to tokens, and which of them are trained on."""

    def __init__(
        self, tokenizer: Any, *, folder: Path, template: str | None = None, end_ids: Iterable[int] = ()
    ) -> None:
        self.folder = folder
        self.tokenizer = tokenizer
        """The tokenizer of transformers, with the template that is used here: `save_pretrained` keeps both."""
        if template is not None:
            tokenizer.chat_template = _with_known_tokens(template, tokenizer)
        self.eos_id = int(tokenizer.eos_token_id)
        self.pad_id = self.eos_id if tokenizer.pad_token_id is None else int(tokenizer.pad_token_id)
        """Eos where the tokenizer has none: padding is masked anyway."""
        self.vocab_size = 1 + max(tokenizer.get_vocab().values())
        """One more than the largest id: the rows an embedding needs."""
        self._vocabulary = _Vocabulary(tokenizer)
        generation_ends = {one for one in end_ids if 0 <= one < self.vocab_size}
        names = _template_texts(tokenizer, folder)
        formats = {
            text: _Format(text, self._vocabulary, tokenizer, folder, generation_ends) for text in dict.fromkeys(names)
        }
        self._default, self._with_tools = (formats[text] for text in names)
        ends = [*self._default.end_ids, self.eos_id, *sorted(generation_ends)]
        self._end_ids = tuple(dict.fromkeys(ends))

    @classmethod
    def load(cls, folder: str | Path, template: str | Path | None = None) -> "ChatTemplate":
        """The tokenizer in a folder. `template` is "chatml", "plain" or a Jinja file, in place of the folder's own."""
        folder = Path(folder)
        return cls(
            load_auto_tokenizer(folder),
            folder=folder,
            template=_read_template(template),
            end_ids=_generation_ends(folder),
        )

    @property
    def method(self) -> Method:
        """How replies are found."""
        return self._default.method

    @property
    def end_ids(self) -> tuple[int, ...]:
        """Tokens that end a reply: the template's own first, then eos and what generation_config.json names."""
        return self._end_ids

    @property
    def jinja(self) -> str:
        """The template's text."""
        return self._default.jinja

    @cached_property
    def fingerprint(self) -> str:
        """Changes with the tokenizer, the template, and the tokens that end and pad a row."""
        file = self.folder / "tokenizer.json"
        vocabulary = file_sha256(file) if file.is_file() else self.tokenizer.backend_tokenizer.to_str()
        key = [
            vocabulary,
            self._default.jinja,
            self._with_tools.jinja,
            self.eos_id,
            self.pad_id,
            self._end_ids,
            self.method,
        ]
        return hashlib.sha256(json.dumps(key).encode()).hexdigest()

    def encode(self, messages: Sequence[Message], tools: Sequence[Any] | None = None) -> list[Encoded]:
        """One row, or one per reply where the template allows nothing else."""
        result = self.encode_batch([(messages, tools)])[0]
        if isinstance(result, RowError):
            raise result
        return result

    def encode_batch(self, conversations: Sequence[Conversation]) -> list[list[Encoded] | RowError]:
        """The rows of each conversation, or what is wrong with it. Tokenizes all texts in one call."""
        results: list[list[_Text] | RowError] = []
        for messages, tools in conversations:
            try:
                results.append(self._texts(messages, tools))
            except RowError as error:
                results.append(error)
        rows = iter(self._vocabulary.encode([text for one in results if not isinstance(one, RowError) for text in one]))
        return [one if isinstance(one, RowError) else self._rows(one, rows) for one in results]

    def prompt(self, messages: Sequence[Message], tools: Sequence[Any] | None = None) -> list[int]:
        """The tokens after which the model writes its next reply."""
        form = self._form(tools)
        plain = form.plain(messages)
        hide = self._vocabulary.looks_special(plain) or self._vocabulary.looks_special(tools)
        text = form.prompt(plain, tools, hide)
        return self._vocabulary.encode([_Text(text, [], enclosed=hide)])[0][0]

    def decode(self, ids: Sequence[int], *, skip_special_tokens: bool = False) -> str:
        return str(self.tokenizer.decode([int(one) for one in ids], skip_special_tokens=skip_special_tokens))

    def _form(self, tools: Sequence[Any] | None) -> "_Format":
        return self._with_tools if tools else self._default

    def _texts(self, messages: Sequence[Message], tools: Sequence[Any] | None) -> list[_Text]:
        form = self._form(tools)
        plain = form.plain(messages)
        _check_replies(plain)
        hide = self._vocabulary.looks_special(plain) or bool(tools and self._vocabulary.looks_special(tools))
        return form.texts(plain, tools or None, hide)

    def _rows(self, texts: list[_Text], tokens: Any) -> list[Encoded] | RowError:
        rows = []
        for text in texts:
            ids, trained = next(tokens)
            if text.append_eos:
                ids, trained = [*ids, self.eos_id], [*trained, True]
            if any(trained):
                rows.append(Encoded(ids, trained))
        return rows or RowError("the chat template prints none of the replies, so there is nothing to train on")


def preview(template: ChatTemplate, rows: Iterable[Conversation], n: int = 3) -> list[list[tuple[str, bool]]]:
    """The first `n` rows as pieces of text, each trained or not, for people to look at. A RowError passes through."""
    shown: list[list[tuple[str, bool]]] = []
    for messages, tools in rows:
        for row in template.encode(messages, tools):
            if len(shown) == n:
                return shown
            shown.append(pieces(template, row))
    return shown


def pieces(template: ChatTemplate, row: Encoded) -> list[tuple[str, bool]]:
    """One row as text, divided where training begins and ends."""
    edges = [0, *(n for n in range(1, len(row.tokens)) if row.trained[n] != row.trained[n - 1]), len(row.tokens)]
    return [
        (template.decode(row.tokens[first:last]), row.trained[first]) for first, last in pairwise(edges) if first < last
    ]


def check_vocabulary(template: ChatTemplate, embedding_rows: int) -> None:
    """Refuse a tokenizer with ids that the model's embedding does not have."""
    if template.vocab_size > embedding_rows:
        raise BadModel(
            f"the tokenizer in {template.folder} has {template.vocab_size:,} tokens and the model's embedding "
            f"{embedding_rows:,} rows. Try: the tokenizer that was saved with the model."
        )


def load_auto_tokenizer(folder: str | Path) -> Any:
    """The tokenizer of transformers in a folder, without network and without code from the folder. It has an eos."""
    from transformers import AutoTokenizer
    from transformers.utils import logging

    level = logging.get_verbosity()
    logging.set_verbosity_error()
    try:
        tokenizer = AutoTokenizer.from_pretrained(str(folder), local_files_only=True, trust_remote_code=False)
    except Exception as error:  # every kind of damage has its own
        if "trust_remote_code" in str(error):
            raise BadModel(
                f"the tokenizer in {folder} runs code of its own (trust_remote_code), which Brimful does not do. "
                "Try: a model whose tokenizer is part of transformers."
            ) from None
        raise BadModel(
            f"{folder} has no tokenizer that transformers can read ({in_one_line(error)}). "
            "Try: copy the tokenizer of the model into it."
        ) from None
    finally:
        logging.set_verbosity(level)
    if not getattr(tokenizer, "is_fast", False):
        raise BadModel(
            f"the tokenizer in {folder} has no tokenizer.json, so its tokens cannot be traced to the text. "
            "Try: save it with transformers' fast tokenizer."
        )
    if tokenizer.eos_token_id is None:
        raise BadModel(
            f"the tokenizer in {folder} has no eos_token, so rows could not end. Try: add one to tokenizer_config.json."
        )
    return tokenizer


class _Vocabulary:
    """Text to tokens with offsets, and special tokens told apart from text that looks like them."""

    def __init__(self, tokenizer: Any) -> None:
        content = json.loads(tokenizer.backend_tokenizer.to_str())
        # The post-processor only adds special tokens, which the template prints, and may trim offsets.
        content.update(post_processor=None, truncation=None, padding=None)
        self._content = content
        self._tokenizer = Tokenizer.from_str(json.dumps(content))
        self._added = [one for one in content["added_tokens"] if one["content"]]
        self.special = {one["content"]: one["id"] for one in self._added if one["special"]}
        self._special_ids = set(self.special.values())
        self._control = [text for text in self.special if not _MODEL_WRITES.search(text)]
        self._pattern = _any_of(self._control)
        self._lock = threading.Lock()
        self._enclosed: tuple[Tokenizer, dict[int, int]] | None = None

    def looks_special(self, content: Any) -> bool:
        """Whether a string in messages or tools contains the letters of a special token."""
        if isinstance(content, str):
            return self._pattern.search(content) is not None
        if isinstance(content, Mapping):
            return any(self.looks_special(one) for one in content.values())
        return isinstance(content, list | tuple) and any(self.looks_special(one) for one in content)

    def hide(self, content: Any) -> Any:
        """The same messages with each special token broken, so that those the template prints are the only ones."""
        if isinstance(content, str):
            return self._pattern.sub(lambda match: match[0][0] + _HIDDEN + match[0][1:], content)
        if isinstance(content, Mapping):
            return {key: self.hide(value) for key, value in content.items()}
        return [self.hide(one) for one in content] if isinstance(content, list | tuple) else content

    def enclose(self, text: str) -> str:
        """Printed from hidden messages: the special tokens enclosed, the broken ones plain again."""
        return self._pattern.sub(lambda match: _OPEN + match[0] + _CLOSE, text).replace(_HIDDEN, "")

    def encode(self, texts: Sequence[_Text]) -> list[tuple[list[int], list[bool]]]:
        """Tokens and marks of each text."""
        parts: list[str] = []
        for text in texts:
            parts += [text.text[: text.prompt_characters], text.text[text.prompt_characters :]]
        enclosed = [text.enclosed for text in texts for _ in range(2)]
        encodings: list[Any] = [None] * len(parts)
        for kind in (False, True):
            numbers = [n for n, part in enumerate(parts) if part and enclosed[n] == kind]
            if numbers:
                tokenizer = self._with_enclosed()[0] if kind else self._tokenizer
                batch = tokenizer.encode_batch([parts[n] for n in numbers], add_special_tokens=False)
                for n, encoding in zip(numbers, batch, strict=True):
                    encodings[n] = encoding
        return [self._join(text, encodings[2 * n], encodings[2 * n + 1]) for n, text in enumerate(texts)]

    def _join(self, text: _Text, prompt: Any, rest: Any) -> tuple[list[int], list[bool]]:
        ids: list[int] = rest.ids if rest is not None else []
        offsets = rest.offsets if rest is not None else []
        if text.enclosed:
            renumber = self._with_enclosed()[1]
            ids = [renumber.get(one, one) for one in ids]
        trained = [False] * len(ids)
        for start, end in text.spans:
            self._mark(trained, ids, offsets, start - text.prompt_characters, end - text.prompt_characters)
        if prompt is not None:
            before = prompt.ids
            if text.enclosed:
                before = [renumber.get(one, one) for one in before]
            return before + ids, [False] * len(before) + trained
        return ids, trained

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
                names = set(self._control)
                kept = [one for one in self._added if one["content"] not in names]
                tokenizer = Tokenizer.from_str(json.dumps({**self._content, "added_tokens": []}))
                aliases = {one["content"]: one["content"] for one in kept}
                aliases |= {name: _OPEN + name + _CLOSE for name in names}
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


@dataclass(slots=True)
class _Format:
    """One Jinja template: how it prints replies, learned from sample conversations."""

    jinja: str
    vocabulary: _Vocabulary
    tokenizer: Any
    folder: Path
    generation_ends: set[int]
    method: Method = "sentinel"
    content_parts: bool = False
    """Whether the template reads contents only as lists of parts."""
    arguments_text: bool = False
    """Whether the template reads the arguments of tool calls as JSON, not as objects."""
    opening: str = ""
    """The generation prompt, if the template has one."""
    header: str = ""
    """What begins a reply but is missing in the generation prompt, where the template does not know one."""
    lead: str = ""
    """White space that the template prints between the generation prompt and a reply."""
    prints_reasoning: bool = False
    """Whether the template prints more than white space there, as templates of reasoning models do."""
    system_in_prompt_only: bool = False
    """Whether the template drops system messages unless the last message is a question, as Mistral's do. Conversations with
    one then need one row per reply, or the model would never see it in training."""
    end_ids: tuple[int, ...] = ()
    """The token that ends a turn, if it is one token."""
    _variables: dict[str, Any] = field(default_factory=dict)
    _end_tokens: tuple[re.Pattern[str], re.Pattern[str]] = field(default_factory=lambda: (_any_of([]), _any_of([])))
    """As the template prints them, and enclosed."""
    _end_words: str = ""
    _tracker: threading.Lock = field(default_factory=threading.Lock)
    """The template's record of generation tags is for one thread at a time."""

    def __post_init__(self) -> None:
        self._variables = dict(self.tokenizer.special_tokens_map)
        self._try_samples()
        self._learn_arguments()
        self._learn_ends()
        self._learn_lead()
        self._learn_system()
        methods: list[Method] = ["sentinel", "one row per reply"]
        if _TAG.search(self.jinja):
            methods.insert(0, "generation tag")
        for method in methods:
            self.method = method
            if self._finds_replies():
                return
        raise BadModel(f"the chat template in {self.folder} does not print the replies it is given. {_TRY_TEMPLATE}")

    # Printing

    def plain(self, messages: Sequence[Message]) -> list[dict[str, Any]]:
        """Checked messages with contents in the form that the template reads."""
        if not isinstance(messages, list | tuple) or not messages:
            raise RowError("the conversation has no messages")
        plain = []
        for number, message in enumerate(messages, start=1):
            if not isinstance(message, Mapping) or not isinstance(message.get("role"), str):
                raise RowError(f"message {number} is not an object with a role and a content")
            content = message.get("content")
            if isinstance(content, list | tuple):
                content = _joined_parts(content, number)
            elif content is not None and not isinstance(content, str):
                raise RowError(f"the content of message {number} is not a text ({type(content).__name__})")
            if self.content_parts:
                content = [{"type": "text", "text": content or ""}]
            elif content is None and not any(message.get(part) for part in _REPLY_PARTS[1:]):
                content = ""
            kept = {
                key: value for key, value in message.items() if value is not None and (value or key != "tool_calls")
            }
            if "tool_calls" in kept:
                kept["tool_calls"] = [self._call(call, number) for call in _list_of(kept["tool_calls"], number)]
            plain.append({**kept, "content": content})
        return plain

    def _call(self, call: Any, number: int) -> Any:
        """A tool call with its arguments as the template reads them: an object, or its JSON."""
        function = call.get("function", call) if isinstance(call, Mapping) else None
        if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
            raise RowError(f"message {number} has a tool call without the name of a function")
        arguments = function.get("arguments", {})
        if isinstance(arguments, str) and not self.arguments_text:
            with suppress(ValueError, RecursionError):
                arguments = json.loads(arguments)
        elif not isinstance(arguments, str) and self.arguments_text:
            arguments = json.dumps(arguments, ensure_ascii=False)
        function = {**function, "arguments": arguments}
        return {**call, "function": function} if "function" in call else {"type": "function", "function": function}

    def render(
        self,
        messages: Sequence[Message],
        tools: Sequence[Any] | None = None,
        hide: bool = False,
        *,
        prompt: bool = False,
    ) -> str:
        return self._print(messages, tools, hide, prompt=prompt, tracked=False)[0]

    def _print(
        self, messages: Sequence[Message], tools: Sequence[Any] | None, hide: bool, *, prompt: bool, tracked: bool
    ) -> tuple[str, list[tuple[int, int]]]:
        """The text, and the characters inside generation tags if `tracked`."""
        from jinja2 import TemplateError
        from transformers.utils.chat_template_utils import render_jinja_template

        if hide:
            messages, tools = self.vocabulary.hide(messages), self.vocabulary.hide(tools)
        try:
            with self._tracker:
                printed: Any = render_jinja_template(
                    conversations=[[dict(message) for message in messages]], tools=None if tools is None else list(tools), chat_template=self.jinja,
                    add_generation_prompt=prompt, return_assistant_tokens_mask=tracked, **self._variables,
                )  # fmt: skip
        except TemplateError as error:
            raise RowError(f"the chat template refuses the roles {_roles(messages)} ({_reason(error)})") from None
        except Exception as error:  # a template is a program: it can fail in any way
            raise RowError(f"the chat template fails on the roles {_roles(messages)} ({in_one_line(error)})") from None
        text: str = printed[0][0]
        spans: list[tuple[int, int]] = printed[1][0] if tracked else []
        if not hide:
            return text, spans
        enclose = self.vocabulary.enclose
        return enclose(text), [(len(enclose(text[:first])), len(enclose(text[:last]))) for first, last in spans]

    def prompt(self, messages: Sequence[Message], tools: Sequence[Any] | None, hide: bool = False) -> str:
        return self.render(messages, tools or None, hide, prompt=True) + self.header

    # Finding replies

    def texts(self, messages: list[dict[str, Any]], tools: Sequence[Any] | None, hide: bool) -> list[_Text]:
        loses_system = self.system_in_prompt_only and messages[0]["role"] == "system"
        if self.method == "one row per reply" or loses_system:
            return self._texts_by_reply(messages, tools, hide)
        if self.method == "generation tag":
            text, spans = self._print(messages, tools, hide, prompt=False, tracked=True)
            opening = self.vocabulary.enclose(self.opening) if hide else self.opening
            spans = [(a + len(opening) * text.startswith(opening, a), b) for a, b in spans if a < b]
        else:
            text = self.render(messages, tools, hide)
            spans = self._differences(text, messages, tools, hide)
        return [self._with_ends(text, spans, hide)]

    def _differences(
        self, text: str, messages: list[dict[str, Any]], tools: Sequence[Any] | None, hide: bool
    ) -> list[tuple[int, int]]:
        """Where the replies are in the text."""
        replies = [number for number, message in enumerate(messages) if message["role"] == "assistant"]
        spans = self._all_at_once(text, messages, replies, tools, hide)
        if spans is None:
            found = [self._one_reply(text, messages, number, tools, hide) for number in replies]
            spans = [span for span in found if span is not None]
        elif self.prints_reasoning:
            spans = [
                self._from_prompt(text, span, messages[:number], tools, hide)
                for span, number in zip(spans, replies, strict=True)
            ]
        elif self.lead:
            spans = [(first - len(self.lead) * text.endswith(self.lead, 0, first), last) for first, last in spans]
        return spans

    def _all_at_once(
        self, text: str, messages: list[dict[str, Any]], replies: list[int], tools: Sequence[Any] | None, hide: bool
    ) -> list[tuple[int, int]] | None:
        """Compare with one text in which all replies are replaced. None where replies are more than printed contents."""
        if any(messages[number].get(part) for number in replies for part in _REPLY_PARTS[1:]):
            return None
        changed = list(messages)
        for number in replies:
            changed[number] = self._replaced(messages[number], number)
        try:
            other = self.render(changed, tools, hide)
        except RowError:
            return None
        between, place = [], 0
        for number in replies:
            sentinel = _SENTINEL.format(number)
            first = other.find(sentinel, place)
            if first < 0:
                return None
            between.append(other[place:first])
            place = first + len(sentinel)
        between.append(other[place:])
        if not text.startswith(between[0]):
            return None
        spans, first = [], len(between[0])
        for number, after in zip(replies, between[1:], strict=True):
            content = self._content(messages[number])
            for printed in (content, content.strip(), content.rstrip(), content.lstrip()):
                if text.startswith(printed, first) and text.startswith(after, first + len(printed)):
                    break
            else:
                return None
            spans.append((first, first + len(printed)))
            first += len(printed) + len(after)
        return spans if first == len(text) else None

    def _one_reply(
        self, text: str, messages: list[dict[str, Any]], number: int, tools: Sequence[Any] | None, hide: bool
    ) -> tuple[int, int] | None:
        """Compare with a text in which this reply alone is replaced. None where the template does not print the reply."""
        sentinel, nearest, printed = _SENTINEL.format(number), None, False
        for changed in self._variants(messages, number):
            try:
                other = self.render(changed, tools, hide)
            except RowError:
                continue
            printed = printed or other != text
            before, mark, after = other.partition(sentinel)
            if not mark or sentinel in after:
                continue
            first, last = len(before), len(text) - len(after)
            if first <= last and text.startswith(before) and text.endswith(after):
                return self._from_prompt(text, (first, last), messages[:number], tools, hide)
            # The template looks into the reply. What is equal on both sides is not the reply.
            first, last = _common_start(text, before), len(text) - _common_start(text[::-1], after[::-1])
            if "tool_calls" in changed[number] and (token := self._end_tokens[hide].search(text, last)) is not None:
                last = token.end()  # the rest of the call is equal too
            if nearest is None and first <= last:
                nearest = first, last
        if nearest is not None:
            return self._from_prompt(text, nearest, messages[:number], tools, hide)
        if not printed:
            return None
        try:
            start = self.prompt(messages[:number], tools, hide)
            end = self.render(messages[: number + 1], tools, hide).rstrip()
        except RowError:
            start = end = ""
        if start and text.startswith(start) and text.startswith(end) and len(start) <= len(end):
            return len(start), len(end)
        raise RowError(f"message {number + 1} cannot be found in what the chat template prints")

    def _variants(self, messages: list[dict[str, Any]], number: int) -> Iterable[list[dict[str, Any]]]:
        """The conversation with a reply replaced: as a whole, and, if it has tool calls, by another call."""
        before, reply, after = messages[:number], messages[number], messages[number + 1 :]
        yield [*before, self._replaced(reply, number), *after]
        if reply.get("tool_calls"):
            sentinel = _SENTINEL.format(number)
            calls = [_renamed(call, sentinel if n == 0 else "f") for n, call in enumerate(reply["tool_calls"])]
            yield [*before, {**reply, "tool_calls": calls}, *after]

    def _replaced(self, reply: dict[str, Any], number: int) -> dict[str, Any]:
        rest = {key: value for key, value in reply.items() if key not in _REPLY_PARTS}
        sentinel = _SENTINEL.format(number)
        return {**rest, "content": [{"type": "text", "text": sentinel}] if self.content_parts else sentinel}

    def _content(self, message: Message) -> str:
        content = message["content"]
        return content[0]["text"] if self.content_parts else content or ""

    def _from_prompt(
        self, text: str, span: tuple[int, int], before: list[dict[str, Any]], tools: Sequence[Any] | None, hide: bool
    ) -> tuple[int, int]:
        """The span, begun where the generation prompt ends: the model writes everything from there on."""
        if not before:
            return span
        try:
            prompt = self.prompt(before, tools, hide)
        except RowError:
            return span
        return (len(prompt), span[1]) if len(prompt) <= span[0] and text.startswith(prompt) else span

    def _texts_by_reply(self, messages: list[dict[str, Any]], tools: Sequence[Any] | None, hide: bool) -> list[_Text]:
        texts = []
        for number, message in enumerate(messages):
            if message["role"] != "assistant" or not number:
                continue
            prompt = self.prompt(messages[:number], tools, hide)
            text = self.render(messages[: number + 1], tools, hide)
            if not text.startswith(prompt):
                text = prompt + self._last_reply(text, messages[: number + 1], tools, hide)
            ends = [match.end() for match in self._end_tokens[hide].finditer(text, len(prompt))]
            one = self._with_ends(text, [(len(prompt), ends[-1] if ends else len(text.rstrip()))], hide)
            one.prompt_characters = len(prompt)
            texts.append(one)
        return texts

    def _last_reply(self, text: str, messages: list[dict[str, Any]], tools: Sequence[Any] | None, hide: bool) -> str:
        """The last reply as printed, or its content."""
        with suppress(RowError):
            spans = self._differences(text, messages, tools, hide)
            if spans:
                return text[slice(*self._with_ends(text, spans[-1:], hide).spans[0])]
        if content := self._content(messages[-1]):
            return content
        raise RowError(f"message {len(messages)} cannot be found in what the chat template prints")

    # Ends of turns

    def _with_ends(self, text: str, spans: list[tuple[int, int]], hide: bool) -> _Text:
        """Each span up to and with the token that ends its turn. After the last reply there is always one."""
        ended: list[tuple[int, int]] = []
        complete = True
        for first, last in sorted(spans):
            last, complete = self._end_of_turn(text, first, last, self._end_tokens[hide])
            if ended and first <= ended[-1][1]:
                first = ended.pop()[0]
            ended.append((first, last))
        result = _Text(text, ended, enclosed=hide)
        if ended and not complete and not text[ended[-1][1] :].strip():
            result.text, result.append_eos = text[: ended[-1][1]], True
        return result

    def _end_of_turn(self, text: str, first: int, last: int, tokens: re.Pattern[str]) -> tuple[int, bool]:
        """Where the turn of a reply ends, and whether a token ends it."""
        for match in tokens.finditer(text, max(first, last - 64), min(len(text), last + 64)):
            # The span has it already, in part or with white space behind it.
            if match.start() < last and not text[match.end() : last].strip():
                return match.end(), True
        if self._end_words:
            words = re.compile(r"\s*" + re.escape(self._end_words)).match(text, last)
            if words is not None:
                last = words.end()
            elif text[first:last].rstrip().endswith(self._end_words):
                last = first + len(text[first:last].rstrip())
        place = last
        while place < len(text) and text[place].isspace():
            place += 1
        match_after = tokens.match(text, place)
        return (last, False) if match_after is None else (match_after.end(), True)

    # Learning from samples

    def _try_samples(self) -> None:
        """Find out whether the template works at all."""
        from jinja2 import TemplateSyntaxError
        from transformers.utils.chat_template_utils import render_jinja_template

        try:
            render_jinja_template(conversations=[], chat_template=self.jinja)
        except TemplateSyntaxError as error:
            raise BadModel(
                f"the chat template in {self.folder} is not valid Jinja (line {error.lineno}: {error.message}). {_TRY_TEMPLATE}"
            ) from None
        sample = _SAMPLES[0]
        problems = []
        for self.content_parts in (False, True):
            try:
                text = self.render(self.plain(sample))
            except RowError as error:
                problems.append(error)
                continue
            if all(message["content"] in text for message in sample):
                return
        self.content_parts = False
        for problem in problems[:1]:
            raise BadModel(
                f"the chat template in {self.folder} fails on a question and its answer: {problem}. {_TRY_TEMPLATE}"
            )

    def _learn_arguments(self) -> None:
        """In which form tool calls are printed, if they are at all."""
        for self.arguments_text in (False, True):
            with suppress(RowError):
                if "longest_river" in self.render(self.plain(_TOOL_SAMPLE), [_TOOL]):
                    return
        self.arguments_text = False

    def _learn_ends(self) -> None:
        """What the template prints after every reply."""
        ids = {self.tokenizer.eos_token_id, *self.generation_ends}
        names = {text for text, number in self.vocabulary.special.items() if number in ids} | {self.tokenizer.eos_token}
        common = ""
        try:
            sample = self.plain(_SAMPLES[1])
            text = self.render(sample)
            middle = text.partition(_SAMPLES[1][1]["content"])[2].partition(_SAMPLES[1][2]["content"])[0]
            last = text.rpartition(_SAMPLES[1][3]["content"])[2]
            common = middle[: _common_start(middle, last)]
        except RowError:  # a template for one question and answer
            common = self.render(self.plain(_SAMPLES[0])).rpartition(_SAMPLES[0][1]["content"])[2]
        special = _any_of(self.vocabulary.special).search(common)
        if special is not None:
            names.add(special[0])
            self.end_ids = (self.vocabulary.special[special[0]],)
        self._end_words = common[: None if special is None else special.start()].strip()
        enclosed = self.vocabulary.enclose
        self._end_tokens = _any_of(names), _any_of(enclosed(name) for name in names)

    def _learn_lead(self) -> None:
        """What the template prints between the generation prompt and a reply."""
        sample = self.plain(_SAMPLES[0])
        try:
            prompt, without = self.render(sample[:1], prompt=True), self.render(sample[:1])
        except RowError:
            return
        if prompt.startswith(without):
            self.opening = prompt[len(without) :]
        before, found, _ = self.render(sample).rpartition(_SAMPLES[0][1]["content"])
        if not found or not before.startswith(prompt):
            return
        lead = before[len(prompt) :]
        if not lead.strip():
            self.lead = lead
        elif prompt == without:
            self.header = lead
        else:
            self.prints_reasoning = True

    def _learn_system(self) -> None:
        sample = self.plain(_SAMPLES[2])
        with suppress(RowError):
            system = _SAMPLES[2][0]["content"]
            self.system_in_prompt_only = system not in self.render(sample) and system in self.prompt(sample[:-1], None)

    def _finds_replies(self) -> bool:
        """Whether the method marks the replies of all samples that the template prints, and nothing else of them."""
        for sample in _SAMPLES:
            try:
                messages = self.plain(sample)
                self.render(messages)
            except RowError:
                continue
            replies = [message["content"] for message in sample if message["role"] == "assistant"]
            others = [message["content"] for message in sample if message["role"] != "assistant"]
            try:
                texts = self.texts(messages, None, False)
            except (RowError, ValueError):
                return False
            trained = [one.text[first:last] for one in texts for first, last in one.spans]
            if len(trained) != len(replies) or any(other in one for one in trained for other in others):
                return False
            if not all(reply in one for reply, one in zip(replies, trained, strict=True)):
                return False
        return True


_SAMPLES: tuple[list[dict[str, str]], ...] = (
    [
        {"role": "user", "content": "Which river is longest?"},
        {"role": "assistant", "content": "Probably the Nile."},
    ],
    [
        {"role": "user", "content": "Which river is longest?"},
        {"role": "assistant", "content": "Probably the Nile."},
        {"role": "user", "content": "How about mountains?"},
        {"role": "assistant", "content": "Everest, of course."},
    ],
    [
        {"role": "system", "content": "Answer briefly today."},
        {"role": "user", "content": "Which river is longest?"},
        {"role": "assistant", "content": "Probably the Nile."},
    ],
)


_TOOL = {
    "type": "function",
    "function": {
        "name": "longest_river",
        "description": "Finds a river.",
        "parameters": {"type": "object", "properties": {"land": {"type": "string", "description": "A country."}}},
    },
}
_TOOL_SAMPLE: list[dict[str, Any]] = [
    {"role": "user", "content": "Which river is longest?"},
    {
        "role": "assistant",
        "tool_calls": [
            {
                "id": "call12345",
                "type": "function",
                "function": {"name": "longest_river", "arguments": {"land": "Egypt"}},
            }
        ],
    },
    {"role": "tool", "name": "longest_river", "tool_call_id": "call12345", "content": "Nile"},
    {"role": "assistant", "content": "Probably the Nile."},
]


def _check_replies(messages: Sequence[Message]) -> None:
    """Refuse conversations that no template could make sense of."""
    replies = 0
    for number, message in enumerate(messages, start=1):
        if message["role"] == "assistant":
            replies += 1
            content = message["content"]
            text = content[0]["text"] if isinstance(content, list) else content
            if not (text or "").strip() and not any(message.get(part) for part in _REPLY_PARTS[1:]):
                raise RowError(f"the reply in message {number} is empty")
        elif message["role"] == "tool" and not replies:
            raise RowError(f"message {number} is the result of a tool before any reply of the assistant")
    if not replies:
        raise RowError(
            f"no message has the role assistant, so there is nothing to train on (the roles are {_roles(messages)})"
        )


def _list_of(calls: Any, number: int) -> Sequence[Any]:
    if not isinstance(calls, list | tuple):
        raise RowError(f"the tool calls of message {number} are not a list")
    return calls


def _joined_parts(content: Sequence[Any], number: int) -> str:
    """The text of a content in parts. Pictures and sound have none."""
    texts = []
    for part in content:
        text = part if isinstance(part, str) else part.get("text") if isinstance(part, Mapping) else None
        if not isinstance(text, str):
            kind = part.get("type") if isinstance(part, Mapping) else type(part).__name__
            raise RowError(f"message {number} has a part that is not text ({kind})")
        texts.append(text)
    return "".join(texts)


def _renamed(call: Any, name: str) -> Any:
    """The same tool call with another function and other arguments, of the same types."""
    if not isinstance(call, Mapping):
        return call
    if isinstance(call.get("function"), Mapping):
        return {**call, "function": _renamed(call["function"], name)}
    arguments = "{}" if isinstance(call.get("arguments"), str) else {}
    return {**call, "name": name, "arguments": arguments}


def _template_texts(tokenizer: Any, folder: Path) -> tuple[str, str]:
    """The template without tools and with tools; mostly the same."""
    if not tokenizer.chat_template:
        raise BadModel(f"the tokenizer in {folder} has no chat template. {_TRY_TEMPLATE}")
    try:
        return tokenizer.get_chat_template(), tokenizer.get_chat_template(tools=[])
    except ValueError:
        names = ", ".join(sorted(tokenizer.chat_template))
        raise BadModel(
            f"the tokenizer in {folder} has chat templates named {names} and no default. {_TRY_TEMPLATE}"
        ) from None


def _read_template(template: str | Path | None) -> str | None:
    if template is None:
        return None
    if str(template) in BUILT_IN:
        return BUILT_IN[str(template)]
    path = Path(template).expanduser()
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise BadModel(
            f"chat_template={os.fspath(template)!r} cannot be read ({in_one_line(error)}). "
            f"Try: {' or '.join(BUILT_IN)}, or the path of a Jinja file."
        ) from None


def _with_known_tokens(template: str, tokenizer: Any) -> str:
    """Our ChatML ends turns with eos where the tokenizer has no token for that, so that a model can learn to stop."""
    if template != CHATML or "<|im_end|>" in tokenizer.get_vocab():
        return template
    return template.replace("<|im_end|>", tokenizer.eos_token.replace("'", "\\'"))


def _generation_ends(folder: Path) -> list[int]:
    """Tokens that end generation according to the folder."""
    try:
        content = json.loads((folder / "generation_config.json").read_text(encoding="utf-8"))
        ids = content.get("eos_token_id")
    except (OSError, ValueError, AttributeError, RecursionError):
        return []
    return [one for one in (ids if isinstance(ids, list) else [ids]) if isinstance(one, int)]


def _any_of(texts: Iterable[str]) -> re.Pattern[str]:
    """Any of these texts, the longest first; no text at all if there are none."""
    return re.compile("|".join(map(re.escape, sorted(texts, key=len, reverse=True))) or "(?!)")


def _common_start(first: str, second: str) -> int:
    """How many characters both begin with."""
    low, high = 0, min(len(first), len(second))
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if first[low:middle] == second[low:middle] else (low, middle - 1)
    return low


def _roles(messages: Sequence[Message]) -> str:
    names = [str(message.get("role")) for message in messages]
    return ", ".join(names if len(names) <= 6 else [*names[:6], "…"])


def _reason(error: Exception) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0].rstrip(".")


def _first(offsets: tuple[int, int]) -> int:
    return offsets[0]


def _second(offsets: tuple[int, int]) -> int:
    return offsets[1]
