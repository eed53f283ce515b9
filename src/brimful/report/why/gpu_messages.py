"""What a log tells of a full GPU: the settings of the run, the figures of the message, and which tensor did not fit.

**Settings.** Trainers print them as `name = value`, `"name": value`, `name: int = 32`, `--name value` or `['--name', 'value']`, under a
dozen names each. They are only read, never guessed: what a log does not say is unknown, and no figure is made from it.

**Figures.** torch has changed its message with almost every major version, and prints other ones for Macs and with cudaMallocAsync:

    Tried to allocate 20.00 MiB (GPU 0; 10.76 GiB total capacity; 9.71 GiB already allocated; 13.56 MiB free; 9.84 GiB reserved …)
    Tried to allocate 1.23 GiB. GPU 0 has a total capacity of 19.58 GiB of which 1.06 GiB is free. Process 4711 has 2.00 GiB memory
    in use. Including non-PyTorch memory, this process has 16.50 GiB memory in use. Of the allocated memory …

**The block** (`1.23 GiB = 32 × 252 × 40,960 × 4 bytes`, the fp32 logits) is a product of numbers that the log or the run names, so it is
likely the tensor, never certainly. A message rounds twice: torch asks the driver for multiples of 2 MiB (anything up to 1 MiB becomes
2, up to 10 MiB becomes 20), and prints two decimals. So a product may be off by 0.005 of the unit and by 2 MiB. Five numbers give about
twenty products, and one of them has a given size by chance about once in sixty logs (simulated).
"""

import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, fields, replace
from itertools import product
from math import prod
from typing import TYPE_CHECKING, Any

from brimful.units import GiB, KiB, MiB, TiB, show_bytes

if TYPE_CHECKING:
    from brimful.report.why.log_signs import Place

_NAMES: dict[str, tuple[str, ...]] = {
    "micro_batch": (
        "per_device_train_batch_size", "per_gpu_train_batch_size", "train_micro_batch_size_per_gpu", "micro_batch_size",
        "ppo_micro_batch_size_per_gpu", "micro_batch", "batch_size_per_gpu", "batch_size_per_device", "per_device_batch_size", "device_batch_size", "batch_size",
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
    "micro_batch": re.compile(r"(?:Instantaneous batch size per device = |[Tt]okens / micro-batch / rank: )([\d,]+)"),
    "lengths": re.compile(r"[Tt]okens / micro-batch / rank: \d+ x (\d+)"),
    "eval_batch": re.compile(
        r"Running (?:Evaluation|Prediction) \*+\n(?:[^\n]*Num examples[^\n]*\n)?[^\n]*\bBatch size = ([\d,]+)"
    ),
    "global_batch": re.compile(r"Total (?:train )?batch size \([^)]*\) = ([\d,]+)"),
    "accumulation": re.compile(r"(?:Gradient [Aa]ccumulation steps = |gradient accumulation steps: )([\d,]+)"),
}
"""What the Hugging Face Trainer prints before the first step and before an evaluation, and Unsloth and nanochat before the first step."""
_IN_TOKENS = re.compile(r"[Tt]okens? ?(?:/|per) ?$")
_IN_WORDS = re.compile(
    r"(?<![\w-])(?:(?P<of>\w+)[ -])?(?P<name>(?!Batch size = )[Bb]atch size|[Vv]ocab(?:ulary)? size)(?: per (?:device|GPU|gpu|card))?"
    r"(?: ?[=:] ?| )(?P<count>\d[\d,]*)(?![\d.]*[a-zA-Z%])"
)
"""`batch size 32, vocab size: 29298`. The batch size of something else (`total`, `effective`) is another number."""
_COUNTED = re.compile(
    r"(?P<hf>Number of trainable parameters = (?P<a>[\d,]+))"
    r"|(?P<peft>trainable params: (?P<b>[\d,]+) \|\| all params: (?P<c>[\d,]+))"
    r"|(?P<lightning>(?P<d>[\d.]+) (?P<du>[KMB])\s+(?P<kind>Trainable|Total) params)"
    r"|(?P<swift>(?P<f>[\d.]+)M Params \((?P<g>[\d.]+)M Trainable)"
    r"|(?P<unsloth>Trainable parameters = (?P<i>[\d,]+)(?: of |/)(?P<j>[\d,]+))"
    r"|(?P<plain>Number of parameters: (?P<h>[\d,]{4,}))"
    r"|(?P<nano>(?:number of parameters:?|For[A-Z]\w{2,30} contains) (?P<e>[\d.]+)(?P<eu>[KMB])\b)"
)
_SHAPE = re.compile(r"torch\.Size\(\[(\d+(?:, \d+){1,3})\]\)")
_PRECISION = re.compile(
    r"(?:mixed_precision|precision|compute dtype|(?P<weights>torch_dtype|dtype))['\"]?\s*[=:]\s*['\"]?(?:torch\.)?(?P<named>bf16|fp16|bfloat16|float16|16-mixed|fp32|float32|no\b|32)"
    r"|(?<![\w-])(?:--)?(?P<flag>bf16|fp16)(?P<of>_full_eval|_opt_level|_backend)?['\"]?(?:\s*[=:]\s*|\s+)['\"]?(?P<on>True|true)"
    r"|--(?P<bare>bf16|fp16)(?=['\"]?,? *(?:['\"]?--|\\|\n|$))"
    r"|Using (?P<amp>16bit|bfloat16) Automatic Mixed Precision|(?P<unsloth>Bfloat16 = (?:TRUE|FALSE))",
    re.IGNORECASE,
)
_OPTIMIZER = re.compile(
    r"(?:(?<![\w-])(?:--)?optim(?:izer)?(?:_name|_type)?['\"]?\s*(?:[=:]\s*|,\s*|\s+)['\"]?|DeepSpeed (?:Basic|Final) Optimizer = )"
    r"(?P<name>adamw?_?\w*|adafactor|sgd|lion\w*|lomo|galore\w*|paged_\w+|DeepSpeedCPUAdam|FusedAdam)",
    re.IGNORECASE,
)
_CHECKPOINTING = re.compile(r"Will smartly offload gradients|(?:gradient|activation)_checkpointing['\"]?(?:\s*[=:]\s*['\"]?|\s+)(?:True|true|on)|--gradient_checkpointing(?=['\"]?[\s,]*(?:['\"]?--|$))", re.MULTILINE)  # fmt: skip
_GROWING = re.compile(
    r"(?<!setting )PYTORCH_(?:CUDA_|HIP_)?ALLOC_CONF['\"]?\s*[=:,]\s*['\"]?[^\s'\"]*expandable_segments:True"
    r"|expandable_segments not supported on this platform"
)
_ADAPTERS = re.compile(
    r"finetuning_type['\"]?(?:\s*[=:]\s*|\s+)['\"]?(?:q?lora|dora|oft)|Fine-tuning method: (?:Q?LoRA|DoRA|OFT)|\b(?:Lora|Peft)Config\(|PeftModel"
    r"|use_peft['\"]?\s*[=:]\s*['\"]?[Tt]rue|--use_peft\b|--lora_r(?:ank)?[ =]\d|\badapter:\s*q?lora|trainable params: [\d,]+ \|\||LoRAFinetuneRecipe"
)
_QUANTIZED = re.compile(
    r"load_in_(?:4|8)bit['\"]?\s*[=:]\s*['\"]?[Tt]rue|--load_in_(?:4|8)bit\b|quantization_bit['\"]?\s*[=:]\s*['\"]?(?:4|8)\b"
)
_ROLLOUT = re.compile(
    r"rollout[^\n]{0,200}gpu_memory_utilization|vllm_gpu_memory_utilization|use_vllm['\"]?\s*[=:]\s*['\"]?True|--use_vllm\b|vllm_mode"
)
_OFFLOADED = re.compile(
    r"offload_(?:optimizer|param)\w*['\"]?[\s:=.]+\{?[^}\n]{0,80}\bcpu\b|fsdp_offload_params['\"]?\s*[=:]\s*['\"]?[Tt]rue"
)
_SHARDED = re.compile(
    r"zero_(?:optimization_)?stage['\"]?[\s.=:]+[123]|['\"]stage['\"]:\s*[123]|ZeRO[ -](?:stage|Stage)?[ -]?[123]|zero[_-]?[123]\b|ZeroOptimizer_Stage[123]"
    r"|fsdp['\"]?[=:]\s*['\"]?\[[^\]]|--fsdp\b|full_shard|FullyShardedDataParallel|DistributedType\.(?:FSDP|DEEPSPEED)|distributed_type: (?:FSDP|DEEPSPEED)|--use_fsdp|--use_deepspeed"
)
_LIGER = re.compile(r"unsloth_zoo[/\\]fused_losses|use_liger_kernel['\"]?\s*[=:]\s*(?:True|true)|[Ll]iger kernel")
_COUNT_UNITS = {"K": 1e3, "M": 1e6, "B": 1e9}
_PRECISIONS = {
    "bfloat16": "bf16",
    "float16": "fp16",
    "16-mixed": "fp16",
    "16bit": "fp16",
    "no": "fp32",
    "float32": "fp32",
    "32": "fp32",
    "bfloat16 = true": "bf16",
    "bfloat16 = false": "fp16",
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
    """expandable_segments:True was set, or cannot be set on this platform."""
    adapters: bool = False
    """LoRA or the like: most weights are frozen, even where the log counts only those that are trained."""
    quantized: bool = False
    """Frozen weights are in 4 or 8 bits."""
    rollout: bool = False
    """A vLLM generates beside the training, often on the same card."""
    offloaded: bool = False
    """Optimizer state or weights are in host RAM."""
    sharded: bool = False
    """FSDP or ZeRO: a card holds a part of the weights, gradients or optimizer state."""
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
    precisions: list[tuple[bool, str]] = []
    for start, text in texts:
        for match in _ASSIGNED.finditer(text):
            field, rank = _FIELD_OF.get(match[1].lower().replace("-", "_"), (None, 0))
            if field is not None and not _IN_TOKENS.search(text, max(0, match.start() - 12), match.start()):
                _add(found, field, match[2], start + match.start(), before, rank)
        for field, pattern in _BANNER.items():
            for match in pattern.finditer(text):
                _add(found, field, match[1], start + match.start(), before, -1)
        for match in _IN_WORDS.finditer(text):
            field = _field_in_words(match)
            if field is not None:
                _add(found, field, match["count"], start + match.start(), before, len(_NAMES[field]))
        shapes += (tuple(int(size) for size in match[1].split(", ")) for match in _SHAPE.finditer(text))
        values.update(_parameters(text))
        values.update(_switches(text))
        precisions += _precisions(text)
    if precisions:  # what weights are kept in, by the model's config, says less than what is computed in
        values["precision"] = [
            name for computed, name in precisions if computed or not any(one[0] for one in precisions)
        ][-1]
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
                float(match["d"]) * _COUNT_UNITS[match["du"]]
            )
        elif match["swift"]:
            counts["parameters"], counts["trained"] = (int(float(match[name]) * 1e6) for name in "fg")
        elif match["unsloth"]:
            counts["trained"], counts["parameters"] = (int(match[name].replace(",", "")) for name in "ij")
        elif match["plain"]:
            counts["parameters"] = int(match["h"].replace(",", ""))
        else:
            counts["parameters"] = int(float(match["e"]) * _COUNT_UNITS[match["eu"]])
    return counts


_RATE = re.compile(
    r"(?<![\w.])(?:[Ll]earning[_ ][Rr]ate|lr)['\"]?(?:-\w+)?(?:\s*[=:]\s*|\s+)\[?['\"]?(\d[\d.]*(?:[eE][-+]?\d+)?)"
)


def learning_rate(text: str) -> float | None:
    """The largest that the steps of this text have used; without such, the last one that it sets."""
    used, set_to = list[float](), list[float]()
    for line in text.splitlines():
        for match in _RATE.finditer(line):
            (used if re.search(r"\b(?:loss|step)\b", line) else set_to).append(float(match[1].rstrip(".")))
    return max((rate for rate in used if rate > 0), default=next((rate for rate in reversed(set_to) if rate > 0), None))


def _field_in_words(match: re.Match[str]) -> str | None:
    if "ocab" in match["name"]:
        return "vocab"
    of = (match["of"] or "").lower()
    if of.startswith(("eval", "val", "test")):
        return "eval_batch"
    return None if of in ("total", "global", "effective", "overall") else "micro_batch"


def _precisions(text: str) -> list[tuple[bool, str]]:
    """What the log says is computed in (True), or weights are kept in (False)."""
    names = ((match, (match["named"] or match["flag"] or match["bare"] or match["amp"] or match["unsloth"]).lower()) for match in _PRECISION.finditer(text))  # fmt: skip
    return [(match["weights"] is None, _PRECISIONS.get(name, name)) for match, name in names if not match["of"]]


def _switches(text: str) -> dict[str, Any]:
    values: dict[str, Any] = {}
    if optimizers := _OPTIMIZER.findall(text):
        values["optimizer"] = optimizers[-1].lower()
    for name, pattern in (
        ("checkpointing", _CHECKPOINTING), ("growing_segments", _GROWING), ("liger", _LIGER), ("adapters", _ADAPTERS), ("sharded", _SHARDED),
        ("offloaded", _OFFLOADED), ("quantized", _QUANTIZED), ("rollout", _ROLLOUT),
    ):  # fmt: skip
        if pattern.search(text):
            values[name] = True
    return values


_SIZE = re.compile(r"(\d+(?:\.(\d+))?)\s*([KMGT]i?B|[Bb]ytes?|B)\b")
_UNITS = {"k": KiB, "m": MiB, "g": GiB, "t": TiB, "b": 1}
SIZE = r"\d+(?:\.\d+)?\s*(?:[KMGT]i?B|[Bb]ytes?|B)\b"
"""A size as allocators print it, as a regular expression."""
SMALL_BLOCKS = (2 * MiB, 20 * MiB)
"""What torch asks for when less is wanted: these sizes say nothing."""
ROUNDED_TO = 2 * MiB
_ARTICLE = {"fp32": "an", "bf16 or fp16": "a"}
MOST = 3
"""Blocks named at most."""


def size_bytes(text: str) -> int:
    """Of `1.23 GiB`, `768.00 MB` (which MPS means as MiB), `0 bytes`; 0 if it is no size."""
    match = _SIZE.search(text)
    return int(float(match[1]) * _UNITS[match[3][0].lower()]) if match else 0


@dataclass(frozen=True, slots=True)
class Block:
    """A tensor that has the size of the one that did not fit."""

    name: str
    """`the fp32 logits`."""
    kind: str
    """`logits`, `attention`, `activations`, `embedding`, `weights`, `images`."""
    factors: tuple[int, ...]
    element_bytes: int

    @property
    def bytes(self) -> int:
        return prod(self.factors) * self.element_bytes

    def __str__(self) -> str:
        return " × ".join(f"{factor:,}" for factor in (*self.factors, self.element_bytes)) + " bytes"

    def to_json(self) -> dict[str, object]:
        return {
            "name": self.name,
            "factors": list(self.factors),
            "element_bytes": self.element_bytes,
            "bytes": self.bytes,
        }


def bounds(shown: str, *, allocator: bool) -> tuple[int, int] | None:
    """The bytes that a printed size may stand for; None if it says nothing. `allocator`: torch's, which rounds up."""
    match = _SIZE.search(shown)
    if match is None:
        return None
    unit = _UNITS[match[3][0].lower()]
    value, half = float(match[1]) * unit, 0.0 if unit == 1 else 0.5 * unit * 10.0 ** -len(match[2] or "")
    if not allocator:
        return int(value - half), int(value + half)
    if round(value) in SMALL_BLOCKS:
        return None
    return int(value - half) - ROUNDED_TO, int(value + half)


def likely_blocks(limits: tuple[int, int] | None, settings: Settings, phase: str | None = None) -> list[Block]:
    """Tensors of that size, the most plausible first; at most `MOST`."""
    if limits is None or limits[1] < ROUNDED_TO:
        return []
    low, high = limits
    found: dict[str, Block] = {}
    for block in _candidates(settings, phase):
        if low <= block.bytes <= high:
            found.setdefault(block.kind, block)
    favoured = {"optimizer": ("weights", "embedding"), "loss": ("logits",), "attention": ("attention",), "loading": ("weights", "embedding")}.get(phase or "", ())  # fmt: skip
    return sorted(found.values(), key=lambda block: block.kind not in favoured)[:MOST]


def _candidates(settings: Settings, phase: str | None) -> Iterator[Block]:
    batches = settings.batches or ((settings.micro_batch,) if settings.micro_batch else ())
    if phase == "evaluation" and settings.eval_batch:
        batches = (settings.eval_batch, *batches)
    named = tuple(dict.fromkeys((*settings.lengths, *settings.sizes)))
    # A causal model compares each token with the next, so its loss sees one token less.
    lengths = tuple(dict.fromkeys(one for length in named for one in (length, length - 1) if one > 1))
    halves = ((4, "fp32"), (2, "bf16 or fp16"))
    for (size, dtype), rows in product(halves, batches):
        for length, vocab in product(lengths, settings.vocab):
            yield Block(f"the {dtype} logits", "logits", (rows, length, vocab), size)
        for heads, (first, second) in product(settings.heads, product(named, repeat=2)):
            yield Block(f"the {dtype} attention scores of a layer", "attention", (rows, heads, first, second), size)
        for length, width in product(named, settings.feed_forward):
            yield Block(
                f"{_ARTICLE[dtype]} {dtype} activation of a feed-forward layer",
                "activations",
                (rows, length, width),
                size,
            )
        for length, width in product(named, settings.hidden):
            yield Block(f"{dtype} hidden states", "activations", (rows, length, width), size)
        if settings.image:
            yield Block(f"a batch of {dtype} images", "images", (rows, 3, settings.image, settings.image), size)
    for size, dtype in halves:
        for vocab, width in product(settings.vocab, settings.hidden):
            name = f"the {dtype} embedding table, or its gradient or optimizer state"
            yield Block(name, "embedding", (vocab, width), size)
        for count in {settings.parameters, settings.trained} - {None}:
            assert count is not None
            yield Block(
                f"all weights in {dtype} in one piece, or their gradients or optimizer state", "weights", (count,), size
            )
            if settings.processes and settings.processes > 1:
                share = -(-count // settings.processes)
                yield Block(f"one rank's share of all weights in {dtype}, or of their gradients or optimizer state", "weights", (share,), size)  # fmt: skip


MESSAGE_CHARS = 1600
OTHERS_SHARE, OTHERS_BYTES = 0.02, 256 * 2**20
"""From this share of a card and this much on, memory that is not ours is worth naming. Drivers and displays take less."""
CONTEXT_BYTES = 1536 * 2**20
"""Memory that torch does not count: the CUDA context (about 770 MiB on an H200), cuBLAS, NCCL. Messages of torch 1 count it as
used by anyone."""

_PHASES = (
    ("loading", re.compile(r"from_pretrained|load_state_dict|_load_pretrained_model|set_module_tensor_to_device|core_model_loading|torch/serialization\.py|return self\._apply\(convert\)|model\.(?:to|cuda)\(")),
    ("optimizer", re.compile(r"torch/optim/|optimi[sz]er\.step\(|_init_group|bitsandbytes/optim|fused_adam")),
    ("generation", re.compile(r"\.generate\(|generation/utils\.py")),
    ("evaluation", re.compile(r"evaluation_loop|prediction_step|validation_step|nested_concat|\.evaluate\(|_evaluate\(")),
    ("backward", re.compile(r"\.backward\(|_engine_run_backward|autograd/__init__\.py")),
    ("loss", re.compile(r"cross_entropy|log_softmax|nll_loss|logits\.float\(\)|loss_function|ForCausalLMLoss|loss_fct\(")),
    ("attention", re.compile(r"attn_weights|attention_scores|scaled_dot_product_attention|eager_attention_forward")),
    ("forward", re.compile(r"forward_call\(|\.forward\(|_call_impl")),
)  # fmt: skip
_LOADING_BAR = re.compile(r"[Ll]oading (?:\w+ )*(?:checkpoint )?(?:shards|weights)[^\n]*?\b(?P<done>\d+)%")
_BAR = re.compile(r"\d+% ?\||\d+/\d+ \[\d+:\d+|\d+% Completed")
_FRAME = re.compile(r'^\s+File "[^"]+", line \d+', re.MULTILINE)
PHASE_WORDS = {
    "loading": "while the model was loaded",
    "optimizer": "in the optimizer's step",
    "generation": "while it generated text",
    "evaluation": "in an evaluation",
    "backward": "in backward",
    "loss": "in the loss",
    "attention": "in attention",
    "forward": "in forward",
}


def phase_of(place: "Place") -> str | None:
    """By the frames of the traceback right before the message, or by the last progress bar if that is the loader's."""
    trace = place.before[max(0, place.before.rfind("Traceback (most recent call last)")) :]
    if _FRAME.search(trace[-2000:]):
        deepest = "\n".join(trace.splitlines()[-14:])
        for name, pattern in _PHASES:
            if pattern.search(deepest if name in ("loss", "attention", "optimizer", "loading") else trace):
                return name
    bar = next((line for line in reversed(place.before.splitlines()) if _BAR.search(line)), "")
    loading = _LOADING_BAR.search(bar)
    return "loading" if loading and int(loading["done"]) < 100 else None


_TOTAL = re.compile(rf"GPU (\d+) has a total capaci?ty of ({SIZE})(?: of which ({SIZE}) is free)?")
_OLD = re.compile(
    rf"\(\w+\s+(\d+); ({SIZE}) total capacity; ({SIZE}) already allocated; (?:{SIZE} current active; )?(?:({SIZE}) free; )?({SIZE}) (reserved|cached)"
)
_OWN = re.compile(rf"this process has ({SIZE}) memory in use")
_PROCESS = re.compile(rf"Process (\d+) has ({SIZE}) memory in use")
_TENSORS = re.compile(
    rf"Of the allocated memory ({SIZE}) is allocated by PyTorch,(?: with ({SIZE}) allocated in private pools.*?,)? and ({SIZE}) is reserved"
)
_WRAPPED = re.compile(r"(\w+)\s+out\s+of\s+memory\.?\s*$")
"""A terminal may have broken the line before the size."""
_ALLOWED = re.compile(rf"({SIZE}) allowed;")
_ASYNC = {
    "allocated_bytes": re.compile(rf"Currently allocated\s*: ({SIZE})"),
    "wanted_bytes": re.compile(rf"Requested\s*: ({SIZE})"),
    "total_bytes": re.compile(rf"Device limit\s*: ({SIZE})"),
    "free_bytes": re.compile(rf"Free \(according to CUDA\)\s*: ({SIZE})"),
}
_CARD = {"CUDA": "GPU", "HIP": "GPU", "XPU": "XPU", "NPU": "NPU", "MPS": "the Mac's GPU"}


def torch_message(match: re.Match[str], place: "Place") -> dict[str, Any] | None:
    """torch's message, of 0.4 to 2.13, for CUDA, ROCm and XPU."""
    start = match["_device"] or (
        (found := _WRAPPED.search(place.before[-200:] + place.text[: match.start()])) and found[1]
    )
    if not start:
        return None
    text = " ".join(place.text[match.start() :].split())[:MESSAGE_CHARS]
    text = text[: text.find("Tried to allocate", len(match[0])) if text.count("Tried to allocate") > 1 else None]
    figures: dict[str, Any] = {
        "device": "xpu" if start == "platform" else start.lower(),
        "wanted_bytes": size_bytes(match["wanted_size"]),
    }
    if found := _TOTAL.search(text):
        figures |= {"gpu": int(found[1]), "total_bytes": size_bytes(found[2])}
        figures |= {"free_bytes": size_bytes(found[3])} if found[3] else {}
    elif found := _OLD.search(text):
        figures |= {"gpu": int(found[1]), "total_bytes": size_bytes(found[2]), "allocated_bytes": size_bytes(found[3])}
        if found[4]:
            figures["free_bytes"] = size_bytes(found[4])
        pool = size_bytes(found[5])
        figures["unallocated_bytes"] = max(0, pool - figures["allocated_bytes"]) if found[6] == "reserved" else pool
    if found := _TENSORS.search(text):
        figures |= {"allocated_bytes": size_bytes(found[1]), "unallocated_bytes": size_bytes(found[3])}
        if found[2]:
            figures["private_pool_bytes"] = size_bytes(found[2])
    if found := _ALLOWED.search(text):
        figures["limit_bytes"] = size_bytes(found[1])
    figures |= _holders(text, figures)
    return {
        "figures": figures,
        "wanted": match["wanted_size"],
        "phase": phase_of(place),
        "cause": _card_sentence(figures),
    }


def _holders(text: str, figures: Mapping[str, Any]) -> dict[str, Any]:
    """Who has the memory: this process, and others."""
    own = size_bytes(found[1]) if (found := _OWN.search(text)) else None
    card = figures.get("total_bytes") or float("inf")  # in some containers the driver gives sizes of exbibytes
    listed = {int(pid): size for pid, shown in _PROCESS.findall(text) if (size := size_bytes(shown)) <= 1.05 * card}
    ours = figures.get("allocated_bytes", 0) + figures.get("unallocated_bytes", 0)
    if own is None and listed:
        # In a container the driver knows us by another pid: we are the one that has at least what torch holds.
        pid = min(listed, key=lambda pid: (listed[pid] < 0.99 * ours, listed[pid] - ours))
        own = listed.pop(pid) if listed[pid] >= 0.99 * ours else None
    result: dict[str, Any] = {}
    if own is not None:
        result["process_bytes"] = own
    total, free = figures.get("total_bytes"), figures.get("free_bytes")
    others = sum(listed.values())
    if (
        total and free is not None and (own is not None or "unallocated_bytes" in figures)
    ):  # else the pool may hold the rest
        unlisted = total - free - (own if own is not None else ours + CONTEXT_BYTES if ours else total)
        others = max(others, unlisted)
    if others > max(OTHERS_BYTES, OTHERS_SHARE * (total or 0)):
        result["others_bytes"] = others
        if listed:
            result["others"] = [{"pid": pid, "bytes": size} for pid, size in listed.items()]
    return result


def _card_sentence(figures: Mapping[str, Any]) -> str:
    kind = _CARD.get(str(figures.get("device", "")).upper(), "GPU")
    card = (
        f"{kind} {figures['gpu']}"
        if figures.get("gpu") is not None
        else kind
        if kind.startswith("the")
        else f"The {kind}"
    )
    card = card[0].upper() + card[1:]
    wanted = show_bytes(figures["wanted_bytes"])
    total, free, limit = (figures.get(name) for name in ("total_bytes", "free_bytes", "limit_bytes"))
    if limit:
        return f"{card} ran out of memory: {wanted} were wanted, and this process may use only {show_bytes(limit)} of the card."
    if total is None:
        return f"{card} ran out of memory: {wanted} were wanted."
    if figures["wanted_bytes"] > total:
        return f"{card} ran out of memory: {wanted} were wanted in one block, more than the {show_bytes(total)} of the card."
    if free is None:
        return f"{card} ran out of memory: {wanted} were wanted, on a card of {show_bytes(total)}."
    return f"{card} ran out of memory: {wanted} were wanted, {show_bytes(free)} of {show_bytes(total)} were free."


def async_message(match: re.Match[str], place: "Place") -> dict[str, Any] | None:
    """torch's message with backend:cudaMallocAsync, a table over several lines."""
    text = " ".join(place.text[match.start() :].split())[:MESSAGE_CHARS]
    figures: dict[str, Any] = {"device": "cuda"}
    figures |= {name: size_bytes(found[1]) for name, pattern in _ASYNC.items() if (found := pattern.search(text))}
    if match["gpu"]:
        figures["gpu"] = int(match["gpu"])
    wanted = found[1] if (found := _ASYNC["wanted_bytes"].search(text)) else None
    cause = _card_sentence(figures) if wanted else "The GPU ran out of memory."
    return {"figures": figures | _holders(text, figures), "wanted": wanted, "phase": phase_of(place), "cause": cause}


def mps_message(match: re.Match[str], place: "Place") -> dict[str, Any]:
    """torch's message on a Mac. What it calls other allocations are this process's as well: Metal's own, outside of torch's pool."""
    allocated, others, wanted = (size_bytes(match[name]) for name in ("_allocated", "_others", "_wanted"))
    figures: dict[str, Any] = {
        "device": "mps",
        "wanted_bytes": wanted,
        "allocated_bytes": allocated,
        "process_bytes": allocated + others,
    }
    if match["_limit"]:
        figures["total_bytes"] = limit = size_bytes(match["_limit"])
        figures["free_bytes"] = max(0, limit - allocated - others)
    return {"figures": figures, "wanted": match["_wanted"], "phase": phase_of(place), "cause": _card_sentence(figures)}


def plain_message(match: re.Match[str], place: "Place") -> dict[str, Any]:
    """An error of the driver, which also refuses pinned host memory with these words."""
    if re.search(r"pin_memory|cudaHostAlloc|HostAllocator", place.before[-1500:]):
        return {"kind": "host-out-of-memory", "resource": "host", "certainty": "likely", "figures": {"device": None},
                "cause": "The host could not pin more RAM for copies to the GPU. The card itself need not be full."}  # fmt: skip
    cut_off = re.match(r"[^\n]*out of memory\.\s+Tried", place.text)
    return {
        "phase": phase_of(place),
        **({"cause": "The GPU ran out of memory; the message is cut off before its figures."} if cut_off else {}),
    }


_DTYPE_BYTES = {
    "float": 4,
    "float32": 4,
    "half": 2,
    "float16": 2,
    "bfloat16": 2,
    "double": 8,
    "int64": 8,
    "int32": 4,
    "bool": 1,
}


def tensor_message(match: re.Match[str], place: "Place") -> dict[str, Any]:
    """TensorFlow names the tensor, so its size is exact."""
    shape = [int(size) for size in match["shape"].split(",")]
    wanted = _DTYPE_BYTES.get(match["dtype"], 4)
    for size in shape:
        wanted *= size
    factors = " × ".join(f"{size:,}" for size in (*shape, _DTYPE_BYTES.get(match["dtype"], 4)))
    cause = f"The GPU ran out of memory for a tensor of {factors} bytes = {show_bytes(wanted)}."
    return {"figures": {"wanted_bytes": wanted, "shape": shape, "device": "cuda"}, "cause": cause}
