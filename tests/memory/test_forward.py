"""Gradient-free work: predicted from small sizes, split to fit, and finished when memory runs out."""

import random

import numpy as np
import pytest
import torch
from torch import nn

from brimful.errors import DoesNotFit
from brimful.machine.host import Host
from brimful.memory import forward as module
from brimful.memory.forward import Forward, Halving, eval_mode, probe_sizes
from brimful.memory.ledger import Ledger, simulated_memory
from brimful.memory.oom import OutOfMemory
from brimful.units import KiB, MiB

CPU = torch.device("cpu")


class Net(nn.Module):
    """Scores of every word against every other: bytes grow with rows × length and rows × length²."""

    def __init__(self):
        super().__init__()
        self.first, self.drop = nn.Linear(8, 64, bias=False), nn.Dropout(0.5)
        self.frozen = nn.Dropout(0.5).eval()

    def forward(self, rows):
        hidden = self.drop(self.first(rows))
        return (hidden @ hidden.transpose(1, 2)).sum(dim=(1, 2))


@pytest.fixture
def net():
    torch.manual_seed(0)
    return Net()


def lengths(count=60, longest=40):
    draw = random.Random(1)
    return [(draw.randint(1, longest),) for _ in range(count)]


class Job:
    """Rows of these lengths through the net; `hidden` more copies are held that no probe knew of."""

    def __init__(self, net, shapes, hidden=0, **options):
        self.net, self.shapes, self.hidden = net, shapes, hidden
        self.calls, self.notes = [], []
        self.forward = Forward(self.dummy, net, CPU, note=self.notes.append, **options)

    def dummy(self, rows, shape):
        self.net(torch.rand(rows, *shape, 8))

    def run(self, group):
        self.calls.append(group)
        longest = max(self.shapes[row][0] for row in group)
        batch = torch.zeros(len(group), longest, 8)
        for place, row in enumerate(group):
            batch[place, : self.shapes[row][0]] = (row + 1) / 100
        held = [torch.zeros(len(group), longest, longest) for _ in range(self.hidden)]
        return [round(one, 3) for one in self.net(batch).tolist()], len(held)

    def all(self):
        found = {}
        with eval_mode(self.net, CPU):
            for group, (values, _) in self.forward.run_batches(self.shapes, self.run):
                found.update(zip(group, values, strict=True))
        return [found[row] for row in sorted(found)]


def alone(net, shapes):
    job = Job(net, shapes)
    with eval_mode(net, CPU):
        return [job.run([row])[0][0] for row in range(len(shapes))]


def peak_of(net, job, rows, shape):
    """What one run of this size really adds, by a ledger of its own."""
    ledger = Ledger()
    ledger.adopt(net.parameters())
    before = ledger.live_bytes
    with eval_mode(net, CPU), ledger:
        job.dummy(rows, shape)
    return ledger.peak_bytes - before


@pytest.mark.parametrize(("rows", "shape"), [(64, (40,)), (3, (7,)), (512, (33,))])
def test_a_size_that_was_never_run_is_predicted(net, rows, shape):
    job = Job(net, lengths())
    model = job.forward.fit((40,))
    assert model.peak_bytes(rows, shape) == pytest.approx(peak_of(net, job, rows, shape), rel=0.03)
    assert max(probe.rows for probe in model.probes) <= 4


def test_every_row_is_run_once_and_alike_rows_together(net):
    shapes = lengths()
    job = Job(net, shapes)
    assert job.all() == pytest.approx(alone(net, shapes), abs=0.002)
    assert sorted(row for group in job.calls for row in group) == list(range(len(shapes)))
    padded = sum(len(group) * max(shapes[row][0] for row in group) for group in job.calls)
    assert padded < 1.3 * sum(length for (length,) in shapes)


def test_batches_stay_below_a_limit_without_one_error(net):
    shapes = lengths()
    job = Job(net, shapes, fewest_batches=True)
    with simulated_memory(256 * KiB) as memory:
        memory.adopt(net.parameters())
        found = job.all()
    assert found == pytest.approx(alone(net, shapes), abs=0.002)
    assert (job.forward.ooms, memory.ooms) == (0, 0)
    assert 0.5 * 0.85 * 256 * KiB < memory.peak_bytes <= 0.9 * 256 * KiB
    assert len(job.calls) > 2


def test_out_of_memory_is_survived_with_the_same_results(net):
    """The real work takes several times what the probes saw."""
    shapes = lengths()
    job = Job(net, shapes, hidden=6, fewest_batches=True)
    with simulated_memory(256 * KiB) as memory:
        memory.adopt(net.parameters())
        found = job.all()
    assert found == pytest.approx(alone(net, shapes), abs=0.002)
    assert job.forward.ooms == memory.ooms == len(job.notes) > 0
    assert "out of memory" in job.notes[0] and "at most" in job.notes[0]
    failed = len(job.calls) - job.forward.batches
    assert failed == job.forward.ooms < 8, "the ceiling comes down for all, not for each batch anew"


def test_an_error_lowers_the_ceiling_for_all_and_teaches_the_next_pass(net):
    job = Job(net, [(40,)] * 64, hidden=8, fewest_batches=True)
    with simulated_memory(400 * KiB) as memory:
        memory.adopt(net.parameters())
        job.all()
        sizes = [len(group) for group in job.calls]
        job.all()
    assert sizes == [16, 8, *[4] * 16], "what failed once is not tried again"
    assert len(job.calls[len(sizes)]) < 16, "the memory model was raised"


def test_a_row_that_does_not_fit_alone_is_named(net):
    shapes = [(4,), (5,), (300,)]
    job = Job(net, shapes)
    job.forward.fit((8,))
    with simulated_memory(64 * KiB) as memory:
        memory.adopt(net.parameters())
        with pytest.raises(DoesNotFit, match="evaluation: line 2 of 300 does not fit") as failure:
            list(job.forward.run_batches(shapes, job.run, name=lambda row: f"line {row}"))
    assert failure.value.needed_bytes >= 300 * 300 * 4


def test_a_limit_too_small_for_any_probe_is_reported(net):
    job = Job(net, [(100,)])
    with simulated_memory(4 * KiB) as memory:
        memory.adopt(net.parameters())
        with pytest.raises(DoesNotFit, match="one short row"):
            job.all()


def test_any_other_error_is_not_swallowed(net):
    job = Job(net, lengths())
    with pytest.raises(ZeroDivisionError):
        list(job.forward.run_batches(job.shapes, lambda group: 1 / 0))


def states():
    return random.getstate(), np.random.get_state()[1].tolist(), torch.get_rng_state().tolist()


def test_fitting_leaves_random_state_modes_and_gradients_alone(net):
    net.train()
    net.frozen.eval()
    net.first.weight.grad = torch.ones_like(net.first.weight)
    before, job = states(), Job(net, lengths())
    job.forward.fit((40,))
    assert states() == before
    assert (net.training, net.drop.training, net.frozen.training) == (True, True, False)
    assert net.first.weight.grad.eq(1).all()


def test_an_error_inside_leaves_them_alone_too(net):
    net.train()
    net.frozen.eval()
    before = states()
    with pytest.raises(RuntimeError, match="mine"), eval_mode(net, CPU):
        assert not net.training and not torch.is_grad_enabled()
        torch.rand(3), random.random(), np.random.rand()
        raise RuntimeError("mine")
    assert states() == before
    assert net.training and not net.frozen.training and torch.is_grad_enabled()


def available(monkeypatch, size):
    host = Host.detect()
    fields = {name: getattr(host, name) for name in Host.__slots__} | {"ram_available_bytes": size}
    monkeypatch.setattr(module.Host, "detect", lambda: Host(**fields))


@pytest.mark.parametrize(
    ("options", "budget", "why"),
    [
        ({}, 50 * MiB, "50% of 100 MiB"),
        ({"processes": 4}, 12.5 * MiB, "12% of 100 MiB"),
        ({"limit_bytes": 10 * MiB, "fill": 0.5}, 5 * MiB - 2048, "50% of 10 MiB, less 2 KiB already allocated"),
        ({"limit_bytes": 400 * MiB}, 50 * MiB, "50% of 100 MiB"),
    ],
)
def test_the_cpu_without_a_simulated_limit_takes_a_share_of_the_host(net, monkeypatch, options, budget, why):
    available(monkeypatch, 100 * MiB)
    job = Job(net, lengths(), **options)
    job.all()
    facts = job.forward.to_json()
    assert facts["added_budget_bytes"] == budget
    assert why in facts["because"]


def test_what_is_allocated_already_is_subtracted_from_the_limit(net):
    job = Job(net, lengths())
    with simulated_memory(MiB) as memory:
        other = torch.zeros(64 * KiB)  # an optimizer's state, say
        memory.adopt([*net.parameters(), other])
        job.all()
    assert job.forward.to_json()["added_budget_bytes"] == int(0.85 * MiB) - 256 * KiB - 2048


def test_json_has_the_largest_batch(net):
    import json

    job = Job(net, lengths(), fewest_batches=True)
    job.all()
    facts = json.loads(json.dumps(job.forward.to_json()))
    assert facts["largest_batch"] == {"rows": 60, "shape": [max(lengths())[0]]}
    assert facts["predicted_added_bytes"] == pytest.approx(peak_of(net, job, 60, max(lengths())), rel=0.03)
    assert facts["measured_peak_bytes"] is None and facts["batches"] == 1


def test_no_more_rows_than_allowed_come_together(net):
    job = Job(net, lengths(), fewest_batches=True, max_rows=7)
    job.all()
    assert max(map(len, job.calls)) == 7


def test_rows_without_lengths_and_no_rows_at_all(net):
    job = Job(net, [])
    assert list(job.forward.run_batches([], job.run)) == []
    plain = Forward(lambda rows, shape: torch.zeros(rows, 100), net, CPU)
    assert [group for group, _ in plain.run_batches([()] * 3, len)] == [[0, 1, 2]]
    assert plain.model.peak_bytes(100, ()) == 40_000


def test_probes_are_few_short_and_in_order():
    sizes = probe_sizes((40, 16))
    assert len(sizes) <= 8
    assert all(rows <= 4 and shape[0] <= 40 and shape[1] <= 16 for rows, shape in sizes)
    assert sizes == sorted(sizes, key=lambda size: size[0] * (1 + sum(size[1])))
    assert probe_sizes((1,)) == [(1, (1,)), (2, (1,)), (4, (1,))]


def test_work_without_a_memory_model_is_halved_until_it_fits_and_stays_in_order(caplog):
    sizes = []

    def run(part):
        sizes.append(len(part))
        if len(part) > 3:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return list(part)

    halving = Halving(torch.device("cpu"))
    assert [row for _, rows in halving.run(10, run) for row in rows] == list(range(10))
    assert [row for _, rows in halving.run(10, run) for row in rows] == list(range(10))  # which knows what fits
    assert sizes == [10, 5, 3, 2, 3, 2, 3, 3, 3, 1]
    assert halving.ooms == 2


def test_a_single_row_that_does_not_fit_is_reported_and_the_others_run():
    def run(part):
        if 1 in part:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return list(part)

    results = list(Halving(torch.device("cpu")).run(4, run))
    assert [rows for _, rows in results if not isinstance(rows, OutOfMemory)] == [[0], [2], [3]]
    assert [list(part) for part, rows in results if isinstance(rows, OutOfMemory)] == [[1]]


def test_halving_grows_again_after_a_pass_without_an_error():
    halving, most, sizes = Halving(torch.device("cpu")), 4, []

    def run(part):
        if len(part) > most:
            raise torch.OutOfMemoryError("no")
        sizes.append(len(part))

    for _ in range(3):
        halving.begin_pass()
        list(halving.run(16, run))
    assert sizes == [4] * 12 and halving.ooms == 3  # 16, 8; nothing; 8
    most = 16
    for _ in range(3):
        sizes.clear()
        halving.begin_pass()
        list(halving.run(16, run))
    assert sizes == [16]
