"""Tests the contract of dispatchers for two hops, and that a token enters a node once."""

from __future__ import annotations

from typing import Any

import torch
from moefw_two_hop import TwoHop

from moefw.compose.assembly import Assembly
from moefw.compose.build import Shared
from moefw.testing import DispatcherSuite
from moefw.testing.counting import Traffic
from moefw.testing.layer_case import LayerCase
from moefw.testing.threads import thread_world
from moefw.testing.wire import count_bytes, open_dispatcher

DIM = 16
RANKS = 8
PER_NODE = 4


class TestTwoHop(DispatcherSuite):
    """The contract."""

    plugin = TwoHop


def counted(group: Any, rank: int, assembly: Assembly) -> Traffic:
    """Traffic of a rank for one token whose experts are on all ranks."""
    shared = Shared()
    dispatcher = open_dispatcher(assembly, group, ranks_per_node=PER_NODE, shared=shared)
    counts = count_bytes(dispatcher, group, torch.randn(1, DIM), torch.rand(1, RANKS), torch.arange(RANKS).view(1, -1))
    shared.close()
    return counts


def test_a_token_enters_a_node_once() -> None:
    """Each rank sends its token to the other node once, and passes on what has come to the other ranks of its own."""
    parts = {
        "routing": {"use": "topk", "score": "sigmoid"},
        "dispatch": {"use": "two_hop"},
        "parallel": {"experts": {"ep": RANKS}, "ranks_per_node": PER_NODE},
    }
    sizes = {"tokens": (1,) * RANKS, "num_experts": RANKS, "top_k": RANKS, "dim": DIM}
    assembly = LayerCase(**sizes, parts=parts, plugins=(TwoHop,)).assemble()
    for traffic in thread_world(RANKS, counted, assembly):
        links = traffic.by_link(PER_NODE)
        for movement in ("dispatch", "combine"):
            rows = {link: sent.payload // (4 * DIM) for link, sent in links[movement].items()}
            assert rows == {"network": RANKS // PER_NODE - 1, "node": (PER_NODE - 1) * RANKS // PER_NODE}
