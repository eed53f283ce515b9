"""`brimful why`: logs, standard input and run folders, without torch and without a traceback."""

import io
import json
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest

from brimful.cli.app import main
from brimful.report.why.diagnosis import Diagnosis, Fix
from tests.report.fake_runs import write_run

LOGS = Path(__file__).parents[1] / "logs"
OOM = (LOGS / "guide-002.log").read_text(encoding="utf-8")
SLOW = Diagnosis(resource="none", kind="slow-data", cause="The card waits for data.")
FULL = Diagnosis(
    resource="gpu",
    kind="gpu-out-of-memory",
    cause="A step of 43 rows did not fit.",
    figures={"wanted_bytes": 7},
    fixes=(Fix(title="Use micro-batches of 32 rows", saves="2 GiB", basis="predicted"),),
)


def run(*tokens, capsys):
    code = 0
    try:
        main(["why", *tokens])
    except SystemExit as stop:
        code = stop.code
    captured = capsys.readouterr()
    return code, captured.out, captured.err


@pytest.fixture
def checks(monkeypatch):
    """What the checks of a run find; they have tests of their own."""
    found = SimpleNamespace(found=[SLOW])
    monkeypatch.setattr("brimful.report.why.run_checks.check_run", lambda record: found.found)
    return found


def kinds(out):
    return [diagnosis["kind"] for diagnosis in json.loads(out)["diagnoses"]]


def test_a_log_is_explained(capsys):
    code, out, err = run(str(LOGS / "guide-002.log"), capsys=capsys)
    assert code == 0 and not err
    assert "GPU memory ran out" in out and "PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True" in out


def test_json_has_every_field(capsys):
    _, out, _ = run(str(LOGS / "guide-002.log"), "--json", capsys=capsys)
    (diagnosis,) = json.loads(out)["diagnoses"]
    assert set(diagnosis) == {"resource", "kind", "cause", "certainty", "figures", "evidence", "fixes", "others"}
    assert set(diagnosis["fixes"][0]) == {"title", "saves", "costs", "global_batch", "flags", "basis", "enough"}


def test_a_dash_reads_standard_input(monkeypatch, capsys):
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(OOM.encode())))
    assert kinds(run("-", "--json", capsys=capsys)[1]) == ["gpu-out-of-memory"]


def test_the_log_of_a_failed_run_comes_first(tmp_path, checks, capsys):
    folder = write_run(tmp_path / "a", steps=30, done=20, end="failed")
    (folder / "log.txt").write_text(OOM, encoding="utf-8")
    assert kinds(run(str(folder), "--json", capsys=capsys)[1]) == ["gpu-out-of-memory", "slow-data"]


def test_the_log_of_a_finished_run_comes_last(tmp_path, checks, capsys):
    folder = write_run(tmp_path / "a", steps=30)
    (folder / "log.txt").write_text(OOM, encoding="utf-8")
    assert kinds(run(str(folder), "--json", capsys=capsys)[1]) == ["slow-data", "gpu-out-of-memory"]


def test_what_run_and_log_both_show_is_told_once_with_the_runs_figures(tmp_path, checks, capsys):
    checks.found = [FULL]
    folder = write_run(tmp_path / "a", steps=30, done=20, end="failed")
    (folder / "log.txt").write_text(OOM, encoding="utf-8")
    (diagnosis,) = json.loads(run(str(folder), "--json", capsys=capsys)[1])["diagnoses"]
    assert diagnosis["fixes"][0]["basis"] == "predicted" and diagnosis["figures"]["wanted_bytes"] == 7
    assert diagnosis["figures"]["total_bytes"] > 7 and "OutOfMemoryError" in diagnosis["evidence"]


def test_an_error_that_a_failed_run_survived_is_not_the_one_that_ended_it(tmp_path, checks, capsys):
    checks.found = [replace(FULL, certainty="possible")]
    folder = write_run(tmp_path / "a", steps=30, done=20, end="failed")
    (folder / "log.txt").write_text(OOM, encoding="utf-8")
    first, second = json.loads(run(str(folder), "--json", capsys=capsys)[1])["diagnoses"]
    assert first["certainty"] == "certain" and second["cause"] == FULL.cause


def test_a_run_without_a_log_is_explained_by_its_figures(tmp_path, checks, capsys):
    assert kinds(run(str(write_run(tmp_path / "a", steps=30)), "--json", capsys=capsys)[1]) == ["slow-data"]


def test_a_good_run_is_told_so(tmp_path, checks, capsys):
    checks.found = []
    _, out, _ = run(str(write_run(tmp_path / "a", steps=30)), capsys=capsys)
    assert "Nothing is wrong with this run" in out


def test_a_file_of_a_run_stands_for_it(tmp_path, checks, capsys):
    folder = write_run(tmp_path / "a", steps=30)
    assert kinds(run(str(folder / "events.jsonl"), "--json", capsys=capsys)[1]) == ["slow-data"]


def test_the_runs_plan_tells_what_its_log_does_not(tmp_path, checks, capsys):
    folder = write_run(tmp_path / "a", steps=30, done=20, end="failed")
    message = OOM[OOM.index("torch.OutOfMemoryError") :]
    (folder / "log.txt").write_text(message, encoding="utf-8")
    main_diagnosis = json.loads(run(str(folder), "--json", capsys=capsys)[1])["diagnoses"][0]
    titles = [fix["title"] for fix in main_diagnosis["fixes"]]
    assert any("instead of 43 rows and accumulate" in title for title in titles)
    assert not any("bf16" in title or "expandable" in title for title in titles)


def test_without_an_argument_the_newest_run_is_explained(tmp_path, checks, monkeypatch, capsys):
    write_run(tmp_path / "runs" / "a", steps=30)
    monkeypatch.chdir(tmp_path)
    assert kinds(run("--json", capsys=capsys)[1]) == ["slow-data"]


@pytest.mark.parametrize("name", ["nowhere.log", "not a run"])
def test_a_mistake_is_one_message(tmp_path, checks, capsys, name):
    (tmp_path / "not a run").mkdir()
    code, _, err = run(str(tmp_path / name), capsys=capsys)
    assert code == 2 and re.match(r"brimful: error B\d+: ", err) and "Try: " in err and err.count("\n") == 1


def test_without_runs_an_argument_is_asked_for(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    code, _, err = run(capsys=capsys)
    assert code == 2 and "runs/ has no run" in err


def test_torch_is_not_imported():
    program = f"import sys\nfrom brimful.cli import main\nmain(['why', {str(LOGS / 'guide-002.log')!r}])\nassert not {{'torch', 'numpy', 'transformers'}} & set(sys.modules)"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr


KILLED = "the training process (pid 7) was killed by SIGKILL (not by the kernel's out-of-memory killer)"


BEGUN = "2026-01-31 {time}+00:00 training in runs/a: 1,000 steps on 1 process\n"
KILLED_AND_RESUMED = (
    f"{BEGUN.format(time='09:00:00')}2026-01-31 09:02:01+00:00 {KILLED}\n{BEGUN.format(time='12:00:00')}"
)


def test_the_kill_of_a_run_that_was_resumed_and_finished_is_over(tmp_path, capsys):
    folder = write_run(tmp_path / "a")
    (folder / "log.txt").write_text(KILLED_AND_RESUMED, encoding="utf-8")
    assert kinds(run(str(folder), "--json", capsys=capsys)[1]) == ["nothing-wrong"]


def test_a_message_after_a_resume_is_found_at_its_line(tmp_path, capsys):
    folder = write_run(tmp_path / "a", steps=30, done=20, end="failed")
    (folder / "log.txt").write_text(KILLED_AND_RESUMED + "No space left on device\nOSError: [Errno 28]\n")
    found = json.loads(run(str(folder), "--json", capsys=capsys)[1])["diagnoses"]
    assert found[0]["kind"] == "disk-full" and found[0]["evidence"].startswith("line 4:")
    assert not any(one["kind"] == "killed" for one in [*found, *found[0]["others"]])


def test_a_fix_from_the_log_of_a_run_names_the_run(tmp_path, capsys):
    folder = write_run(tmp_path / "a b", steps=30, done=20, running=True)
    (folder / "log.txt").write_text(f"2026-01-31 09:02:01+00:00 {KILLED}\n", encoding="utf-8")
    killed = json.loads(run(str(folder), "--json", capsys=capsys)[1])["diagnoses"][-1]
    assert killed["fixes"][0]["flags"]["brimful"] == f"brimful train --run '{folder}' --resume"


@pytest.mark.parametrize("with_end", [True, False])
def test_a_kill_that_was_not_the_kernels_is_one_diagnosis(tmp_path, capsys, with_end):
    end = [{"event": "end", "step": 150, "reason": "failed", "sentence": KILLED}]
    folder = write_run(tmp_path / "a", done=150, end=None, checkpoints=[100], more=end if with_end else [])
    (folder / "log.txt").write_text(f"2026-01-31 09:02:01 failed: {KILLED}\n", encoding="utf-8")
    (diagnosis,) = json.loads(run(str(folder), "--json", capsys=capsys)[1])["diagnoses"]
    assert diagnosis["kind"] == "run-killed" and "something else killed it" in diagnosis["cause"]
    assert diagnosis["fixes"][0]["flags"]["shell"].endswith("--resume")


def test_the_advice_of_an_error_names_flags(tmp_path, capsys):
    sentence = "row 4 of step 2 cannot be split and needs about 21 GiB (predicted). Try: a larger memory_limit=."
    end = {"event": "end", "step": 150, "reason": "failed", "sentence": sentence}
    _, out, _ = run(str(write_run(tmp_path / "a", done=150, end=None, more=[end])), capsys=capsys)
    assert "1. A larger --memory-limit\n" in re.sub(" +\n", "\n", out)


def test_a_run_that_failed_of_nan_has_one_diagnosis(tmp_path, capsys):
    sentence = "the gradient norm is nan in step 30, 6 consecutive steps skipped. Try: a lower learning rate."
    folder = write_run(
        tmp_path / "a", steps=60, done=30, end=None, checkpoints=[20], step_values={"loss": lambda n: 2.0 if n < 25 else float("nan")},
        more=[{"event": "end", "step": 30, "reason": "failed", "sentence": sentence}],
    )  # fmt: skip
    (folder / "log.txt").write_text("step 30: loss nan\nfailed: " + sentence + "\n", encoding="utf-8")
    (diagnosis,) = json.loads(run(str(folder), "--json", capsys=capsys)[1])["diagnoses"]
    assert diagnosis["kind"] == "nan-loss" and "The run failed after step 30." in diagnosis["cause"]
    titles = [fix["title"] for fix in diagnosis["fixes"]]
    assert sum("learning rate" in title for title in titles) == 1
    assert not any("Continue" in title or "bf16" in title for title in titles)


@pytest.mark.parametrize("log", ["", "Traceback (most recent call last):\nKeyboardInterrupt\n"])
def test_an_interrupted_run_is_told_so_with_the_resume_command(tmp_path, capsys, log):
    folder = write_run(tmp_path / "a", steps=3000, done=92, end="interrupted", checkpoints=[92])
    (folder / "log.txt").write_text(log, encoding="utf-8")
    _, out, _ = run(str(folder), capsys=capsys)
    assert "The run was interrupted after step 92 of 3,000." in out and "--resume" in out
    assert "Nothing" not in out and "was stopped" not in out


def test_a_healthy_run_has_a_fitting_heading(tmp_path, capsys):
    _, out, _ = run(str(write_run(tmp_path / "a")), capsys=capsys)
    assert out.startswith("Nothing wrong\n")


def test_a_run_without_its_events_names_its_checkpoint(tmp_path, capsys):
    folder = write_run(tmp_path / "a", done=150, end=None)
    (folder / "events.jsonl").unlink()
    (folder / "checkpoints" / "step-00000100").mkdir(parents=True)
    (diagnosis,) = json.loads(run(str(folder), "--json", capsys=capsys)[1])["diagnoses"]
    assert "events.jsonl is missing" in diagnosis["cause"] and "step-00000100" in diagnosis["cause"]


def test_two_logs_are_refused_in_a_sentence_of_our_own(capsys):
    code, _, err = run("a.log", "b.log", capsys=capsys)
    assert code == 2 and "reads one log or run, not 2" in err and "Unused" not in err


def test_diagnose_refuses_what_is_no_log():
    import brimful
    from brimful.errors import BadOption

    with pytest.raises(BadOption, match="not int"):
        brimful.diagnose(5)


def test_frameworks_that_share_a_setting_stand_on_one_line(capsys):
    _, out, _ = run(str(LOGS / "torch-cpu.log"), capsys=capsys)
    assert "accelerate, lightning" in out
