"""Signals while a run trains. Each test presses its keys in a process of its own."""

import os
import signal
import threading
import time

import pytest

from brimful.errors import StoppedWaiting
from brimful.training.stop import STOP_SIGNALS, Interrupts, TimeLimit


@pytest.fixture(autouse=True)
def _a_terminal():
    """Tests that were started under nohup would keep what it set."""
    before = signal.signal(signal.SIGHUP, signal.SIG_DFL)
    yield
    signal.signal(signal.SIGHUP, before)


def exit_code(work):
    pid = os.fork()
    if not pid:
        try:
            for number in STOP_SIGNALS:
                signal.signal(number, signal.SIG_DFL)
            work()
        finally:
            os._exit(4)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def leave_with(value):
    os._exit(0 if value else 3)


@pytest.mark.parametrize("number", STOP_SIGNALS, ids=lambda number: number.name)
def test_the_first_signal_asks_and_says_who(number):
    def work():
        with Interrupts() as interrupts:
            before = interrupts.signal
            os.kill(os.getpid(), number)
            leave_with(before is None and interrupts.signal == number.name)

    assert exit_code(work) == 0


def test_a_second_ctrl_c_leaves_at_once():
    def work():
        with Interrupts():
            os.kill(os.getpid(), signal.SIGINT)
            os.kill(os.getpid(), signal.SIGINT)
        os._exit(0)

    assert exit_code(work) == 130


def test_ctrl_c_leaves_at_once_where_a_save_was_asked_for_by_another_signal():
    def work():
        with Interrupts():
            os.kill(os.getpid(), signal.SIGTERM)
            os.kill(os.getpid(), signal.SIGINT)
        os._exit(0)

    assert exit_code(work) == 130


def test_a_second_sigterm_does_not_disturb_the_save():
    def work():
        with Interrupts() as interrupts:
            for number in (signal.SIGINT, signal.SIGTERM, signal.SIGTERM):
                os.kill(os.getpid(), number)
            leave_with(interrupts.signal == "SIGINT")

    assert exit_code(work) == 0


def test_under_nohup_a_closed_terminal_does_not_end_the_run():
    def work():
        signal.signal(signal.SIGHUP, signal.SIG_IGN)
        with Interrupts() as interrupts:
            os.kill(os.getpid(), signal.SIGHUP)
            leave_with(interrupts.signal is None)

    assert exit_code(work) == 0


def test_afterwards_signals_do_what_they_did_before():
    before = {number: signal.getsignal(number) for number in STOP_SIGNALS}
    with Interrupts():
        assert all(signal.getsignal(number) != before[number] for number in STOP_SIGNALS)
    assert {number: signal.getsignal(number) for number in STOP_SIGNALS} == before


def test_they_do_so_after_an_error_too():
    before = {number: signal.getsignal(number) for number in STOP_SIGNALS}
    with pytest.raises(ZeroDivisionError), Interrupts():
        raise ZeroDivisionError
    assert {number: signal.getsignal(number) for number in STOP_SIGNALS} == before


def test_in_another_thread_nothing_is_set():
    before, found = {number: signal.getsignal(number) for number in STOP_SIGNALS}, []

    def work():
        with Interrupts() as interrupts:
            found.append(({number: signal.getsignal(number) for number in STOP_SIGNALS}, interrupts.signal))

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert found == [(before, None)]


@pytest.mark.parametrize("number", STOP_SIGNALS, ids=lambda number: number.name)
def test_a_signal_ends_a_wait(number):
    def work():
        threading.Timer(0.1, lambda: os.kill(os.getpid(), number)).start()
        with Interrupts() as interrupts:
            try:
                with interrupts.waiting():
                    time.sleep(60)
            except StoppedWaiting:
                leave_with(interrupts.signal == number.name)

    assert exit_code(work) == 0


def test_the_time_limit_ends_a_wait_and_is_no_signal():
    def work():
        with Interrupts(TimeLimit(0.1)) as interrupts:
            try:
                with interrupts.waiting():
                    time.sleep(60)
            except StoppedWaiting:
                leave_with(interrupts.signal is None and interrupts.stop_requested)

    assert exit_code(work) == 0


def test_no_wait_begins_after_a_signal():
    def work():
        with Interrupts() as interrupts:
            os.kill(os.getpid(), signal.SIGTERM)
            try:
                with interrupts.waiting():
                    os._exit(5)
            except StoppedWaiting:
                os._exit(0)

    assert exit_code(work) == 0


def test_without_a_time_limit_a_run_never_stops():
    assert not TimeLimit(None).reached(save_s=1e9)


def test_the_time_limit_counts_from_the_start_and_leaves_time_for_the_save():
    now = [100.0]
    limit = TimeLimit(3600.0, clock=lambda: now[0])
    now[0] = 3699.0
    assert not limit.reached()
    assert limit.reached(save_s=1.0)
    now[0] = 3700.0
    assert limit.reached()
