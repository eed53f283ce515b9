"""What is replayed instead of launched: the same gradients, and plain runs for everything that does not fit.

Recording needs a GPU. Here the work runs again where it would be replayed, on the recorded tensors.
"""

import pytest
import torch
from torch import nn

from brimful.memory.context import CountEstimate, StepContext
from brimful.memory.graphs import MOST_OOMS, MOST_WASTED, WORTH_RECORDING, Graphs, signature
from brimful.task import Loss, Task


class Line(Task):
    name = "line"

    def loss(self, model, batch):
        return Loss(sum=(model(batch["x"])[:, 0] - batch["y"]).square().sum(), count=batch["count"])


def batch(rows=4, seed=0, count=3):
    draw = torch.Generator().manual_seed(seed)
    x, y = torch.randn(rows, 3, generator=draw, dtype=torch.float64), torch.randn(rows, generator=draw)
    return {"x": x, "y": y.double(), "count": torch.tensor(count)}


class Recorder:
    """Counts what it does. Gradients after recording are those before it."""

    def __init__(self, model, error=None):
        self.model, self.error, self.recorded, self.replayed = model, error, 0, 0

    def __call__(self, work, device):
        if self.error is not None:
            raise self.error
        self.recorded += 1
        trained = [param for param in self.model.parameters() if param.grad is not None]
        before = [param.grad.clone() for param in trained]
        loss = work()
        for param, gradient in zip(trained, before, strict=True):
            param.grad.copy_(gradient)

        def replay():
            self.replayed += 1
            again = work()
            loss.sum.copy_(again.sum)

        return loss, replay, 1000


@pytest.fixture
def context():
    torch.manual_seed(0)
    model = nn.Linear(3, 1).double()
    device = torch.device("cpu")
    return StepContext(
        task=Line(), model=model, optimizer=torch.optim.SGD(model.parameters(), 0.1), device=device, autocast=None
    )


@pytest.fixture
def recorder(context):
    recorder = Recorder(context.model)
    context.graphs = Graphs(signature(batch()), recorder)
    return recorder


def gradients(context, batches, divisor=2.0):
    context.drop_gradients()
    losses = [context.run_micro_batch(one, divisor)["loss"] for one in batches]
    return [param.grad.clone() for param in context.model.parameters()], [float(loss.sum) for loss in losses]


def test_replays_give_the_gradients_of_plain_runs(context, recorder):
    batches = [batch(seed=seed) for seed in range(5)]
    replayed = gradients(context, batches), gradients(context, batches)
    assert (recorder.recorded, recorder.replayed) == (1, 9)
    context.graphs = None
    plain = gradients(context, batches)
    for one, losses in replayed:
        assert losses == plain[1]
        assert all(map(torch.equal, one, plain[0]))


class WholeStepRecorder(Recorder):
    """Replays write gradients where those of the recording are, whatever the parameters hold by then."""

    def __call__(self, work, device):
        self.recorded += 1
        loss = work()
        held = [(param, param.grad) for param in self.model.parameters()]
        for _, gradient in held:
            gradient.fill_(float("nan"))  # recording computes nothing

        def replay():
            self.replayed += 1
            for param, _ in held:
                param.grad = None
            loss.sum.copy_(work().sum)
            for param, gradient in held:
                gradient.copy_(param.grad)
                param.grad = gradient

        return loss, replay, 1000


def test_a_step_of_one_micro_batch_writes_its_gradients_without_adding(context):
    recorder = WholeStepRecorder(context.model)
    context.graphs = Graphs(signature(batch()), recorder, whole_step=True)
    steps = [[batch(seed=seed)] for seed in range(4)]
    steps[2] += [batch(seed=8), batch(seed=9)]  # split after all: what comes later is replayed and added
    replayed = [gradients(context, step) for step in steps]
    assert (recorder.recorded, recorder.replayed) == (1, 5)
    context.graphs = None
    for step, (found, losses) in zip(steps, replayed, strict=True):
        expected = gradients(context, step)
        assert losses == expected[1] and all(map(torch.equal, found, expected[0]))


def test_a_recording_that_fails_leaves_no_gradients_behind(context):
    def fail(work, device):
        work()
        raise RuntimeError("operation not permitted")

    context.graphs = Graphs(signature(batch()), fail, whole_step=True)
    found = [gradients(context, [batch(seed=seed)])[0] for seed in range(3)]
    context.graphs = None
    assert all(map(torch.equal, found[1], gradients(context, [batch(seed=1)])[0]))


def test_a_replay_counts_its_own_batch(context, recorder):
    counts = [float(context.run_micro_batch(batch(count=count), 1.0)["loss"].count) for count in (5, 6, 7, 8)]
    assert counts == [5, 6, 7, 8] and recorder.replayed == 3


def test_the_divisor_is_that_of_the_step(context, recorder):
    for count in (5, 6):
        context.run_micro_batch(batch(count=count), 1.0)
    context.drop_gradients()
    estimate = CountEstimate(8, 4)
    context.run_micro_batch(batch(count=6), estimate)
    assert estimate.value == 12.0
    replayed = [param.grad.clone() for param in context.model.parameters()]
    context.graphs = None
    assert all(map(torch.equal, replayed, gradients(context, [batch(count=6)], 12.0)[0]))


def test_another_size_runs_plainly_and_memory_is_given_back_for_it(context, recorder):
    for rows in (4, 4, 5):
        context.run_micro_batch(batch(rows), 1.0)
    assert context.graphs.pool_bytes == 0 and recorder.replayed == 1
    for _ in range(2):
        context.run_micro_batch(batch(), 1.0)
    assert recorder.recorded == 2 and context.graphs.pool_bytes == 1000


def alternate(context, replays):
    """So many replays between micro-batches of another size."""
    for _ in range(2 * MOST_WASTED):
        for _ in range(1 + replays):
            context.run_micro_batch(batch(), 1.0)
        context.run_micro_batch(batch(5), 1.0)


def test_sizes_that_alternate_are_not_recorded_again_and_again(context, recorder):
    alternate(context, WORTH_RECORDING - 1)
    assert recorder.recorded == MOST_WASTED
    assert context.graphs.problem == "micro-batches of other sizes come too often"


def test_another_size_now_and_then_is_no_reason_to_stop(context, recorder):
    alternate(context, WORTH_RECORDING)
    assert recorder.recorded == 2 * MOST_WASTED and not context.graphs.problem


def test_gradients_of_a_plain_micro_batch_are_kept(context, recorder):
    mixed = [batch(seed=0), batch(seed=1), batch(5, seed=2), batch(seed=3), batch(seed=4)]
    with_graph = gradients(context, mixed)
    context.graphs = None
    assert all(map(torch.allclose, with_graph[0], gradients(context, mixed)[0]))


def test_what_cannot_be_recorded_runs_plainly(context):
    context.graphs = Graphs(signature(batch()), Recorder(context.model, RuntimeError("operation not permitted")))
    for _ in range(3):
        context.run_micro_batch(batch(), 1.0)
    assert context.graphs.problem == "recording failed: RuntimeError: operation not permitted"


def test_after_two_errors_nothing_is_recorded_any_more(context, recorder):
    for _ in range(MOST_OOMS):
        for _ in range(2):
            context.run_micro_batch(batch(), 1.0)
        context.graphs.drop(out_of_memory=True)
    assert context.graphs.problem.startswith("memory ran out 2 times")
    for _ in range(3):
        context.run_micro_batch(batch(), 1.0)
    assert recorder.recorded == MOST_OOMS


def test_weights_frozen_or_unfrozen_meanwhile_are_recorded_anew(context, recorder):
    for _ in range(2):
        context.run_micro_batch(batch(), 1.0)
    context.model.bias.requires_grad_(False)
    context.drop_gradients()
    for seed in range(2):
        context.run_micro_batch(batch(seed=seed), 1.0)
    assert context.model.bias.grad is None
    context.model.bias.requires_grad_(True)
    unfrozen = gradients(context, [batch(seed=seed) for seed in range(3)])
    context.graphs = None
    assert all(map(torch.equal, unfrozen[0], gradients(context, [batch(seed=seed) for seed in range(3)])[0]))


def test_memory_that_runs_out_while_recording_counts(context):
    context.graphs = Graphs(signature(batch()), Recorder(context.model, torch.OutOfMemoryError("CUDA out of memory")))
    for _ in range(MOST_OOMS):
        context.run_micro_batch(batch(), 1.0)
        with pytest.raises(torch.OutOfMemoryError):
            context.run_micro_batch(batch(), 1.0)
        context.graphs.drop(out_of_memory=True)
    assert context.graphs.problem.startswith("memory ran out 2 times")
