"""The built-in language tasks: text to text with an encoder-decoder, a T5 as ChatLM-mini-Chinese has it.

`base` has 187.7 M parameters (the tied head counted once), `tiny` has 1.2 M and learns on a CPU in a minute. `--from` loads
any `AutoModelForSeq2SeqLM` instead. The loss runs over the tokens of the response.

Fine-tuning freezes the encoder and the embeddings. They have no gradients and no optimizer state, and the encoder runs
without autograd, so it keeps no activations either, even if the embeddings below it do train.

The command line reads the options from here, so torch is imported inside functions only.
"""

import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Literal, get_args

from brimful.errors import BadData, BadOption
from brimful.task import Dataset, Loss, Shape, Task
from brimful.training.run import RunFolder, is_missing
from brimful.units import is_number

if TYPE_CHECKING:
    from torch import Tensor, nn

    from brimful.data.store import Store

SizeName = Literal["tiny", "base"]
Freeze = Literal["encoder+embeddings", "encoder", "none"]

PAD, EOS, IGNORED = 0, 1, -100
FIELDS = ("prompt", "response")
PACKED_MODELS = ("t5", "mt5")
"""Types of models that `brimful.packing.t5` runs."""


@dataclass(frozen=True, kw_only=True)
class Size:
    """The dimensions of a T5, and the lengths and batch it is meant for."""

    d_model: int
    d_ff: int
    heads: int
    d_kv: int
    layers: int
    vocab: int
    worst_shape: Shape
    global_batch: int


SIZES: dict[str, Size] = {
    "tiny": Size(d_model=128, d_ff=256, heads=4, d_kv=32, layers=2, vocab=4096, worst_shape=(128, 128), global_batch=64),
    "base": Size(d_model=768, d_ff=3072, heads=12, d_kv=64, layers=10, vocab=29298, worst_shape=(256, 256), global_batch=256),
}  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class ChatOptions:
    """The options of `chatlm-pretrain` and `chatlm-sft`."""

    size: SizeName | None = None
    """Size of a new model. Default: base."""
    from_: str | None = field(default=None, metadata={"path": True})
    """Model to start from: a folder written by save_pretrained, a run folder or one of its checkpoints."""
    freeze: Freeze | None = None
    """Part of the model that is not trained. Default: encoder+embeddings for chatlm-sft, none for chatlm-pretrain."""
    random_weights: bool = False
    """Let chatlm-sft start from random weights, without --from."""
    label_smoothing: float = 0.0
    """Share of each label that is spread over the vocabulary in training. Evaluation never smooths."""
    tokenizer: str | None = field(default=None, metadata={"path": True})
    """Tokenizer folder for raw DATA. Default: the tokenizer of --from, else a new one trained on DATA."""
    columns: str | None = None
    """Columns of raw DATA, such as prompt=question,response=answer. Default: found by name."""
    max_tokens: str | int | None = None
    """Truncate prompts and responses of raw DATA to this many tokens: 256, or 256,320 for both. Default: the model's lengths."""

    def __post_init__(self) -> None:
        problems = list(self._problems())
        if problems:
            raise BadOption(" ".join(problems))

    def _problems(self) -> Iterator[str]:
        for name, words in (("size", get_args(SizeName)), ("freeze", get_args(Freeze))):
            value = getattr(self, name)
            if value is not None and value not in words:
                yield f"{name}={value!r} must be one of {', '.join(words)}."
        share = self.label_smoothing
        if not is_number(share) or not 0 <= share < 1:
            yield f"label_smoothing={share!r} must be at least 0 and below 1."
        if self.from_ is not None and self.size is not None:
            yield f"size={self.size!r} cannot be combined with from_=, whose model has its own size. Try: leave size= out."
        if self.from_ is not None and self.random_weights:
            yield "random_weights=True cannot be combined with from_=. Try: one of the two."
        for name in ("from_", "tokenizer"):
            path = getattr(self, name)
            if path and is_missing(path):
                yield f"{name}={path!r} does not exist. Try: another folder."
        lengths = self.lengths
        if lengths is not None and not (len(lengths) in (1, 2) and all(lengths)):
            yield f"max_tokens={self.max_tokens!r} must be one or two positive numbers, such as 256 or 256,320."

    @classmethod
    def on_resume(cls, values: dict[str, Any], run: Path) -> dict[str, Any]:
        """The options of a run that continues: a model or tokenizer that is gone is replaced by the run's own copy."""
        store = RunFolder(run).read_request().prepared.get("data")
        copies = {"from": run / "model", "tokenizer": run / store / "tokenizer" if store else run / "tokenizer"}
        return {
            name: str(copies[name]) if name in copies and not Path(value).exists() and copies[name].exists() else value
            for name, value in values.items()
        }

    @property
    def lengths(self) -> tuple[int, ...] | None:
        """`max_tokens` as numbers; 0 stands for what is not a positive number."""
        if self.max_tokens is None:
            return None
        return tuple(int(part) if part.strip().isdecimal() else 0 for part in str(self.max_tokens).split(","))


class Pretrain(Task):
    """Trains all weights, from random ones or from the model of `--from`."""

    name = "chatlm-pretrain"
    Options = ChatOptions
    options: ChatOptions
    precision = "auto"
    chunked_loss = True
    learning_rate = 3e-4
    default_freeze: ClassVar[Freeze] = "none"

    def __init__(self, options: ChatOptions | None = None) -> None:
        super().__init__(options)
        self.size = self.options.size or "base"
        self.source = _model_folder(self.options.from_)
        """The model folder behind `--from`; None for a new model."""
        self.worst_shape = SIZES[self.size].worst_shape
        self.global_batch = SIZES[self.size].global_batch
        self.max_tokens: Shape = self.options.lengths or self.worst_shape
        if self.source is not None:
            _config(self.size, self.source)  # refuses another architecture before anything is built

    def model(self) -> "nn.Module":
        from transformers import AutoModelForSeq2SeqLM

        return self._freeze(AutoModelForSeq2SeqLM.from_config(_config(self.size, self.source)))

    def initial_model(self) -> "nn.Module":
        if self.source is None:
            return self.model()
        from brimful.tasks.model_folder import load_model

        model = load_model(self.source)
        model.config.use_cache = False
        return self._freeze(model)

    def loss(self, model: "nn.Module", batch: Any) -> Loss:
        import torch.nn.functional as F

        smoothing = self.options.label_smoothing if model.training else 0.0
        if "source_rows" in batch:
            from brimful.packing.t5 import loss_sum

            return Loss(sum=loss_sum(model, batch, label_smoothing=smoothing), count=batch["count"])
        labels = batch["labels"]
        logits = model(
            **_encoder_inputs(model, batch),
            attention_mask=batch["attention_mask"],
            decoder_input_ids=model.prepare_decoder_input_ids_from_labels(labels),  # type: ignore[operator]
        ).logits  # not `labels=`: the model would compute a loss of its own as well
        loss = F.cross_entropy(
            logits.flatten(0, 1),
            labels.flatten(),
            ignore_index=IGNORED,
            reduction="sum",
            label_smoothing=smoothing,
        )
        return Loss(sum=loss, count=(labels != IGNORED).sum())

    def shape(self, row: Any) -> Shape:
        return len(row["prompt"]), len(row["response"])

    def collate(self, rows: Sequence[Any]) -> Any:
        prompts, responses = ([row[name] for row in rows] for name in FIELDS)
        ids, mask = _pad(prompts, _config(self.size, self.source).pad_token_id)
        labels, _ = _pad(responses, IGNORED)
        return {"input_ids": ids, "attention_mask": mask, "labels": labels}

    def pack(self, rows: Sequence[Any], tokens: Shape) -> Any:
        from brimful.packing.t5 import pack

        config = _config(self.size, self.source)
        prompts, responses = ([row[name] for row in rows] for name in FIELDS)
        return pack(prompts, responses, tokens, fill=config.pad_token_id, start=config.decoder_start_token_id)

    @property
    def packs(self) -> bool:
        return _config(self.size, self.source).model_type in PACKED_MODELS

    def compiling(self, model: "nn.Module", on: bool) -> bool:
        from brimful.packing.t5 import compile_blocks

        compile_blocks(model, on)
        return self.packs

    def dummy_row(self, shape: Shape) -> Any:
        import torch

        vocab = _config(self.size, self.source).vocab_size
        return {name: torch.randint(2, vocab, (length,)).numpy() for name, length in zip(FIELDS, shape, strict=True)}

    def prepare(
        self, data: str, folder: Path, progress: Callable[[str], object], like: Dataset | None = None, name: str = "train"
    ) -> str:  # fmt: skip
        """The path of a token store: `data` itself, or raw files tokenized into `folder`."""
        from brimful.tasks.chat_data import token_store

        return token_store(self, data, folder, progress, like=like, name=name)

    def rows(self, data: str) -> "Store":
        """A token store of prompts and responses whose tokens the model knows."""
        from brimful.data.store import Store

        store, config = Store.open(data), _config(self.size, self.source)
        eos = config.eos_token_id if isinstance(config.eos_token_id, list) else [config.eos_token_id]
        problems = []
        if store.fields != FIELDS:
            problems.append(f"its rows have {' and '.join(store.fields)}, not prompt and response")
        if store.meta.vocab_size > config.vocab_size:
            problems.append(f"its tokenizer has {store.meta.vocab_size:,} tokens and the model {config.vocab_size:,}")
        if store.meta.eos_id not in eos:
            problems.append(f"its eos id is {store.meta.eos_id} and the model's {', '.join(map(str, eos))}")
        if self._has_other_tokenizer(store):
            problems.append(f"it was made with another tokenizer than {self.source}")
        if problems:
            made_by = f"made by `brimful data tokenizer --model {self.size}`" if self.source is None else self.source
            raise BadData(
                f"{data} cannot train {self.name}: {' and '.join(problems)}. "
                f"Try: tokenize prompts and responses with the tokenizer {made_by}."
            )
        return store

    def remarks(self, rows: Dataset) -> Sequence[tuple[str, Any, Any, str]]:
        from brimful.tasks.chat_data import remarks

        return remarks(self, rows)

    def evaluate(self, model: "nn.Module", rows: Any, context: Any) -> Mapping[str, float]:
        from brimful.tasks.chat_scores import evaluate_in_training

        return evaluate_in_training(model, rows, context)

    def save(self, model: "nn.Module", folder: Path, rows: Dataset) -> None:
        """The model with its tokenizer, in one folder that transformers can load."""
        with _cache_enabled(model):
            super().save(model, folder, rows)
        store = getattr(rows, "path", None)
        if store is not None:
            for file in (store / "tokenizer").iterdir():
                shutil.copyfile(file, folder / file.name)

    def _freeze(self, model: Any) -> "nn.Module":
        parts = {
            "none": [],
            "encoder": [block for name, block in model.get_encoder().named_children() if name != "embed_tokens"],
            "encoder+embeddings": [model.get_encoder(), model.get_input_embeddings(), model.get_output_embeddings()],
        }[self.options.freeze or self.default_freeze]
        for part in parts:
            part.requires_grad_(False)
        return model

    def _has_other_tokenizer(self, store: "Store") -> bool:
        if self.source is None or not (Path(self.source) / "tokenizer.json").is_file():
            return False
        from brimful.data.tokenizer.folder import TokenizerFacts

        return TokenizerFacts.read(self.source).fingerprint != store.meta.tokenizer_fingerprint


class Sft(Pretrain):
    """Fine-tunes the decoder of a model that was trained before."""

    name = "chatlm-sft"
    learning_rate = 5e-5
    default_freeze: ClassVar[Freeze] = "encoder+embeddings"

    def prepare(
        self, data: str, folder: Path, progress: Callable[[str], object], like: Dataset | None = None, name: str = "train"
    ) -> str:  # fmt: skip
        if self.source is None and not self.options.random_weights:  # before anything is tokenized or planned
            raise BadOption(
                "chatlm-sft needs a model to fine-tune. Try: from_= with a model folder or a run of chatlm-pretrain, or "
                "random_weights=True."
            )
        return super().prepare(data, folder, progress, like, name)


def _model_folder(path: str | None) -> str | None:
    if path is None:
        return None
    from brimful.tasks.model_folder import resolve

    return str(resolve(path))


@cache
def _config(size: str, source: str | None) -> Any:
    """The configuration of the model, read or made once."""
    if source is not None:
        from brimful.tasks.model_folder import read_config

        config = read_config(source)
        config.use_cache = False
        return config
    from transformers import T5Config

    s = SIZES[size]
    return T5Config(  # type: ignore[call-arg]
        d_model=s.d_model, d_ff=s.d_ff, d_kv=s.d_kv, num_heads=s.heads, vocab_size=s.vocab,
        num_layers=s.layers, num_decoder_layers=s.layers,
        pad_token_id=PAD, eos_token_id=EOS, decoder_start_token_id=PAD,
        use_cache=False,  # useless in training, and compiled blocks would recompile for every length of it
    )  # fmt: skip


@contextmanager
def _cache_enabled(model: Any) -> Iterator[None]:
    """The cache of keys and values is off in training, but whoever loads the model will generate with it."""
    configs = [model.config, *([model.generation_config] if model.generation_config else [])]
    before = [config.use_cache for config in configs]
    try:
        for config in configs:
            config.use_cache = True
        yield
    finally:
        for config, use_cache in zip(configs, before, strict=True):
            config.use_cache = use_cache


def _encoder_inputs(model: Any, batch: Any) -> dict[str, Any]:
    """The prompt's tokens, or, if the encoder is frozen, its output without a graph."""
    import torch

    encoder = model.get_encoder()
    embeddings = {id(param) for param in model.get_input_embeddings().parameters()}
    if any(param.requires_grad for param in encoder.parameters() if id(param) not in embeddings):
        return {"input_ids": batch["input_ids"]}
    with torch.no_grad():
        return {"encoder_outputs": encoder(input_ids=batch["input_ids"], attention_mask=batch["attention_mask"])}


def _pad(rows: Sequence[Any], value: int) -> "tuple[Tensor, Tensor]":
    """Rows padded with `value` to the longest of them, and their attention mask."""
    import numpy as np
    import torch

    lengths = np.fromiter(map(len, rows), dtype=np.int64, count=len(rows))
    table = np.full((len(rows), int(lengths.max())), value, dtype=np.int64)
    mask = np.arange(table.shape[1]) < lengths[:, None]
    table[mask] = np.concatenate(rows)
    return torch.from_numpy(table), torch.from_numpy(mask.astype(np.int64))
