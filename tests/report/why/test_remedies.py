"""Fixes: ranked, with figures that follow from the message, and settings that exist."""

import inspect
import re
from dataclasses import fields
from pathlib import Path

import pytest

import brimful
from brimful.planning.plan_options import PlanOptions
from brimful.report.why.diagnosis import FRAMEWORKS
from brimful.tasks.language import LanguageOptions
from brimful.training.options import TrainOptions
from brimful.units import GiB

LOGS = sorted((Path(__file__).parents[2] / "logs").glob("*.log"))
ALL_FIXES = {(fix.title, name, setting): None for log in LOGS for fix in brimful.diagnose(log).fixes for name, setting in fix.flags.items()}  # fmt: skip


def oom(
    *, wanted="1.23 GiB", free="1.06 GiB", allocated="14.94 GiB", unused="3.18 GiB", process="18.50 GiB", settings=None
):
    message = (
        f"CUDA out of memory. Tried to allocate {wanted}. GPU 0 has a total capacity of 19.58 GiB of which {free} is free. "
        f"Including non-PyTorch memory, this process has {process} memory in use. Of the allocated memory {allocated} is allocated by "
        f"PyTorch, and {unused} is reserved by PyTorch but unallocated."
    )
    return brimful.diagnose(message, settings=settings)


def fix_of(diagnosis, words):
    return next((fix for fix in diagnosis.fixes if words in fix.title), None)


def gib(text):
    low, _, high = text.removesuffix(" GiB").partition("–")
    return float(low), float(high or low)


def test_torchs_chunked_loss_says_which_torch_has_it():
    settings = {"micro_batch": 32, "lengths": (256, 252), "vocab": 40960}
    (chunked,) = [fix for fix in oom(settings=settings).fixes if "in chunks" in fix.title]
    for framework in ("accelerate", "lightning"):
        assert "linear_cross_entropy" in chunked.flags[framework] and "torch 2.13" in chunked.flags[framework]


def test_the_guides_message_ranks_its_remedies():
    titles = [
        fix.title
        for fix in oom(
            settings={"micro_batch": 32, "accumulation": 2, "processes": 3, "lengths": (256, 252), "vocab": 40960}
        ).fixes
    ]
    order = [
        "expandable_segments",
        "micro-batches",
        "in chunks",
        "bf16",
        "checkpointing",
        "less state",
        "LoRA",
        "Cut rows",
        "cards",
    ]
    assert [next(word for word in order if word in title) for title in titles] == order


def test_expandable_segments_save_at_most_what_is_reserved_and_unused():
    fix = fix_of(oom(), "expandable_segments")
    assert (
        fix.saves == "up to 3.18 GiB (17 % of what the process holds)"
        and fix.basis == "measured"
        and fix.enough is None
    )


@pytest.mark.parametrize(("unused", "offered"), [("1.80 GiB", False), ("1.90 GiB", True)])
def test_expandable_segments_are_recommended_above_10_percent(unused, offered):
    assert bool(fix_of(oom(unused=unused), "expandable_segments, which")) is offered


@pytest.mark.parametrize(
    ("wanted", "free", "unused", "offered"),
    [
        ("916.00 MiB", "612.81 MiB", "812.33 MiB", True),
        ("1.90 GiB", "612.81 MiB", "812.33 MiB", False),  # more than both
        ("20.00 MiB", "5.56 MiB", "812.33 MiB", False),  # 1 to 10 MiB were wanted: the card is full
        ("130.00 MiB", "60.81 MiB", "100.00 MiB", False),  # half a percent
    ],
)
def test_expandable_segments_come_second_where_the_block_would_fit_in_pieces(wanted, free, unused, offered):
    fixes = oom(wanted=wanted, free=free, unused=unused, allocated="17.00 GiB").fixes
    assert ["expandable_segments as well" in fix.title for fix in fixes] == [
        offered and place == 1 for place in range(len(fixes))
    ]
    assert not offered or fixes[1].enough is None


def test_expandable_segments_that_are_on_are_not_offered():
    assert fix_of(oom(settings={"growing_segments": True}), "expandable_segments") is None


@pytest.mark.parametrize(
    ("rows", "accumulation", "processes"), [(32, 2, 3), (24, 1, 1), (7, 3, 2), (48, 5, 8), (2, 1, 1), (13, 1, 4)]
)
def test_a_smaller_micro_batch_keeps_the_global_batch(rows, accumulation, processes):
    settings = {"micro_batch": rows, "accumulation": accumulation, "processes": processes}
    fix = fix_of(oom(settings=settings), "micro-batches")
    smaller, steps = (
        int(number)
        for number in re.findall(
            r"per_device_train_batch_size=(\d+), gradient_accumulation_steps=(\d+)", fix.flags["transformers"]
        )[0]
    )
    assert smaller < rows and smaller * steps * processes == rows * accumulation * processes
    assert fix.global_batch.endswith(f"= {rows * accumulation * processes}")
    assert fix.flags["brimful"] == f"--global-batch {rows * accumulation * processes}"


def test_a_micro_batch_of_one_cannot_be_smaller():
    assert not [fix for fix in oom(settings={"micro_batch": 1, "accumulation": 64}).fixes if "micro-batch" in fix.title]


def test_accumulation_is_never_said_to_save_memory():
    for log in LOGS:
        for fix in brimful.diagnose(log).fixes:
            if "accumulat" in fix.title:
                assert "micro-batch" in fix.title, "accumulation comes only with smaller micro-batches"


def test_memory_saved_depends_on_the_micro_batch_alone():
    few, many = (
        fix_of(oom(settings={"micro_batch": 32, "accumulation": accumulation, "processes": 1}), "micro-batches")
        for accumulation in (1, 64)
    )
    smaller = [int(re.search(r"of (\d+) instead", fix.title)[1]) for fix in (few, many)]
    shares = [gib(fix.saves)[0] / (1 - size / 32) for fix, size in zip((few, many), smaller, strict=True)]
    assert shares[0] == pytest.approx(shares[1], rel=0.02)


def test_what_nothing_was_measured_for_is_a_range():
    for fix in oom().fixes:
        if fix.saves and "–" in fix.saves:
            assert fix.basis == "range"


def test_the_state_of_counted_weights_is_predicted():
    fix = fix_of(oom(settings={"parameters": 187_700_000}), "optimizer")
    assert fix.basis == "predicted" and fix.saves == "1.05–1.4 GiB"


def test_activations_are_what_the_weights_leave():
    low, high = gib(
        fix_of(oom(settings={"parameters": 187_700_000, "micro_batch": 2, "accumulation": 1}), "micro-batches").saves
    )
    held = 14.94 + 1.23
    assert low == pytest.approx((held - 16 * 187.7e6 / GiB) / 2, abs=0.01) and high == pytest.approx(
        (held - 2 * 187.7e6 / GiB) / 2, abs=0.01
    )


def test_a_fix_that_cannot_be_enough_comes_last():
    diagnosis = oom(wanted="9.00 GiB", free="0.10 GiB", settings={"parameters": 50_000_000})
    enough = [fix.enough for fix in diagnosis.fixes]
    assert False in enough and enough == sorted(enough, key=lambda one: one is False)


@pytest.mark.parametrize(
    ("settings", "left_out"),
    [
        ({"precision": "bf16"}, "bf16"),
        ({"checkpointing": True}, "checkpointing"),
        ({"optimizer": "adafactor"}, "Adafactor"),
        ({"parameters": 7_000_000_000, "trained": 4_000_000}, "LoRA"),
    ],
)
def test_what_is_on_already_is_not_offered(settings, left_out):
    assert fix_of(oom(), left_out) is not None
    assert fix_of(oom(settings=settings), left_out) is None


def test_no_fix_saves_more_than_the_card_holds_beside_the_weights():
    """16 bytes for each of 6.7 billion weights would be 100 GiB, and 78 GiB were held."""
    for fix in brimful.diagnose(LOGS[0].parent / "llamafactory-full.log").fixes:
        assert fix.saves.startswith("up to ") and float(fix.saves.split()[2]) < 77.9 - 2 * 6.74e9 / GiB + 1, fix
        assert fix.basis == "range" and fix.enough is None


def test_a_model_in_4_bits_is_not_counted_as_if_it_were_trained():
    fix = fix_of(brimful.diagnose(LOGS[0].parent / "axolotl-qlora.log"), "micro-batches")
    assert fix.enough and gib(fix.saves)[1] < (17.3 + 7.83) / 2


def test_adapters_are_not_offered_to_those_who_train_them():
    log = "Fine-tuning method: LoRA\nNumber of trainable parameters = 20,185,088\n"
    message = "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 1.50 GiB. GPU 0 has a total capacity of 23.64 GiB of which 1.06 GiB is free. Of the allocated memory 21.40 GiB is allocated by PyTorch, and 10.00 MiB is reserved"
    diagnosis = brimful.diagnose(log + message)
    assert fix_of(diagnosis, "LoRA") is None
    low, high = gib(fix_of(diagnosis, "Divide the micro-batch").saves)  # frozen weights are not counted in the log
    assert low < 0.5 * 0.5 * 22.9 and high < 0.5 * 0.95 * 22.9


def test_while_weights_are_loaded_there_are_no_rows_to_leave_out():
    everything = _all_of(brimful.diagnose(LOGS[0].parent / "loading-shards.log"))
    assert "micro-batch" not in everything and "rows" not in everything and "checkpointing" not in everything
    assert "--weights bf16" in everything and "--load-in 4bit --lora r=16" in everything


def test_a_bar_of_the_loader_that_is_full_is_no_sign_of_loading():
    log = (LOGS[0].parent / "loading-shards.log").read_text(encoding="utf-8").replace(" 38%", "100%")
    assert "phase" not in brimful.diagnose(log).figures


def test_adapters_are_brimfuls_too():
    fix = fix_of(oom(), "LoRA")
    assert fix.flags["brimful"] == "--lora r=16"


@pytest.mark.parametrize(("free", "first"), [(20.12, "Give vLLM"), (3.21, "Stop the other"), (0.1, "Stop the other")])
def test_vllm_gets_no_more_than_is_free(free, first):
    fixes = brimful.diagnose(
        f"ValueError: Free memory on device ({free}/79.15 GiB) on startup is less than desired GPU memory utilization (0.9, 71.24 GiB)."
    ).fixes
    assert fixes[0].title.startswith(first)
    for fix in fixes:
        for share in re.findall(r"utilization[ =]([\d.]+)", fix.flags["shell"]):
            assert 0 < float(share) * 79.15 < free


def test_a_rate_that_gave_nan_is_never_raised():
    for rate in ("1e-05", "4.9e-05", "0.001", "3e-4"):
        log = f"{{'loss': 3.1, 'learning_rate': {rate}}}\n{{'loss': nan, 'grad_norm': nan, 'learning_rate': {rate}}}\n"
        fix = fix_of(brimful.diagnose(log), "Lower the learning rate")
        (lower,) = re.findall(r"--lr (\S+)", fix.flags["brimful"])
        assert 0.1 * float(rate) < float(lower) < 0.5 * float(rate)


def test_a_rate_that_the_log_does_not_name_is_not_made_up():
    fix = fix_of(brimful.diagnose("step 4 loss: nan\n"), "Lower the learning rate")
    assert "--lr" not in fix.flags["brimful"] and "learning_rate" not in fix.flags["transformers"]


def test_a_machine_without_ram_is_no_matter_of_containers():
    everything = _all_of(brimful.diagnose(LOGS[0].parent / "journalctl-machine.log"))
    assert "docker" not in everything and "End other programs" in everything


def test_no_memory_limit_is_made_up():
    everything = _all_of(brimful.diagnose("run.sh: line 12: 48213 Killed                  python prepare.py\n"))
    assert "--memory SIZE" in everything and not re.search(r"--memory \d", everything)


def test_a_full_dev_shm_needs_no_workers_and_nothing_of_live_processes_is_deleted():
    everything = _all_of(brimful.diagnose(LOGS[0].parent / "dataloader-bus-error.log"))
    assert "--workers 0" in everything and " rm " not in f" {everything}"


def test_only_known_modules_are_installed():
    assert "pip install" not in _all_of(brimful.diagnose(LOGS[0].parent / "own-module-missing.log"))
    assert "flash-attn" in _all_of(brimful.diagnose(LOGS[0].parent / "flash-attn-missing.log"))


def test_a_mac_is_not_told_to_close_what_is_its_own():
    assert "other programs" not in _all_of(brimful.diagnose(LOGS[0].parent / "mps.log"))


def test_in_the_optimizers_step_activations_are_gone():
    trace = 'Traceback (most recent call last):\n  File "a.py", line 3, in <module>\n    optimizer.step()\n'
    message = "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 98.00 MiB. GPU 0 has a total capacity of 15.77 GiB of which 2.00 MiB is free."
    titles = " ".join(fix.title for fix in brimful.diagnose(trace + message).fixes)
    assert "optimizer" in titles and "micro-batch" not in titles and "checkpointing" not in titles


def test_brimful_flags_exist():
    flags = {
        f"--{field.name.rstrip('_').replace('_', '-')}"
        for owner in (PlanOptions, TrainOptions, LanguageOptions)
        for field in fields(owner)
    }
    named = {flag for _, name, setting in ALL_FIXES if name == "brimful" for flag in re.findall(r"--[a-z-]+", setting)}
    assert named <= flags | {"--output"}, named - flags


def test_brimful_commands_exist(capsys):
    from brimful.cli.app import make_app

    commands = {
        setting.split()[1] for _, name, setting in ALL_FIXES if name == "brimful" and setting.startswith("brimful ")
    }
    assert commands - {"doctor"} <= set(make_app([])), commands


def test_transformers_arguments_exist():
    from transformers import Seq2SeqTrainingArguments

    known = set(inspect.signature(Seq2SeqTrainingArguments).parameters)
    settings = [setting for _, name, setting in ALL_FIXES if name == "transformers" and re.match(r"[a-z_]+=", setting)]
    named = {name for setting in settings for name in re.findall(r"(?:^|, )([a-z_]+)=", setting)}
    assert settings and named <= known, named - known


def test_lightning_arguments_exist():
    from lightning.pytorch import Trainer

    known = set(inspect.signature(Trainer).parameters)
    named = {
        word
        for _, name, setting in ALL_FIXES
        if name == "lightning"
        for call in re.findall(r"Trainer\(([^)]*)\)", setting)
        for word in re.findall(r"(\w+)=", call)
    }
    assert named and named <= known, named - known


def test_settings_are_given_by_framework():
    assert {name for _, name, _ in ALL_FIXES} == {*FRAMEWORKS, "shell"}


def _all_of(diagnosis) -> str:
    return " ".join(f"{fix.title} {fix.costs} {' '.join(fix.flags.values())}" for fix in diagnosis.fixes)


@pytest.mark.parametrize(("full", "other"), [(0, 1), (1, 0), (3, 1)])
def test_another_card_is_not_the_full_one(full, other):
    message = (
        f"torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 1.23 GiB. GPU {full} has a total capacity of 79.25 GiB of which 1.06 GiB is free. "
        "Process 12345 has 40.02 GiB memory in use. Including non-PyTorch memory, this process has 38.10 GiB memory in use. "
        "Of the allocated memory 37.00 GiB is allocated by PyTorch, and 100.00 MiB is reserved by PyTorch but unallocated."
    )
    fix = brimful.diagnose(message).fixes[0]
    assert fix.flags["brimful"] == f"--device cuda:{other}"
    assert fix.flags["shell"].endswith(f"CUDA_VISIBLE_DEVICES={other}")


def test_a_mac_is_not_told_of_nvidia():
    everything = _all_of(brimful.diagnose(LOGS[0].parent / "mps.log"))
    assert "bitsandbytes" not in everything and "Ampere" not in everything and "8-bit" not in everything


def test_a_tensor_that_does_not_fit_the_host_is_not_the_workers_fault():
    diagnosis = brimful.diagnose(LOGS[0].parent / "torch-cpu.log")
    assert "tensor" in diagnosis.fixes[0].title and "killed process" not in _all_of(diagnosis)
    assert "--memory 76g" in _all_of(diagnosis)  # 51 GiB were wanted


def test_bf16_instead_of_fp16_is_only_for_fp16():
    assert "bf16" not in _all_of(brimful.diagnose(LOGS[0].parent / "nan-loss.log"))
    assert "bf16" in _all_of(brimful.diagnose(LOGS[0].parent / "loss-scale.log"))
