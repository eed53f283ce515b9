"""From what the user typed to a task and its options: a built-in name, or `file.py:name`.

The name in a file may be a task, a subclass of `Task`, or a function that returns one. The file is run as a module of its
own, with its folder importable, as `python file.py` would.

A task declares its options as a dataclass (`Task.Options`); `option_fields` turns it into flags and help. The process that
the user starts must not import torch (3 s, 230 MB), and a task's file usually does. So for a file the fields come from a
short-lived child process, `python -m brimful.tasks.load file.py:name`, and only if a flag, a config file or `--help` needs
them. Built-in options are imported directly.
"""

import ast
import dataclasses
import difflib
import importlib
import importlib.util
import inspect
import json
import subprocess
import sys
import textwrap
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, redirect_stdout
from dataclasses import dataclass
from functools import lru_cache, reduce
from itertools import pairwise
from operator import or_
from pathlib import Path
from types import ModuleType, NoneType, UnionType
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

from brimful import errors
from brimful.errors import BadOption, TaskError, UnknownTask, UserError, in_one_line
from brimful.task import Task

BUILT_IN = {
    "chatlm-pretrain": "brimful.tasks.chatlm:Pretrain",
    "chatlm-sft": "brimful.tasks.chatlm:Sft",
}
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


def load_task(spec: str, options: Mapping[str, Any] | None = None, *, resumed_run: Path | None = None) -> Task:
    """The task behind `spec`, with these options by name; those left out or None have the task's defaults.

    >>> load_task("chatlm-pretrain", {"size": "tiny"}).options.size
    'tiny'

    `resumed_run` is the folder of a run that continues: the task may replace paths that are gone by the run's own files.
    """
    check_spec(spec)
    value = _task_or_class(spec)
    values = dict(options or {})
    if resumed_run is not None and hasattr(value.Options, "on_resume"):
        values = value.Options.on_resume(values, resumed_run)
    values = {name: one for name, one in values.items() if one is not None}
    if not values and isinstance(value, Task):
        return value
    if not values and not _has_required(value.Options):
        return _call(value, spec)
    built = build_options(value.Options, values, value.name)
    made: Task = _call(lambda: (type(value) if isinstance(value, Task) else value)(built), spec)
    return made


def check_spec(spec: str) -> None:
    """Refuse what is neither a built-in task nor a file, without running anything."""
    if spec in BUILT_IN:
        return
    path, colon, _ = spec.rpartition(":")
    if colon and path.endswith(".py"):
        if not Path(path).is_file():
            raise UnknownTask(f"there is no file {path}, so there is no task {spec}.")
        return
    if Path(spec).is_file():
        raise UnknownTask(f"{spec} is a file. Try: {spec}:name, with the name of the task in it.")
    close = difflib.get_close_matches(spec, BUILT_IN, n=1)
    advice = close[0] if close else f"{', '.join(BUILT_IN)}, or file.py:name"
    raise UnknownTask(f"there is no task {spec!r}. Try: {advice}.")


def build_options(owner: type | None, values: Mapping[str, Any], task: str) -> Any:
    """The dataclass of options, with every unknown name and wrong type reported at once."""
    check_options(() if owner is None else option_fields(owner), values, task)
    assert owner is not None
    names = {one.name.rstrip("_"): one.name for one in dataclasses.fields(owner)}
    return owner(**{names[name.rstrip("_")]: value for name, value in values.items()})


def check_options(known: Sequence[OptionField], values: Mapping[str, Any], task: str) -> None:
    """Refuse unknown names, wrong types and missing values, all in one `BadOption`."""
    by_name = {one.name: one for one in known}
    values = {name.rstrip("_"): value for name, value in values.items()}
    problems = [_unknown(name, by_name, task) for name in values if name not in by_name]
    for name, option in by_name.items():
        if name not in values and option.required:
            problems.append(f"{name}= is required by task {task}.")
        elif name in values and not _fits(values[name], option.type):
            problems.append(f"{name}={values[name]!r} must be {_describe(option.type)}.")
    if problems:
        raise BadOption(" ".join(problems))


def check_request_options(spec: str, values: Mapping[str, Any], resumed_run: Path | None) -> None:
    """As much of `load_task` as needs no torch: a built-in task's own checks, and the types of a file's options."""
    if spec in BUILT_IN:
        owner = _find(spec).Options
        if resumed_run is not None and hasattr(owner, "on_resume"):
            values = owner.on_resume(dict(values), resumed_run)
        build_options(owner, {name: value for name, value in values.items() if value is not None}, spec)
    elif values and resumed_run is None:
        check_options(task_option_fields(spec), values, spec)


def _unknown(name: str, known: Mapping[str, OptionField], task: str) -> str:
    close = difflib.get_close_matches(name, known, n=1)
    hint = f" Try: {close[0]}=." if close else f" It has {', '.join(known)}." if known else ""
    return f"task {task} has no option {name}=.{hint}"


def option_fields(owner: type) -> list[OptionField]:
    """The fields of a dataclass of options, each with the docstring below it in the source."""
    if not dataclasses.is_dataclass(owner):
        raise TaskError(f"Options of {owner.__name__} must be a dataclass. Try: @dataclass(frozen=True, kw_only=True).")
    hints, texts = get_type_hints(owner), _docstrings(owner)
    found = []
    for one in dataclasses.fields(owner):
        default = one.default_factory() if one.default_factory is not dataclasses.MISSING else one.default
        required = default is dataclasses.MISSING
        found.append(
            OptionField(
                name=one.name.rstrip("_"), type=hints[one.name], default=None if required else default,
                help=texts.get(one.name, ""), path=bool(one.metadata.get("path")), required=required,
            )
        )  # fmt: skip
    return found


def _docstrings(owner: type) -> dict[str, str]:
    """By field, the string that follows it in the source; nothing where there is no source."""
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


@lru_cache(maxsize=4)
def task_option_fields(spec: str) -> tuple[OptionField, ...]:
    """The options of a task, without importing torch here: for a file they come from a child process."""
    check_spec(spec)
    if spec in BUILT_IN:
        owner = _find(spec).Options
        return () if owner is None else tuple(option_fields(owner))
    done = subprocess.run(
        [sys.executable, "-m", "brimful.tasks.load", spec], stdout=subprocess.PIPE, text=True, check=False
    )
    answer = json.loads(done.stdout or "{}")
    if "error" in answer:
        raise getattr(errors, answer["error"])(answer["message"])
    if "fields" not in answer:
        raise TaskError(f"{spec} could not be run: its process ended with exit code {done.returncode}.")
    return tuple(OptionField(**{**one, "type": _decode(one["type"])}) for one in answer["fields"])


def _print_option_fields(spec: str) -> None:
    """What the child prints: one JSON object."""
    try:
        with redirect_stdout(sys.stderr):
            owner = _task_or_class(spec).Options
            fields = [] if owner is None else option_fields(owner)
            answer: dict[str, Any] = {
                "fields": [{**dataclasses.asdict(one), "type": _encode(one.type, one.name)} for one in fields]
            }
    except UserError as error:
        answer = {"error": type(error).__name__, "message": str(error)}
    print(json.dumps(answer, default=str))


def _members(hint: Any) -> tuple[Any, ...]:
    return get_args(hint) if get_origin(hint) in (Union, UnionType) else (hint,)


def _encode(hint: Any, name: str) -> list[Any]:
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


def _decode(encoded: list[Any]) -> Any:
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


def _find(spec: str) -> Any:
    """What the spec names: a class for a built-in task, anything for a file."""
    if spec in BUILT_IN:
        module, name = BUILT_IN[spec].split(":")
        return getattr(importlib.import_module(module), name)
    path, _, name = spec.rpartition(":")
    module_of_file = _run_file(Path(path))
    if hasattr(module_of_file, name):
        return getattr(module_of_file, name)
    own = [key for key, value in vars(module_of_file).items() if _is_task(value) and value is not Task]
    hint = f"Try: {', '.join(own)}." if own else "It defines no task."
    raise UnknownTask(f"{path} has no {name!r}. {hint}")


def _run_file(path: Path) -> ModuleType:
    found = importlib.util.spec_from_file_location(f"brimful_task_{path.stem}", path)
    assert found is not None and found.loader is not None
    module = importlib.util.module_from_spec(found)
    sys.modules[found.name] = module
    sys.path.insert(0, str(path.parent.resolve()))
    try:
        with _no_bytecode():
            found.loader.exec_module(module)
    except (Exception, SystemExit) as error:
        raise TaskError(f"{path} cannot be run: {in_one_line(error)}") from error
    return module


@contextmanager
def _no_bytecode() -> Iterator[None]:
    """A user's folder is not ours to leave a __pycache__ in."""
    before, sys.dont_write_bytecode = sys.dont_write_bytecode, True
    try:
        yield
    finally:
        sys.dont_write_bytecode = before


def _task_or_class(spec: str) -> Any:
    value = _find(spec)
    if not _is_task(value) and callable(value):
        value = _call(value, spec)
    if not _is_task(value):
        kind = type(value).__name__
        raise TaskError(f"{spec} is a {kind}. Try: a brimful.Task, a subclass of it, or a function that returns one.")
    return value


def _has_required(owner: type | None) -> bool:
    return owner is not None and any(one.required for one in option_fields(owner))


def _is_task(value: Any) -> bool:
    return isinstance(value, Task) or _is_task_class(value)


def _is_task_class(value: Any) -> bool:
    return inspect.isclass(value) and issubclass(value, Task)


def _call(make: Any, spec: str) -> Any:
    try:
        return make()
    except UserError:
        raise
    except Exception as error:
        raise TaskError(f"{spec} cannot be called: {in_one_line(error)}") from error


if __name__ == "__main__":
    _print_option_fields(sys.argv[1])
