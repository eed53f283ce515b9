"""`brimful chat MODEL`: questions and answers in the terminal, through a pipe, or given as flags."""

import sys
from collections.abc import Callable, Iterable
from contextlib import suppress
from typing import Annotated, Any

from cyclopts import Parameter

from brimful.cli.flags import show


def chat(
    model: str,
    /,
    *,
    prompt: Annotated[list[str] | None, Parameter(negative="")] = None,
    max_new_tokens: int = 256,
    beams: int = 1,
    temperature: float = 0.0,
    top_p: float = 1.0,
    repetition_penalty: float = 1.0,
    seed: int = 0,
    device: str = "auto",
    json: Annotated[bool, Parameter(negative="")] = False,
) -> None:
    """Talk to a trained chat model. Answers appear as they are made; each question stands for itself.

    Without --prompt it asks in the terminal until /quit or Ctrl-D; where a pipe comes in, each line of it is a question.

    Parameters
    ----------
    model
        A folder that save_pretrained wrote, a run of `brimful train` (its best model) or one of its checkpoints.
    prompt
        A question to answer; may be given several times.
    max_new_tokens
        Tokens of an answer at most.
    beams
        Sequences followed at once; 1 takes the likeliest token each time.
    temperature
        0 is no chance; above it tokens are drawn, 0.7 say.
    top_p
        Draw only among the likeliest tokens that together have this share.
    repetition_penalty
        Above 1, tokens that are there already become less likely.
    seed
        Of the drawing.
    device
        cpu, cuda, cuda:1, mps or xpu; the first accelerator unless given.
    json
        Print one JSON object with all answers, at the end.
    """
    from brimful.tasks.generate import GenerateOptions

    options = GenerateOptions(
        max_new_tokens=max_new_tokens, beams=beams, temperature=temperature, top_p=top_p,
        repetition_penalty=repetition_penalty, seed=seed,
    )  # fmt: skip
    opened = _open(model, options, device)
    if prompt is None and sys.stdin.isatty() and not json:
        _in_the_terminal(opened)
        return
    questions = _lines() if prompt is None else prompt
    replies = [_told(opened, question, quiet=json) for question in questions if question.strip()]
    if json:
        found = {
            "model": str(opened.folder),
            "device": str(opened.device),
            "answers": [one.to_json() for one in replies],
        }
        show("", found, as_json=True)


def _open(model: str, options: Any, device: str) -> Any:
    from brimful.planning.target import PlanOptions, autocast_dtype, find_target
    from brimful.tasks.generate import Chat

    target = find_target(PlanOptions(device=device))
    return Chat(model, options, device=target.device, autocast=autocast_dtype("auto", target.device))


def _told(opened: Any, question: str, *, quiet: bool) -> Any:
    reply = opened.reply(question, (lambda _: None) if quiet else _say)
    if not quiet:
        _say("\n")
    return reply


def _lines() -> Iterable[str]:
    """Of a pipe, one at a time: a program that asks and waits gets its answer before it asks again."""
    for line in iter(sys.stdin.readline, ""):
        yield line.strip()


def _in_the_terminal(opened: Any) -> None:
    with suppress(ImportError):  # not every Python has it
        import readline  # noqa: F401 - makes input() a line that can be edited
    from brimful.tasks.generate import HELP, talk

    print(f"{opened.folder} on {opened.device}. {HELP}")
    talk(opened, _reader("> "), _say)
    print()


def _reader(sign: str) -> Callable[[], str]:
    return lambda: input(sign)


def _say(text: str) -> None:
    print(text, end="", flush=True)
