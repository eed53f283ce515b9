"""Flags made from the classes of options they set: one definition, with its types and the sentence under each field.

An options class has real defaults; a flag must also know that it was *not* given, so that a recipe, a config file or the
run that is resumed can speak. Hence a second class, made here, in which every field is None unless the user said otherwise.
"""

import ast
import inspect
import json
import os
import sys
import textwrap
import time
import tomllib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import fields, make_dataclass
from importlib import resources
from itertools import pairwise
from pathlib import Path
from typing import Annotated, Any, get_type_hints

from cyclopts import Parameter
from rich.console import Console, RenderableType

from brimful.errors import BadOption

# How torch's allocator takes memory from a card, which is fixed before torch is imported.


def prefer_growing_segments() -> None:
    """Varying shapes fragment torch's default segments (20.0 GiB reserved for 15.4 in use); these can grow instead."""
    if "PYTORCH_CUDA_ALLOC_CONF" not in os.environ:
        os.environ.setdefault("PYTORCH_ALLOC_CONF", "expandable_segments:True")


# How commands speak: results on stdout (one JSON object, or a table), progress on stderr.


def show(result: RenderableType, data: dict[str, Any], *, as_json: bool) -> None:
    """The result: as one JSON object and nothing else, or as people read it."""
    if as_json:
        print(json.dumps(data), flush=True)
    elif isinstance(result, str):
        print(result, flush=True)  # as it is: a command that is told must not be broken over two lines
    else:
        Console().print(result)


@contextmanager
def progress(title: str, *, every_s: float = 0) -> Iterator[Callable[[str], None]]:
    """A phrase for each piece of work: a spinner on a terminal, plain lines elsewhere, one in `every_s` at most."""
    console, count = Console(stderr=True), 0
    if not sys.stderr.isatty():
        last = -every_s

        def line(phrase: str) -> None:
            nonlocal last
            if time.monotonic() - last >= every_s:
                last = time.monotonic()
                print(f"{title}: {phrase}", file=sys.stderr, flush=True)

        yield line
        return
    with console.status(title) as status:

        def say(phrase: str) -> None:
            nonlocal count
            count += 1
            status.update(f"{title}  [dim]{count:>2}[/]  {phrase}")

        yield say


RECIPES = "brimful.recipes"
TABLES = ("plan", "train")
"""Commands that read a config file."""


def flags_of(
    name: str,
    owners: Mapping[str, type],
    *,
    types: Mapping[str, Any] | None = None,
    said: Mapping[str, str] | None = None,
    names: Mapping[str, Sequence[str]] | None = None,
    without: Iterable[str] = (),
) -> type:
    """A dataclass of flags for every field of these classes, each class under its title. `types`, `said` and `names`
    come first."""
    found: dict[str, Any] = {}
    for title, owner in owners.items():
        words, hints = {**sentences(owner), **(said or {})}, get_type_hints(owner)
        for field in (field for field in fields(owner) if field.name not in without):
            kind = (types or {}).get(field.name, hints[field.name])
            shown = Parameter(
                help=words[field.name] + _default(field.default),
                negative="" if field.default is False else None,
                group=title,
                name=(names or {}).get(field.name),
            )
            found.setdefault(field.name, Annotated[kind | None, shown])
    made = make_dataclass(name, [(key, kind, None) for key, kind in found.items()], frozen=True, kw_only=True)
    made.__module__ = __name__  # a class of the module `types` would not be taken apart
    return Parameter(name="*")(made)


def _default(value: Any) -> str:
    return "" if value is None or isinstance(value, bool) else f" [default: {value}]"


def given(flags: Any) -> dict[str, Any]:
    """What the user said."""
    return {name(field.name): value for field in fields(flags) if (value := getattr(flags, field.name)) is not None}


def name(field: str) -> str:
    """`from_` is `from` to everybody but Python."""
    return field.rstrip("_")


def known(owners: Mapping[str, type]) -> list[str]:
    """Every option that these classes have."""
    return [name(key) for owner in owners.values() for key in get_type_hints(owner)]


def part(asked: Mapping[str, Any], owner: type) -> dict[str, Any]:
    """Those of the options that a class takes, as its keywords."""
    return {field.name: asked[name(field.name)] for field in fields(owner) if name(field.name) in asked}


def from_file(path: Path | None, known: Iterable[str], table: str) -> dict[str, Any]:
    """A TOML file's top-level keys, and those of the command's own table."""
    if path is None:
        return {}
    try:
        content = tomllib.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise BadOption(f"--config {path}: {getattr(error, 'strerror', None) or error}") from None
    return _options(content, list(known), table, f"--config {path}")


def from_recipe(recipe: str | None, known: Iterable[str], table: str) -> dict[str, Any]:
    """The same of a recipe that comes with the package."""
    if recipe is None:
        return {}
    there = {Path(one.name).stem: one for one in resources.files(RECIPES).iterdir() if one.name.endswith(".toml")}
    if recipe not in there:
        raise BadOption(
            f"--recipe {recipe}: there are {', '.join(sorted(there))}; a file of yours is given with --config"
        )
    return _options(tomllib.loads(there[recipe].read_text(encoding="utf-8")), list(known), table, f"--recipe {recipe}")


def _options(content: dict[str, Any], known: list[str], table: str, flag: str) -> dict[str, Any]:
    tables = {key: value for key, value in content.items() if isinstance(value, dict)}
    if other := [key for key in tables if key not in TABLES]:
        raise BadOption(f"{flag}: unknown table {', '.join(other)}; there are {', '.join(TABLES)}")
    top = {key: value for key, value in content.items() if key not in tables}
    options = {key.replace("-", "_"): value for key, value in {**top, **tables.get(table, {})}.items()}
    if unknown := [key for key in options if key not in known]:
        raise BadOption(f"{flag}: unknown option {', '.join(unknown)}; known are {', '.join(known)}")
    return options


def sentences(owner: type) -> dict[str, str]:
    """By field, the string that follows it in the source."""
    body = ast.parse(textwrap.dedent(inspect.getsource(owner))).body[0].body  # type: ignore[attr-defined]
    return {
        one.target.id: " ".join(two.value.value.split())
        for one, two in pairwise(body)
        if isinstance(one, ast.AnnAssign)
        and isinstance(one.target, ast.Name)
        and isinstance(two, ast.Expr)
        and isinstance(two.value, ast.Constant)
        and isinstance(two.value.value, str)
    }
