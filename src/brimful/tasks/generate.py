"""Answers of a language model: many at once in batches that fit, or one that streams, and a talk in the terminal.

Decoding is `generate` of transformers: greedy by default, and always with a cache of keys and values, which training
configurations switch off (without it an answer of 32 tokens runs the decoder over all earlier tokens 32 times). An answer
ends at the *tokenizer's* eos id, or at any token that ends a turn in the model's chat template. They are passed explicitly
because a model's config may name others.

Prompts are answered in batches of similar lengths. Those of a causal model are padded on the left, so that all answers begin
in the same place; each row counts its positions from its own first token, so it is answered as it would be alone. Sampling
keeps that: each prompt has random numbers of its own, which follow from the seed and its tokens (`OwnNoise`).

The memory of a batch is modelled from a few short generations of dummies: cache and scores grow with rows, prompt length, new
tokens and beams, and every answer counts as if it had `max_new_tokens`. A causal model runs over the whole prompt at once
before it writes the first token. That prefill, the blocks in decoding, and the head with the choice of a token peak by
different laws, so they are phases of their own: one law for all was three times too high at 160 new tokens. A decoding step of the tiny model takes 2 ms for one row and 4.4 ms for 32, so fewer batches are faster.
"""

import hashlib
import time
from collections import abc
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import AbstractContextManager, closing, contextmanager, nullcontext
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

from brimful.errors import BadModel, BadOption, DoesNotFit, UserError
from brimful.languages import tr, translate
from brimful.task import Shape
from brimful.tasks.model_folder import (
    ModelTokenizer,
    is_causal,
    load_model,
    quiet,
    read_config,
    resolve,
    text_config,
    tokenizer_of,
)
from brimful.units import NOTHING

if TYPE_CHECKING:
    import torch

    from brimful.memory.forward import Forward
    from brimful.tasks.chat_template import ChatTemplate

MAX_ROWS = {"cpu": 64}
"""Prompts per batch, by device: a CPU gains nothing from more. Others use `forward.MAX_ROWS`."""
PROBE_TOKENS = 8
"""New tokens of a probe. Memory grows linearly with them, and each takes a forward pass."""
PROBE_SOURCE = 256
"""Prompt tokens of a probe."""
INCOMPLETE_CHARACTER = "\ufffd"
"""What the first bytes of a character decode to."""
Manner: TypeAlias = Literal["questions", "conversation", "continuation"]
"""How a model is talked to: an encoder-decoder, a causal model with a chat template, one without."""
HELP: dict[Manner, str] = {
    "questions": "Each line is one question; the model does not remember earlier ones. "
    "/quit or Ctrl-D ends, Ctrl-C stops an answer.",
    "conversation": "The model remembers the conversation. /new begins another, /system TEXT tells the model how to behave, "
    "/quit or Ctrl-D ends, Ctrl-C stops an answer.",
    "continuation": "The model has no chat template: it continues each line as a text of its own. "
    "/quit or Ctrl-D ends, Ctrl-C stops a text.",
}
QUIT = ("/quit", "/exit")
LEAST_ROOM = 4
"""A conversation is shortened when less than this part of the context, or than `max_new_tokens`, is left for the answer."""


@dataclass(frozen=True, kw_only=True)
class GenerateOptions:
    """How answers are generated."""

    max_new_tokens: int = 256
    """Tokens of an answer at most."""
    beams: int = 1
    """Beams of beam search; 1 is greedy."""
    temperature: float = 0.0
    """Sampling temperature; 0 always takes the most likely token."""
    top_p: float = 1.0
    """Sample only from the most likely tokens that together have this probability."""
    repetition_penalty: float = 1.0
    """Above 1, tokens that were generated already become less likely."""
    seed: int = 0
    """Seed of sampling."""

    def __post_init__(self) -> None:
        problems = list(self._problems())
        if problems:
            raise BadOption(" ".join(problems))

    def _problems(self) -> Iterator[str]:
        if self.max_new_tokens < 1:
            yield f"max_new_tokens={self.max_new_tokens} must be at least 1."
        if self.beams < 1:
            yield f"beams={self.beams} must be at least 1."
        if not 0 <= self.temperature <= 100:
            yield f"temperature={self.temperature} must be between 0 and 100."
        if not 0 < self.top_p <= 1:
            yield f"top_p={self.top_p} must be above 0 and at most 1."
        if not self.repetition_penalty > 0:
            yield f"repetition_penalty={self.repetition_penalty} must be positive."
        if self.beams > 1 and self.temperature:
            yield f"beams={self.beams} cannot be combined with temperature={self.temperature}."


class Generator:
    """A model in eval mode and its tokenizer. `autocast` opens the context that forward passes run in.

    `end_ids` are the tokens that end an answer. Default: the tokenizer's eos.
    """

    def __init__(
        self,
        model: Any,
        tokenizer: ModelTokenizer,
        options: GenerateOptions,
        *,
        device: "torch.device",
        autocast: Callable[[], AbstractContextManager[Any]] = nullcontext,
        end_ids: Sequence[int] = (),
    ) -> None:
        self.model, self.tokenizer, self.options, self.device = model, tokenizer, options, device
        self.end_ids = tuple(end_ids) or (tokenizer.eos_id,)
        self.causal = is_causal(model.config)
        self.context_tokens = _context_tokens(model.config)
        """What a prompt and its answer may have together; None without a limit."""
        self._autocast = autocast
        self._start_id = None if self.causal else _start_id(model)

    def answers(
        self, prompts: Sequence[Sequence[int]], forward: "Forward", progress: Callable[[str], object] = lambda _: None
    ) -> list[list[int]]:
        """The tokens of an answer to each prompt. `forward` was made for `dummy` and keeps its memory model."""
        answers = dict[int, list[int]]()
        for rows, batch in self.answer_batches(prompts, forward):
            answers.update(zip(rows, batch, strict=True))
            progress(f"answered {len(answers):,} of {len(prompts):,} prompts")
        return [answers[row] for row in range(len(prompts))]

    def answer_batches(
        self, prompts: Sequence[Sequence[int]], forward: "Forward", *, answered: Collection[int] = (),
        name: Callable[[int], str] | None = None,
    ) -> Iterator[tuple[list[int], list[list[int]]]]:  # fmt: skip
        """The same batch by batch: which prompts, and their answers. `name` names a prompt that does not fit even alone.

        A batch of prompts that are all in `answered` is left out. So a caller that was interrupted gets the same batches again,
        to the last bit, and not others with the prompts that are left.
        """
        new, known = self.options.max_new_tokens, set(answered)
        if prompts and forward.model is None:
            forward.fit((min(PROBE_SOURCE, max(map(len, prompts))), min(PROBE_TOKENS, new)))

        def run(rows: list[int]) -> list[list[int]] | None:
            return None if known.issuperset(rows) else self.answer_batch([prompts[row] for row in rows])

        for rows, batch in forward.run_batches([(len(prompt), new) for prompt in prompts], run, name=name):
            if batch is not None:
                yield rows, batch

    def answer_batch(self, prompts: Sequence[Sequence[int]]) -> list[list[int]]:
        """The tokens of an answer to each prompt, generated together: as far as they have equal room in the context."""
        rooms = [self.room(prompt) for prompt in prompts]
        answers: list[list[int]] = [[] for _ in prompts]
        for new in sorted(set(rooms) - {0}):
            rows = [row for row, room in enumerate(rooms) if room == new]
            ids, mask = self._padded([prompts[row] for row in rows])
            output = self._generate(ids, mask, new)[:, ids.shape[1] if self.causal else 1 :]  # what precedes the answer
            for row, tokens in zip(rows, output.tolist(), strict=True):
                answers[row] = self._before_end(tokens)
        return answers

    def room(self, prompt: Sequence[int]) -> int:
        """The tokens that an answer to this prompt may have."""
        new = self.options.max_new_tokens
        if not self.causal or self.context_tokens is None:
            return new
        return max(0, min(new, self.context_tokens - len(prompt)))

    def dummy(self, rows: int, shape: Shape) -> None:
        """Generate exactly `shape[1]` tokens for random prompts of `shape[0]` tokens, to measure memory."""
        import torch

        source, new = shape
        ids = torch.randint(0, text_config(self.model.config).vocab_size, (rows, source), device=self.device)
        mask = torch.ones_like(ids)
        if not self.causal:
            self._generate(ids, mask, new, min_new=new)
            return
        mask[:, : source // 2] = 0  # without padding, no mask is made
        with _phases(self.model):
            self._generate(ids, mask, new, min_new=new)

    def stream(self, prompt: Sequence[int]) -> Iterator[str]:
        """One answer in pieces of whole characters. Beam search yields a single piece."""
        if self.options.beams > 1:
            yield self.tokenizer.decode(self.answer_batch([prompt])[0])
            return
        shown, ids = "", list[int]()
        for token in self._tokens(prompt):
            ids.append(token)
            text = self.tokenizer.decode(ids)
            if not text.endswith(INCOMPLETE_CHARACTER) and len(text) > len(shown):
                yield text[len(shown) :]
                shown = text
        if rest := self.tokenizer.decode(ids)[len(shown) :]:
            yield rest

    def _padded(self, prompts: Sequence[Sequence[int]]) -> "tuple[torch.Tensor, torch.Tensor]":
        """The prompts and their mask: the end of a causal model's prompt is where its answer begins, so it is aligned."""
        import torch

        ids = torch.full((len(prompts), max(map(len, prompts))), self.tokenizer.pad_id)
        mask = torch.zeros_like(ids)
        for row, prompt in enumerate(prompts):
            place = slice(ids.shape[1] - len(prompt), None) if self.causal else slice(len(prompt))
            ids[row, place] = torch.tensor([int(token) for token in prompt])
            mask[row, place] = 1
        return ids.to(self.device), mask.to(self.device)

    def _generate(self, ids: "torch.Tensor", mask: "torch.Tensor", new: int, min_new: int | None = None) -> Any:
        import torch
        from transformers import GenerationConfig, LogitsProcessorList, RepetitionPenaltyLogitsProcessor

        options = self.options
        config = GenerationConfig(
            max_new_tokens=new, min_new_tokens=min_new, num_beams=options.beams, do_sample=False, repetition_penalty=1.0,
            use_cache=True, eos_token_id=list(self.end_ids), pad_token_id=self.tokenizer.pad_id,
            decoder_start_token_id=self._start_id,
        )  # fmt: skip
        processors = LogitsProcessorList()
        if (
            options.repetition_penalty != 1
        ):  # not by `config`, which would count the prompt and its padding as generated
            ignored = ids.shape[1] if self.causal else 0
            processors.append(
                RepetitionPenaltyLogitsProcessor(options.repetition_penalty, prompt_ignore_length=ignored)
            )
        if options.temperature:
            prompts = [row[keep].tolist() for row, keep in zip(ids.cpu(), mask.cpu().bool(), strict=True)]
            processors.extend(self._sampling(prompts))
        with torch.no_grad(), self._autocast(), quiet():
            return self.model.generate(
                input_ids=ids, attention_mask=mask, generation_config=config, logits_processor=processors
            )

    def _sampling(self, prompts: Sequence[Sequence[int]]) -> list[Callable[..., "torch.Tensor"]]:
        """What turns scores into others whose maximum is a sample: for `generate`, and for a stream."""
        from transformers import TemperatureLogitsWarper, TopPLogitsWarper

        options = self.options
        seeds = [seed_of(options.seed, prompt) for prompt in prompts]
        top_p = [TopPLogitsWarper(float(options.top_p))] if options.top_p < 1 else []
        return [TemperatureLogitsWarper(float(options.temperature)), *top_p, OwnNoise(seeds, self.device)]

    def _tokens(self, prompt: Sequence[int]) -> Iterator[int]:
        """The answer token by token, up to its end: that of `generate`."""
        import torch

        ids = torch.tensor([[int(token) for token in prompt]], device=self.device)
        sampling = self._sampling([prompt]) if self.options.temperature else []
        decoded = torch.full((1, 0 if self.causal else 1), self._start_id or 0, device=self.device)
        next_scores = self._causal_steps(ids) if self.causal else self._decoder_steps(ids)
        for _ in range(self.room(prompt)):
            with torch.no_grad(), self._autocast():
                scores = next_scores(decoded)
            token = self._choose(decoded, scores.float(), sampling)
            if token in self.end_ids:
                return
            decoded = torch.cat([decoded, torch.full((1, 1), token, device=self.device)], dim=1)
            yield token

    def _decoder_steps(self, ids: "torch.Tensor") -> "Callable[[torch.Tensor], torch.Tensor]":
        """The scores of the next token after those decoded so far. The encoder runs once."""
        import torch

        encoded = cache = None
        mask = torch.ones_like(ids)

        def step(decoded: "torch.Tensor") -> "torch.Tensor":
            nonlocal encoded, cache
            if encoded is None:
                encoded = self.model.get_encoder()(input_ids=ids, attention_mask=mask)
            output = self.model(
                encoder_outputs=encoded, attention_mask=mask, decoder_input_ids=decoded[:, -1:], past_key_values=cache,
                use_cache=True,
            )  # fmt: skip
            cache = output.past_key_values
            return output.logits[:, -1]

        return step

    def _causal_steps(self, ids: "torch.Tensor") -> "Callable[[torch.Tensor], torch.Tensor]":
        """The scores of the next token after the prompt and those decoded so far. The prompt runs once."""
        cache = None
        last_only = {"logits_to_keep": 1} if self.model._supports_logits_to_keep() else {}

        def step(decoded: "torch.Tensor") -> "torch.Tensor":
            nonlocal cache
            output = self.model(
                input_ids=ids if cache is None else decoded[:, -1:],
                attention_mask=ids.new_ones(1, ids.shape[1] + decoded.shape[1]),
                past_key_values=cache,
                use_cache=True,
                **last_only,
            )
            cache = output.past_key_values
            return output.logits[:, -1]

        return step

    def _choose(
        self, decoded: "torch.Tensor", scores: "torch.Tensor", sampling: "Sequence[Callable[..., torch.Tensor]]"
    ) -> int:
        from transformers import RepetitionPenaltyLogitsProcessor

        if self.options.repetition_penalty != 1 and decoded.shape[1]:
            scores = RepetitionPenaltyLogitsProcessor(self.options.repetition_penalty)(decoded, scores)
        for process in sampling:
            scores = process(decoded, scores)
        return int(scores.argmax())

    def _before_end(self, tokens: list[int]) -> list[int]:
        end = next((place for place, token in enumerate(tokens) if token in self.end_ids), None)
        return tokens[:end]


class OwnNoise:
    """Scores plus Gumbel noise: their maximum is a sample from the softmax of the scores (Gumbel 1954).

    Each row has a random generator of its own and takes one number per token from it at every step. So what it draws depends
    neither on the other rows of its batch nor on how many there are, and scores that differ by rounding, as those of another
    batch do, mostly give the same token. Drawing all rows from one generator gives other answers in every batch.
    """

    def __init__(self, seeds: Sequence[int], device: "torch.device") -> None:
        import torch

        self._generators = [torch.Generator(device).manual_seed(seed) for seed in seeds]

    def __call__(self, _: "torch.Tensor", scores: "torch.Tensor") -> "torch.Tensor":
        import torch

        noise = torch.empty_like(scores, dtype=torch.float32)
        for row, generator in zip(noise, self._generators, strict=True):
            row.exponential_(generator=generator)
        return scores - noise.clamp_(min=torch.finfo(noise.dtype).tiny).log_()


def seed_of(seed: int, prompt: Sequence[int]) -> int:
    """The seed of the answer to a prompt. The same prompt has another one under another seed."""
    text = f"{seed}:{','.join(str(int(token)) for token in prompt)}"
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:4], "big")


def weights_dtype(config: Any, device: "torch.device") -> "torch.dtype | None":
    """The type to load weights in: those of a causal model as they were saved, because float32 takes twice the memory of an
    8B in bf16 and adds nothing. None, for float32, on a CPU and for an encoder-decoder."""
    return config.dtype if is_causal(config) and device.type != "cpu" else None


def max_rows(device: "torch.device") -> int:
    """Prompts worth answering in one batch."""
    from brimful.memory import forward

    return MAX_ROWS.get(device.type, forward.MAX_ROWS)


@contextmanager
def _phases(model: Any) -> Iterator[None]:
    """Tells a probe what a causal model is doing: prefill, then by turns the blocks and the head with the choice of a token."""
    from brimful.memory.forward import next_phase

    runs = 0

    def begin(*_: Any) -> None:
        nonlocal runs
        runs += 1
        if runs > 1:  # the first is the prefill
            next_phase("decoding")

    def choose(*_: Any) -> None:
        next_phase("choosing")

    model = model.get_base_model() if hasattr(model, "get_base_model") else model  # within PEFT's
    head = model.get_output_embeddings()
    hooks = [model.register_forward_pre_hook(begin)]
    hooks += [head.register_forward_pre_hook(choose)] if head is not None else []
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


def _context_tokens(config: Any) -> int | None:
    """The tokens that the model can read at once, as far as its configuration tells."""
    positions = getattr(text_config(config), "max_position_embeddings", None)
    return positions if isinstance(positions, int) and positions > 0 else None


def _start_id(model: Any) -> int:
    """The token that decoding starts with: pad for T5, eos for BART, bos for others."""
    for config in (model.generation_config, model.config):
        for name in ("decoder_start_token_id", "bos_token_id"):
            if isinstance(token := getattr(config, name, None), int):
                return token
    raise BadModel("the model's config has no decoder_start_token_id. Try: add it to config.json.")


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
        from brimful.memory.context import forward_context

        self.folder, self.device = resolve(model), device
        config = read_config(self.folder)
        tokenizer = tokenizer_of(self.folder, config)
        self.template = _template_of(self.folder) if is_causal(config) else None
        self.manner: Manner = (
            "questions" if not is_causal(config) else "continuation" if self.template is None else "conversation"
        )
        self.system: str | None = None
        """What the model is told before the conversation."""
        self.turns: list[tuple[str, str]] = []
        """Questions and answers that the model remembers."""
        self.turns_left_out = 0
        """Of the conversation so far, because the context was full when the last question was asked."""
        if system is not None:
            self.set_system(system)
        self.generator = Generator(
            load_model(self.folder, device, weights_dtype(config, device)),
            tokenizer,
            options,
            device=device,
            autocast=lambda: forward_context(device, autocast),
            end_ids=self.template.end_ids if self.template else (),
        )

    @property
    def help(self) -> str:
        """What a user of the terminal should know."""
        return HELP[self.manner]

    def begin(self) -> None:
        """Begin another conversation. The system message stays."""
        self.turns.clear()

    def set_system(self, text: str) -> None:
        """Tell the model how to behave, in a conversation that begins now. Empty text takes it back."""
        if self.template is None:
            raise BadOption(f"system={text!r} needs a chat template, and {self.folder} has none. Try: leave it out.")
        self.system = text.strip() or None
        self.begin()

    def ask(self, question: str) -> abc.Generator[str]:
        """The answer in pieces of whole characters. Once it ends or is closed, the model remembers it."""
        from brimful.memory.oom import is_oom

        text = question.encode("utf-8", "replace").decode()  # a terminal may pass on bytes that are not text
        ids, pieces = self._prompt(text), list[str]()
        try:
            for piece in self.generator.stream(ids):
                pieces.append(piece)
                yield piece
        except (GeneratorExit, KeyboardInterrupt):  # the user has seen what there is
            self._remember(text, "".join(pieces))
            raise
        except Exception as error:
            if not is_oom(error):
                raise
            raise DoesNotFit(
                f"out of memory while answering a question of {len(ids):,} tokens. "
                "Try: a shorter question, or a lower max_new_tokens=.",
                needed_bytes=0,
            ) from None
        self._remember(text, "".join(pieces))

    def reply(self, question: str, write: Callable[[str], object] = lambda _: None) -> Reply:
        """The whole answer. `write` is called with each piece of it as it comes."""
        started, pieces = time.perf_counter(), list[str]()
        with closing(self.ask(question)) as answer:
            for piece in answer:
                pieces.append(piece)
                write(piece)
        return Reply(prompt=question, response="".join(pieces), seconds=time.perf_counter() - started)

    def _prompt(self, question: str) -> list[int]:
        """The tokens that the model is given; a causal model has room for one more at least."""
        limit, left_out = self.generator.context_tokens, 0
        longest = limit if limit is None or self.manner == "questions" else limit - 1
        if self.manner == "conversation":
            ids, left_out = self._conversation(question)
        else:
            tokenizer = self.generator.tokenizer
            ids = tokenizer.encode(question) if self.manner == "questions" else tokenizer.begin(question)
        if longest is not None and len(ids) > longest:
            raise BadOption(
                f"the question has {len(ids):,} tokens, but the model reads {longest:,} at most. Try: a shorter question."
            )
        del self.turns[:left_out]
        self.turns_left_out = left_out
        return ids

    def _conversation(self, question: str) -> tuple[list[int], int]:
        """The tokens of conversation and question, and how many of the oldest turns leave too little room for an answer."""
        assert self.template is not None
        limit, new = self.generator.context_tokens, self.generator.options.max_new_tokens
        for first in range(len(self.turns) + 1):
            ids = self.template.prompt(self._messages(self.turns[first:], question))
            if limit is None or len(ids) + min(new, limit // LEAST_ROOM) <= limit:
                break
        return ids, first

    def _messages(self, turns: Sequence[tuple[str, str]], question: str) -> list[dict[str, str]]:
        messages = [{"role": "system", "content": self.system}] if self.system else []
        for asked, answered in turns:
            messages += [{"role": "user", "content": asked}, {"role": "assistant", "content": answered}]
        return [*messages, {"role": "user", "content": question}]

    def _remember(self, question: str, answer: str) -> None:
        if self.manner == "conversation" and answer.strip():  # many templates fail on an empty answer
            self.turns.append((question, answer))


def talk(chat: Chat, read: Callable[[], str], write: Callable[[str], object]) -> None:
    """Answer questions from `read` until it raises EOFError or returns /quit. A failed question does not end it."""
    while True:
        try:
            line = read().strip()
        except EOFError:
            return
        if line in QUIT:
            return
        try:
            _answer_line(chat, line, write)
        except KeyboardInterrupt:
            write(" …\n")
        except UserError as error:
            write(f"({translate(str(error))})\n")


def _answer_line(chat: Chat, line: str, write: Callable[[str], object]) -> None:
    command, _, text = line.partition(" ")
    if line == "/help":
        write(f"{translate(chat.help)}\n")
    elif line == "/new" and chat.manner == "conversation":
        chat.begin()
        write(f"({tr('a new conversation')})\n")
    elif command == "/system" and chat.manner == "conversation":
        chat.set_system(text)
        began = (
            "a new conversation with this system message"
            if chat.system
            else "a new conversation without a system message"
        )
        write(f"({tr(began)})\n")
    elif line:
        reply = chat.reply(line, write)
        write("\n" if reply.response.strip() else f"{NOTHING}\n")
        if (count := chat.turns_left_out) and chat.manner == "conversation":
            full = f"the context is full: the model no longer sees the oldest {'turn' if count == 1 else f'{count:,} turns'}"
            write(f"({translate(full)})\n")


def _template_of(folder: Path) -> "ChatTemplate | None":
    """The chat template of a model; None for a base model without one."""
    from brimful.tasks.chat_template import ChatTemplate, load_auto_tokenizer

    return ChatTemplate.load(folder) if load_auto_tokenizer(folder).chat_template else None
