"""What an encoder is, and from what the user wrote to one: a name, a table with a name and options, or a file.

To add an encoder, write a class with the attributes of `Encoder` and add it to `ENCODERS`.
"""

import difflib
import importlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

from brimful.errors import BadOption

if TYPE_CHECKING:
    from brimful.molecules.dataset import Molecules

Matrix = np.ndarray[Any, np.dtype[Any]]

ENCODERS = {
    "ecfp": "in_process:Ecfp",
    "descriptors": "in_process:Descriptors",
    "chemnet": "in_process:ChemNet",
    "minimol": "external:MiniMol",
    "unimol": "external:UniMol",
}
"""Module and class of each, imported when used."""
MATRIX_FILES = (".npy", ".parquet")


@dataclass(frozen=True, slots=True, kw_only=True)
class Encoded:
    """One batch: a row for each molecule, float32 or uint8. Rows of failed molecules may hold anything."""

    matrix: Matrix
    failed: Mapping[int, str] = field(default_factory=dict)
    """Position in the batch, and why there are no features."""
    remarks: Mapping[str, int] = field(default_factory=dict)
    """Sentences about encoded molecules, and how many molecules each is about."""


class Encoder(Protocol):
    """From molecules to rows of numbers. Creating one is cheap: weights are loaded by the first `encode`."""

    @property
    def name(self) -> str:
        """`ecfp`, `ecfp bits=1024`, a file's stem: the name in tables."""

    @property
    def batch(self) -> int:
        """Molecules per batch, where memory allows."""

    @property
    def molecule_bytes(self) -> int:
        """Working memory of one more molecule in a batch, measured and rounded up."""

    @property
    def reads_rows(self) -> bool:
        """Whether the features depend on the row in the file, and not only on the SMILES."""

    def fingerprint(self) -> str:
        """Everything that changes the output: options, versions, a hash of the weights."""

    def encode(self, molecules: "Molecules") -> Encoded:
        """The features of one batch."""


def load_encoder(config: str | Mapping[str, Any], *, folder: Path = Path(), device: str = "cpu") -> Encoder:
    """The encoder of a spec entry, whose name and file `spec_file` has checked. Learned encoders run on `device`.

    Relative files are looked for in `folder`.
    """
    options = {"name": config} if isinstance(config, str) else dict(config)
    name = options.pop("name")
    if name in ENCODERS:
        return _built_in(name, _with_absolute_paths(options, folder), device)
    if options:
        raise BadOption(f"encoder {name}: features from a file take no options. Try: remove {', '.join(options)}.")
    from brimful.molecules.features.in_process import FeatureFile, UserFunction

    path, _, function = name.rpartition(":")
    is_function = path.endswith(".py")
    return UserFunction(file=folder / path, function=function) if is_function else FeatureFile(file=folder / name)


def _with_absolute_paths(options: dict[str, Any], folder: Path) -> dict[str, Any]:
    """`python3.11` without a slash is a command and stays one."""
    paths = {key for key in ("python", "weights") if isinstance(options.get(key), str)}
    return {
        key: str(folder / value) if key in paths and (key == "weights" or "/" in value) else value
        for key, value in options.items()
    }


def _built_in(name: str, options: dict[str, Any], device: str) -> Encoder:
    module, class_name = ENCODERS[name].split(":")
    owner = getattr(importlib.import_module(f"brimful.molecules.features.{module}"), class_name)
    types = {option.name: option.type for option in fields(owner)}
    if problems := [problem for key, value in options.items() if (problem := _problem(key, value, types))]:
        raise BadOption(f"encoder {name}: {'; '.join(problems)}.")
    if "device" in types:
        options.setdefault("device", device)
    encoder: Encoder = owner(**options)
    return encoder


def _problem(key: str, value: Any, types: Mapping[str, Any]) -> str | None:
    if key not in types:
        close = difflib.get_close_matches(key, types, n=1)
        hint = f", did you mean {close[0]}?" if close else ""
        return f"unknown option {key!r}{hint} (known: {', '.join(types) or 'none'})"
    wanted = types[key]
    right = isinstance(value, wanted) and (wanted is not int or not isinstance(value, bool))
    if right or (wanted == str | None and isinstance(value, Path)):
        return None
    return f"{key} must be {({int: 'a whole number', bool: 'true or false'}).get(wanted, 'a text')}, not {value!r}"


def show_name(name: str, encoder: Any, *options: str) -> str:
    """`ecfp`, or `ecfp bits=1024` where an option is not at its default."""
    defaults = {option.name: option.default for option in fields(encoder)}
    changed = {option: value for option in options if (value := getattr(encoder, option)) != defaults[option]}
    return " ".join([name, *(f"{key}={str(value).lower() if isinstance(value, bool) else value}" for key, value in changed.items())])  # fmt: skip


def parse_molecules(smiles: Iterable[str]) -> tuple[list[Any], dict[int, str]]:
    """RDKit's molecules, None where it cannot read one, and those positions with a reason."""
    from brimful.molecules.dataset import rdkit_version

    rdkit_version()  # raises MissingExtra
    from rdkit import Chem, rdBase

    with rdBase.BlockLogs():
        molecules = [Chem.MolFromSmiles(text) for text in smiles]
    return molecules, {
        index: "RDKit cannot read its SMILES" for index, molecule in enumerate(molecules) if molecule is None
    }
