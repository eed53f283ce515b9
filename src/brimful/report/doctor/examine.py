"""Runs the checks: the quick ones at once, those that wait (torch, cards, disks) beside each other.

Here 2 to 7 s on two cores without a card, most of it imports of torch in child processes. Disks are timed only when torch has been
imported once, for a cold import reads a gigabyte from the same disk. A check that fails in an unforeseen way, or that hangs on a
dead network mount, is reported as not checked; it never ends the doctor.
"""

import os
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from brimful.errors import UserError, in_one_line
from brimful.languages import say, tr
from brimful.machine.gpu import Gpu, GpuProcess
from brimful.machine.host import Host, Space, container_sign
from brimful.report.doctor.cards import (
    card_checks,
    connection_checks,
    health_checks,
    idle_checks,
    nvml_checks,
    read_nvidia,
    try_cards,
)
from brimful.report.doctor.checks import GROUPS, Check, CheckGroup, Examination, Findings
from brimful.report.doctor.host_checks import (
    cache_checks,
    core_checks,
    data_checks,
    limit_checks,
    ram_checks,
    run_folder_checks,
    shm_checks,
    speed_checks,
    swap_checks,
)
from brimful.report.doctor.software import (
    Surrounding,
    Torch,
    compiler_checks,
    environment_checks,
    hub_cache,
    package_checks,
    python_checks,
    requirements,
    requires_python,
    torch_checks,
)
from brimful.report.doctor.trial import Ended, run_children, stop
from brimful.training.run import RunFolder

HANG_S = 20.0
"""A folder that has not answered after this is on a mount that hangs."""
LEAVE_S = 3.0
"""Long enough for a thread to kill its children; one that hangs in the kernel is left behind."""


def examine(
    *, run: Path | None, data: str | None, timeout_s: float, progress: Callable[[str], None] = lambda phrase: None
) -> Examination:
    """Check everything. `run` is a run's folder, there or not yet; `data` the rows; `timeout_s` the limit of a child process."""
    started = time.monotonic()
    try:
        checks = _examine(run, data, timeout_s, progress)
    finally:
        stop.set()  # Ctrl-C: threads that wait for children kill them and return
        _wait_for_threads()
        stop.clear()
    ordered = sorted(checks, key=lambda check: GROUPS.index(check.group))
    return Examination(checks=tuple(ordered), seconds=time.monotonic() - started)


def _examine(run: Path | None, data: str | None, timeout_s: float, progress: Callable[[str], None]) -> list[Check]:
    data_before, processes = _data_and_processes(run)
    folder, data = run or Path("runs"), data or data_before
    in_container = container_sign() is not None
    progress("torch")
    trial = _Background(lambda: run_children([["torch"]], timeout_s=timeout_s)[0])
    folders = _Background(lambda: _guarded("Folders", "folders", lambda: run_folder_checks(folder) + cache_checks()))
    rows = _Background(lambda: data_checks(data))
    host, nvidia = Host.detect(), read_nvidia()
    swap = _Background(lambda: _guarded("Host", "swap", lambda: swap_checks(host)))
    checks = _guarded("Software", "Python", lambda: python_checks(requires_python()))
    checks += _guarded("Software", "packages", lambda: package_checks(requirements()))
    checks += _guarded("Host", "RAM", lambda: ram_checks(host))
    checks += _guarded("Host", "cores", lambda: core_checks(host))
    checks += _guarded("Host", "limits", lambda: limit_checks(host))
    shm = Space.of("/dev/shm")
    checks += _guarded("Several processes", "/dev/shm", lambda: shm_checks(shm, in_container=in_container))

    facts: Ended = trial.result(timeout_s + HANG_S) or Ended(code=None, timed_out=True, errors=trial.problem)
    answer: Mapping[str, Any] = facts.answer("torch") or {}
    torch = Torch.from_answer(answer) if answer else None
    gpus = [_gpu(one) for one in answer.get("gpus", ())]
    checks += torch_checks(
        torch, problem=_why(facts), nvidia_names=nvidia.names, driver_cuda=nvidia.cuda, visible=len(gpus)
    )
    checks += _guarded("Software", "compiler", lambda: compiler_checks(on_cuda=bool(torch and torch.cuda)))

    progress(tr("folders"))
    checks += _or_hangs(folders, "run folder")
    found, files = rows.result(HANG_S) or (_hangs("data"), [])
    checks += found
    progress(tr("disk speed, cards, all_reduce"))
    speed = _Background(lambda: _guarded("Folders", "disk speed", lambda: speed_checks(folder, files)))
    checks += nvml_checks(nvidia, in_container=in_container, sees_gpu=bool(gpus))
    if torch is not None:
        checks += _guarded("Cards", "cards", lambda: _cards(gpus, torch, timeout_s, in_container))
    checks += _guarded("Cards", "health", lambda: health_checks(nvidia, gpus))
    hidden_by = os.environ.get("CUDA_VISIBLE_DEVICES")
    checks += _guarded("Cards", "idle cards", lambda: idle_checks(nvidia, gpus, hidden_by=hidden_by, processes=processes))  # fmt: skip
    here = Surrounding(
        cores=host.cores, cards=len(gpus), nvidia_cards=len(nvidia.cards) or int(nvidia.hardware is not None),
        variables=dict(os.environ), hub_cache=hub_cache(),
    )  # fmt: skip
    checks += _guarded("Environment", "variables", lambda: environment_checks(here))
    checks += swap.result(HANG_S) or []
    checks += _or_hangs(speed, "disk speed")
    return checks


def _cards(gpus: Sequence[Gpu], torch: Torch, timeout_s: float, in_container: bool) -> list[Check]:
    trials = try_cards(gpus, timeout_s=timeout_s)
    checks: list[Check] = []
    for gpu in gpus:
        checks += card_checks(gpu, trials.get(gpu.index), torch, in_container=in_container)
    return checks + connection_checks(gpus, trials, torch, timeout_s=timeout_s)


def _data_and_processes(run: Path | None) -> tuple[str | None, int | None]:
    """What the run was started with; nothing if it is not there yet or cannot be read."""
    try:
        request = RunFolder(run).read_request() if run is not None else None
        return (request.data, request.plan_options.processes) if request else (None, None)
    except UserError:
        return None, None


def _gpu(answer: Mapping[str, Any]) -> Gpu:
    processes = tuple(GpuProcess(**one) for one in answer["other_processes"])
    return Gpu(**{**answer, "other_processes": processes})


def _why(trial: Ended) -> str:
    return trial.last_line or ("no answer in time" if trial.timed_out else f"exit code {trial.code}")


def _or_hangs(work: "_Background", name: str) -> list[Check]:
    result = work.result(HANG_S)
    return _hangs(name) if result is None else list(result)


def _hangs(name: str) -> list[Check]:
    found = Findings("Folders")
    text = say("no answer from the filesystem in {seconds} s", seconds=f"{HANG_S:g}")
    found.fail(name, text, say("`df -h` shows which mount hangs; another --run or --data"))
    return found


def _guarded(group: CheckGroup, name: str, work: Callable[[], Sequence[Check]]) -> list[Check]:
    """An error in a check is a finding about the check, not the end of the examination."""
    try:
        return list(work())
    except Exception as error:
        found = Findings(group)
        found.skip(name, say("the check itself failed: {problem}", problem=in_one_line(error)))
        return found


class _Background:
    """Work in a thread that does not keep the program from ending, since a dead mount cannot be interrupted."""

    threads: "list[threading.Thread]" = []  # noqa: RUF012 - all that were started, to wait for them once

    def __init__(self, work: Callable[[], Any]) -> None:
        self._value: Any = None
        self.problem = ""
        """The error it ended with."""
        self._thread = threading.Thread(target=self._run, args=(work,), daemon=True, name="brimful-doctor")
        self._thread.start()
        self.threads.append(self._thread)

    def _run(self, work: Callable[[], Any]) -> None:
        try:
            self._value = work()
        except Exception as error:
            self.problem = in_one_line(error)

    def result(self, limit_s: float) -> Any:
        """None if there is none in time."""
        self._thread.join(limit_s)
        return self._value


def _wait_for_threads() -> None:
    for thread in _Background.threads:
        thread.join(LEAVE_S)
    _Background.threads.clear()
