"""Weights on their way from the device into a file, 64 MiB at a time.

safetensors wants all tensors in host memory at once: of a model on a card it makes a second one there, 0.75 GB for T5
base, at every checkpoint. Its format asks for nothing of the kind: the length of a header, the header, and the tensors'
bytes one after the other, so they can be written as they come. What is written is the same file to the byte.

Which tensors belong into the file, by which names, and which of the tied ones are left out, transformers and safetensors
know best, and neither takes a writer. So theirs is replaced while a model is saved. Another thread that saves something
meanwhile gets the same file from either.
"""

import json
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from os import PathLike
from pathlib import Path
from typing import BinaryIO

import safetensors.torch
import torch

from brimful.units import MiB

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
