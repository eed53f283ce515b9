"""What cannot be cut and redone is refused by name, with what to use instead; gradient wrappers come off."""

import pytest
import torch
import torch.distributed as dist
from torch import nn, optim
from torch.nn.parallel import DataParallel, DistributedDataParallel

from brimful.errors import TaskError, UnsupportedModel
from brimful.step.checks import check_after_backward, check_model, check_optimizer, unwrap, versions_of


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


def test_a_data_parallel_wrapper_comes_off_by_name():
    model = small()
    assert unwrap(DataParallel(model)) == (model, "DataParallel")


def test_a_distributed_wrapper_comes_off_by_name(one_process):
    model = small()
    assert unwrap(DistributedDataParallel(model)) == (model, "DistributedDataParallel")


def test_wrappers_around_wrappers_come_off():
    model = small()
    assert unwrap(DataParallel(DataParallel(model)))[0] is model


WRAPPED = "the loss calls the DataParallel wrapper, which reduces gradients inside backward; call the model that the loss is given"


def test_a_loss_that_calls_the_wrapper_is_refused():
    wrapper = DataParallel(small())
    unwrap(wrapper)
    assert refusal(wrapper, torch.ones(2, 3)) == WRAPPED


def test_a_loss_that_calls_the_distributed_wrapper_is_refused(one_process):
    wrapper = DistributedDataParallel(small())
    unwrap(wrapper)
    assert refusal(wrapper, torch.ones(2, 3)) == WRAPPED.replace("DataParallel", "DistributedDataParallel")


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
    assert refusal(check_model, nn.Sequential(wrapper(small()))) == (
        f"a {wrapper.__name__} wrapper lies inside the model, where it cannot be taken off (under torch.compile, or as a part); "
        "give the stepper the model without it"
    )


def test_a_wrapper_under_a_compiled_model_is_refused():
    assert "DataParallel wrapper lies inside" in refusal(check_model, torch.compile(DataParallel(small())))


# Models


def test_a_plain_model_is_suited():
    check_model(small())


def test_a_model_with_batch_norm_is_suited():
    check_model(nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4)))


def test_a_partly_frozen_model_is_suited():
    model = small()
    model[0].requires_grad_(False)
    check_model(model)


def sharded_as(name: str) -> nn.Module:
    """A module of a class of that name, as the library has it."""
    kind = type(name, (nn.Linear,), {})
    return nn.Sequential(kind(2, 2))


@pytest.mark.parametrize("name", ["FullyShardedDataParallel", "FSDPModule", "DeepSpeedEngine"])
def test_sharded_weights_are_refused_by_the_name_of_what_shards_them(name):
    assert refusal(check_model, sharded_as(name)) == (
        f"{name}: sharded weights are gathered inside the forward, so a step of them cannot be redone by one process alone; "
        "use the plain model on each process"
    )


def test_a_class_derived_from_what_shards_is_refused_as_well():
    engine = type("DeepSpeedEngine", (nn.Linear,), {})
    derived = type("PipelineEngine", (engine,), {})
    assert refusal(check_model, derived(2, 2)).startswith("DeepSpeedEngine:")


def test_a_model_that_torch_sharded_is_refused(one_process):
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    model = small()
    fully_shard(model, mesh=init_device_mesh("cpu", (1,)))
    assert refusal(check_model, model).startswith("FSDPModule: sharded weights")


def test_parameters_spread_over_devices_are_refused(one_process):
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Replicate, distribute_tensor

    model = small()
    mesh = init_device_mesh("cpu", (1,))
    model[0].weight = nn.Parameter(distribute_tensor(model[0].weight.detach(), mesh, [Replicate()]))
    assert refusal(check_model, model).startswith("DTensor: sharded weights")


def test_sync_batch_norm_is_refused_where_it_is():
    model = nn.Sequential(nn.Linear(3, 4), nn.SyncBatchNorm(4))
    assert refusal(check_model, model) == (
        "SyncBatchNorm ('1') talks to the other processes inside the forward, where one that runs out of memory would leave "
        "them waiting for ever; use BatchNorm, GroupNorm or LayerNorm"
    )


def test_another_librarys_sync_batch_norm_is_refused():
    apex = type("SyncBatchNorm", (nn.BatchNorm1d,), {})
    assert refusal(check_model, nn.Sequential(apex(4))).startswith("SyncBatchNorm ('0')")


@pytest.mark.parametrize("model", [small().requires_grad_(False), nn.ReLU()], ids=["frozen", "empty"])
def test_a_model_with_nothing_to_train_is_refused(model):
    assert refusal(check_model, model, kind=TaskError) == (
        "no parameter of the model requires a gradient: there is nothing to train"
    )


# Optimizers


@pytest.mark.parametrize("kind", [optim.SGD, optim.AdamW, optim.Adagrad, optim.Adafactor])
def test_torchs_optimizers_are_suited(kind):
    model = small()
    optimizer = kind(model.parameters(), lr=0.1)
    assert check_optimizer(model, optimizer) is optimizer


def test_an_optimizer_with_a_scheduler_is_suited():
    model = small()
    optimizer = sgd(model)
    optim.lr_scheduler.StepLR(optimizer, 1)
    assert check_optimizer(model, optimizer) is optimizer


def test_accelerates_wrapper_comes_off():
    from accelerate.optimizer import AcceleratedOptimizer

    model = small()
    wrapper = object.__new__(AcceleratedOptimizer)  # building one asks for an Accelerator, which stays for all tests
    wrapper.optimizer = sgd(model)
    assert check_optimizer(model, wrapper) is wrapper.optimizer


def test_what_is_no_optimizer_is_refused():
    assert refusal(check_optimizer, small(), object()) == "the optimizer is a object, not a torch.optim.Optimizer"


def test_an_optimizer_that_needs_a_closure_is_refused():
    model = small()
    assert refusal(check_optimizer, model, optim.LBFGS(model.parameters())) == (
        "LBFGS calls the loss several times within one step, which cannot be cut; use another optimizer"
    )


def test_an_optimizer_that_merely_takes_a_closure_is_suited():
    class Mine(optim.SGD):
        def step(self, closure=None):
            return super().step(closure)

    model = small()
    check_optimizer(model, Mine(model.parameters(), lr=0.1))


def test_transformers_layer_wise_optimizer_is_refused():
    from transformers.trainer_pt_utils import LayerWiseDummyOptimizer

    optimizer = LayerWiseDummyOptimizer(optimizer_dict={})
    assert refusal(check_optimizer, small(), optimizer) == (
        "LayerWiseDummyOptimizer steps inside backward, one layer at a time: weights would have changed before a retry could "
        "begin; use an optimizer that steps after backward"
    )


def test_optimizers_that_torch_applies_inside_backward_are_refused():
    from torch.distributed.optim import _apply_optimizer_in_backward

    model = small()
    _apply_optimizer_in_backward(optim.SGD, model.parameters(), {"lr": 0.1})
    assert refusal(check_optimizer, model, sgd(model)).startswith("SGD steps inside backward, one layer at a time")


# After the first backward


def backward(model: nn.Module) -> None:
    model(torch.ones(2, 3)).sum().backward()


def test_an_ordinary_backward_is_suited():
    model = small()
    versions = versions_of(model)
    backward(model)
    check_after_backward(model, sgd(model), versions)


def test_a_backward_that_leaves_some_parameters_without_a_gradient_is_suited():
    model = small()
    model.register_parameter("unused", nn.Parameter(torch.zeros(2)))
    model[0].requires_grad_(False)
    versions = versions_of(model)
    backward(model)
    check_after_backward(model, sgd(model), versions)


def test_a_hook_that_steps_inside_backward_is_refused_by_the_weight_it_changed():
    model = small()
    optimizers = {param: optim.SGD([param], lr=0.1) for param in model[2].parameters()}
    for param in optimizers:
        param.register_post_accumulate_grad_hook(lambda p: optimizers[p].step())
    versions = versions_of(model)
    backward(model)
    assert refusal(check_after_backward, model, sgd(model), versions) == (
        "'2.weight' changed during backward: SGD or a hook steps inside backward, before a retry could begin; use an optimizer "
        "that steps after backward"
    )


def test_a_sparse_gradient_is_refused_by_its_weight():
    model = nn.Sequential(nn.Embedding(10, 3, sparse=True), nn.Linear(3, 1))
    versions = versions_of(model)
    model(torch.tensor([1, 2])).sum().backward()
    assert refusal(check_after_backward, model, sgd(model), versions) == (
        "'0.weight' has a sparse gradient, which cannot be summed exactly; use Embedding(sparse=False)"
    )


def test_a_backward_that_leaves_no_gradient_at_all_is_refused():
    model = small()
    for param in model.parameters():
        param.register_post_accumulate_grad_hook(lambda p: setattr(p, "grad", None))
    versions = versions_of(model)
    backward(model)
    assert refusal(check_after_backward, model, sgd(model), versions, kind=TaskError) == (
        "backward left no gradient on any parameter of the model: the loss does not depend on it, or a hook takes the "
        "gradients away (an optimizer that steps inside backward)"
    )


def test_versions_see_a_weight_that_changed_in_place():
    model = small()
    before = versions_of(model)
    with torch.no_grad():
        model[0].bias.add_(1)
    after = versions_of(model)
    assert [name for name in before if before[name] != after[name]] == ["0.bias"]
