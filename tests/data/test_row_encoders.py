"""`tokenize` with an encoder of its own: rows that give several, rows that are dropped or refused, and a run continued."""

import json
from dataclasses import dataclass

import pytest

from brimful.data import tokenize as module
from brimful.data.encode import Drop, EncodedRows
from brimful.data.read.source import open_source
from brimful.data.store import Store, spans_of, trained
from brimful.data.tokenize import TokenizeOptions, tokenize
from brimful.errors import BadData, InternalError
from tests.data.tokenize_rows import make_tokenizer, write_jsonl


@dataclass(frozen=True)
class LetterEncoder:
    """A token for each letter of a conversation, of which replies are trained on; one row for each reply."""

    key: str = "letters"
    max_tokens: tuple[int, ...] = (50,)
    keep_end: tuple[bool, ...] = (False,)
    fields: tuple[str, ...] = ("tokens", "spans")
    forgets: bool = False

    def __call__(self, rows, /):
        encoded, drops, characters = [], [], 0
        for place, text in enumerate(rows.column("conversation").to_pylist()):
            messages = json.loads(text)["messages"]
            replies = [number for number, one in enumerate(messages) if one["role"] == "assistant"]
            if not replies:
                drops.append(Drop(place, "no reply"))
            elif any(one["role"] == "tool" for one in messages):
                drops.append(Drop(place, "refused by the template", "no role 'tool' here", refused=True))
            elif not all(messages[number]["content"] for number in replies):
                drops.append(Drop(place, "nothing to train on"))
            else:
                for number in replies:
                    turns = messages[: number + 1]
                    mask = [turn is messages[number] for turn in turns for _ in turn["content"]]
                    tokens = [3 + ord(letter) % 97 for turn in turns for letter in turn["content"]]
                    encoded.append([tokens, spans_of(mask)])
                    characters += len(tokens)
        used = rows.num_rows - len(drops) - self.forgets
        return EncodedRows.of(
            encoded, fields=2, dtype="uint16", rows_used=used, drops=drops, truncated=[0], lost_tokens=[0], characters=[characters]
        )  # fmt: skip


def pair(prompt, response="ab"):
    return {"messages": [{"role": "user", "content": prompt}, {"role": "assistant", "content": response}]}


NO_REPLY = {"messages": [{"role": "user", "content": "x"}]}
WITH_TOOL = {"messages": [*pair("x")["messages"], {"role": "tool", "content": "42"}]}


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    return make_tokenizer(tmp_path_factory.mktemp("tokenizer") / "t")


def tokenized(tmp_path, rows, tokenizer, encoder=None, **options):
    path = write_jsonl(tmp_path / "rows.jsonl", rows)
    report = tokenize(
        [path], tokenizer=tokenizer, output=tmp_path / "store", options=TokenizeOptions(**options),
        encoder=encoder or LetterEncoder(),
    )  # fmt: skip
    return report, Store.open(tmp_path / "store")


def test_the_store_has_the_fields_of_the_encoder(tmp_path, tokenizer):
    report, store = tokenized(tmp_path, [pair("hello"), pair("hi", "yes!")], tokenizer)
    assert store.fields == ("tokens", "spans")
    assert [trained(row["spans"], len(row["tokens"])).sum() for row in store] == [2, 4]
    assert list(report.fields) == ["tokens"]
    stats = report.fields["tokens"]
    assert (stats.column, stats.tokens, stats.longest, stats.max_tokens, stats.characters) == (
        "messages",
        13,
        7,
        50,
        13,
    )
    assert stats.percentiles["p50"] == 6
    assert report.requested_max_tokens == (50,)
    assert store.meta.max_tokens == {"tokens": 50}
    assert store.meta.truncated == {"tokens": 0}
    assert (report.rows_in, report.rows_out, report.rows_added) == (2, 2, 0)
    json.dumps(report.to_json())


def test_an_open_source_is_used_as_it_is(tmp_path, tokenizer):
    path = write_jsonl(tmp_path / "rows.jsonl", [{"q": "a", "answer": "b"}])
    source = open_source([path], columns="prompt=q", messages=True)
    report = tokenize(source, tokenizer=tokenizer, output=tmp_path / "store", encoder=LetterEncoder())
    assert report.layout_reason == "prompt and response: as requested; found answer"
    assert report.fields["tokens"].column == "q, answer"


def test_a_row_may_give_several(tmp_path, tokenizer):
    long = {"messages": pair("a", "b")["messages"] + pair("c", "d")["messages"]}
    report, store = tokenized(tmp_path, [pair("x"), long, NO_REPLY], tokenizer)
    assert [len(row["tokens"]) for row in store] == [3, 2, 4]
    assert (report.rows_in, report.rows_out, report.rows_added) == (3, 3, 1)
    assert report.dropped == {"broken": 0, "empty": 0, "no reply": 1}
    assert (store.meta.rows_in, store.meta.rows) == (3, 3)


def test_drops_are_counted_by_reason_and_the_first_is_named(tmp_path, tokenizer, monkeypatch):
    monkeypatch.setattr(module, "piece_size", lambda *_: 200)  # several pieces: lines must be those of the file
    rows = [*[pair(str(n)) for n in range(10)], NO_REPLY, pair("x", ""), NO_REPLY, pair("y")]
    report, store = tokenized(tmp_path, rows, tokenizer)
    assert report.dropped == {"broken": 0, "empty": 0, "no reply": 2, "nothing to train on": 1}
    path = tmp_path / "rows.jsonl"
    assert report.first_dropped == {
        "no reply": f"{path}, line 11: no reply",
        "nothing to train on": f"{path}, line 12: nothing to train on",
    }
    assert report.rows_out == len(store) == 11
    assert store.meta.dropped == report.dropped


def test_a_refused_row_ends_it_with_file_and_line(tmp_path, tokenizer):
    with pytest.raises(BadData) as caught:
        tokenized(tmp_path, [pair("a"), NO_REPLY, WITH_TOOL, pair("b")], tokenizer)
    path = tmp_path / "rows.jsonl"
    expected = f"{path}, line 3: no role 'tool' here. Try: repair that row, or drop such rows with max_bad=0.01."
    assert str(caught.value) == expected
    assert [one.name for one in tmp_path.iterdir()] == ["rows.jsonl"]


def test_refused_rows_within_max_bad_are_counted_together_with_broken_ones(tmp_path, tokenizer):
    rows = [*[pair(str(n)) for n in range(17)], WITH_TOOL, NO_REPLY, {"messages": 3}]
    report, _ = tokenized(tmp_path, rows, tokenizer, max_bad=0.1)
    assert report.dropped == {"broken": 1, "empty": 0, "refused by the template": 1, "no reply": 1}
    assert "line 20" in report.first_broken
    assert "line 18: no role 'tool' here" in report.first_dropped["refused by the template"]
    (tmp_path / "other").mkdir()
    with pytest.raises(BadData, match=r"2 of 20 rows are broken, more than max_bad=0.09 .* starting with .*line 18"):
        tokenized(tmp_path / "other", rows, tokenizer, max_bad=0.09)


def test_no_row_left_names_all_reasons(tmp_path, tokenizer):
    with pytest.raises(
        BadData,
        match=r"no row is left of 2 \(0 broken, 0 with an empty field, 2 no reply\). Try: repair them, starting with .*line 1",
    ):
        tokenized(tmp_path, [NO_REPLY, NO_REPLY], tokenizer)


def test_an_encoder_that_loses_a_row_is_found_out(tmp_path, tokenizer):
    with pytest.raises(InternalError, match="LetterEncoder used 1 rows of 2 and dropped 0"):
        tokenized(tmp_path, [pair("a"), pair("b")], tokenizer, LetterEncoder(forgets=True))


@pytest.fixture(scope="module")
def place(tmp_path_factory, tokenizer):
    """Ten files of 20 rows, each a chunk; one row of each has no reply and one is refused."""
    folder = tmp_path_factory.mktemp("rows")
    for number in range(10):
        write_jsonl(folder / f"{number}.jsonl", [*[pair(f"{number} {n}") for n in range(18)], NO_REPLY, WITH_TOOL])
    return folder


def run(place, output, tokenizer, encoder, stop_at=None):
    def progress(phrase):
        if stop_at and phrase.startswith(stop_at):
            raise KeyboardInterrupt

    options = TokenizeOptions(file_rows=50, max_bad=0.05)
    return tokenize(
        [str(place)], tokenizer=tokenizer, output=output, options=options, encoder=encoder, progress=progress
    )


def test_an_interrupted_run_continues_with_its_counts(place, tmp_path, tokenizer):
    with pytest.raises(KeyboardInterrupt):
        run(place, tmp_path / "store", tokenizer, LetterEncoder(), stop_at="tokenized 140 rows")
    report = run(place, tmp_path / "store", tokenizer, LetterEncoder())
    straight = run(place, tmp_path / "straight", tokenizer, LetterEncoder())
    assert report.resumed_rows > 0
    assert report.fingerprint == straight.fingerprint
    assert (
        report.dropped == straight.dropped == {"broken": 0, "empty": 0, "no reply": 10, "refused by the template": 10}
    )
    assert report.first_dropped == straight.first_dropped
    assert "0.jsonl, line 19" in report.first_dropped["no reply"]


def test_refused_rows_before_the_interruption_still_count(place, tmp_path, tokenizer):
    with pytest.raises(KeyboardInterrupt):
        run(place, tmp_path / "store", tokenizer, LetterEncoder(), stop_at="tokenized 140 rows")
    with pytest.raises(BadData, match=r"10 of 200 rows are broken, more than max_bad=0.04 .*0.jsonl, line 20"):
        options = TokenizeOptions(file_rows=50, max_bad=0.04)
        tokenize([str(place)], tokenizer=tokenizer, output=tmp_path / "store", options=options, encoder=LetterEncoder())


def test_another_encoder_starts_over(place, tmp_path, tokenizer):
    with pytest.raises(KeyboardInterrupt):
        run(place, tmp_path / "store", tokenizer, LetterEncoder(), stop_at="tokenized 140 rows")
    report = run(place, tmp_path / "store", tokenizer, LetterEncoder(key="another template"))
    assert report.resumed_rows == 0
    assert report.started_over == "it had another encoder"
