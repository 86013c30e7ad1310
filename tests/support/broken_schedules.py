"""Learning-rate schedules that break their contract in one way each."""

from __future__ import annotations

import itertools
from typing import Any, ClassVar

from attrs import Factory, field, frozen

import moefw
from moefw.core.plugin import SchedulePlugin


@frozen
class Sound(SchedulePlugin):
    """Falls in a line: right in every way. Those below change it."""

    name: ClassVar[str] = "sound"

    def factor(self, step: int, steps: int) -> float:
        return 1 - step / steps


@frozen
class KnowsNoEnd(Sound):
    name: ClassVar[str] = "knows-no-end"

    def factor(self, step: int) -> float:  # type: ignore[override]
        return 1 / (1 + step)


@frozen
class MisspellsItsOffer(Sound):
    name: ClassVar[str] = "misspells-its-offer"

    def offers(self, site: moefw.Site) -> moefw.Offers:
        return moefw.offers(rows=("raged",))


@frozen
class BeginsAgainAtItsEnd(Sound):
    name: ClassVar[str] = "begins-again-at-its-end"

    def factor(self, step: int, steps: int) -> float:
        return 1 - step % max(1, steps - 1) / steps


@frozen
class EndsBelowZero(Sound):
    name: ClassVar[str] = "ends-below-zero"

    def factor(self, step: int, steps: int) -> float:
        return 1 - 2 * step / steps


@frozen
class DividesByZero(Sound):
    name: ClassVar[str] = "divides-by-zero"

    def factor(self, step: int, steps: int) -> float:
        return step / (steps - 1)


@frozen
class IsNoNumber(Sound):
    name: ClassVar[str] = "is-no-number"

    def factor(self, step: int, steps: int) -> float:
        return float("nan") if step == 2 else 1.0


@frozen
class SaysYes(Sound):
    name: ClassVar[str] = "says-yes"

    def factor(self, step: int, steps: int) -> float:
        return step < steps


@frozen
class NeverLearns(Sound):
    name: ClassVar[str] = "never-learns"

    def factor(self, step: int, steps: int) -> float:
        return 0.0


@frozen
class CountsCalls(Sound):
    name: ClassVar[str] = "counts-calls"
    calls: Any = field(default=Factory(itertools.count), init=False, eq=False)

    def factor(self, step: int, steps: int) -> float:
        return 1 / (1 + next(self.calls))
