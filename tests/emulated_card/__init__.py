"""An emulated CUDA device, so that what only runs on a GPU also runs where there is none: `card.cpp` says what it is.

EMULATED_CARD=8GiB python -m pytest -m gpu                 the tests that need a GPU, on it
EMULATED_CARD=1GiB PYTHONPATH=tests/emulated_card/site …   any program, and those that it starts
"""

import ctypes
import functools
import hashlib
import itertools
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch

from brimful.units import parse_bytes

SOURCE = Path(__file__).with_name("card.cpp")
NAME = "Emulated card"


def build() -> Path:
    """The compiled card, which takes about half a minute, beside its source, which git ignores."""
    folder = Path(torch.__file__).parent
    key = hashlib.sha256((folder / "version.py").read_bytes() + SOURCE.read_bytes()).hexdigest()[:16]
    library = SOURCE.parent / "build" / f"card-{key}.so"
    if not library.is_file():
        library.parent.mkdir(parents=True, exist_ok=True)
        unfinished = library.with_suffix(f".{time.monotonic_ns()}.tmp")
        include = [f"-I{folder / 'include'}", f"-I{folder / 'include/torch/csrc/api/include'}"]
        link = [f"-L{folder / 'lib'}", "-lc10", "-ltorch_cpu", f"-Wl,-rpath,{folder / 'lib'}"]
        command = [
            "c++",
            "-O1",
            "-w",
            "-std=c++20",
            "-shared",
            "-fPIC",
            str(SOURCE),
            "-o",
            str(unfinished),
            *include,
            *link,
        ]
        subprocess.run(command, check=True)
        unfinished.replace(library)
    return library


class Stream:
    """Everything is done when it is asked for, so there is nothing to wait for."""

    def __init__(self, device: Any = None, priority: int = 0, **_: Any) -> None:
        self.device = torch.device("cuda", 0 if device is None else torch.device(device).index or 0)
        self.cuda_stream = self.stream_id = 0

    def wait_stream(self, _: Any) -> None: ...
    def wait_event(self, _: Any) -> None: ...
    def synchronize(self) -> None: ...

    def record_event(self, event: "Event | None" = None) -> "Event":
        event = event or Event()
        event.record()
        return event

    def query(self) -> bool:
        return True

    def __enter__(self) -> "Stream":
        return self

    def __exit__(self, *_: object) -> None: ...


class Event:
    def __init__(self, enable_timing: bool = False, **_: Any) -> None:
        self._time = 0.0

    def record(self, stream: Any = None) -> None:
        self._time = time.perf_counter()

    def wait(self, stream: Any = None) -> None: ...
    def synchronize(self) -> None: ...

    def query(self) -> bool:
        return True

    def elapsed_time(self, end: "Event") -> float:
        return (end._time - self._time) * 1e3


_library: ctypes.CDLL | None = None


def is_inserted() -> bool:
    """Whether this process has an emulated card, where tests take smaller sizes."""
    return _library is not None


def take(amount: int, device: int = 0) -> None:
    """Bytes of the card that other programs hold from now on."""
    assert _library is not None
    _library.card_take(device, ctypes.c_int64(amount))


def insert(memory: str | int = "1GiB", devices: int = 1) -> None:
    """Give this process a CUDA device. There is no way back. Before the first backward, whose threads are started once."""
    global _library
    if _library is not None:
        return
    total = parse_bytes(memory) if isinstance(memory, str) else memory
    sys.modules.setdefault("triton", None)  # whose kernels cannot run on it
    path = str(build())
    torch.ops.load_library(path)
    library = _library = ctypes.CDLL(path)
    library.card_get_fraction.restype = ctypes.c_double
    library.card_record.restype = ctypes.c_void_p
    library.card_recording.restype = library.card_recording_failed.restype = ctypes.c_bool
    library.card_insert(devices, ctypes.c_int64(total))
    generators = tuple(torch.Generator() for _ in range(devices))
    library.card_use_generator(ctypes.c_void_p(id(generators[0])))
    _replace_cuda(library, total, devices, generators)


def insert_everywhere() -> None:
    """Into this process, and into those that it starts, as the environment says."""
    folders = [str(SOURCE.parent / "site"), *os.environ.get("PYTHONPATH", "").split(os.pathsep)]
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, folders))
    insert(os.environ["EMULATED_CARD"], int(os.environ.get("EMULATED_CARDS", "1")))


def _replace_cuda(library: ctypes.CDLL, total: int, devices: int, generators: tuple[torch.Generator, ...]) -> None:
    """What torch.cuda asks its own build for."""
    properties = SimpleNamespace(
        name=NAME, major=9, minor=0, total_memory=total, multi_processor_count=132, uuid="emulated", is_integrated=False,
        warp_size=32, max_threads_per_multi_processor=2048, L2_cache_size=1 << 25, regs_per_multiprocessor=65536,
        shared_memory_per_multiprocessor=233472, shared_memory_per_block=49152, shared_memory_per_block_optin=232448,
        gcnArchName="",
    )  # fmt: skip
    accelerator = torch.accelerator

    def index(device: Any) -> int:
        if device is None:
            return int(library.card_get_device())
        if isinstance(device, int):
            return device
        place = torch.device(device).index
        return int(library.card_get_device()) if place is None else place

    def exchange(device: int) -> int:
        before = int(library.card_get_device())
        if device >= 0:
            library.card_set_device(device)
        return before

    def statistics(device: int) -> dict[str, Any]:
        flat, nested = accelerator.memory_stats(device), {}
        for name, value in flat.items():
            place = nested
            *folders, last = name.split(".")
            for one in folders:
                place = place.setdefault(one, {})
            place[last] = value
        return nested

    functions: dict[str, Any] = {
        "_cuda_getDeviceCount": lambda: devices,
        "_cuda_getDevice": lambda: library.card_get_device(),
        "_cuda_setDevice": lambda device: library.card_set_device(device),
        "_cuda_exchangeDevice": lambda device: exchange(device),
        "_cuda_maybeExchangeDevice": lambda device: exchange(device),
        "_cuda_init": lambda: None,
        "_cuda_synchronize": lambda: None,
        "_cuda_emptyCache": lambda: accelerator.empty_cache(),
        "_cuda_ipc_collect": lambda: None,
        "_cuda_memoryStats": statistics,
        "_cuda_resetPeakMemoryStats": lambda device: accelerator.reset_peak_memory_stats(device),
        "_cuda_resetAccumulatedMemoryStats": lambda device: None,
        "_cuda_setMemoryFraction": lambda fraction, device: library.card_set_fraction(
            device, ctypes.c_double(fraction)
        ),
        "_cuda_getMemoryFraction": lambda device: library.card_get_fraction(device),
        "_cuda_getArchFlags": lambda: "sm_90",
        "_cuda_getAllocatorBackend": lambda: "native",
        "_cuda_isCurrentStreamCapturing": lambda: library.card_recording(),
        "_cuda_getCompiledVersion": lambda: 13000,
        "_cuda_getCurrentRawStream": lambda device: 0,
        "_host_emptyCache": lambda: None,
        "_accelerator_emptyHostCache": lambda: None,
        "_cuda_lock_mutex": lambda: None,
        "_cuda_unlock_mutex": lambda: None,
        "_cuda_set_sync_debug_mode": lambda mode: library.card_set_sync_debug_mode(mode),
        "_cuda_get_sync_debug_mode": lambda: library.card_get_sync_debug_mode(),
    }
    for name, function in functions.items():
        setattr(torch._C, name, function)
    default = Stream()
    cuda = torch.cuda
    cuda._initialized = True
    cuda._exchange_device = cuda._maybe_exchange_device = exchange
    cuda.default_generators = generators
    cuda.Stream, cuda.Event = Stream, Event
    cuda.streams.Stream, cuda.streams.Event = Stream, Event
    cuda.stream = lambda stream: stream or default
    cuda.current_stream = cuda.default_stream = lambda device=None: default
    cuda.set_stream = lambda stream: None
    cuda.is_current_stream_capturing = cuda.graphs.is_current_stream_capturing = lambda: library.card_recording()
    cuda.get_device_properties = cuda._get_device_properties = lambda device=None: properties
    cuda.get_device_capability = lambda device=None: (properties.major, properties.minor)
    cuda.get_device_name = lambda device=None: properties.name
    cuda.mem_get_info = cuda.memory.mem_get_info = lambda device=None: accelerator.get_memory_info(index(device))
    cuda.is_bf16_supported = lambda including_emulation=True: True
    torch.version.cuda = "13.0"
    torch.storage._to = functools.partial(_move_storage, torch.storage._to)
    _replace_graphs(library)


def _move_storage(to_cpu: Any, storage: Any, device: torch.device, non_blocking: bool = False) -> Any:
    """A build for CPUs makes no storage of another device but behind a tensor. `torch.load` moves storages."""
    if device.type != "cuda":
        return to_cpu(storage, device, non_blocking)
    own = torch.empty(storage.nbytes(), dtype=torch.uint8, device=device)
    own.copy_(torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage))
    return own.untyped_storage()


def _replace_graphs(library: ctypes.CDLL) -> None:
    underway = list[Any]()
    """Pools of captures that were not ended. As on a card, no cache is emptied while there is one."""

    class CUDAGraph:
        """What ran between `capture_begin` and `capture_end`, repeated on the same addresses."""

        def __init__(self, keep_graph: bool = False) -> None:
            self._recorded: int | None = None

        def capture_begin(self, pool: Any = None, **_: Any) -> None:
            self._pool = pool
            underway.append(pool)
            self._recorded = library.card_record()

        def capture_end(self) -> None:
            library.card_end_record()
            if library.card_recording_failed():
                raise RuntimeError("CUDA error: operation failed due to a previous error during capture")
            underway.remove(self._pool)

        def replay(self) -> None:
            library.card_replay(ctypes.c_void_p(self._recorded))

        def reset(self) -> None:
            if self._recorded is not None:
                library.card_drop_graph(ctypes.c_void_p(self._recorded))
                self._recorded = None

        def pool(self) -> tuple[int, int]:
            return (0, 0)

        __del__ = reset

    def end_allocation(device: int, pool: Any) -> None:
        if pool not in underway:
            raise RuntimeError("endAllocatePool: not currently recording to mempool_id")
        underway.remove(pool)

    def empty_cache() -> None:
        if underway:
            raise RuntimeError("captures_underway.empty() INTERNAL ASSERT FAILED")
        torch.accelerator.empty_cache()

    pools = itertools.count(1)
    torch.cuda.graph_pool_handle = torch.cuda.graphs.graph_pool_handle = lambda: (0, next(pools))
    torch._C._cuda_endAllocateToPool, torch._C._cuda_releasePool = end_allocation, lambda device, pool: None
    torch._C._cuda_emptyCache = empty_cache
    torch.cuda.CUDAGraph = torch.cuda.graphs.CUDAGraph = CUDAGraph
    torch.cuda.graph.default_capture_stream = Stream()


@functools.cache
def is_possible() -> bool:
    """Whether there is a compiler, and torch has no CUDA of its own."""
    return shutil.which("c++") is not None and not torch.backends.cuda.is_built()
