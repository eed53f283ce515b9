"""One training process: what `brimful train` starts, and what runs in each process of torchrun.

Below the parent a user's mistake is reported to it, and it prints the message once for all processes.
"""

import json
import os
import sys
from contextlib import ExitStack, redirect_stdout
from pathlib import Path

from brimful.cli.output import name_files, prefer_growing_segments, show, with_flags
from brimful.training.launch import has_parent, worker
from brimful.training.run import Request, RunFolder, RunLock


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
    """Train as requested, in this process; for a dry run print the plan."""
    from brimful.report.progress import Progress
    from brimful.tasks.load import load_task
    from brimful.training.run_log import RunLog
    from brimful.training.session import Session

    root, first = Path(request.run), os.environ.get("RANK", "0") == "0"

    def wording(line: str) -> str:
        return with_flags(name_files(line, request.origins, request.values))

    assert request.data is not None
    with redirect_stdout(sys.stderr), ExitStack() as stack:  # what a task prints is not part of the result
        if first and not has_parent():  # a parent locks the folder, and removes what is left of a dry run
            if request.dry_run:
                stack.enter_context(RunFolder(root).removed_if_not_begun())
            stack.enter_context(RunLock(root, flag="--run"))
        run_log = None if request.dry_run else stack.enter_context(RunLog(root, wording=wording))
        progress = stack.enter_context(Progress.open(sys.stderr, wording=wording))
        task = load_task(request.task, request.task_options, resumed_run=root if request.resume else None)
        session = Session(
            task=task,
            data=request.data,
            valid=request.train_options.valid,
            request=request,
            listeners=(progress,) if first else (),
            progress=progress.status if first else lambda phrase: None,
            run_log=run_log,
        )
        if not request.dry_run:
            session.train()
            return
        plan = session.dry_run()
    if first:
        from brimful.report.tables import recorded_plan

        show(recorded_plan(plan, wording), plan, as_json=request.dry_run == "json")


if __name__ == "__main__":
    main()
