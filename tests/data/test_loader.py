"""The loader: the same steps with any workers, from any position, after any loss; and the training's state untouched."""

import os
import random
import resource
import signal
import threading
import time
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from brimful.data import loader as module
from brimful.data.batches import Stream
from brimful.data.loader import SETTLE_CHECKS, Loader, Watchdog, exit_cause, held_bytes
from brimful.errors import BadOption, StoppedWaiting, TaskError
from brimful.memory.layout import PADDED
from brimful.task import Task

GIB = 2**30


class Words(Task):
    """Rows of one length, collated by padding."""

    worst_shape = (40,)
    global_batch = 12

    def shape(self, row):
        return (len(row),)

    def collate(self, rows):
        return {"ids": torch.nn.utils.rnn.pad_sequence(list(rows), batch_first=True)}


class Rows:
    """A map-style dataset: row n holds n, as often as it is long."""

    def __init__(self, rows=50, fail_at=None):
        self.rows, self.fail_at = rows, fail_at

    def __len__(self):
        return self.rows

    def __getitem__(self, index):
        if index == self.fail_at:
            raise KeyError("ids")
        return torch.full((1 + index % 40,), index + 1)


class Noisy(Rows):
    """Each row with random numbers from all three generators."""

    def __getitem__(self, index):
        return torch.tensor([index, random.random(), np.random.random(), torch.rand(()).item()], dtype=torch.float64)


def rows_of(step):
    """What the step holds, row by row in the order of `indices`."""
    found = [None] * len(step)
    for group, part in zip(step.groups, step.parts, strict=True):
        for place, row in zip(group, part["ids"] if step.collated else part, strict=True):
            found[place] = row[row != 0].tolist()
    return found


def some(loader, steps):
    taken = []
    for step in loader:
        taken.append(step)
        if len(taken) == steps:
            loader.close()
            return taken
    raise AssertionError("endless")


def in_threes(shapes):
    order = sorted(range(len(shapes)), key=lambda row: shapes[row])
    return [sorted(order[start : start + 3]) for start in range(0, len(order), 3)]


PLAN = SimpleNamespace(split=in_threes, row_layout=PADDED, global_batch=12, host=None)
"""As much of a plan as a loader needs."""


def made(dataset=None, task=None, **options):
    return Loader(dataset or Rows(), task or Words(), PLAN, **options)


def stream(start, count):
    return Stream(50, 0).take(start, count).tolist()


@pytest.mark.parametrize("workers", [0, 1, 3])
def test_steps_hold_the_streams_rows_with_any_number_of_workers(workers):
    for number, step in enumerate(some(made(workers=workers), 6)):
        rows = stream(number * 12, 12)
        assert step.indices.tolist() == rows
        assert rows_of(step) == [Rows()[row].tolist() for row in rows]
        assert step.start == 12 * number and step.step_rows == 12


def test_each_micro_batch_is_padded_to_its_own_longest():
    (step,) = some(made(), 1)
    assert [part["ids"].shape for part in step.parts] == [(3, shape[0]) for shape in step.shapes]
    assert len(set(step.shapes)) > 2


@pytest.mark.parametrize("workers", [0, 2])
def test_a_run_goes_on_exactly_where_it_was_with_other_workers(workers):
    first = made(workers=2)
    some(first, 4)
    second = made(workers=workers)
    second.load_state_dict(first.state_dict())
    whole = some(made(), 7)
    assert [step.indices.tolist() for step in some(second, 3)] == [step.indices.tolist() for step in whole[4:]]


@pytest.mark.parametrize("workers", [0, 1])
def test_a_step_tells_its_rows_own_positions_and_those_that_are_computed(workers):
    (rows,) = some(made(workers=workers), 1)
    lengths = [[1 + rows.indices[place] % 40 for place in group] for group in rows.groups]
    assert rows.real_positions == sum(map(sum, lengths))
    assert rows.positions == sum(len(group) * max(group) for group in lengths)


def test_without_lengths_only_what_is_computed_is_known():
    class Untold(Words):
        shape = Task.shape

    (rows,) = some(made(task=Untold()), 1)
    assert (rows.real_positions, rows.positions) == (None, 12 * 40)


def test_what_was_read_ahead_does_not_count():
    loader = made(workers=2, prefetch=4)
    some(loader, 3)
    assert loader.samples == 36 and loader.state_dict()["samples"] == 36


def indices(steps, count):
    return [next(steps).indices.tolist() for _ in range(count)]


@pytest.mark.parametrize("workers", [0, 1])
def test_a_step_read_ahead_is_the_next_one_and_counts_when_it_is_taken(workers):
    loader = made(workers=workers)
    steps = iter(loader)
    seen = []
    for number in range(1, 5):
        seen += indices(steps, 1)
        loader.read_ahead()
        assert (loader.samples, loader.state_dict()["samples"]) == (12 * number, 12 * number)
    assert seen == [step.indices.tolist() for step in some(made(), 4)]
    steps.close()


def test_reading_ahead_reads_the_rows_at_once():
    class Counted(Rows):
        reads = 0

        def __getitem__(self, index):
            self.reads += 1
            return super().__getitem__(index)

    rows = Counted()
    loader = made(rows)
    steps = iter(loader)
    next(steps)
    loader.read_ahead()
    loader.read_ahead()
    assert rows.reads == 24
    next(steps)
    assert rows.reads == 24
    steps.close()


def test_an_error_in_reading_ahead_is_raised_when_the_step_is_taken():
    bad = stream(12, 12)[0]
    loader = made(Rows(fail_at=bad))
    steps = iter(loader)
    next(steps)
    loader.read_ahead()
    with pytest.raises(TaskError, match=f"row {bad} of the dataset cannot be read"):
        next(steps)


def test_a_wait_for_a_step_ahead_that_is_given_up_loses_nothing():
    class Waits(Rows):
        stopped = False

        def __getitem__(self, index):
            if index == stream(12, 12)[5] and not self.stopped:
                self.stopped = True
                raise StoppedWaiting
            return super().__getitem__(index)

    loader = made(Waits())
    steps = iter(loader)
    first = indices(steps, 1)
    with pytest.raises(StoppedWaiting):
        loader.read_ahead()
    assert loader.samples == 12
    assert first + indices(steps, 2) == [step.indices.tolist() for step in some(made(), 3)]
    steps.close()


@pytest.mark.parametrize("workers", [0, 1])
def test_a_step_read_ahead_is_read_again_if_rows_are_dealt_otherwise(workers):
    loader = made(rank=0, speeds=[1.0, 1.0], workers=workers)
    steps = iter(loader)
    next(steps)
    loader.read_ahead()
    loader.deal_by([1.0, 5.0])
    assert len(next(steps)) == 2 and loader.samples == 24
    steps.close()


def test_random_rows_are_the_same_with_any_workers_and_processes():
    def all_rows(**options):
        n = options.pop("n", 1)
        loaders = [made(Noisy(), rank=rank, speeds=[1.0] * n, **options) for rank in range(n)]
        steps = [some(loader, 3) for loader in loaders]
        return sorted(
            tuple(row.tolist())
            for taken in steps
            for step in taken
            for row in torch.cat([p["ids"] for p in step.parts])
        )

    alone = all_rows(workers=0)
    assert len({row[1:] for row in alone}) == 36
    assert all_rows(workers=2) == alone
    assert all_rows(workers=0, n=3) == alone


def test_the_trainings_random_numbers_are_untouched():
    def drawn(read):
        random.seed(1), np.random.seed(2), torch.manual_seed(3)
        read()
        return random.random(), np.random.random(), torch.rand(()).item()

    quiet = drawn(lambda: None)
    assert drawn(lambda: some(Loader(Noisy(), Words(), workers=0), 2)) == quiet
    assert drawn(lambda: some(Loader(Noisy(), Words(), workers=1), 2)) == quiet


def test_another_seed_gives_other_steps_and_other_random_rows():
    one, other = (some(Loader(Noisy(), Words(), seed=seed), 1)[0] for seed in (0, 1))
    assert one.indices.tolist() != other.indices.tolist()


def test_rows_that_no_batch_can_be_sliced_from_come_as_rows():
    class Graph(Words):
        def collate(self, rows):
            return {"nodes": torch.cat(list(rows)), "graphs": torch.tensor([len(rows)])}

    (step,) = some(made(task=Graph()), 1)
    assert not step.collated
    assert rows_of(step) == [Rows()[row].tolist() for row in step.indices]


@pytest.mark.parametrize("workers", [0, 2])
def test_a_row_that_cannot_be_read_is_one_sentence_with_its_number(workers):
    with pytest.raises(TaskError) as failure:
        some(Loader(Rows(fail_at=17), Words(), workers=workers), 5)
    assert "row 17 of the dataset cannot be read at" in str(failure.value)
    assert str(failure.value).endswith("(KeyError: 'ids').")


class Uncollated(Words):
    def collate(self, rows):
        raise KeyError("zzz")


@pytest.mark.parametrize("workers", [0, 2])
def test_a_collate_that_fails_is_named_with_its_line_and_keeps_its_traceback(workers):
    with pytest.raises(TaskError, match=r"collate\(\) failed at .*test_loader.py:\d+: KeyError: 'zzz'\.") as failure:
        some(made(task=Uncollated(), workers=workers), 1)
    assert 'raise KeyError("zzz")' in str(failure.value.__cause__)


def test_without_a_plan_the_step_gets_the_rows_and_cuts_them_itself():
    (step,) = some(Loader(Rows(), Words()), 1)
    assert not step.collated and step.groups == [list(range(12))]
    assert rows_of(step) == [Rows()[row].tolist() for row in step.indices]


class Wide(Rows):
    """Rows of many tensors, in all the ways a tensor may lie in memory."""

    def __getitem__(self, index):
        table = torch.full((3, 4), index + 1)
        kinds = [
            table.T,
            table[:, 1:3],
            torch.ones(1).expand(5),
            torch.ones(2, 0),
            table.to(torch.bfloat16),
            table[1, 2],
        ]
        return {
            "many": [torch.full((1 + number,), index) for number in range(30)],
            "kinds": kinds,
            "name": f"row {index}",
        }


@contextmanager
def open_files(spare):
    """As many more files may be opened."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    highest = max(int(file.name) for file in Path("/proc/self/fd").iterdir())
    files = [os.open(os.devnull, os.O_RDONLY)]
    while files[-1] < highest:
        files.append(os.open(os.devnull, os.O_RDONLY))  # in the gaps
    resource.setrlimit(resource.RLIMIT_NOFILE, (files[-1] + 1 + spare, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        for file in files:
            os.close(file)


def test_a_step_takes_one_open_file_however_many_tensors_it_has(monkeypatch):
    monkeypatch.setattr(module, "OPEN_FILES", 0)
    with open_files(spare=60):
        steps = some(Loader(Wide(), Words(), workers=2), 4)
    assert [step.indices.tolist() for step in steps] == [
        step.indices.tolist() for step in some(Loader(Wide(), Words()), 4)
    ]


def test_tensors_come_from_a_worker_as_they_were_read():
    (here,), (there,) = (some(Loader(Wide(), Words(), workers=workers), 1) for workers in (0, 1))
    for one, other in zip(here.parts[0], there.parts[0], strict=True):
        assert one["name"] == other["name"]
        for a, b in zip(one["kinds"] + one["many"], other["kinds"] + other["many"], strict=True):
            assert torch.equal(a, b) and (a.dtype, a.shape, a.stride()) == (b.dtype, b.shape, b.stride())


def test_the_limit_of_open_files_is_raised_for_workers(monkeypatch):
    monkeypatch.setattr(module, "OPEN_FILES", 777)
    with open_files(spare=200):
        some(Loader(Rows(), Words(), workers=1), 1)
        assert resource.getrlimit(resource.RLIMIT_NOFILE)[0] == 777


def test_where_no_file_can_be_opened_steps_are_read_without_workers(monkeypatch):
    monkeypatch.setattr(module, "OPEN_FILES", 0)
    heard = []
    with open_files(spare=3):
        steps = some(Loader(Rows(), Words(), workers=1, note=lambda message, details: heard.append(message)), 3)
    assert [step.indices.tolist() for step in steps] == [stream(start, 12) for start in (0, 12, 24)]
    assert len(heard) == 1 and "Too many open files" in heard[0]
    assert heard[0].endswith("). Training continues with no loader workers instead of 1; no row is lost")


class Unpicklable(Rows):
    def __getitem__(self, index):
        return [lambda: index]


def test_rows_that_no_worker_can_pass_on_are_an_error_instead_of_a_wait_without_end():
    with pytest.raises(TaskError, match=r"a worker cannot pass on its rows \(.*Try: workers=0"):
        some(Loader(Unpicklable(), Words(), workers=1), 1)


class Stalled(Rows):
    """Row 17 is never read."""

    def __getitem__(self, index):
        while index == 17:
            time.sleep(0.05)
        return super().__getitem__(index)


def test_a_stuck_worker_is_reported_and_ends_the_wait_with_the_rows_it_hangs_on(monkeypatch):
    monkeypatch.setattr(module, "CHECK_S", 0.05)
    monkeypatch.setattr(module, "POLL_S", 0.1)
    monkeypatch.setattr(module, "STALL_S", 0.3)
    monkeypatch.setattr(module, "STUCK_S", 1.0)
    heard = []
    with pytest.raises(TaskError, match=r"the loader workers have not read rows \d+, .* in 1.0 s\. Try: .*workers=0"):
        some(made(Stalled(), workers=1, note=lambda message, details: heard.append(message)), 5)
    assert len(heard) == 1 and heard[0].startswith(
        "training has waited 0.30 s for its next rows: 1 loader worker reads rows "
    )


class Hungry(Rows):
    """Row 17 needs more host RAM than there is, the first times."""

    def __init__(self, tries, where):
        super().__init__()
        self.tries, self.where = tries, where

    def __getitem__(self, index):
        if index == 17:
            with self.where.open("a") as file:
                file.write("x")
            if len(self.where.read_text()) <= self.tries:
                raise MemoryError
        return super().__getitem__(index)


@pytest.mark.parametrize(("workers", "tries"), [(0, 1), (2, 1), (2, 2)])
def test_a_row_that_host_ram_was_too_short_for_is_read_again_without_workers(tmp_path, workers, tries):
    heard = []
    loader = made(Hungry(tries, tmp_path / "tries"), workers=workers, note=lambda message, _: heard.append(message))
    assert [step.indices.tolist() for step in some(loader, 5)] == [stream(12 * step, 12) for step in range(5)]
    assert len(heard) == bool(workers)
    if heard:
        assert heard[0].startswith("row 17 of the dataset cannot be read at ")
        assert heard[0].endswith(
            "(host RAM ran out). Training continues with 1 loader worker instead of 2; no row is lost"
        )


@pytest.mark.parametrize("workers", [0, 1])
def test_a_row_that_never_fits_host_ram_stops_the_run_with_its_number(tmp_path, workers):
    with pytest.raises(TaskError, match=r"row 17 of the dataset cannot be read at .* \(host RAM ran out\)\. Try: "):
        some(made(Hungry(99, tmp_path / "tries"), workers=workers), 5)


class Deadly(Rows):
    """A row that takes its reader with it."""

    def __getitem__(self, index):
        if index == 17 and torch.utils.data.get_worker_info() is not None:
            os._exit(3)
        return super().__getitem__(index)


@pytest.mark.torture
def test_a_row_that_ends_its_readers_stops_the_run_before_it_ends_the_run_itself():
    heard = []
    with pytest.raises(TaskError, match="two workers ended with exit code 3 while reading the same step"):
        some(made(Deadly(), workers=2, note=lambda message, details: heard.append(message)), 5)
    assert len(heard) == 1


def test_relief_lowers_what_is_read_ahead_then_the_workers_and_loses_nothing():
    loader, told, taken = made(workers=2, prefetch=4), [], []
    for step in loader:
        taken.append(step.indices.tolist())
        told.append(loader.reduce_memory())
        if len(taken) == 6:
            break
    loader.close()
    assert told == [
        "each worker reads 2 steps ahead instead of 4",
        "each worker reads 1 step ahead instead of 2",
        "1 loader worker instead of 2",
        "no loader workers instead of 1",
        None,
        None,
    ]
    assert taken == [step.indices.tolist() for step in some(made(), 6)]


def test_a_killed_worker_is_told_and_the_steps_go_on():
    heard, taken = [], []
    loader = made(workers=2, note=lambda message, details: heard.append((message, details)))
    for step in loader:
        taken.append(step.indices.tolist())
        if len(taken) == 2:
            pid = loader.worker_pids[0]
            os.kill(pid, signal.SIGKILL)
        if len(taken) == 9:
            break
    loader.close()
    assert taken == [step.indices.tolist() for step in some(made(), 9)]
    assert len(heard) == 1 and heard[0][1] == {"pid": pid, "exit_code": -9, "workers": 1}
    assert heard[0][0].startswith(f"loader worker {pid} was killed")
    assert heard[0][0].endswith(". Training continues with 1 loader worker instead of 2; no row is lost")


def test_a_worker_that_dies_does_not_interrupt_what_the_training_is_doing():
    next(iter(torch.utils.data.DataLoader(range(4), num_workers=1)))  # torch's handler is there from now on
    heard = []
    loader = made(workers=1, note=lambda message, details: heard.append(message))
    steps = iter(loader)
    next(steps)
    os.kill(loader.worker_pids[0], signal.SIGKILL)
    time.sleep(0.3)  # in the middle of a training step: torch's handler would raise here
    assert not heard
    while not heard:  # what was read ahead comes first
        next(steps)
    steps.close()
    assert heard[0].startswith("loader worker ")


def test_closing_ends_the_workers():
    loader = made(workers=2)
    steps = iter(loader)
    next(steps)
    pids = loader.worker_pids
    steps.close()
    assert len(pids) == 2 and not any(_alive(pid) for pid in pids)


def _alive(pid):
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


@pytest.mark.parametrize(
    ("code", "kills", "said"),
    [
        (-9, (3, 4), "was killed by the kernel because host RAM ran out"),
        (-9, (3, 3), "was killed, by the kernel for lack of host RAM or by a user"),
        (-9, (None, None), "was killed, by the kernel for lack of host RAM or by a user"),
        (-11, (3, 3), "ended with SIGSEGV"),
        (1, (3, 3), "ended with exit code 1"),
    ],
)
def test_what_became_of_a_worker(code, kills, said):
    assert exit_cause(code, *kills) == said


def test_a_bus_error_points_to_shared_memory():
    assert "/dev/shm is full" in exit_cause(-signal.SIGBUS, None, None)


def test_processes_share_a_step():
    steps = [some(made(rank=rank, speeds=[1.0, 1.0]), 1)[0] for rank in (0, 1)]
    rows = np.concatenate([step.indices for step in steps]).tolist()
    assert sorted(rows) == sorted(stream(0, 12))
    assert [step.step_rows for step in steps] == [12, 12]


def test_rank_and_processes_come_from_the_launcher(monkeypatch):
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("WORLD_SIZE", "3")
    (step,) = some(Loader(Rows(), Words()), 1)
    assert len(step) == 4


def test_new_speeds_hold_from_the_next_step_on():
    loader, sizes = made(rank=0, speeds=[1.0, 1.0], workers=1, prefetch=3), []
    for step in loader:
        sizes.append(len(step))
        if len(sizes) == 2:
            loader.deal_by([1.0, 5.0])
        if len(sizes) == 4:
            break
    loader.close()
    assert sizes == [6, 6, 2, 2]


def test_lengths_may_be_given_as_a_table():
    table = [1 + row % 40 for row in range(50)]
    steps = some(Loader(Rows(), Words(), lengths=table, mix="window:4"), 4)
    assert sorted(row for step in steps for row in step.indices) == sorted(stream(0, 48))


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"workers": -1}, "workers=-1 must be a whole number of at least 0"),
        ({"prefetch": 0}, "prefetch=0 must be a whole number of at least 1"),
        ({"lengths": [1, 2]}, "lengths has 2 lines, but the dataset has 50 rows"),
        ({"mix": "window:5"}, "needs the lengths of the rows"),
    ],
)
def test_what_cannot_work_is_told_at_once(options, said):
    with pytest.raises(BadOption, match=said):
        Loader(Rows(), Words(), **options)


def test_a_watchdog_lowers_the_loader_that_takes_too_much_and_says_so(monkeypatch):
    monkeypatch.setattr("brimful.data.loader.CHECK_S", 0.05)
    heard, taken = [], []
    loader = made(workers=2, prefetch=2, host_limit_bytes=2**20, note=lambda message, details: heard.append(message))
    for step in loader:
        taken.append(step.indices.tolist())
        time.sleep(0.05)
        if loader.workers == 0 or len(taken) == 200:
            break
    loader.close()
    assert loader.workers == 0 and heard[0].endswith("each worker reads 1 step ahead instead of 2")
    assert "of 1 MiB host RAM" in heard[0]
    assert taken == [step.indices.tolist() for step in some(made(), len(taken))]


def test_what_the_loader_changes_is_logged_by_default(caplog, monkeypatch):
    monkeypatch.setattr(module, "CHECK_S", 0.02)
    loader = Loader(Rows(), Words(), workers=1, host_limit_bytes=1)
    for _ in loader:
        if caplog.records:
            break
        time.sleep(0.02)
    assert "of 1 B host RAM" in caplog.records[0].message


def test_freed_memory_is_given_back_before_a_worker_is_forked_that_would_hold_it(monkeypatch):
    loader, seen = Loader(Rows(), Words(), workers=1), []
    monkeypatch.setattr("brimful.data.loader.trim_heap", lambda: seen.append(loader.worker_pids))
    next(iter(loader))
    assert seen == [[]]
    loader.close()


def watched(levels, measures):
    """The messages when the watchdog reads these shares of 16 GiB in turn."""
    said, levels, measures = [], iter(levels), iter(measures)
    dog = Watchdog(16 * GIB, lambda: next(measures, None), said.append, used=lambda: int(next(levels) * 16 * GIB))
    return dog, said


def checks(dog, count):
    for _ in range(count):
        dog.check()


def test_nothing_is_said_below_nine_tenths():
    dog, said = watched([0.5, 0.89, 0.899], ["lowered"])
    checks(dog, 3)
    assert said == []


def test_above_it_a_measure_is_taken_and_told_with_the_figures():
    dog, said = watched([0.95], ["each worker reads 1 step ahead instead of 2"])
    checks(dog, 1)
    assert said == ["15.2 GiB of 16 GiB host RAM (95%) in use: each worker reads 1 step ahead instead of 2"]


def test_a_measure_is_given_time_before_the_next():
    dog, said = watched([0.95, 0.95], ["first", "second"])
    checks(dog, 1 + SETTLE_CHECKS)
    assert len(said) == 1
    checks(dog, 1)
    assert said[1].endswith("second")


def test_that_nothing_is_left_to_lower_is_said_once_until_it_was_better():
    dog, said = watched([0.95, 0.96, 0.5, 0.97], [])
    checks(dog, 1 + SETTLE_CHECKS + 3)
    assert len(said) == 2 and all("nothing is left to reduce" in sentence for sentence in said)


def test_it_runs_beside_the_training_and_ends_with_it():
    said = []
    with Watchdog(100, lambda: "lowered", said.append, every_s=0.01, used=lambda: 95):
        deadline = time.monotonic() + 10
        while not said and time.monotonic() < deadline:
            time.sleep(0.01)
    assert said
    assert not [thread for thread in threading.enumerate() if thread.name == "brimful-host-ram"]


def test_a_look_that_fails_does_not_stop_the_training():
    said = []
    with Watchdog(100, lambda: None, said.append, every_s=0.01, used=lambda: 1 // 0):
        deadline = time.monotonic() + 10
        while not said and time.monotonic() < deadline:
            time.sleep(0.01)
    assert said == ["host RAM could not be read (integer division or modulo by zero) and is no longer watched"]


def test_what_this_process_holds_counts(monkeypatch):
    class Free:
        ram_limit_bytes = ram_available_bytes = 2**50

        @classmethod
        def detect(cls):
            return cls

    monkeypatch.setattr(module, "Host", Free)  # other processes of this machine come and go
    before = held_bytes(2**50)
    ballast = bytearray(os.urandom(1) * 200 * 2**20)
    assert held_bytes(2**50) - before > 150 * 2**20
    del ballast


def test_what_the_machine_lacks_counts_too(monkeypatch):
    class Full:
        ram_limit_bytes, ram_available_bytes = 16 * GIB, GIB

        @classmethod
        def detect(cls):
            return cls

    monkeypatch.setattr(module, "Host", Full)
    monkeypatch.setattr(module, "tree_bytes", lambda pid: 3 * GIB)
    assert held_bytes(16 * GIB) == 15 * GIB
    Full.ram_available_bytes = 14 * GIB
    assert held_bytes(16 * GIB) == 3 * GIB
