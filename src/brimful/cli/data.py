"""`brimful data …`: from files of rows to a token store, and to pairs for preference training."""

import json as json_format
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any, Literal

from cyclopts import App, Parameter

from brimful.cli.flags import Device, Fill, Json, MemoryLimit, Switch
from brimful.cli.output import prefer_growing_segments, progress, show
from brimful.errors import BadData, BadOption
from brimful.languages import tr
from brimful.units import parse_bytes

Files = Annotated[str, Parameter(help="Files (parquet, jsonl, json, csv, tsv, txt, also .gz, .bz2, .zst and .xz), folders of them, or owner/name on the hub.")]  # fmt: skip
Columns = Annotated[str | None, Parameter(help="Which column is which field, such as prompt=question,response=answer or prompt=instruction+input. Default: by name.")]  # fmt: skip
ChatTemplate = Annotated[str | None, Parameter(help="Jinja file that writes conversations, or chatml or plain. Default: the template of the model's tokenizer.")]  # fmt: skip
HostLimit = Annotated[str, Parameter(help="Memory limit, beyond what Python and its libraries take at the start. A row may take 1/32 of it.")]  # fmt: skip


def check(
    *files: Files,
    columns: Columns = None,
    model: str | None = None,
    chat_template: ChatTemplate = None,
    tokenizer: str | None = None,
    max_chars: str | None = None,
    max_tokens: str | None = None,
    host_limit: HostLimit = "1GiB",
    max_bad: float = 0.01,
    valid: str | None = None,
    json: Json = False,
) -> None:
    """Show which columns were found, three rows, how many rows can be used, and how long they are.

    Reads everything once and writes nothing. The exit code is 2 if more rows are broken, empty or over-long than --max-bad
    allows. With the name of a model, rows are shown as that model reads them, the tokens that it is trained on in colour.
    Preferences (prompt, chosen, rejected) are checked as `brimful train dpo` reads them.

    Parameters
    ----------
    model
        A model folder, a run or owner/name on the hub: rows go through its chat template, as in `brimful train sft`.
    tokenizer
        A folder with a tokenizer.json, to show lengths in tokens as well.
    max_chars
        Count rows with more characters as over-long: one number, or one for each field, such as 256,512.
    max_tokens
        Count rows with more tokens as over-long, the closing eos included.
    max_bad
        The share of rows that may be broken, empty or over-long.
    valid
        Rows that training will be evaluated on: those whose prompt is also in FILES are counted.
    """
    if not files:
        raise BadOption("FILES is missing. Try: brimful data check rows.jsonl.")
    if chat_template is not None and model is None:
        raise BadOption("--chat-template needs the tokenizer of a model. Try: --model as well.")
    if model is not None:
        if both := [
            flag for flag, value in (("--tokenizer", tokenizer), ("--max-chars", max_chars)) if value is not None
        ]:
            raise BadOption(f"--model cannot be combined with {' and '.join(both)}. Try: --model alone.")
        tokenizer = _encoder_decoder(model, files, columns=columns, chat_template=chat_template, host_limit=host_limit)
    from rich.console import Group

    from brimful.data.check import CheckReport, shared_prompts
    from brimful.data.check import check as check_files
    from brimful.report.data_tables import check_table, rows_table, shared_line
    from brimful.tasks.check_rows import RowsReport, check_rows

    report: CheckReport | RowsReport
    with progress("check", every_s=5) as show_progress:
        if model is not None and tokenizer is None:
            report = check_rows(
                files, model=model, columns=columns, chat_template=chat_template, max_tokens=max_tokens,
                host_limit=host_limit, max_bad=max_bad, progress=show_progress,
            )  # fmt: skip
            table = rows_table(report)
        else:
            report = check_files(
                files, columns=columns, tokenizer=tokenizer, max_chars=max_chars, max_tokens=max_tokens,
                host_limit=host_limit, max_bad=max_bad, progress=show_progress,
            )  # fmt: skip
            table = check_table(report)
    content = report.to_json()
    if valid is not None:
        shared = shared_prompts(files, [valid], columns=columns, host_limit=host_limit)
        table, content = Group(table, shared_line(shared)), {**content, "shared_prompts": asdict(shared)}
    show(table, content, as_json=json)
    if failure := report.failure():
        raise BadData(failure)


def _encoder_decoder(
    model: str, files: tuple[str, ...], *, columns: str | None, chat_template: str | None, host_limit: str
) -> str | None:
    """The folder of an encoder-decoder, which reads prompts and responses as plain text: only its tokenizer is used."""
    from brimful.data.read.source import holds_preferences
    from brimful.tasks.model_folder import is_causal, read_config, resolve
    from brimful.tasks.presets import PRESETS

    if model in PRESETS:
        raise BadOption(f"--model {model} has new weights and no tokenizer yet. Try: a model folder or a run.")
    folder = resolve(model)
    limit_bytes = parse_bytes(host_limit, flag="--host-limit")
    pairs = holds_preferences(files, columns=columns, host_limit_bytes=limit_bytes)
    if not is_causal(read_config(folder)) and not pairs:
        if chat_template is not None:
            raise BadOption("--chat-template is for causal models, not for an encoder-decoder. Try: leave it out.")
        return str(folder)
    return None


def clean(
    *files: Files,
    output: Path,
    columns: Columns = None,
    tokenizer: str | None = None,
    min_chars: str | None = None,
    max_chars: str | None = None,
    max_tokens: str | None = None,
    near: float = 0.85,
    no_near: Switch = False,
    valid: float = 0.01,
    test: float = 0,
    seed: int = 0,
    host_limit: HostLimit = "1GiB",
    max_bad: float = 0,
    overwrite: Switch = False,
    json: Json = False,
) -> None:
    """Normalize rows, drop unusable rows and duplicates, shuffle, and split into train, valid and test.

    Writes train.parquet, valid.parquet, test.parquet and clean.json, which counts the dropped rows by reason. If it is
    interrupted, no partial file is left; run the same command again to continue.

    Parameters
    ----------
    output
        The folder for the results. Temporary files are kept in its hidden folder .clean.
    tokenizer
        A folder with a tokenizer.json, to count tokens with.
    min_chars
        Drop rows with fewer characters: one number, or one for each field, such as 2,5.
    max_chars
        Drop rows with more characters.
    max_tokens
        Drop rows with more tokens, the closing eos included.
    near
        The similarity, by character 4-grams, from which a row is a near duplicate of an earlier one.
    no_near
        Keep near duplicates. Exact duplicates are always dropped.
    valid
        Rows of valid.parquet: a share below 1, or a number of rows; 0 for none.
    test
        Rows of test.parquet: a share below 1, or a number of rows; 0 for none.
    seed
        Seed of the row order, and so of the split.
    max_bad
        The share of rows that may be broken. They are dropped and counted.
    overwrite
        Replace existing results.
    """
    if not files:
        raise BadOption("FILES is missing. Try: brimful data clean rows.jsonl --output clean.")
    from brimful.data.clean.clean import clean as clean_files
    from brimful.data.clean.prepare import CleanOptions
    from brimful.report.data_tables import clean_table

    options = CleanOptions(
        columns=columns, tokenizer=tokenizer, min_chars=min_chars, max_chars=max_chars, max_tokens=max_tokens,
        near=None if no_near else near, valid=valid, test=test, seed=seed, host_limit=host_limit, max_bad=max_bad,
        overwrite=overwrite,
    )  # fmt: skip
    try:
        with progress("clean", every_s=5) as show_progress:
            report = clean_files(files, output=output, options=options, progress=show_progress)
    except KeyboardInterrupt:
        if (output / ".clean").exists():
            print(tr("{command}: run the same command again to continue", command="clean"), file=sys.stderr)
        raise
    show(clean_table(report), report.to_json(), as_json=json)


def tokenizer(
    *files: Files,
    output: Path,
    vocab_size: int | None = None,
    kind: Literal["bpe", "unigram"] = "bpe",
    columns: Columns = None,
    host_limit: str = "4GiB",
    model: str = "chatlm-base",
    seed: int = 0,
    max_bad: float = 0.0,
    overwrite: Switch = False,
    json: Json = False,
) -> None:
    """Train a tokenizer on as many rows as the RAM holds, for transformers and `brimful data tokenize`.

    Made for Chinese as well: NFKC, no word borders needed, and rare characters become bytes, so that every text can be
    encoded and decodes exactly. Special tokens have fixed ids: [PAD] 0, [EOS] 1, [SEP] 2, [BOS] 3, [CLS] 4, [MASK] 5,
    [UNK] 6.

    Parameters
    ----------
    output
        The folder to create.
    vocab_size
        Entries, including special tokens and 256 bytes. Default: the model's.
    kind
        bpe: byte-pair merges, shorter and faster; unigram: the most likely segmentation.
    host_limit
        Memory limit of the whole process; decides how many rows are used. A row may take 1/32 of it.
    model
        The model it is for: chatlm-base or another preset of --model, or a folder with a config.json; its ids and size are checked.
    seed
        Seed of the random sample.
    max_bad
        The share of rows that may be broken; they are left out and counted.
    overwrite
        Replace an existing tokenizer at --output once the new one is complete.
    """
    if not files:
        raise BadOption("FILES is missing. Try: brimful data tokenizer rows.jsonl --output tokenizer.")
    limit_bytes, config = parse_bytes(host_limit, flag="--host-limit"), _model_config(model)
    from brimful.data.tokenizer.train import TokenizerOptions, train_tokenizer
    from brimful.report.data_tables import tokenizer_table

    options = TokenizerOptions(
        vocab_size=vocab_size, kind=kind, columns=columns, host_limit_bytes=limit_bytes, seed=seed, max_bad=max_bad,
        overwrite=overwrite,
    )  # fmt: skip
    with progress("tokenizer", every_s=5) as show_progress:
        report = train_tokenizer(files, output=output, options=options, model_config=config, progress=show_progress)
    show(tokenizer_table(report), report.to_json(), as_json=json)


def tokenize(
    *files: Files,
    output: Path,
    model: str | None = None,
    tokenizer: Path | None = None,
    columns: Columns = None,
    chat_template: ChatTemplate = None,
    train_on: Literal["replies", "all"] | None = None,
    max_tokens: str | None = None,
    keep_end: str | None = None,
    host_limit: str = "1GiB",
    max_bad: float = 0.0,
    overwrite: Switch = False,
    json: Json = False,
) -> None:
    """Tokenize rows into a token store: memory-mapped, checksummed, shared by all workers and processes.

    With --model, rows become what `brimful train` makes of them for that model: conversations by its chat template, whole texts,
    preferences. With --tokenizer, every field of a row becomes tokens and ends with one eos, as an encoder-decoder reads it.
    Rows with an empty field are dropped and counted. If it is interrupted, nothing is left at --output; run the same command again
    to continue.

    Parameters
    ----------
    output
        The folder to create.
    model
        The model that is to be trained: a folder, a run or owner/name on the hub.
    tokenizer
        A folder with a tokenizer.json, such as `brimful data tokenizer` makes, for an encoder-decoder that has no folder yet.
    train_on
        Tokens of a conversation that a causal model is trained on. Default: replies.
    max_tokens
        Truncate rows to this many tokens: one number, or for an encoder-decoder one for each field, such as 256,320. Default: as
        in training with --model, else 256.
    keep_end
        Fields that lose their beginning when truncated, such as prompt; others lose their end. Default: the prompts of
        conversations, where the question comes last.
    host_limit
        Memory limit of the whole process. A row may take 1/32 of it.
    max_bad
        The share of rows that may be broken; they are dropped and counted.
    overwrite
        Replace an existing token store at --output once the new one is complete.
    """
    if not files:
        raise BadOption("FILES is missing. Try: brimful data tokenize rows.jsonl --model MODEL --output store.")
    if (model is None) == (tokenizer is None):
        raise BadOption("One of --model and --tokenizer is needed. Try: --model with the model that is to be trained.")
    for_causal = {"--chat-template": chat_template, "--train-on": train_on}
    limit_bytes = parse_bytes(host_limit, flag="--host-limit")
    plain = tokenizer
    if model is not None:
        decoder = _encoder_decoder(model, files, columns=columns, chat_template=chat_template, host_limit=host_limit)
        plain = None if decoder is None else Path(decoder)
        if plain is not None and max_tokens is None:
            from brimful.tasks.language import LanguageOptions, Pretrain

            max_tokens = ",".join(map(str, Pretrain(LanguageOptions(model=model)).max_tokens))
    if plain is not None and (wrong := [flag for flag, value in for_causal.items() if value is not None]):
        raise BadOption(f"{' and '.join(wrong)} needs --model with a causal model. Try: leave it out.")
    if plain is None and keep_end is not None:
        raise BadOption("--keep-end is for the fields of an encoder-decoder. Try: leave it out.")
    limits = _numbers(max_tokens or "256")
    from brimful.data.tokenize import TokenizeOptions
    from brimful.data.tokenize import tokenize as make_store
    from brimful.report.data_tables import tokenize_table

    options = TokenizeOptions(
        columns=columns, max_tokens=limits, keep_end=None if keep_end is None else tuple(filter(None, keep_end.split(","))),
        host_limit_bytes=limit_bytes, max_bad=max_bad, overwrite=overwrite,
    )  # fmt: skip
    with progress("tokenize", every_s=5) as show_progress:
        if plain is not None:
            report = make_store(files, tokenizer=plain, output=output, options=options, progress=show_progress)
        else:
            from brimful.tasks.check_rows import tokenize_for_model

            assert model is not None
            report = tokenize_for_model(
                files, model=model, output=output, options=options, chat_template=chat_template, train_on=train_on,
                max_tokens=max_tokens, progress=show_progress,
            )  # fmt: skip
    show(tokenize_table(report), report.to_json(), as_json=json)


def rejects(
    model: str,
    data: str,
    /,
    *,
    output: Path,
    rows: Literal["all"] | int = "all",
    seed: int = 0,
    temperature: float = 0.8,
    top_p: float = 0.95,
    max_new_tokens: int = 256,
    min_chars: int = 2,
    max_similarity: float = 0.8,
    columns: str | None = None,
    chat_template: ChatTemplate = None,
    max_bad: float = 0.0,
    device: Device = "auto",
    memory_limit: MemoryLimit = None,
    host_limit: str | None = None,
    fill: Fill = 0.85,
    overwrite: Switch = False,
    json: Json = False,
) -> None:
    """Sample a rejected answer to each prompt from a model: pairs of chosen and rejected for `brimful train dpo`.

    The last reply of each row is the chosen answer. Each prompt is answered once, in batches that fit; the answers do not
    depend on the batches. Answers that are empty, unfinished, too short, too similar to the chosen one or off-topic are dropped
    and counted. If it is interrupted, nothing is left at --output; run the same command again to continue.

    Parameters
    ----------
    model
        The model that is to be trained: a run of `brimful train sft`, a model folder, an adapter, or owner/name on the hub.
    data
        Rows with prompts and responses, or conversations (parquet, jsonl, json, csv …).
    output
        The .jsonl file to create.
    rows
        Number of prompts to answer, chosen by the seed, or all.
    seed
        Seed of that choice and of the answers.
    temperature
        Sampling temperature; 0 always takes the most likely token.
    top_p
        Sample only from the most likely tokens that together have this probability.
    max_new_tokens
        Tokens of an answer at most. One that has not ended by then is dropped.
    min_chars
        Drop answers with fewer characters.
    max_similarity
        Drop answers that are more similar to the chosen one, from 0 to 1, by pairs of neighbouring characters.
    columns
        Which column is which field, such as prompt=question,response=answer or messages=chat. Default: by name.
    max_bad
        The share of rows that may be broken; they are dropped and counted.
    host_limit
        Host RAM to use at most, such as 16GiB. A row may take 1/32 of it.
    overwrite
        Replace an existing file at --output once the new one is complete.
    """
    prefer_growing_segments()
    from brimful.report.data_tables import rejects_table
    from brimful.tasks.rejects import RejectsOptions, make_rejects

    options = RejectsOptions(
        rows=None if rows == "all" else rows, seed=seed, temperature=temperature, top_p=top_p, max_new_tokens=max_new_tokens,
        min_chars=min_chars, max_similarity=max_similarity, columns=columns, chat_template=chat_template, max_bad=max_bad,
        device=device, memory_limit=memory_limit, host_limit=host_limit, fill=fill, overwrite=overwrite,
    )  # fmt: skip
    try:
        with progress("rejects", every_s=5) as show_progress:
            report = make_rejects(model, data, output=output, options=options, progress=show_progress)
    except KeyboardInterrupt:
        print(tr("{command}: run the same command again to continue", command="rejects"), file=sys.stderr)
        raise
    show(rejects_table(report), report.to_json(), as_json=json)


def _model_config(model: str) -> dict[str, Any]:
    """What the config of a preset, or of a folder's config.json, says about its tokenizer."""
    from brimful.tasks.presets import EOS, PAD, PRESETS

    keys = ("vocab_size", "pad_token_id", "eos_token_id", "decoder_start_token_id")
    if model in PRESETS:
        return dict(zip(keys, (PRESETS[model].vocab, PAD, EOS, PAD), strict=True))
    path = Path(model) / "config.json"
    if not path.is_file():
        raise BadOption(f"--model {model} is not known. Try: {', '.join(PRESETS)}, or a folder with a config.json.")
    try:
        config = json_format.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise BadOption(
            f"--model {model}: its config.json cannot be read ({error}). Try: save the model again."
        ) from None
    if not isinstance(config, dict) or not isinstance(config.get("vocab_size"), int):
        raise BadOption(f"--model {model}: its config.json has no vocab_size. Try: the folder of a text model.")
    return {key: config.get(key) for key in keys}


def _numbers(text: str) -> tuple[int, ...]:
    try:
        return tuple(int(part) for part in text.split(","))
    except ValueError:
        raise BadOption(
            f"--max-tokens {text} must be a whole number, or one for each field. Try: 256 or 256,320."
        ) from None


data = App(
    name="data",
    help="Prepare rows for training: check, clean, tokenizer, tokenize; and rejects, pairs for preference training.",
)
for command in (check, clean, tokenizer, tokenize, rejects):
    data.command(command)
