"""A plan survives its JSON and reads well as text."""

import json
import time
from dataclasses import replace
from typing import get_args

import pytest

from brimful.memory.ledger import Ledger
from brimful.planning.plan import COLUMNS, Choice, Plan, RunTime, Source
from brimful.task import Shape
from tests.planning.small import small_plan


def test_a_plan_survives_its_json(tagger_plan, tmp_path):
    assert Plan.from_json(json.loads(json.dumps(tagger_plan.to_json()))) == tagger_plan
    tagger_plan.save(tmp_path / "new" / "plan.json")
    assert Plan.load(tmp_path / "new" / "plan.json") == tagger_plan


@pytest.mark.parametrize(
    "changes",
    [
        {"limit_bytes": "4 MiB"},
        {"shape": 5},
        {"shape": ["a"]},
        {"deal": None},
        {"levers": {}},
        {"host": {"limit_bytes": []}},
        {"choices": [1]},
        {"warnings": "late"},
        {"memory_model": {"phases": []}},
        {"memory_model": 5},
        {"cached": "no"},
    ],
    ids=str,
)
def test_a_plan_of_other_types_is_a_value_error(tagger_plan, changes):
    with pytest.raises(ValueError):
        Plan.from_json({**json.loads(json.dumps(tagger_plan.to_json())), **changes})


def test_every_choice_has_a_reason_and_a_basis(tagger_plan):
    names = {choice.name for choice in tagger_plan.choices}
    assert names >= {
        "device",
        "memory_limit",
        "global_batch",
        "micro_batch",
        "accumulation",
        "checkpointing",
        "precision",
    }
    assert all(choice.reason and choice.basis in ("measured", "predicted", "asked") for choice in tagger_plan.choices)


def test_every_choice_has_a_source(tagger_plan):
    sources = {choice.name: choice.source for choice in tagger_plan.choices}
    assert (
        sources["memory_limit"] == "you" and sources["global_batch"] == "task" and sources["micro_batch"] == "measured"
    )
    assert all(source in get_args(Source) for source in sources.values())


@pytest.mark.parametrize(
    ("requested", "effective", "basis", "source"),
    [
        (None, 1, "measured", "measured"),
        (None, 1, "predicted", "predicted"),
        (None, 1, "asked", "default"),
        (1, 1, "measured", "you"),
        (2, 1, "measured", "measured"),
        ("adamw", "adamw at 0.1", "asked", "you"),
    ],
)
def test_the_source_of_a_choice_follows_from_its_request_and_its_basis(requested, effective, basis, source):
    assert Choice.of("x", requested, effective, "", basis).source == source


def test_a_plan_of_a_run_survives_its_json(tagger_plan):
    time = RunTime(steps=3, steps_per_epoch=2, step_s=0.1, epoch_s=None, total_s=0.3, ends="2026-01-31T09:02:00Z")
    plan = replace(tagger_plan, run_time=time, number=2, step_s=0.1)
    assert Plan.from_json(json.loads(json.dumps(plan.to_json()))) == plan


def test_printed_it_is_a_table_of_the_choices(tagger_plan):
    headline, memory, _, header, *lines = str(tagger_plan).splitlines()
    assert headline.startswith("tagger on the CPU: ") and memory.endswith(f"of 4 MiB, {tagger_plan.used:.0%} safe")
    assert tuple(header.split()) == COLUMNS
    assert [line.split("  ")[0] for line in lines] == [choice.name.replace("_", " ") for choice in tagger_plan.choices]
    assert any("4 MiB" in line and line.endswith("as requested") for line in lines)


def test_only_where_a_limit_is_simulated_is_a_step_slower_than_it_was_timed(monkeypatch):
    count = Ledger.__torch_dispatch__
    monkeypatch.setattr(Ledger, "__torch_dispatch__", lambda *operation: (time.sleep(0.001), count(*operation))[1])
    slow, plain = small_plan(plan_seconds=2), small_plan(memory_limit=None, plan_seconds=2)
    assert slow.simulation_slowdown > 1 and plain.simulation_slowdown == 1


def test_warnings_are_printed(tagger_plan):
    assert str(tagger_plan.with_warning("it is late")).endswith("\nwarning: it is late")


def test_the_repr_is_one_short_line(tagger_plan):
    assert repr(tagger_plan).startswith("<Plan tagger: ") and len(repr(tagger_plan)) < 100


def test_a_split_holds_every_row_once_within_the_micro_batch(tagger_plan):
    shapes: list[Shape] = [(64,)] * 50
    groups = tagger_plan.split(shapes)
    assert sorted(index for group in groups for index in group) == list(range(50))
    assert max(map(len, groups)) <= tagger_plan.micro_batch
