"""Batches of preference pairs, and the log-probabilities of their replies, for both architectures.

A row is a prompt with two replies, `chosen` and `rejected`, each ended by the token that ends a reply, and `reference`: the
log-probabilities that the reference model gives the replies. `brimful.packing.pairs` computes those of the model in training.

torch is imported inside functions only: the command line reads the options of a task from the module above this one.
"""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, ClassVar

from brimful.task import IGNORED, Shape
from brimful.tasks.causal_lm import CausalLM
from brimful.tasks.encoder_decoder import EncoderDecoder, _encoder_inputs, pad

if TYPE_CHECKING:
    from torch import Tensor

FIELDS = ("prompt", "chosen", "rejected")
REPLIES = FIELDS[1:]
REFERENCE = "reference"


class CausalPairs(CausalLM):
    """Pairs for a causal model: prompts as its chat template writes them, with the generation prompt."""

    fields: ClassVar[tuple[tuple[str, ...], ...]] = (FIELDS,)

    def shape(self, row: Any) -> Shape:
        return (len(row["prompt"]) + _longer(row),)

    def dummy_row(self, shape: Shape) -> Any:
        """Two replies to a prompt of one token: the most that a pair can cost."""
        import torch

        length = max(1, shape[0] - 1)
        prompt, chosen, rejected = (torch.randint(2, self.text.vocab_size, (n,)).numpy() for n in (1, length, length))
        return _row(prompt, chosen, rejected)

    def collate(self, rows: Sequence[Any]) -> Any:
        import numpy as np

        from brimful.packing.causal import pad

        sequences, labels = [], []
        for row in rows:
            for name in REPLIES:
                sequences.append(np.concatenate([row["prompt"], row[name]]).astype(np.int64))
                labels.append(np.concatenate([np.full(len(row["prompt"]), IGNORED), row[name]]).astype(np.int64))
        batch = pad(sequences, labels=labels, fill=self._fill)
        pairs = {name: batch[name].unflatten(0, (len(rows), 2)) for name in ("input_ids", "labels")}
        return {**pairs, **_lengths_and_reference(rows)}

    def pack(self, rows: Sequence[Any], tokens: Shape) -> Any:
        from brimful.packing.pairs import pack_causal

        prompts, chosen, rejected = ([row[name] for row in rows] for name in FIELDS)
        return {**pack_causal(prompts, chosen, rejected, tokens[0], fill=self._fill), **_lengths_and_reference(rows)}

    def log_probabilities(self, model: Any, batch: Any) -> "Tensor":
        """Of both replies, [pair, 2]."""
        from brimful.packing import pairs

        packed = "packed_rows" in batch
        return (pairs.causal_log_probabilities if packed else pairs.padded_causal_log_probabilities)(model, batch)


class EncoderDecoderPairs(EncoderDecoder):
    """Pairs for an encoder-decoder."""

    fields: ClassVar[tuple[tuple[str, ...], ...]] = (FIELDS,)
    chunked_loss: tuple[str, ...] = ("padded", "packed")

    def shape(self, row: Any) -> Shape:
        return len(row["prompt"]), _longer(row)

    def dummy_row(self, shape: Shape) -> Any:
        import torch

        sides = (torch.randint(2, self.config.vocab_size, (n,)).numpy() for n in (shape[0], shape[1], shape[1]))
        return _row(*sides)

    def collate(self, rows: Sequence[Any]) -> Any:
        ids, mask = pad([row["prompt"] for row in rows], self.config.pad_token_id)
        labels, _ = pad([row[name] for row in rows for name in REPLIES], IGNORED)
        return {
            "input_ids": ids,
            "attention_mask": mask,
            "labels": labels.unflatten(0, (len(rows), 2)),
            **_lengths_and_reference(rows),
        }

    def pack(self, rows: Sequence[Any], tokens: Shape) -> Any:
        from brimful.packing.pairs import pack_t5

        prompts, chosen, rejected = ([row[name] for row in rows] for name in FIELDS)
        ids = {"fill": self.config.pad_token_id, "start": self.config.decoder_start_token_id}
        return {**pack_t5(prompts, chosen, rejected, tokens, **ids), **_lengths_and_reference(rows)}

    def log_probabilities(self, model: Any, batch: Any) -> "Tensor":
        """Of both replies, [pair, 2]. The encoder runs once for each prompt."""
        if "source_rows" in batch:
            from brimful.packing.pairs import t5_log_probabilities

            return t5_log_probabilities(model, batch)
        from brimful.packing.pairs import padded_encoder_decoder_log_probabilities

        inputs = _encoder_inputs(model, batch)
        encoded = inputs.get("encoder_outputs") or model.get_encoder()(inputs["input_ids"], batch["attention_mask"])
        return padded_encoder_decoder_log_probabilities(model, batch, encoded[0])


def _row(prompt: Any, chosen: Any, rejected: Any) -> dict[str, Any]:
    return {"prompt": prompt, "chosen": chosen, "rejected": rejected, REFERENCE: (0.0, 0.0)}


def _longer(row: Any) -> int:
    return max(len(row[name]) for name in REPLIES)


def _lengths_and_reference(rows: Sequence[Any]) -> dict[str, Any]:
    """Zeros where the reference is not known: while a run is planned, or for losses without one."""
    import torch

    exact = torch.float32 if torch.backends.mps.is_available() else torch.float64
    lengths = [[len(row[name]) for name in REPLIES] for row in rows]
    reference = [[float(one) for one in row.get(REFERENCE, (0.0, 0.0))] for row in rows]
    return {"lengths": torch.tensor(lengths), REFERENCE: torch.tensor(reference, dtype=exact)}
