"""From the hidden states of a language model to its loss, without all logits in memory.

Made for causal models; `head_losses` also takes the decoder of an encoder-decoder. What a family does between its last hidden state and its logits differs: Cohere multiplies by `logit_scale`, Granite divides by
`logits_scaling`, Gemma caps, T5 divides by the root of its width. A head that is a plain linear layer runs in `linear_cross_entropy`, with the family's factor
and cap. That they are the right ones is proved once for each model, by the logits of its own forward from made-up hidden
states. Every other head (one with a LoRA, a 4-bit one, a family that does something else) runs in the model's own forward,
in chunks that are computed again in backward.

The head is looked up at each call, since PEFT replaces it. A tied head's gradient is added to the embedding's by autograd.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from brimful.errors import TaskError
from brimful.packing import cross_entropy
from brimful.packing.cross_entropy import chunk_size, linear_cross_entropy, linear_token_losses

PROBED = 4
"""Made-up hidden states that prove a rule."""
PROBED_LOGIT = 100.0
"""The largest of their logits: a cap hardly changes small ones."""
DIFFERENCE = 0.02
"""Between those logits and the model's own that rounding to bf16 may cause."""

_proved: "WeakKeyDictionary[nn.Module, bool]" = WeakKeyDictionary()
"""Of each model, whether its rule gives the logits of its own forward."""


class _Rule(NamedTuple):
    """Logits are `softcap * tanh(scale * linear(hidden) / softcap)`."""

    scale: float
    softcap: float | None


def head_loss(model: Any, decoder: Any, hidden: Tensor, labels: Tensor, label_smoothing: float = 0.0) -> Tensor:
    """The sum of the cross-entropy of these hidden states, [token, dim], over labels that are not -100.

    Args:
        model: The language model, without PEFT around it.
        decoder: The part of it that ends with the hidden states.
        hidden: The hidden states, after the last norm.
        labels: What each token predicts.
        label_smoothing: Share of each label spread over the vocabulary.
    """
    if (proved := _proved_head(model, decoder)) is not None:
        linear, rule = proved
        return linear_cross_entropy(
            hidden,
            linear.weight,
            labels,
            linear.bias,
            label_smoothing=label_smoothing,
            logit_scale=rule.scale,
            softcap=rule.softcap,
        )
    total = hidden[:0].sum(dtype=torch.promote_types(hidden.dtype, torch.float32))  # has a gradient even without tokens
    chunk = _chunk(decoder, hidden)
    for part in (slice(begin, begin + chunk) for begin in cross_entropy.chunk_starts(len(hidden), chunk)):
        total = total + _own_loss_again(model, decoder, hidden[part], labels[part], label_smoothing, "sum")
    return total


def head_losses(model: Any, decoder: Any, hidden: Tensor, labels: Tensor) -> Tensor:
    """The same by token, [token]; 0 for tokens labelled -100."""
    if (proved := _proved_head(model, decoder)) is not None:
        linear, rule = proved
        return linear_token_losses(
            hidden, linear.weight, labels, _bias(model, linear), logit_scale=rule.scale, softcap=rule.softcap
        )
    chunk, none = _chunk(decoder, hidden), hidden[:0].sum(1, dtype=torch.promote_types(hidden.dtype, torch.float32))
    parts = (slice(begin, begin + chunk) for begin in range(0, len(hidden), chunk))
    return torch.cat(
        [none, *(_own_loss_again(model, decoder, hidden[part], labels[part], 0.0, "none") for part in parts)]
    )


def _proved_head(model: Any, decoder: Any) -> tuple[nn.Linear, _Rule] | None:
    """The head as one linear layer and the rule after it, if that gives the model's own logits."""
    linear, rule = _plain_linear(model.get_output_embeddings()), _rule(model, decoder)
    return (linear, rule) if linear is not None and _is_proved(model, decoder, linear, rule) else None


def _chunk(decoder: Any, hidden: Tensor) -> int:
    return chunk_size(decoder.config.vocab_size, hidden.dtype)


def _plain_linear(head: Any) -> nn.Linear | None:
    """The linear layer that is all of this head; None if it has an adapter, quantized weights or hooks."""
    if type(head).__name__ == "ModulesToSaveWrapper" and not head.disable_adapters and len(head.active_adapters) == 1:
        head = head.modules_to_save[head.active_adapters[0]]  # PEFT's trained copy
    hooked = any(getattr(head, name, None) for name in ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks"))
    return head if type(head) is nn.Linear and "forward" not in vars(head) and not hooked else None


def _bias(model: Any, linear: nn.Linear) -> Tensor | None:
    """Of the logits. BART and its like keep it outside of their head; the proof does not see one as small as that."""
    outside = getattr(model, "final_logits_bias", None)
    return linear.bias if outside is None else outside[0]


def _rule(model: Any, decoder: Any) -> _Rule:
    """By the names that transformers' families use."""
    config, scale = decoder.config, 1.0
    for factor in (getattr(model, "logit_scale", None), getattr(decoder, "lm_head_multiplier", None)):
        scale *= factor if isinstance(factor, (int, float)) else 1.0  # Cohere; Falcon H1
    scale /= getattr(config, "logits_scaling", None) or 1.0  # Granite
    scale *= config.d_model**-0.5 if getattr(config, "scale_decoder_outputs", False) else 1.0  # T5
    softcap = getattr(
        config, "final_logit_softcapping", getattr(config, "logits_soft_cap", None)
    )  # Gemma; RecurrentGemma
    return _Rule(scale, softcap)


def _is_proved(model: Any, decoder: Any, linear: nn.Linear, rule: _Rule) -> bool:
    if model not in _proved:
        if linear.weight.device.type == "meta":
            return True
        _proved[model] = _gives_own_logits(model, decoder, linear, rule)
    return _proved[model]


@torch.no_grad()
def _gives_own_logits(model: Any, decoder: Any, linear: nn.Linear, rule: _Rule) -> bool:
    weight = linear.weight
    hidden = torch.arange(PROBED * weight.shape[1], device=weight.device).sin().view(PROBED, -1).to(weight.dtype)
    hidden = hidden * (PROBED_LOGIT / linear(hidden).abs().max().clamp(min=1e-3)).to(weight.dtype)
    logits = linear(hidden).float() * rule.scale
    if rule.softcap is not None:
        logits = rule.softcap * torch.tanh(logits / rule.softcap)
    own = _own_logits(model, decoder, hidden).float()
    return own.shape == logits.shape and bool((own - logits).norm() <= DIFFERENCE * logits.norm())


def _own_loss_again(*arguments: Any) -> Tensor:
    """`_own_loss`, whose logits are computed again in backward instead of kept."""
    if not torch.is_grad_enabled():
        return _own_loss(*arguments)
    loss: Tensor = checkpoint(_own_loss, *arguments, use_reentrant=False)
    return loss


def _own_loss(
    model: Any, decoder: Any, hidden: Tensor, labels: Tensor, label_smoothing: float, reduction: str
) -> Tensor:
    logits = _own_logits(model, decoder, hidden)
    wide = logits.to(torch.promote_types(logits.dtype, torch.float32))
    return F.cross_entropy(wide, labels, reduction=reduction, label_smoothing=label_smoothing)


def _own_logits(model: Any, decoder: Any, hidden: Tensor) -> Tensor:
    """What the model's forward makes of these hidden states."""
    from transformers.modeling_outputs import BaseModelOutput

    tokens = torch.zeros((1, len(hidden)), dtype=torch.long, device=hidden.device)
    inputs: dict[str, Any] = {"input_ids": tokens}
    if model.config.is_encoder_decoder:  # nothing reads what its encoder would give
        inputs = {"decoder_input_ids": tokens, "encoder_outputs": BaseModelOutput(last_hidden_state=hidden[None])}  # type: ignore[arg-type]
    with _decoder_returns(decoder, hidden[None]) as calls:
        logits: Tensor = model(**inputs, use_cache=False, return_dict=True).logits[0]
    if not calls:
        raise TaskError(
            f"{type(model).__name__} computes its logits in a way that cannot be run in chunks. "
            "Try: return model(**batch) from loss(), and layout='padded'."
        )
    return logits


@contextmanager
def _decoder_returns(decoder: Any, hidden: Any) -> Iterator[list[bool]]:
    """In here the decoder does not run. It returns these hidden states, and adds to the list that it was called."""
    from transformers.modeling_outputs import BaseModelOutputWithPast

    class Output(BaseModelOutputWithPast):
        def __getattr__(self, name: str) -> None:
            """What families hand on beside the logits."""

    calls: list[bool] = []

    def forward(*args: Any, **kwargs: Any) -> Any:
        calls.append(True)
        return Output(last_hidden_state=hidden)

    before = vars(decoder).get("forward")
    decoder.forward = forward
    try:
        yield calls
    finally:
        del decoder.forward
        if before is not None:
            decoder.forward = before
