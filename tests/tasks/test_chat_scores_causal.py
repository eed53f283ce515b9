"""Scores of causal models: the loss of replies, and answers to the last question of each conversation."""

import math
import shutil

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from brimful.data.store import trained
from brimful.errors import BadData
from brimful.memory.ledger import simulated_memory
from brimful.serving.chat import Chat
from brimful.tasks.chat_scores import ChatEvaluation, Questions, lengths_in_training
from brimful.tasks.generate import GenerateOptions, Generator
from brimful.tasks.language import LanguageOptions, Pretrain, Sft, SftOptions
from brimful.tasks.model_folder import tokenizer_of
from brimful.training.evaluate import Evaluator, SelectedRows
from brimful.training.run import Request, RunFolder
from brimful.units import KiB
from tests.tasks.adapted import add_noise
from tests.tasks.tiny_causal import CONVERSATIONS, write_store

CPU = torch.device("cpu")
REFERENCES = [one[-1]["content"] for one in CONVERSATIONS]


def in_training(causal, rows=None, **options):
    task = Sft(options=SftOptions(model=str(causal.model)))
    return Evaluator(task, causal.net, causal.store if rows is None else rows, device=CPU, **options)


def questions(causal, store=None):
    store = causal.store if store is None else store
    return Questions(SelectedRows(store, range(len(store))), tokenizer_of(causal.model))


@pytest.fixture(scope="module")
def texts(causal, tmp_path_factory):
    """Rows without replies."""
    return write_store(tmp_path_factory.mktemp("texts") / "store", causal.template, CONVERSATIONS, spans=False)


def test_a_question_is_all_before_the_last_reply(causal):
    found = questions(causal)
    assert [list(prompt) for prompt in found.prompts] == causal.prompts()
    tokenizer = tokenizer_of(causal.model)
    assert [tokenizer.decode(reference) for reference in found.references] == REFERENCES
    assert not any(found.end_ids[0] in reference for reference in found.references), "the end is no part of it"
    assert found.max_answer_tokens == 1 + max(map(len, found.references))


def test_a_row_without_a_prompt_is_not_asked(causal):
    """As when every token is trained on, or the reply was truncated away."""
    row = causal.store[0]
    rows = [
        {"tokens": row["tokens"], "spans": np.array(spans)}
        for spans in ([0, len(row["tokens"])], [], [len(row["tokens"]), 0], row["spans"])
    ]

    class Rows(type(causal.store)):
        def __init__(self):
            self.path, self.meta, self.fields = causal.store.path, causal.store.meta, causal.store.fields

        def __getitems__(self, indices):
            return [rows[index] for index in indices]

    found = Questions(SelectedRows(Rows(), range(4)), tokenizer_of(causal.model))
    assert found.rows == [3]


def test_the_loss_is_the_mean_over_the_tokens_of_replies(causal):
    """Each row alone, token by token, without any of our code."""
    total = count = 0
    for row in causal.store:
        tokens = torch.tensor(row["tokens"].astype(np.int64))
        with torch.no_grad():
            losses = F.cross_entropy(causal.net(tokens[None]).logits[0, :-1], tokens[1:], reduction="none")
        mask = torch.tensor(trained(row["spans"], len(tokens))[1:])
        total, count = total + losses[mask].sum().item(), count + int(mask.sum())
    found = in_training(causal, generate_rows=0).run()
    assert found.loss == pytest.approx(total / count, rel=1e-5)
    assert (found.count, found.metrics) == (count, {})
    assert found.perplexity == pytest.approx(math.exp(total / count), rel=1e-5)


def test_bleu_in_training_is_sacrebleus_over_the_last_replies(causal):
    from sacrebleu import corpus_bleu

    found = in_training(causal).run()
    assert found.metrics["bleu"] == pytest.approx(corpus_bleu(REFERENCES, [REFERENCES], tokenize="zh").score)
    assert found.metrics["chrf"] == pytest.approx(100)
    assert set(found.forward) == {"evaluation", "generation"}
    assert causal.net.config.use_cache is False


def test_whole_texts_have_a_loss_only(causal, texts):
    task = Pretrain(options=LanguageOptions(model=str(causal.model)))
    found = Evaluator(task, causal.net, texts, device=CPU).run()
    assert found.metrics == {} and set(found.forward) == {"evaluation"}
    assert found.count == texts.meta.tokens["tokens"] - len(texts), "the first token of a row is not predicted"
    assert found.perplexity == pytest.approx(math.exp(found.loss))


def test_scores_under_a_memory_limit_are_the_same(causal):
    def evaluated(limit):
        task = ChatEvaluation(causal.model)
        store, model = task.rows(str(causal.folder / "store")), task.initial_model().eval()
        with simulated_memory(limit) as memory:
            memory.adopt(model.parameters())
            found = Evaluator(task, model, store, device=CPU).run()
        return found, task.answers, memory

    limit = causal.weight_bytes + 400 * KiB
    (plain, answers, _), (tight, again, memory) = evaluated("1GiB"), evaluated(limit)
    assert answers == again
    assert [one.reference for one in answers] == [one.response for one in answers] == REFERENCES
    assert answers[2].prompt.count("[BOS]user") == 2, "the whole conversation is shown, with its special tokens"
    assert tight.metrics == plain.metrics
    assert tight.loss == pytest.approx(plain.loss, rel=1e-6)
    assert memory.peak_bytes < limit and tight.forward["generation"]["ooms"] == 0
    assert tight.forward["generation"]["batches"] > plain.forward["generation"]["batches"]


def test_raw_conversations_are_tokenized_as_for_fine_tuning(causal, tmp_path):
    task, notes = ChatEvaluation(causal.model), []
    store = task.rows(task.prepare(str(causal.raw), tmp_path, notes.append))
    made, expected = (
        [{name: list(part) for name, part in row.items()} for row in rows] for rows in (store, causal.store)
    )
    assert made == expected
    assert task.facts()["max_tokens"] == {"tokens": 512}, "the positions of the model"


def test_rows_are_truncated_and_trained_on_as_in_the_run_of_the_model(causal, tmp_path):
    model = tmp_path / "checkpoints" / "step-00000010" / "model"
    shutil.copytree(causal.model, model)
    options = {"model": "causal-tiny", "max_tokens": "40", "train_on": "all"}
    request = Request(task="sft", data="rows", run=str(tmp_path), task_options=options)
    RunFolder(tmp_path).write_request(request)
    assert lengths_in_training(model) == ChatEvaluation(model, metrics=[]).max_tokens == (40,)
    assert ChatEvaluation(model, metrics=[]).trains_on == "all"
    assert ChatEvaluation(causal.model, metrics=[]).trains_on == "replies"


def test_a_store_of_prompts_and_responses_is_refused(causal, tiny):
    with pytest.raises(BadData, match="has prompt and response, but tokens and spans are needed"):
        ChatEvaluation(causal.model).rows(str(tiny.folder / "store"))
    with pytest.raises(BadData, match="has tokens and spans, but prompt and response are needed"):
        ChatEvaluation(tiny.model).rows(str(causal.folder / "store"))


@pytest.fixture(scope="module")
def adapted(causal, tmp_path_factory):
    """A run's adapter of the model, which changes its answers, and the folder it is in."""
    pytest.importorskip("peft")
    from brimful.tasks.adapters import Lora, load_base, save, with_adapter

    folder = tmp_path_factory.mktemp("adapted") / "adapter"
    model = add_noise(with_adapter(load_base(causal.model), Lora(r=4)), scale=0.3).eval()
    save(model, folder)
    for file in causal.tokenizer.iterdir():
        (folder / file.name).write_bytes(file.read_bytes())
    return model, folder


def test_an_adapter_is_evaluated_with_its_base(causal, adapted):
    model, folder = adapted
    task = ChatEvaluation(folder)
    store = task.rows(str(causal.folder / "store"))
    found = Evaluator(task, task.initial_model(), store, device=CPU, max_rows=6).run()
    live = Evaluator(Sft(options=SftOptions(model=str(causal.model))), model, store, device=CPU, max_rows=6).run()
    assert found.loss == pytest.approx(live.loss, rel=1e-5) and found.loss > 1
    assert found.metrics == pytest.approx(live.metrics)
    phases = live.forward["generation"]["memory_model"]["phases"]
    assert set(phases) == {"forward", "decoding", "choosing"}, "within PEFT's model"


def test_an_adapter_is_talked_to(causal, adapted):
    model, folder = adapted
    options = GenerateOptions(max_new_tokens=6)
    answer = Chat(folder, options, device=CPU).reply("甲的花？").response
    live = Generator(model, tokenizer_of(causal.model), options, device=CPU, end_ids=causal.template.end_ids)
    assert answer == live.tokenizer.decode(live.answer_batch(causal.prompts()[:1])[0]) != REFERENCES[0]
