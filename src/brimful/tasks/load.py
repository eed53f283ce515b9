"""From what the user typed to a task and its options: a built-in name, or `file.py:name`.

The name in a file may be a task, a subclass of `Task`, or a function that returns one. The file is run as a module of its
own, with its folder importable, as `python file.py` would.

The process that the user starts must not import torch (3 s, 230 MB), and a task's file usually does. So the options of a
task in a file come from a short-lived child process, `python -m brimful.tasks.load file.py:name`, and only if a flag, a
config file or `--help` needs them. Built-in options are imported directly.
"""

import dataclasses
import difflib
import importlib
import importlib.util
import inspect
import json
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, redirect_stdout
from functools import lru_cache
from pathlib import Path
from types import ModuleType
from typing import Any

from brimful import errors
from brimful.errors import TaskError, UnknownTask, UserError, in_one_line, kind_of, user_line
from brimful.task import Task
from brimful.tasks.option_fields import (
    OptionField,
    build_options,
    check_values,
    decode_type,
    encode_type,
    option_fields,
)

BUILT_IN = {
    "pretrain": "brimful.tasks.language:Pretrain",
    "sft": "brimful.tasks.language:Sft",
    "dpo": "brimful.tasks.preference:Dpo",
}
RENAMED = {"chatlm-pretrain": "pretrain", "chatlm-sft": "sft"}
"""Names that built-in tasks had."""


def load_task(spec: str, options: Mapping[str, Any] | None = None, *, resumed_run: Path | None = None) -> Task:
    """The task behind `spec`, with these options by name; those left out or None have the task's defaults.

    >>> load_task("pretrain", {"model": "chatlm-tiny"}).options.model
    'chatlm-tiny'

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
    task_options = build_options(value.Options, values, value.name)
    task: Task = _call(lambda: (type(value) if isinstance(value, Task) else value)(task_options), spec)
    return task


def check_spec(spec: str) -> None:
    """Refuse what is neither a built-in task nor a file, without running anything."""
    if spec in BUILT_IN:
        return
    path, colon, _ = spec.rpartition(":")
    if colon and path.endswith(".py"):
        if not Path(path).is_file():
            raise UnknownTask(f"there is no file {path}, so there is no task {spec}. Try: another path.")
        return
    if Path(spec).is_file():
        raise UnknownTask(f"{spec} is a file. Try: {spec}:name, with the name of the task in it.")
    if new := RENAMED.get(spec):
        raise UnknownTask(f"the task {spec} is now {new}, with the model it trains. Try: {new} DATA --model MODEL.")
    close = difflib.get_close_matches(spec.removeprefix("chatlm-"), BUILT_IN, n=1)
    advice = close[0] if close else f"{', '.join(BUILT_IN)}, or file.py:name"
    raise UnknownTask(f"there is no task {spec!r}. Try: {advice}.")


def check_request_options(spec: str, values: Mapping[str, Any], resumed_run: Path | None) -> None:
    """As much of `load_task` as needs no torch: a built-in task's own checks, and the types of a file's options."""
    if spec in BUILT_IN:
        owner = _find(spec).Options
        if resumed_run is not None and hasattr(owner, "on_resume"):
            values = owner.on_resume(dict(values), resumed_run)
        build_options(owner, {name: value for name, value in values.items() if value is not None}, spec)
    elif values and resumed_run is None:
        check_values(task_option_fields(spec), values, spec)


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
        raise TaskError(
            f"{spec} could not be run, and its process ended with exit code {done.returncode}. Try: python {spec.rpartition(':')[0]}."
        )
    return tuple(OptionField(**{**one, "type": decode_type(one["type"])}) for one in answer["fields"])


def _print_option_fields(spec: str) -> None:
    """What the child prints: one JSON object."""
    try:
        with redirect_stdout(sys.stderr):
            owner = _task_or_class(spec).Options
            fields = [] if owner is None else option_fields(owner)
            answer: dict[str, Any] = {
                "fields": [{**dataclasses.asdict(one), "type": encode_type(one.type, one.name)} for one in fields]
            }
    except UserError as error:
        answer = {"error": type(error).__name__, "message": str(error)}
    print(json.dumps(answer, default=str))


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
    hint = f"Try: {', '.join(own)}." if own else "Try: define a subclass of brimful.Task in it."
    raise UnknownTask(f"{path} has no {name!r}. {hint}")


def _run_file(path: Path) -> ModuleType:
    module_spec = importlib.util.spec_from_file_location(f"brimful_task_{path.stem}", path)
    assert module_spec is not None and module_spec.loader is not None
    module = importlib.util.module_from_spec(module_spec)
    sys.modules[module_spec.name] = module
    sys.path.insert(0, str(path.parent.resolve()))
    try:
        with _no_bytecode():
            module_spec.loader.exec_module(module)
    except (Exception, SystemExit) as error:
        raise TaskError(f"{path} cannot be run{user_line(error)}: {in_one_line(error).rstrip('. ')}.") from error
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
        raise TaskError(
            f"{spec} is {kind_of(value)}. Try: a brimful.Task, a subclass of it, or a function that returns one."
        )
    return value


def _has_required(owner: type | None) -> bool:
    return owner is not None and any(one.required for one in option_fields(owner))


def _is_task(value: Any) -> bool:
    return isinstance(value, Task) or (inspect.isclass(value) and issubclass(value, Task))


def _call(make: Any, spec: str) -> Any:
    try:
        return make()
    except UserError:
        raise
    except Exception as error:
        raise TaskError(f"{spec} cannot be called{user_line(error)}: {in_one_line(error).rstrip('. ')}.") from error


if __name__ == "__main__":
    _print_option_fields(sys.argv[1])
