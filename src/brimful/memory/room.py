"""How many bytes this process could hold on a device in all: what it has, and what it could still take.

On a card that is what is free, plus what torch reserved of it already, up to the cap set on the process. The CPU has no
limit of its own short of the kernel's, so there only a virtual limit is known.
"""

import torch

from brimful.memory.ledger import active_limit_bytes, active_live_bytes


class Room:
    """What is left for training: the device's room, less what the same process took for something else since.

    Whatever is alive between two steps, beyond the least that ever was, is not training's.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._idle_bytes: int | None = None

    def settle(self, *, anew: bool = False) -> None:
        """Between two steps: what is alive now is needed for ever. `anew`: training itself has grown since, by its state."""
        held = held_bytes(self._device)
        if held is not None:
            self._idle_bytes = held if anew or self._idle_bytes is None else min(self._idle_bytes, held)

    def now(self, *, besides: int = 0) -> int | None:
        """Bytes, while nothing of a step is alive besides so many; None where nothing can tell."""
        room = room_bytes(self._device)
        return None if room is None else room - self.taken(besides=besides)

    def taken(self, *, besides: int = 0) -> int:
        """Bytes alive between two steps that are not training's."""
        held = held_bytes(self._device)
        return 0 if held is None or self._idle_bytes is None else max(0, held - besides - self._idle_bytes)


def room_bytes(device: torch.device) -> int | None:
    """The most this process could hold there now; None where nothing can tell."""
    if device.type == "cpu":
        return active_limit_bytes()
    if device.type == "mps":
        return None
    free, total = torch.accelerator.get_memory_info(device)
    return min(free + torch.accelerator.memory_reserved(device), cap_bytes(device, total))


def held_bytes(device: torch.device) -> int | None:
    """What is allocated there by this process."""
    if device.type == "cpu":
        return active_live_bytes()
    return None if device.type == "mps" else torch.accelerator.memory_allocated(device)


def cap_bytes(device: torch.device, total: int) -> int:
    """What torch lets this process reserve of the card's memory."""
    if device.type != "cuda":
        return total
    return int(torch.cuda.memory.get_per_process_memory_fraction(device) * total)


def allocator_retries(device: torch.device) -> int:
    """How often the allocator had to give back its cache and try again: the sign of thrashing before out-of-memory."""
    if device.type != "cuda":
        return 0
    return int(torch.cuda.memory_stats_as_nested_dict(device).get("num_alloc_retries", 0))
