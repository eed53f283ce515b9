"""`brimful.estimate`: what fits a card, what it assumes, and what it refuses."""

import json
from dataclasses import dataclass

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from transformers import T5Config, T5ForConditionalGeneration

import brimful
from brimful.errors import BadOption, TaskError
from brimful.estimation import estimator
from brimful.estimation.accuracy import ERRORS
from brimful.estimation.cards import all_cards, find_card
from brimful.estimation.fake_cuda import load_shim
from brimful.tasks.language import LanguageOptions, Pretrain
from brimful.units import GiB, MiB
from tests.planning.small import Tagger, Texts

WIDTH, LAYERS = 1024, 4


class Wide(brimful.Task):
    """16 MiB of weights, and some 40 KiB of activations a row."""

    global_batch = 4096

    def model(self):
        return nn.Sequential(*(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.ReLU()) for _ in range(LAYERS)))

    def dummy(self, rows, shape):
        return torch.zeros(rows, WIDTH)

    def loss(self, model, batch):
        return model(batch).square().mean()


WEIGHTS = 4 * LAYERS * (WIDTH + 1) * WIDTH


def estimate(task=None, **options):
    return brimful.estimate(task or Wide(), **{"memory": "1GiB", "levers": False, "quiet": True, **options})


def test_a_step_that_fits_is_recommended_whole():
    result = estimate(global_batch=64)
    assert (result.largest_micro_batch, result.recommended_micro_batch, result.fit.accumulation) == (64, 64, 1)
    assert result.fits and "the whole step of 64 rows" in result.headline


def test_a_step_that_does_not_fit_is_split_evenly():
    result = estimate(memory="256MiB")
    rows, parts = result.recommended_micro_batch, result.fit.accumulation
    assert 1 < rows < result.largest_micro_batch < 4096
    assert (parts - 1) * rows < 4096 <= parts * rows
    assert result.peak_reserved_bytes <= 0.85 * 256 * MiB


def test_one_row_more_than_the_largest_does_not_fit():
    most = estimate(memory="256MiB").largest_micro_batch
    assert estimate(memory="256MiB", micro_batch=most).fits
    assert not estimate(memory="256MiB", micro_batch=most + 1).fits


def test_fill_bounds_the_recommended_size():
    sparing, full = (
        estimate(memory="256MiB", fill=fill, checkpointing="off", global_batch=100_000) for fill in (0.8, 0.95)
    )
    assert sparing.recommended_micro_batch < full.recommended_micro_batch
    assert sparing.largest_micro_batch == full.largest_micro_batch


def test_a_requested_micro_batch_is_predicted():
    result = estimate(micro_batch=100)
    assert result.size.rows == 100 and result.peak_allocated_bytes < estimate(micro_batch=1000).peak_allocated_bytes


def test_weights_and_state_that_do_not_fit_are_refused_with_what_they_need():
    result = estimate(memory="100MiB", checkpointing="off")
    assert result.largest_micro_batch == result.recommended_micro_batch == 0 and not result.fits
    assert "does not fit" in result.headline and result.fit.one_row.reserved_bytes > 100 * MiB


def test_a_row_that_fits_but_not_within_the_fill_is_said_to_hardly_fit():
    least = estimate(micro_batch=1).peak_reserved_bytes
    result = estimate(memory=round(1.05 * least))
    assert result.largest_micro_batch >= 1 and result.recommended_micro_batch == 0
    assert "hardly fits" in result.headline and "95% of it, and 85% may be planned for" in result.headline


def test_kinds_are_what_they_are():
    result = estimate(micro_batch=64, global_batch=128)
    assert result.kinds["parameters"] == pytest.approx(WEIGHTS, rel=0.01)
    assert result.kinds["optimizer"] == pytest.approx(2 * WEIGHTS, rel=0.01)
    assert result.kinds["workspace"] >= 2 * result.card.cublas_bytes
    assert sum(size for kind, size in result.kinds.items() if kind != "context") == pytest.approx(
        result.peak_allocated_bytes, rel=0.001
    )


def test_gradients_are_held_in_the_forward_only_if_the_step_is_split():
    whole, part = estimate(micro_batch=64, global_batch=64), estimate(micro_batch=64, global_batch=128)
    assert part.phases["forward"] - whole.phases["first_forward"] == pytest.approx(WEIGHTS, rel=0.01)


def test_a_task_without_lengths_has_no_table_of_lengths():
    assert estimate().lengths == ()


def test_shorter_rows_fit_more():
    result = estimate(Tagger(), memory="80MiB", global_batch=4096)
    shapes = [fit.shape for fit in result.lengths]
    assert shapes == [(64,), (48,), (32,), (16,)]
    assert [fit.largest for fit in result.lengths] == sorted(fit.largest for fit in result.lengths)


def test_lengths_can_be_chosen():
    assert estimate(Tagger(), lengths=(32,)).fit.shape == (32,)


def test_a_task_with_data_and_without_a_dummy_uses_its_longest_rows():
    rows = [torch.ones(length, dtype=torch.long) for length in (3, 40, 17, 8)] * 5
    result = estimate(Texts(), data=rows)
    assert result.fit.shape == (40,) and result.lengths == ()


def test_a_task_that_needs_data_is_refused_without():
    with pytest.raises(TaskError, match="give data"):
        estimate(Texts())


def test_levers_change_one_setting_at_a_time():
    result = estimate(levers=True, gpu="RTX 3060", memory="256MiB", checkpointing="off")
    changes = {fit.change: fit for fit in result.levers}
    assert {"checkpointing=on", "checkpointing=every-2", "precision=bf16", "weights=bf16"} <= set(changes)
    assert changes["weights=bf16"].one_row.reserved_bytes < result.fit.one_row.reserved_bytes
    assert changes["checkpointing=on"].setting == "padded fp32 checkpointed"


def test_alternatives_are_compared():
    class Plain(Wide):
        def optimizer(self, model):
            return torch.optim.SGD(model.parameters())

    result = estimate(levers=True, checkpointing="off", alternatives={"optimizer=sgd": Plain()})
    (other,) = [fit for fit in result.levers if fit.change == "optimizer=sgd"]
    assert other.one_row.reserved_bytes < result.fit.one_row.reserved_bytes - WEIGHTS


class Freezes(Wide):
    """A task with an option that freezes all layers but the last."""

    @dataclass(frozen=True, kw_only=True)
    class Options:
        freeze: bool = False

    def model(self):
        model = super().model()
        for layer in model[:-1] if self.options.freeze else []:
            layer.requires_grad_(False)
        return model

    def memory_options(self):
        return [{"freeze": True}]


def test_options_of_the_task_that_change_its_memory_are_compared():
    result = estimate(Freezes(), levers=True, checkpointing="off")
    (other,) = [fit for fit in result.levers if fit.change == "freeze=True"]
    assert other.one_row.allocated_bytes < result.fit.one_row.allocated_bytes - 2 * WEIGHTS
    assert not any("frozen" in one for one in result.not_offered)


def test_levers_that_the_task_does_not_have_are_named_with_the_reason():
    text = "\n".join(estimate(levers=True, checkpointing="off").not_offered)
    assert "chunked loss: the task has none" in text and "frozen parts: the task has no option for them" in text
    partly = estimate(Freezes(Freezes.Options(freeze=True)), levers=True, checkpointing="off")
    assert any(one.startswith("frozen parts: 75% of the weights are frozen") for one in partly.not_offered)
    assert estimate().not_offered == estimate().kernels == ()


def test_why_there_is_no_checkpointing_is_said():
    class Single(Wide):
        def model(self):
            return nn.Linear(WIDTH, WIDTH)

    assert any(
        one.startswith("checkpointing: the model has no method") for one in estimate(Single(), levers=True).not_offered
    )


class Attention(Wide):
    precision = "bf16"

    def model(self):
        return nn.Linear(64, 3 * 64)

    def dummy(self, rows, shape):
        return torch.zeros(rows, 512, 64)

    def loss(self, model, batch):
        parts = model(batch).unflatten(-1, (3, 4, 16)).permute(2, 0, 3, 1, 4)
        return F.scaled_dot_product_attention(*parts).square().mean()


def test_other_kernels_are_compared_with_those_of_the_card():
    result = estimate(Attention(), levers=True, micro_batch=64, global_batch=64)
    kernels = {fit.change: fit.one_row.allocated_bytes - result.fit.one_row.allocated_bytes for fit in result.kernels}
    assert set(kernels) == {"memory-efficient attention", "plain attention", "foreach optimizer"}
    scores = 4 * 512 * 512 * 4  # the matrix of scores in fp32, kept for the backward
    assert kernels["plain attention"] > scores > kernels["memory-efficient attention"]


def test_the_memory_of_all_logits_is_compared_where_a_loss_has_chunks():
    result = estimate(Pretrain(LanguageOptions(model="causal-tiny")), levers=True, gpu="RTX 4090", memory=None)
    changes = {fit.change: fit for fit in (*result.levers, *result.kernels)}
    assert changes["all logits at once"].at_recommended.allocated_bytes > 2 * result.peak_allocated_bytes
    assert changes["freeze=embeddings"].one_row.allocated_bytes < result.fit.one_row.allocated_bytes
    assert not any("chunked" in one for one in result.not_offered)


def test_a_lever_that_cannot_be_traced_is_left_out_and_said():
    class Broken(Wide):
        def optimizer(self, model):
            raise ValueError("no such optimizer")

    result = estimate(levers=True, checkpointing="off", alternatives={"optimizer=broken": Broken()})
    assert not [fit for fit in result.levers if fit.change == "optimizer=broken"]
    assert any("optimizer=broken could not be traced" in one for one in result.assumptions)


def test_checkpointing_is_used_where_nothing_else_fits():
    class Deep(Wide):
        def model(self):
            wide = [nn.Sequential(nn.Linear(64, 16384), nn.ReLU(), nn.Linear(16384, 64)) for _ in range(8)]
            return nn.Sequential(*wide)

        def dummy(self, rows, shape):
            return torch.zeros(rows, 256, 64)

    plain = estimate(Deep(), checkpointing="off", memory="100GiB").fit.one_row.reserved_bytes
    result = estimate(Deep(), memory=plain - 20 * MiB, fill=0.99)
    assert "checkpointed" in result.fit.setting and result.largest_micro_batch >= 1


def test_what_fits_without_checkpointing_is_not_checkpointed_because_of_the_fill():
    least = estimate(checkpointing="off", micro_batch=1).peak_reserved_bytes
    result = estimate(memory=round(1.05 * least), fill=0.2)
    assert result.fit.setting == "padded fp32" and result.largest_micro_batch


def test_every_card_is_compared_and_a_larger_one_never_holds_less():
    result = estimate(gpu="all", memory=None, global_batch=10**6)
    assert [one.card for one in result.cards] == list(all_cards())
    by_setting: dict[tuple[str, int], list[int]] = {}
    for one in sorted(result.cards, key=lambda one: one.limit_bytes):
        by_setting.setdefault((one.fit.setting, one.card.cublas_bytes), []).append(one.fit.largest)
    assert all(rows == sorted(rows) for rows in by_setting.values())


def test_a_card_without_bf16_computes_in_fp32_where_the_task_leaves_it_open():
    class Open(Wide):
        precision = "auto"

    old, new = (estimate(Open(), gpu=name, memory=None).fit.setting for name in ("T4", "RTX 3090"))
    assert (old, new) == ("padded fp32", "padded bf16")


def test_fp16_works():
    result = estimate(precision="fp16", gpu="T4", memory=None, micro_batch=64)
    assert result.fit.setting == "padded fp16"


def test_memory_above_that_of_the_card_is_refused():
    with pytest.raises(BadOption, match="more than the"):
        estimate(gpu="RTX 3060", memory="20GiB")


def test_an_unknown_card_lists_near_ones():
    with pytest.raises(BadOption, match="RTX 4090"):
        estimate(gpu="RTX 4099", memory=None)


def test_processes_share_the_global_batch():
    assert estimate(processes=4, global_batch=64).recommended_micro_batch == 16


def test_ddp_holds_a_second_copy_of_the_gradients():
    alone, ddp = (
        estimate(micro_batch=16, global_batch=64, **more) for more in ({}, {"processes": 2, "sharding": "ddp"})
    )
    assert ddp.peak_allocated_bytes - alone.peak_allocated_bytes == pytest.approx(WEIGHTS, rel=0.02)
    assert any("DDP" in one for one in ddp.assumptions)


def test_our_own_exchange_holds_two_small_buckets():
    alone, two = (estimate(micro_batch=16, global_batch=64, **more) for more in ({}, {"processes": 2}))
    assert 0 < two.peak_allocated_bytes - alone.peak_allocated_bytes <= 64 * MiB


def test_fsdp_divides_weights_gradients_and_state():
    alone, fsdp = (
        estimate(micro_batch=16, global_batch=256, **more) for more in ({}, {"processes": 8, "sharding": "fsdp"})
    )
    assert fsdp.kinds["parameters"] == pytest.approx(WEIGHTS / 8, rel=0.02)
    assert fsdp.peak_allocated_bytes < alone.peak_allocated_bytes - WEIGHTS
    assert fsdp.phases["optimizer"] < fsdp.phases["first_late"]  # everything gathered is given back before
    assert any("FSDP2" in one for one in fsdp.assumptions)


def test_fsdp_holds_whole_gradients_between_micro_batches():
    """As accelerate and transformers use it."""
    one, two = (
        estimate(micro_batch=16, global_batch=rows, processes=8, sharding="fsdp", checkpointing="off")
        for rows in (128, 256)
    )
    assert two.peak_allocated_bytes - one.peak_allocated_bytes > WEIGHTS / 2


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"sharding": "ddp"}, "needs more than one GPU"),
        ({"sharding": "zero"}, "must be one of"),
        ({"layout": "packed"}, "not possible"),
        ({"fill": 2}, "fill"),
        ({"micro_batch": 0}, "micro_batch"),
        ({"lengths": (0,)}, r"lengths=\(0,\) must be whole numbers of at least 1\. Try: lengths=\(256, 256\)"),
        ({"memory": "0"}, "memory=: '0' must be greater than 0"),
    ],
)
def test_requests_that_cannot_work_are_refused(options, message):
    with pytest.raises(BadOption, match=message):
        estimate(**options)


def test_what_is_no_task_is_refused():
    with pytest.raises(TaskError, match=r"Try: a brimful\.Task"):
        estimate(nn.Linear(2, 2))


def test_a_task_class_is_made():
    assert estimate(Wide, global_batch=8).task == "Wide"


def test_the_json_has_the_names_that_scripts_rely_on():
    content = json.loads(json.dumps(estimate().to_json()))
    assert {
        "peak_allocated_bytes",
        "peak_reserved_bytes",
        "phases",
        "kinds",
        "largest_micro_batch",
        "recommended_micro_batch",
        "assumptions",
    } <= set(content)


def test_the_assumptions_name_kernels_optimizer_and_workspaces():
    text = "\n".join(estimate(Attention()).assumptions)
    assert "flash" in text and "AdamW, fused" in text and "65 MiB of workspaces" in text and "bfloat16" in text


def test_a_value_that_is_read_is_among_the_assumptions():
    class Reads(Wide):
        def loss(self, model, batch):
            mean = model(batch).square().mean()
            return mean if mean.item() > 0 else -mean

    line = Reads.loss.__code__.co_firstlineno + 2
    assert any(f"test_estimator.py:{line}" in one for one in estimate(Reads()).assumptions)


def test_without_a_compiler_the_cpu_is_traced_with_a_larger_error(monkeypatch):
    monkeypatch.setattr(estimator, "load_shim", lambda: "there is no C++ compiler")
    result = estimate()
    assert result.basis == "cpu"
    assert "traced on fake CPU tensors, with a larger error, because there is no C++ compiler" in result.assumptions
    assert "14.0%" in str(result)


@pytest.mark.skipif(isinstance(load_shim(), str), reason="fake CUDA tensors are not possible")
def test_both_devices_agree_where_no_kernel_differs(monkeypatch):
    on_cuda = estimate(micro_batch=512)
    assert on_cuda.basis == "cuda"
    monkeypatch.setattr(estimator, "load_shim", lambda: "there is no C++ compiler")
    assert estimate(micro_batch=512).peak_allocated_bytes == pytest.approx(on_cuda.peak_allocated_bytes, rel=0.03)


class T5(Wide):
    """Like the steps that were measured."""

    worst_shape = (64,)
    precision = "bf16"

    def model(self):
        return T5ForConditionalGeneration(
            T5Config(d_model=32, d_ff=64, num_heads=2, d_kv=16, num_layers=1, vocab_size=64, decoder_start_token_id=0)
        )

    def dummy(self, rows, shape):
        ids = torch.ones(rows, *shape, dtype=torch.long)
        return {"input_ids": ids, "labels": ids}

    def loss(self, model, batch):
        return model(**batch, use_cache=False)


on_fake_cuda = pytest.mark.skipif(isinstance(load_shim(), str), reason="fake CUDA tensors are not possible")


@on_fake_cuda
def test_the_error_is_stated_for_steps_like_those_that_were_measured():
    result = estimate(T5(), gpu="H200", memory=None, global_batch=8)
    assert (result.error, result.never_compared) == (ERRORS["cuda"], ())
    assert result.accuracy == "13 padded T5 steps on an H200 were predicted within 2.2%, and this step is like them"
    assert estimate(T5(), gpu="T4", memory=None, global_batch=8).accuracy.endswith(
        "on other cards nothing was compared"
    )


@pytest.mark.parametrize(
    ("task", "options", "unlike"),
    [
        (Wide, {"checkpointing": "off"}, ("the model (Sequential)", "fp32")),
        (T5, {"precision": "fp16"}, ("fp16",)),
        (T5, {"weights": "bf16"}, ("bf16 weights",)),
        (T5, {"processes": 2}, ("several GPUs",)),
        (T5, {"processes": 2, "sharding": "ddp"}, ("DDP",)),
        (T5, {"processes": 2, "sharding": "fsdp"}, ("FSDP2",)),
    ],
)
def test_what_was_never_compared_is_named_and_no_error_stated(task, options, unlike):
    result = estimate(task(), gpu="H200", memory=None, global_batch=8, **options)
    assert (result.error, result.never_compared) == (None, unlike)
    assert all(one in str(result) for one in ("never compared with a GPU", *unlike))


def test_packed_rows_adapters_and_other_optimizers_were_never_compared():
    class Other(T5):
        def model(self):
            peft = pytest.importorskip("peft")
            return peft.get_peft_model(super().model(), peft.LoraConfig(r=2, target_modules=["q"]))

        def optimizer(self, model):
            return torch.optim.SGD(model.parameters())

    result = estimate(Other(), gpu="H200", memory=None, global_batch=8)
    assert result.never_compared == ("adapters", "SGD")
    packed = estimate(Pretrain(LanguageOptions(model="chatlm-tiny")), gpu="H200", memory=None, global_batch=8)
    assert packed.never_compared == ("packed rows",)


def test_assumed_values_have_no_stated_error():
    class Reads(T5):
        def loss(self, model, batch):
            out = super().loss(model, batch)
            return out if out.loss.item() else None

    assert estimate(Reads(), gpu="H200", memory=None, global_batch=8).never_compared == ("assumed values",)


def test_multiprocessors_are_those_of_the_card_or_said_to_be_of_another():
    assert any(
        "28 multiprocessors, as RTX 3060 has" in one for one in estimate(gpu="RTX 3060", memory=None).assumptions
    )
    assert any("as an H200 has, since the card is not known" in one for one in estimate().assumptions)


def test_fewer_multiprocessors_take_less_for_the_parts_of_a_sum():
    class Sums(Wide):
        def model(self):
            return nn.Linear(8, 4096)

        def dummy(self, rows, shape):
            return torch.zeros(rows, 8)

        def loss(self, model, batch):
            return model(batch).sum(0).square().mean()

    small, large = (
        estimate(Sums(), gpu=name, memory=None, micro_batch=4096, global_batch=4096).peak_allocated_bytes
        for name in ("RTX 3060", "RTX 4090")
    )
    assert small < large


def test_several_gpus_hold_what_they_exchange():
    result = estimate(micro_batch=16, global_batch=64, processes=2, sharding="ddp")
    assert result.kinds["exchange"] == pytest.approx(WEIGHTS, rel=0.01) and not estimate().kinds["exchange"]


def test_a_loop_over_time_has_no_table_of_lengths_and_says_so():
    class Recurrent(Wide):
        worst_shape = (32,)

        def model(self):
            return nn.LSTM(16, 32, batch_first=True)

        def dummy(self, rows, shape):
            return torch.zeros(rows, *shape, 16)

        def loss(self, model, batch):
            return model(batch)[0].square().mean()

    result = estimate(Recurrent(), global_batch=8)
    assert not result.lengths and any("so there is no table of lengths" in one for one in result.assumptions)
    assert any("recurrent layers by torch's own kernels" in one for one in result.assumptions)


def test_a_failure_halfway_leaves_torch_as_it_was():
    class Fails(Wide):
        def loss(self, model, batch):
            model(batch)
            raise ValueError("no loss today")

    attention, seen = F.scaled_dot_product_attention, torch.cuda.is_available()
    with pytest.raises(TaskError, match="no loss today"):
        estimate(Fails())
    assert F.scaled_dot_product_attention is attention and torch.cuda.is_available() == seen
    x = torch.ones(3, requires_grad=True)
    F.silu(x).sum().backward()
    assert x.grad.isfinite().all()


def test_the_task_is_not_changed():
    task = Wide()
    before = dict(vars(task))
    estimate(task)
    assert vars(task) == before


def test_the_limit_of_a_card_is_its_memory_less_the_context():
    result = estimate(gpu="RTX 4090", memory=None)
    assert result.limit_bytes == find_card("RTX 4090").limit_bytes < 24 * GiB
