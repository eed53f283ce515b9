"""One run, one folder: a lock that keeps a second `brimful train` out of a run folder.

The lock is the kernel's (`flock` on RUN/lock), not the file: it ends with the last process that holds the open file, however
that process dies, so nothing is ever left to clean up. The parent opens it and hands the open file to its first worker;
the folder stays locked until both have gone, a worker that still saves after its parent was killed included. What the
file says, pid, box and time, only makes the refusal helpful.
"""

import contextlib
import errno
import fcntl
import json
import logging
import os
import socket
import tempfile
import time
from collections.abc import Callable
from datetime import datetime
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from brimful.errors import BadRun
from brimful.train.supervise import look

_NO_LOCKS = {errno.ENOLCK, errno.ENOSYS, errno.EINVAL, errno.EOPNOTSUPP, errno.ENOTSUP}
"""What a filesystem answers that knows no locks: some network mounts, FUSE."""

_SIGN_S = 0.3
"""Who has just taken a lock may need so long until the file says so."""

log = logging.getLogger("brimful")


class RunLock:
    """Holds a run folder, which it makes where there is none, until it is closed or its process ends.

    `fd` can be passed on to other processes (`pass_fds`); each of them then holds it too.
    """

    def __init__(self, run: Path, *, tell: Callable[[str], object] = log.warning, flag: str = "--run") -> None:
        """`flag` is what names the folder on the command line."""
        self.run = run
        self.fd = _open(run, flag)
        try:
            _claim(self.fd, run, tell, flag)
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """Let go of it here. Never `LOCK_UN`, which would take it from the others who hold it."""
        if self.fd >= 0:
            os.close(self.fd)
            self.fd = -1

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        self.close()


def _open(run: Path, flag: str) -> int:
    try:
        run.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=run):  # a lock file of an earlier run may be writable in a folder that is not
            return os.open(run / "lock", os.O_RDWR | os.O_CREAT, 0o644)
    except OSError as error:
        why = error.strerror or str(error)
        raise BadRun(f"the run folder {run} cannot be written ({why}); name another one with {flag}") from error


def _claim(file: int, run: Path, tell: Callable[[str], object], flag: str) -> None:
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        text = f"{run} is in use by another process{_holder(file)}: wait for it, stop it, or name another {flag}"
        raise BadRun(text) from None
    except OSError as error:
        if error.errno not in _NO_LOCKS:
            raise BadRun(
                f"the run folder {run} cannot be locked ({error.strerror}); name another one with {flag}"
            ) from error
        tell(f"the filesystem of {run} has no locks ({error.strerror}): nothing keeps a second run out of this folder")
    _sign(file)


def _sign(file: int) -> None:
    mine = {
        "pid": os.getpid(),
        "host": socket.gethostname(),
        "since": datetime.now().astimezone().isoformat(" ", "seconds"),
    }
    with contextlib.suppress(OSError):  # a full disk; the lock holds without a word
        os.ftruncate(file, 0)
        os.pwrite(file, json.dumps(mine).encode() + b"\n", 0)


def _holder(file: int) -> str:
    """` (pid 4711, since 2026-01-31 21:00:07+01:00)`; nothing where the file does not say."""
    until = time.monotonic() + _SIGN_S
    while not (text := os.pread(file, 4096, 0)) and time.monotonic() < until:
        time.sleep(0.02)
    try:
        said: dict[str, Any] = json.loads(text)
        pid, host, since = int(said["pid"]), str(said["host"]), str(said["since"])
    except (ValueError, KeyError, TypeError):
        return ""
    if host != socket.gethostname():
        return f" (pid {pid} on {host}, since {since})"
    if look(pid)[0] is None:
        return f" (started by pid {pid}, which has ended, since {since}; it may still be saving)"
    return f" (pid {pid}, since {since})"
