"""GPUs that do not exist: what NVML and torch report becomes one record, what they refuse becomes a note."""

import sys
import warnings
from types import SimpleNamespace

import psutil
import pytest
import torch

from brimful.machine.gpu import Gpu, GpuProcess, describe_holders, detect_gpus, gpu_holders
from brimful.units import GiB, MiB

UUID = "0b22bb49-e7db-2222-8ec0-e808677dbcdb"
OTHER = "11111111-e7db-2222-8ec0-e808677dbcdb"
NOBODY = 4_000_111
"""A pid above the kernel's largest, so no process has it here."""


def one_note(notes: tuple[str, ...], *words: str) -> None:
    assert len(notes) == 1 and all(word in notes[0] for word in words), notes


def test_total_is_what_torch_says_and_used_is_that_less_nvmls_free(nvml, torch_sees):
    nvml.add(f"GPU-{UUID}", used=GiB, processes={})  # NVML's total is 140 GiB: 1 GiB is the driver's reserve
    torch_sees(UUID)
    (gpu,) = detect_gpus().gpus
    assert (gpu.total_bytes, gpu.free_bytes, gpu.used_by_others_bytes) == (139 * GiB, 139 * GiB, 0)


def test_other_processes_memory_is_what_this_one_does_not_hold(nvml, torch_sees, me):
    nvml.add(f"GPU-{UUID}", used=31 * GiB, processes={me: 10 * GiB, NOBODY: 20 * GiB})
    torch_sees(UUID, context=True, reserved=9 * GiB)
    (gpu,) = detect_gpus().gpus
    assert (gpu.own_bytes, gpu.used_by_others_bytes) == (10 * GiB, 20 * GiB)


def test_this_process_is_not_among_the_others(nvml, torch_sees, me):
    nvml.add(f"GPU-{UUID}", used=31 * GiB, processes={me: 10 * GiB, NOBODY: 20 * GiB})
    torch_sees(UUID, context=True)
    assert [process.pid for process in detect_gpus().gpus[0].other_processes] == [NOBODY]


def test_a_process_detected_here_has_its_name(nvml, torch_sees):
    parent = psutil.Process().ppid()
    nvml.add(f"GPU-{UUID}", used=2 * GiB, processes={parent: GiB})
    torch_sees(UUID)
    expected = GpuProcess(pid=parent, name=psutil.Process(parent).name(), used_bytes=GiB)
    assert detect_gpus().gpus[0].other_processes == (expected,)


def test_a_process_only_nvml_can_name_has_the_name_of_its_program(nvml, torch_sees):
    nvml.add(f"GPU-{UUID}", used=2 * GiB, processes={NOBODY: GiB})
    nvml.names[NOBODY] = "/opt/env/bin/python3 train.py"
    torch_sees(UUID)
    assert detect_gpus().gpus[0].other_processes[0].name == "python3"


def test_a_process_nobody_can_name_has_none(nvml, torch_sees):
    nvml.add(f"GPU-{UUID}", used=2 * GiB, processes={NOBODY: None})
    torch_sees(UUID)
    assert detect_gpus().gpus[0].other_processes == (GpuProcess(pid=NOBODY, name=None, used_bytes=None),)


def test_pids_of_another_namespace_are_not_given_local_names(nvml, torch_sees):
    parent = psutil.Process().ppid()  # a number that means someone here, but NVML's numbers are the host's
    nvml.add(f"GPU-{UUID}", used=2 * GiB, processes={parent: GiB})
    torch_sees(UUID, context=True, reserved=GiB)
    assert detect_gpus().gpus[0].other_processes[0].name is None


def test_a_share_nvml_does_not_tell_is_what_torch_reserved_and_noted(nvml, torch_sees):
    nvml.add(f"GPU-{UUID}", used=6 * GiB, processes={})
    torch_sees(UUID, context=True, reserved=4 * GiB)
    detected = detect_gpus()
    assert (detected.gpus[0].own_bytes, detected.gpus[0].used_by_others_bytes) == (4 * GiB, GiB)
    one_note(detected.notes, "GPU 0", "What torch has reserved is counted")


def test_cards_are_matched_by_uuid_not_by_number(nvml, torch_sees):
    nvml.add(f"GPU-{OTHER}", used=100 * GiB, processes={})
    nvml.add(f"GPU-{UUID}", used=GiB, processes={})
    torch_sees(UUID)  # as under CUDA_VISIBLE_DEVICES=1
    (gpu,) = detect_gpus().gpus
    assert (gpu.index, gpu.uuid, gpu.free_bytes) == (0, f"GPU-{UUID}", 139 * GiB)


def test_a_mig_slice_is_found_by_its_own_uuid(nvml, torch_sees):
    nvml.add(f"MIG-{UUID}", used=2 * GiB, total=20 * GiB, processes={})
    torch_sees(UUID, total=20 * GiB)
    (gpu,) = detect_gpus().gpus
    assert (gpu.uuid, gpu.free_bytes) == (f"MIG-{UUID}", 18 * GiB)


def test_the_whole_cards_figures_are_not_taken_for_a_slice(nvml, torch_sees):
    nvml.add(f"GPU-{UUID}", used=2 * GiB, processes={})
    torch_sees(UUID, total=20 * GiB, free=15 * GiB)
    detected = detect_gpus()
    assert (detected.gpus[0].free_bytes, detected.gpus[0].used_by_others_bytes) == (15 * GiB, None)
    assert any("who uses GPU 0 is unknown" in note for note in detected.notes)


def test_nothing_is_asked_of_torch_that_makes_a_context_where_nvml_answers(nvml, torch_sees, monkeypatch):
    nvml.add(f"GPU-{UUID}", used=GiB, processes={})
    torch_sees(UUID)
    monkeypatch.setattr(torch.accelerator, "get_memory_info", lambda _: pytest.fail("this makes a CUDA context"))
    assert detect_gpus().gpus[0].free_bytes == 139 * GiB


def test_without_pynvml_torch_tells_what_is_free_and_the_rest_is_unknown(torch_sees, monkeypatch):
    monkeypatch.setitem(sys.modules, "pynvml", None)
    torch_sees(UUID, free=100 * GiB)
    detected = detect_gpus()
    assert (detected.gpus[0].free_bytes, detected.gpus[0].used_by_others_bytes, detected.driver) == (
        100 * GiB,
        None,
        None,
    )
    assert any("NVML is not available: the package nvidia-ml-py is not installed" in note for note in detected.notes)


def test_a_context_created_by_detection_is_noted(torch_sees, monkeypatch):
    monkeypatch.setitem(sys.modules, "pynvml", None)
    torch_sees(UUID, free=100 * GiB)
    assert any("took a CUDA context" in note for note in detect_gpus().notes)


def test_an_nvml_that_does_not_start_is_a_note(nvml, torch_sees):
    nvml.refused = {"nvmlInit"}
    torch_sees(UUID, context=True)
    one_note(detect_gpus().notes, "NVML is not available: Not Supported", "other processes' memory is unknown")


def test_a_card_too_full_for_a_context_is_still_listed(torch_sees, monkeypatch):
    def full(_: int) -> None:
        raise RuntimeError("CUDA error: out of memory\nCUDA kernel errors might be…")

    monkeypatch.setitem(sys.modules, "pynvml", None)
    torch_sees(UUID)
    monkeypatch.setattr(torch.accelerator, "get_memory_info", full)
    detected = detect_gpus()
    assert (detected.gpus[0].total_bytes, detected.gpus[0].free_bytes) == (139 * GiB, None)
    assert any("cuda:0 (CUDA error: out of memory)" in note for note in detected.notes)


def test_a_refused_process_list_leaves_the_sum_known(nvml, torch_sees):
    nvml.add(f"GPU-{UUID}", used=21 * GiB, processes={NOBODY: 20 * GiB})
    nvml.refused = {"nvmlDeviceGetComputeRunningProcesses"}
    torch_sees(UUID)
    detected = detect_gpus()
    assert (detected.gpus[0].used_by_others_bytes, detected.gpus[0].other_processes) == (20 * GiB, ())
    one_note(detected.notes, "nvmlDeviceGetComputeRunningProcesses (Not Supported)", "who uses GPU 0 is unknown")


def test_a_refused_memory_question_is_answered_by_torch(nvml, torch_sees):
    nvml.add(f"GPU-{UUID}", used=GiB, processes={})
    nvml.refused = {"nvmlDeviceGetMemoryInfo"}
    torch_sees(UUID, context=True, free=7 * GiB)
    detected = detect_gpus()
    assert detected.gpus[0].free_bytes == 7 * GiB
    one_note(detected.notes, "nvmlDeviceGetMemoryInfo (Not Supported)")


def test_a_question_this_pynvml_does_not_know_is_no_error(nvml, torch_sees, monkeypatch):
    nvml.add(f"GPU-{UUID}", used=GiB, processes={})
    monkeypatch.delattr(type(nvml), "nvmlDeviceGetGraphicsRunningProcesses")
    torch_sees(UUID)
    assert detect_gpus().notes == ()


def test_a_desktops_memory_is_listed_too(nvml, torch_sees, monkeypatch):
    nvml.add(f"GPU-{UUID}", used=2 * GiB, processes={})
    drawing = SimpleNamespace(pid=NOBODY, usedGpuMemory=300 * MiB)
    monkeypatch.setattr(type(nvml), "nvmlDeviceGetGraphicsRunningProcesses", lambda *_: [drawing])
    torch_sees(UUID)
    assert [process.used_bytes for process in detect_gpus().gpus[0].other_processes] == [300 * MiB]


def test_a_card_torch_cannot_read_is_left_out_with_a_note(nvml, torch_sees, monkeypatch):
    def lost(_: int) -> None:
        raise RuntimeError("GPU is lost")

    torch_sees(UUID)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lost)
    detected = detect_gpus()
    assert detected.gpus == ()
    one_note(detected.notes, "torch cannot read cuda:0 (GPU is lost)")


def test_capability_and_driver_are_given(nvml, torch_sees):
    nvml.add(f"GPU-{UUID}", used=GiB, processes={})
    torch_sees(UUID)
    (gpu,) = detect_gpus().gpus
    assert (gpu.capability, gpu.driver) == ("9.0", "580.159.04")


def test_a_cpu_build_beside_a_card_gets_the_advice_to_install_the_cuda_build(nvml, monkeypatch):
    nvml.add(f"GPU-{UUID}", used=0, processes={})
    monkeypatch.setattr(torch, "__version__", "2.13.0+cpu")
    monkeypatch.setattr(torch.version, "cuda", None)
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: False)
    one_note(
        detect_gpus().notes, "torch 2.13.0+cpu has no CUDA support but NVML sees NVIDIA H200", "install the CUDA build"
    )


def test_the_driver_is_known_even_where_torch_sees_no_card(nvml, torch_sees):
    nvml.add(f"GPU-{UUID}", used=0, processes={})
    torch_sees()
    assert detect_gpus().driver == "580.159.04"


def test_cards_hidden_by_the_environment_are_reported(nvml, torch_sees, monkeypatch):
    nvml.add(f"GPU-{UUID}", used=0, processes={})
    torch_sees()
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    one_note(detect_gpus().notes, "CUDA_VISIBLE_DEVICES=''", "NVIDIA H200")


def test_a_cuda_build_without_a_driver_says_so(torch_sees, nvml):
    nvml.refused = {"nvmlInit"}
    torch_sees()
    one_note(detect_gpus().notes, "built for CUDA 13.0", "no NVIDIA GPU answers", "Not Supported")


def test_a_warning_of_torchs_becomes_a_note(nvml, torch_sees, monkeypatch):
    def available() -> bool:
        warnings.warn("CUDA initialization: the NVIDIA driver is too old", stacklevel=1)
        return False

    torch_sees()
    monkeypatch.setattr(torch.accelerator, "is_available", available)
    assert "torch warns: CUDA initialization: the NVIDIA driver is too old" in detect_gpus().notes


def test_an_intel_card_is_read_through_torch_alone(monkeypatch):
    properties = SimpleNamespace(name="Intel Max 1550", total_memory=64 * GiB, driver_version="1.6.33578")
    module = SimpleNamespace(get_device_properties=lambda _: properties)
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: True)
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda: torch.device("xpu"))
    monkeypatch.setattr(torch.accelerator, "device_count", lambda: 1)
    monkeypatch.setattr(torch.accelerator, "get_memory_info", lambda _: (60 * GiB, 64 * GiB))
    monkeypatch.setattr(torch, "get_device_module", lambda _: module)
    (gpu,) = detect_gpus().gpus
    assert (gpu.kind, gpu.name, gpu.free_bytes, gpu.driver) == ("xpu", "Intel Max 1550", 60 * GiB, "1.6.33578")


def test_an_apple_gpu_has_the_share_of_ram_it_may_take(monkeypatch):
    def unsupported(_: int) -> None:
        raise RuntimeError("not supported on mps")

    module = SimpleNamespace(recommended_max_memory=lambda: 21 * GiB)
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: True)
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda: torch.device("mps"))
    monkeypatch.setattr(torch.accelerator, "device_count", lambda: 1)
    monkeypatch.setattr(torch.accelerator, "get_memory_info", unsupported)
    monkeypatch.setattr(torch, "get_device_module", lambda _: module)
    (gpu,) = detect_gpus().gpus
    assert (gpu.kind, gpu.name, gpu.total_bytes, gpu.free_bytes) == ("mps", "Apple GPU", 21 * GiB, None)


def card(others_bytes: int | None, *processes: tuple[int, str | None, int | None]) -> Gpu:
    return Gpu(
        index=0,
        kind="cuda",
        name="NVIDIA H200",
        uuid=None,
        total_bytes=140 * GiB,
        free_bytes=20 * GiB,
        used_by_others_bytes=others_bytes,
        own_bytes=0,
        other_processes=tuple(GpuProcess(pid=p, name=n, used_bytes=b) for p, n, b in processes),
        driver=None,
        capability="9.0",
    )


HELD = int(61.2 * GiB)
PYTHON = (4711, "python", HELD)


@pytest.mark.parametrize(
    ("gpu", "phrase"),
    [
        (card(None), "who holds the rest is unknown"),
        (card(0), "no other process holds memory"),
        (card(3 * MiB), "no other process holds memory"),
        (card(HELD, PYTHON), "python (pid 4711) holds 61.2 GiB"),
        (card(HELD), "processes outside this container hold 61.2 GiB"),
        (card(HELD, (99, None, None)), "processes outside this container hold 61.2 GiB"),
        (card(HELD, (99, None, HELD)), "processes outside this container hold 61.2 GiB"),
        (card(HELD, (4711, "python", None)), "python (pid 4711) holds 61.2 GiB"),
        (card(HELD, (1, "a", None), (2, "b", None)), "a (pid 1) and b (pid 2) hold 61.2 GiB"),
        (
            card(HELD + 2 * GiB, PYTHON),
            "python (pid 4711) holds 61.2 GiB and processes outside this container hold 2 GiB",
        ),
        (
            card(15 * GiB, *((pid, "python", (6 - pid) * GiB) for pid in range(1, 6))),
            "python (pid 1) holds 5 GiB, python (pid 2) holds 4 GiB, python (pid 3) holds 3 GiB and 2 more hold 3 GiB",
        ),
    ],
)
def test_other_processes_are_described_in_one_phrase(gpu, phrase):
    assert describe_holders(gpu, in_container=True) == phrase


def test_without_a_container_invisible_processes_are_not_said_to_be_outside_one():
    assert describe_holders(card(HELD), in_container=False) == "processes that are not visible from here hold 61.2 GiB"


def test_processes_can_be_described_by_the_index_of_the_card(nvml, torch_sees):
    nvml.add("GPU-u", used=21 * GiB, processes={4_000_111: 20 * GiB})
    nvml.names[4_000_111] = "python3"
    torch_sees("u")
    assert gpu_holders(0) == "python3 (pid 4000111) holds 20 GiB"


def test_a_card_that_does_not_exist_is_reported(nvml, torch_sees):
    torch_sees()
    assert gpu_holders(3) == "there is no GPU 3"
