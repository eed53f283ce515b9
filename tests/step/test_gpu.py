"""The step on a card: out-of-memory errors of its allocator, peaks, NCCL and gloo. No test here asserts a time."""

import functools
import os
import warnings

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import nn

from brimful.step import optimizer_memory
from brimful.step.stepper import Stepper
from brimful.task import Loss
from brimful.units import MiB
from tests.emulated_card import is_inserted
from tests.step.fleet import Fleet
from tests.step.small import Words, distance, plain_loop, steps_of_rows

pytestmark = pytest.mark.gpu
real_card = pytest.mark.gpu(emulated=False)
CARD = "cuda:0"
WIDTH, CAP, LEFT = (64, 64 * MiB, 4 * MiB) if is_inserted() else (1024, 1024 * MiB, 60 * MiB)
ROWS, STEPS = 64, 24


@pytest.fixture(autouse=True)
def _clean_card():
    torch.cuda.empty_cache()
    yield
    torch.cuda.set_per_process_memory_fraction(1.0)
    torch.cuda.empty_cache()


def wide(dtype=torch.float32):
    torch.manual_seed(1)
    return nn.Sequential(*(layer for _ in range(4) for layer in (nn.Linear(WIDTH, WIDTH), nn.GELU()))).to(CARD, dtype)


def squares(model, batch):
    return Loss(model(batch).square().sum(), batch.numel())


def batches():
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(ROWS, 64, WIDTH, generator=generator) for _ in range(4)]


def train(taken=(), **options):
    """In the steps `taken` all but a little of the memory is held by something else in the process."""
    model = wide()
    stepper = Stepper(model, torch.optim.SGD(model.parameters(), lr=0.1), squares, grow_after=3, **options)
    rows, hog, results = batches(), None, []
    for number in range(1, STEPS + 1):
        if number in taken:
            torch.cuda.empty_cache()
            free = torch.cuda.mem_get_info()[0]
            cap = int(
                torch.cuda.memory.get_per_process_memory_fraction() * torch.cuda.get_device_properties(0).total_memory
            )
            left = min(free, cap - torch.cuda.memory_reserved()) - LEFT
            hog = hog if hog is not None else torch.empty(left, dtype=torch.uint8, device=CARD)
        else:
            hog = None
        results.append(stepper.step(rows[number % len(rows)]))
    return model, stepper, results


def test_memory_taken_and_given_back_is_survived_with_the_same_weights():
    torch.cuda.set_per_process_memory_fraction(CAP / torch.cuda.get_device_properties(0).total_memory)
    reference, _, _ = train()
    model, stepper, results = train(taken=range(8, 12))
    cuts = [result.micro_batches for result in results]
    assert stepper.ooms > 0 and cuts[0] == 1 and max(cuts[7:11]) > 1 and cuts[-1] == 1, (cuts, stepper.events)
    assert distance(reference, model) < 1e-6


def test_an_oom_event_tells_the_room_on_the_card():
    torch.cuda.set_per_process_memory_fraction(CAP / torch.cuda.get_device_properties(0).total_memory)
    _, stepper, _ = train(taken=range(8, 12))
    rooms = [event.details["available_bytes"] for event in stepper.events if event.event == "oom"]
    assert rooms and all(0 < room < CAP for room in rooms), stepper.events


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_low_precision_survives_too(precision):
    torch.cuda.set_per_process_memory_fraction(CAP / torch.cuda.get_device_properties(0).total_memory)
    reference, _, _ = train(precision=precision)
    model, stepper, results = train(taken=range(8, 12), precision=precision)
    assert stepper.ooms > 0 and results[-1].applied
    assert distance(reference, model) < 1e-2


@pytest.mark.parametrize(
    "optimizer",
    [
        functools.partial(torch.optim.AdamW, fused=True),
        functools.partial(torch.optim.AdamW, foreach=True),
        torch.optim.AdamW,
        functools.partial(torch.optim.SGD, lr=0.1, momentum=0.9),
        torch.optim.Adafactor,
    ],
)
def test_what_is_reserved_covers_what_the_optimizer_takes(optimizer):
    model = wide()
    chosen = optimizer(model.parameters())
    for param in model.parameters():
        param.grad = torch.ones_like(param)
    need = optimizer_memory.predict(chosen, list(model.parameters()))
    taken = []
    for _ in range(2):
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        chosen.step()
        taken.append(torch.cuda.max_memory_allocated() - before)
    assert need.traced
    for sizes, real in zip((need.first, need.later), taken, strict=True):
        largest = max(sizes, default=0)  # reserved once more on a card
        assert sum(sizes) - MiB <= real <= sum(sizes) + largest + MiB


def test_two_processes_share_a_gpu_through_gloo():
    fleet = Fleet(2)
    try:
        answers = fleet.train([(1, 2, 0, "backward"), (0, 3, 0, "clip")], device=CARD)
    finally:
        fleet.close()
    assert not [answer["error"] for answer in answers if "error" in answer]
    expected = plain_loop(Words(), steps_of_rows(4, 12), functools.partial(torch.optim.AdamW, lr=1e-2))
    for answer in answers:
        for weight, other in zip(answer["weights"], expected.parameters(), strict=True):
            assert np.allclose(weight, other.detach().numpy(), rtol=1e-8, atol=1e-10)


@real_card
def test_nccl_is_warmed_up_and_sums_buckets(monkeypatch):
    from brimful.step import distributed

    monkeypatch.setattr(distributed, "BUCKET_BYTES", 3 * MiB)
    for name, value in {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29517", "RANK": "0", "WORLD_SIZE": "1"}.items():
        monkeypatch.setitem(os.environ, name, value)
    dist.init_process_group("nccl", device_id=torch.device(CARD))
    try:
        model = wide()
        group = distributed.ProcessGroup(torch.device(CARD), model)
        before = torch.cuda.memory_allocated()
        gradients = [torch.full_like(param, 2.0) for param in model.parameters()]
        held = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        group.reduce(gradients)  # the first one took its buffers when the group was made
        torch.cuda.synchronize()
        peak = torch.cuda.max_memory_allocated()
        assert all(bool((gradient == 2.0).all()) for gradient in gradients)
        assert peak == held > before
    finally:
        dist.destroy_process_group()


@real_card
def test_new_shapes_cost_no_host_memory():
    """cuDNN's attention would keep a plan of some megabytes for each of them."""
    from brimful.machine.host import process_bytes
    from brimful.tasks.load import load_task

    task = load_task("pretrain", options={"model": "chatlm-tiny"})
    model = task.model().to(CARD).train()
    stepper = Stepper(model, task.optimizer(model), task)
    shapes = [(16 + 3 * number, 100 - 2 * number) for number in range(40)]
    for shape in shapes[:5]:
        stepper.step(task.dummy(8, shape))
    before = process_bytes(os.getpid())
    for shape in shapes[5:]:
        stepper.step(task.dummy(8, shape))
    assert process_bytes(os.getpid()) - before < 30 * MiB
    assert any("cuDNN" in event.sentence for event in stepper.events)


@pytest.mark.parametrize("count", [len, lambda batch: (batch[:, 0] > -1e9).sum()], ids=["on the host", "on the card"])
def test_a_step_waits_for_the_card_once(count):
    model = nn.Linear(8, 1).to(CARD)

    def loss(model, batch):
        return Loss(model(batch).square().sum(), count(batch), log={"mean": batch.mean()})

    stepper = Stepper(model, torch.optim.SGD(model.parameters(), lr=0.1), loss, micro_batch=4, clip_norm=1.0)
    rows = torch.randn(12, 8)
    stepper.step(rows)  # also compares a few rows with their halves
    torch.cuda.set_sync_debug_mode("warn")
    try:
        with warnings.catch_warnings(record=True) as seen:
            warnings.simplefilter("always")
            stepper.step(rows)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert len([one for one in seen if "synchroniz" in str(one.message)]) == 1


def test_a_step_tells_what_the_allocator_had_reserved():
    for result in train()[2]:
        assert result.peak_bytes <= result.reserved_bytes <= torch.cuda.get_device_properties(0).total_memory
