"""On a GPU: the same runs as on the CPU, packs that follow the memory, an out-of-memory error survived."""

import numpy as np
import pytest
import torch

from brimful.molecules.feature_store import FeatureStore
from brimful.molecules.heads import HeadShape, Job, Rows
from brimful.molecules.methods import METHODS
from brimful.molecules.runner import Runner, choose_pack_size
from brimful.molecules.spec import TrainSpec
from brimful.units import GiB
from tests.emulated_card import is_inserted

from . import support

pytestmark = pytest.mark.gpu

INPUTS, EPOCHS = (256, 2) if is_inserted() else (2048, 5)


@pytest.fixture(scope="module")
def rows():
    draw = torch.Generator().manual_seed(0)
    features = (torch.rand(2400, INPUTS, generator=draw) < 0.03).to(torch.uint8)
    features[1200:, :64] |= (torch.rand(1200, 64, generator=draw) < 0.05).to(torch.uint8)
    side = {"train": np.arange(800), "valid": np.arange(800, 1000), "test": np.arange(1000, 1200)}
    return {"a": Rows(features=features, id=side, ood={name: part + 1200 for name, part in side.items()})}


def jobs(count, epochs=EPOCHS):
    training = TrainSpec(lr=1e-3, batch=256, epochs=epochs, patience=epochs)
    return [
        Job(
            name=f"{name}-{seed}", data="a", objective=METHODS[name].objective, options=support.defaults(METHODS[name].training_options), seed=seed,
            shape=HeadShape(inputs=INPUTS, activation="silu"), training=training,  # a ReLU at its kink goes either way
        )
        for seed in range(count)
        for name in ("dpo", "bce", "mse", "hinge")
    ]  # fmt: skip


def trained(wanted, rows, device, slots):
    runner = Runner(wanted, FeatureStore(rows, torch.device(device)), slots)
    return {one.job.name: one for some in runner.run() for one in some}, runner


def test_a_run_is_the_same_on_a_gpu_and_on_the_cpu(rows):
    wanted = jobs(2)
    here, _ = trained(wanted, rows, "cpu", 8)
    there, _ = trained(wanted, rows, "cuda", 8)
    for name, one in here.items():
        torch.testing.assert_close(there[name].weights, one.weights, rtol=0, atol=1e-4)
        assert there[name].curve == pytest.approx(one.curve, abs=1e-3)


@pytest.mark.gpu(emulated=False)
def test_packs_stay_within_the_budget(rows):
    torch.cuda.empty_cache()
    store = FeatureStore(rows, torch.device("cuda"))
    found = choose_pack_size(jobs(64), store, GiB)
    assert max(one.peak_bytes for one in found.trials) <= 1.05 * GiB
    assert found.runs < 256 and "predicted" in found.reason


def test_memory_that_runs_out_halves_the_pack_and_changes_no_result(rows):
    """The limit follows what the whole pack took, which differs with the allocator's setting and with the card."""
    wanted = jobs(16)
    torch.cuda.reset_peak_memory_stats()
    whole, _ = trained(wanted, rows, "cuda", 64)
    room = 0.6 * (torch.cuda.max_memory_allocated() - torch.cuda.memory_allocated())
    torch.cuda.empty_cache()
    total = torch.cuda.get_device_properties(0).total_memory
    torch.cuda.set_per_process_memory_fraction((torch.cuda.memory_reserved() + room) / total)
    try:
        halved, runner = trained(wanted, rows, "cuda", 64)
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)
    assert runner.ooms >= 1 and runner.slots < 64
    for name, one in whole.items():
        torch.testing.assert_close(halved[name].weights, one.weights, rtol=0, atol=1e-4)
