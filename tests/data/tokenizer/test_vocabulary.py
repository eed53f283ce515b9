"""Unigram vocabularies: pruned by what is missed least, as good as byte pairs or nearly so."""

import math

import numpy as np
import pytest

from brimful.data.tokenizer.vocabulary import (
    _best_without,
    _scores,
    _worth_keeping,
    find_alphabet,
    train_bpe,
    train_unigram,
)
from tests.data.tokenizer.tokenizer_rows import texts

TRAINING, OTHERS = texts(600, seed=1, words=2000), texts(1200, seed=1, words=2000)[600:]


def training():
    yield TRAINING


def tokens(tokenizer, rows):
    return sum(len(encoding.ids) for encoding in tokenizer.encode_batch_fast(rows, add_special_tokens=False))


def test_the_best_segmentation_leaves_the_piece_itself_out():
    score = {"a": -1.0, "b": -2.0, "c": -3.0, "ab": -2.5, "abc": -1.0}
    assert _best_without("abc", score) == -5.5
    assert _best_without("ab", score) == -3.0


def test_scores_are_log_probabilities_and_unseen_pieces_have_one_too():
    assert _scores(np.array([6, 2, 0])).tolist() == [round(math.log(part / 8.5), 6) for part in (6, 2, 0.5)]


def test_single_characters_and_what_is_missed_most_stay_in_their_order():
    pieces = ["a", "b", "ab", "ba", "aab"]
    counts = np.array([10, 10, 100, 1, 50])
    assert [pieces[number] for number in _worth_keeping(pieces, counts, keep=4)] == ["a", "b", "ab", "aab"]
    assert [pieces[number] for number in _worth_keeping(pieces, counts, keep=2)] == ["a", "b"]


@pytest.fixture(scope="module")
def alphabet():
    return find_alphabet(training, vocab_size=1500)


def test_texts_it_has_not_seen_become_nearly_as_short_as_with_byte_pairs(alphabet):
    pairs = train_bpe(training, alphabet, vocab_size=1500)
    unigram = train_unigram(training, train_bpe(training, alphabet, vocab_size=3000), vocab_size=1500)
    assert unigram.get_vocab_size() == pairs.get_vocab_size() == 1500
    assert tokens(unigram, OTHERS) < 1.05 * tokens(pairs, OTHERS)


def test_fewer_seeds_than_entries_all_stay(alphabet):
    seeds = train_bpe(training, alphabet, vocab_size=900)
    assert set(train_unigram(training, seeds, vocab_size=1500).get_vocab()) == set(seeds.get_vocab())
