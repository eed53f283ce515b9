"""Raw files on their way into training: packed once into the run's folder, with the tokenizer that the model needs.

The store's folder carries a digest of the files, the tokenizer and the lengths, so that a resumed run finds it and a
changed file is packed anew. A tokenizer is trained only where nobody has one: a new model, and none given.
"""

import hashlib
import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from brimful.data.store import NAME, Store, StoreMeta
from brimful.data.tokens import TokenizerFacts
from brimful.errors import BadData, BadOption
from brimful.machine.host import tree_bytes
from brimful.task import Dataset
from brimful.units import GiB

if TYPE_CHECKING:
    from brimful.tasks.chatlm import Pretrain

PACKED = re.compile(r"train-[0-9a-f]{8}")
"""What a store of rows to train on is called that was packed here."""
PACKING_BYTES = GiB
"""What packing may take of host RAM, beyond what this process holds already."""


def packed(
    task: "Pretrain", data: str, folder: Path, say: Callable[[str], object], *, like: Dataset | None, name: str
) -> str:
    """The token store behind `data`; one that is packed here is called `name`. `like` is one to share its tokenizer."""
    if task.source is not None and (Path(task.source) / "tokenizer.json").is_file():
        from brimful.tasks.model_folder import tokenizer_of

        tokenizer_of(task.source)  # ids at odds with the model are the folder's fault, and told before any work
    if (Path(data) / NAME).is_file():
        _check_store(task, data, folder, like)
        return data
    from brimful.data.encode import PackOptions
    from brimful.data.read.source import open_source
    from brimful.data.tokenize import pack

    source = open_source([data], columns=task.columns)
    tokenizer = _tokenizer(task, data, folder, say, like)
    facts = TokenizerFacts.read(tokenizer)
    key = [source.fingerprint(), facts.fingerprint, facts.eos_id, list(task.max_tokens)]
    store = folder / f"{name}-{hashlib.sha256(json.dumps(key).encode()).hexdigest()[:8]}"
    if not (store / NAME).is_file():
        folder.mkdir(parents=True, exist_ok=True)
        options = PackOptions(
            columns=task.columns, max_tokens=task.max_tokens, host_limit_bytes=tree_bytes() + PACKING_BYTES
        )
        report = pack([data], tokenizer=tokenizer, output=store, options=options, progress=say)
        dropped = ", ".join(f"{count:,} {why}" for why, count in report.dropped.items() if count)
        cut = sum(side.truncated for side in report.sides.values())
        say(
            f"packed {report.rows_out:,} of {report.rows_in:,} rows of {data}"
            + (f"; dropped: {dropped}" if dropped else "")
            + (
                f"; {cut:,} sides were longer than {'+'.join(map(str, task.max_tokens))} tokens and are cut"
                if cut
                else ""
            )
        )
    return str(store)


def _check_store(task: "Pretrain", data: str, folder: Path, like: Dataset | None) -> None:
    """Rows that are packed already leave nothing to ask for, unless they were packed here, as asked; and rows to evaluate
    on have the tokens of those to train on."""
    asked = {"--tokenizer": task.tokenizer, "--columns": task.columns, "--max-tokens": task.cut_at}
    given = [flag for flag, value in asked.items() if value is not None]
    packed_here = Path(data).resolve().is_relative_to(folder.resolve())
    if given and like is None and not packed_here:
        raise BadOption(f"{', '.join(given)}: {data} is a token store, packed already; leave out what is for raw files")
    if isinstance(like, Store):
        theirs, ours = StoreMeta.read(Path(data)).tokenizer_fingerprint, like.meta.tokenizer_fingerprint
        if theirs != ours:
            raise BadData(
                f"--valid {data} was packed with another tokenizer than {like.path}, so its tokens mean other things: give raw "
                "files, or pack it with the same one"
            )


def remarks(task: "Pretrain", rows: Dataset) -> list[tuple[str, Any, Any, str]]:
    """What became of the texts: whose tokens they are, and how many were cut."""
    if not isinstance(rows, Store):
        return []
    meta = rows.meta
    cut = [f"{count:,} of {meta.rows:,} {side}s" for side, count in meta.truncated.items() if count]
    said = (
        f"{' and '.join(cut)} were longer and are cut there; --max-tokens cuts elsewhere" if cut else "no row is longer"
    )
    limits = "+".join(str(limit) for limit in meta.max_tokens.values())
    asked = None if task.cut_at is None else "+".join(map(str, task.cut_at))
    return [
        ("tokenizer", task.tokenizer, task.tokenizer or f"{meta.vocab_size:,} tokens", _whose(task, rows)),
        ("max_tokens", asked, limits, said),
    ]


def _whose(task: "Pretrain", store: Store) -> str:
    """Where the tokens come from. Only what lies as `packed` lays it was trained here."""
    if task.tokenizer:
        return "as asked for"
    if task.source:
        return "the model's"
    made = store.path.parent / "tokenizer" / "tokenizer.json"
    ours = PACKED.fullmatch(store.path.name) is not None and made.is_file()
    if ours and TokenizerFacts.read(made.parent).fingerprint == store.meta.tokenizer_fingerprint:
        return "trained on the data, since a new model has none"
    return "the store's own"


def _tokenizer(task: "Pretrain", data: str, folder: Path, say: Callable[[str], object], like: Dataset | None) -> Path:
    """The other rows' own, the one given, the model's, or a new one for a new model."""
    others = getattr(like, "path", None)
    for known in (others and others / "tokenizer", task.tokenizer, task.source):
        if known is not None:
            return Path(known)
    made = folder / "tokenizer"
    if not made.is_dir():
        from brimful.data.tokenizer.algorithms import TokenizerOptions
        from brimful.data.tokenizer.train import train_tokenizer
        from brimful.tasks.chatlm import SIZES

        folder.mkdir(parents=True, exist_ok=True)
        options = TokenizerOptions(vocab_size=SIZES[task.size].vocab, columns=task.columns)
        report = train_tokenizer([data], output=made, options=options, progress=say)
        say(f"trained a tokenizer of {report.vocab_size:,} tokens on {data}, since a new model has none: {made}")
    return made
