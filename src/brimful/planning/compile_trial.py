"""Whether the blocks of a model are compiled: what it costs, what it gains, and whether the run is long enough for it."""

import hashlib
import os
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from brimful.errors import BadOption, BrimfulError, in_one_line
from brimful.files import write_atomic
from brimful.memory.layout import PACKED
from brimful.packing.compiled import code_folder
from brimful.planning.levers import EVERY
from brimful.planning.plan import Setting
from brimful.planning.plan_time import now
from brimful.units import show_rows, show_seconds

if TYPE_CHECKING:
    from brimful.planning.micro_batch import Search

COMPILED_ROWS = 64
"""Rows of the mean length with which blocks are compiled and timed, if as many fit."""
ROOM_FOR_ROWS = 0.8
"""They may take this share of the budget beside weights, gradients and optimizer state: no probe has run yet."""
COMPILE_S, COMPILE_SAVES = 30.0, 0.3
"""What compiling takes on an H200 when nothing of it is on disk yet, and the least share of the time that it saves there.
Runs too short to win that back are not compiled unless requested."""
LOAD_S = 10.0
"""Assumed of code that is on disk, until it was measured: tracing and loading it."""
SLOWER = 1.1
"""Compiled blocks keep less for backward, so they are also used where they are about as fast; not if they take longer than this."""


def wants_compiled(search: "Search") -> tuple[bool, str]:
    """Whether blocks are compiled, and why. They are by then, if so."""
    requested, compiler = search.options.compile, search.compiler
    if requested == "on" and not compiler.available:
        why = compiler.reason.removeprefix("not available: ")
        raise BadOption(f'compile="on" is not possible: {why}. Try: compile="auto".')
    if requested == "off" or not compiler.available:
        return False, "as requested" if requested == "off" else compiler.reason
    if requested == "auto" and not (search.context.layout is PACKED and search.target.has_kernels):
        if search.context.layout is PACKED and search.target.device.type != "cpu":
            return False, search.target.why_no_kernels
        return False, "only packed steps on a GPU are compiled unless requested"
    started = now()
    try:
        return _try(search)
    finally:
        search.started += now() - started  # not counted as planning


def _try(search: "Search") -> tuple[bool, str]:
    rows = min(COMPILED_ROWS, search.most, _rows_that_fit(search))
    if rows or not search.lever.available:
        return _time(search, max(1, rows), search.setting)
    with search.lever.set(EVERY["on"]):  # not even one row fits without checkpointing
        return _time(search, 1, replace(search.setting, checkpointing="on"))


def _rows_that_fit(search: "Search") -> int:
    """Without checkpointing, as predicted from the first rows."""
    prober = search.prober
    if not prober.token_bytes:  # of a device that does not count peaks
        prober.learn_token_bytes(min(2, search.most), search.short)
    if not prober.token_bytes:
        return COMPILED_ROWS
    room = search.target.budget_bytes - prober.fixed_bytes - prober.gradient_bytes
    return max(0, int(ROOM_FOR_ROWS * room / (prober.token_bytes * max(1, sum(search.shape)))))


def _time(search: "Search", rows: int, plain: Setting) -> tuple[bool, str]:
    requested, compiler = search.options.compile, search.compiler
    marker = _marker(search, plain)
    on_disk = _load_seconds(marker)
    plain_s = search.timed(rows, plain)
    while plain_s is None and rows > 1:  # the prediction from the first rows was wrong
        rows //= 4
        plain_s = search.timed(max(1, rows), plain)
    rows = max(1, rows)
    micro_batches = None if search.steps is None else search.steps * search.most / rows
    if requested == "auto" and plain_s is not None and micro_batches is not None:
        run_s, cost_s = micro_batches * plain_s, COMPILE_S if on_disk is None else on_disk
        if COMPILE_SAVES * run_s < cost_s:
            loaded = "" if on_disk is None else " with its code on disk"
            return False, f"the run takes about {show_seconds(run_s)} without it, and compiling {cost_s:.0f} s{loaded}"
    search.prober.show(f"compile blocks ({compiler.reason})")
    setting, started = replace(plain, compile="on"), now()
    try:
        with compiler.set(True):
            first_s = search.timed(max(1, rows // 2), setting)  # a second size, so that sizes stay open
            compiled_s = search.timed(rows, setting)
    except Exception as error:
        if requested == "on":
            raise BadOption(f'compile="on" failed: {in_one_line(error)}. Try: compile="off".') from error
        return False, f"failed: {in_one_line(error)}"
    if first_s is None or compiled_s is None:
        return False, "ran out of memory"
    took_s = now() - started
    _mark(marker, LOAD_S if on_disk is None else took_s)
    took = f"took {show_seconds(took_s)}"
    if plain_s is None:
        return True, f"{took}; {compiler.reason}"
    gain = f"{show_rows(rows)} in {1000 * compiled_s:.0f} ms instead of {1000 * plain_s:.0f}"
    if requested == "auto" and compiled_s > SLOWER * plain_s:
        return False, f"it would be slower: {gain}; {took}"
    saved_s = 0.0 if micro_batches is None else micro_batches * (plain_s - compiled_s)
    saves = f", saves about {show_seconds(saved_s)}" if saved_s > 0 else ""
    return True, f"{gain}; {took}{saves}"


def _marker(search: "Search", plain: Setting) -> Path:
    """The file, beside torch's compiled code and deleted with it, that says that blocks of this model have been compiled so. Where
    the model's code has changed since, the trial takes as long as without it, and that is what it says afterwards."""
    context = search.context
    params = sorted({(str(param.dtype), param.requires_grad) for param in context.params})
    parts = (
        torch.__version__,
        search.target.name,
        repr(context.model),
        params,
        plain.layout,
        plain.precision,
        plain.checkpointing,
    )
    return code_folder() / f"brimful-{hashlib.sha256(repr(parts).encode()).hexdigest()[:32]}"


def _load_seconds(marker: Path) -> float | None:
    """What such a trial takes with the code on disk; None if it is not there."""
    if os.environ.get("TORCHINDUCTOR_FORCE_DISABLE_CACHES") == "1":
        return None
    try:
        return float(marker.read_text())
    except (OSError, ValueError):
        return None


def _mark(marker: Path, load_s: float) -> None:
    with suppress(OSError, BrimfulError):  # it only spares a later plan a guess
        marker.parent.mkdir(parents=True, exist_ok=True)
        write_atomic(marker, f"{load_s:.3f}")
