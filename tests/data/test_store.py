"""The token store: what is read is what was written, whatever happened to the files in between is told."""

import pickle
import subprocess
import sys

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from brimful import files
from brimful.data.store import LONGEST_SPAN, NAME, SPANS, Store, StoreWriter, column_numbers, spans_of, trained
from brimful.errors import BadData, InternalError

FACTS = {
    "max_tokens": {"prompt": 64, "response": 64}, "eos_id": 1, "pad_id": 0, "tokenizer_fingerprint": "abc",
    "dropped": {}, "truncated": {},
}  # fmt: skip


def write(folder, rows=25, *, fields=("prompt", "response"), vocab_size=1000, file_rows=10, chunk=4, seed=0):
    """A store of random rows, and the rows."""
    rng = np.random.default_rng(seed)
    wanted = [[rng.integers(0, vocab_size, rng.integers(1, 9)) for _ in fields] for _ in range(rows)]
    tokenizer = folder.parent / f"{folder.name}-tokenizer"
    tokenizer.mkdir()
    (tokenizer / "tokenizer.json").write_text("{}")
    (tokenizer / "model.safetensors").write_text("weights stay where they are")
    writer = StoreWriter(folder, fields, vocab_size, file_rows=file_rows)
    for first in range(0, rows, chunk):
        part = wanted[first : first + chunk]
        lengths = np.array([[len(field) for field in row] for row in part])
        writer.add(np.concatenate([field for row in part for field in row]), lengths)
    meta = writer.finish(tokenizer=tokenizer, rows_in=rows, **FACTS)
    return meta, wanted


def same(row, wanted):
    return all(np.array_equal(field, tokens) for field, tokens in zip(row.values(), wanted, strict=True))


def flip(path, place=-100):
    content = bytearray(path.read_bytes())
    content[place] ^= 1
    path.write_bytes(content)


@pytest.mark.parametrize("fields", [("text",), ("prompt", "response"), ("prompt", "chosen", "rejected")], ids=len)
def test_rows_come_back_as_they_were_written(tmp_path, fields):
    _, wanted = write(tmp_path / "s", fields=fields)
    store = Store.open(tmp_path / "s")
    assert store.fields == fields
    assert len(store) == 25
    assert all(tuple(store[n]) == fields and same(store[n], row) for n, row in enumerate(wanted))


def test_many_rows_at_once_are_the_same_rows_in_the_order_asked_for(tmp_path):
    _, wanted = write(tmp_path / "s", fields=("a", "b", "c"))
    indices = np.random.default_rng(1).integers(-25, 25, 200)
    rows = Store.open(tmp_path / "s").__getitems__(indices)
    assert all(same(row, wanted[index]) for row, index in zip(rows, indices, strict=True))


def test_many_rows_of_one_file_are_the_same_rows(tmp_path):
    _, wanted = write(tmp_path / "s", file_rows=1000)
    assert all(
        same(*pair)
        for pair in zip(
            Store.open(tmp_path / "s").__getitems__([7, 3, 3, 0]), [wanted[n] for n in (7, 3, 3, 0)], strict=True
        )
    )


def test_a_new_file_begins_at_the_row_limit(tmp_path):
    meta, _ = write(tmp_path / "s", rows=25, file_rows=10, chunk=4)
    assert [one.rows for one in meta.files] == [12, 12, 12, 12, 1, 1, 0]
    assert sorted(path.name for path in (tmp_path / "s").iterdir()) == [
        "index-00000.arrow", "index-00001.arrow", "index-00002.arrow", "store.json", "tokenizer",
        "tokens-00000.arrow", "tokens-00001.arrow", "tokens-00002.arrow",
    ]  # fmt: skip


def test_a_new_file_begins_at_the_token_limit(tmp_path):
    writer = StoreWriter(tmp_path, ("text",), 9, file_tokens=10)
    assert not writer.add(np.ones(9, int), np.array([[9]]))
    assert writer.add(np.ones(1, int), np.array([[1]]))


def test_record_batches_stay_small(tmp_path):
    writer = StoreWriter(tmp_path, ("text",), 9)
    writer.add(np.arange(20_000) % 9, np.ones((20_000, 1), int))
    writer.seal()
    reader = pa.ipc.open_file(tmp_path / "tokens-00000.arrow")
    assert [reader.get_batch(n).num_rows for n in range(reader.num_record_batches)] == [8192, 8192, 3616]
    index = pa.ipc.open_file(tmp_path / "index-00000.arrow").read_all()["start"].to_numpy()
    tokens = np.fromfile(
        tmp_path / "tokens-00000.arrow", "uint16", count=(tmp_path / "tokens-00000.arrow").stat().st_size // 2
    )
    assert np.array_equal(tokens[index], np.arange(20_000) % 9)


def test_negative_indices_count_from_the_end_and_others_are_refused(tmp_path):
    _, wanted = write(tmp_path / "s")
    store = Store.open(tmp_path / "s")
    assert same(store[-1], wanted[24])
    assert same(store[np.int32(-25)], wanted[0])
    for index in (25, -26):
        with pytest.raises(IndexError, match=f"row {index} of a store of 25 rows"):
            store[index]
        with pytest.raises(IndexError, match=f"row {index} of a store of 25 rows"):
            store.__getitems__([0, index])
    with pytest.raises(TypeError):
        store[1.0]
    with pytest.raises(TypeError):
        store.__getitems__(np.array([1.0]))
    assert store.__getitems__([]) == []


def test_shapes_are_the_lengths_of_each_side(tmp_path):
    _, wanted = write(tmp_path / "s")
    store = Store.open(tmp_path / "s")
    lengths = np.array([[len(field) for field in row] for row in wanted])
    shapes = store.shapes([3, -1, 12, 3])
    assert shapes.dtype == np.int64
    assert np.array_equal(shapes, lengths[[3, -1, 12, 3]])
    assert store.longest == tuple(lengths.max(axis=0))
    assert store.mean_lengths == pytest.approx(lengths.mean(axis=0))
    assert store.meta.tokens == dict(zip(store.fields, lengths.sum(axis=0).tolist(), strict=True))


def test_a_row_is_a_read_only_view_of_the_file(tmp_path):
    write(tmp_path / "s")
    store = Store.open(tmp_path / "s")
    row = store[3]["response"]
    assert row.dtype == np.uint16
    assert np.shares_memory(row, store._tokens[0])
    assert np.shares_memory(store.__getitems__([3])[0]["response"], row)
    with pytest.raises(ValueError, match="read-only"):
        row[0] = 1


def test_a_view_outlives_its_store(tmp_path):
    _, wanted = write(tmp_path / "s")
    row = Store.open(tmp_path / "s")[5]
    assert same(row, wanted[5])


def test_pyarrow_alone_can_read_it(tmp_path):
    _, wanted = write(tmp_path / "s", file_rows=1000)
    tokens = pa.ipc.open_file(pa.memory_map(str(tmp_path / "s" / "tokens-00000.arrow"))).read_all()["tokens"]
    lengths = pa.ipc.open_file(pa.memory_map(str(tmp_path / "s" / "index-00000.arrow"))).read_all()
    assert tokens.type == pa.list_(pa.uint16())
    assert lengths.column_names == ["start", "prompt", "response"]
    prompt = tokens[7].values[: lengths["prompt"][7].as_py()]
    assert prompt.to_pylist() == wanted[7][0].tolist()


def test_a_large_vocabulary_takes_four_bytes_a_token(tmp_path):
    _, wanted = write(tmp_path / "s", vocab_size=200_000)
    store = Store.open(tmp_path / "s")
    assert store.meta.dtype == "int32"
    assert all(same(store[n], row) for n, row in enumerate(wanted))


def test_two_bytes_hold_65536_ids(tmp_path):
    writer = StoreWriter(tmp_path, ("text",), 65_536)
    writer.add(np.array([65_535]), np.array([[1]]))
    writer.finish(tokenizer=None, rows_in=1, **FACTS)
    store = Store.open(tmp_path)
    assert store.meta.dtype == "uint16"
    assert store[0]["text"].tolist() == [65_535]


def test_a_slice_of_a_column_is_read_from_where_it_begins():
    assert column_numbers(pa.array([1, 2, 3, 4], pa.int32()).slice(1, 2)).tolist() == [2, 3]


def test_opening_takes_no_memory_of_its_own(tmp_path):
    writer = StoreWriter(tmp_path, ("prompt", "response"), 9)
    for _ in range(5):
        writer.add(np.ones(400_000, np.uint16), np.ones((200_000, 2), np.int32))
    writer.finish(tokenizer=None, rows_in=1_000_000, **FACTS)
    script = (
        "import os, numpy as np; from brimful.data.store import Store; from brimful.machine.host import process_bytes\n"
        f"b = process_bytes(os.getpid()); s = Store.open({str(tmp_path)!r}, verify=False)\n"
        "rows = s.__getitems__(np.arange(0, len(s), 500)); print(process_bytes(os.getpid()) - b)"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    index_bytes = (tmp_path / "index-00000.arrow").stat().st_size
    assert index_bytes > 15e6
    assert int(done.stdout) < 3e6


def test_it_pickles_as_its_path(tmp_path, monkeypatch):
    _, wanted = write(tmp_path / "s")
    monkeypatch.chdir(tmp_path)
    pickled = pickle.dumps(Store.open("s"))
    assert len(pickled) < 300
    monkeypatch.chdir("/")
    assert same(pickle.loads(pickled)[20], wanted[20])


def test_a_pickled_store_does_not_open_as_another(tmp_path):
    write(tmp_path / "s")
    write(tmp_path / "t", seed=5)
    pickled = pickle.dumps(Store.open(tmp_path / "s"))
    (tmp_path / "s").rename(tmp_path / "old")
    (tmp_path / "t").rename(tmp_path / "s")
    with pytest.raises(BadData, match="was replaced by another store"):
        pickle.loads(pickled)


def test_the_fingerprint_changes_with_the_content_and_with_nothing_else(tmp_path):
    one, other, same_again = (write(tmp_path / name, seed=seed)[0] for name, seed in (("a", 0), ("b", 1), ("c", 0)))
    assert one.fingerprint == same_again.fingerprint != other.fingerprint
    assert Store.open(tmp_path / "a").fingerprint == one.fingerprint


def test_only_the_tokenizer_is_copied(tmp_path):
    write(tmp_path / "s")
    assert [path.name for path in (tmp_path / "s" / "tokenizer").iterdir()] == ["tokenizer.json"]


def test_the_writer_refuses_what_the_vocabulary_does_not_have(tmp_path):
    writer = StoreWriter(tmp_path, ("text",), 10)
    with pytest.raises(InternalError, match="token 10 is outside"):
        writer.add(np.array([9, 10]), np.array([[2]]))
    with pytest.raises(InternalError, match="outside"):
        writer.add(np.array([-1, 3]), np.array([[2]]))
    with pytest.raises(InternalError, match="do not match"):
        writer.add(np.array([1, 2, 3]), np.array([[2]]))
    with pytest.raises(InternalError, match="do not match"):
        writer.add(np.array([1, 2]), np.array([[1, 1]]))


@pytest.mark.parametrize("name", ["tokens-00001.arrow", "index-00000.arrow", "tokenizer/tokenizer.json", NAME])
def test_a_flipped_byte_is_reported_with_its_file(tmp_path, name):
    write(tmp_path / "s")
    flip(tmp_path / "s" / name, -1 if "tokenizer" in name else -100)
    with pytest.raises(BadData, match=f"{name}.*(damaged|checksum|cannot be read)"):
        Store.open(tmp_path / "s")


def test_a_flipped_byte_is_reported_with_its_block(tmp_path, monkeypatch):
    monkeypatch.setattr(files, "BLOCK_BYTES", 1000)
    monkeypatch.setattr(files, "_PIECE_BYTES", 300)
    meta, _ = write(tmp_path / "s", file_rows=1000, rows=100)
    assert len(meta.files[0].sha256) == -(-meta.files[0].size_bytes // 1000)
    Store.open(tmp_path / "s")
    flip(tmp_path / "s" / "tokens-00000.arrow", 2100)
    with pytest.raises(BadData, match="damaged between bytes 2,000 and"):
        Store.open(tmp_path / "s")


def test_without_verifying_only_the_sizes_are_looked_at(tmp_path):
    write(tmp_path / "s")
    flip(tmp_path / "s" / "tokens-00000.arrow")
    Store.open(tmp_path / "s", verify=False)
    path = tmp_path / "s" / "tokens-00002.arrow"
    path.write_bytes(path.read_bytes()[:-8])
    with pytest.raises(BadData, match="tokens-00002.arrow is truncated: .* bytes instead of"):
        Store.open(tmp_path / "s", verify=False)


def test_a_missing_file_is_named(tmp_path):
    write(tmp_path / "s")
    (tmp_path / "s" / "index-00001.arrow").unlink()
    with pytest.raises(BadData, match="index-00001.arrow is missing"):
        Store.open(tmp_path / "s", verify=False)


def test_another_version_is_refused(tmp_path):
    write(tmp_path / "s")
    path = tmp_path / "s" / NAME
    path.write_text(path.read_text().replace('"version": 2', '"version": 1'))
    with pytest.raises(BadData, match="format version 1, and this Brimful reads version 2"):
        Store.open(tmp_path / "s")


@pytest.mark.parametrize("content", ["", "[]", "{}", '{"version": 2}', "null", "[" * 100_000])
def test_a_bad_store_json_is_reported(tmp_path, content):
    (tmp_path / NAME).write_text(content)
    with pytest.raises(BadData, match=NAME):
        Store.open(tmp_path)


def test_a_path_that_is_not_a_store_is_named_for_what_it_is(tmp_path):
    pq.write_table(pa.table({"prompt": ["a"]}), tmp_path / "rows.parquet")
    (tmp_path / "tokenizer").mkdir()
    (tmp_path / "tokenizer" / "tokenizer.json").write_text("{}")
    (tmp_path / "half").mkdir()
    (tmp_path / "half" / "tokens-00000.arrow").write_text("")
    (tmp_path / "empty").mkdir()
    messages = {
        "rows.parquet": "is a parquet file, not a token store. Try: `brimful data tokenize`",
        "tokenizer": "is a tokenizer, not a token store",
        "half": "unfinished",
        "empty": "it has no store.json",
        "nothing": "there is no token store at",
        ".": "folder of parquet files",
    }
    for name, sentence in messages.items():
        with pytest.raises(BadData, match=sentence):
            Store.open(tmp_path / name)


# ── Spans ─────────────────────────────────────────────────────────────────────────────────────────────────────────────


def write_causal(folder, masks, vocab_size=10):
    """A store of rows with tokens of 7 and these masks."""
    writer = StoreWriter(folder, ("tokens", SPANS), vocab_size)
    spans = [spans_of(mask) for mask in masks]
    numbers = [part for mask, runs in zip(masks, spans, strict=True) for part in (np.full(len(mask), 7), runs)]
    writer.add(
        np.concatenate(numbers), np.array([[len(mask), len(runs)] for mask, runs in zip(masks, spans, strict=True)])
    )
    writer.finish(tokenizer=None, rows_in=len(masks), **{**FACTS, "max_tokens": {"tokens": 100_000}})
    return Store.open(folder)


@pytest.mark.parametrize(
    ("mask", "spans"),
    [
        ("0011100", [2, 3]),
        ("1", [0, 1]),
        ("1101", [0, 2, 1, 1]),
        ("0001", [3, 1]),
        ("000", []),
        ("", []),
    ],
)
def test_spans_are_run_lengths_that_begin_with_untrained(mask, spans):
    flags = [flag == "1" for flag in mask]
    assert spans_of(flags).tolist() == spans
    assert trained(spans, len(flags)).tolist() == flags


@pytest.mark.parametrize(
    "runs", [[70_000, 5], [0, 140_000, 3, 1], [LONGEST_SPAN, LONGEST_SPAN + 1], [2 * LONGEST_SPAN, 1]]
)
def test_long_runs_fit_two_bytes(runs):
    mask = np.repeat(np.arange(len(runs)) % 2 == 1, runs)
    spans = spans_of(mask)
    assert int(spans.max()) <= LONGEST_SPAN
    assert np.array_equal(trained(spans.astype(np.uint16), len(mask)), mask)


def test_random_masks_come_back():
    rng = np.random.default_rng(0)
    for _ in range(200):
        mask = np.repeat(rng.random(9) < 0.5, rng.integers(0, 6, 9))
        assert np.array_equal(trained(spans_of(mask), len(mask)), mask)


def test_spans_longer_than_their_row_are_refused():
    with pytest.raises(ValueError, match="spans of 5 tokens for a row of 4"):
        trained([2, 3], 4)


def test_spans_come_back_with_their_row_and_are_no_length_of_it(tmp_path):
    masks = [np.repeat([False, True, False], [length, 3, 2]) for length in (1, 70_000, 40)]
    store = write_causal(tmp_path / "s", masks)
    assert store.meta.dtype == "uint16"
    for row, mask in zip(store.__getitems__([0, 1, 2]), masks, strict=True):
        assert np.array_equal(trained(row["spans"], len(row["tokens"])), mask)
        assert set(row["tokens"].tolist()) == {7}
    assert store.fields == ("tokens", "spans")
    assert store.length_fields == ("tokens",)
    assert store.shapes([2, 0]).tolist() == [[45], [6]]
    assert store.longest == (70_005,)
    assert store.mean_lengths == (sum(map(len, masks)) / 3,)


def test_a_row_without_trained_tokens_has_empty_spans(tmp_path):
    store = write_causal(tmp_path / "s", [[False] * 4, [True] * 2])
    assert [row["spans"].tolist() for row in store] == [[], [0, 2]]


def test_a_run_may_be_longer_than_the_vocabulary_but_a_token_may_not(tmp_path):
    write_causal(tmp_path / "s", [[False] * 50 + [True]])
    with pytest.raises(InternalError, match="token 7 is outside the vocabulary of 7"):
        write_causal(tmp_path / "t", [[True] * 3], vocab_size=7)


def test_other_spans_are_another_store(tmp_path):
    stores = [write_causal(tmp_path / name, [mask]) for name, mask in (("a", [True, False]), ("b", [False, True]))]
    assert stores[0].fingerprint != stores[1].fingerprint
