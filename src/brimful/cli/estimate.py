"""`brimful estimate TASK --gpu NAME`: what a step takes on a card that need not be here."""

import sys
from collections.abc import Callable, Sequence
from contextlib import redirect_stdout
from importlib.util import find_spec
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Literal

from brimful.cli.flags import TASK_TITLE, Switch, collect, make_flags, optimizer_flag
from brimful.cli.output import naming_files, progress, show, with_flags
from brimful.planning.plan_options import PlanOptions
from brimful.tasks.load import check_request_options, check_spec
from brimful.tasks.option_fields import OptionField, option_fields
from brimful.training.options import TrainOptions

SHARED = (
    "global_batch",
    "micro_batch",
    "lengths",
    "fill",
    "layout",
    "checkpointing",
    "precision",
    "weights",
    "processes",
)
"""Options of `plan` that an estimate has too."""
OPTIMIZERS = ("adamw", "adafactor", "adamw8bit")


def estimate_command(task_fields: Sequence[OptionField] = ()) -> Callable[..., None]:
    """The command, with flags for the options of one task."""
    shared = [option for option in option_fields(PlanOptions) if option.name in SHARED]
    flags_type = make_flags({"Memory": [*shared, optimizer_flag()], TASK_TITLE: task_fields}, types={"lengths": str})

    def estimate(
        task: str,
        data: str | None = None,
        /,
        *,
        gpu: str | None = None,
        memory: str | None = None,
        sharding: Literal["none", "ddp", "fsdp"] = "none",
        levers: bool = True,
        config: Path | None = None,
        json: Switch = False,
        flags: flags_type = flags_type(),  # type: ignore[valid-type]  # noqa: B008 - frozen
    ) -> None:
        """Predict what a training step takes on a GPU that need not be here, and the micro-batch that fits it.

        Your own step runs on tensors without bytes, as it would on the card, and every allocation is replayed through a model of
        torch's allocator. Nothing is measured: every figure is a prediction. `brimful estimate TASK --help` also lists the options
        of that task.

        Parameters
        ----------
        task
            A built-in task (pretrain, sft, dpo) or your own, written file.py:name.
        data
            Data that the task reads, for the lengths of its rows. Default: the task's worst shape.
        gpu
            The card, such as "RTX 4090", A100-80GB or T4; all compares every card that is known. Default: the GPU of this machine.
        memory
            GPU memory that may be used, such as 24GiB, instead of a card or of all that it has.
        sharding
            What several GPUs hold: none is Brimful's own exchange of gradients, ddp torch's, fsdp FSDP2.
        levers
            Also compare checkpointing, layouts, precisions, frozen parts, optimizers and kernels. Each takes a few seconds.
        config
            A TOML file with any options of plan and train. Flags win over it.
        json
            Print the estimate as one JSON object.
        """
        check_spec(task)
        options = collect("plan", flags, config=config, task=lambda: task)
        own = {name: options.generic[name] for name in SHARED if name in options.generic}
        with naming_files(options.origins, options.values):
            PlanOptions(**own)  # mistakes come before the task's own imports
            train_options = options.optimizer
            check_request_options(task, options.task, None)
        from brimful.estimation.cards import find_card
        from brimful.estimation.estimator import estimate as make_estimate
        from brimful.report.estimate_table import estimate_table
        from brimful.tasks.load import load_task
        from brimful.training.optimizer import with_optimizer

        find_card(gpu, memory)  # a wrong name is known before anything is loaded
        with (
            redirect_stdout(sys.stderr),
            naming_files(options.origins, options.values),
        ):  # a task's prints are no result
            plain = load_task(task, options.task)
            loaded = with_optimizer(plain, train_options)
            alternatives = {
                f"optimizer={name}": with_optimizer(plain, TrainOptions(optimizer=name))  # type: ignore[arg-type]
                for name in OPTIMIZERS
                if name != (train_options.optimizer or "adamw") and (name != "adamw8bit" or find_spec("bitsandbytes"))
            }
            with (
                progress(f"estimate {loaded.name}") as update,
                TemporaryDirectory(prefix="brimful-estimate-") as folder,
            ):
                if data is not None:  # raw files are tokenized, as `train` would
                    data = loaded.prepare(data, Path(folder), update)
                result = make_estimate(
                    loaded, data=data, gpu=gpu, memory=memory, sharding=sharding, levers=levers, alternatives=alternatives,
                    quiet=True, progress=update, **own,
                )  # fmt: skip
        show(estimate_table(result, wording=with_flags), result.to_json(), as_json=json)

    return estimate
