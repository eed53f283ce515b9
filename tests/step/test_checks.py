"""What cannot be split or repeated is refused with what to use instead; gradient wrappers are removed."""

import copy
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from torch import nn, optim
from torch.nn.parallel import DataParallel, DistributedDataParallel

from brimful import simulated_memory
from brimful.errors import InexactSplit, TaskError, UnsupportedModel
from brimful.step.checks import (
    MANY_SHAPES,
    ShapeCounter,
    check_after_backward,
    check_model,
    check_optimizer,
    param_versions,
    unwrap,
)
from brimful.step.result import Events
from brimful.step.stepper import Stepper
from brimful.task import Loss


def small() -> nn.Module:
    return nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 2))


def sgd(model: nn.Module) -> optim.Optimizer:
    return optim.SGD(model.parameters(), lr=0.1)


def refusal(call, *args, kind=UnsupportedModel) -> str:
    with pytest.raises(kind) as refused:
        call(*args)
    assert "\n" not in str(refused.value)
    return str(refused.value)


@pytest.fixture
def one_process(tmp_path):
    """A job of one, so that a real DistributedDataParallel can be built."""
    if dist.is_initialized():
        pytest.skip("another test left its processes")
    dist.init_process_group("gloo", init_method=f"file://{tmp_path / 'store'}", rank=0, world_size=1)
    yield
    dist.destroy_process_group()


# Wrappers


def test_a_plain_model_is_itself():
    model = small()
    assert unwrap(model) == (model, None)


def test_a_data_parallel_wrapper_is_removed():
    model = small()
    assert unwrap(DataParallel(model)) == (model, "DataParallel")


def test_a_distributed_wrapper_is_removed(one_process):
    model = small()
    assert unwrap(DistributedDataParallel(model)) == (model, "DistributedDataParallel")


def test_wrappers_around_wrappers_are_removed():
    model = small()
    assert unwrap(DataParallel(DataParallel(model)))[0] is model


WRAPPED = "the loss calls the DataParallel wrapper, which reduces gradients inside backward"


def test_a_loss_that_calls_the_wrapper_is_refused():
    wrapper = DataParallel(small())
    unwrap(wrapper)
    assert refusal(wrapper, torch.ones(2, 3)).startswith(WRAPPED)


def test_a_loss_that_calls_the_distributed_wrapper_is_refused(one_process):
    wrapper = DistributedDataParallel(small())
    unwrap(wrapper)
    expected = WRAPPED.replace("DataParallel", "DistributedDataParallel")
    assert refusal(wrapper, torch.ones(2, 3)).startswith(expected)


def test_the_model_inside_can_be_called():
    wrapper = DataParallel(small())
    model, _ = unwrap(wrapper)
    assert model(torch.ones(2, 3)).shape == (2, 2)


def test_the_wrapper_can_still_be_evaluated():
    wrapper = DataParallel(small())
    unwrap(wrapper)
    with torch.no_grad():
        wrapper(torch.ones(2, 3))
    wrapper.eval()
    assert wrapper(torch.ones(2, 3)).shape == (2, 2)


@pytest.mark.parametrize("wrapper", [DataParallel, DistributedDataParallel])
def test_a_wrapper_further_inside_is_refused(wrapper, one_process):
    message = refusal(check_model, nn.Sequential(wrapper(small())))
    assert message.startswith(f"a {wrapper.__name__} wrapper inside the model cannot be removed")


def test_a_wrapper_under_a_compiled_model_is_refused():
    assert "DataParallel wrapper inside the model" in refusal(check_model, torch.compile(DataParallel(small())))


# Models


def test_a_plain_model_is_accepted():
    check_model(small())


def test_a_model_with_batch_norm_is_accepted():
    check_model(nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4)))


def test_a_partly_frozen_model_is_accepted():
    model = small()
    model[0].requires_grad_(False)
    check_model(model)


def sharded_as(name: str) -> nn.Module:
    """A module of a class of that name, as the library has it."""
    kind = type(name, (nn.Linear,), {})
    return nn.Sequential(kind(2, 2))


@pytest.mark.parametrize("name", ["FullyShardedDataParallel", "FSDPModule", "DeepSpeedEngine"])
def test_sharded_weights_are_refused_by_the_name_of_what_shards_them(name):
    assert refusal(check_model, sharded_as(name)).startswith(f"{name} gathers weights inside the forward")


def test_a_class_derived_from_what_shards_is_refused_as_well():
    engine = type("DeepSpeedEngine", (nn.Linear,), {})
    derived = type("PipelineEngine", (engine,), {})
    assert refusal(check_model, derived(2, 2)).startswith("DeepSpeedEngine gathers")


def test_a_model_that_torch_sharded_is_refused(one_process):
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    model = small()
    fully_shard(model, mesh=init_device_mesh("cpu", (1,)))
    assert refusal(check_model, model).startswith("FSDPModule gathers weights")


def test_parameters_spread_over_devices_are_refused(one_process):
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Replicate, distribute_tensor

    model = small()
    mesh = init_device_mesh("cpu", (1,))
    model[0].weight = nn.Parameter(distribute_tensor(model[0].weight.detach(), mesh, [Replicate()]))
    assert refusal(check_model, model).startswith("DTensor gathers weights")


def test_sync_batch_norm_is_refused_where_it_is():
    model = nn.Sequential(nn.Linear(3, 4), nn.SyncBatchNorm(4))
    assert refusal(check_model, model).startswith("SyncBatchNorm ('1') communicates inside the forward")


def test_another_librarys_sync_batch_norm_is_refused():
    apex = type("SyncBatchNorm", (nn.BatchNorm1d,), {})
    assert refusal(check_model, nn.Sequential(apex(4))).startswith("SyncBatchNorm ('0')")


@pytest.mark.parametrize("model", [small().requires_grad_(False), nn.ReLU()], ids=["frozen", "empty"])
def test_a_model_with_nothing_to_train_is_refused(model):
    assert refusal(check_model, model, kind=TaskError).startswith("no parameter of the model requires a gradient")


def test_an_embedding_that_renormalises_its_weight_is_refused_for_that():
    message = refusal(check_model, nn.Sequential(nn.Embedding(10, 4, max_norm=1.0), nn.Linear(4, 2)))
    assert message == (
        "Embedding(max_norm=1.0) ('0') changes its weight inside the forward, which a retry cannot undo and other ranks do "
        "not see. Try: max_norm=None, and scale its rows after the optimizer's step."
    )


@pytest.mark.parametrize("kind", [nn.LazyLinear, nn.LazyBatchNorm1d])
def test_a_lazy_module_that_has_no_weights_yet_is_refused(kind):
    model = nn.Sequential(nn.Linear(3, 4), kind(2) if kind is nn.LazyLinear else kind())
    message = refusal(check_model, model, kind=TaskError)
    assert message == (
        f"the weights of {kind.__name__} ('1') have no shape before a first forward. "
        "Try: run a batch through the model before it is used, in model() if a task makes it."
    )


def test_a_lazy_module_that_has_run_is_accepted():
    model = nn.Sequential(nn.LazyLinear(4), nn.Linear(4, 2))
    model(torch.ones(2, 3))
    check_model(model)


def test_weights_that_are_not_finite_are_named():
    model = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2))
    model[0].weight.data[1, 2], model[1].bias.data[0] = float("nan"), float("-inf")
    message = refusal(check_model, model, kind=TaskError)
    assert message == (
        "the model has NaN or inf in '0.weight' and 1 more weight before training. Try: load intact weights."
    )


def test_a_frozen_mask_of_infinities_and_large_weights_of_few_bits_are_accepted():
    model = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2).half())
    model.mask = nn.Parameter(torch.full((2,), float("-inf")), requires_grad=False)
    model[1].weight.data.fill_(6e4)
    check_model(model)


# Optimizers


@pytest.mark.parametrize("kind", [optim.SGD, optim.AdamW, optim.Adagrad, optim.Adafactor])
def test_torchs_optimizers_are_accepted(kind):
    model = small()
    optimizer = kind(model.parameters(), lr=0.1)
    assert check_optimizer(model, optimizer) is optimizer


def test_an_optimizer_with_a_scheduler_is_accepted():
    model = small()
    optimizer = sgd(model)
    optim.lr_scheduler.StepLR(optimizer, 1)
    assert check_optimizer(model, optimizer) is optimizer


def test_accelerates_wrapper_is_removed():
    from accelerate.optimizer import AcceleratedOptimizer

    model = small()
    wrapper = object.__new__(AcceleratedOptimizer)  # building one asks for an Accelerator, which stays for all tests
    wrapper.optimizer = sgd(model)
    assert check_optimizer(model, wrapper) is wrapper.optimizer


def test_what_is_no_optimizer_is_refused():
    assert refusal(check_optimizer, small(), object()) == "the optimizer is an object. Try: a torch.optim.Optimizer."


def test_an_optimizer_that_needs_a_closure_is_refused():
    model = small()
    message = refusal(check_optimizer, model, optim.LBFGS(model.parameters()))
    assert message.startswith("LBFGS calls the loss several times in one step")


def test_an_optimizer_that_merely_takes_a_closure_is_accepted():
    class Mine(optim.SGD):
        def step(self, closure=None):
            return super().step(closure)

    model = small()
    check_optimizer(model, Mine(model.parameters(), lr=0.1))


def test_transformers_layer_wise_optimizer_is_refused():
    from transformers.trainer_pt_utils import LayerWiseDummyOptimizer

    optimizer = LayerWiseDummyOptimizer(optimizer_dict={})
    message = refusal(check_optimizer, small(), optimizer)
    assert message.startswith("LayerWiseDummyOptimizer steps inside backward")


def test_optimizers_that_torch_applies_inside_backward_are_refused():
    from torch.distributed.optim import _apply_optimizer_in_backward

    model = small()
    _apply_optimizer_in_backward(optim.SGD, model.parameters(), {"lr": 0.1})
    assert refusal(check_optimizer, model, sgd(model)).startswith("SGD steps inside backward")


# After the first backward


def backward(model: nn.Module) -> None:
    model(torch.ones(2, 3)).sum().backward()


def test_an_ordinary_backward_is_accepted():
    model = small()
    versions = param_versions(model)
    backward(model)
    check_after_backward(model, sgd(model), versions)


def test_a_backward_that_leaves_some_parameters_without_a_gradient_is_accepted():
    model = small()
    model.register_parameter("unused", nn.Parameter(torch.zeros(2)))
    model[0].requires_grad_(False)
    versions = param_versions(model)
    backward(model)
    check_after_backward(model, sgd(model), versions)


def test_a_hook_that_steps_inside_backward_is_refused_by_the_weight_it_changed():
    model = small()
    optimizers = {param: optim.SGD([param], lr=0.1) for param in model[2].parameters()}
    for param in optimizers:
        param.register_post_accumulate_grad_hook(lambda p: optimizers[p].step())
    versions = param_versions(model)
    backward(model)
    message = refusal(check_after_backward, model, sgd(model), versions)
    assert message.startswith("'2.weight' changed during backward: SGD or a hook steps inside it")


def test_a_sparse_gradient_is_refused_by_its_weight():
    model = nn.Sequential(nn.Embedding(10, 3, sparse=True), nn.Linear(3, 1))
    versions = param_versions(model)
    model(torch.tensor([1, 2])).sum().backward()
    assert refusal(check_after_backward, model, sgd(model), versions).startswith("'0.weight' has a sparse gradient")


def test_a_backward_that_leaves_no_gradient_at_all_is_refused():
    model = small()
    for param in model.parameters():
        param.register_post_accumulate_grad_hook(lambda p: setattr(p, "grad", None))
    versions = param_versions(model)
    backward(model)
    message = refusal(check_after_backward, model, sgd(model), versions, kind=TaskError)
    assert message.startswith("backward left no gradient on any parameter")


def test_versions_see_a_weight_that_changed_in_place():
    model = small()
    before = param_versions(model)
    with torch.no_grad():
        model[0].bias.add_(1)
    after = param_versions(model)
    assert [name for name in before if before[name] != after[name]] == ["0.bias"]


# Attention and batches of many shapes


def run(shapes, device="cuda", keep_cudnn=False):
    context, events = SimpleNamespace(device=torch.device(device), cudnn_attention=True), Events(None)
    counter = ShapeCounter(context, events, keep_cudnn=keep_cudnn)
    switched = []
    for number, shape in enumerate(shapes):
        batch = {"x": torch.empty(*shape), "y": torch.empty(shape[0])}
        assert counter.record(number, batch) is batch
        switched.append(context.cudnn_attention)
    return switched, [event.sentence for event in events.recent]


def test_many_shapes_switch_cudnn_attention_off_with_one_note():
    on, notes = run([(4, 10 + number) for number in range(MANY_SHAPES + 5)])
    assert on == [True] * MANY_SHAPES + [False] * 5
    assert len(notes) == 1 and f"{MANY_SHAPES + 1} shapes" in notes[0]


@pytest.mark.parametrize("options", [{"device": "cpu"}, {"keep_cudnn": True}])
def test_on_the_cpu_and_against_the_users_choice_nothing_is_switched(options):
    on, notes = run([(4, 10 + number) for number in range(MANY_SHAPES + 5)], **options)
    assert all(on) and not notes


def test_a_few_shapes_again_and_again_switch_nothing():
    on, notes = run([(rows, 10) for rows in (8, 4, 2)] * 20)
    assert all(on) and not notes


def test_a_checkpoint_remembers_many_shapes():
    def stepper():
        model = nn.Linear(3, 1)
        return Stepper(model, sgd(model), lambda model, batch: Loss(model(batch).sum(), 1))

    state = stepper().state_dict()
    assert state["many_shapes"] is False
    stepper().load_state_dict({**state, "many_shapes": True})
    context = SimpleNamespace(device=torch.device("cuda"), cudnn_attention=True)
    ShapeCounter(context, Events(None), keep_cudnn=False).switch_off()
    assert not context.cudnn_attention
    kept = SimpleNamespace(device=torch.device("cuda"), cudnn_attention=True)
    ShapeCounter(kept, Events(None), keep_cudnn=True).switch_off()
    assert kept.cudnn_attention


def test_a_mean_over_tokens_that_a_split_would_change_is_a_warning(caplog):
    """Rows with different counts: the mean of means is another number. Python hides what is only information."""
    model = nn.Linear(4, 1).double()

    def mean_of_counted(model, batch):
        values, counted = batch
        return (model(values).squeeze(-1) * counted).sum() / counted.sum()

    torch.manual_seed(0)
    batch = torch.randn(8, 5, 4).double(), (torch.arange(5) < torch.arange(1, 9)[:, None]).double()
    Stepper(model, optim.SGD(model.parameters(), lr=0.1), mean_of_counted).step(batch)
    (warning,) = [record.message for record in caplog.records if record.levelname == "WARNING"]
    assert "weighted by rows" in warning and "brimful.Loss(sum, count)" in warning


def test_batch_norm_is_a_warning(caplog):
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4))
    loss = lambda model, batch: Loss(model(batch).square().sum(), len(batch))  # noqa: E731
    Stepper(model, optim.SGD(model.parameters(), lr=0.1), loss).step(torch.randn(8, 4))
    assert any("BatchNorm" in record.message for record in caplog.records if record.levelname == "WARNING")


# A mean over something else than its count


def shifted_mean(model, batch):
    """The mean of a Hugging Face causal model, which leaves out first labels, with a count that does not."""
    labels = batch["labels"]
    logits = model(batch["input_ids"])[:, :-1]
    return nn.functional.cross_entropy(logits.flatten(0, 1), labels[:, 1:].flatten()), (labels != -100).sum()


def prompts(count: int, *, unmasked: tuple[int, ...] = ()) -> list[dict[str, torch.Tensor]]:
    """Rows whose first third is a prompt and has no labels, but for some."""
    torch.manual_seed(count)
    rows = []
    for index in range(count):
        ids = torch.randint(0, 50, (6 + index % 7,))
        masked = 0 if index in unmasked else len(ids) // 3
        rows.append({"input_ids": ids, "labels": torch.where(torch.arange(len(ids)) < masked, -100, ids)})
    return rows


def padded(rows: list[dict[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
    fill = {"input_ids": 0, "labels": -100}
    return {
        name: nn.utils.rnn.pad_sequence([row[name] for row in rows], batch_first=True, padding_value=value)
        for name, value in fill.items()
    }


def language_stepper(loss=shifted_mean) -> Stepper:
    model = nn.Sequential(nn.Embedding(50, 8), nn.Linear(8, 50))
    return Stepper(model, sgd(model), loss, micro_batch=2, collate=padded)


def test_a_wrong_count_is_refused_though_few_rows_show_it():
    with pytest.raises(InexactSplit, match=r"its mean runs over something else than its count.*labels\[:, 1:\]"):
        language_stepper().step(prompts(32, unmasked=(13,)))


def test_a_wrong_count_is_refused_at_the_first_of_three_steps_that_shows_it():
    stepper = language_stepper()
    stepper.step(prompts(32))
    with pytest.raises(InexactSplit, match="step 2"):
        stepper.step(prompts(32, unmasked=(13,)))


def test_the_right_count_is_accepted_on_the_same_rows():
    def right(model, batch):
        return shifted_mean(model, batch)[0], (batch["labels"][:, 1:] != -100).sum()

    stepper = language_stepper(right)
    stepper.step(prompts(32, unmasked=(13,)))
    assert not stepper.events


# Memory that is too short for the check


def contrastive(model, batch):
    queries, keys = batch
    scores = model(queries) @ model(keys).T
    return nn.functional.cross_entropy(scores, torch.arange(len(scores)))


def wide() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(32, 512), nn.ReLU(), nn.Linear(512, 512), nn.ReLU(), nn.Linear(512, 16))


def test_a_loss_across_rows_is_refused_where_copies_of_the_weights_do_not_fit():
    """The check in float64 needs more than a step of this model, whose weights are most of it."""
    model = wide()
    before = [param.detach().clone() for param in model.parameters()]
    with simulated_memory("4MiB"):
        stepper = Stepper(model, sgd(model), contrastive, micro_batch=32)
        with pytest.raises(InexactSplit, match="looks across rows"):
            stepper.step((torch.randn(64, 32), torch.randn(64, 32)))
    assert "only losses were compared and no gradients" in stepper.events[0].sentence
    assert all(map(torch.equal, before, model.parameters()))


def short_of_memory(model, batch):
    """Has no memory for what only the check does: float64, and a forward without a graph."""
    if batch.dtype is torch.float64 or not torch.is_grad_enabled():
        raise torch.OutOfMemoryError("out of memory")
    return model(batch).square().mean()


@pytest.mark.parametrize(
    ("model", "reason"), [(small(), "memory ran out"), (nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4)), "BatchNorm")]
)
def test_a_split_that_could_not_be_checked_is_a_warning(model, reason, caplog):
    stepper = Stepper(model, sgd(model), short_of_memory, micro_batch=4)
    stepper.step(torch.randn(8, 3))
    stepper.step(torch.randn(8, 3))
    warnings = [record.message for record in caplog.records if record.levelname == "WARNING"]
    assert len(warnings) == 1 and f"the step is split although {reason}" in warnings[0]


def test_a_loss_that_computes_gradients_itself_is_checked_and_split():
    def penalty(model, batch):
        inputs = batch.clone().requires_grad_()
        (gradient,) = torch.autograd.grad(model(inputs).sum(), inputs, create_graph=True)
        return Loss((gradient.norm(dim=1) - 1).square().sum(), len(batch))

    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2)).double()
    plain, batch = copy.deepcopy(model), torch.randn(8, 3, dtype=torch.float64)
    (penalty(plain, batch).sum / 8).backward()
    sgd(plain).step()
    stepper = Stepper(model, sgd(model), penalty, micro_batch=3)
    assert stepper.step(batch).micro_batches == 3
    assert all(torch.allclose(*pair, rtol=1e-12) for pair in zip(model.parameters(), plain.parameters(), strict=True))
    assert not stepper.events
