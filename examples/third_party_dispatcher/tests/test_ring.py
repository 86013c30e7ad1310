"""Tests the contract of dispatchers for the ring, and that rows only go to neighbours, as far as needed."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from moefw_ring import Ring

from moefw.compose.assembly import Assembly
from moefw.compose.build import Shared
from moefw.testing import DispatcherSuite
from moefw.testing.counting import Traffic
from moefw.testing.threads import thread_world
from moefw.testing.layer_case import LayerCase
from moefw.testing.wire import count_bytes, open_dispatcher

DIM = 8
RANKS = 6


class TestRing(DispatcherSuite):
    """The contract, with tokens that go both ways round."""

    plugin = Ring


class TestOneWayRing(DispatcherSuite):
    """The contract, with tokens that all go one way round."""

    plugin = Ring
    options = {"both_ways": False}


def counted(group: Any, rank: int, assembly: Assembly, distance: int) -> Traffic:
    """Traffic of a rank for one token whose only expert is on the rank ``distance`` further round."""
    shared = Shared()
    dispatcher = open_dispatcher(assembly, group, ranks_per_node=RANKS, shared=shared)
    ids_TK = torch.tensor([[(rank + distance) % RANKS]])
    counts = count_bytes(dispatcher, group, torch.randn(1, DIM), torch.rand(1, 1), ids_TK)
    shared.close()
    return counts


@pytest.mark.parametrize("both_ways", [True, False])
@pytest.mark.parametrize("distance", range(RANKS))
def test_rows_go_to_neighbours_and_no_further_than_they_are_needed(distance: int, both_ways: bool) -> None:
    """Every rank sends one row for each hop that its own token needs, because all ranks do the same."""
    parts = {
        "routing": {"use": "topk", "score": "sigmoid"},
        "dispatch": {"use": "ring", "both_ways": both_ways},
        "parallel": {"experts": {"ep": RANKS}},
    }
    sizes = {"tokens": (1,) * RANKS, "num_experts": RANKS, "top_k": 1, "dim": DIM}
    assembly = LayerCase(**sizes, parts=parts, plugins=(Ring,)).assemble()
    back = both_ways and distance > RANKS // 2
    hops, neighbour = (RANKS - distance, -1) if back else (distance, 1)
    row_bytes = 4 * DIM
    for rank, traffic in enumerate(thread_world(RANKS, counted, assembly, distance)):
        for movement, step in {"dispatch": neighbour, "combine": -neighbour}.items():
            wanted = {(rank + step) % RANKS: hops * row_bytes} if hops else {}
            peers = enumerate(traffic.sent[movement])
            assert {peer: sent.payload for peer, sent in peers if sent.payload} == wanted
