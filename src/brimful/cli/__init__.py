"""The command line: one file per command, each a function. Nothing here imports torch before a command needs it."""

from brimful.cli.app import main as main
