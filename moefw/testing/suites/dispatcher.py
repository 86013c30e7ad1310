"""The contract of a dispatcher: ``class TestRing(DispatcherSuite): plugin = Ring`` certifies one."""

from __future__ import annotations

import pytest
from hypothesis import strategies as st

from moefw.core.errors import PlanError
from moefw.testing import strategies
from moefw.testing.suites import dispatch_assertions as assertions
from moefw.testing.suites.dispatch_case import DispatchCase
from moefw.testing.suites.dispatch_declaration import DeclarationChecks
from moefw.testing.suites.dispatch_layer import DRAWN_RTOL, Layer, LayerChecks
from moefw.testing.suites.dispatch_run import RefusedError, fail
from moefw.testing.suites.dispatch_state import StateChecks
from moefw.testing.suites.dispatch_static import StaticChecks
from moefw.testing.suites.dispatch_wire import WireChecks
from moefw.testing.suites.replay import ReplayChecks


class DispatcherSuite(ReplayChecks, LayerChecks, WireChecks, StaticChecks, StateChecks, DeclarationChecks):
    """Tests a dispatcher against its contract: set ``plugin``, and ``options`` if some are required.

    The dispatcher's offers decide what is checked. Movements run on ranks that are threads if the dispatcher uses its
    process group only for collectives, else over gloo. Whole layers always run over gloo. pytest runs the checks of the
    last base first: the declaration, rows, state, the wire, whole layers, then replayed steps and drawn examples.
    """

    _replay_worlds = (1, 2)

    def test_drawn_movements_are_right(self) -> None:
        """Random tokens, skews, drops, alignments, dtypes and layouts, on every world."""
        for world in self.profile.worlds:
            self.for_all(self._movement, strategies.cases(world), shrink=self.on_threads)

    def _movement(self, case: DispatchCase) -> None:
        def look(case: DispatchCase) -> str | None:
            for ranks in zip(*self.twice(case), strict=True):  # of the first movement, then of the third
                for assertion in assertions.ASSERTIONS:
                    fault = assertion(case, ranks)
                    if fault:
                        return fault
            return None

        try:
            fault = self.fault(case, look)
        except RefusedError:
            return
        if fault:
            fail(f"{self.plugin.name}: {fault}")

    def test_drawn_layers_equal_the_oracle(self) -> None:
        """Random whole layers, over gloo."""
        self.for_all(self._layer, st.sampled_from(self.profile.worlds).flatmap(strategies.layers), shrink=False)

    def _layer(self, layer: Layer) -> None:
        try:
            self.hold([layer], rtol=DRAWN_RTOL)
        except (PlanError, pytest.skip.Exception):
            return
