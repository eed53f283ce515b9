"""What heads are trained on: standardised features, labels as classes, and the remarks on both."""

from pathlib import Path

import numpy as np
import pytest
import torch

from brimful.errors import BadData
from brimful.molecules.dataset import silent
from brimful.molecules.feature_store import FeatureStore
from brimful.molecules.features.encoder import load_encoder
from brimful.molecules.prepare import prepare, rows_with_features
from brimful.molecules.spec import DatasetSpec

pytest.importorskip("rdkit")


COUNT = 60


def prepared(folder: Path, labels=None, **options):
    """Sixty alcohols under a random split, with these labels."""
    cells = labels if labels is not None else ["0", "1"] * (COUNT // 2)
    rows = [f"{'C' * (number + 1)}O,{cell}" for number, cell in enumerate(cells)]
    (folder / "few.csv").write_text("\n".join(["smiles,y", *rows]) + "\n", encoding="utf-8")
    spec = DatasetSpec(name="few", file=folder / "few.csv", split="random", label=("y",), **options)
    return prepare(spec, folder / "cache", silent)


def rows(folder: Path, matrix):
    np.save(folder / "own.npy", matrix)
    encoder = load_encoder("own.npy", folder=folder)
    return rows_with_features(prepared(folder), encoder, folder / "cache", silent)[0]


def numbers(high):
    return np.random.default_rng(0).integers(0, high, (COUNT, 8))


def test_numbers_are_standardised_whatever_their_type(tmp_path):
    as_bytes, as_floats = (rows(tmp_path, numbers(256).astype(kind)) for kind in (np.uint8, np.float32))
    assert as_bytes.features.dtype == torch.float32
    torch.testing.assert_close(as_bytes.features, as_floats.features, rtol=0, atol=0)
    train = as_bytes.features[as_bytes.id["train"]]
    torch.testing.assert_close(train.mean(0), torch.zeros(8), atol=1e-5, rtol=0)
    torch.testing.assert_close(train.std(0, correction=0), torch.ones(8))


@pytest.mark.parametrize("kind", [np.uint8, np.bool_, np.float64])
def test_bits_stay_bits_whatever_their_type(tmp_path, kind):
    bits = (numbers(20) == 0).astype(kind)
    found = rows(tmp_path, bits)
    assert found.features.dtype == torch.uint8
    np.testing.assert_array_equal(found.features, bits[prepared(tmp_path).split.used()])
    assert FeatureStore({"few": found}, torch.device("cpu")).sparse


def test_counts_of_ecfp_are_standardised(tmp_path):
    encoder = load_encoder({"name": "ecfp", "bits": 64, "counts": True}, folder=tmp_path)
    found = rows_with_features(prepared(tmp_path), encoder, tmp_path / "cache", silent)[0]
    assert found.features.dtype == torch.float32 and found.features.min() < 0


def test_chunks_do_not_change_the_standardised_rows(tmp_path, monkeypatch):
    whole = rows(tmp_path, numbers(9))
    monkeypatch.setattr("brimful.molecules.prepare._CHUNK_ROWS", 7)
    assert torch.equal(rows(tmp_path, numbers(9)).features, whole.features)


@pytest.mark.parametrize("word", ["", " ", "NA", "n/a", "NaN", "None", "NULL", "-", "?", "inf", "-inf"])
def test_a_word_for_a_missing_label_is_blank(tmp_path, word):
    for one, other in (("0", "1"), ("inactive", "active")):
        found = prepared(tmp_path, [word if number % 3 == 0 else (one, other)[number % 2] for number in range(COUNT)])
        assert found.classes == (2,)
        assert (found.labels[::3] == -1).all() and set(found.labels[1::3].flat) == {0, 1}


def test_numbers_beside_words_for_missing_stay_numbers(tmp_path):
    found = prepared(tmp_path, ["9", "10", "10.0", "N/A"] * (COUNT // 4))
    assert found.labels[:4, 0].tolist() == [0, 1, 1, -1]
    assert found.remarks[0] == "label y: 9 (15), 10 (30), 15 blank (N/A)"


def test_the_remark_on_a_label_names_a_few_classes(tmp_path):
    found = prepared(tmp_path, [str(number % 8) for number in range(COUNT)])
    assert found.remarks[0] == "label y: 0 (8), 1 (8), 2 (8), 3 (8), 4 (7), 3 other values"


@pytest.mark.parametrize(
    ("labels", "message"),
    [
        (["1"] * COUNT, "few: label 'y' has only 1 among the ID training molecules"),
        ([""] * COUNT, "few: label 'y' has no value among the ID training molecules"),
    ],
)
def test_a_label_of_one_class_cannot_train_a_classifier(tmp_path, labels, message):
    with pytest.raises(BadData, match=message):
        prepared(tmp_path, labels).check_labels()


def test_a_column_of_measurements_is_not_a_label(tmp_path, monkeypatch):
    monkeypatch.setattr("brimful.molecules.prepare.MOST_CLASSES", 10)
    with pytest.raises(BadData, match="has 60 different values, more than 10 classes"):
        prepared(tmp_path, [f"{number / 7:.3f}" for number in range(COUNT)]).check_labels()


def test_rows_in_another_encoding_get_a_remark(tmp_path):
    prepared(tmp_path, ["0", "1", "阴"] * (COUNT // 3))
    (tmp_path / "gbk.csv").write_bytes((tmp_path / "few.csv").read_text("utf-8").encode("gbk"))
    spec = DatasetSpec(name="few", file=tmp_path / "gbk.csv", split="random", label=("y",))
    assert prepare(spec, tmp_path / "cache", silent).remarks[:2] == (
        "20 rows cannot be read and are left out",
        "20 of them because they are not UTF-8 (try iconv -f gbk -t utf-8)",
    )
