"""Checks of a dispatcher's declaration, before anything moves."""

from __future__ import annotations

import pickle
import subprocess
import sys
from pathlib import Path

import pytest

from moefw.system.python import python
from moefw.testing.profiles import smoke
from moefw.testing.suites.dispatch_case import DispatchCase
from moefw.testing.suites.dispatch_run import DispatcherRunner, RefusedError, fail
from moefw.testing.suites.part import OfferChecks


class DeclarationChecks(DispatcherRunner, OfferChecks):
    """Checks that the declaration is pure and imports no torch."""

    @smoke
    def test_it_can_be_built_and_its_declaration_is_pure(self) -> None:
        """Options resolve on some world; offers and needs are the same on each call."""
        refusals = []
        for world in self.profile.worlds:
            # A plugin may refuse numbers of experts that do not fit its ranks: try two.
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

    @smoke
    def test_its_methods_take_and_return_what_the_contract_says(self) -> None:
        """The arguments of each method, and what a dispatch and a combine return. No other check runs before that."""
        try:
            wrong = self.misfits
        except RefusedError as refusal:
            pytest.skip(f"{self.plugin.name} refuses: {refusal}")
        if wrong:
            fail("\n".join(f"{self.plugin.name}: {sentence}" for sentence in wrong))

    @smoke
    def test_its_offers_are_values_that_parts_may_need(self) -> None:
        """As of any plugin; here the profile ``smoke`` has it, too."""
        wrong = self._misspelt_offers()
        if wrong:
            fail(wrong)

    def test_the_declaration_imports_no_torch(self) -> None:
        """``check``, ``plugins`` and ``--help`` import it, and they must be fast."""
        module = sys.modules[self.plugin.__module__]
        file = Path(getattr(module, "__file__", None) or "")
        if file.name.startswith("test_") or file.name.endswith("_test.py") or module.__name__ == "__main__":
            pytest.skip(f"{self.plugin.name} is declared in a test file")
        path = [entry for entry in sys.path if entry]
        code = f"import sys; sys.path[:0] = {path!r}; import {module.__name__}; print('torch' in sys.modules)"
        imported = subprocess.run(python("-c", code), capture_output=True, text=True, timeout=60, check=False)
        if imported.returncode:
            pytest.skip(f"{module.__name__} cannot be imported on its own")
        if "True" in imported.stdout:
            fail(f"{self.plugin.name}: importing {module.__name__} imports torch: import it inside build().")
