"""The command line. Torch is imported only when a command needs it.

app             the program and its list of commands
plan, train, eval, chat, demo, data, sweep, machine, report
                one command each
train_process   one training process, which `train` starts
flags           options as flags; config files and recipes
output          results, progress and errors
"""

from brimful.cli.app import main as main
