"""How near answers come to their references: BLEU-4 and chrF, over all rows at once, by sacrebleu.

BLEU is counted over the corpus: matches and lengths of *all* rows are added up before anything is divided, and the brevity
penalty is capped at 1. Chinese is cut into characters (`tokenize="zh"`), other text as usual. The old scripts counted the
last batch only, with a penalty that could raise the score. Both figures go from 0 to 100.
"""

import importlib.util
from collections.abc import Callable, Sequence
from typing import Any

from brimful.errors import MissingExtra

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
