"""Molecules of a file: those that can be read, and a list of the others."""

import gzip
import logging
import sys
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from brimful.errors import BadData, BadOption, MissingExtra
from brimful.molecules import dataset
from brimful.molecules.dataset import Molecules, read_molecules

pytest.importorskip("rdkit")

TABLE = "name,smiles,active\nethanol, CCO ,1\nbroken,CC(,0\nbenzene,c1ccccc1,\ncrowded,CN(C)(C)(C)C,1\nblank,,0\npyridine,c1ccncc1,0\n"


@pytest.fixture
def table(tmp_path: Path) -> Path:
    path = tmp_path / "some.csv"
    path.write_text(TABLE)
    return path


def test_what_can_be_read_keeps_its_row_and_its_columns(table: Path) -> None:
    found = read_molecules(table)
    assert found.smiles.tolist() == ["CCO", "c1ccccc1", "c1ccncc1"]
    assert found.rows.tolist() == [0, 2, 5]
    assert found.columns["name"].tolist() == ["ethanol", "benzene", "pyridine"]
    assert found.rows_in == 6
    assert found.facts is not None and found.facts.heavy_atoms.tolist() == [3, 6, 6]


def test_a_blank_label_is_nan_and_never_zero(table: Path) -> None:
    np.testing.assert_array_equal(read_molecules(table).columns["active"], [1.0, np.nan, 0.0])


def test_what_cannot_be_read_is_listed_with_rdkits_reason(table: Path) -> None:
    listed = [(one.row, one.smiles, one.reason) for one in read_molecules(table).unread]
    assert listed == [
        (1, "CC(", "syntax error around position 3"),
        (3, "CN(C)(C)(C)C", "Explicit valence for atom # 1 N, 5, is greater than permitted"),
        (4, "", "blank"),
    ]


def test_rdkit_is_silent_while_molecules_are_read(table: Path, capfd: pytest.CaptureFixture[str]) -> None:
    heard: list[logging.LogRecord] = []
    handler = logging.Handler()
    handler.emit = heard.append  # type: ignore[method-assign]
    logging.getLogger("rdkit").addHandler(handler)  # beside RDKit's own, which writes to the terminal
    read_molecules(table)
    assert handler in logging.getLogger("rdkit").handlers
    logging.getLogger("rdkit").removeHandler(handler)
    assert not heard and capfd.readouterr() == ("", "")


def test_a_log_that_the_user_put_to_silence_stays_silent(table: Path, capfd: pytest.CaptureFixture[str]) -> None:
    from rdkit import Chem, RDLogger

    RDLogger.DisableLog("rdApp.*")
    try:
        read_molecules(table)
        Chem.MolFromSmiles("CC(")
        assert capfd.readouterr().err == ""
    finally:
        RDLogger.EnableLog("rdApp.error")
        RDLogger.EnableLog("rdApp.warning")


def test_a_row_that_is_no_csv_is_listed_and_counts(tmp_path: Path) -> None:
    path = tmp_path / "ragged.csv"
    path.write_text("smiles,y\nCCO,1\nCCN,2,3\nCCC,4\n")
    found = read_molecules(path)
    assert found.rows.tolist() == [0, 2]
    assert [(one.row, one.reason) for one in found.unread] == [(1, "3 fields, the header has 2")]
    assert found.rows_in == 3


def test_tsv_gz_and_parquet_give_the_same_molecules(table: Path, tmp_path: Path) -> None:
    tsv, parquet = tmp_path / "some.tsv.gz", tmp_path / "some.parquet"
    tsv.write_bytes(gzip.compress(TABLE.replace(",", "\t").encode()))
    rows = [line.split(",") for line in TABLE.splitlines()[1:]]
    pq.write_table(
        pa.table(
            {
                "smiles": [row[1] for row in rows],
                "active": pa.array([int(row[2]) if row[2] else None for row in rows], pa.int8()),
                "name": [row[0] for row in rows],
                "listed": [[1]] * len(rows),
            }
        ),
        parquet,
    )
    first = read_molecules(table)
    for other in (read_molecules(tsv), read_molecules(parquet)):
        assert other.smiles.tolist() == first.smiles.tolist()
        assert other.unread == first.unread
        np.testing.assert_array_equal(other.columns["active"], first.columns["active"])
        assert other.columns["name"].tolist() == first.columns["name"].tolist()


def test_only_the_columns_named_are_kept(table: Path) -> None:
    assert list(read_molecules(table, columns=["active"]).columns) == ["active"]


def test_take_keeps_everything_aligned(table: Path) -> None:
    taken = read_molecules(table).take([2, 0])
    assert taken.smiles.tolist() == ["c1ccncc1", "CCO"]
    assert taken.rows.tolist() == [5, 0]
    assert taken.columns["name"].tolist() == ["pyridine", "ethanol"]
    assert taken.facts is not None and taken.facts.rings.tolist() == [1, 0]


def test_a_missing_column_is_told_with_what_may_be_meant(table: Path) -> None:
    with pytest.raises(BadOption, match="no column 'actve'; did you mean 'active'\\? it has name, smiles, active"):
        read_molecules(table, columns=["actve"])


def test_a_column_of_another_case_is_told_with_the_key_to_set(tmp_path: Path) -> None:
    (tmp_path / "loud.csv").write_text("SMILES,y\nCCO,1\n")
    with pytest.raises(BadOption) as caught:
        read_molecules(tmp_path / "loud.csv")
    says = "no column 'smiles'; did you mean 'SMILES'? it has SMILES, y; say smiles = \"SMILES\" under [[datasets]]"
    assert says in str(caught.value)


@pytest.mark.parametrize(
    ("name", "content", "says"),
    [
        (
            "some.csv",
            b"smiles;SR-ARE\nCCO;1\n",
            "columns between commas, and its header has semicolons; write it with com",
        ),
        ("some.csv", b'"smiles";"y"\r\n"CCO";"1"\r\n', "its header has semicolons"),
        ("some.csv", b"smiles|y\nCCO|1\n", "its header has bars; write it with commas"),
        ("some.csv", b"smiles\ty\nCCO\t1\n", "its header has tabs; call it .tsv"),
        ("some.tsv.gz", gzip.compress(b"smiles,y\nCCO,1\n"), "between tabs, and its header has commas; call it .csv"),
        ("some.csv", "smiles,name\nCCO,乙醇\n".encode("gbk"), "is not UTF-8; convert it with iconv -f gbk -t utf-8"),
        ("some.csv", "smiles,名\nCCO,乙醇\n".encode("gbk"), "not UTF-8; .* convert it with iconv -f gbk -t utf-8"),
        (
            "some.csv",
            "smiles,y\nCCO,1\n".encode("utf-16"),
            "looks like UTF-16; convert it with iconv -f utf-16 -t utf-8",
        ),
        ("some.csv", "smiles,y\nCCO,1\n".encode("utf-16-be"), "convert it with iconv -f utf-16 -t utf-8"),
    ],
)
def test_another_separator_or_encoding_is_told_with_what_to_do(
    tmp_path: Path, name: str, content: bytes, says: str
) -> None:
    (tmp_path / name).write_bytes(content)
    with pytest.raises(BadData, match=says):
        read_molecules(tmp_path / name)


def test_a_lone_column_may_be_called_anything(tmp_path: Path) -> None:
    (tmp_path / "lone.csv").write_text("a|b\nCCO\n")
    assert read_molecules(tmp_path / "lone.csv", smiles="a|b").smiles.tolist() == ["CCO"]


@pytest.mark.parametrize(
    ("name", "content", "says"),
    [
        ("all.csv", b"smiles\nCC(\nxyz\n", "no molecule that RDKit can read, the first in row 0: 'CC\\('"),
        ("none.csv", b"smiles\n", "has a header and no rows"),
        ("some.xlsx", b"PK", "is of no kind that is read here; give .parquet, .csv"),
        ("some.parquet", b"PAR1", "no whole parquet file"),
    ],
)
def test_a_file_that_cannot_be_used_is_one_sentence(tmp_path: Path, name: str, content: bytes, says: str) -> None:
    (tmp_path / name).write_bytes(content)
    with pytest.raises(BadData, match=says):
        read_molecules(tmp_path / name)


@pytest.mark.parametrize("kind", [pa.large_string(), pa.string_view(), pa.dictionary(pa.int32(), pa.string())])
def test_text_of_a_parquet_is_read_however_it_is_stored(tmp_path: Path, kind: pa.DataType) -> None:
    columns = {"smiles": ["CCO", "CC", "CCO"], "active": ["yes", None, "no"]}
    pq.write_table(
        pa.table({name: pa.array(one).cast(kind) for name, one in columns.items()}), tmp_path / "some.parquet"
    )
    found = read_molecules(tmp_path / "some.parquet", columns=["active"])
    assert found.smiles.tolist() == columns["smiles"] and found.columns["active"].tolist() == ["yes", "", "no"]


def test_a_column_of_numbers_is_no_column_of_smiles(tmp_path: Path) -> None:
    pq.write_table(pa.table({"smiles": [1, 2]}), tmp_path / "numbers.parquet")
    with pytest.raises(BadData, match="the column 'smiles' is of int64; name one of text"):
        read_molecules(tmp_path / "numbers.parquet")


def test_a_missing_rdkit_is_told_with_the_pip_command(table: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "rdkit", None)
    with pytest.raises(MissingExtra, match=r"pip install 'brimful\[mol\]'"):
        read_molecules(table)


def test_processes_find_what_one_process_finds(monkeypatch: pytest.MonkeyPatch) -> None:
    smiles = ["CCO", "CC(", "c1ccccc1C", "C1CC1", ""] * 3
    alone, told = dataset.examine(smiles), []
    monkeypatch.setattr(dataset, "_CHUNK", 4)
    monkeypatch.setattr(dataset, "_WORTH_PROCESSES", 2)
    monkeypatch.setattr(dataset.Host, "detect", lambda: type("Two", (), {"cores": 2}))
    helped = _spied(monkeypatch)
    assert dataset.examine(smiles, told.append) == alone
    assert helped == [2]
    assert len(told) == 4 and told[-1] == "read 15 of 15 molecules"


def _spied(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many processes were asked for, each time any were."""
    asked: list[int] = []
    real = dataset.ProcessPoolExecutor

    def pool(processes: int, **options: object) -> object:
        asked.append(processes)
        return real(processes, **options)  # type: ignore[arg-type]

    monkeypatch.setattr(dataset, "ProcessPoolExecutor", pool)
    return asked


def test_a_process_that_dies_costs_time_and_not_the_result(monkeypatch: pytest.MonkeyPatch) -> None:
    smiles = ["CCO", "CC("] * 3
    alone = dataset.examine(smiles)
    monkeypatch.setattr(dataset, "_CHUNK", 2)
    monkeypatch.setattr(dataset, "_WORTH_PROCESSES", 2)
    monkeypatch.setattr(dataset.Host, "detect", lambda: type("Two", (), {"cores": 2}))

    class Dying:
        def __init__(self, *_: object, **__: object) -> None: ...
        def submit(self, *_: object) -> object:
            raise dataset.BrokenProcessPool

        def shutdown(self, **_: object) -> None: ...

    monkeypatch.setattr(dataset, "ProcessPoolExecutor", Dying)
    assert dataset.examine(smiles) == alone


def test_molecules_made_by_hand_need_no_facts() -> None:
    by_hand = Molecules(source="here", smiles=np.array(["CCO"], dtype=object), rows=np.arange(1), columns={}, rows_in=1)
    assert len(by_hand.take([0])) == 1
