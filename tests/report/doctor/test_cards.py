"""Cards that do not exist: NVML's answers, each card's trial, who holds it, its health, and the sum over all of them."""

import sys

import pytest

from brimful.machine.gpu import GpuProcess
from brimful.report.doctor.cards import (
    Nvidia,
    NvidiaCard,
    card_checks,
    connection_checks,
    health_checks,
    idle_checks,
    nvml_checks,
    read_nvidia,
    try_cards,
)
from brimful.report.doctor.software import Torch
from brimful.report.doctor.trial import Ended
from brimful.units import GiB
from tests.report.doctor.fake_machine import CPU, CUDA, UUID, DoctorNvml, gpu, only, tried


@pytest.fixture
def nvml(monkeypatch):
    fake = DoctorNvml()
    monkeypatch.setitem(sys.modules, "pynvml", fake)
    return fake


# ---- NVML ----


def test_nvml_gives_driver_cuda_and_cards(nvml, tmp_path):
    nvml.add(f"{UUID}-0", used=GiB, processes={})
    nvidia = read_nvidia(tmp_path)
    assert (nvidia.driver, nvidia.cuda, nvidia.names) == ("580.159.04", "12.4", ("NVIDIA H200",))
    assert only(nvml_checks(nvidia, in_container=False)).status == "ok"


def test_without_nvml_and_without_a_card_training_on_the_cpu_is_ok(monkeypatch, tmp_path):
    monkeypatch.setitem(sys.modules, "pynvml", None)
    check = only(nvml_checks(read_nvidia(tmp_path), in_container=False))
    assert check.status == "ok" and "CPU" in str(check.text)


def test_a_card_without_a_driver_is_seen_on_the_bus(monkeypatch, tmp_path):
    monkeypatch.setitem(sys.modules, "pynvml", None)
    device = tmp_path / "sys/bus/pci/devices/0000:01:00.0"
    device.mkdir(parents=True)
    (device / "vendor").write_text("0x10de\n")
    (device / "class").write_text("0x030200\n")
    check = only(nvml_checks(read_nvidia(tmp_path), in_container=False))
    assert check.status == "failed" and "0000:01:00.0" in str(check.text) and "driver" in str(check.fix)


@pytest.mark.parametrize(
    ("problem", "container", "words"),
    [
        ("Driver/library version mismatch", False, "restart"),
        ("NVML Shared Library Not Found", True, "NVIDIA_DRIVER_CAPABILITIES"),
        ("the package nvidia-ml-py is not installed", True, "pip install nvidia-ml-py"),
        ("Unknown Error", False, "nvidia-smi"),
    ],
)
def test_an_nvml_that_does_not_answer_beside_a_driver_fails_with_its_fix(problem, container, words):
    nvidia = Nvidia(problem=problem, hardware="/dev/nvidiactl")
    check = only(nvml_checks(nvidia, in_container=container))
    assert check.status == "failed" and words in str(check.fix)


# ---- Each card ----


def card(trial, torch=CUDA, **values):
    return card_checks(gpu(**values), trial, torch, in_container=False)


def test_a_card_that_computes_is_ok():
    check = only(card(tried()))
    assert check.status == "ok" and "80 GiB of 80 GiB free" in str(check.text)


def test_a_card_that_computes_wrong_results_fails():
    assert only(card(tried(correct=False))).status == "failed"
    assert only(card(tried(bf16_correct=False))).status == "failed"


def test_a_card_without_bf16_is_a_warning():
    check = only(card(tried(bf16=False)))
    assert check.status == "warning" and "--precision fp16" in str(check.fix)


@pytest.mark.parametrize(
    ("error", "words"),
    [
        ("AcceleratorError: CUDA error: all CUDA-capable devices are busy or unavailable", "nvidia-smi -c 0"),
        ("OutOfMemoryError: CUDA out of memory", "CUDA_VISIBLE_DEVICES"),
        ("RuntimeError: CUDA error: uncorrectable ECC error encountered", "--gpu-reset -i 0"),
        ("RuntimeError: CUDA initialization error", "nvidia-uvm"),
        ("RuntimeError: CUDA error: an illegal instruction", "dmesg"),
    ],
)
def test_an_error_of_a_card_has_its_fix(error, words):
    check = only(card(Ended(answers=({"card": {"error": error}},))))
    assert check.status == "failed" and error in str(check.text) and words in str(check.fix)


def test_a_card_that_does_not_answer_in_time_fails():
    check = only(card(Ended(code=None, timed_out=True)))
    assert "no answer in time" in str(check.text) and "--timeout" in str(check.fix)


def test_a_driver_that_hangs_is_told_from_a_slow_one():
    assert "hangs" in str(only(card(Ended(code=None, timed_out=True, hangs=True))).text)


def test_a_process_that_crashed_says_how():
    assert "signal 11" in str(only(card(Ended(code=-11))).text)


def test_a_card_without_kernels_fails_with_an_older_build():
    check = only(card(tried(), capability="7.0"))
    assert check.status == "failed" and "7.0" in str(check.text) and "cu126" in str(check.fix)


def test_a_card_newer_than_the_kernels_fails_with_a_newer_build():
    torch = Torch(version="2.11+cu126", cuda="12.6", archs=("sm_80", "sm_90"))
    assert "--upgrade" in str(only(card(tried(), torch, capability="12.0")).fix)


def test_what_others_hold_is_a_warning_with_their_names():
    process = GpuProcess(pid=4711, name="python3", used_bytes=20 * GiB)
    check = only(card(tried(), others=20 * GiB, processes=(process,)), "cuda:0 held")
    assert check.status == "warning" and str(check.text) == "python3 (pid 4711) holds 20 GiB"


def test_memory_of_processes_without_a_name_is_told_too():
    check = only(card_checks(gpu(others=20 * GiB), tried(), CUDA, in_container=True), "cuda:0 held")
    assert str(check.text) == "processes outside this container hold 20 GiB"


def test_a_card_that_others_have_filled_fails_and_is_not_tried():
    full = gpu(others=79 * GiB)
    assert try_cards([full], timeout_s=1, run=lambda *args, **kwargs: pytest.fail("it was tried")) == {}
    checks = card_checks(full, None, CUDA, in_container=False)
    assert only(checks, "cuda:0").status == "not checked"
    assert only(checks, "cuda:0 held").status == "failed"


def test_a_little_memory_of_others_is_nothing():
    assert len(card(tried(), others=GiB)) == 1


def test_every_card_with_room_is_tried_at_once():
    started = []
    run = lambda arguments, **kwargs: started.append(arguments) or [tried() for _ in arguments]  # noqa: E731
    assert list(try_cards([gpu(0), gpu(1, others=79 * GiB), gpu(2)], timeout_s=1, run=run)) == [0, 2]
    assert started == [[["card", "cuda", "0"], ["card", "cuda", "2"]]]


# ---- Health ----


def health(nvml, tmp_path):
    nvml.add(f"{UUID}-0", used=GiB, processes={})
    return health_checks(read_nvidia(tmp_path), [gpu()])


def test_a_healthy_card_is_ok(nvml, tmp_path):
    assert only(health(nvml, tmp_path)).status == "ok"


def test_uncorrected_memory_errors_fail(nvml, tmp_path):
    nvml.errors = 3
    check = only(health(nvml, tmp_path), "cuda:0 memory")
    assert check.status == "failed" and "3 memory errors" in str(check.text)


def test_memory_that_waits_for_a_repair_is_a_warning(nvml, tmp_path):
    nvml.remapped = (0, 1, 1, 0)
    assert only(health(nvml, tmp_path), "cuda:0 memory").status == "warning"


def test_memory_that_could_not_be_repaired_fails(nvml, tmp_path):
    nvml.remapped = (0, 1, 0, 1)
    assert only(health(nvml, tmp_path), "cuda:0 memory").status == "failed"


def test_a_hot_card_is_a_warning_with_its_temperature(nvml, tmp_path):
    nvml.reasons = 0x40
    check = only(health(nvml, tmp_path), "cuda:0 clock")
    assert check.status == "warning" and "91 °C" in str(check.text)


def test_a_power_brake_is_a_warning(nvml, tmp_path):
    nvml.reasons = 0x80
    assert "power" in str(only(health(nvml, tmp_path), "cuda:0 clock").fix)


def test_an_idle_card_or_one_at_its_power_cap_is_healthy(nvml, tmp_path):
    nvml.reasons = 0x1 | 0x4
    assert only(health(nvml, tmp_path)).status == "ok"


def test_a_card_that_torch_does_not_see_is_not_judged(nvml, tmp_path):
    nvml.add("GPU-another", used=0, processes={})
    nvml.errors = 3
    assert health_checks(read_nvidia(tmp_path), [gpu()]) == []


# ---- Idle cards ----


def nvidia(*uuids, utilization=0.0):
    cards = [
        NvidiaCard(index=i, uuid=uuid, name="NVIDIA H200", utilization=utilization) for i, uuid in enumerate(uuids)
    ]
    return Nvidia(cards=tuple(cards))


def test_a_hidden_idle_card_is_a_warning():
    found = idle_checks(nvidia(f"{UUID}-0", "GPU-hidden"), [gpu()], hidden_by="0", processes=None)
    check = only(found)
    assert (
        check.status == "warning" and "CUDA_VISIBLE_DEVICES=0" in str(check.text) and "--processes 2" in str(check.fix)
    )


def test_a_hidden_busy_card_is_left_to_its_user():
    assert idle_checks(nvidia(f"{UUID}-0", "GPU-x", utilization=0.9), [gpu()], hidden_by="0", processes=None) == []


def test_a_run_that_uses_fewer_cards_than_there_are_is_a_warning():
    found = idle_checks(nvidia(f"{UUID}-0", f"{UUID}-1"), [gpu(0), gpu(1)], hidden_by=None, processes=1)
    assert only(found).status == "warning" and "--processes 2" in str(only(found).fix)


def test_several_visible_cards_are_ok_with_the_flag_that_uses_them():
    found = idle_checks(nvidia(f"{UUID}-0", f"{UUID}-1"), [gpu(0), gpu(1)], hidden_by=None, processes=None)
    assert only(found).status == "ok" and "--processes 2" in str(only(found).text)


# ---- all_reduce ----


TWO = (gpu(0), gpu(1))


def connect(ended, gpus=TWO, torch=CUDA):
    trials = {one.index: tried() for one in gpus}
    return only(connection_checks(gpus, trials, torch, timeout_s=10, run=lambda *args, **kwargs: ended))


def added(**answer):
    return Ended(answers=({"all_reduce": answer or {"seconds": 0.4}},))


def test_a_sum_over_all_cards_is_ok():
    check = connect([added(), added()])
    assert check.status == "ok" and str(check.text) == "NCCL added up one number over 2 cards in 0.40 s"


def test_a_failed_sum_has_the_cause_and_the_fix_of_the_rank_that_knows():
    problem = {"problem": "the processes cannot communicate through nccl (x)", "fix": "set NCCL_P2P_DISABLE=1"}
    check = connect([Ended(code=None), added(**problem)])
    assert check.status == "failed" and "nccl" in str(check.text) and str(check.fix) == "set NCCL_P2P_DISABLE=1"


def test_ranks_that_hang_fail_with_a_variable_to_try():
    check = connect([Ended(code=None, timed_out=True)] * 2)
    assert check.status == "failed" and "NCCL_P2P_DISABLE=1" in str(check.fix)


def test_a_rank_that_crashes_is_shown_with_its_last_line():
    check = connect([Ended(code=-6, errors="NCCL version 2\nfatal: bad\n"), Ended(code=None)])
    assert check.status == "failed" and "fatal: bad" in str(check.text)


def test_one_card_has_nothing_to_add_up():
    assert connect([], gpus=(gpu(),)).status == "not checked"


def test_without_nccl_it_is_not_checked():
    check = connect([], torch=Torch(version="2", cuda="13.0", nccl=False))
    assert check.status == "not checked" and "NCCL" in str(check.text)


def test_cards_that_do_not_compute_are_left_out_of_the_sum():
    trials = {0: tried(), 1: tried(correct=False)}
    found = connection_checks(
        [gpu(0), gpu(1)], trials, CUDA, timeout_s=1, run=lambda *args, **kwargs: pytest.fail("ran")
    )
    assert only(found).status == "not checked"


def test_without_cards_two_processes_add_up_through_gloo():
    calls = []

    def run(arguments, **options):
        calls.append((arguments, options))
        return [added(), added()]

    check = only(connection_checks([], {}, CPU, timeout_s=10, run=run))
    (arguments, options), *_ = calls
    assert check.status == "ok" and "gloo" in str(check.text)
    assert [words[:3] for words in arguments] == [["rank", "cpu", "0"], ["rank", "cpu", "1"]]
    assert [one["RANK"] for one in options["environments"]] == [0, 1] and options["together"]
