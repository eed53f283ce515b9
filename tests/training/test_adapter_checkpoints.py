"""Runs that train an adapter: checkpoints of it alone, exact resume, a base that is never changed and never exchanged."""

import json
import sys

import pytest
import torch
from torch.utils._pytree import keystr, tree_flatten_with_path

import brimful
from brimful.errors import BadCheckpoint, BadRun, MissingExtra, TaskError
from brimful.tasks.adapters import load_base
from brimful.training import state
from brimful.training.checkpoint import Checkpoint
from brimful.training.loop import Hook
from tests.tasks.adapted import Adapted, Rows, logits, make_base

peft = pytest.importorskip("peft")

STEPS, KILLED_AT = 6, 5
HOW = {"max_steps": STEPS, "save_every": 2, "device": "cpu", "cache": False, "quiet": True, "lr": 1e-2}
EXACT = ("model/adapter_model.safetensors", "weights.safetensors", "model/adapter_config.json")


class Killed(BaseException):
    """Not an Exception: nothing is saved on the way out."""


class KillAt(Hook):
    def after_step(self, loop, result):
        if loop.step == KILLED_AT:
            raise Killed


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    return make_base(tmp_path_factory.mktemp("base") / "qwen", std=0.05)


@pytest.fixture(scope="module")
def train(base, tmp_path_factory):
    """Train with one plan for all: what is planned here does not depend on the adapter."""
    plan = tmp_path_factory.mktemp("plan") / "plan.json"
    brimful.plan(
        Adapted(base), data=Rows(), micro_batch=4, layout="padded", checkpointing="off", compile="off", workers=0, device="cpu", cache=False,
        deterministic=True,
        memory_limit="1GiB",
    ).save(plan)  # fmt: skip
    return lambda task, run, **changes: brimful.train(task, Rows(), run=run, plan=plan, **{**HOW, **changes})


def hashes(checkpoint, names=EXACT):
    files = {file.name: file.sha256 for file in Checkpoint.read(checkpoint).manifest.files}
    return {name: files[name] for name in names}


@pytest.mark.parametrize(
    ("lora", "load_in", "optimizer"),
    [
        ("r=4,dropout=0.1", None, None),
        ("r=4,dropout=0.1,dora", None, None),
        ("r=4,dropout=0.1", "4bit", None),
        ("r=4,dropout=0.1", "8bit", None),
        ("r=160,targets=up_proj", "4bit", "adamw8bit"),
    ],
)
def test_killed_and_resumed_gives_the_same_bits(train, base, tmp_path, lora, load_in, optimizer):
    if load_in or optimizer:
        pytest.importorskip("bitsandbytes")
    task = Adapted(base, lora, load_in)
    changes = {"optimizer": optimizer, "valid": Rows(8), "eval_every": 3}
    whole = train(task, tmp_path / "whole", **changes)
    with pytest.raises(Killed):
        train(task, tmp_path / "killed", hooks=[KillAt()], **changes)
    resumed = train(task, tmp_path / "killed", resume=True, **changes)
    assert (whole.step, whole.loss) == (resumed.step, resumed.loss)
    assert_same(whole.checkpoint, resumed.checkpoint)
    if optimizer:
        dtypes = {
            value.dtype for value in optimizer_state(whole.checkpoint).values() if isinstance(value, torch.Tensor)
        }
        assert torch.uint8 in dtypes


def optimizer_state(checkpoint):
    """Every value by its path. The file's bytes also tell which tensors share memory, and loaded ones do not."""
    content = torch.load(checkpoint / "optimizer.pt", weights_only=True)
    return {keystr(path): value for path, value in tree_flatten_with_path(content)[0]}


def assert_same(one, other, files=EXACT):
    """Adapter, weights and optimizer state of two checkpoints, to the bit."""
    assert hashes(one, files) == hashes(other, files)
    before, after = optimizer_state(one), optimizer_state(other)
    assert before.keys() == after.keys()
    for path, value in before.items():
        if isinstance(value, torch.Tensor):
            assert value.dtype == after[path].dtype and torch.equal(value, after[path]), path
        else:
            assert value == after[path], path


class TestOneRun:
    @pytest.fixture(scope="class")
    @classmethod
    def run(cls, train, base, tmp_path_factory):
        folder = tmp_path_factory.mktemp("runs") / "run"
        before = {file.name: file.read_bytes() for file in base.iterdir()}
        return folder, train(Adapted(base), folder, max_steps=4), before

    def test_a_checkpoint_holds_the_adapter_and_not_the_base(self, base, run):
        checkpoint = Checkpoint.read(run[1].checkpoint)
        names = {file.name for file in checkpoint.manifest.files}
        assert {"model/adapter_model.safetensors", "model/adapter_config.json", "model/tokenizer.json"} <= names
        assert "model/model.safetensors" not in names
        saved = state._shapes_and_dtypes(run[1].checkpoint / state.OWN_WEIGHTS)
        assert saved and all("lora_" in name for name in saved)
        assert len(checkpoint.facts["base"]) == 64

    def test_the_files_of_the_base_are_untouched(self, base, run):
        assert run[2] == {file.name: file.read_bytes() for file in base.iterdir()}

    def test_peft_loads_the_model_of_the_run(self, base, run):
        from transformers import AutoModelForCausalLM

        own = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
        before = logits(own)
        assert not torch.equal(logits(peft.PeftModel.from_pretrained(own, run[0] / "model")), before)

    def test_another_base_is_refused(self, train, base, run, tmp_path):
        other = make_base(tmp_path / "other", std=0.05, seed=1)
        with pytest.raises(BadRun, match="is an adapter of another base"):
            train(Adapted(other), run[0], resume=True)

    def test_the_same_files_in_another_dtype_are_another_base(self, train, base, run):
        with pytest.raises(BadRun, match="is an adapter of another base"):
            train(Adapted(base, dtype=torch.bfloat16), run[0], resume=True)

    def test_another_adapter_is_refused(self, train, base, run):
        with pytest.raises(BadCheckpoint, match="does not fit the model"):
            train(Adapted(base, "r=8,dropout=0.1"), run[0], resume=True)

    def test_a_flipped_byte_is_found(self, base, run):
        file = run[1].checkpoint / "model" / "adapter_model.safetensors"
        content = file.read_bytes()
        file.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
        try:
            with pytest.raises(BadCheckpoint, match="adapter_model.safetensors"):
                Checkpoint.read(run[1].checkpoint).check(contents=True)
        finally:
            file.write_bytes(content)


@pytest.mark.parametrize("load_in", [None, "4bit"])
def test_training_and_evaluation_leave_the_base_as_it_was(train, base, tmp_path, load_in):
    if load_in:
        pytest.importorskip("bitsandbytes")
    found = {}

    class Look(Hook):
        def before(self, loop):
            names = set(loop.task.trained_weights(loop.stepper.model))
            found["before"] = {n: v.clone() for n, v in loop.stepper.model.state_dict().items() if n not in names}

        def after(self, loop, ending):
            found["after"] = loop.stepper.model.state_dict()

    train(Adapted(base, load_in=load_in), tmp_path / "run", hooks=[Look()], valid=Rows(8), eval_every=2)
    assert found["before"] and all(torch.equal(value, found["after"][name]) for name, value in found["before"].items())


class Whole(Adapted):
    """All weights of the base, without an adapter."""

    name = "adapted"

    def model(self):
        return load_base(self.base)

    def initial_model(self):
        return load_base(self.base)

    def save(self, model, folder, rows):
        model.save_pretrained(folder)


def test_a_whole_model_with_8_bit_adamw_resumes_to_the_same_bits(train, tmp_path):
    pytest.importorskip("bitsandbytes")
    task = Whole(make_base(tmp_path / "base", std=0.05, intermediate_size=160))  # 160 × 32: enough for 8 bits
    whole = train(task, tmp_path / "whole", optimizer="adamw8bit")
    with pytest.raises(Killed):
        train(task, tmp_path / "killed", hooks=[KillAt()], optimizer="adamw8bit")
    resumed = train(task, tmp_path / "killed", resume=True, optimizer="adamw8bit")
    assert_same(whole.checkpoint, resumed.checkpoint, files=["model/model.safetensors"])
    state_of = optimizer_state(whole.checkpoint).values()
    assert torch.uint8 in {value.dtype for value in state_of if isinstance(value, torch.Tensor)}


def test_an_adapter_of_4_bits_learns(train, base, tmp_path):
    pytest.importorskip("bitsandbytes")
    train(Adapted(base, "r=8", "4bit"), tmp_path / "run", max_steps=30, lr=2e-2, save_every=None)
    events = [json.loads(line) for line in (tmp_path / "run" / "events.jsonl").read_text().splitlines()]
    losses = [event["loss"] for event in events if event["event"] == "step"]
    assert losses[-1] < losses[0] - 0.5


def test_an_average_of_the_adapter_is_saved_and_the_adapter_resumed(train, base, tmp_path):
    whole = train(Adapted(base), tmp_path / "whole", ema=0.5)
    with pytest.raises(Killed):
        train(Adapted(base), tmp_path / "killed", hooks=[KillAt()], ema=0.5)
    resumed = train(Adapted(base), tmp_path / "killed", resume=True, ema=0.5)
    assert_same(whole.checkpoint, resumed.checkpoint)


def test_a_name_the_model_lacks_is_a_mistake_of_the_task(base):
    with pytest.raises(TaskError, match="trained_weights.* names 'nothing'"):
        state._trained(torch.nn.Linear(2, 2), ["nothing"])


@pytest.mark.parametrize("whole", [True, False])
def test_the_fingerprint_of_a_base_leaves_the_trained_weights_out(monkeypatch, whole):
    if not whole:
        monkeypatch.setattr(state, "HASHED_BYTES", 0)
    model = torch.nn.Sequential(torch.nn.Linear(300, 300), torch.nn.Linear(4, 4))
    names = ["1.weight", "1.bias"]
    before = state.base_fingerprint(model, names)
    model[1].weight.data += 1
    assert state.base_fingerprint(model, names) == before
    model[0].weight.data[0, 0] += 1
    assert state.base_fingerprint(model, names) != before


def test_eight_bits_without_bitsandbytes_are_refused_before_anything_is_trained(train, base, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "bitsandbytes", None)
    with pytest.raises(MissingExtra, match="bitsandbytes"):
        train(Adapted(base), tmp_path / "run", optimizer="adamw8bit")
    assert not (tmp_path / "run" / "checkpoints").exists()
