"""A smooth line through a noisy curve."""

from __future__ import annotations

import math
import warnings
from typing import Any

import numpy as np
from numpy.lib.stride_tricks import sliding_window_view

Floats = np.ndarray[Any, np.dtype[np.float32]]


def smooth(values: Floats) -> Floats:
    """Local linear fit at each point, with Gaussian weights over about a thirtieth of the curve; NaN stays NaN.

    A line instead of a mean, as a mean is biased at the ends and on the steep start (Cleveland 1979, LOWESS). It goes
    through medians of neighbours, so that a spike does not bend it.
    """
    width = max(len(values) / 64, 1.0)
    reach = math.ceil(3 * width)
    offset = np.arange(-reach, reach + 1)
    kernel = np.exp(-0.5 * (offset / width) ** 2)
    known = np.isfinite(values)
    filled = np.where(known, _medians(values), 0.0)

    def moment(series: np.ndarray[Any, Any], power: int) -> np.ndarray[Any, Any]:
        return np.convolve(series, kernel * (-offset) ** power)[reach : reach + len(values)]

    weights = known.astype(np.float64)
    w0, w1, w2 = (moment(weights, power) for power in range(3))
    v0 = moment(filled, 0)
    v1 = moment(filled, 1)
    spread = w0 * w2 - w1**2
    lone = spread < 1e-9
    line = (w2 * v0 - w1 * v1) / np.where(lone, 1.0, spread)
    return np.where(known, np.where(lone, values, line), np.nan).astype(np.float32)


def _medians(values: Floats) -> np.ndarray[Any, np.dtype[np.float64]]:
    """Median of each point and the two on either side, without those that are NaN."""
    padded = np.pad(values.astype(np.float64), 2, constant_values=np.nan)
    with warnings.catch_warnings(action="ignore", category=RuntimeWarning):  # of points that are all NaN
        medians: np.ndarray[Any, np.dtype[np.float64]] = np.nanmedian(sliding_window_view(padded, 5), axis=1)
    return medians
