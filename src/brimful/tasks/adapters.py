"""LoRA, DoRA and QLoRA: small trainable matrices beside the frozen layers of a base model, which may be held in 4 or 8 bits.

    load_base ──► with_adapter ──► training ──► save ──► merge
    every weight  base frozen,     checkpoints  PEFT's   into the unquantized base, as a plain model folder
    or 4/8 bits   adapter fp32     of the       folder
                                   adapter

PEFT makes the adapters and bitsandbytes the 4-bit (nf4, double quantization) and 8-bit weights. What PEFT's
`prepare_model_for_kbit_training` does beyond freezing is left out: it turns embeddings, head and norms into float32, 2 GiB
more for a vocabulary of 128,000 at width 4,096, and norms compute in float32 anyway. Nor do inputs need to require
gradients, since Brimful's gradient checkpointing is not re-entrant.

**Which base.** An adapter is useless with another base, and PEFT's files do not identify theirs: it loads without an error if the
shapes agree. `brimful_base.json` beside the adapter has a fingerprint of the base's files (`fingerprint`), and `merge` and
`load_adapter` refuse another. It covers names, shapes, dtypes and content of all tensors, not their division into files, so a copy
with other shards is the same base.

The command line reads the options of tasks, so torch, peft and bitsandbytes are imported inside functions only.
"""

import hashlib
import json
import logging
import os
import re
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import asdict, dataclass, fields
from functools import partial
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from brimful.errors import BadModel, BadOption, MissingExtra, in_one_line
from brimful.files import file_sha256, parse_object, read_json, sha256
from brimful.tasks.export import stored_tensors, write_model
from brimful.tasks.model_folder import (
    as_bad_model,
    check_hashes,
    count_tensors,
    is_adapter,
    model_class,
    quiet,
    read_config,
    read_weights,
    resolve,
)
from brimful.training.checkpoint import Checkpoints

if TYPE_CHECKING:
    import torch
    from torch import nn

LoadIn = Literal["4bit", "8bit"]
ALL_LINEAR = "all-linear"
ADAPTER_CONFIG, ADAPTER_WEIGHTS, BASE = "adapter_config.json", "adapter_model.safetensors", "brimful_base.json"
HASHED_BYTES = 10**9
"""A base up to this size is hashed whole, in about 0.7 s; of a larger one, 64 KiB of each tensor from 16 places."""
SAMPLE_BYTES, SAMPLES = 1 << 16, 16
NOT_CONTINUED = (
    "modules_to_save", "rank_pattern", "alpha_pattern", "layers_to_transform", "layer_replication", "target_parameters",
    "exclude_modules", "trainable_token_indices", "bias", "fan_in_fan_out",
)  # fmt: skip
"""What an adapter of PEFT may have besides, and `with_adapter` does not make."""
WORDS = {"on": True, "true": True, "yes": True, "off": False, "false": False, "no": False}


@dataclass(frozen=True)
class Lora:
    """What `--lora` says: the shape of the adapters and the layers that have one."""

    r: int = 16
    """The rank of an adapter."""
    alpha: float = 32
    """Adapters are scaled by alpha / r, or by alpha / √r with `rslora`."""
    targets: str | tuple[str, ...] = ALL_LINEAR
    """`all-linear`, which leaves the output head out, or names of layers such as q_proj."""
    dropout: float = 0.0
    """Of the inputs of adapters."""
    dora: bool = False
    """Train the length of each weight's rows as well."""
    rslora: bool = False

    def __post_init__(self) -> None:
        problems = []
        if type(self.r) is not int or self.r < 1:
            problems.append(f"'r={self.r!r}' must be a whole number of at least 1.")
        if not isinstance(self.alpha, (int, float)) or not 0 < self.alpha < float("inf"):
            problems.append(f"'alpha={self.alpha!r}' must be a number above 0.")
        if not isinstance(self.dropout, (int, float)) or not 0 <= self.dropout < 1:
            problems.append(f"'dropout={self.dropout!r}' must be at least 0 and below 1.")
        if self.targets != ALL_LINEAR and (isinstance(self.targets, str) or not self.targets or "" in self.targets):
            problems.append(
                f"targets must be {ALL_LINEAR} or names of layers, such as q_proj+v_proj, not {self.targets!r}."
            )
        if problems:
            raise BadOption(f"lora: {' '.join(problems)}")

    @classmethod
    def parse(cls, text: str) -> "Lora":
        """`r=16,alpha=32,targets=q_proj+v_proj,dropout=0.05,dora`; empty or `on` is the default.

        >>> Lora.parse("r=8,targets=q_proj+v_proj,dora")
        Lora(r=8, alpha=32, targets=('q_proj', 'v_proj'), dropout=0.0, dora=True, rslora=False)
        """
        values: dict[str, Any] = {}
        for part in (part.strip() for part in ("" if text.strip() == "on" else text).split(",")):
            name, equals, value = (piece.strip() for piece in part.partition("="))
            if not part:
                if text.strip() and text.strip() != "on":
                    raise BadOption(f"lora={text!r} has an empty part. Try: 'r=16,alpha=32,targets={ALL_LINEAR}'.")
            elif name.isdecimal() and not equals and "r" not in values:
                values["r"] = int(name)
            elif name not in (one.name for one in fields(cls)):
                names = ", ".join(one.name for one in fields(cls))
                raise BadOption(f"lora={text!r} has the unknown word {name!r}. Try: {names}.")
            elif name in values:
                raise BadOption(f"lora={text!r} has {name} twice. Try: one of the two.")
            elif not equals and name not in ("dora", "rslora"):
                raise BadOption(f"lora={text!r} has {name} without a value. Try: '{name}={getattr(cls, name)}'.")
            else:
                values[name] = _value(text, name, value if equals else "on")
        return cls(**values)

    def __str__(self) -> str:
        """As `parse` reads it. Of a saved adapter, which names each layer with its path, the kinds of layers."""
        kinds = dict.fromkeys(one.rpartition(".")[2] for one in self.targets)
        targets = self.targets if isinstance(self.targets, str) else "+".join(kinds)
        parts = [f"r={self.r}", f"alpha={self.alpha:g}", f"targets={targets}"]
        parts += [f"dropout={self.dropout:g}"] if self.dropout else []
        return ",".join([*parts, *(name for name in ("dora", "rslora") if getattr(self, name))])


def _value(text: str, name: str, value: str) -> Any:
    if name in ("dora", "rslora"):
        if value.lower() in WORDS:
            return WORDS[value.lower()]
        raise BadOption(f"lora={text!r} has '{name}={value}', which must be on or off.")
    if name == "targets":
        return value if value == ALL_LINEAR else tuple(one.strip() for one in value.split("+"))
    kind, words = (int, "a whole number") if name == "r" else (float, "a number")
    try:
        number = kind(value)
    except ValueError:
        raise BadOption(f"lora={text!r} has '{name}={value}', which must be {words}.") from None
    return int(number) if name == "alpha" and float(number).is_integer() else number


def check_packages(lora: Lora | None, load_in: LoadIn | None) -> None:
    """Before anything is read or trained: is what these need installed?"""
    for name in (
        "bitsandbytes",
        "bitsandbytes.autograd._functions",
        "bitsandbytes.backends.cpu.ops",
    ):  # PEFT imports it too, where it is installed
        logging.getLogger(name).setLevel(logging.ERROR)  # it remarks on every product that it casts its inputs
    if load_in not in (None, "4bit", "8bit"):
        raise BadOption(f"load_in={load_in!r} must be 4bit or 8bit.")
    if load_in is not None and lora is None:
        raise BadOption(
            f"load_in={load_in!r} needs an adapter, since weights of {load_in[0]} bits cannot be trained. Try: lora='r=16', or the model= of an adapter."
        )
    if lora is not None and lora.dora and load_in == "8bit":
        raise BadOption("lora: dora does not work with weights of 8 bits. Try: load_in='4bit', or without dora.")
    needed = {"peft": "lora"} | ({} if load_in is None else {"bitsandbytes": "eightbit"})
    missing = [package for package in needed if lora is not None and find_spec(package) is None]
    if missing:
        raise MissingExtra(" and ".join(missing), ",".join(needed[package] for package in missing))
    for package in needed if lora is not None else ():
        try:
            import_module(package)
        except Exception as error:
            raise BadOption(
                f"{package} is installed and cannot be imported ({in_one_line(error)}). Try: install it again."
            ) from None


def with_adapter(model: Any, lora: Lora) -> Any:
    """The model with an adapter beside each target: the base frozen in its own dtype, the adapter in float32."""
    check_packages(lora, None)
    import peft
    from peft.tuners.lora import LoraLayer

    kind = "SEQ_2_SEQ_LM" if model.config.is_encoder_decoder else "CAUSAL_LM"
    shape: dict[str, Any] = {"r": lora.r, "lora_alpha": lora.alpha, "lora_dropout": lora.dropout}
    config = peft.LoraConfig(
        task_type=kind, target_modules=_targets(model, lora), use_dora=lora.dora, use_rslora=lora.rslora, **shape
    )
    adapted: Any = peft.get_peft_model(model, config)
    for name, param in adapted.named_parameters():
        param.requires_grad_("lora_" in name)
    if not lora.dora:  # whose norms are computed in the precision of the input
        for part in adapted.modules():
            if isinstance(part, LoraLayer):
                part._cast_input_dtype = partial(_adapter_input, part)  # type: ignore[method-assign]
    kept = set(getattr(model, "_keep_in_fp32_modules_strict", None) or ())
    adapted._keep_in_fp32_modules_strict = kept | _adapter_parts(adapted)  # `weights="bf16"` is for the base
    return adapted


def _adapter_input(layer: Any, x: Any, dtype: "torch.dtype") -> Any:
    """What the adapter of a layer is given. PEFT makes it float32, and autocast bf16 again: each of q, k and v then keeps a copy of
    its own for backward, where one is enough."""
    import torch

    if x is not None and torch.is_autocast_enabled(x.device.type):
        return x
    return type(layer)._cast_input_dtype(layer, x, dtype)


def _adapter_parts(model: Any) -> set[str]:
    """`lora_A`, `lora_B` …: names that only weights of adapters have."""
    return {part for name, _ in model.named_parameters() for part in name.split(".") if part.startswith("lora_")}


def _targets(model: Any, lora: Lora) -> str | list[str]:
    if isinstance(lora.targets, str):
        return lora.targets
    from torch import nn
    from transformers.pytorch_utils import Conv1D

    layers = [name for name, part in model.named_modules() if isinstance(part, (nn.Linear, Conv1D))]
    known = sorted({name.rpartition(".")[2] for name in layers})
    for target in lora.targets:
        matching = [name for name in layers if name == target or name.endswith(f".{target}")]
        if not matching:
            raise BadOption(
                f"lora: the model has no linear layer called {target!r}. Try: {ALL_LINEAR}, or some of {', '.join(known)}."
            )
        head = model.get_output_embeddings()
        tied = head is not None and head.weight is getattr(model.get_input_embeddings(), "weight", None)
        if tied and any(model.get_submodule(name) is head for name in matching):
            raise BadOption(
                f"lora: {target!r} shares its weight with the embedding, so an adapter of it cannot be merged. Try: {ALL_LINEAR}."
            )
    return list(lora.targets)


def lora_of(adapter: Path) -> Lora:
    """The shape of a saved adapter, for training to continue with it. One that `with_adapter` cannot make is refused."""
    config = _read_adapter(adapter)
    with as_bad_model(adapter, ADAPTER_CONFIG):
        targets = config["target_modules"]
        lora = Lora(
            r=config["r"], alpha=config["lora_alpha"], dropout=config.get("lora_dropout") or 0.0,
            targets=targets if targets == ALL_LINEAR else tuple(targets) if isinstance(targets, list) else (targets,),
            dora=bool(config.get("use_dora")), rslora=bool(config.get("use_rslora")),
        )  # fmt: skip
    other = [name for name in NOT_CONTINUED if config.get(name) not in (None, False, {}, [], "none")]
    if config.get("peft_type") != "LORA" or other or isinstance(targets, str):
        what = f"has {other[0]}" if other else f"is of the kind {config.get('peft_type')} with targets {targets!r}"
        raise BadModel(
            f"{adapter} {what}, so it cannot be trained any further. "
            f"Try: brimful export {adapter} --merge --output DIR, then model= with that folder."
        )
    return lora


def load_weights(model: Any, adapter: Path) -> Any:
    """The model, whose adapter gets the weights of a saved one of the same shape."""
    import safetensors.torch

    check_hashes(adapter)
    with as_bad_model(adapter, ADAPTER_WEIGHTS):
        weights = safetensors.torch.load_file(adapter / ADAPTER_WEIGHTS)
    named = {_name_in_model(name): tensor for name, tensor in weights.items()}
    own = {name for name, _ in model.named_parameters() if "lora_" in name}
    mismatched = [name for name in named if name in own and named[name].shape != model.get_parameter(name).shape]
    problems = (
        count_tensors(named.keys() - own, "not in the model"),
        count_tensors(own - named.keys(), "missing"),
        count_tensors(mismatched, "of another shape"),
    )
    if any(problems):
        raise BadModel(
            f"the weights of the adapter {adapter} do not match its base: {', '.join(filter(None, problems))}. "
            "Try: another checkpoint."
        )
    model.load_state_dict(named, strict=False)
    return model


def is_adapted(model: Any) -> bool:
    return hasattr(model, "peft_config")


def trained_weights(model: "nn.Module") -> Collection[str] | None:
    """For `Task.trained_weights`: the adapter's weights, or None for a model without one."""
    if not is_adapted(model):
        return None
    return [name for name, param in model.named_parameters() if param.requires_grad]


@dataclass(frozen=True, kw_only=True)
class Base:
    """brimful_base.json: the model that an adapter was trained beside."""

    path: str
    fingerprint: str
    """Of its files: see `fingerprint`."""
    load_in: LoadIn | None
    dtype: str
    version: int = 1


def load_base(
    folder: str | Path, load_in: LoadIn | None = None, device: "torch.device | str | None" = None,
    dtype: "torch.dtype | None" = None,
) -> Any:  # fmt: skip
    """The model with every weight of the folder, in 4 or 8 bits if asked, to be given to `with_adapter`.

    Args:
        folder: A model folder, a run, or what else `model_folder.resolve` knows.
        load_in: "4bit" or "8bit" for the linear layers; the head and embeddings stay as they are.
        device: Where weights are read to, and quantized. Default: torch's default device.
        dtype: Of weights that are not quantized, and of computations with those that are. Default: float32.
    """
    import torch

    path, dtype = resolve(folder), dtype or torch.float32
    place = torch.device(device) if device is not None else torch.get_default_device()
    how: dict[str, Any] = {"quantization_config": _quantization(load_in, dtype)} if load_in else {}
    if load_in or place.type == "cuda":  # read straight to the GPU: an 8B base takes 16 GB of host RAM otherwise
        how["device_map"] = {"": place}
    config = read_config(path)
    _check_unquantized(path, config)
    mark = fingerprint(path)
    with torch.device("cpu"):
        model = read_weights(path, config, dtype, **how)
    _keep_packing(model)
    model.config.use_cache = False
    model.name_or_path = os.path.abspath(path)  # noqa: PTH100 - keeps RUN/model, whose target changes
    model.brimful_base = Base(
        path=model.name_or_path, fingerprint=mark, load_in=load_in, dtype=str(dtype).removeprefix("torch.")
    )
    return model if load_in else model.to(place)


def new_base(config: Any, load_in: LoadIn | None = None, dtype: "torch.dtype | None" = None) -> Any:
    """A base with random weights on torch's default device, for planning: the same bytes, and nothing is read.

    Quantized layers are made one at a time, so an 8 B base never takes more than its 4 bits and one layer. On the meta
    device they have the shapes of quantized weights.
    """
    import torch

    dtype, device = dtype or torch.float32, torch.get_default_device()
    if load_in is None:
        return model_class(config).from_config(config, dtype=dtype)
    from torch.utils._python_dispatch import _disable_current_modes
    from transformers.quantizers import AutoHfQuantizer

    quantizer = AutoHfQuantizer.from_config(_quantization(load_in, dtype))
    # Unquantized weights are made on no device, so what counts the allocations of a described model must not see them.
    with torch.device("meta"), quiet(), _disable_current_modes():
        model = model_class(config).from_config(config, dtype=dtype)
        quantizer.preprocess_model(model=model, device_map={"": device}, dtype=dtype)
    shared: dict[int, Any] = {}
    for part in model.modules():
        for name, param in list(part._parameters.items()):
            if param is not None:
                if id(param) not in shared:
                    shared[id(param)] = _made_real(part, param, device, dtype)
                part._parameters[name] = shared[id(param)]
        for name, buffer in list(part._buffers.items()):
            if buffer is not None and buffer.is_meta:
                part._buffers[name] = torch.zeros_like(buffer, device=device)
    if device.type != "meta":
        for part in model.modules():
            if part._buffers:
                with torch.no_grad():
                    model._init_weights(part)  # tables such as rotary frequencies
    quantizer.postprocess_model(model)
    _keep_packing(model)
    return model


def _keep_packing(model: Any) -> None:
    """On CPUs with AVX512-BF16, bitsandbytes packs 4-bit weights anew in the first forward in eval mode, with scales rounded
    to bfloat16: an evaluation would change the base of the training after it."""
    for part in model.modules():
        if hasattr(part, "support_avx512bf16_for_cpu"):
            part.support_avx512bf16_for_cpu = False


def _made_real(part: Any, param: Any, device: "torch.device", dtype: "torch.dtype") -> Any:
    """Random numbers of the shape of a weight on the meta device, quantized as its class does it."""
    import torch

    kind = type(param).__name__
    if device.type == "meta" and kind == "Params4bit":
        return type(param)(torch.empty((param.numel() + 1) // 2, 1, dtype=torch.uint8), bnb_quantized=True)
    if device.type == "meta" and kind == "Int8Params":
        return torch.nn.Parameter(torch.empty(param.shape, dtype=torch.int8), requires_grad=False)
    dense = torch.empty(param.shape, dtype=dtype, device=device).normal_(std=0.02)
    if kind in ("Params4bit", "Int8Params"):
        more = {"module": part} if kind == "Params4bit" else {}
        return type(param)(dense, requires_grad=False, **{**param.__dict__, **more}).to(device)
    return torch.nn.Parameter(dense, requires_grad=param.requires_grad)


def _quantization(load_in: LoadIn, dtype: "torch.dtype") -> Any:
    """nf4 with its scales quantized once more: 4.13 bits a weight."""
    check_packages(Lora(), load_in)
    from transformers import BitsAndBytesConfig

    if load_in == "8bit":
        return BitsAndBytesConfig(load_in_8bit=True)
    return BitsAndBytesConfig(
        load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_use_double_quant=True, bnb_4bit_compute_dtype=dtype
    )


def _check_unquantized(path: Path, config: Any) -> None:
    if getattr(config, "quantization_config", None):
        raise BadModel(
            f"the weights in {path} are quantized already, so no adapter can be merged into them. "
            "Try: the folder of the unquantized model."
        )


def fingerprint(folder: Path) -> str:
    """Of the weights in a model folder: names, shapes, dtypes and content, however they are divided into files. Of an
    adapter, of its file and of its base."""
    if is_adapter(folder):
        base = _read_base(folder)
        of_base = base.fingerprint if base is not None else fingerprint(find_base(folder))
        return sha256(f"{file_sha256(folder / ADAPTER_WEIGHTS)} {of_base} {trained_in(folder)}")
    digest, tensors = hashlib.sha256(), stored_tensors(folder)
    with as_bad_model(folder, "weights"):
        whole = sum(one.size_bytes for one in tensors.values()) <= HASHED_BYTES
        for name, one in sorted(tensors.items()):
            digest.update(f"{name} {list(one.shape)} {one.dtype}\n".encode())
            with one.file.open("rb", buffering=0) as file:
                for start, size in _places(one.size_bytes, whole):
                    file.seek(one.start + start)
                    while size and (piece := file.read(min(size, 1 << 24))):
                        digest.update(piece)
                        size -= len(piece)
    return digest.hexdigest()


def _places(size: int, whole: bool) -> Iterator[tuple[int, int]]:
    """Start and size of the bytes that are hashed."""
    if whole or size <= SAMPLE_BYTES:
        yield 0, size
        return
    taken = SAMPLE_BYTES // SAMPLES
    yield from ((place * (size - taken) // (SAMPLES - 1), taken) for place in range(SAMPLES))


def save(model: Any, folder: Path) -> None:
    """PEFT's own folder, with the base it belongs to. The same adapter gives the same bytes."""
    model.save_pretrained(folder, save_embedding_layers=False)
    (folder / "README.md").unlink(missing_ok=True)  # a model card of empty headings
    config = json.loads((folder / ADAPTER_CONFIG).read_text(encoding="utf-8"))
    if isinstance(config["target_modules"], list):
        config["target_modules"].sort()  # a set, in another order in each process
    (folder / ADAPTER_CONFIG).write_text(json.dumps(config, indent=2, sort_keys=True) + "\n", encoding="utf-8")
    base = getattr(model, "brimful_base", None)
    if base is not None:
        (folder / BASE).write_text(json.dumps(asdict(base), indent=1) + "\n", encoding="utf-8")


def find_adapter(path: str | Path) -> Path | None:
    """The adapter's own folder: itself, or the best, else the newest, of a run or checkpoint. None if there is none."""
    folder = Path(path).expanduser()
    for place in (folder, folder / "best", folder / "model"):
        if (place / ADAPTER_CONFIG).is_file():
            return place
    if (folder / "checkpoints").is_dir():
        newest = Checkpoints(folder / "checkpoints").newest().checkpoint
        if newest is not None and (newest.path / "model" / ADAPTER_CONFIG).is_file():
            return newest.path / "model"
    return None


def base_of(folder: str | Path) -> str | None:
    """The base model that an adapter folder, or a run of one, names; None if it names none or is no adapter."""
    adapter = find_adapter(folder)
    return None if adapter is None else (_named_base(adapter) or None)


def _named_base(adapter: Path) -> str:
    base = _read_base(adapter)
    return base.path if base is not None else str(_read_adapter(adapter).get("base_model_name_or_path") or "")


def _read_base(adapter: Path) -> Base | None:
    if not (adapter / BASE).is_file():
        return None
    with as_bad_model(adapter, BASE):
        return parse_object(Base, read_json((adapter / BASE).read_bytes()))


def _read_adapter(adapter: Path) -> dict[str, Any]:
    with as_bad_model(adapter, ADAPTER_CONFIG):
        return read_json((adapter / ADAPTER_CONFIG).read_bytes())


def find_base(adapter: Path, base: str | Path | None = None) -> Path:
    """The folder of the base, the one the adapter names unless given; refused if the adapter belongs to another."""
    name = str(base or _named_base(adapter))
    if not name:
        raise BadModel(
            f"{adapter} does not say which model it belongs to. Try: brimful export {adapter} --merge --base DIR --output NEW, with the folder of that model."
        )
    try:
        folder = resolve(name)
    except BadModel:
        if base is not None:
            raise
        raise BadModel(
            f"the base model {name} of the adapter {adapter} is not there. Try: put it back, or brimful export {adapter} --merge --base DIR --output NEW with the folder it is in now."
        ) from None
    known = _read_base(adapter)
    if known is not None and known.fingerprint != fingerprint(folder):
        raise BadModel(
            f"{adapter} is an adapter of another base: the weights in {folder} are not those it was trained with. "
            f"Try: brimful export {adapter} --merge --base DIR --output NEW, with the folder of that model."
        )
    return folder


def load_adapter(
    path: str | Path, *, base: str | Path | None = None, load_in: LoadIn | None = None,
    device: "torch.device | str | None" = None, dtype: "torch.dtype | None" = None,
) -> Any:  # fmt: skip
    """A base with the adapter of a folder or a run, to generate and evaluate with: frozen and in eval mode."""
    check_packages(Lora(), None)
    import peft

    adapter = verified_adapter(path)
    model = load_base(find_base(adapter, base), load_in, device, dtype)
    with as_bad_model(adapter, "adapter"), quiet():
        return peft.PeftModel.from_pretrained(model, str(adapter)).eval()


def trained_in(adapter: Path) -> LoadIn | None:
    """The bits that the base had while the adapter was trained, if it was quantized: scores are then those of training."""
    base = _read_base(adapter)
    return None if base is None else base.load_in


def verified_adapter(path: str | Path) -> Path:
    """Where the adapter of a folder or run is; its hashes are checked if a checkpoint has them."""
    adapter = find_adapter(path)
    if adapter is None:
        raise BadModel(f"{path} has no {ADAPTER_CONFIG}. Try: a run with lora=, or a folder that PEFT wrote.")
    check_hashes(adapter)
    return adapter


def merge(
    adapter_folder: str | Path, output: Path, dtype: "torch.dtype | None" = None,
    progress: Callable[[str], object] = lambda phrase: None, *, base: str | Path | None = None,
) -> Path:  # fmt: skip
    """Add an adapter to its base: a new plain model folder. Returns the folder of the base.

    Each layer is read, merged in float32 by PEFT's own code and written, so memory holds the adapter and one layer. A base
    whose files use other tensor names than its code (some models with vision) is merged as a whole.

    Args:
        adapter_folder: PEFT's folder, or a run whose best adapter is meant.
        output: The folder to write, which must not exist.
        dtype: Of the weights. Default: bfloat16.
        progress: Called with a phrase for each layer.
        base: The folder of the base, if it is not where the adapter says.
    """
    check_packages(Lora(), None)
    import torch

    adapter, dtype = verified_adapter(adapter_folder), dtype or torch.bfloat16
    folder = find_base(adapter, base)
    model = _on_meta(adapter, folder)
    layers = {f"{name}.weight": part for name, part in _lora_layers(model)}
    in_place = layers.keys() <= stored_tensors(folder).keys() and not _read_adapter(adapter).get("modules_to_save")
    if in_place:
        write_model(folder, output, dtype=dtype, tokenizer=adapter, progress=progress, change=_Merge(layers))
    else:
        progress("merging the model as a whole")
        merged = load_adapter(adapter, base=folder, dtype=dtype, device="cpu").merge_and_unload(safe_merge=True)
        write_model(folder, output, dtype=dtype, tokenizer=adapter, progress=progress, model=merged)
    return folder


class _Merge:
    """Called with each tensor of the base: the tensor itself, or merged with the adapter of its layer."""

    def __init__(self, layers: Mapping[str, Any]) -> None:
        self._layers = layers

    def __call__(self, name: str, tensor: "torch.Tensor") -> "torch.Tensor":
        import torch

        layer = self._layers.get(name)
        if layer is None:
            return tensor
        weight = layer.get_base_layer().weight
        if weight.shape != tensor.shape:
            raise BadModel(
                f"the adapter of {name} does not fit the base: {list(tensor.shape)} there. Try: its own base."
            )
        layer.get_base_layer().weight = torch.nn.Parameter(tensor.float(), requires_grad=False)
        try:
            layer.merge(safe_merge=True)
            return layer.get_base_layer().weight.data
        except ValueError as error:
            raise BadModel(
                f"the adapter of {name} is broken ({in_one_line(error)}). Try: another checkpoint."
            ) from None
        finally:
            layer.get_base_layer().weight = weight


def _on_meta(adapter: Path, base: Path) -> Any:
    """The base without its bytes, and the adapter with them, in float32."""
    import peft
    import safetensors.torch
    import torch

    config = _read_adapter(adapter)
    if config.get("peft_type") != "LORA":
        raise BadModel(f"{adapter} is an adapter of the kind {config.get('peft_type')}. Try: one of LoRA or DoRA.")
    base_config = read_config(base)
    _check_unquantized(base, base_config)
    with as_bad_model(adapter, "adapter"), quiet():
        with torch.device("meta"):
            model = model_class(base_config).from_config(base_config, dtype=torch.float32)
        peft_config = peft.PeftConfig.from_pretrained(str(adapter))
        adapted = peft.get_peft_model(model, peft_config, low_cpu_mem_usage=True)
        weights = safetensors.torch.load_file(adapter / ADAPTER_WEIGHTS)
        named = {_name_in_model(name): tensor.float() for name, tensor in weights.items()}
        # not by PEFT's own function, which moves an adapter to the device of its base
        unknown = adapted.load_state_dict(named, strict=False, assign=True).unexpected_keys
    missing = [name for name, param in adapted.named_parameters() if "lora_" in name and param.is_meta]
    if unknown or missing:
        problems = count_tensors(unknown, "not in the model"), count_tensors(missing, "missing")
        raise BadModel(
            f"{adapter} is an adapter of another base: {', '.join(filter(None, problems))}. "
            "Try: --base with the folder of its model."
        )
    return adapted


def _name_in_model(name: str) -> str:
    """PEFT's files leave out the name of the adapter, and of DoRA's lengths the last part.

    >>> _name_in_model("q_proj.lora_A.weight"), _name_in_model("q_proj.lora_magnitude_vector")
    ('q_proj.lora_A.default.weight', 'q_proj.lora_magnitude_vector.default.weight')
    """
    if name.endswith(".lora_magnitude_vector"):
        name += ".weight"
    return re.sub(r"\.(lora_\w+)\.", r".\1.default.", name)


def _lora_layers(model: Any) -> Iterator[tuple[str, Any]]:
    from peft.tuners.lora import LoraLayer

    for name, part in model.get_base_model().named_modules():
        if isinstance(part, LoraLayer):
            yield name, part
