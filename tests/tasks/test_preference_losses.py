"""The losses over preferences: against a reference in float64 that shares no code with them, padded and packed."""

import itertools
from unittest import mock

import numpy as np
import pytest
import torch
import transformers
from torch.utils._python_dispatch import TorchDispatchMode

from brimful.memory.layout import PACKED, FixedSize, PackedLayout
from brimful.packing import cross_entropy
from brimful.tasks.model_folder import model_class
from brimful.tasks.pair_batches import REFERENCE
from brimful.tasks.preference import Dpo, DpoOptions
from tests.packing.families import in_float64
from tests.tasks.tiny import make_model
from tests.tasks.tiny_causal import make_causal

VARIANTS = {
    "sigmoid": {"loss": "sigmoid"},
    "sigmoid by token": {"loss": "sigmoid", "length_normalised": True},
    "cdpo": {"loss": "sigmoid", "label_smoothing": 0.1},
    "ipo": {"loss": "ipo"},
    "ipo whole": {"loss": "ipo", "length_normalised": False},
    "hinge": {"loss": "hinge"},
    "hinge by token": {"loss": "hinge", "length_normalised": True},
    "orpo": {"loss": "orpo"},
    "orpo whole": {"loss": "orpo", "length_normalised": False},
    "simpo": {"loss": "simpo", "margin": 0.3},
    "simpo whole": {"loss": "simpo", "length_normalised": False, "beta": 0.2},
    "simpo smoothed": {"loss": "simpo", "label_smoothing": 0.2},
}
VOCAB = 96


@pytest.fixture(scope="module", params=["t5", "qwen2", "gemma3_text"])
def model(request, tmp_path_factory):
    """A tiny model in float64, and its folder. Gemma has a sliding window and a cap of its own."""
    if request.param == "t5":
        made = make_model(VOCAB, num_layers=2, num_decoder_layers=2)
    else:
        made = make_causal(request.param, VOCAB, **({"tie_word_embeddings": True} if request.param == "qwen2" else {}))
    folder = tmp_path_factory.mktemp(request.param)
    made.save_pretrained(folder)
    torch.manual_seed(1)
    made = made.double()
    for param in made.parameters():  # large enough that log-probabilities differ
        param.data += 0.1 * torch.randn_like(param)
    return made, str(folder)


@pytest.fixture(autouse=True)
def exact():
    """transformers computes norms and positions in float32, whatever the weights are."""
    with in_float64():
        yield


def pairs(count=7):
    """Uneven pairs; one prompt of a single token and one reply of a single token among them."""
    draw = np.random.default_rng(5)
    sizes = [(1, 4, 9), (6, 1, 3), (12, 7, 2), (3, 5, 5), (9, 2, 11), (30, 8, 6), (2, 3, 1)]
    return [
        {
            **{name: draw.integers(2, VOCAB, size) for name, size in zip(("prompt", "chosen", "rejected"), row, strict=True)},
            REFERENCE: tuple(-3.0 * size - draw.random() for size in row[1:]),
        }
        for row in sizes[:count]
    ]  # fmt: skip


def task_for(model, **options):
    return Dpo(options=DpoOptions(model=model[1], freeze="none", **options))


def reply_log_probability(net, prompt, reply):
    """One reply alone, through the model's own forward."""
    prompt, reply = torch.tensor(prompt)[None], torch.tensor(reply)[None]
    if net.config.is_encoder_decoder:
        start = torch.full((1, 1), net.config.decoder_start_token_id)
        logits = net(input_ids=prompt, decoder_input_ids=torch.cat([start, reply[:, :-1]], 1)).logits
    else:
        logits = net(input_ids=torch.cat([prompt, reply], 1), use_cache=False).logits[:, prompt.shape[1] - 1 : -1]
    return logits.log_softmax(-1)[0, torch.arange(reply.shape[1]), reply[0]].sum()


def expected_loss(net, row, loss, beta, smoothing, normalised, margin):
    """As the papers write them."""
    chosen, rejected = (reply_log_probability(net, row["prompt"], row[name]) for name in ("chosen", "rejected"))
    ref_chosen, ref_rejected = row[REFERENCE]
    if normalised:
        chosen, ref_chosen = chosen / len(row["chosen"]), ref_chosen / len(row["chosen"])
        rejected, ref_rejected = rejected / len(row["rejected"]), ref_rejected / len(row["rejected"])
    ratio = (chosen / 1 - ref_chosen) - (rejected - ref_rejected)

    def log_sigmoid(x):
        return -torch.log1p(torch.exp(-x))

    if loss == "sigmoid":
        return -(1 - smoothing) * log_sigmoid(beta * ratio) - smoothing * log_sigmoid(-beta * ratio)
    if loss == "ipo":
        return (ratio - 0.5 / beta) ** 2
    if loss == "hinge":
        return torch.clamp(1 - beta * ratio, min=0)
    if loss == "simpo":
        gamma = beta * margin
        apart = beta * chosen - beta * rejected - gamma
        return -(1 - smoothing) * log_sigmoid(apart) - smoothing * log_sigmoid(-apart)
    odds = [torch.log(p / (1 - p)) for p in (torch.exp(chosen), torch.exp(rejected))]
    return -chosen - beta * log_sigmoid(odds[0] - odds[1])


def gradients(net, total):
    params = [param for param in net.parameters() if param.requires_grad]
    grads = torch.autograd.grad(total, params, allow_unused=True)
    return torch.cat([(torch.zeros_like(p) if g is None else g).flatten() for p, g in zip(params, grads, strict=True)])


def loss_and_gradient(task, net, batch):
    loss = task.loss(net, batch)
    return loss, gradients(net, loss.sum)


@pytest.mark.parametrize("variant", VARIANTS)
def test_loss_and_gradient_are_those_of_the_papers(model, variant):
    net, options = model[0].train(), VARIANTS[variant]
    task = task_for(model, **options)
    default_beta = 2.0 if options["loss"] == "simpo" else 0.1
    settings = {
        "loss": options["loss"],
        "beta": options.get("beta", default_beta),
        "smoothing": options.get("label_smoothing", 0.0),
        "normalised": options.get("length_normalised", options["loss"] in ("ipo", "orpo", "simpo")),
        "margin": options.get("margin", 0.5),
    }
    rows = pairs()
    expected = sum(expected_loss(net, row, **settings) for row in rows)
    expected_gradient = gradients(net, expected)
    for batch in (task.collate(rows), PACKED.collate(task, rows)):
        loss, gradient = loss_and_gradient(task, net, batch)
        assert loss.count == len(rows)
        torch.testing.assert_close(loss.sum, expected, rtol=1e-8, atol=1e-8)
        assert (gradient - expected_gradient).norm() <= 1e-8 * expected_gradient.norm()


def test_pairs_in_a_sequence_of_a_fixed_size_have_the_same_loss(model):
    """With room for more pairs and tokens than there are, as a micro-batch of a CUDA graph has it."""
    net, task, rows = model[0].train(), task_for(model), pairs()
    shapes = [task.shape(row) for row in rows]
    fixed = FixedSize(tuple(64 + 64 * (sum(lengths) // 64) for lengths in zip(*shapes, strict=True)), 10)
    assert fixed.holds(shapes)
    (plain, gradient), (roomy, other) = (
        loss_and_gradient(task, net, layout.collate(task, rows)) for layout in (PACKED, PackedLayout(fixed))
    )
    torch.testing.assert_close(roomy.sum, plain.sum, rtol=1e-10, atol=1e-10)
    assert (other - gradient).norm() <= 1e-10 * gradient.norm()


@pytest.mark.parametrize("layout", ["padded", "packed"])
@pytest.mark.parametrize("split", [[1] * 7, [3, 4], [6, 1]])
def test_any_split_is_the_whole(model, layout, split):
    net, task, rows = model[0].train(), task_for(model), pairs()

    def collate(some):
        return task.collate(some) if layout == "padded" else PACKED.collate(task, some)

    whole, gradient = loss_and_gradient(task, net, collate(rows))
    begins = np.cumsum([0, *split])
    parts = [loss_and_gradient(task, net, collate(rows[a:b])) for a, b in itertools.pairwise(begins)]
    torch.testing.assert_close(sum(part.sum for part, _ in parts), whole.sum, rtol=1e-10, atol=1e-10)
    assert (sum(grad for _, grad in parts) - gradient).norm() <= 1e-10 * gradient.norm()
    log = {name: sum(float(part.log[name]) * part.count for part, _ in parts) / whole.count for name in whole.log}
    assert log == pytest.approx({name: float(value) for name, value in whole.log.items()}, rel=1e-9)


def test_the_log_has_rewards_accuracy_and_distance(model):
    task, rows = task_for(model, beta=0.2), pairs()
    policy = np.array([[reply_log_probability(model[0].eval(), row["prompt"], row[name]).item() for name in ("chosen", "rejected")] for row in rows])  # fmt: skip
    reference = np.array([row[REFERENCE] for row in rows])
    lengths = np.array([[len(row["chosen"]), len(row["rejected"])] for row in rows])
    rewards = 0.2 * (policy - reference)
    log = task.loss(model[0], task.collate(rows)).log
    assert {name: float(value) for name, value in log.items()} == pytest.approx(
        {
            "rewards/chosen": rewards[:, 0].mean(),
            "rewards/rejected": rewards[:, 1].mean(),
            "margin": (rewards[:, 0] - rewards[:, 1]).mean(),
            "accuracy": (rewards[:, 0] > rewards[:, 1]).mean(),
            "kl": ((reference - policy) / lengths).mean(),
            "logp_chosen": (policy[:, 0] / lengths[:, 0]).mean(),
        }
    )


def test_a_model_that_has_not_moved_is_right_by_half(model):
    values, lengths = torch.randn(5, 2) - 9, torch.randint(1, 9, (5, 2))
    log = task_for(model).pair_losses(values, values, lengths)[1]
    assert (log["accuracy"], log["margin"], log["kl"]) == (0.5, 0, 0)


def test_pairs_are_smoothed_in_training_only(model):
    task, batch = task_for(model, label_smoothing=0.2), task_for(model).collate(pairs())
    assert task.loss(model[0].eval(), batch).sum == task_for(model).loss(model[0], batch).sum
    assert task.loss(model[0].train(), batch).sum != task_for(model).loss(model[0], batch).sum


DROPPING = {
    "bart": ("BartConfig", ("dropout", "attention_dropout", "activation_dropout", "encoder_layerdrop", "decoder_layerdrop")),
    "gpt2": ("GPT2Config", ("resid_pdrop", "embd_pdrop", "attn_pdrop")),
    "opt": ("OPTConfig", ("dropout", "attention_dropout", "layerdrop")),
    "phi": ("PhiConfig", ("resid_pdrop", "embd_pdrop", "attention_dropout")),
}  # fmt: skip


@pytest.mark.parametrize("kind", DROPPING)
def test_no_dropout_of_any_family_is_left_in_training(kind, tmp_path):
    sizes = {
        "hidden_size": 32,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "encoder_layers": 2,
        "decoder_layers": 2,
    }
    config, names = DROPPING[kind]
    config = getattr(transformers, config)(
        vocab_size=VOCAB, **sizes, **dict.fromkeys(names, 0.4), bos_token_id=0, eos_token_id=1
    )
    model_class(config).from_config(config).save_pretrained(tmp_path)
    task = task_for((None, str(tmp_path)))
    net, batch = task.initial_model(), task.collate(pairs())
    torch.testing.assert_close(task.loss(net.train(), batch).sum, task.loss(net.eval(), batch).sum)
    dropout = next(remark for remark in task.remarks([]) if remark[0] == "dropout")
    assert dropout[1:3] == (0.4, 0.0)


SIZES = {
    "d_model": 8,
    "encoder_layers": 1,
    "decoder_layers": 1,
    "encoder_attention_heads": 2,
    "decoder_attention_heads": 2,
}
SIZES |= {"encoder_ffn_dim": 16, "decoder_ffn_dim": 16, "max_position_embeddings": 64, "vocab_size": VOCAB}
SIZES |= {"pad_token_id": 0, "eos_token_id": 1, "decoder_start_token_id": 0}
ENCODER_DECODERS = {
    "bart": ("BartConfig", SIZES),
    "pegasus": ("PegasusConfig", SIZES),
}


@pytest.fixture(params=ENCODER_DECODERS)
def other_encoder_decoder(request, tmp_path):
    """One that cannot be packed, with a bias of its logits."""
    config, sizes = ENCODER_DECODERS[request.param]
    config = getattr(transformers, config)(**sizes)
    net = model_class(config).from_config(config)
    net.save_pretrained(tmp_path)
    for tensor in (*net.parameters(), *net.buffers()):
        tensor.data += 0.1 * torch.randn_like(tensor) if tensor.is_floating_point() else 0
    return net.double().eval(), str(tmp_path)


def test_encoder_decoders_that_are_not_packed_have_the_loss_of_the_papers(other_encoder_decoder):
    net, rows, task = other_encoder_decoder[0], pairs(), task_for(other_encoder_decoder)
    expected = sum(expected_loss(net, row, "sigmoid", 0.1, 0.0, False, 0.0) for row in rows)
    loss, gradient = loss_and_gradient(task, net, task.collate(rows))
    torch.testing.assert_close(loss.sum, expected, rtol=1e-8, atol=1e-8)
    other = gradients(net, expected)
    assert (gradient - other).norm() <= 1e-8 * other.norm()


class LargestLogits(TorchDispatchMode):
    rows = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        if isinstance(result, torch.Tensor) and result.shape[-1:] == (VOCAB,):
            self.rows = max(self.rows, result.numel() // VOCAB)
        return result


def test_their_logits_are_never_all_in_memory(other_encoder_decoder):
    net, task = other_encoder_decoder[0], task_for(other_encoder_decoder)
    with mock.patch.object(cross_entropy, "chunk_size", return_value=8), LargestLogits() as largest:
        loss_and_gradient(task, net, task.collate(pairs()))
    assert 0 < largest.rows <= 8 and "padded" in task.chunked_loss


def test_a_frozen_head_gives_the_same_gradients(model):
    """Its chunks are then computed once instead of twice."""
    net, task, rows = model[0].train(), task_for(model), pairs()
    head = net.get_output_embeddings().weight
    _, whole = loss_and_gradient(task, net, task.collate(rows))
    sizes = [param.numel() for param in net.parameters()]
    others = [not (param is head or param is net.get_input_embeddings().weight) for param in net.parameters()]
    net.get_input_embeddings().requires_grad_(False)
    head.requires_grad_(False)
    try:
        _, frozen = loss_and_gradient(task, net, task.collate(rows))
    finally:
        net.requires_grad_(True)
    kept = torch.cat([part for part, keep in zip(whole.split(sizes), others, strict=True) if keep])
    assert (frozen - kept).norm() <= 1e-10 * kept.norm()


def test_the_shape_is_prompt_and_longer_reply(model):
    task, row = task_for(model), pairs()[2]
    assert task.shape(row) == ((12, 7) if model[0].config.is_encoder_decoder else (19,))
    assert task.shape(task.dummy_row(task.shape(row))) == task.shape(row)
