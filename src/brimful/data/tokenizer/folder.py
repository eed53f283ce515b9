"""A tokenizer folder in the Hugging Face layout: read as plain text-to-ids, and written for `AutoTokenizer`.

A folder may configure truncation, padding, and special tokens that are added to each text. Those would change rows
silently, so they are switched off when it is loaded: callers encode with `add_special_tokens=False` and append eos
themselves. Text that contains the letters "[EOS]" means these letters; special tokens are not matched inside texts.

Written folders set `split_special_tokens` in tokenizer_config.json to the same effect, because tokenizer.json cannot hold
it. They are written without importing transformers (2 s, and torch with it).
"""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

from brimful.data.tokenizer.vocabulary import SPECIAL
from brimful.errors import BadData, in_one_line
from brimful.files import file_sha256, write_atomic

MODEL_FILE = "tokenizer.json"
_CONFIG_FILES = ("tokenizer_config.json", "special_tokens_map.json")
"""Where a folder names its special tokens; the first that does wins, as in transformers."""
_ROLES = {f"{token.strip('[]').lower()}_token": token for token in SPECIAL}
_CONFIG = {
    **_ROLES,
    "tokenizer_class": "PreTrainedTokenizerFast",
    "split_special_tokens": True,
    "clean_up_tokenization_spaces": False,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenizerFacts:
    """What a token store has to know about its tokenizer."""

    vocab_size: int
    """One more than the largest id: the rows an embedding needs."""
    pad_id: int | None
    """None where the tokenizer has none; it is never guessed."""
    eos_id: int
    fingerprint: str
    """The sha256 of tokenizer.json."""

    @classmethod
    def read(cls, folder: str | Path) -> "TokenizerFacts":
        """From the folder's own files. A folder without an eos_token is refused, since rows could not end."""
        folder = Path(folder)
        tokenizer = load_tokenizer(folder)
        roles = _special_tokens(folder)
        eos_id, pad_id = _id(tokenizer, roles, "eos_token", folder), _id(tokenizer, roles, "pad_token", folder)
        if eos_id is None:
            raise BadData(
                f"{folder} names no eos_token in {' or '.join(_CONFIG_FILES)}. "
                "Try: add one, or train a tokenizer with `brimful data tokenizer`."
            )
        return cls(
            vocab_size=1 + max(tokenizer.get_vocab(with_added_tokens=True).values()),
            pad_id=pad_id,
            eos_id=eos_id,
            fingerprint=file_sha256(folder / MODEL_FILE),
        )


def load_tokenizer(folder: str | Path, *, special_tokens: bool = False) -> Tokenizer:
    """The folder's tokenizer without truncation and padding, and without special tokens inside texts; with `special_tokens` it
    has them, unless the folder says otherwise."""
    path = Path(folder) / MODEL_FILE
    if not path.is_file():
        raise BadData(
            f"{folder} has no {MODEL_FILE}. Try: a folder saved by `brimful data tokenizer` or by transformers."
        )
    try:
        tokenizer = Tokenizer.from_file(str(path))
    except Exception as error:  # the library raises bare Exception for every kind of damage
        raise BadData(f"{path} cannot be read as a tokenizer ({in_one_line(error)}). Try: save it again.") from None
    tokenizer.no_truncation()
    tokenizer.no_padding()
    config = _read_object(Path(folder) / _CONFIG_FILES[0]) if special_tokens else {}
    tokenizer.encode_special_tokens = bool(config.get("split_special_tokens", not special_tokens))
    return tokenizer


def special_words(folder: str | Path) -> tuple[str, ...]:
    """Special tokens that transformers would find inside texts, and `load_tokenizer` does not."""
    if _read_object(Path(folder) / _CONFIG_FILES[0]).get("split_special_tokens"):
        return ()
    added = load_tokenizer(folder).get_added_tokens_decoder().values()
    return tuple(sorted(token.content for token in added if token.special and token.content))


def save_tokenizer(folder: Path, tokenizer: Tokenizer) -> TokenizerFacts:
    """Write a trained tokenizer and read it back."""
    write_atomic(folder / MODEL_FILE, tokenizer.to_str(pretty=True))
    write_json(folder / "tokenizer_config.json", _CONFIG)
    write_json(folder / "special_tokens_map.json", _ROLES)
    return TokenizerFacts.read(folder)


def write_template(folder: Path, template: str) -> None:
    """Give a tokenizer folder this chat template. Special tokens that the template writes are then read as such.

    The class makes `AutoTokenizer` take tokenizer.json as it is, and not split texts as the model's type usually does.
    """
    write_atomic(folder / "chat_template.jinja", template)
    config = _read_object(folder / "tokenizer_config.json")
    config.pop("chat_template", None)
    changes: dict[str, Any] = {"split_special_tokens": False}
    if config.get("tokenizer_class") == _CONFIG["tokenizer_class"]:
        changes["tokenizer_class"] = "TokenizersBackend"
    write_json(folder / "tokenizer_config.json", {**config, **changes})


def write_json(path: Path, content: dict[str, Any]) -> None:
    write_atomic(path, json.dumps(content, indent=2, ensure_ascii=False) + "\n")


def _special_tokens(folder: Path) -> dict[str, str]:
    """The token of each role ("eos_token")."""
    roles: dict[str, str] = {}
    for name in _CONFIG_FILES:
        for role, token in _read_object(folder / name).items():
            content = token.get("content") if isinstance(token, dict) else token
            if role.endswith("_token") and isinstance(content, str):
                roles.setdefault(role, content)
    return roles


def _read_object(path: Path) -> dict[str, Any]:
    if not path.is_file():
        return {}
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise BadData(f"{path} cannot be read ({in_one_line(error)}). Try: save the tokenizer again.") from None
    return content if isinstance(content, dict) else {}


def _id(tokenizer: Tokenizer, roles: dict[str, str], role: str, folder: Path) -> int | None:
    if role not in roles:
        return None
    number = tokenizer.token_to_id(roles[role])
    if number is None:
        raise BadData(
            f"{folder} names {roles[role]!r} as {role}, but {MODEL_FILE} has no such token. Try: save the tokenizer again."
        )
    return int(number)
