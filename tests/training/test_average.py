"""`ema=`: the average of the weights that is evaluated and saved, and what it costs."""

import math

import pytest
import torch
from safetensors.torch import load_file
from torch import nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

import brimful
from brimful.errors import BadOption, BadRun, DoesNotFit
from brimful.planning.plan import Plan
from brimful.training import metrics
from brimful.training.checkpoint import Checkpoints
from brimful.training.events import read_events
from brimful.training.optimizer import with_optimizer
from brimful.training.options import TrainOptions
from tests.training import runs

ROWS = list(torch.randn(24, 4, generator=torch.Generator().manual_seed(0)))
DECAY = 0.9
STEPS = 6


class Regression(brimful.Task):
    """With a buffer, a frozen weight and an optimizer state."""

    global_batch = 8
    dtype = torch.float32

    def model(self):
        model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 4, bias=False)).to(self.dtype)
        model[2].requires_grad_(False)
        return model

    def loss(self, model, batch):
        return (model(batch.to(self.dtype)) - 3).float().square().mean()


@pytest.fixture(autouse=True, scope="module")
def _small_matrices():
    """The peak of the CPU takes longer to measure than these runs to train."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(metrics, "MATRIX", {"cpu": 64})
        patch.setattr(metrics, "TIMED_S", 0.001)
        yield


class Reference(brimful.Hook):
    """torch's average of the same weights."""

    def before(self, loop):
        self.average = AveragedModel(loop.stepper.model, multi_avg_fn=get_ema_multi_avg_fn(DECAY))

    def after_step(self, loop, result):
        if result.applied:
            self.average.update_parameters(loop.stepper.model)

    @property
    def weights(self):
        return {name: weight.detach() for name, weight in self.average.module.named_parameters()}


def train(folder, task=None, data=ROWS, **options):
    options = {"max_steps": STEPS, "device": "cpu", "micro_batch": 8, "cache": False, "quiet": True, "lr": 0.1,
               "schedule": "constant", "ema": DECAY, **options}  # fmt: skip
    return brimful.train(task or Regression(), data, run=folder, **options)


def saved(run, file="model/model.safetensors"):
    return load_file(Checkpoints(run / "checkpoints").newest().checkpoint.path / file)


def differ(one, other):
    return [name for name in other if not torch.equal(one[name], other[name])]


def events(run, name):
    return [event for event in read_events(run / "events.jsonl") if event["event"] == name]


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """A run that was never stopped, and torch's average of it."""
    folder, reference = tmp_path_factory.mktemp("average") / "run", Reference()
    train(folder, hooks=[reference])
    return folder, reference.weights


def test_the_saved_model_is_torchs_average(whole):
    run, average = whole
    assert not differ(saved(run), average)


def test_the_weights_themselves_are_saved_beside_it_with_the_same_buffers(whole):
    run, average = whole
    weights = saved(run, "weights.safetensors")
    assert differ(weights, average) == ["0.weight", "0.bias", "1.weight", "1.bias"]
    assert weights["1.running_mean"].equal(saved(run)["1.running_mean"])


def test_a_run_without_it_ends_with_the_same_weights(whole, tmp_path):
    train(tmp_path / "run", ema=None)
    assert not differ(saved(tmp_path / "run"), saved(whole[0], "weights.safetensors"))


def test_a_resumed_run_ends_with_the_same_bits(whole, tmp_path):
    train(tmp_path / "run", max_steps=2)
    train(tmp_path / "run", resume=True)
    for file in ("model/model.safetensors", "weights.safetensors"):
        assert not differ(saved(tmp_path / "run", file), saved(whole[0], file))


def test_a_resumed_run_may_begin_with_it(tmp_path):
    train(tmp_path / "run", max_steps=2, ema=None)
    train(tmp_path / "run", max_steps=3, resume=True)
    assert not differ(
        saved(tmp_path / "run"), saved(tmp_path / "run", "weights.safetensors")
    )  # the first update copies
    assert any("ema" in event["sentence"] for event in events(tmp_path / "run", "note"))


def test_a_resumed_run_may_end_it(whole, tmp_path):
    train(tmp_path / "run", max_steps=2)
    train(tmp_path / "run", resume=True, ema=None)
    assert not differ(saved(tmp_path / "run"), saved(whole[0], "weights.safetensors"))


class Scored(Regression):
    def evaluate(self, model, rows, context):
        return {"bias": float(model[0].bias.detach().sum())}


def test_it_is_what_is_evaluated(tmp_path):
    reference = Reference()
    train(tmp_path / "run", Scored(), valid=ROWS, eval_every=1, hooks=[reference])
    last = events(tmp_path / "run", "eval")[-1]
    model = reference.average.module.eval()
    model.load_state_dict(saved(tmp_path / "run"))  # with the buffers
    assert last["bias"] == pytest.approx(float(model[0].bias.detach().sum()), rel=1e-6)
    assert last["loss"] == pytest.approx(float((model(torch.stack(ROWS)) - 3).square().mean().detach()), rel=1e-6)


def test_evaluations_leave_no_trace(whole, tmp_path):
    train(tmp_path / "run", valid=ROWS, eval_every=2)
    assert not differ(saved(tmp_path / "run"), whole[1])


class SometimesNan(Regression):
    def loss(self, model, batch):
        return super().loss(model, batch) * torch.where(batch.isnan().any(), math.nan, 1.0)


def test_a_skipped_step_does_not_count(tmp_path):
    reference, rows = Reference(), [*ROWS[:-1], torch.full((4,), math.nan)]
    train(tmp_path / "run", SometimesNan(), rows, hooks=[reference])
    assert any(not event["applied"] for event in events(tmp_path / "run", "step"))
    assert not differ(saved(tmp_path / "run"), reference.weights)


class Half(Regression):
    dtype = torch.bfloat16


def test_weights_of_low_precision_are_averaged_in_float32(tmp_path):
    """In bfloat16 a decay of 0.999 would round every update to nothing."""
    train(tmp_path / "run", Half(), ema=0.999, max_steps=3)
    (name,) = {path.name for path in (tmp_path / "run" / "checkpoints").glob("step-*")}
    state = torch.load(tmp_path / "run" / "checkpoints" / name / "optimizer.pt")["state"]["average"]
    averages = [value for value in state.values() if isinstance(value, torch.Tensor)]
    assert {average.dtype for average in averages} == {torch.float32}
    assert any(not average.equal(average.bfloat16().float()) for average in averages)
    assert saved(tmp_path / "run")["0.weight"].dtype == torch.bfloat16


def test_low_precision_resumes_with_the_same_bits(tmp_path):
    train(tmp_path / "whole", Half())
    for steps in (3, STEPS):
        train(tmp_path / "run", Half(), max_steps=steps, resume=True)
    assert not differ(saved(tmp_path / "run"), saved(tmp_path / "whole"))


class Wide(brimful.Task):
    """Nearly all of its memory is weights."""

    global_batch = 4

    def model(self):
        return nn.Linear(4, 50_000)

    def loss(self, model, batch):
        return model(batch).square().mean()


WEIGHT_BYTES = 5 * 50_000 * 4


def test_the_plan_counts_its_bytes(tmp_path):
    for name, ema in (("with", 0.9), ("without", None)):
        train(tmp_path / name, Wide(), ema=ema, max_steps=1, micro_batch=4, memory_limit="64MiB")
    plans = [Plan.load(tmp_path / name / "plan.json") for name in ("with", "without")]
    for peak in ("predicted_peak_bytes", "measured_peak_bytes"):
        more = getattr(plans[0], peak) - getattr(plans[1], peak)
        assert more == pytest.approx(WEIGHT_BYTES, rel=0.01)


def test_the_step_stays_within_the_predicted_peak(tmp_path):
    train(tmp_path / "run", Wide(), max_steps=2, micro_batch=4, memory_limit="64MiB")
    plan = Plan.load(tmp_path / "run" / "plan.json")
    peak = max(event["peak_bytes"] for event in events(tmp_path / "run", "step"))
    assert peak == pytest.approx(plan.predicted_peak_bytes, rel=0.02)


def test_a_model_that_leaves_no_room_for_it_is_one_message(tmp_path):
    with pytest.raises(DoesNotFit, match=r"memory_limit"):
        train(tmp_path / "run", Wide(), memory_limit=WEIGHT_BYTES * 4)


def test_memory_that_runs_out_when_it_is_made_is_one_message(tmp_path):
    task = with_optimizer(Wide(), TrainOptions(ema=DECAY))
    with (
        brimful.simulated_memory(WEIGHT_BYTES * 3 // 2),
        pytest.raises(DoesNotFit, match=r"ema= takes 976.6 KiB.*Try: without ema="),
    ):
        task.optimizer(task.model())


def test_the_plan_shows_it_and_a_run_too_short_for_it_is_noted(tmp_path):
    train(tmp_path / "run", ema=0.999)
    assert Plan.load(tmp_path / "run" / "plan.json").choice("ema").effective == 0.999
    (note,) = [event["sentence"] for event in events(tmp_path / "run", "note") if "ema" in event["sentence"]]
    assert "1,000 steps" in note
    assert "6 steps" in note


@pytest.mark.parametrize("ema", [0, 1, 1.5, -0.1, "0.9", True])
def test_a_decay_that_cannot_work_is_refused(tmp_path, ema):
    with pytest.raises(BadOption, match="ema="):
        train(tmp_path / "run", ema=ema)


def test_two_processes_save_the_average_that_one_does(tmp_path):
    plans = {count: runs.plan_file(tmp_path, processes=count) for count in (1, 2)}
    for count, plan in plans.items():
        how = {"ema": DECAY, "task": runs.Run(dropout=0.0), "max_steps": 4}
        assert set(runs.finish(runs.start(tmp_path / f"{count}", plan, count, **how))) == {0}
    one, two = (saved(tmp_path / f"{count}") for count in plans)
    assert all(torch.allclose(one[name], two[name], atol=1e-5) for name in one)


class Swept(Regression):
    """With other weights frozen than before."""

    def model(self):
        return super().model().requires_grad_(True)


def test_an_average_of_other_weights_is_one_message(tmp_path):
    train(tmp_path / "run", max_steps=2)
    with pytest.raises(BadRun, match="does not fit the optimizer"):
        train(tmp_path / "run", Swept(), resume=True)
