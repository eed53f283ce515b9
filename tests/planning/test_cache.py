"""A plan is reused while all it depends on is the same, and made anew when anything is not."""

import os

import pytest
import torch

from brimful.planning import planner, target
from brimful.planning.planner import plan as make_plan
from tests.planning.small import Tagger

LIMIT = "4MiB"


class Wider(Tagger):
    def model(self):
        model = super().model()
        model.head = torch.nn.Linear(64, 101)
        return model


def plan(task=None, **asked):
    return make_plan(task or Tagger(), **{"memory_limit": LIMIT, "device": "cpu", **asked})


def test_a_hit_runs_no_probe_and_is_the_same_plan():
    first, phrases = plan(), []
    second = plan(progress=phrases.append)
    assert second.cached and not first.cached
    assert not phrases
    assert second.to_json() | {"cached": False} == first.to_json()


@pytest.mark.parametrize(
    "changed",
    [
        {"memory_limit": "5MiB"},
        {"fill": 0.8},
        {"global_batch": 51},
        {"micro_batch": 2},
        {"checkpointing": "off"},
        {"precision": "bf16"},
        {"lengths": (32,)},
        {"processes": 2},
        {"task": Wider()},
    ],
    ids=lambda changed: next(iter(changed)),
)
def test_a_changed_key_fits_anew(changed):
    plan()
    assert not plan(**changed).cached


def test_the_same_limit_in_other_words_hits():
    plan(memory_limit="4MiB")
    assert plan(memory_limit=4 * 2**20).cached


def test_another_torch_misses(monkeypatch):
    plan()
    monkeypatch.setattr(torch, "__version__", "9.9")
    assert not plan().cached


def test_no_cache_neither_reads_nor_writes():
    plan(cache=False)
    assert not planner.folder().exists()
    plan()
    assert not plan(cache=False).cached


def test_a_plan_for_what_was_free_counts_only_while_it_is(monkeypatch):
    free = [10 * 2**20]
    monkeypatch.setattr(target, "_host_free", lambda *_: (free[0], "what is free"))
    plan(memory_limit=None)
    assert plan(memory_limit=None).cached
    free[0] = 9 * 2**20
    assert not plan(memory_limit=None).cached
    free[0] = 20 * 2**20
    assert not plan(memory_limit=None).cached


def test_a_broken_cache_file_is_made_anew():
    key = plan().key
    (planner.folder() / f"{key}.json").write_text("{")
    assert not plan().cached


def test_a_cache_that_cannot_be_written_is_a_warning(monkeypatch, tmp_path):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("BRIMFUL_CACHE", str(tmp_path / "file"))
    assert any("could not be kept" in warning for warning in plan().warnings)


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs RLIMIT_FSIZE")
def test_no_disk_space_leaves_no_half_file_and_the_fit_goes_on():
    import resource
    import signal

    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    ignored = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1000, before[1]))
    try:
        found = plan()
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
        signal.signal(signal.SIGXFSZ, ignored)
    assert found.micro_batch >= 1
    assert any("could not be kept" in warning for warning in found.warnings)
    assert not list(planner.folder().iterdir())
