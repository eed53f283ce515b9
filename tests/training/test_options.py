"""What may be set on a stepper: checked at once, all problems in one sentence, each with what to write."""

import dataclasses

import pytest

from brimful.errors import BadOption
from brimful.step.interface import StepOptions

WRONG = {
    "no rows at once": ({"micro_batch": 0}, "micro_batch 0: write 1 or more"),
    "fewer than no rows": ({"micro_batch": -3}, "micro_batch -3: write 1 or more"),
    "clipping to nothing": ({"clip_norm": 0.0}, "clip_norm 0.0: write a number above 0, or None for no clipping"),
    "clipping below": ({"clip_norm": -1.0}, "clip_norm -1.0: write a number above 0, or None for no clipping"),
    "clipping to no number": ({"clip_norm": float("nan")}, "clip_norm nan: write a number above 0, or None for no clipping"),
    "clipping to infinity": ({"clip_norm": float("inf")}, "clip_norm inf: write a number above 0, or None for no clipping"),
    "precision": ({"precision": "fp8"}, "precision 'fp8': write one of fp32, bf16, fp16, auto"),
    "rows": ({"rows_are": "mine"}, "rows_are 'mine': write 'global' or 'local'"),
    "skips": ({"skip_nonfinite": -1}, "skip_nonfinite -1: write 0 or more"),
    "growing": ({"grow_after": 0}, "grow_after 0: write 1 or more"),
}  # fmt: skip
GOOD = [
    {},
    {"micro_batch": 1},
    {"clip_norm": 1e-9},
    {"clip_norm": 1},
    {"skip_nonfinite": 0},
    {"grow_after": 1},
    {"rows_are": "local"},
    *({"precision": precision} for precision in ("fp32", "bf16", "fp16", "auto", None)),
]


@pytest.mark.parametrize(("given", "sentence"), WRONG.values(), ids=WRONG.keys())
def test_a_value_out_of_range_is_refused_with_what_to_write(given, sentence):
    with pytest.raises(BadOption) as refused:
        StepOptions(**given)
    assert str(refused.value) == sentence


@pytest.mark.parametrize("given", GOOD, ids=str)
def test_a_value_at_the_edge_of_its_range_is_taken(given):
    options = StepOptions(**given)
    assert {name: getattr(options, name) for name in given} == given


def test_all_problems_are_told_at_once():
    with pytest.raises(BadOption) as refused:
        StepOptions(micro_batch=0, clip_norm=-1.0, rows_are="mine", grow_after=0)
    assert str(refused.value) == (
        "micro_batch 0: write 1 or more; clip_norm -1.0: write a number above 0, or None for no clipping; "
        "rows_are 'mine': write 'global' or 'local'; grow_after 0: write 1 or more"
    )


def test_the_options_and_what_they_are_unless_set():
    """Frozen on purpose: scripts rely on these names."""
    assert {field.name: field.default for field in dataclasses.fields(StepOptions)} == {
        "micro_batch": None,
        "clip_norm": None,
        "precision": None,
        "scaler": None,
        "collate": None,
        "rows_are": "global",
        "skip_oversized": False,
        "allow_inexact": False,
        "skip_nonfinite": 5,
        "grow_after": 10,
        "checkpoint": None,
        "on_event": None,
    }


def test_options_cannot_be_changed_afterwards():
    with pytest.raises(dataclasses.FrozenInstanceError):
        StepOptions().clip_norm = 1.0


def test_options_are_given_by_name():
    with pytest.raises(TypeError):
        StepOptions(8)


@pytest.mark.parametrize(
    "given", [{"micro_batch": "8"}, {"clip_norm": "1"}, {"skip_nonfinite": None}, {"grow_after": None}], ids=str
)
def test_a_value_of_the_wrong_kind_is_refused_with_what_to_write(given):
    with pytest.raises(BadOption):
        StepOptions(**given)


@pytest.mark.parametrize("given", [{"micro_batch": 2.5}, {"grow_after": 1.5}], ids=str)
def test_a_number_that_is_not_whole_is_refused(given):
    with pytest.raises(BadOption):
        StepOptions(**given)
