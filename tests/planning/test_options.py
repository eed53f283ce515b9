"""Every problem of what was asked is named at once, with its flag and the fix."""

import pytest

from brimful.errors import BadOption
from brimful.planning.plan_options import PlanOptions


@pytest.mark.parametrize(
    ("asked", "said"),
    [
        ({"global_batch": 0}, "--global-batch 0: give a whole number of at least 1"),
        ({"global_batch": -4}, "--global-batch -4"),
        ({"micro_batch": 0}, "--micro-batch 0"),
        ({"processes": 0}, "--processes 0"),
        ({"fill": 0}, "--fill 0"),
        ({"fill": 1.2}, "--fill 1.2"),
        ({"memory_limit": "lots"}, "--memory-limit: 'lots' is not a size"),
        ({"host_limit": "0GiB"}, "--host-limit"),
        ({"checkpointing": "maybe"}, "--checkpointing maybe: one of auto, on, off"),
        ({"precision": "int4"}, "--precision int4"),
        ({"lengths": (0, 5)}, "--lengths 0,5"),
        ({"global_batch": 2, "processes": 3}, "3 processes need at least a row each"),
        ({"batch": 3}, "unknown option 'batch'"),
        ({"fill": "high"}, "--fill 'high'"),
        ({"lengths": 32}, "--lengths 32: give a tuple"),
        ({"cache": "no"}, "--cache 'no': give true or false"),
        ({"global_batch": "40"}, "--global-batch '40'"),
    ],
)
def test_the_sentence(asked, said):
    with pytest.raises(BadOption) as caught:
        PlanOptions.of(asked)
    assert said in str(caught.value)


def test_all_problems_at_once():
    with pytest.raises(BadOption) as caught:
        PlanOptions(**{"global_batch": 0, "fill": 2.0})
    assert "--global-batch" in str(caught.value) and "--fill" in str(caught.value)
