"""Random numbers are functions of seed, purpose and time; losses of many runs match the formulas written out for one."""

import pytest
import torch
import torch.nn.functional as F

from brimful.memory.ledger import Ledger, simulated_memory
from brimful.molecules import heads
from brimful.molecules.heads import DROPOUT, ORDER, dropout_factors, permutations, random_int16, random_key, splitmix64
from brimful.units import MiB


def keys(count, purpose=ORDER):
    return random_key(torch.arange(count), purpose)


def test_the_finaliser_is_that_of_splitmix64():
    """The first numbers of Vigna's generator with state 0, which adds the golden ratio before each."""
    golden = -7046029254386353131
    states = torch.tensor([1, 2, 3]) * golden
    known = [0xE220A8397B1DCDAF, 0x6E789E6AA1B965F4, 0x06C45D188009454F]
    assert [one % 2**64 for one in splitmix64(states).tolist()] == known


def test_a_key_depends_on_every_part_and_on_their_order():
    seeds, steps = torch.arange(50)[:, None, None], torch.arange(50)[:, None]
    found = random_key(seeds, torch.arange(3), steps).flatten()
    assert len(found.unique()) == 50 * 50 * 3
    assert random_key(1, 2) != random_key(2, 1) and random_key(1) != random_key(1, 0)


def test_a_key_does_not_depend_on_the_other_keys():
    together = random_key(torch.tensor([3, 5, 8]), DROPOUT, torch.tensor([0, 7, 2]))
    assert together[1] == random_key(torch.tensor([5]), DROPOUT, torch.tensor([7]))[0] == random_key(5, DROPOUT, 7)


@pytest.mark.parametrize("parts", [(DROPOUT,), (0, DROPOUT)])
def test_a_key_stays_on_the_device_of_its_tensors(parts):
    """The meta device has no numbers to copy: a detour over the host would fail here, and wait for the GPU there."""
    seeds = torch.zeros(3, dtype=torch.int64, device="meta")
    assert random_key(seeds, *parts).device.type == "meta"


def test_a_permutation_comes_before_its_padding():
    counts = torch.tensor([1, 7, 20])
    found = permutations(keys(3), counts, 20)
    for order, count in zip(found.tolist(), counts.tolist(), strict=True):
        assert sorted(order[:count]) == list(range(count))


def test_a_permutation_does_not_depend_on_the_longest_one():
    short, long = permutations(keys(4), torch.full((4,), 9), 9), permutations(keys(4), torch.full((4,), 9), 64)
    assert torch.equal(short, long[:, :9])


def test_seed_purpose_and_number_give_other_permutations():
    some = random_key(
        torch.arange(4)[:, None, None], torch.tensor([ORDER, DROPOUT])[:, None], torch.arange(5)
    ).flatten()
    found = permutations(some, torch.full((40,), 30), 30)
    assert len({tuple(order) for order in found.tolist()}) == 40


def test_every_row_comes_first_equally_often():
    """χ² of 20 places over 20,000 orders: 19 on average, 60 once in 10⁵."""
    found = permutations(keys(20_000), torch.full((20_000,), 20), 20)
    for place in (0, 10, 19):
        counts = torch.bincount(found[:, place], minlength=20).double()
        assert float(((counts - 1000) ** 2 / 1000).sum()) < 60


@pytest.mark.parametrize("units", [1, 3, 4, 5, 17])
def test_numbers_of_any_width_depend_on_their_own_key_alone(units):
    found = random_int16(keys(3), 6, units)
    assert found.shape == (3, 6, units) and found.dtype == torch.int16
    assert torch.equal(found[1], random_int16(keys(3)[1:2], 6, units)[0])
    assert len(found.flatten().unique()) > 0.95 * found.numel()


def test_more_rows_do_not_change_the_first_ones():
    """A classifier alone has one side, in a pack with exposed ones two."""
    assert torch.equal(random_int16(keys(2), 5, 6), random_int16(keys(2), 10, 6)[:, :5])


def test_numbers_are_uniform():
    found = random_int16(keys(8), 512, 128).flatten().long() + 2**15
    counts = torch.bincount(found // 1024, minlength=64).double()
    expected = found.numel() / 64
    assert float(((counts - expected) ** 2 / expected).sum()) < 140  # 63 on average


@pytest.mark.parametrize("dropout", [0.0, 0.1, 0.5, 0.9])
def test_dropout_drops_its_share_and_keeps_the_mean(dropout):
    found = dropout_factors(keys(4), 512, 100, torch.full((4,), dropout))
    assert float((found == 0).float().mean()) == pytest.approx(dropout, abs=0.005)
    assert float(found.mean()) == pytest.approx(1, abs=0.03)
    assert len(found.unique()) == (1 if dropout == 0 else 2)


def test_each_run_has_its_own_dropout():
    found = dropout_factors(keys(3), 200, 100, torch.tensor([0.0, 0.2, 0.7]))
    assert [round(float((one == 0).float().mean()), 1) for one in found] == [0.0, 0.2, 0.7]


def test_masks_of_two_layers_are_independent():
    one, other = (dropout_factors(random_key(keys(1), layer), 400, 100, torch.tensor([0.5])) > 0 for layer in (0, 1))
    assert float((one == other).float().mean()) == pytest.approx(0.5, abs=0.02)


def energies(runs, id_rows, ood_rows, seed=0, spread=3.0):
    rng = torch.Generator().manual_seed(seed)
    sides = [torch.randn(runs, rows, generator=rng) * spread for rows in (id_rows, ood_rows)]
    return [one.requires_grad_() for one in sides]


def assert_equal(ours, theirs, sides, within=1e-6):
    """Loss and gradients of each run, weighted so that no run can replace another."""
    weights = torch.linspace(1, 2, len(ours))
    assert torch.allclose(ours, theirs, rtol=within, atol=within)
    found = [torch.autograd.grad((one * weights).sum(), sides) for one in (ours, theirs)]
    for one, other in zip(*found, strict=True):
        assert torch.allclose(one, other, rtol=0, atol=within)
        assert float(other.abs().max()) > 0


def peak(loss, *sides):
    """Peak bytes besides the energies, backward included."""
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
    monkeypatch.setattr(heads, "PAIRS_AT_ONCE_CPU", at_once)
    sides = energies(runs, id_rows, ood_rows)
    beta = torch.tensor([0.1, 1.0, 5.0])[:runs]
    assert_equal(heads.dpo(*sides, beta), matrix(*sides, beta), sides)


def test_dpo_of_energies_far_apart_neither_overflows_nor_vanishes():
    in_dist, out_dist = torch.tensor([[1e4, -1e4]]).requires_grad_(), torch.tensor([[0.0]]).requires_grad_()
    found = heads.dpo(in_dist, out_dist, torch.ones(1))
    slopes = torch.autograd.grad(found.sum(), [in_dist, out_dist])
    assert found.item() == pytest.approx(5e3) and slopes[0].tolist() == [[0.5, 0.0]] and slopes[1].tolist() == [[-0.5]]


def test_dpo_of_many_pairs_is_precise():
    """Four million pairs: a running sum in fp32 would be off in the fourth digit."""
    sides = [side.detach() for side in energies(1, 2048, 2048, spread=0.01)]
    whole = matrix(*(side.double() for side in sides), torch.ones(1))
    assert float(heads.dpo(*sides, torch.ones(1))) == pytest.approx(float(whole), rel=1e-7)


def test_dpo_takes_memory_linear_in_the_batch(monkeypatch):
    monkeypatch.setattr(heads, "PAIRS_AT_ONCE_CPU", 1 << 13)
    small, large = (peak(lambda *sides: heads.dpo(*sides, torch.ones(1)), *energies(1, n, n)) for n in (512, 2048))
    assert 0 < large <= 4.2 * small


@pytest.mark.torture
def test_four_thousand_million_pairs_take_64_mib():
    sides = energies(1, 65_536, 65_536)
    with simulated_memory(64 * MiB) as memory:
        found = heads.dpo(*sides, torch.full((1,), 0.1))
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
    assert_equal(heads.hinge(*sides, *numbers), hardest(*sides, *numbers), sides)


def test_each_run_has_its_own_margin_and_share():
    sides = energies(3, 40, 30)
    numbers = torch.tensor([0.1, 1.0, 4.0]), torch.tensor([1.0, 0.2, 0.01])
    assert_equal(heads.hinge(*sides, *numbers), hardest(*sides, *numbers), sides)


def test_pairs_that_do_not_violate_count_as_zero():
    in_dist, out_dist = (energies(1, 20, 20)[0].detach() - 9).requires_grad_(), energies(1, 20, 20)[1]
    numbers = torch.ones(1), torch.full((1,), 0.9)
    assert_equal(heads.hinge(in_dist, out_dist, *numbers), hardest(in_dist, out_dist, *numbers), [in_dist, out_dist])


def test_no_pair_violates():
    in_dist, out_dist = torch.full((1, 4), -5.0).requires_grad_(), torch.full((1, 3), 5.0).requires_grad_()
    found = heads.hinge(in_dist, out_dist, torch.ones(1), torch.full((1,), 0.5))
    assert found.item() == 0 and not any(one.any() for one in torch.autograd.grad(found.sum(), [in_dist, out_dist]))


def tied():
    """Few values, so that most violations have many equals, at the threshold too."""
    rng = torch.Generator().manual_seed(1)
    return [torch.randint(-2, 3, (3, rows), generator=rng).float().requires_grad_() for rows in (20, 15)]


@pytest.mark.parametrize("hard", [1.0, 0.4, 0.05])
def test_equal_violations_count_as_often_as_wanted(hard):
    numbers = torch.ones(3), torch.full((3,), hard)
    assert torch.allclose(heads.hinge(*tied(), *numbers), hardest(*tied(), *numbers))


@pytest.mark.parametrize("hard", [0.4, 0.05])
def test_equal_violations_share_the_gradient(hard):
    """Which of them are the hardest is arbitrary, how many are is not."""
    sides = tied()
    found = heads.hinge(*sides, torch.ones(3), torch.full((3,), hard))
    of_id, of_ood = torch.autograd.grad(found.sum(), sides)
    assert torch.allclose(of_id.sum(1), torch.ones(3)) and torch.allclose(of_ood.sum(1), -torch.ones(3))


def test_hinge_has_no_pair_matrix():
    numbers = torch.ones(1), torch.full((1,), 0.1)
    small, large = (peak(lambda *sides: heads.hinge(*sides, *numbers), *energies(1, n, n)) for n in (512, 2048))
    assert large <= 4.2 * small and large < 2048 * 2048 * 4 / 10


# -- the others ----------------------------------------------------------------------------------------------------------


def test_bce_is_torchs_with_equal_weight_for_both_sides():
    sides = energies(3, 40, 10)
    theirs = torch.stack(
        [
            sum(F.binary_cross_entropy_with_logits(one, torch.full_like(one, goal)) for goal, one in enumerate(both))
            / 2
            for both in zip(*sides, strict=True)
        ]
    )
    assert_equal(heads.bce(*sides), theirs, sides)


def test_mse_is_torchs_with_equal_weight_for_both_sides():
    sides = energies(3, 40, 10)
    theirs = torch.stack(
        [
            sum(F.mse_loss(one, torch.full_like(one, goal)) for goal, one in enumerate(both)) / 2
            for both in zip(*sides, strict=True)
        ]
    )
    assert_equal(heads.mse(*sides), theirs, sides)


@pytest.mark.parametrize("objective", ["dpo", "bce", "mse", "hinge"])
def test_lam_weighs_the_squares_of_the_energies(objective):
    sides = energies(3, 40, 10)
    lam = torch.tensor([0.0, 0.01, 2.0])
    others = {"beta": torch.ones(3), "margin": torch.ones(3), "hard": torch.ones(3)}
    without = heads.energy_loss(objective, *sides, {**others, "lam": torch.zeros(3)})
    squares = sides[0].square().mean(1) + sides[1].square().mean(1)
    assert_equal(heads.energy_loss(objective, *sides, {**others, "lam": lam}), without + lam * squares, sides)


# -- classifiers ---------------------------------------------------------------------------------------------------------


def logits(runs, rows, classes, seed=0):
    """[runs, rows, tasks, most classes], −inf beyond a task's own."""
    drawn = torch.randn(runs, rows, len(classes), max(classes), generator=torch.Generator().manual_seed(seed))
    spare = torch.arange(max(classes)) >= torch.tensor(classes)[:, None]
    return drawn.masked_fill(spare, -torch.inf).requires_grad_()


def labels(runs, rows, classes, seed=0):
    """A fifth of them blank."""
    rng = torch.Generator().manual_seed(seed)
    found = torch.stack([torch.randint(0, count, (runs, rows), generator=rng) for count in classes], -1)
    return found.masked_fill(torch.rand(found.shape, generator=rng) < 0.2, -1)


def entropies(logits, labels):
    """Torch's, run by run: the blanks ignored."""
    found = [F.cross_entropy(one.flatten(0, 1), known.flatten(), ignore_index=-1) for one, known in zip(logits, labels, strict=True)]  # fmt: skip
    return torch.stack(found)


@pytest.mark.parametrize("classes", [(2,), (2, 2, 2), (5,), (2, 4, 3)])
def test_classify_is_torchs_cross_entropy_without_the_blanks(classes):
    of, known = logits(3, 20, classes), labels(3, 20, classes)
    assert_equal(heads.classifier_loss("classify", of, known, None, {}), entropies(of, known), [of])


def test_a_batch_without_a_label_has_loss_zero():
    of = logits(1, 6, (2, 3))
    found = heads.cross_entropy(of, torch.full((1, 6, 2), -1))
    assert found.item() == 0 and not torch.autograd.grad(found.sum(), of)[0].any()


def uniform_loss(exposed, classes):
    """Cross-entropy between the uniform distribution and each task's own, mean over rows and tasks."""
    tasks = [-exposed[..., task, :count].log_softmax(-1).mean(-1) for task, count in enumerate(classes)]
    return torch.stack(tasks, -1).mean((1, 2))


UNEQUAL = (2, 4, 3)


@pytest.mark.parametrize("classes", [(2,), (2, 2, 2), (5,), UNEQUAL])
def test_exposed_molecules_are_pushed_to_a_uniform_prediction(classes):
    of, known, exposed = logits(3, 20, classes), labels(3, 20, classes), logits(3, 12, classes, seed=1)
    weight = torch.tensor([0.0, 0.5, 2.0])
    ours = heads.classifier_loss("classify-oe", of, known, exposed, {"weight": weight})
    assert_equal(ours, entropies(of, known) + weight * uniform_loss(exposed, classes), [of, exposed])


@pytest.mark.parametrize("classes", [(2,), (2, 2, 2), (2, 4, 3)])
def test_energies_of_exposed_molecules_are_pushed_above_a_margin(classes):
    of, known, exposed = logits(3, 20, classes), labels(3, 20, classes), logits(3, 12, classes, seed=1)
    options = {"weight": torch.tensor([0.1, 0.5, 2.0]), "margin_in": torch.full((3,), -1.5), "margin_out": torch.full((3,), -0.5)}  # fmt: skip
    inside, outside = (-torch.stack([one[..., task, :count].logsumexp(-1) for task, count in enumerate(classes)], -1) for one in (of, exposed))  # fmt: skip
    pushed = F.relu(inside + 1.5).square().mean((1, 2)) + F.relu(-0.5 - outside).square().mean((1, 2))
    ours = heads.classifier_loss("classify-energy-oe", of, known, exposed, options)
    assert_equal(ours, entropies(of, known) + options["weight"] * pushed, [of, exposed])
