"""When a run stops because it no longer improves (`--patience N`), and what its task says is wrong with it.

With rows to evaluate on, a run stops after N evaluations in a row that were not the best so far. Without, the mean training loss
of every `eval_every` steps takes the place of an evaluation. While the task says that something is wrong (`Task.watch`), an
evaluation does not count as better: the loss of a preference model falls while its answers fall apart.

All of it is in a checkpoint (`state.Position`), so a resumed run stops at the same step. Imports no torch.
"""

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from statistics import fmean
from typing import Any

from brimful.task import Task
from brimful.units import show_count

TRAINING_LOSS = "training loss"
"""What is best in a run with patience and without rows to evaluate on."""


@dataclass(slots=True, kw_only=True)
class Patience:
    """Counts what was not better, and keeps what the task notes about its steps."""

    most: int | None = None
    """The option; None: the run never stops by itself."""
    waited: int = 0
    """Evaluations since the best one."""
    windows: bool = False
    """Whether windows of the training loss are judged, since there is nothing to evaluate on."""
    losses: list[float] = field(default_factory=list)
    """Of the steps since the last window."""
    notes: dict[str, Any] = field(default_factory=dict)
    """The state of `Task.watch`: plain values only."""
    problems: dict[str, str] = field(default_factory=dict)
    """What is wrong after the last step, by kind."""
    told: list[str] = field(default_factory=list)
    """Kinds that the run has warned of."""

    def after_step(self, task: Task, figures: Mapping[str, Any]) -> dict[str, str]:
        """What is wrong for the first time, by kind."""
        if self.windows and self.most is not None:
            self.losses.append(figures["loss"])
        self.problems = dict(task.watch(self.notes, figures))
        new = {kind: sentence for kind, sentence in self.problems.items() if kind not in self.told}
        self.told += new
        return new

    @property
    def blocked(self) -> bool:
        """Whether nothing counts as better now."""
        return self.most is not None and bool(self.problems)

    def judged(self, is_best: bool) -> None:
        self.waited = 0 if is_best else self.waited + 1

    def window_loss(self) -> float:
        """The mean loss since the last window; a new one begins. A step that was not finite makes it NaN."""
        losses, self.losses = self.losses, []
        return fmean(losses) if losses else math.nan

    @property
    def is_over(self) -> bool:
        return self.most is not None and self.waited >= self.most

    def describe(self, metric: str) -> str:
        """`3 evaluations without a better loss`."""
        return f"{show_count(self.waited, 'window' if self.windows else 'evaluation')} without a better {metric}"

    def state_dict(self) -> dict[str, Any]:
        """A copy that later steps do not change."""
        state = asdict(self)
        del state["most"], state["windows"]
        return state

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        for name, value in state.items():
            setattr(self, name, value)
