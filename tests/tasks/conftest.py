"""The model that all chat tests share."""

import pytest

from tests.tasks.tiny import tiny_chat


@pytest.fixture(scope="session")
def tiny(tmp_path_factory):
    return tiny_chat(tmp_path_factory)
