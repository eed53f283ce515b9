"""The features of a set of molecules: from the cache, or batch by batch into it.

A batch is as large as its encoder likes where that fits `memory_limit_bytes` (1 GiB where none is given), judged by what
a molecule was measured to take; memory that runs out all the same halves the batch. The matrix itself is never in memory:
batches go to disk as they are done and are read back through a map.
"""

import difflib
import importlib
import time
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from brimful.errors import BadData, BadOption, DoesNotFit
from brimful.molecules.features.cache import Chunk, Place, key_of
from brimful.molecules.features.encoder import Encoded, Encoder, Features
from brimful.units import GiB, show_bytes, show_count, show_rate, show_seconds

if TYPE_CHECKING:
    from brimful.molecules.dataset import Molecules

# From what the user wrote to an encoder: a name, a table with a name and options, a file, or `file.py:function`.


_CLASSES = {
    "ecfp": "builtin:Ecfp",
    "descriptors": "builtin:Descriptors",
    "chemnet": "builtin:ChemNet",
    "minimol": "external:MiniMol",
    "unimol": "external:UniMol",
}
ENCODERS = tuple(_CLASSES)
FILES = (".npy", ".parquet")


def load_encoder(asked: str | Mapping[str, Any], *, folder: Path = Path(), device: str = "cpu") -> Encoder:
    """The encoder behind `asked`. Relative files are looked for in `folder`; learned ones run on `device`."""
    name, options = (asked, {}) if isinstance(asked, str) else _taken_apart(asked)
    if name in _CLASSES:
        return _built_in(name, _placed(options, folder), device)
    path, colon, function = name.rpartition(":")
    if (colon and path.endswith(".py")) or name.endswith(FILES):
        if options:
            raise BadOption(f"encoder {name}: a file of yours takes no options, and {', '.join(options)} was given")
        return _from_file(folder / (path if path.endswith(".py") else name), function if path.endswith(".py") else "")
    raise BadOption(_unknown(name, folder))


def _taken_apart(asked: Mapping[str, Any]) -> tuple[str, dict[str, Any]]:
    options = dict(asked)
    name = options.pop("name", None)
    if not isinstance(name, str):
        raise BadOption(
            f'an encoder is a name or a table with one, such as {{name = "ecfp", bits = 1024}}, not {asked!r}'
        )
    return name, options


def _placed(options: dict[str, Any], folder: Path) -> dict[str, Any]:
    """Relative paths made those of the folder; `python3.11` without a slash is a command and stays one."""
    paths = {word for word in ("python", "weights") if isinstance(options.get(word), str)}
    return {
        word: str(folder / value) if word in paths and (word == "weights" or "/" in value) else value
        for word, value in options.items()
    }


def _built_in(name: str, options: dict[str, Any], device: str) -> Encoder:
    module, class_name = _CLASSES[name].split(":")
    made = getattr(importlib.import_module(f"brimful.molecules.features.{module}"), class_name)
    kinds = {one.name: one.type for one in fields(made)}
    problems = [_problem(word, value, kinds) for word, value in options.items()]
    if told := [problem for problem in problems if problem]:
        raise BadOption(f"encoder {name}: {'; '.join(told)}")
    if "device" in kinds:
        options.setdefault("device", device)
    encoder: Encoder = made(**options)
    return encoder


def _problem(word: str, value: Any, kinds: Mapping[str, Any]) -> str | None:
    """What is wrong with one option; None where nothing is."""
    if word not in kinds:
        close = difflib.get_close_matches(word, kinds, n=1)
        there = f"its options are {', '.join(kinds)}" if kinds else "it has none"
        return f"there is no option {word!r}; {there}" + (f"; did you mean {close[0]}?" if close else "")
    wanted = kinds[word]
    right = isinstance(value, wanted) and (wanted is not int or not isinstance(value, bool))
    if right or (wanted == str | None and isinstance(value, Path)):
        return None
    sort = {int: "a whole number", bool: "true or false"}.get(wanted, "a text")
    return f"{word} is {value!r} and should be {sort}"


def _from_file(file: Path, function: str) -> Encoder:
    if not file.is_file():
        raise BadOption(f"encoder {file}: there is no such file")
    if function:
        from brimful.molecules.features.own import UserFunction

        return UserFunction(file=file, function=function)
    from brimful.molecules.features.own import Given

    return Given(file=file)


def _unknown(name: str, folder: Path) -> str:
    if name.endswith(".py"):
        return f"encoder {name}: name the function in the file, as in {name}:encode"
    if (folder / name).is_file():
        return f"encoder {name}: features are read from .npy and .parquet files, or computed by file.py:function"
    close = difflib.get_close_matches(name, ENCODERS, n=1)
    hint = f"; did you mean {close[0]}?" if close else ""
    return f"unknown encoder {name!r}: there are {', '.join(ENCODERS)}, a .npy or .parquet file of features, and file.py:function{hint}"


ROOM_BYTES = GiB
"""What a batch may take where the user names no limit."""
SAY_EVERY_S = 1.0
NAMED = 3
"""Molecules without features that are named; the others are counted."""
Say = Callable[[str], object]


def features_of(
    encoder: Encoder,
    molecules: "Molecules",
    *,
    cache: Path,
    memory_limit_bytes: int | None = None,
    say: Say = lambda phrase: None,
) -> Features:
    """One row of numbers for each molecule, in their order, computed at most once."""
    if len(molecules) == 0:
        raise BadData(f"{molecules.source} has no molecules to compute features of")
    place = Place(Path(cache), encoder.name, key_of(encoder, molecules))
    found = place.open()
    if found is None:
        with place.building(say):
            found = place.open() or _computed(encoder, molecules, place, memory_limit_bytes or ROOM_BYTES, say)
    _tell(found, molecules, say)
    return found


def _computed(encoder: Encoder, molecules: "Molecules", place: Place, room_bytes: int, say: Say) -> Features:
    work = _Work(encoder, molecules, place, room_bytes, say)
    work.run()
    if len(work.failed) == len(molecules):
        reason = next(iter(work.failed.values()))
        raise BadData(
            f"{encoder.name} has features for none of the {show_count(len(molecules), 'molecule')} of {molecules.source}: {reason}"
        )
    facts = {
        "failed": {str(position): reason for position, reason in work.failed.items()},
        "remarks": [f"{show_count(count, 'molecule')} {remark}" for remark, count in work.remarks.items()],
        "seconds": work.seconds,
    }
    dtype = np.dtype(np.float32) if work.failed else work.dtype  # uint8 has no NaN
    place.publish(work.starts, facts, (len(molecules), work.columns), dtype)
    features = place.open(cached=False)
    assert features is not None
    return features


class _Work:
    """Batch after batch, going on where an earlier run stopped."""

    def __init__(self, encoder: Encoder, molecules: "Molecules", place: Place, room_bytes: int, say: Say) -> None:
        self.encoder, self.molecules, self.place, self.say = encoder, molecules, place, say
        self.batch = max(1, min(encoder.batch, room_bytes // encoder.molecule_bytes))
        self.starts: list[int] = []
        self.failed: dict[int, str] = {}
        self.remarks: Counter[str] = Counter()
        self.columns, self.dtype = 0, np.dtype(np.float32)
        self.seconds = 0.0
        self._began_s, self._said_s, self._resumed = time.monotonic(), time.monotonic(), 0

    def run(self) -> None:
        done = 0
        self.say(f"{self.encoder.name}: computing features of {show_count(len(self.molecules), 'molecule')}")
        while done < len(self.molecules):
            chunk = self.place.chunk_at(done)
            if chunk is None:
                chunk = self._chunk(done)
                self.place.keep(chunk)
            else:
                self._resumed += chunk.stop - chunk.start
            self._note(chunk)
            done = chunk.stop
            self._progress(done)

    def _chunk(self, start: int) -> Chunk:
        began_s = time.monotonic()
        encoded: Encoded | None = None
        while encoded is None:
            some = self.molecules.take(np.arange(start, min(start + self.batch, len(self.molecules))))
            encoded = self._attempt(some)
        checked = _checked(self.encoder, some, encoded, start, len(self.molecules))
        return Chunk(start=start, encoded=checked, seconds=time.monotonic() - began_s)

    def _attempt(self, some: "Molecules") -> Encoded | None:
        """None where memory ran out and a smaller batch may do."""
        try:
            return self.encoder.encode(some)
        except Exception as error:
            from brimful.memory.oom import is_oom

            if not is_oom(error):
                raise
            if len(some) == 1:
                text = f"{self.encoder.name} ran out of memory on one molecule of {some.source}, row {some.rows[0]}: {some.smiles[0]}"
                raise DoesNotFit(text, needed_bytes=self.encoder.molecule_bytes) from error
        self.batch = len(some) // 2
        self.say(f"{self.encoder.name}: out of memory, going on with batches of {self.batch}")
        return None

    def _note(self, chunk: Chunk) -> None:
        encoded = chunk.encoded
        if len(encoded.failed) < len(encoded.matrix):
            if self.columns not in (0, encoded.matrix.shape[1]):
                raise BadData(
                    f"{self.encoder.name} gave {self.columns} features for the first molecules and {encoded.matrix.shape[1]} from molecule {chunk.start} on; a matrix has one width"
                )
            wider = self.columns and encoded.matrix.dtype != self.dtype
            self.columns, self.dtype = encoded.matrix.shape[1], np.dtype(np.float32) if wider else encoded.matrix.dtype
        self.starts.append(chunk.start)
        self.failed |= {chunk.start + position: reason for position, reason in sorted(encoded.failed.items())}
        self.remarks.update(encoded.remarks)
        self.seconds += chunk.seconds

    def _progress(self, done: int) -> None:
        """`chemnet: 1,200 of 7,200 molecules, 310/s, 20 s left`: the rate is measured, the rest predicted from it."""
        now_s, total = time.monotonic(), len(self.molecules)
        if done >= total or now_s - self._said_s < SAY_EVERY_S or done == self._resumed:
            return
        self._said_s = now_s
        rate = (done - self._resumed) / (now_s - self._began_s)
        left = show_seconds((total - done) / rate)
        self.say(f"{self.encoder.name}: {done:,} of {total:,} molecules, {show_rate(rate)}/s, {left} left")


def _checked(encoder: Encoder, some: "Molecules", encoded: Encoded, start: int, total: int) -> Encoded:
    """What goes to disk: one row for each molecule, finite wherever it counts."""
    matrix = encoded.matrix
    if matrix.ndim != 2 or len(matrix) != len(some):
        raise BadData(
            f"{encoder.name} gave an array of shape {matrix.shape} for {show_count(len(some), 'molecule')}; it should be molecules × features"
        )
    finite = np.atleast_1d(np.isfinite(matrix).all(axis=1))
    finite[list(encoded.failed)] = True
    if not finite.all():
        raise BadData(_not_finite(encoder, some, np.flatnonzero(~finite), start + len(some), total))
    return encoded


def _not_finite(encoder: Encoder, some: "Molecules", broken: Any, seen: int, total: int) -> str:
    named = ", ".join(f"{some.rows[position]} ({some.smiles[position]})" for position in broken[:NAMED])
    more = f" and {len(broken) - NAMED:,} more" if len(broken) > NAMED else ""
    among = f"of {total:,} molecules" if seen == total else f"of the first {seen:,} of {total:,} molecules"
    also = " and from the features alike" if encoder.reads_rows else ""
    return (
        f"{encoder.name} is NaN or infinite in row{'s' * (len(broken) > 1)} {named}{more} of {some.source} (counted from 0), "
        f"{len(broken):,} {among}; fill them, or remove those rows from that file{also}"
    )


def _tell(features: Features, molecules: "Molecules", say: Say) -> None:
    """What the features are, and every molecule that has none."""
    rows, columns = features.matrix.shape
    size = show_bytes(features.matrix.nbytes)
    took = "from the cache" if features.cached else f"in {show_seconds(features.seconds)}"
    say(f"{features.encoder}: {show_count(rows, 'molecule')} × {columns:,} features ({size}) {took}")
    for remark in features.remarks:
        say(f"{features.encoder}: {remark}")
    if features.failed:
        say(f"{features.encoder}: {_left_out(features.failed, molecules)}")


def _left_out(failed: Any, molecules: "Molecules") -> str:
    named = [
        f"row {molecules.rows[position]} ({molecules.smiles[position]}): {reason}"
        for position, reason in list(failed.items())[:NAMED]
    ]
    more = f"; and {len(failed) - NAMED:,} more" if len(failed) > NAMED else ""
    return f"{show_count(len(failed), 'molecule')} without features left out: {'; '.join(named)}{more}"
