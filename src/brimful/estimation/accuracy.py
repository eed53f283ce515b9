"""How far predictions were from what was measured, and what of an estimate was never compared.

13 steps of a T5 with 188 M parameters on an H200 are the measurements whose figures were kept (`tests/estimation/test_measured.py`):
padded rows, bf16 autocast over fp32 weights, AdamW, with checkpointing and without. Their largest error says little about other
models or kernels. So it is stated for steps like those; for every other step the estimate lists what was never compared.
"""

from collections.abc import Iterator

import torch

from brimful.estimation.trace import TracedSetting, TraceNotes

ERRORS = {"cuda": 0.022, "cpu": 0.14}
"""The largest relative error of allocated or reserved bytes in those steps, by the device that was faked."""
STEPS, MODEL, COMPARED_CARD = 13, "T5ForConditionalGeneration", "H200"
"""What was compared."""
EXCHANGES = {"none": "several GPUs", "ddp": "DDP", "fsdp": "FSDP2"}


def never_compared(
    notes: TraceNotes, setting: TracedSetting, *, interpolates: bool, exchange: str | None = None
) -> tuple[str, ...]:
    """What sets a step apart from all that were compared with a GPU; nothing if one like it was.

    Args:
        notes: Of its trace.
        setting: How it was traced.
        interpolates: Whether its peaks are interpolated.
        exchange: What several GPUs hold: none, ddp or fsdp. None: there is one.
    """
    return tuple(_differences(notes, setting, interpolates, exchange))


def _differences(notes: TraceNotes, setting: TracedSetting, interpolates: bool, exchange: str | None) -> Iterator[str]:
    if notes.model != MODEL:
        yield f"the model ({notes.model})"
    if setting.layout != "padded":
        yield f"{setting.layout} rows"
    if notes.has_adapters:
        yield "adapters"
    if notes.is_quantized:
        yield "quantized weights"
    if setting.autocast is not torch.bfloat16:
        yield "fp32" if setting.autocast is None else "fp16"
    if setting.weights == "bf16":
        yield "bf16 weights"
    if setting.checkpointing not in ("off", "on"):
        yield f"checkpointing {setting.checkpointing}"
    if not notes.optimizer.startswith("AdamW,"):
        yield notes.optimizer.partition(",")[0]
    if exchange is not None:
        yield EXCHANGES[exchange]
    if interpolates:
        yield "interpolated peaks"
    if notes.assumptions:
        yield "assumed values"
