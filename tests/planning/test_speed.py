"""The fastest cut is found by climbing, and the reason names what it was compared with."""

from brimful.planning.survey import find_fastest


def curve(rates):
    """Seconds for a micro-batch of so many rows, given rows/s at some sizes."""
    timed = []

    def seconds(rows):
        timed.append(rows)
        nearest = min(rates, key=lambda n: abs(n - rows))
        return rows / rates[nearest]

    return seconds, timed


def test_the_largest_wins_while_speed_grows():
    seconds, _ = curve({32: 400, 16: 200, 8: 100})
    speed = find_fastest(256, 32, seconds, 0.0)
    assert speed.chosen.rows == 32
    assert speed.rising


def test_a_smaller_size_wins_when_it_is_faster_and_the_largest_is_not_timed_for_long():
    seconds, timed = curve({64: 50, 32: 60, 16: 80, 8: 75})
    speed = find_fastest(64, 64, seconds, 0.0)
    assert speed.chosen.rows == 16
    assert timed == [32, 64, 16, 8]
    assert not speed.rising


def test_equal_speed_goes_to_less_memory():
    seconds, _ = curve({32: 100, 16: 99.5, 8: 60})
    assert find_fastest(32, 32, seconds, 0.0).chosen.rows == 16


def test_sizes_are_equal_cuts_of_the_step():
    seconds, timed = curve({32: 100})
    find_fastest(250, 30, seconds, 0.0)
    assert set(timed) <= {28, 14, 7, 4, 2, 1}


def test_the_optimizers_time_counts_once_a_step():
    seconds, _ = curve({10: 100})
    assert find_fastest(20, 10, seconds, 0.8, only=True).chosen.rows_per_s == 20 / (2 * 0.1 + 0.8)


def test_the_reason_names_the_others():
    seconds, _ = curve({32: 400, 16: 200, 8: 100})
    assert "fastest: 400 rows/s, against 16 rows 200" in find_fastest(32, 32, seconds, 0.0).reason
