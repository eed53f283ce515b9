"""`brimful estimate` as a command: what it prints, and how it refuses."""

import json

import pytest

from brimful.cli.app import main

TASK = """
import torch
from torch import nn

from brimful import Loss, Task


class Head(Task):
    worst_shape = (64,)
    global_batch = 32

    def model(self):
        return nn.Sequential(nn.Embedding(100, 64), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 100))

    def dummy(self, rows, shape):
        return torch.ones(rows, *shape, dtype=torch.long)

    def loss(self, model, batch):
        {first}
        losses = nn.functional.cross_entropy(model(batch).flatten(0, 1), batch.flatten(), reduction="sum")
        return Loss(sum=losses, count=batch.numel())


task = Head()
"""


@pytest.fixture
def command(tmp_path, capsys):
    """Run the command on the task above."""

    def run(*tokens, first="pass"):
        (tmp_path / "mine.py").write_text(TASK.replace("{first}", first))
        try:
            main(["estimate", f"{tmp_path / 'mine.py'}:task", *tokens])
            code = 0
        except SystemExit as left:
            code = left.code or 0
        return code, capsys.readouterr()

    return run


def test_json_is_one_object_with_the_names_that_scripts_rely_on(command):
    code, output = command("--gpu", "RTX 4090", "--json", "--no-levers", first="print('hello')")
    content = json.loads(output.out)
    assert code == 0 and content["task"] == "Head" and content["card"]["name"] == "RTX 4090"
    assert content["largest_micro_batch"] == content["recommended_micro_batch"] == 32
    assert 0 < content["peak_allocated_bytes"] <= content["peak_reserved_bytes"]
    assert set(content["kinds"]) >= {"parameters", "optimizer", "activations", "context"}
    assert content["phases"] and content["assumptions"]


def test_the_table_has_headline_phases_kinds_lengths_and_assumptions(command):
    code, output = command("--memory", "24GiB", "--no-levers")
    assert code == 0
    for text in (
        "Head",
        "backward of the loss",
        "activations",
        "parameters",
        "64",
        "48",
        "32",
        "assumed",
        "optimizer: AdamW",
    ):
        assert text in output.out
    assert "predicted" in output.out and "measured" not in output.out


def test_levers_are_shown_as_flags(command):
    code, output = command("--gpu", "RTX 3060")
    assert code == 0
    for flag in ("--precision bf16", "--weights bf16", "--optimizer adafactor"):
        assert flag in output.out


def test_every_card_is_listed(command):
    code, output = command("--gpu", "all", "--no-levers")
    assert code == 0 and all(name in output.out for name in ("RTX 3060", "T4", "H200", "MI300X"))


def test_an_unknown_card_is_one_message_with_near_matches(command):
    code, output = command("--gpu", "RTX 4099")
    assert code == 2 and output.err.count("brimful: error") == 1
    assert "--gpu" in output.err and "RTX 4090" in output.err and "Traceback" not in output.err


def test_without_a_gpu_a_card_must_be_named(command):
    code, output = command()
    assert code == 2 and "--gpu" in output.err and "--memory" in output.err


def test_a_value_that_is_read_is_reported_with_file_and_line(command):
    code, output = command("--gpu", "T4", "--no-levers", first="scale = next(model.parameters()).sum().item()")
    assert code == 0 and "mine.py:19" in output.out


def test_a_mistake_in_the_task_is_one_message(command):
    code, output = command("--gpu", "T4", "--no-levers", first="batch.no_such_thing()")
    assert code == 2 and "no_such_thing" in output.err and "Traceback" not in output.err


def test_a_mistake_in_an_option_names_its_flag(command):
    code, output = command("--gpu", "T4", "--fill", "7")
    assert code == 2 and "--fill" in output.err


def test_sharding_needs_processes(command):
    code, output = command("--gpu", "T4", "--sharding", "fsdp")
    assert code == 2 and "--processes" in output.err


def test_lengths_and_optimizer_are_options(command):
    adamw, adafactor = (
        json.loads(command("--gpu", "T4", "--json", "--no-levers", "--lengths", "32", "--optimizer", name)[1].out)
        for name in ("adamw", "adafactor")
    )
    assert adamw["fit"]["shape"] == [32]
    assert adafactor["phases"]["optimizer"] != adamw["phases"]["optimizer"]


def test_built_in_tasks_are_estimated(capsys):
    main(["estimate", "pretrain", "--model", "causal-tiny", "--gpu", "RTX 4090", "--json", "--no-levers"])
    content = json.loads(capsys.readouterr().out)
    assert content["fit"]["setting"] == "packed bf16" and content["recommended_micro_batch"] > 0


def test_chinese(command):
    code, output = command("--memory", "24GiB", "--no-levers", "--lang", "zh")
    assert code == 0
    for text in ("参数", "优化器", "激活", "损失", "假设"):
        assert text in output.out
    assert "assumed" not in output.out


def test_a_card_that_is_not_known_is_answered_in_chinese(command):
    code, output = command("--gpu", "XYZZY", "--lang", "zh")
    assert code == 2 and "--gpu all，它会列出所有已知的显卡，或 --memory" in output.err


def test_what_is_assumed_names_flags(command):
    _, output = command("--gpu", "all", "--no-levers")
    assert "name another with --gpu" in " ".join(output.out.split())
