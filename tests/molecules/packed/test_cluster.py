"""Shares on a Ray cluster of this box give what they give here. Starting one takes seconds and ports, hence not in `make test`."""

import socket

import pytest

from brimful.errors import BadOption, ConnectionFailed, UserError
from brimful.molecules import workers
from brimful.molecules.workers import Share, Went, work

from . import made

torture = pytest.mark.torture
ROWS = {"a": made.rows()}
JOBS = [made.job(seed, name, activation="silu") for seed in range(3) for name in ("dpo", "bce")]


@pytest.fixture(scope="module")
def ray():
    pytest.importorskip("ray")
    found, cards, cores = workers.connect("local")
    assert cards == 0 and cores >= 1
    yield found
    found.shutdown()


def share(number, jobs, **changes):
    return Share(number=number, groups=[jobs], rows=ROWS, device="cpu", threads=1, **changes)


def weights(messages):
    return {one.job.name: one.weights for message in messages if isinstance(message, Went) for one in message.finished}


@torture
def test_two_tasks_train_what_one_process_does(ray):
    there = weights(workers.run_shares_cluster(ray, [share(0, JOBS[::2], most=3), share(1, JOBS[1::2], most=3)]))
    here = weights(work(share(0, JOBS, most=3)))
    assert set(there) == set(here) and len(there) == len(JOBS)
    assert all((there[name] - here[name]).abs().max() < 1e-5 for name in here)


@torture
def test_a_task_that_fails_says_why_in_one_sentence(ray):
    lost = [made.job(0, data="not there")]
    with pytest.raises(UserError, match="a Ray task failed: ValueError"):
        list(workers.run_shares_cluster(ray, [share(0, lost)]))


@torture
def test_stopping_ends_the_tasks(ray):
    assert weights(workers.run_shares_cluster(ray, [share(0, JOBS)], stop=lambda: True)) == {}


@torture
def test_a_cluster_that_does_not_answer_is_named(ray):
    ray.shutdown()
    with pytest.raises(ConnectionFailed, match=r"--ray auto: no cluster answers there"):
        workers.connect("auto")


@pytest.mark.parametrize("address", ["nonsense.invalid:1", "ray://127.0.0.1:1", "[::1]:1", "a..b:6379"])
def test_an_address_where_nothing_listens_is_told_at_once(address):
    with pytest.raises(BadOption, match=r"--ray .*: nothing answers there \(.*\); give the address"):
        workers.check_address(address)


def test_an_address_that_listens_and_names_without_a_port_are_left_to_ray():
    with socket.create_server(("127.0.0.1", 0)) as server:
        for address in (f"127.0.0.1:{server.getsockname()[1]}", "auto", "local", "nonsense", "a:b"):
            workers.check_address(address)
