"""The metadata of a movement, on which ranks agree before rows travel. Shapes: legend in :mod:`moefw.core.stages`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from attrs import frozen
from torch import Tensor
from torch.distributed import ProcessGroup

from moefw.core.context import ExpertGroup
from moefw.core.contracts import Codec
from moefw.runtime.communication.exchange import Splits, exchange
from moefw.runtime.communication.movement import finish
from moefw_kernels.permute import Arrival, Groups, Slots


@frozen
class Parts:
    """The second hop where experts are split: every part of an expert gets all of its rows.

    Uneven pieces are gathered by an all-to-all of copies, which moves the same bytes: gloo refuses uneven all-gathers.
    """

    group: ProcessGroup | None
    etp: int
    sent: Splits
    received: Splits

    @classmethod
    def of(cls, experts: ExpertGroup, rows_from: Sequence[int]) -> Parts:
        """Hop, given the number of rows that each rank sends for this rank's experts."""
        etp = experts.etp
        part = experts.rank % etp
        first = experts.rank - part
        # In the first hop, the rows of a source rank land on the rank that holds the source's part.
        landed = [sum(rows_from[p::etp]) for p in range(etp)]
        sent = [0] * experts.size
        received = [0] * experts.size
        for p in range(etp):
            sent[first + p] = landed[part]
            received[first + p] = landed[p]
        return cls(experts.group, etp, sent, received)

    def share(self, rows: Sequence[Tensor], codec: Codec | None) -> tuple[Tensor, ...]:
        """Rows that arrived at each part, in order of parts. Differentiable."""
        # A copy for each part, of all rows that landed here.
        copies = [tensor.repeat(self.etp, *[1] * (tensor.dim() - 1)) for tensor in rows]
        return finish(exchange(copies, self.sent, self.received, self.group, codec=codec))

    def add_up(self, rows_ND: Tensor) -> Tensor:
        """Rows that arrived here, summed over the parts. Differentiable."""
        (copies,) = finish(exchange([rows_ND], self.received, self.sent, self.group))
        # (etp * N, D) -> (N, D)
        return copies.view(self.etp, -1, *rows_ND.shape[1:]).sum(0)


@dataclass(slots=True, eq=False)
class Metadata:
    """Rows sent, in order (rank, expert, token), and how received rows are regrouped.

    ``groups`` is an ``Arrival`` under a budget, where rows that are not valid arrive too, else ``Groups``. ``parts`` is
    the second hop, to the ranks that hold other parts of the same experts; None where experts are whole.
    """

    slots: Slots
    sent: Splits
    received: Splits
    parts: Parts | None
    groups: Groups | Arrival
    stats: Mapping[str, Tensor] = field(default_factory=dict)

    def regroup(self, rows_ND: Tensor, weights_N: Tensor) -> tuple[Tensor, Tensor]:
        """Received rows and their weights in groups. Differentiable."""
        groups = self.groups
        if isinstance(groups, Arrival):
            return groups.expand(rows_ND, weights_N)
        return groups.regroup(rows_ND, weights_N)

    def restore(self, rows_RD: Tensor) -> Tensor:
        """Grouped rows in the order in which they arrived. Differentiable."""
        groups = self.groups
        if isinstance(groups, Arrival):
            return groups.reduce(rows_RD)
        return groups.restore(rows_RD)
