"""The argument of a step: rows or a batch, every row once however it is split, and a clear error if it cannot be."""

from collections import OrderedDict, defaultdict, namedtuple
from types import MappingProxyType

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import DataLoader, TensorDataset

from brimful.errors import TaskError
from brimful.step.rows import MAX_BATCH_TENSORS, BatchRows, ListedRows, as_rows
from brimful.task import Task

Pair = namedtuple("Pair", "x y")


class Plain(Task):
    """Rows that do not tell their lengths."""

    name = "plain"


class Text(Task):
    """Rows that do."""

    name = "text"
    worst_shape = (99,)

    def shape(self, row):
        return (len(row),)

    def collate(self, rows):
        return list(rows)


def taken(given, *, is_rows=False, task=None, shape=()):
    return as_rows(given, task or Plain(), shape, list_is_rows=is_rows)


def refused(given, **options) -> str:
    with pytest.raises(TaskError) as error:
        taken(given, **options)
    return str(error.value)


x, y = torch.arange(12.0).view(6, 2), torch.arange(6)


# What is a batch, and what is rows


BATCHES = {
    "a tensor": x,
    "a NumPy array": np.zeros((6, 2)),
    "a pair of tensors": (x, y),
    "a list of inputs and targets": [x, y],
    "a list of one tensor": [x],
    "a list of four tensors of one shape": [y] * MAX_BATCH_TENSORS,
    "more tensors of several shapes": [x, y, x, y, x, y],
    "more tensors of several kinds": [y, y.float(), y, y, y, y],
    "a list of a dict and a tensor": [{"ids": x}, y],
    "a dict": {"x": x, "y": y},
    "a dict of dicts": {"inputs": {"ids": x, "more": [y, y]}, "labels": y},
    "a dict that keeps its order": OrderedDict(x=x, y=y),
    "a dict that cannot be changed": MappingProxyType({"x": x}),
    "a named tuple": Pair(x, y),
    "a dict with a column of strings": {"x": x, "text": list("abcdef")},
    "a dict with a column of numbers": {"x": x, "weight": [1, 2.5, None, True, 3, 4]},
    "a dict with tensors of no dimension": {"x": x, "temperature": torch.tensor(0.5), "scale": np.array(2.0)},
    "a dict with other things": {"x": x, "name": "a", "none": None, "empty": [], "number": 7},
}


@pytest.mark.parametrize("given", BATCHES.values(), ids=BATCHES.keys())
def test_it_is_a_batch_of_six_rows(given):
    rows = taken(given)
    assert isinstance(rows, BatchRows)
    assert len(rows) == len(rows.shapes) == 6


ROWS = {
    "dicts": [{"x": torch.zeros(2)}] * 6,
    "tuples": [(torch.zeros(2), 1)] * 6,
    "strings": list("abcdef"),
    "numbers": [1, 2, 3, 4, 5, 6],
    "lists": [[1, 2]] * 6,
    "NumPy arrays": [np.zeros(3)] * 6,
    "many tensors of one shape": [torch.zeros(3)] * 6,
    "one dict alone": [{"x": torch.zeros(6)}],
    "objects": [object()] * 6,
}


@pytest.mark.parametrize("given", ROWS.values(), ids=ROWS.keys())
def test_a_list_is_a_list_of_rows(given):
    rows = taken(given)
    assert isinstance(rows, ListedRows)
    assert len(rows) == len(rows.shapes) == len(given)


def test_with_a_task_or_a_collate_even_two_tensors_in_a_list_are_two_rows():
    assert len(taken([x, y], is_rows=True)) == 2


def test_five_tensors_of_one_shape_are_rows_and_four_are_a_batch():
    assert len(taken([torch.zeros(7)] * (MAX_BATCH_TENSORS + 1))) == 5
    assert len(taken([torch.zeros(7)] * MAX_BATCH_TENSORS)) == 7


def test_a_tuple_is_never_a_list_of_rows():
    assert isinstance(taken((x, y), is_rows=True), BatchRows)


def test_what_a_data_loader_gives_is_a_batch():
    given = next(iter(DataLoader(TensorDataset(x, y), batch_size=4)))
    assert type(given) is list
    part = taken(given).batch([1, 3])
    assert torch.equal(part[0], x[[1, 3]])
    assert torch.equal(part[1], y[[1, 3]])


def test_a_hugging_face_batch_stays_one():
    from transformers import BatchEncoding

    rows = taken(BatchEncoding({"input_ids": x, "labels": y}))
    part = rows.batch([0, 5])
    assert isinstance(part, BatchEncoding)
    assert torch.equal(part["input_ids"], x[[0, 5]])


# Shapes


def test_rows_of_a_task_with_shape_have_their_own_lengths():
    assert taken(["a", "bcd", "ef"], task=Text(), is_rows=True).shapes == [(1,), (3,), (2,)]


def test_rows_of_a_task_without_shape_are_as_long_as_planned():
    assert taken([1, 2], shape=(7, 8), is_rows=True).shapes == [(7, 8), (7, 8)]


def test_the_rows_of_a_batch_are_as_long_as_planned_even_if_the_task_tells_lengths():
    assert taken({"x": x}, task=Text(), shape=(50,)).shapes == [(50,)] * 6


def test_lengths_may_be_a_list():
    class Lists(Text):
        def shape(self, row):
            return [len(row), 1]

    assert taken(["ab"], task=Lists(), is_rows=True).shapes == [(2, 1)]


# Splitting


def flat(batch, found: list) -> list:
    """Everything in it, in the order it lies."""
    if isinstance(batch, torch.Tensor):
        found.append(batch.tolist())
    elif hasattr(batch, "keys"):
        for key in sorted(batch.keys()):
            flat(batch[key], found)
    elif isinstance(batch, (tuple, list)) and not isinstance(batch[0], str):
        for value in batch:
            flat(value, found)
    else:
        found.append(list(batch))
    return found


@st.composite
def partitions(draw, rows=6) -> list[list[int]]:
    """Every row once, in any groups; each group ascending, as cuts are."""
    group_of = draw(st.lists(st.integers(0, 3), min_size=rows, max_size=rows))
    return [[row for row in range(rows) if group_of[row] == group] for group in sorted(set(group_of))]


NESTED = {"pair": Pair(x, {"y": y, "z": (y * 2, np.arange(6))}), "text": list("abcdef"), "list": [x, y]}


@given(partitions())
@settings(max_examples=60)
def test_every_row_of_a_batch_comes_exactly_once_and_whole_in_any_split(split):
    rows = taken(NESTED)
    columns = [column for group in split for column in zip(*flat(rows.batch(group), []), strict=True)]
    everything = list(zip(*flat(NESTED, []), strict=True))
    assert sorted(map(repr, columns)) == sorted(map(repr, everything))


@given(partitions())
@settings(max_examples=40)
def test_every_row_of_a_list_comes_exactly_once_in_any_split(split):
    given = [f"row {index}" for index in range(6)]
    rows = taken(given, task=Text(), is_rows=True)
    assert sorted(row for group in split for row in rows.batch(group)) == given


@given(partitions())
@settings(max_examples=40)
def test_a_split_batch_is_built_as_the_whole_was(split):
    rows = taken(NESTED)
    for group in split:
        part = rows.batch(group)
        assert type(part["pair"]) is Pair
        assert type(part["pair"].y["z"]) is tuple
        assert type(part["list"]) is list
        assert isinstance(part["pair"].y["z"][1], np.ndarray)


def test_a_batch_that_is_not_split_is_the_one_that_was_given():
    given = {"x": x}
    assert taken(given).batch(range(6)) is given


def test_a_run_of_rows_is_a_view_and_no_copy():
    part = taken({"x": x}).batch([2, 3, 4])["x"]
    assert part.data_ptr() == x[2:].data_ptr()


def test_rows_apart_are_picked():
    assert taken(y).batch([0, 2, 5]).tolist() == [0, 2, 5]


def test_a_single_row_keeps_its_dimension():
    assert taken(x).batch([3]).shape == (1, 2)


def test_what_has_no_rows_comes_with_every_part():
    given = {"x": x, "t": torch.tensor(0.5), "name": "a", "none": None, "number": 7, "empty": []}
    part = taken(given).batch([1, 4])
    assert {key: part[key] for key in given if key != "x"} == {key: given[key] for key in given if key != "x"}


def test_a_column_of_strings_is_split_with_its_rows():
    assert taken({"x": x, "text": list("abcdef")}).batch([0, 2, 3])["text"] == ["a", "c", "d"]
    assert taken({"x": x, "text": list("abcdef")}).batch([2, 3])["text"] == ["c", "d"]


def test_rows_are_collated_as_the_task_does():
    assert taken([{"x": torch.tensor([1.0])}, {"x": torch.tensor([2.0])}]).batch([1])["x"].tolist() == [[2.0]]


def test_rows_are_collated_only_when_they_are_asked_for():
    class Counts(Text):
        collated = 0

        def collate(self, rows):
            self.collated += len(rows)
            return list(rows)

    task = Counts()
    rows = taken(["a", "b", "c"], task=task, is_rows=True)
    assert task.collated == 0
    rows.batch([0, 2])
    assert task.collated == 2


def test_a_split_does_not_change_what_was_given():
    given = {"x": x.clone(), "text": list("abcdef")}
    taken(given).batch([1, 3])
    assert torch.equal(given["x"], x)
    assert given["text"] == list("abcdef")


# What is wrong


def test_an_empty_list_is_no_step():
    assert refused([]) == "the list of rows for this step is empty. Try: at least one row."


@pytest.mark.parametrize("given", [torch.zeros(0, 3), {"x": torch.zeros(0), "y": np.zeros((0, 2))}])
def test_a_batch_without_rows_is_no_step(given):
    assert (
        refused(given) == "the batch for this step has no rows, since its first dimension is 0. Try: at least one row."
    )


@pytest.mark.parametrize(
    ("given", "kind"), [(None, "a NoneType"), ("text", "a str"), (7, "an int"), (iter([1]), "a list_iterator")]
)
def test_what_is_neither_rows_nor_a_batch_is_refused_by_its_kind(given, kind):
    assert refused(given).startswith(f"a step takes a list of rows or a batch of tensors, and this is {kind}.")


@pytest.mark.parametrize("given", [torch.tensor(1.0), {}, (), {"name": "a"}])
def test_a_batch_without_tensors_is_refused(given):
    assert "the same first dimension; there are none (task plain)" in refused(given)


def test_tensors_of_unlike_first_dimensions_are_refused_by_name():
    message = refused({"x": x, "more": [y, torch.zeros(4, 6)]})
    assert "['x'] has 6, ['more'][0] has 6, ['more'][1] has 4 (task plain)" in message


def test_a_column_shorter_than_the_tensors_is_refused():
    assert "['text'] has 2" in refused({"x": x, "text": ["a", "b"]})


def test_boxes_of_different_numbers_in_each_row_are_refused():
    assert "['boxes'][1] has 1" in refused({"x": x[:2], "boxes": [torch.zeros(2, 4), torch.zeros(1, 4)]})


@pytest.mark.parametrize("given", [[], {}, {"x": x, "y": y[:3]}, torch.zeros(0, 2)], ids=str)
def test_a_message_has_one_line(given):
    assert "\n" not in refused(given)


COLUMNS = {
    "a tuple of strings, as a DataLoader collates them": ("a", "b", "c", "d", "e", "f"),
    "a list of dicts": [{"id": index} for index in range(6)],
    "a list of tuples": [(index, index) for index in range(6)],
    "a list of NumPy numbers": [np.int64(index) for index in range(6)],
    "a list of objects": [object() for _ in range(6)],
}


@pytest.mark.parametrize("column", COLUMNS.values(), ids=COLUMNS.keys())
def test_a_column_as_long_as_the_batch_is_split_with_its_rows(column):
    part = taken({"x": x, "column": column}).batch([1, 4])
    assert list(part["column"]) == [column[1], column[4]]


def test_a_data_loader_of_tensors_and_strings_is_split():
    given = next(iter(DataLoader([(torch.zeros(2), name) for name in "abcdef"], batch_size=6)))
    assert list(taken(given).batch([1, 4])[1]) == ["b", "e"]


def test_a_column_of_lists_is_not_split_across_its_rows():
    ids = [[row] * 6 for row in range(6)]
    assert taken({"x": x, "ids": ids}).batch([1, 4])["ids"] in (ids, [ids[1], ids[4]])


def test_a_dict_with_defaults_is_split():
    assert taken(defaultdict(list, x=x)).batch([1, 4])["x"].shape == (2, 2)


def test_a_shape_that_is_one_number_is_refused():
    class Number(Text):
        def shape(self, row):
            return len(row)

    assert "shape" in refused(["a"], task=Number(), is_rows=True)
