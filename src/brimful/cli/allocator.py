"""How torch's allocator takes memory from a card, which is fixed before torch is imported."""

import os


def prefer_growing_segments() -> None:
    """Varying shapes fragment torch's default segments (20.0 GiB reserved for 15.4 in use); these can grow instead."""
    if "PYTORCH_CUDA_ALLOC_CONF" not in os.environ:
        os.environ.setdefault("PYTORCH_ALLOC_CONF", "expandable_segments:True")
