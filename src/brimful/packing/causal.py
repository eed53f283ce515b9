"""The forward pass of a Hugging Face causal language model over packed rows.

The model runs as it is, on one sequence that holds all rows. Its attention is replaced through transformers' own interface
by one that stays inside each row, and position numbers begin again with each row. Logits are never all in memory.

    class Mine(Task):
        def pack(self, rows, tokens):
            return causal.pack([row["input_ids"] for row in rows], tokens)

        def loss(self, model, batch):
            if "packed_rows" in batch:
                return causal.loss(model, batch)
            return model(**batch)

A model that does not hand its keyword arguments on to its attention, or that reads other facts of a row, is found by the
comparison of packed rows with the same rows alone, and trained padded.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import numpy as np
from torch import Tensor

from brimful.errors import TaskError
from brimful.packing.attention import attention
from brimful.packing.cross_entropy import linear_cross_entropy
from brimful.packing.sequence import Boundaries, boundaries, end_to_end
from brimful.task import Loss, Shape

IGNORED = -100
INTERFACE = "brimful_packed"


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
    labels = rows if labels is None else labels
    lengths = [len(row) for row in rows]
    for number, (length, one) in enumerate(zip(lengths, labels, strict=True)):
        if len(one) != length:
            raise TaskError(
                f"row {number} of a packed batch has {length} tokens and {len(one)} labels. Try: one label for each token."
            )
    packed_rows = boundaries(lengths, tokens[0])
    targets = end_to_end([np.append(np.asarray(one)[1:], IGNORED)[: len(one)] for one in labels], tokens[0], IGNORED)
    return {
        "input_ids": end_to_end(rows, tokens[0], fill),
        "labels": targets,
        "position_ids": end_to_end([np.arange(length) for length in lengths], tokens[0], 0),
        "packed_rows": packed_rows,
        "count": (targets != IGNORED).sum(),
    }


def loss(model: Any, batch: Mapping[str, Any], *, label_smoothing: float = 0.0) -> Loss:
    """The cross-entropy of a packed batch, summed over its labels."""
    head = model.get_output_embeddings()
    with packed_attention(model):
        hidden = model.base_model(
            input_ids=batch["input_ids"][None],
            position_ids=batch["position_ids"][None],
            packed_rows=batch["packed_rows"],
            use_cache=False,
        ).last_hidden_state[0]
    total = linear_cross_entropy(
        hidden,
        head.weight,
        batch["labels"],
        getattr(head, "bias", None),
        label_smoothing=label_smoothing,
        softcap=getattr(model.config, "final_logit_softcapping", None),
    )
    return Loss(sum=total, count=batch["count"])


@contextmanager
def packed_attention(model: Any) -> Iterator[None]:
    """In here the model's attention stays inside the rows given as `packed_rows`.

    A checkpointed block runs again in backward, long after this. It is switched there too.
    """
    _register()
    checkpointed = [part for part in model.modules() if getattr(part, "gradient_checkpointing", False)]
    run = [part._gradient_checkpointing_func for part in checkpointed]
    for part, checkpoint in zip(checkpointed, run, strict=True):
        part._gradient_checkpointing_func = partial(_run_again_packed, model.config, checkpoint)
    try:
        with _switched(model.config):
            yield
    finally:
        for part, checkpoint in zip(checkpointed, run, strict=True):
            part._gradient_checkpointing_func = checkpoint


def _run_again_packed(config: Any, checkpoint: Callable[..., Any], block: Callable[..., Any], *args: Any) -> Any:
    def run(*inputs: Any) -> Any:
        with _switched(config):
            return block(*inputs)

    return checkpoint(run, *args)


@contextmanager
def _switched(config: Any) -> Iterator[None]:
    before = config._attn_implementation
    config._attn_implementation = INTERFACE
    try:
        yield
    finally:
        config._attn_implementation = before


def _register() -> None:
    from transformers import AttentionInterface, AttentionMaskInterface

    if INTERFACE not in AttentionInterface().valid_keys():
        AttentionInterface.register(INTERFACE, _attend)
        AttentionMaskInterface.register(INTERFACE, lambda *args, **kwargs: None)


def _attend(
    module: Any, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, scaling: float | None = None,
    dropout: float = 0.0, sliding_window: int | None = None, softcap: float | None = None,
    packed_rows: Boundaries | None = None, **kwargs: Any,
) -> tuple[Tensor, None]:  # fmt: skip
    """transformers hands over [1, head, token, dim] and wants [1, token, head, dim]."""
    unknown = [name for name in ("s_aux", "position_bias") if kwargs.get(name) is not None]
    if packed_rows is None or unknown:
        lacking = f"it uses {' and '.join(unknown)}" if unknown else "it does not pass on where rows begin"
        raise TaskError(f"{type(module).__name__} cannot attend to packed rows: {lacking}. Try: layout='padded'.")
    q, k, v = (one[0].transpose(0, 1) for one in (query, key, value))
    out = attention(
        q,
        k,
        v,
        packed_rows,
        scale=query.shape[-1] ** -0.5 if scaling is None else scaling,
        causal=True,
        window=sliding_window,
        softcap=softcap,
        dropout=dropout,
    )
    return out[None], None
