"""The tables of an estimate."""

import io
import re
from dataclasses import replace

import pytest
import torch
from rich.console import Console
from torch import nn

import brimful
from brimful.report.estimate_table import estimate_table


class Wide(brimful.Task):
    global_batch = 512

    def model(self):
        return nn.Sequential(nn.Linear(512, 2048), nn.ReLU(), nn.Linear(2048, 512))

    def dummy(self, rows, shape):
        return torch.zeros(rows, 512)

    def loss(self, model, batch):
        return model(batch).square().mean()


@pytest.fixture(scope="module")
def estimate():
    return brimful.estimate(Wide(), gpu="RTX 3060", levers=False, quiet=True)


def shown(estimate, width=120) -> str:
    console = Console(file=io.StringIO(), width=width)
    console.print(estimate_table(estimate))
    return console.file.getvalue()


def test_the_headline_comes_first(estimate):
    assert shown(estimate).startswith(estimate.headline[:60])


def test_the_bar_is_a_share_of_what_torch_may_reserve(estimate):
    used = estimate.peak_reserved_bytes / estimate.limit_bytes
    assert f"{used:.0%} safe" in shown(estimate)


def test_the_peak_says_both_ways_of_reserving(estimate):
    text = shown(estimate, width=200)
    assert "without expandable segments" in text and "allocated" in text and "reserved" in text


def test_shares_of_kinds_add_up_to_all(estimate):
    shares = re.findall(r"iB +(\d+)%$", "\n".join(map(str.rstrip, shown(estimate).splitlines())), re.MULTILINE)
    assert sum(map(int, shares)) == pytest.approx(100, abs=4)


def test_a_setting_that_does_not_fit_says_what_it_needs(estimate):
    broken = replace(
        estimate.fit, largest=0, recommended=0, accumulation=0, at_recommended=None, change="precision=fp32"
    )
    text = shown(replace(estimate, levers=(broken,)))
    assert "--precision fp32" in text and "does not fit" in text and "≥" in text


def test_an_estimate_that_does_not_fit_is_shown(estimate):
    nothing = replace(estimate.fit, largest=0, recommended=0, accumulation=0, at_recommended=None)
    assert "does not fit" in shown(replace(estimate, fit=nothing, fits=False))


def test_what_would_make_it_fit_is_named_at_the_top(estimate):
    nothing = replace(estimate.fit, largest=0, recommended=0, accumulation=0, at_recommended=None)
    levers = tuple(replace(estimate.fit, change=change) for change in ("lora=r=16 load_in=4bit", "weights=bf16"))
    text = shown(replace(estimate, fit=nothing, fits=False, levers=levers))
    assert "would fit with: --lora r=16 --load-in 4bit, or --weights bf16" in text
    assert "would fit with" not in shown(replace(estimate, levers=levers))


def test_levers_that_are_not_offered_and_other_kernels_are_shown(estimate):
    kernel = replace(estimate.fit, change="plain attention")
    text = shown(
        replace(estimate, levers=(kernel,), not_offered=("chunked loss: the task has none",), kernels=(kernel,))
    )
    assert "not offered: chunked loss: the task has none" in text and "plain attention" in text


def test_memory_without_a_card_has_no_line_about_a_card():
    result = brimful.estimate(Wide(), memory="8GiB", levers=False, quiet=True)
    assert "a card with 8 GiB" in shown(result) and "of which the CUDA context" not in shown(result)


@pytest.mark.parametrize("width", [60, 80, 200])
def test_no_line_is_wider_than_the_terminal(estimate, width):
    assert all(len(line) <= width for line in shown(estimate, width).splitlines())
