"""`brimful eval MODEL DATA`: the scores of a model over a fixed set of rows, within a memory limit.

Rows of replies give loss, perplexity, BLEU-4 and chrF; preferences (prompt, chosen, rejected) accuracy, margin and rewards.
"""

import json as json_module
import shutil
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from brimful.cli.flags import Device, Fill, Json, MemoryLimit
from brimful.cli.output import prefer_growing_segments, progress, show
from brimful.errors import BadOption
from brimful.files import FileLock, write_atomic

if TYPE_CHECKING:
    from brimful.planning.plan_options import PlanOptions
    from brimful.planning.target import Target
    from brimful.tasks.chat_scores import ChatEvaluation
    from brimful.tasks.pair_scores import PairEvaluation

METRICS = ("loss", "bleu", "chrf")
SAMPLES = 8
"""Answers in the report."""
_FOLDER_PREFIX = "brimful-eval-"


def evaluate(
    model: str,
    data: str,
    /,
    *,
    rows: Literal["all"] | int = 1000,
    seed: int = 0,
    metrics: str = ",".join(METRICS),
    max_new_tokens: int | None = None,
    beams: int = 1,
    columns: str | None = None,
    max_tokens: str | None = None,
    chat_template: str | None = None,
    reference: str | None = None,
    output: Path | None = None,
    device: Device = "auto",
    memory_limit: MemoryLimit = None,
    host_limit: str | None = None,
    fill: Fill = 0.85,
    json: Json = False,
) -> None:
    """Evaluate a language model: loss, perplexity, BLEU-4 and chrF over a fixed set of rows.

    Loss and perplexity run over the tokens of replies. Answers are those to the last question of each conversation. Whole
    texts have a loss and a perplexity only. Preferences (prompt, chosen, rejected) have an accuracy, a margin and the
    log-probability of chosen replies.

    Batches have rows of similar lengths and fit a memory model of their own. If memory runs out all the same, they get
    smaller; the scores stay the same.

    Parameters
    ----------
    model
        A run of `brimful train` (its best model), one of its checkpoints, an adapter, a folder written by save_pretrained, or
        owner/name on the Hugging Face hub.
    data
        Raw rows (parquet, jsonl, json, csv …), or a token store made with the model's tokenizer.
    rows
        Number of rows to evaluate on, chosen by the seed, or all.
    seed
        Seed of that choice.
    metrics
        What to compute, separated by commas: loss (and perplexity), bleu, chrf.
    max_new_tokens
        Tokens of an answer at most. Default: the length of the longest reference.
    beams
        Beams of beam search; 1 is greedy.
    columns
        Which column is which field, such as prompt=question,response=answer. Default: by name.
    max_tokens
        Truncate raw rows to this many tokens: 1024; for an encoder-decoder 256, or 256,320 for prompt and response. Default: as
        in the model's run, else 1024, for an encoder-decoder 256.
    chat_template
        Jinja file that writes conversations for a causal model, or chatml or plain. Default: the tokenizer's own.
    reference
        For preferences: the model that rewards are relative to, or none. Default: for a run of `dpo` the model that it began
        with, else none; then log-probabilities per token are compared.
    output
        A .jsonl file for all answers: row, prompt, response, reference.
    host_limit
        Host RAM to use at most, such as 16GiB.
    """
    names = [name.strip() for name in metrics.split(",") if name.strip()]
    if not names or not set(names) <= set(METRICS):
        raise BadOption(f"metrics={metrics!r} must be names separated by commas. Try: metrics={','.join(METRICS)}.")
    if isinstance(rows, int) and rows < 1:
        raise BadOption(f"rows={rows} must be at least 1. Try: rows=all.")
    prefer_growing_segments()
    from brimful.planning.plan_options import PlanOptions
    from brimful.report.tables import eval_table
    from brimful.tasks.chat_scores import ChatEvaluation, has_replies
    from brimful.tasks.model_folder import resolve

    options = PlanOptions(device=device, memory_limit=memory_limit, host_limit=host_limit, fill=fill, seed=seed)
    max_rows = None if rows == "all" else rows
    if _holds_pairs(data, columns, options):
        if output is not None or names not in ([*METRICS], ["loss"]):
            flag = f"output={str(output)!r}" if output is not None else f"metrics={metrics!r}"
            raise BadOption(f"{flag} is for rows with replies, and {data} has preferences. Try: leave it out.")
        from brimful.tasks.pair_scores import PairEvaluation

        pairs = PairEvaluation(
            resolve(model), reference=reference, columns=columns, max_tokens=max_tokens, chat_template=chat_template
        )
        report = _pair_report(pairs, data, options, max_rows)
        show(eval_table(report), report, as_json=json)
        return
    if reference is not None:
        raise BadOption(f"reference={reference!r} is for preferences, and {data} has none. Try: leave it out.")
    if output is not None:
        with _writing(output), tempfile.TemporaryFile(dir=output.parent):
            pass  # a folder that is not writable shows at once
    with _store_folder() as folder, progress("eval", every_s=5) as show_progress:
        task = ChatEvaluation(
            resolve(model), metrics=[name for name in names if name != "loss"], beams=beams,
            max_new_tokens=max_new_tokens, columns=columns, max_tokens=max_tokens, chat_template=chat_template,
        )  # fmt: skip
        store, target = _prepare(task, data, folder, options, show_progress)
        needs_answers = output is not None or set(names) != {"loss"}
        if needs_answers and not has_replies(store):
            if "loss" not in names or output is not None:
                raise BadOption(
                    f"{data} has whole texts, and answers need conversations. Try: metrics=loss without output=."
                )
            needs_answers = False
        result = _run(
            task, store, target, loss="loss" in names, answers=needs_answers, max_rows=max_rows, seed=seed,
            progress=show_progress,
        )  # fmt: skip
        if output is not None:
            lines = (json_module.dumps(answer.to_json(), ensure_ascii=False) + "\n" for answer in task.answers)
            with _writing(output):
                write_atomic(output, "".join(lines))
    report = {
        **_place(str(task.source), data, target, store, seed), "output": None if output is None else str(output), **result,
        **task.facts(), "samples": [answer.to_json() for answer in task.answers[:SAMPLES]],
    }  # fmt: skip
    show(eval_table(report), report, as_json=json)


def _holds_pairs(data: str, columns: str | None, options: "PlanOptions") -> bool:
    from brimful.data.read.source import holds_preferences
    from brimful.data.store import NAME, StoreMeta
    from brimful.tasks.pair_batches import FIELDS
    from brimful.units import GiB

    if (Path(data) / NAME).is_file():
        return StoreMeta.read(Path(data)).fields == FIELDS
    return holds_preferences([data], columns=columns, host_limit_bytes=options.host_limit_bytes or GiB)


def _prepare(
    task: "ChatEvaluation | PairEvaluation", data: str, folder: Path, options: "PlanOptions", progress: Callable[[str], object]
) -> tuple[Any, "Target"]:  # fmt: skip
    """The rows, tokenized into this folder if they are raw, and where the model runs."""
    from brimful.planning.target import find_target
    from brimful.tasks.generate import weights_dtype

    task.host_limit_bytes = options.host_limit_bytes
    store = task.rows(task.prepare(data, folder, progress, name="eval"))
    target = find_target(options)
    task.dtype = weights_dtype(task.config, target.device)
    return store, target


def _pair_report(task: "PairEvaluation", data: str, options: "PlanOptions", max_rows: int | None) -> dict[str, Any]:
    """Preference scores: the reference first, then the model."""
    from brimful.training.evaluate import choose

    with _store_folder() as temporary, progress("eval", every_s=5) as show_progress:
        store, target = _prepare(task, data, temporary, options, show_progress)
        task.add_reference(store, choose(len(store), max_rows, options.seed), target, options.seed, show_progress)
        result = _run(
            task, store, target, loss=True, answers=True, max_rows=max_rows, seed=options.seed, progress=show_progress
        )
    place = _place(str(task.folder), data, target, store, options.seed)
    return {**place, "output": None, **result, **task.facts(), "samples": []}


def _place(model: str, data: str, target: "Target", store: Any, seed: int) -> dict[str, Any]:
    return {
        "model": model, "data": data, "device": str(target.device), "device_name": target.name, "seed": seed,
        "rows_available": len(store), "limit_bytes": target.limit_bytes, "limit_reason": target.limit_reason,
    }  # fmt: skip


def _run(
    task: "ChatEvaluation | PairEvaluation", store: Any, target: "Target", *, loss: bool, answers: bool, max_rows: int | None, seed: int,
    progress: Callable[[str], object],
) -> dict[str, Any]:  # fmt: skip
    """The evaluation under its limit, as fields of the report."""
    from brimful.planning.target import autocast_dtype
    from brimful.training.evaluate import Evaluator

    model = task.initial_model().eval()
    with target.hold(model) as ledger:
        result = Evaluator(
            task, model, store, device=target.device, autocast=autocast_dtype(task.precision, target.device),
            limit_bytes=target.limit_bytes, fill=target.fill, max_rows=max_rows, generate_rows=None if answers else 0,
            seed=seed, note=progress, progress=progress,
        ).run(loss=loss)  # fmt: skip
    return {
        "rows": result.rows, "loss": result.loss if loss else None, "perplexity": result.perplexity,
        "tokens": int(result.count), **result.metrics, "seconds": result.seconds, "batches": result.batches,
        "ooms": result.ooms, "peak_bytes": result.peak_bytes if ledger is None else ledger.peak_bytes,
        "forward": result.forward,
    }  # fmt: skip


@contextmanager
def _store_folder() -> Iterator[Path]:
    """For the token store of raw rows, locked while it is in use: so those of killed evaluations can be removed."""
    for left in Path(tempfile.gettempdir()).glob(f"{_FOLDER_PREFIX}*"):
        with suppress(OSError), FileLock(left, folder=True) as lock:
            if lock.supported:
                shutil.rmtree(left, ignore_errors=True)
    with (
        tempfile.TemporaryDirectory(prefix=_FOLDER_PREFIX, ignore_cleanup_errors=True) as path,
        FileLock(Path(path), folder=True),
    ):
        yield Path(path)


@contextmanager
def _writing(path: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise BadOption(
            f"output={str(path)!r} cannot be written ({error.strerror or error}). Try: another file."
        ) from None
