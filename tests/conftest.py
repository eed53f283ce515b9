"""Tests run on the CPU, with a cache of their own and without what the user's environment sets."""

import pytest


@pytest.fixture(autouse=True)
def _own_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("BRIMFUL_CACHE", str(tmp_path / "cache"))


def pytest_collection_modifyitems(config, items):
    """GPU tests are left out where there is no GPU."""
    if not any("gpu" in item.keywords for item in items):
        return
    import torch

    if not torch.cuda.is_available():
        skip = pytest.mark.skip(reason="needs a CUDA device")
        for item in items:
            if "gpu" in item.keywords:
                item.add_marker(skip)
