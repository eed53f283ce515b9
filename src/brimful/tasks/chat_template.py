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

Text that looks like a token with which the template marks turns ("<|im_end|>" in a question about chat formats) means these
letters, so that a row cannot end a turn or begin one; other special tokens stay tokens (see special_tokens.py). No bos token is
added to what the template prints.
"""

import hashlib
import json
import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from pathlib import Path
from typing import Any, TypeAlias

from brimful.errors import BadModel, in_one_line
from brimful.files import file_sha256
from brimful.tasks.reply_spans import TRY_TEMPLATE, Message, Method, RowError, TemplateFormat, check_replies
from brimful.tasks.special_tokens import MarkedText, Vocabulary

__all__ = [
    "BUILT_IN", "ChatTemplate", "Conversation", "Encoded", "RowError", "check_vocabulary", "load_auto_tokenizer", "pieces",
    "preview",
]  # fmt: skip

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

_SAMPLE = "The 3 words, 三个词: naïve été."


@dataclass(frozen=True, slots=True)
class Encoded:
    """A row: its tokens, and as many marks."""

    tokens: list[int]
    trained: list[bool]


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
        self._vocabulary = Vocabulary(tokenizer)
        generation_ends = {one for one in end_ids if 0 <= one < self.vocab_size}
        names = _template_texts(tokenizer, folder)
        formats = {
            text: TemplateFormat(text, self._vocabulary, tokenizer, folder, generation_ends)
            for text in dict.fromkeys(names)
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
            sorted(self._vocabulary.control),
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
        results: list[list[MarkedText] | RowError] = []
        for messages, tools in conversations:
            try:
                results.append(self._texts(messages, tools))
            except RowError as error:
                results.append(error)
        rows = iter(self._vocabulary.encode([text for one in results if not isinstance(one, RowError) for text in one]))
        return [one if isinstance(one, RowError) else self._rows(one, rows) for one in results]

    def reply_batch(self, conversations: Sequence[Conversation]) -> list[tuple[list[int], list[int]] | RowError]:
        """Of each conversation the tokens before its last message, a reply, and those of the reply with the token that ends it;
        or what is wrong with it. The first do not depend on the reply."""
        texts: list[MarkedText | RowError] = []
        for messages, tools in conversations:
            try:
                texts.append(self._reply_text(messages, tools))
            except RowError as error:
                texts.append(error)
        rows = iter(self._vocabulary.encode([one for one in texts if not isinstance(one, RowError)]))
        return [one if isinstance(one, RowError) else self._reply(one, *next(rows)) for one in texts]

    def prompt(self, messages: Sequence[Message], tools: Sequence[Any] | None = None) -> list[int]:
        """The tokens after which the model writes its next reply."""
        form = self._form(tools)
        plain = form.plain(messages)
        hide = self._vocabulary.looks_special(plain) or self._vocabulary.looks_special(tools)
        text = form.prompt(plain, tools, hide)
        return self._vocabulary.encode([MarkedText(text, [], enclosed=hide)])[0][0]

    def special_words(self, text: str, ids: Iterable[int]) -> tuple[list[str], list[str]]:
        """The special tokens that this text of a conversation contains: those that become letters, and those that become
        tokens, because they are among its ids."""
        return self._vocabulary.special_words(text, ids)

    def decode(self, ids: Sequence[int], *, skip_special_tokens: bool = False) -> str:
        return str(self.tokenizer.decode([int(one) for one in ids], skip_special_tokens=skip_special_tokens))

    def _form(self, tools: Sequence[Any] | None) -> "TemplateFormat":
        return self._with_tools if tools else self._default

    def _texts(self, messages: Sequence[Message], tools: Sequence[Any] | None) -> list[MarkedText]:
        form = self._form(tools)
        plain = form.plain(messages)
        check_replies(plain, form.prints_calls)
        hide = self._vocabulary.looks_special(plain) or bool(tools and self._vocabulary.looks_special(tools))
        return form.texts(plain, tools or None, hide)

    def _reply_text(self, messages: Sequence[Message], tools: Sequence[Any] | None) -> MarkedText:
        form = self._form(tools)
        plain = form.plain(messages)
        if len(plain) < 2 or plain[-1]["role"] != "assistant":
            raise RowError("the last message is not a reply of the assistant to anything")
        check_replies(plain, form.prints_calls)
        hide = self._vocabulary.looks_special(plain) or bool(tools and self._vocabulary.looks_special(tools))
        return form.text_of_reply(plain, tools or None, hide)

    def _reply(self, text: MarkedText, ids: list[int], trained: list[bool]) -> tuple[list[int], list[int]] | RowError:
        if True not in trained:
            return RowError("the chat template does not print the reply")
        first, last = trained.index(True), len(trained) - trained[::-1].index(True)
        return ids[:first], [*ids[first:last], *([self.eos_id] if text.append_eos else [])]

    def _rows(self, texts: list[MarkedText], tokens: Any) -> list[Encoded] | RowError:
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
    from transformers import AutoTokenizer, PreTrainedTokenizerFast
    from transformers.utils import logging

    level = logging.get_verbosity()
    logging.set_verbosity_error()
    try:
        tokenizer = AutoTokenizer.from_pretrained(str(folder), local_files_only=True, trust_remote_code=False)
        if _loses_text(tokenizer):
            as_it_is = PreTrainedTokenizerFast.from_pretrained(str(folder), local_files_only=True)
            tokenizer = tokenizer if _loses_text(as_it_is) else as_it_is
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


def _loses_text(tokenizer: Any) -> bool:
    """`AutoTokenizer` may take the class of the model's type, whose way to split texts is not that of tokenizer.json."""
    ids = tokenizer(_SAMPLE, add_special_tokens=False)["input_ids"]
    return "".join(tokenizer.decode(ids).split()) != "".join(_SAMPLE.split())


def _template_texts(tokenizer: Any, folder: Path) -> tuple[str, str]:
    """The template without tools and with tools; mostly the same."""
    if not tokenizer.chat_template:
        raise BadModel(f"the tokenizer in {folder} has no chat template. {TRY_TEMPLATE}")
    try:
        return tokenizer.get_chat_template(), tokenizer.get_chat_template(tools=[])
    except ValueError:
        names = ", ".join(sorted(tokenizer.chat_template))
        raise BadModel(
            f"the tokenizer in {folder} has chat templates named {names} and no default. {TRY_TEMPLATE}"
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
            "Try: chatml or plain, or the path of a Jinja file."
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
