"""What can be asked for, and how a limit is divided."""

import pytest

from brimful.data.clean.prepare import Budget, CleanOptions
from brimful.errors import BadOption
from brimful.units import GiB, MiB


@pytest.mark.parametrize(
    ("asked", "said"),
    [
        ({"near": 0.4}, "--near 0.4"),
        ({"near": 1.1}, "--near 1.1"),
        ({"max_bad": -0.1}, "--max-bad -0.1"),
        ({"max_bad": 2}, "--max-bad 2"),
        ({"valid": -1}, "--valid -1"),
        ({"valid": 1.5}, "--valid 1.5: give a share below 1"),
        ({"test": float("nan")}, "--test nan"),
        ({"valid": 0.6, "test": 0.4}, "--valid 0.6 --test 0.4: together they leave no row"),
        ({"min_chars": 0}, "--min-chars 0"),
        ({"max_chars": "12,x"}, "--max-chars 12,x"),
        ({"max_tokens": 5}, "give --tokenizer DIR"),
        ({"tokenizer": "here"}, "give --max-tokens"),
        ({"seed": -1}, "--seed -1"),
        ({"host_limit": "100MiB"}, "--host-limit 100MiB: cleaning needs 384MiB at least"),
        ({"host_limit": "much"}, "--host-limit: 'much' is not a size"),
    ],
    ids=str,
)
def test_a_value_that_cannot_work_is_named_with_its_flag(asked, said):
    with pytest.raises(BadOption) as raised:
        CleanOptions(**asked)
    assert said in str(raised.value)
    assert ";" not in str(raised.value) or "tokens" in str(raised.value) or "size" in str(raised.value)


def test_all_mistakes_are_told_at_once():
    with pytest.raises(BadOption, match=r"--max-chars 0.*; --near 2.*; --valid 1.5.*; --host-limit 1.*; --seed -1"):
        CleanOptions(max_chars=0, near=2, valid=1.5, host_limit=1, seed=-1)


@pytest.mark.parametrize("asked", [{}, {"valid": 0, "test": 0}, {"valid": 1}, {"valid": 5000, "test": 0.5}, {"near": None}, {"near": 1}, {"max_chars": "10,20"}, {"min_chars": 3}, {"host_limit": "384MiB"}], ids=str)  # fmt: skip
def test_a_value_that_can_work_is_taken(asked):
    options = CleanOptions(**asked)
    assert {name: getattr(options, name) for name in asked} == asked


def test_memory_and_patience_do_not_decide_whether_work_is_gone_on_with():
    one = CleanOptions(host_limit="2GiB", max_bad=0.5, overwrite=True, valid=3, test=4)
    assert one.key() == CleanOptions().key()
    for other in ({"seed": 1}, {"near": None}, {"min_chars": 1}, {"max_chars": 1}, {"max_tokens": 1, "tokenizer": "x"}):
        assert CleanOptions(**other).key() != CleanOptions().key()


@pytest.mark.parametrize("limit", [384 * MiB, GiB, 16 * GiB])
def test_what_is_planned_to_be_held_at_once_fits_the_limit(limit):
    for cores in (1, 2, 64):
        budget = Budget.of(limit, cores)
        chunks = (2 * budget.threads + 1) * 40 * MiB
        assert 3 * budget.segment_bytes + chunks < limit
        assert 6 * budget.bucket_bytes < limit and budget.duckdb_bytes < limit
        assert 1 <= budget.threads <= cores
