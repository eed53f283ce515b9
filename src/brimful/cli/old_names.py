"""The names that options have in other programs, and what they are here: ChatLM's scripts, Hugging Face, LLaMA-Factory, launchers.
Those of an earlier Brimful are here too.

Users of those programs type `--per_device_train_batch_size 32 --gradient_accumulation_steps 2` from habit. Accepting it would
be wrong, because the batch per device is chosen by the plan, and "unknown option" would not help. So each old name has an
answer: the option that replaces it, with its value in the new form; or why it is not needed; or that it is not available.

`corrections.py` uses this table, and `docs/from-huggingface.md` and `docs/from-chatlm.md` show it, Brimful's own names left out; a
test keeps them equal.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal

from brimful.languages import tr

Source = Literal["ChatLM", "Transformers", "LLaMA-Factory", "launchers", "Brimful"]
Verdict = Literal["now", "not needed", "not available"]
Convert = Callable[[str], "str | None"]
"""The new value for an old one; None if there is none, "" if the option is then left out."""

CHATLM: Source = "ChatLM"
HF: Source = "Transformers"
LLAMA: Source = "LLaMA-Factory"
LAUNCH: Source = "launchers"
BRIMFUL: Source = "Brimful"
TRUE, FALSE = ("true", "1", "yes", "on", ""), ("false", "0", "no", "off", "none")
SWITCH = "(switch)"
"""What a converter returns for an option that takes no value."""


@dataclass(frozen=True, kw_only=True)
class OldName:
    """One option of another program."""

    name: str
    """With underscores."""
    source: Source
    verdict: Verdict
    flag: str | None = None
    """The option now; `TASK` and `DATA` are the first two words of a command."""
    note: str = ""
    """What has changed, or why it is not needed or not available."""
    convert: Convert = str
    switch: bool = False
    """True or false, which may be left out: `--bf16`."""
    data_flag: str | None = None
    """The option of `brimful data …`; None if it is none."""
    part: Literal["batch", "accumulation"] | None = None
    """A factor of the rows per optimizer step."""
    also: Callable[[str], Mapping[str, str]] = lambda value: {}
    """Further options, with their values, without which this value means something else here."""

    def for_data(self) -> "OldName":
        """What it is in `brimful data …`."""
        convert = self.convert if self.verdict == "now" else only_true if self.switch else str
        return replace(self, verdict="now", flag=self.data_flag, note="", convert=convert)

    def sentence(self, shown: str, flag: str | None = None) -> str:
        """`--learning_rate is now --lr.`, for the name as the user wrote it. `flag` is the option as it is written there."""
        values = {"name": shown, "flag": flag or self.flag, "note": tr(self.note)}
        if self.verdict == "not needed":
            return tr("{name} is not needed: {note}.", **values)
        if self.verdict == "not available":
            return tr("{name} is not available: {note}.", **values)
        return tr("{name} is now {flag}, {note}." if self.note else "{name} is now {flag}.", **values)


# ---- Values ----------------------------------------------------------------------------------------------------------


def is_true(value: str) -> bool:
    return value.strip().lower() in TRUE


def if_true(result: str) -> Convert:
    """This value if the old one is true, nothing if it is not."""
    return lambda value: result if is_true(value) else ""


def words(**table: str) -> Convert:
    """By a table of old and new values."""
    return lambda value: table.get(value.strip().lower())


def on_off(value: str) -> str:
    return "on" if is_true(value) else "off"


def steps_or_share(value: str) -> str | None:
    """`0.03` is a share: `3%`. `100` is a number of steps."""
    try:
        number = float(value)
    except ValueError:
        return None
    return f"{100 * number:g}%" if 0 < number < 1 else f"{number:.0f}"


def whole(value: str) -> str | None:
    """A whole number above 0; -1 and None stand for no limit there."""
    try:
        number = float(value)
    except ValueError:
        return "" if value.strip().lower() in FALSE else None
    return "" if number <= 0 else f"{number:.0f}" if number >= 1 else None


def trackers(value: str) -> str | None:
    names = [name for name in value.replace(",", " ").split() if name.lower() not in ("none", "all")]
    return ",".join(names) if set(names) <= {"tensorboard", "wandb", "mlflow", "trackio"} else None


def best(value: str) -> str:
    return value.removeprefix("eval_")


def only_true(value: str) -> str | None:
    """True is the switch; a path is something else."""
    return SWITCH if is_true(value) else "" if value.strip().lower() in FALSE else None


def lora_targets(value: str) -> str:
    """`q_proj,v_proj` as `targets=q_proj+v_proj`; `all` are all linear layers."""
    names = value.replace(",", " ").split()
    return f"targets={'all-linear' if names == ['all'] else '+'.join(names)}"


OPTIMIZERS = words(
    adamw_torch="adamw", adamw_torch_fused="adamw", adamw_hf="adamw", adamw="adamw", adafactor="adafactor",
    adamw_bnb_8bit="adamw8bit", adamw_8bit="adamw8bit", paged_adamw_8bit="adamw8bit", adamw_torch_8bit="adamw8bit",
)  # fmt: skip
SCHEDULES = words(
    cosine="cosine", linear="linear", constant="constant", constant_with_warmup="constant", warmup_stable_decay="wsd",
    cosine_with_min_lr="cosine",
)  # fmt: skip


def falls_to_zero(value: str) -> Mapping[str, str]:
    """As these schedules do there; here the rate ends at a tenth of the peak by default."""
    return {"--min-lr": "0"} if value.strip().lower() in ("cosine", "linear", "warmup_stable_decay") else {}


PRECISIONS = words(bf16="bf16", fp16="fp16", no="fp32", fp32="fp32")
LAYOUTS = words(**dict.fromkeys(TRUE, "packed"), **dict.fromkeys(FALSE, "padded"))


# ---- The table -------------------------------------------------------------------------------------------------------


def _rows(verdict: Verdict, names: str, source: Source, note: str, **fields: Any) -> list[OldName]:
    return [OldName(name=name, source=source, verdict=verdict, note=note, **fields) for name in names.split()]


def _now(flag: str, names: str, source: Source, note: str = "", **fields: Any) -> list[OldName]:
    return _rows("now", names, source, note, flag=flag, **fields)


def _needless(names: str, source: Source, note: str, **fields: Any) -> list[OldName]:
    """Leaving it out loses nothing."""
    return _rows("not needed", names, source, note, convert=lambda value: "", **fields)


def _missing(names: str, source: Source, note: str, **fields: Any) -> list[OldName]:
    """Leaving it out would change what was asked for."""
    return _rows("not available", names, source, note, convert=lambda value: "", **fields)


CEILING = "a ceiling; usually leave it out"
ROWS = "the rows of an optimizer step: rows per device × accumulation × processes"
MEASURED = "measured on your rows; usually leave it out"
EVENTS = "every step is in RUN/events.jsonl"

# fmt: off
_TABLE = (
    # Rows per step.
    *_now("--micro-batch", "batch_size_per_gpu", CHATLM, CEILING, convert=whole, part="batch"),
    *_now("--micro-batch", "per_device_train_batch_size per_gpu_train_batch_size", HF, CEILING, convert=whole, part="batch"),
    *_now("--micro-batch", "batch_size", LAUNCH, CEILING, convert=whole, part="batch"),
    *_now("--global-batch", "gradient_accumulation_steps", HF, ROWS, part="accumulation"),
    *_now("--global-batch", "accumulate_grad_batches", LAUNCH, ROWS, part="accumulation"),
    *_needless("auto_find_batch_size", HF, "the micro-batch is always measured", switch=True),
    *_needless("per_device_eval_batch_size per_gpu_eval_batch_size eval_accumulation_steps", HF, "the batch of an evaluation is measured"),
    *_needless("eval_batch_size", CHATLM, "the batch of an evaluation is measured"),
    # Task, data, folders.
    *_now("TASK sft", "is_finetune", CHATLM, convert=if_true("sft"), switch=True),
    *_now("--resume", "is_keep_training", CHATLM, "with --run", convert=only_true, switch=True),
    *_now("--recipe small", "use_small_config", CHATLM, convert=if_true("small"), switch=True),
    *_now("--recipe fast", "use_fast_config", CHATLM, convert=if_true("fast"), switch=True),
    *_now("--recipe pretrain", "use_large_config", CHATLM, convert=if_true("pretrain"), switch=True),
    *_now("DATA", "train_file", HF, "the second word of the command", data_flag="FILES"),
    *_now("DATA", "dataset_name dataset_path", HF, "a file, a folder or a name on the hub", data_flag="FILES"),
    *_now("DATA", "sft_train_file", CHATLM, "the second word of the command", data_flag="FILES"),
    *_now("DATA", "dataset", LLAMA, "a file or a folder, not a name in dataset_info.json", data_flag="FILES"),
    *_now("DATA", "tokenized_path", LLAMA, "a token store, which `brimful data tokenize` writes"),
    *_missing("dataset_dir", LLAMA, "DATA is the path itself"),
    *_now("--valid", "validation_file", HF),
    *_now("--valid", "eval_dataset", LLAMA, "a file or a folder"),
    *_missing("test_file", HF, "`brimful eval MODEL DATA` evaluates after the training"),
    *_now("--run", "output_dir", HF, data_flag="--output"),
    *_now("--run", "train_state_dir", CHATLM),
    *_now("--model", "model_name_or_path", HF, "a folder, a run or a name on the hub"),
    *_now("--model", "finetune_from_ckp_file model_file", CHATLM, "a folder written by save_pretrained"),
    *_now("--tokenizer", "tokenizer_name tokenizer_name_or_path", HF, "a folder", data_flag="--tokenizer"),
    *_now("--tokenizer", "tokenizer_dir", CHATLM, data_flag="--tokenizer"),
    *_missing("tokenizer_file", CHATLM, "--tokenizer takes a folder, such as `brimful data tokenizer` writes"),
    *_missing("config_name", HF, "--model takes a preset for new weights, or a folder with its config"),
    *_missing("model_config_file", CHATLM, "--model takes a preset for new weights, or a folder with its config"),
    *_now("--resume", "resume_from_checkpoint", HF, "with --run; from other programs' checkpoints take the weights, with --model", convert=only_true, switch=True),
    *_missing("overwrite_output_dir", HF, "a run is never overwritten; take another --run", switch=True, data_flag="--overwrite"),
    # Length of rows.
    *_now("--max-tokens", "max_seq_length max_length model_max_length block_size", HF, "for prompt and response each, or 256,320", convert=whole, data_flag="--max-tokens"),
    *_now("--max-tokens", "max_seq_len", CHATLM, "for prompt and response each, or 256,320", convert=whole, data_flag="--max-tokens"),
    *_now("--max-tokens", "cutoff_len", LLAMA, "for prompt and response each, or 256,320", convert=whole, data_flag="--max-tokens"),
    *_missing("max_source_length max_target_length", HF, "--max-tokens takes both, such as 256,320"),
    # Length of the run.
    *_now("--epochs", "num_train_epochs", HF),
    *_now("--epochs", "max_epochs", LAUNCH),
    *_missing("max_train_samples", HF, "--max-steps makes a short run"),
    *_missing("max_samples", LLAMA, "--max-steps makes a short run"),
    # Optimizer and schedule.
    *_now("--lr", "learning_rate", HF, "the peak"),
    *_now("--lr", "learn_rate", CHATLM, "the peak; the old trainer's Adafactor ignored it"),
    *_now("--optimizer", "optim", HF, convert=OPTIMIZERS),
    *_missing("optim_args optim_target_modules adam_beta1 adam_beta2 adam_epsilon", HF, "a task of your own can return any optimizer"),
    *_now("--schedule", "lr_scheduler_type", HF, "--min-lr 0 falls to zero as there", convert=SCHEDULES, also=falls_to_zero),
    *_missing("lr_scheduler_kwargs", HF, "--min-lr and --decay shape the schedule"),
    *_missing("div_factor", CHATLM, "--lr is the peak, --warmup the way there, --min-lr the end"),
    *_now("--warmup", "warmup_steps", HF, "steps, or a share such as 3%", convert=steps_or_share),
    *_now("--warmup", "warmup_ratio", HF, "a share such as 3%", convert=steps_or_share),
    *_now("--clip-norm", "max_grad_norm", HF),
    *_now("--clip-norm", "gradient_clip_val gradient_clipping", LAUNCH),
    *_now("--label-smoothing", "label_smoothing_factor", HF),
    *_missing("neftune_noise_alpha", HF, "a task of your own can add noise in its loss"),
    *_needless("average_tokens_across_devices", HF, "the loss is always averaged over all tokens of a step", switch=True),
    # Precision, memory, speed.
    *_now("--precision bf16", "bf16", HF, "the chat tasks use it by themselves where the card has it", convert=if_true("bf16"), switch=True),
    *_now("--precision fp16", "fp16", HF, "bf16 needs no loss scaling, where the card has it", convert=if_true("fp16"), switch=True),
    *_now("--precision", "mixed_precision", LAUNCH, convert=PRECISIONS),
    *_now("--weights bf16", "pure_bf16", LLAMA, "small updates are rounded away", convert=if_true("bf16"), switch=True),
    *_needless("bf16_full_eval fp16_full_eval", HF, "evaluation uses --precision too", switch=True),
    *_missing("tf32", HF, "call torch.set_float32_matmul_precision in a task of your own", switch=True),
    *_now("--checkpointing", "gradient_checkpointing", HF, "auto uses it if it is faster or nothing else fits", convert=on_off, switch=True),
    *_now("--checkpointing off", "disable_gradient_checkpointing", LLAMA, convert=if_true("off"), switch=True),
    *_needless("gradient_checkpointing_kwargs", HF, "--checkpointing every-2 and every-3 cover fewer blocks"),
    *_now("--compile", "torch_compile", HF, "auto compiles where that wins the time back", convert=on_off, switch=True),
    *_needless("torch_compile_backend torch_compile_mode dynamo_backend", HF, "--compile chooses them"),
    *_needless("use_liger_kernel", HF, "the plan finds what fits", switch=True),
    *_needless("liger_kernel_config", HF, "the plan finds what fits"),
    *_needless("enable_liger_kernel use_unsloth use_unsloth_gc", LLAMA, "the plan finds what fits", switch=True),
    *_needless("flash_attn", LLAMA, "the attention kernel is chosen for the card and the layout"),
    *_needless("attn_implementation", HF, "the attention kernel is chosen for the card and the layout"),
    *_needless("torch_empty_cache_steps skip_memory_metrics", HF, "memory is planned and recorded"),
    *_needless("use_cache low_cpu_mem_usage", HF, "set where it is right", switch=True),
    *_needless("ultra_low_mem keep_in_memory", CHATLM, "rows are memory-mapped", switch=True),
    *_now("--layout", "packing", HF, "rows never see each other", convert=LAYOUTS, switch=True),
    *_now("--layout", "neat_packing", LLAMA, "rows never see each other", convert=LAYOUTS, switch=True),
    *_needless("group_by_length", HF, "the rows of a step are grouped by length; --mix window:8 goes further", switch=True),
    *_needless("train_sampling_strategy length_column_name sortish_sampler", HF, "the rows of a step are grouped by length; --mix window:8 goes further"),
    *_now("--device cpu", "use_cpu no_cuda", HF, convert=if_true("cpu"), switch=True),
    # Reading.
    *_now("--workers", "dataloader_num_workers", HF, MEASURED),
    *_now("--workers", "num_workers", CHATLM, MEASURED),
    *_now("--pin-memory", "dataloader_pin_memory", HF, MEASURED, convert=on_off, switch=True),
    *_now("--prefetch", "dataloader_prefetch_factor", HF, MEASURED, convert=whole),
    *_needless("dataloader_persistent_workers dataloader_drop_last dataloader_in_order", HF, "every step has exactly --global-batch rows, read ahead", switch=True),
    *_needless("dataloader_multiprocessing_context", HF, "every step has exactly --global-batch rows, read ahead"),
    *_needless("label_names", HF, "--columns names the columns"),
    *_needless("remove_unused_columns", HF, "--columns names the columns", switch=True),
    *_needless("streaming", HF, "rows are memory-mapped", switch=True),
    *_needless("dataloader_buffer_size", CHATLM, "rows are memory-mapped"),
    *_needless("buffer_size preprocessing_batch_size", LLAMA, "rows are memory-mapped"),
    *_needless("preprocessing_num_workers", HF, "tokenizing uses all cores"),
    *_needless("overwrite_cache", HF, "every run tokenizes its raw files itself", switch=True, data_flag="--overwrite"),
    # Evaluation, checkpoints, logs.
    *_now("--eval-every", "eval_steps", HF, convert=whole),
    *_now("--eval-rows", "max_eval_samples", HF, convert=whole),
    *_needless("eval_strategy evaluation_strategy", HF, "--valid evaluates, every --eval-every steps"),
    *_missing("eval_delay", HF, "--eval-every decides when"),
    *_missing("eval_on_start", HF, "`brimful eval MODEL DATA` evaluates before the training", switch=True),
    *_needless("predict_with_generate", HF, "answers are generated for --generate-rows rows", switch=True),
    *_missing("generation_max_length generation_num_beams generation_config", HF, "the task decides how it generates"),
    *_needless("prediction_loss_only eval_do_concat_batches eval_use_gather_object batch_eval_metrics", HF, "evaluation is exact for any batch", switch=True),
    *_needless("include_for_metrics", HF, "the task defines its scores"),
    *_now("--save-every", "save_steps", HF, "by default every ten minutes", convert=whole),
    *_now("--keep", "save_total_limit", HF, "besides the best", convert=whole),
    *_now("--keep", "keep_latest_n_ckp", CHATLM, "besides the best", convert=whole),
    *_needless("save_strategy", HF, "--save-every decides"),
    *_missing("save_only_model", HF, "a checkpoint has all that a resume needs; RUN/model is the model alone", switch=True),
    *_needless("save_on_each_node enable_jit_checkpoint", HF, "rank 0 saves, and on SIGTERM too", switch=True),
    *_needless("load_best_model_at_end", HF, "RUN/best is the best model", switch=True),
    *_now("--best", "metric_for_best_model", HF, convert=best),
    *_needless("greater_is_better", HF, "the task knows which score is better", switch=True),
    *_missing("best_epoch", CHATLM, "`brimful eval RUN DATA` takes the best checkpoint"),
    *_now("--trackers", "report_to", HF, convert=trackers),
    *_needless("logging_steps logging_strategy logging_dir log_level log_level_replica", HF, EVENTS),
    *_needless("logging_first_step logging_nan_inf_filter log_on_each_node disable_tqdm include_num_input_tokens_seen include_tokens_per_second", HF, EVENTS, switch=True),
    *_needless("plot_loss", LLAMA, "`brimful report RUN` draws it", switch=True),
    *_needless("run_name", HF, "the folder of --run is its name"),
    *_missing("project trackio_space_id trackio_bucket_id trackio_static_space_id", HF, "trackers read their own environment variables"),
    *_missing("use_swanlab swanlab_project", LLAMA, "--trackers takes tensorboard, wandb, mlflow and trackio"),
    *_needless("do_train do_eval do_predict", HF, "the command says it: train, eval", switch=True),
    *_missing("push_to_hub hub_private_repo hub_always_push", HF, "nothing is uploaded; `hf upload` does it", switch=True),
    *_missing("hub_model_id hub_token hub_strategy hub_revision", HF, "nothing is uploaded; `hf upload` does it"),
    # Resume and seeds.
    *_needless("data_seed", HF, "--seed also orders the rows"),
    *_now("--deterministic", "full_determinism", HF, convert=only_true, switch=True),
    *_needless("ignore_data_skip restore_callback_states_from_checkpoint", HF, "a resume continues at the exact row", switch=True),
    # Several cards.
    *_now("--processes", "num_processes nproc_per_node gpus n_gpu devices", LAUNCH, "one for each card", convert=whole),
    *_needless("multi_gpu", LAUNCH, "--processes N uses N cards", switch=True),
    *_missing("gpu_ids", LAUNCH, "CUDA_VISIBLE_DEVICES chooses the cards"),
    *_missing("num_machines nnodes machine_rank node_rank main_process_ip main_process_port master_addr master_port", LAUNCH, "for several machines: torchrun … -m brimful train … --run-dir DIR"),
    *_now("--backend", "ddp_backend", HF, convert=words(nccl="nccl", gloo="gloo")),
    *_needless("ddp_timeout", HF, "an OOM on one card makes the step slower, not the job hang"),
    *_needless("ddp_bucket_cap_mb", HF, "gradients are added up once per step"),
    *_needless("ddp_find_unused_parameters ddp_broadcast_buffers ddp_static_graph", HF, "gradients are added up once per step", switch=True),
    *_needless("local_rank", HF, "launchers set it as a variable"),
    *_missing("deepspeed fsdp fsdp_config accelerator_config parallelism_config", HF, "weights are not split over cards; brimful.integrations works with a Trainer of your own"),
    *_missing("use_deepspeed use_fsdp", LAUNCH, "weights are not split over cards", switch=True),
    *_needless("debug", HF, "--traceback shows where an error comes from"),
    # What LLaMA-Factory and TRL train.
    *_now("TASK sft", "stage", LLAMA, "the first word of the command; pretrain for pt, dpo for dpo", convert=words(sft="sft", pt="pretrain", dpo="dpo")),
    *_now("--freeze", "finetuning_type", LLAMA, "and for adapters --lora alone", convert=words(full="none", lora="")),
    *_missing("train_from_scratch", LLAMA, "--model takes a preset for new weights, such as chatlm-base", switch=True),
    *_missing("template", LLAMA, "the chat template of the model's tokenizer is used; --chat-template takes chatml, plain or a Jinja file"),
    *_needless("tool_format", LLAMA, "the chat template of the model's tokenizer writes tools"),
    *_missing("val_size", LLAMA, "`brimful data clean --valid 0.1` splits rows, and --valid takes the file", data_flag="--valid"),
    *_missing("validation_split_percentage", HF, "`brimful data clean --valid 0.1` splits rows, and --valid takes the file"),
    *_missing("mask_history", LLAMA, "every reply of a conversation is trained on", switch=True),
    *_now("--train-on", "train_on_prompt", LLAMA, convert=if_true("all"), switch=True),
    *_needless("completion_only_loss assistant_only_loss", HF, "only responses count in the loss", switch=True),
    *_missing("mix_strategy interleave_probs", LLAMA, "mix the files before, or in a task of your own"),
    *_now("--lora", "lora_rank", LLAMA, "with the other parts of adapters", convert="r={}".format),
    *_now("--lora", "lora_alpha", LLAMA, "with the other parts of adapters", convert="alpha={}".format),
    *_now("--lora", "lora_dropout", LLAMA, "with the other parts of adapters", convert="dropout={}".format),
    *_now("--lora", "lora_target", LLAMA, "with the other parts of adapters", convert=lora_targets),
    *_now("--lora", "lora_r", HF, "with the other parts of adapters", convert="r={}".format),
    *_now("--lora", "lora_target_modules", HF, "with the other parts of adapters", convert=lora_targets),
    *_missing("adapter_name_or_path", LLAMA, "--model takes the adapter, which is trained further"),
    *_needless("use_peft", HF, "--lora says so", switch=True),
    *_now("--load-in", "load_in_4bit", HF, convert=if_true("4bit"), switch=True),
    *_now("--load-in", "load_in_8bit", HF, convert=if_true("8bit"), switch=True),
    *_now("--load-in", "quantization_bit", LLAMA, convert=words(**{"4": "4bit", "8": "8bit"})),
    *_needless("quantization_method", LLAMA, "--load-in uses bitsandbytes"),
    *_missing("freeze_trainable_layers freeze_trainable_modules", LLAMA, "--freeze knows embeddings, encoder, encoder+embeddings and none"),
    *_now("--reference", "ref_model", LLAMA, "of dpo; by default the model as it begins"),
    *_now("--beta", "pref_beta", LLAMA, "of dpo"),
    *_now("--loss", "pref_loss", LLAMA, "of dpo: sigmoid, ipo, hinge, orpo or simpo", convert=words(sigmoid="sigmoid", ipo="ipo", hinge="hinge", orpo="orpo", simpo="simpo")),
    *_missing("reward_model", LLAMA, "reward models are trained by TRL's RewardTrainer: see docs/step.md"),
    *_missing("rope_scaling", LLAMA, "set it in the config of the model"),
    *_needless("trust_remote_code", HF, "no code from the hub is run", switch=True),
    *_needless("cache_dir", HF, "the variable HF_HOME says where the hub's models are kept"),
    # An earlier Brimful.
    *_now("--model", "size", BRIMFUL, "chatlm-tiny or chatlm-base", convert=words(tiny="chatlm-tiny", base="chatlm-base")),
    *_now("--model", "from", BRIMFUL),
    *_needless("random_weights", BRIMFUL, "a preset of --model, such as chatlm-base, has new weights", switch=True),
)
# fmt: on

OLD_NAMES: Mapping[str, OldName] = {old.name: old for old in _TABLE}
