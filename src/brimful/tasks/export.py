"""Writes a model folder that others load: transformers, vLLM, `transformers serve`, llama.cpp's converter.

The folder appears whole or not at all: it is filled beside its place, synced and renamed. Weights go through memory one tensor
at a time: converting a model took less than twice its largest tensor (a test holds it to that). Files keep the names and the order of
the source's. `config.json` is the source's own text with another dtype and the cache of keys and values on, not what
transformers would write of it: programs that know the model by its published file find the same keys.
"""

import json
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from brimful.data.pipeline import writing_to
from brimful.errors import BadModel, BadOption, UserError
from brimful.files import FileLock, read_json, sync_tree
from brimful.machine.host import Space
from brimful.tasks.model_folder import CONFIG, INDEX, ORIGIN, as_bad_model, check_shards, quiet, trained_by
from brimful.units import show_bytes

if TYPE_CHECKING:
    import torch

DtypeName = Literal["bf16", "fp16", "fp32"]
WEIGHTS, GENERATION = "model.safetensors", "generation_config.json"
TOKENIZER_FILES = (
    "tokenizer*", "special_tokens_map.json", "added_tokens.json", "vocab.*", "merges.txt", "spiece.model", "*.tiktoken",
    "chat_template*",
)  # fmt: skip
OTHER_FILES = (GENERATION, "preprocessor_config.json", "processor_config.json")
LARGEST_HEADER_BYTES = 100_000_000
"""Of a safetensors file, as its own library has it."""


def dtype_of(name: DtypeName | None) -> "torch.dtype | None":
    import torch

    return {None: None, "bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}[name]


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredTensor:
    """The place of a tensor in the files of a model."""

    file: Path
    start: int
    size_bytes: int
    shape: tuple[int, ...]
    dtype: str
    """safetensors' name: `BF16`."""


def stored_tensors(folder: Path) -> dict[str, StoredTensor]:
    """Every tensor in the weights of a model folder, by its name in the files."""
    tensors: dict[str, StoredTensor] = {}
    for file in weight_files(folder):
        with as_bad_model(folder, file.name), file.open("rb") as content:
            length = int.from_bytes(content.read(8), "little")
            header = read_json(content.read(min(length, LARGEST_HEADER_BYTES)))
            header.pop("__metadata__", None)
            for name, entry in header.items():
                start, end = entry["data_offsets"]
                tensors[name] = StoredTensor(
                    file=file, start=8 + length + start, size_bytes=end - start, shape=tuple(entry["shape"]), dtype=entry["dtype"]
                )  # fmt: skip
    return tensors


def weight_files(folder: Path) -> list[Path]:
    """The safetensors files of a model; one that is missing is named."""
    if (folder / WEIGHTS).is_file():
        return [folder / WEIGHTS]
    if not (folder / INDEX).is_file():
        raise BadModel(f"{folder} has no {WEIGHTS}. Try: save the model with save_pretrained, which writes one.")
    with as_bad_model(folder, INDEX):
        names = sorted(set(read_json((folder / INDEX).read_bytes())["weight_map"].values()))
    check_shards(folder)
    return [folder / name for name in names]


def write_model(
    source: Path,
    output: Path,
    *,
    dtype: "torch.dtype | None" = None,
    tokenizer: Path | None = None,
    change: "Callable[[str, torch.Tensor], torch.Tensor] | None" = None,
    model: Any = None,
    progress: Callable[[str], object] = lambda phrase: None,
) -> None:
    """A new folder with the weights, config, generation config and tokenizer of a model.

    Args:
        source: The model folder.
        output: The folder to write, which must not exist.
        dtype: Of the weights. Default: as they are.
        tokenizer: The folder of an adapter that is merged: its tokenizer is taken instead of the source's, if it has one.
        change: Called with the name and content of every tensor; returns what is written, of the same shape.
        model: A model in memory whose weights are written instead of the files'.
        progress: Called with a phrase for every tensor.
    """
    tensors = stored_tensors(source)
    known = {"BF16": 2, "F16": 2, "F32": 4, "F64": 8}
    size = sum(
        one.size_bytes * (dtype.itemsize / known[one.dtype] if dtype and one.dtype in known else 1)
        for one in tensors.values()
    )
    with new_folder(output, needs_bytes=round(size)) as part:
        if model is None:
            _write_weights(part, tensors, dtype, change or (lambda name, tensor: tensor), progress)
        else:
            with quiet():
                model.save_pretrained(part)
        _write_config(source, part, dtype)
        holder = tokenizer if tokenizer is not None and _matching(tokenizer, TOKENIZER_FILES) else source
        for file in (*_matching(source, OTHER_FILES), *_matching(holder, TOKENIZER_FILES)):
            shutil.copyfile(file, part / file.name)
        _write_generation_config(part)
        add_end_ids(part)
        _write_origin(tokenizer or source, part)


def add_end_ids(folder: Path) -> None:
    """Let `generate` stop where the chat template ends a turn, beside the eos ids that generation_config.json has already.

    A model that was tuned with a template learns to end its turns with the template's token, which may not be the eos of its base.
    """
    file = folder / GENERATION
    if not file.is_file() or not (folder / "tokenizer.json").is_file():
        return
    from brimful.tasks.chat_template import ChatTemplate

    try:
        ends = ChatTemplate.load(folder).end_ids[:1]
    except UserError:  # no template, or one that does not work: then nothing was learnt from it
        return
    content = read_json(file.read_bytes())
    known = content.get("eos_token_id")
    ids = known if isinstance(known, list) else [] if known is None else [known]
    if missing := [one for one in ends if one not in ids]:
        content["eos_token_id"] = [*missing, *ids]
        file.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")


def copy_folder(source: Path, output: Path) -> None:
    """All visible files of a folder, in a new one."""
    files = [file for file in sorted(source.iterdir()) if file.is_file() and not file.name.startswith(".")]
    with new_folder(output, needs_bytes=sum(file.stat().st_size for file in files)) as part:
        for file in files:
            shutil.copyfile(file, part / file.name)
        _write_origin(source, part)


def _write_origin(trained: Path, folder: Path) -> None:
    """Which task trained the model: `dpo` warns of one that was never fine-tuned."""
    if task := trained_by(trained):
        (folder / ORIGIN).write_text(json.dumps({"task": task}) + "\n", encoding="utf-8")


@contextmanager
def new_folder(output: Path, *, needs_bytes: int) -> Iterator[Path]:
    """A folder to fill that becomes `output` when the block ends, and is removed on an error."""
    output = output.expanduser().absolute()
    check_new(output)
    space = Space.around(output.parent)
    if space is not None and needs_bytes > space.free_bytes:
        raise BadOption(
            f"output='{output}' takes {show_bytes(needs_bytes)}, and {show_bytes(space.free_bytes)} is free there. "
            "Try: free some space, or another output=."
        )
    part = output.with_name(f".{output.name}.part")
    with writing_to(output):
        try:
            lock = FileLock(part, folder=True)
        except BlockingIOError:
            raise BadOption(f"output='{output}' is being written by another process. Try: another folder.") from None
        with lock:
            try:
                for left in part.iterdir():  # by a process that was killed
                    shutil.rmtree(left) if left.is_dir() else left.unlink()
                yield part
                sync_tree(part)
                check_new(output)
                part.rename(output)
            except BaseException:
                shutil.rmtree(part, ignore_errors=True)
                raise
        sync_tree(output)


def check_new(output: Path) -> None:
    """Nothing is ever overwritten. An empty folder may be filled."""
    empty = output.is_dir() and not output.is_symlink() and not any(output.iterdir())
    if (output.exists() or output.is_symlink()) and not empty:
        raise BadOption(f"output='{output}' exists already. Try: the name of a new folder.")


def _write_weights(
    part: Path,
    tensors: dict[str, StoredTensor],
    dtype: "torch.dtype | None",
    change: "Callable[[str, torch.Tensor], torch.Tensor]",
    progress: Callable[[str], object],
) -> None:
    import torch
    from safetensors import safe_open

    from brimful.training.state import DTYPE_NAMES, write_tensors

    dtypes = {name: one for one, name in DTYPE_NAMES.items()}
    done, total = 0, 0
    for file in sorted({one.file for one in tensors.values()}):
        own = {name: one for name, one in tensors.items() if one.file == file}
        like = {}
        for name, one in own.items():
            if one.dtype not in dtypes:
                raise BadModel(
                    f"{file} has {name} in {one.dtype}, which cannot be converted. Try: the unquantized model."
                )
            kept = dtypes[one.dtype]
            like[name] = torch.empty(
                one.shape, dtype=dtype if dtype and kept.is_floating_point else kept, device="meta"
            )
        with safe_open(file, "pt") as content:

            def converted(name: str, content: Any = content, like: "dict[str, torch.Tensor]" = like) -> "torch.Tensor":
                nonlocal done
                done += 1
                progress(f"tensors written: {done:,} of {len(tensors):,}")
                return change(name, content.get_tensor(name)).to(like[name].dtype).contiguous()

            write_tensors(part / file.name, like, converted, {"format": "pt"})
        total += sum(one.nbytes for one in like.values())
    if len({one.file for one in tensors.values()}) > 1:
        index = {
            "metadata": {"total_size": total},
            "weight_map": {name: tensors[name].file.name for name in sorted(tensors)},
        }
        (part / INDEX).write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")


def _write_config(source: Path, part: Path, dtype: "torch.dtype | None") -> None:
    with as_bad_model(source, CONFIG):
        config = read_json((source / CONFIG).read_bytes())
    for one in (config, config.get("text_config")):
        if isinstance(one, dict):
            if dtype is not None:
                keys = [key for key in ("dtype", "torch_dtype") if key in one] or ["dtype"]
                one.update(dict.fromkeys(keys, str(dtype).removeprefix("torch.")))
            if one is config or "use_cache" in one:
                one["use_cache"] = True
    (part / CONFIG).write_text(json.dumps(config, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def _write_generation_config(part: Path) -> None:
    """What `generate` reads: the source's, with the cache on, or made from the model's config."""
    file = part / GENERATION
    if file.is_file():
        with as_bad_model(part, GENERATION):
            content = read_json(file.read_bytes())
        if not content.get("use_cache", True):
            file.write_text(json.dumps({**content, "use_cache": True}, indent=2) + "\n", encoding="utf-8")
        return
    import transformers

    with as_bad_model(part, CONFIG), quiet():
        config = transformers.AutoConfig.from_pretrained(part, local_files_only=True, trust_remote_code=False)
        transformers.GenerationConfig.from_model_config(config).save_pretrained(part)


def _matching(folder: Path, patterns: tuple[str, ...]) -> list[Path]:
    return sorted({file for pattern in patterns for file in folder.glob(pattern) if file.is_file()})
