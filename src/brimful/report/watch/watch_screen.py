"""How `brimful watch` looks: a `Snapshot` drawn into a given number of columns and lines.

Space goes to what matters most. Each part of the view has wishes (1 line for the loss, later 3 lines for the loss), and they are
granted in the order of importance while there are lines left: 80 × 24 shows every figure, a wide terminal gets two columns, boxes and
real charts. Every part keeps its place and its width while its figures change, so nothing jumps. Colour only repeats what a word or a
glyph says.
"""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from itertools import zip_longest

from rich.cells import cell_len
from rich.console import Group, RenderableType
from rich.text import Text

from brimful.languages import tr
from brimful.report.watch import watch_parts as parts
from brimful.report.watch.cells import Canvas, Lines
from brimful.report.watch.curves import boxed_charts, chart, logged_lines
from brimful.report.watch.memory_table import card_label, memory_facts, memory_table
from brimful.report.watch.run_snapshot import Snapshot
from brimful.report.watch.sparklines import UNICODE, Glyphs

WIDE, TALL = 132, 30
"""From this size on there are two columns, with boxes."""
LEFT_COLUMNS = 86
"""The least width of the left column: that of the table of cards."""
ANY = 99
"""Lines of a part that can use any number of them."""
ORDER = (
    "header", "progress", "ending", "gap 1", "memory", "gap 2", "time", "gap 3", "loss", "logged", "rows", "peak", "figures", "scores", "saved",
    "ooms", "gap 4", "notes",
)  # fmt: skip


def render(
    snapshot: Snapshot, width: int, height: int, *, glyphs: Glyphs = UNICODE, footer: str | None = None
) -> RenderableType:
    """One frame of at most `height` lines, none wider than `width`. `footer` says what the keys do and stays at the bottom."""
    return Group(*frame(snapshot, width, height, glyphs=glyphs, footer=footer))


def frame(snapshot: Snapshot, width: int, height: int, *, glyphs: Glyphs = UNICODE, footer: str | None = None) -> Lines:
    """The lines of `render`."""
    canvas = Canvas(snapshot=snapshot, width=max(20, width), label_cells=_label_cells(snapshot), glyphs=glyphs)
    wide = canvas.width >= WIDE and height >= TALL and bool(snapshot.cards)
    lines = (_two_columns if wide else _one_column)(canvas, max(3, height), footer)
    return [canvas.crop(line, canvas.width) for line in lines[: max(3, height)]]


def _one_column(canvas: Canvas, height: int, keys: str | None) -> Lines:
    table = min(len(canvas.snapshot.cards), max(1, height // 2 - 4)) + 2  # with a heading and the RAM
    wishes = [
        ("header", 1),
        ("footer", 1),
        ("ending", 1),
        ("progress", 1),
        ("memory", table),
        ("ending", 2),
        ("ooms", 1),
    ]
    wishes += [("loss", 1), ("rows", 1), ("time", 1), ("saved", 1), ("notes", 1), ("time", 2), ("ending", 3)]
    wishes += [
        ("scores", 1),
        ("figures", 1),
        ("logged", ANY),
        ("progress", 2),
        ("memory", table + len(memory_facts(canvas))),
    ]
    wishes += [("gap 1", 1), ("gap 3", 1), ("notes", 2), ("loss", 3), ("ooms", 2), ("gap 2", 1), ("gap 4", 1), ("notes", 3)]  # fmt: skip
    wishes += [("saved", 2), ("rows", 3), ("ooms", 3), ("loss", 5), ("peak", 4), ("notes", 6), ("ooms", 6), ("loss", 9)]
    wishes += [("rows", 5), ("peak", 6), ("loss", 14), ("rows", 8), ("peak", 9), ("loss", 20)]
    lines = allot(height, wishes, _most(canvas))
    drawn = [line for name in ORDER for line in _draw(canvas, name, lines.get(name, 0))]
    if keys is not None:
        drawn += [Text()] * (height - len(drawn) - 1)
    return [*drawn, parts.footer(canvas, keys)]


def _two_columns(canvas: Canvas, height: int, keys: str | None) -> Lines:
    left_cells = max(LEFT_COLUMNS, canvas.width * 48 // 100)
    inner, left, right = (replace(canvas, width=cells) for cells in (canvas.width - 4, left_cells, canvas.width - left_cells - 1))  # fmt: skip
    head = [line for name in ("header", "progress", "ending") for line in _draw(inner, name, _most(inner)[name])]
    top = canvas.box(head, title=f"brimful watch {canvas.snapshot.run}")
    rest = height - len(top) - 1
    boxed = replace(left, width=left_cells - 4)
    table = min(len(canvas.snapshot.cards), max(2, rest // 3)) + 2
    wishes = [("memory", table), ("time", 2), ("ooms", 1), ("training", 3), ("notes", 2), ("logged", ANY)]
    wishes += [("memory", table + len(memory_facts(boxed))), ("training", 4), ("ooms", 4), ("notes", 5), ("ooms", 8), ("notes", 12)]  # fmt: skip
    lines = allot(rest, wishes, _most(boxed), overhead=2)
    titles = {"memory": tr("memory"), "time": tr("time of a step"), "training": tr("training"), "logged": tr("the task's own figures"), "ooms": tr("out-of-memory errors"), "notes": tr("notes")}  # fmt: skip
    column: Lines = []
    for name, title in titles.items():
        if lines.get(name):
            column += left.box(_draw(boxed, name, lines[name]), title=title)
    column += boxed_charts(left, ("busy", "rate"), rest - len(column))
    charts = boxed_charts(right, ("loss", "rows", "peak"), rest)
    columns = zip_longest(column, charts, fillvalue=Text())
    body = [Text.assemble(canvas.pad(one, left_cells), " ", other) for one, other in columns]
    return [*top, *body, *[Text()] * (rest - len(body)), parts.footer(canvas, keys)]


def allot(
    height: int, wishes: Iterable[tuple[str, int]], most: Mapping[str, int], *, overhead: int = 0
) -> dict[str, int]:
    """Lines for each part: wish by wish, those that fit as a whole. No part gets more lines than it has; its first costs `overhead`."""
    lines: dict[str, int] = {}
    for name, wish in wishes:
        have, wish = lines.get(name, 0), min(wish, most.get(name, 0))
        left = height - sum(lines.values()) - overhead * len(lines) - (0 if have else overhead)
        if 0 < wish - have <= left:
            lines[name] = wish
    return lines


def _label_cells(snapshot: Snapshot) -> int:
    """Of the longest label, and a space."""
    labels = [tr(name) for name in ("step", "epoch", "RAM", "time", "loss", "rows/s", "peak", "lr", "scores", "saved", "OOMs", "notes")]  # fmt: skip
    return 1 + max(cell_len(label) for label in (*labels, *map(card_label, snapshot.cards)))


def _most(canvas: Canvas) -> dict[str, int]:
    """How many lines each part can use."""
    snapshot = canvas.snapshot
    cards, begun = len(snapshot.cards), int(snapshot.step > 0)
    return {
        "header": 1, "footer": 1, "progress": 2 if snapshot.steps else 0, "ending": len(parts.ending(canvas)),
        "memory": cards + 1 + (snapshot.ram is not None) + len(memory_facts(canvas)) if cards else 0,
        "time": len(parts.step_time(canvas)) * begun, "loss": ANY * begun, "rows": ANY * begun, "peak": ANY if snapshot.memory.points else 0,
        "logged": len(snapshot.logged) * begun, "figures": begun, "scores": begun, "saved": len(parts.checkpoints(canvas)) * begun, "training": (2 + len(parts.checkpoints(canvas))) * begun,
        "ooms": 1 + len(snapshot.ooms) if cards else 0, "notes": len(parts.notes(canvas, parts.NOTE_LINES)),
        **{f"gap {number}": int(cards > 0) for number in (1, 2, 3, 4)},
    }  # fmt: skip


def _draw(canvas: Canvas, name: str, lines: int) -> Lines:
    """A part in as many lines as it is given, or fewer."""
    if not lines:
        return []
    draw: Mapping[str, Callable[[], Lines]] = {
        "header": lambda: [parts.header(canvas)],
        "progress": lambda: parts.progress(canvas),
        "ending": lambda: _with_last(parts.ending(canvas), lines),
        "memory": lambda: memory_table(canvas, lines),
        "time": lambda: parts.step_time(canvas),
        "loss": lambda: chart(canvas, "loss", lines),
        "logged": lambda: logged_lines(canvas, lines),
        "rows": lambda: chart(canvas, "rows", lines),
        "peak": lambda: chart(canvas, "peak", lines),
        "figures": lambda: [parts.figures(canvas)],
        "scores": lambda: [parts.scores(canvas)],
        "saved": lambda: parts.checkpoints(canvas),
        "training": lambda: [parts.figures(canvas), parts.scores(canvas), *parts.checkpoints(canvas)],
        "ooms": lambda: parts.out_of_memory(canvas, lines),
        "notes": lambda: parts.notes(canvas, lines),
    }
    return draw[name]()[:lines] if name in draw else [Text()]


def _with_last(lines: Lines, most: int) -> Lines:
    """The command that continues a run, in the last line, is shown even if the sentence before it must be cut."""
    return lines if len(lines) <= most or most < 2 else [*lines[: most - 1], lines[-1]]
