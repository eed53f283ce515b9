"""MiniMol as a child process: runs as a plain script under the Python that has it, without brimful.

torch_scatter and torch_sparse need a compiler that matches torch; where they are missing, `torch_geometric.utils.scatter`
replaces the one function that MiniMol takes from them. The package loads its weights with `strict=False`; they are loaded
again here, and only the task heads, which come after the layer that is read (gnn:15), may differ: two of their tensors are
not in the published file.
"""

from __future__ import annotations

import hashlib
import sys
import types
from importlib import metadata, util
from pathlib import Path
from typing import Any

from serve import Refused, load_strictly, serve

HEADS = "model.task_heads."


def describe() -> dict:
    package = util.find_spec("minimol")
    if package is None or not package.submodule_search_locations or util.find_spec("graphium") is None:
        raise Refused(f"{sys.executable} has no minimol, or no graphium")
    weights = _weights(Path(package.submodule_search_locations[0]))
    return {
        "version": metadata.version("minimol"),
        "graphium": metadata.version("graphium"),
        "weights": hashlib.sha256(weights.read_bytes()).hexdigest(),
    }


def load() -> Any:
    _replace_missing_packages()
    import minimol
    import torch
    from rdkit import Chem

    model = minimol.Minimol()
    model.datamodule.featurization_n_jobs = 0  # its process pool takes longer to start than a batch
    state = torch.load(_weights(Path(minimol.__file__).parent), map_location="cpu", weights_only=True)
    load_strictly(model.predictor.predictor, state, lambda name: not name.startswith(HEADS))

    def encode(smiles: list) -> Any:
        try:
            with torch.inference_mode():
                return torch.stack(model(smiles)).numpy()
        except Exception as error:  # one bad molecule fails the batch with an error from inside PyG
            if len(smiles) == 1 and Chem.MolFromSmiles(smiles[0]) is None:
                raise Refused("RDKit cannot read its SMILES") from error
            raise

    return encode


def _weights(package: Path) -> Path:
    return package / "ckpts" / "minimol_v1" / "state_dict.pth"


def _replace_missing_packages() -> None:
    """Modules under the names of the compiled packages, with what MiniMol needs of them."""
    if util.find_spec("torch_scatter") is None:
        from torch_geometric.utils import scatter as pyg_scatter

        def scatter(
            src: Any, index: Any, dim: int = -1, out: Any = None, dim_size: int | None = None, reduce: str = "sum"
        ) -> Any:
            if out is not None:
                raise NotImplementedError("scatter into an existing tensor")
            return pyg_scatter(src, index, dim=dim, dim_size=dim_size, reduce=reduce)

        module: Any = types.ModuleType("torch_scatter")
        module.scatter = module.scatter_add = scatter
        sys.modules["torch_scatter"] = module
    if util.find_spec("torch_sparse") is None:
        module = types.ModuleType("torch_sparse")
        module.SparseTensor = type("SparseTensor", (), {})  # used by isinstance only
        sys.modules["torch_sparse"] = module


if __name__ == "__main__":
    serve(describe, load)
