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

import difflib
import itertools
import math
import tomllib
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from brimful.errors import BadOption
from brimful.molecules.spec import (
    ACTIVATIONS,
    METHODS,
    PUBLISHED,
    SPLITS,
    DatasetSpec,
    EncoderChoice,
    HeadSpec,
    MethodChoice,
    SweepSpec,
    TrainSpec,
)
from brimful.units import parse_bytes

# A table of the spec file while it is read: every value is checked, and what is wrong is gathered, not raised.
#
# A grid that takes an hour is started once; a spec with four mistakes should say four sentences, not one an attempt.
# Whoever reads a table asks it for each key; a value that is wrong is noted and the default is handed out instead, so that
# the reading goes on. The file as a whole is refused at the end, by whoever holds the list.


@dataclass(frozen=True, slots=True)
class Kind:
    """What a value has to be: in words that follow "give", and as a test."""

    words: str
    good: Callable[[Any], bool]


def whole(least: int) -> Kind:
    return Kind(
        f"a whole number of at least {least}",
        lambda value: _number(value) and isinstance(value, int) and value >= least,
    )


def above(least: float) -> Kind:
    return Kind(f"a number above {least:g}", lambda value: _number(value) and value > least)


def at_least(least: float) -> Kind:
    return Kind(f"a number of at least {least:g}", lambda value: _number(value) and value >= least)


def share(*, zero: bool) -> Kind:
    """From 0 up to but without 1 (a dropout), or above 0 up to 1 (a factor)."""
    if zero:
        return Kind("a number from 0 on and below 1", lambda value: _number(value) and 0 <= value < 1)
    return Kind("a number above 0, up to 1", lambda value: _number(value) and 0 < value <= 1)


def one_of(names: Sequence[str]) -> Kind:
    return Kind(f"one of {', '.join(names)}", lambda value: isinstance(value, str) and value in names)


NUMBER = Kind("a number", lambda value: _number(value))
TEXT = Kind("a text", lambda value: isinstance(value, str) and value.strip() != "")
SHAPE = Kind(
    "a list of layer sizes, such as [256, 128]",
    lambda value: isinstance(value, list) and all(whole(1).good(one) for one in value),
)


class SpecTable:
    """One table, with the place in the file that its problems are told with."""

    def __init__(self, content: Mapping[str, Any], where: str, problems: list[str]) -> None:
        self.content, self.where, self.problems = content, where, problems

    def wrong(self, sentence: str) -> None:
        self.problems.append(f"{self.where}: {sentence}" if self.where else sentence)

    def only(self, known: Sequence[str], *, elsewhere: Sequence[str] = ()) -> None:
        """Keys that nobody asks for are mistakes. TOML gives a key below `[[datasets]]` to the dataset: that is told."""
        for key in self.content:
            if key in elsewhere:
                self.wrong(f"{key} belongs to the top of the file, above the first [table]")
            elif key not in known:
                self.wrong(f"unknown key {unknown(key, known)}")

    def one(self, key: str, default: Any, kind: Kind) -> Any:
        """The value, or the default where it is missing or wrong."""
        if key not in self.content:
            return default
        return self._good(key, self.content[key], default, kind)

    def some(self, key: str, default: Any, kind: Kind) -> tuple[Any, ...]:
        """One value or a list of them: a grid. A shape is a list itself, so its grid is a list of lists."""
        if key not in self.content:
            return (default,)
        asked = self.content[key]
        if not isinstance(asked, list) or (kind is SHAPE and not any(isinstance(one, list) for one in asked)):
            return (self._good(key, asked, default, kind),)
        if not asked:
            self.wrong(f"{key} is an empty list: give {kind.words}, or several in a list")
        values = [self._good(key, one, default, kind) for one in asked]
        if again := repeated(values):
            self.wrong(f"{key} has {shown(again[0])} twice")
        return tuple(values)

    def _good(self, key: str, value: Any, default: Any, kind: Kind) -> Any:
        if kind.good(value):
            return value
        self.wrong(f"{key} {shown(value)}: give {kind.words}")
        return default


def unknown(name: str, known: Sequence[str]) -> str:
    """`'dop', did you mean dpo? (known are dpo, bce)`."""
    meant = near(name, known)
    return f"{name!r}{f', did you mean {_or(meant)}?' if meant else ''} (known are {', '.join(known)})"


def near(name: str, known: Sequence[str], *, cutoff: float = 0.6) -> list[str]:
    """What may be meant, the likeliest first; case does not hide it."""
    by_lower = {one.lower(): one for one in known}
    return [by_lower[one] for one in difflib.get_close_matches(name.lower(), by_lower, n=3, cutoff=cutoff)]


def repeated(values: Iterable[Any]) -> list[Any]:
    """What was there before, in order. Lists and mappings are compared too, so there is no set."""
    seen: list[Any] = []
    again: list[Any] = []
    for value in values:
        (again if value in seen else seen).append(value)
    return again


def shown(value: Any) -> str:
    """A value as the file has it, short."""
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:59]}…"


def _or(names: Sequence[str]) -> str:
    return names[0] if len(names) == 1 else f"{', '.join(names[:-1])} or {names[-1]}"


def _number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)


# The parts of a spec that name files: datasets and encoders. Relative files are relative to the spec.
#
# A file that is not there is found now, with near matches of its folder, and not after an hour of other datasets. Names are
# made distinct here: results, caches and pages go by them.


_KEYS = ("file", "smiles", "name", "split", "column", "ood", "train", "valid", "test", "split_seed", "label")
_DIVIDING = ("split", "column", "ood")
"""What a published dataset has decided already."""
_TOP_ONLY = ("seeds", "methods", "encoders", "positive", "device", "memory_limit")
_VALUE = Kind("a text or a number", lambda value: isinstance(value, (str, int, float)) and not isinstance(value, bool))
_MATRICES = (".npy", ".parquet")


def read_datasets(top: SpecTable, asked: Sequence[Any], folder: Path, labelled: Sequence[str]) -> tuple[DatasetSpec, ...]:  # fmt: skip
    """Each file under each of its splits. `labelled`: the methods that need labels."""
    datasets: list[DatasetSpec] = []
    for number, content in enumerate(asked, 1):
        if isinstance(content, dict):
            datasets += _dataset(SpecTable(content, f"dataset {number}", top.problems), folder, labelled)
        else:
            top.wrong(f"datasets has {shown(content)}: write each as a table, [[datasets]], with its file below")
    for name in dict.fromkeys(repeated(one.name for one in datasets)):
        top.wrong(f"two datasets are called {name}: give each a name of its own")
    return tuple(datasets)


def _dataset(table: SpecTable, folder: Path, labelled: Sequence[str]) -> list[DatasetSpec]:
    table.only(_KEYS, elsewhere=_TOP_ONLY)
    file = _file(table, folder)
    if file is None:
        return []
    label = tuple(table.some("label", "", TEXT)) if "label" in table.content else ()
    if labelled and not label:
        table.wrong(f"{labelled[0]} trains a classifier and needs classes: give label, the column that has them")
    splits = _splits(table, file)
    named = table.one("name", None, TEXT)
    if named is not None and (not named.strip() or set(named) & set("/\\\0") or named.startswith(".")):
        table.wrong(f"name {shown(named)} becomes the name of a file: leave out slashes and a leading dot")
    if (smiles := table.one("smiles", "smiles", TEXT)) in label:
        table.wrong(f"label {shown(smiles)} is the column of the SMILES: name one that holds classes")
    column, ood = table.one("column", None, TEXT), table.some("ood", None, _VALUE)
    rest = {
        "smiles": smiles,
        **{key: table.one(key, None, whole(1)) for key in ("train", "valid", "test")},
        "split_seed": table.one("split_seed", 0, whole(0)),
        "label": label,
    }
    return [
        DatasetSpec(
            name=_name(named, file, split, alone=len(splits) == 1),
            file=file,
            split=split,
            column=column if split == "column" else None,
            ood=ood if split == "column" and "ood" in table.content else (),
            **rest,
        )
        for split in splits
    ]


def _splits(table: SpecTable, file: Path) -> tuple[str, ...]:
    """What a file brings itself is not divided again."""
    if file.is_dir() or file.suffix in (".json", ".pt"):
        if given := [key for key in _DIVIDING if key in table.content]:
            table.wrong(f"{file.name} brings its own split: leave out {', '.join(given)}")
        return (PUBLISHED,)
    asked = table.content.get("split")
    for name in asked if isinstance(asked, list) else [asked]:
        if isinstance(name, str) and name not in SPLITS:
            table.wrong(f"unknown split {unknown(name, SPLITS)}")
            return ()
    if asked is None:
        table.wrong(f"split is missing: give {one_of(SPLITS).words}, or several in a list")
        return ()
    splits = table.some("split", SPLITS[0], one_of(SPLITS))
    if "column" in splits and "column" not in table.content:
        table.wrong('split "column" needs column, the name of the column that tells domains')
    if "column" not in splits and (given := [key for key in ("column", "ood") if key in table.content]):
        table.wrong(f'{" and ".join(given)} only goes with split = "column"')
    return splits


def _name(named: str | None, file: Path, split: str, *, alone: bool) -> str:
    """`hiv-scaffold`; a name of the user's own carries the split only where there are several."""
    if named is not None and alone:
        return named
    stem = named or file.name.removesuffix(".gz").rsplit(".", 1)[0]
    return stem if split == PUBLISHED else f"{stem}-{split}"


def _file(table: SpecTable, folder: Path) -> Path | None:
    if "file" not in table.content:
        table.wrong("file is missing: give the file of molecules")
        return None
    asked = table.one("file", None, TEXT)
    return None if asked is None else _there(table, folder, asked)


def _there(table: SpecTable, folder: Path, asked: str) -> Path | None:
    path = folder / Path(asked).expanduser()
    if path.exists():
        return path
    beside = [one.name for one in path.parent.iterdir()] if path.parent.is_dir() else []
    near = difflib.get_close_matches(path.name, beside, n=3)
    hint = f"; near it are {', '.join(near)}" if near else ""
    table.wrong(f"there is no file {asked} in {folder}{hint}")
    return None


def read_encoders(top: SpecTable, asked: Sequence[Any], folder: Path) -> tuple[EncoderChoice, ...]:
    """Built-in ones by name, a matrix by its file, a function by file.py:function."""
    found = [one for content in asked if (one := _encoder(top, content, folder)) is not None]
    for again in repeated(one.asked for one in found):
        top.wrong(f"encoders has {shown(again)} twice")
    doubles = set(repeated(_label(one) for one in found))
    return tuple(EncoderChoice(name=_label(one, short=_label(one) not in doubles), asked=one.asked) for one in found)


def _encoder(top: SpecTable, asked: Any, folder: Path) -> EncoderChoice | None:
    from brimful.molecules.features.compute import ENCODERS

    name = asked.get("name") if isinstance(asked, dict) else asked
    if not isinstance(name, str):
        top.wrong(f"encoders has {shown(asked)}: give a name, a file, or a table with a name, such as {{name = 'ecfp', bits = 1024}}")  # fmt: skip
        return None
    path, _, function = name.partition(".py:")
    if function or Path(name).suffix in _MATRICES:
        there = _there(SpecTable({}, "encoders", top.problems), folder, f"{path}.py" if function else name)
        if there is None:
            return None
        name = f"{there}:{function}" if function else str(there)
    elif name not in ENCODERS:
        top.wrong(
            f"encoders has the unknown encoder {unknown(name, ENCODERS)}; features of your own are a .npy or .parquet file, or file.py:function"
        )
        return None
    given = {key: _absolute(value, folder) for key, value in asked.items()} if isinstance(asked, dict) else {}
    return EncoderChoice(name=name, asked={**given, "name": name} if given else name)


def _absolute(value: Any, folder: Path) -> Any:
    """An option that names something beside the spec (weights, another Python) is meant relative to it."""
    is_path = isinstance(value, str) and "/" in value and (folder / value).exists()
    return str(folder / value) if is_path else value


def _label(encoder: EncoderChoice, *, short: bool = True) -> str:
    """`ecfp`, `ecfp bits=1024`, `features`, `encode`; of two that would be called alike, the whole path."""
    path, _, function = encoder.name.partition(".py:")
    stem = encoder.name if not short else function or (Path(path).stem if Path(path).suffix in _MATRICES else path)
    options: Mapping[str, Any] = encoder.asked if isinstance(encoder.asked, Mapping) else {}
    given = [f"{key}={Path(value).name if short and isinstance(value, str) else value}" for key, value in options.items() if key != "name"]  # fmt: skip
    return " ".join([stem, *given])


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
