"""What a checkpoint holds, and how a run continues from it: everything that the next step depends on.

    model/         as `Task.save` writes it: for Hugging Face models a folder that loads anywhere
    weights.safetensors    only if model/model.safetensors does not hold the weights: with `ema` the model folder holds
                   their average; of a task with `trained_weights` (LoRA), these alone
    optimizer.pt   its state, and the average
    buffers.pt     buffers that are not persistent, which no model folder holds; only if there are any
    state.pt       step, samples taken, best score so far; for every rank its random state and its stepper's

The learning rate is a function of the step, so the schedule has no state (a scheduler of the task's own does). Weights are
safetensors; the rest is read with `weights_only=True` and never without.

**Weights that are not in a checkpoint** (`Task.trained_weights`: the base of an adapter) come from `Task.initial_model` again.
`base_fingerprint` in the facts of a checkpoint tells whether they are the same. It is taken from the weights in memory, not
from the files they came from, so another dtype or another quantization of the same files is found too. Up to 1 GB every
byte is hashed, in about 0.7 s; of more, 64 KiB from each tensor, since a model that was trained any further differs
everywhere.

A model on a GPU has no copy on the host: weights leave in pieces of 64 MiB, optimizer state tensor by tensor, as torch
writes it, and both come back from the mapped file. For T5 base with AdamW that is 2.2 GB of host RAM less.

**Why safetensors' writer is replaced.** `safetensors.torch.save_file` (0.8) copies all tensors to the host before it writes
the first: 0.75 GB for T5 base at every checkpoint. Its format does not need that: the length of a header, the header, and
the tensors' bytes one after the other. Which tensors belong in the file, by which names, and which of the tied ones are
left out, `save_pretrained` and `save_model` know best, and neither takes a writer, so `save_file` is replaced while a model
is saved. The file is the same to the byte.
"""

import copy
import hashlib
import json
import os
import sys
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import asdict, dataclass, field
from os import PathLike
from pathlib import Path
from typing import Any, BinaryIO

import safetensors.torch
import torch
from safetensors import SafetensorError
from torch import nn
from torch.optim import Optimizer
from torch.utils._pytree import tree_flatten, tree_map_only

from brimful.errors import BadCheckpoint, BadRun, TaskError, in_one_line
from brimful.memory.context import tensors_of
from brimful.memory.snapshot import RandomState, overlaps
from brimful.task import Dataset, Task
from brimful.training.average import AVERAGE, WeightAverage
from brimful.training.checkpoint import Best, Checkpoint
from brimful.units import KiB, MiB

PIECE_BYTES = 64 * MiB
HASHED_BYTES = 10**9
"""Weights of a base that are hashed whole; of a larger one `SAMPLE_BYTES` of each tensor, from `SAMPLES` places."""
SAMPLE_BYTES, SAMPLES = 64 * KiB, 16

DTYPE_NAMES = {
    torch.bool: "BOOL", torch.uint8: "U8", torch.int8: "I8", torch.int16: "I16", torch.float16: "F16",
    torch.bfloat16: "BF16", torch.int32: "I32", torch.float32: "F32", torch.float64: "F64", torch.int64: "I64",
}  # fmt: skip
"""In safetensors' order: a file begins with the last of these, so that every tensor is aligned."""

WRITERS = (("safetensors.torch", "save_file"), ("transformers.modeling_utils", "safe_save_file"))
"""What `save_model` and `save_pretrained` write with."""
WEIGHTS = Path("model") / "model.safetensors"

OWN_WEIGHTS, BUFFERS = "weights.safetensors", "buffers.pt"

_save_at_once = safetensors.torch.save_file


@dataclass(frozen=True, slots=True, kw_only=True)
class RankState:
    """What differs between ranks."""

    random: dict[str, Any]
    stepper: dict[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class Position:
    """Where a run stands between two steps, apart from weights and optimizer state."""

    step: int
    loader: dict[str, Any]
    ranks: tuple[RankState, ...]
    best: Best | None = None
    data: str = ""
    """The fingerprint of the rows."""
    optimizer: str = ""
    """The name of its class."""
    settings: list[dict[str, Any]]
    """Of every group of the optimizer before its first step: what differs in optimizer.pt was changed by training."""
    scheduler: dict[str, Any] | None = None
    """The state of the task's own learning-rate scheduler."""
    patience: dict[str, Any] = field(default_factory=dict)
    """Of `patience.Patience`: evaluations without a better one, and what the task has noted about its steps."""

    @classmethod
    def from_file(cls, content: dict[str, Any]) -> "Position":
        best = content.pop("best")
        ranks = tuple(RankState(**rank_state) for rank_state in content.pop("ranks"))
        return cls(**content, ranks=ranks, best=None if best is None else Best(**best))


def write(
    folder: Path, position: Position, *, task: Task, model: nn.Module, optimizer: Optimizer, rows: Dataset,
    average: WeightAverage | None = None,
) -> None:  # fmt: skip
    """All files of a checkpoint. With an average, that is the model which the task saves."""
    (folder / "model").mkdir()
    names = task.trained_weights(model)
    with writing_in_pieces():
        with nullcontext() if average is None else average.applied():
            task.save(model, folder / "model", rows)
        _save_tokenizer(task, folder / "model")
        if names is not None:
            save_file(_trained(model, names), folder / OWN_WEIGHTS)
        elif average is not None or not _holds_weights(folder / WEIGHTS, model):
            safetensors.torch.save_model(model, str(folder / OWN_WEIGHTS))
    _set_permissions(folder)
    contents = {"optimizer.pt": optimizer.state_dict(), "state.pt": asdict(position)}
    if buffers := _non_persistent(model):
        contents[BUFFERS] = buffers
    for name, content in contents.items():
        with (folder / name).open("wb") as file:  # given a path, torch does not say that a disk is full
            torch.save(content, file)


def _save_tokenizer(task: Task, folder: Path) -> None:
    """A text model is of no use without it. A task that saved one itself, or has none of Hugging Face's kind, is left alone."""
    tokenizer: Any = getattr(task, "tokenizer", None)
    if hasattr(tokenizer, "save_pretrained") and not any(folder.glob("tokenizer*")):
        tokenizer.save_pretrained(folder)


def _set_permissions(folder: Path) -> None:
    """safetensors makes files that only their owner may read; these are for whoever may read the folder."""
    umask = os.umask(0)
    os.umask(umask)
    for file in folder.rglob("*"):
        if file.is_file():
            file.chmod(0o666 & ~umask)


def _holds_weights(file: Path, model: nn.Module) -> bool:
    """Whether a run can be resumed from this file: every weight of the model by its name, of tied ones one, and no other.

    Reads names, shapes and dtypes, a millisecond at every save, so a run cannot go on with checkpoints of no use.
    """
    expected = {name: value for name, value in model.state_dict().items() if isinstance(value, torch.Tensor)}
    try:
        saved = _shapes_and_dtypes(file)
    except (SafetensorError, OSError):
        return False
    fits = all(
        name in expected
        and shape == list(expected[name].shape)
        and dtype == DTYPE_NAMES.get(expected[name].dtype, dtype)
        for name, (shape, dtype) in saved.items()
    )
    return fits and {_address(expected, name) for name in saved} == {_address(expected, name) for name in expected}


def _shapes_and_dtypes(file: Path) -> dict[str, tuple[list[int], str]]:
    with safetensors.safe_open(file, "pt") as saved:
        slices = {name: saved.get_slice(name) for name in saved.keys()}  # noqa: SIM118 - not a mapping
        return {name: (tensor.get_shape(), tensor.get_dtype()) for name, tensor in slices.items()}


def _address(tensors: Mapping[str, torch.Tensor], name: str) -> object:
    """The same for tied weights; an empty tensor has no memory to share."""
    return (tensors[name].data_ptr() or name, tensors[name].shape)


def needed_bytes(model: nn.Module, optimizer: Optimizer, names: Collection[str] | None = None) -> int:
    """The size of a checkpoint: counted, or predicted as AdamW's for optimizer state that the first step will make.

    With names (`Task.trained_weights`), those weights alone.
    """
    if names is None:
        weights = _unique_bytes([*model.parameters(), *model.buffers()])
    else:  # once to resume from, and once in the model folder
        weights = 2 * _unique_bytes(list(_trained(model, names).values()))
    states = dict(optimizer.state)
    averages, tensors = tensors_of(states.pop(AVERAGE, {})), tensors_of(list(states.values()))
    state = _unique_bytes(tensors) or 2 * _unique_bytes([p for p in model.parameters() if p.requires_grad])
    return weights * (2 if averages and names is None else 1) + state + _unique_bytes(averages)


def _unique_bytes(tensors: Sequence[torch.Tensor]) -> int:
    return sum({tensor.data_ptr() or id(tensor): tensor.nbytes for tensor in tensors}.values())


@contextmanager
def writing_in_pieces() -> Iterator[None]:
    """`safetensors.torch.save_model` and `save_pretrained` write with `save_file` below."""
    replaced = [(sys.modules[module], name) for module, name in WRITERS if hasattr(sys.modules.get(module), name)]
    before = [getattr(module, name) for module, name in replaced]
    try:
        for module, name in replaced:
            setattr(module, name, save_file)
        yield
    finally:
        for (module, name), writer in zip(replaced, before, strict=True):
            setattr(module, name, writer)


def save_file(
    tensors: Mapping[str, torch.Tensor], filename: str | PathLike[str], metadata: Mapping[str, str] | None = None
) -> None:
    """Like `safetensors.torch.save_file`, which still gets what must be converted or refused."""
    if not _plain(tensors):
        _save_at_once(dict(tensors), filename, metadata=None if metadata is None else dict(metadata))
        return
    write_tensors(filename, tensors, tensors.__getitem__, metadata or {})


def write_tensors(
    filename: str | PathLike[str],
    like: Mapping[str, torch.Tensor],
    tensor: Callable[[str], torch.Tensor],
    metadata: Mapping[str, str],
) -> None:
    """A safetensors file of tensors that are asked for one after the other. `like` has their shapes and dtypes, and may be
    on the meta device."""
    dtypes = list(DTYPE_NAMES)
    order = sorted(like, key=lambda name: (-dtypes.index(like[name].dtype), name))
    header = _header({name: like[name] for name in order}, metadata)
    with Path(filename).open("wb") as file:
        file.write(len(header).to_bytes(8, "little") + header)
        for name in order:
            _write(file, tensor(name))


def _plain(tensors: Mapping[str, torch.Tensor]) -> bool:
    """Whether each has a storage of its own and is dense, contiguous and of a dtype named above."""
    storages = len({tensor.untyped_storage().data_ptr() for tensor in tensors.values() if tensor.numel()})
    return (
        sys.byteorder == "little"
        and all(tensor.layout == torch.strided and tensor.is_contiguous() for tensor in tensors.values())
        and all(tensor.dtype in DTYPE_NAMES for tensor in tensors.values())
        and storages == sum(tensor.numel() > 0 for tensor in tensors.values())
    )


def _header(tensors: Mapping[str, torch.Tensor], metadata: Mapping[str, str]) -> bytes:
    """Dtype, shape and offsets of every tensor, padded with spaces to a multiple of 8 bytes."""
    entries: dict[str, object] = {"__metadata__": dict(metadata)} if metadata else {}
    end = 0
    for name, tensor in tensors.items():
        start, end = end, end + tensor.nbytes
        entries[name] = {"dtype": DTYPE_NAMES[tensor.dtype], "shape": list(tensor.shape), "data_offsets": [start, end]}
    text = json.dumps(entries, ensure_ascii=False, separators=(",", ":")).encode()
    return text + b" " * (-len(text) % 8)


def _write(file: BinaryIO, tensor: torch.Tensor) -> None:
    """Its bytes, one piece in host memory at a time; a tensor that is on the host is not copied."""
    flat = tensor.detach().reshape(-1)
    for piece in flat.split(PIECE_BYTES // flat.element_size()):
        file.write(piece.cpu().view(torch.uint8).numpy())


def read_position(folder: Path) -> Position:
    try:
        return Position.from_file(_load(folder / "state.pt"))
    except (KeyError, TypeError, AttributeError) as error:
        raise BadCheckpoint(
            f"{folder / 'state.pt'} was not written by this version of Brimful ({in_one_line(error)}). Try: a new run."
        ) from None


def _trained(model: nn.Module, names: Collection[str]) -> dict[str, torch.Tensor]:
    """These of the model's weights, of tied ones the first."""
    tensors = model.state_dict()
    if unknown := sorted(set(names) - tensors.keys()):
        raise TaskError(
            f"trained_weights() names {unknown[0]!r}, which the model lacks. Try: names of its state_dict()."
        )
    first = {_address(tensors, name): name for name in sorted(names, reverse=True)}
    return {name: tensors[name] for name in sorted(first.values())}


def base_fingerprint(model: nn.Module, names: Collection[str]) -> str:
    """A hash of all other weights: their names, shapes, dtypes and content."""
    others = {
        name: value
        for name, value in sorted(model.state_dict().items())
        if name not in names and isinstance(value, torch.Tensor)
    }
    whole = sum(value.nbytes for value in others.values()) <= HASHED_BYTES
    digest = hashlib.sha256()
    for name, value in others.items():
        digest.update(f"{name} {list(value.shape)} {value.dtype}\n".encode())
        flat = value.detach().reshape(-1).view(torch.uint8)
        rows, taken = len(flat) // SAMPLES, SAMPLE_BYTES // SAMPLES
        if not whole and rows > taken:
            flat = flat[: SAMPLES * rows].view(SAMPLES, rows)[:, :taken].reshape(-1)
        for piece in flat.split(PIECE_BYTES):
            digest.update(piece.contiguous().cpu().numpy())
    return digest.hexdigest()


def check_base(checkpoint: Checkpoint, fingerprint: str) -> None:
    """Refuse to continue an adapter on other weights than those it was trained with."""
    if checkpoint.facts.get("base") != fingerprint:
        raise BadRun(
            f"{checkpoint.path} is an adapter of another base: the weights that it does not hold differ from those it was "
            "trained with. Try: the base model, its dtype and its quantization as the run began, or a new run."
        )


def load_model(folder: Path, model: nn.Module, names: Collection[str] | None = None) -> None:
    """Its weights, strictly: all of them, no other, and none of another dtype; and its buffers, persistent or not.

    With names, those weights alone.
    """
    file = folder / OWN_WEIGHTS if (folder / OWN_WEIGHTS).is_file() else folder / WEIGHTS
    try:
        _check_dtypes(file, model)
        if names is None:
            safetensors.torch.load_model(model, file, strict=True, device=str(next(model.parameters()).device))
        else:
            _load_trained(file, _trained(model, names))
    except (RuntimeError, SafetensorError, OSError) as error:
        details = " ".join(str(error).split())  # the tensors are named below the first line
        raise BadCheckpoint(f"{file} does not fit the model ({details[:300]}). Try: the same task options.") from None
    if (folder / BUFFERS).is_file():
        _load_buffers(folder / BUFFERS, model)


@torch.no_grad()
def _load_trained(file: Path, weights: Mapping[str, torch.Tensor]) -> None:
    saved = _shapes_and_dtypes(file)
    if other := sorted(saved.keys() ^ weights.keys()):
        raise RuntimeError(f"{len(other)} names differ, such as {other[0]}")
    with safetensors.safe_open(file, "pt") as content:
        for name, tensor in weights.items():
            if saved[name][0] != list(tensor.shape):
                raise RuntimeError(f"{name} has the shape {saved[name][0]} and not {list(tensor.shape)}")
            tensor.copy_(content.get_tensor(name))


def _check_dtypes(file: Path, model: nn.Module) -> None:
    """torch would round the weights of a checkpoint to the model's dtype, and say nothing."""
    saved = {name: dtype for name, (_, dtype) in _shapes_and_dtypes(file).items()}
    for name, param in model.named_parameters():
        own = DTYPE_NAMES.get(param.dtype)
        if own and saved.get(name, own) != own:
            raise BadCheckpoint(
                f"{file} has {name} in {saved[name]}, and the model has it in {own}. "
                "Try: the weights= that the run began with, or a new run."
            )


def _non_persistent(model: nn.Module) -> dict[str, torch.Tensor]:
    return {
        f"{prefix}.{name}".lstrip("."): buffer.detach()
        for prefix, module in model.named_modules()
        for name, buffer in module._buffers.items()
        if buffer is not None and name in module._non_persistent_buffers_set
    }


@torch.no_grad()
def _load_buffers(file: Path, model: nn.Module) -> None:
    """Copy into the model's own tensors where shapes agree; replace buffers that training created or resized."""
    device = next(model.parameters()).device
    modules = dict(model.named_modules())
    for name, saved in _load(file, mapped=True).items():
        prefix, _, own = name.rpartition(".")
        if prefix not in modules:
            raise BadCheckpoint(f"{file} does not fit the model (it has no {prefix}). Try: the same task options.")
        buffer = modules[prefix]._buffers.get(own)
        if buffer is not None and (buffer.shape, buffer.dtype) == (saved.shape, saved.dtype) and not overlaps(buffer):
            buffer.copy_(saved)
        else:
            place = device if buffer is None else buffer.device
            modules[prefix].register_buffer(own, saved.to(place, copy=True), persistent=False)


def group_settings(optimizer: Optimizer) -> list[dict[str, Any]]:
    """A copy of what each of its groups holds besides parameters."""
    return [
        {key: copy.deepcopy(value) for key, value in group.items() if key != "params"}
        for group in optimizer.param_groups
    ]


def load_optimizer(folder: Path, optimizer: Optimizer, settings_before: Sequence[Mapping[str, Any]]) -> None:
    """Its state. Weight decay and the like stay as they are set now, and so does the learning rate.

    Schedule-free optimizers keep state among the settings of their groups. What training has changed there since
    `settings_before` is state.
    """
    settings_now, average = group_settings(optimizer), optimizer.state.get(AVERAGE)
    try:
        optimizer.load_state_dict(_load(folder / "optimizer.pt", mapped=True))
        _load_average(optimizer, average)
    except (ValueError, KeyError, RuntimeError) as error:
        raise BadRun(
            f"{folder / 'optimizer.pt'} does not fit the optimizer ({in_one_line(error)}). "
            "Try: the same optimizer= and task options as before, or a new run."
        ) from None
    for group, before, now in zip(optimizer.param_groups, settings_before, settings_now, strict=True):
        changed = (key for key, value in group.items() if not (key in before and _equal(value, before[key])))
        trained = {
            key: _moved(group[key], now.get(key), group["params"]) for key in changed if key not in ("params", "lr")
        }
        group.update({**now, **trained})
    for param_state in optimizer.state.values():
        param_state.update(tree_map_only(torch.Tensor, _off_the_file, dict(param_state)))


def _load_average(optimizer: Optimizer, average: dict[str, Any] | None) -> None:
    """Into the tensors that there is room for. One that was not kept before begins now; one no longer wanted is dropped."""
    saved = optimizer.state.pop(AVERAGE, None)
    if average is None:
        return
    optimizer.state[AVERAGE] = average
    for name, value in (saved or {}).items():
        if isinstance(value, torch.Tensor):
            average[name].copy_(value)
        else:
            average[name] = value


def _equal(one: Any, other: Any) -> bool:
    """Of settings, which may be tensors."""
    (values, tree), (others, other_tree) = tree_flatten(one), tree_flatten(other)
    return tree == other_tree and all(
        torch.equal(a, b) if isinstance(a, torch.Tensor) and isinstance(b, torch.Tensor) else bool(a == b)
        for a, b in zip(values, others, strict=True)
    )


def _moved(value: Any, now: Any, params: Sequence[torch.Tensor]) -> Any:
    """A value of a group, its tensors on the device of the tensor in its place now, else of the group's parameters."""
    device = next(leaf.device for leaf in (*tree_flatten(now)[0], *params) if isinstance(leaf, torch.Tensor))
    return tree_map_only(torch.Tensor, lambda tensor: tensor.to(device, copy=True), value)


def _off_the_file(tensor: torch.Tensor) -> torch.Tensor:
    """A GPU has its own copy already; on the host it is the file's memory, and the file may be removed."""
    return tensor.clone() if tensor.device.type == "cpu" else tensor


def restore_rank(ranks: Sequence[RankState], rank: int, device: torch.device) -> dict[str, Any]:
    """Restore this rank's random state; returns its stepper's. A rank that is new gets random numbers of its own."""
    if rank < len(ranks):
        RandomState.of(ranks[rank].random, device).restore()
        return ranks[rank].stepper
    torch.manual_seed(torch.initial_seed() + rank)
    return {**ranks[0].stepper, "ooms": 0}


def _load(path: Path, *, mapped: bool = False) -> Any:
    """Mapped, its tensors take no memory until they are written to."""
    try:
        return torch.load(path, map_location="cpu", weights_only=True, mmap=mapped)
    except Exception as error:  # pickle may raise anything on bytes that are not its own
        raise BadCheckpoint(f"{path} cannot be read ({in_one_line(error)}). Try: another checkpoint.") from None
