"""The forward pass of a Hugging Face causal language model over packed rows, and over padded ones.

The model runs as it is, on one sequence that holds all rows. Its attention is replaced through transformers' own interface
by one that stays inside each row, and position numbers begin again with each row. Logits are never all in memory, and tokens
that are not trained have none: with 60 % of the tokens in prompts that took 26 % off a step (on a CPU, Qwen2.5-0.5B at a
quarter of its width, whose head is 28 % of the weights).

    class Mine(Task):
        def collate(self, rows):
            return causal.pad([row["input_ids"] for row in rows])

        def pack(self, rows, tokens):
            return causal.pack([row["input_ids"] for row in rows], tokens)

        def loss(self, model, batch):
            if "packed_rows" in batch:
                return causal.loss(model, batch)
            return causal.padded_loss(model, batch)

        def compiling(self, model, on):
            return causal.compile_blocks(model, on)

`cannot_pack` knows families whose rows would see each other: those that carry a state from token to token, and those whose
attention is their own. What else is wrong with a model is found by the comparison of packed rows with the same rows alone,
and it is trained padded.
"""

import inspect
import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cache, partial
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from brimful.errors import TaskError
from brimful.packing.attention import attention
from brimful.packing.causal_head import head_loss
from brimful.packing.compiled import compiled
from brimful.packing.sequence import Boundaries, SharedRows, boundaries, end_to_end, positions
from brimful.task import IGNORED, Loss, Shape

INTERFACE = "brimful_packed"
KINDS = {"full_attention", "sliding_attention"}
"""Of layers that can be packed, as configs call them."""


def pack(
    rows: Sequence[Any], tokens: Shape, *, labels: Sequence[Any] | None = None, fill: int = 0
) -> dict[str, Any]:  # fmt: skip
    """A packed batch for `loss`.

    Args:
        rows: The tokens of each row.
        tokens: The size of the sequence, one number.
        labels: As many labels per row, -100 where nothing is learnt; each token predicts the next label. Default: the tokens.
        fill: The token after the last row.
    """
    all_trained, labels = labels is None, _checked_labels(rows, labels)
    lengths = [len(row) for row in rows]
    packed_rows = boundaries(lengths, tokens[0])
    targets = end_to_end([np.append(np.asarray(one)[1:], IGNORED)[: len(one)] for one in labels], tokens[0], IGNORED)
    batch = {
        "input_ids": end_to_end(rows, tokens[0], fill),
        "labels": targets,
        "position_ids": end_to_end([np.arange(length) for length in lengths], tokens[0], 0),
        "packed_rows": packed_rows,
        "count": (targets != IGNORED).sum(),
    }
    return batch if all_trained else {**batch, "trained": positions(targets != IGNORED)}


def pad(rows: Sequence[Any], labels: Sequence[Any] | None = None, fill: int = 0) -> dict[str, Tensor]:
    """A batch of rows side by side, padded on the right, for `padded_loss` or `model(**batch)`.

    Args:
        rows: The tokens of each row.
        labels: As many labels per row, -100 where nothing is learnt. Default: the tokens.
        fill: The token after the end of a row.
    """
    labels = _checked_labels(rows, labels)
    shape = (len(rows), max(map(len, rows)))
    tokens, mask, targets = np.full(shape, fill), np.zeros(shape, dtype=np.int64), np.full(shape, IGNORED)
    for number, (row, label) in enumerate(zip(rows, labels, strict=True)):
        tokens[number, : len(row)], mask[number, : len(row)], targets[number, : len(row)] = row, 1, label
    arrays = {"input_ids": tokens, "attention_mask": mask, "labels": targets}
    return {name: torch.from_numpy(array) for name, array in arrays.items()}


def _checked_labels(rows: Sequence[Any], labels: Sequence[Any] | None) -> Sequence[Any]:
    if labels is None:
        return rows
    for number, (row, one) in enumerate(zip(rows, labels, strict=True)):
        if len(one) != len(row):
            raise TaskError(
                f"row {number} of a packed batch has {len(row)} tokens and {len(one)} labels. Try: one label for each token."
            )
    return labels


def loss(model: Any, batch: Mapping[str, Any], *, label_smoothing: float = 0.0) -> Loss:
    """The cross-entropy of a packed batch, summed over its labels.

    Args:
        model: A causal language model of transformers, or PEFT's around one.
        batch: From `pack`.
        label_smoothing: Share of each label spread over the vocabulary.
    """
    model, decoder = model_parts(model)
    if reason := cannot_pack(model.config):
        raise TaskError(f"{type(model).__name__} cannot be trained on packed rows: {reason}. Try: layout='padded'.")
    hidden = packed_hidden(decoder, batch)
    labels, trained = batch["labels"], batch.get("trained")
    if trained is not None and len(trained.tokens) < len(labels):
        hidden, labels = hidden.index_select(0, trained.tokens), labels[trained.tokens]
    return Loss(sum=head_loss(model, decoder, hidden, labels, label_smoothing), count=batch["count"])


def packed_hidden(decoder: Any, batch: Mapping[str, Any]) -> Tensor:
    """The last hidden states of packed rows, [token, dim]."""
    with rows_apart(decoder, batch["packed_rows"]):
        hidden: Tensor = decoder(
            input_ids=batch["input_ids"][None],
            position_ids=batch["position_ids"][None],
            packed_rows=batch["packed_rows"],
            use_cache=False,
        ).last_hidden_state[0]
    return hidden


def padded_loss(model: Any, batch: Mapping[str, Any], *, label_smoothing: float = 0.0) -> Loss:
    """The same of a batch from `pad`.

    No attention mask is used. What a row is padded with comes after all its tokens, so none of them sees it, and attention
    without a mask runs in faster kernels.
    """
    model, decoder = model_parts(model)
    refuse_balancing_loss(model)
    hidden = decoder(input_ids=batch["input_ids"], use_cache=False).last_hidden_state[:, :-1].flatten(0, 1)
    labels = batch["labels"][:, 1:].flatten()
    counted = labels != IGNORED
    if not (labels.is_cuda and torch.cuda.is_current_stream_capturing()):  # a CUDA graph needs fixed sizes
        trained = counted.nonzero()[:, 0]
        hidden, labels = hidden.index_select(0, trained), labels[trained]
    return Loss(sum=head_loss(model, decoder, hidden, labels, label_smoothing), count=counted.sum())


def cannot_pack(config: Any, longest: int | None = None) -> str | None:
    """Why a model of this config cannot be packed, as far as the config tells; None if nothing is known against it.

    Args:
        config: Of the model.
        longest: Tokens of the longest row, if known. Some rotary positions change for all rows once one is very long.
    """
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING

    text = config.get_text_config(decoder=True)
    known = [one for one in (type(config), type(text)) if one in MODEL_FOR_CAUSAL_LM_MAPPING]
    model = MODEL_FOR_CAUSAL_LM_MAPPING[known[0]] if known else None
    if getattr(model, "_is_stateful", False):
        return "its layers carry a state from each token to the next, across rows"
    if others := sorted(set(getattr(text, "layer_types", None) or ()) - KINDS):
        return f"it has layers of the kind {others[0]!r}, which see tokens of other rows"
    if model is not None and not hasattr(sys.modules[model.__module__], "ALL_ATTENTION_FUNCTIONS"):
        return "its attention does not go through transformers' attention interface"
    return _balancing_loss(text) or _changing_positions(text, longest or 0)


def _changing_positions(config: Any, longest: int) -> str | None:
    """Padded, too, rows beside a very long one would have other positions than alone."""
    parameters = getattr(config, "rope_parameters", None) or {}
    kinds = [one for one in (parameters, *parameters.values()) if isinstance(one, dict) and "rope_type" in one]
    for one in kinds:
        limit = one.get("original_max_position_embeddings") or config.max_position_embeddings
        if one["rope_type"] in ("dynamic", "longrope") and longest > limit:
            return f"a row of more than {limit:,} tokens changes the rotary positions of the rows beside it"
    return None


def _balancing_loss(config: Any) -> str | None:
    """A sum of products of means over all tokens of a micro-batch, which is not the sum of what rows have alone."""
    if getattr(config, "output_router_logits", False) and getattr(config, "router_aux_loss_coef", 0):
        return "the loss that balances its experts (output_router_logits) depends on all rows of a micro-batch"
    return None


def refuse_balancing_loss(model: Any) -> None:
    """In training only: an evaluation is of the tokens alone."""
    reason = _balancing_loss(model.config.get_text_config(decoder=True))
    if reason and torch.is_grad_enabled():
        raise TaskError(
            f"{type(model).__name__} cannot be trained in micro-batches: {reason}. "
            'Try: "output_router_logits": false in its config.json.'
        )


def compile_blocks(model: Any, on: bool, *, backend: str | Callable[..., Any] = "inductor") -> bool:
    """Switch compiled blocks on or off; False if the model has no blocks of transformers' kind.

    The code is compiled at the first step, once for all blocks that compute the same, and serves all sizes.
    """
    from transformers.modeling_layers import GradientCheckpointingLayer

    model, decoder = model_parts(model)
    blocks = [part for part in decoder.modules() if isinstance(part, GradientCheckpointingLayer)]
    for block in blocks:
        if isinstance(vars(block).get("forward"), _CompiledBlock):  # by an earlier call
            del block.forward
        if on and "forward" not in vars(block):  # else somebody else has replaced it
            block.forward = _CompiledBlock(block, backend)
    return bool(blocks)


class _CompiledBlock:
    """The forward of a block, compiled where gradients are made. Text generation would compile it again for every layer, since
    each has a number of its own in the cache of keys and values."""

    def __init__(self, block: Any, backend: str | Callable[..., Any]) -> None:
        self._block, self._plain = block, type(block).forward
        self._compiled = _compiled_forward(self._plain, backend)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if not torch.is_grad_enabled():
            return self._plain(self._block, *args, **kwargs)
        return self._compiled(self._block, *self._with_gradient(*args), **kwargs)

    def _with_gradient(self, hidden: Tensor, *args: Any) -> tuple[Any, ...]:
        """Behind frozen embeddings, as beside an adapter, the input of the first block has no gradient. The code of all others
        would not serve it and be compiled a second time, for a gradient that costs 0.2 % of Llama 8B's backward."""
        if not hidden.requires_grad and any(param.requires_grad for param in self._block.parameters()):
            hidden = hidden.detach().requires_grad_()
        return hidden, *args


def _is_compiled(block: nn.Module) -> bool:
    forward = vars(block).get("forward")
    by_torch = vars(block).get("_compiled_call_impl") is not None  # block.compile()
    return by_torch or isinstance(forward, _CompiledBlock) or hasattr(forward, "_torchdynamo_orig_callable")


@cache
def _compiled_forward(forward: Callable[..., Any], backend: str | Callable[..., Any]) -> Callable[..., Any]:
    return compiled(forward, backend)


def model_parts(model: Any) -> tuple[Any, Any]:
    """The causal language model, out of PEFT's, and its decoder, which ends with the last norm."""
    if hasattr(model, "get_base_model"):
        prompt = [one for one in model.peft_config.values() if getattr(one, "is_prompt_learning", False)]
        if prompt:
            raise TaskError(
                f"{type(prompt[0]).__name__} puts learnt tokens before each row, which this loss does not. Try: LoRA."
            )
        model = model.get_base_model()
    parts = (model.get_decoder(), model.base_model, getattr(model, "model", None))
    decoder = next((one for one in parts if one is not model and hasattr(one, "config")), None)
    if decoder is None:
        raise TaskError(f"{type(model).__name__} has no decoder apart from its head. Try: return model(**batch).")
    return model, decoder


class _Packed(threading.local):
    """What runs in this thread."""

    rows: Boundaries | SharedRows | None = None
    """For models that do not hand keyword arguments on to their attention."""
    calls = 0
    """Of packed attention."""
    windows = 0
    """Of those, with a sliding window."""


_packed = _Packed()
_lock = threading.Lock()
_switched_configs: dict[int, list[Any]] = {}
"""By the id of a config: how many are inside `_switched`, and its own attention."""


@contextmanager
def rows_apart(decoder: Any, rows: Boundaries | SharedRows) -> Iterator[None]:
    """In here the model's attention stays inside these rows.

    A checkpointed block runs again in backward, long after this and on a GPU in another thread. It is switched there too.
    """
    _register()
    checkpointed = [part for part in decoder.modules() if getattr(part, "gradient_checkpointing", False)]
    run = [part._gradient_checkpointing_func for part in checkpointed]
    for part, checkpoint in zip(checkpointed, run, strict=True):
        part._gradient_checkpointing_func = partial(_run_again_packed, decoder.config, rows, checkpoint)
    try:
        with _switched(decoder.config, rows):
            _packed.calls = _packed.windows = 0
            yield
            _check_calls(decoder)
    finally:
        for part, checkpoint in zip(checkpointed, run, strict=True):
            part._gradient_checkpointing_func = checkpoint


def _check_calls(decoder: Any) -> None:
    """That every layer used packed attention in the forward that ended, with its window. Compiled code does not count."""
    config, why = decoder.config, ""
    layers, kinds = getattr(config, "num_hidden_layers", 0), getattr(config, "layer_types", None)
    windows = 0
    if hasattr(sys.modules[type(decoder).__module__], "create_sliding_window_causal_mask"):
        everywhere = layers if getattr(config, "sliding_window", None) else 0
        windows = kinds.count("sliding_attention") if kinds else everywhere
    if _packed.calls < layers:
        why = f"{layers - _packed.calls} of {layers} layers do not attend through transformers' interface"
    elif _packed.windows < windows:
        why = "it does not pass on its sliding window"
    elif "position_ids" not in inspect.signature(decoder.forward).parameters:
        why = "it counts positions by itself"
    if why and not any(map(_is_compiled, decoder.modules())):
        raise TaskError(f"{type(decoder).__name__} cannot attend to packed rows: {why}. Try: layout='padded'.")


def _run_again_packed(
    config: Any, rows: Boundaries | SharedRows, checkpoint: Callable[..., Any], block: Callable[..., Any], *args: Any
) -> Any:
    def run(*inputs: Any) -> Any:
        with _switched(config, rows):
            return block(*inputs)

    return checkpoint(run, *args)


@contextmanager
def _switched(config: Any, rows: Boundaries | SharedRows) -> Iterator[None]:
    """Threads that share a config may be in here at once: the last one out puts its own attention back."""
    outer, _packed.rows = _packed.rows, rows
    with _lock:
        entry = _switched_configs.setdefault(id(config), [0, config._attn_implementation])
        entry[0] += 1
        config._attn_implementation = INTERFACE
    try:
        yield
    finally:
        _packed.rows = outer
        with _lock:
            entry[0] -= 1
            if not entry[0]:
                config._attn_implementation = entry[1]
                del _switched_configs[id(config)]


def _register() -> None:
    """Without a mask function: transformers then makes none. With one it looks for rows first, and waits for the GPU."""
    from transformers import AttentionInterface

    if INTERFACE not in AttentionInterface().valid_keys():
        AttentionInterface.register(INTERFACE, _attend)


def _attend(
    module: Any, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, scaling: float | None = None,
    dropout: float = 0.0, sliding_window: int | None = None, softcap: float | None = None,
    packed_rows: Boundaries | SharedRows | None = None, s_aux: Tensor | None = None, **kwargs: Any,
) -> tuple[Tensor, None]:  # fmt: skip
    """transformers hands over [1, head, token, dim] and wants [1, token, head, dim]."""
    if not torch.compiler.is_compiling():
        _packed.calls += 1
        _packed.windows += sliding_window is not None
    packed_rows = _packed.rows if packed_rows is None else packed_rows
    masked = attention_mask is not None or kwargs.get("position_bias") is not None
    if packed_rows is None or masked:
        lacking = "it has a mask of its own" if masked else "it does not pass on where rows begin"
        raise TaskError(f"{type(module).__name__} cannot attend to packed rows: {lacking}. Try: layout='padded'.")
    q, k, v = (one[0].transpose(0, 1) for one in (query, key, value))
    rows = packed_rows.rows if isinstance(packed_rows, SharedRows) else packed_rows
    if isinstance(packed_rows, SharedRows):
        q, k, v = (one.index_select(0, packed_rows.copies) for one in (q, k, v))
    out = attention(
        q,
        k,
        v,
        rows,
        scale=query.shape[-1] ** -0.5 if scaling is None else scaling,
        causal=True,
        window=sliding_window,
        softcap=softcap,
        sinks=s_aux,
        dropout=dropout,
    )
    if isinstance(packed_rows, SharedRows):
        out = out.index_select(0, packed_rows.back)
    return out[None], None
