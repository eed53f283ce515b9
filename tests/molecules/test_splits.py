"""Which molecules are ID and which OOD, how many, in which order, and leaks. Most facts are made up, without RDKit."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from brimful.errors import BadData, BadOption
from brimful.molecules.dataset import Molecules
from brimful.molecules.spec import DatasetSpec
from brimful.molecules.splits import (
    Parts,
    Split,
    check_leaks,
    frequent_from,
    grouped,
    leaks,
    make_split,
    pools_of,
    salts,
    trimmed,
)

from . import support


def made(canonical=None, *, scaffold=None, atoms=None, **columns) -> Molecules:
    """Molecules with these facts; what is not given does not differ, and each is a molecule of its own."""
    count = len(canonical or scaffold or atoms or next(iter(columns.values())))
    names = canonical or [f"M{number}" for number in range(count)]
    arrays = {name: np.array(values, dtype=None if _numbers(values) else object) for name, values in columns.items()}
    return support.molecules(names, columns=arrays, source="here.csv", scaffold=scaffold, atoms=atoms)


def _numbers(values: list[object]) -> bool:
    return all(isinstance(value, int | float) for value in values)


def options(kind: str, **more) -> DatasetSpec:
    return DatasetSpec(name="here", file=Path("here.csv"), split=kind, **more)


# 20 molecules of one scaffold, 10 of another, 10 scaffolds of two molecules, 10 of one.
SCAFFOLDS = [*["big"] * 20, *["mid"] * 10, *(f"two{n // 2}" for n in range(20)), *(f"one{n}" for n in range(10))]


def test_frequent_scaffolds_are_id_and_rare_ones_ood() -> None:
    sides = pools_of(made(scaffold=SCAFFOLDS), options("scaffold"))
    assert {SCAFFOLDS[place] for place in sides.id} == {"big", "mid"}
    assert len(sides.ood) == 30


@pytest.mark.parametrize(
    ("counts", "level"),
    [
        ({"a": 5, "b": 5}, None),
        ({"a": 5}, None),
        ({}, None),
        ({"a": 1, "b": 3}, 3),
        ({"a": 1, "b": 1, "c": 2, "d": 9}, 9),
    ],
)
def test_the_threshold_leaves_the_smaller_side_largest(counts: dict[str, int], level: int | None) -> None:
    assert frequent_from(name for name, count in counts.items() for _ in range(count)) == level


def test_scaffolds_of_one_frequency_are_never_separated() -> None:
    sides = pools_of(made(scaffold=SCAFFOLDS), options("scaffold"))
    counts = {name: SCAFFOLDS.count(name) for name in SCAFFOLDS}
    assert min(counts[SCAFFOLDS[place]] for place in sides.id) > max(counts[SCAFFOLDS[place]] for place in sides.ood)


def test_molecules_without_a_ring_are_left_out_of_a_scaffold_split() -> None:
    split = make_split(made(scaffold=[*SCAFFOLDS, *[""] * 7]), options("scaffold"))
    assert split.used().max() < len(SCAFFOLDS)
    assert "7 molecules left out: without a ring, hence without a scaffold" in split.remarks


@settings(max_examples=60, deadline=None)
@given(
    sizes=st.lists(st.integers(1, 9), min_size=6, max_size=60),
    seed=st.integers(0, 3),
    acyclic=st.integers(0, 5),
)
def test_no_scaffold_split_leaks_whatever_the_scaffolds(sizes: list[int], seed: int, acyclic: int) -> None:
    scaffolds = [f"s{number}" for number, size in enumerate(sizes) for _ in range(size)] + [""] * acyclic
    molecules = made(scaffold=scaffolds)
    try:
        split = make_split(molecules, options("scaffold", split_seed=seed))
    except BadData as error:  # too few of a side: the only way out
        assert "too few" in str(error) or "equally often" in str(error)
        return
    parts = [set(molecules.facts.scaffold[places]) for places in (*split.parts().values(),)]
    assert not (parts[0] | parts[1] | parts[2]) & (parts[3] | parts[4] | parts[5])
    assert not parts[3] & parts[4] and not parts[3] & parts[5] and not parts[4] & parts[5]
    assert split.id.sizes == split.ood.sizes
    assert len(split.used()) == 2 * sum(split.id.sizes)


def test_a_size_split_has_no_atom_count_on_both_sides() -> None:
    molecules = made(atoms=[5 + number % 17 for number in range(200)])
    split = make_split(molecules, options("size"))
    smallest_id = min(
        molecules.facts.heavy_atoms[places].min() for places in (split.id.train, split.id.valid, split.id.test)
    )
    assert (
        smallest_id
        > max(
            molecules.facts.heavy_atoms[places].max() for places in (split.ood.train, split.ood.valid, split.ood.test)
        )
        + 1
    )


@pytest.mark.parametrize("atoms", [[7] * 80 + [8] * 20, [6] * 20 + [7] * 80])
def test_a_size_split_of_two_sizes_takes_one_each(atoms: list[int]) -> None:
    molecules = made(atoms=atoms)
    split = make_split(molecules, options("size"))
    assert set(molecules.facts.heavy_atoms[split.id.train]) == {max(atoms)}
    assert set(molecules.facts.heavy_atoms[split.ood.train]) == {min(atoms)}


def test_a_column_splits_by_the_values_named_whether_written_as_number_or_text() -> None:
    molecules = made(assay=[0.0, 1.0, 2.0, float("nan")] * 20)
    for named in ((2,), ("2",), (2.0,)):
        split = make_split(molecules, options("column", column="assay", ood=named))
        assert set(molecules.columns["assay"][split.ood.train]) == {2.0}
        assert set(molecules.columns["assay"][split.used()]) == {0.0, 1.0, 2.0}
    assert "20 molecules left out: without a value of 'assay'" in split.remarks


def test_a_column_without_named_values_takes_the_rare_ones() -> None:
    molecules = made(assay=["a"] * 40 + ["b"] * 10 + ["c"] * 9)
    split = make_split(molecules, options("column", column="assay"))
    assert set(molecules.columns["assay"][split.id.train]) == {"a"}


def test_ood_parts_share_no_value_of_a_column_where_there_are_enough() -> None:
    assays = ["common"] * 100 + [f"rare{number // 4}" for number in range(100)]
    molecules = made(assay=assays)
    split = make_split(molecules, options("column", column="assay", train=20, valid=8, test=12))
    values = [set(molecules.columns["assay"][places]) for places in (split.ood.train, split.ood.valid, split.ood.test)]
    assert not values[0] & values[1] and not values[0] & values[2] and not values[1] & values[2]
    assert "no two OOD parts share a value of 'assay'" in split.remarks


def test_three_large_values_go_to_one_part_each() -> None:
    molecules = made(assay=["a"] * 99 + ["b"] * 11 + ["c"] * 12 + ["d"] * 30)
    spec = options("column", column="assay", ood=("b", "c", "d"), train=25, valid=10, test=10)
    split = make_split(molecules, spec)
    assert [set(molecules.columns["assay"][getattr(split.ood, name)]) for name in ("train", "valid", "test")] == [
        {"d"},
        {"c"},
        {"b"},
    ]


def test_the_order_of_groups_depends_on_their_names_and_the_seed() -> None:
    names = np.array([f"g{number // 3}" for number in range(30)], dtype=object)
    orders = [
        [names[group[0]] for group in grouped(places, names, seed, "x")]
        for places, seed in ((np.arange(30), 0), (np.arange(30)[::-1], 0), (np.arange(30), 1))
    ]
    assert orders[0] == orders[1] != orders[2]
    assert orders[0] != sorted(orders[0])


def test_ood_parts_that_must_share_a_value_get_a_remark() -> None:
    split = make_split(made(assay=["a"] * 40 + ["b"] * 30), options("column", column="assay"))
    assert "the OOD parts share values of 'assay': there are too few to separate them" in split.remarks


def test_a_molecule_with_values_of_both_sides_is_on_neither() -> None:
    names = [f"M{number}" for number in range(40)]
    molecules = made(canonical=[*names, "M0"], assay=["a"] * 20 + ["b"] * 20 + ["b"])
    split = make_split(molecules, options("column", column="assay", ood=("b",)))
    assert "M0" not in molecules.facts.canonical[split.used()]
    assert "1 molecule left out: with values of both sides" in split.remarks


@pytest.mark.parametrize("kind", ["scaffold", "size", "random"])
def test_a_repeated_molecule_counts_once(kind: str) -> None:
    names = [f"M{number}" for number in range(60)]
    molecules = made(canonical=names * 2, scaffold=SCAFFOLDS * 2, atoms=[*range(3, 63)] * 2)
    split = make_split(molecules, options(kind))
    assert split.used().max() < 60
    assert "60 molecules left out: in the file before" in split.remarks


def test_a_random_split_takes_molecules_of_every_kind_on_both_sides() -> None:
    molecules = made(atoms=[5, 25] * 200)
    split, sides = make_split(molecules, options("random")), pools_of(molecules, options("random"))
    assert all(150 < len(side) < 250 for side in (sides.id, sides.ood))
    for places in split.parts().values():
        assert 0.2 < (molecules.facts.heavy_atoms[places] == 5).mean() < 0.8


@pytest.mark.parametrize("kind", ["scaffold", "size", "random"])
def test_the_same_seed_gives_the_same_split_and_another_one_another(kind: str) -> None:
    molecules = made(scaffold=SCAFFOLDS * 3, atoms=[*range(3, 63)] * 3)
    first, again, other = (make_split(molecules, options(kind, split_seed=seed)) for seed in (4, 4, 5))
    assert [p.tolist() for p in first.parts().values()] == [p.tolist() for p in again.parts().values()]
    assert [p.tolist() for p in first.parts().values()] != [p.tolist() for p in other.parts().values()]


@pytest.mark.parametrize("kind", ["scaffold", "size", "random"])
def test_the_order_of_the_file_does_not_change_the_parts(kind: str) -> None:
    molecules = made(scaffold=SCAFFOLDS * 3, atoms=[*range(3, 63)] * 3)
    mixed = np.random.default_rng(0).permutation(len(molecules))
    one = make_split(molecules, options(kind))
    other = make_split(molecules.take(mixed), options(kind))
    for name, places in one.parts().items():
        assert set(molecules.facts.canonical[places]) == set(molecules.take(mixed).facts.canonical[other.parts()[name]])


def test_usual_sizes_are_the_most() -> None:
    split = make_split(made(atoms=[5] * 5000 + [25] * 5000), options("size"))
    assert split.id.sizes == split.ood.sizes == (2000, 600, 1000)
    assert any("train, valid, test by default: the usual number" in remark for remark in split.remarks)


def test_a_small_side_is_divided_in_the_same_proportions() -> None:
    split = make_split(made(atoms=[5] * 36 + [25] * 400), options("size"))
    assert split.id.sizes == split.ood.sizes == (20, 6, 10)
    assert any("in proportion to the smaller side" in remark for remark in split.remarks)


def test_requested_sizes_are_kept_and_the_others_use_the_rest() -> None:
    split = make_split(made(atoms=[5] * 50 + [25] * 400), options("size", train=34, valid=6))
    assert split.ood.sizes == (34, 6, 10)


@pytest.mark.parametrize(
    ("requested", "named"),
    [({"train": 60}, "train 60"), ({"train": 30, "valid": 10, "test": 11}, "train 30, valid 10, test 11")],
)
def test_more_molecules_than_available_are_refused(requested: dict[str, int], named: str) -> None:
    with pytest.raises(BadData, match=f"the size split has 400 ID and 50 OOD molecules, too few for {named}[.]"):
        make_split(made(atoms=[5] * 50 + [25] * 400), options("size", **requested))


def test_scaffolds_that_do_not_allow_the_sizes_are_refused() -> None:
    scaffolds = ["big"] * 100 + [f"rare{number // 10}" for number in range(30)]
    with pytest.raises(BadData, match="its 3 OOD scaffolds do not allow 29 molecules in three parts"):
        make_split(made(scaffold=scaffolds), options("scaffold", train=15, valid=4, test=10))


@pytest.mark.parametrize(
    ("requested", "molecules", "says"),
    [
        ({"kind": "scaffold"}, {"scaffold": ["a", "b", "c"] * 9}, "all its scaffolds occur equally often"),
        ({"kind": "scaffold"}, {"scaffold": [""] * 9}, "none of its molecules has a ring"),
        ({"kind": "size"}, {"atoms": [4] * 9}, "all molecules have 4 heavy atoms"),
        ({"kind": "random"}, {"atoms": [4] * 2}, "too few for training, validation and testing"),
        ({"kind": "column", "column": "assay"}, {"assay": ["a"] * 9}, "no value of the column 'assay' is rarer"),
        ({"kind": "column", "column": "assay"}, {"assay": [""] * 9}, "no value of the column 'assay' is rarer"),
    ],
)
def test_molecules_with_one_side_only_are_refused(
    requested: dict[str, str], molecules: dict[str, list[object]], says: str
) -> None:
    with pytest.raises(BadData, match=says):
        make_split(made(**molecules), options(**requested))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("ood", "says"),
    [(("z",), "has no value 'z'. Try: some of a \\(9\\), b \\(5\\)"), (("a", "b"), "has no value left for ID")],
)
def test_ood_values_that_are_missing_or_all_are_refused(ood: tuple[str, ...], says: str) -> None:
    with pytest.raises(BadOption, match=says):
        make_split(made(assay=["a"] * 9 + ["b"] * 5), options("column", column="assay", ood=ood))


def test_a_missing_column_is_refused_with_a_list() -> None:
    with pytest.raises(BadOption, match="no column 'asay' to split by. Try: one of assay"):
        make_split(made(assay=["a", "b"]), options("column", column="asay"))


def six(*places: list[int], kind: str = "random") -> Split:
    parts = [np.array(one) for one in places]
    return Split(
        kind=kind,
        id=Parts(train=parts[0], valid=parts[1], test=parts[2]),
        ood=Parts(train=parts[3], valid=parts[4], test=parts[5]),
    )


CLEAN = ([0], [1], [2], [3], [4], [5])


@pytest.mark.parametrize("pair", [(0, 1), (0, 5), (2, 3), (4, 5)])
def test_a_molecule_in_two_parts_is_an_error_that_names_it(pair: tuple[int, int]) -> None:
    names = [f"M{number}" for number in range(6)]
    names[pair[1]] = names[pair[0]]
    with pytest.raises(BadData, match=f"leaks: 1 molecule is in .* and in .*, such as '{names[pair[0]]}'"):
        check_leaks(six(*CLEAN), made(canonical=names).facts)


@pytest.mark.parametrize("pair", [(0, 3), (2, 5), (3, 4), (4, 5)])
def test_a_scaffold_where_it_must_not_be_is_an_error(pair: tuple[int, int]) -> None:
    scaffolds = ["big", "big", "big", "x", "y", "z"]
    scaffolds[pair[1]] = scaffolds[pair[0]]
    with pytest.raises(BadData, match="this scaffold split leaks: 1 scaffold is in"):
        check_leaks(six(*CLEAN, kind="scaffold"), made(scaffold=scaffolds).facts)


def test_id_parts_may_share_scaffolds_and_no_ring_is_no_scaffold() -> None:
    molecules = made(scaffold=["big", "big", "", "x", "", ""])
    checked = check_leaks(six(*CLEAN, kind="scaffold"), molecules.facts)
    assert checked == ("checked: no molecule in two parts, no scaffold on both sides or in two OOD parts",)


def test_salts_and_charge_states_in_two_parts_are_counted_and_no_error() -> None:
    names = ["C=C(C)C(=O)[O-]", "CCN", "CC(=O)O", "C=C(C)C(=O)O", "CCN.Cl", "CC(=O)[O-].[Na+]"]
    clean, remark = check_leaks(six(*CLEAN), made(canonical=names).facts)
    assert clean == "checked: no molecule in two parts"
    assert remark == (
        "3 molecules are in two parts as another salt or charge state, "
        "such as 'C=C(C)C(=O)O' in OOD train and 'C=C(C)C(=O)[O-]' in ID train"
    )
    same_part = six([0, 3], [1, 4], [2, 5], [6], [7], [8])
    others = ["O=[N+]([O-])c1ccccc1", "c1ccc(-c2ccccc2)cc1", "C[N+](C)(C)C"]
    assert salts(same_part, made(canonical=[*names, *others]).facts) == ()


def test_a_repeated_salt_is_no_other_salt() -> None:
    molecules = made(canonical=["CCN.Cl", "CCN.Cl", "C", "CC", "CCC", "CCCC"])
    assert salts(six(*CLEAN), molecules.facts) == ()


def test_an_atom_count_on_both_sides_of_a_size_split_is_an_error() -> None:
    molecules = made(atoms=[9, 9, 8, 7, 8, 6])
    assert leaks(six(*CLEAN, kind="size"), molecules.facts) == (
        "1 heavy-atom count is in ID test and in OOD valid, such as 8",
    )
    assert leaks(six(*CLEAN, kind="random"), molecules.facts) == ()


def test_trimmed_draws_the_requested_number_of_each_part() -> None:
    facts = made(atoms=list(range(100))).facts
    split = six(*(list(range(start, start + 15)) for start in range(0, 90, 15)), kind="assay")
    small = trimmed(split, facts, options("published", train=10, test=5))
    assert small.id.sizes == small.ood.sizes == (10, 15, 5)
    assert all(set(places) <= set(split.parts()[name]) for name, places in small.parts().items())
    assert small.remarks == ("drawn from each side: train 10, test 5",)
    with pytest.raises(BadData, match="too few molecules for train 16: ID train has 15, OOD train has 15"):
        trimmed(split, facts, options("published", train=16))


def test_empty_molecules_are_refused() -> None:
    molecules = made(atoms=[4])
    with pytest.raises(BadData, match="no molecules to split"):
        make_split(molecules.take([]), options("random"))


def test_the_remarks_say_what_was_checked() -> None:
    molecules = made(scaffold=SCAFFOLDS)
    split = make_split(molecules, options("scaffold"))
    assert split.remarks[-1] == check_leaks(replace(split, remarks=()), molecules.facts)[0]
