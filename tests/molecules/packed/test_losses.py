"""Losses of many runs at once against the formulas written out for one."""

import pytest
import torch
import torch.nn.functional as F

from brimful.memory.ledger import Ledger, simulated_memory
from brimful.molecules import losses
from brimful.units import MiB


def energies(runs, id_rows, ood_rows, seed=0, spread=3.0):
    drawn = torch.Generator().manual_seed(seed)
    made = [torch.randn(runs, rows, generator=drawn) * spread for rows in (id_rows, ood_rows)]
    return [one.requires_grad_() for one in made]


def compared(ours, theirs, sides, within=1e-6):
    """Loss and gradients of each run, weighed so that runs cannot stand in for each other."""
    weights = torch.linspace(1, 2, len(ours))
    assert torch.allclose(ours, theirs, rtol=within, atol=within)
    found = [torch.autograd.grad((one * weights).sum(), sides) for one in (ours, theirs)]
    for one, other in zip(*found, strict=True):
        assert torch.allclose(one, other, rtol=0, atol=within)
        assert float(other.abs().max()) > 0


def peak(loss, *sides):
    """Bytes that live at most beyond the energies, backward included."""
    ledger = Ledger()
    ledger.adopt(sides)
    held = ledger.live_bytes
    with ledger:
        torch.autograd.grad(loss(*sides).sum(), sides)
    return ledger.peak_bytes - held


# -- dpo -----------------------------------------------------------------------------------------------------------------


def matrix(in_dist, out_dist, beta):
    gaps = out_dist[:, None, :] - in_dist[:, :, None]
    return F.softplus(-beta[:, None, None] * gaps).mean((1, 2))


@pytest.mark.parametrize("at_once", [1, 7, 100, 1 << 20])
@pytest.mark.parametrize(("runs", "id_rows", "ood_rows"), [(1, 1, 1), (3, 50, 20), (2, 33, 64)])
def test_dpo_in_chunks_is_the_full_matrix(runs, id_rows, ood_rows, at_once, monkeypatch):
    monkeypatch.setattr(losses, "ON_CPU", at_once)
    sides = energies(runs, id_rows, ood_rows)
    beta = torch.tensor([0.1, 1.0, 5.0])[:runs]
    compared(losses.dpo(*sides, beta), matrix(*sides, beta), sides)


def test_dpo_of_energies_far_apart_neither_overflows_nor_vanishes():
    in_dist, out_dist = torch.tensor([[1e4, -1e4]]).requires_grad_(), torch.tensor([[0.0]]).requires_grad_()
    found = losses.dpo(in_dist, out_dist, torch.ones(1))
    slopes = torch.autograd.grad(found.sum(), [in_dist, out_dist])
    assert found.item() == pytest.approx(5e3) and slopes[0].tolist() == [[0.5, 0.0]] and slopes[1].tolist() == [[-0.5]]


def test_dpo_of_many_pairs_keeps_its_digits():
    """Four million pairs: a running sum in fp32 would be off in the fourth digit."""
    sides = [side.detach() for side in energies(1, 2048, 2048, spread=0.01)]
    whole = matrix(*(side.double() for side in sides), torch.ones(1))
    assert float(losses.dpo(*sides, torch.ones(1))) == pytest.approx(float(whole), rel=1e-7)


def test_dpo_takes_memory_linear_in_the_batch(monkeypatch):
    monkeypatch.setattr(losses, "ON_CPU", 1 << 13)
    small, large = (peak(lambda *sides: losses.dpo(*sides, torch.ones(1)), *energies(1, n, n)) for n in (512, 2048))
    assert 0 < large <= 4.2 * small


@pytest.mark.torture
def test_four_thousand_million_pairs_take_64_mib():
    sides = energies(1, 65_536, 65_536)
    with simulated_memory(64 * MiB) as memory:
        found = losses.dpo(*sides, torch.full((1,), 0.1))
        slopes = torch.autograd.grad(found.sum(), sides)
    assert memory.ooms == 0 and float(slopes[0].sum()) == pytest.approx(-float(slopes[1].sum()), rel=1e-4)


# -- hinge ---------------------------------------------------------------------------------------------------------------


def hardest(in_dist, out_dist, margin, hard):
    """All pairs, sorted."""
    found = []
    for one, other, gap, share in zip(in_dist, out_dist, margin, hard, strict=True):
        violations = (gap - (other[None, :] - one[:, None])).clamp(min=0).flatten()
        wanted = max(1, round(float(share) * len(violations)))
        found.append(violations.topk(wanted).values.mean())
    return torch.stack(found)


@pytest.mark.parametrize("hard", [1.0, 0.5, 0.1, 0.0013])  # the last: 1.56 of 1,200 pairs, so two
@pytest.mark.parametrize("margin", [0.3, 1.0, 20.0])
def test_hinge_is_the_mean_of_the_hardest_pairs(margin, hard):
    sides = energies(3, 40, 30)
    numbers = torch.full((3,), margin), torch.full((3,), hard)
    compared(losses.hinge(*sides, *numbers), hardest(*sides, *numbers), sides)


def test_runs_of_one_pack_have_margins_and_shares_of_their_own():
    sides = energies(3, 40, 30)
    numbers = torch.tensor([0.1, 1.0, 4.0]), torch.tensor([1.0, 0.2, 0.01])
    compared(losses.hinge(*sides, *numbers), hardest(*sides, *numbers), sides)


def test_a_share_larger_than_the_pairs_that_violate_counts_the_others_as_nought():
    in_dist, out_dist = (energies(1, 20, 20)[0].detach() - 9).requires_grad_(), energies(1, 20, 20)[1]
    numbers = torch.ones(1), torch.full((1,), 0.9)
    compared(losses.hinge(in_dist, out_dist, *numbers), hardest(in_dist, out_dist, *numbers), [in_dist, out_dist])


def test_no_pair_violates():
    in_dist, out_dist = torch.full((1, 4), -5.0).requires_grad_(), torch.full((1, 3), 5.0).requires_grad_()
    found = losses.hinge(in_dist, out_dist, torch.ones(1), torch.full((1,), 0.5))
    assert found.item() == 0 and not any(one.any() for one in torch.autograd.grad(found.sum(), [in_dist, out_dist]))


def tied():
    """Few values, so that most violations have many equals, at the threshold too."""
    drawn = torch.Generator().manual_seed(1)
    return [torch.randint(-2, 3, (3, rows), generator=drawn).float().requires_grad_() for rows in (20, 15)]


@pytest.mark.parametrize("hard", [1.0, 0.4, 0.05])
def test_pairs_that_violate_alike_count_as_often_as_wanted(hard):
    numbers = torch.ones(3), torch.full((3,), hard)
    assert torch.allclose(losses.hinge(*tied(), *numbers), hardest(*tied(), *numbers))


@pytest.mark.parametrize("hard", [0.4, 0.05])
def test_pairs_that_violate_alike_share_the_slope(hard):
    """Which of them are the hardest is anybody's choice; that so many are is not."""
    sides = tied()
    found = losses.hinge(*sides, torch.ones(3), torch.full((3,), hard))
    of_id, of_ood = torch.autograd.grad(found.sum(), sides)
    assert torch.allclose(of_id.sum(1), torch.ones(3)) and torch.allclose(of_ood.sum(1), -torch.ones(3))


def test_hinge_makes_no_matrix():
    numbers = torch.ones(1), torch.full((1,), 0.1)
    small, large = (peak(lambda *sides: losses.hinge(*sides, *numbers), *energies(1, n, n)) for n in (512, 2048))
    assert large <= 4.2 * small and large < 2048 * 2048 * 4 / 10


# -- the others ----------------------------------------------------------------------------------------------------------


def test_bce_is_torchs_with_both_sides_of_equal_weight():
    sides = energies(3, 40, 10)
    theirs = torch.stack(
        [
            sum(F.binary_cross_entropy_with_logits(one, torch.full_like(one, goal)) for goal, one in enumerate(both))
            / 2
            for both in zip(*sides, strict=True)
        ]
    )
    compared(losses.bce(*sides), theirs, sides)


def test_mse_is_torchs_with_both_sides_of_equal_weight():
    sides = energies(3, 40, 10)
    theirs = torch.stack(
        [
            sum(F.mse_loss(one, torch.full_like(one, goal)) for goal, one in enumerate(both)) / 2
            for both in zip(*sides, strict=True)
        ]
    )
    compared(losses.mse(*sides), theirs, sides)


@pytest.mark.parametrize("objective", ["dpo", "bce", "mse", "hinge"])
def test_lam_weighs_the_squares_of_the_energies(objective):
    sides = energies(3, 40, 10)
    lam = torch.tensor([0.0, 0.01, 2.0])
    others = {"beta": torch.ones(3), "margin": torch.ones(3), "hard": torch.ones(3)}
    without = losses.energy_loss(objective, *sides, {**others, "lam": torch.zeros(3)})
    squares = sides[0].square().mean(1) + sides[1].square().mean(1)
    compared(losses.energy_loss(objective, *sides, {**others, "lam": lam}), without + lam * squares, sides)


# -- classifiers ---------------------------------------------------------------------------------------------------------


def logits(runs, rows, classes, seed=0):
    """[runs, rows, tasks, most classes], −inf beyond a task's own."""
    drawn = torch.randn(runs, rows, len(classes), max(classes), generator=torch.Generator().manual_seed(seed))
    spare = torch.arange(max(classes)) >= torch.tensor(classes)[:, None]
    return drawn.masked_fill(spare, -torch.inf).requires_grad_()


def labels(runs, rows, classes, seed=0):
    """A fifth of them blank."""
    drawn = torch.Generator().manual_seed(seed)
    found = torch.stack([torch.randint(0, count, (runs, rows), generator=drawn) for count in classes], -1)
    return found.masked_fill(torch.rand(found.shape, generator=drawn) < 0.2, -1)


def entropies(logits, labels):
    """Torch's, run by run: the blanks ignored."""
    found = [F.cross_entropy(one.flatten(0, 1), known.flatten(), ignore_index=-1) for one, known in zip(logits, labels, strict=True)]  # fmt: skip
    return torch.stack(found)


@pytest.mark.parametrize("classes", [(2,), (2, 2, 2), (5,), (2, 4, 3)])
def test_classify_is_torchs_cross_entropy_without_the_blanks(classes):
    of, known = logits(3, 20, classes), labels(3, 20, classes)
    compared(losses.classifier_loss("classify", of, known, None, {}), entropies(of, known), [of])


def test_a_batch_without_a_label_costs_nothing():
    of = logits(1, 6, (2, 3))
    found = losses.cross_entropy(of, torch.full((1, 6, 2), -1))
    assert found.item() == 0 and not torch.autograd.grad(found.sum(), of)[0].any()


def doubts(exposed, classes):
    """Cross-entropy between the uniform distribution and each task's own, mean over rows and tasks."""
    tasks = [-exposed[..., task, :count].log_softmax(-1).mean(-1) for task, count in enumerate(classes)]
    return torch.stack(tasks, -1).mean((1, 2))


UNEQUAL = (2, 4, 3)


@pytest.mark.parametrize("classes", [(2,), (2, 2, 2), (5,), UNEQUAL])
def test_exposed_molecules_should_look_like_every_class(classes):
    of, known, exposed = logits(3, 20, classes), labels(3, 20, classes), logits(3, 12, classes, seed=1)
    weight = torch.tensor([0.0, 0.5, 2.0])
    ours = losses.classifier_loss("classify-oe", of, known, exposed, {"weight": weight})
    compared(ours, entropies(of, known) + weight * doubts(exposed, classes), [of, exposed])


@pytest.mark.parametrize("classes", [(2,), (2, 2, 2), (2, 4, 3)])
def test_energies_of_exposed_molecules_are_pushed_over_a_margin(classes):
    of, known, exposed = logits(3, 20, classes), labels(3, 20, classes), logits(3, 12, classes, seed=1)
    options = {"weight": torch.tensor([0.1, 0.5, 2.0]), "margin_in": torch.full((3,), -1.5), "margin_out": torch.full((3,), -0.5)}  # fmt: skip
    inside, outside = (-torch.stack([one[..., task, :count].logsumexp(-1) for task, count in enumerate(classes)], -1) for one in (of, exposed))  # fmt: skip
    pushed = F.relu(inside + 1.5).square().mean((1, 2)) + F.relu(-0.5 - outside).square().mean((1, 2))
    ours = losses.classifier_loss("classify-energy-oe", of, known, exposed, options)
    compared(ours, entropies(of, known) + options["weight"] * pushed, [of, exposed])
