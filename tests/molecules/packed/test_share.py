"""A share goes out as plain data and comes back as messages."""

import pickle

import pytest
import torch

from brimful.errors import DoesNotFit
from brimful.memory.ledger import simulated_memory
from brimful.molecules import workers as module
from brimful.molecules.runner import Packing
from brimful.molecules.training import kin
from brimful.molecules.workers import Packed, Share, Went, work

from . import made

ROWS = {"a": made.rows(), "b": made.rows(1, train=(70, 25))}
SMOOTH = {"activation": "silu"}


@pytest.fixture(autouse=True)
def _no_search(monkeypatch):
    """Packs of three, untried: how long a trial takes is not what is asked here."""
    monkeypatch.setattr(module, "choose", lambda *args, **kwargs: Packing(runs=3, reason="as told", trials=()))


def jobs(data="ab"):
    return [made.job(seed, name, one, epochs=2 + seed, **SMOOTH) for seed in range(2) for name in ("dpo", "bce") for one in data]  # fmt: skip


def share(groups, **changes):
    return Share(groups=groups, rows=ROWS, device="cpu", **changes)


def finished(messages):
    return {one.job.name: one for message in messages if isinstance(message, Went) for one in message.finished}


def test_every_group_is_announced_and_every_run_comes_back():
    wide = [made.job(seed, hidden=(8,)) for seed in range(2)]
    messages = list(work(share([jobs(), wide], number=7)))
    announced = [(message.jobs, message.packing.runs) for message in messages if isinstance(message, Packed)]
    assert announced == [(8, 3), (2, 3)] and isinstance(messages[0], Packed)
    assert set(finished(messages)) == {job.name for job in (*jobs(), *wide)}
    assert {message.share for message in messages} == {7}


TWO = "ab"


@pytest.mark.parametrize("data", ["a", TWO])
def test_epochs_are_counted_once_each(data):
    messages = list(work(share([jobs(data)])))
    told = sum(message.epochs for message in messages if isinstance(message, Went))
    assert told == sum(one.epochs for one in finished(messages).values())


def test_alive_runs_are_those_that_train():
    alive = [message.alive for message in work(share([jobs("a")])) if isinstance(message, Went)]
    assert max(alive) == 3 and alive[-1] == 0


def test_out_of_memory_errors_are_told_once(monkeypatch):
    whole, count = module.Runner._epoch, 0

    def failing(runner):
        nonlocal count
        count += 1
        if count == 2:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return whole(runner)

    monkeypatch.setattr(module.Runner, "_epoch", failing)
    assert [message.ooms for message in work(share([jobs()])) if isinstance(message, Went)].count(1) == 1


def test_states_come_from_time_to_time(monkeypatch):
    assert not any(message.state for message in work(share([jobs()])) if isinstance(message, Went))
    monkeypatch.setattr(module, "SNAPSHOT_S", -1.0)
    states = [message.state for message in work(share([jobs()])) if isinstance(message, Went)]
    assert all(state is not None for state in states[:-1]) and states[-1] is None


@pytest.mark.parametrize("after", [2, 5])
def test_a_share_goes_on_from_what_had_begun(after, monkeypatch):
    calm = finished(work(share([jobs()])))
    monkeypatch.setattr(module, "SNAPSHOT_S", -1.0)
    running = work(share([jobs()]))
    messages = [next(running) for _ in range(1 + after)]
    state = pickle.loads(pickle.dumps(messages[-1].state))
    rest = [job for job in jobs() if job.name not in finished(messages)]
    more = list(work(share([rest], begun=[state])))
    told = [one.job.name for message in more if isinstance(message, Went) for one in message.finished]
    assert sorted(told) == sorted(job.name for job in rest)
    made.same(finished([*messages, *more]), calm, within=1e-5)


def test_what_had_begun_elsewhere_is_left_to_others(monkeypatch):
    monkeypatch.setattr(module, "SNAPSHOT_S", -1.0)
    running = work(share([jobs()]))
    state = [next(running) for _ in range(2)][-1].state
    own = [job for job in jobs() if job.data == "a"]
    assert set(finished(work(share([own], begun=[state])))) == {job.name for job in own}


def test_a_share_that_is_to_stop_tells_its_state_and_ends():
    asked = iter([False, False, False, True, True, True])
    messages = list(work(share([jobs(), [made.job(hidden=(8,))]]), lambda: next(asked)))
    assert sum(isinstance(message, Packed) for message in messages) == 1
    begun = {job.name for job in messages[-1].state.jobs}
    assert begun and not begun & set(finished(messages))
    assert all(message.state is None for message in messages[1:-1])


def test_features_that_do_not_fit_are_said_in_one_sentence():
    with (
        simulated_memory(1000),
        pytest.raises(DoesNotFit, match="the features of 2 datasets, .*cpu do not fit: give more"),
    ):
        list(work(share([jobs()])))


def test_threads_are_those_asked_for_and_given_back():
    before = torch.get_num_threads()
    seen = [torch.get_num_threads() for _ in work(share([jobs("a")], threads=before + 1))]
    assert set(seen) == {before + 1} and torch.get_num_threads() == before
    assert {torch.get_num_threads() for _ in work(share([jobs("a")]))} == {before}


def test_messages_and_shares_survive_a_pipe():
    sent = pickle.loads(pickle.dumps(share([jobs("a")])))
    messages = [pickle.loads(pickle.dumps(message)) for message in work(sent)]
    made.same(finished(messages), finished(work(share([jobs("a")]))))


def test_kin_differ_in_loss_data_seed_or_numbers_but_not_in_shape_batch_or_kind_of_features():
    whole = [
        *jobs(),
        made.job(hidden=(8,)),
        made.job(batch=8),
        made.job(data="c"),
        made.job(lr=1.0, dropout=0.5, **SMOOTH),
    ]
    rows = {**ROWS, "c": made.rows(bits=True)}
    groups = kin([*whole, made.job(0, "classify", classes=(2,))], rows)
    assert groups[0] == [*jobs(), whole[-1]] and [len(group) for group in groups[1:]] == [1, 1, 1, 1]
