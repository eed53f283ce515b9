"""What only a GPU can show: reserved bytes, the cap, other processes, and a plan at full size."""

import subprocess
import sys

import pytest
import torch

from brimful.errors import DeviceBusy, DoesNotFit
from brimful.planning.planner import plan as make_plan
from brimful.tasks.load import load_task
from brimful.units import GiB
from tests.planning.small import Normed, Tagger

pytestmark = pytest.mark.gpu

HOLD = "import sys, torch; x = torch.empty({bytes}, dtype=torch.uint8, device='cuda'); print('ready', flush=True); sys.stdin.read()"


@pytest.fixture(scope="module")
def plan():
    return make_plan(load_task("sft", options={"size": "base"}), memory_limit="20GiB", cache=False)


def test_the_chat_model_fits_20_gib_without_an_oom_within_1_5_percent(plan):
    assert plan.ooms == 0
    assert plan.predicted_peak_bytes == pytest.approx(plan.measured_peak_bytes, rel=0.015)
    assert plan.largest_predicted_peak_bytes == pytest.approx(plan.largest_measured_peak_bytes, rel=0.015)


def test_reserved_bytes_stay_within_the_budget(plan):
    assert plan.measured_peak_bytes <= plan.reserved_peak_bytes <= plan.budget_bytes
    assert plan.one_more_predicted_peak_bytes > plan.budget_bytes


def test_the_cap_is_taken_off_again(plan):
    assert torch.cuda.memory.get_per_process_memory_fraction() == 1.0


def test_the_gpu_is_empty_again():
    torch.cuda.empty_cache()
    before = torch.cuda.memory_allocated()
    make_plan(Tagger(), memory_limit="1GiB", cache=False)
    assert torch.cuda.memory_allocated() - before < 64 * 2**20  # the libraries' workspaces stay


def test_weights_state_and_random_stream_on_the_gpu_are_as_before():
    torch.manual_seed(0)
    task = Normed()
    model = task.model().cuda()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    task.loss(model, task.dummy(8, ()).cuda()).sum.backward()
    optimizer.step()
    optimizer.zero_grad()
    weights = {name: value.clone() for name, value in model.state_dict().items()}
    state = [{k: v.clone() for k, v in s.items()} for s in optimizer.state.values()]
    stream = torch.cuda.get_rng_state()
    make_plan(task, model=model, optimizer=optimizer, memory_limit="1GiB", cache=False)
    assert all(torch.equal(weights[name], value) for name, value in model.state_dict().items())
    assert all(torch.equal(a[k], b[k]) for a, b in zip(state, optimizer.state.values(), strict=True) for k in a)
    assert torch.equal(stream, torch.cuda.get_rng_state())


@pytest.fixture
def hog():
    """Another process that leaves 3 GiB of the GPU free."""
    free, _ = torch.cuda.mem_get_info()
    script = HOLD.format(bytes=free - 4 * GiB)
    with subprocess.Popen(
        [sys.executable, "-c", script], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout.readline() == "ready\n"
        yield process
        process.stdin.close()


def test_a_gpu_held_by_another_process_is_named_in_one_sentence(hog):
    with pytest.raises(DeviceBusy, match=r"has only .* free .*hold") as caught:
        make_plan(load_task("sft", options={"size": "base"}), memory_limit="20GiB", cache=False)
    print(caught.value)


def test_a_gpu_nearly_full_says_who_holds_it(hog):
    with pytest.raises(DoesNotFit, match="holds? ") as caught:
        make_plan(load_task("pretrain", options={"size": "base"}), cache=False)
    print(caught.value)


def test_a_limit_below_the_fixed_part_says_what_is_needed():
    with pytest.raises(DoesNotFit, match="memory_limit=") as caught:
        make_plan(load_task("pretrain", options={"size": "base"}), memory_limit="2GiB", cache=False)
    assert caught.value.needed_bytes > 2 * GiB
    print(caught.value)


@pytest.mark.parametrize("name", ["causal_lm", "image_classifier", "contrastive", "all_pairs", "unet"])
def test_the_examples_fit_a_gpu(name):
    plan = make_plan(load_task(f"examples/{name}.py:task"), memory_limit="2GiB", cache=False)
    assert plan.ooms == 0
    assert plan.largest_predicted_peak_bytes == pytest.approx(plan.largest_measured_peak_bytes, rel=0.05)
    print(
        name,
        plan.micro_batch,
        plan.largest_micro_batch,
        plan.predicted_peak_bytes,
        plan.measured_peak_bytes,
        plan.plan_s,
    )
