"""Pictures of steps: ranks down, time across, passes in colours and bubbles white; below, shares of the time."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import groupby, pairwise
from pathlib import Path
from typing import Any, Final

from attrs import frozen

from moefw.core.records import PASSES
from moefw.runtime.pipeline.timeline import Timed
from moefw.system.files import replaced_file
from moefw.tracing.rank_file import RankTrace
from moefw.tracing.shares import Interval, Shares, mean, waits, without
from moefw.tracing.spans import Span
from moefw.tracing.whole import launches, travelling_since

COLOURS: Final[Mapping[str, str]] = {
    "forward": "#4c78a8",
    "backward": "#f2a03d",
    "weight gradients": "#54a24b",
    "other compute": "#bab0ac",
    "exposed communication": "#d6404e",
    "movement": "#2f9c95",
    "gather": "#e28ab4",
    "reduction": "#8e6bb0",
    "collective": "#7a5c44",
}
ON_WIRE: Final[Mapping[str, str]] = {
    "movement": "wire: rows",
    "gather": "wire: parameters",
    "reduction": "wire: gradients",
    "collective": "wire: other",
}
"""Names of what travels, in a legend."""
BETWEEN: Final = "#eeeeee"
"""Colour of what lies between two traced steps."""
SHARES: Final[Mapping[str, str]] = {
    "compute": "#8fb0d3",
    "hidden": "#2f9c95",
    "exposed": "#d6404e",
    "bubble": "#ffffff",
}
LABELS: Final[Mapping[str, str]] = {
    "compute": "compute alone",
    "hidden": "compute beside communication",
    "exposed": "exposed communication",
    "bubble": "bubble",
}
MOST_RANKS: Final = 32
"""The most ranks of which a picture has a row. Of more, as many are drawn, evenly chosen."""
WIDTH_IN: Final = 14.0
ROW_IN: Final = 0.42
COMPUTE_HEIGHT: Final = 0.56
WIRE_HEIGHT: Final = 0.22
_WIDE: Final = 0.011
"""Share of the width that a bar needs to hold the number of its micro-batch."""


@frozen
class Bar:
    """What a rank does between two times. ``text``: what it holds, if it is wide enough.

    ``top`` and ``bottom``: the part of the row's height that it takes, from 0 at the top to 1.
    """

    begin: float
    end: float
    colour: str
    text: str = ""
    top: float = 0.0
    bottom: float = 1.0


@frozen
class Row:
    """A rank: what it computes, what of its time is exposed communication or a bubble, and what travels."""

    label: str
    compute: Sequence[Bar]
    wire: Sequence[Bar] = ()


def rows_of_trace(ranks: Sequence[RankTrace]) -> list[Row]:
    """Rows of traced ranks, on one clock, in milliseconds."""
    last_launches = launches(ranks)

    def row(rank: RankTrace) -> Row:
        not_ready, exposed = waits(rank.spans, last_launches)
        own_stages = sorted({span.stage for span in rank.spans if span.stage is not None})
        bars = [*_between_steps(rank.spans)]
        bars += [bar for span in rank.spans for bar in _bars(span, own_stages, not_ready)]
        bars += [Bar(begin / 1e6, end / 1e6, COLOURS["exposed communication"]) for begin, end in exposed]
        wire = [
            Bar(travelling_since(span, last_launches) / 1e6, span.end_ns / 1e6, COLOURS[span.kind])
            for span in rank.spans
            if span.kind in COLOURS
        ]
        return Row(f"rank {rank.head.rank}", bars, wire)

    return [row(rank) for rank in ranks]


def _between_steps(spans: Sequence[Span]) -> Iterator[Bar]:
    """Yield what is no part of a traced step, and so of no share."""
    steps = [span for span in spans if span.kind == "step"]
    for before, after in pairwise(steps):
        yield Bar(before.end_ns / 1e6, after.begin_ns / 1e6, BETWEEN)


def _bars(span: Span, own_stages: Sequence[int], not_ready: Sequence[Interval]) -> Iterator[Bar]:
    """Yield the bars of a pass or a section, without the time in which it waits for another rank."""
    colour = COLOURS["other compute"]
    text = ""
    if span.kind == "pass":
        assert span.stage is not None, "a pass is that of a stage"
        colour = _shade(COLOURS[span.name], own_stages.index(span.stage))
        text = str(span.micro_batch)
    elif span.kind != "section":
        return
    for begin, end in without([(span.begin_ns, span.end_ns)], not_ready):
        yield Bar(begin / 1e6, end / 1e6, colour, text)


def rows_of_schedule(played: Sequence[Sequence[Timed]]) -> list[Row]:
    """Rows of a planned schedule: see :func:`moefw.runtime.pipeline.timeline.timeline`.

    The passes of a pair share its time, one above the other.
    """

    def row(rank: int, entries: Sequence[Timed]) -> Row:
        own_stages = sorted({action.stage for _, _, entry in entries for action in entry.passes})
        bars = []
        for begin, end, entry in entries:
            height = 1.0 / len(entry.passes)
            for place, action in enumerate(entry.passes):
                colour = _shade(COLOURS[PASSES[action.kind]], own_stages.index(action.stage))
                text = str(action.micro_batch)
                bars.append(Bar(begin, end, colour, text, place * height, (place + 1) * height))
        return Row(f"pp {rank}", bars)

    return [row(rank, entries) for rank, entries in enumerate(played)]


def _shade(colour: str, place: int) -> str:
    """Colour of the passes of a rank's stage at this place among its own: later ones are lighter."""
    white = 1.0 - 0.65**place
    parts = (int(colour[at : at + 2], 16) for at in (1, 3, 5))
    return "#" + "".join(f"{round(part + (255 - part) * white):02x}" for part in parts)


def draw(
    path: Path, rows: Sequence[Row], shares: Mapping[str, Shares], *, title: str, time: str, is_planned: bool = False
) -> None:
    """Write a PNG. ``time``: the label of the axis. ``shares``: those of rows, by their labels. Raises OSError."""
    from matplotlib.figure import Figure

    shown = _evenly(rows, MOST_RANKS)
    told = {row.label: shares[row.label] for row in shown if row.label in shares}
    if len(shares) > 1:
        told["mean"] = mean([*shares.values()])
    heights = [ROW_IN * len(shown) + 0.5, 0.3 * len(told) + 0.5]
    figure: Any = Figure(figsize=(WIDTH_IN, sum(heights) + 1.3), dpi=110, layout="constrained")
    of_time, of_shares = figure.subplots(2, 1, height_ratios=heights)
    _draw_rows(of_time, shown)
    of_time.set_xlabel(time)
    drawn = title if len(shown) == len(rows) else f"{title}; {len(shown)} of {len(rows)} ranks"
    of_time.set_title(drawn, loc="left", fontsize=11, pad=24)
    _add_legend_of_rows(of_time, shown)
    _draw_shares(of_shares, told, is_planned=is_planned)
    with replaced_file(path) as scratch:
        figure.savefig(scratch, format="png")


def _evenly(rows: Sequence[Row], most: int) -> list[Row]:
    if len(rows) <= most:
        return [*rows]
    return [rows[number * len(rows) // most] for number in range(most)]


def _draw_rows(axes: Any, rows: Sequence[Row]) -> None:
    begin = min((bar.begin for row in rows for bar in row.compute), default=0.0)
    end = max((bar.end for row in rows for bar in row.compute), default=1.0)
    for place, row in enumerate(rows):
        has_wire = bool(row.wire)
        middle = place - (0.5 * WIRE_HEIGHT if has_wire else 0.0)
        _draw_bars(axes, row.compute, middle, COMPUTE_HEIGHT)
        for bar in _widest_of_runs(row.compute):
            if bar.text and bar.end - bar.begin > _WIDE * (end - begin):
                x = (bar.begin + bar.end) / 2
                y = middle + COMPUTE_HEIGHT * ((bar.top + bar.bottom) / 2 - 0.5)
                axes.text(x, y, bar.text, ha="center", va="center", fontsize=7, color="white")
        if has_wire:
            _draw_bars(axes, row.wire, middle + 0.5 * (COMPUTE_HEIGHT + WIRE_HEIGHT) + 0.03, WIRE_HEIGHT)
    axes.set_xlim(begin, end)
    axes.set_ylim(len(rows) - 0.4, -0.6)
    axes.set_yticks(range(len(rows)), [row.label for row in rows])
    axes.tick_params(axis="y", length=0)
    axes.spines[["top", "right", "left"]].set_visible(False)


def _widest_of_runs(bars: Sequence[Bar]) -> Iterator[Bar]:
    """Yield the widest of each run of bars that hold the same, such as the phases of a pass."""
    for _, alike in groupby(bars, lambda bar: (bar.colour, bar.text)):
        yield max(alike, key=lambda bar: bar.end - bar.begin)


def _draw_bars(axes: Any, bars: Sequence[Bar], middle: float, height: float) -> None:
    """Draw bars in their order: later ones cover earlier ones."""
    for (top, bottom), alike in groupby(bars, lambda bar: (bar.top, bar.bottom)):
        drawn = [*alike]
        axes.broken_barh(
            [(bar.begin, bar.end - bar.begin) for bar in drawn],
            (middle + height * (top - 0.5), height * (bottom - top)),
            facecolors=[bar.colour for bar in drawn],
            edgecolors="white",
            linewidth=0.3,
        )


def _add_legend_of_rows(axes: Any, rows: Sequence[Row]) -> None:
    used = {bar.colour for row in rows for bar in (*row.compute, *row.wire)}
    named = [(ON_WIRE.get(name, name), colour) for name, colour in COLOURS.items() if colour in used]
    _add_legend(axes, [*named, ("bubble", "white")])


def _add_legend(axes: Any, entries: Iterable[tuple[str, str]]) -> None:
    from matplotlib.patches import Patch

    handles = [Patch(facecolor=colour, edgecolor="#999999", linewidth=0.5, label=name) for name, colour in entries]
    axes.legend(
        handles=handles, loc="lower left", bbox_to_anchor=(0.0, 1.0), ncols=len(handles), fontsize=8, frameon=False
    )


def _draw_shares(axes: Any, shares: Mapping[str, Shares], *, is_planned: bool) -> None:
    """Draw a bar for each rank, cut into its shares."""
    names = ("compute", "bubble") if is_planned else tuple(SHARES)
    for place, each in enumerate(shares.values()):
        begin = 0.0
        for name in names:
            share = getattr(each, name)
            axes.barh(place, share, left=begin, height=0.7, color=SHARES[name], edgecolor="#999999", linewidth=0.4)
            if share >= 0.03:
                axes.text(begin + share / 2, place, f"{share:.0%}", ha="center", va="center", fontsize=7)
            begin += share
    axes.set_xlim(0.0, 1.0)
    axes.set_ylim(len(shares) - 0.4, -0.6)
    axes.set_yticks(range(len(shares)), list(shares))
    axes.tick_params(axis="y", length=0)
    axes.set_xlabel("share of the time")
    axes.spines[["top", "right", "left"]].set_visible(False)
    labels = {**LABELS, "compute": "compute"} if is_planned else LABELS
    _add_legend(axes, [(labels[name], SHARES[name]) for name in names])
