"""Packed and padded batches of causal models. `test_families.py` has the families."""

import threading

import numpy as np
import pytest
import torch
from transformers import BartConfig, BartForCausalLM, DogeConfig, DogeForCausalLM

from brimful.errors import TaskError
from brimful.memory.layout import FixedSize, PackedLayout
from brimful.packing import causal
from brimful.packing.sequence import positions
from brimful.planning.levers import checkpointing
from brimful.task import Task
from tests.packing.families import build, difference, draw_rows, gradients, loss_alone


def test_labels_of_a_row_are_never_predicted_from_the_row_before():
    batch = causal.pack([np.array([5, 6, 7]), np.array([8, 9])], (8,))
    assert batch["labels"].tolist() == [6, 7, -100, 9, -100, -100, -100, -100]
    assert batch["position_ids"].tolist()[:5] == [0, 1, 2, 0, 1]


def test_masked_labels_are_not_learnt():
    batch = causal.pack([np.array([5, 6, 7])], (4,), labels=[np.array([-100, -100, 7])])
    assert batch["labels"].tolist() == [-100, 7, -100, -100]
    assert batch["count"] == 1


def test_a_row_without_tokens_changes_nothing():
    model, rows = build("gpt2"), draw_rows(5)
    params = list(model.parameters())
    losses = [
        causal.loss(model, causal.pack(some, (512,))).sum
        for some in (rows, [*rows[:3], np.array([], dtype=int), *rows[3:]])
    ]
    assert losses[0].item() == pytest.approx(losses[1].item(), rel=1e-13)
    for mine, other in zip(*(torch.autograd.grad(loss, params) for loss in losses), strict=True):
        assert (mine - other).norm() <= 1e-12 * max(other.norm(), 1e-3)


def test_rows_with_more_tokens_than_their_shapes_are_refused():
    with pytest.raises(TaskError, match=r"rows of 5 tokens do not fit a sequence of 4. Try: .* shape\(row\)"):
        causal.pack([np.array([5, 6, 7]), np.array([8, 9])], (4,))


def test_other_labels_than_tokens_are_refused():
    with pytest.raises(TaskError, match="row 1 of a packed batch has 2 tokens and 3 labels. Try: "):
        causal.pack([np.array([5, 6]), np.array([8, 9])], (8,), labels=[np.array([5, 6]), np.array([8, 9, 1])])


def test_the_model_keeps_its_own_attention():
    model = build("llama")
    before = model.config._attn_implementation
    causal.loss(model, causal.pack(draw_rows(2), (512,)))
    assert model.config._attn_implementation == before


@pytest.mark.parametrize("every", [2, 3])
def test_some_checkpointed_blocks_repeat_their_dropout(every):
    model, batch = build("gpt2", n_layer=5).train(), causal.pack(draw_rows(4), (512,))

    def gradients():
        torch.manual_seed(0)
        return torch.autograd.grad(causal.loss(model, batch).sum, list(model.parameters()))

    plain = gradients()
    with checkpointing(Task(), model).set(every):
        assert all(map(torch.equal, plain, gradients()))


def test_tokens_that_are_not_trained_have_no_logits():
    model, rows = build("llama"), draw_rows()
    labels = [np.where(np.arange(len(row)) < 0.6 * len(row), -100, row) for row in rows]
    batch = causal.pack(rows, (512,), labels=labels)
    assert len(batch["trained"].tokens) == 64
    fewer, alone = causal.loss(model, batch), loss_alone(model, rows, labels)
    assert fewer.sum.item() == pytest.approx(alone.item(), rel=1e-12)
    assert difference(gradients(fewer.sum, model), gradients(alone, model)) < 1e-12


def test_trained_tokens_come_in_few_sizes():
    sizes = {len(positions(torch.arange(4096) < count).tokens) for count in range(0, 4096, 50)}
    assert sizes == set(range(256, 4097, 256))


class Replies(Task):
    """The second half of each row is trained."""

    def shape(self, row):
        return (len(row),)

    def pack(self, rows, tokens):
        labels = [np.where(np.arange(len(row)) < len(row) // 2, -100, row) for row in rows]
        return causal.pack(rows, tokens, labels=labels)


def test_batches_of_a_fixed_size_have_the_same_tensors_and_losses():
    model, fixed = build("llama"), PackedLayout(FixedSize((128,), 8))
    batches = [fixed.collate(Replies(), draw_rows(seed)[:count]) for seed, count in ((1, 7), (2, 4))]
    shapes = [
        [tuple(t.shape) for t in (batch["labels"], *batch["packed_rows"], *batch["trained"])] for batch in batches
    ]
    assert shapes[0] == shapes[1]
    free = PackedLayout().collate(Replies(), draw_rows(2)[:4])
    assert causal.loss(model, batches[1]).sum.item() == pytest.approx(causal.loss(model, free).sum.item(), rel=1e-12)


@pytest.mark.parametrize("trained", [0.5, 0.1], ids=["enough room", "too little room"])
def test_the_room_of_trained_tokens_changes_no_loss(trained):
    model, rows = build("llama"), draw_rows(2)
    fixed, free = PackedLayout(FixedSize((640,), 8, trained)), PackedLayout()
    sums = [causal.loss(model, layout.collate(Replies(), rows)).sum.item() for layout in (fixed, free)]
    assert sums[0] == pytest.approx(sums[1], rel=1e-12)


def test_padded_rows_are_a_batch_of_the_models_own_forward():
    model, rows = build("llama"), draw_rows()
    batch = causal.pad(rows, fill=3)
    assert batch["input_ids"].shape == (7, 30) and batch["input_ids"][0, 1] == 3
    padded = causal.padded_loss(model, batch)
    assert (padded.sum / padded.count).item() == pytest.approx(model(**batch).loss.item(), rel=1e-6)
    smoothed = causal.padded_loss(model, batch, label_smoothing=0.1).sum
    packed = causal.loss(model, causal.pack(rows, (128,)), label_smoothing=0.1).sum
    assert smoothed.item() == pytest.approx(packed.item(), rel=1e-12)


def test_padded_rows_with_a_loss_across_rows_are_refused():
    model = build("mixtral balanced")
    with pytest.raises(
        TaskError, match='depends on all rows of a micro-batch. Try: "output_router_logits": false in its config.json'
    ):
        causal.padded_loss(model, causal.pad(draw_rows()))


def test_a_model_with_a_loss_across_rows_can_be_evaluated():
    model, batch = build("mixtral balanced"), causal.pad(draw_rows())
    with torch.no_grad():
        loss = causal.padded_loss(model, batch)
        logits = model(input_ids=batch["input_ids"], use_cache=False, output_router_logits=False).logits[:, :-1]
    expected = torch.nn.functional.cross_entropy(
        logits.flatten(0, 1), batch["labels"][:, 1:].flatten(), reduction="sum"
    )
    assert loss.sum.item() == pytest.approx(expected.item(), rel=1e-9)


def test_the_models_own_attention_is_back_after_an_error():
    model, batch = build("llama"), causal.pack(draw_rows(), (128,))
    own = model.config._attn_implementation
    batch["input_ids"][3] = 1000
    with pytest.raises(IndexError):
        causal.loss(model, batch)
    assert model.config._attn_implementation == own


def test_threads_that_share_a_config_do_not_switch_each_other_off():
    model, batch = build("llama"), causal.pack(draw_rows(), (128,))
    own, expected = model.config._attn_implementation, causal.loss(model, batch).sum
    inside, leave = threading.Event(), threading.Event()

    def hold():
        with pytest.raises(TaskError), causal.rows_apart(model.model, batch["packed_rows"]):
            inside.set()
            leave.wait(10)

    thread = threading.Thread(target=hold)
    thread.start()
    inside.wait(10)
    assert causal.loss(model, batch).sum == expected
    assert model.config._attn_implementation == causal.INTERFACE
    with pytest.raises(TaskError, match="it does not pass on where rows begin"):
        model(torch.ones(1, 4, dtype=torch.long))  # padded in this thread while another packs: refused, not wrong
    leave.set()
    thread.join()
    assert model.config._attn_implementation == own


def test_layers_that_do_not_attend_are_found():
    model = build("llama")
    model.model.layers[1].self_attn.forward = lambda hidden_states, **kwargs: (hidden_states, None)
    with pytest.raises(TaskError, match="1 of 2 layers do not attend through transformers' interface"):
        causal.loss(model, causal.pack(draw_rows(), (128,)))


def test_a_window_that_attention_is_not_told_is_found():
    """Phi-3.5-MoE has it in its mask alone. Rows shorter than the window would not show it."""
    model = build("phimoe", sliding_window=100)
    with pytest.raises(
        TaskError, match="PhimoeModel cannot attend to packed rows: it does not pass on its sliding window"
    ):
        causal.loss(model, causal.pack(draw_rows(), (128,)))


def test_a_mask_of_the_model_itself_is_found():
    config = DogeConfig(vocab_size=64, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4)
    model = DogeForCausalLM(config)
    with pytest.raises(TaskError, match="DogeAttention cannot attend to packed rows: it has a mask of its own"):
        causal.loss(model, causal.pack(draw_rows(), (128,)))


def test_positions_that_the_model_counts_are_found():
    sizes = {"vocab_size": 64, "d_model": 32, "decoder_layers": 2, "decoder_attention_heads": 4, "encoder_layers": 2}
    model = BartForCausalLM(BartConfig(**sizes, is_decoder=True))
    with pytest.raises(TaskError, match="BartDecoder cannot attend to packed rows: it counts positions by itself"):
        causal.loss(model, causal.pack(draw_rows(), (128,)))
