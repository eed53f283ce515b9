"""RUN/model and RUN/best, which lead to the newest and to the best checkpoint's model."""

from collections.abc import Callable
from pathlib import Path

from brimful.train.checkpoint import point
from brimful.train.folder import RunFolder
from brimful.train.loop import Hook, Loop


class Links(Hook):
    """They follow the checkpoints."""

    def __init__(self, run: RunFolder, tell: Callable[[str], object]) -> None:
        self._run, self._tell = run, tell

    def before(self, loop: Loop) -> None:
        """A run that was killed between a save and its links."""
        if loop.newest is not None:
            self._point("model", loop.newest)
        if loop.best is not None and (best := loop.checkpoints.path(loop.best.step)).is_dir():
            self._point("best", best)

    def after_save(self, loop: Loop, folder: Path) -> None:
        self._point("model", folder)
        if loop.best is not None and loop.best.step == loop.step:
            self._point("best", folder)

    def _point(self, name: str, folder: Path) -> None:
        point(self._run.root / name, folder / "model", tell=self._tell)
