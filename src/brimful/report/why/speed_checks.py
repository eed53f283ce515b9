"""Why a run is slow: where its time went, and which setting costs it.

Everything here follows from what the run has measured: the split of its time, the samples of card and host, and what the plan
timed. A figure that stays below its threshold is normal and not mentioned:

    waiting for rows                10 % of the time       the loader reads ahead, so a healthy run waits 1–3 %
    communication                   20 %
    saves, evaluations              10 %, 25 %             without the last of each, which every run has
    padding                         50 %                   splits by length have 29–42 % on chat rows, fixed batches of 32 have 63 %
    utilisation                     75 %                   together with an MFU below 20 %: the card waits for launches

A run shorter than ten seconds or twenty steps is not judged. Where utilisation, CPU or disk are only circumstantial evidence,
the certainty says so.
"""

import math
import shlex
from collections.abc import Callable, Iterator, Mapping, Sequence
from statistics import median
from typing import Any

from brimful.report.run_figures import RunFigures, Typical, finite, lengths, objects, part, step_seconds, whole
from brimful.report.why.diagnosis import Certainty, Finding, Fix, finding, fix, say
from brimful.report.why.oom_checks import FILL, chosen_of, rate_of
from brimful.units import GiB, MiB, flag_bytes, show_bytes, show_rate, show_rows, show_seconds

LEAST_STEPS = 20
LEAST_S = 10.0
SLOW_DATA = 0.10
SLOW_COMMUNICATION = 0.20
SLOW_SAVES = 0.10
SLOW_EVALUATIONS = 0.25
LEAST_LOST_S = 60.0
"""Saves and evaluations that took less than this in all are not worth changing."""
HIGH_PADDING = 0.50
LOW_UTILIZATION = 0.75
LOW_MFU = 0.20
GOOD_MFU = 0.40
"""A run that computes this well has nothing to gain from larger micro-batches."""
EMPTY_UTILIZATION, EMPTY_MEMORY = 0.50, 0.30
"""Below both, one run does not fill the card."""
BUSY_CPU, IDLE_CPU = 0.85, 0.50
"""Of the cores that the run may use."""
FAST_READS = 50e6
"""Bytes/s at which reading is work for a disk."""
CLAMPED_SPEED = 1.10
"""A larger micro-batch that the plan timed must be this much faster to be worth mentioning."""
CLAMPED_ROWS = 2
"""One that was not timed must be this many times larger."""
STILL_RISING = 1.25
"""More rows would clearly pay, noise aside, if the largest size that was timed is this much faster than the next smaller one."""
ROOM_FOR_MORE, ROOM_IF_CUT_SHORT = 4, 2
"""A micro-batch is small if memory has room for this many times its rows, and if time ended the search for a larger one."""
OTHERS_SHARE = 0.10
"""Other programs that hold less of a card than this are not mentioned."""
SLOWED = 0.93
"""Steps must fall to this share of their speed before heat or other programs are blamed."""
HOT_C, COOL_C = 83, 80
"""Where cards of NVIDIA begin to lower their clock, and where they do not."""
SWAP_BYTES = 512 * MiB
UNEVEN_RANKS = 1.30


def speed_findings(run: RunFigures) -> Iterator[Finding]:
    yield from _clamped(run)
    yield from _small(run)
    yield from _swapping(run)
    if len(run.settled) < LEAST_STEPS or sum(step_seconds(step) or 0.0 for step in run.settled) < LEAST_S:
        return
    for check in (_waiting, _communication, _uneven_ranks, _padding, _saves, _evaluations, _others, _heat):
        yield from check(run)
    if run.on_gpu:
        empty = list(_empty_card(run))
        yield from empty or _launches(run)


def _slow(kind: str, sentences: Sequence[str], *, lost: float, certainty: Certainty, figures: Mapping[str, Any],
          evidence: str, fixes: Sequence[Fix], resource: Any = "none") -> Finding:  # fmt: skip
    """`lost`: the share of the time that the cause costs, which is also how important it is."""
    return finding(
        min(0.45, 0.1 + 0.4 * lost), kind, sentences, resource=resource, certainty=certainty, figures=figures, evidence=evidence,
        fixes=fixes,
    )  # fmt: skip


def _at_most(share: float) -> str:
    """`1.4`: the speed-up if this share of the time were saved."""
    return f"{1 / (1 - min(share, 0.95)):.2g}"


# ---- The micro-batch ---------------------------------------------------------------------------------------------------


def _clamped(run: RunFigures) -> Iterator[Finding]:
    """The user's --micro-batch is below what the plan knows to be faster, or to fit."""
    requested, chosen, step_rows = run.requested("micro_batch"), whole(run.plan, "micro_batch"), run.rows_per_step
    if not isinstance(requested, int) or not chosen or not step_rows or chosen > requested or chosen >= step_rows:
        return
    rate, faster = rate_of(chosen_of(run)) or finite(run.plan, "rows_per_s"), _faster(run, chosen)
    figures = {"micro_batch": chosen, "rows_per_s": rate, "largest_micro_batch": whole(run.plan, "largest_micro_batch")}
    asked = say("Micro-batches have at most {rows}, because --micro-batch {requested} was requested.", rows=show_rows(chosen), requested=requested)  # fmt: skip
    leave_out = fix(
        say("Leave --micro-batch out, so that the plan measures which size is fastest"),
        brimful="--micro-batch auto", basis="measured",
    )  # fmt: skip
    if faster is not None and rate:
        rows, their_rate = whole(faster, "micro_batch") or 0, rate_of(faster) or rate
        timed = say("The plan timed {rows} at {their_rate} rows/s, and {chosen} at {rate}.", rows=show_rows(rows), their_rate=show_rate(their_rate), chosen=show_rows(chosen), rate=show_rate(rate))  # fmt: skip
        remedy = fix(
            say("Use micro-batches of {rows}: {ratio} × as fast, with a peak of {peak}", rows=show_rows(rows), ratio=f"{their_rate / rate:.2g}", peak=show_bytes(whole(faster, "peak_bytes"))),
            brimful=f"--micro-batch {rows}", basis="measured",
        )  # fmt: skip
        yield _slow(
            "slow-clamped-micro-batch", [asked, timed], lost=1 - rate / their_rate, certainty="certain",
            figures={**figures, "faster_micro_batch": rows, "faster_rows_per_s": their_rate}, evidence="plan.json, tried", fixes=(remedy, leave_out),
        )  # fmt: skip
        return
    largest, mfu = whole(run.plan, "largest_micro_batch"), run.mean("mfu")
    if largest is None or largest < CLAMPED_ROWS * chosen or (mfu is not None and mfu >= GOOD_MFU):
        return
    peak = whole(run.plan, "largest_measured_peak_bytes")
    fits = say("Up to {rows} ran within the memory, and none of those sizes was timed.", rows=show_rows(largest))
    if peak:
        fits = say("Up to {rows} ran within the memory, with a peak of {peak}, and none of those sizes was timed.", rows=show_rows(largest), peak=show_bytes(peak))  # fmt: skip
    yield _slow(
        "slow-clamped-micro-batch", [asked, fits], lost=0.25, certainty="possible", figures=figures, evidence="plan.json", fixes=(leave_out,)
    )  # fmt: skip


def _faster(run: RunFigures, chosen: int) -> Mapping[str, Any] | None:
    """The fastest larger micro-batch that any plan of this run has timed on the same device, if it is worth it."""
    now = rate_of(chosen_of(run)) or finite(run.plan, "rows_per_s")
    same = ("device_name", "shape", "global_batch", "processes")
    timed = [
        one
        for plan in run.record.plans
        if all(plan.get(name) == run.plan.get(name) for name in same)
        for one in objects(plan, "tried")
        if one.get("fits") and one.get("allowed", True) and (whole(one, "micro_batch") or 0) > chosen and rate_of(one)
    ]
    best = max(timed, key=lambda one: rate_of(one) or 0.0, default=None)
    return best if best is not None and now and (rate_of(best) or 0.0) >= CLAMPED_SPEED * now else None


def _small(run: RunFigures) -> Iterator[Finding]:
    """The plan's own micro-batch is small although memory has room, because time ended the search or nothing larger was timed."""
    chosen, step_rows = whole(run.plan, "micro_batch"), run.rows_per_step
    if not chosen or not step_rows or isinstance(run.requested("micro_batch"), int):
        return
    most = math.ceil(step_rows / (whole(run.plan, "processes") or 1))
    skipped = not_tried(run)
    cut_short = any(name.startswith(("more than ", "the speed of other sizes")) for name in skipped)
    rising, room = _rising(run, chosen), _room(run, most) or (most if cut_short else 0)
    if room < (ROOM_IF_CUT_SHORT if cut_short else ROOM_FOR_MORE) * chosen or not (
        rising or (cut_short and rising is None)
    ):
        return
    limit_s, rate = finite(part(run.choices, "plan_seconds"), "effective"), rate_of(chosen_of(run)) or finite(run.plan, "rows_per_s")  # fmt: skip
    sentences, fixes = [], []
    if cut_short:
        sentences.append(
            say("The plan was cut short: its time was up after micro-batches of {rows}.", rows=show_rows(chosen))
        )
        sentences.append(say("It did not try: {names}.", names=", ".join(skipped)))
        more_s = max(60, math.ceil(4 * (limit_s or 0) / 60) * 60)
        fixes.append(
            fix(
                say("Give the plan more time, in a new run, since a resumed one keeps its plan; best while nothing else is busy"),
                costs=say("up to {time}, once", time=show_seconds(more_s)), brimful=f"--plan-seconds {more_s}",
            )
        )  # fmt: skip
    else:
        sentences.append(say("Micro-batches have at most {rows}.", rows=show_rows(chosen)))
    if rising and rate:
        sentences.append(say("Up to that size rows/s were still rising, by {ratio} × with the last one, to {rate} rows/s.", ratio=f"{rising:.2g}", rate=show_rate(rate)))  # fmt: skip
    predicted = run.predicted_bytes(room, lengths(run.plan, "shape") or ())
    if predicted is not None:
        sentences.append(say("Memory has room for {rows} at once: predicted {peak} of {limit}.", rows=show_rows(room), peak=show_bytes(predicted), limit=show_bytes(run.limit_bytes)))  # fmt: skip
        fixes.append(
            fix(
                say("Or set the size yourself, such as {rows}", rows=show_rows(max(2 * chosen, room // 2))), global_batch=say("unchanged"),
                brimful=f"--micro-batch {max(2 * chosen, room // 2)}", basis="predicted",
            )
        )  # fmt: skip
    yield _slow(
        "slow-plan-cut-short" if cut_short else "slow-small-micro-batch", sentences, lost=1 - 1 / rising if rising else 0.25,
        certainty="likely" if rising else "possible", evidence="plan.json, plan_seconds" if cut_short else "plan.json, tried", fixes=fixes,
        figures={"micro_batch": chosen, "room_for_rows": room, "rows_per_s": rate, "plan_seconds": limit_s, "not_tried": skipped},
    )  # fmt: skip


def not_tried(run: RunFigures) -> list[str]:
    """What the search left out because its time was up, as the choice `plan_seconds` names it."""
    names = str(part(run.choices, "plan_seconds").get("reason", "")).partition("; not tried: ")[2]
    return names.split(", ") if names else []


def _rising(run: RunFigures, chosen: int) -> float | None:
    """How much faster the chosen size is than the next smaller one; 0 if more rows would not pay, None if nothing tells."""
    setting = chosen_of(run).get("setting")
    timed = {
        rows: rate
        for one in objects(run.plan, "tried")
        if one.get("setting") == setting and (rows := whole(one, "micro_batch")) and (rate := rate_of(one))
    }
    if chosen not in timed or len(timed) < 2:
        return None
    smaller = [rows for rows in timed if rows < chosen]
    if max(timed) > chosen or not smaller:
        return 0.0
    ratio = timed[chosen] / timed[max(smaller)]
    return ratio if ratio >= STILL_RISING else 0.0


def _room(run: RunFigures, most: int) -> int | None:
    """The rows of a micro-batch that memory has room for, by the plan's model."""
    limit, shape = run.limit_bytes, lengths(run.plan, "shape")
    if limit is None or shape is None:
        return None
    rows = run.largest_micro_batch(shape, (finite(run.plan, "fill") or FILL) * limit)
    return None if rows is None else min(rows, most)


# ---- Waiting for rows --------------------------------------------------------------------------------------------------


def _waiting(run: RunFigures) -> Iterator[Finding]:
    share = run.time_shares.get("data_s", 0.0)
    if share < SLOW_DATA:
        return
    workers, cores = whole(part(run.plan, "host"), "workers"), whole(run.begin, "cores")
    cpu, reads = _host_median(run, "cpu"), _host_median(run, "read_bytes_per_s")
    cause, certainty, fixes = _data_cause(run, workers, cores, cpu, reads)
    waits = say("Steps wait for their rows {share} of the time.", share=f"{share:.0%}")
    yield _slow(
        "slow-data", [waits, cause], lost=share, certainty=certainty, evidence="events.jsonl, times.data_s",
        figures={"data_share": share, "workers": workers, "cores": cores, "cpu": cpu, "read_bytes_per_s": reads, "at_most_faster": 1 / (1 - min(share, 0.95))},
        fixes=fixes,
    )  # fmt: skip


def _host_median(run: RunFigures, name: str) -> float | None:
    known = [
        value for _, host in run.host_samples if (value := finite(host, name)) is not None and math.isfinite(value)
    ]
    return median(known) if len(known) >= 2 else None


def _data_cause(
    run: RunFigures, workers: int | None, cores: int | None, cpu: float | None, reads: float | None
) -> tuple[str, Certainty, list[Fix]]:
    """What the loader waits for, by what host and disk were doing."""
    if run.store_path is not None:
        prepare = fix(say("Do less for each row in collate()"))
    else:
        data = shlex.quote(str(run.request.get("data") or "rows.jsonl"))
        prepare = fix(
            say("Prepare the rows once, before training, such as in a token store"),
            shell=f"brimful data tokenize {data} --tokenizer tokenizer --output store",
        )  # fmt: skip
    more = say("at most {ratio} × the speed", ratio=_at_most(run.time_shares["data_s"]))
    if cpu is not None and cpu >= BUSY_CPU and run.on_gpu:
        sentence = say("The CPU is busy ({cpu} of {cores} cores), so reading, tokenizing or collating computes more than the cores can do.", cpu=f"{cpu:.0%}", cores=cores or "all")  # fmt: skip
        return sentence, "likely", [prepare]
    if workers == 0:
        sentence = say("No worker reads ahead: rows are read in the training process, which cannot train meanwhile.")
        flag = "--workers auto" if run.requested("workers") == 0 else f"--workers {min(4, max(1, (cores or 2) - 1))}"
        remedy = fix(say("Let workers read ahead"), costs=say("host RAM of the workers"), brimful=flag)
        return sentence, "likely" if run.on_gpu else "possible", [remedy, prepare]
    busy = cpu is not None and cores is not None and workers and cpu * cores >= 0.8 * min(cores, workers + 1)
    if busy and workers and cores and cores > workers + 1 and cpu is not None and run.on_gpu:
        sentence = say("The {workers} workers are busy ({cpu} of {cores} cores), and there are cores left.", workers=workers, cpu=f"{cpu:.0%}", cores=cores)  # fmt: skip
        remedy = fix(
            say("Use {workers} workers: {more}", workers=min(cores - 1, 2 * workers), more=more), costs=say("host RAM of the workers"),
            brimful=f"--workers {min(cores - 1, 2 * workers)}", basis="predicted",
        )  # fmt: skip
        return sentence, "likely", [remedy, prepare]
    copy = fix(say("Copy the data to a local disk, or give the machine RAM to cache them"))
    if cpu is not None and cpu < IDLE_CPU and reads is not None and reads >= FAST_READS:
        sentence = say("The CPU is idle ({cpu}) while {reads}/s are read, so the disk is the limit.", cpu=f"{cpu:.0%}", reads=show_bytes(reads))  # fmt: skip
        return sentence, "likely", [copy]
    if cpu is not None and cpu < IDLE_CPU and reads is not None:
        sentence = say("The CPU is idle ({cpu}) and only {reads}/s are read: a disk that answers slowly, such as one in the network, or a dataset that waits.", cpu=f"{cpu:.0%}", reads=show_bytes(reads))  # fmt: skip
        many = 2 * max(2, workers or 0)
        waiting = fix(
            say("Use {workers} workers, which wait at the same time", workers=many), costs=say("host RAM of the workers"),
            brimful=f"--workers {many}",
        )  # fmt: skip
        return sentence, "possible", [waiting, copy]
    return say("The run has no samples that tell whether CPU or disk is the cause."), "possible", [prepare, copy]


# ---- Communication -----------------------------------------------------------------------------------------------------


def _communication(run: RunFigures) -> Iterator[Finding]:
    share = run.time_shares.get("communication_s", 0.0)
    if share < SLOW_COMMUNICATION:
        return
    sentences = [say("Ranks exchange gradients, or wait for each other, {share} of the time.", share=f"{share:.0%}")]
    fixes = []
    if run.on_gpu and run.options.get("backend") == "gloo":
        sentences.append(say("They communicate through gloo, over the CPU, because --backend gloo was requested."))
        fixes.append(fix(say("Let the cards communicate directly"), brimful="--backend nccl"))
    if run.on_gpu:
        fixes.append(
            fix(
                say("Measure how fast the cards reach each other, and whether they do so directly"),
                shell="brimful doctor",
            )
        )
    else:
        fixes.append(fix(say("Compare with one process, which exchanges nothing"), brimful="--processes 1"))
    if (accumulation := whole(run.plan, "accumulation")) == 1:
        fixes.append(
            fix(
                say("Exchange gradients less often, with more rows in each step"), costs=say("another experiment"),
                global_batch=say("larger"), brimful=f"--global-batch {2 * (run.rows_per_step or 1)}",
            )
        )  # fmt: skip
    yield _slow(
        "slow-communication", sentences, lost=share, certainty="likely", figures={"communication_share": share, "accumulation": accumulation},
        evidence="events.jsonl, times.communication_s", fixes=fixes
    )  # fmt: skip


def _uneven_ranks(run: RunFigures) -> Iterator[Finding]:
    """One rank computes much longer than the others, which wait for it."""
    busy: dict[int, list[float]] = {}
    for step in run.settled:
        for one in objects(step, "ranks"):
            rank, seconds = whole(one, "rank"), finite(part(one, "times"), "compute_s")
            if rank is not None and seconds is not None:
                busy.setdefault(rank, []).append(seconds)
    if len(busy) < 2:
        return
    typical = {rank: median(values) for rank, values in busy.items()}
    slowest = max(typical, key=lambda rank: typical[rank])
    others = median(seconds for rank, seconds in typical.items() if rank != slowest)
    if not others or typical[slowest] < UNEVEN_RANKS * others:
        return
    yield _slow(
        "slow-rank",
        [say("Rank {rank} computes {seconds} in a step, the others {others}, and they wait for it.", rank=slowest, seconds=show_seconds(typical[slowest]), others=show_seconds(others))],
        lost=1 - others / typical[slowest], certainty="likely", figures={"rank": slowest, "busy_s": typical[slowest], "others_busy_s": others},
        evidence="events.jsonl, ranks.times",
        fixes=[
            fix(say("Look at who else uses the card of rank {rank}, and at its temperature", rank=slowest), shell="brimful machine")
            if run.on_gpu else fix(say("Look at what else computes on the machine of rank {rank}", rank=slowest), shell="top")
        ],
    )  # fmt: skip


# ---- Padding -----------------------------------------------------------------------------------------------------------


def _padding(run: RunFigures) -> Iterator[Finding]:
    padding = run.mean("padding")
    if padding is None or padding < HIGH_PADDING:
        return
    layout, fixes = part(run.choices, "layout"), []
    if run.plan.get("layout") == "padded":
        if layout.get("requested") == "padded":
            fixes.append(
                fix(say("Let rows be packed end to end where the task and the device can"), brimful="--layout auto")
            )
        if not run.options.get("mix"):
            fixes.append(
                fix(
                    say("Sort rows by length over ten steps"), costs=say("rows of one step are more alike than at random"),
                    brimful="--mix window:10",
                )
            )  # fmt: skip
        if isinstance(run.requested("micro_batch"), int):
            fixes.append(
                fix(say("Leave --micro-batch out: the plan then splits a step by the lengths of its rows"), brimful="--micro-batch auto")
            )  # fmt: skip
    yield _slow(
        "slow-padding", [say("{padding} of the positions computed are padding, so about that share of the computation is wasted.", padding=f"{padding:.0%}")],
        lost=0.6 * padding, certainty="likely", figures={"padding": padding, "layout": run.plan.get("layout")}, evidence="events.jsonl, padding", fixes=fixes,
    )  # fmt: skip


# ---- Saves and evaluations ---------------------------------------------------------------------------------------------


def _saves(run: RunFigures) -> Iterator[Finding]:
    yield from _pauses(
        run, "checkpoint", SLOW_SAVES, "slow-saves", "save_every",
        lambda share, each: say("Saving checkpoints takes {share} of the time, {each} each.", share=share, each=each),
        lambda steps, share: say("Save every {steps} steps: predicted {share} of the time", steps=steps, share=share),
    )  # fmt: skip


def _evaluations(run: RunFigures) -> Iterator[Finding]:
    yield from _pauses(
        run, "eval", SLOW_EVALUATIONS, "slow-evaluations", "eval_every",
        lambda share, each: say("Evaluating takes {share} of the time, {each} each.", share=share, each=each),
        lambda steps, share: say("Evaluate every {steps} steps: predicted {share} of the time", steps=steps, share=share),
    )  # fmt: skip


def _pauses(
    run: RunFigures, event: str, most: float, kind: str, option: str, describe: Callable[[str, str], str], advise: Callable[[str, str], str]
) -> Iterator[Finding]:  # fmt: skip
    """What interrupts training. The first and the last are left out: every run has them, however short."""
    pauses = [
        seconds for one in run.events(event) if 0 < one["step"] < run.last_step and (seconds := finite(one, "seconds"))
    ]
    total, step_s = sum(pauses), run.step_s
    if len(pauses) < 2 or not run.wall_s or step_s is None or total < LEAST_LOST_S or total / run.wall_s < most:
        return
    share, each = min(1.0, total / run.wall_s), median(pauses)
    if each > 1e6 * step_s.value:
        return
    every = math.ceil(each / (0.05 * step_s.value))
    every = math.ceil(every / (10 ** max(0, len(str(every)) - 2))) * 10 ** max(0, len(str(every)) - 2)
    predicted = each / (each + every * step_s.value)
    fixes = [
        fix(advise(f"{every:,}", f"{predicted:.0%}"), brimful=f"--{option.replace('_', '-')} {every}", basis="predicted")
    ]  # fmt: skip
    if event == "eval":
        fixes.append(
            fix(
                say("Evaluate on fewer rows, or generate fewer answers"), costs=say("less exact scores"),
                brimful="--eval-rows 200 --generate-rows 20",
            )
        )  # fmt: skip
    yield _slow(
        kind, [describe(f"{share:.0%}", show_seconds(each))], lost=share, certainty="certain",
        figures={"share": share, "seconds_each": each, "count": len(pauses)}, evidence=f"events.jsonl, {event}", fixes=fixes,
    )  # fmt: skip


# ---- The card ----------------------------------------------------------------------------------------------------------


def _empty_card(run: RunFigures) -> Iterator[Finding]:
    """Small memory and low utilisation, and the whole step is one micro-batch: nothing is left to enlarge but the experiment."""
    limit, peak = run.limit_bytes, run.highest("reserved_bytes") or run.highest("peak_bytes")
    used = run.utilization
    if used is None or used >= EMPTY_UTILIZATION or not limit or not peak or peak >= EMPTY_MEMORY * limit:
        return
    if whole(run.plan, "accumulation") != 1 or run.time_shares.get("compute_s", 0.0) < 0.5:
        return
    runs = max(2, min(16, int(0.85 * limit / (peak + GiB))))
    each = flag_bytes(limit / runs)
    yield _slow(
        "card-not-full",
        [
            say("One run uses {used} of the card and {memory} of its {limit}, with all rows of a step in one micro-batch.", used=f"{used:.0%}", memory=show_bytes(peak), limit=show_bytes(limit)),
            say("More rows in a step would be another experiment, but more runs at once would fill the card."),
        ],
        lost=1 - used, certainty="likely", figures={"utilization": used, "peak_bytes": peak, "limit_bytes": limit, "runs_at_once": runs},
        evidence="events.jsonl, sample",
        fixes=[
            fix(say("Train seeds or settings of small heads together"), shell="brimful sweep spec.toml"),
            fix(say("Start {runs} runs at once, each with a part of the memory", runs=runs), brimful=f"--memory-limit {each}", basis="measured"),
        ],
    )  # fmt: skip


def _launches(run: RunFigures) -> Iterator[Finding]:
    """The card is idle although nothing else takes the time: it waits for Python to launch its kernels."""
    used, mfu = run.utilization, run.mean("mfu")
    if used is None or used >= LOW_UTILIZATION or (mfu is not None and mfu >= LOW_MFU):
        return
    if run.time_shares.get("compute_s", 0.0) < LOW_UTILIZATION:
        return
    levers, fixes = part(run.plan, "levers"), []
    chosen_rate = rate_of(chosen_of(run))
    compiled = [
        one
        for one in objects(run.plan, "tried")
        if part(one, "setting").get("compile") == "on" and one.get("fits") and rate_of(one)
    ]
    best = max(compiled, key=lambda one: rate_of(one) or 0.0, default=None)
    if levers.get("compile") == "off":
        if best is not None and chosen_rate and (rate_of(best) or 0.0) > 1.03 * chosen_rate:
            fixes.append(
                fix(
                    say("Compile the blocks: timed by the plan at {ratio} × the speed", ratio=f"{(rate_of(best) or 0.0) / chosen_rate:.2g}"),
                    costs=say("10–80 s, once"), brimful="--compile on", basis="measured",
                )
            )  # fmt: skip
        elif best is None:
            fixes.append(fix(say("Compile the blocks, which launches fewer kernels"), costs=say("10–80 s, once"), brimful="--compile on"))  # fmt: skip
    if levers.get("cuda_graphs") == "off":
        fixes.append(fix(say("Replay micro-batches as a CUDA graph, if rows are packed"), brimful="--layout packed --cuda-graphs on"))  # fmt: skip
    if not fixes:
        return
    sentence = say("The card is busy only {used} of the time, although nothing but computing takes time: it waits for its kernels to be launched.", used=f"{used:.0%}")  # fmt: skip
    known = (
        [sentence]
        if mfu is None
        else [sentence, say("The arithmetic reaches {mfu} of what the card can do.", mfu=f"{mfu:.0%}")]
    )
    yield _slow(
        "launch-bound", known, lost=1 - used, certainty="possible" if mfu is None else "likely", figures={"utilization": used, "mfu": mfu},
        evidence="events.jsonl, sample", fixes=fixes,
    )  # fmt: skip


def _rates(run: RunFigures, label: Callable[[Mapping[str, Any]], str | None]) -> dict[str, Typical]:
    """Tokens/s, else rows/s, of the steps up to each sample of a card, by what the label says of the sample."""
    rates: dict[str, list[float | None]] = {}
    steps, place = run.settled, 0
    name = "tokens_per_s" if any(finite(step, "tokens_per_s") for step in steps[:5]) else "rows_per_s"
    for event, gpu in run.gpu_samples:
        at, found = event.get("step"), label(gpu)
        until = place
        while until < len(steps) and at is not None and steps[until]["step"] <= at:
            until += 1
        if found is not None:
            rates.setdefault(found, []).extend(finite(step, name) for step in steps[place:until])
        place = until
    return {name: typical for name, values in rates.items() if (typical := Typical.of(values)) is not None}


def _slowed(rates: Mapping[str, Typical], then: str, before: str) -> float | None:
    """The share of its speed that is left; None if it is not clearly less."""
    a, b = rates.get(then), rates.get(before)
    if a is None or b is None or min(a.count, b.count) < LEAST_STEPS or not b.value:
        return None
    ratio = a.value / b.value
    error = ratio * math.hypot(a.error / max(a.value, 1e-12), b.error / b.value)
    return ratio if ratio <= SLOWED and ratio + 3 * error < 1 else None


def _others(run: RunFigures) -> Iterator[Finding]:
    def label(gpu: Mapping[str, Any]) -> str | None:
        others, total = whole(gpu, "others_bytes"), whole(gpu, "total_bytes")
        return None if others is None or not total else "shared" if others >= OTHERS_SHARE * total else "alone"

    labels = [label(gpu) for _, gpu in run.gpu_samples]
    shared = labels.count("shared")
    if shared < 3 or shared < 0.1 * len(labels):
        return
    held = max(whole(gpu, "others_bytes") or 0 for _, gpu in run.gpu_samples)
    slowed = _slowed(_rates(run, label), "shared", "alone")
    sentences = [say("Other programs held up to {held} of the card, in {share} of the samples.", held=show_bytes(held), share=f"{shared / len(labels):.0%}")]  # fmt: skip
    if slowed is not None:
        sentences.append(say("Meanwhile steps ran at {ratio} × the speed.", ratio=f"{slowed:.2f}"))
    yield _slow(
        "others-on-card", sentences, lost=0.0 if slowed is None else 1 - slowed, certainty="certain" if slowed is None else "likely",
        figures={"others_bytes": held, "samples": shared, "speed_ratio": slowed}, evidence="events.jsonl, sample",
        fixes=[fix(say("Find out which programs, and stop them or use another card"), saves=show_bytes(held), shell="brimful machine", basis="measured")],
    )  # fmt: skip


def _heat(run: RunFigures) -> Iterator[Finding]:
    def label(gpu: Mapping[str, Any]) -> str | None:
        temperature, used = finite(gpu, "temperature_c"), finite(gpu, "utilization")
        if temperature is None or used is None or used < 0.8:
            return None
        return "hot" if temperature >= HOT_C else "cool" if temperature < COOL_C else None

    slowed = _slowed(_rates(run, label), "hot", "cool")
    if slowed is None:
        return
    hottest = max(finite(gpu, "temperature_c") or 0.0 for _, gpu in run.gpu_samples)
    yield _slow(
        "hot-card",
        [say("While the card is at {hot} °C or more (up to {hottest} °C), steps run at {ratio} × the speed, so it may lower its clock.", ratio=f"{slowed:.2f}", hot=HOT_C, hottest=f"{hottest:.0f}")],
        lost=1 - slowed, certainty="possible", figures={"speed_ratio": slowed, "temperature_c": hottest}, evidence="events.jsonl, sample",
        fixes=[fix(say("Look at its fans and the air around it"), shell="nvidia-smi -q -d PERFORMANCE")],
    )  # fmt: skip


def _swapping(run: RunFigures) -> Iterator[Finding]:
    swap = [value for _, host in run.host_samples if (value := whole(host, "swap_used_bytes")) is not None]
    if len(swap) < 3 or max(swap) - swap[0] < SWAP_BYTES:
        return
    workers = whole(part(run.plan, "host"), "workers")
    fixes = [fix(say("Use fewer workers, which hold rows in RAM"), costs=say("time to read rows, in each step"), brimful=f"--workers {workers // 2}")] if workers else []  # fmt: skip
    yield _slow(
        "host-swapping", [say("The machine moved {swap} of memory to disk during the run, because host RAM was short.", swap=show_bytes(max(swap) - swap[0]))],
        lost=0.3, certainty="certain", figures={"swap_bytes": max(swap) - swap[0]}, evidence="events.jsonl, sample", resource="host",
        fixes=[*fixes, fix(say("Find out what holds the RAM"), shell="brimful doctor")],
    )  # fmt: skip
