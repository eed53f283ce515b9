"""The program and its errors, and the commands `plan` and `machine`."""

import json
import os
import re
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

import pytest

from brimful.cli.app import main
from brimful.cli.output import progress, with_flags

TASK = str(Path(__file__).parents[1] / "planning" / "small.py") + ":Tagger"
LIMIT = ("--memory-limit", "4MiB", "--device", "cpu")


def run(*tokens, capsys):
    """Exit code, stdout and stderr of a command run in this process."""
    code = 0
    try:
        main(list(tokens))
    except SystemExit as stop:
        code = stop.code
    captured = capsys.readouterr()
    return code, captured.out, captured.err


def test_help_does_not_import_torch():
    script = (
        "import sys, brimful.cli\ntry: brimful.cli.main(['--help'])\n"
        "finally: assert not {'torch', 'pyarrow', 'tokenizers', 'transformers'} & set(sys.modules)"
    )
    process = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert process.returncode == 0, process.stderr
    assert "plan" in process.stdout and "machine" in process.stdout


@pytest.mark.parametrize(
    "own, expected",
    [({}, "1000"), ({"GOMP_SPINCOUNT": "7"}, "7"), ({"OMP_WAIT_POLICY": "active"}, "None")],
)
def test_waiting_threads_spin_briefly_unless_the_user_says_otherwise(own, expected):
    """Set before torch loads its OpenMP, which reads it once."""
    script = (
        "import os, sys, brimful.cli\ntry: brimful.cli.main(['--version'])\n"
        "except SystemExit: pass\nprint(os.environ.get('GOMP_SPINCOUNT'), 'torch' in sys.modules)"
    )
    clean = {name: value for name, value in os.environ.items() if name not in ("GOMP_SPINCOUNT", "OMP_WAIT_POLICY")}
    process = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, env={**clean, **own})
    assert process.stdout.split()[-2:] == [expected, "False"]


@pytest.mark.parametrize(
    ("message", "shell"),
    [
        ("fill=2 must be above 0.", "--fill 2 must be above 0."),
        ("micro_batch=-3 and lr=0.1, both", "--micro-batch -3 and --lr 0.1, both"),
        ("from_= needs a folder. Try: run=.", "--from needs a folder. Try: --run."),
        ("memory_limit='3 apples' is wrong", "--memory-limit 3 apples is wrong"),
        ("lengths=(1, 2) must be", "--lengths 1,2 must be"),
        ("Try: allow_inexact=True.", "Try: --allow-inexact."),
        ("run=runs/x.y, then", "--run runs/x.y, then"),
        ("columns='prompt=q,response=a' has", "--columns prompt=q,response=a has"),
        ("such as prompt=q,response=a here", "such as --prompt q,response=a here"),
        ("ecfp bits=1024 has 3, output=x", "ecfp bits=1024 has 3, --output x"),
        ("'ecfp radius=3 counts=true': fill=2", "'ecfp radius=3 counts=true': --fill 2"),
        ("call f(lr=1) or a.b=2 or --lr=3", "call f(lr=1) or a.b=2 or --lr=3"),
    ],
)
def test_arguments_in_messages_become_flags(message, shell):
    assert with_flags(message) == shell


def test_the_flags_of_plan_are_frozen(capsys):
    _, out, _ = run("plan", "sft", "--help", capsys=capsys)
    flags = {word.strip("│ ,[].") for word in out.split() if word.startswith("--")}
    assert flags == {
        "--model", "--lora", "--load-in", "--freeze", "--label-smoothing", "--tokenizer", "--chat-template", "--train-on", "--columns", "--max-bad", "--max-tokens",
        "--global-batch", "--micro-batch", "--memory-limit", "--host-limit", "--fill", "--device", "--processes",
        "--layout", "--compile", "--checkpointing", "--precision", "--weights", "--optimizer", "--cuda-graphs", "--cudnn-attention", "--workers", "--prefetch", "--pin-memory", "--lengths",
        "--allow-inexact", "--deterministic", "--plan-seconds", "--table", "--traceback", "--lang", "--cache", "--no-cache", "--seed", "--config", "--json", "--help",
    }  # fmt: skip


def plan_json(*arguments, capsys):
    code, out, _ = run("plan", TASK, *LIMIT, "--no-cache", "--json", *arguments, capsys=capsys)
    assert code == 0
    return json.loads(out)


def choice(plan, name):
    return next(one for one in plan["choices"] if one["name"] == name)


def test_a_plan_counts_the_state_of_the_optimizer_requested(capsys):
    fixed = {}
    for name in ("adamw", "adafactor"):
        plan = plan_json("--optimizer", name, "--micro-batch", "1", capsys=capsys)
        assert choice(plan, "optimizer")["requested"] == name
        fixed[name] = plan["measured_peak_bytes"]
    weights = 4 * (100 * 64 + 2 * (64 * 64 + 64) + 64 * 100 + 100)
    assert fixed["adamw"] - fixed["adafactor"] > 1.5 * weights  # of 2, which adamw keeps


def test_a_plan_follows_the_optimizer_of_a_config_file(tmp_path, capsys):
    (tmp_path / "mine.toml").write_text('optimizer = "adafactor"')
    plan = plan_json("--config", str(tmp_path / "mine.toml"), capsys=capsys)
    assert choice(plan, "optimizer")["effective"] == "adafactor at 0.0001"


def test_bf16_weights_from_the_command_line(capsys):
    plan = plan_json("--weights", "bf16", capsys=capsys)
    assert (plan["levers"]["weights"], plan["levers"]["precision"]) == ("bf16", "bf16")


def test_plan_prints_one_json_object(capsys):
    code, out, _ = run("plan", TASK, *LIMIT, "--json", capsys=capsys)
    plan = json.loads(out)
    assert code == 0
    assert {
        "task", "device", "limit_bytes", "fill", "global_batch", "micro_batch", "largest_micro_batch", "accumulation",
        "processes", "deal", "memory_model", "predicted_peak_bytes", "measured_peak_bytes", "reserved_peak_bytes",
        "rows_per_s", "ooms", "probes", "plan_s", "levers", "host", "choices",
    } <= set(plan)  # fmt: skip
    assert {"checkpointing", "precision", "cudnn_attention"} <= set(plan["levers"])
    assert set(plan["host"]) == {"workers", "prefetch", "pin_memory", "predicted_bytes", "limit_bytes"}
    assert all(
        set(choice) == {"name", "requested", "effective", "reason", "basis", "source"} for choice in plan["choices"]
    )


def test_plan_compares_what_it_tried_in_a_table(capsys):
    _, out, _ = run("plan", TASK, *LIMIT, "--table", capsys=capsys)
    lines = [line.split() for line in out.splitlines()]
    assert ["setting", "micro-batch", "accum.", "peak", "rows/s", "1,000", "steps"] in lines
    assert sum(line[:3] == ["→", "padded", "fp32"] for line in lines) == 1
    _, out, _ = run("plan", TASK, *LIMIT, "--table", "--json", capsys=capsys)
    settings = {one["setting"]["checkpointing"] for one in json.loads(out)["tried"]}
    assert settings == {"on", "off"}


def test_plan_prints_a_table_and_its_progress(capsys):
    code, out, err = run("plan", TASK, *LIMIT, capsys=capsys)
    assert code == 0
    assert "safe" in out and "micro batch" in out and "reason" in out
    assert "plan tagger: " in err


def test_a_count_is_printed_once_in_a_while_and_each_kind_of_work_at_once(capsys):
    with progress("plan mine") as update:
        for done in range(512, 20_000, 512):
            update(f"read the lengths of rows: {done:,} of 24,000")
        update("probe 1 row of 64")
        update("probe 2 rows of 64")
    assert capsys.readouterr().err.splitlines() == [
        "plan mine: read the lengths of rows: 512 of 24,000",
        "plan mine: probe 1 row of 64",
        "plan mine: probe 2 rows of 64",
    ]


def test_the_last_line_of_a_count_is_where_it_ended(capsys):
    with progress("export") as update:
        for done in range(1, 21):
            update(f"tensors written: {done} of 20")
    assert capsys.readouterr().err.splitlines() == [
        "export: tensors written: 1 of 20",
        "export: tensors written: 20 of 20",
    ]


def test_a_count_that_was_broken_off_does_not_end_it(capsys):
    with suppress(ValueError), progress("export") as update:
        update("tensors written: 1 of 20")
        update("tensors written: 2 of 20")
        raise ValueError
    assert capsys.readouterr().err.splitlines() == ["export: tensors written: 1 of 20"]


def test_a_config_file_is_read_and_flags_win(tmp_path, capsys):
    config = tmp_path / "plan.toml"
    config.write_text('memory-limit = "4MiB"\ndevice = "cpu"\n[plan]\nglobal_batch = 12\nfill = 0.5\n')
    _, out, _ = run("plan", TASK, "--config", str(config), "--global-batch", "20", "--json", capsys=capsys)
    plan = json.loads(out)
    assert (plan["global_batch"], plan["fill"], plan["limit_bytes"]) == (20, 0.5, 4 * 2**20)


@pytest.mark.parametrize(
    ("tokens", "message"),
    [
        (["nope"], "there is no task 'nope'"),
        (["chatlm-sf"], "Try: sft"),
        (["missing.py:task"], "there is no file missing.py"),
        ([TASK.replace("Tagger", "Nope")], "has no 'Nope'"),
        ([TASK, "--global-batch", "0"], "--global-batch 0"),
        ([TASK, "--memory-limit", "100KiB"], "--memory-limit"),
        ([TASK, "--memory-limit", "many"], "--memory-limit many must be a positive size"),
        ([TASK, "--device", "gpu"], "--device gpu"),
        ([TASK, "--lengths", "a,b"], "--lengths a,b"),
        ([TASK, "--lengths", "1,2"], "--lengths 1,2 must have 1 number for task"),
        ([TASK, "--micro-batch", "lots"], "--micro-batch lots must be a whole number or auto."),
        ([TASK, "--micro-batch", "3.7"], "--micro-batch 3.7 must be a whole number or auto."),
        ([TASK, "--fill", "lots"], "--fill lots must be a number."),
        ([TASK, "--config", "nope.toml"], "nope.toml"),
        ([TASK, "--checkpointing", "perhaps"], "perhaps"),
        ([TASK, "some.data"], "some.data"),
        (["sft", "--model", "huge"], "chatlm-tiny"),
        (["sft"], "sft needs a model to fine-tune, and --model is missing"),
        ([], "TASK"),
    ],
    ids=lambda value: value[-1][-24:] if isinstance(value, list) and value else "none",
)
def test_a_mistake_is_one_message_and_exit_code_2(tokens, message, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    code, out, err = run("plan", *tokens, *(["--device", "cpu"] if "--device" not in tokens and tokens else []), capsys=capsys)  # fmt: skip
    last = err.strip().splitlines()[-1]
    assert code == 2 and not out
    assert re.match(r"brimful: error B\d{3}: ", last) and message in last
    assert "Traceback" not in err
    assert not list(tmp_path.iterdir()), "it left something behind"


@pytest.mark.parametrize("by", ["flag", "variable"])
def test_the_traceback_of_a_tasks_own_bug_is_shown_on_request(tmp_path, capsys, monkeypatch, by):
    monkeypatch.delenv("BRIMFUL_TRACEBACK", raising=False)
    (tmp_path / "broken.py").write_text("1 / 0\n")
    spec = f"{tmp_path / 'broken.py'}:task"
    _, _, err = run("plan", spec, "--device", "cpu", capsys=capsys)
    assert "ZeroDivisionError" in err and "Traceback" not in err and "Add --traceback" in err
    monkeypatch.setenv("BRIMFUL_TRACEBACK", "0" if by == "flag" else "1")
    _, _, err = run("plan", spec, *["--traceback"] * (by == "flag"), "--device", "cpu", capsys=capsys)
    assert "Traceback" in err and "1 / 0" in err


def test_what_a_task_prints_stays_out_of_the_json(tmp_path, capsys):
    (tmp_path / "loud.py").write_text(
        "from tests.planning.small import Tagger\nclass Loud(Tagger):\n    def model(self):\n        print('hello')\n"
        "        return super().model()\n"
    )
    _, out, err = run("plan", f"{tmp_path / 'loud.py'}:Loud", *LIMIT, "--json", capsys=capsys)
    assert json.loads(out)["task"] == "Loud"
    assert "hello" in err


def test_a_closed_pipe_is_no_error():
    command = f"{sys.executable} -m brimful machine --json | head -c 10"
    process = subprocess.run(command, shell=True, capture_output=True, text=True)
    assert process.stdout.startswith('{"')
    assert "Traceback" not in process.stderr


def test_machine_prints_json(capsys):
    code, out, _ = run("machine", "--json", capsys=capsys)
    assert code == 0
    assert {"gpus", "host", "disk"} <= set(json.loads(out))


def test_machine_prints_a_table(capsys):
    _, out, _ = run("machine", capsys=capsys)
    assert "RAM" in out and "cores" in out


def test_the_text_of_an_error_in_the_users_own_code_keeps_its_words(tmp_path, capsys):
    """`dim=7` there is no flag of Brimful."""
    file = tmp_path / "mine.py"
    file.write_text(
        "import brimful\n\n\nclass Net(brimful.Task):\n    def model(self):\n        raise ValueError('dim=7 needs heads=2')\n\n\ntask = Net()\n"
    )
    with pytest.raises(SystemExit):
        main(["plan", f"{file}:task", "--memory-limit", "64MiB", "--no-cache"])
    assert "ValueError: dim=7 needs heads=2" in capsys.readouterr().err
