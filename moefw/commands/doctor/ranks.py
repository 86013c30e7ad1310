"""``moefw doctor --ranks``: how fast the ranks of a spec reach each other, in each group of its layout."""

from __future__ import annotations

import json
import socket
from collections.abc import Sequence
from typing import TYPE_CHECKING, Final

import click
from attrs import asdict
from rich.console import Console

from moefw.commands import specs
from moefw.commands.doctor.slow_pairs import SLOW, Kind, Pair, complaints, kinds_of
from moefw.commands.on_ranks import on_ranks
from moefw.commands.tables import print_table
from moefw.compose.assembly import Assembly
from moefw.core.contracts import Layout, LayoutPlan
from moefw.core.errors import PlanError
from moefw.training.world import Place, place_from_environment

if TYPE_CHECKING:
    import torch

LARGE_BYTES: Final = 32 << 20
"""Size of the messages whose time tells the bandwidth: smaller ones do not fill a fast link."""


def measure_ranks(spec: str, overrides: Sequence[str], *, as_json: bool) -> int:
    """Measure between the ranks of a spec, print what was found on the first one, and return the exit code.

    Joins a torchrun or Slurm world, or starts the local ranks that the layout needs. Raises PlanError for one rank.
    """
    place = place_from_environment()
    assembly = specs.read(spec, overrides, place.world if place else None, trains=False)
    world = assembly.layout.world
    if world == 1:
        raise PlanError(f"the layout of {spec} has one rank.", "Start several under torchrun, or set parallel.")

    def work(place: Place) -> None:
        pairs = _measured(assembly, place)
        if place.rank == 0:
            _show(kinds_of(pairs), as_json=as_json)

    return on_ranks(work, world=world, place=place, run=assembly.spec.run, needs="Messages take less than 100 MB.")


def groups_of(plan: LayoutPlan) -> dict[str, list[tuple[int, ...]]]:
    """Groups of a layout of more than one rank, by the axes along which they lie: "dp, edp" if those are the same."""
    axes_of: dict[tuple[tuple[int, ...], ...], list[str]] = {}
    for axis, size in plan.sizes.items():
        if size > 1:
            groups = tuple(sorted({plan.group(rank, (axis,)) for rank in range(plan.world)}))
            axes_of.setdefault(groups, []).append(axis)
    return {", ".join(axes): list(groups) for groups, axes in axes_of.items()}


def _measured(assembly: Assembly, place: Place) -> list[Pair]:
    """Pairs of all groups, on every rank. Collective."""
    from moefw.compose.build import open_layout
    from moefw.training.session import joined_world

    with joined_world(assembly, place) as device:
        return measured_pairs(open_layout(assembly, device.type), device, large_bytes=LARGE_BYTES)


def measured_pairs(layout: Layout, device: torch.device, *, large_bytes: int) -> list[Pair]:
    """Pairs of all groups of an opened layout, on every rank. Collective."""
    from moefw.runtime.communication.agreement import everywhere
    from moefw.runtime.communication.pair_times import pair_times

    host_group = layout.host_group()
    hosts = everywhere(socket.gethostname(), host_group)
    pairs = []
    for axes, groups in groups_of(layout.plan).items():
        (ranks,) = (ranks for ranks in groups if layout.rank in ranks)
        group = layout.open(ranks)
        assert group is not None  # it has several ranks
        own = pair_times(ranks, layout.rank, group, device, large_bytes=large_bytes)
        # Both ranks of a pair have measured it; the first one's times count.
        told = [asdict(pair) for pair in own if pair.ranks[0] == layout.rank]
        for pair in (pair for of_rank in everywhere(told, host_group) for pair in of_rank):
            first, second = pair["ranks"]
            pairs.append(
                Pair(
                    axes=axes,
                    ranks=(first, second),
                    hosts=(hosts[first], hosts[second]),
                    latency_us=1e6 * pair["latency_s"],
                    gb_per_s=1e-9 * pair["bytes_per_s"],
                )
            )
    return pairs


def _show(kinds: Sequence[Kind], *, as_json: bool) -> None:
    slow = complaints(kinds)
    if as_json:
        medians = [{"latency_us": kind.latency_us, "gb_per_s": kind.gb_per_s} for kind in kinds]
        told = [asdict(kind) | median for kind, median in zip(kinds, medians, strict=True)]
        click.echo(json.dumps({"kinds": told, "slow_multiple": SLOW, "slow": slow}, indent=2))
        return
    rows = []
    for kind in kinds:
        latest = max(kind.pairs, key=lambda pair: pair.latency_us)
        lowest = min(kind.pairs, key=lambda pair: pair.gb_per_s)
        where = "across machines" if kind.across else "within a machine"
        times = [f"{kind.latency_us:,.1f}", f"{latest.latency_us:,.1f} ({_named(latest)})"]
        bandwidths = [f"{kind.gb_per_s:,.2f}", f"{lowest.gb_per_s:,.2f} ({_named(lowest)})"]
        rows.append([kind.axes, where, f"{len(kind.pairs):,}", *times, *bandwidths])
    click.echo("Two ranks exchange messages: the latency of small ones, and the bandwidth each way of large ones, as")
    click.echo(f"medians. Slow is a pair that takes {SLOW:g} times the median of the same axes and machines.")
    head = ("axes", "where", "pairs", "microseconds", "slowest (ranks)", "GB/s", "slowest (ranks)")
    print_table(Console(markup=False, highlight=False), head, rows)
    for line in slow:
        click.echo(line)
    if not slow:
        click.echo("No pair is slow.")


def _named(pair: Pair) -> str:
    return f"{pair.ranks[0]}-{pair.ranks[1]}"
