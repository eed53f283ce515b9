"""The ledger counts live storages to the byte, and runs out of memory as a GPU would."""

import gc
import weakref

import pytest
import torch
from torch import nn

from brimful.errors import BadOption
from brimful.memory.ledger import Ledger, active_limit_bytes, simulated_memory
from brimful.units import MiB

FLOATS = 1000
SIZE = 4 * FLOATS
"""Bytes of one tensor of `FLOATS` floats."""


def floats(count: int = FLOATS) -> torch.Tensor:
    return torch.zeros(count)


def test_live_bytes_rise_and_fall_with_the_tensors():
    with Ledger() as ledger:
        seen = []
        one = floats()
        seen.append(ledger.live_bytes)
        two = one + 1
        seen.append(ledger.live_bytes)
        del one
        seen.append(ledger.live_bytes)
        del two
        seen.append(ledger.live_bytes)
    assert seen == [SIZE, 2 * SIZE, SIZE, 0]


def test_the_peak_stays_when_the_tensors_are_gone():
    with Ledger() as ledger:
        floats() + floats()
        floats()
    assert (ledger.live_bytes, ledger.peak_bytes) == (0, 3 * SIZE)


@pytest.mark.parametrize(
    "view",
    [
        lambda t: t.view(10, 100),
        lambda t: t[:3],
        lambda t: t.detach(),
        lambda t: t.expand(5, FLOATS),
        lambda t: t.view(10, 100).T,
        lambda t: t.split(100),
        lambda t: t.add_(1),
        lambda t: t.to(torch.float32),
    ],
    ids=["view", "slice", "detach", "expand", "transpose", "split", "in place", "to the same type"],
)
def test_a_view_adds_nothing(view):
    with Ledger() as ledger:
        tensor = floats()
        _other = view(tensor)
        assert ledger.peak_bytes == SIZE


def test_a_view_keeps_the_whole_storage_alive():
    with Ledger() as ledger:
        part = floats()[:1]
        assert ledger.live_bytes == SIZE
        del part
        assert ledger.live_bytes == 0


def test_what_only_the_graph_holds_is_live():
    weight = torch.ones(FLOATS, requires_grad=True)
    with Ledger() as ledger:
        total = weight.exp().sum()
        gc.collect()
        assert ledger.live_bytes == 2 * SIZE + 4  # the weight, the saved result of exp, the sum
        del total
        assert ledger.live_bytes == SIZE


def test_a_weight_is_entered_when_first_used():
    layer = nn.Linear(FLOATS, 1, bias=False)
    with Ledger() as ledger:
        assert ledger.live_bytes == 0
        layer(torch.zeros(1, FLOATS))
        assert ledger.live_bytes == SIZE


def test_adopted_tensors_count_before_any_operation_and_once():
    layer = nn.Linear(FLOATS, 1, bias=False)
    ledger = Ledger()
    ledger.adopt([*layer.parameters(), layer.weight.detach(), layer.weight[:, :3]])
    with ledger:
        assert ledger.live_bytes == SIZE
        layer.weight.sum()
        assert ledger.live_bytes == SIZE


def test_adopting_more_than_the_limit_runs_out_of_memory():
    with pytest.raises(torch.OutOfMemoryError):
        Ledger(SIZE - 1).adopt([floats()])


def test_tensors_of_lists_are_seen():
    with Ledger() as ledger:
        given = [floats(), floats()]
        made = torch._foreach_add(given, 1.0)
        assert ledger.live_bytes == 4 * SIZE
        del given, made
        assert ledger.live_bytes == 0


def test_tensors_given_by_keyword_are_seen():
    values, weights = floats(), floats()
    with Ledger() as ledger:
        torch.histogram(values, 4, weight=weights)
        assert ledger.live_bytes == 2 * SIZE


def test_a_resized_tensor_is_read_again():
    with Ledger() as ledger:
        tensor = floats()
        tensor.resize_(3 * FLOATS)
        assert ledger.live_bytes == 3 * SIZE
        del tensor
        assert ledger.live_bytes == 0


@pytest.mark.parametrize("size", [0, SIZE // 2, 5 * SIZE])
def test_a_storage_resized_behind_the_dispatcher_is_read_again_at_its_next_use(size):
    with Ledger() as ledger:
        tensor = floats()
        tensor.untyped_storage().resize_(size)
        tensor.detach()
        assert ledger.live_bytes == size
        del tensor
        assert ledger.live_bytes == 0


def test_an_out_argument_that_grows_is_read_again():
    with Ledger() as ledger:
        one, out = floats(), torch.empty(0)
        torch.add(one, 1, out=out)
        assert ledger.live_bytes == 2 * SIZE


def test_an_out_argument_that_fits_adds_nothing():
    with Ledger() as ledger:
        one, out = floats(), floats()
        torch.add(one, 1, out=out)
        assert ledger.peak_bytes == 2 * SIZE


def test_new_data_takes_the_place_of_the_old():
    with Ledger() as ledger:
        weight = nn.Parameter(floats())
        weight.data = torch.zeros(2 * FLOATS)
        weight.sum()
        assert ledger.live_bytes == 2 * SIZE


def test_other_kinds_of_device_are_not_counted():
    with Ledger() as ledger:
        torch.empty(FLOATS, device="meta") + 1
    assert ledger.peak_bytes == 0


def test_a_ledger_of_another_device_counts_that_and_not_the_cpu():
    with Ledger(device="meta") as ledger:
        floats()
        assert ledger.peak_bytes == 0
        torch.empty(FLOATS, device="meta")
    assert ledger.peak_bytes == SIZE


def test_nothing_is_counted_outside_the_block():
    ledger = Ledger()
    floats()
    with ledger:
        pass
    floats()
    assert ledger.peak_bytes == 0


def test_each_phase_keeps_its_own_peak():
    with Ledger() as ledger:
        ledger.phase("small")
        floats()
        ledger.phase("large")
        floats(2 * FLOATS)
        ledger.phase("none")
    assert ledger.phase_peaks == {"small": SIZE, "large": 2 * SIZE, "none": 0}


def test_a_phase_starts_at_what_is_live():
    with Ledger() as ledger:
        ledger.phase("first")
        kept = floats()
        ledger.phase("second")
    assert ledger.phase_peaks == {"first": SIZE, "second": SIZE}
    del kept


def test_a_phase_entered_twice_keeps_its_higher_peak():
    with Ledger() as ledger:
        for count in (FLOATS, 3 * FLOATS, FLOATS):
            ledger.phase("again")
            floats(count)
            ledger.phase("between")
    assert ledger.phase_peaks["again"] == 3 * SIZE


def test_what_happens_before_the_first_phase_belongs_to_none():
    with Ledger() as ledger:
        floats(9 * FLOATS)
        ledger.phase("first")
    assert (ledger.phase_peaks, ledger.peak_bytes) == ({"first": 0}, 9 * SIZE)


def chain(weight: torch.Tensor) -> torch.Tensor:
    """weight → exp → exp → sum: each exp keeps its result for backward."""
    return weight.exp().exp().sum()


def test_a_step_of_an_elementwise_chain_costs_what_it_does_by_hand():
    weight = nn.Parameter(floats())
    optimizer = torch.optim.SGD([weight], lr=0.1, foreach=False)
    with Ledger() as ledger:
        ledger.phase("forward")
        loss = chain(weight)
        ledger.phase("backward")
        loss.backward()
        ledger.phase("optimizer")
        optimizer.step()
        ledger.phase("after")
        optimizer.zero_grad(set_to_none=True)
        del loss
    assert ledger.phase_peaks == {
        "forward": 3 * SIZE + 4,  # the weight, two results, the loss
        "backward": 4 * SIZE + 8,  # one gradient beside them; the loss and its own gradient
        "optimizer": 2 * SIZE + 4,  # the weight, its gradient, the loss: updated in place
        "after": 2 * SIZE + 4,
    }
    assert ledger.live_bytes == SIZE


def test_adamw_adds_two_states_a_weight_at_its_first_step_and_none_later():
    weight = nn.Parameter(floats())
    optimizer = torch.optim.AdamW([weight], foreach=False)
    live = []
    with Ledger() as ledger:
        for _ in range(3):
            chain(weight).backward()
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
            live.append(ledger.live_bytes)
    assert live == [3 * SIZE + 4] * 3  # weight, two moments, the step counter


def test_nothing_grows_over_a_hundred_steps():
    model = nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 1))
    optimizer = torch.optim.AdamW(model.parameters())

    def step() -> None:
        model(torch.randn(4, 8)).sum().backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    with Ledger() as ledger:
        step()
        before = ledger.live_bytes, len(ledger._entries), ledger.peak_bytes
        for _ in range(100):
            step()
        assert (ledger.live_bytes, len(ledger._entries)) == before[:2]
        assert ledger.peak_bytes - before[2] <= 2 * sum(4 * p.numel() for p in model.parameters())  # Adam's state


def test_nothing_stays_tracked_once_the_tensors_are_gone_after_the_block():
    with Ledger() as ledger:
        kept = [floats() for _ in range(5)]
    assert ledger.live_bytes == 5 * SIZE
    kept.clear()
    assert (ledger.live_bytes, ledger._entries) == (0, {})


def test_a_ledger_does_not_keep_tensors_alive():
    with Ledger():
        tensor = floats()
        gone = weakref.ref(tensor)
        del tensor
        assert gone() is None


def test_exactly_the_limit_fits():
    with Ledger(2 * SIZE) as ledger:
        _kept = floats(), floats()
    assert ledger.ooms == 0


def test_one_byte_past_the_limit_runs_out_of_memory():
    with Ledger(2 * SIZE - 1) as ledger:
        _kept = floats()
        with pytest.raises(torch.OutOfMemoryError):
            floats()
    assert ledger.ooms == 1


def out_of_memory() -> torch.OutOfMemoryError:
    with Ledger(10 * SIZE), pytest.raises(torch.OutOfMemoryError) as raised:
        _kept = floats()
        floats(20 * FLOATS)
    return raised.value


def test_the_error_has_one_string_argument_that_says_what_was_asked_for():
    (text,) = out_of_memory().args
    assert "aten.zeros.default asked for 78.12 KiB with 3.91 KiB in use of a simulated limit of 39.06 KiB" in text
    assert "(80000 of 40000 bytes)" in text


def test_accelerate_takes_it_for_out_of_memory():
    from accelerate.utils.memory import should_reduce_batch_size

    assert should_reduce_batch_size(out_of_memory())


def test_lightning_takes_it_for_out_of_memory():
    from lightning.pytorch.utilities.memory import is_oom_error

    assert is_oom_error(out_of_memory())


def test_what_did_not_fit_is_not_part_of_the_peak():
    with Ledger(10 * SIZE) as ledger:
        ledger.phase("only")
        _kept = floats()
        with pytest.raises(torch.OutOfMemoryError):
            floats(20 * FLOATS)
    assert (ledger.peak_bytes, ledger.phase_peaks) == (SIZE, {"only": SIZE})


def test_the_result_that_did_not_fit_is_gone_while_the_error_is_still_held():
    with Ledger(10 * SIZE) as ledger:
        try:
            floats(20 * FLOATS)
        except torch.OutOfMemoryError:
            assert ledger.live_bytes == 0


def test_live_bytes_are_back_once_the_error_is_gone():
    def too_much() -> None:
        kept = [floats()]
        while True:
            kept.append(kept[-1] + 1)

    with Ledger(10 * SIZE) as ledger:
        try:
            too_much()
        except torch.OutOfMemoryError:
            assert ledger.live_bytes == 10 * SIZE  # the traceback holds the frame, the frame its tensors
        assert ledger.live_bytes == 0


def test_the_program_goes_on_after_running_out():
    with Ledger(10 * SIZE) as ledger:
        with pytest.raises(torch.OutOfMemoryError):
            floats(20 * FLOATS)
        _kept = floats(10 * FLOATS)
    assert ledger.peak_bytes == 10 * SIZE


def test_backward_runs_out_of_memory():
    weight = nn.Parameter(floats())
    with Ledger(3 * SIZE + 100) as ledger:
        loss = chain(weight)
        with pytest.raises(torch.OutOfMemoryError):
            loss.backward()
        del loss
        assert (ledger.live_bytes, weight.grad) == (SIZE, None)


def test_an_optimizer_that_needs_state_runs_out_of_memory():
    weight = nn.Parameter(floats())
    weight.grad = floats()
    with Ledger(3 * SIZE), pytest.raises(torch.OutOfMemoryError):
        torch.optim.AdamW([weight], foreach=False).step()


def test_a_lowered_limit_counts_for_the_next_operation_that_asks_for_memory():
    with Ledger(10 * SIZE) as ledger:
        kept = floats(5 * FLOATS)
        ledger.limit_bytes = 4 * SIZE
        kept.add_(1)  # a full GPU computes in place
        with pytest.raises(torch.OutOfMemoryError):
            floats(1)


def test_a_raised_limit_counts_at_once():
    with Ledger(SIZE) as ledger:
        with pytest.raises(torch.OutOfMemoryError):
            floats(2 * FLOATS)
        ledger.limit_bytes = 2 * SIZE
        _kept = floats(2 * FLOATS)
        ledger.limit_bytes = None
        _more = floats(9 * FLOATS)
    assert ledger.ooms == 1


def test_ledgers_inside_each_other_both_count():
    with Ledger() as outer:
        _first = floats()
        with Ledger() as inner:
            _second = floats()
        _third = floats()
        assert (outer.live_bytes, inner.live_bytes) == (3 * SIZE, SIZE)


@pytest.mark.parametrize(("outside", "inside"), [(SIZE, None), (None, SIZE), (SIZE, 9 * SIZE), (9 * SIZE, SIZE)])
def test_of_two_ledgers_the_smaller_limit_holds(outside, inside):
    with Ledger(outside) as outer, Ledger(inside) as inner:
        with pytest.raises(torch.OutOfMemoryError):
            floats(2 * FLOATS)
        assert (outer.ooms, inner.ooms) == ((1, 0) if outside == SIZE else (0, 1))


def test_there_is_no_limit_where_none_was_set():
    with Ledger():
        assert active_limit_bytes() is None


def test_the_smallest_limit_around_is_the_active_one():
    with Ledger(500), Ledger(300), Ledger(), Ledger(400):
        assert active_limit_bytes() == 300


def test_the_active_limit_follows_a_change():
    with Ledger(500) as ledger:
        ledger.limit_bytes = 200
        assert active_limit_bytes() == 200


def test_no_limit_is_active_after_the_block_even_if_it_failed():
    with pytest.raises(torch.OutOfMemoryError), Ledger(SIZE):
        floats(2 * FLOATS)
    assert active_limit_bytes() is None


def test_simulated_memory_takes_a_size_as_people_write_it():
    with simulated_memory("1MiB") as memory:
        assert (active_limit_bytes(), memory.limit_bytes) == (MiB, MiB)
        with pytest.raises(torch.OutOfMemoryError):
            floats(MiB)


def test_simulated_memory_refuses_what_is_not_a_size():
    with pytest.raises(BadOption, match=r"^simulated_memory: 'lots' is not a size"):
        simulated_memory("lots")
