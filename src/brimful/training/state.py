"""What a checkpoint holds, and how a run takes it up again: everything that the next step depends on.

    model/         as `Task.save` writes it: for Hugging Face models a folder that loads anywhere
    optimizer.pt   its state
    state.pt       step, samples taken, best score so far; of every process its random numbers and its cut

The learning rate is a function of the step, so the schedule has no state. Weights are safetensors; the rest is read with
`weights_only=True` and never without.

A model on a card has no second one on the host: weights leave in pieces (`streamed`), optimizer state tensor by tensor, as
torch writes it, and both come back from the mapped file. Of T5 base with AdamW that is 2.2 GB less.
"""

import json
import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from os import PathLike
from pathlib import Path
from typing import Any, BinaryIO

import safetensors.torch
import torch
from safetensors import SafetensorError
from torch import nn
from torch.optim import Optimizer
from torch.utils._pytree import tree_map_only

from brimful.errors import BadCheckpoint, BadRun, in_one_line
from brimful.memory.snapshot import RandomState
from brimful.task import Dataset, Task
from brimful.training.checkpoint import Best
from brimful.units import MiB

# Weights on their way from the device into a file, 64 MiB at a time.
#
# safetensors wants all tensors in host memory at once: of a model on a card it makes a second one there, 0.75 GB for T5
# base, at every checkpoint. Its format asks for nothing of the kind: the length of a header, the header, and the tensors'
# bytes one after the other, so they can be written as they come. What is written is the same file to the byte.
#
# Which tensors belong into the file, by which names, and which of the tied ones are left out, transformers and safetensors
# know best, and neither takes a writer. So theirs is replaced while a model is saved. Another thread that saves something
# meanwhile gets the same file from either.


PIECE_BYTES = 64 * MiB

NAMES = {
    torch.bool: "BOOL", torch.uint8: "U8", torch.int8: "I8", torch.int16: "I16", torch.float16: "F16",
    torch.bfloat16: "BF16", torch.int32: "I32", torch.float32: "F32", torch.float64: "F64", torch.int64: "I64",
}  # fmt: skip
"""Of types in a header, in safetensors' order: a file begins with the last, so that every tensor is aligned."""

SAVERS = (("safetensors.torch", "save_file"), ("transformers.modeling_utils", "safe_save_file"))
"""What `save_model` and `save_pretrained` write with."""

_save_at_once = safetensors.torch.save_file


@contextmanager
def in_pieces() -> Iterator[None]:
    """What `safetensors.torch.save_model` and `save_pretrained` save in here is written by `save_file` below."""
    found = [(sys.modules[module], name) for module, name in SAVERS if hasattr(sys.modules.get(module), name)]
    before = [getattr(module, name) for module, name in found]
    try:
        for module, name in found:
            setattr(module, name, save_file)
        yield
    finally:
        for (module, name), saver in zip(found, before, strict=True):
            setattr(module, name, saver)


def save_file(
    tensors: Mapping[str, torch.Tensor], filename: str | PathLike[str], metadata: Mapping[str, str] | None = None
) -> None:
    """As `safetensors.torch.save_file`, which still gets what it has to convert or to refuse."""
    if not _plain(tensors):
        _save_at_once(dict(tensors), filename, metadata=None if metadata is None else dict(metadata))
        return
    rank = list(NAMES)
    order = sorted(tensors, key=lambda name: (-rank.index(tensors[name].dtype), name))
    header = _header({name: tensors[name] for name in order}, metadata or {})
    with Path(filename).open("wb") as file:
        file.write(len(header).to_bytes(8, "little") + header)
        for name in order:
            _write(file, tensors[name])


def _plain(tensors: Mapping[str, torch.Tensor]) -> bool:
    """Whether each is a block of numbers of its own: dense, in order, of a type named above."""
    of_their_own = len({tensor.untyped_storage().data_ptr() for tensor in tensors.values() if tensor.numel()})
    return (
        sys.byteorder == "little"
        and all(tensor.layout == torch.strided and tensor.is_contiguous() for tensor in tensors.values())
        and all(tensor.dtype in NAMES for tensor in tensors.values())
        and of_their_own == sum(tensor.numel() > 0 for tensor in tensors.values())
    )


def _header(tensors: Mapping[str, torch.Tensor], metadata: Mapping[str, str]) -> bytes:
    """Type, shape and place of every tensor; filled up with blanks to whole 8 bytes."""
    entries: dict[str, object] = {"__metadata__": dict(metadata)} if metadata else {}
    end = 0
    for name, tensor in tensors.items():
        start, end = end, end + tensor.nbytes
        entries[name] = {"dtype": NAMES[tensor.dtype], "shape": list(tensor.shape), "data_offsets": [start, end]}
    text = json.dumps(entries, ensure_ascii=False, separators=(",", ":")).encode()
    return text + b" " * (-len(text) % 8)


def _write(file: BinaryIO, tensor: torch.Tensor) -> None:
    """Its bytes, one piece in host memory at a time; of a tensor that lies there nothing is copied."""
    flat = tensor.detach().reshape(-1)
    for piece in flat.split(PIECE_BYTES // flat.element_size()):
        file.write(piece.cpu().view(torch.uint8).numpy())


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
