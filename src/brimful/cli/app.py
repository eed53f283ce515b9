"""The program `brimful` and its commands. A user's mistake ends in one message and exit code 2, Ctrl-C in exit code 130."""

import os
import sys
from collections.abc import Sequence
from types import NoneType
from typing import Literal, get_args, get_origin

from cyclopts import App, CoercionError, CycloptsError

import brimful
from brimful.cli.chat import chat
from brimful.cli.data import data
from brimful.cli.demo import demo
from brimful.cli.eval import evaluate
from brimful.cli.flags import task_flags
from brimful.cli.machine import machine
from brimful.cli.output import fail
from brimful.cli.plan import plan_command
from brimful.cli.sweep import sweep
from brimful.cli.train import train_command
from brimful.cli.why import why
from brimful.errors import UserError


def make_app(tokens: Sequence[str]) -> App:
    """The commands. `train` and `plan` have flags for the options of the task that the command line names."""
    app = App(
        name="brimful",
        help="Train PyTorch models as fast as the available memory allows, without out-of-memory errors.",
        help_epilogue="Add --traceback to any command, or set BRIMFUL_TRACEBACK=1, to see the full traceback of an error.",
        version=brimful.__version__,
        help_format="markdown",
        suppress_keyboard_interrupt=False,
    )
    task_fields = task_flags(tokens)
    app.command(machine)
    app.command(plan_command(task_fields), name="plan")
    app.command(train_command(task_fields), name="train")
    app.command(evaluate, name="eval")
    app.command(chat)
    app.command(demo)
    app.command(data)
    app.command(sweep)
    app.command(why)
    return app


def main(tokens: Sequence[str] | None = None) -> None:
    """Run one command and exit with its code."""
    tokens = list(sys.argv[1:] if tokens is None else tokens)
    if "--traceback" in tokens:
        tokens.remove("--traceback")
        os.environ["BRIMFUL_TRACEBACK"] = "1"  # the processes that train see it too
    try:
        make_app(tokens)(tokens, exit_on_error=False, print_error=False, result_action="return_value")
    except UserError as error:
        fail(error)
    except CoercionError as error:
        fail(_wrong_type(error) or str(error))
    except CycloptsError as error:
        fail(" ".join(str(error).split()))
    except KeyboardInterrupt:
        fail("stopped by Ctrl-C", code=130)
    except BrokenPipeError:  # the reader, such as `head`, has closed the pipe
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        raise SystemExit(0) from None


def _wrong_type(error: CoercionError) -> str | None:
    """`--micro-batch lots must be a whole number or auto.`; None if the type has no plain name."""
    types = [one for one in get_args(error.target_type) or (error.target_type,) if one is not NoneType]
    names = {int: "a whole number", float: "a number"}
    words = [", ".join(get_args(one)) if get_origin(one) is Literal else names.get(one, "") for one in types]
    if error.token is None or error.token.keyword is None or get_origin(error.target_type) is Literal or "" in words:
        return None
    return f"{error.token.keyword} {error.token.value} must be {' or '.join(words)}."
