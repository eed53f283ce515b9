"""What a task has warned of, as `brimful why` names it."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from brimful.report.run_record import RunRecord
from brimful.report.why.diagnosis import TITLES
from brimful.report.why.run_checks import check_run, interruption
from brimful.tasks.preference_signals import AT_CHANCE, COLLAPSED, SPIKED
from tests.report.fake_runs import write_run

COLLAPSE = {"event": "note", "step": 40, "level": "warning", "signal": COLLAPSED,
            "sentence": "the log-probability of chosen replies has fallen. Try: a lower lr="}  # fmt: skip


def kinds(run: Path) -> list[str]:
    return [one.kind for one in check_run(RunRecord(run))]


def written(tmp_path: Path, *events: Mapping[str, object], **how: Any) -> Path:
    return write_run(tmp_path / "run", steps=60, more=events, **how)


def test_a_warning_is_a_finding_with_its_step_and_what_helps(tmp_path: Path) -> None:
    run = written(tmp_path, COLLAPSE, {**COLLAPSE, "step": 50})
    (found,) = [one for one in check_run(RunRecord(run)) if one.kind == COLLAPSED]
    assert found.cause.startswith("The log-probability of chosen replies has fallen.") and "step 40" in found.cause
    flags = [fix.flags.get("brimful") for fix in found.fixes]
    assert "--beta 0.2" in flags and "--patience 3" in flags and any(one and one.startswith("--lr") for one in flags)


def test_every_kind_has_a_title() -> None:
    assert {COLLAPSED, SPIKED, AT_CHANCE} <= TITLES.keys()


def test_a_run_without_warnings_has_none(tmp_path: Path) -> None:
    assert not {COLLAPSED, SPIKED, AT_CHANCE} & set(kinds(written(tmp_path)))


def test_a_run_that_stopped_by_itself_names_its_best_checkpoint(tmp_path: Path) -> None:
    best = "/runs/a/checkpoints/step-00000030"
    end = {"event": "end", "reason": "patience", "step": 60, "best": best, "sentence": "stopped"}
    stopped = interruption(RunRecord(written(tmp_path, end, end=None)))
    assert stopped is not None and stopped.kind == "patience" and "step-00000030" in stopped.cause and not stopped.fixes
