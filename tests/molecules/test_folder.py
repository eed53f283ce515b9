"""What a sweep's folder says of the data that its results are of."""

import json

import pytest

from brimful.errors import BadRun
from brimful.molecules.folder import SweepFolder, fingerprint
from tests.molecules.packed.made import rows


@pytest.mark.parametrize("content", ["", '{"rows": {"a/e', "[]", '{"rows": 3}', '{"rows": "abc"}'])
def test_damaged_claims_are_one_sentence(content, tmp_path):
    (tmp_path / "sweep.json").write_text(content)
    with pytest.raises(BadRun, match="name another --output, or remove the file"):
        SweepFolder(tmp_path).claim({"a/e": rows()}, {})


def test_features_of_a_folder_that_counted_the_label_in_are_known_again(tmp_path):
    found = rows(classes=(2,))
    (tmp_path / "sweep.json").write_text(json.dumps({"rows": {"a/e": fingerprint(found, labelled=True)}}))
    SweepFolder(tmp_path).claim({"a/e": found}, {})
    assert json.loads((tmp_path / "sweep.json").read_text())["rows"] == {"a/e": fingerprint(rows(classes=(2,)))}
    with pytest.raises(BadRun, match="the features or the label of a/e have changed"):
        SweepFolder(tmp_path).claim({"a/e": rows(1)}, {})
