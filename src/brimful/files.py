"""Files that survive a crash: atomic writes, fsync, locks, hashes, JSON of our own, and how a full disk is recognised.

**Atomic writes.** A rename is atomic for readers but not durable: the content must be synced before it and the folder
after it. `atomic_path` does both, so a file has its old content or the new one, also after a power cut.

**Locks.** `FileLock` is `flock`, as in the filelock package, which does not serve here for two reasons: its descriptor is
never inherited, while a run folder must stay locked until the worker that still saves has ended, not only its parent; and
it cannot lock a folder, while outputs are written in a locked folder that is then renamed.

**JSON.** What a run writes may come back damaged, edited or made to harm. `read_json` and `parse_object` raise `ValueError`
for anything malformed, so each caller has one kind of error to turn into its message.

**Hashes.** One sha256 for each 64 MiB lets threads share a file and tells which part of it is damaged. Measured from the
page cache: 1.5 GiB/s with one thread, 3.0 with two on two cores.
"""

import errno
import hashlib
import json
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import MISSING, fields, is_dataclass
from pathlib import Path
from types import NoneType, TracebackType, UnionType
from typing import Any, Literal, Self, TypeVar, Union, cast, get_args, get_origin, get_type_hints

from brimful.units import MiB

T = TypeVar("T")
BLOCK_BYTES = 64 * MiB
_PIECE_BYTES = MiB
_NO_FOLDER_SYNC = (errno.EINVAL, errno.ENOTSUP)
_NO_LOCKS = (errno.ENOLCK, errno.ENOSYS, errno.EINVAL, errno.EOPNOTSUPP, errno.ENOTSUP)
_FULL = {
    errno.ENOSPC: "the disk is full",
    errno.EDQUOT: "the disk quota is used up",
    errno.EFBIG: "a file exceeds what the disk or `ulimit -f` allows",
}
_ERRNO_IN_TEXT = re.compile(r"\(os error (\d+)\)|\[errno (\d+)\]", re.IGNORECASE)
_DUCKDB_FULL = ("No space left", "max_temp_directory_size", "File too large", "quota exceeded")
_TORCH_FULL = ("unexpected pos", "iostream error", "failed writing file")


@contextmanager
def atomic_path(path: Path) -> Iterator[Path]:
    """A path beside `path` to write to. It replaces `path` when the block ends and is removed on an error."""
    draft = path.with_name(f".{path.name}.{os.getpid()}.part")
    try:
        yield draft
        sync(draft)
        draft.replace(path)
    except BaseException:
        draft.unlink(missing_ok=True)
        raise
    sync(path.parent)


def write_atomic(path: Path, content: str | bytes) -> None:
    """Replace a file whole, or leave it unchanged."""
    with atomic_path(path) as draft:
        draft.write_bytes(content.encode() if isinstance(content, str) else content)


def sync(path: Path) -> None:
    """Wait until a file, or the list of names in a folder, is on the disk. Some full disks show only here."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    except OSError as error:  # some network filesystems write folders at once and refuse to sync them
        if error.errno not in _NO_FOLDER_SYNC or not path.is_dir():
            raise
    finally:
        os.close(descriptor)


def sync_tree(folder: Path) -> None:
    """Sync everything below a folder, files before the folders that name them, and the folder itself last."""
    for path in sorted(folder.rglob("*"), reverse=True):
        sync(path)
    sync(folder)


class FileLock:
    """An exclusive lock on a file or a folder, held until `close` or until every process with its `fd` has ended.

    The kernel holds it, so however a process dies there is nothing to clean up. Pass `fd` to a child with `pass_fds`,
    and the child holds the lock too.
    """

    def __init__(self, path: Path, *, folder: bool = False, wait: bool = False) -> None:
        """Creates the file or folder. Raises `BlockingIOError` if another process holds it, unless `wait`."""
        self.path = path
        self.supported = True
        """False on filesystems without locks (some network mounts): nothing is locked then."""
        self.fd = -1
        try:
            while not self._acquire(folder, wait):  # the former holder has renamed or removed what we had opened
                self.close()
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """Release it in this process. `LOCK_UN` would release it in all processes that share it."""
        if self.fd >= 0:
            os.close(self.fd)
            self.fd = -1

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        self.close()

    def _acquire(self, folder: bool, wait: bool) -> bool:
        import fcntl  # not on Windows, where this module must still import

        if folder:
            self.path.mkdir(parents=True, exist_ok=True)
            self.fd = os.open(self.path, os.O_RDONLY)
        else:
            self.fd = os.open(self.path, os.O_RDWR | os.O_CREAT, 0o644)
        try:
            fcntl.flock(self.fd, fcntl.LOCK_EX if wait else fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            if error.errno not in _NO_LOCKS:
                raise
            self.supported = False
            return True
        try:
            return os.path.samestat(os.fstat(self.fd), self.path.stat())
        except FileNotFoundError:
            return False


def disk_full(error: BaseException | None) -> str | None:
    """`the disk is full`, or how else there was no room to write; None for an error of another kind.

    Looks at the causes of the error too, the first cause first. Seen on real disks: Python's OSError,
    safetensors' `(os error 28)`, Arrow's and DuckDB's texts, and torch.save's `unexpected pos`, which names no cause.
    """
    chain: list[BaseException] = []
    while error is not None and error not in chain:
        chain.append(error)
        error = error.__cause__ or error.__context__
    return next(filter(None, map(_why_full, reversed(chain))), None)


def _why_full(error: BaseException) -> str | None:
    text = str(error)
    if isinstance(error, OSError) and error.errno is not None:
        return _FULL.get(error.errno)
    if match := _ERRNO_IN_TEXT.search(text):
        return _FULL.get(int(match[1] or match[2]))
    if type(error).__module__.lstrip("_").startswith("duckdb") and any(words in text for words in _DUCKDB_FULL):
        return _FULL[errno.ENOSPC]
    return "a file was truncated, as on a full disk" if any(words in text for words in _TORCH_FULL) else None


def read_json(content: str | bytes) -> dict[str, Any]:
    """The JSON object in this text. Anything else is a `ValueError`, also what is nested too deep."""
    try:
        value = json.loads(content)
    except RecursionError:
        raise ValueError("nested too deep") from None
    if not isinstance(value, dict):
        raise ValueError("not a JSON object")
    return value


def parse_object(cls: type[T], content: Mapping[str, Any]) -> T:
    """A dataclass from the JSON of its fields; `ValueError` if one is missing, unknown or of another type.

    A field whose class has a `from_json` is made by that.
    """
    hints, own = get_type_hints(cls), {field.name: field for field in fields(cast("Any", cls))}
    required = {name for name, field in own.items() if field.default is MISSING and field.default_factory is MISSING}
    if wrong := sorted((required - content.keys()) | (content.keys() - own.keys())):
        raise ValueError(f"{cls.__name__} without its fields, or with others: {', '.join(wrong[:5])}")
    return cls(**{name: _typed(name, value, hints[name]) for name, value in content.items()})


def _typed(name: str, value: Any, hint: Any) -> Any:
    """The value as its type hint says: lists become tuples and objects become dataclasses."""
    origin, args = get_origin(hint), get_args(hint)
    if origin in (Union, UnionType):
        for member in args:
            with suppress(ValueError):
                return _typed(name, value, member)
    elif hint is Any or (origin is Literal and value in args):
        return value
    elif origin in (tuple, list) and isinstance(value, list):
        kinds = args[:1] * len(value) if origin is list or args[1:] == (...,) else args
        if len(kinds) == len(value):
            return origin(_typed(name, item, kind) for item, kind in zip(value, kinds, strict=True))
    elif origin in (dict, Mapping) and isinstance(value, dict):
        return {key: _typed(name, item, args[1]) for key, item in value.items()}
    elif isinstance(value, dict) and hasattr(hint, "from_json"):
        with suppress(KeyError, TypeError, AttributeError):
            return hint.from_json(value)
    elif isinstance(value, dict) and is_dataclass(hint):
        return parse_object(cast("type[Any]", hint), value)
    elif hint in (bool, int, float, str, NoneType) and type(value) in (hint, int if hint is float else hint):
        return value
    raise ValueError(f"{name} of another type than it was written with")


def sha256(content: str | bytes) -> str:
    """The hash of a text or bytes, as hexadecimal digits."""
    return hashlib.sha256(content.encode() if isinstance(content, str) else content).hexdigest()


def json_sha256(content: Any) -> str:
    """The hash of plain JSON values, whatever the order of their keys."""
    return sha256(json.dumps(content, sort_keys=True))


def file_sha256(path: Path) -> str:
    """The hash of a whole file."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def block_hashes(paths: Sequence[Path], *, threads: int = 1) -> list[tuple[str, ...]]:
    """The hashes of the 64 MiB blocks of each file. Reads pieces of 1 MiB, so it costs no memory."""
    counts = [-(-path.stat().st_size // BLOCK_BYTES) for path in paths]
    blocks = [(path, block) for path, count in zip(paths, counts, strict=True) for block in range(count)]
    with ThreadPoolExecutor(threads) as pool:
        hashes = pool.map(lambda block: _hash_block(*block), blocks)
        return [tuple(next(hashes) for _ in range(count)) for count in counts]


def damage(
    folder: Path, name: str, size_bytes: int, hashes: Sequence[str] | None = None, *, threads: int = 1
) -> str | None:
    """What is wrong with a file of a known size and, with `hashes`, of known contents; None if nothing is."""
    path = folder / name
    try:
        size = path.stat().st_size
        if size != size_bytes:
            return f"{name} is {'truncated' if size < size_bytes else 'too long'}: {size:,} bytes instead of {size_bytes:,}"
        seen = block_hashes([path], threads=threads)[0] if hashes is not None else ()
    except (FileNotFoundError, NotADirectoryError):
        return f"{name} is missing"
    except OSError as error:
        return f"{name} cannot be read ({error.strerror})"
    for block, (is_now, was) in enumerate(zip(seen, hashes or (), strict=True)):
        if is_now != was:
            first, last = block * BLOCK_BYTES, min((block + 1) * BLOCK_BYTES, size_bytes)
            return f"{name} is damaged between bytes {first:,} and {last:,}: its checksum differs"
    return None


def _hash_block(path: Path, block: int) -> str:
    piece = memoryview(bytearray(_PIECE_BYTES))
    digest, left = hashlib.sha256(), BLOCK_BYTES
    with path.open("rb", buffering=0) as file:
        file.seek(block * BLOCK_BYTES)
        while left and (size := file.readinto(piece[: min(left, _PIECE_BYTES)])):
            digest.update(piece[:size])
            left -= size
    return digest.hexdigest()


def cache_folder(kind: str = "plans") -> Path:
    """Below `$BRIMFUL_CACHE`, else below `brimful` in the user's cache folder."""
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(os.environ.get("BRIMFUL_CACHE") or Path(base) / "brimful") / kind
