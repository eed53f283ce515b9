"""`brimful doctor` as a command: what it prints and how it exits."""

import json
import subprocess
import sys

import pytest

from brimful.cli.app import main
from brimful.languages import say
from brimful.report.doctor.checks import Check, Examination


@pytest.fixture
def doctor(monkeypatch, capsys):
    """Run the command over checks of these statuses."""

    def run(*statuses, tokens=()):
        def examine(**options):
            run.options = options
            checks = [Check(group="Host", name="RAM", status=one, text=say("x"), fix=say("more")) for one in statuses]
            return Examination(checks=tuple(checks), seconds=1.0)

        monkeypatch.setattr("brimful.report.doctor.examine.examine", examine)
        try:
            main(["doctor", *tokens])
            code = 0
        except SystemExit as left:
            code = left.code
        return code, capsys.readouterr()

    return run


def test_a_failure_exits_with_1(doctor):
    code, output = doctor("ok", "failed")
    assert code == 1 and "✗ RAM" in output.out and "Try: more" in output.out


def test_warnings_exit_with_0(doctor):
    assert doctor("ok", "warning", "not checked")[0] == 0


def test_json_is_one_object_and_nothing_else(doctor):
    code, output = doctor("failed", tokens=["--json"])
    assert code == 1 and json.loads(output.out)["counts"] == {"ok": 0, "warning": 0, "failed": 1, "not_checked": 0}


def test_flags_reach_the_examination(doctor, tmp_path):
    doctor("ok", tokens=["--run", str(tmp_path), "--data", "rows", "--timeout", "7"])
    options = doctor.options
    assert (options["run"], options["data"], options["timeout_s"]) == (tmp_path, "rows", 7.0)


def test_a_time_limit_of_nothing_is_refused(doctor):
    code, output = doctor("ok", tokens=["--timeout", "0"])
    assert code == 2 and "--timeout 0 must be above 0" in output.err


def test_the_doctor_itself_does_not_import_torch():
    code = "import sys, brimful.report.doctor.examine, brimful.report.doctor.checks; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0
