"""`brimful eval MODEL DATA`: loss, perplexity, BLEU-4 and chrF over a fixed set of rows, within its own memory."""

import json as json_module
import os
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from cyclopts import Parameter

from brimful.cli.flags import progress, show
from brimful.errors import BadOption, DoesNotFit
from brimful.units import show_bytes

if TYPE_CHECKING:
    from brimful.planning.target import Target
    from brimful.tasks.chat_scores import Answer, Examination

FIGURES = ("loss", "bleu", "chrf")
SAMPLES = 8
"""Answers that the report holds."""


def evaluate(
    model: str,
    data: str,
    /,
    *,
    rows: Literal["all"] | int = 1000,
    seed: int = 0,
    metrics: str = ",".join(FIGURES),
    max_new_tokens: int | None = None,
    beams: int = 1,
    columns: str | None = None,
    max_tokens: str | None = None,
    output: Path | None = None,
    device: str = "auto",
    memory_limit: str | None = None,
    host_limit: str | None = None,
    fill: float = 0.85,
    json: Annotated[bool, Parameter(negative="")] = False,
) -> None:
    """Measure a chat model: loss, perplexity, BLEU-4 and chrF over all rows of a fixed set.

    Batches are of alike lengths and fit a memory model of their own; where memory runs out all the same, they become
    smaller, and the figures stay the same.

    Parameters
    ----------
    model
        A folder that save_pretrained wrote, a run of `brimful train` (its best model) or one of its checkpoints.
    data
        Raw rows (parquet, jsonl, json, csv …), tokenised on the fly, or a token store of the model's own tokenizer.
    rows
        Measure on so many rows, chosen by the seed; or all.
    seed
        Of that choice.
    metrics
        What to measure, with commas between: loss (and perplexity), bleu, chrf.
    max_new_tokens
        Tokens of an answer at most; as many as the longest reference has unless given.
    beams
        Sequences followed at once while answering; 1 is greedy.
    columns
        Which column of raw rows is what, such as prompt=question,response=answer; found by name unless given.
    max_tokens
        Cut longer sides of raw rows to so many tokens: one number, or one for each side, such as 256,320; where the model's
        run cut them, or at 256, unless given.
    output
        A .jsonl file for all answers: row, prompt, response, reference.
    device
        cpu, cuda, cuda:1, mps or xpu; the first accelerator unless given.
    memory_limit
        Cap on memory, such as 20GiB: a card's reserved bytes, or a virtual limit on the CPU.
    host_limit
        Cap on host RAM, such as 16GiB.
    fill
        The share of the limit to use.
    json
        Print one JSON object.
    """
    figures = _figures(metrics)
    if isinstance(rows, int) and rows < 1:
        raise BadOption(f"--rows {rows}: give a whole number of at least 1, or all")
    if "PYTORCH_CUDA_ALLOC_CONF" not in os.environ:
        os.environ.setdefault("PYTORCH_ALLOC_CONF", "expandable_segments:True")
    from brimful.planning.target import PlanOptions, find_target
    from brimful.report.tables import eval_table
    from brimful.tasks.chat_scores import Examination
    from brimful.tasks.generate import GenerateOptions
    from brimful.tasks.model_folder import resolve

    options = GenerateOptions(beams=beams, **({} if max_new_tokens is None else {"max_new_tokens": max_new_tokens}))
    fitting = PlanOptions(device=device, memory_limit=memory_limit, host_limit=host_limit, fill=fill, seed=seed)
    with ExitStack() as stack:
        write = stack.enter_context(_answers_file(output))
        say = stack.enter_context(progress("eval", every_s=5))
        task = Examination(
            resolve(model), metrics=[name for name in figures if name != "loss"], options=options,
            answers_as_long_as_references=max_new_tokens is None, columns=columns, max_tokens=max_tokens,
        )  # fmt: skip
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="brimful-eval-")))
        store = task.rows(task.prepare(data, folder, say, name="eval"))
        target = find_target(fitting)
        most = None if rows == "all" else rows
        found = _run(task, store, target, memory_limit, most, seed, figures, answers=bool(output), say=say)
        write(task.answers)
    report = {
        "model": str(task.source), "data": data, "device": str(target.device), "device_name": target.name, "seed": seed,
        "rows_available": len(store), "limit_bytes": target.limit_bytes, "limit_reason": target.limit_reason,
        "output": None if output is None else str(output), **found, **task.facts(),
        "samples": [one.to_json() for one in task.answers[:SAMPLES]],
    }  # fmt: skip
    show(eval_table(report), report, as_json=json)


def _figures(text: str) -> list[str]:
    asked = [name.strip() for name in text.split(",") if name.strip()]
    unknown = [name for name in asked if name not in FIGURES]
    if unknown or not asked:
        raise BadOption(f"--metrics {text}: give some of {', '.join(FIGURES)}, with commas between")
    return asked


def _run(
    task: "Examination", store: Any, target: "Target", memory_limit: str | None, rows: int | None, seed: int,
    figures: Sequence[str], *, answers: bool, say: Callable[[str], None],
) -> dict[str, Any]:  # fmt: skip
    """The evaluation under its limit, as the figures of the report."""
    from brimful.planning.target import autocast_dtype
    from brimful.training.evaluate import Evaluator

    with target.capped(), _model(task, target, virtual=memory_limit is not None) as (model, ledger):
        evaluator = Evaluator(
            task, model, store, device=target.device, autocast=autocast_dtype(task.precision, target.device),
            limit_bytes=target.limit_bytes, fill=target.fill, max_rows=rows,
            generate_rows=None if answers or set(figures) - {"loss"} else 0, seed=seed, tell=say, progress=say,
        )  # fmt: skip
        found = evaluator.run(loss="loss" in figures)
    loss = found.loss if "loss" in figures else None
    return {
        "rows": found.rows, "loss": loss, "perplexity": found.perplexity, "tokens": int(found.count), **found.metrics,
        "seconds": found.seconds, "batches": found.batches, "ooms": found.ooms,
        "peak_bytes": found.peak_bytes if ledger is None else ledger.peak_bytes, "forward": found.forward,
    }  # fmt: skip


@contextmanager
def _model(task: "Examination", target: "Target", *, virtual: bool) -> Iterator[tuple[Any, Any]]:
    """The model on its device, and on the CPU the ledger that keeps the virtual limit."""
    from brimful.memory.ledger import simulated_memory
    from brimful.memory.oom import is_oom

    try:
        model = task.initial_model().to(target.device).eval()
        if not (virtual and target.device.type == "cpu"):
            ledger = None
        else:
            ledger = simulated_memory(target.limit_bytes)
            ledger.adopt([*model.parameters(), *model.buffers()])
    except Exception as error:
        if not is_oom(error):
            raise
        raise DoesNotFit(
            f"the model alone does not fit {target.name}: {show_bytes(target.limit_bytes)} are allowed ({target.limit_reason}); "
            "raise --memory-limit, or choose another --device",
            needed_bytes=target.limit_bytes,
        ) from None
    with ExitStack() as stack:
        if ledger is not None:
            stack.enter_context(ledger)
        yield model, ledger


@contextmanager
def _answers_file(path: Path | None) -> Iterator[Callable[[Sequence["Answer"]], None]]:
    """Opened before the work and renamed when it is whole: a folder that cannot be written is told at once."""
    if path is None:
        yield lambda answers: None
        return
    part = path.with_name(f".{path.name}.{os.getpid()}.part")
    try:
        with part.open("w", encoding="utf-8") as file:
            yield lambda answers: file.writelines(
                json_module.dumps(one.to_json(), ensure_ascii=False) + "\n" for one in answers
            )
        part.replace(path)
    except OSError as error:
        raise BadOption(f"--output {path}: {error.strerror or error}; name another file") from None
    finally:
        part.unlink(missing_ok=True)
