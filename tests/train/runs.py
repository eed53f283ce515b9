"""Whole runs in forked processes that can be killed at any moment: torch is imported once, so a start takes 50 ms."""

import os
import random
import signal
import socket
import sys
import time
from pathlib import Path

import torch
import torch._dynamo

import brimful
import brimful.train.session
from brimful.train.journal import last_steps, read_events
from tests.train.small import Words

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


def plan_file(folder: Path, processes=1, **how) -> Path:
    """A plan of the task, made in a process of its own so that this one never starts a thread."""
    path = folder / f"plan-{processes}.json"
    if not path.exists():
        finish([fork(lambda: brimful.fit(Run(), processes=processes, cache=False, device="cpu", **how).save(path))])
    return path


def train(run: Path, plan: Path | None = None, **how) -> None:
    """In this process. A run that was begun is resumed."""
    torch.set_num_threads(1)
    how = {"max_steps": STEPS, "save_every": 1, "lr": 1e-2, "device": "cpu", **how}
    task = how.pop("task", None) or Run()
    resume = (run / "run.json").exists()
    brimful.train(task, "rows", run=str(run), plan=plan and str(plan), resume=resume, **how)


def start(run: Path, plan: Path | None, processes=1, **how) -> list[int]:
    """So many processes of one job, as a launcher would start them."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]

    def work(rank):
        places = {
            "RANK": rank,
            "WORLD_SIZE": processes,
            "LOCAL_RANK": rank,
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": port,
        }
        os.environ.update({name: str(value) for name, value in places.items()} if processes > 1 else {})
        train(run, plan, **how)

    return [fork(lambda rank=rank: work(rank)) for rank in range(processes)]


def fork(work) -> int:
    """A process that does this and ends, whatever happens; quiet, unless it fails for a reason of its own."""
    pid = os.fork()
    if pid:
        return pid
    code = 1
    try:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        signal.signal(signal.SIGINT, signal.default_int_handler)
        silence = os.open(os.devnull, os.O_WRONLY)
        os.dup2(silence, 1)
        if not os.environ.get("SHOW"):
            os.dup2(silence, 2)
        work()
        code = 0
    except brimful.errors.UserError as error:
        os.write(2, f"{error}\n".encode())
        code = 2
    except BaseException:
        import traceback

        traceback.print_exc()
    finally:
        sys.stderr.flush()
        os._exit(code)


def finish(pids: list[int], within_s=120.0) -> list[int]:
    """Exit codes; negative for a signal."""
    codes, end = [], time.monotonic() + within_s
    for pid in pids:
        while True:
            found, status = os.waitpid(pid, os.WNOHANG)
            if found:
                codes.append(os.waitstatus_to_exitcode(status))
                break
            if time.monotonic() > end:
                for left in pids:
                    os.kill(left, signal.SIGKILL)
                raise AssertionError("a run is stuck")
            time.sleep(0.005)
    return codes


def killed_and_resumed(run: Path, plan: Path, *, kills: int, seed: int, longest_s: float, processes=1, **how) -> int:
    """Killed so often at random moments, resumed each time, and let through at last: how many kills met a live run."""
    draw, met = random.Random(seed), 0
    for _ in range(kills):
        pids = start(run, plan, processes, **how)
        time.sleep(draw.uniform(0.02, longest_s))
        for pid in pids:
            os.kill(pid, signal.SIGKILL)
        met += -signal.SIGKILL in finish(pids)
    assert finish(start(run, plan, processes, **how)) == [0] * processes
    return met


def losses(run: Path) -> dict[int, float]:
    """By step, as the last line of each says."""
    return {event["step"]: event["loss"] for event in last_steps(read_events(run / "events.jsonl"))}


def weights(run: Path) -> dict[str, torch.Tensor]:
    from safetensors.torch import load_file

    return load_file(run / "model" / "model.safetensors")
