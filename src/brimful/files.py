"""On the disk for certain: what is written here is still there after a power cut.

A rename is atomic for readers but not durable by itself: the content must be synced before it, the folder after it.
"""

import errno
import os
from pathlib import Path

_FOLDERS_NOT_SYNCED = (errno.EINVAL, errno.ENOTSUP)


def sync(path: Path) -> None:
    """Wait until a file, or the list of names of a folder, is on the disk; a full disk may show only here."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    except OSError as error:  # some network filesystems write folders at once and refuse to be asked
        if error.errno not in _FOLDERS_NOT_SYNCED or not path.is_dir():
            raise
    finally:
        os.close(descriptor)


def sync_tree(folder: Path) -> None:
    """Everything below a folder, files before the folders that name them, and the folder itself last."""
    for path in sorted(folder.rglob("*"), reverse=True):
        sync(path)
    sync(folder)


def write_whole(path: Path, text: str) -> None:
    """The file has its old content or the new one, never a part of it."""
    draft = path.with_name(f".{path.name}.part")
    try:
        draft.write_text(text, encoding="utf-8")
        sync(draft)
        draft.replace(path)
    except BaseException:
        draft.unlink(missing_ok=True)
        raise
    sync(path.parent)
