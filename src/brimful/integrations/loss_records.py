"""What a Trainer's `compute_loss` writes on its trainer besides the loss: counters, lists of numbers, TRL's metrics.

TRL counts tokens and keeps entropy, accuracies and rewards there, one number per call, and logs their mean. Here the
exactness check calls the loss too, a failed attempt calls it again, and micro-batches have different sizes. So what does
not count is undone, and the numbers of one step become one, as if the loss had been called once.
"""

from collections import OrderedDict, defaultdict
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

from brimful.memory.snapshot import Attributes

_DATA = ("train_dataset", "eval_dataset")
_CONTAINERS = (dict, OrderedDict, defaultdict, list, set)


class LossRecords:
    """The records of one step or of one evaluation batch, over the calls of `compute_loss` that it takes."""

    def __init__(self, trainer: Any) -> None:
        self._trainer, self._start = trainer, _Saved(trainer)
        self._lengths = {key: len(numbers) for key, numbers in _trl_metrics(trainer).items()}
        self._calls: dict[tuple[str, str], list[tuple[float, float]]] = {}
        self._replaced: set[tuple[str, str]] = set()

    def restart(self) -> None:
        """As before the first call."""
        self._start.restore()
        self._calls, self._replaced = {}, set()

    @contextmanager
    def of_call(self) -> Iterator[SimpleNamespace]:
        """One call, which leaves nothing if it fails.

        Set `weight` of what this yields to what the loss was a mean over, and `weights` for names with another.
        """
        saved, before = _Saved(self._trainer), dict(_trl_metrics(self._trainer))
        lengths = {key: len(numbers) for key, numbers in before.items()}
        call = SimpleNamespace(weight=1.0, weights={})
        try:
            yield call
        except BaseException:
            saved.restore()
            raise
        for key, numbers in _trl_metrics(self._trainer).items():
            if numbers is not before.get(key, numbers):  # a total, such as num_tokens, which stays as it is
                self._replaced.add(key)
            elif len(numbers) == lengths.get(key, 0) + 1:
                weight = float(call.weights.get(key[1], call.weight))
                self._calls.setdefault(key, []).append((weight, numbers[-1]))

    def merge(self) -> None:
        """One number for each name, over all calls: the least, the greatest, or the mean by their weights."""
        metrics = _trl_metrics(self._trainer)
        for key, calls in self._calls.items():
            start = self._lengths.get(key, 0)
            if key not in self._replaced and len(metrics[key]) == start + len(calls) > start + 1:
                metrics[key][start:] = [_merged(key[1], calls)]
        for mode in {mode for mode, _ in self._calls}:
            self._merge_margins(mode)

    def _merge_margins(self, mode: str) -> None:
        """Of all rows, though a micro-batch of KTO may have had no chosen or no rejected ones."""
        names = ("rewards/chosen", "rewards/rejected", "rewards/margins")
        by_name = self._trainer._metrics[mode]
        if all((mode, name) in self._calls for name in names[:2]):
            chosen, rejected = (by_name[name][-1] for name in names[:2])
            by_name[names[2]][self._lengths.get((mode, names[2]), 0) :] = [chosen - rejected]


class _Saved:
    """The numbers and containers among a trainer's attributes."""

    def __init__(self, trainer: Any) -> None:
        self._trainer = trainer
        kept = {name: value for name, value in vars(trainer).items() if name not in _DATA}
        self._numbers = {name: value for name, value in kept.items() if isinstance(value, (int, float))}
        containers = {name: value for name, value in kept.items() if type(value) in _CONTAINERS}
        self._containers = Attributes(SimpleNamespace(**containers))

    def restore(self) -> None:
        vars(self._trainer).update(self._numbers)
        self._containers.restore()


def _trl_metrics(trainer: Any) -> dict[tuple[str, str], list[float]]:
    """`trainer._metrics["train"]["entropy"]` and so on, by mode and name."""
    metrics = vars(trainer).get("_metrics")
    if not isinstance(metrics, Mapping):
        return {}
    return {
        (str(mode), name): numbers
        for mode, by_name in metrics.items()
        if isinstance(by_name, Mapping)
        for name, numbers in by_name.items()
        if isinstance(numbers, list)
    }


def _merged(name: str, calls: list[tuple[float, float]]) -> float:
    numbers = [number for _, number in calls]
    if name.startswith(("min_", "max_")):
        return min(numbers) if name.startswith("min_") else max(numbers)
    total = sum(weight for weight, _ in calls)
    return sum(weight * number for weight, number in calls if weight) / total if total else numbers[-1]
