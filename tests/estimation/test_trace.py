"""A traced step allocates what a card would, sizes that were not traced follow from those that were, and torch is left as it was."""

import gc
import json

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig

from brimful import Loss, Task
from brimful.errors import TaskError
from brimful.estimation.fake_cuda import load_shim
from brimful.estimation.step_memory import StepMemory
from brimful.estimation.trace import BuildRecorder, TracedSetting, trace_step
from brimful.memory.history import SymbolicHistory
from brimful.tasks.adapters import new_base
from brimful.tasks.language import LanguageOptions, Pretrain, Sft, SftOptions
from tests.planning.small import Tagger

pytestmark = pytest.mark.skipif(isinstance(load_shim(), str), reason="fake CUDA tensors are not possible")

WEIGHTS = 4 * 1000 * 256
"""Bytes of the weights of `Plain`."""


def setting(**options) -> TracedSetting:
    return TracedSetting(**{"device": torch.device("cuda", 0), "has_flash": True, "autocast": None, **options})


class Plain(Task):
    """One matrix, whose step can be worked out by hand."""

    def model(self):
        return nn.Linear(1000, 256, bias=False)

    def dummy(self, rows, shape):
        return torch.zeros(rows, 1000)

    def loss(self, model, batch):
        return model(batch).square().mean()


class Gpt2(Task):
    worst_shape = (256,)

    def model(self):
        return GPT2LMHeadModel(
            GPT2Config(
                n_embd=64,
                n_layer=2,
                n_head=2,
                vocab_size=512,
                n_positions=256,
                bos_token_id=0,
                eos_token_id=1,
                use_cache=False,
            )
        )

    def dummy(self, rows, shape):
        ids = torch.ones(rows, shape[0], dtype=torch.long)
        return {"input_ids": ids, "labels": ids}

    def loss(self, model, batch):
        return model(**batch)


class Cnn(Task):
    worst_shape = (64,)

    def model(self):
        layers = [
            nn.Conv2d(3, 16, 3, padding=1),
            nn.BatchNorm2d(16),
            nn.SiLU(),
            nn.MaxPool2d(2),
            nn.Conv2d(16, 32, 3, padding=1),
        ]
        return nn.Sequential(
            *layers, nn.GroupNorm(4, 32), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(32, 10)
        )

    def dummy(self, rows, shape):
        side = shape[0]
        return {"image": torch.zeros(rows, 3, side, side), "label": torch.zeros(rows, dtype=torch.long)}

    def loss(self, model, batch):
        return F.cross_entropy(model(batch["image"]), batch["label"])


class AllPairs(Task):
    def model(self):
        return nn.Linear(32, 1)

    def dummy(self, rows, shape):
        return torch.zeros(rows, 32)

    def loss(self, model, batch):
        scores = model(batch)
        return Loss(sum=F.softplus(scores - scores.T).mean() * len(batch), count=len(batch))


def peaks_of(history, **options):
    """Without the workspaces of cuBLAS, which are larger than these models."""
    return SymbolicHistory.fit([history]).peaks(
        history.rows, history.shape, **{"accumulates": True, "cublas_bytes": 0, **options}
    )


@pytest.mark.parametrize(
    ("task", "rows", "shape", "options"),
    [
        (Pretrain(LanguageOptions(model="chatlm-tiny")), 9, (96, 72), {"autocast": torch.bfloat16}),
        (
            Pretrain(LanguageOptions(model="chatlm-tiny")),
            300,
            (128, 128),
            {"autocast": torch.bfloat16, "layout": "packed"},
        ),
        (Gpt2(), 11, (224,), {"autocast": torch.bfloat16}),
        (Gpt2(), 11, (224,), {"checkpointing": "on"}),
        (Cnn(), 11, (48,), {}),
        (AllPairs(), 700, (), {}),
    ],
    ids=["t5", "t5-packed", "gpt2", "gpt2-checkpointed", "cnn", "all-pairs"],
)
def test_an_unseen_size_is_predicted_as_if_it_had_been_traced(task, rows, shape, options):
    memory = StepMemory(
        task, setting(**options), task.worst_shape, lengths=bool(shape), step_rows=10**6, progress=lambda phrase: None
    )
    direct = peaks_of(trace_step(task, rows, shape, setting(**options))[0], expandable=True)
    predicted = memory.peaks(rows, shape, cublas_bytes=0)
    assert not memory.interpolates
    assert predicted.allocated_bytes == pytest.approx(direct.allocated_bytes, rel=1e-3)
    assert predicted.reserved_bytes == pytest.approx(direct.reserved_bytes, rel=1e-3)


def test_a_loss_of_all_pairs_grows_with_the_square_of_the_rows():
    memory = StepMemory(AllPairs(), setting(), (), lengths=False, step_rows=10**6, progress=lambda phrase: None)
    small, large = (memory.peaks(rows, (), cublas_bytes=0).kinds["loss"] for rows in (1000, 8000))
    assert large / small == pytest.approx(64, rel=0.05)


class Layers(Plain):
    """Modules in a `Sequential`, whose frees after the step come in any order."""

    def model(self):
        return nn.Sequential(nn.Linear(1000, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 1))


def test_sizes_of_a_plain_model_have_one_order_of_allocations():
    memory = StepMemory(Layers(), setting(), (), lengths=False, step_rows=10**6, progress=lambda phrase: None)
    assert not memory.interpolates


class OneSize(Task):
    """A model of images that are 32 wide, as its position embedding says."""

    def model(self):
        model = nn.Linear(32, 8)
        model.position = nn.Parameter(torch.zeros(32, 32))
        return model

    def dummy(self, rows, shape):
        return torch.zeros(rows, shape[0], shape[0])

    def loss(self, model, batch):
        return model(batch + model.position).square().mean()


def test_a_model_of_one_size_is_traced_at_that_size_alone(caplog):
    memory = StepMemory(OneSize(), setting(), (32,), lengths=True, step_rows=10**6, progress=lambda phrase: None)
    assert memory.one_shape and not memory.knows_lengths and not memory.interpolates
    assert memory.peaks(64, (32,)).allocated_bytes > memory.peaks(2, (32,)).allocated_bytes
    assert not caplog.records


def test_the_unquantized_weights_of_a_base_in_4_bits_are_never_allocated():
    pytest.importorskip("bitsandbytes")
    shape = {"hidden_size": 256, "intermediate_size": 1024, "num_hidden_layers": 4, "num_attention_heads": 4}
    with BuildRecorder() as recorder, torch.device("meta"):
        model = new_base(LlamaConfig(vocab_size=256, **shape), "4bit", torch.bfloat16)
    allocated = sum(size for _, size in recorder.build(model).events if size > 0)
    assert allocated <= 1.1 * sum(param.nbytes for param in model.parameters())


def test_a_step_by_hand():
    """Weights, one gradient, two states of AdamW; at the optimizer's step all are live, beside the state's own counter."""
    kinds = peaks_of(trace_step(Plain(), 2, (), setting())[0]).kinds
    assert kinds["parameters"] == WEIGHTS and kinds["gradients"] == WEIGHTS
    assert kinds["optimizer"] == pytest.approx(2 * WEIGHTS, abs=2048)


def test_a_traced_step_has_no_bytes():
    """A batch of 4 TB is no problem, as long as `dummy` does not make it."""

    class Huge(Plain):
        def dummy(self, rows, shape):
            return torch.zeros(1, 1000)

        def loss(self, model, batch):
            return model(batch.expand(10**9, 1000)).square().mean()

    assert peaks_of(trace_step(Huge(), 2, (), setting())[0], reserved=False).allocated_bytes > 10**12


def test_frozen_weights_have_no_gradient_and_no_state():
    class Frozen(Plain):
        def model(self):
            return nn.Sequential(nn.Linear(1000, 256, bias=False).requires_grad_(False), nn.Linear(256, 4))

    kinds = peaks_of(trace_step(Frozen(), 2, (), setting())[0]).kinds
    assert kinds["parameters"] >= WEIGHTS
    assert kinds["gradients"] + kinds["optimizer"] < WEIGHTS / 10


def test_tied_weights_count_once():
    class Tied(Plain):
        def model(self):
            model = nn.ModuleDict({"one": nn.Linear(1000, 256, bias=False), "two": nn.Linear(1000, 256, bias=False)})
            model["two"].weight = model["one"].weight
            return model

        def loss(self, model, batch):
            return (model["one"](batch) + model["two"](batch)).square().mean()

    assert peaks_of(trace_step(Tied(), 2, (), setting())[0]).kinds["parameters"] == WEIGHTS


@pytest.mark.parametrize(
    ("make", "state"),
    [
        (lambda params: torch.optim.SGD(params), 0),
        (lambda params: torch.optim.SGD(params, momentum=0.9), 1),
        (lambda params: torch.optim.AdamW(params, fused=True), 2),
        (lambda params: torch.optim.Adafactor(params), 0),
    ],
    ids=["sgd", "momentum", "adamw", "adafactor"],
)
def test_the_state_of_an_optimizer_in_weights(make, state):
    class Other(Plain):
        def optimizer(self, model):
            return make(model.parameters())

    history, _ = trace_step(Other(), 512, (), setting())
    kinds = peaks_of(history, accumulates=False, reserved=False)
    held = kinds.phases["first_forward"] - WEIGHTS
    activations = 512 * 1000 * 4 + 3 * 512 * 256 * 4
    assert held == pytest.approx(state * WEIGHTS + activations, rel=0.25)


def test_foreach_is_chosen_where_torch_chooses_it_on_a_gpu():
    class Default(Plain):
        def optimizer(self, model):
            return torch.optim.AdamW(model.parameters())

    assert trace_step(Default(), 2, (), setting())[1].optimizer == "AdamW, foreach"
    assert trace_step(Plain(), 2, (), setting())[1].optimizer == "AdamW, fused"


def test_checkpointing_keeps_less():
    class Deep(Plain):
        def model(self):
            return nn.Sequential(
                *(nn.Sequential(nn.Linear(256, 256), nn.GELU(), nn.Linear(256, 256), nn.GELU()) for _ in range(8))
            )

        def dummy(self, rows, shape):
            return torch.zeros(rows, 256)

    plain, checkpointed = (
        peaks_of(trace_step(Deep(), 4096, (), setting(checkpointing=name))[0], reserved=False).allocated_bytes
        for name in ("off", "on")
    )
    assert checkpointed < 0.6 * plain


def test_fp16_has_a_scaler_and_half_the_activations():
    class Wide(Plain):
        def model(self):
            return nn.Sequential(nn.Linear(64, 4096), nn.ReLU(), nn.Linear(4096, 4096), nn.ReLU(), nn.Linear(4096, 8))

        def dummy(self, rows, shape):
            return torch.zeros(rows, 64)

    full, half = (
        peaks_of(trace_step(Wide(), 65536, (), setting(autocast=autocast))[0], reserved=False).kinds["activations"]
        for autocast in (None, torch.float16)
    )
    assert half == pytest.approx(full / 2, rel=0.1)


def test_adapters_by_peft_train_little():
    peft = pytest.importorskip("peft")

    class Adapted(Gpt2):
        def model(self):
            return peft.get_peft_model(
                super().model(), peft.LoraConfig(r=4, target_modules=["c_attn"], fan_in_fan_out=True)
            )

    plain, adapted = (peaks_of(trace_step(task, 2, (64,), setting())[0]).kinds for task in (Gpt2(), Adapted()))
    assert adapted["parameters"] > plain["parameters"]
    assert adapted["gradients"] < 0.1 * plain["gradients"]


def test_silu_keeps_its_input_alone_whatever_torch_is_built_for():
    """torch for CPUs computes its backward in five operations, each with a result of its own; CUDA has one kernel."""

    class Gate(Plain):
        def dummy(self, rows, shape):
            return torch.zeros(rows, 1000)

        def loss(self, model, batch):
            return F.silu(model(batch)).mean()

    origins = trace_step(Gate(), 64, (), setting())[0].origins
    assert any("silu_backward" in one for one in origins) and not any("sigmoid" in one for one in origins)


def test_attention_without_a_mask_in_half_precision_is_flash():
    class Attention(Plain):
        def model(self):
            return nn.Linear(64, 3 * 64)

        def dummy(self, rows, shape):
            return torch.zeros(rows, 16, 64)

        def loss(self, model, batch):
            parts = model(batch).unflatten(-1, (3, 4, 16)).permute(2, 0, 3, 1, 4)
            return F.scaled_dot_product_attention(*parts, is_causal=True).square().mean()

    def kernels(**options):
        return dict(trace_step(Attention(), 2, (), setting(**options))[1].attention)

    assert kernels(autocast=torch.bfloat16) == {"flash": 3}
    assert kernels() == {"memory-efficient": 3}
    assert kernels(autocast=torch.float16, has_flash=False) == {"memory-efficient": 3}


def test_a_4_bit_product_counts_the_weight_that_it_unpacks(tmp_path):
    for package in ("bitsandbytes", "peft"):
        pytest.importorskip(package)
    config = {
        "architectures": ["LlamaForCausalLM"], "model_type": "llama", "vocab_size": 96, "hidden_size": 64, "intermediate_size": 512,
        "num_hidden_layers": 1, "num_attention_heads": 4, "num_key_value_heads": 4, "bos_token_id": 1, "eos_token_id": 2,
    }  # fmt: skip
    (tmp_path / "config.json").write_text(json.dumps(config))
    task = Sft(SftOptions(model=str(tmp_path), lora="r=2,targets=all-linear", load_in="4bit"))
    task.use_device(torch.device("cuda"), "bf16")
    history, _ = trace_step(task, 2, (16,), setting(autocast=torch.bfloat16))
    unpacked = [
        size for origin, size in zip(history.origins, history.sizes, strict=True) if "dequantize_4bit" in origin
    ]
    assert max(unpacked) == 64 * 512 * 2  # in bfloat16, forward and backward


class ReadsAValue(Plain):
    def loss(self, model, batch):
        mean = model(batch).square().mean()
        scale = mean.item()
        return mean * scale


def test_a_value_that_is_read_is_reported_with_its_line():
    line = ReadsAValue.loss.__code__.co_firstlineno + 2
    _, notes = trace_step(ReadsAValue(), 2, (), setting())
    (sentence,) = notes.assumptions
    assert sentence.startswith(f"a value of a tensor is read at test_trace.py:{line}")


@pytest.mark.parametrize(
    "is_bad",
    [
        lambda out: out.isnan().any(),
        lambda out: out.isinf().sum() > 0,
        lambda out: not out.isfinite().all(),
        lambda out: (~torch.isfinite(out)).any(),
        lambda out: out.mean().isnan().item(),
    ],
    ids=["nan", "inf", "finite", "not-finite", "scalar"],
)
def test_a_check_for_nan_finds_none(is_bad):
    class Checks(Plain):
        def loss(self, model, batch):
            out = model(batch)
            if is_bad(out):
                raise ValueError("NaN in the output")
            return out.square().mean()

    trace_step(Checks(), 2, (), setting())


def test_numpy_has_the_values_of_the_batch_or_ones():
    class Measures(Plain):
        def dummy(self, rows, shape):
            return {"x": torch.zeros(rows, 1000), "y": torch.arange(rows)}

        def loss(self, model, batch):
            out = model(batch["x"])
            seen.append((batch["y"].cpu().numpy().tolist(), batch["y"].tolist(), out.argmax(1).cpu().numpy().tolist()))
            return out.square().mean()

    seen = []
    line = Measures.loss.__code__.co_firstlineno + 2
    _, notes = trace_step(Measures(), 3, (), setting())
    assert seen[0] == ([0, 1, 2], [0, 1, 2], [1, 1, 1])
    assert [one.partition(": ")[0] for one in notes.assumptions] == [
        f"a value of a tensor is read at test_trace.py:{line}"
    ]
    assert torch.ones(2).numpy().tolist() == [1, 1]


class FailsOnAValue(Plain):
    def loss(self, model, batch):
        out = model(batch)
        if (out < 0).any():
            raise ValueError("a probability below 0")
        return out.square().mean()


def test_a_failure_that_follows_from_an_assumed_value_names_it():
    line = FailsOnAValue.loss.__code__.co_firstlineno + 2
    with pytest.raises(
        TaskError, match=rf"below 0\. Before that, a value of a tensor is read at test_trace\.py:{line}"
    ):
        trace_step(FailsOnAValue(), 2, (), setting())


@pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU, nn.RNN])
def test_recurrent_layers_are_traced_without_a_warning(kind, recwarn):
    class Recurrent(Plain):
        def model(self):
            return kind(16, 32, num_layers=2, batch_first=True)

        def dummy(self, rows, shape):
            return torch.zeros(rows, 5, 16)

        def loss(self, model, batch):
            return model(batch)[0].square().mean()

    trace_step(Recurrent(), 4, (), setting())
    assert not [one for one in recwarn if "cuDNN" in str(one.message)]


def test_weights_gradients_and_state_are_named_by_their_weight():
    named = peaks_of(trace_step(Plain(), 2, (), setting())[0], largest=4).largest
    assert [(one.origin, one.kind) for one in named] == [
        ("weight", "parameters"),
        ("weight", "optimizer"),
        ("weight", "optimizer"),
        ("weight", "gradients"),
    ]


def test_a_mask_of_the_batch_that_is_all_ones_is_known():
    """transformers leaves such a mask out and takes a faster kernel."""

    class Masked(Gpt2):
        def dummy(self, rows, shape):
            batch = super().dummy(rows, shape)
            return {**batch, "attention_mask": self.mask(rows, shape[0])}

    full, short = Masked(), Masked()
    full.mask = lambda rows, length: torch.ones(rows, length, dtype=torch.long)
    short.mask = lambda rows, length: torch.ones(rows, length, dtype=torch.long).index_fill(
        1, torch.tensor([length - 1]), 0
    )
    kernels = [set(trace_step(task, 2, (64,), setting(autocast=torch.bfloat16))[1].attention) for task in (full, short)]
    assert kernels == [{"flash"}, {"memory-efficient"}]


@pytest.mark.parametrize(
    ("choose", "name"),
    [
        (lambda out: out[out > 0], "an index that is a mask"),
        (lambda out: out.flatten()[(out > 0).flatten().nonzero()[:, 0]], "nonzero()"),
        (lambda out: out.masked_select(out > 0), "masked_select()"),
        (lambda out: out[(out > 0).any(1)], "an index that is a mask"),
    ],
    ids=["mask", "nonzero", "masked_select", "rows"],
)
def test_where_the_number_of_elements_depends_on_values_all_are_taken(choose, name):
    class Chooses(Plain):
        def loss(self, model, batch):
            return choose(model(batch)).square().mean()

    history, notes = trace_step(Chooses(), 64, (), setting())
    assert any(sentence.startswith(name) and "test_trace.py" in sentence for sentence in notes.assumptions)
    assert peaks_of(history).kinds.get("loss", 0) + peaks_of(history).kinds.get("activations", 0) >= 0


def test_an_assignment_by_a_mask_works():
    class Fills(Plain):
        def loss(self, model, batch):
            out = model(batch).clone()
            out[out > 0] = 0.0
            return out.square().mean()

    trace_step(Fills(), 4, (), setting())


def test_an_operation_without_a_fake_implementation_is_named():
    @torch.library.custom_op("brimful_tests::doubled", mutates_args=())
    def doubled(x: torch.Tensor) -> torch.Tensor:
        return 2 * x

    class Custom(Plain):
        def loss(self, model, batch):
            return doubled(model(batch)).square().mean()

    with pytest.raises(TaskError, match=r"brimful_tests.*doubled.*Try: torch\.library\.register_fake") as caught:
        trace_step(Custom(), 2, (), setting())
    assert "\n" not in str(caught.value)


def test_a_loop_that_ends_by_a_value_is_refused_with_its_line():
    class Loops(Plain):
        def loss(self, model, batch):
            out = model(batch)
            while out.norm() > 0.5:
                out = out * 0.5
            return out.square().mean()

    line = Loops.loss.__code__.co_firstlineno + 2
    with pytest.raises(TaskError, match=rf"test_trace\.py:{line} reads values of tensors without an end.*Try: a loop"):
        trace_step(Loops(), 2, (), setting())


def test_an_operation_that_needs_values_is_refused_with_its_line():
    class Unique(Plain):
        def loss(self, model, batch):
            out = model(batch)
            return out[out.argmax(1).unique()].square().mean()

    line = Unique.loss.__code__.co_firstlineno + 2
    with pytest.raises(TaskError, match=rf"_unique2\S* at \S*test_trace\.py:{line} depends on the values of tensors"):
        trace_step(Unique(), 2, (), setting())


def test_a_kernel_that_takes_addresses_is_said_to_be_not_covered(recwarn):
    class Own(Plain):
        def loss(self, model, batch):
            out = model(batch)
            assert out.data_ptr() != batch.data_ptr()
            return out.square().mean()

    _, notes = trace_step(Own(), 2, (), setting())
    assert any("kernel of your own allocates is not covered" in one for one in notes.assumptions)
    assert not recwarn.list


def test_a_triton_kernel_is_refused_by_that_name():
    triton = pytest.importorskip("triton")

    @triton.jit
    def fill(pointer):
        pass

    class Own(Plain):
        def loss(self, model, batch):
            out = model(batch)
            fill[(1,)](out)
            return out.square().mean()

    with pytest.raises(TaskError, match=r"a Triton kernel at \S*test_trace\.py:\d+ has no fake implementation"):
        trace_step(Own(), 2, (), setting())


def test_sparse_gradients_are_refused_by_that_name():
    class Bag(Plain):
        def model(self):
            return nn.EmbeddingBag(100, 8, sparse=True)

        def dummy(self, rows, shape):
            return torch.zeros(rows, 4, dtype=torch.long)

        def optimizer(self, model):
            return torch.optim.SparseAdam(list(model.parameters()))

    with pytest.raises(TaskError, match=r"sparse tensors are not covered.*Try: sparse=False"):
        trace_step(Bag(), 2, (), setting())


def test_a_compiled_model_is_traced_as_it_is_written(recwarn):
    class Compiled(Layers):
        def model(self):
            return torch.compile(super().model())

    (plain, _), (compiled, notes) = (trace_step(task, 2, (), setting()) for task in (Layers(), Compiled()))
    assert notes.is_compiled and notes.model == "Sequential"
    assert compiled.sizes.sum() == plain.sizes.sum()
    assert not [one for one in recwarn if "hooks" in str(one.message)]


@pytest.mark.parametrize("make", [torch.optim.SGD, torch.optim.Adagrad])
def test_other_fused_optimizers_are_traced(make):
    class Fused(Plain):
        def optimizer(self, model):
            return make(model.parameters(), lr=0.1, fused=True)

    assert trace_step(Fused(), 2, (), setting())[1].optimizer.endswith(", fused")


def test_the_optimizer_can_be_computed_the_other_way():
    _, notes = trace_step(Plain(), 2, (), setting(optimizer="foreach"))
    assert (notes.optimizer, notes.other_optimizer) == ("AdamW, foreach", "fused")


class Uneven(Plain):
    """Its order of operations depends on the rows."""

    def loss(self, model, batch):
        return sum(model(batch[row : row + 2]).square().mean() for row in range(0, len(batch), 2))


def test_interpolated_peaks_are_divided_over_processes_too():
    memory = StepMemory(Uneven(), setting(), (), lengths=False, step_rows=10**6, progress=lambda phrase: None)
    one, eight = (memory.peaks(4, (), shards=shards).allocated_bytes for shards in (1, 8))
    beside = memory.peaks(4, (), shards=8, phase_bytes=(("optimizer", 100 * WEIGHTS),)).phases["optimizer"]
    assert memory.interpolates
    assert one - eight == pytest.approx(1.03 * 7 / 8 * 4 * WEIGHTS, rel=0.1)  # weights, gradients and two states
    assert beside - memory.peaks(4, (), shards=8).phases["optimizer"] == pytest.approx(103 * WEIGHTS, rel=0.01)


def test_a_mistake_in_the_loss_names_its_line():
    class Wrong(Plain):
        def loss(self, model, batch):
            return model(batch).no_such_method()

    with pytest.raises(TaskError, match="no_such_method") as caught:
        trace_step(Wrong(), 2, (), setting())
    assert "test_trace.py" in str(caught.value)


class FailsInBackward(Plain):
    def loss(self, model, batch):
        out = model(batch)
        out.register_hook(lambda grad: 1 / 0)
        return out.square().mean()


def real_step() -> float:
    """A real step on the CPU, with attention, autocast and dropout."""
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(32, 2, 64, batch_first=True, activation=F.silu)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        loss = layer(torch.ones(2, 5, 32)).float().square().mean()
    loss.backward()
    return sum(float(param.grad.sum()) for param in layer.parameters())


def state() -> tuple:
    return (
        torch.cuda.is_available(),
        torch.cuda.is_bf16_supported,
        torch.cuda.current_device,
        F.scaled_dot_product_attention,
        F.dropout,
        torch.Tensor.softmax,
        torch.autograd.is_multithreading_enabled(),
        torch._C._dispatch_has_kernel_for_dispatch_key("aten::silu_backward", "CUDA"),
        gc.isenabled(),
        torch.is_grad_enabled(),
    )


@pytest.mark.parametrize("device", ["cuda:0", "cpu"])
@pytest.mark.parametrize("task", [Plain(), FailsInBackward()], ids=["works", "fails halfway"])
def test_torch_is_left_as_it_was(device, task):
    before, gradient = state(), real_step()
    try:
        trace_step(task, 2, (), setting(device=torch.device(device), autocast=torch.bfloat16))
    except TaskError:
        assert isinstance(task, FailsInBackward)
    assert state() == before
    assert real_step() == gradient


def test_a_real_cuda_tensor_is_refused_as_before():
    trace_step(Plain(), 2, (), setting())
    if not torch.cuda.is_available():
        with pytest.raises((AssertionError, RuntimeError, NotImplementedError)):
            torch.zeros(2, device="cuda") + 1


def test_the_random_state_of_the_caller_is_kept():
    before = torch.random.get_rng_state()
    trace_step(Tagger(), 2, (64,), setting())
    after = torch.random.get_rng_state()
    assert torch.equal(before, after)
