"""Everything random is a function of seed, purpose, time and place."""

import pytest
import torch

from brimful.molecules.job import DROPOUT, ORDER, kept, key, lots, mixed, orders


def keys(count, purpose=ORDER):
    return key(torch.arange(count), purpose)


def test_the_finaliser_is_that_of_splitmix64():
    """The first numbers of Vigna's generator with state 0, which adds the golden ratio before each."""
    golden = -7046029254386353131
    states = torch.tensor([1, 2, 3]) * golden
    known = [0xE220A8397B1DCDAF, 0x6E789E6AA1B965F4, 0x06C45D188009454F]
    assert [one % 2**64 for one in mixed(states).tolist()] == known


def test_every_part_of_a_key_counts_and_so_does_its_place():
    seeds, steps = torch.arange(50)[:, None, None], torch.arange(50)[:, None]
    found = key(seeds, torch.arange(3), steps).flatten()
    assert len(found.unique()) == 50 * 50 * 3
    assert key(1, 2) != key(2, 1) and key(1) != key(1, 0)


def test_a_key_does_not_depend_on_what_else_is_asked_for():
    together = key(torch.tensor([3, 5, 8]), DROPOUT, torch.tensor([0, 7, 2]))
    assert together[1] == key(torch.tensor([5]), DROPOUT, torch.tensor([7]))[0] == key(5, DROPOUT, 7)


@pytest.mark.parametrize("parts", [(DROPOUT,), (0, DROPOUT)])
def test_a_key_stays_on_the_device_of_its_tensors(parts):
    """The meta device has no numbers to copy: a detour over the host would fail here, and wait for the card there."""
    seeds = torch.zeros(3, dtype=torch.int64, device="meta")
    assert key(seeds, *parts).device.type == "meta"


def test_an_order_is_a_permutation_and_what_lies_beyond_comes_last():
    counts = torch.tensor([1, 7, 20])
    found = orders(keys(3), counts, 20)
    for order, count in zip(found.tolist(), counts.tolist(), strict=True):
        assert sorted(order[:count]) == list(range(count))


def test_an_order_does_not_depend_on_the_longest():
    short, long = orders(keys(4), torch.full((4,), 9), 9), orders(keys(4), torch.full((4,), 9), 64)
    assert torch.equal(short, long[:, :9])


def test_seed_purpose_and_number_give_other_orders():
    some = key(torch.arange(4)[:, None, None], torch.tensor([ORDER, DROPOUT])[:, None], torch.arange(5)).flatten()
    found = orders(some, torch.full((40,), 30), 30)
    assert len({tuple(order) for order in found.tolist()}) == 40


def test_every_row_comes_first_equally_often():
    """χ² of 20 places over 20,000 orders: 19 on average, 60 once in 10⁵."""
    found = orders(keys(20_000), torch.full((20_000,), 20), 20)
    for place in (0, 10, 19):
        counts = torch.bincount(found[:, place], minlength=20).double()
        assert float(((counts - 1000) ** 2 / 1000).sum()) < 60


@pytest.mark.parametrize("units", [1, 3, 4, 5, 17])
def test_lots_of_any_width_are_those_of_each_key_alone(units):
    found = lots(keys(3), 6, units)
    assert found.shape == (3, 6, units) and found.dtype == torch.int16
    assert torch.equal(found[1], lots(keys(3)[1:2], 6, units)[0])
    assert len(found.flatten().unique()) > 0.95 * found.numel()


def test_more_rows_leave_the_first_ones_alone():
    """A classifier alone has one side, in a pack with exposed ones two."""
    assert torch.equal(lots(keys(2), 5, 6), lots(keys(2), 10, 6)[:, :5])


def test_lots_are_spread_evenly():
    found = lots(keys(8), 512, 128).flatten().long() + 2**15
    counts = torch.bincount(found // 1024, minlength=64).double()
    expected = found.numel() / 64
    assert float(((counts - expected) ** 2 / expected).sum()) < 140  # 63 on average


@pytest.mark.parametrize("dropout", [0.0, 0.1, 0.5, 0.9])
def test_dropout_drops_its_share_and_keeps_the_mean(dropout):
    found = kept(keys(4), 512, 100, torch.full((4,), dropout))
    assert float((found == 0).float().mean()) == pytest.approx(dropout, abs=0.005)
    assert float(found.mean()) == pytest.approx(1, abs=0.03)
    assert len(found.unique()) == (1 if dropout == 0 else 2)


def test_each_run_has_its_own_share():
    found = kept(keys(3), 200, 100, torch.tensor([0.0, 0.2, 0.7]))
    assert [round(float((one == 0).float().mean()), 1) for one in found] == [0.0, 0.2, 0.7]


def test_masks_of_two_layers_have_nothing_in_common():
    one, other = (kept(key(keys(1), layer), 400, 100, torch.tensor([0.5])) > 0 for layer in (0, 1))
    assert float((one == other).float().mean()) == pytest.approx(0.5, abs=0.02)
