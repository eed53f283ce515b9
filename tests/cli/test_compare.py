"""`brimful compare` from the shell."""

import json
import re
import subprocess
import sys

import pytest

from tests.cli.test_cli import run
from tests.report.fake_runs import write_run


def test_the_verdict_comes_first(tmp_path, capsys):
    a, b = write_run(tmp_path / "a"), write_run(tmp_path / "b")
    code, out, _ = run("compare", str(a), str(b), capsys=capsys)
    assert code == 0
    assert out.startswith("The same settings, losses equal to the bit up to step 300")


def test_the_command_that_goes_back_is_one_line(tmp_path, capsys):
    a, b = (
        write_run(tmp_path / "a", request={"options": {f"x{n}": "y" * 20 for n in range(9)}}),
        write_run(tmp_path / "b"),
    )
    _, out, _ = run("compare", str(a), str(b), capsys=capsys)
    assert out.splitlines()[-1].startswith("brimful train sft rows.parquet --plan ")


def test_json_is_one_object_in_english(tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("BRIMFUL_LANG", "zh")
    _, out, _ = run("compare", str(write_run(tmp_path / "a")), str(write_run(tmp_path / "b")), "--json", capsys=capsys)
    assert json.loads(out)["verdict"].startswith("the same settings")


@pytest.mark.parametrize("words", [[], ["nowhere", "neither"]])
def test_a_mistake_is_one_sentence(words, capsys):
    code, _, err = run("compare", *words, capsys=capsys)
    assert code == 2
    assert re.match(r"brimful: error B\d+: ", err)
    assert len(err.splitlines()) == 1


def test_torch_is_not_imported(tmp_path):
    runs = [str(write_run(tmp_path / name)) for name in "ab"]
    script = f"import sys, brimful.cli\nbrimful.cli.main(['compare', *{runs}])\nassert 'torch' not in sys.modules"
    process = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert process.returncode == 0, process.stderr
