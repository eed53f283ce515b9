"""What the issues say must be shown, and what the benches measured of it: the section of RESULTS.md that `card.py` prints.

    python bench/claims.py FOLDER        the files of a results.tgz

First a table with a line for each claim: what is required, what was measured, and whether that is enough. A figure
that the files lack is "not measured"; of a claim with several figures, those that are there are shown, and it counts as not measured
unless one of them fails it. A peer that ran out of memory with everything that it tried is beaten. What needs no GPU is in the table as
well, with the tests that show it. Then the benches' own tables. A part may have been ended while it wrote: a line or a file that is cut off
is left out, and named.
"""

import argparse
import json
import math
import statistics
import sys
import xml.etree.ElementTree as ElementTree
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

GIB = 2**30
CAP = 20 * GIB
RECORDING = 0.005
"""Of a step. Rounds that are further apart than twice this cannot tell."""
CLIENTS = 64
LEARN_PAIRS = 600
"""Of answers to 1,000 prompts, four in ten are dropped where the model has seen little."""
TESTS = ("tests-whole-card", "tests-packing", "tests-planning", "tests-step", "tests-training")
CURVE_STEPS = 20
"""Steps at the end of the loss curves that are compared."""
NO_DISTURBANCE = 0.01
"""Losses of a disturbed run in bf16 may be so far from those of an undisturbed one, relative: what another split changes."""
BY_TESTS = (
    (15, "packed rows train as alone, float64", "to 1e-12", "`tests/packing`"),
    (15, "steps on a CPU, with the code before packing", "not slower", "“CPU” under packed steps, above"),
    (16, "`exact()` of TRL's trainers, also at 80, 60 and 40 % of their memory", "losses to 1e-6", "`tests/integrations`"),
    (16, "tiny families: packed as alone, resumed, merged, QLoRA", "to 1e-12, the same bits, to 1e-6", "`tests/packing`, `tests/tasks`"),
    (16, "masks of chat templates", "at least 20 formats", "`tests/tasks`"),
    (17, "logs in real formats and their diagnoses", "at least 40", "`tests/logs`"),
    (17, "`watch` in a terminal, of a million events, of a run that goes on", "1 s, 150 MB, not slower", "`tests/report/watch`, `bench/watch.py`"),
    (17, "`report` in Chromium, and pictures of every view", "no error, no request", "`tests/report/page`, `docs/recording`"),
    (18, "losses and gradients of every variant, any split, references", "to 1e-8, to 1e-10, equal", "`tests/tasks`"),
    (18, "tiny T5 and Qwen2 on training pairs, also through an out-of-memory error", "> 0.95", "`tests/tasks`"),
    (19, "T5 base as measured on an H200 earlier", "within 3 % allocated, 4 % reserved", "`tests/estimation`"),
    (19, "six traces of T5 base on 2 cores, and each further shape", "≤ 60 s, ≤ 0.1 s", "under `brimful estimate`, above"),
    (20, "the OpenAI client, the page in Chromium, 64 clients for five minutes", "no lost or mixed answer", "`tests/serving`"),
)  # fmt: skip
"""Issue, what must be shown, what is required, and where that is shown without a GPU."""

Lines = list[dict[str, Any]]


@dataclass(frozen=True, kw_only=True)
class Results:
    """What the files of a call, or of several, say."""

    train: Lines = field(default_factory=list)
    losses: Lines = field(default_factory=list)
    """Of runs that shared the GPU, so their speed means nothing."""
    sft: Lines = field(default_factory=list)
    sft_12gib: Lines = field(default_factory=list)
    survive: Lines = field(default_factory=list)
    dpo: Lines = field(default_factory=list)
    serve: Lines = field(default_factory=list)
    learn: dict[str, Any] = field(default_factory=dict)
    midrun: dict[str, Any] = field(default_factory=dict)
    record: dict[str, Any] = field(default_factory=dict)
    parts: dict[str, Any] = field(default_factory=dict)
    estimates: list[dict[str, Any]] = field(default_factory=list)
    tests: dict[str, dict[str, int]] = field(default_factory=dict)
    """By part, the counts of its XML file."""

    cut_off: tuple[str, ...] = ()
    """Files that could not be read to their end."""

    @classmethod
    def read(cls, folder: Path) -> "Results":
        cut_off: list[str] = []

        def parsed(file: Path, text: str) -> Any:
            try:
                return json.loads(text)
            except ValueError:
                cut_off.append(file.name)
                return None

        def lines(name: str) -> Lines:
            file = folder / f"{name}.jsonl"
            found = [parsed(file, line) for line in file.read_text().splitlines() if line] if file.is_file() else []
            return [line for line in found if line is not None]

        def one(name: str) -> dict[str, Any]:
            file = folder / f"{name}.json"
            return (file.is_file() and parsed(file, file.read_text())) or {}

        suites = {}
        for file in sorted(folder.glob("*.xml")):
            try:
                suites[file.stem] = next(ElementTree.parse(file).iter("testsuite"))
            except (ElementTree.ParseError, StopIteration):
                cut_off.append(file.name)
        counts = ("tests", "failures", "errors", "skipped")
        return cls(
            train=lines("train"), losses=lines("losses"), sft=lines("sft"), sft_12gib=lines("sft-12gib"), survive=lines("survive"),
            dpo=lines("dpo"), serve=lines("serve"), learn=one("learn"), midrun=one("midrun"), record=one("record"), parts=one("parts"),
            estimates=[found for file in sorted(folder.glob("estimate-*.json")) if (found := one(file.stem))],
            tests={name: {count: int(suite.get(count, 0)) for count in counts} for name, suite in suites.items()},
            cut_off=tuple(dict.fromkeys(cut_off)),
        )  # fmt: skip

    @property
    def tiny(self) -> bool:
        return any(part.get("tiny") for part in self.parts.values())


@dataclass(frozen=True)
class Measured:
    """A figure in words, and whether it is enough; None if part of it is missing."""

    text: str = "not measured"
    enough: bool | None = None


@dataclass(frozen=True)
class Claim:
    issue: int
    what: str
    required: str
    measure: Callable[[Results], Measured]


# ---- train.py --------------------------------------------------------------------------------------------------------


def entries(results: Results, case: str, trainer: str) -> dict[str, Lines]:
    """The lines with a speed, by entry, under the cap that the claims name."""
    found: dict[str, Lines] = {}
    for line in results.train:
        if (line["case"], line["trainer"], line["cap_bytes"]) == (case, trainer, CAP) and "rows_per_s" in line:
            found.setdefault(line["entry"], []).append(line)
    return found


def median(lines: Lines, name: str) -> float | None:
    values = [line[name] for line in lines if line.get(name) is not None]
    return statistics.median(values) if values else None


def fastest(found: dict[str, Lines]) -> tuple[str, Lines]:
    return max(found.items(), key=lambda one: median(one[1], "rows_per_s") or 0.0, default=("", []))


def rows_per_s(case: str, least: float) -> Callable[[Results], Measured]:
    def measure(results: Results) -> Measured:
        lines = entries(results, case, "brimful").get("brimful", [])
        speed, seeds = median(lines, "rows_per_s"), len({line["seed"] for line in lines})
        if speed is None:
            return Measured()
        return Measured(f"{speed:,.0f} rows/s ({_count(seeds, 'seed')})", speed >= least and seeds >= 3)

    return measure


def times_hf(case: str, least: float) -> Callable[[Results], Measured]:
    def measure(results: Results) -> Measured:
        (own, lines), (peer, others) = (fastest(entries(results, case, one)) for one in ("brimful", "hf"))
        speed, other = median(lines, "rows_per_s"), median(others, "rows_per_s")
        if speed is None or other is None:
            missing = ", ".join(name for name, one in (("Brimful", speed), ("HF", other)) if one is None)
            return Measured("not measured" if speed is other else f"{missing} not measured")
        return Measured(
            f"× {speed / other:.2f} ({own}: {speed:,.0f}, {peer}: {other:,.0f} rows/s)", speed / other >= least
        )

    return measure


def seconds_to_300(case: str) -> Callable[[Results], Measured]:
    def measure(results: Results) -> Measured:
        def quickest(trainer: str, lines_of: Callable[[Lines], Lines]) -> tuple[str, dict[str, Any]] | None:
            runs = {name: lines_of(lines) for name, lines in entries(results, case, trainer).items()}
            middle = {
                name: sorted(some, key=lambda line: line["run_s"])[len(some) // 2]
                for name, some in runs.items()
                if some
            }
            return min(middle.items(), key=lambda one: one[1]["run_s"], default=None)

        own = quickest("brimful", lambda lines: [line for line in lines if not line.get("compiled_before")])
        peer = quickest("hf", lambda lines: lines)
        if own is None or peer is None:
            return Measured()
        text = [f"{name}: {'~' * line['run_s_extrapolated']}{line['run_s']:.0f} s" for name, line in (own, peer)]
        return Measured(", ".join(text), own[1]["run_s"] < peer[1]["run_s"])

    return measure


def share_of_ceiling(results: Results) -> Measured:
    shares = {name: median(lines, "useful_share") for name, lines in entries(results, "full", "brimful").items()}
    known = {name: share for name, share in shares.items() if share is not None}
    if not known:
        return Measured()
    name = max(known, key=lambda one: known[one])
    return Measured(f"{known[name]:.1%} ({name})", known[name] >= 0.35)


def loss_curves(results: Results) -> Measured:
    """The means of the last steps that all runs have, over seeds that packed and padded runs share."""

    def curves(lines: Lines, entry: str) -> dict[int, list[float]]:
        return {
            line["seed"]: line["loss"]
            for line in lines
            if (line["case"], line["entry"]) == ("pretrain", entry) and line.get("loss")
        }

    packed = curves([line for line in results.train if line["cap_bytes"] == CAP], "brimful")
    padded = curves([*results.train, *results.losses], "brimful-padded")
    seeds = sorted(set(packed) & set(padded))
    if len(seeds) < 2:
        return Measured()
    end = min(len(some[seed]) for some in (packed, padded) for seed in seeds)
    means = [
        [statistics.mean(some[seed][max(0, end - CURVE_STEPS) : end]) for seed in seeds] for some in (packed, padded)
    ]
    apart, noise = abs(statistics.mean(means[0]) - statistics.mean(means[1])), statistics.stdev(means[1])
    text = f"{apart:.4f} apart, padded runs ± {noise:.4f} over {_count(len(seeds), 'seed')}, up to step {end}"
    return Measured(text, apart <= noise and len(seeds) >= 3)


def packed_plans(results: Results) -> Lines:
    return [
        line for line in results.train if (line.get("plan") or {}).get("layout") == "packed" and "rows_per_s" in line
    ]


def prediction_errors(line: dict[str, Any]) -> list[float]:
    """Of the steps, and of the plan before its micro-batch ran. While a graph is replayed the steps have no peak."""
    plan, errors = line.get("plan") or {}, [line.get("prediction_error")]
    if plan.get("predicted_peak_bytes") and plan.get("measured_peak_bytes"):
        errors.append(plan["predicted_peak_bytes"] / plan["measured_peak_bytes"] - 1)
    return [error for error in errors if error is not None]


def prediction(results: Results) -> Measured:
    by_run = [prediction_errors(line) for line in packed_plans(results)]
    errors = [error for some in by_run for error in some]
    if not errors:
        return Measured()
    worst, known = max(errors, key=abs), sum(map(bool, by_run))
    of = "" if known == len(by_run) else f" of {len(by_run)}"
    return Measured(
        f"at most {worst:+.1%} in {_count(known, 'run')}{of}",
        _verdict([abs(worst) <= 0.015], complete=known == len(by_run)),
    )


def plan_ooms(results: Results) -> Measured:
    lines = packed_plans(results)
    ooms = sum((line["plan"].get("ooms") or 0) + (line.get("ooms") or 0) for line in lines)
    return Measured(f"{ooms} in {_count(len(lines), 'plan and run')}", ooms == 0) if lines else Measured()


def plan_seconds(results: Results) -> Measured:
    seconds = [line["plan_s"] for line in packed_plans(results) if line.get("plan_s") is not None]
    return Measured(f"{min(seconds):.1f} to {max(seconds):.1f} s", max(seconds) <= 8) if seconds else Measured()


# ---- the other benches -------------------------------------------------------------------------------------------------


def midrun(results: Results) -> Measured:
    found = results.midrun.get("recovery")
    if not found:
        return Measured()
    run, ratio = found["results"][0], found["after_over_before"]
    graph = (results.midrun.get("levers") or {}).get("cuda_graphs", "off")
    text = (
        f"× {ratio:.3f} after, {run['steps_done']} of {run['steps_requested']} steps, {run['rows_lost']} rows lost, {run['rows_repeated']} repeated, "
        f"{_count(found['ooms'], 'OOM')}, CUDA graph {graph}"
    )
    kept = run["steps_done"] == run["steps_requested"] and not run["rows_lost"] and not run["rows_repeated"]
    kept = kept and run["global_batches"] == [results.midrun["global_batch"]] and not run["died"]
    return (
        Measured(text, bool(kept and ratio >= 0.97)) if found["ooms"] else Measured(f"{text}: memory did not run out")
    )


@dataclass(frozen=True)
class Ratio:
    """A speed over that of the best of a peer's settings."""

    value: float | None
    """None if unknown, infinite if all settings ran out of memory."""
    text: str
    complete: bool
    """Whether the peer has tried all that it was to try."""


def against(own: float, lines: Lines, speed: str) -> Ratio:
    """`lines` are those of one peer. `trl` goes on to its next setting only if one does not run."""
    known = {line["setting"] for line in lines if speed in line or line["status"] == "OOM"}
    of = max((line["settings"] for line in lines), default=0)
    best = max((line for line in lines if speed in line), key=lambda line: line[speed], default=None)
    failed = {line["setting"] for line in lines} - known  # for another reason, which says nothing of its speed
    climbed = best is not None and best["contestant"] == "trl"
    complete = bool(lines) and not failed and (len(known) >= of or climbed)
    short = "" if complete else f", only {len(known)} of {of} settings measured"
    if best is not None:
        return Ratio(
            own / best[speed], f"× {own / best[speed]:.2f} ({best['setting']}: {best[speed]:,.1f}{short})", complete
        )
    if complete:
        return Ratio(math.inf, f"out of memory with {_count(of, 'setting')}", complete)
    return Ratio(None, f"not measured{short if lines else ''}", False)


def finetuned(model: str) -> Callable[[Results], Measured]:
    def measure(results: Results) -> Measured:
        lines = [line for line in results.sft if (line["model"], line["limit_bytes"]) == (model, 24 * GIB)]
        runs = [line for line in lines if line["contestant"].startswith("brimful")]
        own = max(
            (line for line in runs if "tokens_per_s" in line), key=lambda line: line["tokens_per_s"], default=None
        )
        if own is None:
            return Measured(f"{runs[0]['status']}: {runs[0]['error'][:80]}", False) if runs else Measured()
        peers = {"TRL": "trl", "tuned": "trl-tuned"}
        ratios = {
            peer: against(own["tokens_per_s"], [line for line in lines if line["contestant"] == name], "tokens_per_s")
            for peer, name in peers.items()
        }
        ooms, errors = own["ooms"] + (own.get("survived_ooms") or 0), prediction_errors(own)
        error = max(errors, key=abs, default=None)
        text = (
            f"{own['contestant']}: {own['tokens_per_s']:,.0f} tokens/s, "
            + ", ".join(f"{peer} {ratio.text}" for peer, ratio in ratios.items())
            + f"; {_count(ooms, 'OOM')}, predicted {'–' if error is None else f'{error:+.1%}'}, batch {'kept' if own['global_batch_kept'] else 'changed'}"
        )
        enough = [ooms == 0, own["global_batch_kept"], error is None or abs(error) <= 0.03]
        enough += [
            ratios[peer].value >= least for peer, least in (("TRL", 2), ("tuned", 1)) if ratios[peer].value is not None
        ]
        return Measured(
            text, _verdict(enough, complete=error is not None and all(one.complete for one in ratios.values()))
        )

    return measure


def in_12_gib(results: Results) -> Measured:
    lines = [line for line in results.sft_12gib if line["contestant"] == "brimful" and line["limit_bytes"] == 12 * GIB]
    if not lines:
        return Measured()
    line = lines[-1]
    if line["status"] != "ok":
        return Measured(f"{line['status']}: {line['error'][:80]}", False)
    reserved = line.get("reserved_bytes")
    text = f"runs, {'–' if reserved is None else f'{reserved / GIB:.2f} GiB'} reserved, {_count(line['ooms'], 'OOM')}"
    return Measured(text, None if reserved is None else reserved <= 12 * GIB)


def survived(results: Results) -> Measured:
    runs = {line["contestant"]: line for line in results.survive if line["model"] == "llama-8b-lora"}
    calm, rough = runs.get("survive, undisturbed"), runs.get("survive, memory taken")
    if calm is None or rough is None:
        return Measured()
    if problems := [
        f"{line['setting']}: {line['status']}: {line['error'][:80]}" for line in (calm, rough) if line["status"] != "ok"
    ]:
        return Measured("; ".join(problems), False)
    differences = [abs(a - b) / abs(a) for a, b in zip(calm["loss"], rough["loss"], strict=False)]
    apart = max(differences, default=math.nan) if all(map(math.isfinite, differences)) else math.nan
    ooms, taken = rough.get("survived_ooms") or 0, rough.get("taken_bytes", 0) / GIB
    text = f"{taken:.1f} GiB taken, {_count(ooms, 'OOM')} survived, losses at most {apart:.1e} apart over {rough['steps']} steps (relative)"
    if not ooms:
        return Measured(f"{text}: memory did not run out")
    return Measured(text, rough["steps"] == calm["steps"] and rough["global_batch_kept"] and apart <= NO_DISTURBANCE)


def recording(results: Results) -> Measured:
    if not results.record:
        return Measured()
    ratio, ratios = results.record["ratio"], results.record["ratios"]
    return Measured(
        f"× {ratio:.4f} ({min(ratios):.4f} to {max(ratios):.4f}), {results.record['device']}",
        _verdict([ratio <= 1 + RECORDING], complete=max(ratios) - min(ratios) <= 2 * RECORDING),
    )


def learnt(results: Results) -> Measured:
    if "held back" not in results.learn:
        return Measured()
    own, held = results.learn["training"], results.learn["held back"]
    changes = [own["perplexity_change"], held["perplexity_change"]]
    text = f"{own['accuracy']:.3f} of {own['pairs']} pairs, {held['accuracy']:.3f} of {held['pairs']} held back, perplexity {max(changes, key=abs):+.1%}"
    enough = [own["accuracy"] > 0.9, held["accuracy"] > 0.6, *(abs(change) <= 0.1 for change in changes)]
    return Measured(text, _verdict(enough, complete=own["pairs"] + held["pairs"] >= LEARN_PAIRS))


def pairs(model: str, peer: str, least: float) -> Callable[[Results], Measured]:
    def measure(results: Results) -> Measured:
        limit = None if results.tiny else CAP
        lines = [line for line in results.dpo if (line["model"], line["limit_bytes"]) == (model, limit)]
        runs = [line for line in lines if line["contestant"] == "brimful"]
        own = max((line for line in runs if "pairs_per_s" in line), key=lambda line: line["pairs_per_s"], default=None)
        if own is None:
            return Measured(f"{runs[0]['status']}: {runs[0]['error'][:80]}", False) if runs else Measured()
        ratio = against(own["pairs_per_s"], [line for line in lines if line["contestant"] == peer], "pairs_per_s")
        text = f"{own['pairs_per_s']:,.1f} pairs/s, {_count(own['ooms'], 'OOM')}; {peer} {ratio.text}"
        enough = [own["ooms"] == 0, *([] if ratio.value is None else [ratio.value >= least])]
        return Measured(text, _verdict(enough, complete=ratio.complete))

    return measure


def estimate_errors(results: Results) -> dict[str, list[float]]:
    rows = [row for file in results.estimates for result in file["results"] for row in result["rows"]]
    pick = lambda name, some: [row[f"predicted_{name}"] / row[name] - 1 for row in some if row[name]]  # noqa: E731
    return {
        "allocated": pick("allocated", rows),
        "reserved": pick("reserved", [row for row in rows if row["expandable"]]),
    }


def estimated(kind: str) -> Callable[[Results], Measured]:
    def measure(results: Results) -> Measured:
        sizes = sorted(map(abs, estimate_errors(results)[kind]))
        if len(sizes) < 2:
            return Measured()
        middle, high = statistics.median(sizes), statistics.quantiles(sizes, n=20, method="inclusive")[-1]
        cases = {row["case"] for one in estimate_results(results) for row in one["rows"] if row["allocated"]}
        suite = suite_size(results)
        text = f"median {middle:.1%}, 95th percentile {high:.1%} of {_count(len(sizes), 'measurement')} in {len(cases)} of {_count(suite, 'case')}"
        return Measured(text, _verdict([middle <= 0.02, high <= 0.05], complete=len(cases) >= suite))

    return measure


def fitted(results: Results) -> Measured:
    """A case of which no size is recommended has nothing to fit."""
    tried = [one for one in estimate_results(results) if one["recommended_fits"] is not None]
    failed = [f"{one['case']} ({one['recommended']} rows)" for one in tried if not one["recommended_fits"]]
    judged = sum(
        one["recommended_fits"] is not None or (one["done"] and not one["problem"]) for one in estimate_results(results)
    )
    text = f"{len(tried) - len(failed)} of {len(tried)} fitted" + (f"; not {', '.join(failed)}" if failed else "")
    text += f", of {_count(suite_size(results), 'case')}"
    return Measured(text, _verdict([not failed], complete=judged >= suite_size(results))) if tried else Measured()


def estimate_results(results: Results) -> Lines:
    return [one for file in results.estimates for one in file["results"]]


def suite_size(results: Results) -> int:
    return max((file["cases"] for file in results.estimates), default=0)


def served(case: str, peers: tuple[str, ...], least: float) -> Callable[[Results], Measured]:
    """A peer that does not start, or answers nothing, is named; one that was not tried is missing."""

    def measure(results: Results) -> Measured:
        lines = {
            line["entry"]: line
            for line in results.serve
            if line["case"] == case and (line["clients"] == CLIENTS or results.tiny)
        }
        own = lines.get("brimful")
        if own is None:
            return Measured()
        if not own.get("requests"):
            return Measured(f"{own.get('failed') or own.get('errors') or 'no answer'}", False)
        speeds = {name: lines[name]["tokens_per_s"] for name in peers if lines.get(name, {}).get("requests")}
        errors = sum(own["errors"].values())
        text = f"{own['tokens_per_s']:,.0f} tokens/s" + (f", {_count(errors, 'error')}" if errors else "")
        for name in (name for name in peers if name not in speeds):
            why = lines.get(name) and (lines[name].get("failed") or lines[name].get("errors") or "no answer")
            text += f", {name}: {why or 'not measured'}"
        if not speeds:
            return Measured(text, False if errors else None)
        name = max(speeds, key=lambda one: speeds[one])
        ratio = own["tokens_per_s"] / speeds[name]
        return Measured(
            f"× {ratio:.2f} ({text}, {name}: {speeds[name]:,.0f})",
            _verdict([ratio >= least, not errors], complete=all(peer in lines for peer in peers)),
        )

    return measure


def gpu_tests(results: Results) -> Measured:
    if not results.tests:
        return Measured()
    total = {
        name: sum(one[name] for one in results.tests.values()) for name in ("tests", "failures", "errors", "skipped")
    }
    bad = total["failures"] + total["errors"]
    missing = [name for name in TESTS if name not in results.tests]
    text = f"{total['tests'] - bad - total['skipped']} passed, {bad} failed, {total['skipped']} skipped"
    if missing:
        text += f"; not {', '.join(missing)}"
    return Measured(text, _verdict([bad == 0], complete=not missing and total["tests"] > total["skipped"]))


CLAIMS = (
    Claim(15, "T5, real rows, 20 GiB, 256 a step: pretrain", "≥ 1,500 rows/s, median of three", rows_per_s("pretrain", 1500)),
    Claim(15, "the same, SFT with a frozen encoder", "≥ 1,800 rows/s, median of three", rows_per_s("sft", 1800)),
    Claim(15, "pretrain against the best HF setting of the run", "≥ × 10", times_hf("pretrain", 10)),
    Claim(15, "SFT against the best HF setting of the run", "≥ × 10", times_hf("sft", 10)),
    Claim(15, "pretrain, 300 steps with compile time", "ahead of HF", seconds_to_300("pretrain")),
    Claim(15, "SFT, 300 steps with compile time", "ahead of HF", seconds_to_300("sft")),
    Claim(15, "full 256+256: share of the best matrix product", "≥ 35 %", share_of_ceiling),
    Claim(15, "GPT-2 small, uneven rows, against HF tuned by hand", "≥ × 2", times_hf("causal", 2)),
    Claim(15, "GPT-2 small, full 1024, against HF tuned by hand", "≥ × 1.3", times_hf("causal-full", 1.3)),
    Claim(15, "loss curves packed against padded, bf16", "within seed noise, three seeds", loss_curves),
    Claim(15, "memory taken in mid-run, packed", "nothing lost, throughput back within 3 %", midrun),
    Claim(15, "predicted peak of packed steps", "within 1.5 %", prediction),
    Claim(15, "out-of-memory errors to a plan", "0", plan_ooms),
    Claim(15, "time to a plan without compilation", "≤ 8 s", plan_seconds),
    *(
        Claim(16, f"{name}, 24 GiB", "0 OOMs, predicted within 3 %, ≥ × 2 TRL's defaults, ≥ × 1 TRL tuned", finetuned(model))
        for name, model in {
            "Qwen2.5-0.5B, all weights": "qwen2.5-0.5b", "Qwen2.5-1.5B, all weights": "qwen2.5-1.5b", "8B LoRA": "llama-8b-lora", "8B QLoRA": "llama-8b-qlora",
        }.items()
    ),
    Claim(16, "8B QLoRA", "runs within 12 GiB", in_12_gib),
    Claim(16, "memory taken in the middle of an 8B LoRA run", "survived, losses as undisturbed", survived),
    Claim(17, "recording, of a step", "≤ 0.5 %", recording),
    Claim(18, "T5 after SFT, its own answers rejected", "> 0.9 of the training pairs, > 0.6 held back, perplexity within 10 %", learnt),
    Claim(18, "T5 against two models in the same memory", "≥ × 2", pairs("t5", "two-models", 2)),
    Claim(18, "Qwen2.5-0.5B against TRL tuned", "≥ × 1.5, 0 OOMs", pairs("qwen2.5-0.5b", "trl-tuned", 1.5)),
    Claim(19, "estimated allocated bytes", "median ≤ 2 %, 95th percentile ≤ 5 %", estimated("allocated")),
    Claim(19, "estimated reserved bytes", "median ≤ 2 %, 95th percentile ≤ 5 %", estimated("reserved")),
    Claim(19, "recommended sizes", "all fit", fitted),
    Claim(20, "T5, 64 clients, against one request at a time", "≥ × 5", served("t5", ("one",), 5)),
    Claim(20, "0.5 B causal, 64 clients, against `transformers serve`", "≥ × 1", served("causal", ("transformers", "transformers-cb"), 1)),
    Claim(15, "tests that need a GPU", "all pass", gpu_tests),
)  # fmt: skip


def measured(claim: Claim, results: Results) -> Measured:
    """What one claim trips over must not cost the others their line."""
    try:
        return claim.measure(results)
    except Exception as error:
        return Measured(f"could not be read: {type(error).__name__}: {error}")


def table(results: Results) -> str:
    rows = []
    for claim in CLAIMS:
        found = measured(claim, results)
        verdict = {True: "pass", False: "**fail**", None: "–"}[found.enough]
        rows.append((claim.issue, claim.what, claim.required, found.text, verdict))
    rows += [(issue, what, required, where, "no GPU") for issue, what, required, where in BY_TESTS]
    lines = [f"| {' | '.join(map(str, row))} |".replace("\n", " ") for row in sorted(rows, key=lambda row: row[0])]
    return "\n".join(["| issue | what must be shown | required | measured | |", "|---|---|---|---|---|", *lines])


def section(results: Results) -> str:
    lines = [
        *results.train,
        *results.losses,
        *results.sft,
        *results.sft_12gib,
        *results.survive,
        *results.dpo,
        results.midrun,
    ]
    about = max((line for line in lines if "device_name" in line), key=lambda line: "versions" in line, default={})
    versions = ", ".join(f"{name} {version}" for name, version in about.get("versions", {}).items())
    days = sorted({line["date"][:10] for line in (*lines, *results.estimates) if "date" in line})
    dry = "\n\n**A dry run with tiny models: no figure here means anything.**" if results.tiny else ""
    shown = [
        f"## What must be shown: {about.get('device_name', 'unknown device')}, {' and '.join(days) or 'no date'}{dry}",
        f"`bench/card.py`; {versions or 'versions unknown'}. What is timed had the machine to itself.",
        table(results),
        *([f"Cut off: {', '.join(results.cut_off)}."] if results.cut_off else []),
        *(f"### {name}\n\n{text}" for name, text in bench_tables(results) if text),
    ]
    return "\n\n".join(shown)


def bench_tables(results: Results) -> Iterable[tuple[str, str]]:
    import dpo
    import record
    import serve
    import sft
    import train
    from oom_midrun import show_recovery

    fenced = lambda text: f"```\n{text}\n```" if text else ""  # noqa: E731
    learnt = (
        f"{name}: {json.dumps(results.learn[name])}" for name in ("training", "held back") if name in results.learn
    )
    for name, make in (
        ("`bench/train.py`", lambda: train.show_tables(results.train)),
        ("`bench/oom_midrun.py --recover --layout packed`", lambda: show_recovery(results.midrun["recovery"]) if results.midrun else ""),
        ("`bench/sft.py`", lambda: sft.show_tables(results.sft)),
        ("`bench/sft.py`, 12 GiB, not alone on the card", lambda: sft.show_tables(results.sft_12gib)),
        ("`bench/dpo.py`", lambda: dpo.show_tables(results.dpo)),
        ("`bench/dpo.py --learn`", lambda: fenced("\n".join(learnt))),
        ("`bench/serve.py`", lambda: serve.table(results.serve) if results.serve else ""),
        ("`bench/record.py`", lambda: fenced(record.show(results.record) if results.record else "")),
        ("`bench/estimate.py`", lambda: fenced(_estimate_summary(results))),
        ("Seconds of the parts", lambda: ", ".join(map(_part_in_words, results.parts.items()))),
    ):  # fmt: skip
        try:
            yield name, make()
        except Exception as error:
            yield name, f"could not be shown: {type(error).__name__}: {error}"


def _part_in_words(part: tuple[str, dict[str, Any]]) -> str:
    name, facts = part
    return f"{name} {facts['seconds']:.0f}" + (f" ({facts['problem']})" if facts.get("problem") else "")


def _estimate_summary(results: Results) -> str:
    """Without the sizes, of which there are hundreds."""
    if not results.estimates:
        return ""
    import estimate

    found = [one for file in results.estimates for one in estimate.read_results(file)]
    measured = sum(any(row.allocated for row in one.rows) for one in found)
    begin = f"{len(found)} of {_count(suite_size(results), 'case')} traced, {measured} measured"
    return f"{begin}\n{estimate.show_summary(found, results.estimates[0]['limit_bytes'])}"


def _verdict(enough: Iterable[bool], *, complete: bool) -> bool | None:
    """One failure fails it; what is incomplete has not passed."""
    return False if not all(enough) else True if complete else None


def _count(count: int, noun: str) -> str:
    return f"{count} {noun}{'' if count == 1 else 's'}"


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("folder", type=Path, help="with the files of a results.tgz")
    print(section(Results.read(parser.parse_args(argv).folder)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
