"""Tests run on the CPU, with a cache of their own and the same hypothesis examples every time."""

import ctypes
import gc
import os
import signal
from contextlib import suppress

import pytest


def pytest_configure(config):
    """A property that fails must fail for whoever changed something, not for whoever ran the tests next.

    In the background of a shell script Ctrl-C is ignored, also by the commands that a test starts. Tests send it to them.
    """
    signal.signal(signal.SIGINT, signal.default_int_handler)
    if os.environ.get("EMULATED_CARD"):
        import torch  # noqa: F401  # a process that another one started inserts the card here, see `emulated_card/site`

        from tests import emulated_card

        if emulated_card.is_possible():
            emulated_card.insert_everywhere()
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
    """Give back what a module used. Commands that run in this process would count it against their memory limit.

    What is left is imported code and caches. Freezing it spares every later collection 0.2 to 0.5 s.
    """
    yield
    gc.collect()
    gc.freeze()
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
    """GPU tests are left out where there is no GPU. `gpu(emulated=False)` marks what only a real one can show."""
    wanted = {item: [mark.kwargs for mark in item.iter_markers("gpu")] for item in items if "gpu" in item.keywords}
    if not wanted:
        return
    import torch

    from tests.emulated_card import is_inserted

    for item, marks in wanted.items():
        if not torch.cuda.is_available():
            item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))
        elif is_inserted() and any(not one.get("emulated", True) for one in marks):
            item.add_marker(pytest.mark.skip(reason="needs a real CUDA device"))
