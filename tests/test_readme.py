"""What the README shows can be typed."""

import json
import re
from pathlib import Path

from brimful.cli import main

README = (Path(__file__).parents[1] / "README.md").read_text()


def test_the_readmes_task_can_be_fitted(tmp_path, monkeypatch, capsys):
    (block,) = [code for code in re.findall(r"```python\n(.*?)```", README, re.DOTALL) if "(Task)" in code]
    (tmp_path / "mine.py").write_text(block)
    monkeypatch.chdir(tmp_path)
    (command,) = re.findall(r"\$ brimful (fit mine.py:task .*--json)", README)
    main([*command.split(), "--lengths", "16", "--global-batch", "8", "--device", "cpu"])
    assert json.loads(capsys.readouterr().out)["task"] == "Tagger"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["cache", "mine.py"]


def test_the_readmes_task_has_15_to_25_lines():
    block = next(code for code in re.findall(r"```python\n(.*?)```", README, re.DOTALL) if "(Task)" in code)
    assert 15 <= sum(bool(line.strip()) for line in block.splitlines()) <= 25


def test_every_file_the_readme_names_is_there():
    for path in re.findall(r"\]\(([\w/.]+)\)", README):
        assert (Path(__file__).parents[1] / path).exists(), path
