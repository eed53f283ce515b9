"""The thread that owns a model and answers prompts: continuous batching within a memory budget.

    submit ─► waiting ─► admit: prefill, join ─► one token for every row ─► rows that ended leave ─┐
                 ▲              ▲                                                                  │
                 │              └──────────────────────────────────────────────────────────────────┘
                 └── out of memory: the cache is dropped, at most half the rows are admitted again, the others wait

Requests join between two tokens and leave as soon as they end, so nobody waits for the longest answer of a batch. A token of the
demo's model takes 0.75 ms of CPU time for one row and 2.6 ms for 64.

After an out-of-memory error no request is lost: its prompt and the tokens it has are prefilled again, and its random numbers are
drawn again up to there. The limit on rows doubles after 64 tokens without an error. Only a request that does not fit alone fails.

All of torch's work is done on this one thread, also because a simulated memory limit counts one thread only.
"""

import atexit
import logging
import math
import threading
import time
from collections import deque
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial

import psutil
import torch

from brimful.errors import BadOption, BrimfulError, DoesNotFit, InternalError, ServerBusy, in_one_line
from brimful.memory.forward import eval_mode
from brimful.memory.ledger import Ledger
from brimful.memory.meter import allocated_bytes, has_peak_statistics
from brimful.memory.oom import OutOfMemory, attempt
from brimful.planning.target import Target
from brimful.serving.admission import Admission, BatchSize
from brimful.serving.answer import Answer, Prompt
from brimful.serving.batch import Batch, RowTokens, joinable, prefill
from brimful.serving.sampling import Sampling, choose
from brimful.task import Shape
from brimful.tasks.generate import Generator, max_rows
from brimful.tasks.model_folder import text_config
from brimful.units import show_bytes

PREFILL_TOKENS = {"cpu": 1024}
OTHER_PREFILL_TOKENS = 16384
"""Prompt tokens that are prefilled at once while other answers wait for their next token; one prompt may be longer."""
CLEAN_TOKENS = 64
"""Tokens without an out-of-memory error after which the limit on rows doubles."""
FAILURES = 3
"""Batches in a row that may fail for another reason than memory. A lost CUDA context fails them all."""
RATE_S = 5.0
"""Seconds over which tokens per second are averaged."""
DEFAULT_CONTEXT = 2048
"""Prompt tokens of a model whose configuration has no limit, as that of T5."""
FIRST_TOKEN_S = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0)
"""Upper bounds of the histogram of the time to the first token."""

log = logging.getLogger("brimful")


@dataclass(frozen=True, kw_only=True)
class EngineOptions:
    """How many requests are answered at once, and how many wait."""

    max_batch: int | None = None
    """Requests that are answered at once at most. Default: what fits, up to 64 on a CPU and 512 elsewhere."""
    max_queue: int = 256
    """Requests that wait at most."""
    max_wait_s: float = 60.0
    """Seconds that a request waits at most before it begins."""
    context: int | None = None
    """Tokens of prompt and answer at most. Default: the model's."""

    def __post_init__(self) -> None:
        problems = [
            f"{name}={value} must be at least {least}."
            for name, value, least in (
                ("max_batch", self.max_batch, 1), ("max_queue", self.max_queue, 1), ("context", self.context, 2)
            )
            if value is not None and value < least
        ]  # fmt: skip
        if not self.max_wait_s > 0:
            problems.append(f"max_wait={self.max_wait_s:g} must be positive.")
        if problems:
            raise BadOption(" ".join(problems))


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineState:
    """What the engine does now, for `/status` and `/metrics`."""

    running: int
    queued: int
    tokens_per_second: float
    used_bytes: int
    predicted_bytes: int
    peak_bytes: int | None
    """The most that was in use since the start, where that is measured: on a GPU, and under a limit on the CPU."""
    limit_bytes: int | None
    ooms: int
    prompt_tokens: int
    answer_tokens: int
    answered: int
    first_tokens: tuple[int, ...]
    """How many first tokens came within each bound of `FIRST_TOKEN_S`, and in all."""
    first_token_s: float
    """The sum of those times."""


@dataclass(slots=True, eq=False)
class _Row:
    """A request within the engine."""

    answer: Answer
    sampling: Sampling
    began: bool = False
    """Whether it was admitted; after an out-of-memory error it waits again."""
    ooms_alone: int = 0

    @property
    def tokens(self) -> RowTokens:
        return RowTokens(self.answer.prompt.tokens, self.answer.tokens)


@dataclass(slots=True)
class _Counts:
    ooms: int = 0
    prompt_tokens: int = 0
    answer_tokens: int = 0
    answered: int = 0
    first_tokens: list[int] = field(default_factory=lambda: [0] * (len(FIRST_TOKEN_S) + 1))
    first_token_s: float = 0.0


class Engine:
    """Answers prompts of a model, several at once. `start` probes and returns once it is ready; `close` ends it.

    Without a target, requests are answered one at a time and no memory is predicted: for a single user.
    """

    def __init__(
        self,
        generator: Generator,
        target: Target | None = None,
        options: EngineOptions | None = None,
        *,
        note: Callable[[str], object] = log.warning,
    ) -> None:
        self.generator, self.target = generator, target
        self.options = EngineOptions() if options is None else options
        self.choices: dict[str, tuple[str, str]] = {}
        """What was chosen, as a value and its reason, once it has started."""
        self.context_tokens = self._context()
        self._note = note
        self._admission: Admission | None = None
        self._max_rows = self._row_limit = 1
        self._clean_tokens = self._failures = 0
        self._waiting: deque[_Row] = deque()
        self._running: list[_Row] = []
        self._batch: Batch | None = None
        self._next_tokens: torch.Tensor | None = None
        self._attempted: list[_Row] = []
        """Rows of the round that is running."""
        self._predicted = self._highest_predicted = 0.0
        self._idle_bytes = 0
        self._limit_bytes = None if target is None else target.limit_bytes
        self._ledger: Ledger | None = None
        self._peak_bytes: int | None = None
        self._counts = _Counts()
        self._recent: deque[tuple[float, int]] = deque()
        self._ends: deque[float] = deque(maxlen=64)
        self._changed = threading.Condition()
        self._stopping: ServerBusy | None = None
        self._failed: BrimfulError | None = None
        self._ready = threading.Event()
        self._thread = threading.Thread(target=self._main, name="brimful-engine", daemon=True)

    # For other threads.

    def start(self) -> "Engine":
        atexit.register(self.close)  # a thread that is cut off within torch when Python ends aborts the process
        self._thread.start()
        self._ready.wait()
        if self._failed is not None:
            raise self._failed
        return self

    def submit(self, prompt: Prompt, notify: Callable[[], object] = lambda: None) -> Answer:
        """Queue a prompt. Raises `ServerBusy` if the queue is full, and `BadOption` if the prompt is too long."""
        room = self.room(len(prompt.tokens))
        if not prompt.tokens or room < 1:
            raise BadOption(
                f"the prompt has {len(prompt.tokens):,} tokens and must have 1 to {self.longest_prompt:,}. "
                "Try: a shorter prompt."
            )
        answer = Answer(prompt, self.generator.tokenizer.decode, notify)
        start = () if self.generator.start_id is None else (self.generator.start_id,)
        row = _Row(answer, Sampling.of(prompt, self.generator.device, start))
        with self._changed:
            if self._stopping is not None:
                raise self._stopping
            if self._failed is not None:
                raise self._failed
            if len(self._waiting) >= self.options.max_queue:
                raise ServerBusy(
                    f"{len(self._waiting):,} requests wait already, and no more may. Try: again in "
                    f"{self.retry_after_s()} s.",
                    retry_after_s=self.retry_after_s(),
                )
            self._waiting.append(row)
            self._changed.notify_all()
        return answer

    def cancel(self, answer: Answer) -> None:
        """Stop an answer that nobody waits for. Its row is free before the next token."""
        answer.cancel()
        with self._changed:
            self._changed.notify_all()

    def room(self, prompt_tokens: int) -> int:
        """Tokens that an answer to a prompt of this length may have."""
        if not self.generator.causal:
            return self.context_tokens if prompt_tokens <= self.context_tokens else 0
        return max(0, self.context_tokens - prompt_tokens)

    @property
    def longest_prompt(self) -> int:
        return self.context_tokens - 1 if self.generator.causal else self.context_tokens

    @property
    def vocabulary(self) -> int:
        """Tokens that the model knows."""
        return int(text_config(self.generator.model.config).vocab_size)

    @property
    def failed(self) -> BrimfulError | None:
        """Why the engine ended by itself."""
        return self._failed

    def retry_after_s(self) -> int:
        """When a place may be free: the time in which as many requests as wait were answered lately, up to the longest wait."""
        ends = list(self._ends)
        each_s = (ends[-1] - ends[0]) / (len(ends) - 1) if len(ends) > 1 else 1.0
        return max(1, min(math.ceil(self.options.max_wait_s), math.ceil(each_s * len(self._waiting))))

    def state(self) -> EngineState:
        now, counts = time.monotonic(), self._counts
        recent = [(at, tokens) for at, tokens in list(self._recent) if now - at <= RATE_S]
        span = now - min((at for at, _ in recent), default=now)
        return EngineState(
            running=len(self._running),
            queued=len(self._waiting),
            tokens_per_second=sum(tokens for _, tokens in recent) / max(span, 0.5) if recent else 0.0,
            used_bytes=self._used_bytes(),
            predicted_bytes=round(self._idle_bytes + (self._predicted if self._running else 0)),
            peak_bytes=self._peak_bytes if self._ledger is None else self._ledger.peak_bytes,
            limit_bytes=self._limit_bytes,
            ooms=counts.ooms,
            prompt_tokens=counts.prompt_tokens,
            answer_tokens=counts.answer_tokens,
            answered=counts.answered,
            first_tokens=tuple(counts.first_tokens),
            first_token_s=counts.first_token_s,
        )

    def _used_bytes(self) -> int:
        """Allocated on the device, or where nothing counts tensors the memory of the process."""
        allocated = allocated_bytes(self.generator.device)
        return psutil.Process().memory_info().rss if allocated is None else allocated

    def drain(self) -> None:
        """Take no more requests. Those that wait or run are answered."""
        self._stop(ServerBusy("the server is shutting down. Try: again in a minute.", retry_after_s=60))

    def close(self) -> None:
        """End: whatever is still unanswered fails."""
        atexit.unregister(self.close)
        self.drain()
        for row in [*self._waiting, *self._running]:
            row.answer.cancel()
        with self._changed:
            self._changed.notify_all()
        if self._thread.is_alive() and self._thread is not threading.current_thread():
            self._thread.join()

    @property
    def idle(self) -> bool:
        return not self._waiting and not self._running

    # The engine's thread.

    def _stop(self, reason: ServerBusy) -> None:
        with self._changed:
            self._stopping = self._stopping or reason
            self._changed.notify_all()

    def _context(self) -> int:
        own = self.generator.context_tokens
        if self.options.context is not None:
            if own is not None and self.options.context > own:
                raise BadOption(f"context={self.options.context} is more than the model's {own:,}. Try: context={own}.")
            return self.options.context
        return DEFAULT_CONTEXT if own is None else own

    def _main(self) -> None:
        device, model = self.generator.device, self.generator.model
        try:
            with ExitStack() as stack:
                if self.target is not None:
                    self._ledger = stack.enter_context(self.target.hold(model))
                stack.enter_context(eval_mode(model, device))
                # One context for all tokens: autocast keeps the weights that it has converted until its end.
                stack.enter_context(self.generator.autocast())
                self._prepare()
                self._ready.set()
                while self._serve_once():
                    pass
        except BaseException as error:
            self._failed = error if isinstance(error, BrimfulError) else InternalError(in_one_line(error))
            if not isinstance(error, BrimfulError):
                log.exception("the engine failed")
        finally:
            with self._changed:
                left = [*self._running, *self._waiting]
                self._running, self._batch = [], None
                self._waiting.clear()
            for row in left:
                row.answer.fail(self._failed or self._stopping or InternalError("the engine has ended"))
            self._ready.set()

    def _prepare(self) -> None:
        """Find out what can be batched, and what a batch costs."""
        if self.target is None:
            self.choices["batch"] = ("1", "one request at a time")
            return
        possible, reason = joinable(self.generator)
        most = max_rows(self.generator.device)
        if self.options.max_batch is not None:
            most, reason = min(most, self.options.max_batch) if possible else 1, f"as requested, and {reason}"
        self._max_rows = self._row_limit = most if possible else 1
        if possible:
            self.choices["batch"] = (f"up to {self._max_rows} requests at once", reason)
        else:
            self.choices["batch"] = ("one request at a time", reason)
        self._admission = Admission(self.generator, self.target, self.context_tokens, self._note)
        self._admission.fit()
        self._idle_bytes = self._used_bytes()
        budget, reason = self._admission.budget(0)
        self.choices["memory"] = (f"{show_bytes(budget)} for requests", reason)
        if (
            not self.target.requested and self.generator.device.type == "cpu"
        ):  # the rest of the host is not for requests
            self._limit_bytes = self._idle_bytes + budget

    def _serve_once(self) -> bool:
        """One round: who leaves, who joins, one token for everyone. Returns whether there is a next one."""
        with self._changed:
            if not self._waiting and not self._running:
                if self._stopping is not None:
                    return False
                self._changed.wait()
                return True
        self._refuse_late()
        try:
            outcome = attempt(self._round, self.generator.device, self._forget_batch, thorough=False)
        except Exception as error:
            self._fail_round(error)
            return True
        self._failures = 0
        if isinstance(outcome, OutOfMemory):
            self._recover(outcome)
        return True

    def _fail_round(self, error: Exception) -> None:
        """Something else than memory: those who were in it fail, and the others go on, unless it happens again and again."""
        self._failures += 1
        if self._failures >= FAILURES:
            raise error
        log.error("the engine failed in a batch", exc_info=error)
        self._forget_batch()
        failed = self._attempted
        with self._changed:
            self._running = []
            for row in failed:
                if row in self._waiting:
                    self._waiting.remove(row)
        for row in failed:
            if not row.answer.done:
                row.answer.fail(InternalError(in_one_line(error)))

    def _round(self) -> None:
        self._attempted = self._running
        self._drop_cancelled()
        self._admit()
        if self._running:
            self._step()

    def _drop_cancelled(self) -> None:
        with self._changed:
            for row in [row for row in self._waiting if row.answer.cancelled]:
                self._waiting.remove(row)
                row.answer.fail(self._stopping or ServerBusy("the request was cancelled.", retry_after_s=1))
        self._leave([row for row in self._running if not row.answer.cancelled])

    def _refuse_late(self) -> None:
        """Those who have waited too long get an answer that says so."""
        now = time.monotonic()
        with self._changed:
            late = [
                row for row in self._waiting if not row.began and now - row.answer.submitted_s > self.options.max_wait_s
            ]
            for row in late:
                self._waiting.remove(row)
        for row in late:
            seconds = self.retry_after_s()
            row.answer.fail(
                ServerBusy(
                    f"the request waited {self.options.max_wait_s:g} s without a place. Try: again in {seconds} s.",
                    retry_after_s=seconds,
                )
            )

    def _admit(self) -> None:
        """Prefill those that wait, in order, as long as they fit with those that run."""
        chosen = self._choose_next()
        if not chosen:
            return
        self._attempted = [*self._running, *chosen]
        batch, scores = prefill(self.generator, [row.tokens for row in chosen])
        tokens = self._chosen_tokens(scores, chosen)
        if self._batch is None:
            self._batch, self._next_tokens = batch, tokens
        else:
            assert self._next_tokens is not None
            self._batch.join(batch)
            self._next_tokens = torch.cat([self._next_tokens, tokens])
        with self._changed:
            for row in chosen:
                self._waiting.remove(row)
                self._counts.prompt_tokens += 0 if row.began else len(row.answer.prompt.tokens)
                row.began = True
            self._running = [*self._running, *chosen]
        self._add_tokens(tokens, chosen)

    def _choose_next(self) -> list[_Row]:
        chosen: list[_Row] = []
        most_tokens = PREFILL_TOKENS.get(self.generator.device.type, OTHER_PREFILL_TOKENS)
        held = 0 if self._batch is None else self._batch.cache_bytes
        size = BatchSize(held_bytes=held)
        for row in self._running:
            size = size.with_row(self._final_shape(row))
        budget: int | None = None
        for row in list(self._waiting):
            if len(self._running) + len(chosen) >= self._row_limit:
                break
            prefilled = self._prefill_shape(row)
            if chosen and most_tokens < sum(prefilled):
                break
            trial = size.with_row(self._final_shape(row), prefilled)
            if self._admission is not None:
                budget = self._admission.budget(held)[0] if budget is None else budget
                needed = self._admission.needed_bytes(trial)
                if needed > budget:
                    if self._running or chosen:
                        break
                    self._refuse(row, needed, budget)
                    continue
                self._predict(needed)
            size, most_tokens = trial, most_tokens - sum(prefilled)
            chosen.append(row)
        return chosen

    def _predict(self, needed: float) -> None:
        self._predicted, self._highest_predicted = needed, max(needed, self._highest_predicted)

    def _prefill_shape(self, row: _Row) -> Shape:
        source, answer = len(row.answer.prompt.tokens), len(row.answer.tokens)
        return (source + answer,) if self.generator.causal else (source, 1 + answer)

    def _final_shape(self, row: _Row) -> Shape:
        source, new = len(row.answer.prompt.tokens), row.answer.prompt.max_new_tokens
        return (source + new,) if self.generator.causal else (source, 1 + new)

    def _refuse(self, row: _Row, needed: float, budget: int) -> None:
        """A request that does not fit alone, by prediction."""
        with self._changed:
            self._waiting.remove(row)
        row.answer.fail(
            DoesNotFit(
                f"a prompt of {len(row.answer.prompt.tokens):,} tokens and an answer of up to "
                f"{row.answer.prompt.max_new_tokens:,} need {show_bytes(needed)} by prediction, and {show_bytes(budget)} "
                "may be used. Try: a lower max_tokens, or a shorter prompt.",
                needed_bytes=round(needed),
            )
        )

    def _step(self) -> None:
        """One token for every row that runs."""
        assert self._batch is not None and self._next_tokens is not None
        scores = self._batch.step(self._next_tokens)
        rows = self._running
        self._next_tokens = self._chosen_tokens(scores, rows)
        self._add_tokens(self._next_tokens, rows)
        self._clean_tokens += 1
        if self._clean_tokens >= CLEAN_TOKENS and self._row_limit < self._max_rows:
            self._row_limit, self._clean_tokens = min(self._max_rows, 2 * self._row_limit), 0

    def _chosen_tokens(self, scores: torch.Tensor, rows: list[_Row]) -> torch.Tensor:
        return choose(scores, [row.sampling for row in rows])

    def _add_tokens(self, tokens: torch.Tensor, rows: list[_Row]) -> None:
        """Hand out the tokens. Rows that end leave."""
        ended = set[int]()
        added = 0
        for row, token in zip(rows, tokens.tolist(), strict=True):
            answer = row.answer
            if token in self.generator.end_ids:
                answer.end("stop")
            else:
                first = answer.first_token_s is None
                stopped = answer.add(token)
                row.sampling.add(token)
                added += 1
                if first:
                    self._count_first(answer.first_token_s or 0.0)
                if stopped:
                    answer.end("stop")
                elif len(answer.tokens) >= answer.prompt.max_new_tokens:
                    answer.end("length")
            if answer.done:
                ended.add(id(row))
        self._counts.answer_tokens += added
        self._counts.answered += len(ended)
        now = time.monotonic()
        self._ends.extend([now] * len(ended))
        self._recent.append((now, added))
        while self._recent and now - self._recent[0][0] > RATE_S:
            self._recent.popleft()
        if ended:
            self._leave([row for row in self._running if id(row) not in ended])

    def _count_first(self, seconds: float) -> None:
        self._counts.first_token_s += seconds
        for place, bound in enumerate(FIRST_TOKEN_S):
            self._counts.first_tokens[place] += seconds <= bound
        self._counts.first_tokens[-1] += 1

    def _leave(self, left: list[_Row]) -> None:
        """Only these rows go on."""
        if len(left) == len(self._running):
            return
        kept = {id(row) for row in left}
        places = [place for place, row in enumerate(self._running) if id(row) in kept]
        gone = [row for row in self._running if id(row) not in kept]
        with self._changed:
            self._running = left
        for row in gone:
            if not row.answer.done:
                row.answer.fail(self._stopping or ServerBusy("the request was cancelled.", retry_after_s=1))
        if not left:
            self._measure()
            self._forget_batch()
            return
        assert self._batch is not None and self._next_tokens is not None
        self._batch.keep(places)
        self._next_tokens = self._next_tokens[places]
        if self._admission is not None:
            size = BatchSize(held_bytes=self._batch.cache_bytes)
            for row in left:
                size = size.with_row(self._final_shape(row))
            self._predicted = self._admission.needed_bytes(size)

    def _measure(self) -> None:
        """Where the device counts peaks, a batch that took more than predicted raises the memory model."""
        if self._admission is not None and has_peak_statistics(self.generator.device):
            peak = torch.accelerator.max_memory_allocated(self.generator.device)
            self._peak_bytes = max(self._peak_bytes or 0, peak)
            self._admission.measured(self._highest_predicted, peak - self._idle_bytes)
            self._highest_predicted = 0.0
            torch.accelerator.reset_peak_memory_stats(self.generator.device)

    def _forget_batch(self) -> None:
        self._batch = self._next_tokens = None

    def _recover(self, error: OutOfMemory) -> None:
        """The cache is gone. Put those that ran back to the front, and admit at most half as many as were tried."""
        self._counts.ooms += 1
        self._clean_tokens = 0
        tried = [row for row in self._attempted if not row.answer.done]
        if self._admission is not None:
            self._admission.out_of_memory(self._predicted)
        with self._changed:
            self._waiting.extendleft(reversed([row for row in self._running if not row.answer.done]))
            self._running = []
        for row in tried:
            repeat = partial(row.sampling.repeat, len(row.answer.tokens), self.vocabulary)
            if isinstance(attempt(repeat, self.generator.device, thorough=False), OutOfMemory):
                self._fail_alone(row)
        if len(tried) == 1:
            tried[0].ooms_alone += 1
            if tried[0].ooms_alone > 1:  # once more, in an empty cache
                self._fail_alone(tried[0])
        if tried:
            self._row_limit = max(1, len(tried) // 2)
            self._note(
                f"serving: out of memory with {len(tried)} request{'s' * (len(tried) != 1)} (predicted "
                f"{show_bytes(self._predicted)}). At most {self._row_limit} at once for the next {CLEAN_TOKENS} tokens."
            )

    def _fail_alone(self, row: _Row) -> None:
        """A request that ran out of memory with nobody beside it."""
        with self._changed:
            self._waiting.remove(row)
        row.answer.fail(
            DoesNotFit(
                f"out of memory while answering a prompt of {len(row.answer.prompt.tokens):,} tokens. "
                "Try: a shorter prompt, or a lower max_tokens.",
                needed_bytes=0,
            )
        )
