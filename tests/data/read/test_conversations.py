"""Every format as conversations: `open_source(…, messages=True)`."""

import json

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from brimful.data.read.files import CHUNK_ROWS
from brimful.data.read.source import open_source
from brimful.errors import BadData, BadOption
from tests.data.read.row_files import problems_of, write

SEARCH = {
    "name": "search",
    "description": "find",
    "parameters": {"type": "object", "properties": {"q": {"type": "string"}}},
}
TOOL = {"type": "function", "function": SEARCH}
CALL = {"type": "function", "id": "c1", "function": {"name": "search", "arguments": {"q": "鱼油", "n": 2}}}


def opened(path, columns=None):
    return open_source([str(path)], columns=columns, messages=True)


def conversations(source):
    return [json.loads(row["conversation"]) for chunk in source.chunks() for row in chunk.rows.to_pylist()]


def read(path, rows, columns=None):
    """The conversations of these rows, which are all readable."""
    source = opened(write(path, rows), columns)
    assert source.layout.fields == ("conversation",)
    found = conversations(source)
    assert problems_of(source) == []
    return found


def turn(role, content, **others):
    return {"role": role, "content": content, **others}


def chat(*texts, system=None):
    """Turns of user and assistant."""
    roles = ["user", "assistant"] * len(texts)
    turns = [turn(role, text) for role, text in zip(roles, texts, strict=False)]
    return {"messages": [turn("system", system), *turns] if system else turns}


formats = pytest.mark.parametrize("ending", ["jsonl", "json", "parquet", "csv"])
nested = pytest.mark.parametrize("ending", ["jsonl", "json", "parquet"])


# ── Formats ───────────────────────────────────────────────────────────────────────────────────────────────────────────


@formats
def test_prompt_and_response(tmp_path, ending):
    rows = [
        {"prompt": "鱼油？", "response": 'say "hi"\n\\ \t👋'},
        {"prompt": "", "response": " "},
        {"prompt": "\u2028\x01", "response": "{[]}"},
    ]
    assert read(tmp_path / f"r.{ending}", rows) == [chat(row["prompt"], row["response"]) for row in rows]


@formats
@pytest.mark.parametrize(
    "names", [("question", "answer"), ("prompt", "completion"), ("问题", "回答"), ("Query", "Reply")]
)
def test_aliases_of_prompt_and_response(tmp_path, ending, names):
    source = opened(write(tmp_path / f"r.{ending}", [dict(zip(names, "ab", strict=True))]))
    assert conversations(source) == [chat("a", "b")]
    assert source.layout.reason == f"prompt and response: found {names[0]} and {names[1]}"


@formats
def test_alpaca(tmp_path, ending):
    history = [["q1", "a1"], ["q2", "a2"]]
    row = {"instruction": "do", "input": "this", "output": "done", "system": "kind", "history": history}
    if ending == "csv":
        row["history"] = json.dumps(history)
    others = [{**row, "input": "", "system": " "}, {**row, "input": None, "system": None, "history": None}]
    source = opened(write(tmp_path / f"r.{ending}", [row, *others]))
    assert conversations(source) == [
        chat("q1", "a1", "q2", "a2", "do\nthis", "done", system="kind"),
        chat("q1", "a1", "q2", "a2", "do", "done"),
        chat("do", "done"),
    ]
    assert source.layout.kind == "instruction"
    assert source.layout.reason == "Alpaca: found instruction+input, output, system and history"


@formats
def test_openai_messages(tmp_path, ending):
    messages = chat("hi", "hello", "again", "yes", system="be kind")["messages"]
    row = {"messages": json.dumps(messages) if ending == "csv" else messages, "id": "x"}
    source = opened(write(tmp_path / f"r.{ending}", [row]))
    assert conversations(source) == [{"messages": messages}]
    assert source.layout.reason == ("messages" if ending == "csv" else "OpenAI messages") + ": found messages"


@formats
def test_sharegpt_with_system_and_tools(tmp_path, ending):
    turns = [
        {"from": "human", "value": "hi"},
        {"from": "function_call", "value": json.dumps({"name": "search", "arguments": {"q": "x"}})},
        {"from": "observation", "value": "42"},
        {"from": "gpt", "value": "it is 42"},
    ]
    row = {
        "conversations": json.dumps(turns) if ending == "csv" else turns,
        "system": "kind",
        "tools": json.dumps([SEARCH]),
    }
    source = opened(write(tmp_path / f"r.{ending}", [row, {**row, "system": "", "tools": ""}]))
    call = {"type": "function", "function": {"name": "search", "arguments": {"q": "x"}}}
    messages = [
        turn("user", "hi"),
        turn("assistant", None, tool_calls=[call]),
        turn("tool", "42"),
        turn("assistant", "it is 42"),
    ]
    assert conversations(source) == [
        {"messages": [turn("system", "kind"), *messages], "tools": [TOOL]},
        {"messages": messages},
    ]
    if ending != "csv":
        assert source.layout.reason == "ShareGPT: found conversations, system and tools"


@nested
def test_tool_calls_names_and_null_content_survive(tmp_path, ending):
    messages = [
        turn("user", "find", name="ada"),
        turn("assistant", None, tool_calls=[CALL]),
        turn("tool", "42", tool_call_id="c1", name="search"),
        turn("assistant", "42", reasoning_content="hm", weight=0.5),
    ]
    rows = [{"messages": messages, "tools": [TOOL]}, {"messages": messages[:1] + messages[3:], "tools": None}]
    assert read(tmp_path / f"r.{ending}", rows) == [rows[0], {"messages": rows[1]["messages"]}]


@nested
def test_arguments_as_json_text_become_an_object(tmp_path, ending):
    def call(arguments):
        return [{"id": "c", "type": "function", "function": {"name": "f", "arguments": arguments}}]

    rows = [
        {"messages": [turn("user", "x"), turn("assistant", "", tool_calls=call(text))]}
        for text in ('{"a": [1, null]}', "", "not json", "[1]")
    ]
    found = read(tmp_path / f"r.{ending}", rows)
    arguments = [one["messages"][1]["tool_calls"][0]["function"]["arguments"] for one in found]
    assert arguments == [{"a": [1, None]}, {}, "not json", "[1]"]


def test_functions_of_the_older_format(tmp_path):
    messages = [
        turn("user", "x"),
        turn("assistant", None, function_call={"name": "search", "arguments": '{"q": "y"}'}),
        turn("function", "42", name="search"),
    ]
    [found] = read(tmp_path / "r.jsonl", [{"messages": messages, "functions": [SEARCH]}])
    assert found["messages"][1:] == [
        turn(
            "assistant",
            None,
            tool_calls=[{"type": "function", "function": {"name": "search", "arguments": {"q": "y"}}}],
        ),
        turn("tool", "42", name="search"),
    ]
    assert found["tools"] == [TOOL]


def test_a_flat_tool_becomes_one_of_the_chat_format(tmp_path):
    [found] = read(tmp_path / "r.jsonl", [{"prompt": "a", "response": "b", "tools": [{"type": "function", **SEARCH}]}])
    assert found == {**chat("a", "b"), "tools": [TOOL]}


@nested
def test_content_in_parts(tmp_path, ending):
    parts = [{"type": "text", "text": "one"}, {"type": "text", "text": "two"}]
    rows = [{"messages": [turn("developer", parts), turn("user", parts[:1]), turn("assistant", parts[1:])]}]
    assert read(tmp_path / f"r.{ending}", rows) == [
        {"messages": [turn("developer", "one\ntwo"), turn("user", "one"), turn("assistant", "two")]}
    ]


@nested
def test_prompt_and_completion_as_messages(tmp_path, ending):
    prompt = [turn("system", "kind"), turn("user", "a")]
    rows = [{"prompt": prompt, "completion": [turn("assistant", "b")]}]
    assert read(tmp_path / f"r.{ending}", rows) == [chat("a", "b", system="kind")]


def test_a_prompt_as_text_beside_others_as_messages(tmp_path):
    rows = [{"prompt": [turn("user", "a")], "completion": "[b]"}, {"prompt": "[1] x", "completion": "c"}]
    assert read(tmp_path / "r.jsonl", rows) == [chat("a", "[b]"), chat("[1] x", "c")]


@pytest.mark.parametrize(
    ("name", "role"),
    [
        ("human", "user"), ("User", "user"), ("用户", "user"), ("gpt", "assistant"), ("model", "assistant"), (" bot ", "assistant"),
        ("developer", "developer"), ("system", "system"), ("function", "tool"), ("observation", "tool"), ("tool", "tool"),
    ],
)  # fmt: skip
def test_roles_have_the_names_of_openai(tmp_path, name, role):
    assert read(tmp_path / "r.jsonl", [{"messages": [turn(name, "x")]}]) == [{"messages": [turn(role, "x")]}]


def test_a_system_message_wins_over_the_system_column(tmp_path):
    row = {"messages": chat("a", "b", system="own")["messages"], "system": "column"}
    assert read(tmp_path / "r.jsonl", [row]) == [chat("a", "b", system="own")]


@nested
def test_a_conversation_reads_itself(tmp_path, ending):
    """What was read can be written and read again, as text or as an object."""
    wanted = [{**chat("a", "b"), "tools": [TOOL]}]
    assert read(tmp_path / f"text.{ending}", [{"conversation": json.dumps(wanted[0])}]) == wanted
    assert read(tmp_path / f"object.{ending}", [{"conversation": wanted[0]}]) == wanted


@formats
def test_plain_text_stays_text(tmp_path, ending):
    source = opened(write(tmp_path / f"r.{ending}", [{"text": "all of it"}]))
    assert source.layout.fields == ("text",)
    assert [chunk.rows.to_pylist() for chunk in source.chunks()] == [[{"text": "all of it"}]]


# ── Columns ───────────────────────────────────────────────────────────────────────────────────────────────────────────


@formats
def test_requested_columns(tmp_path, ending):
    path = write(tmp_path / f"r.{ending}", [{"q1": "a", "x": "b", "sys": "kind", "answer": "no"}])
    source = opened(path, "prompt=q1,response=x,system=sys")
    assert conversations(source) == [chat("a", "b", system="kind")]
    assert source.layout.reason == "prompt and response: as requested"
    assert conversations(opened(path, "prompt=sys+q1")) == [chat("kind\na", "no")]
    assert opened(path, "prompt=sys+q1").layout.reason == "prompt and response: as requested; found answer"


@nested
def test_requested_messages(tmp_path, ending):
    row = {"chat": chat("a", "b")["messages"], "prompt": "p", "response": "r", "s": "kind"}
    path = write(tmp_path / f"r.{ending}", [row])
    assert conversations(opened(path)) == [chat("p", "r")]
    for option in ("messages=chat,system=s", "conversations=chat,s=system", "chat=messages,system=s"):
        assert conversations(opened(path, option)) == [chat("a", "b", system="kind")]
    assert conversations(opened(path, "prompt=s")) == [chat("kind", "r")]


def test_a_request_for_the_system_alone_keeps_the_messages(tmp_path):
    path = write(tmp_path / "r.jsonl", [{"messages": chat("a", "b")["messages"], "persona": "kind"}])
    source = opened(path, "system=persona")
    assert conversations(source) == [chat("a", "b", system="kind")]
    assert source.layout.reason == "OpenAI messages: as requested; found messages"


def test_requested_text(tmp_path):
    source = opened(write(tmp_path / "r.jsonl", [{"prompt": "a", "response": "b"}]), "text=response")
    assert [chunk.rows.to_pylist() for chunk in source.chunks()] == [[{"text": "b"}]]


@pytest.mark.parametrize(
    ("option", "message"),
    [
        ("messages=chat,prompt=prompt", "prompt cannot be combined with messages"),
        ("messages=chat,history=prompt", "history cannot be combined with messages"),
        ("prompt=prompt", "must also set response. Try: one of the columns chat"),
        ("messages=nothing", "has no column nothing. Try: one of chat, prompt"),
        (
            "chosen=chat",
            "is not 'field=column'. Try: one of the fields messages, conversations, prompt, response, system",
        ),
    ],
)
def test_requests_that_cannot_be_met(tmp_path, option, message):
    path = write(tmp_path / "r.jsonl", [{"chat": chat("a", "b")["messages"], "prompt": "p"}])
    with pytest.raises(BadOption) as caught:
        opened(path, option)
    assert message in str(caught.value)


def test_preferences_are_no_conversations(tmp_path):
    path = write(tmp_path / "r.jsonl", [{"prompt": "a", "chosen": "b", "rejected": "c"}])
    with pytest.raises(BadData, match=r"holds preferences \(prompt, chosen and rejected\).*response=chosen") as caught:
        opened(path)
    option = str(caught.value).split("'")[1]
    assert conversations(opened(path, option)) == [chat("a", "b")]


def test_messages_beside_preferences_are_used(tmp_path):
    row = {"prompt": "a", "chosen": "b", "rejected": "c", "messages": chat("a", "b")["messages"]}
    source = opened(write(tmp_path / "r.jsonl", [row]))
    assert conversations(source) == [chat("a", "b")]
    assert source.layout.reason == "OpenAI messages: found messages; not used: prompt, chosen, rejected"


@pytest.mark.parametrize(
    "row", [{"messages": 3}, {"prompt": "a", "response": 7}, {"instruction": "x", "output": {"a": 1}}]
)
def test_columns_of_another_type(tmp_path, row):
    with pytest.raises(BadData, match=r"r.parquet: column '\w+' holds (numbers|objects), not (messages|text)\. Try:"):
        opened(write(tmp_path / "r.parquet", [row]))


def test_columns_beside_that_only_later_rows_have(tmp_path):
    plain = [{"prompt": "a", "response": "b"}] * 200
    late = [
        {"prompt": "a", "response": "b", "system": "kind"},
        {"prompt": "c", "response": "d", "history": [["a", "b"]], "tools": [TOOL]},
    ]
    found = read(tmp_path / "r.jsonl", plain + late)
    assert found[200:] == [chat("a", "b", system="kind"), {**chat("a", "b", "c", "d"), "tools": [TOOL]}]


@pytest.mark.parametrize("ascii_only", [True, False])
def test_a_history_under_a_chinese_name(tmp_path, ascii_only):
    rows = [{"指令": "c", "输出": "d", "历史": [["a", "b"]]}, {"指令": "e", "输出": "f", "历史": []}]
    path = tmp_path / "r.jsonl"
    path.write_text("".join(json.dumps(row, ensure_ascii=ascii_only) + "\n" for row in rows))
    assert conversations(opened(path)) == [chat("a", "b", "c", "d"), chat("e", "f")]


def test_a_column_called_history_of_another_type_is_not_used(tmp_path):
    source = opened(write(tmp_path / "r.jsonl", [{"prompt": "a", "response": "b", "history": 3}]))
    assert conversations(source) == [chat("a", "b")]
    assert source.layout.reason == "prompt and response: found prompt and response; not used: history"


def test_files_of_different_formats_together(tmp_path):
    paths = [
        write(tmp_path / "1.jsonl", [{"prompt": "a", "response": "b"}]),
        write(
            tmp_path / "2.parquet",
            [{"conversations": [{"from": "human", "value": "c"}, {"from": "gpt", "value": "d"}]}],
        ),
        write(tmp_path / "3.csv", [{"instruction": "e", "input": "", "output": "f"}]),
    ]
    source = open_source([str(path) for path in paths], messages=True)
    assert conversations(source) == [chat("a", "b"), chat("c", "d"), chat("e", "f")]
    assert "in " in source.layout.reason
    text = write(tmp_path / "4.jsonl", [{"text": "x"}])
    with pytest.raises(BadData, match="gives conversation .* gives text"):
        open_source([str(paths[0]), str(text)], messages=True)


def test_the_columns_of_the_first_file_are_used_where_the_second_has_more(tmp_path):
    first = write(tmp_path / "1.jsonl", [{"question": "a", "answer": "b"}])
    second = write(
        tmp_path / "2.jsonl", [{"question": "c", "answer": "d", "messages": chat("x")["messages"], "system": "s"}]
    )
    source = open_source([str(first), str(second)], messages=True)
    assert conversations(source) == [chat("a", "b"), chat("c", "d", system="s")]


def test_the_fingerprint_differs_from_that_of_pairs(tmp_path):
    path = write(tmp_path / "r.jsonl", [{"prompt": "a", "response": "b"}])
    assert opened(path).fingerprint() != open_source([str(path)]).fingerprint()
    assert opened(path).fingerprint() == opened(path).fingerprint()


# ── Rows that cannot be read ──────────────────────────────────────────────────────────────────────────────────────────

GOOD = {"messages": [{"role": "user", "content": "ok"}]}


@pytest.mark.parametrize(
    ("line", "problem"),
    [
        ('{"messages": []}', "'messages' has no message"),
        ('{"messages": null}', "'messages' has no message"),
        ("{}", "no field 'messages'"),
        ('{"messages": "hello"}', "'messages' is text, not JSON"),
        ('{"messages": 4}', "'messages' is a number, not a list of messages"),
        ('{"messages": {"role": "user"}}', "'messages' is an object, not a list of messages"),
        ('{"messages": [3]}', "message 1 of 'messages' is a number, not an object"),
        ('{"messages": [{"content": "x"}]}', "message 1 of 'messages': no role"),
        ('{"messages": [{"role": 3, "content": "x"}]}', "message 1 of 'messages': its role is a number, not text"),
        ('{"messages": [{"role": "narrator", "content": "x"}]}', "message 1 of 'messages': unknown role 'narrator'"),
        ('{"messages": [{"role": "user"}]}', "message 1 of 'messages': no content"),
        ('{"messages": [{"role": "user", "content": 3}]}', "message 1 of 'messages': its content is a number, not text"),
        (
            '{"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": "x"}]}]}',
            "message 1 of 'messages': a part of its content is of type 'image_url', not text",
        ),
        (
            '{"messages": [{"role": "assistant", "content": null, "tool_calls": [{"id": 1}]}]}',
            "message 1 of 'messages': a tool call without the name of a function",
        ),
        (
            '{"messages": [{"from": "function_call", "value": "search(x)"}]}',
            "message 1 of 'messages': its tool call is text, not JSON",
        ),
        ('{"messages": [{"role": "user", "content": "a", "content": "b"}]}', "'messages' has an object with the field 'content' twice"),
        ('{"messages": [{"role": "user", "content": "\\ud800"}]}', "'messages' has half of a surrogate pair"),
        ('{"messages": "[{\\"role\\": \\"user\\", \\"content\\": \\"\\\\ud800\\"}]"}', "half of a surrogate pair"),
        ('{"messages": [{"role": "user", "content": "x"}', "not JSON: Expecting ',' delimiter at character 47"),
        ('{"messages": [{"role": "user", "content": "x"}], "tools": [3]}', "tool 1 of 'tools' is a number, not an object"),
        ('{"messages": [{"role": "user", "content": "x"}], "tools": "search"}', "'tools' is text, not JSON"),
        ('{"messages": ' + "[" * 5000 + "]" * 5000 + "}", "not JSON: nested too deep"),
    ],
)  # fmt: skip
def test_a_row_that_is_no_conversation_is_named(tmp_path, line, problem):
    path = tmp_path / "r.jsonl"
    path.write_text("\n".join([json.dumps(GOOD), line, json.dumps(GOOD)]))
    source = opened(path)
    assert conversations(source) == [GOOD, GOOD]
    assert problems_of(source) == [(2, problem)]


@pytest.mark.parametrize(
    ("history", "problem"),
    [
        ("x", "'history' is text, not JSON"),
        ({"a": 1}, "'history' is an object, not a list of pairs"),
        ([["a", "b"], ["a"]], "turn 2 of 'history' is not a pair of texts"),
        ([["a", None]], "turn 1 of 'history' is not a pair of texts"),
    ],
)
def test_a_history_that_is_none(tmp_path, history, problem):
    rows = [{"prompt": "a", "response": "b", "history": one} for one in ([["x", "y"]], history)]
    source = opened(write(tmp_path / "r.jsonl", rows))
    assert problems_of(source) == [(2, problem)]
    assert conversations(source) == [chat("x", "y", "a", "b")]


def test_a_system_text_that_is_none(tmp_path):
    rows = [{**GOOD, "system": system} for system in ("kind", [3], None)]
    source = opened(write(tmp_path / "r.jsonl", rows))
    assert problems_of(source) == [(2, "'system' is a list, not text")]
    assert [len(one["messages"]) for one in conversations(source)] == [2, 1]


def test_broken_rows_of_a_table(tmp_path):
    messages = [{"messages": [turn("user", "ok")]}, {"messages": []}, {"messages": None}, {"messages": [None]}]
    source = opened(write(tmp_path / "r.parquet", messages))
    assert conversations(source) == [GOOD]
    assert problems_of(source) == [
        (2, "'messages' has no message"),
        (3, "'messages' has no message"),
        (4, "message 1 of 'messages' is null, not an object"),
    ]


def test_a_row_of_a_table_that_is_not_utf8(tmp_path):
    texts = pa.array([b"ok", b"\xff\xfe", "鱼".encode()], pa.binary())
    messages = pa.StructArray.from_arrays([pa.array(["user"] * 3), texts], names=["role", "content"])
    column = pa.ListArray.from_arrays(pa.array([0, 1, 2, 3], pa.int32()), messages)
    pq.write_table(pa.table({"messages": column}), tmp_path / "r.parquet")
    source = opened(tmp_path / "r.parquet")
    assert [one["messages"][0]["content"] for one in conversations(source)] == ["ok", "鱼"]
    assert problems_of(source) == [(2, "'messages' is not UTF-8")]


def test_numbers_in_arguments_stay_what_they_are(tmp_path):
    arguments = {"n": 12345678901234567890, "x": 0.1, "b": True, "none": None}
    call = {"type": "function", "function": {"name": "f", "arguments": arguments}}
    [found] = read(tmp_path / "r.jsonl", [{"messages": [turn("assistant", None, tool_calls=[call])]}])
    assert found["messages"][0]["tool_calls"][0]["function"]["arguments"] == arguments


def test_a_number_with_too_many_digits_stops_nothing(tmp_path):
    path = tmp_path / "r.jsonl"
    path.write_text('{"messages": [{"role": "user", "content": "x"}], "id": ' + "1" * 5000 + "}\n")
    assert conversations(opened(path)) == [{"messages": [turn("user", "x")]}]


def test_keys_that_a_table_has_for_other_rows_are_left_out(tmp_path):
    tools = [[{"type": "function", "function": {"name": "f", "parameters": {key: {"type": "int"}}}}] for key in "ab"]
    rows = [{**chat("x", "y"), "tools": one} for one in tools]
    assert read(tmp_path / "r.parquet", rows) == rows


def test_lines_and_chunks_are_those_of_the_file(tmp_path):
    rows = [{"prompt": str(n), "response": "x"} for n in range(CHUNK_ROWS + 3)]
    chunks = list(opened(write(tmp_path / "r.jsonl", rows)).chunks())
    assert [len(chunk.lines) for chunk in chunks] == [CHUNK_ROWS, 3]
    assert chunks[1].lines.tolist() == [CHUNK_ROWS + 1, CHUNK_ROWS + 2, CHUNK_ROWS + 3]
    assert json.loads(chunks[1].rows.column(0)[0].as_py()) == chat(str(CHUNK_ROWS), "x")


def test_the_same_rows_by_arrow_and_by_python(tmp_path):
    """A broken line sends the whole block through Python's json."""
    rows = [{"prompt": "鱼\n", "response": "b"}, {"prompt": None, "response": "c"}]
    fast = read(tmp_path / "fast.jsonl", rows)
    path = tmp_path / "slow.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows) + "{broken\n")
    assert conversations(opened(path)) == fast == [chat("鱼\n", "b"), chat("", "c")]
