"""Uni-Mol as a child process: runs as a plain script under the Python that has unimol_tools, without brimful.

    unimol_child.py WEIGHTS DICTIONARY REMOVE_HS DEVICE

The package's own entry point continues where a molecule has no conformer (all atoms at the origin) or is too large (a random
choice of its atoms). Here its parts are called one by one, and such molecules are refused. It loads weights with
`strict=False`; they are loaded again here, and everything before the heads must match.
"""

from __future__ import annotations

import sys
from importlib import metadata, util
from typing import Any

from serve import Refused, load_strictly, serve

MOST_ATOMS = 256
USED = ("embed_tokens.", "encoder.", "gbf.", "gbf_proj.")
FLAT = "without a 3D conformer, encoded from flat coordinates"
remarks: dict = {}


def describe() -> dict:
    if util.find_spec("unimol_tools") is None:
        raise Refused(f"{sys.executable} has no unimol_tools")
    return {"version": metadata.version("unimol_tools"), "rdkit": metadata.version("rdkit")}


def load() -> Any:
    weights, dictionary, remove_hs, device = sys.argv[1:5]
    import torch
    from unimol_tools.data.conformer import ConformerGen
    from unimol_tools.models import UniMolModel

    options = {"remove_hs": bool(int(remove_hs)), "pretrained_dict_path": dictionary}
    model = UniMolModel(output_dim=1, data_type="molecule", pretrained_model_path=weights, **options)
    state = torch.load(weights, map_location="cpu", weights_only=True)
    load_strictly(model, state.get("model", state), lambda name: name.startswith(USED))
    model = model.eval().to(device)
    generator = ConformerGen(max_atoms=MOST_ATOMS, multi_process=False, **options)

    def encode(smiles: list) -> Any:
        conformers = [_conformer(generator, text) for text in smiles]
        batch, _ = model.batch_collate_fn([(conformer, 0) for conformer in conformers])
        with torch.inference_mode():
            rows = model(**{name: value.to(device) for name, value in batch.items()}, return_repr=True).cpu().numpy()
        flat = sum(
            len(conformer["src_coord"]) > 3 and bool((conformer["src_coord"][:, 2] == 0).all())
            for conformer in conformers
        )
        if flat:
            remarks[FLAT] = remarks.get(FLAT, 0) + flat
        return rows

    return encode


def _conformer(generator: Any, smiles: str) -> dict:
    """Atoms and coordinates of one molecule."""
    from rdkit import Chem

    mol = Chem.MolFromSmiles(smiles)
    if mol is None:
        raise Refused("RDKit cannot read its SMILES")
    atoms = (mol if generator.remove_hs else Chem.AddHs(mol)).GetNumAtoms()
    if atoms > MOST_ATOMS:
        raise Refused(f"it has {atoms} atoms and Uni-Mol reads {MOST_ATOMS}")
    conformer, _ = generator.single_process(smiles)
    if atoms > 1 and (conformer["src_coord"] == 0).all():
        raise Refused("it has no 3D conformer")
    return conformer


if __name__ == "__main__":
    serve(describe, load, remarks)
