"""What the doctor runs in child processes: everything that imports torch, uses a card or waits for another process.

    python -m brimful.report.doctor.trial torch                    what torch is, and what it sees
    python -m brimful.report.doctor.trial card KIND INDEX          whether one card computes
    python -m brimful.report.doctor.trial rank KIND INDEX SECONDS  an all_reduce with the other ranks

Each answer is a line of JSON. A card is tried with a product of small whole numbers, which every precision must give exactly, and
with 64 MiB that are written and read back. With the CUDA context that is an
estimated 1 GiB for a few seconds.
"""

import contextlib
import json
import os
import signal
import sys
import time
from dataclasses import asdict
from typing import Any

from brimful.report.doctor.children import LIMIT, PARENT

SIZE = 512
BLOCK_BYTES = 64 * 2**20
_PR_SET_PDEATHSIG = 1


def main() -> None:
    """Answer on the real stdout; what libraries print goes to stderr."""
    end_with_parent()
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)

    def answer(**values: Any) -> None:
        print(json.dumps(values), file=answers, flush=True)

    name, *words = sys.argv[1:]
    failed = False
    if name == "torch":
        answer(torch=torch_facts())
    elif name == "card":
        answer(card=try_card(words[0], int(words[1])))
    else:
        result = all_reduce(words[0], int(words[1]), float(words[2]))
        failed = "problem" in result
        answer(all_reduce=result)
    os._exit(int(failed))  # an open process group may abort on its way out


def end_with_parent() -> None:
    """Nobody waits for an orphan: the kernel kills it with its parent, or after the time limit."""
    if hasattr(signal, "alarm"):
        signal.alarm(int(os.environ[LIMIT]))  # not handled, so that the kernel ends the process whatever hangs in it
    if sys.platform == "linux":
        import ctypes

        with contextlib.suppress(OSError, AttributeError):
            ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, ctypes.c_ulong(signal.SIGKILL))
    if os.getppid() != int(os.environ[PARENT]):
        raise SystemExit(1)


def torch_facts() -> dict[str, Any]:
    """torch's build, and the devices it sees, without a CUDA context on any of them."""
    started = time.monotonic()
    import torch

    import_s = time.monotonic() - started
    from brimful.machine.gpu import detect_gpus

    detected = detect_gpus(may_create_context=False)
    distributed = torch.distributed.is_available()
    return {
        "version": str(torch.__version__),
        "cuda": torch.version.cuda,
        "hip": torch.version.hip,
        "archs": torch.cuda.get_arch_list() if torch.version.cuda else [],
        "nccl": distributed and torch.distributed.is_nccl_available(),
        "gloo": distributed and torch.distributed.is_gloo_available(),
        "gpus": [asdict(gpu) for gpu in detected.gpus],
        "notes": list(detected.notes),
        "import_s": import_s,
    }


def try_card(kind: str, index: int) -> dict[str, Any]:
    """Compute and allocate on it; the time includes the start of CUDA."""
    from brimful.errors import in_one_line

    started = time.monotonic()
    try:
        return {**_compute(kind, index), "seconds": time.monotonic() - started}
    except Exception as error:  # whatever a driver or a library raises is the finding
        return {"error": in_one_line(error)}


def _compute(kind: str, index: int) -> dict[str, Any]:
    import torch

    device = torch.device(kind, index)
    if kind == "cuda":
        torch.cuda.set_device(device)
    generator = torch.Generator().manual_seed(0)
    left, right = (torch.randint(-8, 9, (SIZE, SIZE), generator=generator).float() for _ in range(2))
    expected = left @ right
    product = (left.to(device) @ right.to(device)).cpu()
    ones = torch.ones(BLOCK_BYTES // 4, device=device)
    bf16 = has_bf16(kind)
    half = (left.to(device, torch.bfloat16) @ right.to(device, torch.bfloat16)).float().cpu() if bf16 else expected
    return {
        "correct": torch.equal(product, expected) and int(ones.count_nonzero()) == BLOCK_BYTES // 4,
        "bf16": bf16,
        "bf16_correct": torch.allclose(half, expected, rtol=0.02, atol=1.0),
    }


def has_bf16(kind: str) -> bool:
    """Whether the current card computes in bf16 itself; older ones only emulate it."""
    import torch

    return kind != "cuda" or bool(torch.cuda.is_bf16_supported(including_emulation=False))


def all_reduce(kind: str, index: int, seconds: float) -> dict[str, Any]:
    """One number added up with the other ranks, through the same code with which a training begins."""
    import torch

    from brimful.errors import ConnectionFailed
    from brimful.training.connection import check_connection

    device = torch.device("cpu") if kind == "cpu" else torch.device(kind, index)
    started = time.monotonic()
    try:
        check_connection(device, "nccl" if kind == "cuda" else "gloo", timeout_s=seconds / 2, start_s=seconds / 2)
    except ConnectionFailed as error:
        problem, _, fix = str(error).rstrip(".").partition(". Try: ")
        return {"problem": problem, "fix": fix}
    return {"seconds": time.monotonic() - started}


if __name__ == "__main__":
    main()
