"""The commands as a user types them: their output, their mistakes, their speed."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from brimful.cli.app import main

TASK = str(Path(__file__).parents[1] / "plan" / "small.py") + ":Tagger"


def run(*tokens, capsys):
    """Exit code, stdout, stderr of a command run in this process."""
    code = 0
    try:
        main(list(tokens))
    except SystemExit as stop:
        code = stop.code
    out = capsys.readouterr()
    return code, out.out, out.err


def test_help_does_not_import_torch():
    script = "import sys, brimful.cli; sys.argv = ['brimful', '--help'];\ntry: brimful.cli.main()\nfinally: assert 'torch' not in sys.modules"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "fit" in done.stdout and "machine" in done.stdout


def test_the_flags_are_frozen(capsys):
    _, out, _ = run("plan", "--help", capsys=capsys)
    flags = {word.strip("│ ,[]") for word in out.split() if word.startswith("--")}
    flags -= {"--freeze."}
    assert flags == {
        "--size", "--from", "--freeze", "--global-batch", "--micro-batch", "--memory-limit", "--host-limit", "--fill", "--device",
        "--processes", "--checkpointing", "--precision", "--cudnn-attention", "--workers", "--prefetch", "--pin-memory", "--lengths", "--allow-inexact", "--cache", "--no-cache",
        "--seed", "--config", "--json",
    }  # fmt: skip


def test_fit_prints_one_json_object(capsys):
    code, out, _ = run("plan", TASK, "--memory-limit", "4MiB", "--device", "cpu", "--json", capsys=capsys)
    plan = json.loads(out)
    assert code == 0
    assert {
        "task", "device", "limit_bytes", "fill", "global_batch", "micro_batch", "largest_micro_batch", "accumulation",
        "processes", "deal", "memory_model", "predicted_peak_bytes", "measured_peak_bytes", "reserved_peak_bytes",
        "rows_per_s", "ooms", "probes", "plan_s", "levers", "host", "choices",
    } <= set(plan)  # fmt: skip
    assert set(plan["levers"]) == {"checkpointing", "compile", "chunked_loss", "precision", "cudnn_attention"}
    assert set(plan["host"]) == {"workers", "prefetch", "pin_memory", "predicted_bytes", "limit_bytes"}
    assert all(set(choice) == {"name", "requested", "effective", "reason", "basis"} for choice in plan["choices"])


def test_fit_prints_a_table_and_progress(capsys):
    code, out, err = run("plan", TASK, "--memory-limit", "4MiB", "--device", "cpu", capsys=capsys)
    assert code == 0
    assert "safe" in out and "micro batch" in out and "because" in out
    assert "probe 2 rows of 16" in err


def test_a_config_file_is_read_and_flags_win(tmp_path, capsys):
    config = tmp_path / "fit.toml"
    config.write_text('memory-limit = "4MiB"\ndevice = "cpu"\n[fit]\nglobal_batch = 12\nfill = 0.5\n')
    _, out, _ = run("plan", TASK, "--config", str(config), "--global-batch", "20", "--json", capsys=capsys)
    plan = json.loads(out)
    assert (plan["global_batch"], plan["fill"], plan["limit_bytes"]) == (20, 0.5, 4 * 2**20)


@pytest.mark.parametrize(
    ("tokens", "said"),
    [
        (["nope"], "unknown task 'nope'"),
        (["chatlm-sf"], "did you mean chatlm-sft"),
        (["missing.py:task"], "there is no file missing.py"),
        ([TASK.replace("Tagger", "Nope")], "there is no 'Nope'"),
        ([TASK, "--global-batch", "0"], "--global-batch 0"),
        ([TASK, "--global-batch", "-3"], "--global-batch -3"),
        ([TASK, "--memory-limit", "100KiB"], "give --memory-limit"),
        ([TASK, "--memory-limit", "many"], "not a size"),
        ([TASK, "--device", "gpu"], "--device gpu"),
        ([TASK, "--lengths", "a,b"], "--lengths a,b"),
        ([TASK, "--lengths", "1,2"], "has 1 lengths"),
        ([TASK, "--size", "tiny"], "have a size"),
        ([TASK, "--config", "nope.toml"], "nope.toml"),
        ([TASK, "--checkpointing", "perhaps"], "perhaps"),
        ([TASK, "some.data"], "does not read data"),
        (["chatlm-sft", "--size", "huge"], "tiny, base"),
        ([TASK, "--wrong"], "--wrong"),
        ([], "TASK"),
    ],
    ids=lambda value: value[-1][-24:] if isinstance(value, list) and value else "none",
)
def test_a_mistake_is_one_sentence_and_exit_code_2(tokens, said, capsys):
    code, out, err = run(
        "fit", *tokens, *(["--device", "cpu"] if "--device" not in tokens and tokens else []), capsys=capsys
    )
    sentence = err.strip().splitlines()[-1]
    assert code == 2
    assert not out
    assert said in sentence
    assert "Traceback" not in err
    assert sentence.startswith("brimful: ")


def test_what_a_task_prints_stays_out_of_the_json(tmp_path, capsys):
    (tmp_path / "loud.py").write_text(
        "from tests.planning.small import Tagger\nclass Loud(Tagger):\n    def model(self):\n        print('hello')\n"
        "        return super().model()\n"
    )
    _, out, err = run(
        "fit", f"{tmp_path / 'loud.py'}:Loud", "--memory-limit", "4MiB", "--device", "cpu", "--json", capsys=capsys
    )
    assert json.loads(out)["task"] == "Loud"
    assert "hello" in err


def test_a_reader_that_has_seen_enough_is_no_error():
    command = f"{sys.executable} -m brimful plan {TASK} --memory-limit 4MiB --device cpu --json | head -c 10"
    done = subprocess.run(command, shell=True, capture_output=True, text=True)
    assert done.stdout.startswith('{"task"')
    assert "Traceback" not in done.stderr


def test_a_mistake_leaves_nothing_behind(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    run("plan", TASK, "--memory-limit", "100KiB", "--device", "cpu", capsys=capsys)
    assert not list(tmp_path.iterdir())


def test_machine_prints_json(capsys):
    code, out, _ = run("machine", "--json", capsys=capsys)
    assert code == 0
    assert {"gpus", "host", "disk"} <= set(json.loads(out))


def test_machine_prints_a_table(capsys):
    _, out, _ = run("machine", capsys=capsys)
    assert "RAM" in out and "cores" in out
