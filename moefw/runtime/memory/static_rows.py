"""Rows of static number, on which the experts of a layer compute. Only the first ones are valid.

In the forward of experts under a budget, a memory policy finds them in
:func:`moefw.runtime.forward_context.forward_context`, to save only the valid rows. Values that it reports there become
statistics of the layer.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, final

from torch import Tensor

if TYPE_CHECKING:
    from moefw.core.stages import ExpertBatch

UNSAVED: Final = "unsaved_rows"
"""Statistic: the rows for which a memory policy had no room, fp32 of shape (). The step runs again, dropless."""


@final
class StaticRows:
    """The rows of one call of the experts. ``stats`` are those of the batch, and those that policies report."""

    def __init__(self, batch: ExpertBatch) -> None:
        self.num_rows = len(batch.rows_RD)
        self._ends_e = batch.offsets_e
        self.stats: dict[str, Tensor] = dict(batch.stats)

    @property
    def num_valid(self) -> Tensor:
        """Number of valid rows, which come first, padding of groups included: int32 of shape () on the device.

        At most ``num_rows``, although groups may end beyond it if a budget overflows.
        """
        return self._ends_e[-1].clamp_max(self.num_rows)

    def report(self, name: str, value: Tensor) -> None:
        """Add ``value``, a scalar, to a statistic. Every rank reports the same names."""
        self.stats[name] = self.stats[name] + value if name in self.stats else value
