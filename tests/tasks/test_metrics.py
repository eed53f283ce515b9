"""BLEU and chrF: sacrebleu's own figures over all rows together."""

import sys

import pytest

from brimful.errors import MissingExtra
from brimful.tasks.chat_scores import corpus_scores, has_sacrebleu, signatures

ANSWERS = ["今天天气很好。", "我不知道", "红色的花和 blue flowers", "一二三四五六"]
REFERENCES = ["今天的天气很好。", "我也不知道。", "红色的花和 blue flower", "六五四三二一"]


def test_the_figures_are_sacrebleus_over_the_corpus():
    from sacrebleu import corpus_bleu, corpus_chrf

    found = corpus_scores(ANSWERS, REFERENCES)
    assert found["bleu"] == corpus_bleu(ANSWERS, [REFERENCES], tokenize="zh").score
    assert found["chrf"] == corpus_chrf(ANSWERS, [REFERENCES]).score


def test_every_row_counts_not_the_last_ones():
    whole = corpus_scores(ANSWERS, REFERENCES)["bleu"]
    assert whole != pytest.approx(corpus_scores(ANSWERS[2:], REFERENCES[2:])["bleu"])
    swapped = corpus_scores(ANSWERS[::-1], REFERENCES[::-1])["bleu"]
    assert whole == pytest.approx(swapped)


def test_chinese_is_counted_by_characters():
    assert corpus_scores(["今天天气很好"], ["今天天气不好"])["bleu"] > 20


def test_short_answers_are_not_rewarded():
    assert corpus_scores(["今天天气"], ["今天天气很好我们出去走走吧"])["bleu"] < 50
    assert corpus_scores(["今天天气"], ["今天天气"])["bleu"] == pytest.approx(100)


def test_only_what_was_asked_for_is_counted():
    assert set(corpus_scores(ANSWERS, REFERENCES, ["chrf"])) == {"chrf"}


def test_signatures_tell_how():
    found = signatures()
    assert "tok:zh" in found["bleu"] and "nc:6" in found["chrf"]


def test_a_missing_package_names_the_extra(monkeypatch):
    monkeypatch.setitem(sys.modules, "sacrebleu", None)
    monkeypatch.setitem(sys.modules, "sacrebleu.metrics", None)
    with pytest.raises(MissingExtra, match=r"brimful\[eval\]"):
        corpus_scores(ANSWERS, REFERENCES)


def test_it_is_here():
    assert has_sacrebleu()
