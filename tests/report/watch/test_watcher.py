"""Which run is watched, whether it goes on, and what NVML adds."""

import json
import os
import shutil
import socket
from datetime import UTC, datetime, timedelta
from types import SimpleNamespace

import pytest

from brimful.errors import BadRun
from brimful.machine.gpu import NvmlCard
from brimful.report.watch.run_snapshot import Card
from brimful.report.watch.watcher import LiveGpus, Watcher
from brimful.training.events import FORMAT
from brimful.units import GiB
from tests.report.fake_runs import START, step_event, write_run

ENDED_PID = 2**22 + 1


def append(folder, event, **values):
    with (folder / "events.jsonl").open("a", encoding="utf-8") as file:
        file.write(json.dumps({"event": event, "time": "2026-01-31T09:30:00.000Z", **values}) + "\n")


def sign(folder, *, pid=None, since="2026-01-31 09:00:00+00:00", at=None):
    """As a process does that begins to train there; `at` is when, in seconds."""
    folder.mkdir(parents=True, exist_ok=True)
    content = {"pid": os.getpid() if pid is None else pid, "host": socket.gethostname(), "since": since}
    (folder / "lock").write_text(json.dumps(content))
    if at is not None:
        os.utime(folder / "lock", (at, at))
    return folder


def begun(folder, at, **values):
    """A run whose lock was signed at this time."""
    write_run(folder, **{"steps": 3, **values})
    os.utime(folder / "lock", (at, at))
    return folder


def content_of(folder):
    return {path: (path.stat().st_mtime_ns, path.read_bytes()) for path in folder.rglob("*") if path.is_file()}


def test_a_run_that_trains_is_seen_step_by_step(tmp_path):
    folder = write_run(tmp_path / "a", steps=10, done=3, running=True)
    with Watcher(folder) as watcher:
        assert (watcher.look().state, watcher.look().step) == ("running", 3)
        append(folder, **step_event(4, steps=10))
        assert watcher.look().step == 4


def test_watching_changes_nothing_in_the_folder(tmp_path):
    folder = write_run(tmp_path / "a", steps=10, done=3, running=True)
    before = content_of(folder)
    with Watcher(folder) as watcher:
        watcher.look()
        watcher.look()
    assert content_of(folder) == before


def test_an_ended_run_is_the_same_snapshot_until_it_is_resumed(tmp_path):
    folder = write_run(tmp_path / "a", steps=10, done=5, end="interrupted")
    with Watcher(folder) as watcher:
        ended = watcher.look()
        assert ended.state == "interrupted" and watcher.look() is ended
        sign(folder, since="2026-01-31 09:20:00+00:00")
        assert watcher.look().state == "preparing"
        append(folder, "begin", step=5, steps=10, processes=1, format=FORMAT)
        append(folder, "resume", step=5, sentence="continuing after step 5")
        assert watcher.look().state == "running"


def test_the_process_that_ended_a_run_may_live_on(tmp_path):
    folder = write_run(tmp_path / "a", steps=3, end="finished")
    sign(folder, since="2026-01-31 09:00:00+00:00")  # as in a notebook
    with Watcher(folder) as watcher:
        assert watcher.look().state == "finished"


def test_a_run_whose_process_is_gone_was_killed(tmp_path):
    with Watcher(write_run(tmp_path / "a", steps=10, done=3, end=None)) as watcher:
        assert watcher.look().state == "killed"


def test_a_folder_with_nothing_but_a_lock_is_being_prepared(tmp_path):
    folder = sign(tmp_path / "a")
    (folder / "log.txt").write_text("09:00:01 reading rows.jsonl\n09:00:05 tokenizing 512 of 24,000 rows\n")
    with Watcher(folder) as watcher:
        waiting = watcher.look()
        assert (waiting.state, waiting.since) == ("preparing", START)
        assert waiting.notes[-1].sentence == "09:00:05 tokenizing 512 of 24,000 rows"
        write_run(folder, steps=10, done=2, running=True)
        assert (watcher.look().state, watcher.look().step) == ("running", 2)


def test_a_line_of_the_log_has_its_time_apart(tmp_path):
    folder = sign(tmp_path / "a")
    (folder / "log.txt").write_text("2026-01-31 09:00:05+00:00 tokenizing 512 of 24,000 rows\n")
    with Watcher(folder) as watcher:
        note = watcher.look().notes[-1]
    assert (note.time, note.sentence) == (START + timedelta(seconds=5), "tokenizing 512 of 24,000 rows")


def test_a_run_without_its_events_says_so(tmp_path):
    run = write_run(tmp_path / "a", steps=10, checkpoints=[5])
    (run / "events.jsonl").unlink()
    with Watcher(run) as watcher:
        assert "events.jsonl is missing" in str(watcher.look().sentence)


def test_a_preparation_that_fails_is_told(tmp_path):
    folder = sign(tmp_path / "a")
    with Watcher(folder) as watcher:
        watcher.look()
        sign(folder, pid=ENDED_PID)
        ended = watcher.look()
        assert (ended.state, ended.sentence) == ("failed", "it ended before its first step")
        assert watcher.look() is ended


def test_a_folder_that_is_removed_is_told(tmp_path):
    folder = write_run(tmp_path / "a", steps=10, done=3, running=True)
    with Watcher(folder) as watcher:
        watcher.look()
        shutil.rmtree(folder)
        assert (watcher.look().state, watcher.look().step) == ("gone", 3)


def test_the_run_begun_last_is_followed_and_a_newer_one_is_told(tmp_path):
    begun(tmp_path / "old", 100)
    begun(tmp_path / "now", 200)
    with Watcher(runs=tmp_path) as watcher:
        assert (watcher.look().name, watcher.look().switched_from) == ("now", None)
        append(tmp_path / "old", "note", step=3, sentence="an older run still writes")
        assert watcher.look().name == "now"
        begun(tmp_path / "new", 300)
        assert (watcher.look().name, watcher.look().switched_from) == ("new", str(tmp_path / "now"))


def test_a_newer_run_is_followed_while_it_is_prepared(tmp_path):
    begun(tmp_path / "now", 200, steps=7)
    with Watcher(runs=tmp_path) as watcher:
        watcher.look()
        sign(tmp_path / "next", at=300)
        following = watcher.look()
        assert (following.name, following.state, following.step, following.cards) == ("next", "preparing", 0, ())


def test_a_named_run_is_not_left_for_a_newer_one(tmp_path):
    named = begun(tmp_path / "now", 200)
    with Watcher(named, runs=tmp_path) as watcher:
        begun(tmp_path / "new", 300)
        assert watcher.look().name == "now"


def test_a_newer_run_that_cannot_be_read_leaves_the_view_as_it_is(tmp_path):
    begun(tmp_path / "now", 200)
    with Watcher(runs=tmp_path) as watcher:
        newer = begun(tmp_path / "new", 300)
        (newer / "events.jsonl").write_text(json.dumps({"event": "begin", "step": 0, "format": FORMAT + 1}) + "\n")
        seen = watcher.look()
        assert seen.name == "now" and "newer Brimful" in watcher.look().problem


def test_a_half_written_folder_does_not_hide_the_others(tmp_path):
    begun(tmp_path / "good", 100)
    sign(tmp_path / "half", pid=ENDED_PID, at=200)
    with Watcher(runs=tmp_path) as watcher:
        assert watcher.look().name == "good"


def test_when_the_followed_run_is_removed_the_one_before_it_is_shown(tmp_path):
    begun(tmp_path / "now", 200)
    sign(tmp_path / "next", at=300)
    with Watcher(runs=tmp_path) as watcher:
        assert watcher.look().name == "next"
        shutil.rmtree(tmp_path / "next")
        assert (watcher.look().name, watcher.look().switched_from) == ("now", None)


def test_other_runs_that_train_are_named(tmp_path):
    other = begun(tmp_path / "other", 100)
    sign(other, at=100)
    begun(tmp_path / "now", 200)
    with Watcher(runs=tmp_path) as watcher:
        assert watcher.look().also_running == (str(other),)


@pytest.mark.parametrize("name", ["missing", "empty", "file", "new 版本"])
def test_what_is_no_run_is_refused_in_one_sentence(tmp_path, name):
    (tmp_path / "empty").mkdir()
    (tmp_path / "file").write_text("x")
    newer = begun(tmp_path / "new 版本", 1)
    (newer / "events.jsonl").write_text(json.dumps({"event": "begin", "step": 0, "format": FORMAT + 1}) + "\n")
    with pytest.raises(BadRun, match="Try: "):
        Watcher(tmp_path / name)


def test_without_runs_there_is_nothing_to_watch(tmp_path):
    with pytest.raises(BadRun, match="has no run"):
        Watcher(runs=tmp_path / "runs")


class FakeCards:
    """NVML with these cards."""

    def __init__(self, *cards):
        self._cards = list(cards)

    def cards(self):
        return self._cards


def nvml_card(index, *, uuid=None, used=10 * GiB, processes=None, **values):
    figures = {"utilization": 0.5, "temperature_c": 60.0, "power_w": 200.0, **values}
    return NvmlCard(index=index, uuid=uuid, free_bytes=20 * GiB - used, processes=processes, **figures)


def card(rank, **values):
    return Card(label=f"GPU {rank}", rank=rank, **{"kind": "cuda", "total_bytes": 20.0 * GiB, "others_bytes": 7.0, "utilization": 0.9, **values})  # fmt: skip


def live(cards, *states, pids=(4711,)):
    gpus = LiveGpus(FakeCards(*states), lambda: datetime.now(UTC))
    return gpus.update(tuple(cards), pids)


def test_nvml_gives_newer_figures_of_the_card_that_the_run_holds():
    idle = nvml_card(0, uuid="GPU-aa", processes={1: GiB})
    busy = nvml_card(1, uuid="GPU-bb", used=12 * GiB, processes={4711: 9 * GiB, 5: 3 * GiB})
    (one,) = live([card(0, uuid="bb")], idle, busy)
    assert (one.utilization, one.temperature_c, one.power_w, one.live) == (0.5, 60.0, 200.0, True)
    assert (one.held_bytes, one.others_bytes) == (9 * GiB, 3 * GiB)


def test_cards_are_matched_by_uuid_whatever_their_order():
    states = nvml_card(0, uuid="GPU-aa", utilization=0.1), nvml_card(1, uuid="GPU-bb", utilization=0.2)
    first, second = live([card(0, uuid="bb"), card(1, uuid="aa")], *states)
    assert (first.utilization, second.utilization) == (0.2, 0.1)


def test_cards_on_another_machine_keep_what_the_run_sampled():
    cards = [card(0, uuid="aa"), card(1, uuid="cc")]
    here, there = live(cards, nvml_card(0, uuid="GPU-aa"), nvml_card(1, uuid="GPU-bb", processes={4711: GiB}))
    assert (here.live, there) == (True, cards[1])


def test_cards_without_a_uuid_keep_what_the_run_sampled():
    (one,) = live([card(0)], nvml_card(0, uuid="GPU-aa", processes={4711: GiB}))
    assert one == card(0)


def test_where_pids_are_hidden_the_memory_of_others_stays_as_sampled():
    (one,) = live([card(0, uuid="aa")], nvml_card(0, uuid="GPU-aa", processes={}))
    assert (one.utilization, one.others_bytes) == (0.5, 7.0)


def test_what_nvml_does_not_tell_stays_as_sampled():
    (one,) = live([card(0, uuid="aa")], nvml_card(0, uuid="GPU-aa", utilization=None, power_w=None))
    assert (one.utilization, one.temperature_c, one.power_w) == (0.9, 60.0, None)


def test_a_run_on_the_cpu_does_not_get_the_figures_of_a_card():
    (one,) = live([card(0, kind="cpu")], nvml_card(0))
    assert one == card(0, kind="cpu")


def test_nvml_is_asked_about_a_run_on_this_machine_only(tmp_path, monkeypatch):
    from brimful.report.watch import watcher as module

    asked = []

    class Session:
        def __enter__(self):
            asked.append(True)
            return FakeCards(nvml_card(0, uuid="GPU-uuid-0", processes={}, temperature_c=55.0))

        def __exit__(self, *_): ...

    monkeypatch.setattr(module, "open_nvml", Session)
    here = write_run(tmp_path / "here", steps=10, done=3, running=True)
    with Watcher(here) as watcher:
        assert watcher.look().cards[0].temperature_c == 55.0
    asked.clear()
    there = write_run(tmp_path / "there", steps=10, done=3, running=True)
    (there / "lock").write_text(json.dumps({"pid": 1, "host": "elsewhere", "since": "2026-01-31 09:00:00"}))
    with Watcher(there) as watcher:
        assert watcher.look().cards[0].temperature_c == 71 and not asked
    with Watcher(write_run(tmp_path / "ended", steps=3)) as watcher:
        assert watcher.look().cards[0].temperature_c == 71 and not asked


def test_looking_again_reads_the_pids_of_the_run_rarely(monkeypatch):
    from brimful.report.watch import watcher as module

    asked = []
    monkeypatch.setattr(module, "tree", lambda pid: asked.append(pid) or [pid])
    times = iter([START + timedelta(seconds=seconds) for seconds in (0, 0, 1, 2, 30, 30)])
    gpus = LiveGpus(FakeCards(nvml_card(0, processes={4711: GiB})), lambda: next(times))
    for _ in range(4):
        gpus.update((card(0),), [4711])
    assert len(asked) == 2


def test_a_card_of_nvml_has_what_it_answers(monkeypatch):
    import sys

    from brimful.machine.gpu import open_nvml

    class NVMLError(Exception):
        pass

    def refuse(*_):
        raise NVMLError("Not Supported")

    handle = object()
    module = SimpleNamespace(
        NVMLError=NVMLError, nvmlInit=lambda: None, nvmlShutdown=lambda: None, nvmlDeviceGetCount=lambda: 1,
        nvmlDeviceGetHandleByIndex=lambda _: handle, nvmlDeviceGetMemoryInfo=lambda _: SimpleNamespace(total=9, free=4, used=5),
        nvmlDeviceGetUtilizationRates=lambda _: SimpleNamespace(gpu=37, memory=2), nvmlDeviceGetTemperature=lambda *_: 66,
        nvmlDeviceGetPowerUsage=refuse, nvmlDeviceGetUUID=lambda _: "GPU-aa",
        nvmlDeviceGetComputeRunningProcesses=lambda _: [SimpleNamespace(pid=7, usedGpuMemory=3)], nvmlDeviceGetGraphicsRunningProcesses=refuse,
    )  # fmt: skip
    monkeypatch.setitem(sys.modules, "pynvml", module)
    with open_nvml() as nvml:
        (one,) = nvml.cards()
        assert nvml.notes == []
    assert one == NvmlCard(index=0, uuid="GPU-aa", free_bytes=4, utilization=0.37, temperature_c=66.0, power_w=None, processes={7: 3})  # fmt: skip
