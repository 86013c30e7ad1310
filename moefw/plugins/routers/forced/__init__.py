"""``forced``: a perfectly even load whatever the scores say, for benchmarks."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

from attrs import frozen

import moefw
from moefw.core.plugin import RouterPlugin
from moefw.core.site import Site


@frozen(kw_only=True)
class Forced(RouterPlugin):
    """Sends token t's choice k to expert ``(t*K + k) mod E``: for measuring speed, not for learning.

    Weights are the softmax over the chosen logits, so that gradients flow. ``known_counts`` says that all ranks bring
    the same number of tokens in training, as the trainer does: counts are then known beforehand and not exchanged.
    """

    name: ClassVar[str] = "forced"

    known_counts: bool = True

    def offers(self, site: Site) -> moefw.Offers:
        """A token's experts depend on its place in the micro-batch."""
        return moefw.offers(partition=("micro_batch",), differentiable=True, deterministic=True)

    def check(self, site: Site) -> Sequence[moefw.Problem]:
        """K different experts must exist."""
        k, experts = site.dims.top_k, site.dims.num_experts
        if 1 <= k <= experts:
            return ()
        fix = f"Use model.top_k between 1 and {experts}."
        return [moefw.Problem(f"top_k {k} of {experts} experts cannot be chosen.", fix)]

    def build(self, context: moefw.BuildContext) -> moefw.Router:
        """Return the router of one layer."""
        from moefw.plugins.routers.forced.router import ForcedRouter

        return ForcedRouter(context.site, self)


@moefw.hookimpl
def moefw_routers() -> list[type[RouterPlugin]]:
    """Declare the router."""
    return [Forced]
