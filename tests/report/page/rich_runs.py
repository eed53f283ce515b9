"""Run folders with everything that the report shows: a memory model with probes, what was tried, samples that vary."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from brimful.units import GiB
from tests.report.fake_runs import write_run

SHAPE = [228, 256]
PER_TOKEN = 0.31 * GiB / sum(SHAPE)
BASE = 2.1 * GiB


def memory_model(sizes: tuple[int, ...] = (1, 4, 16, 43)) -> dict[str, Any]:
    """Linear in the tokens, and its probes within 1 % of it."""
    terms = [{"powers": [0, 0, 0], "bytes": BASE}, {"powers": [1, 1, 0], "bytes": PER_TOKEN}, {"powers": [1, 0, 1], "bytes": PER_TOKEN}]  # fmt: skip
    probes = [
        {"rows": rows, "shape": shape, "phases": {"forward": int((BASE + PER_TOKEN * rows * sum(shape)) * (0.99 + 0.001 * rows % 0.02))}, "reserved_bytes": None}
        for shape in (SHAPE, [114, 128])
        for rows in sizes
    ]  # fmt: skip
    return {"phases": {"forward": terms}, "margin": 1.0, "reserved_ratio": 1.05, "error": 0.004, "probes": probes}


def tried(rates: Mapping[int, float] = {16: 540.0, 32: 598.0, 43: 672.0}) -> list[dict[str, Any]]:
    """The largest was chosen, and one more does not fit."""
    setting = {"layout": "padded", "precision": "bf16", "compile": "off", "checkpointing": "off"}
    common = {"setting": setting, "shape": SHAPE, "tokens": None, "reserved_bytes": None, "basis": "measured", "step_s": None, "data_rows_per_s": None, "allowed": True}  # fmt: skip
    fitting = [
        {**common, "micro_batch": rows, "accumulation": -(-256 // rows), "peak_bytes": int(BASE + PER_TOKEN * rows * sum(SHAPE)), "fits": True, "rows_per_s": rate, "chosen": rows == max(rates)}
        for rows, rate in rates.items()
    ]  # fmt: skip
    too_large = {**fitting[-1], "micro_batch": 64, "fits": False, "rows_per_s": None, "chosen": False}
    return [*fitting, too_large]


def rich_run(folder: Path, *, plan_values: Mapping[str, Any] | None = None, **values: Any) -> Path:
    """A run of 300 steps with evaluations, checkpoints and two out-of-memory errors, unless told otherwise."""
    plan = {
        "memory_model": memory_model(),
        "tried": tried(),
        "not_tried": ["padded fp32: no time left"],
        **(plan_values or {}),
    }
    defaults: dict[str, Any] = {"ooms": [120, 180], "evals": range(50, 301, 50), "checkpoints": [100, 200, 300]}
    return write_run(folder, plan_values=plan, **{**defaults, **values})
