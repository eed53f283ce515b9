"""The reports of `brimful data check`, `clean`, `tokenizer`, `tokenize` and `rejects` as tables.

Text from the files is shown as it is, never as markup, on one line: a line break as ⏎, other control characters as a dot.
"""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from brimful.data.check import UNUSABLE, Bin, CheckReport, Lengths, SharedPrompts
from brimful.data.read.files import RowProblem, skipped_note
from brimful.languages import tr, translate
from brimful.units import show_bytes, show_count, show_rate, show_seconds

if TYPE_CHECKING:  # a command imports only its own libraries
    from brimful.data.clean.clean import CleanReport
    from brimful.data.tokenize import FieldStats, RowNotes, TokenizeReport
    from brimful.data.tokenizer.train import Choice, IdCheck, TextStats, TokenizerReport
    from brimful.tasks.check_rows import RowsReport
    from brimful.tasks.rejects import RejectsReport

_WARN, _GOOD = "yellow", "green"
_TRAINED = "bold green"
_PIECE = 160
"""Characters of a part of a row that are shown."""
_BAR_WIDTH = 16
_EIGHTHS = ("", "▏", "▎", "▍", "▌", "▋", "▊", "▉")
_MAX_CHARACTERS = 300
"""Characters of a text given to the terminal, which truncates them to its width."""


def check_table(report: CheckReport) -> RenderableType:
    """The headline, the columns with three rows, the counts, the lengths."""
    parts: list[RenderableType] = [_check_headline(report)]
    if report.skipped:
        parts.append(Text(translate(_one_line(skipped_note(report.skipped))), style=_WARN))
    parts += [Text(), *_columns(report), Text(), _counts(report)]
    for unit, lengths in (("characters", report.characters), ("tokens", report.tokens)):
        parts += [Text(), _lengths(unit, lengths)] if lengths else []
    return Group(*parts)


def shared_line(shared: SharedPrompts) -> RenderableType:
    """How many rows to evaluate on have a prompt that is trained on."""
    sentence = (
        f"{shared.shared:,} of {shared.rows:,} rows to evaluate on have a prompt that is also in the training rows"
    )
    first = f": {shared.first.file}, line {shared.first.line}" if shared.first else ""
    return Text(f"\n{translate(sentence)}{_one_line(first)}", style=_WARN if shared.shared else _GOOD)


def rows_table(report: "RowsReport") -> RenderableType:
    """Rows as a model reads them: three with the trained tokens in colour, then tokens, lengths and packing."""
    files = report.files[0] if len(report.files) == 1 else translate(f"{len(report.files):,} files")
    color = "green" if report.failure() is None else "red"
    speed = f"{show_seconds(report.seconds)}, {show_rate(report.rows_in / max(report.seconds, 1e-9))} rows/s"
    used = report.rows_in - sum(report.dropped.values())
    found_by = f"; replies found by: {report.method}" if report.method else ""
    limit, kind = "+".join(f"{one:,}" for one in report.max_tokens), "row" if report.method else "text"
    parts: list[RenderableType] = [
        Text.assemble(
            f"{_one_line(files)}: ", (translate(f"{used:,} of {report.rows_in:,} rows"), f"bold {color}"),
            tr(" can train {model}", model=report.model), "  ", (translate(f"read in {speed}"), "dim"),
        ),
        Text(translate(f"columns: {_one_line(report.reason)}{found_by}"), style="dim"),
    ]  # fmt: skip
    parts += [Text(), example_rows(report.examples), Text()]
    table = Table(box=None, padding=(0, 2, 0, 0), pad_edge=False, show_header=False)
    table.add_column(style="dim", no_wrap=True)
    table.add_column(overflow="fold")
    if report.rows_out:
        share = report.trained_tokens / max(1, report.tokens)
        trained = translate(f"{report.tokens:,} in {report.rows_out:,} rows, of which {share:.0%} are trained on")
        table.add_row(tr("tokens"), trained)
        lengths = tr(", ").join(f"{tr(name)} {value:,.0f}" for name, value in report.lengths.items())
        table.add_row(tr("lengths"), tr("{lengths}, in tokens", lengths=lengths))
        few = report.truncated == 1
        lost = f"{report.truncated:,} {kind}{' is' if few else 's are'} longer than {limit} tokens and {'loses' if few else 'lose'} {report.lost_tokens:,}"
        none = f"no row that is kept is longer than {limit} tokens"
        table.add_row(tr("truncated"), translate(lost if report.truncated else none))
    if report.first_repeated and report.rows_out:
        what = translate(f"{show_count(report.repeated, 'row')} like an earlier one, which are trained on again")
        table.add_row(tr("repeated"), f"{what}: {report.first_repeated.file}, line {report.first_repeated.line}")
    if (packing := report.packing) is not None:
        padded = f"padded {packing.sorted:.0%} with rows of similar length, {packing.unsorted:.0%} as they come"
        full = f"{packing.packed:.0%} full in sequences of {packing.tokens:,} tokens; {padded} (predicted)"
        table.add_row(tr("packing"), translate(full))
    for reason, count in report.dropped.items():
        what = translate(f"{show_count(count, 'row')}, {reason.replace('_', ' ')}")
        table.add_row(tr("dropped"), f"{what}: {_first_problems(report.problems[reason])}")
    for note in _notes(report.notes):
        table.add_row(tr("noted"), note)
    return Group(*parts, table)


def _notes(notes: "Mapping[str, RowNotes]") -> list[Text]:
    """Rows that are kept, with something that their owner should know."""
    words = (f"{show_count(note.rows, 'row')} with {reason}; the first: {note.first}" for reason, note in notes.items())
    return [Text(translate(one), style=_WARN) for one in words]


def example_rows(rows: Sequence[Sequence[tuple[str, bool | str]]]) -> RenderableType:
    """Rows as a model reads them. What is trained on stands in ⟦ ⟧ and in colour; parts with a name stand below each other."""
    if any(isinstance(mark, str) for row in rows for _, mark in row):
        return _example_pairs(rows)
    legend = Text.assemble((tr("rows as the model reads them, trained on what is in "), "dim"), ("⟦ ⟧", _TRAINED))
    table = Table.grid(padding=(0, 1, 0, 0))
    table.add_column(style="cyan", no_wrap=True)
    table.add_column(overflow="fold")
    for number, row in enumerate(rows, 1):
        table.add_row(str(number), Text.assemble(*(_shown(text, bool(trained)) for text, trained in row)))
    return Group(legend, table)


def _example_pairs(rows: Sequence[Sequence[tuple[str, bool | str]]]) -> RenderableType:
    table = Table.grid(padding=(0, 1, 0, 0))
    for style in ("cyan", "dim"):
        table.add_column(style=style, no_wrap=True)
    table.add_column(overflow="fold")
    colors = {"chosen": "green", "rejected": "red"}
    for number, row in enumerate(rows, 1):
        for place, (text, name) in enumerate(row):
            style = colors.get(str(name), "dim")
            table.add_row("" if place else str(number), str(name), Text(_one_piece(text), style=style))
    return Group(Text(tr("pairs as the model reads them: it learns to prefer chosen to rejected"), style="dim"), table)


def _one_piece(text: str) -> str:
    """On one line, a long one cut in the middle."""
    flat = "".join(one if one.isprintable() else "·" for one in text.replace("\n", "⏎").replace("\t", " "))
    return flat if len(flat) <= _PIECE else f"{flat[: _PIECE // 2]} … {flat[-_PIECE // 2 :]}"


def _shown(text: str, trained: bool) -> tuple[str, str]:
    short = _one_piece(text)
    return (f"⟦{short}⟧", _TRAINED) if trained else (short, "dim")


def clean_table(report: "CleanReport") -> RenderableType:
    """The columns, the rows, the cost, the notes."""
    columns = [field if field == column else f"{field} ← {column}" for field, column in report.columns.items()]
    stages = ", ".join(f"{tr(stage)} {translate(show_seconds(seconds))}" for stage, seconds in report.stage_s.items())
    rate = translate(f", {show_rate(report.rows_per_s)} rows/s") if report.rows_per_s else ""
    peak = translate(f"peak memory {show_bytes(report.peak_bytes)}, measured")
    return Group(
        Text.assemble((tr("columns"), "bold"), f"  {', '.join(columns)} ({translate(report.reason)})"),
        Text(),
        _clean_rows(report),
        Text(),
        Text(f"{translate(show_seconds(report.seconds))} ({stages}){rate}; {peak}"),
        *(Text(tr("note: {text}", text=translate(note)), style="yellow") for note in report.notes),
        Text(tr("Saved to {path}", path=report.output)),
    )


def tokenizer_table(report: "TokenizerReport") -> RenderableType:
    """What was trained, how well it encodes, which values were chosen and why, and whether the model can use it."""
    parts: list[RenderableType] = []
    for table in (_tokenizer_headline, _texts, _choices, _ids, _tokenizer_facts):
        parts += [table(report), Text()]
    return Group(*parts[:-1], *(Text(translate(f"warning: {warning}"), style=_WARN) for warning in _warnings(report)))


def tokenize_table(report: "TokenizeReport") -> RenderableType:
    """How many rows and tokens, what each field became, what was dropped and truncated, time and memory."""
    return Group(_store_headline(report), Text(), _fields(report), Text(), _store_facts(report))


def rejects_table(report: "RejectsReport") -> RenderableType:
    """The rows with why others were dropped, ten pairs, the cost."""
    rows = _rows_table()
    rows.add_row(Text(tr("in"), style="bold"), Text(f"{report.rows_in:,}", style="bold"), "", "")
    if report.not_chosen:
        share = _share(report.not_chosen, report.rows_in)
        rows.add_row(
            Text(f"  {tr('not chosen')}", style="dim"),
            f"−{report.not_chosen:,}",
            share,
            Text(tr("beyond --rows"), style="dim"),
        )
    for reason, count in report.dropped.items():
        if count:
            first = Text(_one_line(report.first_dropped[reason]), style="dim")
            cells = (f"  {_reason_name(reason)}", f"−{count:,}", _share(count, report.rows_in))
            rows.add_row(*[Text(cell, style=_WARN) for cell in cells], first)
    out = Text(f"{report.rows_out:,}", style="bold green")
    rows.add_row(Text(tr("out"), style="bold"), out, _share(report.rows_out, report.rows_in), "")
    pairs = Table(box=None, padding=(0, 2, 0, 0), pad_edge=False, expand=True, header_style="bold")
    for name in ("prompt", "chosen", "rejected"):
        pairs.add_column(name, ratio=1, no_wrap=True)
    for one in report.samples:
        pairs.add_row(*[Text(_one_line(text), no_wrap=True, overflow="ellipsis") for text in one.values()])
    notes = []
    if report.resumed_answers:
        notes.append(f"{report.resumed_answers:,} answers are those of an interrupted run")
    if report.truncated_prompts:
        notes.append(
            f"{report.truncated_prompts:,} prompts were longer than those of the model's training and lost their beginning"
        )
    if report.forward is not None and report.forward["ooms"]:
        notes.append(f"{report.forward['ooms']:,} out-of-memory errors; the batches were made smaller")
    peak = "" if report.peak_bytes is None else f"{show_bytes(report.peak_bytes)} on {report.device}, "
    batches = (
        ""
        if report.forward is None
        else f" in {report.forward['batches']:,} batch{'es' * (report.forward['batches'] != 1)}"
    )
    return Group(
        Text(translate(f"columns: {_one_line(report.layout_reason)}; written as {report.form}"), style="dim"),
        Text(),
        rows,
        Text(),
        pairs,
        Text(),
        Text(
            translate(
                f"{report.answers:,} answers{batches}, {show_seconds(report.seconds)} in all, {show_rate(report.answers_per_s)} answers/s while answering; "
                f"peak memory {peak}{show_bytes(report.host_peak_bytes)} on the host, measured"
            )
        ),
        *(Text(translate(f"note: {note}"), style=_WARN) for note in notes),
        Text(tr("Saved to {path}", path=report.output)),
    )


def _check_headline(report: CheckReport) -> Text:
    files = report.files[0] if len(report.files) == 1 else translate(f"{len(report.files):,} files")
    conversations = ""
    if report.conversations is not None:
        conversations = tr(" from {conversations}", conversations=show_count(report.conversations, "conversation"))
    speed = f"{show_seconds(report.seconds)}, {show_rate(report.rows_in / max(report.seconds, 1e-9))} rows/s"
    return Text.assemble(
        f"{_one_line(files)}: ", (translate(f"{report.rows_out:,} of {report.rows_in:,} rows"), f"bold {_color(report)}"),
        conversations, tr(" can be used"), "  ", (translate(f"read in {speed}"), "dim"),
    )  # fmt: skip


def _color(report: CheckReport) -> str:
    return "green" if report.failure() is None else "red"


def _columns(report: CheckReport) -> list[RenderableType]:
    """Which column became which field and why, above three rows."""
    table = Table(box=None, padding=(0, 2, 0, 0), pad_edge=False, expand=True, header_style="")
    fields = report.layout.fields
    for field in fields:
        column = report.layout.columns[field]
        header = Text.assemble((field, "bold cyan"), (f" ← {_one_line(column)}" if column != field else "", "cyan"))
        table.add_column(header, ratio=1 if field == "prompt" else 2, no_wrap=True)
    for row in report.examples:
        table.add_row(*[Text(_one_line(row[field]), no_wrap=True, overflow="ellipsis") for field in fields])
    return [Text(translate(f"columns: {_one_line(report.layout.reason)}"), style="dim"), table]


def _rows_table() -> Table:
    table = Table(box=None, padding=(0, 2, 0, 0), pad_edge=False, header_style="dim")
    table.add_column(tr("rows"), no_wrap=True)
    for name in ("count", "share"):
        table.add_column(tr(name), justify="right", no_wrap=True)
    table.add_column(tr("first"), overflow="fold")
    return table


def _counts(report: CheckReport) -> Table:
    table = _rows_table()
    table.add_row(tr("in"), f"{report.rows_in:,}")
    for reason, count in report.dropped.items():
        style = "dim" if not count else "red" if reason in UNUSABLE else "yellow"
        cells = (_reason_name(reason), f"{count:,}", _share(count, report.rows_in))
        table.add_row(*[Text(cell, style=style) for cell in cells], Text(_first_problems(report.problems[reason])))
    usable = (tr("usable"), f"{report.rows_out:,}", _share(report.rows_out, report.rows_in))
    table.add_row(*[Text(cell, style=f"bold {_color(report)}") for cell in usable])
    return table


def _reason_name(reason: str) -> str:
    """`over-long`, or its translation."""
    name = reason.replace("_", " ")
    translated = tr(name)
    return name.replace(" ", "-") if translated == name else translated


def _first_problems(problems: tuple[RowProblem, ...]) -> str:
    """The first problem in full, and of the others what differs."""
    if not problems:
        return ""
    first, *others = problems
    texts = [translate(_one_line(str(first)))]
    for one in others:
        place = f"line {one.line}" if one.file == first.file else f"{_one_line(one.file)}, line {one.line}"
        texts.append(translate(place if one.message == first.message else f"{place}: {_one_line(one.message)}"))
    return "; ".join(texts)


def _clean_rows(report: "CleanReport") -> Table:
    """A line for rows in, each reason and each file; rows in is the sum of the others."""
    table = _rows_table()
    table.add_row(Text(tr("in"), style="bold"), Text(f"{report.rows_in:,}", style="bold"), "", "")
    for reason, count in report.dropped.items():
        first, style = next(iter(report.problems[reason]), ""), "yellow" if count else "dim"
        table.add_row(
            Text(f"  {_reason_name(reason)}", style=style), Text(f"−{count:,}" if count else "0", style=style),
            Text(_share(count, report.rows_in) if count else "", style=style), Text(translate(_one_line(str(first))), style="dim"),
        )  # fmt: skip
    out = Text(f"{report.rows_out:,}", style="bold green")
    table.add_row(Text(tr("out"), style="bold"), out, _share(report.rows_out, report.rows_in), "")
    for split, rows in report.files.items():
        table.add_row(f"  {split}", f"{rows:,}", _share(rows, report.rows_in), Text(f"{split}.parquet", style="dim"))
    return table


def _lengths(unit: str, lengths: dict[str, Lengths]) -> Table:
    """The fields next to each other; with three of them the bars are shorter."""
    grid = Table.grid(padding=(0, 3, 0, 0))
    width = _BAR_WIDTH if len(lengths) < 3 else _BAR_WIDTH // 2
    grid.add_row(*[_field_lengths(field, unit, one, width) for field, one in lengths.items()])
    return grid


def _field_lengths(field: str, unit: str, lengths: Lengths, width: int) -> RenderableType:
    figures = {"p50": lengths.p50, "p90": lengths.p90, "p99": lengths.p99, "max": lengths.max}
    bars = Table.grid(padding=(0, 1, 0, 0))
    bars.add_column(justify="right", style="dim", no_wrap=True)
    bars.add_column(style="cyan", no_wrap=True, width=width)
    bars.add_column(justify="right", no_wrap=True)
    most = max(one.rows for one in lengths.bins)
    for one in lengths.bins:
        bars.add_row(_range(one), _bar(one.rows / most, width), f"{one.rows:,}")
    title = Text.assemble((field, "bold cyan"), tr(" in {unit}, mean {mean:,.1f}", unit=tr(unit), mean=lengths.mean))
    return Group(title, Text(" · ".join(f"{name} {value:,}" for name, value in figures.items()), style="dim"), bars)


def _range(one: Bin) -> str:
    if one.end is None:
        return f"{one.start:,} –"
    return f"{one.start:,} – {one.end - 1:,}" if one.end > one.start + 1 else f"{one.start:,}"


def _bar(share: float, width: int) -> str:
    """To an eighth of a character; anything above zero is visible."""
    eighths = max(round(share * width * 8), 1 if share else 0)
    return "█" * (eighths // 8) + _EIGHTHS[eighths % 8]


def _share(part: int, whole: int) -> str:
    """`0 %`, `0.03 %`, `99.97 %`: never rounded to nothing or to all."""
    if part in (0, whole):
        return "100 %" if part else "0 %"
    percent = 100 * part / whole
    return "< 0.01 %" if percent < 0.01 else f"{min(percent, 99.99):.2f} %"


def _one_line(text: str) -> str:
    flat = text[:_MAX_CHARACTERS].replace("\r\n", "⏎").replace("\n", "⏎").replace("\t", " ")
    return "".join(character if character.isprintable() else "·" for character in flat)


def _tokenizer_headline(report: "TokenizerReport") -> Text:
    return Text.assemble(
        (report.tokenizer, "bold"), ": ", (translate(f"{report.vocab_size:,} {report.kind} entries"), "bold"), ", ",
        (translate(f"{report.total.characters_per_token:.2f} characters per token"), "bold"), ", ",
        (translate(f"{report.round_trip:.0%} of {report.total.rows:,} {report.measured_on} decode exactly"), _GOOD),
    )  # fmt: skip


def _texts(report: "TokenizerReport") -> Table:
    table = _table("measured", right=("characters", "tokens", "characters per token", "as bytes", "unknown"))
    fields = {**report.fields, "total": report.total} if len(report.fields) > 1 else report.fields
    for name, stats in fields.items():
        table.add_row(tr(name) if name == "total" else name, *_figures(stats), style="bold" if name == "total" else "")
    return table


def _figures(stats: "TextStats") -> list[str]:
    counts = [f"{stats.characters:,}", f"{stats.tokens:,}", f"{stats.characters_per_token:.3f}"]
    return [*counts, f"{stats.byte_share:.2%}", f"{stats.unknown_rate:.2%}"]


def _choices(report: "TokenizerReport") -> Table:
    table = _table("choice", right=("requested", "effective"))
    table.add_column(tr("reason"), overflow="fold")
    for choice in report.choices:
        changed = choice.requested is not None and choice.requested != choice.effective
        table.add_row(
            tr(choice.name.replace("_", " ")),
            Text(_value(choice, choice.requested), style=_WARN if changed else "dim"),
            Text(_value(choice, choice.effective), style="bold"),
            translate(choice.reason),
        )
    return table


def _value(choice: "Choice", value: Any) -> str:
    if value is None:
        return "–"
    return show_bytes(value) if choice.name == "host_limit" else f"{value:,}"


def _ids(report: "TokenizerReport") -> Table:
    table = _table("compared with the model", right=("tokenizer", "model"))
    table.add_column("")
    for check in report.ids:
        numbers = ("–" if value is None else str(value) for value in (check.tokenizer, check.model))
        table.add_row(check.name, *numbers, _verdict(check))
    return table


def _verdict(check: "IdCheck") -> Text:
    if check.matches is None:
        return Text(tr("nothing to compare with"), style="dim")
    if not check.matches:
        return Text(tr("does not match"), style="red")
    if check.name == "vocab_size" and check.tokenizer != check.model:
        return Text(tr("fits; the other rows of the embedding stay unused"), style=_GOOD)
    return Text(tr("matches"), style=_GOOD)


def _tokenizer_facts(report: "TokenizerReport") -> Table:
    lines = {
        "special": ", ".join(f"{token} {number}" for token, number in report.special_ids.items()),
        "columns": report.layout_reason,
        "time": f"{show_seconds(report.seconds)}, of which {show_seconds(report.training_s)} training",
        "memory": f"peak {show_bytes(report.peak_bytes)} (measured), {show_bytes(report.predicted_peak_bytes)} (predicted)",
    }
    return _facts({name: Text(text if name == "special" else translate(text)) for name, text in lines.items()})


def _warnings(report: "TokenizerReport") -> list[str]:
    warnings = [_one_line(skipped_note(report.skipped))] if report.skipped else []
    if report.broken:
        warnings.append(f"{report.broken:,} broken rows were left out; the first is {report.first_broken}")
    if report.peak_bytes > report.host_limit_bytes:
        warnings.append("training took more memory than --host-limit. Try: a smaller one next time")
    return warnings


def _store_headline(report: "TokenizeReport") -> Text:
    tokens = sum(field.tokens for field in report.fields.values())
    return Text.assemble(
        (report.store, "bold"), ": ", (translate(f"{report.rows_out:,} rows"), "bold"),
        tr(" of {rows:,}, {tokens:,} tokens, {size} on disk", rows=report.rows_in, tokens=tokens, size=show_bytes(report.size_bytes)),
    )  # fmt: skip


def _fields(report: "TokenizeReport") -> Table:
    """A column per field, so that three of them fit 80 characters."""
    table = Table(box=None, padding=(0, 2, 0, 0), pad_edge=False, header_style="bold")
    table.add_column("", style="dim", no_wrap=True)
    for name in report.fields:
        table.add_column(name, justify="right", overflow="fold")
    columns = [_field(field, report.rows_out) for field in report.fields.values()]
    for name in columns[0]:
        table.add_row(translate(name), *(column[name] for column in columns))
    return table


def _field(field: "FieldStats", rows: int) -> dict[str, Text]:
    """Yellow where more than one row in a hundred was truncated."""
    plain = field.tokens + field.lost_tokens - rows
    lost, truncated = field.lost_tokens / max(1, plain), field.truncated / max(1, rows)
    style = _WARN if truncated > 0.01 else ""
    return {
        "column": Text(field.column),
        "characters": Text(f"{field.characters:,}"),
        "characters per token": Text(f"{field.characters / plain:.2f}" if plain else "–"),
        "tokens": Text(f"{field.tokens:,}"),
        "tokens per row, mean": Text(f"{field.mean:.1f}"),
        **{f"{name[1:]} % of rows up to": Text(f"{length:,}") for name, length in field.percentiles.items()},
        "longest": Text(f"{field.longest:,}"),
        "limit": Text(f"{field.max_tokens:,}"),
        "truncation removes": Text(tr("the beginning" if field.keeps_end else "the end")),
        "rows truncated": Text(f"{field.truncated:,} ({truncated:.1%})" if field.truncated else "0", style=style),
        "tokens lost": Text(f"{field.lost_tokens:,} ({lost:.1%})" if field.lost_tokens else "0", style=style),
    }


def _store_facts(report: "TokenizeReport") -> Table:
    requested = ",".join(map(str, report.requested_max_tokens))
    effective = ", ".join(f"{name} {field.max_tokens:,}" for name, field in report.fields.items())
    facts = {
        "read": Text(
            translate(f"{report.rows_in:,} rows from {show_count(report.sources, 'file')}: {report.layout_reason}")
        ),
        **(
            {"added": Text(translate(f"{report.rows_added:,} rows, because one may give several"))}
            if report.rows_added
            else {}
        ),
        "dropped": _dropped(report),
        **({"noted": Text("\n").join(notes)} if (notes := _notes(report.notes)) else {}),
        "limit": Text(translate(f"--max-tokens {requested} is {effective}, eos included")),
        "tokenizer": Text(translate(f"{report.tokenizer}, {report.vocab_size:,} tokens, stored as {report.dtype}")),
        "time": Text(translate(f"{show_seconds(report.seconds)}, {show_rate(report.rows_per_s)} rows/s")),
        "memory": _memory(report),
    }
    if report.skipped:
        facts["skipped"] = Text(translate(_one_line(skipped_note(report.skipped))), style=_WARN)
    if report.resumed_rows:
        facts["continued"] = Text(translate(f"after {report.resumed_rows:,} rows that an interrupted run had written"))
    if report.started_over:
        reason = f"an interrupted run could not be continued: {report.started_over}"
        facts["started over"] = Text(translate(reason), style=_WARN)
    return _facts(facts)


def _dropped(report: "TokenizeReport") -> Text:
    dropped = {reason: rows for reason, rows in report.dropped.items() if rows}
    if not dropped:
        return Text(tr("no row"))
    reasons = ", ".join(f"{rows:,} {reason}" for reason, rows in dropped.items())
    first = f"; the first broken one is {report.first_broken}" if report.first_broken else ""
    for reason, place in report.first_dropped.items():
        first += f"; the first {reason!r} is {place}" if reason not in ("broken", "empty") else ""
    return Text(translate(f"{sum(dropped.values()):,} of {report.rows_in:,} rows: {reasons}{first}"), style=_WARN)


def _memory(report: "TokenizeReport") -> Text:
    if not report.peak_bytes:
        return Text(tr("unknown on this kernel"))
    over = report.peak_bytes > report.host_limit_bytes
    sentence = (
        f"peak {show_bytes(report.peak_bytes)} (measured) of {show_bytes(report.host_limit_bytes)}; "
        f"{show_bytes(report.start_bytes)} before the first row"
    )
    return Text(translate(sentence), style=_WARN if over else "")


def _table(first: str, *, right: tuple[str, ...]) -> Table:
    table = Table(box=None, padding=(0, 2, 0, 0), pad_edge=False, header_style="dim")
    table.add_column(tr(first), no_wrap=True)
    for name in right:
        table.add_column(tr(name), justify="right")
    return table


def _facts(lines: dict[str, Text]) -> Table:
    table = Table.grid(padding=(0, 2, 0, 0))
    table.add_column(style="bold", no_wrap=True)
    table.add_column(overflow="fold")
    for name, text in lines.items():
        table.add_row(tr(name), text)
    return table
