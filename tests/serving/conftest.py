"""The models that the tests of serving share with those of the tasks."""

import pytest

from tests.tasks.tiny import tiny_chat
from tests.tasks.tiny_causal import tiny_causal


@pytest.fixture(scope="session")
def tiny(tmp_path_factory):
    return tiny_chat(tmp_path_factory)


@pytest.fixture(scope="session")
def causal(tmp_path_factory):
    return tiny_causal(tmp_path_factory)
