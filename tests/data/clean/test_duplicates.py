"""Duplicates: the first row stays, whatever the threads, the memory and the interruptions; sketches as similar as texts."""

import os
import random
import signal
import sys
import threading

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from brimful.data.clean import duplicates
from brimful.data.clean.duplicates import (
    EXACT,
    GRAM,
    HASHES,
    NEAR,
    RECALL,
    DroppedRows,
    DuplicateSearch,
    band_size,
    connect,
    join_fields,
    need_duckdb,
    run_query,
    similarities,
    sketch,
)
from brimful.errors import MissingExtra

BANDS = 16


def hashed_rows(folder, rows, *, seed=0, parts=3):
    """Random sketches, some of them copies or close to copies, as segments leave them."""
    draw = np.random.default_rng(seed)
    signatures = draw.integers(0, 256, (rows, HASHES), dtype=np.uint8)
    for row in range(1, rows):
        if draw.random() < 0.5:
            signatures[row] = signatures[draw.integers(row)]
            changed = draw.integers(0, HASHES, draw.integers(0, 40))
            signatures[row, changed] = draw.integers(0, 256, len(changed))
    bands = signatures.reshape(rows, BANDS, -1).astype(np.uint64) @ (np.uint64(257) ** np.arange(8, dtype=np.uint64))
    digests = np.unique(signatures, axis=0, return_inverse=True)[1].reshape(-1).astype(np.uint64)
    (folder / "signatures").write_bytes(signatures.tobytes())
    hash_files = []
    for part, rows_of_part in enumerate(np.array_split(np.arange(rows), parts)):
        columns = {
            "row_id": rows_of_part,
            "file": rows_of_part * 0,
            "line": rows_of_part + 1,
            "digest_0": digests[rows_of_part],
            "digest_1": digests[rows_of_part],
        }
        columns |= {f"band_{band}": bands[rows_of_part, band] for band in range(BANDS)}
        hash_files.append(folder / f"{part}.hash_files")
        pq.write_table(pa.table(columns), hash_files[-1])
    return signatures, digests, bands, hash_files


def expected(signatures, digests, bands, near):
    """The definition, row by row."""
    dropped = np.zeros(len(signatures), dtype=np.uint8)
    firsts = [{} for _ in range(BANDS + 1)]
    for row in range(len(signatures)):
        if firsts[BANDS].setdefault(digests[row], row) != row:
            dropped[row] = EXACT
        for band in range(BANDS):
            earlier = firsts[band].setdefault(bands[row, band], row)
            if (
                earlier != row
                and not dropped[row]
                and similarities(signatures[[row]], signatures[[earlier]])[0] >= near
            ):
                dropped[row] = NEAR
    return dropped


def search(folder, hash_files, rows, *, threads=2, memory_bytes=64 * 2**20):
    return DuplicateSearch(
        folder / "dedup", hash_files, folder / "signatures", rows=rows, memory_bytes=memory_bytes, threads=threads
    )


@settings(max_examples=5, suppress_health_check=[HealthCheck.too_slow], deadline=None)
@given(
    rows=st.integers(1, 300), near=st.sampled_from([0.7, 0.85, 1.0]), threads=st.integers(1, 3), parts=st.integers(1, 4)
)
def test_what_is_dropped_is_what_the_definition_says(tmp_path_factory, rows, near, threads, parts):
    folder = tmp_path_factory.mktemp("hash_files")
    signatures, digests, bands, hash_files = hashed_rows(folder, rows, seed=rows, parts=parts)
    found = search(folder, hash_files, rows, threads=threads).run(near=near, bands=BANDS, progress=lambda phrase: None)
    assert np.array_equal(found.reasons, expected(signatures, digests, bands, near))


def test_an_interrupted_search_finds_the_same(tmp_path):
    signatures, digests, bands, hash_files = hashed_rows(tmp_path, 400)

    def stop_at(phrase):
        if "band 5" in phrase:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        search(tmp_path, hash_files, 400).run(near=0.85, bands=BANDS, progress=stop_at)
    messages = []
    found = search(tmp_path, hash_files, 400).run(near=0.85, bands=BANDS, progress=messages.append)
    assert messages[0].endswith("band 5 of 16")
    assert np.array_equal(found.reasons, expected(signatures, digests, bands, 0.85))
    (tmp_path / "again").mkdir()
    _, _, _, hash_files = hashed_rows(tmp_path / "again", 400)
    whole = search(tmp_path / "again", hash_files, 400).run(near=0.85, bands=BANDS, progress=messages.append)
    assert found.examples == whole.examples


def test_the_first_pairs_are_remembered_with_their_similarity(tmp_path):
    signatures, _, _, hash_files = hashed_rows(tmp_path, 400)
    found = search(tmp_path, hash_files, 400).run(near=0.85, bands=BANDS, progress=lambda phrase: None)
    assert [row for row, _, _ in found.examples[NEAR]] == np.flatnonzero(found.reasons == NEAR)[:3].tolist()
    assert [row for row, _, _ in found.examples[EXACT]] == np.flatnonzero(found.reasons == EXACT)[:3].tolist()
    for row, earlier, similarity in found.examples[NEAR]:
        assert earlier < row
        assert similarity == similarities(signatures[[row]], signatures[[earlier]])[0] >= 0.85


def test_exact_duplicates_alone_need_no_bands(tmp_path):
    _, digests, _, hash_files = hashed_rows(tmp_path, 200)
    found = search(tmp_path, hash_files, 200).run(near=None, bands=0, progress=lambda phrase: None)
    assert np.count_nonzero(found.reasons == EXACT) == 200 - len(set(digests))
    assert not (found.reasons == NEAR).any()


def test_a_similarity_of_exactly_the_threshold_is_near(tmp_path):
    signatures, _, _, hash_files = hashed_rows(tmp_path, 30)
    (tmp_path / "signatures").write_bytes((signatures * 0).tobytes())
    same = [f"band_{band}" for band in range(BANDS)]
    for path in hash_files:
        table = pq.read_table(path)
        columns = {name: table[name].to_numpy() * (name not in same) for name in table.column_names}
        pq.write_table(pa.table(columns | {"digest_0": columns["row_id"].astype(np.uint64)}), path)
    found = search(tmp_path, hash_files, 30).run(near=1.0, bands=BANDS, progress=lambda phrase: None)
    assert found.reasons.tolist() == [0] + [NEAR] * 29


def test_a_row_is_found_in_its_file(tmp_path):
    _, _, _, hash_files = hashed_rows(tmp_path, 50)
    assert search(tmp_path, hash_files, 50).places([7, 49]) == {7: (0, 8), 49: (0, 50)}
    assert search(tmp_path, hash_files, 50).places([]) == {}


def test_a_folder_with_a_strange_name_is_no_pattern(tmp_path):
    folder = tmp_path / "o'neil [1]*"
    folder.mkdir()
    signatures, digests, bands, hash_files = hashed_rows(folder, 60)
    found = search(folder, hash_files, 60).run(near=0.85, bands=BANDS, progress=lambda phrase: None)
    assert np.array_equal(found.reasons, expected(signatures, digests, bands, 0.85))


def test_a_search_leaves_no_pairs_behind(tmp_path):
    _, _, _, hash_files = hashed_rows(tmp_path, 50)
    search(tmp_path, hash_files, 50).run(near=0.85, bands=BANDS, progress=lambda phrase: None)
    assert sorted(path.name for path in (tmp_path / "dedup").iterdir() if path.is_file()) == [
        "dropped-017",
        "dropped.json",
    ]


def test_saved_bytes_without_their_line_do_not_count(tmp_path):
    found = DroppedRows(reasons=np.zeros(4, dtype=np.uint8), steps=1)
    found.save(tmp_path)
    (tmp_path / "dropped-002").write_bytes(bytes([9, 9]))  # killed before dropped.json was replaced
    assert DroppedRows.load(tmp_path, 4).reasons.tolist() == [0, 0, 0, 0]


def test_ctrl_c_in_a_query_is_ctrl_c(tmp_path):
    connection = connect(tmp_path / "spill", memory_bytes=64 * 2**20, threads=1)
    press = threading.Timer(0.3, os.kill, (os.getpid(), signal.SIGINT))
    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # a job in the background has it ignored
    try:
        press.start()
        with pytest.raises(KeyboardInterrupt):
            run_query(connection, "SELECT sum(one.range * two.range) FROM range(1000000) one, range(1000000) two")
        press.join()
    finally:
        signal.signal(signal.SIGINT, before)


def test_without_duckdb_the_command_that_installs_it_is_told(monkeypatch):
    monkeypatch.setitem(sys.modules, "duckdb", None)
    with pytest.raises(MissingExtra, match=r"pip install 'brimful\[data\]'"):
        need_duckdb()


# ── Sketches ──────────────────────────────────────────────────────────────────────────────────────────────────────────

TEXTS = st.lists(st.text("ab中文🙂", min_size=1, max_size=40), min_size=1, max_size=12)


def sketched(texts, size=8):
    return sketch(join_fields([pa.array(texts, pa.string())]), size=size)


def jaccard(one, other):
    grams = [
        {(text + "\x1f" * (GRAM - 1))[place : place + GRAM] for place in range(len(text))} for text in (one, other)
    ]
    return len(grams[0] & grams[1]) / len(grams[0] | grams[1])


def edited_pairs(length, count=300):
    draw = random.Random(length)
    letter = lambda: chr(draw.randrange(0x4E00, 0x9FA0))  # noqa: E731
    pairs = []
    for _ in range(count):
        one = [letter() for _ in range(length)]
        other = list(one)
        for _ in range(draw.randrange(1 + length // 10)):
            other[draw.randrange(length)] = letter()
        pairs.append(("".join(one), "".join(other)))
    return pairs


@pytest.mark.parametrize("length", [10, 40, 200, 1500])
def test_sketches_are_as_similar_as_the_texts(length):
    pairs = edited_pairs(length, 300 if length < 1000 else 150)
    estimate = similarities(*[sketched(side).signatures for side in zip(*pairs, strict=True)])
    error = estimate - np.array([jaccard(*pair) for pair in pairs])
    assert abs(error.mean()) < 0.012
    assert np.sqrt((error**2).mean()) < 0.055  # 128 independent hashes would give 0.044 at one half


def test_texts_without_a_common_gram_are_not_similar():
    ones, others = zip(*[(pair[0][:100], pair[0][100:]) for pair in edited_pairs(200)], strict=True)
    assert similarities(sketched(ones).signatures, sketched(others).signatures).mean() < 0.003  # 0.0039 agree by chance


def test_equal_texts_are_identical():
    signatures = sketched(["今天天气很好", "x"]).signatures
    assert similarities(signatures, signatures).tolist() == [1.0, 1.0]


@settings(max_examples=30)
@given(TEXTS, st.integers(0, 11))
def test_a_sketch_does_not_depend_on_the_neighbours(texts, place):
    text = texts[place % len(texts)]
    together, alone = sketched(texts), sketched([text])
    assert np.array_equal(together.signatures[place % len(texts)], alone.signatures[0])
    assert np.array_equal(together.bands[:, place % len(texts)], alone.bands[:, 0])


@settings(max_examples=30)
@given(TEXTS)
def test_a_sketch_does_not_depend_on_the_blocks(texts):
    whole = sketched(texts)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(duplicates, "_BLOCK", 5)
        blocks = sketched(texts)
    assert np.array_equal(whole.signatures, blocks.signatures) and np.array_equal(whole.bands, blocks.bands)


def test_a_slice_of_an_array_is_sketched_as_itself():
    joined = join_fields([pa.array(["早上好", "x", "🙂 晚上好", "y"])])
    sliced = sketch(joined.slice(1, 2), size=8)
    assert np.array_equal(sliced.signatures, sketch(joined, size=8).signatures[1:3])


def test_even_one_character_has_a_sketch_of_its_own():
    signatures = sketched(["a", "b", "a"]).signatures
    assert np.array_equal(signatures[0], signatures[2]) and not np.array_equal(signatures[0], signatures[1])


def test_what_moves_from_one_side_to_the_other_makes_another_row():
    joined = join_fields([pa.array(["ab", "a"]), pa.array(["c", "bc"])]).to_pylist()
    assert joined[0] != joined[1]


@pytest.mark.parametrize("near", [0.5, 0.6, 0.7, 0.8, 0.85, 0.9, 0.95, 1.0])
def test_bands_find_nearly_all_pairs_at_the_threshold_and_are_as_few_as_that_allows(near):
    found = lambda rows: 1 - (1 - near**rows) ** (HASHES // rows)  # noqa: E731
    rows = band_size(near)
    assert found(rows) >= RECALL
    assert rows == 16 or found(rows + 1) < RECALL


def test_rows_share_a_band_where_its_numbers_agree():
    pairs = edited_pairs(200)
    ones, others = [sketched(side) for side in zip(*pairs, strict=True)]
    same_numbers = (ones.signatures == others.signatures).reshape(len(pairs), 16, 8).all(axis=2)
    same_band = (ones.bands == others.bands).T
    assert same_band.any() and not same_band.all()
    assert not (same_band & ~same_numbers).any()
    assert (same_band != same_numbers).mean() < 0.01  # numbers of which only the low bytes agree


def test_there_are_as_many_bands_as_the_numbers_allow():
    assert sketched(["一二三四五"], size=7).bands.shape == (18, 1)
