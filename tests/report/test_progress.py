"""The progress view: all metrics of a run, as lines or live, and nothing that could stop training."""

import io
import logging
import os
import pty
import sys
import threading
from dataclasses import replace

import pytest
from rich.console import Console

from brimful.report import progress as module
from brimful.report.progress import Progress, RunPanel
from brimful.step.result import Events
from brimful.units import GiB
from tests.planning.small import small_plan
from tests.training.shown import EVALUATION, step, summary_of

log = logging.getLogger("brimful")


def lines_of(events, every_s=10.0):
    stream = io.StringIO()
    with Progress.open(stream, every_s) as progress:
        for event in events:
            progress(event)
    return stream.getvalue().splitlines()


@pytest.fixture
def clock(monkeypatch):
    """A clock that advances by one second with each event."""
    now = [0.0]
    monkeypatch.setattr(module.time, "monotonic", lambda: now[0])

    def ticking(events):
        for event in events:
            now[0] += 1
            yield event

    return ticking


def plan_event(tagger_plan, **values):
    event = {"event": "plan", "step": 0, **replace(tagger_plan, warnings=("too few",)).to_json()}
    return {**event, "changes": [], "experiment": "new", "experiment_reasons": [], "number_before": None, **values}


WARNING = {"event": "note", "step": 0, "level": "warning", "sentence": "too few"}


@pytest.fixture(scope="module")
def tagger_plan():
    return small_plan()


def begin(resumed):
    return {"event": "begin", "step": 0, "run": "runs/a b", "steps": 9, "processes": 1, "resumed": resumed}


def test_a_warning_of_the_plan_is_printed_once(tagger_plan):
    lines = lines_of([begin(False), plan_event(tagger_plan), WARNING])
    assert [line for line in lines if "too few" in line] == ["warning: too few"]


def test_of_a_resumed_run_only_what_changed_is_printed(tagger_plan):
    changes = [{"name": "micro_batch", "old": 8, "new": 4}]
    event = plan_event(tagger_plan, number=2, number_before=1, changes=changes, experiment="other")
    assert [line.rstrip() for line in lines_of([begin(True), event, WARNING])] == [
        "training in runs/a b: 9 steps on 1 process",
        "plan 2, with these changes:",
        "  micro batch  8 → 4",
        "another experiment from here on",
        "To go back: brimful train --run 'runs/a b' --rollback 1",
        "warning: too few",
    ]
    same = plan_event(tagger_plan, number=2, number_before=1, changes=changes, experiment="same")
    assert not any("go back" in line for line in lines_of([begin(True), same]))
    assert len(lines_of([begin(True), plan_event(tagger_plan, experiment="same")])) == 1


def test_without_a_terminal_steps_are_printed_at_intervals_and_always_the_first_and_the_last(clock):
    lines = lines_of(clock(step(i) for i in range(1, 101)), every_s=30)
    assert [line.split("  ")[0] for line in lines] == ["step 1/100", "step 31/100", "step 61/100", "step 91/100", "step 100/100"]  # fmt: skip


def test_without_a_terminal_the_last_step_comes_before_its_evaluation():
    lines = lines_of([step(99), step(100), {**EVALUATION, "step": 100}])
    assert [line[:9] for line in lines] == ["step 99/1", "step 100/", "step 100:"]


def test_without_a_terminal_the_last_step_of_a_stopped_run_is_printed():
    lines = lines_of([step(1), step(2), step(3)])
    assert [line.split("  ")[0] for line in lines] == ["step 1/100", "step 3/100"]


def test_without_a_terminal_the_last_step_is_printed_when_the_run_ends():
    lines = lines_of([step(1), step(2), {"event": "end", "step": 2, "sentence": "stopped"}])
    assert [line.split("  ")[0] for line in lines] == ["step 1/100", "step 2/100"]


def test_without_a_terminal_notable_events_are_printed_at_once():
    oom = {"event": "oom", "step": 2, "sentence": "out of memory"}
    assert lines_of([step(1), oom, oom])[1:] == ["step 2: out of memory"] * 2


def test_the_status_is_printed_at_intervals(clock):
    stream = io.StringIO()
    with Progress.open(stream, 3.5) as progress:
        for phrase in clock("abcdef"):
            progress.status(phrase)
    assert stream.getvalue().split() == ["a", "e"]


def test_a_line_is_one_write(tmp_path, monkeypatch):
    written = []
    with (tmp_path / "log").open("w") as stream, Progress.open(stream) as progress:
        monkeypatch.setattr(module.os, "write", lambda file, data: written.append((file, data)))
        progress(step(1))
        assert written == [(stream.fileno(), (summary_of(step(1)).line() + "\n").encode())]
        monkeypatch.undo()


def test_a_stream_in_ascii_gets_question_marks(tmp_path):
    path = tmp_path / "log"
    with path.open("w", encoding="ascii") as stream, Progress.open(stream) as progress:
        progress(step(1))
    assert b"checkpoint ?" in path.read_bytes()


def test_a_closed_pipe_ends_the_view_and_raises_nothing():
    reader, writer = os.pipe()
    os.close(reader)
    with os.fdopen(writer, "w") as stream, Progress.open(stream) as progress:
        progress(step(1))
        progress(step(2))


def test_an_unknown_event_ends_the_view_and_raises_nothing():
    stream = io.StringIO()
    with Progress.open(stream) as progress:
        progress({"event": "eval"})
        progress(step(1))
    assert stream.getvalue() == ""


def test_log_messages_go_through_the_view_but_events_only_once():
    stream = io.StringIO()
    with Progress.open(stream):
        log.warning("the disk is full")
        Events(None).add("oom", 3, "out of memory")  # it also comes as an event of the journal
    log.warning("too late")
    assert stream.getvalue() == "the disk is full\n"


@pytest.mark.parametrize(("width", "rows"), [(40, 11), (60, 7), (80, 6), (120, 5)])
def test_the_panel_fits_the_terminal(width, rows):
    console = Console(width=width, file=io.StringIO(), force_terminal=True, color_system=None)
    console.print(RunPanel(summary_of(step(50, loss=11.25, ooms=3), step(51), EVALUATION)))
    lines = console.file.getvalue().splitlines()
    assert len(lines) == rows
    assert max(map(len, lines)) <= width


def test_the_panel_shows_every_metric():
    console = Console(width=80, file=io.StringIO(), force_terminal=True, color_system=None)
    summary = summary_of(step(50), EVALUATION)
    console.print(RunPanel(summary))
    shown = console.file.getvalue()
    for name, value in summary.items():
        assert f"{name} {value}" in shown
    assert "step 50/100" in shown
    assert "50%  ETA 1 min 15 s" in shown
    assert "best loss 2.5000, perplexity 12.18 at step 50" in shown


@pytest.mark.parametrize(("peak", "full"), [(0, 0), (10, 9), (20, 18), (25, 18)])
def test_the_memory_bar_is_the_peak_of_the_limit(peak, full):
    console = Console(width=80, file=io.StringIO(), force_terminal=True, color_system=None)
    console.print(RunPanel(summary_of(step(50, peak_bytes=peak * GiB))))
    assert (console.file.getvalue().count("█"), console.file.getvalue().count("░")) == (full, 18 - full)


@pytest.mark.parametrize(
    ("peak", "reserved", "colour"),
    [(18.5, 17.0, 32), (1, 17.1, 33), (1, 18.0, 33), (1, 18.1, 31), (17.1, None, 33)],
    ids=["safe", "edge", "still edge", "danger", "allocated"],
)
def test_the_memory_bar_has_the_colour_of_the_zone_of_reserved_bytes(peak, reserved, colour):
    """Green up to 85 % of the limit, yellow up to 90 %, then red."""
    console = Console(width=80, file=io.StringIO(), force_terminal=True, color_system="standard")
    figures = {"peak_bytes": peak * GiB, "reserved_bytes": None if reserved is None else reserved * GiB}
    console.print(RunPanel(summary_of(step(50, **figures))))
    assert f"\x1b[{colour}m█" in console.file.getvalue()


def test_a_note_that_warns_is_yellow():
    note = {"event": "note", "step": 0, "sentence": "the card is shared"}
    assert [module.event_style(one) for one in (note, {**note, "level": "warning"})] == ["", "yellow"]


class Screen:
    """A pseudo-terminal, read by a thread."""

    def __init__(self):
        self._primary, replica = pty.openpty()
        self.stream = os.fdopen(replica, "w")
        self.text = b""
        self._thread = threading.Thread(target=self._read)
        self._thread.start()

    def _read(self):
        try:
            while data := os.read(self._primary, 65536):
                self.text += data
        except OSError:  # the other side is closed
            pass

    def close(self):
        self.stream.close()
        self._thread.join()
        os.close(self._primary)
        return self.text.decode()


def test_on_a_terminal_the_panel_is_redrawn_and_events_scroll_above(monkeypatch, clock):
    monkeypatch.setenv("TERM", "xterm")
    screen = Screen()
    with Progress.open(screen.stream) as progress:
        progress.status("probing 8 rows")
        for event in clock((step(1), {"event": "oom", "step": 2, "sentence": "out of memory"}, step(2))):
            progress(event)
    text = screen.close()
    assert text.index("probing 8 rows") < text.index("step 1/100") < text.index("step 2: out of memory")
    assert text.index("step 2: out of memory") < text.rindex("step 2/100")
    assert text.count("\x1b[1A") >= 4  # the cursor goes up to draw again
    assert text.endswith("\x1b[?25h") or "\x1b[?25h" in text.rsplit("\n", 1)[-1]  # the cursor is back


def test_on_a_terminal_it_draws_four_times_a_second_at_most(monkeypatch):
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setattr(module.time, "monotonic", lambda: 0.0)
    screen = Screen()
    with Progress.open(screen.stream) as progress:
        for number in range(1, 40):
            progress(step(number))
    text = screen.close()
    assert "step 1/100" in text
    assert "step 20/100" not in text
    assert "step 39/100" in text


def test_a_dumb_terminal_gets_lines(monkeypatch):
    monkeypatch.setenv("TERM", "dumb")
    screen = Screen()
    with Progress.open(screen.stream) as progress:
        progress(step(1))
    assert screen.close() == summary_of(step(1)).line() + "\r\n"


def test_the_view_leaves_stdout_and_stderr_as_they_were(monkeypatch):
    monkeypatch.setenv("TERM", "xterm")
    before, screen = (sys.stdout, sys.stderr), Screen()
    with pytest.raises(ValueError), Progress.open(screen.stream):
        raise ValueError
    screen.close()
    assert (sys.stdout, sys.stderr) == before
