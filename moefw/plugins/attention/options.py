"""Options and facts that the built-in attentions share. No torch."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Literal

from attrs import field, frozen
from attrs.validators import and_, ge, gt, le

import moefw
from moefw.core.site import Site
from moefw.runtime.attention.rope_options import Rope

if TYPE_CHECKING:
    from torch import Tensor

MOST = 2**14
"""Upper limit of heads and of their widths. Larger values are mistakes."""

SIZE = and_(ge(1), le(MOST))


@frozen(kw_only=True)
class Heads(moefw.AttentionPlugin):
    """Attention of several heads with rotary positions."""

    num_heads: int = field(default=4, validator=SIZE)
    """Number of heads; tp divides it."""
    rope: Rope = Rope()
    """Rotary positions."""
    norm_eps: float = field(default=1e-6, validator=gt(0.0))
    """Number added to the mean square in RMS norms."""
    kernel: Literal["sdpa", "flex"] = "sdpa"
    """Kernel of the scores: ``sdpa``, PyTorch's flash attention, or ``flex``, FlexAttention (a GPU only)."""

    def regions(self) -> tuple[str, ...]:
        """Regions inside the attention. All may be kept, recomputed or offloaded."""
        raise NotImplementedError

    def projections(self) -> tuple[str, ...]:
        """Projections, whose weights may have adapters."""
        raise NotImplementedError

    def offers(self, site: Site) -> moefw.Offers:
        """Offer the regions inside the attention, and GEMMs that all recipes can serve."""
        mechanisms = ("keep", "recompute", "offload")
        return moefw.offers(
            region=tuple((region, mechanism) for region in self.regions() for mechanism in mechanisms),
            adapter=tuple(f"attention.{name}" for name in self.projections()),
            core=(self.kernel,),
            heads=(self.num_heads,),
            logits=(self.logits_follow(),),
            by_pass=True,
            named_products=True,
            row_keys=True,
            replays=moefw.ANY if self.kernel == "sdpa" else ("never",),
        )

    def needs(self, site: Site) -> Iterator[moefw.Need]:
        """Yield the needs: a tp that divides the heads, and a GPU for FlexAttention."""
        yield moefw.need(
            "axis_divides",
            ("tp", self.num_heads),
            reason="each rank of tp has an equal share of num_heads",
            fix="Use a tp that divides num_heads.",
            option="num_heads",
        )
        if self.kernel == "flex":
            yield moefw.need(
                "device",
                ("cuda",),
                reason="FlexAttention has no backward on a CPU",
                fix="Use kernel: sdpa.",
                option="kernel",
            )

    def logits_follow(self) -> str:
        """What logits are in proportion to: ``weights``, or what takes the scale of the weights away."""
        return "weights"

    def attend(self) -> Callable[..., tuple[Tensor, Tensor]]:
        """Core of the attention."""
        if self.kernel == "flex":
            from moefw.runtime.attention.flex import attend

            return attend
        from moefw.runtime.attention.attend import attend as flash

        return flash
