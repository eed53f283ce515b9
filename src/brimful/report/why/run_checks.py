"""What is wrong with a run, from its folder alone: `check_run` for `brimful why RUN`.

    how it ended     failed, killed, interrupted, a checkpoint that could not be saved; what the task has warned of (here)
    oom_checks       out-of-memory errors, survived or not
    growth_checks    leaks, and the one long row
    speed_checks     where the time went
    loss_checks      loss curves and learning rates

Each check returns nothing for a healthy run: thresholds are above what healthy runs show, and what is not known is not claimed.
Memory and loss are judged over the whole run, speed over the part since the last resume, because its plan may be another one.
"""

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

from brimful.report.run_figures import RunFigures, part, seconds_at, whole
from brimful.report.run_record import RunRecord
from brimful.report.why.diagnosis import Diagnosis, Finding, Fix, finding, fix, say
from brimful.report.why.growth_checks import growth_findings
from brimful.report.why.log_reader import diagnose
from brimful.report.why.loss_checks import loss_findings, lower_rate
from brimful.report.why.oom_checks import oom_findings, resource
from brimful.report.why.speed_checks import LEAST_STEPS, speed_findings
from brimful.training.events import number
from brimful.units import show_bytes

NEARLY_FULL = 0.90
"""Host RAM in use in the last samples of a killed run, from which on the kernel's out-of-memory killer is likely."""
LAST_S = 60.0
"""Samples from this long before the end count as the last ones."""
LAST_LINES = 5
"""What ended a run stands in the last lines of log.txt."""
LOG_BYTES = 64 * 1024
"""Of the end of log.txt."""
_BEGUN = re.compile(rb"\S+ \S+ training in .+: [\d,]+ steps? on \d+ process")
"""The line of log.txt that a `begin` event becomes (`run_log.event_line`)."""
_COUNTED, _NOT_COUNTED = "because host memory ran out (the kernel's", "not by the kernel's out-of-memory killer"
"""How `training.launch` says what the kernel's counter of out-of-memory kills tells."""
_ERROR = re.compile(
    r"(?:^|\s)((?:[A-Za-z_]\w*\.)*[A-Z]\w*(?:Error|Exception|Interrupt|Exit|OutOfMemory)\w*)(?::\s*(.*))?$"
)
_FRAME = re.compile(r'\s+File "(.+)", line \d+')
_INSTALLED = re.compile(r"[/\\](?:site-packages|dist-packages|brimful|lib[/\\]python[\d.]+|Lib)[/\\]|^<")
_FIX_FIRST = say("Fix this error first: the same step would fail in the same way")
_NOT_FINITE = re.compile(r"\b(?:nan|inf|infinite|not finite|non-?finite)\b", re.IGNORECASE)
_OUT_OF_MEMORY = re.compile(
    r"out of memory|memory ran out|can't allocate memory|does not fit|cannot be split and needs", re.IGNORECASE
)


def diagnose_run(record: RunRecord) -> list[Diagnosis]:
    """What the run's figures show, and what its log says; if the run failed, the log first. Empty for a healthy run."""
    missing, stopped = events_missing(record), interruption(record)
    measured = [missing] if missing else [*([stopped] if stopped else []), *check_run(record)]
    log_file = record.root / "log.txt"
    if not log_file.is_file():
        return measured
    from_log = _with_command(diagnose(_since_begin(log_file), settings=_known_settings(record.plan)), record)
    if from_log.kind in ("unknown", "empty") or (stopped and from_log.kind in ("stopped", "killed", "time-limit")):
        return measured
    if from_log.certainty != "certain" or from_log.kind == "killed":
        killed = any(one.kind in ("run-killed", "host-killed") for one in measured)
        if killed and from_log.kind in (
            "killed",
            "host-killed",
            "stopped",
        ):  # the samples or the kernel's counter tell more
            return measured
    failed = record.state in ("failed", "killed") and not missing
    same = next((one for one in measured if one.kind == from_log.kind), None)
    if same is not None and (not failed or same.certainty == "certain" or same.kind == "nan-loss"):
        # The run's figures are measured, the log has the message. Of a failed run, an error that it survived is another one.
        figures = {**from_log.figures, **same.figures}
        merged = replace(same, evidence=from_log.evidence, figures=figures, others=from_log.others)
        return [merged if one is same else one for one in measured]
    return [from_log, *measured] if failed else [*measured, from_log]


def _since_begin(log_file: Path) -> Path | bytes:
    """What log.txt has since the run was begun or resumed last: how a session before ended is over and done.

    Empty lines stand for those before, so that lines keep their numbers.
    """
    begun = place = lines = 0
    with suppress(OSError), log_file.open("rb") as file:
        for number, line in enumerate(file):
            if _BEGUN.match(line):
                begun, lines = place, number
            place += len(line)
        if begun:
            file.seek(begun)
            return b"\n" * lines + file.read()
    return log_file


def _with_command(diagnosis: Diagnosis, record: RunRecord) -> Diagnosis:
    """A log does not say which run it is of, so its fixes name `RUN`."""
    command = record.folder.resume_command
    fixes = (
        replace(fix, flags={name: command if "--run RUN " in flag else flag for name, flag in fix.flags.items()})
        for fix in diagnosis.fixes
    )
    return replace(diagnosis, fixes=tuple(fixes))


def _known_settings(plan: Mapping[str, Any]) -> dict[str, Any]:
    """What a run's plan says that its log need not repeat."""
    levers = plan.get("levers") or {}
    return {
        "micro_batch": plan.get("micro_batch"),
        "accumulation": plan.get("accumulation"),
        "processes": plan.get("processes"),
        "global_batch": plan.get("global_batch"),
        "lengths": tuple(plan.get("shape") or ()),
        "precision": levers.get("precision"),
        "checkpointing": levers.get("checkpointing") not in (None, "off"),
        "growing_segments": True,
    }


def check_run(record: RunRecord) -> list[Diagnosis]:
    """Everything that is wrong with this run, the most important first; empty for a healthy one."""
    run = RunFigures(record)
    findings = [
        *_ending(run),
        *oom_findings(run),
        *growth_findings(run),
        *loss_findings(run),
        *signal_findings(run),
        *speed_findings(_newest_part(run)),
    ]
    if any("others_bytes" in one.diagnosis.figures and one.diagnosis.kind == "gpu-out-of-memory" for one in findings):
        findings = [one for one in findings if one.diagnosis.kind != "others-on-card"]  # said already
    if any(one.diagnosis.kind in ("loss-diverging", "loss-swinging") for one in findings):
        findings = [one for one in findings if one.diagnosis.kind != "loss-spiked"]  # the same, with less to go by
    findings = _without_consequences_of_nan(run, findings)
    findings.sort(key=lambda finding: -finding.importance)
    return [finding.diagnosis for finding in findings]


def _without_consequences_of_nan(run: RunFigures, findings: list[Finding]) -> list[Finding]:
    """A run that failed because of NaN has one problem: that it failed, early, follows from it."""
    nan = next((one for one in findings if one.diagnosis.kind == "nan-loss"), None)
    if nan is None or run.record.state != "failed" or not _NOT_FINITE.search(_end_sentence(run)):
        return findings
    rest = [one for one in findings if one is not nan and one.diagnosis.kind not in ("run-failed", "few-updates")]
    ended = replace(nan.diagnosis, cause=f"{nan.diagnosis.cause} {_after(run)}", certainty="certain")
    return [Finding(1.0, ended), *rest]


def _newest_part(run: RunFigures) -> RunFigures:
    """The steps since the last resume, if they are enough to judge."""
    resumed = [event["step"] for event in run.record.of_kind("resume") if event.get("step")]
    newest = RunFigures(run.record, after_step=resumed[-1]) if resumed else run
    return newest if len(newest.steps) >= LEAST_STEPS else run


def _ending(run: RunFigures) -> Iterator[Finding]:
    state = run.record.state
    if state == "failed" and "killed by SIGKILL" in _end_sentence(run):
        yield _killed(run)
    elif state == "failed":
        yield _failed(run)
    elif state == "killed":
        yield _crashed(run) or _killed(run)
    saves = run.record.of_kind("checkpoint")
    if saves and saves[-1].get("saved") is False:
        yield _save_failed(run, saves)


def _resume(run: RunFigures, *, fixed: bool = False) -> Fix:
    """`fixed`: once an error is mended that would come again."""
    saved = [
        event["step"] for event in run.record.of_kind("checkpoint") if event.get("saved") and event["step"] is not None
    ]
    if saved and fixed:
        title = say("Then continue from the checkpoint of step {step}", step=f"{saved[-1]:,}")
    elif saved:
        title = say("Continue from the checkpoint of step {step}", step=f"{saved[-1]:,}")
    else:
        title = say("Then start it again") if fixed else say("Start it again")
    return fix(title, shell=run.record.folder.resume_command, basis="measured" if saved else "range")


def _end_sentence(run: RunFigures) -> str:
    ends = run.record.of_kind("end")
    return str(ends[-1].get("sentence") or "") if ends else ""


def _failed(run: RunFigures) -> Finding:
    """An error that Brimful reported: its message says what to do."""
    problem, _, advice = _end_sentence(run).partition(" Try: ")
    memory = bool(_OUT_OF_MEMORY.search(problem))
    sentences = [_after(run), _sentence(problem)] if problem else [_after(run)]
    return finding(
        1.0, "run-failed", sentences, resource=resource(run) if memory else "none", figures={"step": run.last_step},
        evidence="events.jsonl, end", fixes=_after_failure(run, problem, advice),
    )  # fmt: skip


def _after_failure(run: RunFigures, problem: str, advice: str) -> Iterator[Fix]:
    """The error's own advice; and to start again, unless the same rows and weights would give the same NaN.

    An error that would come again is to be fixed first.
    """
    if advice:
        yield fix(_sentence(advice, end=""))
    again = run.record.fails_again
    if again and not advice:
        yield fix(_FIX_FIRST)
    if not advice or not _NOT_FINITE.search(problem):
        yield _resume(run, fixed=again)


def _after(run: RunFigures) -> str:
    if not run.steps:
        return say("The run failed before its first step.")
    return say("The run failed after step {step}.", step=f"{run.last_step:,}")


def _sentence(text: str, end: str = ".") -> str:
    """With a capital letter and a full stop, so that it stands by itself. The name of a file keeps its letter."""
    text = " ".join(text.split()).rstrip(".")
    if not text or set(text.split()[0]) & set("./_"):
        return text and text + end
    return text[:1].upper() + text[1:] + end


def _crashed(run: RunFigures) -> Finding | None:
    """A Python error that log.txt ends with: of a task, a hook or a library."""
    found = _last_error(_log_tail(run))
    if found is None:
        return None
    memory = bool(_OUT_OF_MEMORY.search(found))
    again = not memory and _in_own_code(_log_tail(run))
    traceback = fix(say("Read the traceback at the end of log.txt, which names the line of code"))
    return finding(
        1.0, "run-crashed", [_after(run), say("The last error in log.txt is {error}.", error=found.rstrip("."))],
        resource=resource(run) if memory else "none", certainty="likely", figures={"step": run.last_step}, evidence="log.txt",
        fixes=(traceback, *([fix(_FIX_FIRST)] if again else []), _resume(run, fixed=again)),
    )  # fmt: skip


def _log_tail(run: RunFigures) -> list[str]:
    """The lines at the end of log.txt."""
    try:
        with (run.record.root / "log.txt").open("rb") as file:
            file.seek(0, 2)
            file.seek(max(0, file.tell() - LOG_BYTES))
            return [line for line in file.read().decode(errors="replace").splitlines() if line.strip()]
    except OSError:
        return []


def _last_error(lines: Sequence[str]) -> str | None:
    """The error of a traceback at the very end of a log; None if the log ends with something else."""
    starts = [index for index, line in enumerate(lines) if "Traceback (most recent call last)" in line]
    after = lines[starts[-1] + 1 :] if starts else []
    matches = [(index, _ERROR.search(line)) for index, line in enumerate(after) if not line.startswith(" ")]
    errors = [(index, match) for index, match in matches if match is not None]
    if not errors or len(after) - errors[-1][0] > LAST_LINES:  # the run went on after it
        return None
    name, message = errors[-1][1].groups()
    return f"{name}: {message[:300]}" if message else str(name)


def _in_own_code(lines: Sequence[str]) -> bool:
    """Whether the last traceback of a log goes through code that is neither Brimful's nor an installed package's."""
    starts = [index for index, line in enumerate(lines) if "Traceback (most recent call last)" in line]
    files = [match[1] for line in lines[starts[-1] :] if (match := _FRAME.match(line))] if starts else []
    return any(not _INSTALLED.search(file) for file in files)


def _killed(run: RunFigures) -> Finding:
    """The process ended without an error. The kernel's out-of-memory killer leaves none, so its counter or the last samples tell."""
    used, limit, tree = _host_at_end(run)
    figures: dict[str, Any] = {"step": run.last_step, "machine_bytes": used, "limit_bytes": limit, "tree_bytes": tree}
    began = say("The process ended without an error message before its first step.") if not run.steps else say("The process ended without an error message after step {step}.", step=f"{run.last_step:,}")  # fmt: skip
    end_of_log = " ".join(
        [*_log_tail(run)[-LAST_LINES:], *([_end_sentence(run)] if run.record.state == "failed" else [])]
    )
    by_kernel = True if _COUNTED in end_of_log else False if _NOT_COUNTED in end_of_log else None
    full = used is not None and limit is not None and used >= NEARLY_FULL * limit
    amounts = {"used": show_bytes(used), "limit": show_bytes(limit)}
    if by_kernel or (full and by_kernel is None):
        sentences = [began]
        if by_kernel:
            sentences.append(say("The kernel's out-of-memory killer ended it: the kernel's counter rose."))
        elif used and limit:
            sentences.append(say("Host RAM was at {used} of {limit} ({share}) shortly before, so the kernel's out-of-memory killer has probably ended it.", share=f"{used / limit:.0%}", **amounts))  # fmt: skip
        return finding(
            1.0, "host-killed", sentences, resource="host", certainty="certain" if by_kernel else "likely", figures=figures,
            evidence="log.txt" if by_kernel else "events.jsonl, sample", fixes=_host_fixes(run, used, limit, tree),
        )  # fmt: skip
    if by_kernel is False:
        sentence = say("The kernel's out-of-memory counter did not rise, so something else killed it.")
    elif used is not None and limit:
        sentence = say(
            "Host RAM was at {used} of {limit} at most in its last minute, so it does not look like the cause.",
            **amounts,
        )
    else:
        sentence = say("Host RAM was not sampled, so it is not known whether the kernel ended it.")
    other = say("A job scheduler, a shutdown or a kill by hand would look the same.")
    kernel = fix(say("Check whether the kernel killed a process"), shell="dmesg -T | grep -i 'killed process'")
    return finding(
        1.0, "run-killed", [began, sentence, other], certainty="certain" if by_kernel is False else "possible", figures=figures,
        evidence="log.txt" if by_kernel is False else "events.jsonl: no `end`",
        fixes=[_resume(run)] if by_kernel is False else [_resume(run), kernel],
    )  # fmt: skip


def _host_at_end(run: RunFigures) -> tuple[int | None, int | None, int | None]:
    """Host RAM in use in the last minute at its highest, the limit, and what the run itself held of it."""
    times = [at for event in (run.record.steps[-1:] + run.record.samples[-1:]) if (at := seconds_at(event)) is not None]
    end = max(times, default=None)
    last = [
        host
        for event, host in run.host_samples_of_all[-20:]
        if end is None or (at := seconds_at(event)) is None or at >= end - LAST_S
    ]
    if last:
        top = max(last, key=lambda host: (whole(host, "machine_bytes") or 0) / (whole(host, "limit_bytes") or 1))
        return whole(top, "machine_bytes"), whole(top, "limit_bytes"), whole(top, "tree_bytes")
    step: Mapping[str, Any] = run.record.last
    return whole(step, "machine_bytes"), whole(run.begin, "ram_limit_bytes"), whole(step, "host_bytes")


def _host_fixes(run: RunFigures, used: int | None, limit: int | None, tree: int | None) -> Iterator[Fix]:
    if tree is not None and used is not None and limit is not None and used - tree > 0.3 * limit:
        yield fix(
            say("Stop other programs on this machine: they held {others}, and the run {own}", others=show_bytes(used - tree), own=show_bytes(tree)),
            saves=show_bytes(used - tree), shell="brimful doctor", basis="measured",
        )  # fmt: skip
    host = part(run.plan, "host")
    workers, predicted = whole(host, "workers"), whole(host, "predicted_bytes")
    if workers:
        yield fix(
            say("Read with fewer workers: {workers} instead of {before}", workers=workers // 2, before=workers),
            costs=say("time to read rows, in each step"), brimful=f"--workers {workers // 2}",
        )  # fmt: skip
    if tree is not None and predicted and tree > 1.25 * predicted:
        yield fix(
            say("Look for what grows: the run held {own}, and the plan predicted {predicted}", own=show_bytes(tree), predicted=show_bytes(predicted)),
            basis="measured",
        )  # fmt: skip
    if limit:
        yield fix(
            say("Set a host limit below the machine's, so that the run reduces its workers in time"),
            brimful=f"--host-limit {math.floor(0.8 * limit / 2**30) or 1}GiB",
        )  # fmt: skip
    yield _resume(run)


def _save_failed(run: RunFigures, saves: list[dict[str, Any]]) -> Finding:
    failed = [event for event in saves if event.get("saved") is False]
    kept = [event["step"] for event in saves if event.get("saved")]
    problem, _, advice = str(failed[-1].get("sentence") or "").partition(" Try: ")
    sentences = [
        say("The checkpoint of step {step} could not be saved.", step=f"{failed[-1]['step']:,}"),
        _sentence(problem),
    ]
    if kept:
        sentences.append(say("The newest one is that of step {step}.", step=f"{kept[-1]:,}"))
    else:
        sentences.append(say("There is no checkpoint to continue from."))
    size = max((number(event, "size_bytes") or 0.0 for event in saves), default=0.0)
    return finding(
        0.85, "save-failed", sentences, resource="disk", figures={"failed": len(failed), "size_bytes": int(size) or None},
        evidence=f"events.jsonl, step {failed[-1]['step']}: checkpoint",
        fixes=[fix(_sentence(advice, end="")) if advice else fix(say("Free space on the disk of the run"), brimful="--keep 1")],
    )  # fmt: skip


NOTHING_WRONG = Diagnosis(
    resource="none", kind="nothing-wrong", cause=say("Nothing is wrong with this run that its figures show."), certainty="likely"
)  # fmt: skip


def events_missing(record: RunRecord) -> Diagnosis | None:
    """A run with checkpoints but without events.jsonl: its figures are lost, not its training."""
    saved = sorted(record.folder.checkpoints.glob("step-*"))
    if record.folder.events.is_file() or not saved:
        return None
    cause = [
        say("The file events.jsonl is missing, so the figures of this run are not known."),
        say("The newest checkpoint is {name}.", name=saved[-1].name),
    ]
    return Diagnosis(
        resource="none",
        kind="events-missing",
        cause=" ".join(cause),
        fixes=(_continue(record),),
        evidence=str(saved[-1]),
    )


def interruption(record: RunRecord) -> Diagnosis | None:
    """A run that was asked to stop, or reached its time limit: it is to be continued."""
    if record.state not in ("interrupted", "time-limit", "patience"):
        return None
    run = RunFigures(record)
    if record.state == "patience":
        return _patience(record, run)
    step, steps = f"{run.last_step:,}", run.steps_in_all
    limit = record.state == "time-limit"
    if steps is None or not run.steps:
        cause = say("The run reached its time limit after step {step}.", step=step) if limit else say("The run was interrupted after step {step}.", step=step)  # fmt: skip
    elif limit:
        cause = say("The run reached its time limit after step {step} of {steps}.", step=step, steps=f"{steps:,}")
    else:
        cause = say("The run was interrupted after step {step} of {steps}.", step=step, steps=f"{steps:,}")
    figures = {"step": run.last_step, "steps": steps}
    return Diagnosis(
        resource="none", kind=record.state, cause=cause, figures=figures, fixes=(_continue(record),), evidence="events.jsonl, end"
    )  # fmt: skip


def _patience(record: RunRecord, run: RunFigures) -> Diagnosis:
    """A run that no longer improved: its best checkpoint is the result, and there is nothing to repair."""
    best = record.of_kind("end")[-1].get("best")
    cause = [say("The run stopped after step {step} because it no longer improved.", step=f"{run.last_step:,}")]
    if best:
        cause.append(say("Its last good checkpoint is {name}.", name=Path(str(best)).name))
    figures = {"step": run.last_step, "steps": run.steps_in_all, "best": best}
    return Diagnosis(
        resource="none", kind="patience", cause=" ".join(cause), figures=figures, evidence="events.jsonl, end"
    )


def _continue(record: RunRecord) -> Fix:
    return fix(say("Continue from the last checkpoint"), shell=record.folder.resume_command)


IMPORTANCE = {"chosen-collapsed": 0.75, "loss-spiked": 0.7, "accuracy-at-chance": 0.6}
"""Of the kinds that `dpo` has (`tasks/preference_signals.py`); of others half as much as a lost run."""


def signal_findings(run: RunFigures) -> Iterator[Finding]:
    """One for each kind, with the step it began at. A checkpoint from before is named as a fix."""
    for note in _first_of_each_kind(run):
        kind, step = str(note["signal"]), int(number(note, "step") or 0)
        problem = str(note.get("sentence") or "").partition(" Try: ")[0].rstrip(".")
        sentences = [
            f"{problem[:1].upper()}{problem[1:]}.",
            say("The run warned of it after step {step}.", step=f"{step:,}"),
        ]
        yield finding(
            IMPORTANCE.get(kind, 0.5), kind, sentences, certainty="likely", figures={"step": step},
            evidence=f"events.jsonl, step {step}: note", fixes=_fixes(run, kind, step),
        )  # fmt: skip


def _first_of_each_kind(run: RunFigures) -> list[Mapping[str, Any]]:
    kinds: dict[str, Mapping[str, Any]] = {}
    for event in run.record.of_kind("note"):
        if event.get("signal"):
            kinds.setdefault(str(event["signal"]), event)
    return list(kinds.values())


def _fixes(run: RunFigures, kind: str, step: int) -> Iterator[Fix]:
    if kind in ("chosen-collapsed", "loss-spiked"):
        yield lower_rate(run)
    if kind == "chosen-collapsed":
        beta = run.task_options.get("beta")
        higher = 2 * beta if isinstance(beta, int | float) and beta > 0 else 0.2
        yield fix(
            say("Keep the model closer to its reference"), costs=say("smaller margins"), brimful=f"--beta {higher:g}"
        )  # fmt: skip
    if kind == "accuracy-at-chance":
        yield fix(say("Look at some pairs: chosen and rejected may be mixed up, or too similar to tell apart"))
        rates = [rate for one in run.steps if (rate := number(one, "lr"))]
        if rates:
            yield fix(say("Try ten times the learning rate, {rate}", rate=f"{10 * max(rates):.1g}"), costs=say("another experiment"), brimful=f"--lr {10 * max(rates):.1g}")  # fmt: skip
    saved = [event["step"] for event in run.record.of_kind("checkpoint") if event.get("saved") and event.get("step")]
    if before := [one for one in saved if one < step and run.record.folder.checkpoints.joinpath(f"step-{one:08}").is_dir()]:  # fmt: skip
        yield fix(say("Use the checkpoint of step {step}, from before the warning", step=f"{before[-1]:,}"))
    if run.options.get("patience") is None:
        yield fix(say("Let the run stop by itself"), brimful="--patience 3")
