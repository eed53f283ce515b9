"""An encoder in a process of its own, under a Python of its own, so that its pins do not bind ours.

    ours                                  theirs (child/*.py; knows nothing of brimful)
    child.py --describe        →          {"version": …, "weights": hash}             and ends; imports nothing heavy
    child.py                   →          {"ready": true}                             once the weights are loaded
    {"smiles": […]}            →          {"shape": [n, d], "failed": {…}} and n × d float32 values
    end of input               →          ends

The process starts at the first batch that is not in the cache, serves all batches of all datasets, and ends with the
encoder object. It ignores Ctrl-C, which is ours to answer. What it prints goes to a file whose last line is quoted when
it dies.
"""

import contextlib
import json
import os
import subprocess
import tempfile
import time
import weakref
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

import numpy as np

from brimful.errors import BadModel, BadOption, InternalError, ProcessLost
from brimful.molecules.features.cache import file_hash
from brimful.molecules.features.encoder import Encoded, labelled

if TYPE_CHECKING:
    from brimful.molecules.dataset import Molecules

CHILDREN = Path(__file__).parent / "child"
DESCRIBE_S = 120.0
"""A describing child answers within a second; a Python on a slow network disk may take longer."""
ENDS_S = 5.0
_QUIET = {"TQDM_DISABLE": "1"}
"""The last line that a child printed should be its trouble and not its progress."""


class OwnProcess:
    """Starts with `ask` and ends with this object."""

    def __init__(self, name: str, command: Sequence[str], environment: Mapping[str, str]) -> None:
        self.name = name
        self._printed = tempfile.TemporaryFile()  # noqa: SIM115 (it lives as long as the process)
        self._process = _started(name, command, environment, self._printed)
        self._end = weakref.finalize(self, _end, self._process)
        began_s = time.monotonic()
        self._answer()
        self.start_s = time.monotonic() - began_s

    def encode(self, smiles: Sequence[str]) -> Encoded:
        """The features of one batch; a molecule that fails does so alone."""
        assert self._process.stdin is not None and self._process.stdout is not None
        try:
            self._process.stdin.write(json.dumps({"smiles": list(smiles)}).encode() + b"\n")
            self._process.stdin.flush()
        except OSError as error:
            raise self._lost() from error
        said = self._answer()
        rows, columns = said["shape"]
        content = self._process.stdout.read(4 * rows * columns)
        if len(content) != 4 * rows * columns:
            raise self._lost()
        return Encoded(
            matrix=np.frombuffer(content, dtype="<f4").reshape(rows, columns),
            failed={int(position): reason for position, reason in said["failed"].items()},
            remarks=said.get("remarks", {}),
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
            said: dict[str, Any] = json.loads(line)
        except ValueError as error:  # a Python that prints of its own accord when it starts
            self.close()
            text = line.decode(errors="replace").strip()[:200]
            raise BadOption(f"encoder {self.name}: its Python prints where answers should stand: {text}") from error
        if "error" in said:
            self.close()
            raise BadModel(f"{self.name} cannot be used: {said['error']}")
        return said

    def _lost(self) -> ProcessLost:
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(ENDS_S)
        code = self._process.poll()
        how = "without a word" if code is None else f"by signal {-code}" if code < 0 else f"with exit code {code}"
        self._printed.seek(0)
        lines = [line.strip() for line in self._printed.read().decode(errors="replace").splitlines() if line.strip()]
        last = f"; the last it printed: {lines[-1][:200]}" if lines else ""
        hint = " (signal 9 is what a full memory looks like: lower memory_limit)" if code == -9 else ""
        return ProcessLost(
            f"the process of {self.name} ended {how}{hint}{last}; what it finished is kept, so starting again goes on from there"
        )


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
        said = json.loads(done.stdout)
        if not isinstance(said, dict):
            raise ValueError("not an object")
    except OSError as error:
        raise BadOption(f"encoder {name}: {command[0]} cannot be run ({error.strerror or error}); {install}") from error
    except (ValueError, subprocess.TimeoutExpired) as error:
        raise BadOption(f"encoder {name}: {command[0]} does not answer as a Python would; {install}") from error
    if "error" in said:
        raise BadOption(f"encoder {name}: {said['error']}; {install}")
    return said


def command_for(name: str, python: str) -> list[str]:
    """The child of an encoder, unbuffered, by path: that Python need not know us."""
    child = CHILDREN / f"{name}_child.py"
    if not child.is_file():
        raise InternalError(f"{child} is not part of this installation")
    return [python, "-u", str(child)]


def _started(name: str, command: Sequence[str], environment: Mapping[str, str], printed: IO[bytes]) -> Any:
    try:
        return subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=printed,
            env={**os.environ, **_QUIET, **environment},
        )
    except OSError as error:
        raise BadOption(f"encoder {name}: {command[0]} cannot be run ({error.strerror or error})") from error


def _end(process: "subprocess.Popen[bytes]") -> None:
    """It has nothing to save, so it need not be asked."""
    process.kill()
    for pipe in (process.stdin, process.stdout):
        with contextlib.suppress(OSError):
            if pipe is not None:
                pipe.close()
    process.wait()


# MiniMol: 512 features learned on quantum and bioassay data, by a graph network of 10 million weights.
#
# Its packages pin an old torchmetrics, NumPy below 2.3 and compiled extensions, so it lives in a Python of its own, named by
# `python` or the variable BRIMFUL_MINIMOL_PYTHON; docs/encoders.md has the four commands that make one. It runs on the
# CPU: 6 s to start, then 12 to 18 ms a molecule (measured on one shared core, 200 molecules of HIV).


VARIABLE = "BRIMFUL_MINIMOL_PYTHON"
INSTALL = f'give the Python of an environment that has it, as {{name = "minimol", python = "ENV/bin/python"}} or in {VARIABLE}; docs/encoders.md has the commands'
NO_GPU = {"CUDA_VISIBLE_DEVICES": ""}
"""MiniMol leaves its network on the CPU wherever it runs; with a GPU in sight it only asks for one in its settings."""


@dataclass(frozen=True, kw_only=True)
class MiniMol:
    """Learned features, from another process."""

    python: str | None = None

    name = "minimol"
    batch = 100
    molecule_bytes = 4_000_000
    reads_rows = False

    def fingerprint(self) -> str:
        said = self._described
        return f"minimol {said['version']} graphium {said['graphium']} weights {said['weights']}"

    def encode(self, molecules: "Molecules") -> Encoded:
        return self._process.encode(list(molecules.smiles))

    @property
    def _command(self) -> list[str]:
        python = self.python or os.environ.get(VARIABLE)
        if not python:
            raise BadOption(f"encoder minimol runs in a Python of its own, and none was named; {INSTALL}")
        return command_for("minimol", str(python))

    @cached_property
    def _described(self) -> dict[str, Any]:
        return describe("minimol", self._command, NO_GPU, INSTALL)

    @cached_property
    def _process(self) -> OwnProcess:
        return OwnProcess("minimol", self._command, NO_GPU)


# Uni-Mol: 512 features of a 3D conformer, by a transformer of 47 million weights.
#
# `unimol_tools` comes without weights and would download them; here they come from a folder of the user's, `weights` or the
# variable UNIMOL_WEIGHT_DIR, and a folder without them is refused before anything starts. It lives in a Python of its own
# like MiniMol. A molecule whose atoms cannot be placed is left out (the package would put all of them at the origin), as is
# one of more than 256 atoms (the package would keep 256 of them at random).


VARIABLE_UNIMOL, WEIGHTS_VARIABLE = "BRIMFUL_UNIMOL_PYTHON", "UNIMOL_WEIGHT_DIR"
INSTALL_UNIMOL = f'give the Python of an environment that has it, as {{name = "unimol", python = "ENV/bin/python", weights = "DIR"}} or in {VARIABLE_UNIMOL}; docs/encoders.md has the commands'
DICTIONARY = "mol.dict.txt"


@dataclass(frozen=True, kw_only=True)
class UniMol:
    """Learned features of one conformer (RDKit, seed 42), from another process."""

    python: str | None = None
    weights: str | None = None
    remove_hs: bool = False
    device: str = "cpu"

    batch = 64
    molecule_bytes = 16_000_000
    reads_rows = False

    @property
    def name(self) -> str:
        return labelled("unimol", self, "remove_hs")

    def fingerprint(self) -> str:
        hashes = " ".join(file_hash(file) for file in self._files)
        said = self._described
        return f"unimol {said['version']} rdkit {said['rdkit']} remove_hs={self.remove_hs} weights {hashes}"

    def encode(self, molecules: "Molecules") -> Encoded:
        return self._process.encode(list(molecules.smiles))

    @property
    def _files(self) -> list[Path]:
        """The weights and the dictionary of atoms."""
        named = self.weights or os.environ.get(WEIGHTS_VARIABLE)
        names = (f"mol_pre_{'no_h' if self.remove_hs else 'all_h'}_220816.pt", DICTIONARY)
        if not named:
            raise BadOption(
                f'encoder unimol has no weights of its own; give the folder that has {" and ".join(names)}, as weights = "DIR" or in {WEIGHTS_VARIABLE}'
            )
        missing = [name for name in names if not (Path(named) / name).is_file()]
        if missing:
            raise BadOption(
                f"encoder unimol: {named} has no {' and no '.join(missing)}; get them from dptech/Uni-Mol-Models on Hugging Face, or name the folder that has them"
            )
        return [Path(named) / name for name in names]

    @property
    def _command(self) -> list[str]:
        python = self.python or os.environ.get(VARIABLE_UNIMOL)
        if not python:
            raise BadOption(f"encoder unimol runs in a Python of its own, and none was named; {INSTALL_UNIMOL}")
        return command_for("unimol", str(python))

    @cached_property
    def _described(self) -> dict[str, Any]:
        return describe("unimol", self._command, {}, INSTALL_UNIMOL)

    @cached_property
    def _process(self) -> OwnProcess:
        weights, dictionary = self._files
        arguments = [str(weights), str(dictionary), str(int(self.remove_hs)), self.device]
        return OwnProcess("unimol", [*self._command, *arguments], {})
