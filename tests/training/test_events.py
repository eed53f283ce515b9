"""The journal: whole lines whatever happens to the process, training whatever happens to the journal."""

import json
import logging
import math
import os
import re
import resource
import signal
import subprocess
import sys
import time
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest
import torch

from brimful.errors import BadRun
from brimful.step.result import Event
from brimful.training import events as module
from brimful.training.events import Journal, last_steps, number, read_events


@contextmanager
def disk_of(size_bytes: int):
    """A disk on which no file grows beyond this size: the line that meets the end is cut in the middle."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size_bytes, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


@pytest.fixture
def path(tmp_path):
    return tmp_path / "events.jsonl"


def events_of(path):
    return list(read_events(path))


def steps_of(path):
    return [event.get("step") for event in read_events(path)]


def test_an_event_is_one_line_with_its_kind_and_time_first(path):
    Journal(path).write("step", step=1, loss=2.5)
    line = path.read_text()
    assert line.endswith("\n")
    assert list(json.loads(line)) == ["event", "time", "step", "loss"]


def test_the_time_is_utc_to_the_millisecond(path):
    Journal(path).write("note")
    assert re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}Z", events_of(path)[0]["time"])


def test_an_event_of_the_stepper_is_written_as_it_is(path):
    event = Event(event="oom", step=3, sentence="out of memory", details={"rows": 8})
    Journal(path).write(**event.to_json())
    assert events_of(path)[0].items() >= event.to_json().items()


def test_a_line_is_appended_by_a_single_write(path, monkeypatch):
    written = []
    real = os.write
    monkeypatch.setattr(os, "write", lambda file, data: written.append(data) or real(file, data))
    Journal(path).write("step", step=1)
    assert len(written) == 1
    assert path.read_bytes() == written[0]


def test_a_second_journal_goes_on_where_the_first_ended(path):
    for step in (1, 2):
        Journal(path).write("step", step=step)
    assert steps_of(path) == [1, 2]


@pytest.mark.parametrize(("value", "word"), [(math.nan, "nan"), (math.inf, "inf"), (-math.inf, "-inf")])
def test_what_is_not_a_number_is_null_and_says_what_it_was(path, value, word):
    Journal(path).write("step", step=1, loss=value, terms={"tokens": value})
    event = json.loads(path.read_text(), parse_constant=pytest.fail)
    assert (event["loss"], event["loss_is"]) == (None, word)
    assert event["terms"] == {"tokens": None, "tokens_is": word}
    assert str(number(event, "loss")) == word


def test_what_is_not_a_number_in_a_list_is_null(path):
    Journal(path).write("deal", speeds=[1.0, math.nan])
    assert events_of(path)[0]["speeds"] == [1.0, None]


@pytest.mark.parametrize(
    ("event", "value"), [({"loss": 2}, 2.0), ({"loss": None}, None), ({}, None), ({"loss": "2"}, None)]
)
def test_a_figure_that_is_unknown_is_none(event, value):
    assert number(event, "loss") == value


def test_values_of_numpy_and_torch_and_paths_are_written_plainly(path):
    Journal(path).write(
        "note", a=np.float32(0.5), b=torch.tensor(3), c=Path("x"), d=(1, 2), e={7: True}, f=torch.float32
    )
    assert events_of(path)[0].items() >= {
        "a": 0.5, "b": 3, "c": "x", "d": [1, 2], "e": {"7": True}, "f": "torch.float32",
    }.items()  # fmt: skip


def test_a_sentence_in_chinese_stays_readable_and_a_broken_name_does_no_harm(path):
    Journal(path).write("note", sentence="显存不足 \udcff")
    assert "显存不足 ?" in path.read_text()


def test_a_listener_hears_what_a_reader_will_read(path):
    heard = []
    Journal(path, [heard.append]).write("step", step=1, loss=math.nan, shape=(3, 4))
    assert heard == events_of(path)


def test_without_a_path_the_listeners_still_hear():
    heard = []
    Journal(None, [heard.append]).write("step", step=1)
    assert heard[0]["step"] == 1


def test_a_listener_that_fails_is_told_of_once_and_again_when_it_works(path, caplog):
    trouble = iter((True, True, False, False, True))

    def view(_):
        if next(trouble):
            raise ValueError("no terminal")

    journal = Journal(path, [view])
    with caplog.at_level(logging.WARNING, "brimful"):
        for step in range(5):
            journal.write("step", step=step)
    assert [" works again" in message for message in caplog.messages] == [False, True, False]
    assert "view failed (ValueError: no terminal); training continues" in caplog.messages[0]
    assert steps_of(path) == [0, 1, 2, 3, 4]


def test_a_listener_that_fails_does_not_keep_the_next_from_hearing(path):
    heard = []
    Journal(path, [lambda _: 1 / 0, heard.append]).write("note")
    assert len(heard) == 1


def test_a_listener_cannot_change_what_the_next_one_hears():
    heard = []
    Journal(None, [lambda event: event.clear(), heard.append]).write("step", step=1)
    assert heard[0]["step"] == 1


def test_an_event_whose_value_has_no_text_is_left_out_and_told_of(path, caplog):
    class Broken:
        def __str__(self):
            raise RuntimeError("no text")

    journal = Journal(path)
    journal.write("note", what=Broken())
    journal.write("step", step=1)
    assert steps_of(path) == [1]
    assert caplog.messages == ["event 'note' failed (RuntimeError: no text); training continues, it is skipped"]


def test_lines_that_met_a_full_disk_are_written_when_it_has_room(path, caplog):
    journal = Journal(path)
    journal.write("step", step=1)
    with disk_of(path.stat().st_size + 20):
        for step in (2, 3):
            journal.write("step", step=step)
        assert path.stat().st_size == resource.getrlimit(resource.RLIMIT_FSIZE)[0]  # half of a line is there
        assert steps_of(path) == [1]
    journal.write("step", step=4)
    assert steps_of(path) == [1, 2, 3, 4]
    assert ["only part of a line was written" in message for message in caplog.messages] == [True, False]
    assert "works again: 3 waiting lines were written, 0 are lost" in caplog.messages[1]


def test_closing_tries_once_more_what_could_not_be_written(path):
    journal = Journal(path)
    with disk_of(0):
        journal.write("end")
    assert events_of(path) == []
    journal.close()
    assert [event["event"] for event in events_of(path)] == ["end"]


def test_a_folder_that_appears_later_gets_all_lines(tmp_path):
    path = tmp_path / "later" / "events.jsonl"
    journal = Journal(path)
    journal.write("step", step=1)
    path.parent.mkdir()
    journal.write("step", step=2)
    assert steps_of(path) == [1, 2]


def test_so_many_lines_are_kept_and_the_lost_ones_are_counted(path, monkeypatch):
    monkeypatch.setattr(module, "WAITING_LINES", 3)
    journal = Journal(path)
    with disk_of(0):
        for step in range(5):
            journal.write("step", step=step)
    journal.write("step", step=5)
    assert steps_of(path) == [3, 4, 5, None]
    assert events_of(path)[-1]["sentence"].startswith("3 earlier lines are lost")


def test_a_half_line_at_the_end_is_left_out_and_the_next_journal_starts_afresh(path):
    path.write_bytes(b'{"event": "step", "step": 1}\n{"event": "step", "st')
    assert steps_of(path) == [1]
    Journal(path).write("step", step=2)
    assert steps_of(path) == [1, 2]


def test_a_last_line_without_an_end_is_not_read_yet(path):
    path.write_bytes(b'{"event": "step", "step": 1}')
    assert steps_of(path) == []


def test_what_is_no_event_is_passed_over(path):
    path.write_bytes(b'\n12\n{"step": 1}\n\xff\xfe\n{"event": "step", "step": 2}\n')
    assert steps_of(path) == [2]


def test_a_run_without_a_journal_has_no_events(path):
    assert events_of(path) == []


def test_a_journal_that_cannot_be_read_is_one_sentence(tmp_path):
    with pytest.raises(BadRun, match="cannot be read .Is a directory."):
        list(read_events(tmp_path))


def test_of_a_step_trained_twice_the_last_line_counts():
    events = [{"event": "step", "step": step, "loss": loss} for step, loss in ((1, 9), (2, 8), (2, 7), (3, 6))]
    assert [event["loss"] for event in last_steps(events)] == [9, 7, 6]


def test_a_resume_undoes_the_steps_behind_its_checkpoint():
    step = [{"event": kind, "step": number} for number in range(1, 6) for kind in ("step", "eval")]
    events = [*step, {"event": "resume", "step": 3}, {"event": "step", "step": 4}]
    assert [event["step"] for event in last_steps(events)] == [1, 2, 3, 4]
    assert [event["step"] for event in last_steps(events, "eval")] == [1, 2, 3]


def test_a_process_killed_while_it_writes_leaves_whole_lines(path):
    program = (
        "import sys; from itertools import count; from pathlib import Path; from brimful.training.events import Journal\n"
        "journal = Journal(Path(sys.argv[1]))\n"
        "for step in count(1): journal.write('step', step=step, filler='x' * 4000)"
    )
    process = subprocess.Popen([sys.executable, "-c", program, path])
    while not path.exists() or path.stat().st_size < 200_000:
        assert process.poll() is None
        time.sleep(0.01)
    process.send_signal(signal.SIGKILL)
    process.wait()
    steps = steps_of(path)
    assert steps == list(range(1, len(steps) + 1))
    assert len(steps) > 40


@pytest.mark.parametrize(
    "line",
    [
        '{"event": ["step"], "step": 1}',
        '{"event": "step"}',
        '{"event": "step", "step": "2"}',
        '{"event": "eval", "step": null}',
        '{"event": "resume", "step": {}}',
        '{"event": "note", "step": []}',
        pytest.param('{"event": ' + "[" * 100_000 + "]" * 100_000 + "}", id="deep"),
    ],
)
def test_a_line_that_is_no_event_is_skipped(path, line):
    good = '{"event": "step", "step": 1, "loss": 2.0}'
    path.write_text(f"{good}\n{line}\n{good}\n")
    assert [event["step"] for event in read_events(path)] == [1, 1]
    assert len(last_steps(read_events(path))) == 1


def test_a_figure_of_another_type_is_unknown():
    assert number({"loss": None, "loss_is": ["nan"]}, "loss") is None
