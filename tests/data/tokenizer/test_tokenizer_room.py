"""The RAM decides how much text is used: predicted from its words, refused where nothing fits."""

from dataclasses import replace

import pyarrow as pa
import pytest

from brimful.data.tokenizer.algorithms import TokenizerOptions
from brimful.data.tokenizer.sample import (
    BYTES_PER_PAIR,
    BYTES_PER_WORD_CHARACTER,
    LEAST_BYTES,
    MOST_CHARACTERS,
    OWN_BYTES,
    Load,
    Room,
    find_room,
    fitting,
)
from brimful.errors import BadOption
from brimful.machine.host import Host
from brimful.units import GiB, MiB
from tests.data.tokenizer.tokenizer_rows import texts


def room(training_bytes):
    return Room(limit_bytes=training_bytes, limit_reason="as asked", training_bytes=training_bytes)


def chosen(rows, training_bytes, kind="bpe"):
    return fitting(pa.table({"text": rows}), room(training_bytes), kind, lambda phrase: None)


def test_distinct_words_and_their_pairs_count_once():
    load = Load()
    load.add(["天地玄黄，宇宙", "天地玄黄 1234 ok ok"])
    load.add(["宇宙。天地玄黄"])
    words = ["天地玄黄", "宇宙", " ok"]
    assert load.word_characters == sum(map(len, words))
    assert load.bytes == BYTES_PER_WORD_CHARACTER * 9 + BYTES_PER_PAIR * (3 + 1 + 2)


def test_digits_and_punctuation_cost_nothing():
    load = Load()
    load.add(["12，34。——\n", ""])
    assert load.bytes == 0


def test_all_rows_are_used_where_they_fit():
    rows = texts(2000, words=5000)
    found = chosen(rows, GiB)
    assert found.complete
    assert found.rows["text"].to_pylist() == rows
    assert found.characters == sum(map(len, rows))


def test_a_smaller_room_takes_the_first_rows_that_fit():
    rows = texts(20_000, words=5000)
    whole = chosen(rows, GiB)
    half = chosen(rows, whole.predicted_bytes // 2)
    assert not half.complete
    assert half.rows["text"].to_pylist() == rows[: half.rows.num_rows]
    assert 0.3 * whole.predicted_bytes < half.predicted_bytes <= 0.5 * whole.predicted_bytes
    assert half.characters == sum(map(len, rows[: half.rows.num_rows]))


def test_rows_that_are_left_out_are_freed():
    rows = texts(20_000, words=5000)
    half = chosen(rows, 20 * MiB)
    assert half.rows.get_total_buffer_size() < 1.01 * half.rows.nbytes


def test_unigram_takes_a_tenth_more():
    rows = texts(500)
    assert chosen(rows, GiB, "unigram").predicted_bytes == pytest.approx(1.1 * chosen(rows, GiB).predicted_bytes)


def test_repeated_rows_cost_no_more():
    assert chosen(texts(500) * 3, GiB).predicted_bytes == chosen(texts(500), GiB).predicted_bytes


def test_the_limit_is_what_was_asked_for_where_it_is_free():
    host = replace(Host.detect(), ram_available_bytes=8 * GiB)
    found = find_room(TokenizerOptions(host_limit_bytes=2 * GiB), 100 * MiB, host)
    assert (found.limit_bytes, found.limit_reason) == (2 * GiB, "as asked")
    assert found.training_bytes == 2 * GiB - 100 * MiB - OWN_BYTES


def test_less_is_used_where_less_is_free():
    host = replace(Host.detect(), ram_available_bytes=GiB)
    found = find_room(TokenizerOptions(), 100 * MiB, host)
    assert (found.limit_bytes, found.limit_reason) == (GiB + 100 * MiB, "no more RAM is free now")
    assert found.training_bytes == GiB - OWN_BYTES


def test_too_little_says_how_much_is_needed():
    least = 100 * MiB + OWN_BYTES + LEAST_BYTES
    host = replace(Host.detect(), ram_available_bytes=8 * GiB)
    assert find_room(TokenizerOptions(host_limit_bytes=least), 100 * MiB, host).training_bytes == LEAST_BYTES
    with pytest.raises(BadOption, match=f"give {least // MiB}MiB or more"):
        find_room(TokenizerOptions(host_limit_bytes=least - 1), 100 * MiB, host)
    with pytest.raises(BadOption, match="of which 300 MiB are free, is too small"):
        find_room(TokenizerOptions(), 100 * MiB, replace(host, ram_available_bytes=200 * MiB))


def test_the_least_room_holds_the_longest_rows_there_can_be():
    rows = ["".join(chr(0x4E00 + (7 * n * n + row) % 20_000) for n in range(100_000)) for row in range(3)]
    table = pa.table({side: [text] for side, text in zip("abc", rows, strict=True)})
    assert fitting(table, room(LEAST_BYTES), "unigram", lambda phrase: None).complete


def test_no_more_is_read_than_could_be_used():
    assert room(3200).read_characters == 100
    assert room(1000 * GiB).read_characters == MOST_CHARACTERS
