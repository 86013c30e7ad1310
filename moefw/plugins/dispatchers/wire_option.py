"""Option of built-in dispatchers: the form in which rows travel."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Literal

from attrs import frozen

import moefw
from moefw.core.plugin import DispatcherPlugin
from moefw.core.site import Site

if TYPE_CHECKING:
    from moefw.core.contracts import Codec


@frozen(kw_only=True)
class SendsRows(DispatcherPlugin):
    """``wire``: ``high`` sends rows in the dtype of the residual stream; ``fp8`` as the recipe's codes and scales.

    Only rows sent to the experts are packed. Combined rows and gradients are sums and stay high.
    """

    wire: Literal["high", "fp8"] = "high"

    def offers(self, site: Site) -> moefw.Offers:
        """Return the offers: any row alignment, and counts that the host reads where a part needs them there."""
        return moefw.offers(
            row_alignment=moefw.ANY, rows=("ragged", "padded"), counts=("device", "host"), row_keys=True
        )

    def needs(self, site: Site) -> Sequence[moefw.Need]:
        """Return the needs: an expert-parallel axis and, for packed rows, a recipe that packs them."""
        axis = moefw.need("axis", "ep", reason="rows travel along the expert-parallel axis")
        if self.wire == "high":
            return [axis]
        reason, fix = f"wire: {self.wire} sends codes and scales", "Use fp8-blockwise or mxfp8, or wire: high."
        return [axis, moefw.need("wire", (self.wire,), reason=reason, fix=fix, option="wire")]

    def settled(self, context: moefw.BuildContext) -> dict[str, Any]:
        """Return the arguments of a runtime part that follow from the layer's other parts."""
        facts = context.facts
        return {
            "row_alignment": facts["row_alignment"],
            "counts_on_host": facts["counts"] == "host",
            "codec": self.codec(context),
        }

    def codec(self, context: moefw.BuildContext) -> Codec | None:
        """Return the codec of a layer's rows; None: rows are not packed, or experts are kept in high precision."""
        return None if self.wire == "high" else context.recipe("moe.experts").codec(context.site.dims.model_dim)
