"""What a user hands to a stepper, a task or just a loss, as a task."""

from collections.abc import Callable, Sequence
from typing import Any

from torch import nn

from brimful.errors import TaskError
from brimful.task import Loss, Task
from brimful.train.options import StepOptions


class LossTask(Task):
    """A loss, and a collate if there is one, where a task is expected."""

    def __init__(self, loss: Callable[[Any, Any], Loss], options: StepOptions) -> None:
        self.name = getattr(loss, "__name__", type(loss).__name__)
        self._loss, self._collate = loss, options.collate

    def loss(self, model: nn.Module, batch: Any) -> Loss:
        return self._loss(model, batch)

    def collate(self, rows: Sequence[Any]) -> Any:
        return super().collate(rows) if self._collate is None else self._collate(rows)


def as_task(given: Any, options: StepOptions) -> tuple[Task, bool]:
    """A task, and whether a list handed to a step is always rows."""
    if isinstance(given, type) and issubclass(given, Task):
        given = given()
    if isinstance(given, Task):
        return given, True
    if isinstance(given, nn.Module):
        raise TaskError(
            f"a {type(given).__name__} is a criterion, not a loss of Brimful's: write loss(model, batch) that calls the model and "
            "returns brimful.Loss(sum=…, count=…)"
        )
    if not callable(given):
        raise TaskError(f"Stepper takes a brimful.Task or a loss(model, batch), not a {type(given).__name__}")
    owner = getattr(given, "__self__", None)
    if isinstance(owner, Task) and given.__func__ is type(owner).loss and options.collate is None:
        return owner, True  # task.loss: the task it belongs to knows how to collate, and how long rows are
    return LossTask(given, options), options.collate is not None
