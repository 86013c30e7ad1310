"""``loop``: experts in order, the readable reference."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

from attrs import frozen

import moefw
from moefw.core.plugin import GemmPlugin
from moefw.core.site import Site


@frozen
class Loop(GemmPlugin):
    """Runs each expert as two plain GEMMs. Slow with many experts, and easy to read."""

    name: ClassVar[str] = "loop"

    def offers(self, site: Site) -> moefw.Offers:
        """Offers: both projections and the activation between them are regions of each expert."""
        regions = ("expert_fc1", "moe_act", "expert_fc2")
        held = [(region, mechanism) for region in regions for mechanism in ("keep", "offload")]
        return moefw.offers(
            region=(*held, ("expert_fc1", "recompute"), ("moe_act", "recompute")),
            formula=("swiglu", "clamped_swiglu", "bias"),
            adapter=("moe.experts.gate_up_proj", "moe.experts.down_proj"),
            by_pass=True,
            named_products=True,
            activations_kept=True,
            row_keys=True,
        )

    def needs(self, site: Site) -> Sequence[moefw.Need]:
        """Needs: group sizes on the host, contiguous groups, and even shares of experts."""
        needs = [
            moefw.need("counts", ("host",), reason="a Python loop slices the rows of each expert"),
            moefw.need("rows", ("ragged", "padded", "static"), reason="it slices groups that lie end to end"),
            moefw.need(
                "axis_divides",
                ("ep", site.dims.num_experts),
                reason=f"each rank holds an equal share of {site.dims.num_experts} experts",
                fix="Use an ep that divides model.num_experts.",
            ),
            moefw.need(
                "axis_divides",
                ("etp", site.dims.expert_dim),
                reason="each rank holds an equal part of an expert",
                fix="Use an etp that divides model.expert_dim.",
            ),
        ]
        if site.dims.biased_experts:
            reason = "each rank holds an equal part of an expert's biases"
            needs.append(moefw.need("axis_divides", ("etp", site.dims.model_dim), reason=reason))
        return needs

    def build(self, context: moefw.BuildContext) -> moefw.ExpertGemm:
        """Experts of one layer on this rank."""
        from moefw.plugins.gemm.loop.experts import LoopExperts

        return LoopExperts(context)


@moefw.hookimpl
def moefw_gemms() -> list[type[GemmPlugin]]:
    """Declare the GEMM."""
    return [Loop]
