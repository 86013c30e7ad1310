"""``sample``: an expert computation."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

import moefw
from attrs import frozen

moefw_api = ">=3,<4"


@frozen
class Sample(moefw.GemmPlugin):
    """Runs one expert after the other, each as two plain GEMMs with SwiGLU between them."""

    name: ClassVar[str] = "sample"

    def offers(self, site: moefw.Site) -> moefw.Offers:
        """The activation may be kept, or recomputed together with the input of the second GEMM."""
        regions = (("moe_act", "keep"), ("moe_act", "recompute"))
        return moefw.offers(region=regions, by_pass=True, named_products=True)

    def needs(self, site: moefw.Site) -> Sequence[moefw.Need]:
        """Require group sizes on the host, and equal shares of the experts."""
        return [
            moefw.need("counts", ("host",), reason="a Python loop slices the rows of each expert"),
            moefw.need("rows", ("ragged", "padded", "static"), reason="it slices groups that lie end to end"),
            moefw.need("operand", ("bf16", "fp32"), reason="it multiplies with torch.matmul"),
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

    def build(self, context: moefw.BuildContext) -> moefw.ExpertGemm:
        """Experts of one layer on this rank."""
        from moefw_sample.gemm import SampleExperts

        return SampleExperts(context)


@moefw.hookimpl
def moefw_gemms() -> list[type[moefw.GemmPlugin]]:
    """Declare the GEMM."""
    return [Sample]
