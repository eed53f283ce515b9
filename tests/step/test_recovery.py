"""The micro-batch limit: every error lowers it, a bounded number of times, and every lowering is undone in time."""

import json
import math
from itertools import pairwise

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from brimful.memory.model import MemoryModel, Polynomial
from brimful.step.recovery import (
    BLIND_WAIT,
    GROW_AFTER,
    LONGEST_WAIT,
    MOST_RAISED,
    Lowering,
    MicroBatchLimit,
)


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


def tight(model: MemoryModel, rows: int, **options) -> MicroBatchLimit:
    """A limit that allows exactly this many rows."""
    limit = MicroBatchLimit(model=model, value=math.inf, **options)
    limit.value = limit.cost(rows, ())
    return limit


def largest(limit: MicroBatchLimit, rows: int) -> int:
    return max(len(group) for group in limit.split([()] * rows))


def fail(limit: MicroBatchLimit, rows: int, shape=(), *, whole=False, room=None, again=False) -> str:
    return limit.lower(rows, shape, whole=whole, available_bytes=room, again=again)


def fail_until_one_row_is_left(limit: MicroBatchLimit, shapes: list, room: int | None) -> int:
    """Whatever has more than one row runs out of memory, the largest first. Returns how often."""
    tries = 0
    while True:
        groups = limit.split(shapes)
        broken = next((group for group in groups if len(group) > 1), None)
        if broken is None:
            return tries
        tries += 1
        assert tries < 200, "this would never end"
        padded = tuple(max(lengths) for lengths in zip(*(shapes[row] for row in broken), strict=True))
        fail(limit, len(broken), padded, whole=len(groups) == 1, room=room, again=tries > 1)


def waits(limit: MicroBatchLimit, growths: int, room: int | None, failures: int = 1) -> list[int]:
    """Clean steps before each of so many growths, every one of which fails at its first step."""
    found = []
    for _ in range(growths):
        for attempt in range(failures):
            fail(limit, largest(limit, 64), room=room, again=attempt > 0)
        before, steps = limit.value, 0
        while limit.value <= before:
            limit.count_clean_step(room)
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
    limit = MicroBatchLimit(model=FLAT, value=math.inf)
    assert FLAT.cost_bytes(rows, ()) == FLAT.cost_bytes(rows + 1, ())
    assert limit.cost(rows, ()) < limit.cost(rows + 1, ())


def test_without_a_memory_model_padded_work_is_measured():
    assert MicroBatchLimit(model=None, value=math.inf).cost(3, (10, 4)) == 45


def test_what_the_run_taught_raises_what_is_predicted():
    limit = MicroBatchLimit(model=line(), value=math.inf, correction=1.5)
    assert limit.predicted_bytes(8, ()) == 270


def test_nothing_is_predicted_without_a_memory_model():
    limit = MicroBatchLimit(model=None, value=math.inf)
    assert limit.predicted_bytes(8, ()) is None
    assert limit.peak_bytes([(8, ())]) is None


def test_the_peak_of_a_step_is_that_of_its_costliest_micro_batch():
    limit = MicroBatchLimit(model=line(), value=math.inf, correction=2.0)
    assert limit.peak_bytes([(3, ()), (8, ()), (5, ())]) == 360


def test_only_a_step_of_one_micro_batch_is_predicted_as_whole():
    model = model_of(first_forward=(100, 10), forward=(500, 10))
    limit = MicroBatchLimit(model=model, value=math.inf)
    assert limit.peak_bytes([(8, ())]) == 180
    assert limit.peak_bytes([(8, ()), (8, ())]) == 580


def test_the_peak_is_allocated_bytes_and_the_prediction_reserved_ones():
    limit = MicroBatchLimit(model=model_of(reserved_ratio=1.1, forward=(100, 10)), value=math.inf)
    assert limit.peak_bytes([(10, ())]) == 200
    assert limit.predicted_bytes(10, ()) == 220


# Cutting


def test_without_a_limit_a_step_is_tried_whole():
    assert MicroBatchLimit(model=None, value=math.inf).split([(5,)] * 100) == [list(range(100))]


@given(models, st.integers(1, 60), st.integers(1, 60), st.integers(1, 20))
@settings(max_examples=40)
def test_never_more_rows_than_the_user_fixed(model, rows, planned, most):
    limit = tight(model, planned, max_rows=most)
    assert largest(limit, rows) <= most


def test_the_rows_that_the_user_fixed_stay_fixed_through_failures_and_growth():
    limit = tight(line(), 32, max_rows=6)
    for _ in range(4):
        fail(limit, largest(limit, 64))
    for _ in range(10 * GROW_AFTER):
        limit.count_clean_step(None)
        assert largest(limit, 64) <= 6
    assert largest(limit, 64) == 6


# Failing


@given(models | st.none(), st.integers(2, 5000), st.floats(1, 3), st.booleans(), rooms)
def test_after_a_second_failure_the_micro_batch_that_failed_is_too_large(model, rows, correction, whole, room):
    limit = MicroBatchLimit(model=model, value=math.inf, correction=correction)
    fail(limit, rows, whole=whole, room=room, again=True)
    assert limit.cost(rows, ()) > limit.value


@given(
    models | models_with_whole_steps, st.integers(2, 5000), st.floats(0.1, 1), st.booleans(), st.integers(-1000, 10**9)
)
def test_where_there_is_less_room_than_predicted_the_micro_batch_that_failed_is_too_large(
    model, rows, fill, whole, room
):
    limit = MicroBatchLimit(model=model, value=math.inf, fill=fill)
    assume(limit.predicted_bytes(rows, (), whole=whole) > fill * room)
    fail(limit, rows, whole=whole, room=room)
    assert limit.cost(rows, (), whole=whole) > limit.value


@given(models, st.integers(2, 5000), st.floats(0.1, 0.99), st.floats(1, 50))
def test_where_the_model_was_wrong_the_largest_micro_batch_is_too_large(model, rows, fill, spare):
    limit = tight(model, rows, fill=fill)
    room = math.ceil(spare * limit.predicted_bytes(rows, ()) / fill)
    fail(limit, rows, room=room)
    assert limit.cost(rows, ()) > limit.value


def test_where_the_model_was_wrong_a_small_micro_batch_that_failed_is_too_large():
    limit = tight(line(), 64)  # 804 bytes
    assert largest(limit, 8) == 8
    fail(limit, 8, whole=True, room=2000)
    assert largest(limit, 8) < 8


def test_a_step_below_the_limit_that_failed_for_lack_of_room_is_split():
    limit = tight(line(), 64)
    fail(limit, 8, whole=True, room=250)  # predicted to take 180 of 212
    assert largest(limit, 8) < 8


def test_a_prediction_that_meets_the_room_exactly_is_raised():
    limit = tight(line(), 8, fill=1.0)
    fail(limit, 8, whole=True, room=180)
    assert largest(limit, 8) < 8


BIG_WEIGHTS = model_of(first_forward=(1000, 10), forward=(2000, 10), optimizer=(2000, 0))
"""1,000 bytes of weights and 10 of activations a row: held gradients cost more than all the rows of a step."""


@pytest.mark.parametrize("rows", [2, 8, 100])
def test_a_whole_step_that_failed_is_split_even_if_its_half_is_predicted_to_take_more(rows):
    limit = MicroBatchLimit(model=BIG_WEIGHTS, value=math.inf)
    limit.value = limit.cost(rows, (), whole=True)
    fail(limit, rows, whole=True)
    assert largest(limit, rows) < rows


@given(models | st.none(), st.integers(2, 300), rooms)
@settings(max_examples=60)
def test_one_row_is_reached_within_the_logarithm_of_the_rows(model, rows, room):
    limit = MicroBatchLimit(model=None, value=math.inf) if model is None else tight(model, rows, fill=0.9)
    tries = fail_until_one_row_is_left(limit, [()] * rows, room)
    assert tries <= 2 + math.ceil(math.log2(rows))


@given(st.lists(st.tuples(st.integers(1, 500), st.integers(1, 500)), min_size=2, max_size=30))
@settings(max_examples=40)
def test_rows_of_very_different_lengths_are_alone_after_the_logarithm_of_their_work(shapes):
    limit = MicroBatchLimit(model=None, value=math.inf)
    work = [1 + sum(shape) for shape in shapes]
    padded = len(shapes) * (1 + max(a for a, _ in shapes) + max(b for _, b in shapes))
    tries = fail_until_one_row_is_left(limit, shapes, None)
    assert tries <= 2 + math.log(padded / min(work), 1.5)


def test_a_failure_halves_the_rows_where_nothing_else_is_known():
    limit = tight(line(), 32)
    sentence = fail(limit, 32)
    assert sentence == "micro-batches now have at most 16 rows"
    assert largest(limit, 64) == 16


def test_half_of_an_odd_number_of_rows_is_the_larger_half():
    limit = tight(line(), 7)
    fail(limit, 7)
    assert largest(limit, 64) == 4


def test_a_failure_for_lack_of_room_lowers_the_limit_to_the_filled_share_of_it():
    limit = tight(line(), 64)
    sentence = fail(limit, 64, room=600)
    assert sentence == "the device has room for 600 B, micro-batches now use 85% of that"
    assert limit.value == 510
    assert limit.correction == 1.0


def test_a_failure_with_room_enough_raises_the_model_to_the_room_that_was_not_enough():
    limit = tight(line(0, 10), 64)
    sentence = fail(limit, 64, room=800)
    assert sentence == "the memory model was too low and is raised by 25%"
    assert limit.predicted_bytes(64, ()) == 800


def test_one_failure_does_not_raise_the_model_by_more_than_half():
    limit = tight(line(), 64)
    fail(limit, 64, room=10**9)
    assert limit.correction == MOST_RAISED == 1.5


def test_the_model_is_raised_once_in_a_step_and_then_rows_are_halved():
    limit = tight(line(), 64)
    fail(limit, 64, room=2000)
    fail(limit, 40, room=2000, again=True)
    assert limit.correction == 1.5
    assert largest(limit, 64) <= 20


def test_a_single_row_stays_allowed_after_any_failure():
    limit = MicroBatchLimit(model=None, value=math.inf)
    fail(limit, 1, (10,))
    assert limit.value == limit.cost(1, (10,))


def test_a_device_without_any_room_leaves_one_row_at_a_time():
    limit = tight(line(), 64)
    fail(limit, 64, room=-5000)
    assert limit.split([()] * 3) == [[0], [1], [2]]


@given(models | st.none(), st.integers(2, 1000), st.integers(1, 1000), rooms, st.booleans())
def test_a_failure_never_raises_the_limit(model, rows, planned, room, again):
    limit = MicroBatchLimit(model=None, value=float(planned)) if model is None else tight(model, planned)
    value, correction = limit.value, limit.correction
    fail(limit, rows, room=room, again=again)
    assert limit.value <= value
    assert limit.correction >= correction


# Thrashing, and a model that was too low


@pytest.mark.parametrize(("rows", "left"), [(2, 1), (3, 2), (4, 3), (100, 75)])
def test_thrashing_takes_a_quarter_of_the_rows_and_one_at_least(rows, left):
    limit = tight(line(), rows)
    limit.lower_for_thrashing(rows, (), None)
    assert limit.cost(left, ()) <= limit.value < limit.cost(left + 1, ())


def test_thrashing_reports_the_rows_that_are_left():
    assert tight(line(), 8).lower_for_thrashing(8, (), None) == "micro-batches now have at most 6 rows"


def test_thrashing_is_undone_like_a_failure():
    limit = tight(line(), 8)
    limit.lower_for_thrashing(8, (), None)
    for _ in range(GROW_AFTER):
        limit.count_clean_step(None)
    assert largest(limit, 64) == 8


def test_a_whole_step_that_thrashes_is_split_even_if_its_parts_are_predicted_to_take_more():
    limit = MicroBatchLimit(model=BIG_WEIGHTS, value=math.inf)
    limit.value = limit.cost(8, (), whole=True)
    limit.lower_for_thrashing(8, (), None, whole=True)
    assert largest(limit, 8) < 8


def test_a_growth_that_thrashes_doubles_the_wait():
    limit = tight(line(), 8)
    for _ in range(2):
        limit.lower_for_thrashing(8, (), None)
        steps = next(step for step in range(1, 1000) if limit.count_clean_step(None))
    assert steps == 2 * GROW_AFTER


def test_a_step_that_took_more_than_predicted_raises_the_model_to_what_was_measured():
    limit = tight(line(), 8)
    assert limit.correct_model(189, 180) == "the memory model is raised by 5.0%"
    assert limit.predicted_bytes(8, ()) == 189


def test_what_a_clean_step_measured_is_kept_when_the_limit_grows_back():
    limit = tight(line(), 64)
    fail(limit, 64)
    limit.correct_model(110, 100)
    for _ in range(GROW_AFTER):
        limit.count_clean_step(None)
    assert limit.predicted_bytes(64, ()) == pytest.approx(1.1 * line().cost_bytes(64, ()), rel=0.01)


def test_a_model_that_was_a_little_low_does_not_shrink_micro_batches_while_there_is_memory():
    limit = tight(line(), 64)
    limit.budget = 10 * limit.value
    limit.correct_model(103, 100)
    assert largest(limit, 128) == 64


def test_a_model_that_was_low_shrinks_micro_batches_at_the_budget():
    limit = tight(line(), 64)
    limit.budget = limit.value
    limit.correct_model(110, 100)
    assert largest(limit, 200) < 64


# Growing


def test_a_lowering_is_undone_after_ten_clean_steps_and_not_before():
    limit = tight(line(), 64)
    fail(limit, 64)
    said = [limit.count_clean_step(None) for _ in range(10)]
    assert said == [None] * 9 + ["micro-batch size restored to 64 rows after 10 clean steps"]


def test_how_many_clean_steps_it_takes_can_be_set():
    limit = tight(line(), 64, grow_after=3)
    fail(limit, 64)
    assert [bool(limit.count_clean_step(None)) for _ in range(3)] == [False, False, True]


def test_without_a_reading_of_the_room_one_lowering_is_undone_at_a_time():
    limit = tight(line(), 64)
    for rows in (64, 32):
        fail(limit, rows)
    seen = []
    for _ in range(2):
        said = [limit.count_clean_step(None) for _ in range(GROW_AFTER)][-1]
        seen.append((largest(limit, 64), said))
    assert seen == [
        (32, "micro-batch size restored to 32 rows after 10 clean steps"),
        (64, "micro-batch size restored to 64 rows after 10 clean steps"),
    ]


@given(models | st.none(), st.integers(2, 200), st.lists(st.booleans(), min_size=1, max_size=6))
@settings(max_examples=60)
def test_growth_ends_exactly_where_it_started(model, rows, thrashes):
    limit = MicroBatchLimit(model=None, value=math.inf) if model is None else tight(model, rows)
    start = (limit.value, limit.correction)
    for index, thrash in enumerate(thrashes):
        if thrash:
            limit.lower_for_thrashing(rows, (), None)
        else:
            fail(limit, rows, room=None, again=index > 0)
    for _ in range(GROW_AFTER * len(thrashes)):
        limit.count_clean_step(None)
    assert (limit.value, limit.correction, limit.lowerings) == (*start, [])


def test_a_model_that_was_raised_is_put_back_with_the_limit():
    limit = tight(line(), 64)
    fail(limit, 64, room=5000)
    assert limit.correction == 1.5
    for _ in range(GROW_AFTER):
        limit.count_clean_step(5000)
    assert limit.correction == 1.0


def test_a_failure_starts_the_count_of_clean_steps_again():
    limit = tight(line(), 64)
    fail(limit, 64)
    for _ in range(GROW_AFTER - 1):
        limit.count_clean_step(None)
    fail(limit, 32)
    assert limit.count_clean_step(None) is None


def test_clean_steps_without_a_lowering_change_nothing():
    limit = tight(line(), 64)
    before = limit.value
    assert [limit.count_clean_step(room) for room in (None, 10**9, 0) * 50] == [None] * 150
    assert limit.value == before


def test_growth_waits_until_the_device_has_room_again():
    limit = tight(line(), 64)  # 804 bytes, so 946 of room
    fail(limit, 64, room=400)
    low = limit.value
    for _ in range(1000):
        assert limit.count_clean_step(400) is None
    assert limit.value == low
    assert limit.count_clean_step(1000) == "micro-batch size restored to 64 rows after 10 clean steps"
    assert largest(limit, 64) == 64


def test_all_lowerings_are_undone_at_once_when_all_room_is_back():
    limit = tight(line(), 64)
    for again, rows in enumerate((64, 30, 15)):
        fail(limit, rows, room=400, again=again > 0)
    for _ in range(GROW_AFTER):
        limit.count_clean_step(5000)
    assert largest(limit, 64) == 64


def test_the_limit_follows_the_room_that_came_back_half_way():
    limit = tight(line(), 64)
    fail(limit, 64, room=400)
    said = [limit.count_clean_step(600) for _ in range(GROW_AFTER)]
    assert said[-1] == "the device has room for 600 B again, micro-batches may use 85% of that"
    assert limit.value == 510


def test_the_limit_follows_the_room_once_in_ten_clean_steps():
    limit = tight(line(), 64)
    fail(limit, 64, room=400)
    rooms = [500] * GROW_AFTER + [600] * GROW_AFTER
    assert [bool(limit.count_clean_step(room)) for room in rooms] == ([False] * (GROW_AFTER - 1) + [True]) * 2


def test_a_limit_that_still_waits_does_not_grow_above_where_it_started():
    limit = tight(line(), 64)
    start = limit.value
    waits(limit, 1, room=10**6, failures=2)
    for attempt in range(2):
        fail(limit, largest(limit, 64), room=10**6, again=attempt > 0)
    for _ in range(GROW_AFTER):
        limit.count_clean_step(10**6)
    assert limit.value <= start


def test_a_little_room_that_came_back_changes_nothing():
    limit = tight(line(), 64)
    fail(limit, 64, room=400)
    assert [limit.count_clean_step(405) for _ in range(100)] == [None] * 100


def test_room_for_nearly_all_of_the_limit_is_room_for_it():
    limit = tight(line(), 64)  # 804 bytes
    fail(limit, 64, room=400)
    for _ in range(GROW_AFTER):
        limit.count_clean_step(math.ceil(0.985 * 804 / 0.85))
    assert limit.lowerings == []


def test_without_a_model_growth_waits_eight_times_as_long_while_the_room_is_the_same():
    limit = MicroBatchLimit(model=None, value=math.inf)
    fail(limit, 64, room=1000)
    steps = next(step for step in range(1, 10_000) if limit.count_clean_step(1049))
    assert steps == BLIND_WAIT * GROW_AFTER


def test_without_a_model_growth_comes_at_once_when_memory_came_back():
    limit = MicroBatchLimit(model=None, value=math.inf)
    for _ in range(3):
        fail(limit, 64, room=1000)
    steps = next(step for step in range(1, 10_000) if limit.count_clean_step(1050))
    assert steps == GROW_AFTER
    assert limit.lowerings == []


def test_without_a_model_one_lowering_at_a_time_is_tried_again_while_the_room_is_the_same():
    limit = MicroBatchLimit(model=None, value=math.inf)
    for rows in (64, 32, 16):
        fail(limit, rows, room=1000)
    for _ in range(BLIND_WAIT * GROW_AFTER):
        limit.count_clean_step(1000)
    assert largest(limit, 64) == 16


def test_a_growth_that_fails_doubles_the_wait_up_to_the_longest():
    expected = [GROW_AFTER * 2**power for power in range(7)] + [GROW_AFTER * LONGEST_WAIT] * 2
    assert waits(tight(line(), 64), 9, room=None) == expected


def test_without_a_model_a_growth_that_fails_doubles_the_wait_beyond_the_usual_one():
    found = waits(MicroBatchLimit(model=None, value=math.inf), 9, room=1000)
    assert found == [GROW_AFTER * times for times in (8, 8, 8, 8, 16, 32, 64, 64, 64)]


def test_with_room_to_read_a_growth_that_fails_doubles_the_wait():
    found = waits(tight(line(), 64), 8, room=2000, failures=2)
    assert found == [GROW_AFTER * 2**power for power in range(7)] + [GROW_AFTER * LONGEST_WAIT]


def test_a_growth_that_held_sets_the_wait_back():
    limit = tight(line(), 64)
    waits(limit, 4, room=None)  # the fifth wait would be 160
    for _ in range(GROW_AFTER):
        limit.count_clean_step(None)
    assert waits(limit, 1, room=None) == [GROW_AFTER]


def test_several_failures_of_one_step_double_the_wait_once():
    limit = tight(line(), 64)
    fail(limit, 64)
    for _ in range(GROW_AFTER):
        limit.count_clean_step(None)
    for attempt in range(4):
        fail(limit, largest(limit, 64), again=attempt > 0)
    assert limit.wait == 2


# Any course of events


failures = st.tuples(st.just("error"), st.integers(2, 200), st.booleans(), rooms, st.booleans())
thrashings = st.tuples(st.just("thrashing"), st.integers(2, 200), rooms)
cleans = st.tuples(st.just("clean"), st.integers(1, 25), rooms)
courses = st.lists(st.one_of(failures, thrashings, cleans), max_size=20)


def follow(limit: MicroBatchLimit, event: tuple) -> list[str | None]:
    match event:
        case ("error", rows, whole, room, again):
            return [fail(limit, rows, whole=whole, room=room, again=again)]
        case ("thrashing", rows, room):
            return [limit.lower_for_thrashing(rows, (), room)]
        case ("clean", steps, room):
            return [limit.count_clean_step(room) for _ in range(steps)]
    raise AssertionError(event)


def start(model: MemoryModel | None) -> MicroBatchLimit:
    return MicroBatchLimit(model=None, value=math.inf, max_rows=50) if model is None else tight(model, 64, max_rows=50)


@given(models | st.none(), courses)
@settings(max_examples=80)
def test_nothing_grows_above_where_it_started(model, course):
    limit = start(model)
    value = limit.value
    for event in course:
        follow(limit, event)
        assert limit.value <= value
        assert limit.correction >= 1.0
        assert 1 <= limit.wait <= LONGEST_WAIT


@given(models | st.none(), courses)
@settings(max_examples=80)
def test_a_limit_out_of_a_checkpoint_behaves_as_the_one_that_went_on(model, course):
    one, other = start(model), start(model)
    for event in course:
        resumed = start(model)
        resumed.load_state_dict(json.loads(json.dumps(other.state_dict())))
        other = resumed
        assert follow(one, event) == follow(other, event)
        assert one == other
        assert one.split([()] * 70) == other.split([()] * 70)


def test_a_checkpoint_holds_no_number_that_json_does_not_know():
    limit = MicroBatchLimit(model=None, value=math.inf)
    fail(limit, 8, room=1000)
    json.dumps([limit.state_dict(), MicroBatchLimit(model=None, value=math.inf).state_dict()], allow_nan=False)


def test_loading_takes_everything_back():
    limit = tight(line(), 64)
    state = {
        "value": 300.0,
        "correction": 1.25,
        "measured": 1.5,
        "may_run_whole": False,
        "lowerings": [[None, 1.0, True, 64, None], [500.0, 1.25, False, 32, 900]],
        "clean_steps": 7,
        "wait": 4,
        "just_grown": True,
    }
    limit.load_state_dict(state)
    assert limit.lowerings == [Lowering(math.inf, 1.0, True, 64, None), Lowering(500.0, 1.25, False, 32, 900)]
    assert limit.state_dict() == state


@given(models | st.none(), courses)
@settings(max_examples=30)
def test_every_change_of_the_limit_is_reported(model, course):
    limit = start(model)
    for event in course:
        before, said = (limit.value, limit.correction), follow(limit, event)
        if (limit.value, limit.correction) != before:
            assert any(said)


def test_the_waits_of_a_run_with_constant_room_grow_further_and_further_apart():
    """What the doubling is for: memory that never comes back costs 9 failures in 2,000 steps, not 200."""
    limit, failed_at = tight(line(), 64), []
    for step in range(2000):
        ooms = 0
        while limit.value >= limit.cost(20, ()):
            ooms += 1
            fail(limit, largest(limit, 64), again=ooms > 1)
        if ooms:
            failed_at.append(step)
        else:
            limit.count_clean_step(None)
    assert len(failed_at) == 9
    gaps = [later - earlier for earlier, later in pairwise(failed_at)]
    assert gaps == sorted(gaps)


def test_rows_that_are_part_of_a_step_never_count_as_the_whole_of_it():
    """A whole step holds no gradients and costs less; a loader's micro-batch cut anew is not one."""
    model = model_of(forward=(100, 10), first_forward=(10, 1))
    limit = tight(model, 10)
    assert max(map(len, limit.split([()] * 40, part=True))) == 10
    assert len(limit.split([()] * 40)) == 1


@pytest.mark.parametrize("rows", [2, 3, 66])
def test_a_size_that_failed_is_never_run_again_in_the_same_step(rows):
    """Whatever the model says of it: here that more rows cost less."""
    limit = MicroBatchLimit(model=model_of(forward=(10_000, -50)), value=1e9)
    for _ in range(8):
        largest_now = max(map(len, limit.split([()] * rows, part=True)))
        if largest_now == 1:
            break
        fail(limit, largest_now, again=True)
        assert max(map(len, limit.split([()] * rows, part=True))) < largest_now
        assert not limit.allows(largest_now, (), whole=False)
    assert largest_now == 1
    limit.count_clean_step(None)
    assert limit.max_rows_now is None
