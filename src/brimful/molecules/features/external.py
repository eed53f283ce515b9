"""Encoders in a process and a Python of their own, so that their pinned dependencies do not bind ours.

    this process               child (child/*.py; does not import brimful)
    child.py --describe   →    {"version": …, "weights": hash}, then exits; imports nothing heavy
    child.py              →    {"ready": true} once the weights are loaded
    {"smiles": […]}       →    {"shape": [n, d], "failed": {…}} and n × d float32 values
    end of input          →    exits

The process starts with the first batch that is not cached, serves all batches of all datasets, and ends with the encoder
object. It ignores Ctrl-C, which the parent handles. What it prints goes to a file; the last line is quoted when it dies.
"""

import contextlib
import json
import os
import subprocess
import tempfile
import weakref
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

import numpy as np

from brimful.errors import BadModel, BadOption, InternalError, ProcessLost
from brimful.files import file_sha256
from brimful.molecules.features.encoder import Encoded, show_name

if TYPE_CHECKING:
    from brimful.molecules.dataset import Molecules

CHILDREN = Path(__file__).parent / "child"
DESCRIBE_S = 120.0
"""Describing takes a second; a Python on a slow network disk may take longer."""
EXIT_S = 5.0
MINIMOL_PYTHON, UNIMOL_PYTHON, UNIMOL_WEIGHTS = "BRIMFUL_MINIMOL_PYTHON", "BRIMFUL_UNIMOL_PYTHON", "UNIMOL_WEIGHT_DIR"
_QUIET = {"TQDM_DISABLE": "1"}
"""The last line that a child printed should be its error and not its progress bar."""
_NO_GPU = {"CUDA_VISIBLE_DEVICES": ""}
"""MiniMol keeps its network on the CPU anyway; a visible GPU only changes its settings."""
_INSTALL_MINIMOL = f'Try: {{name = "minimol", python = "ENV/bin/python"}} or {MINIMOL_PYTHON} (see docs/encoders.md).'
_INSTALL_UNIMOL = f'Try: {{name = "unimol", python = "ENV/bin/python", weights = "DIR"}} or {UNIMOL_PYTHON} (see docs/encoders.md).'  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class MiniMol:
    """512 features of a graph network pretrained on molecules.

    It runs on the CPU: 6 s to start, then 12 to 18 ms per molecule (one shared core, 200 molecules of HIV).
    """

    python: str | None = None
    """The Python of an environment that has it."""

    name = "minimol"
    batch = 100
    molecule_bytes = 4_000_000
    reads_rows = False

    def fingerprint(self) -> str:
        facts = self._facts
        return f"minimol {facts['version']} graphium {facts['graphium']} weights {facts['weights']}"

    def encode(self, molecules: "Molecules") -> Encoded:
        return self._process.encode(list(molecules.smiles))

    @property
    def _command(self) -> list[str]:
        return child_command("minimol", self.python or os.environ.get(MINIMOL_PYTHON), _INSTALL_MINIMOL)

    @cached_property
    def _facts(self) -> dict[str, Any]:
        return describe("minimol", self._command, _NO_GPU, _INSTALL_MINIMOL)

    @cached_property
    def _process(self) -> "EncoderProcess":
        return EncoderProcess("minimol", self._command, _NO_GPU)


@dataclass(frozen=True, kw_only=True)
class UniMol:
    """512 features of one 3D conformer (RDKit, seed 42), by a transformer of 47 million weights.

    `unimol_tools` would download its weights; here they come from a folder of the user's, which is checked before anything
    starts. A molecule without a conformer is left out (the package would put all atoms at the origin), as is one of more
    than 256 atoms (the package would keep a random 256).
    """

    python: str | None = None
    """The Python of an environment that has it."""
    weights: str | None = None
    """The folder with the weights and the dictionary of atoms."""
    remove_hs: bool = False
    device: str = "cpu"

    batch = 64
    molecule_bytes = 16_000_000
    reads_rows = False

    @property
    def name(self) -> str:
        return show_name("unimol", self, "remove_hs")

    def fingerprint(self) -> str:
        hashes = " ".join(file_sha256(file) for file in self._files)
        facts = self._facts
        return f"unimol {facts['version']} rdkit {facts['rdkit']} remove_hs={self.remove_hs} weights {hashes}"

    def encode(self, molecules: "Molecules") -> Encoded:
        return self._process.encode(list(molecules.smiles))

    @property
    def _files(self) -> list[Path]:
        """The weights and the dictionary of atoms."""
        folder = self.weights or os.environ.get(UNIMOL_WEIGHTS)
        names = (f"mol_pre_{'no_h' if self.remove_hs else 'all_h'}_220816.pt", "mol.dict.txt")
        if not folder:
            raise BadOption(f'encoder unimol needs {" and ".join(names)}. Try: weights = "DIR" or {UNIMOL_WEIGHTS}.')
        missing = [name for name in names if not (Path(folder) / name).is_file()]
        if missing:
            raise BadOption(
                f"encoder unimol: {folder} has no {' and no '.join(missing)}. Try: dptech/Uni-Mol-Models on Hugging Face."
            )
        return [Path(folder) / name for name in names]

    @property
    def _command(self) -> list[str]:
        return child_command("unimol", self.python or os.environ.get(UNIMOL_PYTHON), _INSTALL_UNIMOL)

    @cached_property
    def _facts(self) -> dict[str, Any]:
        return describe("unimol", self._command, {}, _INSTALL_UNIMOL)

    @cached_property
    def _process(self) -> "EncoderProcess":
        weights, dictionary = self._files
        arguments = [str(weights), str(dictionary), str(int(self.remove_hs)), self.device]
        return EncoderProcess("unimol", [*self._command, *arguments], {})


def child_command(name: str, python: str | None, install: str) -> list[str]:
    """The child script of an encoder, by path, unbuffered: that Python does not have brimful."""
    if not python:
        raise BadOption(f"encoder {name} needs a Python of its own. {install}")
    child = CHILDREN / f"{name}_child.py"
    if not child.is_file():
        raise InternalError(f"{child} is not part of this installation")
    return [str(python), "-u", str(child)]


def describe(name: str, command: Sequence[str], environment: Mapping[str, str], install: str) -> dict[str, Any]:
    """What this Python has of the encoder, without loading it: versions, and a hash of the weights."""
    try:
        done = subprocess.run(
            [*command, "--describe"],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            timeout=DESCRIBE_S,
            env={**os.environ, **_QUIET, **environment},
        )
        facts = json.loads(done.stdout)
        if not isinstance(facts, dict):
            raise ValueError("not an object")
    except OSError as error:
        raise BadOption(f"encoder {name}: {command[0]} cannot be run ({error.strerror or error}). {install}") from error
    except (ValueError, subprocess.TimeoutExpired) as error:
        raise BadOption(f"encoder {name}: {command[0]} does not answer like a Python. {install}") from error
    if "error" in facts:
        raise BadOption(f"encoder {name}: {facts['error']}. {install}")
    return facts


class EncoderProcess:
    """A running child. It ends with this object."""

    def __init__(self, name: str, command: Sequence[str], environment: Mapping[str, str]) -> None:
        self.name = name
        self._log = tempfile.TemporaryFile()  # noqa: SIM115 (it lives as long as the process)
        self._process = _start(name, command, environment, self._log)
        self._end = weakref.finalize(self, _kill, self._process)
        self._answer()

    def encode(self, smiles: Sequence[str]) -> Encoded:
        """The features of one batch. A molecule that fails does not affect the others."""
        assert self._process.stdin is not None and self._process.stdout is not None
        try:
            self._process.stdin.write(json.dumps({"smiles": list(smiles)}).encode() + b"\n")
            self._process.stdin.flush()
        except OSError as error:
            raise self._lost() from error
        answer = self._answer()
        rows, columns = answer["shape"]
        content = self._process.stdout.read(4 * rows * columns)
        if len(content) != 4 * rows * columns:
            raise self._lost()
        return Encoded(
            matrix=np.frombuffer(content, dtype="<f4").reshape(rows, columns),
            failed={int(index): reason for index, reason in answer["failed"].items()},
            remarks=answer.get("remarks", {}),
        )

    def close(self) -> None:
        """End it now."""
        self._end()

    def _answer(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line.endswith(b"\n"):
            raise self._lost()
        try:
            answer: dict[str, Any] = json.loads(line)
        except ValueError as error:  # a Python that prints at start-up
            self.close()
            text = line.decode(errors="replace").strip()[:200]
            raise BadOption(
                f"encoder {self.name}: its Python prints {text!r} to stdout at start-up. Try: a Python that prints nothing."
            ) from error
        if "error" in answer:
            self.close()
            raise BadModel(f"{self.name} cannot be used ({answer['error']}). Try: install it again.")
        return answer

    def _lost(self) -> ProcessLost:
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(EXIT_S)
        code = self._process.poll()
        how = "silently" if code is None else f"by signal {-code}" if code < 0 else f"with exit code {code}"
        hint = " (signal 9 often means that host memory ran out)" if code == -9 else ""
        self._log.seek(0)
        lines = [line.strip() for line in self._log.read().decode(errors="replace").splitlines() if line.strip()]
        last = f", its last line: {lines[-1][:200]}" if lines else ""
        return ProcessLost(f"the process of {self.name} ended {how}{hint}{last}. Try: the same command, it continues.")


def _start(name: str, command: Sequence[str], environment: Mapping[str, str], log: IO[bytes]) -> Any:
    try:
        return subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=log,
            env={**os.environ, **_QUIET, **environment},
        )
    except OSError as error:
        raise BadOption(
            f"encoder {name}: {command[0]} cannot be run ({error.strerror or error}). Try: another python."
        ) from error


def _kill(process: "subprocess.Popen[bytes]") -> None:
    """It has nothing to save."""
    process.kill()
    for pipe in (process.stdin, process.stdout):
        with contextlib.suppress(OSError):
            if pipe is not None:
                pipe.close()
    process.wait()
