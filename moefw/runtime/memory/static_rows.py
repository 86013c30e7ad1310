"""Rows of a static number, of which only the first ones are valid: what the experts of a layer compute on.

In the forward of experts under a budget, a memory policy may ask for :func:`current`, to save the valid rows alone.
What it reports there becomes statistics of the layer.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import TYPE_CHECKING, Final, final

from torch import Tensor

if TYPE_CHECKING:
    from moefw.core.stages import ExpertBatch

UNSAVED: Final = "unsaved_rows"
"""The statistic of rows that a memory policy had no room for, fp32 of shape (): the step is run again, dropless."""


@final
class StaticRows:
    """The rows of one call of the experts. ``stats`` are those of the batch, and what policies report."""

    def __init__(self, batch: ExpertBatch) -> None:
        self.num_rows, self._ends_e = len(batch.rows_RD), batch.offsets_e
        self.stats: dict[str, Tensor] = dict(batch.stats)

    @property
    def num_valid(self) -> Tensor:
        """How many rows, the first ones, are valid, padding of groups included: int32 of shape () on the device.

        Never more than there are, though groups may end beyond them where a budget overflows.
        """
        return self._ends_e[-1].clamp_max(self.num_rows)

    def report(self, name: str, value: Tensor) -> None:
        """Add ``value``, a scalar, to a statistic. Every rank reports the same names."""
        self.stats[name] = self.stats[name] + value if name in self.stats else value


_current: ContextVar[StaticRows | None] = ContextVar("static_rows", default=None)


def current() -> StaticRows | None:
    """Return the rows that experts compute on now; None outside of them, and where no budget holds."""
    return _current.get()


@contextmanager
def computing_on(rows: StaticRows | None) -> Iterator[None]:
    """Be in a call of the experts."""
    before = _current.set(rows)
    try:
        yield
    finally:
        _current.reset(before)
