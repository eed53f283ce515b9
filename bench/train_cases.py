"""What the trainers of `train.py` train: five cases, each a task, a token store of rows, and the FLOPs of a row.

    pretrain      ChatLM's T5, all weights, prompts and responses of the real rows
    sft           the same with encoder and embeddings frozen, as the task `sft` has it
    full          the same as pretrain, every row as long as the model takes
    causal        GPT-2 from its configuration, rows of real, uneven lengths
    causal-full   the same, every row as long as the context

All tokens are real: the rows are tokenized once, with a tokenizer trained on them, and everybody reads the same store. A row
of `causal` is as long as a prompt and its response together, times (context / longest such row), so that the longest fills
the context and the distribution keeps its shape; it holds its own tokens, then those of the rows after it. Rows of the full
cases are filled in the same way.
"""

from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F

from brimful.data.batches import StepSampler
from brimful.data.store import NAME, Store, StoreWriter
from brimful.packing import causal
from brimful.task import IGNORED, Loss, Shape, Task
from brimful.tasks.encoder_decoder import FIELDS, pad
from brimful.tasks.language import LanguageOptions, Pretrain, Sft, SftOptions
from brimful.tasks.presets import EOS, PAD, PRESETS

CASES = ("pretrain", "sft", "full", "causal", "causal-full")
GLOBAL_BATCH = {"pretrain": 256, "sft": 256, "full": 256, "causal": 128, "causal-full": 128}
TINY_BATCH = 16
"""Rows per step of a dry run."""
GPT2 = {"n_layer": 12, "n_embd": 768, "n_head": 12, "vocab_size": 50257, "n_positions": 1024}
TINY_GPT2 = {"n_layer": 2, "n_embd": 64, "n_head": 4, "vocab_size": 4096, "n_positions": 128}
CAUSAL_FIELD = "input_ids"


class CausalLm(Task):
    """A GPT-2 of a given configuration, trained on all tokens of a row."""

    name = "gpt2"
    chunked_loss = ("packed",)

    def __init__(self, config: dict[str, int]) -> None:
        super().__init__()
        self.config = config
        self.worst_shape = (config["n_positions"],)

    def model(self) -> Any:
        from transformers import GPT2Config, GPT2LMHeadModel

        return GPT2LMHeadModel(GPT2Config(**self.config, use_cache=False, bos_token_id=EOS, eos_token_id=EOS))

    def loss(self, model: Any, batch: Any) -> Loss:
        if "packed_rows" in batch:
            return causal.loss(model, batch)
        logits = model(input_ids=batch["input_ids"], attention_mask=batch["attention_mask"]).logits[:, :-1]
        labels = batch["labels"][:, 1:]
        loss = F.cross_entropy(logits.flatten(0, 1), labels.flatten(), ignore_index=IGNORED, reduction="sum")
        return Loss(sum=loss, count=(labels != IGNORED).sum())

    def shape(self, row: Any) -> Shape:
        return (len(row[CAUSAL_FIELD]),)

    def collate(self, rows: Any) -> Any:
        ids, mask = pad([row[CAUSAL_FIELD] for row in rows], PAD)
        return {"input_ids": ids, "attention_mask": mask, "labels": ids.masked_fill(mask == 0, IGNORED)}

    def pack(self, rows: Any, tokens: Shape) -> Any:
        return causal.pack([row[CAUSAL_FIELD] for row in rows], tokens, fill=PAD)

    def dummy_row(self, shape: Shape) -> Any:
        return {CAUSAL_FIELD: torch.randint(2, self.config["vocab_size"], shape).numpy()}


@dataclass(frozen=True, kw_only=True)
class Case:
    """One of `CASES`, with its rows in a folder."""

    name: str
    folder: Path
    tiny: bool = False

    @property
    def causal(self) -> bool:
        return self.name.startswith("causal")

    @property
    def size(self) -> str:
        return "chatlm-tiny" if self.tiny else "chatlm-base"

    @property
    def global_batch(self) -> int:
        return TINY_BATCH if self.tiny else GLOBAL_BATCH[self.name]

    @property
    def gpt2(self) -> dict[str, int]:
        return TINY_GPT2 if self.tiny else GPT2

    def task(self) -> Task:
        if self.causal:
            return CausalLm(self.gpt2)
        if self.name == "sft":
            return Sft(SftOptions(model=self.size, freeze="encoder+embeddings"))  # type: ignore[arg-type]
        return Pretrain(LanguageOptions(model=self.size))  # type: ignore[arg-type]

    @cached_property
    def store(self) -> Store:
        return Store.open(self.folder / self._store_name, verify=False)

    @property
    def _store_name(self) -> str:
        rows = {"pretrain": "chat", "sft": "chat"}.get(self.name, self.name)
        return f"{rows}-{self.size}"

    def prepare(self, data: str) -> None:
        """Write the rows of this case to its folder, unless they are there."""
        if (self.folder / self._store_name / NAME).is_file():
            return
        if self._store_name != f"chat-{self.size}":
            chat = Case(name="pretrain", folder=self.folder, tiny=self.tiny)
            chat.prepare(data)
            self._write(chat.store)
            return
        work = self.folder / f"work-{self.size}"
        made = Path(Pretrain(LanguageOptions(model=self.size)).prepare(data, work, lambda phrase: None))  # type: ignore[arg-type]
        made.rename(self.folder / self._store_name)

    def _write(self, chat: Store) -> None:
        """A store whose rows are filled with the tokens of the chat's rows, field by field."""
        shapes = chat.shapes(range(len(chat)))
        if self.causal:
            fields, context = (CAUSAL_FIELD,), self.gpt2["n_positions"]
            streams = [np.concatenate([chat[row][field] for row in range(len(chat)) for field in FIELDS])]
            own = shapes.sum(axis=1, keepdims=True)
            lengths = np.maximum(2, own * context // own.max())
        else:
            fields, streams = (
                FIELDS,
                [np.concatenate([chat[row][field] for row in range(len(chat))]) for field in FIELDS],
            )
            own = shapes
        if self.name.endswith("full"):
            longest = (context,) if self.causal else PRESETS[self.size].worst_shape
            lengths = np.tile(longest, (len(chat), 1))
        starts = np.cumsum(own, axis=0) - own
        parts = [
            np.take(stream, np.arange(start, start + length), mode="wrap")
            for row_starts, row_lengths in zip(starts, lengths, strict=True)
            for stream, start, length in zip(streams, row_starts, row_lengths, strict=True)
        ]
        vocab = self.gpt2["vocab_size"] if self.causal else chat.meta.vocab_size
        writer = StoreWriter(self.folder / self._store_name, fields, vocab)
        writer.add(np.concatenate(parts), lengths)
        writer.finish(
            tokenizer=None if self.causal else chat.path / "tokenizer", eos_id=EOS, pad_id=PAD, tokenizer_fingerprint=chat.meta.tokenizer_fingerprint,
            max_tokens=dict(zip(fields, lengths.max(axis=0).tolist(), strict=True)), rows_in=len(chat), dropped={},
            truncated=dict.fromkeys(fields, 0),
        )  # fmt: skip

    def flops(self, lengths: np.ndarray) -> float:
        """FLOPs of one forward and backward over rows of these lengths, one line per row, without padding.

        Matrix products only, two FLOPs for a multiply-add. Causal attention counts its whole square, as torch's counter
        has it. Backward is twice the forward, less what frozen parts spare.
        """
        rows = np.asarray(lengths, dtype=np.float64).reshape(len(lengths), -1)
        return float((_gpt2_flops(self.gpt2, *rows.T) if self.causal else self._t5_flops(*rows.T)).sum())

    def _t5_flops(self, source: np.ndarray, target: np.ndarray) -> np.ndarray:
        vocab, frozen = PRESETS[self.size].vocab, self.name == "sft"
        width, wide, heads, d_kv, layers = (PRESETS[self.size].sizes[name] for name in ("d_model", "d_ff", "num_heads", "d_kv", "num_layers"))  # fmt: skip
        inner = heads * d_kv
        square, feed_forward = 2 * width * inner, 4 * width * wide
        encoder = (4 * square + feed_forward) * source + 4 * inner * source**2
        cross_keys = 2 * square * source  # and values
        decoder = (6 * square + feed_forward) * target + 4 * inner * target * (target + source)
        head = 2 * width * vocab * target
        if frozen:  # the encoder runs forward only; its output and the head's weights get no gradient
            return layers * (encoder + 2 * cross_keys + 3 * decoder) + 2 * head
        return 3 * (layers * (encoder + cross_keys + decoder) + head)


def _gpt2_flops(config: dict[str, int], tokens: np.ndarray) -> np.ndarray:
    width = config["n_embd"]
    layer = 24 * width**2 * tokens + 4 * width * tokens**2
    return 3 * (config["n_layer"] * layer + 2 * width * config["vocab_size"] * tokens)


class Stream(torch.utils.data.Dataset):
    """The rows of `steps` optimizer steps one after the other, in the order that Brimful draws them with this seed.

    A peer that reads it in order trains the same rows in the same steps, and no pass over the data ends in the middle.
    """

    def __init__(self, case: Case, steps: int, seed: int) -> None:
        self.store = case.store
        self._batch = case.global_batch
        self._sampler = StepSampler(len(self.store), self._batch, seed=seed)
        self._steps: dict[int, np.ndarray] = {}
        self._length = steps * self._batch

    def __len__(self) -> int:
        return self._length

    def __getitem__(self, index: int) -> dict[str, Any]:
        """With the name `input_ids` besides the task's own, because Hugging Face groups by its length."""
        if index >= self._length:
            raise IndexError(index)
        step, place = divmod(index, self._batch)
        if step not in self._steps:
            self._steps[step] = self._sampler.step(step * self._batch).rows
        row = self.store[int(self._steps[step][place])]
        return {**row, "input_ids": row[self.store.fields[0]]}
