"""What a batch is predicted to need."""

import pytest

from brimful.planning.plan_options import PlanOptions
from brimful.planning.target import find_target
from brimful.serving.admission import Admission, BatchSize
from tests.serving.engines import generator


@pytest.fixture(scope="module")
def admission(causal):
    admission = Admission(generator(causal), find_target(PlanOptions(device="cpu")), 64, print)
    admission.fit()
    return admission


def test_a_cache_of_fixed_size_counts_in_full_after_rows_left(admission):
    left = BatchSize(held_bytes=1000, fixed=(32, (48,))).with_row((60,))
    full = BatchSize(held_bytes=1000, rows=32, final=(48,))
    assert admission.needed_bytes(left) == admission.needed_bytes(full)


def test_a_prefill_beside_a_graph_finds_what_a_token_takes_reserved(admission):
    launched = BatchSize(held_bytes=1000).with_row((60,), (60,))
    replayed = BatchSize(held_bytes=1000, fixed=(4, (48,))).with_row((60,), (60,))
    assert admission.needed_bytes(replayed) > admission.needed_bytes(launched) + 1000
