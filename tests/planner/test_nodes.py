"""Which link carries a transfer: by how far its ranks are apart, on the nodes of the cluster."""

from __future__ import annotations

from typing import Any

import pytest
from attrs import evolve

from moefw.compose.defaults import defaults
from moefw.compose.resolve import assemble_tree
from moefw.compose.spec.source import Marks
from moefw.core.site import Machine
from moefw.planner import cluster, ledger
from moefw.planner.cluster import Links
from moefw.planner.report import Transfer
from moefw.planner.time.figures import figures
from moefw.planner.time.forecast import forecast, lacks
from moefw.planner.time.nodes import Nodes
from moefw.planner.time.rates import rates_of
from moefw.planner.time.software import Software

H100 = cluster.read("h100")
GB300 = cluster.read("gb300")
NODES_OF_8 = Nodes(8, 8)
RACKS_OF_64 = Nodes(64, 64)


@pytest.mark.parametrize(
    ("planned", "on", "real"),
    [(8, H100, 8), (256, H100, 8), (2, H100, 8), (64, GB300, 64), (8, GB300, 64), (72, GB300, 72), (256, GB300, 64)],
)
def test_a_node_of_a_cluster_holds_a_power_of_two_of_those_of_a_plan(
    planned: int, on: cluster.Cluster, real: int
) -> None:
    assert Nodes.of(on, planned) == Nodes(planned, real)


def test_a_cluster_without_a_network_is_one_node() -> None:
    assert Nodes.of(evolve(GB300, links=Links(node=GB300.links.node)), 8) == Nodes(8, 72)


def test_stages_on_different_racks_send_over_the_network_however_few_they_are() -> None:
    apart = Transfer("send", "pp", 4, 0, 1000, span=3 * 64)
    close = Transfer("send", "pp", 4, 1000, 0, span=3 * 16)
    assert (RACKS_OF_64.route(apart).node, RACKS_OF_64.route(apart).network) == (0, 1000)
    assert (RACKS_OF_64.route(close).node, RACKS_OF_64.route(close).network) == (1000, 0)


def test_a_stage_next_to_its_neighbour_waits_for_those_that_are_not() -> None:
    first_of_four = Transfer("send", "pp", 4, 1000, 0, span=3 * 32)
    assert RACKS_OF_64.route(first_of_four).network == 1000


@pytest.mark.parametrize("kind", ["all-gather", "reduce-scatter"])
def test_each_rank_of_a_node_sends_its_part_of_what_leaves_it(kind: str) -> None:
    """Of 32 parts in 4 nodes, each rank sends its own to 3 others; inside nodes, all parts travel but its own 4."""
    route = NODES_OF_8.route(Transfer(kind, "dp", 32, 7 * 100, 24 * 100))
    assert (route.network, route.node) == (3 * 100, 4 * 7 * 100)
    assert (route.inside, route.nodes) == (8, 4)


def test_a_sum_takes_as_long_as_its_two_halves() -> None:
    rates = rates_of(H100, Software(), figures())
    parts = 10**9
    halves = (Transfer(kind, "dp", 32, 7 * parts, 24 * parts) for kind in ("reduce-scatter", "all-gather"))
    whole = Transfer("all-reduce", "dp", 32, 32 * 7 * parts, 32 * 24 * parts)
    separately = sum(rates.move(half.kind, NODES_OF_8.route(half), "") for half in halves)
    assert rates.move(whole.kind, NODES_OF_8.route(whole), "") == pytest.approx(separately, rel=1e-3)


def test_rows_to_peers_in_another_node_of_the_plan_may_stay_in_a_node_of_the_cluster() -> None:
    rows = Transfer("all-to-all", "ep", 128, 7 * 10, 120 * 10)
    route = Nodes.of(GB300, 8).route(rows)
    assert (route.node, route.network) == (pytest.approx(63 * 10), pytest.approx(64 * 10))


def test_rows_to_peers_in_the_same_node_of_the_plan_may_leave_a_node_of_the_cluster() -> None:
    every_fourth = Transfer("all-to-all", "ep", 4, 3 * 10, 0, span=12)
    route = Nodes.of(H100, 64).route(every_fourth)
    assert (route.node, route.network) == (pytest.approx(10), pytest.approx(20))


@pytest.mark.parametrize("ranks_per_node", [1, 2, 4])
def test_a_plan_takes_as_long_whatever_it_took_for_a_node(ranks_per_node: int) -> None:
    assert step_s(ranks_per_node) == pytest.approx(step_s(None), rel=1e-6)


def step_s(ranks_per_node: int | None) -> float:
    once = {"shard": "all", "zero": 1}
    nodes: dict[str, Any] = {} if ranks_per_node is None else {"ranks_per_node": ranks_per_node}
    tree = {
        "model": {"preset": "qwen3-30b-a3b-tiny"},
        "precision": {"use": "bf16"},
        "parallel": {"pp": 2, "dense": once, "experts": {"ep": 4, **once}, **nodes},
        "train": {"seq_len": 64, "micro_batch": 1, "tokens_per_step": 64 * 64},
        "run": {"device": "cpu"},
    }
    assembly = assemble_tree(tree, Marks("spec"), defaults=defaults(), world=32, machine=Machine(device="cpu"))
    plan = ledger(assembly)
    assert lacks(H100, plan) == []
    return forecast(assembly, plan, H100, "h100", Software(graphs="full")).step.step_s
