"""Memory of a rank, as planned and as measured."""

from __future__ import annotations

from collections.abc import Sequence

from moefw.report.blocks import Block, Section, Table, Words, bars, missing
from moefw.report.charts import Charts
from moefw.report.reading import Record, Run
from moefw.report.sections.outcome import OF_PROCESS, measured_peak, planned_peak
from moefw.report.words import readable, size


def section(runs: Sequence[Run], charts: Charts) -> Section:
    """The plan by category and by region, beside the measured peak."""
    blocks: list[Block] = []
    if len(runs) > 1:
        peaks = [(run, planned_peak(run), measured_peak(run)) for run in runs]
        rows = [[run.name, size(planned), size(measured[0] if measured else None)] for run, planned, measured in peaks]
        blocks.append(Table(head=["run", "planned peak", "measured peak"], rows=rows))
    for run in runs:
        blocks += _of_run(run, "" if len(runs) == 1 else f", {run.name}")
    return Section("memory", "Memory", blocks)


def _of_run(run: Run, of_run: str) -> list[Block]:
    plan = run.ledger.get("predicted")
    blocks: list[Block] = []
    measured = measured_peak(run)
    if isinstance(plan, dict):
        parts = _parts(plan)
        planned = planned_peak(run)
        parts += [("peak, planned", planned)] if planned else []
        parts += [(f"peak, measured {measured[1]}", measured[0])] if measured else []
        blocks.append(bars(f"Memory of a rank{of_run}", {label: nbytes for label, nbytes in parts if nbytes}, size))
        if plan.get("unknown"):
            blocks.append(Words([f"The peak is not planned: {plan['unknown']}"], quiet=True))
        blocks += _regions(plan, of_run)
    else:
        how = run.ledger.get("no_plan", "`moefw plan` makes it from the spec.")
        blocks.append(missing(f"No plan of memory was recorded{of_run}:", str(how)))
        if measured:
            blocks.append(Words([f"The peak was {size(measured[0])}, measured {measured[1]}{of_run}."]))
    if not measured:
        blocks.append(
            missing(f"No peak was measured{of_run}.", "A run that ends records it; `train --ledger` measures a step.")
        )
    elif measured[1] == OF_PROCESS:
        note = "A process holds Python, PyTorch and the text, too, which no plan has."
        blocks.append(Words([note], quiet=True))
    return blocks


def _parts(plan: Record) -> list[tuple[str, int]]:
    held = plan.get("held") or {}
    saved = (plan.get("totals") or {}).get("saved", 0)
    parts = [(name, held.get(name, 0)) for name in ("parameters", "gradients", "optimizer")]
    parts += [("optimizer, on the host", held.get("host", 0))]
    parts += [("kept by policies", plan.get("pools", 0)), ("saved between forward and backward", saved)]
    return [(name, nbytes) for name, nbytes in parts if isinstance(nbytes, int) and nbytes]


def _regions(plan: Record, of_run: str) -> list[Block]:
    """What regions save for backward, largest first."""
    regions = [row for row in plan.get("regions") or () if isinstance(row, dict) and row.get("without_policies")]
    if not regions:
        return []
    regions.sort(key=lambda row: -row["without_policies"])
    rows = [
        [
            readable(str(row.get("region", ""))),
            readable(str(row.get("kind", ""))),
            str(row.get("layers", "")),
            size(row["without_policies"]),
            size(row.get("saved", 0)),
        ]
        for row in regions
    ]
    head = ["region", "kind of layer", "layers", "without policies", "saved"]
    title = f"Planned by region, between forward and backward of a micro-batch{of_run}"
    return [Table(title=title, head=head, rows=rows, texts=(0, 1), visible=8)]
