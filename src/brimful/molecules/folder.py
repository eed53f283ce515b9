"""The folder of a sweep: what it needs to go on after a kill, and what it found.

sweep.json      fingerprints of splits, labels and features that the sweep is about: other data is another sweep
events.jsonl    what happened; each finished run is an event with its whole row, and is never trained again
state/          runs that have begun, every 20 s; gone when all are done
splits/         who was where, one parquet a dataset
left_out.csv    molecules that could not be used, and why
runs/           test scores and curves of each run; results.parquet, .md, .tex and report.html: see `results`
"""

import csv
import hashlib
import json
import re
import shutil
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from brimful.errors import BadRun
from brimful.files import write_atomic
from brimful.molecules.job import Job, Rows
from brimful.molecules.pack import TENSORS, State
from brimful.molecules.prepare import Prepared
from brimful.molecules.results import COLUMNS
from brimful.training.events import read_events
from brimful.training.run import RunLock


class SweepFolder:
    """`root` is made by the first who holds it."""

    def __init__(self, root: Path) -> None:
        self.root = root

    @contextmanager
    def held(self) -> Iterator[None]:
        """Kept from others. Folders made for a spec that is then refused go again."""
        made = [one for one in (self.root, *self.root.parents) if not one.exists()]
        with RunLock(self.root, flag="--output"):
            try:
                yield
            except BaseException:
                if made and not self.claims.exists():
                    with suppress(OSError):
                        self.events.unlink(missing_ok=True)
                        (self.root / "lock").unlink()
                        for one in made:
                            one.rmdir()
                raise

    @property
    def claims(self) -> Path:
        return self.root / "sweep.json"

    @property
    def events(self) -> Path:
        return self.root / "events.jsonl"

    def finished(self) -> dict[str, dict[str, Any]]:
        """The rows of runs that are done, by `Cell.keys`; trivial baselines by a key of their own."""
        found = {}
        for event in read_events(self.events):
            if event["event"] == "run":
                found[_key(event)] = {name: event.get(name) for name in COLUMNS}
        return found

    def notes(self) -> list[tuple[tuple[str, str], str]]:
        """What was remarked of each dataset, and about what, once each."""
        events = [event for event in read_events(self.events) if event["event"] == "note" and "dataset" in event]
        return list(dict.fromkeys(((one["dataset"], one.get("about", "")), one["sentence"]) for one in events))

    def claim(self, rows: Mapping[str, Rows], prepared: Mapping[str, Prepared]) -> None:
        """Refuse to mix results of other data with these. A label where there was none changes nothing."""
        before = self._claimed()
        now = {
            "splits": {name: _of_split(_who_is_where(one)) for name, one in prepared.items()},
            "labels": {name: found for name, one in prepared.items() if (found := _of_labels(one))},
            "rows": {key: fingerprint(one) for key, one in rows.items()},
        }
        for name, split in now["splits"].items():
            if (before["splits"].get(name) or self._split_before(name) or split) != split:
                raise self._other(f"the molecules, the split or the features of {name} have")
        for name, labels in now["labels"].items():
            if before["labels"].get(name, labels) != labels:
                raise self._other(f"the label of {name} ({', '.join(prepared[name].asked.label)}) has")
        for key, features in now["rows"].items():  # older folders have the label in it
            if before["rows"].get(key, features) not in (features, fingerprint(rows[key], labelled=True)):
                raise self._other(f"the molecules, the split, the features or the label of {key} have")
        with _written(self.claims):
            write_atomic(self.claims, json.dumps({kind: {**before[kind], **now[kind]} for kind in now}, indent=1))

    def _other(self, what: str) -> BadRun:
        return BadRun(f"{self.root} holds results of other data: {what} changed; name another --output")

    def _claimed(self) -> dict[str, dict[str, str]]:
        """What the results here are of; an older folder has nothing but `rows`."""
        try:
            told = json.loads(self.claims.read_bytes()) if self.claims.exists() else {}
            return {kind: dict(told.get(kind, {})) for kind in ("splits", "labels", "rows")}
        except (OSError, ValueError, TypeError, AttributeError):
            raise BadRun(
                f"{self.claims} cannot be read, so nobody knows which data the results beside it are of: "
                "name another --output, or remove the file if molecules and features are still the same"
            ) from None

    def _split_before(self, name: str) -> str | None:
        """Of an older folder, by its list of who was where; None where there is none."""
        try:
            return _of_split(pq.read_table(self.root / "splits" / f"{name}.parquet"))
        except (OSError, KeyError, pa.ArrowException):
            return None

    def keep(self, share: int, state: State) -> None:
        """Runs that have begun."""
        path = self.root / "state" / f"{share}.safetensors"
        draft = path.with_suffix(".part")
        told = {"names": [job.name for job in state.jobs], "curves": state.curves, "losses": state.losses}
        tensors = {name: getattr(state, name).contiguous() for name in TENSORS}
        try:
            path.parent.mkdir(exist_ok=True)
            save_file(tensors, draft, metadata={"runs": json.dumps(told)})
            draft.replace(path)
        except (OSError, SafetensorError) as error:  # a full disk: the next one may go through, and the sweep goes on
            draft.unlink(missing_ok=True)
            raise BadRun(
                f"{path} cannot be written ({error}); make room, or the sweep cannot go on after a kill"
            ) from None

    def begun(self, jobs: Mapping[str, Job]) -> list[State]:
        """Those of the jobs that had begun. A file that cannot be read costs the work in it, not the sweep."""
        found = []
        for path in sorted((self.root / "state").glob("*.safetensors")):
            try:
                state = _read(path, jobs)
            except (SafetensorError, OSError, KeyError, ValueError):
                continue
            found += [state] if state is not None else []
        return _furthest(found)

    def done(self) -> None:
        """Nothing is left to go on with."""
        shutil.rmtree(self.root / "state", ignore_errors=True)

    def write_split(self, prepared: Prepared) -> None:
        """Who was where."""
        path = self.root / "splits" / f"{prepared.asked.name}.parquet"
        with _written(path):
            path.parent.mkdir(exist_ok=True)
            pq.write_table(_who_is_where(prepared), path)

    def write_left_out(self, found: Iterable[Sequence[Any]]) -> None:
        """dataset, row, SMILES, why; the header alone where all could be used."""
        path = self.root / "left_out.csv"
        with _written(path), path.open("w", newline="", encoding="utf-8") as file:
            writer = csv.writer(file)
            writer.writerow(("dataset", "row", "smiles", "reason"))
            writer.writerows(dict.fromkeys(map(tuple, found)))


@contextmanager
def _written(path: Path) -> Iterator[None]:
    """A disk that is full, or read-only, is one sentence."""
    try:
        yield
    except (OSError, pa.ArrowException) as error:
        why = getattr(error, "strerror", None) or str(error).splitlines()[0]
        raise BadRun(f"{path} cannot be written: {why}; make room, or give another --output") from None


def _furthest(states: Sequence[State]) -> list[State]:
    """Each run once, where it was furthest: with another number of processes a file is left over from before."""
    where: dict[str, tuple[int, int, int]] = {}
    for number, state in enumerate(states):
        for place, (job, step) in enumerate(zip(state.jobs, state.step.tolist(), strict=True)):
            where[job.name] = max(where.get(job.name, (-1, 0, 0)), (step, number, place))
    kept = [[place for _, of, place in where.values() if of == number] for number in range(len(states))]
    return [state.take(places) for state, places in zip(states, kept, strict=True) if places]


def _key(event: Mapping[str, Any]) -> str:
    """In older folders a cell began with the run's name, which changed with the grid."""
    asked = re.search(r"[0-9a-f]{10}/\d+$", event["cell"])
    return f"{event['dataset']}/{event['encoder']}/{event['method']}/{asked[0]}" if asked else event["cell"]


def _who_is_where(prepared: Prepared) -> pa.Table:
    parts = prepared.split.parts()
    places = np.concatenate(list(parts.values()))
    names = [name.split() for name, rows in parts.items() for _ in rows]
    return pa.table(
        {
            "row": prepared.molecules.rows[places],
            "smiles": prepared.molecules.smiles[places].tolist(),
            "side": [side for side, _ in names],
            "part": [part for _, part in names],
            "scaffold": prepared.facts.scaffold[places].tolist(),
            "heavy_atoms": prepared.facts.heavy_atoms[places],
        }
    )


def _of_split(table: pa.Table) -> str:
    """Of the molecules in use and who is where."""
    columns = [table[name].to_pylist() for name in ("side", "part", "smiles")]
    return hashlib.sha256("\n".join(map(" ".join, zip(*columns, strict=True))).encode()).hexdigest()[:16]


def _of_labels(prepared: Prepared) -> str | None:
    """Of the molecules in use; None where there are none."""
    if prepared.labels is None:
        return None
    return hashlib.sha256(prepared.labels[prepared.split.used()].tobytes()).hexdigest()[:16]


def fingerprint(rows: Rows, *, labelled: bool = False) -> str:
    """Of features and who is where; of labels too where asked."""
    found = hashlib.sha256()
    found.update(rows.features.numpy().tobytes())
    for part in (rows.id, rows.ood):
        for name in ("train", "valid", "test"):
            found.update(np.ascontiguousarray(part[name]).tobytes())
    if labelled and rows.labels is not None:
        found.update(rows.labels.numpy().tobytes())
    return found.hexdigest()[:16]


def _read(path: Path, jobs: Mapping[str, Job]) -> State | None:
    """The rows of these jobs; None where there are none."""
    with safe_open(path, framework="pt") as file:
        told = json.loads(file.metadata()["runs"])
        tensors = {name: file.get_tensor(name) for name in TENSORS}
    places = [place for place, name in enumerate(told["names"]) if name in jobs]
    if not places:
        return None
    found: dict[str, Any] = {name: one[torch.tensor(places)] for name, one in tensors.items()}
    found |= {name: tuple(told[name][place] for place in places) for name in ("curves", "losses")}
    return State(jobs=tuple(jobs[told["names"][place]] for place in places), **found)
