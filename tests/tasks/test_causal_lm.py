"""`sft` and `pretrain` of causal models, from raw files to a saved model: rows, labels, resume, memory, adapters."""

import json
import shutil
import signal

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

import brimful
from brimful.data.store import Store
from brimful.errors import BadData, BadModel, BadOption
from brimful.task import IGNORED
from brimful.tasks.causal_lm import CausalLM
from brimful.tasks.chat_template import load_auto_tokenizer
from brimful.tasks.language import LanguageOptions, Pretrain, Sft, SftOptions
from brimful.tasks.model_folder import tokenizer_of
from brimful.training.events import last_steps, read_events
from tests.tasks.pair_runs import Kill
from tests.tasks.tiny import save, write_jsonl
from tests.tasks.tiny_causal import make_causal, talk
from tests.training import runs

RUN = {"device": "cpu", "workers": 0, "cache": False, "quiet": True, "schedule": "constant", "warmup": 0, "lr": 1e-3, "global_batch": 8}  # fmt: skip
STEADY = {"deterministic": True, "memory_limit": "256MiB", "layout": "packed"}


def sft(causal, **options):
    return Sft(SftOptions(model=str(causal.model), **options))


def train(task, data, folder, **options):
    brimful.train(task, str(data), run=folder, **{**RUN, "max_steps": 4, **options})
    return [event["loss"] for event in last_steps(read_events(folder / "events.jsonl"))]


def weights(folder):
    return load_file(folder / "model" / "model.safetensors")


@pytest.fixture(scope="module")
def whole(causal, tmp_path_factory):
    """An undisturbed run."""
    folder = tmp_path_factory.mktemp("whole") / "run"
    return folder, train(sft(causal), causal.raw, folder)


def test_labels_are_the_trained_tokens_alone(causal):
    row = causal.store[2]
    labels = CausalLM(causal.net.config)._labels(row)
    text = causal.template.decode(labels[labels != IGNORED].tolist())
    assert text == "红色。[EOS]红车。[EOS]"


def test_the_loss_is_that_of_the_model_on_its_trained_tokens(causal):
    task, row = sft(causal), causal.store[5]
    mask = np.zeros(len(row["tokens"]), bool)
    place = 0
    for number, run in enumerate(row["spans"].tolist()):
        mask[place : place + run] = bool(number % 2)
        place += run
    ids = torch.tensor(row["tokens"].astype(np.int64))[None]
    labels = torch.where(torch.tensor(mask)[None], ids, IGNORED)
    model = task.model().eval()  # new weights, whose loss is not all rounding
    with torch.no_grad():
        expected = model(input_ids=ids, labels=labels).loss
        loss = task.loss(model, task.collate([row]))
    assert float(loss.sum / loss.count) == pytest.approx(float(expected), rel=1e-5)


@pytest.mark.parametrize("layout", ["padded", "packed"])
def test_a_run_learns_and_is_saved_for_transformers(causal, tmp_path, layout):
    from transformers import AutoModelForCausalLM, AutoTokenizer

    losses = train(
        Sft(SftOptions(model="causal-tiny")), causal.raw, tmp_path / "run", max_steps=12, layout=layout, lr=5e-3
    )
    assert losses[-1] < 0.7 * losses[0]
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "run" / "model")
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "run" / "model")
    prompt = tokenizer.apply_chat_template([{"role": "user", "content": "甲的花？"}], add_generation_prompt=True, return_tensors="pt")  # fmt: skip
    assert model.config.use_cache and model.generate(**prompt, max_new_tokens=2).shape[0] == 1
    assert "甲" in tokenizer.decode(prompt["input_ids"][0])


def test_packed_and_padded_runs_end_with_the_same_weights(causal, tmp_path):
    found = []
    for layout in ("padded", "packed"):
        train(sft(causal), causal.raw, tmp_path / layout, layout=layout)
        found.append(weights(tmp_path / layout))
    assert all(torch.allclose(found[0][name], found[1][name], atol=2e-5) for name in found[0])


def test_a_run_short_of_memory_has_the_losses_of_one_that_is_not(causal, tmp_path, whole):
    limit = causal.weight_bytes * 4 + 2_000_000
    assert train(sft(causal), causal.raw, tmp_path / "run", memory_limit=limit) == pytest.approx(whole[1], rel=1e-4)
    plan = json.loads((tmp_path / "run" / "plan.json").read_text())
    assert plan["micro_batch"] < 8


def killed_in_step_3(model, data, run):
    """For a process of its own."""
    train(Sft(SftOptions(model=model)), data, run, hooks=[Kill(3)], save_every=2, **STEADY)


@pytest.mark.parametrize("kind", ["qwen2", "llama", "gemma3_text", "mistral"])
def test_a_run_that_was_killed_and_resumed_ends_with_the_same_bits(causal, tmp_path, kind):
    ids = {"pad_token_id": 0, "eos_token_id": 1, "bos_token_id": 3}
    model = save(make_causal(kind, causal.template.vocab_size, **ids), tmp_path / "model", causal.tokenizer)
    process = runs._begin(killed_in_step_3, str(model), str(causal.raw), tmp_path / "run")
    assert runs.finish([process]) == [-signal.SIGKILL]
    task = Sft(SftOptions(model=str(model)))
    train(task, causal.raw, tmp_path / "run", resume=True, save_every=2, **STEADY)
    train(task, causal.raw, tmp_path / "undisturbed", **STEADY)
    resumed = [event["step"] for event in read_events(tmp_path / "run" / "events.jsonl") if event["event"] == "resume"]
    assert resumed == [2] and runs.losses(tmp_path / "run") == runs.losses(tmp_path / "undisturbed")
    first, second = weights(tmp_path / "run"), weights(tmp_path / "undisturbed")
    assert all(torch.equal(first[name], second[name]) for name in first | second)


def test_three_rows_are_shown_when_a_run_begins(whole):
    event = next(event for event in read_events(whole[0] / "events.jsonl") if event["event"] == "rows")
    assert len(event["examples"]) == 3
    assert ["红色。[EOS]", True] in event["examples"][0]


@pytest.fixture
def in_bf16(causal, tmp_path):
    """The model saved as most are published."""
    folder = shutil.copytree(causal.model, tmp_path / "in-bf16")
    causal.net.from_pretrained(causal.model).to(torch.bfloat16).save_pretrained(folder)
    return folder


def test_a_model_saved_in_bf16_is_planned_in_the_precision_it_is_trained_in(in_bf16):
    task = Sft(SftOptions(model=str(in_bf16)))
    for model in (task.model(), task.initial_model()):
        assert {param.dtype for param in model.parameters()} == {torch.float32}
    assert task.config.dtype == torch.bfloat16  # others share this configuration


def test_adapters_train_beside_a_base_that_stays_as_it_was(causal, tmp_path):
    pytest.importorskip("peft")
    task = sft(causal, lora="r=4")
    model = task.initial_model()
    assert {name.split(".")[-3] for name, one in model.named_parameters() if one.requires_grad} == {"lora_A", "lora_B"}
    before = (causal.model / "model.safetensors").read_bytes()
    losses = train(task, causal.raw, tmp_path / "run", max_steps=6, lr=1e-2)
    assert losses[-1] != losses[0]
    assert (causal.model / "model.safetensors").read_bytes() == before
    assert not (tmp_path / "run" / "model" / "model.safetensors").exists()
    assert task.learning_rate == 2e-4


@pytest.fixture(scope="module")
def adapter(causal, tmp_path_factory):
    """A run whose adapter has learnt something."""
    pytest.importorskip("peft")
    run = tmp_path_factory.mktemp("adapter") / "run"
    train(sft(causal, lora="r=4,targets=q_proj+v_proj"), causal.raw, run, max_steps=4, lr=1e-2)
    return run


def test_an_adapter_is_trained_further_as_it_was_saved(causal, adapter):
    from brimful.tasks.model_folder import load_model

    task = Sft(SftOptions(model=str(adapter)))
    model, saved = task.initial_model(), load_model(adapter)
    weights = dict(saved.named_parameters())
    assert all(torch.equal(weights[name], param) for name, param in model.named_parameters())
    trained = {name.split(".")[-4] for name, one in model.named_parameters() if one.requires_grad}
    assert trained == {"q_proj", "v_proj"} and task.learning_rate == 2e-4


def test_the_plan_says_which_adapter_is_trained_further(causal, adapter):
    name, requested, effective, reason = Sft(SftOptions(model=str(adapter))).remarks([])[0]
    assert (name, requested, effective) == ("adapter", str(adapter), "r=4,alpha=32,targets=q_proj+v_proj")
    assert reason == f"the adapter of {adapter} is trained further, beside its base {causal.model}"


def test_an_adapter_trained_further_belongs_to_the_same_base(causal, adapter, tmp_path):
    from brimful.tasks.adapters import base_of

    before = (adapter / "model" / "adapter_model.safetensors").read_bytes()
    train(Sft(SftOptions(model=str(adapter))), causal.raw, tmp_path / "run", max_steps=2, lr=1e-2)
    assert base_of(tmp_path / "run") == base_of(adapter) == str(causal.model)
    assert (adapter / "model" / "adapter_model.safetensors").read_bytes() == before
    assert (tmp_path / "run" / "model" / "adapter_model.safetensors").read_bytes() != before


@pytest.mark.parametrize(("name", "value"), [("lora", "r=8"), ("freeze", "embeddings")])
def test_an_adapter_keeps_its_shape(adapter, name, value):
    with pytest.raises(BadOption, match=f"is an adapter, which is trained further as it is .* Try: without {name}="):
        Sft(SftOptions(model=str(adapter), **{name: value}))


def test_an_adapter_that_peft_wrote_is_trained_further_over_a_base_of_4_bits(causal, adapter, tmp_path):
    pytest.importorskip("bitsandbytes")
    from brimful.tasks.adapters import BASE, trained_in

    folder = shutil.copytree(adapter / "model", tmp_path / "adapter")
    (folder / BASE).unlink()
    task = Sft(SftOptions(model=str(folder), load_in="4bit"))
    assert "Params4bit" in {type(param).__name__ for param in task.initial_model().parameters()}
    train(task, causal.raw, tmp_path / "run", max_steps=1)
    assert trained_in(tmp_path / "run" / "model") == "4bit"


def test_quantized_weights_without_an_adapter_are_refused(causal):
    with pytest.raises(BadOption, match="load_in='4bit' needs an adapter, since weights of 4 bits cannot be trained"):
        sft(causal, load_in="4bit")


def test_an_adapter_of_all_layers_is_named_by_their_kinds(causal, tmp_path):
    train(sft(causal, lora="r=4"), causal.raw, tmp_path / "run", max_steps=1)
    shape = str(Sft(SftOptions(model=str(tmp_path / "run"))).lora)
    names = shape.removeprefix("r=4,alpha=32,targets=").split("+")
    assert sorted(names) == ["down_proj", "gate_proj", "k_proj", "o_proj", "q_proj", "up_proj", "v_proj"]


def test_an_adapter_with_more_than_matrices_must_be_merged(adapter, tmp_path):
    folder = shutil.copytree(adapter / "model", tmp_path / "adapter")
    config = json.loads((folder / "adapter_config.json").read_text())
    (folder / "adapter_config.json").write_text(json.dumps({**config, "modules_to_save": ["lm_head"]}))
    with pytest.raises(BadModel, match="has modules_to_save, so it cannot be trained any further. Try: brimful export"):
        Sft(SftOptions(model=str(folder)))


def test_an_adapter_without_a_tokenizer_uses_that_of_its_base(causal, adapter, tmp_path):
    folder = shutil.copytree(adapter / "model", tmp_path / "adapter")
    for file in folder.glob("*token*"):
        file.unlink()
    assert Sft(SftOptions(model=str(folder))).source == str(causal.model)


def test_what_would_fit_is_named_where_a_model_does_not(causal):
    task = sft(causal)
    ways = dict(task.alternatives())
    assert list(ways) == ["lora='r=16'", "lora='r=16' with load_in='4bit'"]
    assert ways["lora='r=16' with load_in='4bit'"] < ways["lora='r=16'"]
    assert not Sft(SftOptions(model="causal-tiny")).alternatives()


def test_an_estimate_compares_parts_to_freeze_and_of_a_saved_model_adapters(causal):
    pytest.importorskip("bitsandbytes")
    lora = {"lora": "r=16", "freeze": None}
    assert sft(causal).memory_options() == [{"freeze": "embeddings"}, lora, {**lora, "load_in": "4bit"}]
    assert Sft(SftOptions(model="causal-tiny")).memory_options() == [{"freeze": "embeddings"}]
    assert sft(causal, lora="r=4").memory_options() == [{"load_in": "4bit"}]


def test_of_an_adapter_a_base_of_4_bits_would_fit(adapter):
    assert [way for way, _ in Sft(SftOptions(model=str(adapter))).alternatives()] == ["load_in='4bit'"]


def test_texts_are_cut_and_nothing_is_lost(causal, tmp_path):
    raw = write_jsonl(tmp_path / "texts.jsonl", [{"text": "红色的花，" * 30}, {"text": "车"}])
    task = Pretrain(LanguageOptions(model=str(causal.model), max_tokens=32))
    store = Store.open(task.prepare(str(raw), tmp_path, lambda phrase: None))
    assert store.fields == ("tokens",) and len(store) > 3 and store.longest == (32,)
    assert store.meta.truncated == {"tokens": 0}


def test_fine_tuning_on_texts_is_refused(causal, tmp_path):
    raw = write_jsonl(tmp_path / "texts.jsonl", [{"text": "红色的花"}])
    with pytest.raises(BadData, match="sft trains on replies. Try: pretrain"):
        sft(causal).prepare(str(raw), tmp_path, lambda phrase: None)


def test_all_tokens_are_trained_on_if_asked(causal, tmp_path):
    store = Store.open(sft(causal, train_on="all").prepare(str(causal.raw), tmp_path, lambda phrase: None))
    assert all(row["spans"].tolist() == [0, len(row["tokens"])] for row in store)


def test_a_model_without_a_template_is_refused_before_anything_is_tokenized(causal, tmp_path):
    folder = causal.without_template(tmp_path / "model")
    with pytest.raises(BadModel, match="chat_template"):
        Sft(SftOptions(model=str(folder))).prepare(str(causal.raw), tmp_path / "data", lambda phrase: None)
    given = Sft(SftOptions(model=str(folder), chat_template="plain"))
    store = Store.open(given.prepare(str(causal.raw), tmp_path / "data", lambda phrase: None))
    assert len(store) == 24
    assert "Assistant:" in (store.path / "tokenizer" / "chat_template.jinja").read_text()


def noted(task, rows, folder):
    """By name, the value and the reason of each choice of the plan."""
    raw = write_jsonl(folder / "rows.jsonl", rows)
    store = task.prepare(str(raw), folder, lambda phrase: None)
    return {name: (value, reason) for name, _, value, reason in task.remarks(task.rows(store))}


def test_the_plan_says_what_became_of_special_tokens_and_of_roles_out_of_order(causal, tmp_path):
    talks = [talk("甲？", "[EOS]乙。"), talk("甲？", "乙。")[::-1], talk("甲？", "乙。"), talk("甲？[SEP]", "乙。")]
    remarks = noted(sft(causal), [{"messages": one} for one in talks], tmp_path)
    count, reason = remarks["special tokens read as letters"]
    assert count == "2 rows" and reason.startswith("warning: ") and reason.endswith("rows.jsonl, line 1: [EOS]")
    count, reason = remarks["roles out of order"]
    assert count == "1 row" and reason.startswith("warning: ")
    assert reason.endswith("rows.jsonl, line 2: the roles are assistant, user")


def test_the_plan_says_that_texts_have_special_tokens(causal, tmp_path):
    task = Pretrain(LanguageOptions(model=str(causal.model)))
    count, reason = noted(task, [{"text": "甲"}, {"text": "甲[SEP]乙"}], tmp_path)["special tokens read as tokens"]
    assert (
        count == "1 row" and reason.startswith("as in transformers; ") and reason.endswith("rows.jsonl, line 2: [SEP]")
    )


def test_a_text_to_go_on_from_has_the_tokens_of_transformers(causal):
    text = "[BOS]甲的花[SEP]"
    assert tokenizer_of(causal.model).begin(text) == load_auto_tokenizer(causal.model)(text)["input_ids"]


def test_two_lengths_are_refused(causal):
    with pytest.raises(BadOption, match="a row of a causal model is one sequence. Try: 576"):
        sft(causal, max_tokens="256,320")


def test_more_tokens_than_a_table_of_positions_has_are_refused(causal, tmp_path):
    for kind, refused in (("gpt2", True), ("llama", False)):
        folder = tmp_path / kind
        make_causal(kind, causal.template.vocab_size).save_pretrained(folder)
        if refused:
            with pytest.raises(
                BadOption, match="max_tokens=600 is more than the 512 positions that this gpt2 model.* Try: 512"
            ):
                Pretrain(LanguageOptions(model=str(folder), max_tokens=600))
        else:
            assert Pretrain(LanguageOptions(model=str(folder), max_tokens=600)).max_tokens == (600,)


def test_rows_beyond_the_positions_a_model_was_made_for_are_a_warning(causal, tmp_path):
    task = Pretrain(LanguageOptions(model=str(causal.model), max_tokens=2000))
    _, reason = noted(task, [{"text": "红色的花，" * 400}], tmp_path)["max_tokens"]
    assert reason.endswith("warning: the model was made for 512 positions")


def test_a_frozen_part_that_there_is_not_is_refused(causal):
    with pytest.raises(BadOption, match="freeze='encoder' is not a part of a qwen2 model. Try: embeddings, none"):
        sft(causal, freeze="encoder")


def test_a_model_that_is_saved_again_is_read_again(causal, tmp_path):
    for layers in (1, 2):
        make_causal(vocab_size=causal.template.vocab_size, num_hidden_layers=layers).save_pretrained(tmp_path)
        assert Sft(SftOptions(model=str(tmp_path))).config.num_hidden_layers == layers


def test_missing_shards_are_named(causal, tmp_path):
    folder = tmp_path / "model"
    causal.net.save_pretrained(folder, max_shard_size="40KB")
    for file in causal.tokenizer.iterdir():
        shutil.copy(file, folder / file.name)
    shard = sorted(folder.glob("model-*.safetensors"))[1]
    shard.unlink()
    with pytest.raises(BadModel, match=f"lacks {shard.name} of its weights"):
        Sft(SftOptions(model=str(folder))).initial_model()


def test_code_of_a_model_is_never_run(causal, tmp_path):
    folder = tmp_path / "model"
    shutil.copytree(causal.model, folder)
    config = json.loads((folder / "config.json").read_text())
    config |= {"model_type": "mine", "auto_map": {"AutoModelForCausalLM": "mine.Mine"}}
    (folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(BadModel, match="needs trust_remote_code"):
        Sft(SftOptions(model=str(folder)))


def test_frozen_embeddings_leave_a_head_of_its_own_to_train(causal, tmp_path):
    make_causal(vocab_size=causal.template.vocab_size, tie_word_embeddings=False).save_pretrained(tmp_path / "model")
    model = Sft(SftOptions(model=str(tmp_path / "model"), freeze="embeddings")).model()
    assert not model.get_input_embeddings().weight.requires_grad and model.get_output_embeddings().weight.requires_grad


def test_a_saved_model_stops_where_its_template_ends_a_turn(causal, tmp_path):
    """Also if the base calls something else its end."""
    folder = tmp_path / "model"
    shutil.copytree(causal.model, folder)
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": 5}))
    train(Sft(SftOptions(model=str(folder))), causal.raw, tmp_path / "run", max_steps=1)
    saved = json.loads((tmp_path / "run" / "model" / "generation_config.json").read_text())
    assert saved["eos_token_id"] == [causal.template.end_ids[0], 5]


def test_a_share_of_bad_rows_is_dropped_if_asked(causal, tmp_path):
    rows = [json.loads(line) for line in causal.raw.read_text().splitlines()]
    raw = write_jsonl(tmp_path / "rows.jsonl", [*rows, {"messages": [{"role": "user", "content": "问？"}, {"role": "assistant", "content": ""}]}])  # fmt: skip
    with pytest.raises(BadData, match=r"rows.jsonl, line 25.*max_bad"):
        sft(causal).prepare(str(raw), tmp_path / "data", lambda phrase: None)
    assert len(Store.open(sft(causal, max_bad=0.1).prepare(str(raw), tmp_path / "data", lambda phrase: None))) == 24


def test_an_adapter_of_a_4_bit_base_is_evaluated_on_4_bits(causal, tmp_path):
    pytest.importorskip("bitsandbytes")
    from brimful.tasks.model_folder import load_model

    train(sft(causal, lora="r=4", load_in="4bit"), causal.raw, tmp_path / "run", max_steps=1)
    kinds = {type(param).__name__ for param in load_model(tmp_path / "run").parameters()}
    assert "Params4bit" in kinds


def test_mfu_is_unknown_where_only_some_tokens_have_logits(causal, whole):
    """A formula of the row's length would count the logits of every token: 1.6 times the work of a run of pairs."""
    steps = last_steps(read_events(whole[0] / "events.jsonl"))
    assert all(step["mfu"] is None for step in steps)
    assert Pretrain(LanguageOptions(model=str(causal.model))).work_follows_shape
