import random

import pytest

from brimful.memory.graphs import signature
from brimful.memory.layout import LAYOUTS, PACKED, PADDED, FixedSize, PackedLayout, packed_sizes
from brimful.packing.sequence import boundaries
from tests.packing.small import Lines, draw_rows


def draw_shapes(seed, count=100):
    rng = random.Random(seed)
    return [(rng.randint(1, 60), rng.randint(1, 256)) for _ in range(count)]


def work(rows, shape, whole=False):
    return rows * (1 + sum(shape))


@pytest.mark.parametrize("name", LAYOUTS)
@pytest.mark.parametrize("budget", [300, 2000, 9000, 10**9])
def test_every_row_comes_once_and_what_can_fit_fits(name, budget):
    layout, shapes = LAYOUTS[name], draw_shapes(0)
    groups = layout.split(shapes, work, budget)
    assert sorted(row for group in groups for row in group) == list(range(100))
    for group in groups:
        assert len(group) == 1 or work(len(group), layout.shape([shapes[row] for row in group])) <= budget


def test_packed_micro_batches_are_few_and_equally_full():
    shapes = draw_shapes(1)
    groups = PACKED.split(shapes, work, 6000)
    loads = [sum(sum(shapes[row]) for row in group) for group in groups]
    assert len(groups) == -(-work(100, PACKED.shape(shapes)) // 6000)
    assert max(loads) - min(loads) <= 316


def dealt(shapes, parts, most):
    """Divide rows into parts: the longest first, each to the part with the fewest tokens."""
    groups = [[] for _ in range(parts)]
    for shape in sorted(shapes, key=sum, reverse=True):
        open_groups = [group for group in groups if len(group) < most]
        min(open_groups, key=lambda group: sum(1 + sum(one) for one in group)).append(shape)
    return groups


@pytest.mark.parametrize("most", [60, 7])
@pytest.mark.parametrize("seed", range(8))
def test_packed_micro_batches_are_the_fewest_that_fit(seed, most):
    """Fewer were tried one by one."""
    shapes, budget = [(source, target**2) for source, target in draw_shapes(seed, 60)], 80_000 + 20_000 * seed
    fits = lambda rows: work(len(rows), PACKED.shape(rows)) <= budget  # noqa: E731
    groups = [[shapes[row] for row in group] for group in PACKED.split(shapes, work, budget, max_rows=most)]
    fitting = [group for group in groups if fits(group)]
    together = [shape for group in fitting for shape in group]
    fewer = range(-(-len(together) // most), len(fitting))
    assert not any(all(map(fits, dealt(together, parts, most))) for parts in fewer)


def test_a_packed_step_in_many_micro_batches_is_split_in_few_attempts():
    """Each attempt deals all rows."""

    class Counted(list):
        reads = 0

        def __getitem__(self, place):
            self.reads += 1
            return super().__getitem__(place)

    shapes = Counted(draw_shapes(3, 1000))
    assert len(PACKED.split(shapes, work, 1500)) > 100
    assert shapes.reads < 60 * len(shapes)


def test_packed_rows_take_fewer_micro_batches_than_padded_ones():
    shapes = draw_shapes(2)
    assert len(PACKED.split(shapes, work, 6000)) < len(PADDED.split(shapes, work, 6000))


def test_no_packed_micro_batch_has_more_rows_than_allowed():
    """Two long rows and many short ones, which would all go where the long ones are not."""
    sizes = [*map(len, PACKED.split([(1, 5000)] * 2 + [(1, 1)] * 98, work, 10**9, max_rows=30))]
    assert max(sizes) <= 30
    assert len(sizes) == 4


def test_rows_times_the_shape_is_what_is_computed():
    shapes = [(4, 2), (100, 2), (4, 30)]
    assert PADDED.shape(shapes) == (100, 30)
    assert PACKED.shape(shapes) == (-(-128 // 3), -(-64 // 3))


def test_padded_positions_are_those_of_rows_as_long_as_the_longest():
    assert PADDED.positions([(4, 2), (100, 2), (4, 30)]) == 3 * (100 + 30)


def test_packed_positions_are_the_tokens_and_the_fill():
    assert PACKED.positions([(4, 2), (100, 2), (4, 30)]) == 128 + 64


@pytest.mark.parametrize(("rows", "positions"), [(2, 256 + 512), (20, 128 + 2048)], ids=["fits", "too many rows"])
def test_a_fixed_size_is_computed_whole_by_what_fits_into_it(rows, positions):
    layout = PackedLayout(FixedSize(tokens=(256, 512), rows=8))
    assert layout.positions([(4, 100)] * rows) == positions


def test_a_packed_sequence_is_filled_up_by_little():
    for tokens in range(1, 40_000, 37):
        (size,) = packed_sizes([(tokens,)])
        assert tokens <= size <= max(64, tokens * 1.07 + 64)
        assert size % 64 == 0


def test_packed_sequences_have_few_sizes():
    assert len({packed_sizes([(tokens,)]) for tokens in range(16_384, 32_768)}) <= 17


def test_sizes_are_shown_as_a_reader_counts_them():
    assert PADDED.show(16, (20, 56)) == "16 rows of 20+56"
    assert PACKED.show(16, (20, 56)) == "16 rows with 320+896 tokens"


# A fixed size, for CUDA graphs


def test_micro_batches_of_a_fixed_size_have_the_same_tensors():
    layout, task = PackedLayout(FixedSize((512,), 20)), Lines()
    batches = [layout.collate(task, draw_rows(count, seed=count)) for count in (3, 7, 12)]
    assert len({signature(batch) for batch in batches}) == 1


def test_added_rows_and_tiles_change_nothing():
    task, rows = Lines(), draw_rows(7)
    model = task.model().double().eval()
    plain, fixed = (layout.collate(task, rows) for layout in (PACKED, PackedLayout(FixedSize((512,), 20))))
    sums = [float(task.loss(model, batch).sum) for batch in (plain, fixed)]
    assert sums[0] == pytest.approx(sums[1], rel=1e-12)


class Twice(Lines):
    """Each row is two in the sequence, as the replies of a preference pair are."""

    def pack(self, rows, tokens):
        lengths = [part for row in rows for part in (len(row) // 2, len(row) - len(row) // 2)]
        return {"packed_rows": boundaries(lengths, *tokens)}


def test_a_row_that_is_several_in_the_sequence_has_room_for_all_of_them():
    layout, task = PackedLayout(FixedSize((512,), 20)), Twice()
    assert {layout.collate(task, draw_rows(count)).get("packed_rows").rows for count in (3, 12, 20)} == {40}
    assert len({signature(layout.collate(task, draw_rows(count))) for count in (3, 12, 20)}) == 1


def test_an_example_has_a_row_also_where_the_mean_row_is_beyond_the_fixed_size():
    layout = PackedLayout(FixedSize((64,), 20))
    assert layout.example(Lines(), 8, (100,))["packed_rows"].rows == 1


def test_rows_beyond_the_fixed_size_have_their_own():
    layout, task = PackedLayout(FixedSize((64,), 3)), Lines()
    few, many = draw_rows(3), draw_rows(4)
    assert layout.fixed.holds([(len(row),) for row in few]) and not layout.fixed.holds([(1,)] * 4)
    assert signature(layout.collate(task, many)) == signature(PACKED.collate(task, many))


def test_a_step_beyond_the_fixed_size_is_split():
    shapes = [(30,)] * 10
    cheap = lambda rows, shape, *, whole=False: 0.0  # noqa: E731
    assert PACKED.split(shapes, cheap, 1.0) == [list(range(10))]
    groups = PackedLayout(FixedSize((192,), 20)).split(shapes, cheap, 1.0)
    assert sorted(map(len, groups)) == [5, 5]


def test_a_micro_batch_that_is_filled_up_costs_what_the_fixed_size_does():
    layout = PackedLayout(FixedSize((512, 1000), 20))
    assert layout.fixed.shape == (26, 50)
    assert layout.shape([(10, 20)] * 2) == (256, 500)
    assert layout.shape([(300, 20)] * 2) == PACKED.shape([(300, 20)] * 2)


def test_a_row_beyond_the_fixed_size_comes_alone():
    groups = PackedLayout(FixedSize((192,), 20)).split([(30,), (500,), (30,)], lambda *_, whole=False: 0.0, 1.0)
    assert sorted(groups) == [[0, 2], [1]]
