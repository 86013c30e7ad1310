"""The tables of a plan, as words: memory, work, the time of a step. Commands print them, and pages have them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any, Final

from attrs import frozen

from moefw.planner.cluster import Cluster
from moefw.planner.overhead import left_bytes, overhead_bytes
from moefw.planner.report import COLUMNS, Ledger, RegionTotals
from moefw.planner.time.advice import Advice
from moefw.planner.time.forecast import Forecast

GIB: Final = 2**30
MIB: Final = 2**20
TERA: Final = 10**12
GIGA: Final = 10**9
WHOLE: Final = 10
"""TFLOPS from which on they are told without decimals."""
PHASES: Final[Mapping[str, str]] = {
    "forward": "forward",
    "recompute": "recompute",
    "backward": "backward",
    "once": "once a step",
    "gradients": "sums of gradients, once a step",
    "optimizer": "update, once a step",
}
ONCE: Final = ("once", "gradients", "optimizer")
NOTHING: Final = "-"
"""In place of a change: moefw knows none that the spec lacks and accepts."""
EXPOSED: Final = "recomputed, exposed"
"""What a recomputed region sends again: it waits for it at once, so nothing hides it, also where passes are merged."""


@frozen
class Sheet:
    """A table of words under a title."""

    title: str
    head: Sequence[str]
    rows: Sequence[Sequence[str]]


def unit_for(peak_bytes: int) -> tuple[int, str]:
    """Unit for memory with this peak, in bytes and by name."""
    return (GIB, "GiB") if peak_bytes >= GIB else (MIB, "MiB")


def unit_of(plan: Ledger) -> tuple[int, str]:
    """Unit for the memory of a ledger, in bytes and by name."""
    return unit_for(plan.peak_bytes or plan.held.device)


def memory_by_category(plan: Ledger) -> dict[str, int]:
    """Bytes of a ledger by category, the peak last. Those of which there is none are left out."""
    held = plan.held
    categories = {
        "parameters": held.parameters,
        "gradients": held.gradients,
        "optimizer": held.optimizer,
        "optimizer, on the host": held.host,
        "buffers and tokens": held.buffers + held.batch,
        "kept from step to step by policies": plan.pools,
        "saved between forward and backward": plan.totals["saved"],
        "peak": plan.peak_bytes or 0,
    }
    return {name: nbytes for name, nbytes in categories.items() if nbytes}


def sheets(plan: Ledger) -> list[Sheet]:
    """Tables of a ledger: memory by category, at the peak and by region, work by pass, bytes by group."""
    made = (_category(plan), at_the_peak(plan), by_region(plan), work_by_pass(plan), sent(plan), positions(plan))
    return [sheet for sheet in made if sheet.rows]


def _category(plan: Ledger) -> Sheet:
    unit, name = unit_of(plan)
    rows = [(category, size(nbytes, unit)) for category, nbytes in memory_by_category(plan).items()]
    return Sheet("category", ("category", name), rows)


def at_the_peak(plan: Ledger) -> Sheet:
    """What a rank holds at its peak; no rows if it is unknown."""
    unit, name = unit_of(plan)
    peak = plan.peak
    if peak is None:
        return Sheet("peak", ("the peak", name), [])
    parts = {
        "held": plan.held.device + plan.pools,
        "operands and gathered weights, for all micro-batches": peak.operands,
        "saved": peak.saved,
        "gathered parameters": peak.gathered,
        "passing": peak.passing,
        "gradients not there yet": peak.gradients,
    }
    rows = [(part, size(nbytes, unit)) for part, nbytes in parts.items() if nbytes]
    return Sheet("peak", (f"the peak is in {peak.place}", name), rows)


def by_region(plan: Ledger) -> Sheet:
    """What regions save between forward and backward of a micro-batch; no rows if it is unknown."""
    unit, _ = unit_of(plan)
    head = ("layers", "region", "number", *(column.replace("_", " ") for column in COLUMNS))
    if plan.peak is None:
        return Sheet("region", head, [])
    regions = [_region(row, unit) for row in plan.regions]
    total = ("", "total", "", *(size(plan.totals[column], unit) for column in COLUMNS))
    return Sheet("region", head, [*regions, total])


def _region(row: RegionTotals, unit: int) -> tuple[str, ...]:
    return (row.kind, row.region, str(row.layers), *(size(getattr(row, column), unit) for column in COLUMNS))


def work_by_pass(plan: Ledger) -> Sheet:
    """Operations and bytes of a micro-batch by pass, and of what ends a step."""
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


def positions(plan: Ledger) -> Sheet:
    """The positions of a pipeline, of which those that are alike are one row; no rows without one."""
    unit, name = unit_of(plan)
    rows = []
    for position in plan.positions if plan.stages > 1 else ():
        flops = Counter[str]()
        for work in position.work:
            flops[work.phase] += sum(work.layers * product.flops for product in work.products)
        numbers = ", ".join(str(at + 1) for at in position.at)
        told = (f"{flops[phase] / TERA:.3g}" for phase in ("forward", "recompute", "backward"))
        peak = "unknown" if position.peak_bytes is None else size(position.peak_bytes, unit)
        rows.append((numbers, peak, *told))
    head = ("position on pp", f"peak, {name}", "forward, TFLOP a micro-batch", "recompute", "backward")
    return Sheet("positions", head, rows)


def sent(plan: Ledger) -> Sheet:
    """Bytes that a rank sends in a micro-batch and at the end of a step, by group and collective.

    All are in one column where all ranks count as one node, as they do without ``ranks_per_node``.
    """
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
    columns = {"MiB": "node"}
    if not plan.in_one_node:
        columns = {"inside the node, MiB": "node", "between nodes, MiB": "network"}
    rows = [
        (*key, str(sums["times"]), *(f"{sums[link] / MIB:.2f}" for link in columns.values()))
        for key, sums in links.items()
    ]
    return Sheet("sent", ("sent in a micro-batch over", "ranks", "as", "number", *columns), rows)


def time_of_step(time: Forecast) -> Sheet:
    """What a step spends its time on, the longest first."""
    step = time.step.step_s
    rows = [
        (name, f"{seconds:.4g}", f"{100 * seconds / step:.1f}") for name, seconds in time.step.longest_first.items()
    ]
    return Sheet("time", ("a step spends on", "seconds", "% of it; what runs side by side counts twice"), rows)


def step_in_words(time: Forecast) -> list[str]:
    """How long a step takes and how sure that is, what bounds it, and in what it is unlike published runs."""
    step = time.step.step_s
    asked = time.model_tflops_per_gpu
    tflops = f"{asked:.0f}" if asked >= WHOLE else f"{asked:.3g}"
    mfu = "" if time.mfu is None else f", an MFU of {100 * time.mfu:.1f} %"
    lines = [
        f"a step takes {step:.4g} s, give or take {time.bar.percent:.0f} %: "
        f"{time.tokens_per_s_per_gpu:.0f} tokens/s and {tflops} TFLOPS a GPU{mfu}",
        f"{time.step.bound_by} take longest; exposed communication {100 * time.step.exposed_s / step:.1f} %, "
        f"pipeline bubble {100 * time.step.bubble_s / step:.1f} %, "
        f"waits for the host {100 * time.step.waits_for_host_s / step:.1f} %",
    ]
    if time.processor_s is not None and time.processor_s < step:
        lines.append(f"a rank takes {time.processor_s:.4g} s of processors in a step, and waits for others besides")
    if time.bar.checked:
        lines.append(f"that is from the errors of {time.bar.checked} small steps which were measured there")
    if time.bar.extrapolated:
        lines.append(f"extrapolated, as {time.bar.nothing_near}: {', '.join(time.bar.extrapolated)}")
    return [*lines, *time.notes]


def what_to_try(advice: Sequence[Advice]) -> Sheet:
    """What to try against each cost of a step, a row for each change of the spec."""
    rows: list[tuple[str, ...]] = []
    for each in advice:
        trials = [(trial.pasted, trial.because) for trial in each.trials] or [(NOTHING, "")]
        rows += [(each.category, f"{100 * each.gain:.1f}", *trial) for trial in trials]
    head = ("what to try against", "saves at most, % of the step", "change of the spec", "because")
    return Sheet("try", head, rows)


def on_cluster(cluster: Cluster, name: str | None, plan: Ledger) -> dict[str, Any]:
    """What a plan is on a cluster: whether its peak fits a GPU, bytes left or missing, and the denominator of MFU."""
    left = left_bytes(cluster, plan)
    return {
        "name": name,
        "memory_bytes": cluster.memory_bytes,
        "overhead_bytes": overhead_bytes(cluster, plan),
        "fits": None if left is None else left >= 0,
        "left_bytes": left,
        "peak_tflops": None if plan.dtype is None else cluster.peak_tflops(plan.dtype),
    }


def on_cluster_in_words(cluster: Cluster, name: str | None, plan: Ledger) -> list[str]:
    """The same in words."""
    data = on_cluster(cluster, name, plan)
    overhead = f", {size(data['overhead_bytes'], GIB)} not for tensors" if data["overhead_bytes"] else ""
    memory = f"a GPU of {name} has {size(cluster.memory_bytes, GIB)} GiB{overhead}"
    lines = [f"{memory}: {fit_in_words(data['left_bytes'])}"]
    if data["peak_tflops"] is not None:
        lines.append(f"MFU is of {data['peak_tflops']:g} TFLOPS, its peak of products of {plan.dtype}")
    return lines


def fit_in_words(left_bytes: int | None) -> str:
    """Whether a peak fits that leaves so many bytes of a GPU."""
    if left_bytes is None:
        return "whether the peak fits is unknown"
    if left_bytes >= 0:
        return f"the peak fits, {size(left_bytes, GIB)} GiB are left"
    return f"the peak does not fit, {size(-left_bytes, GIB)} GiB are missing"


def size(nbytes: int, unit: int) -> str:
    """Bytes in a unit."""
    return f"{nbytes / unit:.3f}" if nbytes else "0"
