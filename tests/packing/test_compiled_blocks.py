"""Compiled blocks of causal models: the same gradients, one graph for all blocks of a kind, none for a new size."""

from unittest import mock

import pytest
import torch
import torch.nn.functional as F

from brimful.packing import causal
from brimful.planning.levers import checkpointing, compiling
from brimful.task import Task
from tests.packing.families import build, difference, draw_rows, gradients

SIZES = ((128, (1, 5, 30, 2, 17, 30, 9)), (192, (30, 30, 30, 30, 60)), (64, (60,)))


def as_one_operation(q, k, v, rows, *, scale, causal, window, softcap, sinks, dropout):
    """What the kernel is to the compiler: no loop over rows, nothing that depends on their number."""
    token = torch.arange(q.shape[0])
    row = torch.searchsorted(rows.starts, token, right=True)
    distance = token[:, None] - token
    seen = (row[:, None] == row) & (distance >= 0)
    if window is not None:
        seen = seen & (distance < window)
    group = q.shape[1] // k.shape[1]
    k, v = (side.repeat_interleave(group, dim=1).transpose(0, 1) for side in (k, v))
    return F.scaled_dot_product_attention(q.transpose(0, 1), k, v, attn_mask=seen, scale=scale).transpose(0, 1)


class Graphs:
    """A backend that compiles nothing and counts what it is given."""

    def __init__(self):
        self.count = 0

    def __call__(self, module, inputs):
        self.count += 1
        return module.forward


@pytest.fixture(autouse=True)
def fresh():
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def runs(model):
    """The gradients of batches of several sizes."""
    results = []
    for number, (room, lengths) in enumerate(SIZES):
        torch.manual_seed(0)
        batch = causal.pack(draw_rows(number, lengths), (room,))
        results.append(gradients(causal.loss(model, batch).sum, model))
    return results


@pytest.mark.parametrize(
    "name, kinds, options",
    [("llama", 1, {"num_hidden_layers": 3}), ("gemma3", 2, {}), ("gpt2", 1, {})],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_blocks_of_a_kind_are_one_graph_for_all_sizes(name, kinds, options):
    model, graphs = build(name, **options), Graphs()
    with mock.patch.object(causal, "attention", as_one_operation):
        plain = runs(model)
        assert causal.compile_blocks(model, True, backend=graphs)
        for some, others in zip(runs(model), plain, strict=True):
            assert difference(some, others) < 1e-12
        assert graphs.count == kinds
        assert causal.compile_blocks(model, False)
        assert not any("forward" in vars(part) for part in model.modules())


def test_the_first_block_behind_frozen_embeddings_is_not_compiled_apart():
    model, graphs = build("llama", num_hidden_layers=3), Graphs()
    model.get_input_embeddings().requires_grad_(False)
    with mock.patch.object(causal, "attention", as_one_operation):
        plain = runs(model)
        causal.compile_blocks(model, True, backend=graphs)
        assert all(difference(*pair) < 1e-12 for pair in zip(runs(model), plain, strict=True))
    assert graphs.count == 1


def test_a_frozen_block_keeps_no_activations():
    model = build("llama", num_hidden_layers=2)
    model.get_input_embeddings().requires_grad_(False)
    model.model.layers[0].requires_grad_(False)
    inputs = []
    model.model.layers[1].register_forward_pre_hook(lambda _, args: inputs.append(args[0].requires_grad))
    causal.compile_blocks(model, True, backend=Graphs())
    causal.loss(model, causal.pack(draw_rows(), (128,)))
    assert inputs == [False]


def test_autocast_is_compiled_with_the_blocks():
    model, graphs = build("llama", torch.float32), Graphs()
    with torch.autocast("cpu", torch.bfloat16):
        plain = runs(model)
        causal.compile_blocks(model, True, backend=graphs)
        assert all(difference(*pair) < 1e-2 for pair in zip(runs(model), plain, strict=True))


def test_on_a_cpu_a_new_batch_compiles_nothing():
    model, graphs = build("llama", num_hidden_layers=1), Graphs()
    plain = runs(model)
    causal.compile_blocks(model, True, backend=graphs)
    first = causal.loss(model, causal.pack(draw_rows(), (128,)))
    compiled, _ = graphs.count, first
    assert all(difference(*pair) == 0 for pair in zip(runs(model), plain, strict=True))
    assert graphs.count == compiled


def test_checkpointed_blocks_are_compiled_too():
    model, graphs = build("llama", num_hidden_layers=1).train(), Graphs()
    plain = runs(model)
    causal.compile_blocks(model, True, backend=graphs)
    with checkpointing(Task(), model).set(1):
        assert all(difference(*pair) < 1e-12 for pair in zip(runs(model), plain, strict=True))
    assert graphs.count


def test_answers_are_generated_without_compiling():
    model, graphs = build("llama", num_hidden_layers=2).eval(), Graphs()
    prompt = torch.tensor([[3, 4, 5]])
    plain = model.generate(prompt, max_new_tokens=3, do_sample=False, use_cache=True)
    causal.compile_blocks(model, True, backend=graphs)
    assert torch.equal(model.generate(prompt, max_new_tokens=3, do_sample=False, use_cache=True), plain)
    assert graphs.count == 0


def test_it_is_a_lever_of_a_task():
    class Compiled(Task):
        def compiling(self, model, on):
            return causal.compile_blocks(model, on, backend="eager")

    model = build("llama")
    lever = compiling(Compiled(), model)
    assert lever.available and not any("forward" in vars(part) for part in model.modules())
    with lever.set(1):
        assert all("forward" in vars(block) for block in model.model.layers)
    assert not any("forward" in vars(block) for block in model.model.layers)


def test_blocks_that_others_compiled_are_packed():
    batch = causal.pack(draw_rows(), (128,))
    for how in ("lever", "torch"):
        model = build("llama", num_hidden_layers=1)
        plain = gradients(causal.loss(model, batch).sum, model)
        for block in model.model.layers:
            if how == "torch":
                block.compile(backend="eager")
            else:
                block.forward = torch.compile(block.forward, backend="eager")
        assert difference(gradients(causal.loss(model, batch).sum, model), plain) < 1e-12


def test_a_forward_that_somebody_replaced_stays():
    model = build("llama")
    model.model.layers[0].forward = own = model.model.layers[0].forward
    causal.compile_blocks(model, True, backend="eager")
    causal.compile_blocks(model, False)
    assert vars(model.model.layers[0])["forward"] is own


def test_other_models_have_no_such_blocks():
    model = build("llama")
    model.model.layers = torch.nn.ModuleList()
    assert not causal.compile_blocks(model, True)
