"""Plans kept on disk under a key of everything they depend on: a hit runs no probe.

The key is a hash of the model as built on the meta device (every parameter, buffer, module and setting: 0.07 s for T5
base), of the source of the task and of the model's classes, of what was asked, of the device and of the versions. What
the key cannot hold is the memory free today: a plan made for "whatever is free" counts only while as much is free.
"""

import hashlib
import inspect
import json
import marshal
import os
import platform
import re
from collections.abc import Iterable
from dataclasses import asdict
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import nn

import brimful
from brimful.plan.options import FitOptions
from brimful.plan.plan import Plan
from brimful.plan.target import Target
from brimful.task import Shape, Task

SHRUNK, GROWN = 0.97, 1.10
"""A plan for all that was free is made anew once less than this share of it is free, or more than that."""
NOT_PART_OF_THE_KEY = ("cache", "memory_limit", "host_limit")
"""The limits enter as bytes, so that 1GiB and 1024MiB are the same plan."""


def folder(kind: str = "plans") -> Path:
    """Below `$BRIMFUL_CACHE`, else below `brimful` in the user's cache folder."""
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(os.environ.get("BRIMFUL_CACHE") or Path(base) / "brimful") / kind


def key_of(task: Task, model: nn.Module, shape: Shape, options: FitOptions, target: Target, rows: Any = None) -> str:
    """`model` may be on the meta device: only its description is read. `rows` is the data set, if there is one."""
    asked = {name: value for name, value in asdict(options).items() if name not in NOT_PART_OF_THE_KEY}
    facts = {
        "task": [
            task.name,
            task.precision,
            task.global_batch,
            re.sub(r"0x[0-9a-f]+", "", repr(sorted(vars(task).items()))),
        ],
        "sources": _sources([type(task), *{type(part) for part in model.modules()}]),
        "model": repr(model),
        "tensors": [(name, list(t.shape), str(t.dtype), t.requires_grad) for name, t in _tensors(model)],
        "shape": shape,
        "rows": None if rows is None else [type(rows).__name__, getattr(rows, "fingerprint", len(rows))],
        "asked": asked,
        "limits": [options.memory_limit_bytes, options.host_limit_bytes],
        "device": [target.device.type, target.name],
        "versions": [brimful.__version__, torch.__version__, str(torch.version.cuda), platform.python_version()],
        "allocator": os.environ.get("PYTORCH_CUDA_ALLOC_CONF") or os.environ.get("PYTORCH_ALLOC_CONF"),
    }
    return hashlib.sha256(json.dumps(facts, sort_keys=True, default=str).encode()).hexdigest()[:32]


def find(key: str, options: FitOptions, target: Target) -> Plan | None:
    """The plan under this key, if there is a readable one and the memory it counts on is free."""
    try:
        plan = Plan.load(folder() / f"{key}.json")
    except (OSError, ValueError, KeyError, TypeError):
        return None
    if options.memory_limit is None and not SHRUNK <= target.limit_bytes / plan.limit_bytes <= GROWN:
        return None
    return plan.as_cached()


def keep(plan: Plan) -> str | None:
    """Save the plan; the warning to show where that is not possible."""
    path = folder() / f"{plan.key}.json"
    try:
        plan.save(path)
    except OSError as error:
        return f"the plan could not be kept in {path.parent}: {error.strerror or error}; the next fit will probe again"
    return None


def _tensors(model: nn.Module) -> Iterable[tuple[str, torch.Tensor]]:
    yield from model.named_parameters()
    yield from model.named_buffers()


def _sources(classes: Iterable[type]) -> list[str]:
    """A hash of every file that these classes come from; of their compiled methods where there is no file."""
    return sorted({_source(cls) for cls in classes if not cls.__module__.startswith("torch.")})


@cache
def _source(cls: type) -> str:
    try:
        text = Path(inspect.getfile(cls)).read_bytes()
    except (OSError, TypeError):
        codes: list[Any] = [getattr(method, "__code__", None) for method in vars(cls).values()]
        text = b"".join(marshal.dumps(code) for code in codes if code is not None)
    return hashlib.sha256(text).hexdigest()
