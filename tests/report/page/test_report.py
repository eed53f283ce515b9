"""The page: complete in itself, honest about what is missing, and never fooled by what a run contains."""

import json
import random
import re
import shutil
from html.parser import HTMLParser

import pytest

from brimful.cli.output import with_flags
from brimful.memory.model import MemoryModel
from brimful.report.page import summary
from brimful.report.page.parts import findings_part
from brimful.report.page.planning_charts import probe_fits
from brimful.report.page.plot import LABEL_PX
from brimful.report.page.report import Report, run_names
from brimful.report.page.report_figures import ReportFigures
from brimful.report.page.run_charts import memory_chart
from brimful.report.run_record import RunRecord
from brimful.report.why.diagnosis import Diagnosis, Fix
from brimful.units import GiB
from tests.report.fake_runs import write_run

from .conftest import FINDINGS_OF_WHY
from .rich_runs import memory_model, rich_run

VOID = {"meta", "link", "input", "br"}
NASTY = '"><script>alert(1)</script><img src=x onerror=alert(2)> & \u2028 </script>'


def report(*folders) -> Report:
    return Report([RunRecord(folder) for folder in folders])


class Page(HTMLParser):
    """Every tag with its attributes, and the text that a reader sees. Fails where a tag is not closed in order."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.text = ""
        self.feed(text)
        assert self.open == []

    def handle_starttag(self, tag, attrs):
        self.tags.append((tag, dict(attrs)))
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag, attrs):
        self.tags.append((tag, dict(attrs)))

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        if not {"script", "style"} & set(self.open):
            self.text += f"{data} "

    def ids(self, prefix: str) -> set[str]:
        return {
            attrs["id"].removeprefix(prefix) for _, attrs in self.tags if (attrs.get("id") or "").startswith(prefix)
        }

    def sections(self) -> set[str]:
        return {attrs["href"][1:] for tag, attrs in self.tags if tag == "a"}


@pytest.fixture(scope="module")
def page(tmp_path_factory) -> Page:
    return Page(report(rich_run(tmp_path_factory.mktemp("run") / "first")).html())


def test_a_complete_run_has_every_chart(page):
    charts = {"memory", "model", "throughput", "loss", "rate", "norm", "speed", "split", "padding", "utilization", "temperature", "power", "host", "timeline"}  # fmt: skip
    assert page.ids("chart-") == charts


def test_a_complete_run_has_every_section(page):
    assert page.sections() == {"summary", "checklist", "memory", "learning", "speed", "machine", "events", "plan"}


def test_nothing_is_loaded_from_elsewhere(page):
    assert not {tag for tag, _ in page.tags} & {"img", "iframe", "object", "embed", "audio", "video"}
    for _, attrs in page.tags:
        for name in ("src", "href", "action", "srcset"):
            assert re.match(r"#|data:", attrs.get(name) or "#"), attrs


def test_the_page_forbids_requests(page):
    policy = next(attrs["content"] for tag, attrs in page.tags if attrs.get("http-equiv") == "Content-Security-Policy")
    assert policy.startswith("default-src 'none';") and "connect-src" not in policy and "sha256-" in policy


def test_a_usual_run_is_a_small_page(tmp_path):
    assert len(report(rich_run(tmp_path / "a", steps=4000)).html().encode()) < 1_000_000


def test_charts_have_a_description(page):
    labels = [attrs.get("aria-label") for tag, attrs in page.tags if tag == "svg" and attrs.get("role") == "img"]
    assert len(labels) > 10 and all(labels)


def test_every_id_is_there_once(page):
    ids = [attrs["id"] for _, attrs in page.tags if "id" in attrs]
    assert len(ids) == len(set(ids))


def test_a_choice_of_the_plan_stands_with_its_reason_and_source(page):
    assert re.search(r"micro batch\s+–\s+43\s+measured\s+fastest: 672 rows/s \(598 with 32 rows\)", page.text)


def test_out_of_memory_errors_are_in_the_table_of_events(page):
    assert "out of memory in the backward of 43 rows; micro-batches of at most 32 rows from here" in page.text


LOGGED = {
    "log": lambda step: {"rewards/chosen": 0.1 * step, "rewards/rejected": -0.1 * step, "accuracy": 0.9, "kl": 0.2}
}


def test_what_a_task_logs_has_charts_and_names_of_one_kind_share_one(tmp_path):
    folder = rich_run(tmp_path / "run", step_values=LOGGED)
    page = Page(report(folder).html())
    ids = [attributes.get("id") for tag, attributes in page.tags if tag == "figure"]
    assert [one for one in ids if one and one.startswith("chart-log")] == ["chart-log-1", "chart-log-2", "chart-log-3"]
    assert all(name in page.text for name in ("rewards", "chosen", "rejected", "accuracy", "kl"))


def test_several_runs_have_a_chart_for_each_name(tmp_path):
    folders = [rich_run(tmp_path / name, step_values=LOGGED) for name in "ab"]
    page = Page(report(*folders).html())
    assert sum(str(attributes.get("id")).startswith("chart-log") for _, attributes in page.tags) == 4
    assert "rewards/rejected" in page.text


def test_evaluations_stand_in_the_chart_of_their_score(tmp_path):
    more = [{"event": "eval", "step": 100, "loss": 2.0, "accuracy": 0.75, "seconds": 1.0}]
    html = report(write_run(tmp_path / "run", step_values=LOGGED, more=more)).html()
    chart = html.partition('id="chart-log-2"')[2].partition("</figure>")[0]
    assert ">accuracy<" in chart and "evaluation" in chart


def test_memory_has_its_limit_and_its_prediction(page):
    assert "limit 20 GiB" in page.text and "predicted 15.4 GiB" in page.text


def test_the_figures_of_a_chart_can_be_read_by_a_script(tmp_path):
    text = report(rich_run(tmp_path / "a")).html()
    blocks = re.findall(r'<script type="application/json" class="figures">(.*?)</script>', text)
    assert len(blocks) > 10
    for block in blocks:
        content = json.loads(block)
        for curve in content["s"]:
            assert len(curve["y"]) == len(content["x"][curve["x"]])


def test_the_highest_step_of_a_long_run_is_drawn(tmp_path):
    spike = {"peak_bytes": lambda step: (19 if step == 2222 else 15) * GiB}
    text = report(rich_run(tmp_path / "a", steps=3000, step_values=spike)).html()
    block = json.loads(re.search(r'id="chart-memory".*?class="figures">(.*?)</script>', text, re.DOTALL)[1])
    allocated = next(curve for curve in block["s"] if curve["n"] == "allocated")
    assert 19 * GiB in [round(value / GiB) * GiB for value in allocated["y"]]
    assert len(allocated["y"]) < 600


# ---- What a run contains is text


def test_html_in_a_run_is_shown_as_text(tmp_path):
    events = [
        {"event": "note", "step": 5, "sentence": NASTY, "level": "warning"},
        {"event": "plan", "step": 6, "changes": [{"name": NASTY, "old": NASTY, "new": NASTY}]},
        {"event": "eval", "step": 7, "loss": 2.0, NASTY: 3.0, "seconds": 1.0},
        {"event": "step", "step": 8, "loss": 2.0, "log": {NASTY: 3.0, f"{NASTY}/x": 1.0}},
    ]
    choice = {"name": NASTY, "requested": NASTY, "effective": NASTY, "reason": NASTY, "source": NASTY}
    plan = {"device_name": NASTY, "choices": [choice], "warnings": [NASTY], "not_tried": [NASTY], "task": NASTY}
    request = {"task": NASTY, "data": NASTY, "options": {"prompt": NASTY, NASTY: 1}}
    folder = rich_run(tmp_path / "<b>run & co</b>", plan_values=plan, request=request, more=events, end="failed")
    for shown in (report(folder), report(folder, rich_run(tmp_path / "other"))):
        page = Page(shown.html())
        tags = {tag for tag, _ in page.tags}
        assert not tags & {"img", "b>run"} and [tag for tag, _ in page.tags].count("script") == len(
            re.findall("<script", shown.html())
        )
        assert sum(tag == "script" and attrs.get("type") is None for tag, attrs in page.tags) == 1
        assert not any(name.startswith("on") for _, attrs in page.tags for name in attrs)
        assert "alert(1)" in page.text and "<b>run & co</b>" in page.text


def test_a_long_text_is_cut(tmp_path):
    text = report(rich_run(tmp_path / "a", request={"options": {"prompt": "x" * 100_000}})).html()
    assert "x" * 390 in text and "x" * 500 not in text


def test_markdown_does_not_take_text_for_markup(tmp_path):
    text = report(rich_run(tmp_path / "a", request={"task": "a|b <script> *c* `d`"})).markdown()
    assert "a\\|b \\<script\\> \\*c\\* \\`d\\`" in text


# ---- Runs that lack something


def test_a_run_that_has_only_been_requested_says_so(tmp_path):
    (tmp_path / "run.json").write_text('{"task": "mine.py:task", "data": "rows.jsonl"}')
    page = Page(report(tmp_path).html())
    assert "before its first step was trained" in page.text and "Curves: no step has been trained." in page.text
    assert page.ids("chart-") == set()


def test_an_empty_journal_is_no_error(tmp_path):
    (tmp_path / "events.jsonl").write_bytes(b"")
    assert "What is left out" in report(tmp_path).html()


def test_a_run_without_samples_leaves_their_charts_out_and_says_why(tmp_path):
    folder = rich_run(tmp_path / "a")
    lines = [line for line in (folder / "events.jsonl").read_text().splitlines() if '"sample"' not in line]
    (folder / "events.jsonl").write_text("\n".join(lines) + "\n")
    page = Page(report(folder).html())
    assert not page.ids("chart-") & {"utilization", "temperature", "power"}
    assert "the run has no samples" in page.text


def test_a_cpu_run_has_no_gpu_section(tmp_path):
    folder = rich_run(
        tmp_path / "a", plan_values={"device": "cpu", "device_name": "the CPU"}, step_values={"reserved_bytes": None}
    )
    lines = [json.loads(line) for line in (folder / "events.jsonl").read_text().splitlines()]
    lines = [{**line, "gpu": None} if line["event"] == "sample" else line for line in lines]
    (folder / "events.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    page = Page(report(folder).html())
    assert not page.ids("chart-") & {"utilization", "temperature", "power"} and "host" in page.ids("chart-")
    assert "it does not train on a GPU that reports them" in page.text


def test_a_run_of_an_older_version_is_shown_as_far_as_it_goes(tmp_path):
    folder = write_run(tmp_path / "a", steps=30)
    new = {"times", "padding", "reserved_bytes", "ranks", "host_bytes", "machine_bytes"}
    lines = [json.loads(line) for line in (folder / "events.jsonl").read_text().splitlines()]
    lines = [
        {name: value for name, value in line.items() if name not in new} for line in lines if line["event"] != "sample"
    ]
    (folder / "events.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    page = Page(report(folder).html())
    assert {"memory", "loss", "speed"} <= page.ids("chart-")
    assert "The time split: the steps do not have one." in page.text


def test_a_line_that_is_half_written_is_left_out(tmp_path):
    folder = rich_run(tmp_path / "a", end=None)
    with (folder / "events.jsonl").open("a") as file:
        file.write('{"event": "step", "time": "2026-01-31T09:')
    assert report(folder).figures[0].step == 300


def test_a_plan_that_cannot_be_read_is_named_as_missing(tmp_path):
    folder = rich_run(tmp_path / "a")
    (folder / "plan.json").write_text("{")
    lines = [line for line in (folder / "events.jsonl").read_text().splitlines() if '"plan"' not in line[:40]]
    (folder / "events.jsonl").write_text("\n".join(lines) + "\n")
    assert "its file cannot be read" in Page(report(folder).html()).text


def test_steps_whose_loss_is_nan_are_marked(tmp_path):
    loss = {"loss": lambda step: None if step > 200 else 3.0, "loss_is": lambda step: "nan" if step > 200 else None}
    shown = report(rich_run(tmp_path / "a", evals=[], step_values=loss))
    assert "Steps whose loss was not a number: 100." in Page(shown.html()).text
    assert 'class="mark bad"' in shown.html()
    json.loads(shown.json(), parse_constant=lambda name: pytest.fail(name))


def test_a_part_that_cannot_be_made_is_named_and_the_rest_is_shown(tmp_path, monkeypatch):
    monkeypatch.delenv("BRIMFUL_TRACEBACK", raising=False)
    monkeypatch.setattr("brimful.report.page.run_charts.loss_chart", lambda one: 1 / 0)
    shown = report(rich_run(tmp_path / "a"))
    page = Page(shown.html())
    assert "Learning: it cannot be shown (ZeroDivisionError" in page.text and "memory" in page.ids("chart-")


JUNK = (
    None,
    "x",
    -1,
    0,
    1e308,
    float("nan"),
    float("inf"),
    [],
    {},
    True,
    "<b>&</b>",
    [1, "a", None],
    {"a": 1},
    10**400,
)


def spoiled(value, rng: random.Random, share: float):
    if rng.random() < share:
        return rng.choice(JUNK)
    if isinstance(value, dict):
        return {name: spoiled(part, rng, share) for name, part in value.items() if rng.random() > share / 2}
    return [spoiled(part, rng, share) for part in value] if isinstance(value, list) else value


@pytest.mark.parametrize("seed", range(12))
@pytest.mark.filterwarnings("error::RuntimeWarning")
def test_whatever_a_folder_holds_there_is_a_report(tmp_path, seed):
    """Any value of any event and of the plan may be of another type, or missing."""
    rng = random.Random(seed)
    share = (0.005, 0.02, 0.1, 0.3)[seed % 4]
    folder = rich_run(tmp_path / "a", steps=30, ooms=[5], evals=[10, 20], checkpoints=[10])
    sound = shutil.copytree(folder, tmp_path / "sound")
    lines = []
    for line in map(json.loads, (folder / "events.jsonl").read_text().splitlines()):
        other = {name: spoiled(value, rng, share) for name, value in line.items() if name not in ("event", "format")}
        lines.append(json.dumps({"event": line["event"], **other}))
    (folder / "events.jsonl").write_text("\n".join(lines) + "\n")
    for name in ("plan.json", "run.json"):
        (folder / name).write_text(json.dumps(spoiled(json.loads((folder / name).read_text()), rng, share)))
    for shown in (report(folder), report(folder, sound)):
        Page(shown.html())
        assert shown.problems == [] and shown.markdown()
        json.loads(shown.json(), parse_constant=lambda name: pytest.fail(name))


# ---- The memory model


def test_the_table_of_probes_shows_what_the_model_says(tmp_path):
    content = memory_model()
    model = MemoryModel.from_json(content)
    fits = probe_fits({"memory_model": content, "shape": [228, 256]})
    assert len(fits) == 8 and fits[0].shape == (228, 256)
    for fit in fits:
        assert fit.model_bytes == pytest.approx(model.peak_bytes(fit.rows, fit.shape))


def test_a_memory_model_of_another_format_is_left_out(tmp_path):
    folder = rich_run(
        tmp_path / "a", plan_values={"memory_model": {"phases": {"forward": [{"powers": "x"}]}, "probes": [1]}}
    )
    page = Page(report(folder).html())
    assert "model" not in page.ids("chart-") and "The fit of the memory model" in page.text


def test_a_prediction_above_the_chart_does_not_cover_the_name_of_the_limit(tmp_path):
    one = ReportFigures(RunRecord(rich_run(tmp_path / "a", plan_values={"predicted_peak_bytes": 25 * GiB})))
    names = re.findall(r'<span class="\w+" style="top:([\d.]+)%">([^<]+)</span>', memory_chart(one))
    assert [name for _, name in names] == ["predicted 25 GiB ↑", "limit 20 GiB"]
    (above, _), (below, _) = names
    assert (float(below) - float(above)) / 100 * 240 >= LABEL_PX - 0.5


def test_a_warning_names_what_the_reader_types(tmp_path):
    sentence = "the run has only 60 updates, too few to learn much. Try: a higher max_steps="
    note = {"event": "note", "step": 1, "level": "warning", "sentence": sentence}
    folder = rich_run(tmp_path / "a", plan_values={"warnings": [sentence]}, more=[note])
    page = Page(Report([RunRecord(folder)], wording=with_flags).html()).text
    assert page.count("a higher --max-steps") == 2 and "max_steps=" not in page


# ---- Findings


@pytest.fixture
def checks(monkeypatch):
    fix = Fix(title="Pack the rows", saves="2 GiB", costs="nothing", flags={"brimful": "--layout packed"})
    finding = Diagnosis(resource="none", kind="slow-padding", cause="29 % of the positions are padding.", certainty="likely", fixes=(fix,))  # fmt: skip
    monkeypatch.setattr(summary, "diagnose_run", lambda run: [finding])


@pytest.mark.usefixtures("checks")
def test_findings_are_shown_with_their_fixes(tmp_path):
    shown = report(rich_run(tmp_path / "a"))
    page = Page(shown.html())
    assert "findings" in page.sections()
    assert re.search(
        r"29 % of the positions are padding\.\s+\(likely\)\s+Pack the rows · saves 2\sGiB · costs nothing\s+--layout packed",
        page.text,
    )
    assert "Pack the rows" in shown.markdown()
    assert json.loads(shown.json())["runs"][0]["findings"][0]["kind"] == "slow-padding"


def test_what_the_log_of_a_run_shows_is_a_finding_too(tmp_path, monkeypatch):
    monkeypatch.setattr(summary, "diagnose_run", FINDINGS_OF_WHY)
    folder = rich_run(tmp_path / "a", ooms=[], done=150, end="failed")
    (folder / "log.txt").write_text("OSError: [Errno 28] No space left on device\n", encoding="utf-8")
    assert "disk-full" in [one["kind"] for one in json.loads(report(folder).json())["runs"][0]["findings"]]


def test_what_a_finding_has_in_backquotes_is_code():
    finding = Diagnosis(resource="none", kind="nan-loss", cause="An event `skip` names <b>.", fixes=(Fix(title="See `x`"),))  # fmt: skip
    shown = findings_part([finding])
    assert "An event <code>skip</code> names &lt;b&gt;." in shown and "See <code>x</code>" in shown


def test_the_axis_of_short_steps_is_in_milliseconds(tmp_path):
    short = {"times": {"compute_s": 0.05, "data_s": 0.01, "communication_s": 0.0, "other_s": 0.0}}
    text = Page(report(write_run(tmp_path / "a", step_values=short)).html()).text
    assert "20 ms" in text.replace("\u00a0", " ")


def test_without_findings_there_is_no_such_section(tmp_path):
    assert "findings" not in Page(report(rich_run(tmp_path / "a")).html()).sections()


# ---- Several runs


def test_several_runs_are_drawn_over_each_other(tmp_path):
    slow = {"rows_per_s": 300.0, "loss": lambda step: 4.0}
    shown = report(rich_run(tmp_path / "fast"), rich_run(tmp_path / "slow", step_values=slow))
    page = Page(shown.html())
    assert {"loss", "rate", "speed", "split", "memory", "throughput", "host", "utilization", "timeline"} <= page.ids(
        "chart-"
    )
    block = json.loads(re.search(r'id="chart-speed".*?class="figures">(.*?)</script>', shown.html(), re.DOTALL)[1])
    assert [curve["n"] for curve in block["s"]] == ["fast", "slow"]


def test_the_table_has_a_column_for_each_run_and_a_star_at_the_fastest(tmp_path):
    twice_as_long = {"times": {"compute_s": 0.72, "data_s": 0.008, "communication_s": 0.0, "other_s": 0.014}}
    shown = report(rich_run(tmp_path / "fast"), rich_run(tmp_path / "slow", step_values=twice_as_long))
    assert re.search(r'rows/s</th><td class="best">690</td><td>345</td>', shown.html())  # 256 rows in 0.371 s


def test_only_settings_that_differ_are_listed(tmp_path):
    one, other = rich_run(tmp_path / "a"), rich_run(tmp_path / "b")
    plan = json.loads((other / "events.jsonl").read_text().splitlines()[1])
    next(choice for choice in plan["choices"] if choice["name"] == "micro_batch")["effective"] = 64
    lines = (other / "events.jsonl").read_text().splitlines()
    lines[1] = json.dumps(plan)
    (other / "events.jsonl").write_text("\n".join(lines) + "\n")
    part = report(one, other).parts()["plan"]
    assert re.search(r"micro batch</th><td>43</td><td>64</td>", part) and "workers" not in part


def test_runs_of_one_name_are_told_apart(tmp_path):
    runs = [RunRecord(rich_run(tmp_path / place / "run", steps=3)) for place in ("a", "b")]
    assert run_names(runs) == ["a/run", "b/run"]


def test_runs_of_other_lengths_share_an_axis(tmp_path):
    shown = report(rich_run(tmp_path / "long", steps=300), rich_run(tmp_path / "short", steps=40))
    spans = {
        tuple(json.loads(block)["xs"])
        for block in re.findall(r'class="figures">(\{[^<]*"xu":"seconds"[^<]*)</script>', shown.html())
    }
    assert len({end for start, end in spans if start == 0}) == 1


def test_markdown_of_several_runs_begins_with_a_table(tmp_path):
    text = report(rich_run(tmp_path / "a"), rich_run(tmp_path / "b")).markdown()
    assert text.startswith("# a · b\n\n|  | a | b |\n| --- | --- | --- |\n")


# ---- Markdown and JSON


def test_the_checklist_of_the_markdown_is_ticked(tmp_path):
    text = report(rich_run(tmp_path / "a")).markdown()
    assert "- [x] GPU utilisation" in text and "- [ ] Out-of-memory errors" in text


def test_the_json_has_the_figures_and_the_verdicts(tmp_path):
    run = json.loads(report(rich_run(tmp_path / "a")).json())["runs"][0]
    assert run["ooms"] == 2 and run["memory"]["zone"] == "safe" and run["rows_per_s"] == pytest.approx(256 / 0.371)
    assert {one["check"]: one["verdict"] for one in run["checklist"]}["out-of-memory"] == "warn"
    assert len(run["series"]["steps"]["loss"]) == 300


def test_the_json_is_english_whatever_the_language(tmp_path):
    from brimful.languages import set_language

    folder = rich_run(tmp_path / "a")
    english = report(folder).json()
    set_language("zh")
    try:
        assert report(folder).json() == english
    finally:
        set_language(None)
