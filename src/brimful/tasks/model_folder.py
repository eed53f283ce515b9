"""A model folder on its way into memory: the right kind, all of its weights, and ids that its tokenizer agrees with.

Nothing is ever made up. An encoder was once loaded with `strict=False` and three of its tensors stayed random for months:
here a tensor that is missing, of another shape or that nobody knows ends the loading with its name. Nothing is fetched
either: a name without a folder is looked for in the hub's cache on this disk, and refused otherwise.

    FOLDER                    what save_pretrained wrote, config.json in it
    RUN                       RUN/best, else RUN/model, else the model of the newest whole checkpoint
    RUN/checkpoints/step-…    its model/
"""

import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from brimful.data.tokens import MODEL_FILE, TokenizerFacts, load_tokenizer
from brimful.errors import BadCheckpoint, BadData, BadModel, in_one_line
from brimful.training.checkpoint import Checkpoints, Found
from brimful.training.manifest import NAME as MANIFEST
from brimful.training.manifest import Manifest
from brimful.training.run import RunFolder

if TYPE_CHECKING:
    import torch
    from tokenizers import Tokenizer

CONFIG = "config.json"
NEEDED = "an encoder-decoder such as T5 is needed"
NAMED = 3
"""So many tensors are named in a message; the rest are counted."""


def resolve(path: str | Path) -> Path:
    """The folder with the model's own files behind what the user named."""
    folder = Path(path).expanduser()
    if not folder.exists():
        return _cached(str(path))
    if not folder.is_dir():
        raise BadModel(f"{folder} is a file; give the folder that the model was saved into, with its {CONFIG}")
    for place in (folder, folder / "best", folder / "model"):
        if (place / CONFIG).is_file():
            return place
    has_some = (folder / "checkpoints").is_dir()
    found = Checkpoints(folder / "checkpoints").newest() if has_some else Found(checkpoint=None)
    if found.checkpoint is not None and (found.checkpoint.path / "model" / CONFIG).is_file():
        return found.checkpoint.path / "model"
    raise _no_model(folder, found)


def run_of(model: Path) -> RunFolder | None:
    """The run that a model's folder, as `resolve` gives it, is a checkpoint of; None where it lies elsewhere."""
    places = model.resolve().parents  # RUN/checkpoints/step-…/model
    run = RunFolder(places[2]) if len(places) > 2 and places[1].name == "checkpoints" else None
    return run if run is not None and run.knows_its_request else None


def _no_model(folder: Path, found: Found) -> BadModel:
    """Why there is nothing to load: a run that has saved nothing yet, one of another kind of task, or no run at all."""
    needed = "give a run of chatlm-pretrain or chatlm-sft, or a folder that save_pretrained wrote"
    if found.checkpoint is None and (RunFolder(folder).knows_its_request or (folder / "checkpoints").is_dir()):
        why = f"no whole checkpoint ({'; '.join(map(str, found.skipped))})" if found.skipped else "no checkpoint yet"
        return BadModel(f"{folder} is a run that has {why}; {needed}")
    saved = [folder, folder.resolve().parent] if found.checkpoint is None else [found.checkpoint.path]
    for place in saved:
        with suppress(BadCheckpoint):
            task = Manifest.read(place).facts.get("task", "another task")
            lies = "lies in" if found.checkpoint is None else "is"
            return BadModel(f"{folder} {lies} a run of {task}, which is no chat model (it saves no {CONFIG}); {needed}")
    there = ", ".join(sorted(one.name for one in folder.iterdir())[:8]) or "nothing"
    return BadModel(
        f"{folder} is no model folder, run or checkpoint: there is no {CONFIG} in it, in best/ or in model/, and no whole "
        f"checkpoint, but {there}; {needed}"
    )


def read_config(path: str | Path) -> Any:
    """The configuration of an encoder-decoder; any other architecture is refused by name."""
    import transformers
    from transformers.models.auto.modeling_auto import MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING

    folder = resolve(path)
    with _told(folder, f"its {CONFIG} cannot be read"), quiet():
        config = transformers.AutoConfig.from_pretrained(folder, local_files_only=True)
    if type(config) not in MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING or not config.is_encoder_decoder:
        made = ", ".join(config.architectures or []) or type(config).__name__
        raise BadModel(
            f"{folder} is a {config.model_type} model ({made}), which cannot answer a text by a text; {NEEDED}"
        )
    return config


def load_model(path: str | Path, device: "torch.device | str" = "cpu", dtype: "torch.dtype | None" = None) -> Any:
    """The model with every one of its weights from the folder, on the device, in eval mode; float32 unless told otherwise."""
    import torch
    import transformers

    folder = resolve(path)
    config = read_config(folder)
    _check_bytes(folder)
    with _told(folder, "its weights cannot be read"), quiet():
        model, found = transformers.AutoModelForSeq2SeqLM.from_pretrained(
            folder, config=config, dtype=dtype or torch.float32, local_files_only=True, output_loading_info=True,
            ignore_mismatched_sizes=True,  # they are told below, with the others
        )  # fmt: skip
    wrong = [
        _named(found.get("missing_keys", ()), "missing"),
        _named(found.get("mismatched_keys", ()), "of another shape than its config says"),
        _named(found.get("unexpected_keys", ()), "that it has no place for"),
        _named(found.get("error_msgs", ()), "that failed"),
    ]
    if any(wrong):
        raise BadModel(
            f"{folder} does not hold the {type(model).__name__} of its {CONFIG}: {'; '.join(filter(None, wrong))}; "
            "copy the folder again, or save the model anew"
        )
    return model.to(device).eval()


@dataclass(frozen=True)
class ModelTokenizer:
    """The tokenizer beside a model: texts to ids as `data pack` makes them, and back."""

    folder: Path
    facts: TokenizerFacts

    @cached_property
    def _tokenizer(self) -> "Tokenizer":
        return load_tokenizer(self.folder)

    @property
    def eos_id(self) -> int:
        return self.facts.eos_id

    @property
    def pad_id(self) -> int:
        """What fills a batch up; the eos where there is no pad, masked in any case."""
        return self.facts.eos_id if self.facts.pad_id is None else self.facts.pad_id

    def encode(self, text: str) -> list[int]:
        """The text's tokens and the eos that ends every side of a row."""
        return [*self._tokenizer.encode(text, add_special_tokens=False).ids, self.eos_id]

    def decode(self, ids: Sequence[int]) -> str:
        """Up to the first eos; bytes joined to characters, special tokens left out."""
        plain = [int(one) for one in ids]
        end = plain.index(self.eos_id) if self.eos_id in plain else len(plain)
        return str(self._tokenizer.decode(plain[:end], skip_special_tokens=True))


def tokenizer_of(path: str | Path, config: Any = None) -> ModelTokenizer:
    """The tokenizer of a model folder; one whose ids are not the model's is refused."""
    folder = resolve(path)
    if not (folder / MODEL_FILE).is_file():
        raise BadModel(f"{folder} has no {MODEL_FILE}; copy the tokenizer that the model was trained with into it")
    try:
        facts = TokenizerFacts.read(folder)
    except BadData as error:
        raise BadModel(str(error)) from None
    config = read_config(folder) if config is None else config
    wrong = [
        f"its tokenizer has {facts.vocab_size:,} tokens and the model knows {config.vocab_size:,}"
        if facts.vocab_size > config.vocab_size
        else "",
        _other_id("eos", facts.eos_id, config.eos_token_id),
        _other_id("pad", facts.pad_id, config.pad_token_id),
    ]
    if any(wrong):
        raise BadModel(
            f"{folder}: {'; '.join(filter(None, wrong))}; put the tokenizer beside it that the model was trained with, or correct {CONFIG}"
        )
    return ModelTokenizer(folder, facts)


def _other_id(role: str, tokenizers: int | None, models: int | list[int] | None) -> str:
    """A config may name several ids that end a text. What either of the two does not name cannot disagree."""
    known = models if isinstance(models, list) else [models]
    if tokenizers is None or models is None or tokenizers in known:
        return ""
    return f"its tokenizer's {role} is {tokenizers} and the model's {', '.join(map(str, known))}"


def _cached(name: str) -> Path:
    """The newest snapshot of owner/name in the hub's cache."""
    if re.fullmatch(r"[\w.-]+(/[\w.-]+)?", name) and not name.startswith("."):
        from huggingface_hub import try_to_load_from_cache

        found = try_to_load_from_cache(name, CONFIG)
        if isinstance(found, str):
            return Path(found).parent
    raise BadModel(
        f"there is no model at {name}: give a folder that save_pretrained or `brimful train` wrote; nothing is downloaded, and "
        "no model of that name is in the Hugging Face cache of this machine"
    )


def _check_bytes(folder: Path) -> None:
    """A flipped byte loads without a word. A checkpoint's model has checksums; a folder from elsewhere has none."""
    checkpoint = folder.resolve().parent
    if folder.resolve().name != "model" or not (checkpoint / MANIFEST).is_file():
        return
    try:
        manifest = Manifest.read(checkpoint)
        own = tuple(one for one in manifest.files if one.name.startswith("model/"))
        replace(manifest, files=own).check(checkpoint, contents=True)
    except BadCheckpoint as error:
        raise BadModel(f"{checkpoint} is damaged, {error}; use another checkpoint of the run") from None


def _named(tensors: Any, what: str) -> str:
    """`3 tensors missing (a, b, c)`."""
    names = sorted(one if isinstance(one, str) else str(one[0]) for one in tensors)
    if not names:
        return ""
    more = f" and {len(names) - NAMED:,} more" if len(names) > NAMED else ""
    return f"{len(names):,} tensor{'s' * (len(names) != 1)} {what} ({', '.join(names[:NAMED])}{more})"


@contextmanager
def _told(folder: Path, what: str) -> Iterator[None]:
    """Whatever transformers and safetensors raise about a folder is one sentence."""
    try:
        yield
    except Exception as error:
        raise BadModel(
            f"{folder} cannot be used, {what} ({in_one_line(error)}); copy it again, or save the model anew"
        ) from error


@contextmanager
def quiet() -> Iterator[None]:
    """Without the bars and reports that transformers prints while it loads: what is wrong is told in one sentence."""
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
