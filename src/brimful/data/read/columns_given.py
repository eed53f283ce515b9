"""`--columns prompt=question,response=answer`: the user says which column is what.

Either side of the `=` may be the column, as long as it is clear: the side comes first where both could be meant. Sides that
are not given are found by name. `prompt=instruction+input` joins two columns.
"""

from collections.abc import Sequence

from brimful.data.read.columns import CHOSEN, PROMPTS, REJECTED, RESPONSES, SIDES, Kind, Layout, first, named, parts
from brimful.errors import BadOption

_NAMES = {"prompt": PROMPTS, "response": RESPONSES, "chosen": CHOSEN, "rejected": REJECTED}
_SIDES = (*_NAMES, "text", "conversations")


def given_layout(asked: str, names: Sequence[str], file: str) -> Layout:
    """The layout that was asked for, of a file with these columns."""
    given: dict[str, str] = {}
    for item in asked.split(","):
        side, column = _pair(item, asked, names, file)
        if side in given:
            raise BadOption(f"--columns {asked}: {side} is given twice; join columns with a plus, such as {side}=a+b")
        given[side] = column
    kind = _kind(given, names)
    extra = [side for side in given if side not in (*SIDES[kind], kind)]
    if extra:
        raise BadOption(f"--columns {asked}: {extra[0]} does not go with {next(iter(set(given) - set(extra)))}")
    used = {part for column in given.values() for part in parts(column, names)}
    free = [name for name in names if name not in used]
    columns = {side: given.get(side) or given.get(kind) or _found(side, free, asked, file) for side in SIDES[kind]}
    found = [side for side in columns if side not in given and kind not in given]
    reason = "as asked for by --columns" + (f"; found {' and '.join(columns[side] for side in found)}" if found else "")
    return Layout(kind=kind, sides=SIDES[kind], columns=columns, reason=reason)


def _pair(item: str, asked: str, names: Sequence[str], file: str) -> tuple[str, str]:
    left, equals, right = (part.strip() for part in item.partition("="))
    if not (equals and left and right) or not {left, right} & set(_SIDES):
        raise BadOption(
            f"--columns {asked}: {item!r} is no side=column; sides are {', '.join(_SIDES)}, and {file} has {named(names)}"
        )
    if left in _SIDES and (column := _columns(right, names)):
        return left, column
    if right in _SIDES and (column := _columns(left, names)):
        return right, column
    raise BadOption(
        f"--columns {asked}: {file} has no column {right if left in _SIDES else left}; it has {named(names)}"
    )


def _columns(written: str, names: Sequence[str]) -> str | None:
    """The file's own spelling of these columns; None where it lacks one."""
    found = [_spelled(part.strip(), names) for part in parts(written, names)]
    return "+".join(name for name in found if name) if all(found) else None


def _spelled(written: str, names: Sequence[str]) -> str | None:
    return written if written in names else first([written.lower()], names)


def _kind(given: dict[str, str], names: Sequence[str]) -> Kind:
    if "text" in given:
        return "text"
    if "conversations" in given:
        return "conversations"
    preference = {"chosen", "rejected"} & set(given) or (
        "response" not in given and first(CHOSEN, names) and first(REJECTED, names)
    )
    return "preference" if preference else "pair"


def _found(side: str, names: Sequence[str], asked: str, file: str) -> str:
    column = first(_NAMES[side], names)
    if column is None:
        raise BadOption(f"--columns {asked}: say also which column is {side}; {file} has {named(names)}")
    return column
