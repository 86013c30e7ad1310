"""Count of the bytes that leave this rank in collectives, on every process group of any origin.

The bytes of a collective are independent of the backend's algorithm. An all-gather and an all-reduce count as the
rank's own tensor to each peer, a reduce-scatter as each peer's part, a broadcast as the root's tensor to each peer, a
barrier as zero.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Literal, get_args

from attrs import frozen
from torch import Tensor
from torch.distributed import ProcessGroup

from moefw.core.errors import ContractError
from moefw.recording.collectives import Collective, Collectives
from moefw.testing.threads import members

Movement = Literal["plan", "dispatch", "combine", "combine_backward", "dispatch_backward"]
Link = Literal["node", "network"]
"""Inside a node, and between nodes."""


@frozen
class Sent:
    """Bytes from one rank to another: rows (payload), and counts, expert ids and routing weights (metadata)."""

    payload: int = 0
    metadata: int = 0

    def __add__(self, other: Sent) -> Sent:
        """Sums of payload and metadata."""
        return Sent(self.payload + other.payload, self.metadata + other.metadata)


@frozen
class Traffic:
    """Bytes that one rank sends in one layer: ``sent[movement][peer]``, zero to itself.

    Peers are positions in the dispatcher's group.
    """

    rank: int
    sent: Mapping[Movement, Sequence[Sent]]

    def by_link(self, ranks_per_node: int) -> dict[Movement, dict[Link, Sent]]:
        """Bytes summed by link. Each node has ``ranks_per_node`` consecutive ranks of the group."""
        totals: dict[Movement, dict[Link, Sent]] = {}
        for movement, peers in self.sent.items():
            links: dict[Link, Sent] = {"node": Sent(), "network": Sent()}
            for peer, sent in enumerate(peers):
                links["node" if peer // ranks_per_node == self.rank // ranks_per_node else "network"] += sent
            totals[movement] = links
        return totals


class Counting(Collectives):
    """Adds up bytes by receiving rank of ``group``, for collectives on any group.

    Payload: floating-point tensors of two axes or more, the last of a size in ``dims``; the rest is metadata. While
    active, it raises ContractError for bytes sent outside of :meth:`during`, or to a rank that is not in ``group``.
    """

    def __init__(self, group: ProcessGroup, *, dims: Collection[int | None]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.group = group
        self.dims = dims
        self._movement: Movement | None = None
        self._sent = {movement: [Sent()] * group.size() for movement in get_args(Movement)}

    @contextmanager
    def during(self, movement: Movement) -> Iterator[None]:
        """Count collectives launched in this block as part of ``movement``."""
        outer = self._movement
        self._movement = movement
        try:
            yield
        finally:
            self._movement = outer

    def traffic(self) -> Traffic:
        """Counted bytes."""
        return Traffic(self.group.rank(), {movement: tuple(peers) for movement, peers in self._sent.items()})

    def launch(self, collective: Collective) -> Any:
        """Count the bytes for each peer, then run the collective."""
        for peer, tensors in collective.to.items():
            rank = self._rank_of(peer, collective.group)
            for tensor in tensors:
                self._count(rank, tensor)
        return collective.call(collective.outputs)

    def _rank_of(self, peer: int, group: ProcessGroup) -> int:
        """Position in ``self.group`` of a peer, which is a position in the collective's group."""
        if group is self.group:
            return peer
        ranks = members(self.group)
        rank = members(group)[peer]
        if rank not in ranks:
            raise ContractError(f"bytes were sent to rank {rank}, which is none of the ranks {ranks} of the experts.")
        return ranks.index(rank)

    def _count(self, peer: int, tensor: Tensor) -> None:
        if self._movement is None:
            what = "bytes were sent outside every movement: launch collectives inside `counting.during(...)`"
            raise ContractError(what)
        if peer == self.group.rank():
            return
        is_payload = tensor.is_floating_point() and tensor.ndim >= 2 and tensor.shape[-1] in self.dims
        sent = Sent(payload=tensor.nbytes) if is_payload else Sent(metadata=tensor.nbytes)
        self._sent[self._movement][peer] += sent
