"""The command line: one file per command. Torch is imported only when a command needs it."""

from brimful.cli.app import main as main
