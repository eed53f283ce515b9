"""What the trainers of `sft.py` fine-tune: four models with random weights, two sets of rows, one tokenizer.

    qwen2.5-0.5b, qwen2.5-1.5b   all weights
    llama-8b-lora                adapters of r=16 on all linear layers, below them bf16 weights
    llama-8b-qlora               the same with weights of 4 bits (nf4)

    real    the chat rows, as conversations of one question and one answer, up to 1,024 tokens
    long    lengths drawn from a heavy-tailed distribution (log-normal, median 300, up to 4,096 tokens; seeded),
            their text taken from the chat rows

Models are made from their configurations, since no hub can be reached where this runs, and saved in bf16 as published ones
are, one shard at a time, so that an 8B model is never in memory as a whole. They are in the shape of the published ones to the last
tensor. What is learnt means nothing; speed and memory do not depend on it, and the same weights make losses comparable.

The tokenizer is a byte-level BPE trained on the rows, with a ChatML template. Brimful tokenizes the conversations as it does
for any user, and every contestant trains on the tokens and labels of that one store.
"""

import json
import math
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch

from brimful.data.batches import StepSampler
from brimful.data.store import SPANS, Store, trained
from brimful.task import IGNORED
from brimful.tasks.causal_lm import TOKENS
from brimful.tasks.language import Sft, SftOptions

Method = Literal["full", "lora", "qlora"]
GLOBAL_BATCH, TINY_BATCH = 64, 8
"""Rows per step; 64 is what Brimful has by default for a causal model."""
DATA = ("real", "long")
MAX_TOKENS = {"real": 1024, "long": 4096}
"""1,024 is the default of Brimful and of TRL."""
TINY_TOKENS = {"real": 128, "long": 256}
LONG_ROWS, LONG_MEDIAN, LONG_SIGMA = 2000, 300, 1.1
LORA = {"r": 16, "alpha": 32}
VOCABULARY = 16_000
"""Of the tokenizer. The models keep the vocabulary of the published ones, which is what costs memory."""
SHARD_BYTES = 2 * 2**30
INITIAL_DEVIATION = 0.02
PAD, START, END = "<|endoftext|>", "<|im_start|>", "<|im_end|>"
CHATML = (
    "{% for message in messages %}" + START + "{{ message.role }}\n{{ message.content }}" + END + "\n{% endfor %}"
    "{% if add_generation_prompt %}" + START + "assistant\n{% endif %}"
)  # fmt: skip


def _sizes(width: int, inner: int, layers: int, heads: int, key_heads: int, vocabulary: int, positions: int) -> dict[str, Any]:  # fmt: skip
    return {
        "hidden_size": width, "intermediate_size": inner, "num_hidden_layers": layers, "num_attention_heads": heads,
        "num_key_value_heads": key_heads, "vocab_size": vocabulary, "max_position_embeddings": positions,
    }  # fmt: skip


LLAMA3_ROPE = {"rope_type": "llama3", "rope_theta": 500_000.0, "factor": 8.0, "low_freq_factor": 1.0,
               "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}  # fmt: skip
QWEN_ROPE = {"rope_type": "default", "rope_theta": 1_000_000.0}
TINY_SIZES = _sizes(64, 128, 2, 4, 2, 4096, 4096)


@dataclass(frozen=True, kw_only=True)
class Model:
    """A published model's shape, and how it is fine-tuned."""

    folder: str
    """Models of one shape share their weights."""
    model_type: str
    sizes: dict[str, Any]
    rope: dict[str, Any]
    tied: bool
    method: Method

    def config(self, tiny: bool) -> Any:
        from transformers import AutoConfig

        sizes = TINY_SIZES if tiny else self.sizes
        rope = {"rope_type": "default", "rope_theta": 10_000.0} if tiny else self.rope
        config = AutoConfig.for_model(
            self.model_type, **sizes, rope_parameters=rope, tie_word_embeddings=self.tied, dtype="bfloat16",
            bos_token_id=None, eos_token_id=2, pad_token_id=0,
        )  # fmt: skip
        config.architectures = [{"qwen2": "Qwen2ForCausalLM", "llama": "LlamaForCausalLM"}[self.model_type]]
        return config


_LLAMA_8B = {
    "folder": "llama-8b", "model_type": "llama", "rope": LLAMA3_ROPE, "tied": False,
    "sizes": _sizes(4096, 14336, 32, 32, 8, 128_256, 131_072),
}  # fmt: skip
MODELS = {
    "qwen2.5-0.5b": Model(
        folder="qwen2.5-0.5b", model_type="qwen2", rope=QWEN_ROPE, tied=True, method="full",
        sizes=_sizes(896, 4864, 24, 14, 2, 151_936, 32_768),
    ),
    "qwen2.5-1.5b": Model(
        folder="qwen2.5-1.5b", model_type="qwen2", rope=QWEN_ROPE, tied=True, method="full",
        sizes=_sizes(1536, 8960, 28, 12, 2, 151_936, 131_072),
    ),
    "llama-8b-lora": Model(**_LLAMA_8B, method="lora"),  # type: ignore[arg-type]
    "llama-8b-qlora": Model(**_LLAMA_8B, method="qlora"),  # type: ignore[arg-type]
}  # fmt: skip


class OtherTraining(Exception):
    """A contestant does not train what its case says."""


@dataclass(frozen=True, kw_only=True)
class Case:
    """One model on one set of rows, prepared in a folder."""

    model: str
    data: str
    folder: Path
    tiny: bool = False
    causal = True

    @property
    def shape(self) -> Model:
        return MODELS[self.model]

    @property
    def method(self) -> Method:
        return self.shape.method

    @property
    def global_batch(self) -> int:
        return TINY_BATCH if self.tiny else GLOBAL_BATCH

    @property
    def max_tokens(self) -> int:
        return (TINY_TOKENS if self.tiny else MAX_TOKENS)[self.data]

    @property
    def model_folder(self) -> Path:
        return self.folder / f"{self.shape.folder}{'-tiny' if self.tiny else ''}"

    @property
    def rows_file(self) -> Path:
        return self.folder / f"{self.data}{'-tiny' if self.tiny else ''}.jsonl"

    @cached_property
    def store(self) -> Store:
        return Store.open((self.folder / self._store_note).read_text(), verify=False)

    def task(self) -> Sft:
        """What `brimful train sft` makes of `--model`, and of `--lora` and `--load-in` if adapters are trained."""
        lora = None if self.method == "full" else ",".join(f"{name}={value}" for name, value in LORA.items())
        load_in = "4bit" if self.method == "qlora" else None
        return Sft(SftOptions(model=str(self.model_folder), lora=lora, load_in=load_in))  # type: ignore[arg-type]

    def prepare(self, chat_rows: Path) -> None:
        """Write rows, tokenizer, weights and token store, unless they are there."""
        self.folder.mkdir(parents=True, exist_ok=True)
        pairs = read_pairs(chat_rows)
        tokenizer = self.folder / f"tokenizer{'-tiny' if self.tiny else ''}"
        if not (tokenizer / "tokenizer_config.json").is_file():
            train_tokenizer(pairs, tokenizer, 1000 if self.tiny else VOCABULARY)
        if not self.rows_file.is_file():
            if self.data == "long":
                count = 200 if self.tiny else LONG_ROWS
                pairs = list(draw_long(pairs, tokenizer, count, self.max_tokens))
            write_conversations(pairs[:200] if self.tiny else pairs, self.rows_file)
        if not (self.model_folder / "config.json").is_file():
            write_model(self.shape.config(self.tiny), self.model_folder, tokenizer)
        if not (self.folder / self._store_note).is_file():
            task = Sft(SftOptions(model=str(self.model_folder), max_tokens=self.max_tokens))
            made = task.prepare(str(self.rows_file), self.folder / "stores", lambda phrase: None)
            (self.folder / self._store_note).write_text(str(made))

    @property
    def _store_note(self) -> str:
        """Names the token store. The tokenizer is one for all models, so they share it."""
        return f"store-{self.data}{'-tiny' if self.tiny else ''}"

    @property
    def trained_weights(self) -> int:
        """How many weights this case trains: all of the model, or those of the adapters."""
        sizes = TINY_SIZES if self.tiny else self.shape.sizes
        width, inner, layers = sizes["hidden_size"], sizes["intermediate_size"], sizes["num_hidden_layers"]
        if self.method != "full":
            key_width = width * sizes["num_key_value_heads"] // sizes["num_attention_heads"]
            ends = [(width, width), (width, key_width), (width, key_width), (width, width), *[(width, inner)] * 3]
            return layers * sum(LORA["r"] * (one + other) for one, other in ends)
        from transformers import AutoModelForCausalLM

        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(self.shape.config(self.tiny))
        return sum(param.numel() for param in model.parameters())

    def check(self, model: Any) -> None:
        """Refuse a contestant that trains something else: its speed would not be comparable.

        Losses do not tell. Full fine-tuning in place of adapters begins at the same loss and is 0.03 % off after three steps.
        """
        count = sum(param.numel() for param in model.parameters() if param.requires_grad)
        in_4bit = any(type(module).__name__ == "Linear4bit" for module in model.modules())
        problems = []
        if count != self.trained_weights:
            problems.append(f"it trains {count:,} weights, and {self.method} has {self.trained_weights:,}")
        if in_4bit != (self.method == "qlora"):
            problems.append(f"its linear layers {'are' if in_4bit else 'are not'} in 4 bits")
        if problems:
            raise OtherTraining(f"{' and '.join(problems)}. Its figures cannot be compared.")

    def flops(self, lengths: np.ndarray) -> float:
        """FLOPs of one forward and backward over rows of these lengths, one line per row, without padding.

        Matrix products only, causal attention as its whole square, as in `train_cases`. Frozen weights need no gradient of
        their own, so adapters make the backward as costly as the forward; adapters themselves are left out (below 1 %).
        """
        tokens = np.asarray(lengths, dtype=np.float64).reshape(len(lengths), -1)[:, 0]
        sizes = TINY_SIZES if self.tiny else self.shape.sizes
        width, inner, layers = sizes["hidden_size"], sizes["intermediate_size"], sizes["num_hidden_layers"]
        key_width = width * sizes["num_key_value_heads"] // sizes["num_attention_heads"]
        weights = layers * (2 * width * width + 2 * width * key_width + 3 * width * inner) + width * sizes["vocab_size"]
        attention = layers * 4 * width * tokens**2
        passes = 3 if self.method == "full" else 2
        return float((passes * 2 * weights * tokens + 3 * attention).sum())


def read_pairs(path: Path) -> list[tuple[str, str]]:
    import pyarrow.parquet as pq

    table = pq.read_table(path, columns=["prompt", "response"])
    pairs = zip(table["prompt"].to_pylist(), table["response"].to_pylist(), strict=True)
    return [(prompt, response) for prompt, response in pairs if prompt and response and response.strip()]


def write_conversations(pairs: list[tuple[str, str]], path: Path) -> None:
    with path.open("w", encoding="utf-8") as file:
        for prompt, response in pairs:
            messages = [{"role": "user", "content": prompt}, {"role": "assistant", "content": response}]
            file.write(json.dumps({"messages": messages}, ensure_ascii=False) + "\n")


def train_tokenizer(pairs: list[tuple[str, str]], folder: Path, vocabulary: int) -> None:
    """A byte-level BPE as Qwen and Llama have, on the texts of the rows."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocabulary, special_tokens=[PAD, START, END], initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )  # fmt: skip
    tokenizer.train_from_iterator((text for pair in pairs for text in pair), trainer)
    wrapped = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token=END, pad_token=PAD)
    wrapped.chat_template = CHATML
    wrapped.save_pretrained(folder)


def long_lengths(count: int, most: int, seed: int = 0) -> np.ndarray:
    """Tokens of each row: log-normal, many short and a few as long as allowed."""
    median = LONG_MEDIAN * most // MAX_TOKENS["long"] or 8
    drawn = np.random.default_rng(seed).lognormal(math.log(median), LONG_SIGMA, count)
    return np.clip(drawn, 16, most).astype(int)


def draw_long(pairs: list[tuple[str, str]], tokenizer: Path, count: int, most: int) -> Iterator[tuple[str, str]]:
    """Conversations of those lengths. A fifth of each is the question."""
    from tokenizers import Tokenizer

    encode = Tokenizer.from_file(str(tokenizer / "tokenizer.json")).encode
    text = "\n".join(response for _, response in pairs)
    offsets = np.array(encode(text, add_special_tokens=False).offsets)[:, 0]
    places = np.random.default_rng(1).integers(0, len(offsets), count)
    for length, place in zip(long_lengths(count, most), places.tolist(), strict=True):
        around = 16  # the template's own tokens, and a few that the cut may add
        room = max(4, length - around)
        start = place % max(1, len(offsets) - room - 1)
        first, middle, last = (int(offsets[start + step]) for step in (0, max(2, room // 5), room))
        yield text[first:middle].strip() or "?", text[middle:last].strip() or "!"


def write_model(config: Any, folder: Path, tokenizer: Path) -> None:
    """Random weights as transformers initialises them, drawn on the GPU if there is one and written shard by shard."""
    import shutil

    from safetensors.torch import save_file
    from transformers import AutoModelForCausalLM

    folder.mkdir(parents=True, exist_ok=True)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    torch.manual_seed(0)
    with torch.device("meta"):
        shapes = {name: tensor.shape for name, tensor in AutoModelForCausalLM.from_config(config).state_dict().items()}
    if config.tie_word_embeddings:
        shapes.pop("lm_head.weight", None)
    shards, index, total = list(_shards(shapes)), {}, 0
    for number, names in enumerate(shards, 1):
        file = f"model-{number:05}-of-{len(shards):05}.safetensors"
        tensors = {name: _draw(name, shapes[name], device).cpu() for name in names}
        save_file(tensors, folder / file, metadata={"format": "pt"})
        index.update(dict.fromkeys(names, file))
        total += sum(tensor.nbytes for tensor in tensors.values())
    for file in tokenizer.iterdir():
        shutil.copyfile(file, folder / file.name)
    (folder / "model.safetensors.index.json").write_text(
        json.dumps({"metadata": {"total_size": total}, "weight_map": index})
    )
    config.save_pretrained(folder)  # last: its presence says that the folder is complete


def _shards(shapes: dict[str, torch.Size]) -> Iterator[list[str]]:
    names, size = [], 0
    for name, shape in shapes.items():
        if names and size + 2 * shape.numel() > SHARD_BYTES:
            yield names
            names, size = [], 0
        names.append(name)
        size += 2 * shape.numel()
    yield names


def _draw(name: str, shape: torch.Size, device: str) -> torch.Tensor:
    if name.endswith("bias"):
        return torch.zeros(shape, dtype=torch.bfloat16)
    if "norm" in name:
        return torch.ones(shape, dtype=torch.bfloat16)
    return torch.empty(shape, dtype=torch.bfloat16, device=device).normal_(0, INITIAL_DEVIATION)


class Stream:
    """The rows of `steps` optimizer steps in the order that Brimful draws them with this seed."""

    def __init__(self, case: Case, steps: int, seed: int) -> None:
        self.store, batch = case.store, case.global_batch
        sampler = StepSampler(len(self.store), batch, seed=seed)
        self.indices = np.concatenate([sampler.step(step * batch).rows for step in range(steps)])

    def dataset(self) -> Any:
        """As `datasets` has it: a column of tokens, and one of labels with -100 where nothing is trained."""
        import pyarrow as pa
        from datasets import Dataset
        from datasets.table import InMemoryTable

        rows = self.store.__getitems__(self.indices)
        lengths = np.array([len(row[TOKENS]) for row in rows])
        tokens = np.concatenate([row[TOKENS] for row in rows]).astype(np.int64)
        mask = np.concatenate([_trained(row) for row in rows])
        offsets = pa.array(np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32))
        columns = {"input_ids": tokens, "labels": np.where(mask, tokens, IGNORED)}
        arrays = {name: pa.ListArray.from_arrays(offsets, pa.array(values)) for name, values in columns.items()}
        return Dataset(InMemoryTable(pa.table(arrays)))

    @property
    def mean_length(self) -> float:
        return float(np.mean(self.store.shapes(self.indices)[:, 0]))


def _trained(row: dict[str, Any]) -> np.ndarray:
    return trained(row[SPANS], len(row[TOKENS])) if SPANS in row else np.ones(len(row[TOKENS]), dtype=bool)
