"""Fits the numbers of :class:`moefw.planner.time.scale.Fitted` to published rows. One vote a layout."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from math import exp, log
from typing import Final

import numpy as np
from attrs import evolve

from moefw.planner.time.scale import GLOBAL, Fitted
from published_rows import Predictor, Row

EXPECTED: Final = Fitted(
    products=1.0,
    grouped=1.0,
    passes=1.0,
    host=1.5,
    transfers=1.0,
    power=1.0,
    merged=0.07,
    software_2025=1.0,
    stacks={"simumax": 1.0, "automodel": 1.0},
)
"""The numbers before any fit. What rows do not decide stays near them."""
DOUBT: Final = 0.7
"""Standard deviation of the logarithm of a number around what is expected of it."""
NOISE: Final = 0.08
"""Error of a row beyond which it counts linearly, and beside which :data:`DOUBT` is weighed."""
ROUNDS: Final = 25
STEP: Final = 1e-4


def fit(rows: Sequence[Row], predictor: Predictor, *, fixed: Sequence[str] = ()) -> Fitted:
    """Numbers fitted to rows. Those named in ``fixed`` stay as expected, as factors of stacks without rows do."""
    stacks = {row.stack for row in rows} - {""}
    names = [name for name in (*GLOBAL, *sorted(stacks)) if name not in fixed]
    votes = Counter(row.name for row in rows)
    weights = np.array([1 / votes[row.name] for row in rows])
    truths = np.array([log(row.tokens_per_s) for row in rows])

    def errors(values: np.ndarray) -> np.ndarray:
        numbers = with_values(names, values)
        told = np.array([log(predictor.tokens_per_s(row, numbers)) for row in rows])
        return told - truths

    start = np.array([log(_number(EXPECTED, name)) for name in names])
    return with_values(names, _least(errors, start, weights))


def _least(errors: Callable[[np.ndarray], np.ndarray], start: np.ndarray, weights: np.ndarray) -> np.ndarray:
    """Logarithms with the least sum of Huber's losses, by Levenberg's steps on reweighted squares."""
    values = start.copy()
    damping = 1e-2
    now = errors(values)
    best = _loss(now, values - start, weights)
    for _ in range(ROUNDS):
        slopes = np.stack([(errors(values + step) - now) / STEP for step in STEP * np.eye(len(values))], axis=1)
        robust = weights / NOISE**2 / np.maximum(1.0, np.abs(now) / NOISE)
        curvature = slopes.T @ (robust[:, None] * slopes) + np.eye(len(values)) / DOUBT**2
        downhill = -(slopes.T @ (robust * now) + (values - start) / DOUBT**2)
        improved = False
        for _ in range(8):
            trial = values + np.linalg.solve(curvature + damping * np.diag(np.diag(curvature)), downhill)
            trial_errors = errors(trial)
            loss = _loss(trial_errors, trial - start, weights)
            if loss < best:
                improved = best - loss > 1e-7 * best
                values, now, best = trial, trial_errors, loss
                damping /= 4
                break
            damping *= 4
        if not improved:
            break
    return values


def _loss(errors: np.ndarray, away: np.ndarray, weights: np.ndarray) -> float:
    size = np.abs(errors) / NOISE
    of_rows = np.where(size < 1, size**2 / 2, size - 0.5)
    return float(weights @ of_rows + (away**2).sum() / DOUBT**2 / 2)


def _number(numbers: Fitted, name: str) -> float:
    value: float = numbers.stacks[name] if name in numbers.stacks else getattr(numbers, name)
    return value


def with_values(names: Sequence[str], values: np.ndarray) -> Fitted:
    """Numbers with these logarithms of some."""
    numbers = EXPECTED
    for name, value in zip(names, values, strict=True):
        if name in numbers.stacks:
            numbers = evolve(numbers, stacks={**numbers.stacks, name: exp(value)})
        else:
            numbers = evolve(numbers, **{name: exp(value)})
    return numbers
