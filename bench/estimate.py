"""How good is `brimful estimate`? Predicted against measured memory, for models of several kinds.

    python bench/estimate.py                            one CUDA GPU: every case of estimate_cases.py, three sizes each
    python bench/estimate.py --only llama --limit 24GiB
    python bench/estimate.py --trace-only               no GPU: what is predicted, and how long that takes

A case is traced on fake tensors exactly as `brimful estimate` does it, on the machine that measures. When all are traced, each is
measured as the prediction means it: a new model on an emptied card, two optimizer steps through the same `StepContext`, the first of one micro-batch
and the second of two (`--micro-batches 1`: of one), `max_memory_allocated` and `max_memory_reserved`, once with expandable segments and
once without. Workspaces of cuBLAS are given back before each measurement, so they are allocated within it, as predicted. Nothing of
a prediction is fitted to the card.

Calls side by side on one card share it (`--part`, `--room`): each waits until what it is about to measure fits beside the others.
A call that was cut off, or was over after `--seconds`, is gone on with by one that has the same `--resume`.

The size that an estimate would recommend for the card, or for `--limit`, runs two steps under that limit: it fits, or the
estimate was wrong in the direction that matters.

Beside it: `accelerate estimate-memory`, which knows the weights and the precision and neither batch nor optimizer, by its own
functions on the same model; and torch's `MemTracker` (`--peers`), which runs the step of the smallest size and counts its tensors.

Errors are relative to what was measured. The summary has their median and 95th percentile over all cases and sizes.
"""

import argparse
import fcntl
import gc
import json
import platform
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path
from typing import Any

import numpy as np
import torch

import brimful
from brimful.errors import UserError
from brimful.estimation.cards import find_card
from brimful.estimation.fake_cuda import load_shim
from brimful.estimation.step_memory import StepMemory
from brimful.estimation.trace import TracedSetting
from brimful.files import file_sha256, sha256, write_atomic
from brimful.memory.context import StepContext
from brimful.memory.layout import LAYOUTS
from brimful.memory.oom import OutOfMemory, attempt
from brimful.planning.levers import EVERY, checkpointing
from brimful.planning.planner import describe
from brimful.task import Task
from brimful.units import parse_bytes, show_bytes
from estimate_cases import Case, cases

AUTOCAST = {"fp32": None, "bf16": torch.bfloat16}
MANY = 10**9
"""Rows of a step that is never a single micro-batch."""
MOST_ROWS = 32768
"""No larger size is recommended here: the step would only take longer."""
CONTEXT_BYTES = 2**30
"""What a process takes on the card beside torch's own memory."""
OUT_OF_MEMORY = "out of memory"
TRACING_SHARE = 0.5
"""Of the time of a call that measures: what is traced and not measured shows nothing."""
MOST_WAIT_S = 60.0
"""How long a measurement waits for others than these calls to leave the card; then it is tried all the same."""


@dataclass(kw_only=True)
class Row:
    """One case at one size. None is unknown."""

    case: str
    rows: int
    expandable: bool
    predicted_allocated: int
    predicted_reserved: int
    allocated: int | None = None
    reserved: int | None = None
    problem: str = ""

    @property
    def allocated_error(self) -> float | None:
        return None if self.allocated is None else self.predicted_allocated / self.allocated - 1

    @property
    def reserved_error(self) -> float | None:
        return None if self.reserved is None else self.predicted_reserved / self.reserved - 1


@dataclass(kw_only=True)
class Result:
    """One case."""

    case: str
    problem: str = ""
    """Why it was not traced."""
    trace_s: float = 0.0
    predict_s: float = 0.0
    """Of one size that was not traced, both segment modes."""
    attention: str = ""
    optimizer: str = ""
    interpolated: bool = False
    assumptions: list[str] = field(default_factory=list)
    accelerate_bytes: int | None = None
    """Of `accelerate estimate-memory`, for any size."""
    memtracker_bytes: int | None = None
    """Of MemTracker, for the smallest size."""
    memtracker_s: float | None = None
    recommended: int | None = None
    """Rows, for the card or the limit."""
    recommended_fits: bool | None = None
    rows: list[Row] = field(default_factory=list)
    done: bool = False
    """Whether all that can be measured was."""


class Bench:
    """Traces and measures cases, on one device."""

    def __init__(self, args: argparse.Namespace) -> None:
        self.measures = not args.trace_only
        self.device = torch.device("cuda", 0)
        self.lengths, self.peers, self.accumulates = args.lengths, args.peers, args.micro_batches == 2
        self.room = None if args.room is None else Room(args.room)
        self.attempts = 1 if self.room is None else 2  # others may have taken what was free a moment ago
        self.card = find_card(None) if self.measures else find_card("H200")
        self.limit = parse_bytes(args.limit, flag="limit") if args.limit else self.card.limit_bytes

    def predict(self, case: Case) -> Result:
        result = Result(case=case.name)
        if case.missing:
            result.problem = f"needs {' and '.join(case.missing)}"
            return result
        try:
            memory = self.trace(case, result)
        except UserError as error:
            result.problem = str(error)
            return result
        result.accelerate_bytes = accelerate_estimate(case)
        result.recommended = self.recommended(memory, case)
        return result

    def measure_all(self, case: Case, result: Result) -> None:
        """All sizes of a case that was predicted, and the one that is recommended."""
        for row in result.rows:
            for _ in range(self.attempts):
                with self.space(row.predicted_reserved):
                    self.measure(case, row)
                if row.problem != OUT_OF_MEMORY:
                    break
        for _ in range(self.attempts if result.recommended else 0):
            with self.space(self.limit):
                result.recommended_fits = self.runs(case, result.recommended)
            if result.recommended_fits:
                break
        if self.peers and result.rows:
            self.track(case, result)
        result.done = True

    @contextmanager
    def space(self, wanted: int) -> Iterator[None]:
        """Reserve this many bytes of the card among the benches that share it. Waits until others release theirs, but not for ever."""
        if self.room is None:
            yield
            return
        self.empty(expandable=True)
        with self.room.take(wanted + CONTEXT_BYTES):
            until = time.monotonic() + MOST_WAIT_S
            while torch.cuda.mem_get_info(self.device)[0] < wanted + CONTEXT_BYTES and time.monotonic() < until:
                time.sleep(0.2)
            yield

    def trace(self, case: Case, result: Result) -> StepMemory:
        start = time.perf_counter()
        memory = StepMemory(
            case.task(), case_setting(case, self.card.has_flash), case.shape, lengths=self.lengths,
            step_rows=MANY if self.accumulates else 1, progress=lambda phrase: None,
        )  # fmt: skip
        result.trace_s, start = time.perf_counter() - start, time.perf_counter()
        for rows in case.rows:
            for expandable in (True, False):
                peaks = memory.peaks(
                    rows, case.shape, cublas_bytes=self.card.cublas_bytes, processors=self.card.processors, expandable=expandable
                )  # fmt: skip
                predicted = {"predicted_allocated": peaks.allocated_bytes, "predicted_reserved": peaks.reserved_bytes}
                result.rows.append(Row(case=case.name, rows=rows, expandable=expandable, **predicted))
        result.predict_s = (time.perf_counter() - start) / len(case.rows)
        notes = memory.notes
        result.attention = ", ".join(sorted(notes.attention)) or "none"
        result.optimizer, result.interpolated = notes.optimizer, memory.interpolates
        result.assumptions = list(notes.assumptions)
        return memory

    def recommended(self, memory: StepMemory, case: Case) -> int:
        """As an estimate with the default `fill` of 0.85 does."""
        memory.step_rows, kept = min(MOST_ROWS, MANY), memory.step_rows
        try:
            budget = 0.85 * self.limit
            return memory.largest(
                case.shape, budget, lambda peaks: peaks.reserved_bytes <= budget, cublas_bytes=self.card.cublas_bytes,
                processors=self.card.processors,
            )  # fmt: skip
        finally:
            memory.step_rows = kept

    def measure(self, case: Case, row: Row) -> None:
        self.empty(expandable=row.expandable)
        done = self.attempt(lambda: self.step(case, row.rows))
        row.problem = done or ""
        if done is None:
            row.allocated = torch.cuda.max_memory_allocated(self.device)
            row.reserved = torch.cuda.max_memory_reserved(self.device)

    def runs(self, case: Case, rows: int) -> bool:
        """Whether steps of this many rows run within the limit."""
        self.empty(expandable=True)
        torch.cuda.set_per_process_memory_fraction(min(1.0, self.limit / self.card.total_bytes), self.device)
        try:
            return self.attempt(lambda: self.step(case, rows)) is None
        finally:
            torch.cuda.set_per_process_memory_fraction(1.0, self.device)

    def attempt(self, work: Callable[[], None]) -> str | None:
        """None if it worked, else why not."""
        try:
            done = attempt(work, self.device)
        except Exception as error:
            return f"{type(error).__name__}: {(str(error).splitlines() or [''])[0][:160]}"
        return OUT_OF_MEMORY if isinstance(done, OutOfMemory) else None

    def step(self, case: Case, rows: int) -> None:
        """Two optimizer steps of a new model, as they are traced."""
        context, task = build(case, self.device)
        batches = [context.layout.dummy(task, rows, case.shape) for _ in range(3 if self.accumulates else 2)]
        with checkpointing(task, context.model).set(EVERY[case.checkpointing]):
            context.step(batches[:1], rows)
            context.step(batches[1:], rows * len(batches[1:]))
        torch.cuda.synchronize(self.device)

    def track(self, case: Case, result: Result) -> None:
        """torch's own tracker around the same two steps of the smallest size."""
        from torch.distributed._tools.mem_tracker import MemTracker

        def tracked() -> None:
            context, task = build(case, self.device)
            batches = [context.layout.dummy(task, case.rows[0], case.shape) for _ in range(2)]
            tracker = MemTracker()
            tracker.track_external(context.model, context.optimizer)
            with tracker:
                for batch in batches:
                    context.step([batch], case.rows[0])
            peak = tracker.get_tracker_snapshot("peak")
            result.memtracker_bytes = max(int(kinds["Total"]) for kinds in peak.values())

        self.empty(expandable=True)
        start = time.perf_counter()
        if self.attempt(tracked) is None:
            result.memtracker_s = time.perf_counter() - start

    def empty(self, *, expandable: bool) -> None:
        """As little on the card as there can be, in segments of the right kind."""
        gc.collect()
        torch.cuda.synchronize(self.device)
        with suppress(AttributeError):
            torch._C._cuda_clearCublasWorkspaces()
        torch.cuda.empty_cache()
        torch._C._accelerator_setAllocatorSettings(f"expandable_segments:{expandable}")
        torch.cuda.reset_peak_memory_stats(self.device)


class Room:
    """What several calls may use of a card together. Its file begins with these bytes, and says what is left of them."""

    def __init__(self, file: Path) -> None:
        self.file, self.bytes = file, int(file.read_text().split()[0])

    @contextmanager
    def take(self, wanted: int) -> Iterator[None]:
        wanted = min(wanted, self.bytes)
        while not self._change(-wanted):
            time.sleep(0.2)
        try:
            yield
        finally:
            self._change(wanted)

    def _change(self, count: int) -> bool:
        with self.file.open("r+") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            left = int(file.read().split()[-1]) + count
            if left >= 0:
                file.seek(0)
                file.truncate()
                file.write(f"{self.bytes} {left}")
            return left >= 0


def case_setting(case: Case, has_flash: bool) -> TracedSetting:
    device = torch.device("cpu") if isinstance(load_shim(), str) else torch.device("cuda", 0)
    return TracedSetting(
        device=device, has_flash=has_flash, autocast=AUTOCAST[case.precision], checkpointing=case.checkpointing,
        layout=case.layout,
    )  # fmt: skip


def build(case: Case, device: torch.device) -> tuple[StepContext, Task]:
    """A new model and its optimizer on the device. cuDNN's attention is off where rows have lengths, as in a plan."""
    task = case.task()
    torch.manual_seed(0)
    with torch.device(device):
        model = task.model()
    model = model.to(device).train()
    optimizer = task.optimizer(model)
    context = StepContext(
        task=task, model=model, optimizer=optimizer, device=device, autocast=AUTOCAST[case.precision],
        layout=LAYOUTS[case.layout], cudnn_attention=not case.shape,
    )  # fmt: skip
    return context, task


def accelerate_estimate(case: Case) -> int | None:
    """What `accelerate estimate-memory` says of this model under `Training using Adam`."""
    try:
        from accelerate.commands.estimate import estimate_training_usage
        from accelerate.utils import calculate_maximum_sizes

        total, _ = calculate_maximum_sizes(describe(case.task()))
        return int(
            max(estimate_training_usage(total, {"fp32": "float32", "bf16": "bfloat16"}[case.precision]).values())
        )
    except Exception as error:  # a peer that does not run has no figure
        _progress(f"  accelerate: {type(error).__name__}: {error}")
        return None


HEAD = ("case", "rows", "segments", "predicted", "measured", "error", "predicted res.", "reserved", "error")
TRACE_HEAD = (
    "case",
    "trace s",
    "size s",
    "attention",
    "rows",
    "allocated",
    "reserved",
    "native",
    "accelerate",
    "recommended",
)


def show_measured(results: Iterable[Result]) -> str:
    return _table([HEAD, *(_measured_cells(row) for result in results for row in result.rows)])


def _measured_cells(row: Row) -> tuple[str, ...]:
    return (
        row.case,
        str(row.rows),
        "expandable" if row.expandable else "native",
        show_bytes(row.predicted_allocated),
        _show(row.allocated) or row.problem,
        _percent(row.allocated_error),
        show_bytes(row.predicted_reserved),
        _show(row.reserved),
        _percent(row.reserved_error),
    )


def show_predicted(results: Iterable[Result]) -> str:
    """One line a size; what is the same for all sizes of a case stands in its first."""
    lines: list[tuple[str, ...]] = [TRACE_HEAD]
    for result in results:
        first = (result.case, f"{result.trace_s:.1f}", f"{result.predict_s:.2f}", result.attention)
        last = (_show(result.accelerate_bytes) or "–", str(result.recommended))
        for expandable, native in zip(result.rows[::2], result.rows[1::2], strict=True):
            sizes = (expandable.predicted_allocated, expandable.predicted_reserved, native.predicted_reserved)
            lines.append((*first, str(expandable.rows), *map(show_bytes, sizes), *last))
            first, last = ("",) * 4, ("",) * 2  # type: ignore[assignment]
    return _table(lines)


def show_summary(results: list[Result], limit: int) -> str:
    rows = [row for result in results for row in result.rows]
    lines = []
    for name, errors in (
        ("allocated", [row.allocated_error for row in rows if row.allocated_error is not None]),
        (
            "reserved, expandable",
            [row.reserved_error for row in rows if row.reserved_error is not None and row.expandable],
        ),
        (
            "reserved, native",
            [row.reserved_error for row in rows if row.reserved_error is not None and not row.expandable],
        ),
    ):
        if errors:
            sizes = np.abs(errors)
            lines.append(
                f"{name}: median error {np.median(sizes):.1%}, 95th percentile {np.percentile(sizes, 95):.1%}, "
                f"from {min(errors):+.1%} to {max(errors):+.1%} in {len(errors)} measurements"
            )
    peers = [
        (one.accelerate_bytes, one.rows)
        for one in results
        if one.accelerate_bytes and one.rows and one.rows[-1].allocated
    ]
    if peers:
        errors = [size / rows[-1].allocated - 1 for size, rows in peers if rows[-1].allocated]
        lines.append(f"accelerate estimate-memory, at the largest size: median error {np.median(np.abs(errors)):.1%}")
    tracked = [
        (one.memtracker_bytes, one.rows[0].allocated, one.memtracker_s)
        for one in results
        if one.memtracker_bytes and one.rows and one.rows[0].allocated
    ]
    if tracked:
        errors = [size / measured - 1 for size, measured, _ in tracked]
        seconds = [s for _, _, s in tracked if s is not None]
        lines.append(
            f"MemTracker, at the smallest size: median error {np.median(np.abs(errors)):.1%}, median {np.median(seconds):.1f} s"
        )
    tried = [one for one in results if one.recommended_fits is not None]
    failed = [f"{one.case} ({one.recommended} rows)" for one in tried if not one.recommended_fits]
    if tried:
        lines.append(
            f"recommended sizes for {show_bytes(limit)}: {len(tried) - len(failed)} of {len(tried)} ran"
            + (f"; not {', '.join(failed)}" if failed else "")
        )
    for one in results:
        if one.problem:
            lines.append(f"{one.case}: {one.problem}")
        lines += [f"{one.case}: {sentence}" for sentence in one.assumptions]
    return "\n".join(lines)


def show_files(files: list[Path]) -> str:
    """What several calls wrote with `--json`."""
    parts = [json.loads(file.read_text()) for file in files]
    results = [one for part in parts for one in read_results(part)]
    return f"{show_measured(results)}\n\n{show_summary(results, parts[0]['limit_bytes'])}"


def read_results(content: dict[str, Any]) -> list[Result]:
    """Of what `--json` wrote."""
    return [Result(**{**one, "rows": [Row(**row) for row in one["rows"]]}) for one in content["results"]]


def _resumed(file: Path, about: dict[str, Any]) -> list[Result]:
    """What an earlier call has, if the same code ran on the same card."""
    if not file.is_file():
        return []
    content = json.loads(file.read_text())
    if any(content.get(name) != about[name] for name in about if name != "date"):
        return []
    return read_results(content)


def _source() -> str:
    """Of all code that predicts and measures."""
    root = Path(__file__).parents[1]
    files = [*root.glob("src/brimful/**/*.py"), *root.glob("examples/*.py"), *root.glob("bench/estimate*.py")]
    return sha256("".join(file_sha256(file) for file in sorted(files)))


def _table(lines: list[tuple[str, ...]]) -> str:
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    pads = (str.ljust, *[str.rjust] * (len(widths) - 1))
    return "\n".join(
        "  ".join(pad(cell, width) for pad, cell, width in zip(pads, line, widths, strict=True)).rstrip()
        for line in lines
    )


def _show(size: int | None) -> str:
    return "" if size is None else show_bytes(size)


def _percent(error: float | None) -> str:
    return "" if error is None else f"{error:+.1%}"


def _progress(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def facts(bench: Bench) -> dict[str, Any]:
    versions = {"python": platform.python_version(), "brimful": brimful.__version__, "torch": torch.__version__}
    for package in ("transformers", "peft", "bitsandbytes", "accelerate"):
        with suppress(metadata.PackageNotFoundError):
            versions[package] = metadata.version(package)
    return {
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "card": bench.card.name if bench.measures else "none: predictions for an H200",
        "limit_bytes": bench.limit,
        "versions": versions,
        "micro_batches": 2 if bench.accumulates else 1,
        "faked": "cpu" if isinstance(load_shim(), str) else "cuda",
        "source": _source(),
        "cases": len(cases()),
    }


def main(argv: list[str] | None = None) -> int:
    args = _arguments(argv)
    if args.table:
        print(show_files(args.table))
        return 0
    if not args.trace_only and not torch.cuda.is_available():
        _progress("there is no GPU to measure on. Try: --trace-only.")
        return 2
    chosen = [case for case in cases() if not args.only or any(word in case.name for word in args.only)]
    part, parts = args.part
    chosen = chosen[part::parts]
    if not chosen:
        _progress(f"--only {' '.join(args.only)} matches no case. Try: {', '.join(case.name for case in cases())}.")
        return 2
    bench, start = Bench(args), time.perf_counter()
    about = facts(bench)
    results = {one.case: one for one in (_resumed(args.resume, about) if args.resume else ())}
    trace_s = TRACING_SHARE * args.seconds if bench.measures else args.seconds

    def save() -> None:
        content = json.dumps({**about, "results": [asdict(one) for one in results.values()]}, indent=1)
        for file in filter(None, (args.json, args.resume)):
            write_atomic(file, content)

    for case in (case for case in chosen if case.name not in results):
        if time.perf_counter() - start > trace_s:
            _progress(f"stopped after {trace_s:.0f} s, before {case.name}")
            break
        result = results[case.name] = bench.predict(case)
        _progress(f"{case.name}: {result.problem or f'traced in {result.trace_s:.1f} s'}")
        save()
    for case in (case for case in chosen if bench.measures and case.name in results and not results[case.name].done):
        if time.perf_counter() - start > args.seconds:
            _progress(f"stopped after {args.seconds:.0f} s, before {case.name} was measured")
            break
        bench.measure_all(case, results[case.name])
        _progress(f"{case.name}: measured")
        save()
    save()
    print(show_predicted(results.values()) if args.trace_only else show_measured(results.values()))
    print()
    print(show_summary(list(results.values()), bench.limit))
    return 0


def _part(text: str) -> tuple[int, int]:
    part, parts = map(int, text.split("/"))
    return part, parts


def _arguments(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__.split("\n\n")[0], formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", nargs="+", default=[], help="cases whose name contains one of these words")
    parser.add_argument("--trace-only", action="store_true", help="predict, measure nothing; needs no GPU")
    parser.add_argument("--limit", help="memory that the recommended size may use, such as 24GiB; default: the card's")
    parser.add_argument("--micro-batches", type=int, choices=(1, 2), default=2, help="of the second step")
    parser.add_argument(
        "--lengths", action="store_true", help="trace six sizes, as for a table of lengths, instead of three"
    )
    parser.add_argument("--peers", action="store_true", help="also run torch's MemTracker")
    parser.add_argument("--seconds", type=float, default=float("inf"), help="begin no case after this time")
    parser.add_argument(
        "--part", type=_part, default=(0, 1), help="every n-th case, such as 0/4, for several calls side by side"
    )
    parser.add_argument(
        "--room",
        type=Path,
        metavar="FILE",
        help="with the bytes of the card that calls with the same file may use together",
    )
    parser.add_argument("--table", type=Path, nargs="+", metavar="FILE", help="print the table of what --json wrote")
    parser.add_argument("--json", type=Path, help="write everything into this file, after each case")
    parser.add_argument(
        "--resume", type=Path, metavar="FILE", help="write it there, too, and go on with what an earlier call wrote"
    )
    return parser.parse_args(argv)


if __name__ == "__main__":
    sys.exit(main())
