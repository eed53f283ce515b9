"""How an encoder-decoder (T5, BART, …) is trained on prompts and responses: batches, the loss, packed rows, frozen parts.

The loss runs over the tokens of the response. A frozen encoder has no gradients and no optimizer state, and it runs without
autograd, so it keeps no activations either, even if the embeddings below it do train.

torch is imported inside functions only: the command line reads the options of a task from the module above this one.
"""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, ClassVar

from brimful.errors import BadOption
from brimful.task import IGNORED, Loss, Shape

if TYPE_CHECKING:
    from torch import Tensor, nn

FIELDS = ("prompt", "response")
PACKED_MODELS = ("t5", "mt5")
"""Types of models that `brimful.packing.t5` runs."""


class EncoderDecoder:
    """The encoder-decoder side of a language task."""

    causal: ClassVar[bool] = False
    parts: ClassVar[tuple[str, ...]] = ("encoder+embeddings", "encoder", "none")
    """What can be frozen."""
    fine_tuned: ClassVar[str] = "encoder+embeddings"
    """What fine-tuning freezes: with a few thousand rows the decoder alone learns as much, in half the memory."""
    fields: ClassVar[tuple[tuple[str, ...], ...]] = (FIELDS,)
    """What rows may have."""
    lengths: ClassVar[Shape] = (256, 256)
    """The longest prompt and response, unless a preset or the user says otherwise."""

    chunked_loss: tuple[str, ...] = ("packed",)
    """Layouts in which no batch holds all its logits."""

    def __init__(self, config: Any) -> None:
        self.config = config
        self.longest: int | None = None
        """The most tokens of a prompt."""

    @property
    def why_not_packed(self) -> str | None:
        """Why rows of this model cannot be packed; None if they can."""
        known = self.config.model_type in PACKED_MODELS
        return None if known else f"{self.config.model_type} models have no packed forward pass"

    def shape(self, row: Any) -> Shape:
        return len(row["prompt"]), len(row["response"])

    def dummy_row(self, shape: Shape) -> Any:
        import torch

        vocab = self.config.vocab_size
        return {name: torch.randint(2, vocab, (length,)).numpy() for name, length in zip(FIELDS, shape, strict=True)}

    def pieces(self, row: Any) -> list[tuple[list[int], bool]]:
        """The tokens of a row in pieces, and whether each is trained on."""
        return [(row["prompt"].tolist(), False), (row["response"].tolist(), True)]

    def collate(self, rows: Sequence[Any]) -> Any:
        prompts, responses = ([row[name] for row in rows] for name in FIELDS)
        ids, mask = pad(prompts, self.config.pad_token_id)
        labels, _ = pad(responses, IGNORED)
        return {"input_ids": ids, "attention_mask": mask, "labels": labels}

    def pack(self, rows: Sequence[Any], tokens: Shape) -> Any:
        from brimful.packing.t5 import pack

        prompts, responses = ([row[name] for row in rows] for name in FIELDS)
        start = self.config.decoder_start_token_id
        return pack(prompts, responses, tokens, fill=self.config.pad_token_id, start=start)

    def loss(self, model: Any, batch: Any, label_smoothing: float) -> Loss:
        import torch.nn.functional as F

        if "source_rows" in batch:
            from brimful.packing.t5 import loss_sum

            return Loss(sum=loss_sum(model, batch, label_smoothing=label_smoothing), count=batch["count"])
        labels = batch["labels"]
        logits = model(
            **_encoder_inputs(model, batch),
            attention_mask=batch["attention_mask"],
            decoder_input_ids=model.prepare_decoder_input_ids_from_labels(labels),
        ).logits  # not `labels=`: the model would compute a loss of its own as well
        loss = F.cross_entropy(
            logits.flatten(0, 1),
            labels.flatten(),
            ignore_index=IGNORED,
            reduction="sum",
            label_smoothing=label_smoothing,
        )
        return Loss(sum=loss, count=(labels != IGNORED).sum())

    def compile_blocks(self, model: "nn.Module", on: bool) -> bool:
        from brimful.packing.t5 import compile_blocks

        compile_blocks(model, on)
        return self.why_not_packed is None

    def freeze(self, model: Any, part: str) -> None:
        for one in {
            "none": [],
            "encoder": [block for name, block in model.get_encoder().named_children() if name != "embed_tokens"],
            "encoder+embeddings": [model.get_encoder(), model.get_input_embeddings(), model.get_output_embeddings()],
        }[part]:
            one.requires_grad_(False)

    def check(self, options: Any) -> None:
        """Refuse options that mean something for causal models only."""
        if options.chat_template is not None:
            raise BadOption("chat_template= is for causal models, not for an encoder-decoder. Try: leave it out.")
        if options.train_on is not None:
            raise BadOption(
                "train_on= is for causal models: an encoder-decoder is trained on responses. Try: leave it out."
            )


def _encoder_inputs(model: Any, batch: Any) -> dict[str, Any]:
    """The prompt's tokens, or, if the encoder is frozen, its output without a graph."""
    import torch

    encoder = model.get_encoder()
    embeddings = {id(param) for param in model.get_input_embeddings().parameters()}
    if any(param.requires_grad for param in encoder.parameters() if id(param) not in embeddings):
        return {"input_ids": batch["input_ids"]}
    with torch.no_grad():
        return {"encoder_outputs": encoder(input_ids=batch["input_ids"], attention_mask=batch["attention_mask"])}


def pad(rows: Sequence[Any], value: int) -> "tuple[Tensor, Tensor]":
    """Rows padded with `value` to the longest of them, and their attention mask."""
    import numpy as np
    import torch

    lengths = np.fromiter(map(len, rows), dtype=np.int64, count=len(rows))
    table = np.full((len(rows), int(lengths.max())), value, dtype=np.int64)
    mask = np.arange(table.shape[1]) < lengths[:, None]
    table[mask] = np.concatenate(rows)
    return torch.from_numpy(table), torch.from_numpy(mask.astype(np.int64))
