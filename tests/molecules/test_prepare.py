"""What heads are trained on: features in one unit, labels as classes, and what is told of both."""

from pathlib import Path

import numpy as np
import pytest
import torch

from brimful.errors import BadData
from brimful.molecules.feature_store import Shelf
from brimful.molecules.features.compute import load_encoder
from brimful.molecules.prepare import prepare, rows_of
from brimful.molecules.spec import DatasetSpec, grid
from brimful.molecules.spec_file import read_spec
from brimful.molecules.training import job_of

pytest.importorskip("rdkit")


COUNT = 60


def prepared(folder: Path, labels=None, **options):
    """Sixty alcohols under a random split, with these labels."""
    cells = labels if labels is not None else ["0", "1"] * (COUNT // 2)
    rows = [f"{'C' * (number + 1)}O,{cell}" for number, cell in enumerate(cells)]
    (folder / "few.csv").write_text("\n".join(["smiles,y", *rows]) + "\n", encoding="utf-8")
    asked = DatasetSpec(name="few", file=folder / "few.csv", split="random", label=("y",), **options)
    return prepare(asked, folder / "cache", lambda phrase: None)


def rows(folder: Path, matrix):
    np.save(folder / "own.npy", matrix)
    encoder = load_encoder("own.npy", folder=folder)
    return rows_of(prepared(folder), encoder, folder / "cache", lambda phrase: None)[0]


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
    assert Shelf({"few": found}, torch.device("cpu")).sparse


def test_counts_of_ecfp_are_standardised(tmp_path):
    encoder = load_encoder({"name": "ecfp", "bits": 64, "counts": True}, folder=tmp_path)
    found = rows_of(prepared(tmp_path), encoder, tmp_path / "cache", lambda phrase: None)[0]
    assert found.features.dtype == torch.float32 and found.features.min() < 0


def test_rows_are_standardised_piece_by_piece_to_the_same_numbers(tmp_path, monkeypatch):
    whole = rows(tmp_path, numbers(9))
    monkeypatch.setattr("brimful.molecules.prepare._ROWS", 7)
    assert torch.equal(rows(tmp_path, numbers(9)).features, whole.features)


@pytest.mark.parametrize("word", ["", " ", "NA", "n/a", "NaN", "None", "NULL", "-", "?", "inf", "-inf"])
def test_a_word_for_a_missing_label_is_blank(tmp_path, word):
    for one, other in (("0", "1"), ("inactive", "active")):
        found = prepared(tmp_path, [word if number % 3 == 0 else (one, other)[number % 2] for number in range(COUNT)])
        assert found.classes == (2,)
        assert (found.labels[::3] == -1).all() and set(found.labels[1::3].flat) == {0, 1}


def test_numbers_among_words_for_nothing_stay_numbers(tmp_path):
    found = prepared(tmp_path, ["9", "10", "10.0", "N/A"] * (COUNT // 4))
    assert found.labels[:4, 0].tolist() == [0, 1, 1, -1]
    assert found.remarks[0] == "label y: 9 (15), 10 (30), 15 blank (N/A)"


def test_a_label_is_told_with_a_handful_of_its_classes(tmp_path):
    found = prepared(tmp_path, [str(number % 8) for number in range(COUNT)])
    assert found.remarks[0] == "label y: 0 (8), 1 (8), 2 (8), 3 (8), 4 (7), 3 other values"


@pytest.mark.parametrize(
    ("labels", "says"),
    [
        (["1"] * COUNT, "few: label 'y' has only 1 among the ID training molecules"),
        ([""] * COUNT, "few: label 'y' has nothing among the ID training molecules"),
    ],
)
def test_a_label_of_one_class_is_refused_where_a_method_needs_it(tmp_path, labels, says):
    found = prepared(tmp_path, labels)
    (tmp_path / "few.toml").write_text(
        'seeds = 1\nmethods = ["dpo", "knn", "msp"]\nencoders = ["ecfp"]\n'
        '[[datasets]]\nfile = "few.csv"\nsplit = "random"\nlabel = "y"\n'
    )
    encoder = load_encoder("ecfp", folder=tmp_path)
    some = rows_of(found, encoder, tmp_path / "cache", lambda phrase: None)[0]
    dpo, knn, msp = grid(read_spec(tmp_path / "few.toml"))
    assert job_of(dpo, some, found.classes) is not None and job_of(knn, some, found.classes) is None
    with pytest.raises(BadData, match=says):
        job_of(msp, some, found.classes)


def test_a_measurement_is_no_label(tmp_path, monkeypatch):
    monkeypatch.setattr("brimful.molecules.prepare.MOST_CLASSES", 10)
    with pytest.raises(BadData, match="has 60 different values, more than the 10 classes"):
        bool(prepared(tmp_path, [f"{number / 7:.3f}" for number in range(COUNT)]).classes)


def test_rows_in_another_encoding_are_told(tmp_path):
    prepared(tmp_path, ["0", "1", "阴"] * (COUNT // 3))
    (tmp_path / "gbk.csv").write_bytes((tmp_path / "few.csv").read_text("utf-8").encode("gbk"))
    asked = DatasetSpec(name="few", file=tmp_path / "gbk.csv", split="random", label=("y",))
    assert prepare(asked, tmp_path / "cache", lambda phrase: None).remarks[:2] == (
        "20 rows cannot be read and are left out",
        "20 of them for being not UTF-8: convert the file, as with iconv -f gbk -t utf-8",
    )
