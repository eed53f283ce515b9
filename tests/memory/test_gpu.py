"""What others take on a card is counted while they hold it."""

import pytest
import torch

from brimful.memory.meter import AvailableMemory, allocator_retries, process_limit_bytes

pytestmark = pytest.mark.gpu


def test_an_allocation_is_missing_until_it_is_freed():
    device = torch.device("cuda", torch.cuda.current_device())
    torch.zeros(1, device=device)
    here, retries = AvailableMemory(device), allocator_retries(device)
    here.record_idle()
    before = here.training_bytes()
    taken = torch.zeros(2**28, dtype=torch.uint8, device=device)
    assert here.other_bytes() == 2**28
    assert before - here.training_bytes() == pytest.approx(2**28, abs=2**24)
    del taken
    assert here.other_bytes() == 0
    assert allocator_retries(device) == retries
    assert process_limit_bytes(device, 100) == 100
