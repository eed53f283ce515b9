"""Tests run on the CPU, with a cache of their own and the same hypothesis examples every time."""

import ctypes
import gc
import signal
from contextlib import suppress

import pytest


def pytest_configure(config):
    """A property that fails must fail for whoever changed something, not for whoever ran the tests next.

    In the background of a shell script Ctrl-C is ignored, also by the commands that a test starts. Tests send it to them.
    """
    signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        from hypothesis import settings
    except ImportError:  # a GPU machine may lack it; the tests that need it are not run there
        return
    settings.register_profile("brimful", derandomize=True, deadline=None)
    settings.load_profile("brimful")


@pytest.fixture(autouse=True)
def _own_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("BRIMFUL_CACHE", str(tmp_path / "cache"))


@pytest.fixture(autouse=True)
def _in_english(monkeypatch):
    """Whatever language the developer reads, and whatever a test has set."""
    from brimful.languages import VARIABLE, set_language

    monkeypatch.setenv(VARIABLE, "en")
    yield
    set_language(None)


@pytest.fixture(autouse=True, scope="module")
def _small_process():
    """Give back what a module used. Commands that run in this process would count it against their memory limit."""
    yield
    gc.collect()
    with suppress(OSError, AttributeError):  # another C library
        ctypes.CDLL("libc.so.6").malloc_trim(0)


@pytest.fixture(autouse=True, scope="session")
def _library_sized_process():
    """Where `data tokenize` runs in the process of the tests, what earlier tests left there does not count."""
    from brimful.data import tokenize
    from brimful.units import MiB

    real = tokenize.piece_size
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tokenize, "piece_size", lambda limit, start: real(limit, min(start, 256 * MiB)))
        yield


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
