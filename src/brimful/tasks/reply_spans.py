"""Finds the replies in what a chat template prints.

A template is a program that turns messages into one text. Loading one prints sample conversations to learn how it ends a
turn, what it prints between the generation prompt and a reply, in which form it reads contents and tool calls, and which
method finds the replies (see chat_template.py). By comparison with sentinels, from the most common case to the rarest:

    1  all replies are replaced at once, and what the texts share divides the real one          two texts per conversation
    2  one reply is replaced; the texts are equal before and behind it                          one text more per reply
    3  the same, but the template has looked into the reply (reasoning, tool calls): what differs, from the generation prompt
       to the end of the turn; a tool call is taken as it is printed when the conversation ends with it

A span that would contain words of another message, such as the result of a tool call, is never taken.
"""

import json
import re
import threading
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import pairwise, product
from pathlib import Path
from typing import Any, Literal, TypeAlias

from brimful.errors import BadData, BadModel, in_one_line
from brimful.tasks.special_tokens import OPEN, MarkedText, Vocabulary, any_of

Method: TypeAlias = Literal["generation tag", "sentinel", "one row per reply"]
Message: TypeAlias = Mapping[str, Any]

TRY_TEMPLATE = "Try: chat_template='chatml' (or 'plain' for a base model), or the path of a Jinja file."
_SENTINEL = "Vq8rJx2LmZReply{}Kd"
_TAG = re.compile(r"\{%[-+]?\s*generation\s*[-+]?%\}")
_REPLY_PARTS = ("content", "tool_calls", "function_call", "reasoning_content", "thinking", "reasoning")


class RowError(BadData):
    """One conversation cannot be encoded. The message names neither file nor line; the caller knows them."""

    reason = "refused by the chat template"
    """Such rows are counted under this."""


class InvalidConversation(RowError):
    """One conversation is wrong whatever the template: it was not asked."""

    reason = "invalid"


class NoReply(RowError):
    """One conversation has nothing to train on, though nothing is wrong with it."""

    reason = "nothing to train on"


@dataclass(slots=True)
class TemplateFormat:
    """One Jinja template: how it prints replies, learned from sample conversations."""

    jinja: str
    vocabulary: Vocabulary
    tokenizer: Any
    folder: Path
    generation_ends: set[int]
    method: Method = "sentinel"
    content_parts: bool = False
    """Whether the template reads contents only as lists of parts."""
    developer_is_system: bool = False
    """Whether the template knows no role `developer`, which is what newer files call a system message."""
    prints_calls: bool = False
    """Whether the template prints tool calls."""
    no_content: str | None = None
    """The content of a reply that is nothing but tool calls."""
    arguments_text: bool = False
    """Whether the template reads the arguments of tool calls as JSON, not as objects."""
    tagged_header: str = ""
    """What the template has inside its generation tags although the generation prompt prints it."""
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
    _end_tokens: tuple[re.Pattern[str], re.Pattern[str]] = field(default_factory=lambda: (any_of([]), any_of([])))
    """As the template prints them, and enclosed."""
    _end_words: str = ""
    """Words that end a turn, alone or before the token."""
    _second_end: str = ""
    """Special tokens that follow the one that ends a reply and belong to the same turn."""
    _tracker: threading.Lock = field(default_factory=threading.Lock)
    """The template's record of generation tags is for one thread at a time."""

    def __post_init__(self) -> None:
        self._variables = dict(self.tokenizer.special_tokens_map)
        self._try_samples()
        self._reserve_tokens()
        self._learn_calls()
        self._learn_ends()
        self._learn_lead()
        self._learn_system()
        methods: list[Method] = ["sentinel", "one row per reply"]
        if _TAG.search(self.jinja):
            methods.insert(0, "generation tag")
        for method in methods:
            self.method = method
            if method == "generation tag":
                self._learn_tagged_header()
            if self._finds_replies():
                return
        raise BadModel(f"the chat template in {self.folder} does not print the replies it is given. {TRY_TEMPLATE}")

    # Printing

    def plain(self, messages: Sequence[Message]) -> list[dict[str, Any]]:
        """Checked messages with contents in the form that the template reads."""
        if not isinstance(messages, list | tuple) or not messages:
            raise InvalidConversation("the conversation has no messages")
        plain = []
        for number, message in enumerate(messages, start=1):
            if not isinstance(message, Mapping) or not isinstance(message.get("role"), str):
                raise InvalidConversation(f"message {number} is not an object with a role and a content")
            content = message.get("content")
            if isinstance(content, list | tuple):
                content = _joined_parts(content, number)
            elif content is not None and not isinstance(content, str):
                raise InvalidConversation(f"the content of message {number} is not a text ({type(content).__name__})")
            if self.content_parts:
                content = [{"type": "text", "text": content or ""}]
            elif not content:
                content = self.no_content if message.get("tool_calls") else ""
            kept = {
                key: value for key, value in message.items() if value is not None and (value or key != "tool_calls")
            }
            if "tool_calls" in kept:
                kept["tool_calls"] = [self._call(call, number) for call in _list_of(kept["tool_calls"], number)]
            role = "system" if self.developer_is_system and message["role"] == "developer" else message["role"]
            plain.append({**kept, "role": role, "content": content})
        return plain

    def _call(self, call: Any, number: int) -> Any:
        """A tool call with its arguments as the template reads them: an object, or its JSON."""
        function = call.get("function", call) if isinstance(call, Mapping) else None
        if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
            raise InvalidConversation(f"message {number} has a tool call without the name of a function")
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

    def texts(self, messages: list[dict[str, Any]], tools: Sequence[Any] | None, hide: bool) -> list[MarkedText]:
        loses_system = self.system_in_prompt_only and messages[0]["role"] == "system"
        if self.method == "one row per reply" or loses_system:
            texts = self._texts_by_reply(messages, tools, hide)
        else:
            texts = [self._whole_text(messages, tools, hide)]
        for number, message in enumerate(messages, start=1):
            if message["role"] == "system" and not any(self._content(message).strip() in one.text for one in texts):
                raise RowError(f"message {number} has the role system, and the chat template does not print it")
        return texts

    def _whole_text(self, messages: list[dict[str, Any]], tools: Sequence[Any] | None, hide: bool) -> MarkedText:
        if self.method == "generation tag":
            text, spans = self._print(messages, tools, hide, prompt=False, tracked=True)
            header = self.vocabulary.enclose(self.tagged_header) if hide else self.tagged_header
            spans = [(a + len(header) * text.startswith(header, a), b) for a, b in spans if a < b]
        else:
            text = self.render(messages, tools, hide)
            spans = self._differences(text, messages, tools, hide)
        return self._with_ends(text, spans, hide)

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
            exact = first <= last and text.startswith(before) and text.endswith(after)
            if exact and self._is_alone(text[first:last], messages, number):
                return self._from_prompt(text, (first, last), messages[:number], tools, hide)
            # The template looks into the reply. What is equal on both sides is not the reply.
            first, last = _common_start(text, before), len(text) - _common_start(text[::-1], after[::-1])
            if "tool_calls" in changed[number] and (token := self._end_tokens[hide].search(text, last)) is not None:
                last = token.end()  # the rest of the call is equal too
            if nearest is None and first <= last and self._is_alone(text[first:last], messages, number):
                nearest = first, last
        if not printed:
            return None
        with suppress(RowError):
            span = self._printed_last(text, messages[: number + 1], tools, hide, nearest)
            if messages[number].get("tool_calls") and span is not None:
                return span
            if nearest is not None:
                return self._from_prompt(text, nearest, messages[:number], tools, hide)
            if span is not None:
                return span
        raise RowError(f"message {number + 1} cannot be found in what the chat template prints")

    def _is_alone(self, printed: str, messages: list[dict[str, Any]], number: int) -> bool:
        """Whether what is taken for a reply has nothing of other messages, such as the result of its tool call."""
        own = json.dumps(messages[number], ensure_ascii=False)
        others = (self._content(message) for message in messages if message is not messages[number])
        return not any(len(other) > 3 and other in printed and other not in own for other in others)

    def _printed_last(
        self,
        text: str,
        messages: list[dict[str, Any]],
        tools: Sequence[Any] | None,
        hide: bool,
        nearest: tuple[int, int] | None,
    ) -> tuple[int, int] | None:
        """The last of these messages, by what the template prints if the conversation ends with it."""
        prompt, alone = self.prompt(messages[:-1], tools, hide), self.render(messages, tools, hide).rstrip()
        if text.startswith(prompt):
            last = _common_start(text, alone)
            for token in self.vocabulary.edges.finditer(text, max(0, last - 64), last + 64):
                if token.start() < last < token.end() or (token[0] == OPEN and token.end() == last):
                    last = token.start()
            return (len(prompt), last) if last > len(prompt) else None
        if nearest is None or not alone.startswith(prompt):
            return None
        # What stands before the reply depends on what comes after it, so look for the same words near the place.
        printed = alone[len(prompt) :]
        first = text.find(printed, max(0, nearest[0] - len(printed)), nearest[0] + len(printed))
        return (first, first + len(printed)) if 0 <= first <= nearest[0] else None

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
        if self.prints_reasoning and not text.startswith(prompt):  # `<think>\n` against `<think></think>`
            prompt = prompt.rstrip()
        return (len(prompt), span[1]) if len(prompt) <= span[0] and text.startswith(prompt) else span

    def _texts_by_reply(
        self, messages: list[dict[str, Any]], tools: Sequence[Any] | None, hide: bool
    ) -> list[MarkedText]:
        replies = [number for number, message in enumerate(messages) if message["role"] == "assistant" and number]
        return [self.text_of_reply(messages[: number + 1], tools, hide) for number in replies]

    def text_of_reply(self, messages: list[dict[str, Any]], tools: Sequence[Any] | None, hide: bool) -> MarkedText:
        """A conversation whose last message is the reply to train on. It is tokenized apart from what is before it."""
        prompt = self.prompt(messages[:-1], tools, hide)
        text = self.render(messages, tools, hide)
        if not text.startswith(prompt):
            text = prompt + self._last_reply(text, messages, tools, hide)
        ends = [match.end() for match in self._end_tokens[hide].finditer(text, len(prompt))]
        one = self._with_ends(text, [(len(prompt), ends[-1] if ends else len(text.rstrip()))], hide)
        one.prompt_characters = len(prompt)
        return one

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

    def _with_ends(self, text: str, spans: list[tuple[int, int]], hide: bool) -> MarkedText:
        """Each span up to and with the token that ends its turn. After the last reply there is always one."""
        ended: list[tuple[int, int]] = []
        complete = True
        for first, last in sorted(spans):
            last, complete = self._end_of_turn(text, first, last, self._end_tokens[hide])
            if ended and first <= ended[-1][1]:
                first = ended.pop()[0]
            ended.append((first, last))
        result = MarkedText(text, ended, enclosed=hide)
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
        token = tokens.match(text, place)
        if token is None:
            return last, False
        second = self.vocabulary.enclose(self._second_end) if token[0].startswith(OPEN) else self._second_end
        return token.end() + len(second) * text.startswith(second, token.end()), True

    # Learning from samples

    def _try_samples(self) -> None:
        """Find out whether the template works at all."""
        from jinja2 import TemplateSyntaxError
        from transformers.utils.chat_template_utils import render_jinja_template

        try:
            render_jinja_template(conversations=[], chat_template=self.jinja)
        except TemplateSyntaxError as error:
            raise BadModel(
                f"the chat template in {self.folder} is not valid Jinja (line {error.lineno}: {error.message}). {TRY_TEMPLATE}"
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
                f"the chat template in {self.folder} fails on a question and its answer: {problem}. {TRY_TEMPLATE}"
            )

    def _reserve_tokens(self) -> None:
        """The special tokens that this template prints, or that have a role in every text, mean only that."""
        texts = []
        for sample in _SAMPLES:
            with suppress(RowError):
                texts.append(self.render(self.plain(sample), prompt=True))
                texts.append(self.render(self.plain(sample)))
        ends = [text for text, number in self.vocabulary.special.items() if number in self.generation_ends]
        roles = [value for value in self._variables.values() if isinstance(value, str)]
        self.vocabulary.reserve(texts, [*roles, *ends])

    def _learn_calls(self) -> None:
        """In which form the template reads tool calls, if it prints them at all."""
        for self.arguments_text, self.no_content in product((False, True), (None, "")):
            with suppress(RowError):
                text = self.render(self.plain(_TOOL_SAMPLE), [_TOOL])
                if "longest_river" in text and "Egypt" in text and "None" not in text:
                    self.prints_calls = True
                    return
        self.arguments_text, self.no_content = False, None

    def _learn_ends(self) -> None:
        """What the template prints after a reply: `<|im_end|>`, ` </s>`, two tokens, words, or nothing."""
        ids = {self.tokenizer.eos_token_id, *self.generation_ends}
        names = {text for text, number in self.vocabulary.special.items() if number in ids} | {self.tokenizer.eos_token}
        last = self.render(self.plain(_SAMPLES[0])).rpartition(_SAMPLES[0][1]["content"])[2]
        middle = last
        with suppress(RowError):  # a template may be for one question and answer
            text = self.render(self.plain(_SAMPLES[1]))
            last = text.rpartition(_SAMPLES[1][3]["content"])[2]
            middle = text.partition(_SAMPLES[1][1]["content"])[2].partition(_SAMPLES[1][2]["content"])[0]
        special = any_of(self.vocabulary.special)
        after_last, after_middle = list(special.finditer(last)), list(special.finditer(middle))
        common = [
            one for one, two in zip(after_last, after_middle, strict=False) if last[: one.end()] == middle[: two.end()]
        ]
        if common:
            self._end_words = last[: common[0].start()].strip()
            self._second_end = last[common[0].end() : common[-1].end()]
            self.end_ids = (self.vocabulary.special[common[-1][0]],)
        elif after_last and not last[: after_last[0].start()].strip():  # the last turn ends in another way
            common = after_last[:1]
            self.end_ids = (self.vocabulary.special[common[0][0]],)
            if len(after_middle) > 1 and not middle[: after_middle[0].start()].strip():
                common.append(after_middle[0])
        elif middle.lstrip().startswith(last.strip()):
            self._end_words = last.strip()
        names |= {one[0] for one in common}
        self._end_tokens = any_of(names), any_of(self.vocabulary.enclose(name) for name in names)

    def _learn_lead(self) -> None:
        """What the template prints between the generation prompt and a reply."""
        sample = self.plain(_SAMPLES[0])
        try:
            prompt, without = self.render(sample[:1], prompt=True), self.render(sample[:1])
        except RowError:
            return
        before, found, _ = self.render(sample).rpartition(_SAMPLES[0][1]["content"])
        if not before.startswith(prompt) and before[len(prompt.rstrip()) :].strip():
            prompt = prompt.rstrip()
        if not found or not before.startswith(prompt):
            return
        lead = before[len(prompt) :]
        if not lead.strip():
            self.lead = lead
        elif prompt == without:
            self.header = lead
        else:
            self.prints_reasoning = True

    def _learn_tagged_header(self) -> None:
        with suppress(RowError):
            sample = self.plain(_SAMPLES[0])
            text, spans = self._print(sample, None, False, prompt=False, tracked=True)
            for first, last in spans:
                end = _common_start(text, self.prompt(sample[:1], None))
                self.tagged_header = text[first:end] if first < end < last else ""

    def _learn_system(self) -> None:
        sample = self.plain(_SAMPLES[2])
        with suppress(RowError):
            system = _SAMPLES[2][0]["content"]
            self.developer_is_system = True
            with suppress(RowError):
                developer = [{**sample[0], "role": "developer"}, *sample[1:]]
                self.developer_is_system = system not in self.render(developer)
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


def roles_out_of_order(messages: Sequence[Message]) -> str | None:
    """What is unusual about the order of the roles, whether the template minds or not; None if nothing is."""
    rest = [message["role"] for message in messages]
    while rest and rest[0] in ("system", "developer"):
        rest.pop(0)
    before = {"user": ("assistant",), "assistant": ("user", "tool"), "tool": ("assistant", "tool")}
    usual = rest[:1] == ["user"] and all(one in before.get(other, ()) for one, other in pairwise(rest))
    return None if usual else f"the roles are {_roles(messages)}"


def check_replies(messages: Sequence[Message], prints_calls: bool) -> None:
    """Refuse conversations that no template could make sense of."""
    replies = 0
    for number, message in enumerate(messages, start=1):
        if message["role"] == "assistant":
            replies += 1
            content = message["content"]
            text = content[0]["text"] if isinstance(content, list) else content
            if not (text or "").strip() and not any(message.get(part) for part in _REPLY_PARTS[1:]):
                raise InvalidConversation(f"the reply in message {number} is empty")
            if "tool_calls" in message and not prints_calls:
                raise RowError(f"message {number} has tool calls, which the chat template does not print")
        elif message["role"] == "tool" and not replies:
            raise InvalidConversation(f"message {number} is the result of a tool before any reply of the assistant")
    if not replies:
        raise NoReply(
            f"no message has the role assistant, so there is nothing to train on (the roles are {_roles(messages)})"
        )


def _list_of(calls: Any, number: int) -> Sequence[Any]:
    if not isinstance(calls, list | tuple):
        raise InvalidConversation(f"the tool calls of message {number} are not a list")
    return calls


def _joined_parts(content: Sequence[Any], number: int) -> str:
    """The text of a content in parts. Pictures and sound have none."""
    texts = []
    for part in content:
        text = part if isinstance(part, str) else part.get("text") if isinstance(part, Mapping) else None
        if not isinstance(text, str):
            kind = part.get("type") if isinstance(part, Mapping) else type(part).__name__
            raise InvalidConversation(f"message {number} has a part that is not text ({kind})")
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
