"""`brimful demo`: plan, train, evaluate and ask three questions, in about two minutes on a laptop.

Each part is a command that the user could type, shown before it runs. The model is tiny, the rows come with the package
(a few hundred questions in Chinese), and the three questions are worded differently from all of them.
"""

import json
import shlex
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from brimful.errors import BadRun, UserError
from brimful.languages import tr
from brimful.tasks.demo import questions, valid_file
from brimful.training.run import RunFolder, new_run


def demo(*, run: Path | None = None, device: str = "cpu", memory_limit: str = "1GiB") -> None:
    """Train a tiny Chinese chat model on rows that come with Brimful, evaluate it, and ask it three questions.

    Parameters
    ----------
    run
        Folder of the run. Default: runs/demo-DATE-TIME.
    device
        cpu, cuda, …; two CPU cores take about two minutes.
    memory_limit
        Memory to use at most; on the CPU a simulated limit.
    """
    folder = str(run or new_run("demo"))
    if RunFolder(Path(folder)).has_run:
        raise BadRun(f"{folder} already has a run in it. Try: another folder with run=.")
    device_flags = ["--device", device]
    limit_flags = ["--memory-limit", memory_limit]
    train = ["train", "pretrain", "--demo-data", "--recipe", "demo", "--run", folder]
    _run_command([*train, *device_flags, *limit_flags])
    _run_command(["eval", folder, str(valid_file()), *device_flags])
    prompts = [word for question in questions() for word in ("--prompt", question.prompt)]
    answers = json.loads(_run_command(["chat", folder, *prompts, *device_flags, "--json"], capture=True))["answers"]
    correct = 0
    for question, answer in zip(questions(), answers, strict=True):
        is_correct = answer["response"] == question.response
        correct += is_correct
        mark = "✓" if is_correct else tr("✗ expected: {response}", response=question.response)
        print(f"  {question.prompt}\n    {answer['response']}  {mark}")
    print()
    print(tr("{correct} of {count} answers are correct. Saved to {folder}", correct=correct, count=len(answers), folder=folder))  # fmt: skip
    print(tr("Try: {advice}", advice=shlex.join(["brimful", "chat", folder])))
    if correct < len(answers):
        raise UserError("the demo's model did not answer all questions correctly.")


def _run_command(arguments: Sequence[str], *, capture: bool = False) -> str:
    """Run one command as the user would type it; returns its output if captured."""
    print(f"\n$ {shlex.join(['brimful', *arguments])}", flush=True)
    stdout = subprocess.PIPE if capture else None
    process = subprocess.run([sys.executable, "-m", "brimful", *arguments], stdout=stdout, text=True, check=False)
    if process.returncode:
        raise SystemExit(process.returncode)
    return process.stdout or ""
