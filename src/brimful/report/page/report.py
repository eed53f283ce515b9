"""The report of one run or of several: as a page that needs nothing else, as Markdown, as JSON.

The page is made of parts, each with an id, in a fixed order; a part without content is empty and not shown. A live page asks
for the parts that have changed and replaces them, so whatever is true of the saved page is true of the live one. Its style
and its script are in it, a policy in its head forbids every request, and no text of a run is ever taken for HTML: `escape`
stands around all of them.

The Markdown is for a notebook. Signs in a run's text that Markdown or HTML would read are escaped there too.

A run of 2,000 steps with two evaluations a minute is a page of about 300 kB.
"""

import base64
import hashlib
import html
import json
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import cache
from importlib import resources
from typing import Any

import brimful
from brimful.errors import in_one_line, wants_traceback
from brimful.languages import language, tr, translate
from brimful.report.page import parts
from brimful.report.page import run_charts as charts
from brimful.report.page.parts import (
    MOST_ROWS,
    choice_rows,
    escape,
    event_name,
    figure_rows,
    grid,
    missing,
    plan_titles,
)
from brimful.report.page.planning_charts import model_chart, throughput_chart
from brimful.report.page.report_figures import ReportFigures
from brimful.report.page.summary import (
    Check,
    checklist,
    clock_time,
    device_words,
    event_time,
    findings_of,
    joined,
    key_figures,
    next_steps,
    state_words,
    summary,
    verdict_words,
)
from brimful.report.run_record import RunRecord
from brimful.report.why.diagnosis import Diagnosis

ENDED = ("finished", "interrupted", "time-limit", "patience", "failed", "killed")

_LIGHT = """
--ground:#fff;--panel:#f8f9fb;--ink:#1a1f26;--soft:#5a6472;--rule:#dfe4ea;--link:#0b63b0;--good:#0a7350;--warn:#a86200;--warn-ink:#8a5000;
--bad:#b3261e;--warn-soft:#fdf1dc;--edge:#fbe9c2;--danger:#f9d3cc;--on:#fff;
--c0:#1f6fb8;--c1:#dd5f00;--c2:#00573a;--c3:#96266f;--c4:#33261d;--c5:#868b96""".replace("\n", "")
_DARK = """
--ground:#12161b;--panel:#191e25;--ink:#e7ebf0;--soft:#9ba6b3;--rule:#2c343e;--link:#6cb8f5;--good:#3fc794;--warn:#f0ad4e;--warn-ink:#f0ad4e;
--bad:#ff8a7d;--warn-soft:#3a2e16;--edge:#4a3b16;--danger:#592a26;--on:#12161b;
--c0:#3f8efc;--c1:#ee7f1b;--c2:#86f2cf;--c3:#b3588f;--c4:#f2cb2e;--c5:#a6adba""".replace("\n", "")
"""Contrast to the ground: at least 4.5 : 1 for text, 3 : 1 for curves. The six colours of curves differ in lightness too, so that\ncolour-blind readers can tell any two of them apart: at least 8 in OKLab × 100, where 2 can just be seen."""
_ICON = "data:image/svg+xml," + "%3Csvg xmlns='http://www.w3.org/2000/svg' viewBox='0 0 16 16'%3E%3Crect x='2' y='6' width='12' height='9' rx='2' fill='%231f6fb8'/%3E%3Cpath d='M1 3h14' stroke='%23dd5f00' stroke-width='2'/%3E%3C/svg%3E"  # fmt: skip


class Report:
    """One run, or several over each other.

    >>> report = Report([RunRecord("runs/first")])  # doctest: +SKIP
    >>> report.html(), report.markdown(), report.json()  # doctest: +SKIP
    """

    def __init__(self, runs: Sequence[RunRecord], *, wording: Callable[[str], str] = str) -> None:
        """`wording` turns arguments into what the reader types: `a higher max_steps=` into `a higher --max-steps`."""
        self.figures = [ReportFigures(run, wording=wording) for run in runs]
        self.names = run_names(runs)
        self.problems: list[str] = []
        """Of parts that could not be made; the page says so instead."""
        self._findings = [self._safe(tr("Findings"), findings_of, one, instead=[]) for one in self.figures]
        self._found = tuple(self.problems)

    @property
    def one(self) -> ReportFigures | None:
        return self.figures[0] if len(self.figures) == 1 else None

    @property
    def title(self) -> str:
        return " · ".join(self.names)

    @property
    def running(self) -> bool:
        return any(one.state not in ENDED for one in self.figures)

    def _safe(self, what: str, make: Callable[..., Any], *arguments: Any, instead: Any = "") -> Any:
        """A run folder may hold anything, and a page with a hole says more than none."""
        try:
            return make(*arguments)
        except Exception as error:
            if wants_traceback():
                raise
            self.problems.append(tr("{part}: it cannot be shown ({error!s}).", part=what, error=in_one_line(error)))
            return instead

    def _each(self, what: str, *calls: tuple[Any, ...]) -> list[str]:
        """A function and its arguments each."""
        return [self._safe(what, make, *arguments) for make, *arguments in calls]

    # ---- The page --------------------------------------------------------------------------------------------------------

    def parts(self) -> dict[str, str]:
        """The HTML of every part by its id. Which ids there are depends only on whether there are several runs."""
        self.problems = [*self._found]
        sections = self._of_one(self.one) if self.one is not None else self._of_several()
        content = {name: f"<h2>{html.escape(title)}</h2>{body}" if body else "" for name, title, body in sections}
        links = "".join(f'<a href="#{name}">{html.escape(title)}</a>' for name, title, body in sections if body)
        return {"head": self._head(), "nav": f"<div>{links}</div>", **content, "foot": self._foot()}

    def html(self, *, live_version: int | None = None, every_s: float = 3.0) -> str:
        """The whole page; with `live_version`, one that keeps asking for news."""
        content = self.parts()
        head, nav, foot = (content.pop(name) for name in ("head", "nav", "foot"))
        body = "".join(f'<section id="{name}">{part}</section>' for name, part in content.items())
        live, kind, script = "", "one" if self.one is not None else "several", _asset("page.js")
        if live_version is not None:
            lost = html.escape(tr("The server does not answer any more. This is the last state it sent."))
            live = f'<p id="live" role="status" data-version="{live_version}" data-every="{every_s:g}" data-lost="{lost}" hidden></p>'
        toggle = f'<button id="theme" type="button" data-light="{html.escape(tr("Light"))}" data-dark="{html.escape(tr("Dark"))}" hidden></button>'  # fmt: skip
        return (
            f'<!doctype html>\n<html lang="{"zh-CN" if language() == "zh" else "en"}"><head><meta charset="utf-8">'
            f'<meta http-equiv="Content-Security-Policy" content="{_policy(script, live=bool(live))}"><meta name="viewport" content="width=device-width, initial-scale=1">'
            f'<meta name="referrer" content="no-referrer"><meta name="color-scheme" content="light dark"><title>{escape(self.title)} · Brimful</title>'
            f'<link rel="icon" href="{_ICON}"><style>{_style()}</style></head><body>{live}<header><div><div id="head">{head}</div>{toggle}</div></header>'
            f'<nav id="nav" aria-label="{html.escape(tr("Sections"))}">{nav}</nav><main class="{kind}">{body}</main><footer id="foot">{foot}</footer>'
            f"<script>{script}</script></body></html>\n"
        )  # fmt: skip

    def _head(self) -> str:
        one = self.one
        if one is None:
            return f'<h1>{escape(self.title)}</h1><p class="facts">{escape(tr("{count:,} runs", count=len(self.figures)))}</p>'
        facts = [f"<b>{escape(one.task)}</b>"] if one.task else []
        facts += [escape(device_words(one))] if one.device_name else []
        facts += [clock_time(one.clock.first)] if one.clock.first else []
        state = f'<span class="state {one.state}">{html.escape(state_words(one.state_label))}</span>'
        return f'<h1>{escape(one.name)}{state}</h1><p class="facts">{" · ".join(facts)}</p>'

    def _foot(self) -> str:
        sentences = [tr("Made by brimful report {version!s}.", version=brimful.__version__)]
        newest = max((one.clock.last or 0 for one in self.figures), default=0)
        if newest:
            sentences.append(tr("State of {time!s}.", time=clock_time(newest)))
        if any(one.run.step_lines_skipped for one in self.figures):
            sentences.append(tr("The run is long, so some thousand of its steps were read, evenly spaced, and everything that is rare."))  # fmt: skip
        return html.escape(joined(sentences))

    def _of_one(self, one: ReportFigures) -> list[tuple[str, str, str]]:
        runs, names, findings, each = [one], self.names, self._findings[0], self._each
        memory, learning, speed = tr("Memory"), tr("Learning"), tr("Speed")
        machine, events, plan = tr("Machine"), tr("What happened"), tr("Plan")
        curves = each(
            learning, (charts.loss_chart, one), (charts.rate_chart, runs, names), (charts.norm_chart, runs, names)
        )
        curves += self._safe(learning, charts.logged_charts, runs, names, instead=[])
        bytes_ = each(memory, (charts.memory_chart, one), (model_chart, one), (throughput_chart, runs, names))
        rates = each(
            speed, (charts.speed_chart, runs, names), (charts.split_chart, one), (charts.padding_chart, runs, names)
        )
        cards = self._safe(machine, charts.gpu_charts, runs, names, instead=[])
        return [
            ("summary", tr("Summary"), self._safe(tr("Summary"), parts.summary_part, one, findings)),
            ("findings", tr("Findings"), self._safe(tr("Findings"), parts.findings_part, findings)),
            ("checklist", tr("Checklist"), self._safe(tr("Checklist"), parts.checks_part, one)),
            ("memory", memory, "".join([grid(bytes_), *each(memory, (parts.probes_part, one), (parts.tried_part, one))])),
            ("learning", learning, "".join([grid(curves), *each(learning, (parts.evaluations_part, one))])),
            ("speed", speed, "".join([grid(rates), *each(speed, (parts.ranks_part, one))])),
            ("machine", machine, "".join([grid(cards, three=True), grid(each(machine, (charts.host_chart, runs, names))), *each(machine, (parts.cards_part, one))])),
            ("events", events, "".join([grid(each(events, (charts.timeline, runs, names))), *each(events, (parts.events_part, one))])),
            ("plan", plan, "".join(each(plan, (parts.plan_part, one), (parts.request_part, one)))),
            ("missing", tr("What is left out"), parts.missing_part(one, self.problems)),
        ]  # fmt: skip

    def _of_several(self) -> list[tuple[str, str, str]]:
        both, each = (self.figures, self.names), self._each
        memory, learning, speed, machine = tr("Memory"), tr("Learning"), tr("Speed"), tr("Machine")
        curves = each(learning, (charts.losses_chart, *both), (charts.rate_chart, *both), (charts.norm_chart, *both))
        curves += self._safe(learning, charts.logged_charts, *both, instead=[])
        rates = each(speed, (charts.speed_chart, *both), (charts.split_bars, *both), (charts.padding_chart, *both))
        bytes_ = each(memory, (charts.memories_chart, *both), (throughput_chart, *both), (charts.host_chart, *both))
        cards = self._safe(machine, charts.gpu_charts, *both, instead=[])
        events, differ = tr("What happened"), tr("Settings that differ")
        folded = each(tr("Each run"), *((parts.run_part, *run) for run in zip(*both, self._findings, strict=True)))
        return [
            ("summary", tr("Summary"), self._safe(tr("Summary"), parts.table_part, *both)),
            ("checklist", tr("Checklist"), self._safe(tr("Checklist"), parts.checks_of_several_part, *both)),
            ("learning", learning, grid(curves)),
            ("speed", speed, grid(rates)),
            ("memory", memory, grid(bytes_)),
            ("machine", machine, grid(cards, three=True)),
            ("events", events, grid(each(events, (charts.timeline, *both)))),
            ("plan", differ, self._safe(differ, parts.differences_part, *both)),
            ("runs", tr("Each run"), "".join([*folded, *(f'<p class="note">{escape(problem)}</p>' for problem in self.problems)])),
        ]  # fmt: skip

    # ---- Other formats ---------------------------------------------------------------------------------------------------

    def json(self) -> str:
        """Every figure of every run, without NaN: what JSON has no word for is null."""
        content = {
            "brimful": brimful.__version__,
            "runs": [
                {
                    **one.to_json(),
                    "checklist": [check.to_json() for check in checklist(one)],
                    "findings": [finding.to_json() for finding in findings],
                }
                for one, findings in zip(self.figures, self._findings, strict=True)
            ],
        }
        return json.dumps(_without_nan(content), ensure_ascii=False, allow_nan=False, default=str)

    def markdown(self) -> str:
        """A summary for a notebook: words, figures, checklist, plan and what happened, of each run."""
        return markdown(self.figures, self.names, self._findings)


def run_names(runs: Sequence[RunRecord]) -> list[str]:
    """The folders' names; with the folder around them where two are alike."""
    names = [run.name for run in runs]
    for depth in range(1, 8):
        if len(set(names)) == len(names):
            break
        alike = {name for name in names if names.count(name) > 1}
        names = [
            "/".join(run.root.resolve().parts[-depth - 1 :]) if name in alike else name
            for run, name in zip(runs, names, strict=True)
        ]
    return names


def _policy(script: str, *, live: bool) -> str:
    """What the browser may load: this script and what is in the page, and for a live page answers of its own server."""
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    own = "; connect-src 'self'" if live else ""
    return f"default-src 'none'{own}; style-src 'unsafe-inline'; script-src 'sha256-{digest}'; img-src data:; base-uri 'none'; form-action 'none'"


@cache
def _asset(name: str) -> str:
    return resources.files(__package__).joinpath(name).read_text(encoding="utf-8")


@cache
def _style() -> str:
    lines = (line.strip() for line in _asset("page.css").splitlines())
    return "\n".join(line for line in lines if line).replace("%LIGHT%", _LIGHT).replace("%DARK%", _DARK)


def _without_nan(value: Any) -> Any:
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {str(key): _without_nan(part) for key, part in value.items()}
    return [_without_nan(part) for part in value] if isinstance(value, (list, tuple)) else value


_SIGNS = "\\`*_[]<>#|"


def markdown(figures: Sequence[ReportFigures], names: Sequence[str], findings: Sequence[Sequence[Diagnosis]]) -> str:
    """One run under its name; several below a table that compares them."""
    several = len(figures) > 1
    blocks = [f"# {_plain(' · '.join(names))}", _table(["", *names], figure_rows(figures))] if several else []
    for one, name, its in zip(figures, names, findings, strict=True):
        blocks += _run(one, name, its, "##" if several else "#")
    return "\n\n".join(blocks) + "\n"


def _run(one: ReportFigures, name: str, findings: Sequence[Diagnosis], mark: str) -> Iterator[str]:
    yield f"{mark} {_plain(name)}"
    for subject, sentence in summary(one):
        yield f"**{subject}**{tr(': ')}{_plain(sentence)}" if subject else _plain(sentence)
    rows = [[figure.title, figure.value, figure.below] for figure in key_figures(one)]
    yield _table([tr("Figure"), tr("Value"), tr("Note")], rows)
    yield f"{mark}# {tr('Checklist')}"
    yield "\n".join(
        f"- [{'x' if check.verdict == 'pass' else ' '}] {_check(check)}{tr('. ') + _plain(check.note) if check.note else ''}"
        for check in checklist(one)
    )
    sections = {
        tr("What to do next"): [f"- {_plain(step.sentence)}{f' `{step.command}`' if step.command else ''}" for step in next_steps(one, findings)],
        tr("Findings"): [line for finding in findings for line in _finding(finding)],
        tr("Plan"): [_table(plan_titles(), rows)] if (rows := choice_rows(one)) else [],
        tr("What happened"): list(_events(one)),
        tr("What is left out"): [f"- {_plain(reason)}" for reason in missing(one)],
    }  # fmt: skip
    for title, lines in sections.items():
        if lines:
            yield f"{mark}# {title}"
            yield "\n".join(lines)


def _check(check: Check) -> str:
    title, target, value = map(_plain, (check.title, check.target, check.value))
    verdict = verdict_words(check.verdict)
    return tr("{title} ({target}): {value}, {verdict}", title=title, target=target, value=value, verdict=verdict)


def _finding(finding: Diagnosis) -> Iterator[str]:
    yield f"- {_plain(translate(finding.cause))}"
    for place, fix in enumerate(finding.fixes, 1):
        yield f"    {place}. {_plain(translate(fix.title))}"


def _events(one: ReportFigures) -> Iterator[str]:
    for event in one.run.of_kind("oom", "skip", "oversized", "resume")[:MOST_ROWS]:
        sentence = one.wording(translate(str(event.get("sentence") or event_name(event))))
        step = "" if event.get("step") is None else tr(", ") + tr("step {step:,}", step=event["step"])
        yield f"- {event_time(event)}{step}{tr(': ')}{_plain(sentence)}"


def _plain(text: str) -> str:
    """Text that Markdown shows as it is: on one line, and without HTML or emphasis of its own."""
    return "".join(f"\\{sign}" if sign in _SIGNS else sign for sign in " ".join(text.split()))


def _table(titles: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = [map(_plain, titles), ["---"] * len(titles), *(map(_plain, row) for row in rows)]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)
