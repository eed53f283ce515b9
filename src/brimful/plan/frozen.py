"""What freezing weights saves, as one of the plan's choices: gradients and optimizer state counted, activations measured.

A frozen part needs no gradient, and no optimizer state; where nothing below it trains, it also keeps no activations for
the backward. The last is measured: the same small forward once as the model is and once with every weight trainable, the
difference in what autograd holds, in proportion to the rows of a micro-batch.
"""

import torch
from torch import nn

from brimful.memory.bare import Rig, to_device
from brimful.memory.oom import OutOfMemory, attempt
from brimful.memory.snapshot import Buffers, RandomState
from brimful.plan.plan import Choice
from brimful.task import Shape
from brimful.units import show_bytes

ROWS = 2
"""A single row is refused by BatchNorm."""


def frozen_choice(rig: Rig, shape: Shape, micro_batch: int) -> Choice | None:
    """None where every weight trains."""
    frozen = [param for param in rig.model.parameters() if not param.requires_grad]
    if not frozen:
        return None
    weights = sum(param.numel() for param in rig.model.parameters())
    count = sum(param.numel() for param in frozen)
    gradients = sum(param.nbytes for param in frozen)
    state = _state_bytes(rig, frozen)
    held = _activations_saved(rig, frozen, shape)
    said = f"saves {show_bytes(gradients)} of gradients and {show_bytes(state)} of optimizer state (counted)"
    if held is not None:
        at = "+".join(map(str, shape))
        said += f", and {show_bytes(held * micro_batch)} of activations at {micro_batch} rows of {at} (predicted from {ROWS} and {2 * ROWS})"
    return Choice(
        name="frozen", requested=None, effective=f"{count / weights:.0%} of the weights", reason=said, basis="measured"
    )


def _state_bytes(rig: Rig, frozen: list[nn.Parameter]) -> int:
    """What the optimizer would hold for them, by what it holds for each trained weight."""
    state = [value for one in rig.optimizer.state.values() for value in one.values() if isinstance(value, torch.Tensor)]
    trained = sum(param.numel() for param in rig.model.parameters() if param.requires_grad)
    return round(sum(value.nbytes for value in state) / max(1, trained) * sum(param.numel() for param in frozen))


def _activations_saved(rig: Rig, frozen: list[nn.Parameter], shape: Shape) -> float | None:
    """Bytes a row; None where the forward cannot be run so."""
    random_state, buffers = RandomState(rig.device), Buffers(rig.model)

    def both() -> float:
        as_it_is = [_held_bytes(rig, shape, rows) for rows in (ROWS, 2 * ROWS)]
        for param in frozen:
            param.requires_grad_(True)
        saved = [_held_bytes(rig, shape, rows) - held for rows, held in zip((ROWS, 2 * ROWS), as_it_is, strict=True)]
        return (
            saved[1] - saved[0]
        ) / ROWS  # what does not grow with the rows, autocast's copies of weights, is no activation

    try:
        outcome = attempt(both, rig.device)
    except Exception:  # weights of whole numbers, say: they cannot train at all
        return None
    finally:
        for param in frozen:
            param.requires_grad_(False)
        buffers.restore()
        random_state.restore()
    return None if isinstance(outcome, OutOfMemory) else max(0.0, outcome)


def _held_bytes(rig: Rig, shape: Shape, rows: int) -> int:
    """What autograd keeps from the forward to the backward, weights aside."""
    kept: dict[int, int] = {}
    weights = {param.untyped_storage().data_ptr() for param in rig.model.parameters()}

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in weights:
            kept[storage.data_ptr()] = storage.nbytes()
        return tensor.detach()  # an output packed as itself would keep its own graph alive for ever

    batch = to_device(rig.task.dummy(rows, shape), rig.device)
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor), rig.opened():
        held = rig.task.loss(rig.model, batch)
    total = sum(kept.values())
    del held
    return total
