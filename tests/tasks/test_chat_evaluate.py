"""A chat model examined: every row answered and counted, in training and from a folder."""

import shutil

import pytest
import torch

from brimful.data.tokenize import pack
from brimful.errors import BadData
from brimful.memory.ledger import simulated_memory
from brimful.tasks import chat_scores as module
from brimful.tasks.chat_scores import Examination, lengths_in_training, longest_answer
from brimful.tasks.chatlm import SIZES, ChatOptions, Pretrain
from brimful.tasks.generate import GenerateOptions
from brimful.training.evaluate import Evaluator
from brimful.training.run import RunFolder
from brimful.units import KiB
from tests.tasks.tiny import ROOMY, ROWS, make_tokenizer
from tests.training.test_evaluate import Team

CPU = torch.device("cpu")


def in_training(place, rows=None, **options):
    task = Pretrain(options=ChatOptions(from_=str(place.model)))
    return Evaluator(task, place.net, place.store if rows is None else rows, device=CPU, **options)


def references():
    return [row["response"].replace("，", ",") for row in ROWS]


def test_bleu_in_training_is_sacrebleus_over_all_rows(place):
    from sacrebleu import corpus_bleu

    watch = in_training(place)
    found = watch.run()
    generator, _ = next(value for key, value in watch.context.kept.items() if key[0] == "generator")
    answers = ["".join(generator.stream(prompt)) for prompt in place.prompts()]
    assert found.metrics["bleu"] == corpus_bleu(answers, [references()], tokenize="zh").score > 50
    assert found.generate_rows == 24
    assert set(found.forward) == {"evaluation", "generation"}


def test_the_loss_is_that_of_one_batch(place):
    task = Pretrain(options=ChatOptions(from_=str(place.model)))
    with torch.no_grad():
        whole = task.loss(place.net, task.collate(place.store.__getitems__(list(range(24)))))
    found = in_training(place, generate_rows=0).run()
    assert found.loss == pytest.approx(float(whole.sum / whole.count), rel=1e-5)
    assert found.count == place.store.meta.tokens["response"]
    assert found.metrics == {}


def test_a_second_evaluation_probes_nothing_anew(place):
    watch = in_training(place, max_rows=5)
    watch.run()
    fitted = [one.model for one in watch.context.forwards]
    watch.run()
    assert [one.model for one in watch.context.forwards] == fitted
    assert len(fitted) == 2


def test_two_processes_answer_all_rows_between_them(place):
    import copy

    alone = in_training(place, max_rows=7).run()
    models = [place.net, copy.deepcopy(place.net)]

    def share(rank, group):
        task = Pretrain(options=ChatOptions(from_=str(place.model)))
        return Evaluator(task, models[rank], place.store, device=CPU, group=group, max_rows=7).run()

    for found in Team().run(share):
        assert found.metrics == pytest.approx(alone.metrics)
        assert found.loss == pytest.approx(alone.loss, rel=1e-6)


def test_without_sacrebleu_training_goes_on_and_says_so_once(place, monkeypatch):
    monkeypatch.setattr(module, "has_sacrebleu", lambda: False)
    told = []
    watch = in_training(place, tell=told.append)
    assert watch.run().metrics == watch.run().metrics == {}
    assert len(told) == 1 and "brimful[eval]" in told[0]


def test_rows_that_are_no_store_have_no_tokenizer_and_no_score(place):
    rows = [place.store[number] for number in range(5)]
    found = in_training(place, rows=rows).run()
    assert found.metrics == {} and found.rows == 5


def test_answers_may_be_as_long_as_the_longest_reference(place):
    assert longest_answer(place.store) == max(place.store.shapes(range(24))[:, 1])


def test_an_examination_under_a_limit_gives_the_same_figures(place):
    def examined(limit):
        task = Examination(place.model, answers_as_long_as_references=True)
        store, model = task.rows(str(place.folder / "store")), task.initial_model().eval()
        with simulated_memory(limit) as memory:
            memory.adopt(model.parameters())
            found = Evaluator(task, model, store, device=CPU).run()
        return found, task.answers, memory

    (plain, answers, _), (tight, again, memory) = examined("1GiB"), examined(500 * KiB)
    assert answers == again
    assert [one.reference for one in answers] == references()
    assert tight.metrics == plain.metrics
    assert tight.loss == pytest.approx(plain.loss, rel=1e-6)
    assert memory.peak_bytes < 500 * KiB
    assert tight.forward["generation"]["batches"] > plain.forward["generation"]["batches"]


@pytest.mark.parametrize(
    ("request_", "lengths"),
    [
        ({"asked": {"max_tokens": "6"}}, (6,)),
        ({"asked": {"size": "tiny"}}, SIZES["tiny"].worst_shape),
        ({"asked": {}, "prepared": {"data": "gone", "valid": None}}, SIZES["base"].worst_shape),
        ({"asked": {"max_tokens": 6}, "prepared": {"data": "store", "valid": None}}, (256, 256)),
    ],
    ids=["asked", "the size's", "base", "the rows it trained on"],
)
def test_rows_are_cut_where_the_run_of_the_model_cut_them(place, tmp_path, request_, lengths):
    model = tmp_path / "checkpoints" / "step-00000010" / "model"
    shutil.copytree(place.model, model)
    shutil.copytree(place.folder / "store", tmp_path / "store")
    assert lengths_in_training(model) is None, "nobody knows what the run was"
    RunFolder(tmp_path).remember({"task": "chatlm-sft", "data": "rows", **request_})
    (tmp_path / "best").symlink_to(model)
    assert lengths_in_training(model) == lengths_in_training(tmp_path / "best") == lengths
    assert Examination(tmp_path / "best", metrics=[]).max_tokens == lengths
    assert Examination(tmp_path / "best", metrics=[], max_tokens="7").max_tokens == (7,)
    (tmp_path / "run.json").write_text("{")
    assert Examination(model, metrics=[]).max_tokens == SIZES["base"].worst_shape


def test_a_store_of_another_tokenizer_is_refused(place, tmp_path):
    other = make_tokenizer(tmp_path / "other", [{"prompt": "完全不同的文字", "response": "一二三四"}])
    pack([str(place.raw)], tokenizer=other, output=tmp_path / "store", options=ROOMY)
    with pytest.raises(BadData, match="was packed with another tokenizer"):
        Examination(place.model).rows(str(tmp_path / "store"))


def test_figures_that_were_not_asked_for_are_not_made(place):
    task = Examination(place.model, metrics=["chrf"], options=GenerateOptions(max_new_tokens=4))
    rows = task.rows(str(place.folder / "store"))
    found = Evaluator(task, task.initial_model(), rows, device=CPU, max_rows=3).run(loss=False)
    assert set(found.metrics) == {"chrf"} and found.loss != found.loss
    assert set(task.facts()["signatures"]) == {"chrf"}
    assert task.facts()["generation"]["max_new_tokens"] == 4
