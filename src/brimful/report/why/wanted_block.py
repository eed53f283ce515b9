"""What the block was that did not fit: `1.23 GiB = 32 × 252 × 40,960 × 4 bytes`, the fp32 logits.

Only numbers that the log or the run names are multiplied; a product that comes out right is likely the tensor, never certainly.
A message rounds twice: torch asks the driver for multiples of 2 MiB (anything up to 1 MiB becomes 2, up to 10 MiB becomes 20),
and prints two decimals. So a product may be off by 0.005 of the unit and by 2 MiB. Five numbers give about twenty products, and
one of them has a given size by chance about once in sixty logs (simulated).
"""

import re
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import product
from math import prod

from brimful.report.why.log_settings import Settings
from brimful.units import GiB, KiB, MiB, TiB

_SIZE = re.compile(r"(\d+(?:\.(\d+))?)\s*([KMGT]i?B|[Bb]ytes?|B)\b")
_UNITS = {"k": KiB, "m": MiB, "g": GiB, "t": TiB, "b": 1}
SIZE = r"\d+(?:\.\d+)?\s*(?:[KMGT]i?B|[Bb]ytes?|B)\b"
"""A size as allocators print it, as a regular expression."""
SMALL_BLOCKS = (2 * MiB, 20 * MiB)
"""What torch asks for when less is wanted: these sizes say nothing."""
ROUNDED_TO = 2 * MiB
_ARTICLE = {"fp32": "an", "bf16 or fp16": "a"}
MOST = 3
"""Blocks named at most."""


def size_bytes(text: str) -> int:
    """Of `1.23 GiB`, `768.00 MB` (which MPS means as MiB), `0 bytes`; 0 if it is no size."""
    match = _SIZE.search(text)
    return int(float(match[1]) * _UNITS[match[3][0].lower()]) if match else 0


@dataclass(frozen=True, slots=True)
class Block:
    """A tensor that has the size of the one that did not fit."""

    name: str
    """`the fp32 logits`."""
    kind: str
    """`logits`, `attention`, `activations`, `embedding`, `weights`, `images`."""
    factors: tuple[int, ...]
    element_bytes: int

    @property
    def bytes(self) -> int:
        return prod(self.factors) * self.element_bytes

    def __str__(self) -> str:
        return " × ".join(f"{factor:,}" for factor in (*self.factors, self.element_bytes)) + " bytes"

    def to_json(self) -> dict[str, object]:
        return {
            "name": self.name,
            "factors": list(self.factors),
            "element_bytes": self.element_bytes,
            "bytes": self.bytes,
        }


def bounds(shown: str, *, allocator: bool) -> tuple[int, int] | None:
    """The bytes that a printed size may stand for; None if it says nothing. `allocator`: torch's, which rounds up."""
    match = _SIZE.search(shown)
    if match is None:
        return None
    unit = _UNITS[match[3][0].lower()]
    value, half = float(match[1]) * unit, 0.0 if unit == 1 else 0.5 * unit * 10.0 ** -len(match[2] or "")
    if not allocator:
        return int(value - half), int(value + half)
    if round(value) in SMALL_BLOCKS:
        return None
    return int(value - half) - ROUNDED_TO, int(value + half)


def likely_blocks(limits: tuple[int, int] | None, settings: Settings, phase: str | None = None) -> list[Block]:
    """Tensors of that size, the most plausible first; at most `MOST`."""
    if limits is None or limits[1] < ROUNDED_TO:
        return []
    low, high = limits
    found: dict[str, Block] = {}
    for block in _candidates(settings, phase):
        if low <= block.bytes <= high:
            found.setdefault(block.kind, block)
    favoured = {"optimizer": ("weights", "embedding"), "loss": ("logits",), "attention": ("attention",), "loading": ("weights", "embedding")}.get(phase or "", ())  # fmt: skip
    return sorted(found.values(), key=lambda block: block.kind not in favoured)[:MOST]


def _candidates(settings: Settings, phase: str | None) -> Iterator[Block]:
    batches = settings.batches or ((settings.micro_batch,) if settings.micro_batch else ())
    if phase == "evaluation" and settings.eval_batch:
        batches = (settings.eval_batch, *batches)
    named = tuple(dict.fromkeys((*settings.lengths, *settings.sizes)))
    # A causal model compares each token with the next, so its loss sees one token less.
    lengths = tuple(dict.fromkeys(one for length in named for one in (length, length - 1) if one > 1))
    halves = ((4, "fp32"), (2, "bf16 or fp16"))
    for (size, dtype), rows in product(halves, batches):
        for length, vocab in product(lengths, settings.vocab):
            yield Block(f"the {dtype} logits", "logits", (rows, length, vocab), size)
        for heads, (first, second) in product(settings.heads, product(named, repeat=2)):
            yield Block(f"the {dtype} attention scores of a layer", "attention", (rows, heads, first, second), size)
        for length, width in product(named, settings.feed_forward):
            yield Block(
                f"{_ARTICLE[dtype]} {dtype} activation of a feed-forward layer",
                "activations",
                (rows, length, width),
                size,
            )
        for length, width in product(named, settings.hidden):
            yield Block(f"{dtype} hidden states", "activations", (rows, length, width), size)
        if settings.image:
            yield Block(f"a batch of {dtype} images", "images", (rows, 3, settings.image, settings.image), size)
    for size, dtype in halves:
        for vocab, width in product(settings.vocab, settings.hidden):
            name = f"the {dtype} embedding table, or its gradient or optimizer state"
            yield Block(name, "embedding", (vocab, width), size)
        for count in {settings.parameters, settings.trained} - {None}:
            assert count is not None
            yield Block(
                f"all weights in {dtype} in one piece, or their gradients or optimizer state", "weights", (count,), size
            )
            if settings.processes and settings.processes > 1:
                share = -(-count // settings.processes)
                yield Block(f"one rank's share of all weights in {dtype}, or of their gradients or optimizer state", "weights", (share,), size)  # fmt: skip
