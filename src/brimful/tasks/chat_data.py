"""From raw files to the token store that a chat task trains on.

Files are tokenized once, into the run's folder. The store's name carries a hash of the files, the tokenizer and the
lengths, so a resumed run reuses it and changed files are tokenized again. A new tokenizer is trained only for a new model
without `--tokenizer`.
"""

import hashlib
import json
import re
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from brimful.data.store import NAME, Store, StoreMeta
from brimful.data.tokenizer.folder import TokenizerFacts
from brimful.errors import BadData, BadOption
from brimful.machine.host import tree_bytes
from brimful.task import Dataset
from brimful.units import GiB

if TYPE_CHECKING:
    from brimful.data.read.source import Source
    from brimful.tasks.chatlm import Pretrain

FIELDS = ("prompt", "response")
TOKENIZED_HERE = re.compile(r"train-[0-9a-f]{8}")
"""Names of stores that `token_store` makes for training rows."""
TOKENIZING_BYTES = GiB
"""Without `host_limit`: host RAM for tokenizing, beyond what this process holds already."""


def token_store(
    task: "Pretrain", data: str, folder: Path, progress: Callable[[str], object], *, like: Dataset | None, name: str
) -> str:
    """The path of the token store for `data`. One that is made here is called `name` and uses the tokenizer of `like`."""
    if task.source is not None and (Path(task.source) / "tokenizer.json").is_file():
        from brimful.tasks.model_folder import tokenizer_of

        tokenizer_of(task.source)  # refuses a model whose tokenizer has other ids, before any work
    if (Path(data) / NAME).is_file():
        _check_store(task, data, folder, like)
        return data
    from brimful.data.read.files import skipped_note
    from brimful.data.read.source import open_source
    from brimful.data.tokenize import TokenizeOptions, tokenize

    limit = task.host_limit_bytes
    source = open_source([data], columns=task.options.columns, host_limit_bytes=limit or TOKENIZING_BYTES)
    _check_fields(task, data, source)
    tokenizer = _find_tokenizer(task, source, folder, progress, like)
    facts = TokenizerFacts.read(tokenizer)
    key = [source.fingerprint(), facts.fingerprint, facts.eos_id, list(task.max_tokens)]
    store = folder / f"{name}-{hashlib.sha256(json.dumps(key).encode()).hexdigest()[:8]}"
    if (store / NAME).is_file():
        return str(store)
    folder.mkdir(parents=True, exist_ok=True)
    options = TokenizeOptions(
        max_tokens=task.max_tokens, host_limit_bytes=limit or tree_bytes() + TOKENIZING_BYTES
    )  # fmt: skip
    report = tokenize(source, tokenizer=tokenizer, output=store, options=options, progress=progress)
    dropped = _dropped(report.dropped)
    truncated = sum(field.truncated for field in report.fields.values())
    message = f"tokenized {report.rows_out:,} of {report.rows_in:,} rows of {data}: {report.layout_reason}"
    if dropped:
        message += f"; dropped {dropped}"
    if truncated:
        message += f"; truncated {truncated:,} texts to {'+'.join(map(str, task.max_tokens))} tokens"
    if report.skipped:
        message += f"; {skipped_note(report.skipped)}"
    progress(message)
    return str(store)


def remarks(task: "Pretrain", rows: Dataset) -> list[tuple[str, Any, Any, str]]:
    """Where the tokens come from and how many texts were truncated, as choices of the plan."""
    if not isinstance(rows, Store):
        return []
    options, meta = task.options, rows.meta
    longer = [f"{count:,} of {meta.rows:,} {side}s" for side, count in meta.truncated.items() if count]
    limits = "+".join(str(limit) for limit in meta.max_tokens.values())
    requested = None if options.lengths is None else "+".join(map(str, options.lengths))
    reason = f"{' and '.join(longer)} were longer and are truncated" if longer else "no row is longer"
    dropped = _dropped(meta.dropped)
    return [
        ("tokenizer", options.tokenizer, options.tokenizer or f"{meta.vocab_size:,} tokens", _origin(task, rows)),
        ("max_tokens", requested, limits, reason),
        ("rows", meta.rows_in, meta.rows, f"dropped {dropped}" if dropped else "none dropped"),
    ]


def _dropped(counts: Mapping[str, int]) -> str:
    """`2 that could not be read and 7 with an empty field`."""
    reasons = {"broken": "that could not be read", "empty": "with an empty field"}
    return " and ".join(f"{count:,} {reasons[reason]}" for reason, count in counts.items() if count)


def _check_store(task: "Pretrain", data: str, folder: Path, like: Dataset | None) -> None:
    """Refuse options for raw files with rows that are tokens already, and rows of another tokenizer than `like`."""
    options = task.options
    unused = [f"{name}=" for name in ("tokenizer", "columns", "max_tokens") if getattr(options, name) is not None]
    made_here = Path(data).resolve().is_relative_to(folder.resolve())
    if unused and like is None and not made_here:
        raise BadOption(f"{', '.join(unused)} cannot be used with {data}, which is a token store. Try: the raw files.")
    if isinstance(like, Store) and StoreMeta.read(Path(data)).tokenizer_fingerprint != like.meta.tokenizer_fingerprint:
        raise BadData(
            f"valid={data!r} was made with another tokenizer than {like.path}. "
            "Try: raw files, or tokenize them with the same tokenizer."
        )


def _check_fields(task: "Pretrain", data: str, source: "Source") -> None:
    """Refuse rows of another kind before they are tokenized."""
    layout = source.layout
    if layout.fields != FIELDS:
        columns = dict.fromkeys(layout.columns.values())
        advice = "prompt=prompt,response=chosen" if "chosen" in layout.fields else "prompt=question,response=answer"
        raise BadData(
            f"{data} has rows of {' and '.join(layout.fields)} (from {', '.join(columns)}), and {task.name} trains on "
            f"prompts and responses. Try: columns='{advice}'."
        )


def _origin(task: "Pretrain", store: Store) -> str:
    if task.options.tokenizer:
        return "as requested"
    if task.source:
        return "the tokenizer of the model"
    trained = store.path.parent / "tokenizer"
    made_here = TOKENIZED_HERE.fullmatch(store.path.name) and (trained / "tokenizer.json").is_file()
    if made_here and TokenizerFacts.read(trained).fingerprint == store.meta.tokenizer_fingerprint:
        return "trained on the data, because a new model has none"
    return "the tokenizer of the token store"


def _find_tokenizer(
    task: "Pretrain", source: "Source", folder: Path, progress: Callable[[str], object], like: Dataset | None
) -> Path:
    """The tokenizer of `like`, the requested one, the model's, or a new one."""
    other = getattr(like, "path", None)
    for tokenizer in (other and other / "tokenizer", task.options.tokenizer, task.source):
        if tokenizer is not None:
            return Path(tokenizer)
    output = folder / "tokenizer"
    if not output.is_dir():
        from brimful.data.tokenizer.train import TokenizerOptions, train_tokenizer
        from brimful.tasks.chatlm import SIZES

        folder.mkdir(parents=True, exist_ok=True)
        options = TokenizerOptions(vocab_size=SIZES[task.size].vocab)
        if task.host_limit_bytes is not None:  # a higher limit is no reason to train on more rows for longer
            options = replace(options, host_limit_bytes=min(options.host_limit_bytes, task.host_limit_bytes))
        report = train_tokenizer(source, output=output, options=options, progress=progress)
        progress(f"trained a tokenizer of {report.vocab_size:,} tokens on {source.paths[0]}: {output}")
    return output
