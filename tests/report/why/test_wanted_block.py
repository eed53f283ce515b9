"""The block that did not fit is named only from numbers that are known, and only as likely."""

import pytest

import brimful
from brimful.report.why.gpu_messages import Settings, bounds, likely_blocks, read_settings
from brimful.units import GiB, MiB

CHAT = Settings(
    micro_batch=32, batches=(32,), lengths=(256, 252), vocab=(40960,), heads=(12,), hidden=(768,), feed_forward=(3072,)
)


def names(shown, settings, phase=None):
    return [block.name for block in likely_blocks(bounds(shown, allocator=True), settings, phase)]


def test_the_printed_size_is_rounded_to_two_decimals_and_to_2_mib():
    low, high = bounds("1.23 GiB", allocator=True)
    assert low < 32 * 252 * 40960 * 4 < high and high - low < 0.013 * GiB


@pytest.mark.parametrize("shown", ["2.00 MiB", "20.00 MiB"])
def test_the_sizes_that_torch_asks_for_anyway_say_nothing(shown):
    assert bounds(shown, allocator=True) is None


def test_a_size_in_bytes_is_exact():
    assert bounds("54760833024 bytes", allocator=False) == (54760833024, 54760833024)


@pytest.mark.parametrize(
    ("factors", "name"),
    [
        ((32, 252, 40960, 4), "the fp32 logits"),
        ((32, 252, 40960, 2), "the bf16 or fp16 logits"),
        ((32, 251, 40960, 4), "the fp32 logits"),  # a causal model's loss leaves out one token
        ((32, 12, 256, 256, 4), "the fp32 attention scores of a layer"),
        ((32, 256, 3072, 4), "an fp32 activation of a feed-forward layer"),
        ((40960, 768, 4), "the fp32 embedding table, or its gradient or optimizer state"),
    ],
)
def test_a_product_of_known_numbers_names_the_tensor(factors, name):
    size = 1
    for factor in factors:
        size *= factor
    rounded = -(-size // (2 * MiB)) * 2 * MiB
    shown = f"{rounded / GiB:.2f} GiB" if rounded > GiB else f"{rounded / MiB:.2f} MiB"
    assert name in names(shown, CHAT)


def test_a_size_that_no_product_has_names_nothing():
    assert names("1.31 GiB", CHAT) == []


def test_nothing_is_named_without_numbers():
    assert names("1.23 GiB", Settings()) == []


def test_the_traceback_decides_between_two():
    both = Settings(batches=(8,), lengths=(1024,), vocab=(2048,), hidden=(2048,))
    assert names("64.00 MiB", both, "loss")[0] == "the fp32 logits"
    assert len(names("64.00 MiB", both)) == 2


def test_two_tensors_of_one_size_are_told_as_a_doubt():
    log = "batch_size=8 seq_len=1024 vocab_size=2048 hidden_size=2048\nRuntimeError: CUDA out of memory. Tried to allocate 64.00 MiB (GPU 0; 7.79 GiB total capacity; 7.31 GiB already allocated; 10.00 MiB free; 7.40 GiB reserved in total by PyTorch)"
    assert (
        "The block may be the fp32 logits (8 × 1,024 × 2,048 × 4 bytes) or fp32 hidden states"
        in brimful.diagnose(log).cause
    )


@pytest.mark.parametrize(
    "text",
    [
        "per_device_train_batch_size=8",
        '"train_micro_batch_size_per_gpu": 8,',
        "['--per_device_train_batch_size', '8', '--bf16']",
        "--per-device-train-batch-size 8 --bf16",
        "batch_size_per_gpu: int = 8  # of 12",
        "  Instantaneous batch size per device = 8",
        "batch_size: 8",
        "batch_size=8",
        "[INFO] batch size 8, max_seq_len 256",
        "Batch size: 8",
        "batch size per device = 8",
    ],
)
def test_a_setting_is_read_however_it_is_written(text):
    assert read_settings([(0, text)]).micro_batch == 8


@pytest.mark.parametrize(
    "text",
    [
        "batch_size_8",
        "my_batch_size_x=8",
        "batch_size=8.5e3",
        "batch_size=auto",
        "batch_size=8k",
        "Total batch size 524,288 tokens",
        "effective batch size: 64",
        "  Batch size = 96",
    ],
)
def test_what_is_no_count_is_no_setting(text):
    assert read_settings([(0, text)]).micro_batch is None


def test_the_most_specific_name_wins():
    text = "batch_size=256\nper_device_train_batch_size=8\nbatch_size=128"
    assert read_settings([(0, text)]).micro_batch == 8


def test_processes_follow_from_the_banner():
    banner = "Instantaneous batch size per device = 8\n Total train batch size (w. parallel, distributed & accumulation) = 64\n Gradient Accumulation steps = 4\n"
    assert read_settings([(0, banner)]).processes == 2


@pytest.mark.parametrize(
    ("text", "name", "value"),
    [
        ("bf16=True", "precision", "bf16"),
        ("--fp16 True", "precision", "fp16"),
        ('"mixed_precision": "no"', "precision", "fp32"),
        ("Using bfloat16 Automatic Mixed Precision (AMP)", "precision", "bf16"),
        ("fp16_full_eval=True", "precision", None),
        ("bf16=False", "precision", None),
        ("distributed training: True, compute dtype: torch.bfloat16", "precision", "bf16"),
        ('bf16=True\n"torch_dtype": "float32"', "precision", "bf16"),
        ("***** Running Evaluation *****\n  Num examples = 40\n  Batch size = 96\n", "eval_batch", 96),
        ("vocab size: 29298", "vocab", (29298,)),
        ("finetuning_type: lora", "adapters", True),
        ("finetuning_type: full", "adapters", False),
        ('"stage": 3,', "sharded", True),
        ("fsdp=[], deepspeed=None", "sharded", False),
        ('"load_in_4bit": true', "quantized", True),
        ("optim=adafactor,", "optimizer", "adafactor"),
        ('"optimizer": "AdamW8bit"', "optimizer", "adamw8bit"),
        ("gradient_checkpointing=True", "checkpointing", True),
        ("gradient_checkpointing=False", "checkpointing", False),
        ("PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True", "growing_segments", True),
        ("try setting PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True to avoid", "growing_segments", False),
        ("trainable params: 4,194,304 || all params: 6,742,609,920 || trainable%: 0.06", "trained", 4_194_304),
        ("trainable params: 4,194,304 || all params: 6,742,609,920 || trainable%: 0.06", "parameters", 6_742_609_920),
        ("number of parameters: 124.44M", "parameters", 124_440_000),
        ("input torch.Size([4, 512])", "sizes", (512,)),
    ],
)
def test_what_else_a_log_tells(text, name, value):
    assert getattr(read_settings([(0, text)]), name) == value
