"""Packing by position numbers alone, as others do it: the proof before a run finds what leaks."""

import pytest
import torch

from brimful.memory.context import StepContext
from brimful.packing import causal
from brimful.planning.exactness import check_packing
from brimful.task import Loss, Task
from tests.packing.families import build, draw_rows

FAMILIES = ("qwen2", "llama", "gemma3", "mistral")
LEAKS = {
    "the cache left on": {"use_cache": True},
    "an attention mask": {"use_cache": False, "attention_mask": True},
}


class ByPositions(Task):
    """Rows are told apart only by their position numbers, in the model's own forward."""

    name = "by-positions"
    worst_shape = (30,)

    def __init__(self, family, use_cache, attention_mask=False):
        super().__init__()
        self.family, self.use_cache, self.attention_mask = family, use_cache, attention_mask

    def model(self):
        return build(self.family)

    def shape(self, row):
        return (len(row),)

    def collate(self, rows):
        return causal.pad(rows)

    def pack(self, rows, tokens):
        return causal.pack(rows, tokens)

    def loss(self, model, batch):
        if "packed_rows" not in batch:
            return causal.padded_loss(model, batch)
        tokens = batch["input_ids"][None]
        mask = torch.ones_like(tokens) if self.attention_mask else None
        logits = model(tokens, mask, batch["position_ids"][None], use_cache=self.use_cache).logits[0]
        total = torch.nn.functional.cross_entropy(logits, batch["labels"], reduction="sum")
        return Loss(sum=total, count=batch["count"])


def proof(task):
    model = task.model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    context = StepContext(task=task, model=model, optimizer=optimizer, device=torch.device("cpu"), autocast=None)
    return check_packing(context, draw_rows()[1:])


@pytest.mark.parametrize("leak", LEAKS)
@pytest.mark.parametrize("family", FAMILIES)
def test_rows_that_see_each_other_are_found(family, leak):
    assert "packed rows see each other" in proof(ByPositions(family, **LEAKS[leak]))


@pytest.mark.parametrize("family", FAMILIES)
def test_position_numbers_are_enough_without_cache_and_mask(family):
    assert proof(ByPositions(family, use_cache=False)) == ""


@pytest.mark.parametrize("family", FAMILIES)
def test_packed_attention_passes(family):
    class Packed(ByPositions):
        def loss(self, model, batch):
            return causal.loss(model, batch) if "packed_rows" in batch else causal.padded_loss(model, batch)

    assert proof(Packed(family, use_cache=True)) == ""


@pytest.mark.parametrize("leak", [None, *LEAKS])
def test_a_model_too_large_to_be_widened_is_compared_in_its_own_precision(monkeypatch, leak):
    class InBf16(ByPositions):
        def model(self):
            return super().model().to(torch.bfloat16)

        def loss(self, model, batch):
            return super().loss(model, batch) if leak or "packed_rows" not in batch else causal.loss(model, batch)

    monkeypatch.setattr("brimful.planning.exactness._room_bytes", lambda device: 0)
    assert bool(proof(InBf16("qwen2", **LEAKS.get(leak, {"use_cache": False})))) == bool(leak)
