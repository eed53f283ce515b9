"""Answers from an encoder-decoder: many at once in batches that fit, or one that streams.

Decoding is transformers' own (`generate`): greedy unless told otherwise, with a cache of keys and values although training
configurations switch it off. Without the cache an answer of 32 tokens costs 32 passes over all tokens so far. A text ends at
the *tokenizer's* eos, passed on explicitly: the old scripts had a number in the code that was another token.

Many prompts run in batches of alike lengths. What a batch takes is modelled from a few short generations with dummies:
cache and scores grow with rows, source, new tokens and beams, and every row is counted as if its answer went on to
`max_new_tokens`. A step of the tiny model takes 2 ms for one row and 4.4 ms for 32, so the fewest batches are the fastest.
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

if TYPE_CHECKING:
    import torch

    from brimful.memory.forward import Forward

MOST_ROWS = {"cpu": 64}
"""Beyond it a CPU gains nothing; a card takes `forward.MOST_ROWS`."""
PROBED_TOKENS = 8
"""Probes generate no more than this: bytes grow on a line with the tokens, and each takes a pass."""
PROBED_SOURCE = 256
HALF_A_CHARACTER = "\ufffd"
"""What bytes decode to that are no character yet."""


@dataclass(frozen=True, kw_only=True)
class GenerateOptions:
    """How answers are made."""

    max_new_tokens: int = 256
    """An answer ends here if it does not end by itself."""
    beams: int = 1
    """Sequences that are followed at once; 1 takes the likeliest token each time."""
    temperature: float = 0.0
    """0 is no chance at all; above it tokens are drawn, the likelier ones more often the nearer it is to 0."""
    top_p: float = 1.0
    """Draw only among the likeliest tokens that together have this share."""
    repetition_penalty: float = 1.0
    """Above 1, tokens that are there already become less likely."""
    seed: int = 0
    """Of the drawing."""

    def __post_init__(self) -> None:
        wrong = [sentence for good, sentence in self._checks() if not good]
        if wrong:
            raise BadOption("; ".join(wrong))

    def _checks(self) -> Iterator[tuple[bool, str]]:
        yield self.max_new_tokens >= 1, f"--max-new-tokens {self.max_new_tokens}: give a whole number of at least 1"
        yield self.beams >= 1, f"--beams {self.beams}: give a whole number of at least 1"
        yield 0 <= self.temperature <= 100, f"--temperature {self.temperature}: give 0 for no chance, or about 0.7"
        yield 0 < self.top_p <= 1, f"--top-p {self.top_p}: give a share above 0 and up to 1, such as 0.9"
        yield (
            self.repetition_penalty > 0,
            f"--repetition-penalty {self.repetition_penalty}: give 1 for none, or about 1.2",
        )
        yield (
            self.beams == 1 or not self.temperature,
            "--beams and --temperature: beams are not drawn; give one of the two",
        )


class Generator:
    """A model and its tokenizer, ready to answer."""

    def __init__(
        self,
        model: Any,
        tokenizer: ModelTokenizer,
        options: GenerateOptions,
        *,
        device: "torch.device",
        opened: Callable[[], AbstractContextManager[Any]] = nullcontext,
    ) -> None:
        """`opened` is the autocast to run in. The model is expected in eval mode."""
        self.model, self.tokenizer, self.options, self.device = model, tokenizer, options, device
        self._opened = opened
        self._start = _start_id(model)

    def answers(
        self, prompts: Sequence[Sequence[int]], forward: "Forward", progress: Callable[[str], object] = lambda _: None
    ) -> list[list[int]]:
        """An answer's tokens for each prompt's. `forward` is over `dummy`, and keeps what it learns."""
        new, answers = self.options.max_new_tokens, dict[int, list[int]]()
        if prompts and forward.model is None:
            forward.fit((min(PROBED_SOURCE, max(map(len, prompts))), min(PROBED_TOKENS, new)))
        shapes = [(len(prompt), new) for prompt in prompts]
        for rows, made in forward.over(shapes, lambda rows: self._batch([prompts[row] for row in rows])):
            answers.update(zip(rows, made, strict=True))
            progress(f"answered {len(answers):,} of {len(prompts):,} prompts")
        return [answers[row] for row in range(len(prompts))]

    def dummy(self, rows: int, shape: Shape) -> None:
        """Generation of this size to the very end, for probing."""
        import torch

        source, new = shape
        ids = torch.randint(0, self.model.config.vocab_size, (rows, source), device=self.device)
        self._generate(ids, torch.ones_like(ids), new, at_least=new)

    def stream(self, prompt: Sequence[int]) -> Iterator[str]:
        """One answer in pieces, each a run of whole characters."""
        if self.options.beams > 1:  # which of them wins is known at the end
            yield self.tokenizer.decode(self._batch([prompt])[0])
            return
        said, ids = "", list[int]()
        for token in self._tokens(prompt):
            ids.append(token)
            text = self.tokenizer.decode(ids)
            if not text.endswith(HALF_A_CHARACTER):
                yield text[len(said) :]
                said = text
        if rest := self.tokenizer.decode(ids)[len(said) :]:
            yield rest

    def _batch(self, prompts: Sequence[Sequence[int]]) -> list[list[int]]:
        import torch

        longest = max(map(len, prompts))
        ids = torch.full((len(prompts), longest), self.tokenizer.pad_id)
        mask = torch.zeros_like(ids)
        for row, prompt in enumerate(prompts):
            ids[row, : len(prompt)] = torch.tensor([int(one) for one in prompt])
            mask[row, : len(prompt)] = 1
        made = self._generate(ids.to(self.device), mask.to(self.device), self.options.max_new_tokens)
        return [
            _until(row[1:], self.tokenizer.eos_id) for row in made.tolist()
        ]  # the first is what decoding starts with

    def _generate(self, ids: "torch.Tensor", mask: "torch.Tensor", new: int, at_least: int | None = None) -> Any:
        import torch
        from transformers import GenerationConfig

        options = self.options
        drawn = {"temperature": options.temperature, "top_p": options.top_p, "top_k": 0} if options.temperature else {}
        config = GenerationConfig(
            max_new_tokens=new, min_new_tokens=at_least, num_beams=options.beams, do_sample=bool(options.temperature),
            repetition_penalty=options.repetition_penalty, use_cache=True, eos_token_id=self.tokenizer.eos_id,
            pad_token_id=self.tokenizer.pad_id, decoder_start_token_id=self._start, **drawn,
        )  # fmt: skip
        if options.temperature:
            torch.manual_seed(options.seed)
        with torch.no_grad(), self._opened(), quiet():
            return self.model.generate(input_ids=ids, attention_mask=mask, generation_config=config)

    def _tokens(self, prompt: Sequence[int]) -> Iterator[int]:
        """Token by token up to the eos: the same as `generate` gives without chance."""
        import torch

        ids = torch.tensor([[int(one) for one in prompt]], device=self.device)
        mask, chance = torch.ones_like(ids), torch.Generator().manual_seed(self.options.seed)
        so_far, cache = torch.full((1, 1), self._start, device=self.device), None
        with torch.no_grad(), self._opened():
            encoded = self.model.get_encoder()(input_ids=ids, attention_mask=mask)
        for _ in range(self.options.max_new_tokens):
            with torch.no_grad(), self._opened():
                found = self.model(
                    encoder_outputs=encoded, attention_mask=mask, decoder_input_ids=so_far[:, -1:],
                    past_key_values=cache, use_cache=True,
                )  # fmt: skip
            token, cache = self._choose(so_far, found.logits[:, -1].float(), chance), found.past_key_values
            if token == self.tokenizer.eos_id:
                return
            so_far = torch.cat([so_far, torch.full((1, 1), token, device=self.device)], dim=1)
            yield token

    def _choose(self, so_far: "torch.Tensor", scores: "torch.Tensor", chance: "torch.Generator") -> int:
        from transformers import RepetitionPenaltyLogitsProcessor, TemperatureLogitsWarper, TopPLogitsWarper

        options = self.options
        if options.repetition_penalty != 1:
            scores = RepetitionPenaltyLogitsProcessor(options.repetition_penalty)(so_far, scores)
        if not options.temperature:
            return int(scores.argmax())
        scores = TemperatureLogitsWarper(options.temperature)(so_far, scores)
        if options.top_p < 1:
            scores = TopPLogitsWarper(options.top_p)(so_far, scores)
        return int(scores.softmax(-1).cpu().multinomial(1, generator=chance))


def most_rows(device: "torch.device") -> int:
    """Prompts that are worth answering at once."""
    from brimful.memory import forward

    return MOST_ROWS.get(device.type, forward.MOST_ROWS)


def _start_id(model: Any) -> int:
    """The token that decoding starts with: pad for T5, eos for BART, bos for others."""
    for config in (model.generation_config, model.config):
        for name in ("decoder_start_token_id", "bos_token_id"):
            if isinstance(found := getattr(config, name, None), int):
                return found
    raise BadModel("the model's config names no decoder_start_token_id, so no answer can begin; add it to config.json")


def _until(tokens: list[int], eos_id: int) -> list[int]:
    return tokens[: tokens.index(eos_id)] if eos_id in tokens else tokens


# A trained model that is talked to: one question, one answer, piece by piece.
#
# The model has only ever seen single questions, so each line stands for itself: nothing said before is remembered.


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
        from brimful.memory.context import opened

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
