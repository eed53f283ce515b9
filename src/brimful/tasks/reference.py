"""Log-probabilities of a reference model, computed once for all pairs and kept in a file, so that it needs no memory later.

    STORE/reference-1a2b3c4d5e6f.npy    float64, [pair, 2]: chosen and rejected, summed over the tokens of the reply
    STORE/reference-1a2b3c4d5e6f.json   what it was made from, and its checksum
    RUN/data/reference-TOKENS.json      which of these files a run uses

The name carries a hash of the weights, the tokens of the store (hence of tokenizer and chat template) and the precision. A file
of anything else has another name, and one that was damaged is computed again. Another run on the same store and model finds it.

The reference is the model as it begins. With a new adapter it is the model with the adapter switched off, which is the same;
where a saved adapter is trained further, it is the base with that adapter. A resumed run has other weights by then and reads
the file that it began with; if that is gone, it is computed again from the initial model.
"""

import hashlib
import json
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from brimful.data.store import Indices, Store
from brimful.errors import BadData, BadRun
from brimful.files import atomic_path, write_atomic
from brimful.task import Dataset
from brimful.tasks.pair_batches import FIELDS, REFERENCE
from brimful.units import show_seconds

if TYPE_CHECKING:
    from torch import nn

    from brimful.tasks.preference import Dpo
    from brimful.training.evaluate import EvalContext, TrainingContext

Values = npt.NDArray[np.float64]
WINDOW_ROWS = 4096
"""Pairs that are read, sorted and split together."""
_PLACES = 12
"""Characters of a hash in a name."""


class PairRows(Store):
    """A token store of pairs whose rows also have `reference`: two numbers, zeros until they are known."""

    def __init__(self, store: Store, *, causal: bool) -> None:
        super().__init__(store.path, store.meta)
        self.causal = causal
        self._values: Values | None = None
        self._file: Path | None = None

    @property
    def reference(self) -> Values | None:
        """Log-probabilities of chosen and rejected by the reference, [pair, 2]."""
        return self._values

    def use_reference(self, values: Values, file: Path | None = None) -> None:
        """`file` holds the same values: workers of a loader map it instead of taking a copy."""
        self._values, self._file = values, file

    def __getitem__(self, index: int) -> dict[str, Any]:
        return {**super().__getitem__(index), REFERENCE: self._of([index])[0]}

    def __getitems__(self, indices: Indices) -> list[dict[str, Any]]:
        rows = super().__getitems__(indices)
        return [{**row, REFERENCE: values} for row, values in zip(rows, self._of(indices), strict=True)]

    def shapes(self, indices: Indices) -> npt.NDArray[np.int64]:
        """As `Task.shape` gives them: prompt and longer reply, added up for a causal model."""
        lengths = super().shapes(indices)
        longer = lengths[:, 1:].max(axis=1)
        return (lengths[:, 0] + longer)[:, None] if self.causal else np.stack([lengths[:, 0], longer], axis=1)

    def __reduce__(self) -> tuple[Any, ...]:
        values = None if self._file is not None else self._values
        return _reopen, (super().__reduce__(), self.causal, values, self._file)

    def _of(self, indices: Indices) -> Sequence[Any]:
        return [(0.0, 0.0)] * len(indices) if self._values is None else self._values[np.asarray(indices)].tolist()


def _reopen(store: tuple[Any, ...], causal: bool, values: Values | None, file: Path | None) -> PairRows:
    make, arguments = store
    rows = PairRows(make(*arguments), causal=causal)
    if file is not None:
        values = np.load(file, mmap_mode="r")
    if values is not None:
        rows.use_reference(values, file)
    return rows


def shared_prompts(training: Dataset, store: str) -> tuple[int, int] | None:
    """How many rows of a store have a prompt that is also in the training rows, and how many rows it has."""
    if not isinstance(training, Store) or FIELDS[0] not in training.fields:
        return None
    rows = Store.open(store, verify=False)
    training_prompts = set(_prompts(training))
    return sum(prompt in training_prompts for prompt in _prompts(rows)), len(rows)


def _prompts(store: Store) -> Iterator[bytes]:
    for first in range(0, len(store), WINDOW_ROWS):
        for row in Store.__getitems__(store, range(first, min(len(store), first + WINDOW_ROWS))):
            yield hashlib.blake2b(row[FIELDS[0]].astype(np.int32).tobytes(), digest_size=8).digest()


def add_reference(task: "Dpo", model: "nn.Module", rows: PairRows, context: "TrainingContext") -> None:
    """Give the rows their reference: from the file of this run, from one that another run has left, or computed now."""
    from brimful.step.distributed import on_rank_zero

    record = context.folder / f"reference-{rows.fingerprint[:_PLACES]}.json"
    path = on_rank_zero(context.group, lambda: _find(task, model, rows, context, record))
    if path is not None:
        file = Path(path)
        rows.use_reference(np.load(file), file)
        context.note(f"reference log-probabilities of {len(rows):,} pairs are in {file}")
        return
    started = time.perf_counter()
    values = _computed(task, model, rows, context)
    context.note(
        f"reference log-probabilities of {len(rows):,} pairs computed in {show_seconds(time.perf_counter() - started)}"
    )
    file = Path(on_rank_zero(context.group, lambda: _write(task, model, rows, context, record, values)))
    rows.use_reference(values, file if file.is_file() else None)


def _find(task: "Dpo", model: "nn.Module", rows: PairRows, context: "TrainingContext", record: Path) -> str | None:
    """The file to use. A resumed run has one, whatever its model is by now."""
    own_record = _read_json(record) if context.resumed else None
    if own_record is not None and own_record.get("key", {}).get("tokens") == rows.fingerprint:
        file = context.folder / str(own_record.get("file"))
        if _is_intact(file, rows):
            return str(file)
        if own_record["key"].get("weights") != _key(task, model, rows, context)["weights"]:
            raise BadRun(
                f"{file.name} with the log-probabilities of the reference is gone, and so is the model that the run began with. "
                f"Try: put that model back at {task.options.reference or task.options.model}, or a new run."
            )
    key = _key(task, model, rows, context)
    for folder in (rows.path, context.folder):
        file = folder / _name(key)
        if _is_intact(file, rows):
            _write_record(record, file, key)
            return str(file)
    return None


def _key(task: "Dpo", model: "nn.Module", rows: PairRows, context: "TrainingContext") -> dict[str, Any]:
    """Everything that the values depend on."""
    from brimful.tasks.adapters import fingerprint
    from brimful.tasks.language import _resolved

    source = _resolved(task.options.reference) if task.options.reference else task.adapter or task.source
    weights = f"{task.options.model} of seed {context.seed}" if source is None else fingerprint(Path(source))
    dtypes = sorted({str(param.dtype) for param in model.parameters() if not param.requires_grad or task.lora is None})
    return {
        "weights": weights,
        "tokens": rows.fingerprint,
        "tokenizer": rows.meta.tokenizer_fingerprint,
        "precision": [str(context.autocast), *dtypes, task.load_in],
    }


def _name(key: Mapping[str, Any]) -> str:
    return f"reference-{hashlib.sha256(json.dumps(key).encode()).hexdigest()[:_PLACES]}.npy"


def _is_intact(file: Path, rows: PairRows) -> bool:
    facts = _read_json(file.with_suffix(".json"))
    if facts is None or not file.is_file():
        return False
    try:
        values = np.load(file)
    except (OSError, ValueError, EOFError):
        return False
    return values.shape == (len(rows), 2) and facts.get("sha256") == _checksum(values)


def _checksum(values: Values) -> str:
    return hashlib.sha256(np.ascontiguousarray(values).tobytes()).hexdigest()


def _read_json(path: Path) -> dict[str, Any] | None:
    try:
        content = json.loads(path.read_bytes())
    except (OSError, ValueError):
        return None
    return content if isinstance(content, dict) else None


def _write(
    task: "Dpo", model: "nn.Module", rows: PairRows, context: "TrainingContext", record: Path, values: Values
) -> str:
    """Beside the tokens, or in the run's own folder if that cannot be written to."""
    key = _key(task, model, rows, context)
    content = json.dumps({"key": key, "sha256": _checksum(values)}, indent=1)
    for folder in (rows.path, context.folder):
        file = folder / _name(key)
        try:
            folder.mkdir(parents=True, exist_ok=True)
            with atomic_path(file) as part, part.open("wb") as out:
                np.save(out, values)
            write_atomic(file.with_suffix(".json"), content)
        except OSError:
            if folder is context.folder:
                raise
            continue
        break
    _write_record(record, file, key)
    return str(file)


def _write_record(record: Path, file: Path, key: Mapping[str, Any]) -> None:
    """The path is relative to the run if the file is in it: a run may be moved."""
    record.parent.mkdir(parents=True, exist_ok=True)
    inside = file.absolute().is_relative_to(record.parent.absolute())
    place = file.absolute().relative_to(record.parent.absolute()) if inside else file.absolute()
    write_atomic(record, json.dumps({"file": str(place), "key": key}, indent=1))


def _computed(task: "Dpo", model: "nn.Module", rows: PairRows, context: "TrainingContext") -> Values:
    from brimful.memory.snapshot import RandomState

    random_state = RandomState(context.device)
    try:
        with _reference_model(task, model, rows, context) as (reference, own_context):
            values = np.array(log_probabilities(task, reference, rows, own_context), dtype=np.float64).reshape(-1, 2)
    finally:
        random_state.restore()
    broken = np.flatnonzero(~np.isfinite(values).all(axis=1))
    if len(broken):
        raise BadData(
            f"the reference gives replies of {len(broken):,} of {len(rows):,} pairs a log-probability that is not finite, first "
            f"in row {broken[0]:,} of {rows.path}. Try: precision='fp32', or another model."
        )
    return values


@contextmanager
def _reference_model(
    task: "Dpo", model: "nn.Module", rows: PairRows, context: "TrainingContext"
) -> "Iterator[tuple[nn.Module, TrainingContext]]":
    """The reference on the device. A second model is there only in here."""
    if task.options.reference is None and task.lora is not None:
        with model.disable_adapter() if task.adapter is None else _initial_adapter(task, model):  # type: ignore[operator]
            yield model, context
        return
    if task.options.reference is None and not context.resumed:
        yield model, context
        return
    from brimful.memory.oom import empty_cache

    other = _loaded(task, rows, context)
    try:
        yield other, context.of_model(other)
    finally:
        del other
        empty_cache(context.device)


@contextmanager
def _initial_adapter(task: "Dpo", model: "nn.Module") -> Iterator[None]:
    """The adapter as training began with it; after a resume it has other weights by now, which are put back."""
    import torch

    from brimful.tasks.adapters import load_weights

    assert task.adapter is not None
    own = {name: param for name, param in model.named_parameters() if "lora_" in name}
    before = {name: param.detach().clone() for name, param in own.items()}
    try:
        load_weights(model, task.adapter)
        yield
    finally:
        with torch.no_grad():
            for name, param in own.items():
                param.copy_(before[name])


def _loaded(task: "Dpo", rows: PairRows, context: "TrainingContext") -> "nn.Module":
    import torch

    torch.manual_seed(context.seed)  # for new weights
    model = task.initial_model() if task.options.reference is None else task.reference_model(rows.meta.vocab_size)
    return model.to(context.device).requires_grad_(False)


def log_probabilities(
    task: "Dpo", model: "nn.Module", rows: PairRows, context: "EvalContext", chosen: Sequence[int] | None = None
) -> list[list[float]]:
    """Of all pairs, or of the `chosen` ones in their order; in batches that fit, shared by the ranks."""
    from brimful.memory.context import to_device
    from brimful.memory.forward import eval_mode

    def run(batch: Any) -> list[list[float]]:
        with context.forward_context():
            values: list[list[float]] = task.family.log_probabilities(model, to_device(batch, context.device)).tolist()
            return values

    forward = context.forward(lambda count, shape: run(task.dummy(count, shape)), what="reference")

    numbers = range(len(rows)) if chosen is None else chosen

    def own(places: Sequence[int]) -> list[list[float]]:
        results: dict[int, list[float]] = {}
        indices = [numbers[place] for place in places]
        for start in range(0, len(indices), WINDOW_ROWS):
            window = list(indices[start : start + WINDOW_ROWS])
            read = rows.__getitems__(window)
            shapes = [tuple(map(int, shape)) for shape in rows.shapes(window)]
            for group, values in forward.run_batches(shapes, lambda some, read=read: run(task.collate([read[one] for one in some]))):  # type: ignore[misc]  # fmt: skip
                results.update(zip((window[one] for one in group), values, strict=True))
                context.progress(f"reference log-probabilities of {len(results):,} of {len(indices):,} pairs")
        return [results[index] for index in indices]

    with eval_mode(model, context.device):
        return context.share(len(numbers), own)
