"""The pipeline of threads: order kept, in flight bounded, errors where they belong."""

import threading
import time

import pytest

from brimful.data.pipeline import in_order, read_ahead


def test_results_come_in_order_whoever_is_first():
    def work(number):
        time.sleep(0.002 * (number % 3 == 0))
        return number * 2

    assert list(in_order(work, range(20), threads=4, in_flight=6)) == [number * 2 for number in range(20)]


def test_no_more_than_in_flight_are_started_and_not_taken():
    started, taken = [], 0
    for _ in in_order(started.append, iter(range(20)), threads=2, in_flight=3):
        taken += 1
        assert len(started) - taken <= 3
    assert len(started) == taken == 20


def test_work_overlaps_with_its_consumer():
    release = threading.Event()
    results = in_order(lambda number: release.wait(5) if number else True, range(2), threads=1, in_flight=2)
    assert next(results) is True  # the second waits for us: it was started in another thread
    release.set()
    assert list(results) == [True]


def test_an_error_comes_out_in_its_place():
    def work(number):
        if number == 2:
            raise ValueError("two")
        return number

    results = in_order(work, range(9), threads=2, in_flight=3)
    assert [next(results), next(results)] == [0, 1]
    with pytest.raises(ValueError, match="two"):
        next(results)


def test_an_error_of_the_source_comes_out():
    def source():
        yield 1
        raise ValueError("unreadable")

    items = read_ahead(source(), in_flight=2)
    with pytest.raises(ValueError, match="unreadable"):
        list(items)


def test_read_ahead_gives_everything_once_and_reads_before_it_is_asked():
    read = []

    def source():
        for number in range(1, 6):
            read.append(number)
            yield number

    items = read_ahead(source(), in_flight=2)
    assert next(items) == 1
    deadline = time.monotonic() + 5
    while read == [1] and time.monotonic() < deadline:
        time.sleep(0.001)
    assert len(read) == 2
    assert list(items) == [2, 3, 4, 5]


def test_threads_end_when_the_consumer_stops():
    before = threading.active_count()
    results = in_order(lambda number: number, range(100), threads=3, in_flight=4)
    next(results)
    results.close()
    assert threading.active_count() == before
