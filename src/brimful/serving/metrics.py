"""What an engine does and did, as figures: counted by its thread, read by `/status` and `/metrics`."""

import time
from collections import Counter, deque
from dataclasses import dataclass

RATE_S = 5.0
"""Seconds over which tokens per second are averaged."""
FIRST_TOKEN_S = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0)
"""Upper bounds of the histogram of the time to the first token."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineState:
    """What an engine does now."""

    running: int
    queued: int
    used_bytes: int
    predicted_bytes: int
    peak_bytes: int | None
    """The most that was in use since the start, where that is measured: on a GPU, and under a limit on the CPU."""
    limit_bytes: int | None


class Counts:
    """What an engine did since its start. Written by its thread alone."""

    def __init__(self) -> None:
        self.ooms = self.prompt_tokens = self.answer_tokens = self.answered = 0
        self.first_tokens = [0] * (len(FIRST_TOKEN_S) + 1)
        """How many first tokens came within each bound of `FIRST_TOKEN_S`, and in all."""
        self.first_token_s = 0.0
        """The sum of those times."""
        self._recent: deque[tuple[float, int]] = deque()
        self.idle_s = 0.0
        """Time in which there was nothing to answer."""
        self._ends: deque[float] = deque(maxlen=64)
        """When answers ended, by a clock that stands still while there is nothing to answer."""

    def first_token(self, seconds: float) -> None:
        self.first_token_s += seconds
        for place, bound in enumerate((*FIRST_TOKEN_S, float("inf"))):
            self.first_tokens[place] += seconds <= bound

    def round(self, tokens: int, ended: int) -> None:
        """One token for each row: how many belong to answers, and how many answers ended."""
        now = time.monotonic()
        self.answer_tokens += tokens
        self.answered += ended
        self._ends.extend([now - self.idle_s] * ended)
        self._recent.append((now, tokens))
        while now - self._recent[0][0] > RATE_S:
            self._recent.popleft()

    @property
    def tokens_per_second(self) -> float:
        now = time.monotonic()
        recent = [(at, tokens) for at, tokens in list(self._recent) if now - at <= RATE_S]
        return sum(tokens for _, tokens in recent) / max(now - recent[0][0], 0.5) if recent else 0.0

    @property
    def seconds_per_answer(self) -> float:
        """Between the ends of the last answers."""
        ends = list(self._ends)
        return (ends[-1] - ends[0]) / (len(ends) - 1) if len(ends) > 1 else 1.0


def metrics_text(state: EngineState, counts: Counts, responses: "Counter[tuple[str, int]]", dropped: int) -> str:
    """All of it in the text format of Prometheus. `dropped`: clients that read nothing."""
    lines: list[str] = []

    def metric(name: str, kind: str, text: str, *samples: tuple[str, float | None]) -> None:
        lines.extend([f"# HELP brimful_{name} {text}", f"# TYPE brimful_{name} {kind}"])
        lines.extend(f"brimful_{name}{label} {value:g}" if isinstance(value, float) else f"brimful_{name}{label} {value}" for label, value in samples if value is not None)  # fmt: skip

    metric(
        "responses_total", "counter", "Responses by route and status.",
        *((f'{{route="{route}",status="{status}"}}', count) for (route, status), count in sorted(responses.items())),
    )  # fmt: skip
    metric("requests_running", "gauge", "Answers that are being written.", ("", state.running))
    metric("requests_queued", "gauge", "Requests that wait.", ("", state.queued))
    metric("answers_total", "counter", "Answers that were finished.", ("", counts.answered))
    metric("slow_clients_total", "counter", "Streams dropped because the client read nothing.", ("", dropped))
    metric("prompt_tokens_total", "counter", "Tokens of prompts.", ("", counts.prompt_tokens))
    metric("answer_tokens_total", "counter", "Tokens of answers.", ("", counts.answer_tokens))
    metric("tokens_per_second", "gauge", "Tokens of answers in the last seconds.", ("", counts.tokens_per_second))
    metric("memory_used_bytes", "gauge", "Memory in use, measured.", ("", state.used_bytes))
    metric("memory_predicted_bytes", "gauge", "Predicted peak of the requests that run.", ("", state.predicted_bytes))
    metric(
        "memory_peak_bytes", "gauge", "The most in use since the start, where it is measured.", ("", state.peak_bytes)
    )
    metric("memory_limit_bytes", "gauge", "Memory that may be used.", ("", state.limit_bytes))
    metric("out_of_memory_total", "counter", "Out-of-memory errors that were survived.", ("", counts.ooms))
    name = "time_to_first_token_seconds"
    bounds = [f"{bound:g}" for bound in FIRST_TOKEN_S] + ["+Inf"]
    lines += [f"# HELP brimful_{name} From request to first token.", f"# TYPE brimful_{name} histogram"]
    lines += [
        f'brimful_{name}_bucket{{le="{bound}"}} {count}'
        for bound, count in zip(bounds, counts.first_tokens, strict=True)
    ]
    lines += [f"brimful_{name}_sum {counts.first_token_s:g}", f"brimful_{name}_count {counts.first_tokens[-1]}", ""]
    return "\n".join(lines)
