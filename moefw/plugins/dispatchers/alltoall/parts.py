"""The second hop of an all-to-all where experts are split: every part of an expert gets all of its rows."""

from __future__ import annotations

from collections.abc import Sequence

from attrs import frozen
from torch import Tensor
from torch.distributed import ProcessGroup

from moefw.core.context import ExpertGroup
from moefw.core.contracts import Codec
from moefw.runtime.communication.exchange import Splits, exchange
from moefw.runtime.communication.movement import finish


@frozen
class Parts:
    """Gather of uneven pieces over the ranks that hold parts of the same experts, as an all-to-all of copies.

    gloo refuses uneven all-gathers; copies to each rank move the same bytes.
    """

    group: ProcessGroup | None
    etp: int
    sent: Splits
    received: Splits

    @classmethod
    def of(cls, experts: ExpertGroup, rows_from: Sequence[int]) -> Parts:
        """Return the hop, given the number of rows that each rank sends for this rank's experts."""
        etp = experts.etp
        part, first = experts.rank % etp, experts.rank // etp * etp
        landed = [sum(rows_from[p::etp]) for p in range(etp)]
        sent, received = [0] * experts.size, [0] * experts.size
        for p in range(etp):
            sent[first + p], received[first + p] = landed[part], landed[p]
        return cls(experts.group, etp, sent, received)

    def share(self, rows: Sequence[Tensor], codec: Codec | None) -> tuple[Tensor, ...]:
        """Return the rows that arrived at each part, in order of parts. Differentiable."""
        copies = [tensor.repeat(self.etp, *[1] * (tensor.dim() - 1)) for tensor in rows]
        return finish(exchange(copies, self.sent, self.received, self.group, codec=codec))

    def add_up(self, rows_ND: Tensor) -> Tensor:
        """Return the rows that arrived here, summed over the parts. Differentiable."""
        (copies,) = finish(exchange([rows_ND], self.received, self.sent, self.group))
        return copies.view(self.etp, -1, *rows_ND.shape[1:]).sum(0)
