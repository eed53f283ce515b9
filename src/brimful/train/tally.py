"""What the micro-batches of a step added up to, kept on the device until the step is through.

Reading a number on the host makes it wait for the device; done after every micro-batch, that would leave a card idle.
"""

from collections.abc import Mapping

import torch

from brimful.task import Loss


class Tally:
    """Sums and counts of each term."""

    def __init__(self) -> None:
        self._sums: dict[str, list[torch.Tensor]] = {}
        self._counts: dict[str, list[torch.Tensor | float]] = {}

    def add(self, terms: Mapping[str, Loss]) -> None:
        for name, term in terms.items():
            total, count = term.sum.detach(), term.count
            if isinstance(count, torch.Tensor):
                count = count.detach()
                # A mean over nothing, times nothing, is NaN: the Hugging Face way to a sum, where all labels are masked.
                total = torch.where((count.to(total.device) == 0) & total.isnan(), 0.0, total)
            elif count == 0:
                total = total.nan_to_num(nan=0.0)
            self._sums.setdefault(name, []).append(total)
            self._counts.setdefault(name, []).append(count)

    def read(self) -> dict[str, tuple[float, float]]:
        """Sum and count of each term; waits for the device once."""
        on_device = [
            torch.stack([one.reshape(()) for one in sums]).sum(dtype=_widest(sums[0])) for sums in self._sums.values()
        ]
        host = [
            float(sum(one for one in counts if not isinstance(one, torch.Tensor))) for counts in self._counts.values()
        ]
        for counts in self._counts.values():
            tensors = [one.detach().reshape(()) for one in counts if isinstance(one, torch.Tensor)]
            on_device.append(torch.stack(tensors).to(on_device[0]).sum() if tensors else torch.zeros_like(on_device[0]))
        values = torch.stack(on_device).tolist() if on_device else []
        half = len(values) // 2
        return {
            name: (total, count + on_host)
            for name, total, count, on_host in zip(self._sums, values[:half], values[half:], host, strict=True)
        }


def _widest(tensor: torch.Tensor) -> torch.dtype:
    return torch.float32 if tensor.device.type == "mps" else torch.float64
