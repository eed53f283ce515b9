"""A step gives the result of the plain large batch, whatever memory does on the way."""

import functools
import inspect
import itertools
import math

import pytest
import torch
from torch import nn

from brimful.errors import BadOption, DoesNotFit, InexactSplit, NonFiniteGradients, PartialUpdate, TaskError, UserError
from brimful.memory.ledger import simulated_memory
from brimful.step import optimizer_memory
from brimful.step.gradients import Readout
from brimful.step.stepper import Stepper
from brimful.task import Loss, Task
from tests.step.small import (
    PLACES,
    Faults,
    FullHost,
    TwoTerms,
    Words,
    distance,
    out_of_memory,
    plain_loop,
    steps_of_rows,
)

ADAMW = functools.partial(torch.optim.AdamW, lr=1e-2)
SGD = functools.partial(torch.optim.SGD, lr=0.1)
OPTIMIZERS = {
    "adamw": ADAMW,
    "sgd": SGD,
    "momentum": functools.partial(torch.optim.SGD, lr=0.1, momentum=0.9, nesterov=True),
    "rmsprop": functools.partial(torch.optim.RMSprop, lr=1e-3),
    "adafactor": functools.partial(torch.optim.Adafactor, lr=1e-2),
    "adagrad": functools.partial(torch.optim.Adagrad, lr=1e-2),
}
STEPS = steps_of_rows(steps=8)
MICRO_BATCHES = 4
EVERYWHERE = [(index, place) for place in PLACES[:3] for index in range(MICRO_BATCHES)] + [(0, p) for p in PLACES[3:]]


@functools.cache
def plain(optimizer: str, dtype=torch.float64):
    return plain_loop(Words(dtype), STEPS, OPTIMIZERS[optimizer])


def run(optimizer="adamw", due=(), *, task=None, steps=STEPS, micro_batch=3, seed=0, **options):
    """The same training through the stepper, with faults."""
    task = task or Words()
    model = task.model()
    stepper = Stepper(
        model, OPTIMIZERS[optimizer](model.parameters()), task, micro_batch=micro_batch, clip_norm=1.0, **options
    )
    faults = Faults(model, due)
    torch.manual_seed(seed)
    results = []
    with faults.installed():
        for number, rows in enumerate(steps, start=1):
            faults.begin(number)
            results.append(stepper.step(rows))
    assert not faults.due, "every fault was to strike"
    return model, stepper, results


def every_third_step(index, place):
    return [(step, index, place) for step in range(2, 1 + len(STEPS), 3)]


@pytest.mark.parametrize(("index", "place"), EVERYWHERE)
@pytest.mark.parametrize(
    "optimizer", [name if name == "adamw" else pytest.param(name, marks=pytest.mark.torture) for name in OPTIMIZERS]
)
def test_in_float64_an_oom_leaves_the_weights_of_the_undisturbed_run(optimizer, index, place):
    model, stepper, _ = run(optimizer, every_third_step(index, place))
    assert distance(plain(optimizer), model) < 1e-10
    assert stepper.ooms == 3


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_every_optimizer_is_stepped_exactly_after_ooms(optimizer):
    faults = [(2, 1, "backward"), (3, 0, "clip"), (5, 0, "reservation"), (6, 2, "forward")]
    assert distance(plain(optimizer), run(optimizer, faults)[0]) < 1e-10


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize(("optimizer", "tolerance"), [("sgd", 1e-6), ("adamw", 1e-4)])
def test_in_float32_an_oom_changes_only_rounding(optimizer, tolerance, place):
    model, _, _ = run(optimizer, every_third_step(1, place), task=Words(torch.float32))
    assert distance(plain(optimizer, torch.float32), model) < tolerance


@pytest.mark.parametrize("micro_batch", [1, 2, 5, 12, None])
def test_any_split_gives_the_plain_large_batch(micro_batch):
    assert distance(plain("adamw"), run(micro_batch=micro_batch)[0]) < 1e-10


def test_a_mean_of_means_would_have_been_seen():
    """The rows are uneven enough for these tests to mean something."""
    task = Words()
    model = task.model()
    optimizer = ADAMW(model.parameters())
    for rows in STEPS:
        optimizer.zero_grad()
        for start in range(0, 12, 3):
            loss = task.loss(model, task.collate(rows[start : start + 3]))
            (loss.sum / loss.count / 4).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
    assert distance(plain("adamw"), model) > 1e-3


@pytest.mark.parametrize("place", PLACES)
def test_many_faults_in_one_step_are_survived(place):
    due = [(step, index, place) for step in (2, 3, 7) for index in range(3)] + [(2, 0, "clip"), (7, 1, "forward")]
    assert distance(plain("adamw"), run(due=due)[0]) < 1e-10


def test_the_optimizer_is_applied_once_a_step():
    calls = itertools.count()
    task = Words()
    model = task.model()
    optimizer = ADAMW(model.parameters())
    optimizer.register_step_post_hook(lambda *_: next(calls))
    stepper = Stepper(model, optimizer, task, micro_batch=3)
    faults = Faults(model, [(step, 1, place) for step in (2, 6) for place in PLACES[1:4]])
    with faults.installed():
        for number, rows in enumerate(STEPS, start=1):
            faults.begin(number)
            stepper.step(rows)
    assert next(calls) == len(STEPS)


def test_every_row_is_in_the_gradient_once():
    """A loss whose gradient is the sum of one-hot row ids."""
    rows = [{"id": index, "words": torch.ones(1 + index % 7, dtype=torch.long)} for index in range(12)]
    bag = nn.Embedding(12, 1)

    def loss(model, batch):
        return Loss(model(batch["id"]).sum(), len(batch["id"]))

    stepper = Stepper(bag, torch.optim.SGD(bag.parameters(), lr=0.0), loss, collate=Words().collate, micro_batch=5)
    stepper.step(rows)  # the first step also compares a few rows with their halves
    seen = itertools.count()

    def fault(_module, _inputs, _output):
        if next(seen) == 2:
            out_of_memory()

    bag.register_forward_hook(fault)
    result = stepper.backward(rows)
    assert result.ooms == 1
    assert torch.equal(bag.weight.grad * result.count, torch.ones(12, 1))


def test_with_dropout_the_same_seed_and_faults_give_the_same_bits():
    due = [(2, 1, "backward"), (5, 0, "forward"), (6, 2, "to device")]
    first, again = (run(due=due, task=Words(dropout=0.3))[0] for _ in range(2))
    assert all(torch.equal(a, b) for a, b in zip(first.parameters(), again.parameters(), strict=True))


def test_with_dropout_a_retry_at_the_same_split_draws_the_same_masks():
    """What fails after the last micro-batch is repeated with the same split."""
    undisturbed = run(task=Words(dropout=0.3))[0]
    disturbed = run(due=[(3, 0, "reservation"), (7, 0, "clip")], task=Words(dropout=0.3))[0]
    assert distance(undisturbed, disturbed) == 0


@pytest.mark.parametrize("place", PLACES)
def test_batch_norm_counts_only_the_micro_batches_that_went_through(place):
    model, _, results = run(due=[(2, 1, place), (4, 0, place)], task=Words(norm=True), grow_after=1)
    assert int(model.middle.num_batches_tracked) == sum(result.micro_batches for result in results)


def test_batch_norm_is_never_left_with_a_single_row():
    inputs = torch.randn(7, 4)
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 1))
    stepper = Stepper(model, SGD(model.parameters()), lambda m, x: Loss(m(x).sum(), len(x)), micro_batch=2)
    result = stepper.step(inputs)
    assert (result.rows, result.micro_batches) == (7, 3)


def test_batch_norm_is_warned_about_once():
    _, stepper, _ = run(task=Words(norm=True))
    assert sum("the step is split although BatchNorm ('middle')" in event.sentence for event in stepper.events) == 1


def test_an_average_kept_by_a_hook_sees_each_update_once():
    def averaged(due):
        task = Words()
        model = task.model()
        optimizer = ADAMW(model.parameters())
        average = torch.optim.swa_utils.AveragedModel(
            model, multi_avg_fn=torch.optim.swa_utils.get_ema_multi_avg_fn(0.9)
        )
        optimizer.register_step_post_hook(lambda *_: average.update_parameters(model))
        stepper = Stepper(model, optimizer, task, micro_batch=3, clip_norm=1.0)
        faults = Faults(model, due)
        with faults.installed():
            for number, rows in enumerate(STEPS, start=1):
                faults.begin(number)
                stepper.step(rows)
        return average

    assert distance(averaged([]), averaged(every_third_step(1, "backward"))) < 1e-10


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_in_low_precision_an_oom_changes_rounding_only(precision):
    task = Words(torch.float32)
    undisturbed, _, results = run("sgd", task=task, precision=precision)
    disturbed, _, again = run("sgd", [*every_third_step(1, "backward"), (6, 0, "clip")], task=task, precision=precision)
    assert distance(undisturbed, disturbed) < 5e-3
    assert all(result.applied for result in results[-5:] + again[-5:])


def test_the_scaler_is_the_users_and_grows_as_without_a_fault():
    def scale(due):
        scaler = torch.amp.GradScaler("cpu", growth_interval=3)
        run("sgd", due, task=Words(torch.float32), precision="fp16", scaler=scaler)
        return scaler.get_scale()

    assert scale([]) == scale([(2, 1, "backward"), (3, 0, "clip"), (4, 0, "reservation")])


def test_a_norm_that_overflows_is_skipped_with_a_scaler_too():
    """Each gradient is a number, their norm is none, and the scaler alone would have stepped."""
    model = nn.Linear(4, 1)
    before = model.weight.detach().clone()
    stepper = Stepper(
        model,
        torch.optim.AdamW(model.parameters(), lr=0.1),
        lambda m, x: Loss(m(x).sum() * 1e25, len(x)),
        scaler=torch.amp.GradScaler("cpu", init_scale=1.0),
        clip_norm=1.0,
    )
    assert not stepper.step(torch.ones(3, 4)).applied
    assert torch.equal(before, model.weight)


def test_without_a_task_a_batch_is_split_by_its_rows():
    inputs, targets = torch.randn(10, 4, dtype=torch.float64), torch.randn(10, dtype=torch.float64)
    model = nn.Linear(4, 1).double()

    def loss(model, batch):
        return Loss((model(batch[0]).squeeze(1) - batch[1]).square().sum(), len(batch[0]))

    stepper = Stepper(model, SGD(model.parameters()), loss, micro_batch=4)
    result = stepper.backward([inputs, targets])
    whole = (model(inputs).squeeze(1) - targets).square().mean()
    assert torch.allclose(model.weight.grad, torch.autograd.grad(whole, model.weight)[0], atol=0, rtol=1e-12)
    assert (result.rows, result.micro_batches, result.largest_micro_batch) == (10, 3, 4)


@pytest.mark.parametrize("due", [[], [(1, 1, "backward")]])
def test_terms_with_different_counts_are_exact(due):
    task = TwoTerms()
    model, reference = task.model(), task.model()
    stepper = Stepper(model, SGD(model.parameters()), task, micro_batch=5)
    with Faults(model, due).installed() as faults:
        faults.begin(1)
        result = stepper.backward(STEPS[0])
    terms = task.loss(reference, task.collate(STEPS[0]))
    means = {name: term.sum / term.count for name, term in terms.items()}
    sum(means.values()).backward()
    for got, expected in zip(model.parameters(), reference.parameters(), strict=True):
        assert torch.allclose(got.grad, expected.grad, rtol=1e-12, atol=1e-15)
    assert result.terms == pytest.approx({name: float(mean.detach()) for name, mean in means.items()}, rel=1e-12)


def test_terms_missing_from_counts_are_refused():
    class Other(TwoTerms):
        def counts(self, batch):
            return {"rows": len(batch["words"])}

    task = Other()
    model = task.model()
    with pytest.raises(TaskError, match=r"\['rows', 'words'\]"):
        Stepper(model, SGD(model.parameters()), task).step(STEPS[0])


def test_counts_that_are_not_those_of_the_loss_are_refused():
    """Gradients would be divided by another number than the loss that is shown."""

    class Other(TwoTerms):
        def counts(self, batch):
            return {**super().counts(batch), "words": 2 * super().counts(batch)["words"]}

    task = Other()
    model = task.model()
    before = [param.detach().clone() for param in model.parameters()]
    with pytest.raises(TaskError, match=r"the term 'words' of loss\(\) counts \d+, and counts\(\) says \d+"):
        Stepper(model, SGD(model.parameters()), task).step(STEPS[0])
    assert all(map(torch.equal, model.parameters(), before))


@pytest.mark.parametrize("count", [1, 1024])
def test_a_count_that_does_not_add_up_is_named(count):
    model = nn.Linear(4, 1).double()
    stepper = Stepper(
        model, SGD(model.parameters()), lambda net, rows: Loss(net(rows).square().sum(), count), micro_batch=4
    )
    with pytest.raises(TaskError, match=rf"Loss.count does not add up, since it is {count} .* and {2 * count} "):
        stepper.step(torch.randn(12, 4, dtype=torch.float64))


def test_the_loss_of_a_step_is_the_mean_over_everything_counted():
    task = Words()
    model = task.model()
    whole = task.loss(model, task.collate(STEPS[0]))
    result = Stepper(model, SGD(model.parameters()), task, micro_batch=5).step(STEPS[0])
    assert result.loss == pytest.approx(float(whole.sum.detach() / whole.count), rel=1e-12)
    assert result.count == float(whole.count)
    assert result.rows == 12


# Smaller micro-batches after an error, and back again later.


def test_the_micro_batch_size_is_restored_after_clean_steps():
    _, stepper, results = run(due=[(2, 0, "forward")], micro_batch=None, grow_after=3)
    counts = [result.micro_batches for result in results]
    assert counts[0] == 1 and min(counts[1:5]) >= 2 and counts[5:] == [1] * 3
    assert [event.event for event in stepper.events if event.event in ("oom", "grow")] == ["oom", "grow"]
    assert stepper.events[-1].sentence == "micro-batch size restored to 12 rows after 3 clean steps"


def test_an_oom_is_an_event_with_what_was_tried_and_what_changed():
    heard = []
    run(due=[(3, 1, "backward")], on_event=heard.append)
    (event,) = [event for event in heard if event.event == "oom"]
    told = event.to_json()
    assert (told["step"], told["phase"], told["micro_batch"], told["micro_batches"]) == (3, "backward", 1, 4)
    assert told["rows"] == 3 and told["change"] and "injected" in told["message"]


class Repeats(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(1))

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        return (rows * self.weight).repeat(1, 4096)


def test_an_oom_in_forward_names_the_line_of_the_model():
    model = Repeats()
    with simulated_memory("2MiB"):
        stepper = Stepper(
            model, torch.optim.SGD(model.parameters()), lambda net, rows: Loss(net(rows).sum(), len(rows))
        )
        stepper.step(torch.ones(256, 1))
    first = next(event.to_json() for event in stepper.events if event.event == "oom")
    assert first["phase"] == "forward"
    assert first["place"].startswith("Repeats.forward (test_stepper.py:")


class TwoHeads(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.trunk = nn.Sequential(nn.Linear(32, 256), nn.GELU(), nn.Linear(256, 256), nn.GELU())
        self.first, self.second = nn.Linear(256, 1), nn.Linear(256, 5)

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        hidden = self.trunk(rows)
        return self.first(hidden).square().sum() + self.second(hidden).square().sum()


@pytest.mark.parametrize("limit", ["14MiB", "18MiB"])
def test_a_step_that_failed_in_one_of_two_heads_is_split_in_two(limit):
    """In backward of the first head at 18 MiB, with the second one still to come; in forward at 14 MiB."""
    model = TwoHeads()
    with simulated_memory(limit):
        stepper = Stepper(model, torch.optim.SGD(model.parameters()), lambda net, rows: Loss(net(rows), len(rows)))
        assert stepper.step(torch.randn(4096, 32)).micro_batches == 2


def test_a_listener_that_fails_does_not_stop_training():
    def broken(_event):
        raise ValueError("disk full")

    assert distance(plain("adamw"), run(due=[(3, 1, "backward")], on_event=broken)[0]) < 1e-10


def test_a_step_learns_from_a_real_limit_and_recovers_when_it_rises():
    task = Words()
    model = task.model()
    stepper = Stepper(model, ADAMW(model.parameters()), task, clip_norm=1.0, grow_after=3)
    steps, counts = steps_of_rows(steps=20), []
    with simulated_memory("10MiB") as memory:
        for number, rows in enumerate(steps, start=1):
            if number == 5:
                memory.limit_bytes = memory.live_bytes + 350_000
            if number == 10:
                memory.limit_bytes = 10 * 2**20
            counts.append(stepper.step(rows).micro_batches)
    assert counts[:4] == [1] * 4 and min(counts[4:9]) > 1 and counts[-5:] == [1] * 5
    assert stepper.ooms == memory.ooms > 0
    assert distance(plain_loop(Words(), steps, ADAMW), model) < 1e-10


# Rows that do not fit.


def long_row_fails(task):
    model = task.model()

    def fault(_module, inputs, _output):
        if inputs[0].shape[1] == 40:
            out_of_memory()

    model.first.register_forward_hook(fault)
    return model


def rows_with_one_long():
    rows = [{"id": index, "words": torch.full((3,), 1 + index)} for index in range(6)]
    rows[4]["words"] = torch.full((40,), 7)
    return rows


def test_a_row_that_does_not_fit_alone_is_named_and_stops_the_run():
    task = Words()
    model = long_row_fails(task)
    before = [p.detach().clone() for p in model.parameters()]
    with pytest.raises(DoesNotFit, match=r"^row 4 of step 1 \(lengths 40\) cannot be split .*skip_oversized=True"):
        Stepper(model, ADAMW(model.parameters()), task).step(rows_with_one_long())
    assert all(torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))
    assert all(p.grad is None for p in model.parameters())


def test_what_it_asked_for_and_what_was_in_use_is_told_beside_the_limit():
    model, row = nn.Linear(1000, 100, bias=False), torch.ones(1, 1000)

    def loss(model, batch):
        return Loss(model(batch).repeat(1, 10_000).sum(), len(batch))

    room = "room for 1000 KiB, 394.5 KiB of it is in use without gradients and activations, and 3.81 MiB was asked for"
    with simulated_memory("1000KiB") as memory:
        memory.adopt(model.parameters())
        with pytest.raises(DoesNotFit, match=room):
            Stepper(model, SGD(model.parameters()), loss).step(row)


def test_it_is_set_aside_when_asked_and_the_rest_is_exact():
    task = Words()
    model, reference = long_row_fails(task), task.model()
    stepper = Stepper(model, ADAMW(model.parameters()), task, skip_oversized=True)
    rows = rows_with_one_long()
    result = stepper.step(rows)
    optimizer = ADAMW(reference.parameters())
    loss = task.loss(reference, task.collate(rows[:4] + rows[5:]))
    (loss.sum / loss.count).backward()
    optimizer.step()
    assert (result.set_aside, result.rows) == ((4,), 5)
    assert distance(reference, model) < 1e-10
    assert any(event.event == "oversized" for event in stepper.events)


def test_with_counts_a_row_set_aside_is_not_counted():
    class Big(TwoTerms):
        def loss(self, model, batch):
            return out_of_memory() if (batch["id"] == 2).any() else super().loss(model, batch)

    draw = torch.Generator().manual_seed(0)
    lengths = (3, 3, 40, 3, 3, 3)
    rows = [{"words": torch.randint(1, 50, (n,), generator=draw), "id": place} for place, n in enumerate(lengths)]
    model = Big().model()
    sgd = functools.partial(torch.optim.SGD, lr=0.1)
    result = Stepper(model, sgd(model.parameters()), Big(), skip_oversized=True).step(rows)
    assert result.set_aside == (2,) and result.rows == 5
    assert distance(model, plain_loop(TwoTerms(), [rows[:2] + rows[3:]], sgd, clip_norm=None)) < 1e-12


def test_rows_that_only_the_held_gradients_keep_out_are_not_set_aside():
    """The first row goes through alone, the second finds the first one's gradients in its way: no row is to blame."""
    task = Words()
    model = task.model()

    def fault(_module, _inputs, _output):
        if torch.is_grad_enabled() and model.head.weight.grad is not None:
            out_of_memory()

    model.first.register_forward_hook(fault)
    rows = [{"id": index, "words": torch.full((3,), 1 + index)} for index in range(6)]
    stepper = Stepper(model, ADAMW(model.parameters()), task, skip_oversized=True, micro_batch=4)
    with pytest.raises(DoesNotFit, match="because the gradients of earlier rows take up part of it"):
        stepper.step(rows)
    assert stepper.ooms > 0


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (lambda m, o: (o, m, Words()), "the model is a SGD. Try: a torch.nn.Module"),
        (lambda m, o: (m, o, nn.CrossEntropyLoss()), r"a CrossEntropyLoss, which is a criterion.*loss\(model, batch\)"),
        (lambda m, o: (m, o, Words(), "plan.json"), r"plan= is a str, not a brimful.Plan"),
        (lambda m, o: (m.to("meta"), o, Words()), "on the meta device"),
        (lambda m, o: (nn.Linear(2, 2), o, Words()), "steps none of the model's trainable parameters"),
    ],
)
def test_arguments_in_the_wrong_place_are_refused(arguments, sentence):
    model = nn.Linear(2, 2)
    with pytest.raises(TaskError, match=sentence):
        Stepper(*arguments(model, SGD(model.parameters())))


@pytest.mark.parametrize("option", [{"on_event": 3}, {"collate": "x"}, {"scaler": 1}])
def test_an_option_of_the_wrong_type_is_refused(option):
    with pytest.raises(BadOption, match=rf"^{next(iter(option))}=.* must be a"):
        linear(lambda model, batch: None, **option)


def test_parameters_that_the_optimizer_leaves_out_are_reported():
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 1))
    stepper = Stepper(model, SGD(model[1].parameters()), lambda m, x: Loss(m(x).sum(), len(x)))
    assert "does not step '0.weight' and 1 more" in stepper.events[0].sentence


# No partial update.


def test_an_optimizer_that_fails_stops_the_run_and_names_the_checkpoint():
    class Broken(torch.optim.SGD):
        def step(self, closure=None):
            out_of_memory()

    task = Words()
    model = task.model()
    stepper = Stepper(model, Broken(model.parameters(), lr=0.1), task, last_checkpoint=lambda: "run/checkpoints/400")
    with pytest.raises(PartialUpdate, match=r"resume from run/checkpoints/400"):
        stepper.step(STEPS[0])


def test_the_optimizers_first_step_is_proven_before_it_begins():
    """AdamW's state does not fit: the error comes before a single weight has moved, and no split can help."""
    model = nn.Linear(1000, 100, bias=False)
    before = model.weight.detach().clone()

    def loss(model, batch):
        return Loss(model(batch).sum(), len(batch))

    with simulated_memory("1000KiB") as memory:
        memory.adopt(model.parameters())
        stepper = Stepper(model, torch.optim.AdamW(model.parameters(), foreach=False), loss)
        with pytest.raises(DoesNotFit, match=r"5 times in optimizer state reservation"):
            stepper.step(torch.ones(2, 1000))
    assert torch.equal(before, model.weight)


def test_other_parameters_in_the_next_step_are_reserved_for_anew(monkeypatch):
    asked = []
    monkeypatch.setattr(optimizer_memory, "reserve", lambda sizes, device: asked.append(sum(sizes)))
    heads = nn.ModuleList([nn.Linear(4, 1), nn.Linear(1000, 100)])

    def loss(model, batch):
        head = model[0] if batch.shape[1] == 4 else model[1]
        return Loss(head(batch).sum(), len(batch))

    stepper = Stepper(heads, torch.optim.AdamW(heads.parameters(), fused=True), loss)
    stepper.step(torch.ones(2, 4))
    stepper.step(torch.ones(2, 1000))
    assert asked[1] == 2 * 4 * (1000 * 100 + 100)


def test_what_is_reserved_is_what_the_optimizer_takes(monkeypatch):
    asked = []
    monkeypatch.setattr(optimizer_memory, "reserve", lambda sizes, device: asked.append(sum(sizes)))
    model = nn.Linear(100, 10, bias=False)

    def loss(model, batch):
        return Loss(model(batch).sum(), len(batch))

    stepper = Stepper(model, torch.optim.AdamW(model.parameters(), foreach=True), loss)
    stepper.step(torch.ones(2, 100))
    stepper.step(torch.ones(2, 100))
    assert asked == [3 * 4000, 4000]


# Bad input is refused before any weight has changed.


def linear(loss, **options):
    model = nn.Linear(4, 1)
    return model, Stepper(model, SGD(model.parameters()), loss, **options)


@pytest.mark.parametrize(
    ("returned", "sentence"),
    [
        (lambda x: "loss", r"returned a str"),
        (lambda x: Loss(x.sum(), None), r"Loss.count must be one number"),
        (lambda x: Loss(x, len(x)), r"Loss.sum must be one number"),
        (lambda x: Loss(x.sum().detach(), len(x)), r"depends on trainable weights"),
        (lambda x: Loss(x.sum() * 0, 0), r"counted 0 over the whole step"),
        (lambda x: Loss(x.sum(), float("nan")), r"counted nan over the whole step"),
        (lambda x: Loss(x.sum() * 0, torch.tensor(0)), r"counted 0 over the whole step"),
        (lambda x: Loss(x.sum(), torch.tensor(float("nan"))), r"counted nan over the whole step"),
        (lambda x: {"a": Loss(x.sum(), 1), "b": Loss(x.sum(), 1)}, r"several terms \(a, b\).*define counts\(batch\)"),
    ],
)
def test_a_loss_that_cannot_be_weighted_is_refused(returned, sentence):
    model, stepper = linear(lambda model, batch: returned(model(batch)))
    before = model.weight.detach().clone()
    with pytest.raises(TaskError, match=sentence):
        stepper.step(torch.ones(3, 4))
    assert torch.equal(before, model.weight) and model.weight.grad is None


@pytest.mark.parametrize(
    ("batch", "sentence"),
    [
        ({"x": torch.ones(3, 4), "y": torch.ones(2)}, r"\['x'\] has 3, \['y'\] has 2"),
        ({"x": 3}, r"there are none"),
        (object(), r"this is an object"),
        (torch.ones(0, 4), r"no rows"),
        ([], r"is empty"),
    ],
)
def test_a_batch_that_cannot_be_split_is_refused(batch, sentence):
    _, stepper = linear(lambda model, batch: Loss(model(batch["x"]).sum(), 1))
    with pytest.raises(TaskError, match=sentence):
        stepper.step(batch)


def test_a_loss_across_rows_is_refused_before_the_first_split():
    def pairs(model, batch):
        x = model(batch)
        return Loss((x - x.T).square().mean() * len(x), len(x))

    model, stepper = linear(pairs, micro_batch=2)
    before = model.weight.detach().clone()
    with pytest.raises(InexactSplit, match=r"looks across rows.*allow_inexact=True"):
        stepper.step(torch.randn(6, 4))
    assert torch.equal(before, model.weight)


def test_a_loss_across_rows_runs_unsplit_and_is_reported():
    def pairs(model, batch):
        x = model(batch)
        return Loss((x - x.T).square().mean() * len(x), len(x))

    _, stepper = linear(pairs)
    assert stepper.step(torch.randn(6, 4)).applied
    assert "looks across rows" in stepper.events[0].sentence


def test_a_loss_that_draws_noise_is_split_and_said_to_be_the_same_in_distribution():
    _, stepper = linear(lambda model, x: model(x + torch.randn_like(x)).square().mean(), micro_batch=2)
    assert stepper.step(torch.randn(6, 4)).micro_batches == 3
    assert [event.sentence.split(",")[0] for event in stepper.events] == ["a split step is the same in distribution"]


class CountsCalls:
    def __init__(self):
        self.calls = 0

    def loss(self, model, batch):
        self.calls += 1
        return model(batch).square().mean() * self.calls


def test_a_loss_that_counts_its_calls_is_not_advanced_by_the_check():
    counter = CountsCalls()
    linear(counter.loss)[1].step(torch.randn(6, 4))
    assert counter.calls == 1


def test_a_loss_with_state_in_a_closure_is_told_that_the_check_changed_it():
    calls = itertools.count(1)
    _, stepper = linear(lambda model, batch: model(batch).square().mean() * next(calls))
    stepper.step(torch.randn(6, 4))
    assert "give another loss at each call" in stepper.events[0].sentence
    assert "what it keeps in a closure" in stepper.events[0].sentence


class Rotary(nn.Module):
    """Caches a table in its first forward, computed from its weights."""

    def __init__(self):
        super().__init__()
        self.linear, self.table = nn.Linear(4, 1), None

    def forward(self, x):
        if self.table is None:
            self.table = self.linear.weight.detach().cos()
        return self.linear(x * self.table)


def test_a_model_that_caches_a_table_trains_as_in_a_plain_loop():
    models = []
    for plain in (True, False):
        torch.manual_seed(0)
        model, x = Rotary(), torch.randn(6, 4)
        optimizer = SGD(model.parameters())
        if plain:
            model(x).square().mean().backward()
            optimizer.step()
        else:
            Stepper(model, optimizer, lambda model, batch: model(batch).square().mean()).step(x)
        models.append(model)
    assert torch.equal(models[0].table, models[1].table)
    assert torch.allclose(models[0].linear.weight, models[1].linear.weight, rtol=1e-6)


def test_a_sum_returned_as_a_plain_number_is_named_as_a_possible_cause():
    _, stepper = linear(lambda model, batch: model(batch).square().sum())
    stepper.step(torch.randn(6, 4))
    assert "or is a sum instead of a mean: 4 rows and their two halves differ by 50%" in stepper.events[0].sentence


def test_a_model_that_looks_at_padding_is_refused_before_the_first_split():
    class Padded(Words):
        def loss(self, model, batch):
            return Loss(model(batch["words"]).square().sum(), len(batch["words"]))

    task = Padded()
    model = task.model()
    with pytest.raises(InexactSplit, match="looks across rows or at their padding"):
        Stepper(model, SGD(model.parameters()), task, micro_batch=2).step(STEPS[0])


def test_every_try_begins_without_gradients():
    """An adapter tells by this that a step starts over."""
    task = Words()
    model = task.model()
    held, seen = [], itertools.count()

    def look(_module, _inputs, _output):
        held.append(any(param.grad is not None for param in model.parameters()))
        if next(seen) == 2:
            out_of_memory()

    stepper = Stepper(model, SGD(model.parameters()), task, micro_batch=4)
    stepper.step(STEPS[0])  # also compares a few rows with their halves
    model.first.register_forward_hook(look)
    stepper.step(STEPS[0])
    assert held[:3] == [False, True, True] and held[3:5] == [False, True]


def test_a_part_that_is_unfrozen_in_the_middle_of_a_run_is_trained():
    task = Words()
    model = task.model()
    model.embed.requires_grad_(False)
    stepper = Stepper(model, SGD(model.parameters()), task, micro_batch=4)
    stepper.step(STEPS[0])
    before = model.embed.weight.detach().clone()
    model.embed.requires_grad_(True)
    stepper.step(STEPS[1])
    assert not torch.equal(before, model.embed.weight)


def test_gradients_that_are_no_numbers_are_skipped_and_then_stop_the_run():
    model, stepper = linear(lambda model, batch: Loss(model(batch).sum() * batch[0, 0], len(batch)), skip_nonfinite=2)
    stepper.step(torch.ones(3, 4))
    before = model.weight.detach().clone()
    bad = torch.full((3, 4), float("nan"))
    assert [stepper.step(bad).applied for _ in range(2)] == [False, False]
    with pytest.raises(NonFiniteGradients, match=r"3 consecutive steps skipped"):
        stepper.step(bad)
    assert torch.equal(before, model.weight)
    skips = [event for event in stepper.events if event.event == "skip"]
    assert "(first in 'weight'): 1 consecutive step skipped, at most 2" in skips[0].sentence


def test_a_good_step_between_bad_ones_starts_the_count_again():
    _, stepper = linear(lambda model, batch: Loss(model(batch).sum() * batch[0, 0], len(batch)), skip_nonfinite=1)
    values = (float("inf"), 1.0, float("inf"), 1.0)
    assert [stepper.step(torch.full((3, 4), value)).applied for value in values] == [False, True, False, True]


@pytest.mark.parametrize("cls", [torch.optim.AdamW, torch.optim.Adam])
def test_a_fused_optimizer_steps_before_the_norm_is_read_and_skips_what_is_not_finite(cls, monkeypatch):
    """Weights and state after a bad step in between are, to the bit, those of a run without it; good steps those of a plain loop."""

    def loss(model, batch):
        return Loss(model(batch).square().sum(), len(batch))

    def built():
        torch.manual_seed(0)
        model = nn.Linear(4, 2)
        return model, cls(model.parameters(), lr=0.1, fused=True)

    torch.manual_seed(1)
    good = [torch.randn(3, 4) for _ in range(3)]
    plain, plain_optimizer = built()
    for batch in good:
        (plain(batch).square().sum() / 3).backward()
        nn.utils.clip_grad_norm_(plain.parameters(), 1.0)
        plain_optimizer.step()
        plain_optimizer.zero_grad()
    model, optimizer = built()
    stepper, order = Stepper(model, optimizer, loss, clip_norm=1.0), []
    update, read = optimizer.step, Readout.read
    monkeypatch.setattr(optimizer, "step", lambda: (order.append("update"), update())[1])
    monkeypatch.setattr(Readout, "read", lambda self: (order.append("read"), read(self))[1])
    bad = torch.full((3, 4), math.inf)
    results = [stepper.step(batch) for batch in (good[0], bad, *good[1:])]
    assert [result.applied for result in results] == [True, False, True, True]
    assert order == ["update", "read"] * 4
    assert torch.equal(model.weight, plain.weight) and torch.equal(model.bias, plain.bias)
    for ours, theirs in zip(optimizer.state.values(), plain_optimizer.state.values(), strict=True):
        assert all(torch.equal(ours[name], theirs[name]) for name in theirs)


# Loops that step the optimizer themselves.


def test_gradients_that_were_not_applied_are_not_dropped_silently():
    _, stepper = linear(lambda model, batch: Loss(model(batch).square().sum(), len(batch)))
    stepper.backward(torch.randn(3, 4))
    for call in (stepper.backward, stepper.step):
        with pytest.raises(UserError, match=r"gradients of an earlier backward\(\).*Try: optimizer.step\(\)"):
            call(torch.randn(3, 4))


@pytest.mark.parametrize("end", ["step", "zero", "zero in place"])
def test_after_a_step_or_zero_grad_backward_goes_on(end):
    model = nn.Linear(4, 1)
    optimizer = SGD(model.parameters())
    stepper = Stepper(model, optimizer, lambda model, batch: Loss(model(batch).square().sum(), len(batch)))
    for _ in range(2):
        stepper.backward(torch.randn(3, 4))
        if end == "step":
            optimizer.step()
        else:
            optimizer.zero_grad(set_to_none=end == "zero")
    assert stepper.steps == 2


def test_a_step_that_a_scaler_skipped_is_not_waited_for():
    _, stepper = linear(lambda model, batch: Loss(model(batch).sum(), len(batch)))
    for _ in range(2):
        stepper.backward(torch.full((3, 4), float("inf")))
    assert stepper.steps == 2


@pytest.mark.parametrize(("make", "state", "temporaries"), [("adamw", 2, 2), ("nested", 2, 0)])
def test_under_a_fresh_limit_the_optimizers_state_is_counted_before_its_step(make, state, temporaries):
    """Sizes in copies of the weights: the weights, their gradients, the optimizer's state, and what its step makes."""
    model = nn.Linear(1000, 100)
    optimizer = Nested(model.parameters()) if make == "nested" else ADAMW(model.parameters())
    stepper = Stepper(model, optimizer, mean_square)
    needed = (2 + state + temporaries) * sum(param.nbytes for param in model.parameters())
    stepper.step(torch.randn(2, 1000))
    with simulated_memory(round(1.1 * needed)):
        assert stepper.step(torch.randn(2, 1000)).peak_bytes >= 0.9 * needed
    before = model.weight.detach().clone()
    with simulated_memory(round(0.9 * needed)), pytest.raises(DoesNotFit):
        stepper.step(torch.randn(2, 1000))
    assert torch.equal(before, model.weight)


class Nested(torch.optim.Optimizer):
    """Keeps its state in a list for each parameter, as Shampoo does."""

    def __init__(self, params):
        super().__init__(params, {})

    @torch.no_grad()
    def step(self, closure=None):
        for param in (param for group in self.param_groups for param in group["params"] if param.grad is not None):
            if not self.state[param]:
                self.state[param]["moments"] = [torch.zeros_like(param), torch.zeros_like(param)]
            for moment in self.state[param]["moments"]:
                moment.add_(param.grad)
            param.sub_(self.state[param]["moments"][0], alpha=0.1)


@pytest.mark.parametrize("training", [True, False])
def test_evaluation_mode_is_noted_once_if_the_model_is_trained_in_it(training):
    model = nn.Linear(4, 1).eval()
    stepper = Stepper(model, SGD(model.parameters()), mean_square)
    model.train(training)
    for _ in range(2):
        stepper.step(torch.randn(3, 4))
    assert sum("in evaluation mode" in event.sentence for event in stepper.events) == (not training)


# Models that grow while they train.


def grown(train, *, replaced):
    """Weights after a step, a new output layer, and two more steps."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 1)).double()
    optimizer = SGD(model.parameters())
    one_step = train(model, optimizer)
    batches = torch.randn(3, 6, 4, dtype=torch.float64)
    one_step(batches[0])
    if replaced:
        model[1] = nn.Linear(4, 1).double()
        optimizer.param_groups[0]["params"] = list(model.parameters())
    else:
        model.append(nn.Linear(1, 1).double())
        optimizer.add_param_group({"params": list(model[2].parameters())})
    for batch in batches[1:]:
        one_step(batch)
    return model


def mean_square(model, batch):
    return Loss(model(batch).square().sum(), 3 * len(batch))


@pytest.mark.parametrize("replaced", [False, True])
def test_parameters_added_or_replaced_after_construction_get_exact_gradients(replaced):
    def plain(model, optimizer):
        def one_step(batch):
            optimizer.zero_grad()
            loss = mean_square(model, batch)
            (loss.sum / loss.count).backward()
            nn.utils.clip_grad_norm_(model.parameters(), 0.1)
            optimizer.step()

        return one_step

    def exact(model, optimizer):
        return Stepper(model, optimizer, mean_square, micro_batch=2, clip_norm=0.1).step

    assert distance(grown(plain, replaced=replaced), grown(exact, replaced=replaced)) < 1e-10


def test_buffers_of_a_module_added_after_construction_are_restored_after_an_oom():
    model = nn.Sequential(nn.Linear(4, 4))
    optimizer = SGD(model.parameters())
    stepper = Stepper(model, optimizer, mean_square)
    stepper.step(torch.randn(8, 4))  # also compares a few rows with their halves
    model.append(nn.BatchNorm1d(4))
    optimizer.add_param_group({"params": list(model[1].parameters())})
    seen = itertools.count()

    def fault(_module, _inputs, _output):
        if next(seen) == 0:
            out_of_memory()

    model[1].register_forward_hook(fault)
    result = stepper.step(torch.randn(8, 4))
    assert int(model[1].num_batches_tracked) == result.micro_batches == 2


WRONG = {
    "micro_batch=0": "micro_batch=0 must be 1 or more.",
    "micro_batch=2.5": "micro_batch=2.5 must be 1 or more.",
    "micro_batch='8'": "micro_batch='8' must be 1 or more.",
    "clip_norm=0.0": "clip_norm=0.0 must be positive, or None for no clipping.",
    "clip_norm=-1.0": "clip_norm=-1.0 must be positive, or None for no clipping.",
    "clip_norm=float('nan')": "clip_norm=nan must be positive, or None for no clipping.",
    "clip_norm=float('inf')": "clip_norm=inf must be positive, or None for no clipping.",
    "precision='fp8'": "precision='fp8' must be one of fp32, bf16, fp16, auto.",
    "rows_are='mine'": "rows_are='mine' must be 'global' or 'local'.",
    "skip_nonfinite=-1": "skip_nonfinite=-1 must be 0 or more.",
    "skip_nonfinite=None": "skip_nonfinite=None must be 0 or more.",
    "grow_after=0": "grow_after=0 must be 1 or more.",
    "micro_batch=0, rows_are='mine'": "micro_batch=0 must be 1 or more. rows_are='mine' must be 'global' or 'local'.",
}


@pytest.mark.parametrize(("options", "message"), WRONG.items())
def test_all_options_out_of_range_are_refused_together(options, message):
    with pytest.raises(BadOption) as refused:
        linear(lambda model, batch: None, **eval(f"dict({options})"))
    assert str(refused.value) == message


@pytest.mark.parametrize("options", ["micro_batch=1, clip_norm=1e-9, skip_nonfinite=0", "clip_norm=1, grow_after=1"])
def test_options_at_the_edge_of_their_range_are_accepted(options):
    linear(lambda model, batch: None, **eval(f"dict({options})"))


def test_the_keywords_of_a_stepper_and_their_defaults():
    """Frozen on purpose: scripts rely on these names."""
    keywords = inspect.signature(Stepper).parameters.values()
    assert {word.name: word.default for word in keywords if word.kind is word.KEYWORD_ONLY} == {
        "micro_batch": None,
        "clip_norm": None,
        "precision": None,
        "scaler": None,
        "collate": None,
        "rows_are": "global",
        "skip_oversized": False,
        "allow_inexact": False,
        "skip_nonfinite": 5,
        "grow_after": 10,
        "last_checkpoint": None,
        "on_event": None,
    }


# Other forms of a loss, and what it logs.


@pytest.mark.parametrize("form", [lambda total, rows: (total / rows, rows), lambda total, rows: total / rows])
def test_a_mean_gives_the_gradient_of_the_sum_and_the_count(form):
    inputs = torch.randn(7, 4)
    models = nn.Linear(4, 1), nn.Linear(4, 1)
    models[1].load_state_dict(models[0].state_dict())
    for model, mean in zip(models, (False, True), strict=True):

        def loss(model, batch, mean=mean):
            total, rows = model(batch).square().sum(), len(batch)
            return form(total, rows) if mean else Loss(total, rows)

        Stepper(model, SGD(model.parameters()), loss, micro_batch=3).step(inputs)
    assert torch.allclose(models[0].weight, models[1].weight)


def test_what_a_loss_logs_is_averaged_over_the_step_by_its_count():
    def loss(model, batch):
        log = {"first": batch[0, 0], "rows": len(batch)} if len(batch) > 1 else {"rows": 1}
        return Loss(model(batch).sum(), torch.tensor(2.0 * len(batch)), log=log)

    inputs = torch.arange(5.0)[:, None].expand(5, 4)
    result = linear(loss, micro_batch=2)[1].step(inputs)
    assert result.log == pytest.approx({"first": (0 * 2 + 2 * 2) / 4, "rows": (2 * 2 + 2 * 2 + 1) / 5})


def test_a_failed_attempt_leaves_nothing_in_the_log():
    undisturbed, disturbed = (run(due=due)[2] for due in ([], [(3, 0, "clip")]))
    assert [result.log for result in undisturbed] == [result.log for result in disturbed]


# State.


def test_a_stepper_goes_on_from_its_state():
    task = Words()
    model = task.model()
    optimizer = ADAMW(model.parameters())
    stepper = Stepper(model, optimizer, task, clip_norm=1.0)
    faults = Faults(model, [(2, 0, "forward"), (3, 1, "backward")])
    with faults.installed():
        for number in (1, 2, 3):
            faults.begin(number)
            stepper.step(STEPS[number - 1])
    later = Stepper(model, optimizer, task, clip_norm=1.0)
    later.load_state_dict(stepper.state_dict())
    assert later.step(STEPS[3]).micro_batches == stepper.step(STEPS[4]).micro_batches > 1
    assert (later.steps, later.ooms) == (4, 2)


def test_a_task_class_and_a_tasks_own_loss_do_as_well_as_a_task():
    task = Words()
    for given in (task, task.loss):
        model = task.model()
        assert Stepper(model, SGD(model.parameters()), given, micro_batch=4).step(STEPS[0]).rows == 12


def test_something_else_is_not_a_loss():
    model = nn.Linear(2, 2)
    with pytest.raises(TaskError, match=r"task_or_loss is an int"):
        Stepper(model, SGD(model.parameters()), 3)


class Unused(Task):
    """A parameter that gets no gradient must keep none: AdamW would decay it."""

    name = "unused"

    def model(self):
        model = nn.Module()
        model.used, model.unused = nn.Linear(4, 1), nn.Linear(4, 1)
        return model

    def loss(self, model, batch):
        return Loss(model.used(batch).sum(), len(batch))


def test_a_parameter_without_a_gradient_is_left_alone():
    task = Unused()
    model = task.model()
    before = model.unused.weight.detach().clone()
    stepper = Stepper(model, torch.optim.AdamW(model.parameters(), lr=1.0, weight_decay=0.5), task, micro_batch=2)
    stepper.step(torch.ones(4, 4))
    assert torch.equal(before, model.unused.weight)


LONG_STEPS = [
    [{"words": (row["words"].repeat(40))[:40], "id": row["id"]} for row in rows] for rows in steps_of_rows(steps=3)
]


@pytest.mark.parametrize("micro_batch", [None, 5])
def test_fp16_skips_no_more_steps_than_a_plain_loop(micro_batch):
    """40 words a row: gradients of `sum / rows` are 40 times too large for the scaler's first guess."""
    task, scaler = Words(torch.float32), torch.amp.GradScaler("cpu", init_scale=2.0**18)
    model = task.model()
    optimizer = SGD(model.parameters())
    for rows in LONG_STEPS:
        optimizer.zero_grad()
        with torch.autocast("cpu", torch.float16):
            loss = task.loss(model, task.collate(rows))
            mean = loss.sum / loss.count
        scaler.scale(mean).backward()
        scaler.step(optimizer)
        scaler.update()
    assert scaler.get_scale() == 2.0**18, "the plain loop skips none"
    _, _, results = run(
        "sgd", task=task, steps=LONG_STEPS, micro_batch=micro_batch, precision="fp16",
        scaler=torch.amp.GradScaler("cpu", init_scale=2.0**18),
    )  # fmt: skip
    assert all(result.applied for result in results)


def seen_by_a_hook(train):
    """What a hook on one weight is given in the first step."""
    task = Words(torch.float32)
    model, seen = task.model(), []
    model.first.weight.register_hook(lambda grad: seen.append(grad.clone()))
    train(task, model)
    return seen


def test_in_an_unsplit_step_hooks_see_the_gradients_of_a_plain_loop():
    def plain(task, model):
        loss = task.loss(model, task.collate(STEPS[0]))
        (loss.sum / loss.count).backward()

    def stepped(task, model):
        Stepper(model, SGD(model.parameters()), task).step(STEPS[0])

    assert torch.equal(seen_by_a_hook(plain)[0], seen_by_a_hook(stepped)[-1])


def test_a_first_micro_batch_without_labels_leaves_the_step_exact():
    def masked(model, batch):
        counted = batch["words"] != 1
        sums = model(batch["words"]).square().sum(2)[counted]
        return Loss(sums.sum(), counted.sum())

    rows = [{"words": torch.full((3,), 1 + min(index, 5)), "id": index} for index in range(8)]
    gradients = []
    for micro_batch in (None, 1):
        model = Words().model()
        stepper = Stepper(
            model, SGD(model.parameters()), masked, collate=Words().collate, micro_batch=micro_batch, clip_norm=None
        )
        stepper.backward(rows)
        gradients.append(model.first.weight.grad)
    torch.testing.assert_close(*gradients, rtol=1e-12, atol=0)


def test_an_oom_while_collating_is_survived_by_a_task_with_counts():
    model, stepper, _ = run(task=FullHost(), micro_batch=12)
    assert stepper.ooms > 0
    assert {event.details["phase"] for event in stepper.events if event.event == "oom"} == {"collate"}
    assert distance(plain_loop(TwoTerms(), STEPS, ADAMW), model) < 1e-10


def test_a_row_set_aside_does_not_count_in_any_term():
    """One row is too large for the forward, after the counts of all rows are known."""

    class Narrow(TwoTerms):
        def loss(self, model, batch):
            if 5 in batch["id"]:
                out_of_memory()
            return super().loss(model, batch)

    rows = [{**row, "words": torch.ones(45, dtype=torch.long)} if row["id"] == 5 else row for row in STEPS[0]]
    model, _, results = run(task=Narrow(), steps=[rows], skip_oversized=True)
    assert results[0].set_aside == (5,)
    assert distance(plain_loop(TwoTerms(), [[row for row in rows if row["id"] != 5]], ADAMW), model) < 1e-10


def test_an_oom_while_buffers_are_copied_is_survived(monkeypatch):
    task = Words(norm=True)
    model = task.model()
    stepper = Stepper(model, SGD(model.parameters()), task)
    model.middle.running_mean = torch.zeros_like(model.middle.running_mean)  # a new tensor, which needs a new copy
    clone = torch.Tensor.clone
    with monkeypatch.context() as patch:
        patch.setattr(
            torch.Tensor, "clone", lambda tensor, **kw: out_of_memory() if tensor.ndim == 1 else clone(tensor, **kw)
        )
        assert stepper.step(STEPS[0]).applied


# One wait for the device.


@pytest.fixture
def reads(monkeypatch):
    """Every time a tensor's value is asked for: on a GPU a wait."""
    seen = []
    for name in ("tolist", "item", "__float__", "__bool__", "__int__"):
        real = getattr(torch.Tensor, name)
        monkeypatch.setattr(torch.Tensor, name, lambda self, real=real, name=name: [seen.append(name), real(self)][1])
    return seen


@pytest.mark.parametrize("count", [len, lambda batch: torch.tensor(len(batch))], ids=["number", "tensor"])
@pytest.mark.parametrize("rows", [8, 3])
def test_a_step_reads_from_the_device_once(reads, count, rows):
    def loss(model, batch):
        return Loss(model(batch).square().sum(), count(batch), log={"mean": batch.mean()})

    model = nn.Linear(4, 1)
    stepper = Stepper(model, SGD(model.parameters()), loss, micro_batch=rows, clip_norm=1.0)
    stepper.step(torch.randn(8, 4))  # also compares a few rows with their halves
    reads.clear()
    stepper.step(torch.randn(8, 4))
    assert reads == ["tolist"]


def test_a_count_on_the_device_gives_the_weights_of_a_count_on_the_host():
    weights = []
    for count in (float, torch.tensor):
        torch.manual_seed(0)
        model = nn.Linear(4, 1)

        def loss(model, batch, count=count):
            return Loss(model(batch).square().sum(), count((batch[:, 0] > 0).sum().item()))

        stepper = Stepper(model, SGD(model.parameters()), loss, micro_batch=4)
        for rows in torch.randn(5, 8, 4):
            stepper.step(rows)
        weights.append(model.weight.detach().clone())
    assert torch.equal(*weights)


def test_a_step_that_counted_nothing_leaves_the_scaler_ready_for_the_next():
    model = nn.Linear(4, 1)
    stepper = Stepper(
        model,
        SGD(model.parameters()),
        lambda model, batch: Loss(model(batch).sum(), (batch[:, 0] > 0).sum()),
        scaler=torch.amp.GradScaler("cpu", init_scale=2.0),
    )
    with pytest.raises(TaskError, match="counted 0 over the whole step"):
        stepper.step(torch.full((3, 4), -1.0))
    assert stepper.step(torch.ones(3, 4)).applied


def test_meanwhile_runs_once_when_the_gradients_are_made_and_nothing_is_read(reads):
    model, stepper = linear(lambda model, batch: Loss(model(batch).square().sum(), len(batch)))
    stepper.step(torch.randn(3, 4))
    before, seen = model.weight.detach().clone(), []
    reads.clear()
    stepper.step(torch.randn(3, 4), lambda: seen.append((list(reads), model.weight.grad is not None)))
    assert seen == [([], True)] and not torch.equal(before, model.weight)


def test_what_meanwhile_raises_changes_no_weight():
    model, stepper = linear(lambda model, batch: Loss(model(batch).square().sum(), len(batch)))
    before = model.weight.detach().clone()

    def fails():
        raise KeyError("rows")

    with pytest.raises(KeyError):
        stepper.step(torch.randn(3, 4), fails)
    assert torch.equal(before, model.weight) and model.weight.grad is None
