"""The trainers that `sft.py` compares, each driven as its own documentation shows.

**brimful**  `brimful.train` of the task `sft`, without a single option of the plan: it sees the memory that the process may
             use, and chooses the rest.
**trl**      `SFTTrainer`, which loads the model itself from its folder. Options are those of `SFTConfig`, with `batch` for the
             batch size, `dtype` for the weights' and `attention` for the attention kernel.
**unsloth**  `FastLanguageModel` and the `SFTTrainer` that it patches.

Before its first step `Case.check` counts what a trainer trains, and refuses it if that is not what the case says.

All start from the same weights and have the same rows in the same steps, AdamW at a constant rate of 1e-5 (adapters: 1e-4)
without weight decay, gradients clipped to 1, bf16 autocast on a GPU, the same adapters. TRL's own accumulation fills up the
global batch. Packing is the exception: TRL packs rows into sequences of a fixed length before training, in an order of its
own, so the number of sequences per step is chosen to give *about* the same number of rows.
"""

import contextlib
import inspect
import tempfile
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch

import brimful
from sft_cases import LORA, Case, Stream
from train_peers import Clock, Enough, _planned, _Ticks

CLIP = 1.0
IGNORED = -100


@dataclass(frozen=True, kw_only=True)
class Training:
    """What every trainer gets."""

    case: Case
    options: dict[str, Any]
    """The trainer's own, from the table of entries."""
    clock: Clock
    seed: int
    workers: int
    """Loader workers of the peers. Brimful chooses its own."""
    hooks: tuple[brimful.Hook, ...] = ()
    """More of Brimful's."""
    notes: dict[str, Any] = field(default_factory=dict)
    """Further facts for the result."""

    @property
    def on_gpu(self) -> bool:
        return self.clock.device.type == "cuda"

    @property
    def learning_rate(self) -> float:
        return 1e-5 if self.case.method == "full" else 1e-4


def train_with_brimful(training: Training) -> None:
    case, clock, events = training.case, training.clock, []
    ticks = _Ticks(clock, case)  # type: ignore[arg-type]
    request: dict[str, Any] = {
        "max_steps": clock.steps, "lr": training.learning_rate, "weight_decay": 0.0, "schedule": "constant", "warmup": 0,
        "clip_norm": CLIP, "device": str(clock.device), "seed": training.seed, "cache": False, "quiet": True,
        "hooks": [_Check(case), *training.hooks, ticks], "listeners": [events.append],
    }  # fmt: skip
    if case.tiny:
        request["global_batch"] = case.global_batch
    with tempfile.TemporaryDirectory(prefix="bench-sft-") as folder:
        try:
            brimful.train(case.task(), case.store.path, **{"run": f"{folder}/run", **request, **training.options})
        except Enough:
            pass
        finally:
            training.notes.update(_planned(events), **ticks.peaks)
            training.notes["survived_ooms"] = training.notes.pop("ooms", 0)


class _Check(brimful.Hook):
    def __init__(self, case: Case) -> None:
        self.case = case

    def before(self, loop: Any) -> None:
        self.case.check(loop.stepper.model)


def train_with_trl(training: Training) -> None:
    from transformers.trainer_callback import PrinterCallback
    from trl import SFTTrainer

    options = dict(training.options)
    init = {"dtype": options.pop("dtype", "float32")}
    if attention := options.pop("attention", None):
        init["attn_implementation"] = attention
    more: dict[str, Any] = {}
    if training.case.method != "full":
        from peft import LoraConfig

        more["peft_config"] = LoraConfig(
            r=LORA["r"], lora_alpha=LORA["alpha"], lora_dropout=0.0, target_modules="all-linear", task_type="CAUSAL_LM"
        )
    if training.case.method == "qlora":
        more["quantization_config"] = _four_bits()
        init["dtype"] = "bfloat16"
    Timed, callback = _timed(SFTTrainer, training, packing=bool(options.get("packing")))
    with tempfile.TemporaryDirectory(prefix="bench-sft-") as folder:
        arguments = _arguments(training, options, folder, model_init_kwargs=init)
        trainer = Timed(
            model=str(training.case.model_folder), args=arguments, processing_class=_tokenizer(training),
            train_dataset=_dataset(training), callbacks=[callback], **more,
        )  # fmt: skip
        trainer.remove_callback(PrinterCallback)
        with contextlib.suppress(Enough):
            trainer.train()


def train_with_unsloth(training: Training) -> None:
    import unsloth  # noqa: F401 - it patches what is imported after it
    from transformers.trainer_callback import PrinterCallback
    from trl import SFTTrainer
    from unsloth import FastLanguageModel

    case, options = training.case, dict(training.options)
    model, tokenizer = FastLanguageModel.from_pretrained(
        str(case.model_folder), max_seq_length=case.max_tokens, load_in_4bit=case.method == "qlora",
        full_finetuning=case.method == "full", dtype=torch.bfloat16, local_files_only=True,
    )  # fmt: skip
    if case.method != "full":
        model = FastLanguageModel.get_peft_model(
            model, r=LORA["r"], lora_alpha=LORA["alpha"], lora_dropout=0, bias="none", random_state=training.seed,
            target_modules=["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"],
            use_gradient_checkpointing="unsloth",
        )  # fmt: skip
    Timed, callback = _timed(SFTTrainer, training, packing=bool(options.get("packing")))
    with tempfile.TemporaryDirectory(prefix="bench-sft-") as folder:
        trainer = Timed(
            model=model, args=_arguments(training, options, folder), processing_class=tokenizer,
            train_dataset=_dataset(training), callbacks=[callback],
        )  # fmt: skip
        trainer.remove_callback(PrinterCallback)
        with contextlib.suppress(Enough):
            trainer.train()


def _four_bits() -> Any:
    from transformers import BitsAndBytesConfig

    return BitsAndBytesConfig(
        load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_compute_dtype=torch.bfloat16, bnb_4bit_use_double_quant=True
    )  # fmt: skip


def _tokenizer(training: Training) -> Any:
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(training.case.model_folder, local_files_only=True)


def _dataset(training: Training) -> Any:
    return Stream(training.case, training.clock.steps, training.seed).dataset()


def _arguments(training: Training, options: dict[str, Any], folder: str, **more: Any) -> Any:
    """An `SFTConfig` with the contest's batch and rate, everything else at its default or as the entry says."""
    from trl import SFTConfig

    case, packing = training.case, bool(options.get("packing"))
    batch = min(options.pop("batch", 8), case.global_batch)
    rows_a_sequence = 1.0
    if packing:  # best-fit packing fills sequences almost to the end
        rows_a_sequence = case.max_tokens / Stream(case, 8, training.seed).mean_length
        batch = min(batch, max(1, round(case.global_batch / rows_a_sequence)))
    accumulation = max(1, round(case.global_batch / rows_a_sequence / batch))
    training.notes.update(batch=batch, accumulation=accumulation)
    sampling = {} if packing else _sequential()
    return SFTConfig(**{
        "output_dir": folder, "max_steps": training.clock.steps, "per_device_train_batch_size": batch,
        "gradient_accumulation_steps": accumulation, "learning_rate": training.learning_rate, "weight_decay": 0.0,
        "lr_scheduler_type": "constant", "max_grad_norm": CLIP, "max_length": case.max_tokens, "seed": training.seed,
        "use_cpu": not training.on_gpu, "bf16": training.on_gpu, "save_strategy": "no", "report_to": [],
        "disable_tqdm": True, "log_level": "error", "dataloader_num_workers": training.workers,
        # the rows are tokens already, and short enough
        "dataset_kwargs": {"skip_prepare_dataset": not packing}, **sampling, **more, **options,
    })  # fmt: skip


def _sequential() -> dict[str, str]:
    """The rows in the order of the dataset, as far as the installed version has an option for it; see `_timed`."""
    from transformers import TrainingArguments

    known = inspect.signature(TrainingArguments.__init__).parameters
    return {"train_sampling_strategy": "sequential"} if "train_sampling_strategy" in known else {}


def _timed(Base: Any, training: Training, *, packing: bool) -> tuple[Any, Any]:
    """The trainer, reporting its micro-batches and steps to the clock without waiting for the GPU."""
    from torch.utils.data import SequentialSampler
    from transformers import TrainerCallback

    clock, own_order = training.clock, "train_sampling_strategy" in training.options or packing

    class Timed(Base):  # type: ignore[misc,valid-type]
        def _get_train_sampler(self, *args: Any) -> Any:
            return super()._get_train_sampler(*args) if own_order else SequentialSampler(self.train_dataset)

        def compute_loss(self, model: Any, inputs: Any, return_outputs: bool = False, num_items_in_batch: Any = None, **more: Any) -> Any:  # fmt: skip
            _note_micro_batch(clock, inputs)
            count = (inputs["labels"][:, 1:] != IGNORED).sum()
            result = super().compute_loss(model, inputs, return_outputs, num_items_in_batch=num_items_in_batch, **more)
            loss = result[0] if isinstance(result, tuple) else result
            clock._current.loss_sums.append(loss.detach() * (count if num_items_in_batch is None else num_items_in_batch))  # fmt: skip
            clock._current.counts.append(count)
            return result

    class Ticks(TrainerCallback):
        def on_train_begin(self, *_: Any, model: Any, **__: Any) -> None:
            training.case.check(model)
            clock.begin()

        def on_step_end(self, *_: Any, **__: Any) -> None:
            if clock.step():
                raise Enough

    return Timed, Ticks()


def _note_micro_batch(clock: Clock, inputs: Any) -> None:
    """Rows side by side with a mask, or end to end with positions that begin again at 0."""
    if "attention_mask" in inputs:
        clock.rows(inputs["attention_mask"].sum(1)[:, None])
        clock.computed([(len(inputs["input_ids"]), (inputs["input_ids"].shape[1],))])
        return
    # The lengths are on the device in the trainer's own tensor. Reading them would make the host wait.
    clock.rows(inputs["cu_seq_lens_q"].diff()[:, None])
    clock.computed([(1, (inputs["input_ids"].numel(),))])


TRAINERS: dict[str, Callable[[Training], None]] = {
    "brimful": train_with_brimful,
    "trl": train_with_trl,
    "unsloth": train_with_unsloth,
}
