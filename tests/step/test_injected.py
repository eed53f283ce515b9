"""Out of memory at any operation of a step leaves what an undisturbed run leaves.

Weights, optimizer state, buffers, random state, losses and gradient norms have the same bits as in an undisturbed run with
the same split. Where a split may change rounding only (no dropout, BatchNorm or random collate), they are also compared
with the run that was never split: in float64 they are the same to 1e-10.
"""

from itertools import cycle

import pytest

from tests.step.injected import MODELS, OPTIMIZERS, Fault, Figures, check_case, train


@pytest.mark.parametrize(("model", "optimizer"), list(zip(MODELS, cycle(OPTIMIZERS), strict=False)))
def test_ooms_at_drawn_operations_change_nothing(model, optimizer):
    check_case(model, optimizer, seed=0, faults=5, figures=Figures())


@pytest.mark.parametrize(("model", "place", "ooms"), [("Terms", "collate", 1), ("Norms", "before", 0)])
def test_an_oom_before_the_first_micro_batch_is_survived(model, place, ooms):
    """While `counts` collates, and while buffers that the model replaces are copied: those go to the host, without a retry."""
    disturbed = train(MODELS[model](), "AdamW", seed=0, due={2: [Fault(place, 0, 0)]})
    assert disturbed.ooms == ooms
    assert disturbed.same_bits(train(MODELS[model](), "AdamW", seed=0, groups=disturbed.groups))


@pytest.mark.torture
def test_ooms_at_many_drawn_operations_change_nothing():
    figures = Figures()
    for seed in range(5):
        for model in MODELS:
            for optimizer in OPTIMIZERS:
                check_case(model, optimizer, seed, faults=2 + seed, figures=figures)
    print(f"\n{figures}")
