"""The colours of curves can be told apart by colour-blind readers, in both themes."""

import itertools
import re

import numpy as np
import pytest

from brimful.report.page.report import Report
from brimful.report.run_record import RunRecord

from .rich_runs import rich_run

SIGHT = {
    "usual": np.eye(3),
    "protanopia": [[0.152286, 1.052583, -0.204868], [0.114503, 0.786281, 0.099216], [-0.003882, -0.048116, 1.051998]],
    "deuteranopia": [[0.367322, 0.860646, -0.227968], [0.280085, 0.672501, 0.047413], [-0.01182, 0.04294, 0.968881]],
    "tritanopia": [[1.255528, -0.076749, -0.178779], [-0.078411, 0.930809, 0.147602], [0.004733, 0.691367, 0.3039]],
}
"""Linear RGB as others see it (Machado, Oliveira and Fernandes, 2009)."""
TO_LMS = [[0.4122214708, 0.5363325363, 0.0514459929], [0.2119034982, 0.6806995451, 0.1073969566], [0.0883024619, 0.2817188376, 0.6299787005]]  # fmt: skip
TO_LAB = [[0.2104542553, 0.793617785, -0.0040720468], [1.9779984951, -2.428592205, 0.4505937099], [0.0259040371, 0.7827717662, -0.808675766]]  # fmt: skip


def oklab(colour: str, sight: str) -> np.ndarray:
    values = np.array([int(colour[place : place + 2], 16) for place in (0, 2, 4)]) / 255
    linear = np.where(values <= 0.04045, values / 12.92, ((values + 0.055) / 1.055) ** 2.4)
    return np.array(TO_LAB) @ np.cbrt(np.array(TO_LMS) @ np.clip(np.array(SIGHT[sight]) @ linear, 0, 1))


@pytest.fixture(scope="module")
def style(tmp_path_factory) -> str:
    return Report([RunRecord(rich_run(tmp_path_factory.mktemp("run") / "a", steps=3))]).html()


@pytest.mark.parametrize("sight", SIGHT)
@pytest.mark.parametrize("theme", ["light", "dark"])
def test_any_two_colours_differ(style, theme, sight):
    block = re.search(rf"color-scheme: {theme}; ([^}}]*)", style)[1]
    colours = [oklab(colour, sight) for colour in re.findall(r"--c\d:#(\w{6})", block)]
    assert len(colours) == 6
    assert min(100 * np.linalg.norm(one - other) for one, other in itertools.combinations(colours, 2)) >= 8
