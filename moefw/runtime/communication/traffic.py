"""Bytes that a rank sends to each other rank, divided into payload and metadata."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

from moefw.core.contracts import Codec
from moefw.core.records import Movement, Sent, Traffic

Link = Literal["node", "network"]
"""Inside a node, and between nodes."""


def by_link(traffic: Traffic, ranks_per_node: int) -> dict[Movement, dict[Link, Sent]]:
    """Return the bytes summed by link. Each node has ``ranks_per_node`` consecutive ranks of the group."""
    totals: dict[Movement, dict[Link, Sent]] = {}
    for movement, peers in traffic.sent.items():
        links: dict[Link, Sent] = {"node": Sent(), "network": Sent()}
        for peer, sent in enumerate(peers):
            near = peer // ranks_per_node == traffic.rank // ranks_per_node
            links["node" if near else "network"] += sent
        totals[movement] = links
    return totals


def traffic_of(
    rank: int,
    hops: Sequence[tuple[Sequence[int], Sequence[int]]],
    *,
    row_bytes: int,
    weight_bytes: int,
    told: Sequence[int],
    codec: Codec | None = None,
) -> Traffic:
    """Return the traffic of rows that travel along ``hops``, each the rows sent to and received from every rank.

    A row carries ``weight_bytes`` bytes of routing weights in dispatch, and of their gradients in its backward.
    ``told[peer]`` is the number of bytes that the plan sent. ``codec`` packs rows in dispatch.
    """
    out, back = ([sum(rows) for rows in zip(*side, strict=True)] for side in zip(*hops, strict=True))

    def peers(rows: Sequence[int], weights: int, row_bytes: int = row_bytes) -> tuple[Sent, ...]:
        sent = (Sent(n * row_bytes, n * weights) for n in rows)
        return tuple(Sent() if peer == rank else one for peer, one in enumerate(sent))

    return Traffic(
        rank,
        {
            "plan": tuple(Sent() if peer == rank else Sent(metadata=n) for peer, n in enumerate(told)),
            "dispatch": peers(out, weight_bytes, row_bytes if codec is None else codec.row_bytes),
            "combine": peers(back, 0),
            "combine_backward": peers(out, 0),
            "dispatch_backward": peers(back, weight_bytes),
        },
    )
