"""The built-in tasks `pretrain` and `sft`: language models of any architecture, from `--model`.

    --model chatlm-base                 a preset: new weights (see `presets`)
    --model DIR | RUN | owner/name      a saved model with its tokenizer (see `model_folder`)

Whether the model is an encoder-decoder or a causal one is read from its configuration. `EncoderDecoder` and `CausalLM` hold
what differs: the rows, the batches, the loss. The rest is here: options, weights, the token store, evaluation, saving.

`pretrain` trains on everything a row has; `sft` on replies alone. The command line reads the options from here, so torch is
imported inside functions only.
"""

import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from copy import deepcopy
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Literal, get_args

from brimful.errors import BadData, BadOption
from brimful.task import Dataset, Loss, Precision, Shape, Task
from brimful.tasks.presets import PRESETS, Preset
from brimful.training.run import RunFolder, is_missing
from brimful.units import is_number

if TYPE_CHECKING:
    import torch
    from tokenizers import Tokenizer
    from torch import nn

    from brimful.data.store import Store
    from brimful.tasks.adapters import Lora
    from brimful.tasks.causal_lm import CausalLM
    from brimful.tasks.encoder_decoder import EncoderDecoder

Freeze = Literal["encoder+embeddings", "encoder", "embeddings", "none"]
TrainOn = Literal["replies", "all"]
LoadIn = Literal["4bit", "8bit"]
ADAPTER_RANK = 16
"""Of the adapters that a message suggests."""
PREVIEWED = 3
"""Rows that are shown when a run begins."""
LORA_RATE, CAUSAL_RATE = 2e-4, 2e-5
"""Learning rates of adapters, and of fine-tuning a causal model."""
BYTES_IN_4BIT = 0.57
"""Of a weight in 4 bits, with its share of the constants."""
TRY_MODEL = f"Try: a model folder, a run, owner/name on the Hugging Face hub, or {', '.join(PRESETS)} for new weights."


@dataclass(frozen=True, kw_only=True)
class LanguageOptions:
    """The options of `pretrain`, and those of `sft`."""

    model: str | None = field(default=None, metadata={"path": True})
    """Model to train: a folder written by save_pretrained, a run or one of its checkpoints, owner/name on the Hugging Face hub,
    or chatlm-base, chatlm-tiny, causal-small or causal-tiny for new weights. Default: chatlm-base for pretrain, none for sft."""
    lora: str | None = None
    """Train low-rank adapters instead of the model's weights, such as r=16,alpha=32,targets=all-linear; add dora for DoRA."""
    load_in: LoadIn | None = None
    """Keep the frozen weights below adapters in 4 or 8 bits (bitsandbytes). 4bit with lora is QLoRA."""
    freeze: Freeze | None = None
    """Part of the model that is not trained. Default: encoder+embeddings for sft of a trained encoder-decoder, else none."""
    label_smoothing: float = 0.0
    """Share of each label that is spread over the vocabulary in training. Evaluation never smooths."""
    tokenizer: str | None = field(default=None, metadata={"path": True})
    """Tokenizer folder for raw DATA. Default: the tokenizer of the model, or a new one trained on DATA for new weights."""
    chat_template: str | None = field(default=None, metadata={"path": True})
    """Jinja file that writes conversations for a causal model, or chatml or plain. Default: the tokenizer's own."""
    train_on: TrainOn | None = None
    """Tokens of a conversation that a causal model is trained on: replies alone or all. Default: replies for sft."""
    columns: str | None = None
    """Columns of raw DATA, such as prompt=question,response=answer. Default: found by name."""
    max_bad: float = 0.0
    """Share of the rows of raw DATA that may be broken or refused by the chat template; they are dropped and counted."""
    max_tokens: str | int | None = None
    """Truncate rows of raw DATA to this many tokens: 1024; for an encoder-decoder 256, or 256,320 for prompt and response.
    Default: 1024, for an encoder-decoder 256, or the preset's."""

    def __post_init__(self) -> None:
        problems = list(self._problems())
        if problems:
            raise BadOption(" ".join(problems))

    def _problems(self) -> Iterator[str]:
        for name, words in (("freeze", Freeze), ("train_on", TrainOn), ("load_in", LoadIn)):
            value = getattr(self, name)
            if value is not None and value not in get_args(words):
                yield f"{name}={value!r} must be one of {', '.join(get_args(words))}."
        share = self.label_smoothing
        if not is_number(share) or not 0 <= share < 1:
            yield f"label_smoothing={share!r} must be at least 0 and below 1."
        if not is_number(self.max_bad) or not 0 <= self.max_bad <= 1:
            yield f"max_bad={self.max_bad!r} must be a share from 0 to 1."
        if self.model is not None and self.model not in PRESETS and (not self.model or is_missing(self.model)):
            yield f"model={self.model!r} does not exist. {TRY_MODEL}"
        if self.tokenizer and is_missing(self.tokenizer):
            yield f"tokenizer={self.tokenizer!r} does not exist. Try: another folder."
        if self.lora is not None and self.freeze not in (None, "none"):
            yield f"lora= cannot be combined with freeze={self.freeze!r}: adapters freeze all weights. Try: one of the two."
        lengths = self.lengths
        if lengths is not None and not (len(lengths) in (1, 2) and all(lengths)):
            yield f"max_tokens={self.max_tokens!r} must be one or two positive numbers, such as 1024 or 256,320."

    @classmethod
    def on_resume(cls, values: dict[str, Any], run: Path) -> dict[str, Any]:
        """The options of a run that continues: a model or tokenizer that is gone is replaced by the run's own copy."""
        store = RunFolder(run).read_request().prepared.get("data")
        copies = {"tokenizer": run / store / "tokenizer" if store else run / "tokenizer"}
        if not values.get("lora"):  # whose run has the adapter alone
            copies["model"] = run / "model"
        return {
            name: str(copies[name]) if name in copies and _is_gone(value) and copies[name].exists() else value
            for name, value in values.items()
        }

    @property
    def lengths(self) -> tuple[int, ...] | None:
        """`max_tokens` as numbers; 0 stands for what is not a positive number."""
        if self.max_tokens is None:
            return None
        return tuple(int(part) if part.strip().isdecimal() else 0 for part in str(self.max_tokens).split(","))


@dataclass(frozen=True, kw_only=True)
class SftOptions(LanguageOptions):
    """The options of `sft`, which has no model by default."""

    def _problems(self) -> Iterator[str]:
        if self.model is None:
            yield f"sft needs a model to fine-tune, and model= is missing. {TRY_MODEL}"
        yield from super()._problems()


class Pretrain(Task):
    """Trains on all tokens of each row: whole texts for a causal model, responses for an encoder-decoder."""

    name = "pretrain"
    Options = LanguageOptions
    options: LanguageOptions
    precision: Precision = "auto"
    learning_rate = 3e-4
    default_model: ClassVar[str] = "chatlm-base"
    fine_tunes: ClassVar[bool] = False
    trains_on: TrainOn = "all"
    """The tokens of a conversation that a causal model is trained on, unless `--train-on` says otherwise."""
    reads_pairs: ClassVar[bool] = False
    """Whether rows are prompts with two replies, one of which is preferred."""
    scores: Sequence[str] | None = ("bleu", "chrf")
    continues_adapters: ClassVar[bool] = True
    """Whether the adapter that `--model` names is trained further, beside its base."""

    def __init__(self, options: LanguageOptions | None = None) -> None:
        super().__init__(options)
        model = self.options.model or self.default_model
        self.preset: Preset | None = PRESETS.get(model)
        """The preset that `--model` names; None for a saved model."""
        self.source = None if self.preset else _resolved(model)
        """The folder of the saved model; None for new weights."""
        self.adapter: Path | None = None
        """The saved adapter that training continues with."""
        if self.source is not None:
            self._check_source(self.source)
        self.config = _config(self.source or model)
        self.family = self._family()
        self.family.check(self.options)
        if self.freeze not in self.family.parts:
            raise BadOption(
                f"freeze={self.freeze!r} is not a part of a {self.config.model_type} model. Try: {', '.join(self.family.parts)}."
            )
        self.max_tokens: Shape = self._max_tokens()
        self.worst_shape = self.max_tokens
        self.chunked_loss = self.family.chunked_loss
        self.family.longest = self.max_tokens[0]
        self.global_batch = self.preset.global_batch if self.preset else 64 if self.family.causal else 256
        self.learning_rate = self._learning_rate()
        self.work_follows_shape = not (self.fine_tunes and self.family.causal)  # only replies have logits
        self.lora = self._lora()

    @property
    def freeze(self) -> str:
        """The part of the model that is not trained."""
        fine_tuned = self.family.fine_tuned if self.fine_tunes and self.preset is None and not self._adapts else "none"
        return self.options.freeze or fine_tuned

    def model(self) -> "nn.Module":
        if self.lora is not None:
            from brimful.tasks.adapters import new_base, with_adapter

            return with_adapter(new_base(deepcopy(self.config), self.load_in, self.base_dtype), self.lora)
        return self._frozen(self._new_weights())

    def initial_model(self) -> "nn.Module":
        if self.source is None:
            return self.model()
        if self.lora is not None:
            from brimful.tasks.adapters import find_base, load_base, load_weights, with_adapter

            base = self.source if self.adapter is None else find_base(self.adapter)
            model = with_adapter(load_base(base, self.load_in, dtype=self.base_dtype), self.lora)
            return model if self.adapter is None else load_weights(model, self.adapter)
        from brimful.tasks.model_folder import load_model

        model = load_model(self.source)
        model.config.use_cache = False
        return self._frozen(model)

    def loss(self, model: "nn.Module", batch: Any) -> Loss:
        return self.family.loss(model, batch, self.options.label_smoothing if model.training else 0.0)

    def shape(self, row: Any) -> Shape:
        return self.family.shape(row)

    def collate(self, rows: Sequence[Any]) -> Any:
        return self.family.collate(rows)

    def pack(self, rows: Sequence[Any], tokens: Shape) -> Any:
        return self.family.pack(rows, tokens)

    @property
    def packs(self) -> bool:
        return self.family.why_not_packed is None

    @property
    def why_not_packed(self) -> str | None:  # type: ignore[override]
        return self.family.why_not_packed

    def compiling(self, model: "nn.Module", on: bool) -> bool:
        return self.family.compile_blocks(model, on)

    def dummy_row(self, shape: Shape) -> Any:
        return self.family.dummy_row(shape)

    def prepare(
        self, data: str, folder: Path, progress: Callable[[str], object], like: Dataset | None = None, name: str = "train"
    ) -> str:  # fmt: skip
        """The path of a token store: `data` itself, or raw files tokenized into `folder`."""
        from brimful.tasks.token_stores import token_store

        return token_store(self, data, folder, progress, like=like, name=name)

    def rows(self, data: str) -> "Store":
        """A token store whose rows this task reads and whose tokens the model knows."""
        from brimful.data.store import Store
        from brimful.tasks.model_folder import text_config

        store, config = Store.open(data), text_config(self.config)
        problems = []
        if store.fields not in self.family.fields:
            problems.append(f"its rows have {' and '.join(store.fields)}, not {' and '.join(self.family.fields[0])}")
        if store.meta.vocab_size > config.vocab_size:
            problems.append(f"its tokenizer has {store.meta.vocab_size:,} tokens and the model {config.vocab_size:,}")
        eos = config.eos_token_id if isinstance(config.eos_token_id, list) else [config.eos_token_id]
        if not self.family.causal and store.meta.eos_id not in eos:
            problems.append(f"its eos id is {store.meta.eos_id} and the model's {', '.join(map(str, eos))}")
        if self.positions is not None and max(store.longest) > self.positions and self._has_position_table():
            problems.append(
                f"its longest row has {max(store.longest):,} tokens and the model {self.positions:,} positions"
            )
        if self._has_other_tokenizer(store):
            problems.append(f"it was made with another tokenizer than {self.source}")
        if problems:
            model = self.options.model or self.default_model
            raise BadData(
                f"{data} cannot train {self.name}: {' and '.join(problems)}. Try: the raw files, or "
                + (
                    f"`brimful data tokenize FILES --model {model} --output STORE`."
                    if self.source is not None
                    else f"rows tokenized with the tokenizer made by `brimful data tokenizer --model {model}`."
                )
            )
        return store

    def alternatives(self) -> Sequence[tuple[str, int]]:
        """Adapters, and 4 bits below them: what they hold, counted from the layers."""
        if self.source is None or self.load_in:
            return ()
        import torch
        from torch import nn

        with torch.device("meta"):
            model = self._new_weights()
        head = model.get_output_embeddings()
        layers = [part for part in model.modules() if isinstance(part, nn.Linear) and part is not head]
        weights, linear = model.num_parameters(), sum(layer.weight.numel() for layer in layers)
        rank = ADAPTER_RANK if self.lora is None else self.lora.r
        adapter = 16 * rank * sum(layer.in_features + layer.out_features for layer in layers)
        lora, in_4bit = f"lora='r={rank}'", "load_in='4bit'"
        full = [] if self._adapts else [(lora, 2 * weights + adapter)]
        way = in_4bit if self.adapter is not None else f"{lora} with {in_4bit}"
        return [*full, (way, 2 * (weights - linear) + round(BYTES_IN_4BIT * linear) + adapter)]

    def memory_options(self) -> Sequence[Mapping[str, Any]]:
        """Parts to freeze. Of a saved model also adapters, and 4 bits below them."""
        parts = [] if self._adapts else [part for part in self.family.parts if part != self.freeze]
        found: list[dict[str, Any]] = [{"freeze": part} for part in parts]
        if self.source is not None and find_spec("peft"):
            lora = {} if self._adapts else {"lora": f"r={ADAPTER_RANK}", "freeze": None}
            found += [lora] if lora else []
            if self.load_in is None and find_spec("bitsandbytes"):
                found.append({**lora, "load_in": "4bit"})
        return found

    def remarks(self, rows: Dataset) -> Sequence[tuple[str, Any, Any, str]]:
        from brimful.tasks.token_stores import remarks

        own = [] if self.adapter is None else [("adapter", self.options.model, str(self.lora), self._continued())]
        return [*own, *remarks(self, rows)]

    def _continued(self) -> str:
        from brimful.tasks.adapters import base_of

        assert self.adapter is not None
        bits = f" in {self.load_in[0]} bits" if self.load_in else ""
        return f"the adapter of {self.options.model} is trained further, beside its base {base_of(self.adapter)}{bits}"

    def preview(self, rows: Dataset) -> Sequence[Sequence[tuple[str, bool | str]]]:
        """The first three rows of a token store, decoded by its own tokenizer."""
        from brimful.data.store import Store
        from brimful.data.tokenizer.folder import load_tokenizer

        if not isinstance(rows, Store):
            return ()
        tokenizer = load_tokenizer(rows.path / "tokenizer")
        return [self.row_texts(tokenizer, rows[number]) for number in range(min(PREVIEWED, len(rows)))]

    def row_texts(self, tokenizer: "Tokenizer", row: Any) -> Sequence[tuple[str, bool | str]]:
        """A row as text, divided where training begins and ends."""
        return [(tokenizer.decode(ids, skip_special_tokens=False), on) for ids, on in self.family.pieces(row)]

    def evaluate(self, model: "nn.Module", rows: Any, context: Any) -> Mapping[str, float]:
        from brimful.tasks.chat_scores import evaluate_in_training

        return evaluate_in_training(model, rows, context)

    def save(self, model: "nn.Module", folder: Path, rows: Dataset) -> None:
        """The model with its tokenizer, in one folder that transformers can load."""
        if self.lora is not None:
            from brimful.tasks import adapters

            adapters.save(model, folder)
        else:
            with _cache_enabled(model):
                super().save(model, folder, rows)
        store = getattr(rows, "path", None)
        if store is not None:
            for file in (store / "tokenizer").iterdir():
                shutil.copyfile(file, folder / file.name)
            if self.family.causal and self.lora is None:
                from brimful.tasks.export import add_end_ids

                add_end_ids(folder)

    def _family(self) -> "CausalLM | EncoderDecoder":
        from brimful.tasks.model_folder import is_causal

        if not is_causal(self.config):
            from brimful.tasks.encoder_decoder import EncoderDecoder

            return EncoderDecoder(self.config)
        from brimful.tasks.causal_lm import CausalLM

        return CausalLM(self.config)

    def _lora(self) -> "Lora | None":
        """The adapters that are trained, if any. Their base is frozen in the precision that it computes in."""
        from brimful.tasks.adapters import Lora, check_packages, lora_of, trained_weights

        if not self._adapts:
            check_packages(None, self.options.load_in)
            return None
        lora = Lora.parse(self.options.lora or "") if self.adapter is None else lora_of(self.adapter)
        freeze = self.options.freeze if self.options.freeze != "none" else None
        for name, value in (("lora", self.options.lora), ("freeze", freeze)):
            if self.adapter is not None and value is not None:
                raise BadOption(
                    f"model={self.options.model!r} is an adapter, which is trained further as it is ({lora}), so "
                    f"{name}={value!r} has no effect. Try: without {name}=, or merge the adapter with brimful export --merge first."
                )
        if self.source is None:
            raise BadOption(
                f"model={self.options.model!r} has new weights, which are not saved with adapters, so lora= would train for nothing. "
                "Try: a model folder."
            )
        check_packages(lora, self.load_in)
        self.trained_weights = trained_weights  # type: ignore[method-assign]
        return lora

    @property
    def _adapts(self) -> bool:
        return self.options.lora is not None or self.adapter is not None

    @property
    def load_in(self) -> LoadIn | None:
        """The bits of the base below adapters: for one that is trained further, those that it was trained with."""
        if self.adapter is None or self.options.load_in is not None:
            return self.options.load_in
        from brimful.tasks.adapters import trained_in

        return trained_in(self.adapter)

    def _check_source(self, folder: str) -> None:
        """What can be told of a saved model before its weights are read. Of an adapter without a tokenizer, that of its
        base is used."""
        from brimful.data.tokenizer.folder import MODEL_FILE
        from brimful.tasks.model_folder import check_shards, is_adapter

        check_shards(Path(folder))
        if not is_adapter(Path(folder)):
            return
        if self.continues_adapters:
            self.adapter = Path(folder)
        if not (Path(folder) / MODEL_FILE).is_file():
            from brimful.tasks.adapters import find_base

            self.source = str(find_base(Path(folder)))

    def use_device(self, device: "torch.device", precision: Precision | None) -> None:
        """Frozen weights below adapters are in bf16 if the model was saved in 16 bits, or is quantized now, and computes in
        bf16: as requested, or by default on a GPU."""
        import torch

        if self.lora is None:
            return
        in_16_bits = self.config.dtype in (torch.bfloat16, torch.float16) or self.load_in
        on_gpu = device.type == "cuda" and torch.cuda.is_bf16_supported(including_emulation=False)
        computes_in_bf16 = precision == "bf16" or (precision in (None, "auto") and on_gpu)
        self.base_dtype = torch.bfloat16 if in_16_bits and computes_in_bf16 else torch.float32
        self.precision = "bf16" if self.base_dtype is torch.bfloat16 else type(self).precision

    base_dtype: "torch.dtype | None" = None
    """Of frozen weights below adapters; float32 by default."""

    def _learning_rate(self) -> float:
        """What is usual for adapters, and for fine-tuning all weights of a causal model."""
        if self._adapts:
            return LORA_RATE
        return (
            CAUSAL_RATE if self.fine_tunes and self.family.causal and self.preset is None else type(self).learning_rate
        )

    def _longest(self) -> Shape:
        """The lengths of the preset or the saved model, unless the user says otherwise."""
        if self.preset is not None:
            return self.preset.worst_shape
        positions = self.positions
        if not self.family.causal or positions is None:
            return self.family.lengths
        return tuple(min(length, positions) for length in self.family.lengths)

    @property
    def positions(self) -> int | None:
        """The tokens of a row that the model was made for, as far as its configuration tells."""
        positions = getattr(self.config.get_text_config(), "max_position_embeddings", None)
        return positions if isinstance(positions, int) else None

    def _max_tokens(self) -> Shape:
        lengths, longest = self.options.lengths, self._longest()
        if lengths is None:
            return longest
        if self.family.causal and len(lengths) > 1:
            raise BadOption(
                f"max_tokens={self.options.max_tokens!r} has two numbers, and a row of a causal model is one sequence. "
                f"Try: {sum(lengths)}."
            )
        if self.positions is not None and max(lengths) > self.positions and self._has_position_table():
            raise BadOption(
                f"max_tokens={self.options.max_tokens!r} is more than the {self.positions:,} positions that this "
                f"{self.config.model_type} model has an embedding for. Try: {self.positions}."
            )
        return lengths * len(longest) if len(lengths) == 1 else lengths

    def _has_position_table(self) -> bool:
        """Whether positions are embedded, as in GPT-2: there are no more. Rotary ones go on, untrained."""
        import torch
        from torch import nn

        with torch.device("meta"):
            model = self._new_weights()
        tables = [
            part.num_embeddings
            for part in model.modules()
            if isinstance(part, nn.Embedding) and part is not model.get_input_embeddings()
        ]
        return self.positions is not None and any(
            0 <= rows - self.positions <= 2 for rows in tables
        )  # OPT has two more

    def _new_weights(self) -> Any:
        """The whole model in float32, as `initial_model` loads it, whatever its files are in. transformers writes the dtype
        into the configuration that it is given, so that is a copy."""
        import torch

        from brimful.tasks.model_folder import model_class

        return model_class(self.config).from_config(deepcopy(self.config), dtype=torch.float32)

    def _frozen(self, model: Any) -> "nn.Module":
        self.family.freeze(model, self.freeze)
        return model

    def _has_other_tokenizer(self, store: "Store") -> bool:
        if self.source is None or not (Path(self.source) / "tokenizer.json").is_file():
            return False
        from brimful.data.tokenizer.folder import TokenizerFacts

        return TokenizerFacts.read(self.source).fingerprint != store.meta.tokenizer_fingerprint


class Sft(Pretrain):
    """Fine-tunes a model on conversations, or on prompts and responses: it learns the replies."""

    name = "sft"
    Options = SftOptions
    learning_rate = 5e-5
    fine_tunes: ClassVar[bool] = True
    trains_on: TrainOn = "replies"


def _is_gone(model: str) -> bool:
    return model not in PRESETS and not Path(model).exists()


def _resolved(model: str) -> str:
    from brimful.tasks.model_folder import resolve

    return str(resolve(model))


def _config(model: str) -> Any:
    """The configuration of a preset or of a model folder, which may have been saved again since it was read."""
    if model in PRESETS:
        config = PRESETS[model].config()
    else:
        from brimful.tasks.model_folder import read_config

        config = read_config(model)
    config.use_cache = False  # useless in training; compiled blocks would recompile for every length of it
    return config


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
