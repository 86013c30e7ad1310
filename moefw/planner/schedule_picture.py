"""A picture of the schedule of a spec: when each position on pp runs its passes."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Final

from moefw.compose.assembly import Assembly
from moefw.runtime.pipeline.timeline import idle_share, timeline
from moefw.tracing.picture import draw, rows_of_schedule
from moefw.tracing.shares import Shares

COST: Final[Mapping[str, float]] = {"F": 1.0, "B": 2.0, "I": 1.0, "W": 1.0}
"""Duration of each kind of pass: a backward takes as long as two forwards, half of it for the weights."""


def draw_schedule(assembly: Assembly, path: Path) -> None:
    """Draw the schedule of a step into a PNG. Communication takes no time in it. Raises OSError."""
    count = assembly.micro_batches
    played = timeline(assembly.order(count), lambda action: COST[action.kind])
    rows = rows_of_schedule(played)
    idle = idle_share(played)
    shares = {
        row.label: Shares(compute=1.0 - share, hidden=0.0, exposed=0.0, bubble=share)
        for row, share in zip(rows, idle, strict=True)
    }
    pipeline = assembly.parts.pipeline
    name = f"{pipeline.name}, merged" if pipeline.merges and pipeline.name != "merged" else pipeline.name
    draw(
        path,
        rows,
        shares,
        title=f"{name}, {count} micro-batches",
        time="forward passes of a stage; a backward takes two",
        is_planned=True,
    )
