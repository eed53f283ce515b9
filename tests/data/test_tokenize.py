"""`tokenize`: the right tokens, every row accounted for, and nothing but a complete store at the output."""

import fcntl
import json
import os
import shutil
import signal
import subprocess
import sys

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from tokenizers import Tokenizer

from brimful.data import encode
from brimful.data import tokenize as module
from brimful.data.store import Store
from brimful.data.tokenize import RowNotes, TokenizeOptions, tokenize
from brimful.errors import BadData, BadOption
from brimful.machine.host import Space
from brimful.units import MiB
from tests.data.tokenize_rows import TEXTS, make_tokenizer, rows, write_jsonl


@pytest.fixture(scope="session")
def tokenizer(tmp_path_factory):
    return make_tokenizer(tmp_path_factory.mktemp("tokenizer") / "t")


@pytest.fixture(scope="session")
def plain(tokenizer):
    """Text to ids, one at a time, by the library alone."""
    loaded = Tokenizer.from_file(str(tokenizer / "tokenizer.json"))
    loaded.no_truncation()
    loaded.encode_special_tokens = True
    return lambda text: loaded.encode(text, add_special_tokens=False).ids


def tokenized(tmp_path, content, tokenizer, **options):
    source = write_jsonl(tmp_path / "rows.jsonl", content)
    report = tokenize([source], tokenizer=tokenizer, output=tmp_path / "store", options=TokenizeOptions(**options))
    return report, Store.open(tmp_path / "store")


def test_every_field_is_its_text_and_one_eos(tmp_path, tokenizer, plain):
    content = rows(50)
    _, store = tokenized(tmp_path, content, tokenizer)
    for row, wanted in zip(store, content, strict=True):
        assert row["prompt"].tolist() == [*plain(wanted["prompt"]), 1]
        assert row["response"].tolist() == [*plain(wanted["response"]), 1]
        assert (row["prompt"] == 1).sum() == (row["response"] == 1).sum() == 1


def test_small_pieces_give_the_same_store(tmp_path, tokenizer, monkeypatch):
    content = rows(300)
    (tmp_path / "a").mkdir(), (tmp_path / "b").mkdir()
    one, _ = tokenized(tmp_path / "a", content, tokenizer)
    monkeypatch.setattr(module, "piece_size", lambda *_: 500)
    other, _ = tokenized(tmp_path / "b", content, tokenizer)
    assert one.fingerprint == other.fingerprint
    assert one.fields == other.fields


def test_a_text_and_a_preference_have_one_and_three_fields(tmp_path, tokenizer, plain):
    pq.write_table(pa.table({"text": TEXTS}), tmp_path / "text.parquet")
    tokenize([str(tmp_path / "text.parquet")], tokenizer=tokenizer, output=tmp_path / "one")
    assert [row["text"].tolist() for row in Store.open(tmp_path / "one")] == [[*plain(text), 1] for text in TEXTS]
    pq.write_table(pa.table({"prompt": TEXTS, "chosen": TEXTS[::-1], "rejected": TEXTS}), tmp_path / "three.parquet")
    tokenize([str(tmp_path / "three.parquet")], tokenizer=tokenizer, output=tmp_path / "three")
    three = Store.open(tmp_path / "three")
    assert three.fields == ("prompt", "chosen", "rejected")
    assert three[0]["chosen"].tolist() == [*plain(TEXTS[-1]), 1]


def test_long_fields_are_truncated_and_counted(tmp_path, tokenizer, plain):
    content = rows(40)
    report, store = tokenized(tmp_path, content, tokenizer, max_tokens=(8, 12))
    for field, limit in (("prompt", 8), ("response", 12)):
        ids = [plain(row[field]) for row in content]
        over = [len(one) + 1 - limit for one in ids if len(one) + 1 > limit]
        assert over
        assert [row[field].tolist() for row in store] == [[*one[: limit - 1], 1] for one in ids]
        assert (report.fields[field].truncated, report.fields[field].lost_tokens) == (len(over), sum(over))
        assert store.meta.truncated[field] == len(over)
        assert store.meta.max_tokens[field] == report.fields[field].max_tokens == limit
        assert report.fields[field].longest == limit
    assert report.requested_max_tokens == (8, 12)


def test_a_field_exactly_at_its_limit_is_not_truncated(tmp_path, tokenizer, plain):
    content = [{"prompt": "一", "response": TEXTS[0]}]
    limit = len(plain(TEXTS[0])) + 1
    report, _ = tokenized(tmp_path, content, tokenizer, max_tokens=(limit,))
    assert report.to_json()["truncated"] == {"prompt": 0, "response": 0}


def test_rows_with_an_empty_field_are_dropped_and_counted(tmp_path, tokenizer):
    empties = [("", "a"), ("a", ""), (" \n\u3000", "a"), ("a", "∅"), ("∅∅", "a")]
    content = rows(6) + [{"prompt": prompt, "response": response} for prompt, response in empties] + rows(4, 6)
    report, store = tokenized(tmp_path, content, tokenizer)
    assert (report.rows_in, report.rows_out) == (15, 10) == (store.meta.rows_in, len(store))
    assert report.dropped == store.meta.dropped == {"broken": 0, "empty": 5}
    assert report.fields["prompt"].characters == sum(len(row["prompt"]) for row in rows(10))


def test_a_broken_row_ends_it_with_file_and_line(tmp_path, tokenizer):
    write_jsonl(tmp_path / "rows.jsonl", rows(20))
    with (tmp_path / "rows.jsonl").open("a") as file:
        file.write("{broken\n")
    with pytest.raises(BadData, match="rows.jsonl, line 21"):
        tokenize([str(tmp_path / "rows.jsonl")], tokenizer=tokenizer, output=tmp_path / "store")
    assert [path.name for path in tmp_path.iterdir()] == ["rows.jsonl"]


def test_broken_rows_within_max_bad_are_dropped_and_counted(tmp_path, tokenizer):
    write_jsonl(tmp_path / "rows.jsonl", rows(20))
    with (tmp_path / "rows.jsonl").open("a") as file:
        file.write("{broken\n")
    options = TokenizeOptions(max_bad=0.1)
    report = tokenize([str(tmp_path / "rows.jsonl")], tokenizer=tokenizer, output=tmp_path / "store", options=options)
    assert (report.rows_in, report.rows_out, report.dropped) == (21, 20, {"broken": 1, "empty": 0})
    assert "rows.jsonl, line 21" in report.first_broken
    with pytest.raises(BadData, match="more than max_bad=0.01"):
        tokenize(
            [str(tmp_path / "rows.jsonl")],
            tokenizer=tokenizer,
            output=tmp_path / "other",
            options=TokenizeOptions(max_bad=0.01),
        )
    assert not (tmp_path / "other").exists()


def test_no_row_left_is_an_error(tmp_path, tokenizer):
    with pytest.raises(BadData, match="no row is left of 3 .0 broken, 3 with an empty field."):
        tokenized(tmp_path, [{"prompt": "", "response": "a"}] * 3, tokenizer)
    assert not (tmp_path / "store").exists()


def test_the_report_adds_up(tmp_path, tokenizer):
    report, store = tokenized(tmp_path, rows(30), tokenizer)
    content = json.loads(json.dumps(report.to_json()))
    assert {
        "rows_in", "rows_out", "dropped", "columns", "truncated", "tokens", "seconds", "peak_bytes", "lengths", "characters",
    } <= set(content)  # fmt: skip
    assert content["rows_in"] == content["rows_out"] + sum(content["dropped"].values())
    assert content["tokens"] == {field: sum(len(row[field]) for row in store) for field in store.fields}
    assert content["columns"] == {"prompt": "prompt", "response": "response"}
    lengths = sorted(len(row["response"]) for row in store)
    assert content["lengths"]["response"] == {
        "mean": pytest.approx(sum(lengths) / 30), "p50": lengths[14], "p90": lengths[26], "p99": lengths[29], "longest": lengths[-1],
    }  # fmt: skip
    assert content["peak_bytes"] >= content["start_bytes"] > MiB
    assert content["size_bytes"] == sum(
        path.stat().st_size for path in store.path.rglob("*.*") if path.name != "store.json"
    )


def test_the_store_knows_its_tokenizer_and_sources(tmp_path, tokenizer):
    _, store = tokenized(tmp_path, rows(3), tokenizer)
    assert (store.meta.eos_id, store.meta.pad_id) == (1, 0)
    assert store.meta.sources == (str(tmp_path / "rows.jsonl"),)
    copied = store.path / "tokenizer"
    assert sorted(path.name for path in copied.iterdir()) == ["tokenizer.json", "tokenizer_config.json"]
    assert (copied / "tokenizer.json").read_bytes() == (tokenizer / "tokenizer.json").read_bytes()


def test_a_very_long_text_gives_the_same_tokens_from_its_beginning(tmp_path, tokenizer, monkeypatch, plain):
    monkeypatch.setattr(encode, "LONG_CHARACTERS", 60)
    long, short_of_tokens = TEXTS[0] * 40, "what a day, " * 40
    content = [{"prompt": long, "response": long}, {"prompt": "一", "response": short_of_tokens}]
    report, store = tokenized(tmp_path, content, tokenizer, max_tokens=(6,))
    assert [row["response"].tolist() for row in store] == [[*plain(row["response"])[:5], 1] for row in content]
    assert report.fields["prompt"].truncated == 1
    (tmp_path / "all").mkdir()
    _, store = tokenized(tmp_path / "all", content, tokenizer, max_tokens=(100_000,))
    assert [row["response"].tolist() for row in store] == [[*plain(row["response"]), 1] for row in content]


def test_a_host_limit_too_small_leaves_nothing(tmp_path, tokenizer):
    with pytest.raises(BadOption, match="host_limit='1MiB' is too small"):
        tokenized(tmp_path, rows(3), tokenizer, host_limit_bytes=MiB)
    assert [path.name for path in tmp_path.iterdir()] == ["rows.jsonl"]


def test_all_wrong_options_are_reported_at_once():
    with pytest.raises(BadOption, match="max_tokens=1 must .*; max_bad=2 must .*; host_limit=0 must"):
        TokenizeOptions(max_tokens=(1,), max_bad=2, host_limit_bytes=0)


def test_one_limit_for_each_field_or_one_for_all(tmp_path, tokenizer):
    with pytest.raises(BadOption, match="does not match the 2 fields of the rows"):
        tokenized(tmp_path, rows(3), tokenizer, max_tokens=(8, 8, 8))


def test_a_disk_that_is_too_small_is_reported_before_it_is_full(tmp_path, tokenizer, monkeypatch):
    monkeypatch.setattr(Space, "around", lambda path: Space(path=str(path), total_bytes=10**9, free_bytes=100))
    with pytest.raises(BadData, match="will take about .* and the disk has 100 B free"):
        tokenized(tmp_path, rows(30), tokenizer)
    assert [path.name for path in tmp_path.iterdir()] == ["rows.jsonl"]


def test_progress_has_rows_rate_and_share(tmp_path, tokenizer):
    phrases = []
    source = write_jsonl(tmp_path / "rows.jsonl", rows(30))
    tokenize([source], tokenizer=tokenizer, output=tmp_path / "store", progress=phrases.append)
    assert len(phrases) == 1
    assert phrases[0].startswith("tokenized 30 rows, ")
    assert phrases[0].endswith("rows/s, 100%")


def test_truncation_removes_the_end_or_if_requested_the_beginning(tmp_path, tokenizer, plain):
    source = write_jsonl(tmp_path / "rows.jsonl", [{"prompt": "abcdefgh" * 4, "response": "abcdefgh" * 4}])
    whole = plain("abcdefgh" * 4)
    options = TokenizeOptions(max_tokens=(6,), keep_end=("prompt",))
    report = tokenize([str(source)], tokenizer=tokenizer, output=tmp_path / "store", options=options)
    row = Store.open(tmp_path / "store")[0]
    assert len(whole) > 6
    assert row["prompt"].tolist() == [*whole[-5:], 1] and row["response"].tolist() == [*whole[:5], 1]
    assert report.fields["prompt"].keeps_end and not report.fields["response"].keeps_end


def test_the_prompt_of_a_conversation_keeps_its_end(tmp_path, tokenizer, plain):
    turns = [{"from": "human", "value": "abcdefgh" * 6}, {"from": "gpt", "value": "abc"}]
    source = write_jsonl(tmp_path / "rows.jsonl", [{"conversations": turns}])
    whole = plain("abcdefgh" * 6)
    tokenize([str(source)], tokenizer=tokenizer, output=tmp_path / "store", options=TokenizeOptions(max_tokens=(6,)))
    assert Store.open(tmp_path / "store")[0]["prompt"].tolist() == [*whole[-5:], 1]


def test_an_unknown_field_cannot_keep_its_end(tmp_path, tokenizer):
    source = write_jsonl(tmp_path / "rows.jsonl", rows(3))
    with pytest.raises(BadOption, match="keep_end='question' is not a field of the rows. Try: prompt or response"):
        options = TokenizeOptions(keep_end=("question",))
        tokenize([str(source)], tokenizer=tokenizer, output=tmp_path / "store", options=options)


FILE_ROWS = 50
KILLED = """
import os, signal, sys
from brimful.data.tokenize import RowNotes, TokenizeOptions, tokenize

def kill(phrase):
    if phrase.startswith(sys.argv[4]):
        os.kill(os.getpid(), signal.SIGKILL)

tokenize([sys.argv[1]], tokenizer=sys.argv[2], output=sys.argv[3], options=TokenizeOptions(file_rows=50), progress=kill)
"""


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """A folder of ten files with 20 rows each, every one a chunk, and a tokenizer."""
    folder = tmp_path_factory.mktemp("rows")
    (folder / "in").mkdir()
    for number in range(10):
        write_jsonl(folder / "in" / f"{number}.jsonl", [*rows(19, 20 * number), {"prompt": "", "response": "x"}])
    make_tokenizer(folder / "tokenizer")
    return folder


def run(place, output, **options):
    said = []
    report = tokenize(
        [str(place / "in")], tokenizer=place / "tokenizer", output=output,
        options=TokenizeOptions(**{"file_rows": FILE_ROWS, **options}), progress=said.append,
    )  # fmt: skip
    return report, said


def killed(place, output, at="tokenized 140 rows"):
    """A run that dies by SIGKILL at that progress."""
    done = subprocess.run([sys.executable, "-c", KILLED, str(place / "in"), str(place / "tokenizer"), str(output), at])
    assert done.returncode == -signal.SIGKILL
    return output.with_name(f".{output.name}.part")


def interrupted(place, output, at="tokenized 140 rows"):
    """A run that is stopped at that progress; returns what it leaves."""

    def stop(phrase):
        if phrase.startswith(at):
            raise KeyboardInterrupt

    options = TokenizeOptions(file_rows=FILE_ROWS)
    with pytest.raises(KeyboardInterrupt):
        tokenize([str(place / "in")], tokenizer=place / "tokenizer", output=output, options=options, progress=stop)
    return output.with_name(f".{output.name}.part")


def contents(folder):
    return {str(path.relative_to(folder)): path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()}


def test_a_killed_run_continues_and_gives_the_same_store(place, tmp_path):
    part = killed(place, tmp_path / "store")
    assert not (tmp_path / "store").exists()
    whole = json.loads((part / "progress.json").read_text())
    assert whole["counts"]["rows_in"] >= 60
    (part / "tokens-00009.arrow").write_text("half a file")
    report, said = run(place, tmp_path / "store")
    assert said[0] == f"continuing after {whole['counts']['rows_in']} rows of an interrupted run"
    assert said[1].startswith(f"tokenized {whole['counts']['rows_in'] + 20} rows")
    assert report.resumed_rows == whole["counts"]["rows_out"]
    assert (report.rows_in, report.rows_out, report.dropped["empty"]) == (200, 190, 10)
    straight, _ = run(place, tmp_path / "straight")
    assert contents(tmp_path / "store") == contents(tmp_path / "straight")
    assert report.fields == straight.fields
    assert [path.name for path in tmp_path.iterdir() if path.name.startswith(".")] == []


def test_a_run_killed_before_the_first_file_starts_anew(place, tmp_path):
    part = killed(place, tmp_path / "store", at="tokenized 20 rows")
    assert part.exists()
    report, said = run(place, tmp_path / "store")
    assert said[0].startswith("tokenized 20 rows")
    assert (report.resumed_rows, report.started_over) == (0, "")


@pytest.mark.parametrize("change", ["options", "tokenizer", "source", "damage", "progress", "nested progress"])
def test_a_run_is_not_continued_after_a_change(place, tmp_path, change):
    part = interrupted(place, tmp_path / "store")
    reasons = {
        "options": "max-tokens",
        "progress": "cannot be read",
        "nested progress": "cannot be read",
        "damage": "damaged",
    }
    options, reason = {}, reasons.get(change, change)
    if change == "options":
        options["max_tokens"] = (30,)
    elif change == "tokenizer":
        path = part / "progress.json"
        content = json.loads(path.read_text())
        content["key"]["tokenizer"] = "another"
        path.write_text(json.dumps(content))
    elif change == "source":
        os.utime(place / "in" / "3.jsonl", (1, 1))
    elif change == "damage":
        path = part / "tokens-00000.arrow"
        path.write_bytes(path.read_bytes()[:-1] + b"x")
    else:
        (part / "progress.json").write_text("{" if change == "progress" else "[" * 100_000)
    report, said = run(place, tmp_path / "store", **options)
    assert said[0].startswith("starting over")
    assert reason in said[0]
    assert reason in report.started_over
    run(place, tmp_path / "straight", **options)
    assert contents(tmp_path / "store") == contents(tmp_path / "straight")
    assert report.resumed_rows == 0 and report.rows_in == 200


def test_a_run_that_allows_more_broken_rows_continues(place, tmp_path):
    (tmp_path / "in").mkdir()
    for number in range(6):
        write_jsonl(tmp_path / "in" / f"{number}.jsonl", rows(20, 20 * number))
    with (tmp_path / "in" / "4.jsonl").open("a") as file:
        file.write("{broken\n")
    where = type("Place", (), {"__truediv__": lambda self, name: (tmp_path if name == "in" else place) / name})()
    with pytest.raises(BadData, match="4.jsonl, line 21"):
        run(where, tmp_path / "store")
    assert not (tmp_path / "store").exists()
    report, said = run(where, tmp_path / "store", max_bad=0.5)
    assert said[0].startswith("continuing after 60 rows")
    assert (report.rows_in, report.rows_out, report.dropped["broken"]) == (121, 120, 1)


def test_broken_rows_before_the_interruption_still_count(place, tmp_path):
    (tmp_path / "in").mkdir()
    for number in range(4):
        path = tmp_path / "in" / f"{number}.jsonl"
        write_jsonl(path, rows(30, 30 * number))
        with path.open("a") as file:
            file.write("{broken\n" if number == 0 else "")
    where = type("Place", (), {"__truediv__": lambda self, name: (tmp_path if name == "in" else place) / name})()

    def stop(phrase):
        if phrase.startswith("tokenized 91"):
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        tokenize(
            [str(tmp_path / "in")], tokenizer=place / "tokenizer", output=tmp_path / "store",
            options=TokenizeOptions(file_rows=50, max_bad=0.1), progress=stop,
        )  # fmt: skip
    with pytest.raises(
        BadData, match="1 of 121 rows are broken, more than max_bad=0.001 allows. Try: .*0.jsonl, line 31"
    ):
        run(where, tmp_path / "store", max_bad=0.001)
    report, _ = run(where, tmp_path / "store", max_bad=0.1)
    assert report.resumed_rows == 120
    assert report.dropped["broken"] == 1
    assert "0.jsonl, line 31" in report.first_broken


def test_an_existing_store_is_refused_and_replaced_only_on_demand(place, tmp_path):
    run(place, tmp_path / "store")
    before = contents(tmp_path / "store")
    with pytest.raises(BadOption, match="is an existing token store. Try: another folder, or overwrite=True"):
        run(place, tmp_path / "store", max_tokens=(30,))
    assert contents(tmp_path / "store") == before
    run(place, tmp_path / "store", max_tokens=(30,), overwrite=True)
    assert Store.open(tmp_path / "store").meta.max_tokens == {"prompt": 30, "response": 30}
    assert [path.name for path in tmp_path.iterdir()] == ["store"]


def test_the_old_store_stays_when_replacing_it_fails(place, tmp_path):
    run(place, tmp_path / "store")
    before = contents(tmp_path / "store")
    with pytest.raises(BadOption, match="too small"):
        run(place, tmp_path / "store", overwrite=True, host_limit_bytes=64 * 2**20)
    assert contents(tmp_path / "store") == before


def test_a_link_to_a_store_stays_a_link(place, tmp_path):
    run(place, tmp_path / "store")
    (tmp_path / "link").symlink_to("store")
    run(place, tmp_path / "link", overwrite=True, max_tokens=(30,))
    assert (tmp_path / "link").is_symlink()
    assert Store.open(tmp_path / "store").meta.max_tokens == {"prompt": 30, "response": 30}


def test_an_empty_folder_and_a_missing_parent_will_do(place, tmp_path):
    (tmp_path / "empty").mkdir()
    run(place, tmp_path / "empty")
    run(place, tmp_path / "a" / "b" / "store")
    assert len(Store.open(tmp_path / "empty")) == len(Store.open(tmp_path / "a" / "b" / "store")) == 190


def test_an_output_among_the_rows_is_refused(place):
    with pytest.raises(BadOption, match="is inside .*, whose files are read"):
        run(place, place / "in" / "store")


def test_an_output_that_cannot_be_made_is_one_sentence(place, tmp_path):
    (tmp_path / "file").write_text("x")
    with pytest.raises(BadData, match="Not a directory"):
        run(place, tmp_path / "file" / "store")


def test_a_second_run_in_the_same_place_is_refused_and_harms_nothing(place, tmp_path):
    part = tmp_path / ".store.part"
    part.mkdir()
    (part / "tokens-00000.arrow").write_text("of the first")
    held = os.open(part, os.O_RDONLY)
    fcntl.flock(held, fcntl.LOCK_EX)
    try:
        with pytest.raises(BadOption, match="is being written by another process"):
            run(place, tmp_path / "store")
        assert (part / "tokens-00000.arrow").read_text() == "of the first"
    finally:
        os.close(held)
    run(place, tmp_path / "store")


def test_nothing_of_the_making_stays_in_the_store(place, tmp_path):
    run(place, tmp_path / "store")
    assert not any("progress" in name or "part" in name for name in contents(tmp_path / "store"))


def test_letters_of_special_tokens_are_noted_unless_the_tokenizer_says_so(tmp_path, tokenizer):
    content = [
        {"prompt": "a", "response": "b"},
        {"prompt": "", "response": "b"},
        {"prompt": "a", "response": "b[EOS]"},
        {"prompt": "[UNK]", "response": "b"},
    ]
    report, store = tokenized(tmp_path, content, tokenizer)
    assert report.notes == {"special tokens read as letters": RowNotes(2, f"{tmp_path / 'rows.jsonl'}, line 3: [EOS]")}
    assert all((row["response"] == 1).sum() == 1 for row in store)
    split = shutil.copytree(tokenizer, tmp_path / "split")
    config = json.loads((split / "tokenizer_config.json").read_text())
    (split / "tokenizer_config.json").write_text(json.dumps({**config, "split_special_tokens": True}))
    shutil.rmtree(tmp_path / "store")
    assert not tokenized(tmp_path, content, split)[0].notes
