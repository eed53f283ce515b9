"""Encoding in pieces that fit the host limit. What an encoder makes of texts is tested in `test_tokenize.py`."""

import pyarrow as pa
import pytest

from brimful.data.encode import PIECE_BYTES, PIECES_IN_FLIGHT, Drop, EncodedRows, in_pieces, piece_size
from brimful.errors import BadOption
from brimful.units import GiB, MiB


def test_pieces_are_divided_by_size_and_lose_no_row():
    texts = ["x" * size for size in (3, 50, 1, 1, 1, 200, 1, 0, 9, 9)]
    batch = pa.record_batch({"prompt": texts, "response": texts})
    parts = list(in_pieces(batch, piece_bytes=20))
    assert pa.Table.from_batches(parts).to_pylist() == batch.to_pylist()
    assert all(piece.num_rows for piece in parts)
    assert (
        max(
            sum(len(text) for row in piece.to_pylist() for text in row.values())
            for piece in parts
            if piece.num_rows > 1
        )
        <= 406
    )
    assert [piece.num_rows for piece in in_pieces(batch.slice(0, 0), piece_bytes=20)] == [0]
    assert [piece.num_rows for piece in in_pieces(batch, piece_bytes=10**9)] == [10]
    assert max(piece.num_rows for piece in in_pieces(pa.record_batch({"text": ["x" * 10] * 100}), piece_bytes=50)) == 5


def test_the_host_limit_decides_the_size_of_pieces():
    assert piece_size(GiB, 64 * MiB) == PIECE_BYTES
    tight = piece_size(200 * MiB, 64 * MiB)
    assert tight < PIECE_BYTES
    assert 64 * MiB + PIECES_IN_FLIGHT * tight < 200 * MiB
    with pytest.raises(BadOption, match="host_limit='100MiB' is too small: .* take 64 MiB. Try: 1.*MiB or more"):
        piece_size(100 * MiB, 64 * MiB)


def test_rows_of_several_fields_are_flattened():
    rows = EncodedRows.of([[[5, 6], [0, 2]], [[7], []]], fields=2, dtype="uint16", rows_used=2, truncated=[1])
    assert rows.tokens.tolist() == [5, 6, 0, 2, 7]
    assert rows.tokens.dtype == "uint16"
    assert rows.lengths.tolist() == [[2, 2], [1, 0]]
    assert (rows.truncated, rows.dropped) == ([1], {})
    none = EncodedRows.of([], fields=2, dtype="uint16", rows_used=0)
    assert none.lengths.shape == (0, 2)


def test_joined_parts_know_the_places_of_dropped_rows():
    """The second part begins where the first ends: rows that were used, not rows that they gave."""
    first = EncodedRows.of([[[5]], [[6]], [[7]]], fields=1, dtype="uint16", rows_used=2, drops=[Drop(1, "no reply")])
    second = EncodedRows.of([], fields=1, dtype="uint16", rows_used=0, drops=[Drop(0, "empty"), Drop(1, "no reply")])
    rows = EncodedRows.join([first, second])
    assert [drop.row for drop in rows.drops] == [1, 3, 4]
    assert rows.dropped == {"no reply": 2, "empty": 1}
    assert rows.rows_used == 2
