"""Option of built-in dispatchers: the form in which rows travel."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Literal

from attrs import frozen

import moefw
from moefw.core.plugin import DispatcherPlugin
from moefw.core.site import Site
from moefw.ledger.indices import Indices
from moefw.ledger.parts import FP32, PartMemory, RankShape, Region, Tensor

if TYPE_CHECKING:
    from moefw.core.contracts import Codec


@frozen(kw_only=True)
class SendsRows(DispatcherPlugin):
    """``wire``: ``high`` sends rows in the dtype of the residual stream; ``fp8`` as the recipe's codes and scales.

    Only rows sent to the experts are packed. Combined rows and gradients are sums and stay high.
    """

    wire: Literal["high", "fp8"] = "high"

    def offers(self, site: Site) -> moefw.Offers:
        """Return the offers: any row alignment, and counts that the host knows before rows arrive."""
        return moefw.offers(
            row_alignment=moefw.ANY, rows=("ragged", "padded"), counts=("host", "device"), row_keys=True
        )

    def needs(self, site: Site) -> Sequence[moefw.Need]:
        """Return the needs: an expert-parallel axis and, for packed rows, a recipe that packs them."""
        axis = moefw.need("axis", "ep", reason="rows travel along the expert-parallel axis")
        if self.wire == "high":
            return [axis]
        reason, fix = f"wire: {self.wire} sends codes and scales", "Use fp8-blockwise or mxfp8, or wire: high."
        return [axis, moefw.need("wire", (self.wire,), reason=reason, fix=fix, option="wire")]

    def codec(self, context: moefw.BuildContext) -> Codec | None:
        """Return the codec of a layer's rows; None: rows are not packed, or experts are kept in high precision."""
        return None if self.wire == "high" else context.recipe("moe.experts").codec(context.site.dims.model_dim)

    def movement(self, shape: RankShape, indices: Indices, *, arriving: int, returning: int) -> PartMemory:
        """Return the memory of a movement: ``dispatch`` sends rows to the experts, ``combine`` sends them back.

        ``arriving`` rows (D), packed or not, fill a buffer that is free once dispatch has finished. ``returning`` rows
        are sent back, and each is also received once; rows sent back are copied into the order in which they arrived.
        """
        x, (rows, row_weights, _) = shape.tokens_given(), shape.rows_given()
        row, packed = x.nbytes // shape.tokens, self._packed(shape)
        landed = arriving * (packed or row)
        weights = Tensor(name="weights", nbytes=shape.choices * FP32)
        dispatch = Region(
            name="dispatch",
            given=(x, weights),
            returns=(rows.name, row_weights.name),
            saves=(Tensor(name="choices", nbytes=indices.saved),),
            holds=(Tensor(name="indices", nbytes=indices.held),),
            moves_rows=True,
            forward_bytes=landed + (arriving * row if packed else 0),
            backward_bytes=rows.nbytes + arriving * row,
        )
        combine = Region(
            name="combine",
            forward_bytes=rows.nbytes + (arriving + returning) * row,
            backward_bytes=rows.nbytes + returning * row,
        )
        return PartMemory(regions=(dispatch, combine))

    def _packed(self, shape: RankShape) -> int:
        """Return the bytes of a packed row, an even number; 0: rows are not packed."""
        codes = None if self.wire == "high" else shape.formats_of("moe.experts").packed
        return 0 if codes is None else -(-codes.row_bytes(shape.dims.model_dim) // 2) * 2
