"""From what the user wrote to an encoder: a name, a table with a name and options, a file, or `file.py:function`."""

import difflib
import importlib
from collections.abc import Mapping
from dataclasses import fields
from pathlib import Path
from typing import Any

from brimful.errors import BadOption
from brimful.tasks.heads.features.protocol import Encoder

_CLASSES = {
    "ecfp": "ecfp:Ecfp",
    "descriptors": "descriptors:Descriptors",
    "chemnet": "chemnet:ChemNet",
    "minimol": "minimol:MiniMol",
    "unimol": "unimol:UniMol",
}
ENCODERS = tuple(_CLASSES)
FILES = (".npy", ".parquet")


def load_encoder(asked: str | Mapping[str, Any], *, folder: Path = Path(), device: str = "cpu") -> Encoder:
    """The encoder behind `asked`. Relative files are looked for in `folder`; learned ones run on `device`."""
    name, options = (asked, {}) if isinstance(asked, str) else _taken_apart(asked)
    if name in _CLASSES:
        return _built_in(name, _placed(options, folder), device)
    path, colon, function = name.rpartition(":")
    if (colon and path.endswith(".py")) or name.endswith(FILES):
        if options:
            raise BadOption(f"encoder {name}: a file of yours takes no options, and {', '.join(options)} was given")
        return _from_file(folder / (path if path.endswith(".py") else name), function if path.endswith(".py") else "")
    raise BadOption(_unknown(name, folder))


def _taken_apart(asked: Mapping[str, Any]) -> tuple[str, dict[str, Any]]:
    options = dict(asked)
    name = options.pop("name", None)
    if not isinstance(name, str):
        raise BadOption(
            f'an encoder is a name or a table with one, such as {{name = "ecfp", bits = 1024}}, not {asked!r}'
        )
    return name, options


def _placed(options: dict[str, Any], folder: Path) -> dict[str, Any]:
    """Relative paths made those of the folder; `python3.11` without a slash is a command and stays one."""
    paths = {word for word in ("python", "weights") if isinstance(options.get(word), str)}
    return {
        word: str(folder / value) if word in paths and (word == "weights" or "/" in value) else value
        for word, value in options.items()
    }


def _built_in(name: str, options: dict[str, Any], device: str) -> Encoder:
    module, class_name = _CLASSES[name].split(":")
    made = getattr(importlib.import_module(f"brimful.tasks.heads.features.{module}"), class_name)
    kinds = {one.name: one.type for one in fields(made)}
    problems = [_problem(word, value, kinds) for word, value in options.items()]
    if told := [problem for problem in problems if problem]:
        raise BadOption(f"encoder {name}: {'; '.join(told)}")
    if "device" in kinds:
        options.setdefault("device", device)
    encoder: Encoder = made(**options)
    return encoder


def _problem(word: str, value: Any, kinds: Mapping[str, Any]) -> str | None:
    """What is wrong with one option; None where nothing is."""
    if word not in kinds:
        close = difflib.get_close_matches(word, kinds, n=1)
        there = f"its options are {', '.join(kinds)}" if kinds else "it has none"
        return f"there is no option {word!r}; {there}" + (f"; did you mean {close[0]}?" if close else "")
    wanted = kinds[word]
    right = isinstance(value, wanted) and (wanted is not int or not isinstance(value, bool))
    if right or (wanted == str | None and isinstance(value, Path)):
        return None
    sort = {int: "a whole number", bool: "true or false"}.get(wanted, "a text")
    return f"{word} is {value!r} and should be {sort}"


def _from_file(file: Path, function: str) -> Encoder:
    if not file.is_file():
        raise BadOption(f"encoder {file}: there is no such file")
    if function:
        from brimful.tasks.heads.features.function import UserFunction

        return UserFunction(file=file, function=function)
    from brimful.tasks.heads.features.given import Given

    return Given(file=file)


def _unknown(name: str, folder: Path) -> str:
    if name.endswith(".py"):
        return f"encoder {name}: name the function in the file, as in {name}:encode"
    if (folder / name).is_file():
        return f"encoder {name}: features are read from .npy and .parquet files, or computed by file.py:function"
    close = difflib.get_close_matches(name, ENCODERS, n=1)
    hint = f"; did you mean {close[0]}?" if close else ""
    return f"unknown encoder {name!r}: there are {', '.join(ENCODERS)}, a .npy or .parquet file of features, and file.py:function{hint}"
