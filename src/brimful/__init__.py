"""Train PyTorch models as fast as the memory at hand allows, without dying of out-of-memory.

    import brimful

    plan = brimful.plan(task, global_batch=256)  # the fastest configuration that fits, with reasons
    stepper = brimful.Stepper(model, optimizer, task, plan)
    for rows in loader:  # a whole global batch
        result = stepper.step(rows)  # survives out-of-memory errors, with the same result

    brimful.train(task, "rows.parquet")  # or all of it: plan, train, evaluate, save, resume

Public names are imported on first use, because `import torch` takes about 2.5 s.
"""

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from brimful.data.loader import Loader as Loader
    from brimful.errors import BrimfulError as BrimfulError
    from brimful.estimation.estimator import estimate as estimate
    from brimful.machine.machine import Machine as Machine
    from brimful.memory.ledger import simulated_memory as simulated_memory
    from brimful.planning.plan import Plan as Plan
    from brimful.planning.planner import plan as plan
    from brimful.report.why.log_reader import diagnose as diagnose
    from brimful.step.result import StepResult as StepResult
    from brimful.step.stepper import Stepper as Stepper
    from brimful.task import Loss as Loss
    from brimful.task import Task as Task
    from brimful.training.loop import Hook as Hook
    from brimful.training.session import train as train

__version__ = "0.2.0.dev0"

_MODULES = {
    "BrimfulError": "brimful.errors",
    "Hook": "brimful.training.loop",
    "Loader": "brimful.data.loader",
    "Loss": "brimful.task",
    "Machine": "brimful.machine.machine",
    "Plan": "brimful.planning.plan",
    "StepResult": "brimful.step.result",
    "Stepper": "brimful.step.stepper",
    "Task": "brimful.task",
    "diagnose": "brimful.report.why.log_reader",
    "estimate": "brimful.estimation.estimator",
    "plan": "brimful.planning.planner",
    "simulated_memory": "brimful.memory.ledger",
    "train": "brimful.training.session",
}

__all__ = [
    "BrimfulError",
    "Hook",
    "Loader",
    "Loss",
    "Machine",
    "Plan",
    "StepResult",
    "Stepper",
    "Task",
    "diagnose",
    "estimate",
    "plan",
    "simulated_memory",
    "train",
]


def __getattr__(name: str) -> object:
    if name not in _MODULES:
        raise AttributeError(f"module 'brimful' has no attribute {name!r}")
    if name in ("estimate", "plan", "train"):
        import_module("brimful.report.progress").show_progress()
    return getattr(import_module(_MODULES[name]), name)


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])
