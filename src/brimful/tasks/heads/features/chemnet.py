"""ChemNet: what a network trained on bioactivities holds in its last layer, 512 numbers; weights in the wheel of `fcd_torch`.

The package builds the network from its weight file; we read that file with `weights_only=True` and load each layer once
more with `strict=True`, so that no tensor can be missing, left over or of another shape. ChemNet reads the canonical
SMILES as characters, at most 349 of them: a longer molecule would be cut, so it is left out and told. It stops at the
first dot, so of a salt it sees the part that comes first: that is what ChemNet is, and it is told how many those were.
"""

from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from brimful.errors import BadModel, BadOption, in_one_line
from brimful.tasks.heads.features.cache import file_hash
from brimful.tasks.heads.features.protocol import Encoded, Matrix
from brimful.tasks.heads.features.smiles import parsed
from brimful.tasks.heads.molecules.examine import rdkit_version

if TYPE_CHECKING:
    from brimful.tasks.heads.molecules.molecules import Molecules

WEIGHTS = "ChemNet_v0.13_pretrained.pt"
LONGEST = 349
"""Symbols ChemNet has room for, the end of the SMILES not counted."""
COLUMNS = 512
PARTIAL = "of several parts: ChemNet reads the first part of the canonical SMILES only"


@dataclass(frozen=True, kw_only=True)
class ChemNet:
    """Learned features; on `device`, in float32 with TF32 off."""

    device: str = "cpu"

    name = "chemnet"
    batch = 256
    molecule_bytes = 1_500_000
    reads_rows = False

    def fingerprint(self) -> str:
        package = _package()
        return f"chemnet fcd_torch weights {file_hash(package / WEIGHTS)} rdkit {rdkit_version()}"

    def encode(self, molecules: "Molecules") -> Encoded:
        texts, failed = _texts(molecules)
        matrix = np.zeros((len(texts), COLUMNS), dtype=np.float32)
        readable = [at for at in range(len(texts)) if at not in failed]
        if readable:
            matrix[readable] = self._rows([texts[at] for at in readable])
        parts = sum("." in texts[at] for at in readable)
        return Encoded(matrix=matrix, failed=failed, remarks={PARTIAL: parts} if parts else {})

    def _rows(self, texts: list[str]) -> Matrix:
        import torch
        from fcd_torch.utils import SmilesDataset

        letters = SmilesDataset(texts, canonize=False)
        with torch.inference_mode(), torch.backends.cudnn.flags(enabled=True, allow_tf32=False):
            batch = torch.from_numpy(np.stack([letters[at] for at in range(len(texts))]).astype(np.float32))
            rows: Matrix = self._model(batch.transpose(1, 2).to(self.device)).cpu().numpy()
        return rows

    @cached_property
    def _model(self) -> Any:
        return load(_package() / WEIGHTS).to(self.device)


def load(weights: Path) -> Any:
    """ChemNet in evaluation mode, every tensor from the file."""
    import torch
    from fcd_torch.utils import load_imported_model
    from torch import nn

    try:
        layers = torch.load(weights, map_location="cpu", weights_only=True)
        model = load_imported_model(layers).eval()
        built = [layer for layer in model if isinstance(layer, (nn.Conv1d, nn.LSTM))]
        for layer, (_, (state, _, _)) in zip(built, layers, strict=True):
            layer.load_state_dict(state, strict=True)
    except Exception as error:
        raise BadModel(
            f"the weights of chemnet in {weights} cannot be used ({in_one_line(error)}); install them anew: pip install --force-reinstall --no-deps fcd_torch"
        ) from error
    return model


def _package() -> Path:
    from importlib.util import find_spec

    found = find_spec("fcd_torch")
    if found is None or not found.submodule_search_locations:
        raise BadOption(
            "encoder chemnet needs fcd_torch, which is not installed; install it beside brimful[mol] with: pip install --no-deps fcd_torch"
        )
    return Path(found.submodule_search_locations[0])


def _texts(molecules: "Molecules") -> tuple[list[str], dict[int, str]]:
    """The canonical SMILES, which ChemNet was trained on, and which of them it cannot take."""
    mols, failed = parsed(molecules.smiles)
    from rdkit import Chem

    texts = ["" if mol is None else Chem.MolToSmiles(mol) for mol in mols]
    for at, text in enumerate(texts):
        symbols = _symbols(text.partition(".")[0])
        if symbols > LONGEST:
            failed[at] = f"its SMILES has {symbols} symbols and ChemNet reads {LONGEST}"
        elif not text and at not in failed:
            failed[at] = "it has no atoms"
    return texts, failed


def _symbols(text: str) -> int:
    """As ChemNet counts: Cl, Br and Si are one symbol."""
    return len(text) - sum(text.count(second) for second in "ril")
