"""Requests and responses of the OpenAI API: what a client may ask, and the JSON it gets.

Nothing that would change the answer is ignored. A field is one of
- supported, and checked: type, range, all in one message per field;
- neutral at some value (`best_of=1`, `tools=[]`) and refused at any other, because it is not supported;
- harmless (`user`, `metadata`), and ignored;
- unknown, and refused.

This module knows no HTTP: an `ApiError` has the status that the server answers with.
"""

import os
import time
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import brimful
from brimful.errors import BrimfulError, DoesNotFit, ServerBusy, UserError
from brimful.serving.answer import Answer, Logprob, Prompt
from brimful.serving.chat_model import ChatModel
from brimful.serving.engine import Engine
from brimful.tasks.generate import GenerateOptions

MAX_STOPS, MAX_CHOICES, MAX_MESSAGES, MAX_TOP_LOGPROBS = 4, 16, 4096, 20
LEAST_LOGPROB = -9999.0
HARMLESS = frozenset(
    ("user", "metadata", "store", "service_tier", "safety_identifier", "prompt_cache_key", "prompt_cache_retention",
     "parallel_tool_calls")
)  # fmt: skip
"""Fields that change no answer."""
NEUTRAL: dict[str, tuple[Any, ...]] = {
    "tools": ([],), "tool_choice": ("none", "auto"), "functions": ([],), "function_call": ("none", "auto"), "logit_bias": ({},),
    "response_format": ({"type": "text"},), "modalities": (["text"],), "audio": (),
    "echo": (False,), "best_of": (1,), "suffix": ("",), "top_k": (0, -1), "min_p": (0,), "prediction": (),
}  # fmt: skip
"""Fields that are not supported, and the values at which they change nothing."""
SHARED = frozenset(
    ("model", "stream", "stream_options", "n", "max_tokens", "temperature", "top_p", "seed", "stop", "frequency_penalty",
     "presence_penalty", "repetition_penalty", "logprobs")
)  # fmt: skip
ROLES = {"system": "system", "developer": "system", "user": "user", "assistant": "assistant"}


class ApiError(Exception):
    """An error in the format of the OpenAI API."""

    def __init__(
        self, status: int, message: str, *, kind: str = "invalid_request_error", param: str | None = None,
        code: str | None = None, retry_after_s: int | None = None,
    ) -> None:  # fmt: skip
        super().__init__(message)
        self.status, self.message, self.kind, self.code = status, _clean(message), kind, code
        self.param = None if param is None else _shortened(_clean(param))  # it may be what the client made up
        self.retry_after_s = retry_after_s

    @classmethod
    def of(cls, error: BrimfulError) -> "ApiError":
        """What an error of the engine means to a client."""
        if isinstance(error, ServerBusy):
            status, kind = (503, "server_error") if error.ending else (429, "rate_limit_error")
            return cls(status, str(error), kind=kind, code="server_busy", retry_after_s=error.retry_after_s)
        if isinstance(error, DoesNotFit):
            return cls(400, str(error), code="out_of_memory")
        if isinstance(error, UserError):
            return cls(400, str(error))
        return cls(500, "the server failed to answer. Try: its log.", kind="server_error", code="internal_error")

    def to_json(self) -> dict[str, Any]:
        return {"error": {"message": self.message, "type": self.kind, "param": self.param, "code": self.code}}


@dataclass(frozen=True, kw_only=True)
class Completion:
    """A request that was checked: one prompt for each choice, and how the answer is sent."""

    chat: bool
    model: str
    prompts: tuple[Prompt, ...]
    texts: tuple[str, ...]
    """What was asked, for the log."""
    stream: bool
    include_usage: bool
    id: str
    created: int


class Api:
    """Checks requests for one model and writes its responses."""

    def __init__(self, model: ChatModel, engine: Engine, name: str, defaults: GenerateOptions) -> None:
        self.model, self.engine, self.name, self.defaults = model, engine, name, defaults
        self.created = int(time.time())
        self._tokenizer = model.generator.tokenizer

    # Requests.

    def parse(self, body: Any, *, chat: bool) -> Completion:
        """The request in a JSON body. Tokenizes, so it is not for the thread that serves connections."""
        if not isinstance(body, dict):
            raise ApiError(400, f"the body is {_kind(body)}. Try: a JSON object.")
        own = {"messages", "max_completion_tokens", "top_logprobs"} if chat else {"prompt"}
        _refuse_others(body, SHARED | own)
        self.check_model(body.get("model"))
        prompts, texts = self._chat_prompts(body) if chat else self._text_prompts(body)
        how = replace(self._sampling(body), top_logprobs=_top_logprobs(body, chat=chat))
        choices = _whole(body, "n", 1, 1, MAX_CHOICES)
        if len(prompts) * choices > MAX_CHOICES:
            raise ApiError(
                400, f"{len(prompts)} prompts with n={choices} are more than {MAX_CHOICES} choices.", param="n"
            )
        made = [
            replace(
                how, tokens=tokens, max_new_tokens=self._new_tokens(body, tokens, chat=chat), seed=how.seed + choice
            )
            for tokens in prompts
            for choice in range(choices)
        ]
        stream = _boolean(body, "stream")
        options = body.get("stream_options")
        if options is not None and (not isinstance(options, dict) or not stream):
            raise ApiError(400, "stream_options is an object, and only for stream=true.", param="stream_options")
        return Completion(
            chat=chat, model=self.name, prompts=tuple(made), texts=tuple(texts), stream=stream,
            include_usage=_boolean(options or {}, "include_usage"), created=int(time.time()),
            id=f"{'chatcmpl' if chat else 'cmpl'}-{uuid.uuid4().hex}",
        )  # fmt: skip

    def check_model(self, name: Any) -> None:
        """A request may leave the model out, since there is only one."""
        if name is not None and not isinstance(name, str):
            raise ApiError(400, f"model is {_kind(name)}. Try: a string.", param="model")
        if name not in (None, self.name):
            raise ApiError(
                404, f"the model {_shortened(name)!r} does not exist here. Try: {self.name!r}.", param="model",
                code="model_not_found",
            )  # fmt: skip

    def _chat_prompts(self, body: Mapping[str, Any]) -> tuple[list[list[int]], list[str]]:
        messages = body.get("messages")
        if not isinstance(messages, list) or not messages:
            raise ApiError(400, "messages must be a list of at least one message.", param="messages")
        if len(messages) > MAX_MESSAGES:
            raise ApiError(400, f"{len(messages):,} messages are more than {MAX_MESSAGES:,}.", param="messages")
        plain = [_message(message, f"messages[{place}]") for place, message in enumerate(messages)]
        if plain[-1]["role"] != "user":
            raise ApiError(
                400,
                f"the last message has the role {plain[-1]['role']}. Try: end with a message of the user.",
                param="messages",
            )
        if self.model.template is None and any(message["role"] == "system" for message in plain):
            raise ApiError(
                400,
                "a system message needs a chat template, and the model has none. Try: leave it out.",
                param="messages",
            )
        try:
            return [self.model.prompt(plain)], [plain[-1]["content"]]
        except UserError as error:  # the template's own rules, such as the order of roles
            raise ApiError(400, str(error), param="messages") from None

    def _text_prompts(self, body: Mapping[str, Any]) -> tuple[list[list[int]], list[str]]:
        prompt = body.get("prompt")
        prompts = [prompt] if isinstance(prompt, str) or _is_tokens(prompt) else prompt
        if (
            not isinstance(prompts, list)
            or not prompts
            or not all(isinstance(one, str) or _is_tokens(one) for one in prompts)
        ):
            raise ApiError(400, "prompt must be a text, a list of texts, or tokens.", param="prompt")
        if len(prompts) > MAX_CHOICES:
            raise ApiError(400, f"{len(prompts):,} prompts are more than {MAX_CHOICES}.", param="prompt")
        vocabulary = self.engine.vocabulary
        for one in prompts:
            if not isinstance(one, str) and not all(0 <= token < vocabulary for token in one):
                raise ApiError(400, f"tokens must be between 0 and {vocabulary - 1:,}.", param="prompt")
        texts = [_clean(one) if isinstance(one, str) else "" for one in prompts]
        tokens = [
            self.model.text_prompt(text) if isinstance(one, str) else one
            for one, text in zip(prompts, texts, strict=True)
        ]
        return tokens, texts

    def _sampling(self, body: Mapping[str, Any]) -> Prompt:
        defaults = self.defaults
        seed = body.get("seed")
        if seed is not None and (not isinstance(seed, int) or isinstance(seed, bool) or not -(2**63) <= seed < 2**63):
            raise ApiError(400, f"seed is {_shown(seed)} and must be a whole number of 64 bits.", param="seed")
        return Prompt(
            tokens=(),
            max_new_tokens=1,
            temperature=_number(body, "temperature", defaults.temperature, 0, 2),
            top_p=_number(body, "top_p", defaults.top_p, 0, 1, above=True),
            repetition_penalty=_number(body, "repetition_penalty", defaults.repetition_penalty, 0, 100, above=True),
            frequency_penalty=_number(body, "frequency_penalty", 0.0, -2, 2),
            presence_penalty=_number(body, "presence_penalty", 0.0, -2, 2),
            seed=int.from_bytes(os.urandom(6)) if seed is None else seed,
            stop=_stops(body.get("stop")),
        )

    def _new_tokens(self, body: Mapping[str, Any], tokens: Sequence[int], *, chat: bool) -> int:
        """As many as were asked for, up to the end of the context."""
        room = self.engine.room(len(tokens))
        if not tokens:
            raise ApiError(400, "the prompt is empty.", param="messages" if chat else "prompt")
        if room < 1:
            raise ApiError(
                400, f"the prompt has {len(tokens):,} tokens, and the model reads {self.engine.longest_prompt:,} at most. "
                "Try: a shorter prompt.", param="messages" if chat else "prompt", code="context_length_exceeded",
            )  # fmt: skip
        names = [name for name in ("max_completion_tokens", "max_tokens") if body.get(name) is not None]
        if len(names) == 2 and body[names[0]] != body[names[1]]:
            raise ApiError(400, "max_tokens and max_completion_tokens differ. Try: one of them.", param="max_tokens")
        wanted = _whole(body, names[0], 1, 1, 2**31) if names else self.defaults.max_new_tokens
        return min(wanted, room)

    # Responses.

    def response(
        self, request: Completion, answers: Sequence[Answer], taken: Sequence[tuple[str, Sequence[Logprob]]]
    ) -> dict[str, Any]:
        """`taken`: the text of each answer, and its tokens if their log-probabilities are wanted."""
        choices = []
        for place, (answer, (text, logprobs)) in enumerate(zip(answers, taken, strict=True)):
            message = {"message": {"role": "assistant", "content": text, "refusal": None}}
            content = message if request.chat else {"text": text}
            choices.append(self._choice(request, place, content, logprobs, answer.finish))
        return self._object(request, choices) | {"usage": _usage(answers, request)}

    def first_chunks(self, request: Completion) -> list[dict[str, Any]]:
        """Before any text: who speaks."""
        if not request.chat:
            return []
        return [
            self._chunk(request, place, {"role": "assistant", "content": ""}) for place in range(len(request.prompts))
        ]

    def chunk(
        self, request: Completion, place: int, text: str, logprobs: Sequence[Logprob] = (), finish: str | None = None
    ) -> dict[str, Any]:
        """A piece of the text of one choice, or its end."""
        delta: dict[str, Any] = {"content": text} if text or finish is None else {}
        return self._chunk(request, place, delta if request.chat else text, logprobs, finish)

    def usage_chunk(self, request: Completion, answers: Sequence[Answer]) -> dict[str, Any]:
        return self._object(request, [], stream=True) | {"usage": _usage(answers, request)}

    def _chunk(
        self, request: Completion, place: int, content: Any, logprobs: Sequence[Logprob] = (), finish: str | None = None
    ) -> dict[str, Any]:
        content = {"delta": content} if request.chat else {"text": content}
        choice = self._choice(request, place, content, logprobs, finish)
        chunk = self._object(request, [choice], stream=True)
        return chunk | {"usage": None} if request.include_usage else chunk

    def _object(self, request: Completion, choices: list[dict[str, Any]], *, stream: bool = False) -> dict[str, Any]:
        kind = ("chat.completion.chunk" if stream else "chat.completion") if request.chat else "text_completion"
        return {
            "id": request.id, "object": kind, "created": request.created, "model": request.model,
            "system_fingerprint": f"brimful-{brimful.__version__}", "choices": choices,
        }  # fmt: skip

    def _choice(
        self, request: Completion, place: int, content: dict[str, Any], logprobs: Sequence[Logprob], finish: str | None
    ) -> dict[str, Any]:
        shown = None
        if request.prompts[place].top_logprobs is not None:
            shown = self._chat_logprobs(logprobs) if request.chat else self._text_logprobs(logprobs)
        return {"index": place, **content, "logprobs": shown, "finish_reason": finish}

    def _chat_logprobs(self, logprobs: Sequence[Logprob]) -> dict[str, Any]:
        def entry(token: int, logprob: float) -> dict[str, Any]:
            content = self._tokenizer.token_bytes(token)
            return {"token": _token_text(content), "logprob": _finite(logprob), "bytes": list(content)}

        content = [
            entry(one.token, one.logprob) | {"top_logprobs": [entry(*likely) for likely in one.top]} for one in logprobs
        ]
        return {"content": content, "refusal": None}

    def _text_logprobs(self, logprobs: Sequence[Logprob]) -> dict[str, Any]:
        text = lambda token: _token_text(self._tokenizer.token_bytes(token))  # noqa: E731
        return {
            "tokens": [text(one.token) for one in logprobs],
            "token_logprobs": [_finite(one.logprob) for one in logprobs],
            "top_logprobs": [
                {text(token): _finite(logprob) for token, logprob in [*one.top, (one.token, one.logprob)]}
                for one in logprobs
            ],
            "text_offset": [one.offset for one in logprobs],
        }

    def model_card(self) -> dict[str, Any]:
        return {"id": self.name, "object": "model", "created": self.created, "owned_by": "brimful"}


def _token_text(content: bytes) -> str:
    """A part of a character is written as \\xe6, as OpenAI does."""
    return content.decode("utf-8", "backslashreplace")


def _finite(logprob: float) -> float:
    """JSON has no infinity."""
    return max(logprob, LEAST_LOGPROB)


def _top_logprobs(body: Mapping[str, Any], *, chat: bool) -> int | None:
    """How many of the likeliest tokens are wanted beside each token; None if no log-probabilities are."""
    if not chat:
        count = body.get("logprobs")
        return None if count is None or count is False else _whole(body, "logprobs", 0, 0, MAX_TOP_LOGPROBS)
    wanted, top = _boolean(body, "logprobs"), _whole(body, "top_logprobs", 0, 0, MAX_TOP_LOGPROBS)
    if top and not wanted:
        raise ApiError(400, "top_logprobs needs logprobs=true.", param="top_logprobs")
    return top if wanted else None


def _usage(answers: Sequence[Answer], request: Completion) -> dict[str, int]:
    """The prompt counts once, however many choices it has."""
    prompts = sum(len(tokens) for tokens in {id(prompt.tokens): prompt.tokens for prompt in request.prompts}.values())
    completions = sum(len(answer.tokens) for answer in answers)
    return {"prompt_tokens": prompts, "completion_tokens": completions, "total_tokens": prompts + completions}


def _refuse_others(body: Mapping[str, Any], known: frozenset[str] | set[str]) -> None:
    """All fields that are not supported are named at once."""
    others = [
        name
        for name, value in body.items()
        if name not in known and name not in HARMLESS and value is not None and value not in NEUTRAL.get(name, ())
    ]
    if not others:
        return
    unsupported = [name for name in others if name in NEUTRAL]
    unknown = [_shortened(name) for name in others if name not in NEUTRAL]
    problems = [
        f"the field {names[0]!r} is {problem}" if len(names) == 1 else f"the fields {_listed(names)} are {problem}"
        for names, problem in ((unsupported, "not supported"), (unknown, "unknown"))
        if names
    ]
    advice = f"Try: leave {'it' if len(others) == 1 else 'them'} out"
    if "response_format" in others:
        advice += ", and ask for the format in the prompt"
    code = "unsupported_parameter" if unsupported else "unknown_parameter"
    raise ApiError(400, f"{', and '.join(problems)}. {advice}.", param=(unsupported or unknown)[0], code=code)


def _listed(names: Sequence[str]) -> str:
    return f"{', '.join(map(repr, names[:-1]))} and {names[-1]!r}"


def _message(message: Any, where: str) -> dict[str, str]:
    """A message as its role and its text."""
    if not isinstance(message, dict):
        raise ApiError(400, f"{where} is {_kind(message)}. Try: an object with role and content.", param=where)
    role = message.get("role")
    if role in ("tool", "function") or message.get("tool_calls") or message.get("function_call"):
        raise ApiError(
            400,
            f"{where} is part of a tool call, and tools are not supported.",
            param=where,
            code="unsupported_parameter",
        )
    if not isinstance(role, str) or role not in ROLES:
        raise ApiError(
            400, f"{where} has the role {_shown(role)}. Try: system, user or assistant.", param=f"{where}.role"
        )
    content = message.get("content")
    if content is None and role == "assistant":
        content = ""
    if isinstance(content, list):
        content = "".join(_part(part, f"{where}.content[{place}]") for place, part in enumerate(content))
    if not isinstance(content, str):
        raise ApiError(400, f"{where} has {_kind(content)} as its content. Try: a text.", param=f"{where}.content")
    if not content.strip() and role == "user":
        raise ApiError(400, f"{where} is empty. Try: a text.", param=f"{where}.content")
    return {"role": ROLES[role], "content": _clean(content)}


def _part(part: Any, where: str) -> str:
    if isinstance(part, dict) and part.get("type") == "text" and isinstance(part.get("text"), str):
        return str(part["text"])
    kind = part.get("type") if isinstance(part, dict) else None
    shown = f"of the type {_shown(kind)}" if kind else _kind(part)
    raise ApiError(
        400, f"{where} is {shown}, and the model reads text only.", param=where, code="unsupported_parameter"
    )


def _stops(value: Any) -> tuple[str, ...]:
    stops = [value] if isinstance(value, str) else [] if value is None else value
    if not isinstance(stops, list) or len(stops) > MAX_STOPS or not all(isinstance(one, str) and one for one in stops):
        raise ApiError(
            400, f"stop must be a text, or a list of up to {MAX_STOPS} texts that are not empty.", param="stop"
        )
    return tuple(stops)


def _number(
    body: Mapping[str, Any], name: str, default: float, least: float, most: float, *, above: bool = False
) -> float:
    value = body.get(name)
    if value is None:
        return default
    if (
        isinstance(value, bool)
        or not isinstance(value, (int, float))
        or not least <= value <= most
        or (above and value == least)
    ):
        range_ = f"above {least:g} and at most {most:g}" if above else f"between {least:g} and {most:g}"
        raise ApiError(400, f"{name} is {_shown(value)} and must be a number {range_}.", param=name)
    return float(value)


def _whole(body: Mapping[str, Any], name: str, default: int, least: int, most: int) -> int:
    value = body.get(name)
    if value is None:
        return default
    if isinstance(value, bool) or not isinstance(value, int) or not least <= value <= most:
        raise ApiError(
            400, f"{name} is {_shown(value)} and must be a whole number between {least} and {most:,}.", param=name
        )
    return value


def _boolean(body: Mapping[str, Any], name: str) -> bool:
    value = body.get(name)
    if value is not None and not isinstance(value, bool):
        raise ApiError(400, f"{name} is {_shown(value)}. Try: true or false.", param=name)
    return bool(value)


def _is_tokens(value: Any) -> bool:
    return (
        isinstance(value, list)
        and bool(value)
        and all(isinstance(one, int) and not isinstance(one, bool) for one in value)
    )


def _clean(text: str) -> str:
    """JSON may hold halves of surrogate pairs, which are not text."""
    return text.encode("utf-8", "replace").decode()


def _kind(value: Any) -> str:
    names = {dict: "an object", list: "a list", str: "a text", bool: "a boolean", int: "a number", float: "a number"}
    return names.get(type(value), "null")


def _shown(value: Any) -> str:
    return _shortened(repr(value)) if isinstance(value, (str, int, float)) else _kind(value)


def _shortened(text: str) -> str:
    """What a client sent is repeated to it, but not at length."""
    return text if len(text) <= 64 else f"{text[:61]}..."
