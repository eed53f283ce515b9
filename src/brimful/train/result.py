"""What one step did."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class StepResult:
    """What one step did."""

    step: int
    loss: float
    """Mean over everything counted in the step, on all processes; of several terms, the sum of their means."""
    terms: dict[str, float]
    """The mean of each term."""
    rows: int
    """Rows trained on, over all processes."""
    count: float
    """What the loss counted; of several terms, the first one's."""
    applied: bool
    """False where the gradients were NaN or inf and the weights stayed as they were."""
    grad_norm: float | None
    """Before clipping; None from `backward`."""
    micro_batches: int
    largest_micro_batch: int
    """Rows of this process's largest micro-batch."""
    ooms: int
    """Out-of-memory errors of this process that the step survived."""
    ooms_of_all: int
    """Those of all processes."""
    set_aside: tuple[int, ...]
    """Rows that do not fit even alone, by their place in what was given."""
    seconds: float
    peak_bytes: int | None
    """Most bytes allocated during the step; None where the device does not count them."""
