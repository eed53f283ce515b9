"""One page that needs nothing else: tables, curves, histograms and ROC of every method, escaped, and below 2 MB."""

import re
import xml.etree.ElementTree as ET
from html.parser import HTMLParser

import numpy as np
import pytest

from brimful.charts import Frame, area, axes, line, thinned, ticks, widened
from brimful.molecules.metrics import auroc, roc
from brimful.molecules.page import curve_chart, histogram_chart, roc_chart, sweep_page
from brimful.molecules.results import conventions, summarise

from .support import result_row, result_rows

VOID = {"meta", "br"}
ROWS = [*result_rows("dpo", (0.78, 0.79, 0.80)), *result_rows("knn", (0.6, 0.6, 0.6), deterministic=True), result_row("rings", auroc=0.683)]  # fmt: skip


def run(seed=0, epochs=30, molecules=200):
    rng = np.random.default_rng(seed)
    curve = 0.8 - 0.3 * np.exp(-np.arange(epochs) / 10) + rng.normal(0, 0.01, epochs)
    return {"id_scores": rng.normal(0, 1, molecules), "ood_scores": rng.normal(1, 1, molecules), "curve": curve}


def page(rows=ROWS, read_run=lambda name: run(), title="A sweep", **words):
    summaries = summarise(rows)
    return sweep_page(rows, summaries, read_run, title=title, notes=conventions(summaries), **words)


class Tags(HTMLParser):
    """Every tag, and whether each is closed where it should be."""

    def __init__(self, text):
        super().__init__()
        self.open, self.seen = [], []
        self.feed(text)
        assert self.open == []

    def handle_starttag(self, tag, attrs):
        self.seen.append((tag, dict(attrs)))
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag, attrs):
        self.seen.append((tag, dict(attrs)))

    def handle_endtag(self, tag):
        assert self.open.pop() == tag


def pictures(text):
    return [ET.fromstring(one) for one in re.findall(r"<svg viewBox.*?</svg>", text)]


def classes(drawing, kind):
    return [one for one in drawing.iter() if one.get("class") == kind]


def test_the_page_is_well_formed_and_needs_no_network():
    text = page()
    tags = Tags(text).seen
    assert not {"script", "link", "img", "iframe"} & {tag for tag, _ in tags}
    assert not [attrs for _, attrs in tags if "src" in attrs or not attrs.get("href", "#").startswith("#")]
    assert "http" not in text and "url(" not in text and "@import" not in text
    assert "prefers-color-scheme:dark" in text and "max-width:760px" in text and 'name="viewport"' in text


def test_each_method_has_a_curve_a_histogram_and_a_roc():
    labels = [one.get("aria-label") for one in pictures(page(read_run=lambda name: run() if "dpo" in name else {**run(), "curve": np.empty(0)}))]  # fmt: skip
    assert [label for label in labels if label.startswith("dpo")] == ["dpo: validation AUROC by epoch", "dpo: histogram of the scores of ID and OOD test molecules", "dpo: ROC curve"]  # fmt: skip
    assert len([label for label in labels if label.startswith("rings")]) == 2


def test_deterministic_methods_are_drawn_once():
    drawn = {one.get("aria-label"): one for one in pictures(page())}
    assert [len(classes(drawn[f"{method}: ROC curve"], "thin")) for method in ("dpo", "knn")] == [3, 1]


def test_the_table_has_every_text_of_its_summary():
    text = re.sub(r"<[^>]*>", "", page()).replace("&nbsp;", " ")
    for part in (".790 ± .010", "+.107 (+.097 to +.117)", ".683 ± –", "1,000 ID and 900 OOD test molecules", "A sweep"):
        assert part in text


def test_the_strip_shows_each_seed_of_methods_that_vary():
    strips = re.findall(r'<td class="strip">(.*?)</td>', page())
    assert [strip.count('class="seed"') for strip in strips] == [3, 0, 0]
    assert all(strip.count('class="bar"') == 1 for strip in strips)


def test_all_text_is_escaped():
    bad = '<script>"&'
    text = page([result_row("dpo", dataset=bad, encoder=bad, settings=bad, split=bad)], title=bad, remarks={bad: [bad]})
    Tags(text)
    assert "<script" not in text and "&lt;script&gt;" in text


def test_remarks_are_shown_with_their_dataset():
    assert "7 could not be read" in page(remarks={"hiv-scaffold": ["7 could not be read"], "other": ["not here"]})
    assert "not here" not in page(remarks={"other": ["not here"]})


def test_missing_arrays_are_counted():
    text = page(read_run=lambda name: None if name == "dpo-1" else run())
    assert "the arrays of 1 run are missing" in text and len(classes(pictures(text)[0], "thin")) == 2


def test_the_table_does_not_need_the_arrays():
    text = page(read_run=lambda name: None)
    Tags(text)
    assert not pictures(text) and ".790" in text


def test_five_hundred_runs_of_five_hundred_epochs_stay_below_two_megabytes():
    rows = [one for place in range(50) for one in result_rows("dpo", [0.7] * 10, settings=f"lr={place}")]
    runs = {f"dpo-{seed}": run(seed, epochs=500, molecules=300) for seed in range(10)}
    text = page(rows, runs.get)
    assert len(text.encode()) < 2e6 and len(classes(pictures(text)[0], "thin")) == 10


def test_without_points_only_the_mean_is_drawn():
    drawn = curve_chart([run(0), run(1)], 0, "dpo")
    assert not classes(ET.fromstring(drawn), "thin") and len(classes(ET.fromstring(drawn), "mean")) == 1


def test_the_mean_ends_where_fewer_than_half_are_left():
    drawn = ET.fromstring(curve_chart([run(0, 10), run(1, 20), run(2, 30), run(3, 31)], 200, "x"))
    (mean,) = classes(drawn, "mean")
    moves = re.findall(r"-?\d*\.?\d+", mean.get("d"))
    assert len(moves) == 2 * 30
    assert [len(classes(drawn, kind)) for kind in ("thin", "peak")] == [4, 4]


def test_the_area_below_a_roc_is_the_auroc():
    rng = np.random.default_rng(0)
    inside, outside = rng.integers(0, 6, 300).astype(float), rng.integers(1, 8, 200).astype(float)
    for positive in ("ood", "id"):
        x, y = roc(inside, outside, positive)
        assert (x[0], y[0], x[-1], y[-1]) == (0, 0, 1, 1)
        assert np.sum(np.diff(x) * (y[1:] + y[:-1]) / 2) == pytest.approx(auroc(inside, outside))


def test_the_other_side_is_the_same_curve_seen_from_the_other_corner():
    inside, outside = np.array([0.0, 1, 1, 5]), np.array([1.0, 2, 9])
    (x, y), (other_x, other_y) = roc(inside, outside, "ood"), roc(inside, outside, "id")
    assert (0.0, 1 / 3) in zip(x, y, strict=True) and (0.0, 1 / 4) in zip(other_x, other_y, strict=True)
    assert {(round(1 - b, 9), round(1 - a, 9)) for a, b in zip(x, y, strict=True)} == {(round(a, 9), round(b, 9)) for a, b in zip(other_x, other_y, strict=True)}  # fmt: skip


def test_the_axes_of_a_roc_name_the_positive_side():
    texts = [one.text for one in ET.fromstring(roc_chart([run()], "id", 0.5, 100, "x")).iter() if one.text]
    assert "OOD molecules called ID" in texts and "ID molecules called ID" in texts and "FPR95" in texts


@pytest.mark.parametrize("scores", [np.array([]), np.full(5, np.nan), np.full(5, np.inf)])
def test_scores_that_cannot_be_drawn_have_no_histogram(scores):
    assert histogram_chart([{"id_scores": scores, "ood_scores": np.ones(3)}], "x", "score") == ""


def test_an_outlier_does_not_flatten_a_histogram():
    near = np.random.default_rng(0).normal(0, 1, 1000)
    drawn = histogram_chart([{"id_scores": np.append(near, 1e6), "ood_scores": near}], "x", "score")
    assert "1000000" not in drawn and "1e+06" not in drawn


def test_equal_scores_and_counts_can_be_drawn():
    for scores in (np.zeros(5), np.arange(5.0), np.full(5, 0.3)):
        drawn = ET.fromstring(histogram_chart([{"id_scores": scores, "ood_scores": scores}], "x", "score"))
        assert "nan" not in ET.tostring(drawn, encoding="unicode") and list(drawn.iter())


def test_a_line_breaks_where_a_value_is_missing():
    frame = Frame(x=(0, 4), y=(0, 1))
    assert line(frame, np.arange(5), np.array([0, 1, np.nan, 1, 0]), "thin").count("M") == 2
    assert line(frame, np.arange(2), np.full(2, np.nan), "thin") == ""


def test_moves_add_up_to_the_end_of_the_line():
    frame = Frame(x=(0, 1), y=(0, 1))
    x = np.linspace(0, 1, 150)
    numbers = [float(one) for one in re.findall(r"-?\d*\.?\d+", line(frame, x, np.sin(9 * x) ** 2, "thin"))]
    ends = np.array(numbers).reshape(-1, 2).sum(0)
    assert ends == pytest.approx([float(frame.across(1)), float(frame.down(np.sin(9) ** 2))], abs=0.06)


def test_bars_start_and_end_at_zero():
    drawn = area(Frame(x=(0, 2), y=(0, 1)), np.array([0.0, 1.0, 2.0]), np.array([0.5, 1.0]), "id")
    numbers = np.array([float(one) for one in re.findall(r"-?\d*\.?\d+", drawn)]).reshape(-1, 2)
    assert numbers[:, 1].sum() == pytest.approx(numbers[0, 1])


@pytest.mark.parametrize(
    ("span", "names"),
    [
        ((0, 1), ["0", "0.2", "0.4", "0.6", "0.8", "1.0"]),
        ((1, 83), ["20", "40", "60", "80"]),
        ((-1.2, 1.1), ["−1.0", "−0.5", "0", "0.5", "1.0"]),
        ((0.501, 0.589), ["0.52", "0.54", "0.56", "0.58"]),
        ((0, 0.12), ["0", "0.025", "0.050", "0.075", "0.100"]),
        ((3, 3), ["3"]),
    ],
)
def test_ticks_are_round_and_distinct(span, names):
    assert [name for _, name in ticks(*span, most=5)] == names


def test_thinning_keeps_both_ends():
    kept = thinned(np.empty(1000), 200)
    assert len(kept) == 200 and (kept[0], kept[-1]) == (0, 999) and len(thinned(np.empty(7), 200)) == 7


@pytest.mark.parametrize("values", [[], [0.0], [0.7, 0.7], [np.nan]])
def test_a_span_is_never_empty(values):
    low, high = widened(values)
    assert low < high


def test_close_scores_fill_their_axis():
    assert widened([0.4986, 0.4999], by=0.0) == (0.4986, 0.4999)
    low, high = widened([0.5, np.nextafter(0.5, 1)], by=0.0)
    assert high - low > 0.01  # rounding is no spread
    assert axes(Frame(x=(0.499999, 0.5), y=(0, 1)), "", "").count(">0.49999") <= 4  # long numbers need room
