"""`brimful demo`: the whole way in two minutes on a laptop: fit, train, evaluate, ask three questions.

Each part is a command that the user could have typed, shown before it runs. The model is tiny, the rows come with the
package (a few hundred questions in Chinese), and the three questions are worded in ways that are not among them.
"""

import json as json_
import shlex
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from brimful.errors import BadRun, UserError
from brimful.tasks.demo import questions, valid_file
from brimful.training.run import RunFolder, new_run


def demo(*, run: Path | None = None, device: str = "cpu", memory_limit: str = "1GiB") -> None:
    """Train a tiny Chinese chat model on rows that come with Brimful, evaluate it, and ask it three questions.

    Parameters
    ----------
    run
        The run's folder; runs/demo-DATE-TIME unless given.
    device
        cpu, cuda, …; two CPU cores take about two minutes.
    memory_limit
        What it may take; on the CPU a virtual limit, kept by counting.
    """
    folder = str(run or new_run("demo"))
    if RunFolder(Path(folder)).has_run:
        raise BadRun(
            f"{folder} has a run in it already: name another folder with --run, or leave --run out for a new one"
        )
    limit = ["--device", device, "--memory-limit", memory_limit]
    _run(["train", "chatlm-pretrain", "--demo-data", "--recipe", "demo", "--run", folder, *limit])
    _run(["eval", folder, str(valid_file()), "--device", device])
    asked = questions()
    words = [word for question in asked for word in ("--prompt", question.prompt)]
    answers = json_.loads(_run(["chat", folder, *words, "--device", device, "--json"], capture=True))["answers"]
    right = 0
    for question, answer in zip(asked, answers, strict=True):
        good = answer["response"] == question.response
        right += good
        print(f"  {question.prompt}\n    {answer['response']}  {'✓' if good else f'✗ expected: {question.response}'}")
    print(f"\n{right} of {len(asked)} answers are right.")
    print(f"The run lies in {folder}; talk to it: {shlex.join(['brimful', 'chat', folder])}")
    if right < len(asked):
        raise UserError("the demo's model did not answer all of its questions as expected")


def _run(words: Sequence[str], *, capture: bool = False) -> str:
    """One command, as it would be typed."""
    print(f"\n$ {shlex.join(['brimful', *words])}", flush=True)
    done = subprocess.run(
        [sys.executable, "-m", "brimful", *words], stdout=subprocess.PIPE if capture else None, text=True, check=False
    )
    if done.returncode:
        raise SystemExit(done.returncode)
    return done.stdout or ""
