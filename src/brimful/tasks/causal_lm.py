"""How a causal language model (Qwen, Llama, Gemma, Mistral, GPT-2, …) is trained: batches, the loss, packed rows.

A row is one sequence of tokens. Fine-tuning rows also say which of them are trained on (`spans`, see `data.store`): the
replies of a conversation with the token that ends each. Pretraining rows are trained on whole. The loss is the
cross-entropy of each trained token given those before it, and no batch ever holds all its logits.

torch is imported inside functions only: the command line reads the options of a task from the module above this one.
"""

from collections.abc import Sequence
from itertools import groupby
from operator import itemgetter
from typing import TYPE_CHECKING, Any, ClassVar

from brimful.data.store import SPANS, trained
from brimful.task import IGNORED, Loss, Shape
from brimful.tasks.model_folder import text_config

if TYPE_CHECKING:
    from torch import nn

TOKENS = "tokens"


class CausalLM:
    """The causal side of a language task."""

    causal: ClassVar[bool] = True
    parts: ClassVar[tuple[str, ...]] = ("embeddings", "none")
    """What can be frozen."""
    fine_tuned: ClassVar[str] = "none"
    lengths: ClassVar[Shape] = (1024,)
    """The longest row, unless a preset or the user says otherwise."""

    chunked_loss: ClassVar[tuple[str, ...]] = ("padded", "packed")
    """Layouts in which no batch holds all its logits."""

    fields: ClassVar[tuple[tuple[str, ...], ...]] = ((TOKENS,), (TOKENS, SPANS))
    """What rows may have."""

    def __init__(self, config: Any) -> None:
        self.config, self.text = config, text_config(config)
        self.longest: int | None = None
        """The most tokens of a row, which some models' positions depend on."""

    @property
    def why_not_packed(self) -> str | None:
        """Why rows of this model cannot be packed, as far as its configuration tells; None if they can."""
        from brimful.packing.causal import cannot_pack

        return cannot_pack(self.text, self.longest)

    def shape(self, row: Any) -> Shape:
        return (len(row[TOKENS]),)

    def dummy_row(self, shape: Shape) -> Any:
        """A row in which every token is trained on: the most that a loss can cost."""
        import torch

        return {TOKENS: torch.randint(2, self.text.vocab_size, shape).numpy()}

    def pieces(self, row: Any) -> list[tuple[list[int], bool]]:
        """The tokens of a row in pieces, and whether each is trained on."""
        tokens = row[TOKENS].tolist()
        if SPANS not in row:
            return [(tokens, True)]
        marks = trained(row[SPANS], len(tokens)).tolist()
        groups = groupby(zip(tokens, marks, strict=True), key=itemgetter(1))
        return [([token for token, _ in group], mark) for mark, group in groups]

    def collate(self, rows: Sequence[Any]) -> Any:
        from brimful.packing.causal import pad

        return pad([row[TOKENS] for row in rows], labels=[self._labels(row) for row in rows], fill=self._fill)

    def pack(self, rows: Sequence[Any], tokens: Shape) -> Any:
        from brimful.packing.causal import pack

        return pack([row[TOKENS] for row in rows], tokens, labels=[self._labels(row) for row in rows], fill=self._fill)

    def loss(self, model: Any, batch: Any, label_smoothing: float) -> Loss:
        from brimful.packing import causal

        if "packed_rows" in batch:
            return causal.loss(model, batch, label_smoothing=label_smoothing)
        return causal.padded_loss(model, batch, label_smoothing=label_smoothing)

    def compile_blocks(self, model: "nn.Module", on: bool) -> bool:
        from brimful.packing.causal import compile_blocks

        return compile_blocks(model, on)

    def freeze(self, model: Any, part: str) -> None:
        if part == "embeddings":  # and a head that is tied to them
            model.get_input_embeddings().requires_grad_(False)

    def check(self, options: Any) -> None:
        """Every option holds for causal models."""

    @property
    def _fill(self) -> int:
        pad_id = self.text.pad_token_id
        return 0 if pad_id is None else int(pad_id)

    def _labels(self, row: Any) -> Any:
        """The tokens, with -100 in place of those that are not trained on."""
        import numpy as np

        tokens = np.asarray(row[TOKENS]).astype(np.int64)
        return tokens if SPANS not in row else np.where(trained(row[SPANS], len(tokens)), tokens, IGNORED)
