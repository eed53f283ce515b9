"""Engines over the small models of these tests."""

from contextlib import contextmanager
from dataclasses import replace

import torch

from brimful.planning.plan_options import PlanOptions
from brimful.planning.target import find_target
from brimful.serving.answer import Prompt
from brimful.serving.engine import Engine, EngineOptions
from brimful.tasks.generate import GenerateOptions, Generator
from brimful.tasks.model_folder import tokenizer_of

CPU = torch.device("cpu")


def generator(made, model=None, **options):
    """Of a `TinyChat` or `TinyCausal`, or of another model with its tokenizer."""
    ends = made.template.end_ids if hasattr(made, "template") else ()
    chosen = GenerateOptions(**{"max_new_tokens": 16, **options})
    return Generator(made.net if model is None else model, tokenizer_of(made.model), chosen, device=CPU, end_ids=ends)


@contextmanager
def running(made, model=None, *, limit=None, notes=None, end_ids=None, **options):
    """An engine, with a simulated memory limit in bytes if given."""
    target = find_target(PlanOptions(device="cpu"))
    if limit is not None:
        target = replace(target, limit_bytes=limit, requested=True, limit_reason="as requested")
    source = generator(made, model)
    source.end_ids = source.end_ids if end_ids is None else end_ids
    note = (lambda text: None) if notes is None else notes.append
    engine = Engine(source, target, EngineOptions(**options), note=note)
    try:
        yield engine.start()
    finally:
        engine.close()


def prompt(tokens, new=16, **options):
    return Prompt(tokens=[int(token) for token in tokens], max_new_tokens=new, **options)


def texts(engine, prompts):
    """The answers to all of them, submitted at once."""
    answers = [engine.submit(one) for one in prompts]
    return ["".join(answer) for answer in answers]


def random_prompts(*lengths):
    rng = torch.Generator().manual_seed(1)
    return [torch.randint(2, 385, (length,), generator=rng).tolist() for length in lengths]


def wait_until(reached, seconds=30):
    """Bounded, so that a test fails instead of hanging."""
    import time

    end = time.monotonic() + seconds
    while not reached():
        assert time.monotonic() < end, "it did not happen"
        time.sleep(0.002)
