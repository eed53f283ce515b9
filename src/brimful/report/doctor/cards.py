"""The cards: does NVML answer, does each card compute, is it healthy, who holds its memory, do the cards reach each other.

NVML is asked here, everything else in child processes (`trial.py`). A card that others have nearly filled is not tried: the CUDA
context alone takes about 0.5 GiB, and a training that is about to allocate must not miss them.
"""

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from brimful.languages import Sentence, say
from brimful.machine.gpu import Gpu, GpuProcess, Nvml, open_nvml
from brimful.report.doctor.checks import Findings
from brimful.report.doctor.software import OLDER_BUILD, Torch, supports_card
from brimful.report.doctor.trial import Ended, run_children
from brimful.training.launch import free_port, loopback_interface
from brimful.units import GiB, show_bytes, show_seconds

ROOM_BYTES = 2 * GiB
"""A card with less free memory is not tried."""
HELD, FULL = 0.05, 0.9
"""Others that hold more than this share of a card are a warning, and a failure."""
_NAMED = 3
_TEMPERATURE_GPU = 0
_UNCORRECTED, _VOLATILE = 1, 0
_PROHIBITED = 2
_HOT = 0x20 | 0x40
_POWER = 0x08 | 0x80
"""Bits of NVML's clock event reasons: thermal slowdown by software and hardware; hardware slowdown and power brake."""
_NVIDIA_VENDOR, _DISPLAY_CLASS = "0x10de", "0x03"


@dataclass(frozen=True, kw_only=True, slots=True)
class NvidiaCard:
    """One card as NVML sees it, whether torch sees it or not. None is unknown."""

    index: int
    uuid: str
    name: str
    total_bytes: int | None = None
    free_bytes: int | None = None
    utilization: float | None = None
    temperature_c: int | None = None
    uncorrected_errors: int | None = None
    """Memory errors since the driver was loaded that could not be corrected."""
    repair_pending: bool = False
    """Bad rows or pages are replaced at the next reset of the card."""
    repair_failed: bool = False
    too_hot: bool = False
    power_limited: bool = False
    compute_mode: int | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class Nvidia:
    """NVML's view of the machine."""

    problem: str = ""
    """Why NVML does not answer; empty if it does."""
    driver: str | None = None
    cuda: str | None = None
    """The newest CUDA that the driver supports: `13.0`."""
    cards: tuple[NvidiaCard, ...] = ()
    hardware: str | None = None
    """A sign of an NVIDIA card that does not come from NVML; None if there is none."""

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(card.name for card in self.cards)


def read_nvidia(root: Path = Path("/")) -> Nvidia:
    """Ask NVML and the folders of the kernel."""
    hardware = _hardware(root)
    with open_nvml() as nvml:
        if nvml.module is None:
            return Nvidia(problem=nvml.problem, hardware=hardware)
        version = nvml.query("nvmlSystemGetCudaDriverVersion_v2")
        count = nvml.query("nvmlDeviceGetCount") or 0
        return Nvidia(
            driver=nvml.driver(),
            cuda=f"{version // 1000}.{version % 1000 // 10}" if version else None,
            cards=tuple(card for index in range(count) if (card := _nvidia_card(nvml, index))),
            hardware=hardware,
        )


def _nvidia_card(nvml: Nvml, index: int) -> NvidiaCard | None:
    handle = nvml.query("nvmlDeviceGetHandleByIndex", index)
    if handle is None:
        return None
    memory, rates = nvml.query("nvmlDeviceGetMemoryInfo", handle), nvml.query("nvmlDeviceGetUtilizationRates", handle)
    reasons = nvml.query("nvmlDeviceGetCurrentClocksEventReasons", handle)
    if reasons is None:  # drivers before 535
        reasons = nvml.query("nvmlDeviceGetCurrentClocksThrottleReasons", handle)
    remapped = nvml.query("nvmlDeviceGetRemappedRows", handle) or (0, 0, 0, 0)
    return NvidiaCard(
        index=index,
        uuid=_text(nvml.query("nvmlDeviceGetUUID", handle)) or "",
        name=_text(nvml.query("nvmlDeviceGetName", handle)) or "an NVIDIA card",
        total_bytes=None if memory is None else int(memory.total),
        free_bytes=None if memory is None else int(memory.free),
        utilization=None if rates is None else rates.gpu / 100,
        temperature_c=nvml.query("nvmlDeviceGetTemperature", handle, _TEMPERATURE_GPU),
        uncorrected_errors=nvml.query("nvmlDeviceGetTotalEccErrors", handle, _UNCORRECTED, _VOLATILE),
        repair_pending=bool(remapped[2]) or bool(nvml.query("nvmlDeviceGetRetiredPagesPendingStatus", handle)),
        repair_failed=bool(remapped[3]),
        too_hot=bool((reasons or 0) & _HOT),
        power_limited=bool((reasons or 0) & _POWER),
        compute_mode=nvml.query("nvmlDeviceGetComputeMode", handle),
    )


def _text(value: str | bytes | None) -> str | None:
    return value.decode(errors="replace") if isinstance(value, bytes) else value


def _hardware(root: Path) -> str | None:
    """A loaded driver, or a card on the PCI bus without one."""
    for file in ("proc/driver/nvidia/version", "dev/nvidiactl"):
        if (root / file).exists():
            return f"/{file}"
    for device in sorted((root / "sys/bus/pci/devices").glob("*")):
        if _line(device / "vendor") == _NVIDIA_VENDOR and _line(device / "class").startswith(_DISPLAY_CLASS):
            return f"PCI {device.name}"
    return None


def _line(file: Path) -> str:
    try:
        return file.read_text().strip()
    except OSError:
        return ""


def nvml_checks(nvidia: Nvidia, *, in_container: bool, sees_gpu: bool = False) -> Findings:
    """Whether NVML answers, where it should. `sees_gpu`: torch sees a card of another maker."""
    found = Findings("Cards")
    if not nvidia.problem:
        text = say(
            "driver {driver}, CUDA up to {cuda}", driver=nvidia.driver or "unknown", cuda=nvidia.cuda or "unknown"
        )
        found.ok("NVML", text, driver=nvidia.driver, cuda=nvidia.cuda, cards=len(nvidia.cards))
    elif nvidia.hardware is None:
        if not sees_gpu:
            found.ok("cards", say("no NVIDIA card and no driver here; trainings run on the CPU"))
    elif nvidia.hardware.startswith("PCI"):
        text = say("there is an NVIDIA card ({place}), but its driver is not loaded", place=nvidia.hardware)
        found.fail("NVML", text, say("install the NVIDIA driver, then restart the machine"))
    else:
        text = say("there is an NVIDIA driver, but NVML does not answer ({problem})", problem=nvidia.problem)
        found.fail("NVML", text, _nvml_fix(nvidia.problem, in_container))
    return found


def _nvml_fix(problem: str, in_container: bool) -> Sentence:
    if "mismatch" in problem.lower():
        return say("restart the machine: the driver was updated while the old one is loaded")
    if "nvidia-ml-py" in problem:
        return say("`{command}`", command="pip install nvidia-ml-py")
    if in_container:
        return say(
            "start the container with {options}", options="--gpus all -e NVIDIA_DRIVER_CAPABILITIES=compute,utility"
        )
    return say("`nvidia-smi`; if it fails too, install the driver again")


# ---- Each card -------------------------------------------------------------------------------------------------------


def card_checks(gpu: Gpu, trial: Ended | None, torch: Torch, *, in_container: bool) -> Findings:
    """One card that torch sees: whether it computes, in bf16 too, and who holds its memory."""
    found, name = Findings("Cards"), f"{gpu.kind}:{gpu.index}"
    figures = {"name": gpu.name, "total_bytes": gpu.total_bytes, "free_bytes": gpu.free_bytes}
    size = say("{name}, {free} of {total} free", name=gpu.name, free=show_bytes(gpu.free_bytes), total=show_bytes(gpu.total_bytes))  # fmt: skip
    result: Mapping[str, Any] = (trial.answer("card") if trial else None) or {}
    if gpu.capability and torch.cuda and not supports_card(torch.archs, gpu.capability):
        text = say("{name} has compute capability {capability}, for which this torch has no kernels ({archs})", name=gpu.name, capability=gpu.capability, archs=" ".join(torch.archs))  # fmt: skip
        found.fail(name, text, _build_for(gpu.capability, torch), capability=gpu.capability, **figures)
    elif trial is None:
        text = say("{size}: too little to try it beside the others", size=size)
        found.skip(name, text, **figures)
    elif not result or "error" in result:
        problem = _problem(trial, result)
        found.fail(name, say("{name} does not compute: {problem}", name=gpu.name, problem=Sentence(problem)), _card_fix(problem, gpu), **figures)  # fmt: skip
    elif not (result["correct"] and result["bf16_correct"]):
        text = say("{name} computes wrong results", name=gpu.name)
        found.fail(name, text, say("use another card, and have this one tested or replaced"), **figures)
    elif not result["bf16"]:
        fix = say("{flag} if fp32 is too slow", flag="--precision fp16")
        found.warn(name, say("{size}; it has no bf16 arithmetic, so `auto` trains in fp32", size=size), fix, **figures)
    else:
        found.ok(name, say("{size}; computes in fp32 and bf16", size=size), seconds=result["seconds"], **figures)
    found += _holders(gpu, name, in_container)
    return found


def _problem(trial: Ended, result: Mapping[str, Any]) -> str:
    if result.get("error"):
        return str(result["error"])
    if trial.hangs:
        return "the driver hangs, and the process cannot be killed"
    if trial.timed_out:
        return "no answer in time"
    if trial.code is not None and trial.code < 0:
        return f"signal {-trial.code}"
    return trial.last_line or f"exit code {trial.code}"


def _build_for(capability: str, torch: Torch) -> Sentence:
    """An old card needs an older build, a new card a newer one."""
    oldest = min((int("".join(filter(str.isdigit, arch)) or 0) for arch in torch.archs), default=0)
    if int(capability.replace(".", "")) >= oldest:
        return say("`{command}`", command="pip install --upgrade --force-reinstall torch")
    if torch.cuda and torch.cuda.startswith("12.6"):
        return say("use another card; current builds of torch no longer support this one")
    return say("`{command}`", command=f"pip install --force-reinstall torch {OLDER_BUILD}")


def _card_fix(problem: str, gpu: Gpu) -> Sentence:
    lower = problem.lower()
    if "out of memory" in lower:
        return say("end the processes that hold it, or use another card: CUDA_VISIBLE_DEVICES")
    if "busy or unavailable" in lower:
        return say("`nvidia-smi -c 0`, or end the process that has the card for itself (exclusive mode)")
    if "ecc" in lower or "hardware" in lower or "hangs" in lower:
        return say("`nvidia-smi --gpu-reset -i {index}`, or restart the machine", index=gpu.index)
    if "initialization error" in lower or "unknown error" in lower:
        return say("`sudo modprobe nvidia-uvm`, or restart the machine")
    if "no answer" in lower:
        return say("a longer --timeout; if it hangs again, `dmesg | grep -i xid` names the fault of the card")
    return say("`dmesg | grep -i xid` and `nvidia-smi -q` name faults of the card and the driver")


def _holders(gpu: Gpu, name: str, in_container: bool) -> Findings:
    found = Findings("Cards")
    if gpu.used_by_others_bytes is None or not gpu.total_bytes or gpu.used_by_others_bytes < HELD * gpu.total_bytes:
        return found
    share, text = gpu.used_by_others_bytes / gpu.total_bytes, say("{holders}", holders=_phrases(gpu, in_container))
    other = say("end them, or choose another card with CUDA_VISIBLE_DEVICES")
    figures = {"used_by_others_bytes": gpu.used_by_others_bytes, "share": share}
    if share > FULL:
        found.fail(say("{card} held", card=name), text, other, **figures)
    else:
        fix = say("end them, or leave them: the plan uses what is free")
        found.warn(say("{card} held", card=name), text, fix, **figures)
    return found


def _phrases(gpu: Gpu, in_container: bool) -> list[Sentence]:
    """Who holds it, the largest first, and what nobody visible holds."""
    named = [one for one in gpu.other_processes if one.name is not None and one.used_bytes]
    phrases = [_phrase(one) for one in named[:_NAMED]]
    rest = (gpu.used_by_others_bytes or 0) - sum(one.used_bytes or 0 for one in named[:_NAMED])
    if rest >= HELD * (gpu.total_bytes or 0) or not phrases:
        size = show_bytes(rest)
        phrases.append(
            say("processes outside this container hold {size}", size=size)
            if in_container
            else say("other processes hold {size}", size=size)
        )
    return phrases


def _phrase(process: GpuProcess) -> Sentence:
    size = show_bytes(process.used_bytes)
    return say("{name} (pid {pid}) holds {size}", name=process.name, pid=process.pid, size=size)


def health_checks(nvidia: Nvidia, visible: Sequence[Gpu]) -> Findings:
    """Memory errors and throttling of the cards torch sees, as far as NVML tells."""
    found = Findings("Cards")
    by_uuid = {gpu.uuid: gpu for gpu in visible}
    known = False
    for card in nvidia.cards:
        if card.uuid not in by_uuid:
            continue
        gpu = by_uuid[card.uuid]
        name = f"{gpu.kind}:{gpu.index}"
        known = known or card.temperature_c is not None or card.uncorrected_errors is not None
        reset = say("`nvidia-smi --gpu-reset -i {index}`, or restart the machine", index=card.index)
        if card.repair_failed:
            text = say("bad memory rows that could not be replaced")
            found.fail(say("{card} memory", card=name), text, say("use another card, and have this one replaced"))
        elif card.uncorrected_errors:
            text = say("{count} memory errors that could not be corrected", count=card.uncorrected_errors)
            found.fail(say("{card} memory", card=name), text, reset, uncorrected_errors=card.uncorrected_errors)
        elif card.repair_pending:
            found.warn(
                say("{card} memory", card=name), say("bad memory rows that are replaced at the next reset"), reset
            )
        if card.too_hot:
            text = say("throttled because it is too hot ({degrees} °C)", degrees=card.temperature_c)
            found.warn(say("{card} clock", card=name), text, say("see to its fans and the air around it"))
        elif card.power_limited:
            text = say("throttled by its power supply")
            found.warn(say("{card} clock", card=name), text, say("check the power cables and the power supply"))
        if card.compute_mode == _PROHIBITED:
            found.fail(say("{card} mode", card=name), say("its compute mode forbids computing"), say("`nvidia-smi -i {index} -c 0`", index=card.index))  # fmt: skip
    if known and not found:
        found.ok("health", say("no memory errors, not throttled"))
    return found


def idle_checks(nvidia: Nvidia, visible: Sequence[Gpu], *, hidden_by: str | None, processes: int | None) -> Findings:
    """Cards that stand idle: hidden by CUDA_VISIBLE_DEVICES, or visible and more than the run uses.

    `hidden_by` is that variable's value; `processes` what the run of `--run` was started with.
    """
    found = Findings("Cards")
    seen = {gpu.uuid for gpu in visible}
    hidden = [card for card in nvidia.cards if card.uuid not in seen and _is_idle(card)]
    if hidden and hidden_by is not None and visible:
        names = ", ".join(f"{card.name} {card.index}" for card in hidden)
        text = say("idle and hidden by CUDA_VISIBLE_DEVICES={value}: {cards}", value=hidden_by, cards=names)
        fix = say("`unset CUDA_VISIBLE_DEVICES`, then `--processes {count}`", count=len(visible) + len(hidden))
        found.warn("idle cards", text, fix, hidden=len(hidden))
    elif len(visible) > 1 and processes is not None and processes < len(visible):
        text = say("the run uses {used} of {count} cards", used=processes, count=len(visible))
        found.warn("idle cards", text, say("`--processes {count}`", count=len(visible)), processes=processes)
    elif len(visible) > 1:
        text = say("{count} cards; `--processes {count}` trains on all of them", count=len(visible))
        found.ok("idle cards", text)
    return found


def _is_idle(card: NvidiaCard) -> bool:
    free = card.free_bytes is None or card.total_bytes is None or card.free_bytes > 0.9 * card.total_bytes
    return free and not card.utilization


# ---- Several cards ---------------------------------------------------------------------------------------------------


def try_cards(
    gpus: Sequence[Gpu], *, timeout_s: float, run: Callable[..., list[Ended]] = run_children
) -> dict[int, Ended]:
    """How the trial of each card ended, by its index. A card without room is not in it."""
    tried = [gpu for gpu in gpus if gpu.free_bytes is None or gpu.free_bytes >= ROOM_BYTES]
    arguments = [["card", gpu.kind, str(gpu.index)] for gpu in tried]
    ended = run(arguments, timeout_s=timeout_s) if tried else []
    return {gpu.index: one for gpu, one in zip(tried, ended, strict=True)}


def connection_checks(
    gpus: Sequence[Gpu],
    trials: Mapping[int, Ended],
    torch: Torch,
    *,
    timeout_s: float,
    run: Callable[..., list[Ended]] = run_children,
) -> Findings:
    """One number, added up over the cards that compute; without cards, over two processes on the CPU."""
    found, name = Findings("Several processes"), "all_reduce"
    kind = gpus[0].kind if gpus else "cpu"
    backend, has_backend = ("NCCL", torch.nccl) if kind == "cuda" else ("gloo", torch.gloo)
    ranks = (
        [index for index, trial in trials.items() if (trial.answer("card") or {}).get("correct")] if gpus else [0, 1]
    )
    if len(gpus) == 1:
        found.skip(name, say("there is one card"))
    elif len(ranks) < 2:
        found.skip(name, say("fewer than two cards have room and compute"))
    elif not has_backend or kind not in ("cuda", "cpu"):
        found.skip(name, say("this torch has no {backend}", backend=backend))
    if found:
        return found
    shared = {
        "WORLD_SIZE": len(ranks), "LOCAL_WORLD_SIZE": len(ranks), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": free_port(),
        **{one: os.environ.get(one) or loopback_interface() for one in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME")},
    }  # fmt: skip
    ended = run(
        [["rank", kind, str(index), str(timeout_s)] for index in ranks],
        timeout_s=timeout_s + 5,  # the ranks give up first, and say why
        environments=[{**shared, "RANK": rank, "LOCAL_RANK": rank} for rank in range(len(ranks))],
        together=True,
    )
    what = say("{count} cards" if gpus else "{count} processes", count=len(ranks))
    _sum_check(ended, backend, what, found)
    return found


def _sum_check(ended: Sequence[Ended], backend: str, what: Sentence, found: Findings) -> None:
    name, sums = "all_reduce", [one.answer("all_reduce") or {} for one in ended]
    if all("seconds" in one for one in sums):
        seconds = max(one["seconds"] for one in sums)
        text = say("{backend} added up one number over {what} in {time}", backend=backend, what=what, time=show_seconds(seconds))  # fmt: skip
        found.ok(name, text, seconds=seconds, ranks=len(ended))
    elif failure := next((one for one in sums if "problem" in one), None):
        text = say("{problem}", problem=Sentence(failure["problem"]))
        found.fail(name, text, say("{fix}", fix=Sentence(failure["fix"])))
    elif any(one.timed_out for one in ended):
        variable = "NCCL_P2P_DISABLE=1" if backend == "NCCL" else "GLOO_SOCKET_IFNAME=lo"
        text = say("{backend} gave no answer in time over {what}", backend=backend, what=what)
        found.fail(name, text, say("`export {variable}`, or a longer --timeout", variable=variable))
    else:
        line = next((one.last_line for one in ended if one.last_line), f"exit code {ended[0].code}")
        text = say("a process ended before it could add up one number: {line}", line=line)
        found.fail(name, text, say("`{command}`", command="pip install --force-reinstall torch"))
