"""`brimful.train` from Python: what it takes, what it leaves alone, and one message for what cannot work."""

import inspect
import json
import re
import shutil
import sys
from dataclasses import dataclass, fields
from pathlib import Path
from typing import ClassVar, get_type_hints

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn

import brimful
from brimful.errors import BadCheckpoint, BadOption, BadRun, TaskError
from brimful.planning.plan import Plan
from brimful.planning.plan_options import PlanOptions
from brimful.training import metrics
from brimful.training.events import last_steps, read_events
from brimful.training.options import TrainOptions
from brimful.training.run import Request, RunFolder
from brimful.training.session import Session, _place
from brimful.units import GiB
from tests.training import runs

ROWS = list(torch.randn(24, 4, generator=torch.Generator().manual_seed(0)))


@dataclass(frozen=True, kw_only=True)
class Options:
    depth: int = 1
    """Layers."""


class Regression(brimful.Task):
    """Rows of one size, without dummy, rows or collate."""

    Options = Options
    global_batch = 8

    def model(self):
        return nn.Sequential(*(nn.Linear(4, 4) for _ in range(self.options.depth)))

    def loss(self, model, batch):
        return model(batch).square().mean()


@pytest.fixture(autouse=True, scope="module")
def _small_matrices():
    """The peak of the CPU takes longer to measure than these runs to train."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(metrics, "MATRIX", {"cpu": 64})
        patch.setattr(metrics, "TIMED_S", 0.001)
        yield


def train(folder, task=None, data=ROWS, **options):
    options = {"run": folder, "max_steps": 3, "device": "cpu", "micro_batch": 8, "cache": False, **options}
    return brimful.train(task or Regression(), data, **options)


def losses(folder):
    return [event["loss"] for event in last_steps(read_events(folder / "events.jsonl"))]


class Rows(torch.utils.data.Dataset):
    def __len__(self):
        return len(ROWS)

    def __getitem__(self, index):
        return ROWS[index]


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    folder = tmp_path_factory.mktemp("session") / "run"
    assert train(folder, max_steps=4).step == 4
    return folder


def hugging_face():
    datasets = pytest.importorskip("datasets")
    return datasets.Dataset.from_dict({"x": torch.stack(ROWS).tolist()}).with_format("torch")


class OfColumns(Regression):
    def loss(self, model, batch):
        return super().loss(model, batch["x"])


@pytest.mark.parametrize(
    ("task", "data"),
    [(Regression, Rows), (OfColumns, hugging_face)],
    ids=["torch dataset", "datasets.Dataset"],
)
def test_any_dataset_trains_like_a_list(tmp_path, whole, task, data):
    train(tmp_path / "run", task(), data(), max_steps=4)
    assert losses(tmp_path / "run") == losses(whole)


def test_a_run_on_data_in_memory_is_resumed_by_the_same_call(tmp_path, whole):
    train(tmp_path / "run", max_steps=2, schedule="constant")
    train(tmp_path / "other", max_steps=4, schedule="constant")
    train(tmp_path / "run", max_steps=4, schedule="constant", resume=True)
    assert losses(tmp_path / "run") == losses(tmp_path / "other")


def test_a_second_run_does_not_inherit_the_first_ones_learning_rate(tmp_path, whole):
    task = Regression()
    train(tmp_path / "first", task, lr=0.5)
    train(tmp_path / "second", task, max_steps=4)
    assert losses(tmp_path / "second") == losses(whole)
    assert set(vars(task)) == {"options"}


def test_a_task_may_be_given_as_its_class(tmp_path):
    assert train(tmp_path / "run", Regression, max_steps=1).step == 1


def test_a_resumed_run_needs_the_tasks_own_options(tmp_path):
    task = Regression(Options(depth=2))
    train(tmp_path / "run", task, max_steps=1)
    assert json.loads((tmp_path / "run" / "run.json").read_text())["task_options"] == {"depth": 2}
    with pytest.raises(BadOption, match="task options"):
        train(tmp_path / "run", Regression(), max_steps=2, resume=True)
    assert train(tmp_path / "run", task, max_steps=2, resume=True).step == 2


def saved_weights(run):
    return load_file(run / "model" / "model.safetensors")


def test_bf16_weights_are_saved_as_such(tmp_path):
    train(tmp_path / "run", weights="bf16")
    assert {tensor.dtype for tensor in saved_weights(tmp_path / "run").values()} == {torch.bfloat16}
    assert Plan.load(tmp_path / "run" / "plan.json").levers.weights == "bf16"


def test_bf16_weights_resume_to_the_bit(tmp_path):
    options = {"weights": "bf16", "schedule": "constant", "warmup": 0}
    train(tmp_path / "whole", max_steps=6, **options)
    train(tmp_path / "run", max_steps=3, **options)
    train(tmp_path / "run", max_steps=6, resume=True, **options)
    whole, resumed = (saved_weights(tmp_path / name) for name in ("whole", "run"))
    assert all(torch.equal(whole[name], resumed[name]) for name in whole)


@pytest.mark.parametrize(("began", "now"), [("bf16", None), (None, "bf16")])
def test_a_resumed_run_keeps_the_dtype_of_its_weights(tmp_path, began, now):
    train(tmp_path / "run", weights=began)
    with pytest.raises(BadCheckpoint, match="Try: the weights= that the run began with, or a new run"):
        train(tmp_path / "run", weights=now, max_steps=6, resume=True)


def test_a_plan_from_a_file_brings_its_weights(tmp_path):
    train(tmp_path / "first", weights="bf16")
    train(tmp_path / "run", plan=tmp_path / "first" / "plan.json", micro_batch="auto")
    assert {tensor.dtype for tensor in saved_weights(tmp_path / "run").values()} == {torch.bfloat16}


def test_a_plan_for_other_weights_is_refused(tmp_path):
    train(tmp_path / "first")
    with pytest.raises(BadRun, match="has unconverted weights, not bf16. Try: a new plan"):
        train(tmp_path / "run", plan=tmp_path / "first" / "plan.json", micro_batch="auto", weights="bf16")


def test_one_call_begins_a_run_and_resumes_it(tmp_path):
    for steps in (1, 2):
        assert train(tmp_path / "run", max_steps=steps, resume=True).step == steps
    events = list(read_events(tmp_path / "run" / "events.jsonl"))
    assert [event["resumed"] for event in events if event["event"] == "begin"] == [False, True]


def test_a_warmup_longer_than_the_run_is_lowered_in_sight(tmp_path):
    train(tmp_path / "run", max_steps=4, warmup=1024, lr=1.0, schedule="linear", min_lr=0.0)
    events = list(read_events(tmp_path / "run" / "events.jsonl"))
    (choice,) = [one for one in Plan.load(tmp_path / "run" / "plan.json").choices if one.name == "warmup"]
    assert choice.cells[:3] == ("warmup", "1024", "2 steps")
    assert choice.reason == "half of the run, which has only 4 steps"
    notes = [event["sentence"] for event in events if event["event"] == "note"]
    assert any(
        note.startswith("warmup=1024 is lowered to 2: half of the run, which has only 4 steps") for note in notes
    )
    assert [event["lr"] for event in events if event["event"] == "step"] == [0.5, 1.0, 0.5, 0.0]


class Scheduled(Regression):
    def schedule(self, optimizer, steps):
        return torch.optim.lr_scheduler.StepLR(optimizer, step_size=1, gamma=0.5)


def test_a_tasks_own_schedule_is_used_and_resumed(tmp_path):
    train(tmp_path / "run", Scheduled(), lr=1.0, max_steps=2)
    train(tmp_path / "run", Scheduled(), lr=1.0, max_steps=4, resume=True)
    steps = last_steps(read_events(tmp_path / "run" / "events.jsonl"))
    assert [event["lr"] for event in steps] == [1.0, 0.5, 0.25, 0.125]


def test_a_schedule_that_needs_a_metric_is_refused_before_the_first_step(tmp_path):
    class Plateau(Regression):
        def schedule(self, optimizer, steps):
            return torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer)

    with pytest.raises(TaskError, match="returned a ReduceLROnPlateau, which needs a metric at every step"):
        train(tmp_path / "run", Plateau(), max_steps=2)


class Averaging(torch.optim.SGD):
    """Keeps state in its groups, as schedule-free optimizers do: the longer it ran, the smaller its steps."""

    def __init__(self, params, lr):
        super().__init__(params, lr)
        for group in self.param_groups:
            group.update(count=0, weight_sum=torch.zeros(1), history=[])

    def step(self, closure=None):
        for group in self.param_groups:
            group["count"] += 1
            group["weight_sum"] += 1 / group["count"]
            group["history"].append(group["count"])
            rate, group["lr"] = group["lr"], group["lr"] / float(group["weight_sum"]) / len(group["history"])
            super().step()
            group["lr"] = rate


class Averaged(Regression):
    def optimizer(self, model):
        return Averaging(model.parameters(), lr=0.1)


def test_a_resumed_run_keeps_the_state_that_its_optimizer_has_in_its_groups(tmp_path):
    train(tmp_path / "whole", Averaged(), max_steps=6, schedule="constant")
    for steps in (2, 4, 6):
        train(tmp_path / "run", Averaged(), max_steps=steps, schedule="constant", resume=steps > 2)
    assert losses(tmp_path / "run") == losses(tmp_path / "whole")


class Drifting(nn.Linear):
    """Non-persistent buffers that training changes, grows and makes."""

    def __init__(self):
        super().__init__(4, 4)
        self.register_buffer("mean", torch.zeros(4), persistent=False)
        self.register_buffer("seen", torch.zeros(0), persistent=False)
        self.register_buffer("last", None, persistent=False)

    def forward(self, rows):
        if self.training:
            self.mean.lerp_(self.weight.detach().mean(0), 0.5)
            self.seen = torch.cat([self.seen, self.mean[:1]])
            self.last = self.seen * 2
        last = 0 if self.last is None else self.last.mean()
        return super().forward(rows - self.mean + self.seen.sum() + last)


class Drifted(Regression):
    def model(self):
        return nn.Sequential(Drifting(), nn.Linear(4, 4))


def test_a_resumed_run_keeps_buffers_that_are_not_persistent(tmp_path):
    options = {"schedule": "constant", "lr": 0.1, "allow_inexact": True}
    train(tmp_path / "whole", Drifted(), max_steps=4, **options)
    for steps in (2, 4):
        train(tmp_path / "run", Drifted(), max_steps=steps, resume=steps > 2, **options)
    assert losses(tmp_path / "run") == losses(tmp_path / "whole")


class Adapted(nn.Module):
    """As PEFT's models: a frozen base, and `save_pretrained` writes the adapter alone."""

    def __init__(self, base):
        super().__init__()
        self.base, self.adapter = nn.Linear(4, 4).requires_grad_(False), nn.Linear(4, 4)
        nn.init.constant_(self.base.weight, base)

    def forward(self, rows):
        return self.base(rows) + self.adapter(rows)

    def save_pretrained(self, folder, **_):
        (folder / "other_adapter").mkdir()
        for file in ("adapter_model.safetensors", "other_adapter/adapter_model.safetensors"):
            save_file(self.adapter.state_dict(), folder / file)


class Adapter(Regression):
    def model(self):
        return Adapted(base=0.0)

    def initial_model(self):
        return Adapted(base=0.5)


class Halved(Regression):
    def save(self, model, folder, rows):
        weights = {name: tensor.half() for name, tensor in model.state_dict().items()}
        save_file(weights, folder / "model.safetensors")


@pytest.mark.parametrize("task", [Adapter, Halved], ids=["an adapter alone", "in half precision"])
def test_a_run_whose_task_does_not_save_all_weights_is_resumed(tmp_path, task):
    options = {"schedule": "constant", "lr": 0.1}
    train(tmp_path / "whole", task(), max_steps=4, **options)
    for steps in (2, 4):
        train(tmp_path / "run", task(), max_steps=steps, resume=steps > 2, **options)
    assert losses(tmp_path / "run") == losses(tmp_path / "whole")


class Logged(Regression):
    def initial_model(self):
        model = self.model()
        nn.init.zeros_(model[0].weight)
        nn.init.zeros_(model[0].bias)
        return model

    def loss(self, model, batch):
        total = (model(batch) - 1).square().sum()
        return brimful.Loss(sum=total, count=batch.numel(), log={"rows": float(len(batch))})


def test_the_initial_model_is_where_training_begins_and_extra_values_are_logged(tmp_path):
    train(tmp_path / "run", Logged(), max_steps=1)
    (step,) = last_steps(read_events(tmp_path / "run" / "events.jsonl"))
    assert step["loss"] == 1.0
    assert step["log"] == {"rows": 8.0}


class Broken(runs.Run):
    """Reads no rows from one of its files."""

    def __init__(self, broken, error):
        super().__init__()
        self.broken, self.error = broken, error

    def rows(self, data):
        return super().rows(data) if data != self.broken else self.error()


class NoLength:
    def __len__(self):
        raise KeyError("length")


def no_such_key():
    return {}["text"]


@pytest.mark.parametrize("broken", ["rows", "others"])
@pytest.mark.parametrize(("error", "message"), [(no_such_key, "KeyError: 'text'"), (NoLength, "KeyError: 'length'")])
def test_rows_that_cannot_be_read_are_one_message(tmp_path, broken, error, message):
    with pytest.raises(TaskError, match=f"rows.* {broken}.*: {message}"):
        brimful.train(Broken(broken, error), "rows", valid="others", run=tmp_path / "run", device="cpu")


def test_a_call_is_one_process(tmp_path):
    with pytest.raises(BadOption, match="processes=2 .*torchrun --nproc-per-node 2"):
        train(tmp_path / "run", processes=2)
    assert not (tmp_path / "run").exists()


def test_a_run_is_not_trained_over(whole):
    with pytest.raises(BadRun, match="already has a run in it"):
        train(whole)


def test_data_need_not_be_a_path(tmp_path):
    """A task may read whatever words it likes. They have no place, so a resumed run is given them again."""
    assert _place(tmp_path, "word " * 1000) is None


def test_the_code_of_the_training_guide_runs(tmp_path, monkeypatch, capsys):
    guide = (Path(__file__).parents[2] / "docs" / "train.md").read_text(encoding="utf-8")
    task, call = re.findall(r"```python\n(.*?)```", guide, re.DOTALL)
    (tmp_path / "mine.py").write_text(task)
    for name, count in (("rows.jsonl", 40), ("valid.jsonl", 8)):
        lines = (json.dumps({"prompt": "words " * (1 + number % 5)}) for number in range(count))
        (tmp_path / name).write_text("\n".join(lines))
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    exec(compile(call.replace("max_steps=20", "max_steps=2, memory_limit='64MiB'"), "train.md", "exec"), {})
    sys.modules.pop("mine")
    assert "finished 2" in capsys.readouterr().out


def test_the_keywords_of_train_are_the_fields_of_its_options():
    """With the same defaults and, but for paths and data in memory, the same types."""
    hints, signature = get_type_hints(brimful.train), inspect.signature(brimful.train)
    own, wider = {"task", "data", "quiet", "hooks", "listeners", "progress"}, {"valid", "run", "plan"}
    keywords = {name: one.default for name, one in signature.parameters.items() if name not in own}
    options = {one.name: (owner, one.default) for owner in (TrainOptions, PlanOptions) for one in fields(owner)}
    assert keywords == {name: default for name, (_, default) in options.items()}
    for name in keywords.keys() - wider:
        assert hints[name] == get_type_hints(options[name][0])[name], name


class Tokenizer:
    def save_pretrained(self, folder):
        Path(folder, "tokenizer.json").write_text("{}")


class WithTokenizer(Regression):
    tokenizer = Tokenizer()


def test_a_tasks_tokenizer_is_saved_with_the_model(tmp_path):
    train(tmp_path / "run", WithTokenizer())
    assert (tmp_path / "run" / "model" / "tokenizer.json").read_text() == "{}"


def test_plan_and_progress_are_shown_unless_quiet(tmp_path, capfd):
    train(tmp_path / "shown")
    shown = capfd.readouterr()
    assert "micro batch" in shown.err and "step 3/3" in shown.err and shown.out == ""
    train(tmp_path / "quiet", quiet=True)
    assert capfd.readouterr() == ("", "")


def test_a_plan_is_shown_unless_quiet(capfd):
    for quiet, printed in ((False, True), (True, False)):
        brimful.plan(Regression(), data=ROWS, device="cpu", cache=False, quiet=quiet)
        assert ("micro batch" in capfd.readouterr().err) is printed


def test_the_plan_names_the_schedule_in_effect(tmp_path, whole):
    def schedule(folder):
        choice = Plan.load(folder / "plan.json").choice("schedule")
        return choice.requested, choice.effective

    assert schedule(whole) == (None, "cosine")
    assert "learning rate" in Plan.load(whole / "plan.json").choice("schedule").reason
    train(tmp_path / "requested", max_steps=1, schedule="linear")
    assert schedule(tmp_path / "requested") == ("linear", "linear")
    train(tmp_path / "own", Scheduled(), max_steps=1, schedule="linear")
    assert schedule(tmp_path / "own") == ("linear", "the task's own")


@pytest.mark.parametrize(
    ("method", "result", "message"),
    [
        ("schedule", KeyError("rate"), r"schedule\(\) failed at .*test_session.py:\d+: KeyError: 'rate'\."),
        ("schedule", 3, r"schedule\(\) returned an int. Try: return a torch LRScheduler"),
        ("initial_model", KeyError("path"), r"initial_model\(\) failed at .*test_session.py:\d+: KeyError: 'path'\."),
        ("initial_model", 5, r"initial_model\(\) returned an int. Try: return a torch.nn.Module"),
    ],
)
def test_a_failing_method_of_the_task_is_one_message(tmp_path, method, result, message):
    def fail(self, *_):
        if isinstance(result, Exception):
            raise result
        return result

    with pytest.raises(TaskError, match=message):
        train(tmp_path, type("Own", (Regression,), {method: fail})())


def test_a_loss_that_fails_in_the_middle_of_a_run_is_one_message(tmp_path):
    done = []

    class Late(Regression):
        def loss(self, model, batch):
            if done:
                raise RuntimeError("late")
            return super().loss(model, batch)

    class Count(brimful.Hook):
        def after_step(self, loop, result):
            done.append(result)

    with pytest.raises(TaskError, match=r"loss\(\) failed at .*test_session.py:\d+: RuntimeError: late\."):
        train(tmp_path, Late(), hooks=[Count()])
    assert len(done) == 1
    assert list(read_events(tmp_path / "events.jsonl"))[-1]["repeats"] is True


class Reads(Rows):
    """Counts the rows that were read."""

    count = 0

    def __getitem__(self, index):
        self.count += 1
        return super().__getitem__(index)


def test_the_next_rows_are_read_within_a_step_and_do_not_count_as_trained_on(tmp_path):
    rows, seen = Reads(), []

    class Look(brimful.Hook):
        def before(self, loop):
            rows.count = 0  # without what was read to plan

        def after_step(self, loop, result):
            seen.append((rows.count // result.rows, loop.loader.samples // result.rows))

    train(tmp_path, data=rows, hooks=[Look()], workers=0)
    assert seen == [(2, 1), (3, 2), (3, 3)], "steps read and steps trained on; after the last nothing is read"


def test_rows_that_cannot_be_read_ahead_end_the_run_after_the_step_that_was_running(tmp_path):
    done = []

    class Breaks(Reads):
        def __getitem__(self, index):
            if done:
                raise KeyError("x")
            return super().__getitem__(index)

    class Look(brimful.Hook):
        def after_step(self, loop, result):
            done.append(loop.step)

    with pytest.raises(TaskError, match=r"row \d+ of the dataset cannot be read"):
        train(tmp_path, data=Breaks(), hooks=[Look()], workers=0)
    newest = max((tmp_path / "checkpoints").glob("step-*"))
    assert done == [1, 2] and newest.name == "step-00000002"


def test_resuming_a_finished_run_says_that_it_is_finished(tmp_path):
    train(tmp_path, max_steps=1)
    assert RunFolder(tmp_path).ending()["sentence"] == "trained 1 step"
    train(tmp_path, max_steps=1, resume=True)
    assert RunFolder(tmp_path).ending()["sentence"] == "already finished: 1 step"


def test_steps_that_were_skipped_to_the_end_are_in_the_last_sentence(tmp_path):
    rows = [*ROWS[:23], torch.full((4,), float("inf"))]
    train(tmp_path, data=rows, global_batch=24, max_steps=2)
    assert RunFolder(tmp_path).ending()["sentence"] == "trained 2 steps, and skipped the last 2 for NaN or inf"


def test_lengths_for_rows_without_lengths_are_refused(tmp_path):
    with pytest.raises(BadOption, match=r"lengths=\(3,\) cannot be used, because the rows of task Regression have no"):
        train(tmp_path, lengths=(3,))


def test_data_that_is_refused_leaves_no_folder(tmp_path):
    class Refused(runs.Run):
        def rows(self, data):
            raise FileNotFoundError(data)

    with pytest.raises(TaskError, match=r"rows\(\) failed on no/such"):
        brimful.train(Refused(), "no/such", run=tmp_path / "runs" / "new", device="cpu")
    assert not list(tmp_path.iterdir())


def test_the_plan_says_which_file_an_option_comes_from(tmp_path):
    options = {"max_steps": 1, "micro_batch": 8, "device": "cpu", "cache": False}
    request = Request(
        task="regression", data=None, run=str(tmp_path / "run"), options=options, origins={"max_steps": "recipe small"}
    )
    Session(task=Regression(), data=ROWS, request=request).train()
    plan = Plan.load(tmp_path / "run" / "plan.json")
    assert plan.choice("steps").reason.startswith("set in recipe small; ")
    assert "set in" not in plan.choice("micro_batch").reason


def plan_events(folder):
    return [event for event in read_events(folder / "events.jsonl") if event["event"] == "plan"]


def warnings(folder):
    events = read_events(folder / "events.jsonl")
    return [event["sentence"] for event in events if event["event"] == "note" and event.get("level") == "warning"]


def test_a_run_keeps_its_plan_with_its_predicted_time(whole):
    (event,) = plan_events(whole)
    assert (event["number"], event["experiment"], event["changes"]) == (1, "new", [])
    assert event["run_time"]["steps"] == 4 and event["run_time"]["steps_per_epoch"] == 3
    assert event["run_time"]["total_s"] == pytest.approx(4 * event["run_time"]["step_s"])
    assert Plan.load(whole / "plan.json") == Plan.load(whole / "plans" / "0001.json") == Plan.from_json(event)


def test_warnings_of_a_plan_are_notes_too(whole):
    assert warnings(whole) == list(Plan.load(whole / "plan.json").warnings)
    assert warnings(whole)[0].startswith("the run has only 4 updates")


def test_a_global_batch_that_exceeds_the_rows_is_a_warning_of_the_run(tmp_path):
    train(tmp_path / "run", global_batch=25)
    assert "the global batch of 25 rows exceeds the 24 rows of the data" in warnings(tmp_path / "run")[0]


def test_a_host_limit_that_was_lowered_is_a_warning_of_the_run(tmp_path):
    train(tmp_path / "run", host_limit="1000TiB", memory_limit="64MiB")
    assert warnings(tmp_path / "run")[0].startswith("host_limit= is 1000 TiB, and there are ")
    choice = Plan.load(tmp_path / "run" / "plan.json").choice("host_limit")
    assert choice.requested > choice.effective


CONSTANT = {"schedule": "constant", "warmup": 0, "workers": 0}


@pytest.fixture(scope="module")
def changed(tmp_path_factory):
    """A run with three plans: one, then smaller micro-batches, then another global batch and rate."""
    folder = tmp_path_factory.mktemp("plans") / "run"
    train(folder, max_steps=2, **CONSTANT)
    train(folder, max_steps=2, micro_batch=4, resume=True, **CONSTANT)
    train(folder, max_steps=4, micro_batch=4, global_batch=12, lr=0.01, resume=True, **CONSTANT)
    return folder


def test_a_resumed_run_records_what_changed_and_whether_it_is_another_experiment(changed):
    first, second, third = plan_events(changed)
    assert [one["number"] for one in (first, second, third)] == [1, 2, 3]
    assert second["changes"] == [
        {"name": "micro_batch", "old": 8, "new": 4},
        {"name": "accumulation", "old": 1, "new": 2},
    ]
    assert second["experiment"] == "same" and "up to rounding" in second["experiment_reasons"][0]
    assert third["experiment"] == "other" and third["number_before"] == 2
    assert third["experiment_reasons"] == [
        "a step has 12 rows instead of 8",
        "the optimizer is adamw at 0.01 instead of adamw at 0.0001",
    ]


def test_a_run_that_is_resumed_as_it_was_keeps_its_plan_and_repeats_no_warning(tmp_path):
    for steps in (2, 3):
        train(tmp_path / "run", max_steps=steps, resume=steps > 2, **CONSTANT)
    train(tmp_path / "run", max_steps=3, resume=True, **CONSTANT)
    assert [(one["number"], one["experiment"], len(one["changes"])) for one in plan_events(tmp_path / "run")] == [
        (1, "new", 0),
        (1, "same", 1),
        (1, "same", 0),
    ]
    assert len(warnings(tmp_path / "run")) == 2


def test_a_longer_cosine_is_another_experiment(tmp_path):
    for steps in (2, 4):
        train(tmp_path / "run", max_steps=steps, resume=steps > 2)
    assert plan_events(tmp_path / "run")[1]["experiment_reasons"] == [
        "so far the learning rate followed another curve (steps)"
    ]


def test_a_run_goes_back_to_an_earlier_plan_and_its_options(changed, tmp_path):
    shutil.copytree(changed, tmp_path / "run")
    same = {"micro_batch": 4, "global_batch": 12, "lr": 0.01, **CONSTANT}
    train(tmp_path / "run", max_steps=5, rollback=True, **same)
    event = plan_events(tmp_path / "run")[-1]
    assert (event["global_batch"], event["micro_batch"], event["experiment"]) == (8, 4, "other")
    request = json.loads((tmp_path / "run" / "run.json").read_text())
    assert "lr" not in request["options"] and request["options"]["max_steps"] == 5
    assert "rollback" not in request
    steps = last_steps(read_events(tmp_path / "run" / "events.jsonl"))
    assert [(step["rows"], step["lr"]) for step in steps[-2:]] == [(12, 0.01), (8, 1e-4)]


def test_a_run_goes_back_by_number(changed, tmp_path):
    shutil.copytree(changed, tmp_path / "run")
    train(tmp_path / "run", max_steps=4, micro_batch=4, global_batch=12, lr=0.01, rollback=2, **CONSTANT)
    event = plan_events(tmp_path / "run")[-1]
    assert (event["number_before"], event["micro_batch"], event["global_batch"]) == (3, 4, 8)


@pytest.mark.parametrize(
    ("rollback", "message"),
    [
        (9, r"has no plan 9. Try: rollback=1, 2 or 3"),
        (0, "rollback=0 must be the number"),
        ("x", "rollback='x' must be"),
    ],
)
def test_a_plan_that_is_not_there_cannot_be_gone_back_to(changed, rollback, message):
    with pytest.raises((BadRun, BadOption), match=message):
        train(changed, rollback=rollback)


def test_without_a_run_there_is_no_plan_to_go_back_to(tmp_path):
    with pytest.raises(BadRun, match="has no plan to go back to: there is no such folder. Try: run="):
        train(tmp_path / "run", rollback=True)
    assert not list(tmp_path.iterdir())


def dry_run(folder, task=None, data=ROWS, **options):
    options = {"max_steps": 3, "device": "cpu", "micro_batch": 8, "cache": False, **options}
    request = Request(task="regression", data=None, run=str(folder), options=options, dry_run="json")
    return Session(task=task or Regression(), data=data, request=request).dry_run()


def test_a_dry_run_gives_the_plan_that_training_would_begin_with(tmp_path, whole):
    found, event = dry_run(tmp_path / "run", max_steps=4), plan_events(whole)[0]
    assert [one["name"] for one in found["choices"]] == [one["name"] for one in event["choices"]]
    assert found["run_time"]["steps"] == 4 and found["host"]["predicted_bytes"] and found["experiment"] == "new"
    assert found["warnings"] == event["warnings"]


def test_a_dry_run_writes_nothing(tmp_path):
    dry_run(tmp_path / "run")
    assert not list((tmp_path / "run").iterdir())


def test_a_dry_run_finds_what_training_would_fail_with(tmp_path):
    class NoWeights(Regression):
        def initial_model(self):
            raise FileNotFoundError("weights.pt")

    with pytest.raises(TaskError, match=r"initial_model\(\) failed .*weights.pt"):
        dry_run(tmp_path / "run", NoWeights())


def test_a_dry_run_leaves_a_run_as_it_is(changed):
    def content():
        return {path: path.read_bytes() for path in changed.rglob("*") if path.is_file() and path.name != "lock"}

    before = content()
    options = {"max_steps": 8, "device": "cpu", "micro_batch": 4, "cache": False, "global_batch": 6, **CONSTANT}
    request = Request(task="regression", data=None, run=str(changed), resume=True, options=options, dry_run="table")
    found = Session(task=Regression(), data=ROWS, request=request).dry_run()
    assert found["experiment"] == "other" and {"name": "global_batch", "old": 12, "new": 6} in found["changes"]
    assert content() == before


class Prepared(Regression):
    limits: ClassVar[list] = []

    def prepare(self, data, folder, progress, like=None, name="train"):
        self.limits.append(self.host_limit_bytes)
        return data

    def rows(self, data):
        return ROWS


def test_the_host_limit_reaches_what_prepares_the_data(tmp_path):
    task = Prepared()
    train(tmp_path / "run", task, data="rows", valid="rows", host_limit="3GiB")
    train(tmp_path / "other", task, data="rows")
    assert task.limits == [3 * GiB, 3 * GiB, None]
    assert task.host_limit_bytes is None
