"""Dataclasses of options, read as flags, TOML files and help need them: names, types, defaults and docstrings.

`Task.Options` of a task and the options of Brimful's own commands are all such dataclasses. Torch is not imported here.
"""

import ast
import dataclasses
import difflib
import inspect
import textwrap
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import reduce
from itertools import pairwise
from operator import or_
from pathlib import Path
from types import NoneType, UnionType
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

from brimful.errors import BadOption, TaskError

_TYPES: dict[str, type] = {"int": int, "float": float, "str": str, "bool": bool, "Path": Path}
_WORDS = {int: "a whole number", float: "a number", str: "text", bool: "true or false", Path: "a path"}


@dataclass(frozen=True, kw_only=True)
class OptionField:
    """One option of a dataclass of options, as flags, TOML files and help need it."""

    name: str
    """As the user writes it: `from` for a field `from_`."""
    type: Any
    default: Any
    help: str
    path: bool = False
    """It names a file or folder: `field(metadata={"path": True})`."""
    required: bool = False


def option_fields(owner: type) -> list[OptionField]:
    """The fields of a dataclass of options, each with the docstring below it in the source."""
    if not dataclasses.is_dataclass(owner):
        raise TaskError(f"Options of {owner.__name__} must be a dataclass. Try: @dataclass(frozen=True, kw_only=True).")
    hints, texts = get_type_hints(owner), _docstrings(owner)
    options = []
    for one in dataclasses.fields(owner):
        default = one.default_factory() if one.default_factory is not dataclasses.MISSING else one.default
        required = default is dataclasses.MISSING
        options.append(
            OptionField(
                name=one.name.rstrip("_"), type=hints[one.name], default=None if required else default,
                help=texts.get(one.name, ""), path=bool(one.metadata.get("path")), required=required,
            )
        )  # fmt: skip
    return options


def _docstrings(owner: type) -> dict[str, str]:
    """By field, the string that follows it in the source of the class that defines it."""
    return {name: text for cls in reversed(owner.__mro__[:-1]) for name, text in _own_docstrings(cls).items()}


def _own_docstrings(owner: type) -> dict[str, str]:
    """Nothing where there is no source."""
    try:
        body = ast.parse(textwrap.dedent(inspect.getsource(owner))).body[0].body  # type: ignore[attr-defined]
    except (OSError, TypeError, SyntaxError):
        return {}
    return {
        one.target.id: " ".join(two.value.value.split())
        for one, two in pairwise(body)
        if isinstance(one, ast.AnnAssign)
        and isinstance(one.target, ast.Name)
        and isinstance(two, ast.Expr)
        and isinstance(two.value, ast.Constant)
        and isinstance(two.value.value, str)
    }


def build_options(owner: type | None, values: Mapping[str, Any], task: str) -> Any:
    """The dataclass of options, with every unknown name and wrong type reported at once."""
    check_values(() if owner is None else option_fields(owner), values, task)
    assert owner is not None
    names = {one.name.rstrip("_"): one.name for one in dataclasses.fields(owner)}
    return owner(**{names[name.rstrip("_")]: value for name, value in values.items()})


def check_values(options: Sequence[OptionField], values: Mapping[str, Any], task: str) -> None:
    """Refuse unknown names, wrong types and missing values, all in one `BadOption`."""
    by_name = {one.name: one for one in options}
    values = {name.rstrip("_"): value for name, value in values.items()}
    problems = [_unknown(name, by_name, task) for name in values if name not in by_name]
    for name, option in by_name.items():
        if name not in values and option.required:
            problems.append(f"{name}= is required by task {task}.")
        elif name in values and not _fits(values[name], option.type):
            problems.append(f"{name}={values[name]!r} must be {_describe(option.type)}.")
    if problems:
        raise BadOption(" ".join(problems))


def _unknown(name: str, known: Mapping[str, OptionField], task: str) -> str:
    close = difflib.get_close_matches(name, known, n=1)
    hint = f" Try: {close[0]}=." if close else f" Try: one of {', '.join(known)}." if known else ""
    return f"task {task} has no option {name}=.{hint}"


def _members(hint: Any) -> tuple[Any, ...]:
    return get_args(hint) if get_origin(hint) in (Union, UnionType) else (hint,)


def encode_type(hint: Any, name: str) -> list[Any]:
    """A type as JSON: the names of its members, a list of words for a Literal, null for None."""
    encoded: list[Any] = []
    for member in _members(hint):
        if get_origin(member) is Literal:
            encoded.append(list(get_args(member)))
        elif member is NoneType:
            encoded.append(None)
        elif member in _TYPES.values():
            encoded.append(member.__name__)
        else:
            raise TaskError(f"option {name} has the type {member}. Try: int, float, str, bool, Path or Literal.")
    return encoded


def decode_type(encoded: list[Any]) -> Any:
    members = [
        Literal[tuple(one)] if isinstance(one, list) else NoneType if one is None else _TYPES[one] for one in encoded
    ]
    return reduce(or_, members)


def _fits(value: Any, hint: Any) -> bool:
    for member in _members(hint):
        if get_origin(member) is Literal:
            fits = value in get_args(member)
        elif member is float:
            fits = isinstance(value, (int, float)) and not isinstance(value, bool)
        elif member is int:
            fits = isinstance(value, int) and not isinstance(value, bool)
        elif member is Path:
            fits = isinstance(value, (str, Path))
        else:
            fits = member not in _TYPES.values() or isinstance(value, member)
        if fits:
            return True
    return False


def _describe(hint: Any) -> str:
    words = []
    for member in _members(hint):
        if get_origin(member) is Literal:
            words.append(f"one of {', '.join(map(str, get_args(member)))}")
        elif member is not NoneType:
            words.append(_WORDS.get(member, getattr(member, "__name__", str(member))))
    return " or ".join(words)
