"""A long native call: its result, its errors, its memory, and an end when the user wants one."""

import threading
import time

import pytest

from brimful.data.tokenizer.sample import Watch


def test_the_result_comes_back_and_time_is_told():
    told = []
    assert Watch().wait_for(lambda: time.sleep(1.0) or 42, told.append) == 42
    assert len(told) >= 2
    assert all(" s, " in phrase and "iB" in phrase for phrase in told)


def test_an_error_of_the_work_is_raised_here():
    with pytest.raises(ZeroDivisionError):
        Watch().wait_for(lambda: 1 / 0, lambda phrase: None)


def test_memory_is_watched_while_it_runs():
    watch = Watch()

    def work():
        held = bytearray(64 * 2**20)
        time.sleep(0.6)
        return len(held)

    watch.wait_for(work, lambda phrase: None)
    assert watch.peak_bytes - watch.start_bytes > 50 * 2**20


def test_ctrl_c_ends_the_waiting_and_the_reading():
    watch, threads = Watch(), []

    def endless():
        while True:
            time.sleep(0.01)
            yield "text"

    def work():
        threads.append(threading.current_thread())
        for _ in watch.until_stopped(endless()):
            pass

    def interrupt(phrase):
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        watch.wait_for(work, interrupt)
    assert not threads[0].is_alive()
