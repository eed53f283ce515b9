"""`brimful sweep SPEC.toml`: many small heads at once, as tables, parquet and a page."""

import shlex
import sys
from pathlib import Path
from typing import Any

from brimful.cli.flags import Switch, make_flags, set_flags
from brimful.cli.output import prefer_growing_segments, show
from brimful.errors import BadOption, BadRun
from brimful.files import cache_folder, write_atomic
from brimful.languages import tr, translate
from brimful.molecules.spec import SweepOptions, SweepSpec
from brimful.tasks.option_fields import option_fields
from brimful.units import show_count, show_seconds

Flags: Any = make_flags({"Where it runs": option_fields(SweepOptions)})


def sweep(
    spec: Path,
    /,
    *,
    output: Path | None = None,
    cache: Path | None = None,
    json: Switch = False,
    flags: Flags = Flags(),  # noqa: B008 - frozen
) -> None:
    """Train a grid of small heads on frozen molecular features: datasets × encoders × methods × seeds.

    Ctrl-C stops it, and the same command continues. Finished runs are never trained again, and a spec that has grown
    trains what is new.

    Parameters
    ----------
    spec
        A TOML file with seeds, methods, encoders and [[datasets]]. See docs/molecules.md.
    output
        The folder for results. Default: sweeps/NAME, after the spec.
    cache
        The folder that keeps features between sweeps.
    json
        Print one JSON object with all result rows.
    """
    from brimful.molecules.results import conventions, summarise
    from brimful.molecules.spec_file import read_spec

    content = read_spec(spec)
    values = set_flags(flags)
    if content.device is not None:
        values.setdefault("device", content.device)
    if content.memory_limit is not None:
        values.setdefault("memory_limit", str(content.memory_limit))
    options = SweepOptions(**values)
    root = output or Path("sweeps") / spec.stem
    if root.exists() and not root.is_dir():
        raise BadOption(f"--output {root} is a file. Try: a folder.")
    prefer_growing_segments()
    from brimful.molecules.sweep import sweep as run
    from brimful.molecules.terminal import SweepProgress, SweepTable

    features = cache or cache_folder("features")
    with SweepProgress() as progress:
        result = run(content, root, options, cache=features, listeners=[progress], progress=progress.progress)
    summaries = summarise(result.rows)
    _write_page(content, root, result, summaries)
    data = {
        "output": str(root), "finished": result.finished, "rows": result.rows, "summary": summaries,
        "remarks": result.remarks, "packs": list(result.packs), "seconds": result.seconds,
        "trained": result.trained, "ooms": result.ooms, "peak_bytes": result.peak_bytes,
    }  # fmt: skip
    trained = tr(
        "{heads} trained in {time}.", heads=show_count(result.trained, "head"), time=show_seconds(result.seconds)
    )
    ending = f"{trained} {tr('Saved to {path}', path=root)}"
    command = shlex.join(["brimful", *sys.argv[1:]])
    more = [] if result.finished else [tr("Not finished. Continue with: {command}", command=command)]
    notes = [*map(translate, conventions(summaries)), ending, *more]
    show(SweepTable(summaries, notes, result.remarks), data, as_json=json)


def _write_page(spec: SweepSpec, root: Path, result: Any, summaries: Any) -> None:
    from brimful.molecules.page import sweep_page
    from brimful.molecules.results import conventions, read_run

    page = sweep_page(
        result.rows, summaries, lambda name: read_run(root, name), title=spec.source.stem,
        notes=conventions(summaries), remarks=result.remarks,
    )  # fmt: skip
    try:
        write_atomic(root / "report.html", page)
    except OSError as error:
        raise BadRun(f"{root / 'report.html'} cannot be written: {error.strerror}. Try: free space; the tables beside it are complete.") from None  # fmt: skip
