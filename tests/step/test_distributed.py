"""Several ranks: rows are dealt once, by work and speed; the result is that of one process, whatever fails where."""

import dataclasses
import functools
import threading
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from brimful.errors import BadOption
from brimful.memory.model import MemoryModel, Polynomial
from brimful.step import distributed
from brimful.step.distributed import TIMED_STEPS, CommunicationClock, Dealer, Share, SingleProcess
from brimful.step.rows import as_rows
from brimful.task import Task
from tests.step.fleet import Fleet
from tests.step.small import PLACES, Branches, TwoTerms, Words, plain_loop, steps_of_rows

CPU = torch.device("cpu")


class Text(Task):
    """Rows are as long as they are."""

    def shape(self, row):
        return (len(row),)

    def collate(self, rows):
        return list(rows)


class Ranks:
    """Several processes as threads of one: whatever they gather, they gather in order of rank."""

    def __init__(self, size: int, names: list[str] | None = None) -> None:
        self.size, self.names = size, names
        self.gathered = 0
        self._table: list[Any] = [None] * size
        self._all_there = threading.Barrier(size, timeout=10)

    def exchange(self, rank: int, value: Any) -> list[Any]:
        self._table[rank] = value
        if self._all_there.wait() == 0:
            self.gathered += 1
        table = list(self._table)
        self._all_there.wait()
        return table

    def run(self, work: Callable[["OneOf"], Any]) -> list[Any]:
        """What each rank returns or raises."""
        found: list[Any] = [None] * self.size

        def one(rank: int) -> None:
            try:
                found[rank] = work(OneOf(self, rank))
            except BaseException as error:
                found[rank] = error

        threads = [threading.Thread(target=one, args=(rank,)) for rank in range(self.size)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        broken = [error for error in found if isinstance(error, (threading.BrokenBarrierError, AssertionError))]
        if broken:
            raise broken[0]
        return found


class OneOf(SingleProcess):
    def __init__(self, ranks: Ranks, rank: int) -> None:
        self.ranks, self.rank, self.size = ranks, rank, ranks.size

    def gather(self, values):
        return self.ranks.exchange(self.rank, list(values))

    def gather_objects(self, value):
        if self.ranks.names and hasattr(value, "device_name"):
            value = dataclasses.replace(value, device_name=self.ranks.names[self.rank])
        return self.ranks.exchange(self.rank, value)


def plan(rows_per_s: float = 1.0, bytes_per_unit: float = 1.0, deterministic: bool = False) -> Any:
    model = MemoryModel(
        phases={"forward": Polynomial({(1, 1): bytes_per_unit})}, margin=1.0, reserved_ratio=1.0, error=0.0, probes=()
    )
    return SimpleNamespace(rows_per_s=rows_per_s, memory_model=model, deterministic=deterministic)


def rows_of(given: Any, task: Task | None = None, is_rows: bool = True):
    return as_rows(given, task or Text(), (), list_is_rows=is_rows)


def dealer(group: SingleProcess, plan_=None, limit=float("inf"), rows_are="global") -> Dealer:
    return Dealer(group, CPU, plan_, limit, rows_are)


def shares(given: list, plans: list, limits: list[float] | None = None) -> list[list[int]]:
    """Which rows each of so many processes takes of these, the same for all."""
    ranks = Ranks(len(plans))

    def work(group: OneOf) -> list[int]:
        limit = limits[group.rank] if limits else float("inf")
        return dealer(group, plans[group.rank], limit).share(rows_of(given), given).indices

    return ranks.run(work)


# Who takes what


@pytest.fixture
def now(monkeypatch):
    """A clock that stands still, and a CUDA device whose events are at `now[1]` seconds when they are recorded."""
    now = [0.0, 0.0, True]

    class Event:
        def __init__(self, enable_timing):
            assert enable_timing

        def record(self):
            self.at = now[1]

        def query(self):
            return now[2]

        def elapsed_time(self, other):
            return 1000 * (other.at - self.at)

    monkeypatch.setattr(distributed.time, "perf_counter", lambda: now[0])
    monkeypatch.setattr(torch.cuda, "Event", Event)
    return now


def collective(clock, now, *, on_host_s, on_device_s=0.0, is_launched=False):
    with clock.running(is_launched=is_launched):
        now[0] += on_host_s
        now[1] += on_device_s


def test_collectives_on_the_host_are_timed_there(now):
    clock = CommunicationClock(CPU)
    collective(clock, now, on_host_s=2.0)
    now[0] += 100.0
    collective(clock, now, on_host_s=0.5, is_launched=True)
    assert clock.read_s() == 2.5


def test_a_reduce_that_is_only_launched_is_timed_by_the_device(now):
    clock = CommunicationClock(torch.device("cuda:0"))
    collective(clock, now, on_host_s=0.1, on_device_s=3.0, is_launched=True)
    assert clock.read_s() == pytest.approx(3.0)
    assert clock.read_s() == pytest.approx(3.0)


def test_a_device_that_is_not_there_yet_is_not_waited_for(now):
    clock, now[2] = CommunicationClock(torch.device("cuda:0")), False
    collective(clock, now, on_host_s=0.1, on_device_s=3.0, is_launched=True)
    assert clock.read_s() == pytest.approx(0.1)


def test_a_collective_that_fails_is_timed_too(now):
    clock = CommunicationClock(torch.device("cuda:0"))
    with pytest.raises(RuntimeError), clock.running(is_launched=True):
        now[0] += 1.0
        raise RuntimeError
    assert clock.read_s() == 1.0


def test_one_process_takes_all_rows():
    given = ["a", "bb", "c"]
    assert dealer(SingleProcess()).share(rows_of(given), given).indices == [0, 1, 2]


def test_local_rows_are_all_taken():
    given = ["a", "bb", "c"]
    ranks = Ranks(2)
    found = ranks.run(lambda group: dealer(group, rows_are="local").share(rows_of(given), given))
    assert [share.indices for share in found] == [[0, 1, 2]] * 2


def test_local_rows_may_differ_between_ranks():
    mine = {0: ["a"], 1: ["b", "cc"]}
    found = Ranks(2).run(
        lambda group: dealer(group, rows_are="local").share(rows_of(mine[group.rank]), mine[group.rank]).indices
    )
    assert found == [[0], [0, 1]]


@given(
    st.lists(st.integers(1, 100), min_size=1, max_size=20),
    st.lists(st.none() | st.floats(0.1, 100), min_size=2, max_size=4),
    st.lists(st.integers(1, 120), min_size=4, max_size=4),
)
@settings(max_examples=40)
def test_every_row_is_taken_exactly_once(lengths, speeds, limits):
    given = ["x" * length for length in lengths]
    plans = [None if speed is None else plan(speed) for speed in speeds]
    found = shares(given, plans, [float(limit) for limit in limits[: len(plans)]])
    assert sorted(row for indices in found for row in indices) == list(range(len(given)))


def test_equal_rows_are_dealt_evenly_and_in_runs():
    assert shares(["row"] * 8, [None, None, None]) == [[0, 1, 2], [3, 4, 5], [6, 7]]


def test_rows_are_dealt_by_the_speeds_of_the_plans():
    assert [len(rows) for rows in shares(["row"] * 8, [plan(300.0), plan(100.0)])] == [6, 2]


def test_under_deterministic_plans_no_speed_counts():
    plans = [plan(300.0, deterministic=True), plan(100.0, deterministic=True)]
    assert [len(rows) for rows in shares(["row"] * 8, plans)] == [4, 4]


def test_speeds_count_only_if_every_rank_has_a_plan():
    assert [len(rows) for rows in shares(["row"] * 8, [plan(300.0), None])] == [4, 4]


def test_long_rows_are_dealt_by_work_and_not_by_number():
    assert shares(["x" * 99, "x", "x", "x"], [None, None]) == [[0], [1, 2, 3]]


def test_a_row_too_long_for_a_small_card_goes_to_a_larger_one():
    given = ["x" * 50, "x" * 10, "x" * 50, "x" * 10]
    assert shares(given, [plan(), plan()], [20.0, 1000.0]) == [[1, 3], [0, 2]]


def test_a_row_too_long_for_all_is_dealt_all_the_same():
    found = shares(["x" * 500, "x"], [plan(), plan()], [20.0, 20.0])
    assert sorted(row for indices in found for row in indices) == [0, 1]


def test_a_rank_takes_a_row_of_exactly_its_budget_and_not_a_byte_more():
    deals = dealer(SingleProcess(), plan(), 20.0)
    assert deals.excluded([(20,), (21,)]) == [(1, 0)]


def test_a_rank_without_a_plan_takes_every_row():
    assert dealer(SingleProcess(), None, 0.0).excluded([(10**9,)]) == []


def test_there_may_be_fewer_rows_than_processes():
    found = shares(["row"], [None, None, None])
    assert sorted(found) == [[], [], [0]]


def test_the_work_of_a_share_is_that_of_its_rows():
    given = ["abc", "a", "abcde"]
    assert Share(rows_of(given), [0, 2]).work == 4 + 6


# Is it the same step everywhere?


def compared(given_to: list[Any], is_rows: bool = True) -> list[Any]:
    """What happens to each process when they are given these."""
    task = Text() if is_rows else Task()

    def work(group: OneOf) -> list[int]:
        given = given_to[group.rank]
        return dealer(group).share(rows_of(given, task, is_rows), given).indices

    return Ranks(len(given_to)).run(work)


def test_another_number_of_rows_is_refused_on_every_process():
    found = compared([["row"] * 4, ["row"] * 4, ["row"] * 6])
    assert {type(error) for error in found} == {BadOption}
    assert all(str(error).startswith("rank 2 has other rows than rank 0 (6 and 4 of them)") for error in found)


DIFFERENT = {
    "strings": ([["aa", "bb", "cc"], ["dd", "ee", "ff"]], True),
    "only the last row": ([["aa", "bb", "cc"], ["aa", "bb", "xx"]], True),
    "only the middle row": ([["aa", "bb", "cc"], ["aa", "xx", "cc"]], True),
    "tensors": ([[torch.zeros(3)] * 6, [torch.ones(3)] * 6], True),
    "tensors in dicts": ([[{"x": torch.zeros(3)}] * 3, [{"x": torch.ones(3)}] * 3], False),
    "a batch": ([torch.zeros(6, 2), torch.ones(6, 2)], False),
    "a batch in a dict": ([{"x": torch.zeros(6, 2)}, {"x": torch.ones(6, 2)}], False),
    "a batch in a tuple": ([(torch.zeros(6), torch.zeros(6)), (torch.zeros(6), torch.ones(6))], False),
}


@pytest.mark.parametrize(("given_to", "is_rows"), DIFFERENT.values(), ids=DIFFERENT.keys())
def test_other_rows_are_refused(given_to, is_rows):
    assert [type(error) for error in compared(given_to, is_rows)] == [BadOption, BadOption]


def test_other_rows_in_a_list_of_inputs_and_targets_are_refused():
    found = compared([[torch.zeros(6, 2), torch.zeros(6)], [torch.ones(6, 2), torch.ones(6)]], is_rows=False)
    assert [type(error) for error in found] == [BadOption, BadOption]


@dataclasses.dataclass
class Row:
    x: torch.Tensor

    def __len__(self) -> int:
        return len(self.x)


EQUAL: dict[str, Callable[[], Any]] = {
    "strings": lambda: ["aa", "bb", "cc"],
    "tensors": lambda: [torch.arange(3.0) for _ in range(6)],
    "tensors in dicts in lists": lambda: [[{"x": torch.arange(3.0)}] for _ in range(6)],
    "tensors that are not contiguous": lambda: [torch.arange(6.0).view(2, 3).T for _ in range(6)],
    "numbers that are none": lambda: [torch.full((2,), float("nan")) for _ in range(6)],
    "rows that cannot be pickled": lambda: [[lambda: 0] for _ in range(6)],
}


@pytest.mark.parametrize("given", EQUAL.values(), ids=EQUAL.keys())
def test_equal_rows_are_the_same_rows(given):
    assert [type(found) for found in compared([given(), given()])] == [list, list]


def test_equal_rows_that_are_objects_with_tensors_are_the_same_rows():
    keep = [torch.arange(3.0) for _ in range(20)]  # so that no two of the rows' tensors share an address
    found = compared([[Row(torch.arange(3.0)) for _ in range(6)] for _ in range(2)])
    assert found == [[0, 1, 2], [3, 4, 5]], keep


def test_equal_rows_are_the_same_whether_or_not_their_strings_are_one_object():
    text = "hello world"
    other = "".join(["hello ", "world"])
    found = compared([[{"a": text, "b": text}] * 3, [{"a": text, "b": other}] * 3])
    assert [type(one) for one in found] == [list, list]


def test_rows_are_compared_once():
    given, ranks = ["aa", "bb"], Ranks(2)

    def work(group: OneOf) -> None:
        deals = dealer(group)
        for _ in range(5):
            deals.share(rows_of(given), given)

    ranks.run(work)
    assert ranks.gathered == 2  # the members, the comparison


# Speed that is measured


def timing(seconds_per_unit: list[float], steps: int = TIMED_STEPS, names=("H200", "T4"), **options) -> list[Any]:
    """Each process's dealer and what it said, after so many steps of its own speed."""

    def work(group: OneOf):
        deals = dealer(group, **options)
        said = [deals.record_time(10.0, 10 * seconds_per_unit[group.rank]) for _ in range(steps) if deals.measuring]
        return deals, said

    return Ranks(len(seconds_per_unit), list(names)).run(work)


def test_unlike_devices_without_plans_are_measured():
    assert all(deals.measuring for deals, _ in timing([1.0, 1.0], steps=0))


def test_like_devices_are_not_measured():
    assert not any(deals.measuring for deals, _ in timing([1.0, 1.0], steps=0, names=("H200", "H200")))


def test_devices_with_plans_are_not_measured():
    assert not any(deals.measuring for deals, _ in timing([1.0, 1.0], steps=0, plan_=plan()))


def test_devices_with_rows_of_their_own_are_not_measured():
    assert not any(deals.measuring for deals, _ in timing([1.0, 1.0], steps=0, rows_are="local"))


def test_after_five_steps_rows_are_dealt_by_speed_with_a_message():
    found = timing([1.0, 3.0])
    sentence = "rows are now dealt by measured speed: H200 75%, T4 25%"
    assert [said for _, said in found] == [[None] * 4 + [sentence]] * 2
    assert [deals.speeds for deals, _ in found] == [pytest.approx([0.75, 0.25])] * 2


def test_after_five_steps_nothing_is_measured_any_more():
    assert not any(deals.measuring for deals, _ in timing([1.0, 3.0]))


def test_devices_of_about_the_same_speed_share_evenly():
    found = timing([1.0, 1.09])
    assert [(deals.speeds, said) for deals, said in found] == [([1.0, 1.0], [None] * 5)] * 2


def test_devices_that_differ_by_more_than_a_tenth_do_not():
    assert timing([1.0, 1.12])[0][0].speeds != [1.0, 1.0]


def test_one_slow_step_does_not_decide():
    def work(group: OneOf):
        deals = dealer(group)
        for step in range(TIMED_STEPS):
            deals.record_time(10.0, 1000.0 if step == 0 and group.rank == 1 else 10.0)
        return deals.speeds

    assert Ranks(2, ["H200", "T4"]).run(work) == [[1.0, 1.0]] * 2


def test_the_measured_speeds_deal_the_next_step():
    given = ["row"] * 8

    def work(group: OneOf) -> int:
        deals = dealer(group)
        for _ in range(TIMED_STEPS):
            deals.record_time(10.0, 10.0 if group.rank == 0 else 30.0)
        return len(deals.share(rows_of(given), given).indices)

    assert Ranks(2, ["H200", "T4"]).run(work) == [6, 2]


def test_speed_is_work_and_not_rows_per_second():
    def work(group: OneOf):
        deals = dealer(group)
        for _ in range(TIMED_STEPS):
            deals.record_time(*((30.0, 30.0) if group.rank == 0 else (10.0, 10.0)))
        return deals.speeds

    assert Ranks(2, ["H200", "T4"]).run(work) == [[1.0, 1.0]] * 2


# Real processes


STEPS = 4


@functools.cache
def reference(task=Words, rows=12):
    model = plain_loop(task(), steps_of_rows(STEPS, rows), functools.partial(torch.optim.AdamW, lr=1e-2))
    return [param.detach().numpy() for param in model.parameters()]


@pytest.fixture(scope="module", params=[3, pytest.param(2, marks=pytest.mark.torture)])
def fleet(request):
    fleet = Fleet(request.param)
    yield fleet
    fleet.close()


def distance(expected, found):
    a, b = (np.concatenate([weight.ravel() for weight in weights]) for weights in (expected, found))
    return float(np.linalg.norm(a - b) / np.linalg.norm(a))


def check(answers, expected):
    """All processes hold the same bits, and those are the one-process run's within 1e-10."""
    assert not [answer["error"] for answer in answers if "error" in answer]
    for answer in answers[1:]:
        assert all(np.array_equal(a, b) for a, b in zip(answers[0]["weights"], answer["weights"], strict=True))
    assert distance(expected, answers[0]["weights"]) < 1e-10


def test_without_faults_the_weights_are_those_of_one_process(fleet):
    check(fleet.train(), reference())


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("who", ["one", "all"])
def test_an_oom_on_one_or_on_all_is_survived(fleet, who, place):
    ranks = range(fleet.size) if who == "all" else [fleet.size - 1]
    answers = fleet.train([(rank, step, 0, place) for rank in ranks for step in (2, 3)])
    check(answers, reference())
    assert [answer["ooms"] for answer in answers] == [2 if rank in ranks else 0 for rank in range(fleet.size)]


def test_repeated_ooms_on_the_same_process_are_survived(fleet):
    faults = [
        (0, 2, 0, "forward"),
        (0, 2, 1, "forward"),
        (0, 2, 0, "backward"),
        (1, 2, 1, "backward"),
        (0, 2, 0, "clip"),
    ]
    check(fleet.train(faults), reference())


def test_only_the_rank_that_failed_splits_finer(fleet):
    answers = fleet.train([(0, 2, 0, "forward")], micro_batch=None, rows_are="local")
    check(answers, reference())
    assert answers[0]["micro_batches"][1] > 1
    assert all(answer["micro_batches"][1] == 1 for answer in answers[1:])


def test_rows_of_their_own_do_as_well_as_rows_that_are_dealt(fleet):
    check(fleet.train([(1, 3, 0, "backward")], rows_are="local"), reference())


def test_fewer_rows_than_processes_are_exact(fleet):
    answers = fleet.train(rows=fleet.size - 1)
    check(answers, reference(rows=fleet.size - 1))
    assert 0 in answers[0]["micro_batches"] + answers[-1]["micro_batches"]


def test_every_rank_returns_the_loss_the_rows_and_the_log_of_the_whole_step(fleet):
    answers = fleet.train()
    assert all(answer["losses"] == answers[0]["losses"] for answer in answers)
    assert all(answer["rows"] == [12] * STEPS for answer in answers)
    assert all(answer["logs"] == answers[0]["logs"] for answer in answers)


def test_a_step_tells_how_long_its_collectives_took(fleet):
    for answer in fleet.train():
        times = zip(answer["communication_s"], answer["seconds"], strict=True)
        assert all(0 < communication_s < seconds for communication_s, seconds in times)


def test_what_a_loss_logs_is_averaged_over_all_ranks(fleet):
    words = [
        (row["id"], len(row["words"])) for rows in steps_of_rows(STEPS, 12) for row in rows
    ]  # micro-batches of one row: each id is weighted by its words
    expected = []
    for start in range(0, len(words), 12):
        part = words[start : start + 12]
        expected.append(sum(row * count for row, count in part) / sum(count for _, count in part))
    answers = fleet.train(micro_batch=1)
    assert [log["id"] for log in answers[-1]["logs"]] == pytest.approx(expected, rel=1e-12)


@pytest.mark.parametrize("bucket_bytes", [256, 1024])
def test_gradients_larger_than_a_bucket_are_summed_too(fleet, bucket_bytes):
    check(fleet.train(bucket_bytes=bucket_bytes), reference())


def test_a_parameter_that_only_some_rows_reach_is_exact(fleet):
    """Long rows alone use the branch, and all those may be with one process."""
    check(fleet.train([(0, 2, 0, "backward")], task="Branches", micro_batch=1), reference(Branches))


def test_terms_with_different_counts_are_summed_over_processes(fleet):
    check(fleet.train([(1, 2, 0, "forward")], task="TwoTerms"), reference(TwoTerms))


def test_an_oom_while_collating_for_the_counts_is_survived(fleet):
    check(fleet.train(task="FullHost", micro_batch=4), reference(TwoTerms))


def test_different_global_rows_are_refused(fleet):
    answers = fleet.train(own_rows=True)
    assert all("rank 1 has other rows than rank 0 (12 and 12 of them)" in answer["error"] for answer in answers)


def schedules(size):
    """Up to three faults for a process in a step: more could be a row that does not fit alone."""
    fault = st.tuples(st.integers(0, 3), st.sampled_from(PLACES))
    one = st.lists(fault, max_size=3, unique=True)
    return st.lists(one, min_size=size * STEPS, max_size=size * STEPS)


def run_schedule(fleet, schedule, **how):
    faults = [
        (index % fleet.size, 1 + index // fleet.size, micro, place)
        for index, some in enumerate(schedule)
        for micro, place in some
    ]
    check(fleet.train(faults, **how), reference())


def any_schedule(fleet, examples):
    @settings(max_examples=examples, deadline=None)
    @given(schedules(fleet.size), st.sampled_from([1, 2, 3, None]), st.sampled_from(["global", "local"]))
    def holds(schedule, micro_batch, rows_are):
        run_schedule(fleet, schedule, micro_batch=micro_batch, rows_are=rows_are)

    holds()


def test_any_schedule_of_faults_is_survived_with_the_same_weights(fleet):
    any_schedule(fleet, 6)


@pytest.mark.torture
def test_two_hundred_schedules_of_faults_are_survived_with_the_same_weights(fleet):
    any_schedule(fleet, 100)
