"""The contract of a dispatcher: ``class TestRing(DispatcherSuite): plugin = Ring`` certifies one."""

from __future__ import annotations

import pickle
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import strategies as st

from moefw.core.errors import PlanError
from moefw.testing import strategies
from moefw.testing.suites import dispatch_assertions as assertions
from moefw.testing.suites.dispatch_case import DispatchCase
from moefw.testing.suites.dispatch_layer import DRAWN_RTOL, Layer, LayerChecks
from moefw.testing.suites.dispatch_run import FaultError, RefusedError, fail
from moefw.testing.suites.dispatch_state import StateChecks
from moefw.testing.suites.dispatch_static import StaticChecks
from moefw.testing.suites.dispatch_wire import WireChecks


class DispatcherSuite(StateChecks, StaticChecks, WireChecks, LayerChecks):
    """Tests a dispatcher against its contract: set ``plugin``, and ``options`` if some are required.

    The dispatcher's offers decide what is checked. Movements run on ranks that are threads if the dispatcher uses its
    process group only for collectives, else over gloo. Whole layers always run over gloo.
    """

    def test_it_can_be_built_and_its_declaration_is_pure(self) -> None:
        """Options resolve on some world; offers and needs are the same on each call."""
        refusals = []
        for world in self.profile.worlds:
            for case in (DispatchCase(tokens=(1,) * world), DispatchCase(tokens=(1,) * world, num_experts=world * 2)):
                try:
                    site = self.assembly_of(case).site
                except RefusedError as refusal:
                    refusals.append(str(refusal))
                    continue
                part = self.assembly_of(case).parts.dispatch
                for name in ("offers", "needs", "check"):
                    ask = getattr(part, name)
                    if ask(site.at(0)) != ask(site.at(0)):
                        fail(f"{self.plugin.name}: {name}(site) returns something else when it is asked again.")
                if pickle.loads(pickle.dumps(part)) != part:
                    fail(f"{self.plugin.name}: a declaration does not survive pickle, so it cannot go to other ranks.")
                if part != self.assembly_of(case).parts.dispatch or hash(part) != hash(part):
                    fail(f"{self.plugin.name}: two declarations with the same options are not equal.")
        if len(refusals) == 2 * len(self.profile.worlds):
            fail(f"{self.plugin.name} refuses every world of the profile: {refusals[0]}")

    def test_the_declaration_imports_no_torch(self) -> None:
        """``check``, ``plugins`` and ``--help`` import it, and they must be fast."""
        module = sys.modules[self.plugin.__module__]
        file = Path(getattr(module, "__file__", None) or "")
        if file.name.startswith("test_") or file.name.endswith("_test.py") or module.__name__ == "__main__":
            pytest.skip(f"{self.plugin.name} is declared in a test file")
        path = [entry for entry in sys.path if entry]
        code = f"import sys; sys.path[:0] = {path!r}; import {module.__name__}; print('torch' in sys.modules)"
        done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False)
        if done.returncode:
            pytest.skip(f"{module.__name__} cannot be imported on its own")
        if "True" in done.stdout:
            fail(f"{self.plugin.name}: importing {module.__name__} imports torch: import it inside build().")

    def test_drawn_movements_are_right(self) -> None:
        """Random tokens, skews, drops, alignments, dtypes and layouts, on every world."""
        for world in self.profile.worlds:
            self.for_all(self._movement, strategies.cases(world), shrink=self.on_threads)

    def _movement(self, case: DispatchCase) -> None:
        try:
            pairs = self.twice(case)
        except RefusedError:
            return
        except FaultError as crashed:
            fail(f"{self.plugin.name}: {crashed}")
        for ranks in zip(*pairs, strict=True):
            fault = next(filter(None, (one(case, ranks) for one in assertions.ASSERTIONS)), None)
            if fault:
                fail(f"{self.plugin.name}: {fault}. With {case}.")

    def test_drawn_layers_equal_the_oracle(self) -> None:
        """Random whole layers, over gloo."""
        self.for_all(self._layer, st.sampled_from(self.profile.worlds).flatmap(strategies.layers), shrink=False)

    def _layer(self, layer: Layer) -> None:
        try:
            self.hold([layer], rtol=DRAWN_RTOL)
        except (PlanError, pytest.skip.Exception):
            return
