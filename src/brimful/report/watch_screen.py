"""How `brimful watch` looks: a `Snapshot` drawn into a given number of columns and lines.

Space goes to what matters most. Each part of the view has a list of wishes (1 line for the loss, later 3 lines for the loss), and they
are granted in the order of importance while there are lines left: 80 × 24 shows every figure, a wide terminal gets two columns, boxes
and real charts. Every part keeps its place and its width while its figures change, so nothing jumps. Colour only repeats what a word
or a glyph says.
"""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from datetime import datetime
from itertools import zip_longest

from rich.cells import cell_len
from rich.console import Group, RenderableType
from rich.text import Text

from brimful.languages import tr, translate
from brimful.report.progress import UNKNOWN, show_metric
from brimful.report.run_snapshot import Card, Oom, Series, Snapshot
from brimful.report.sparklines import (
    UNICODE,
    Glyphs,
    Mark,
    Range,
    curve_range,
    line_chart,
    memory_bar,
    progress_bar,
    sparkline,
    stacked_bar,
)
from brimful.units import GiB, KiB, MiB, TiB, Zone, show_bytes, show_rate, show_seconds, zone

WIDE, TALL = 132, 30
"""From this size on there are two columns, with boxes."""
LEFT_COLUMNS = 86
"""The least width of the left column: the table of cards."""
CHART_LINES = 7
"""The least height of a chart in a box."""
LEAST_BAR, GOOD_BAR, ESSENTIAL = 12, 24, 8
"""Cells of a memory bar in a narrow terminal, and those that it has before there are more than the essential columns."""
ETA_CELLS, STATS_CELLS, AXIS_CELLS = 25, 14, 9
STATE_STYLES = {
    "preparing": "cyan", "running": "green", "finished": "green", "interrupted": "yellow", "time-limit": "yellow",
    "failed": "bold red", "killed": "bold red", "gone": "bold red",
}  # fmt: skip
ZONE_STYLES: Mapping[Zone | None, str] = {"safe": "green", "edge": "yellow", "danger": "bold red", None: ""}
PART_STYLES = ("green", "yellow", "magenta", "bright_black")
"""Of compute, data, communication and other."""

NOTE_LINES = 12
CUT_CELLS = 16
"""A fact is not cut to less than this."""

Lines = list[Text]
Show = Callable[[float], str]


def render(
    snapshot: Snapshot, width: int, height: int, *, glyphs: Glyphs = UNICODE, footer: str | None = None
) -> RenderableType:
    """One frame of at most `height` lines, none wider than `width`. `footer` says what the keys do and stays at the bottom."""
    return Group(*frame(snapshot, width, height, glyphs=glyphs, footer=footer))


def frame(
    snapshot: Snapshot, width: int, height: int, *, glyphs: Glyphs = UNICODE, footer: str | None = None
) -> Lines:
    """The lines of `render`."""
    width, height = max(20, width), max(3, height)
    draw = _two_columns if width >= WIDE and height >= TALL and snapshot.cards else _one_column
    return [_crop(line, width, glyphs) for line in draw(snapshot, width, height, glyphs, footer)[:height]]


# ---- Layout ----------------------------------------------------------------------------------------------------------


def _one_column(snapshot: Snapshot, width: int, height: int, glyphs: Glyphs, footer: str | None) -> Lines:
    parts = _Parts(snapshot, width, glyphs)
    table = min(len(snapshot.cards), max(1, height // 2 - 4)) + 2  # with a heading and the RAM
    wishes = [("header", 1), ("footer", 1), ("ending", 1), ("progress", 1), ("memory", table), ("ending", 2), ("ooms", 1)]
    wishes += [("loss", 1), ("rows", 1), ("time", 1), ("saved", 1), ("notes", 1), ("time", 2), ("ending", 3)]
    wishes += [("evaluation", 1), ("facts", 1), ("progress", 2), ("memory", table + parts.more_of_memory)]
    wishes += [("gap 1", 1), ("gap 3", 1), ("notes", 2), ("loss", 3), ("ooms", 2), ("gap 2", 1), ("gap 4", 1), ("notes", 3)]  # fmt: skip
    wishes += [("rows", 3), ("ooms", 3), ("loss", 5), ("memory chart", 4), ("notes", 6), ("ooms", 6), ("loss", 9), ("rows", 5)]  # fmt: skip
    wishes += [("memory chart", 6), ("loss", 14), ("rows", 8), ("memory chart", 9), ("loss", 99)]
    order = ("header", "progress", "ending", "gap 1", "memory", "gap 2", "time", "gap 3", "loss", "rows", "memory chart", "facts", "evaluation", "saved", "ooms", "gap 4", "notes")  # fmt: skip
    lines = allot(height, wishes, parts.most)
    drawn = [line for name in order for line in parts.draw(name, lines.get(name, 0))]
    if footer is not None:
        drawn += [Text()] * (height - len(drawn) - 1)
    return [*drawn, parts.footer(footer)] if lines.get("footer") else drawn


def _two_columns(snapshot: Snapshot, width: int, height: int, glyphs: Glyphs, footer: str | None) -> Lines:
    left = max(LEFT_COLUMNS, width * 48 // 100)
    whole, parts = _Parts(snapshot, width - 4, glyphs), _Parts(snapshot, left - 4, glyphs)
    head = [line for name in ("header", "progress", "ending") for line in whole.draw(name, whole.most.get(name, 0))]
    top = _box(head, width, glyphs, title=f"brimful watch {snapshot.run}")
    rest = height - len(top) - 1
    table = min(len(snapshot.cards), max(2, rest // 3)) + 2
    wishes = [("memory", table), ("time", 2), ("ooms", 1), ("training", 3), ("notes", 2)]
    wishes += [("memory", table + parts.more_of_memory), ("training", 9), ("ooms", 4), ("notes", 5), ("ooms", 8), ("notes", 12)]  # fmt: skip
    lines = allot(rest, wishes, parts.most, overhead=2)
    titles = {"memory": tr("memory"), "time": tr("time of a step"), "training": tr("training"), "ooms": tr("out-of-memory errors"), "notes": tr("notes")}  # fmt: skip
    column: Lines = []
    for name, title in titles.items():
        if lines.get(name):
            column += _box(parts.draw(name, lines[name]), left, glyphs, title=title)
    column += _Parts(snapshot, left, glyphs).boxed_charts(rest - len(column), ("busy", "rate"))
    charts = _Parts(snapshot, width - left - 1, glyphs).boxed_charts(rest, ("loss", "rows", "peak"))
    body = [Text.assemble(_pad(one, left, glyphs), " ", other) for one, other in zip_longest(column, charts, fillvalue=Text())]  # fmt: skip
    return [*top, *body, whole.footer(footer)]


def allot(
    height: int, wishes: Iterable[tuple[str, int]], most: Mapping[str, int], *, overhead: int = 0
) -> dict[str, int]:
    """Lines for each part: wish by wish, those that still fit. No part gets more lines than it has; its first costs `overhead`.

    Charts and notes take what is left of a wish that does not fit.
    """
    lines: dict[str, int] = {}
    for name, wish in wishes:
        have, wish = lines.get(name, 0), min(wish, most.get(name, 0))
        left = height - sum(lines.values()) - overhead * len(lines) - (0 if have else overhead)
        if wish > have and (wish - have <= left or wish == most[name] == 99):
            lines[name] = min(wish, have + left)
    return {name: count for name, count in lines.items() if count > 0}


def _box(lines: Lines, width: int, glyphs: Glyphs, *, title: str, right: Text | None = None) -> Lines:
    """The lines in a frame with a title."""
    top_left, top_right, bottom_left, bottom_right, across, down = glyphs.box
    head = _crop(Text(f" {glyphs.text(title)} ", "bold"), width - 6, glyphs)
    tail = Text.assemble(" ", right, " ") if right is not None else Text()
    if head.cell_len + tail.cell_len > width - 6:
        tail = Text()
    rule = across * (width - 4 - head.cell_len - tail.cell_len)
    top = Text.assemble((top_left + across, "dim"), head, (rule, "dim"), tail, (across + top_right, "dim"))
    body = [Text.assemble((f"{down} ", "dim"), _pad(line, width - 4, glyphs), (f" {down}", "dim")) for line in lines]
    return [top, *body, Text(bottom_left + across * (width - 2) + bottom_right, "dim")]


# ---- Parts -----------------------------------------------------------------------------------------------------------


class _Parts:
    """Every part of the view, each as many lines as it is given."""

    def __init__(self, snapshot: Snapshot, width: int, glyphs: Glyphs) -> None:
        self.snapshot, self.width, self.glyphs = snapshot, width, glyphs
        names = (tr("step"), tr("epoch"), tr("RAM"), tr("time"), tr("loss"), tr("rows/s"), tr("lr"), tr("scores"), tr("saved"), tr("OOMs"), tr("notes"), tr("peak"))  # fmt: skip
        cards = (f"{card.label}{'▸' * card.slowest}" for card in snapshot.cards)
        self.label_cells = 1 + max(cell_len(name) for name in (*names, *cards))
        self.ending_lines = self._ending()
        self.more_of_memory = int(bool(self._ram_facts())) + int(any(card.slowest for card in snapshot.cards))
        begun, known, cards_known = bool(snapshot.step), bool(snapshot.since or snapshot.steps), len(snapshot.cards)
        self.most = {
            "header": 1, "footer": 1, "progress": 2 * bool(snapshot.steps), "ending": len(self.ending_lines),
            "memory": (cards_known + 2 + self.more_of_memory) * bool(cards_known), "time": 2 * begun,
            "loss": 99 * begun, "rows": 99 * begun, "memory chart": 99 * bool(snapshot.memory.points),
            "facts": begun, "evaluation": begun, "saved": begun, "training": (3 + (snapshot.failed_save is not None)) * begun,
            "ooms": known and 1 + len(snapshot.ooms), "notes": len(self._draw_notes(NOTE_LINES)),
            **{f"gap {number}": bool(cards_known) for number in (1, 2, 3, 4)},
        }  # fmt: skip

    def draw(self, name: str, lines: int) -> Lines:
        if not lines:
            return []
        if name.startswith("gap"):
            return [Text()]
        drawn: Lines = getattr(self, f"_draw_{name.replace(' ', '_')}")(lines)
        return drawn[:lines]

    # -- the run as a whole --

    def _draw_header(self, lines: int) -> Lines:
        one = self.snapshot
        state = self._text(f"{self.glyphs.bullet} {tr(one.state)}", STATE_STYLES[one.state])
        name = self._text(f"  {one.name}", "bold")
        task = self._text(f"  {one.task}" if one.task and one.task != one.name else "", "dim")
        several = f"{len(one.cards)} × " if len(one.cards) > 1 else ""
        where = [f"{several}{one.device_name}" if one.device_name else "", one.host or "", f"pid {one.pid}" if one.pid else ""]  # fmt: skip
        where_text = self._text("  " + ", ".join(word for word in where if word), "dim")
        if one.silent_s is not None:
            when = self._text(tr("no news for {time}", time=_ago(one.silent_s)), "yellow")
        elif one.is_active and one.since is not None:
            lasted = _ago((one.taken - one.since).total_seconds())
            when = self._text(tr("since {clock}, {time}", clock=_clock(one.since, one.taken), time=lasted))
        elif one.ended is not None:
            when = self._text(tr("ended {clock}", clock=_clock(one.ended, one.taken)))
        else:
            when = Text()
        left = Text.assemble(state, name, task)
        if left.cell_len + where_text.cell_len + when.cell_len + 4 <= self.width:
            left = Text.assemble(left, where_text)
        space = self.width - left.cell_len - when.cell_len
        if space < 1:
            left, space = _crop(left, max(0, self.width - when.cell_len - 1), self.glyphs), 1
        return [Text.assemble(left, " " * max(1, space), when)]

    def _draw_progress(self, lines: int) -> Lines:
        one = self.snapshot
        share = min(1.0, one.step / one.steps) if one.steps else None
        if one.eta_s is not None and one.ends is not None:
            left = Text.assemble(
                self._text(f"{tr('ETA')} ", "dim"), _ago(one.eta_s), self._text(f", {_clock(one.ends, one.taken)}")
            )
        elif one.ended is not None and one.begun is not None:
            lasted = (one.ended - one.begun).total_seconds()
            left = self._text(tr("took {time}", time=_ago(lasted)))
        else:
            left = self._text(f"{tr('ETA')} {UNKNOWN}", "dim")
        total = f"{one.steps:,}" if one.steps else UNKNOWN
        count = self._text(f"{one.step:,}/{total}".rjust(2 * len(total) + 1), "bold")
        percent = self._text(f"{UNKNOWN if share is None else format(math.floor(100 * share), 'd')} %".rjust(6))
        bar_cells = self.width - self.label_cells - count.cell_len - percent.cell_len - ETA_CELLS - 2
        bar = progress_bar(max(0, bar_cells), share, STATE_STYLES[one.state], self.glyphs)
        first = self._row(tr("step"), Text.assemble(count, " ", bar, percent, " ", _right(left, ETA_CELLS)))
        facts = [tr("{epoch} of {epochs}", epoch=_epoch(one.epoch), epochs=_epoch(one.epochs))]
        facts += [tr("{time} a step", time=show_seconds(one.step_s))] if one.step_s is not None else []
        if one.global_batch and one.micro_batches:
            facts.append(tr("{rows} rows in {count} micro-batches", rows=f"{one.global_batch:,}", count=one.micro_batches))
        facts += [translate(fact) for fact in (one.precision, one.layout) if fact]
        return [first, self._row(tr("epoch"), self._facts(facts))]

    def _draw_ending(self, lines: int) -> Lines:
        """The command that continues it is shown even if the sentence must be cut."""
        if len(self.ending_lines) > lines and self.snapshot.resume_command and lines > 1:
            return [*self.ending_lines[: lines - 1], self.ending_lines[-1]]
        return self.ending_lines

    def _ending(self) -> Lines:
        one, style = self.snapshot, STATE_STYLES[self.snapshot.state]
        if one.state == "preparing":
            return [] if one.step else [self._text(tr("The first step has not begun: data and plan are being prepared."), style)]  # fmt: skip
        if one.state == "running":
            return []
        sentence = {
            "killed": tr("Its process has ended without a word: it was killed, or the machine went down."),
            "gone": tr("The folder of this run was removed."),
        }.get(one.state, translate(one.sentence or ""))
        wrapped = _wrap(self._text(_one_line(sentence), style), self.width)[:4] if sentence else []
        if one.resume_command:
            wrapped.append(self._text(f"{tr('Continue it:')} {one.resume_command}"))
        return wrapped

    def footer(self, keys: str | None) -> Text:
        one = self.snapshot
        clock = self._text(one.taken.astimezone().strftime("%H:%M:%S"), "dim")
        if one.problem:
            news = self._text(_one_line(one.problem), "yellow")
        elif one.switched_from:
            news = self._text(tr("a newer run has begun; before this was {run}", run=one.switched_from), "cyan")
        elif one.also_running:
            news = self._text(tr("also running: {runs}", runs=", ".join(one.also_running)), "dim")
        else:
            news = Text()
        left = Text.assemble(self._text(keys or "", "dim"), "  " if keys else "", news)
        return Text.assemble(_pad(left, max(0, self.width - clock.cell_len - 1), self.glyphs), " ", clock)

    # -- memory --

    def _draw_memory(self, lines: int) -> Lines:
        one = self.snapshot
        more = [self._slowest()] if any(card.slowest for card in one.cards) else []
        facts = self._ram_facts()
        more += [self._row("", self._facts(facts))] if facts else []
        spare = max(0, lines - 2 - min(len(one.cards), lines - 2))
        cards = self._cards_for(max(1, lines - 2 - min(spare, len(more))))
        table = [self._table_heading(), *map(self._card_row, cards)]
        if len(cards) < len(one.cards):
            table[-1] = self._rest_of_cards(cards[:-1])
        ram = one.ram
        others = None
        if ram is not None and ram.machine_bytes is not None and ram.tree_bytes is not None:
            others = max(0.0, ram.machine_bytes - ram.tree_bytes)
        if ram is not None:
            row = self._table_row(
                tr("RAM"), ours=ram.tree_bytes, others=others, others_in_limit=others, limit=ram.limit_bytes,
                predicted=ram.predicted_bytes, used=ram.used, used_zone=ram.zone, busy=ram.cpu,
            )  # fmt: skip
            table.append(row)
        return [*table, *more]

    def _cards_for(self, lines: int) -> list[Card]:
        """All, or the fullest and the slowest of them."""
        cards = list(self.snapshot.cards)
        if len(cards) <= lines:
            return cards
        ranked = sorted(cards, key=lambda card: (not card.slowest, -(card.used or 0.0), card.rank))[:lines]
        return sorted(ranked, key=lambda card: card.rank)

    def _rest_of_cards(self, shown: Sequence[Card]) -> Text:
        rest = [card for card in self.snapshot.cards if card not in shown]
        used = max((card.used or 0.0 for card in rest), default=0.0)
        return self._row("", self._text(tr("and {count} more cards, {percent} used at most", count=len(rest), percent=f"{used:.0%}"), "dim"))  # fmt: skip

    def _columns(self) -> tuple[int, list[tuple[str, str, int]]]:
        """Cells of the bar, and name, heading and cells of the columns beside it: as many as there is space for."""
        known = [("ours", tr("ours"), 8), ("limit", tr("limit"), 8), ("used", tr("used"), 5), ("zone", "", 6), ("others", tr("others"), 8)]  # fmt: skip
        known += [("busy", tr("busy"), 5), ("temperature", tr("temp."), 5), ("power", tr("power"), 6), ("planned", tr("planned"), 8)]  # fmt: skip
        known += [("allocated", tr("allocated"), 9), ("held", tr("held now"), 8)]
        wanted = [(name, heading, max(cells, cell_len(heading))) for name, heading, cells in known]
        left, chosen = self.width - self.label_cells - LEAST_BAR, []
        for number, column in enumerate(wanted):
            if column[2] + 1 > left - (0 if number < ESSENTIAL else GOOD_BAR - LEAST_BAR):
                break
            left -= column[2] + 1
            chosen.append(column)
        order = ["ours", "allocated", "held", "others", "limit", "planned", "used", "zone", "busy", "temperature", "power"]
        return LEAST_BAR + left, sorted(chosen, key=lambda column: order.index(column[0]))

    def _table_heading(self) -> Text:
        bar, columns = self._columns()
        g = self.glyphs
        legends = [f"{g.full} {tr('ours')} {g.other} {tr('others')} {g.mark} {tr('plan')}", f"{g.full}{tr('ours')} {g.other}{tr('others')}", ""]  # fmt: skip
        legend = next(text for text in legends if cell_len(text) <= bar)
        cells = [_right(self._text(heading, "dim"), count + 1) for _, heading, count in columns]
        return self._row("", Text.assemble(_pad(self._text(legend, "dim"), bar, self.glyphs), *cells))

    def _card_row(self, card: Card) -> Text:
        intrusion = card.others_bytes
        if intrusion is not None and card.total_bytes and card.limit_bytes:
            intrusion = max(0.0, intrusion - max(0.0, card.total_bytes - card.limit_bytes))
        return self._table_row(
            card.label + "▸" * card.slowest, ours=card.ours_bytes, others=card.others_bytes, others_in_limit=intrusion,
            limit=card.limit_bytes, predicted=card.predicted_bytes, used=card.used, used_zone=card.zone, busy=card.utilization,
            temperature=card.temperature_c, power=card.power_w, allocated=card.allocated_bytes, held=card.held_bytes, card=True,
        )  # fmt: skip

    def _table_row(
        self, label: str, *, ours: float | None, others: float | None, others_in_limit: float | None, limit: float | None,
        predicted: float | None, used: float | None, used_zone: Zone | None, busy: float | None, temperature: float | None = None,
        power: float | None = None, allocated: float | None = None, held: float | None = None, card: bool = False,
    ) -> Text:  # fmt: skip
        bar_cells, columns = self._columns()
        style = ZONE_STYLES[used_zone]

        def share(part: float | None) -> float:
            return part / limit if part is not None and limit else 0.0

        bar = memory_bar(
            bar_cells, share(ours), share(others_in_limit), mark=share(predicted) or None, style=style, glyphs=self.glyphs
        )  # fmt: skip
        missing = UNKNOWN if card else ""
        values = {
            "ours": (_size(ours), "bold"),
            "others": (_size(others), "magenta" if others_in_limit and share(others_in_limit) > 0.02 else ""),
            "limit": (_size(limit), ""),
            "planned": (_size(predicted), "dim"),
            "allocated": (_size(allocated) if card else "", "dim"),
            "held": (_size(held) if card else "", "dim"),
            "used": (_percent(used), style),
            "zone": (tr(used_zone) if used_zone else "", style),
            "busy": (_percent(busy), ""),
            "temperature": (f"{temperature:.0f} °C" if temperature is not None else missing, ""),
            "power": (f"{power:.0f} W" if power is not None else missing, ""),
        }
        cells = []
        for name, _, count in columns:
            text, cell_style = values[name]
            cell = self._text(text, "dim" if text == UNKNOWN else cell_style)
            cells.append(_pad(Text.assemble(" ", cell), count + 1, self.glyphs) if name == "zone" else _right(cell, count + 1))  # fmt: skip
        return self._row(label, Text.assemble(bar, *cells))

    def _slowest(self) -> Text:
        busy = [card for card in self.snapshot.cards if card.busy_s is not None]
        slow = next(card for card in busy if card.slowest)
        fast = min(busy, key=lambda card: card.busy_s or 0.0)
        sentence = tr("slowest: {card} is busy for {time} of a step, {other} for {least}", card=slow.label,
                      time=show_seconds(slow.busy_s), other=fast.label, least=show_seconds(fast.busy_s))  # fmt: skip
        return self._row("▸", self._text(sentence, "yellow"))

    def _ram_facts(self) -> list[str]:
        ram = self.snapshot.ram
        if ram is None:
            return []
        facts = [tr("{count} workers", count=ram.workers)] if ram.workers is not None else []
        if ram.swap_total_bytes:
            facts.append(tr("swap {used} of {total}", used=_size(ram.swap_used_bytes), total=_size(ram.swap_total_bytes)))
        elif ram.swap_total_bytes is not None:
            facts.append(tr("no swap"))
        if ram.read_bytes_per_s is not None:
            facts.append(tr("reads {size}/s", size=_size(ram.read_bytes_per_s)))
        facts += [tr("limit: {source}", source=translate(ram.limited_by))] if ram.limited_by else []
        return facts

    # -- speed --

    def _draw_time(self, lines: int) -> Lines:
        one = self.snapshot
        seconds = self._text(show_seconds(one.step_s) if one.step_s is not None else UNKNOWN)
        whole = sum(part for _, part in one.times)
        cells = max(0, self.width - self.label_cells - 10)
        if not whole:
            return [self._row(tr("time"), Text.assemble(_pad(self._text(tr("its parts are unknown"), "dim"), cells, self.glyphs), _right(seconds, 10)))]  # fmt: skip
        shares = [part / whole for _, part in one.times]
        bar = stacked_bar(cells, shares, PART_STYLES, self.glyphs)
        legend: list[Text] = []
        for (name, _), share, glyph, style in zip(one.times, shares, self.glyphs.parts, PART_STYLES, strict=False):
            if share or name in ("compute", "data"):
                legend.append(Text.assemble((glyph, style), f" {tr(name)} ", (_percent(share).rjust(5), "bold")))
        return [
            self._row(tr("time"), Text.assemble(bar, _right(seconds, 10))),
            self._row("", self._fitting(legend, "  ")),
        ]

    def _draw_facts(self, lines: int) -> Lines:
        one = self.snapshot
        values = [
            ("", _known(one.lr, _rate)),
            (tr("gradient norm"), _known(one.grad_norm, show_metric)),
            (tr("padding"), _known(one.padding, _percent)),
            ("MFU", _known(one.mfu, _percent)),
            (tr("tokens/s"), _known(one.tokens_per_s, show_rate)),
        ]
        cells = [
            Text.assemble(
                self._text(f"{name} " if name else "", "dim"),
                self._text(value.ljust(7 if name else 8), "dim" if value == UNKNOWN else ""),
            )
            for name, value in values
        ]
        return [self._row(tr("lr"), self._fitting(cells, "  "))]

    def _draw_training(self, lines: int) -> Lines:
        return [*self._draw_facts(1), *self._draw_evaluation(1), *self._draw_saved(2)]

    # -- curves --

    def _draw_loss(self, lines: int) -> Lines:
        series = self.snapshot.loss
        return self._chart(tr("loss"), series, lines, curve_range(series.points), show_metric)

    def _draw_rows(self, lines: int) -> Lines:
        series = self.snapshot.rows_per_s
        return self._chart(tr("rows/s"), series, lines, _from_zero(series), show_rate)

    def _draw_memory_chart(self, lines: int) -> Lines:
        return self._chart(tr("peak"), self.snapshot.memory, lines, self._memory_range(), _size)

    def _chart(self, label: str, series: Series, lines: int, vertical: Range, show: Show) -> Lines:
        last, low, high = (_known(value, show) for value in (series.last, series.minimum, series.maximum))
        last_style = "bold" if series.last is not None and math.isfinite(series.last) else "bold red"
        above = "↑" if series.maximum is not None and series.maximum > vertical.high else ""
        if lines == 1:
            stats = [self._text(last.rjust(9), last_style), self._text(f" {tr('min')} ", "dim"), self._text(low.ljust(8))]
            stats += [self._text(f" {tr('max')} ", "dim"), self._text(high.ljust(8))]
            text = Text.assemble(*stats)
            cells = max(0, self.width - self.label_cells - text.cell_len - 1)
            return [self._row(label, Text.assemble((sparkline(series.points, cells, vertical, self.glyphs), "dim"), text))]
        stats = [Text.assemble(self._text(f"{tr('last')} ", "dim"), self._text(last, last_style))]
        stats += [Text.assemble(self._text(f"{tr(name)} ", "dim"), self._text(value)) for name, value in (("min", low), ("max", high + above))]  # fmt: skip
        stats += [Text()] * (lines - len(stats))
        drawn = self._curve(series, max(1, self.width - self.label_cells - STATS_CELLS), lines, vertical)
        return [
            self._row(label if row == 0 else "", Text.assemble(line, _right(stat, STATS_CELLS)))
            for row, (line, stat) in enumerate(zip(drawn, stats, strict=False))
        ]

    def _curve(self, series: Series, width: int, lines: int, vertical: Range) -> Lines:
        """With the marks of its kind: evaluations on the loss; on memory the limit, the plan and out-of-memory errors."""
        one, g = self.snapshot, self.glyphs
        if series is one.loss:
            best = one.best.step if one.best else None
            marks = [Mark(step, loss, g.evaluation, "bold green" if step == best else "cyan") for step, loss in one.evaluations]  # fmt: skip
            return line_chart(series.points, width, lines, vertical, marks=marks, glyphs=g)
        if series is not one.memory:
            return line_chart(series.points, width, lines, vertical, glyphs=g)
        card = max(one.cards, key=lambda card: card.used or 0.0)
        marks = [Mark(oom.step, vertical.high, g.event, "bold yellow") for oom in one.ooms]
        references = [(value, style) for value, style in ((card.predicted_bytes, "dim"), (card.limit_bytes, "red")) if value]  # fmt: skip
        limit = card.limit_bytes

        def style(value: float) -> str:
            return ZONE_STYLES[zone(value / limit)] if limit else ""

        return line_chart(series.points, width, lines, vertical, style=style, references=references, marks=marks, glyphs=g)  # fmt: skip

    def _memory_range(self) -> Range:
        """Up to the limit; from zero, or from below the least peak, so that changes are seen."""
        one = self.snapshot
        limits = [card.limit_bytes for card in one.cards if card.limit_bytes]
        least = min([one.memory.minimum or 0.0, *(card.predicted_bytes or math.inf for card in one.cards)])
        return Range(0.75 * least, max([*limits, one.memory.maximum or 0.0, 1.0]))

    def boxed_charts(self, height: int, names: Sequence[str]) -> Lines:
        """Charts with axes, one below the other, of those that have points; as many as there is space for."""
        one = self.snapshot
        title = tr("peak memory, reserved") if any(card.reserved_bytes for card in one.cards) else tr("peak memory")
        known: dict[str, tuple[str, Series, Range, Show]] = {
            "loss": (tr("loss"), one.loss, curve_range(one.loss.points), show_metric),
            "rows": (tr("rows/s"), one.rows_per_s, _from_zero(one.rows_per_s), show_rate),
            "peak": (title, one.memory, self._memory_range(), _size),
            "busy": (tr("GPU utilisation"), one.utilization, Range(0.0, 1.0), _percent),
            "rate": (tr("learning rate"), one.rate, _from_zero(one.rate), _rate),
        }
        charts = [known[name] for name in names if known[name][1].points][: max(0, height // CHART_LINES)]
        drawn: Lines = []
        for number, chart in enumerate(charts):
            drawn += self._boxed_chart(*chart, (height - len(drawn)) // (len(charts) - number))
        return drawn

    def _boxed_chart(self, title: str, series: Series, vertical: Range, show: Show, height: int) -> Lines:
        rows, inner = height - 3, self.width - 4
        stats = [(tr("last"), series.last), (tr("min"), series.minimum), (tr("max"), series.maximum)]
        right = Text("  ").join(Text.assemble(self._text(f"{name} ", "dim"), self._text(_known(value, show))) for name, value in stats)  # fmt: skip
        axis = {0: vertical.high, rows - 1: vertical.low, (rows - 1) // 2: (vertical.low + vertical.high) / 2}
        if not series.points:
            axis = {}
        lines = []
        for row, line in enumerate(self._curve(series, inner - AXIS_CELLS - 1, rows, vertical)):
            label = self._text(show(axis[row]) if row in axis else "", "dim")
            lines.append(Text.assemble(_right(label, AXIS_CELLS), " ", line))
        first, last = (f"{series.points[index][0]:,}" if series.points else "" for index in (0, -1))
        legend = self._legend(series)
        ends = Text.assemble(_right(self._text(tr("step"), "dim"), AXIS_CELLS), " ", self._text(first, "dim"))
        middle = max(0, inner - ends.cell_len - len(last) - legend.cell_len)
        bottom = Text.assemble(ends, " " * (middle // 2), legend, " " * (middle - middle // 2), self._text(last, "dim"))
        return _box([*lines, bottom], self.width, self.glyphs, title=title, right=right)

    def _legend(self, series: Series) -> Text:
        one, g = self.snapshot, self.glyphs
        if series is one.loss and one.evaluations:
            return Text.assemble((g.evaluation, "cyan"), self._text(f" {tr('evaluation')}  ", "dim"), (g.evaluation, "bold green"), self._text(f" {tr('best')}", "dim"))  # fmt: skip
        if series is one.memory:
            card = max(one.cards, key=lambda card: card.used or 0.0)
            parts = [Text.assemble((g.reference * 2, "red"), self._text(f" {tr('limit')} {_size(card.limit_bytes)}", "dim"))]
            parts += [Text.assemble((g.reference * 2, "dim"), self._text(f" {tr('plan')} {_size(card.predicted_bytes)}", "dim"))] * bool(card.predicted_bytes)  # fmt: skip
            parts += [Text.assemble((g.event, "bold yellow"), self._text(f" {tr('out of memory')}", "dim"))] * bool(one.ooms)
            return Text("  ").join(parts)
        return Text()

    # -- events --

    def _draw_evaluation(self, lines: int) -> Lines:
        one = self.snapshot
        if one.evaluation is None:
            return [self._row(tr("scores"), self._text(tr("no evaluation yet"), "dim"))]
        metrics = [f"{name} {show_metric(value)}" for name, value in one.evaluation.metrics]
        facts = [f"{tr('step {step}', step=f'{one.evaluation.step:,}')}: {metrics[0] if metrics else UNKNOWN}", *metrics[1:2]]
        if one.best is not None and one.best.step == one.evaluation.step:
            facts.append(tr("the best so far"))
        elif one.best is not None:
            name, value = one.best.metrics[0] if one.best.metrics else ("loss", math.nan)
            facts.append(tr("best {score} at step {step}", score=f"{name} {show_metric(value)}", step=f"{one.best.step:,}"))  # fmt: skip
        return [self._row(tr("scores"), self._facts([*facts, *metrics[2:]]))]

    def _draw_saved(self, lines: int) -> Lines:
        one = self.snapshot
        rows = []
        if one.failed_save is not None:
            sentence = tr("step {step} could not be saved: {problem}", step=f"{one.failed_save.step:,}", problem=translate(one.failed_save.failure or ""))  # fmt: skip
            rows.append(self._row(tr("saved"), self._text(_one_line(sentence), "red")))
        if one.checkpoint is None:
            return [*rows, self._row(tr("saved"), self._text(tr("no checkpoint yet"), "dim"))]
        saved = one.checkpoint
        facts = [tr("step {step}", step=f"{saved.step:,}"), self._when(saved.time)]
        facts += [_size(saved.size_bytes)] if saved.size_bytes is not None else []
        facts += [tr("took {time}", time=show_seconds(saved.seconds))] if saved.seconds is not None else []
        return [*rows, self._row(tr("saved"), self._facts(facts))]

    def _draw_ooms(self, lines: int) -> Lines:
        """The last one; then more of them, each with how it ended."""
        one = self.snapshot
        if not one.ooms:
            return [self._row(tr("OOMs"), self._text(tr("none"), "dim"))]
        last = one.ooms[-1]
        count = tr("{count} survived", count=one.oom_count)
        if lines == 1:
            return [self._row(tr("OOMs"), self._facts([count, *self._oom(last)], "yellow"))]
        waiting = sum(oom.restored_step is None for oom in one.ooms)
        state = tr("micro-batch size restored") if not waiting else tr("micro-batch size not restored yet")
        drawn = [self._row(tr("OOMs"), self._facts([count, state], "yellow"))]
        return drawn + [self._row("", self._facts([*self._oom(oom), translate(oom.what)])) for oom in one.ooms[-(lines - 1) :]]  # fmt: skip

    def _oom(self, oom: Oom) -> list[str]:
        """When, what changed, and whether it was undone."""
        rank = f" {tr('rank {rank}', rank=oom.rank)}" if (self.snapshot.processes or 1) > 1 else ""
        where = f"{tr('step {step}', step=f'{oom.step:,}')}{rank}, {self._when(oom.time)}"
        undone = oom.restored_step is not None
        restored = tr("restored at step {step}", step=f"{oom.restored_step:,}") if undone else tr("not restored yet")
        return [where, restored, translate(oom.change)]

    def _draw_notes(self, lines: int) -> Lines:
        """The newest last. Long ones take several lines if there are enough."""
        one = self.snapshot
        drawn: Lines = []
        cells = self.width - self.label_cells
        for note in reversed(one.notes):
            clock = _clock(note.time, one.taken) if note.time else ""
            where = tr("step {step}", step=f"{note.step:,}") if note.step else ""
            head = " ".join(word for word in (clock, where, "!" if note.warning else "") if word)
            text = Text.assemble(self._text(f"{head} " if head else "", "dim"), self._text(_one_line(translate(note.sentence)), "yellow" if note.warning else ""))  # fmt: skip
            wrapped = _wrap(text, cells)[:3] if lines > 4 else [text]
            if len(drawn) + len(wrapped) > lines:
                break
            drawn = [*wrapped, *drawn]
        return [self._row(tr("notes") if number == 0 else "", line) for number, line in enumerate(drawn)]

    # -- pieces --

    def _when(self, time: datetime | None) -> str:
        one = self.snapshot
        if time is None:
            return UNKNOWN
        if one.is_active:
            return tr("{time} ago", time=_ago((one.taken - time).total_seconds()))
        return _clock(time, one.taken)

    def _row(self, label: str, text: Text) -> Text:
        return Text.assemble(_pad(self._text(label, "dim"), self.label_cells, self.glyphs), _crop(text, max(0, self.width - self.label_cells), self.glyphs))  # fmt: skip

    def _facts(self, facts: Sequence[str], style: str = "") -> Text:
        return self._fitting([self._text(_one_line(fact), style if not index else "") for index, fact in enumerate(facts) if fact], " · ")  # fmt: skip

    def _fitting(self, parts: Sequence[Text], between: str) -> Text:
        """Side by side, as many as fit; the last is cut if most of it would still be read."""
        cells, line = self.width - self.label_cells, Text()
        for number, part in enumerate(parts):
            joint = self._text(between if number else "", "dim")
            left = cells - line.cell_len - joint.cell_len
            if part.cell_len > left:
                enough = not number or left >= max(CUT_CELLS, part.cell_len // 2)
                return Text.assemble(line, joint, _crop(part, left, self.glyphs)) if enough else line
            line = Text.assemble(line, joint, part)
        return line

    def _text(self, text: str, style: str = "") -> Text:
        return Text(self.glyphs.text(text), style)


# ---- Words and cells -------------------------------------------------------------------------------------------------


def _from_zero(series: Series) -> Range:
    return Range(0.0, 1.15 * (series.maximum or 1.0))


def _known(value: float | None, show: Show) -> str:
    return UNKNOWN if value is None else show(value)


def _percent(share: float | None) -> str:
    return UNKNOWN if share is None or not math.isfinite(share) else f"{100 * share:.0f} %"


def _rate(rate: float) -> str:
    return f"{rate:.2e}" if rate else "0"


def _epoch(epoch: float | None) -> str:
    return UNKNOWN if epoch is None else f"{epoch:.2f}".rstrip("0").rstrip(".")


def _size(size: float | None) -> str:
    """Three significant figures: at most eight cells, `15.4 GiB`."""
    if size is None or not math.isfinite(size):
        return UNKNOWN
    unit = next((unit for unit in (TiB, GiB, MiB, KiB) if abs(size) >= unit), 1)
    digits = 2 if size / unit < 10 else 1 if size / unit < 100 else 0
    return show_bytes(round(size / unit, digits) * unit)


def _ago(seconds: float) -> str:
    """Coarse, so that it changes rarely: `12 s`, `5 min`, `2 h 5 min`, `3 d 4 h`."""
    minutes = int(max(0.0, seconds)) // 60
    if minutes < 1:
        return f"{int(max(0.0, seconds))} s"
    if minutes < 60:
        return f"{minutes} min"
    hours = minutes // 60
    return f"{hours} h {minutes % 60} min" if hours < 48 else f"{hours // 24} d {hours % 24} h"


def _clock(time: datetime, now: datetime) -> str:
    """In this machine's time zone, with the day if it is another one."""
    time, now = time.astimezone(), now.astimezone()
    if time.date() == now.date():
        return time.strftime("%H:%M")
    return time.strftime("%m-%d %H:%M" if time.year == now.year else "%Y-%m-%d %H:%M")


def _one_line(text: str) -> str:
    """Without line breaks and without control characters, which would move the cursor."""
    return "".join(" " if ord(one) < 32 or 127 <= ord(one) < 160 else one for one in " ".join(text.split()))


def _wrap(text: Text, width: int) -> Lines:
    """Lines of at most `width` cells, broken at spaces, or anywhere in Chinese."""
    from rich.console import Console

    console = Console(width=max(1, width), force_terminal=False)
    return [line for line in text.wrap(console, max(1, width))]


def _crop(text: Text, width: int, glyphs: Glyphs) -> Text:
    if text.cell_len <= width:
        return text
    ellipsis = glyphs.text("…")[:1]
    cropped = text.copy()
    cropped.truncate(max(0, width - 1), overflow="crop")
    return Text.assemble(cropped, ellipsis) if width > 0 else cropped


def _pad(text: Text, width: int, glyphs: Glyphs) -> Text:
    cropped = _crop(text, width, glyphs)
    return Text.assemble(cropped, " " * (width - cropped.cell_len))


def _right(text: Text, width: int) -> Text:
    return Text.assemble(" " * max(0, width - text.cell_len), text)
