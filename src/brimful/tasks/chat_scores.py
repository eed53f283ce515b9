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
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from brimful.data.store import NAME, SPANS, Store, StoreMeta
from brimful.data.tokenizer.folder import TokenizerFacts
from brimful.errors import BadData, BadRun, MissingExtra
from brimful.task import Dataset
from brimful.tasks.causal_lm import TOKENS
from brimful.tasks.encoder_decoder import FIELDS
from brimful.tasks.generate import GenerateOptions, Generator, max_rows
from brimful.tasks.language import LanguageOptions, Pretrain
from brimful.tasks.model_folder import ModelTokenizer, run_of, tokenizer_of
from brimful.tasks.presets import PRESETS
from brimful.training.evaluate import EvalContext, SelectedRows

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


@dataclass(frozen=True, slots=True)
class Question:
    """One row: the tokens of a prompt and of its reference. Without a prompt it is not asked."""

    prompt: Sequence[int]
    reference: Sequence[int]

    @classmethod
    def of(cls, row: Mapping[str, Any], end_ids: Sequence[int]) -> "Question":
        if TOKENS not in row:
            return cls(row["prompt"], row["response"])
        begin, end = _last_reply(row.get(SPANS, ()))
        tokens = row[TOKENS]
        last = end - 1 if end > begin and int(tokens[end - 1]) in end_ids else end
        return cls(tokens[:begin], tokens[begin:last])


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
    return _score(generate_answers(model, rows, context, tokenizer), METRICS)


def generate_answers(
    model: Any, rows: SelectedRows, context: EvalContext, tokenizer: ModelTokenizer, options: GenerateOptions | None = None
) -> list[Answer]:
    """An answer to the prompt of each row that has one, shared among all processes, in the order of the rows.

    Without `options` it is greedy, and an answer may be as long as the longest reference.
    """
    if "questions" not in context.cache:
        end_ids = _end_ids(rows.dataset, tokenizer)
        questions = [Question.of(row, end_ids) for row in rows.read()]
        context.cache["questions"] = end_ids, {at: one for at, one in enumerate(questions) if len(one.prompt)}
    end_ids, questions = context.cache["questions"]
    if not questions:
        return []
    options = options or GenerateOptions(max_new_tokens=max_answer_tokens(questions.values()))
    if ("generator", options) not in context.cache:
        generator = Generator(
            model, tokenizer, options, device=context.device, autocast=context.forward_context, end_ids=end_ids
        )
        limit = max_rows(context.device)
        forward = context.forward(generator.dummy, what="generation", max_rows=limit, fewest_batches=True)
        context.cache["generator", options] = generator, forward
    generator, forward = context.cache["generator", options]
    places = list(questions)

    def answer(numbers: Sequence[int]) -> list[Answer]:
        mine = [questions[places[number]] for number in numbers]
        responses = generator.answers([one.prompt for one in mine], forward, context.progress)
        return [
            Answer(
                row=rows.indices[places[number]],
                prompt=tokenizer.decode_all(one.prompt) if generator.causal else tokenizer.decode(one.prompt),
                response=tokenizer.decode(ids),
                reference=tokenizer.decode(one.reference),
            )
            for number, one, ids in zip(numbers, mine, responses, strict=True)
        ]

    return context.share(len(places), answer)


def max_answer_tokens(questions: Iterable[Question]) -> int:
    """The length of the longest reference and its end: a model that has not learned to stop would go on forever."""
    return min(MAX_ANSWER_TOKENS, 1 + max(len(one.reference) for one in questions))


def has_replies(store: Store) -> bool:
    """Whether its rows say what is a reply, so that a model can be asked for one."""
    return TOKENS not in store.fields or SPANS in store.fields


def _last_reply(spans: Sequence[int]) -> tuple[int, int]:
    """Where the last trained tokens begin and end: every second run is trained."""
    edges = [0, *accumulate(map(int, spans))]
    trained = [(begin, end) for begin, end in zip(edges[1::2], edges[2::2], strict=False) if end > begin]
    return trained[-1] if trained else (0, 0)


def _end_ids(store: Dataset, tokenizer: ModelTokenizer) -> tuple[int, ...]:
    """The tokens that end a reply."""
    if TOKENS not in getattr(store, "fields", ()):
        return (tokenizer.eos_id,)
    from brimful.tasks.chat_template import ChatTemplate

    return ChatTemplate.load(tokenizer.folder).end_ids


class ChatEvaluation(Pretrain):
    """The evaluation of a saved model. `metrics` are some of `METRICS`, computed beside the loss."""

    name = "eval"

    def __init__(
        self,
        folder: Path,
        *,
        metrics: Sequence[str] = METRICS,
        beams: int = 1,
        max_new_tokens: int | None = None,
        columns: str | None = None,
        max_tokens: str | None = None,
    ) -> None:
        """Without `max_new_tokens`, answers may be as long as the longest reference."""
        self.generation = GenerateOptions(
            beams=beams, max_new_tokens=MAX_ANSWER_TOKENS if max_new_tokens is None else max_new_tokens
        )
        super().__init__(LanguageOptions(model=str(folder), columns=columns, max_tokens=max_tokens))
        self.tokenizer = tokenizer_of(folder)
        self.answers: list[Answer] = []
        """Of the last evaluation."""
        self._as_long_as_references = max_new_tokens is None
        self._metrics = tuple(metrics)
        self._truncation: dict[str, Any] = {}
        self._truncation_reason = "as requested"
        if max_tokens is None:
            lengths = None
            with suppress(BadRun):  # an unreadable run.json does not matter here
                lengths = lengths_in_training(folder)
            self.max_tokens = lengths or self.max_tokens
            self._truncation_reason = "as in the model's run" if lengths else "by default"
        if self._metrics:
            corpus_scores([""], [""], self._metrics)  # a missing package shows now, not after an hour

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
        if store.fields != FIELDS:
            raise BadData(
                f"{data} has {' and '.join(store.fields)}, but prompt and response are needed. Try: tokenize rows of both."
            )
        if store.meta.tokenizer_fingerprint != self.tokenizer.facts.fingerprint:
            raise BadData(
                f"{data} was made with another tokenizer than {self.source}. "
                f"Try: the raw files, or `brimful data tokenize --tokenizer {self.source}`."
            )
        self._truncation = {"max_tokens": store.meta.max_tokens, "truncated": store.meta.truncated}
        if self._as_long_as_references:
            self.generation = replace(self.generation, max_new_tokens=max_answer_tokens(store))
        return store

    def evaluate(self, model: Any, rows: Sequence[Any], context: Any) -> dict[str, float]:
        assert isinstance(rows, SelectedRows)
        self.answers = generate_answers(model, rows, context, self.tokenizer, self.generation)
        return _score(self.answers, self._metrics)

    def facts(self) -> dict[str, Any]:
        """How the scores came about: truncation, decoding, and sacrebleu's signatures."""
        return {
            **self._truncation,
            "max_tokens_reason": self._truncation_reason,
            "generation": asdict(self.generation) if self.answers else None,
            "signatures": signatures(self._metrics) if self._metrics else {},
        }


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
    given = LanguageOptions(max_tokens=options.get("max_tokens")).lengths
    return given or (preset.worst_shape if preset else None)


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
    return corpus_scores([one.response for one in answers], [one.reference for one in answers], names) if names else {}


def _metrics(names: Sequence[str]) -> dict[str, Any]:
    try:
        from sacrebleu.metrics import BLEU, CHRF
    except ImportError:
        raise MissingExtra("sacrebleu", "eval") from None
    makers: dict[str, Callable[[], Any]] = {"bleu": lambda: BLEU(tokenize="zh"), "chrf": CHRF}
    return {name: makers[name]() for name in names}
