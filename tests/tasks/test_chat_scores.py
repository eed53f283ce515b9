"""Scores of a chat model: BLEU and chrF over all rows, in training and for a saved model."""

import shutil
import sys

import pytest
import torch

from brimful.data.tokenize import tokenize
from brimful.errors import BadData, MissingExtra
from brimful.memory.ledger import simulated_memory
from brimful.tasks import chat_scores as module
from brimful.tasks.chat_scores import ChatEvaluation, Questions, corpus_scores, lengths_in_training, signatures
from brimful.tasks.language import LanguageOptions, Pretrain
from brimful.tasks.model_folder import tokenizer_of
from brimful.tasks.presets import PRESETS
from brimful.training.evaluate import Evaluator, SelectedRows
from brimful.training.run import Request, RunFolder
from brimful.units import KiB
from tests.tasks.tiny import ROOMY, ROWS, make_tokenizer
from tests.training.test_evaluate import Team

CPU = torch.device("cpu")


def in_training(tiny, rows=None, **options):
    task = Pretrain(options=LanguageOptions(model=str(tiny.model)))
    return Evaluator(task, tiny.net, tiny.store if rows is None else rows, device=CPU, **options)


def references():
    return [row["response"].replace("，", ",") for row in ROWS]


def test_bleu_in_training_is_sacrebleus_over_all_rows(tiny):
    from sacrebleu import corpus_bleu

    evaluator = in_training(tiny)
    found = evaluator.run()
    generator, _ = next(value for key, value in evaluator.context.cache.items() if key[0] == "generator")
    answers = [generator.tokenizer.decode(ids) for ids in generator.answer_batch(tiny.prompts())]
    assert found.metrics["bleu"] == corpus_bleu(answers, [references()], tokenize="zh").score > 50
    assert found.generate_rows == 24
    assert set(found.forward) == {"evaluation", "generation"}


def test_the_loss_is_that_of_one_batch(tiny):
    task = Pretrain(options=LanguageOptions(model=str(tiny.model)))
    with torch.no_grad():
        whole = task.loss(tiny.net, task.collate(tiny.store.__getitems__(list(range(24)))))
    found = in_training(tiny, generate_rows=0).run()
    assert found.loss == pytest.approx(float(whole.sum / whole.count), rel=1e-5)
    assert found.count == tiny.store.meta.tokens["response"]
    assert found.metrics == {}


def test_a_second_evaluation_reuses_the_memory_models(tiny):
    evaluator = in_training(tiny, max_rows=5)
    evaluator.run()
    fitted = [one.model for one in evaluator.context.forwards]
    evaluator.run()
    assert [one.model for one in evaluator.context.forwards] == fitted
    assert len(fitted) == 2


def test_two_processes_answer_all_rows_between_them(tiny):
    import copy

    alone = in_training(tiny, max_rows=7).run()
    models = [tiny.net, copy.deepcopy(tiny.net)]

    def share(rank, group):
        task = Pretrain(options=LanguageOptions(model=str(tiny.model)))
        return Evaluator(task, models[rank], tiny.store, device=CPU, group=group, max_rows=7).run()

    for found in Team().run(share):
        assert found.metrics == pytest.approx(alone.metrics)
        assert found.loss == pytest.approx(alone.loss, rel=1e-6)


def test_without_sacrebleu_training_continues_with_one_note(tiny, monkeypatch):
    monkeypatch.setattr(module, "has_sacrebleu", lambda: False)
    notes = []
    evaluator = in_training(tiny, note=notes.append)
    assert evaluator.run().metrics == evaluator.run().metrics == {}
    assert len(notes) == 1 and "brimful[eval]" in notes[0]


def test_rows_outside_a_token_store_have_no_scores(tiny):
    rows = [tiny.store[number] for number in range(5)]
    found = in_training(tiny, rows=rows).run()
    assert found.metrics == {} and found.rows == 5


def test_answers_may_be_as_long_as_the_longest_reference(tiny):
    questions = Questions(SelectedRows(tiny.store, range(3)), tokenizer_of(tiny.model))
    assert questions.max_answer_tokens == max(tiny.store.shapes(range(24))[:, 1])


def test_scores_under_a_memory_limit_are_the_same(tiny):
    def evaluated(limit):
        task = ChatEvaluation(tiny.model)
        store, model = task.rows(str(tiny.folder / "store")), task.initial_model().eval()
        with simulated_memory(limit) as memory:
            memory.adopt(model.parameters())
            found = Evaluator(task, model, store, device=CPU).run()
        return found, task.answers, memory

    (plain, answers, _), (tight, again, memory) = evaluated("1GiB"), evaluated(500 * KiB)
    assert answers == again
    assert [one.reference for one in answers] == references()
    assert tight.metrics == plain.metrics
    assert tight.loss == pytest.approx(plain.loss, rel=1e-6)
    assert memory.peak_bytes < 500 * KiB
    assert tight.forward["generation"]["batches"] > plain.forward["generation"]["batches"]


@pytest.mark.parametrize(
    ("request_fields", "lengths"),
    [
        ({"task_options": {"max_tokens": "6"}}, (6,)),
        ({"task_options": {"model": "chatlm-tiny"}}, PRESETS["chatlm-tiny"].worst_shape),
        ({"prepared": {"data": "missing", "valid": None}}, PRESETS["chatlm-base"].worst_shape),
        ({"task_options": {"max_tokens": 6}, "prepared": {"data": "store", "valid": None}}, (256, 256)),
    ],
    ids=["requested", "of the preset", "of base", "of the training rows"],
)
def test_rows_are_truncated_as_in_the_run_of_the_model(tiny, tmp_path, request_fields, lengths):
    model = tmp_path / "checkpoints" / "step-00000010" / "model"
    shutil.copytree(tiny.model, model)
    shutil.copytree(tiny.folder / "store", tmp_path / "store")
    assert lengths_in_training(model) is None, "there is no run.json"
    RunFolder(tmp_path).write_request(Request(task="sft", data="rows", run=str(tmp_path), **request_fields))
    (tmp_path / "best").symlink_to(model)
    assert lengths_in_training(model) == lengths_in_training(tmp_path / "best") == lengths
    assert ChatEvaluation(tmp_path / "best", metrics=[]).max_tokens == (lengths * 2)[:2]
    assert ChatEvaluation(tmp_path / "best", metrics=[], max_tokens="7").max_tokens == (7, 7)
    (tmp_path / "run.json").write_text("{")
    assert ChatEvaluation(model, metrics=[]).max_tokens == PRESETS["chatlm-base"].worst_shape


def test_a_store_of_another_tokenizer_is_refused(tiny, tmp_path):
    other = make_tokenizer(tmp_path / "other", [{"prompt": "完全不同的文字", "response": "一二三四"}])
    tokenize([str(tiny.raw)], tokenizer=other, output=tmp_path / "store", options=ROOMY)
    with pytest.raises(BadData, match="was made with another tokenizer"):
        ChatEvaluation(tiny.model).rows(str(tmp_path / "store"))


def test_only_requested_metrics_are_computed(tiny):
    task = ChatEvaluation(tiny.model, metrics=["chrf"], max_new_tokens=4)
    rows = task.rows(str(tiny.folder / "store"))
    found = Evaluator(task, task.initial_model(), rows, device=CPU, max_rows=3).run(loss=False)
    assert set(found.metrics) == {"chrf"} and found.loss != found.loss
    assert set(task.facts()["signatures"]) == {"chrf"}
    assert task.facts()["generation"]["max_new_tokens"] == 4


ANSWERS = ["今天天气很好。", "我不知道", "红色的花和 blue flowers", "一二三四五六"]
REFERENCES = ["今天的天气很好。", "我也不知道。", "红色的花和 blue flower", "六五四三二一"]


def test_scores_are_sacrebleus_over_the_corpus():
    from sacrebleu import corpus_bleu, corpus_chrf

    found = corpus_scores(ANSWERS, REFERENCES)
    assert found["bleu"] == corpus_bleu(ANSWERS, [REFERENCES], tokenize="zh").score
    assert found["chrf"] == corpus_chrf(ANSWERS, [REFERENCES]).score


def test_every_row_counts_not_the_last_ones():
    whole = corpus_scores(ANSWERS, REFERENCES)["bleu"]
    assert whole != pytest.approx(corpus_scores(ANSWERS[2:], REFERENCES[2:])["bleu"])
    swapped = corpus_scores(ANSWERS[::-1], REFERENCES[::-1])["bleu"]
    assert whole == pytest.approx(swapped)


def test_chinese_is_split_into_characters():
    assert corpus_scores(["今天天气很好"], ["今天天气不好"])["bleu"] > 20


def test_short_answers_are_not_rewarded():
    assert corpus_scores(["今天天气"], ["今天天气很好我们出去走走吧"])["bleu"] < 50
    assert corpus_scores(["今天天气"], ["今天天气"])["bleu"] == pytest.approx(100)


def test_only_requested_scores_are_computed():
    assert set(corpus_scores(ANSWERS, REFERENCES, ["chrf"])) == {"chrf"}


def test_signatures_are_sacrebleus():
    found = signatures()
    assert "tok:zh" in found["bleu"] and "nc:6" in found["chrf"]


def test_without_sacrebleu_the_extra_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "sacrebleu", None)
    monkeypatch.setitem(sys.modules, "sacrebleu.metrics", None)
    with pytest.raises(MissingExtra, match=r"brimful\[eval\]"):
        corpus_scores(ANSWERS, REFERENCES)
