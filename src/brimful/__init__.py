"""Brimful trains PyTorch models as fast as the memory at hand allows, and does not die of out-of-memory.

    import brimful

    plan = brimful.plan(task, global_batch=256)     # probe, predict, verify: the fastest configuration that fits
    stepper = brimful.Stepper(model, optimizer, task, plan)
    for rows in loader:                            # a whole global batch
        result = stepper.step(rows)                # survives out-of-memory, with the same result

    brimful.train(task, "rows.parquet")            # or all of it: fit, train, evaluate, save, resume

The public names below load on first use, so that `import brimful` stays free of torch (2.5 s).
"""

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from brimful.data.loader import Loader as Loader
    from brimful.machine.machine import Machine as Machine
    from brimful.memory.ledger import simulated_memory as simulated_memory
    from brimful.planning.plan import Plan as Plan
    from brimful.planning.planner import plan as plan
    from brimful.step.stepper import Stepper as Stepper
    from brimful.task import Loss as Loss
    from brimful.task import Task as Task
    from brimful.training.session import train as train

__version__ = "0.1.0"

_HOME = {
    "Loader": "brimful.data.loader",
    "Loss": "brimful.task",
    "Machine": "brimful.machine",
    "Plan": "brimful.planning.plan",
    "Stepper": "brimful.step.stepper",
    "Task": "brimful.task",
    "plan": "brimful.planning.planner",
    "simulated_memory": "brimful.memory.ledger",
    "train": "brimful.training.session",
}

__all__ = ["Loader", "Loss", "Machine", "Plan", "Stepper", "Task", "plan", "simulated_memory", "train"]


def __getattr__(name: str) -> object:
    if name not in _HOME:
        raise AttributeError(f"module 'brimful' has no attribute {name!r}")
    return getattr(import_module(_HOME[name]), name)


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])
