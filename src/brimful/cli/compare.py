"""`brimful compare A B…`: runs side by side, the verdict first."""

from pathlib import Path

from brimful.cli.flags import Json
from brimful.cli.output import show
from brimful.languages import language


def compare(*runs: Path, json: Json = False) -> None:
    """Compare runs: whether they are one experiment, which is faster, and what they were set to and did.

    Parameters
    ----------
    runs
        Folders of runs, at most six. The first is what the others are compared with. One run alone: its plans, if it was resumed.
    """
    from brimful.report.compare import compare_runs
    from brimful.report.compare_view import comparison_view

    comparison = compare_runs(runs)
    show(comparison_view(comparison), comparison.to_json(), as_json=json)
    if not json:
        for what, command in comparison.go_back:
            colon = "：" if language() == "zh" else ":"
            print(f"\n{what.shown()}{colon}\n{command}", flush=True)  # rich would break it over several lines
