"""What `bench/estimate.py` predicts and measures: models of several kinds with new weights, and how each is trained.

No model is downloaded: every one is made from its configuration, in the size of the published model of that name. A case is a
task, a setting (layout, precision, optimizer, checkpointing) and three micro-batch sizes, of which the last fills a good part of a
card of 80 GB at most.
"""

import json
import sys
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import cache, partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Literal

import torch

from brimful import Task
from brimful.memory.layout import LayoutName
from brimful.planning.plan_options import Checkpointed
from brimful.task import Precision, Shape
from brimful.tasks.language import LanguageOptions, Pretrain, Sft, SftOptions
from brimful.training.optimizer import with_optimizer
from brimful.training.options import TrainOptions

EXAMPLES = Path(__file__).parent.parent / "examples"
LORA = "r=16,alpha=32,targets=all-linear"

OptimizerKind = Literal["adamw-fused", "adamw-foreach", "adafactor", "sgd", "adamw8bit"]


@dataclass(frozen=True, kw_only=True)
class Case:
    """One model trained in one way, at three sizes."""

    name: str
    make_task: Callable[[], Task]
    shape: Shape
    rows: tuple[int, int, int]
    precision: Precision = "bf16"
    optimizer: OptimizerKind = "adamw-fused"
    checkpointing: Checkpointed = "off"
    layout: LayoutName = "padded"
    needs: tuple[str, ...] = field(default=())
    """Packages without which it is skipped."""

    @property
    def missing(self) -> list[str]:
        return [package for package in self.needs if find_spec(package) is None]

    def task(self) -> Task:
        """The model's task with the optimizer of this case."""
        task = self.make_task()
        task.use_device(torch.device("cuda"), self.precision)
        if self.optimizer in ("adafactor", "adamw8bit"):
            return with_optimizer(task, TrainOptions(optimizer=self.optimizer))
        task.optimizer = partial(_torch_optimizer, self.optimizer)  # type: ignore[method-assign]
        return task


def _torch_optimizer(kind: OptimizerKind, model: torch.nn.Module) -> torch.optim.Optimizer:
    trained = [param for param in model.parameters() if param.requires_grad]
    if kind == "sgd":
        return torch.optim.SGD(trained, lr=1e-3, momentum=0.9, foreach=True)
    return torch.optim.AdamW(trained, lr=1e-4, fused=kind == "adamw-fused", foreach=kind == "adamw-foreach")


class FromConfig(Task):
    """A Hugging Face model of a configuration, with batches of the inputs that it has."""

    def __init__(
        self, name: str, make_model: Callable[[], Any], make_batch: Callable[[int, Shape], dict[str, Any]]
    ) -> None:
        super().__init__()
        self.name, self._make_model, self.dummy = name, make_model, make_batch  # type: ignore[method-assign]

    @property
    def has_dummy(self) -> bool:
        return True

    def model(self) -> Any:
        return self._make_model()

    def loss(self, model: Any, batch: Any) -> Any:
        return model(**batch)


def _tokens(rows: int, shape: Shape) -> dict[str, Any]:
    """One row is a token short, so that the mask is used."""
    ids = torch.ones(rows, shape[0], dtype=torch.long)
    mask = torch.ones_like(ids)
    mask[-1, -1] = 0
    return {"input_ids": ids, "attention_mask": mask, "labels": ids.clone()}


def _images(rows: int, shape: Shape) -> dict[str, Any]:
    return {"pixel_values": torch.randn(rows, 3, 224, 224), "labels": torch.zeros(rows, dtype=torch.long)}


def _speech(rows: int, shape: Shape) -> dict[str, Any]:
    labels = torch.ones(rows, shape[0], dtype=torch.long)
    return {"input_features": torch.randn(rows, 80, 3000), "labels": labels}


def _bert() -> Any:
    from transformers import BertConfig, BertForMaskedLM

    return BertForMaskedLM(BertConfig())


def _gpt2(width: int, layers: int, heads: int) -> Any:
    from transformers import GPT2Config, GPT2LMHeadModel

    return GPT2LMHeadModel(GPT2Config(n_embd=width, n_layer=layers, n_head=heads, use_cache=False))


def _vit() -> Any:
    from transformers import ViTConfig, ViTForImageClassification

    return ViTForImageClassification(ViTConfig(num_labels=1000))


def _resnet() -> Any:
    from transformers import ResNetConfig, ResNetForImageClassification

    return ResNetForImageClassification(ResNetConfig(num_labels=1000))


def _whisper() -> Any:
    from transformers import WhisperConfig, WhisperForConditionalGeneration

    config = WhisperConfig(
        d_model=384, encoder_layers=4, decoder_layers=4, encoder_attention_heads=6, decoder_attention_heads=6,
        encoder_ffn_dim=1536, decoder_ffn_dim=1536, use_cache=False,
    )  # fmt: skip
    return WhisperForConditionalGeneration(config)


def _t5() -> Task:
    return Pretrain(LanguageOptions(model="chatlm-base"))


LLAMA = {
    "1b": {"hidden_size": 2048, "intermediate_size": 8192, "num_hidden_layers": 16, "num_attention_heads": 32,
           "num_key_value_heads": 8, "tie_word_embeddings": True},
    "8b": {"hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32, "num_attention_heads": 32,
           "num_key_value_heads": 8, "tie_word_embeddings": False},
}  # fmt: skip
"""In the shapes of Llama 3.2 1B and Llama 3.1 8B."""


@cache
def _llama_folder(size: str) -> Path:
    """A folder with the configuration alone: for an estimate and for new weights it is enough."""
    folder = Path(tempfile.mkdtemp(prefix=f"brimful-llama-{size}-"))
    config = {
        "architectures": ["LlamaForCausalLM"], "model_type": "llama", "vocab_size": 128_256, "max_position_embeddings": 8192,
        "rope_theta": 500_000.0, "dtype": "bfloat16", "bos_token_id": 128_000, "eos_token_id": 128_001, **LLAMA[size],
    }  # fmt: skip
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def _llama(size: str, *, lora: bool = False, load_in: Any = None) -> Task:
    options = SftOptions(model=str(_llama_folder(size)), lora=LORA if lora else None, load_in=load_in)
    return Sft(options)


def _example(name: str) -> Task:
    if str(EXAMPLES) not in sys.path:
        sys.path.insert(0, str(EXAMPLES))
    return __import__(name).task  # type: ignore[no-any-return]


def cases() -> tuple[Case, ...]:
    return tuple(_cases())


def _cases() -> Iterator[Case]:
    t5 = partial(Case, make_task=_t5, shape=(256, 256), rows=(4, 16, 48))
    yield t5(name="t5-base fused bf16 padded")
    yield t5(name="t5-base fused bf16 packed", layout="packed", rows=(32, 64, 128))
    yield t5(name="t5-base foreach bf16 padded", optimizer="adamw-foreach")
    yield t5(name="t5-base adafactor bf16 padded", optimizer="adafactor")
    yield t5(name="t5-base sgd bf16 padded", optimizer="sgd")
    yield t5(name="t5-base adamw8bit bf16 padded", optimizer="adamw8bit", needs=("bitsandbytes",))
    yield t5(name="t5-base fused fp32 padded", precision="fp32", rows=(4, 16, 32))
    yield t5(name="t5-base fused bf16 padded checkpointed", checkpointing="on", rows=(16, 64, 128))
    yield t5(name="t5-base fused bf16 padded every-2", checkpointing="every-2", rows=(8, 32, 64))
    yield t5(name="t5-base fused bf16 packed checkpointed", layout="packed", checkpointing="on", rows=(32, 128, 256))

    bert = partial(Case, make_task=lambda: FromConfig("bert", _bert, _tokens), shape=(256,), rows=(8, 32, 96))
    yield bert(name="bert-base fused bf16")
    yield bert(name="bert-base foreach fp32", optimizer="adamw-foreach", precision="fp32", rows=(8, 32, 64))
    yield bert(
        name="bert-base adafactor bf16 checkpointed", optimizer="adafactor", checkpointing="on", rows=(16, 64, 192)
    )

    gpt2 = partial(
        Case, make_task=lambda: FromConfig("gpt2", partial(_gpt2, 768, 12, 12), _tokens), shape=(512,), rows=(4, 16, 32)
    )
    yield gpt2(name="gpt2-small fused bf16")
    yield gpt2(name="gpt2-small foreach fp32", optimizer="adamw-foreach", precision="fp32", rows=(2, 8, 24))
    yield gpt2(name="gpt2-small sgd bf16 checkpointed", optimizer="sgd", checkpointing="on", rows=(8, 32, 64))
    medium = partial(
        Case,
        make_task=lambda: FromConfig("gpt2-medium", partial(_gpt2, 1024, 24, 16), _tokens),
        shape=(512,),
        rows=(2, 8, 24),
    )
    yield medium(name="gpt2-medium fused bf16")
    yield medium(name="gpt2-medium adafactor bf16", optimizer="adafactor")
    yield medium(name="gpt2-medium fused bf16 checkpointed", checkpointing="on", rows=(4, 16, 48))

    llama1 = partial(Case, make_task=partial(_llama, "1b"), shape=(1024,), rows=(2, 8, 16))
    yield llama1(name="llama-1b full fused bf16 padded")
    yield llama1(name="llama-1b full fused bf16 packed", layout="packed")
    yield llama1(name="llama-1b full adafactor bf16 packed checkpointed", layout="packed", optimizer="adafactor", checkpointing="on", rows=(4, 16, 48))  # fmt: skip
    lora1 = partial(llama1, make_task=partial(_llama, "1b", lora=True), needs=("peft",), rows=(2, 8, 32))
    yield lora1(name="llama-1b lora fused bf16 padded")
    yield lora1(name="llama-1b lora fused bf16 packed", layout="packed")
    qlora1 = partial(lora1, make_task=partial(_llama, "1b", lora=True, load_in="4bit"), needs=("peft", "bitsandbytes"))
    yield qlora1(name="llama-1b qlora fused bf16 padded")
    yield qlora1(name="llama-1b qlora fused bf16 packed", layout="packed")

    lora8 = partial(Case, make_task=partial(_llama, "8b", lora=True), shape=(1024,), rows=(1, 2, 6), needs=("peft",))
    yield lora8(name="llama-8b lora fused bf16 padded")
    yield lora8(name="llama-8b lora fused bf16 packed", layout="packed")
    yield lora8(
        name="llama-8b lora fused bf16 packed checkpointed", layout="packed", checkpointing="on", rows=(4, 16, 48)
    )
    qlora8 = partial(lora8, make_task=partial(_llama, "8b", lora=True, load_in="4bit"), needs=("peft", "bitsandbytes"))
    yield qlora8(name="llama-8b qlora fused bf16 padded")
    yield qlora8(name="llama-8b qlora fused bf16 packed", layout="packed")
    yield qlora8(
        name="llama-8b qlora fused bf16 packed checkpointed", layout="packed", checkpointing="on", rows=(4, 16, 48)
    )

    vit = partial(Case, make_task=lambda: FromConfig("vit", _vit, _images), shape=(), rows=(16, 64, 192))
    yield vit(name="vit-b fused bf16")
    yield vit(name="vit-b foreach fp32", optimizer="adamw-foreach", precision="fp32", rows=(16, 64, 128))
    yield vit(name="vit-b fused bf16 checkpointed", checkpointing="on", rows=(32, 128, 512))

    resnet = partial(Case, make_task=lambda: FromConfig("resnet", _resnet, _images), shape=(), rows=(16, 64, 192))
    yield resnet(name="resnet-50 sgd bf16", optimizer="sgd")
    yield resnet(name="resnet-50 sgd fp32", optimizer="sgd", precision="fp32", rows=(16, 64, 128))

    unet = partial(Case, make_task=partial(_example, "unet"), shape=(256,), rows=(4, 32, 64))
    yield unet(name="unet fused fp32", precision="fp32")
    yield unet(name="unet foreach bf16", optimizer="adamw-foreach")
    yield unet(name="unet fused bf16 checkpointed", checkpointing="on")

    pairs = partial(Case, make_task=partial(_example, "all_pairs"), shape=(), precision="fp32", rows=(512, 4096, 16384))
    yield pairs(name="all-pairs fused fp32")

    whisper = partial(Case, make_task=lambda: FromConfig("whisper", _whisper, _speech), shape=(128,), rows=(4, 16, 48))
    yield whisper(name="whisper-tiny fused bf16")
    yield whisper(name="whisper-tiny foreach fp32", optimizer="adamw-foreach", precision="fp32")
    yield whisper(name="whisper-tiny fused bf16 checkpointed", checkpointing="on")
