"""The task `dpo` as a run: what it learns, its reference, interruptions, and every mistake in one message."""

import json
import pickle
import shutil
import signal
import subprocess
import sys
from unittest import mock

import numpy as np
import pytest
import torch

import brimful
from brimful.cli.app import main
from brimful.data.tokenizer.folder import write_template
from brimful.errors import BadData, BadOption, BadRun, BrimfulError
from brimful.tasks.load import load_task
from brimful.tasks.preference import Dpo, DpoOptions
from brimful.tasks.reference import PairRows
from tests.tasks.adapted import add_noise
from tests.tasks.pair_runs import KINDS, Arm, Double, Pairs, RunsOut, events, killed, pairs
from tests.tasks.tiny import write_jsonl
from tests.training import runs


@pytest.fixture(scope="module")
def made(tmp_path_factory, request):
    """By kind."""
    models = {"t5": request.getfixturevalue("tiny").model, "qwen2": request.getfixturevalue("causal").model}
    return {kind: Pairs(kind, model, tmp_path_factory.mktemp(f"dpo-{kind}")) for kind, model in models.items()}


@pytest.fixture(params=KINDS)
def one(made, request):
    return made[request.param]


@pytest.fixture(scope="module")
def base(made):
    """A run of each kind that nothing disturbs, and the same in float64."""
    ways = {"whole": Dpo, "double": Double}
    return {(kind, way): made[kind].train(way, made[kind].task(cls))[0] for kind in KINDS for way, cls in ways.items()}


def store_of(run):
    (store,) = run.glob("data/train-*")
    return store


def copy_of(run, folder):
    """Its token store with the reference in it, to be changed."""
    return shutil.copytree(store_of(run), folder / "store")


def reference_of(run):
    (file,) = sorted(run.glob("data/train-*/reference-*.npy"))
    return np.load(file)


def weights(run):
    from safetensors.torch import load_file

    return load_file(next((run / "model").glob("*model.safetensors")))


def same_weights(a, b):
    a, b = weights(a), weights(b)
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


# ── Learning ──────────────────────────────────────────────────────────────────────────────────────────────────────────


def test_accuracy_on_training_pairs_goes_from_chance_to_all(one):
    run, _ = one.train("learns", max_steps=30, global_batch=24, valid=str(one.file), eval_every=15)
    evaluations = events(run, "eval")
    first, last = evaluations[0], evaluations[-1]
    assert (first["accuracy"], first["margin"]) == pytest.approx((0.5, 0), abs=1e-6)
    assert last["accuracy"] > 0.95 and last["margin"] > 0.5 and last["logp_chosen"] != first["logp_chosen"]
    step = events(run, "step")[-1]["log"]
    assert set(step) == {"rewards/chosen", "rewards/rejected", "margin", "accuracy", "kl", "logp_chosen"}
    assert step["accuracy"] > 0.95


@pytest.mark.parametrize(
    ("kind", "loss", "smoothing"),
    [
        ("t5", "sigmoid", 0.1),
        ("t5", "ipo", 0.0),
        ("t5", "hinge", 0.0),
        ("qwen2", "ipo", 0.0),
        ("qwen2", "orpo", 0.0),
        ("qwen2", "simpo", 0.0),
    ],
)
def test_every_loss_learns(made, kind, loss, smoothing):
    one = made[kind]
    task = one.task(loss=loss, label_smoothing=smoothing)
    run, _ = one.train(f"{loss}{smoothing}", task, max_steps=25, lr=2e-3, global_batch=24, valid=str(one.file))
    assert events(run, "eval")[-1]["accuracy"] > 0.95
    assert bool(list(run.glob("data/*/reference-*"))) == (loss in ("sigmoid", "ipo", "hinge"))


@pytest.mark.parametrize("loss", ["orpo", "simpo"])
def test_an_encoder_decoder_that_prefers_the_others_learns_without_a_reference(made, loss):
    """It knows the rejected replies by heart, and no reference hides that: accuracy begins at 0. 25 steps of the decoder alone at
    2e-3 brought ORPO to 0.54, and 75 to 1."""
    task = made["t5"].task(loss=loss, freeze="none")
    run, _ = made["t5"].train(
        f"{loss}-t5", task, max_steps=20, lr=1e-2, global_batch=24, valid=str(made["t5"].file), eval_every=20
    )
    first, last = events(run, "eval")
    assert first["accuracy"] == 0 and last["accuracy"] > 0.95


def test_an_adapter_learns_too(one):
    task = one.task(lora="r=8")
    run, _ = one.train("lora", task, max_steps=30, lr=1e-2, global_batch=24, valid=str(one.file))
    assert events(run, "eval")[-1]["accuracy"] > 0.95
    assert "adapter_config.json" in {file.name for file in (run / "model").iterdir()}


def test_packed_and_padded_runs_agree(one, base):
    run, _ = one.train("packed", one.task(Double), layout="packed")
    losses = [[event["loss"] for event in events(path, "step")] for path in (run, base[one.kind, "double"])]
    assert losses[0] == pytest.approx(losses[1], rel=1e-6)
    assert events(base[one.kind, "double"], "plan")[0]["layout"] == "padded"


# ── The reference ─────────────────────────────────────────────────────────────────────────────────────────────────────


def live(task, rows, model):
    with torch.no_grad():
        return np.array([task.family.log_probabilities(model.eval(), task.collate([row]))[0].tolist() for row in rows])


def test_the_file_holds_what_the_model_says_as_it_begins(one, base):
    run, task = base[one.kind, "double"], one.task(Double)
    values = live(task, task.rows(str(store_of(run))), task.initial_model())
    assert reference_of(run) == pytest.approx(values, rel=1e-6)  # transformers' norms are in float32


class Noisy(Dpo):
    """Its adapter is not the one that changes nothing."""

    def initial_model(self):
        return add_noise(super().initial_model())


def test_with_an_adapter_the_base_is_the_reference(one, base):
    with_adapter, _ = one.train("noisy", one.task(Noisy, lora="r=4"), max_steps=2)
    np.testing.assert_allclose(reference_of(with_adapter), reference_of(base[one.kind, "whole"]), rtol=1e-6)
    assert abs(events(with_adapter, "step")[0]["log"]["margin"]) > 1e-4


@pytest.fixture(scope="module")
def adapters(made, tmp_path_factory):
    """By kind, a run of `sft` with an adapter that has dropout and has learnt something, and its pairs."""
    pytest.importorskip("peft")
    found = {}
    for kind, one in made.items():
        folder = tmp_path_factory.mktemp(f"adapter-{kind}")
        rows = [{"prompt": f"{name}的花？", "response": "白色。"} for name in "甲乙丙丁戊己庚辛"]
        data = write_jsonl(folder / "rows.jsonl", rows)
        options = {"model": str(one.model), "lora": "r=4,dropout=0.2"}
        one.train(folder / "sft", load_task("sft", options), data, lr=1e-2)
        found[kind] = Pairs(kind, folder / "sft", folder)
    return found


@pytest.mark.parametrize("kind", KINDS)
def test_an_adapter_of_sft_is_trained_further_and_is_the_reference_as_it_begins(adapters, kind):
    one = adapters[kind]
    task = one.task()
    run, _ = one.train("dpo", task, max_steps=4, lr=1e-2)
    model = task.initial_model()
    values = live(task, task.rows(str(store_of(run))), model)
    np.testing.assert_allclose(reference_of(run), values, rtol=1e-5)
    with model.disable_adapter():
        assert not np.allclose(reference_of(run), live(task, task.rows(str(store_of(run))), model), rtol=1e-3)
    assert events(run, "step")[0]["log"]["margin"] == pytest.approx(0, abs=1e-5)
    assert events(run, "step")[-1]["log"]["margin"] > 0.01
    reasons = {choice["name"]: choice["effective"] for choice in events(run, "plan")[0]["choices"]}
    assert reasons["reference"] == "the model as it begins" and reasons["adapter"].startswith("r=4")


@pytest.mark.parametrize("kind", KINDS)
def test_dropout_of_an_adapter_is_off_so_that_the_model_begins_as_the_reference(adapters, kind):
    run, _ = adapters[kind].train("no-dropout", max_steps=1)
    log = events(run, "step")[0]["log"]
    assert (log["accuracy"], log["kl"]) == (0.5, pytest.approx(0, abs=1e-5))
    dropout = next(one for one in events(run, "plan")[0]["choices"] if one["name"] == "dropout")
    assert (dropout["requested"], dropout["effective"]) == (0.2, 0.0)


def test_an_adapter_of_sft_whose_reference_is_gone_computes_it_again_after_a_kill(adapters):
    one = adapters["qwen2"]
    whole, _ = one.train("whole", max_steps=6, lr=1e-2)
    run, _ = one.train("again", max_steps=6, lr=1e-2, save_every=3)
    shutil.rmtree(run / "checkpoints" / "step-00000006")
    (file,) = run.glob("data/train-*/reference-*.npy")
    before = np.load(file)
    for left in run.glob("data/train-*/reference-*"):
        left.unlink()
    one.train("again", max_steps=6, lr=1e-2, save_every=3, resume=True)
    np.testing.assert_allclose(reference_of(run), before, rtol=1e-6)
    assert same_weights(whole, run)


def test_an_adapter_of_4_bits_is_trained_further_in_4_bits(made, tmp_path):
    pytest.importorskip("peft")
    pytest.importorskip("bitsandbytes")
    one = made["qwen2"]
    rows = write_jsonl(tmp_path / "rows.jsonl", [{"prompt": "甲的花？", "response": "白色。"}] * 8)
    sft = load_task("sft", {"model": str(one.model), "lora": "r=4", "load_in": "4bit"})
    one.train(tmp_path / "sft", sft, rows, max_steps=2)
    task = Pairs("qwen2", tmp_path / "sft", tmp_path).task()
    assert task.load_in == "4bit"
    kinds = {type(part).__name__ for part in task.initial_model().modules()}
    assert "Linear4bit" in kinds


def test_another_model_can_be_the_reference(made, tmp_path):
    one = made["t5"]
    task = one.task()
    other = task.initial_model()
    for param in other.parameters():
        param.data += 0.01 * torch.randn(param.shape, generator=torch.Generator().manual_seed(3))
    shutil.copytree(one.model, tmp_path / "other")
    other.save_pretrained(tmp_path / "other")
    run, _ = one.train("other-reference", one.task(reference=str(tmp_path / "other")), max_steps=2)
    assert reference_of(run) == pytest.approx(live(task, task.rows(str(store_of(run))), other), rel=1e-5)


def test_the_file_is_on_the_disk_before_it_has_its_name(made):
    with mock.patch("brimful.files.sync") as sync:
        run, _ = made["t5"].train("synced", max_steps=1)
    (file,) = store_of(run).glob("reference-*.npy")
    drafts = [call.args[0] for call in sync.call_args_list]
    assert any(one.parent == file.parent and file.name in one.name and one != file for one in drafts)


def test_a_second_run_on_the_same_store_reads_the_file(one, base):
    run = base[one.kind, "whole"]
    again, _ = one.train("second", data=store_of(run))
    assert "are in" in " ".join(event["sentence"] for event in events(again, "note"))
    assert same_weights(run, again)


def test_a_file_of_another_model_is_not_used(made, base, tmp_path):
    one = made["qwen2"]
    store = copy_of(base["qwen2", "whole"], tmp_path)
    shutil.copytree(one.model, tmp_path / "other")
    other = one.task().initial_model()
    other.get_input_embeddings().weight.data *= 1.05
    other.save_pretrained(tmp_path / "other")
    one.train("other-model", one.task(model=str(tmp_path / "other")), data=store, max_steps=1)
    assert len(list(store.glob("reference-*.npy"))) == 2


def test_a_file_of_another_template_is_not_used(made, base, tmp_path):
    one, run = made["qwen2"], base["qwen2", "whole"]
    other = tmp_path / "other"
    shutil.copytree(one.model, other)
    template = (other / "chat_template.jinja").read_text(encoding="utf-8")
    write_template(other, template.replace("[BOS]assistant", "[BOS]:assistant"))
    changed, _ = one.train("other-template", one.task(model=str(other)), max_steps=1)
    names = [next(path.glob("data/train-*/reference-*.npy")).name for path in (run, changed)]
    assert names[0] != names[1]
    assert not np.allclose(reference_of(run), reference_of(changed))


def test_a_damaged_file_is_computed_again(made, base, tmp_path):
    store = copy_of(base["t5", "whole"], tmp_path)
    (file,) = store.glob("reference-*.npy")
    expected, content = np.load(file), bytearray(file.read_bytes())
    content[-3] ^= 8
    file.write_bytes(content)
    made["t5"].train("repairs", data=store, max_steps=1)
    assert np.array_equal(np.load(file), expected)


def test_a_reference_that_is_not_finite_is_named(made):
    class Broken(Dpo):
        def initial_model(self):
            model = super().initial_model()
            next(iter(model.parameters())).data.fill_(float("nan"))
            return model

    with pytest.raises(BrimfulError, match="has NaN or inf in 'model.embed_tokens.weight'"):
        made["qwen2"].train("broken", made["qwen2"].task(Broken), max_steps=2)


def test_rewards_that_become_nan_are_named(made):
    class Breaks(Dpo):
        def pair_losses(self, policy, reference, lengths, label_smoothing=0.0):
            losses, log = super().pair_losses(policy, reference, lengths, label_smoothing)
            return losses * (float("nan") if getattr(self, "armed", False) and policy.requires_grad else 1.0), log

    with pytest.raises(BrimfulError, match="NaN|nan|finite"):
        made["t5"].train("nan", made["t5"].task(Breaks), hooks=[Arm()], max_steps=20)


# ── Interruptions ─────────────────────────────────────────────────────────────────────────────────────────────────────


def killed_and_resumed(one, name, **options):
    process = runs._begin(killed, one.kind, one.model, one.folder, name, options)
    assert runs.finish([process]) == [-signal.SIGKILL]
    return one.train(name, one.task(**options), resume=True)[0]


def test_killed_and_resumed_it_is_the_same(one, base):
    whole, resumed = base[one.kind, "whole"], killed_and_resumed(one, "killed")
    assert same_weights(whole, resumed)
    assert runs.losses(whole) == runs.losses(resumed)


def test_killed_and_resumed_an_adapter_is_the_same(made):
    one, lora = made["qwen2"], "r=4,dropout=0.1"
    whole, _ = one.train("whole-lora", one.task(lora=lora))
    assert same_weights(whole, killed_and_resumed(one, "killed-lora", lora=lora))


def interrupted(one, run, **options):
    class Stop(brimful.Hook):
        def after_step(self, loop, result):
            if loop.step == 5:
                raise RuntimeError("stop")

    with pytest.raises(RuntimeError, match="stop"):
        one.train(run, one.task(**options), hooks=[Stop()])
    return one.folder / run


def test_a_resumed_run_whose_file_is_gone_computes_it_from_the_initial_model(one, base):
    run, whole = interrupted(one, "without-file"), base[one.kind, "whole"]
    for file in run.glob("data/train-*/reference-*"):
        file.unlink()
    one.train("without-file", resume=True)
    assert np.array_equal(reference_of(run), reference_of(whole))
    assert same_weights(run, whole)


def resumed_by_file(run):
    """As the command line resumes: with the options that the run began with."""
    request = json.loads((run / "run.json").read_text(encoding="utf-8"))
    return load_task("dpo", request["task_options"], resumed_run=run)


def test_a_resumed_run_whose_model_is_gone_reads_the_file(made, tmp_path):
    one = made["t5"]
    model = shutil.copytree(one.model, tmp_path / "moved")
    run = interrupted(one, "model-gone", model=str(model))
    values = reference_of(run)
    shutil.rmtree(model)
    rows = resumed_by_file(run).rows(str(next(run.glob("data/train-*"))))
    context = context_of(run)
    resumed_by_file(run).before_training(resumed_by_file(run).initial_model(), rows, context)
    assert np.array_equal(rows.reference, values)
    for file in run.glob("data/train-*/reference-*"):
        file.unlink()
    with pytest.raises(BadRun, match="is gone, and so is the model that the run began with"):
        resumed_by_file(run).before_training(resumed_by_file(run).initial_model(), rows, context)


def context_of(run, resumed=True):
    from brimful.step.distributed import SingleProcess
    from brimful.training.evaluate import TrainingContext

    quiet = lambda sentence: None  # noqa: E731
    return TrainingContext(
        None, torch.device("cpu"), None, None, 0.85, 0, SingleProcess(), quiet, quiet, folder=run / "data", resumed=resumed
    )  # fmt: skip


def test_an_out_of_memory_error_in_the_middle_changes_nothing(one, base):
    calm = base[one.kind, "double"]
    RunsOut.calls = 0
    run, _ = one.train("runs-out", one.task(RunsOut), hooks=[Arm()])
    assert events(run, "oom")
    for (name, a), b in zip(weights(calm).items(), weights(run).values(), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-6, atol=1e-9, msg=name)


def test_within_a_small_limit_it_is_split_and_the_same(made, base):
    one, whole = made["qwen2"], base["qwen2", "double"]
    run, _ = one.train("limited", one.task(Double), memory_limit="6MiB")
    assert max(event["micro_batches"] for event in events(run, "step")) > 1
    for a, b in zip(weights(whole).values(), weights(run).values(), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-6, atol=1e-9)


# ── Rows ──────────────────────────────────────────────────────────────────────────────────────────────────────────────


def test_rows_have_a_reference_that_travels_to_workers(one, base):
    store = store_of(base[one.kind, "whole"])
    rows = one.task().rows(str(store))
    assert isinstance(rows, PairRows) and rows[0]["reference"] == (0.0, 0.0)
    (file,) = store.glob("reference-*.npy")
    rows.use_reference(np.load(file), file)
    copy = pickle.loads(pickle.dumps(rows))
    expected = np.load(file)
    assert [row["reference"] for row in copy.__getitems__([3, 1])] == expected[[3, 1]].tolist()
    assert copy[2]["reference"] == expected[2].tolist()
    task = one.task()
    assert [tuple(shape) for shape in copy.shapes(range(5))] == [task.shape(copy[n]) for n in range(5)]


def test_loader_workers_see_the_reference(made, base):
    with_workers, _ = made["t5"].train("workers", workers=1)
    assert same_weights(base["t5", "whole"], with_workers)


def plan_of(one, run, **how):
    path, _ = one.train(run, max_steps=1, **how)
    return {choice["name"]: choice for choice in events(path, "plan")[0]["choices"]}


def test_the_plan_names_reference_dropped_rows_and_shared_prompts(made):
    one = made["qwen2"]
    bad = [
        {"prompt": "甲？", "chosen": "红", "rejected": "红"},
        {"prompt": "甲？", "chosen": " ", "rejected": "红"},
        {"prompt": "甲？", "chosen": "红" * 300, "rejected": "红" * 301},
    ]
    as_text = [
        {"prompt": row["prompt"][-1]["content"], **{name: row[name][0]["content"] for name in ("chosen", "rejected")}}
        for row in pairs("qwen2")
    ]
    data = write_jsonl(one.folder / "bad.jsonl", [*as_text, *bad])
    valid = write_jsonl(one.folder / "valid.jsonl", [*as_text[:2], {**as_text[3], "prompt": "全新的问题？"}])
    choices = plan_of(one, "plan", data=data, valid=str(valid), task=one.task(max_tokens=64))
    assert choices["reference"]["effective"] == "the model as it begins"
    assert choices["max_tokens"]["effective"] == "64"
    assert choices["prompts shared with valid"]["effective"] == "2 of 3"
    reason = choices["rows"]["reason"]
    assert "1 with an empty field" in reason and "1 with equal replies" in reason and "1 too long" in reason
    assert "bad.jsonl, line 25: chosen is equal to rejected" in reason
    (valid_file,) = (one.folder / "plan").glob("data/valid-*/reference-*.npy")
    assert np.load(valid_file).shape == (3, 2)


def test_the_plan_says_that_padded_pairs_have_a_loss_in_chunks(one, base):
    plan = events(base[one.kind, "whole"], "plan")[0]
    assert (plan["layout"], plan["levers"]["chunked_loss"]) == ("padded", "on")


def test_new_weights_are_a_warning(made, base):
    rows = made["t5"].task().rows(str(store_of(base["t5", "whole"])))
    reasons = {name: reason for name, _, _, reason in Dpo(DpoOptions(model="causal-tiny")).remarks(rows)}
    assert "warning: it was never fine-tuned" in reasons["starting weights"]
    assert "starting weights" not in {name for name, *_ in made["t5"].task().remarks(rows)}


def test_a_model_of_pretrain_is_a_warning_and_one_of_sft_is_not(made, causal, tmp_path):
    one = made["qwen2"]
    for task, warned in (("pretrain", True), ("sft", False)):
        one.train(tmp_path / task, load_task(task, {"model": str(one.model)}), causal.raw, max_steps=1)
        for depth in range(3):  # the run, its export, and the export of that
            model = tmp_path / f"{task}{'-exported' * depth}"
            if depth:
                main(["export", str(tmp_path / f"{task}{'-exported' * (depth - 1)}"), "--output", str(model)])
            remarks = one.task(model=str(model)).remarks([])
            reasons = [
                reason for name, _, value, reason in remarks if (name, value) == ("starting weights", "of pretrain")
            ]
            assert [reason.startswith("warning: it was never fine-tuned") for reason in reasons] == [True] * warned


def test_new_weights_can_be_trained(made):
    run, _ = made["t5"].train("new", Dpo(DpoOptions(model="chatlm-tiny")), max_steps=1)
    assert len(reference_of(run)) == 24


# ── Options ───────────────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"model": None}, "dpo needs a model that was fine-tuned"),
        ({"loss": "rdpo"}, "must be one of sigmoid, ipo, hinge, orpo, simpo"),
        ({"beta": 0.0}, "beta=0.0 must be positive"),
        ({"label_smoothing": 0.5}, "must be below 0.5"),
        ({"label_smoothing": 0.1, "loss": "ipo"}, "label_smoothing= has no meaning"),
        ({"margin": 1.0}, "margin= is for loss='simpo'"),
        ({"reference": "chatlm-tiny", "loss": "orpo"}, "reference= cannot be used with"),
        ({"reference": "/nowhere"}, "reference='/nowhere' does not exist"),
        ({"train_on": "all"}, "train_on= is for sft"),
    ],
)
def test_options_that_cannot_work_are_refused(options, message):
    with pytest.raises(BadOption, match=message):
        DpoOptions(**{"model": "chatlm-tiny", **options})


def test_defaults_depend_on_loss_and_model(made):
    t5, qwen2 = made["t5"], made["qwen2"]
    assert (t5.task().learning_rate, qwen2.task().learning_rate) == (5e-6, 5e-7)
    assert qwen2.task(lora="r=8").learning_rate == 5e-6 and qwen2.task(loss="orpo").learning_rate == 8e-6
    assert (qwen2.task().beta, qwen2.task(loss="simpo").beta, qwen2.task(loss="simpo").margin) == (0.1, 2.0, 0.5)
    assert qwen2.task().global_batch == 64
    normalised = {
        loss: qwen2.task(loss=loss).length_normalised for loss in ("sigmoid", "hinge", "ipo", "orpo", "simpo")
    }
    assert normalised == {"sigmoid": False, "hinge": False, "ipo": True, "orpo": True, "simpo": True}


def test_a_score_that_there_is_none_of_is_refused_before_rows_are_read(made):
    one = made["qwen2"]
    message = r"best='bleu' is not a score of task dpo. Try: loss, accuracy, margin, logp_chosen\."
    with pytest.raises(BadOption, match=message):
        one.train("best", valid=str(one.file), best="bleu", data=one.folder / "gone.jsonl")


def test_a_reference_of_another_architecture_is_refused(made):
    task = made["t5"].task(reference=str(made["qwen2"].model))
    with pytest.raises(BadOption, match="is a causal model"):
        task.reference_model(1)


def test_pairs_in_memory_need_their_reference(made, base):
    one = made["t5"]
    rows = [{**row} for row in one.task().rows(str(store_of(base["t5", "whole"])))]
    for row in rows:
        del row["reference"]
    context = context_of(one.folder)
    with pytest.raises(BadData, match="have no log-probabilities of the reference"):
        one.task().before_training(None, rows, context)
    one.task(loss="simpo").before_training(None, rows, context)
    one.task().before_training(None, [{**row, "reference": (-1.0, -2.0)} for row in rows], context)


def test_a_resumed_run_does_not_need_another_reference_model(made, tmp_path):
    one = made["t5"]
    reference = shutil.copytree(one.model, tmp_path / "reference")
    run = interrupted(one, "reference-gone", reference=str(reference))
    shutil.rmtree(reference)
    task, values = resumed_by_file(run), reference_of(run)
    rows = task.rows(str(store_of(run)))
    task.before_training(task.initial_model(), rows, context_of(run))
    assert np.array_equal(rows.reference, values)


def test_rows_of_another_task_are_refused(one, tiny):
    with pytest.raises(BadData, match="not prompt and chosen and rejected|cannot train dpo"):
        one.task().rows(str(tiny.folder / "store"))


def test_the_command_line_plans(made, capsys):
    main(
        ["plan", "dpo", "--model", str(made["qwen2"].model), "--device", "cpu", "--global-batch", "8", "--lora", "r=4"]
    )
    assert "dpo on the CPU" in capsys.readouterr().out


def test_the_command_line_trains_and_resumes(made, tmp_path):
    one, run = made["qwen2"], tmp_path / "run"
    begin = [
        "dpo",
        one.file,
        "--model",
        one.model,
        "--device",
        "cpu",
        "--workers",
        "0",
        "--max-steps",
        "2",
        "--loss",
        "ipo",
    ]
    for words in ([*begin, "--no-length-normalised"], ["--resume", "--max-steps", "3"]):
        done = subprocess.run(
            [sys.executable, "-m", "brimful", "train", *map(str, words), "--run", run],
            capture_output=True, text=True, timeout=100, check=False,
        )  # fmt: skip
        assert done.returncode == 0, done.stderr
    assert "trained 3 steps" in done.stdout
