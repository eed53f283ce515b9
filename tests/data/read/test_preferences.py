"""Every format of preferences: `open_source(…, preferences=True)`."""

import json

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from brimful.data.read.source import open_source
from brimful.errors import BadData, BadOption
from tests.data.read.row_files import problems_of, write


def opened(path, columns=None):
    return open_source([str(path)], columns=columns, preferences=True)


def preferences(source):
    return [json.loads(row["preference"]) for chunk in source.chunks() for row in chunk.rows.to_pylist()]


def read(path, rows, columns=None):
    source = opened(write(path, rows), columns)
    assert source.layout.fields == ("preference",) and problems_of(source) == []
    return preferences(source)


def turn(role, content):
    return {"role": role, "content": content}


EXPECTED = {
    "prompt": [turn("user", "1+1?")],
    "chosen": turn("assistant", "2"),
    "rejected": turn("assistant", "3"),
}
ASKED = [turn("user", "1+1?")]
RIGHT, WRONG = turn("assistant", "2"), turn("assistant", "3")
ROWS = {
    "texts": {"prompt": "1+1?", "chosen": "2", "rejected": "3"},
    "other names": {"question": "1+1?", "chosen_response": "2", "rejected_response": "3"},
    "replies as messages": {"prompt": ASKED, "chosen": [RIGHT], "rejected": [WRONG]},
    "prompt as text": {"prompt": "1+1?", "chosen": [RIGHT], "rejected": [WRONG]},
    "whole conversations": {"chosen": [*ASKED, RIGHT], "rejected": [*ASKED, WRONG]},
    "prompt and whole conversations": {"prompt": ASKED, "chosen": [*ASKED, RIGHT], "rejected": [*ASKED, WRONG]},
    "UltraFeedback": {
        "prompt": "1+1?", "prompt_id": "x", "chosen": [*ASKED, RIGHT], "rejected": [*ASKED, WRONG],
        "messages": [*ASKED, RIGHT], "score_chosen": 8.5, "score_rejected": 2.0,
    },
    "ShareGPT": {
        "conversations": [{"from": "human", "value": "1+1?"}],
        "chosen": {"from": "gpt", "value": "2"}, "rejected": {"from": "gpt", "value": "3"},
    },
    "messages": {"messages": ASKED, "chosen": RIGHT, "rejected": WRONG},
}  # fmt: skip


@pytest.mark.parametrize("kind", ROWS)
def test_every_format_is_one_prompt_with_two_replies(tmp_path, kind):
    assert read(tmp_path / "a.jsonl", [ROWS[kind]]) == [EXPECTED]


@pytest.mark.parametrize("kind", ROWS)
def test_tables_too(tmp_path, kind):
    pq.write_table(pa.Table.from_pylist([ROWS[kind]]), tmp_path / "a.parquet")
    assert preferences(opened(tmp_path / "a.parquet")) == [EXPECTED]


def test_an_instruction_takes_its_input_along(tmp_path):
    row = {"instruction": "add", "input": "1+1?", "chosen": "2", "rejected": "3"}
    assert read(tmp_path / "a.jsonl", [row])[0]["prompt"] == [turn("user", "add\n1+1?")]


def test_all_shared_turns_are_the_prompt(tmp_path):
    shared = [turn("system", "s"), turn("user", "a"), turn("assistant", "b"), turn("user", "c")]
    (found,) = read(tmp_path / "a.jsonl", [{"chosen": [*shared, RIGHT], "rejected": [*shared, WRONG]}])
    assert found == {**EXPECTED, "prompt": shared}


def test_system_and_tools_columns_are_used(tmp_path):
    tool = {"type": "function", "function": {"name": "add", "parameters": {}}}
    (found,) = read(tmp_path / "a.jsonl", [{**ROWS["texts"], "system": "short", "tools": [tool]}])
    assert found == {**EXPECTED, "prompt": [turn("system", "short"), *ASKED], "tools": [tool]}


def test_columns_are_overridable(tmp_path):
    row = {"frage": "1+1?", "gut": "2", "schlecht": "3", "prompt": "no"}
    assert read(tmp_path / "a.jsonl", [row], "prompt=frage,chosen=gut,rejected=schlecht") == [EXPECTED]


def test_conversations_that_part_before_the_last_reply_are_named(tmp_path):
    other = [turn("user", "2+2?"), WRONG]
    (found,) = read(tmp_path / "a.jsonl", [{"chosen": [*ASKED, RIGHT], "rejected": other}])
    assert found == {"problem": "'chosen' and 'rejected' differ in more than the last reply"}


@pytest.mark.parametrize(
    ("row", "problem"),
    [
        ({"prompt": "a", "chosen": [RIGHT], "rejected": [turn("user", "x")]}, "of the role user, not a reply"),
        ({"prompt": "a", "chosen": [*ASKED, RIGHT], "rejected": [WRONG]}, "are not both whole conversations"),
        ({"prompt": "a", "chosen": [RIGHT], "rejected": [{"role": "alien", "content": "x"}]}, "unknown role 'alien'"),
    ],
)
def test_a_row_that_is_no_preference_is_broken(tmp_path, row, problem):
    source = opened(write(tmp_path / "a.jsonl", [ROWS["replies as messages"], row]))
    assert preferences(source)[1:] == []
    (found,) = problems_of(source)
    assert problem in str(found)


def test_files_without_both_replies_are_refused(tmp_path):
    with pytest.raises(BadData, match="has no column rejected, only prompt, chosen"):
        opened(write(tmp_path / "a.jsonl", [{"prompt": "a", "chosen": "b"}]))
    with pytest.raises(BadData, match="as texts and no prompt"):
        opened(write(tmp_path / "b.jsonl", [{"chosen": "a", "rejected": "b"}]))
    with pytest.raises(BadOption, match="must also set rejected"):
        opened(write(tmp_path / "c.jsonl", [{"prompt": "a", "gut": "b", "x": "c"}]), "chosen=gut")
