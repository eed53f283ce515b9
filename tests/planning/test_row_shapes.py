"""Lengths are read from all rows if that is fast, from a sample if it is slow, and `collate` is tried before any probe."""

import pytest
import torch

from brimful.errors import TaskError
from brimful.planning.probe import COMPARED_SIZES, SAMPLED_ROWS, SHAPES_S, row_shapes, uneven_rows
from brimful.task import Task
from tests.planning.clock import Clock
from tests.planning.small import Tagger, Texts, small_plan, texts

COUNT = 24_000
ROW = texts(32)[0]


class Data:
    """Rows of 9 to 31 tokens, which take this long to read."""

    def __init__(self, clock, seconds):
        self.clock, self.seconds, self.read = clock, seconds, 0

    def __len__(self):
        return COUNT

    def __getitem__(self, index):
        self.read += 1
        self.clock.seconds += self.seconds
        return ROW[: 9 + index % 23]


@pytest.fixture
def clock(monkeypatch):
    clock = Clock()
    monkeypatch.setattr("brimful.planning.plan_time.time", clock)
    return clock


def test_fast_rows_are_all_read(clock):
    shapes = row_shapes(Texts(), Data(clock, 1e-5))
    assert len(shapes.shapes) == COUNT and not shapes.sampled


def test_slow_rows_are_sampled(clock):
    shapes = row_shapes(Texts(), Data(clock, 1e-3))
    assert shapes.sampled == "longest of 2,000 sampled rows of 24,000" and shapes.longest == (31,)


def test_very_slow_rows_are_read_for_a_few_seconds(clock):
    shapes = row_shapes(Texts(), Data(clock, 0.05))
    assert clock.seconds <= 2 * SHAPES_S and 0 < len(shapes.shapes) < SAMPLED_ROWS


def test_a_deterministic_plan_reads_as_many_rows_whatever_they_take(clock):
    fast, slow = (row_shapes(Texts(), Data(clock, seconds), steady=True) for seconds in (1e-5, 0.05))
    assert fast == slow and len(fast.shapes) == SAMPLED_ROWS


def test_reading_shows_its_progress(clock):
    phrases = []
    row_shapes(Texts(), Data(clock, 1e-3), phrases.append)
    assert "read the lengths of rows: 500 of 24,000" in phrases


def test_the_plan_says_that_rows_were_sampled(clock):
    data = Data(clock, 1e-3)
    plan = small_plan(Texts(), data=data, global_batch=4, workers=0)
    assert plan.shape == (31,)
    assert plan.choice("lengths").reason == "longest of 2,000 sampled rows of 24,000"
    assert data.read < COUNT


def test_rows_that_were_not_read_may_be_as_long_as_the_worst(clock):
    class Known(Tagger):
        def shape(self, row):
            return (len(row),)

        def collate(self, rows):
            return {"ids": torch.nn.utils.rnn.pad_sequence(rows, batch_first=True)}

    plan = small_plan(Known(), data=Data(clock, 1e-3), global_batch=4, workers=0)
    assert plan.shape == (64,) and "or the task's worst shape" in plan.choice("lengths").reason


@pytest.mark.parametrize(
    ("collate", "message"),
    [
        (
            lambda rows: torch.stack(rows),
            r"collate\(\) failed on the first 4 rows of the data at .*test_row_shapes.py:\d+",
        ),
        (lambda rows: rows[0][None], r"collate\(\) made 1 row of 4"),
    ],
)
def test_a_broken_collate_is_named_before_anything_is_probed(collate, message):
    class Broken(Tagger):
        def collate(self, rows):
            return collate(rows)

        def loss(self, model, batch):
            raise AssertionError("it was probed")

    with pytest.raises(TaskError, match=message):
        small_plan(Broken(), data=texts(3, 4, 5, 6, 7))


class Shapeless(Texts):
    """Nobody told it how long its rows are."""

    worst_shape = ()
    shape = Task.shape


def test_a_task_without_shape_whose_rows_differ_in_size_is_warned():
    rows = [ROW[: 9 + index % 23] for index in range(100)]
    plan = small_plan(Shapeless(), data=rows, global_batch=4)
    (warning,) = [one for one in plan.warnings if "shape()" in one]
    assert "has no shape(), and its rows have from 9 to 31 values (100 rows were compared)" in warning
    assert "define shape(row)" in warning


@pytest.mark.parametrize(
    ("task", "rows"),
    [
        (Shapeless(), [ROW] * 100),  # of one size
        (Texts(), [ROW[: 9 + index % 23] for index in range(100)]),  # with a shape
        (Shapeless(), [None] * 100),  # a mistake that others name
    ],
    ids=["equal", "shape", "broken"],
)
def test_there_is_nothing_to_warn_of(task, rows):
    assert uneven_rows(task, rows) == ""


def test_few_rows_are_compared_and_fewer_if_they_are_slow(clock):
    fast, slow = Data(clock, 1e-5), Data(clock, 0.2)
    uneven_rows(Shapeless(), fast)
    uneven_rows(Shapeless(), slow)
    assert fast.read == COMPARED_SIZES and slow.read == 3


def test_one_long_row_in_a_hundred_is_seen():
    rows = [ROW if index % 100 == 7 else ROW[:8] for index in range(2000)]
    assert "from 8 to 32 values" in uneven_rows(Shapeless(), rows)
