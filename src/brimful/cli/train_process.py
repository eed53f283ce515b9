"""One training process: what `brimful train` starts, and what torchrun starts in its place.

A user's mistake is handed to the parent, which says it once for all processes; under a launcher it is said here.
"""

import json
import os
import sys
from contextlib import nullcontext, redirect_stdout
from pathlib import Path
from typing import Any

from brimful.cli.flags import part, prefer_growing_segments
from brimful.errors import UserError
from brimful.planning.plan_options import PlanOptions
from brimful.tasks.chatlm import ChatOptions
from brimful.training.launch import bind_to_parent
from brimful.training.options import TrainOptions
from brimful.training.run import RunFolder, RunLock
from brimful.training.supervise import has_parent, watch


def main() -> None:
    """Below the parent."""
    bind_to_parent()
    prefer_growing_segments()
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    with watch(rank, size) as watched:
        try:
            work(json.loads(os.environ["BRIMFUL_REQUEST"]))
        except UserError as error:
            watched.fail(error)
            raise SystemExit(2) from None


def work(request: dict[str, Any]) -> None:
    """Train as asked, on this process."""
    from brimful.report.progress import Progress
    from brimful.tasks.load import load_task
    from brimful.training.session import Session

    asked, run = request["asked"], RunFolder(Path(request["run"]))
    with redirect_stdout(sys.stderr):  # what a task prints is not part of the result
        task = load_task(request["task"], options=part(_loadable(asked, run), ChatOptions))
        first = os.environ.get("RANK", "0") == "0"
        mine = first and not has_parent()  # a parent has locked the folder itself
        with RunLock(run.root) if mine else nullcontext(), Progress.open(sys.stderr) as progress:
            Session(
                task=task,
                data=request["data"],
                run=run,
                options=TrainOptions.of(part(asked, TrainOptions)),
                fitting=PlanOptions(**part(asked, PlanOptions)),
                resume=request["resume"],
                request={key: value for key, value in request.items() if key not in ("run", "resume")},
                listeners=(progress,) if first else (),
                say=progress.status if first else lambda phrase: None,
            ).train()


def _loadable(asked: dict[str, Any], run: RunFolder) -> dict[str, Any]:
    """A resumed run whose --from is gone has its own model to tell the architecture."""
    source = asked.get("from")
    if source is None or Path(source).exists() or not (run.root / "model").exists():
        return asked
    return {**asked, "from": str(run.root / "model")}


if __name__ == "__main__":
    main()
