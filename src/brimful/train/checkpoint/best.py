"""`best.json`: which step was best so far, by which measure. One small file, replaced whole, so it is old or new."""

import json
import math
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

from brimful.errors import InternalError
from brimful.train.checkpoint.durable import write_whole

NAME = "best.json"


@dataclass(frozen=True, slots=True, kw_only=True)
class Best:
    """The best checkpoint of a run; the training decides what better means."""

    step: int
    metric: str
    """What was compared: `loss`, `bleu`."""
    score: float
    """Higher is better: a loss counts as its negative."""

    def __post_init__(self) -> None:
        if not math.isfinite(self.score):
            raise InternalError(f"step {self.step} cannot be the best with {self.metric} {self.score}")

    def write(self, folder: Path) -> None:
        """On the disk when this returns."""
        folder.mkdir(parents=True, exist_ok=True)
        write_whole(folder / NAME, json.dumps(asdict(self)) + "\n")

    @classmethod
    def read(cls, folder: Path, tell: Callable[[str], object]) -> "Best | None":
        """None where nothing was marked yet, or where the mark is damaged, which is told."""
        try:
            content = json.loads((folder / NAME).read_bytes())
            return cls(step=int(content["step"]), metric=str(content["metric"]), score=float(content["score"]))
        except FileNotFoundError:
            return None
        except (OSError, ValueError, KeyError, TypeError, InternalError) as error:
            tell(
                f"{folder / NAME} cannot be read ({type(error).__name__}), so no step counts as the best until the next"
            )
            return None
