"""`brimful.diagnose`: what went wrong in a training log, of any trainer, and what helps.

The log is scanned once (`log_stream`), each place that may matter is recognised (`log_signs`), and of all that was found the cause
is told from its consequences: messages close to each other belong to one incident, the last incident is the one that ended the
run, and in it the first message that names a cause wins over timeouts and kills that follow from it.
"""

import re
from collections.abc import Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, BinaryIO

from brimful.report.why.diagnosis import Certainty, Diagnosis, Fix
from brimful.report.why.gpu_messages import PHASE_WORDS
from brimful.report.why.log_settings import read_settings
from brimful.report.why.log_signs import LOOKED_FOR, ROOT, SIGNS, SYMPTOM, VAGUE, Finding, literals
from brimful.report.why.log_stream import ANYWHERE, TRACEBACK, Scan, open_log, scan
from brimful.report.why.remedies import remedies
from brimful.report.why.wanted_block import Block, bounds, likely_blocks
from brimful.units import show_bytes, show_count

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
    "no-batch-fits": ("gpu-library", "nccl-", "stopped"),
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
    r"train_runtime|Training completed|[Tt]raining (?:is )?(?:finished|done)|`Trainer\.fit` stopped: `max_|trained [\d,]+ steps"
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
    gates = dict(literals())
    gates[ANYWHERE] = (*gates.get(ANYWHERE, ()), BANNER)
    gates[TRACEBACK] = (*gates.get(TRACEBACK, ()), TRACEBACK)
    result = scan(stream, gates)
    findings = sorted(_findings(result), key=lambda finding: finding.place.offset)
    if not findings:
        return _unknown(result)
    return _explain(findings, result, settings or {})


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
        near = incidents and finding.place.offset - incidents[-1][-1].place.offset < INCIDENT_BYTES
        if near:
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
    settings = read_settings(_texts(main, result), main.place.offset).updated(_plain(known))
    limits = None if main.wanted is None else bounds(main.wanted, allocator=not main.exact)
    blocks = likely_blocks(limits, settings, main.phase)
    figures = dict(main.figures)
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
    cause, certainty = _cause(main, blocks, consequences), main.certainty
    if main.level != SYMPTOM and _goes_on(incident[-1], result):
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


def _cause(main: Finding, blocks: list[Block], consequences: list[Finding]) -> str:
    sentences = [main.cause]
    if main.phase:
        sentences.append(f"It happened {PHASE_WORDS[main.phase]}.")
    if blocks:
        shown = show_bytes(main.figures["wanted_bytes"])
        if len({block.kind for block in blocks}) == 1:
            sentences.append(f"The block is likely {blocks[0].name}: {shown} = {blocks[0]}.")
        else:
            sentences.append(f"The block may be {blocks[0].name} ({blocks[0]}) or {blocks[1].name} ({blocks[1]}).")
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
    """Settings as `Settings` has them: several lengths are a tuple, and one is too."""
    several = ("lengths", "vocab", "heads", "hidden", "feed_forward", "batches")
    plain = {
        name: tuple(value) if isinstance(value, (list, tuple)) else (value,) if name in several and value else value
        for name, value in known.items()
    }
    if "micro_batch" in plain and "batches" not in plain:
        plain["batches"] = (plain["micro_batch"],)
    return plain


def _goes_on(last: Finding, result: Scan) -> bool:
    """Whether the run went on after its last message."""
    end = last.place.offset + len(last.place.first_line.encode())
    after = result.after(end)
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


_ASK_THE_KERNEL = Fix(
    title="If the process vanished without a message, ask the kernel whether it killed it",
    flags={"shell": "sudo dmesg -T | grep -i 'killed process'"},
)
