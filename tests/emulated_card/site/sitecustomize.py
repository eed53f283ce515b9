"""Inserts an emulated card into every Python program with this folder on its PYTHONPATH, once that program imports torch.

`EMULATED_CARD` is its memory (`1GiB`), `EMULATED_CARDS` how many there are.
"""

import importlib.util
import os
import sys
from importlib.abc import MetaPathFinder
from pathlib import Path


class _AfterTorch(MetaPathFinder):
    def find_spec(self, name, path, target=None):
        if name != "torch":
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec("torch")
        load = spec.loader.exec_module

        def exec_module(module):
            load(module)
            sys.path.append(str(Path(__file__).parents[3]))
            from tests.emulated_card import insert

            insert(os.environ["EMULATED_CARD"], int(os.environ.get("EMULATED_CARDS", "1")))

        spec.loader.exec_module = exec_module
        return spec


if os.environ.get("EMULATED_CARD"):
    sys.meta_path.insert(0, _AfterTorch())
