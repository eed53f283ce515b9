"""`brimful data clean FILES`: normalised, without duplicates, shuffled and split, within a memory limit."""

import sys
from pathlib import Path
from typing import Annotated

from cyclopts import Parameter

from brimful.cli.output import progress, show
from brimful.errors import BadOption

Flag = Annotated[bool, Parameter(negative="")]


def clean(
    *files: str,
    output: Path,
    columns: str | None = None,
    tokenizer: str | None = None,
    min_chars: str | None = None,
    max_chars: str | None = None,
    max_tokens: str | None = None,
    near: float = 0.85,
    no_near: Flag = False,
    valid: float = 0.01,
    test: float = 0,
    seed: int = 0,
    host_limit: str = "1GiB",
    max_bad: float = 0,
    overwrite: Flag = False,
    json: Flag = False,
) -> None:
    """Normalise rows, drop what cannot be used and what came before, shuffle, split into train, valid and test.

    Writes train.parquet, valid.parquet, test.parquet as asked for, and clean.json, which says why each row was dropped.
    Interrupted, it leaves no half file; the same command goes on where it was.

    Parameters
    ----------
    files
        Files (parquet, jsonl, json, csv, tsv, also .gz, .bz2 and .zst), folders of them, or owner/name on the hub.
    output
        The folder for the results; the work is done in its hidden folder .clean.
    columns
        Which column is what, such as prompt=question,response=answer or prompt=instruction+input; found by name unless given.
    tokenizer
        A folder with a tokenizer.json, to count tokens with.
    min_chars
        Drop rows with fewer characters: one number, or one for each side, such as 2,5.
    max_chars
        Drop rows with more characters, likewise.
    max_tokens
        Drop rows with more tokens, the closing eos included.
    near
        From which similarity on, by character 4-grams, a row counts as a near duplicate of an earlier one.
    no_near
        Keep near duplicates; exact ones go all the same.
    valid
        Rows of valid.parquet: a share below 1, or a number; 0 for none.
    test
        Rows of test.parquet, likewise.
    seed
        Of the order of the rows, hence of the split.
    host_limit
        Memory to stay within, what Python and its libraries take at the start not counted.
    max_bad
        The share of rows that may be broken; they are dropped and counted.
    overwrite
        Replace the results that are in the folder already.
    json
        Print the report as one JSON object.
    """
    if not files:
        raise BadOption("data clean: name the files, folders or data sets to clean")
    from brimful.data.clean.options import CleanOptions
    from brimful.data.clean.run import clean as make_report
    from brimful.report.clean_table import clean_table

    options = CleanOptions(
        columns=columns, tokenizer=tokenizer, min_chars=min_chars, max_chars=max_chars, max_tokens=max_tokens,
        near=None if no_near else near, valid=valid, test=test, seed=seed, host_limit=host_limit, max_bad=max_bad,
        overwrite=overwrite,
    )  # fmt: skip
    try:
        with progress("clean", every_s=5) as say:
            report = make_report(files, output=output, options=options, progress=say)
    except KeyboardInterrupt:
        if (output / ".clean").exists():
            print("clean: the same command goes on where it was", file=sys.stderr)
        raise
    show(clean_table(report), report.to_json(), as_json=json)
