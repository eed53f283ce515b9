"""Molecules of a file: those that can be read, a list of the others, and what RDKit says of them."""

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
from brimful.molecules.dataset import Facts, read_facts, read_molecules

pytest.importorskip("rdkit")

TABLE = "name,smiles,active\nethanol, CCO ,1\nbroken,CC(,0\nbenzene,c1ccccc1,\ncrowded,CN(C)(C)(C)C,1\nblank,,0\npyridine,c1ccncc1,0\n"


@pytest.fixture
def table(tmp_path: Path) -> Path:
    path = tmp_path / "some.csv"
    path.write_text(TABLE)
    return path


def test_readable_molecules_keep_their_row_and_columns(table: Path) -> None:
    found = read_molecules(table)
    assert found.smiles.tolist() == ["CCO", "c1ccccc1", "c1ccncc1"]
    assert found.rows.tolist() == [0, 2, 5]
    assert found.columns["name"].tolist() == ["ethanol", "benzene", "pyridine"]
    assert found.rows_in == 6
    assert found.facts is not None and found.facts.heavy_atoms.tolist() == [3, 6, 6]


def test_a_blank_label_is_nan_and_never_zero(table: Path) -> None:
    np.testing.assert_array_equal(read_molecules(table).columns["active"], [1.0, np.nan, 0.0])


def test_unreadable_molecules_are_listed_with_rdkits_reason(table: Path) -> None:
    listed = [(one.row, one.smiles, one.reason) for one in read_molecules(table).unread]
    assert listed == [
        (1, "CC(", "syntax error around position 3"),
        (3, "CN(C)(C)(C)C", "Explicit valence for atom # 1 N, 5, is greater than permitted"),
        (4, "", "blank"),
    ]


def test_rdkit_is_silent_while_molecules_are_read(table: Path, capfd: pytest.CaptureFixture[str]) -> None:
    records: list[logging.LogRecord] = []
    handler = logging.Handler()
    handler.emit = records.append  # type: ignore[method-assign]
    logging.getLogger("rdkit").addHandler(handler)  # beside RDKit's own, which writes to the terminal
    read_molecules(table)
    assert handler in logging.getLogger("rdkit").handlers
    logging.getLogger("rdkit").removeHandler(handler)
    assert not records and capfd.readouterr() == ("", "")


def test_a_log_that_the_user_disabled_stays_disabled(table: Path, capfd: pytest.CaptureFixture[str]) -> None:
    from rdkit import Chem, RDLogger

    RDLogger.DisableLog("rdApp.*")
    try:
        read_molecules(table)
        Chem.MolFromSmiles("CC(")
        assert capfd.readouterr().err == ""
    finally:
        RDLogger.EnableLog("rdApp.error")
        RDLogger.EnableLog("rdApp.warning")


def test_a_malformed_row_is_listed_and_counts(tmp_path: Path) -> None:
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


def test_a_missing_column_is_refused_with_a_suggestion(table: Path) -> None:
    with pytest.raises(BadOption, match="no column 'actve', only name, smiles, active. Try: 'active'"):
        read_molecules(table, columns=["actve"])


def test_a_column_of_another_case_is_suggested_with_the_key(tmp_path: Path) -> None:
    (tmp_path / "loud.csv").write_text("SMILES,y\nCCO,1\n")
    with pytest.raises(BadOption) as caught:
        read_molecules(tmp_path / "loud.csv")
    says = "no column 'smiles', only SMILES, y. Try: smiles = \"SMILES\" under [[datasets]]"
    assert says in str(caught.value)


@pytest.mark.parametrize(
    ("name", "content", "says"),
    [
        (
            "some.csv",
            b"smiles;SR-ARE\nCCO;1\n",
            "should have commas between columns, but its header has semicolons. Try: write it with com",
        ),
        ("some.csv", b'"smiles";"y"\r\n"CCO";"1"\r\n', "its header has semicolons"),
        ("some.csv", b"smiles|y\nCCO|1\n", "its header has bars. Try: write it with commas"),
        ("some.csv", b"smiles\ty\nCCO\t1\n", "its header has tabs. Try: rename it to .tsv"),
        (
            "some.tsv.gz",
            gzip.compress(b"smiles,y\nCCO,1\n", mtime=0),  # the same name of the test in every process
            "tabs between columns, but its header has commas. Try: rename it to .csv",
        ),
        ("some.csv", "smiles,name\nCCO,乙醇\n".encode("gbk"), "is not UTF-8. Try: `iconv -f gbk -t utf-8`"),
        ("some.csv", "smiles,名\nCCO,乙醇\n".encode("gbk"), "not UTF-8. .*iconv -f GBK -t UTF-8"),
        (
            "some.csv",
            "smiles,y\nCCO,1\n".encode("utf-16"),
            "looks like UTF-16. Try: `iconv -f utf-16 -t utf-8`",
        ),
        ("some.csv", "smiles,y\nCCO,1\n".encode("utf-16-be"), "iconv -f utf-16 -t utf-8"),
    ],
)
def test_another_separator_or_encoding_is_refused_with_a_fix(
    tmp_path: Path, name: str, content: bytes, says: str
) -> None:
    (tmp_path / name).write_bytes(content)
    with pytest.raises(BadData, match=says):
        read_molecules(tmp_path / name)


def test_a_single_column_may_have_any_name(tmp_path: Path) -> None:
    (tmp_path / "lone.csv").write_text("a|b\nCCO\n")
    assert read_molecules(tmp_path / "lone.csv", smiles="a|b").smiles.tolist() == ["CCO"]


@pytest.mark.parametrize(
    ("name", "content", "says"),
    [
        ("all.csv", b"smiles\nCC(\nxyz\n", "no molecule that RDKit can read, the first is row 0: 'CC\\('"),
        ("none.csv", b"smiles\n", "has a header but no rows"),
        ("some.xlsx", b"PK", "has an unknown type. Try: .parquet, .csv"),
        ("some.parquet", b"PAR1", "is not a whole parquet file"),
    ],
)
def test_a_file_that_cannot_be_used_is_refused(tmp_path: Path, name: str, content: bytes, says: str) -> None:
    (tmp_path / name).write_bytes(content)
    with pytest.raises(BadData, match=says):
        read_molecules(tmp_path / name)


@pytest.mark.parametrize("kind", [pa.large_string(), pa.string_view(), pa.dictionary(pa.int32(), pa.string())])
def test_text_of_a_parquet_is_read_in_any_storage_type(tmp_path: Path, kind: pa.DataType) -> None:
    columns = {"smiles": ["CCO", "CC", "CCO"], "active": ["yes", None, "no"]}
    pq.write_table(
        pa.table({name: pa.array(one).cast(kind) for name, one in columns.items()}), tmp_path / "some.parquet"
    )
    found = read_molecules(tmp_path / "some.parquet", columns=["active"])
    assert found.smiles.tolist() == columns["smiles"] and found.columns["active"].tolist() == ["yes", "", "no"]


def test_smiles_must_be_text(tmp_path: Path) -> None:
    pq.write_table(pa.table({"smiles": [1, 2]}), tmp_path / "numbers.parquet")
    with pytest.raises(BadData, match="column 'smiles' has the type int64. Try: a column of text"):
        read_molecules(tmp_path / "numbers.parquet")


def test_a_missing_rdkit_names_the_pip_command(table: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "rdkit", None)
    with pytest.raises(MissingExtra, match=r"pip install 'brimful\[mol\]'"):
        read_molecules(table)


def test_processes_find_the_same_as_one_process(monkeypatch: pytest.MonkeyPatch) -> None:
    smiles = ["CCO", "CC(", "c1ccccc1C", "C1CC1", ""] * 3
    alone, phrases = dataset.examine(smiles), []
    monkeypatch.setattr(dataset, "CHUNK", 4)
    monkeypatch.setattr(dataset, "may_spawn", lambda: True)
    monkeypatch.setattr(dataset, "WORTH_PROCESSES", 2)
    monkeypatch.setattr(dataset.Host, "detect", lambda: type("Two", (), {"cores": 2}))
    helped = _count_processes(monkeypatch)
    assert dataset.examine(smiles, phrases.append) == alone
    assert helped == [2]
    assert len(phrases) == 4 and phrases[-1] == "read 15 of 15 molecules"


def _count_processes(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many processes were requests for, each time any were."""
    requests: list[int] = []
    real = dataset.ProcessPoolExecutor

    def pool(processes: int, **options: object) -> object:
        requests.append(processes)
        return real(processes, **options)  # type: ignore[arg-type]

    monkeypatch.setattr(dataset, "ProcessPoolExecutor", pool)
    return requests


def test_a_process_that_dies_costs_time_and_not_the_result(monkeypatch: pytest.MonkeyPatch) -> None:
    smiles = ["CCO", "CC("] * 3
    alone = dataset.examine(smiles)
    monkeypatch.setattr(dataset, "CHUNK", 2)
    monkeypatch.setattr(dataset, "WORTH_PROCESSES", 2)
    monkeypatch.setattr(dataset.Host, "detect", lambda: type("Two", (), {"cores": 2}))

    class Dying:
        def __init__(self, *_: object, **__: object) -> None: ...
        def submit(self, *_: object) -> object:
            raise dataset.BrokenProcessPool

        def shutdown(self, **_: object) -> None: ...

    monkeypatch.setattr(dataset, "ProcessPoolExecutor", Dying)
    assert dataset.examine(smiles) == alone


# -- facts ----------------------------------------------------------------------------------------------------------------

SMILES = ["OCC", "Cc1ccccc1", "c1ccc(cc1)C1CCNCC1", "C[C@H](N)O"]


def same(one: Facts, other: Facts) -> bool:
    return all(getattr(one, name).tolist() == getattr(other, name).tolist() for name in Facts.__dataclass_fields__)


def test_facts_are_canonical_smiles_scaffold_atoms_and_rings() -> None:
    facts = read_facts(SMILES)[0]
    assert facts.canonical.tolist()[:2] == ["CCO", "Cc1ccccc1"]
    assert facts.scaffold.tolist() == ["", "c1ccccc1", "c1ccc(C2CCNCC2)cc1", ""]
    assert facts.heavy_atoms.tolist() == [3, 7, 12, 4]
    assert facts.rings.tolist() == [0, 1, 2, 0]


def test_mirror_images_count_as_one_molecule() -> None:
    facts = read_facts(["C[C@H](N)O", "C[C@@H](N)O", "CC(N)O"])[0]
    assert len(set(facts.canonical)) == 1


def test_facts_are_cached(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = read_facts(SMILES, cache=tmp_path)[0]
    monkeypatch.setattr(dataset, "examine", lambda *_: pytest.fail("asked RDKit again"))
    assert same(read_facts(SMILES, cache=tmp_path)[0], first)


def test_the_cache_keeps_the_reasons(tmp_path: Path) -> None:
    _, before = read_facts(["CCO", "CC("], cache=tmp_path)
    _, again = read_facts(["CCO", "CC("], cache=tmp_path)
    assert before == again == {1: "syntax error around position 3"}


@pytest.mark.parametrize("other", [[*SMILES[:-1], "CCC"], SMILES[:-1], SMILES[::-1]])
def test_other_molecules_have_another_cache(tmp_path: Path, other: list[str]) -> None:
    read_facts(SMILES, cache=tmp_path)
    assert same(read_facts(other, cache=tmp_path)[0], read_facts(other)[0])
    assert len(list(tmp_path.iterdir())) == 2


def test_another_rdkit_has_another_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    read_facts(SMILES, cache=tmp_path)
    monkeypatch.setattr(dataset, "rdkit_version", lambda: "3000.1")
    read_facts(SMILES, cache=tmp_path)
    assert len(list(tmp_path.iterdir())) == 2


def test_a_damaged_cache_is_replaced(tmp_path: Path) -> None:
    first, _ = read_facts(SMILES, cache=tmp_path)
    file = next(tmp_path.iterdir())
    whole = file.read_bytes()
    file.write_bytes(whole[:-20])
    assert same(read_facts(SMILES, cache=tmp_path)[0], first)
    assert len(file.read_bytes()) == len(whole)


def test_a_full_disk_costs_the_cache_and_not_the_facts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(_: object, path: Path, **__: object) -> None:
        path.write_bytes(b"half")
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("pyarrow.parquet.write_table", full)
    phrases: list[str] = []
    facts, _ = read_facts(SMILES, cache=tmp_path, progress=phrases.append)
    assert len(facts.canonical) == len(SMILES)
    assert phrases[-1] == "the facts of RDKit are not cached: OSError: [Errno 28] No space left on device"
    assert not list(tmp_path.iterdir())
