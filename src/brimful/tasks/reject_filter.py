"""Which answers of a model can be the rejected one of a pair, and how the others are counted.

The rules look at characters only. They are for answers that would teach nothing, not for answers that are wrong.
"""

import re
import unicodedata
from collections import Counter
from itertools import pairwise

from brimful.data.read.files import RowProblem
from brimful.tasks.generate import INCOMPLETE_CHARACTER

REASONS = {
    "broken": "that cannot be read",
    "no_reply": "without a reply that is a text",
    "no_prompt": "without a prompt",
    "empty_chosen": "with an empty reply",
    "duplicate_prompt": "with the prompt of an earlier row",
    "refused": "refused by the chat template",
    "prompt_too_long": "too long for the model's context",
    "empty": "answered with nothing",
    "unfinished": "without an end before the token limit",
    "not_text": "with half of a character",
    "too_short": "too short",
    "identical": "identical to the chosen answer",
    "too_similar": "nearly the chosen answer",
    "off_topic": "off topic",
}
"""Why a row is not in the output, in the order in which it is looked for. Those up to `prompt_too_long` are not answered."""

_ADVICE = {
    "empty": "a model that `brimful train sft` has trained on replies",
    "unfinished": "more max_new_tokens=, or a model that has learned to end its answers",
    "not_text": "a lower temperature=",
    "too_short": "fewer min_chars=",
    "identical": "a higher temperature=",
    "too_similar": "a higher temperature= or max_similarity=",
    "off_topic": "a lower temperature=",
}
_LETTERS = re.compile(r"[^\W_]+")


def reason_to_drop(
    prompt: str, chosen: str, rejected: str, *, finished: bool, min_chars: int, max_similarity: float
) -> tuple[str, str] | None:
    """Why this answer is not kept: one of `REASONS`, and what is wrong with it. None if it is kept."""
    if not rejected.strip():
        return "empty", REASONS["empty"]
    if not finished:
        return "unfinished", f"{REASONS['unfinished']}: {_shortened(rejected)}"
    if INCOMPLETE_CHARACTER in rejected and INCOMPLETE_CHARACTER not in prompt + chosen:
        return "not_text", f"{REASONS['not_text']}: {_shortened(rejected)}"
    if len(rejected.strip()) < min_chars:
        return "too_short", f"fewer than {min_chars:,} characters: {_shortened(rejected)}"
    if _comparable(rejected) == _comparable(chosen):
        return "identical", f"{REASONS['identical']}: {_shortened(rejected)}"
    if (alike := similarity(chosen, rejected)) > max_similarity:
        return "too_similar", f"{alike:.0%} of the chosen answer: {_shortened(rejected)}"
    if is_off_topic(prompt, chosen, rejected):
        return "off_topic", f"shares nothing with prompt and chosen answer: {_shortened(rejected)}"
    return None


def similarity(one: str, other: str) -> float:
    """How much two texts have in common, from 0 to 1: twice their common pairs of neighbouring characters, divided by all
    pairs of both (Dice's coefficient). Upper and lower case, full and half width, and the kind of white space do not count.

    >>> similarity("红色。", "橙色。")
    0.5
    >>> similarity("Yes, it is.", "yes,  it is.")
    1.0
    """
    first, second = (Counter(pairwise(f"\x02{_comparable(text)}\x03")) for text in (one, other))
    return 2 * (first & second).total() / (first.total() + second.total())


def is_off_topic(prompt: str, chosen: str, rejected: str) -> bool:
    """Whether an answer shares no pair of neighbouring letters or digits with the prompt and the chosen answer, although the
    chosen answer shares one with the prompt.

    That holds for another script or mere punctuation, hardly ever for sentences in the same language. Where the chosen answer
    itself has nothing of the prompt, as in a translation or a single word, it says nothing.
    """
    about, answer = _letter_pairs(prompt), _letter_pairs(chosen)
    return bool(about & answer) and not _letter_pairs(rejected) & (about | answer)


def _comparable(text: str) -> str:
    return " ".join(unicodedata.normalize("NFKC", text).casefold().split())


def _letter_pairs(text: str) -> set[tuple[str, str]]:
    return {pair for run in _LETTERS.findall(_comparable(text)) for pair in pairwise(run)}


def _shortened(text: str) -> str:
    line = " ".join(text.split())
    return repr(line if len(line) <= 40 else line[:39] + "…")


class Drops:
    """Rows that are not in the output: how many for each reason, and the first."""

    def __init__(self) -> None:
        self.counts = dict.fromkeys(REASONS, 0)
        self.first: dict[str, str] = {}

    def add(self, reason: str, problem: RowProblem) -> None:
        self.counts[reason] += 1
        self.first.setdefault(reason, str(problem))

    @property
    def total(self) -> int:
        return sum(self.counts.values())

    def in_words(self) -> str:
        """`3 too short, 1 off topic`, the most frequent first."""
        counts = sorted(((count, reason) for reason, count in self.counts.items() if count), reverse=True)
        return ", ".join(f"{count:,} {REASONS[reason]}" for count, reason in counts)

    def advice(self) -> str:
        """What helps against the most frequent reason."""
        return _ADVICE.get(max(self.counts, key=self.counts.__getitem__), "`brimful data check`")
