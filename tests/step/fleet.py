"""Gloo processes that start once and train on command, each with faults of its own."""

import multiprocessing
import tempfile
from pathlib import Path

import torch

TIME_OUT_S = 120


class Fleet:
    """`Fleet(3).train(faults)` gives each process's weights, out-of-memory errors and results."""

    def __init__(self, size: int) -> None:
        self.size = size
        context = multiprocessing.get_context("spawn")
        self._folder = tempfile.TemporaryDirectory()
        store = str(Path(self._folder.name) / "store")
        self._pipes, self._processes = [], []
        for rank in range(size):
            ours, theirs = context.Pipe()
            process = context.Process(target=_serve, args=(rank, size, store, theirs), daemon=True)
            process.start()
            self._pipes.append(ours)
            self._processes.append(process)

    def train(self, faults=(), **how):
        """`faults` are (rank, step, micro-batch, place); `how` is passed on to `_train`."""
        for rank, pipe in enumerate(self._pipes):
            pipe.send(([fault[1:] for fault in faults if fault[0] == rank], how))
        answers = []
        for pipe in self._pipes:
            assert pipe.poll(TIME_OUT_S), "a process is stuck"
            answers.append(pipe.recv())
        return answers

    def close(self) -> None:
        for pipe in self._pipes:
            pipe.send(None)
        for process in self._processes:
            process.join(TIME_OUT_S)
        self._folder.cleanup()


def _serve(rank, size, store, pipe) -> None:
    import logging

    import torch.distributed as dist

    torch.set_num_threads(1)
    logging.disable(logging.CRITICAL)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=size)
    while (command := pipe.recv()) is not None:
        due, how = command
        try:
            pipe.send(_train(rank, size, due, **how))
        except Exception as error:
            pipe.send({"error": f"{type(error).__name__}: {error}"})


def _train(
    rank,
    size,
    due,
    *,
    steps=4,
    rows=12,
    micro_batch=2,
    rows_are="global",
    task="Words",
    bucket_bytes=None,
    own_rows=False,
    device="cpu",
    packed_plan=None,
):
    """`packed_plan` is the path of a plan for `tests.packing.small.Lines`."""
    from brimful.planning.plan import Plan
    from brimful.step import distributed
    from brimful.step.stepper import Stepper
    from tests.packing.small import Lines, draw_rows
    from tests.step import small

    distributed.BUCKET_BYTES = bucket_bytes or distributed.BUCKET_BYTES
    plan = packed_plan and Plan.load(packed_plan)
    task = Lines(torch.float64) if plan else getattr(small, task)()
    rows_of_steps = small.steps_of_rows(steps, rows, seed=rank if own_rows else 0)
    if plan:
        rows_of_steps = [draw_rows(rows, seed=seed) for seed in range(steps)]
    model = task.model().to(device)
    if rank:  # whatever the others start with, it is the first one's weights that count
        with torch.no_grad():
            for param in model.parameters():
                param.add_(1.0)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    stepper = Stepper(model, optimizer, task, plan, micro_batch=micro_batch, clip_norm=1.0, rows_are=rows_are)
    faults, results = small.Faults(model, due), []
    with faults.installed():
        for number, given in enumerate(rows_of_steps, start=1):
            faults.begin(number)
            mine = given if rows_are == "global" else given[rank::size]
            results.append(stepper.step(mine))
    return {
        "weights": [param.detach().cpu().clone().numpy() for param in model.parameters()],
        "ooms": stepper.ooms,
        "fired": faults.fired,
        "losses": [result.loss for result in results],
        "logs": [result.log for result in results],
        "rows": [result.rows for result in results],
        "micro_batches": [result.micro_batches for result in results],
        "seconds": [result.seconds for result in results],
        "communication_s": [result.communication_s for result in results],
    }
