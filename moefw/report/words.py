"""Numbers and names as a reader reads them."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from moefw.report.reading import Run

UNKNOWN = "-"


def number(value: float | None, digits: int = 4) -> str:
    """Number with ``digits`` significant digits, without an exponent where it is readable without."""
    if value is None or not math.isfinite(value):
        return UNKNOWN
    if value == round(value) and abs(value) < 1e15:
        return f"{value:,.0f}"
    if not 1e-4 <= abs(value) < 1e15:
        return f"{value:.{digits - 1}e}"
    decimals = digits - 1 - math.floor(math.log10(abs(value)))
    return f"{value:,.{max(decimals, 0)}f}"


def share(value: float | None) -> str:
    """Share of 1 in per cent."""
    if value is None or not math.isfinite(value):
        return UNKNOWN
    return f"{100 * value:.1f} %"


def count(value: int, noun: str) -> str:
    """Number with its noun, which takes an s: ``1 step``, ``20,000 steps``."""
    return f"{value:,} {noun}" if value == 1 else f"{value:,} {noun}s"


def duration(seconds: float | None) -> str:
    """Time in the two units that fit: ``3 min 24 s``."""
    if seconds is None or not math.isfinite(seconds):
        return UNKNOWN
    if seconds < 1:
        return f"{1e3 * seconds:.3g} ms"
    if seconds < 60:
        return f"{seconds:.3g} s"
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes:02} min" if hours else f"{minutes} min {rest:02} s"


def size(nbytes: float | None) -> str:
    """Bytes in the unit that fits."""
    if nbytes is None or not math.isfinite(nbytes):
        return UNKNOWN
    value = float(nbytes)
    for unit in ("B", "KiB", "MiB"):
        if abs(value) < 1024:
            return f"{value:.4g} {unit}"
        value /= 1024
    return f"{value:,.2f} GiB"


def several(names: Sequence[str]) -> str:
    """Names in a sentence: ``a, b and c``."""
    if len(names) < 2:
        return "".join(names)
    return f"{', '.join(names[:-1])} and {names[-1]}"


def readable(name: str) -> str:
    """Name of a metric without its underscores."""
    return re.sub(r"[_/]+", " ", name).strip()


def by_run(runs: Sequence[Run], sentence: Callable[[Run], str]) -> list[str]:
    """Sentence about each run that has one, with its name if there are several."""
    told = [(run, sentence(run)) for run in runs]
    return [f"{run.name}: {text}" if len(runs) > 1 else text for run, text in told if text]
