"""Host memory of a run whose model lies on a card, imitated: no second model on the host, and nothing left afterwards.

Each in a process of its own, that has not freed anything yet; this module imports little, since they import it too.
"""

import gc
import sys
import weakref
from pathlib import Path

import pytest
import torch
from torch import nn

import brimful
from brimful.task import Task
from brimful.training import state
from brimful.training.loop import Hook
from tests.training.runs import Run, _begin, finish
from tests.training.test_state import position

pytestmark = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc")

LAYERS, SIDE = 4, 3072
"""144 MiB of weights, each tensor above the 32 MiB up to which malloc may keep freed memory."""


def anonymous_bytes():
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("RssAnon"))


class OnCard(torch.Tensor):
    """Says it lies on a card: the host gets copies of it. Looks at the host's memory whenever it gives one."""

    most_bytes = 0

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        if func is torch.Tensor.device.__get__:
            return torch.device("cuda", 0)
        if func is torch.Tensor.cpu or (func is torch.Tensor.to and args[1:] == ("cpu",)):
            with torch._C.DisableTorchFunctionSubclass():
                copied = args[0].as_subclass(torch.Tensor).clone()
            OnCard.most_bytes = max(OnCard.most_bytes, anonymous_bytes())
            return copied
        return super().__torch_function__(func, types, args, kwargs or {})


def _save_from_a_card(folder):
    state.PIECE_BYTES = SIDE * SIDE * 4
    model = nn.Module()
    for layer in range(LAYERS):
        weight = torch.full((SIDE, SIDE), float(layer)).as_subclass(OnCard)
        model.register_parameter(f"layer{layer}", nn.Parameter(weight, requires_grad=False))
    optimizer = torch.optim.SGD([torch.ones(1, requires_grad=True)])
    before = anonymous_bytes()
    state.write(folder, position(), task=Task(), model=model, optimizer=optimizer, rows=[])
    assert OnCard.most_bytes > 0, "nothing was copied"
    assert OnCard.most_bytes - before < LAYERS * SIDE * SIDE * 4 / 2


def test_saving_a_model_on_a_card_takes_no_second_one_on_the_host(tmp_path):
    assert finish([_begin(_save_from_a_card, tmp_path)]) == [0]


class Taker:
    """Stands for an optimizer whose state lies on a card: looks at the host's memory when it is handed its state."""

    param_groups, state = (), {}

    def load_state_dict(self, content):
        self.bytes = sum(tensor.nbytes for tensor in content.values())
        self.found_bytes = anonymous_bytes()


def _load_to_a_card(folder):
    taker, before = Taker(), anonymous_bytes()
    state.load_optimizer(folder, taker, [])
    assert taker.bytes == LAYERS * SIDE * SIDE * 4
    assert taker.found_bytes - before < taker.bytes / 2


def test_loading_optimizer_state_takes_no_second_one_on_the_host(tmp_path):
    torch.save({layer: torch.empty(SIDE, SIDE) for layer in range(LAYERS)}, tmp_path / "optimizer.pt")
    assert finish([_begin(_load_to_a_card, tmp_path)]) == [0]


class Keeper(Hook):
    """Knows the run's model, and does not hold it."""

    def before(self, loop):
        self.model = weakref.ref(loop.stepper.model)


def _finish_a_run(folder):
    gc.disable()
    keeper = Keeper()
    brimful.train(
        Run(),
        "rows",
        run=str(folder),
        valid="rows",
        max_steps=1,
        micro_batch=16,
        hooks=[keeper],
        device="cpu",
        cache=False,
    )
    assert keeper.model() is None


def test_a_finished_run_leaves_no_model_behind(tmp_path):
    assert finish([_begin(_finish_a_run, tmp_path / "run")]) == [0]
