"""Links with a fixed name to what changes: `RUN/model` is always the newest weights, `RUN/best` the best.

Relative, so that a run folder can be moved or copied whole; replaced by a rename, so that a reader finds the old target
or the new one. They are a convenience: where a filesystem has no symlinks (FAT, some shares), that is told, no more.
"""

import os
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from brimful.train.checkpoint.durable import sync


def point(link: Path, target: Path, *, tell: Callable[[str], object]) -> bool:
    """Make `link` lead to `target`; False where that was impossible, which was told."""
    draft = link.with_name(f".{link.name}.part")
    try:
        draft.unlink(missing_ok=True)
        draft.symlink_to(os.path.relpath(target, link.parent))
        draft.replace(link)
        sync(link.parent)
    except OSError as error:
        with suppress(OSError):
            draft.unlink(missing_ok=True)
        tell(f"{link} could not be pointed at {target} ({error.strerror}); use the path of the checkpoint itself")
        return False
    return True
