"""What a checkpoint holds comes back to the bit, or is refused by name."""

import os
import random
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import safetensors.torch
import torch
import transformers.modeling_utils
from safetensors.torch import load_file, save_file
from torch import nn

from brimful.errors import BadCheckpoint, BadRun
from brimful.memory.snapshot import RandomState
from brimful.task import Task
from brimful.training import state
from brimful.training.checkpoint import Best
from brimful.training.loop import Loop
from brimful.training.optimizer import NamedOptimizer
from brimful.training.state import Position, RankState
from tests.tasks.tiny import make_model

CPU = torch.device("cpu")


class Net(nn.Module):
    """With a tied head and a buffer."""

    def __init__(self, width=4):
        super().__init__()
        self.embed, self.norm = nn.Embedding(8, width), nn.BatchNorm1d(width)
        self.head = nn.Linear(width, 8, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, ids):
        return self.head(self.norm(self.embed(ids)))


def net(seed=0, **how):
    torch.manual_seed(seed)
    return Net(**how)


def trained(model, name="adamw", lr=1e-2, weight_decay=0.01):
    """A model and its optimizer after one step."""
    optimizer = NamedOptimizer(name=name, lr=lr, weight_decay=weight_decay)(model)
    step(model, optimizer)
    return optimizer


def step(model, optimizer):
    optimizer.zero_grad()
    model(torch.tensor([1, 2, 3])).square().sum().backward()
    optimizer.step()


def position(**changes):
    own = RankState(random=RandomState(CPU).to_plain(), stepper={"ooms": 3, "speeds": [1.0], "scaler": None})
    return Position(
        **{"step": 7, "loader": {"samples": 70, "seed": 0}, "ranks": (own,), "data": "abc", "settings": [], **changes}
    )


def write(folder: Path, model, optimizer, where=None):
    folder.mkdir(exist_ok=True)
    state.write(folder, where or position(), task=Task(), model=model, optimizer=optimizer, rows=[])
    return folder


@pytest.fixture
def saved(tmp_path):
    model = net()
    return write(tmp_path / "step", model, trained(model))


def same(one, other):
    pairs = zip(one.state_dict().items(), other.state_dict().items(), strict=True)
    return all(a == b and torch.equal(x, y) for (a, x), (b, y) in pairs)


def refused(error, work, *given):
    with pytest.raises(error) as told:
        work(*given)
    assert "\n" not in str(told.value)
    return str(told.value)


def test_a_checkpoint_is_a_model_folder_and_two_files(saved):
    assert sorted(str(path.relative_to(saved)) for path in saved.rglob("*") if path.is_file()) == [
        "model/model.safetensors",
        "optimizer.pt",
        "state.pt",
    ]


def test_weights_that_the_model_folder_holds_are_not_written_twice(tmp_path):
    model = make_model()
    folder = write(tmp_path / "step", model, torch.optim.SGD(model.parameters()))
    assert (folder / state.WEIGHTS).is_file() and not (folder / state.OWN_WEIGHTS).exists()


def test_weights_and_buffers_come_back_and_tied_ones_stay_tied(tmp_path):
    model = net()
    folder, other = write(tmp_path / "step", model, trained(model)), net(seed=1)
    assert not same(model, other)
    state.load_model(folder, other)
    assert same(model, other)
    assert other.norm.num_batches_tracked == 1
    assert other.head.weight is other.embed.weight
    assert len(load_file(folder / state.WEIGHTS)) == len(model.state_dict()) - 1


def test_a_resumed_step_gives_the_same_bits(tmp_path):
    model = net()
    optimizer = trained(model)
    folder, other = write(tmp_path / "step", model, optimizer), net(seed=1)
    again = NamedOptimizer(name="adamw", lr=1e-2, weight_decay=0.01)(other)
    state.load_model(folder, other)
    state.load_optimizer(folder, again, state.group_settings(optimizer))
    step(model, optimizer)
    step(other, again)
    assert same(model, other)


def test_optimizer_state_outlives_the_file_it_was_read_from(tmp_path):
    model = net()
    optimizer = trained(model)
    folder, again = (
        write(tmp_path / "step", model, optimizer),
        NamedOptimizer(name="adamw", lr=1e-2, weight_decay=0.01)(model),
    )
    state.load_optimizer(folder, again, state.group_settings(optimizer))
    file = folder / "optimizer.pt"
    with file.open("r+b") as content:
        content.write(b"\0" * file.stat().st_size)
    for param, one in optimizer.state.items():
        assert all(torch.equal(value, again.state[param][name]) for name, value in one.items())


def change(folder, how):
    tensors = load_file(folder / state.WEIGHTS)
    how(tensors)
    save_file(tensors, folder / state.WEIGHTS)


WRONG = {
    "norm.weight": lambda tensors: tensors.pop("norm.weight"),
    "other": lambda tensors: tensors.update(other=torch.ones(1)),
    "norm.bias": lambda tensors: tensors.update({"norm.bias": torch.ones(7)}),
}


@pytest.mark.parametrize("tensor", WRONG, ids=["missing", "extra", "another shape"])
def test_weights_that_do_not_fit_are_refused(saved, tensor):
    change(saved, WRONG[tensor])
    assert f"{saved / state.WEIGHTS} does not fit the model (" in refused(BadCheckpoint, state.load_model, saved, net())


@pytest.mark.parametrize("tensor", WRONG, ids=["missing", "extra", "another shape"])
def test_the_tensor_that_does_not_fit_is_named(saved, tensor):
    change(saved, WRONG[tensor])
    assert tensor in refused(BadCheckpoint, state.load_model, saved, net())


def test_weights_of_a_wider_model_are_refused(saved):
    refused(BadCheckpoint, state.load_model, saved, net(width=6))


@pytest.mark.parametrize("damage", [lambda data: data[:40], lambda data: b"", lambda data: b"\xff" * len(data)])
def test_damaged_weights_are_refused(saved, damage):
    file = saved / state.WEIGHTS
    file.write_bytes(damage(file.read_bytes()))
    assert str(file) in refused(BadCheckpoint, state.load_model, saved, net())


def test_weights_that_are_gone_are_refused(saved):
    (saved / state.WEIGHTS).unlink()
    assert str(saved / state.WEIGHTS) in refused(BadCheckpoint, state.load_model, saved, net())


@pytest.mark.parametrize("name", ["adamw", "adafactor"])
def test_rate_and_decay_asked_for_now_win_over_those_of_the_file(tmp_path, name):
    model = net()
    former = trained(model, name)
    folder, other, before = write(tmp_path / "step", model, former), net(), state.group_settings(former)
    optimizer = NamedOptimizer(name=name, lr=0.5, weight_decay=0.25)(other)
    state.load_optimizer(folder, optimizer, before)
    assert [(group["lr"], group["weight_decay"]) for group in optimizer.param_groups] == [(0.5, 0.25), (0.5, 0.0)]
    assert all(optimizer.state[param] for param in other.parameters())


@pytest.mark.parametrize(("before", "now"), [(0.01, 0.0), (0.0, 0.01)])
def test_decay_may_be_switched_off_or_on_when_a_run_is_resumed(tmp_path, before, now):
    model = net()
    former = trained(model, weight_decay=before)
    folder = write(tmp_path / "step", model, former)
    optimizer = NamedOptimizer(name="adamw", lr=0.1, weight_decay=now)(net())
    state.load_optimizer(folder, optimizer, state.group_settings(former))
    assert [group["weight_decay"] for group in optimizer.param_groups] == [now, 0.0]


@pytest.mark.parametrize(("before", "now"), [("AdamW", "adafactor"), ("Adafactor", "adamw")])
def test_another_optimizer_is_refused(tmp_path, before, now):
    """By the loop, which knows its name: torch compares groups only, and the first step would fail on its state."""
    optimizer = NamedOptimizer(name=now, lr=1.0, weight_decay=0.01)(net())
    told = refused(BadRun, Loop.resume, SimpleNamespace(optimizer=optimizer), tmp_path, position(optimizer=before))
    assert told.startswith(f"the run was trained with {before}")


def test_others_may_read_a_model_that_a_checkpoint_holds(tmp_path):
    before = os.umask(0o022)
    try:
        model = net()
        folder = write(tmp_path / "step", model, trained(model))
    finally:
        os.umask(before)
    assert {oct(file.stat().st_mode & 0o777) for file in (folder / "model").iterdir()} == {"0o644"}


def test_other_frozen_weights_are_refused(saved):
    model = net()
    model.norm.requires_grad_(False)
    told = refused(
        BadRun, state.load_optimizer, saved, NamedOptimizer(name="adamw", lr=1.0, weight_decay=0.01)(model), []
    )
    assert told.startswith(f"{saved / 'optimizer.pt'} does not fit the optimizer (")


def test_a_position_comes_back(tmp_path):
    where = position(best=Best(step=5, metric="loss", score=-1.5), optimizer="AdamW")
    model = net()
    found = state.read_position(write(tmp_path / "step", model, trained(model), where))
    assert (found.step, found.loader, found.best, found.data) == (
        7,
        where.loader,
        Best(step=5, metric="loss", score=-1.5),
        "abc",
    )
    assert found.optimizer == "AdamW"
    assert [own.stepper for own in found.ranks] == [where.ranks[0].stepper]


def test_a_position_without_a_best_has_none(saved):
    assert state.read_position(saved).best is None


@pytest.mark.parametrize("name", ["state.pt", "optimizer.pt"])
@pytest.mark.parametrize("content", [None, b"", b"no file of torch's", b"PK\x03\x04 half a zip"], ids=str)
def test_a_damaged_file_is_named(saved, name, content):
    if content is None:
        (saved / name).unlink()
    else:
        (saved / name).write_bytes(content)
    optimizer = NamedOptimizer(name="adamw", lr=1.0, weight_decay=0.01)(net())
    work = (
        (lambda: state.read_position(saved))
        if name == "state.pt"
        else lambda: state.load_optimizer(saved, optimizer, [])
    )
    assert str(saved / name) in refused(BadCheckpoint, work)


@pytest.mark.parametrize("content", [b"abc", torch.ones(2), 5], ids=["letters", "a tensor", "a number"])
def test_a_file_of_something_else_is_named(saved, content):
    if isinstance(content, bytes):
        (saved / "state.pt").write_bytes(content)
    else:
        torch.save(content, saved / "state.pt")
    refused(BadCheckpoint, state.read_position, saved)


def test_a_file_that_would_run_code_is_refused(saved, tmp_path):
    class Trap:
        def __reduce__(self):
            return (Path.touch, (tmp_path / "sprung",))

    torch.save({"step": Trap()}, saved / "state.pt")
    refused(BadCheckpoint, state.read_position, saved)
    assert not (tmp_path / "sprung").exists()


def test_a_file_of_another_version_is_refused(saved):
    content = torch.load(saved / "state.pt", weights_only=True)
    torch.save({**content, "future": 1}, saved / "state.pt")
    assert "state.pt was not written by this version of Brimful" in refused(BadCheckpoint, state.read_position, saved)


def draw():
    """Python's (with the second half of a pair of gaussians kept), NumPy's likewise, torch's."""
    return [random.random(), random.gauss(0, 1), np.random.rand(), np.random.randn(), float(torch.rand(()))]


def test_random_numbers_go_on_exactly_where_they_were_through_a_file(saved):
    for seed in (random.seed, np.random.seed, torch.manual_seed):
        seed(5)
    draw()
    torch.save(RandomState(CPU).to_plain(), saved / "random.pt")
    expected = [draw() for _ in range(700)]  # beyond what a generator makes in one go
    RandomState.of(torch.load(saved / "random.pt", weights_only=True), CPU).restore()
    assert [draw() for _ in range(700)] == expected


def test_a_process_takes_up_its_own_numbers_and_its_own_cut(saved):
    owns = []
    for rank in range(2):
        torch.manual_seed(rank)
        random.seed(rank)
        owns.append(RankState(random=RandomState(CPU).to_plain(), stepper={"ooms": rank}))
    torch.manual_seed(1)
    random.seed(1)
    expected = draw()[0::4]
    torch.manual_seed(99)
    assert state.restore_rank(owns, 1, CPU) == {"ooms": 1}
    assert draw()[0::4] == expected


def test_a_process_that_was_not_there_begins_with_numbers_of_its_own():
    own = position().ranks
    found = []
    for rank in (1, 2):
        torch.manual_seed(5)
        assert state.restore_rank(own, rank, CPU) == {"ooms": 0, "speeds": [1.0], "scaler": None}
        found.append(float(torch.rand(())))
    torch.manual_seed(5)
    assert len({*found, float(torch.rand(()))}) == 3


def test_what_a_checkpoint_takes_is_counted_once_for_tied_weights():
    model = net()
    optimizer = NamedOptimizer(name="adamw", lr=1.0, weight_decay=0.0)(model)
    weights = sum(param.nbytes for param in model.parameters())
    buffers = sum(buffer.nbytes for buffer in model.buffers())
    assert weights == 8 * 4 * 4 + 2 * 4 * 4
    assert state.needed_bytes(model, optimizer) == weights + buffers + 2 * weights
    step(model, optimizer)
    assert state.needed_bytes(model, optimizer) == weights + buffers + 2 * weights + 3 * 4  # and a counter each


def test_the_files_are_about_as_large_as_was_said(tmp_path):
    model = nn.Linear(256, 256)
    optimizer = NamedOptimizer(name="adamw", lr=1.0, weight_decay=0.0)(model)
    said = state.needed_bytes(model, optimizer)
    model(torch.ones(1, 256)).sum().backward()
    optimizer.step()
    folder = write(tmp_path / "step", model, optimizer)
    found = sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())
    assert said <= found <= 1.05 * said


def test_frozen_weights_need_no_room_for_state():
    model = net()
    model.embed.requires_grad_(False)
    optimizer = NamedOptimizer(name="adamw", lr=1.0, weight_decay=0.0)(model)
    weights, buffers = 8 * 4 * 4 + 2 * 4 * 4, 2 * 4 * 4 + 8
    assert state.needed_bytes(model, optimizer) == weights + buffers + 2 * (2 * 4 * 4)


def test_weights_that_share_memory_are_counted_once_as_they_are_written_once(tmp_path):
    model = nn.Sequential(nn.Linear(256, 256, bias=False), nn.Linear(256, 256, bias=False))
    model[1].weight = nn.Parameter(model[0].weight.data, requires_grad=False)
    optimizer = NamedOptimizer(name="adamw", lr=1.0, weight_decay=0.0)(model)
    write(tmp_path / "step", model, optimizer)
    weight = 256 * 256 * 4
    assert state.needed_bytes(model, optimizer) == weight + 2 * weight
    assert weight < (tmp_path / "step" / state.WEIGHTS).stat().st_size < 1.1 * weight


MIXED = {
    "b.weight": torch.arange(12.0).reshape(3, 4),
    "a.weight": torch.arange(5.0),
    "half": torch.arange(7.0).bfloat16(),
    "count": torch.tensor(3),
    "mask": torch.tensor([True, False, True]),
    "字": torch.arange(6, dtype=torch.float64),
    "nothing": torch.empty(0, 4),
    "small": torch.arange(3, dtype=torch.int8),
}


def both(folder, tensors, **how):
    """What is written here, and what safetensors writes."""
    state.save_file(tensors, folder / "ours", **how)
    safetensors.torch.save_file(tensors, folder / "theirs", **how)
    return (folder / "ours").read_bytes(), (folder / "theirs").read_bytes()


@pytest.mark.parametrize("metadata", [None, {"format": "pt"}])
def test_the_file_is_that_of_safetensors_to_the_byte(tmp_path, metadata):
    ours, theirs = both(tmp_path, MIXED, metadata=metadata)
    assert ours == theirs


@pytest.mark.parametrize("dtype", state.DTYPE_NAMES, ids=str)
def test_every_type_has_its_name_and_its_place(tmp_path, dtype):
    others = {f"other {number}": torch.ones(3).to(one) for number, one in enumerate(state.DTYPE_NAMES)}
    ours, theirs = both(tmp_path, {"one": torch.ones(2, 3).to(dtype), **others})
    assert ours == theirs


def test_a_tensor_larger_than_a_piece_is_whole_in_the_file(tmp_path, monkeypatch):
    monkeypatch.setattr(state, "PIECE_BYTES", 16)
    ours, theirs = both(tmp_path, MIXED)
    assert ours == theirs


def test_a_type_without_a_name_here_is_left_to_safetensors(tmp_path):
    state.save_file({"wide": torch.ones(2, dtype=torch.complex64)}, tmp_path / "file")
    assert load_file(tmp_path / "file")["wide"].dtype == torch.complex64


def test_tensors_that_share_memory_are_refused_as_by_safetensors(tmp_path):
    one = torch.ones(4)
    with pytest.raises(RuntimeError, match="share memory"):
        state.save_file({"one": one, "two": one}, tmp_path / "file")


def test_a_tensor_out_of_order_is_refused_as_by_safetensors(tmp_path):
    with pytest.raises(ValueError, match="non contiguous"):
        state.save_file({"one": torch.ones(3, 4).T}, tmp_path / "file")


@pytest.fixture
def written(monkeypatch):
    """Names of the files that were written in pieces."""
    names, write = [], state._write
    monkeypatch.setattr(state, "_write", lambda file, tensor: (names.append(file.name), write(file, tensor)))
    return names


@pytest.mark.parametrize("make", [make_model, lambda: nn.Linear(3, 3)], ids=["transformers", "torch"])
def test_a_checkpoint_writes_its_weights_in_pieces(tmp_path, written, make):
    model = make()
    optimizer = NamedOptimizer(name="adamw", lr=1.0, weight_decay=0.0)(model)
    state.write(tmp_path, position(), task=Task(), model=model, optimizer=optimizer, rows=[])
    assert set(written) == {str(tmp_path / state.WEIGHTS)}
    assert len(written) == len(load_file(tmp_path / state.WEIGHTS))


def test_transformers_loads_what_was_written_in_pieces(tmp_path, written):
    model = make_model()
    with state.writing_in_pieces():
        model.save_pretrained(tmp_path)
    again = transformers.AutoModelForSeq2SeqLM.from_pretrained(tmp_path)
    assert written
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), again.parameters(), strict=True))


def test_the_savers_of_the_libraries_are_put_back_after_a_failure():
    now = lambda: {safetensors.torch.save_file, transformers.modeling_utils.safe_save_file}  # noqa: E731
    with pytest.raises(OSError), state.writing_in_pieces():
        assert now() == {state.save_file}
        raise OSError
    assert state.save_file not in now()
