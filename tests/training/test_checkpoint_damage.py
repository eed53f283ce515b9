"""A run whose newest checkpoint was damaged in any way resumes exactly as undisturbed, or is refused in one message."""

import gc
import json
import os
import random
import shutil
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import nn

import brimful
from brimful.errors import BrimfulError
from brimful.files import json_sha256
from brimful.training import metrics
from brimful.training.events import last_steps, read_events

ROWS = list(torch.randn(24, 4, generator=torch.Generator().manual_seed(0)))
SAVED, STEPS = 3, 4
"""The run was stopped after this step, and is resumed up to that one."""
FILES = ("manifest.json", "model/model.safetensors", "optimizer.pt", "buffers.pt", "state.pt")
Damage = Callable[[Path], object]
"""Changes the run in a folder."""


class Net(nn.Module):
    """Dropout, so that random state matters; a buffer that no model folder holds."""

    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.Dropout(0.3), nn.Linear(6, 4))
        self.register_buffer("seen", torch.zeros(4), persistent=False)

    def forward(self, x):
        self.seen += x.detach().mean(0)
        return self.layers(x) + 0.1 * self.seen


class Damaged(brimful.Task):
    global_batch = 8

    def model(self):
        return Net()

    def loss(self, model, batch):
        return brimful.Loss((model(batch) - 1).square().sum(), len(batch))


@pytest.fixture(autouse=True, scope="module")
def _quick_runs():
    """The peak of the CPU takes longer to measure than these runs to train."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(metrics, "MATRIX", {"cpu": 64})
        patch.setattr(metrics, "TIMED_S", 0.001)
        gc.collect()
        gc.freeze()  # a run collects garbage at its end, which takes 0.5 s with all test modules imported
        yield
        gc.unfreeze()


def train(folder: Path, *, steps: int, seed: int = 0) -> None:
    """Begins the run or resumes it."""
    options = {"device": "cpu", "micro_batch": 8, "cache": False, "workers": 0, "schedule": "constant", "lr": 1e-2}
    brimful.train(Damaged(), ROWS, run=folder, resume=True, max_steps=steps, save_every=1, keep=3, seed=seed, **options)


@pytest.fixture(scope="module")
def runs(tmp_path_factory) -> Path:
    """`whole` was never stopped, `stopped` is to be damaged, `other` is another run of the same task."""
    folder = tmp_path_factory.mktemp("damage")
    train(folder / "whole", steps=STEPS)
    train(folder / "stopped", steps=SAVED)
    train(folder / "other", steps=SAVED, seed=1)
    return folder


def checkpoint(run: Path, step: int = SAVED) -> Path:
    return run / "checkpoints" / f"step-{step:08}"


def result(run: Path) -> dict[str, torch.Tensor]:
    """Weights, optimizer state and buffers at the end of the run, and its losses since it was stopped."""
    end = checkpoint(run, STEPS)
    entries = torch.load(end / "optimizer.pt", weights_only=True)["state"].items()
    optimizer = {f"{param}.{key}": value for param, state in entries for key, value in state.items()}
    losses = {one["step"]: one["loss"] for one in last_steps(read_events(run / "events.jsonl"))}
    return {
        **load_file(end / "model" / "model.safetensors"),
        **torch.load(end / "buffers.pt", weights_only=True),
        **optimizer,
        "losses": torch.tensor([losses[step] for step in range(SAVED + 1, STEPS + 1)], dtype=torch.float64),
    }


def resume(run: Path, whole: dict[str, torch.Tensor]) -> str:
    """What came of it, in a word. Everything but a clear refusal or the undisturbed result fails the test."""
    was_there = checkpoint(run).is_dir()
    try:
        train(run, steps=STEPS)
    except BrimfulError as error:
        assert str(error) and "\n" not in str(error), f"more than one message: {error}"
        assert "Try: " in str(error), error
        return "refused"
    now = result(run)
    assert now.keys() == whole.keys()
    assert all(torch.equal(now[name], value) for name, value in whole.items()), "other weights, and not a word"
    events = list(read_events(run / "events.jsonl"))
    start = next((event["step"] for event in reversed(events) if event["event"] == "resume"), 0)
    if start < SAVED and was_there:
        notes = [event["sentence"] for event in events if event["event"] == "note"]
        assert any(f"skipped {checkpoint(run).name}" in note for note in notes), "a checkpoint skipped without a word"
    return f"resumed from step {start}"


# Kinds of damage


def flip(path: Path, at: int) -> None:
    data = bytearray(path.read_bytes())
    data[at] ^= 1 << (at % 8)
    path.write_bytes(data)


def replace(path: Path, make: Damage) -> None:
    """Remove it, whatever it is, and make something else in its place."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)
    make(path)


def as_folder(path: Path) -> None:
    path.mkdir()
    (path / "file").write_text("in a folder")


def deny(path: Path) -> None:
    path.chmod(0)


def edit_manifest(run: Path, *, signed: bool = False, **changes) -> None:
    """Its own hash follows the changes if it is signed again."""
    path = checkpoint(run) / "manifest.json"
    content = {**json.loads(path.read_text()), **changes}
    if signed:
        del content["sha256"]
        content = {"sha256": json_sha256(content), **content}
    path.write_text(json.dumps(content))


def of_file(name: str, size: int, points: int, draw: random.Random) -> Iterator[tuple[str, Damage]]:
    """All that may happen to one file of the newest checkpoint, truncated and flipped at `points` points."""

    def at(change: Callable[[Path], object]) -> Damage:
        return lambda run: change(checkpoint(run) / name)

    def take(run: Path, source: Path) -> None:
        shutil.copyfile(source, checkpoint(run) / name)

    yield "removed", at(lambda path: path.unlink())
    yield "emptied", at(lambda path: path.write_bytes(b""))
    yield "grown by a byte", at(lambda path: path.write_bytes(path.read_bytes() + b"\n"))
    yield "zeros", at(lambda path: path.write_bytes(bytes(size)))
    yield "a folder", at(lambda path: replace(path, as_folder))
    yield "a dangling link", at(lambda path: replace(path, lambda it: it.symlink_to("nowhere")))
    yield "a link to itself", at(lambda path: replace(path, lambda it: it.symlink_to(it.name)))
    yield "a pipe", at(lambda path: replace(path, os.mkfifo))
    if os.geteuid() != 0:
        yield "permission denied", at(deny)
    yield "of the step before", lambda run: take(run, checkpoint(run, SAVED - 1) / name)
    yield "of another run", lambda run: take(run, checkpoint(run.parent / "other") / name)
    yield (
        "linked to that of another run",
        at(
            lambda path: replace(
                path, lambda it: it.symlink_to(checkpoint(it.parents[2 + name.count("/")].parent / "other") / name)
            )
        ),
    )
    fixed = (1, 8, size // 2, size - 1)
    for point in sorted({*fixed, *(draw.randrange(1, size) for _ in range(points))}):
        yield f"truncated at {point}", at(lambda path, point=point: os.truncate(path, point))
    for point in sorted({0, *fixed, *(draw.randrange(size) for _ in range(points))}):
        yield f"bit {point % 8} of byte {point} flipped", at(lambda path, point=point: flip(path, point))


def of_manifest() -> Iterator[tuple[str, Damage]]:
    deep = "[" * 100_000 + "]" * 100_000
    for text in ("null", "[]", "{}", "7", '"text"', deep, '{"version": 1, "facts": ' + deep + "}", "{", "\x00"):
        yield f"manifest is {text[:30]!r}", lambda run, text=text: (checkpoint(run) / "manifest.json").write_text(text)
    changes = [
        {"version": 0}, {"version": 2}, {"version": "1"}, {"version": None}, {"step": SAVED + 1}, {"serial": 99},
        {"files": []}, {"facts": {}}, {"more": 1},
    ]  # fmt: skip
    for change in changes:
        yield f"manifest with {change}", lambda run, change=change: edit_manifest(run, **change)
    wrong_types = [
        {"version": 2}, {"version": True}, {"step": "3"}, {"step": None}, {"step": SAVED + 1}, {"serial": "3"}, {"files": None},
        {"files": [1]}, {"files": [{"name": "state.pt"}]}, {"files": {"name": "state.pt"}}, {"more": 1},
        {"files": [{"name": 1, "size_bytes": 1, "sha256": [""]}]},
        {"files": [{"name": "state.pt", "size_bytes": "1", "sha256": [""]}]},
        {"files": [{"name": "state.pt", "size_bytes": 1, "sha256": None}]},
        {"files": [{"name": "state.pt", "size_bytes": 1, "sha256": []}]},
        {"files": [{"name": "../../run.json", "size_bytes": 1, "sha256": [""]}]},
    ]  # fmt: skip
    for change in wrong_types:
        yield f"manifest signed with {change}", lambda run, change=change: edit_manifest(run, signed=True, **change)


def of_folder() -> Iterator[tuple[str, Damage]]:
    """To the folder of checkpoints and to whole checkpoints."""

    def swap(run: Path) -> None:
        newest, former = checkpoint(run), checkpoint(run, SAVED - 1)
        newest.rename(run / "third")
        former.rename(newest)
        (run / "third").rename(former)

    def mixed(run: Path, *names: str) -> None:
        for name in names:
            shutil.copyfile(checkpoint(run, SAVED - 1) / name, checkpoint(run) / name)

    def leave(run: Path, name: str, *, full: bool) -> None:
        path = run / "checkpoints" / name
        shutil.copytree(checkpoint(run, SAVED - 1), path) if full else as_folder(path)

    def plant(run: Path, name: str, source: str) -> None:
        shutil.copyfile(checkpoint(run.parent / "other") / source, checkpoint(run) / name)

    yield "renamed", lambda run: checkpoint(run).rename(checkpoint(run, SAVED + 1))
    yield "two swapped", swap
    yield "copied over the next step", lambda run: shutil.copytree(checkpoint(run), checkpoint(run, SAVED + 1))
    yield (
        "the whole one of another run",
        lambda run: replace(checkpoint(run), lambda path: shutil.copytree(checkpoint(run.parent / "other"), path)),
    )
    for kind, make in {
        "removed": lambda path: None,
        "an empty folder": Path.mkdir,
        "a file": Path.touch,
        "a dangling link": lambda path: path.symlink_to("nowhere"),
        "a link to the former": lambda path: path.symlink_to(f"step-{SAVED - 1:08}"),
        "a link to itself": lambda path: path.symlink_to(path.name),
    }.items():
        yield f"newest is {kind}", lambda run, make=make: replace(checkpoint(run), make)
        yield f"the folder of checkpoints is {kind}", lambda run, make=make: replace(run / "checkpoints", make)
        yield f"best.json is {kind}", lambda run, make=make: replace(run / "checkpoints" / "best.json", make)
        yield f"the link to the model is {kind}", lambda run, make=make: replace(run / "model", make)
    yield "model folder removed", lambda run: shutil.rmtree(checkpoint(run) / "model")
    yield "model and optimizer of the former", lambda run: mixed(run, "model/model.safetensors", "optimizer.pt")
    yield "all but the manifest of the former", lambda run: mixed(run, *FILES[1:])
    yield "manifest and state of the former", lambda run: mixed(run, "manifest.json", "state.pt")
    yield "weights of another run planted", lambda run: plant(run, "weights.safetensors", "model/model.safetensors")
    for kind in ("part-4711", "gone-4711", "part", "gone", "aside"):
        for step in (SAVED - 1, SAVED, SAVED + 1):
            for full in (False, True):
                name = f".step-{step:08}.{kind}"
                yield (
                    f"{name} left, {'whole' if full else 'in part'}",
                    lambda run, name=name, full=full: leave(run, name, full=full),
                )
    for text in (
        "",
        "null",
        "[]",
        "[" * 100_000,
        '{"step": 3}',
        '{"step": [], "metric": 1, "score": "x"}',
        '{"step": 99, "metric": "loss", "score": NaN}',
    ):
        yield f"best.json is {text[:30]!r}", lambda run, text=text: (run / "checkpoints" / "best.json").write_text(text)
    yield ".DS_Store left", lambda run: (checkpoint(run) / ".DS_Store").write_bytes(b"x")
    yield "a note beside the model", lambda run: (checkpoint(run) / "model" / "README.md").write_text("mine")


def of_all() -> Iterator[tuple[str, Damage]]:
    """No checkpoint is left to go back to."""

    def each(run: Path, change: Damage) -> None:
        for path in (run / "checkpoints").glob("step-*"):
            change(path)

    for name in FILES:
        yield f"all without {name}", lambda run, name=name: each(run, lambda path: (path / name).unlink())
        yield f"all with a flipped bit in {name}", lambda run, name=name: each(run, lambda path: flip(path / name, 30))
    yield "all empty", lambda run: each(run, lambda path: replace(path, Path.mkdir))
    yield "all removed", lambda run: each(run, shutil.rmtree)


def try_all(runs: Path, damages: list[tuple[str, Damage]]) -> Counter[str]:
    whole, outcomes, broken = result(runs / "whole"), Counter(), []
    for name, damage in damages:
        run = runs / "damaged"
        shutil.copytree(runs / "stopped", run, symlinks=True)
        damage(run)
        try:
            outcomes[resume(run, whole)] += 1
        except Exception as error:
            broken.append(f"{name}: {type(error).__name__}: {error}")
        shutil.rmtree(run)
    assert not broken, "\n".join(broken)
    return outcomes


def every(runs: Path, points: int, seed: int) -> list[tuple[str, Damage]]:
    draw = random.Random(seed)
    sizes = {name: (checkpoint(runs / "stopped") / name).stat().st_size for name in FILES}
    of_files = [
        (f"{name}: {kind}", damage) for name in FILES for kind, damage in of_file(name, sizes[name], points, draw)
    ]
    return [*of_files, *of_manifest(), *of_folder(), *of_all()]


def test_a_few_kinds_of_damage_are_survived_or_refused(runs):
    """One in twenty of those below."""
    assert try_all(runs, random.Random(1).sample(every(runs, points=1, seed=0), 16)).total() == 16


@pytest.mark.torture
def test_every_kind_of_damage_is_survived_or_refused(runs):
    damages = every(runs, points=8, seed=0)
    outcomes = try_all(runs, damages)
    print(
        f"\n{len(damages)} damaged checkpoints: {', '.join(f'{n} {outcome}' for outcome, n in sorted(outcomes.items()))}"
    )
