"""The terminal shows the summaries' own texts, within 100 columns, with the trivial baselines below their own line."""

from io import StringIO

import pytest
from rich.console import Console

from brimful.molecules.progress import sweep_table
from brimful.molecules.results import conventions, summarise
from tests.molecules.fake_rows import row, seeds

ROWS = [
    *seeds("mc-dropout-oe", (0.78, 0.79, 0.80), settings="lr=0.0001 weight=0.5"),
    *seeds("dpo", (0.58, 0.59, 0.60)),
    *seeds("bce", (0.682, 0.683, 0.6845)),
    row("rings", auroc=0.683),
    row("heavy-atoms", auroc=1.0, dataset="size"),
]


def shown(rows, width=100, styled=False):
    console = Console(file=StringIO(), width=width, force_terminal=styled, color_system="standard" if styled else None)
    summaries = summarise(rows)
    console.print(sweep_table(summaries, conventions(summaries)))
    return console.file.getvalue()


def test_every_figure_is_whole_within_100_columns():
    text = shown(ROWS)
    assert max(map(len, text.splitlines())) <= 100
    for part in (".790 ± .010", "+.107 (+.097 to +.117)", "1.000 ± –", "1,000 ID and 900 OOD", "mc-dropout-oe"):
        assert part in text
    assert "…" not in text


def test_trivial_baselines_stand_below_their_own_line():
    lines = shown(ROWS).splitlines()
    places = [next(n for n, line in enumerate(lines) if f" {word} " in line) for word in ("bce", "baselines", "rings")]  # fmt: skip
    assert places == sorted(places) and "best trivial baseline rings" in lines[0]


def test_a_narrow_table_says_that_it_has_no_intervals():
    told = "Below 96 columns the intervals and most deviations are left out here; the report has them."
    narrow = shown(ROWS, width=80)
    assert told in " ".join(narrow.split()) and "(+.097" not in narrow and told not in shown(ROWS)
    assert "           trivial baselines " in narrow  # in one cell


def test_what_the_figures_mean_is_told():
    assert "FPR95 is the share of ID molecules wrongly called OOD" in " ".join(shown(ROWS).split())


def test_points_stand_below_each_other():
    lines = shown([row("dpo"), row("heavy-atoms", auroc=1.0)]).splitlines()
    first, last = (next(line for line in lines if f" {word} " in line and "±" in line) for word in ("dpo", "heavy-atoms"))  # fmt: skip
    assert first.index(".700") == last.index(".000")


@pytest.mark.parametrize(("method", "colour"), [("mc-dropout-oe", "\x1b[32m"), ("dpo", "\x1b[31m"), ("bce", "")])
def test_colour_says_on_which_side_of_the_trivial_a_method_lies(method, colour):
    line = next(line for line in shown(ROWS, styled=True).splitlines() if method in line)
    coloured = [code for code in ("\x1b[32m", "\x1b[31m") if code in line]
    assert coloured == [colour] * bool(colour)


def test_names_are_not_markup():
    assert "[red]x" in shown([row("dpo", encoder="[red]x")])
