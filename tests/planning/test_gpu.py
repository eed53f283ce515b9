"""Plans on a card: reserved bytes, the cap, other processes, and a plan at full size."""

import subprocess
import sys

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from brimful.errors import DeviceBusy, DoesNotFit
from brimful.planning.levers import OFFLOAD, checkpointing
from brimful.planning.planner import plan as make_plan
from brimful.task import Loss, Task
from brimful.tasks.load import load_task
from brimful.units import GiB
from tests.emulated_card import is_inserted
from tests.planning.small import Normed, Tagger

pytestmark = pytest.mark.gpu
real_card = pytest.mark.gpu(emulated=False)
SMALL = is_inserted()

HOLD = "import sys, torch; x = torch.empty({bytes}, dtype=torch.uint8, device='cuda'); print('ready', flush=True); sys.stdin.read()"


@pytest.fixture(scope="module")
def plan():
    model, limit, shape = ("chatlm-tiny", "128MiB", (20, 40)) if SMALL else ("chatlm-base", "20GiB", None)
    return make_plan(load_task("sft", options={"model": model}), memory_limit=limit, lengths=shape, cache=False)


def test_the_chat_model_fits_without_an_oom_within_1_5_percent(plan):
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


class Wide(Task):
    """Gradients take more than the activations of the first probes, and those of real rows far more."""

    global_batch = 64
    worst_shape = (2048,)

    def model(self):
        torch.manual_seed(0)
        layers = [(nn.Linear(512, 2048), nn.GELU(), nn.Linear(2048, 512)) for _ in range(2)]
        return nn.Sequential(nn.Embedding(50, 512), *layers[0], *layers[1], nn.Linear(512, 50))

    def shape(self, row):
        return (len(row),)

    def collate(self, rows):
        return nn.utils.rnn.pad_sequence(rows, batch_first=True)

    def dummy(self, rows, shape):
        return torch.ones(rows, *shape, dtype=torch.long)

    def loss(self, model, batch):
        losses = F.cross_entropy(model(batch).flatten(0, 1), batch.flatten(), ignore_index=0, reduction="sum")
        return Loss(sum=losses, count=(batch > 0).sum())


def test_rows_are_compared_with_their_halves_without_an_oom_where_gradients_outweigh_short_rows():
    rows = [torch.ones(length, dtype=torch.long) for length in range(300, 2048, 27)]
    before = torch.cuda.memory_stats().get("num_ooms", 0)
    plan = make_plan(Wide(), data=rows, memory_limit="256MiB", precision="fp32", cache=False, plan_seconds=10)
    assert "rows of the data" in plan.choice("exactness").reason
    assert torch.cuda.memory_stats().get("num_ooms", 0) == before


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


@real_card
def test_a_gpu_held_by_another_process_is_named_in_one_sentence(hog):
    with pytest.raises(DeviceBusy, match=r"has only .* free .*hold") as caught:
        make_plan(load_task("sft", options={"model": "chatlm-base"}), memory_limit="20GiB", cache=False)
    print(caught.value)


@real_card
def test_a_gpu_nearly_full_says_who_holds_it(hog):
    with pytest.raises(DoesNotFit, match="holds? ") as caught:
        make_plan(load_task("pretrain", options={"model": "chatlm-base"}), cache=False)
    print(caught.value)


@real_card
def test_a_limit_below_the_fixed_part_says_what_is_needed():
    with pytest.raises(DoesNotFit, match="memory_limit=") as caught:
        make_plan(load_task("pretrain", options={"model": "chatlm-base"}), memory_limit="2GiB", cache=False)
    assert caught.value.needed_bytes > 2 * GiB
    print(caught.value)


@pytest.mark.parametrize("name", ["causal_lm", "image_classifier", "contrastive", "all_pairs", "unet"])
def test_the_examples_fit_a_gpu(name):
    limit = "128MiB" if SMALL else "2GiB"
    plan = make_plan(load_task(f"examples/{name}.py:task"), memory_limit=limit, cache=False)
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


def test_offloaded_blocks_take_less_memory_on_a_gpu_and_give_the_same_gradients():
    """Bit for bit, so attention is of matrix products: the backward of a fused one adds up in another order every time."""
    from transformers import Qwen2Config, Qwen2ForCausalLM

    width, rows, length = (64, 16, 128) if SMALL else (256, 16, 1024)  # inputs are larger than gradients
    sizes = {"hidden_size": width, "intermediate_size": width, "num_hidden_layers": 12, "num_attention_heads": 8}
    sizes |= {"num_key_value_heads": 8, "attn_implementation": "eager"}
    model = Qwen2ForCausalLM(Qwen2Config(vocab_size=512, use_cache=False, **sizes)).cuda()
    ids, lever, peaks, found = (
        torch.randint(0, 512, (rows, length), device="cuda"),
        checkpointing(Task(), model),
        [],
        [],
    )
    assert lever.settings[-1] == "offload"
    for every in (1, OFFLOAD):
        model.zero_grad()
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        with lever.set(every):
            model(input_ids=ids, labels=ids).loss.backward()
        peaks.append(torch.cuda.max_memory_allocated())
        found.append([param.grad.cpu() for param in model.parameters()])
    assert all(map(torch.equal, *found))
    assert peaks[1] < peaks[0] - 8 * rows * length * width * 4  # of 12 blocks, most inputs
