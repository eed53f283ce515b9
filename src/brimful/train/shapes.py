"""Batches that come in ever new shapes, noticed as they come.

Where a task knows its rows' lengths, its plan keeps attention off cuDNN's kernels from the beginning (`memory.opened`). A
loss handed to a stepper, or another trainer's loop, says nothing of lengths, and cuDNN is the faster one where all batches
are alike. So it stays until they are seen not to be.
"""

from typing import Any

from brimful.memory.bare import Rig, tensors_of
from brimful.train.events import Events

MANY = 16
"""So many shapes are no accident of an epoch's last batch or of a finer cut."""


class Shapes:
    """The shapes that micro-batches have had so far."""

    def __init__(self, rig: Rig, events: Events, *, asked: bool) -> None:
        """`asked`: cuDNN's attention was asked for, so it stays."""
        self._rig, self._events = rig, events
        self._watching = rig.device.type == "cuda" and not asked
        self._seen: set[tuple[tuple[int, ...], ...]] = set()
        self.many = False
        """Whether they were found to be many: belongs into a checkpoint."""

    def noted(self, step: int, batch: Any) -> Any:
        """The batch, as it is. Whoever runs it holds the only reference to it."""
        if self._watching and self._rig.cudnn_attention:
            self._seen.add(tuple(tuple(tensor.shape) for tensor in tensors_of(batch)))
            if len(self._seen) > MANY:
                self.switch_off()
                self._events.add(
                    "note",
                    step,
                    f"batches have come in {len(self._seen)} shapes: attention is kept off cuDNN's kernels from here on, which take "
                    "about 0.1 s and 5 MB of host RAM for every new one",
                )
        return batch

    def switch_off(self) -> None:
        """As found now, or before a checkpoint."""
        if self._watching:
            self.many, self._rig.cudnn_attention = True, False
