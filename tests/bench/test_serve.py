"""The bench of `brimful serve`: what counts, the table, and an answer of its own server."""

import sys
import time
from argparse import Namespace
from pathlib import Path

import pytest

BENCH = Path(__file__).parents[2] / "bench"
sys.path.insert(0, str(BENCH))

import serve  # noqa: E402


def test_an_answer_counts_with_its_share_of_the_time():
    now = time.monotonic()
    figures = serve.Figures(now - 4, now + 6)
    figures.add(now - 9, 1.0, 32)  # half of its stream before
    figures.add(now - 2, None, 32)  # without any text
    late = serve.Figures(now - 20, now - 10)
    late.add(now - 9, 0.2, 32)
    assert figures.requests == pytest.approx(0.5, abs=0.01) and figures.tokens == pytest.approx(16, abs=0.2)
    assert (late.requests, late.first_s, figures.first_s) == (0, [], [1.0])
    assert figures.to_json()["tokens_per_s"] == pytest.approx(1.6, abs=0.02)


def test_the_table_compares_with_one_at_a_time():
    row = {
        "case": "t5",
        "clients": 8,
        "requests": 5,
        "requests_per_s": 1.0,
        "first_s": 0.1,
        "first_p95_s": 0.2,
        "errors": {},
    }
    rows = [row | {"entry": "brimful", "tokens_per_s": 60.0}, row | {"entry": "one", "tokens_per_s": 20.0},
            {"case": "t5", "clients": 8, "entry": "transformers", "failed": "did not start"}]  # fmt: skip
    lines = serve.table(rows).splitlines()
    assert "| 3.00 |" in lines[2] and "| 1.00 |" in lines[3] and "did not start" in lines[4]


def test_its_model_is_served_and_answers(tmp_path):
    model = serve.make_model(tmp_path / "model", serve.QUICK["t5"], "cpu")
    options = Namespace(
        device="cpu",
        memory_limit=None,
        clients=[2],
        new_tokens=4,
        seconds=1.0,
        warm_seconds=0.2,
        start_seconds=120.0,
        quick=True,
    )
    rows = [row for entry in ("brimful", "one") for row in serve._measure(entry, "t5", model, options)]
    assert [row["entry"] for row in rows] == ["brimful", "one"]
    assert all(row["requests"] > 0 and row["tokens_per_s"] == pytest.approx(4 * row["requests_per_s"]) for row in rows)


def test_a_server_that_does_not_answer_costs_no_more_than_it_may(tmp_path, monkeypatch):
    words = [sys.executable, "-c", "import time; print('no room for a cache', flush=True); time.sleep(60)"]

    def start(*_):
        log = (tmp_path / "log").open("w+")
        process = serve.subprocess.Popen(words, stdout=log)
        process.log = log
        return process

    monkeypatch.setattr(serve, "_start", start)
    options = Namespace(device="cpu", clients=[64], start_seconds=2.0)
    started = time.monotonic()
    (row,) = serve._measure("transformers-cb", "causal", tmp_path, options)
    assert row["failed"] == "transformers-cb did not answer after 2 s: no room for a cache"
    assert time.monotonic() - started < 40


def test_continuous_batching_has_a_cache_below_the_cap(tmp_path, monkeypatch):
    """By itself it takes a share of the whole card, and dies under a cap."""
    lines = []
    monkeypatch.setattr(serve.subprocess, "Popen", lambda words, **_: lines.append(words[2]) or Namespace())
    for entry in ("transformers", "transformers-cb"):
        serve._start(entry, tmp_path, 8000, Namespace(device="cuda", memory_limit="20GiB"))
    names = {"torch": Namespace(cuda=Namespace(mem_get_info=lambda: (0, 100 * 2**30), set_per_process_memory_fraction=list)), "sys": Namespace(argv=["-c"])}  # fmt: skip
    shares = []
    for text in lines:
        text = text.replace("import sys", "").replace("import torch", "").partition("from transformers")[0]
        names["torch"].cuda.set_per_process_memory_fraction = shares.append
        exec(text, names)
        shares.append(names["sys"].argv[-2:])
    assert shares == [0.2, ["--host", "127.0.0.1"], 0.2, ["--cb-max-memory-percent", "0.1600"]]
