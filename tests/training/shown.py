"""Events as views show them."""

from brimful.training.run_log import RunSummary
from brimful.units import GiB


def step(number, **changes):
    values = {
        "loss": 2.0, "lr": 1e-4, "epoch": 0.5, "rows_per_s": 700.0, "tokens_per_s": 70000.0, "mfu": 0.123,
        "data_wait_s": 0.01, "seconds": 0.99, "peak_bytes": 15 * GiB, "limit_bytes": 20 * GiB, "eta_s": 75.0, "ooms": 0,
    }  # fmt: skip
    return {"event": "step", "step": number, "steps": 100, **values, **changes}


EVALUATION = {
    "event": "eval", "step": 50, "loss": 2.5, "perplexity": 12.182, "bleu": None, "rows": 1000, "seconds": 3.0, "best": True,
}  # fmt: skip


def summary_of(*events):
    summary = RunSummary()
    for event in events:
        summary.add(event)
    return summary
