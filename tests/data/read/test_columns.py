"""Which column is what: found in a fixed order, never one over another, or as the user says."""

import json

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from brimful.data.read import columns as read_columns
from brimful.data.read.columns import find_layout
from brimful.data.read.files import TEXT, FileSchema
from brimful.data.read.source import open_source
from brimful.errors import BadData, BadOption
from tests.data.read.row_files import broken_of, rows_of, write


def layout_of(*names):
    return find_layout(FileSchema(dict.fromkeys(names, TEXT), names), rows_vary=False)


def jsonl(tmp_path, *rows, name="a.jsonl"):
    (tmp_path / name).write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(tmp_path / name)


# ---------------------------------------------------------------- found by name


@pytest.mark.parametrize(
    ("names", "kind", "columns"),
    [
        (("prompt", "response"), "pair", {"prompt": "prompt", "response": "response"}),
        (("id", "question", "answer"), "pair", {"prompt": "question", "response": "answer"}),
        (("input", "output"), "pair", {"prompt": "input", "response": "output"}),
        (("source", "target"), "pair", {"prompt": "source", "response": "target"}),
        (("q", "a"), "pair", {"prompt": "q", "response": "a"}),
        (("问题", "回答"), "pair", {"prompt": "问题", "response": "回答"}),
        (("提问", "答案"), "pair", {"prompt": "提问", "response": "答案"}),
        (("Question", "ANSWER "), "pair", {"prompt": "Question", "response": "ANSWER "}),
        (("query", "reply"), "pair", {"prompt": "query", "response": "reply"}),
        (("instruction", "output"), "instruction", {"prompt": "instruction", "response": "output"}),
        (("output", "input", "instruction"), "instruction", {"prompt": "instruction+input", "response": "output"}),
        (
            ("instruction", "context", "response"),
            "instruction",
            {"prompt": "instruction+context", "response": "response"},
        ),
        (("指令", "输入", "输出"), "instruction", {"prompt": "指令+输入", "response": "输出"}),
        (("conversations",), "conversations", {"prompt": "conversations", "response": "conversations"}),
        (("id", "messages"), "conversations", {"prompt": "messages", "response": "messages"}),
        (
            ("prompt", "chosen", "rejected"),
            "preference",
            {"prompt": "prompt", "chosen": "chosen", "rejected": "rejected"},
        ),
        (
            ("question", "chosen", "rejected"),
            "preference",
            {"prompt": "question", "chosen": "chosen", "rejected": "rejected"},
        ),
        (
            ("instruction", "input", "chosen", "rejected"),
            "preference",
            {"prompt": "instruction+input", "chosen": "chosen", "rejected": "rejected"},
        ),
        (("title", "text"), "text", {"text": "text"}),
        (("正文",), "text", {"text": "正文"}),
    ],
)
def test_the_usual_names_are_found(names, kind, columns):
    found = layout_of(*names)
    assert (found.kind, found.columns) == (kind, columns)
    assert tuple(columns) == found.fields


@pytest.mark.parametrize(
    ("names", "kind", "unused"),
    [
        (("prompt", "response", "chosen", "rejected", "messages"), "preference", "response, messages"),
        (("messages", "prompt", "response"), "conversations", "prompt, response"),
        (("text", "instruction", "input", "output"), "instruction", "text"),
        (("instruction", "input", "output", "history"), "instruction", "history"),
        (("instruction", "prompt", "response"), "pair", "instruction"),
        (("instruction", "prompt", "output"), "instruction", "prompt"),
        (("question", "answer", "text", "score"), "pair", "text"),
        (("prompt", "question", "response", "answer"), "pair", "question, answer"),
        (("Prompt", "prompt", "response"), "pair", "Prompt"),
        (("chosen", "rejected", "text"), "text", "chosen, rejected"),
    ],
)
def test_the_first_that_fits_is_taken_and_the_others_are_named(names, kind, unused):
    found = layout_of(*names)
    assert found.kind == kind
    assert found.reason.endswith(f"; not used: {unused}")


def test_a_plain_choice_has_a_plain_reason():
    assert layout_of("prompt", "response", "id").reason == "found prompt and response"
    assert layout_of("prompt", "chosen", "rejected").reason == "found prompt, chosen and rejected"
    assert layout_of("messages").reason == "found messages"


def test_no_columns_that_fit_are_listed_with_an_example(tmp_path):
    path = write(tmp_path / "a.parquet", [{"id": "1", "title": "x", "n" * 60: "y"}])
    with pytest.raises(BadData) as caught:
        open_source([str(path)])
    assert str(caught.value).endswith(f"only id, title, {'n' * 39}…. Try: columns='prompt=question,response=answer'.")


# ---------------------------------------------------------------- instruction and input


@pytest.mark.parametrize("name", ["a.parquet", "a.jsonl", "a.csv"])
def test_an_empty_input_never_replaces_the_instruction(name, tmp_path):
    rows = [
        {"instruction": "translate", "input": "", "output": "a"},
        {"instruction": "translate", "input": " \n　", "output": "b"},
        {"instruction": "translate", "input": "你好", "output": "c"},
        {"instruction": "", "input": "你好", "output": "d"},
        {"instruction": "", "input": "", "output": "e"},
    ]
    found = rows_of(open_source([str(write(tmp_path / name, rows))]))
    assert [row["prompt"] for row in found] == ["translate", "translate", "translate\n你好", "你好", ""]
    assert [row["response"] for row in found] == list("abcde")


def test_an_input_may_be_null_or_absent(tmp_path):
    path = jsonl(
        tmp_path,
        {"instruction": "a", "output": "x"},
        {"instruction": "b", "output": "y", "input": None},
        {"instruction": "c", "output": "z", "input": "i"},
    )
    source = open_source([path])
    assert [row["prompt"] for row in rows_of(source)] == ["a", "b", "c\ni"]
    assert not broken_of(source)


def test_an_input_that_only_a_late_row_has_is_not_lost(tmp_path):
    rows = [{"instruction": "a", "output": "x"}] * 500 + [{"instruction": "b", "input": "i", "output": "y"}]
    source = open_source([jsonl(tmp_path, *rows)])
    assert rows_of(source)[-1]["prompt"] == "b\ni"
    assert source.layout.columns["prompt"] == "instruction+input"


def test_a_field_that_few_rows_have_does_not_decide(tmp_path):
    rows = [
        {"instruction": "a", "output": "x"},
        {"prompt": "a", "response": "x"},
        {"instruction": "b", "output": "y", "context": "c"},
    ]
    source = open_source([jsonl(tmp_path, *rows)])
    assert source.layout.columns == {"prompt": "instruction+context", "response": "output"}
    assert source.layout.reason == "found instruction+context and output; not used: prompt, response"
    assert [row["prompt"] for row in rows_of(source)] == ["a", "b\nc"]
    assert [broken.message for broken in broken_of(source)] == ["no field 'instruction'"]


def test_an_input_that_only_a_second_file_has_is_not_lost(tmp_path):
    write(tmp_path / "a.parquet", [{"instruction": "a", "output": "x"}])
    write(tmp_path / "b.parquet", [{"instruction": "b", "input": "i", "output": "y"}])
    source = open_source([str(tmp_path)])
    assert [row["prompt"] for row in rows_of(source)] == ["a", "b\ni"]
    assert (
        source.layout.reason == f"found instruction and output; in {tmp_path}/b.parquet: instruction+input and output"
    )


# ---------------------------------------------------------------- conversations

MESSAGES = [
    {"from": "system", "value": "Be kind."},
    {"from": "human", "value": "Hi"},
    {"from": "gpt", "value": "Hello!"},
    {"from": "human", "value": "Bye"},
    {"from": "gpt", "value": "See you."},
]
EXCHANGES = [
    {"prompt": "Be kind.\nHi", "response": "Hello!"},
    {"prompt": "Be kind.\nHi\nHello!\nBye", "response": "See you."},
]


def with_openai_names(messages):
    words = {"human": "user", "gpt": "Assistant", "system": "system"}
    return [{"role": words[turn["from"]], "content": turn["value"], "weight": 1} for turn in messages]


@pytest.mark.parametrize("name", ["a.parquet", "a.jsonl", "a.json"])
@pytest.mark.parametrize("dialect", ["sharegpt", "openai"])
def test_each_reply_is_a_row_with_all_that_was_said_before(name, dialect, tmp_path):
    row = {"id": "1", "conversations": MESSAGES} if dialect == "sharegpt" else {"messages": with_openai_names(MESSAGES)}
    source = open_source([str(write(tmp_path / name, [row, row]))])
    assert rows_of(source) == EXCHANGES * 2
    (chunk,) = source.chunks()
    assert chunk.lines.tolist() == ([1, 1, 1, 1] if name == "a.json" else [1, 1, 2, 2])


@pytest.mark.parametrize(
    ("messages", "prompts", "why"),
    [
        ([("gpt", "Welcome"), ("human", "Hi"), ("gpt", "Yes?")], ["Welcome\nHi"], "a reply without a prompt"),
        ([("human", "Hi")], [], "no reply in this conversation"),
        ([], [], "no reply in this conversation"),
        (None, [], "no reply in this conversation"),
        ([("human", "Hi"), ("alien", "?"), ("gpt", "Yes?")], [], "unknown role 'alien'"),
        ([("human", "Hi"), (None, "?"), ("gpt", "Yes?")], [], "unknown role ''"),
    ],
)
@pytest.mark.parametrize("name", ["a.parquet", "a.jsonl"])
def test_a_conversation_that_makes_no_sense_is_broken(messages, prompts, why, name, tmp_path):
    turns = messages and [{"from": role, "value": text} for role, text in messages]
    rows = [{"conversations": MESSAGES}, {"conversations": turns if messages != [] else []}]
    source = open_source([str(write(tmp_path / name, rows))])
    assert [row["prompt"] for row in rows_of(source)[2:]] == prompts
    assert [(broken.line, broken.message) for broken in broken_of(source)] == [(2, why)]


def test_the_system_comes_first_and_blank_turns_leave_no_line(tmp_path):
    messages = [("human", "a"), ("gpt", ""), ("tool", "b"), ("system", "s"), ("gpt", "c")]
    path = jsonl(tmp_path, {"conversations": [{"from": role, "value": text} for role, text in messages]})
    assert rows_of(open_source([path])) == [{"prompt": "a", "response": ""}, {"prompt": "s\na\nb", "response": "c"}]


def test_a_text_that_is_null_is_empty_and_one_that_is_missing_is_broken(tmp_path):
    path = jsonl(
        tmp_path,
        {"conversations": MESSAGES},
        {"conversations": [{"from": "human", "value": "a"}, {"from": "gpt", "value": None}]},
        {"conversations": [{"from": "human", "value": "a"}, {"from": "gpt"}]},
        {"conversations": [{"from": "human", "value": "a"}, {"from": "gpt", "value": ["b"]}]},
        {"conversations": ["a", "b"]},
        {"conversations": "a"},
        {"id": 3},
    )
    source = open_source([path])
    assert rows_of(source)[2:] == [{"prompt": "a", "response": ""}]
    assert [(broken.line, broken.message) for broken in broken_of(source)] == [
        (3, "message 2 of 'conversations': no field 'value'"),
        (4, "message 2 of 'conversations': 'value' is a list, not text"),
        (5, "message 1 of 'conversations' is text, not an object"),
        (6, "'conversations' is text, not a list of messages"),
        (7, "no field 'conversations'"),
    ]


def test_a_conversation_of_thousands_of_turns_comes_in_many_chunks(tmp_path, monkeypatch):
    monkeypatch.setattr(read_columns, "CHUNK_BYTES", 100_000)
    messages = [{"from": "human" if turn % 2 == 0 else "gpt", "value": f"{turn:0100}"} for turn in range(600)]
    path = jsonl(
        tmp_path,
        {"conversations": MESSAGES},
        {"conversations": messages},
        {"conversations": []},
        {"conversations": MESSAGES},
    )
    chunks = list(open_source([path]).chunks())
    assert sum(chunk.rows_in for chunk in chunks) == 2 + 300 + 1 + 2
    assert max(chunk.rows.nbytes for chunk in chunks) < 200_000
    assert [broken.line for chunk in chunks for broken in chunk.broken] == [3]
    assert [line for chunk in chunks for line in chunk.lines.tolist()] == [1] * 2 + [2] * 300 + [4] * 2


def test_conversations_of_a_slice_keep_their_turns(tmp_path):
    """Arrow's lists begin anywhere in their values: nulls and offsets must not shift the turns."""
    rows = [
        {"conversations": MESSAGES},
        {"conversations": None},
        {"conversations": MESSAGES[1:3]},
        {"conversations": MESSAGES},
    ]
    pq.write_table(pa.Table.from_pylist(rows).slice(1), tmp_path / "a.parquet", row_group_size=1)
    source = open_source([str(tmp_path / "a.parquet")])
    assert rows_of(source) == [{"prompt": "Hi", "response": "Hello!"}, *EXCHANGES]


def test_large_lists_of_large_text_are_conversations_too(tmp_path):
    text = pa.large_string()
    kind = pa.large_list(
        pa.struct([("value", text), ("weight", pa.int8()), ("from", pa.dictionary(pa.int8(), pa.string()))])
    )
    rows = [[{"value": turn["value"], "weight": 1, "from": turn["from"]} for turn in MESSAGES]]
    pq.write_table(pa.table({"conversations": pa.array(rows, kind)}), tmp_path / "a.parquet")
    assert rows_of(open_source([str(tmp_path / "a.parquet")])) == EXCHANGES


# ---------------------------------------------------------------- preference


@pytest.mark.parametrize("name", ["a.parquet", "a.jsonl"])
def test_chosen_and_rejected_may_be_messages(name, tmp_path):
    ask = {"role": "user", "content": "Hi"}
    rows = [
        {
            "prompt": "Hi",
            "chosen": [ask, {"role": "assistant", "content": "Yes"}],
            "rejected": [ask, {"role": "assistant", "content": "No"}],
        },
        {"prompt": "Hi", "chosen": [], "rejected": [ask]},
        {"prompt": "Hi", "chosen": None, "rejected": [ask]},
    ]
    source = open_source([str(write(tmp_path / name, rows))])
    assert rows_of(source) == [
        {"prompt": "Hi", "chosen": "Yes", "rejected": "No"},
        {"prompt": "Hi", "chosen": "", "rejected": "Hi"},
    ]
    assert [(broken.line, broken.message) for broken in broken_of(source)] == [(2, "'chosen' has no message")]


def test_a_prompt_of_messages_is_all_that_was_said(tmp_path):
    prompt = [{"role": "system", "content": "Be kind."}, {"role": "user", "content": "Hi"}]
    path = jsonl(tmp_path, {"prompt": prompt, "response": "Hello!"})
    assert rows_of(open_source([path])) == EXCHANGES[:1]


# ---------------------------------------------------------------- columns of other types


@pytest.mark.parametrize(
    ("row", "message"),
    [
        (
            {"prompt": 1, "response": "b"},
            "column 'prompt' holds numbers, not text. Try: another one with columns=",
        ),
        (
            {"prompt": "a", "response": ["b"]},
            "column 'response' holds lists, not text",
        ),
        (
            {"conversations": "a"},
            "column 'conversations' holds text, not messages. Try: messages with from and value, or role",
        ),
        ({"text": [{"role": "a", "content": "b"}]}, "column 'text' holds lists, not text"),
        ({"instruction": "a", "input": 5, "output": "b"}, "column 'input' holds numbers, not text"),
    ],
)
def test_a_column_that_is_no_text_is_one_message(row, message, tmp_path):
    with pytest.raises(BadData, match=f"a.parquet: {message}"):
        open_source([str(write(tmp_path / "a.parquet", [row]))])


def test_a_jsonl_column_of_numbers_is_one_message(tmp_path):
    with pytest.raises(BadData, match="a.jsonl: column 'response' holds numbers, not text"):
        open_source([jsonl(tmp_path, {"prompt": "a", "response": 1})])


def test_a_stray_number_in_the_first_row_is_a_broken_row(tmp_path):
    source = open_source([jsonl(tmp_path, {"prompt": "a", "response": 1}, {"prompt": "a", "response": "b"})])
    assert len(rows_of(source)) == 1
    assert [broken.message for broken in broken_of(source)] == ["'response' is a number, not text"]


# ---------------------------------------------------------------- several files


def test_files_of_other_fields_are_refused_with_both_names(tmp_path):
    first, second = (
        write(tmp_path / "a.parquet", [{"prompt": "a", "response": "b"}]),
        write(tmp_path / "b.csv", [{"id": "1", "text": "x"}]),
    )
    with pytest.raises(BadData) as caught:
        open_source([str(first), str(second)])
    assert str(caught.value) == (
        f"{first} gives prompt and response (from prompt, response), but {second} gives text (from id, text). "
        "Try: files of one kind, or columns=."
    )


def test_files_of_other_names_for_the_same_fields_go_together(tmp_path):
    paths = [
        str(write(tmp_path / "a.parquet", [{"prompt": "a", "response": "b"}])),
        str(write(tmp_path / "b.jsonl", [{"question": "c", "answer": "d"}])),
        str(write(tmp_path / "c.json", [{"conversations": MESSAGES}])),
    ]
    source = open_source(paths)
    assert rows_of(source) == [{"prompt": "a", "response": "b"}, {"prompt": "c", "response": "d"}, *EXCHANGES]
    assert source.layout.reason == f"found prompt and response; in {paths[1]} and 1 more: question and answer"


def test_a_later_file_with_more_columns_is_read_like_the_first(tmp_path):
    first = write(tmp_path / "a.parquet", [{"prompt": "a", "response": "b"}])
    second = write(tmp_path / "b.parquet", [{"prompt": "c", "response": "d", "messages": MESSAGES}])
    assert rows_of(open_source([str(first), str(second)]))[1] == {"prompt": "c", "response": "d"}


# ---------------------------------------------------------------- --columns


def read_with(tmp_path, columns, names=("question", "answer", "title", "body")):
    path = write(tmp_path / "a.csv", [{name: f"the {name}" for name in names}])
    source = open_source([str(path)], columns=columns)
    return source, rows_of(source)[0]


@pytest.mark.parametrize(
    ("columns", "row"),
    [
        ("prompt=title,response=body", {"prompt": "the title", "response": "the body"}),
        ("title=prompt,body=response", {"prompt": "the title", "response": "the body"}),
        (" prompt = title , body = response ", {"prompt": "the title", "response": "the body"}),
        ("prompt=title", {"prompt": "the title", "response": "the answer"}),
        ("response=question", {"prompt": "the title", "response": "the question"}),
        ("prompt=TITLE,response=Body", {"prompt": "the title", "response": "the body"}),
        ("prompt=title+question,response=body", {"prompt": "the title\nthe question", "response": "the body"}),
        (
            "prompt=question,chosen=answer,rejected=body",
            {"prompt": "the question", "chosen": "the answer", "rejected": "the body"},
        ),
        ("text=body", {"text": "the body"}),
        ("text=title+body", {"text": "the title\nthe body"}),
    ],
)
def test_columns_are_as_the_user_says(columns, row, tmp_path):
    if columns == "response=question":
        source, found = read_with(tmp_path, columns, names=("question", "query", "title"))
        row = {"prompt": "the query", "response": "the question"}
    else:
        source, found = read_with(tmp_path, columns)
    assert found == row
    found = {"prompt=title": "; found answer", "response=question": "; found query"}.get(columns, "")
    assert source.layout.reason == f"as requested{found}"


def test_the_field_comes_first_where_both_words_are_columns(tmp_path):
    _, row = read_with(tmp_path, "text=prompt", names=("text", "prompt"))
    assert row == {"text": "the prompt"}


def test_a_field_name_may_be_a_column(tmp_path):
    _, row = read_with(tmp_path, "text=prompt", names=("text", "answer"))
    assert row == {"prompt": "the text", "response": "the answer"}


def test_messages_cannot_be_joined(tmp_path):
    path = jsonl(tmp_path, {"prompt": with_openai_names(MESSAGES), "hint": "a", "response": "b"})
    with pytest.raises(BadData, match="column 'prompt' holds lists, not text"):
        open_source([path], columns="prompt=prompt+hint,response=response")


def test_a_column_that_one_side_needs_is_required_wherever_else_it_stands(tmp_path):
    path = jsonl(tmp_path, {"a": "1", "b": "2"}, {"a": "1"}, {"b": "2"})
    source = open_source([path], columns="prompt=a+b,response=b")
    assert rows_of(source) == [{"prompt": "1\n2", "response": "2"}]
    assert [broken.message for broken in broken_of(source)] == ["no field 'b'", "no field 'a'"]


def test_a_column_with_a_plus_in_its_name_is_one_column(tmp_path):
    _, row = read_with(tmp_path, "prompt=c++,response=answer", names=("c++", "answer", "c"))
    assert row["prompt"] == "the c++"


def test_conversations_may_be_given_by_name(tmp_path):
    path = jsonl(tmp_path, {"dialog": MESSAGES, "prompt": "a", "response": "b"})
    assert rows_of(open_source([path], columns="conversations=dialog")) == EXCHANGES


@pytest.mark.parametrize(
    ("columns", "message"),
    [
        ("prompt=nope", "a.csv has no column nope. Try: one of question, answer, title, body"),
        ("nope=prompt", "a.csv has no column nope. Try: one of question, answer, title, body"),
        ("prompt=title+nope", "a.csv has no column title.nope. Try: one of question, answer, title, body"),
        (
            "title=body",
            "'title=body' is not 'field=column'. Try: one of the fields prompt, .* the columns question, answer",
        ),
        ("prompt", "'prompt' is not 'field=column'"),
        ("", "'' is not 'field=column'"),
        ("prompt=", "'prompt=' is not 'field=column'"),
        ("prompt=title,prompt=body", "sets prompt twice. Try: 'prompt=a.b'"),
        ("text=title,response=body", "response cannot be combined with text"),
        ("prompt=question,chosen=title", "must also set rejected. Try: one of the columns answer, body"),
    ],
)
def test_a_mistake_in_columns_is_one_message(columns, message, tmp_path):
    with pytest.raises(BadOption, match=f"columns='{columns.replace('+', '.')}'.*{message}"):
        read_with(tmp_path, columns)
