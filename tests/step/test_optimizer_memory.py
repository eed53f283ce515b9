"""The bytes of an optimizer's step, predicted on the meta device against what a ledger counts of the real one."""

import copy
import random

import numpy as np
import pytest
import torch
from torch import nn, optim
from torch.optim.lr_scheduler import StepLR
from torch.optim.optimizer import register_optimizer_step_pre_hook

from brimful.memory.ledger import Ledger
from brimful.step import optimizer_memory
from brimful.step.optimizer_memory import OptimizerBytes, OptimizerMemory, is_first_step, predict

CPU = torch.device("cpu")
SMALL = 64
"""Counters that an optimizer keeps on the host for each parameter are not predicted."""


def parameters(*shapes: tuple[int, ...]) -> list[nn.Parameter]:
    generator = torch.Generator().manual_seed(0)
    made = [nn.Parameter(torch.randn(shape, generator=generator)) for shape in shapes or ((64, 128), (256, 33), (777,))]
    for param in made:
        param.grad = torch.randn(param.shape, generator=generator)
    return made


def graded(optimizer: optim.Optimizer) -> list[nn.Parameter]:
    return [p for group in optimizer.param_groups for p in group["params"] if p.grad is not None]


def held_by(optimizer: optim.Optimizer) -> list[torch.Tensor]:
    """Weights, gradients and state, however deep."""
    found: list[torch.Tensor] = []

    def look(value) -> None:
        if isinstance(value, torch.Tensor):
            found.extend(one for one in (value, value.grad) if one is not None)
        elif isinstance(value, dict):
            for child in value.values():
                look(child)
        elif isinstance(value, (list, tuple)):
            for child in value:
                look(child)

    look(optimizer.param_groups)
    look(dict(optimizer.state))
    return found


def made_by_a_step(optimizer: optim.Optimizer) -> int:
    """Bytes above what was held before, at the peak of the real step."""
    ledger = Ledger()
    ledger.adopt(held_by(optimizer))
    before = ledger.live_bytes
    with ledger:
        optimizer.step()
    return ledger.peak_bytes - before


def close(predicted: tuple[int, ...], measured: int, optimizer: optim.Optimizer) -> bool:
    return abs(sum(predicted) - measured) <= SMALL * len(graded(optimizer))


PLAIN = {
    "SGD": {},
    "SGD maximize": {"maximize": True},
    "SGD momentum": {"momentum": 0.9},
    "SGD nesterov": {"momentum": 0.9, "nesterov": True, "weight_decay": 0.1},
    "Adam": {},
    "Adam amsgrad": {"amsgrad": True},
    "Adam decay": {"weight_decay": 0.1},
    "AdamW": {},
    "AdamW amsgrad maximize": {"amsgrad": True, "maximize": True},
    "Adadelta": {},
    "Adagrad": {},
    "Adamax": {},
    "ASGD": {},
    "NAdam": {},
    "RAdam": {},
    "RMSprop": {},
    "RMSprop centered": {"centered": True, "momentum": 0.9},
    "Rprop": {},
    "Adafactor": {},
}
CASES = {
    f"{name}, {way}": (name.split()[0], {**options, **switch})
    for way, switch in {"as it comes": {}, "foreach": {"foreach": True}, "loop": {"foreach": False}}.items()
    for name, options in PLAIN.items()
} | {
    f"{name}, fused": (name.split()[0], {**PLAIN[name], "fused": True})
    for name in ("SGD", "SGD momentum", "Adam", "AdamW", "AdamW amsgrad maximize", "Adagrad")
}


def make(case: str, params: list[nn.Parameter]) -> optim.Optimizer:
    kind, options = CASES[case]
    return getattr(optim, kind)(params, lr=1e-2, **options)


def adafactor(params: list[nn.Parameter], **options) -> optim.Optimizer:
    transformers = pytest.importorskip("transformers")
    return transformers.Adafactor(params, **({"lr": 1e-3, "relative_step": False, "scale_parameter": False} | options))


@pytest.mark.parametrize("case", CASES)
def test_the_first_and_the_later_steps_take_what_was_predicted_before_the_first(case):
    optimizer = make(case, parameters())
    need = predict(optimizer, graded(optimizer))
    assert need.traced
    assert close(need.first, made_by_a_step(optimizer), optimizer)
    assert close(need.later, made_by_a_step(optimizer), optimizer)
    assert close(need.later, made_by_a_step(optimizer), optimizer)


@pytest.mark.parametrize("case", [case for case in CASES if case != "ASGD, foreach"])
def test_later_steps_take_what_is_predicted_of_an_optimizer_with_a_past(case):
    optimizer = make(case, parameters())
    optimizer.step()
    need = predict(optimizer, graded(optimizer))
    assert need.traced
    assert close(need.later, made_by_a_step(optimizer), optimizer)


@pytest.mark.parametrize("options", [{}, {"relative_step": True, "lr": None}, {"beta1": 0.9}], ids=str)
def test_the_first_step_of_hugging_face_adafactor_takes_what_was_predicted(options):
    optimizer = adafactor(parameters(), **options)
    need = predict(optimizer, graded(optimizer))
    assert need.traced
    assert close(need.first, made_by_a_step(optimizer), optimizer)


def test_muon_takes_what_was_predicted():
    if not hasattr(optim, "Muon"):
        pytest.skip("this torch has no Muon")
    optimizer = optim.Muon(parameters((64, 128), (256, 33)))
    need = predict(optimizer, graded(optimizer))
    assert need.traced
    assert close(need.first, made_by_a_step(optimizer), optimizer)
    assert close(need.later, made_by_a_step(optimizer), optimizer)


def test_the_figures_of_the_docstring_are_those_of_adamw():
    weights = sum(4 * p.numel() for p in parameters())
    fused = optim.AdamW(parameters(), fused=True)
    foreach = optim.AdamW(parameters(), foreach=True)
    need = predict(fused, graded(fused))
    assert (sum(need.first), sum(need.later)) == (2 * weights, 0)
    assert sum(predict(foreach, graded(foreach)).later) == weights


def test_weights_of_half_precision_take_half():
    optimizer = optim.AdamW([nn.Parameter(p.detach().bfloat16()) for p in parameters()], fused=True)
    for group in optimizer.param_groups:
        for param in group["params"]:
            param.grad = torch.zeros_like(param)
    assert sum(predict(optimizer, graded(optimizer)).first) == 2 * sum(2 * p.numel() for p in graded(optimizer))


def test_parameters_without_a_gradient_take_nothing():
    params = parameters()
    params[1].grad = None
    optimizer = optim.AdamW(params, foreach=True)
    need = predict(optimizer, graded(optimizer))
    assert len(graded(optimizer)) == 2
    assert close(need.first, made_by_a_step(optimizer), optimizer)
    assert close(need.later, made_by_a_step(optimizer), optimizer)


def test_a_parameter_that_gets_its_first_gradient_late_adds_its_state():
    params = parameters()
    late, params[1].grad = params[1].grad, None
    optimizer = optim.AdamW(params, foreach=True)
    optimizer.step()
    params[1].grad = late
    need = predict(optimizer, params)
    assert close(need.first, made_by_a_step(optimizer), optimizer)
    assert close(need.later, made_by_a_step(optimizer), optimizer)


@pytest.mark.parametrize("foreach", [True, False])
def test_groups_step_one_after_the_other(foreach):
    params = parameters()
    groups = [{"params": params[:1], "amsgrad": True}, {"params": params[1:], "weight_decay": 0.3}]
    optimizer = optim.AdamW(groups, foreach=foreach)
    need = predict(optimizer, params)
    assert close(need.first, made_by_a_step(optimizer), optimizer)
    assert close(need.later, made_by_a_step(optimizer), optimizer)


def test_an_optimizer_whose_state_was_loaded_takes_no_new_state():
    saved = optim.AdamW(parameters(), fused=True)
    saved.step()
    optimizer = optim.AdamW(parameters(), fused=True)
    optimizer.load_state_dict(saved.state_dict())
    assert predict(optimizer, graded(optimizer)) == OptimizerBytes(first=(), later=(), traced=True)


def test_a_learning_rate_may_be_a_tensor():
    optimizer = optim.AdamW(parameters(), lr=torch.tensor(0.1))
    need = predict(optimizer, graded(optimizer))
    assert need.traced
    assert close(need.first, made_by_a_step(optimizer), optimizer)


def test_a_scheduler_that_patched_the_step_neither_hinders_nor_notices():
    optimizer = optim.AdamW(parameters(), foreach=True)
    StepLR(optimizer, 1)
    plain = optim.AdamW(parameters(), foreach=True)
    assert predict(optimizer, graded(optimizer)) == predict(plain, graded(plain))
    assert not getattr(optimizer, "_opt_called", False)


def test_no_hook_is_called():
    called = []
    optimizer = optim.AdamW(parameters())
    optimizer.register_step_pre_hook(lambda *_: called.append("before"))
    optimizer.register_step_post_hook(lambda *_: called.append("after"))
    everywhere = register_optimizer_step_pre_hook(lambda *_: called.append("any"))
    try:
        assert predict(optimizer, graded(optimizer)).traced
    finally:
        everywhere.remove()
    assert called == []


def test_a_step_that_was_replaced_on_the_instance_is_not_called():
    called = []
    optimizer = optim.SGD(parameters(), momentum=0.9)
    optimizer.step = lambda *_: called.append(1)
    assert predict(optimizer, graded(optimizer)).traced
    assert called == []


# What it leaves


def everything(optimizer: optim.Optimizer) -> dict:
    params = [p for group in optimizer.param_groups for p in group["params"]]
    return {
        "attributes": set(optimizer.__dict__),
        "ids": [id(tensor) for tensor in held_by(optimizer)],
        "versions": [tensor._version for tensor in held_by(optimizer)],
        "values": [tensor.detach().clone() for tensor in held_by(optimizer)],
        "grads": [None if p.grad is None else id(p.grad) for p in params],
        "options": [
            {key: value for key, value in group.items() if key != "params"} for group in optimizer.param_groups
        ],
        "hooks": [list(hooks.items()) for name, hooks in optimizer.__dict__.items() if name.endswith("_hooks")],
    }


def same(one, other) -> bool:
    if isinstance(one, torch.Tensor):
        return torch.equal(one, other)
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(same(one[key], other[key]) for key in one)
    if isinstance(one, list):
        return len(one) == len(other) and all(map(same, one, other))
    return one == other


@pytest.mark.parametrize("steps", [0, 2])
@pytest.mark.parametrize(
    "case", ["AdamW, fused", "AdamW amsgrad maximize, foreach", "SGD nesterov, loop", "ASGD, loop"]
)
def test_the_optimizer_its_weights_gradients_state_and_hooks_stay_as_they_were(case, steps):
    optimizer = make(case, parameters())
    optimizer.register_step_pre_hook(lambda *_: None)
    StepLR(optimizer, 1)
    for _ in range(steps):
        optimizer.step()
    before, stream = everything(optimizer), torch.get_rng_state()
    predict(optimizer, graded(optimizer))
    after = everything(optimizer)
    assert [key for key in before if not same(before[key], after[key])] == []
    assert torch.equal(stream, torch.get_rng_state())


def test_training_goes_on_to_the_same_weights():
    ends = []
    for looks in (False, True):
        optimizer = optim.AdamW(parameters(), foreach=True)
        scheduler = StepLR(optimizer, 1, gamma=0.5)
        for _ in range(3):
            if looks:
                predict(optimizer, graded(optimizer))
            optimizer.step()
            scheduler.step()
        ends.append(graded(optimizer))
    assert all(torch.equal(one, other) for one, other in zip(*ends, strict=True))


@pytest.mark.parametrize("steps", [0, 1])
def test_a_prediction_allocates_nothing_to_speak_of(steps):
    optimizer = optim.AdamW(parameters((512, 512), (512, 300)), foreach=True)
    for _ in range(steps):
        optimizer.step()
    ledger = Ledger()
    ledger.adopt(held_by(optimizer))
    before = ledger.live_bytes
    with ledger:
        assert predict(optimizer, graded(optimizer)).traced
    assert ledger.peak_bytes - before < 1024


def test_a_prediction_can_be_made_on_a_full_device():
    optimizer = optim.AdamW(parameters((512, 512)))
    with Ledger(sum(4 * t.numel() for t in held_by(optimizer)) + 512):
        assert predict(optimizer, graded(optimizer)).traced


# What cannot be traced


class Reads(optim.SGD):
    """Decides by a value, on the host."""

    def step(self, closure=None):
        for group in self.param_groups:
            for param in group["params"]:
                if param.grad.numpy().mean() < 1e9:
                    param.data.add_(param.grad, alpha=-0.1)


class Fails(optim.SGD):
    def step(self, closure=None):
        raise RuntimeError("no kernel for this device")


class Holds(optim.SGD):
    """Something that cannot be copied."""

    def __init__(self, params):
        super().__init__(params, lr=0.1)
        self.stream = (n for n in range(3))


@pytest.mark.parametrize("kind", [Reads, Fails, Holds])
def test_an_optimizer_that_cannot_be_traced_gets_a_rule_of_thumb_that_says_so(kind):
    params = parameters()
    sizes = tuple(4 * p.numel() for p in params)
    assert predict(kind(params), params) == OptimizerBytes(first=sizes * 2, later=sizes, traced=False)


def test_the_rule_of_thumb_counts_only_what_has_a_gradient():
    params = parameters()
    params[0].grad = None
    sizes = tuple(4 * p.numel() for p in params[1:])
    assert predict(Fails(params), params[1:]).later == sizes


def test_an_optimizer_that_cannot_be_traced_is_left_as_it_was():
    params = parameters()
    optimizer = Reads(params, lr=0.1)
    before = copy.deepcopy(params)
    predict(optimizer, params)
    assert all(torch.equal(one, other) for one, other in zip(params, before, strict=True))


# Which of the two


def test_the_first_step_is_the_one_without_state():
    params = parameters()
    optimizer = optim.AdamW(params)
    assert is_first_step(optimizer, params)
    optimizer.step()
    assert not is_first_step(optimizer, params)


def test_asking_whether_it_is_the_first_step_makes_no_state():
    params = parameters()
    optimizer = optim.AdamW(params)
    is_first_step(optimizer, params)
    assert len(optimizer.state) == 0


def test_a_parameter_without_state_makes_a_later_step_a_first_one():
    params = parameters()
    grad, params[0].grad = params[0].grad, None
    optimizer = optim.AdamW(params)
    optimizer.step()
    assert not is_first_step(optimizer, params[1:])
    params[0].grad = grad
    assert is_first_step(optimizer, params)


# The reservation


def test_a_reservation_takes_just_the_bytes_there_are():
    with Ledger(1000) as ledger:
        optimizer_memory.reserve((600, 400), CPU)
        assert ledger.peak_bytes == 1000


def test_a_reservation_of_a_byte_more_runs_out_of_memory():
    with Ledger(1000), pytest.raises(torch.OutOfMemoryError):
        optimizer_memory.reserve((600, 401), CPU)


def test_nothing_of_a_reservation_stays():
    with Ledger(1000) as ledger:
        optimizer_memory.reserve((600, 400), CPU)
        assert ledger.live_bytes == 0


def test_no_bytes_can_be_reserved_on_a_full_device():
    full = torch.zeros(250)
    with Ledger(1000) as ledger:
        ledger.adopt([full])
        optimizer_memory.reserve((), CPU)
        assert ledger.ooms == 0


@pytest.mark.parametrize("case", ["AdamW, foreach", "AdamW, loop", "RMSprop centered, foreach", "SGD momentum, fused"])
def test_where_the_reservation_went_through_the_step_does(case):
    optimizer = make(case, parameters())
    need = predict(optimizer, graded(optimizer))
    with Ledger() as ledger:
        ledger.adopt(held_by(optimizer))
        ledger.limit_bytes = ledger.live_bytes + sum(need.first) + SMALL * 3
        optimizer_memory.reserve(need.first, CPU)
        optimizer.step()
        assert ledger.ooms == 0


@pytest.mark.parametrize("case", ["AdamW, foreach", "AdamW, loop", "RMSprop centered, foreach", "SGD momentum, fused"])
def test_where_the_step_would_run_out_of_memory_the_reservation_does(case):
    optimizer = make(case, parameters())
    need = predict(optimizer, graded(optimizer))
    with Ledger() as ledger:
        ledger.adopt(held_by(optimizer))
        ledger.limit_bytes = ledger.live_bytes + sum(need.first) - SMALL * 3
        with pytest.raises(torch.OutOfMemoryError):
            optimizer_memory.reserve(need.first, CPU)
        with pytest.raises(torch.OutOfMemoryError):
            optimizer.step()


# As on a card


class OnACard(nn.Parameter):
    """Says that it lies there; what torch would choose there is traced here."""

    device = property(lambda self: torch.device("cuda", 0))


def on_a_card() -> list[nn.Parameter]:
    params = [OnACard(param.detach()) for param in parameters()]
    for param in params:
        param.grad = torch.zeros(param.shape)
    return params


@pytest.mark.parametrize("kind", ["SGD", "Adam", "AdamW", "Adagrad", "Adamax", "NAdam", "RAdam", "RMSprop", "Rprop"])
def test_on_a_gpu_foreach_is_the_default(kind):
    unsaid = getattr(optim, kind)(on_a_card())
    said = getattr(optim, kind)(parameters(), foreach=True)
    assert predict(unsaid, graded(unsaid)) == predict(said, graded(said))


def test_on_a_gpu_a_loop_that_was_chosen_stays():
    optimizer = optim.AdamW(on_a_card(), foreach=False)
    foreach = optim.AdamW(on_a_card(), foreach=True)
    assert predict(optimizer, graded(optimizer)).later != predict(foreach, graded(foreach)).later


def test_on_a_gpu_adafactor_is_a_loop_by_default():
    unsaid, said = optim.Adafactor(on_a_card()), optim.Adafactor(parameters(), foreach=False)
    assert sum(predict(unsaid, graded(unsaid)).later) == sum(predict(said, graded(said)).later)


def test_on_a_gpu_adamw_with_a_tensor_for_a_learning_rate_is_traced():
    optimizer = optim.AdamW(on_a_card(), lr=torch.tensor(0.1))
    assert predict(optimizer, graded(optimizer)).traced


ONE_NUMBER = "state of a parameter of one element stays on the host while its weight is on meta"


@pytest.mark.parametrize(
    "case", ["AdamW, foreach", "AdamW, loop", "AdamW, fused", "RMSprop, foreach", "SGD nesterov, loop"]
)
def test_an_optimizer_with_a_past_and_a_parameter_of_one_element_is_traced(case):
    optimizer = make(case, parameters((64, 128), (1,)))
    optimizer.step()
    assert predict(optimizer, graded(optimizer)).traced


def test_a_new_adagrad_with_a_parameter_of_one_element_is_traced():
    optimizer = optim.Adagrad(parameters((64, 128), (1,)))
    assert predict(optimizer, graded(optimizer)).traced


def test_a_foreach_asgd_with_a_past_is_a_rule_of_thumb():
    """Its counters stay on the host and meet tensors on meta: known, and said."""
    optimizer = optim.ASGD(parameters(), foreach=True)
    optimizer.step()
    assert not predict(optimizer, graded(optimizer)).traced


class Renews(optim.Optimizer):
    """Drops some of its state and makes it anew at every step, as Hugging Face's Adafactor does with its RMS."""

    def __init__(self, params):
        super().__init__(params, {})

    @torch.no_grad()
    def step(self, closure=None):
        params = self.param_groups[0]["params"]
        for param in params:
            self.state[param].pop("norms", None)
        kept = [torch.empty_like(param) for param in params for _ in range(10)]
        for param in params:
            self.state[param]["norms"] = param.grad.norm(dim=1)
        del kept


REUSED = "a new storage at the address of one that died in the step is taken for one that was there before"


def test_what_a_step_frees_does_not_hide_what_it_makes():
    optimizer = Renews(parameters(*[(100, 10)] * 50))
    need = predict(optimizer, graded(optimizer))
    assert need.later.count(4000) == 50 * 10


def test_later_steps_of_hugging_face_adafactor_take_what_was_predicted():
    optimizer = adafactor(parameters(*[(64, 128)] * 12))
    need = predict(optimizer, graded(optimizer))
    optimizer.step()
    assert close(need.later, made_by_a_step(optimizer), optimizer)


class Derived(optim.AdamW):
    """Calls the step it inherits, as many an optimizer does."""

    def step(self, closure=None):
        return super().step(closure)


def test_an_optimizer_that_calls_the_step_it_inherits_is_traced():
    optim.AdamW(parameters())  # torch wraps a class's step when the first of its kind is built
    optimizer = Derived(parameters(), amsgrad=True)
    assert predict(optimizer, graded(optimizer)).traced


class Nested(optim.Optimizer):
    """Keeps its state in a list."""

    def __init__(self, params):
        super().__init__(params, {})

    @torch.no_grad()
    def step(self, closure=None):
        for param in self.param_groups[0]["params"]:
            state = self.state[param]
            if "history" not in state:
                state["history"] = [torch.zeros_like(param)]
            state["history"][0].add_(param.grad)


@pytest.mark.parametrize("steps", [0, 1])
def test_state_in_a_list_takes_what_was_predicted_or_more(steps):
    optimizer = Nested(parameters())
    for _ in range(steps):
        optimizer.step()
    need = predict(optimizer, graded(optimizer))
    measured = made_by_a_step(optimizer)
    assert sum(need.later if steps else need.first) >= measured


class KeepsItsModel(optim.SGD):
    def __init__(self, model):
        super().__init__([p for p in model.parameters() if p.requires_grad], lr=0.1)
        self.model = model


def test_a_prediction_copies_no_weights_that_the_optimizer_refers_to():
    model = nn.Sequential(nn.Linear(100, 100).requires_grad_(False), nn.Linear(100, 2))
    optimizer = KeepsItsModel(model)
    for param in model[1].parameters():
        param.grad = torch.zeros_like(param)
    ledger = Ledger()
    ledger.adopt([*model.parameters(), *(p.grad for p in model[1].parameters())])
    before = ledger.live_bytes
    with ledger:
        predict(optimizer, graded(optimizer))
    assert ledger.peak_bytes - before < 1024


class NoisySGD(optim.SGD):
    """Draws noise for its step on the host, and some from a generator of its own."""

    def step(self, closure=None):
        for param in graded(self):
            param.grad.add_(torch.randn(1).item() + random.random() + np.random.rand())
            param.grad.add_(torch.rand(1, generator=self.param_groups[0]["generator"]).item())
        return super().step(closure)


def test_an_optimizer_that_draws_noise_draws_the_same_after_its_memory_is_predicted():
    params, generator = parameters(), torch.Generator().manual_seed(0)
    optimizer = NoisySGD([{"params": params, "generator": generator}], lr=0.1)

    def states():
        return (
            torch.get_rng_state().tolist(),
            random.getstate(),
            np.random.get_state()[2],
            generator.get_state().tolist(),
        )

    before = states()
    OptimizerMemory(optimizer, CPU, pytest.fail).reserve(params)
    assert states() == before
