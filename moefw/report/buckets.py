"""Curves of a run in a bounded number of buckets of steps, made while its lines stream by."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from operator import add
from typing import Any, Final, final

import numpy as np

MOST_BUCKETS: Final = 800
"""A picture is about as many pixels wide."""
MOST_NAMED: Final = 8
"""Number of steps without a finite value that a curve remembers."""


@dataclass(slots=True, eq=False)
class Curve:
    """One number of a step over the run: least, most and mean of each bucket, and its extremes with their steps.

    A bucket without a finite value has a ``count`` of 0, and ``least`` above ``most``.
    """

    least: list[float] = field(default_factory=lambda: [math.inf] * MOST_BUCKETS)
    most: list[float] = field(default_factory=lambda: [-math.inf] * MOST_BUCKETS)
    total: list[float] = field(default_factory=lambda: [0.0] * MOST_BUCKETS)
    count: list[int] = field(default_factory=lambda: [0] * MOST_BUCKETS)
    last: float = math.nan
    last_step: int = 0
    lowest: tuple[float, int] = (math.inf, 0)
    highest: tuple[float, int] = (-math.inf, 0)
    num_missing: int = 0
    missing: list[int] = field(default_factory=list)
    """The first steps whose value is not finite."""

    @property
    def num_values(self) -> int:
        """Number of finite values."""
        return sum(self.count)

    @property
    def mean(self) -> float:
        """Mean of all finite values; NaN for none."""
        return sum(self.total) / self.num_values if self.num_values else math.nan

    def add(self, bucket: int, step: int, value: float | None) -> None:
        """Add the value of a step; None or a number that is not finite is counted as missing."""
        if value is None or not math.isfinite(value):
            self.num_missing += 1
            if len(self.missing) < MOST_NAMED:
                self.missing.append(step)
            return
        if value < self.least[bucket]:
            self.least[bucket] = value
        if value > self.most[bucket]:
            self.most[bucket] = value
        self.total[bucket] += value
        self.count[bucket] += 1
        self.last = value
        self.last_step = step
        if value < self.lowest[0]:
            self.lowest = (value, step)
        if value > self.highest[0]:
            self.highest = (value, step)

    def merge_neighbours(self) -> None:
        """Merge each two buckets into one, in the first half."""
        half = MOST_BUCKETS // 2
        self.least = [*map(min, self.least[::2], self.least[1::2]), *[math.inf] * half]
        self.most = [*map(max, self.most[::2], self.most[1::2]), *[-math.inf] * half]
        self.total = [*map(add, self.total[::2], self.total[1::2]), *[0.0] * half]
        self.count = [*map(add, self.count[::2], self.count[1::2]), *[0] * half]


@final
class Buckets:
    """Curves by name over the same buckets of steps. Steps are added in ascending order.

    A bucket is one step wide until there are more steps than ``MOST_BUCKETS``; then neighbours are merged and buckets
    are twice as wide. Least and most are kept, so that a spike of one step stays visible.
    """

    def __init__(self) -> None:
        self.curves: dict[str, Curve] = {}
        self.first_step = 0
        self.last_step = 0
        self.num_steps = 0
        self.width = 1

    def add(self, step: int, values: Mapping[str, float | None]) -> None:
        """Add a step."""
        if not self.num_steps:
            self.first_step = step
        self.num_steps += 1
        self.last_step = step
        while (step - self.first_step) // self.width >= MOST_BUCKETS:
            self.width *= 2
            for curve in self.curves.values():
                curve.merge_neighbours()
        bucket = (step - self.first_step) // self.width
        for name, value in values.items():
            if name not in self.curves:
                self.curves[name] = Curve()
            self.curves[name].add(bucket, step, value)

    @property
    def size(self) -> int:
        """Number of buckets up to the last step."""
        return (self.last_step - self.first_step) // self.width + 1 if self.num_steps else 0

    def get(self, name: str) -> Curve | None:
        """Curve with at least one finite value, or None."""
        curve = self.curves.get(name)
        return curve if curve is not None and curve.num_values else None

    def names(self, prefix: str) -> list[str]:
        """Names that begin with ``prefix`` and have a finite value, in the order in which they appeared."""
        return [name for name in self.curves if name.startswith(prefix) and self.get(name)]

    def columns(self, name: str) -> dict[str, np.ndarray[Any, np.dtype[np.float32]]]:
        """Curve for a picture: ``mean``, and ``least`` and ``most`` if buckets are wider than a step. NaN is a gap."""
        curve = self.curves[name]
        count = np.array(curve.count[: self.size])
        columns = {"mean": np.array(curve.total[: self.size]) / np.maximum(count, 1)}
        if self.width > 1:
            columns |= {"least": np.array(curve.least[: self.size]), "most": np.array(curve.most[: self.size])}
        return {key: np.where(count > 0, values, np.nan).astype(np.float32) for key, values in columns.items()}
