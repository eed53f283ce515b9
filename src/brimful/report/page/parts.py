"""The parts of the report's page as HTML: words, tables and folded details, around the charts.

Every text that comes from a run goes through `escape`, and every heading through `tr`. On a phone the rows of a table become
blocks, so nothing has to be scrolled sideways.
"""

import html
import math
import re
import shlex
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from brimful.languages import tr, translate
from brimful.report.page.planning_charts import model_chart, probe_fits, setting_name
from brimful.report.page.report_figures import ReportFigures, is_number, number
from brimful.report.page.summary import (
    UNKNOWN,
    KeyFigure,
    checklist,
    device_words,
    event_time,
    joined,
    key_figures,
    next_steps,
    part_names,
    percent,
    progress,
    state_words,
    summary,
    verdict_words,
)
from brimful.report.run_figures import objects
from brimful.report.why.diagnosis import Diagnosis, Fix
from brimful.training import events as journal
from brimful.units import show_bytes, show_rate, show_seconds

MOST_ROWS = 80
"""Rows of a table; of more, the first and the last."""
MOST_EVALS = 40
MOST_SCORES = 8
MOST_TEXT = 400
"""Characters of one value in a table: a run's options may hold a whole prompt."""
NOT_SCORES = frozenset(("event", "time", "step", "rows", "seconds", "best", "ooms", "loss"))
EVENT_NAMES = ("oom", "grow", "thrash", "skip", "oversized", "deal", "resume", "note", "end")

_UNIT_GAP = re.compile(r"(?<=\d) (?=(?:[KMGT]?i?B|ms|s|min|h)\b)")
"""No line ends between a figure and its unit."""

Cell = str | tuple[str, str]
"""The text of a cell, or its text and its class."""


# ---- Pieces of HTML ------------------------------------------------------------------------------------------------------


def escape(value: Any) -> str:
    """Anything as text for a page; long texts are cut."""
    text = _UNIT_GAP.sub("\u00a0", str(value))
    return html.escape(text if len(text) <= MOST_TEXT else f"{text[: MOST_TEXT - 1]}…")


def grid(figures: Iterable[str], *, three: bool = False) -> str:
    """Two side by side, or three. The last one takes the room that is left."""
    drawn = [figure for figure in figures if figure]
    three = three and len(drawn) > 2
    narrow = [place for place, figure in enumerate(drawn) if figure.startswith('<figure class="chart"')]
    if not three and len(narrow) % 2:
        drawn[narrow[-1]] = drawn[narrow[-1]].replace('class="chart"', 'class="chart wide"', 1)
    return f'<div class="charts{" three" * three}">{"".join(drawn)}</div>' if drawn else ""


def _cell(cell: Cell, label: str = "") -> str:
    """`label` is what stands before it on a phone."""
    text, kind = cell if isinstance(cell, tuple) else (cell, "")
    classes = " ".join(filter(None, (kind, "none" if text == UNKNOWN else "")))
    attributes = (f' class="{classes}"' if classes else "") + (f' data-label="{html.escape(label)}"' if label else "")
    return f"<td{attributes}>{escape(text)}</td>"


def _title(cell: Cell) -> str:
    text, kind = cell if isinstance(cell, tuple) else (cell, "")
    return f'<th scope="col"{f" class={kind}" if kind else ""}>{escape(text)}</th>'


def _table(titles: Sequence[Cell], rows: Iterable[Sequence[Cell]], *, chosen: int | None = None) -> str:
    labels = ["", *(title[0] if isinstance(title, tuple) else title for title in titles[1:])]
    lines = []
    for place, row in enumerate(rows):
        cells = "".join(map(_cell, row, labels))
        lines.append(f"<tr{' class=chosen' if place == chosen else ''}>{cells}</tr>")
    head = "".join(map(_title, titles))
    return f'<div class="wide-table"><table class="stack"><thead><tr>{head}</tr></thead><tbody>{"".join(lines)}</tbody></table></div>'


def _table_of_runs(names: Sequence[str], rows: Iterable[tuple[str, Iterable[str]]]) -> str:
    """A column for each run, with its colour. The cells are HTML."""
    titles = "".join(
        f'<th scope="col"><span class="swatch c{place % 6}"></span>{escape(name)}</th>'
        for place, name in enumerate(names)
    )
    body = "".join(f'<tr><th scope="row">{escape(name)}</th>{"".join(cells)}</tr>' for name, cells in rows)
    return (
        f'<div class="wide-table"><table><thead><tr><td></td>{titles}</tr></thead><tbody>{body}</tbody></table></div>'
    )


def _folded(title: str, about: str, body: str, *, is_open: bool = False) -> str:
    more = f'<span class="soft">{escape(about)}</span>' if about else ""
    return f"<details{' open' * is_open}><summary>{escape(title)}{more}</summary>{body}</details>"


# ---- The summary ---------------------------------------------------------------------------------------------------------


def summary_part(one: ReportFigures, findings: Sequence[Diagnosis]) -> str:
    tiles = "".join(_tile(figure, _gauge(one) if figure.key == "memory" else "") for figure in key_figures(one))
    return f'{_words(one)}<dl class="tiles">{tiles}</dl>{_next(one, findings)}'


def _words(one: ReportFigures) -> str:
    (_, first), *rest = summary(one)
    lines = "".join(f"<dt>{escape(subject)}</dt><dd>{escape(sentence)}</dd>" for subject, sentence in rest)
    return f'<p class="lead">{escape(first)}</p>' + (f'<dl class="words">{lines}</dl>' if lines else "")


def _tile(figure: KeyFigure, picture: str) -> str:
    below = f'<div class="small">{escape(figure.below)}</div>' if figure.below else ""
    kind = "tile gauged" if picture else "tile"
    return f'<div class="{kind}"><dt>{escape(figure.title)}</dt><dd><div class="big">{escape(figure.value)}</div>{picture}{below}</dd></div>'


def _gauge(one: ReportFigures) -> str:
    """The limit as a bar: what was used of it, the zones, and a line at the prediction."""
    if one.used is None or not one.limit_bytes:
        return ""
    at = (one.predicted_bytes or math.inf) / one.limit_bytes
    line = f'<i style="left:{100 * at:.1f}%"></i>' if at <= 1 else ""
    fill = f'<span style="width:{min(100 * one.used, 100):.1f}%"></span>'
    return f'<div class="gauge {one.zone}" role="img" aria-label="{percent(one.used)}">{fill}{line}</div>'


def _next(one: ReportFigures, findings: Sequence[Diagnosis]) -> str:
    items = "".join(f"<li>{_marked(step.sentence)}{_code(step.command)}</li>" for step in next_steps(one, findings))
    return f'<div class="next"><h3>{escape(tr("What to do next"))}</h3><ul>{items}</ul></div>' if items else ""


def _marked(sentence: str) -> str:
    """What is in backquotes is code."""
    return re.sub(r"`([^`]+)`", r"<code>\1</code>", escape(sentence))


def _code(command: str | None) -> str:
    return f" <code>{escape(command)}</code>" if command else ""


def findings_part(findings: Sequence[Diagnosis]) -> str:
    """As `brimful why` shows them, with the flag of Brimful or the command beside each fix."""
    boxes = []
    for finding in findings:
        sure = {"likely": tr("likely"), "possible": tr("possible")}.get(finding.certainty)
        mark = f' <span class="soft">({escape(sure)})</span>' if sure else ""
        fixes = "".join(
            f"<li>{_marked(joined_facts(translate(fix.title), *_fix_facts(fix)))}{_code(fix.flags.get('brimful') or fix.flags.get('shell'))}</li>"
            for fix in finding.fixes
        )
        boxes.append(f'<div class="finding"><p>{_marked(translate(finding.cause))}{mark}</p>{f"<ol>{fixes}</ol>" if fixes else ""}</div>')  # fmt: skip
    return "".join(boxes)


def _fix_facts(fix: Fix) -> list[str]:
    return [
        tr("saves {memory}", memory=translate(fix.saves)) if fix.saves else "",
        tr("costs {cost}", cost=translate(fix.costs)) if fix.costs else "",
    ]


def joined_facts(*facts: str) -> str:
    return " · ".join(fact for fact in facts if fact)


def checks_part(one: ReportFigures) -> str:
    rows = "".join(
        f'<tr><td><span class="verdict {check.verdict}">{escape(verdict_words(check.verdict))}</span></td>{_cell((check.title, "value"))}'
        f"{_cell((check.value, 'whole'), tr('Measured'))}{_cell((check.target, 'whole'), tr('Target'))}{_cell((check.note, 'soft'))}</tr>"
        for check in checklist(one)
    )
    titles = "".join(map(_title, (tr("Verdict"), tr("Check"), tr("Measured"), tr("Target"), tr("Note"))))
    return f'<div class="wide-table"><table class="stack checks"><thead><tr>{titles}</tr></thead><tbody>{rows}</tbody></table></div>'


# ---- Details of one run --------------------------------------------------------------------------------------------------


def probes_part(one: ReportFigures) -> str:
    """What the memory model was fitted to, and what it says now."""
    rows: list[Sequence[Cell]] = []
    for fit in probe_fits(one.plan)[:MOST_ROWS]:
        off = f"{round(100 * (fit.model_bytes / fit.peak_bytes - 1), 1) + 0.0:+.1f}\u00a0%".replace("-", "−")
        sizes = show_bytes(fit.peak_bytes), show_bytes(fit.model_bytes), off
        rows.append((f"{fit.rows:,}", "+".join(map(str, fit.shape)) or UNKNOWN, *((size, "n") for size in sizes)))
    titles: list[Cell] = [tr("Rows"), tr("Lengths"), *((title, "n") for title in (tr("Measured"), tr("Model"), tr("Difference")))]  # fmt: skip
    return _folded(tr("Probes"), f"{len(rows)}", _table(titles, rows)) if rows else ""


def tried_part(one: ReportFigures) -> str:
    """Every split that the search timed, and what it left out."""
    tried = [row for row in objects(one.plan, "tried") if is_number(row.get("micro_batch"))][:MOST_ROWS]
    if not tried:
        return ""
    rows: list[Sequence[Cell]] = []
    for row in tried:
        rate = number(row, "data_rows_per_s") or number(row, "rows_per_s")
        fate = tr("chosen") if row.get("chosen") is True else tr("too large") if row.get("fits") is False else ""
        figures = (
            f"{row['micro_batch']:,}", str(row.get("accumulation", UNKNOWN)), _size(number(row, "peak_bytes")), _rate(rate),
        )  # fmt: skip
        rows.append((setting_name(row), *((figure, "n") for figure in figures), fate))
    names = (tr("Micro-batch"), tr("Accumulation"), tr("Peak"), tr("rows/s"))
    titles: list[Cell] = [tr("Setting"), *((name, "n") for name in names), ""]
    chosen = next((place for place, row in enumerate(tried) if row.get("chosen") is True), None)
    reasons = one.plan.get("not_tried")
    notes = "".join(
        f'<p class="note">{escape(tr("Not tried: {what}", what=translate(str(reason))))}</p>'
        for reason in (reasons if isinstance(reasons, list) else [])
    )
    return _folded(tr("What was tried"), f"{len(tried)}", _table(titles, rows, chosen=chosen) + notes)


def evaluations_part(one: ReportFigures) -> str:
    """Loss and scores of each evaluation; of very many, evenly spaced ones and the best."""
    evals, best = one.evals, one.best_eval
    if not evals:
        return ""
    names = dict.fromkeys(name for event in evals for name, value in event.items() if is_number(value))
    scores = [name for name in names if name not in NOT_SCORES][:MOST_SCORES]
    stride = -(-len(evals) // MOST_EVALS)
    shown = [event for place, event in enumerate(evals) if (len(evals) - 1 - place) % stride == 0 or event is best]
    rows: list[Sequence[Cell]] = []
    for event in shown:
        loss = (_score(journal.number(event, "loss")), "n best" if event is best else "n")
        others = ((_score(journal.number(event, name)), "n") for name in scores)
        rows.append((f"{event['step']:,}", loss, *others, (_time(number(event, "seconds")), "n")))
    titles: list[Cell] = [tr("Step"), *((title, "n") for title in (tr("Loss"), *scores, tr("Took")))]
    about = f"{len(evals):,}"
    if len(shown) < len(evals):
        about = tr("{shown:,} shown of {all:,}", shown=len(shown), all=len(evals))
    return _folded(tr("Evaluations"), about, _table(titles, rows))


def ranks_part(one: ReportFigures) -> str:
    """Memory, padding and time of each rank, where there are several."""
    if len(one.ranks) < 2:
        return ""
    parts = part_names()
    rows: list[Sequence[Cell]] = []
    for rank in one.ranks:
        shares = (percent(rank.time_shares.get(name)) for name in parts)
        figures = (_size(rank.peak_bytes), _size(rank.reserved_bytes), percent(rank.padding), *shares)
        rows.append((f"{rank.rank}", *((figure, "n") for figure in figures)))
    names = (tr("allocated"), tr("reserved"), tr("Padding"), *parts.values())
    titles: list[Cell] = [tr("Rank"), *((name, "n") for name in names)]
    return _folded(tr("Ranks"), f"{len(one.ranks)}", _table(titles, rows), is_open=True)


def cards_part(one: ReportFigures) -> str:
    """A row for each rank, where there are several."""
    if len(one.cards) < 2:
        return ""
    rows: list[Sequence[Cell]] = []
    for card in one.cards:
        figures = (
            percent(card.utilization), _size(card.used_bytes), _size(card.others_bytes),
            UNKNOWN if card.temperature_c is None else f"{card.temperature_c:.0f} °C", UNKNOWN if card.power_w is None else f"{card.power_w:.0f} W",
        )  # fmt: skip
        rows.append((f"{card.rank}", card.name or UNKNOWN, *((figure, "n") for figure in figures)))
    names = (tr("Utilisation"), tr("in use"), tr("held by others"), tr("Temperature"), tr("Power"))
    titles: list[Cell] = [tr("Rank"), tr("Card"), *((name, "n") for name in names)]
    return _folded(tr("Cards"), f"{len(one.cards)}", _table(titles, rows), is_open=True)


def events_part(one: ReportFigures) -> str:
    """All that is out of the ordinary, in order."""
    events = [*one.run.of_kind(*EVENT_NAMES), *(event for event in one.run.of_kind("checkpoint") if event.get("saved") is False)]  # fmt: skip
    if not events:
        return ""
    events.sort(key=lambda event: (seconds := one.clock.seconds(event), math.isnan(seconds))[::-1])
    left_out = len(events) - MOST_ROWS
    shown = events if left_out <= 0 else [*events[: MOST_ROWS // 2], *events[-MOST_ROWS // 2 :]]
    rows: list[Sequence[Cell]] = []
    for event in shown:
        step = UNKNOWN if event.get("step") is None else f"{event['step']:,}"
        sentence = one.wording(translate(str(event.get("sentence") or "")))
        rows.append((event_time(event), (step, "n"), (event_name(event), "value"), sentence))
    body = _table([tr("Time"), (tr("Step"), "n"), tr("Event"), tr("Message")], rows)
    if left_out > 0:
        body += f'<p class="note">{escape(tr("{count:,} more in the middle are in events.jsonl.", count=left_out))}</p>'
    important = bool(one.ooms) or one.state in ("failed", "killed")
    return _folded(tr("Events"), f"{len(events):,}", body, is_open=important)


def event_name(event: Mapping[str, Any]) -> str:
    names = {
        "oom": tr("out of memory"), "grow": tr("micro-batch restored"), "thrash": tr("memory fragmented"), "skip": tr("step skipped"),
        "oversized": tr("row set aside"), "deal": tr("rows dealt again"), "resume": tr("resumed"), "end": tr("end"), "checkpoint": tr("save failed"),
        "note": tr("warning") if event.get("level") == "warning" else tr("note"),
    }  # fmt: skip
    return names.get(str(event.get("event")), str(event.get("event")))


# ---- The plan ------------------------------------------------------------------------------------------------------------


def plan_titles() -> list[str]:
    return [tr("Setting"), tr("Requested"), tr("In effect"), tr("From"), tr("Reason")]


def choice_rows(one: ReportFigures) -> list[list[str]]:
    """The texts of the plan's choices, in the order of `plan_titles`."""
    return [
        [_choice_name(choice), _choice_value(choice, "requested"), _choice_value(choice, "effective"), _source(choice), one.wording(translate(str(choice.get("reason") or "")))]
        for choice in objects(one.plan, "choices")
    ]  # fmt: skip


def _choice_name(choice: Mapping[str, Any]) -> str:
    return translate(str(choice.get("name", UNKNOWN)).replace("_", " "))


def _choice_value(choice: Mapping[str, Any], which: str) -> str:
    value = choice.get(which)
    if value is None:
        return UNKNOWN
    if str(choice.get("name", "")).endswith(("_limit", "_bytes")) and is_number(value):
        return show_bytes(value)
    return translate(str(value))


def _source(choice: Mapping[str, Any]) -> str:
    """Where the value comes from; of an older plan, what it is based on."""
    words = {
        "you": tr("you"), "config file": tr("config file"), "recipe": tr("recipe"), "task": tr("task"), "default": tr("default"),
        "measured": tr("measured"), "predicted": tr("predicted"), "asked": tr("asked"),
    }  # fmt: skip
    source = choice.get("source") or choice.get("basis")
    return words.get(str(source), UNKNOWN if source is None else str(source))


def plan_part(one: ReportFigures) -> str:
    texts, plan = choice_rows(one), one.plan
    if not texts:
        return ""
    rows: list[Sequence[Cell]] = []
    for choice, (name, requested, effective, source, reason) in zip(objects(plan, "choices"), texts, strict=True):
        changed = choice.get("requested") not in (None, choice.get("effective"))
        rows.append(((name, "value"), (requested, "changed" if changed else ""), (effective, "value"), source, reason))
    warnings = plan.get("warnings")
    boxes = "".join(
        f'<p class="warning"><b>{escape(tr("Warning"))}</b> {escape(one.wording(translate(str(warning))))}</p>'
        for warning in (warnings if isinstance(warnings, list) else [])
    )
    return boxes + _table(plan_titles(), rows) + _plan_note(one) + _plan_changes(one)


def _plan_note(one: ReportFigures) -> str:
    plan, facts = one.plan, []
    if plan.get("cached") is True:
        facts.append(tr("The plan was reused from an earlier one."))
    elif is_number(plan.get("plan_s")) and is_number(plan.get("probes")):
        facts.append(tr("The plan was made in {time} with {probes:,} probes.", time=show_seconds(plan["plan_s"]), probes=plan["probes"]))  # fmt: skip
    if (count := len(one.run.plans)) > 1:
        facts.append(tr("It is number {count:,} of this run. The earlier ones are in plans/.", count=count))
    return f'<p class="note">{escape(joined(facts))}</p>' if facts else ""


def _plan_changes(one: ReportFigures) -> str:
    """Old and new values, where the run was resumed with another plan."""
    changes = [change for event in one.run.of_kind("plan") for change in objects(event, "changes")]
    items = "".join(
        f"<li>{escape(_choice_name(change))}: {escape(change.get('old'))} → {escape(change.get('new'))}</li>"
        for change in changes[-MOST_ROWS:]
    )
    return f"<h3>{escape(tr('Changed when it was resumed'))}</h3><ul>{items}</ul>" if items else ""


def request_part(one: ReportFigures) -> str:
    """What was asked for, as in run.json."""
    if not one.request:
        return ""
    values: dict[str, Any] = {"task": one.request.get("task"), "data": one.request.get("data")}
    for name in ("options", "task_options"):
        options = one.request.get(name)
        values |= options if isinstance(options, Mapping) else {}
    values |= {"folder": one.run.root, "host": one.begin.get("host"), "brimful": one.begin.get("version")}
    rows = [((str(name), "value"), str(value)) for name, value in values.items() if value is not None]
    return _folded(tr("Request"), tr("as in run.json"), _table([tr("Setting"), tr("Value")], rows))


def missing_part(one: ReportFigures, problems: Sequence[str] = ()) -> str:
    items = "".join(f"<li>{escape(reason)}</li>" for reason in (*missing(one), *problems))
    return f'<ul class="soft">{items}</ul>' if items else ""


def missing(one: ReportFigures) -> list[str]:
    """What this run did not record, and why, as far as that is known."""
    reasons = []
    if not one.steps:
        reasons.append(tr("Curves: no step has been trained."))
    elif one.peak_bytes is None:
        reasons.append(tr("Memory over time: the device does not count memory, as a CPU without --memory-limit."))
    if not one.plan:
        reasons.append(tr("The plan: the run has none, or its file cannot be read."))
    elif not model_chart(one):
        reasons.append(tr("The fit of the memory model: fewer than two probes have the planned lengths."))
    if one.steps and not one.samples:
        reasons.append(tr("RAM of the host, and GPU utilisation, temperature and power: the run has no samples, which are taken every five seconds."))  # fmt: skip
    elif one.steps and not one.cards:
        reasons.append(tr("GPU utilisation, temperature and power: it does not train on a GPU that reports them."))
    if one.steps and not one.time_shares:
        reasons.append(tr("The time split: the steps do not have one."))
    if one.steps and one.padding is None:
        reasons.append(tr("Padding: the steps do not have it."))
    return reasons


# ---- Several runs --------------------------------------------------------------------------------------------------------


def figure_rows(figures: Sequence[ReportFigures]) -> list[list[str]]:
    """The figures that are compared: a name, and a text for each run. What no run has is left out."""
    columns: dict[str, Callable[[ReportFigures], str]] = {
        tr("State"): lambda one: state_words(one.state_label),
        tr("Task"): lambda one: one.task or UNKNOWN,
        tr("Device"): device_words,
        tr("Progress"): progress,
        tr("Time"): lambda one: _time(one.clock.total_s or None),
        tr("rows/s"): lambda one: _rate(one.rows_per_s),
        tr("Time of a step"): lambda one: _time(one.step_s),
        tr("Time of an epoch"): lambda one: _time(one.seconds_per_epoch),
        tr("Peak memory"): lambda one: _size(one.used_bytes) + ("" if one.used is None else f" ({percent(one.used)})"),
        tr("Memory limit"): lambda one: _size(one.limit_bytes),
        tr("RAM of the host"): lambda one: _size(one.host_bytes),
        tr("Out-of-memory errors"): lambda one: f"{one.oom_count:,}",
        tr("Padding"): lambda one: percent(one.padding),
        tr("GPU utilisation"): lambda one: percent(one.utilization),
        tr("Loss"): lambda one: _score(one.losses and one.losses[1]),
        tr("Best evaluation"): lambda one: _score(one.best_loss),
    }
    rows = [[name, *map(text, figures)] for name, text in columns.items()]
    return [row for row in rows if any(cell != UNKNOWN for cell in row[1:])]


def table_part(figures: Sequence[ReportFigures], names: Sequence[str]) -> str:
    """The figures side by side, with a star at the fastest run and at the best evaluation."""
    best = {
        tr("rows/s"): _best([one.rows_per_s for one in figures], max),
        tr("Best evaluation"): _best([one.best_loss for one in figures], min),
    }
    rows = (
        (name, [_cell((cell, "best" if best.get(name) == place else "")) for place, cell in enumerate(cells)])
        for name, *cells in figure_rows(figures)
    )
    command = shlex.join(["brimful", "compare", *(str(one.run.root) for one in figures)])
    hint = tr("Is it the same experiment, and what differs?")
    return f'{_table_of_runs(names, rows)}<p class="note">{escape(hint)}{_code(command)}</p>'


def _best(values: Sequence[float | None], choose: Callable[[Iterable[float]], float]) -> int | None:
    """Where the best figure is, if at least two are known and they differ."""
    known = [value for value in values if value is not None and math.isfinite(value)]
    return values.index(choose(known)) if len(set(known)) > 1 else None


def checks_of_several_part(figures: Sequence[ReportFigures], names: Sequence[str]) -> str:
    rows = (
        (checks[0].title, [f'<td><span class="verdict {check.verdict}" title="{escape(check.note)}">{escape(check.value)}</span></td>' for check in checks])
        for checks in zip(*(checklist(one) for one in figures), strict=True)
    )  # fmt: skip
    return _table_of_runs(names, rows)


def differences_part(figures: Sequence[ReportFigures], names: Sequence[str]) -> str:
    """Choices of the plans whose effective values are not the same in all runs."""
    plans = [{row[0]: row[2] for row in choice_rows(one)} for one in figures]
    if not any(plans):
        return ""
    keys = dict.fromkeys(name for plan in plans for name in plan)
    rows = [(name, [_cell(plan.get(name, UNKNOWN)) for plan in plans]) for name in keys if len({plan.get(name) for plan in plans}) > 1]  # fmt: skip
    return _table_of_runs(names, rows) if rows else f'<p class="soft">{escape(tr("The plans are the same."))}</p>'


def run_part(one: ReportFigures, name: str, findings: Sequence[Diagnosis]) -> str:
    """All of a run that is not a chart, folded."""
    body = (
        _words(one) + _next(one, findings) + findings_part(findings) + plan_part(one) + events_part(one) + request_part(one) + missing_part(one)
    )  # fmt: skip
    return _folded(name, state_words(one.state_label), body)


def _size(value: float | None) -> str:
    return UNKNOWN if value is None else show_bytes(value)


def _time(value: float | None) -> str:
    return UNKNOWN if value is None else show_seconds(value)


def _rate(value: float | None) -> str:
    return UNKNOWN if value is None else show_rate(value)


def _score(value: float | None) -> str:
    return UNKNOWN if value is None else f"{value:.4g}" if math.isfinite(value) else str(value)
