"""Sketches: as alike as the texts are, and a matter of each text alone."""

import random

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from brimful.data.clean import similarity
from brimful.data.clean.similarity import GRAM, HASHES, RECALL, alike, band_rows, join, sketch

TEXTS = st.lists(st.text("ab中文🙂", min_size=1, max_size=40), min_size=1, max_size=12)


def sketched(texts, per_band=8):
    return sketch(join([pa.array(texts, pa.string())]), per_band=per_band)


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
def test_sketches_are_as_alike_as_the_texts(length):
    pairs = edited_pairs(length, 300 if length < 1000 else 150)
    estimate = alike(*[sketched(side).signatures for side in zip(*pairs, strict=True)])
    error = estimate - np.array([jaccard(*pair) for pair in pairs])
    assert abs(error.mean()) < 0.012
    assert np.sqrt((error**2).mean()) < 0.055  # 128 independent hashes would give 0.044 at one half


def test_texts_without_a_common_gram_are_not_alike_at_all():
    ones, others = zip(*[(pair[0][:100], pair[0][100:]) for pair in edited_pairs(200)], strict=True)
    assert alike(sketched(ones).signatures, sketched(others).signatures).mean() < 0.003  # 0.0039 agree by chance


def test_equal_texts_are_wholly_alike():
    signatures = sketched(["今天天气很好", "x"]).signatures
    assert alike(signatures, signatures).tolist() == [1.0, 1.0]


@given(TEXTS, st.integers(0, 11))
def test_a_sketch_does_not_depend_on_the_neighbours(texts, place):
    text = texts[place % len(texts)]
    together, alone = sketched(texts), sketched([text])
    assert np.array_equal(together.signatures[place % len(texts)], alone.signatures[0])
    assert np.array_equal(together.bands[:, place % len(texts)], alone.bands[:, 0])


@given(TEXTS)
def test_a_sketch_does_not_depend_on_the_blocks(texts):
    whole = sketched(texts)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(similarity, "_BLOCK", 5)
        blocks = sketched(texts)
    assert np.array_equal(whole.signatures, blocks.signatures) and np.array_equal(whole.bands, blocks.bands)


def test_a_slice_of_an_array_is_sketched_as_itself():
    joined = join([pa.array(["早上好", "x", "🙂 晚上好", "y"])])
    sliced = sketch(joined.slice(1, 2), per_band=8)
    assert np.array_equal(sliced.signatures, sketch(joined, per_band=8).signatures[1:3])


def test_even_one_character_has_a_sketch_of_its_own():
    signatures = sketched(["a", "b", "a"]).signatures
    assert np.array_equal(signatures[0], signatures[2]) and not np.array_equal(signatures[0], signatures[1])


def test_what_moves_from_one_side_to_the_other_makes_another_row():
    joined = join([pa.array(["ab", "a"]), pa.array(["c", "bc"])]).to_pylist()
    assert joined[0] != joined[1]


@pytest.mark.parametrize("near", [0.5, 0.6, 0.7, 0.8, 0.85, 0.9, 0.95, 1.0])
def test_bands_find_nearly_all_pairs_at_the_threshold_and_are_as_few_as_that_allows(near):
    found = lambda rows: 1 - (1 - near**rows) ** (HASHES // rows)  # noqa: E731
    rows = band_rows(near)
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
    assert sketched(["一二三四五"], per_band=7).bands.shape == (18, 1)
