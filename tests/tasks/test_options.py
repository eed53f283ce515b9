"""What can be asked of the chat tasks, and what is refused with its flag."""

import subprocess
import sys

import pytest

from brimful.errors import BadOption
from brimful.tasks.chatlm import ChatOptions


def refused(**asked):
    with pytest.raises(BadOption) as told:
        ChatOptions(**asked)
    assert "\n" not in str(told.value)
    return str(told.value)


def test_nothing_has_to_be_asked_for():
    assert ChatOptions().lengths is None


def test_what_can_be_frozen_is_told():
    assert refused(freeze="decoder") == "--freeze decoder: one of encoder+embeddings, encoder, none"


@pytest.mark.parametrize("share", [0, 0.1, 0.99])
def test_a_label_is_smoothed_by_a_share(share):
    assert ChatOptions(label_smoothing=share).label_smoothing == share


@pytest.mark.parametrize("share", [-0.1, 1, 2.0, float("nan"), "0.1", True, None])
def test_what_is_no_share_is_refused(share):
    assert refused(label_smoothing=share) == (
        f"--label-smoothing {share!r}: give a share from 0 to below 1, such as 0.1"
    )


@pytest.mark.parametrize(
    ("given", "lengths"), [(256, (256,)), ("256", (256,)), ("256,320", (256, 320)), (" 128 , 64 ", (128, 64))]
)
def test_lengths_are_one_for_both_sides_or_one_each(given, lengths):
    assert ChatOptions(max_tokens=given).lengths == lengths


@pytest.mark.parametrize("given", [0, -5, "many", "1,2,3", "256,", "", "2.5"])
def test_what_is_no_length_is_refused(given):
    assert refused(max_tokens=given) == (
        f"--max-tokens {given}: give one number of tokens, or one for each side, such as 256,320"
    )


def test_a_digit_that_is_no_number_is_refused():
    refused(max_tokens="2²")


def test_a_loaded_model_has_its_size_already():
    assert refused(size="tiny", from_="model") == (
        "--size tiny: a model that is loaded with --from has its size already"
    )


def test_a_loaded_model_has_no_random_weights():
    assert refused(from_="model", random_weights=True) == "--random-weights: --from gives weights that are not random"


def test_all_mistakes_are_told_at_once():
    told = refused(freeze="x", label_smoothing=2, size="tiny", from_="model", max_tokens="no")
    assert [part.split(" ")[0] for part in told.split("; ")] == [
        "--freeze",
        "--label-smoothing",
        "--size",
        "--max-tokens",
    ]


def test_the_command_line_reads_it_without_torch():
    script = "import sys, brimful.tasks.chatlm; assert 'torch' not in sys.modules"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
