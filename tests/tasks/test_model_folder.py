"""A model folder is loaded completely, with its own tokenizer, or refused."""

import json
import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file

from brimful.errors import BadModel
from brimful.tasks.model_folder import load_model, read_config, resolve, tokenizer_of
from brimful.training.checkpoint import Checkpoints, link
from tests.tasks.tiny import make_model, save


@pytest.fixture
def copy(tiny, tmp_path):
    return shutil.copytree(tiny.model, tmp_path / "model")


def edit(file, **changes):
    content = json.loads(file.read_text())
    content.update(changes)
    file.write_text(json.dumps({key: value for key, value in content.items() if value is not ...}))


def test_every_weight_is_loaded(tiny):
    model = load_model(tiny.model)
    assert not model.training
    for name, tensor in tiny.net.state_dict().items():
        assert torch.equal(model.state_dict()[name], tensor), name


def test_half_precision_weights_become_float32_by_default(tiny, tmp_path):
    save(make_model().to(torch.bfloat16), tmp_path / "half", tiny.tokenizer)
    assert {param.dtype for param in load_model(tmp_path / "half").parameters()} == {torch.float32}
    assert load_model(tmp_path / "half", dtype=torch.bfloat16).dtype == torch.bfloat16


def refused(path, *words, by=load_model):
    with pytest.raises(BadModel) as raised:
        by(path)
    for word in words:
        assert word in str(raised.value)


@pytest.mark.parametrize("kind", ["GPT2", "Bert"])
def test_another_architecture_is_named(tmp_path, kind):
    import transformers

    sizes = {
        "vocab_size": 50,
        "hidden_size": 8,
        "num_hidden_layers": 1,
        "num_attention_heads": 1,
        "intermediate_size": 8,
    }
    config = getattr(transformers, f"{kind}Config")(**sizes)
    made = getattr(transformers, {"GPT2": "GPT2LMHeadModel", "Bert": "BertForMaskedLM"}[kind])(config)
    made.save_pretrained(tmp_path)
    refused(tmp_path, f"is a {kind.lower()} model ({type(made).__name__})", "Try: an encoder-decoder such as T5")


def test_an_unknown_model_type_is_refused(copy):
    edit(copy / "config.json", model_type="novel")
    refused(copy, "the config.json of")


def change_weights(folder, change):
    file = folder / "model.safetensors"
    tensors = load_file(file)
    change(tensors)
    save_file(tensors, file, metadata={"format": "pt"})


NORM = "decoder.block.0.layer.0.layer_norm.weight"


def test_a_missing_tensor_is_named(copy):
    change_weights(copy, lambda tensors: tensors.pop(NORM))
    refused(copy, "1 tensor missing", NORM)


def test_a_tensor_of_another_model_is_named(copy):
    change_weights(copy, lambda tensors: tensors.update({"classifier.weight": torch.zeros(2)}))
    refused(copy, "not in the model", "classifier.weight")


def test_a_tensor_of_another_shape_is_named(copy):
    change_weights(copy, lambda tensors: tensors.update({NORM: torch.zeros(7)}))
    refused(copy, "of another shape", NORM)


def test_many_missing_tensors_are_counted(copy):
    edit(copy / "config.json", num_decoder_layers=3)
    refused(copy, "missing", "more)")


def test_tied_weights_are_not_missing(tiny):
    assert "lm_head.weight" not in load_file(tiny.model / "model.safetensors")
    model = load_model(tiny.model)
    assert model.lm_head.weight.data_ptr() == model.shared.weight.data_ptr()


@pytest.mark.parametrize("damage", [lambda data: data[: len(data) // 2], lambda data: b"\xff" * 64 + data[64:]])
def test_damaged_weights_are_refused(copy, damage):
    file = copy / "model.safetensors"
    file.write_bytes(damage(file.read_bytes()))
    refused(copy, "the weights of")


def test_no_weights_at_all_are_refused(copy):
    (copy / "model.safetensors").unlink()
    refused(copy, "the weights of")


def test_a_damaged_config_is_refused(copy):
    (copy / "config.json").write_text("{")
    refused(copy, "the config.json of")


@pytest.mark.parametrize("name", ["nobody/nothing", "nothing", "./no/such/folder", "/no/such"])
def test_a_name_without_a_folder_is_refused_without_a_network(name, monkeypatch):
    import socket

    monkeypatch.setattr(socket, "socket", lambda *args, **kwargs: pytest.fail("it used the network"))
    refused(name, f"there is no model at {name}", "Hugging Face cache of this machine")


def test_a_model_in_the_hubs_cache_is_found(tiny, tmp_path, monkeypatch):
    import huggingface_hub

    asked = []

    def cached(name, file):
        asked.append((name, file))
        return str(tiny.model / file)

    monkeypatch.setattr(huggingface_hub, "try_to_load_from_cache", cached)
    assert resolve("owner/name") == tiny.model
    assert asked == [("owner/name", "config.json")]


def test_a_file_and_a_folder_of_something_else_are_refused(tmp_path, tiny):
    refused(tiny.raw, "is a file", by=resolve)
    (tmp_path / "notes.txt").write_text("x")
    refused(tmp_path, "is not a model folder", "notes.txt", by=resolve)


@pytest.fixture
def run(tiny, tmp_path):
    """A run folder with two checkpoints."""
    checkpoints = Checkpoints(tmp_path / "run" / "checkpoints")
    for step in (10, 20):
        checkpoints.save(step, lambda folder: shutil.copytree(tiny.model, folder / "model"), needs_bytes=1)
    return tmp_path / "run"


def test_a_run_gives_its_best_model_then_its_last_then_its_newest_checkpoint(run):
    first, second = (run / "checkpoints" / f"step-{step:08}" / "model" for step in (10, 20))
    assert resolve(run) == second
    link(run / "model", second, note=pytest.fail)
    assert resolve(run) == run / "model"
    link(run / "best", first, note=pytest.fail)
    assert resolve(run) == run / "best" and (run / "best").resolve() == first.resolve()


def test_a_checkpoint_gives_its_model(run):
    folder = run / "checkpoints" / "step-00000010"
    assert resolve(folder) == folder / "model"
    assert load_model(folder).config.d_model == 32


def test_a_flipped_byte_in_a_checkpoint_is_found(run):
    folder = run / "checkpoints" / "step-00000010"
    link(run / "best", folder / "model", note=pytest.fail)
    file = folder / "model" / "model.safetensors"
    content = bytearray(file.read_bytes())
    content[-9] ^= 1
    file.write_bytes(content)
    for path in (folder, run):
        refused(path, "model.safetensors is damaged", "Try: another checkpoint")


def test_an_unfinished_checkpoint_is_skipped(run):
    newest = run / "checkpoints" / "step-00000020"
    (newest / "manifest.json").unlink()
    assert resolve(run) == run / "checkpoints" / "step-00000010" / "model"


def test_a_run_of_another_task_is_refused(tmp_path):
    run = tmp_path / "run"
    made = Checkpoints(run / "checkpoints").save(
        5, lambda folder: (folder / "model").mkdir(), needs_bytes=1, facts={"task": "Tagger"}
    )
    for name in ("model", "best"):
        link(run / name, made.path / "model", note=pytest.fail)
    refused(run, "belongs to a run of Tagger, which is not a chat model", by=resolve)
    for tiny in (run / "best", made.path):
        refused(tiny, "belongs to a run of Tagger, which is not a chat model", by=resolve)


def test_a_run_without_a_checkpoint_says_so(run, tmp_path):
    (tmp_path / "new" / "checkpoints").mkdir(parents=True)
    refused(tmp_path / "new", "is a run without a checkpoint yet", by=resolve)
    for step in (10, 20):
        (run / "checkpoints" / f"step-{step:08}" / "manifest.json").unlink()
    refused(run, "is a run without a complete checkpoint (step-00000020: it has no manifest.json, ", by=resolve)


def test_the_tokenizer_encodes_as_data_tokenize_does_and_decodes_back(tiny):
    tokenizer = tokenizer_of(tiny.model)
    for number in range(len(tiny.store)):
        row = tiny.store[number]
        assert tokenizer.encode(tokenizer.decode(row["prompt"])) == row["prompt"].tolist()
    assert (tokenizer.eos_id, tokenizer.pad_id) == (1, 0)
    assert tokenizer.decode([*tokenizer.encode("红𠀀"), *tokenizer.encode("later")]) == "红𠀀"


def test_without_a_tokenizer_it_is_refused(copy):
    (copy / "tokenizer.json").unlink()
    refused(copy, "has no tokenizer.json", by=tokenizer_of)


def test_a_tokenizer_without_eos_is_refused(copy):
    for name in ("tokenizer_config.json", "special_tokens_map.json"):
        edit(copy / name, eos_token=...)
    refused(copy, "names no eos_token", by=tokenizer_of)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"eos_token_id": 5}, "its eos id is 1 and the model's 5"),
        ({"eos_token_id": [5, 6]}, "its eos id is 1 and the model's 5, 6"),
        ({"pad_token_id": 3}, "its pad id is 0 and the model's 3"),
        ({"vocab_size": 300}, "tokens and the model 300"),
    ],
    ids=str,
)
def test_a_tokenizer_with_other_ids_is_refused(copy, changes, words):
    edit(copy / "config.json", **changes)
    refused(copy, words, by=tokenizer_of)


def test_one_of_several_eos_ids_is_enough(copy):
    edit(copy / "config.json", eos_token_id=[5, 1])
    assert tokenizer_of(copy).eos_id == 1


def test_a_config_is_read_without_weights(copy):
    (copy / "model.safetensors").unlink()
    assert read_config(copy).d_model == 32


def test_loading_prints_nothing(tiny, capfd):
    load_model(tiny.model)
    out = capfd.readouterr()
    assert (out.out, out.err) == ("", "")
