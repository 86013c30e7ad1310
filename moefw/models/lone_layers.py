"""``moe_layers``: MoE layers around which there is no model of ours. A spec cannot name it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

from attrs import field, frozen
from attrs.validators import and_, ge, le

import moefw
from moefw.core.plugin import ModelPlugin
from moefw.core.site import Dims, Site
from moefw.models.sizes import MOST, WIDEST


@frozen(kw_only=True)
class LoneLayers(ModelPlugin):
    """Sizes of MoE layers that somebody else's model calls."""

    name: ClassVar[str] = "moe_layers"

    dim: int = field(validator=and_(ge(2), le(WIDEST)))
    """Width of the tokens."""
    expert_dim: int = field(validator=and_(ge(1), le(WIDEST)))
    """Hidden width of an expert."""
    num_experts: int = field(validator=and_(ge(1), le(MOST)))
    """Number of experts of a layer."""
    top_k: int = field(validator=and_(ge(1), le(MOST)))
    """Number of experts of a token."""
    num_layers: int = field(default=1, validator=and_(ge(1), le(MOST)))
    """Number of layers."""

    def dims(self) -> Dims:
        """Sizes of each layer."""
        return Dims(model_dim=self.dim, expert_dim=self.expert_dim, num_experts=self.num_experts, top_k=self.top_k)

    def moe_layers(self) -> Sequence[int]:
        """Numbers of the layers."""
        return range(self.num_layers)

    def offers(self, site: Site) -> moefw.Offers:
        """Offer the regions of a layer, and what it does for a recipe.

        What a step of the engine or a model around the layer would do is not offered: losses over all layers, recipes
        that remember steps, tokens that ranks share.
        """
        mechanisms = ("keep", "recompute", "offload")
        treated = [(region, mechanism) for region in ("router", "experts") for mechanism in mechanisms]
        treated += [("dispatch", "keep"), ("dispatch", "recompute")]
        return moefw.offers(region=tuple(treated), by_pass=True, row_keys=True)

    def needs(self, site: Site) -> Sequence[moefw.Need]:
        """Need of a GEMM whose experts are SwiGLUs."""
        return [moefw.need("formula", "swiglu", reason="the activation of the experts is swiglu")]


@moefw.hookimpl
def moefw_models() -> list[type[ModelPlugin]]:
    """Declare the layers."""
    return [LoneLayers]
