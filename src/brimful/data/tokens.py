"""A tokenizer folder as the commands use it: text to ids and nothing else, and the few ids that pack and batches need.

A folder in the Hugging Face layout may carry more than that: a length at which texts are cut, padding, special tokens
that are added to each text. Those would change rows in silence, so cutting and padding are off here, and callers encode
with `add_special_tokens=False` and append eos themselves. A text that holds the letters "[EOS]" means these letters:
special tokens are not matched inside texts.
"""

import hashlib
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

from brimful.errors import BadData, in_one_line

MODEL_FILE = "tokenizer.json"
_NAMED_IN = ("tokenizer_config.json", "special_tokens_map.json")
"""Where a folder says which token is which; the first that knows wins, as in transformers."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenizerFacts:
    """What a token store has to know of its tokenizer."""

    vocab_size: int
    """One more than the largest id: the rows an embedding needs."""
    pad_id: int | None
    """None where the tokenizer has none; it is never guessed."""
    eos_id: int
    fingerprint: str
    """The sha256 of tokenizer.json: other ids, another fingerprint."""

    @classmethod
    def read(cls, folder: str | Path) -> "TokenizerFacts":
        """From the folder's own files. A folder that names no end of text is refused: rows could not end."""
        folder = Path(folder)
        tokenizer = load_tokenizer(folder)
        named = _named(folder)
        eos_id, pad_id = _id(tokenizer, named, "eos_token", folder), _id(tokenizer, named, "pad_token", folder)
        if eos_id is None:
            raise BadData(
                f"{folder} names no eos_token in {' or '.join(_NAMED_IN)}, so no text could end; add one, or train a tokenizer with brimful data tokenizer"
            )
        return cls(
            vocab_size=1 + max(tokenizer.get_vocab(with_added_tokens=True).values()),
            pad_id=pad_id,
            eos_id=eos_id,
            fingerprint=hashlib.sha256((folder / MODEL_FILE).read_bytes()).hexdigest(),
        )


def load_tokenizer(folder: str | Path) -> Tokenizer:
    """The folder's tokenizer: whole texts to plain ids, letters that look like a special token included."""
    path = Path(folder) / MODEL_FILE
    if not path.is_file():
        raise BadData(
            f"{folder} is no folder with a {MODEL_FILE}; give one that brimful data tokenizer or transformers saved"
        )
    try:
        tokenizer = Tokenizer.from_file(str(path))
    except Exception as error:  # the library raises bare Exception for every kind of damage
        raise BadData(f"{path} cannot be read as a tokenizer ({in_one_line(error)}); save it anew") from None
    tokenizer.no_truncation()
    tokenizer.no_padding()
    tokenizer.encode_special_tokens = True
    return tokenizer


def _named(folder: Path) -> dict[str, str]:
    """By role ("eos_token"), the token, as the folder's files say."""
    found: dict[str, str] = {}
    for name in _NAMED_IN:
        for role, token in _object(folder / name).items():
            content = token.get("content") if isinstance(token, dict) else token
            if role.endswith("_token") and isinstance(content, str):
                found.setdefault(role, content)
    return found


def _object(path: Path) -> dict[str, Any]:
    if not path.is_file():
        return {}
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise BadData(f"{path} cannot be read ({in_one_line(error)}); save the tokenizer anew") from None
    return content if isinstance(content, dict) else {}


def _id(tokenizer: Tokenizer, named: dict[str, str], role: str, folder: Path) -> int | None:
    if role not in named:
        return None
    number = tokenizer.token_to_id(named[role])
    if number is None:
        raise BadData(
            f"{folder} names {named[role]!r} as {role}, but {MODEL_FILE} has no such token; save the tokenizer anew"
        )
    return int(number)
