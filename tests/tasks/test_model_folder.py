"""A model folder is loaded completely, with its own tokenizer, or refused."""

import json
import shutil
import threading

import pytest
import torch
from safetensors.torch import load_file, save_file

from brimful.data.tokenizer.folder import TokenizerFacts
from brimful.errors import BadModel
from brimful.tasks.model_folder import ModelTokenizer, load_model, read_config, resolve, tokenizer_of
from brimful.training.checkpoint import Checkpoints, link
from tests.tasks.chat_tokenizers import save_tokenizer
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


def test_another_architecture_is_named(tmp_path):
    import transformers

    sizes = {
        "vocab_size": 50,
        "hidden_size": 8,
        "num_hidden_layers": 1,
        "num_attention_heads": 1,
        "intermediate_size": 8,
    }
    transformers.BertForMaskedLM(transformers.BertConfig(**sizes)).save_pretrained(tmp_path)
    refused(
        tmp_path,
        "is a bert model (BertForMaskedLM), which does not write text",
        "Try: a causal model such as Qwen or Llama, or an encoder-decoder such as T5",
    )


def test_a_model_with_code_of_its_own_is_refused(copy):
    edit(copy / "config.json", model_type="novel", auto_map={"AutoConfig": "code.Config"})
    (copy / "code.py").write_text("raise SystemExit")
    refused(copy, "needs trust_remote_code", "'novel'", "Brimful does not run")


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


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
def test_a_tensor_that_is_not_finite_is_named(copy, value):
    change_weights(copy, lambda tensors: tensors[NORM].__setitem__(3, value))
    refused(copy, f"{copy} has NaN or inf in {NORM!r}. Try: another copy")


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


@pytest.mark.parametrize("name", ["nothing", "./no/such/folder", "/no/such"])
def test_a_name_without_a_folder_is_refused_without_a_network(name, monkeypatch):
    import socket

    monkeypatch.setattr(socket, "socket", lambda *args, **kwargs: pytest.fail("it used the network"))
    refused(name, f"there is no model at {name}", "Try: a run, a model folder, or owner/name on the Hugging Face hub")


@pytest.fixture
def hub(monkeypatch):
    """Stands for the hub's client: what its cache has, and what a download gives or raises. Keeps what it was asked for."""
    import huggingface_hub

    class Hub:
        def __init__(self):
            self.cached = self.downloaded = FileNotFoundError("nothing")
            self.asked = []

        def snapshot_download(self, name, *, allow_patterns, local_files_only=False):
            assert not any(pattern.endswith((".py", ".bin", "*")) for pattern in allow_patterns)
            self.asked.append(f"{'look up' if local_files_only else 'download'} {name}")
            answer = self.cached if local_files_only else self.downloaded
            if isinstance(answer, Exception):
                raise answer
            return str(answer)

    one = Hub()
    monkeypatch.setattr(huggingface_hub, "snapshot_download", one.snapshot_download)
    return one


def test_a_model_in_the_hubs_cache_is_found_without_a_download(tiny, hub):
    hub.cached = tiny.model
    assert resolve("owner/name") == tiny.model
    assert hub.asked == ["look up owner/name"]


def test_a_model_that_is_not_in_the_cache_is_downloaded(tiny, hub):
    hub.downloaded = tiny.model
    assert resolve("owner/name") == tiny.model
    assert hub.asked == ["look up owner/name", "download owner/name"]


def test_a_model_that_is_only_partly_in_the_cache_is_downloaded(tiny, hub, copy):
    (copy / "model.safetensors").unlink()
    hub.cached, hub.downloaded = copy, tiny.model
    assert resolve("owner/name") == tiny.model


def test_a_folder_is_preferred_to_the_hub(hub, copy, monkeypatch):
    (copy.parent / "owner").mkdir()
    shutil.copytree(copy, copy.parent / "owner/name")
    monkeypatch.chdir(copy.parent)
    assert str(resolve("owner/name")) == "owner/name" and not hub.asked


@pytest.mark.parametrize(
    ("error", "words"),
    [
        ("GatedRepoError", ["owner/name is gated on the Hugging Face hub", "Try: accept its terms there"]),
        ("RepositoryNotFoundError", ["there is no model at owner/name, and none of that name", "Try: another name"]),
        ("LocalEntryNotFoundError", ["there is no model at owner/name", "hub cannot be reached", "Try: a folder"]),
        ("timed out", ["owner/name cannot be downloaded from the hub", "timed out", "Try: again later"]),
    ],
)
def test_what_keeps_a_model_from_being_downloaded_is_said(hub, error, words):
    from huggingface_hub import errors

    kind = getattr(errors, error, None)
    hub.downloaded = OSError(error) if kind is None else kind.__new__(kind)
    refused("owner/name", *words, by=resolve)


def test_a_name_on_the_hub_without_a_model_is_refused(hub, tmp_path):
    hub.downloaded = tmp_path
    refused("owner/name", "owner/name on the hub has no config.json", by=resolve)


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
    refused(run, "belongs to a run of Tagger, which is not a language model", by=resolve)
    for tiny in (run / "best", made.path):
        refused(tiny, "belongs to a run of Tagger, which is not a language model", by=resolve)


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


@pytest.mark.parametrize("kind", ["bytes", "pieces"])
def test_the_bytes_of_tokens_are_those_of_the_text(kind, tmp_path):
    """Also of a character that the tokenizer writes as several tokens."""
    text = "Hello, 世界 𠀀\n你好！"
    folder = save_tokenizer(tmp_path / kind, kind=kind)
    tokenizer = ModelTokenizer(folder, TokenizerFacts.read(folder))
    tokens = tokenizer.begin(text)
    assert b"".join(map(tokenizer.token_bytes, tokens)).decode().removeprefix(" ") == text
    assert tokenizer.token_bytes(tokenizer.eos_id) == b"</s>"
    assert tokenizer.token_bytes(10**6) == b"", "a model may have more tokens than its tokenizer"


def test_other_threads_run_while_a_long_text_is_tokenized(tiny):
    """A server's engine among them. Tokenizing takes a tenth of a second, a turn of the other thread a millisecond."""
    turns, end = [], threading.Event()

    def other():
        while not end.wait(0.001):
            turns.append(1)

    tokenizer, thread = tokenizer_of(tiny.model), threading.Thread(target=other)
    tokenizer.encode("warm")
    thread.start()
    before = len(turns)
    tokenizer.encode("a" * 1_000_000)
    during = len(turns) - before
    end.set()
    thread.join()
    assert during > 2
