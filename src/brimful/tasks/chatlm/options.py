"""What can be asked of the chat tasks besides what any task takes. Imports no torch: the command line reads it."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal, get_args

from brimful.errors import BadOption

Freeze = Literal["encoder+embeddings", "encoder", "none"]


@dataclass(frozen=True, kw_only=True)
class ChatOptions:
    """Of chatlm-pretrain and chatlm-sft. None is not asked for."""

    size: str | None = None
    """Size of a new model: tiny or base; base unless given."""
    from_: str | None = None
    """Start from this model: a folder that save_pretrained wrote, a run folder or a checkpoint of one."""
    freeze: Freeze | None = None
    """What does not train. A frozen part runs without autograd; chatlm-sft freezes encoder+embeddings unless told otherwise."""
    random_weights: bool = False
    """Fine-tune random weights: without it chatlm-sft wants --from."""
    label_smoothing: float = 0.0
    """Share of each label spread over the vocabulary, in training; evaluation never smooths."""
    tokenizer: str | None = None
    """Tokenizer folder for raw DATA; the model's own, or one trained on DATA, unless given."""
    columns: str | None = None
    """Which column of raw DATA is what, such as prompt=question,response=answer; found by name unless given."""
    max_tokens: str | int | None = None
    """Longer sides of raw DATA are cut to so many tokens: one number, or one for each side; the task's lengths unless given."""

    def __post_init__(self) -> None:
        wrong = [sentence for good, sentence in self._checks() if not good]
        if wrong:
            raise BadOption("; ".join(wrong))

    def _checks(self) -> Iterator[tuple[bool, str]]:
        words = get_args(Freeze)
        yield self.freeze is None or self.freeze in words, f"--freeze {self.freeze}: one of {', '.join(words)}"
        smooth = self.label_smoothing
        is_share = isinstance(smooth, (int, float)) and not isinstance(smooth, bool) and 0 <= smooth < 1
        yield is_share, f"--label-smoothing {smooth!r}: give a share from 0 to below 1, such as 0.1"
        both = self.size is not None and self.from_ is not None
        yield not both, f"--size {self.size}: a model that is loaded with --from has its size already"
        yield (
            self.from_ is None or not self.random_weights,
            "--random-weights: --from gives weights that are not random",
        )
        lengths = self.lengths
        good = lengths is None or (len(lengths) in (1, 2) and all(length > 0 for length in lengths))
        yield good, f"--max-tokens {self.max_tokens}: give one number of tokens, or one for each side, such as 256,320"

    @property
    def lengths(self) -> tuple[int, ...] | None:
        """`max_tokens` as numbers; a zero where it is none."""
        if self.max_tokens is None:
            return None
        parts = str(self.max_tokens).split(",")
        return tuple(int(part) if part.strip().isdecimal() else 0 for part in parts)
