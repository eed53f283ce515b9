"""The next token of each row of a batch, each chosen in its own way.

Greedy rows cost one `argmax` for all. The others are processed row by row, or together where that is the same: penalties,
temperature, top-p, and noise that depends on the row's seed and prompt alone (`OwnNoise`). So a sampled answer is the same in
any batch, and the same as that of `Generator`.
"""

from collections import Counter
from collections.abc import Sequence

import torch

from brimful.serving.answer import Prompt
from brimful.tasks.generate import OwnNoise, seed_of


class Sampling:
    """How the tokens of one row are chosen, and what that depends on: tokens so far, and a stream of random numbers."""

    def __init__(
        self, *, temperature: float = 0.0, top_p: float = 1.0, repetition_penalty: float = 1.0,
        frequency_penalty: float = 0.0, presence_penalty: float = 0.0, seed: int = 0, device: torch.device,
        start: Sequence[int] = (),
    ) -> None:  # fmt: skip
        """`start`: tokens that count as generated, such as the one that a decoder starts with."""
        self.temperature, self.top_p = temperature, top_p
        self.repetition_penalty, self.frequency_penalty = repetition_penalty, frequency_penalty
        self.presence_penalty = presence_penalty
        self.seen = Counter(start)
        self.generated = Counter[int]()
        self._seed, self._device = seed, device
        self._noise = OwnNoise([seed], device) if temperature else None

    @classmethod
    def of(cls, prompt: Prompt, device: torch.device, start: Sequence[int]) -> "Sampling":
        return cls(
            temperature=prompt.temperature, top_p=prompt.top_p, repetition_penalty=prompt.repetition_penalty,
            frequency_penalty=prompt.frequency_penalty, presence_penalty=prompt.presence_penalty,
            seed=seed_of(prompt.seed, prompt.tokens), device=device, start=start,
        )  # fmt: skip

    @property
    def is_greedy(self) -> bool:
        """Whether the highest score is taken as it is."""
        return not self.temperature and not self.has_penalties

    @property
    def has_penalties(self) -> bool:
        return bool(self.repetition_penalty != 1 or self.frequency_penalty or self.presence_penalty)

    def add(self, token: int) -> None:
        if self.has_penalties:
            self.seen[token] += 1
            self.generated[token] += 1

    def repeat(self, tokens: int, vocabulary: int) -> None:
        """Return to where the random numbers were after this many tokens, if a token was drawn in vain."""
        if self.temperature:
            self._noise = OwnNoise([self._seed], self._device)
            scores = torch.zeros((1, vocabulary), device=self._device)
            for _ in range(tokens):
                self._noise(scores, scores)

    def penalized(self, scores: torch.Tensor) -> torch.Tensor:
        """Scores of one row, less the penalties on what was generated."""
        if self.repetition_penalty != 1 and self.seen:
            ids = torch.tensor(list(self.seen), device=scores.device)
            values = scores[ids]
            values = torch.where(values < 0, values * self.repetition_penalty, values / self.repetition_penalty)
            scores = scores.scatter(0, ids, values)
        if (self.frequency_penalty or self.presence_penalty) and self.generated:
            ids = torch.tensor(list(self.generated), device=scores.device)
            counts = torch.tensor(list(self.generated.values()), device=scores.device, dtype=scores.dtype)
            scores = scores.scatter_add(0, ids, -(self.frequency_penalty * counts + self.presence_penalty))
        return scores

    def drawn(self, scores: torch.Tensor) -> torch.Tensor:
        """Scores whose maximum is a sample from these."""
        assert self._noise is not None
        return self._noise(scores, scores[None])[0]


def choose(scores: torch.Tensor, rows: Sequence[Sampling]) -> torch.Tensor:
    """The next token of each row, on the device."""
    scores = scores.float()
    if all(row.is_greedy for row in rows):
        return scores.argmax(-1)
    scores = scores.clone()
    for place, row in enumerate(rows):
        if row.has_penalties:
            scores[place] = row.penalized(scores[place])
    sampled = [place for place, row in enumerate(rows) if row.temperature]
    if sampled:
        warmth = torch.tensor([rows[place].temperature for place in sampled], device=scores.device)
        warm = scores[sampled] / warmth[:, None]
        _keep_top_p(warm, [rows[place].top_p for place in sampled])
        for place, row_scores in zip(sampled, warm, strict=True):
            scores[place] = rows[place].drawn(row_scores)
    return scores.argmax(-1)


def _keep_top_p(scores: torch.Tensor, top_p: Sequence[float]) -> None:
    """In place: of each row only the most likely tokens that together have its probability, at least one."""
    places = [place for place, share in enumerate(top_p) if share < 1]
    if not places:
        return
    ordered, order = scores[places].sort(descending=False)
    shares = torch.tensor([top_p[place] for place in places], device=scores.device)
    dropped = ordered.softmax(-1).cumsum(-1) <= (1 - shares[:, None])
    dropped[:, -1] = False
    scores[places] = scores[places].masked_fill(dropped.scatter(1, order, dropped), -torch.inf)
