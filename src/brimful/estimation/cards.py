"""The GPUs that people train on: how much memory torch has on each, and what its kernels can do.

The memory is what torch reports as the card's total on Linux, in GiB. That is less than what is printed on the box: 23.51 GiB of a
24 GB card. It has shrunk by 0.07 to 0.19 GiB with recent drivers, so figures are the lowest seen in public logs; a few are those of a
sister card. With ECC switched on, an A5000, A6000 or A40 has 6 % less. A CUDA context takes its part before torch has anything.
"""

import difflib
import re
from dataclasses import dataclass

from brimful.errors import BadOption
from brimful.memory.temporaries import H200, Processors
from brimful.units import GiB, KiB, MiB, parse_bytes, show_bytes

CONTEXT_BYTES = 768 * MiB
"""The CUDA context of a card that is not in the table, outside of torch's allocator: as measured on an H200. It grows with the number
of processors: users' reports have 140 MiB on a T4 and 460 to 580 on an RTX 4090."""
HOPPER_CUBLAS_BYTES, CUBLAS_BYTES = 32 * MiB, 8320 * KiB
"""What torch gives each handle of cuBLAS to work with, on cards since Hopper and on older ones. Some versions of torch give Blackwell
the smaller one; the larger one is assumed."""
SINCE_HOPPER = (9, 0)
SINCE_FLASH = (8, 0)
"""Compute capability from which torch has flash attention, and bf16 is fast."""
LEAST_BYTES = 1 * MiB
"""Less memory than this is a missing unit."""
UNNAMED = "a card"
OTHER_MODEL = re.compile("ti|super|laptop|d$")
"""What is behind the name of one model in that of another: an RTX 5060 is no RTX 5060 Ti."""
NEAR = 5
USUAL = "RTX 4090"
"""The card that is looked at closely where all are compared."""


@dataclass(frozen=True, kw_only=True)
class Card:
    """A GPU."""

    name: str
    total_bytes: int
    """As the driver reports it."""
    capability: tuple[int, int]
    """Compute capability; of AMD's cards that of NVIDIA's with the same kernels in torch."""
    processors: Processors = H200
    """Of a card that is not known, those of an H200: more divide their work further, and take more memory for the parts."""
    context_bytes: int = CONTEXT_BYTES
    """Of the CUDA context, rounded up."""
    known: bool = True
    """False for memory without a card."""

    @property
    def limit_bytes(self) -> int:
        """What torch may reserve: without the context."""
        return self.total_bytes - self.context_bytes

    @property
    def cublas_bytes(self) -> int:
        """Of each workspace of cuBLAS. The larger one where the card is not known."""
        return HOPPER_CUBLAS_BYTES if self.capability >= SINCE_HOPPER or not self.known else CUBLAS_BYTES

    @property
    def has_flash(self) -> bool:
        """Whether it has flash attention and fast bf16."""
        return self.capability >= SINCE_FLASH


THREADS = {(7, 5): 1024, (8, 6): 1536, (8, 9): 1536, (12, 0): 1536}
"""Of a multiprocessor, by compute capability; 2,048 of all others."""


def _card(name: str, gib: float, capability: tuple[int, int], processors: int, context_mib: int) -> Card:
    return Card(
        name=name, total_bytes=int(gib * GiB), capability=capability, context_bytes=context_mib * MiB,
        processors=Processors(processors, THREADS.get(capability, 2048)),
    )  # fmt: skip


CARDS = (
    _card("GTX 1080 Ti", 10.91, (6, 1), 28, 256),
    _card("RTX 2060", 5.59, (7, 5), 30, 256),
    _card("RTX 2070", 7.59, (7, 5), 36, 256),
    _card("RTX 2080 Ti", 10.57, (7, 5), 68, 384),
    _card("Titan RTX", 23.5, (7, 5), 72, 384),
    _card("RTX 3050", 7.65, (8, 6), 20, 256),
    _card("RTX 3060 Laptop", 5.67, (8, 6), 30, 256),
    _card("RTX 3060", 11.62, (8, 6), 28, 256),
    _card("RTX 3060 Ti", 7.64, (8, 6), 38, 256),
    _card("RTX 3070", 7.57, (8, 6), 46, 320),
    _card("RTX 3080", 9.65, (8, 6), 68, 384),
    _card("RTX 3080 Ti", 11.63, (8, 6), 80, 448),
    _card("RTX 3090", 23.55, (8, 6), 82, 448),
    _card("RTX 3090 Ti", 23.54, (8, 6), 84, 448),
    _card("RTX 4060", 7.62, (8, 9), 24, 256),
    _card("RTX 4060 Laptop", 7.62, (8, 9), 24, 256),
    _card("RTX 4060 Ti 8GB", 7.62, (8, 9), 34, 256),
    _card("RTX 4060 Ti 16GB", 15.57, (8, 9), 34, 256),
    _card("RTX 4070", 11.58, (8, 9), 46, 320),
    _card("RTX 4070 Ti", 11.58, (8, 9), 60, 384),
    _card("RTX 4070 Ti SUPER", 15.56, (8, 9), 66, 384),
    _card("RTX 4080", 15.56, (8, 9), 76, 448),
    _card("RTX 4080 SUPER", 15.56, (8, 9), 80, 448),
    _card("RTX 4090 Laptop", 15.56, (8, 9), 76, 448),
    _card("RTX 4090", 23.51, (8, 9), 128, 640),
    _card("RTX 4090 D", 23.54, (8, 9), 114, 640),
    _card("RTX 5060 Ti 16GB", 15.45, (12, 0), 36, 256),
    _card("RTX 5070", 11.5, (12, 0), 48, 320),
    _card("RTX 5070 Ti", 15.43, (12, 0), 70, 448),
    _card("RTX 5080", 15.46, (12, 0), 84, 448),
    _card("RTX 5090", 31.33, (12, 0), 170, 768),
    _card("T4", 14.56, (7, 5), 40, 256),
    _card("P100", 15.88, (6, 0), 56, 384),
    _card("V100 16GB", 15.75, (7, 0), 80, 448),
    _card("V100 32GB", 31.73, (7, 0), 80, 448),
    _card("A10", 22.07, (8, 6), 72, 384),
    _card("A10G", 22.05, (8, 6), 80, 448),
    _card("A30", 23.53, (8, 0), 56, 384),
    _card("A40", 44.34, (8, 6), 84, 448),
    _card("A100 40GB", 39.38, (8, 0), 108, 576),
    _card("A100 80GB", 79.13, (8, 0), 108, 576),
    _card("L4", 22.03, (8, 9), 58, 320),
    _card("L40", 44.39, (8, 9), 142, 704),
    _card("L40S", 44.39, (8, 9), 142, 704),
    _card("H100", 79.09, (9, 0), 132, 768),
    _card("H100 NVL", 93.01, (9, 0), 132, 768),
    _card("H20", 95.0, (9, 0), 78, 448),
    _card("H200", 139.7, (9, 0), 132, 768),
    _card("GH200", 94.5, (9, 0), 132, 768),
    _card("B200", 178.35, (10, 0), 148, 768),
    _card("RTX A2000 12GB", 11.6, (8, 6), 26, 256),
    _card("RTX A4000", 15.59, (8, 6), 48, 320),
    _card("RTX A4500", 19.57, (8, 6), 56, 320),
    _card("RTX A5000", 23.57, (8, 6), 64, 384),
    _card("RTX A6000", 47.4, (8, 6), 84, 448),
    _card("RTX 4000 Ada", 19.54, (8, 9), 48, 320),
    _card("RTX 6000 Ada", 47.36, (8, 9), 142, 704),
    _card("RTX PRO 6000 Blackwell", 94.96, (12, 0), 188, 896),
    _card("Quadro RTX 6000", 23.5, (7, 5), 72, 384),
    _card("Quadro RTX 8000", 47.24, (7, 5), 72, 384),
    _card("RX 7900 XTX", 23.98, (8, 0), 48, 512),
    _card("MI210", 63.98, (8, 0), 104, 768),
    _card("MI250X", 63.98, (8, 0), 110, 768),
    _card("MI300X", 191.68, (9, 0), 304, 768),
)


def all_cards() -> tuple[Card, ...]:
    """From the smallest to the largest."""
    return tuple(sorted(CARDS, key=lambda card: (card.limit_bytes, card.name)))


def find_card(name: str | None, memory: int | str | None = None) -> Card:
    """The card of this name, however it is written; the GPU of this machine without one; a card of this much memory.

    >>> find_card("nvidia geforce rtx4090").name
    'RTX 4090'
    """
    size = None if memory is None else parse_bytes(memory, flag="memory=")
    if size is not None and size < LEAST_BYTES:
        raise BadOption(f"memory={memory} is {show_bytes(size)}, which no GPU has. Try: memory=24GiB.")
    if name is None or name == "all":
        if size is not None:
            return Card(
                name=f"{UNNAMED} with {show_bytes(size)}",
                total_bytes=size + CONTEXT_BYTES,
                capability=SINCE_FLASH,
                known=False,
            )
        here = _own_card()
        if here is not None:
            return here
        if name == "all":
            return next(card for card in CARDS if card.name == USUAL)
        raise BadOption(
            'gpu= is needed, because this machine has no GPU. Try: gpu="RTX 4090", gpu="all", or memory="24GiB".'
        )
    key = _key(name)
    by_key = {_key(card.name): card for card in CARDS}
    if key in by_key:
        return by_key[key]
    sized = [card for own, card in by_key.items() if re.fullmatch(own + r"\d+gb", key)]
    if sized:  # `H100 80GB`, of which there is one
        return sized[0]
    similar = [card for own, card in by_key.items() if key and key in own]
    if len(similar) == 1 and not OTHER_MODEL.match(_key(similar[0].name).partition(key)[2]):
        return similar[0]
    close = difflib.get_close_matches(key, by_key, n=NEAR, cutoff=0.4)
    near = [card.name for card in similar] or [by_key[own].name for own in close]
    advice = (
        f"{', '.join(near[:NEAR])}, or memory="
        if near
        else 'gpu="all", which lists every card that is known, or memory='
    )
    raise BadOption(f"gpu={name!r} {'is not one card' if len(similar) > 1 else 'is unknown'}. Try: {advice}.")


def _key(name: str) -> str:
    """Without the maker and without spaces: `NVIDIA GeForce RTX 4090` is `4090`, `NVIDIA A100-SXM4-80GB` is `a10080gb`."""
    plain = re.sub(
        r"\b(nvidia|geforce|tesla|amd|radeon|instinct|rtx|gtx|rx|sxm\d*|pcie|hbm3e?|gpu|generation)\b|-",
        " ",
        name.lower().replace("rtx", "rtx "),
    )
    return re.sub(r"[^a-z0-9]", "", plain)


def _own_card() -> Card | None:
    """The first GPU of this machine; None if there is none."""
    import torch

    if not torch.cuda.is_available():
        return None
    properties = torch.cuda.get_device_properties(0)
    return Card(
        name=properties.name, total_bytes=properties.total_memory, capability=(properties.major, properties.minor),
        processors=Processors(properties.multi_processor_count, properties.max_threads_per_multi_processor),
    )  # fmt: skip
