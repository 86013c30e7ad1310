"""Several runs beside each other: their results, and what their specs have different."""

from __future__ import annotations

from collections.abc import Sequence

from moefw.compose.spec.leaves import differences as different_leaves
from moefw.report.blocks import Block, Section, Table, Words
from moefw.report.charts import Charts
from moefw.report.reading import Run
from moefw.report.sections.outcome import measured_peak, section_means, state
from moefw.report.words import UNKNOWN, duration, number, size


def results(runs: Sequence[Run], charts: Charts) -> Section | None:
    """A column of results for each run; None for one run, of which ``outcome`` tells."""
    if len(runs) == 1:
        return None
    rows = [["outcome", *(state(run).partition(":")[0] for run in runs)]]
    for title, value in ROWS.items():
        rows.append([title, *map(value, runs)])
    kept = [row for row in rows if any(cell != UNKNOWN for cell in row[1:])]
    table = Table(head=["", *(run.name for run in runs)], rows=kept)
    return Section("results", "Results", [table])


def _steps(run: Run) -> str:
    return f"{run.buckets.last_step:,}"


def _took(run: Run) -> str:
    return duration(None if run.first_time is None or run.last_time is None else run.last_time - run.first_time)


def _bits(run: Run) -> str:
    return number(run.evaluations[-1].bits_per_byte) if run.evaluations else UNKNOWN


def _held_out(run: Run) -> str:
    return number(run.evaluations[-1].loss) if run.evaluations else UNKNOWN


def _last(name: str, run: Run) -> str:
    curve = run.buckets.get(name)
    return number(curve.last) if curve else UNKNOWN


def _mean(name: str, run: Run) -> str:
    curve = run.buckets.get(name)
    return number(curve.mean) if curve else UNKNOWN


def _step_time(run: Run) -> str:
    means = section_means(run)
    return duration(sum(means.values())) if means else UNKNOWN


def _peak(run: Run) -> str:
    peak = measured_peak(run)
    return size(peak[0]) if peak else UNKNOWN


ROWS = {
    "steps": _steps,
    "time": _took,
    "held-out text, bits a byte": _bits,
    "held-out text, nats a token": _held_out,
    "last loss, nats a token": lambda run: _last("loss", run),
    "tokens a second, mean": lambda run: _mean("tokens_per_s", run),
    "time of a step, mean": _step_time,
    "busiest expert of the last step": lambda run: _last("busiest/most", run),
    "last gradient norm": lambda run: _last("grad_norm", run),
    "measured peak of memory": _peak,
}


def differences(runs: Sequence[Run], charts: Charts) -> Section | None:
    """Values of the specs that differ between the runs."""
    if len(runs) == 1:
        return None
    rows = different_leaves([run.spec for run in runs])
    title = "What is different"
    head = ["key", *(run.name for run in runs)]
    blocks: list[Block] = [Words(["The specs are the same, but for run.dir."])]
    if rows:
        blocks = [Table(head=head, rows=rows, texts=tuple(range(len(head))), visible=60)]
    return Section("differences", title, blocks)
