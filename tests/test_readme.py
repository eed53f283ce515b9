"""The READMEs say the same in both languages, and everything they show runs."""

import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import brimful

ROOT = Path(__file__).parents[1]
ENGLISH, CHINESE = ((ROOT / name).read_text(encoding="utf-8") for name in ("README.md", "README.zh-CN.md"))


def blocks(text: str, language: str) -> list[str]:
    """The fenced blocks of one language; every second fence closes one."""
    parts = re.split(r"^```(\w*)\n", text, flags=re.MULTILINE)
    return [code for kind, code in zip(parts[1::4], parts[2::4], strict=True) if kind == language]


def commands(text: str) -> list[str]:
    lines = "".join(blocks(text, "console")).splitlines()
    return [line.removeprefix("$ ").split("  #")[0].strip() for line in lines if line.startswith("$ ")]


@pytest.fixture(scope="module")
def desk(tmp_path_factory):
    """A folder with the README's task and rows for it."""
    folder = tmp_path_factory.mktemp("readme")
    (task,) = blocks(ENGLISH, "python")
    (folder / "mine.py").write_text(task)
    (folder / "rows.txt").write_text("\n".join(f"row {number} of the rows to train on" for number in range(200)))
    return folder


def test_both_languages_show_the_same_commands_and_code():
    assert commands(ENGLISH) == commands(CHINESE)
    for language in ("python", "diff", ""):
        assert blocks(ENGLISH, language) == blocks(CHINESE, language)


def test_both_languages_have_the_same_sections_tables_and_links():
    for pattern in (r"^#+ ", r"^\|", r"^- ", r"\]\([\w/.-]+\)"):
        english, chinese = (re.findall(pattern, text, re.MULTILINE) for text in (ENGLISH, CHINESE))
        drop = {"](README.md)", "](README.zh-CN.md)"}
        assert [one for one in english if one not in drop] == [one for one in chinese if one not in drop]


@pytest.mark.parametrize("text", [ENGLISH, CHINESE], ids=["English", "Chinese"])
def test_every_file_that_is_linked_is_there(text):
    for path in re.findall(r"\]\(([\w/.-]+)\)", text):
        assert (ROOT / path).exists(), path


def test_the_tree_names_the_packages_there_are():
    tree = next(block for block in blocks(ENGLISH, "") if block.startswith("src/brimful/"))
    shown = set(re.findall(r"(\w+)/", tree.split("docs/")[0])) - {"src", "brimful"}
    assert shown == {path.parent.name for path in (ROOT / "src/brimful").glob("*/__init__.py")} - {"recipes"}


def test_the_three_commands_run(desk):
    plan, train = (command for command in commands(ENGLISH) if "mine.py:task" in command)
    for command in (plan, train, "brimful train --run runs/first --resume"):
        done = subprocess.run(
            [sys.executable, "-m", *shlex.split(command)], cwd=desk, capture_output=True, text=True, timeout=300
        )
        assert done.returncode == 0, done.stderr
    assert (desk / "runs/first/model/model.safetensors").is_file()


def test_the_adoption_diff_trains_as_the_loop_it_replaces():
    (diff,) = blocks(ENGLISH, "diff")
    before = "\n".join(line[1:] for line in diff.splitlines() if not line.startswith("+"))
    after = "\n".join(line[1:] for line in diff.splitlines() if not line.startswith("-"))
    results = []
    for code in (before, after):
        torch.manual_seed(0)
        model = torch.nn.Linear(3, 1).double()
        names = {
            "brimful": brimful,
            "torch": torch,
            "model": model,
            "optimizer": torch.optim.SGD(model.parameters(), lr=0.1),
            "loader": [torch.randn(8, 3).double() for _ in range(3)],
            "loss": lambda model, batch: model(batch).square().mean(),
        }
        exec(code, names)
        results.append(model.weight.detach())
    assert torch.allclose(*results, atol=1e-12, rtol=0)


@pytest.mark.parametrize("text", [ENGLISH, CHINESE], ids=["English", "Chinese"])
def test_no_block_is_empty(text):
    parts = re.split(r"^```\w*\n", text, flags=re.MULTILINE)
    assert all(code.strip() for code in parts[1::2])
