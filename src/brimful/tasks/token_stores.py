"""From raw files to the token store that a language task trains on.

Files are tokenized once, into the run's folder. The store's name carries a hash of the files, the tokenizer, the chat template
and the lengths, so a resumed run reuses it and changed files are tokenized again. A new tokenizer is trained only for new
weights without `--tokenizer`; for a causal model it gets a chat template as well.

Rows of an encoder-decoder are prompts and responses, tokenized by themselves. Those of a causal model are conversations that
its chat template writes, or whole texts for `pretrain`.
"""

import hashlib
import json
import re
import shutil
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from brimful.data.encode import READ_AS_LETTERS
from brimful.data.store import NAME, TOKENIZER_FILES, Store, StoreMeta
from brimful.data.tokenizer.folder import TokenizerFacts, write_template
from brimful.errors import BadData, BadOption
from brimful.files import write_atomic
from brimful.machine.host import tree_bytes
from brimful.task import Dataset
from brimful.tasks.causal_data import READ_AS_TOKENS, ROLE_ORDER, ConversationEncoder, TextEncoder
from brimful.tasks.presets import CHAT_TEMPLATE
from brimful.units import GiB, show_count

if TYPE_CHECKING:
    from brimful.data.read.source import Source
    from brimful.data.tokenize import RowNotes
    from brimful.tasks.language import Pretrain

FIELDS = ("prompt", "response")
FIRST_DROPPED = "first-dropped.json"
"""In a store of pairs: by reason, the first row that is not in it."""
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

        tokenizer_of(task.source, task.config)  # refuses a model whose tokenizer has other ids, before any work
    if (Path(data) / NAME).is_file():
        _check_store(task, data, folder, like)
        return data
    from brimful.data.read.files import skipped_note
    from brimful.data.read.source import open_source
    from brimful.data.tokenize import TokenizeOptions, tokenize

    limit, causal = task.host_limit_bytes, task.family.causal
    source = open_source(
        [data], columns=task.options.columns, messages=causal, preferences=task.reads_pairs,
        host_limit_bytes=limit or TOKENIZING_BYTES,
    )  # fmt: skip
    check_fields(task, data, source)
    tokenizer = _find_tokenizer(task, data, folder, progress, like)
    encoder = _encoder(task, source, tokenizer)
    facts = TokenizerFacts.read(tokenizer)
    key = [source.fingerprint(), facts.fingerprint, facts.eos_id, list(task.max_tokens), encoder and encoder.key]
    store = folder / f"{name}-{hashlib.sha256(json.dumps(key).encode()).hexdigest()[:8]}"
    if (store / NAME).is_file():
        return str(store)
    folder.mkdir(parents=True, exist_ok=True)
    options = TokenizeOptions(
        max_tokens=task.max_tokens, host_limit_bytes=limit or tree_bytes() + TOKENIZING_BYTES, max_bad=task.options.max_bad
    )  # fmt: skip
    report = tokenize(source, tokenizer=tokenizer, output=store, options=options, encoder=encoder, progress=progress)
    dropped = _dropped(report.dropped)
    truncated = sum(field.truncated for field in report.fields.values())
    message = f"tokenized {report.rows_out:,} of {report.rows_in:,} rows of {data}: {report.layout_reason}"
    if dropped:
        message += f"; dropped {dropped}"
    if task.reads_pairs and report.first_dropped:
        write_atomic(store / FIRST_DROPPED, json.dumps(report.first_dropped, ensure_ascii=False))
        message += f" ({_first_dropped(store)})"
    if truncated:
        message += f"; truncated {truncated:,} texts to {'+'.join(map(str, task.max_tokens))} tokens"
    if report.notes:
        counts = {reason: show_count(note.rows, "row") for reason, note in report.notes.items()}
        message += f"; {', '.join(f'{count} with {reason}' for reason, count in counts.items())}"
    if report.skipped:
        message += f"; {skipped_note(report.skipped)}"
    progress(message)
    return str(store)


def remarks(task: "Pretrain", rows: Dataset) -> list[tuple[str, Any, Any, str]]:
    """Where the tokens come from and how many texts were truncated, as choices of the plan."""
    if not isinstance(rows, Store):
        return []
    from brimful.data.tokenize import RowNotes

    options, meta = task.options, rows.meta
    sides = {"tokens": "rows", "chosen": "chosen replies", "rejected": "rejected replies"}
    longer = [
        f"{count:,} of {meta.rows:,} {sides.get(side, f'{side}s')}" for side, count in meta.truncated.items() if count
    ]
    limits = "+".join(map(str, _limits(task, meta)))
    requested = None if options.lengths is None else "+".join(map(str, options.lengths))
    reason = f"{' and '.join(longer)} were longer and are truncated" if longer else "no row is longer"
    if rows.fields == ("tokens",):
        reason = "longer texts are divided into several rows"
    if task.family.causal and task.positions is not None and max(rows.longest) > task.positions:
        reason += f"; warning: the model was made for {task.positions:,} positions"
    dropped, first = _dropped(meta.dropped), _first_dropped(rows.path)
    dropped += f" ({first})" if dropped and first else ""
    return [
        ("tokenizer", options.tokenizer, options.tokenizer or f"{meta.vocab_size:,} tokens", _origin(task, rows)),
        ("max_tokens", requested, limits, reason),
        ("rows", meta.rows_in, meta.rows, f"dropped {dropped}" if dropped else "none dropped"),
        *(
            (reason, None, count, words)
            for reason, count, words in _noted(RowNotes.read(rows.path), task.family.causal)
        ),
    ]


def _noted(notes: "Mapping[str, RowNotes]", causal: bool) -> list[tuple[str, str, str]]:
    """For each reason, how many rows there are, what becomes of them, and the first of them."""
    marks_turns = "the chat template marks turns with these tokens, so in a text only their letters can be meant"
    words = {
        READ_AS_LETTERS: f"warning: {marks_turns if causal else 'transformers would read these tokens'}",
        READ_AS_TOKENS: "as in transformers",
        ROLE_ORDER: "warning: the template prints them, and they are trained on",
    }
    return [
        (reason, show_count(note.rows, "row"), f"{words[reason]}; the first: {note.first}")
        for reason, note in notes.items()
        if reason in words
    ]


def _limits(task: "Pretrain", meta: StoreMeta) -> list[int]:
    """Of a causal pair the limit is that of prompt and longer reply together, and both replies have the same."""
    limits = list(meta.max_tokens.values())
    return limits[: 1 if task.family.causal else 2] if task.reads_pairs else limits


def _first_dropped(store: Path) -> str:
    """`the first: pairs.jsonl, line 7: chosen is empty`, for each reason; empty if it is not known."""
    try:
        problems = json.loads((store / FIRST_DROPPED).read_bytes())
    except (OSError, ValueError):
        return ""
    return "the first: " + "; ".join(problems.values())


def _dropped(counts: Mapping[str, int]) -> str:
    """`2 that could not be read and 7 with an empty field`."""
    reasons = {
        "broken": "that could not be read",
        "empty": "with an empty field",
        "nothing to train on": "with nothing to train on",
        "invalid": "that are not valid conversations",
        "refused by the chat template": "that the chat template refuses",
    }
    return " and ".join(f"{count:,} {reasons.get(reason, reason)}" for reason, count in counts.items() if count)


def _check_store(task: "Pretrain", data: str, folder: Path, like: Dataset | None) -> None:
    """Refuse options for raw files with rows that are tokens already, and rows of another tokenizer than `like`."""
    options = task.options
    unused = [
        f"{name}="
        for name in ("tokenizer", "columns", "max_tokens", "chat_template", "train_on")
        if getattr(options, name) is not None
    ]
    made_here = Path(data).resolve().is_relative_to(folder.resolve())
    if unused and like is None and not made_here:
        raise BadOption(f"{', '.join(unused)} cannot be used with {data}, which is a token store. Try: the raw files.")
    if isinstance(like, Store) and StoreMeta.read(Path(data)).tokenizer_fingerprint != like.meta.tokenizer_fingerprint:
        raise BadData(
            f"valid={data!r} was made with another tokenizer than {like.path}. "
            "Try: raw files, or tokenize them with the same tokenizer."
        )


def check_fields(task: "Pretrain", data: str, source: "Source") -> None:
    """Refuse rows of another kind before they are tokenized."""
    layout = source.layout
    if task.reads_pairs:
        return
    columns = ", ".join(dict.fromkeys(layout.columns.values()))
    if task.family.causal:
        if layout.kind == "text" and task.fine_tunes:
            raise BadData(
                f"{data} has texts (from {columns}), and {task.name} trains on replies. "
                "Try: pretrain, or columns='prompt=question,response=answer'."
            )
        return
    if layout.fields != FIELDS:
        advice = "prompt=prompt,response=chosen" if "chosen" in layout.fields else "prompt=question,response=answer"
        raise BadData(
            f"{data} has rows of {' and '.join(layout.fields)} (from {columns}), and {task.name} trains on "
            f"prompts and responses. Try: columns='{advice}'."
        )


def causal_encoder(task: "Pretrain", source: "Source", tokenizer: str | Path, template: str | None = None) -> Any:
    """What turns the rows of this source into tokens: whole texts, or conversations by the tokenizer's chat template or
    another one."""
    if source.layout.kind == "text":
        return TextEncoder.load(tokenizer, max_tokens=task.max_tokens[0])
    train_on = task.options.train_on or task.trains_on
    return ConversationEncoder.load(tokenizer, max_tokens=task.max_tokens[0], train_on=train_on, template=template)


def _encoder(task: "Pretrain", source: "Source", tokenizer: Path) -> Any:
    """What turns the rows of this source into tokens; None for texts, field by field."""
    if task.reads_pairs:
        from brimful.tasks.pair_data import PairEncoder

        return PairEncoder.load(tokenizer, causal=task.family.causal, max_tokens=task.max_tokens)
    return causal_encoder(task, source, tokenizer) if task.family.causal else None


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
    task: "Pretrain", data: str, folder: Path, progress: Callable[[str], object], like: Dataset | None
) -> Path:
    """The tokenizer of `like`, the requested one, the model's, or a new one; with the requested chat template."""
    other = getattr(like, "path", None)
    if other is not None:
        return Path(other) / "tokenizer"
    tokenizer = task.options.tokenizer or task.source
    if tokenizer is None:
        return _new_tokenizer(task, data, folder, progress)
    if task.options.chat_template is None:
        return Path(tokenizer)
    return with_template(Path(tokenizer), task.options.chat_template, folder)


def _new_tokenizer(task: "Pretrain", data: str, folder: Path, progress: Callable[[str], object]) -> Path:
    from brimful.data.read.source import open_source
    from brimful.data.tokenizer.train import TokenizerOptions, train_tokenizer

    assert task.preset is not None
    output, limit = folder / "tokenizer", task.host_limit_bytes
    if output.is_dir():
        return output
    folder.mkdir(parents=True, exist_ok=True)
    options = TokenizerOptions(vocab_size=task.preset.vocab)
    if limit is not None:  # a higher limit is no reason to train on more rows for longer
        options = replace(options, host_limit_bytes=min(options.host_limit_bytes, limit))
    columns, size = task.options.columns, limit or TOKENIZING_BYTES
    try:
        source = open_source([data], columns=columns, host_limit_bytes=size)
    except BadOption:  # names of conversations; for the words of a vocabulary any text of the rows will do
        source = open_source([data], host_limit_bytes=size)
    report = train_tokenizer(source, output=output, options=options, progress=progress)
    if task.preset.causal:
        write_template(output, CHAT_TEMPLATE)
        if task.options.chat_template is not None:
            return with_template(output, task.options.chat_template, folder)
    progress(f"trained a tokenizer of {report.vocab_size:,} tokens on {data}: {output}")
    return output


def with_template(tokenizer: Path, template: str, folder: Path) -> Path:
    """A copy of the tokenizer with another chat template, which is then saved with the store and with the model."""
    from brimful.tasks.chat_template import ChatTemplate

    text = ChatTemplate.load(tokenizer, template).jinja
    copy = folder / f"tokenizer-{hashlib.sha256((str(tokenizer.resolve()) + text).encode()).hexdigest()[:8]}"
    copy.mkdir(parents=True, exist_ok=True)
    for pattern in TOKENIZER_FILES:
        for file in tokenizer.glob(pattern):
            shutil.copyfile(file, copy / file.name)
    write_template(copy, text)
    return copy
