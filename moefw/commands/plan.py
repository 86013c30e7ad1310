"""``moefw plan``: the predicted memory and work of a rank, from the spec alone."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import click
from attrs import frozen
from rich.console import Console

from moefw.commands import specs
from moefw.commands.tables import print_table
from moefw.commands.waiting import waiting
from moefw.compose.assembly import Assembly
from moefw.compose.spec.structure import plain
from moefw.core.errors import MoefwError, SpecError, os_reason
from moefw.planner import COLUMNS, Ledger, RegionTotals, ledger
from moefw.planner import cluster as clusters
from moefw.planner.budget import Budget
from moefw.planner.cluster import Cluster
from moefw.planner.time import software
from moefw.planner.time.forecast import Forecast, forecast, lacks
from moefw.system.folders import cache_dir

GIB = 2**30
MIB = 2**20
TERA = 10**12
GIGA = 10**9
WHOLE = 10
"""TFLOPS from which on they are told without decimals: a CPU has less than one."""
PHASES = {
    "forward": "forward",
    "recompute": "recompute",
    "backward": "backward",
    "once": "once a step",
    "gradients": "sums of gradients, once a step",
    "optimizer": "update, once a step",
}
ONCE = ("once", "gradients", "optimizer")
PLANS = "plans"
"""The folder of ledgers in the cache."""
EXPOSED = "recomputed, exposed"
"""What a recomputed region sends again: it waits for it at once, so nothing hides it, also where passes are merged."""


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
@click.option(
    "--cluster", metavar="NAME|FILE.yaml", help="Say how long a step takes, and whether the peak fits a GPU there."
)
@click.option(
    "--tokens",
    type=click.FloatRange(min=0.0, min_open=True),
    metavar="NUMBER",
    help="Say what this many tokens, such as 1e12, take of GPU-hours and cost on the cluster.",
)
@click.option(
    "--tokens-per-s-per-gpu",
    type=click.FloatRange(min=0.0, min_open=True),
    metavar="NUMBER",
    help="The speed of --tokens, of a run like this one, instead of the predicted one.",
)
@click.option(
    "--as",
    "runs_as",
    metavar="NAME|FILE.yaml",
    help="Predict the time of other software: an implementation, or a file.",
)
@click.option(
    "--skew",
    type=click.FloatRange(min=1.0),
    default=1.0,
    help="Rows of the rank with most, beside the mean; 1, the default, is forced balance.",
)
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object and nothing else.")
@click.option(
    "--picture", type=click.Path(path_type=Path), metavar="FILE.png", help="Draw the schedule of a step, instead."
)
def plan(
    spec: str,
    overrides: tuple[str, ...],
    world: int | None,
    cluster: str | None,
    tokens: float | None,
    tokens_per_s_per_gpu: float | None,
    runs_as: str | None,
    skew: float,
    as_json: bool,
    picture: Path | None,
) -> int:
    """Predict the memory and the work of a rank that trains as SPEC says, without a GPU.

    Memory is told by category and by region; --json tells the work by region, too. With --cluster, the time of a step
    is told by what it is spent on.

    Problems that `moefw check` would report are printed instead: exits with 2 then.
    """
    if tokens_per_s_per_gpu is not None and tokens is None:
        raise click.UsageError("--tokens-per-s-per-gpu is the speed of --tokens, which is not there.")
    try:
        gpus = None if cluster is None else clusters.read(cluster)
        runs = software.Software() if runs_as is None else software.read(runs_as)
        if gpus is None and (runs_as is not None or skew != 1.0):
            raise SpecError("--as and --skew: time needs a cluster.", "Add --cluster NAME.")
        assembly = specs.read(spec, overrides, world)
        if picture is not None:
            return _draw(assembly, picture)
        with waiting("running a step of a rank on tensors without memory"):
            planned = ledger(assembly, cache=cache_dir() / PLANS)
            time = None
            missing = [] if gpus is None else lacks(gpus, planned)
            if missing and (runs_as is not None or skew != 1.0):
                what = f"--as and --skew: the cluster {cluster} has no {', '.join(missing)}, which time needs."
                raise SpecError(what, "Name a cluster that has it, or calibrate this machine again.")
            if gpus is not None and cluster is not None and not planned.unknown and not missing:
                time = forecast(assembly, planned, gpus, Path(cluster).stem, runs, skew=skew)
            if tokens is not None and tokens_per_s_per_gpu is None:
                if time is None:
                    what = "--tokens: their speed is unknown, without a time of a step."
                    fix = "Add --cluster NAME, or --tokens-per-s-per-gpu: a run's tokens_per_s, over its ranks."
                    raise SpecError(what, fix)
                tokens_per_s_per_gpu = time.tokens_per_s_per_gpu
    except MoefwError as error:
        if not as_json:
            raise
        click.echo(json.dumps({"ok": False, "problems": plain(error.problems)}))
        return 2
    budget = None
    if tokens is not None and tokens_per_s_per_gpu is not None:
        budget = Budget(
            tokens=tokens,
            tokens_per_s_per_gpu=tokens_per_s_per_gpu,
            gpus=assembly.layout.world,
            usd_per_gpu_hour=None if gpus is None else gpus.usd_per_gpu_hour,
        )
    if as_json:
        on_cluster = {} if gpus is None else {"cluster": _on(gpus, cluster, planned)}
        if time is not None:
            on_cluster["time"] = time.to_data()
            on_cluster["seconds"] = dict(time.told.categories)
        of_tokens = {} if budget is None else {"budget": budget.to_data()}
        click.echo(json.dumps({"ok": True, "problems": [], **planned.to_data(), **on_cluster, **of_tokens}))
        return 0
    show(planned)
    if gpus is not None:
        click.echo(f"\n{_told_on(gpus, cluster, planned)}")
    if missing:
        click.echo(f"\nThe time of a step is not predicted: the cluster has no {', '.join(missing)}.")
    if time is not None:
        _show_time(time)
    if budget is not None:
        click.echo(f"\n{budget.in_words()}")
    return 0


def _show_time(time: Forecast) -> None:
    """Print what a step takes, what it spends that on, and how sure that is."""
    step = time.told.step_s
    rows = [
        (name, f"{seconds:.4g}", f"{100 * seconds / step:.1f}")
        for name, seconds in sorted(time.told.categories.items(), key=lambda each: -each[1])
    ]
    click.echo()
    head = ("a step spends on", "seconds", "% of it; what runs side by side counts twice")
    print_table(Console(markup=False, highlight=False), head, rows)
    asked = time.model_tflops_per_gpu
    tflops = f"{asked:.0f}" if asked >= WHOLE else f"{asked:.3g}"
    mfu = "" if time.mfu is None else f", an MFU of {100 * time.mfu:.1f} %"
    click.echo(
        f"\na step takes {step:.4g} s, give or take {time.bar.percent:.0f} %: "
        f"{time.tokens_per_s_per_gpu:.0f} tokens/s and {tflops} TFLOPS a GPU{mfu}"
    )
    click.echo(
        f"{time.told.bound_by} take longest; exposed communication {100 * time.told.exposed_s / step:.1f} %, "
        f"pipeline bubble {100 * time.told.bubble_s / step:.1f} %, "
        f"waits for the host {100 * time.told.waits_for_host_s / step:.1f} %"
    )
    if time.bar.extrapolated:
        click.echo(f"extrapolated, as no published run is near in: {', '.join(time.bar.extrapolated)}")


def _on(cluster: Cluster, name: str | None, plan: Ledger) -> dict[str, Any]:
    """What a plan is on a cluster: whether its peak fits a GPU, bytes left or missing, and the denominator of MFU."""
    left = None if plan.peak_bytes is None else cluster.memory_bytes - plan.peak_bytes
    return {
        "name": name,
        "memory_bytes": cluster.memory_bytes,
        "fits": None if left is None else left >= 0,
        "left_bytes": left,
        "peak_tflops": None if plan.dtype is None else cluster.peak_tflops(plan.dtype),
    }


def _told_on(cluster: Cluster, name: str | None, plan: Ledger) -> str:
    """The same in words."""
    data = _on(cluster, name, plan)
    if data["fits"] is None:
        fits = "whether the peak fits is unknown"
    elif data["fits"]:
        fits = f"the peak fits, {_size(data['left_bytes'], GIB)} GiB are left"
    else:
        fits = f"the peak does not fit, {_size(-data['left_bytes'], GIB)} GiB are missing"
    lines = [f"a GPU of {name} has {_size(cluster.memory_bytes, GIB)} GiB: {fits}"]
    if data["peak_tflops"] is not None:
        lines.append(f"MFU is of {data['peak_tflops']:g} TFLOPS, its peak of products of {plan.dtype}")
    return "\n".join(lines)


def _draw(assembly: Assembly, picture: Path) -> int:
    """Draw the schedule of a step."""
    from moefw.planner.schedule_picture import draw_schedule

    if picture.suffix != ".png":
        raise SpecError(f"--picture {picture}: a picture ends in .png.", f"Use {picture.with_suffix('.png')}.")
    try:
        draw_schedule(assembly, picture)
    except OSError as error:
        reason = os_reason(error)
        raise SpecError(f"--picture {picture}: {reason}.", "Name a file that can be written.") from error
    click.echo(f"the schedule is drawn in {picture}")
    return 0


def show(plan: Ledger) -> None:
    """Print the tables, as plain lines if not on a terminal."""
    console = Console(markup=False, highlight=False)
    tokens = f"{plan.tokens} tokens a micro-batch, {plan.micro_batches} a step"
    click.echo(f"memory of {plan.ranks}; {tokens}")
    for sheet in sheets(plan):
        click.echo()
        print_table(console, sheet.head, sheet.rows)
    if plan.flops_per_token is not None:
        click.echo(f"\nthe model asks for {plan.flops_per_token / GIGA:.3f} GFLOP a token, in forward and backward")
    for part in plan.modelled:
        click.echo(f"modelled, as it cannot run here: {part}")
    if plan.unknown:
        click.echo(f"\nunknown here is what waits for backward, the peak, and the work: {plan.unknown}")


def unit_for(peak_bytes: int) -> tuple[int, str]:
    """Unit for memory with this peak, in bytes and by name."""
    return (GIB, "GiB") if peak_bytes >= GIB else (MIB, "MiB")


def sheets(plan: Ledger) -> list[Sheet]:
    """Tables of a ledger: memory by category, at the peak and by region, work by pass, bytes by group."""
    held = plan.held
    peak = plan.peak
    totals = plan.totals
    unit, name = unit_for(plan.peak_bytes or held.device)
    rows = {
        "parameters": held.parameters,
        "gradients": held.gradients,
        "optimizer": held.optimizer,
        "optimizer, on the host": held.host,
        "buffers and tokens": held.buffers + held.batch,
        "kept from step to step by policies": plan.pools,
        "saved between forward and backward": totals["saved"],
        "peak": plan.peak_bytes or 0,
    }
    category = Sheet("category", ("category", name), [(row, _size(n, unit)) for row, n in rows.items() if n])
    if peak is None:
        return [category]
    parts = {
        "held": held.device + plan.pools,
        "operands and gathered weights, for all micro-batches": peak.operands,
        "saved": peak.saved,
        "gathered parameters": peak.gathered,
        "passing": peak.passing,
        "gradients not there yet": peak.gradients,
    }
    regions = [_region(row, unit) for row in plan.regions]
    total = ("", "total", "", *(_size(totals[column], unit) for column in COLUMNS))
    head = ("layers", "region", "number", *(column.replace("_", " ") for column in COLUMNS))
    return [
        category,
        Sheet("peak", (f"the peak is in {peak.place}", name), [(row, _size(n, unit)) for row, n in parts.items() if n]),
        Sheet("region", head, [*regions, total]),
        *(sheet for sheet in (_work(plan), _sent(plan), _positions(plan, unit, name)) if sheet.rows),
    ]


def _region(row: RegionTotals, unit: int) -> tuple[str, ...]:
    return (row.kind, row.region, str(row.layers), *(_size(getattr(row, column), unit) for column in COLUMNS))


def _work(plan: Ledger) -> Sheet:
    rows = []
    for phase, title in PHASES.items():
        of_phase = [work for work in plan.work if work.phase == phase]
        if not of_phase:
            continue
        flops = sum(work.layers * product.flops for work in of_phase for product in work.products)
        operators = sum(work.layers * work.operators for work in of_phase)
        nbytes = sum(work.layers * work.nbytes for work in of_phase)
        rows.append((title, f"{flops / TERA:.3g}", str(operators), f"{nbytes / GIB:.3g}"))
    head = ("work of a micro-batch", "products, TFLOP", "other operators", "they read and write, GiB")
    return Sheet("work", head, rows)


def _positions(plan: Ledger, unit: int, name: str) -> Sheet:
    """The positions of a pipeline, of which those that are alike are one row; no rows without one."""
    rows = []
    for position in plan.positions if plan.stages > 1 else ():
        flops = Counter[str]()
        for work in position.work:
            flops[work.phase] += sum(work.layers * product.flops for product in work.products)
        numbers = ", ".join(str(at + 1) for at in position.at)
        told = (f"{flops[phase] / TERA:.3g}" for phase in ("forward", "recompute", "backward"))
        peak = "unknown" if position.peak_bytes is None else _size(position.peak_bytes, unit)
        rows.append((numbers, peak, *told))
    head = ("position on pp", f"peak, {name}", "forward, TFLOP a micro-batch", "recompute", "backward")
    return Sheet("positions", head, rows)


def _sent(plan: Ledger) -> Sheet:
    links: dict[tuple[str, str, str], Counter[str]] = {}
    for work in plan.work:
        for transfer in work.transfers:
            times = work.layers * transfer.times
            counts = {"times": times, "node": times * transfer.node, "network": times * transfer.network}
            kind = transfer.kind
            if work.phase in ONCE:
                kind = f"{kind}, {PHASES[work.phase]}"
            elif work.phase == "recompute":
                kind = f"{kind}, {EXPOSED}"
            links.setdefault((transfer.group, str(transfer.ranks), kind), Counter()).update(counts)
    rows = [
        (*key, str(sums["times"]), f"{sums['node'] / MIB:.2f}", f"{sums['network'] / MIB:.2f}")
        for key, sums in links.items()
    ]
    head = ("sent in a micro-batch over", "ranks", "as", "number", "inside the node, MiB", "between nodes, MiB")
    return Sheet("sent", head, rows)


def _size(nbytes: int, unit: int) -> str:
    return f"{nbytes / unit:.3f}" if nbytes else "0"
