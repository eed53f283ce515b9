"""The chat model examined: every prompt of a fixed set answered, every answer compared with its reference.

During training (`scores`) the tokenizer is the token store's own copy, so that ids mean what they meant in the data.
`Examination` is the same for a saved model: what `brimful eval` runs, with the figures and the kind of decoding it was asked
for. A reference is what the store holds of it: cut where the run that the model lies in cut its rows, unless asked
otherwise, so that the figures are those that training told of the same rows.
"""

import importlib.util
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from brimful.data.store import NAME, Store, StoreMeta
from brimful.data.tokens import TokenizerFacts
from brimful.errors import BadData, BadRun, MissingExtra
from brimful.task import Dataset
from brimful.tasks.chatlm import SIDES, SIZES, ChatOptions, Pretrain
from brimful.tasks.generate import GenerateOptions, Generator, most_rows
from brimful.tasks.model_folder import ModelTokenizer, run_of, tokenizer_of
from brimful.training.evaluate import Chosen, Context

# How near answers come to their references: BLEU-4 and chrF, over all rows at once, by sacrebleu.
#
# BLEU is counted over the corpus: matches and lengths of *all* rows are added up before anything is divided, and the brevity
# penalty is capped at 1. Chinese is cut into characters (`tokenize="zh"`), other text as usual. The old scripts counted the
# last batch only, with a penalty that could raise the score. Both figures go from 0 to 100.


METRICS = ("bleu", "chrf")


def has_sacrebleu() -> bool:
    return importlib.util.find_spec("sacrebleu") is not None


def corpus_scores(
    answers: Sequence[str], references: Sequence[str], names: Sequence[str] = METRICS
) -> dict[str, float]:
    """The figures asked for, over all answers together."""
    return {
        name: float(metric.corpus_score(list(answers), [list(references)]).score)
        for name, metric in _metrics(names).items()
    }


def signatures(names: Sequence[str] = METRICS) -> dict[str, str]:
    """How each figure was counted, in sacrebleu's own words: needed to compare it with anybody else's."""
    made = _metrics(names)
    for metric in made.values():
        metric.corpus_score(["一"], [["一"]])  # a signature is complete once something was counted
    return {name: str(metric.get_signature()) for name, metric in made.items()}


def _metrics(names: Sequence[str]) -> dict[str, Any]:
    try:
        from sacrebleu.metrics import BLEU, CHRF
    except ImportError:
        raise MissingExtra("sacrebleu", "eval") from None
    made: dict[str, Callable[[], Any]] = {"bleu": lambda: BLEU(tokenize="zh"), "chrf": CHRF}
    return {name: made[name]() for name in names}


LONGEST_ANSWER = 256
"""Tokens generated at most, however long the references are; unless asked for."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """One row: what was asked, what the model said, what it should have said."""

    row: int
    """Its place in the data."""
    prompt: str
    response: str
    reference: str

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


def scores(model: Any, rows: Chosen, context: Context) -> dict[str, float]:
    """BLEU and chrF of a model in training; nothing, told once, where sacrebleu is not installed."""
    store = rows.dataset
    if not isinstance(store, Store):
        return {}
    if not has_sacrebleu():
        if context.kept.setdefault("sacrebleu", True):
            context.kept["sacrebleu"] = False
            context.tell("BLEU and chrF are left out: sacrebleu is not installed; pip install 'brimful[eval]'")
        return {}
    folder = store.path / "tokenizer"
    tokenizer = ModelTokenizer(folder, TokenizerFacts.read(folder))
    options = GenerateOptions(max_new_tokens=longest_answer(store))
    answers = answered(model, rows, context, tokenizer, options)
    return corpus_scores([one.response for one in answers], [one.reference for one in answers])


def longest_answer(store: Store) -> int:
    """As long as the longest reference: a model that has not learnt to end would go on for ever."""
    return min(LONGEST_ANSWER, store.longest[SIDES.index("response")])


def answered(
    model: Any, rows: Chosen, context: Context, tokenizer: ModelTokenizer, options: GenerateOptions
) -> list[Answer]:
    """An answer to each row's prompt, over all processes, in the order of the rows."""
    if ("generator", options) not in context.kept:
        generator = Generator(model, tokenizer, options, device=context.device, opened=context.opened)
        most = most_rows(context.device)
        forward = context.forward(generator.dummy, what="generation", most_rows=most, fewest=True)
        context.kept["generator", options] = generator, forward
    generator, forward = context.kept["generator", options]

    def answer(places: Sequence[int]) -> list[Answer]:
        mine = [rows[place] for place in places]
        made = generator.answers([row["prompt"] for row in mine], forward, context.progress)
        return [
            Answer(
                row=rows.places[place], prompt=tokenizer.decode(row["prompt"]), response=tokenizer.decode(ids),
                reference=tokenizer.decode(row["response"]),
            )
            for place, row, ids in zip(places, mine, made, strict=True)
        ]  # fmt: skip

    return context.shared(len(rows), answer)


def lengths_in_training(folder: Path) -> tuple[int, ...] | None:
    """Where the run of a model cut the rows it evaluated on, or else those it trained on; None for a model of no run."""
    if (run := run_of(folder)) is None:
        return None
    request = run.remembered()
    prepared, asked = request.get("prepared") or {}, request["asked"]
    for place in filter(None, (prepared.get("valid"), prepared.get("data"))):
        with suppress(BadData):
            if (run.root / place / NAME).is_file():
                return tuple(StoreMeta.read(run.root / place).max_tokens.values())
    return ChatOptions(max_tokens=asked.get("max_tokens")).lengths or SIZES[asked.get("size") or "base"].worst_shape


class Examination(Pretrain):
    """A saved model and its data, asked for particular figures."""

    name = "chatlm-eval"

    def __init__(
        self, folder: Path, *, metrics: Sequence[str] = METRICS, options: GenerateOptions | None = None,
        answers_as_long_as_references: bool = False, columns: str | None = None, max_tokens: str | None = None,
    ) -> None:  # fmt: skip
        super().__init__(options=ChatOptions(from_=str(folder), columns=columns, max_tokens=max_tokens))
        self.words = tokenizer_of(folder)
        self._cut: dict[str, Any] = {}
        self._cut_because = "as asked for"
        if max_tokens is None:
            trained = None
            with suppress(BadRun):  # a run.json that cannot be read is no reason not to measure the model
                trained = lengths_in_training(folder)
            self.max_tokens = trained or self.max_tokens
            self._cut_because = "as in the model's run" if trained else "unless --max-tokens says otherwise"
        self.answers: list[Answer] = []
        """Of the last evaluation."""
        self.generation, self._as_references = options or GenerateOptions(), answers_as_long_as_references
        self._metrics = tuple(metrics)
        if self._metrics:
            corpus_scores([""], [""], self._metrics)  # a missing package is told now, not after an hour

    def prepare(
        self, data: str, folder: Path, say: Callable[[str], object], like: Dataset | None = None, name: str = "eval"
    ) -> str:
        store = super().prepare(data, folder, say, like, name)
        if store == data:
            self._cut_because = "when they were packed"
        return store

    def rows(self, data: str) -> Store:
        """A token store packed with the model's own tokenizer."""
        store = Store.open(data)
        if store.sides != SIDES:
            raise BadData(f"{data} has {' and '.join(store.sides)}, not prompt and response; pack rows that have both")
        if store.meta.tokenizer_fingerprint != self.words.facts.fingerprint:
            raise BadData(
                f"{data} was packed with another tokenizer than that of {self.source}, so its numbers are other words; give the "
                f"raw files, or pack them with `brimful data pack --tokenizer {self.source}`"
            )
        self._cut = {"max_tokens": store.meta.max_tokens, "truncated": store.meta.truncated}
        if self._as_references:
            self.generation = replace(self.generation, max_new_tokens=longest_answer(store))
        return store

    def evaluate(self, model: Any, rows: Sequence[Any], context: Any) -> dict[str, float]:
        assert isinstance(rows, Chosen)
        self.answers = answered(model, rows, context, self.words, self.generation)
        if not self._metrics:
            return {}
        told, meant = [one.response for one in self.answers], [one.reference for one in self.answers]
        return corpus_scores(told, meant, self._metrics)

    def facts(self) -> dict[str, Any]:
        """How the figures came about: where rows were cut and how many, the decoding, and sacrebleu's signatures."""
        return {
            **self._cut,
            "max_tokens_because": self._cut_because,
            "generation": asdict(self.generation) if self.answers else None,
            "signatures": signatures(self._metrics) if self._metrics else {},
        }
