"""When micro-batches are replayed as a CUDA graph, and why not. Recording needs a GPU (`tests/step/test_graphs.py`)."""

from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from brimful.errors import BadOption
from brimful.memory.layout import PACKED, FixedSize
from brimful.memory.oom import OutOfMemory
from brimful.planning import graph_trial
from brimful.planning.graph_trial import with_graph
from tests.packing.small import Lines, draw_rows
from tests.planning.small import small_plan

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
    monkeypatch.setattr(graph_trial, "_try", lambda search, plan, fixed: outcome)


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


def test_a_slower_replay_is_used_where_it_was_asked_for(plan, search, monkeypatch):
    search.options.cuda_graphs = "on"
    tried(monkeypatch, graph_trial._Trial(0.09, 900))
    assert with_graph(search, plan, 0.06).levers.cuda_graphs == "on"


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


def test_other_gradients_losses_and_counts_are_seen():
    one, other = torch.ones(4), torch.tensor([1.0, 1.0, 1.0, 2.0])
    assert graph_trial._differ((1.0, 5.0, [one]), (1.0, 5.0, [one])) == ""
    assert graph_trial._differ((1.0, 5.0, [one]), (1.0, 6.0, [one])) == "a replay counts 6 where the plain run counts 5"
    assert graph_trial._differ((1.0, 5.0, [one]), (1.1, 5.0, [one])).startswith("the loss of a replay differs by 0.1")
    assert graph_trial._differ((1.0, 5.0, [one]), (float("nan"), 5.0, [one])).startswith("the loss of a replay differs")
    assert graph_trial._differ((1.0, 5.0, [one]), (1.0, 5.0, [other])).startswith("gradients of a replay differ by 0.5")
