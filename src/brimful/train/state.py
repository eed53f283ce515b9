"""What a checkpoint holds, and how a run takes it up again: everything that the next step depends on.

    model/         as `Task.save` writes it: for Hugging Face models a folder that loads anywhere
    optimizer.pt   its state
    state.pt       step, samples taken, best score so far; of every process its random numbers and its cut

The learning rate is a function of the step, so the schedule has no state. Weights are safetensors; the rest is read with
`weights_only=True` and never without.

A model on a card has no second one on the host: weights leave in pieces (`streamed`), optimizer state tensor by tensor, as
torch writes it, and both come back from the mapped file. Of T5 base with AdamW that is 2.2 GB less.
"""

import os
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from torch import nn
from torch.optim import Optimizer
from torch.utils._pytree import tree_map_only

from brimful.errors import BadCheckpoint, BadRun, in_one_line
from brimful.memory.snapshot import RandomState
from brimful.task import Dataset, Task
from brimful.train.checkpoint import Best
from brimful.train.streamed import in_pieces

WEIGHTS = Path("model") / "model.safetensors"


@dataclass(frozen=True, slots=True, kw_only=True)
class Own:
    """One process's part."""

    random: dict[str, Any]
    stepper: dict[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class Position:
    """Where a run stands between two steps, weights and optimizer state aside."""

    step: int
    loader: dict[str, Any]
    own: tuple[Own, ...]
    """Of each process."""
    best: Best | None = None
    data: str = ""
    """The fingerprint of the rows."""
    optimizer: str = ""
    """The name of its class."""

    @classmethod
    def from_file(cls, content: dict[str, Any]) -> "Position":
        best = content.pop("best")
        own = tuple(Own(**one) for one in content.pop("own"))
        return cls(**content, own=own, best=None if best is None else Best(**best))


def write(
    folder: Path, position: Position, *, task: Task, model: nn.Module, optimizer: Optimizer, rows: Dataset
) -> None:
    """All files of a checkpoint."""
    (folder / "model").mkdir()
    with in_pieces():
        task.save(model, folder / "model", rows)
    _like_other_files(folder / "model")
    for name, content in (("optimizer.pt", optimizer.state_dict()), ("state.pt", asdict(position))):
        with (folder / name).open("wb") as file:  # by itself torch would not say that a disk is full
            torch.save(content, file)


def _like_other_files(folder: Path) -> None:
    """safetensors makes files that only their owner may read; these are for whoever may read the folder."""
    umask = os.umask(0)
    os.umask(umask)
    for file in folder.iterdir():
        file.chmod(0o666 & ~umask)


def needed_bytes(model: nn.Module, optimizer: Optimizer) -> int:
    """What a checkpoint takes: counted, but for optimizer state that is not there before the first step (predicted: AdamW's)."""
    weights = _bytes_of([*model.parameters(), *model.buffers()])
    state = _bytes_of(
        [value for one in optimizer.state.values() for value in one.values() if isinstance(value, torch.Tensor)]
    )
    return weights + (state or 2 * _bytes_of([p for p in model.parameters() if p.requires_grad]))


def read_position(folder: Path) -> Position:
    try:
        return Position.from_file(_load(folder / "state.pt"))
    except (KeyError, TypeError, AttributeError) as error:
        raise BadCheckpoint(f"{folder / 'state.pt'} is not of this Brimful ({in_one_line(error)})") from None


def load_weights(folder: Path, model: nn.Module) -> None:
    """Strictly: every weight, and no other."""
    from safetensors.torch import load_model

    try:
        load_model(model, folder / WEIGHTS, strict=True, device=str(next(model.parameters()).device))
    except (RuntimeError, SafetensorError, OSError) as error:
        said = " ".join(str(error).split())  # the tensors are named below the first line
        raise BadCheckpoint(f"{folder / WEIGHTS} does not fit the model ({said[:300]})") from None


def load_optimizer(folder: Path, optimizer: Optimizer) -> None:
    """Its state; learning rates, decay and the like stay as they are asked for now."""
    asked = [{key: value for key, value in group.items() if key != "params"} for group in optimizer.param_groups]
    try:
        optimizer.load_state_dict(_load(folder / "optimizer.pt", mapped=True))
    except (ValueError, KeyError) as error:
        raise BadRun(
            f"{folder / 'optimizer.pt'} does not fit the optimizer ({in_one_line(error)}): resume with the same --optimizer and "
            "--freeze, or start a new run --from this checkpoint"
        ) from None
    for group, options in zip(optimizer.param_groups, asked, strict=True):
        group.update(options)
    for one in optimizer.state.values():
        one.update(tree_map_only(torch.Tensor, _off_the_file, dict(one)))


def _off_the_file(tensor: torch.Tensor) -> torch.Tensor:
    """A card has its own copy already; on the host it is the file's memory, and the file may be removed or cut short."""
    return tensor.clone() if tensor.device.type == "cpu" else tensor


def take_up(own: Sequence[Own], rank: int, device: torch.device) -> dict[str, Any] | None:
    """This process's random numbers put back; the stepper's state. With more processes than before, a new one begins
    with numbers of its own."""
    if rank < len(own):
        RandomState.of(own[rank].random, device).restore()
        return own[rank].stepper
    torch.manual_seed(torch.initial_seed() + rank)
    return {**own[0].stepper, "ooms": 0}


def _load(path: Path, *, mapped: bool = False) -> Any:
    """Mapped, its tensors take no memory until somebody writes into them."""
    try:
        return torch.load(path, map_location="cpu", weights_only=True, mmap=mapped)
    except Exception as error:  # whatever pickle meets in bytes that are none of its own
        raise BadCheckpoint(f"{path} cannot be read ({in_one_line(error)})") from None


def _bytes_of(tensors: Sequence[torch.Tensor]) -> int:
    return sum({tensor.data_ptr() or id(tensor): tensor.nbytes for tensor in tensors}.values())
