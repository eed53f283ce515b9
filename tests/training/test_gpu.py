"""Runs on a card: memory that others take in mid-run, checkpoints with the card's random state, evaluation in halves."""

import gc
import signal

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file
from torch import nn

import brimful
from brimful.errors import DoesNotFit
from brimful.memory.meter import available_bytes
from brimful.tasks.adapters import load_base
from brimful.training import metrics
from brimful.training.events import read_events
from brimful.units import MiB
from tests.emulated_card import is_inserted
from tests.tasks.adapted import Adapted, Rows, make_base

pytestmark = pytest.mark.gpu
BASE = {"hidden_size": 512, "intermediate_size": 1536, "num_hidden_layers": 12}
if not is_inserted():
    BASE = {"hidden_size": 2048, "intermediate_size": 6144, "num_hidden_layers": 8}
WIDTH, LIMIT = (64, 24 * MiB) if is_inserted() else (1024, 384 * MiB)
CARD = torch.device("cuda:0")


def draw_rows(seed, count):
    draw = torch.Generator().manual_seed(seed)
    return [
        torch.randint(1, 50, (int(size),), generator=draw) for size in torch.randint(8, 65, (count,), generator=draw)
    ]


class Texts(brimful.Task):
    """Uneven rows of tokens."""

    global_batch = 32
    worst_shape = (64,)

    def __init__(self, dropout=0.0):
        super().__init__()
        self.dropout = dropout

    def model(self):
        torch.manual_seed(1)
        blocks = [(nn.Linear(WIDTH, WIDTH), nn.GELU(), nn.Dropout(self.dropout)) for _ in range(2)]
        layers = [nn.Embedding(50, WIDTH), *blocks[0], *blocks[1], nn.Linear(WIDTH, 50)]
        return nn.Sequential(*layers).double()

    def shape(self, row):
        return (len(row),)

    def collate(self, rows):
        return nn.utils.rnn.pad_sequence(rows, batch_first=True)

    def dummy(self, rows, shape):
        return torch.ones(rows, *shape, dtype=torch.long)

    def loss(self, model, batch):
        losses = F.cross_entropy(model(batch).flatten(0, 1), batch.flatten(), ignore_index=0, reduction="sum")
        return brimful.Loss(losses, (batch > 0).sum())


@pytest.fixture(autouse=True, scope="module")
def _small_matrices():
    """The peak of an emulated card takes longer to measure than these runs to train."""
    with pytest.MonkeyPatch.context() as patch:
        if is_inserted():
            patch.setattr(metrics, "MATRIX", {"cuda": 64, "cpu": 64})
            patch.setattr(metrics, "TIMED_S", 0.001)
        yield


class Taken(brimful.Hook):
    """All but a little of the memory is held by something else in some of the steps."""

    def __init__(self, steps, left):
        self.steps, self.left, self.held = steps, left, None

    def after_step(self, loop, result):
        if result.step + 1 not in self.steps:
            self.held = None
        elif self.held is None:
            torch.cuda.empty_cache()
            room = LIMIT - torch.cuda.memory_reserved() - self.left
            self.held = torch.empty(room, dtype=torch.uint8, device=CARD)


class Stopped(brimful.Hook):
    """By SIGTERM, after a step."""

    def __init__(self, step):
        self.step = step

    def after_step(self, loop, result):
        if result.step == self.step:
            signal.raise_signal(signal.SIGTERM)


def train(folder, task=None, **options):
    """The weights and the events of a run."""
    defaults = {"max_steps": 24, "quiet": True, "cache": False, "memory_limit": LIMIT, "deterministic": True}
    options = {**defaults, **options}
    brimful.train(task or Texts(), draw_rows(0, 200), run=folder, device="cuda", **options)
    torch.cuda.empty_cache()
    return load_file(folder / "model" / "model.safetensors"), list(read_events(folder / "events.jsonl"))


def distance(one, other):
    return max(((one[name] - other[name]).norm() / other[name].norm()).item() for name in other)


def test_a_run_that_is_short_of_memory_for_a_while_ends_with_the_weights_of_one_that_is_not(tmp_path):
    calm, _ = train(tmp_path / "calm")
    short, events = train(tmp_path / "short", hooks=[Taken(range(6, 9), LIMIT // 8)])
    steps = [one for one in events if one["event"] == "step"]
    assert any(one["event"] == "oom" for one in events)
    assert [one["rows"] for one in steps] == [32] * 24
    assert max(one["micro_batches"] for one in steps) > steps[-1]["micro_batches"] == steps[0]["micro_batches"]
    assert distance(short, calm) < 1e-9


def test_a_resumed_run_draws_the_dropout_of_one_that_was_not_stopped(tmp_path):
    whole, _ = train(tmp_path / "whole", Texts(0.1), max_steps=8)
    train(tmp_path / "part", Texts(0.1), max_steps=8, hooks=[Stopped(5)])
    rest, events = train(tmp_path / "part", Texts(0.1), max_steps=8, resume=True)
    assert any(one["event"] == "resume" for one in events)
    assert all(torch.equal(rest[name], whole[name]) for name in whole)


def test_an_evaluation_that_is_short_of_memory_gives_the_same_loss(tmp_path):
    losses = []
    for name, hooks in (("calm", []), ("short", [Taken(range(2, 3), LIMIT // 16)])):
        _, events = train(tmp_path / name, max_steps=1, valid=draw_rows(1, 100), hooks=hooks)
        losses.append([one["loss"] for one in events if one["event"] == "eval"])
    assert losses[0] == pytest.approx(losses[1], rel=1e-12)


@pytest.fixture
def adapted(tmp_path):
    """A base of bf16, and a cap on this process that has room for it once."""
    pytest.importorskip("peft")
    base = make_base(tmp_path / "base", "llama", dtype=torch.bfloat16, std=0.02, shards="20MB", **BASE)
    cap = 1.5 * sum(file.stat().st_size for file in base.glob("*.safetensors"))
    torch.cuda.empty_cache()
    before = torch.cuda.memory.get_per_process_memory_fraction()
    torch.cuda.set_per_process_memory_fraction(cap / torch.cuda.get_device_properties(CARD).total_memory)
    yield Adapted(base, dtype=torch.bfloat16)
    torch.cuda.set_per_process_memory_fraction(before)


def test_a_base_with_an_adapter_is_planned_read_and_trained_under_a_cap_that_has_room_for_it_once(adapted, tmp_path):
    ooms = torch.cuda.memory_stats().get("num_ooms", 0)
    gc.collect()
    gc.disable()  # collection by chance hid that planning left the layers of its own base on the card
    try:
        ending = brimful.train(
            adapted, Rows(), run=tmp_path / "run", device="cuda", max_steps=2, plan_seconds=5, quiet=True, cache=False
        )
    finally:
        gc.enable()
    assert ending.step == 2
    assert torch.cuda.memory_stats().get("num_ooms", 0) == ooms


def test_weights_that_others_left_no_room_for_are_not_called_unreadable(adapted):
    held = torch.empty(available_bytes(CARD) - 8 * MiB, dtype=torch.uint8, device=CARD)
    with pytest.raises(
        DoesNotFit, match=r"memory ran out while the weights of .* were read onto cuda:0, which had room for 8"
    ):
        load_base(adapted.base, device=CARD, dtype=torch.bfloat16)
    del held
