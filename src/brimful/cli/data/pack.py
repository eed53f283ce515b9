"""`brimful data pack FILES`: rows in, token store out."""

from pathlib import Path
from typing import Annotated

from cyclopts import Parameter

from brimful.cli.output import progress, show
from brimful.errors import BadOption
from brimful.units import parse_bytes


def pack(
    *files: str,
    tokenizer: Path,
    output: Path,
    columns: str | None = None,
    max_tokens: str = "256",
    keep_end: str | None = None,
    host_limit: str = "1GiB",
    max_bad: float = 0.0,
    overwrite: Annotated[bool, Parameter(negative="")] = False,
    json: Annotated[bool, Parameter(negative="")] = False,
) -> None:
    """Tokenise rows into a token store: memory-mapped, checksummed, shared by all workers and processes.

    Every side of a row ends with one eos. Rows with an empty side are dropped and counted. Interrupted, it leaves nothing
    at --output; run again with the same options, it goes on where it was.

    Parameters
    ----------
    files
        Files (parquet, jsonl, json, csv, tsv, also .gz, .bz2 and .zst), folders of them, or owner/name on the hub.
    tokenizer
        A folder with a tokenizer.json, such as `brimful data tokenizer` makes.
    output
        The folder to make.
    columns
        Which column is what, such as prompt=question,response=answer or prompt=instruction+input; found by name unless given.
    max_tokens
        Cut longer sides to this many tokens, the eos counted: one number, or one for each side, such as 256,320.
    keep_end
        Sides that lose their beginning where they are too long, such as prompt; others lose their end. Unless given, the
        prompts of conversations keep their end, where the question is.
    host_limit
        The host RAM it may take.
    max_bad
        The share of rows that may be broken; they are dropped and counted.
    overwrite
        Replace a token store that is at --output already, once the new one is whole.
    json
        Print one JSON object.
    """
    if not files:
        raise BadOption("data pack: name the files, folders or data sets to pack")
    limits, limit_bytes = _numbers(max_tokens), parse_bytes(host_limit, flag="--host-limit")
    from brimful.data.pack.options import PackOptions
    from brimful.data.pack.run import pack as make_store
    from brimful.report.pack_table import pack_table

    options = PackOptions(
        columns=columns,
        max_tokens=limits,
        keep_end=_names(keep_end),
        host_limit_bytes=limit_bytes,
        max_bad=max_bad,
        overwrite=overwrite,
    )
    with progress("pack", every_s=5) as say:
        report = make_store(files, tokenizer=tokenizer, output=output, options=options, progress=say)
    show(pack_table(report), report.to_json(), as_json=json)


def _names(text: str | None) -> tuple[str, ...] | None:
    return None if text is None else tuple(filter(None, text.split(",")))


def _numbers(text: str) -> tuple[int, ...]:
    try:
        return tuple(int(part) for part in text.split(","))
    except ValueError:
        raise BadOption(f"--max-tokens {text}: write a whole number, or one for each side, such as 256,320") from None
