"""What the README shows can be typed."""

import json
import re
from pathlib import Path

from brimful.cli.app import main

README = (Path(__file__).parents[1] / "README.md").read_text()
GUIDE = (Path(__file__).parents[1] / "docs" / "step.md").read_text()


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


def blocks(text):
    return re.findall(r"```python\n(.*?)```", text, re.DOTALL)


def test_the_readmes_stepper_trains_the_readmes_task(capsys):
    import torch

    import brimful

    names = {"brimful": brimful}
    exec(next(code for code in blocks(README) if "(Task)" in code), names)
    task = names["task"]
    model = task.model()
    rows = [{"ids": torch.randint(0, 1000, (8,))} for _ in range(6)]
    names.update(model=model, optimizer=torch.optim.SGD(model.parameters(), lr=0.1), plan=None, loader=[rows, rows])
    exec(next(code for code in blocks(README) if "stepper.step" in code), names)
    assert len(capsys.readouterr().out.splitlines()) == 2


def test_the_guides_first_loop_runs():
    import torch

    model = torch.nn.Linear(3, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    loader = torch.utils.data.DataLoader(
        torch.utils.data.TensorDataset(torch.randn(8, 3), torch.randn(8, 1)), batch_size=4
    )
    scheduler = torch.optim.lr_scheduler.ConstantLR(optimizer)
    names = {"model": model, "optimizer": optimizer, "loader": loader, "scheduler": scheduler}
    before = model.weight.detach().clone()
    exec(blocks(GUIDE)[0], names)
    assert names["stepper"].steps == 2 and not torch.equal(before, model.weight)


def test_the_training_guides_own_task_trains_from_python(tmp_path, monkeypatch, capsys):
    from_python, own_task = blocks((Path(__file__).parents[1] / "docs" / "train.md").read_text())
    (tmp_path / "mine.py").write_text(own_task)
    for name in ("rows", "valid"):
        texts = [{"prompt": f"{name} {number}"} for number in range(40)]
        (tmp_path / f"{name}.jsonl").write_text("\n".join(map(json.dumps, texts)))
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    exec(from_python, {})
    assert capsys.readouterr().out.splitlines()[-1].startswith("finished 20 ")
    assert (tmp_path / "runs" / "api" / "best" / "model.safetensors").is_file()


def test_every_file_the_readme_names_is_there():
    for path in re.findall(r"\]\(([\w/.]+)\)", README):
        assert (Path(__file__).parents[1] / path).exists(), path
