"""Tiny preference runs: pairs for the models that all chat tests share, and a run that kills itself."""

import os
import signal

import torch

import brimful
from brimful.tasks.preference import Dpo, DpoOptions
from brimful.training.events import read_events
from tests.tasks.tiny import ROWS, write_jsonl
from tests.tasks.tiny_causal import CONVERSATIONS

KINDS = ("t5", "qwen2")


def pairs(kind):
    """24: the model's own answer is rejected, and that of another row preferred."""
    if kind == "t5":
        replies = [row["response"] for row in ROWS]
        prompts = [row["prompt"] for row in ROWS]
    else:
        replies = [[one[-1]] for one in CONVERSATIONS]
        prompts = [one[:-1] for one in CONVERSATIONS]
    others = replies[3:] + replies[:3]
    return [
        {"prompt": prompt, "chosen": chosen, "rejected": rejected}
        for prompt, chosen, rejected in zip(prompts, others, replies, strict=True)
    ]


class Pairs:
    """A model folder, a file of pairs, and runs on them."""

    def __init__(self, kind, model, folder):
        self.kind, self.model, self.folder = kind, model, folder
        self.file = write_jsonl(folder / "pairs.jsonl", pairs(kind))

    def task(self, cls=Dpo, **options):
        return cls(DpoOptions(**{"model": str(self.model), **options}))

    def train(self, run, task=None, data=None, **how):
        how = {"max_steps": 8, "lr": 1e-3, "global_batch": 8, "save_every": 3, **how}
        path = self.folder / run
        how = {
            "device": "cpu",
            "workers": 0,
            "cache": False,
            "quiet": True,
            "deterministic": True,
            "memory_limit": "1GiB",
            **how,
        }
        ending = brimful.train(task or self.task(), str(data or self.file), run=path, **how)
        return path, ending


def events(run, kind):
    return [one for one in read_events(run / "events.jsonl") if one["event"] == kind]


class Double(Dpo):
    """In float64, so that another split of a step shows no difference."""

    def initial_model(self):
        return super().initial_model().double()

    def model(self):
        return super().model().double()


class RunsOut(Double):
    """The memory runs out in the middle, at some micro-batches of more than two pairs."""

    calls = 0

    def loss(self, model, batch):
        if model.training and torch.is_grad_enabled() and len(batch["lengths"]) > 2 and getattr(self, "armed", False):
            type(self).calls += 1
            if type(self).calls in (3, 4, 9):
                raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 1.23 GiB (injected)")
        return super().loss(model, batch)


class Arm(brimful.Hook):
    """The plan was made by then, so that only steps run out of memory."""

    def before(self, loop):
        loop.stepper._context.task.armed = True


class Kill(brimful.Hook):
    """Ends the process at a step, as the kernel does when memory is short."""

    def __init__(self, step):
        self.step = step

    def after_step(self, loop, result):
        if loop.step == self.step:
            os.kill(os.getpid(), signal.SIGKILL)


def killed(kind, model, folder, run, options):
    """For a process of its own."""
    one = Pairs(kind, model, folder)
    one.train(run, one.task(**options), hooks=[Kill(5)])
