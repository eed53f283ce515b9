"""The folder of a sweep: what it needs to go on after a kill, and what it found.

sweep.json      a fingerprint of the rows that the sweep is about: other data is another sweep
events.jsonl    what happened; each finished run is an event with its whole row, and is never trained again
state/          runs that have begun, every 20 s; gone when all are done
splits/         who was where, one parquet a dataset
left_out.csv    molecules that could not be used, and why
runs/           test scores and curves of each run; results.parquet, .md, .tex and report.html: see `results`
"""

import csv
import hashlib
import json
import shutil
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from brimful.errors import BadRun
from brimful.tasks.heads.packed.job import Job, Rows
from brimful.tasks.heads.packed.state import TENSORS, State
from brimful.tasks.heads.prepare import Prepared
from brimful.tasks.heads.results.files import COLUMNS
from brimful.train.checkpoint.durable import write_whole
from brimful.train.journal import read_events


class SweepFolder:
    """`root` is made where there is none."""

    def __init__(self, root: Path) -> None:
        self.root = root
        try:
            (root / "state").mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise BadRun(f"--output {root} cannot be written: {error.strerror or error}; name another folder") from None

    @property
    def events(self) -> Path:
        return self.root / "events.jsonl"

    def finished(self) -> dict[str, dict[str, Any]]:
        """The rows of runs that are done, by run, dataset and seed: deterministic ones share a run."""
        found = {}
        for event in read_events(self.events):
            if event["event"] == "run":
                found[event["cell"]] = {name: event.get(name) for name in COLUMNS}
        return found

    def notes(self) -> list[tuple[tuple[str, str], str]]:
        """What was remarked of each dataset, and about what, once each."""
        events = [event for event in read_events(self.events) if event["event"] == "note" and "dataset" in event]
        return list(dict.fromkeys(((one["dataset"], one.get("about", "")), one["sentence"]) for one in events))

    def claim(self, rows: Mapping[str, Rows]) -> None:
        """Refuse to mix results of other data with these."""
        path = self.root / "sweep.json"
        now = {key: fingerprint(one) for key, one in rows.items()}
        before = json.loads(path.read_text(encoding="utf-8"))["rows"] if path.exists() else {}
        if other := [key for key, value in now.items() if before.get(key, value) != value]:
            raise BadRun(
                f"{self.root} holds results of other data: the molecules, the split or the features of {other[0]} have changed; "
                "name another --output"
            )
        with _written(path):
            write_whole(path, json.dumps({"rows": {**before, **now}}, indent=1))

    def keep(self, share: int, state: State) -> None:
        """Runs that have begun."""
        path = self.root / "state" / f"{share}.safetensors"
        draft = path.with_suffix(".part")
        told = {"names": [job.name for job in state.jobs], "curves": state.curves, "losses": state.losses}
        tensors = {name: getattr(state, name).contiguous() for name in TENSORS}
        try:
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
        parts = prepared.split.parts()
        places = np.concatenate(list(parts.values()))
        names = [name.split() for name, rows in parts.items() for _ in rows]
        table = pa.table(
            {
                "row": prepared.molecules.rows[places],
                "smiles": prepared.molecules.smiles[places].tolist(),
                "side": [side for side, _ in names],
                "part": [part for _, part in names],
                "scaffold": prepared.facts.scaffold[places].tolist(),
                "heavy_atoms": prepared.facts.heavy_atoms[places],
            }
        )
        path = self.root / "splits" / f"{prepared.asked.name}.parquet"
        with _written(path):
            path.parent.mkdir(exist_ok=True)
            pq.write_table(table, path)

    def write_left_out(self, found: Iterable[Sequence[Any]]) -> None:
        """dataset, row, why; the header alone where all could be used."""
        path = self.root / "left_out.csv"
        with _written(path), path.open("w", newline="", encoding="utf-8") as file:
            writer = csv.writer(file)
            writer.writerow(("dataset", "row", "reason"))
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


def fingerprint(rows: Rows) -> str:
    """Of features, labels and who is where."""
    found = hashlib.sha256()
    found.update(rows.features.numpy().tobytes())
    for part in (rows.id, rows.ood):
        for name in ("train", "valid", "test"):
            found.update(np.ascontiguousarray(part[name]).tobytes())
    if rows.labels is not None:
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
