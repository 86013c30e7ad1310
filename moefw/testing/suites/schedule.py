"""The contract of learning-rate schedules: ``class TestMine(ScheduleSuite): plugin = Mine``."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from numbers import Real
from typing import Any, ClassVar, Final

import pytest

from moefw.testing.suites.part import MethodChecks

MOST_JUMP: Final = 10.0
"""How many times as much the last step may change the factor as any other one."""
NO_JUMP: Final = 1e-2
"""A change of the factor that is none to speak of."""


class ScheduleSuite(MethodChecks):
    """Tests a schedule against its contract."""

    steps: ClassVar[Sequence[int]] = (1, 2, 3, 10, 100, 1000)
    """Lengths of runs that are tried, in steps."""

    def test_a_factor_is_a_finite_number_from_0_on(self) -> None:
        """The learning rate is multiplied by it."""
        for length in self.steps:
            for step, factor in enumerate(self._factors(length)):
                is_number = isinstance(factor, Real) and not isinstance(factor, bool)
                right = is_number and math.isfinite(factor) and factor >= 0
                says = f"{self.plugin.name}: the factor of step {step} of {length} is {factor!r}"
                assert right, f"{says}, which is no finite number from 0 on."

    def test_a_run_learns(self) -> None:
        """In the longest one, some step has a learning rate above zero."""
        length = max(self.steps)
        learns = any(factor > 0 for factor in self._factors(length))
        assert learns, f"{self.plugin.name}: the factor is 0 in each of {length} steps."

    def test_its_last_step_goes_on_as_those_before(self) -> None:
        """In the longest run, it does not jump where no other step jumps: the last step is ``steps - 1``."""
        length = max(self.steps)
        if length < 3:
            pytest.skip(f"{self.plugin.name} is tried in runs of {length} steps, of which none is before the last")
        factors = [float(factor) for factor in self._factors(length)]
        *jumps, last = (abs(after - before) for before, after in itertools.pairwise(factors))
        path = f"from {factors[-2]:.3g} to {factors[-1]:.3g}"
        says = f"{self.plugin.name}: the factor goes {path} in the last step of {length}"
        assert last <= MOST_JUMP * max(jumps) + NO_JUMP, f"{says}; before it, no step changes it by {last:.3g}."

    def test_a_factor_depends_on_the_step_alone(self) -> None:
        """A run that resumes asks a new part, from the middle on."""
        for length in self.steps:
            factors = list(self._factors(length))
            schedule = self.part
            for step in reversed(range(length)):
                again = schedule.factor(step, length)
                says = f"{self.plugin.name}: the factor of step {step} of {length} is {factors[step]!r}"
                assert again == factors[step], f"{says}, and {again!r} if the later steps were asked for before."

    def _factors(self, length: int) -> Iterator[Any]:
        """Yield the factors of a run as it asks for them."""
        schedule = self.part
        for step in range(length):
            try:
                yield schedule.factor(step, length)
            except Exception as error:
                what = f"{self.plugin.name}: step {step} of {length} raises {type(error).__name__}: {error}."
                raise AssertionError(what) from error
