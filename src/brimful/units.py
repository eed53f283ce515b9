"""Parses, checks and prints sizes, durations and counts.

Inside the package everything is in bytes and seconds; GiB appears only here and on screens. `20GiB` is 20 × 2³⁰ bytes and
`20GB` is 20 × 10⁹. A number without a unit is in bytes.
"""

import math
import re
from typing import Literal

from brimful.errors import BadOption

Zone = Literal["safe", "edge", "danger"]
EDGE, DANGER = 0.85, 0.90
"""Up to 85 % of a memory limit is safe, up to 90 % on the edge, above that in danger."""

NOTHING = "(nothing)"
"""How an empty text is shown."""
KiB, MiB, GiB, TiB = 2**10, 2**20, 2**30, 2**40

_UNITS = {
    "": 1, "b": 1,
    "k": 2**10, "m": 2**20, "g": 2**30, "t": 2**40,
    "kib": 2**10, "mib": 2**20, "gib": 2**30, "tib": 2**40,
    "kb": 10**3, "mb": 10**6, "gb": 10**9, "tb": 10**12,
}  # fmt: skip
_SIZE = re.compile(r"\s*(\d+(?:\.\d+)?)\s*([a-z]*)\s*", re.IGNORECASE)


def parse_bytes(text: str | int | float, *, flag: str = "size") -> int:
    """The bytes of `"20GiB"`, `"512 MiB"`, `"1.5g"` or a plain number. `flag` is what an error names."""
    match = _SIZE.fullmatch(str(int(text)) if isinstance(text, (int, float)) and math.isfinite(text) else str(text))
    if match is None or match[2].lower() not in _UNITS:
        raise BadOption(f"{flag}: {text!r} is not a size. Try: 20GiB, 512MiB or 2000000000.")
    value = int(float(match[1]) * _UNITS[match[2].lower()])
    if value <= 0:
        raise BadOption(f"{flag}: {text!r} must be greater than 0. Try: 20GiB.")
    return value


def show_bytes(value: int | float | None) -> str:
    """At most four significant figures: `19.97 GiB`, `512 MiB`, `0 B`; `unknown` for None."""
    if value is None:
        return "unknown"
    for size, unit in ((TiB, "TiB"), (GiB, "GiB"), (MiB, "MiB"), (KiB, "KiB")):
        if abs(value) >= size:
            return f"{_trim(value / size)} {unit}"
    return f"{int(value)} B"


def show_count(count: int, what: str) -> str:
    """`1 step`, `2,000 steps`."""
    return f"{count:,} {what}{'s' * (count != 1)}"


def flag_bytes(value: float) -> str:
    """Rounded up and without a space, as the value of a flag: `16.96MiB`."""
    size, unit = next(((size, unit) for size, unit in ((GiB, "GiB"), (MiB, "MiB")) if value >= size), (KiB, "KiB"))
    return f"{math.ceil(100 * value / size) / 100:g}{unit}"


def show_rows(rows: int) -> str:
    """`1 row`, `8 rows`."""
    return f"{rows} row{'s' * (rows != 1)}"


def show_seconds(value: float | None) -> str:
    """`4.2 ms`, `0.42 s`, `12.5 s`, `3 min 20 s`, `2 h 5 min`; `unknown` for None."""
    if value is None:
        return "unknown"
    if 0 < value < 0.0995:
        return f"{1000 * value:.2g} ms"
    if value == 0:
        return "0 s"
    if value < 1:
        return f"{value:.2f} s"
    if value < 60:
        return f"{value:.1f} s"
    minutes, seconds = divmod(round(value), 60)
    if minutes < 60:
        return f"{minutes} min {seconds} s"
    return f"{minutes // 60} h {minutes % 60} min"


def show_rate(value: float | None) -> str:
    """Three significant figures, such as rows per second; `unknown` for None."""
    if value is None:
        return "unknown"
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def zone(used: float) -> Zone:
    """The zone of this share of a memory limit, by reserved bytes where they are known, else by allocated ones."""
    return "safe" if used <= EDGE else "edge" if used <= DANGER else "danger"


def is_whole(value: object, least: int) -> bool:
    """Whether it is an integer of at least `least`. True and False are not."""
    return isinstance(value, int) and not isinstance(value, bool) and value >= least


def is_number(value: object) -> bool:
    """Whether it is a finite number. True and False are not."""
    return isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)


def _trim(value: float) -> str:
    digits = 2 if abs(value) < 100 else 1 if abs(value) < 1000 else 0
    text = f"{value:.{digits}f}"
    return text.rstrip("0").rstrip(".") if "." in text else text
