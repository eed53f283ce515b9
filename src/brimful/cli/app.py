"""The program: its commands, and how every mistake ends.

A user's mistake is one sentence on stderr and exit code 2, never a traceback; Ctrl-C is exit code 130.
"""

import os
import sys
from collections.abc import Sequence

from cyclopts import App, CycloptsError

import brimful
from brimful.cli.chat import chat
from brimful.cli.data import data
from brimful.cli.demo import demo
from brimful.cli.eval import evaluate
from brimful.cli.machine import machine
from brimful.cli.plan import plan
from brimful.cli.sweep import sweep
from brimful.cli.train import train
from brimful.errors import UserError

app = App(
    name="brimful",
    help="Train PyTorch models as fast as the memory at hand allows, without out-of-memory errors.",
    version=brimful.__version__,
    help_format="markdown",
    suppress_keyboard_interrupt=False,
)
app.command(machine)
app.command(plan)
app.command(train)
app.command(evaluate, name="eval")
app.command(chat)
app.command(demo)
app.command(data)
app.command(sweep)


def main(tokens: Sequence[str] | None = None) -> None:
    """Run one command and leave with its exit code."""
    try:
        app(tokens, exit_on_error=False, print_error=False, result_action="return_value")
    except UserError as error:
        leave(str(error))
    except CycloptsError as error:
        leave(" ".join(str(error).split()))
    except KeyboardInterrupt:
        leave("stopped by Ctrl-C", code=130)
    except BrokenPipeError:  # the reader, `head` say, has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        raise SystemExit(0) from None


def leave(sentence: str, *, code: int = 2) -> None:
    """Say it on stderr and end."""
    print(f"brimful: {sentence}", file=sys.stderr)
    raise SystemExit(code)
