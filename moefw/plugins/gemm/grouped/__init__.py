"""``grouped``: all experts in one grouped GEMM, with the least memory saved for backward."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

from attrs import field, frozen
from attrs.validators import ge

import moefw
from moefw.core.plugin import GemmPlugin
from moefw.core.site import Site

DIM_MULTIPLE = 8
"""Values of 16 bits in 16 bytes, on which rows of an operand begin."""


@frozen
class Grouped(GemmPlugin):
    """Runs ``torch.nn.functional.grouped_mm``; saves only rows and pre-activation (2TD + 4SF bytes in bf16)."""

    name: ClassVar[str] = "grouped"

    pad_rows: int = field(default=1, validator=ge(1))
    """Multiple to which the rows of each expert are padded."""

    def offers(self, site: Site) -> moefw.Offers:
        """Offers. The activation is always recomputed from the pre-activation, which ``expert_fc2`` saves.

        Saved two-dimensional tensors hold rows, under a budget the static number of them.
        """
        mechanisms = ("keep", "offload", "stash")
        regions = [(region, mechanism) for region in ("expert_fc1", "expert_fc2") for mechanism in mechanisms]
        return moefw.offers(
            region=(*regions, ("expert_fc1", "recompute"), ("experts", "stash"), ("moe_act", "recompute")),
            formula=("swiglu", "clamped_swiglu", "bias"),
            adapter=("moe.experts.gate_up_proj", "moe.experts.down_proj"),
            by_pass=True,
            named_products=True,
            activations_kept=True,
            row_keys=True,
            replays=moefw.ANY,
        )

    def needs(self, site: Site) -> Sequence[moefw.Need]:
        """Needs: contiguous groups of any size, or aligned to ``pad_rows``; even shares of experts."""
        needs = [
            moefw.need("rows", ("ragged", "padded", "static"), reason="grouped_mm takes groups that lie end to end"),
            moefw.need(
                "axis_divides",
                ("ep", site.dims.num_experts),
                reason=f"each rank holds an equal share of {site.dims.num_experts} experts",
                fix="Use an ep that divides model.num_experts.",
            ),
            moefw.need(
                "axis_divides",
                ("etp", site.dims.expert_dim // DIM_MULTIPLE),
                reason=f"each part of an expert is a multiple of {DIM_MULTIPLE} wide",
                fix="Use an etp that divides model.expert_dim by a multiple of 8, or gemm: {use: loop}.",
            ),
        ]
        if site.dims.biased_experts:
            reason = "each rank holds an equal part of an expert's biases"
            needs.append(moefw.need("axis_divides", ("etp", site.dims.model_dim), reason=reason))
        if self.pad_rows > 1:
            needs.append(moefw.need("row_alignment", self.pad_rows, reason="pad_rows asks for it", option="pad_rows"))
        return needs

    def check(self, site: Site) -> Sequence[moefw.Problem]:
        """Problem for each size that puts rows of an operand off 16-byte boundaries."""
        sizes = {"model.dim": site.dims.model_dim, "model.expert_dim": site.dims.expert_dim}
        return [
            moefw.Problem(
                f"grouped_mm wants sizes that are multiples of {DIM_MULTIPLE}; {name} is {size}.",
                "Round it up, or use gemm: {use: loop}.",
            )
            for name, size in sizes.items()
            if size % DIM_MULTIPLE
        ]

    def build(self, context: moefw.BuildContext) -> moefw.ExpertGemm:
        """Experts of one layer on this rank."""
        from moefw.plugins.gemm.grouped.experts import GroupedExperts

        return GroupedExperts(context)


@moefw.hookimpl
def moefw_gemms() -> list[type[GemmPlugin]]:
    """Declare the GEMM."""
    return [Grouped]
