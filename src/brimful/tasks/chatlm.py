"""What can be asked of the chat tasks besides what any task takes. Imports no torch: the command line reads it."""

import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Literal, get_args

from brimful.errors import BadData, BadOption
from brimful.task import Dataset, Loss, Shape, Task

if TYPE_CHECKING:
    from torch import Tensor, nn

    from brimful.data.store import Store

Freeze = Literal["encoder+embeddings", "encoder", "none"]


@dataclass(frozen=True, kw_only=True)
class ChatOptions:
    """Of chatlm-pretrain and chatlm-sft. None is not asked for."""

    size: str | None = None
    """Size of a new model: tiny or base; base unless given."""
    from_: str | None = None
    """Start from this model: a folder that save_pretrained wrote, a run folder or a checkpoint of one."""
    freeze: Freeze | None = None
    """What does not train. A frozen part runs without autograd; chatlm-sft freezes encoder+embeddings unless told otherwise."""
    random_weights: bool = False
    """Fine-tune random weights: without it chatlm-sft wants --from."""
    label_smoothing: float = 0.0
    """Share of each label spread over the vocabulary, in training; evaluation never smooths."""
    tokenizer: str | None = None
    """Tokenizer folder for raw DATA; the model's own, or one trained on DATA, unless given."""
    columns: str | None = None
    """Which column of raw DATA is what, such as prompt=question,response=answer; found by name unless given."""
    max_tokens: str | int | None = None
    """Longer sides of raw DATA are cut to so many tokens: one number, or one for each side; the task's lengths unless given."""

    def __post_init__(self) -> None:
        wrong = [sentence for good, sentence in self._checks() if not good]
        if wrong:
            raise BadOption("; ".join(wrong))

    def _checks(self) -> Iterator[tuple[bool, str]]:
        words = get_args(Freeze)
        yield self.freeze is None or self.freeze in words, f"--freeze {self.freeze}: one of {', '.join(words)}"
        smooth = self.label_smoothing
        is_share = isinstance(smooth, (int, float)) and not isinstance(smooth, bool) and 0 <= smooth < 1
        yield is_share, f"--label-smoothing {smooth!r}: give a share from 0 to below 1, such as 0.1"
        both = self.size is not None and self.from_ is not None
        yield not both, f"--size {self.size}: a model that is loaded with --from has its size already"
        yield (
            self.from_ is None or not self.random_weights,
            "--random-weights: --from gives weights that are not random",
        )
        lengths = self.lengths
        good = lengths is None or (len(lengths) in (1, 2) and all(length > 0 for length in lengths))
        yield good, f"--max-tokens {self.max_tokens}: give one number of tokens, or one for each side, such as 256,320"

    @property
    def lengths(self) -> tuple[int, ...] | None:
        """`max_tokens` as numbers; a zero where it is none."""
        if self.max_tokens is None:
            return None
        parts = str(self.max_tokens).split(",")
        return tuple(int(part) if part.strip().isdecimal() else 0 for part in parts)


# Text to text with an encoder-decoder: the loss over the answer's tokens, on T5 in the released ChatLM's configuration.
#
# `base` has 187.7 M parameters (the tied head counted once); `tiny` trains on a CPU in seconds; `--from` takes any
# `AutoModelForSeq2SeqLM` folder. Fine-tuning freezes encoder and embeddings: no gradients, no optimizer state, and the
# encoder runs without autograd, so that it keeps no activations either, even where the embeddings below it do train.


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
    """Every weight trains, from random ones unless `--from` gives others."""

    name = "chatlm-pretrain"
    precision = "auto"
    sizes: ClassVar = tuple(SIZES)
    freezes: ClassVar[Freeze] = "none"
    learning_rate = 3e-4

    def __init__(self, size: str | None = None, options: ChatOptions | None = None) -> None:
        options = options or ChatOptions(size=size)
        self.size = options.size or "base"
        self.source = None if options.from_ is None else _model_folder(options.from_)
        self.freeze: Freeze = options.freeze or self.freezes
        self.label_smoothing = options.label_smoothing
        self.worst_shape = SIZES[self.size].worst_shape
        self.global_batch = SIZES[self.size].global_batch
        self.tokenizer, self.columns = options.tokenizer, options.columns
        self.cut_at = options.lengths
        self.max_tokens = options.lengths or self.worst_shape
        if self.source is not None:
            _config(self.size, self.source)  # another architecture is refused before anything is built

    def model(self) -> "nn.Module":
        from transformers import AutoModelForSeq2SeqLM

        return self._frozen(AutoModelForSeq2SeqLM.from_config(_config(self.size, self.source)))

    def initial_model(self) -> "nn.Module":
        if self.source is None:
            return self.model()
        from brimful.tasks.model_folder import load_model

        model = load_model(self.source)
        model.config.use_cache = False
        return self._frozen(model)

    def loss(self, model: "nn.Module", batch: Any) -> Loss:
        import torch.nn.functional as F

        labels = batch["labels"]
        logits = model(
            **_encoded(model, batch),
            attention_mask=batch["attention_mask"],
            decoder_input_ids=model.prepare_decoder_input_ids_from_labels(labels),  # type: ignore[operator]
        ).logits  # given the labels themselves, the model would build a loss of its own beside ours
        loss = F.cross_entropy(
            logits.flatten(0, 1),
            labels.flatten(),
            ignore_index=IGNORED,
            reduction="sum",
            label_smoothing=self.label_smoothing if model.training else 0.0,
        )
        return Loss(sum=loss, count=(labels != IGNORED).sum())

    def rows(self, data: str) -> "Store":
        """A token store of prompts and responses whose tokens this model knows."""
        from brimful.data.store import Store

        store, config = Store.open(data), _config(self.size, self.source)
        vocab, eos = config.vocab_size, config.eos_token_id
        ends = eos if isinstance(eos, list) else [eos]
        wrong = [
            f"its rows have {' and '.join(store.sides)}, not prompt and response" if store.sides != SIDES else "",
            f"its tokenizer has {store.meta.vocab_size:,} tokens and {self._called} knows {vocab:,}"
            if store.meta.vocab_size > vocab
            else "",
            f"its eos is {store.meta.eos_id} and the model's {', '.join(map(str, ends))}"
            if store.meta.eos_id not in ends
            else "",
            self._other_tokenizer(store),
        ]
        if any(wrong):
            advice = f"--model {self.size}`" if self.source is None else f"…`, or with that of {self.source}"
            raise BadData(
                f"{data} cannot train {self.name}: {'; '.join(filter(None, wrong))}; pack the rows with a tokenizer made by "
                f"`brimful data tokenizer {advice}"
            )
        return store

    def prepare(
        self, data: str, folder: Path, say: Callable[[str], object], like: Dataset | None = None, name: str = "train"
    ) -> str:
        """A token store: the given one, or one packed here from raw files."""
        from brimful.tasks.chat_data import packed

        return packed(self, data, folder, say, like=like, name=name)

    def shape(self, row: Any) -> Shape:
        return len(row["prompt"]), len(row["response"])

    def collate(self, rows: Sequence[Any]) -> Any:
        prompts, responses = ([row[side] for row in rows] for side in SIDES)
        pad = _config(self.size, self.source).pad_token_id
        (ids, mask), (labels, _) = _padded(prompts, pad), _padded(responses, IGNORED)
        return {"input_ids": ids, "attention_mask": mask, "labels": labels}

    def dummy(self, rows: int, shape: Shape) -> Any:
        import torch

        source, target = shape
        vocab = _config(self.size, self.source).vocab_size
        ids = torch.randint(2, vocab, (rows, source))
        return {
            "input_ids": ids,
            "attention_mask": torch.ones_like(ids),
            "labels": torch.randint(2, vocab, (rows, target)),
        }

    def evaluate(self, model: "nn.Module", rows: Any, context: Any) -> Mapping[str, float]:
        from brimful.tasks.chat_scores import scores

        return scores(model, rows, context)

    def save(self, model: "nn.Module", folder: Path, rows: Dataset) -> None:
        """The model and, beside it, the tokenizer its tokens come from: a folder that loads anywhere."""
        with _with_cache(model):
            super().save(model, folder, rows)
        tokenizer = getattr(rows, "path", None)
        if tokenizer is not None:
            for file in (tokenizer / "tokenizer").iterdir():
                shutil.copyfile(file, folder / file.name)

    def remarks(self, rows: Dataset) -> Sequence[tuple[str, Any, Any, str]]:
        from brimful.tasks.chat_data import remarks

        return remarks(self, rows)

    @property
    def _called(self) -> str:
        return f"{self.name} {self.size}" if self.source is None else self.source

    def _frozen(self, model: Any) -> "nn.Module":
        parts = {
            "none": [],
            "encoder": [block for name, block in model.get_encoder().named_children() if name != "embed_tokens"],
            "encoder+embeddings": [model.get_encoder(), model.get_input_embeddings(), model.get_output_embeddings()],
        }[self.freeze]
        for part in parts:
            part.requires_grad_(False)
        return model

    def _other_tokenizer(self, store: "Store") -> str:
        """What is wrong where the rows were packed with another tokenizer than the model was trained with."""
        if self.source is None or not (Path(self.source) / "tokenizer.json").is_file():
            return ""
        from brimful.data.tokens import TokenizerFacts

        same = TokenizerFacts.read(self.source).fingerprint == store.meta.tokenizer_fingerprint
        return "" if same else f"it was packed with another tokenizer than that of {self.source}"


class Sft(Pretrain):
    """The decoder alone trains, from a model that was trained before."""

    name = "chatlm-sft"
    freezes: ClassVar[Freeze] = "encoder+embeddings"
    learning_rate = 5e-5

    def __init__(self, size: str | None = None, options: ChatOptions | None = None) -> None:
        super().__init__(size, options)
        self._random = options is None or options.random_weights

    def prepare(
        self, data: str, folder: Path, say: Callable[[str], object], like: Dataset | None = None, name: str = "train"
    ) -> str:
        if self.source is None and not self._random:  # said before anything is packed or fitted
            raise BadOption(
                "chatlm-sft fine-tunes a model: name one with --from (a folder, or the run of a chatlm-pretrain); "
                "--random-weights starts from nothing all the same"
            )
        return super().prepare(data, folder, say, like, name)


@contextmanager
def _with_cache(model: Any) -> Iterator[None]:
    """Off in training; whoever loads the model wants to generate with it."""
    configs = [model.config, *([model.generation_config] if model.generation_config else [])]
    before = [config.use_cache for config in configs]
    try:
        for config in configs:
            config.use_cache = True
        yield
    finally:
        for config, use_cache in zip(configs, before, strict=True):
            config.use_cache = use_cache


@cache
def _config(size: str, source: str | None) -> Any:
    """The model's configuration, made or read once."""
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
        use_cache=False,  # a cache is dead weight in training, and blocks recompile without end with one
    )  # fmt: skip


def _model_folder(given: str) -> str:
    from brimful.tasks.model_folder import resolve

    return str(resolve(given))


def _encoded(model: Any, batch: Any) -> dict[str, Any]:
    """What the decoder reads: the encoder's input, or, where nothing of the encoder trains, its output without a graph."""
    import torch

    encoder = model.get_encoder()
    embeddings = {id(param) for param in model.get_input_embeddings().parameters()}
    if any(param.requires_grad for param in encoder.parameters() if id(param) not in embeddings):
        return {"input_ids": batch["input_ids"]}
    with torch.no_grad():
        return {"encoder_outputs": encoder(input_ids=batch["input_ids"], attention_mask=batch["attention_mask"])}


def _padded(rows: Sequence[Any], filler: int) -> "tuple[Tensor, Tensor]":
    """One line a row, filled up to the longest; and where its tokens are."""
    import numpy as np
    import torch

    lengths = np.fromiter(map(len, rows), dtype=np.int64, count=len(rows))
    table = np.full((len(rows), int(lengths.max())), filler, dtype=np.int64)
    there = np.arange(table.shape[1]) < lengths[:, None]
    table[there] = np.concatenate(rows)
    return torch.from_numpy(table), torch.from_numpy(there.astype(np.int64))
