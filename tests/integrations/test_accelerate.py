"""An Accelerate loop through the exact step: the same weights, schedule and checkpoints as without it, whatever memory does."""

import os
import runpy
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from accelerate import Accelerator
from accelerate.state import AcceleratorState, GradientState
from accelerate.utils import DistributedType
from torch import nn
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import DataLoader

import brimful
from brimful.errors import BadOption, TaskError, UnsupportedModel
from brimful.integrations.accelerate import AcceleratedStepper, exact

ROOT = Path(__file__).parents[2]
STEPS, BATCH, SCARCE = 10, 16, 300_000


@pytest.fixture(autouse=True)
def _own_accelerator() -> Iterator[None]:
    """Accelerate keeps its state for the process; each test starts without."""
    yield
    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()


def make_model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Embedding(32, 16), nn.Linear(16, 64), nn.Tanh(), nn.Linear(64, 32)).double()


def rows() -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    lengths = torch.randint(2, 25, (STEPS * BATCH,), generator=generator).tolist()
    return [torch.randint(1, 32, (length,), generator=generator) for length in lengths]


def pad(some: list[torch.Tensor]) -> torch.Tensor:
    return pad_sequence(some, batch_first=True)


def loss(model: Any, batch: torch.Tensor) -> brimful.Loss:
    labels = (batch * 7 % 31 + 1).masked_fill(batch == 0, 0)
    total = F.cross_entropy(model(batch).flatten(0, 1), labels.flatten(), ignore_index=0, reduction="sum")
    return brimful.Loss(sum=total, count=(labels != 0).sum())


class Script:
    """What every user's script begins with."""

    clip = 0.5

    def __init__(
        self, *, collate: Callable[..., Any] = pad, batch: int = BATCH, decay: float = 0.9, **kwargs: Any
    ) -> None:
        AcceleratorState._reset_state(reset_partial_state=True)
        GradientState._reset_state()
        self.accelerator = Accelerator(cpu=True, **kwargs)
        model = make_model()
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, decay)
        loader = DataLoader(rows(), batch_size=batch, collate_fn=collate)
        prepared = self.accelerator.prepare(model, optimizer, loader, scheduler)
        self.model, self.optimizer, self.loader, self.scheduler = prepared
        self.rates: list[float] = []

    def stepper(self, **options: Any) -> AcceleratedStepper:
        return exact(self.accelerator, self.model, self.optimizer, options.pop("loss", loss), **options)

    def plain(self, poison: tuple[int, ...] = ()) -> list[torch.Tensor]:
        """The loop as Accelerate's documentation has it."""
        for step, batch in enumerate(self.loader):
            found = loss(self.model, batch)
            self.accelerator.backward(found.sum / found.count * (float("inf") if step in poison else 1.0))
            self.accelerator.clip_grad_norm_(self.model.parameters(), self.clip)
            self.optimizer.step()
            self.end_step()
        return self.weights()

    def exact(self, memory: Any = None, **options: Any) -> AcceleratedStepper:
        """The same loop with its body replaced; memory grows scarce in the middle of it."""
        stepper = self.stepper(clip_norm=self.clip, **options)
        for step, batch in enumerate(self.loader):
            if memory is not None:
                memory.limit_bytes = SCARCE if 3 <= step < 7 else None
            stepper.step(batch)
            self.end_step()
        return stepper

    def end_step(self) -> None:
        self.scheduler.step()
        self.optimizer.zero_grad()
        self.rates += self.scheduler.get_last_lr()

    def weights(self) -> list[torch.Tensor]:
        return [param.detach().clone() for param in self.model.parameters()]


def distance(one: list[torch.Tensor], other: list[torch.Tensor]) -> float:
    """Relative L2 over all weights."""
    apart = sum(float((a - b).square().sum()) for a, b in zip(one, other, strict=True))
    return (apart / sum(float(a.square().sum()) for a in one)) ** 0.5


def test_the_weights_are_those_of_the_plain_loop() -> None:
    plain, ours = Script(), Script()
    expected = plain.plain()
    ours.exact()
    assert distance(expected, ours.weights()) < 1e-12
    assert ours.rates == plain.rates


def test_memory_that_runs_out_changes_nothing() -> None:
    expected, ours = Script().plain(), Script()
    with brimful.simulated_memory("1GiB") as memory:
        stepper = ours.exact(memory)
    assert stepper.ooms >= 1 and stepper.steps == STEPS
    assert distance(expected, ours.weights()) < 1e-10


def test_the_schedule_waits_for_a_skipped_step_as_accelerates_does() -> None:
    """In both loops a scaler meets inf twice; in ours the loss itself is poisoned."""
    plain, ours = Script(), Script()
    for script in (
        plain,
        ours,
    ):  # Accelerate makes a scaler only on a GPU, and unscales before clipping only with its own
        script.clip = 1e9
        script.accelerator.scaler = script.optimizer.scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
        script.optimizer.__setstate__(script.optimizer.__dict__)
    expected = plain.plain(poison=(2, 3))

    def poisoned(model: Any, batch: torch.Tensor) -> brimful.Loss:
        found = loss(model, batch)
        return brimful.Loss(sum=found.sum * (float("inf") if len(ours.rates) in (2, 3) else 1.0), count=found.count)

    stepper = ours.exact(loss=poisoned)
    assert [event.event for event in stepper.events] == ["skip", "skip"]
    assert ours.rates == plain.rates and len(set(ours.rates)) == STEPS - 2
    assert distance(expected, ours.weights()) < 1e-12


def test_without_a_scaler_a_skipped_step_holds_the_schedule_too() -> None:
    script = Script()
    stepper = script.stepper(loss=lambda model, batch: brimful.Loss(sum=loss(model, batch).sum * torch.nan, count=1))
    before = script.scheduler.get_last_lr()
    assert not stepper.step(next(iter(script.loader))).applied
    script.scheduler.step()
    assert script.scheduler.get_last_lr() == before and script.accelerator.optimizer_step_was_skipped


def test_a_saved_state_resumes_to_the_same_bits(tmp_path: Path) -> None:
    """Saved right after an out-of-memory error, so that the finer cut is part of what has to come back."""
    with brimful.simulated_memory("1GiB") as memory:
        whole = Script()
        stepper = whole.stepper(clip_norm=0.5)
        for step, batch in enumerate(whole.loader):
            memory.limit_bytes = SCARCE if step == 4 else None
            stepper.step(batch)
            whole.end_step()
            if step == 4:
                whole.accelerator.save_state(str(tmp_path))
    with brimful.simulated_memory("1GiB"):
        again = Script()
        resumed = again.stepper(clip_norm=0.5)
        again.accelerator.load_state(str(tmp_path))
        cut = resumed.state_dict()["micro_batch_limit"]["value"]
        for batch in again.accelerator.skip_first_batches(again.loader, 5):
            resumed.step(batch)
            again.end_step()
    assert stepper.ooms >= 1 and cut is not None
    assert resumed.state_dict() == stepper.state_dict()
    assert all(torch.equal(a, b) for a, b in zip(whole.weights(), again.weights(), strict=True))
    assert again.rates == whole.rates[5:]


def test_a_checkpoint_from_before_brimful_loads(tmp_path: Path) -> None:
    old = Script()
    old.plain()
    old.accelerator.save_state(str(tmp_path))
    new = Script()
    stepper = new.stepper()
    new.accelerator.load_state(str(tmp_path))
    assert distance(old.weights(), new.weights()) == 0
    assert "has no stepper of this process" in stepper.events[-1].sentence


def test_two_steppers_of_one_accelerator_keep_apart(tmp_path: Path) -> None:
    script = Script()
    steppers = [script.stepper(), script.stepper()]
    steppers[0].step(next(iter(script.loader)))
    script.accelerator.save_state(str(tmp_path))
    script.accelerator.load_state(str(tmp_path))
    assert [stepper.steps for stepper in steppers] == [1, 0]


def test_accumulated_batches_are_joined_into_one_exact_step() -> None:
    expected, ours = Script().plain(), Script(batch=4, gradient_accumulation_steps=4, collate=list)
    stepper = ours.stepper(clip_norm=0.5, collate=pad)
    for result in stepper.over(ours.loader):
        assert result.rows == BATCH
        ours.end_step()
    assert stepper.steps == STEPS and distance(expected, ours.weights()) < 1e-12


def test_without_a_plan_a_micro_batch_of_joined_batches_is_as_large_as_one_of_them() -> None:
    script = Script(batch=4, gradient_accumulation_steps=4, collate=list)
    results = list(script.stepper(collate=pad).over(script.loader))
    assert {result.largest_micro_batch for result in results} == {4}


def test_batches_of_tensors_are_joined_and_what_is_left_is_a_step() -> None:
    same_length = lambda some: pad([*some, torch.zeros(24, dtype=torch.long)])[:-1]  # noqa: E731
    script = Script(batch=BATCH, gradient_accumulation_steps=4, collate=same_length)
    assert [result.rows for result in script.stepper().over(script.loader)] == [64, 64, 32]


def test_a_part_of_a_step_is_not_taken_for_a_step() -> None:
    script = Script(gradient_accumulation_steps=4)
    stepper, batch = script.stepper(), next(iter(script.loader))
    for call in (stepper.step, stepper.backward):
        with pytest.raises(BadOption, match="iterate over stepper.over.loader."):
            call(batch)


def test_parts_padded_to_different_lengths_are_refused() -> None:
    script = Script(batch=1, gradient_accumulation_steps=4)
    with pytest.raises(TaskError, match="a loader with 4 times the batch_size"):
        next(script.stepper().over(script.loader))


@pytest.mark.parametrize(
    ("kind", "name"),
    [
        (DistributedType.DEEPSPEED, "DeepSpeed"),
        (DistributedType.FSDP, "FSDP"),
        (DistributedType.MEGATRON_LM, "Megatron"),
    ],
)
def test_sharded_training_is_refused_by_name(kind: DistributedType, name: str) -> None:
    script = Script()
    script.accelerator.state.distributed_type = kind
    with pytest.raises(UnsupportedModel, match=f"^{name}.* communicates inside the forward"):
        script.stepper()


def test_what_was_not_prepared_is_refused() -> None:
    script, model = Script(), make_model()
    with pytest.raises(BadOption, match="the model is not prepared"):
        exact(script.accelerator, model, script.optimizer, loss)
    with pytest.raises(BadOption, match="the optimizer is not prepared"):
        exact(script.accelerator, script.model, torch.optim.SGD(model.parameters()), loss)


def test_a_wrapper_that_does_not_come_off_is_refused() -> None:
    script = Script()
    buried = script.accelerator.prepare(nn.Sequential(nn.DataParallel(make_model())))
    with pytest.raises(UnsupportedModel, match="before accelerator.prepare, and dynamo_backend='no'"):
        exact(script.accelerator, buried, script.optimizer, loss)


def test_autocast_is_opened_once_by_the_prepared_forward() -> None:
    """Were it open around the loss as well, cross entropy would be computed from bf16 logits' own precision."""
    found: list[tuple[bool, torch.dtype]] = []

    def looking(model: Any, batch: torch.Tensor) -> brimful.Loss:
        inside = []
        handle = model[1].register_forward_hook(lambda _m, _a, out: inside.append(out.dtype))
        result = loss(model, batch)
        handle.remove()
        found.append((torch.is_autocast_enabled("cpu"), inside[0]))
        return result

    script = Script(mixed_precision="bf16")
    script.model.float()
    script.stepper(loss=looking).step(next(iter(script.loader)))
    assert found[-1] == (False, torch.bfloat16)  # the ones before compared a few rows with their halves


def t5() -> Any:
    from transformers import T5Config, T5ForConditionalGeneration

    torch.manual_seed(0)
    return T5ForConditionalGeneration(
        T5Config(d_model=16, d_ff=32, d_kv=8, num_heads=2, num_layers=1, vocab_size=40, dropout_rate=0.0,
                 decoder_start_token_id=0, use_cache=False)
    ).double()  # fmt: skip


def gpt2() -> Any:
    from transformers import GPT2Config, GPT2LMHeadModel

    torch.manual_seed(0)
    return GPT2LMHeadModel(
        GPT2Config(vocab_size=40, n_positions=16, n_embd=16, n_layer=1, n_head=2, resid_pdrop=0.0, embd_pdrop=0.0,
                   attn_pdrop=0.0, bos_token_id=None, eos_token_id=None, use_cache=False)
    ).double()  # fmt: skip


def labelled() -> dict[str, torch.Tensor]:
    """Eight rows whose labels are masked from very different places on; the last row has none left."""
    generator = torch.Generator().manual_seed(2)
    ids = torch.randint(2, 40, (8, 12), generator=generator)
    kept = torch.tensor([12, 1, 2, 12, 3, 1, 9, 0])
    return {"input_ids": ids, "labels": ids.masked_fill(torch.arange(12) >= kept[:, None], -100)}


@pytest.mark.parametrize("make", [t5, gpt2])
def test_a_hugging_face_models_own_loss_is_exact_under_any_split(make: Callable[[], Any]) -> None:
    """Up to float32, in which T5's norms and GPT-2's loss are computed whatever the weights are."""
    batch, plain = labelled(), make()
    expected = plain(**batch).loss
    expected.backward()
    accelerator = Accelerator(cpu=True)
    model, optimizer = accelerator.prepare(make(), torch.optim.SGD(plain.parameters()))
    optimizer.optimizer.param_groups[0]["params"] = list(model.parameters())
    result = exact(accelerator, model, optimizer, micro_batch=1).backward(batch)
    wanted = [param.grad for param in plain.parameters()]
    assert result.micro_batches == 8 and result.loss == pytest.approx(expected.item(), rel=1e-6)
    assert distance(wanted, [param.grad for param in model.parameters()]) < 1e-6


def test_a_model_without_a_loss_of_its_own_needs_one() -> None:
    script = Script()
    stepper = exact(script.accelerator, script.model, script.optimizer)
    with pytest.raises(TaskError, match="the batch has no tensor `labels`"):
        stepper.step(torch.ones(2, 2))


TWO = """
import os, sys, torch
sys.path.insert(0, {root!r})
import brimful
from tests.integrations.test_accelerate import BATCH, Script

rank = int(os.environ["RANK"])
plain, calm, rough = (Script(batch=BATCH // 2) for _ in range(3))
found = dict(plain=plain.plain(), wrapper=type(rough.model).__name__)
calm.exact()
with brimful.simulated_memory("1GiB") as memory:
    stepper = rough.exact(memory if rank == 1 else None)
try:
    rough.model(next(iter(rough.loader)))
except brimful.errors.UnsupportedModel as error:
    found["refused"] = str(error)
found |= dict(calm=calm.weights(), rough=rough.weights(), ooms=stepper.ooms, steps=stepper.steps, rates=rough.rates,
              unwrapped=type(stepper.model).__name__)
torch.save(found, f"{{sys.argv[1]}}/{{rank}}.pt")
rough.accelerator.save_state(sys.argv[1] + "/saved")
rough.accelerator.end_training()
"""


@pytest.fixture(scope="module")
def two(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """One job of two processes, in which the second runs out of memory; what each of them found."""
    folder = tmp_path_factory.mktemp("two")
    (folder / "script.py").write_text(TWO.format(root=str(ROOT)))
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT / "src")}
    ran = subprocess.run([*launch, str(folder / "script.py"), str(folder)], capture_output=True, text=True,
                         timeout=120, env=environment, cwd=folder)  # fmt: skip
    assert ran.returncode == 0, ran.stderr
    found = [torch.load(folder / f"{rank}.pt") for rank in (0, 1)]
    return {"found": found, "saved": sorted(path.name for path in (folder / "saved").glob("brimful*"))}


def test_two_processes_give_the_weights_of_one(two: dict[str, Any]) -> None:
    one = Script(decay=0.9**2)  # Accelerate moves a schedule once for each process
    one.exact()
    assert distance(one.weights(), two["found"][0]["calm"]) < 1e-10
    assert distance(one.weights(), two["found"][0]["plain"]) > 1e-4  # Accelerate's own mean of two means


def test_one_process_of_two_runs_out_and_nothing_changes(two: dict[str, Any]) -> None:
    first, second = two["found"]
    assert (first["ooms"], first["steps"], second["steps"]) == (0, STEPS, STEPS) and second["ooms"] >= 1
    assert distance(first["calm"], first["rough"]) < 1e-10
    assert all(torch.equal(a, b) for a, b in zip(first["rough"], second["rough"], strict=True))


def test_the_schedule_moves_twice_a_step_on_two_processes(two: dict[str, Any]) -> None:
    assert two["found"][0]["rates"] == pytest.approx([1e-2 * 0.9 ** (2 * step) for step in range(1, STEPS + 1)])


def test_the_ddp_wrapper_is_taken_off(two: dict[str, Any]) -> None:
    for found in two["found"]:
        assert (found["wrapper"], found["unwrapped"]) == ("DistributedDataParallel", "Sequential")
        assert "the loss calls the DistributedDataParallel wrapper" in found["refused"]


def test_every_process_saves_its_own_state(two: dict[str, Any]) -> None:
    assert two["saved"] == ["brimful_stepper0_rank0.json", "brimful_stepper0_rank1.json"]


def test_the_example_survives_and_says_so(capsys: pytest.CaptureFixture[str]) -> None:
    runpy.run_path(str(ROOT / "examples" / "integrations" / "accelerate_loop.py"), run_name="__main__")
    output = capsys.readouterr().out
    assert output.count("64 rows, here in") == 16 and "16 of 16 steps, " in output
    assert "out of memory in forward" in output and ", 0 out-of-memory errors survived" not in output
