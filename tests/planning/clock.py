"""Clocks for planning that do not tell the time."""

import random


class Clock:
    """A clock that advances when a test says so, and by a microsecond when it is read."""

    def __init__(self):
        self.seconds = 0.0

    def perf_counter(self):
        self.seconds += 1e-6
        return self.seconds


class LyingClock:
    """A clock whose every reading is a random time after the last."""

    def __init__(self, seed):
        self._random, self._seconds = random.Random(seed), 0.0

    def perf_counter(self):
        self._seconds += self._random.expovariate(20)
        return self._seconds
