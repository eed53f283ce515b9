"""What can be asked of a split."""

from dataclasses import dataclass
from typing import Any, Literal, get_args

from brimful.errors import BadOption

Kind = Literal["scaffold", "size", "column", "random"]
KINDS: tuple[str, ...] = get_args(Kind)


@dataclass(frozen=True, kw_only=True)
class SplitOptions:
    """One split of one dataset."""

    kind: Kind
    column: str | None = None
    """Its values are the domains of `column`."""
    ood: tuple[Any, ...] = ()
    """The values of it that are OOD; the rare ones where none is named."""
    train: int | None = None
    """Molecules on each side; None takes a share of what there is."""
    valid: int | None = None
    test: int | None = None
    seed: int = 0

    def __post_init__(self) -> None:
        problems = []
        if self.kind not in KINDS:
            problems.append(f"split is {self.kind!r} and must be one of {', '.join(KINDS)}")
        if self.kind == "column" and not self.column:
            problems.append("split 'column' needs the name of a column: set `column`")
        if self.kind != "column" and (self.column or self.ood):
            problems.append(f"`column` and `ood` belong to the split 'column', not to {self.kind!r}; leave them out")
        for name in ("train", "valid", "test"):
            count = getattr(self, name)
            if count is not None and count < 1:
                problems.append(f"`{name}` is {count} and must be at least 1")
        if self.seed < 0:
            problems.append(f"the split's seed is {self.seed} and must not be negative")
        if problems:
            raise BadOption("; ".join(problems))

    @property
    def asked(self) -> tuple[int | None, int | None, int | None]:
        return self.train, self.valid, self.test
