"""``quack``: experts in the grouped products of QuACK, Dao-AILab's kernels for Hopper and Blackwell."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

from attrs import frozen

import moefw
from moefw_quack.machine import CAPABILITIES, GROUPED, INSTALL, PACKAGE, PROBE

moefw_api = ">=3.3,<4"

MULTIPLE = 8
"""Values of 16 bits in 16 bytes, on which the kernels begin each row of an operand."""


@frozen
class Quack(moefw.GemmPlugin):
    """Runs QuACK's grouped GEMMs, with SwiGLU and its gradient in their epilogues; bf16, on Hopper and Blackwell."""

    name: ClassVar[str] = "quack"

    def offers(self, site: moefw.Site) -> moefw.Offers:
        """Offers. The activation is always recomputed, by the product that computes its gradient.

        There is no clamp, no bias, no operand of a recipe's own, and no rounding at random.
        """
        return moefw.offers(
            region=(
                *(("expert_fc1", mechanism) for mechanism in ("keep", "offload", "recompute")),
                *(("expert_fc2", mechanism) for mechanism in ("keep", "offload")),
                ("moe_act", "recompute"),
            ),
            formula=("swiglu",),
        )

    def needs(self, site: moefw.Site) -> Sequence[moefw.Need]:
        """Needs: QuACK and a GPU that it knows; bf16; groups of any size that lie end to end; even shares."""
        dims = site.dims
        on_its_gpus = "QuACK is made for Hopper and Blackwell"
        return [
            moefw.need("package", PACKAGE, reason="its products are QuACK's", fix=INSTALL),
            moefw.need("device", ("cuda",), reason=on_its_gpus, fix=GROUPED),
            moefw.need("capability", CAPABILITIES, reason=on_its_gpus, fix=GROUPED),
            moefw.need(
                "operand",
                ("bf16",),
                reason="QuACK multiplies matrices of bf16 here",
                fix="Use precision: {use: bf16}, or gemm: {use: grouped}.",
            ),
            moefw.need("rows", ("ragged", "padded", "static"), reason="QuACK takes groups that lie end to end"),
            moefw.need(
                "axis_divides",
                ("ep", dims.num_experts),
                reason=f"each rank holds an equal share of {dims.num_experts} experts",
                fix="Use an ep that divides model.num_experts.",
            ),
            moefw.need(
                "axis_divides",
                ("etp", dims.expert_dim // MULTIPLE),
                reason=f"each part of an expert is a multiple of {MULTIPLE} wide",
                fix="Use an etp that divides model.expert_dim by a multiple of 8.",
            ),
        ]

    def check(self, site: moefw.Site) -> Sequence[moefw.Problem]:
        """Problem for each size that puts rows of an operand off 16-byte boundaries."""
        sizes = {"model.dim": site.dims.model_dim, "model.expert_dim": site.dims.expert_dim}
        return [
            moefw.Problem(
                f"QuACK wants sizes that are multiples of {MULTIPLE}; {name} is {size}.",
                "Round it up, or use gemm: {use: loop}.",
            )
            for name, size in sizes.items()
            if size % MULTIPLE
        ]

    def build(self, context: moefw.BuildContext) -> moefw.ExpertGemm:
        """Experts of one layer on this rank. Raises PlanError where QuACK, or what it runs on, is missing."""
        from moefw_quack.experts import QuackExperts

        return QuackExperts(context)


@moefw.hookimpl
def moefw_gemms() -> list[type[moefw.GemmPlugin]]:
    """Declare the GEMM."""
    return [Quack]


@moefw.hookimpl
def moefw_probes() -> list[moefw.Probe]:
    """Let ``moefw doctor`` try QuACK."""
    return [PROBE]
