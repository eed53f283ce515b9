"""Signals while a run trains. Each test presses its keys in a process of its own."""

import os
import signal
import threading

import pytest

from brimful.training.sidecar import POLITE
from brimful.training.stop import Interrupts


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
            for number in POLITE:
                signal.signal(number, signal.SIG_DFL)
            work()
        finally:
            os._exit(4)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def leave_with(value):
    os._exit(0 if value else 3)


@pytest.mark.parametrize("number", POLITE, ids=lambda number: number.name)
def test_the_first_signal_asks_and_says_who(number):
    def work():
        with Interrupts() as asked:
            before = asked.by
            os.kill(os.getpid(), number)
            leave_with(before is None and asked.by == number.name)

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
        with Interrupts() as asked:
            for number in (signal.SIGINT, signal.SIGTERM, signal.SIGTERM):
                os.kill(os.getpid(), number)
            leave_with(asked.by == "SIGINT")

    assert exit_code(work) == 0


def test_under_nohup_a_closed_terminal_does_not_end_the_run():
    def work():
        signal.signal(signal.SIGHUP, signal.SIG_IGN)
        with Interrupts() as asked:
            os.kill(os.getpid(), signal.SIGHUP)
            leave_with(asked.by is None)

    assert exit_code(work) == 0


def test_afterwards_signals_do_what_they_did_before():
    before = {number: signal.getsignal(number) for number in POLITE}
    with Interrupts():
        assert all(signal.getsignal(number) != before[number] for number in POLITE)
    assert {number: signal.getsignal(number) for number in POLITE} == before


def test_they_do_so_after_an_error_too():
    before = {number: signal.getsignal(number) for number in POLITE}
    with pytest.raises(ZeroDivisionError), Interrupts():
        raise ZeroDivisionError
    assert {number: signal.getsignal(number) for number in POLITE} == before


def test_in_another_thread_nothing_is_set():
    before, found = {number: signal.getsignal(number) for number in POLITE}, []

    def work():
        with Interrupts() as asked:
            found.append(({number: signal.getsignal(number) for number in POLITE}, asked.by))

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert found == [(before, None)]
