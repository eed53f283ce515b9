"""`brimful data check FILES`: what is in there, and how much of it can be used."""

from typing import Annotated

from cyclopts import Parameter

from brimful.cli.output import progress, show
from brimful.errors import BadData, BadOption


def check(
    *files: str,
    columns: str | None = None,
    tokenizer: str | None = None,
    max_chars: str | None = None,
    max_tokens: str | None = None,
    max_bad: float = 0.01,
    json: Annotated[bool, Parameter(negative="")] = False,
) -> None:
    """Show which columns were found, three rows, how many rows can be used, and how long they are.

    Reads everything once and writes nothing. Ends with exit code 2 where more rows are broken, empty or over-long than
    --max-bad allows.

    Parameters
    ----------
    files
        Files (parquet, jsonl, json, csv, tsv, also .gz, .bz2 and .zst), folders of them, or owner/name on the hub.
    columns
        Which column is what, such as prompt=question,response=answer or prompt=instruction+input; found by name unless given.
    tokenizer
        A folder with a tokenizer.json: lengths are shown in tokens, too.
    max_chars
        Count rows with more characters as over-long: one number, or one for each side, such as 256,512.
    max_tokens
        Likewise in tokens, the closing eos included.
    max_bad
        The share of rows that may be broken, empty or over-long.
    json
        Print one JSON object.
    """
    if not files:
        raise BadOption("data check: name the files, folders or data sets to look at")
    from brimful.data.check.run import check as make_report
    from brimful.report.check_table import check_table

    with progress("check", every_s=5) as say:
        report = make_report(
            files, columns=columns, tokenizer=tokenizer, max_chars=max_chars, max_tokens=max_tokens, max_bad=max_bad, progress=say
        )  # fmt: skip
    show(check_table(report), report.to_json(), as_json=json)
    complaint = report.complaint()
    if complaint:
        raise BadData(complaint)
