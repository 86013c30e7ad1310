"""``sample``: an attention."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

import moefw
from attrs import field, frozen
from attrs.validators import ge

moefw_api = ">=3,<4"


@frozen
class Sample(moefw.AttentionPlugin):
    """Every query has a head of its own; all share one key and one value, with rotary positions."""

    name: ClassVar[str] = "sample"

    num_heads: int = field(default=4, validator=ge(1))
    """Number of heads of queries; tp divides it."""
    head_dim: int = field(default=32, validator=ge(2))
    """Number of values of a head; even, as RoPE turns pairs."""

    def offers(self, site: moefw.Site) -> moefw.Offers:
        """The scores may be kept, moved off the device, recomputed or clipped. Projections may have adapters."""
        regions = tuple(("core_attn", way) for way in ("keep", "offload", "recompute"))
        return moefw.offers(
            region=regions,
            core=("sdpa",),
            heads=(self.num_heads,),
            logits=("weights",),
            adapter=tuple(f"attention.{name}_proj" for name in "qkvo"),
            by_pass=True,
            named_products=True,
            row_keys=True,
        )

    def needs(self, site: moefw.Site) -> Sequence[moefw.Need]:
        """Require equal shares of the heads."""
        return [
            moefw.need(
                "axis_divides",
                ("tp", self.num_heads),
                reason="each rank of tp has an equal share of num_heads",
                fix="Use a tp that divides num_heads.",
                option="num_heads",
            )
        ]

    def build(self, context: moefw.BuildContext) -> moefw.Attention:
        """Attention of one layer on this rank."""
        from moefw_sample.attention import SampleAttention

        return SampleAttention(context, self.num_heads, self.head_dim)


@moefw.hookimpl
def moefw_attentions() -> list[type[moefw.AttentionPlugin]]:
    """Declare the attention."""
    return [Sample]
