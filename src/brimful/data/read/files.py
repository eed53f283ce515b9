"""From what a user typed to files with a known format: files, folders, patterns, or the name of a data set on the hub."""

import difflib
import glob
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from brimful.data.read.byte_stream import COMPRESSIONS
from brimful.errors import BadData, BadOption

Format = Literal["parquet", "jsonl", "json", "csv", "hub"]

FORMATS: dict[str, Format] = {
    ".parquet": "parquet", ".pq": "parquet", ".jsonl": "jsonl", ".ndjson": "jsonl", ".json": "json", ".csv": "csv", ".tsv": "csv",
}  # fmt: skip


CLEANED = ("train.parquet", "clean.json")
"""A folder with these is the output of `brimful data clean`."""


@dataclass(frozen=True, slots=True)
class DataFile:
    """One file of rows."""

    path: str
    format: Format
    size_bytes: int
    modified_ns: int


def find_files(paths: Sequence[str]) -> tuple[DataFile, ...]:
    """All files behind these paths, in the order given, those of a folder by name; each once."""
    if not paths:
        raise BadData("no files given; name files, folders or a data set on the hub")
    found: dict[str, DataFile] = {}
    for file in (file for path in paths for file in _behind(path)):
        real = os.path.realpath(file.path) if file.format != "hub" else file.path
        if real in found:
            raise BadData(f"{file.path} is given twice; its rows would count twice: name it once")
        found[real] = file
    return tuple(found.values())


def _behind(path: str) -> Iterator[DataFile]:
    here = Path(path)
    try:
        if here.is_dir():
            yield from _in_folder(here)
        elif here.exists():
            yield _file(path, _format(path))
        elif matches := sorted(glob.glob(path, recursive=True)):  # noqa: PTH207 - Path.glob takes no absolute pattern
            for match in matches:
                yield from _behind(match)
        elif _is_hub_name(path):
            yield DataFile(path, "hub", 0, 0)
        else:
            raise BadData(f"{path}: there is no such file or folder{_near(here)}")
    except OSError as error:
        raise BadData(f"{error.filename or path}: {error.strerror}; it must be readable for who runs this") from None


def _in_folder(folder: Path) -> Iterator[DataFile]:
    if all((folder / name).is_file() for name in CLEANED):
        raise BadData(
            f"{folder} is what `brimful data clean` made, its splits are apart on purpose: name the file you mean, such as {folder / CLEANED[0]}"
        )
    inside = sorted(_walk(folder))
    known = [path for path in inside if _known(path.name)]
    if not known:
        has = f"it has {_some([path.name for path in inside])}" if inside else "it is empty"
        raise BadData(f"{folder}: no file of rows in this folder, {has}; known are {_endings()}")
    for path in known:
        yield _file(str(path), _format(str(path)))


def _walk(folder: Path) -> Iterator[Path]:
    """All files below, but for hidden ones. A folder that cannot be read is an error, not an empty one."""
    for path in folder.iterdir():
        if path.name.startswith("."):
            continue
        if path.is_dir() and not path.is_symlink():
            yield from _walk(path)
        elif path.is_file():
            yield path


def _file(path: str, kind: Format) -> DataFile:
    with Path(path).open("rb"):  # may it be read at all?
        about = Path(path).stat()
    if about.st_size == 0:
        raise BadData(f"{path} is empty (0 bytes); leave it out, or get it again")
    return DataFile(path, kind, about.st_size, about.st_mtime_ns)


def _format(path: str) -> Format:
    found = _known(path)
    if found is None:
        raise BadData(f"{path}: unknown format; known are {_endings()}")
    return found


def _known(name: str) -> Format | None:
    path = Path(name)
    if path.suffix.lower() in COMPRESSIONS:
        found = FORMATS.get(Path(path.stem).suffix.lower())
        return None if found == "parquet" else found  # parquet compresses within
    return FORMATS.get(path.suffix.lower())


def _endings() -> str:
    return f"{', '.join(FORMATS)}, those of text also with {', '.join(COMPRESSIONS)}"


def _is_hub_name(path: str) -> bool:
    """`owner/name` or `owner/name:split`: two plain parts, and no ending of a file."""
    name = path.partition(":")[0].split("/")
    return (
        len(name) == 2
        and all(name)
        and not path.startswith((".", "/", "~"))
        and _known(name[1]) is None
        and not Path(name[0]).is_dir()
    )


def _near(path: Path) -> str:
    """What there is instead, in the nearest folder that exists."""
    folder = next(parent for parent in path.absolute().parents if parent.is_dir())
    names = sorted(one.name for one in folder.iterdir() if not one.name.startswith("."))
    close = difflib.get_close_matches(path.name, names, n=3) if folder == path.absolute().parent else []
    if close:
        return f"; did you mean {' or '.join(str(path.parent / name) for name in close)}?"
    return f"; {folder} has {_some(names)}" if names else f"; {folder} is empty"


def _some(names: Sequence[str]) -> str:
    return ", ".join(names[:5]) + " …" * (len(names) > 5)


def refuse_output_inside(output: Path, paths: Sequence[str]) -> None:
    """A store within a folder of rows would be read as rows the next time."""
    for path in paths:
        if Path(path).is_dir() and output.resolve().is_relative_to(Path(path).resolve()):
            raise BadOption(f"--output {output} lies inside {path}, whose files are read; name a folder outside of it")
