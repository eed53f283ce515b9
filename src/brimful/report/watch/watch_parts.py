"""The parts of the view that are lines of text: the run as a whole, where a step's time goes, scores, checkpoints, errors, notes.

A part is a function of the canvas and of the lines it may use; it draws what matters most first. The table of cards and RAM has a bar as
long as the limit: ours comes from the left, what others take of the limit from the right, so the gap between them is what the run can
still get; the mark is the plan's predicted peak. Its columns never move.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from rich.cells import cell_len
from rich.text import Text

from brimful.languages import tr, translate
from brimful.report.watch.run_snapshot import NO_EVENTS, Card, HostMemory, Note, Oom
from brimful.report.watch.watch_canvas import (
    UNKNOWN,
    Canvas,
    Lines,
    align_right,
    known,
    memory_bar,
    progress_bar,
    show_age,
    show_clock,
    show_epoch,
    show_learning_rate,
    show_metric,
    show_percent,
    show_size,
    show_step,
    stacked_bar,
    wrap,
)
from brimful.units import Zone, show_rate, show_seconds

STATE_STYLES = {
    "preparing": "cyan", "running": "green", "finished": "green", "interrupted": "yellow", "time-limit": "yellow", "patience": "yellow",
    "failed": "bold red", "killed": "bold red", "gone": "bold red",
}  # fmt: skip
PART_STYLES = ("green", "yellow", "magenta", "bright_black")
"""Of compute, data, communication and other."""
ETA_CELLS, SECONDS_CELLS = 25, 10
NOTE_LINES = 12
"""The most lines of notes that are of use."""
WRAPPED_LINES = 3
"""Lines of one long note, where there is space."""


# ---- The run as a whole ----------------------------------------------------------------------------------------------


def header(canvas: Canvas) -> Text:
    """State, name and task; since when. Where it runs, if there is space."""
    snapshot = canvas.snapshot
    state = canvas.text(
        f"{canvas.glyphs.bullet} {tr(snapshot.state_label or snapshot.state)}", STATE_STYLES[snapshot.state]
    )
    task = f"  {snapshot.task}" if snapshot.task and snapshot.task != snapshot.name else ""
    left = Text.assemble(state, canvas.text(f"  {snapshot.name}", "bold"), canvas.text(task, "dim"))
    several = f"{len(snapshot.cards)} × " if len(snapshot.cards) > 1 else ""
    device = f"{several}{translate(snapshot.device_name)}" if snapshot.device_name else ""
    places = (device, snapshot.host, f"pid {snapshot.pid}" if snapshot.pid else "")
    where = canvas.text("  " + tr(", ").join(place for place in places if place), "dim")
    when = _when(canvas)
    if left.cell_len + where.cell_len + when.cell_len + 4 <= canvas.width:
        left = Text.assemble(left, where)
    return Text.assemble(canvas.pad(left, max(0, canvas.width - when.cell_len - 1)), " ", when)


def _when(canvas: Canvas) -> Text:
    snapshot, now = canvas.snapshot, canvas.snapshot.taken
    if snapshot.silent_s is not None:
        return canvas.text(tr("no news for {time!s}", time=show_age(snapshot.silent_s)), "yellow")
    if snapshot.is_active and snapshot.since is not None:
        lasted = show_age((now - snapshot.since).total_seconds())
        return canvas.text(f"{tr('since')} {show_clock(snapshot.since, now)}{tr(', ')}{lasted}")
    return canvas.text(f"{tr('ended')} {show_clock(snapshot.ended, now)}" if snapshot.ended is not None else "")


def progress(canvas: Canvas) -> Lines:
    """Steps with the time left, then epochs and what a step is."""
    snapshot = canvas.snapshot
    share = min(1.0, snapshot.step / snapshot.steps) if snapshot.steps else None
    total = f"{snapshot.steps:,}" if snapshot.steps else UNKNOWN
    count = canvas.text(f"{snapshot.step:,}/{total}".rjust(2 * len(total) + 1), "bold")
    done = canvas.text(f"{UNKNOWN if share is None else math.floor(100 * share)} %".rjust(6))
    cells = max(0, canvas.text_cells - count.cell_len - done.cell_len - ETA_CELLS - 2)
    bar = progress_bar(cells, share, STATE_STYLES[snapshot.state], canvas.glyphs)
    steps = Text.assemble(count, " ", bar, done, " ", align_right(_time_left(canvas), ETA_CELLS))
    facts = [f"{show_epoch(snapshot.epoch)}/{show_epoch(snapshot.epochs)}"]
    facts += [f"{show_seconds(snapshot.step_s)}{tr('/step')}"] if snapshot.step_s is not None else []
    if snapshot.global_batch and snapshot.micro_batches:
        rows, count_of = snapshot.global_batch, snapshot.micro_batches
        several = tr("{rows:,} rows in {count:,} micro-batches", rows=rows, count=count_of)
        facts.append(tr("{rows:,} rows in one micro-batch", rows=rows) if count_of == 1 else several)
    facts += [translate(fact) for fact in (snapshot.precision, snapshot.layout) if fact]
    return [canvas.row(tr("step"), steps), canvas.row(tr("epoch"), canvas.facts(facts))]


def _time_left(canvas: Canvas) -> Text:
    snapshot = canvas.snapshot
    if snapshot.eta_s is not None and snapshot.ends is not None:
        left = f"{show_age(snapshot.eta_s)}{tr(', ')}{show_clock(snapshot.ends, snapshot.taken)}"
        return Text.assemble(canvas.text(f"{tr('ETA')} ", "dim"), canvas.text(left))
    if snapshot.ended is not None and snapshot.trained_s is not None:
        return canvas.text(f"{tr('took')} {show_age(snapshot.trained_s)}")
    return canvas.text(f"{tr('ETA')} {UNKNOWN}", "dim")


ERROR_LINES = 6
"""Of the sentence with which a run ended. An error that names what would fit has five at 80 columns."""


def ending(canvas: Canvas) -> Lines:
    """How the run ended, and the command that continues it. Before the first step: what is being waited for."""
    snapshot, style = canvas.snapshot, STATE_STYLES[canvas.snapshot.state]
    if snapshot.state == "running" or (snapshot.state == "preparing" and snapshot.step):
        return []
    sentences = {
        "preparing": tr("The plan is made; the first step has not ended yet.") if snapshot.cards else tr("Data and plan are being prepared; the first step has not begun."),
        "killed": translate(NO_EVENTS) if snapshot.sentence == NO_EVENTS else tr("Its process has ended without a word: it was killed, or the machine went down."),
        "gone": tr("The folder of this run was removed."),
    }  # fmt: skip
    sentence = " ".join(sentences.get(snapshot.state, canvas.wording(translate(snapshot.sentence or ""))).split())
    lines = wrap(canvas.text(sentence, style), canvas.width)[:ERROR_LINES] if sentence else []
    if snapshot.resume_command:
        template = "Fix this first, then continue: {command}" if snapshot.fails_again else "To continue: {command}"
        lines.append(canvas.text(tr(template, command=snapshot.resume_command)))
    return lines


def footer(canvas: Canvas, keys: str | None) -> Text:
    """What the keys do, news about other runs, and the time of the snapshot."""
    snapshot = canvas.snapshot
    clock = canvas.text(snapshot.taken.astimezone().strftime("%H:%M:%S"), "dim")
    if snapshot.problem:
        news = canvas.text(" ".join(snapshot.problem.split()), "yellow")
    elif snapshot.switched_from:
        news = canvas.text(tr("a newer run has begun; before it this was {run!s}", run=snapshot.switched_from), "cyan")
    else:
        runs = tr(", ").join(snapshot.also_running)
        news = canvas.text(tr("also running: {runs!s}", runs=runs) if runs else "", "dim")
    left = Text.assemble(canvas.text(f"{keys}  " if keys else "", "dim"), news)
    return Text.assemble(canvas.pad(left, max(0, canvas.width - clock.cell_len - 1)), " ", clock)


# ---- Speed -----------------------------------------------------------------------------------------------------------


def step_time(canvas: Canvas) -> Lines:
    """Where the time of a step goes, as one bar, and what its parts are; then a bar for each rank, with its padding."""
    snapshot = canvas.snapshot
    seconds = align_right(canvas.text(known(snapshot.step_s, show_seconds)), SECONDS_CELLS)
    cells = max(0, canvas.text_cells - SECONDS_CELLS)
    whole = sum(part for _, part in snapshot.times)
    if not whole:
        unknown = canvas.pad(canvas.text(tr("its parts are unknown"), "dim"), cells)
        return [canvas.row(tr("time"), Text.assemble(unknown, seconds))]
    shares = [part / whole for _, part in snapshot.times]
    bar = stacked_bar(cells, shares, PART_STYLES, canvas.glyphs)
    legend = [
        Text.assemble((glyph, style), canvas.text(f" {tr(name)} "), (show_percent(share).rjust(5), "bold"))
        for (name, _), share, glyph, style in zip(snapshot.times, shares, canvas.glyphs.parts, PART_STYLES, strict=True)
        if share or name in ("compute", "data")
    ]
    of_ranks = [card for card in snapshot.cards if card.times] if len(snapshot.cards) > 1 else []
    heading, each = canvas.row(tr("time"), Text.assemble(bar, seconds)), [_rank_time(canvas, card) for card in of_ranks]
    return [heading, canvas.row("", canvas.side_by_side(legend, "  ")), *each]


def _rank_time(canvas: Canvas, card: Card) -> Text:
    whole = sum(part for _, part in card.times)
    padding = "" if card.padding is None else f"{tr('padding')} {show_percent(card.padding)}"
    figures = canvas.text(f" {padding}" if padding else "", "dim")
    shares = [part / whole for _, part in card.times]
    bar = stacked_bar(max(0, canvas.text_cells - figures.cell_len), shares, PART_STYLES, canvas.glyphs)
    return canvas.row(_card_name(card), Text.assemble(bar, figures))


def figures(canvas: Canvas) -> Text:
    """Learning rate, gradient norm, padding, MFU, tokens per second."""
    snapshot = canvas.snapshot
    values = [
        ("", known(snapshot.lr, show_learning_rate)),
        (tr("gradient norm"), known(snapshot.grad_norm, show_metric)),
        (tr("padding"), show_percent(snapshot.padding)),
        ("MFU", show_percent(snapshot.mfu)),
        (tr("tokens/s"), known(snapshot.tokens_per_s, show_rate)),
    ]
    cells = []
    for name, value in values:
        style = "dim" if value == UNKNOWN else "red" if "nan" in value or "inf" in value else ""
        cells.append(Text.assemble(canvas.text(f"{name} " if name else "", "dim"), canvas.text(value.ljust(7), style)))
    return canvas.row(tr("lr"), canvas.side_by_side(cells, "  "))


# ---- Events ----------------------------------------------------------------------------------------------------------


def scores(canvas: Canvas) -> Text:
    """The last evaluation and the best one."""
    last, best = canvas.snapshot.evaluation, canvas.snapshot.best
    if last is None:
        return canvas.row(tr("scores"), canvas.text(tr("no evaluation yet"), "dim"))
    metrics = [f"{translate(name)} {show_metric(value)}" for name, value in last.metrics] or [UNKNOWN]
    facts = [f"{show_step(last.step)}{tr(': ')}{metrics[0]}", *metrics[1:2]]
    if best is not None and best.step == last.step:
        facts.append(tr("the best so far"))
    elif best is not None and best.metrics:
        name, value = best.metrics[0]
        facts.append(
            tr("best {score!s} at step {step:,}", score=f"{translate(name)} {show_metric(value)}", step=best.step)
        )
    return canvas.row(tr("scores"), canvas.facts([*facts, *metrics[2:]]))


def checkpoints(canvas: Canvas) -> Lines:
    """The last one; before it a later save that failed."""
    saved, failed = canvas.snapshot.checkpoint, canvas.snapshot.failed_save
    lines = []
    if failed is not None:
        problem = " ".join(translate(failed.failure or "").split())
        sentence = tr("step {step:,} could not be saved: {problem}", step=failed.step, problem=problem)
        lines.append(canvas.row(tr("saved"), canvas.text(sentence, "red")))
    if saved is None:
        return [*lines, canvas.row(tr("saved"), canvas.text(tr("no checkpoint yet"), "dim"))]
    facts = [show_step(saved.step), canvas.when(saved.time)]
    facts += [show_size(saved.size_bytes)] if saved.size_bytes is not None else []
    facts += [f"{tr('took')} {show_seconds(saved.seconds)}"] if saved.seconds is not None else []
    return [*lines, canvas.row(tr("saved"), canvas.facts(facts))]


def out_of_memory(canvas: Canvas, lines: int) -> Lines:
    """In one line the last error; else how many there were and the latest of them, each with what changed and whether it was undone."""
    snapshot = canvas.snapshot
    if not snapshot.ooms:
        return [canvas.row(tr("OOMs"), canvas.text(tr("none"), "dim"))]
    count = tr("{count:,} survived", count=snapshot.ooms_survived)
    if lines == 1:
        return [canvas.row(tr("OOMs"), canvas.facts([count, *_oom(canvas, snapshot.ooms[-1])], "yellow"))]
    restored = all(oom.restored_step is not None for oom in snapshot.ooms)
    state = tr("micro-batch size restored") if restored else tr("micro-batch size not restored yet")
    latest = (canvas.text(" · ".join([*_oom(canvas, oom), translate(oom.what)])) for oom in reversed(snapshot.ooms))
    heading = canvas.row(tr("OOMs"), canvas.facts([count, state], "yellow"))
    return [heading, *(canvas.row("", line) for line in _newest(canvas, latest, lines - 1))]


def _oom(canvas: Canvas, oom: Oom) -> list[str]:
    rank = f" {tr('rank {rank:,}', rank=oom.rank)}" if (canvas.snapshot.processes or 1) > 1 else ""
    step = oom.restored_step
    restored = tr("not restored yet") if step is None else tr("restored at step {step:,}", step=step)
    return [f"{show_step(oom.step)}{rank}{tr(', ')}{canvas.when(oom.time)}", restored, translate(oom.change)]


def notes(canvas: Canvas, lines: int) -> Lines:
    drawn = _newest(canvas, (_note(canvas, note) for note in reversed(canvas.snapshot.notes)), lines)
    return [canvas.row("" if number else tr("notes"), line) for number, line in enumerate(drawn)]


def _note(canvas: Canvas, note: Note) -> Text:
    clock = show_clock(note.time, canvas.snapshot.taken) if note.time else ""
    head = " ".join(filter(None, (clock, show_step(note.step) if note.step else "", "!" if note.warning else "")))
    words = canvas.wording(translate(note.sentence)).split()
    sentence = canvas.text(" ".join(words), "yellow" if note.warning else "")
    return Text.assemble(canvas.text(f"{head} " if head else "", "dim"), sentence)


def _newest(canvas: Canvas, texts: Iterator[Text], lines: int) -> Lines:
    """As many of these texts as there are lines, the newest last and, if it can be, in full."""
    drawn: Lines = []
    for text in texts:
        room = lines - len(drawn)
        if room <= 0:
            break
        wrapped = wrap(text, canvas.text_cells)[:WRAPPED_LINES]
        if len(wrapped) > room:  # the last line is cut
            start = sum(len(line.plain) + 1 for line in wrapped[: room - 1])
            wrapped = [*wrapped[: room - 1], text[start:]]
        drawn = [*wrapped, *drawn]
    return drawn


ZONE_STYLES: dict[Zone | None, str] = {"safe": "green", "edge": "yellow", "danger": "bold red", None: ""}
LEAST_BAR, GOOD_BAR = 12, 24
"""Cells of a bar: at least, and before there are more columns than the essential ones."""
ESSENTIAL = 8
"""Columns that come before a longer bar."""
NOTABLE = 0.02
"""The share of a limit from which on the memory of others is coloured."""
_COLUMNS = (
    ("ours", "ours", 8), ("limit", "limit", 8), ("used", "used", 5), ("zone", "", 6), ("others", "others", 8), ("busy", "busy", 5),
    ("temperature", "temp.", 5), ("power", "power", 6), ("planned", "planned", 8), ("allocated", "allocated", 9), ("held", "held now", 8),
)  # fmt: skip
"""Name, heading and cells, the most important first."""
_ORDER = ("ours", "allocated", "held", "others", "limit", "planned", "used", "zone", "busy", "temperature", "power")


def memory_table(canvas: Canvas, lines: int) -> Lines:
    """A heading, the cards, RAM, and as much of `memory_facts` as there is space for."""
    cards = canvas.snapshot.cards
    facts = memory_facts(canvas)
    facts = facts[: max(0, lines - 2 - len(cards))]
    shown = _most_important(cards, max(1, lines - 2 - len(facts)))
    table = [_heading(canvas), *(_draw_row(canvas, _card_row(card)) for card in shown)]
    if len(shown) < len(cards):
        table.append(_rest_of(canvas, [card for card in cards if card not in shown]))
    if canvas.snapshot.ram is not None:
        table.append(_draw_row(canvas, _ram_row(canvas.snapshot.ram)))
    return [*table, *facts]


def memory_facts(canvas: Canvas) -> Lines:
    """Below the table: the slowest rank, and what else is known of the host."""
    slowest = [canvas.row("▸", canvas.text(sentence, "yellow")) for sentence in _slowest(canvas.snapshot.cards)]
    facts = _host_facts(canvas.snapshot.ram)
    return [*slowest, *([canvas.row("", canvas.facts(facts))] if facts else [])]


def card_label(card: Card) -> str:
    return _card_name(card) + "▸" * card.slowest


def _card_name(card: Card) -> str:
    return tr("rank {rank:,}", rank=card.rank) if card.label.startswith("rank") else card.label


def _most_important(cards: Sequence[Card], lines: int) -> list[Card]:
    """All, or the slowest and the fullest of them, with a line left for the rest."""
    if len(cards) <= lines:
        return list(cards)
    ranked = sorted(cards, key=lambda card: (not card.slowest, -(card.used or 0.0), card.rank))
    return sorted(ranked[: lines - 1], key=lambda card: card.rank)


def _rest_of(canvas: Canvas, cards: Sequence[Card]) -> Text:
    used = max(card.used or 0.0 for card in cards)
    sentence = tr("and {count:,} more cards, {share:.0%} used at most", count=len(cards), share=used)
    return canvas.row("", canvas.text(sentence, "dim"))


def _slowest(cards: Sequence[Card]) -> list[str]:
    busy = [(card.busy_s, card) for card in cards if card.busy_s is not None]
    slow = next((one for one in busy if one[1].slowest), None)
    if slow is None:
        return []
    fast = min(busy, key=lambda one: one[0])
    names = {"card": _card_name(slow[1]), "time": show_seconds(slow[0]), "other": _card_name(fast[1]), "least": show_seconds(fast[0])}  # fmt: skip
    return [tr("slowest: {card!s} is busy for {time!s} of a step, {other!s} for {least!s}", **names)]


def _host_facts(ram: HostMemory | None) -> list[str]:
    if ram is None:
        return []
    facts = [tr("{count:,} workers", count=ram.workers)] if ram.workers is not None else []
    if ram.swap_total_bytes:
        used, total = show_size(ram.swap_used_bytes), show_size(ram.swap_total_bytes)
        facts.append(tr("swap {used!s} of {total!s}", used=used, total=total))
    elif ram.swap_total_bytes is not None:
        facts.append(tr("no swap"))
    if ram.read_bytes_per_s is not None:
        facts.append(tr("reads {size!s}/s", size=show_size(ram.read_bytes_per_s)))
    return [*facts, *([f"{tr('limit')}{tr(': ')}{translate(ram.limited_by)}"] if ram.limited_by else [])]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Row:
    """What a line of the table shows; sizes as shares of the limit for the bar."""

    label: str
    ours: float
    others: float
    planned: float | None
    zone: Zone | None
    texts: dict[str, str]


def _card_row(card: Card) -> _Row:
    """Only what others hold above the part that the limit leaves to them is taken from us."""
    others = card.others_bytes or 0.0
    if card.total_bytes and card.limit_bytes:
        others = max(0.0, others - max(0.0, card.total_bytes - card.limit_bytes))
    texts = {
        "ours": show_size(card.ours_bytes), "others": show_size(card.others_bytes), "limit": show_size(card.limit_bytes),
        "planned": show_size(card.predicted_bytes), "allocated": show_size(card.allocated_bytes), "held": show_size(card.held_bytes),
        "used": show_percent(card.used), "busy": show_percent(card.utilization),
        "temperature": UNKNOWN if card.temperature_c is None else f"{card.temperature_c:.0f} °C",
        "power": UNKNOWN if card.power_w is None else f"{card.power_w:.0f} W",
    }  # fmt: skip
    limit = card.limit_bytes
    planned = _share(card.predicted_bytes, limit) or None
    return _Row(label=card_label(card), ours=_share(card.ours_bytes, limit), others=_share(others, limit), planned=planned, zone=card.zone, texts=texts)  # fmt: skip


def _ram_row(ram: HostMemory) -> _Row:
    others = None
    if ram.machine_bytes is not None and ram.tree_bytes is not None:
        others = max(0.0, ram.machine_bytes - ram.tree_bytes)
    texts = {
        "ours": show_size(ram.tree_bytes), "others": show_size(others), "limit": show_size(ram.limit_bytes),
        "planned": show_size(ram.predicted_bytes), "used": show_percent(ram.used), "busy": show_percent(ram.cpu),
    }  # fmt: skip
    limit = ram.limit_bytes
    planned = _share(ram.predicted_bytes, limit) or None
    return _Row(label=tr("RAM"), ours=_share(ram.tree_bytes, limit), others=_share(others, limit), planned=planned, zone=ram.zone, texts=texts)  # fmt: skip


def _share(size: float | None, limit: float | None) -> float:
    return size / limit if size is not None and limit else 0.0


def _columns(canvas: Canvas) -> tuple[int, list[tuple[str, str, int]]]:
    """Cells of the bar, and the columns beside it: as many as there is space for."""
    left, chosen = canvas.text_cells - LEAST_BAR, []
    on_cpu = all(card.kind == "cpu" for card in canvas.snapshot.cards)
    columns = [one for one in _COLUMNS if not on_cpu or one[0] not in ("temperature", "power", "allocated", "held")]
    for number, (name, english, least) in enumerate(columns):
        heading = tr(english) if english else ""
        cells = max(least, cell_len(heading))
        if cells + 1 > left - (GOOD_BAR - LEAST_BAR if number >= ESSENTIAL else 0):
            break
        left -= cells + 1
        chosen.append((name, heading, cells))
    return LEAST_BAR + left, sorted(chosen, key=lambda column: _ORDER.index(column[0]))


def _heading(canvas: Canvas) -> Text:
    bar_cells, columns = _columns(canvas)
    full, other, mark = canvas.glyphs.full, canvas.glyphs.other, canvas.glyphs.mark
    short = f"{full}{tr('ours')} {other}{tr('others')}"
    legends = (f"{full} {tr('ours')} {other} {tr('others')} {mark} {tr('plan')}", short, "")
    legend = next(text for text in legends if cell_len(text) <= bar_cells)
    headings = [align_right(canvas.text(heading, "dim"), cells + 1) for _, heading, cells in columns]
    return canvas.row("", Text.assemble(canvas.pad(canvas.text(legend, "dim"), bar_cells), *headings))


def _draw_row(canvas: Canvas, row: _Row) -> Text:
    bar_cells, columns = _columns(canvas)
    zone_style = ZONE_STYLES[row.zone]
    bar = memory_bar(bar_cells, row.ours, row.others, mark=row.planned, style=zone_style, glyphs=canvas.glyphs)
    styles = {
        "ours": "bold",
        "others": "magenta" if row.others > NOTABLE else "",
        "used": zone_style,
        "zone": zone_style,
    }
    styles |= dict.fromkeys(("planned", "allocated", "held"), "dim")
    texts = {**row.texts, "zone": tr(row.zone) if row.zone else ""}
    cells = []
    for name, _, count in columns:
        text = texts.get(name, "")
        cell = canvas.text(text, "dim" if text == UNKNOWN else styles.get(name, ""))
        left_aligned = name == "zone"  # a word
        cells.append(canvas.pad(Text.assemble(" ", cell), count + 1) if left_aligned else align_right(cell, count + 1))
    return canvas.row(row.label, Text.assemble(bar, *cells))
