"""From a task to a plan: probe small, model, search the levers, verify with a real step, return only what ran.

find the target ─► key ─► cached plan?  yes ─► done, no probe
                            no
                             ▼
model on the device ─► warm up ─► may it be cut? ─► trial without checkpointing: survey, largest, fastest
                                                          │ does not fit, or speed still rises with the rows
                                                          ▼
                                                 trial with checkpointing ─► the faster of the two ─► plan
"""

import hashlib
import inspect
import json
import marshal
import os
import platform
import re
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

import brimful
from brimful.errors import BadOption, DoesNotFit, TaskError, UserError
from brimful.memory.context import StepContext
from brimful.memory.oom import OutOfMemory, attempt, empty_cache, is_oom
from brimful.memory.snapshot import RandomState, TrainingState
from brimful.planning.host_memory import with_host
from brimful.planning.levers import cudnn_attention
from brimful.planning.plan import Plan
from brimful.planning.probe import Progress, blame, make_rig
from brimful.planning.search import Trials
from brimful.planning.target import PlanOptions, Target, find_target
from brimful.task import Shape, Task
from brimful.units import flag_bytes, show_bytes

# Plans kept on disk under a key of everything they depend on: a hit runs no probe.
#
# The key is a hash of the model as built on the meta device (every parameter, buffer, module and setting: 0.07 s for T5
# base), of the source of the task and of the model's classes, of what was asked, of the device and of the versions. What
# the key cannot hold is the memory free today: a plan made for "whatever is free" counts only while as much is free.


SHRUNK, GROWN = 0.97, 1.10
"""A plan for all that was free is made anew once less than this share of it is free, or more than that."""
NOT_PART_OF_THE_KEY = ("cache", "memory_limit", "host_limit")
"""The limits enter as bytes, so that 1GiB and 1024MiB are the same plan."""


def folder(kind: str = "plans") -> Path:
    """Below `$BRIMFUL_CACHE`, else below `brimful` in the user's cache folder."""
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(os.environ.get("BRIMFUL_CACHE") or Path(base) / "brimful") / kind


def key_of(task: Task, model: nn.Module, shape: Shape, options: PlanOptions, target: Target, rows: Any = None) -> str:
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


def find(key: str, options: PlanOptions, target: Target) -> Plan | None:
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


def plan(
    task: Task,
    *,
    model: nn.Module | None = None,
    optimizer: Optimizer | None = None,
    data: str | None = None,
    progress: Progress = lambda phrase: None,
    **asked: Any,
) -> Plan:
    """The fastest configuration of this task that fits the memory at hand.

    Keywords are those of `PlanOptions`: `global_batch`, `micro_batch`, `memory_limit`, `fill`, `device`, … A model and
    optimizer of yours are used as they are and put back bit for bit; otherwise the task builds a throwaway one. `data`
    is read by `task.rows` for the longest lengths that occur in it. `progress` hears one phrase before each probe.
    """
    if isinstance(task, type) and issubclass(task, Task):
        task = task()
    if not isinstance(task, Task):
        raise TaskError(
            f"plan() takes a brimful.Task, not a {type(task).__name__}; a file's task is loaded by `brimful plan file.py:name`"
        )
    if model is None and optimizer is not None:
        raise BadOption("an optimizer without its model cannot be fitted: give model= as well")
    if model is not None:
        asked.setdefault("device", str(next(model.parameters()).device))
    options = PlanOptions.of(asked)
    target = find_target(options)
    rows = None if data is None else _rows(task, data)
    shape = _shape(task, rows, options)
    described = model if model is not None else _describe(task)
    key = key_of(task, described, shape, options, target, rows)
    found = find(key, options, target) if options.cache else None
    if found is not None:
        return found
    _check_weights(described, target)
    job = _Job(
        task=task, described=described, model=model, optimizer=optimizer, target=target, options=options, shape=shape
    )  # fmt: skip
    plan = _without_a_trace(job, lambda rig: Trials(rig, target, options, shape, progress).plan(key))
    if isinstance(plan, UserError):
        raise plan
    plan = with_host(plan, task, rows, target, options, progress)
    warning = keep(plan) if options.cache else None
    return plan if warning is None else plan.warned(warning)


def _rows(task: Task, data: str) -> Any:
    with blame(task, "rows", data):
        rows = task.rows(data)
        count = len(rows)
    if not count:
        raise TaskError(f"task {task.name}: there are no rows in {data}")
    return rows


def _shape(task: Task, rows: Any, options: PlanOptions) -> Shape:
    """The lengths to plan for: those asked for, the longest in the data, or the task's worst."""
    if not isinstance(task.worst_shape, tuple) or not all(isinstance(length, int) for length in task.worst_shape):
        raise TaskError(
            f"task {task.name}: its worst_shape is {task.worst_shape!r}; write a tuple of whole numbers, such as (512,)"
        )
    if options.lengths is not None:
        if len(options.lengths) != len(task.worst_shape):
            raise BadOption(
                f"--lengths {','.join(map(str, options.lengths))}: task {task.name} has {len(task.worst_shape)} lengths, "
                f"{task.worst_shape} at worst"
            )
        return tuple(options.lengths)  # a list where they come from a file
    if rows is None:
        return task.worst_shape
    longest = getattr(rows, "longest", None)  # a token store knows without looking at ten million rows
    if longest is not None and len(longest) == len(task.worst_shape):
        return tuple(longest)
    with blame(task, "shape"):
        shapes = [task.shape(rows[index]) for index in range(len(rows))]
    return tuple(max(lengths) for lengths in zip(*shapes, strict=True))


def _describe(task: Task) -> nn.Module:
    """The model without its bytes; with them where its code cannot be run on the meta device."""
    with blame(task, "model"):
        try:
            with torch.device("meta"):
                model = task.model()
        except Exception:
            model = task.model()
    if not isinstance(model, nn.Module):
        raise TaskError(f"task {task.name}: its model() returned a {type(model).__name__}, not a torch.nn.Module")
    return model


def _check_weights(model: nn.Module, target: Target) -> None:
    """Refuse what cannot even hold its weights and gradients before a byte of it is allocated."""
    if _weights_and_gradients(model) > target.limit_bytes:
        raise _too_large(model, target)


def _too_large(model: nn.Module, target: Target) -> DoesNotFit:
    least = _weights_and_gradients(model)
    return DoesNotFit(
        f"the weights and gradients take {show_bytes(least)}, the optimizer's state and a row come on top, and the limit is "
        f"{show_bytes(target.limit_bytes)} on {target.name} ({target.limit_reason}){target.holders}: give --memory-limit "
        f"{flag_bytes(least / target.fill)} at the very least, or a smaller model",
        needed_bytes=round(least / target.fill),
    )


def _weights_and_gradients(model: nn.Module) -> int:
    return sum(p.numel() * p.element_size() * (1 + p.requires_grad) for p in model.parameters())


@dataclass(frozen=True, kw_only=True)
class _Job:
    """What is fitted, and where."""

    task: Task
    described: nn.Module
    """The model without its bytes, or the real one."""
    model: nn.Module | None
    optimizer: Optimizer | None
    """The user's own, which are put back afterwards; None for throwaway ones."""
    target: Target
    options: PlanOptions
    shape: Shape


def _without_a_trace(job: _Job, work: Callable[[StepContext], Plan]) -> Plan | UserError:
    """Make the plan and put everything back: random state, the cap, the user's model, the device's memory.

    An error is returned without the frames it came through: they would keep the model on the device for as long as
    anybody holds the error, as every notebook does.
    """
    random_state = RandomState(job.target.device)
    torch.manual_seed(job.options.seed)
    try:
        with job.target.capped(), _rig(job) as rig:
            return work(rig)
    except UserError as error:
        if isinstance(error, TaskError):  # its author wants to see where it came from
            raise
        error.__cause__ = error.__context__ = None
        return error.with_traceback(None)
    finally:
        random_state.restore()
        empty_cache(job.target.device)


@contextmanager
def _rig(job: _Job) -> Iterator[StepContext]:
    """The user's model, put back afterwards; else a throwaway one."""
    task, target = job.task, job.target
    autocast, _ = target.autocast(job.options.precision, task.precision)
    cudnn = cudnn_attention(job.options.cudnn_attention, target.device, job.shape)[0] == "on"
    if job.model is None:
        built = attempt(lambda: _build(task, job.described, target), target.device)
        if isinstance(built, OutOfMemory):
            raise _too_large(job.described, target)
        yield make_rig(task, built, None, target, autocast, cudnn_attention=cudnn)
        return
    rig = make_rig(task, job.model, job.optimizer, target, autocast, cudnn_attention=cudnn)
    state = TrainingState(job.model, rig.optimizer)
    job.model.train()
    try:
        yield rig
    finally:
        state.restore()


def _build(task: Task, described: nn.Module, target: Target) -> nn.Module:
    if not any(p.is_meta for p in described.parameters()):
        return described.to(target.device).train()
    with blame(task, "model"):
        return build(task, target.device)


def build(task: Task, device: torch.device) -> nn.Module:
    """A model whose weights do not matter, made on the device itself where its code allows: 0.3 s instead of 3.5 for T5
    base on a card, and nothing on the host."""
    try:
        with torch.device(device):
            return task.model().to(device).train()
    except Exception as error:
        if is_oom(error):
            raise
    return task.model().to(device).train()
