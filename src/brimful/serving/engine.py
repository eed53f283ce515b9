"""The thread that owns a model and answers prompts: continuous batching within a memory budget.

    submit ─► waiting ─► admit: prefill, join ─► one token for every row ─► rows that ended leave ─┐
                 ▲              ▲                                                                  │
                 │              └──────────────────────────────────────────────────────────────────┘
                 └── out of memory: the cache is dropped, at most half the rows are admitted again, the others wait

Requests join between two tokens and leave as soon as they end, so nobody waits for the longest answer of a batch. A token of the
demo's model takes 0.75 ms of CPU time for one row and 2.6 ms for 64. A long prompt is prefilled in pieces between the tokens of
others: one of 15,000 tokens held them up for 12.3 s as a whole and for at most 0.9 s in pieces.

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
from dataclasses import dataclass
from functools import partial
from typing import get_args

import psutil
import torch

from brimful.errors import BadOption, BrimfulError, DoesNotFit, InternalError, ServerBusy, in_one_line
from brimful.memory.forward import eval_mode
from brimful.memory.ledger import Ledger
from brimful.memory.meter import allocated_bytes, has_peak_statistics
from brimful.memory.oom import OutOfMemory, attempt
from brimful.planning.plan_options import AutoOnOff
from brimful.planning.target import Target
from brimful.serving.admission import Admission, BatchSize, dummy_batch
from brimful.serving.answer import Answer, Logprob, Prompt
from brimful.serving.batch import Batch, CausalBatch, RowTokens, joinable, prefill
from brimful.serving.metrics import Counts, EngineState
from brimful.serving.replayed_batch import Recordings, ReplayedBatch, fixed_size, replayable
from brimful.serving.sampling import Sampling, choose, logprobs_of
from brimful.task import Shape
from brimful.tasks.generate import Generator, max_rows
from brimful.tasks.model_folder import text_config
from brimful.units import show_bytes

PREFILL_TOKENS = {"cpu": 1024}
OTHER_PREFILL_TOKENS = 16384
"""Prompt tokens that are prefilled at once while other answers wait for their next token. A longer prompt of a causal model is
prefilled in pieces of half as many, one between two tokens, and leaves the other half to shorter ones."""
CLEAN_TOKENS = 64
"""Tokens without an out-of-memory error after which the limit on rows doubles."""
FAILURES = 3
"""Batches in a row that may fail for another reason than memory, before a dummy batch shows whether the model still works: a lost
CUDA context fails them all, and a request that breaks the model only its own."""
DEFAULT_CONTEXT = 2048
"""Prompt tokens of a model whose configuration has no limit, as that of T5."""
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
    cuda_graphs: AutoOnOff = "auto"
    """Whether tokens are replayed as a CUDA graph. "auto" does it where that is faster."""

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
        if self.cuda_graphs not in get_args(AutoOnOff):
            problems.append(f"cuda_graphs={self.cuda_graphs!r} must be 'auto', 'on' or 'off'.")
        if problems:
            raise BadOption(" ".join(problems))


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
class _LongPrompt:
    """A prompt that is prefilled in pieces, one such at a time. Until it is complete, its row is among those that wait."""

    row: _Row
    batch: CausalBatch | None = None


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
        self._batch: Batch | ReplayedBatch | None = None
        self._recordings: Recordings | None = None
        """Where tokens are replayed."""
        self._next_tokens: torch.Tensor | None = None
        self._long: _LongPrompt | None = None
        self._prefill_tokens = PREFILL_TOKENS.get(generator.device.type, OTHER_PREFILL_TOKENS)
        self._blocked: _Row | None = None
        """The first that waits, if it did not fit beside those that run: it is not tried again until one of them leaves or joins."""
        self._attempted: list[_Row] = []
        """Rows of the round that is running."""
        self._predicted = self._highest_predicted = 0.0
        self._peak_is_due = False
        self._idle_bytes = 0
        self._limit_bytes = None if target is None else target.limit_bytes
        self._ledger: Ledger | None = None
        self._peak_bytes: int | None = None
        self.counts = Counts()
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
        seconds = min(self.options.max_wait_s, self.counts.seconds_per_answer * len(self._waiting))
        return max(1, math.ceil(seconds))

    def state(self) -> EngineState:
        return EngineState(
            running=len(self._running) + bool(self._long),
            queued=len(self._waiting) - bool(self._long),
            used_bytes=self._used_bytes(),
            predicted_bytes=round(self._idle_bytes + (self._predicted if self._running or self._long else 0)),
            peak_bytes=self._peak_bytes if self._ledger is None else self._ledger.peak_bytes,
            limit_bytes=self._limit_bytes,
        )

    def _used_bytes(self) -> int:
        """Allocated on the device, or where nothing counts tensors the memory of the process."""
        allocated = allocated_bytes(self.generator.device)
        return psutil.Process().memory_info().rss if allocated is None else allocated

    def drain(self) -> None:
        """Take no more requests. Those that wait or run are answered."""
        with self._changed:
            self._stopping = ServerBusy(
                "the server is shutting down. Try: again in a minute.", retry_after_s=60, ending=True
            )
            self._changed.notify_all()

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
            self._try_replays()
            return
        self._admission = Admission(self.generator, self.target, self.context_tokens, self._note)
        self._admission.fit()  # before anything else runs: it says so if the model does not fit
        outcome = attempt(partial(joinable, self.generator), self.generator.device)
        possible, reason = (False, "no memory to compare several") if isinstance(outcome, OutOfMemory) else outcome
        most = max_rows(self.generator.device)
        if self.options.max_batch is not None:
            most, reason = min(most, self.options.max_batch) if possible else 1, f"as requested, and {reason}"
        self._max_rows = self._row_limit = most if possible else 1
        if possible:
            self.choices["batch"] = (f"up to {self._max_rows} requests at once", reason)
        else:
            self.choices["batch"] = ("one request at a time", reason)
        self._try_replays()
        if has_peak_statistics(self.generator.device):  # those of the rows that were compared are no request's
            torch.accelerator.reset_peak_memory_stats(self.generator.device)
        self._idle_bytes = self._used_bytes()
        budget, reason = self._admission.budget(0)
        self.choices["memory"] = (f"{show_bytes(budget)} for requests", reason)
        self._check_room(budget, reason)
        if (
            not self.target.requested and self.generator.device.type == "cpu"
        ):  # the rest of the host is not for requests
            self._limit_bytes = self._idle_bytes + budget

    def _check_room(self, budget: int, reason: str) -> None:
        """A server that has no room for any request ends at once, and one that refuses usual ones says so."""
        assert self._admission is not None
        new = min(self.generator.options.max_new_tokens, self.context_tokens - 1)
        for tokens in (1, new):
            final, prefilled = self._shapes(1, tokens), self._shapes(1, 0)
            needed = self._admission.needed_bytes(BatchSize(held_bytes=0).with_row(final, prefilled))
            if needed <= budget:
                continue
            if tokens == 1:
                raise DoesNotFit(
                    f"a prompt and an answer of one token need {show_bytes(needed)} by prediction, and "
                    f"{show_bytes(budget)} may be used ({reason}). Try: a higher memory_limit=.",
                    needed_bytes=round(needed),
                )
            self._note(
                f"serving: an answer of {new:,} tokens needs {show_bytes(needed)} by prediction, and "
                f"{show_bytes(budget)} may be used, so requests that ask for as many are refused. "
                "Try: a higher memory_limit=, or a lower max_new_tokens=."
            )

    def _try_replays(self) -> None:
        """Replay tokens where that is possible and faster."""
        device, wanted = self.generator.device, self.options.cuda_graphs
        if wanted == "off" or device.type != "cuda":
            if wanted == "on":
                raise BadOption(
                    f'cuda_graphs="on" is not possible on {device}. Try: cuda_graphs="auto", or an NVIDIA GPU.'
                )
            return
        recordings = Recordings()
        check = partial(replayable, self.generator, recordings, timed=wanted == "auto")
        try:
            outcome = attempt(check, device)
            possible, reason = (False, "no memory to try") if isinstance(outcome, OutOfMemory) else outcome
        except Exception as error:  # a model may do anything with a cache that it does not know
            possible, reason = False, f"the model cannot be recorded ({in_one_line(error)})"
        if possible:
            self._recordings = recordings
            if self._admission is not None:
                self._admission.cache_size = fixed_size
        elif wanted == "on":
            raise BadOption(f'cuda_graphs="on" is not possible: {reason}. Try: cuda_graphs="auto".')
        self.choices["cuda_graphs"] = (f"CUDA graphs {'on' if possible else 'off'}", reason)

    def _serve_once(self) -> bool:
        """One round: who leaves, who joins, one token for everyone. Returns whether there is a next one."""
        if self._peak_is_due:
            self._measure()
        with self._changed:
            if not self._waiting and not self._running:
                if self._stopping is not None:
                    return False
                began = time.monotonic()
                self._changed.wait()
                self.counts.idle_s += time.monotonic() - began
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
        """Something else than memory: those who were in it fail, and the others go on, unless the model does not work any more."""
        self._failures += 1
        self._forget_batch()
        if self._failures >= FAILURES:
            attempt(
                partial(dummy_batch, self.generator, 1, (1,) if self.generator.causal else (1, 1)),
                self.generator.device,
            )
            self._failures = 0
        log.error("the engine failed in a batch", exc_info=error)
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
        self._attempted = [*self._running, *([self._long.row] if self._long else [])]
        self._drop_cancelled()
        self._admit()
        self._prefill_piece()
        if self._running:
            self._step()

    def _drop_cancelled(self) -> None:
        with self._changed:
            for row in [row for row in self._waiting if row.answer.cancelled]:
                self._waiting.remove(row)
                self._drop(row)
        if self._long and self._long.row.answer.done:
            self._long = self._blocked = None
        self._leave([row for row in self._running if not row.answer.cancelled])

    def _drop(self, row: _Row) -> None:
        if not row.answer.done:
            row.answer.fail(self._stopping or ServerBusy("the request was cancelled.", retry_after_s=1))

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
        self._attempted += chosen
        for row in chosen:
            self.counts.prompt_tokens += 0 if row.began else len(row.answer.prompt.tokens)
            row.began = True
        if self._is_long(chosen[0]):
            self._long = _LongPrompt(chosen[0])
        else:
            self._join(*prefill(self.generator, [row.tokens for row in chosen]), chosen)

    def _is_long(self, row: _Row) -> bool:
        """Whether its prompt is prefilled in pieces, so that other answers go on meanwhile. Such a row is admitted alone."""
        return self.generator.causal and self._max_rows > 1 and sum(self._prefill_shape(row)) > self._prefill_tokens

    def _prefill_piece(self) -> None:
        """The next piece of the long prompt. With the last one, its row joins."""
        if self._long is None:
            return
        row, batch = self._long.row, self._long.batch
        tokens = [*row.tokens.prompt, *row.tokens.answer]
        begin = batch.lengths[0] if batch else 0
        piece = tokens[begin : begin + self._prefill_tokens // 2]
        if batch is None:
            batch, scores = CausalBatch.prefill(self.generator, [RowTokens(piece)])
            self._long.batch = batch
        else:
            scores = batch.append(torch.tensor([piece], device=self.generator.device))
        if begin + len(piece) == len(tokens):
            self._long = None
            self._join(batch, scores, [row])

    def _join(self, batch: Batch, scores: torch.Tensor, rows: list[_Row]) -> None:
        """Rows that were prefilled run from now on, with these scores for their next tokens."""
        tokens, logprobs = _choose(scores, rows)
        if self._recordings is not None and self._recordings.problem:
            self._note(f"serving: no more tokens are replayed as a CUDA graph ({self._recordings.problem}).")
            self.choices["cuda_graphs"] = ("CUDA graphs off", self._recordings.problem)
            self._recordings = None
        if self._batch is None:
            graphs = self._recordings
            self._batch = batch if graphs is None else ReplayedBatch(self.generator, batch, graphs)
            self._next_tokens = tokens
        else:
            assert self._next_tokens is not None
            self._batch.join(batch)
            self._next_tokens = torch.cat([self._next_tokens, tokens])
        with self._changed:
            for row in rows:
                self._waiting.remove(row)
            self._running = [*self._running, *rows]
        self._blocked = None
        self._add_tokens(tokens, logprobs, rows)

    def _choose_next(self) -> list[_Row]:
        chosen: list[_Row] = []
        waiting = [row for row in list(self._waiting) if not self._long or not self._is_long(row)]
        if not waiting or len(self._running) >= self._row_limit:
            return chosen
        if waiting[0] is self._blocked:
            return chosen
        size, room = self._size(), self._prefill_tokens // (2 if self._long else 1)
        joining: Shape = ()
        budget = 0 if self._admission is None else self._admission.budget(size.held_bytes)[0]
        for row in waiting:
            prefilled = self._prefill_shape(row)
            joining = tuple(map(max, joining or prefilled, prefilled))
            if size.rows >= self._row_limit or (chosen and room < (len(chosen) + 1) * sum(joining)):
                break
            trial = size.with_row(self._final_shape(row), prefilled)
            if self._admission is not None:
                needed = self._admission.needed_bytes(trial)
                if needed > budget:
                    if size.rows:
                        self._blocked = row
                        break
                    self._refuse(row, needed, budget)
                    continue
                self._predict(needed)
            size = trial
            chosen.append(row)
        return chosen

    def _size(self) -> BatchSize:
        """What is in memory, or will be. A prompt that is prefilled in pieces counts in full, as if it began now."""
        batches = [self._batch, self._long and self._long.batch]
        fixed = self._batch.size if isinstance(self._batch, ReplayedBatch) else None
        size = BatchSize(held_bytes=sum(batch.cache_bytes for batch in batches if batch), fixed=fixed)
        for row in self._running:
            size = size.with_row(self._final_shape(row))
        if self._long:
            size = size.with_row(self._final_shape(self._long.row), self._prefill_shape(self._long.row))
        return size

    def _predict(self, needed: float) -> None:
        self._predicted, self._highest_predicted = needed, max(needed, self._highest_predicted)

    def _prefill_shape(self, row: _Row) -> Shape:
        return self._shapes(len(row.answer.prompt.tokens), len(row.answer.tokens))

    def _final_shape(self, row: _Row) -> Shape:
        return self._shapes(len(row.answer.prompt.tokens), row.answer.prompt.max_new_tokens)

    def _shapes(self, source: int, answer: int) -> Shape:
        """The lengths of a row with these tokens."""
        return (source + answer,) if self.generator.causal else (source, 1 + answer)

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
        self._next_tokens, logprobs = _choose(scores, rows)
        self._add_tokens(self._next_tokens, logprobs, rows)
        self._clean_tokens += 1
        if self._clean_tokens >= CLEAN_TOKENS:
            self._row_limit, self._clean_tokens = min(self._max_rows, 2 * self._row_limit), 0
            self._blocked = None
            if self._admission is not None:
                self._admission.clean()

    def _add_tokens(self, tokens: torch.Tensor, logprobs: list[Logprob | None], rows: list[_Row]) -> None:
        """Hand out the tokens. Rows that end leave."""
        ended = set[int]()
        added = 0
        for row, token, logprob in zip(rows, tokens.tolist(), logprobs, strict=True):
            answer = row.answer
            if token in self.generator.end_ids:
                answer.end("stop")
            else:
                first = answer.first_token_s is None
                stopped = answer.add(token, logprob)
                row.sampling.add(token)
                added += 1
                if first:
                    self.counts.first_token(answer.first_token_s or 0.0)
                if stopped:
                    answer.end("stop")
                elif len(answer.tokens) >= answer.prompt.max_new_tokens:
                    answer.end("length")
            if answer.done:
                ended.add(id(row))
        self.counts.round(added, len(ended))
        if ended:
            self._leave([row for row in self._running if id(row) not in ended])

    def _leave(self, left: list[_Row]) -> None:
        """Only these rows go on."""
        if len(left) == len(self._running):
            return
        self._blocked = None
        kept = {id(row) for row in left}
        places = [place for place, row in enumerate(self._running) if id(row) in kept]
        gone = [row for row in self._running if id(row) not in kept]
        with self._changed:
            self._running = left
        for row in gone:
            self._drop(row)
        self._peak_is_due = True
        if left:
            assert self._batch is not None and self._next_tokens is not None
            self._batch.keep(places)
            self._next_tokens = self._next_tokens[places]
        else:
            self._batch = self._next_tokens = None
        if self._admission is not None:
            size = self._size()
            self._predicted = self._admission.needed_bytes(size) if size.rows else 0.0

    def _measure(self) -> None:
        """Where the device counts peaks, rows that took more than predicted raise the memory model. This is done after each round
        in which one left, because under steady load the batch is never empty, and when nothing of that round is in memory any
        more, which would count for the next rows."""
        self._peak_is_due = False
        if self._admission is not None and has_peak_statistics(self.generator.device):
            peak = torch.accelerator.max_memory_allocated(self.generator.device)
            self._peak_bytes = max(self._peak_bytes or 0, peak)
            self._admission.measured(self._highest_predicted, peak - self._idle_bytes)
            self._highest_predicted = self._predicted
            torch.accelerator.reset_peak_memory_stats(self.generator.device)

    def _forget_batch(self) -> None:
        self._batch = self._next_tokens = self._long = self._blocked = None

    def _recover(self, error: OutOfMemory) -> None:
        """The cache is gone. Put those that ran back to the front, and admit at most half as many as were tried."""
        self.counts.ooms += 1
        self._clean_tokens = 0
        tried = [row for row in self._attempted if not row.answer.done]
        if self._admission is not None:
            self._admission.out_of_memory(self._predicted)
        with self._changed:
            self._waiting.extendleft(reversed([row for row in self._running if not row.answer.done]))
            self._running = []
        for row in tried:
            row.ooms_alone += len(tried) == 1
            repeat = partial(row.sampling.repeat, len(row.answer.tokens), self.vocabulary)
            lost = isinstance(attempt(repeat, self.generator.device, thorough=False), OutOfMemory)
            if lost or row.ooms_alone > 1:  # alone it gets a second chance, in an empty cache
                self._fail_alone(row)
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


def _choose(scores: torch.Tensor, rows: list[_Row]) -> tuple[torch.Tensor, list[Logprob | None]]:
    """The next token of each row, and its log-probability if that is kept."""
    tokens = choose(scores, [row.sampling for row in rows])
    return tokens, logprobs_of(scores, tokens, [row.answer.prompt.top_logprobs for row in rows])
