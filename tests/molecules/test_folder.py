"""The folder of a sweep refuses data that its results are not of."""

import json

import pytest

from brimful.errors import BadRun
from brimful.molecules.folder import SweepFolder

from .support import rows


@pytest.mark.parametrize("content", ["", '{"rows": {"a/e', "[]", '{"rows": 3}', '{"rows": {}}'])
def test_a_damaged_claim_is_refused(content, tmp_path):
    (tmp_path / "sweep.json").write_text(content)
    with pytest.raises(BadRun, match="the data of these results is unknown. Try: another output="):
        SweepFolder(tmp_path).claim({"a/e": rows()}, {})


def test_other_features_are_refused_and_labels_do_not_count(tmp_path):
    SweepFolder(tmp_path).claim({"a/e": rows()}, {})
    SweepFolder(tmp_path).claim({"a/e": rows(classes=(2,)), "b/e": rows(2)}, {})
    assert set(json.loads((tmp_path / "sweep.json").read_text())["rows"]) == {"a/e", "b/e"}
    with pytest.raises(BadRun, match="the features of a/e changed"):
        SweepFolder(tmp_path).claim({"a/e": rows(1)}, {})
