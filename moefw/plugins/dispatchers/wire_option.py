"""Option of built-in dispatchers: the form in which rows travel."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Literal

from attrs import frozen

import moefw
from moefw.core.plugin import DispatcherPlugin
from moefw.core.site import Site

if TYPE_CHECKING:
    from moefw.core.context import ExpertGroup
    from moefw.core.contracts import Codec


@frozen(kw_only=True)
class SendsRows(DispatcherPlugin):
    """Dispatcher that can send packed rows to the experts."""

    wire: Literal["high", "fp8"] = "high"
    """Form of rows on their way to the experts.

    ``high``: in the dtype of the residual stream. ``fp8``: as the recipe's codes and scales. Combined rows and
    gradients are sums and stay high.
    """

    def offers(self, site: Site) -> moefw.Offers:
        """Offers: any row alignment, and counts that the host reads where a part needs them there.

        Ranks that share experts read how many rows they send each other.
        """
        return moefw.offers(
            row_alignment=moefw.ANY,
            rows=("ragged", "padded"),
            counts=("device", "host"),
            row_keys=True,
            replays=("alone",),
        )

    def needs(self, site: Site) -> Sequence[moefw.Need]:
        """Needs: an expert-parallel axis and, for packed rows, a recipe that packs them."""
        axis = moefw.need("axis", "ep", reason="rows travel along the expert-parallel axis")
        if self.wire == "high":
            return [axis]
        packed = moefw.need(
            "wire",
            (self.wire,),
            reason=f"wire: {self.wire} sends codes and scales",
            fix="Use fp8-blockwise or mxfp8, or wire: high.",
            option="wire",
        )
        return [axis, packed]

    def build(self, context: moefw.BuildContext) -> moefw.Dispatcher[Any, Any]:
        """Dispatcher of this process. See :meth:`among`."""
        experts = context.expert_group()
        return self.alone(context) if experts.group is None else self.among(experts, context)

    @abstractmethod
    def among(self, experts: ExpertGroup, context: moefw.BuildContext) -> moefw.Dispatcher[Any, Any]:
        """Dispatcher of this process, which shares the experts with others. May raise PlanError."""

    def alone(self, context: moefw.BuildContext, **more: Any) -> moefw.Dispatcher[Any, Any]:
        """Dispatcher of a process that holds all experts. ``more``: further arguments, from a subclass."""
        from moefw.plugins.dispatchers.alone import AloneDispatcher

        settled = {"counts_on_host": context.facts["counts"] == "host", **self.settled(context)}
        return AloneDispatcher(context.site.dims.num_experts, **more, **settled)

    def settled(self, context: moefw.BuildContext) -> dict[str, Any]:
        """Arguments of a runtime part that follow from the layer's other parts."""
        return {"row_alignment": context.facts["row_alignment"], "codec": self.codec(context)}

    def codec(self, context: moefw.BuildContext) -> Codec | None:
        """Codec of a layer's rows; None: rows are not packed, or experts are kept in high precision."""
        if self.wire == "high":
            return None
        return context.recipe("moe.experts").codec(context.site.dims.model_dim)
