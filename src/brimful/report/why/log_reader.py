"""`brimful.diagnose`: what went wrong in a training log, of any trainer, and what helps.

The log is read once, each place that may matter is recognised (`log_signs`), and of all that was found the cause is told from its
consequences: messages close to each other belong to one incident, the last incident is the one that ended the run, and in it the first
message that names a cause wins over timeouts and kills that follow from it.

A log of 2 GB must not take 2 GB. It is read in pieces of 1 MiB, and each piece is searched for a few dozen literals with `bytes.find`,
which does 3–5 GB/s for a literal of ten bytes; regular expressions only see the lines around a hit. Many literals stand only in messages
with `rror`, so they are searched for only where a piece has that: a log of progress bars is read at 160 MB/s in 22 MB of memory, one with
the words error, memory and exit in every line at 56 MB/s (one core of a busy server).

Logs are dirty: progress bars end lines with a carriage return, colours are escape codes, PowerShell writes UTF-16, Chinese systems
write GB18030, a truncated file is full of NUL bytes. What is kept is clean text.
"""

import codecs
import gzip
import io
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, fields, replace
from numbers import Integral
from pathlib import Path
from typing import Any, BinaryIO

from brimful.errors import BadData, BadOption
from brimful.report.why.diagnosis import Certainty, Diagnosis, fix
from brimful.report.why.gpu_messages import (
    PHASE_WORDS,
    Block,
    Settings,
    bounds,
    learning_rate,
    likely_blocks,
    read_settings,
)
from brimful.report.why.gpu_remedies import oversized_state
from brimful.report.why.log_signs import (
    ANYWHERE,
    LOOKED_FOR,
    ROOT,
    SIGNS,
    SYMPTOM,
    TRACEBACK,
    VAGUE,
    Finding,
    Place,
    is_quoted,
    literals,
)
from brimful.report.why.remedies import remedies
from brimful.units import show_bytes, show_count

# ---- Reading a log of any size -----------------------------------------------------------------------------------------

PIECE_BYTES = 2**20
HEAD_BYTES = 2**19
"""The beginning of a log usually names the settings."""
TAIL_BYTES = 64 * 2**10
BEFORE_BYTES = 12 * 2**10
"""Kept before a hit: the traceback."""
AFTER_BYTES = 4 * 2**10
"""Kept from the line of a hit on: the message, which may go over several lines."""
FIRST_KEPT, LAST_KEPT = 8, 24
"""Places kept per literal. Of a line that repeats a million times, the first and the last ones tell all."""

_ESCAPES = re.compile(rb"\x1b(?:\[[0-?]*[ -/]*[@-~]|\][^\x07\x1b]*(?:\x07|\x1b\\)|[@-Z\\-_])")
_PREFIX = re.compile(
    r"^(?:\[?rank ?\d+\]?:\s?"  # torch, since 2.3
    r"|\[\d+(?:,\d+)?\]<std(?:out|err)>:\s?"  # Horovod
    r"|\(\w+ pid=\d+[^)]*\)\s?"  # Ray
    r"|\d{4}-\d\d-\d\dT[\d:.]+Z? (?:stdout|stderr) [FP] "  # containerd
    r"|[│|] ?(?=\s*\S))",  # the frame that rich draws around a traceback
    re.MULTILINE | re.IGNORECASE,
)
_RANK = re.compile(rb"\[?rank ?(\d+)\]?[:\]]|\[\d+,(\d+)\]<std|\[Rank (\d+)\]", re.IGNORECASE)
_ERROR_LINE = re.compile(
    r"^(?!\s)(?:[A-Za-z_][\w.]*(?:Error|Exception|Interrupt|Exit|Failed|Timeout|Resources)\w*|KeyboardInterrupt)(?::\s?.*)?$",
    re.MULTILINE,
)
_LOGGED_ERROR = re.compile(
    r"^(?!\s*(?:raise|except|File)\b)[^\n]*?(\b[A-Z]\w*(?:Error|Exception): |\b(?:ERROR|FATAL|CRITICAL)\b|^(?:\S+: )?(?:error|Error|错误)[:：])[^\n]*$",
    re.MULTILINE,
)
"""What a logger, a launcher or a shell calls an error."""
_ASCII = bytes(range(128))
_MAGIC = {
    b"PK\x03\x04": "a zip file or a torch checkpoint",
    b"\x80\x02": "a pickle",
    b"\x80\x04": "a pickle",
    b"\x7fELF": "a program",
    b"\x89PNG": "a picture",
    b"\x28\xb5\x2f\xfd": "a zstd file",
    b"BZh": "a bzip2 file",
    b"\xfd7zXZ": "an xz file",
}


@dataclass(slots=True)
class Scan:
    """What is left of a log."""

    size: int = 0
    lines: int = 0
    places: dict[bytes, list[Place]] = field(default_factory=dict)
    """By literal, in order."""
    counts: Counter[bytes] = field(default_factory=Counter)
    head: str = ""
    tail: str = ""
    format: str = "text"
    """`text`, `binary`, or what the first bytes say it is."""

    @property
    def last_error(self) -> str | None:
        """The last line of the last traceback, else the last line at the end of the log that something calls an error."""
        tracebacks = self.places.get(TRACEBACK, [])
        after = max((place.offset for place in tracebacks), default=None)
        texts = [place.text for place in tracebacks if place.offset == after]
        for text in (self.tail, *texts):
            if after is not None and (lines := _ERROR_LINE.findall(text)):
                return str(lines[-1]).strip()[:300]
        errors = [
            match for match in _LOGGED_ERROR.finditer(self.tail)
            if not is_quoted(match.string[match.start() : match.start(1)], match[0])
        ]  # fmt: skip
        if errors and not _goes_on(self.tail[errors[-1].end() :]):
            return errors[-1][0].strip()[:300]
        return None

    def after(self, offset: int) -> str:
        """The end of the log, as far as it comes after this."""
        keep = self.size - offset
        return self.tail if keep >= len(self.tail) else self.tail[-keep:] if keep > 0 else ""


@contextmanager
def open_log(log: str | bytes | Path) -> Iterator[BinaryIO]:
    """A text, its bytes, or the file at a path, which may be gzipped. Raises `BadData` if it cannot be read."""
    if not isinstance(log, (str, bytes, Path)):
        raise BadOption(
            f"a log is a text, bytes or a Path, not {type(log).__name__}. Try: brimful.diagnose(Path(file))."
        )
    if not isinstance(log, Path):
        yield io.BytesIO(log.encode("utf-8", "surrogateescape") if isinstance(log, str) else log)
        return
    with ExitStack() as stack:
        try:
            file: BinaryIO = stack.enter_context(log.open("rb"))
            if file.peek(2)[:2] == b"\x1f\x8b":  # type: ignore[attr-defined]
                file = stack.enter_context(gzip.GzipFile(fileobj=file))  # type: ignore[assignment]
        except OSError as error:
            raise BadData(
                f"{log} cannot be read ({error.strerror or error}). Try: the file of a training log."
            ) from error
        yield file


def scan(stream: BinaryIO, gates: Mapping[bytes, Sequence[bytes]]) -> Scan:
    """Search a log for literals. `gates`: literals by what a piece must hold for them to be searched for.

    Raises `BadData` if reading fails midway.
    """
    result = Scan()
    rest, rest_lines = b"", 0
    """The end of the piece before: context for a hit at the beginning of the next, and hits that are not complete yet."""
    done = 0
    """Hits before this place in `rest + piece` were taken in the round before."""
    head, tail = bytearray(), b""
    pieces = _decoded(stream, result)
    piece = next(pieces, b"")
    while piece:
        following = next(pieces, b"")
        result.size += len(piece)
        if len(head) < HEAD_BYTES:
            head += piece[: HEAD_BYTES - len(head)]
        text = rest + piece
        end = len(text) - AFTER_BYTES if following else len(text)
        if end > done:
            _search(text, done, end, result, result.size - len(text), rest_lines, gates)
            done = end
        tail = text[-TAIL_BYTES:] if len(text) >= TAIL_BYTES else (tail + piece)[-TAIL_BYTES:]
        keep = max(0, len(text) - BEFORE_BYTES - AFTER_BYTES)
        rest_lines += text.count(b"\n", 0, keep)
        rest, done, piece = text[keep:], max(0, done - keep), following
    result.lines = rest_lines + rest.count(b"\n") + bool(rest and not rest.endswith(b"\n"))
    result.head, result.tail = clean(bytes(head)), clean(tail)
    return result


def clean(raw: bytes) -> str:
    """Text without NUL bytes, carriage returns and the prefixes that launchers put before each line."""
    text = raw.replace(b"\0", b"").replace(b"\r\n", b"\n").replace(b"\r", b"\n").decode("utf-8", "replace")
    return _PREFIX.sub("", text)


def _search(
    text: bytes, start: int, end: int, result: Scan, offset: int, lines: int, gates: Mapping[bytes, Sequence[bytes]]
) -> None:
    """Hits from `start` to before `end`; `offset` and `lines` are those of the text's first byte."""
    counted_to, counted = 0, lines
    hits: list[tuple[int, bytes]] = []
    for gate, wanted in gates.items():
        # A gate may stand in the same line before `start`, so the whole text is asked.
        if gate and text.find(gate) < 0:
            continue
        for literal in wanted:
            hits += ((at, literal) for at in _find_few(text, literal, start, end, result))
    for at, literal in sorted(hits):
        begin = max(text.rfind(b"\n", 0, at), text.rfind(b"\r", 0, at)) + 1
        begin = max(begin, at - BEFORE_BYTES // 2)  # a line of megabytes
        counted, counted_to = counted + text.count(b"\n", counted_to, begin), begin
        after = text[begin : max(begin, at) + AFTER_BYTES]
        match = _RANK.search(after[: at - begin + 400].partition(b"\n")[0])
        place = Place(
            offset + begin,
            counted + 1,
            clean(after),
            clean(text[max(0, begin - BEFORE_BYTES) : begin]),
            int(next(group for group in match.groups() if group)) if match else None,
        )
        kept = result.places.setdefault(literal, [])
        if kept and kept[-1].offset == place.offset:
            continue
        kept.append(place)
        if len(kept) > FIRST_KEPT + LAST_KEPT:
            del kept[FIRST_KEPT]


def _find_few(text: bytes, literal: bytes, start: int, end: int, result: Scan) -> list[int]:
    """Where the literal is: all places, or of very many the first and the last ones."""
    found: list[int] = []
    limit = end + len(literal) - 1
    at = text.find(literal, start, limit)
    while at >= 0:
        found.append(at)
        if len(found) > FIRST_KEPT + LAST_KEPT:
            break
        at = text.find(literal, at + len(literal), limit)
    else:
        result.counts[literal] += len(found)
        return found
    result.counts[literal] += text.count(literal, start, limit)
    last: list[int] = []
    at = text.rfind(literal, start, limit)
    while at >= 0 and len(last) < LAST_KEPT:
        last.append(at)
        at = text.rfind(literal, start, at)
    return [*found[:FIRST_KEPT], *(at for at in reversed(last) if at > found[FIRST_KEPT - 1])]


def _decoded(stream: BinaryIO, result: Scan) -> Iterator[bytes]:
    """Pieces as UTF-8 without escape codes."""
    decoder: codecs.IncrementalDecoder | None = None
    escape = b""
    first = True
    try:
        while piece := stream.read(PIECE_BYTES):
            if first:
                first = False
                encoding = _utf16(piece)
                decoder = codecs.getincrementaldecoder(encoding)("replace") if encoding else None
                result.format = "text" if encoding else _format(piece)
            if decoder is not None:
                piece = decoder.decode(piece).encode("utf-8", "replace")
            elif result.format == "text":
                piece = _as_utf8(piece)
            piece = escape + piece
            escape = b""
            if b"\x1b" in piece:
                cut = piece.rfind(b"\x1b", -64)
                if cut >= 0 and not _ESCAPES.match(piece, cut):  # the piece ends within an escape code
                    piece, escape = piece[:cut], piece[cut:]
                piece = _ESCAPES.sub(b"", piece)
            if piece:
                yield piece
    except (OSError, EOFError) as error:
        raise BadData(f"the log cannot be read ({error}). Try: a plain text file.") from error
    if escape:
        yield escape


def _as_utf8(piece: bytes) -> bytes:
    """The same with its lines of GB18030 in UTF-8. A log may have both: a program writes UTF-8, the shell around it does not."""
    begun = next(
        (at for at, byte in enumerate(piece[:4]) if not 0x80 <= byte < 0xC0), 0
    )  # a character of the piece before
    try:
        codecs.utf_8_decode(piece[begun:], "strict", False)
    except UnicodeDecodeError:
        return b"".join(_line_as_utf8(line) for line in piece.splitlines(keepends=True))
    return piece


def _line_as_utf8(line: bytes) -> bytes:
    lost_bytes = len(line) - len(line.decode("utf-8", "ignore").encode())
    if 2 * lost_bytes <= len(
        line.translate(None, _ASCII)
    ):  # a damaged character, such as one that the piece ends within
        return line
    try:
        return line.decode("gb18030").encode()
    except UnicodeDecodeError:
        return line


def _utf16(start: bytes) -> str | None:
    """The encoding if these bytes are UTF-16, with or without a mark; None for anything else."""
    if start.startswith((b"\xff\xfe", b"\xfe\xff")):
        return "utf-16"
    sample = start[: 4 * 2**10]
    if len(sample) < 8:
        return None
    even, odd = sample[::2].count(0) / (len(sample) / 2), sample[1::2].count(0) / (len(sample) / 2)
    return "utf-16-le" if odd > 0.7 and even < 0.1 else "utf-16-be" if even > 0.7 and odd < 0.1 else None


def _format(start: bytes) -> str:
    for magic, name in _MAGIC.items():
        if start.startswith(magic):
            return name
    sample = start[: 64 * 2**10]
    control = sum(sample.count(byte) for byte in range(32) if byte not in (0, 9, 10, 12, 13, 27))
    return "binary" if control > 0.05 * len(sample) else "text"


# ---- What it means -----------------------------------------------------------------------------------------------------

INCIDENT_BYTES = 256 * 2**10
"""Messages closer than this are of one incident: the tracebacks of 30 ranks, one after the other."""
BANNER = b"Instantaneous batch size per device"
"""The Hugging Face Trainer prints its settings here."""
EVIDENCE_CHARS = 240
GOES_ON = 3
"""Lines of progress after a message from which on the run has survived it."""

_EXPLAINS: dict[str, tuple[str, ...]] = {
    "gpu-out-of-memory": ("nccl-", "stopped", "gpu-library", "host-killed", "no-batch-fits", "worker-lost", "crashed", "connection"),
    "gpu-library-out-of-memory": ("nccl-", "stopped", "host-killed", "crashed", "connection"),
    "no-batch-fits": ("gpu-", "nccl-", "stopped"),
    "host-killed": ("nccl-", "stopped", "worker-lost", "crashed", "connection", "host-out-of-memory"),
    "host-out-of-memory": ("nccl-", "stopped", "host-killed", "worker-lost", "crashed", "connection"),
    "shm-full": ("nccl-", "stopped", "host-killed", "worker-lost", "crashed", "connection"),
    "disk-full": ("nccl-", "stopped", "host-killed", "crashed", "connection"),
    "gpu-fault": ("gpu-library", "nccl-", "stopped", "host-killed", "worker-lost", "crashed", "gpu-hardware", "connection"),
    "gpu-hardware": ("gpu-fault", "gpu-library", "nccl-", "stopped", "host-killed", "worker-lost", "crashed", "connection"),
    "nccl-": ("nccl-", "stopped", "host-killed", "crashed", "connection"),
    "crashed": ("nccl-", "stopped", "worker-lost", "connection"),
    "killed": ("nccl-", "stopped", "worker-lost", "connection"),
    "time-limit": ("stopped", "nccl-", "host-killed", "connection"),
    "": ("stopped",),
}  # fmt: skip
"""By the beginning of a kind: what follows from it. Anything but a cause may be followed by a stop."""
_PROGRESS = re.compile(r"\d+/\d+ \[\d+:\d+|['\"]?\bloss['\"]?\s*[:=]\s*\d|\bstep[ :=]+\d+|\b[Ee]poch[ :=]+\d+")
_FINISHED = re.compile(
    r"train_runtime|Training completed|[Tt]raining (?:is )?(?:finished|done)|`Trainer\.fit` stopped: `max_|trained [\d,]+ steps|after training is done|exiting program at iteration|训练(?:已|已经)?(?:完成|结束)"
)


def diagnose(log: str | bytes | Path, *, settings: Mapping[str, Any] | None = None) -> Diagnosis:
    """What went wrong in a training log.

    Args:
        log: Its text, or the path of its file (a `Path`). A file is read in pieces, so it may have any size.
        settings: What the log does not say but you know, to find out what the wanted block was: `micro_batch=`,
            `accumulation=`, `processes=`, `lengths=`, `vocab=`, `heads=`, `hidden=`, `parameters=`.

    Returns:
        The main problem: the cause, not its consequences. `.resource` is what ran out, `.figures` are the numbers of the
        message, `.fixes` what helps, the best first; `.others` are further problems of the same log. If nothing is
        recognised, `.kind` is `unknown`. Without a run nothing is measured, so most savings are ranges (`basis="range"`).

    Raises:
        BadData: The file cannot be read.
        BadOption: `settings` has a name that is not known.

    >>> import brimful
    >>> message = '''torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 1.23 GiB. GPU 0 has a total capacity of 19.58 GiB
    ... of which 1.06 GiB is free. Including non-PyTorch memory, this process has 18.50 GiB memory in use. Of the allocated memory
    ... 14.94 GiB is allocated by PyTorch, and 3.18 GiB is reserved by PyTorch but unallocated.'''
    >>> diagnosis = brimful.diagnose(message, settings={"micro_batch": 32, "lengths": 252, "vocab": 40960})
    >>> diagnosis.resource, diagnosis.kind
    ('gpu', 'gpu-out-of-memory')
    >>> diagnosis.figures["block"]["name"], diagnosis.figures["block"]["factors"]
    ('the fp32 logits', [32, 252, 40960])
    >>> diagnosis.fixes[0].title
    'Set expandable_segments, which lets torch use the memory it has reserved in pieces'
    """
    with open_log(log) as stream:
        return diagnose_stream(stream, settings=settings)


def diagnose_stream(stream: BinaryIO, *, settings: Mapping[str, Any] | None = None) -> Diagnosis:
    """The same for bytes that come from anywhere, such as standard input."""
    known = _plain(settings or {})
    gates = dict(literals())
    gates[ANYWHERE] = (*gates.get(ANYWHERE, ()), BANNER)
    gates[TRACEBACK] = (*gates.get(TRACEBACK, ()), TRACEBACK)
    result = scan(stream, gates)
    findings = sorted(_findings(result), key=lambda finding: finding.place.offset)
    if not findings:
        return _unknown(result)
    return _explain(findings, result, known)


def _findings(result: Scan) -> Iterable[Finding]:
    """What each place means. A line with several signs counts once per kind."""
    seen: dict[tuple[int, str], Finding] = {}
    for sign in SIGNS:
        for hint in sign.hints:
            for place in result.places.get(hint, ()):
                finding = sign.find(place)
                if finding is None:
                    continue
                key = (place.offset, finding.kind)
                if key not in seen or _weight(finding) > _weight(seen[key]):
                    seen[key] = finding
    return seen.values()


def _weight(finding: Finding) -> tuple[int, int]:
    return -finding.level, len(finding.figures)


def _explain(findings: list[Finding], result: Scan, known: Mapping[str, Any]) -> Diagnosis:
    """The last incident's cause, with what followed from it, and the other problems beside it."""
    incidents: list[list[Finding]] = []
    for finding in findings:
        gap = finding.place.offset - incidents[-1][-1].place.offset if incidents else INCIDENT_BYTES
        # A run that went on had survived what came before, so it did not die of that.
        if gap < INCIDENT_BYTES and not (
            finding.level <= VAGUE and _goes_on(finding.place.before[-gap:] if gap else "")
        ):
            incidents[-1].append(finding)
        else:
            incidents.append([finding])
    best = min(min(finding.level for finding in incident) for incident in incidents)
    serious = max(best, VAGUE)
    incident = next(one for one in reversed(incidents) if min(finding.level for finding in one) <= serious)
    main = _main(incident)
    consequences, others = [], dict[str, list[Finding]]()
    for finding in findings:
        if finding.kind == main.kind:
            continue
        if finding in incident and _follows(finding, main):
            consequences.append(finding)
        else:
            others.setdefault(finding.kind, []).append(finding)
    alike = [finding for finding in incident if finding.kind == main.kind]
    diagnosis = _diagnosis(main, alike, consequences, incident, result, known)
    rest = [_main(group) for group in others.values()]
    rest = [one for one in rest if not any(_follows(one, other) for other in rest if other is not one)]
    rest.sort(key=lambda finding: (finding.level, -finding.place.offset))
    return replace(diagnosis, others=tuple(_diagnosis(one, [one], [], [one], result, known) for one in rest))


def _main(findings: list[Finding]) -> Finding:
    """The cause among messages of one incident: the first of the highest level; of its kind the one that says most."""
    first = min(findings, key=lambda finding: (finding.level, finding.place.offset))
    same = [one for one in findings if one.kind == first.kind and one.level == first.level]
    return max(same, key=lambda finding: (len(finding.figures) - ("rank" in finding.figures), -finding.place.offset))


def _follows(finding: Finding, cause: Finding) -> bool:
    if finding.level < cause.level or (finding.level == ROOT and finding.resource in ("host", "disk", "shm")):
        return False
    consequences = next(kinds for start, kinds in _EXPLAINS.items() if cause.kind.startswith(start))
    return finding.kind.startswith(consequences)


def _diagnosis(
    main: Finding,
    alike: list[Finding],
    consequences: list[Finding],
    incident: list[Finding],
    result: Scan,
    known: Mapping[str, Any],
) -> Diagnosis:
    settings = read_settings(_texts(main, result), main.place.offset).updated(known)
    limits = None if main.wanted is None else bounds(main.wanted, allocator=not main.exact)
    blocks = likely_blocks(limits, settings, main.phase)
    figures = dict(main.figures)
    if main.kind == "nan-loss" and (rate := _learning_rate(main.place, result)) is not None:
        figures["learning_rate"] = rate
    ranks = sorted({rank for finding in alike if (rank := finding.figures.get("rank")) is not None})
    if len(ranks) > 1:
        figures["ranks"] = ranks
    if main.phase:
        figures["phase"] = main.phase
    if blocks:
        figures["block"] = blocks[0].to_json()
    if main.level == SYMPTOM:
        figures["lines"] = len({finding.place.offset for finding in alike})
    if consequences:
        figures["consequences"] = sorted({finding.kind for finding in consequences})
    cause, certainty = _cause(main, blocks, consequences, oversized_state(figures, settings)), main.certainty
    last = incident[-1].place
    if main.level != SYMPTOM and _goes_on(result.after(last.offset + len(last.first_line.encode()))):
        certainty = _weaker(certainty)
        cause += " The log goes on after it, so it did not end the run, or the log only quotes it."
    if result.format != "text":
        certainty = "possible"
        cause += " The file is not text, so this may be no message at all."
    place = main.place
    line = re.sub(r"\s+", " ", place.first_line).strip()
    evidence = f"line {place.line:,}: {line[:EVIDENCE_CHARS]}{'…' * (len(line) > EVIDENCE_CHARS)}"
    fixes = remedies(main.kind, figures, settings, block=blocks[0] if blocks else None)
    return Diagnosis(
        resource=main.resource,
        kind=main.kind,
        cause=cause,
        certainty=certainty,
        figures=figures,
        evidence=evidence,
        fixes=fixes,
    )


def _learning_rate(place: Place, result: Scan) -> float | None:
    """That of the steps up to this line, which may be warming up or decaying; what comes after it is of another start."""
    head, line, _ = result.head.partition(place.first_line)
    return learning_rate(head + line if line else f"{result.head}\n{place.before}\n{place.first_line}")


def _cause(main: Finding, blocks: list[Block], consequences: list[Finding], state: str | None) -> str:
    sentences = [main.cause]
    if main.phase:
        sentences.append(f"It happened {PHASE_WORDS[main.phase]}.")
    if blocks:
        shown = show_bytes(main.figures["wanted_bytes"])
        if len({block.kind for block in blocks}) == 1:
            sentences.append(f"The block is likely {blocks[0].name}: {shown} = {blocks[0]}.")
        else:
            sentences.append(f"The block may be {blocks[0].name} ({blocks[0]}) or {blocks[1].name} ({blocks[1]}).")
    if state and main.kind.startswith("gpu-"):
        sentences.append(state)
    if main.figures.get("allocated_bytes", 0) > main.figures.get("total_bytes", float("inf")):
        sentences.append(
            "More is allocated than the card has, so the driver has already moved some of it to host RAM, which is slow."
        )
    if any(finding.kind.startswith("nccl-") for finding in consequences):
        sentences.append("The NCCL errors beside it follow from it.")
    elif any(finding.kind in ("host-killed", "stopped", "connection", "worker-lost") for finding in consequences):
        sentences.append("Other processes were stopped because of it.")
    return " ".join(sentences)


def _texts(main: Finding, result: Scan) -> list[tuple[int, str]]:
    """Where settings may stand: the beginning of the log, the Trainer's banners, and what is right before the message."""
    banners = [
        (place.offset, place.text[:1500]) for place in result.places.get(BANNER, ()) if place.offset > len(result.head)
    ]
    place = main.place
    near = [(place.offset - len(place.before), place.before)] if place.offset > len(result.head) else []
    return [(0, result.head), *banners, *near]


def _plain(known: Mapping[str, Any]) -> dict[str, Any]:
    """Settings as `Settings` has them: several lengths are a tuple, and one is too. Raises `BadOption` for what it cannot have."""
    defaults = {one.name: one.default for one in fields(Settings)}
    if unknown := [name for name in known if name not in defaults]:
        raise BadOption(f"settings= has no {', '.join(map(repr, unknown))}. Try: {', '.join(defaults)}.")
    plain: dict[str, Any] = {}
    for name, value in known.items():
        several = isinstance(defaults[name], tuple)
        numbers = tuple(value) if several and isinstance(value, (list, tuple)) else (value,)
        if value is None or name in ("precision", "optimizer") or isinstance(defaults[name], bool):
            plain[name] = value
        elif all(isinstance(number, Integral) and int(number) > 0 for number in numbers):
            plain[name] = tuple(map(int, numbers)) if several else int(value)
        else:
            raise BadOption(f"settings= has {name}={value!r}, not a positive whole number. Try: {name}=32.")
    if "micro_batch" in plain and "batches" not in plain:
        plain["batches"] = (plain["micro_batch"],)
    return plain


def _goes_on(after: str) -> bool:
    """Whether the run went on, by what its log has after a message."""
    return len(_PROGRESS.findall(after)) >= GOES_ON or bool(_FINISHED.search(after))


def _weaker(certainty: Certainty) -> Certainty:
    return "likely" if certainty == "certain" else "possible"


def _unknown(result: Scan) -> Diagnosis:
    """Nothing was recognised: what was looked for, and the last error there is."""
    if not result.size:
        return Diagnosis(resource="none", kind="empty", cause="The log is empty.", certainty="certain")
    if result.format != "text":
        what = "a binary file" if result.format == "binary" else result.format
        cause = f"This is {what}, not a log: nothing in it was recognised."
        return Diagnosis(resource="none", kind="unknown", cause=cause, certainty="possible")
    error = result.last_error
    cause = f"Nothing was recognised in {show_count(result.lines, 'line')}."
    if error:
        cause += " The last error is below."
    elif _FINISHED.search(result.tail):
        cause += " The run seems to have ended in good order."
    fixes = () if error or _FINISHED.search(result.tail) else (_ASK_THE_KERNEL,)
    figures = {"looked_for": list(LOOKED_FOR), "lines": result.lines}
    return Diagnosis(
        resource="none", kind="unknown", cause=cause, certainty="possible", evidence=error, figures=figures, fixes=fixes
    )


_ASK_THE_KERNEL = fix(
    "If the process vanished without a message, ask the kernel whether it killed it",
    shell="sudo dmesg -T | grep -i 'killed process'",
)
