"""Pictures of a page, drawn by Bokeh in one document: all that show steps share one axis of steps.

Colours are roles: a glyph's tag names a CSS variable, whose value ``page.js`` sets, and sets anew when the reader
changes between light and dark. Names that a run has chosen are never drawn: legends and titles are HTML.
"""

from __future__ import annotations

import math
from base64 import b64encode
from collections.abc import Mapping, Sequence
from itertools import cycle
from typing import Any, Final

import numpy as np
from attrs import evolve, frozen
from bokeh.document import Document
from bokeh.models import (
    BasicTickFormatter,
    BoxZoomTool,
    ColumnDataSource,
    FixedTicker,
    HoverTool,
    LinearColorMapper,
    NumeralTickFormatter,
    PrintfTickFormatter,
    Range1d,
    ResetTool,
)
from bokeh.plotting import figure

from moefw.report.blocks import Picture
from moefw.report.loads import as_levels, levels
from moefw.report.reading import Run
from moefw.report.smooth import smooth
from moefw.training.records.expert_load import Window

SERIES: Final = tuple(f"--series-{number}" for number in range(1, 9))
"""Roles of curves in a picture of several."""
ACCENT: Final = "--accent"
CONTRAST: Final = "--contrast"
MUTED: Final = "--muted"
MARK: Final = "--mark"
MARKED: Final = "resume, spike or bad step"
FEW_POINTS: Final = 60
"""Number of buckets up to which curves have dots."""
TICKS: Final = (1.0, 1.2, 1.5, 2.0, 2.5, 3.0, 4.0, 5.0, 6.0, 8.0)
"""Mantissas of ticks on a logarithmic axis of less than a decade; of a longer one every third."""
SIDES: Final = ("right", "left", "above", "below")
"""Where the numbers of each run stand beside the pointer."""
FRAMELESS: Final[Mapping[str, Any]] = {
    "min_border_left": 64,
    "background_fill_color": None,
    "border_fill_color": None,
    "outline_line_color": None,
}
"""Room for the numbers of an axis, and no colour from the first stroke on, which a later one would not wipe away."""
MARGIN: Final = 0.05


@frozen
class Curve:
    """A curve of ``run`` in a picture: its name in the run's buckets, label and role."""

    run: Run
    name: str
    label: str
    role: str = ACCENT


@frozen
class Points:
    """Points of a picture, with their label and role."""

    steps: Sequence[int]
    values: Sequence[float]
    label: str
    role: str = CONTRAST


class Charts:
    """Figures of a page, and what its script needs to show them."""

    def __init__(self, runs: Sequence[Run]) -> None:
        starts = [event["step"] for run in runs for event in run.of("start")]
        first = min([*starts, *(run.buckets.first_step for run in runs)])
        last = max(run.buckets.last_step for run in runs)
        pad = max((last - first) * 0.01, 0.6)
        self._steps = Range1d(start=first - pad, end=last + pad, bounds=(first - pad, last + pad))
        self._figures: list[Any] = []
        self._heats: list[dict[str, Any]] = []
        self._hovers: list[Sequence[tuple[str, Sequence[str]]]] = []
        self._sources: dict[int, ColumnDataSource] = {}
        self._columns: dict[tuple[int, str], str] = {}

    def curves(
        self,
        title: str,
        curves: Sequence[Curve],
        *,
        unit: str,
        points: Sequence[Points] = (),
        lines: Sequence[tuple[float, str, str]] = (),
        marks: Sequence[int] = (),
        log: bool = False,
        smoothed: bool = False,
        from_zero: bool = False,
        height: int = 260,
    ) -> Picture:
        """Curves over steps; a curve of buckets has a band from least to most.

        ``lines``: horizontal ones, of (value, label, role). ``marks``: steps with a vertical line. ``log``: logarithmic
        if the values span a factor of 2. ``smoothed``: draw a smooth line over a pale one.
        """
        values = [value for curve in curves for value in _extremes(curve)]
        values += [value for dots in points for value in dots.values]
        values += [value for value, _, _ in lines]
        low = 0.0 if from_zero else min(values)
        high = max(values)
        is_log = log and low > 0 and high > 2 * low
        plot = self._plot(height, low, high, is_log=is_log)
        self._marks(plot, marks)
        for value, _, role in lines:
            plot.hspan(y=[value], line_dash="dashed", line_width=1.2, tags=[role])
        for curve in curves:
            self._curve(plot, curve, smoothed=smoothed)
        self._tell(plot, curves)
        for dots in points:
            source = ColumnDataSource(
                {"step": np.array(dots.steps, np.int32), "value": np.array(dots.values, np.float32)}
            )
            renderer = plot.scatter("step", "value", source=source, size=8, tags=[dots.role], line_width=1.5)
            self._hover(plot, renderer, [(dots.label, ["value"])], mode="mouse")
        legend = [(curve.label, curve.role, "line") for curve in curves]
        legend += [(dots.label, dots.role, "dot") for dots in points]
        legend += [(label, role, "line") for _, label, role in lines]
        legend += [(MARKED, MARK, "line")] if marks else []
        return self._add(plot, title, unit, legend if len(legend) > 1 else ())

    def stack(self, title: str, curves: Sequence[Curve], *, unit: str, height: int = 300) -> Picture:
        """Means of the curves of one run, piled up."""
        run = curves[0].run
        source = self._source(run)
        below = np.zeros(run.buckets.size, np.float32)
        base = self._given(run, "stack 0", below)
        bases = [base]
        for number, curve in enumerate(curves, 1):
            below = below + np.nan_to_num(run.buckets.columns(curve.name)["mean"])
            bases.append(self._given(run, f"stack {number}", below))
        plot = self._plot(height, 0.0, float(below.max()), is_log=False)
        for curve, lower, upper in zip(curves, bases, bases[1:]):
            plot.varea("step", lower, upper, source=source, fill_alpha=0.85, tags=[curve.role])
        self._tell(plot, curves)
        return self._add(plot, title, unit, [(curve.label, curve.role, "line") for curve in curves])

    def lanes(self, title: str, lanes: Mapping[str, Sequence[int]], roles: Mapping[str, str]) -> Picture:
        """Steps of events, a lane for each kind."""
        names = list(lanes)
        height = 60 + 26 * len(names)
        plot = self._plot(height, -0.5, len(names) - 0.5, is_log=False, pad=False)
        plot.yaxis.ticker = FixedTicker(ticks=list(range(len(names))))
        plot.yaxis.major_label_overrides = {len(names) - 1 - place: name for place, name in enumerate(names)}
        plot.ygrid.ticker = plot.yaxis.ticker
        for place, name in enumerate(names):
            steps = np.array(lanes[name], np.int32)
            source = ColumnDataSource({"step": steps, "lane": np.full(len(steps), len(names) - 1 - place, np.float32)})
            renderer = plot.scatter("step", "lane", source=source, size=9, tags=[roles.get(name, ACCENT)])
            self._hover(plot, renderer, [(name, [])], mode="mouse")
        return self._add(plot, title, "")

    def heat_map(self, title: str, windows: Sequence[Window]) -> Picture:
        """Load of layers by experts, of one window of steps at a time; ``page.js`` moves between them."""
        layers = windows[-1].layers
        num_experts = windows[-1].load_LE.shape[1]
        scale = levels(max(float(window.load_LE.max()) for window in windows))
        images = [as_levels(window.load_LE[::-1], scale) for window in windows]  # rows go up, and layer 0 is at the top
        row_height = max(min(340 // len(layers), 26), 5)
        plot: Any = figure(
            height=row_height * len(layers) + 46,
            sizing_mode="stretch_width",
            x_range=Range1d(start=-0.5, end=num_experts - 0.5),
            y_range=Range1d(start=-0.5, end=len(layers) - 0.5),
            toolbar_location=None,
            **FRAMELESS,
            tools=[],
            x_axis_label="expert",
        )
        source = ColumnDataSource({"image": [images[-1]]})
        mapper = LinearColorMapper(low=-0.5, high=255.5, palette=["#808080"] * 2)
        plot.image(
            "image",
            source=source,
            x=-0.5,
            y=-0.5,
            dw=num_experts,
            dh=len(layers),
            color_mapper=mapper,
            name=f"heat {len(self._heats)}",
        )
        plot.add_tools(HoverTool(tooltips=None, name=f"hover of heat {len(self._heats)}"))
        every = math.ceil(len(layers) * 14 / (row_height * len(layers)))
        rows = range(0, len(layers), every)
        plot.yaxis.ticker = FixedTicker(ticks=[len(layers) - 1 - row for row in rows])
        plot.yaxis.major_label_overrides = {len(layers) - 1 - row: f"layer {layers[row]}" for row in rows}
        plot.xaxis.formatter = NumeralTickFormatter(format="0")
        plot.grid.visible = False
        self._heats.append(
            {
                "first": [window.first for window in windows],
                "last": [window.last for window in windows],
                "layers": layers,
                "experts": num_experts,
                "levels": [round(float(level), 4) for level in scale],
                "loads": b64encode(np.stack(images).tobytes()).decode(),
            }
        )
        picture = self._add(plot, title, "share of tokens, 1.0 is fair")
        return evolve(picture, heat=len(self._heats) - 1, windows=len(windows))

    def data(self) -> dict[str, Any]:
        """What the script of the page needs, as plain data."""
        if not self._figures:
            return {"documents": {}, "items": [], "heats": [], "hovers": []}
        document = Document()
        with document.models.freeze():  # which then looks for the models of all figures once
            for plot in self._figures:
                document.add_root(plot)
        places = {plot.id: f"picture-{number}" for number, plot in enumerate(self._figures)}
        item = {"docid": "report", "roots": places, "root_ids": list(places)}
        more = {"heats": self._heats, "hovers": self._hovers}
        return {"documents": {"report": document.to_json(deferred=False)}, "items": [item], **more}

    def _plot(self, height: int, low: float, high: float, *, is_log: bool, pad: bool = True) -> Any:
        plot = figure(
            height=height,
            sizing_mode="stretch_width",
            x_range=self._steps,
            y_range=_range(low, high, is_log=is_log) if pad else Range1d(start=low, end=high),
            y_axis_type="log" if is_log else "linear",
            toolbar_location=None,
            **FRAMELESS,
            tools=[BoxZoomTool(dimensions="width"), ResetTool()],
            x_axis_label="step",
        )
        plot.xaxis.formatter = NumeralTickFormatter(format="0,0")
        if is_log:
            plot.yaxis.ticker = FixedTicker(ticks=_log_ticks(low, high))
            plot.ygrid.ticker = plot.yaxis.ticker
            plot.yaxis.formatter = BasicTickFormatter(use_scientific=False)
        else:
            large = high >= 1000
            plot.yaxis.formatter = NumeralTickFormatter(format="0,0") if large else PrintfTickFormatter(format="%.4g")
        return plot

    def _curve(self, plot: Any, curve: Curve, *, smoothed: bool) -> None:
        run = curve.run
        source = self._source(run)
        columns = run.buckets.columns(curve.name)
        names = {key: self._given(run, f"{curve.name} {key}", values) for key, values in columns.items()}
        if "least" in names:
            plot.varea("step", names["least"], names["most"], source=source, fill_alpha=0.22, tags=[curve.role])
        pale = smoothed and run.buckets.size > FEW_POINTS
        plot.line(
            "step",
            names["mean"],
            source=source,
            line_width=1.0 if pale else 1.7,
            line_alpha=0.45 if pale else 1.0,
            tags=[curve.role],
        )
        if pale:
            line = self._given(run, f"{curve.name} smooth", smooth(columns["mean"]))
            plot.line("step", line, source=source, line_width=2.2, tags=[curve.role])
        if run.buckets.size <= FEW_POINTS:
            plot.scatter("step", names["mean"], source=source, size=5, tags=[curve.role])

    def _tell(self, plot: Any, curves: Sequence[Curve]) -> None:
        """Show the numbers of the bucket at the pointer, of each run beside an invisible bar as wide as a bucket."""
        runs = {id(curve.run): curve.run for curve in curves}.values()
        for run, side in zip(runs, cycle(SIDES)):
            source = self._source(run)
            middle = (plot.y_range.start + plot.y_range.end) / 2
            bars = plot.vbar(
                "step",
                width=run.buckets.width,
                bottom=middle,
                top=middle,
                source=source,
                line_alpha=0,
                fill_alpha=0,
            )
            rows: list[tuple[str, Sequence[str]]] = []
            for curve in curves:
                if curve.run is run:
                    columns = run.buckets.columns(curve.name).items()
                    rows.append((curve.label, [self._given(run, f"{curve.name} {key}", v) for key, v in columns]))
            self._hover(plot, bars, rows, mode="vline", attachment=side)

    def _hover(
        self,
        plot: Any,
        renderer: Any,
        rows: Sequence[tuple[str, Sequence[str]]],
        *,
        mode: Any,
        attachment: Any = "horizontal",
    ) -> None:
        """Show rows of (label, columns) at the pointer; ``page.js`` writes them, as text, in the page's colours."""
        name = f"hover {len(self._hovers)}"
        self._hovers.append(rows)
        plot.add_tools(
            HoverTool(
                renderers=[renderer],
                tooltips=None,
                name=name,
                mode=mode,
                attachment=attachment,
                point_policy="follow_mouse",
                show_arrow=False,
            )
        )

    def _marks(self, plot: Any, steps: Sequence[int]) -> None:
        if steps:
            plot.vspan(x=list(steps), line_dash="dotted", line_width=1.2, line_alpha=0.6, tags=[MARK])

    def _source(self, run: Run) -> ColumnDataSource:
        """Columns of a run, which all of its pictures share."""
        if id(run) not in self._sources:
            buckets = run.buckets
            first = buckets.first_step + np.arange(buckets.size) * buckets.width
            last = np.minimum(first + buckets.width - 1, buckets.last_step)
            self._sources[id(run)] = ColumnDataSource(
                {
                    "step": ((first + last) / 2).astype(np.float32),
                    "first": first.astype(np.int32),
                    "last": last.astype(np.int32),
                }
            )
        return self._sources[id(run)]

    def _given(self, run: Run, what: str, values: Any) -> str:
        """Name of a column with these values in the source of a run; names are numbers, as those of a run are text."""
        key = (id(run), what)
        if key not in self._columns:
            self._columns[key] = f"column{len(self._columns)}"
            self._source(run).data[self._columns[key]] = values
        return self._columns[key]

    def _add(self, plot: Any, title: str, unit: str, legend: Sequence[tuple[str, str, str]] = ()) -> Picture:
        self._figures.append(plot)
        return Picture(number=len(self._figures) - 1, height=plot.height, title=title, unit=unit, legend=legend)


def _extremes(curve: Curve) -> tuple[float, float]:
    known = curve.run.buckets.curves[curve.name]
    return known.lowest[0], known.highest[0]


def _range(low: float, high: float, *, is_log: bool) -> Range1d:
    """Axis from low to high with a margin; not above 0 where all values are positive."""
    if is_log:
        factor = (high / low) ** MARGIN
        return Range1d(start=low / factor, end=high * factor)
    pad = MARGIN * (high - low) or abs(high) * MARGIN or 1.0
    return Range1d(start=low if low == 0 else low - pad, end=high + pad)


def _log_ticks(low: float, high: float) -> list[float]:
    """Round numbers from low to high, about eight at most."""
    decades = math.log10(high / low)
    mantissas = TICKS if decades < 0.8 else (1.0, 2.0, 5.0) if decades < 2.5 else (1.0,)
    exponents = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
    ticks = [mantissa * 10.0**exponent for exponent in exponents for mantissa in mantissas]
    return [tick for tick in ticks if low * 0.98 <= tick <= high * 1.02]
