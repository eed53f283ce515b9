"""A share goes out as plain data and comes back as messages, here and on a Ray cluster."""

import pickle
import socket
from importlib.util import find_spec

import psutil
import pytest
import torch

from brimful.errors import BadOption, ConnectionFailed, DoesNotFit, UserError
from brimful.memory.ledger import simulated_memory
from brimful.molecules import workers
from brimful.molecules.runner import PackSize
from brimful.molecules.sweep import group_jobs
from brimful.molecules.workers import PackMessage, ProgressMessage, Share, train_share

from . import support

ROWS = {"a": support.rows(), "b": support.rows(1, train=(70, 25))}
SMOOTH = {"activation": "silu"}


@pytest.fixture(autouse=True)
def _no_search(monkeypatch):
    """Packs of three, without trials."""
    monkeypatch.setattr(
        workers, "choose_pack_size", lambda *args, **kwargs: PackSize(runs=3, reason="fixed", trials=())
    )


def jobs(data="ab"):
    return [support.job(seed, name, one, epochs=2 + seed, **SMOOTH) for seed in range(2) for name in ("dpo", "bce") for one in data]  # fmt: skip


def share(groups, **changes):
    return Share(groups=groups, rows=ROWS, device="cpu", **changes)


def finished(messages):
    return {
        one.job.name: one for message in messages if isinstance(message, ProgressMessage) for one in message.finished
    }


def test_every_group_is_announced_and_every_run_comes_back():
    wide = [support.job(seed, hidden=(8,)) for seed in range(2)]
    messages = list(train_share(share([jobs(), wide], number=7)))
    announced = [(message.jobs, message.size.runs) for message in messages if isinstance(message, PackMessage)]
    assert announced == [(8, 3), (2, 3)] and isinstance(messages[0], PackMessage)
    assert set(finished(messages)) == {job.name for job in (*jobs(), *wide)}
    assert {message.share for message in messages} == {7}


TWO = "ab"


@pytest.mark.parametrize("data", ["a", TWO])
def test_epochs_are_counted_once_each(data):
    messages = list(train_share(share([jobs(data)])))
    told = sum(message.epochs for message in messages if isinstance(message, ProgressMessage))
    assert told == sum(one.epochs for one in finished(messages).values())


def test_alive_runs_are_those_that_train():
    alive = [message.alive for message in train_share(share([jobs("a")])) if isinstance(message, ProgressMessage)]
    assert max(alive) == 3 and alive[-1] == 0


def test_out_of_memory_errors_are_reported_once(monkeypatch):
    whole, count = workers.Runner._epoch, 0

    def failing(runner):
        nonlocal count
        count += 1
        if count == 2:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return whole(runner)

    monkeypatch.setattr(workers.Runner, "_epoch", failing)
    assert [message.ooms for message in train_share(share([jobs()])) if isinstance(message, ProgressMessage)].count(
        1
    ) == 1


def test_states_come_from_time_to_time(monkeypatch):
    assert not any(message.state for message in train_share(share([jobs()])) if isinstance(message, ProgressMessage))
    monkeypatch.setattr(workers, "SNAPSHOT_S", -1.0)
    states = [message.state for message in train_share(share([jobs()])) if isinstance(message, ProgressMessage)]
    assert all(state is not None for state in states[:-1]) and states[-1] is None


@pytest.mark.parametrize("after", [2, 5])
def test_a_share_resumes_its_runs(after, monkeypatch):
    undisturbed = finished(train_share(share([jobs()])))
    monkeypatch.setattr(workers, "SNAPSHOT_S", -1.0)
    running = train_share(share([jobs()]))
    messages = [next(running) for _ in range(1 + after)]
    state = pickle.loads(pickle.dumps(messages[-1].state))
    rest = [job for job in jobs() if job.name not in finished(messages)]
    more = list(train_share(share([rest], resumed=[state])))
    told = [one.job.name for message in more if isinstance(message, ProgressMessage) for one in message.finished]
    assert sorted(told) == sorted(job.name for job in rest)
    support.assert_same(finished([*messages, *more]), undisturbed, within=1e-5)


def test_runs_of_other_shares_are_not_resumed(monkeypatch):
    monkeypatch.setattr(workers, "SNAPSHOT_S", -1.0)
    running = train_share(share([jobs()]))
    state = [next(running) for _ in range(2)][-1].state
    own = [job for job in jobs() if job.data == "a"]
    assert set(finished(train_share(share([own], resumed=[state])))) == {job.name for job in own}


def test_a_share_that_is_stopped_ends_with_its_state():
    asked = iter([False, False, False, True, True, True])
    messages = list(train_share(share([jobs(), [support.job(hidden=(8,))]]), lambda: next(asked)))
    assert sum(isinstance(message, PackMessage) for message in messages) == 1
    begun = {job.name for job in messages[-1].state.jobs}
    assert begun and not begun & set(finished(messages))
    assert all(message.state is None for message in messages[1:-1])


def test_features_that_do_not_fit_are_an_error():
    with (
        simulated_memory(1000),
        pytest.raises(DoesNotFit, match=r"the features of 2 datasets \(.*\) do not fit cpu"),
    ):
        list(train_share(share([jobs()])))


def test_the_number_of_threads_is_restored():
    before = torch.get_num_threads()
    seen = [torch.get_num_threads() for _ in train_share(share([[support.job(epochs=1)]], threads=before + 1))]
    assert set(seen) == {before + 1} and torch.get_num_threads() == before
    assert {torch.get_num_threads() for _ in train_share(share([[support.job(epochs=1)]]))} == {before}


def test_messages_and_shares_can_be_pickled():
    sent = pickle.loads(pickle.dumps(share([jobs("a")])))
    messages = [pickle.loads(pickle.dumps(message)) for message in train_share(sent)]
    support.assert_same(finished(messages), finished(train_share(share([jobs("a")]))))


def test_groups_have_one_shape_batch_and_dtype():
    whole = [
        *jobs(),
        support.job(hidden=(8,)),
        support.job(batch=8),
        support.job(data="c"),
        support.job(lr=1.0, dropout=0.5, **SMOOTH),
    ]
    rows = {**ROWS, "c": support.rows(bits=True)}
    groups = group_jobs([*whole, support.job(0, "classify", classes=(2,))], rows)
    assert groups[0] == [*jobs(), whole[-1]] and [len(group) for group in groups[1:]] == [1, 1, 1, 1]


torture = pytest.mark.torture
ROWS_CLUSTER = {"a": support.rows()}
JOBS = [support.job(seed, name, activation="silu") for seed in range(3) for name in ("dpo", "bce")]


@pytest.fixture(scope="module")
def ray():
    if find_spec("ray") is None:
        pytest.skip("needs ray")
    found, gpus, cores = workers.connect_ray("local")
    assert gpus == 0 and cores >= 1
    yield found
    found.shutdown()


def share_cluster(number, jobs, **changes):
    return Share(number=number, groups=[jobs], rows=ROWS_CLUSTER, device="cpu", threads=1, **changes)


def weights(messages):
    return {
        one.job.name: one.weights
        for message in messages
        if isinstance(message, ProgressMessage)
        for one in message.finished
    }


@torture
def test_a_cluster_of_this_machine_alone_listens_on_its_loopback_only(ray):
    processes = [psutil.Process(), *psutil.Process().children(recursive=True)]
    sockets = [one for process in processes for one in process.net_connections() if one.status == psutil.CONN_LISTEN]
    assert {one.laddr.ip.removeprefix("::ffff:") for one in sockets} == {"127.0.0.1"}


@torture
def test_two_tasks_train_what_one_process_does(ray):
    there = weights(
        workers.run_shares_on_ray(ray, [share_cluster(0, JOBS[::2], most=3), share_cluster(1, JOBS[1::2], most=3)])
    )
    here = weights(train_share(share_cluster(0, JOBS, most=3)))
    assert set(there) == set(here) and len(there) == len(JOBS)
    assert all((there[name] - here[name]).abs().max() < 1e-5 for name in here)


@torture
def test_a_task_that_fails_says_why(ray):
    lost = [support.job(0, data="not there")]
    with pytest.raises(UserError, match="a Ray task failed: ValueError"):
        list(workers.run_shares_on_ray(ray, [share_cluster(0, lost)]))


@torture
def test_stopping_ends_the_tasks(ray):
    assert weights(workers.run_shares_on_ray(ray, [share_cluster(0, JOBS)], stop=lambda: True)) == {}


@torture
def test_a_cluster_that_does_not_answer_is_named(ray):
    ray.shutdown()
    with pytest.raises(ConnectionFailed, match="ray='auto' is not a cluster"):
        workers.connect_ray("auto")


@pytest.mark.parametrize("address", ["nonsense.invalid:1", "ray://127.0.0.1:1", "[::1]:1", "a..b:6379"])
def test_an_address_where_nothing_listens_is_refused_at_once(address):
    with pytest.raises(BadOption, match=r"ray=.* does not answer \(.*\). Try: the address"):
        workers.check_address(address)


def test_other_addresses_are_left_to_ray():
    with socket.create_server(("127.0.0.1", 0)) as server:
        for address in (f"127.0.0.1:{server.getsockname()[1]}", "auto", "local", "nonsense", "a:b"):
            workers.check_address(address)
