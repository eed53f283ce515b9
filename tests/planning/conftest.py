"""One plan of a small task for all tests that only look at the result."""

import gc

import pytest

from brimful.planning.planner import plan
from tests.planning.small import LIMIT, Tagger


@pytest.fixture(autouse=True, scope="session")
def _imported_modules_are_not_garbage():
    """A plan collects garbage after each out-of-memory error, which takes 0.2 s with transformers imported."""
    gc.collect()
    gc.freeze()
    yield
    gc.unfreeze()


@pytest.fixture(scope="session")
def tagger_plan():
    return plan(Tagger(), memory_limit=LIMIT, device="cpu", cache=False)
