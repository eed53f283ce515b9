"""The summaries of a sweep as Markdown and as LaTeX (booktabs): a table a dataset, trivial baselines below a rule.

The caption names the conventions, since a table without them cannot be compared with anybody else's: FPR95 exists in two.
"""

import re
from collections.abc import Callable, Collection, Sequence
from itertools import chain, count
from typing import Any

from brimful.tasks.heads.results.summary import TRIVIAL, conventions

Summary = dict[str, Any]
SHOWN = ("auroc", "aupr", "fpr95")

_LATEX = {
    "&": r"\&", "%": r"\%", "$": r"\$", "#": r"\#", "_": r"\_", "{": r"\{", "}": r"\}", "~": r"\textasciitilde{}",
    "^": r"\textasciicircum{}", "\\": r"\textbackslash{}", "±": r"$\pm$", "−": "$-$", "–": "--", "✓": r"$\star$",
    "<": "$<$", ">": "$>$",
}  # fmt: skip


def markdown(summaries: Sequence[Summary]) -> str:
    """For a README: conventions below the tables."""
    parts = ["# Results of the sweep\n"]
    for dataset, table in by_dataset(summaries).items():
        lines = _lines(table, _plain, "**{}**".format)
        heads, aligned = _heads(table, " ↑", " ↓"), ["---"] * _names(table) + ["---:"] * 5
        body = [*lines[0], ["*trivial baselines*", *[""] * (len(heads) - 1)], *lines[1]] if lines[1] else lines[0]
        rows = "\n".join(f"| {' | '.join(cells)} |" for cells in [heads, aligned, *body])
        parts.append(f"## {_plain(dataset)}\n\n{_plain(table[0]['about'])}.\n\n{rows}\n")
    return "\n".join([*parts, *(f"- {one}" for one in conventions(summaries))] if summaries else parts) + "\n"


def latex(summaries: Sequence[Summary]) -> str:
    """For a paper: `\\input` it; each table has a caption and a label of its own."""
    parts = ["% Written by brimful sweep. It needs \\usepackage{booktabs}."]
    labels: list[str] = []
    for dataset, table in by_dataset(summaries).items():
        labels.append(_label(dataset, labels))
        lines = _lines(table, _escape, r"\textbf{{{}}}".format)
        heads = _heads(table, r" $\uparrow$", r" $\downarrow$")
        blocks = [[f"{' & '.join(cells)} \\\\" for cells in block] for block in lines if block]
        caption = _escape(f"{dataset}: {table[0]['about']}. {' '.join(conventions(table))}")
        parts.append(
            "\n".join(
                [
                    "\\begin{table}[t]",
                    "  \\centering",
                    f"  \\caption{{{caption}}}",
                    f"  \\label{{{labels[-1]}}}",
                    f"  \\begin{{tabular}}{{{'l' * _names(table)}rrrrr}}",
                    "    \\toprule",
                    f"    {' & '.join(heads)} \\\\",
                    *[f"    {line}" for block in blocks for line in ("\\midrule", *block)],
                    "    \\bottomrule",
                    "  \\end{tabular}",
                    "\\end{table}",
                ]
            )
        )
    return "\n\n".join(parts) + "\n"


def _label(dataset: str, taken: Collection[str]) -> str:
    """Of plain letters, so that names in others may come out alike: these are numbered."""
    label = f"tab:sweep-{re.sub(r'[^A-Za-z0-9-]+', '-', dataset)}"
    numbered = (f"{label}-{number}" for number in count(2))
    return next(one for one in chain([label], numbered) if one not in taken)


def by_dataset(summaries: Sequence[Summary]) -> dict[str, list[Summary]]:
    tables: dict[str, list[Summary]] = {}
    for one in summaries:
        tables.setdefault(one["dataset"], []).append(one)
    return tables


def _lines(table: Sequence[Summary], plain: Callable[[str], str], bold: Callable[[str], str]) -> tuple[list[list[str]], list[list[str]]]:  # fmt: skip
    """The cells of the methods, and those of the trivial baselines."""

    def cells(one: Summary) -> list[str]:
        names = [one["encoder"], one["method"], *([one["text"]["settings"]] if _has_settings(table) else [])]
        figures = [bold(plain(one["text"][key])) if key in one["best"] else plain(one["text"][key]) for key in SHOWN]
        return [*map(plain, names), *figures, plain(one["text"]["gain"]), plain(one["text"]["seeds"])]

    trivial = [one["kind"] == TRIVIAL for one in table]
    return (
        [cells(one) for one, is_trivial in zip(table, trivial, strict=True) if not is_trivial],
        [cells(one) for one, is_trivial in zip(table, trivial, strict=True) if is_trivial],
    )


def _heads(table: Sequence[Summary], up: str, down: str) -> list[str]:
    names = ["Encoder", "Method", *(["Settings"] if _has_settings(table) else [])]
    return [*names, f"AUROC{up}", f"AUPR{up}", f"FPR95{down}", "Beyond trivial", "Seeds"]


def _names(table: Sequence[Summary]) -> int:
    return 3 if _has_settings(table) else 2


def _has_settings(table: Sequence[Summary]) -> bool:
    return any(one["settings"] for one in table)


def _plain(text: str) -> str:
    """A name that is neither a column's end nor HTML to a reader of Markdown."""
    return text.replace("|", "\\|").replace("<", "&lt;")


def _escape(text: str) -> str:
    return "".join(_LATEX.get(one, one) for one in text)
