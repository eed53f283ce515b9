"""Every family packed against the same rows alone in transformers' own forward, or refused by name."""

import random
from unittest import mock

import pytest
import torch
from transformers import AutoModelForCausalLM, Gemma3Config, Phi3Config

from brimful.errors import TaskError
from brimful.packing import attention, causal
from brimful.planning.levers import checkpointing
from brimful.task import Task
from tests.packing.families import (
    EXACT,
    REFUSED,
    SHAPE,
    TABLE,
    build,
    difference,
    draw_rows,
    gradients,
    in_float64,
    loss_alone,
)

ROOM = 128
WITH_DROPOUT = [name for name in EXACT if name != "ernie4.5"]
"""Of attention weights."""


@pytest.mark.parametrize("name", EXACT)
def test_packed_rows_have_the_loss_and_gradient_that_they_have_alone(name):
    model, rows = build(name), draw_rows()
    with in_float64():
        packed, alone = causal.loss(model, causal.pack(rows, (ROOM,))), loss_alone(model, rows)
        some, others = (gradients(one, model) for one in (packed.sum, alone))
    assert packed.sum.item() == pytest.approx(alone.item(), rel=1e-12)
    assert packed.count == sum(len(row) - 1 for row in rows)
    assert difference(some, others) <= 1e-12


@pytest.mark.parametrize("seed", range(2 * len(EXACT)))
def test_any_packing_of_drawn_rows_has_the_loss_that_they_have_alone(seed):
    """Numbers, lengths and order of the rows, and what fills up the sequence. Two draws for each family."""
    draw, model = random.Random(seed), build(EXACT[seed % len(EXACT)])
    lengths = [draw.choice((1, 2, 3, draw.randint(4, 16), draw.randint(17, 60))) for _ in range(draw.randint(1, 12))]
    rows = draw_rows(seed, lengths)
    with in_float64():
        packed = causal.loss(model, causal.pack(rows, (sum(lengths) + draw.randint(0, 80),)))
        alone = loss_alone(model, rows)
        assert difference(gradients(packed.sum, model), gradients(alone, model)) <= 1e-12
    assert packed.sum.item() == pytest.approx(alone.item(), rel=1e-12)


@pytest.mark.parametrize("name", TABLE)
def test_padded_rows_have_the_loss_and_gradient_that_they_have_alone(name):
    if name == "mixtral balanced":
        pytest.skip("refused")
    model, rows = build(name), draw_rows()[1:]
    labels = [row.copy() for row in rows]
    for label in labels:
        label[: len(label) // 2] = -100
    with in_float64():
        padded = causal.padded_loss(model, causal.pad(rows, labels))
        alone = loss_alone(model, rows, labels)
        some, others = (gradients(one, model) for one in (padded.sum, alone))
    assert padded.sum.item() == pytest.approx(alone.item(), rel=1e-12)
    assert padded.count == sum(int((label[1:] != -100).sum()) for label in labels)
    assert difference(some, others) <= 1e-12


@pytest.mark.parametrize("name", REFUSED)
def test_a_family_whose_rows_would_see_each_other_is_refused(name):
    model = build(name)
    assert causal.cannot_pack(model.config) == REFUSED[name]
    with pytest.raises(TaskError) as refusal:
        causal.loss(model, causal.pack(draw_rows(), (ROOM,)))
    assert f"cannot be trained on packed rows: {REFUSED[name]}. Try: layout='padded'" in str(refusal.value)


def test_long_rows_that_change_the_positions_of_others_are_refused():
    scaling = {"rope_type": "longrope", "short_factor": [1.0] * 4, "long_factor": [2.0] * 4}
    config = Phi3Config(
        hidden_size=32, num_attention_heads=4, original_max_position_embeddings=32, max_position_embeddings=128,
        rope_scaling=scaling,
    )  # fmt: skip
    assert causal.cannot_pack(config) is None and causal.cannot_pack(config, 32) is None
    assert causal.cannot_pack(config, 33) == (
        "a row of more than 32 tokens changes the rotary positions of the rows beside it"
    )


def test_the_text_of_a_model_with_pictures_is_packed():
    """Gemma 3 from 4B on. In training its own forward asks for token types, which its decoder does not need."""
    vision = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    _, more = TABLE["gemma3"]
    config = Gemma3Config(
        text_config={**SHAPE, **more}, vision_config={**vision, "image_size": 28, "patch_size": 14},
        mm_tokens_per_image=1, image_token_index=0, boi_token_index=0, eoi_token_index=0,
    )  # fmt: skip
    model, rows = AutoModelForCausalLM.from_config(config).double().eval(), draw_rows()
    with in_float64():
        packed, alone = causal.loss(model, causal.pack(rows, (ROOM,))).sum, loss_alone(model, rows)
        assert difference(gradients(packed, model), gradients(alone, model)) <= 1e-12
        trained = causal.loss(model.train(), causal.pack(rows, (ROOM,))).sum
    assert (packed.item(), trained.item()) == pytest.approx((alone.item(),) * 2, rel=1e-12)


@pytest.mark.parametrize("name", EXACT)
def test_checkpointed_blocks_run_again_inside_their_rows(name):
    model, batch = build(name).train(), causal.pack(draw_rows(), (ROOM,))
    own = model.config._attn_implementation

    def run():
        torch.manual_seed(0)  # dropout is the same
        return gradients(causal.loss(model, batch).sum, model)

    plain = run()
    for every in (1, 2):
        with checkpointing(Task(), model).set(every):
            assert difference(run(), plain) == 0
    assert model.config._attn_implementation == own


@pytest.mark.parametrize("name", WITH_DROPOUT)
def test_attention_weights_are_dropped_in_training_only(name):
    dropout = {"gpt2": "attn_pdrop", "gpt-bigcode": "attn_pdrop"}.get(name, "attention_dropout")
    model, batch = build(name, **{dropout: 0.25}), causal.pack(draw_rows(), (ROOM,))
    with mock.patch.object(causal, "attention", wraps=causal.attention) as run:
        causal.loss(model, batch)
        causal.loss(model.train(), batch)
    dropped = [call.kwargs["dropout"] for call in run.call_args_list]
    layers = len(dropped) // 2
    assert dropped == [0.0] * layers + [0.25] * layers


@pytest.mark.parametrize("name", EXACT)
def test_under_autocast_attention_runs_in_half_precision(name):
    """As the kernels need it: rotary positions make queries and keys fp32."""
    model, batch = build(name, torch.float32), causal.pack(draw_rows(), (ROOM,))
    with (
        mock.patch.object(attention, "_plain", wraps=attention._plain) as run,
        torch.autocast("cpu", torch.bfloat16),
    ):
        causal.loss(model, batch)
    assert {side.dtype for call in run.call_args_list for side in call.args[:3]} == {torch.bfloat16}
