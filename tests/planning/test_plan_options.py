"""Every problem of the options is named at once, with its argument."""

import pytest

from brimful.errors import BadOption
from brimful.planning.plan_options import PlanOptions


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"global_batch": 0}, "global_batch=0 must be a whole number of at least 1"),
        ({"global_batch": -4}, "global_batch=-4"),
        ({"global_batch": "40"}, "global_batch='40'"),
        ({"micro_batch": 0}, "micro_batch=0"),
        ({"processes": 0}, "processes=0"),
        ({"fill": 0}, "fill=0"),
        ({"fill": 1.2}, "fill=1.2"),
        ({"fill": "high"}, "fill='high'"),
        ({"memory_limit": "lots"}, "memory_limit='lots' must be a positive size"),
        ({"host_limit": "0GiB"}, "host_limit='0GiB'"),
        ({"weights": "fp8"}, "weights='fp8' must be one of fp32, bf16"),
        (
            {"weights": "bf16", "precision": "fp32"},
            "weights='bf16' cannot be combined with precision='fp32'. Try: precision='bf16'",
        ),
        ({"checkpointing": "maybe"}, "checkpointing='maybe' must be one of auto, off, every-3, every-2, on"),
        ({"precision": "int4"}, "precision='int4'"),
        ({"lengths": (0, 5)}, "lengths=(0, 5)"),
        ({"lengths": 32}, "lengths=32 must be whole numbers of at least 1. Try: lengths=(256, 256)."),
        ({"global_batch": 2, "processes": 3}, "gives 3 processes less than a row each"),
        ({"cache": "no"}, "cache='no' must be True or False"),
        ({"workers": -1}, "workers=-1 must be a whole number of at least 0"),
        ({"workers": True}, "workers=True must be a whole number"),
        ({"prefetch": 0}, "prefetch=0 must be a whole number of at least 1"),
        ({"pin_memory": "maybe"}, "pin_memory='maybe' must be one of auto, on, off"),
    ],
)
def test_a_wrong_value_is_named(options, message):
    with pytest.raises(BadOption) as caught:
        PlanOptions(**options)
    assert message in str(caught.value)


def test_all_problems_at_once():
    with pytest.raises(BadOption) as caught:
        PlanOptions(global_batch=0, fill=2.0)
    assert "global_batch=0" in str(caught.value) and "fill=2.0" in str(caught.value)
