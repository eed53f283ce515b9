"""What helps, ranked: for each kind of failure the fixes with what they save and cost, and the exact setting.

For a full GPU they come in the order of what they cost: nothing, time, then the experiment itself. A log tells little of a model, so
most figures are ranges, from the measurements behind Brimful: activations are 40–90 % of what a step holds; checkpointing saves
50–70 % of them for 15–50 % of the time; half the micro-batch cost up to 45 % of the rows per second. Where the message or a count of
weights gives a figure, that figure is used. Two rules hold everywhere: accumulation saves no memory, it only keeps the global batch
(micro-batch × accumulation × processes) when the micro-batch shrinks; and expandable segments are worth a line only if more than 10 %
of what the process holds is reserved and unused.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from typing import Any

from brimful.report.why.diagnosis import Fix, fix
from brimful.report.why.gpu_messages import Block, Settings
from brimful.units import GiB, show_bytes

FRAGMENTED = 0.10
"""Reserved and unused, of what the process holds, from which on expandable segments are worth trying."""
ACTIVATIONS = (0.4, 0.9)
"""The share of a step's memory that grows with the rows, where the number of weights is not known."""
STATE_BYTES = 16
"""Per trained weight in fp32 with AdamW: weight, gradient, two averages."""
MARGIN = 0.05
"""Of the card: what a fix should free beyond what was missing."""
LOGITS_COPIES = 3
"""The logits, their gradient, and a copy in another dtype."""
SMALL_OPTIMIZERS = ("adafactor", "8bit", "sgd", "lion", "lomo", "galore", "cpuadam")
"""Optimizers that have little state already."""
_NOT_LEARNT = "what is beyond that length is not learnt"
_FEWER_WORKERS, _SLOWER_READING = (
    "Use fewer loader workers, and let each read less ahead",
    "slower reading, if the CPU is the bottleneck",
)
_SLOWER = "0–45 % of the time, most where the card is not busy"
_SDPA = "F.scaled_dot_product_attention(q, k, v, is_causal=True)"
_CHUNKED = "F.linear_cross_entropy(hidden, head, labels, options=torch.nn.LinearCrossEntropyOptions())"
_LORA = 'get_peft_model(model, LoraConfig(target_modules="all-linear"))'
_IN_4_BITS = "from_pretrained(name, quantization_config=BitsAndBytesConfig(load_in_4bit=True))"
_STREAMED = 'datasets.load_dataset("json", data_files="rows.jsonl", streaming=True)'
_MAPPED = "torch.load(path, mmap=True, weights_only=True)"
_KERNEL_LOG = "sudo dmesg -T | grep -i 'killed process'"

Range = tuple[float, float]


def remedies(
    kind: str, figures: Mapping[str, Any], settings: Settings, *, block: Block | None = None
) -> tuple[Fix, ...]:
    """Fixes for this kind of failure, the best first: those that are enough alone before those that are not."""
    makers: dict[str, Callable[[], Iterator[Fix]]] = {
        "gpu-out-of-memory": lambda: GpuRemedies(figures, settings, block).fixes(),
        "gpu-library-out-of-memory": lambda: GpuRemedies(figures, settings, block).fixes(),
        "no-batch-fits": lambda: _no_batch(figures, settings),
        "host-killed": lambda: _host(figures, settings),
        "host-out-of-memory": lambda: _host_block(figures, settings),
        "shm-full": lambda: _shm(settings),
    }
    kind = "stopped" if kind == "killed" else kind
    fixes = list(makers[kind]()) if kind in makers else list(_OTHER.get(kind, ()))
    if kind == "nan-loss" and settings.precision != "fp16" and figures.get("precision") != "fp16":
        fixes = [one for one in fixes if one is not _TO_BF16]
    if kind == "disk-full" and figures.get("writing") == "file":
        fixes = [_FIND_FILES, *(one for one in fixes if one is not _FIND_FILES and "damaged" not in one.title)]
    return tuple(sorted(fixes, key=lambda one: one.enough is False))


# ---- A full GPU ----------------------------------------------------------------------------------------------------------


class GpuRemedies:
    """The fixes for a full GPU, from what the message and the log say."""

    def __init__(self, figures: Mapping[str, Any], settings: Settings, block: Block | None) -> None:
        self.figures, self.settings, self.block = figures, settings, block
        self.device = str(figures.get("device", "cuda"))
        self.phase = figures.get("phase")
        wanted, free = figures.get("wanted_bytes"), figures.get("free_bytes")
        if limit := figures.get("limit_bytes"):
            free = max(0, limit - figures.get("allocated_bytes", 0) - figures.get("unallocated_bytes", 0))
        self.missing: int | None = None if wanted is None or free is None else max(0, wanted - free)
        total = figures.get("total_bytes") or 0
        self.needed = None if self.missing is None else self.missing + MARGIN * total
        """What a fix must free: what was missing, and some air."""

    def fixes(self) -> Iterator[Fix]:
        outside = {"evaluation": self._evaluation, "generation": self._generation, "loading": self._loading}
        in_step = (self._attention, self._micro_batch, self._chunked_loss, self._bf16, self._checkpointing)
        makers = [self._limit, self._others, self._fragmented]
        if self.phase in outside:
            makers.append(outside[self.phase])
        elif self.phase == "optimizer":  # by then the activations are gone
            makers += [self._optimizer, self._freeze, self._cards]
        else:
            makers += [*in_step, self._optimizer, self._freeze, self._shorter, self._cards]
        for make in makers:
            yield from make()
        if self.device == "mps" and self.phase not in outside:
            yield fix("Let torch take all of the Mac's memory", costs="the Mac may swap or freeze", shell="PYTORCH_MPS_HIGH_WATERMARK_RATIO=0.0")  # fmt: skip

    def enough(self, saved: Range | None) -> bool | None:
        if self.needed is None or saved is None:
            return None
        return True if saved[0] >= self.needed else False if saved[1] < (self.missing or 0) else None

    @property
    def activations(self) -> Range | None:
        """Bytes that grow with the rows, at least and at most; None if the message has no figures."""
        held = self.figures.get("allocated_bytes")
        if held is None:
            return None
        wanted = self.figures.get("wanted_bytes", 0)
        weights = self.settings.parameters or self.settings.trained
        if weights and STATE_BYTES * weights < 0.95 * (held + wanted):
            return held + wanted - STATE_BYTES * weights, held + wanted - 2 * weights
        # A block as large as all the rest is no weight: it grows with the rows as a whole.
        low, high = (share * (held if wanted > held else held + wanted) for share in ACTIVATIONS)
        return (low + wanted, high + wanted) if wanted > held else (low, high)

    def _of_activations(self, low: float, high: float) -> dict[str, Any]:
        """What saving this share of the activations comes to: bytes where there are figures, else words."""
        if self.activations is None:
            share = f"{low:.0%}" if low == high else f"{100 * low:.0f}–{high:.0%}"
            return {"saves": f"{share} of the activations".replace("%", " %")}
        saved = self.activations[0] * low, self.activations[1] * high
        return {"saves": show_range(saved), "enough": self.enough(saved)}

    def _of_weights(self, low: int, high: int, words: str) -> dict[str, Any]:
        """The same for bytes per trained weight, of all of them where their number is known."""
        count = self.settings.trained or self.settings.parameters
        if not count:
            return {"saves": words}
        saved = low * count, high * count
        return {"saves": show_range(saved), "enough": self.enough(saved), "basis": "predicted"}

    def _limit(self) -> Iterator[Fix]:
        if limit := self.figures.get("limit_bytes"):
            more = show_bytes(max(0, self.figures.get("total_bytes", 0) - limit))
            yield fix(
                "Raise the limit that the program sets for itself", saves=more, basis="measured",
                brimful="--memory-limit", shell="torch.cuda.set_per_process_memory_fraction(1.0)",
            )  # fmt: skip

    def _others(self) -> Iterator[Fix]:
        others = self.figures.get("others_bytes")
        if not others:
            return
        up_to = f"up to {show_bytes(others)}"
        if self.device == "mps":
            yield fix("Close other programs, which share the memory of the Mac", saves=up_to, basis="measured")
            return
        pids = [str(one["pid"]) for one in self.figures.get("others", ())]
        who = f"Stop the other processes on the card (pid {', '.join(pids)})" if pids else "Stop the other processes on the card"  # fmt: skip
        card = 0 if self.figures.get("gpu") == 1 else 1  # not the one that is full
        see = {"hip": f"rocm-smi; HIP_VISIBLE_DEVICES={card}", "xpu": f"xpu-smi ps; ZE_AFFINITY_MASK={card}"}
        yield fix(
            f"{who}, or use another card", saves=show_bytes(others) if pids else up_to, basis="measured",
            enough=self.enough((others, others)) if pids else None, brimful=f"--device {'xpu' if self.device == 'xpu' else 'cuda'}:{card}",
            shell=see.get(self.device, f"nvidia-smi; CUDA_VISIBLE_DEVICES={card}"),
        )  # fmt: skip

    def _fragmented(self) -> Iterator[Fix]:
        unused = self.figures.get("unallocated_bytes") or 0
        held = self.figures.get("process_bytes") or self.figures.get("allocated_bytes", 0) + unused
        if not held or unused / held <= FRAGMENTED or self.settings.growing_segments or self.device in ("mps", "xpu"):
            return
        name = "PYTORCH_HIP_ALLOC_CONF" if self.device == "hip" else "PYTORCH_CUDA_ALLOC_CONF"
        share = f"{unused / held:.0%}".replace("%", " %")
        yield fix(
            "Set expandable_segments, which lets torch use the memory it has reserved in pieces", basis="measured",
            saves=f"up to {show_bytes(unused)} ({share} of what the process holds)",
            enough=False if self.missing is not None and unused < self.missing else None,
            brimful="(set by the command line)", shell=f"{name}=expandable_segments:True",
        )  # fmt: skip

    def _attention(self) -> Iterator[Fix]:
        if self.block is None or self.block.kind != "attention":
            return
        size = self.block.bytes
        yield fix(
            "Use an attention that never writes the scores of a layer as a whole", saves=f"{show_bytes(size)} for each layer that keeps them",
            basis="predicted", enough=self.enough((size, size)),
            transformers='from_pretrained(name, attn_implementation="sdpa")', accelerate=_SDPA, lightning=_SDPA,
        )  # fmt: skip

    def _micro_batch(self) -> Iterator[Fix]:
        rows, accumulation = self.settings.micro_batch, self.settings.accumulation
        if rows == 1:
            return
        if not rows:
            yield self._divided()
            return
        smaller, steps = self._split(rows, accumulation or 1)
        processes, whole = self.settings.processes, self.settings.rows_per_step
        factors = f"{smaller} × {steps}" + (f" × {processes}" if processes else "")
        if accumulation is None:
            effect = f"unchanged, if it did not accumulate: {factors} = {rows} rows per card"
        elif processes:
            effect = f"unchanged: {factors} = {smaller * steps * processes}"
        else:
            effect = f"unchanged: {factors} = {rows * accumulation} rows per card"
        yield fix(
            f"Use micro-batches of {smaller} instead of {rows} rows and accumulate {steps} instead of {accumulation or 1} times",
            costs=_SLOWER, global_batch=effect, **self._of_activations(1 - smaller / rows, 1 - smaller / rows),
            brimful=f"--global-batch {whole if whole and processes else rows * (accumulation or 1)}", **_accumulated(str(smaller), str(steps)),
        )  # fmt: skip

    def _divided(self) -> Fix:
        """Where the size of the micro-batch is not known."""
        parts = 2
        while self.activations and self.needed and (1 - 1 / parts) * self.activations[0] < self.needed and parts < 64:
            parts *= 2
        return fix(
            f"Divide the micro-batch by {parts} and multiply the accumulation by {parts}", costs=_SLOWER,
            global_batch="unchanged: micro-batch × accumulation × processes", **self._of_activations(1 - 1 / parts, 1 - 1 / parts),
            brimful="--global-batch N", **_accumulated(f"ROWS//{parts}", f"{parts}*STEPS"),
        )  # fmt: skip

    def _split(self, rows: int, accumulation: int) -> tuple[int, int]:
        """The largest smaller micro-batch that keeps the global batch and frees enough; half of it if that is not known."""
        together = rows * accumulation
        sizes = [size for size in range(rows - 1, 0, -1) if together % size == 0]
        if self.activations is None or self.needed is None:
            sizes = [size for size in sizes if 2 * size <= rows]
        else:
            low = self.activations[0]
            sizes = [size for size in sizes if (1 - size / rows) * low >= (self.needed or 0)] or sizes[-1:]
        return sizes[0], together // sizes[0]

    def _chunked_loss(self) -> Iterator[Fix]:
        logits = self._logits_bytes()
        if self.settings.liger or (logits is None and self.phase not in ("loss", None, "backward", "forward")):
            return
        named = self.block is not None and self.block.kind == "logits"
        if not named and self.phase != "loss" and not self.settings.vocab:
            return
        saved = None if logits is None else (logits, LOGITS_COPIES * logits)
        yield fix(
            "Compute the loss in chunks, so that the logits are never there as a whole", costs="0–5 % of the time; Liger has nothing for T5",
            saves=show_range(saved) if saved else "1–3 × rows × length × vocabulary × 4 bytes", enough=self.enough(saved),
            brimful="--layout packed", transformers="use_liger_kernel=True", accelerate=_CHUNKED, lightning=_CHUNKED,
        )  # fmt: skip

    def _logits_bytes(self) -> int | None:
        if self.block is not None and self.block.kind == "logits":
            return self.block.bytes
        if self.settings.micro_batch and self.settings.lengths and self.settings.vocab:
            return self.settings.micro_batch * max(self.settings.lengths) * max(self.settings.vocab) * 4
        return None

    def _bf16(self) -> Iterator[Fix]:
        half = self.block is not None and self.block.element_bytes == 2
        if self.settings.precision in ("bf16", "fp16") or half:
            return
        faster = "no time on GPUs since Ampere, which get faster; results are rounded to 8 bits"
        yield fix(
            "Compute in bf16", costs="results are rounded to 8 bits" if self.device == "mps" else faster, **self._of_activations(0.2, 0.45),
            brimful="--precision bf16", transformers="bf16=True", accelerate='Accelerator(mixed_precision="bf16")',
            lightning='Trainer(precision="bf16-mixed")',
        )  # fmt: skip

    def _checkpointing(self) -> Iterator[Fix]:
        if self.settings.checkpointing:
            return
        yield fix(
            "Switch on gradient checkpointing", costs="15–50 % of the time", **self._of_activations(0.5, 0.7),
            brimful="--checkpointing on", transformers="gradient_checkpointing=True", accelerate="model.gradient_checkpointing_enable()",
            lightning="self.model.gradient_checkpointing_enable()",
        )  # fmt: skip

    def _optimizer(self) -> Iterator[Fix]:
        if any(word in (self.settings.optimizer or "") for word in SMALL_OPTIMIZERS):
            return
        title, made = (
            "Use an optimizer with less state: Adafactor or 8-bit AdamW instead of AdamW",
            "bitsandbytes.optim.AdamW8bit",
        )
        if self.device == "mps":  # bitsandbytes has no 8-bit AdamW there
            title, made = "Use an optimizer with less state: Adafactor instead of AdamW", "torch.optim.Adafactor"
        yield fix(
            title, costs="another optimizer: check its learning rate", **self._of_weights(6, 8, "6–8 bytes per trained weight"),
            brimful="--optimizer adafactor", transformers='optim="adafactor"', accelerate=f"{made}(model.parameters(), lr=LR)",
            lightning=f"configure_optimizers: {made}(self.parameters(), lr=self.lr)",
        )  # fmt: skip

    def _freeze(self) -> Iterator[Fix]:
        parameters, trained = self.settings.parameters, self.settings.trained
        if parameters and trained and trained < parameters / 4:
            return  # that is LoRA, or most weights are frozen
        yield fix(
            "Freeze a part of the model, or train LoRA adapters", costs="fewer weights learn; often no loss in fine-tuning",
            **self._of_weights(6, 12, "12 bytes per frozen weight"), brimful="--freeze encoder", peers=_LORA,
        )  # fmt: skip

    def _shorter(self) -> Iterator[Fix]:
        length = max(self.settings.lengths, default=None)
        if length is not None and length < 16:
            return
        title, size, share = "Cut rows to three quarters of the length", "LENGTH", 0.25
        if length is not None:
            shorter = max(8, length * 3 // 4 // 8 * 8)
            size, share = str(shorter), 1 - shorter / length
            title = f"Cut rows to {shorter} instead of {length} tokens, {share:.0%} less".replace("%", " %")
        saved = self._of_activations(share, min(1.0, 1 - (1 - share) ** 2))
        yield fix(title, costs=_NOT_LEARNT, **saved, brimful=f"--max-tokens {size}", peers=_truncated(size))

    def _cards(self) -> Iterator[Fix]:
        if self.device == "mps":
            return
        processes = 2 * (self.settings.processes or 1)
        saved = self._of_activations(0.5, 0.5)
        if self.phase == "optimizer":
            saved = {**self._of_weights(6, 8, "half of 16 bytes per trained weight"), "basis": "range"}
        yield fix(
            f"Use {processes} cards with half the rows each, or shard weights and optimizer state over the cards", **saved,
            costs="more cards, and time to exchange gradients", global_batch="unchanged, if accumulation or micro-batch is halved",
            brimful=f"--processes {processes}", transformers=f'torchrun --nproc-per-node {processes} train.py; fsdp="full_shard"',
            accelerate=f"accelerate launch --num_processes {processes} --use_fsdp train.py", lightning=f'Trainer(devices={processes}, strategy="fsdp")',
        )  # fmt: skip

    # ---- Outside of a training step

    def _evaluation(self) -> Iterator[Fix]:
        rows = self.settings.eval_batch
        size = str(max(1, rows // 2)) if rows else "ROWS//2"
        yield fix(
            f"Evaluate {size} instead of {rows} rows at once" if rows else "Evaluate half as many rows at once",
            saves="40–50 % of what an evaluation holds", costs="a slower evaluation",
            brimful="(evaluation has its own micro-batch)", transformers=f"per_device_eval_batch_size={size}",
            accelerate=f"DataLoader(eval_rows, batch_size={size})", lightning=f"val_dataloader: DataLoader(rows, batch_size={size})",
        )  # fmt: skip
        yield fix(
            "Do not keep the logits of all rows on the card: move them to the host, or keep only the predicted ids",
            saves="rows × length × vocabulary × 4 bytes for each batch that is kept", costs="copies to the host",
            transformers="eval_accumulation_steps=1", accelerate="accelerator.gather_for_metrics(logits.argmax(-1)).cpu()",
            lightning="self.predictions.append(logits.argmax(-1).cpu())",
        )  # fmt: skip
        yield from self._bf16()
        yield from self._shorter()

    def _generation(self) -> Iterator[Fix]:
        generate = "model.generate(rows, max_new_tokens=128, num_beams=1)"
        yield fix(
            "Generate for fewer rows at once, with fewer new tokens or beams", costs="a slower evaluation",
            saves="a share: the cache grows with rows × beams × tokens", brimful="--generate-rows 20",
            transformers="per_device_eval_batch_size=1, generation_max_length=128, generation_num_beams=1", accelerate=generate, lightning=generate,
        )  # fmt: skip
        yield from self._bf16()

    def _loading(self) -> Iterator[Fix]:
        count = self.settings.parameters
        saved = None if count is None else (2.0 * count, 2.0 * count)
        half = "from_pretrained(name, dtype=torch.bfloat16)"
        yield fix(
            "Load the weights in bf16", saves=show_range(saved) if saved else "2 bytes per weight, if they are fp32",
            costs="small updates are rounded away when these weights are trained", basis="predicted" if saved else "range",
            enough=self.enough(saved), brimful="--weights bf16", transformers=half, accelerate=half, lightning='Trainer(precision="bf16-true")',
        )  # fmt: skip
        yield fix(
            "Load the weights in 4 bits and train LoRA adapters (QLoRA)", saves="3.5 bytes per weight, if they are fp32",
            costs="slower steps; only the adapters learn", transformers=_IN_4_BITS, accelerate=_IN_4_BITS, lightning='BitsandbytesPrecision(mode="nf4")',
        )  # fmt: skip
        yield from self._cards()


def show_range(saved: Range) -> str:
    """`2.3–4.6 GiB`, or one figure if both are equal."""
    low, high = (show_bytes(value) for value in saved)
    if low == high:
        return low
    if low.rpartition(" ")[2] == high.rpartition(" ")[2]:
        low = low.rpartition(" ")[0]
    return f"{low}–{high}"


def _accumulated(rows: str, steps: str) -> dict[str, Any]:
    """Micro-batch and accumulation, as each framework names them."""
    return {
        "transformers": f"per_device_train_batch_size={rows}, gradient_accumulation_steps={steps}",
        "accelerate": f"DataLoader(batch_size={rows}), Accelerator(gradient_accumulation_steps={steps})",
        "lightning": f"DataLoader(batch_size={rows}), Trainer(accumulate_grad_batches={steps})",
    }


def _truncated(length: str) -> str:
    return f"tokenizer(texts, truncation=True, max_length={length})"


def _workers(count: int, ahead: int | None = None) -> dict[str, Any]:
    """Loader workers, and how many batches each reads ahead, as each framework names them."""
    hf, loader = ("", "") if ahead is None else (f", dataloader_prefetch_factor={ahead}", f", prefetch_factor={ahead}")
    loader = f"DataLoader(num_workers={count}{loader})"
    brimful = f"--workers {count}" + " --prefetch 1" * (ahead is not None)
    return {"brimful": brimful, "transformers": f"dataloader_num_workers={count}{hf}", "accelerate": loader, "lightning": loader}  # fmt: skip


# ---- Host RAM and /dev/shm -----------------------------------------------------------------------------------------------


def _no_batch(figures: Mapping[str, Any], settings: Settings) -> Iterator[Fix]:
    yield fix(
        "Look for a row that is far longer than the others, and cut rows to a length", costs=_NOT_LEARNT,
        saves="all that the longest row takes beyond that length", brimful="--max-tokens 512", peers=_truncated("512"),
    )  # fmt: skip
    fixes = GpuRemedies(figures, settings, None).fixes()
    yield from (one for one in fixes if "micro-batch" not in one.title and "Cut rows" not in one.title)


def _host(figures: Mapping[str, Any], settings: Settings) -> Iterator[Fix]:
    workers = settings.workers
    fewer = max(1, workers // 2) if workers else None
    if workers != 0:
        yield fix(
            f"Use {fewer} instead of {workers} loader workers" if fewer and fewer != workers else _FEWER_WORKERS,
            saves="what each worker holds: its batches, and its copy of Python objects", costs=_SLOWER_READING, **_workers(fewer or 1, 2),
        )  # fmt: skip
    yield fix(
        "Read the data from disk when it is needed (memory-mapped) instead of loading all of it", costs="none with a fast disk",
        saves="most of the size of the data, in every process", brimful="brimful data tokenize rows.jsonl --tokenizer tokenizer --output store",
        transformers='datasets.load_dataset("json", data_files="rows.jsonl", keep_in_memory=False)', accelerate=_STREAMED, lightning=_STREAMED,
    )  # fmt: skip
    limit, wanted = figures.get("limit_bytes"), figures.get("wanted_bytes") or 0
    more = max(2 * round(limit / GiB) if limit and limit >= GiB else 32, round(1.5 * wanted / GiB))
    yield fix(
        "Give the container or job more RAM" if limit or figures.get("signal") is None
        else "Find out who was killed and at which limit, then give the container or job more RAM",
        shell=f"{_KERNEL_LOG}; docker run --memory {more}g; sbatch --mem={more}G",
    )  # fmt: skip
    yield fix(
        "Load weights without a second copy in RAM, and do not keep several checkpoints there", saves="2–8 bytes per weight",
        transformers="from_pretrained(name, dtype=torch.bfloat16)", accelerate=_MAPPED, lightning=_MAPPED,
    )  # fmt: skip


def _host_block(figures: Mapping[str, Any], settings: Settings) -> Iterator[Fix]:
    """An allocation failed, so nobody was killed: where its size is known, the tensor itself is the first to look at."""
    fixes = list(_host(figures, settings))
    if (figures.get("wanted_bytes") or 0) >= GiB:
        yield fix(
            "Make the tensor of the traceback's last line smaller: fewer rows at once, or in parts",
            saves="a share of it, as large as the rows left out", costs="more, smaller steps",
        )  # fmt: skip
        fixes.sort(key=lambda one: "loader workers" in one.title)
    for one in fixes:
        shell = one.flags.get("shell", "").removeprefix(f"{_KERNEL_LOG}; ")
        yield replace(one, flags={**one.flags, "shell": shell}) if shell else one


def _shm(settings: Settings) -> Iterator[Fix]:
    yield fix(
        "Give the container a larger /dev/shm",
        shell="docker run --shm-size 8g (or --ipc=host); Kubernetes: an emptyDir with medium Memory at /dev/shm",
    )
    fewer = max(1, settings.workers // 2) if settings.workers else 1
    yield fix(_FEWER_WORKERS, saves="a batch for each worker and each batch it reads ahead", costs=_SLOWER_READING, **_workers(fewer, 1))  # fmt: skip
    yield fix(
        "Remove what dead processes left in /dev/shm",
        shell="df -h /dev/shm; ls -l /dev/shm; rm /dev/shm/torch_* /dev/shm/nccl-*",
    )


# ---- All other failures --------------------------------------------------------------------------------------------------

_TO_BF16 = fix(
    "Compute in bf16 instead of fp16, which overflows above 65,504", costs="results are rounded to 8 bits instead of 11",
    brimful="--precision bf16", transformers="bf16=True, fp16=False", accelerate='Accelerator(mixed_precision="bf16")',
    lightning='Trainer(precision="bf16-mixed")',
)  # fmt: skip
_FIND_FILES = fix("Find what fills the disk, and move caches and temporary files", shell="df -h . /tmp ~/.cache; HF_HOME=/big/disk TMPDIR=/big/disk")  # fmt: skip
_OTHER: dict[str, tuple[Fix, ...]] = {
    "kernel-shared-memory": (
        fix("Use smaller blocks or fewer stages in this kernel", costs="a slower kernel", shell="kernel_options={'BLOCK_M': 64, 'BLOCK_N': 32, 'num_stages': 1}"),
        fix("Leave this part uncompiled", costs="slower steps", brimful="--compile off", transformers="torch_compile=False", accelerate='Accelerator(dynamo_backend="no")', lightning="torch.compiler.disable(model)"),
    ),
    "nccl-shm": (
        fix("Switch off NCCL's cuMem host allocations", shell="NCCL_CUMEM_HOST_ENABLE=0"),
        fix("Look whether /dev/shm is full, and give the container more", shell="df -h /dev/shm; docker run --shm-size 8g (or --ipc=host)"),
        fix("Do without shared memory", costs="slower exchange between the cards of a machine", shell="NCCL_SHM_DISABLE=1"),
    ),
    "too-many-files": (
        fix("Raise the limit on open files", shell="ulimit -n 65535"),
        fix("Hand over tensors by file name instead of by open file", costs="files stay in /dev/shm if a process is killed", shell='torch.multiprocessing.set_sharing_strategy("file_system")'),
        fix(_FEWER_WORKERS, costs=_SLOWER_READING, **_workers(2)),
    ),
    "map-process-lost": (
        fix("Use fewer processes for map, and smaller batches and writes", saves="what each process holds", costs="slower preparation", brimful="brimful data tokenize rows.jsonl --tokenizer tokenizer --output store", peers="dataset.map(tokenize, num_proc=4, batch_size=100, writer_batch_size=200)"),
        fix("Ask the kernel whether it killed a process", shell=_KERNEL_LOG),
    ),
    "vllm-no-room": (
        fix("Give vLLM a share of the card that is free, with shorter sequences", saves="the cache of the tokens that are left out", costs="fewer or shorter answers at once", shell="vllm serve MODEL --gpu-memory-utilization 0.5 --max-model-len 4096; TRL: GRPOConfig(vllm_gpu_memory_utilization=0.3)"),
        fix("Stop the other processes on the card, or use another card", shell="nvidia-smi; CUDA_VISIBLE_DEVICES=1"),
    ),
    "worker-lost": (
        fix("Read in the training process once, so that the worker's error is shown", costs="slower reading, for this test", **_workers(0)),
        fix("Ask the kernel whether it killed the worker, and look at /dev/shm", shell=f"{_KERNEL_LOG}; df -h /dev/shm"),
    ),
    "disk-full": (
        fix("Keep fewer checkpoints", saves="the size of a checkpoint each: about 12 bytes per weight with AdamW", brimful="--keep 1", transformers="save_total_limit=2", accelerate="ProjectConfiguration(automatic_checkpoint_naming=True, total_limit=2)", lightning="ModelCheckpoint(save_top_k=1)"),
        fix("Save only the weights, where the run need not be resumed", saves="two thirds of a checkpoint with AdamW", costs="it cannot be resumed exactly", transformers="save_only_model=True", accelerate="accelerator.save_model(model, folder)", lightning="ModelCheckpoint(save_weights_only=True)"),
        _FIND_FILES,
        fix("Delete the checkpoint that was being written: it is damaged"),
    ),
    "gpu-fault": (
        fix("Do not retry: the CUDA context is lost, so start a new process"),
        fix("Run the same batch on the CPU, which names the line and the value", costs="slow, for this test", brimful="--device cpu", transformers="use_cpu=True", accelerate="accelerate launch --cpu train.py", lightning='Trainer(accelerator="cpu")'),
        fix("Make kernels report where they fail", costs="slow, for this test", shell="CUDA_LAUNCH_BLOCKING=1"),
        fix("Compare the largest token id with the embedding table, and the largest label with the outputs", shell="model.resize_token_embeddings(len(tokenizer))"),
    ),
    "gpu-hardware": (
        fix("Look up the Xid, and ask whoever runs the machine: reset the card, or take it out of use", shell="sudo dmesg -T | grep -i xid; nvidia-smi -q -d ECC"),
        fix("Continue from the last checkpoint on another card", brimful="--resume --device cuda:1", transformers="trainer.train(resume_from_checkpoint=True)", accelerate="accelerator.load_state(folder)", lightning='trainer.fit(model, ckpt_path="last")'),
    ),
    "driver": (
        fix("Install a torch build for this driver and card, or a newer driver", shell="nvidia-smi; python -m torch.utils.collect_env; pip install torch --index-url https://download.pytorch.org/whl/cu126"),
        fix("Look at the whole set-up", brimful="brimful doctor"),
    ),
    "nccl-duplicate-gpu": (
        fix("Start no more processes on a machine than it has cards, and give each its own card", brimful="--processes N", transformers="torchrun --nproc-per-node N train.py", accelerate="accelerate launch --num_processes N train.py", lightning="Trainer(devices=N)", shell='torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))'),
    ),
    "nccl-timeout": (
        fix("Look at the other ranks' logs: the one that is missing in this message holds the cause", shell="torchrun --log-dir logs --redirects 3 train.py"),
        fix("See in which collective each rank waits", shell="TORCH_NCCL_TRACE_BUFFER_SIZE=2000 TORCH_NCCL_DUMP_ON_TIMEOUT=1 TORCH_DISTRIBUTED_DEBUG=DETAIL"),
        fix("Give slow work (tokenizing, saving, evaluating on one rank) more time", costs="a real hang is noticed later", transformers="ddp_timeout=7200", accelerate="InitProcessGroupKwargs(timeout=timedelta(hours=2))", lightning="DDPStrategy(timeout=timedelta(hours=2))"),
    ),
    "nccl-peer-lost": (
        fix("Look for the rank that ended first: its log holds the cause", shell="torchrun --log-dir logs --redirects 3 train.py; sudo dmesg -T | grep -i 'killed process'"),
        fix("If no rank ended by itself, test the network between the machines", shell="NCCL_DEBUG=INFO NCCL_SOCKET_IFNAME=eth0"),
    ),
    "nccl-error": (
        fix("Let NCCL say what failed", shell="NCCL_DEBUG=INFO NCCL_DEBUG_SUBSYS=INIT,NET,ALLOC"),
        fix("Try without peer-to-peer copies, and with a larger /dev/shm", costs="slower exchange between cards", shell="NCCL_P2P_DISABLE=1; docker run --shm-size 8g"),
        fix("Check that all cards can add up a number", brimful="brimful doctor"),
    ),
    "connection": (
        fix("End the run that holds the port, or use another port", shell="torchrun --master-port 29511 train.py; ss -ltnp | grep 29500", accelerate="accelerate launch --main_process_port 29511 train.py"),
        fix("Check that every machine reaches MASTER_ADDR and MASTER_PORT", shell="nc -vz $MASTER_ADDR $MASTER_PORT"),
    ),
    "stopped": (
        fix("Continue from the last checkpoint", brimful="brimful train --run RUN --resume", transformers="trainer.train(resume_from_checkpoint=True)", accelerate="accelerator.load_state(folder)", lightning='trainer.fit(model, ckpt_path="last")'),
    ),
    "time-limit": (
        fix("Save and leave before the limit, and continue in a new job", brimful="--time-limit 8h", transformers="save_steps=500, trainer.train(resume_from_checkpoint=True)", accelerate="accelerator.save_state(folder)", lightning="Trainer(max_time='00:08:00:00')"),
    ),
    "missing-package": (
        fix("Install the package in this environment", brimful="pip install 'brimful[eightbit]'", shell="python -m pip install -U bitsandbytes; python -m bitsandbytes"),
    ),
    "crashed": (
        fix("Find out where it crashed", shell="python -X faulthandler train.py; sudo dmesg -T | tail"),
        fix("Read in the training process once, and reinstall what has compiled code", **_workers(0)),
    ),
    "nan-loss": (
        _TO_BF16,
        fix("Lower the learning rate, warm it up for longer, and clip gradients", costs="slower learning", brimful="--lr 1e-4 --warmup 5% --clip-norm 1.0", transformers="learning_rate=1e-4, warmup_steps=500, max_grad_norm=1.0", accelerate="accelerator.clip_grad_norm_(model.parameters(), 1.0)", lightning="Trainer(gradient_clip_val=1.0)"),
        fix("Find the rows of the first bad step: empty labels, zero lengths, or values that are not finite", shell="torch.autograd.set_detect_anomaly(True)"),
    ),
}  # fmt: skip
