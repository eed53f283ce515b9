"""Plans of packed rows: what they say, how well they predict, and which models are refused or trained padded."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from brimful import simulated_memory
from brimful.errors import BadOption, TaskError
from brimful.memory.layout import PACKED
from brimful.packing import attention, causal
from brimful.packing.sequence import Boundaries
from brimful.planning import exactness
from brimful.planning.plan import Plan
from brimful.planning.target import Target
from brimful.step.stepper import Stepper
from brimful.task import Task
from brimful.tasks.language import LanguageOptions, Pretrain, Sft, SftOptions
from tests.packing.small import Leaky, Lines, PaddedLines, State, draw_rows
from tests.planning.small import small_plan

ROWS = draw_rows(100)


@pytest.fixture(scope="module")
def packed():
    return small_plan(Lines(), data=ROWS, global_batch=50, layout="packed", workers=0)


@pytest.fixture
def with_kernels(monkeypatch):
    """As on a GPU that has kernels for packed rows, which need bf16."""
    monkeypatch.setattr(Target, "has_kernels", True)
    monkeypatch.setattr(Lines, "precision", "bf16")


# What it says


def test_the_layout_is_a_choice_with_its_reason(packed):
    layout = packed.choice("layout")
    assert (packed.layout, layout.requested, layout.effective) == ("packed", "packed", "packed")
    assert layout.reason == (
        "loss and gradient of 8 rows are the same packed as alone; the mean row of a long step is 18, the longest 40"
    )


def test_sizes_are_tokens():
    plan = small_plan(Lines(), data=ROWS, global_batch=50, micro_batch=25, layout="packed", workers=0)
    assert plan.tokens == (25 * plan.shape[0],)
    assert plan.headline.startswith(f"lines on the CPU: 25 rows packed in {plan.tokens[0]} tokens × 2 = 50 per step")


def test_it_is_planned_for_the_mean_row_and_not_for_the_longest(packed):
    assert sum(map(len, ROWS)) / len(ROWS) < packed.shape[0] < 40


def test_a_loss_in_chunks_is_noted(packed):
    assert packed.levers.chunked_loss == "on"


def test_progress_speaks_of_tokens():
    phrases = []
    small_plan(Lines(), layout="packed", progress=phrases.append)
    assert any(phrase.startswith("probe ") and phrase.endswith(" tokens") for phrase in phrases)


def test_a_saved_plan_keeps_its_layout(packed, tmp_path):
    packed.save(tmp_path / "plan.json")
    loaded = Plan.load(tmp_path / "plan.json")
    assert loaded == packed and loaded.layout == "packed" and loaded.micro_limit == packed.micro_limit


# How well it predicts


@pytest.mark.parametrize("limit", ["3MiB", "4MiB", "8MiB"])
def test_the_predicted_peak_is_the_measured_one(limit):
    plan = small_plan(Lines(), data=ROWS, global_batch=50, layout="packed", memory_limit=limit, workers=0)
    assert plan.ooms == 0
    assert plan.predicted_peak_bytes == pytest.approx(plan.measured_peak_bytes, rel=0.015)
    assert plan.largest_predicted_peak_bytes == pytest.approx(plan.largest_measured_peak_bytes, rel=0.015)
    assert plan.largest_measured_peak_bytes <= plan.budget_bytes


def test_the_chat_model_is_predicted_too():
    plan = small_plan(
        Pretrain(LanguageOptions(model="chatlm-tiny")),
        layout="packed",
        global_batch=8,
        lengths=(12, 16),
        memory_limit="256MiB",
    )
    assert plan.layout == "packed" and plan.ooms == 0
    assert plan.predicted_peak_bytes == pytest.approx(plan.measured_peak_bytes, rel=0.015)


def test_a_row_far_longer_than_the_others_is_predicted_too():
    """The plan is made for the mean row. With whole scores, the longest would take 55 % more than predicted."""
    words = np.random.default_rng(0)
    short, long = ([{"prompt": words.integers(2, 4000, 10), "response": words.integers(2, 4000, length)} for _ in range(count)]
                   for length, count in ((20, 60), (900, 2)))  # fmt: skip
    task = Pretrain(LanguageOptions(model="chatlm-tiny"))
    plan = small_plan(task, data=[*short, *long], layout="packed", global_batch=16, memory_limit="400MiB", workers=0)
    step = [*short[:15], long[0]]
    shapes = [task.shape(row) for row in step]
    groups = [[shapes[row] for row in group] for group in plan.split(shapes)]
    predicted = max(plan.memory_model.peak_bytes(len(one), PACKED.shape(one), whole=len(groups) == 1) for one in groups)
    model = task.model()
    with simulated_memory("4GiB") as memory:
        memory.adopt(model.parameters())
        stepper = Stepper(model, task.optimizer(model), task, plan)
        stepper.step(step)
        result = stepper.step(step)
    assert result.micro_batches == len(groups)
    assert 0.93 * predicted < result.peak_bytes < 1.015 * predicted


def test_what_frozen_weights_save_is_measured_on_packed_rows():
    task = Sft(SftOptions(model="chatlm-tiny", freeze="encoder+embeddings"))
    plan = small_plan(task, layout="packed", global_batch=8, lengths=(12, 16), memory_limit="256MiB")
    assert f"of activations at {plan.micro_batch} rows with " in plan.choice("frozen").reason


def test_a_step_of_any_rows_is_split_within_the_planned_tokens(packed):
    shapes = [(len(row),) for row in draw_rows(50, seed=9)]
    groups = packed.split(shapes)
    assert sorted(row for group in groups for row in group) == list(range(50))
    most = packed.memory_model.rising_cost(packed.micro_batch, packed.shape)
    assert len(groups) == 1 or all(
        packed.memory_model.rising_cost(1, (sum(shapes[row][0] for row in group),)) <= most for group in groups
    )


def test_what_fills_up_a_sequence_does_not_split_it_further(packed):
    """5 rows of 18 are 90 tokens, in a sequence of 128."""
    small = replace(packed, micro_batch=5, accumulation=10)
    assert len(small.split([small.shape] * 50)) <= 10


# When rows are packed


def test_on_a_cpu_rows_are_padded_unless_asked():
    choice = small_plan(Lines()).choice("layout")
    assert (choice.requested, choice.effective, choice.reason) == (
        None,
        "padded",
        "the CPU has no kernels for packed rows",
    )


def test_where_there_are_kernels_rows_are_packed(with_kernels):
    choice = small_plan(Lines(), compile="off").choice("layout")
    assert (choice.requested, choice.effective) == (None, "packed")


def test_in_full_precision_rows_are_padded(with_kernels):
    choice = small_plan(Lines(), precision="fp32").choice("layout")
    assert (choice.effective, choice.reason) == ("padded", "the kernels for packed rows need bf16 or fp16")


def test_padded_stays_padded(with_kernels):
    choice = small_plan(Lines(), layout="padded").choice("layout")
    assert (choice.effective, choice.reason) == ("padded", "as requested")


REFUSED = {
    "the task has no pack()": PaddedLines,
    "packed rows see each other: 8 of them and the same rows alone differ by": Leaky,
    "MambaForCausalLM cannot be trained on packed rows: its layers carry a state": State,
}


@pytest.mark.parametrize("reason", REFUSED)
def test_what_cannot_be_packed_is_refused_by_name(reason):
    task = REFUSED[reason]()
    with pytest.raises(BadOption) as refusal:
        small_plan(task, layout="packed")
    message = str(refusal.value)
    assert message.startswith(f'layout="packed" is not possible for task {task.name}: {reason}')
    assert message.count("Try:") == 1 and message.endswith('. Try: layout="auto".')


@pytest.mark.parametrize("reason", REFUSED)
def test_what_cannot_be_packed_is_padded_and_the_plan_says_why(with_kernels, reason):
    choice = small_plan(REFUSED[reason]()).choice("layout")
    assert (choice.requested, choice.effective) == (None, "padded")
    assert choice.reason.startswith(reason) and "Try" not in choice.reason


def test_rows_without_data_and_without_a_dummy_row_are_padded(with_kernels):
    class Dummy(Lines):
        """It can make a padded batch, but no row."""

        dummy_row = Task.dummy_row

        def dummy(self, rows, shape):
            return self.collate([Lines.dummy_row(self, shape)] * rows)

    choice = small_plan(Dummy()).choice("layout")
    assert (choice.effective, choice.reason) == ("padded", "the task has no dummy_row()")


def test_a_pack_that_fails_names_its_line(with_kernels):
    class Wrong(Lines):
        def pack(self, rows, tokens):
            return {"packed_rows": rows[99]}

    reason = small_plan(Wrong()).choice("layout").reason
    assert reason.startswith("packed rows fail at ") and reason.endswith("IndexError: list index out of range")


def test_a_pack_that_loses_labels_is_found(with_kernels):
    class Short(Lines):
        def pack(self, rows, tokens):
            return super().pack([row[:2] for row in rows], tokens)

    assert small_plan(Short()).choice("layout").reason.startswith("packed, 8 rows count 7 instead of ")


def stand_in(monkeypatch, kernel, rows_of=lambda starts: starts):
    """Attention of packed rows runs `kernel` in bf16, as it runs Triton's on a GPU, on rows that begin at `rows_of(starts)`."""
    for module in (attention, exactness):
        monkeypatch.setattr(
            module, "has_kernels", lambda device, dtype: dtype == torch.bfloat16 and not attention._kernels_off
        )

    def kernel_attention(q, k, v, bias, sinks, seed, starts_q, tiles_q, starts_k, tiles_k, scale, causal, *_):
        rows = Boundaries(rows_of(starts_q), tiles_q), Boundaries(rows_of(starts_k), tiles_k)
        return kernel(attention._reference(q, k, v, *rows, scale, causal, None, None, None, None, 0.0)), None

    monkeypatch.setattr(attention, "kernel_attention", kernel_attention)


def test_kernels_that_agree_with_plain_operations_are_used(with_kernels, monkeypatch):
    stand_in(monkeypatch, lambda out: out)
    assert small_plan(Lines(), compile="off").choice("layout").effective == "packed"


WRONG_KERNELS = {
    "the kernels for packed rows differ by ": lambda out: 3 * out,
    "the kernels for packed rows differ by nan from torch's own operations": lambda out: out * torch.nan,
}


@pytest.mark.parametrize("reason", WRONG_KERNELS)
def test_kernels_that_compute_something_else_are_not_used(with_kernels, monkeypatch, reason):
    stand_in(monkeypatch, WRONG_KERNELS[reason])
    choice = small_plan(Lines(), compile="off").choice("layout")
    assert choice.effective == "padded" and choice.reason.startswith(reason)


LEAKING_KERNELS = {
    "a row sees all before it": lambda starts: starts[[0, -1]],
    "a row in two sees the one before it": lambda starts: torch.cat([starts[:-1:2], starts[-1:]]),
    "the last row sees the one before it": lambda starts: (
        torch.cat([starts[:-2], starts[-1:]]) if len(starts) > 2 else starts
    ),
}


@pytest.mark.parametrize("leak", LEAKING_KERNELS)
def test_kernels_that_leak_between_rows_are_not_used(with_kernels, monkeypatch, leak):
    """Their loss and gradient are near those of torch's own operations: a model as initialised hardly attends."""
    stand_in(monkeypatch, lambda out: out, LEAKING_KERNELS[leak])
    choice = small_plan(Lines(), compile="off").choice("layout")
    assert choice.effective == "padded"
    assert choice.reason.startswith(
        "with the kernels packed rows see each other: 8 of them and the same rows alone differ by "
    )


@pytest.mark.parametrize(
    "error, reason",
    [
        (TaskError("heads of 256 do not fit. Try: layout='padded'."), "heads of 256 do not fit"),
        (RuntimeError("Triton Error [CUDA]: invalid device function"), "RuntimeError: Triton Error [CUDA]: invalid device function"),
    ],
)  # fmt: skip
def test_kernels_that_do_not_run_on_this_card_are_not_used(with_kernels, monkeypatch, error, reason):
    def fail(out):
        raise error

    stand_in(monkeypatch, fail)
    choice = small_plan(Lines(), compile="off").choice("layout")
    assert choice.effective == "padded" and reason in choice.reason


@pytest.mark.parametrize("count", [1, 2, 5])
def test_few_rows_are_compared_once_each(with_kernels, count):
    rows = draw_rows(count, seed=4)
    reason = small_plan(Lines(), data=rows, workers=0, compile="off").choice("layout").reason
    assert reason.startswith(f"loss and gradient of {count} row{'s' * (count > 1)} are the same")


def rows_of_18_and_one_of_100():
    return [*[np.arange(18) % 50 + 2] * 60, np.arange(100) % 50 + 2]


@pytest.mark.parametrize("deterministic", [False, True])
def test_checkpointing_is_used_where_the_longest_row_would_not_fit_without_it(deterministic):
    """The mean row fits without, and is faster."""
    plan = small_plan(
        Lines(), data=rows_of_18_and_one_of_100(), global_batch=8, layout="packed", memory_limit="450KiB", workers=0,
        deterministic=deterministic,
    )  # fmt: skip
    choice = plan.choice("checkpointing")
    assert choice.effective == "on" and "the longest row (100) does not fit" in choice.reason
    assert plan.memory_model.peak_bytes(1, (100,)) < plan.limit_bytes
    assert not plan.warnings


def test_a_table_does_not_choose_a_setting_that_the_longest_row_does_not_fit():
    plan = small_plan(
        Lines(), data=rows_of_18_and_one_of_100(), global_batch=8, layout="packed", memory_limit="450KiB", workers=0,
        table=True,
    )  # fmt: skip
    assert plan.choice("checkpointing").effective == "on"
    assert any(tried.setting.checkpointing == "off" and tried.fits for tried in plan.tried)


@pytest.mark.parametrize("limit, warned", [("300KiB", True), ("2MiB", False)])
def test_a_longest_row_that_does_not_fit_alone_is_a_warning(limit, warned):
    rows = rows_of_18_and_one_of_100()
    plan = small_plan(Lines(), data=rows, global_batch=8, layout="packed", memory_limit=limit, workers=0)
    warnings = [warning for warning in plan.warnings if "the longest row (100) needs about" in warning]
    assert len(warnings) == warned
    assert all("alone, more than the limit of 300 KiB: a run stops there unless" in warning for warning in warnings)


def test_a_long_row_that_fits_is_not_refused_because_short_ones_predict_too_much():
    """Between 64 and 87 words of this model memory grows as fast as it never does again."""
    rows = [*[np.arange(length) % 50 + 2 for length in (64, 87, 174)] * 20, np.arange(350) % 50 + 2]
    plan = small_plan(LongLines(), data=rows, global_batch=16, layout="padded", memory_limit="5MiB", workers=0)
    assert plan.micro_batch == 1 and plan.ooms == 0
    assert plan.measured_peak_bytes <= plan.budget_bytes


class LongLines(Lines):
    """Llama, with room for long rows."""

    def model(self):
        torch.manual_seed(1)
        sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 2}
        return LlamaForCausalLM(LlamaConfig(vocab_size=256, **sizes))

    def collate(self, rows):
        return causal.pad([torch.as_tensor(row) for row in rows])

    def loss(self, model, batch):
        return causal.padded_loss(model, batch)
