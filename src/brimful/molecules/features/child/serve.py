"""The child's side of `external.py`: batches of SMILES in, rows of float32 out. Runs under any Python 3.9 with NumPy.

A batch that fails is halved until the failing molecules are alone, so that the others get their features. Standard output
is for answers: what a package prints goes to standard error.
"""

from __future__ import annotations

import json
import os
import signal
import sys
from collections.abc import Callable
from typing import Any

import numpy as np

Encode = Callable[[list], Any]


class Refused(Exception):
    """A sentence for the user: this encoder, or this molecule, cannot be used."""


def serve(describe: Callable[[], dict], load: Callable[[], Encode], remarks: dict | None = None) -> None:
    """`describe` says what is installed; `load` returns the function from SMILES to rows, which adds to `remarks`."""
    if "--describe" in sys.argv:
        print(json.dumps(_result(describe)))
        return
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    answers = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)
    loaded: dict = {}
    _send(answers, _result(lambda: loaded.update(encode=load()) or {"ready": True}))
    while "encode" in loaded and (line := sys.stdin.buffer.readline()):
        _answer(answers, loaded["encode"], json.loads(line)["smiles"], remarks if remarks is not None else {})


def _result(function: Callable[[], dict]) -> dict:
    """What it returns, or its error."""
    try:
        return function()
    except Refused as error:
        return {"error": str(error)}
    except Exception as error:
        return {"error": in_one_line(error)}


def _answer(answers: Any, encode: Encode, smiles: list, remarks: dict) -> None:
    remarks.clear()
    rows: dict[int, Any] = {}
    failed: dict[int, str] = {}
    _encode_halving(encode, smiles, 0, rows, failed)
    columns = len(next(iter(rows.values()))) if rows else 0
    matrix = np.zeros((len(smiles), columns), dtype="<f4")
    for position, row in rows.items():
        matrix[position] = row
    _send(answers, {"shape": matrix.shape, "failed": failed, "remarks": remarks}, matrix.tobytes())


def _encode_halving(encode: Encode, smiles: list, start: int, rows: dict, failed: dict) -> None:
    try:
        batch = np.asarray(encode(smiles), dtype="<f4")
        if batch.ndim != 2 or len(batch) != len(smiles):
            raise ValueError(f"{len(smiles)} molecules gave the shape {batch.shape}")
    except Exception as error:
        if len(smiles) == 1:
            failed[start] = str(error) if isinstance(error, Refused) else in_one_line(error)
        else:
            middle = len(smiles) // 2
            _encode_halving(encode, smiles[:middle], start, rows, failed)
            _encode_halving(encode, smiles[middle:], start + middle, rows, failed)
        return
    for position, row in enumerate(batch, start):
        if np.isfinite(row).all():
            rows[position] = row
        else:
            failed[position] = "its features are not finite"


def load_strictly(model: Any, state: dict, used: Callable[[str], bool]) -> None:
    """Load `state`. The tensors that the features depend on (`used`) must match exactly."""
    result = model.load_state_dict(state, strict=False)  # another shape raises anyway
    missing = [name for name in result.missing_keys if used(name)]
    left_over = [name for name in result.unexpected_keys if used(name)]
    if missing:
        raise Refused(f"its weights lack tensors of the model ({len(missing)} of them, the first is {missing[0]})")
    if left_over:
        raise Refused(
            f"its weights have tensors that the model does not know ({len(left_over)} of them, the first is {left_over[0]})"
        )


def in_one_line(error: BaseException) -> str:
    """The kind of error and the first line of what it says."""
    lines = str(error).strip().splitlines() or [""]
    return f"{type(error).__name__}: {lines[0][:200]}"


def _send(answers: Any, message: dict, content: bytes = b"") -> None:
    answers.write(json.dumps(message).encode() + b"\n" + content)
    answers.flush()
