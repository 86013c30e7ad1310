"""Events on the axis of steps, and in the order of time."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Final

from moefw.report.blocks import Block, Section, Table, missing
from moefw.report.charts import ACCENT, CONTRAST, MARK, MUTED, Charts
from moefw.report.reading import Record, Run
from moefw.report.words import count, duration, number, size

KINDS: Final = {
    "start": ("start", ACCENT),
    "resume": ("resume", MARK),
    "evaluation": ("evaluation", MUTED),
    "checkpoint": ("checkpoint", MUTED),
    "loss_spike": ("loss spike", CONTRAST),
    "skipped_step": ("skipped step", CONTRAST),
    "rerun_step": ("step run again", CONTRAST),
    "full_disk": ("full disk", CONTRAST),
    "note": ("note", MUTED),
    "stop": ("stop", MARK),
    "end": ("end", ACCENT),
}
"""Kinds of event, with the label of their lane and the role of its colour, from top to bottom."""
OTHER: Final = "other"
MOST_ROWS: Final = 400


def section(runs: Sequence[Run], charts: Charts) -> Section:
    """Lanes of events and their table, for each run."""
    blocks: list[Block] = []
    for run in runs:
        blocks += _of_run(run, charts, "" if len(runs) == 1 else f", {run.name}")
    return Section("events", "Events", blocks)


def _of_run(run: Run, charts: Charts, of_run: str) -> list[Block]:
    if not run.events:
        return [missing(f"No events were recorded{of_run}.", "Runs of this version record them in events.jsonl.")]
    lanes = {label: [event["step"] for event in run.of(kind)] for kind, (label, _) in KINDS.items()}
    lanes[OTHER] = [event["step"] for event in run.events if event["event"] not in KINDS]
    kept = {label: steps for label, steps in lanes.items() if steps}
    picture = charts.lanes(f"Events{of_run}", kept, dict(KINDS.values()))
    shown = run.events[-MOST_ROWS:]
    rows = [[_clock(event), f"{event['step']:,}", _label(event), in_words(event)] for event in shown]
    title = f"The last {MOST_ROWS:,} of {len(run.events):,}" if len(run.events) > MOST_ROWS else ""
    return [
        picture,
        Table(title=title, head=["time", "after step", "event", ""], rows=rows, texts=(0, 2, 3), visible=16),
    ]


def _clock(event: Record) -> str:
    when = event.get("time")
    return time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(when)) if isinstance(when, int | float) else ""


def _label(event: Record) -> str:
    kind = event["event"]
    return KINDS[kind][0] if kind in KINDS else str(kind)


def in_words(event: Record) -> str:
    """An event in words; empty for one of a stranger that gives no reason."""
    match event["event"]:
        case "start":
            ranks = event.get("ranks")
            return count(ranks, "rank") if isinstance(ranks, int) else ""
        case "resume":
            lost = event.get("lost_steps")
            parts = [f"from {event.get('checkpoint', 'a checkpoint')}"]
            parts += [f"{count(lost, 'step')} lost"] if isinstance(lost, int) else []
            parts += map(str, event.get("changes") or ())
            return "; ".join(parts)
        case "evaluation":
            parts = [f"{number(event.get('loss'))} nats a token"]
            if event.get("bits_per_byte") is not None:
                parts.append(f"{number(event['bits_per_byte'])} bits a byte")
            return f"{', '.join(parts)}, in {duration(event.get('seconds'))}"
        case "checkpoint":
            return f"{event.get('path', '')}, in {duration(event.get('seconds'))}"
        case "end":
            peak = (event.get("memory") or {}).get("peak_bytes")
            parts = [str(event.get("outcome", "")), str(event.get("reason") or "")]
            parts += [f"peak of {size(peak)}"] if isinstance(peak, int) else []
            return "; ".join(part for part in parts if part)
        case _:
            return "; ".join(str(event[key]) for key in ("path", "reason", "checkpoint") if event.get(key))
