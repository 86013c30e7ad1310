"""Plots of a run, drawn without a display and without matplotlib's global state."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from moefw.system.files import replaced_file

if TYPE_CHECKING:
    import numpy as np
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    Floats = np.ndarray[tuple[int], np.dtype[np.float64]]

_INK = "#22272e"
_FAINT = "#8a919c"
_GRID = "#e7e9ed"
_TRAIN = "#2a6fb0"
_EVAL = "#c8502d"
_ZLIB = "#5f6672"
_COLD_TO_HOT = ("#2f6296", "#7fa9cf", "#f6f4f1", "#e39a7b", "#b8432a")
_OVER = "#7a1d12"
_NUMBER: Any = {"color": _INK, "fontsize": 9}
_MAX_NUMBERED_EXPERTS = 32
_MAX_DOTTED_STEPS = 50
_LABEL_GAP = 0.055
"""Minimum distance of two labels at the right edge, as a share of the axis."""


class _Label(NamedTuple):
    y: float
    text: str
    color: str


class _Inches(NamedTuple):
    """Places axes by inches from the lower left corner of a figure of this size."""

    width: float
    height: float

    def __call__(self, left: float, bottom: float, width: float, height: float) -> tuple[float, float, float, float]:
        return left / self.width, bottom / self.height, width / self.width, height / self.height


def plot_loss(records: Sequence[Mapping[str, Any]], out: Path, *, zlib_bits: float | None) -> None:
    """Draw the loss over steps into ``out``, a PNG of 1200 x 700 pixels; its directory is created.

    ``records`` are those of ``read_metrics``: ``step``, ``loss`` (nats per token), optional ``eval_loss`` (nats per
    token), ``eval_bits_per_byte`` and ``lr``; None and missing values leave a gap. If any record has both values of
    an evaluation, they give the bytes per token. Then all is drawn in bits per byte, with a line at ``zlib_bits``, the
    bits that zlib needs for a byte of the evaluation text. Otherwise the axis is nats per token, which cannot be
    compared with zlib, and its line is left out. The axis is logarithmic if the loss at least halves.
    """
    from matplotlib.figure import Figure
    from matplotlib.layout_engine import ConstrainedLayoutEngine
    from matplotlib.ticker import MaxNLocator

    bits_per_byte = _bits_per_byte_of_a_nat(records)
    in_bits = bits_per_byte is not None
    steps, loss = _series(records, "loss")
    eval_steps, evals = _series(records, "eval_bits_per_byte" if in_bits else "eval_loss")
    lr_steps, lr = _series(records, "lr")
    if bits_per_byte is not None:
        loss = loss * bits_per_byte

    layout = ConstrainedLayoutEngine(w_pad=0.12, h_pad=0.1)
    figure = Figure(figsize=(8, 14 / 3), dpi=150, facecolor="white", layout=layout)
    if (lr > 0).any():
        axes, lr_axes = figure.subplots(2, 1, sharex=True, height_ratios=(7, 1))
        _draw_lr(lr_axes, lr_steps, lr)
        axes.tick_params(bottom=False)
    else:
        axes = lr_axes = figure.subplots()
    _clean(axes)
    axes.grid(axis="y", color=_GRID, linewidth=0.8)
    _title(axes, "Training and evaluation loss" if evals.size else "Training loss")
    lr_axes.set_xlabel("step", color=_INK, fontsize=10.5)
    lr_axes.xaxis.set_major_locator(MaxNLocator(nbins=8, integer=True, min_n_ticks=1))

    labels: list[_Label] = []
    if loss.size:
        smooth = _smooth(loss)
        marker = "o" if loss.size <= _MAX_DOTTED_STEPS else ""
        axes.plot(steps, loss, color=_TRAIN, alpha=0.28, linewidth=0.8, marker=marker, markersize=4)
        axes.plot(steps, smooth, color=_TRAIN, linewidth=2.0, solid_capstyle="round")
        labels += _last(smooth, "training", _TRAIN)
    if evals.size:
        dots = {"marker": "o", "markersize": 7, "markeredgecolor": "white", "markeredgewidth": 1.2}
        axes.plot(eval_steps, evals, color=_EVAL, linestyle="none", zorder=4, clip_on=False, **dots)
        labels += _last(evals, "evaluation", _EVAL)
    if in_bits and zlib_bits is not None:
        axes.axhline(zlib_bits, color=_ZLIB, linewidth=1.2, linestyle=(0, (5, 3)), zorder=1.5)
        labels.append(_Label(zlib_bits, f"zlib {zlib_bits:.2f}", _ZLIB))
    unit = "bits per byte" if in_bits else "nats per token"
    axes.set_ylabel(f"{unit}, log scale" if _log_if_it_halves(axes, loss) else unit, color=_INK, fontsize=10.5)
    _label_right(axes, labels)
    _save(figure, out)


def _bits_per_byte_of_a_nat(records: Sequence[Mapping[str, Any]]) -> float | None:
    """Bits per byte of one nat per token, by the last evaluation; None if there is none."""
    for record in reversed(records):
        bits = record.get("eval_bits_per_byte")
        nats = record.get("eval_loss")
        if bits and nats and math.isfinite(bits / nats):
            return float(bits / nats)
    return None


def plot_expert_load(load_LE: Sequence[Sequence[float]], layers: Sequence[int], out: Path, *, title: str) -> None:
    """Draw a heat map of MoE layers by experts into ``out``, a PNG at 150 dots per inch; its directory is created.

    ``load_LE`` holds the tokens of each expert, or any multiple of them: every row is divided by its mean, so 1.0 is
    a fair share, and a row without tokens is 0. ``layers`` are the rows' layer numbers. The colours end at 2, with
    one more for larger shares. Cells show their numbers for up to 32 experts. The largest share of a row, its
    max/mean, is written at its right.
    """
    import numpy as np
    from matplotlib.cm import ScalarMappable
    from matplotlib.colors import LinearSegmentedColormap, Normalize
    from matplotlib.figure import Figure

    load = np.asarray(load_LE, dtype=np.float64)
    assert load.ndim == 2, "load_LE is one row of experts for each layer"
    assert len(layers) == load.shape[0], f"{len(layers)} layer numbers for {load.shape[0]} rows"
    mean_L1 = load.mean(axis=1, keepdims=True)
    share_LE = np.divide(load, mean_L1, out=np.zeros_like(load), where=mean_L1 > 0)
    num_layers, num_experts = share_LE.shape
    numbered = num_experts <= _MAX_NUMBERED_EXPERTS

    cell_width = min(0.46 if numbered else 0.15, 12.5 / num_experts)
    grid_width = max(cell_width * num_experts, 4.0)
    row_height = min(0.36, 12.0 / num_layers)
    place = _Inches(grid_width + 1.75, row_height * num_layers + 1.7)
    figure = Figure(figsize=(place.width, place.height), dpi=150, facecolor="white")
    axes = figure.add_axes(place(0.8, 1.15, grid_width, row_height * num_layers))
    colours = LinearSegmentedColormap.from_list("load", _COLD_TO_HOT).with_extremes(over=_OVER)
    norm = Normalize(0.0, 2.0)
    if numbered:
        gap = 1.5
    elif num_experts <= 4 * _MAX_NUMBERED_EXPERTS:
        gap = 0.6
    else:
        gap = 0.0  # cells are too narrow for lines between them
    axes.pcolormesh(share_LE, norm=norm, cmap=colours, edgecolors="white", linewidth=gap)
    axes.invert_yaxis()
    axes.spines[:].set_visible(False)
    axes.tick_params(colors=_INK, labelsize=9, length=0)
    every = math.ceil(num_experts / 32)
    axes.set_xticks(np.arange(0, num_experts, every) + 0.5, [str(e) for e in range(0, num_experts, every)])
    every = math.ceil(0.15 / row_height)
    rows = range(0, num_layers, every)
    axes.set_yticks([row + 0.5 for row in rows], [f"layer {layers[row]}" for row in rows])
    axes.set_xlabel("expert", color=_INK, fontsize=10)
    _title(axes, title)

    beside = axes.get_yaxis_transform()
    for row in rows:
        axes.text(1.0, row + 0.5, f"  {share_LE[row].max():.2f}", transform=beside, va="center", **_NUMBER)
    axes.annotate("max/mean", (1.0, 1.0), (4, 5), xycoords="axes fraction", textcoords="offset points", **_NUMBER)
    if numbered:
        for (row, expert), share in np.ndenumerate(share_LE):
            ink = "white" if abs(share - 1.0) > 0.62 else _INK
            axes.text(expert + 0.5, row + 0.5, f"{share:.2f}", color=ink, fontsize=8, ha="center", va="center")

    bar = figure.colorbar(
        ScalarMappable(norm, colours),
        cax=figure.add_axes(place(0.8, 0.5, 2.8, 0.12)),
        orientation="horizontal",
        extend="max",
    )
    bar.outline.set_visible(False)
    bar.set_ticks([0.0, 0.5, 1.0, 1.5, 2.0])
    bar.ax.tick_params(colors=_INK, labelsize=8.5, length=0)
    bar.set_label("share of tokens (1.0 = fair)", color=_INK, fontsize=9)
    _save(figure, out)


def _series(records: Sequence[Mapping[str, Any]], key: str) -> tuple[Floats, Floats]:
    """Steps and the values of a key, NaN for None. Records without the key are left out."""
    import numpy as np

    rows = [(record["step"], record[key]) for record in records if key in record]
    return np.array([step for step, _ in rows], dtype=np.float64), np.array([v for _, v in rows], dtype=np.float64)


def _smooth(values: Floats) -> Floats:
    """Local linear fit at each step, with Gaussian weights over about a thirtieth of the run; NaN stays NaN.

    A line instead of a mean, as a mean is biased at the ends and on the steep start (Cleveland 1979, LOWESS).
    """
    import numpy as np

    width = min(max(len(values) / 64, 1.0), 200.0)
    reach = math.ceil(3 * width)
    offset = np.arange(-reach, reach + 1)
    kernel = np.exp(-0.5 * (offset / width) ** 2)
    known = np.isfinite(values)
    filled = np.where(known, values, 0.0)

    def moment(series: Floats, power: int) -> Floats:
        return np.convolve(series, kernel * (-offset) ** power)[reach : reach + len(values)]

    weights = known.astype(np.float64)
    w0, w1, w2 = (moment(weights, power) for power in range(3))
    v0 = moment(filled, 0)
    v1 = moment(filled, 1)
    spread = w0 * w2 - w1**2
    lone = spread < 1e-9
    line = (w2 * v0 - w1 * v1) / np.where(lone, 1.0, spread)
    return np.where(known, np.where(lone, values, line), np.nan)


def _log_if_it_halves(axes: Axes, loss: Floats) -> bool:
    """Make the axis logarithmic, with plain numbers at its ticks, if the loss halves. Return whether it was done."""
    import numpy as np

    known = loss[np.isfinite(loss)]
    if not known.size or known.min() <= 0 or known.max() < 2 * known.min():
        return False
    from matplotlib.ticker import LogLocator, NullLocator, StrMethodFormatter

    axes.set_yscale("log")
    ticks = (1, 1.2, 1.5, 2, 2.5, 3, 4, 5, 6, 8) if known.max() < 20 * known.min() else (1,)
    axes.yaxis.set_major_locator(LogLocator(subs=ticks))
    axes.yaxis.set_minor_locator(NullLocator())
    axes.yaxis.set_major_formatter(StrMethodFormatter("{x:g}"))
    return True


def _draw_lr(axes: Axes, steps: Floats, lr: Floats) -> None:
    import numpy as np

    _clean(axes)
    axes.plot(steps, lr, color=_FAINT, linewidth=1.0)
    axes.fill_between(steps, lr, color=_FAINT, alpha=0.15, linewidth=0)
    peak = float(np.nanmax(lr))
    axes.set_ylim(0, 1.1 * peak)
    axes.set_yticks([0, peak], ["0", f"{peak:.1e}".replace("e-0", "e-")])
    axes.tick_params(axis="y", labelcolor=_FAINT, labelsize=8)
    axes.set_ylabel("learning\nrate", color=_FAINT, fontsize=8.5)


def _clean(axes: Axes) -> None:
    axes.spines[["top", "right"]].set_visible(False)
    axes.spines[["left", "bottom"]].set_color(_FAINT)
    axes.tick_params(labelcolor=_INK, labelsize=9, color=_FAINT, length=3)
    axes.set_axisbelow(True)
    axes.margins(x=0.01)


def _last(values: Floats, name: str, color: str) -> list[_Label]:
    """Label of a series: its last finite value, or nothing for none."""
    import numpy as np

    known = values[np.isfinite(values)]
    if not known.size:
        return []
    last = float(known[-1])
    return [_Label(last, f"{name} {last:.2f}" if last < 1000 else f"{name} {last:.1e}", color)]


def _title(axes: Axes, text: str) -> None:
    axes.set_title(text, loc="left", color=_INK, fontsize=12.5, fontweight="bold", pad=10)


def _label_right(axes: Axes, labels: Sequence[_Label]) -> None:
    """Write each label right of the axes at its height; those that would touch move apart."""
    labels = sorted(labels)
    axes.autoscale_view()
    to_axes = axes.transAxes.inverted()
    heights = [float(to_axes.transform(axes.transData.transform((0.0, label.y)))[1]) for label in labels]
    for _ in range(20):
        for lower in range(len(heights) - 1):
            overlap = max(heights[lower] + _LABEL_GAP - heights[lower + 1], 0.0)
            heights[lower] -= overlap / 2
            heights[lower + 1] += overlap / 2
    for label, height in zip(labels, heights, strict=True):
        axes.text(
            1.015,
            height,
            label.text,
            transform=axes.transAxes,
            color=label.color,
            fontsize=10,
            weight="bold",
            va="center",
        )


def _save(figure: Figure, out: Path) -> None:
    out.parent.mkdir(parents=True, exist_ok=True)
    with replaced_file(out) as scratch:
        figure.savefig(scratch, format="png", backend="agg")
