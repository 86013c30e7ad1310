"""``sinkhorn``: choices from a transport plan that gives every token and every expert the same share."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar, Literal

from attrs import field, frozen
from attrs.validators import ge

import moefw
from moefw.core.plugin import RouterPlugin
from moefw.core.site import Site


@frozen(kw_only=True)
class Sinkhorn(RouterPlugin):
    """Scales the scores of a micro-batch until experts share its tokens evenly, and chooses by the result.

    Ranks of cp and tp that share a micro-batch gather its logits, and each computes the same plan of all tokens.
    Weights come from the unscaled scores: the sigmoid (top_k 1), or the softmax over all experts at the chosen ones.
    Sinkhorn balances without an auxiliary loss.
    """

    name: ClassVar[str] = "sinkhorn"

    max_rounds: int = field(default=100, validator=ge(1))
    """Most rounds of scaling. It stops earlier if it has converged, which the host checks once per round."""
    z_loss: float = field(default=0.0, validator=ge(0.0))
    """Coefficient of a z-loss on the logits (arXiv 2202.08906)."""
    dtype: Literal["fp32", "fp64"] = "fp32"
    """Dtype of the gating GEMM and of the plan."""

    def offers(self, site: Site) -> moefw.Offers:
        """Partition: routing looks at all tokens of a micro-batch together."""
        return moefw.offers(partition=("micro_batch",))

    def check(self, site: Site) -> Sequence[moefw.Problem]:
        """Problem unless K experts exist."""
        k = site.dims.top_k
        experts = site.dims.num_experts
        if 1 <= k <= experts:
            return ()
        fix = f"Use model.top_k between 1 and {experts}."
        return [moefw.Problem(f"top_k {k} of {experts} experts cannot be chosen.", fix)]

    def build(self, context: moefw.BuildContext) -> moefw.Router:
        """Router of one layer."""
        from moefw.plugins.routers.sinkhorn.router import SinkhornRouter
        from moefw.runtime.parallel.shared_tokens import token_groups

        return SinkhornRouter(
            context.site,
            max_rounds=self.max_rounds,
            z_loss=self.z_loss,
            dtype=self.dtype,
            groups=token_groups(context),
        )


@moefw.hookimpl
def moefw_routers() -> list[type[RouterPlugin]]:
    """Declare the router."""
    return [Sinkhorn]
