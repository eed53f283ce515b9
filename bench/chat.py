"""Trains the chat model for real: a short pretraining, then SFT from it, on question-answer rows.

    python bench/chat.py TRAIN VALID --model chatlm-tiny --pretrain-steps 200 --sft-steps 60 --device cpu
    python bench/chat.py TRAIN VALID --model chatlm-base --memory-limit 20GiB --take-memory --workers 2

Prints validation loss and BLEU before and after each phase, rows/s and MFU (medians), the peak, out-of-memory errors, and
the host RAM of the process tree beyond a process with the same imports and device context. Each phase is stopped once by
SIGTERM and resumed. With `--take-memory`, memory is taken away in the middle of each phase and given back ten steps later.
"""

import argparse
import json
import multiprocessing
import os
import shutil
import signal
import statistics
import subprocess
import sys
import threading
import time
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

PIECE_BYTES = 2**27
os.environ.setdefault(
    "PYTORCH_ALLOC_CONF", "expandable_segments:True"
)  # as the command line does, before torch is imported

import brimful  # noqa: E402

BASELINE = """
import torch, brimful.training.session, brimful.tasks.generate, sacrebleu, transformers.models.t5.modeling_t5, pyarrow
import sys
from brimful.machine.host import tree_bytes
if sys.argv[1] != "cpu":
    torch.zeros(8, 8, device="cuda") @ torch.zeros(8, 8, device="cuda")
print(tree_bytes())
"""


def main() -> None:
    arguments = _arguments()
    out = Path(arguments.output)
    out.mkdir(parents=True, exist_ok=True)
    baseline = _baseline(arguments.device)
    phases, start = [], arguments.pretrained
    if start is None:
        start = out / "pretrain"
        phases.append(
            _run_phase("pretrain", arguments, start, arguments.pretrain_steps, arguments.pretrain_lr, None, baseline)
        )
    if arguments.sft_steps:
        phases.append(_run_phase("sft", arguments, out / "sft", arguments.sft_steps, arguments.sft_lr, start, baseline))
    print(json.dumps({"model": arguments.model, "device": arguments.device, "phases": phases}, indent=1))


def _run_phase(*phase) -> dict:
    """Run a phase in a process of its own, so that its memory does not count for the next one."""
    with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as pool:
        return pool.submit(_phase, *phase).result()


def _phase(name, arguments, run, steps, lr, start, baseline_bytes) -> dict:
    """Train, stop in the middle, resume."""
    from brimful.tasks.load import load_task

    shutil.rmtree(run, ignore_errors=True)
    task_options = {"model": str(start)} if start else {"model": arguments.model, "tokenizer": arguments.tokenizer}
    task_options["max_tokens"] = arguments.max_tokens
    events, stop_at, host = [], (2 * steps) // 3, _Host(baseline_bytes)
    options = dict(  # noqa: C408 - keywords
        run=str(run), max_steps=steps, lr=lr, valid=arguments.valid, eval_every=max(1, steps // 2), eval_rows=arguments.eval_rows,
        generate_rows=arguments.generate_rows, device=arguments.device, memory_limit=arguments.memory_limit, workers=arguments.workers,
        warmup="10%", global_batch=arguments.global_batch, save_every=max(1, steps // 3), keep=1, listeners=[events.append, _note_event],
        progress=_log,
    )  # fmt: skip
    with host:
        hooks = [_Taker(steps // 3)] if arguments.take_memory else []
        stopped = brimful.train(
            load_task(name, task_options), arguments.train, hooks=[*hooks, _Stopper(stop_at)], **options
        )
        assert stopped.reason == "interrupted" and stopped.step == stop_at, stopped
        ending = brimful.train(load_task(name, task_options), arguments.train, resume=True, **options)
    assert ending.reason == "finished" and ending.step == steps, ending
    return {
        "task": name,
        "steps": steps,
        **_summary(events),
        "host_bytes_beyond_imports": host.peak_bytes,
        "host_peak_activity": host.peak_activity,
    }


def _note_event(event) -> None:
    global _activity
    _activity = f"after {event['event']} of step {event.get('step')}"


def _summary(events) -> dict:
    steps = [event for event in events if event["event"] == "step"]
    evals = [event for event in events if event["event"] == "eval"]
    settled = steps[len(steps) // 4 :]
    median = lambda key: statistics.median([one[key] for one in settled if one[key] is not None] or [0])  # noqa: E731
    plan = next(event for event in events if event["event"] == "plan")
    return {
        "before": {key: evals[0].get(key) for key in ("loss", "bleu", "chrf")},
        "after": {key: evals[-1].get(key) for key in ("loss", "bleu", "chrf")},
        "evaluated_rows": evals[-1]["rows"],
        "rows_per_s": median("rows_per_s"),
        "tokens_per_s": median("tokens_per_s"),
        "mfu": median("mfu"),
        "data_wait": statistics.median([one["data_wait_s"] / one["seconds"] for one in settled]),
        "peak_bytes": max((one["peak_bytes"] or 0 for one in steps), default=0),
        "limit_bytes": plan["limit_bytes"],
        "micro_batches": median("micro_batches"),
        "planned_micro_batch": plan["micro_batch"],
        "workers": plan["host"]["workers"],
        "frozen": [one["reason"] for one in plan["choices"] if one["name"] == "frozen"],
        "ooms": sum(one["ooms"] for one in steps),
        "oom_events": [event["sentence"] for event in events if event["event"] == "oom"],
        "resumed_at": [event["step"] for event in events if event["event"] == "resume"],
        "steps_seen": sorted({one["step"] for one in steps}) == list(range(1, steps[-1]["step"] + 1)),
    }


class _Stopper(brimful.Hook):
    """Sends SIGTERM to this process after a step."""

    def __init__(self, at):
        self.at = at

    def after_step(self, loop, result):
        if loop.step == self.at:
            os.kill(os.getpid(), signal.SIGTERM)


class _Taker(_Stopper):
    """Allocates memory after one step, so that the next ones run out of it, and frees it ten steps later."""

    def after_step(self, loop, result):
        import torch

        from brimful.memory.meter import available_bytes

        device = next(loop.stepper.model.parameters()).device
        if loop.step == self.at:
            if device.type != "cpu":
                torch.accelerator.empty_cache()
            room = available_bytes(device)
            held = torch.accelerator.memory_allocated(device) if device.type != "cpu" else 0
            free = (room or 0) - held
            self.taken = []
            while sum(part.nbytes for part in self.taken) < 0.7 * free:  # in pieces, because the cache is fragmented
                try:
                    self.taken.append(torch.empty(PIECE_BYTES, dtype=torch.uint8, device=device))
                except torch.OutOfMemoryError:
                    break
            _log(f"taking {sum(part.nbytes for part in self.taken) / 2**30:.1f} GiB after step {loop.step}")
        elif loop.step == self.at + 10:
            self.taken = None
            _log("memory given back")


class _Host:
    """The peak of anonymous and shared memory of the process tree, sampled ten times a second."""

    def __init__(self, baseline_bytes):
        self.baseline_bytes, self.peak_bytes, self.peak_activity, self._done = baseline_bytes, 0, "", threading.Event()

    def __enter__(self):
        self._thread = threading.Thread(target=self._sample, daemon=True)
        self._thread.start()

    def __exit__(self, *_):
        self._done.set()
        self._thread.join()

    def _sample(self):
        from brimful.machine.host import tree_bytes

        while not self._done.wait(0.1):
            now = tree_bytes() - self.baseline_bytes
            if now > self.peak_bytes:
                self.peak_bytes, self.peak_activity = now, _activity


def _baseline(device) -> int:
    process = subprocess.run([sys.executable, "-c", BASELINE, device], capture_output=True, text=True, check=True)
    return int(process.stdout.split()[-1])


_activity = ""


def _log(phrase) -> None:
    global _activity
    _activity = phrase
    print(f"{time.strftime('%H:%M:%S')} {phrase}", file=sys.stderr, flush=True)


def _arguments():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("train")
    parser.add_argument("valid")
    parser.add_argument("--model", default="chatlm-tiny")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--memory-limit")
    parser.add_argument("--pretrain-steps", type=int, default=200)
    parser.add_argument("--sft-steps", type=int, default=60)
    parser.add_argument("--pretrain-lr", type=float, default=1e-3)
    parser.add_argument("--sft-lr", type=float, default=3e-4)
    parser.add_argument("--eval-rows", type=int, default=400)
    parser.add_argument("--generate-rows", type=int, default=200)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--pretrained", help="a run of pretrain to start SFT from, instead of training one")
    parser.add_argument("--max-tokens", help="truncate texts to this; default: the lengths of the task")
    parser.add_argument("--global-batch", type=int)
    parser.add_argument("--tokenizer", help="a folder; default: trained on TRAIN")
    parser.add_argument("--take-memory", action="store_true")
    parser.add_argument("--output", default="chat-bench")
    return parser.parse_args()


if __name__ == "__main__":
    main()
