"""Where a process of a run trains: its device, and the limit on it while the run lasts."""

import os
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from brimful.errors import BadOption, DeviceBusy
from brimful.memory.ledger import Ledger
from brimful.plan.options import FitOptions
from brimful.plan.target import Target, find_target
from brimful.train.settings import TrainOptions


def device_of(fitting: FitOptions, options: TrainOptions) -> torch.device:
    """The one asked for; of several processes, each takes the card of its number."""
    there = torch.cuda.device_count()
    if options.gpus is not None and options.gpus > there:
        on_cpu = "" if there else "; on the CPU, --processes N shares a step"
        raise DeviceBusy(f"--gpus {options.gpus}: torch {torch.__version__} sees {there or 'none'} here{on_cpu}")
    if options.backend == "nccl" and find_target(fitting).device.type != "cuda":
        raise BadOption("--backend nccl: NCCL connects cards, and this run is on the CPU; leave it out, or give gloo")
    several = int(os.environ.get("WORLD_SIZE", "1")) > 1
    device = find_target(fitting).device
    if device.type == "cuda" and several and ":" not in fitting.device:
        device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))
    if device.type == "cuda":
        torch.cuda.set_device(device)
    return device


@contextmanager
def limited(target: Target, fitting: FitOptions) -> Iterator[None]:
    """A limit that was asked for holds while the run trains: torch's cap on a card, the ledger on the CPU."""
    if fitting.memory_limit_bytes is None:
        yield
        return
    with target.capped():
        if target.device.type != "cpu":
            yield
            return
        with Ledger(fitting.memory_limit_bytes):
            yield
