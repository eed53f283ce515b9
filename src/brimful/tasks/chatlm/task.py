"""Text to text with T5: the loss over the answer's tokens, on the configuration of the released ChatLM.

`base` has 187.7 M parameters (the tied head counted once); `tiny` trains on a CPU in seconds. Fine-tuning freezes the
encoder and the embeddings: they keep no gradients, no optimizer state, and the encoder no activations either.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

from brimful.errors import BadData
from brimful.task import Loss, Shape, Task

if TYPE_CHECKING:
    from torch import Tensor, nn

    from brimful.data.store import Store


@dataclass(frozen=True, kw_only=True)
class Size:
    """A T5 of one size, with the lengths and batch it is meant for."""

    d_model: int
    d_ff: int
    heads: int
    d_kv: int
    layers: int
    vocab: int
    worst_shape: Shape
    global_batch: int


SIZES = {
    "tiny": Size(d_model=128, d_ff=256, heads=4, d_kv=32, layers=2, vocab=4096, worst_shape=(128, 128), global_batch=64),
    "base": Size(d_model=768, d_ff=3072, heads=12, d_kv=64, layers=10, vocab=29298, worst_shape=(256, 256), global_batch=256),
}  # fmt: skip

PAD, EOS, IGNORED = 0, 1, -100
SIDES = ("prompt", "response")


class Pretrain(Task):
    """Every weight trains, from random ones."""

    name = "chatlm-pretrain"
    precision = "auto"
    sizes: ClassVar = tuple(SIZES)

    def __init__(self, size: str = "base") -> None:
        self.size = size
        self.worst_shape = SIZES[size].worst_shape
        self.global_batch = SIZES[size].global_batch

    def model(self) -> "nn.Module":
        from transformers import T5Config, T5ForConditionalGeneration

        s = SIZES[self.size]
        return T5ForConditionalGeneration(
            T5Config(  # type: ignore[call-arg]
                d_model=s.d_model, d_ff=s.d_ff, d_kv=s.d_kv, num_heads=s.heads, vocab_size=s.vocab,
                num_layers=s.layers, num_decoder_layers=s.layers,
                pad_token_id=PAD, eos_token_id=EOS, decoder_start_token_id=PAD,
                use_cache=False,  # a cache is dead weight in training, and blocks recompile without end with one
            )
        )  # fmt: skip

    def loss(self, model: "nn.Module", batch: Any) -> Loss:
        import torch.nn.functional as F

        labels = batch["labels"]
        logits = model(
            input_ids=batch["input_ids"],
            attention_mask=batch["attention_mask"],
            decoder_input_ids=model.prepare_decoder_input_ids_from_labels(labels),  # type: ignore[operator]
        ).logits  # given the labels themselves, the model would build a loss of its own beside ours
        loss = F.cross_entropy(logits.flatten(0, 1), labels.flatten(), ignore_index=IGNORED, reduction="sum")
        return Loss(sum=loss, count=(labels != IGNORED).sum())

    def rows(self, data: str) -> "Store":
        """A token store of prompts and responses whose tokens this model knows."""
        from brimful.data.store import Store

        store = Store.open(data)
        vocab = SIZES[self.size].vocab
        wrong = [
            f"its rows have {' and '.join(store.sides)}, not prompt and response" if store.sides != SIDES else "",
            f"its tokenizer has {store.meta.vocab_size:,} tokens and {self.name} {self.size} knows {vocab:,}"
            if store.meta.vocab_size > vocab
            else "",
            f"its eos is {store.meta.eos_id} and the model's {EOS}" if store.meta.eos_id != EOS else "",
        ]
        if any(wrong):
            raise BadData(
                f"{data} cannot train {self.name}: {'; '.join(filter(None, wrong))}; pack the rows with a tokenizer made by "
                f"`brimful data tokenizer --model {self.size}`"
            )
        return store

    def shape(self, row: Any) -> Shape:
        return len(row["prompt"]), len(row["response"])

    def collate(self, rows: Sequence[Any]) -> Any:
        prompts, responses = ([row[side] for row in rows] for side in SIDES)
        (ids, mask), (labels, _) = _padded(prompts, PAD), _padded(responses, IGNORED)
        return {"input_ids": ids, "attention_mask": mask, "labels": labels}

    def dummy(self, rows: int, shape: Shape) -> Any:
        import torch

        source, target = shape
        ids = torch.randint(2, SIZES[self.size].vocab, (rows, source))
        return {
            "input_ids": ids,
            "attention_mask": torch.ones_like(ids),
            "labels": torch.randint(2, SIZES[self.size].vocab, (rows, target)),
        }


class Sft(Pretrain):
    """The decoder alone trains: encoder and embeddings are frozen, and the encoder runs without autograd."""

    name = "chatlm-sft"

    def model(self) -> "nn.Module":
        model: Any = super().model()
        for part in (model.encoder, model.shared, model.lm_head):
            part.requires_grad_(False)
        return model


def _padded(rows: Sequence[Any], filler: int) -> "tuple[Tensor, Tensor]":
    """One line a row, filled up to the longest; and where its tokens are."""
    import numpy as np
    import torch

    lengths = np.fromiter(map(len, rows), dtype=np.int64, count=len(rows))
    table = np.full((len(rows), int(lengths.max())), filler, dtype=np.int64)
    there = np.arange(table.shape[1]) < lengths[:, None]
    table[there] = np.concatenate(rows)
    return torch.from_numpy(table), torch.from_numpy(there.astype(np.int64))
