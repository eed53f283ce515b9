"""Every out-of-memory error collects garbage, which takes 200 ms with all test modules imported unless those are frozen."""

import gc

import pytest


@pytest.fixture(autouse=True, scope="session")
def _imported_modules_are_not_garbage():
    gc.collect()
    gc.freeze()
    yield
    gc.unfreeze()
