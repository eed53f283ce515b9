"""`plan`: from a task to a plan. Probe small, model the memory, search, verify with a real step, return what ran.

find the target ─► key ─► saved plan?  yes ─► done, no probe
                            no
                             ▼
model on the device ─► warm up ─► may a step be split? ─► trial without checkpointing: probes, largest, fastest
                                                                │ does not fit, or speed still rises with the rows
                                                                ▼
                                            trial with checkpointing ─► the faster of the two ─► loader ─► plan
                                                                             │ table=True
                                                                             ▼
                                                              every other lever ─► the fastest allowed

Plans are saved under a key of everything they depend on, and reused without a probe. The key is a hash of the model
built on the meta device (0.07 s for T5 base), the source of the task and of the model's classes, the options, the
device and the versions. Free memory cannot be part of it: a plan for whatever was free is reused only while about as
much is free.
"""

import copy
import gc
import hashlib
import inspect
import json
import marshal
import os
import platform
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, replace
from functools import lru_cache
from pathlib import Path
from typing import Any, Literal

import torch
from torch import nn
from torch.optim import Optimizer

import brimful
from brimful.errors import BadOption, DoesNotFit, TaskError, UserError, kind_of
from brimful.files import cache_folder
from brimful.memory.context import StepContext
from brimful.memory.meter import available_bytes
from brimful.memory.oom import OutOfMemory, attempt, empty_cache
from brimful.memory.snapshot import RandomState, TrainingState
from brimful.planning.host_memory import with_host
from brimful.planning.levers import cudnn_attention as decide_cudnn_attention
from brimful.planning.levers import with_weights
from brimful.planning.micro_batch import Search, alternatives
from brimful.planning.plan import Choice, Plan
from brimful.planning.plan_options import AutoCheckpointed, AutoOnOff, PlanOptions, Weights
from brimful.planning.plan_time import PlanTime
from brimful.planning.probe import (
    Progress,
    build_model,
    check_collate,
    make_context,
    read_rows,
    real_batches,
    row_shapes,
    task_errors,
    uneven_rows,
    with_dummy,
)
from brimful.planning.target import Target, autocast_dtype, deterministic_algorithms, find_target, idle_gpus
from brimful.show import open_view
from brimful.task import Dataset, Precision, Shape, Task, check_weights
from brimful.units import flag_bytes, show_bytes, show_count

SHRUNK, GROWN = 0.97, 1.10
"""A plan for all that was free is made again if less than this share of it is free now, or more than that."""


def plan(
    task: Task,
    *,
    data: str | os.PathLike[str] | Dataset | None = None,
    model: nn.Module | None = None,
    optimizer: Optimizer | None = None,
    global_batch: int | None = None,
    micro_batch: int | Literal["auto"] = "auto",
    memory_limit: int | str | None = None,
    host_limit: int | str | None = None,
    fill: float = 0.85,
    device: str = "auto",
    processes: int = 1,
    layout: Literal["auto", "padded", "packed"] = "auto",
    compile: AutoOnOff = "auto",
    checkpointing: AutoCheckpointed = "auto",
    precision: Precision | None = None,
    weights: Weights | None = None,
    cuda_graphs: AutoOnOff = "auto",
    cudnn_attention: AutoOnOff = "auto",
    workers: int | Literal["auto"] = "auto",
    prefetch: int | Literal["auto"] = "auto",
    pin_memory: AutoOnOff = "auto",
    lengths: Shape | None = None,
    allow_inexact: bool = False,
    deterministic: bool = False,
    plan_seconds: float | None = None,
    table: bool = False,
    cache: bool = True,
    seed: int = 0,
    quiet: bool = False,
    progress: Progress = lambda phrase: None,
) -> Plan:
    """Find the fastest configuration of a task that fits the memory, without an out-of-memory error.

    >>> import brimful, torch
    >>> class Regression(brimful.Task):
    ...     def model(self):
    ...         return torch.nn.Linear(8, 1)
    ...     def loss(self, model, row):
    ...         return model(row).square().mean()
    >>> plan = brimful.plan(
    ...     Regression(), data=list(torch.randn(100, 8)), global_batch=64, memory_limit="64MiB", device="cpu", cache=False
    ... )
    >>> plan.global_batch, plan.micro_batch * plan.accumulation >= 64
    (64, True)

    Args:
        task: What to train.
        data: A path that `task.rows` reads, or any dataset with a length and an index: a list, a
            `torch.utils.data.Dataset`, a `datasets.Dataset`. The plan is for its longest rows, and its loader is timed.
        model: A model of yours, put back bit for bit. Default: a temporary one made by the task.
        optimizer: The optimizer of that model. Default: the task's.
        global_batch: Rows per optimizer step, over all micro-batches and processes. Default: the task's value.
        micro_batch: Rows per forward and backward. A number is an upper bound that is never raised.
        memory_limit: Memory to use at most, such as "20GiB": reserved bytes on a GPU, a simulated limit on the CPU.
            Default: what is free.
        host_limit: Host RAM to use at most. Default: what this process may use.
        fill: The share of the memory limit to plan for.
        device: "cpu", "cuda", "cuda:1", "mps" or "xpu". Default: that of `model`, else the first accelerator.
        processes: Processes that share the global batch.
        layout: "padded" side by side, or "packed" end to end without padding, which is meant for GPUs and refused unless
            packed rows have the loss and gradient that they have alone. "auto" packs where the task and the GPU can.
        compile: Compiled blocks. "auto" compiles packed steps on CUDA.
        checkpointing: Gradient checkpointing: "on" for every block, "every-2" or "every-3" for every second or third, "off".
            "auto" uses it if it is faster or if nothing else fits.
        precision: The precision of autocast. Default: the task's value.
        weights: The dtype of the weights, "fp32" or "bf16". bf16 halves weights, gradients and most optimizer states, and rounds
            small updates away. Default: as the task makes them.
        cuda_graphs: Micro-batches of one size replayed as a CUDA graph. "auto" uses it where that is faster.
        cudnn_attention: cuDNN's attention on CUDA. "auto" uses it only where all rows have one shape.
        workers: Loader workers per process; 0 reads in the training process.
        prefetch: Steps that each worker reads ahead.
        pin_memory: Pinned host memory, from which a GPU copies while it computes.
        lengths: The lengths to plan for. Default: the longest in the data, else `task.worst_shape`.
        allow_inexact: Split a step even if that changes its result, because the loss looks across rows.
        deterministic: Let nothing that is timed decide: plan and split follow from the inputs, and torch's
            deterministic algorithms are used.
        plan_seconds: Time for probes, after the first step. What does not fit into it is not tried, and the plan says
            so. Default: 30 s on a GPU, 20 s on a CPU.
        table: Also try every other setting of checkpointing, layout, compilation and precision, as far as
            `plan_seconds` goes, and show a table of all that was tried (`Plan.tried`). The fastest setting that the
            other options allow is chosen; the precision is never changed.
        cache: Reuse a saved plan with the same key, and save this one.
        seed: Seed of the probe batches and of the temporary model.
        quiet: Print neither the progress nor the plan, which `print(plan)` shows as well.
        progress: Called with a phrase before each probe.

    Raises:
        DoesNotFit: The limit is too small; `needed_bytes` says what it would take.
        InexactSplit: The step must be split, and that would change its result.
        UserError: Any other request that cannot work. The two above are kinds of it.
    """
    if isinstance(task, type) and issubclass(task, Task):
        task = task()
    if not isinstance(task, Task):
        raise TaskError(f"plan() was called with {kind_of(task)}. Try: a brimful.Task.")
    if model is None and optimizer is not None:
        raise BadOption("optimizer= needs its model. Try: also pass model=.")
    if model is not None and weights is not None:
        raise BadOption(
            f"weights={weights!r} cannot be combined with model=, which is yours. Try: convert it before you plan."
        )
    if model is not None and device == "auto":
        device = str(next(model.parameters()).device)
    options = PlanOptions(
        global_batch=global_batch, micro_batch=micro_batch, memory_limit=memory_limit, host_limit=host_limit, fill=fill,
        device=device, processes=processes, layout=layout, compile=compile, checkpointing=checkpointing, precision=precision,
        weights=weights, cuda_graphs=cuda_graphs, cudnn_attention=cudnn_attention, workers=workers, prefetch=prefetch, pin_memory=pin_memory, lengths=lengths,
        allow_inexact=allow_inexact, deterministic=deterministic, plan_seconds=plan_seconds, table=table, cache=cache,
        seed=seed,
    )  # fmt: skip
    target = find_target(options)
    rows = None if data is None else read_rows(task, data)
    with open_view(quiet=quiet) as view:

        def status(phrase: str) -> None:
            view.status(phrase)
            progress(phrase)

        result = find_plan(task, options, target, rows, model=model, optimizer=optimizer, progress=status)
        result = result.with_warning(*idle_gpus(options, target, options.processes))
        view({"event": "plan", **result.to_json()})
    return result


def find_plan(
    task: Task,
    options: PlanOptions,
    target: Target,
    rows: Dataset | None,
    *,
    model: nn.Module | None = None,
    optimizer: Optimizer | None = None,
    steps: int | None = None,
    progress: Progress = lambda phrase: None,
) -> Plan:
    """The plan for a target that was found and rows that were read already; the saved one if its key matches.

    `steps`: of the run, if it is known. Compiling is weighed against them.
    """
    if options.cuda_graphs == "on" and target.device.type != "cuda":
        raise BadOption(
            f'cuda_graphs="on" is not possible on {target.name}. Try: cuda_graphs="auto", or an NVIDIA GPU.'
        )
    time = PlanTime.of(options.plan_seconds, target.device, deterministic=options.deterministic)
    if rows is not None:
        random_state = RandomState(target.device)
        check_collate(task, rows)
        random_state.restore()
    own = task
    task = copy.copy(task)
    task.use_device(target.device, options.precision)
    task = with_weights(with_dummy(task, rows, progress, steady=options.deterministic), options.weights)
    shape, sampled = planned_shape(task, rows, options, progress)
    description = model if model is not None else describe(task)
    check_weights(description)
    key = _key(task, description, shape, options, target, rows, steps)
    saved = _load(key, options, target) if options.cache else None
    if saved is not None:
        return saved
    if _weights_and_gradients(description) > target.limit_bytes:
        raise _model_too_large(task, description, target)
    result = _search(task, description, model, optimizer, target, options, shape, key, time, progress, rows, steps)
    if isinstance(result, UserError):
        raise result
    if sampled:
        lengths = Choice.of("lengths", None, "+".join(map(str, shape)), sampled, "measured")
        result = replace(result, choices=(*result.choices, lengths))
    random_state = RandomState(target.device)
    try:
        plan = with_host(result, task, rows, target, options, progress)
        uneven = uneven_rows(own, rows, steady=options.deterministic)
    finally:
        random_state.restore()  # rows may draw random numbers when they are read
    plan = plan.with_warning(uneven) if uneven else plan
    warning = _save(plan) if options.cache else None
    return plan if warning is None else plan.with_warning(warning)


def _check_attributes(task: Task) -> None:
    worst, layouts = task.worst_shape, task.chunked_loss
    if not isinstance(worst, tuple) or not all(isinstance(length, int) for length in worst):
        raise TaskError(f"task {task.name}: worst_shape is {worst!r}. Try: a tuple of whole numbers, such as (512,).")
    if isinstance(layouts, str) or not isinstance(layouts, Sequence):
        raise TaskError(f"task {task.name}: chunked_loss is {layouts!r}. Try: a tuple of layouts, such as ('packed',).")


def planned_shape(task: Task, rows: Dataset | None, options: PlanOptions, progress: Progress) -> tuple[Shape, str]:
    """The lengths to plan for: those requested, the longest in the data, or the task's worst; and how they were sampled.

    Rows that were not read may be as long as the task's worst, so a sample is planned for that, where there is one.
    """
    _check_attributes(task)
    worst, real, sampled = task.worst_shape, real_batches(task), ""
    if real is not None:
        worst, sampled = real.longest, real.sampled
    elif rows is not None and options.lengths is None:
        longest = getattr(rows, "longest", ())  # a token store knows it without looking at ten million rows
        if len(longest) == len(worst) > 0:
            worst = longest
        else:
            shapes = row_shapes(task, rows, progress, steady=options.deterministic)
            sampled = shapes.sampled and f"{shapes.sampled}, or the task's worst shape"
            bounded = sampled and len(worst) == len(shapes.longest)
            worst = tuple(map(max, shapes.longest, worst)) if bounded else shapes.longest
    if options.lengths is None:
        return worst, sampled
    if options.lengths and not worst:
        raise BadOption(
            f"lengths={tuple(options.lengths)} cannot be used, because the rows of task {task.name} have no lengths. "
            "Try: omit lengths=."
        )
    if len(options.lengths) != len(worst):
        numbers = ", ".join(map(str, worst))
        raise BadOption(
            f"lengths={tuple(options.lengths)} must have {show_count(len(worst), 'number')} for task {task.name}. "
            f"Try: lengths=({numbers}{',' * (len(worst) == 1)})."
        )
    return tuple(options.lengths), ""  # a list if they come from a file


def describe(task: Task) -> nn.Module:
    """The model without its bytes, or with them if its code does not run on the meta device."""
    with task_errors(task, "model"):
        try:
            with torch.device("meta"):
                model = task.model()
        except Exception:
            model = task.model()
    if not isinstance(model, nn.Module):
        raise TaskError(f"task {task.name}: model() returned {kind_of(model)}. Try: return a torch.nn.Module.")
    return model


def _model_too_large(task: Task, model: nn.Module, target: Target) -> DoesNotFit:
    least = _weights_and_gradients(model)
    return DoesNotFit(
        f"weights and gradients alone take {show_bytes(least)}, and the limit is {show_bytes(target.limit_bytes)} on "
        f"{target.name} ({target.limit_reason}){target.other_users}. "
        f'Try: more than memory_limit="{flag_bytes(least / target.fill)}", or a smaller model{alternatives(task, target, least)}.',
        needed_bytes=round(least / target.fill),
    )


def _weights_and_gradients(model: nn.Module) -> int:
    return sum(p.numel() * p.element_size() * (1 + p.requires_grad) for p in model.parameters())


def _search(
    task: Task, description: nn.Module, model: nn.Module | None, optimizer: Optimizer | None, target: Target,
    options: PlanOptions, shape: Shape, key: str, time: PlanTime, progress: Progress, rows: Dataset | None,
    steps: int | None,
) -> Plan | UserError:  # fmt: skip
    """Make the plan and put everything back: random state, the allocator's cap, the user's model, device memory.

    An error is returned without its frames. They would keep the model on the device for as long as a caller holds the
    error, as notebooks do.
    """
    random_state = RandomState(target.device)
    try:
        return _search_on_device(
            task, description, model, optimizer, target, options, shape, key, time, progress, rows, steps
        )
    except UserError as error:
        if isinstance(error, TaskError):  # its author wants to see where it came from
            raise
        error.__cause__ = error.__context__ = None
        return error.with_traceback(None)
    finally:
        random_state.restore()
        gc.collect()  # layers of an adapter refer to themselves: 13 of the 15 GiB of an 8B base stayed, and the run's own did not fit
        empty_cache(target.device)


def _search_on_device(
    task: Task, description: nn.Module, model: nn.Module | None, optimizer: Optimizer | None, target: Target,
    options: PlanOptions, shape: Shape, key: str, time: PlanTime, progress: Progress, rows: Dataset | None,
    steps: int | None,
) -> Plan:  # fmt: skip
    """The plan. When this has returned, nothing of it holds the temporary model."""
    torch.manual_seed(options.seed)
    autocast = autocast_dtype(options.precision_for(task), target.device)
    cudnn = decide_cudnn_attention(options.cudnn_attention, target.device, shape)[0] == "on"
    with target.enforce(simulate=False), deterministic_algorithms(options.deterministic):
        ready = model if model is not None else _build(task, description, target)
        context = make_context(task, ready, optimizer, target, autocast, cudnn_attention=cudnn)
        with _put_back(context, model):
            return Search(context, target, options, shape, time, progress, rows, steps).plan(key)


def _build(task: Task, description: nn.Module, target: Target) -> nn.Module:
    """A temporary model on the device; the description itself if it has its bytes already."""

    def build() -> nn.Module:
        if not any(p.is_meta for p in description.parameters()):
            return description.to(target.device).train()
        with task_errors(task, "model"):
            return build_model(task, target.device)

    model = attempt(build, target.device)
    if isinstance(model, OutOfMemory):
        raise _ran_out_building(task, description, target)
    return model


def _ran_out_building(task: Task, model: nn.Module, target: Target) -> DoesNotFit:
    """Of a model that the limit has room for: others have taken the device's memory since, or its code takes more on the way."""
    least, available = _weights_and_gradients(model), available_bytes(target.device)
    now = "" if available is None else f", of which {show_bytes(min(available, target.limit_bytes))} can be had now"
    return DoesNotFit(
        f"memory ran out while the model was built on {target.name}: its weights and gradients take {show_bytes(least)}, and the "
        f"limit is {show_bytes(target.limit_bytes)}{now}{target.users_now}. "
        f"Try: again when nothing else takes memory there, or a smaller model{alternatives(task, target, least)}.",
        needed_bytes=round(least / target.fill),
    )


@contextmanager
def _put_back(context: StepContext, model: nn.Module | None) -> Iterator[None]:
    """Training mode in the block. The model's own mode is restored after it."""
    if model is None:
        yield
        return
    state = TrainingState(model, context.optimizer)
    model.train()
    try:
        yield
    finally:
        state.restore()


def _key(
    task: Task, model: nn.Module, shape: Shape, options: PlanOptions, target: Target, rows: Dataset | None, steps: int | None
) -> str:  # fmt: skip
    """`model` may be on the meta device: only its description is read. Limits enter as bytes: 1GiB is 1024MiB."""
    own = {name: value for name, value in vars(task).items() if name != "dummy"}
    by_bytes = ("cache", "memory_limit", "host_limit")
    tensors = (*model.named_parameters(), *model.named_buffers())
    classes: set[type] = {type(task), *{type(part) for part in model.modules()}}
    facts = {
        "task": [task.name, task.precision, task.global_batch, re.sub(r"0x[0-9a-f]+", "", repr(sorted(own.items())))],
        "sources": sorted({source_hash(cls) for cls in classes if not cls.__module__.startswith("torch.")}),
        "model": repr(model),
        "tensors": [(name, list(tensor.shape), str(tensor.dtype), tensor.requires_grad) for name, tensor in tensors],
        "shape": shape,
        "rows": None if rows is None else [type(rows).__name__, getattr(rows, "fingerprint", len(rows))],
        "options": {name: value for name, value in asdict(options).items() if name not in by_bytes},
        "steps": steps if options.compile == "auto" and target.device.type != "cpu" else None,
        "limits": [options.memory_limit_bytes, options.host_limit_bytes],
        "device": [target.device.type, target.name],
        "versions": [brimful.__version__, torch.__version__, str(torch.version.cuda), platform.python_version()],
        "allocator": os.environ.get("PYTORCH_CUDA_ALLOC_CONF") or os.environ.get("PYTORCH_ALLOC_CONF"),
    }  # fmt: skip
    return hashlib.sha256(json.dumps(facts, sort_keys=True, default=str).encode()).hexdigest()[:32]


@lru_cache
def source_hash(cls: type) -> str:
    """A hash of the file that a class comes from, or of its compiled methods if there is no file."""
    try:
        text = Path(inspect.getfile(cls)).read_bytes()
    except (OSError, TypeError):
        codes: list[Any] = [getattr(method, "__code__", None) for method in vars(cls).values()]
        text = b"".join(marshal.dumps(code) for code in codes if code is not None)
    return hashlib.sha256(text).hexdigest()


def _load(key: str, options: PlanOptions, target: Target) -> Plan | None:
    """The plan under this key, if it can be read and the memory it counts on is free."""
    try:
        plan = Plan.load(cache_folder() / f"{key}.json")
    except (OSError, ValueError, KeyError, TypeError):
        return None
    if options.memory_limit is None and not SHRUNK <= target.limit_bytes / plan.limit_bytes <= GROWN:
        return None
    return replace(plan, cached=True)


def _save(plan: Plan) -> str | None:
    """Save the plan, or return the warning to show."""
    path = cache_folder() / f"{plan.key}.json"
    try:
        plan.save(path)
    except OSError as error:
        return f"the plan could not be saved in {path.parent} ({error.strerror or error}), so the next one probes again"
    return None
