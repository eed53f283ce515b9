"""The report as Markdown, for a notebook: words, figures, checklist, plan and what happened, of each run.

Text of a run is shown as it is: signs that Markdown or HTML would read are escaped.
"""

from collections.abc import Iterable, Iterator, Sequence

from brimful.languages import tr, translate
from brimful.report.page.parts import MOST_ROWS, choice_rows, event_name, figure_rows, missing, plan_titles
from brimful.report.page.report_figures import ReportFigures
from brimful.report.page.summary import checklist, event_time, key_figures, next_steps, summary, verdict_words
from brimful.report.why.diagnosis import Diagnosis

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
        yield f"**{subject}**: {_plain(sentence)}" if subject else _plain(sentence)
    rows = [[figure.title, figure.value, figure.below] for figure in key_figures(one)]
    yield _table([tr("Figure"), tr("Value"), tr("Note")], rows)
    yield f"{mark}# {tr('Checklist')}"
    yield "\n".join(
        f"- [{'x' if check.verdict == 'pass' else ' '}] {_plain(check.title)} ({_plain(check.target)}): {_plain(check.value)}, "
        f"{verdict_words(check.verdict)}{f'. {_plain(check.note)}' if check.note else ''}"
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


def _finding(finding: Diagnosis) -> Iterator[str]:
    yield f"- {_plain(translate(finding.cause))}"
    for place, fix in enumerate(finding.fixes, 1):
        yield f"    {place}. {_plain(translate(fix.title))}"


def _events(one: ReportFigures) -> Iterator[str]:
    for event in one.run.of_kind("oom", "skip", "oversized", "resume")[:MOST_ROWS]:
        sentence = translate(str(event.get("sentence") or event_name(event)))
        step = "" if event.get("step") is None else f", {tr('step {step:,}', step=event['step'])}"
        yield f"- {event_time(event)}{step}: {_plain(sentence)}"


def _plain(text: str) -> str:
    """Text that Markdown shows as it is: on one line, and without HTML or emphasis of its own."""
    return "".join(f"\\{sign}" if sign in _SIGNS else sign for sign in " ".join(text.split()))


def _table(titles: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = [map(_plain, titles), ["---"] * len(titles), *(map(_plain, row) for row in rows)]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)
