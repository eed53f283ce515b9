"""The figures in an out-of-memory message of a GPU's allocator: how much was wanted, how much was free, and who holds the rest.

torch has changed its message with almost every major version, and prints other ones for Macs and with cudaMallocAsync:

    Tried to allocate 20.00 MiB (GPU 0; 10.76 GiB total capacity; 9.71 GiB already allocated; 13.56 MiB free; 9.84 GiB reserved …)
    Tried to allocate 1.23 GiB. GPU 0 has a total capacity of 19.58 GiB of which 1.06 GiB is free. Process 4711 has 2.00 GiB memory
    in use. Including non-PyTorch memory, this process has 16.50 GiB memory in use. Of the allocated memory …

Each reader returns fields of a `Finding` of `log_signs`.
"""

import re
from collections.abc import Mapping
from typing import Any

from brimful.report.why.log_stream import Place
from brimful.report.why.wanted_block import SIZE, size_bytes
from brimful.units import show_bytes

MESSAGE_CHARS = 1600
OTHERS_SHARE, OTHERS_BYTES = 0.02, 256 * 2**20
"""From this share of a card and this much on, memory that is not ours is worth naming. Drivers and displays take less."""
CONTEXT_BYTES = 1536 * 2**20
"""Memory that torch does not count: the CUDA context (about 770 MiB on an H200), cuBLAS, NCCL. Messages of torch 1 count it as
used by anyone."""

_PHASES = (
    ("loading", re.compile(r"from_pretrained|load_state_dict|_load_pretrained_model|torch/serialization\.py|return self\._apply\(convert\)|model\.(?:to|cuda)\(")),
    ("optimizer", re.compile(r"torch/optim/|optimi[sz]er\.step\(|_init_group|bitsandbytes/optim|fused_adam")),
    ("generation", re.compile(r"\.generate\(|generation/utils\.py")),
    ("evaluation", re.compile(r"evaluation_loop|prediction_step|validation_step|nested_concat|\.evaluate\(|_evaluate\(")),
    ("backward", re.compile(r"\.backward\(|_engine_run_backward|autograd/__init__\.py")),
    ("loss", re.compile(r"cross_entropy|log_softmax|nll_loss|logits\.float\(\)|loss_function|ForCausalLMLoss|loss_fct\(")),
    ("attention", re.compile(r"attn_weights|attention_scores|scaled_dot_product_attention|eager_attention_forward")),
    ("forward", re.compile(r"forward_call\(|\.forward\(|_call_impl")),
)  # fmt: skip
_FRAME = re.compile(r'^\s+File "[^"]+", line \d+', re.MULTILINE)
PHASE_WORDS = {
    "loading": "while the model was loaded",
    "optimizer": "in the optimizer's step",
    "generation": "while it generated text",
    "evaluation": "in an evaluation",
    "backward": "in backward",
    "loss": "in the loss",
    "attention": "in attention",
    "forward": "in forward",
}


def phase_of(place: Place) -> str | None:
    """By the frames of the traceback right before the message."""
    trace = place.before[max(0, place.before.rfind("Traceback (most recent call last)")) :]
    if not _FRAME.search(trace[-2000:]):
        return None
    deepest = "\n".join(trace.splitlines()[-14:])
    for name, pattern in _PHASES:
        if pattern.search(deepest if name in ("loss", "attention", "optimizer", "loading") else trace):
            return name
    return None


_TOTAL = re.compile(rf"GPU (\d+) has a total capaci?ty of ({SIZE}) of which ({SIZE}) is free")
_OLD = re.compile(
    rf"\(\w+\s+(\d+); ({SIZE}) total capacity; ({SIZE}) already allocated; (?:{SIZE} current active; )?(?:({SIZE}) free; )?({SIZE}) (reserved|cached)"
)
_OWN = re.compile(rf"this process has ({SIZE}) memory in use")
_PROCESS = re.compile(rf"Process (\d+) has ({SIZE}) memory in use")
_TENSORS = re.compile(
    rf"Of the allocated memory ({SIZE}) is allocated by PyTorch,(?: with ({SIZE}) allocated in private pools.*?,)? and ({SIZE}) is reserved"
)
_WRAPPED = re.compile(r"(\w+)\s+out\s+of\s+memory\.?\s*$")
"""A terminal may have broken the line before the size."""
_ALLOWED = re.compile(rf"({SIZE}) allowed;")
_ASYNC = {
    "allocated_bytes": re.compile(rf"Currently allocated\s*: ({SIZE})"),
    "wanted_bytes": re.compile(rf"Requested\s*: ({SIZE})"),
    "total_bytes": re.compile(rf"Device limit\s*: ({SIZE})"),
    "free_bytes": re.compile(rf"Free \(according to CUDA\)\s*: ({SIZE})"),
}
_CARD = {"CUDA": "GPU", "HIP": "GPU", "XPU": "XPU", "NPU": "NPU", "MPS": "the Mac's GPU"}


def torch_message(match: re.Match[str], place: Place) -> dict[str, Any] | None:
    """torch's message, of 0.4 to 2.13, for CUDA, ROCm and XPU."""
    start = match["_device"] or (
        (found := _WRAPPED.search(place.before[-200:] + place.text[: match.start()])) and found[1]
    )
    if not start:
        return None
    text = " ".join(place.text[match.start() :].split())[:MESSAGE_CHARS]
    text = text[: text.find("Tried to allocate", len(match[0])) if text.count("Tried to allocate") > 1 else None]
    figures: dict[str, Any] = {
        "device": "xpu" if start == "platform" else start.lower(),
        "wanted_bytes": size_bytes(match["wanted_size"]),
    }
    if found := _TOTAL.search(text):
        figures |= {"gpu": int(found[1]), "total_bytes": size_bytes(found[2]), "free_bytes": size_bytes(found[3])}
    elif found := _OLD.search(text):
        figures |= {"gpu": int(found[1]), "total_bytes": size_bytes(found[2]), "allocated_bytes": size_bytes(found[3])}
        if found[4]:
            figures["free_bytes"] = size_bytes(found[4])
        pool = size_bytes(found[5])
        figures["unallocated_bytes"] = max(0, pool - figures["allocated_bytes"]) if found[6] == "reserved" else pool
    if found := _TENSORS.search(text):
        figures |= {"allocated_bytes": size_bytes(found[1]), "unallocated_bytes": size_bytes(found[3])}
        if found[2]:
            figures["private_pool_bytes"] = size_bytes(found[2])
    if found := _ALLOWED.search(text):
        figures["limit_bytes"] = size_bytes(found[1])
    figures |= _holders(text, figures)
    return {
        "figures": figures,
        "wanted": match["wanted_size"],
        "phase": phase_of(place),
        "cause": _card_sentence(figures),
    }


def _holders(text: str, figures: Mapping[str, Any]) -> dict[str, Any]:
    """Who has the memory: this process, and others."""
    own = size_bytes(found[1]) if (found := _OWN.search(text)) else None
    listed = {int(pid): size_bytes(size) for pid, size in _PROCESS.findall(text)}
    ours = figures.get("allocated_bytes", 0) + figures.get("unallocated_bytes", 0)
    if own is None and listed:
        # In a container the driver knows us by another pid: we are the one that has at least what torch holds.
        pid = min(listed, key=lambda pid: (listed[pid] < 0.99 * ours, listed[pid] - ours))
        own = listed.pop(pid) if listed[pid] >= 0.99 * ours else None
    result: dict[str, Any] = {}
    if own is not None:
        result["process_bytes"] = own
    total, free = figures.get("total_bytes"), figures.get("free_bytes")
    others = sum(listed.values())
    if total and free is not None:
        unlisted = total - free - (own if own is not None else ours + CONTEXT_BYTES if ours else total)
        others = max(others, unlisted)
    if others > max(OTHERS_BYTES, OTHERS_SHARE * (total or 0)):
        result["others_bytes"] = others
        if listed:
            result["others"] = [{"pid": pid, "bytes": size} for pid, size in listed.items()]
    return result


def _card_sentence(figures: Mapping[str, Any]) -> str:
    kind = _CARD.get(str(figures.get("device", "")).upper(), "GPU")
    card = (
        f"{kind} {figures['gpu']}"
        if figures.get("gpu") is not None
        else kind
        if kind.startswith("the")
        else f"The {kind}"
    )
    card = card[0].upper() + card[1:]
    wanted = show_bytes(figures["wanted_bytes"])
    total, free, limit = (figures.get(name) for name in ("total_bytes", "free_bytes", "limit_bytes"))
    if limit:
        return f"{card} ran out of memory: {wanted} were wanted, and this process may use only {show_bytes(limit)} of the card."
    if total is None:
        return f"{card} ran out of memory: {wanted} were wanted."
    if figures["wanted_bytes"] > total:
        return f"{card} ran out of memory: {wanted} were wanted in one block, more than the {show_bytes(total)} of the card."
    if free is None:
        return f"{card} ran out of memory: {wanted} were wanted, on a card of {show_bytes(total)}."
    return f"{card} ran out of memory: {wanted} were wanted, {show_bytes(free)} of {show_bytes(total)} were free."


def async_message(match: re.Match[str], place: Place) -> dict[str, Any] | None:
    """torch's message with backend:cudaMallocAsync, a table over several lines."""
    text = " ".join(place.text[match.start() :].split())[:MESSAGE_CHARS]
    figures: dict[str, Any] = {"device": "cuda"}
    figures |= {name: size_bytes(found[1]) for name, pattern in _ASYNC.items() if (found := pattern.search(text))}
    if match["gpu"]:
        figures["gpu"] = int(match["gpu"])
    wanted = found[1] if (found := _ASYNC["wanted_bytes"].search(text)) else None
    cause = _card_sentence(figures) if wanted else "The GPU ran out of memory."
    return {"figures": figures | _holders(text, figures), "wanted": wanted, "phase": phase_of(place), "cause": cause}


def mps_message(match: re.Match[str], place: Place) -> dict[str, Any]:
    """torch's message on a Mac, where GPU and CPU share the memory."""
    allocated, others, limit, wanted = (
        size_bytes(match[name]) for name in ("_allocated", "_others", "_limit", "_wanted")
    )
    figures: dict[str, Any] = {
        "device": "mps",
        "wanted_bytes": wanted,
        "allocated_bytes": allocated,
        "total_bytes": limit,
    }
    figures["free_bytes"] = max(0, limit - allocated - others)
    if others > OTHERS_BYTES:
        figures["others_bytes"] = others
    return {"figures": figures, "wanted": match["_wanted"], "phase": phase_of(place), "cause": _card_sentence(figures)}


def plain_message(match: re.Match[str], place: Place) -> dict[str, Any]:
    """An error of the driver, which also refuses pinned host memory with these words."""
    if re.search(r"pin_memory|cudaHostAlloc|HostAllocator", place.before[-1500:]):
        return {"kind": "host-out-of-memory", "resource": "host", "certainty": "likely", "figures": {"device": None},
                "cause": "The host could not pin more RAM for copies to the GPU. The card itself need not be full."}  # fmt: skip
    return {"phase": phase_of(place)}


_DTYPE_BYTES = {
    "float": 4,
    "float32": 4,
    "half": 2,
    "float16": 2,
    "bfloat16": 2,
    "double": 8,
    "int64": 8,
    "int32": 4,
    "bool": 1,
}


def tensor_message(match: re.Match[str], place: Place) -> dict[str, Any]:
    """TensorFlow names the tensor, so its size is exact."""
    shape = [int(size) for size in match["shape"].split(",")]
    wanted = _DTYPE_BYTES.get(match["dtype"], 4)
    for size in shape:
        wanted *= size
    factors = " × ".join(f"{size:,}" for size in (*shape, _DTYPE_BYTES.get(match["dtype"], 4)))
    cause = f"The GPU ran out of memory for a tensor of {factors} bytes = {show_bytes(wanted)}."
    return {"figures": {"wanted_bytes": wanted, "shape": shape, "device": "cuda"}, "cause": cause}
