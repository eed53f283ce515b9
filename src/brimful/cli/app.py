"""The program `brimful` and its commands. A user's mistake ends in one message and exit code 2, Ctrl-C in exit code 130."""

import io
import os
import sys
from collections.abc import Sequence
from difflib import get_close_matches
from types import NoneType
from typing import Literal, get_args, get_origin

from cyclopts import (
    App,
    CoercionError,
    CycloptsError,
    MissingArgumentError,
    RepeatArgumentError,
    UnknownCommandError,
    UnknownOptionError,
    UnusedCliTokensError,
    _convert,
)

import brimful
from brimful.cli.chat import chat
from brimful.cli.compare import compare
from brimful.cli.corrections import refuse_old_names
from brimful.cli.data import data
from brimful.cli.demo import demo
from brimful.cli.doctor import doctor
from brimful.cli.estimate import estimate_command
from brimful.cli.eval import evaluate
from brimful.cli.export import export
from brimful.cli.flags import task_flags
from brimful.cli.machine import machine
from brimful.cli.output import fail
from brimful.cli.plan import plan_command
from brimful.cli.report import report
from brimful.cli.serve import serve
from brimful.cli.sweep import sweep
from brimful.cli.train import train_command
from brimful.cli.watch import watch
from brimful.cli.why import why
from brimful.errors import BadOption, UserError
from brimful.languages import LANGUAGES, VARIABLE, set_language


def make_app(tokens: Sequence[str]) -> App:
    """The commands. `train`, `plan` and `estimate` have flags for the options of the task that the command line names."""
    app = App(
        name="brimful",
        help="Train PyTorch models as fast as the available memory allows, without out-of-memory errors.",
        help_epilogue="Add --lang zh to any command, or set LANG, to get its output in Chinese; this help is in English. Add "
        "--traceback, or set BRIMFUL_TRACEBACK=1, to see the full traceback of an error.",
        version=brimful.__version__,
        help_format="markdown",
        suppress_keyboard_interrupt=False,
    )
    task_fields = task_flags(tokens)
    app.command(machine)
    app.command(doctor)
    app.command(plan_command(task_fields), name="plan")
    app.command(estimate_command(task_fields), name="estimate")
    app.command(train_command(task_fields), name="train")
    app.command(watch)
    app.command(why)
    app.command(compare)
    app.command(report)
    app.command(evaluate, name="eval")
    app.command(chat)
    app.command(serve)
    app.command(export)
    app.command(data)
    app.command(sweep)
    app.command(demo)
    return app


def main(tokens: Sequence[str] | None = None) -> None:
    """Run one command and exit with its code."""
    tokens = list(sys.argv[1:] if tokens is None else tokens)
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")  # a terminal that cannot show Chinese shows question marks
    if "--traceback" in tokens:
        tokens.remove("--traceback")
        os.environ["BRIMFUL_TRACEBACK"] = "1"  # the processes that train see it too
    _limit_spinning()
    try:
        _choose_language(tokens)
        app = make_app(tokens)
        refuse_old_names(app, tokens)
        app(tokens, exit_on_error=False, print_error=False, result_action="return_value")
    except UserError as error:
        fail(error)
    except CycloptsError as error:
        fail(_usage(app, tokens, error), code=BadOption.code)
    except KeyboardInterrupt:
        fail("stopped by Ctrl-C", status=130)
    except BrokenPipeError:  # the reader, such as `head`, has closed the pipe
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        raise SystemExit(0) from None


def _limit_spinning() -> None:
    """Let threads of torch that wait for each other on a CPU sleep after a moment. By default they spin for so long that a step
    takes several times as long where other programs need the cores: for the tiny chat model on two cores with a load of ten 380 to
    1,050 ms, now 116 to 146. On idle cores 12.8 ms, now 13.7. Must be set before torch is imported.
    """
    if "OMP_WAIT_POLICY" not in os.environ:
        os.environ.setdefault("GOMP_SPINCOUNT", "1000")


def _whole_number(text: str) -> int:
    """As cyclopts reads it, but 64.7 is no whole number: it would be rounded, and the plan would say `as requested`."""
    number = int(_read_int(text))
    if "." in text and float(text) != number:
        raise ValueError(f"{text} is not a whole number")
    return number


_read_int = _convert._converters[int]
_convert._converters[int] = _whole_number


def _choose_language(tokens: list[str]) -> None:
    """Take `--lang zh` or `--lang=zh` out of the tokens and use that language here and in the processes that train."""
    index = next((index for index, token in enumerate(tokens) if token.partition("=")[0] == "--lang"), None)
    if index is None:
        return
    flag, equals, name = tokens.pop(index).partition("=")
    if not equals:
        name = tokens.pop(index) if index < len(tokens) else ""
    chosen = next((language for language in LANGUAGES if language == name.lower()), None)
    if chosen is None:
        raise BadOption(
            f"{flag} {name}".strip() + f" is not a language of Brimful. Try: {flag} {' or '.join(LANGUAGES)}."
        )
    set_language(chosen)
    os.environ[VARIABLE] = chosen


def _usage(app: App, tokens: Sequence[str], error: CycloptsError) -> str:
    """What is wrong with the words of a command line, and what to type."""
    help_of = " ".join(["Try: brimful", *app.parse_commands(tokens)[0], "--help."])
    if isinstance(error, UnknownCommandError):
        name = (error.unused_tokens or [""])[0]
        close = get_close_matches(name, [command for command in app if not command.startswith("-")], n=1)
        return f"{name} is not a command. {f'Try: brimful {close[0]}.' if close else help_of}"
    if isinstance(error, UnknownOptionError):
        name = (error.token.keyword or error.token.value).partition("=")[0]
        close = get_close_matches(
            name, [option for argument in error.argument_collection for option in argument.names], n=1
        )
        return f"unknown option {name}. {f'Did you mean {close[0]}?' if close else help_of}"
    if isinstance(error, MissingArgumentError) and error.argument is not None:
        name = error.keyword or error.argument.name
        return f"{name} {'needs a value' if error.keyword else 'is missing'}. {help_of}"
    if isinstance(error, RepeatArgumentError):
        return f"{error.token.keyword} was given more than once. {help_of}"
    if isinstance(error, UnusedCliTokensError):
        return f"{' '.join(error.unused_tokens or [])} has no place in this command. {help_of}"
    if isinstance(error, CoercionError) and (sentence := _wrong_type(error)):
        return sentence
    return " ".join(str(error).split())


def _wrong_type(error: CoercionError) -> str | None:
    """`--micro-batch lots must be a whole number or auto.`; None if the type has no plain name."""
    if error.token is None or error.token.keyword is None:
        return None
    if get_origin(error.target_type) is Literal:
        return f"{error.token.keyword} {error.token.value} must be one of {', '.join(get_args(error.target_type))}."
    types = [type_ for type_ in get_args(error.target_type) or (error.target_type,) if type_ is not NoneType]
    names = {int: "a whole number", float: "a number"}
    words = [", ".join(get_args(type_)) if get_origin(type_) is Literal else names.get(type_, "") for type_ in types]
    if "" in words:
        return None
    return f"{error.token.keyword} {error.token.value} must be {' or '.join(words)}."
