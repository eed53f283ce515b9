"""A split from molecules and options: sides, sizes, the deal, and a look for leaks."""

from dataclasses import replace

from brimful.errors import BadData
from brimful.tasks.heads.molecules.facts import Facts
from brimful.tasks.heads.molecules.molecules import Molecules
from brimful.tasks.heads.splits.deal import deal, deal_few, deal_groups, grouped, in_order
from brimful.tasks.heads.splits.leakage import check_leakage
from brimful.tasks.heads.splits.options import SplitOptions
from brimful.tasks.heads.splits.sides import sides_of
from brimful.tasks.heads.splits.sizes import Sizes, sizes_for
from brimful.tasks.heads.splits.split import PARTS, Part, Places, Split


def make_split(molecules: Molecules, facts: Facts, options: SplitOptions) -> Split:
    """Deterministic: the same molecules and options give the same six lists."""
    if not len(molecules):
        raise BadData(f"{molecules.source} has no molecules to split")
    sides = sides_of(molecules, facts, options)
    ordered = in_order(sides.ood, facts.canonical, options.seed, "OOD")
    groups = grouped(ordered, sides.groups, options.seed, "OOD groups") if sides.groups is not None else None
    sizes, told = sizes_for(
        options,
        id_count=len(sides.id),
        ood_count=len(sides.ood),
        spare=_spare(options, groups),
        source=molecules.source,
    )
    ood, how = _deal_ood(ordered, groups, sizes, options, molecules.source)
    ids = deal(in_order(sides.id, facts.canonical, options.seed, "ID"), sizes)
    made = Split(kind=options.kind, id=ids, ood=ood, remarks=(*sides.remarks, told, *how))
    return replace(made, remarks=(*made.remarks, *check_leakage(made, facts)))


def _spare(options: SplitOptions, groups: list[Places] | None) -> int:
    """What cutting groups can lose at most: each part cuts one of them, and keeps at least one molecule of it."""
    return len(PARTS) * (max(map(len, groups), default=1) - 1) if options.kind == "scaffold" and groups else 0


def _deal_ood(
    ordered: Places, groups: list[Places] | None, sizes: Sizes, options: SplitOptions, source: str
) -> tuple[Part, tuple[str, ...]]:
    """By groups where there are any. A column may have too few values for that, scaffolds may not."""
    if groups is None:
        return deal(ordered, sizes), ()
    by_scaffold = options.kind == "scaffold"
    dealt = deal_groups(groups, sizes) or (None if by_scaffold else deal_few(groups, sizes))
    if dealt is not None:  # scaffolds are looked for again by the leak check, which then says so
        return dealt, () if by_scaffold else (f"no two OOD parts share a value of {options.column!r}",)
    if by_scaffold:
        raise BadData(
            f"{source}: its {len(groups):,} OOD scaffolds do not allow {sum(sizes):,} molecules in three parts that share "
            "none; lower train, valid and test a little"
        )
    return deal(ordered, sizes), (f"the OOD parts share values of {options.column!r}: there are too few to part them",)
