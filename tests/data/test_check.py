"""Every row is counted once: usable, or dropped for the first reason that applies."""

import json
import random
import tracemalloc

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pytest
from tokenizers import AddedToken, Tokenizer, models, pre_tokenizers

from brimful.data.check import Bin, Duplicates, Histogram, TokenCounter, check, row_hashes, shared_prompts
from brimful.data.read import columns as read_columns
from brimful.data.read.files import CHUNK_ROWS
from brimful.errors import BadData, BadOption
from brimful.units import MiB
from tests.data.read.row_files import write


def jsonl(tmp_path, *lines, name="a.jsonl"):
    (tmp_path / name).write_text(
        "".join((line if isinstance(line, str) else json.dumps(line)) + "\n" for line in lines)
    )
    return str(tmp_path / name)


def pair(prompt, response):
    return {"prompt": prompt, "response": response}


MIXED = (
    pair("a", "b"),
    "{broken",
    pair("", "b"),
    pair("a", "x" * 11),
    pair(" a\n", "b\u3000"),
    pair("c", None),
    pair("", "x" * 11),
    pair("d", "y"),
    pair("", "b"),
)


def test_each_row_counts_under_its_first_reason(tmp_path):
    report = check([jsonl(tmp_path, *MIXED)], max_chars=10)
    assert report.rows_in == 9
    assert report.dropped == {"broken": 1, "empty": 4, "over_long": 1, "duplicate": 1}
    assert report.rows_out == 2


def preference(prompt, chosen, rejected):
    return {"prompt": prompt, "chosen": chosen, "rejected": rejected}


def test_a_preference_whose_replies_are_equal_cannot_be_used(tmp_path):
    rows = [preference("a", "b", "c"), preference("a", "b ", "b"), preference("a", "b", " "), preference("", "b", "b")]
    report = check([jsonl(tmp_path, *rows)])
    assert report.dropped == {"broken": 0, "empty": 2, "equal": 1, "over_long": 0, "duplicate": 0}
    assert [str(one).rpartition("line ")[2] for one in report.problems["equal"]] == ["2: chosen is equal to rejected"]
    assert report.bad_share == 0.75


def test_preferences_are_read_in_all_forms_that_dpo_reads(tmp_path):
    def said(*texts):
        return [{"role": role, "content": text} for role, text in zip(("user", "assistant"), texts, strict=False)]

    whole = {"chosen": said("a", "b"), "rejected": said("a", "c")}
    sharegpt = {
        "conversations": [{"from": "human", "value": "a"}],
        "chosen": {"from": "gpt", "value": "b"},
        "rejected": {"from": "gpt", "value": "c"},
    }
    for name, row in (("whole", whole), ("sharegpt", sharegpt), ("texts", preference("a", "b", "c"))):
        report = check([jsonl(tmp_path, row, name=f"{name}.jsonl")])
        assert report.rows_out == 1 and report.examples == (preference("a", "b", "c"),), name


def test_conversations_that_differ_before_the_reply_are_broken(tmp_path):
    rows = {"chosen": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]}
    rows["rejected"] = [{"role": "user", "content": "other"}, {"role": "assistant", "content": "b"}]
    (problem,) = check([jsonl(tmp_path, rows)]).problems["broken"]
    assert problem.message == "'chosen' and 'rejected' differ in more than the last reply"


def test_prompts_that_are_in_both_sets_are_counted(tmp_path):
    train = jsonl(tmp_path, pair("a", "b"), pair("c", "d"), name="train.jsonl")
    valid = jsonl(tmp_path, pair("e", "f"), pair(" c", "other"), pair("a", "b"), name="valid.jsonl")
    shared = shared_prompts([train], [valid])
    assert (shared.rows, shared.shared) == (3, 2)
    assert str(shared.first) == f"{valid}, line 2: its prompt is also in the training rows"
    assert shared_prompts([train], [jsonl(tmp_path, pair("x", "b"), name="other.jsonl")]).first is None


def test_the_first_places_of_each_problem_are_listed(tmp_path):
    path = jsonl(tmp_path, *MIXED)
    report = check([path], max_chars=10)
    problems = {reason: [(place.line, place.message) for place in places] for reason, places in report.problems.items()}
    assert problems == {
        "broken": [(2, "not JSON: Expecting property name enclosed in double quotes at character 2")],
        "empty": [(3, "the prompt is empty"), (6, "the response is empty"), (7, "the prompt is empty")],
        "over_long": [(4, "the response has 11 characters, more than 10")],
        "duplicate": [(5, "came before")],
    }
    assert {place.file for places in report.problems.values() for place in places} == {path}


def test_without_a_limit_nothing_is_over_long(tmp_path):
    report = check([jsonl(tmp_path, pair("a", "x" * 100_000))])
    assert report.dropped == {"broken": 0, "empty": 0, "over_long": 0, "duplicate": 0}


@pytest.mark.parametrize(("limit", "long"), [("2", 2), ("2,3", 1), ("3,2", 1), (3, 0), ("2,99", 1)])
def test_a_limit_may_differ_between_fields(limit, long, tmp_path):
    path = jsonl(tmp_path, pair("一二三", "a"), pair("a", "一二三"), pair("ab", "ab"))
    assert check([path], max_chars=limit).dropped["over_long"] == long


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            {"max_chars": "many"},
            "max_chars='many' must be a positive whole number",
        ),
        ({"max_chars": "0"}, "max_chars='0' must be a positive"),
        ({"max_chars": "1,2,3"}, "max_chars='1,2,3' has 3 numbers for prompt, response"),
        ({"max_tokens": "5"}, "max_tokens='5' needs a tokenizer"),
        ({"max_bad": 1.5}, "max_bad=1.5 must be between 0 and 1"),
    ],
)
def test_a_mistake_in_an_option_is_one_message(options, message, tmp_path):
    with pytest.raises(BadOption, match=message):
        check([jsonl(tmp_path, pair("a", "b"))], **options)


def test_python_and_arrow_agree_on_what_is_blank():
    spaces = [chr(code) for code in range(0x110000) if not 0xD800 <= code < 0xE000 and chr(code).isspace()]
    bare = pc.utf8_trim_whitespace(pa.array([*spaces, "\u200b"])).to_pylist()
    assert bare == [""] * len(spaces) + ["\u200b"]


# ---------------------------------------------------------------- the verdict


@pytest.mark.parametrize(
    ("bad", "max_bad", "fails"), [(1, 0.01, False), (2, 0.01, True), (2, 0.02, False), (1, 0, True), (0, 0, False)]
)
def test_more_unusable_rows_than_allowed_are_a_failure(bad, max_bad, fails, tmp_path):
    rows = [pair(str(number), "b") for number in range(100 - bad)]
    report = check([jsonl(tmp_path, *rows, *[pair("", "b")] * bad)], max_bad=max_bad)
    assert (report.failure() is not None) == fails


def test_a_failure_names_counts_and_the_first_place(tmp_path):
    path = jsonl(tmp_path, *MIXED)
    assert check([path], max_chars=10).failure() == (
        "6 of 9 rows cannot be used (1 broken, 4 empty, 1 over-long), more than max_bad=0.01 allows. "
        f"Try: repair them, starting with {path}, line 2: not JSON: Expecting property name enclosed in double quotes at character 2."
    )


@pytest.mark.parametrize(("name", "text"), [("a.csv", "text\n你好\n"), ("a.jsonl", '{"text":"x"}\n{"text":"你好"}\n')])
def test_text_in_gbk_is_told_with_the_command_that_converts_it(name, text, tmp_path):
    path = tmp_path / name
    path.write_bytes(text.encode("gbk"))
    assert (
        f"Try: `iconv -f GBK -t UTF-8 {path} > utf8{path.suffix}` if its text is GBK, " in check([str(path)]).failure()
    )


def test_duplicates_are_no_failure(tmp_path):
    report = check([jsonl(tmp_path, *[pair("a", "b")] * 10)], max_bad=0)
    assert report.dropped["duplicate"] == 9
    assert report.failure() is None


# ---------------------------------------------------------------- what is shown


def test_the_first_usable_rows_are_examples(tmp_path):
    report = check([jsonl(tmp_path, *MIXED)])
    assert report.examples == (pair("a", "b"), pair("a", "x" * 11), pair(" a\n", "b\u3000"))


def test_the_json_has_the_names_that_scripts_rely_on(tmp_path):
    found = json.loads(json.dumps(check([jsonl(tmp_path, *MIXED)], max_chars=10).to_json()))
    assert found["rows_in"] == found["rows_out"] + sum(found["dropped"].values()) == 9
    assert found["columns"] == {"prompt": "prompt", "response": "response"}
    assert found["kind"] == "pair"
    assert found["characters"]["prompt"]["max"] == 3
    assert found["problems"]["over_long"][0]["line"] == 4
    assert found["tokens"] == {}
    assert found["conversations"] is None


def test_progress_tells_rows_speed_and_share(tmp_path):
    phrases = []
    path = write(tmp_path / "a.parquet", [pair("a", "b")] * (CHUNK_ROWS + 10))
    check([str(path)], progress=phrases.append)
    assert len(phrases) == 2
    assert phrases[-1].startswith("read 16,394 rows, ") and phrases[-1].endswith(" rows/s, 100 %")


def test_conversations_are_counted_beside_their_rows(tmp_path, monkeypatch):
    monkeypatch.setattr(read_columns, "CHUNK_ROWS", 2)
    messages = [{"from": "human", "value": "a"}, {"from": "gpt", "value": "b"}]
    path = jsonl(tmp_path, *[{"conversations": messages * turns} for turns in (1, 3, 0, 2)], name="a.jsonl")
    other = jsonl(tmp_path, {"conversations": messages * 5}, name="b.jsonl")
    report = check([path, other])
    assert (report.rows_in, report.conversations) == (12, 5)


@pytest.mark.parametrize(
    ("row", "fields"),
    [
        ({"text": "a"}, {"text": "text"}),
        (
            {"prompt": "a", "chosen": "b", "rejected": "c"},
            {"prompt": "prompt", "chosen": "chosen", "rejected": "rejected"},
        ),
    ],
)
def test_other_layouts_are_counted_likewise(row, fields, tmp_path):
    report = check([jsonl(tmp_path, row, row, dict.fromkeys(row, ""))])
    assert report.layout.columns == fields
    assert {**report.dropped, "equal": 0} == {"broken": 0, "empty": 1, "equal": 0, "over_long": 0, "duplicate": 1}
    assert set(report.characters) == set(fields)


def test_a_pass_over_rows_that_are_all_broken_has_no_lengths(tmp_path):
    (tmp_path / "a.csv").write_text("prompt,response\na\nb\n")
    report = check([str(tmp_path / "a.csv")])
    assert (report.rows_in, report.rows_out, report.characters, report.examples) == (2, 0, {}, ())


# ---------------------------------------------------------------- tokens


@pytest.fixture
def tokenizer(tmp_path):
    """A word is a token, and so is [EOS] where it is no text."""
    made = Tokenizer(models.WordLevel({"[UNK]": 0, "[EOS]": 1, "a": 2, "b": 3}, unk_token="[UNK]"))
    made.pre_tokenizer = pre_tokenizers.Whitespace()
    made.add_special_tokens([AddedToken("[EOS]", special=True)])
    made.enable_truncation(4)
    made.enable_padding(length=4)
    folder = tmp_path / "tokenizer"
    folder.mkdir()
    made.save(str(folder / "tokenizer.json"))
    return str(folder)


def test_tokens_are_counted_with_their_eos(tokenizer, tmp_path):
    path = jsonl(tmp_path, pair("a b", "a"), pair("a b a b a b", "b"), pair("b", "[EOS]"))
    report = check([path], tokenizer=tokenizer, max_tokens="7,2")
    assert (report.tokens["prompt"].p50, report.tokens["prompt"].max) == (3, 7)
    assert report.tokens["response"].max == 4  # [ EOS ] and the real one
    assert report.dropped["over_long"] == 1
    assert report.problems["over_long"][0].message == "the response has 4 tokens, more than 2"
    assert report.characters["prompt"].max == 11


def test_a_long_text_is_tokenised_in_parts(tokenizer, tmp_path, monkeypatch):
    monkeypatch.setattr(TokenCounter, "_CHARACTERS", 10)
    rows = [pair("a " * 50, "b"), pair("a", "b " * 7)]
    report = check([jsonl(tmp_path, *rows)], tokenizer=tokenizer)
    assert (report.tokens["prompt"].max, report.tokens["response"].max) == (51, 8)


def test_many_rows_are_tokenised_in_order(tokenizer, tmp_path):
    rows = [pair("a " * (number % 7 + 1), f"b {number}") for number in range(2500)]
    report = check([jsonl(tmp_path, *rows)], tokenizer=tokenizer, max_tokens="7,99")
    assert report.dropped["over_long"] == len([number for number in range(2500) if number % 7 == 6])
    assert [place.line for place in report.problems["over_long"]] == [7, 14, 21]


def test_a_folder_without_a_tokenizer_is_one_message(tmp_path):
    path = jsonl(tmp_path, pair("a", "b"))
    with pytest.raises(BadData, match=f"{tmp_path} has no tokenizer.json"):
        check([path], tokenizer=str(tmp_path))
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(BadData, match="tokenizer.json cannot be read as a tokenizer"):
        check([path], tokenizer=str(tmp_path))


# ---------------------------------------------------------------- duplicates


def test_duplicates_are_found_across_chunks_and_files(tmp_path):
    rows = [pair(str(number), "b") for number in range(CHUNK_ROWS + 100)]
    first = write(tmp_path / "a.parquet", rows)
    second = write(tmp_path / "b.csv", [*rows[-5:], pair("new", "b"), rows[0]])
    report = check([str(first), str(second)])
    assert report.dropped["duplicate"] == 6
    assert [(place.file, place.line) for place in report.problems["duplicate"]] == [
        (str(second), 2),
        (str(second), 3),
        (str(second), 4),
    ]


def test_a_row_is_no_duplicate_of_one_with_its_fields_split_elsewhere(tmp_path):
    rows = [
        pair("ab", "c"),
        pair("a", "bc"),
        pair("c", "ab"),
        pair("a\u0000b", "c"),
        pair("a", "\u0000bc"),
        pair("b c", "a"),
        pair("a", "b c"),
    ]
    assert check([jsonl(tmp_path, *rows)]).dropped["duplicate"] == 0


def test_the_places_of_duplicates_skip_rows_that_were_dropped(tmp_path):
    report = check(
        [jsonl(tmp_path, pair("a", "b"), pair("", ""), "broken", "", pair("c", "d"), pair("a", "b"), pair("c", "d"))]
    )
    assert [place.line for place in report.problems["duplicate"]] == [6, 7]


def test_counting_duplicates_is_counting_rows_less_different_rows():
    rng = random.Random(0)
    texts = [str(rng.randrange(3000)) for _ in range(5000)]
    duplicates = Duplicates()
    for start in range(0, 5000, 700):
        part = texts[start : start + 700]
        duplicates.add(row_hashes([pa.array(part)]), "f", np.arange(start + 1, start + len(part) + 1))
    count, places = duplicates.count()
    seen: set[str] = set()
    again = [line for line, text in enumerate(texts, 1) if text in seen or seen.add(text)]
    assert count == 5000 - len(set(texts)) == len(again)
    assert [line for _, line in places] == again[:3]


def test_hashes_are_kept_in_eight_bytes_for_each_different_row():
    duplicates = Duplicates()
    for start in range(0, 3000, 1000):
        duplicates.add(row_hashes([pa.array([str(n % 500) for n in range(1000)])]), "f", np.arange(start, start + 1000))
    assert duplicates.count()[0] == 2500
    assert duplicates.size_bytes == 500 * 8


def test_equal_rows_take_no_memory():
    """82 million of them took 66 bytes each."""
    duplicates = Duplicates()
    hashes, lines = row_hashes([pa.array(["a"] * CHUNK_ROWS)]), np.arange(CHUNK_ROWS)
    tracemalloc.start()
    try:
        for _ in range(5_000_000 // CHUNK_ROWS):
            duplicates.add(hashes.copy(), "f", lines.copy())
        duplicates.count()
        assert tracemalloc.get_traced_memory()[1] < 80 * MiB
    finally:
        tracemalloc.stop()


def test_more_different_rows_than_the_memory_limit_holds_are_one_message(tmp_path, monkeypatch):
    monkeypatch.setattr(Duplicates, "BATCH_ROWS", 100)
    path = jsonl(tmp_path, *(pair(str(number), "b") for number in range(200)))
    with pytest.raises(BadData, match=r"a.jsonl, line 200: the 200 different rows .* Try: host_limit='4KiB'."):
        check([path], host_limit="2KiB")


def test_hashes_spread_over_all_buckets():
    hashes = row_hashes([pa.array([str(number) for number in range(10_000)]), pa.array(["same"] * 10_000)])
    counts = np.bincount((hashes >> np.uint64(60)).astype(np.int64), minlength=Duplicates.BUCKETS)
    assert len(np.unique(hashes)) == 10_000
    assert counts.min() > 500


# ---------------------------------------------------------------- lengths


def lengths_of(*lengths):
    histogram = Histogram()
    for start in range(0, len(lengths), 3):
        histogram.add(np.array(lengths[start : start + 3], dtype=np.int64))
    return histogram.lengths()


def test_percentiles_are_those_of_the_sorted_lengths():
    rng = random.Random(0)
    lengths = [rng.randrange(5000) for _ in range(777)]
    found, ordered = lengths_of(*lengths), sorted(lengths)
    assert [found.p50, found.p90, found.p99, found.max] == [
        ordered[-(-777 * share // 100) - 1] for share in (50, 90, 99, 100)
    ]
    assert found.mean == pytest.approx(sum(lengths) / 777)
    assert found.rows == 777


def test_the_bins_hold_every_row_once_and_are_of_round_width():
    rng = random.Random(0)
    lengths = [int(rng.expovariate(1 / 100)) for _ in range(999)]
    found = lengths_of(*lengths)
    assert sum(one.rows for one in found.bins) == 999
    for one in found.bins:
        assert one.rows == len(
            [length for length in lengths if one.start <= length and (one.end is None or length < one.end)]
        )
    assert {one.end - one.start for one in found.bins[:-1]} == {50}
    assert found.bins[-1].end is None


@pytest.mark.parametrize(
    ("lengths", "bins"),
    [
        ([0], (Bin(start=0, end=1, rows=1),)),
        ([0, 1, 1], (Bin(start=0, end=1, rows=1), Bin(start=1, end=2, rows=2))),
        ([10] * 199 + [20], (Bin(start=10, end=11, rows=199), Bin(start=11, end=None, rows=1))),
        ([10] * 199 + [11], (Bin(start=10, end=11, rows=199), Bin(start=11, end=None, rows=1))),
    ],
)  # fmt: skip
def test_small_lengths_have_bins_of_one(lengths, bins):
    assert lengths_of(*lengths).bins == bins


def test_a_very_long_row_is_counted_with_its_true_maximum():
    found = lengths_of(*[100_000_001] * 5, *[70_000] * 94, 5)
    assert (found.max, found.rows) == (100_000_001, 100)
    assert found.p50 == 70_656  # rounded up to 1,024
    assert found.p99 == 100_000_001
    assert sum(one.rows for one in found.bins) == 100


def test_no_rows_have_no_lengths():
    assert lengths_of() is None
