"""The model that all chat tests share."""

import pytest

from tests.tasks.tiny import the_place


@pytest.fixture(scope="session")
def place(tmp_path_factory):
    return the_place(tmp_path_factory)
