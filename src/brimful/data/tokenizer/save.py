"""The tokenizer's folder: made beside its place, renamed when whole; what transformers reads, and `report.json`.

`AutoTokenizer.from_pretrained` loads it as a `PreTrainedTokenizerFast`, offline. `split_special_tokens` is in
tokenizer_config.json because tokenizer.json cannot hold it: with it, the letters "[EOS]" in a user's text stay letters and
do not end the text. Files are written as they are, without importing transformers (2 s, and torch with it).
"""

import errno
import json
import os
import shutil
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

from brimful.data.store.write import sync
from brimful.data.tokenizer.train import SPECIAL
from brimful.data.tokens import MODEL_FILE, TokenizerFacts
from brimful.errors import BadData, BadOption

_ROLES = {f"{token.strip('[]').lower()}_token": token for token in SPECIAL}
_CONFIG = {
    **_ROLES,
    "tokenizer_class": "PreTrainedTokenizerFast",
    "split_special_tokens": True,
    "clean_up_tokenization_spaces": False,
}
_DISK_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


def check_output(output: Path, *, overwrite: bool) -> None:
    """What is there already is refused, or replaced if that was asked for and it is a tokenizer."""
    if not output.exists() or (output.is_dir() and not any(output.iterdir())):
        return
    if not (output / MODEL_FILE).is_file():
        kind = "folder that is not a tokenizer" if output.is_dir() else "file"
        raise BadOption(f"--output {output} is an existing {kind}; name another folder")
    if not overwrite:
        raise BadOption(f"--output {output} is an existing tokenizer; name another folder, or add --overwrite")


def check_outside(output: Path, paths: Sequence[str]) -> None:
    """A tokenizer.json within a folder of rows would be read as rows the next time."""
    for path in paths:
        if Path(path).is_dir() and output.is_relative_to(Path(path).resolve()):
            raise BadOption(f"--output {output} lies inside {path}, whose files are read; name a folder outside of it")


@contextmanager
def folder_beside(output: Path, *, overwrite: bool) -> Iterator[Path]:
    """A folder to fill, which becomes the output when all went well and is gone otherwise."""
    part = output.with_name(f".{output.name}.{os.getpid()}.part")
    with _failures_told(output):
        check_output(output, overwrite=overwrite)
        part.mkdir(parents=True)  # before the long work, not after it
    try:
        yield part
        with _failures_told(output):
            _publish(part, output, overwrite=overwrite)
    finally:
        shutil.rmtree(part, ignore_errors=True)


def write_tokenizer(folder: Path, tokenizer: Tokenizer) -> TokenizerFacts:
    """What transformers and pack read; and what they find there."""
    _write(folder / MODEL_FILE, tokenizer.to_str(pretty=True))
    _write(folder / "tokenizer_config.json", _text(_CONFIG))
    _write(folder / "special_tokens_map.json", _text(_ROLES))
    return TokenizerFacts.read(folder)


def write_report(folder: Path, report: dict[str, Any]) -> None:
    _write(folder / "report.json", _text(report))


def _write(path: Path, text: str) -> None:
    """On the disk when this returns."""
    with _failures_told(path.parent):
        path.write_text(text, encoding="utf-8")
        sync(path)


def _publish(part: Path, output: Path, *, overwrite: bool) -> None:
    """An old tokenizer goes when the new one is in its place, and comes back if that fails."""
    check_output(output, overwrite=overwrite)
    old = part.with_suffix(".old")
    if (output / MODEL_FILE).is_file():
        output.rename(old)
    try:
        part.rename(output)
    except BaseException:
        if old.exists():
            old.rename(output)
        raise
    shutil.rmtree(old, ignore_errors=True)


@contextmanager
def _failures_told(path: Path) -> Iterator[None]:
    """A disk that is full or must not be written to is one sentence."""
    try:
        yield
    except OSError as error:
        if error.errno in _DISK_FULL:
            raise BadData(f"{path.parent}: the disk is full; free some space and run the same command again") from None
        raise BadData(
            f"{error.filename or path}: {error.strerror or error}; name another folder with --output"
        ) from None


def _text(content: dict[str, Any]) -> str:
    return json.dumps(content, indent=2, ensure_ascii=False) + "\n"
