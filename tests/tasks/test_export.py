"""Model folders that others load: merged adapters and converted models, whole or not at all."""

import json
import os

import pytest
import torch

from brimful.data.pipeline import PeakMemory
from brimful.errors import BadData, BadModel, BadOption
from brimful.tasks import adapters, export
from brimful.tasks.adapters import Lora, load_base, merge, with_adapter
from brimful.tasks.export import copy_folder, new_folder, stored_tensors, write_model
from tests.tasks.adapted import add_noise, logits, make_base


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    return make_base(tmp_path_factory.mktemp("base") / "qwen")


def adapter_of(base, folder, lora="r=4", load_in=None, dtype=torch.float32, noise=0.03):
    """A saved adapter, and the model it came from."""
    pytest.importorskip("peft")
    if load_in:
        pytest.importorskip("bitsandbytes")
    folder.mkdir()
    model = add_noise(with_adapter(load_base(base, load_in, dtype=dtype), Lora.parse(lora)), noise)
    adapters.save(model, folder)
    return folder, model


def load(folder, dtype=torch.float32):
    from transformers import AutoModelForCausalLM

    model, info = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype, output_loading_info=True)
    assert not info["missing_keys"] and not info["unexpected_keys"]
    return model


def distance(one, other):
    return float((one - other).abs().max() / other.abs().max())


KINDS = pytest.mark.parametrize("kind", ["qwen2", "llama"])
LORAS = pytest.mark.parametrize("lora", ["r=4", "r=4,dora", "r=8,alpha=4,rslora", "r=2,targets=q_proj+down_proj"])
LARGE = 0.3
"""Noise in an adapter that makes it larger than the weights beside it."""


@KINDS
@LORAS
def test_merged_weights_are_those_of_float64(tmp_path, kind, lora):
    """Of the weights themselves, so it holds however the model amplifies the rounding of a forward."""
    base = make_base(tmp_path / "base", kind, shards="20KB")
    folder, model = adapter_of(base, tmp_path / "adapter", lora, noise=LARGE)
    merge(folder, tmp_path / "merged", torch.float32)
    merged, own = load(tmp_path / "merged").state_dict(), load(base).state_dict()
    layers = dict(adapters._lora_layers(model))
    assert layers
    for name, layer in layers.items():
        down, up = (part["default"].weight.detach().double() for part in (layer.lora_A, layer.lora_B))
        expected = own[f"{name}.weight"].double() + layer.scaling["default"] * up @ down
        if "dora" in lora:
            lengths = layer.lora_magnitude_vector["default"].weight.detach().double()
            expected *= (lengths / expected.norm(dim=1))[:, None]
        assert distance(merged[f"{name}.weight"].double(), expected) < 1e-6
    others = merged.keys() - {f"{name}.weight" for name in layers}
    assert all(torch.equal(merged[name], own[name]) for name in others)


@KINDS
@LORAS
def test_merged_equals_the_adapter(tmp_path, kind, lora):
    """To 1e-6 with weights as transformers makes them (std 0.02)."""
    base = make_base(tmp_path / "base", kind, std=0.02, shards="20KB")
    folder, model = adapter_of(base, tmp_path / "adapter", lora)
    assert distance(logits(load(base)), logits(model)) > 0.01
    merge(folder, tmp_path / "merged", torch.float32)
    assert distance(logits(load(tmp_path / "merged")), logits(model)) < 1e-6


@KINDS
@LORAS
def test_merged_equals_a_large_adapter_without_the_rounding_of_the_forward(tmp_path, kind, lora):
    """In float64, since in float32 such a forward is itself off by up to 2e-5. What is left is that the file is float32."""
    base = make_base(tmp_path / "base", kind)
    folder, model = adapter_of(base, tmp_path / "adapter", lora, noise=LARGE)
    merge(folder, tmp_path / "merged", torch.float32)
    found, expected = (logits(one.double(), torch.float64) for one in (load(tmp_path / "merged"), model))
    assert distance(found, expected) < 1e-5


def test_a_merged_folder_is_plain_bf16_with_everything_to_serve_it(base, tmp_path):
    folder, model = adapter_of(base, tmp_path / "adapter")
    (folder / "tokenizer.json").write_text('{"of": "adapter"}')
    before = {file.name: file.read_bytes() for file in base.iterdir()}
    assert merge(folder, tmp_path / "merged") == base
    merged = tmp_path / "merged"
    assert {file.name for file in merged.iterdir()} == {
        "config.json", "generation_config.json", "model.safetensors", "tokenizer.json"
    }  # fmt: skip
    assert {one.dtype for one in stored_tensors(merged).values()} == {"BF16"}
    config = json.loads((merged / "config.json").read_text())
    assert (
        config["use_cache"] is True
        and config["dtype"] == "bfloat16"
        and config["architectures"] == ["Qwen2ForCausalLM"]
    )
    assert (merged / "tokenizer.json").read_text() == '{"of": "adapter"}'
    assert distance(logits(load(merged, torch.bfloat16)), logits(model)) < 0.05
    assert before == {file.name: file.read_bytes() for file in base.iterdir()}


@pytest.mark.parametrize("load_in", ["4bit", "8bit"])
def test_an_adapter_of_a_quantized_base_is_merged_into_the_unquantized_one(base, tmp_path, load_in):
    folder, model = adapter_of(base, tmp_path / "adapter", load_in=load_in, dtype=torch.bfloat16)
    merge(folder, tmp_path / "merged", torch.float32)
    weights, own = load(tmp_path / "merged").state_dict(), load(base).state_dict()
    layer = model.get_base_model().model.layers[1].mlp.up_proj
    delta = layer.lora_B["default"].weight @ layer.lora_A["default"].weight * layer.scaling["default"]
    name = "model.layers.1.mlp.up_proj.weight"
    assert distance(weights[name], own[name] + delta.detach()) < 1e-6
    assert torch.equal(weights["model.norm.weight"], own["model.norm.weight"])


def test_another_base_is_refused_and_nothing_is_written(base, tmp_path):
    folder, _ = adapter_of(base, tmp_path / "adapter")
    with pytest.raises(BadModel, match="is an adapter of another base"):
        merge(folder, tmp_path / "merged", base=make_base(tmp_path / "other", seed=1))
    assert not list(tmp_path.glob("*merged*"))


def test_an_adapter_of_unknown_origin_must_at_least_have_the_layers_of_the_base(base, tmp_path):
    folder, _ = adapter_of(base, tmp_path / "adapter")
    (folder / adapters.BASE).unlink()
    with pytest.raises(BadModel, match=r"adapter of another base: .* not in the model"):
        merge(folder, tmp_path / "merged", base=make_base(tmp_path / "other", num_hidden_layers=1))


def test_names_that_differ_between_files_and_code_are_merged_as_a_whole(tmp_path, monkeypatch):
    base = make_base(tmp_path / "base", std=0.02)
    folder, model = adapter_of(base, tmp_path / "adapter")
    monkeypatch.setattr(adapters, "_lora_layers", lambda model: [("model.elsewhere", None)])
    phrases = []
    merge(folder, tmp_path / "merged", torch.float32, phrases.append)
    assert phrases == ["merging the model as a whole"]
    assert distance(logits(load(tmp_path / "merged")), logits(model)) < 1e-6


def test_a_model_is_converted_without_being_in_memory(tmp_path):
    source = make_base(
        tmp_path / "large", "llama", vocab_size=40_000, hidden_size=256, intermediate_size=1024, num_hidden_layers=6
    )
    size = sum(one.size_bytes for one in stored_tensors(source).values())
    largest = max(one.size_bytes for one in stored_tensors(source).values())
    with PeakMemory() as peak:
        write_model(source, tmp_path / "small", dtype=torch.bfloat16)
    assert peak.bytes - peak.start_bytes < 2 * largest < size
    assert (tmp_path / "small" / "model.safetensors").stat().st_size < 0.51 * size


def test_without_a_dtype_weights_are_copied_to_the_byte(base, tmp_path):
    write_model(base, tmp_path / "copy")
    for name in ("model.safetensors", "tokenizer.json"):
        assert (tmp_path / "copy" / name).read_bytes() == (base / name).read_bytes()


@pytest.mark.parametrize("kind", ["file", "folder", "link"])
def test_nothing_is_overwritten(base, tmp_path, kind):
    output = tmp_path / "output"
    if kind == "file":
        output.write_text("mine")
    elif kind == "link":
        output.symlink_to("nowhere")
    else:
        (output / "mine").mkdir(parents=True)
    with pytest.raises(BadOption, match="exists already. Try: the name of a new folder."):
        write_model(base, output)
    assert not (output / "config.json").exists()


def test_an_empty_folder_is_filled(base, tmp_path):
    (tmp_path / "output").mkdir()
    write_model(base, tmp_path / "output")
    assert (tmp_path / "output" / "config.json").is_file()


def test_an_interrupted_export_leaves_nothing_and_the_next_one_works(base, tmp_path):
    def interrupt(phrase):
        if " 5 of" in phrase:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        write_model(base, tmp_path / "output", dtype=torch.bfloat16, progress=interrupt)
    assert not list(tmp_path.iterdir())
    (tmp_path / ".output.part" / "old").mkdir(parents=True)  # of a process that was killed
    write_model(base, tmp_path / "output")
    assert not (tmp_path / "output" / "old").exists() and not (tmp_path / ".output.part").exists()


def test_too_little_space_is_said_before_anything_is_written(tmp_path):
    with (
        pytest.raises(BadOption, match=r"takes .* is free there"),
        new_folder(tmp_path / "output", needs_bytes=1 << 60),
    ):
        pass
    assert not list(tmp_path.iterdir())


@pytest.mark.skipif(os.getuid() == 0, reason="root may write anywhere")
def test_a_folder_that_cannot_be_written_is_one_message(base, tmp_path):
    tmp_path.chmod(0o500)
    with pytest.raises(BadData, match="Permission denied"):
        copy_folder(base, tmp_path / "output")
    tmp_path.chmod(0o700)


def test_a_missing_shard_is_named(tmp_path):
    base = make_base(tmp_path / "base", shards="20KB")
    gone = sorted(base.glob("*.safetensors"))[1]
    gone.unlink()
    with pytest.raises(BadModel, match=f"lacks {gone.name} of its weights"):
        write_model(base, tmp_path / "output")


def test_a_damaged_header_is_one_message(base, tmp_path):
    (tmp_path / "model.safetensors").write_bytes(b"\xff" * 64)
    with pytest.raises(BadModel, match=r"the model.safetensors of .* cannot be read"):
        stored_tensors(tmp_path)


def test_weights_that_are_not_safetensors_are_refused(tmp_path):
    (tmp_path / "pytorch_model.bin").touch()
    with pytest.raises(BadModel, match=r"has no model.safetensors"):
        stored_tensors(tmp_path)


def test_a_dtype_that_cannot_be_converted_is_refused(base, tmp_path):
    header = {"a": {"dtype": "F8_E4M3", "shape": [4], "data_offsets": [0, 4]}}
    text = json.dumps(header).encode()
    (tmp_path / "model.safetensors").write_bytes(len(text).to_bytes(8, "little") + text + bytes(4))
    (tmp_path / "config.json").write_bytes((base / "config.json").read_bytes())
    with pytest.raises(BadModel, match=r"has a in F8_E4M3, which cannot be converted"):
        write_model(tmp_path, tmp_path / "output", dtype=export.dtype_of("bf16"))
