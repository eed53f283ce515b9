"""Uni-Mol: 512 features of a 3D conformer, by a transformer of 47 million weights.

`unimol_tools` comes without weights and would download them; here they come from a folder of the user's, `weights` or the
variable UNIMOL_WEIGHT_DIR, and a folder without them is refused before anything starts. It lives in a Python of its own
like MiniMol. A molecule whose atoms cannot be placed is left out (the package would put all of them at the origin), as is
one of more than 256 atoms (the package would keep 256 of them at random).
"""

import os
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from brimful.errors import BadOption
from brimful.tasks.heads.features.cache import file_hash
from brimful.tasks.heads.features.process import OwnProcess, command_for, describe
from brimful.tasks.heads.features.protocol import Encoded, labelled

if TYPE_CHECKING:
    from brimful.tasks.heads.molecules.molecules import Molecules

VARIABLE, WEIGHTS_VARIABLE = "BRIMFUL_UNIMOL_PYTHON", "UNIMOL_WEIGHT_DIR"
INSTALL = f'give the Python of an environment that has it, as {{name = "unimol", python = "ENV/bin/python", weights = "DIR"}} or in {VARIABLE}; docs/encoders.md has the commands'
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
        python = self.python or os.environ.get(VARIABLE)
        if not python:
            raise BadOption(f"encoder unimol runs in a Python of its own, and none was named; {INSTALL}")
        return command_for("unimol", str(python))

    @cached_property
    def _described(self) -> dict[str, Any]:
        return describe("unimol", self._command, {}, INSTALL)

    @cached_property
    def _process(self) -> OwnProcess:
        weights, dictionary = self._files
        arguments = [str(weights), str(dictionary), str(int(self.remove_hs)), self.device]
        return OwnProcess("unimol", [*self._command, *arguments], {})
