"""LoRA, DoRA and QLoRA beside tiny models: what is trained, in which dtype, and what is refused."""

import json
import re
import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file

from brimful.cli.output import with_flags
from brimful.errors import BadModel, BadOption, MissingExtra
from brimful.planning.levers import checkpointing, with_weights
from brimful.tasks import adapters
from brimful.tasks.adapters import (
    Lora,
    base_of,
    check_packages,
    fingerprint,
    load_adapter,
    load_base,
    new_base,
    with_adapter,
)
from brimful.tasks.load import load_task
from tests.tasks.adapted import Adapted, add_noise, config, logits, make_base, tokens


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    return make_base(tmp_path_factory.mktemp("base") / "qwen")


@pytest.fixture(scope="module")
def llama(tmp_path_factory):
    return make_base(tmp_path_factory.mktemp("base") / "llama", "llama", seed=1)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("", Lora()),
        ("on", Lora()),
        ("r=8", Lora(r=8)),
        ("r=16,alpha=32,targets=all-linear,dropout=0.05,dora", Lora(dropout=0.05, dora=True)),
        (" r = 4 , targets=q_proj+v_proj ", Lora(r=4, targets=("q_proj", "v_proj"))),
        ("rslora=on,dora=off,alpha=1.5", Lora(rslora=True, alpha=1.5)),
    ],
)
def test_what_lora_says(text, expected):
    assert Lora.parse(text) == expected
    assert Lora.parse(str(expected)) == expected


@pytest.mark.parametrize(
    ("text", "word", "advice"),
    [
        ("rank=4", "unknown word 'rank'", "Try: r, alpha, targets, dropout, dora, rslora."),
        ("r=many", "r=many", "a whole number"),
        ("r=0", "r=0", "at least 1"),
        ("r=2.5", "r=2.5", "a whole number"),
        ("alpha=x", "alpha=x", "a number"),
        ("alpha=-1", "alpha=-1", "above 0"),
        ("alpha=nan", "alpha=nan", "above 0"),
        ("dropout=1", "dropout=1.0", "below 1"),
        ("dora=maybe", "dora=maybe", "on or off"),
        ("targets=", "('',)", "all-linear"),
        ("targets=q_proj++v_proj", "'v_proj'", "q_proj+v_proj"),
        ("r", "r without a value", "r=16"),
        ("r=4,r=8", "r twice", "one of the two"),
        ("r=4,,alpha=2", "an empty part", "r=16"),
    ],
)
def test_a_bad_value_is_one_message_with_the_word_and_what_is_allowed(text, word, advice):
    with pytest.raises(BadOption) as error:
        Lora.parse(text)
    assert word in str(error.value) and advice in str(error.value)
    shown = with_flags(str(error.value))
    assert not re.search(r"--(?!lora)", shown), shown  # parts of --lora are no flags


@pytest.mark.parametrize(("package", "extra"), [("peft", "lora"), ("bitsandbytes", "eightbit")])
def test_a_missing_package_is_named_with_the_pip_command(monkeypatch, package, extra):
    monkeypatch.setattr(adapters, "find_spec", lambda name: None if name == package else "installed")
    with pytest.raises(MissingExtra, match=rf"{package} is not installed. Try: pip install 'brimful\[{extra}\]'"):
        check_packages(Lora(), "4bit")


@pytest.mark.parametrize(
    ("load_in", "lora", "message"), [("4bit", None, "needs an adapter"), ("2bit", Lora(), "4bit or 8bit")]
)
def test_quantized_weights_need_an_adapter(load_in, lora, message):
    with pytest.raises(BadOption, match=message):
        check_packages(lora, load_in)


class TestWithAdapter:
    @pytest.fixture(autouse=True)
    def needs_peft(self):
        pytest.importorskip("peft")

    @pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
    def test_the_adapter_alone_trains_in_float32_and_the_base_keeps_its_dtype(self, base, dtype):
        model = with_adapter(load_base(base, dtype=dtype), Lora(r=2))
        trained = {name: param for name, param in model.named_parameters() if param.requires_grad}
        assert trained and all("lora_" in name and param.dtype == torch.float32 for name, param in trained.items())
        assert {param.dtype for name, param in model.named_parameters() if name not in trained} == {dtype}
        assert set(adapters.trained_weights(model)) == trained.keys()

    def test_all_linear_leaves_embeddings_and_head_out(self, llama):
        model = with_adapter(load_base(llama), Lora(r=2))
        layers = {name.split(".lora_")[0].rpartition(".")[2] for name in adapters.trained_weights(model)}
        assert layers == {"q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"}

    def test_named_targets_have_an_adapter_and_no_other(self, base):
        model = with_adapter(load_base(base), Lora(r=2, targets=("q_proj", "down_proj")))
        layers = {name.split(".lora_")[0].rpartition(".")[2] for name in adapters.trained_weights(model)}
        assert layers == {"q_proj", "down_proj"}

    def test_an_unknown_target_names_the_layers_there_are(self, base):
        with pytest.raises(BadOption) as error:
            with_adapter(load_base(base), Lora(targets=("q_proj", "query")))
        assert "no linear layer called 'query'" in str(error.value)
        assert "down_proj, gate_proj, k_proj, lm_head, o_proj, q_proj, up_proj, v_proj." in str(error.value)

    def test_a_tied_head_is_refused(self, base):
        with pytest.raises(BadOption, match="'lm_head' shares its weight with the embedding"):
            with_adapter(load_base(base), Lora(targets=("lm_head",)))

    @pytest.mark.parametrize("load_in", [None, "4bit", "8bit"])
    def test_a_model_without_bytes_has_the_tensors_of_a_real_one(self, base, load_in):
        if load_in:
            pytest.importorskip("bitsandbytes")
        task = Adapted(base, load_in=load_in, dtype=torch.bfloat16)
        with torch.device("meta"):
            meta = task.model()
        assert all(param.is_meta for param in meta.parameters())
        described = {name: (param.shape, param.dtype, param.requires_grad) for name, param in meta.named_parameters()}
        for real in (task.model(), task.initial_model()):
            assert described == {name: (p.shape, p.dtype, p.requires_grad) for name, p in real.named_parameters()}
            assert torch.isfinite(logits(real)).all()

    def test_bf16_weights_are_the_base_s_and_not_the_adapter_s(self, base):
        model = with_weights(Adapted(base), "bf16").initial_model()
        dtypes = {param.requires_grad: param.dtype for param in model.parameters()}
        assert dtypes == {True: torch.float32, False: torch.bfloat16}

    @pytest.mark.parametrize("load_in", [None, "4bit", "8bit"])
    def test_a_base_with_nan_is_refused(self, base, tmp_path, load_in):
        if load_in:
            pytest.importorskip("bitsandbytes")
        broken = shutil.copytree(base, tmp_path / "broken")
        weights = load_file(broken / "model.safetensors")
        weights["model.layers.0.mlp.up_proj.weight"][1, 2] = float("nan")
        save_file(weights, broken / "model.safetensors", metadata={"format": "pt"})
        with pytest.raises(BadModel, match="has NaN or inf in 'model.layers.0.mlp.up_proj.weight'"):
            load_base(broken, load_in)

    @pytest.mark.parametrize("load_in", [None, "4bit"])
    def test_checkpointing_over_a_frozen_embedding_gives_the_same_gradients(self, base, load_in):
        if load_in:
            pytest.importorskip("bitsandbytes")
        task = Adapted(base, lora="r=4", load_in=load_in)
        model = add_noise(task.initial_model()).train()
        batch, lever = task.collate(list(tokens())), checkpointing(task, model)
        assert lever.blocks == 2

        def gradients(every):
            model.zero_grad()
            with lever.set(every):
                task.loss(model, batch).sum.backward()
            return {name: param.grad for name, param in model.named_parameters() if param.requires_grad}

        plain, again = gradients(0), gradients(1)
        assert all(gradient is not None and gradient.abs().sum() > 0 for gradient in plain.values())
        assert all(torch.equal(plain[name], again[name]) for name in plain)


def saved_and_gradients(model):
    """Bytes that autograd keeps under autocast, and all gradients."""
    kept = {}

    def keep(tensor):
        kept[tensor.untyped_storage().data_ptr()] = tensor  # alive, so that its place is not used again
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor), torch.autocast("cpu", torch.bfloat16):
        loss = model(input_ids=tokens(), labels=tokens(), use_cache=False).loss
    params = [param for param in model.parameters() if param.requires_grad]
    return sum(one.untyped_storage().nbytes() for one in kept.values()), torch.autograd.grad(loss, params)


def test_under_autocast_adapters_of_one_input_share_it_and_the_gradient_is_the_same(llama):
    pytest.importorskip("peft")
    model = add_noise(with_adapter(load_base(llama, dtype=torch.bfloat16), Lora(r=4)))
    fewer, gradients = saved_and_gradients(model)
    for part in model.modules():
        vars(part).pop("_cast_input_dtype", None)
    more, expected = saved_and_gradients(model)
    assert all(map(torch.equal, gradients, expected)) and fewer < 0.9 * more


class TestBase:
    @pytest.fixture(autouse=True)
    def needs_peft(self):
        pytest.importorskip("peft")

    def test_4_bits_give_the_same_bits_each_time(self, base):
        pytest.importorskip("bitsandbytes")
        one, other = (load_base(base, "4bit", dtype=torch.bfloat16).state_dict() for _ in range(2))
        assert one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)
        assert one["model.layers.0.mlp.up_proj.weight"].dtype == torch.uint8

    @pytest.mark.parametrize("load_in", ["4bit", "8bit"])
    def test_evaluation_does_not_change_it(self, base, load_in):
        pytest.importorskip("bitsandbytes")
        model = load_base(base, load_in, dtype=torch.bfloat16)
        before = {name: value.clone() for name, value in model.state_dict().items()}
        logits(model)
        after = model.state_dict()
        assert all(torch.equal(before[name], after[name]) for name in before)

    def test_missing_tensors_are_named(self, base, tmp_path):
        from safetensors.torch import load_file, save_file

        weights = load_file(base / "model.safetensors")
        del weights["model.norm.weight"]
        save_file(weights, tmp_path / "model.safetensors", metadata={"format": "pt"})
        (tmp_path / "config.json").write_bytes((base / "config.json").read_bytes())
        with pytest.raises(BadModel, match=r"1 tensor missing \(model.norm.weight\)"):
            load_base(tmp_path)

    def test_a_base_that_is_quantized_already_is_refused(self, base, tmp_path):
        content = {
            **json.loads((base / "config.json").read_text()),
            "quantization_config": {"quant_method": "gptq", "bits": 4},
        }
        (tmp_path / "config.json").write_text(json.dumps(content))
        (tmp_path / "model.safetensors").write_bytes((base / "model.safetensors").read_bytes())
        with pytest.raises(BadModel, match="quantized already"):
            load_base(tmp_path)

    def test_its_fingerprint_is_of_the_weights_and_not_of_the_files(self, base, tmp_path):
        sharded = make_base(tmp_path / "sharded", shards="20KB")
        assert len(list(sharded.glob("*.safetensors"))) > 1
        assert fingerprint(sharded) == fingerprint(base) != fingerprint(make_base(tmp_path / "other", seed=1))

    @pytest.mark.parametrize("whole", [True, False])
    def test_a_changed_weight_changes_its_fingerprint(self, base, tmp_path, monkeypatch, whole):
        if not whole:
            monkeypatch.setattr(adapters, "HASHED_BYTES", 0)
        before, content = fingerprint(base), bytearray((base / "model.safetensors").read_bytes())
        content[-1] ^= 1
        (tmp_path / "model.safetensors").write_bytes(content)
        assert fingerprint(tmp_path) != before

    def test_a_sample_has_the_first_and_the_last_bytes(self):
        places = list(adapters._places(10**6, whole=False))
        assert (
            places[0][0] == 0 and sum(places[-1]) == 10**6 and sum(size for _, size in places) == adapters.SAMPLE_BYTES
        )


@pytest.fixture(scope="module")
def saved(base, tmp_path_factory):
    """An adapter's folder, and the logits of the model it came from."""
    pytest.importorskip("peft")
    folder = tmp_path_factory.mktemp("adapter") / "adapter"
    folder.mkdir()
    model = add_noise(with_adapter(load_base(base), Lora(r=4)))
    adapters.save(model, folder)
    return folder, logits(model)


class TestFolder:
    @pytest.fixture(autouse=True)
    def needs_peft(self):
        pytest.importorskip("peft")

    def test_peft_loads_it(self, base, saved):
        import peft
        from transformers import AutoModelForCausalLM

        folder, expected = saved
        assert {file.name for file in folder.iterdir()} == {
            "adapter_config.json",
            "adapter_model.safetensors",
            "brimful_base.json",
        }
        model = peft.PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32), folder)
        assert torch.equal(logits(model), expected)
        assert torch.equal(logits(peft.AutoPeftModelForCausalLM.from_pretrained(folder, dtype=torch.float32)), expected)

    def test_it_names_its_base(self, base, saved, tmp_path):
        assert base_of(saved[0]) == str(base)
        assert base_of(base) is None and base_of(tmp_path) is None

    def test_it_is_loaded_with_its_base(self, saved):
        model = load_adapter(saved[0])
        assert torch.equal(logits(model), saved[1]) and not any(param.requires_grad for param in model.parameters())

    def test_another_base_is_refused(self, saved, tmp_path):
        other = make_base(tmp_path / "other", seed=1)
        with pytest.raises(BadModel, match=r"is an adapter of another base: the weights in .*other are not"):
            load_adapter(saved[0], base=other)

    def test_a_base_that_is_gone_is_named(self, base, tmp_path):
        gone = make_base(tmp_path / "gone")
        folder = tmp_path / "adapter"
        folder.mkdir()
        adapters.save(with_adapter(load_base(gone), Lora(r=2)), folder)
        gone.rename(tmp_path / "moved")
        with pytest.raises(
            BadModel,
            match=r"the base model .*gone of the adapter .*adapter is not there. Try: put it back, or brimful export",
        ):
            load_adapter(folder)
        assert load_adapter(folder, base=tmp_path / "moved") is not None

    def test_the_same_adapter_gives_the_same_bytes(self, base, tmp_path):
        content = []
        for name in ("one", "other"):
            torch.manual_seed(0)
            (tmp_path / name).mkdir()
            adapters.save(with_adapter(load_base(base), Lora(r=2)), tmp_path / name)
            content.append({file.name: file.read_bytes() for file in (tmp_path / name).iterdir()})
        assert content[0] == content[1]


def test_a_new_base_of_4_bits_runs_and_needs_no_files():
    pytest.importorskip("bitsandbytes")
    model = new_base(config("llama"), "4bit", torch.bfloat16)
    assert model.model.layers[0].mlp.up_proj.weight.dtype == torch.uint8
    assert torch.isfinite(logits(model)).all()
    assert model.model.rotary_emb.inv_freq[0] == 1


def test_adapters_of_a_base_that_nobody_keeps_are_refused():
    with pytest.raises(BadOption, match="chatlm-tiny' has new weights, which are not saved with adapters"):
        load_task("sft", options={"model": "chatlm-tiny", "lora": "r=4"})
