"""The scores of a language model: every prompt of a fixed set is answered and compared with its reference.

A row of an encoder-decoder is a prompt with its reference. A row of a causal model is a whole conversation: the reference is
its last reply without the token that ends it, the prompt all before that. Rows without a reply, such as whole texts, have a
loss and a perplexity only.

BLEU-4 and chrF are sacrebleu's, over the whole corpus, from 0 to 100. Chinese is split into characters (`tokenize="zh"`).
Averaging the BLEU of single batches, or scoring the last one only, gives other numbers.

`evaluate_in_training` scores a model during training, with the tokenizer copied into the token store. `ChatEvaluation`
scores a saved model, for `brimful eval`. By default it truncates rows as the model's own run did, so that its
scores match those that training printed for the same rows.
"""

import importlib.util
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from itertools import accumulate
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from brimful.data.store import NAME, SPANS, Store, StoreMeta
from brimful.data.tokenizer.folder import TokenizerFacts
from brimful.errors import BadData, BadRun, MissingExtra
from brimful.task import Dataset
from brimful.tasks.causal_lm import TOKENS
from brimful.tasks.encoder_decoder import FIELDS
from brimful.tasks.generate import GenerateOptions, Generator, max_rows
from brimful.tasks.language import LanguageOptions, Pretrain, Sft, TrainOn
from brimful.tasks.model_folder import ModelTokenizer, load_model, run_of, tokenizer_of
from brimful.tasks.presets import PRESETS
from brimful.training.evaluate import EvalContext, SelectedRows

if TYPE_CHECKING:
    import torch
    from torch import nn

METRICS = ("bleu", "chrf")
MAX_ANSWER_TOKENS = 256
"""The limit of an answer if the references are longer still, unless --max-new-tokens is given."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """One row: the prompt, the model's response and the reference."""

    row: int
    """Its number in the data."""
    prompt: str
    response: str
    reference: str

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


class Questions:
    """The prompts and references of rows, as tokens. A row without a prompt is not asked."""

    def __init__(self, rows: SelectedRows, tokenizer: ModelTokenizer) -> None:
        store = rows.dataset
        assert isinstance(store, Store)
        self.end_ids: tuple[int, ...] = (tokenizer.eos_id,)
        """The tokens that end an answer."""
        longest_answer = 0
        if store.fields == FIELDS:
            pairs = [(row["prompt"], row["response"]) for row in rows.read()]
            longest_answer = store.longest[FIELDS.index("response")]
        else:
            from brimful.tasks.chat_template import ChatTemplate

            self.end_ids = ChatTemplate.load(tokenizer.folder).end_ids
            pairs = [_last_reply(row, self.end_ids) for row in rows.read()]
            longest_answer = 1 + max((len(reference) for _, reference in pairs), default=0)
        asked = [place for place, (prompt, _) in enumerate(pairs) if len(prompt)]
        self.rows = [rows.indices[place] for place in asked]
        """Their numbers in the data."""
        self.prompts = [pairs[place][0] for place in asked]
        self.references = [pairs[place][1] for place in asked]
        self.max_answer_tokens = min(MAX_ANSWER_TOKENS, longest_answer)
        """As the longest reference with its end: a model that has not learned to stop would go on forever."""

    @classmethod
    def of(cls, rows: SelectedRows, tokenizer: ModelTokenizer, context: EvalContext) -> "Questions":
        """Read at the first evaluation and kept, since the rows stay the same."""
        if "questions" not in context.cache:
            context.cache["questions"] = cls(rows, tokenizer)
        questions: Questions = context.cache["questions"]
        return questions


def evaluate_in_training(model: Any, rows: SelectedRows, context: EvalContext) -> dict[str, float]:
    """BLEU and chrF of a model in training. Without sacrebleu there are none, with one note."""
    store = rows.dataset
    if not isinstance(store, Store) or not has_replies(store):
        return {}
    if not has_sacrebleu():
        if context.cache.setdefault("sacrebleu", True):
            context.cache["sacrebleu"] = False
            context.note("BLEU and chrF are skipped: sacrebleu is not installed. Try: pip install 'brimful[eval]'.")
        return {}
    folder = store.path / "tokenizer"
    tokenizer = ModelTokenizer(folder, TokenizerFacts.read(folder))
    questions = Questions.of(rows, tokenizer, context)
    options = GenerateOptions(max_new_tokens=questions.max_answer_tokens)
    return _score(generate_answers(model, questions, context, tokenizer, options), METRICS)


def generate_answers(
    model: Any, questions: Questions, context: EvalContext, tokenizer: ModelTokenizer, options: GenerateOptions
) -> list[Answer]:
    """An answer to each question, shared among all processes, in the order of the rows."""
    if ("generator", options) not in context.cache:
        generator = Generator(
            model,
            tokenizer,
            options,
            device=context.device,
            autocast=context.forward_context,
            end_ids=questions.end_ids,
        )
        limit = max_rows(context.device)
        forward = context.forward(generator.dummy, what="generation", max_rows=limit, fewest_batches=True)
        context.cache["generator", options] = generator, forward
    generator, forward = context.cache["generator", options]

    def answer(places: Sequence[int]) -> list[Answer]:
        prompts = [questions.prompts[place] for place in places]
        responses = generator.answers(prompts, forward, context.progress)
        return [
            Answer(
                row=questions.rows[place],
                prompt=tokenizer.decode(prompt, whole=generator.causal),
                response=tokenizer.decode(ids),
                reference=tokenizer.decode(questions.references[place]),
            )
            for place, prompt, ids in zip(places, prompts, responses, strict=True)
        ]

    return context.share(len(questions.prompts), answer)


def has_replies(store: Store) -> bool:
    """Whether its rows say what is a reply, so that a model can be asked for one. Those of whole texts do not."""
    return store.fields == FIELDS or SPANS in store.fields


def _last_reply(row: Mapping[str, Any], end_ids: Sequence[int]) -> tuple[Sequence[int], Sequence[int]]:
    """What comes before the last trained tokens of a conversation, and those without the token that ends them."""
    edges = [0, *accumulate(map(int, row[SPANS]))]  # every second run is trained
    trained = [(begin, end) for begin, end in zip(edges[1::2], edges[2::2], strict=False) if end > begin]
    begin, end = trained[-1] if trained else (0, 0)
    reference = row[TOKENS][begin:end]
    return row[TOKENS][:begin], reference[:-1] if len(reference) and int(reference[-1]) in end_ids else reference


class ChatEvaluation(Pretrain):
    """The evaluation of a saved model. `metrics` are some of `METRICS`, computed beside the loss."""

    name = "eval"
    trains_on: TrainOn = "replies"
    continues_adapters: ClassVar[bool] = False

    def __init__(
        self,
        folder: Path,
        *,
        metrics: Sequence[str] = METRICS,
        beams: int = 1,
        max_new_tokens: int | None = None,
        columns: str | None = None,
        max_tokens: str | None = None,
        chat_template: str | None = None,
    ) -> None:
        """Without `max_new_tokens`, answers may be as long as the longest reference."""
        self.generation = GenerateOptions(
            beams=beams, max_new_tokens=MAX_ANSWER_TOKENS if max_new_tokens is None else max_new_tokens
        )
        super().__init__(
            LanguageOptions(model=str(folder), columns=columns, max_tokens=max_tokens, chat_template=chat_template)
        )
        self.folder, self.tokenizer = folder, tokenizer_of(folder)
        self.dtype: torch.dtype | None = None
        """Of the weights. Default: float32."""
        self.answers: list[Answer] = []
        """Of the last evaluation."""
        self._as_long_as_references = max_new_tokens is None
        self._metrics = tuple(metrics)
        self._truncation: dict[str, Any] = {}
        self._truncation_reason = "as requested"
        self._counted = ""
        with suppress(BadRun):  # an unreadable run.json does not matter here
            self.trains_on = trained_on_in_training(folder) or self.trains_on
        if max_tokens is None:
            limits = limits_in_training(folder, len(self.max_tokens))
            self.max_tokens = limits or self.max_tokens
            self._truncation_reason = "as in the model's run" if limits else "by default"
        if self._metrics:
            corpus_scores([""], [""], self._metrics)  # a missing package shows now, not after an hour

    def initial_model(self) -> "nn.Module":
        model = load_model(self.folder, dtype=self.dtype)
        model.config.use_cache = False
        return model

    def prepare(
        self, data: str, folder: Path, progress: Callable[[str], object], like: Dataset | None = None, name: str = "eval"
    ) -> str:  # fmt: skip
        store = super().prepare(data, folder, progress, like, name)
        if store == data:
            self._truncation_reason = "when the token store was made"
        return store

    def rows(self, data: str) -> Store:
        """A token store made with the model's own tokenizer."""
        store = Store.open(data)
        if store.fields not in self.family.fields:
            raise BadData(
                f"{data} has {' and '.join(store.fields)}, but {' and '.join(self.family.fields[-1])} are needed. "
                "Try: the raw files."
            )
        if store.meta.tokenizer_fingerprint != self.tokenizer.facts.fingerprint:
            raise BadData(
                f"{data} was made with another tokenizer than {self.source}. "
                f"Try: the raw files, or `brimful data tokenize FILES --model {self.source} --output STORE`."
            )
        self._truncation = {"max_tokens": store.meta.max_tokens, "truncated": store.meta.truncated}
        trains_on = self.trains_on if has_replies(store) else "all"
        self._counted = trains_on if self.family.causal else "responses"
        return store

    def evaluate(self, model: Any, rows: Sequence[Any], context: Any) -> dict[str, float]:
        assert isinstance(rows, SelectedRows)
        questions = Questions.of(rows, self.tokenizer, context)
        if self._as_long_as_references:
            self.generation = replace(self.generation, max_new_tokens=questions.max_answer_tokens)
        self.answers = generate_answers(model, questions, context, self.tokenizer, self.generation)
        return _score(self.answers, self._metrics)

    def facts(self) -> dict[str, Any]:
        """How the scores came about: truncation, the tokens that count, decoding, and sacrebleu's signatures."""
        return {
            **self._truncation,
            "max_tokens_reason": self._truncation_reason,
            "counted": self._counted,
            "answers": len(self.answers),
            "generation": asdict(self.generation) if self.answers else None,
            "signatures": signatures(self._metrics) if self._metrics else {},
        }


def limits_in_training(folder: Path, sides: int) -> tuple[int, ...] | None:
    """`lengths_in_training` for rows of so many sides; None if its run cannot be read either."""
    lengths = None
    with suppress(BadRun):
        lengths = lengths_in_training(folder)
    if not lengths:
        return None
    return lengths * sides if len(lengths) == 1 else lengths[:sides]  # pairs have one more, for the second reply


def lengths_in_training(folder: Path) -> tuple[int, ...] | None:
    """The lengths that the model's run truncated its rows to, those for validation first; None without a run."""
    if (run := run_of(folder)) is None:
        return None
    request = run.read_request()
    for store in filter(None, (request.prepared.get("valid"), request.prepared.get("data"))):
        with suppress(BadData):
            if (run.root / store / NAME).is_file():
                return tuple(StoreMeta.read(run.root / store).max_tokens.values())
    options = request.task_options
    preset = PRESETS.get(options.get("model") or Pretrain.default_model)
    requested = LanguageOptions(max_tokens=options.get("max_tokens")).lengths
    return requested or (preset.worst_shape if preset else None)


def trained_on_in_training(folder: Path) -> TrainOn | None:
    """The tokens of conversations that the model's run trained on; None without a run."""
    if (run := run_of(folder)) is None:
        return None
    request = run.read_request()
    default: TrainOn | None = {task.name: task.trains_on for task in (Pretrain, Sft)}.get(request.task)
    return request.task_options.get("train_on") or default


def has_sacrebleu() -> bool:
    return importlib.util.find_spec("sacrebleu") is not None


def corpus_scores(answers: Sequence[str], references: Sequence[str], names: Sequence[str] = METRICS) -> dict[str, float]:  # fmt: skip
    """The metrics of these names, each over all answers together."""
    return {
        name: float(metric.corpus_score(list(answers), [list(references)]).score)
        for name, metric in _metrics(names).items()
    }


def signatures(names: Sequence[str] = METRICS) -> dict[str, str]:
    """How sacrebleu computed each metric, in its own notation: needed to compare with other published scores."""
    metrics = _metrics(names)
    for metric in metrics.values():
        metric.corpus_score(["一"], [["一"]])  # a signature is complete only after a score
    return {name: str(metric.get_signature()) for name, metric in metrics.items()}


def _score(answers: Sequence[Answer], names: Sequence[str]) -> dict[str, float]:
    if not names or not answers:
        return {}
    return corpus_scores([one.response for one in answers], [one.reference for one in answers], names)


def _metrics(names: Sequence[str]) -> dict[str, Any]:
    try:
        from sacrebleu.metrics import BLEU, CHRF
    except ImportError:
        raise MissingExtra("sacrebleu", "eval") from None
    makers: dict[str, Callable[[], Any]] = {"bleu": lambda: BLEU(tokenize="zh"), "chrf": CHRF}
    return {name: makers[name]() for name in names}
