"""The ceiling: every failure makes the cut finer, a bounded number of times; every lowering is undone when it may be."""

import json
import math
from itertools import pairwise

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from brimful.memory.model import MemoryModel, Polynomial
from brimful.step.interface import GROW_AFTER
from brimful.step.recovery import LONGEST_WAIT, MOST_RAISED, SELDOM, Ceiling, Lowered


def model_of(reserved_ratio=1.0, margin=1.0, **phases) -> MemoryModel:
    """Bytes of each phase: a constant, and so much for each row."""
    return MemoryModel(
        phases={
            name: Polynomial({(0,): float(fixed), (1,): float(per_row)}) for name, (fixed, per_row) in phases.items()
        },
        margin=margin,
        reserved_ratio=reserved_ratio,
        error=0.0,
        probes=(),
    )


def line(fixed=100, per_row=10) -> MemoryModel:
    return model_of(forward=(fixed, per_row))


FLAT = model_of(forward=(100, 10), optimizer=(10_000, 0))
"""The optimizer sets the peak, and it does not care how many rows there are."""


def tight(model: MemoryModel, rows: int, **options) -> Ceiling:
    """A ceiling that lets just so many rows through."""
    ceiling = Ceiling(model=model, limit=math.inf, **options)
    ceiling.limit = ceiling.measure(rows, ())
    return ceiling


def largest(ceiling: Ceiling, rows: int) -> int:
    return max(len(group) for group in ceiling.cut([()] * rows))


def fail(ceiling: Ceiling, rows: int, shape=(), *, whole=False, room=None, again=False) -> str:
    return ceiling.failed(rows, shape, whole=whole, room_bytes=room, again=again)


def fail_until_one_row_is_left(ceiling: Ceiling, shapes: list, room: int | None) -> int:
    """Whatever has more than one row runs out of memory, the largest first. Returns how often."""
    tries = 0
    while True:
        groups = ceiling.cut(shapes)
        broken = next((group for group in groups if len(group) > 1), None)
        if broken is None:
            return tries
        tries += 1
        assert tries < 200, "this would never end"
        padded = tuple(max(lengths) for lengths in zip(*(shapes[row] for row in broken), strict=True))
        fail(ceiling, len(broken), padded, whole=len(groups) == 1, room=room, again=tries > 1)


def waits(ceiling: Ceiling, growths: int, room: int | None, failures: int = 1) -> list[int]:
    """Clean steps before each of so many growths, every one of which fails at its first step."""
    found = []
    for _ in range(growths):
        for attempt in range(failures):
            fail(ceiling, largest(ceiling, 64), room=room, again=attempt > 0)
        before, steps = ceiling.limit, 0
        while ceiling.limit <= before:
            ceiling.clean(room)
            steps += 1
            assert steps < 10_000, "it never grew"
        found.append(steps)
    return found


rooms = st.none() | st.integers(-1000, 100_000)
phases = st.tuples(st.integers(1, 10**6), st.integers(0, 10**5))
models = st.builds(
    model_of, forward=phases, optimizer=phases, reserved_ratio=st.floats(1, 1.4), margin=st.floats(1, 1.4)
)
"""Any in which a whole step costs what its rows cost."""
models_with_whole_steps = st.builds(model_of, first_forward=phases, forward=phases, optimizer=phases)


# What is measured


@pytest.mark.parametrize("rows", [1, 2, 100])
def test_a_row_more_measures_more_even_where_the_optimizer_sets_the_peak(rows):
    ceiling = Ceiling(model=FLAT, limit=math.inf)
    assert FLAT.cost_bytes(rows, ()) == FLAT.cost_bytes(rows + 1, ())
    assert ceiling.measure(rows, ()) < ceiling.measure(rows + 1, ())


def test_without_a_memory_model_padded_work_is_measured():
    assert Ceiling(model=None, limit=math.inf).measure(3, (10, 4)) == 45


def test_what_the_run_taught_raises_what_is_predicted():
    ceiling = Ceiling(model=line(), limit=math.inf, correction=1.5)
    assert ceiling.predicted_bytes(8, ()) == 270


def test_nothing_is_predicted_without_a_memory_model():
    ceiling = Ceiling(model=None, limit=math.inf)
    assert ceiling.predicted_bytes(8, ()) is None
    assert ceiling.peak_bytes([(8, ())]) is None


def test_the_peak_of_a_step_is_that_of_its_costliest_micro_batch():
    ceiling = Ceiling(model=line(), limit=math.inf, correction=2.0)
    assert ceiling.peak_bytes([(3, ()), (8, ()), (5, ())]) == 360


def test_only_a_step_of_one_micro_batch_is_predicted_as_whole():
    model = model_of(first_forward=(100, 10), forward=(500, 10))
    ceiling = Ceiling(model=model, limit=math.inf)
    assert ceiling.peak_bytes([(8, ())]) == 180
    assert ceiling.peak_bytes([(8, ()), (8, ())]) == 580


def test_the_peak_is_allocated_bytes_and_the_prediction_reserved_ones():
    ceiling = Ceiling(model=model_of(reserved_ratio=1.1, forward=(100, 10)), limit=math.inf)
    assert ceiling.peak_bytes([(10, ())]) == 200
    assert ceiling.predicted_bytes(10, ()) == 220


# Cutting


def test_without_a_limit_a_step_is_tried_whole():
    assert Ceiling(model=None, limit=math.inf).cut([(5,)] * 100) == [list(range(100))]


@given(models, st.integers(1, 60), st.integers(1, 60), st.integers(1, 20))
@settings(max_examples=40)
def test_never_more_rows_than_the_user_fixed(model, rows, planned, most):
    ceiling = tight(model, planned, most=most)
    assert largest(ceiling, rows) <= most


def test_the_rows_that_the_user_fixed_stay_fixed_through_failures_and_growth():
    ceiling = tight(line(), 32, most=6)
    for _ in range(4):
        fail(ceiling, largest(ceiling, 64))
    for _ in range(10 * GROW_AFTER):
        ceiling.clean(None)
        assert largest(ceiling, 64) <= 6
    assert largest(ceiling, 64) == 6


# Failing


@given(models | st.none(), st.integers(2, 5000), st.floats(1, 3), st.booleans(), rooms)
def test_after_a_second_failure_the_micro_batch_that_failed_is_too_large(model, rows, correction, whole, room):
    ceiling = Ceiling(model=model, limit=math.inf, correction=correction)
    fail(ceiling, rows, whole=whole, room=room, again=True)
    assert ceiling.measure(rows, ()) > ceiling.limit


@given(
    models | models_with_whole_steps, st.integers(2, 5000), st.floats(0.1, 1), st.booleans(), st.integers(-1000, 10**9)
)
def test_where_there_is_less_room_than_predicted_the_micro_batch_that_failed_is_too_large(
    model, rows, fill, whole, room
):
    ceiling = Ceiling(model=model, limit=math.inf, fill=fill)
    assume(ceiling.predicted_bytes(rows, (), whole=whole) > fill * room)
    fail(ceiling, rows, whole=whole, room=room)
    assert ceiling.measure(rows, (), whole=whole) > ceiling.limit


@given(models, st.integers(2, 5000), st.floats(0.1, 0.99), st.floats(1, 50))
def test_where_the_model_was_wrong_the_largest_micro_batch_is_too_large(model, rows, fill, spare):
    ceiling = tight(model, rows, fill=fill)
    room = math.ceil(spare * ceiling.predicted_bytes(rows, ()) / fill)
    fail(ceiling, rows, room=room)
    assert ceiling.measure(rows, ()) > ceiling.limit


def test_where_the_model_was_wrong_a_small_micro_batch_that_failed_is_too_large():
    ceiling = tight(line(), 64)  # 804 bytes
    assert largest(ceiling, 8) == 8
    fail(ceiling, 8, whole=True, room=2000)
    assert largest(ceiling, 8) < 8


def test_a_step_below_the_ceiling_that_failed_for_want_of_room_is_cut():
    ceiling = tight(line(), 64)
    fail(ceiling, 8, whole=True, room=250)  # predicted to take 180 of 212
    assert largest(ceiling, 8) < 8


def test_a_prediction_that_meets_the_room_exactly_is_raised():
    ceiling = tight(line(), 8, fill=1.0)
    fail(ceiling, 8, whole=True, room=180)
    assert largest(ceiling, 8) < 8


BIG_WEIGHTS = model_of(first_forward=(1000, 10), forward=(2000, 10), optimizer=(2000, 0))
"""1,000 bytes of weights and 10 of activations a row: held gradients cost more than all the rows of a step."""


@pytest.mark.parametrize("rows", [2, 8, 100])
def test_a_whole_step_that_failed_is_cut_even_if_its_half_is_predicted_to_take_more(rows):
    ceiling = Ceiling(model=BIG_WEIGHTS, limit=math.inf)
    ceiling.limit = ceiling.measure(rows, (), whole=True)
    fail(ceiling, rows, whole=True)
    assert largest(ceiling, rows) < rows


@given(models | st.none(), st.integers(2, 300), rooms)
@settings(max_examples=60)
def test_one_row_is_reached_within_the_logarithm_of_the_rows(model, rows, room):
    ceiling = Ceiling(model=None, limit=math.inf) if model is None else tight(model, rows, fill=0.9)
    tries = fail_until_one_row_is_left(ceiling, [()] * rows, room)
    assert tries <= 2 + math.ceil(math.log2(rows))


@given(st.lists(st.tuples(st.integers(1, 500), st.integers(1, 500)), min_size=2, max_size=30))
@settings(max_examples=40)
def test_rows_of_very_different_lengths_are_alone_after_the_logarithm_of_their_work(shapes):
    ceiling = Ceiling(model=None, limit=math.inf)
    work = [1 + sum(shape) for shape in shapes]
    padded = len(shapes) * (1 + max(a for a, _ in shapes) + max(b for _, b in shapes))
    tries = fail_until_one_row_is_left(ceiling, shapes, None)
    assert tries <= 2 + math.log(padded / min(work), 1.5)


def test_a_failure_halves_the_rows_where_nothing_else_is_known():
    ceiling = tight(line(), 32)
    sentence = fail(ceiling, 32)
    assert sentence == "micro-batches as long as this one have 16 rows at most"
    assert largest(ceiling, 64) == 16


def test_half_of_an_odd_number_of_rows_is_the_larger_half():
    ceiling = tight(line(), 7)
    fail(ceiling, 7)
    assert largest(ceiling, 64) == 4


def test_a_failure_for_want_of_room_lowers_the_ceiling_to_the_filled_share_of_it():
    ceiling = tight(line(), 64)
    sentence = fail(ceiling, 64, room=600)
    assert sentence == "the device has room for 600 B only, so micro-batches stay within 85% of that"
    assert ceiling.limit == 510
    assert ceiling.correction == 1.0


def test_a_failure_with_room_enough_raises_the_model_to_the_room_that_was_not_enough():
    ceiling = tight(line(0, 10), 64)
    sentence = fail(ceiling, 64, room=800)
    assert sentence == "the memory model was too low and is raised by 25%"
    assert ceiling.predicted_bytes(64, ()) == 800


def test_one_failure_does_not_raise_the_model_by_more_than_half():
    ceiling = tight(line(), 64)
    fail(ceiling, 64, room=10**9)
    assert ceiling.correction == MOST_RAISED == 1.5


def test_the_model_is_raised_once_in_a_step_and_then_rows_are_halved():
    ceiling = tight(line(), 64)
    fail(ceiling, 64, room=2000)
    fail(ceiling, 40, room=2000, again=True)
    assert ceiling.correction == 1.5
    assert largest(ceiling, 64) <= 20


def test_a_single_row_stays_allowed_after_any_failure():
    ceiling = Ceiling(model=None, limit=math.inf)
    fail(ceiling, 1, (10,))
    assert ceiling.limit == ceiling.measure(1, (10,))


def test_a_device_without_any_room_leaves_one_row_at_a_time():
    ceiling = tight(line(), 64)
    fail(ceiling, 64, room=-5000)
    assert ceiling.cut([()] * 3) == [[0], [1], [2]]


@given(models | st.none(), st.integers(2, 1000), st.integers(1, 1000), rooms, st.booleans())
def test_a_failure_never_raises_the_ceiling(model, rows, planned, room, again):
    ceiling = Ceiling(model=None, limit=float(planned)) if model is None else tight(model, planned)
    limit, correction = ceiling.limit, ceiling.correction
    fail(ceiling, rows, room=room, again=again)
    assert ceiling.limit <= limit
    assert ceiling.correction >= correction


# Thrashing, and a model that was too low


@pytest.mark.parametrize(("rows", "left"), [(2, 1), (3, 2), (4, 3), (100, 75)])
def test_thrashing_takes_a_quarter_of_the_rows_and_one_at_least(rows, left):
    ceiling = tight(line(), rows)
    ceiling.thrashing(rows, (), None)
    assert ceiling.measure(left, ()) <= ceiling.limit < ceiling.measure(left + 1, ())


def test_thrashing_is_said_with_the_rows_that_are_left():
    assert tight(line(), 8).thrashing(8, (), None) == "micro-batches as long as the largest have 6 rows at most"


def test_thrashing_is_undone_like_a_failure():
    ceiling = tight(line(), 8)
    ceiling.thrashing(8, (), None)
    for _ in range(GROW_AFTER):
        ceiling.clean(None)
    assert largest(ceiling, 64) == 8


def test_a_whole_step_that_thrashes_is_cut_even_if_its_parts_are_predicted_to_take_more():
    ceiling = Ceiling(model=BIG_WEIGHTS, limit=math.inf)
    ceiling.limit = ceiling.measure(8, (), whole=True)
    ceiling.thrashing(8, (), None, whole=True)
    assert largest(ceiling, 8) < 8


def test_a_growth_that_thrashes_doubles_the_wait():
    ceiling = tight(line(), 8)
    for _ in range(2):
        ceiling.thrashing(8, (), None)
        steps = next(step for step in range(1, 1000) if ceiling.clean(None))
    assert steps == 2 * GROW_AFTER


def test_a_step_that_took_more_than_predicted_raises_the_model_to_what_was_measured():
    ceiling = tight(line(), 8)
    assert ceiling.too_low(189, 180) == "the memory model is raised by 5.0%"
    assert ceiling.predicted_bytes(8, ()) == 189


def test_what_a_clean_step_measured_is_not_forgotten_when_the_cut_grows_back():
    ceiling = tight(line(), 64)
    fail(ceiling, 64)
    ceiling.too_low(110, 100)
    for _ in range(GROW_AFTER):
        ceiling.clean(None)
    assert ceiling.predicted_bytes(64, ()) == pytest.approx(1.1 * line().cost_bytes(64, ()), rel=0.01)


def test_a_model_that_was_a_little_low_does_not_make_the_cut_finer_while_there_is_memory():
    ceiling = tight(line(), 64)
    ceiling.budget = 10 * ceiling.limit
    ceiling.too_low(103, 100)
    assert largest(ceiling, 128) == 64


def test_it_makes_the_cut_finer_where_there_is_none():
    ceiling = tight(line(), 64)
    ceiling.budget = ceiling.limit
    ceiling.too_low(110, 100)
    assert largest(ceiling, 200) < 64


# Growing


def test_a_lowering_is_undone_after_ten_clean_steps_and_not_before():
    ceiling = tight(line(), 64)
    fail(ceiling, 64)
    said = [ceiling.clean(None) for _ in range(10)]
    assert said == [None] * 9 + ["the cut is as coarse as at the start again after 10 clean steps"]


def test_how_many_clean_steps_it_takes_can_be_set():
    ceiling = tight(line(), 64, grow_after=3)
    fail(ceiling, 64)
    assert [bool(ceiling.clean(None)) for _ in range(3)] == [False, False, True]


def test_without_a_reading_of_the_room_one_lowering_is_undone_at_a_time():
    ceiling = tight(line(), 64)
    for rows in (64, 32):
        fail(ceiling, rows)
    seen = []
    for _ in range(2):
        said = [ceiling.clean(None) for _ in range(GROW_AFTER)][-1]
        seen.append((largest(ceiling, 64), said))
    assert seen == [
        (32, "the cut is one step coarser again after 10 clean steps"),
        (64, "the cut is as coarse as at the start again after 10 clean steps"),
    ]


@given(models | st.none(), st.integers(2, 200), st.lists(st.booleans(), min_size=1, max_size=6))
@settings(max_examples=60)
def test_growth_ends_exactly_where_it_started(model, rows, thrashes):
    ceiling = Ceiling(model=None, limit=math.inf) if model is None else tight(model, rows)
    start = (ceiling.limit, ceiling.correction)
    for index, thrash in enumerate(thrashes):
        if thrash:
            ceiling.thrashing(rows, (), None)
        else:
            fail(ceiling, rows, room=None, again=index > 0)
    for _ in range(GROW_AFTER * len(thrashes)):
        ceiling.clean(None)
    assert (ceiling.limit, ceiling.correction, ceiling.lowered) == (*start, [])


def test_a_model_that_was_raised_is_put_back_with_the_ceiling():
    ceiling = tight(line(), 64)
    fail(ceiling, 64, room=5000)
    assert ceiling.correction == 1.5
    for _ in range(GROW_AFTER):
        ceiling.clean(5000)
    assert ceiling.correction == 1.0


def test_a_failure_starts_the_count_of_clean_steps_again():
    ceiling = tight(line(), 64)
    fail(ceiling, 64)
    for _ in range(GROW_AFTER - 1):
        ceiling.clean(None)
    fail(ceiling, 32)
    assert ceiling.clean(None) is None


def test_clean_steps_without_a_lowering_change_nothing():
    ceiling = tight(line(), 64)
    before = ceiling.limit
    assert [ceiling.clean(room) for room in (None, 10**9, 0) * 50] == [None] * 150
    assert ceiling.limit == before


def test_growth_waits_until_the_device_has_room_again():
    ceiling = tight(line(), 64)  # 804 bytes, so 946 of room
    fail(ceiling, 64, room=400)
    low = ceiling.limit
    for _ in range(1000):
        assert ceiling.clean(400) is None
    assert ceiling.limit == low
    assert ceiling.clean(1000) == "the cut is as coarse as at the start again after 10 clean steps"
    assert largest(ceiling, 64) == 64


def test_all_lowerings_are_undone_at_once_when_all_room_is_back():
    ceiling = tight(line(), 64)
    for again, rows in enumerate((64, 30, 15)):
        fail(ceiling, rows, room=400, again=again > 0)
    for _ in range(GROW_AFTER):
        ceiling.clean(5000)
    assert largest(ceiling, 64) == 64


def test_the_ceiling_follows_the_room_that_came_back_half_way():
    ceiling = tight(line(), 64)
    fail(ceiling, 64, room=400)
    said = [ceiling.clean(600) for _ in range(GROW_AFTER)]
    assert said[-1] == "the device has room for 600 B again, and micro-batches grow with it"
    assert ceiling.limit == 510


def test_the_ceiling_follows_the_room_once_in_ten_clean_steps():
    ceiling = tight(line(), 64)
    fail(ceiling, 64, room=400)
    rooms = [500] * GROW_AFTER + [600] * GROW_AFTER
    assert [bool(ceiling.clean(room)) for room in rooms] == ([False] * (GROW_AFTER - 1) + [True]) * 2


def test_a_ceiling_that_still_waits_does_not_grow_above_where_it_started():
    ceiling = tight(line(), 64)
    start = ceiling.limit
    waits(ceiling, 1, room=10**6, failures=2)
    for attempt in range(2):
        fail(ceiling, largest(ceiling, 64), room=10**6, again=attempt > 0)
    for _ in range(GROW_AFTER):
        ceiling.clean(10**6)
    assert ceiling.limit <= start


def test_a_little_room_that_came_back_changes_nothing():
    ceiling = tight(line(), 64)
    fail(ceiling, 64, room=400)
    assert [ceiling.clean(405) for _ in range(100)] == [None] * 100


def test_room_for_nearly_all_of_the_ceiling_is_room_for_it():
    ceiling = tight(line(), 64)  # 804 bytes
    fail(ceiling, 64, room=400)
    for _ in range(GROW_AFTER):
        ceiling.clean(math.ceil(0.985 * 804 / 0.85))
    assert ceiling.lowered == []


def test_without_a_model_growth_waits_eight_times_as_long_while_the_room_is_the_same():
    ceiling = Ceiling(model=None, limit=math.inf)
    fail(ceiling, 64, room=1000)
    steps = next(step for step in range(1, 10_000) if ceiling.clean(1049))
    assert steps == SELDOM * GROW_AFTER


def test_without_a_model_growth_comes_at_once_when_memory_came_back():
    ceiling = Ceiling(model=None, limit=math.inf)
    for _ in range(3):
        fail(ceiling, 64, room=1000)
    steps = next(step for step in range(1, 10_000) if ceiling.clean(1050))
    assert steps == GROW_AFTER
    assert ceiling.lowered == []


def test_without_a_model_one_lowering_at_a_time_is_tried_again_while_the_room_is_the_same():
    ceiling = Ceiling(model=None, limit=math.inf)
    for rows in (64, 32, 16):
        fail(ceiling, rows, room=1000)
    for _ in range(SELDOM * GROW_AFTER):
        ceiling.clean(1000)
    assert largest(ceiling, 64) == 16


def test_a_growth_that_fails_doubles_the_wait_up_to_the_longest():
    expected = [GROW_AFTER * 2**power for power in range(7)] + [GROW_AFTER * LONGEST_WAIT] * 2
    assert waits(tight(line(), 64), 9, room=None) == expected


def test_without_a_model_a_growth_that_fails_doubles_the_wait_beyond_the_usual_one():
    found = waits(Ceiling(model=None, limit=math.inf), 9, room=1000)
    assert found == [GROW_AFTER * times for times in (8, 8, 8, 8, 16, 32, 64, 64, 64)]


def test_with_room_to_read_a_growth_that_fails_doubles_the_wait():
    found = waits(tight(line(), 64), 8, room=2000, failures=2)
    assert found == [GROW_AFTER * 2**power for power in range(7)] + [GROW_AFTER * LONGEST_WAIT]


def test_a_growth_that_held_sets_the_wait_back():
    ceiling = tight(line(), 64)
    waits(ceiling, 4, room=None)  # the fifth wait would be 160
    for _ in range(GROW_AFTER):
        ceiling.clean(None)
    assert waits(ceiling, 1, room=None) == [GROW_AFTER]


def test_several_failures_of_one_step_double_the_wait_once():
    ceiling = tight(line(), 64)
    fail(ceiling, 64)
    for _ in range(GROW_AFTER):
        ceiling.clean(None)
    for attempt in range(4):
        fail(ceiling, largest(ceiling, 64), again=attempt > 0)
    assert ceiling.wait == 2


# Any course of events


failures = st.tuples(st.just("failed"), st.integers(2, 200), st.booleans(), rooms, st.booleans())
thrashings = st.tuples(st.just("thrashing"), st.integers(2, 200), rooms)
cleans = st.tuples(st.just("clean"), st.integers(1, 25), rooms)
courses = st.lists(st.one_of(failures, thrashings, cleans), max_size=20)


def follow(ceiling: Ceiling, event: tuple) -> list[str | None]:
    match event:
        case ("failed", rows, whole, room, again):
            return [fail(ceiling, rows, whole=whole, room=room, again=again)]
        case ("thrashing", rows, room):
            return [ceiling.thrashing(rows, (), room)]
        case ("clean", steps, room):
            return [ceiling.clean(room) for _ in range(steps)]
    raise AssertionError(event)


def start(model: MemoryModel | None) -> Ceiling:
    return Ceiling(model=None, limit=math.inf, most=50) if model is None else tight(model, 64, most=50)


@given(models | st.none(), courses)
@settings(max_examples=80)
def test_nothing_grows_above_where_it_started(model, course):
    ceiling = start(model)
    limit = ceiling.limit
    for event in course:
        follow(ceiling, event)
        assert ceiling.limit <= limit
        assert ceiling.correction >= 1.0
        assert 1 <= ceiling.wait <= LONGEST_WAIT


@given(models | st.none(), courses)
@settings(max_examples=80)
def test_a_ceiling_out_of_a_checkpoint_behaves_as_the_one_that_went_on(model, course):
    one, other = start(model), start(model)
    for event in course:
        resumed = start(model)
        resumed.load(json.loads(json.dumps(other.to_json())))
        other = resumed
        assert follow(one, event) == follow(other, event)
        assert one == other
        assert one.cut([()] * 70) == other.cut([()] * 70)


def test_a_checkpoint_holds_no_number_that_json_does_not_know():
    ceiling = Ceiling(model=None, limit=math.inf)
    fail(ceiling, 8, room=1000)
    json.dumps([ceiling.to_json(), Ceiling(model=None, limit=math.inf).to_json()], allow_nan=False)


def test_loading_takes_everything_back():
    ceiling = tight(line(), 64)
    state = {
        "limit": 300.0,
        "correction": 1.25,
        "measured": 1.5,
        "may_run_whole": False,
        "lowered": [[None, 1.0, True, None], [500.0, 1.25, False, 900]],
        "clean_steps": 7,
        "wait": 4,
        "just_grown": True,
    }
    ceiling.load(state)
    assert ceiling.lowered == [Lowered(math.inf, 1.0, True, None), Lowered(500.0, 1.25, False, 900)]
    assert ceiling.to_json() == state


@given(models | st.none(), courses)
@settings(max_examples=30)
def test_every_change_of_the_cut_is_said(model, course):
    ceiling = start(model)
    for event in course:
        before, said = (ceiling.limit, ceiling.correction), follow(ceiling, event)
        if (ceiling.limit, ceiling.correction) != before:
            assert any(said)


def test_the_waits_of_a_run_with_constant_room_grow_further_and_further_apart():
    """What the doubling is for: memory that never comes back costs 9 failures in 2,000 steps, not 200."""
    ceiling, failed_at = tight(line(), 64), []
    for step in range(2000):
        ooms = 0
        while ceiling.limit >= ceiling.measure(20, ()):
            ooms += 1
            fail(ceiling, largest(ceiling, 64), again=ooms > 1)
        if ooms:
            failed_at.append(step)
        else:
            ceiling.clean(None)
    assert len(failed_at) == 9
    gaps = [later - earlier for earlier, later in pairwise(failed_at)]
    assert gaps == sorted(gaps)


def test_rows_that_are_part_of_a_step_never_count_as_the_whole_of_it():
    """A whole step holds no gradients and costs less; a loader's micro-batch cut anew is not one."""
    model = model_of(forward=(100, 10), first_forward=(10, 1))
    ceiling = tight(model, 10)
    assert max(map(len, ceiling.cut([()] * 40, part=True))) == 10
    assert len(ceiling.cut([()] * 40)) == 1


@pytest.mark.parametrize("rows", [2, 3, 66])
def test_a_size_that_failed_is_never_run_again_in_the_same_step(rows):
    """Whatever the model says of it: here that more rows cost less."""
    ceiling = Ceiling(model=model_of(forward=(10_000, -50)), limit=1e9)
    for _ in range(8):
        largest_now = max(map(len, ceiling.cut([()] * rows, part=True)))
        if largest_now == 1:
            break
        fail(ceiling, largest_now, again=True)
        assert max(map(len, ceiling.cut([()] * rows, part=True))) < largest_now
        assert not ceiling.allows(largest_now, (), whole=False)
    assert largest_now == 1
    ceiling.clean(None)
    assert ceiling.for_now is None
