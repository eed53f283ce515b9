"""Where training runs, how many bytes it may use there, and the one place where that limit is enforced.

`find_target` resolves a memory limit once; everything else is handed the `Target`. A limit bounds the bytes that torch
reserves on a GPU; the CUDA context (about 0.8 GiB) is not part of it, because free memory is read when the context
exists already. On the CPU the limit is simulated.
"""

import os
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from importlib.util import find_spec

import torch
from torch import nn

from brimful.errors import BadOption, DeviceBusy, DoesNotFit
from brimful.machine.gpu import gpu_holders
from brimful.machine.host import Host
from brimful.memory.ledger import Ledger, active_limit_bytes
from brimful.memory.meter import process_limit_bytes
from brimful.memory.oom import is_oom
from brimful.planning.plan_options import PlanOptions
from brimful.task import Precision
from brimful.units import MiB, flag_bytes, show_bytes

STEADY = 0.75
"""Without a limit, a deterministic plan is for this share of all memory, because what is free changes."""
SMALLEST_USEFUL = 64 * MiB
"""A GPU with less free memory than this counts as full."""
WORKSPACE = "CUBLAS_WORKSPACE_CONFIG"


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """A device and the bytes that may be used on it."""

    device: torch.device
    name: str
    limit_bytes: int
    limit_reason: str
    fill: float
    host_limit_bytes: int
    requested: bool = False
    """Whether the user set the limit. A limit that is only what was free is planned for, but not enforced."""
    other_users: str = ""
    """Who else holds memory of the GPU, as the end of a sentence; empty if the user set the limit."""

    @property
    def budget_bytes(self) -> int:
        """What to plan for: `fill` of the limit."""
        return int(self.limit_bytes * self.fill)

    @property
    def users_now(self) -> str:
        """The same at this moment, whether or not the user set the limit."""
        return _other_users(self.device)

    @property
    def has_kernels(self) -> bool:
        """Whether the kernels for packed rows run there."""
        return not self.why_no_kernels

    @property
    def why_no_kernels(self) -> str:
        """Empty if they run."""
        if self.device.type != "cuda":
            return f"{self.name} has no kernels for packed rows"
        if find_spec("triton") is None:
            return "the kernels for packed rows need Triton, which is not installed"
        major, minor = torch.cuda.get_device_capability(self.device)
        if major < 8:
            return f"{self.name} has compute capability {major}.{minor}, and the kernels for packed rows need 8.0"
        return ""

    @contextmanager
    def enforce(self, adopt: Iterable[torch.Tensor] = (), *, simulate: bool = True) -> Iterator[Ledger | None]:
        """Hold a limit that the user set while the block runs.

        On CUDA the allocator is capped. On the CPU a simulated memory is opened and returned, in which the tensors of
        `adopt` count already; `simulate=False` leaves that to the caller, as planning does, which meters each probe.
        """
        if self.requested and self.device.type == "cuda":
            before = torch.cuda.memory.get_per_process_memory_fraction(self.device)
            total = torch.cuda.get_device_properties(self.device).total_memory
            torch.cuda.set_per_process_memory_fraction(min(before, self.limit_bytes / total), self.device)
            try:
                yield None
            finally:
                torch.cuda.set_per_process_memory_fraction(before, self.device)
        elif self.requested and self.device.type == "cpu" and simulate:
            ledger = Ledger(self.limit_bytes)
            ledger.adopt(adopt)
            with ledger:
                yield ledger
        else:
            yield None

    @contextmanager
    def hold(self, model: nn.Module) -> Iterator[Ledger | None]:
        """The model on the device and the limit enforced while the block runs. A model that does not fit is an error."""
        with ExitStack() as stack:
            try:
                ledger = stack.enter_context(self.enforce([*model.parameters(), *model.buffers()]))
                model.to(self.device)
            except Exception as error:
                if not is_oom(error):
                    raise
                raise DoesNotFit(
                    f"the model alone does not fit {self.name}, where {show_bytes(self.limit_bytes)} may be used "
                    f"({self.limit_reason}). Try: a higher memory_limit=, or another device=.",
                    needed_bytes=self.limit_bytes,
                ) from None
            yield ledger


def find_target(options: PlanOptions) -> Target:
    """The device that was requested or that there is, and its limit. Refuses a limit that is not free."""
    device, host, limit = _find_device(options.device), Host.detect(), options.memory_limit_bytes
    if device.index is not None and _ranks() > 1:
        torch.accelerator.set_device_index(device.index)  # first: a query elsewhere takes 0.5 GiB of another rank's GPU
    if device.type in ("cpu", "mps"):
        free, reason = _host_free(options, host, device)
        name = "the CPU" if device.type == "cpu" else "the Apple GPU"
    else:
        free, reason = _gpu_free(device)
        name = torch.get_device_module(device).get_device_name(device)
    if limit is None and free < SMALLEST_USEFUL and device.type != "cpu":
        raise DeviceBusy(
            f"{name} ({device}) has only {show_bytes(free)} free{_other_users(device)}. Try: another device=."
        )
    if limit is None and options.deterministic:
        steady = _steady_bytes(options, host, device)
        if steady > free:
            raise DeviceBusy(
                f"deterministic=True plans for {STEADY:.0%} of the memory of {name}, {show_bytes(steady)}, and only "
                f'{show_bytes(free)} is free{_other_users(device)}. Try: memory_limit="{flag_bytes(free / 2)}".'
            )
        free, reason = steady, "a fixed share of the memory, whatever else is free (deterministic)"
    if limit is not None and device.type != "cpu" and limit > free + MiB:
        raise DeviceBusy(
            f"memory_limit= is {show_bytes(limit)}, but {name} ({device}) has only {show_bytes(free)} free"
            f"{_other_users(device)}. Try: a lower memory_limit=, or another device=."
        )
    if limit is not None and device.type == "cpu" and limit > host.ram_limit_bytes:
        raise BadOption(
            f"memory_limit= is {show_bytes(limit)}, but this host has {show_bytes(host.ram_limit_bytes)} "
            f"({host.ram_limited_by}). Try: a lower memory_limit=."
        )
    return Target(
        device=device,
        name=name,
        limit_bytes=free if limit is None else limit,
        limit_reason=reason if limit is None else "as requested",
        fill=options.fill,
        host_limit_bytes=min(options.host_limit_bytes or host.ram_limit_bytes, host.ram_limit_bytes),
        requested=limit is not None,
        other_users=_other_users(device) if limit is None else "",
    )


def idle_gpus(options: PlanOptions, target: Target, processes: int) -> list[str]:
    """A warning if torch sees more GPUs than this many processes use on this machine; none if the user chose the GPU."""
    if target.device.type in ("cpu", "mps") or ":" in options.device:
        return []
    count = torch.accelerator.device_count()
    if count <= processes:
        return []
    idle, work = count - processes, f"{processes} process{'es' * (processes > 1)}"
    stands = "stands" if idle == 1 else "stand"
    return [f"{idle} of {count} GPUs {stands} idle, because there is only work for {work}. Try: processes={count}"]


@contextmanager
def deterministic_algorithms(on: bool) -> Iterator[None]:
    """torch's deterministic algorithms in the block if wanted. An operation that has none warns and runs."""
    if not on:
        yield
        return
    before = torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()
    benchmark, workspace = torch.backends.cudnn.benchmark, os.environ.get(WORKSPACE)
    os.environ.setdefault(WORKSPACE, ":4096:8")  # without it cuBLAS may choose another algorithm each time
    torch.backends.cudnn.benchmark = False  # it chooses kernels by timing them
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before[0], warn_only=before[1])
        torch.backends.cudnn.benchmark = benchmark
        if workspace is None:
            os.environ.pop(WORKSPACE, None)


def autocast_dtype(precision: Precision, device: torch.device) -> torch.dtype | None:
    """The dtype of autocast for a precision on this device; None computes in the weights' own."""
    if precision == "auto":
        fast_bf16 = device.type == "cuda" and torch.cuda.get_device_capability(device) >= (8, 0)
        return torch.bfloat16 if fast_bf16 else None
    return {"fp32": None, "bf16": torch.bfloat16, "fp16": torch.float16}[precision]


def _find_device(name: str) -> torch.device:
    """Of several processes on one machine, each takes the GPU of its local rank unless `name` has an index."""
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    if name == "auto":
        return torch.device("cpu") if accelerator is None else _with_index(accelerator)
    try:
        device = torch.device(name)
    except RuntimeError:
        raise BadOption(f"device={name!r} is unknown. Try: cpu, cuda, cuda:1, mps or xpu.") from None
    if device.type == "cpu":
        return torch.device("cpu")
    if accelerator is None or accelerator.type != device.type:
        seen = "no accelerator" if accelerator is None else f"only {accelerator.type}"
        raise DeviceBusy(
            f"device={name!r} is not available, since torch {torch.__version__} sees {seen}. Try: device=auto."
        )
    count = torch.accelerator.device_count()
    if device.index is not None and device.index >= count:
        raise DeviceBusy(f"device={name!r} is not available. Try: device={device.type}:{count - 1}, the last one.")
    return _with_index(device)


def _with_index(device: torch.device) -> torch.device:
    if device.index is not None:
        return device
    if device.type != "mps" and _ranks() > 1:
        rank, count = int(os.environ.get("LOCAL_RANK", "0")), torch.accelerator.device_count()
        if rank >= count:
            ranks = int(os.environ.get("LOCAL_WORLD_SIZE", rank + 1))
            raise DeviceBusy(f"processes={ranks} needs as many GPUs, and torch sees {count}. Try: processes={count}.")
        return torch.device(device.type, rank)
    return torch.device(device.type, torch.accelerator.current_device_index())


def _ranks() -> int:
    return int(os.environ.get("WORLD_SIZE", "1"))


def _host_free(options: PlanOptions, host: Host, device: torch.device) -> tuple[int, str]:
    simulated = active_limit_bytes() if device.type == "cpu" else None
    if simulated is not None:
        return simulated, "the simulated_memory block around this call"
    if options.host_limit_bytes is not None:
        limit = min(options.host_limit_bytes, host.ram_limit_bytes)
        return limit, "the host limit, since the CPU has no memory of its own"
    return host.ram_available_bytes, "the host memory available now"


def _steady_bytes(options: PlanOptions, host: Host, device: torch.device) -> int:
    """What a deterministic plan is for: a limit around this call, else a fixed share of all memory."""
    if device.type in ("cpu", "mps"):
        simulated = active_limit_bytes() if device.type == "cpu" else None
        limit = options.host_limit_bytes and min(options.host_limit_bytes, host.ram_limit_bytes)
        return simulated or limit or int(STEADY * host.ram_limit_bytes)
    total = torch.accelerator.get_memory_info(device)[1]
    return min(process_limit_bytes(device, total), int(STEADY * total))


def _gpu_free(device: torch.device) -> tuple[int, str]:
    """What this process could reserve: free memory and what torch holds already, up to the cap of the allocator."""
    free, total = torch.accelerator.get_memory_info(device)
    free += torch.accelerator.memory_reserved(device)
    cap = process_limit_bytes(device, total)
    return (cap, "the allocator's cap on this process") if cap < free else (free, f"free, of {show_bytes(total)}")


def _other_users(device: torch.device) -> str:
    users = gpu_holders(device.index or 0) if device.type == "cuda" else ""
    return f" ({users})" if users else ""
