"""The report by itself: what `brimful why` finds has tests of its own, and would differ with every check that is added."""

import pytest

from brimful.report.page import summary

FINDINGS_OF_WHY = summary.diagnose_run


@pytest.fixture(autouse=True, scope="module")
def _without_findings():
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(summary, "diagnose_run", lambda run: [])
        yield
