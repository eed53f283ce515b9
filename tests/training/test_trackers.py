"""Trackers hear of every step, and whatever becomes of them, the run does not wait and does not stop."""

import builtins
import json
import sys
import threading
import time
import types

import pytest
from accelerate.state import PartialState

from brimful.errors import BadOption, MissingExtra
from brimful.training import trackers as module
from brimful.training.events import Journal
from brimful.training.trackers import Tracker, open_trackers, scalars

END = {"event": "end", "step": 3, "reason": "finished"}


def step(number, **changes):
    return {"event": "step", "step": number, "loss": 2.0, **changes}


class Service:
    """A tracker as Accelerate has them, which remembers its calls and the threads they came from."""

    def __init__(self, fails_at=None, gate=None):
        self.calls, self.threads = [], set()
        self._fails_at, self._gate = fails_at, gate

    def _call(self, name, *args):
        self.threads.add(threading.current_thread().name)
        if name == self._fails_at:
            raise ConnectionError("the service is gone")
        if name == "log" and self._gate is not None:
            self._gate.wait(10)
        self.calls.append((name, *args))

    def start(self):
        print("welcome")
        self._call("start")

    def store_init_configuration(self, values):
        self._call("config", values)

    def log(self, values, step):
        self._call("log", values, step)

    def finish(self):
        print("goodbye")
        self._call("finish")


def tracker_of(service, tell=pytest.fail, config=None):
    return Tracker("fake", lambda: service, config or {}, tell)


def test_a_run_is_its_configuration_its_points_and_an_end():
    service = Service()
    tracker = tracker_of(service, config={"lr": 0.1})
    tracker(step(1))
    tracker({"event": "eval", "step": 1, "loss": 3.0, "bleu": 12.5, "best": True})
    tracker({"event": "note", "step": 1, "sentence": "not drawn"})
    tracker(END)
    assert service.calls == [
        ("start",),
        ("config", {"lr": 0.1}),
        ("log", {"train/loss": 2.0}, 1),
        ("log", {"eval/loss": 3.0, "eval/bleu": 12.5, "eval/best": 1.0}, 1),
        ("finish",),
    ]


def test_all_calls_come_from_one_thread_of_its_own():
    service = Service()
    tracker_of(service)(END)
    assert service.threads == {"tracker fake"}


def test_the_figures_of_a_step_are_drawn_by_name():
    event = step(5, terms={"words": 1.5}, lr=None, path="x", applied=False, grad_norm=None, grad_norm_is="inf")
    assert scalars(event) == {
        "train/loss": 2.0, "train/terms/words": 1.5, "train/applied": 0.0, "train/grad_norm": float("inf"),
    }  # fmt: skip


def test_the_configuration_is_one_level_of_numbers_and_text():
    service = Service()
    tracker_of(service, config={"plan": {"rows": 8, "shape": (3, 4)}, "resume": None, "on": True})(END)
    assert service.calls[1] == ("config", {"plan/rows": 8, "plan/shape": "(3, 4)", "on": True})


def test_a_slow_tracker_does_not_hold_up_the_run():
    gate = threading.Event()
    service = Service(gate=gate)
    tracker = tracker_of(service)
    for number in range(100):
        tracker(step(number))
    assert service.calls[2:] == []  # not one point is through, and we are here
    gate.set()
    tracker(END)
    assert [call[2] for call in service.calls if call[0] == "log"] == list(range(100))


def test_what_a_slow_tracker_cannot_hold_is_left_out_and_counted(monkeypatch):
    monkeypatch.setattr(module, "QUEUE_POINTS", 3)
    gate, told = threading.Event(), []
    tracker = tracker_of(Service(gate=gate), told.append)
    tracker.wait()
    for number in range(10):
        tracker(step(number))
        time.sleep(0.01)
    gate.set()
    tracker.close()
    assert told == ["fake was too slow for 6 points; events.jsonl has them"]


def test_the_end_waits_no_longer_than_it_may():
    gate, told = threading.Event(), []
    tracker = tracker_of(Service(gate=gate), told.append)
    for number in range(3):
        tracker(step(number))
    tracker.close(timeout_s=0.05)
    gate.set()
    tracker._thread.join(10)
    assert told[0].startswith("fake did not take ")
    assert "within 0.05 s" in told[0]


def test_a_tracker_that_does_not_start_in_time_is_told_of_and_keeps_its_points():
    gate, told, service = threading.Event(), [], Service()
    tracker = Tracker("fake", lambda: gate.wait(10) and service, {}, told.append)
    tracker.wait(0.01)
    tracker(step(1))
    gate.set()
    tracker.close()
    assert told == ["fake has not started within 0.01 s; training begins, and its points wait"]
    assert ("log", {"train/loss": 2.0}, 1) in service.calls


@pytest.mark.parametrize("where", ["start", "config", "log", "finish"])
def test_a_tracker_that_fails_is_told_of_once_and_switched_off(where):
    told = []
    tracker = tracker_of(Service(fails_at=where), told.append)
    for number in range(20):
        tracker(step(number))
    tracker(END)
    tracker.close()
    assert told == ["fake is switched off, training continues: ConnectionError: the service is gone"]


def test_a_tracker_that_is_off_gathers_nothing():
    tracker = tracker_of(Service(fails_at="start"), str)
    tracker.wait()
    tracker._thread.join(10)
    tracker(step(1))
    assert tracker._queue.empty()


def test_a_tracker_that_wants_to_leave_the_program_does_not(monkeypatch):
    told = []
    tracker = Tracker("fake", lambda: sys.exit(3), {}, told.append)
    tracker.wait()
    tracker.close()
    assert told == ["fake is switched off, training continues: SystemExit: 3"]


def test_a_tell_that_fails_is_logged(caplog):
    tracker = Tracker("fake", lambda: sys.exit(3), {}, lambda sentence: builtins.int(sentence))
    tracker.close()
    assert "fake is switched off" in caplog.text


def test_what_a_service_prints_goes_to_stderr(capsys):
    tracker_of(Service())(END)
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err == "welcome\ngoodbye\n"


def test_closing_twice_is_closing_once():
    service = Service()
    tracker = tracker_of(service)
    tracker(END)
    tracker.close()
    assert service.calls.count(("finish",)) == 1


def test_an_unknown_tracker_is_refused_with_those_there_are(tmp_path):
    with pytest.raises(BadOption, match="trackers=comet is unknown. Try: tensorboard, wandb, mlflow, trackio"):
        open_trackers(["tensorboard", "comet"], tmp_path, {}, print)


def test_a_package_that_is_missing_is_named_before_training(tmp_path, monkeypatch):
    monkeypatch.setattr(module, "find_spec", lambda name: None)
    with pytest.raises(MissingExtra, match=r"wandb is not installed. .*brimful\[trackers\]"):
        open_trackers(["wandb"], tmp_path, {}, print)


def test_nothing_asked_for_is_nothing_opened(tmp_path):
    assert open_trackers([], tmp_path, {}, print) == []


@pytest.fixture
def opened(monkeypatch, tmp_path):
    """Opens trackers whose service is faked."""
    services = []

    def start(run):
        services.append(Service())
        return services[-1]

    monkeypatch.setattr(module, "STARTS", {"fake": start})
    monkeypatch.setattr(module, "find_spec", lambda name: True)
    return lambda *names, **kwargs: (open_trackers(names, tmp_path, {}, pytest.fail, **kwargs), services)


def test_only_the_first_process_tracks(opened, monkeypatch):
    assert opened("fake", rank=1) == ([], [])
    monkeypatch.setenv("RANK", "1")
    assert opened("fake") == ([], [])


def test_a_tracker_asked_for_twice_is_opened_once(opened):
    trackers, services = opened("fake", "fake")
    trackers[0](END)
    assert len(services) == 1


def test_accelerates_state_is_not_called_up(opened, tmp_path):
    before = dict(PartialState._shared_state)
    trackers, services = opened("fake")
    trackers[0](END)
    assert services[0].main_process_only is False
    assert dict(PartialState._shared_state) == before


def fake_module(monkeypatch, name, **contents):
    fake = types.ModuleType(name)
    fake.__dict__.update(contents)
    monkeypatch.setitem(sys.modules, name, fake)
    monkeypatch.setattr(module, "find_spec", lambda name: True)
    return fake


class Run:
    """A run of wandb's or Trackio's."""

    def __init__(self):
        self.logged, self.finished = [], 0
        self.config = {}

    def log(self, values, step):
        self.logged.append((values, step))

    def finish(self):
        self.finished += 1


class Config(dict):
    def update(self, values, allow_val_change):
        super().update(values)


@pytest.mark.parametrize("name", ["wandb", "trackio"])
def test_wandb_and_trackio_go_on_with_the_run_they_know(name, monkeypatch, tmp_path):
    run, inits = Run(), []
    fake = fake_module(
        monkeypatch, name, init=lambda **given: inits.append(given) or run, config=Config(), setup=print, Settings=dict
    )
    for number in (1, 2):
        (tracker,) = open_trackers([name], tmp_path, {"lr": 0.1}, pytest.fail)
        tracker(step(number))
        tracker(END)
    assert run.logged == [({"train/loss": 2.0}, 1), ({"train/loss": 2.0}, 2)]
    assert (run.finished, fake.config) == (2, {"lr": 0.1})
    assert inits[0] == inits[1]
    assert inits[0]["resume"] == "allow"
    known = json.loads((tmp_path / "trackers.json").read_text())[name]
    assert known in (inits[0].get("id"), inits[0]["name"])


def test_wandb_asks_nothing_on_the_terminal(monkeypatch, tmp_path):
    order = []
    fake_module(
        monkeypatch, "wandb", Settings=dict, config=Config(), setup=lambda settings: order.append(settings["silent"]),
        init=lambda **given: order.append(given["settings"]["console"]) or Run(),
    )  # fmt: skip
    (tracker,) = open_trackers(["wandb"], tmp_path, {}, pytest.fail)
    tracker(END)
    assert order == [True, "off"]


def test_mlflow_writes_into_the_run_folder_and_goes_on_with_its_run(monkeypatch, tmp_path):
    calls = []
    fake = fake_module(
        monkeypatch, "mlflow",
        set_tracking_uri=lambda uri: calls.append(("uri", uri)),
        search_experiments=lambda filter_string: [], create_experiment=lambda **given: "7",
        start_run=lambda **given: calls.append(("run", given["run_id"])) or types.SimpleNamespace(info=types.SimpleNamespace(run_id="abc")),
        log_params=lambda values: calls.append(("params", values)),
        log_metrics=lambda values, step: calls.append(("metrics", values, step)),
        end_run=lambda: calls.append(("end",)),
    )  # fmt: skip
    fake.utils = types.SimpleNamespace(
        validation=types.SimpleNamespace(MAX_PARAM_VAL_LENGTH=500, MAX_PARAMS_TAGS_PER_BATCH=100)
    )
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    for _ in range(2):
        (tracker,) = open_trackers(["mlflow"], tmp_path, {"lr": 0.1, "long": "x" * 501}, pytest.fail)
        tracker(step(1))
        tracker(END)
    assert [call[1] for call in calls if call[0] == "run"] == [None, "abc"]
    assert calls[0] == ("uri", f"sqlite:///{tmp_path}/mlflow.db")
    assert ("params", {"lr": 0.1}) in calls
    assert ("metrics", {"train/loss": 2.0}, 1) in calls


def test_a_servers_address_for_mlflow_is_kept(monkeypatch, tmp_path):
    told = []
    fake_module(monkeypatch, "mlflow", set_tracking_uri=pytest.fail)
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "http://server")
    open_trackers(["mlflow"], tmp_path, {}, told.append)
    assert "search_experiments" in told[0]  # it went on to ask that server


def test_a_damaged_list_of_names_is_one_sentence(monkeypatch, tmp_path):
    (tmp_path / "trackers.json").write_text("{")
    fake_module(monkeypatch, "wandb", setup=print, Settings=dict)
    told = []
    open_trackers(["wandb"], tmp_path, {}, told.append)
    assert "trackers.json cannot be used" in told[0]
    assert "remove it to begin new curves" in told[0]


def test_tensorboard_for_real(tmp_path):
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    trackers = open_trackers(["tensorboard"], tmp_path, {"lr": 0.1, "plan": {"rows": 8}}, pytest.fail)
    journal = Journal(tmp_path / "events.jsonl", trackers)
    for number in (1, 2, 3):
        journal.write("step", step=number, loss=float(number), mfu=None)
    journal.write("eval", step=3, loss=0.5, bleu=11.0)
    journal.write("end", step=3, reason="finished")
    seen = EventAccumulator(str(tmp_path / "tensorboard")).Reload()
    assert [(point.step, point.value) for point in seen.Scalars("train/loss")] == [(1, 1.0), (2, 2.0), (3, 3.0)]
    assert seen.Scalars("eval/bleu")[0].value == 11.0
    assert "train/mfu" not in seen.Tags()["scalars"]
    (config,) = (tmp_path / "tensorboard").glob("*/hparams.yml")
    assert "plan/rows: 8" in config.read_text()
