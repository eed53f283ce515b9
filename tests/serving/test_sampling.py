"""How the tokens of a batch are chosen."""

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from brimful.serving.sampling import Sampling, choose

CPU = torch.device("cpu")


class Operations(TorchDispatchMode):
    """The names of the operations that run."""

    def __init__(self):
        super().__init__()
        self.names = []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        self.names.append(function.__name__)
        return function(*args, **(kwargs or {}))


def sampled(seeds, **options):
    rows = [Sampling(seed=seed, device=CPU, start=(0,), **options) for seed in seeds]
    for row in rows:
        for token in range(20):
            row.add(token)
    return rows


@pytest.mark.parametrize(
    "options", [{"temperature": 1.0, "top_p": 0.9}, {"repetition_penalty": 1.3, "presence_penalty": 0.5}], ids=str
)
def test_more_rows_take_no_more_operations_but_for_their_random_numbers(options):
    counts = []
    for rows in (2, 16):
        scores = torch.randn(rows, 50)
        with Operations() as ran:
            choose(scores, sampled(range(rows), **options))
        counts.append([name for name in ran.names if not name.startswith("exponential_")])
    assert counts[0] == counts[1]


def test_penalties_are_those_of_each_row():
    torch.manual_seed(0)
    scores = torch.randn(3, 6)
    rows = [
        Sampling(device=CPU, repetition_penalty=3.0, start=(5,)),
        Sampling(device=CPU),
        Sampling(device=CPU, frequency_penalty=1.5, presence_penalty=-1.0),
    ]
    expected = scores.clone()
    for row, tokens in zip(rows, ([1], [2], [4, 4]), strict=True):
        for token in tokens:
            row.add(token)
    for token in (1, 5):
        expected[0, token] = scores[0, token] * 3 if scores[0, token] < 0 else scores[0, token] / 3
    expected[2, 4] -= 1.5 * 2 - 1.0
    assert choose(scores, rows).tolist() == expected.argmax(-1).tolist()


@pytest.mark.parametrize("temperature", [1e-50, 1e-38, 1e-6])
def test_a_temperature_of_almost_zero_is_greedy(temperature):
    scores = torch.tensor([[30.0, 40.0, 50.0, 45.0]])
    assert choose(scores, [Sampling(device=CPU, temperature=temperature)]).tolist() == [2]
