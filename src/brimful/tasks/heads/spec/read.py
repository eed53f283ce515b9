"""SPEC.toml: what a sweep is asked for, checked as a whole before anything runs.

    seeds = 10                                   # 0 … 9; or a list of them
    methods = ["dpo", {name = "hinge", margin = [0.5, 1.0]}, "knn"]
    encoders = ["ecfp", {name = "ecfp", bits = 1024}, "features.npy", "file.py:encode"]
    positive = "ood"                             # the positive side of AUPR and FPR95

    [[datasets]]
    file = "hiv.csv.gz"                          # relative to the spec
    split = ["scaffold", "size"]                 # two datasets of one file
    label = "HIV_active"                         # for classifier methods only

    [head]
    hidden = [256, 128]
    [train]
    lr = [1e-4, 1e-3]                            # a list is a grid, here and in the options of a method

All problems are told at once, in one sentence that names file and key. What is left out has its default in `asked`.
"""

import itertools
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TypeVar

from brimful.errors import BadOption
from brimful.tasks.heads.spec.asked import ACTIVATIONS, HeadSpec, MethodChoice, SweepSpec, TrainSpec
from brimful.tasks.heads.spec.methods import METHODS
from brimful.tasks.heads.spec.sources import read_datasets, read_encoders
from brimful.tasks.heads.spec.table import (
    NUMBER,
    SHAPE,
    TEXT,
    Kind,
    SpecTable,
    above,
    at_least,
    one_of,
    repeated,
    share,
    shown,
    unknown,
    whole,
)
from brimful.units import parse_bytes

__all__ = ["SweepSpec", "read_spec"]

_TOP = ("seeds", "methods", "encoders", "positive", "device", "memory_limit", "datasets", "head", "train")
_HEAD = {"hidden": SHAPE, "activation": one_of(ACTIVATIONS), "dropout": share(zero=True)}
_TRAIN = {
    "lr": above(0), "weight_decay": at_least(0), "batch": whole(1), "epochs": whole(1), "patience": whole(1),
    "clip": at_least(0), "step_size": whole(1), "gamma": share(zero=False),
}  # fmt: skip
_OPTIONS = {
    "beta": above(0), "lam": at_least(0), "margin": at_least(0), "hard": share(zero=False), "weight": at_least(0),
    "temperature": above(0), "epsilon": at_least(0), "samples": whole(2), "k": whole(1), "neighbours": whole(1),
}  # fmt: skip
"""Of methods; an option that is not here may be any number."""


def read_spec(path: str | Path) -> SweepSpec:
    """The grid a file asks for. Everything wrong in it is told at once."""
    path = Path(path)
    try:
        content = tomllib.loads(path.read_text(encoding="utf-8-sig"))  # Notepad writes a mark in front
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or str(error)
        raise BadOption(f"{path} cannot be read as a sweep: {reason}; give a TOML file with datasets, encoders and methods") from None  # fmt: skip
    problems: list[str] = []
    spec = _spec(SpecTable(content, "", problems), path)
    if problems:
        raise BadOption(f"{path}: {'; '.join(problems)}")
    assert spec is not None
    return spec


def _spec(top: SpecTable, path: Path) -> SweepSpec | None:
    """None where a part is missing altogether; the problems say which."""
    top.only(_TOP)
    folder = path.absolute().parent
    methods = _methods(top)
    labelled = [one.name for one in methods if METHODS[one.name].needs_labels]
    parts = {
        "datasets": read_datasets(
            top, _listed(top, "datasets", "at least one table, [[datasets]], with a file"), folder, labelled
        ),
        "encoders": read_encoders(top, _listed(top, "encoders", 'a list, such as ["ecfp"]'), folder),
        "methods": methods,
        "seeds": _seeds(top),
    }
    heads, trainings = _product(top, "head", _HEAD, HeadSpec), _product(top, "train", _TRAIN, TrainSpec)
    positive = top.one("positive", "ood", one_of(("ood", "id")))
    device = top.one("device", None, TEXT)
    if (limit := top.content.get("memory_limit")) is not None:
        try:
            parse_bytes(limit, flag="memory_limit")
        except BadOption as error:
            top.wrong(str(error))
    if not all(parts.values()):
        return None
    return SweepSpec(source=path, **parts, heads=heads, trainings=trainings, positive=positive, device=device, memory_limit=limit)  # type: ignore[arg-type]  # fmt: skip


def _seeds(top: SpecTable) -> tuple[int, ...]:
    """`10` is 0 … 9."""
    asked = top.content.get("seeds", 10)
    if whole(1).good(asked):
        return tuple(range(asked))
    if isinstance(asked, list) and asked and all(whole(0).good(one) for one in asked):
        if again := repeated(asked):
            top.wrong(f"seeds has {again[0]} twice")
        if max(asked) >= 2**63:
            top.wrong(f"seeds has {max(asked)}: give numbers below 2⁶³")
        return tuple(asked)
    top.wrong(f"seeds {shown(asked)}: give how many, such as 10, or a list of whole numbers, such as [0, 1, 2]")
    return ()


_Choice = TypeVar("_Choice", HeadSpec, TrainSpec)


def _product(top: SpecTable, name: str, kinds: Mapping[str, Kind], owner: type[_Choice]) -> tuple[_Choice, ...]:
    """Every combination of the values that a table lists."""
    content = top.content.get(name, {})
    if not isinstance(content, dict):
        top.wrong(f"{name} {shown(content)}: write it as a table, [{name}], with {', '.join(kinds)} below")
        return (owner(),)
    table = SpecTable(content, f"[{name}]", top.problems)
    table.only(tuple(kinds), elsewhere=_TOP)
    default = owner()
    grid = {key: table.some(key, getattr(default, key), kind) for key, kind in kinds.items()}
    return tuple(owner(**dict(zip(grid, map(_frozen, values), strict=True))) for values in itertools.product(*grid.values()))  # fmt: skip


def _frozen(value: Any) -> Any:
    return tuple(value) if isinstance(value, list) else value


def _listed(top: SpecTable, key: str, example: str) -> list[Any]:
    asked = top.content.get(key)
    if isinstance(asked, (str, dict)):
        return [asked]
    if not isinstance(asked, list) or not asked:
        state = "missing" if asked is None else "empty" if asked == [] else f"{shown(asked)}, not a list"
        top.wrong(f"{key} is {state}: give {example}")
        return []
    return asked


def _methods(top: SpecTable) -> tuple[MethodChoice, ...]:
    chosen: list[MethodChoice] = []
    for asked in _listed(top, "methods", 'a list of names, such as ["dpo", "bce"]'):
        content = {"name": asked} if isinstance(asked, str) else asked
        if not isinstance(content, dict) or not isinstance(content.get("name"), str):
            top.wrong(f"methods has {shown(asked)}: give a name, or a table with a name, such as {{name = 'dpo', beta = 1}}")  # fmt: skip
        elif content["name"] not in METHODS:
            top.wrong(f"methods has the unknown method {unknown(content['name'], tuple(METHODS))}")
        else:
            chosen += _variants(SpecTable(content, f"method {content['name']}", top.problems))
    if again := repeated(chosen):
        top.wrong(f"methods has {again[0].name} twice with the same options")
    return tuple(chosen)


def _variants(table: SpecTable) -> list[MethodChoice]:
    """One choice for each combination of the options listed."""
    name, defaults = table.content["name"], METHODS[table.content["name"]].options
    table.only(("name", *defaults))
    grid = {key: table.some(key, default, _OPTIONS.get(key, NUMBER)) for key, default in defaults.items()}
    return [
        MethodChoice(name=name, options=dict(zip(grid, values, strict=True)))
        for values in itertools.product(*grid.values())
    ]
