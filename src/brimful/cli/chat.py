"""`brimful chat MODEL`: questions and answers in the terminal, through a pipe, or as flags."""

import sys
from collections.abc import Iterable
from contextlib import closing, suppress
from typing import TYPE_CHECKING, Annotated

from cyclopts import Parameter

from brimful.cli.flags import Device, Switch
from brimful.cli.output import show
from brimful.errors import BadOption
from brimful.languages import tr, translate
from brimful.units import NOTHING

if TYPE_CHECKING:
    from brimful.serving.chat import Chat


def chat(
    model: str,
    /,
    *,
    prompt: Annotated[list[str] | None, Parameter(negative="")] = None,
    system: str | None = None,
    max_new_tokens: int = 256,
    beams: int = 1,
    temperature: float = 0.0,
    top_p: float = 1.0,
    repetition_penalty: float = 1.0,
    seed: int = 0,
    device: Device = "auto",
    json: Switch = False,
) -> None:
    """Talk to a language model. Answers appear as they are generated.

    Without --prompt, questions are read from the terminal until /quit or Ctrl-D, or from a pipe, one per line, which are shown
    above their answers. In the terminal a causal model remembers the conversation; /new begins another. Questions from flags or
    a pipe are answered each by itself. A model without a chat template continues the text.

    Parameters
    ----------
    model
        A run of `brimful train` (its best model), one of its checkpoints, an adapter, a folder written by save_pretrained, or
        owner/name on the Hugging Face hub.
    prompt
        A question to answer. Can be repeated.
    system
        How the model should behave: the system message of its chat template.
    max_new_tokens
        Tokens of an answer at most.
    beams
        Beams of beam search; 1 is greedy.
    temperature
        Sampling temperature, such as 0.7; 0 always takes the most likely token.
    top_p
        Sample only from the most likely tokens that together have this probability.
    repetition_penalty
        Above 1, tokens that were generated already become less likely.
    seed
        Seed of sampling.
    json
        Print one JSON object with all answers at the end.
    """
    from brimful.planning.plan_options import PlanOptions
    from brimful.planning.target import autocast_dtype, find_target
    from brimful.serving.chat import Chat
    from brimful.tasks.generate import GenerateOptions

    if not all(map(str.strip, prompt or [])):
        raise BadOption("prompt= is empty. Try: a question.")
    options = GenerateOptions(
        max_new_tokens=max_new_tokens, beams=beams, temperature=temperature, top_p=top_p,
        repetition_penalty=repetition_penalty, seed=seed,
    )  # fmt: skip
    target = find_target(PlanOptions(device=device))
    autocast = autocast_dtype("auto", target.device)
    # Closed, so that Python does not end while the engine's thread is still at work.
    with closing(Chat(model, options, device=target.device, autocast=autocast, system=system)) as session:
        _answer(session, prompt, json)


def _answer(session: "Chat", prompt: list[str] | None, json: bool) -> None:
    from brimful.serving.chat import answer_each

    if prompt is None and sys.stdin.isatty() and not json:
        _talk_in_terminal(session)
        return
    if session.manner == "continuation":
        print(tr("{folder} has no chat template, so it continues the text.", folder=session.folder), file=sys.stderr)
    if prompt is None and not json:
        answer_each(session, _read_pipe, _write)
        return
    replies = []
    for question in _lines() if prompt is None else prompt:
        session.begin()
        replies.append(session.reply(question, (lambda _: None) if json else _write))
        if not json:
            _write("\n" if replies[-1].response.strip() else f"{NOTHING}\n")
    if json:
        answers = [reply.to_json() for reply in replies]
        report = {
            "model": str(session.folder),
            "device": str(session.device),
            "manner": session.manner,
            "answers": answers,
        }
        show("", report, as_json=True)


def _lines() -> Iterable[str]:
    """The lines of a pipe that are not empty."""
    return filter(None, map(str.strip, sys.stdin))


def _read_pipe(prompt: str) -> str:
    """The next line of a pipe, which is shown. It is read only now, so a program can wait for each answer before its next question."""
    line = sys.stdin.readline()
    if not line:
        raise EOFError
    if line.strip():
        _write(f"{prompt}{line.rstrip()}\n")
    return line


def _talk_in_terminal(session: "Chat") -> None:
    with suppress(ImportError):  # not every Python has it
        import readline  # noqa: F401 - gives input() line editing
    from brimful.serving.chat import talk

    print(tr("{model} on {device}.", model=session.folder, device=session.device), translate(session.help), sep="\n")
    talk(session, input, _write)
    print()


def _write(text: str) -> None:
    print(text, end="", flush=True)
