"""The next token of each row of a batch, each chosen in its own way.

Greedy rows cost one `argmax` for all. The others are processed row by row, or together where that is the same: penalties,
temperature, top-p, and noise that depends on the row's seed and prompt alone (`OwnNoise`). So a sampled answer is the same in
any batch, and the same as that of `Generator`.
"""

from array import array
from collections.abc import Sequence

import numpy as np
import torch

from brimful.serving.answer import Logprob, Prompt
from brimful.tasks.generate import seed_of, with_noise

LEAST_TEMPERATURE = 1e-5
"""Below it sampling is greedy. Scores divided by less would overflow, and 1e-50 is 0 in float32."""


class Sampling:
    """How the tokens of one row are chosen, and what that depends on: tokens so far, and a stream of random numbers."""

    def __init__(
        self, *, temperature: float = 0.0, top_p: float = 1.0, repetition_penalty: float = 1.0,
        frequency_penalty: float = 0.0, presence_penalty: float = 0.0, seed: int = 0, device: torch.device,
        start: Sequence[int] = (),
    ) -> None:  # fmt: skip
        """`start`: tokens that count as generated, such as the one that a decoder starts with."""
        self.temperature, self.top_p = temperature if temperature >= LEAST_TEMPERATURE else 0.0, top_p
        self.repetition_penalty, self.frequency_penalty = repetition_penalty, frequency_penalty
        self.presence_penalty = presence_penalty
        self._places = {token: place for place, token in enumerate(dict.fromkeys(start))}
        self.seen = array("q", self._places)
        """Each token that counts as generated, once, and in `counts` how often it was generated. Arrays, so that a batch copies
        them as they are: a list of a thousand tokens would be converted again for each further one."""
        self.counts = array("q", [0] * len(self.seen))
        self._seed, self._device = seed, device
        self.random = torch.Generator(device).manual_seed(seed)
        """The row's own random numbers."""

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
            if token not in self._places:
                self._places[token] = len(self.seen)
                self.seen.append(token)
                self.counts.append(0)
            self.counts[self._places[token]] += 1

    def repeat(self, tokens: int, vocabulary: int) -> None:
        """Return to where the random numbers were after this many tokens, if a token was drawn in vain."""
        if self.temperature:
            self.random.manual_seed(self._seed)
            noise = torch.empty((1, vocabulary), device=self._device)
            for _ in range(tokens):
                noise.exponential_(generator=self.random)


def choose(scores: torch.Tensor, rows: Sequence[Sampling]) -> torch.Tensor:
    """The next token of each row, on the device."""
    scores = scores.float()
    if all(row.is_greedy for row in rows):
        return scores.argmax(-1)
    scores = scores.clone()
    _subtract_penalties(scores, rows)
    sampled = [place for place, row in enumerate(rows) if row.temperature]
    if sampled:
        warmth = torch.tensor([rows[place].temperature for place in sampled], device=scores.device)
        warm = scores[sampled] / warmth[:, None]
        _keep_top_p(warm, [rows[place].top_p for place in sampled])
        scores[sampled] = with_noise(warm, [rows[place].random for place in sampled])
    return scores.argmax(-1)


def logprobs_of(scores: torch.Tensor, tokens: torch.Tensor, counts: Sequence[int | None]) -> list[Logprob | None]:
    """Of each row with a count: its token and as many of the most likely ones, with their log-probabilities."""
    places = [place for place, count in enumerate(counts) if count is not None]
    result: list[Logprob | None] = [None] * len(counts)
    if not places:
        return result
    all_logprobs = scores[places].float().log_softmax(-1)
    chosen = tokens[places]
    most = min(max(counts[place] or 0 for place in places), scores.shape[-1])
    values, ids = all_logprobs.topk(most)
    own = all_logprobs.gather(1, chosen[:, None])[:, 0]
    for place, *row in zip(places, chosen.tolist(), own.tolist(), ids.tolist(), values.tolist(), strict=True):
        token, logprob, top_ids, top_values = row
        count = counts[place]
        result[place] = Logprob(token, logprob, list(zip(top_ids, top_values, strict=True))[:count])
    return result


def _subtract_penalties(scores: torch.Tensor, rows: Sequence[Sampling]) -> None:
    """In place, on the tokens that each row has generated. Two copies to the device for all rows: it would wait for each."""
    penalized = [(place, row) for place, row in enumerate(rows) if row.has_penalties and row.seen]
    if not penalized:
        return
    lengths = [len(row.seen) for _, row in penalized]
    tokens, counts = (np.concatenate([np.array(one) for one in parts]) for parts in zip(*((row.seen, row.counts) for _, row in penalized), strict=True))  # fmt: skip
    own = [(place, row.repetition_penalty, row.frequency_penalty, row.presence_penalty) for place, row in penalized]
    places, repetition, frequency, presence = np.repeat(np.array(own), lengths, axis=0).T
    where = torch.from_numpy(np.stack([places.astype(np.int64), tokens])).to(scores.device)
    factors = np.stack([repetition, frequency * counts + presence * (counts > 0)]).astype(np.float32)
    divisor, subtrahend = torch.from_numpy(factors).to(scores.device)
    values = scores[where[0], where[1]]
    values = torch.where(values < 0, values * divisor, values / divisor)
    scores[where[0], where[1]] = values - subtrahend


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
