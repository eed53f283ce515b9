"""Everything random in a run as a function of its seed and a counter: order of the rows, dropout, nothing else.

A generator's numbers depend on who asked before; in a pack that would be the other runs. Here a number is the hash of
(seed, what for, when, where), so a run draws the same order and the same dropout alone, among a hundred others, after a
resume, on a CPU and on a card. The hash is splitmix64's finaliser: two multiplications, three shifts, in whole numbers that
wrap around on every device. One hash gives four 16-bit lots, which is what dropout needs: at 120 runs the masks of
512 pairs and 384 units are 12 million hashes a step.
"""

import torch
from torch import Tensor

_GOLDEN = -7046029254386353131  # 2⁶⁴ / golden ratio, as a signed number
_FIRST, _SECOND = -4658895280553007687, -7723592293110705685
ORDER, DROPOUT, SAMPLES = 1, 2, 3
"""What numbers are drawn for."""
LOTS = 1 << 16


def mixed(values: Tensor) -> Tensor:
    """splitmix64's finaliser of whole numbers. Shifts of signed numbers copy the sign, hence the masks."""
    values = (values ^ ((values >> 30) & (2**34 - 1))) * _FIRST
    values = (values ^ ((values >> 27) & (2**37 - 1))) * _SECOND
    return values ^ ((values >> 31) & (2**33 - 1))


def key(*parts: Tensor | int) -> Tensor:
    """One number from several: seed, purpose, time …; they broadcast."""
    device = next((part.device for part in parts if isinstance(part, Tensor)), None)
    found = torch.zeros((), dtype=torch.int64, device=device)
    for part in parts:
        found = mixed(found * 31 + part + _GOLDEN)
    return found


def orders(keys: Tensor, counts: Tensor, longest: int) -> Tensor:
    """For each key (a shuffling) the numbers 0 … count − 1 in random order, [keys, longest]; what lies beyond is padding."""
    places = torch.arange(longest, device=keys.device)
    drawn = mixed(keys[:, None] + places * _GOLDEN)
    drawn = torch.where(places < counts[:, None], drawn, torch.iinfo(torch.int64).max)
    return drawn.argsort(dim=1, stable=True)


def lots(keys: Tensor, rows: int, units: int) -> Tensor:
    """For each key, rows × units numbers from −2¹⁵ to 2¹⁵ − 1, all alike likely, as int16."""
    width = -(-units // 4)
    places = torch.arange(rows * width, device=keys.device) * _GOLDEN
    drawn = mixed(keys[:, None] + places).view(torch.int16)
    return drawn.view(len(keys), rows, 4 * width)[:, :, :units]


def kept(keys: Tensor, rows: int, units: int, dropout: Tensor) -> Tensor:
    """Dropout's factors, [keys, rows, units]: 0 with a run's probability, else what keeps the mean."""
    dropped = (dropout.double() * LOTS).round().clamp(max=LOTS - 1).to(torch.int32)
    stays = lots(keys, rows, units) >= (dropped - LOTS // 2).to(torch.int16)[:, None, None]
    return stays * (LOTS / (LOTS - dropped)).to(torch.float32)[:, None, None]
