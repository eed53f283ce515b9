"""Packed rows have the loss and the gradient that they have alone, padded, in transformers' own forward."""

import numpy as np
import pytest
import torch

from brimful.memory.layout import PACKED, PADDED
from brimful.packing.t5 import compile_blocks
from brimful.planning.levers import checkpointing
from brimful.tasks.language import LanguageOptions, Pretrain, Sft, SftOptions


@pytest.fixture(scope="module")
def task():
    return Pretrain(LanguageOptions(model="chatlm-tiny"))


@pytest.fixture(scope="module")
def model(task):
    torch.manual_seed(0)
    return task.model().double().eval()


def draw_rows(seed, count=None):
    rng = np.random.default_rng(seed)
    count = count or int(rng.integers(1, 12))
    lengths = rng.integers(1, 60, (count, 2))
    return [
        {"prompt": rng.integers(2, 4000, source), "response": rng.integers(2, 4000, target)}
        for source, target in lengths
    ]


def gradients(task, model, batches):
    model.zero_grad()
    total = count = 0.0
    for batch in batches:
        loss = task.loss(model, batch)
        loss.sum.backward()
        total, count = total + loss.sum.item(), count + float(loss.count)
    return total, count, {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def assert_same(one, other, tolerance=1e-12):
    assert one[0] == pytest.approx(other[0], rel=tolerance)
    assert one[1] == other[1]
    assert one[2].keys() == other[2].keys()
    whole = torch.stack([gradient.norm() for gradient in other[2].values()]).norm()
    for name, gradient in one[2].items():  # with a source of one token, some are zero but for rounding
        assert (gradient - other[2][name]).norm() <= tolerance * max(other[2][name].norm(), 1e-3 * whole), name


@pytest.mark.parametrize("seed", range(50))
def test_any_packing_is_the_same_as_rows_alone(task, model, seed):
    rows = draw_rows(seed)
    order = np.random.default_rng(seed).permutation(len(rows))
    cut = len(rows) // 2
    packings = [
        PACKED.collate(task, part) for part in ([rows[i] for i in order[:cut]], [rows[i] for i in order[cut:]]) if part
    ]
    alone = gradients(task, model, [PADDED.collate(task, [row]) for row in rows])
    assert_same(gradients(task, model, packings), alone)


def test_packed_rows_are_the_same_as_padded_ones(task, model):
    rows = draw_rows(1, count=9)
    assert_same(
        gradients(task, model, [PACKED.collate(task, rows)]), gradients(task, model, [PADDED.collate(task, rows)])
    )


def test_gradient_checkpointing_changes_nothing(task, model):
    rows = [PACKED.collate(task, draw_rows(2))]
    plain = gradients(task, model, rows)
    model.train()
    dropouts = [part for part in model.modules() if hasattr(part, "dropout") and isinstance(part.dropout, float)]
    rates = [(part, part.p) for part in model.modules() if isinstance(part, torch.nn.Dropout)]
    weights = [(part, part.dropout) for part in dropouts]
    try:
        for part, _ in rates:
            part.p = 0.0
        for part, _ in weights:
            part.dropout = 0.0
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
        assert_same(gradients(task, model, rows), plain)
    finally:
        model.gradient_checkpointing_disable()
        for part, rate in rates:
            part.p = rate
        for part, rate in weights:
            part.dropout = rate
        model.eval()


@pytest.mark.parametrize("layout", [PACKED, PADDED])
@pytest.mark.parametrize("every", [2, 3])
def test_some_checkpointed_blocks_repeat_their_dropout(task, model, layout, every):
    rows = [layout.collate(task, draw_rows(2))]
    lever = checkpointing(task, model)
    try:
        model.train()
        torch.manual_seed(0)
        plain = gradients(task, model, rows)
        torch.manual_seed(0)
        with lever.set(every):
            assert_same(gradients(task, model, rows), plain)
    finally:
        model.eval()


def test_a_frozen_encoder_keeps_no_graph():
    task = Sft(SftOptions(model="chatlm-tiny", freeze="encoder+embeddings"))
    model = task.model().double().eval()
    rows = draw_rows(3)
    assert_same(
        gradients(task, model, [PACKED.collate(task, rows)]), gradients(task, model, [PADDED.collate(task, rows)])
    )
    assert all(p.grad is None for p in model.encoder.parameters())


def test_attention_weights_are_dropped_in_training(task, model):
    batch = PACKED.collate(task, draw_rows(4))
    model.train()
    for part in model.modules():
        if isinstance(part, torch.nn.Dropout):
            part.p = 0.0
    try:
        losses = {task.loss(model, batch).sum.item() for _ in range(2)}
    finally:
        for part in model.modules():
            if isinstance(part, torch.nn.Dropout):
                part.p = 0.1
        model.eval()
    assert len(losses) == 2


def test_compiled_blocks_are_switched_off_again(task, model):
    compile_blocks(model, True)
    compile_blocks(model, False)
    assert "packed_block" not in vars(model)


def test_label_smoothing_is_that_of_the_padded_loss():
    task = Pretrain(LanguageOptions(model="chatlm-tiny", label_smoothing=0.1))
    model = task.model().double().train()
    for part in model.modules():
        if isinstance(part, torch.nn.Dropout):
            part.p = 0.0
        elif isinstance(getattr(part, "dropout", None), float):
            part.dropout = 0.0
    rows = draw_rows(5)
    assert_same(
        gradients(task, model, [PACKED.collate(task, rows)]), gradients(task, model, [PADDED.collate(task, rows)])
    )
