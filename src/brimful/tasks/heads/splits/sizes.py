"""How many molecules of each side are for training, validation and testing.

What was asked for is given or refused. Where nothing was asked for, both sides get the same numbers, in the proportions
of the published experiments (2000 : 600 : 1000), no more than those, and no more than the smaller side has.
"""

from dataclasses import replace

from brimful.errors import BadData
from brimful.tasks.heads.molecules.facts import Facts
from brimful.tasks.heads.splits.deal import in_order
from brimful.tasks.heads.splits.options import SplitOptions
from brimful.tasks.heads.splits.split import PARTS, Part, Split

USUAL = (2000, 600, 1000)
Sizes = tuple[int, int, int]


def sizes_for(
    options: SplitOptions, *, id_count: int, ood_count: int, spare: int = 0, source: str
) -> tuple[Sizes, str]:
    """The numbers for each side, and the sentence that says so. A share leaves `spare` molecules of a side alone."""
    room = min(id_count, ood_count) - sum(count or 0 for count in options.asked)
    free = [name for name, count in zip(PARTS, options.asked, strict=True) if count is None]
    usual = sum(count for name, count in zip(PARTS, USUAL, strict=True) if name in free)
    share = min(1.0, (room - spare) / usual) if free else 1.0
    sizes = tuple(count or int(most * share) for most, count in zip(USUAL, options.asked, strict=True))
    if room < 0 or min(sizes) < 1:
        raise BadData(
            f"{source}: the {options.kind} split finds {id_count:,} ID and {ood_count:,} OOD molecules, too few for "
            f"{_told(options.asked)}; lower the numbers or take another split"
        )
    how = "the usual number" if share == 1 else "a share of the smaller side"
    why = f" ({', '.join(free)} by default: {how})" if free else ""
    train, valid, test = sizes
    return (train, valid, test), (
        f"each side has {train:,} training, {valid:,} validation and {test:,} test molecules{why}"
    )


def trimmed(
    split: Split,
    facts: Facts,
    *,
    train: int | None = None,
    valid: int | None = None,
    test: int | None = None,
    seed: int = 0,
) -> Split:
    """A published split with as many molecules of each part as asked for; parts that were not asked for stay whole."""
    asked = (train, valid, test)
    wanted = dict(zip(split.parts(), asked * 2, strict=True))
    short = [f"{name} has {len(at):,}" for name, at in split.parts().items() if len(at) < (wanted[name] or 0)]
    if short:
        raise BadData(f"this published split has too few molecules for {_told(asked)}: {', '.join(short)}; lower it")
    if not any(asked):
        return split
    drawn = {
        name: in_order(places, facts.canonical, seed, name)[: wanted[name]] for name, places in split.parts().items()
    }
    sides = {side: Part(**{name: drawn[f"{side} {name}"] for name in PARTS}) for side in ("ID", "OOD")}
    return replace(
        split, id=sides["ID"], ood=sides["OOD"], remarks=(*split.remarks, f"drawn of each side: {_told(asked)}")
    )


def _told(asked: tuple[int | None, ...]) -> str:
    """`train 2,000, test 1,000`."""
    named = [f"{name} {count:,}" for name, count in zip(PARTS, asked, strict=True) if count is not None]
    return ", ".join(named) or "training, validation and testing"
