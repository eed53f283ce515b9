"""How each failure looks in a log, tool by tool and version by version, and the figures its message has.

A `Sign` is a literal that `log_reader` searches for, a regular expression for the text from that line on, and what it means.
Formats were taken from the sources of torch, NCCL, Linux, Slurm, DeepSpeed and others, and from public bug reports; the logs in
`tests/logs` have an example of each. To add one: a row in `SIGNS`, a log in `tests/logs`, its diagnosis in `expected.toml`.

`level` orders causes: a rank that runs out of memory makes the others wait for it, so an NCCL timeout beside an out-of-memory
error is its consequence. What a log merely quotes (a line of source in a traceback, a row of the training data) is no sign.
"""

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from brimful.report.why.diagnosis import Certainty, Resource
from brimful.report.why.gpu_messages import (
    SIZE,
    async_message,
    mps_message,
    phase_of,
    plain_message,
    size_bytes,
    tensor_message,
    torch_message,
)
from brimful.units import GiB, KiB, show_bytes

TRACEBACK = b"Traceback (most recent call last)"
ANYWHERE = b""
"""The gate of literals that are searched for in every piece."""
ROOT, VAGUE, CONSEQUENCE, SYMPTOM = range(4)
"""A cause; a cause that the log does not prove; what usually follows from another; what does not end a run."""


@dataclass(frozen=True, slots=True)
class Place:
    """A line with a hit, and what is around it, as clean text."""

    offset: int
    line: int
    """As an editor counts, from 1."""
    text: str
    """From the beginning of the line on."""
    before: str
    """Up to the beginning of the line."""
    rank: int | None = None

    @property
    def first_line(self) -> str:
        return self.text.partition("\n")[0]


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """One recognised message."""

    kind: str
    resource: Resource
    level: int
    cause: str
    place: Place
    certainty: Certainty = "certain"
    figures: Mapping[str, Any] = field(default_factory=dict)
    wanted: str | None = None
    """The size that did not fit, as printed."""
    exact: bool = False
    """It was printed to the byte, not rounded by torch's allocator."""
    phase: str | None = None
    """What the program did, by the traceback: `loading`, `forward`, `loss`, `attention`, `backward`, `optimizer`, `evaluation`,
    `generation`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Sign:
    """How to recognise a message. Named groups of the pattern become figures and fill in `cause`.

    `x_size` (`1.2 GiB`) and `x_kb` become `x_bytes`, digits a whole number, anything else stays text; `_x` is only for `read`.
    """

    kind: str
    resource: Resource
    hints: tuple[bytes, ...]
    pattern: re.Pattern[str]
    cause: str
    level: int = ROOT
    certainty: Certainty = "certain"
    gate: bytes = ANYWHERE
    figures: Mapping[str, Any] = field(default_factory=dict)
    read: Callable[[re.Match[str], Place], dict[str, Any] | None] | None = None
    """Fields of the `Finding` that differ, by a closer look; None: it is no sign after all."""

    def find(self, place: Place) -> Finding | None:
        match = self.pattern.search(place.text)
        if (
            match is None
            or match.start() > len(place.first_line)
            or is_quoted(place.text[: match.start()], place.first_line)
        ):
            return None
        figures = {**self.figures, **_figures(match)}
        shown = {name: show_bytes(value) if name.endswith("_bytes") else value for name, value in figures.items()}
        fields: dict[str, Any] = {"figures": figures, "cause": self.cause.format(**shown)}
        if self.read is not None:
            changes = self.read(match, place)
            if changes is None:
                return None
            more = {
                name: value for name, value in {**figures, **changes.get("figures", {})}.items() if value is not None
            }
            fields |= {**changes, "figures": more}
        if place.rank is not None:
            fields["figures"]["rank"] = place.rank
        return Finding(**{"kind": self.kind, "resource": self.resource, "level": self.level, "certainty": self.certainty, "place": place, **fields})  # fmt: skip


_DATA = re.compile(r"""['"](?:prompt|text|instruction|input|question|content|response|answer|output|completion|title|query|messages?_text|chosen|rejected)['"]\s*:\s*['"]""")  # fmt: skip
_SOURCE = re.compile(
    r"\s*(?:raise\b|except\b|if\b|elif\b|assert\b|return\b(?! code)|print\(|log(?:ger|ging)?\.|warnings?\.|#|//|\d+\s*[│|]|[│❱>\s]*\d+ [│|])"
)
_VALUE = re.compile(r"""(?:[:=] ?|Error\(|Exception\()["'`]$""")
"""A quote that opens the value of a key, or the message in the `repr` of an error."""
_SEARCH = re.compile(r"\b(?:grep|egrep|rg|re\.search)\b|\bin str\(|\.message\b.* in ")


def is_quoted(before: str, line: str) -> bool:
    """Whether the match is a row of the data or a line of source, not something that happened."""
    quote = before[-1:]
    literal = quote in ("'", '"', "`") and before.count(quote) % 2 == 1 and not _VALUE.search(before)
    return bool(literal or _DATA.search(before) or _SOURCE.match(line) or _SEARCH.search(line))


def _figures(match: re.Match[str]) -> dict[str, Any]:
    figures: dict[str, Any] = {}
    for name, text in match.groupdict().items():
        if text is None or name.startswith("_"):
            continue
        stem, _, unit = name.rpartition("_")
        if unit == "size":
            figures[f"{stem}_bytes"] = size_bytes(text)
        elif unit == "kb":
            figures[f"{stem}_bytes"] = int(text.replace(",", "")) * KiB
        else:
            figures[name] = int(text.replace(",", "")) if re.fullmatch(r"-?\d[\d,]*", text) else text.strip()
    return figures


# ---- Host memory, kills and exits ------------------------------------------------------------------------------------

_CGROUP_LIMIT = re.compile(r"memory: usage (\d+)kB, limit (\d+)kB")
_OF_GROUP = re.compile(r"CONSTRAINT_MEMCG|Memory cgroup out of memory|Task in /\S+ killed")
_SIGNALS = {
    1: "SIGHUP",
    4: "SIGILL",
    6: "SIGABRT",
    7: "SIGBUS",
    8: "SIGFPE",
    9: "SIGKILL",
    11: "SIGSEGV",
    15: "SIGTERM",
}


def _kernel_kill(match: re.Match[str], place: Place) -> dict[str, Any]:
    figures = _figures(match)
    around = place.before[-6000:] + place.text[:600]
    name = figures["process"]
    size = show_bytes(figures["process_bytes"]) if "process_bytes" in figures else None
    limit = [int(found[2]) * KiB for found in _CGROUP_LIMIT.finditer(around)]
    grouped = bool(_OF_GROUP.search(around))
    figures["scope"] = "group" if grouped else "machine"
    if grouped and limit:
        figures["limit_bytes"] = limit[-1]
        where = f"its container or job may use no more than {show_bytes(limit[-1])} of RAM"
    else:
        where = "its container or job had reached its RAM limit" if grouped else "the machine had run out of RAM"
    holding = f", which held {size}," if size else ""
    cause = f"The kernel killed process {figures['pid']} ({name}){holding} because {where}."
    python = re.match(r"(?:python|pt_|ray|torchrun|accelerate|train|jupyter|ipython|deepspeed)", name)
    return {"figures": figures, "cause": cause, "certainty": "certain" if python else "likely"}


def _exit(match: re.Match[str], place: Place) -> dict[str, Any] | None:
    """A process that ended by a signal: its number is negative, or has 128 added."""
    code = int(match["_code"])
    number = -code if code < 0 else code - 128 if 128 < code < 165 else 0
    signal = _SIGNALS.get(number)
    if signal is None:
        return None
    rank = re.search(r"\brank\s+: (\d+)", place.before[-300:])  # torchrun's summary
    return _ended_by(signal, {"exit_code": code, "rank": int(rank[1]) if rank else None})


def _ended_by(signal: str, figures: dict[str, Any]) -> dict[str, Any]:
    figures = {**figures, "signal": signal}
    if signal == "SIGKILL":
        return {"figures": figures}
    if signal == "SIGBUS":
        cause = "A process ended with SIGBUS, as it does when /dev/shm is full."
        return {"kind": "shm-full", "resource": "shm", "certainty": "likely", "figures": figures, "cause": cause}
    if signal in ("SIGTERM", "SIGHUP"):
        return {"kind": "stopped", "resource": "none", "level": CONSEQUENCE, "certainty": "certain", "figures": figures,
                "cause": f"The process was asked to stop ({signal}): by a scheduler, by its launcher, or by hand."}  # fmt: skip
    return {"kind": "crashed", "resource": "none", "certainty": "certain", "figures": figures,
            "cause": f"A process crashed ({signal}). That is a fault in compiled code, not memory that ran out."}  # fmt: skip


def _signalled(match: re.Match[str], place: Place) -> dict[str, Any]:
    """Brimful's launcher asks the kernel's counter of out-of-memory kills, and says what it tells."""
    changes = _ended_by(match["_signal"] or match["_signal_zh"] or "SIGKILL", {})
    if changes.keys() - {"figures"}:
        return changes
    if re.search("not by the kernel's out-of-memory killer|不是内核的 OOM killer", place.first_line):
        return {**changes, "kind": "killed", "resource": "none", "certainty": "certain",
                "cause": "A process was killed (SIGKILL), but not by the kernel's out-of-memory killer: by a scheduler, or by hand."}  # fmt: skip
    if re.search("because host memory ran out|因为主机内存耗尽", place.first_line):
        return {
            **changes,
            "certainty": "certain",
            "cause": "The kernel killed a process, because the host ran out of RAM.",
        }
    return changes


_ABOUT_IT = re.compile(
    r"\b(?:OOM|[Cc]aught|[Ss]kip|[Rr]etry|[Hh]alv|[Rr]educ|[Ll]ower|[Dd]ecreas|[Ff]all(?:ing)? back|[Tt]rying)"
)
_IN_CASE = re.compile(r"\b(?:[Ii]f|[Ww]hen|[Aa]void|in case|[Ss]hould)\b")


def _caught(match: re.Match[str], place: Place) -> dict[str, Any] | None:
    """A program that says what it does about the error has had one; one that says what to do if it comes has not."""
    return {} if _ABOUT_IT.search(place.first_line) and not _IN_CASE.search(place.first_line) else None


def _worker(match: re.Match[str], place: Place) -> dict[str, Any] | None:
    signal = match["signal"].strip()
    if signal == "Killed":
        return {}
    if signal.startswith("Bus error"):
        return {"kind": "shm-full", "resource": "shm", "level": ROOT, "certainty": "certain",
                "cause": "A DataLoader worker got a bus error, because /dev/shm is full: workers hand over their batches in it."}  # fmt: skip
    if signal == "Terminated":
        return {"kind": "stopped", "resource": "none", "level": CONSEQUENCE, "certainty": "likely",
                "cause": "A DataLoader worker was asked to stop (SIGTERM): by a scheduler, by its launcher, or by hand."}  # fmt: skip
    return {"kind": "crashed", "resource": "none", "certainty": "certain",
            "cause": f"A DataLoader worker crashed ({signal}). That is a fault in compiled code, not memory that ran out."}  # fmt: skip


def _vllm(match: re.Match[str], place: Place) -> dict[str, Any]:
    """vLLM takes a share of the card at its start, whatever a training beside it has left, and wants room for one request in it."""
    sizes = {
        f"{name}_bytes": int(float(value) * GiB) for name in ("free", "total", "needed", "room") if (value := match[f"_{name}"])
    }  # fmt: skip
    asked, longest = (int(value) if (value := match[f"_{name}"]) else None for name in ("asked", "longest"))
    figures: dict[str, Any] = {"device": "cuda", **sizes, "asked_tokens": asked, "fitting_tokens": longest}
    shown = {name: show_bytes(size) for name, size in sizes.items()}
    cause = "The weights and activations take all of vLLM's share of the GPU, so there is no room for its cache."
    if "free_bytes" in sizes:
        cause = (
            f"vLLM has no room on the GPU: {shown['free_bytes']} of {shown['total_bytes']} were free when it started."
        )
    elif "needed_bytes" in sizes:
        room = shown["room_bytes"]
        cause = (
            f"A request of {asked:,} tokens needs {shown['needed_bytes']} of vLLM's cache, which has room for {room}."
        )
    elif longest is not None:
        cause = f"A request of {asked:,} tokens does not fit in vLLM's cache, which has room for {longest:,}."
    return {"figures": figures, "cause": cause}


_HUB = r"(?:huggingface\.co|hf\.co|hf-mirror\.com|modelscope\.cn)"


def _hub(match: re.Match[str], place: Place) -> dict[str, Any] | None:
    if "thrown while requesting" in place.first_line:
        return None  # a warning: a later try may have gone well
    around = place.before[-2000:] + place.text[:2000]
    name = re.search(
        r"https?://[\w.-]+/((?!api/)[\w.-]+/[\w.-]+)/resolve|with url: /(?:api/models/)?([\w.-]+/[\w.-]+)[/ ]", around
    )
    if match[0].startswith("httpx") and "huggingface_hub" not in place.before:
        return None
    host = re.search(r"(?:https?://|host=')([\w.-]+)", place.first_line)
    return {"figures": {"name": (name[1] or name[2]) if name else None, "host": host[1] if host else None}}


def _space(match: re.Match[str], place: Place) -> dict[str, Any] | None:
    """Errno 28 means a full disk, a full /dev/shm, or no more inotify watches."""
    line, around = place.first_line, place.before[-1500:] + place.first_line
    if "inotify" in line:
        return {
            "kind": "too-many-files",
            "resource": "files",
            "cause": "The limit on watched files (inotify) is reached. The disk is not full.",
        }
    if "NCCL WARN" in line:
        return {
            "kind": "shm-full",
            "resource": "shm",
            "cause": "/dev/shm is full, and NCCL needs it for the processes of one machine.",
        }
    if re.search(r"/dev/shm|</?torch_\d|SemLock|_share_f(?:d|ilename)", around):
        return {
            "kind": "shm-full",
            "resource": "shm",
            "cause": "/dev/shm is full. Processes hand over batches and tensors in it.",
        }
    found = re.search(r"No space left on device:? '([^']+)'", place.text[:2000])
    saving = re.search(
        r"save_pretrained|torch\.save|save_file|_save_checkpoint|serializ|save_checkpoint|checkpoint", around
    )
    what = "checkpoint" if saving else "file"
    figures = {"writing": what, "path": found[1] if found else None}
    return {"figures": figures, "cause": f"The disk is full: a {what} could not be written."}


def _assertion(match: re.Match[str], place: Place) -> dict[str, Any]:
    text = place.before[-4000:] + place.text
    cause = "An assertion failed on the GPU (device-side assert)."
    if re.search(
        r"srcIndex < srcSelectDimSize|ind >= 0 && ind < ind_dim_size|index out of bounds|vectorized_gather", text
    ):
        cause = "An index is out of range on the GPU: a token id beyond the embedding table, or a position beyond the longest allowed."
    elif re.search(r"t >= 0 && t < n_classes|cur_target >= 0 && cur_target < n_classes", text):
        cause = "A label is out of range on the GPU: a class or token id that the output layer does not have."
    elif re.search(r"probability tensor|input_val >= zero && input_val <= one|cumdist\[size - 1\]", text):
        cause = "A probability is NaN, inf or outside 0…1 on the GPU."
    return {"cause": f"{cause} This is a fault in the data or the code, not memory that ran out."}


def _tpu(match: re.Match[str], place: Place) -> dict[str, Any]:
    """XLA counts in powers of two, and prints `17.50G`. What is needed is known when the program is compiled."""
    needed, limit = (size_bytes(f"{match[name]}iB") for name in ("_used", "_limit"))
    cause = f"The program needs {show_bytes(needed)} of the TPU's memory, which has {show_bytes(limit)}."
    return {"figures": {"wanted_bytes": needed, "free_bytes": limit}, "cause": cause}


def _volume(match: re.Match[str], place: Place) -> dict[str, Any]:
    return {"kind": "shm-full", "resource": "shm"} if "shm" in match["volume"] else {}


def _triton(match: re.Match[str], place: Place) -> dict[str, Any] | None:
    if re.search(r"Ignoring this choice|for benchmark choice|during autotuning", place.first_line):
        return None  # one of the candidates
    needed, limit = int(match["_needed"]), int(match["_limit"])
    cause = f"A Triton kernel wants {show_bytes(needed)} of the GPU's on-chip shared memory, which has {show_bytes(limit)}. The card's memory is not full."
    return {"figures": {"needed_bytes": needed, "limit_bytes": limit}, "cause": cause}


def _nan(match: re.Match[str], place: Place) -> dict[str, Any] | None:
    step = re.search(r"(?:step|iter(?:ation)?)\W{0,3}\s*(\d+)|\|\s*(\d+)/\d+ \[", place.first_line, re.IGNORECASE)
    figures = {"step": int(step[1] or step[2])} if step else {}
    return {"figures": figures}


_KILLED_WORDS = ("Killed", "Terminado (killed)", "已杀死", "強制終了", "Getötet", "Убито")
_CRASHED_WORDS = ("Segmentation fault", "段错误", "Violación de segmento", "Ошибка сегментирования")
_BUS_ERROR_WORDS = ("Bus error", "总线错误")
"""As shells print them, in English and in other languages."""


def _shell_says(words: Sequence[str]) -> str:
    """How a shell reports a signal: the word alone, or behind `run.sh: line 4:  3311 `, `[1]+  3311 ` or `zsh: `."""
    word = "|".join(map(re.escape, words))
    line = r"\S+(?:: line | ?[:：] ?(?:第|行|Zeile|ligne|línea|строка) ?)\d+ ?行?[:：]\s*\d+ "
    return (
        rf"^(?:(?:{line}|\[\d+\][+-]?\s+(?:[+-] )?(?:\d+ )?|zsh: |错误：|Fatal Python error: )(?i:{word})(?!\w)"
        rf"|(?:{word})(?=\s*$|\s\s|\s*[(（][`'‘]?(?:core|核心)))"
    )


def _foreign(words: Sequence[str]) -> tuple[bytes, ...]:
    return tuple(word.encode() for word in words if not word.isascii())


_NO_ROW_FITS = "Not even one row fits: every batch size down to 1 ran out of memory. One row may be far longer than the others, or weights and optimizer state alone fill the card."
ERROR, MEMORY, KILLED = b"rror", b"emory", b"illed"
"""Gates: most messages are in lines with one of these, and most pieces of a log have neither."""
_S = re.compile
SIGNS: tuple[Sign, ...] = (
    # ---- GPU memory
    Sign(kind="gpu-out-of-memory", resource="gpu", hints=(b"out of memory", b"Tried to allocate"), gate=MEMORY, read=torch_message, cause="",
         pattern=_S(rf"(?:(?P<_device>[A-Z]{{2,5}})\s+out\s+of\s+memory\.\s+)?Tried\s+to\s+allocate\s+(?P<wanted_size>{SIZE})")),
    Sign(kind="gpu-out-of-memory", resource="gpu", hints=(b"Tried to allocate",), gate=MEMORY, read=torch_message, cause="",
         pattern=_S(rf"(?P<_device>platform) can NOT allocate memory block with size larger than 4GB! Tried to allocate (?P<wanted_size>{SIZE})")),
    Sign(kind="gpu-out-of-memory", resource="gpu", hints=(b"would exceed allowed memory",), gate=MEMORY, read=async_message, cause="",
         pattern=_S(r"Allocation on device (?P<gpu>\d+)? ?would exceed allowed memory")),
    Sign(kind="gpu-out-of-memory", resource="gpu", hints=(b"MPS backend out of memory",), gate=MEMORY, read=mps_message, cause="",
         pattern=_S(rf"MPS backend out of memory \(MPS allocated: (?P<_allocated>{SIZE}), other allocations: (?P<_others>{SIZE})(?:, max allowed: (?P<_limit>{SIZE}))?\)\.\s+Tried to allocate (?P<_wanted>{SIZE})")),
    Sign(kind="gpu-out-of-memory", resource="gpu", hints=(b"kIOGPUCommandBufferCallbackErrorOutOfMemory",), gate=ERROR, figures={"device": "mps"},
         pattern=_S("kIOGPUCommandBufferCallbackErrorOutOfMemory"), cause="The Mac's GPU ran out of memory; the message has no figures."),
    Sign(kind="gpu-out-of-memory", resource="gpu", hints=(b"Invalid buffer size",), gate=ERROR, figures={"device": "mps"},
         pattern=_S(rf"Invalid buffer size: (?P<wanted_size>{SIZE})"), cause="The Mac's GPU cannot hold one block of {wanted_bytes}."),
    Sign(kind="gpu-out-of-memory", resource="gpu", hints=(b"OUT_OF_DEVICE_MEMORY", b"UR_RESULT_ERROR_OUT_OF_RESOURCES"), gate=ERROR, figures={"device": "xpu"},
         pattern=_S(r"(?:UR|ZE|PI)_\w*OUT_OF_(?:DEVICE_MEMORY|RESOURCES)"), cause="The XPU ran out of memory; the message has no figures."),
    Sign(kind="gpu-out-of-memory", resource="gpu", hints=(b"out of memory",), gate=MEMORY, figures={"device": "cuda"}, read=plain_message,
         pattern=_S(rf"(?:CUDA|HIP|cuda|cuda runtime|hip) (?:driver )?(?:error|failure)[: ]*(?:\(2\) ?: )?'?out of memory|(?:OutOfMemory|Runtime)Error: (?:CUDA|HIP|XPU|NPU) out of memory(?!\.\s+Tried\s+to\s+allocate\s+{SIZE}|\. The train loop failed)|Triton Error \[(?:CUDA|HIP)\]: out of memory|Cuda failure (?:\d+ )?'out of memory'|cudaMalloc failed: out of memory"),
         cause="The GPU ran out of memory; the message has no figures."),
    Sign(kind="gpu-out-of-memory", resource="gpu", hints=(b"out of memory",), gate=MEMORY, level=VAGUE, certainty="likely", figures={"device": "cuda"},
         pattern=_S(rf"\b(?:CUDA|HIP|XPU|NPU) out of memory\b(?!\.\s+Tried\s+to\s+allocate\s+{SIZE})"), read=_caught,
         cause="The GPU ran out of memory; the message has no figures."),
    Sign(kind="gpu-out-of-memory", resource="gpu", hints=(b"cudaErrorMemoryAllocation",), gate=ERROR, figures={"device": "cuda"},
         pattern=_S(r"cudaErrorMemoryAllocation:? out of memory"), cause="The GPU ran out of memory; the message has no figures."),
    Sign(kind="gpu-out-of-memory", resource="gpu", hints=(b"Out of memory allocating",), gate=MEMORY, figures={"device": "cuda"},
         pattern=_S(r"cupy\S*OutOfMemoryError: Out of memory allocating (?P<wanted_bytes>[\d,]+) bytes"), cause="The GPU ran out of memory: {wanted_bytes} were wanted."),
    Sign(kind="gpu-out-of-memory", resource="gpu", hints=(b"ERROR_OUT_OF_MEMORY",), gate=ERROR, figures={"device": "cuda"}, read=plain_message,
         pattern=_S(r"(?<!from device: )(?:CUDA|HIP)_ERROR_OUT_OF_MEMORY"), cause="The GPU ran out of memory; the message has no figures."),
    Sign(kind="gpu-out-of-memory", resource="gpu", hints=(b"OOM when allocating tensor",), gate=ERROR, read=tensor_message, cause="",
         pattern=_S(r"OOM when allocating tensor with shape\s?\[(?P<shape>[\d,]+)\] and type (?P<dtype>\w+)")),
    Sign(kind="gpu-out-of-memory", resource="gpu", hints=(b"RESOURCE_EXHAUSTED",), gate=ERROR, figures={"device": "cuda"},
         pattern=_S(r"RESOURCE_EXHAUSTED: Out of memory (?:while trying to allocate|allocating) (?P<wanted_bytes>\d+) bytes"),
         cause="The GPU ran out of memory: {wanted_bytes} were wanted."),
    Sign(kind="gpu-out-of-memory", resource="gpu", hints=(b"in memory space hbm",), gate=MEMORY, figures={"device": "tpu"}, read=_tpu, cause="",
         pattern=_S(r"Ran out of memory in memory space hbm\. Used (?P<_used>[\d.]+[KMG]) of (?P<_limit>[\d.]+[KMG]) hbm")),
    Sign(kind="gpu-out-of-memory", resource="gpu", hints=(b"Failed to allocate memory for requested buffer",), gate=MEMORY, level=VAGUE, certainty="possible", figures={"device": "cuda"},
         pattern=_S(r"BFCArena.*Failed to allocate memory for requested buffer of size (?P<wanted_bytes>\d+)"),
         cause="ONNX Runtime got no {wanted_bytes}: on the GPU, or in RAM where it computes on the CPU."),
    Sign(kind="gpu-out-of-memory", resource="gpu", hints=(b"Out of memory error on GPU",), gate=MEMORY, figures={"device": "cuda"},
         pattern=_S(rf"Out of memory error on GPU (?P<gpu>\d+)\. Cannot allocate (?P<wanted_size>{SIZE}) memory on GPU \d+, (?P<process_size>{SIZE}) memory has been allocated and available memory is only (?P<free_size>{SIZE})"),
         cause="GPU {gpu} ran out of memory: {wanted_bytes} were wanted, {free_bytes} were free."),
    Sign(kind="gpu-out-of-memory", resource="gpu", hints=(b"Failed to CUDA calloc", b"Failed to Cuda calloc"), gate=b"NCCL", figures={"device": "cuda"},
         pattern=_S(r"Failed to CUDA calloc (?:async )?(?P<wanted_bytes>\d+) bytes", re.IGNORECASE),
         cause="The GPU had no {wanted_bytes} left for NCCL, which allocates beside torch's pool."),
    Sign(kind="gpu-library-out-of-memory", resource="gpu", hints=(b"_STATUS_",), level=VAGUE, certainty="likely", gate=ERROR,
         pattern=_S(r"(?P<library>CUBLAS|CUDNN)_STATUS_(?P<status>ALLOC_FAILED|NOT_INITIALIZED|INTERNAL_ERROR_DEVICE_ALLOCATION_FAILED)"), figures={"device": "cuda"},
         cause="{library} could not allocate what it needs ({status}), as happens on a full GPU. The message has no figures."),
    Sign(kind="gpu-library-out-of-memory", resource="gpu", hints=(b"_STATUS_", b"nable to find an engine"), level=VAGUE, certainty="possible", gate=ERROR,
         pattern=_S(r"cuDNN error: (?P<status>CUDNN_STATUS_NOT_SUPPORTED)|(?:GET was )?[Uu]nable to find an engine to execute this computation"), figures={"device": "cuda"},
         cause="cuDNN found no algorithm for a convolution. Either no workspace fits on a full GPU, or this dtype or layout is not supported."),
    Sign(kind="no-batch-fits", resource="gpu", hints=(b"No executable batch size found",), level=VAGUE, gate=ERROR,
         pattern=_S("No executable batch size found, reached zero"), cause=_NO_ROW_FITS),
    Sign(kind="no-batch-fits", resource="gpu", hints=(b"process even 1 sample",), gate=MEMORY,
         pattern=_S("not have enough memory to process even 1 sample"), cause=_NO_ROW_FITS),
    Sign(kind="kernel-shared-memory", resource="gpu", hints=(b"out of resource: ",), gate=ERROR, read=_triton, cause="",
         pattern=_S(r"out of resource: [\w ]+?,? ?Required: (?P<_needed>\d+),? ?Hardware limit: ?(?P<_limit>\d+)")),
    # ---- Host memory
    Sign(kind="host-out-of-memory", resource="host", hints=(b"DefaultCPUAllocator",), gate=ERROR,
         pattern=_S(r"DefaultCPUAllocator: (?:can't allocate|not enough) memory: you tried to allocate (?P<wanted_bytes>\d+) bytes"),
         cause="The host ran out of RAM: torch wanted {wanted_bytes} on the CPU.",
         read=lambda match, place: {"wanted": f"{match['wanted_bytes']} bytes", "exact": True, "phase": phase_of(place),
                                    "cause": f"The host ran out of RAM: torch wanted {show_bytes(int(match['wanted_bytes']))} on the CPU."}),
    Sign(kind="host-out-of-memory", resource="host", hints=(b"Unable to allocate",), gate=ERROR,
         pattern=_S(rf"Unable to allocate (?P<wanted_size>{SIZE}) for an array with shape \((?P<shape>[\d, ]+)\) and data type (?P<dtype>\S+)"),
         cause="The host ran out of RAM: NumPy wanted {wanted_bytes} for an array of shape ({shape}) and type {dtype}."),
    Sign(kind="host-out-of-memory", resource="host", hints=(b"ArrowMemoryError",), gate=ERROR,
         pattern=_S(r"(?:malloc|realloc) of size (?P<wanted_bytes>\d+) failed"), cause="The host ran out of RAM: Arrow wanted {wanted_bytes}."),
    Sign(kind="host-out-of-memory", resource="host", hints=(b"memory allocation of ",), gate=MEMORY,
         pattern=_S(r"^memory allocation of (?P<wanted_bytes>\d+) bytes failed", re.MULTILINE), cause="The host ran out of RAM: a library in Rust wanted {wanted_bytes}."),
    Sign(kind="program-memory-limit", resource="host", hints=(b"Out of Memory Error: ",), gate=ERROR, figures={"program": "duckdb"},
         pattern=_S(rf"Out of Memory Error: [\w ]+ of size (?P<wanted_size>{SIZE}) \((?P<used_size>{SIZE})/(?P<limit_size>{SIZE}) used\)"),
         cause="DuckDB reached the limit on its memory, {limit_bytes}: {wanted_bytes} more were wanted."),
    Sign(kind="program-memory-limit", resource="host", hints=(b"java.lang.OutOfMemoryError",), gate=ERROR, figures={"program": "jvm"},
         pattern=_S("java\\.lang\\.OutOfMemoryError: (?:Java heap space|GC overhead limit exceeded)"),
         cause="A program on the Java VM filled its heap, whose limit is set when it starts. The machine's RAM need not be full."),
    Sign(kind="host-out-of-memory", resource="host", hints=(b"WinError ",), gate=ERROR,
         pattern=_S(r"\[WinError (?:1455|8)\]"), figures={"system": "windows"}, cause="Windows could not commit more memory: RAM and paging file are full."),
    Sign(kind="host-out-of-memory", resource="host", hints=(b"MemoryError", b"Cannot allocate memory"), gate=ERROR, level=VAGUE,
         pattern=_S(r"^[\w.]*(?<!Arrow)(?<!Array)(?<!OutOf)MemoryError\b(?!: Unable to allocate|.*[Cc]uda)|\[Errno 12\] Cannot allocate memory", re.MULTILINE),
         cause="The host ran out of RAM; the message has no figures."),
    Sign(kind="host-out-of-memory", resource="host", hints=(b"bad_alloc",), level=VAGUE,
         pattern=_S(r"std::bad_alloc(?!.*[Cc]uda)"), cause="The host ran out of RAM; the message has no figures."),
    Sign(kind="host-out-of-memory", resource="host", hints=(b"fork: Cannot allocate memory", b"C error: out of memory"), gate=MEMORY, level=VAGUE,
         pattern=_S(r"fork: Cannot allocate memory|C error: out of memory"), cause="The host ran out of RAM; the message has no figures."),
    Sign(kind="host-out-of-memory", resource="host", hints=(b"unable to mmap ",), gate=ERROR, level=VAGUE, certainty="likely",
         pattern=_S(r"unable to mmap \d+ bytes from file <(?!/torch_)[^>]*>: Cannot allocate"),
         cause="The host could not map more memory: RAM or the number of mappings of a process (vm.max_map_count) ran out."),
    Sign(kind="host-out-of-memory", resource="host", hints=(b"OUT_OF_HOST_MEMORY",), gate=ERROR, level=VAGUE,
         pattern=_S(r"OUT_OF_HOST_MEMORY"), cause="The host ran out of RAM; the message has no figures."),
    Sign(kind="host-killed", resource="host", hints=(b"Killed process",), gate=KILLED, read=_kernel_kill, cause="",
         pattern=_S(r"\bKilled process (?P<pid>\d+),? \((?P<process>.+?)\)(?=[ ,]|$)(?:,? UID[: ]\d+,)?(?: total-vm:(?P<virtual_kb>[\d,]+)kB, anon-rss:(?P<process_kb>[\d,]+)kB)?")),
    Sign(kind="host-killed", resource="host", hints=(b"oom_kill event", b"oom-kill event"), gate=ERROR,
         pattern=_S(r"Detected \d+ oom[-_]kill event"), cause="Slurm's job used more RAM than it asked for, and the kernel killed a process of it."),
    Sign(kind="host-killed", resource="host", hints=(b"Out Of Memory",), gate=ERROR, pattern=_S(r"srun: error: \S+ tasks? [\d,-]+: Out Of Memory"),
         cause="Slurm's job used more RAM than it asked for, and the kernel killed a process of it."),
    Sign(kind="host-killed", resource="host", hints=(b"xceeded",), gate=ERROR,
         pattern=_S(r"Exceeded job memory limit|exceeded memory limit \((?P<used>\d+) > (?P<limit>\d+)\)"),
         cause="Slurm's job used more RAM than it asked for, and Slurm killed it."),
    Sign(kind="host-killed", resource="host", hints=(b"TERM_MEMLIMIT", b"PBS: job killed: "), gate=KILLED, figures={"by": "scheduler"},
         pattern=_S(r"TERM_MEMLIMIT: job killed|PBS: job killed: (?:mem|vmem|ngpus|cpu_mem) (?P<used_kb>\d+)kb exceeded limit (?P<limit_kb>\d+)kb"),
         cause="The job used more RAM than it asked for, and its scheduler killed it."),
    Sign(kind="host-killed", resource="host", hints=(b"low on resource: memory",), gate=MEMORY, figures={"by": "kubelet"},
         pattern=_S(r"node was low on resource: memory(?:.*?Container \S+ was using (?P<process_kb>\d+)Ki)?"),
         cause="Kubernetes evicted the pod, because its node had almost no RAM left."),
    Sign(kind="host-killed", resource="host", hints=(b"ran out-of-memory",), gate=MEMORY, figures={"by": "Vertex AI"},
         pattern=_S(r"The replica \S+ ran out-of-memory"), cause="Vertex AI ended the job, because one of its machines ran out of RAM."),
    Sign(kind="host-killed", resource="host", hints=(b"memory budget. Restarting",), gate=MEMORY, figures={"by": "Dask"},
         pattern=_S(r"exceeded \d+% memory budget\. Restarting"), cause="Dask restarted a worker, because it used almost all of the RAM that it may use."),
    Sign(kind="host-killed", resource="host", hints=(b"by the OOM killer",), gate=KILLED,
         pattern=_S(r"A process of this unit has been killed by the OOM killer"), cause="The kernel killed a process of a systemd service, because RAM ran out: the machine's, or what the service may use."),
    Sign(kind="host-killed", resource="host", hints=(b"OOMKilled",), gate=KILLED, pattern=_S(r"\"OOMKilled\":\s*true|OOMKilled"),
         cause="The container used more RAM than its limit, and the kernel killed it (OOMKilled)."),
    Sign(kind="host-killed", resource="host", hints=(b"systemd-oomd",), gate=KILLED, pattern=_S(r"systemd-oomd(?:\[\d+\]: Killed| killed)"),
         cause="systemd-oomd killed the process, because RAM was under pressure for too long."),
    Sign(kind="host-killed", resource="host", hints=(b"earlyoom",), gate=MEMORY, pattern=_S(r"earlyoom.*sending SIG(?:TERM|KILL) to process (?P<pid>\d+).*?\"(?P<process>[^\"]+)\""),
         cause="earlyoom killed process {pid} ({process}), because almost no RAM was left."),
    Sign(kind="host-killed", resource="host", hints=(b"tried to allocate more memory than is available", b"using all available RAM"), gate=b"vailable",
         pattern=_S(r"tried to allocate more memory than is available|crashed after using all available RAM"),
         cause="The notebook used all the RAM of its machine, and was restarted."),
    Sign(kind="host-killed", resource="host", hints=(b"running low on memory",), gate=MEMORY,
         pattern=_S(rf"due to the node running low on memory.*?was (?:running was )?(?P<used_size>{SIZE}) / (?P<total_size>{SIZE})", re.DOTALL),
         cause="Ray killed a worker, because the machine used {used_bytes} of its {total_bytes} of RAM."),
    Sign(kind="host-killed", resource="host", hints=(b"is killed by signal",), level=VAGUE, certainty="likely", gate=ERROR, read=_worker,
         pattern=_S(r"DataLoader worker \(pid (?P<pid>\d+)\) is killed by signal: (?P<signal>[A-Z][\w ]+)"),
         cause="A DataLoader worker was killed, most likely by the kernel because the host ran out of RAM."),
    Sign(kind="worker-lost", resource="host", hints=(b"exited unexpectedly",), level=VAGUE, certainty="possible", gate=ERROR,
         pattern=_S(r"DataLoader worker \(pid\(s\) (?P<pids>[\d, ]+)\) exited unexpectedly"),
         cause="A DataLoader worker ended without a message. A crash in the dataset, a full /dev/shm and a kill for lack of RAM all look like this."),
    Sign(kind="host-killed", resource="host", hints=(b"exitcode", b"xit code", b"xit Code:", b"xit status", b"with code", b"return code"), gate=b"xit", level=VAGUE, certainty="likely", read=_exit,
         pattern=_S(r"(?:exitcode\s*:|[Ee]xit (?:[Cc]ode|status)\b:?|exited with code|[Rr]eturn code|returncode)\s*[=:]?\s*\(?(?P<_code>-?\d+)\b"),
         cause="A process was killed (SIGKILL), most likely by the kernel because the host ran out of RAM."),
    Sign(kind="crashed", resource="none", hints=(b"0xC0000005", b"0xC0000409"), gate=b"xit", level=VAGUE, certainty="likely",
         pattern=_S(r"exit code -?\d+ \((?P<signal>0xC000(?:0005|0409))\)"),
         cause="A process crashed ({signal}). That is a fault in compiled code, not memory that ran out."),
    Sign(kind="host-killed", resource="host", hints=(b"SIGKILL", b" by SIG", "被 SIG".encode()), gate=b"SIG", level=VAGUE, certainty="likely", read=_signalled,
         pattern=_S(r"died with <Signals\.SIGKILL: 9>|Signal 9 \(SIGKILL\) received|terminated with signal SIGKILL|signal 9: SIGKILL|terminated by signal SIGKILL"
                    r"|was killed by (?P<_signal>SIG[A-Z]+)|被 (?P<_signal_zh>SIG[A-Z]+) 杀死"),
         cause="A process was killed (SIGKILL), most likely by the kernel because the host ran out of RAM."),
    Sign(kind="host-killed", resource="host", hints=(b"Killed", b"killed", *_foreign(_KILLED_WORDS)), gate=KILLED, level=VAGUE, certainty="likely",
         pattern=_S(_shell_says(_KILLED_WORDS), re.MULTILINE), figures={"signal": "SIGKILL"},
         cause="A process was killed (SIGKILL), most likely by the kernel because the host ran out of RAM."),
    Sign(kind="host-killed", resource="host", hints=(b"KernelRestarter", b"ernel died", b"have died", b"DeadKernel", b"KernelDied", b"Kernel crashed", b"Kernel Restarting"), gate=b"ernel", level=VAGUE, certainty="possible",
         pattern=_S(r"AsyncIOLoopKernelRestarter: restarting kernel|[Kk]ernel (?:appears to have )?died|DeadKernelError|KernelDied|The Kernel crashed while executing|Kernel Restarting"),
         cause="The notebook's kernel died. It leaves no message; most often the kernel of the machine killed it because RAM ran out."),
    Sign(kind="map-process-lost", resource="host", hints=(b"has abruptly died during map",), level=VAGUE, certainty="likely", pattern=_S(r"subprocesses has abruptly died during map operation"),
         cause="A process of datasets.map ended without a message, most likely killed by the kernel because the host ran out of RAM."),
    # ---- Serving beside a training
    Sign(kind="vllm-no-room", resource="gpu", hints=(b"memory on device (", b"for the cache blocks", b"max seq len ("), gate=ERROR, read=_vllm, cause="",
         pattern=_S(r"Free memory on device \((?P<_free>[\d.]+)/(?P<_total>[\d.]+) GiB\) on startup is less than desired GPU memory utilization"
                    r"|No available memory for the cache blocks"
                    r"|max seq len \((?P<_asked>\d+)\),?\s+(?:\(?(?P<_needed>[\d.]+)\s+GiB\s+KV\s+cache\s+is\s+needed,\s+which\s+is\s+larger\s+than\s+the\s+available\s+KV\s+cache\s+memory\s+\(-?(?P<_room>[\d.]+)\s+GiB\)"
                    r"|is larger than the maximum number of tokens that can be stored in KV cache)(?:[^(]*?estimated\s+maximum\s+model\s+length\s+is\s+|\s+\()?(?P<_longest>\d+)?")),
    Sign(kind="sglang-no-room", resource="gpu", hints=(b"mem-fraction-static",), gate=MEMORY,
         pattern=_S(r"Not enough memory\. Please try to increase --mem-fraction-static.*?mem_fraction_static=(?P<share>[\d.]+)"), figures={"device": "cuda"},
         cause="The weights take all of SGLang's share of the GPU ({share}), so there is no room for its cache."),
    # ---- Shared memory, files, disk
    Sign(kind="disk-full", resource="disk", hints=(b"low on resource: ephemeral-storage",), gate=b"torage", figures={"writing": "file"},
         pattern=_S(r"node was low on resource: ephemeral-storage"), cause="Kubernetes evicted the pod, because the disk of its node (ephemeral storage) was almost full."),
    Sign(kind="disk-full", resource="disk", hints=(b"of EmptyDir volume",), gate=b"xceeds", read=_volume, figures={"writing": "file"},
         pattern=_S(r"Usage of EmptyDir volume \"(?P<volume>[^\"]+)\" exceeds the limit \"(?P<limit>[^\"]+)\""),
         cause="The volume {volume} grew beyond its limit of {limit}, so Kubernetes evicted the pod."),
    Sign(kind="shm-full", resource="shm", hints=(b"insufficient shared memory",), gate=ERROR, pattern=_S(r"insufficient shared memory \(shm\)"),
         cause="A DataLoader worker got a bus error, because /dev/shm is full: workers hand over their batches in it."),
    Sign(kind="shm-full", resource="shm", hints=(b"us error", *_foreign(_BUS_ERROR_WORDS)), gate=ERROR, level=VAGUE, certainty="likely",
         pattern=_S(rf"{_shell_says(_BUS_ERROR_WORDS)}|Bus error\s+\(core dumped\)", re.MULTILINE),
         cause="A process ended with SIGBUS, as it does when /dev/shm is full."),
    Sign(kind="crashed", resource="none", hints=(b"egmentation fault", *_foreign(_CRASHED_WORDS)), gate=b"fault", level=VAGUE, figures={"signal": "Segmentation fault"},
         pattern=_S(rf"{_shell_says(_CRASHED_WORDS)}|Segmentation fault\s+\(core dumped\)", re.MULTILINE),
         cause="A process crashed ({signal}). That is a fault in compiled code, not memory that ran out."),
    Sign(kind="shm-full", resource="shm", hints=(b"/torch_",), gate=ERROR,
         pattern=_S(r"unable to (?:write to|open|resize|mmap \d+ bytes from) (?:shared memory object|file) </?torch_[^>]*>(?P<_why>[^\n]*)"), cause="/dev/shm is full. Processes hand over batches and tensors in it.",
         read=lambda match, place: ({"kind": "too-many-files", "resource": "files", "cause": "Too many files are open: every tensor that a worker hands over takes one."}
                                    if "Too many open files" in match["_why"] else {"kind": "host-out-of-memory", "resource": "host", "certainty": "likely", "cause": "The host could not map more memory: RAM or the number of mappings of a process (vm.max_map_count) ran out."}
                                    if "Cannot allocate" in match["_why"] else {"certainty": "certain" if "No space" in match["_why"] else "likely"})),
    Sign(kind="shm-full", resource="shm", hints=(b"/dev/shm/nccl-", b"shared memory segment nccl"), gate=b"NCCL", read=lambda match, place: _nccl_shm(match), cause="",
         pattern=_S(r"Error while (?P<_doing>creating|attaching to) shared memory segment (?P<path>\S*nccl-\S*) \(size (?P<_size>\d+)\)")),
    Sign(kind="too-many-files", resource="files", hints=(b"Too many open files", b"items of ancdata"), gate=ERROR,
         pattern=_S(r"Too many open files|received 0 items of ancdata"), cause="Too many files are open: every tensor that a worker hands over takes one."),
    Sign(kind="disk-full", resource="disk", hints=(b"No space left on device",), read=_space, cause="", pattern=_S("No space left on device")),
    Sign(kind="disk-full", resource="disk", hints=(b"xceeded",), gate=ERROR, pattern=_S(r"Disk quota exceeded|\[Errno 122\]"),
         cause="The disk quota of this user or folder is used up."),
    Sign(kind="disk-full", resource="disk", hints=(b"unexpected pos", b"PytorchStreamWriter failed"), gate=ERROR, level=VAGUE, certainty="likely",
         pattern=_S(r"unexpected pos \d+ vs \d+|PytorchStreamWriter failed writing file"),
         cause="torch.save could not write all of a checkpoint, most likely because the disk or the quota is full. The file is damaged."),
    Sign(kind="disk-full", resource="disk", hints=(b"write(): fd",), gate=ERROR, level=VAGUE, certainty="possible", pattern=_S(r"write\(\): fd \d+ failed with"),
         cause="torch.save could not write all of a checkpoint, most likely because the disk or the quota is full. The file is damaged."),
    # ---- Not memory: GPU faults, drivers, hardware
    Sign(kind="gpu-fault", resource="none", hints=(b"CUDA error", b"HIP error"), read=_assertion, cause="", pattern=_S("device-side assert triggered"), gate=ERROR),
    Sign(kind="gpu-fault", resource="none", hints=(b"CUDA error", b"HIP error"), gate=ERROR,
         pattern=_S(r"(?P<what>illegal memory access|misaligned address|unspecified launch failure)"),
         cause="A kernel on the GPU touched memory it must not ({what}). This is a fault in code, not memory that ran out."),
    Sign(kind="gpu-fault", resource="none", hints=(b"emory access fault by GPU",), gate=MEMORY, pattern=_S(r"(?P<what>[Mm]emory access fault by GPU)"),
         cause="A kernel on the GPU touched memory it must not ({what}). This is a fault in code, not memory that ran out."),
    Sign(kind="gpu-fault", resource="none", hints=(b"_STATUS_",), gate=ERROR, level=VAGUE, certainty="likely",
         pattern=_S(r"(?P<what>CU(?:BLAS|DNN)_STATUS_EXECUTION_FAILED)"),
         cause="A kernel on the GPU failed ({what}), often after an index out of range. This is not memory that ran out."),
    Sign(kind="gpu-hardware", resource="none", hints=(b"NVRM: Xid",),
         pattern=_S(r"NVRM: Xid \([^)]*\): (?P<xid>(?!13\b|31\b|43\b|45\b)\d+)"),
         cause="The driver reports a fault of the GPU itself. This is not memory that ran out."),
    Sign(kind="gpu-hardware", resource="none", hints=(b"CUDA error", b"HIP error"), gate=ERROR, pattern=_S("uncorrectable ECC error"),
         cause="The driver reports a fault of the GPU itself. This is not memory that ran out."),
    Sign(kind="driver", resource="none", hints=(b"CUDA error", b"CUDA driver version", b"Driver/library version mismatch"), gate=ERROR,
         pattern=_S(r"CUDA driver version is insufficient for CUDA runtime version|Driver/library version mismatch"),
         cause="The NVIDIA driver does not match this build of torch. This is not about memory."),
    Sign(kind="driver", resource="none", hints=(b"driver on your system is too old",),
         pattern=_S(r"NVIDIA driver on your system is too old(?: \(found version (?P<found>\d+)\))?"),
         cause="The NVIDIA driver does not match this build of torch. This is not about memory."),
    Sign(kind="driver", resource="none", hints=(b"CUDA error", b"HIP error", b"is not compatible with the current PyTorch"), gate=ERROR,
         pattern=_S(r"no kernel image is available for execution on the device|is not compatible with the current PyTorch installation"),
         cause="This build of torch has no code for this GPU. This is not about memory."),
    Sign(kind="missing-gpu", resource="none", hints=(b"CUDA error", b"HIP error"), gate=ERROR, pattern=_S("invalid device ordinal"),
         cause="A process asks for a GPU that is not there: fewer cards are visible than processes were started."),
    Sign(kind="driver", resource="none", hints=(b"not compiled with CUDA", b"no NVIDIA driver", b"No CUDA GPUs are available"), gate=ERROR,
         pattern=_S(r"Torch not compiled with CUDA enabled|Found no NVIDIA driver on your system|No CUDA GPUs are available"),
         cause="torch sees no GPU: the build has no CUDA, there is no driver, or CUDA_VISIBLE_DEVICES hides the cards. This is not about memory."),
    # ---- Several processes
    Sign(kind="nccl-duplicate-gpu", resource="none", hints=(b"Duplicate GPU detected",), gate=b"NCCL",
         pattern=_S(r"Duplicate GPU detected : rank (?P<first>\d+) and rank (?P<second>\d+) both on CUDA device"),
         cause="Ranks {first} and {second} use the same GPU."),
    Sign(kind="nccl-timeout", resource="network", hints=(b"Watchdog caught collective", b"operations have failed or timed out"), gate=b"NCCL", level=CONSEQUENCE,
         pattern=_S(r"Watchdog caught collective operation timeout: \w+\((?:[^)]*?OpType=(?P<operation>\w+))?[^)]*?Timeout\(ms\)=(?P<timeout_ms>\d+)|Some NCCL operations have failed or timed out"),
         cause="Ranks waited for each other until NCCL gave up. One rank is slower, has ended, or runs another collective."),
    Sign(kind="nccl-peer-lost", resource="network", hints=(b"ncclRemoteError", b" by peer"), gate=ERROR, level=CONSEQUENCE,
         pattern=_S(r"ncclRemoteError|\[[^\]]*gloo[^\]]*\] Connection (?:closed|reset) by peer|Connection reset by peer.*(?:TCPStore|ProcessGroup)|(?:TCPStore|ProcessGroup).*Connection reset by peer"),
         cause="A rank lost its connection to another one. That rank ended first, or the network failed."),
    Sign(kind="nccl-peer-lost", resource="network", hints=(b"Connection closed by remote peer",), gate=b"NCCL", level=CONSEQUENCE,
         pattern=_S(r"NCCL WARN.*Connection closed by remote peer"), cause="A rank lost its connection to another one. That rank ended first, or the network failed."),
    Sign(kind="nccl-error", resource="network", hints=(b"unhandled system error", b"ncclSystemError", b"ncclUnhandled", b"ncclInternalError", b"ncclInvalidUsage"), gate=b"NCCL", level=CONSEQUENCE, certainty="likely",
         pattern=_S(r"(?P<status>ncclSystemError|ncclUnhandledSystemError|unhandled system error|ncclInternalError|ncclUnhandledCudaError|ncclInvalidUsage)"),
         cause="NCCL failed ({status}). Its own log, with NCCL_DEBUG=INFO, names the system call."),
    Sign(kind="nccl-peer-lost", resource="network", hints=(b"retrieving ncclUniqueId", b"communicator was aborted"), gate=b"NCCL", level=CONSEQUENCE,
         pattern=_S(r"retrieving ncclUniqueId from \[\d+\] via c10d key-value store|NCCL communicator was aborted on rank \d+"),
         cause="A rank lost its connection to another one. That rank ended first, or the network failed."),
    Sign(kind="download-failed", resource="network", hints=(b"couldn't connect to 'http",), gate=ERROR, read=_hub,
         pattern=_S(r"couldn't connect to 'https?://"), cause="A download from the hub failed, because this machine could not reach it."),
    Sign(kind="download-failed", resource="network", hints=(b"HTTPSConnectionPool(host=", b"Failed to resolve '", b"cached snapshot folder", b"httpx.Conn"), gate=b"hugging", read=_hub,
         pattern=_S(rf"(?:HTTPSConnectionPool\(host=|Failed to resolve )'[\w.-]*{_HUB}'|Cannot find an appropriate cached snapshot folder|^httpx\.Connect(?:Error|Timeout)"),
         cause="A download from the hub failed, because this machine could not reach it."),
    Sign(kind="download-refused", resource="none", hints=(b"gated repo", b"Client Error", b"Not Found for url", b"valid model identifier"), gate=b"hugging", read=_hub,
         pattern=_S(rf"(?:trying to access|Cannot access) (?:a )?gated repo|Repository Not Found for url: |is not a valid model identifier listed on 'https?://"
                    rf"|40[134] Client Error: \w[\w ]* for url: https?://[\w.-]*{_HUB}"),
         cause="The hub refuses the download: its terms have to be accepted, the token is missing, or the name is wrong."),
    Sign(kind="connection", resource="network", hints=(b"ddress already in use",), gate=ERROR,
         pattern=_S(r"[Aa]ddress already in use"), cause="The port for the processes to meet is taken, often by a run that has not ended."),
    Sign(kind="connection", resource="network", hints=(b"client socket has ", b"waiting for clients", b"Rendezvous"), gate=ERROR, level=VAGUE,
         pattern=_S(r"client socket has (?:timed out|failed to connect)|Timed out after \d+ seconds waiting for clients|Rendezvous(?:Timeout|Connection)Error"),
         cause="The processes could not reach the one they meet at (MASTER_ADDR and MASTER_PORT)."),
    # ---- Stopped on purpose
    Sign(kind="time-limit", resource="none", hints=(b"DUE TO TIME LIMIT",), gate=ERROR, pattern=_S("DUE TO TIME LIMIT"),
         cause="Slurm ended the job at its time limit. This is not about memory."),
    Sign(kind="time-limit", resource="none", hints=(b"TERM_RUNLIMIT", b"PBS: job killed: walltime"), gate=KILLED, pattern=_S("TERM_RUNLIMIT: job killed|PBS: job killed: walltime"),
         cause="The scheduler ended the job at its time limit. This is not about memory."),
    Sign(kind="stopped", resource="none", hints=(b"KeyboardInterrupt", b"got signal: 15"), gate=TRACEBACK, level=CONSEQUENCE,
         pattern=_S(r"^KeyboardInterrupt|Process \d+ got signal: 15", re.MULTILINE),
         cause="The run was stopped: by Ctrl-C, by a scheduler, or by its launcher."),
    Sign(kind="stopped", resource="none", hints=(b"DUE TO PREEMPTION",), gate=ERROR, level=CONSEQUENCE, pattern=_S("DUE TO PREEMPTION"),
         cause="The run was stopped: by Ctrl-C, by a scheduler, or by its launcher."),
    # ---- What is missing
    Sign(kind="missing-package", resource="none", hints=(b"bitsandbytes",), gate=ERROR, figures={"package": "bitsandbytes"},
         pattern=_S(r"quantization requires (?:the latest version of )?bitsandbytes|No package metadata was found for bitsandbytes|compiled without GPU support|CUDA Setup failed despite (?:GPU|CUDA) being available|No module named 'bitsandbytes'"),
         cause="bitsandbytes is missing, too old, or has no library for this CUDA version. This is not about memory."),
    Sign(kind="missing-package", resource="none", hints=(b"No module named",), gate=ERROR,
         pattern=_S(r"^(?:\w+\.)?(?:ModuleNotFound|Import)Error: No module named '?(?P<package>[\w.]+)'?", re.MULTILINE), cause="The Python package {package} is not installed here."),
    Sign(kind="missing-package", resource="none", hints=(b"seems to be not installed", b"not found in your environment: "), gate=ERROR,
         pattern=_S(r"(?:the package (?=\w+ seems to be not installed)|not found in your environment: )(?P<package>\w+)"), cause="The Python package {package} is not installed here."),
    # ---- What does not end a run
    Sign(kind="nan-loss", resource="none", hints=(b"nan", b"NaN"), level=SYMPTOM, read=_nan,
         pattern=_S(r"(?i:['\"]?\b(?:train[_/ ]?|eval[_/ ]?|val[_/ ]?|total[_/ ]?)?loss\b['\"]?\s*(?:[:=]|is|was)?\s*(?:tensor\()?\s*nan\b|['\"]?\bgrad_norm['\"]?\s*[:=]\s*nan\b|['\"]loss_is['\"]: ['\"]nan)"),
         cause="The loss or the gradient is NaN."),
    Sign(kind="nan-loss", resource="none", hints=(b"loss scale",), gate=TRACEBACK, level=SYMPTOM, figures={"precision": "fp16"},
         pattern=_S(r"loss scale already at minimum|Minimum loss scale reached"), cause="The loss scale of fp16 fell to its minimum: every step overflowed, so the gradient is inf or NaN."),
)  # fmt: skip


def _nccl_shm(match: re.Match[str]) -> dict[str, Any]:
    size = int(match["_size"])
    figures = {"wanted_bytes": size}
    if size == 0 or match["_doing"] == "attaching to":
        cause = "NCCL could not use its shared memory, likely because of its probe for host memory (cuMem): /dev/shm need not be full."
        return {"kind": "nccl-shm", "certainty": "likely", "figures": figures, "cause": cause}
    return {
        "figures": figures,
        "cause": f"NCCL got no {show_bytes(size)} in /dev/shm, which the processes of one machine share.",
    }


LOOKED_FOR = (
    "out-of-memory messages of torch (CUDA, ROCm, MPS, XPU, CPU), cuBLAS, cuDNN, NCCL, TensorFlow and JAX",
    "kills by the kernel, a container, Slurm, Ray or systemd-oomd, and exit codes such as 137 and -9",
    "a full /dev/shm, a full disk, too many open files",
    "NCCL failures, faults of a GPU or a driver, missing packages, downloads that failed, NaN losses",
)
"""What is told to a user whose log has none of it."""


def literals() -> dict[bytes, tuple[bytes, ...]]:
    """By gate: what `log_reader.scan` searches for."""
    gates: dict[bytes, dict[bytes, None]] = {}
    for sign in SIGNS:
        for hint in sign.hints:
            # The first byte of a character outside ASCII is the rarest thing to ask for: most logs have none but those of progress bars.
            lead = next((bytes([byte]) for byte in hint if byte >= 0x80), sign.gate)
            gates.setdefault(lead, {})[hint] = None
    return {gate: tuple(hints) for gate, hints in gates.items()}
