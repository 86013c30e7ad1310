"""``sinkhorn``: choices from a transport plan that gives every token and every expert the same share."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar, Literal

from attrs import field, frozen
from attrs.validators import ge

import moefw
from moefw.core.plugin import RouterPlugin
from moefw.core.site import Site
from moefw.ledger.parts import FP32, FP64, INT64, PartMemory, RankShape, Region, Tensor, Weight


@frozen(kw_only=True)
class Sinkhorn(RouterPlugin):
    """Scales the scores of a micro-batch until experts share its tokens evenly, and chooses by the result.

    Weights come from the unscaled scores: the sigmoid (top_k 1), or the softmax over all experts at the chosen ones.
    Sinkhorn balances without an auxiliary loss. ``z_loss`` is the coefficient of a z-loss on the logits.
    Scaling stops when it has converged, which the host checks once per round, or after ``max_rounds``.
    """

    name: ClassVar[str] = "sinkhorn"

    max_rounds: int = field(default=100, validator=ge(1))
    z_loss: float = field(default=0.0, validator=ge(0.0))
    dtype: Literal["fp32", "fp64"] = "fp32"

    def offers(self, site: Site) -> moefw.Offers:
        """Return the partition: routing looks at all tokens of a micro-batch together."""
        return moefw.offers(partition=("micro_batch",))

    def check(self, site: Site) -> Sequence[moefw.Problem]:
        """Return a problem unless K experts exist."""
        k, experts = site.dims.top_k, site.dims.num_experts
        if 1 <= k <= experts:
            return ()
        fix = f"Use model.top_k between 1 and {experts}."
        return [moefw.Problem(f"top_k {k} of {experts} experts cannot be chosen.", fix)]

    def memory(self, shape: RankShape) -> PartMemory:
        """Return the memory of weight, choices, all scores (a chosen score's gradient reaches all) and z-loss."""
        dims, x, size = shape.dims, shape.tokens_given(), {"fp32": FP32, "fp64": FP64}[self.dtype]
        scores, each = shape.tokens * dims.num_experts * size, shape.tokens * size
        wide = 0 if x.nbytes == shape.tokens * dims.model_dim * size else shape.tokens * dims.model_dim * size
        ids = Tensor(name="chosen experts", nbytes=shape.choices * INT64)
        saved = {"scores": scores, "experts found": ids.nbytes, "absent": shape.choices}
        if self.z_loss:
            saved |= {"logits": scores, "log-sum-exp of logits": each, "valid tokens": each, "scale of losses": size}
        router = Region(
            name="router",
            given=(x,),
            returns=("weights",),
            saves=(x, *(Tensor(name=name, nbytes=nbytes) for name, nbytes in saved.items())),
            holds=(ids, Tensor(name="tokens per expert", nbytes=(dims.num_experts + 1) * FP32)),
            forward_bytes=max(scores + wide, 4 * scores),
            backward_bytes=2 * scores + 2 * wide + x.nbytes,
        )
        return PartMemory(weights=(Weight(shape=(dims.num_experts, dims.model_dim), unit="root"),), regions=(router,))

    def build(self, context: moefw.BuildContext) -> moefw.Router:
        """Return the router of one layer."""
        from moefw.plugins.routers.sinkhorn.router import SinkhornRouter

        return SinkhornRouter(context.site, max_rounds=self.max_rounds, z_loss=self.z_loss, dtype=self.dtype)


@moefw.hookimpl
def moefw_routers() -> list[type[RouterPlugin]]:
    """Declare the router."""
    return [Sinkhorn]
