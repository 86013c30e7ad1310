"""``forced``: a perfectly even load, independent of the scores, for benchmarks."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

from attrs import frozen

import moefw
from moefw.core.plugin import RouterPlugin
from moefw.core.site import Site


@frozen(kw_only=True)
class Forced(RouterPlugin):
    """Sends choice k of token t of a micro-batch to expert ``(t*K + k) mod E``: for measuring speed, not for learning.

    Weights are the softmax over the chosen logits, so that gradients flow.
    """

    name: ClassVar[str] = "forced"

    known_counts: bool = True
    """Whether all ranks have the same number of tokens in training, as under the trainer.

    Counts are then known beforehand and not exchanged, unless ranks of cp and tp share a micro-batch and cut it where
    experts have not had equally many turns.
    """

    def offers(self, site: Site) -> moefw.Offers:
        """Partition: a token's experts depend on its position in the micro-batch."""
        return moefw.offers(partition=("micro_batch",), replays=moefw.ANY)

    def check(self, site: Site) -> Sequence[moefw.Problem]:
        """Problem unless K different experts exist."""
        k = site.dims.top_k
        experts = site.dims.num_experts
        if 1 <= k <= experts:
            return ()
        fix = f"Use model.top_k between 1 and {experts}."
        return [moefw.Problem(f"top_k {k} of {experts} experts cannot be chosen.", fix)]

    def build(self, context: moefw.BuildContext) -> moefw.Router:
        """Router of one layer."""
        from moefw.plugins.routers.forced.router import ForcedRouter
        from moefw.runtime.parallel.shared_tokens import token_groups

        return ForcedRouter(context.site, known_counts=self.known_counts, groups=token_groups(context))


@moefw.hookimpl
def moefw_routers() -> list[type[RouterPlugin]]:
    """Declare the router."""
    return [Forced]
