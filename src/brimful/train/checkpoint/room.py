"""Room on the disk: refused before writing where it can be known, one sentence where it shows only at writing.

A quota is seen by nobody until it is hit. At writing, a full disk shows in three ways, all seen on a real one: Python's
OSError; safetensors' `I/O error: No space left on device (os error 28)`; and torch.save's `unexpected pos 640 vs 598`,
which names no cause at all.
"""

import errno
import re
from pathlib import Path

from brimful.errors import SaveFailed, in_one_line
from brimful.machine.space import Space
from brimful.units import KiB, show_bytes

_FULL = {
    errno.ENOSPC: "the disk is full",
    errno.EDQUOT: "the disk quota is used up",
    errno.EFBIG: "a file grew beyond what the disk or `ulimit -f` allows",
}
_RUST_ERRNO = re.compile(r"\(os error (\d+)\)")
_TORCH_SAYS = ("unexpected pos", "iostream error", "failed writing file")
_CUT_SHORT = "a file was cut short, as on a full disk or at a quota"
_SAFE = "what was saved before is untouched"


def margin_bytes(needs_bytes: int) -> int:
    """For the manifest, folders and rounding to whole blocks: 2 % and 64 KiB."""
    return needs_bytes // 50 + 64 * KiB


def check_one(folder: Path, step: int, needs_bytes: int) -> None:
    """Before a save: is there room for it?"""
    space = Space.around(folder)
    if space is not None and needs_bytes + margin_bytes(needs_bytes) > space.free_bytes:
        raise _no_room(folder, step, "too little room on the disk", needs_bytes, space)


def check_all(folder: Path, needs_bytes: int, *, saves: int, there_bytes: int) -> None:
    """Before a run: is there room for as many as will lie there at once, those that lie there now counted in?"""
    space, all_bytes = Space.around(folder), saves * (needs_bytes + margin_bytes(needs_bytes))
    if space is None or all_bytes <= space.free_bytes + there_bytes:
        return
    raise SaveFailed(
        f"{saves} checkpoints of {show_bytes(needs_bytes)} (predicted) lie in {folder} at once, those to keep, the best "
        f"and the one being written; they need {show_bytes(all_bytes - there_bytes)} more and {show_bytes(space.free_bytes)} "
        "is free there; make room, lower --keep, or name another --run"
    )


def failure(error: Exception, folder: Path, step: int, needs_bytes: int) -> SaveFailed:
    """The one sentence for whatever ended a save; asked when what it had written is gone again."""
    if cause := _why_full(error):
        return _no_room(folder, step, cause, needs_bytes, Space.around(folder))
    advice = "make the folder writable or name another --run; " if isinstance(error, OSError) else ""
    said = error.strerror if isinstance(error, OSError) and error.strerror else in_one_line(error).removesuffix(": ")
    return SaveFailed(f"the checkpoint of step {step} could not be written to {folder}: {said}; {advice}{_SAFE}")


def _no_room(folder: Path, step: int, cause: str, needs_bytes: int, space: Space | None) -> SaveFailed:
    free = show_bytes(space.free_bytes if space else None)
    return SaveFailed(
        f"the checkpoint of step {step} could not be written to {folder}: {cause}; it needs about {show_bytes(needs_bytes)} "
        f"(predicted) and {free} is free there; make room, lower --keep, or name another --run; {_SAFE}"
    )


def _why_full(error: BaseException) -> str | None:
    """Which kind of full it was, or None; the first error of a chain knows more than the one that came of it."""
    return next(filter(None, map(_cause, reversed(_chain(error)))), None)


def _chain(error: BaseException | None) -> list[BaseException]:
    chain: list[BaseException] = []
    while error is not None and error not in chain:
        chain.append(error)
        error = error.__cause__ or error.__context__
    return chain


def _cause(error: BaseException) -> str | None:
    if isinstance(error, OSError):
        return _FULL.get(error.errno or 0)
    if said := _RUST_ERRNO.search(str(error)):
        return _FULL.get(int(said[1]))
    return _CUT_SHORT if any(words in str(error) for words in _TORCH_SAYS) else None
