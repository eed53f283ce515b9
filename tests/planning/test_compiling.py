"""Compiled blocks: the same numbers, off without a trace, and a reason where there are none. Nothing here runs a compiler."""

import functools
import math
import shutil
from types import SimpleNamespace
from unittest.mock import patch

import pytest
import torch
from torch import nn

from brimful.errors import BadOption
from brimful.memory.layout import PACKED
from brimful.planning import compile_trial
from brimful.planning.levers import checkpointing, compiling
from brimful.planning.micro_batch import Search
from brimful.planning.plan_options import PlanOptions
from brimful.planning.planner import find_plan
from brimful.planning.target import Target, find_target
from brimful.step.stepper import Stepper
from brimful.task import Loss, Task
from tests.packing.small import Lines
from tests.planning.small import Tagger, small_plan

COMPILE = torch.compile


@pytest.fixture
def compiled(monkeypatch):
    """torch.compile without code generation; the functions it was given."""
    functions = []

    def compile_(function, **options):
        functions.append(function)
        return functools.wraps(function)(COMPILE(function, **{**options, "backend": "eager", "options": None}))

    monkeypatch.setattr(torch, "compile", compile_)
    return functions


@pytest.fixture
def broken(monkeypatch):
    """A compiler that fails at its first use, as without a C compiler on the machine."""

    def compile_(function, **options):
        def run(*args, **kwargs):
            raise RuntimeError("no C compiler found\nsecond line")

        return run

    monkeypatch.setattr(torch, "compile", compile_)


@pytest.fixture
def as_on_a_gpu(monkeypatch, tmp_path):
    """`auto` packs and compiles. Nothing has been compiled before."""
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / "compiled"))
    monkeypatch.setattr(Target, "has_kernels", True)
    monkeypatch.setattr(Lines, "precision", "bf16")


class Plain(Task):
    """One layer, and nothing that repeats."""

    name = "plain"
    global_batch = 4

    def model(self):
        return nn.Linear(4, 1)

    def loss(self, model, batch):
        return Loss(model(batch).square().sum(), len(batch))

    def dummy(self, rows, shape):
        return torch.randn(rows, 4)


def gradients(task, model, batch):
    task.loss(model, batch).sum.backward()
    found = [param.grad.clone() for param in model.parameters()]
    model.zero_grad()
    return found


def test_compiled_blocks_give_the_same_numbers(compiled):
    task = Tagger()
    model, batch = task.model(), task.dummy(4, (8,))
    plain = gradients(task, model, batch)
    lever = compiling(task, model)
    assert lever.reason == "over 2 repeated blocks"
    with lever.set(True):
        assert all(map(torch.allclose, gradients(task, model, batch), plain))
    assert len(compiled) == 2


def test_switched_off_nothing_is_left(compiled):
    model = Tagger().model()
    with compiling(Tagger(), model).set(True):
        assert all("forward" in vars(block) for block in model.body)
    assert not any("forward" in vars(block) for block in model.body)


def test_checkpointing_comes_off_and_leaves_blocks_compiled(compiled):
    """A plan that compiles tries checkpointing too."""
    model = Tagger().model()
    with compiling(Tagger(), model).set(True):
        before = [block.forward for block in model.body]
        with checkpointing(Tagger(), model).set(True):
            assert [block.forward for block in model.body] != before
        assert [block.forward for block in model.body] == before


def test_no_repeated_blocks_says_why():
    reason = "not available: the model has no repeated blocks in a ModuleList or Sequential"
    assert compiling(Plain(), nn.Linear(2, 2)).reason == reason
    assert small_plan(Plain()).choice("compile").reason == reason
    with pytest.raises(BadOption) as refusal:
        small_plan(Plain(), compile="on")
    why = reason.removeprefix("not available: ")
    assert str(refusal.value) == f'compile="on" is not possible: {why}. Try: compile="auto".'


def test_on_a_cpu_nothing_is_compiled_unasked(compiled):
    choice = small_plan(Tagger()).choice("compile")
    assert (choice.effective, choice.reason) == ("off", "only packed steps on a GPU are compiled unless requested")
    assert not compiled


def test_packed_rows_on_a_card_without_kernels_are_not_compiled_and_the_plan_says_why():
    sizes = {"limit_bytes": 2**30, "limit_reason": "free", "fill": 0.85, "host_limit_bytes": 2**30}
    old_card = Target(device=torch.device("cuda"), name="an old card", **sizes)
    compiler, context = compiling(Tagger(), Tagger().model()), SimpleNamespace(layout=PACKED)
    search = SimpleNamespace(options=PlanOptions(), compiler=compiler, context=context, target=old_card)
    reason = "an old card has compute capability 7.5, and the kernels for packed rows need 8.0"
    with patch.object(Target, "why_no_kernels", reason):
        assert compile_trial.wants_compiled(search) == (False, reason)


def test_a_plan_that_compiles_says_what_it_gained_and_a_step_follows_it(compiled):
    task = Tagger()
    plan = small_plan(task, compile="on", memory_limit="64MiB", global_batch=8)
    choice = plan.choice("compile")
    assert (choice.requested, choice.effective, plan.levers.compile) == ("on", "on", "on")
    assert choice.reason.startswith("8 rows in ") and "; took " in choice.reason
    model, notes = task.model(), []
    Stepper(model, task.optimizer(model), task, plan, on_event=lambda event: notes.append(event.sentence))
    assert "blocks are compiled, as planned (over 2 repeated blocks)" in notes
    assert all("forward" in vars(block) for block in model.body)


def test_packed_rows_are_compiled_where_there_are_kernels(as_on_a_gpu, monkeypatch):
    monkeypatch.setattr(torch, "compile", lambda function, **options: lambda *args, **kwargs: function(*args, **kwargs))
    monkeypatch.setattr(compile_trial, "SLOWER", math.inf)
    plan = small_plan(Lines(), memory_limit="64MiB")
    assert (plan.layout, plan.levers.compile, plan.choice("compile").requested) == ("packed", "on", None)


@pytest.fixture
def plan_of_a_run(as_on_a_gpu, monkeypatch):
    """A function from a number of steps to the plan of such a run. Its compiler changes nothing."""
    monkeypatch.setattr(torch, "compile", lambda function, **options: lambda *args, **kwargs: function(*args, **kwargs))
    options = PlanOptions(memory_limit="64MiB", cache=False, device="cpu")
    return lambda steps: find_plan(Lines(), options, find_target(options), None, steps=steps)


def test_a_short_run_is_not_compiled(plan_of_a_run):
    choice = plan_of_a_run(1).choice("compile")
    assert choice.effective == "off"
    assert choice.reason.startswith("the run takes about ") and choice.reason.endswith(
        " without it, and compiling 30 s"
    )


def test_a_long_run_is_compiled(plan_of_a_run, monkeypatch):
    monkeypatch.setattr(
        compile_trial, "SLOWER", math.inf
    )  # how fast compiled blocks are on a busy CPU is not the point
    assert plan_of_a_run(10**7).levers.compile == "on"


@pytest.fixture
def half_the_time(monkeypatch):
    """Compiled blocks take 5 ms, plain ones 10."""
    monkeypatch.setattr(Search, "timed", lambda search, rows, setting: 0.005 if setting.compile == "on" else 0.01)


def test_a_short_run_is_compiled_where_the_code_is_on_disk(plan_of_a_run, half_the_time):
    assert plan_of_a_run(4800).choice("compile").reason == "the run takes about 48.0 s without it, and compiling 30 s"
    plan_of_a_run(10**6)
    assert plan_of_a_run(4800).levers.compile == "on"


def test_code_on_disk_is_weighed_too(plan_of_a_run, half_the_time):
    plan_of_a_run(10**6)
    reason = plan_of_a_run(300).choice("compile").reason
    assert reason == "the run takes about 3.0 s without it, and compiling 10 s with its code on disk"


def test_what_loading_took_is_known_the_next_time(plan_of_a_run, half_the_time, monkeypatch):
    for _ in range(2):
        plan_of_a_run(10**6)
    assert plan_of_a_run(300).levers.compile == "on"


def test_code_that_was_deleted_is_compiled_again(plan_of_a_run, half_the_time, tmp_path):
    plan_of_a_run(10**6)
    shutil.rmtree(tmp_path / "compiled")
    assert plan_of_a_run(4800).levers.compile == "off"


@pytest.mark.parametrize(
    "compiled_s, effective, reason",
    [
        (0.012, "off", "it would be slower: 24 rows in 12 ms instead of 10; took "),
        (0.005, "on", "24 rows in 5 ms instead of 10; took "),
    ],
)
def test_compiled_blocks_are_used_unless_they_are_slower(plan_of_a_run, monkeypatch, compiled_s, effective, reason):
    def timed(search, rows, setting):
        return compiled_s if setting.compile == "on" else 0.01

    monkeypatch.setattr(Search, "timed", timed)
    choice = plan_of_a_run(10**6).choice("compile")
    assert choice.effective == effective and choice.reason.startswith(reason)
    assert choice.reason.endswith(", saves about 1 h 23 min") or effective == "off"


def test_a_compiler_that_fails_leaves_the_plan_without_it(broken, as_on_a_gpu):
    plan = small_plan(Lines(), memory_limit="64MiB")
    choice = plan.choice("compile")
    assert (plan.layout, plan.levers.compile, choice.effective) == ("packed", "off", "off")
    assert choice.reason.startswith("failed: ") and "no C compiler found" in choice.reason


def test_a_compiler_that_fails_is_one_message_where_it_was_asked_for(broken):
    with pytest.raises(BadOption) as refusal:
        small_plan(Tagger(), compile="on")
    message = str(refusal.value)
    assert message.startswith('compile="on" failed: ') and message.endswith('. Try: compile="off".')
    assert "no C compiler found" in message and "\n" not in message and message.count("Try:") == 1


def test_a_compiler_that_fails_leaves_the_model_as_it_was(broken):
    task = Tagger()
    model = task.model()
    with pytest.raises(BadOption):
        small_plan(task, model=model, compile="on")
    assert not any("forward" in vars(block) for block in model.body)


def test_on_a_cpu_blocks_are_compiled_with_rows_that_fit_the_limit(compiled):
    """The step of 50 rows takes twice the limit."""
    plan = small_plan(Tagger(), compile="on", memory_limit="4MiB")
    compiled_rows = max(one.micro_batch for one in plan.tried)
    assert plan.memory_model.peak_bytes(50, plan.shape) > plan.limit_bytes
    assert compiled_rows > 1 and plan.memory_model.peak_bytes(compiled_rows, plan.shape) <= plan.limit_bytes
    assert plan.choice("compile").effective == "on"


@pytest.mark.parametrize(("fitting", "reason"), [(3, "3 rows in "), (0, "1 row in ")])
def test_blocks_are_compiled_with_rows_that_fit_checkpointed_if_none_do(compiled, monkeypatch, fitting, reason):
    monkeypatch.setattr("brimful.planning.compile_trial._rows_that_fit", lambda search: fitting)
    plan = small_plan(Tagger(), compile="on", memory_limit="64MiB", global_batch=8)
    assert plan.choice("compile").reason.startswith(reason)
    assert any(one.setting.checkpointing == "on" for one in plan.tried) or fitting
