"""One training process: what `brimful train` starts, and what runs in each process of torchrun.

Below the parent a user's mistake is reported to it, and it prints the message once for all processes.
"""

import json
import os
import sys
from contextlib import nullcontext, redirect_stdout
from pathlib import Path

from brimful.cli.output import name_files, prefer_growing_segments, with_flags
from brimful.training.launch import has_parent, worker
from brimful.training.run import Request, RunLock


def main() -> None:
    """Below the parent."""
    with worker():
        prefer_growing_segments()
        run_request(Request(**json.loads(os.environ["BRIMFUL_REQUEST"])))
    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        # All is saved. With an open group, torch's threads end about one process in twenty with SIGABRT as it exits.
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(0)


def run_request(request: Request) -> None:
    """Train as requested, in this process."""
    from brimful.report.progress import Progress
    from brimful.tasks.load import load_task
    from brimful.training.run_log import RunLog
    from brimful.training.session import Session

    root, first = Path(request.run), os.environ.get("RANK", "0") == "0"
    assert request.data is not None

    def wording(line: str) -> str:
        return with_flags(name_files(line, request.origins, request.values))

    with redirect_stdout(sys.stderr):  # what a task prints is not part of the result
        lock = RunLock(root, flag="--run") if first and not has_parent() else nullcontext()  # a parent has locked it
        with (
            lock,
            RunLog(root, wording=wording) as run_log,
            Progress.open(sys.stderr, wording=wording) as progress,
        ):
            task = load_task(request.task, request.task_options, resumed_run=root if request.resume else None)
            Session(
                task=task,
                data=request.data,
                valid=request.train_options.valid,
                request=request,
                listeners=(progress,) if first else (),
                progress=progress.status if first else lambda phrase: None,
                run_log=run_log,
            ).train()


if __name__ == "__main__":
    main()
