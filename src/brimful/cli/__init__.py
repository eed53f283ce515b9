"""The command line. Torch is imported only when a command needs it.

app             the program and its list of commands
flags           options as flags; config files and recipes
output          results, progress and errors
old_names       options of other programs, and what they are here
corrections     the corrected command for an old name
train_process   one training process, which `train` starts

Every other module is one command.
"""

from brimful.cli.app import main as main
