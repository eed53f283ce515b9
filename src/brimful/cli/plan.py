"""`brimful plan TASK [DATA]`: probes, predicts, verifies, and prints the plan with every reason."""

import sys
from collections.abc import Callable, Sequence
from contextlib import redirect_stdout
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory

from brimful.cli.flags import TASK_TITLE, Switch, collect, make_flags, optimizer_flag
from brimful.cli.output import naming_files, prefer_growing_segments, progress, show, with_flags
from brimful.planning.plan_options import PlanOptions
from brimful.tasks.load import check_request_options, check_spec
from brimful.tasks.option_fields import OptionField, option_fields
from brimful.training.run import pick


def plan_command(task_fields: Sequence[OptionField] = ()) -> Callable[..., None]:
    """The command, with flags for the options of one task."""
    flags_type = make_flags(
        {"Memory and speed": [*option_fields(PlanOptions), optimizer_flag()], TASK_TITLE: task_fields},
        types={"lengths": str},
    )

    def plan(
        task: str,
        data: str | None = None,
        /,
        *,
        config: Path | None = None,
        json: Switch = False,
        flags: flags_type = flags_type(),  # type: ignore[valid-type]  # noqa: B008 - frozen
    ) -> None:
        """Find the fastest configuration of a task that fits the memory, without an out-of-memory error.

        Probes a few small steps, models what each phase of a step costs, verifies with real steps at the chosen size, and
        prints every choice: what was requested, what it became and why. `brimful plan TASK --help` also lists the options
        of that task.

        Parameters
        ----------
        task
            A built-in task (pretrain, sft, dpo) or your own, written file.py:name.
        data
            Data that the task reads: the plan is for its longest rows, and its loader is timed. Raw files are tokenized for
            the time of planning. Default: the task's worst shape.
        config
            A TOML file with any options of plan and train. Flags win over it.
        json
            Print the plan as one JSON object.
        """
        check_spec(task)
        options = collect("plan", flags, config=config, task=lambda: task)
        with naming_files(options.origins, options.values):
            PlanOptions(**pick(options.generic, PlanOptions))  # mistakes come before the task's own imports
            train_options = options.optimizer
            check_request_options(task, options.task, None)
        prefer_growing_segments()
        from brimful.planning.planner import plan as make_plan
        from brimful.report.tables import plan_table
        from brimful.tasks.load import load_task
        from brimful.training.optimizer import optimizer_choice, with_optimizer
        from brimful.training.run_plan import with_sources

        with (
            redirect_stdout(sys.stderr),
            naming_files(options.origins, options.values),
        ):  # a task's prints are no result
            loaded = with_optimizer(load_task(task, options.task), train_options)
            with progress(f"plan {loaded.name}") as update, TemporaryDirectory(prefix="brimful-plan-") as folder:
                if data is not None:  # raw files are tokenized, as `train` would
                    data = loaded.prepare(data, Path(folder), update)
                result = make_plan(loaded, data=data, progress=update, **pick(options.generic, PlanOptions))
        result = replace(result, choices=(*result.choices, optimizer_choice(loaded, train_options)))
        result = with_sources(result, options.origins, options.values)
        show(plan_table(result, wording=with_flags), result.to_json(), as_json=json)

    return plan
