"""The table of the cards and of host RAM: a bar of the limit, then figures in columns that never move.

A bar is as long as the limit. Ours comes from the left, what others take of the limit from the right, so the gap between them is what
the run can still get; the mark is the plan's predicted peak.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from rich.cells import cell_len
from rich.text import Text

from brimful.languages import tr, translate
from brimful.report.watch.cells import UNKNOWN, Canvas, Lines, align_right, show_percent, show_size
from brimful.report.watch.run_snapshot import Card, HostMemory
from brimful.report.watch.sparklines import memory_bar
from brimful.units import Zone, show_seconds

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
    return card.label + "▸" * card.slowest


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
    names = {"card": slow[1].label, "time": show_seconds(slow[0]), "other": fast[1].label, "least": show_seconds(fast[0])}  # fmt: skip
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
    return [*facts, *([f"{tr('limit')}: {translate(ram.limited_by)}"] if ram.limited_by else [])]


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
    for number, (name, english, least) in enumerate(_COLUMNS):
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
