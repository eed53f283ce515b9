"""FLOPs are counted exactly and leave no trace; the peak they are compared with is measured."""

import random

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn

from brimful.task import Loss, Task
from brimful.tasks.language import LanguageOptions, Pretrain, Sft
from brimful.tasks.presets import PRESETS
from brimful.training import metrics
from brimful.training.metrics import FlopModel, peak_flops, utilization
from tests.step.small import TwoTerms, Words

CPU = torch.device("cpu")
WIDE, HIDDEN, OUT = 8, 16, 4


class Mlp(Task):
    """Rows of one size through two layers."""

    def __init__(self, frozen=False, norm=False):
        self.frozen, self.norm = frozen, norm

    def model(self):
        middle = nn.BatchNorm1d(HIDDEN) if self.norm else nn.Identity()
        model = nn.Sequential(nn.Linear(WIDE, HIDDEN), middle, nn.ReLU(), nn.Dropout(0.5), nn.Linear(HIDDEN, OUT))
        model[0].requires_grad_(not self.frozen)
        return model

    def loss(self, model, batch):
        return Loss(sum=model(batch).square().sum(), count=len(batch))

    def dummy(self, rows, shape):
        return torch.randn(rows, WIDE)


class Square(Task):
    """Rows of L numbers whose cost is whatever `work` makes of them: `work(weight, rows of L)`."""

    def __init__(self, work):
        self.work = work

    def model(self):
        return nn.Linear(1, 1, bias=False)

    def loss(self, model, batch):
        return Loss(sum=(self.work(model.weight, batch)).sum(), count=len(batch))

    def dummy(self, rows, shape):
        return torch.ones(rows, *shape)


def measured(task, shape=(), **kwargs):
    return FlopModel.measure(task, task.model(), CPU, shape, **kwargs)


def terms_of_t5(size, *, encoder_trains):
    """Counted by hand: 2 FLOPs a weight and token forward, as many for its gradient and for its input's."""
    s = PRESETS[size]
    inner, layer = s.heads * s.d_kv, 6 if encoder_trains else 2
    square, feed = s.d_model * inner, 2 * s.d_model * s.d_ff
    attention = 4 * inner * s.layers
    cross = (6 if encoder_trains else 4) * 2 * square  # keys and values of a frozen encoder have no input gradient
    head = (6 if encoder_trains else 4) * s.d_model * s.vocab
    return {
        (1, 0): layer * s.layers * (4 * square + feed) + s.layers * cross,
        (2, 0): layer // 2 * attention,
        (0, 1): 6 * s.layers * (6 * square + feed) + head,
        (0, 2): 3 * attention,
        (1, 1): 3 * attention,
    }


def test_an_mlp_is_counted_exactly():
    model, how = measured(Mlp())
    first, second = 2 * WIDE * HIDDEN, 2 * HIDDEN * OUT
    assert model.count([()]) == 2 * first + 3 * second  # the first layer's input needs no gradient
    assert how == "counted over 3 small batches, forward and backward"


def test_a_frozen_part_counts_its_forward_alone():
    model, _ = measured(Mlp(frozen=True))
    first, second = 2 * WIDE * HIDDEN, 2 * HIDDEN * OUT
    assert model.count([()]) == first + 2 * second


@pytest.mark.parametrize("kind", [Pretrain, Sft])
def test_a_t5_is_what_is_counted_by_hand(kind):
    model, how = measured(kind(LanguageOptions(model="chatlm-tiny")), (40, 24))
    assert model.polynomial.terms == terms_of_t5("tiny", encoder_trains=kind is Pretrain)
    assert how.endswith("right to the last one at rows of 20+12")


@pytest.mark.torture
@pytest.mark.torture
def test_the_base_t5_is_what_is_counted_by_hand():
    model, _ = measured(Pretrain(LanguageOptions(model="chatlm-base")), (64, 48))
    assert model.polynomial.terms == terms_of_t5("base", encoder_trains=True)
    assert 6 * 187_692_288 * 256 < model.count([(256, 256)]) < 1.1 * 6 * 187_692_288 * 256


def test_attention_on_the_cpu_is_counted_as_its_products():
    def attend(weight, batch):
        each = batch[:, None, :, None].expand(-1, 1, -1, 8) * weight
        return F.scaled_dot_product_attention(each, each, each)

    model, _ = measured(Square(attend), (16,))
    assert model.polynomial.terms == {(2,): 3 * 2 * 2 * 8}


def test_rows_count_by_their_own_lengths():
    model, _ = measured(Words(), (40,))
    rows = [(1,), (2,), (40,)]
    assert model.count(rows) == sum(model.count([row]) for row in rows) == model.count([(43,)])
    assert model.count([]) == 0


def test_attention_makes_one_long_row_dearer_than_two_short_ones():
    model, _ = measured(Pretrain(LanguageOptions(model="chatlm-tiny")), (40, 24))
    assert model.count([(40, 24)]) > 2 * model.count([(20, 12)])


@pytest.mark.parametrize("shape", [(1,), (2,), (3,), (8,)])
def test_short_rows_are_counted_too(shape):
    model, _ = measured(Words(), shape)
    assert model.count([shape]) == shape[0] * measured(Words(), (40,))[0].count([(1,)])


@pytest.mark.parametrize("shape", [(1,), (2,), (7,), (40,)])
def test_no_dummy_is_longer_than_the_longest_row(shape):
    class Strict(Words):
        def dummy(self, rows, asked):
            assert asked <= shape
            return super().dummy(rows, asked)

    assert measured(Strict(), shape)[0] is not None


def test_several_terms_are_all_counted():
    class Extra(TwoTerms):
        def loss(self, model, batch):
            terms = super().loss(model, batch)
            return {**terms, "rows": Loss(model.first(model.embed(batch["words"][:, 0])).sum(), len(batch["words"]))}

    (plain, _), (extra, _) = measured(Words(), (8,)), measured(Extra(), (8,))
    assert extra.count([(5,)]) - plain.count([(5,)]) == 3 * 2 * 16 * 16


def test_the_precision_does_not_change_the_count():
    task = Pretrain(LanguageOptions(model="chatlm-tiny"))
    assert measured(task, (16, 8), autocast=torch.bfloat16) == measured(task, (16, 8))


@pytest.mark.parametrize(
    ("work", "reason"),
    [
        (lambda weight, batch: (batch * weight) @ batch.T, "not proportional to the rows"),
        (lambda weight, batch: batch * weight, "no matrix product"),
        (
            lambda weight, batch: batch.diag_embed() @ batch.diag_embed() * weight,
            "no simple function of a row's lengths",
        ),
        (lambda weight, batch: batch @ weight, "counting its FLOPs failed (RuntimeError: mat1 and mat2"),
    ],
)
def test_what_cannot_be_counted_is_unknown_with_its_reason(work, reason):
    model, how = measured(Square(work), (16,))
    assert model is None
    assert how.startswith("unknown: ")
    assert reason in how


def test_running_out_of_memory_leaves_it_unknown():
    def fail(weight, batch):
        raise torch.OutOfMemoryError("CUDA out of memory")

    assert measured(Square(fail), (16,)) == (None, "unknown: counting its FLOPs ran out of memory")


def random_draws():
    return random.random(), np.random.rand(), float(torch.rand(()))


@pytest.mark.parametrize("fails", [False, True])
def test_nothing_is_left_of_the_counting(fails):
    class Noisy(Mlp):
        def loss(self, model, batch):
            random.random(), np.random.rand()
            model.eval()
            model[1].training = True
            if fails and len(batch) > 2:
                raise ValueError
            return super().loss(model, batch)

    task = Noisy(norm=True)
    model = task.model()
    model[3].eval()
    fired = []
    for param in model.parameters():
        param.register_post_accumulate_grad_hook(lambda _: fired.append(1))
    model[0].weight.grad = kept = torch.ones_like(model[0].weight)
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    modes = [part.training for part in model.modules()]
    for seed in (random.seed, np.random.seed, torch.manual_seed):
        seed(7)
    draws = random_draws()
    for seed in (random.seed, np.random.seed, torch.manual_seed):
        seed(7)

    assert (FlopModel.measure(task, model, CPU, ())[0] is None) is fails
    assert random_draws() == draws
    assert all(torch.equal(before[name], tensor) for name, tensor in model.state_dict().items())
    assert [part.training for part in model.modules()] == modes
    assert [param.grad for param in model.parameters()][1:] == [None] * 5
    assert model[0].weight.grad is kept
    assert torch.equal(kept, torch.ones_like(kept))
    assert not fired


def test_utilization_is_the_rows_work_over_what_the_devices_could_do():
    assert utilization(6e12, 2.0, 10e12) == pytest.approx(0.3)
    assert utilization(6e12, 2.0, 10e12, processes=3) == pytest.approx(0.1)
    assert utilization(6e12, 2.0, None) is None
    assert utilization(6e12, 0.0, 10e12) is None


@pytest.fixture
def small_matrices(monkeypatch):
    monkeypatch.setattr(metrics, "MATRIX", {"cpu": 64})
    monkeypatch.setattr(metrics, "TIMED_S", 0.001)


def test_the_peak_is_measured_and_named_so(small_matrices):
    before = torch.get_rng_state()
    peak, how = peak_flops(CPU, torch.float32)
    assert 1e6 < peak < 1e14
    assert how == f"measured {peak / 1e12:.3g} TFLOP/s: the best product of two float32 matrices of 64 × 64"
    assert torch.equal(before, torch.get_rng_state())


def test_the_peak_is_the_best_product_but_the_first(small_matrices, monkeypatch):
    ticks = iter([0.0, 1e-9, 1.0, 1.3, 2.0, 2.2, 3.0, 3.4])
    monkeypatch.setattr(metrics, "TIMED_S", 0.5)
    monkeypatch.setattr(metrics.time, "perf_counter", lambda: next(ticks))
    assert peak_flops(CPU, torch.float32)[0] == pytest.approx(2 * 64**3 / 0.2)


def test_where_memory_is_short_smaller_matrices_serve(monkeypatch):
    def product(device, dtype, side):
        if side > 300:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return 0.5

    monkeypatch.setattr(metrics, "_best_s", product)
    assert peak_flops(CPU, torch.float32)[0] == 2 * 256**3 / 0.5
    monkeypatch.setattr(metrics, "SMALLEST", 1024)
    peak, how = peak_flops(CPU, torch.float32)
    assert (peak, how) == (None, "unknown: there is no memory for float32 matrices of 1024 × 1024")


def test_a_precision_without_products_has_no_peak(small_matrices):
    peak, how = peak_flops(CPU, torch.bool)
    assert peak is None
    assert how.startswith("unknown: two bool matrices cannot be multiplied here")


def test_where_a_short_precision_is_slow_fp32_tells_the_peak(monkeypatch):
    """fp16 on a CPU: the model gets around it, so that its products are no bound."""
    took = {torch.float16: 2.0, torch.bfloat16: 0.1, torch.float32: 0.5, torch.float64: 1.0}
    monkeypatch.setattr(metrics, "_best_s", lambda device, dtype, side: took[dtype])
    found = {dtype: peak_flops(CPU, dtype) for dtype in took}
    assert found[torch.float16] == found[torch.float32]
    assert "float32" in found[torch.float16][1] and "bfloat16" in found[torch.bfloat16][1]
    assert found[torch.bfloat16][0] == 2 * 1024**3 / 0.1
    assert found[torch.float64][0] == 2 * 1024**3 / 1.0


def test_more_than_everything_is_no_utilization():
    assert utilization(10e12, 1.0, 10e12) == 1.0
    assert utilization(10.1e12, 1.0, 10e12) is None
