"""``deepep``: one row per (token, destination rank), expanded on arrival, reduced before it returns."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, ClassVar

from attrs import frozen

import moefw
from moefw.core.plugin import DispatcherPlugin
from moefw.core.site import Site
from moefw.plugins.dispatchers.deepep.limits import INSTALL, PACKAGE, Shape, grouped_limits, limits
from moefw.plugins.dispatchers.library_option import CallsLibrary

if TYPE_CHECKING:
    from moefw.core.context import ExpertGroup


@frozen(kw_only=True)
class DeepEP(CallsLibrary):
    """Sends a token once to each rank that holds some of its experts: 1.5 times fewer bytes than alltoall at EP 8.

    Its library is the ``deep_ep`` package. ``max_tokens`` sizes the library's ``ElasticBuffer``, which is used where
    ``Buffer`` does not support the layer, and for ``grouped``.
    """

    name: ClassVar[str] = "deepep"
    package: ClassVar[str] = PACKAGE
    install: ClassVar[str] = INSTALL
    packs: ClassVar[bool] = True

    grouped: bool = False
    """Whether the library groups rows by expert as they arrive, in its own order, which differs from run to run."""

    def offers(self, site: Site) -> moefw.Offers:
        """Offers: rows that the library groups come in another order each time."""
        return {**super().offers(site), "repeats": not self.grouped}

    def check(self, site: Site) -> Iterable[moefw.Problem | Iterator[moefw.Problem]]:
        """Also the problem of ``grouped`` without the library."""
        problems = [*super().check(site)]
        if self.grouped and self.backend == "torch":
            problems.append(
                moefw.Problem(
                    "grouped lets the library group rows, in any order; backend: torch groups them itself, in order.",
                    "Leave grouped out, or use backend: library.",
                    "grouped",
                )
            )
        return problems

    def limits(self, site: Site) -> Sequence[moefw.Problem]:
        """Problem if no buffer supports the layer, or not the one that groups rows."""
        sizes = site.layout.sizes
        shape = Shape.of(site.dims, ep=sizes["ep"], etp=sizes["etp"])
        if self.grouped:
            return grouped_limits(shape, max_tokens=self.max_tokens)
        return limits(shape, max_tokens=self.max_tokens)

    def among(self, experts: ExpertGroup, context: moefw.BuildContext) -> moefw.Dispatcher[Any, Any]:
        """Dispatcher of this process.

        Raises PlanError where the library is missing or does not support the layer.
        """
        if self.backend == "library":
            from moefw.plugins.dispatchers.deepep.library import build

            return build(experts, context, codec=self.codec(context), max_tokens=self.max_tokens, grouped=self.grouped)
        from moefw.plugins.dispatchers.deepep.torch_backend import TorchDeepEP

        return TorchDeepEP(experts, **self.settled(context))


@moefw.hookimpl
def moefw_dispatchers() -> list[type[DispatcherPlugin]]:
    """Declare the dispatcher."""
    return [DeepEP]
