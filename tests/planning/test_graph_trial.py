"""When micro-batches are replayed as a CUDA graph, and why not. Recording needs a GPU (`tests/step/test_graphs.py`)."""

from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from brimful.errors import BadOption
from brimful.memory.context import StepContext
from brimful.memory.graphs import signature
from brimful.memory.layout import PACKED, FixedSize, PackedLayout
from brimful.memory.oom import OutOfMemory
from brimful.packing import causal
from brimful.planning import graph_trial
from brimful.planning.graph_trial import with_graph
from brimful.tasks.preference import Dpo, DpoOptions
from tests.packing.small import Lines, draw_rows
from tests.planning.small import small_plan
from tests.tasks.tiny import make_model
from tests.tasks.tiny_causal import make_causal

ROWS = draw_rows(100)


@pytest.fixture(scope="module")
def plan():
    return small_plan(Lines(), data=ROWS, global_batch=50, layout="packed", workers=0, deterministic=True)


@pytest.fixture
def search():
    """What a search knows, on a GPU with room for 1,000 bytes."""
    options = SimpleNamespace(cuda_graphs="auto", deterministic=False, seed=0)
    return SimpleNamespace(
        options=options, target=SimpleNamespace(device=torch.device("cuda"), name="a GPU", budget_bytes=1000), rows=ROWS,
        task=Lines(), most=50, once_s=0.01, context=SimpleNamespace(scaler=None), time=SimpleNamespace(allows=lambda *_: True),
    )  # fmt: skip


def tried(monkeypatch, outcome):
    monkeypatch.setattr(graph_trial, "_try", lambda *_: outcome)


def test_a_faster_replay_is_used_with_room_for_every_simulated_step(plan, search, monkeypatch):
    tried(monkeypatch, graph_trial._Trial(0.02, 900))
    graphed = with_graph(search, plan, 0.06)
    choice = graphed.choice("cuda_graphs")
    assert (choice.requested, choice.effective, graphed.levers.cuda_graphs) == (None, "on", "on")
    assert choice.reason.startswith("a micro-batch takes 20 ms replayed and 60 ms launched; trying it took ")
    assert graphed.rows_per_s == pytest.approx(50 / (plan.accumulation * 0.02 + 0.01))
    shapes = [(len(row),) for row in ROWS[:50]]
    groups = graphed.split(shapes)
    assert len(groups) == plan.accumulation == 2
    assert all(graphed.row_layout.fixed.holds([shapes[row] for row in group]) for group in groups)
    assert all(size % 64 == 0 for size in graphed.fixed_tokens)


def test_such_a_plan_is_saved_and_loaded(plan, search, monkeypatch, tmp_path):
    tried(monkeypatch, graph_trial._Trial(0.02, 900))
    graphed = with_graph(search, plan, 0.06)
    graphed.save(tmp_path / "plan.json")
    assert type(plan).load(tmp_path / "plan.json") == graphed


REFUSED = {
    "a micro-batch takes 60 ms replayed and 60 ms launched": (graph_trial._Trial(0.06, 900), {}),
    "it would reserve ": (graph_trial._Trial(0.02, 1100), {}),
    "memory ran out with it": (OutOfMemory("CUDA out of memory"), {}),
    "as requested": (None, {"cuda_graphs": "off"}),
    "deterministic: ": (None, {"deterministic": True}),
}


@pytest.mark.parametrize("reason", REFUSED)
def test_without_a_graph_the_plan_says_why(plan, search, monkeypatch, reason):
    outcome, options = REFUSED[reason]
    tried(monkeypatch, outcome)
    vars(search.options).update(options)
    refused = with_graph(search, plan, 0.06)
    choice = refused.choice("cuda_graphs")
    assert choice.effective == refused.levers.cuda_graphs == "off" and refused.fixed_tokens is None
    assert choice.reason.startswith(reason)


def test_where_it_was_asked_for_a_refusal_is_one_message(plan, search, monkeypatch):
    search.options.cuda_graphs = "on"
    padded = replace(plan, layout="padded")
    with pytest.raises(BadOption) as refusal:
        with_graph(search, padded, 0.06)
    assert str(refusal.value) == (
        'cuda_graphs="on" is not possible: padded rows have many shapes, and a graph serves one. Try: cuda_graphs="auto".'
    )


@pytest.mark.parametrize("lengths, effective", [((20, 20), "on"), ((20, 19), "off")])
def test_padded_rows_are_replayed_where_all_are_of_one_length(search, monkeypatch, lengths, effective):
    tried(monkeypatch, graph_trial._Trial(0.02, 900))
    rows = [np.arange(2, 2 + length) for length in lengths] * 8
    search.rows, search.most = rows, 16
    padded = small_plan(
        Lines(), data=rows, global_batch=16, layout="padded", workers=0, deterministic=True, memory_limit="64MiB"
    )
    assert with_graph(search, padded, 0.06).choice("cuda_graphs").effective == effective


def test_a_slower_replay_is_used_where_it_was_asked_for(plan, search, monkeypatch):
    search.options.cuda_graphs = "on"
    tried(monkeypatch, graph_trial._Trial(0.09, 900))
    assert with_graph(search, plan, 0.06).levers.cuda_graphs == "on"


def test_the_time_of_simulated_steps_counts(plan, search, monkeypatch):
    tried(monkeypatch, graph_trial._Trial(0.02, 900))
    answers = iter([True] * 10 + [False])
    search.time = SimpleNamespace(allows=lambda *_: next(answers))
    choice = with_graph(search, plan, 0.06).choice("cuda_graphs")
    assert (choice.effective, choice.reason) == ("off", "there was no time left to try it")


# Where not every token is trained


class Replies(Lines):
    """The last eighth of each row is trained, and every token of a dummy row."""

    def pack(self, rows, tokens):
        labels = [np.where(np.arange(len(row)) < self.first_trained(row), -100, row) for row in rows]
        return causal.pack(rows, tokens, labels=labels)

    def first_trained(self, row):
        return len(row) - len(row) // 8 if any(row is one for one in LONG_ROWS) else 0


LONG_ROWS = [row for row in draw_rows(200) if len(row) >= 9]


@pytest.fixture(scope="module")
def replies_plan():
    options = {"global_batch": 48, "micro_batch": 24, "layout": "packed", "workers": 0, "deterministic": True}
    return small_plan(Lines(), data=LONG_ROWS, **options)


@pytest.fixture
def replies_search(search):
    search.task, search.rows, search.most = Replies(), LONG_ROWS, 48
    return search


def test_the_head_of_a_fixed_size_has_room_for_what_is_trained_in_the_data(replies_plan, replies_search, monkeypatch):
    tried(monkeypatch, graph_trial._Trial(0.02, 900))
    layout = with_graph(replies_search, replies_plan, 0.06).row_layout
    batches = [layout.collate(Replies(), LONG_ROWS[start : start + 20]) for start in (0, 20, 40)]
    batches.append(layout.example(Replies(), replies_plan.micro_batch, replies_plan.shape))
    (sizes,) = {(len(batch["labels"]), len(batch["trained"].tokens)) for batch in batches}
    assert sizes[1] <= 128 < 512 <= sizes[0]
    assert len(set(map(signature, batches))) == 1


def test_such_a_replay_must_be_faster_than_launching_what_the_data_train(replies_plan, replies_search, monkeypatch):
    tried(monkeypatch, graph_trial._Trial(0.02, 900, launched_s=0.015))
    choice = with_graph(replies_search, replies_plan, 0.06).choice("cuda_graphs")
    assert choice.effective == "off"
    assert choice.reason.startswith("a micro-batch takes 20 ms replayed and 15 ms launched")


class NoGraphs:
    """Launches what would be replayed."""

    problem = ""

    def __init__(self, *_, **__):
        pass

    def run(self, context, batch, divisor, plain):
        return plain()

    def drop(self):
        pass


def test_launches_are_timed_with_as_much_trained_as_in_the_data(replies_plan, replies_search, monkeypatch):
    task, batches = Replies(), []
    model = task.model()
    context = StepContext(
        task=task, model=model, optimizer=task.optimizer(model), device=torch.device("cpu"), autocast=None
    )
    context.layout, replies_search.context = PACKED, context
    replies_search.target.device, replies_search.prober = context.device, SimpleNamespace(show=lambda phrase: None)
    monkeypatch.setattr(graph_trial, "Graphs", NoGraphs)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: None)
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda device: 900)
    run = context.run_micro_batch
    monkeypatch.setattr(
        context, "run_micro_batch", lambda batch, divisor: (batches.append(batch), run(batch, divisor))[1]
    )
    fixed = FixedSize((1024,), 27, trained=0.2)
    trial = graph_trial._try(replies_search, replies_plan, fixed, 0.1)
    assert trial.launched_s is not None
    assert [len(batch["trained"].tokens) for batch in (batches[0], batches[-1])] == [256, 128]


def test_on_a_cpu_there_is_no_such_choice():
    assert all(choice.name != "cuda_graphs" for choice in small_plan(Lines()).choices)
    with pytest.raises(BadOption, match='cuda_graphs="on" is not possible on the CPU. Try: cuda_graphs="auto"'):
        small_plan(Lines(), cuda_graphs="on")


class Growing(Lines):
    """Packs a tensor whose size depends on the rows."""

    def pack(self, rows, tokens):
        return {**super().pack(rows, tokens), "more": torch.zeros(len(rows))}


def test_tensors_whose_size_depends_on_the_rows_are_not_recorded(plan, search):
    search.task = search.context.task = Growing()
    search.context.layout, search.context.drop_gradients = PACKED, lambda: None
    search.target.device, search.prober = torch.device("cpu"), SimpleNamespace(show=lambda phrase: None)
    with pytest.raises(graph_trial._Refused, match="micro-batches differ in the sizes of their tensors"):
        graph_trial._try(search, plan, FixedSize((1024,), 50))


@pytest.mark.parametrize("kind", ["t5", "causal"])
def test_pairs_of_replies_are_not_recorded_and_the_plan_says_why(plan, search, kind, tmp_path):
    made = make_model(96) if kind == "t5" else make_causal("qwen2", 96)
    made.save_pretrained(tmp_path)
    task = Dpo(DpoOptions(model=str(tmp_path)))
    search.task, layout = task, PackedLayout()
    search.context = SimpleNamespace(task=task, layout=layout, drop_gradients=lambda: None)
    search.target.device, search.prober = torch.device("cpu"), SimpleNamespace(show=lambda phrase: None)
    shape = (20, 30) if kind == "t5" else (50,)
    fixed = FixedSize(tuple(64 * length for length in shape), 18)
    with pytest.raises(graph_trial._Refused, match="micro-batches differ in the sizes of their tensors"):
        graph_trial._try(search, replace(plan, micro_batch=16, shape=shape), fixed)
    assert search.context.layout is layout


class Failing(Lines):
    def pack(self, rows, tokens):
        raise RuntimeError("negative size")


def test_what_fails_while_a_graph_is_tried_is_a_reason_not_to_use_one(plan, search):
    search.task = search.context.task = Failing()
    search.context.layout, search.context.drop_gradients = PACKED, lambda: None
    search.target.device, search.prober = torch.device("cpu"), SimpleNamespace(show=lambda phrase: None)
    with pytest.raises(graph_trial._Refused, match="it failed: RuntimeError: negative size"):
        graph_trial._try(search, plan, FixedSize((1024,), 50))


def test_other_gradients_losses_and_counts_are_seen():
    one, other = torch.ones(4), torch.tensor([1.0, 1.0, 1.0, 2.0])
    assert graph_trial._differ((1.0, 5.0, [one]), (1.0, 5.0, [one])) == ""
    assert graph_trial._differ((1.0, 5.0, [one]), (1.0, 6.0, [one])) == "a replay counts 6 where the plain run counts 5"
    assert graph_trial._differ((1.0, 5.0, [one]), (1.1, 5.0, [one])).startswith("the loss of a replay differs by 0.1")
    assert graph_trial._differ((1.0, 5.0, [one]), (float("nan"), 5.0, [one])).startswith("the loss of a replay differs")
    assert graph_trial._differ((1.0, 5.0, [one]), (1.0, 5.0, [other])).startswith("gradients of a replay differ by 0.5")
