"""Answers of a language model to many prompts, in batches that fit. (Requests that come one by one are `brimful.serving`'s.)

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
import inspect
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any

from brimful.errors import BadModel, BadOption
from brimful.task import Shape
from brimful.tasks.model_folder import ModelTokenizer, is_causal, quiet, text_config

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
        self.autocast = autocast
        self.start_id = None if self.causal else _start_id(model)
        """The token that decoding starts with; None for a causal model, which goes on after its prompt."""

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

    @cached_property
    def forward_arguments(self) -> frozenset[str]:
        """What the model's forward takes; models differ in it."""
        model = self.model.get_base_model() if hasattr(self.model, "get_base_model") else self.model  # within PEFT's
        return frozenset(inspect.signature(model.forward).parameters)

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
            decoder_start_token_id=self.start_id,
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
        with torch.no_grad(), self.autocast(), quiet():
            cache = {} if self.causal else {"past_key_values": self.encoder_decoder_cache()}
            return self.model.generate(
                input_ids=ids, attention_mask=mask, generation_config=config, logits_processor=processors, **cache
            )

    def encoder_decoder_cache(self) -> Any:
        """An empty cache with the decoder's layers. That of `generate` has the encoder's, and a decoder may have more."""
        from transformers import DynamicCache, EncoderDecoderCache

        return EncoderDecoderCache(DynamicCache(config=self.model.get_decoder().config), DynamicCache())

    def _sampling(self, prompts: Sequence[Sequence[int]]) -> list[Callable[..., "torch.Tensor"]]:
        """What turns scores into others whose maximum is a sample."""
        from transformers import TemperatureLogitsWarper, TopPLogitsWarper

        options = self.options
        seeds = [seed_of(options.seed, prompt) for prompt in prompts]
        top_p = [TopPLogitsWarper(float(options.top_p))] if options.top_p < 1 else []
        return [TemperatureLogitsWarper(float(options.temperature)), *top_p, OwnNoise(seeds, self.device)]

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
        return with_noise(scores, self._generators)


def with_noise(scores: "torch.Tensor", generators: "Sequence[torch.Generator]") -> "torch.Tensor":
    """Scores plus Gumbel noise, that of each row from its own generator. Everything but the numbers is done for all rows at once:
    on a GPU launches take longer than the work."""
    import torch

    noise = torch.empty_like(scores, dtype=torch.float32)
    for row, generator in zip(noise, generators, strict=True):
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
