"""One optimizer step: any split of the same rows gives the same gradient, and its phases come in order."""

from collections import namedtuple

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from brimful.errors import TaskError
from brimful.memory import context
from brimful.memory.context import (
    Phase,
    StepContext,
    attention_kernels,
    forward_context,
    split_batch,
    to_device,
)
from brimful.memory.model import FIRST_PHASES, MICRO_PHASES
from brimful.task import Loss, Task, rows_of

CPU = torch.device("cpu")
ROWS, LENGTH = 8, 5


class Tagger(Task):
    """A loss over the tokens that count, of which every row has another number."""

    def model(self):
        return nn.Sequential(nn.Linear(3, 6), nn.Tanh(), nn.Linear(6, 4)).double()

    def loss(self, model, batch):
        losses = F.cross_entropy(model(batch["x"]).flatten(0, 1), batch["y"].flatten(), reduction="none")
        return Loss(sum=(losses * batch["counts"].flatten()).sum(), count=batch["counts"].sum())

    def dummy(self, rows=ROWS, shape=(LENGTH,)):
        generator = torch.Generator().manual_seed(3)
        lengths = torch.arange(rows) % LENGTH + 1
        return {
            "x": torch.randn(rows, *shape, 3, generator=generator, dtype=torch.float64),
            "y": torch.randint(0, 4, (rows, *shape), generator=generator),
            "counts": (torch.arange(*shape) < lengths[:, None]).double(),
        }


def tagger(optimizer=torch.optim.SGD, **options) -> StepContext:
    torch.manual_seed(0)
    model = Tagger().model()
    made = optimizer(model.parameters(), **({"lr": 0.5} | options))
    return StepContext(task=Tagger(), model=model, optimizer=made, device=CPU, autocast=None)


def parts(split: list[int]):
    batch, left = Tagger().dummy(), None
    for rows in split[:-1]:
        left, batch = split_batch(batch, rows)
        yield left
    yield batch


def weights(model: nn.Module) -> torch.Tensor:
    return torch.cat([p.detach().flatten() for p in model.parameters()])


def stepped(split: list[int]) -> tuple[torch.Tensor, float]:
    """The weights after one step over the same eight rows, split so, and the loss it returned."""
    rig = tagger()
    loss = rig.step(parts(split), ROWS)
    return weights(rig.model), loss


def plain_step() -> tuple[torch.Tensor, float]:
    """What anyone would write for a batch that fits: the mean over all tokens that count."""
    rig = tagger()
    loss = rig.task.loss(rig.model, Tagger().dummy())
    mean = loss.sum / loss.count
    mean.backward()
    rig.optimizer.step()
    return weights(rig.model), mean.item()


@st.composite
def splits(draw) -> list[int]:
    edges = sorted(draw(st.sets(st.integers(1, ROWS - 1))))
    return [high - low for low, high in zip([0, *edges], [*edges, ROWS], strict=True)]


@given(splits())
@settings(max_examples=25, deadline=None)
def test_any_split_gives_the_weights_of_the_plain_step(split):
    torch.testing.assert_close(stepped(split)[0], plain_step()[0], rtol=0, atol=1e-12)


@given(splits())
@settings(max_examples=10, deadline=None)
def test_any_split_returns_the_mean_loss_of_the_plain_step(split):
    assert stepped(split)[1] == pytest.approx(plain_step()[1], rel=1e-12)


def test_a_mean_of_means_would_give_other_weights():
    rig = tagger()
    for batch in parts([3, 5]):
        loss = rig.task.loss(rig.model, batch)
        (loss.sum / loss.count / 2).backward()
    rig.optimizer.step()
    assert (weights(rig.model) - plain_step()[0]).abs().max() > 1e-4


def test_the_step_moves_the_weights():
    assert (stepped([3, 5])[0] - weights(tagger().model)).abs().max() > 1e-3


def test_no_gradients_are_left_after_a_step():
    rig = tagger()
    rig.step(parts([3, 5]), ROWS)
    assert all(p.grad is None for p in rig.model.parameters())


def test_gradients_add_up_over_micro_batches():
    rig = tagger()
    whole = tagger()
    whole.run_micro_batch(Tagger().dummy(), ROWS)
    for batch in parts([3, 5]):
        rig.run_micro_batch(batch, ROWS)
    for one, other in zip(rig.model.parameters(), whole.model.parameters(), strict=True):
        torch.testing.assert_close(one.grad, other.grad, rtol=0, atol=1e-14)


def test_a_step_that_counts_nothing_has_no_loss_and_moves_nothing():
    rig = tagger()
    before = weights(rig.model)
    batch = Tagger().dummy()
    batch["counts"].zero_()
    assert torch.tensor(rig.step([batch], ROWS)).isnan()
    assert torch.equal(weights(rig.model), before)


def marks(split: list[int]) -> list[str]:
    rig, seen = tagger(), []
    rig.step(parts(split), ROWS, seen.append)
    return seen


def test_the_phases_of_a_whole_step_come_in_order():
    assert marks([8]) == [*FIRST_PHASES, "optimizer", "idle"]


def test_the_phases_of_a_split_step_come_in_order():
    assert marks([3, 3, 2]) == [*FIRST_PHASES, *MICRO_PHASES, *MICRO_PHASES, "optimizer", "idle"]


def test_the_names_of_the_phases():
    assert MICRO_PHASES == ("forward", "head", "early", "late")
    assert FIRST_PHASES == ("first_forward", "first_head", "first_early", "first_late")


def test_a_model_of_one_weight_has_every_phase():
    rig = tagger()
    rig.model = nn.Linear(3, 4, bias=False).double()
    seen: list[str] = []
    rig.run_micro_batch(Tagger().dummy(), ROWS, seen.append)
    assert seen == list(MICRO_PHASES)


def test_late_begins_when_half_of_the_gradients_are_there():
    rig, ready = tagger(), {}
    rig.run_micro_batch(
        Tagger().dummy(),
        ROWS,
        lambda name: ready.update({name: sum(p.grad is not None for p in rig.model.parameters())}),
    )
    assert ready == {"forward": 0, "head": 0, "early": 1, "late": 2}  # of four


def hooks(model: nn.Module) -> int:
    return sum(len(p._post_accumulate_grad_hooks or ()) for p in model.parameters())


def test_hooks_are_on_the_weights_only_during_backward():
    rig, during = tagger(), []
    rig.run_micro_batch(Tagger().dummy(), ROWS, lambda _: during.append(hooks(rig.model)))
    assert during == [0, 0, 4, 4]
    assert hooks(rig.model) == 0


def test_no_hook_stays_when_backward_fails():
    def fail(_: torch.Tensor) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory.")

    rig = tagger()
    rig.model[0].weight.register_hook(fail)
    with pytest.raises(torch.OutOfMemoryError):
        rig.run_micro_batch(Tagger().dummy(), ROWS)
    assert hooks(rig.model) == 0


def test_gradients_are_held_on_exactly_the_weights_that_got_one():
    rig = tagger()
    rig.model[2].bias.requires_grad_(False)
    rig.model.register_parameter("unused", nn.Parameter(torch.zeros(7)))
    rig.step(parts([8]), ROWS)
    rig.hold_gradients()
    holding = [name for name, p in rig.model.named_parameters() if p.grad is not None]
    assert holding == ["0.weight", "0.bias", "2.weight"]


def test_held_gradients_are_zero_and_shaped_like_their_weights():
    rig = tagger()
    rig.step(parts([8]), ROWS)
    rig.hold_gradients()
    assert all(p.grad.shape == p.shape and p.grad.dtype == p.dtype and not p.grad.any() for p in rig.model.parameters())


def test_holding_gradients_leaves_those_that_are_there():
    rig = tagger()
    rig.step(parts([8]), ROWS)
    rig.run_micro_batch(Tagger().dummy(), ROWS)
    before = [p.grad.clone() for p in rig.model.parameters()]
    rig.hold_gradients()
    assert all(torch.equal(p.grad, grad) for p, grad in zip(rig.model.parameters(), before, strict=True))


@pytest.mark.parametrize("dtypes", [[torch.float64] * 4, [torch.float32, torch.float64] * 2, [torch.bfloat16] * 4])
def test_a_factor_on_the_device_scales_as_the_same_number_does(dtypes):
    scaled = []
    for factor in (0.3, torch.tensor(0.3, dtype=torch.float64)):
        step = tagger()
        torch.manual_seed(1)
        for param, dtype in zip(step.params, dtypes, strict=True):
            param.data = param.data.to(dtype)
            param.grad = torch.randn_like(param)
        step.scale_gradients(factor)
        scaled.append([param.grad for param in step.params])
    assert all(map(torch.equal, *scaled))


def test_gradients_can_be_dropped():
    rig = tagger()
    rig.run_micro_batch(Tagger().dummy(), ROWS)
    rig.drop_gradients()
    assert all(p.grad is None for p in rig.model.parameters())


def test_the_loss_runs_under_autocast():
    seen = []

    class Cast(Tagger):
        def loss(self, model, batch):
            seen.append(model(batch).dtype)
            return Loss(sum=model(batch).float().sum(), count=len(batch))

    model = nn.Linear(3, 2)
    sgd = torch.optim.SGD(model.parameters())
    StepContext(task=Cast(), model=model, optimizer=sgd, device=CPU, autocast=torch.bfloat16).step(
        [torch.ones(4, 3)], 4
    )
    StepContext(task=Cast(), model=model, optimizer=sgd, device=CPU, autocast=None).step([torch.ones(4, 3)], 4)
    assert seen == [torch.bfloat16, torch.float32]


@pytest.mark.parametrize(("autocast", "scaled"), [(None, False), (torch.bfloat16, False), (torch.float16, True)])
def test_only_fp16_scales_its_gradients(autocast, scaled):
    model = nn.Linear(1, 1)
    rig = StepContext(
        task=Tagger(), model=model, optimizer=torch.optim.SGD(model.parameters()), device=CPU, autocast=autocast
    )
    assert (rig.scaler is not None) is scaled


class Sum(Task):
    """Every weight's gradient is `factor`, for two rows of ones."""

    def __init__(self, factor: float) -> None:
        self.factor = factor

    def loss(self, model, batch):
        return Loss(sum=model(batch).float().sum() * self.factor, count=2)


def ones(factor: float, lr: float, autocast: torch.dtype | None) -> StepContext:
    model = nn.Linear(3, 1)
    nn.init.ones_(model.weight)
    sgd = torch.optim.SGD(model.parameters(), lr=lr)
    return StepContext(task=Sum(factor), model=model, optimizer=sgd, device=CPU, autocast=autocast)


@pytest.mark.parametrize("autocast", [None, torch.float16])
def test_the_scaler_of_fp16_does_not_change_the_step(autocast):
    rig = ones(2**-12, 2**11, autocast)
    rig.step([torch.ones(2, 3)], 2)
    assert rig.model.weight.tolist() == [[0.5] * 3]


def test_an_fp16_step_that_overflows_moves_nothing_and_is_scaled_by_half_the_next_time():
    rig = ones(2**12, 1.0, torch.float16)
    rig.step([torch.ones(2, 3)], 2)
    assert rig.model.weight.tolist() == [[1.0] * 3]
    assert rig.scaler.get_scale() == 2**15


def test_every_tensor_of_a_batch_goes_to_the_device():
    Pair = namedtuple("Pair", "left right")
    batch = {"ids": torch.ones(2), "pairs": [Pair(torch.ones(2), 7)], "name": "a", "none": None}
    moved = to_device(batch, torch.device("meta"))
    assert moved["ids"].is_meta and moved["pairs"][0].left.is_meta
    assert (moved["pairs"][0].right, moved["name"], moved["none"]) == (7, "a", None)
    assert type(moved["pairs"][0]) is Pair


def test_a_batch_that_is_one_tensor_goes_to_the_device():
    assert to_device(torch.ones(2), torch.device("meta")).is_meta


def test_a_split_keeps_every_row_in_order_and_what_has_no_rows_on_both_sides():
    batch = {"x": torch.arange(10).view(5, 2), "scale": torch.tensor(2.0), "name": "a"}
    first, second = split_batch(batch, 2)
    assert (rows_of(first), rows_of(second)) == (2, 3)
    assert torch.equal(torch.cat([first["x"], second["x"]]), batch["x"])
    assert first["scale"] == second["scale"] == 2.0
    assert first["name"] == second["name"] == "a"


def test_a_hugging_face_batch_is_moved_counted_and_split():
    from transformers import BatchEncoding

    batch = BatchEncoding({"ids": torch.arange(12).reshape(4, 3), "mask": torch.ones(4, 3)})
    first, rest = split_batch(to_device(batch, torch.device("cpu")), 1)
    assert (rows_of(batch), rows_of(first), rows_of(rest)) == (4, 1, 3)
    assert isinstance(rest, BatchEncoding)
    assert torch.equal(rest["ids"], batch["ids"][1:])


class Two(Tagger):
    """Tokens that count, and a penalty of every row: two terms with different counts."""

    def loss(self, model, batch):
        penalty = model(batch["x"]).square().mean(dim=(1, 2)).sum()
        return {"tokens": super().loss(model, batch), "penalty": Loss(sum=penalty, count=len(batch["x"]))}


def two_terms() -> StepContext:
    rig = tagger()
    rig.task = Two()
    return rig


def totals() -> dict[str, float]:
    return {"tokens": float(Tagger().dummy()["counts"].sum()), "penalty": float(ROWS)}


@given(splits())
@settings(max_examples=15, deadline=None)
def test_any_split_of_several_terms_gives_the_gradient_of_the_sum_of_their_means(split):
    rig, plain = two_terms(), two_terms()
    for batch in parts(split):
        rig.run_micro_batch(batch, totals())
    sum(term.sum / term.count for term in plain.task.loss(plain.model, Tagger().dummy()).values()).backward()
    for one, other in zip(rig.model.parameters(), plain.model.parameters(), strict=True):
        torch.testing.assert_close(one.grad, other.grad, rtol=0, atol=1e-13)


def test_a_micro_batch_of_several_terms_hands_them_back_by_name():
    terms = two_terms().run_micro_batch(Tagger().dummy(), totals())
    assert list(terms) == ["tokens", "penalty"]
    assert float(terms["penalty"].count) == ROWS


def test_a_single_term_is_called_loss():
    assert list(tagger().run_micro_batch(Tagger().dummy(), ROWS)) == ["loss"]


def test_several_terms_can_be_divided_by_one_number():
    rig, plain = two_terms(), two_terms()
    rig.run_micro_batch(Tagger().dummy(), 5.0)
    (sum(term.sum for term in plain.task.loss(plain.model, Tagger().dummy()).values()) / 5).backward()
    for one, other in zip(rig.model.parameters(), plain.model.parameters(), strict=True):
        torch.testing.assert_close(one.grad, other.grad, rtol=0, atol=1e-13)


@pytest.mark.parametrize(
    "over", [{"tokens": 1.0}, {"tokens": 1.0, "penalty": 1.0, "more": 1.0}, {"loss": 1.0, "penalty": 1.0}]
)
def test_terms_and_counts_of_other_names_are_refused(over):
    rig = two_terms()
    with pytest.raises(TaskError, match=r"the terms \['penalty', 'tokens'\] and counts\(\) has"):
        rig.run_micro_batch(Tagger().dummy(), over)


def test_terms_and_counts_of_other_names_are_refused_before_backward():
    rig = two_terms()
    with pytest.raises(TaskError):
        rig.run_micro_batch(Tagger().dummy(), {"tokens": 1.0})
    assert all(p.grad is None for p in rig.model.parameters())


@pytest.mark.parametrize("autocast", [None, torch.bfloat16, torch.float16])
def test_a_scaler_that_was_passed_is_used(autocast):
    mine = torch.amp.GradScaler("cpu", init_scale=8.0)
    model = nn.Linear(3, 1)
    sgd = torch.optim.SGD(model.parameters())
    rig = StepContext(task=Sum(1.0), model=model, optimizer=sgd, device=CPU, autocast=autocast, scaler=mine)
    rig.run_micro_batch(torch.ones(2, 3), 2)
    assert rig.scaler is mine
    assert model.weight.grad.tolist() == [[8.0] * 3]


def test_a_scaler_that_was_passed_is_updated():
    mine = torch.amp.GradScaler("cpu", init_scale=8.0, growth_interval=1)
    rig = ones(1.0, 0.5, torch.float16)
    rig.scaler = mine
    rig.step([torch.ones(2, 3)], 2)
    assert rig.model.weight.tolist() == [[0.5] * 3]
    assert mine.get_scale() == 16.0


def test_gradients_are_scaled_once_and_by_what_was_asked():
    rig = ones(1.0, 0.5, None)
    rig.run_micro_batch(torch.ones(2, 3), 2)
    rig.scale_gradients(0.25)
    assert rig.model.weight.grad.tolist() == [[0.25] * 3]


def test_applying_keeps_the_gradients():
    rig = ones(1.0, 0.5, None)
    rig.run_micro_batch(torch.ones(2, 3), 2)
    rig.apply()
    assert rig.model.weight.tolist() == [[0.5] * 3]
    assert rig.model.weight.grad is not None


def test_gradients_of_weights_that_the_optimizer_does_not_hold_are_dropped_as_well():
    rig = tagger()
    rig.optimizer = torch.optim.SGD(rig.model[2].parameters())
    rig.run_micro_batch(Tagger().dummy(), ROWS)
    rig.drop_gradients()
    assert all(p.grad is None for p in rig.model.parameters())


def out_of_memory(*_: object) -> None:
    raise torch.OutOfMemoryError("CUDA out of memory.")


def phase_of_failure(rig: StepContext) -> Phase:
    with pytest.raises(torch.OutOfMemoryError):
        rig.run_micro_batch(Tagger().dummy(), ROWS)
    return rig.phase


def test_memory_that_runs_out_on_the_way_to_the_device_is_known_to(monkeypatch):
    monkeypatch.setattr(context, "to_device", out_of_memory)
    assert phase_of_failure(tagger()) is Phase.TO_DEVICE


def test_memory_that_runs_out_in_the_forward_is_known_to():
    rig = tagger()
    rig.model[0].register_forward_hook(out_of_memory)
    assert phase_of_failure(rig) is Phase.FORWARD


def test_memory_that_runs_out_in_the_backward_is_known_to():
    rig = tagger()
    rig.model[0].weight.register_hook(out_of_memory)
    assert phase_of_failure(rig) is Phase.BACKWARD


@pytest.mark.parametrize("cudnn", [True, False])
def test_forward_and_backward_see_the_same_attention(cudnn):
    """Checkpointed blocks are computed again in backward: with other kernels their tensors would not match."""
    rig, seen = tagger(), []
    rig.cudnn_attention = cudnn
    rig.model[0].register_forward_hook(lambda *_: seen.append(torch.backends.cuda.cudnn_sdp_enabled()))
    rig.model[0].weight.register_post_accumulate_grad_hook(
        lambda _: seen.append(torch.backends.cuda.cudnn_sdp_enabled())
    )
    rig.run_micro_batch(Tagger().dummy(), ROWS)
    assert seen == [cudnn, cudnn]
    assert torch.backends.cuda.cudnn_sdp_enabled()


enabled = torch.backends.cuda.cudnn_sdp_enabled


def test_a_forward_runs_without_cudnn_attention_unless_asked_for():
    with forward_context(CPU, None):
        assert not enabled()
    with forward_context(CPU, None, cudnn_attention=True):
        assert enabled()
    assert enabled()


def test_a_forward_runs_under_autocast():
    with forward_context(CPU, torch.bfloat16):
        assert (torch.ones(2, 2) @ torch.ones(2, 2)).dtype is torch.bfloat16
    with forward_context(CPU, None):
        assert (torch.ones(2, 2) @ torch.ones(2, 2)).dtype is torch.float32


def test_an_error_leaves_the_attention_kernels_as_they_were():
    with pytest.raises(ValueError, match="x"), attention_kernels(cudnn=False):
        raise ValueError("x")
    assert enabled()


def test_attention_kernels_can_be_nested_and_off_before():
    with attention_kernels(cudnn=False):
        with attention_kernels(cudnn=False):
            pass
        assert not enabled()
        with attention_kernels(cudnn=True):
            assert not enabled()  # left as it is, and a caller's wish is that of the outer block
    torch.backends.cuda.enable_cudnn_sdp(False)
    try:
        with attention_kernels(cudnn=False):
            pass
        assert not enabled()
    finally:
        torch.backends.cuda.enable_cudnn_sdp(True)
