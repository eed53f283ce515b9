"""`brimful plan TASK [DATA]`: probes, predicts, verifies, and prints the plan with every reason."""

import sys
from contextlib import redirect_stdout
from pathlib import Path
from typing import Annotated, Any

from cyclopts import Parameter

from brimful.cli.flags import flags_of, from_file, given, known, part, prefer_growing_segments, progress, show
from brimful.errors import BadOption
from brimful.planning.target import PlanOptions
from brimful.tasks.chatlm import ChatOptions
from brimful.training.options import TrainOptions

OPTIONS = {"Memory and speed": PlanOptions, "Model of the chat tasks": ChatOptions}
OF_TRAINING = ("random_weights", "label_smoothing", "tokenizer", "columns", "max_tokens")
Flags: Any = flags_of("Flags", OPTIONS, types={"lengths": str}, without=OF_TRAINING)


def plan(
    task: str,
    data: str | None = None,
    /,
    *,
    config: Path | None = None,
    json: Annotated[bool, Parameter(negative="")] = False,
    flags: Flags = Flags(),  # noqa: B008 - frozen
) -> None:
    """Find the fastest configuration of a task that fits the memory at hand, without one out-of-memory error.

    Probes a few small steps, models what each phase of a step costs, verifies with real steps at the chosen size, and
    prints every choice with what was asked, what it became and why.

    Parameters
    ----------
    task
        A built-in task (chatlm-pretrain, chatlm-sft) or your own, written file.py:name.
    data
        What the task's rows() reads, for the chat tasks a token store: its longest rows are fitted for, and its loader
        is timed. Without it, the task's worst shape.
    config
        A TOML file with any options of fit and train, of which fit takes its own; flags win over it.
    json
        Print the plan as one JSON object.
    """
    asked = {**from_file(config, known({**OPTIONS, "train": TrainOptions}), "fit"), **given(flags)}
    if "lengths" in asked:
        asked["lengths"] = lengths_of(asked["lengths"])
    prefer_growing_segments()
    fitting = part(asked, PlanOptions)
    PlanOptions.of(fitting)  # mistakes come before the task's own imports
    from brimful.planning.planner import plan as make_plan
    from brimful.report.tables import plan_table
    from brimful.tasks.load import load_task

    with redirect_stdout(sys.stderr):  # what the task prints is not part of the result
        found = load_task(task, options=part(asked, ChatOptions))
        with progress(f"fit {found.name}") as say:
            plan = make_plan(found, data=data, progress=say, **fitting)
    show(plan_table(plan), plan.to_json(), as_json=json)


def lengths_of(value: Any) -> tuple[int, ...]:
    """`256,256`, or the list of a TOML file."""
    parts = value if isinstance(value, (list, tuple)) else str(value).split(",")
    try:
        return tuple(int(part) for part in parts)
    except ValueError:
        raise BadOption(f"--lengths {value}: write whole numbers with commas between them, such as 256,256") from None
