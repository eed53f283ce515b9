"""The watchdog: silent below 90 % of the limit, one measure at a time above it, and never in the way."""

import os
import time

from brimful.data import loader
from brimful.data.loader import SETTLE, Watchdog, held_bytes

GIB = 2**30


def watched(levels, measures):
    """What is said when these shares of 16 GiB are seen, one look after the other."""
    said, levels, measures = [], iter(levels), iter(measures)
    dog = Watchdog(16 * GIB, lambda: next(measures, None), said.append, used=lambda: int(next(levels) * 16 * GIB))
    return dog, said


def looks(dog, count):
    for _ in range(count):
        dog.look()


def test_nothing_is_said_below_nine_tenths():
    dog, said = watched([0.5, 0.89, 0.899], ["lowered"])
    looks(dog, 3)
    assert said == []


def test_above_it_a_measure_is_taken_and_told_with_the_figures():
    dog, said = watched([0.95], ["each worker reads 1 step ahead instead of 2"])
    looks(dog, 1)
    assert said == ["host RAM: 15.2 GiB of 16 GiB are taken (95%); each worker reads 1 step ahead instead of 2"]


def test_a_measure_is_given_time_before_the_next():
    dog, said = watched([0.95, 0.95], ["first", "second"])
    looks(dog, 1 + SETTLE)
    assert len(said) == 1
    looks(dog, 1)
    assert said[1].endswith("second")


def test_that_nothing_is_left_to_lower_is_said_once_until_it_was_better():
    dog, said = watched([0.95, 0.96, 0.5, 0.97], [])
    looks(dog, 1 + SETTLE + 3)
    assert len(said) == 2 and all("nothing left to lower" in sentence for sentence in said)


def test_it_runs_beside_the_training_and_ends_with_it():
    said = []
    with Watchdog(100, lambda: "lowered", said.append, every_s=0.01, used=lambda: 95) as dog:
        deadline = time.monotonic() + 10
        while not said and time.monotonic() < deadline:
            time.sleep(0.01)
    assert said and not dog._thread.is_alive()


def test_a_look_that_fails_does_not_stop_the_training():
    said = []
    with Watchdog(100, lambda: None, said.append, every_s=0.01, used=lambda: 1 // 0) as dog:
        dog._thread.join(10)
    assert said == ["host RAM could not be read (integer division or modulo by zero); it is no longer watched"]


def test_what_this_process_holds_counts():
    before = held_bytes(2**50)
    ballast = bytearray(os.urandom(1) * 200 * 2**20)
    assert held_bytes(2**50) - before > 150 * 2**20
    del ballast


def test_what_the_machine_lacks_counts_too(monkeypatch):
    class Full:
        ram_limit_bytes, ram_available_bytes = 16 * GIB, GIB

        @classmethod
        def detect(cls, root):
            return cls

    monkeypatch.setattr(loader, "Host", Full)
    monkeypatch.setattr(loader, "tree_bytes", lambda pid, root: 3 * GIB)
    assert held_bytes(16 * GIB) == 15 * GIB
    Full.ram_available_bytes = 14 * GIB
    assert held_bytes(16 * GIB) == 3 * GIB
