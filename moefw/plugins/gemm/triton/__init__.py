"""``triton``: experts in Triton's grouped GEMMs, with the activation and its gradient in their epilogues."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar, Final

from attrs import field, frozen

import moefw
from moefw.core.errors import MoefwError
from moefw.core.plugin import GemmPlugin
from moefw.core.site import Site
from moefw.plugins.gemm.triton.table import read

CAPABILITIES: Final = ("9.0", "10.0", "10.3")
"""H100 and H200, B200, B300: their weights arrive by TMA, and their tiles fit into shared memory."""
DIM_MULTIPLE: Final = 8
"""Values of 16 bits in 16 bytes, on which rows of an operand begin."""
GROUPED: Final = "Use gemm: {use: grouped}."


@frozen
class Triton(GemmPlugin):
    """Saves what ``grouped`` does, and launches fewer kernels, which move fewer bytes; bf16 on Hopper and Blackwell.

    It awaits a GPU: it has run in Triton's interpreter alone.
    """

    name: ClassVar[str] = "triton"

    tiles: str | None = field(default=None)
    """Table that ``moefw bench tiles`` wrote. Null, or one of another GPU or Triton: tiles that are not tuned."""

    def offers(self, site: Site) -> moefw.Offers:
        """Offers. The activation is always recomputed, by the product that computes its gradient.

        There are no adapters, no operands of a recipe's own, and no rounding at random.
        """
        mechanisms = ("keep", "offload", "stash")
        regions = [(region, mechanism) for region in ("expert_fc1", "expert_fc2") for mechanism in mechanisms]
        return moefw.offers(
            region=(*regions, ("expert_fc1", "recompute"), ("experts", "stash"), ("moe_act", "recompute")),
            formula=("swiglu", "clamped_swiglu", "bias"),
            replays=moefw.ANY,
        )

    def needs(self, site: Site) -> Sequence[moefw.Need]:
        """Needs: a GPU with TMA; bf16; contiguous groups of any size; even shares of experts."""
        dims = site.dims
        needs = [
            moefw.need("package", "triton", reason="its kernels are written in Triton", fix=GROUPED),
            moefw.need("device", ("cuda",), reason="its kernels are compiled for GPUs", fix=GROUPED),
            moefw.need("capability", CAPABILITIES, reason="its kernels load weights by TMA", fix=GROUPED),
            moefw.need(
                "operand",
                ("bf16",),
                reason="its kernels multiply matrices of bf16",
                fix="Use precision: {use: bf16}, or gemm: {use: grouped}.",
            ),
            moefw.need("rows", ("ragged", "padded", "static"), reason="its kernels take groups that lie end to end"),
            moefw.need(
                "axis_divides",
                ("ep", dims.num_experts),
                reason=f"each rank holds an equal share of {dims.num_experts} experts",
                fix="Use an ep that divides model.num_experts.",
            ),
            moefw.need(
                "axis_divides",
                ("etp", dims.expert_dim // DIM_MULTIPLE),
                reason=f"each part of an expert is a multiple of {DIM_MULTIPLE} wide",
                fix="Use an etp that divides model.expert_dim by a multiple of 8.",
            ),
        ]
        if dims.biased_experts:
            reason = "each rank holds an equal part of an expert's biases"
            needs.append(moefw.need("axis_divides", ("etp", dims.model_dim), reason=reason))
        return needs

    def check(self, site: Site) -> Sequence[moefw.Problem]:
        """Problem for each size that puts rows of an operand off 16-byte boundaries, and for a table that is none."""
        problems: list[moefw.Problem] = []
        if self.tiles is not None:
            try:
                read(self.tiles)
            except MoefwError as error:
                problems += error.problems
        sizes = {"model.dim": site.dims.model_dim, "model.expert_dim": site.dims.expert_dim}
        problems += [
            moefw.Problem(
                f"gemm triton wants sizes that are multiples of {DIM_MULTIPLE}; {name} is {size}.",
                "Round it up and use triton or grouped, or use gemm: {use: loop}.",
            )
            for name, size in sizes.items()
            if size % DIM_MULTIPLE
        ]
        return problems

    def build(self, context: moefw.BuildContext) -> moefw.ExpertGemm:
        """Experts of one layer on this rank."""
        from moefw.plugins.gemm.triton.chosen import chosen_tiles
        from moefw.plugins.gemm.triton.experts import TritonExperts

        return TritonExperts(context, chosen_tiles(self.tiles, context.device))


@moefw.hookimpl
def moefw_gemms() -> list[type[GemmPlugin]]:
    """Declare the GEMM."""
    return [Triton]
