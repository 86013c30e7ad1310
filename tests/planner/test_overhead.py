"""Memory of a GPU that no tensor can have: by groups of ranks, and what it leaves for the peak of a plan."""

from __future__ import annotations

from pathlib import Path

import pytest
from attrs import evolve

from moefw.planner import cluster as clusters
from moefw.planner.cluster import GIB, Cluster
from moefw.planner.data_files import Figure
from moefw.planner.overhead import figures, fits, left_bytes, overhead_bytes
from moefw.planner.report import Held, Ledger, Peak, Position, Transfer, Work

H100 = clusters.read("h100")
MEASURED_ON_MEGATRON_GIB = (7e9 / GIB, 9.5e9 / GIB)
"""Freed with the communicators of Megatron on eight H100: tp 2, pp 2, dp 2, of a dense model and of one with experts.

https://github.com/verl-project/verl/pull/6408.
"""


def a_plan(*transfers: Transfer, peak_gib: float = 40.0, others: tuple[Transfer, ...] = ()) -> Ledger:
    """Return the plan of a rank at position 1 of 2 that has these transfers; ``others``: those at position 0."""
    positions = tuple(
        Position(at=(at,), peak_bytes=None, work=(a_work(sent),)) for at, sent in enumerate((others, transfers))
    )
    held = Held(parameters=0, gradients=0, optimizer=0, host=0, buffers=0, batch=0, step_passing=0)
    peak = Peak(place="", operands=0, saved=round(peak_gib * GIB), gathered=0, passing=0)
    return Ledger(world=16, micro_batches=1, tokens=1, held=held, stages=2, position=1, positions=positions, peak=peak)


def a_work(transfers: tuple[Transfer, ...]) -> Work:
    """Return work that is these transfers."""
    return Work(layer=0, layers=1, region="", phase="forward", products=(), transfers=transfers, operators=0, nbytes=0)


def sent(kind: str, group: str, ranks: int = 8) -> Transfer:
    """Return a transfer."""
    return Transfer(kind=kind, group=group, ranks=ranks, node=1, network=0)


def beside(*transfers: Transfer, others: tuple[Transfer, ...] = ()) -> float:
    """Return GiB of the overhead of a plan beside that of one which sends nothing."""
    return round((overhead_bytes(H100, a_plan(*transfers, others=others)) - overhead_bytes(H100, a_plan())) / GIB, 6)


def test_each_group_of_ranks_takes_the_buffers_of_a_communicator() -> None:
    one, exchange = figures().communicator_gib.value, figures().exchange_gib.value
    assert beside(sent("all-gather", "dp"), sent("reduce-scatter", "dp")) == one
    assert beside(sent("all-gather", "dp"), sent("send", "pp")) == 2 * one
    assert beside(sent("all-gather", "ep"), sent("all-to-all", "ep")) == exchange
    assert beside(sent("all-reduce", "tp", ranks=1)) == 0, "one rank sends nothing"
    assert beside(others=(sent("all-to-all", "ep"),)) == 0, "ranks at other positions have these"


def test_experts_add_to_communicators_what_was_measured_in_megatron() -> None:
    """Megatron has more groups for a dense model than moefw; what experts add is one all-to-all in both."""
    dense = [sent("all-gather", "dp"), sent("all-gather", "tp"), sent("send", "pp")]
    with_experts = overhead_bytes(H100, a_plan(*dense, sent("all-to-all", "ep")))
    added = (with_experts - overhead_bytes(H100, a_plan(*dense))) / GIB
    measured = MEASURED_ON_MEGATRON_GIB[1] - MEASURED_ON_MEGATRON_GIB[0]
    assert added == pytest.approx(measured, abs=1.0)
    assert with_experts / GIB < MEASURED_ON_MEGATRON_GIB[1] + figures().driver_and_context_gib.value


def test_a_peak_fits_if_the_overhead_lets_it() -> None:
    free = H100.memory_bytes - overhead_bytes(H100, a_plan(peak_gib=0.0))
    share = 1 + figures().unused_share.value
    fitting, too_large = (a_plan(peak_gib=(free + more) / share / GIB) for more in (-100, 100))
    assert fits(H100, fitting)
    assert not fits(H100, too_large)
    assert too_large.peak_bytes is not None
    assert too_large.peak_bytes < H100.memory_bytes
    unknown = evolve(fitting, peak=None)
    assert left_bytes(H100, unknown) is None
    assert not fits(H100, unknown)


def test_ranks_on_a_cpu_have_no_figure_of_overhead() -> None:
    cpu: Cluster = evolve(H100, gpu=evolve(H100.gpu, threads=Figure(value=1, estimated="a test")))
    assert overhead_bytes(cpu, a_plan(sent("all-to-all", "ep"))) == 0


def test_the_page_of_clusters_says_what_is_left() -> None:
    page = (Path(__file__).parents[2] / "docs" / "clusters.md").read_text()
    for figure in ("driver_and_context_gib", "communicator_gib", "exchange_gib", "unused_share"):
        assert f"`{figure}`" in page, figure
