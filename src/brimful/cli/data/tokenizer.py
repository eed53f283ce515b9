"""`brimful data tokenizer FILES`: rows in, a folder out that transformers loads."""

import json as json_format
from pathlib import Path
from typing import Annotated, Any, Literal

from cyclopts import Parameter

from brimful.cli.output import progress, show
from brimful.errors import BadOption
from brimful.units import parse_bytes


def tokenizer(
    *files: str,
    output: Path,
    vocab_size: int | None = None,
    kind: Literal["bpe", "unigram"] = "bpe",
    columns: str | None = None,
    host_limit: str = "4GiB",
    model: str = "base",
    seed: int = 0,
    max_bad: float = 0.0,
    overwrite: Annotated[bool, Parameter(negative="")] = False,
    json: Annotated[bool, Parameter(negative="")] = False,
) -> None:
    """Train a tokenizer on as many rows as the RAM holds, and save it for transformers and `brimful data pack`.

    Chinese-ready: NFKC, no word borders needed, and rare characters become bytes, so that no text is unknown and every
    text comes back exactly. Special tokens have fixed ids: [PAD] 0, [EOS] 1, [SEP] 2, [BOS] 3, [CLS] 4, [MASK] 5, [UNK] 6.

    Parameters
    ----------
    files
        Files (parquet, jsonl, json, csv, tsv, also .gz, .bz2 and .zst), folders of them, or owner/name on the hub.
    output
        The folder to make.
    vocab_size
        Entries, special tokens and 256 bytes counted; the model's unless given.
    kind
        bpe: merged byte pairs, the shorter and faster; unigram: the most likely segmentation.
    columns
        Which column is what, such as prompt=question,response=answer or prompt=instruction+input; found by name unless given.
    host_limit
        The host RAM it may take; decides how many rows are used.
    model
        The model it is for: base, tiny, or a folder with a config.json; its ids and size are checked.
    seed
        Of the sample.
    max_bad
        The share of rows that may be broken; they are left out and counted.
    overwrite
        Replace a tokenizer that is at --output already, once the new one is whole.
    json
        Print one JSON object.
    """
    if not files:
        raise BadOption("data tokenizer: name the files, folders or data sets to train on")
    limit_bytes, expected = parse_bytes(host_limit, flag="--host-limit"), _expected(model)
    from brimful.data.tokenizer.options import TokenizerOptions
    from brimful.data.tokenizer.run import train_tokenizer
    from brimful.report.tokenizer_table import tokenizer_table

    options = TokenizerOptions(
        vocab_size=vocab_size, kind=kind, columns=columns, host_limit_bytes=limit_bytes, seed=seed, max_bad=max_bad,
        overwrite=overwrite,
    )  # fmt: skip
    with progress("tokenizer", every_s=5) as say:
        report = train_tokenizer(files, output=output, options=options, expected=expected, progress=say)
    show(tokenizer_table(report), report.to_json(), as_json=json)


_KEYS = ("vocab_size", "pad_token_id", "eos_token_id", "decoder_start_token_id")


def _expected(model: str) -> dict[str, Any]:
    """What the model's config says of its tokenizer: of a built-in size, or of a folder's config.json."""
    from brimful.tasks.chatlm.task import EOS, PAD, SIZES

    if model in SIZES:
        return dict(zip(_KEYS, (SIZES[model].vocab, PAD, EOS, PAD), strict=True))
    path = Path(model) / "config.json"
    if not path.is_file():
        raise BadOption(f"--model {model}: neither one of {', '.join(SIZES)} nor a folder with a config.json")
    try:
        config = json_format.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise BadOption(f"--model {model}: its config.json cannot be read ({error})") from None
    if not isinstance(config, dict) or not isinstance(config.get("vocab_size"), int):
        raise BadOption(f"--model {model}: its config.json has no vocab_size; give the folder of a text model")
    return {key: config.get(key) for key in _KEYS}
