"""What helps when a GPU is full, in the order of what it costs: nothing, time, then the experiment itself.

A log tells little of a model, so most figures are ranges, from the measurements behind Brimful: activations are 40–90 % of what a
step holds; checkpointing saves 50–70 % of them for 15–50 % of the time; half the micro-batch cost up to 45 % of the rows per
second. Where the message or a count of weights gives a figure, that figure is used. Two rules hold everywhere: accumulation saves
no memory, it only keeps the global batch (micro-batch × accumulation × processes) when the micro-batch shrinks; and expandable
segments are worth a line only if more than 10 % of what the process holds is reserved and unused.
"""

from collections.abc import Iterator, Mapping
from typing import Any

from brimful.report.why.diagnosis import Basis, Fix
from brimful.report.why.log_settings import Settings
from brimful.report.why.wanted_block import Block
from brimful.units import show_bytes

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

Range = tuple[float, float]


class GpuRemedies:
    """The fixes for a full GPU, from what the message and the log say."""

    def __init__(self, figures: Mapping[str, Any], settings: Settings, block: Block | None) -> None:
        self.figures, self.settings, self.block = figures, settings, block
        self.device = str(figures.get("device", "cuda"))
        self.phase = figures.get("phase")
        wanted, free = figures.get("wanted_bytes"), figures.get("free_bytes")
        if limit := figures.get("limit_bytes"):
            held = figures.get("allocated_bytes", 0) + figures.get("unallocated_bytes", 0)
            free = max(0, limit - held)
        self.missing: int | None = None if wanted is None or free is None else max(0, wanted - free)
        total = figures.get("total_bytes") or 0
        self.needed = None if self.missing is None else self.missing + MARGIN * total
        """What a fix must free: what was missing, and some air."""

    def fixes(self) -> Iterator[Fix]:
        yield from self._limit()
        yield from self._others()
        yield from self._fragmented()
        if self.phase == "evaluation":
            yield from self._evaluation()
            return
        if self.phase == "generation":
            yield from self._generation()
            return
        if self.phase == "loading":
            yield from self._loading()
            return
        if self.phase != "optimizer":  # by then the activations are gone
            yield from self._attention()
            yield from self._micro_batch()
            yield from self._chunked_loss()
            yield from self._bf16()
            yield from self._checkpointing()
        yield from self._optimizer()
        yield from self._freeze()
        if self.phase != "optimizer":
            yield from self._shorter()
        yield from self._cards()
        if self.device == "mps":
            yield _WATERMARK

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

    def share_of_activations(self, low: float, high: float) -> tuple[str, Range | None]:
        """As bytes where there are figures, else in words."""
        if self.activations is None:
            share = f"{low:.0%}" if low == high else f"{100 * low:.0f}–{high:.0%}"
            return f"{share} of the activations".replace("%", " %"), None
        saved = self.activations[0] * low, self.activations[1] * high
        return show_range(saved), saved

    # ---- In the order of the issue: nothing lost first, the experiment changed last

    def _limit(self) -> Iterator[Fix]:
        if self.figures.get("limit_bytes"):
            yield Fix(
                title="Raise the limit that the program sets for itself",
                saves=show_bytes(max(0, self.figures.get("total_bytes", 0) - self.figures["limit_bytes"])),
                flags={"brimful": "--memory-limit", "shell": "torch.cuda.set_per_process_memory_fraction(1.0)"},
                basis="measured",
            )

    def _others(self) -> Iterator[Fix]:
        others = self.figures.get("others_bytes")
        if not others:
            return
        pids = [str(one["pid"]) for one in self.figures.get("others", ())]
        if self.device == "mps":
            yield Fix(
                title="Close other programs, which share the memory of the Mac",
                saves=f"up to {show_bytes(others)}",
                basis="measured",
            )
            return
        who = (
            f"Stop the other processes on the card (pid {', '.join(pids)})"
            if pids
            else "Stop the other processes on the card"
        )
        card = 0 if self.figures.get("gpu") == 1 else 1  # not the one that is full
        see = {"hip": f"rocm-smi; HIP_VISIBLE_DEVICES={card}", "xpu": f"xpu-smi ps; ZE_AFFINITY_MASK={card}"}
        yield Fix(
            title=f"{who}, or use another card",
            saves=show_bytes(others) if pids else f"up to {show_bytes(others)}",
            flags={
                "brimful": f"--device {'xpu' if self.device == 'xpu' else 'cuda'}:{card}",
                "shell": see.get(self.device, f"nvidia-smi; CUDA_VISIBLE_DEVICES={card}"),
            },
            basis="measured",
            enough=self.enough((others, others)) if pids else None,
        )

    def _fragmented(self) -> Iterator[Fix]:
        unused = self.figures.get("unallocated_bytes") or 0
        held = self.figures.get("process_bytes") or self.figures.get("allocated_bytes", 0) + unused
        if not held or unused / held <= FRAGMENTED or self.settings.growing_segments or self.device in ("mps", "xpu"):
            return
        name = "PYTORCH_HIP_ALLOC_CONF" if self.device == "hip" else "PYTORCH_CUDA_ALLOC_CONF"
        share = f"{unused / held:.0%}".replace("%", " %")
        yield Fix(
            title="Set expandable_segments, which lets torch use the memory it has reserved in pieces",
            saves=f"up to {show_bytes(unused)} ({share} of what the process holds)",
            flags={"brimful": "(set by the command line)", "shell": f"{name}=expandable_segments:True"},
            basis="measured",
            enough=False if self.missing is not None and unused < self.missing else None,
        )

    def _attention(self) -> Iterator[Fix]:
        if self.block is None or self.block.kind != "attention":
            return
        yield Fix(
            title="Use an attention that never writes the scores of a layer as a whole",
            saves=f"{show_bytes(self.block.bytes)} for each layer that keeps them",
            flags={
                "transformers": 'from_pretrained(name, attn_implementation="sdpa")',
                "accelerate": "F.scaled_dot_product_attention(q, k, v, is_causal=True)",
                "lightning": "F.scaled_dot_product_attention(q, k, v, is_causal=True)",
            },
            basis="predicted",
            enough=self.enough((self.block.bytes, self.block.bytes)),
        )

    def _micro_batch(self) -> Iterator[Fix]:
        rows, accumulation = self.settings.micro_batch, self.settings.accumulation
        if rows == 1:
            return
        if not rows:
            parts = 2
            while (
                self.activations and self.needed and (1 - 1 / parts) * self.activations[0] < self.needed and parts < 64
            ):
                parts *= 2
            saves, saved = self.share_of_activations(1 - 1 / parts, 1 - 1 / parts)
            yield Fix(
                title=f"Divide the micro-batch by {parts} and multiply the accumulation by {parts}",
                saves=saves,
                costs=_SLOWER,
                global_batch="unchanged: micro-batch × accumulation × processes",
                flags={
                    "brimful": "--global-batch N",
                    "transformers": f"per_device_train_batch_size=ROWS//{parts}, gradient_accumulation_steps={parts}*STEPS",
                    "accelerate": f"DataLoader(batch_size=ROWS//{parts}), Accelerator(gradient_accumulation_steps={parts}*STEPS)",
                    "lightning": f"DataLoader(batch_size=ROWS//{parts}), Trainer(accumulate_grad_batches={parts}*STEPS)",
                },
                enough=self.enough(saved),
            )
            return
        smaller, steps = self._split(rows, accumulation or 1)
        saves, saved = self.share_of_activations(1 - smaller / rows, 1 - smaller / rows)
        processes, whole = self.settings.processes, self.settings.rows_per_step
        factors = f"{smaller} × {steps}" + (f" × {processes}" if processes else "")
        effect = (
            f"unchanged: {factors} = {smaller * steps * processes}"
            if processes
            else f"unchanged: {factors} = {rows * (accumulation or 1)} rows per card"
        )
        if accumulation is None:
            effect = f"unchanged, if it did not accumulate: {factors} = {rows} rows per card"
        yield Fix(
            title=f"Use micro-batches of {smaller} instead of {rows} rows and accumulate {steps} instead of {accumulation or 1} times",
            saves=saves,
            costs=_SLOWER,
            global_batch=effect,
            flags={
                "brimful": f"--global-batch {whole}"
                if whole and processes
                else f"--global-batch {rows * (accumulation or 1)}",
                "transformers": f"per_device_train_batch_size={smaller}, gradient_accumulation_steps={steps}",
                "accelerate": f"DataLoader(batch_size={smaller}), Accelerator(gradient_accumulation_steps={steps})",
                "lightning": f"DataLoader(batch_size={smaller}), Trainer(accumulate_grad_batches={steps})",
            },
            enough=self.enough(saved),
        )

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
        yield Fix(
            title="Compute the loss in chunks, so that the logits are never there as a whole",
            saves=show_range(saved) if saved else "1–3 × rows × length × vocabulary × 4 bytes",
            costs="0–5 % of the time; Liger has nothing for T5",
            flags={
                "brimful": "--layout packed",
                "transformers": "use_liger_kernel=True",
                "accelerate": "F.linear_cross_entropy(hidden, head, labels, options=torch.nn.LinearCrossEntropyOptions())",
                "lightning": "F.linear_cross_entropy(hidden, head, labels, options=torch.nn.LinearCrossEntropyOptions())",
            },
            enough=self.enough(saved),
        )

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
        saves, saved = self.share_of_activations(0.2, 0.45)
        yield Fix(
            title="Compute in bf16",
            saves=saves,
            costs="results are rounded to 8 bits"
            if self.device == "mps"
            else "no time on GPUs since Ampere, which get faster; results are rounded to 8 bits",
            flags={
                "brimful": "--precision bf16",
                "transformers": "bf16=True",
                "accelerate": 'Accelerator(mixed_precision="bf16")',
                "lightning": 'Trainer(precision="bf16-mixed")',
            },
            enough=self.enough(saved),
        )

    def _checkpointing(self) -> Iterator[Fix]:
        if self.settings.checkpointing:
            return
        saves, saved = self.share_of_activations(0.5, 0.7)
        yield Fix(
            title="Switch on gradient checkpointing",
            saves=saves,
            costs="15–50 % of the time",
            flags={
                "brimful": "--checkpointing on",
                "transformers": "gradient_checkpointing=True",
                "accelerate": "model.gradient_checkpointing_enable()",
                "lightning": "self.model.gradient_checkpointing_enable()",
            },
            enough=self.enough(saved),
        )

    def _optimizer(self) -> Iterator[Fix]:
        name = self.settings.optimizer or ""
        if any(word in name for word in ("adafactor", "8bit", "sgd", "lion", "lomo", "galore", "cpuadam")):
            return
        saves, saved, basis = self._of_weights(6, 8, "6–8 bytes per trained weight")
        mac = self.device == "mps"  # bitsandbytes has no 8-bit AdamW there
        yield Fix(
            title="Use an optimizer with less state: Adafactor instead of AdamW"
            if mac
            else "Use an optimizer with less state: Adafactor or 8-bit AdamW instead of AdamW",
            saves=saves,
            costs="another optimizer: check its learning rate",
            flags={
                "brimful": "--optimizer adafactor",
                "transformers": 'optim="adafactor"',
                "accelerate": "torch.optim.Adafactor(model.parameters(), lr=LR)"
                if mac
                else "bitsandbytes.optim.AdamW8bit(model.parameters(), lr=LR)",
                "lightning": "configure_optimizers: torch.optim.Adafactor(self.parameters(), lr=self.lr)"
                if mac
                else "configure_optimizers: bitsandbytes.optim.AdamW8bit(self.parameters(), lr=self.lr)",
            },
            basis=basis,
            enough=self.enough(saved),
        )

    def _freeze(self) -> Iterator[Fix]:
        parameters, trained = self.settings.parameters, self.settings.trained
        if parameters and trained and trained < parameters / 4:
            return  # that is LoRA, or most weights are frozen
        saves, saved, basis = self._of_weights(6, 12, "12 bytes per frozen weight")
        yield Fix(
            title="Freeze a part of the model, or train LoRA adapters",
            saves=saves,
            costs="fewer weights learn; often no loss in fine-tuning",
            flags={
                "brimful": "--freeze encoder",
                "transformers": 'get_peft_model(model, LoraConfig(target_modules="all-linear"))',
                "accelerate": 'get_peft_model(model, LoraConfig(target_modules="all-linear"))',
                "lightning": 'get_peft_model(model, LoraConfig(target_modules="all-linear"))',
            },
            basis=basis,
            enough=self.enough(saved),
        )

    def _of_weights(self, low: int, high: int, words: str) -> tuple[str, Range | None, Basis]:
        """Bytes per trained weight, of all of them where their number is known."""
        count = self.settings.trained or self.settings.parameters
        if not count:
            return words, None, "range"
        saved = low * count, high * count
        return show_range(saved), saved, "predicted"

    def _shorter(self) -> Iterator[Fix]:
        length = max(self.settings.lengths, default=None)
        if length is not None and length < 16:
            return
        shorter = None if length is None else max(8, length * 3 // 4 // 8 * 8)
        share = 0.25 if length is None or shorter is None else 1 - shorter / length
        saves, saved = self.share_of_activations(share, min(1.0, 1 - (1 - share) ** 2))
        title = (
            "Cut rows to three quarters of the length"
            if length is None
            else f"Cut rows to {shorter} instead of {length} tokens, {share:.0%} less".replace("%", " %")
        )
        size = "LENGTH" if shorter is None else str(shorter)
        yield Fix(
            title=title,
            saves=saves,
            costs="what is beyond that length is not learnt",
            flags={
                "brimful": f"--max-tokens {size}",
                "transformers": f"tokenizer(texts, truncation=True, max_length={size})",
                "accelerate": f"tokenizer(texts, truncation=True, max_length={size})",
                "lightning": f"tokenizer(texts, truncation=True, max_length={size})",
            },
            enough=self.enough(saved),
        )

    def _cards(self) -> Iterator[Fix]:
        if self.device == "mps":
            return
        processes = 2 * (self.settings.processes or 1)
        saves, saved = self.share_of_activations(0.5, 0.5)
        if self.phase == "optimizer":
            saves, saved, _ = self._of_weights(6, 8, "half of 16 bytes per trained weight")
        yield Fix(
            title=f"Use {processes} cards with half the rows each, or shard weights and optimizer state over the cards",
            saves=saves,
            costs="more cards, and time to exchange gradients",
            global_batch="unchanged, if accumulation or micro-batch is halved",
            flags={
                "brimful": f"--processes {processes}",
                "transformers": f'torchrun --nproc-per-node {processes} train.py; fsdp="full_shard"',
                "accelerate": f"accelerate launch --num_processes {processes} --use_fsdp train.py",
                "lightning": f'Trainer(devices={processes}, strategy="fsdp")',
            },
            enough=self.enough(saved),
        )

    # ---- Outside of a training step

    def _evaluation(self) -> Iterator[Fix]:
        rows = self.settings.eval_batch
        size = str(max(1, rows // 2)) if rows else "ROWS//2"
        yield Fix(
            title=f"Evaluate {size} instead of {rows} rows at once" if rows else "Evaluate half as many rows at once",
            saves="40–50 % of what an evaluation holds",
            costs="a slower evaluation",
            flags={
                "brimful": "(evaluation has its own micro-batch)",
                "transformers": f"per_device_eval_batch_size={size}",
                "accelerate": f"DataLoader(eval_rows, batch_size={size})",
                "lightning": f"val_dataloader: DataLoader(rows, batch_size={size})",
            },
        )
        yield Fix(
            title="Do not keep the logits of all rows on the card: move them to the host, or keep only the predicted ids",
            saves="rows × length × vocabulary × 4 bytes for each batch that is kept",
            costs="copies to the host",
            flags={
                "transformers": "eval_accumulation_steps=1",
                "accelerate": "accelerator.gather_for_metrics(logits.argmax(-1)).cpu()",
                "lightning": "self.predictions.append(logits.argmax(-1).cpu())",
            },
        )
        yield from self._bf16()
        yield from self._shorter()

    def _generation(self) -> Iterator[Fix]:
        yield Fix(
            title="Generate for fewer rows at once, with fewer new tokens or beams",
            saves="a share: the cache grows with rows × beams × tokens",
            costs="a slower evaluation",
            flags={
                "brimful": "--generate-rows 20",
                "transformers": "per_device_eval_batch_size=1, generation_max_length=128, generation_num_beams=1",
                "accelerate": "model.generate(rows, max_new_tokens=128, num_beams=1)",
                "lightning": "model.generate(rows, max_new_tokens=128, num_beams=1)",
            },
        )
        yield from self._bf16()

    def _loading(self) -> Iterator[Fix]:
        count = self.settings.parameters
        saved = None if count is None else (2.0 * count, 2.0 * count)
        yield Fix(
            title="Load the weights in bf16",
            saves=show_range(saved) if saved else "2 bytes per weight, if they are fp32",
            costs="small updates are rounded away when these weights are trained",
            flags={
                "brimful": "--weights bf16",
                "transformers": "from_pretrained(name, dtype=torch.bfloat16)",
                "accelerate": "from_pretrained(name, dtype=torch.bfloat16)",
                "lightning": 'Trainer(precision="bf16-true")',
            },
            basis="predicted" if saved else "range",
            enough=self.enough(saved),
        )
        yield Fix(
            title="Load the weights in 4 bits and train LoRA adapters (QLoRA)",
            saves="3.5 bytes per weight, if they are fp32",
            costs="slower steps; only the adapters learn",
            flags={
                "transformers": "from_pretrained(name, quantization_config=BitsAndBytesConfig(load_in_4bit=True))",
                "accelerate": "from_pretrained(name, quantization_config=BitsAndBytesConfig(load_in_4bit=True))",
                "lightning": 'BitsandbytesPrecision(mode="nf4")',
            },
        )
        yield from self._cards()


_WATERMARK = Fix(
    title="Let torch take all of the Mac's memory",
    costs="the Mac may swap or freeze",
    flags={"shell": "PYTORCH_MPS_HIGH_WATERMARK_RATIO=0.0"},
)
_SLOWER = "0–45 % of the time, most where the card is not busy"


def show_range(saved: Range) -> str:
    """`2.3–4.6 GiB`, or one figure if both are equal."""
    low, high = (show_bytes(value) for value in saved)
    if low == high:
        return low
    if low.rpartition(" ")[2] == high.rpartition(" ")[2]:
        low = low.rpartition(" ")[0]
    return f"{low}–{high}"
