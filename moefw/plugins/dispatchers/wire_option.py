"""The option of built-in dispatchers that says as what rows travel."""

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

    Only rows on their way to the experts are packed. What comes back, and gradients, are sums: they stay high.
    """

    wire: Literal["high", "fp8"] = "high"

    def offers(self, site: Site) -> moefw.Offers:
        """Any row alignment; the host learns the counts before the rows are there."""
        return moefw.offers(
            row_alignment=moefw.ANY, rows=("ragged", "padded"), counts=("host", "device"), row_keys=True
        )

    def needs(self, site: Site) -> Sequence[moefw.Need]:
        """An expert-parallel axis, and a recipe that packs rows if they are to be packed."""
        axis = moefw.need("axis", "ep", reason="rows travel along the expert-parallel axis")
        if self.wire == "high":
            return [axis]
        reason, fix = f"wire: {self.wire} sends codes and scales", "Use fp8-blockwise or mxfp8, or wire: high."
        return [axis, moefw.need("wire", (self.wire,), reason=reason, fix=fix, option="wire")]

    def codec(self, context: moefw.BuildContext) -> Codec | None:
        """Return what packs the rows of a layer; None: nothing does, or its experts are kept in high precision."""
        return None if self.wire == "high" else context.recipe("moe.experts").codec(context.site.dims.model_dim)

    def movement(self, shape: RankShape, indices: Indices, *, arriving: int, returning: int) -> PartMemory:
        """Return what a movement of rows takes: ``dispatch`` brings the experts' rows, ``combine`` takes them back.

        ``arriving`` rows (D), packed or not, land in a buffer that stays until combine is under way, ``returning`` rows
        are sent back: each is also received once. Backward of combine has both, too.
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
            leaves_bytes=landed,
        )
        combine = Region(
            name="combine",
            forward_bytes=rows.nbytes + landed + returning * row,
            backward_bytes=rows.nbytes + returning * row,
        )
        return PartMemory(regions=(dispatch, combine))

    def _packed(self, shape: RankShape) -> int:
        """Return the bytes of a packed row, an even number; 0: rows are not packed."""
        codes = None if self.wire == "high" else shape.formats_of("moe.experts").packed
        return 0 if codes is None else -(-codes.row_bytes(shape.dims.model_dim) // 2) * 2
