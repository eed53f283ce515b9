"""Steps replayed as a CUDA graph against the same steps launched."""

import pytest
import torch

from brimful.data.loader import Loader
from brimful.planning.planner import plan as make_plan
from brimful.step.stepper import Stepper
from brimful.tasks.language import LanguageOptions, Pretrain
from tests.step.small import distance

pytestmark = pytest.mark.gpu(emulated=False)
STEPS = 6


def rows(count):
    draw = torch.Generator().manual_seed(0)
    task = Pretrain(LanguageOptions(model="chatlm-tiny"))
    lengths = torch.randint(4, 60, (count, 2), generator=draw).tolist()
    return [task.dummy_row(tuple(pair)) for pair in lengths]


def train(graphs):
    """Some steps without dropout, then one of the longest rows, which is too long for the size of the graph."""
    task, data = Pretrain(LanguageOptions(model="chatlm-tiny")), rows(400)
    plan = make_plan(
        task,
        data=data,
        global_batch=64,
        memory_limit="4GiB",
        device="cuda",
        compile="off",
        cuda_graphs=graphs,
        cache=False,
    )
    torch.manual_seed(0)
    model = task.model().cuda().eval()
    stepper = Stepper(model, torch.optim.SGD(model.parameters(), lr=0.1), task, plan)
    steps = iter(Loader(data, task, plan))
    results = [stepper.step(next(steps)) for _ in range(STEPS)]
    steps.close()
    longest = sorted(data, key=lambda row: sum(task.shape(row)))[-64:]
    return plan, stepper, [*results, stepper.step(longest)]


def test_replayed_steps_end_with_the_weights_of_launched_ones():
    _, launched, losses = train("off")
    plan, replayed, again = train("on")
    assert plan.levers.cuda_graphs == "on" and plan.fixed_tokens is not None
    assert replayed._context.graphs.pool_bytes > 0 and again[-1].micro_batches == 2
    assert [result.loss for result in again] == pytest.approx([result.loss for result in losses], rel=1e-2)
    assert distance(launched.model, replayed.model) < 1e-2


def test_memory_of_the_graph_is_given_back():
    _, stepper, _ = train("on")
    before = torch.cuda.memory_reserved()
    stepper.free_memory()
    assert stepper._context.graphs.pool_bytes == 0 and torch.cuda.memory_reserved() < before
