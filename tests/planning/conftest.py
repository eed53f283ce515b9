"""One plan of a small task for all tests that only look at the result."""

import pytest

from brimful.planning.planner import plan
from tests.planning.small import LIMIT, Tagger


@pytest.fixture(scope="session")
def tagger_plan():
    return plan(Tagger(), memory_limit=LIMIT, device="cpu", cache=False)
