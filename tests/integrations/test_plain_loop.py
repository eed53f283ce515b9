"""The plain PyTorch loop of the examples survives, and trains what the loop it replaces would have trained."""

import runpy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader

import brimful

EXAMPLE = str(Path(__file__).parents[2] / "examples" / "integrations" / "plain_loop.py")


def test_the_example_survives_and_reports_it(capsys: pytest.CaptureFixture[str]) -> None:
    runpy.run_path(EXAMPLE, run_name="__main__")
    output = capsys.readouterr().out
    assert output.count(": loss ") == output.count("64 rows in") == 16 and "16 of 16 steps, " in output
    assert "out of memory in forward" in output and "micro-batch size restored to 64 rows" in output
    assert ", 0 out-of-memory errors survived" not in output


def train(example: dict[str, Any], memory: Any = None) -> list[torch.Tensor]:
    """Eight steps in float64: through the stepper where there is a limit to lower, as the lines before otherwise."""
    torch.manual_seed(0)
    rows = [torch.arange(start, start + 4 + 5 * (start % 7)) for start in torch.randint(1, 64, (8 * 16,)).tolist()]
    model = nn.Sequential(nn.Embedding(128, 64), nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 128)).double()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    stepper = brimful.Stepper(model, optimizer, example["loss"], collate=example["pad"], clip_norm=1.0)
    for step, batch in enumerate(DataLoader(rows, batch_size=16, collate_fn=list)):
        if memory is not None:
            memory.limit_bytes = (2.5 if step in (2, 5) else 100) * 2**20
            stepper.step(batch)
            continue
        found = example["loss"](model, example["pad"](batch))
        (found.sum / found.count).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
    assert memory is None or stepper.ooms >= 1
    return list(model.parameters())


def test_its_weights_are_those_of_the_lines_it_replaced() -> None:
    example = runpy.run_path(EXAMPLE)
    plain = train(example)
    with brimful.simulated_memory("100MiB") as memory:
        ours = train(example, memory)
    apart = torch.cat([(a - b).flatten() for a, b in zip(plain, ours, strict=True)]).norm()
    assert apart / torch.cat([weight.flatten() for weight in plain]).norm() < 1e-10
