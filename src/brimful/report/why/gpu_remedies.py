"""Fixes for a full GPU, in the order of what they cost: nothing, time, then the experiment itself.

A log tells little of a model, so most figures are ranges, from the measurements behind Brimful: activations are 40–90 % of what a step
holds; checkpointing saves 50–70 % of them for 15–50 % of the time; half the micro-batch cost up to 45 % of the rows per second. Where the
message or a count of weights gives a figure, that figure is used, and no fix saves more than the card holds. Two rules hold everywhere:
accumulation saves no memory, it only keeps the global batch (micro-batch × accumulation × processes) when the micro-batch shrinks; and
expandable segments come first only if more than 10 % of what the process holds is reserved and unused. Below that they are offered,
second, where the block would fit in what is free or unused if that were one piece: then it is in pieces, but a run that full may fail at
the next block.
"""

import math
from collections.abc import Iterator, Mapping
from typing import Any

from brimful.report.why.diagnosis import Fix, fix
from brimful.report.why.gpu_messages import SMALL_BLOCKS, Block, Settings
from brimful.units import show_bytes

FRAGMENTED, IN_PIECES = 0.10, 0.01
"""Reserved and unused, of what the process holds, from which on expandable segments are worth trying: in any case, and where the block
that failed would fit in it."""
ACTIVATIONS = (0.4, 0.9)
"""The share of a step's memory that grows with the rows, where the number of weights is not known."""
STATE_BYTES = 16
"""Per trained weight in fp32 with AdamW: weight, gradient, two averages."""
LEAST_STATE_BYTES = 2
"""Per trained weight where nothing but weights in bf16 is there yet."""
FROZEN_BYTES, QUANTIZED_BYTES = (0.5, 4), (0.5, 1.5)
"""Per frozen weight: in 4 bits, or in fp32; in 4 or 8 bits, with the layers that stay as they are."""
MARGIN = 0.05
"""Of the card: what a fix should free beyond what was missing."""
LOGITS_COPIES = 3
"""The logits, their gradient, and a copy in another dtype."""
SMALL_OPTIMIZERS = ("adafactor", "8bit", "sgd", "lion", "lomo", "galore", "cpuadam")
"""Optimizers that have little state already."""
NOT_LEARNT = "what is beyond that length is not learnt"
_SLOWER = "0–45 % of the time, most where the card is not busy"
_SDPA = "F.scaled_dot_product_attention(q, k, v, is_causal=True)"
_CHUNKED = (
    "F.linear_cross_entropy(hidden, head, labels, options=torch.nn.LinearCrossEntropyOptions())  # torch 2.13 or newer"
)
_LORA = 'get_peft_model(model, LoraConfig(target_modules="all-linear"))'
_IN_4_BITS = "from_pretrained(name, quantization_config=BitsAndBytesConfig(load_in_4bit=True))"

Range = tuple[float, float]


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
        state = (self._optimizer, self._half_weights, self._freeze, self._sharded)
        makers = [self._limit, self._others, self._fragmented]
        if self.phase in outside:
            makers.append(outside[self.phase])
        elif self.phase == "optimizer":  # by then the activations are gone
            makers += state
        elif self.oversized:
            makers += [*state, *in_step, self._shorter]
        else:
            makers += [*in_step, self._optimizer, self._freeze, self._shorter, self._cards]
        fixes = [one for make in makers for one in make()]
        fixes[1:1] = self._in_pieces()
        yield from fixes
        if self.device == "mps" and self.phase not in outside:
            yield fix("Let torch take all of the Mac's memory", costs="the Mac may swap or freeze", shell="PYTORCH_MPS_HIGH_WATERMARK_RATIO=0.0")  # fmt: skip

    @property
    def oversized(self) -> bool:
        return oversized_state(self.figures, self.settings) is not None

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
        state = self._state
        if state is not None and state[0] < held + wanted:
            # All of the state need not be there yet, or it is in fewer bytes: then little is known of the least.
            sure = (
                wanted
                if self.phase in ("loss", "attention")
                or (self.block and self.block.kind in ("logits", "attention", "activations"))
                else 0
            )
            return max(sure, held + wanted - state[1]), held + wanted - state[0]
        # A block as large as all the rest is no weight: it grows with the rows as a whole.
        low, high = (share * (held if wanted > held else held + wanted) for share in ACTIVATIONS)
        return (low + wanted, high + wanted) if wanted > held else (low, high)

    @property
    def _state(self) -> Range | None:
        """Bytes of weights, gradients and optimizer state, at least and at most; None if their number is not known."""
        trained = self.settings.trained or self.settings.parameters
        if not trained or self.settings.sharded or (self.settings.adapters and self.settings.parameters is None):
            return None
        frozen = max(0, (self.settings.parameters or trained) - trained)
        low, high = QUANTIZED_BYTES if self.settings.quantized else FROZEN_BYTES
        return LEAST_STATE_BYTES * trained + low * frozen, STATE_BYTES * trained + high * frozen

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
        if not count or (self.settings.sharded and not self.settings.processes):
            return {"saves": words}
        if self.settings.sharded and self.settings.processes:
            count = math.ceil(count / self.settings.processes)
        held, state = self.figures.get("allocated_bytes"), self._state
        if (
            held is None
            or self.settings.sharded
            or (state is not None and state[1] < held + self.figures.get("wanted_bytes", 0))
        ):
            saved: Range = low * count, high * count
            return {
                "saves": show_range(saved),
                "enough": self.enough(saved),
                "basis": "range" if self.settings.sharded else "predicted",
            }
        # The card does not hold 16 bytes per weight, so it is not known how many of these bytes it holds; the weights stay.
        saved = 0.0, min(high * count, max(0, held - LEAST_STATE_BYTES * count))
        return {"saves": show_range(saved), "enough": self.enough(saved)}

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
        if self.settings.rollout:
            yield fix(
                "Give the vLLM beside the training a smaller share of the card, or let it sleep while weights are trained", saves=up_to, basis="measured",
                costs="slower generation", transformers="GRPOConfig(vllm_gpu_memory_utilization=0.3, vllm_enable_sleep_mode=True)",
                shell="verl: actor_rollout_ref.rollout.gpu_memory_utilization=0.3 actor_rollout_ref.rollout.free_cache_engine=True",
            )  # fmt: skip
        pids = [str(one["pid"]) for one in self.figures.get("others", ())]
        who = f"Stop the other processes on the card (pid {', '.join(pids)})" if pids else "Stop the other processes on the card"  # fmt: skip
        card = 0 if self.figures.get("gpu") == 1 else 1  # not the one that is full
        see = {
            "hip": f"rocm-smi; HIP_VISIBLE_DEVICES={card}", "xpu": f"xpu-smi ps; ZE_AFFINITY_MASK={card}",
            "npu": f"npu-smi info; ASCEND_RT_VISIBLE_DEVICES={card}",
        }  # fmt: skip
        yield fix(
            f"{who}, or use another card", saves=show_bytes(others) if pids else up_to, basis="measured",
            enough=self.enough((others, others)) if pids else None, brimful=f"--device {'xpu' if self.device == 'xpu' else 'cuda'}:{card}",
            shell=see.get(self.device, f"nvidia-smi; CUDA_VISIBLE_DEVICES={card}"),
        )  # fmt: skip

    def _fragmented(self) -> Iterator[Fix]:
        if self._unused_share > FRAGMENTED:
            unused = self.figures["unallocated_bytes"]
            enough = False if self.missing is not None and unused < self.missing else None
            yield self._expandable(
                "Set expandable_segments, which lets torch use the memory it has reserved in pieces", enough=enough
            )

    def _in_pieces(self) -> Iterator[Fix]:
        """Where little is reserved and unused, but enough for this block."""
        wanted, unused = self.figures.get("wanted_bytes"), self.figures.get("unallocated_bytes", 0)
        if not IN_PIECES < self._unused_share <= FRAGMENTED or self.missing is None or unused < self.missing:
            return
        if wanted in SMALL_BLOCKS or self.oversized:  # the card is full to the last MiB, or nothing else matters
            return
        yield self._expandable(
            "Set expandable_segments as well: the block would fit in what is free or unused, if that were one piece",
            costs="none, but the card stays full, so the next block may fail",
        )

    @property
    def _unused_share(self) -> float:
        """What is reserved and unused, of what the process holds; 0 if nothing can be done about it."""
        unused = self.figures.get("unallocated_bytes") or 0
        held = self.figures.get("process_bytes") or self.figures.get("allocated_bytes", 0) + unused
        return 0.0 if not held or self.settings.growing_segments or self.device in ("mps", "xpu") else unused / held

    def _expandable(self, title: str, *, costs: str | None = None, enough: bool | None = None) -> Fix:
        name = f"PYTORCH_{self.device.upper() if self.device in ('hip', 'npu') else 'CUDA'}_ALLOC_CONF"
        share = f"{self._unused_share:.0%}".replace("%", " %")
        return fix(
            title, costs=costs, basis="measured", saves=f"up to {show_bytes(self.figures['unallocated_bytes'])} ({share} of what the process holds)",
            enough=enough, brimful="(set by the command line)", shell=f"{name}=expandable_segments:True",
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
        parts, low = 2, self.activations[0] if self.activations else 0
        while low and self.needed and (1 - 1 / parts) * low < self.needed and parts < 64:
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
        if not self.activations or not self.activations[0] or self.needed is None:
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
        half = (self.block is not None and self.block.element_bytes == 2) or self.figures.get("dtype") in (
            "half",
            "bfloat16",
            "float16",
        )
        if self.settings.precision in ("bf16", "fp16") or half:
            return
        faster = "no time on GPUs since Ampere, which get faster; results are rounded to 8 bits"
        yield fix(
            "Compute in bf16", costs=faster if self.device == "cuda" else "results are rounded to 8 bits", **self._of_activations(0.2, 0.45),
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
        if _small_optimizer(self.settings):
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
        if self.settings.adapters or (parameters and trained and trained < parameters / 4):
            return  # that is LoRA, or most weights are frozen
        yield fix(
            "Freeze a part of the model, or train LoRA adapters", costs="fewer weights learn; often no loss in fine-tuning",
            **self._of_weights(6, 12, "12 bytes per frozen weight"), brimful="--lora r=16", peers=_LORA,
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
        yield fix(title, costs=NOT_LEARNT, **saved, brimful=f"--max-tokens {size}", peers=truncated(size))

    def _cards(self) -> Iterator[Fix]:
        if self.device == "mps":
            return
        processes = 2 * (self.settings.processes or 1)
        title = f"Use {processes} cards with half the rows each"
        yield fix(
            title if self.settings.sharded else f"{title}, or shard weights and optimizer state over the cards", **self._of_activations(0.5, 0.5),
            costs="more cards, and time to exchange gradients", global_batch="unchanged, if accumulation or micro-batch is halved",
            brimful=f"--processes {processes}", **_over_cards(processes),
        )  # fmt: skip

    def _sharded(self) -> Iterator[Fix]:
        """For the state alone, so without a setting for Brimful, which has a copy of it on each card."""
        if self.device == "mps" or self.settings.sharded:
            return
        cards = max(2, self.settings.processes or 0)
        saved = {
            **self._of_weights(6, 8, "6–8 bytes per trained weight, or more with more than two cards"),
            "basis": "range",
        }
        yield fix(f"Shard weights and optimizer state over {cards} cards", **saved, costs="more time to exchange them", **_over_cards(cards))  # fmt: skip

    def _half_weights(self) -> Iterator[Fix]:
        if self.settings.precision == "fp16" or self.settings.adapters:
            return
        half = "from_pretrained(name, dtype=torch.bfloat16)"
        yield fix(
            "Train with weights, gradients and optimizer state in bf16", **self._of_weights(6, 8, "8 bytes per trained weight, if they are fp32"),
            costs="small updates are rounded away when these weights are trained", brimful="--weights bf16", transformers=half, accelerate=half,
            lightning='Trainer(precision="bf16-true")',
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
        """No rows are there yet, so only weights count."""
        count = self.settings.parameters or self.settings.trained
        half, quarter = ((low * count, high * count) if count else None for low, high in ((2.0, 2.0), (1.5, 3.5)))
        in_half = "from_pretrained(name, dtype=torch.bfloat16)"
        yield fix(
            "Load the weights in bf16", saves=show_range(half) if half else "2 bytes per weight, if they are fp32",
            costs="small updates are rounded away when these weights are trained", basis="predicted" if half else "range",
            enough=self.enough(half), brimful="--weights bf16", transformers=in_half, accelerate=in_half, lightning='Trainer(precision="bf16-true")',
        )  # fmt: skip
        yield fix(
            "Load the weights in 4 bits and train LoRA adapters (QLoRA)", saves=show_range(quarter) if quarter else "1.5 bytes per weight, or 3.5 if they are fp32",
            costs="slower steps; only the adapters learn", enough=self.enough(quarter), brimful="--load-in 4bit --lora r=16",
            transformers=_IN_4_BITS, accelerate=_IN_4_BITS, lightning='BitsandbytesPrecision(mode="nf4")',
        )  # fmt: skip
        spread = 'from_pretrained(name, device_map="auto")'
        yield fix(
            "Spread the weights over several cards", saves="half of them with two cards", costs="more cards, and time to pass on activations",
            transformers=spread, accelerate=spread, lightning='Trainer(devices=2, strategy="fsdp")',
        )  # fmt: skip


def oversized_state(figures: Mapping[str, Any], settings: Settings) -> str | None:
    """A sentence if weights, gradients and the state of AdamW cannot all be on the card, however few rows there are."""
    trained, total = settings.trained or settings.parameters, figures.get("total_bytes")
    if not trained or not total or settings.adapters or settings.sharded or _small_optimizer(settings):
        return None
    if STATE_BYTES * trained <= total:
        return None
    size, card = show_bytes(STATE_BYTES * trained), show_bytes(total)
    return f"In fp32 with AdamW, {trained:,} trained weights take {size} (16 bytes each), more than the {card} of the card: smaller micro-batches alone do not make that fit."


def _small_optimizer(settings: Settings) -> bool:
    return any(word in (settings.optimizer or "") for word in SMALL_OPTIMIZERS)


def show_range(saved: Range) -> str:
    """`2.3–4.6 GiB`, one figure if both are equal, `up to 4.6 GiB` if it may be nothing."""
    low, high = (show_bytes(value) for value in saved)
    if not saved[0]:
        return f"up to {high}"
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


def _over_cards(count: int) -> dict[str, Any]:
    return {
        "transformers": f'torchrun --nproc-per-node {count} train.py; fsdp="full_shard"',
        "accelerate": f"accelerate launch --num_processes {count} --use_fsdp train.py",
        "lightning": f'Trainer(devices={count}, strategy="fsdp")',
    }


def truncated(length: str) -> str:
    return f"tokenizer(texts, truncation=True, max_length={length})"
