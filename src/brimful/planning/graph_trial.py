"""Whether a plan's micro-batches are replayed as a CUDA graph: recorded, compared with a plain run, timed.

A replay must give the gradients of the plain run of another batch, with the same random numbers, and must be faster. Packed
micro-batches are then all filled up to one size: the largest that simulated steps of the data need. Where launches take
longer than the kernels run, the added tokens cost nothing.
"""

from dataclasses import dataclass, replace
from statistics import median
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from brimful.errors import BadOption, BrimfulError, in_one_line
from brimful.memory.graphs import Graphs, signature
from brimful.memory.layout import SMALLEST_FILL, FixedSize, PackedLayout
from brimful.memory.oom import OutOfMemory, attempt
from brimful.memory.snapshot import RandomState
from brimful.planning.plan import Choice, Plan
from brimful.planning.plan_time import now
from brimful.planning.probe import row_lengths
from brimful.task import Loss
from brimful.units import show_bytes, show_seconds

if TYPE_CHECKING:
    from brimful.planning.micro_batch import Search

SIMULATED_STEPS = 64
WORTH_IT = 0.97
"""A replay must take at most this share of the time of launching."""
DIFFERENCE = 0.02
"""Of gradients of a replay and of a plain run, in bf16."""
COMPARED, COMPARED_SIZE = 8, 2**22
"""How many parameters are compared at most, and how many elements each may have."""
REPLAYS, PASSES = 5, 8
"""Replays that are timed, and passes that the trial takes."""


class _Refused(BrimfulError):
    """The message says why there is no graph."""


@dataclass(frozen=True)
class _Trial:
    seconds: float
    reserved_bytes: int


def with_graph(search: "Search", plan: Plan, launched_s: float) -> Plan:
    """The plan with the choice `cuda_graphs`. Launching its micro-batch took `launched_s`."""
    wanted = search.options.cuda_graphs
    if search.target.device.type != "cuda":
        return plan
    fixed: FixedSize | None = None
    try:
        if wanted == "off":
            raise _Refused("as requested")
        _check_possible(search, plan)
        fixed = _fixed_size(search, plan) if plan.layout == "packed" else None
        started = now()
        outcome = attempt(lambda: _try(search, plan, fixed), search.target.device)
        took_s = now() - started
        if isinstance(outcome, OutOfMemory):
            raise _Refused("memory ran out with it")
        times = (
            f"a micro-batch takes {1000 * outcome.seconds:.0f} ms replayed and {1000 * launched_s:.0f} ms launched; "
        )
        times += f"trying it took {show_seconds(took_s)}"
        if outcome.reserved_bytes > search.target.budget_bytes:
            raise _Refused(f"it would reserve {show_bytes(outcome.reserved_bytes)}, which is over the budget")
        if wanted == "auto" and outcome.seconds > WORTH_IT * launched_s:
            raise _Refused(times)
    except _Refused as refusal:
        if wanted == "on":
            raise BadOption(f'cuda_graphs="on" is not possible: {refusal}. Try: cuda_graphs="auto".') from None
        requested = "off" if wanted == "off" else None
        return _with_choice(plan, Choice.of("cuda_graphs", requested, "off", str(refusal), "measured"))
    rows_per_s = search.most / (plan.accumulation * outcome.seconds + search.once_s)
    choice = Choice.of("cuda_graphs", "on" if wanted == "on" else None, "on", times, "measured")
    return replace(
        _with_choice(plan, choice), levers=replace(plan.levers, cuda_graphs="on"), rows_per_s=rows_per_s,
        fixed_tokens=None if fixed is None else fixed.tokens, fixed_rows=0 if fixed is None else fixed.rows,
        reserved_peak_bytes=max(outcome.reserved_bytes, plan.reserved_peak_bytes or 0),
    )  # fmt: skip


def _with_choice(plan: Plan, choice: Choice) -> Plan:
    at = [one.name for one in plan.choices].index("compile") + 1
    return replace(plan, choices=(*plan.choices[:at], choice, *plan.choices[at:]))


def _check_possible(search: "Search", plan: Plan) -> None:
    if plan.layout == "padded" and plan.shape:
        raise _Refused("padded rows have many shapes, and a graph serves one")
    if plan.layout == "padded" and search.most % plan.micro_batch:
        raise _Refused("micro-batches differ in size, and a graph serves one")
    if search.context.scaler is not None:
        raise _Refused("fp16 checks its gradients on the host")
    if search.options.deterministic:
        raise _Refused("deterministic: it would be chosen by its time")
    if not search.time.allows(plan.micro_batch, plan.shape, PASSES, "a CUDA graph"):
        raise _Refused("there was no time left to try it")


def _fixed_size(search: "Search", plan: Plan) -> FixedSize:
    """Room for the micro-batches of simulated steps, or for the planned one if there are no data."""
    tokens, rows = np.array(plan.tokens), plan.micro_batch
    if search.rows is not None:
        lengths = row_lengths(search.task, search.rows, steady=True).astype(np.int64)
        draw = np.random.default_rng(search.options.seed)
        tokens = np.zeros_like(tokens)
        for _ in range(SIMULATED_STEPS):
            step = lengths[draw.integers(0, len(lengths), search.most)]
            for group in plan.split([tuple(row) for row in step.tolist()]):
                tokens, rows = np.maximum(tokens, step[group].sum(axis=0)), max(rows, len(group))
    filled = -(-tokens // SMALLEST_FILL) * SMALLEST_FILL
    return FixedSize(tuple(int(size) for size in filled), min(search.most, rows + rows // 8))


def _try(search: "Search", plan: Plan, fixed: FixedSize | None) -> _Trial:
    """Raises `_Refused` if the graph cannot be recorded or gives other gradients."""
    context, device = search.context, search.target.device
    before, random_state = context.layout, RandomState(device)
    search.prober.show(f"record a CUDA graph of {before.show(plan.micro_batch, plan.shape)}")
    if fixed is not None:
        context.layout = PackedLayout(fixed)
    fewer = (
        plan.micro_batch if fixed is None else max(1, plan.micro_batch // 2)
    )  # a count that Python code may have kept
    first, other = (context.layout.example(context.task, rows, plan.shape) for rows in (plan.micro_batch, fewer))
    graphs = Graphs(signature(first))
    try:
        if signature(other) != signature(first):
            raise _Refused("micro-batches differ in the sizes of their tensors, and a graph serves one")
        start = RandomState(device)
        plain = _result(search, context.forward_backward(other, 1.0))
        context.drop_gradients()
        context.graphs = graphs
        for _ in range(2):  # plain, and recorded
            context.run_micro_batch(first, 1.0)
        if graphs.problem:
            raise _Refused(graphs.problem)
        context.drop_gradients()
        start.restore()
        replayed = _result(search, context.run_micro_batch(other, 1.0))
        if difference := _differ(plain, replayed):
            raise _Refused(difference)
        times = []
        for _ in range(REPLAYS):
            torch.cuda.synchronize(device)
            started = now()
            context.run_micro_batch(first, 1.0)
            torch.cuda.synchronize(device)
            times.append(now() - started)
        return _Trial(median(times), torch.cuda.memory_reserved(device))
    except (_Refused, torch.OutOfMemoryError):
        raise
    except Exception as error:
        raise _Refused(f"it failed: {in_one_line(error)}") from None
    finally:
        context.graphs, context.layout = None, before
        graphs.drop()
        context.drop_gradients()
        random_state.restore()


def _result(search: "Search", terms: dict[str, Loss]) -> tuple[float, float, list[torch.Tensor]]:
    """Loss, count and some gradients."""
    (loss,) = terms.values()
    held = [p.grad for p in search.context.params if p.grad is not None and p.numel() <= COMPARED_SIZE]
    some = held[:: max(1, len(held) // COMPARED)]
    return (
        float(loss.sum.detach()),
        float(loss.count),
        [gradient.detach().flatten().float().clone() for gradient in some],
    )


def _differ(plain: Any, replayed: Any) -> str:
    if plain[1] != replayed[1]:
        return f"a replay counts {replayed[1]:g} where the plain run counts {plain[1]:g}"
    apart = abs(plain[0] - replayed[0]) / max(abs(plain[0]), 1e-30)
    if not apart <= DIFFERENCE:
        return f"the loss of a replay differs by {apart:.2g} from that of the plain run"
    one, other = (torch.cat(result[2]) for result in (plain, replayed))
    off = float((one - other).norm() / one.norm().clamp(min=1e-30))
    return "" if off <= DIFFERENCE else f"gradients of a replay differ by {off:.2g} from those of the plain run"
