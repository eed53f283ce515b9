"""The chat tasks: options, frozen parts, the loss, accepted rows, and a saved model that loads anywhere."""

import json
import shutil
import subprocess
import sys

import pytest
import torch
import torch.nn.functional as F

from brimful.data.tokenize import tokenize
from brimful.errors import BadData, BadModel, BadOption
from brimful.task import IGNORED
from brimful.tasks.language import TRY_MODEL, LanguageOptions, Pretrain, Sft, SftOptions
from brimful.tasks.presets import PRESETS
from brimful.training.run import Request, RunFolder
from tests.tasks.tiny import ROOMY, ROWS, make_tokenizer, write_jsonl

FREEZES = ("none", "encoder", "encoder+embeddings")


def task_and_model(tiny, freeze=None, kind=Pretrain, **options):
    """A task and its initial model in training mode, from the shared weights."""
    task = kind(options=LanguageOptions(model=str(tiny.model), freeze=freeze, **options))
    return task, task.initial_model().train()


def batch_of(task, tiny, rows=6):
    return task.collate(tiny.store.__getitems__(list(range(rows))))


def trained_parts(model):
    """The parts whose weights are trained."""
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
def test_all_but_the_frozen_parts_are_trained(tiny, freeze):
    task, model = task_and_model(tiny, freeze)
    assert trained_parts(model) == trained_parts(task.model()) == EXPECTED[freeze]


@pytest.mark.parametrize(("kind", "freeze"), [(Pretrain, "none"), (Sft, "encoder+embeddings")])
def test_pretraining_freezes_nothing_and_fine_tuning_encoder_and_embeddings(tiny, kind, freeze):
    assert trained_parts(task_and_model(tiny, kind=kind)[1]) == EXPECTED[freeze]


def test_fine_tuning_new_weights_freezes_nothing():
    assert trained_parts(Sft(options=SftOptions(model="chatlm-tiny")).model()) == EXPECTED["none"]


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
    model = Sft(options=SftOptions(model=other_model(tmp_path, tie_word_embeddings=False))).model()
    embeddings = model.get_input_embeddings().weight
    assert model.lm_head.weight is not embeddings
    assert not model.lm_head.weight.requires_grad and not embeddings.requires_grad


def test_the_encoder_of_another_architecture_can_be_frozen(tmp_path):
    task = Pretrain(options=LanguageOptions(model=other_model(tmp_path), freeze="encoder"))
    model, graphs = task.model().train(), []
    model.get_encoder().register_forward_hook(lambda _module, _inputs, out: graphs.append(out[0].requires_grad))
    task.loss(model, task.dummy(2, (5, 4))).sum.backward()
    assert graphs == [False]
    assert model.get_input_embeddings().weight.grad is not None


@pytest.mark.parametrize("freeze", FREEZES)
def test_only_trained_weights_have_gradients(tiny, freeze):
    task, model = task_and_model(tiny, freeze)
    task.loss(model, batch_of(task, tiny)).sum.backward()
    assert {param.grad is not None for param in model.parameters() if param.requires_grad} == {True}
    assert all(param.grad is None for param in model.parameters() if not param.requires_grad)


def saved_by_the_encoder(tiny, freeze):
    """Tensors that autograd keeps from the encoder's forward for the backward."""
    task, model = task_and_model(tiny, freeze)
    inside, kept = [False], []
    model.encoder.register_forward_pre_hook(lambda *_: inside.__setitem__(0, True))
    model.encoder.register_forward_hook(lambda *_: inside.__setitem__(0, False))

    def keep(tensor):
        kept.extend([tensor.shape] * inside[0])
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        task.loss(model, batch_of(task, tiny))
    return kept


@pytest.mark.parametrize("freeze", ["encoder", "encoder+embeddings"])
def test_a_frozen_encoder_keeps_no_activations(tiny, freeze):
    assert not saved_by_the_encoder(tiny, freeze)


def test_a_trained_encoder_keeps_activations(tiny):
    assert len(saved_by_the_encoder(tiny, "none")) > 10


def test_embeddings_above_a_frozen_encoder_train_through_the_decoder_alone(tiny):
    task, model = task_and_model(tiny, "encoder")
    graphs = {}
    for name, part in (("encoder", model.encoder), ("decoder", model.decoder)):
        part.embed_tokens.register_forward_hook(lambda *call, name=name: graphs.update({name: call[-1].requires_grad}))
    task.loss(model, batch_of(task, tiny)).sum.backward()
    assert graphs == {"encoder": False, "decoder": True}
    assert model.shared.weight.grad.abs().sum() > 0


@pytest.mark.parametrize("freeze", FREEZES[1:])
def test_a_frozen_part_changes_no_loss_and_no_other_gradient(tiny, freeze):
    task, model = task_and_model(tiny, freeze)
    _, free = task_and_model(tiny, "none")
    batch = batch_of(task, tiny)
    loss, expected = task.loss(model, batch), task.loss(free, batch)
    loss.sum.backward()
    expected.sum.backward()
    assert loss.sum.item() == pytest.approx(expected.sum.item(), rel=1e-6) and loss.count == expected.count
    for (name, param), other in zip(model.decoder.named_parameters(), free.decoder.parameters(), strict=True):
        if "embed_tokens" not in name:
            torch.testing.assert_close(param.grad, other.grad, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("freeze", FREEZES)
def test_a_step_changes_the_trained_weights_only(tiny, freeze):
    task, model = task_and_model(tiny, freeze)
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    optimizer = task.optimizer(model)
    task.loss(model, batch_of(task, tiny)).sum.backward()
    optimizer.step()
    moved = {name for name, tensor in model.state_dict().items() if not torch.equal(tensor, before[name])}
    free = {id(param) for param in model.parameters() if param.requires_grad}
    named = dict(model.named_parameters(remove_duplicate=False))
    assert moved == {name for name in before if id(named[name]) in free}


def test_the_loss_is_summed_over_the_tokens_of_the_answers(tiny):
    task, model = task_and_model(tiny)
    batch = batch_of(task, tiny)
    with torch.no_grad():
        plain = model(**batch)
    loss = task.loss(model, batch)
    assert loss.count == sum(len(tiny.store[row]["response"]) for row in range(6))
    assert (loss.sum / loss.count).item() == pytest.approx(plain.loss.item(), rel=1e-5)


def test_padding_changes_no_loss(tiny):
    task, model = task_and_model(tiny)
    together = task.loss(model, batch_of(task, tiny)).sum.item()
    alone = [task.loss(model, task.collate([tiny.store[row]])).sum.item() for row in range(6)]
    assert together == pytest.approx(sum(alone), rel=1e-4)


def test_labels_are_smoothed_in_training_only(tiny):
    task, model = task_and_model(tiny, label_smoothing=0.2)
    batch = batch_of(task, tiny)
    logits = model(**batch).logits.flatten(0, 1)
    expected = [
        F.cross_entropy(logits, batch["labels"].flatten(), reduction="sum", label_smoothing=share).item()
        for share in (0.2, 0.0)
    ]
    found = [task.loss(model.train(), batch).sum.item(), task.loss(model.eval(), batch).sum.item()]
    assert found == pytest.approx(expected, rel=1e-5)
    assert abs(found[0] - found[1]) > 1.0


def test_rows_are_padded_each_side_on_its_own(tiny):
    task = task_and_model(tiny)[0]
    rows = [{"prompt": [5, 6, 1], "response": [7, 1]}, {"prompt": [8, 1], "response": [9, 10, 11, 1]}]
    batch = task.collate(rows)
    assert batch["input_ids"].tolist() == [[5, 6, 1], [8, 1, 0]]
    assert batch["attention_mask"].tolist() == [[1, 1, 1], [1, 1, 0]]
    assert batch["labels"].tolist() == [[7, 1, IGNORED, IGNORED], [9, 10, 11, 1]]
    assert [task.shape(row) for row in rows] == [(3, 2), (2, 4)]


def test_a_dummy_is_a_batch_of_its_shape_in_tokens_that_the_model_knows(tiny):
    task, model = task_and_model(tiny)
    batch = task.dummy(3, (7, 5))
    assert {name: tuple(tensor.shape) for name, tensor in batch.items()} == {
        "input_ids": (3, 7),
        "attention_mask": (3, 7),
        "labels": (3, 5),
    }
    assert task.loss(model, batch).count == 15


def test_base_has_the_released_model_s_weights():
    with torch.device("meta"):
        model = Pretrain(options=LanguageOptions(model="chatlm-base")).model()
    assert round(sum(param.numel() for param in model.parameters()) / 1e6, 1) == 187.7


@pytest.mark.parametrize("name", ["chatlm-tiny", "chatlm-base"])
def test_a_preset_brings_its_lengths_and_batch(name):
    task, preset = Pretrain(LanguageOptions(model=name)), PRESETS[name]
    assert (task.worst_shape, task.global_batch) == (preset.worst_shape, preset.global_batch)
    assert task.max_tokens == task.worst_shape


def test_a_new_model_has_random_weights_and_a_loaded_one_the_folders(tiny):
    task, model = task_and_model(tiny)
    assert torch.equal(model.shared.weight, tiny.net.shared.weight)
    assert not torch.equal(task.model().shared.weight, tiny.net.shared.weight)


def test_training_models_have_no_key_value_cache(tiny, tmp_path):
    task = task_of(tiny, tmp_path, use_cache=True)
    models = (task.model(), task.initial_model(), Pretrain(LanguageOptions(model="chatlm-tiny")).model())
    assert [model.config.use_cache for model in models] == [False] * 3


def test_a_new_model_has_the_special_tokens_of_our_tokenizers():
    config = Pretrain(LanguageOptions(model="chatlm-tiny")).model().config
    assert (config.pad_token_id, config.eos_token_id, config.decoder_start_token_id) == (0, 1, 0)


def test_another_architecture_is_refused_when_the_task_is_made(tmp_path):
    from transformers import BertConfig

    BertConfig(architectures=["BertForMaskedLM"]).save_pretrained(tmp_path)
    with pytest.raises(BadModel, match="is a bert model"):
        Pretrain(options=LanguageOptions(model=str(tmp_path)))


@pytest.fixture
def saved(tiny, tmp_path):
    """A model of this task, changed and saved as a checkpoint saves it."""
    task, model = task_and_model(tiny)
    with torch.no_grad():
        for param in model.parameters():
            param.mul_(1.1)
    task.save(model, tmp_path, tiny.store)
    return model.eval(), tmp_path


def test_a_saved_model_loads_with_transformers_alone_and_answers_the_same(tiny, saved):
    from transformers import AutoModelForSeq2SeqLM, AutoTokenizer

    model, folder = saved
    theirs, tokenizer = AutoModelForSeq2SeqLM.from_pretrained(folder).eval(), AutoTokenizer.from_pretrained(folder)
    asked = [row["prompt"] for row in ROWS[:6]]
    read = tokenizer(asked, return_tensors="pt", padding=True, add_special_tokens=False)
    end = torch.tensor([[1]] * 6)
    inputs = {"input_ids": read.input_ids, "attention_mask": read.attention_mask, "decoder_input_ids": 0 * end}
    with torch.no_grad():
        assert torch.equal(theirs(**inputs).logits, model(**inputs).logits)
    for row, text in zip(tiny.store, ROWS, strict=True):
        assert tokenizer(text["prompt"], add_special_tokens=False).input_ids == row["prompt"].tolist()[:-1]
    assert (tokenizer.eos_token_id, tokenizer.pad_token_id) == (1, 0)


def test_a_saved_model_generates_with_a_key_value_cache(saved):
    from transformers import AutoModelForSeq2SeqLM

    theirs = AutoModelForSeq2SeqLM.from_pretrained(saved[1])
    assert theirs.config.use_cache and theirs.generation_config.use_cache
    assert not saved[0].config.use_cache


def test_tied_weights_survive_saving_and_loading(saved):
    model, folder = saved
    loaded = Pretrain(options=LanguageOptions(model=str(folder))).initial_model()
    assert loaded.lm_head.weight is loaded.shared.weight is loaded.encoder.embed_tokens.weight
    assert torch.equal(loaded.shared.weight, model.shared.weight)


def test_a_checkpoint_s_weights_go_back_into_a_new_model(saved, tmp_path_factory):
    from brimful.training.state import load_model

    model, folder = saved
    checkpoint = tmp_path_factory.mktemp("checkpoint")
    (checkpoint / "model").symlink_to(folder)
    fresh = Pretrain(options=LanguageOptions(model=str(folder))).model()
    load_model(checkpoint, fresh)
    for name, tensor in model.state_dict().items():
        assert torch.equal(fresh.state_dict()[name], tensor), name
    assert fresh.lm_head.weight is fresh.shared.weight


def edit(folder, **changes):
    file = folder / "config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), **changes}))


def task_of(tiny, tmp_path, **changes):
    """A task from a copy of the model whose configuration says otherwise."""
    folder = shutil.copytree(tiny.model, tmp_path / "copy")
    edit(folder, **changes)
    return Pretrain(options=LanguageOptions(model=str(folder)))


def refused(task, store, *words):
    with pytest.raises(
        BadData, match="Try: the raw files, or `brimful data tokenize FILES --model .* --output STORE`"
    ) as raised:
        task.rows(str(store))
    for word in (f"{store} cannot train pretrain: ", *words):
        assert word in str(raised.value)


def test_rows_whose_tokens_the_model_knows_are_accepted(tiny):
    rows = task_and_model(tiny)[0].rows(str(tiny.store.path))
    assert len(rows) == 24 and rows.fields == ("prompt", "response")


def test_rows_without_prompt_and_response_are_refused(tiny, tmp_path):
    raw = write_jsonl(tmp_path / "texts.jsonl", [{"text": row["prompt"]} for row in ROWS])
    tokenize([str(raw)], tokenizer=tiny.tokenizer, output=tmp_path / "store", options=ROOMY)
    refused(task_and_model(tiny)[0], tmp_path / "store", "its rows have text, not prompt and response")


def test_a_larger_vocabulary_is_refused(tiny, tmp_path):
    vocab = tiny.store.meta.vocab_size
    refused(
        task_of(tiny, tmp_path, vocab_size=300),
        tiny.store.path,
        f"its tokenizer has {vocab:,} tokens and the model 300",
    )


def test_another_eos_id_is_refused(tiny, tmp_path):
    refused(task_of(tiny, tmp_path, eos_token_id=5), tiny.store.path, "its eos id is 1 and the model's 5")


def test_one_of_several_eos_ids_is_enough(tiny, tmp_path):
    assert len(task_of(tiny, tmp_path, eos_token_id=[5, 1]).rows(str(tiny.store.path))) == 24


def test_rows_of_another_tokenizer_are_refused(tiny, tmp_path):
    other = make_tokenizer(tmp_path / "other", ROWS[:2])
    tokenize([str(tiny.raw)], tokenizer=other, output=tmp_path / "store", options=ROOMY)
    refused(
        task_and_model(tiny)[0],
        tmp_path / "store",
        f"it was made with another tokenizer than {tiny.model}",
    )


def test_a_new_model_accepts_any_tokenizer_that_is_small_enough(tiny):
    assert len(Pretrain(LanguageOptions(model="chatlm-tiny")).rows(str(tiny.store.path))) == 24


def test_all_problems_of_a_store_are_reported_together(tiny, tmp_path):
    task = task_of(tiny, tmp_path, eos_token_id=5, vocab_size=300)
    refused(task, tiny.store.path, "the model 300 and its eos id is 1")


def problems(**options):
    with pytest.raises(BadOption) as raised:
        LanguageOptions(**options)
    return str(raised.value)


@pytest.mark.parametrize(
    ("options", "problem"),
    [
        ({"freeze": "decoder"}, "freeze='decoder' must be one of encoder+embeddings, encoder, embeddings, none."),
        ({"model": "huge"}, f"model='huge' does not exist. {TRY_MODEL}"),
        ({"model": ""}, f"model='' does not exist. {TRY_MODEL}"),
        ({"model": "chatlm-huge"}, f"model='chatlm-huge' does not exist. {TRY_MODEL}"),
        ({"model": "no/such/model"}, f"model='no/such/model' does not exist. {TRY_MODEL}"),
        ({"tokenizer": "missing"}, "tokenizer='missing' does not exist. Try: another folder."),
    ],
    ids=str,
)
def test_an_option_that_cannot_work_is_refused(options, problem):
    assert problems(**options) == problem


@pytest.mark.parametrize(
    ("options", "problem"),
    [
        ({"chat_template": "chatml"}, "chat_template= is for causal models"),
        ({"train_on": "all"}, "train_on= is for causal models"),
        (
            {"freeze": "embeddings"},
            "freeze='embeddings' is not a part of a t5 model. Try: encoder\\+embeddings, encoder, none",
        ),
    ],
    ids=str,
)
def test_an_option_of_causal_models_is_refused_for_an_encoder_decoder(options, problem):
    with pytest.raises(BadOption, match=problem):
        Pretrain(options=LanguageOptions(model="chatlm-tiny", **options))


@pytest.mark.parametrize("share", [0, 0.1, 0.99])
def test_label_smoothing_is_a_share(share):
    assert LanguageOptions(label_smoothing=share).label_smoothing == share


@pytest.mark.parametrize("share", [-0.1, 1, 2.0, float("nan"), "0.1", True, None])
def test_label_smoothing_outside_its_range_is_refused(share):
    assert problems(label_smoothing=share) == f"label_smoothing={share!r} must be at least 0 and below 1."


@pytest.mark.parametrize(
    ("max_tokens", "lengths"), [(256, (256,)), ("256", (256,)), ("256,320", (256, 320)), (" 128 , 64 ", (128, 64))]
)
def test_max_tokens_is_one_length_for_both_sides_or_one_each(max_tokens, lengths):
    assert LanguageOptions(max_tokens=max_tokens).lengths == lengths


@pytest.mark.parametrize("value", [0, -5, "many", "1,2,3", "256,", "", "2.5", "2²"])
def test_max_tokens_that_are_not_positive_numbers_are_refused(value):
    assert problems(max_tokens=value).startswith(f"max_tokens={value!r} must be one or two positive numbers")


def test_all_problems_are_reported_together():
    message = problems(freeze="x", label_smoothing=2, model="chatlm-huge", max_tokens="no")
    assert all(f"{name}=" in message for name in ("freeze", "label_smoothing", "model", "max_tokens"))


def test_the_options_are_imported_without_torch():
    script = "import sys, brimful.tasks.language; assert 'torch' not in sys.modules"
    process = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert process.returncode == 0, process.stderr


def test_a_resumed_run_uses_its_own_copies_of_what_is_gone(tiny, tmp_path):
    RunFolder(tmp_path).write_request(Request(task="sft", data="rows", run="", prepared={"data": "data/train-0"}))
    tokenizer, model = tmp_path / "data" / "train-0" / "tokenizer", tmp_path / "model"
    for folder in (tokenizer, model):
        folder.mkdir(parents=True)
    gone = {"model": "/gone", "tokenizer": "/gone", "freeze": "none"}
    assert LanguageOptions.on_resume(gone, tmp_path) == {
        "model": str(model),
        "tokenizer": str(tokenizer),
        "freeze": "none",
    }
    assert LanguageOptions.on_resume({"model": str(tiny.model)}, tmp_path) == {"model": str(tiny.model)}
    assert LanguageOptions.on_resume({"model": "chatlm-tiny"}, tmp_path) == {"model": "chatlm-tiny"}
