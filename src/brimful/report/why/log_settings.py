"""The settings a log mentions: batch size, accumulation, lengths, vocabulary, precision, …

Trainers print them as `name = value`, `"name": value`, `name: int = 32`, `--name value` or `['--name', 'value']`, under a dozen
names each. They are only read, never guessed: what a log does not say is unknown, and no figure is made from it.
"""

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, fields, replace
from math import prod
from typing import Any

_NAMES: dict[str, tuple[str, ...]] = {
    "micro_batch": (
        "per_device_train_batch_size", "per_gpu_train_batch_size", "train_micro_batch_size_per_gpu", "micro_batch_size",
        "micro_batch", "batch_size_per_gpu", "batch_size_per_device", "per_device_batch_size", "device_batch_size", "batch_size",
    ),
    "eval_batch": ("per_device_eval_batch_size", "per_gpu_eval_batch_size", "eval_batch_size", "val_batch_size"),
    "accumulation": (
        "gradient_accumulation_steps", "accumulate_grad_batches", "grad_accumulation_steps", "gradient_accumulation",
        "accumulation_steps", "grad_accum_steps",
    ),
    "processes": ("num_processes", "world_size", "nproc_per_node", "num_gpus", "n_gpus", "n_gpu"),
    "global_batch": ("global_batch_size", "global_batch", "total_batch_size", "train_batch_size"),
    "lengths": (
        "max_seq_length", "max_seq_len", "seq_length", "seq_len", "sequence_length", "sequence_len", "max_length", "max_len",
        "cutoff_len", "block_size", "context_length", "max_source_length", "max_target_length", "source_length", "target_length",
        "src_len", "tgt_len", "max_tokens",
    ),
    "vocab": ("vocab_size", "n_vocab", "padded_vocab_size"),
    "heads": ("num_attention_heads", "num_heads", "n_heads", "n_head"),
    "hidden": ("hidden_size", "d_model", "n_embd", "embed_dim", "hidden_dim"),
    "feed_forward": ("intermediate_size", "d_ff", "ffn_dim", "n_inner"),
    "parameters": ("num_parameters", "num_params", "n_params", "total_params", "trainable_params"),
    "workers": ("dataloader_num_workers", "num_workers"),
    "image": ("image_size", "img_size", "input_size"),
}  # fmt: skip
"""By field of `Settings`, the most specific name first."""

_FIELD_OF = {name: (field, rank) for field, names in _NAMES.items() for rank, name in enumerate(names)}
_ASSIGNED = re.compile(
    r"""(?<![\w-])(?:--)?([A-Za-z][\w-]*[_-]\w+)['"]?\s*(?::\s*int\s*)?(?:[=:,]\s*|\s+)['"]?(\d[\d,_]*)(?![\d.]*[a-zA-Z%])"""
)
"""Any `name = 12`. An alternation of all names would be tried at every character, which takes ten times as long."""
_BANNER = {
    "micro_batch": re.compile(r"Instantaneous batch size per device = ([\d,]+)"),
    "global_batch": re.compile(r"Total train batch size \([^)]*\) = ([\d,]+)"),
    "accumulation": re.compile(r"Gradient Accumulation steps = ([\d,]+)"),
}
"""What the Hugging Face Trainer prints before the first step."""
_COUNTED = re.compile(
    r"(?P<hf>Number of trainable parameters = (?P<a>[\d,]+))"
    r"|(?P<peft>trainable params: (?P<b>[\d,]+) \|\| all params: (?P<c>[\d,]+))"
    r"|(?P<lightning>(?P<d>[\d.]+) (?P<du>[KMB])\s+(?P<kind>Trainable|Total) params)"
    r"|(?P<nano>number of parameters:? (?P<e>[\d.]+)(?P<eu>[KMB]))"
)
_SHAPE = re.compile(r"torch\.Size\(\[(\d+(?:, \d+){1,3})\]\)")
_PRECISION = re.compile(
    r"(?:mixed_precision|precision|torch_dtype|dtype)['\"]?\s*[=:]\s*['\"]?(?P<named>bf16|fp16|bfloat16|float16|16-mixed|fp32|float32|no\b|32)"
    r"|(?<![\w-])(?:--)?(?P<flag>bf16|fp16)(?P<of>_full_eval|_opt_level|_backend)?['\"]?(?:\s*[=:]\s*|\s+)['\"]?(?P<on>True|true)"
    r"|--(?P<bare>bf16|fp16)(?=['\"]?,? *(?:['\"]?--|\\|\n|$))"
    r"|Using (?P<amp>16bit|bfloat16) Automatic Mixed Precision",
    re.IGNORECASE,
)
_OPTIMIZER = re.compile(
    r"(?:(?<![\w-])(?:--)?optim(?:izer)?(?:_name|_type)?['\"]?\s*(?:[=:]\s*|,\s*|\s+)['\"]?|DeepSpeed (?:Basic|Final) Optimizer = )"
    r"(?P<name>adamw?_?\w*|adafactor|sgd|lion\w*|lomo|galore\w*|paged_\w+|DeepSpeedCPUAdam|FusedAdam)",
    re.IGNORECASE,
)
_CHECKPOINTING = re.compile(r"gradient_checkpointing['\"]?(?:\s*[=:]\s*['\"]?|\s+)(?:True|true|on)|--gradient_checkpointing(?=['\"]?[\s,]*(?:['\"]?--|$))", re.MULTILINE)  # fmt: skip
_GROWING = re.compile(
    r"(?<!setting )PYTORCH_(?:CUDA_|HIP_)?ALLOC_CONF['\"]?\s*[=:,]\s*['\"]?[^\s'\"]*expandable_segments:True"
)
_LIGER = re.compile(r"use_liger_kernel['\"]?\s*[=:]\s*(?:True|true)|[Ll]iger kernel")
_UNITS = {"K": 1e3, "M": 1e6, "B": 1e9}
_PRECISIONS = {
    "bfloat16": "bf16",
    "float16": "fp16",
    "16-mixed": "fp16",
    "16bit": "fp16",
    "no": "fp32",
    "float32": "fp32",
    "32": "fp32",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """What is known of the run. None and empty: not known."""

    micro_batch: int | None = None
    """Rows that go through the model at once, on one card."""
    batches: tuple[int, ...] = ()
    """Every micro-batch the log mentions, the one in effect first: a block may belong to any."""
    eval_batch: int | None = None
    accumulation: int | None = None
    processes: int | None = None
    global_batch: int | None = None
    lengths: tuple[int, ...] = ()
    """Every length the log names as one."""
    sizes: tuple[int, ...] = ()
    """Second dimensions of tensors whose shape the log prints: perhaps lengths."""
    vocab: tuple[int, ...] = ()
    heads: tuple[int, ...] = ()
    hidden: tuple[int, ...] = ()
    feed_forward: tuple[int, ...] = ()
    parameters: int | None = None
    """Of the whole model."""
    trained: int | None = None
    """Weights that are trained, where the log tells them apart."""
    image: int | None = None
    workers: int | None = None
    precision: str | None = None
    """`bf16`, `fp16` or `fp32`."""
    optimizer: str | None = None
    checkpointing: bool = False
    growing_segments: bool = False
    """expandable_segments:True was set."""
    liger: bool = False

    @property
    def rows_per_step(self) -> int | None:
        """The global batch, as printed or from its factors."""
        if self.micro_batch and self.accumulation and self.processes:
            return prod((self.micro_batch, self.accumulation, self.processes))
        return self.global_batch

    def updated(self, known: Mapping[str, Any]) -> "Settings":
        """With what is known from elsewhere, such as a run's plan."""
        names = {one.name for one in fields(self)}
        return replace(
            self, **{name: value for name, value in known.items() if name in names and value not in (None, ())}
        )


def read_settings(texts: Iterable[tuple[int, str]], before: int | None = None) -> Settings:
    """From pieces of a log with their offsets. Of a setting with several values, the last one before `before` holds."""
    found: dict[str, list[tuple[bool, int, int, int]]] = {}
    shapes: list[tuple[int, ...]] = []
    values: dict[str, Any] = {}
    for start, text in texts:
        for match in _ASSIGNED.finditer(text):
            field, rank = _FIELD_OF.get(match[1].lower().replace("-", "_"), (None, 0))
            if field is not None:
                _add(found, field, match[2], start + match.start(), before, rank)
        for field, pattern in _BANNER.items():
            for match in pattern.finditer(text):
                _add(found, field, match[1], start + match.start(), before, -1)
        shapes += (tuple(int(size) for size in match[1].split(", ")) for match in _SHAPE.finditer(text))
        values.update(_parameters(text))
        values.update(_switches(text))
    chosen: dict[str, Any] = {}
    for field, seen in found.items():
        seen.sort(key=lambda one: (not one[0], one[1], -one[2] if one[0] else one[2]))
        numbers = tuple(dict.fromkeys(one[3] for one in seen))
        if field == "micro_batch":
            chosen["batches"] = numbers
        chosen[field] = numbers if field in ("lengths", "vocab", "heads", "hidden", "feed_forward") else numbers[0]
    settings = Settings(**{**chosen, **values})
    for shape in shapes:  # [rows, length] of token ids, [rows, length, vocabulary] of logits
        settings = replace(
            settings,
            batches=tuple(dict.fromkeys((*settings.batches, shape[0]))),
            sizes=tuple(dict.fromkeys((*settings.sizes, *shape[1:2]))),
            vocab=tuple(
                dict.fromkeys((*settings.vocab, *(shape[2:3] if len(shape) == 3 and shape[2] >= 4096 else ())))
            ),
        )
    return _completed(settings)


def _add(
    found: dict[str, list[tuple[bool, int, int, int]]], field: str, text: str, at: int, before: int | None, rank: int
) -> None:
    number = int(text.replace(",", "").replace("_", "") or 0)
    if 0 < number < 10**13:
        found.setdefault(field, []).append((before is None or at < before, rank, at, number))


def _completed(settings: Settings) -> Settings:
    """The number of processes follows from the other factors of the global batch."""
    rows, batch, accumulation = settings.global_batch, settings.micro_batch, settings.accumulation
    if rows and batch and accumulation and not settings.processes and rows % (batch * accumulation) == 0:
        return replace(settings, processes=rows // (batch * accumulation))
    return settings


def _parameters(text: str) -> dict[str, int]:
    counts: dict[str, int] = {}
    for match in _COUNTED.finditer(text):
        if match["hf"]:
            counts["trained"] = int(match["a"].replace(",", ""))
        elif match["peft"]:
            counts["trained"], counts["parameters"] = (int(match[name].replace(",", "")) for name in "bc")
        elif match["lightning"]:
            counts["trained" if match["kind"] == "Trainable" else "parameters"] = int(
                float(match["d"]) * _UNITS[match["du"]]
            )
        else:
            counts["parameters"] = int(float(match["e"]) * _UNITS[match["eu"]])
    return counts


def _switches(text: str) -> dict[str, Any]:
    values: dict[str, Any] = {}
    for match in _PRECISION.finditer(text):
        name = (match["named"] or match["flag"] or match["bare"] or match["amp"]).lower()
        if not match["of"]:
            values["precision"] = _PRECISIONS.get(name, name)
    if optimizers := _OPTIMIZER.findall(text):
        values["optimizer"] = optimizers[-1].lower()
    for name, pattern in (("checkpointing", _CHECKPOINTING), ("growing_segments", _GROWING), ("liger", _LIGER)):
        if pattern.search(text):
            values[name] = True
    return values
