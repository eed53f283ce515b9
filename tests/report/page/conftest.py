"""The report by itself: what `brimful why` finds has tests of its own, and would differ with every check that is added."""

import sys

import pytest


@pytest.fixture(autouse=True, scope="module")
def _without_findings():
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(sys.modules, "brimful.report.why.run_checks", None)
        yield
