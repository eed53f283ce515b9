"""Answers from an encoder-decoder: many at once in batches that fit, or one that streams.

Decoding is `generate` of transformers: greedy by default, and always with a cache of keys and values, which training
configurations switch off (without it an answer of 32 tokens runs the decoder over all earlier tokens 32 times). An answer
ends at the *tokenizer's* eos id, which is passed explicitly because a model's config may name another one.

Prompts are answered in batches of similar lengths. The memory of a batch is modelled from a few short generations of
dummies: cache and scores grow with rows, prompt length, new tokens and beams, and every answer counts as if it had
`max_new_tokens`. A decoding step of the tiny model takes 2 ms for one row and 4.4 ms for 32, so fewer batches are faster.
"""

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from brimful.errors import BadModel, BadOption, DoesNotFit, UserError
from brimful.task import Shape
from brimful.tasks.model_folder import ModelTokenizer, load_model, quiet, read_config, resolve, tokenizer_of
from brimful.units import NOTHING

if TYPE_CHECKING:
    import torch

    from brimful.memory.forward import Forward

MAX_ROWS = {"cpu": 64}
"""Prompts per batch, by device: a CPU gains nothing from more. Others use `forward.MAX_ROWS`."""
PROBE_TOKENS = 8
"""New tokens of a probe. Memory grows linearly with them, and each takes a forward pass."""
PROBE_SOURCE = 256
"""Prompt tokens of a probe."""
INCOMPLETE_CHARACTER = "\ufffd"
"""What the first bytes of a character decode to."""
HELP = (
    "Each line is one question; the model does not remember earlier ones. /quit or Ctrl-D ends, Ctrl-C stops an answer."
)
QUIT = ("/quit", "/exit")


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
    """A model in eval mode and its tokenizer. `autocast` opens the context that forward passes run in."""

    def __init__(
        self,
        model: Any,
        tokenizer: ModelTokenizer,
        options: GenerateOptions,
        *,
        device: "torch.device",
        autocast: Callable[[], AbstractContextManager[Any]] = nullcontext,
    ) -> None:
        self.model, self.tokenizer, self.options, self.device = model, tokenizer, options, device
        self._autocast = autocast
        self._start_id = _start_id(model)

    def answers(
        self, prompts: Sequence[Sequence[int]], forward: "Forward", progress: Callable[[str], object] = lambda _: None
    ) -> list[list[int]]:
        """The tokens of an answer to each prompt. `forward` was made for `dummy` and keeps its memory model."""
        new, answers = self.options.max_new_tokens, dict[int, list[int]]()
        if prompts and forward.model is None:
            forward.fit((min(PROBE_SOURCE, max(map(len, prompts))), min(PROBE_TOKENS, new)))
        shapes = [(len(prompt), new) for prompt in prompts]
        for rows, batch in forward.run_batches(shapes, lambda rows: self.answer_batch([prompts[row] for row in rows])):
            answers.update(zip(rows, batch, strict=True))
            progress(f"answered {len(answers):,} of {len(prompts):,} prompts")
        return [answers[row] for row in range(len(prompts))]

    def answer_batch(self, prompts: Sequence[Sequence[int]]) -> list[list[int]]:
        """The tokens of an answer to each prompt, generated together."""
        import torch

        ids = torch.full((len(prompts), max(map(len, prompts))), self.tokenizer.pad_id)
        mask = torch.zeros_like(ids)
        for row, prompt in enumerate(prompts):
            ids[row, : len(prompt)] = torch.tensor([int(token) for token in prompt])
            mask[row, : len(prompt)] = 1
        output = self._generate(ids.to(self.device), mask.to(self.device), self.options.max_new_tokens)
        return [_before_eos(tokens[1:], self.tokenizer.eos_id) for tokens in output.tolist()]  # [0] is the start id

    def dummy(self, rows: int, shape: Shape) -> None:
        """Generate exactly `shape[1]` tokens for random prompts of `shape[0]` tokens, to measure memory."""
        import torch

        source, new = shape
        ids = torch.randint(0, self.model.config.vocab_size, (rows, source), device=self.device)
        self._generate(ids, torch.ones_like(ids), new, min_new=new)

    def stream(self, prompt: Sequence[int]) -> Iterator[str]:
        """One answer in pieces of whole characters. Beam search yields a single piece."""
        if self.options.beams > 1:
            yield self.tokenizer.decode(self.answer_batch([prompt])[0])
            return
        shown, ids = "", list[int]()
        for token in self._tokens(prompt):
            ids.append(token)
            text = self.tokenizer.decode(ids)
            if not text.endswith(INCOMPLETE_CHARACTER):
                yield text[len(shown) :]
                shown = text
        if rest := self.tokenizer.decode(ids)[len(shown) :]:
            yield rest

    def _generate(self, ids: "torch.Tensor", mask: "torch.Tensor", new: int, min_new: int | None = None) -> Any:
        import torch
        from transformers import GenerationConfig

        options = self.options
        sampling = {"temperature": options.temperature, "top_p": options.top_p, "top_k": 0} if options.temperature else {}  # fmt: skip
        config = GenerationConfig(
            max_new_tokens=new, min_new_tokens=min_new, num_beams=options.beams, do_sample=bool(options.temperature),
            repetition_penalty=options.repetition_penalty, use_cache=True, eos_token_id=self.tokenizer.eos_id,
            pad_token_id=self.tokenizer.pad_id, decoder_start_token_id=self._start_id, **sampling,
        )  # fmt: skip
        if options.temperature:
            torch.manual_seed(options.seed)
        with torch.no_grad(), self._autocast(), quiet():
            return self.model.generate(input_ids=ids, attention_mask=mask, generation_config=config)

    def _tokens(self, prompt: Sequence[int]) -> Iterator[int]:
        """The answer token by token, up to the eos. Without sampling it is the answer of `generate`."""
        import torch

        ids = torch.tensor([[int(token) for token in prompt]], device=self.device)
        mask, rng = torch.ones_like(ids), torch.Generator().manual_seed(self.options.seed)
        decoded, cache = torch.full((1, 1), self._start_id, device=self.device), None
        with torch.no_grad(), self._autocast():
            encoded = self.model.get_encoder()(input_ids=ids, attention_mask=mask)
        for _ in range(self.options.max_new_tokens):
            with torch.no_grad(), self._autocast():
                output = self.model(
                    encoder_outputs=encoded, attention_mask=mask, decoder_input_ids=decoded[:, -1:],
                    past_key_values=cache, use_cache=True,
                )  # fmt: skip
            token, cache = self._choose(decoded, output.logits[:, -1].float(), rng), output.past_key_values
            if token == self.tokenizer.eos_id:
                return
            decoded = torch.cat([decoded, torch.full((1, 1), token, device=self.device)], dim=1)
            yield token

    def _choose(self, decoded: "torch.Tensor", scores: "torch.Tensor", rng: "torch.Generator") -> int:
        from transformers import RepetitionPenaltyLogitsProcessor, TemperatureLogitsWarper, TopPLogitsWarper

        options = self.options
        if options.repetition_penalty != 1:
            scores = RepetitionPenaltyLogitsProcessor(options.repetition_penalty)(decoded, scores)
        if not options.temperature:
            return int(scores.argmax())
        scores = TemperatureLogitsWarper(options.temperature)(decoded, scores)
        if options.top_p < 1:
            scores = TopPLogitsWarper(options.top_p)(decoded, scores)
        return int(scores.softmax(-1).cpu().multinomial(1, generator=rng))


def max_rows(device: "torch.device") -> int:
    """Prompts worth answering in one batch."""
    from brimful.memory import forward

    return MAX_ROWS.get(device.type, forward.MAX_ROWS)


def _start_id(model: Any) -> int:
    """The token that decoding starts with: pad for T5, eos for BART, bos for others."""
    for config in (model.generation_config, model.config):
        for name in ("decoder_start_token_id", "bos_token_id"):
            if isinstance(token := getattr(config, name, None), int):
                return token
    raise BadModel("the model's config has no decoder_start_token_id. Try: add it to config.json.")


def _before_eos(tokens: list[int], eos_id: int) -> list[int]:
    return tokens[: tokens.index(eos_id)] if eos_id in tokens else tokens


@dataclass(frozen=True, slots=True, kw_only=True)
class Reply:
    """A question, its answer and the seconds that took."""

    prompt: str
    response: str
    seconds: float

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


class Chat:
    """A model that answers single questions. It was trained on those, so earlier questions are not passed on."""

    def __init__(
        self, model: str | Path, options: GenerateOptions, *, device: "torch.device", autocast: "torch.dtype | None" = None
    ) -> None:  # fmt: skip
        from brimful.memory.context import forward_context

        self.folder, self.device = resolve(model), device
        config = read_config(self.folder)
        self.max_question_tokens: int | None = getattr(config, "max_position_embeddings", None)
        self.generator = Generator(
            load_model(self.folder, device),
            tokenizer_of(self.folder, config),
            options,
            device=device,
            autocast=lambda: forward_context(device, autocast),
        )

    def ask(self, question: str) -> Iterator[str]:
        """The answer in pieces of whole characters."""
        from brimful.memory.oom import is_oom

        text = question.encode("utf-8", "replace").decode()  # a terminal may pass on bytes that are not text
        ids, limit = self.generator.tokenizer.encode(text), self.max_question_tokens
        if limit is not None and len(ids) > limit:
            raise BadOption(
                f"the question has {len(ids):,} tokens, but the model reads {limit:,} at most. Try: a shorter question."
            )
        try:
            yield from self.generator.stream(ids)
        except Exception as error:
            if not is_oom(error):
                raise
            raise DoesNotFit(
                f"out of memory while answering a question of {len(ids):,} tokens. "
                "Try: a shorter question, or a lower max_new_tokens=.",
                needed_bytes=0,
            ) from None

    def reply(self, question: str, write: Callable[[str], object] = lambda _: None) -> Reply:
        """The whole answer. `write` is called with each piece of it as it comes."""
        started, pieces = time.perf_counter(), list[str]()
        for piece in self.ask(question):
            pieces.append(piece)
            write(piece)
        return Reply(prompt=question, response="".join(pieces), seconds=time.perf_counter() - started)


def talk(chat: Chat, read: Callable[[], str], write: Callable[[str], object]) -> None:
    """Answer questions from `read` until it raises EOFError or returns /quit. A failed question does not end it."""
    while True:
        try:
            line = read().strip()
        except EOFError:
            return
        if line in QUIT:
            return
        if line == "/help":
            write(f"{HELP}\n")
        elif line:
            try:
                reply = chat.reply(line, write)
                write("\n" if reply.response.strip() else f"{NOTHING}\n")
            except KeyboardInterrupt:
                write(" …\n")
            except UserError as error:
                write(f"({error})\n")
