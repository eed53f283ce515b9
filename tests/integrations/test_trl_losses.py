"""Losses of TRL that take something from all rows of a batch, and their metrics, when the batch is split."""

import pytest
from transformers import Qwen2MoeConfig, Qwen2MoeForCausalLM

from brimful.errors import BadOption, DoesNotFit, InexactSplit
from brimful.integrations.transformers import exact
from tests.integrations.tiny_trl import (
    FORMS,
    STEPS,
    TOKENIZER,
    assert_same_log,
    lines,
    rows,
    small_model,
    trained,
    trained_within,
    trainer_of,
    trl,
)

pytestmark = pytest.mark.filterwarnings("ignore")


@pytest.mark.parametrize(
    ("kind", "options"),
    [
        ("SFT", {"lora": True, "gradient_checkpointing": True}),
        ("SFT", {"data": "completion"}),
        ("SFT", {"data": "messages", "assistant_only_loss": True}),
        ("SFT", {"padding_free": True, "max_length": None}),
        ("DPO", {"lora": True, "gradient_checkpointing": True}),
        ("DPO", {"precompute_ref_log_probs": True}),
        ("DPO", {"loss_type": ["sigmoid", "sft"], "loss_weights": [1.0, 0.5]}),
        ("KTO", {"lora": True, "gradient_checkpointing": True}),
        ("KTO", {"loss_type": "apo_zero_unpaired"}),
        ("Reward", {"center_rewards_coefficient": 0.1}),
    ],
    ids=lambda value: value if isinstance(value, str) else "-".join(f"{name}={value[name]}" for name in value),
)
def test_a_split_step_has_the_losses_and_metrics_of_the_whole_batch(kind, options, tmp_path):
    options = dict(options)
    data = rows(options.pop("data", FORMS[kind]), 32)
    plain = trained(kind, tmp_path, max_steps=2, data=data, **options)
    ours = trained(kind, tmp_path, exactly={"micro_batch": 5}, max_steps=2, data=data, **options)
    noisy = "precompute_ref_log_probs" in options  # rewards that should be 0, and which of two is larger
    assert_same_log(ours, plain, 2, losses_only=noisy)


@pytest.mark.parametrize("strategy", ["bfd", "bfd_split", "wrapped"])
def test_packed_rows_have_plain_trls_losses_and_metrics(strategy, tmp_path):
    packing = {"packing": True, "packing_strategy": strategy, "max_length": 32, "data": rows("text", 64)}
    plain = trained("SFT", tmp_path, 4, **packing)
    assert_same_log(trained("SFT", tmp_path, 4, exactly={"micro_batch": 1}, **packing), plain)


def test_a_pack_that_does_not_fit_alone_is_cut_between_its_documents(tmp_path, caplog):
    packing = {"packing": True, "max_length": 128, "data": rows("text", 80)}
    plain, peak_bytes = trained_within("4GiB", "SFT", tmp_path, 1, 4, **packing)
    ours, _ = trained_within(int(0.6 * peak_bytes), "SFT", tmp_path, 1, 4, exactly={}, **packing)
    assert "packed rows are now cut into up to 2 parts, between their documents" in caplog.text
    assert ours.state.global_step == ours.stepper.steps == STEPS
    assert_same_log(ours, plain, losses_only=True)


def test_a_document_that_does_not_fit_alone_ends_the_run(tmp_path):
    packing = {"packing": True, "max_length": 64, "data": rows("text", 40)}
    _, peak_bytes = trained_within("4GiB", "SFT", tmp_path, 1, 4, **packing)
    with pytest.raises(DoesNotFit, match="cannot be split"):
        trained_within(int(0.15 * peak_bytes), "SFT", tmp_path, 1, 4, exactly={}, **packing)


@pytest.mark.parametrize("lora", [False, True])
def test_ktos_kl_is_that_of_all_rows_of_the_step(lora, tmp_path):
    settings = {"lora": lora, "learning_rate": 1e-2}
    plain = trained("KTO", tmp_path, **settings)
    assert max(line["kl"] for line in lines(plain)) > 0.01
    assert_same_log(trained("KTO", tmp_path, exactly={"micro_batch": 1}, **settings), plain)


def test_dpos_losses_that_sort_rows_are_refused_unless_inexact_is_allowed(tmp_path):
    with pytest.raises(BadOption, match="loss_type=aot_unpaired sorts all rows of a batch"):
        trainer_of("DPO", tmp_path, exactly={}, loss_type=["sigmoid", "aot_unpaired"])
    trainer_of("DPO", tmp_path, exactly={"allow_inexact": True}, loss_type="aot")


def test_the_auxiliary_loss_of_a_mixture_of_experts_is_refused_unless_it_is_off(tmp_path):
    size = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
    experts = {
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 16,
        "shared_expert_intermediate_size": 16,
    }
    model = Qwen2MoeForCausalLM(Qwen2MoeConfig(vocab_size=65, num_key_value_heads=2, pad_token_id=0, **size, **experts))
    plain = trainer_of("SFT", tmp_path)
    others = {"train_dataset": plain.train_dataset, "processing_class": TOKENIZER}
    with pytest.raises(BadOption, match="balances all tokens of a batch; use router_aux_loss_coef=0.0"):
        exact(trl.SFTTrainer)(model=model, args=plain.args, **others)
    plain.args.router_aux_loss_coef = 0.0
    exact(trl.SFTTrainer)(model=model, args=plain.args, **others)


def test_a_dpo_loss_of_ones_own_that_compares_rows_is_refused_when_it_has_to_be_split(tmp_path):
    class AgainstTheBatch(trl.DPOTrainer):
        def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
            logits = model(input_ids=inputs["input_ids"], attention_mask=inputs["attention_mask"]).logits
            return logits.mean((1, 2)).square().sum().sqrt() + super().compute_loss(model, inputs)

    plain = trainer_of("DPO", tmp_path)
    ours = exact(AgainstTheBatch, micro_batch=4)(
        model=small_model(), ref_model=small_model(), args=plain.args, train_dataset=plain.train_dataset, processing_class=TOKENIZER
    )  # fmt: skip
    with pytest.raises(InexactSplit, match="the loss looks across rows"):
        ours.train()
