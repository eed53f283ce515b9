"""Checkpoints that survive anything: a folder is whole or it is not there, and a flipped byte is found.

    RUN/checkpoints/
      step-00000200/              whole: written beside its place, synced, hashed, renamed
        model/…  optimizer.pt  …    whatever the training wrote
        manifest.json               sizes and hashes of all that, written last (manifest.py, hashing.py)
      best.json                   which step was best, and how good it was (best.py)
      .step-00000400.part-PID     what a killed save left: never read, removed by `clean`
      .step-00000400.gone-PID     what a killed removal left: the same
      .step-00000400.aside        the former one of a step that is saved again, until the new one is in its place

    RUN/model, RUN/best           links into the above (links.py)

The package knows folders, files, hashes and disks (durable.py, room.py), and nothing about models; it needs no torch.
"""

from brimful.train.checkpoint.best import Best
from brimful.train.checkpoint.checkpoint import Checkpoint, Found, Skipped
from brimful.train.checkpoint.checkpoints import Checkpoints
from brimful.train.checkpoint.links import point

__all__ = ["Best", "Checkpoint", "Checkpoints", "Found", "Skipped", "point"]
