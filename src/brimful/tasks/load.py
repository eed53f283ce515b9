"""From what the user typed to a task: a built-in name, or `file.py:name`.

The name in a file may be a task, a subclass of `Task`, or a function that returns one. The file is run as a module of
its own, with its folder importable, as `python file.py` would.
"""

import difflib
import importlib
import importlib.util
import inspect
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any

from brimful.errors import BadOption, TaskError, UnknownTask, in_one_line
from brimful.task import Task
from brimful.tasks.chatlm import ChatOptions

BUILT_IN = {
    "chatlm-pretrain": "brimful.tasks.chatlm:Pretrain",
    "chatlm-sft": "brimful.tasks.chatlm:Sft",
}


def load_task(spec: str, *, options: Mapping[str, Any] | None = None) -> Task:
    """The task behind `spec`. `options` are those of `ChatOptions`, which the built-in tasks take."""
    options = {word: value for word, value in (options or {}).items() if value is not None}
    if spec in BUILT_IN:
        module, name = BUILT_IN[spec].split(":")
        return _made(getattr(importlib.import_module(module), name), options)
    path, colon, name = spec.rpartition(":")
    if not colon or not path.endswith(".py"):
        raise UnknownTask(_unknown(spec))
    if options:
        flags = ", ".join(f"--{word.rstrip('_').replace('_', '-')} {value}" for word, value in options.items())
        raise BadOption(
            f"{flags}: only the built-in tasks ({', '.join(BUILT_IN)}) have a size, a --from and the like, not {spec}"
        )
    return _as_task(_attribute(_run_file(Path(path)), path, name), spec)


def _made(task: Any, options: dict[str, Any]) -> Task:
    made: Task = task(options=ChatOptions(**options))
    return made


def _unknown(spec: str) -> str:
    known = ", ".join(BUILT_IN)
    close = difflib.get_close_matches(spec, BUILT_IN, n=1)
    if Path(spec).is_file():
        return f"unknown task {spec!r}: name what is in the file, as in {spec}:task"
    hint = f"; did you mean {close[0]}?" if close else ""
    return f"unknown task {spec!r}: the built-in ones are {known}, your own is written file.py:name{hint}"


def _run_file(path: Path) -> ModuleType:
    if not path.is_file():
        raise UnknownTask(f"unknown task: there is no file {path}")
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


def _attribute(module: ModuleType, path: str, name: str) -> Any:
    if hasattr(module, name):
        return getattr(module, name)
    own = [key for key, value in vars(module).items() if _is_task(value) and value is not Task]
    there = f"it has {', '.join(own)}" if own else "it defines no task"
    raise UnknownTask(f"there is no {name!r} in {path}; {there}")


def _is_task(value: Any) -> bool:
    return isinstance(value, Task) or (inspect.isclass(value) and issubclass(value, Task))


def _as_task(value: Any, spec: str) -> Task:
    if not isinstance(value, Task) and callable(value):
        try:
            value = value()
        except Exception as error:
            raise TaskError(f"{spec} cannot be called: {in_one_line(error)}") from error
    if not isinstance(value, Task):
        raise TaskError(
            f"{spec} is a {type(value).__name__}, not a brimful.Task, a subclass of it or a function that returns one"
        )
    return value
