"""Loads a language model from what `--model` names: the right architecture, every weight, and a tokenizer with its ids.

    FOLDER                    written by save_pretrained, with a config.json
    RUN                       RUN/best, else RUN/model, else the model of the newest complete checkpoint
    RUN/checkpoints/step-…    its model/
    an adapter                of LoRA, or a run of one: loaded into the base model that it names
    owner/name                a model of the Hugging Face hub, from this machine's cache or else downloaded by the hub's client

A missing, misshapen or unknown tensor is an error that names it. (With `strict=False`, tensors would silently stay random.)
Code that a model brings along is never run: one that needs `trust_remote_code` is refused.
"""

import json
import re
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from brimful.data.tokenizer.folder import MODEL_FILE, TokenizerFacts, load_tokenizer
from brimful.errors import BadCheckpoint, BadData, BadModel, BadRun, DoesNotFit, in_one_line
from brimful.task import not_finite
from brimful.training.checkpoint import MANIFEST, Checkpoint, Checkpoints, Manifest, Newest
from brimful.training.run import RunFolder
from brimful.units import show_bytes

if TYPE_CHECKING:
    import torch
    from tokenizers import Tokenizer

CONFIG, ADAPTER_CONFIG = "config.json", "adapter_config.json"
ORIGIN = "brimful_model.json"
"""In an exported folder: the task that trained the model."""
INDEX = "model.safetensors.index.json"
GENERATING = ("ForCausalLM", "LMHeadModel", "ForConditionalGeneration")
"""How the names of classes end that write text; one for masked words or labels has others."""
DOWNLOADED = ("*.json", "*.safetensors", "*.model", "*.txt", "*.jinja")
"""Files of a model on the hub that are needed: weights only as safetensors, and no code."""
_PRINTABLE = (*range(33, 127), *range(161, 173), *range(174, 256))
_UNPRINTABLE = sorted(set(range(256)).difference(_PRINTABLE))
BYTE_OF = {chr(byte): byte for byte in _PRINTABLE} | {chr(256 + place): byte for place, byte in enumerate(_UNPRINTABLE)}
"""The letters with which tokenizers of the kind ByteLevel, such as GPT-2's, write bytes."""
TRY_FOLDER = "Try: a run of pretrain or sft, or a folder written by save_pretrained."
NAMED_TENSORS = 3
"""Tensors that a message names; the others are counted."""


def resolve(path: str | Path) -> Path:
    """The folder that holds the model's own files."""
    folder = Path(path).expanduser()
    if not folder.exists():
        return _from_hub(str(path))
    if not folder.is_dir():
        raise BadModel(f"{folder} is a file. Try: the folder that holds the model's {CONFIG}.")
    for place in (folder, folder / "best", folder / "model"):
        if (place / CONFIG).is_file() or (place / ADAPTER_CONFIG).is_file():
            return place
    newest = Newest(checkpoint=None)
    if (folder / "checkpoints").is_dir():
        newest = Checkpoints(folder / "checkpoints").newest()
        if newest.checkpoint is not None:
            saved = newest.checkpoint.path / "model"
            if (saved / CONFIG).is_file() or (saved / ADAPTER_CONFIG).is_file():
                return saved
    raise _no_model(folder, newest)


def run_of(model: Path) -> RunFolder | None:
    """The run that a folder from `resolve` is a checkpoint of, if any."""
    parents = model.resolve().parents  # RUN/checkpoints/step-…/model
    run = RunFolder(parents[2]) if len(parents) > 2 and parents[1].name == "checkpoints" else None
    return run if run is not None and run.request_file.is_file() else None


def trained_by(model: Path) -> str | None:
    """The task that trained the model of a folder from `resolve`: that of its run, or of the run that it was exported from; None
    if nothing is known."""
    with suppress(BadRun, OSError, ValueError, AttributeError, RecursionError):
        if (run := run_of(model)) is not None:
            return run.read_request().task
        task = json.loads((model / ORIGIN).read_text(encoding="utf-8")).get("task")
        return task if isinstance(task, str) else None
    return None


def read_config(path: str | Path) -> Any:
    """The configuration of a language model. Another kind of model, or one that brings its own code, is an error."""
    import transformers

    folder = resolve(path)
    if is_adapter(folder):
        from brimful.tasks.adapters import find_base

        return read_config(find_base(folder))
    with as_bad_model(folder, CONFIG), quiet():
        content = json.loads((folder / CONFIG).read_text(encoding="utf-8"))
    if "auto_map" in content and content.get("model_type") not in transformers.CONFIG_MAPPING:
        raise BadModel(
            f"{folder} needs trust_remote_code: its model type {content.get('model_type')!r} is defined by code of its own, "
            "which Brimful does not run. Try: a model that transformers knows."
        )
    with as_bad_model(folder, CONFIG), quiet():
        config = transformers.AutoConfig.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
    if not _writes_text(config):
        architecture = ", ".join(config.architectures or []) or type(config).__name__
        raise BadModel(
            f"{folder} is a {config.model_type} model ({architecture}), which does not write text. "
            "Try: a causal model such as Qwen or Llama, or an encoder-decoder such as T5."
        )
    return config


def is_adapter(folder: Path) -> bool:
    """Whether a folder from `resolve` holds an adapter instead of a whole model."""
    return not (folder / CONFIG).is_file() and (folder / ADAPTER_CONFIG).is_file()


def is_causal(config: Any) -> bool:
    """Whether the model is a decoder alone (GPT, Llama, Qwen), not an encoder-decoder (T5, BART)."""
    return not config.is_encoder_decoder


def text_config(config: Any) -> Any:
    """The part of a configuration that describes the text model; the whole of it where there is nothing else."""
    return config if config.is_encoder_decoder else config.get_text_config()


def model_class(config: Any) -> Any:
    """The class of transformers that makes and loads such a model."""
    import transformers

    return transformers.AutoModelForCausalLM if is_causal(config) else transformers.AutoModelForSeq2SeqLM


def load_model(path: str | Path, device: "torch.device | str" = "cpu", dtype: "torch.dtype | None" = None) -> Any:
    """The model with every weight from the folder, on the device and in eval mode. `dtype` is float32 by default."""
    import torch

    folder = resolve(path)
    if is_adapter(folder):
        from brimful.tasks.adapters import load_adapter, trained_in

        return load_adapter(folder, load_in=trained_in(folder), device=device, dtype=dtype)
    return read_weights(folder, read_config(folder), dtype or torch.float32).to(device).eval()


def read_weights(folder: Path, config: Any, dtype: "torch.dtype", **options: Any) -> Any:
    """The model of this configuration with every weight of the folder. `options` are those of `from_pretrained`."""
    import torch

    from brimful.memory.meter import allocated_bytes, available_bytes
    from brimful.memory.oom import is_oom

    check_hashes(folder)
    check_shards(folder)
    place = torch.device(options.get("device_map", {}).get("", "cpu"))
    if place.type == "cuda" and place.index is None:
        place = torch.device("cuda", torch.cuda.current_device())
    room, held = available_bytes(place), allocated_bytes(place) or 0
    try:
        with as_bad_model(folder, "weights"), quiet():
            model, info = model_class(config).from_pretrained(
                folder, config=config, dtype=dtype, local_files_only=True, output_loading_info=True,
                ignore_mismatched_sizes=True,  # reported below, together with the others
                **options,
            )  # fmt: skip
    except BadModel as error:
        if not is_oom(error):
            raise
        raise _no_room(folder, place, room, held, quantized="quantization_config" in options) from None
    problems = [
        count_tensors(info.get("missing_keys", ()), "missing"),
        count_tensors(info.get("mismatched_keys", ()), "of another shape"),
        count_tensors(info.get("unexpected_keys", ()), "not in the model"),
        count_tensors(info.get("error_msgs", ()), "failed"),
    ]
    if any(problems):
        raise BadModel(
            f"{folder} does not match the {type(model).__name__} of its {CONFIG}: {', '.join(filter(None, problems))}. "
            "Try: copy the folder or save the model again."
        )
    if broken := not_finite(model):
        raise BadModel(f"{folder} has NaN or inf in {broken}. Try: another copy, or an earlier checkpoint.")
    return model


def _no_room(folder: Path, place: "torch.device", room: int | None, held: int, *, quantized: bool) -> DoesNotFit:
    """What there was before the first weight was read. Nothing is wrong with the folder."""
    size = sum(file.stat().st_size for file in folder.glob("*.safetensors"))
    where = "" if room is None else f" onto {place}, which had room for {show_bytes(max(0, room - held))}"
    where += f" beside the {show_bytes(held)} of this process" if held else ""
    smaller = "" if quantized else ", or load_in='4bit' with lora="
    return DoesNotFit(
        f"memory ran out while the weights of {folder} were read{where}; its files have {show_bytes(size)}. "
        f"Try: more free memory{smaller}.",
        needed_bytes=held + size,
    )


@dataclass(frozen=True)
class ModelTokenizer:
    """The tokenizer of a model: text to the ids that `brimful data tokenize` writes, and back."""

    folder: Path
    facts: TokenizerFacts

    @cached_property
    def _tokenizer(self) -> "Tokenizer":
        return load_tokenizer(self.folder)

    @cached_property
    def _with_special(self) -> "Tokenizer":
        return load_tokenizer(self.folder, special_tokens=True)

    @property
    def eos_id(self) -> int:
        return self.facts.eos_id

    @property
    def pad_id(self) -> int:
        """The id that pads a batch: eos if there is no pad, since padding is masked anyway."""
        return self.facts.eos_id if self.facts.pad_id is None else self.facts.pad_id

    def encode(self, text: str) -> list[int]:
        """The text's ids, with the eos that ends every prompt and response."""
        return [*self._ids(self._tokenizer, text, special=False), self.eos_id]

    def begin(self, text: str) -> list[int]:
        """The ids of the beginning of a text: after bos where the tokenizer has one there, and without eos. Special tokens in
        the text are read as such, as in the texts of `pretrain`."""
        ids = self._ids(self._with_special, text, special=True)
        return ids[:-1] if ids and ids[-1] == self.eos_id else ids

    @staticmethod
    def _ids(tokenizer: "Tokenizer", text: str, *, special: bool) -> list[int]:
        """Without offsets, and without Python's lock: one MB of one letter took 1.5 s in which no other thread ran, and takes 0.1 s."""
        return list(tokenizer.encode_batch_fast([text], add_special_tokens=special)[0].ids)

    def decode(self, ids: Sequence[int], *, whole: bool = False) -> str:
        """The text up to the first eos, without special tokens; or the `whole` of it, as a conversation has several."""
        plain = [int(one) for one in ids]
        if whole:
            return str(self._tokenizer.decode(plain, skip_special_tokens=False))
        end = plain.index(self.eos_id) if self.eos_id in plain else len(plain)
        return str(self._tokenizer.decode(plain[:end], skip_special_tokens=True))

    def token_bytes(self, token: int) -> bytes:
        """What one token adds to a text: it may be a part of a character."""
        piece = self._tokenizer.id_to_token(token) or ""
        if token in self._tokenizer.get_added_tokens_decoder():
            return piece.encode()
        if "ByteLevel" in self._decoder:
            return bytes(BYTE_OF[letter] for letter in piece)
        if "ByteFallback" in self._decoder and (byte := re.fullmatch("<0x([0-9A-F]{2})>", piece)):
            return bytes.fromhex(byte[1])
        return (piece.replace("▁", " ") if "▁" in self._decoder else piece).encode()

    @cached_property
    def _decoder(self) -> str:
        """The JSON of what turns tokens into text."""
        decoder = self._tokenizer.decoder
        return "" if decoder is None else json.dumps(json.loads(decoder.__getstate__()), ensure_ascii=False)


def tokenizer_of(path: str | Path, config: Any = None) -> ModelTokenizer:
    """The tokenizer of a model folder. One whose ids are not the model's is an error."""
    folder = resolve(path)
    if not (folder / MODEL_FILE).is_file():
        raise BadModel(f"{folder} has no {MODEL_FILE}. Try: copy the tokenizer of the model into it.")
    try:
        facts = TokenizerFacts.read(folder)
    except BadData as error:
        raise BadModel(str(error)) from None
    config = read_config(folder) if config is None else config
    problems = []
    if not is_causal(config):  # a chat model's config often names the eos of its base, and no pad
        problems = [
            _id_conflict("eos", facts.eos_id, config.eos_token_id),
            _id_conflict("pad", facts.pad_id, config.pad_token_id),
        ]
    vocab_size = text_config(config).vocab_size
    if facts.vocab_size > vocab_size:
        problems.append(f"the tokenizer has {facts.vocab_size:,} tokens and the model {vocab_size:,}")
    if any(problems):
        raise BadModel(
            f"the tokenizer in {folder} is not the model's: {', '.join(filter(None, problems))}. "
            f"Try: copy the model's tokenizer there, or correct {CONFIG}."
        )
    return ModelTokenizer(folder, facts)


@contextmanager
def quiet() -> Iterator[None]:
    """Without the progress bars and load reports of transformers; errors are reported by our own messages."""
    from transformers.utils import logging

    level, bars = logging.get_verbosity(), logging.is_progress_bar_enabled()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        logging.set_verbosity(level)
        if bars:
            logging.enable_progress_bar()


def _writes_text(config: Any) -> bool:
    from transformers.models.auto import modeling_auto as auto

    known = auto.MODEL_FOR_CAUSAL_LM_MAPPING if is_causal(config) else auto.MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING
    names = config.architectures or []
    return type(config) in known and (not names or any(name.endswith(GENERATING) for name in names))


def _from_hub(name: str) -> Path:
    """The snapshot of owner/name in the Hugging Face cache, downloaded if it is not there."""
    nothing = f"there is no model at {name}"
    if not re.fullmatch(r"[\w.-]+/[\w.-]+", name) or name.startswith("."):
        raise BadModel(f"{nothing}. Try: a run, a model folder, or owner/name on the Hugging Face hub.")
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import GatedRepoError, LocalEntryNotFoundError, RepositoryNotFoundError

    with suppress(Exception):  # any reason not to have it is a reason to download it
        folder = Path(snapshot_download(name, allow_patterns=list(DOWNLOADED), local_files_only=True))
        if (folder / CONFIG).is_file() and not _missing_shards(folder) and list(folder.glob("*.safetensors")):
            return folder
    try:
        folder = Path(snapshot_download(name, allow_patterns=list(DOWNLOADED)))
    except GatedRepoError:
        raise BadModel(
            f"{name} is gated on the Hugging Face hub. Try: accept its terms there, then `hf auth login`."
        ) from None
    except RepositoryNotFoundError:
        raise BadModel(
            f"{nothing}, and none of that name on the Hugging Face hub. Try: another name or folder."
        ) from None
    except LocalEntryNotFoundError:
        raise BadModel(
            f"{nothing}, and the Hugging Face hub cannot be reached. Try: a folder, or download the model on a machine "
            "with a network."
        ) from None
    except Exception as error:
        raise BadModel(
            f"{name} cannot be downloaded from the hub: {in_one_line(error).rstrip('. ')}. Try: again later."
        ) from None
    if not (folder / CONFIG).is_file():
        raise BadModel(f"{name} on the hub has no {CONFIG}. Try: a model that transformers can load.")
    return folder


def _missing_shards(folder: Path) -> list[str]:
    """Files that the index of the weights names and the folder lacks."""
    if not (folder / INDEX).is_file():
        return []
    with as_bad_model(folder, INDEX):
        names = set(json.loads((folder / INDEX).read_text(encoding="utf-8"))["weight_map"].values())
    return sorted(name for name in names if not (folder / name).is_file())


def check_shards(folder: Path) -> None:
    """Refuse a folder that lacks files which the index of its weights names."""
    if missing := _missing_shards(folder):
        more = f" and {len(missing) - 1} more" if len(missing) > 1 else ""
        raise BadModel(f"{folder} lacks {missing[0]}{more} of its weights. Try: copy the folder or download it again.")


def _no_model(folder: Path, newest: Newest) -> BadModel:
    """Why there is nothing to load: a run without checkpoints, a run of another task, or not a run at all."""
    if newest.checkpoint is None and (RunFolder(folder).request_file.is_file() or (folder / "checkpoints").is_dir()):
        skipped = f"complete checkpoint ({', '.join(map(str, newest.skipped))})" if newest.skipped else "checkpoint yet"
        return BadModel(f"{folder} is a run without a {skipped}. {TRY_FOLDER}")
    checkpoints = [folder, folder.resolve().parent] if newest.checkpoint is None else [newest.checkpoint.path]
    for checkpoint in checkpoints:
        with suppress(BadCheckpoint):
            task = Manifest.read(checkpoint).facts.get("task", "another task")
            return BadModel(f"{folder} belongs to a run of {task}, which is not a language model. {TRY_FOLDER}")
    content = ", ".join(sorted(entry.name for entry in folder.iterdir())[:8]) or "nothing"
    return BadModel(f"{folder} is not a model folder: it has no {CONFIG} but {content}. {TRY_FOLDER}")


def check_hashes(folder: Path) -> None:
    """A flipped byte loads without an error. The model of a checkpoint has hashes; other folders have none."""
    checkpoint = folder.resolve().parent
    if folder.resolve().name != "model" or not (checkpoint / MANIFEST).is_file():
        return
    try:
        Checkpoint.read(checkpoint).check(contents=True, below="model/")
    except BadCheckpoint as error:
        raise BadModel(f"{checkpoint} is damaged: {error}. Try: another checkpoint of the run.") from None


def _id_conflict(role: str, tokenizer_id: int | None, model_ids: int | list[int] | None) -> str:
    """Empty if they agree. A config may list several eos ids, and either side may have none."""
    ids = model_ids if isinstance(model_ids, list) else [model_ids]
    if tokenizer_id is None or model_ids is None or tokenizer_id in ids:
        return ""
    return f"its {role} id is {tokenizer_id} and the model's {', '.join(map(str, ids))}"


def count_tensors(tensors: Iterable[Any], problem: str) -> str:
    """`3 tensors missing (a, b, c)`; empty if there are none."""
    names = sorted(one if isinstance(one, str) else str(one[0]) for one in tensors)
    if not names:
        return ""
    more = f" and {len(names) - NAMED_TENSORS:,} more" if len(names) > NAMED_TENSORS else ""
    return f"{len(names):,} tensor{'s' * (len(names) != 1)} {problem} ({', '.join(names[:NAMED_TENSORS])}{more})"


@contextmanager
def as_bad_model(folder: Path, part: str) -> Iterator[None]:
    """Whatever transformers and safetensors raise about a folder becomes one message."""
    try:
        yield
    except Exception as error:
        raise BadModel(
            f"the {part} of {folder} cannot be read ({in_one_line(error)}). Try: copy the folder or save the model again."
        ) from error
