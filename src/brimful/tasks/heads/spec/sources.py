"""The parts of a spec that name files: datasets and encoders. Relative files are relative to the spec.

A file that is not there is found now, with near matches of its folder, and not after an hour of other datasets. Names are
made distinct here: results, caches and pages go by them.
"""

import difflib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from brimful.tasks.heads.spec.asked import PUBLISHED, SPLITS, DatasetSpec, EncoderChoice
from brimful.tasks.heads.spec.table import TEXT, Kind, SpecTable, one_of, repeated, shown, unknown, whole

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
    from brimful.tasks.heads.features import ENCODERS

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
