"""Where and how fast a sweep runs."""

from dataclasses import dataclass

from brimful.errors import BadOption


@dataclass(frozen=True, slots=True, kw_only=True)
class SweepOptions:
    """Where a sweep runs; nothing here changes its results."""

    device: str = "auto"
    """cpu, cuda, cuda:1 or xpu; the first accelerator unless given."""
    memory_limit: str | None = None
    """Cap on memory, such as 20GiB: a card's reserved bytes, or a virtual limit on the CPU."""
    fill: float = 0.85
    """The share of the limit to use."""
    pack: int | None = None
    """Train at most so many runs at once; as many as pay unless given."""
    processes: int | None = None
    """Cards of this box to share the runs, a process for each; one unless given. On the CPU processes of one core each:
    as many as there are cores unless given, where there are six heads or more for each."""
    ray: str | None = None
    """Run on a Ray cluster instead: auto for the one this machine belongs to, an address, or local to start one here."""

    def __post_init__(self) -> None:
        problems = []
        if self.pack is not None and self.pack < 1:
            problems.append(f"--pack {self.pack}: give at least 1")
        if self.processes is not None and self.processes < 1:
            problems.append(f"--processes {self.processes}: give at least 1")
        if not 0 < self.fill <= 1:
            problems.append(f"--fill {self.fill:g}: give a share of the limit, more than 0 and at most 1")
        if problems:
            raise BadOption("; ".join(problems))
