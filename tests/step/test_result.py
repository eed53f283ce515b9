"""Events are kept, logged and passed on; nothing a listener does stops training."""

import json
import logging
from typing import get_args

import pytest

from brimful.step.result import EVENTS_KEPT, WARNINGS, Event, EventKind, Events

KINDS = get_args(EventKind)


def test_the_kinds_of_events():
    """Frozen on purpose: every view of a run relies on these names."""
    assert KINDS == ("oom", "grow", "thrash", "model", "skip", "oversized", "deal", "note")


def test_an_event_is_kept_with_its_step_sentence_and_figures():
    events = Events(None)
    events.add("oom", 3, "out of memory in forward", rows=8, available_bytes=None)
    assert list(events.recent) == [
        Event(event="oom", step=3, sentence="out of memory in forward", details={"rows": 8, "available_bytes": None})
    ]


def test_events_are_kept_in_order():
    events = Events(None)
    for step in (1, 2, 3):
        events.add("note", step, "a")
    assert [event.step for event in events.recent] == [1, 2, 3]


def test_the_last_thousand_are_kept():
    events = Events(None)
    for step in range(EVENTS_KEPT + 5):
        events.add("note", step, "a")
    assert len(events.recent) == EVENTS_KEPT == 1000
    assert (events.recent[0].step, events.recent[-1].step) == (5, EVENTS_KEPT + 4)


def test_an_event_is_one_flat_object_in_json():
    event = Event(event="oom", step=3, sentence="out of memory", details={"rows": 8, "shape": [5, 7]})
    assert json.loads(json.dumps(event.to_json())) == {
        "event": "oom", "step": 3, "sentence": "out of memory", "rows": 8, "shape": [5, 7],
    }  # fmt: skip


def test_every_event_is_handed_to_the_listener_as_it_happens():
    heard = []
    events = Events(lambda event: heard.append((event.event, len(events.recent))))
    for kind in KINDS:
        events.add(kind, 1, "a")
    assert heard == [(kind, count) for count, kind in enumerate(KINDS, 1)]


def test_a_listener_hears_of_more_events_than_are_kept():
    heard = []
    events = Events(heard.append)
    for step in range(EVENTS_KEPT + 5):
        events.add("note", step, "a")
    assert len(heard) == EVENTS_KEPT + 5


def test_a_listener_that_fails_stops_nothing_and_is_logged(caplog):
    def listener(event: Event) -> None:
        raise ValueError("disk full")

    events = Events(listener)
    with caplog.at_level(logging.WARNING, "brimful"):
        events.add("note", 1, "a")
        events.add("note", 2, "b")
    assert len(events.recent) == 2
    assert caplog.messages == ["on_event failed for 'note', training continues: disk full"] * 2


@pytest.mark.parametrize("stop", [KeyboardInterrupt, SystemExit])
def test_a_listener_may_stop_the_program(stop):
    def listener(event: Event) -> None:
        raise stop

    with pytest.raises(stop):
        Events(listener).add("note", 1, "a")


@pytest.mark.parametrize("kind", KINDS)
def test_trouble_is_logged_as_a_warning_and_the_rest_as_information(kind, caplog):
    with caplog.at_level(logging.INFO, "brimful"):
        Events(None).add(kind, 7, "what happened")
    loud = kind in {"oom", "thrash", "skip", "oversized"}
    assert caplog.record_tuples == [("brimful", logging.WARNING if loud else logging.INFO, "step 7: what happened")]
    assert (kind in WARNINGS) is loud


def test_a_sentence_with_a_percent_sign_is_logged_as_it_is(caplog):
    with caplog.at_level(logging.INFO, "brimful"):
        Events(None).add("note", 1, "85% of %s")
    assert caplog.messages == ["step 1: 85% of %s"]
