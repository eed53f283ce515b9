"""The chat tasks: what trains and what is kept of the rest, the loss, the rows that fit, and a model that loads anywhere."""

import json
import shutil

import pytest
import torch
import torch.nn.functional as F

from brimful.data.tokenize import pack
from brimful.errors import BadData, BadModel
from brimful.tasks.chatlm import IGNORED, SIZES, ChatOptions, Pretrain, Sft
from tests.tasks.tiny import ROOMY, ROWS, make_tokenizer, write_jsonl

FREEZES = ("none", "encoder", "encoder+embeddings")


def started(place, freeze=None, kind=Pretrain, **options):
    """The task and its model, in training, from the weights that all tests share."""
    task = kind(options=ChatOptions(from_=str(place.model), freeze=freeze, **options))
    return task, task.initial_model().train()


def batch_of(task, place, rows=6):
    return task.collate(place.store.__getitems__(list(range(rows))))


def trains(model):
    """Which parts have weights that train."""
    parts = {
        "encoder": [param for name, param in model.encoder.named_parameters() if "embed_tokens" not in name],
        "embeddings": [model.shared.weight],
        "decoder": [param for name, param in model.decoder.named_parameters() if "embed_tokens" not in name],
        "head": [model.lm_head.weight],
    }
    assert all(len({param.requires_grad for param in params}) == 1 for params in parts.values())
    return {name for name, params in parts.items() if params[0].requires_grad}


EXPECTED = {
    "none": {"encoder", "embeddings", "decoder", "head"},
    "encoder": {"embeddings", "decoder", "head"},
    "encoder+embeddings": {"decoder"},
}


@pytest.mark.parametrize("freeze", FREEZES)
def test_what_is_frozen_does_not_train_and_the_rest_does(place, freeze):
    task, model = started(place, freeze)
    assert trains(model) == trains(task.model()) == EXPECTED[freeze]


@pytest.mark.parametrize(("kind", "freeze"), [(Pretrain, "none"), (Sft, "encoder+embeddings")])
def test_pretraining_freezes_nothing_and_fine_tuning_encoder_and_embeddings(place, kind, freeze):
    assert trains(started(place, kind=kind)[1]) == EXPECTED[freeze]


def other_model(folder, **changes):
    """The configuration of an encoder-decoder that is no T5."""
    from transformers import BartConfig

    sizes = {"d_model": 8, "vocab_size": 50, "max_position_embeddings": 32}
    parts = {
        f"{part}_{what}": 2 for part in ("encoder", "decoder") for what in ("layers", "attention_heads", "ffn_dim")
    }
    ids = {"pad_token_id": 0, "bos_token_id": 2, "eos_token_id": 1, "decoder_start_token_id": 1}
    BartConfig(**sizes, **parts, **ids, **changes).save_pretrained(folder)
    return str(folder)


def test_a_head_that_is_not_tied_is_frozen_with_the_embeddings(tmp_path):
    model = Sft(options=ChatOptions(from_=other_model(tmp_path, tie_word_embeddings=False))).model()
    embeddings = model.get_input_embeddings().weight
    assert model.lm_head.weight is not embeddings
    assert not model.lm_head.weight.requires_grad and not embeddings.requires_grad


def test_the_encoder_of_another_architecture_is_frozen_alike(tmp_path):
    task = Pretrain(options=ChatOptions(from_=other_model(tmp_path), freeze="encoder"))
    model, graphs = task.model().train(), []
    model.get_encoder().register_forward_hook(lambda _module, _inputs, out: graphs.append(out[0].requires_grad))
    task.loss(model, task.dummy(2, (5, 4))).sum.backward()
    assert graphs == [False]
    assert model.get_input_embeddings().weight.grad is not None


@pytest.mark.parametrize("freeze", FREEZES)
def test_gradients_are_those_of_what_trains(place, freeze):
    task, model = started(place, freeze)
    task.loss(model, batch_of(task, place)).sum.backward()
    assert {param.grad is not None for param in model.parameters() if param.requires_grad} == {True}
    assert all(param.grad is None for param in model.parameters() if not param.requires_grad)


def kept_by_the_encoder(place, freeze):
    """Tensors that autograd keeps from the encoder's forward for the backward."""
    task, model = started(place, freeze)
    inside, kept = [False], []
    model.encoder.register_forward_pre_hook(lambda *_: inside.__setitem__(0, True))
    model.encoder.register_forward_hook(lambda *_: inside.__setitem__(0, False))

    def keep(tensor):
        kept.extend([tensor.shape] * inside[0])
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        task.loss(model, batch_of(task, place))
    return kept


@pytest.mark.parametrize("freeze", ["encoder", "encoder+embeddings"])
def test_a_frozen_encoder_keeps_no_activations(place, freeze):
    assert not kept_by_the_encoder(place, freeze)


def test_an_encoder_that_trains_keeps_some(place):
    assert len(kept_by_the_encoder(place, "none")) > 10


def test_embeddings_above_a_frozen_encoder_train_through_the_decoder_alone(place):
    task, model = started(place, "encoder")
    graphs = {}
    for name, part in (("encoder", model.encoder), ("decoder", model.decoder)):
        part.embed_tokens.register_forward_hook(lambda *call, name=name: graphs.update({name: call[-1].requires_grad}))
    task.loss(model, batch_of(task, place)).sum.backward()
    assert graphs == {"encoder": False, "decoder": True}
    assert model.shared.weight.grad.abs().sum() > 0


@pytest.mark.parametrize("freeze", FREEZES[1:])
def test_a_frozen_part_changes_no_loss_and_no_other_gradient(place, freeze):
    task, model = started(place, freeze)
    _, free = started(place, "none")
    batch = batch_of(task, place)
    loss, expected = task.loss(model, batch), task.loss(free, batch)
    loss.sum.backward()
    expected.sum.backward()
    assert loss.sum.item() == pytest.approx(expected.sum.item(), rel=1e-6) and loss.count == expected.count
    for (name, param), other in zip(model.decoder.named_parameters(), free.decoder.parameters(), strict=True):
        if "embed_tokens" not in name:
            torch.testing.assert_close(param.grad, other.grad, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("freeze", FREEZES)
def test_a_step_moves_what_trains_and_nothing_else(place, freeze):
    task, model = started(place, freeze)
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    optimizer = task.optimizer(model)
    task.loss(model, batch_of(task, place)).sum.backward()
    optimizer.step()
    moved = {name for name, tensor in model.state_dict().items() if not torch.equal(tensor, before[name])}
    free = {id(param) for param in model.parameters() if param.requires_grad}
    named = dict(model.named_parameters(remove_duplicate=False))
    assert moved == {name for name in before if id(named[name]) in free}


def test_the_loss_is_summed_over_the_tokens_of_the_answers(place):
    task, model = started(place)
    batch = batch_of(task, place)
    with torch.no_grad():
        plain = model(**batch)
    loss = task.loss(model, batch)
    assert loss.count == sum(len(place.store[row]["response"]) for row in range(6))
    assert (loss.sum / loss.count).item() == pytest.approx(plain.loss.item(), rel=1e-5)


def test_padding_changes_no_loss(place):
    task, model = started(place)
    together = task.loss(model, batch_of(task, place)).sum.item()
    alone = [task.loss(model, task.collate([place.store[row]])).sum.item() for row in range(6)]
    assert together == pytest.approx(sum(alone), rel=1e-4)


def test_labels_are_smoothed_in_training_only(place):
    task, model = started(place, label_smoothing=0.2)
    batch = batch_of(task, place)
    logits = model(**batch).logits.flatten(0, 1)
    expected = [
        F.cross_entropy(logits, batch["labels"].flatten(), reduction="sum", label_smoothing=share).item()
        for share in (0.2, 0.0)
    ]
    found = [task.loss(model.train(), batch).sum.item(), task.loss(model.eval(), batch).sum.item()]
    assert found == pytest.approx(expected, rel=1e-5)
    assert abs(found[0] - found[1]) > 1.0


def test_rows_are_padded_each_side_on_its_own(place):
    task = started(place)[0]
    rows = [{"prompt": [5, 6, 1], "response": [7, 1]}, {"prompt": [8, 1], "response": [9, 10, 11, 1]}]
    batch = task.collate(rows)
    assert batch["input_ids"].tolist() == [[5, 6, 1], [8, 1, 0]]
    assert batch["attention_mask"].tolist() == [[1, 1, 1], [1, 1, 0]]
    assert batch["labels"].tolist() == [[7, 1, IGNORED, IGNORED], [9, 10, 11, 1]]
    assert [task.shape(row) for row in rows] == [(3, 2), (2, 4)]


def test_a_dummy_is_a_batch_of_its_shape_in_tokens_that_the_model_knows(place):
    task, model = started(place)
    batch = task.dummy(3, (7, 5))
    assert {name: tuple(tensor.shape) for name, tensor in batch.items()} == {
        "input_ids": (3, 7),
        "attention_mask": (3, 7),
        "labels": (3, 5),
    }
    assert task.loss(model, batch).count == 15


def test_base_has_the_released_model_s_weights():
    with torch.device("meta"):
        model = Pretrain(options=ChatOptions(size="base")).model()
    assert round(sum(param.numel() for param in model.parameters()) / 1e6, 1) == 187.7


@pytest.mark.parametrize("size", SIZES)
def test_a_size_brings_its_lengths_and_batch(size):
    task = Pretrain(size)
    assert (task.worst_shape, task.global_batch) == (SIZES[size].worst_shape, SIZES[size].global_batch)
    assert task.max_tokens == task.worst_shape


def test_a_new_model_has_random_weights_and_a_loaded_one_the_folders(place):
    task, model = started(place)
    assert torch.equal(model.shared.weight, place.net.shared.weight)
    assert not torch.equal(task.model().shared.weight, place.net.shared.weight)


def test_no_model_keeps_a_cache_of_what_it_has_read(place, tmp_path):
    task = task_of(place, tmp_path, use_cache=True)
    models = (task.model(), task.initial_model(), Pretrain("tiny").model())
    assert [model.config.use_cache for model in models] == [False] * 3


def test_a_new_model_has_the_special_tokens_of_our_tokenizers():
    config = Pretrain("tiny").model().config
    assert (config.pad_token_id, config.eos_token_id, config.decoder_start_token_id) == (0, 1, 0)


def test_another_architecture_is_refused_when_the_task_is_made(tmp_path):
    from transformers import GPT2Config

    GPT2Config().save_pretrained(tmp_path)
    with pytest.raises(BadModel, match="is a gpt2 model"):
        Pretrain(options=ChatOptions(from_=str(tmp_path)))


@pytest.fixture
def saved(place, tmp_path):
    """A model of this task, changed and saved as a checkpoint saves it."""
    task, model = started(place)
    with torch.no_grad():
        for param in model.parameters():
            param.mul_(1.1)
    task.save(model, tmp_path, place.store)
    return model.eval(), tmp_path


def test_a_saved_model_loads_with_transformers_alone_and_answers_the_same(place, saved):
    from transformers import AutoModelForSeq2SeqLM, AutoTokenizer

    model, folder = saved
    theirs, tokenizer = AutoModelForSeq2SeqLM.from_pretrained(folder).eval(), AutoTokenizer.from_pretrained(folder)
    asked = [row["prompt"] for row in ROWS[:6]]
    read = tokenizer(asked, return_tensors="pt", padding=True, add_special_tokens=False)
    end = torch.tensor([[1]] * 6)
    inputs = {"input_ids": read.input_ids, "attention_mask": read.attention_mask, "decoder_input_ids": 0 * end}
    with torch.no_grad():
        assert torch.equal(theirs(**inputs).logits, model(**inputs).logits)
    for row, text in zip(place.store, ROWS, strict=True):
        assert tokenizer(text["prompt"], add_special_tokens=False).input_ids == row["prompt"].tolist()[:-1]
    assert (tokenizer.eos_token_id, tokenizer.pad_token_id) == (1, 0)


def test_elsewhere_it_answers_with_a_cache_of_what_it_has_read(saved):
    from transformers import AutoModelForSeq2SeqLM

    theirs = AutoModelForSeq2SeqLM.from_pretrained(saved[1])
    assert theirs.config.use_cache and theirs.generation_config.use_cache
    assert not saved[0].config.use_cache


def test_tied_weights_survive_saving_and_loading(saved):
    model, folder = saved
    loaded = Pretrain(options=ChatOptions(from_=str(folder))).initial_model()
    assert loaded.lm_head.weight is loaded.shared.weight is loaded.encoder.embed_tokens.weight
    assert torch.equal(loaded.shared.weight, model.shared.weight)


def test_a_checkpoint_s_weights_go_back_into_a_new_model(saved, tmp_path_factory):
    from brimful.training.state import load_weights

    model, folder = saved
    checkpoint = tmp_path_factory.mktemp("checkpoint")
    (checkpoint / "model").symlink_to(folder)
    fresh = Pretrain(options=ChatOptions(from_=str(folder))).model()
    load_weights(checkpoint, fresh)
    for name, tensor in model.state_dict().items():
        assert torch.equal(fresh.state_dict()[name], tensor), name
    assert fresh.lm_head.weight is fresh.shared.weight


def edit(folder, **changes):
    file = folder / "config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), **changes}))


def task_of(place, tmp_path, **changes):
    """A task from a copy of the model whose configuration says otherwise."""
    folder = shutil.copytree(place.model, tmp_path / "copy")
    edit(folder, **changes)
    return Pretrain(options=ChatOptions(from_=str(folder)))


def refused(task, store, *words):
    with pytest.raises(BadData) as told:
        task.rows(str(store))
    assert "\n" not in str(told.value)
    for word in (f"{store} cannot train chatlm-pretrain: ", "pack the rows with a tokenizer", *words):
        assert word in str(told.value), str(told.value)


def test_rows_that_the_model_knows_are_taken(place):
    rows = started(place)[0].rows(str(place.store.path))
    assert len(rows) == 24 and rows.sides == ("prompt", "response")


def test_rows_of_other_sides_are_refused(place, tmp_path):
    raw = write_jsonl(tmp_path / "texts.jsonl", [{"text": row["prompt"]} for row in ROWS])
    pack([str(raw)], tokenizer=place.tokenizer, output=tmp_path / "store", options=ROOMY)
    refused(started(place)[0], tmp_path / "store", "its rows have text, not prompt and response")


def test_tokens_that_the_model_does_not_know_are_refused(place, tmp_path):
    vocab = place.store.meta.vocab_size
    refused(
        task_of(place, tmp_path, vocab_size=300),
        place.store.path,
        f"its tokenizer has {vocab:,} tokens and ",
        " knows 300",
    )


def test_another_end_of_text_is_refused(place, tmp_path):
    refused(task_of(place, tmp_path, eos_token_id=5), place.store.path, "its eos is 1 and the model's 5")


def test_one_of_the_models_several_ends_of_text_is_enough(place, tmp_path):
    assert len(task_of(place, tmp_path, eos_token_id=[5, 1]).rows(str(place.store.path))) == 24


def test_rows_packed_with_another_tokenizer_are_refused(place, tmp_path):
    other = make_tokenizer(tmp_path / "other", ROWS[:2])
    pack([str(place.raw)], tokenizer=other, output=tmp_path / "store", options=ROOMY)
    refused(
        started(place)[0],
        tmp_path / "store",
        f"it was packed with another tokenizer than that of {place.model}",
        f"or with that of {place.model}",
    )


def test_a_new_model_takes_any_tokenizer_that_is_not_too_large(place):
    assert len(Pretrain("tiny").rows(str(place.store.path))) == 24


def test_all_that_is_wrong_is_told_at_once(place, tmp_path):
    task = task_of(place, tmp_path, eos_token_id=5, vocab_size=300)
    refused(task, place.store.path, "knows 300; its eos is 1")
