"""MiniMol: 512 features learned on quantum and bioassay data, by a graph network of 10 million weights.

Its packages pin an old torchmetrics, NumPy below 2.3 and compiled extensions, so it lives in a Python of its own, named by
`python` or the variable BRIMFUL_MINIMOL_PYTHON; docs/encoders.md has the four commands that make one. It runs on the
CPU: 6 s to start, then 12 to 18 ms a molecule (measured on one shared core, 200 molecules of HIV).
"""

import os
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any

from brimful.errors import BadOption
from brimful.tasks.heads.features.process import OwnProcess, command_for, describe
from brimful.tasks.heads.features.protocol import Encoded

if TYPE_CHECKING:
    from brimful.tasks.heads.molecules.molecules import Molecules

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
