"""Reads a log of any size in pieces, and keeps only the places that may matter.

A log of 2 GB must not take 2 GB. It is read in pieces of 1 MiB, and each piece is searched for a few dozen literals with
`bytes.find`, which does 3–5 GB/s for a literal of ten bytes; regular expressions only see the lines around a hit. Many literals
stand only in messages with `rror`, so they are searched for only where a piece has that: a log of progress bars is read at 160
MB/s in 22 MB of memory, one with the words error, memory and exit in every line at 56 MB/s (one core of a busy server).

Logs are dirty: progress bars end lines with a carriage return, colours are escape codes, PowerShell writes UTF-16, a truncated
file is full of NUL bytes. What is kept is clean text. Nothing here knows what an error means; see `log_signs`.
"""

import codecs
import gzip
import io
import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import BinaryIO

from brimful.errors import BadData, BadOption

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
TRACEBACK = b"Traceback (most recent call last)"
ANYWHERE = b""
"""The gate of literals that are searched for in every piece."""

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
        """The last line of the last traceback; None if there is none."""
        tracebacks = self.places.get(TRACEBACK, [])
        after = max((place.offset for place in tracebacks), default=None)
        texts = [place.text for place in tracebacks if place.offset == after]
        for text in (self.tail, *texts):
            if after is not None and (lines := _ERROR_LINE.findall(text)):
                return str(lines[-1]).strip()[:300]
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
    for gate, literals in gates.items():
        # A gate may stand in the same line before `start`, so the whole text is asked.
        if gate and text.find(gate) < 0:
            continue
        for literal in literals:
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
