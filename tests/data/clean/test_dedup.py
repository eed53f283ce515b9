"""Duplicates: the first row stays, whatever the threads, the memory and the interruptions."""

import os
import signal
import sys
import threading

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from brimful.data.clean.dedup import EXACT, NEAR, Dedup, Found, connect, need_duckdb, run
from brimful.data.clean.similarity import HASHES, alike
from brimful.errors import MissingExtra

BANDS = 16


def marked(folder, rows, *, seed=0, parts=3):
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
    marks = []
    for part, slots in enumerate(np.array_split(np.arange(rows), parts)):
        columns = {
            "slot": slots,
            "file": slots * 0,
            "line": slots + 1,
            "digest_0": digests[slots],
            "digest_1": digests[slots],
        }
        columns |= {f"band_{band}": bands[slots, band] for band in range(BANDS)}
        marks.append(folder / f"{part}.marks")
        pq.write_table(pa.table(columns), marks[-1])
    return signatures, digests, bands, marks


def expected(signatures, digests, bands, near):
    """The definition, row by row."""
    dropped = np.zeros(len(signatures), dtype=np.uint8)
    firsts = [{} for _ in range(BANDS + 1)]
    for row in range(len(signatures)):
        if firsts[BANDS].setdefault(digests[row], row) != row:
            dropped[row] = EXACT
        for band in range(BANDS):
            head = firsts[band].setdefault(bands[row, band], row)
            if head != row and not dropped[row] and alike(signatures[[row]], signatures[[head]])[0] >= near:
                dropped[row] = NEAR
    return dropped


def dedup(folder, marks, rows, *, threads=2, memory_bytes=64 * 2**20):
    return Dedup(folder / "dedup", marks, folder / "signatures", rows=rows, memory_bytes=memory_bytes, threads=threads)


@settings(max_examples=5, suppress_health_check=[HealthCheck.too_slow], deadline=None)
@given(
    rows=st.integers(1, 300), near=st.sampled_from([0.7, 0.85, 1.0]), threads=st.integers(1, 3), parts=st.integers(1, 4)
)
def test_what_is_dropped_is_what_the_definition_says(tmp_path_factory, rows, near, threads, parts):
    folder = tmp_path_factory.mktemp("marks")
    signatures, digests, bands, marks = marked(folder, rows, seed=rows, parts=parts)
    found = dedup(folder, marks, rows, threads=threads).run(near=near, bands=BANDS, progress=lambda phrase: None)
    assert np.array_equal(found.dropped, expected(signatures, digests, bands, near))


def test_an_interrupted_search_finds_the_same(tmp_path):
    signatures, digests, bands, marks = marked(tmp_path, 400)

    def stop_at(phrase):
        if "band 5" in phrase:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        dedup(tmp_path, marks, 400).run(near=0.85, bands=BANDS, progress=stop_at)
    said = []
    found = dedup(tmp_path, marks, 400).run(near=0.85, bands=BANDS, progress=said.append)
    assert said[0].endswith("band 5 of 16")
    assert np.array_equal(found.dropped, expected(signatures, digests, bands, 0.85))
    (tmp_path / "again").mkdir()
    _, _, _, marks = marked(tmp_path / "again", 400)
    whole = dedup(tmp_path / "again", marks, 400).run(near=0.85, bands=BANDS, progress=said.append)
    assert found.firsts == whole.firsts


def test_the_first_pairs_are_remembered_with_their_similarity(tmp_path):
    signatures, _, _, marks = marked(tmp_path, 400)
    found = dedup(tmp_path, marks, 400).run(near=0.85, bands=BANDS, progress=lambda phrase: None)
    assert [slot for slot, _, _ in found.firsts[NEAR]] == np.flatnonzero(found.dropped == NEAR)[:3].tolist()
    assert [slot for slot, _, _ in found.firsts[EXACT]] == np.flatnonzero(found.dropped == EXACT)[:3].tolist()
    for slot, head, similarity in found.firsts[NEAR]:
        assert head < slot
        assert similarity == alike(signatures[[slot]], signatures[[head]])[0] >= 0.85


def test_exact_duplicates_alone_need_no_bands(tmp_path):
    _, digests, _, marks = marked(tmp_path, 200)
    found = dedup(tmp_path, marks, 200).run(near=None, bands=0, progress=lambda phrase: None)
    assert np.count_nonzero(found.dropped == EXACT) == 200 - len(set(digests))
    assert not (found.dropped == NEAR).any()


def test_a_similarity_of_exactly_the_threshold_is_near(tmp_path):
    signatures, _, _, marks = marked(tmp_path, 30)
    (tmp_path / "signatures").write_bytes((signatures * 0).tobytes())
    same = [f"band_{band}" for band in range(BANDS)]
    for path in marks:
        table = pq.read_table(path)
        columns = {name: table[name].to_numpy() * (name not in same) for name in table.column_names}
        pq.write_table(pa.table(columns | {"digest_0": columns["slot"].astype(np.uint64)}), path)
    found = dedup(tmp_path, marks, 30).run(near=1.0, bands=BANDS, progress=lambda phrase: None)
    assert found.dropped.tolist() == [0] + [NEAR] * 29


def test_a_row_is_found_in_its_file(tmp_path):
    _, _, _, marks = marked(tmp_path, 50)
    assert dedup(tmp_path, marks, 50).where([7, 49]) == {7: (0, 8), 49: (0, 50)}
    assert dedup(tmp_path, marks, 50).where([]) == {}


def test_a_folder_with_a_strange_name_is_no_pattern(tmp_path):
    folder = tmp_path / "o'neil [1]*"
    folder.mkdir()
    signatures, digests, bands, marks = marked(folder, 60)
    found = dedup(folder, marks, 60).run(near=0.85, bands=BANDS, progress=lambda phrase: None)
    assert np.array_equal(found.dropped, expected(signatures, digests, bands, 0.85))


def test_a_search_leaves_no_pairs_behind(tmp_path):
    _, _, _, marks = marked(tmp_path, 50)
    dedup(tmp_path, marks, 50).run(near=0.85, bands=BANDS, progress=lambda phrase: None)
    assert sorted(path.name for path in (tmp_path / "dedup").iterdir() if path.is_file()) == [
        "dropped-017",
        "found.json",
    ]


def test_saved_bytes_without_their_line_do_not_count(tmp_path):
    found = Found(dropped=np.zeros(4, dtype=np.uint8), steps=1)
    found.save(tmp_path)
    (tmp_path / "dropped-002").write_bytes(bytes([9, 9]))  # killed before found.json was replaced
    assert Found.read(tmp_path, 4).dropped.tolist() == [0, 0, 0, 0]


def test_ctrl_c_in_a_query_is_ctrl_c(tmp_path):
    connection = connect(tmp_path / "spill", memory_bytes=64 * 2**20, threads=1)
    press = threading.Timer(0.3, os.kill, (os.getpid(), signal.SIGINT))
    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # a job in the background has it ignored
    try:
        press.start()
        with pytest.raises(KeyboardInterrupt):
            run(connection, "SELECT sum(one.range * two.range) FROM range(1000000) one, range(1000000) two")
        press.join()
    finally:
        signal.signal(signal.SIGINT, before)


def test_without_duckdb_the_command_that_installs_it_is_told(monkeypatch):
    monkeypatch.setitem(sys.modules, "duckdb", None)
    with pytest.raises(MissingExtra, match=r"pip install 'brimful\[data\]'"):
        need_duckdb()
