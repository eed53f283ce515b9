"""SPEC.toml → SweepSpec, checked as a whole before anything runs.

    seeds = 10                                   # 0 … 9; or a list
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

All problems are collected and reported at once: a grid of an hour is started once, and a spec with four mistakes should
not need four attempts. A wrong value is noted and replaced by its default, so that reading can continue.
"""

import difflib
import itertools
import tomllib
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from brimful.errors import BadOption
from brimful.molecules.features.encoder import ENCODERS, MATRIX_FILES
from brimful.molecules.methods import METHODS
from brimful.molecules.spec import (
    ACTIVATIONS,
    PARTS,
    PUBLISHED,
    SPLITS,
    DatasetSpec,
    EncoderSpec,
    HeadSpec,
    MethodSpec,
    SweepSpec,
    TrainSpec,
)
from brimful.units import is_number, is_whole, parse_bytes


@dataclass(frozen=True, slots=True)
class Check:
    """What a value must be, in words that follow "must be", and as a test."""

    words: str
    accepts: Callable[[Any], bool]


def whole(least: int) -> Check:
    return Check(f"a whole number of at least {least}", lambda value: is_whole(value, least))


def one_of(names: Sequence[str]) -> Check:
    return Check(f"one of {', '.join(names)}", lambda value: isinstance(value, str) and value in names)


POSITIVE = Check("a number above 0", lambda value: is_number(value) and value > 0)
NOT_NEGATIVE = Check("a number of at least 0", lambda value: is_number(value) and value >= 0)
FACTOR = Check("a number above 0 and at most 1", lambda value: is_number(value) and 0 < value <= 1)
DROPOUT = Check("a number of at least 0 and below 1", lambda value: is_number(value) and 0 <= value < 1)
TEXT = Check("a text", lambda value: isinstance(value, str) and value.strip() != "")
TEXT_OR_NUMBER = Check("a text or a number", lambda value: isinstance(value, (str, int, float)) and not isinstance(value, bool))  # fmt: skip
SHAPE = Check(
    "a list of layer sizes such as [256, 128]",
    lambda value: isinstance(value, list) and all(whole(1).accepts(size) for size in value),
)
TOP_KEYS = ("seeds", "methods", "encoders", "positive", "device", "memory_limit", "datasets", "head", "train")
DATASET_KEYS = ("file", "smiles", "name", "split", "column", "ood", *PARTS, "split_seed", "label")
HEAD_CHECKS = {"hidden": SHAPE, "activation": one_of(ACTIVATIONS), "dropout": DROPOUT}
TRAIN_CHECKS = {
    "lr": POSITIVE, "weight_decay": NOT_NEGATIVE, "batch": whole(1), "epochs": whole(1), "patience": whole(1),
    "clip": NOT_NEGATIVE, "step_size": whole(1), "gamma": FACTOR,
}  # fmt: skip


class SpecTable:
    """One table of the file, with the prefix of its problems."""

    def __init__(self, content: Mapping[str, Any], where: str, problems: list[str]) -> None:
        self.content, self.where, self.problems = content, where, problems

    def problem(self, sentence: str) -> None:
        self.problems.append(f"{self.where}: {sentence}" if self.where else sentence)

    def check_keys(self, known: Sequence[str], *, elsewhere: Sequence[str] = ()) -> None:
        """TOML assigns a key below `[[datasets]]` to the dataset, so keys of the top of the file get their own words."""
        for key in self.content:
            if key in known:
                continue
            if key in elsewhere:
                self.problem(f"{key} belongs to the top of the file, above the first [table]")
            else:
                self.problem(f"unknown key {unknown(key, known)}")

    def one(self, key: str, default: Any, check: Check) -> Any:
        """The value, or the default where it is missing or wrong."""
        return self._checked(key, self.content[key], default, check) if key in self.content else default

    def many(self, key: str, default: Any, check: Check) -> tuple[Any, ...]:
        """One value or a list of them. A shape is a list itself, so a list of shapes is a list of lists."""
        if key not in self.content:
            return (default,)
        value = self.content[key]
        if not isinstance(value, list) or (check is SHAPE and not any(isinstance(item, list) for item in value)):
            return (self._checked(key, value, default, check),)
        if not value:
            self.problem(f"{key} is an empty list and must be {check.words}, or a list of those")
        values = [self._checked(key, item, default, check) for item in value]
        if repeats := repeated(values):
            self.problem(f"{key} has {shown(repeats[0])} twice")
        return tuple(values)

    def _checked(self, key: str, value: Any, default: Any, check: Check) -> Any:
        if check.accepts(value):
            return value
        self.problem(f"{key} must be {check.words}, not {shown(value)}")
        return default


def read_spec(path: str | Path) -> SweepSpec:
    """The spec in a file; a BadOption lists all of its problems."""
    path = Path(path)
    try:
        content = tomllib.loads(path.read_text(encoding="utf-8-sig"))  # some Windows editors write a BOM
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or str(error)
        raise BadOption(f"{path} cannot be read: {reason}. Try: a TOML file with datasets, encoders and methods.") from None  # fmt: skip
    problems: list[str] = []
    spec = _spec(SpecTable(content, "", problems), path)
    if problems:
        raise BadOption(f"{path}: {'; '.join(problems)}.")
    assert spec is not None
    return spec


def _spec(top: SpecTable, path: Path) -> SweepSpec | None:
    """None where a part is missing altogether; the problems say which."""
    top.check_keys(TOP_KEYS)
    folder = path.absolute().parent
    methods = _methods(top)
    labelled = [choice.method.name for choice in methods if choice.method.needs_labels]
    parts: dict[str, Any] = {
        "datasets": _datasets(top, folder, labelled),
        "encoders": _encoders(top, folder),
        "methods": methods,
        "seeds": _seeds(top),
    }
    heads = _product(top, "head", HEAD_CHECKS, HeadSpec)
    trainings = _product(top, "train", TRAIN_CHECKS, TrainSpec)
    positive = top.one("positive", "ood", one_of(("ood", "id")))
    device = top.one("device", None, TEXT)
    if (limit := top.content.get("memory_limit")) is not None:
        try:
            parse_bytes(limit, flag="memory_limit")
        except BadOption as error:
            top.problem(str(error).removesuffix("."))
    if not all(parts.values()):
        return None
    return SweepSpec(
        source=path, **parts, heads=heads, trainings=trainings, positive=positive, device=device, memory_limit=limit
    )


def _seeds(top: SpecTable) -> tuple[int, ...]:
    """`10` is 0 … 9."""
    value = top.content.get("seeds", 10)
    if whole(1).accepts(value):
        return tuple(range(value))
    if isinstance(value, list) and value and all(whole(0).accepts(item) for item in value):
        if repeats := repeated(value):
            top.problem(f"seeds has {repeats[0]} twice")
        if max(value) >= 2**63:
            top.problem(f"seeds must be below 2⁶³, not {max(value)}")
        return tuple(value)
    top.problem(f"seeds must be a number such as 10 or a list of whole numbers such as [0, 1, 2], not {shown(value)}")
    return ()


_Choice = TypeVar("_Choice", HeadSpec, TrainSpec)


def _product(top: SpecTable, name: str, checks: Mapping[str, Check], owner: type[_Choice]) -> tuple[_Choice, ...]:
    """Every combination of the values that a table lists."""
    content = top.content.get(name, {})
    if not isinstance(content, dict):
        top.problem(f"{name} must be a table, [{name}], with {', '.join(checks)}, not {shown(content)}")
        return (owner(),)
    table = SpecTable(content, f"[{name}]", top.problems)
    table.check_keys(tuple(checks), elsewhere=TOP_KEYS)
    default = owner()
    values = [table.many(key, getattr(default, key), check) for key, check in checks.items()]
    hashable: list[list[Any]] = [
        [tuple(value) if isinstance(value, list) else value for value in choices] for choices in values
    ]
    return tuple(owner(**dict(zip(checks, chosen, strict=True))) for chosen in itertools.product(*hashable))


def _entries(top: SpecTable, key: str, example: str) -> list[Any]:
    value = top.content.get(key)
    if isinstance(value, (str, dict)):
        return [value]
    if not isinstance(value, list) or not value:
        state = "missing" if value is None else "empty" if value == [] else f"not a list but {shown(value)}"
        top.problem(f"{key} is {state}, write {example}")
        return []
    return value


def _methods(top: SpecTable) -> tuple[MethodSpec, ...]:
    chosen: list[MethodSpec] = []
    for entry in _entries(top, "methods", 'a list of names such as ["dpo", "bce"]'):
        content = {"name": entry} if isinstance(entry, str) else entry
        if not isinstance(content, dict) or not isinstance(content.get("name"), str):
            top.problem(f"methods must have names, or tables with a name such as {{name = 'dpo', beta = 1}}, not {shown(entry)}")  # fmt: skip
        elif content["name"] not in METHODS:
            top.problem(f"unknown method {unknown(content['name'], tuple(METHODS))}")
        else:
            chosen += _method(SpecTable(content, f"method {content['name']}", top.problems))
    if repeats := repeated((choice.method.name, choice.options) for choice in chosen):
        top.problem(f"methods has {repeats[0][0]} twice with the same options")
    return tuple(chosen)


def _method(table: SpecTable) -> list[MethodSpec]:
    """One for each combination of the options."""
    method = METHODS[table.content["name"]]
    table.check_keys(("name", *method.options))
    values = [
        table.many(key, option.default, Check(str(option), option.accepts)) for key, option in method.options.items()
    ]
    return [
        MethodSpec(method=method, options=dict(zip(method.options, chosen, strict=True)))
        for chosen in itertools.product(*values)
    ]


# ---- Datasets and encoders: the parts that name files, relative to the spec ----------------------------------------------


def _datasets(top: SpecTable, folder: Path, labelled: Sequence[str]) -> tuple[DatasetSpec, ...]:
    """Each file under each of its splits. `labelled`: the methods that need labels."""
    datasets: list[DatasetSpec] = []
    for number, content in enumerate(_entries(top, "datasets", "at least one [[datasets]] with a file"), 1):
        if isinstance(content, dict):
            datasets += _dataset(SpecTable(content, f"dataset {number}", top.problems), folder, labelled)
        else:
            top.problem(f"each dataset must be a table, [[datasets]], not {shown(content)}")
    for name in dict.fromkeys(repeated(dataset.name for dataset in datasets)):
        top.problem(f"two datasets are called {name}, give each its own name")
    return tuple(datasets)


def _dataset(table: SpecTable, folder: Path, labelled: Sequence[str]) -> list[DatasetSpec]:
    table.check_keys(DATASET_KEYS, elsewhere=TOP_KEYS[:6])
    if "file" not in table.content:
        table.problem("file is missing, name the file of molecules")
        return []
    name = table.one("file", None, TEXT)
    file = None if name is None else _find(table, folder, name)
    if file is None:
        return []
    label = tuple(table.many("label", "", TEXT)) if "label" in table.content else ()
    if labelled and not label:
        table.problem(f"{labelled[0]} trains a classifier and needs label, a column of classes")
    splits = _splits(table, file)
    name = table.one("name", None, TEXT)
    if name is not None and (not name.strip() or set(name) & set("/\\\0") or name.startswith(".")):
        table.problem(f"name {shown(name)} must be a file name, without slashes or a leading dot")
    if (smiles := table.one("smiles", "smiles", TEXT)) in label:
        table.problem(f"label {shown(smiles)} is the column of the SMILES, name a column of classes")
    column, ood = table.one("column", None, TEXT), table.many("ood", None, TEXT_OR_NUMBER)
    rest = {
        "smiles": smiles,
        **{key: table.one(key, None, whole(1)) for key in PARTS},
        "split_seed": table.one("split_seed", 0, whole(0)),
        "label": label,
    }
    return [
        DatasetSpec(
            name=_dataset_name(name, file, split, only=len(splits) == 1),
            file=file,
            split=split,
            column=column if split == "column" else None,
            ood=ood if split == "column" and "ood" in table.content else (),
            **rest,
        )
        for split in splits
    ]


def _splits(table: SpecTable, file: Path) -> tuple[str, ...]:
    if file.is_dir() or file.suffix in (".json", ".pt"):
        if extra := [key for key in ("split", "column", "ood") if key in table.content]:
            table.problem(f"{file.name} has its own split, remove {', '.join(extra)}")
        return (PUBLISHED,)
    value = table.content.get("split")
    for name in value if isinstance(value, list) else [value]:
        if isinstance(name, str) and name not in SPLITS:
            table.problem(f"unknown split {unknown(name, SPLITS)}")
            return ()
    if value is None:
        table.problem(f"split is missing, give {one_of(SPLITS).words} or a list of those")
        return ()
    splits = table.many("split", SPLITS[0], one_of(SPLITS))
    if "column" in splits and "column" not in table.content:
        table.problem('split "column" needs column, the name of the column to split by')
    if "column" not in splits and (extra := [key for key in ("column", "ood") if key in table.content]):
        table.problem(f'{" and ".join(extra)} can only be used with split = "column"')
    return splits


def _dataset_name(name: str | None, file: Path, split: str, *, only: bool) -> str:
    """`hiv-scaffold`; a name from the spec carries the split only where there are several."""
    if name is not None and only:
        return name
    stem = name or file.name.removesuffix(".gz").rsplit(".", 1)[0]
    return stem if split == PUBLISHED else f"{stem}-{split}"


def _find(table: SpecTable, folder: Path, name: str) -> Path | None:
    path = folder / Path(name).expanduser()
    if path.exists():
        return path
    beside = [file.name for file in path.parent.iterdir()] if path.parent.is_dir() else []
    matches = difflib.get_close_matches(path.name, beside, n=3)
    hint = f", did you mean {_or(matches)}?" if matches else ""
    table.problem(f"there is no file {name} in {folder}{hint}")
    return None


def _encoders(top: SpecTable, folder: Path) -> tuple[EncoderSpec, ...]:
    """Built-in ones by name, a matrix by its file, a function by file.py:function."""
    entries = _entries(top, "encoders", 'a list such as ["ecfp"]')
    encoders = [encoder for content in entries if (encoder := _encoder(top, content, folder)) is not None]
    for config in repeated(encoder.config for encoder in encoders):
        top.problem(f"encoders has {shown(config)} twice")
    ambiguous = set(repeated(_encoder_name(encoder) for encoder in encoders))
    return tuple(
        EncoderSpec(name=_encoder_name(encoder, short=_encoder_name(encoder) not in ambiguous), config=encoder.config)
        for encoder in encoders
    )


def _encoder(top: SpecTable, content: Any, folder: Path) -> EncoderSpec | None:
    name = content.get("name") if isinstance(content, dict) else content
    if not isinstance(name, str):
        top.problem(f"encoders must have names, files, or tables with a name such as {{name = 'ecfp', bits = 1024}}, not {shown(content)}")  # fmt: skip
        return None
    path, _, function = name.partition(".py:")
    if function or Path(name).suffix in MATRIX_FILES:
        file = _find(SpecTable({}, "encoders", top.problems), folder, f"{path}.py" if function else name)
        if file is None:
            return None
        name = f"{file}:{function}" if function else str(file)
    elif name not in ENCODERS:
        top.problem(
            f"unknown encoder {unknown(name, tuple(ENCODERS))}, or a .npy or .parquet file, or file.py:function"
        )
        return None
    return EncoderSpec(name=name, config={**content, "name": name} if isinstance(content, dict) else name)


def _encoder_name(encoder: EncoderSpec, *, short: bool = True) -> str:
    """`ecfp`, `ecfp bits=1024`, `features`, `encode`; where two would get the same name, the whole path."""
    path, _, function = encoder.name.partition(".py:")
    stem = encoder.name if not short else function or (Path(path).stem if Path(path).suffix in MATRIX_FILES else path)
    config: Mapping[str, Any] = encoder.config if isinstance(encoder.config, Mapping) else {}
    options = [f"{key}={Path(value).name if short and isinstance(value, str) else value}" for key, value in config.items() if key != "name"]  # fmt: skip
    return " ".join([stem, *options])


# ---- Words of a problem ------------------------------------------------------------------------------------------------


def unknown(name: str, known: Sequence[str]) -> str:
    """`'dop', did you mean dpo? (known: dpo, bce)`"""
    matches = close_matches(name, known)
    return f"{name!r}{f', did you mean {_or(matches)}?' if matches else ''} (known: {', '.join(known)})"


def close_matches(name: str, known: Sequence[str], *, cutoff: float = 0.6) -> list[str]:
    """The likeliest first, whatever the case."""
    by_lower = {candidate.lower(): candidate for candidate in known}
    return [by_lower[match] for match in difflib.get_close_matches(name.lower(), by_lower, n=3, cutoff=cutoff)]


def repeated(values: Iterable[Any]) -> list[Any]:
    """Values that occurred before, in order. Values may be lists and mappings, so this uses no set."""
    seen: list[Any] = []
    repeats: list[Any] = []
    for value in values:
        (repeats if value in seen else seen).append(value)
    return repeats


def shown(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:59]}…"


def _or(names: Sequence[str]) -> str:
    return names[0] if len(names) == 1 else f"{', '.join(names[:-1])} or {names[-1]}"
