"""Preferences as tokens: what the chat template writes, truncation, and pairs that are dropped."""

import json

import pyarrow as pa
import pytest

from brimful.errors import BadData
from brimful.tasks.chat_template import RowError
from brimful.tasks.pair_data import PairEncoder
from brimful.tasks.preference import Dpo, DpoOptions
from tests.tasks.tiny import write_jsonl
from tests.tasks.tiny_causal import talk


@pytest.fixture(params=["t5", "causal"])
def kind(request):
    return request.param


def encoder(kind, request, **limits):
    model = request.getfixturevalue("tiny" if kind == "t5" else "causal")
    max_tokens = limits.get("max_tokens") or ((64, 64) if kind == "t5" else (128,))
    return PairEncoder.load(model.tokenizer, causal=kind == "causal", max_tokens=max_tokens)


def pair(prompt="甲的花？", chosen="红色。", rejected="白色。", **others):
    messages = talk(prompt) if isinstance(prompt, str) else prompt
    replies = {
        name: {"role": "assistant", "content": text} for name, text in (("chosen", chosen), ("rejected", rejected))
    }
    return {"prompt": messages, **replies, **others}


def encode(one, *pairs):
    encoded = one(pa.record_batch([pa.array([json.dumps(row) for row in pairs])], names=["preference"]))
    rows, start = [], 0
    for lengths in encoded.lengths.tolist():
        row = []
        for length in lengths:
            row.append(encoded.tokens[start : start + length].tolist())
            start += length
        rows.append(row)
    return rows, encoded


def test_a_causal_pair_is_what_the_template_writes(causal, request):
    messages = talk("甲的花？", "红色。", "车？")
    ((prompt, chosen, rejected),), _ = encode(encoder("causal", request), pair(messages, "红车。", "白车。"))
    assert prompt == causal.template.prompt(messages)
    for reply, text in ((chosen, "红车。"), (rejected, "白车。")):
        (whole,) = causal.template.encode([*messages, {"role": "assistant", "content": text}])
        assert prompt + reply == whole.tokens and reply[-1] == causal.template.eos_id


def test_an_encoder_decoder_pair_is_texts_with_eos(tiny, request):
    messages = talk("甲的花？", "红色。", "车？", system="简短。")
    ((prompt, chosen, rejected),), _ = encode(encoder("t5", request), pair(messages, "红车。", "白车。"))
    from brimful.data.tokenizer.folder import TokenizerFacts, load_tokenizer

    tokenizer, eos = load_tokenizer(tiny.tokenizer), TokenizerFacts.read(tiny.tokenizer).eos_id
    for ids, text in ((prompt, "简短。\n甲的花？\n红色。\n车？"), (chosen, "红车。"), (rejected, "白车。")):
        assert ids == [*tokenizer.encode(text, add_special_tokens=False).ids, eos]


DROPPED = [
    (pair(chosen="红色。", rejected=" 红色。 "), "with equal replies", "chosen is equal to rejected"),
    (pair(chosen=""), "empty", "chosen is empty"),
    (pair(rejected=" \n"), "empty", "rejected is empty"),
    (pair(prompt=" "), "empty", "the prompt is empty"),
    ({"problem": "'a' and 'b' differ in more than the last reply"}, "whose replies answer different messages", "'a' and 'b' differ in more than the last reply"),
    (pair(chosen="红" * 300 + "色", rejected="红" * 300 + "白"), "too long", "nothing that differs is left within max_tokens"),
]  # fmt: skip


@pytest.mark.parametrize(("row", "reason", "message"), DROPPED)
def test_a_pair_that_teaches_nothing_is_dropped(kind, request, row, reason, message):
    rows, encoded = encode(encoder(kind, request), pair(), row, pair("乙的花？"))
    assert len(rows) == encoded.rows_used == 2
    (drop,) = encoded.drops
    assert (drop.row, drop.reason, drop.refused) == (1, reason, False) and message in drop.message


def test_a_long_prompt_keeps_its_end_and_long_replies_their_beginning(kind, request):
    whole = encode(encoder(kind, request, max_tokens=(900, 900) if kind == "t5" else (900,)), *LONG)[0]
    limits = (20, 12) if kind == "t5" else (40,)
    short, encoded = encode(encoder(kind, request, max_tokens=limits), *LONG)
    for before, after in zip(whole, short, strict=True):
        assert after[0] == before[0][len(before[0]) - len(after[0]) :]
        assert all(after[n] == before[n][: len(after[n])] for n in (1, 2))
        if kind == "causal":
            assert len(after[0]) + max(map(len, after[1:])) <= 40
        else:
            assert len(after[0]) <= 20 and max(map(len, after[1:])) <= 12
    assert encoded.truncated == [2 if kind == "t5" else 3, 2, 1]
    assert encoded.lost_tokens == [sum(len(a[n]) - len(b[n]) for a, b in zip(whole, short, strict=True)) for n in range(3)]  # fmt: skip


LONG = [
    pair("很" * 100 + "长？", "红色。" * 30, "白色。"),
    pair("很" * 100 + "长？", "红色。", "白色。"),
    pair("短？", "红色。" * 30, "白色。" * 30),
]


def test_the_prompt_gives_way_first_down_to_half(causal, request):
    one = encoder("causal", request, max_tokens=(40,))
    for prompt, reply, kept in (
        (100, 10, (30, 10)),
        (100, 90, (20, 20)),
        (15, 90, (15, 25)),
        (30, 10, (30, 10)),
        (25, 16, (24, 16)),
    ):
        cut = one.pairs.truncated(list(range(prompt)), [list(range(reply)), [1]])
        assert (len(cut[0]), len(cut[1])) == kept


def test_a_conversation_that_the_template_refuses_is_an_error(causal, tmp_path):
    rows = [pair_row(), {"prompt": [{"role": "tool", "content": "x"}], "chosen": "红", "rejected": "白"}]
    data = write_jsonl(tmp_path / "a.jsonl", rows)
    task = Dpo(DpoOptions(model=str(causal.model)))
    with pytest.raises(BadData, match=r"a.jsonl, line 2: message 1 is the result of a tool"):
        task.prepare(str(data), tmp_path / "data", lambda phrase: None)


def pair_row():
    return {"prompt": "甲的花？", "chosen": "红色。", "rejected": "白色。"}


def test_dropped_rows_are_counted_and_the_first_named(kind, request, tmp_path):
    model = request.getfixturevalue("tiny" if kind == "t5" else "causal").model
    data = write_jsonl(tmp_path / "a.jsonl", [pair_row(), {**pair_row(), "chosen": ""}, {**pair_row(), "chosen": ""}])
    said = []
    Dpo(DpoOptions(model=str(model))).prepare(str(data), tmp_path / "data", said.append)
    assert "dropped 2 with an empty field (the first: " in said[-1] and "a.jsonl, line 2: chosen is empty)" in said[-1]


def test_no_row_left_is_an_error(causal, tmp_path):
    data = write_jsonl(tmp_path / "a.jsonl", [{**pair_row(), "chosen": "白色。"}])
    with pytest.raises(BadData, match="no row is left of 1 .*1 with equal replies"):
        Dpo(DpoOptions(model=str(causal.model))).prepare(str(data), tmp_path / "data", lambda phrase: None)


def test_the_last_message_must_be_a_reply(causal):
    (error,) = causal.template.reply_batch([(talk("甲？"), None)])
    assert isinstance(error, RowError) and "not a reply" in str(error)
