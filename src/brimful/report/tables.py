"""Tables for the terminal: a plan, an evaluation and the machine, each readable at 80 columns, in the user's language.

Whatever will end a training (a full GPU, a tiny /dev/shm, a torch without CUDA) is yellow and says what to do.
"""

import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from datetime import datetime
from typing import Any

from rich.cells import cell_len
from rich.console import Console, ConsoleOptions, Group, RenderableType, RenderResult
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from brimful.languages import language, tr, translate
from brimful.machine.gpu import Gpu, describe_holders
from brimful.machine.host import Host, Space
from brimful.machine.machine import Machine
from brimful.planning.plan import COLUMNS, Plan, Setting, Tried
from brimful.report.progress import ZONE_STYLE
from brimful.report.wrapped_text import WrappedText
from brimful.training.plan_history import show_value
from brimful.units import NOTHING, GiB, show_bytes, show_count, show_rate, show_rows, show_seconds

WARNING = "yellow"
BAR_WIDTH = 40
LEAST_REASON = 26
"""Columns that reasons need beside the choices; with fewer they stand below them."""
SAMPLES = 3
"""Answers in the table of an evaluation."""
MAX_TEXT = 200
"""Characters of a text in a table."""
SMALL_SHM_BYTES = GiB
"""Docker gives 64 MiB; four workers with two batches each of 256 float images of 224² pixels need 1.1 GiB."""


# ---- A plan ----------------------------------------------------------------------------------------------------------


def plan_table(plan: Plan, *, wording: Callable[[str], str] = str) -> RenderableType:
    """The headline, the memory, every choice with its reason, how the plan was found, and warnings.

    `wording` turns the arguments that warnings name into what the user typed.
    """
    warnings = [WrappedText(wording(translate(f"warning: {warning}")), style=WARNING) for warning in plan.warnings]
    facts = _facts_grid(_plan_facts(plan).items())
    tried = [tried_table(plan)] if plan.table else []
    return Group(
        WrappedText(translate(plan.headline), style="bold"),
        _plan_memory(plan),
        Text(),
        _Choices(plan),
        Text(),
        facts,
        *warnings,
        *tried,
    )


class _Choices:
    """Every choice with its reason: beside it, or below it where the terminal is too narrow for both."""

    def __init__(self, plan: Plan) -> None:
        self.rows = [tuple(map(translate, choice.cells)) for choice in plan.choices]
        self.changed = [choice.requested not in (None, choice.effective) for choice in plan.choices]

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        header = tuple(map(translate, COLUMNS))
        widths = [max(map(cell_len, column)) for column in zip(header, *self.rows, strict=True)]
        left = options.max_width - sum(width + 2 for width in widths[:-1])
        beside = left >= min(widths[-1], LEAST_REASON)

        def grid(show_header: bool) -> Table:
            table = Table(box=None, padding=(0, 2, 0, 0), pad_edge=False, header_style="dim", show_header=show_header)
            for column, width in zip(header[:-1], widths, strict=False):
                table.add_column(column, no_wrap=True, min_width=width if left >= 0 else None)
            if beside:
                table.add_column(header[-1], overflow="fold")
            return table

        table = grid(show_header=True)
        if not beside:
            yield table
            yield Padding(Text(header[-1], style="dim"), (0, 0, 0, 4))
            table = grid(show_header=False)
        for (name, requested, effective, source, reason), changed in zip(self.rows, self.changed, strict=True):
            cells: list[RenderableType] = [
                name,
                Text(requested, style=WARNING if changed else "dim"),
                Text(effective, style="bold"),
                Text(source, style="dim"),
            ]
            table.add_row(*cells, *([WrappedText(reason)] if beside else []))
            if not beside:
                yield table
                yield Padding(WrappedText(reason, style="dim"), (0, 0, 0, 4))
                table = grid(show_header=False)
        if beside:
            yield table


def _plan_memory(plan: Plan) -> Text:
    """A bar of the limit: how much of it the plan takes, with a mark where `fill` ends."""
    style, full = ZONE_STYLE[plan.zone], min(BAR_WIDTH, round(plan.used * BAR_WIDTH))
    bar = list("█" * full + "░" * (BAR_WIDTH - full))
    mark = min(BAR_WIDTH - 1, round(plan.fill * BAR_WIDTH))
    bar[mark] = "▏" if mark >= full else bar[mark]
    peak = max(plan.measured_peak_bytes, plan.reserved_peak_bytes or 0)
    share = (f"{plan.used:.0%} {translate(plan.zone)}", style)
    taken = tr("{peak} of {limit}, ", peak=show_bytes(peak), limit=show_bytes(plan.limit_bytes))
    return Text.assemble(("".join(bar), style), f" {taken}", share)


def _plan_facts(plan: Plan) -> dict[str, str]:
    measured, predicted = plan.measured_peak_bytes, plan.predicted_peak_bytes
    peak = f"measured {show_bytes(measured)}, predicted {show_bytes(predicted)} ({round(predicted / measured - 1, 3) + 0.0:+.1%})"
    if plan.reserved_peak_bytes:
        peak += f", reserved {show_bytes(plan.reserved_peak_bytes)}"
    largest = (
        f"{show_rows(plan.largest_micro_batch)} ran, with a peak of {show_bytes(plan.largest_measured_peak_bytes)}"
    )
    if plan.one_more_predicted_peak_bytes is None:
        largest += "; the global batch has no more"
    else:
        above = plan.one_more_predicted_peak_bytes > plan.budget_bytes
        largest += f"; one more would need {show_bytes(plan.one_more_predicted_peak_bytes)} (predicted), "
        largest += (
            f"above the budget of {show_bytes(plan.budget_bytes)}"
            if above
            else "and host RAM or time did not allow it"
            if plan.offloaded_bytes
            else "and there was no time to try it"
        )
    planned = f"in {show_seconds(plan.plan_s)} with {plan.probes} probes and {_ooms(plan.ooms)}"
    if plan.cached:
        planned = f"reused from {plan.created}; --no-cache plans again"
    return {"peak": peak, "largest": largest, **_run_facts(plan), "planned": planned}


def _run_facts(plan: Plan) -> dict[str, str]:
    """What a run is predicted to take of host RAM and of time, as far as that is known."""
    facts, host, time = {}, plan.host, plan.run_time
    if host.predicted_bytes is not None:
        predicted, limit = show_bytes(host.predicted_bytes), show_bytes(host.limit_bytes)
        facts["host RAM"] = tr("{predicted} of {limit} (predicted)", predicted=predicted, limit=limit)
    if time is not None:
        steps = tr(
            "{steps}, {per_epoch:,} per epoch", steps=show_count(time.steps, "step"), per_epoch=time.steps_per_epoch
        )
        each = show_seconds(time.step_s)
        total = show_seconds(time.total_s)
        until = "" if time.ends is None else tr(", until {clock}", clock=show_clock(time.ends))
        unknown = tr("; how long they take is unknown")
        known = tr("; {each} each, {total} in all{until} (predicted)", each=each, total=total, until=until)
        facts["time"] = steps + (unknown if time.step_s is None else known)
        if time.step_s is not None and plan.simulation_slowdown > SLOWDOWN:
            facts["time"] += tr("; the rows/s above were timed without the simulated memory limit, which takes {share} more", share=f"{plan.simulation_slowdown - 1:.0%}")  # fmt: skip
    return facts


SLOWDOWN = 1.02
"""A plan whose steps take longer than this in simulated memory says so beside their time."""


def show_clock(time: str, now: datetime | None = None) -> str:
    """A time of an event as a clock shows it here: `09:02`, with the date unless it is today."""
    now = datetime.now().astimezone() if now is None else now
    then = datetime.fromisoformat(time).astimezone(now.tzinfo)
    return f"{then:%H:%M}" if then.date() == now.date() else f"{then:%Y-%m-%d %H:%M}"


def recorded_plan(event: Mapping[str, Any], wording: Callable[[str], str] = str) -> RenderableType:
    """A `plan` event: the plan, after what it changes."""
    table = plan_table(Plan.from_json(dict(event)), wording=wording)
    changed = event.get("changes") or event.get("experiment_reasons")
    return Group(plan_changes(event), Text(), table) if changed else table


def plan_changes(event: Mapping[str, Any]) -> RenderableType:
    """What a resumed run changes, old → new, and whether it is another experiment."""
    number, experiment, reasons = event.get("number"), event.get("experiment"), event.get("experiment_reasons", ())
    is_new = number not in (None, event.get("number_before"))
    heading = (
        tr("plan {number}, with these changes:", number=number) if is_new else tr("changed since the run stopped:")
    )
    grid = Table.grid(padding=(0, 2, 0, 0))
    for change in event["changes"]:
        name = change["name"]
        old, new = (translate(show_value(name, change[side])) for side in ("old", "new"))
        grid.add_row(f"  {translate(name.replace('_', ' '))}", Text.assemble((old, "dim"), " → ", (new, "bold")))
    lines: list[RenderableType] = [Text(heading, style="bold"), grid] if event["changes"] else []
    is_other = experiment == "other"
    verdict = tr("another experiment from here on") if is_other else tr("the same experiment")
    if experiment in ("same", "other"):
        colon = "：" if language() == "zh" else ": "
        sentence = f"{verdict}{colon}{translate('; '.join(reasons))}" if reasons else verdict
        lines.append(Text(sentence, style=WARNING if is_other else ""))
    return Group(*lines)


def tried_table(plan: Plan) -> RenderableType:
    """The best of each setting and every size of the chosen one, the fastest first; then what did not fit or was not tried."""
    data_rows, best = plan.data_rows, dict[Setting, Tried]()
    for one in sorted(plan.tried, key=lambda one: (one.fits, one.data_rows_per_s is not None, one.rate)):
        best[one.setting] = one
    chosen = next(one.setting for one in plan.tried if one.chosen)
    shown = [one for one in plan.tried if one is best[one.setting] or one.setting == chosen]
    table = Table(box=None, padding=(0, 1, 0, 0), pad_edge=False, header_style="dim")
    table.add_column("", no_wrap=True)
    table.add_column(tr("setting"))
    for column in ("micro-batch", "accum.", "peak", "rows/s", "1,000 steps", *([] if data_rows is None else ["epoch"])):
        table.add_column(tr(column), justify="right", no_wrap=True)
    bound, predicted, other = "≥", "*", "†"
    marks = set[str]()
    for one in filter(lambda one: one.fits, shown):
        mark = "→" if one.chosen else "" if one.allowed else other
        at_least = bound if data_rows is not None and one.data_rows_per_s is None else ""
        basis = predicted if one.basis == "predicted" and one.peak_bytes is not None else ""
        step_s = max(plan.deal) / one.rate
        seconds = [1000 * step_s, *([] if data_rows is None else [data_rows / plan.global_batch * step_s])]
        peak, rate = f"{show_bytes(one.peak_bytes)}{basis}", f"{at_least}{show_rate(one.rate)}"
        style = "bold" if one.chosen else "" if one.allowed else "dim"
        table.add_row(
            mark, translate(str(one.setting)), translate(_size(one)), str(one.accumulation), peak, rate, *map(show_seconds, seconds), style=style
        )  # fmt: skip
        marks |= {mark, at_least, basis}
    notes = {
        "→": "chosen",
        predicted: "predicted",
        bound: "timed with the longest rows only; the data's are faster, so that it cannot be compared with a row without ≥",
    }
    notes[other] = "excluded by the options or the task, for comparison only"
    facts = [(mark, note) for mark, note in notes.items() if mark in marks]
    facts += [
        ("too large", f"{one.setting}: needs {show_bytes(one.peak_bytes)} for {_size(one)}, {one.basis}")
        for one in shown
        if not one.fits
    ]
    facts += [("not tried", reason) for reason in plan.not_tried]
    return Group(Text(), table, Text(), _facts_grid(facts))


def _size(one: Tried) -> str:
    return show_rows(one.micro_batch) if one.tokens is None else f"{sum(one.tokens):,} tokens"


# ---- An evaluation ---------------------------------------------------------------------------------------------------


def eval_table(report: Mapping[str, Any]) -> RenderableType:
    """The JSON report of `brimful eval`: scores, a few answers, then memory and time."""
    available, seed = report["rows_available"], report["seed"]
    place = {"model": report["model"], "data": report["data"], "available": available}
    if report["rows"] == available:
        headline = Text(tr("{model!s} on {data!s}: all {available:,} rows", **place))
    else:
        headline = Text(tr("{model!s} on {data!s}: {rows:,} of {available:,} rows (seed {seed})", rows=report["rows"], seed=seed, **place))  # fmt: skip
    headline.highlight_words([report["model"], report["data"]], "bold")
    samples: list[RenderableType] = [Text(), _samples(report["samples"][:SAMPLES])] if report["samples"] else []
    return Group(headline, Text(), _scores(report), *samples, Text(), _eval_facts(report))


def _scores(report: Mapping[str, Any]) -> Table:
    table = Table(box=None, padding=(0, 2, 0, 0), pad_edge=False, show_header=False)
    table.add_column(style="bold", no_wrap=True)
    table.add_column(justify="right", no_wrap=True)
    table.add_column(style="dim", overflow="fold")
    for name, value, note in _score_rows(report):
        table.add_row(translate(name), value, WrappedText(translate(note)))
    return table


def _score_rows(report: Mapping[str, Any]) -> Iterator[tuple[str, str, str]]:
    """Name, value and what it is."""
    if "accuracy" in report:
        yield from _pair_scores(report)
    elif report["loss"] is not None:
        perplexity = report["perplexity"]
        shown = "nan" if math.isnan(report["loss"]) else "above e³⁰⁸"
        if perplexity is not None:
            shown = f"{perplexity:,.2f}" if perplexity < 1e6 else f"{perplexity:.2e}"
        count, kind = report["tokens"], report.get("counted")
        mean = f"mean over {count:,} response tokens"
        if kind == "replies":
            mean = f"mean over {count:,} tokens of replies"
        elif kind == "all":
            mean = f"mean over {count:,} tokens"
        yield "loss", f"{report['loss']:.4f}", mean
        yield "perplexity", shown, "exp(loss)"
    for name, title in (("bleu", "BLEU-4"), ("chrf", "chrF")):
        if report.get(name) is not None:
            answers = report.get("answers", report["rows"])
            yield title, f"{report[name]:.2f}", f"{answers:,} answers, {report['signatures'][name]}"


def _pair_scores(report: Mapping[str, Any]) -> Iterator[tuple[str, str, str]]:
    reference, mean = report["reference"], f"mean over {report['rows']:,} pairs"
    relative = "log-probability per token" if reference is None else f"relative to {reference}"
    scores = [
        ("loss", report["loss"], f"{report['preference_loss']}; {mean}"),
        ("accuracy", report["accuracy"], "share of pairs with a higher reward for chosen"),
        ("margin", report["margin"], f"reward of chosen minus that of rejected; {relative}; {mean}"),
        ("rewards", report["rewards/chosen"], f"of chosen; {report['rewards/rejected']:.4f} of rejected"),
        ("logp_chosen", report["logp_chosen"], f"log-probability of the chosen reply per token; {mean}"),
        ("kl", report.get("kl"), f"to the reference, per token of both replies; {mean}"),
    ]
    for name, score, meaning in scores:
        if score is not None:
            yield name, f"{score:.4f}", meaning


def _samples(samples: Iterable[Mapping[str, str]]) -> Table:
    table = Table(box=None, padding=(0, 2, 0, 0), pad_edge=False, show_header=False)
    table.add_column(style="dim", no_wrap=True)
    table.add_column(overflow="fold")
    for number, sample in enumerate(samples):
        if number:
            table.add_row("", "")
        for name, style in (("prompt", ""), ("response", "bold"), ("reference", "dim")):
            line = " ".join(sample[name].split()) or tr(NOTHING)
            table.add_row(
                translate(name), Text(line if len(line) <= MAX_TEXT else f"{line[: MAX_TEXT - 1]}…", style=style)
            )
    return table


def _eval_facts(report: Mapping[str, Any]) -> Table:
    limits = "+".join(map(str, report["max_tokens"].values()))
    sides = {"chosen": "chosen text", "rejected": "rejected text"}
    longer = [
        f"{count:,}"
        if side == "tokens"
        else f"{count:,} {sides.get(side, side)}{'s' * (count != 1)}"  # a causal model's rows have one part
        for side, count in report["truncated"].items()
        if count
    ]
    truncated = f"{' and '.join(longer)} of {report['rows_available']:,} rows" if longer else "no row"
    facts: list[tuple[str, str | Text]] = [
        ("truncated", f"{truncated} (limit {limits} tokens, {report['max_tokens_reason']})")
    ]
    for kind, plan in report["forward"].items():
        rows, shape = show_rows(plan["largest_batch"]["rows"]), "+".join(map(str, plan["largest_batch"]["shape"]))
        batches = f"{plan['batches']:,} batch{'es' * (plan['batches'] != 1)}, the largest {rows} of {shape}"
        predicted, budget = show_bytes(plan["predicted_added_bytes"]), show_bytes(plan["added_budget_bytes"])
        facts.append((kind, f"{batches} (predicted {predicted}); budget {budget}, {plan['because']}"))
    peak = f"measured peak {show_bytes(report['peak_bytes'])}" if report["peak_bytes"] else "peak not measured here"
    memory = f"{peak}, limit {show_bytes(report['limit_bytes'])} ({report['limit_reason']}), {_ooms(report['ooms'])}"
    facts.append(("memory", Text(translate(memory), style=WARNING if report["ooms"] else "")))
    facts.append(("time", f"{show_seconds(report['seconds'])} on {report['device_name']}"))
    if report["output"]:
        facts.append(("answers", f"Saved to {report['output']}"))
    return _facts_grid(facts)


# ---- The machine -----------------------------------------------------------------------------------------------------


def machine_table(machine: Machine) -> RenderableType:
    """One line per fact, the usable amount first, with the reason if it is not all of it."""
    host, in_container = machine.host, machine.software.in_container
    facts: list[tuple[str, str | Text]] = [(f"{gpu.kind}:{gpu.index}", _gpu(gpu, in_container)) for gpu in machine.gpus]
    facts += [] if machine.gpus else [("GPU", "none; training runs on the CPU")]
    facts += [("RAM", _ram(host)), ("swap", _swap(host)), ("cores", _cores(host))]
    facts += [("/dev/shm", _shm(machine.shm, in_container))] if machine.shm else []
    facts += [("disk", _disk(machine.disk)), ("limits", _limits(host)), ("software", _software(machine))]
    facts += [("note", WrappedText(translate(note), style=WARNING)) for note in machine.notes]
    return _facts_grid(facts)


def _gpu(gpu: Gpu, in_container: bool) -> Text:
    """Yellow if others hold more than a tenth of the GPU: a plan for the empty GPU will not fit."""
    name = gpu.name + (f" (capability {gpu.capability})" if gpu.capability else "")
    free = "free unknown" if gpu.free_bytes is None else f"{show_bytes(gpu.free_bytes)} free"
    text = WrappedText(
        tr("{name}: {free} of {total}; ", name=translate(name), free=translate(free), total=show_bytes(gpu.total_bytes))
    )
    crowded = (gpu.used_by_others_bytes or 0) > (gpu.total_bytes or 0) / 10
    return text.append(translate(describe_holders(gpu, in_container=in_container)), style=WARNING if crowded else "")


def _ram(host: Host) -> str:
    now = f"{show_bytes(host.ram_available_bytes)} available now"
    if host.ram_limit_bytes == host.ram_total_bytes:
        return f"{show_bytes(host.ram_total_bytes)}, all usable; {now}"
    usable = f"{show_bytes(host.ram_limit_bytes)} usable of {show_bytes(host.ram_total_bytes)}"
    return f"{usable} ({host.ram_limited_by}); {now}"


def _swap(host: Host) -> str:
    if not host.swap_total_bytes:
        return "none"
    return f"{show_bytes(host.swap_total_bytes)}, {show_bytes(host.swap_free_bytes)} free"


def _cores(host: Host) -> str:
    if host.cores == host.cores_total:
        return f"{host.cores}, all usable"
    return f"{host.cores} usable of {host.cores_total} ({host.cores_limited_by})"


def _shm(shm: Space, in_container: bool) -> Text:
    """If it is too small, a DataLoader worker dies of a `Bus error`, which does not mention /dev/shm."""
    text = WrappedText(translate(f"{show_bytes(shm.total_bytes)}, {show_bytes(shm.free_bytes)} free"))
    if min(shm.total_bytes, shm.free_bytes) >= SMALL_SHM_BYTES:
        return text
    fix = "start the container with --shm-size=8g or --ipc=host" if in_container else "remount it larger, or empty it"
    problem = "; DataLoader workers pass batches through it and die of a bus error when it is full."
    return text.append(translate(f"{problem} Try: {fix}."), style=WARNING)


def _disk(disk: Space | None) -> str:
    if disk is None:
        return "unknown"
    return f"{show_bytes(disk.free_bytes)} free of {show_bytes(disk.total_bytes)} at {disk.path}"


def _limits(host: Host) -> str:
    files = "no limit" if host.open_files_limit is None else f"{host.open_files_limit:,}"
    locked = "no limit" if host.locked_memory_limit_bytes is None else show_bytes(host.locked_memory_limit_bytes)
    return f"open files {files}, locked memory {locked}"


def _software(machine: Machine) -> str:
    software = machine.software
    driver = software.driver or next((gpu.driver for gpu in machine.gpus if gpu.driver), None)
    parts = [
        f"Python {software.python}",
        f"torch {software.torch}",
        f"CUDA {software.cuda}" if software.cuda else "",
        f"driver {driver}" if driver else "",
        software.platform,
        f"in a container ({software.container_sign})" if software.in_container else "",
    ]
    return ", ".join(part for part in parts if part)


# ---- Parts -----------------------------------------------------------------------------------------------------------


def _facts_grid(facts: Iterable[tuple[str, str | Text]]) -> Table:
    """A name and a line per fact."""
    grid = Table.grid(padding=(0, 2, 0, 0))
    grid.add_column(style="bold", no_wrap=True)
    grid.add_column(overflow="fold")
    for name, fact in facts:
        grid.add_row(translate(name), WrappedText(translate(fact)) if isinstance(fact, str) else fact)
    return grid


def _ooms(count: int) -> str:
    return f"{count or 'no'} out-of-memory error{'s' * (count != 1)}"
