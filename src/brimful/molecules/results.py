"""The rows of a sweep on disk, their summaries over seeds, and the tables made of those.

    OUT/results.parquet   one row per run: dataset, split, encoder, method, settings, seed, the figures, how it went
    OUT/results.md        a table per dataset
    OUT/results.tex       the same for a paper (booktabs)
    OUT/runs/NAME.npz     test scores of a run, its validation curve and training loss; NAME is the row's `run`

The schema is fixed: every column is always there, and an unknown figure is null, never 0.

Every view (terminal, Markdown, LaTeX, page) shows the texts of a summary, so none can round differently. Methods carry their
gain over the best trivial baseline: on a size split a count of heavy atoms reaches an AUROC of 1.000, so only the gain is a
result. The best of a table is decided by the three digits shown, trivial baselines included.
"""

import io
import math
import re
import zipfile
import zlib
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import chain, count
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from brimful.errors import BadRun, InternalError
from brimful.files import write_atomic
from brimful.molecules.metrics import OverSeeds, over_seeds, paired_difference

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
FIGURES = ("auroc", "aupr", "fpr95", "aupr_ood", "aupr_id", "fpr95_ood", "fpr95_id")
HEADERS = (("auroc", "AUROC ↑"), ("aupr", "AUPR ↑"), ("fpr95", "FPR95 ↓"))
"""The figures of a table, with their headers."""
LOWER_IS_BETTER = frozenset(("fpr95", "fpr95_ood", "fpr95_id"))
TRIVIAL = "trivial"
"""The kind of a row that counts atoms or rings, or looks for the nearest training molecule."""
UNKNOWN = "–"
CHANCE = 0.5
"""The AUROC of a coin."""
_GROUP_KEYS = ("dataset", "encoder", "method", "settings")
_KEPT = (*_GROUP_KEYS, "split", "kind", "positive", "deterministic", "n_id_test", "n_ood_test")

Row = Mapping[str, Any]
Summary = dict[str, Any]


# ---- Files -----------------------------------------------------------------------------------------------------------------


def write_results(folder: str | Path, rows: Sequence[Row]) -> None:
    """results.parquet, results.md and results.tex, each replaced atomically."""
    if unknown := sorted({key for row in rows for key in row} - set(COLUMNS)):
        raise InternalError(f"result rows have no columns {', '.join(unknown)}; add them to SCHEMA")
    folder, summaries, parquet = Path(folder), summarise(rows), io.BytesIO()
    pq.write_table(pa.Table.from_pylist([dict(row) for row in rows], schema=SCHEMA), parquet, compression="zstd")
    _write(folder / "results.parquet", parquet.getvalue())
    _write(folder / "results.md", markdown(summaries))
    _write(folder / "results.tex", latex(summaries))


def write_run(folder: str | Path, name: str, **arrays: np.ndarray) -> None:
    """`RUN_ARRAYS`: scores of the test molecules, validation AUROC and training loss by epoch (may be empty)."""
    assert set(arrays) == set(RUN_ARRAYS), sorted(arrays)
    content = io.BytesIO()
    np.savez_compressed(content, **arrays)  # type: ignore[arg-type]
    _write(_run_path(folder, name), content.getvalue())


def read_run(folder: str | Path, name: str) -> dict[str, np.ndarray] | None:
    """None where the file is missing or damaged."""
    try:
        with np.load(_run_path(folder, name), allow_pickle=False) as arrays:
            return {key: arrays[key] for key in RUN_ARRAYS}
    except (OSError, ValueError, KeyError, EOFError, zipfile.BadZipFile, zlib.error):
        return None


def _run_path(folder: str | Path, name: str) -> Path:
    return Path(folder) / "runs" / f"{name}.npz"


def _write(path: Path, content: str | bytes) -> None:
    with writing(path):
        write_atomic(path, content)


@contextmanager
def writing(path: Path) -> Iterator[None]:
    """Creates the folder of a file that is written in the block. A disk that is full or read-only is one message."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        yield
    except (OSError, pa.ArrowException) as error:
        why = getattr(error, "strerror", None) or str(error).splitlines()[0]
        raise BadRun(f"{path} cannot be written: {why}. Try: free space, or another output=.") from None


# ---- Summaries: one for each row of a table ----------------------------------------------------------------------------------


def summarise(rows: Sequence[Row]) -> list[Summary]:
    """One summary per dataset, encoder, method and settings, in order of appearance; trivial baselines last."""
    groups: dict[tuple[Any, ...], list[Row]] = {}
    for row in rows:
        groups.setdefault(tuple(row[key] for key in _GROUP_KEYS), []).append(row)
    tables: dict[str, list[tuple[Summary, list[Row]]]] = {}
    for group in groups.values():
        tables.setdefault(group[0]["dataset"], []).append((_summary(group), group))
    return [summary for table in tables.values() for summary in _complete(table)]


def _complete(pairs: Sequence[tuple[Summary, Sequence[Row]]]) -> list[Summary]:
    """The summaries of one dataset with what needs the whole table: gains, the best, the chosen, texts."""
    _add_gains(pairs)
    table = sorted((summary for summary, _ in pairs), key=lambda summary: bool(summary["kind"] == TRIVIAL))
    _mark_best(table)
    _mark_chosen(table)
    about = _about(table)
    for summary in table:
        summary["about"], summary["text"] = about, _texts(summary)
    return table


def _summary(group: Sequence[Row]) -> Summary:
    summary: Summary = {key: group[0][key] for key in _KEPT}
    for figure in FIGURES:
        known = _by_seed(group, figure)
        over = over_seeds(known, deterministic=group[0]["deterministic"]) if known else None
        summary[figure] = over and over.mean
        summary[f"{figure}_sd"] = over and over.sd
        summary[f"{figure}_low"], summary[f"{figure}_high"] = _ends(over)
    summary["seeds"], summary["runs"] = len(_by_seed(group, "auroc")), len({row["seed"] for row in group})
    for figure in ("valid_auroc", "epochs", "best_epoch"):
        values = list(_by_seed(group, figure).values())
        summary[figure] = sum(values) / len(values) if values else None
    summary["seconds"] = sum(_by_seed(group, "seconds").values()) or None
    return summary


def _by_seed(group: Sequence[Row], figure: str) -> dict[int, float]:
    """By seed; a run that diverged has no figure."""
    known = {row["seed"]: row[figure] for row in group if row.get(figure) is not None}
    return {seed: value for seed, value in known.items() if math.isfinite(value)}


def _ends(over: OverSeeds | None) -> tuple[float | None, float | None]:
    return (over.interval.low, over.interval.high) if over and over.interval else (None, None)


def _add_gains(pairs: Sequence[tuple[Summary, Sequence[Row]]]) -> None:
    """AUROC less that of the best trivial baseline, seed by seed; less that of a coin where all of them are worse."""
    trivial = [pair for pair in pairs if pair[0]["kind"] == TRIVIAL and pair[0]["auroc"] is not None]
    best = max(trivial, key=lambda pair: pair[0]["auroc"], default=None)
    worse = best is not None and best[0]["auroc"] < CHANCE
    for summary, group in pairs:
        comparable = summary["kind"] != TRIVIAL and summary["auroc"] is not None
        baseline = None if best is None else CHANCE if worse else _auroc_by_seed(*best)
        over = (
            paired_difference(_auroc_by_seed(summary, group), baseline) if baseline is not None and comparable else None
        )
        summary["trivial"] = "chance" if worse else best and best[0]["method"]
        summary["gain"], summary["gain_sd"] = over and over.mean, over and over.sd
        summary["gain_low"], summary["gain_high"] = _ends(over)


def _auroc_by_seed(summary: Summary, group: Sequence[Row]) -> Mapping[int, float] | float:
    """By seed; a plain number for a method that gives the same under every seed."""
    if summary["deterministic"]:
        value: float = summary["auroc"]
        return value
    return _by_seed(group, "auroc")


def _mark_best(table: Sequence[Summary]) -> None:
    for summary in table:
        summary["best"] = []
    for figure in FIGURES:
        known = [summary for summary in table if summary[figure] is not None]
        pick = min if figure in LOWER_IS_BETTER else max
        if len(known) > 1:
            best = pick(round(summary[figure], 3) for summary in known)
            for summary in known:
                summary["best"] += [figure] * (round(summary[figure], 3) == best)


def _mark_chosen(table: Sequence[Summary]) -> None:
    """Mark the settings of each method with the best validation AUROC, the first of equals; None where there is no choice."""
    for summary in table:
        rivals = [other for other in table if all(other[key] == summary[key] for key in ("encoder", "method"))]
        known = [other for other in rivals if other["valid_auroc"] is not None]  # one that diverged has none
        has_choice = len(rivals) > 1 and known
        summary["chosen"] = summary is max(known, key=lambda other: other["valid_auroc"]) if has_choice else None


def _texts(summary: Summary) -> dict[str, str]:
    """`.789 ± .003`, `+.106 (+.101 to +.110)`, `8 of 10`."""
    texts = {figure: f"{show_figure(summary[figure])} ± {show_figure(summary[f'{figure}_sd'])}" for figure in FIGURES}
    interval = (
        f" ({_signed(summary['gain_low'])} to {_signed(summary['gain_high'])})"
        if summary["gain_low"] is not None
        else ""
    )
    texts["gain"] = f"{_signed(summary['gain'])}{interval}"
    seeds = f"{summary['seeds']} of {summary['runs']}" if summary["seeds"] < summary["runs"] else str(summary["seeds"])
    texts["seeds"] = UNKNOWN if summary["deterministic"] else seeds
    texts["settings"] = f"{summary['settings']} ✓".strip() if summary["chosen"] else summary["settings"]
    return texts


def _about(table: Sequence[Summary]) -> str:
    """`scaffold split, 1,000 ID and 1,000 OOD test molecules, best trivial baseline rings`"""
    sides = [f"{number} {side}" for key, side in (("n_id_test", "ID"), ("n_ood_test", "OOD")) if (number := _range(table, key))]  # fmt: skip
    tested = f", {' and '.join(sides)} test molecules" if sides else ""
    best = f", best trivial baseline {table[0]['trivial']}" if table[0]["trivial"] else ""
    return f"{table[0]['split']} split{tested}{best}"


def _range(table: Sequence[Summary], key: str) -> str:
    """Encoders fail on different molecules, so a table can have several counts; "" where none is known."""
    known = sorted({summary[key] for summary in table if summary[key] is not None})
    return "" if not known else f"{known[0]:,}" if len(known) == 1 else f"{known[0]:,}–{known[-1]:,}"


def show_figure(value: float | None) -> str:
    """`.789`, `1.000`, – where there is none."""
    return UNKNOWN if value is None else f"{value:.3f}".removeprefix("0")


def _signed(value: float | None) -> str:
    """`+.106`, `−.012`; no sign for what rounds to zero."""
    if value is None:
        return UNKNOWN
    sign = "" if round(value, 3) == 0 else "+" if value > 0 else "−"
    return f"{sign}{show_figure(abs(value))}"


def gain_sign(summary: Summary) -> int:
    """1 or -1 for a gain or a loss whose interval excludes zero, else 0."""
    if summary["gain"] is None:
        return 0
    low, high = (summary["gain"] if summary[end] is None else summary[end] for end in ("gain_low", "gain_high"))
    return 1 if low > 0 else -1 if high < 0 else 0


def conventions(summaries: Sequence[Summary]) -> list[str]:
    """What a table means, in sentences for its caption: without them it cannot be compared with others."""
    if not summaries:
        return []
    positive, other = ("OOD", "ID") if summaries[0]["positive"] == "ood" else ("ID", "OOD")
    sentences = [
        f"{positive} molecules are the positive side; FPR95 is the share of {other} molecules wrongly called {positive} at the threshold that finds 95 % of the {positive} ones.",
        f"± is the standard deviation over seeds (n − 1), {UNKNOWN} for a deterministic method.",
        "Gain is the AUROC less that of the best trivial baseline, with the 95 % bootstrap interval over seeds, paired by seed.",
        "The best of a table is in bold, trivial baselines included.",
    ]  # fmt: skip
    if any(summary["chosen"] for summary in summaries):
        sentences.append("✓ marks the settings with the best validation AUROC.")
    if any(
        summary["settings"] and summary["chosen"] is None and summary["valid_auroc"] is None for summary in summaries
    ):
        sentences.append("Plain classifiers and distances have no validation AUROC, so their settings get no ✓.")
    return sentences


# ---- Markdown and LaTeX: a table per dataset, trivial baselines below a rule ---------------------------------------------------

_LATEX = {
    "&": r"\&", "%": r"\%", "$": r"\$", "#": r"\#", "_": r"\_", "{": r"\{", "}": r"\}", "~": r"\textasciitilde{}",
    "^": r"\textasciicircum{}", "\\": r"\textbackslash{}", "±": r"$\pm$", "−": "$-$", "–": "--", "✓": r"$\star$",
    "<": "$<$", ">": "$>$", "↑": r"$\uparrow$", "↓": r"$\downarrow$",
}  # fmt: skip


def markdown(summaries: Sequence[Summary]) -> str:
    """For a README: conventions below the tables."""
    parts = ["# Results of the sweep\n"]
    for dataset, table in by_dataset(summaries).items():
        methods, trivial = _cells(table, _escape_markdown, "**{}**".format)
        header = _header(table)
        aligned = ["---"] * (len(header) - 5) + ["---:"] * 5
        rule = [["*trivial baselines*", *[""] * (len(header) - 1)]] if trivial else []
        rows = "\n".join(f"| {' | '.join(cells)} |" for cells in [header, aligned, *methods, *rule, *trivial])
        parts.append(f"## {_escape_markdown(dataset)}\n\n{_escape_markdown(table[0]['about'])}.\n\n{rows}\n")
    return "\n".join([*parts, *(f"- {sentence}" for sentence in conventions(summaries))]) + "\n"


def latex(summaries: Sequence[Summary]) -> str:
    """For a paper: `\\input` it; each table has a caption and a label of its own."""
    parts = ["% Written by brimful sweep. It needs \\usepackage{booktabs}."]
    labels: list[str] = []
    for dataset, table in by_dataset(summaries).items():
        labels.append(_label(dataset, labels))
        header = [_escape_latex(name) for name in _header(table)]
        blocks = [block for block in _cells(table, _escape_latex, r"\textbf{{{}}}".format) if block]
        caption = _escape_latex(f"{dataset}: {table[0]['about']}. {' '.join(conventions(table))}")
        lines = [
            "\\begin{table}[t]",
            "  \\centering",
            f"  \\caption{{{caption}}}",
            f"  \\label{{{labels[-1]}}}",
            f"  \\begin{{tabular}}{{{'l' * (len(header) - 5)}rrrrr}}",
            "    \\toprule",
            f"    {' & '.join(header)} \\\\",
            *[
                line
                for block in blocks
                for line in ("    \\midrule", *(f"    {' & '.join(cells)} \\\\" for cells in block))
            ],
            "    \\bottomrule",
            "  \\end{tabular}",
            "\\end{table}",
        ]
        parts.append("\n".join(lines))
    return "\n\n".join(parts) + "\n"


def by_dataset(summaries: Sequence[Summary]) -> dict[str, list[Summary]]:
    tables: dict[str, list[Summary]] = {}
    for summary in summaries:
        tables.setdefault(summary["dataset"], []).append(summary)
    return tables


def _header(table: Sequence[Summary]) -> list[str]:
    names = ["Encoder", "Method", *(["Settings"] if _has_settings(table) else [])]
    return [*names, *(name for _, name in HEADERS), "Gain", "Seeds"]


def _cells(table: Sequence[Summary], escape: Callable[[str], str], bold: Callable[[str], str]) -> tuple[list[list[str]], list[list[str]]]:  # fmt: skip
    """The cells of the methods, and those of the trivial baselines."""
    methods: list[list[str]] = []
    trivial: list[list[str]] = []
    for summary in table:
        text = summary["text"]
        names = [summary["encoder"], summary["method"], *([text["settings"]] if _has_settings(table) else [])]
        figures = [bold(escape(text[key])) if key in summary["best"] else escape(text[key]) for key, _ in HEADERS]
        cells = [*map(escape, names), *figures, escape(text["gain"]), escape(text["seeds"])]
        (trivial if summary["kind"] == TRIVIAL else methods).append(cells)
    return methods, trivial


def _has_settings(table: Sequence[Summary]) -> bool:
    return any(summary["settings"] for summary in table)


def _label(dataset: str, taken: Collection[str]) -> str:
    """A label of plain letters. Names in other scripts may become equal that way, so these are numbered."""
    label = f"tab:sweep-{re.sub(r'[^A-Za-z0-9-]+', '-', dataset)}"
    numbered = (f"{label}-{number}" for number in count(2))
    return next(candidate for candidate in chain([label], numbered) if candidate not in taken)


def _escape_markdown(text: str) -> str:
    return text.replace("|", "\\|").replace("<", "&lt;")


def _escape_latex(text: str) -> str:
    return "".join(_LATEX.get(character, character) for character in text)
