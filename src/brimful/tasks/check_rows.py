"""`brimful data check FILES --model MODEL`: rows as a model will read them. One pass, nothing written. `data tokenize FILES
--model MODEL` writes the same rows into a token store.

The rows go through the encoder of `brimful train --model MODEL`: of `sft`, for texts of `pretrain`, for preferences of `dpo`.
What it drops, truncates and trains on is counted here. Packing is tried on a sample, in steps of `STEP_ROWS` rows drawn at
random, as training draws them; pairs share their prompt when they are packed, so it is not tried for them.
"""

import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from itertools import pairwise
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import numpy.typing as npt

from brimful.data.check import Duplicates, read_progress, row_hashes
from brimful.data.read.files import RowProblem
from brimful.data.read.source import Source, check_max_bad, holds_preferences, open_source
from brimful.data.store import trained
from brimful.data.tokenize import RowNotes, TokenizeOptions, TokenizeReport, dropped_rows, named, tokenize
from brimful.errors import BadOption
from brimful.tasks.language import LanguageOptions, Pretrain, Sft, SftOptions, TrainOn
from brimful.tasks.token_stores import causal_encoder, with_template
from brimful.units import parse_bytes

EXAMPLES = 3
SAMPLED_ROWS, STEP_ROWS = 4096, 64
PACKED_TOKENS = 8192
"""The size of a packed micro-batch that is tried, or the limit of a row if that is more."""
PADDED_ROWS = 8
"""Rows of a padded micro-batch to compare with."""

Piece = tuple[str, bool | str]
"""Text, and whether its tokens are trained on; of a preference, which part it is."""


@dataclass(frozen=True, kw_only=True)
class Packing:
    """How full micro-batches are: the share of their tokens that belongs to rows."""

    tokens: int
    """Of a packed micro-batch."""
    packed: float
    sorted: float
    """Padded, with rows of similar length together."""
    unsorted: float
    """Padded, as the rows come."""


@dataclass(frozen=True, kw_only=True)
class RowsReport:
    """The result of `check_rows`."""

    files: tuple[str, ...]
    model: str
    reason: str
    """Which columns were found."""
    method: str | None
    """How replies are found in the text that the template writes; None for preferences."""
    max_tokens: tuple[int, ...]
    """One limit for a row of a causal model, else one for prompts and one for replies."""
    rows_in: int
    rows_out: int
    """Rows to train on; more than come in where each reply gives one."""
    dropped: dict[str, int]
    problems: dict[str, tuple[RowProblem, ...]]
    """By reason, the first rows with different messages."""
    notes: dict[str, RowNotes]
    """By reason, rows that are used and whose owner should know something."""
    repeated: int
    """Rows that are equal to an earlier one. They are trained on."""
    first_repeated: RowProblem | None
    tokens: int
    trained_tokens: int
    """Of a preference, those of both replies."""
    truncated: int
    """Rows; of preferences, prompts and replies."""
    lost_tokens: int
    lengths: dict[str, float]
    """The mean, percentiles and the longest, in tokens. Of a preference, of the prompt with the longer reply."""
    packing: Packing | None
    """None without rows, and for preferences."""
    examples: tuple[tuple[Piece, ...], ...]
    max_bad: float
    refused: int
    """Rows that cannot be read or that the template refuses."""
    seconds: float

    def failure(self) -> str | None:
        """The error message if more rows are refused than `max_bad` allows, or if none is left."""
        if self.rows_out and self.refused <= self.max_bad * self.rows_in:
            return None
        first = next(iter(self.problems.values()), ())
        start = f" Try: repair them, starting with {first[0]}." if first else " Try: other files."
        return f"{self.refused:,} of {self.rows_in:,} rows cannot be used, {self.rows_out:,} can.{start}"

    def to_json(self) -> dict[str, Any]:
        mark = "trained" if self.method else "part"
        examples = [[{"text": text, mark: value} for text, value in one] for one in self.examples]
        return {**asdict(self), "examples": examples, "seconds": round(self.seconds, 3)}


def check_rows(
    paths: Sequence[str],
    *,
    model: str,
    columns: str | None = None,
    chat_template: str | None = None,
    max_tokens: int | str | None = None,
    host_limit: int | str = "1GiB",
    max_bad: float = 0.01,
    progress: Callable[[str], object] = lambda phrase: None,
) -> RowsReport:
    """Encode every row as training would, and count."""
    check_max_bad(max_bad)
    started = time.monotonic()
    limit = parse_bytes(host_limit, flag="host_limit=")
    source, task, encoder = open_for_model(
        paths, model=model, columns=columns, chat_template=chat_template, max_tokens=max_tokens, host_limit_bytes=limit
    )
    pairs = source.layout.kind == "preference"
    repeated = Duplicates(host_limit_bytes=limit)
    dropped: Counter[str] = Counter()
    problems: dict[str, dict[str, RowProblem]] = {}
    notes: dict[str, RowNotes] = {}
    lengths: list[npt.NDArray[np.int32]] = []
    examples: list[tuple[Piece, ...]] = []
    rows_in = tokens = trained_tokens = truncated = lost = refused = 0
    for chunk in source.chunks():
        encoded = encoder(chunk.rows)
        repeated.add(row_hashes(chunk.rows.columns), chunk.file, chunk.lines)
        rows_in += chunk.rows_in
        refused += len(chunk.broken) + sum(drop.refused for drop in encoded.drops)
        for reason, problem in dropped_rows(chunk, encoded):
            dropped[reason] += 1
            first = problems.setdefault(reason, {})
            if len(first) < EXAMPLES:
                first.setdefault(problem.message, problem)
        for note in encoded.notes:
            known = notes.get(note.reason) or RowNotes(0, str(named(chunk, note)))
            notes[note.reason] = RowNotes(known.rows + 1, known.first)
        place = 0
        for sizes in encoded.lengths.tolist():
            edges = np.cumsum([place, *sizes])
            parts = [encoded.tokens[first:last] for first, last in pairwise(edges.tolist())]
            place = int(edges[-1])
            if pairs:
                trained_tokens += sum(sizes[1:])
                pieces = encoder.pieces(parts) if len(examples) < EXAMPLES else []
            else:
                length, runs = sizes[0], parts[1] if len(parts) > 1 else np.array([0, sizes[0]])
                trained_tokens += int(runs[1::2].sum())
                marks = trained(runs, length).tolist()
                pieces = encoder.pieces(parts[0].tolist(), marks) if len(examples) < EXAMPLES else []
            examples += [tuple(pieces)] if pieces else []
        sizes_of_rows = encoded.lengths
        lengths.append(sizes_of_rows[:, 0] + sizes_of_rows[:, 1:].max(axis=1) if pairs else sizes_of_rows[:, 0])
        tokens += int(sizes_of_rows.sum() if pairs else sizes_of_rows[:, 0].sum())
        truncated += sum(encoded.truncated)
        lost += sum(encoded.lost_tokens)
        rate = rows_in / max(time.monotonic() - started, 1e-9)
        progress(read_progress(rows_in, rate, chunk.read_bytes, source.total_bytes))
    count, places = repeated.count()
    every = np.concatenate(lengths) if lengths else np.zeros(0, np.int32)
    return RowsReport(
        files=source.files, model=model, reason=source.layout.reason, method=None if pairs else encoder.method,
        max_tokens=task.max_tokens,
        rows_in=rows_in, rows_out=len(every), dropped=dict(dropped),
        problems={reason: tuple(first.values()) for reason, first in problems.items()},
        notes=notes, repeated=count, first_repeated=RowProblem(*places[0], "came before") if places else None, tokens=tokens,
        trained_tokens=trained_tokens, truncated=truncated, lost_tokens=lost, lengths=_summary(every),
        packing=None if pairs else _packing(every, task.max_tokens[0]), examples=tuple(examples), max_bad=max_bad, refused=refused,
        seconds=time.monotonic() - started,
    )  # fmt: skip


def open_for_model(
    paths: Sequence[str], *, model: str, columns: str | None = None, host_limit_bytes: int, **options: Any
) -> tuple[Source, Pretrain, Any]:
    """Rows, the task that would train this model on them, and what turns them into tokens as in training. `options` are those
    of the task."""
    pairs = holds_preferences(paths, columns=columns, host_limit_bytes=host_limit_bytes)
    source = open_source(
        paths, columns=columns, host_limit_bytes=host_limit_bytes, messages=not pairs, preferences=pairs
    )
    options = {**options, "model": model, "columns": columns}
    if pairs:
        from brimful.tasks.preference import Dpo, DpoOptions

        task: Pretrain = Dpo(DpoOptions(**options))
    elif source.layout.kind == "text":
        task = Pretrain(LanguageOptions(**options))
    else:
        task = Sft(SftOptions(**options))
    if task.source is None:
        raise BadOption(f"model={model!r} has new weights and no tokenizer yet. Try: a model folder.")
    return source, task, _encoder(task, source, task.options.chat_template)


def _encoder(task: Pretrain, source: Source, chat_template: str | None) -> Any:
    assert task.source is not None
    if not task.reads_pairs:
        return causal_encoder(task, source, task.source, chat_template)
    from brimful.tasks.pair_data import PairEncoder

    return PairEncoder.load(task.source, causal=task.family.causal, max_tokens=task.max_tokens, template=chat_template)


def tokenize_for_model(
    paths: Sequence[str], *, model: str, output: str | Path, options: TokenizeOptions, chat_template: str | None = None,
    train_on: TrainOn | None = None, max_tokens: str | None = None, progress: Callable[[str], object] = lambda phrase: None,
) -> TokenizeReport:  # fmt: skip
    """A token store that `brimful train … --model MODEL` reads: its rows are those that it would make of these files."""
    source, task, encoder = open_for_model(
        paths, model=model, columns=options.columns, host_limit_bytes=options.host_limit_bytes, chat_template=chat_template,
        train_on=train_on, max_tokens=max_tokens,
    )  # fmt: skip
    assert task.source is not None
    with TemporaryDirectory() as folder:
        tokenizer = Path(task.source)
        if chat_template is not None:  # the store and the trained model have the template beside the tokenizer
            tokenizer = with_template(tokenizer, chat_template, Path(folder))
        return tokenize(source, tokenizer=tokenizer, output=output, options=options, encoder=encoder, progress=progress)


def _summary(lengths: npt.NDArray[np.int32]) -> dict[str, float]:
    if not len(lengths):
        return {}
    # As `data tokenize` and `data check` without a model: the smallest length that this percentage of the rows does not exceed.
    percentiles = np.percentile(lengths, (50, 90, 99), method="inverted_cdf").tolist()
    return {
        "mean": round(float(lengths.mean()), 1),
        **{f"p{share}": int(value) for share, value in zip((50, 90, 99), percentiles, strict=True)},
        "longest": int(lengths.max()),
    }


def _packing(lengths: npt.NDArray[np.int32], max_tokens: int) -> Packing | None:
    if not len(lengths):
        return None
    drawn = np.random.default_rng(0).permutation(lengths)[:SAMPLED_ROWS]
    steps = [drawn[first : first + STEP_ROWS] for first in range(0, len(drawn), STEP_ROWS)]
    size = max(PACKED_TOKENS, max_tokens)
    total = int(drawn.sum())
    return Packing(
        tokens=size,
        packed=total / sum(_packed_tokens(step, size) for step in steps),
        sorted=total / sum(_padded_tokens(np.sort(step)) for step in steps),
        unsorted=total / sum(_padded_tokens(step) for step in steps),
    )


def _packed_tokens(lengths: npt.NDArray[np.int32], size: int) -> int:
    """Tokens of the micro-batches that these rows fill, the longest rows first; the last one is as small as it can be."""
    free: list[int] = []
    for length in np.sort(lengths)[::-1].tolist():
        place = next((number for number, room in enumerate(free) if room >= length), None)
        if place is None:
            free.append(size)
            place = len(free) - 1
        free[place] -= length
    return len(free) * size - free[-1]


def _padded_tokens(lengths: npt.NDArray[np.int32]) -> int:
    parts = [lengths[first : first + PADDED_ROWS] for first in range(0, len(lengths), PADDED_ROWS)]
    return int(sum(len(part) * int(part.max()) for part in parts))
