"""`brimful data rejects MODEL DATA`: for each prompt the answer of the data, and beside it one that the model writes itself.

    DATA ─► prompts, each once ─► --rows of them ─► windows of 4,096 ─► length-sorted batches that fit ─► answers.jsonl
                                                                             rows.jsonl ─► OUTPUT ◄─ filter ◄─┘

DPO learns from pairs of a better and a worse answer. The reply of the data is the chosen one. The rejected one is sampled from
the model that is to be trained: what it would say itself is what it has to unlearn.

**The same answers in any batch.** Every prompt has random numbers of its own, from the seed and its tokens
(`generate.OwnNoise`), so neither the memory limit nor `--rows` nor an interruption changes what is drawn. What is left are
scores that differ by rounding in another batch. On a CPU in float32 that changed one of 999 answers (46,000 tokens) of a model
that was hardly trained. bf16 rounds more coarsely, which was not measured, so float32 weights are computed in float32 here.

**Interrupted.** `.OUTPUT.part` beside the output keeps every answer as soon as its batch is done, under a key of data, model
and sampling. Run again, the answers are read from there and the other batches generated, split as before. The filter runs over
all of them at the end of each window, so other thresholds cost no new answers. The output is renamed to its place when it is
complete.

**Which answers are kept.** Each that is dropped is counted under the first reason that holds (`reject_filter.py`). An answer
that reached the token limit before its end is dropped: training would give it an end that the model did not write, in the
middle of a sentence, and the pair would teach where to stop instead of what to say.
"""

import json
import shutil
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass, field
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

from brimful.data.pipeline import PeakMemory, part_folder, writing_to
from brimful.data.read.files import refuse_output_inside
from brimful.data.read.source import BrokenRowLimit, Source, check_max_bad, open_source
from brimful.errors import BadData, BadModel, BadOption, InternalError
from brimful.files import sync, write_atomic
from brimful.planning.plan_options import PlanOptions
from brimful.tasks.generate import GenerateOptions, Generator, max_rows, weights_dtype
from brimful.tasks.model_folder import load_model
from brimful.tasks.reject_filter import Drops, reason_to_drop
from brimful.tasks.reject_prompts import Pair, Prompter, read_pairs
from brimful.units import GiB, is_number, is_whole

if TYPE_CHECKING:
    from brimful.memory.forward import Forward
    from brimful.planning.target import Target

WINDOW_ROWS = 4096
"""Rows that are held and sorted by length at a time."""
PREVIEW_ROWS = 10
FORMAT = 1

_PART_KEY, _ANSWERS, _ROWS = "key.json", "answers.jsonl", "rows.jsonl"


@dataclass(frozen=True, kw_only=True)
class RejectsOptions:
    """How rejected answers are made, and which are kept."""

    rows: int | None = None
    """Prompts to answer, chosen by the seed. Default: all."""
    seed: int = 0
    """Of the choice of prompts and of their answers."""
    temperature: float = 0.8
    top_p: float = 0.95
    max_new_tokens: int = 256
    columns: str | None = None
    """Which columns make up which field. Default: found by name."""
    chat_template: str | None = None
    """`chatml`, `plain` or a Jinja file. Default: the model's own."""
    min_chars: int = 2
    """An answer with fewer characters is dropped."""
    max_similarity: float = 0.8
    """An answer that is more similar to the chosen one (`similarity`) is dropped."""
    max_bad: float = 0.0
    """The share of rows that may be broken."""
    device: str = "auto"
    memory_limit: int | str | None = None
    host_limit: int | str | None = None
    fill: float = 0.85
    overwrite: bool = False
    """Replace an existing output."""

    def __post_init__(self) -> None:
        problems = []
        if self.rows is not None and not is_whole(self.rows, 1):
            problems.append(f"rows={self.rows!r} must be a whole number of at least 1.")
        if not is_whole(self.min_chars, 0):
            problems.append(f"min_chars={self.min_chars!r} must be a whole number of at least 0.")
        if not is_number(self.max_similarity) or not 0 <= self.max_similarity <= 1:
            problems.append(f"max_similarity={self.max_similarity!r} must be between 0 and 1.")
        if problems:
            raise BadOption(" ".join(problems))
        check_max_bad(self.max_bad)
        _ = self.generation, self.plan

    @property
    def generation(self) -> GenerateOptions:
        return GenerateOptions(
            max_new_tokens=self.max_new_tokens, temperature=self.temperature, top_p=self.top_p, seed=self.seed
        )

    @property
    def plan(self) -> PlanOptions:
        """What says where it runs and within which limits."""
        return PlanOptions(
            device=self.device, memory_limit=self.memory_limit, host_limit=self.host_limit, fill=self.fill, seed=self.seed
        )  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class RejectsReport:
    """The result of `make_rejects`. `rows_in` is `rows_out` plus `not_chosen` plus everything in `dropped`."""

    model: str
    data: str
    output: str
    layout_reason: str
    form: str
    """`texts`, or `conversations` if any prompt is more than one question: how the output has prompts and answers."""
    rows_in: int
    rows_out: int
    not_chosen: int
    """Rows beyond `rows`."""
    answers: int
    """Prompts answered, those of an interrupted run included."""
    dropped: dict[str, int]
    """By each of `REASONS`."""
    first_dropped: dict[str, str]
    """By reason, the first row: file, line and what is wrong with it."""
    truncated_prompts: int
    """Prompts of an encoder-decoder that were longer than those of its training and lost their beginning."""
    seconds: float
    answers_per_s: float
    """Without those of an interrupted run, and without loading the model."""
    device: str
    peak_bytes: int | None
    """Of the device; None if it has no statistics or nothing was generated."""
    host_peak_bytes: int
    forward: dict[str, Any] | None
    """Batches, out-of-memory errors and the memory model; None if nothing was generated."""
    resumed_answers: int
    """Answers of an interrupted run."""
    started_over: str
    """Why the answers of an interrupted run could not be used; empty where there were none."""
    options: RejectsOptions
    samples: tuple[dict[str, str], ...]
    """The first ten rows as texts."""

    def to_json(self) -> dict[str, Any]:
        return {**asdict(self), "seconds": round(self.seconds, 3), "answers_per_s": round(self.answers_per_s, 3)}


def make_rejects(
    model: str,
    data: str,
    *,
    output: str | Path,
    options: RejectsOptions | None = None,
    progress: Callable[[str], object] = lambda phrase: None,
) -> RejectsReport:
    """Write pairs of chosen and rejected answers for `brimful train dpo`. After an interruption it continues."""
    from brimful.planning.target import find_target

    options, path, begin_s = options or RejectsOptions(), Path(output).resolve(), time.monotonic()
    _check_output(path, overwrite=options.overwrite)
    source = open_source(
        [data], columns=options.columns, host_limit_bytes=options.plan.host_limit_bytes or GiB, messages=True
    )
    if source.layout.kind == "text":
        raise BadData(
            f"{data} has whole texts and no prompts. Try: rows with a prompt and a response, or conversations."
        )
    refuse_output_inside(path, source.paths)
    if any(Path(file).resolve() == path for file in source.files):
        raise BadOption(f"output='{path}' is a file of the data. Try: another file.")
    prompter = Prompter(model, options.chat_template)
    target = find_target(options.plan)
    drops = Drops()
    survey = _Survey.of(source, drops, options)
    if not survey.pairs:
        raise BadData(
            f"{data}: none of {survey.rows_in:,} rows has a prompt and a reply ({drops.in_words()}). Try: `brimful data check`."
        )
    with writing_to(path), PeakMemory() as host, part_folder(path, progress=_ANSWERS) as part, ExitStack() as stack:
        key = {
            "format": [FORMAT, WINDOW_ROWS], "data": source.fingerprint(), "model": prompter.key, "rows": options.rows,
            "sampling": asdict(options.generation),
        }  # fmt: skip
        journal = stack.enter_context(_Journal.open(part, key))
        if journal.resumed:
            progress(f"continuing after {journal.resumed:,} answers of an interrupted run")
        elif journal.started_over:
            progress(f"starting over, because an interrupted run cannot be continued: {journal.started_over}")
        answerer = _Answerer(prompter, target, options.generation, stack, progress)
        job = _Job(source, survey, journal, answerer, drops, options, progress)
        try:
            job.run(part / _ROWS)
        except _SilentModel:
            shutil.rmtree(part, ignore_errors=True)
            raise BadModel(
                f"{model} has learnt to be silent: all of its {job.answers:,} answers are empty. "
                "Try: a model that `brimful train sft` has trained on replies."
            ) from None
        if not job.rows_out:
            raise BadData(f"{data}: no row is left of {survey.rows_in:,} ({drops.in_words()}). Try: {drops.advice()}.")
        if survey.rows_in != job.rows_out + survey.not_chosen + drops.total:
            raise InternalError(f"rows do not add up: {survey}, {job.rows_out} written, {drops.counts} dropped")
        sync(part / _ROWS)
        _check_output(path, overwrite=options.overwrite)
        (part / _ROWS).replace(path)
        sync(path.parent)
        shutil.rmtree(part, ignore_errors=True)
    return RejectsReport(
        model=model, data=data, output=str(path), layout_reason=source.layout.reason, form=survey.form, rows_in=survey.rows_in,
        rows_out=job.rows_out, not_chosen=survey.not_chosen, answers=job.answers, dropped=drops.counts, first_dropped=drops.first,
        truncated_prompts=job.truncated, seconds=time.monotonic() - begin_s, answers_per_s=job.rate, device=str(target.device),
        peak_bytes=answerer.peak_bytes, host_peak_bytes=host.bytes, forward=None if answerer.forward is None else answerer.forward.to_json(),
        resumed_answers=journal.resumed, started_over=journal.started_over, options=options, samples=tuple(job.samples),
    )  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class _Survey:
    """What a first pass over the data tells."""

    rows_in: int
    pairs: int
    """Rows that can be answered."""
    chosen: Sequence[int]
    """Their numbers, ascending: those that will be."""
    form: str

    @classmethod
    def of(cls, source: Source, drops: Drops, options: RejectsOptions) -> "_Survey":
        from brimful.training.evaluate import choose

        bad_rows, pairs, texts = BrokenRowLimit(options.max_bad), 0, True
        for pair in read_pairs(source, drops, bad_rows):
            pairs += 1
            texts = texts and pair.is_question
        chosen = choose(pairs, options.rows, options.seed)
        return cls(rows_in=bad_rows.rows_in, pairs=pairs, chosen=chosen, form="texts" if texts else "conversations")

    @property
    def not_chosen(self) -> int:
        return self.pairs - len(self.chosen)


# ── Answers, kept as they are made ────────────────────────────────────────────────────────────────────────────────────


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """What came of one prompt; a line of `answers.jsonl`."""

    row: int
    text: str = ""
    finished: bool = False
    """Whether it ended before the token limit."""
    truncated: bool = False
    """Whether the prompt was."""
    refused: str = ""
    """The reason why the prompt was not answered."""
    message: str = ""


@dataclass(kw_only=True)
class _Journal:
    """All answers so far, in a file that only grows. Those of one window come before those of the next."""

    path: Path
    resumed: int = 0
    """Lines of an interrupted run."""
    started_over: str = ""
    _file: Any = None
    _ahead: Answer | None = None

    @classmethod
    @contextmanager
    def open(cls, part: Path, key: Mapping[str, Any]) -> "Iterator[_Journal]":
        """The journal in this folder if it has the same key, else an empty one. What was half written is removed."""
        path, own_key = part / _ANSWERS, json.loads(json.dumps(key))  # as it is read back
        journal = cls(path=path)
        if path.exists():
            journal.started_over = _difference(part / _PART_KEY, own_key)
            if journal.started_over:
                path.unlink()
        write_atomic(part / _PART_KEY, json.dumps(own_key))
        with path.open("a+b") as journal._file:
            journal._cut()
            yield journal

    def below(self, end: int) -> dict[int, Answer]:
        """The answers of the interrupted run to rows before this one, without those returned already."""
        found = {}
        while self._ahead is not None and self._ahead.row < end:
            found[self._ahead.row] = self._ahead
            self._ahead = self._next()
        return found

    def add(self, answers: Sequence[Answer]) -> None:
        default = asdict(Answer(row=-1))
        lines = [{name: value for name, value in asdict(one).items() if value != default[name]} for one in answers]
        self._file.write("".join(json.dumps(line, ensure_ascii=False) + "\n" for line in lines).encode())
        self._file.flush()

    def _cut(self) -> None:
        """Keep the lines before the first that is not whole, and go back to the first."""
        self._file.seek(0)
        end = 0
        while self._next() is not None:
            self.resumed += 1
            end = self._file.tell()
        self._file.truncate(end)
        self._file.seek(0)
        self._ahead = self._next()

    def _next(self) -> Answer | None:
        line = self._file.readline()
        try:
            return Answer(**json.loads(line)) if line.endswith(b"\n") else None
        except (ValueError, TypeError):
            return None


def _difference(file: Path, key: dict[str, Any]) -> str:
    """Why answers under the key in this file cannot be used; empty if they can."""
    try:
        earlier = json.loads(file.read_bytes())
        changed = [name for name in key if earlier.get(name) != key[name]]
    except (OSError, ValueError, AttributeError):
        return f"its {file.name} cannot be read"
    return f"it had another {' and '.join(changed)}" if changed else ""


class _Answerer:
    """The model, loaded when the first answer is needed: an interrupted run may have had them all."""

    def __init__(
        self, prompter: Prompter, target: "Target", options: GenerateOptions, stack: ExitStack, progress: Callable[[str], object]
    ) -> None:  # fmt: skip
        self.forward: Forward | None = None
        self._prompter, self._target, self._options = prompter, target, options
        self._stack, self._progress = stack, progress
        self._generator: Generator | None = None
        self._ledger: Any = None

    @property
    def peak_bytes(self) -> int | None:
        if self._ledger is not None:
            return int(self._ledger.peak_bytes)
        return None if self.forward is None else self.forward.peak_bytes

    def prepare(self) -> None:
        """Load the model, unless it is there."""
        if self._generator is not None:
            return
        import torch

        from brimful.memory.context import forward_context
        from brimful.memory.forward import Forward
        from brimful.planning.target import autocast_dtype

        prompter, target = self._prompter, self._target
        self._progress(f"loading {prompter.folder}")
        dtype = weights_dtype(prompter.config, target.device)
        model = load_model(prompter.folder, dtype=dtype)
        self._ledger = self._stack.enter_context(target.hold(model))
        autocast = None if dtype in (None, torch.float32) else autocast_dtype("auto", target.device)
        self._generator = Generator(
            model, prompter.tokenizer, self._options, device=target.device, end_ids=prompter.end_ids,
            autocast=lambda: forward_context(target.device, autocast),
        )  # fmt: skip
        self.forward = Forward(
            self._generator.dummy, model, target.device, what="generation", limit_bytes=target.limit_bytes, fill=target.fill,
            max_rows=max_rows(target.device), fewest_batches=True, note=self._progress,
        )  # fmt: skip

    def answers(self, pairs: Sequence[Pair], known: Collection[int]) -> Iterator[list[Answer]]:
        """Batch by batch, first those that are not asked at all; without those whose numbers are in `known`."""
        from brimful.tasks.chat_template import RowError

        self.prepare()
        assert self._generator is not None and self.forward is not None
        generator, asked, prompts, refused = (
            self._generator,
            list[tuple[Pair, bool]](),
            list[list[int]](),
            list[Answer](),
        )
        for pair in pairs:
            try:
                tokens, truncated = self._prompter.tokens(pair)
            except RowError as error:
                refused.append(Answer(row=pair.number, refused="refused", message=str(error)))
                continue
            if not generator.room(tokens):
                message = f"its prompt has {len(tokens):,} tokens and the model's context {generator.context_tokens:,}"
                refused.append(Answer(row=pair.number, refused="prompt_too_long", message=message))
                continue
            asked.append((pair, truncated))
            prompts.append(tokens)
        if new := [one for one in refused if one.row not in known]:
            yield new

        def name(place: int) -> str:
            return f"the prompt of {asked[place][0].file}, line {asked[place][0].line}"

        answered = [place for place, (pair, _) in enumerate(asked) if pair.number in known]
        for places, batch in generator.answer_batches(prompts, self.forward, answered=answered, name=name):
            yield [
                Answer(
                    row=asked[place][0].number, text=generator.tokenizer.decode(ids).strip(), truncated=asked[place][1],
                    finished=len(ids) < generator.room(prompts[place]),
                )
                for place, ids in zip(places, batch, strict=True)
                if asked[place][0].number not in known
            ]  # fmt: skip


class _SilentModel(Exception):
    """All answers are empty."""


@dataclass
class _Job:
    """One run: window by window, the answers that are there, those that are missing, and what of them goes to the output."""

    source: Source
    survey: _Survey
    journal: _Journal
    answerer: _Answerer
    drops: Drops
    options: RejectsOptions
    progress: Callable[[str], object]
    rows_out: int = 0
    answers: int = 0
    truncated: int = 0
    samples: list[dict[str, str]] = field(default_factory=list)
    _spoke: bool = False
    _done: int = 0
    _new: int = 0
    _new_s: float = 0.0

    @property
    def asked(self) -> int:
        return len(self.survey.chosen)

    @property
    def rate(self) -> float:
        """New answers per second."""
        return self._new / self._new_s if self._new_s else 0.0

    def run(self, file: Path) -> None:
        with file.open("w", encoding="utf-8") as rows:
            for window in self._windows():
                for pair, answer in self._answered(window):
                    if (rejected := self._kept(pair, answer)) is not None:
                        rows.write(json.dumps(pair.output(rejected, self.survey.form), ensure_ascii=False) + "\n")
                        self.rows_out += 1
                if self.answers and not self._spoke:
                    raise _SilentModel

    def _windows(self) -> Iterator[list[Pair]]:
        """The chosen rows of a second pass, which drops the same ones as the first."""
        chosen = iter(self.survey.chosen)
        wanted = next(chosen, None)

        def matching() -> Iterator[Pair]:
            nonlocal wanted
            for pair in read_pairs(self.source, Drops(), BrokenRowLimit(self.options.max_bad)):
                if pair.number == wanted:
                    yield pair
                    wanted = next(chosen, None)

        pairs = matching()
        while window := list(islice(pairs, WINDOW_ROWS)):
            yield window

    def _answered(self, window: list[Pair]) -> list[tuple[Pair, Answer]]:
        answers = self.journal.below(window[-1].number + 1)
        self._done += len(answers)
        if len(answers) < len(window):
            self.answerer.prepare()
            begin_s, before_s = time.monotonic(), self._new_s
            for batch in self.answerer.answers(window, frozenset(answers)):
                self.journal.add(batch)
                answers.update((one.row, one) for one in batch)
                self._done += len(batch)
                self._new += sum(not one.refused for one in batch)
                self._new_s = before_s + time.monotonic() - begin_s
                self.progress(f"answered {self._done:,} of {self.asked:,} prompts, {self.rate:,.1f}/s")
        return [(pair, answers[pair.number]) for pair in window]

    def _kept(self, pair: Pair, answer: Answer) -> str | None:
        """The rejected answer, or None if it was dropped."""
        if answer.refused:
            self.drops.add(answer.refused, pair.problem(answer.message))
            return None
        self.answers += 1
        self.truncated += answer.truncated
        self._spoke = self._spoke or bool(answer.text)
        prompt, chosen = pair.prompt_text, pair.chosen["content"]
        drop = reason_to_drop(
            prompt, chosen, answer.text, finished=answer.finished, min_chars=self.options.min_chars,
            max_similarity=self.options.max_similarity,
        )  # fmt: skip
        if drop is not None:
            self.drops.add(drop[0], pair.problem(drop[1]))
            return None
        if len(self.samples) < PREVIEW_ROWS:
            self.samples.append({"prompt": prompt, "chosen": chosen, "rejected": answer.text})
        return answer.text


# ── The output ────────────────────────────────────────────────────────────────────────────────────────────────────────


def _check_output(path: Path, *, overwrite: bool) -> None:
    if path.suffix != ".jsonl":
        raise BadOption(f"output='{path}' must end in .jsonl. Try: output='{path.with_suffix('.jsonl')}'.")
    if path.is_dir():
        raise BadOption(f"output='{path}' is a folder. Try: the name of a file.")
    if path.exists() and not overwrite:
        raise BadOption(f"output='{path}' is an existing file. Try: another file, or overwrite=True.")
