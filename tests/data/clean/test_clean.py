"""Rows in, rows out: what is dropped and why, in which order the rest comes, and who gets what."""

import json
import random
import sys
from collections import Counter
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Split

from brimful.data.clean.clean import CleanReport, clean
from brimful.data.clean.prepare import REASONS, CleanOptions
from brimful.data.clean.write import WORK_FOLDER, locked_work_folder
from brimful.errors import BadData, BadOption, InternalError, MissingExtra
from tests.data.clean.clean_rows import SMALL, cleaned, outcome, read_back, varied, with_copies


def test_every_row_is_kept_or_counted_under_its_first_reason(tmp_path):
    rows, exact, near = with_copies(300)
    rows += [
        ("问", " \u200b"),
        ("", "答"),
        None,
        ("短", "x"),
        ("很长", "很长" * 200),
        ("", ""),
        ("  你好！ ", "是的  是的"),
    ]
    report = cleaned(rows, tmp_path, max_bad=0.1, min_chars=2, max_chars=300)
    assert report.dropped == {
        "broken": 1, "empty": 3, "too_short": 1, "over_long": 1, "duplicate": exact, "near_duplicate": near,
    }  # fmt: skip
    assert report.rows_in == len(rows) == report.rows_out + sum(report.dropped.values())
    assert report.rows_out == 301
    assert ("你好!", "是的 是的") in read_back(tmp_path) + read_back(tmp_path, "valid")


def test_the_report_says_what_the_files_say(tmp_path):
    rows, _, _ = with_copies(200)
    report = cleaned(rows, tmp_path, valid=20, test=10, near=None)
    saved = json.loads((tmp_path / "clean.json").read_text())
    assert saved == json.loads(json.dumps(report.to_json()))
    assert set(saved["dropped"]) == set(REASONS)
    assert {split: file["rows"] for split, file in saved["files"].items()} == {
        "train": saved["rows_out"] - 30,
        "valid": 20,
        "test": 10,
    }
    assert all(pq.read_metadata(file["path"]).num_rows == file["rows"] for file in saved["files"].values())
    assert saved["columns"] == {"prompt": "prompt", "response": "response"}
    assert saved["peak_bytes"] >= 0 and saved["seconds"] > 0  # a process that was larger before need not grow
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "clean.json",
        "test.parquet",
        "train.parquet",
        "valid.parquet",
    ]


def test_the_first_rows_dropped_are_named_with_what_they_are_like(tmp_path):
    one, other = varied(2)
    rows = [one, other, one, (other[0], other[1][:-1] + "龥"), ("", "x"), None]
    places = cleaned(rows, tmp_path, max_bad=0.5, valid=0).problems
    messages = {reason: [(place.line, place.message) for place in found] for reason, found in places.items()}
    assert messages["broken"] == [(6, "not JSON")]
    assert messages["empty"] == [(5, "prompt is blank")]
    assert messages["duplicate"] == [(3, "same as line 1")]
    assert messages["near_duplicate"][0][0] == 4
    assert messages["near_duplicate"][0][1].endswith("similar to line 2")


def test_of_duplicates_the_first_stays(tmp_path):
    one, other = varied(2)
    near = (other[0], other[1][:-1] + "龥")
    cleaned([one, near, one, other], tmp_path, valid=0)
    assert sorted(read_back(tmp_path)) == sorted([one, near])


def test_rows_that_differ_before_normalising_can_be_duplicates_after(tmp_path):
    report = cleaned([("Ａ！", "x  y"), ("A!", "x y\u200b")], tmp_path, valid=0, near=None)
    assert report.dropped["duplicate"] == 1


def test_near_duplicates_stay_where_they_are_wanted(tmp_path):
    rows, exact, near = with_copies(200)
    report = cleaned(rows, tmp_path, near=None)
    assert near and report.dropped["near_duplicate"] == 0
    assert report.dropped["duplicate"] == exact
    assert report.rows_out == 200 + near


@pytest.fixture(scope="module")
def usual(tmp_path_factory):
    folder = tmp_path_factory.mktemp("usual")
    report = cleaned(with_copies(100)[0] + [("", "x")] * 3, folder, test=0.1, max_chars=205)
    return outcome(folder), report.dropped, report.problems


@example(chunk_rows=20, threads=1, size=1, bucket=2_000)  # a segment whose rows were all dropped
@settings(max_examples=3, deadline=None)
@given(
    chunk_rows=st.integers(20, 400), threads=st.integers(1, 3),
    size=st.sampled_from([1, 30_000, 10**6]), bucket=st.sampled_from([2_000, 20_000, 10**6]),
)  # fmt: skip
def test_the_outputs_do_not_depend_on_chunks_threads_or_memory(
    usual, tmp_path_factory, chunk_rows, threads, size, bucket
):
    memory = replace(SMALL, threads=threads, segment_bytes=size, bucket_bytes=bucket)
    rows, folder = with_copies(100)[0] + [("", "x")] * 3, tmp_path_factory.mktemp("out")
    report = cleaned(rows, folder, test=0.1, max_chars=205, chunk_rows=chunk_rows, memory=memory)
    assert (outcome(folder), report.dropped, report.problems) == usual


def test_a_first_chunk_without_rows_does_not_mean_one_bucket(tmp_path):
    with pytest.raises(KeyboardInterrupt):
        cleaned([("", "x")] * 50 + varied(200), tmp_path, near=None, progress=stopper("finding"))
    tally = json.loads((tmp_path / WORK_FOLDER / "segments" / "00000.json").read_text())
    assert 2 ** tally["bits"] > 100 * 250 / SMALL.bucket_bytes  # 100 bytes of file a row


def test_another_seed_gives_the_same_rows_in_another_order(tmp_path):
    rows = varied(200)
    for seed in (0, 1):
        cleaned(rows, tmp_path / str(seed), seed=seed, valid=0, near=None)
    zero, one = read_back(tmp_path / "0"), read_back(tmp_path / "1")
    assert sorted(zero) == sorted(one) == sorted(rows)
    assert zero != one


def test_the_order_is_random(tmp_path):
    rows = [(f"{number:04}", text) for number, (_, text) in enumerate(varied(1000))]
    cleaned(rows, tmp_path, valid=0, near=None, chunk_rows=500)
    order = [int(prompt) for prompt, _ in read_back(tmp_path)]
    first_half = sum(number < 500 for number in order[:500])
    neighbours = sum(abs(one - other) == 1 for one, other in pairwise(order))
    assert 200 < first_half < 300
    assert neighbours < 12


@pytest.mark.parametrize(
    ("options", "counts"),
    [
        ({"valid": 0.1}, {"valid": 20, "train": 180}),
        ({"valid": 0, "test": 0.25}, {"test": 50, "train": 150}),
        ({"valid": 7, "test": 3}, {"valid": 7, "test": 3, "train": 190}),
        ({"valid": 0.001}, {"valid": 1, "train": 199}),
        ({"valid": 0}, {"train": 200}),
        ({"valid": 150, "test": 49}, {"valid": 150, "test": 49, "train": 1}),
    ],
)  # fmt: skip
def test_a_split_has_exactly_the_rows_that_were_asked_for(tmp_path, options, counts):
    rows = varied(200)
    report = cleaned(rows, tmp_path, **options, near=None)
    assert report.files == counts
    assert {path.stem for path in tmp_path.glob("*.parquet")} == set(counts)
    assert sorted(row for split in counts for row in read_back(tmp_path, split)) == sorted(rows)


def test_a_split_larger_than_what_is_left_is_refused_and_can_be_asked_for_anew(tmp_path):
    with pytest.raises(BadOption, match="20 rows are left"):
        cleaned(varied(20), tmp_path, valid=20, near=None)
    assert not list(tmp_path.glob("*.parquet"))
    messages = []
    assert cleaned(varied(20), tmp_path, valid=5, progress=messages.append, near=None).files == {
        "train": 15,
        "valid": 5,
    }
    assert messages[0] == "resuming after 20 rows"


def test_no_near_duplicate_of_a_training_row_is_in_another_split(tmp_path):
    draw, rows = random.Random(3), []
    for prompt, response in varied(60, length=400):
        for _ in range(5):
            place = draw.randrange(len(response))
            rows.append((prompt, response[:place] + "龥" + response[place + 1 :]))
    draw.shuffle(rows)
    report = cleaned(rows, tmp_path, valid=0.3, test=0.3)
    assert report.rows_out == 60
    prompts = [prompt for split in report.files for prompt, _ in read_back(tmp_path, split)]
    assert max(Counter(prompts).values()) == 1


def test_limits_count_characters_of_each_field(tmp_path):
    rows = [("问" * size, text) for size, (_, text) in zip((2, 3, 4), varied(3, length=10), strict=True)]
    report = cleaned(rows, tmp_path, max_chars="3,10", valid=0, near=None)
    assert report.dropped["over_long"] == 1
    assert {prompt for prompt, _ in read_back(tmp_path)} == {"问问", "问问问"}
    report = cleaned(rows, tmp_path, min_chars="3,10", valid=0, overwrite=True, near=None)
    assert report.dropped["too_short"] == 1
    with pytest.raises(BadOption, match="max_chars='1,2,3'"):
        cleaned(rows, tmp_path, max_chars="1,2,3", overwrite=True, near=None)


def test_limits_count_tokens_and_the_eos(tmp_path):
    tokenizer = Tokenizer(WordLevel({"a": 0, "?": 1}, unk_token="?"))
    tokenizer.pre_tokenizer = Split("", "isolated")
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    rows = [("a" * size, "b" * (9 - size)) for size in (1, 2, 3, 4)]
    report = cleaned(rows, tmp_path / "out", tokenizer=str(tmp_path), max_tokens="4,8", near=None, valid=0)
    assert {prompt for prompt, _ in read_back(tmp_path / "out")} == {"aa", "aaa"}
    assert report.problems["over_long"][0].message == "response has more than 8 tokens with its eos"


@pytest.mark.parametrize("fields", [("text",), ("prompt", "chosen", "rejected")])
def test_rows_of_any_layout_keep_their_fields(tmp_path, fields):
    rows = [tuple(text + field for field in fields) for _, text in varied(30)]
    cleaned([*rows, rows[0], ("",) * len(fields)], tmp_path, fields=fields, valid=0, near=None)
    assert pq.read_schema(tmp_path / "train.parquet").names == list(fields)
    assert sorted(read_back(tmp_path)) == sorted(rows)


def test_a_broken_row_is_told_with_its_line_and_nothing_is_left(tmp_path):
    with pytest.raises(BadData, match=r"rows, line 3: not JSON. .*max_bad="):
        cleaned([*varied(2), None, *varied(2)], tmp_path / "out", near=None)
    assert not (tmp_path / "out").exists()


def test_more_broken_rows_than_allowed_are_refused_and_more_can_be_allowed(tmp_path):
    rows = [*varied(95), *[None] * 5]
    with pytest.raises(BadData, match="5 of 100 rows are broken, more than max_bad=0.04"):
        cleaned(rows, tmp_path, max_bad=0.04, chunk_rows=10, near=None)
    assert not list(tmp_path.glob("*.*et"))
    report = cleaned(rows, tmp_path, max_bad=0.05, chunk_rows=10, near=None)
    assert report.resumed_rows > 0
    assert report.dropped["broken"] == 5 and report.rows_out == 95


def test_fewer_broken_rows_allowed_than_an_interrupted_run_met_are_refused(tmp_path):
    rows = [None, *varied(99)]
    with pytest.raises(KeyboardInterrupt):
        cleaned(rows, tmp_path, max_bad=0.5, progress=stopper("read 100"), near=None)
    with pytest.raises(BadData, match="rows, line 1"):
        cleaned(rows, tmp_path, near=None)


def stopper(phrase):
    def stop(message):
        if message.startswith(phrase):
            raise KeyboardInterrupt

    return stop


def test_where_nothing_is_left_the_reasons_are_told(tmp_path):
    with pytest.raises(BadData, match="No row is left of 3: 3 empty"):
        cleaned([("", "x")] * 3, tmp_path, near=None)
    assert not list(tmp_path.glob("*.parquet"))


def test_what_is_there_is_not_replaced_unless_asked(tmp_path):
    cleaned(varied(50), tmp_path, test=5, near=None)
    before = outcome(tmp_path)
    with pytest.raises(
        BadOption, match=r"already has train.parquet, valid.parquet, test.parquet, clean.json. Try: overwrite=True"
    ):
        cleaned(varied(60), tmp_path, near=None)
    assert outcome(tmp_path) == before
    assert not (tmp_path / WORK_FOLDER).exists()
    cleaned(varied(60), tmp_path, overwrite=True, near=None)
    assert len(read_back(tmp_path)) == 59
    assert not (tmp_path / "test.parquet").exists()


def test_a_failed_overwrite_leaves_what_was_there(tmp_path):
    cleaned(varied(50), tmp_path, near=None)
    before = outcome(tmp_path)
    with pytest.raises(BadData):
        cleaned([("", "")], tmp_path, overwrite=True, near=None)
    assert outcome(tmp_path) == before


def test_an_input_is_never_its_own_output(tmp_path):
    pq.write_table(pa.table({"text": ["a", "b"]}), tmp_path / "train.parquet")
    with pytest.raises(BadOption, match="would replace its own input"):
        clean([str(tmp_path / "train.parquet")], output=tmp_path, options=CleanOptions(overwrite=True))


def test_two_at_once_in_one_folder_are_one_too_many(tmp_path):
    with locked_work_folder(tmp_path), pytest.raises(BadOption, match="in use by another clean"):
        cleaned(varied(5), tmp_path, near=None)
    assert cleaned(varied(5), tmp_path, valid=0, near=None).rows_out == 5


def test_an_output_that_cannot_be_a_folder_is_refused(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(BadOption, match="output='.*file'"):
        cleaned(varied(5), tmp_path / "file", near=None)


def test_a_row_too_long_for_the_memory_is_named(tmp_path):
    path = tmp_path / "a.jsonl"
    path.write_text('{"prompt":"a","response":"b"}\n{"prompt":"a","response":"' + "x" * 13 * 2**20 + '"}\n')
    with pytest.raises(BadData, match=r"line 2 is longer than 12 MiB, the most for host_limit='384MiB'"):
        clean([str(path)], output=tmp_path / "out", options=CleanOptions(host_limit="384MiB", near=None))


def test_without_duckdb_nothing_is_begun(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "duckdb", None)
    with pytest.raises(MissingExtra):
        cleaned(varied(5), tmp_path / "out", near=None)
    assert not (tmp_path / "out").exists()


def test_files_of_a_real_format_are_cleaned(tmp_path):
    rows, raw = varied(30), tmp_path / "raw"
    raw.mkdir()
    lines = [json.dumps({"instruction": prompt, "input": "", "output": response}) for prompt, response in rows]
    (raw / "one.jsonl").write_text("\n".join(lines[:20]))
    (raw / "two.jsonl").write_text("\n".join([lines[3], *lines[20:]]))
    report = clean([str(raw)], output=tmp_path / "out", options=CleanOptions(valid=0))
    assert sorted(read_back(tmp_path / "out")) == sorted(rows)
    assert report.columns["prompt"].startswith("instruction")
    (place,) = report.problems["duplicate"]
    assert Path(place.file).name == "two.jsonl" and place.message == f"same as {raw / 'one.jsonl'}, line 4"


def conversations(path, *, count=60, turns=6):
    """Conversations of several replies, where the prompt of each reply is everything said before."""
    draw, lines = random.Random(4), []
    for _ in range(count):
        texts = [
            "".join(draw.choices("天地玄黄宇宙洪荒日月盈昃辰宿列张寒来暑往秋收冬藏", k=40)) for _ in range(2 * turns)
        ]
        messages = [{"from": ("human", "gpt")[place % 2], "value": text} for place, text in enumerate(texts)]
        lines.append(json.dumps({"conversations": messages}, ensure_ascii=False))
    path.write_text("\n".join(lines), encoding="utf-8")
    return path


def test_replies_of_one_conversation_are_not_taken_for_near_duplicates(tmp_path):
    report = clean([str(conversations(tmp_path / "talks.jsonl"))], output=tmp_path / "out")
    assert report.rows_in == 360 and report.dropped["near_duplicate"] == 0


def test_a_conversation_stays_on_one_side_of_the_split(tmp_path):
    source = conversations(tmp_path / "talks.jsonl")
    report = clean([str(source)], output=tmp_path / "out", options=CleanOptions(valid=20, test=0.1))
    starts = {
        split: {prompt[:40] for prompt in pq.read_table(tmp_path / f"out/{split}.parquet")["prompt"].to_pylist()}
        for split in ("train", "valid", "test")
    }
    assert not (
        starts["train"] & starts["valid"] or starts["train"] & starts["test"] or starts["valid"] & starts["test"]
    )
    rows = {split: pq.read_metadata(tmp_path / f"out/{split}.parquet").num_rows for split in starts}
    assert rows == {"valid": 24, "test": 36, "train": 300} and report.rows_out == 360


def test_short_rows_go_only_as_exact_duplicates(tmp_path):
    rows = [{"text": str(number)} for number in range(1000)] + [{"text": "314"}]
    (tmp_path / "numbers.jsonl").write_text("\n".join(map(json.dumps, rows)))
    report = clean([str(tmp_path / "numbers.jsonl")], output=tmp_path / "out")
    assert (report.dropped["duplicate"], report.dropped["near_duplicate"]) == (1, 0)


@pytest.mark.parametrize("output", ["", "below"])
def test_an_output_in_the_folder_that_is_read_is_refused(tmp_path, output):
    (tmp_path / "rows.jsonl").write_text('{"text": "天地玄黄"}')
    with pytest.raises(BadOption, match="whose files are read. Try: a folder outside of it"):
        clean([str(tmp_path)], output=tmp_path / output)
    assert [path.name for path in tmp_path.iterdir()] == ["rows.jsonl"]


def test_a_report_whose_numbers_do_not_add_up_cannot_be_made():
    fields = {
        "output": "out", "columns": {}, "reason": "", "rows_in": 10, "files": {"train": 7, "valid": 2}, "problems": {},
        "resumed_rows": 0, "notes": (), "seconds": 1.0, "stage_s": {}, "peak_bytes": 0,
        "dropped": {"broken": 1, "empty": 0, "too_short": 0, "over_long": 0, "duplicate": 0, "near_duplicate": 0},
    }  # fmt: skip
    assert CleanReport(**fields).rows_out == 9
    with pytest.raises(InternalError, match="do not add up"):
        CleanReport(**fields | {"rows_in": 11})
    with pytest.raises(InternalError, match="do not add up"):
        CleanReport(**fields | {"dropped": {"broken": 1}})
