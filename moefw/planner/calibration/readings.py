"""Readings: the median of repeats, and how far it can be trusted."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from statistics import median
from typing import Final

from attrs import frozen

REPEATS: Final = 20
LEAST: Final = 4
"""Repeats of a measurement that takes long: two for each half."""
LIMIT_S: Final = 4.0
"""Seconds after which a measurement is not repeated any more."""


@frozen(kw_only=True)
class Reading:
    """The median of ``repeats``, in the unit of its figure.

    ``spread``: the A/A spread, a share of the median. Every second repeat is A, the others are A as well: nothing was
    changed, so the difference of both medians is what noise alone does to a figure.
    """

    value: float
    spread: float
    repeats: int


def reading(seconds: Callable[[], float], *, figure: Callable[[float], float], repeats: int) -> Reading:
    """Reading of what takes ``seconds()``, whose first call warms up. ``figure``: what seconds are in its unit.

    Ends early, after ``LEAST`` repeats, once they took ``LIMIT_S``.
    """
    seconds()
    begun = time.perf_counter()
    times: list[float] = []
    while len(times) < repeats and (len(times) < LEAST or time.perf_counter() - begun < LIMIT_S):
        times.append(seconds())
    return reading_of(times, figure=figure)


def reading_of(times: Sequence[float], *, figure: Callable[[float], float]) -> Reading:
    """Reading of two or more times in seconds."""
    middle = median(times)
    spread = abs(median(times[::2]) - median(times[1::2])) / middle
    return Reading(value=figure(middle), spread=spread, repeats=len(times))


def of_all_ranks(readings: Sequence[Reading]) -> Reading:
    """Reading of several ranks that have measured at once: their median, with the largest spread of one of them."""
    return Reading(
        value=median(each.value for each in readings),
        spread=max(each.spread for each in readings),
        repeats=min(each.repeats for each in readings),
    )


def of_moments(readings: Sequence[Reading]) -> Reading:
    """Reading of several moments: their median, with the largest spread, within one of them or from one to another."""
    values = [each.value for each in readings]
    middle = median(values)
    between = (max(values) - min(values)) / middle
    return Reading(
        value=middle,
        spread=max(between, *(each.spread for each in readings)),
        repeats=sum(each.repeats for each in readings),
    )
