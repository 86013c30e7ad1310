"""``moefw plan``: the predicted memory and work of a rank, from the spec alone."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Sequence

import click
from attrs import frozen
from rich.console import Console
from rich.table import Table

from moefw.commands import specs
from moefw.compose.spec.structure import plain
from moefw.core.errors import MoefwError
from moefw.planner import COLUMNS, Ledger, RegionTotals, ledger
from moefw.training.folder import cache_dir

GIB, MIB, TERA = 2**30, 2**20, 10**12
PHASES = {"forward": "forward", "recompute": "recompute", "backward": "backward", "once": "once a step"}
PLANS = "plans"
"""The folder of ledgers in the cache."""


@frozen
class Sheet:
    """A table of words under a title."""

    title: str
    head: Sequence[str]
    rows: Sequence[Sequence[str]]


@click.command()
@click.argument("spec", type=click.Path())
@click.argument("overrides", nargs=-1)
@click.option("--world", type=click.IntRange(min=1), help="Ranks to lay out over; by default the smallest that fits.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object and nothing else.")
def plan(spec: str, overrides: tuple[str, ...], world: int | None, as_json: bool) -> int:
    """Predict the memory and the work of a rank that trains as SPEC says, without a GPU.

    Memory is told by category and by region; --json tells the work by region, too.

    Problems that `moefw check` would report are printed instead: exits with 2 then.
    """
    try:
        found = ledger(specs.read(spec, overrides, world), cache=cache_dir() / PLANS)
    except MoefwError as error:
        if not as_json:
            raise
        click.echo(json.dumps({"ok": False, "problems": plain(error.problems)}))
        return 2
    if as_json:
        click.echo(json.dumps({"ok": True, "problems": [], **found.to_data()}))
        return 0
    show(found)
    return 0


def show(found: Ledger) -> None:
    """Print the tables, as plain lines if not on a terminal."""
    console = Console(markup=False, highlight=False)
    tokens = f"{found.tokens} tokens a micro-batch, {found.micro_batches} a step"
    click.echo(f"memory of {found.ranks}; {tokens}")
    for sheet in sheets(found):
        click.echo()
        _print(console, sheet)
    if found.unknown:
        click.echo(f"\nunknown here is what waits for backward, the peak, and the work: {found.unknown}")


def unit_for(peak_bytes: int) -> tuple[int, str]:
    """Return the unit for memory with this peak, in bytes and by name."""
    return (GIB, "GiB") if peak_bytes >= GIB else (MIB, "MiB")


def sheets(found: Ledger) -> list[Sheet]:
    """Return the tables of a ledger: memory by category, at the peak and by region, work by pass, bytes by group."""
    held, peak, totals = found.held, found.peak, found.totals
    unit, name = unit_for(found.peak_bytes or held.device)
    rows = {
        "parameters": held.parameters,
        "gradients": held.gradients,
        "optimizer": held.optimizer,
        "optimizer, on the host": held.host,
        "buffers and tokens": held.buffers + held.batch,
        "kept from step to step by policies": found.pools,
        "saved between forward and backward": totals["saved"],
        "peak": found.peak_bytes or 0,
    }
    category = Sheet("category", ("category", name), [(row, _size(n, unit)) for row, n in rows.items() if n])
    if peak is None:
        return [category]
    parts = {
        "held": held.device + found.pools,
        "operands of weights, for all micro-batches": peak.operands,
        "saved": peak.saved,
        "gathered parameters": peak.gathered,
        "passing": peak.passing,
        "gradients not there yet": peak.gradients,
    }
    regions = [_region(row, unit) for row in found.regions]
    total = ("", "total", "", *(_size(totals[column], unit) for column in COLUMNS))
    head = ("layers", "region", "number", *(column.replace("_", " ") for column in COLUMNS))
    return [
        category,
        Sheet("peak", (f"the peak is in {peak.place}", name), [(row, _size(n, unit)) for row, n in parts.items() if n]),
        Sheet("region", head, [*regions, total]),
        *(sheet for sheet in (_work(found), _sent(found)) if sheet.rows),
    ]


def _region(row: RegionTotals, unit: int) -> tuple[str, ...]:
    return (row.kind, row.region, str(row.layers), *(_size(getattr(row, column), unit) for column in COLUMNS))


def _work(found: Ledger) -> Sheet:
    rows = []
    for phase, title in PHASES.items():
        work = [one for one in found.work if one.phase == phase]
        tera = sum(one.layers * product.flops for one in work for product in one.products) / TERA
        operators, nbytes = (sum(one.layers * getattr(one, name) for one in work) for name in ("operators", "nbytes"))
        if work:
            rows.append((title, f"{tera:.3g}", str(operators), f"{nbytes / GIB:.3g}"))
    head = ("work of a micro-batch", "products, TFLOP", "other operators", "they read and write, GiB")
    return Sheet("work", head, rows)


def _sent(found: Ledger) -> Sheet:
    links: dict[tuple[str, str, str], Counter[str]] = {}
    for work in found.work:
        for one in work.transfers:
            times = work.layers * one.times
            counts = {"times": times, "node": times * one.node, "network": times * one.network}
            kind = one.kind if work.phase != "once" else f"{one.kind}, {PHASES[work.phase]}"
            links.setdefault((one.group, str(one.ranks), kind), Counter()).update(counts)
    rows = [
        (*key, str(n["times"]), *(f"{n[link] / MIB:.2f}" for link in ("node", "network"))) for key, n in links.items()
    ]
    head = ("sent in a micro-batch over", "ranks", "as", "number", "inside the node, MiB", "between nodes, MiB")
    return Sheet("sent", head, rows)


def _size(nbytes: int, unit: int) -> str:
    return f"{nbytes / unit:.3f}" if nbytes else "0"


def _print(console: Console, sheet: Sheet) -> None:
    if console.is_terminal:
        table = Table(*sheet.head)
        for row in sheet.rows:
            table.add_row(*row)
        console.print(table)
        return
    rows = [sheet.head, *sheet.rows]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        click.echo("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip())
