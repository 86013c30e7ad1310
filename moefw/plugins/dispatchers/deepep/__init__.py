"""``deepep``: one row per (token, destination rank), expanded on arrival, reduced before it returns."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, ClassVar

from attrs import frozen

import moefw
from moefw.core.plugin import DispatcherPlugin
from moefw.core.site import Site
from moefw.plugins.dispatchers.deepep.limits import INSTALL, PACKAGE, Shape, limits
from moefw.plugins.dispatchers.library_option import CallsLibrary

if TYPE_CHECKING:
    from moefw.core.context import ExpertGroup


@frozen(kw_only=True)
class DeepEP(CallsLibrary):
    """Sends a token once to each rank that holds some of its experts: 1.5 times fewer bytes than alltoall at EP 8.

    ``backend`` torch: the algorithm over any process group; library: the ``deep_ep`` package, on GPUs.
    ``max_tokens``: the most tokens that a rank ever sends at once. It sizes the library's ``ElasticBuffer``, which
    is used where ``Buffer`` does not support the layer.
    """

    name: ClassVar[str] = "deepep"
    package: ClassVar[str] = PACKAGE
    install: ClassVar[str] = INSTALL
    packs: ClassVar[bool] = True

    def limits(self, site: Site) -> Sequence[moefw.Problem]:
        """Return a problem if neither buffer supports the layer."""
        sizes = site.layout.sizes
        return limits(Shape.of(site.dims, ep=sizes["ep"], etp=sizes["etp"]), max_tokens=self.max_tokens)

    def among(self, experts: ExpertGroup, context: moefw.BuildContext) -> moefw.Dispatcher:
        """Return the dispatcher of this process.

        Raises PlanError where the library is missing or does not support the layer.
        """
        if self.backend == "library":
            from moefw.plugins.dispatchers.deepep.library import build

            return build(experts, context, codec=self.codec(context), max_tokens=self.max_tokens)
        from moefw.plugins.dispatchers.deepep.torch_backend import TorchDeepEP

        return TorchDeepEP(experts, **self.settled(context))


@moefw.hookimpl
def moefw_dispatchers() -> list[type[DispatcherPlugin]]:
    """Declare the dispatcher."""
    return [DeepEP]
