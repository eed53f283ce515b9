"""The rows of a sweep on disk, one for each run, and everything that is made of them.

    OUT/results.parquet   one row a run: dataset, split, encoder, method, settings, seed, the figures, how it went
    OUT/results.md        a table a dataset (`tables`), for a README
    OUT/results.tex       the same for a paper
    OUT/runs/NAME.npz     test scores of a run, its validation curve and its training loss; NAME is the row's `run`

The schema is fixed: a reader may count on every column, and an unknown figure is null, never 0. Each file is whole or is
not there: a sweep that is killed while it writes leaves the former table.
"""

import os
import zipfile
import zlib
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import IO, Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from brimful.errors import BadData, BadRun, InternalError
from brimful.tasks.heads.results.summary import summarise
from brimful.tasks.heads.results.tables import latex, markdown

__all__ = ["COLUMNS", "read_results", "read_run", "summarise", "write_results", "write_run"]

_TEXT, _WHOLE, _REAL = pa.string(), pa.int64(), pa.float64()
SCHEMA = pa.schema(
    {
        "dataset": _TEXT, "split": _TEXT, "encoder": _TEXT, "method": _TEXT, "settings": _TEXT, "seed": _WHOLE,
        "kind": _TEXT, "auroc": _REAL, "aupr": _REAL, "fpr95": _REAL, "aupr_ood": _REAL, "aupr_id": _REAL,
        "fpr95_ood": _REAL, "fpr95_id": _REAL, "positive": _TEXT, "epochs": _WHOLE, "best_epoch": _WHOLE,
        "valid_auroc": _REAL, "n_id_test": _WHOLE, "n_ood_test": _WHOLE, "seconds": _REAL, "deterministic": pa.bool_(),
        "run": _TEXT,
    }
)  # fmt: skip
COLUMNS = tuple(SCHEMA.names)
RUN_ARRAYS = ("id_scores", "ood_scores", "curve", "loss")


def write_results(folder: str | Path, rows: Sequence[Mapping[str, Any]]) -> None:
    """results.parquet, results.md and results.tex, each in place of the former."""
    if unknown := sorted({key for row in rows for key in row} - set(COLUMNS)):
        raise InternalError(f"result rows have no columns {', '.join(unknown)}; add them to SCHEMA")
    folder, summaries = Path(folder), summarise(rows)
    table = pa.Table.from_pylist([dict(row) for row in rows], schema=SCHEMA)
    _write(folder / "results.parquet", lambda file: pq.write_table(table, file, compression="zstd"))
    for name, text in (("results.md", markdown(summaries)), ("results.tex", latex(summaries))):
        _write(folder / name, lambda file, text=text: file.write(text.encode()))  # type: ignore[misc]


def read_results(folder: str | Path) -> list[dict[str, Any]]:
    """The rows as they were written; none where there is no table yet."""
    path = Path(folder) / "results.parquet"
    if not path.exists():
        return []
    try:
        table = pq.read_table(path)
    except (OSError, pa.ArrowException) as error:
        raise BadData(f"{path} cannot be read: {str(error).splitlines()[0]}; remove it and run the sweep again, finished runs are kept") from None  # fmt: skip
    if missing := [name for name in COLUMNS if name not in table.column_names]:
        raise BadData(f"{path} is no table of a sweep: it has no column {', '.join(missing)}; give the folder of a sweep")  # fmt: skip
    rows: list[dict[str, Any]] = table.select(COLUMNS).to_pylist()
    return rows


def write_run(folder: str | Path, name: str, **arrays: np.ndarray) -> None:
    """`RUN_ARRAYS`: scores of the test molecules, validation AUROC and training loss by epoch (empty where there is none)."""
    assert set(arrays) == set(RUN_ARRAYS), sorted(arrays)
    _write(_run_path(folder, name), lambda file: np.savez_compressed(file, **arrays))  # type: ignore[arg-type]


def read_run(folder: str | Path, name: str) -> dict[str, np.ndarray] | None:
    """None where the run has left nothing, or nothing whole."""
    try:
        with np.load(_run_path(folder, name), allow_pickle=False) as arrays:
            return {key: arrays[key] for key in RUN_ARRAYS}
    except (OSError, ValueError, KeyError, EOFError, zipfile.BadZipFile, zlib.error):
        return None


def _run_path(folder: str | Path, name: str) -> Path:
    return Path(folder) / "runs" / f"{name}.npz"


def _write(path: Path, write: Callable[[IO[bytes]], Any]) -> None:
    """The former content or the new one, also after a power cut."""
    draft = path.with_name(f".{path.name}.part-{os.getpid()}")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with draft.open("wb") as file:
            write(file)
            file.flush()
            os.fsync(file.fileno())
        draft.replace(path)
    except OSError as error:
        raise BadRun(f"{path} cannot be written: {error.strerror or error}; make room, or give another --output") from None  # fmt: skip
    finally:
        draft.unlink(missing_ok=True)
