"""Whole runs in processes that can be killed at any moment, forked from one that imported torch and never used it.

So a start takes 50 ms instead of 3 s. Forked from the tests' own process they would hang: it has threads by then.
"""

import multiprocessing
import os
import random
import signal
import socket
import sys
import time
import traceback
from dataclasses import replace
from pathlib import Path

import torch
import torch._dynamo

import brimful
import brimful.training.session
from brimful.training.events import last_steps, read_events
from tests.step.small import Words

FORKS = multiprocessing.get_context("forkserver")
FORKS.set_forkserver_preload(["tests.training.runs"])
STEPS = 12
ROWS = 40


class Dataset(list):
    """Uneven rows, the same in every process."""

    def __init__(self, count=ROWS):
        draw = torch.Generator().manual_seed(7)
        lengths = torch.randint(1, 40, (count,), generator=draw).tolist()
        super().__init__(
            {"words": torch.randint(1, 50, (length,), generator=draw), "id": place}
            for place, length in enumerate(lengths)
        )


class Run(Words):
    """Words with dropout, so that random numbers matter, and rows of its own."""

    name = "run"
    global_batch = 16

    def __init__(self, dropout=0.1, dtype=torch.float32):
        super().__init__(dtype=dtype, dropout=dropout)

    def rows(self, data):
        return Dataset()


class Other(Run):
    """The same task with a row less."""

    def rows(self, data):
        return Dataset(ROWS - 1)


class Waits(Run):
    """After 100 rows the next one does not come, until there is a file `go` in the run."""

    name = "run"

    def __init__(self, run: Path):
        super().__init__()
        self.run = run

    def rows(self, data):
        return WaitingDataset(self.run)


class WaitingDataset(Dataset):
    def __init__(self, run: Path):
        super().__init__()
        self.run, self.taken = run, 0

    def __getitem__(self, index):
        self.taken += 1
        while self.taken > 100 and not (self.run / "go").exists():
            (self.run / "waits").touch()
            time.sleep(60)
        return super().__getitem__(index)


def plan_file(folder: Path, processes=1) -> Path:
    """A plan of the task."""
    path = folder / f"plan-{processes}.json"
    if not path.exists():
        assert finish([_begin(_plan, path, processes)]) == [0]
    return path


def with_workers(plan: Path, workers: int) -> Path:
    """The same plan with this many loader workers."""
    before = brimful.Plan.load(plan)
    path = plan.with_name(f"workers-{workers}.json")
    replace(before, host=replace(before.host, workers=workers)).save(path)
    return path


def _plan(path: Path, processes: int) -> None:
    brimful.plan(Run(), processes=processes, cache=False, device="cpu").save(path)


def start(run: Path, plan: Path | None, processes=1, **how) -> list["multiprocessing.Process"]:
    """So many processes of one job, as a launcher would start them. A run that was begun is resumed."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    return [_begin(_train, run, plan, rank, processes, port, how) for rank in range(processes)]


def _train(run: Path, plan: Path | None, rank: int, processes: int, port: int, how: dict) -> None:
    places = {
        "RANK": rank,
        "WORLD_SIZE": processes,
        "LOCAL_RANK": rank,
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": port,
    }
    os.environ.update({name: str(value) for name, value in places.items()} if processes > 1 else {})
    how = {"max_steps": STEPS, "save_every": 1, "lr": 1e-2, "device": "cpu", **how}
    task = how.pop("task", None) or Run()
    resume = (run / "run.json").exists()
    brimful.train(task, "rows", run=str(run), plan=plan and str(plan), resume=resume, **how)


def _begin(work, *args) -> "multiprocessing.Process":
    process = FORKS.Process(target=_child, args=(work, *args))
    process.start()
    return process


def _child(work, *args) -> None:
    """Does this and ends, whatever happens; quiet unless `SHOW` is set."""
    code = 1
    try:
        torch.set_num_threads(1)
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        signal.signal(signal.SIGINT, signal.default_int_handler)
        if not os.environ.get("SHOW"):
            silence = os.open(os.devnull, os.O_WRONLY)
            os.dup2(silence, 1)
            os.dup2(silence, 2)
        work(*args)
        code = 0
    except brimful.errors.UserError as error:
        os.write(2, f"{error}\n".encode())
        code = 2
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stderr.flush()
        os._exit(code)


def finish(processes, within_s=120.0) -> list[int]:
    """Exit codes; negative for a signal."""
    end = time.monotonic() + within_s
    for process in processes:
        process.join(max(0.0, end - time.monotonic()))
    if any(process.exitcode is None for process in processes):
        for process in processes:
            process.kill()
        raise AssertionError("a run is stuck")
    return [process.exitcode for process in processes]


def killed_and_resumed(run: Path, plan: Path, *, kills: int, seed: int, longest_s: float, processes=1, **how) -> int:
    """Killed so often at random moments, resumed each time, and let through at last: how many kills met a live run."""
    draw, met = random.Random(seed), 0
    for _ in range(kills):
        started = start(run, plan, processes, **how)
        time.sleep(draw.uniform(0.02, longest_s))
        for process in started:
            process.kill()
        met += -signal.SIGKILL in finish(started)
    assert finish(start(run, plan, processes, **how)) == [0] * processes
    return met


def losses(run: Path) -> dict[int, float]:
    """By step, as the last line of each says."""
    return {event["step"]: event["loss"] for event in last_steps(read_events(run / "events.jsonl"))}


def weights(run: Path) -> dict[str, torch.Tensor]:
    from safetensors.torch import load_file

    return load_file(run / "model" / "model.safetensors")
