"""``forced``: a perfectly even load, independent of the scores, for benchmarks."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

from attrs import frozen

import moefw
from moefw.core.plugin import RouterPlugin
from moefw.core.site import Site
from moefw.ledger.parts import FP32, INT64, PartMemory, RankShape, Region, Tensor, Weight


@frozen(kw_only=True)
class Forced(RouterPlugin):
    """Sends token t's choice k to expert ``(t*K + k) mod E``: for measuring speed, not for learning.

    Weights are the softmax over the chosen logits, so that gradients flow. ``known_counts``: all ranks have the
    same number of tokens in training, as under the trainer. Counts are then known beforehand and not exchanged.
    """

    name: ClassVar[str] = "forced"

    known_counts: bool = True

    def offers(self, site: Site) -> moefw.Offers:
        """Return the partition: a token's experts depend on its position in the micro-batch."""
        return moefw.offers(partition=("micro_batch",))

    def check(self, site: Site) -> Sequence[moefw.Problem]:
        """Return a problem unless K different experts exist."""
        k, experts = site.dims.top_k, site.dims.num_experts
        if 1 <= k <= experts:
            return ()
        fix = f"Use model.top_k between 1 and {experts}."
        return [moefw.Problem(f"top_k {k} of {experts} experts cannot be chosen.", fix)]

    def memory(self, shape: RankShape) -> PartMemory:
        """Return the memory of the weight, the logits, the choices and their softmax."""
        dims, x = shape.dims, shape.tokens_given()
        logits = Tensor(name="logits", nbytes=shape.tokens * dims.num_experts * FP32)
        weights = Tensor(name="softmax of chosen", nbytes=shape.choices * FP32)
        ids = Tensor(name="chosen experts", nbytes=shape.choices * INT64)
        absent = Tensor(name="absent", nbytes=shape.choices)
        found = Tensor(name="experts found", nbytes=shape.choices * INT64)
        counts = Tensor(name="tokens per expert", nbytes=(dims.num_experts + 1) * FP32)
        wide = shape.tokens * dims.model_dim * FP32
        router = Region(
            name="router",
            given=(x,),
            returns=("weights",),
            saves=(x, logits, found, weights, absent),
            holds=(ids, counts),
            forward_bytes=logits.nbytes + wide,
            backward_bytes=2 * logits.nbytes + 2 * wide + x.nbytes,
        )
        return PartMemory(weights=(Weight(shape=(dims.num_experts, dims.model_dim), unit="root"),), regions=(router,))

    def build(self, context: moefw.BuildContext) -> moefw.Router:
        """Return the router of one layer."""
        from moefw.plugins.routers.forced.router import ForcedRouter

        return ForcedRouter(context.site, known_counts=self.known_counts)


@moefw.hookimpl
def moefw_routers() -> list[type[RouterPlugin]]:
    """Declare the router."""
    return [Forced]
