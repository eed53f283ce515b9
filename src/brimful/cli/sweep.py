"""`brimful sweep SPEC.toml`: many small heads at once, as tables, parquet and a page."""

import shlex
import sys
from pathlib import Path
from typing import Annotated, Any

from cyclopts import Parameter

from brimful.cli.flags import given, make_flags, prefer_growing_segments, show
from brimful.errors import BadOption, BadRun
from brimful.molecules.spec import SweepOptions
from brimful.tasks.load import option_fields
from brimful.units import show_count, show_seconds

Flags: Any = make_flags({"Where it runs": option_fields(SweepOptions)})


def sweep(
    spec: Path,
    /,
    *,
    output: Path | None = None,
    cache: Path | None = None,
    json: Annotated[bool, Parameter(negative="")] = False,
    flags: Flags = Flags(),  # noqa: B008 - frozen
) -> None:
    """Train a grid of small heads on frozen molecular features: datasets × encoders × methods × seeds, packed.

    Ctrl-C stops it; the same command goes on where it was. What is finished is never trained again, and a spec that has
    grown trains what is new.

    Parameters
    ----------
    spec
        A TOML file: seeds, methods, encoders and [[datasets]] with file and split; docs/sweep.md has them all.
    output
        The folder for results; sweeps/NAME of the spec unless given.
    cache
        Where features are kept between sweeps.
    json
        Print one JSON object with all result rows.
    """
    from brimful.molecules.spec_file import read_spec

    asked = read_spec(spec)
    said = given(flags)
    if asked.device is not None:
        said.setdefault("device", asked.device)
    if asked.memory_limit is not None:
        said.setdefault("memory_limit", str(asked.memory_limit))
    options = SweepOptions(**said)
    root = output or Path("sweeps") / spec.stem
    if root.exists() and not root.is_dir():
        raise BadOption(f"--output {root} is a file; name a folder")
    prefer_growing_segments()
    outcome, summaries = _run(asked, root, options, cache)
    from brimful.molecules.progress import sweep_table

    report = {
        "output": str(root), "finished": outcome.finished, "rows": outcome.rows, "summary": summaries,
        "remarks": outcome.remarks, "packs": list(outcome.packings), "seconds": outcome.seconds,
        "trained": outcome.trained, "ooms": outcome.ooms, "peak_bytes": outcome.peak_bytes,
    }  # fmt: skip
    show(sweep_table(summaries, _last_words(root, spec, outcome, summaries), outcome.remarks), report, as_json=json)


def _run(asked: Any, root: Path, options: SweepOptions, cache: Path | None) -> tuple[Any, Any]:
    from brimful.files import write_atomic
    from brimful.molecules.page import sweep_page
    from brimful.molecules.progress import SweepProgress
    from brimful.molecules.results import conventions, read_run, summarise
    from brimful.molecules.sweep import sweep as run
    from brimful.planning.planner import cache_folder

    with SweepProgress() as progress:
        features = cache or cache_folder("features")
        outcome = run(asked, root, options, cache=features, listeners=[progress], say=progress.say)
    summaries = summarise(outcome.rows)
    page = sweep_page(
        outcome.rows, summaries, lambda name: read_run(root, name), title=asked.source.stem,
        notes=conventions(summaries), remarks=outcome.remarks,
    )  # fmt: skip
    try:
        write_atomic(root / "report.html", page)
    except OSError as error:
        raise BadRun(
            f"{root / 'report.html'} cannot be written: {error.strerror}; the tables beside it are whole"
        ) from None
    return outcome, summaries


def _last_words(root: Path, spec: Path, outcome: Any, summaries: Any) -> list[str]:
    from brimful.molecules.results import conventions

    time = f"{show_count(outcome.trained, 'head')} trained in {show_seconds(outcome.seconds)}"
    ended = "" if outcome.finished else f"; not all are done: {shlex.join(['brimful', *sys.argv[1:]])} goes on"
    return [
        *conventions(summaries),
        f"{time}; tables and pictures are in {root / 'report.html'}{ended}",
    ]
