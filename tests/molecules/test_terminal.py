"""The terminal shows the texts of the summaries within 100 columns, trivial baselines last."""

from io import StringIO

import pytest
from rich.console import Console

from brimful.molecules.results import conventions, summarise
from brimful.molecules.terminal import NARROW, SweepTable

from .support import result_row, result_rows

ROWS = [
    *result_rows("mc-dropout-oe", (0.78, 0.79, 0.80), settings="lr=0.0001 weight=0.5"),
    *result_rows("dpo", (0.58, 0.59, 0.60)),
    *result_rows("bce", (0.682, 0.683, 0.6845)),
    result_row("rings", auroc=0.683),
    result_row("heavy-atoms", auroc=1.0, dataset="size"),
]


def shown(rows, width=100, styled=False):
    console = Console(file=StringIO(), width=width, force_terminal=styled, color_system="standard" if styled else None)
    summaries = summarise(rows)
    console.print(SweepTable(summaries, conventions(summaries)))
    return console.file.getvalue()


def test_every_figure_is_shown_within_100_columns():
    text = shown(ROWS)
    assert max(map(len, text.splitlines())) <= 100
    for part in (".790 ± .010", "+.107 (+.097 to +.117)", "1.000 ± –", "1,000 ID and 900 OOD", "mc-dropout-oe"):
        assert part in text
    assert "…" not in text


def test_trivial_baselines_come_last():
    lines = shown(ROWS).splitlines()
    places = [next(n for n, line in enumerate(lines) if f" {word} " in line) for word in ("bce", "baselines", "rings")]  # fmt: skip
    assert places == sorted(places) and "best trivial baseline rings" in lines[0]


def test_a_narrow_table_says_that_it_has_no_intervals():
    narrow = shown(ROWS, width=80)
    assert NARROW in " ".join(narrow.split()) and "(+.097" not in narrow and NARROW not in shown(ROWS)
    assert "           trivial baselines " in narrow  # in one cell


def test_no_figure_is_truncated_at_any_width():
    rows = [result_row("hinge", encoder="descriptors", settings="margin=0.5", seed=seed) for seed in range(2)]
    for width in (80, 95, 100, 105, 110):
        assert "…" not in shown(rows, width=width) and " seeds" in shown(rows, width=width)


def test_the_conventions_are_shown():
    assert "FPR95 is the share of ID molecules wrongly called OOD" in " ".join(shown(ROWS).split())


def test_decimal_points_are_aligned():
    lines = shown([result_row("dpo"), result_row("heavy-atoms", auroc=1.0)]).splitlines()
    first, last = (next(line for line in lines if f" {word} " in line and "±" in line) for word in ("dpo", "heavy-atoms"))  # fmt: skip
    assert first.index(".700") == last.index(".000")


@pytest.mark.parametrize(("method", "colour"), [("mc-dropout-oe", "\x1b[32m"), ("dpo", "\x1b[31m"), ("bce", "")])
def test_gains_are_green_and_losses_red(method, colour):
    line = next(line for line in shown(ROWS, styled=True).splitlines() if method in line)
    coloured = [code for code in ("\x1b[32m", "\x1b[31m") if code in line]
    assert coloured == [colour] * bool(colour)


def test_names_are_not_markup():
    assert "[red]x" in shown([result_row("dpo", encoder="[red]x")])
