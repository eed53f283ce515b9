"""Who holds a card's memory, as a phrase that an error message can end with."""

import pytest

from brimful.machine.gpu import Gpu, GpuProcess, describe_holders, gpu_holders
from brimful.units import GiB, MiB


def card(others_bytes: int | None, *processes: tuple[int, str | None, int | None]) -> Gpu:
    return Gpu(
        index=0,
        kind="cuda",
        name="NVIDIA H200",
        uuid=None,
        total_bytes=140 * GiB,
        free_bytes=20 * GiB,
        used_by_others_bytes=others_bytes,
        own_bytes=0,
        other_processes=tuple(GpuProcess(pid=p, name=n, used_bytes=b) for p, n, b in processes),
        driver=None,
        capability="9.0",
    )


HELD = int(61.2 * GiB)
PYTHON = (4711, "python", HELD)


@pytest.mark.parametrize(
    ("gpu", "phrase"),
    [
        (card(None), "who holds the rest is unknown"),
        (card(0), "no other process holds memory"),
        (card(3 * MiB), "no other process holds memory"),
        (card(HELD, PYTHON), "python (pid 4711) holds 61.2 GiB"),
        (card(HELD), "processes outside this container hold 61.2 GiB"),
        (card(HELD, (99, None, None)), "processes outside this container hold 61.2 GiB"),
        (card(HELD, (99, None, HELD)), "processes outside this container hold 61.2 GiB"),
        (card(HELD, (4711, "python", None)), "python (pid 4711) holds 61.2 GiB"),
        (card(HELD, (1, "a", None), (2, "b", None)), "a (pid 1) and b (pid 2) hold 61.2 GiB"),
        (
            card(HELD + 2 * GiB, PYTHON),
            "python (pid 4711) holds 61.2 GiB and processes outside this container hold 2 GiB",
        ),
        (
            card(15 * GiB, *((pid, "python", (6 - pid) * GiB) for pid in range(1, 6))),
            "python (pid 1) holds 5 GiB, python (pid 2) holds 4 GiB, python (pid 3) holds 3 GiB and 2 more hold 3 GiB",
        ),
    ],
)
def test_the_phrase(gpu, phrase):
    assert describe_holders(gpu, in_container=True) == phrase


def test_outside_a_container_the_unseen_are_not_said_to_be_outside_one():
    assert describe_holders(card(HELD), in_container=False) == "processes that cannot be seen from here hold 61.2 GiB"


def test_it_can_be_asked_by_index(nvml, torch_sees):
    nvml.add("GPU-u", used=21 * GiB, processes={4_000_111: 20 * GiB})
    nvml.names[4_000_111] = "python3"
    torch_sees("u")
    assert gpu_holders(0) == "python3 (pid 4000111) holds 20 GiB"


def test_asking_for_a_card_that_is_not_there_is_answered(nvml, torch_sees):
    torch_sees()
    assert gpu_holders(3) == "there is no GPU 3"
