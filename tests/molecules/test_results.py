"""Rows on disk, summaries over seeds, and the tables made of them."""

import math
import re

import numpy as np
import pyarrow.parquet as pq
import pytest

from brimful.errors import BadRun, InternalError
from brimful.molecules.results import (
    COLUMNS,
    SCHEMA,
    conventions,
    latex,
    markdown,
    read_run,
    show_figure,
    summarise,
    write_results,
    write_run,
)

from .support import result_row, result_rows

ROWS = [*result_rows("dpo", (0.78, 0.79, 0.80)), *result_rows("bce", (0.7801, 0.7899, 0.80)), result_row("rings", auroc=0.683), result_row("heavy-atoms", auroc=0.6)]  # fmt: skip


def read_results(folder):
    return pq.read_table(folder / "results.parquet").to_pylist()


def by_method(rows, **same):
    return {one["method"]: one for one in summarise(rows) if all(one[key] == value for key, value in same.items())}


def test_rows_come_back_as_they_were(tmp_path):
    write_results(tmp_path, ROWS)
    assert read_results(tmp_path) == ROWS
    assert pq.read_schema(tmp_path / "results.parquet").names == list(COLUMNS)
    assert {"results.parquet", "results.md", "results.tex"} == {one.name for one in tmp_path.iterdir()}


def test_the_schema_is_the_same_whatever_is_unknown(tmp_path):
    write_results(tmp_path, [result_row("rings")])
    assert pq.read_schema(tmp_path / "results.parquet").remove_metadata() == SCHEMA
    assert read_results(tmp_path)[0]["best_epoch"] is None


def test_a_figure_without_a_column_is_an_internal_error(tmp_path):
    with pytest.raises(InternalError, match="flops"):
        write_results(tmp_path, [{**result_row("dpo"), "flops": 1}])


def test_a_sweep_without_a_finished_run_has_empty_tables(tmp_path):
    write_results(tmp_path, [])
    assert conventions(summarise([])) == []
    assert read_results(tmp_path) == [] and "table" not in (tmp_path / "results.md").read_text()


def test_a_failed_write_keeps_the_former_files(tmp_path, monkeypatch):
    write_results(tmp_path, ROWS[:1])

    def full(*_, **__):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("brimful.molecules.results.write_atomic", full)
    with pytest.raises(BadRun, match="results.parquet cannot be written: No space left on device"):
        write_results(tmp_path, ROWS)
    assert read_results(tmp_path) == ROWS[:1] and len(list(tmp_path.iterdir())) == 3


def test_the_arrays_of_a_run_come_back_unless_damaged(tmp_path):
    arrays = {"id_scores": np.arange(3.0), "ood_scores": np.ones(2), "curve": np.array([0.5]), "loss": np.empty(0)}
    write_run(tmp_path, "a", **arrays)
    found = read_run(tmp_path, "a")
    assert all(np.array_equal(found[key], arrays[key]) for key in arrays)
    path = tmp_path / "runs" / "a.npz"
    path.write_bytes(path.read_bytes()[:200])
    assert read_run(tmp_path, "a") is None and read_run(tmp_path, "b") is None


def test_seeds_are_summarised(tmp_path):
    dpo = by_method(ROWS)["dpo"]
    assert dpo["auroc"] == pytest.approx(0.79) and dpo["auroc_sd"] == pytest.approx(0.01)
    assert 0.78 <= dpo["auroc_low"] < 0.79 < dpo["auroc_high"] <= 0.80
    assert (dpo["seeds"], dpo["runs"], dpo["seconds"]) == (3, 3, 4.5)
    assert dpo["text"]["auroc"] == ".790 ± .010" and dpo["text"]["seeds"] == "3"


def test_a_deterministic_method_has_no_deviation():
    rows = [*result_rows("knn", (0.6, 0.6, 0.6), deterministic=True, kind="distance"), result_row("rings", auroc=0.5)]
    knn = by_method(rows)["knn"]
    assert knn["auroc_sd"] is None and knn["auroc_low"] is None
    assert knn["text"]["auroc"] == ".600 ± –" and knn["text"]["seeds"] == "–" and knn["text"]["gain"] == "+.100"


def test_the_gain_is_over_the_best_trivial_baseline_and_paired():
    found = by_method(ROWS)
    assert found["dpo"]["trivial"] == "rings" and found["dpo"]["gain"] == pytest.approx(0.79 - 0.683)
    assert found["dpo"]["text"]["gain"] == "+.107 (+.097 to +.117)"
    assert found["rings"]["gain"] is None and found["heavy-atoms"]["text"]["gain"] == "–"
    rows = [*result_rows("dpo", (0.5, 0.6, 0.7)), *result_rows("rings", (0.41, 0.5, 0.6), deterministic=False)]
    paired = by_method(rows)["dpo"]
    assert paired["gain_high"] - paired["gain_low"] < 0.02 < paired["auroc_sd"]


def test_each_dataset_has_its_own_trivial_baseline():
    rows = [
        result_row("dpo"),
        result_row("rings", auroc=0.6),
        result_row("dpo", dataset="b"),
        result_row("heavy-atoms", auroc=1.0, dataset="b"),
    ]
    gains = {one["dataset"]: one["gain"] for one in summarise(rows) if one["method"] == "dpo"}
    assert gains == {"hiv-scaffold": pytest.approx(0.1), "b": pytest.approx(-0.3)}


def test_without_trivial_baselines_there_is_no_gain():
    (dpo,) = summarise([result_row("dpo")])
    assert dpo["gain"] is None and dpo["trivial"] is None and dpo["text"]["gain"] == "–"


def test_a_run_that_diverged_is_left_out_and_counted():
    dpo = by_method(result_rows("dpo", (0.7, math.nan, None, 0.8)))["dpo"]
    assert dpo["auroc"] == pytest.approx(0.75) and dpo["text"]["seeds"] == "2 of 4"
    lost = by_method(result_rows("dpo", (None, None)))["dpo"]
    assert lost["auroc"] is None and lost["text"]["auroc"] == "– ± –" and lost["best"] == []


def test_the_best_is_decided_by_the_digits_shown():
    found = by_method(ROWS)
    assert "auroc" in found["dpo"]["best"] and "auroc" in found["bce"]["best"]
    assert "fpr95" in found["dpo"]["best"] and found["heavy-atoms"]["best"] == []
    assert "auroc" in by_method([result_row("dpo"), result_row("heavy-atoms", auroc=1.0)])["heavy-atoms"]["best"]


def test_validation_chooses_among_settings():
    rows = [result_row("dpo", settings="lr=1", auroc=0.9, valid_auroc=0.5), result_row("dpo", settings="lr=2", auroc=0.6, valid_auroc=0.8), result_row("bce")]  # fmt: skip
    chosen = {(one["method"], one["settings"]): one["chosen"] for one in summarise(rows)}
    assert chosen == {("dpo", "lr=1"): False, ("dpo", "lr=2"): True, ("bce", ""): None}
    assert "lr=2 ✓" in markdown(summarise(rows)) and "best validation AUROC" in markdown(summarise(rows))


def test_settings_that_diverged_are_not_chosen():
    rows = [result_row("dpo", settings="lr=9", auroc=None, valid_auroc=None), result_row("dpo", settings="lr=1"), result_row("dpo", settings="lr=2")]  # fmt: skip
    assert [one["chosen"] for one in summarise(rows)] == [False, True, False]


def test_the_table_says_why_settings_have_no_mark():
    rows = [result_row("msp", settings=f"lr={lr}", valid_auroc=None) for lr in (1, 2)]
    assert "get no ✓" in conventions(summarise(rows))[-1]
    assert not any("✓" in one for one in conventions(summarise([result_row("msp", valid_auroc=None)])))


def test_trivial_baselines_come_last_and_datasets_keep_their_order():
    rows = [
        result_row("rings", dataset="b"),
        result_row("dpo", dataset="b"),
        result_row("rings", dataset="a"),
        result_row("dpo", dataset="a"),
    ]
    assert [(one["dataset"], one["method"]) for one in summarise(rows)] == [("b", "dpo"), ("b", "rings"), ("a", "dpo"), ("a", "rings")]  # fmt: skip


@pytest.mark.parametrize(("value", "text"), [(0.789, ".789"), (1.0, "1.000"), (0.9996, "1.000"), (0.0, ".000"), (0.10004, ".100"), (None, "–")])  # fmt: skip
def test_figures_have_three_digits(value, text):
    assert show_figure(value) == text


def test_a_table_says_what_it_is_about():
    assert summarise(ROWS)[0]["about"] == "scaffold split, 1,000 ID and 900 OOD test molecules, best trivial baseline rings"  # fmt: skip
    rows = [result_row("dpo"), result_row("dpo", encoder="unimol", n_id_test=990, n_ood_test=None)]
    assert summarise(rows)[0]["about"] == "scaffold split, 990–1,000 ID and 900 OOD test molecules"


def test_the_positive_side_is_named():
    ood, inside = (
        conventions(summarise([result_row("dpo")])),
        conventions(summarise([result_row("dpo", positive="id")])),
    )
    assert "OOD molecules are the positive side" in ood[0] and "share of ID molecules wrongly called OOD" in ood[0]
    assert "95 % of the OOD ones" in ood[0]
    assert inside[0].startswith("ID molecules") and "share of OOD molecules wrongly called ID" in inside[0]


def test_markdown_has_a_group_of_trivial_baselines_and_bold_for_the_best():
    lines = markdown(summarise(ROWS)).splitlines()
    group = next(place for place, line in enumerate(lines) if "*trivial baselines*" in line)
    assert "| dpo | **.790 ± .010** |" in lines[group - 2] and "| rings | .683 ± – |" in lines[group + 1]
    table = [line for line in lines if line.startswith("|")]
    assert len({line.count("|") for line in table}) == 1 and "Settings" not in table[0]


def test_latex_is_an_escaped_booktabs_table():
    text = latex(summarise([*ROWS, result_row("dpo", settings="a_b=50%", encoder="x&y")]))
    table = text[text.index("\\begin{tabular}") :]
    assert table.count("\\midrule") == 2 and table.index("bce") < table.rindex("\\midrule") < table.index("rings")
    assert "\\textbf{.790 $\\pm$ .010}" in table and "x\\&y" in table and "a\\_b=50\\%" in table
    assert "FPR95 is the share of ID molecules" in text[: text.index("\\begin{tabular}")]
    rows = [line for line in table.splitlines() if line.endswith("\\\\")]
    assert {line.replace("\\&", "").count("&") for line in rows} == {7}
    assert not set("±–−✓↑↓") & set(text)


def test_latex_labels_are_unique_whatever_the_names():
    text = latex(summarise([result_row("dpo", dataset=name) for name in ("毒性", "活性", "--2", "tox 21")]))
    assert re.findall(r"\\label\{(.*)\}", text) == [
        "tab:sweep--",
        "tab:sweep---2",
        "tab:sweep---2-2",
        "tab:sweep-tox-21",
    ]


def test_names_cannot_break_a_markdown_table():
    text = markdown(summarise([result_row("dpo", dataset="<b>", encoder="a|b")]))
    assert "a\\|b" in text and "<b>" not in text
