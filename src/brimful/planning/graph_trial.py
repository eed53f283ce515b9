"""Whether a plan's micro-batches are replayed as a CUDA graph: recorded, compared with a plain run, timed.

A replay must give the gradients of the plain run of another batch, with the same random numbers, and must be faster. Packed
micro-batches are then all filled up to one size: the largest that simulated steps of the data need. Where launches take
longer than the kernels run, the added tokens cost nothing. The same holds of the tokens that go through the head: where not all
are trained, there is room for the largest share of simulated micro-batches, and both are timed with the share of the data. Room
for all of them was 832 tokens where 80 are trained and 128 are enough.
"""

from dataclasses import dataclass, replace
from statistics import median
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from brimful.errors import BadOption, BrimfulError, in_one_line
from brimful.memory.graphs import Graphs, signature
from brimful.memory.layout import PACKED, SMALLEST_FILL, FixedSize, PackedLayout, trained_share
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
ROWS_LOOKED_AT = 512
"""Rows of the data that are packed alone, to know how much of them is trained."""
MORE_TRAINED = 1.125
"""A micro-batch in which more is trained than there is room for is launched, and the graph recorded again after it."""
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
    launched_s: float | None = None
    """Of a micro-batch in which as much is trained as in the data, if that is not all."""


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
        fixed, trained = _fixed_size(search, plan) if plan.layout == "packed" else (None, 1.0)
        started = now()
        outcome = attempt(lambda: _try(search, plan, fixed, trained), search.target.device)
        took_s = now() - started
        if isinstance(outcome, OutOfMemory):
            raise _Refused("memory ran out with it")
        launched_s = outcome.launched_s or launched_s
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
        fixed_trained=1.0 if fixed is None else fixed.trained,
        reserved_peak_bytes=max(outcome.reserved_bytes, plan.reserved_peak_bytes or 0),
    )  # fmt: skip


def _with_choice(plan: Plan, choice: Choice) -> Plan:
    at = [one.name for one in plan.choices].index("compile") + 1
    return replace(plan, choices=(*plan.choices[:at], choice, *plan.choices[at:]))


def _check_possible(search: "Search", plan: Plan) -> None:
    if plan.layout == "padded" and not _one_shape(search, plan):
        raise _Refused("padded rows have many shapes, and a graph serves one")
    if plan.layout == "padded" and search.most % plan.micro_batch:
        raise _Refused("micro-batches differ in size, and a graph serves one")
    if search.context.scaler is not None:
        raise _Refused("fp16 checks its gradients on the host")
    if search.options.deterministic:
        raise _Refused("deterministic: it would be chosen by its time")
    _check_time(search, plan)


def _one_shape(search: "Search", plan: Plan) -> bool:
    """Whether all rows of the data are as long as planned, such as texts cut into blocks. Without data it is not known."""
    if not plan.shape:
        return True
    return search.rows is not None and bool((row_lengths(search.task, search.rows, steady=True) == plan.shape).all())


def _check_time(search: "Search", plan: Plan) -> None:
    if not search.time.allows(plan.micro_batch, plan.shape, PASSES, "a CUDA graph"):
        raise _Refused("there was no time left to try it")


def _fixed_size(search: "Search", plan: Plan) -> tuple[FixedSize, float]:
    """Room for the micro-batches of simulated steps, or for the planned one if there are no data. And the share of the tokens
    that is trained in the data."""
    if search.rows is None:
        return _filled(search, np.array(plan.tokens), plan.micro_batch), 1.0
    lengths = row_lengths(search.task, search.rows, steady=True).astype(np.int64)
    trained = _trained_tokens(search, plan)
    draw, draw_trained = (np.random.default_rng(search.options.seed) for _ in range(2))
    tokens, rows, most = np.array(plan.shape, dtype=np.int64), plan.micro_batch, 0.0
    for _ in range(SIMULATED_STEPS):
        _check_time(search, plan)  # 64 splits of 4,096 rows take 15 s
        step = lengths[draw.integers(0, len(lengths), search.most)]
        for group in plan.split([tuple(row) for row in step.tolist()]):
            tokens, rows = np.maximum(tokens, step[group].sum(axis=0)), max(rows, len(group))
            most = max(most, _share(trained[draw_trained.integers(0, len(trained), len(group))]))
    return _filled(search, tokens, rows, min(1.0, MORE_TRAINED * most)), _share(trained)


def _filled(search: "Search", tokens: Any, rows: int, trained: float = 1.0) -> FixedSize:
    filled = -(-tokens // SMALLEST_FILL) * SMALLEST_FILL
    return FixedSize(tuple(int(size) for size in filled), min(search.most, rows + rows // 8), trained)


def _trained_tokens(search: "Search", plan: Plan) -> Any:
    """Of some rows of the data, how many tokens are trained and how many there are, [row, 2]."""
    task, data = search.task, search.rows
    assert data is not None
    found = []
    for index in range(0, len(data), max(1, len(data) // ROWS_LOOKED_AT)):
        shape = tuple(task.shape(row := data[index]))
        share = trained_share(task.pack([row], shape))
        if share == 1.0:  # all are, or the batch does not say it
            return np.ones((1, 2))
        found.append((share * sum(shape), sum(shape)))
        _check_time(search, plan)
    return np.array(found)


def _share(trained: Any) -> float:
    part, whole = trained.sum(axis=0)
    return float(part / whole)


def _try(search: "Search", plan: Plan, fixed: FixedSize | None, trained: float = 1.0) -> _Trial:
    """Raises `_Refused` if the graph cannot be recorded or gives other gradients. `trained`: the share of tokens in the data."""
    context, device = search.context, search.target.device
    before, random_state = context.layout, RandomState(device)
    search.prober.show(f"record a CUDA graph of {before.show(plan.micro_batch, plan.shape)}")
    if fixed is not None:
        context.layout = PackedLayout(fixed)
    fewer = (
        plan.micro_batch if fixed is None else max(1, plan.micro_batch // 2)
    )  # a count that Python code may have kept
    graphs: Graphs | None = None
    try:
        first, other = (context.layout.example(context.task, rows, plan.shape) for rows in (plan.micro_batch, fewer))
        graphs = Graphs(signature(first), whole_step=plan.accumulation == 1)
        if signature(other) != signature(first):
            raise _Refused("micro-batches differ in the sizes of their tensors, and a graph serves one")
        start = RandomState(device)
        plain = _result(search, context.forward_backward(other, 1.0))
        context.drop_gradients()
        context.graphs = graphs
        for _ in range(2):  # plain, and recorded
            context.run_micro_batch(first, 1.0)
            context.drop_gradients()
        if graphs.problem:
            raise _Refused(graphs.problem)
        start.restore()
        replayed = _result(search, context.run_micro_batch(other, 1.0))
        if difference := _differ(plain, replayed):
            raise _Refused(difference)
        seconds, reserved_bytes = _timed(search, first), torch.cuda.memory_reserved(device)
        graphs.drop()
        context.graphs, launched_s = None, None
        if trained < 1:
            launched_s = _timed(search, PACKED.dummy(context.task, plan.micro_batch, plan.shape, trained=trained))
        return _Trial(seconds, reserved_bytes, launched_s)
    except (_Refused, torch.OutOfMemoryError):
        raise
    except Exception as error:
        raise _Refused(f"it failed: {in_one_line(error)}") from None
    finally:
        context.graphs, context.layout = None, before
        if graphs is not None:
            graphs.drop()
        context.drop_gradients()
        random_state.restore()


def _timed(search: "Search", batch: Any) -> float:
    times = []
    for _ in range(REPLAYS):
        search.context.drop_gradients()
        torch.cuda.synchronize(search.target.device)
        started = now()
        search.context.run_micro_batch(batch, 1.0)
        torch.cuda.synchronize(search.target.device)
        times.append(now() - started)
    return median(times)


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
