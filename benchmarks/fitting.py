"""Fits the numbers of :class:`moefw.planner.time.scale.Fitted` to published rows. One vote a layout."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
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
DOUBTS: Final[Mapping[str, float]] = {
    "products": 0.15,
    "grouped": 0.25,
    "passes": 0.35,
    "transfers": 0.35,
    "power": 0.4,
}
"""Standard deviations of the logarithms of numbers around what is expected of them."""
DOUBT: Final = 0.7
"""That of all others."""
NOISE: Final = 0.08
"""Error of a row beyond which it counts linearly, and beside which :data:`DOUBT` is weighed."""
ROUNDS: Final = 25
STEP: Final = 1e-4


def fit(rows: Sequence[Row], predictor: Predictor, *, near: Fitted | None = None) -> Fitted:
    """Numbers fitted to rows. ``near``: those at which to start, to be done sooner."""
    stacks = {row.stack for row in rows} - {""}
    names = [*GLOBAL, *sorted(stacks)]
    votes = Counter(row.name for row in rows)
    weights = np.array([1 / votes[row.name] for row in rows])
    truths = np.array([log(row.tokens_per_s) for row in rows])

    def errors(values: np.ndarray) -> np.ndarray:
        numbers = with_values(names, values)
        told: dict[object, float] = {}
        for row in rows:
            same = predictor.same(row)
            if same not in told:
                told[same] = log(predictor.tokens_per_s(row, numbers))
        return np.array([told[predictor.same(row)] for row in rows]) - truths

    expected = np.array([log(_number(EXPECTED, name)) for name in names])
    start = expected if near is None else np.array([log(_number(near, name)) for name in names])
    doubts = np.array([DOUBTS.get(name, DOUBT) for name in names])
    return _with_unknown_stacks(with_values(names, _least(errors, start, weights, (expected, doubts))), stacks)


def _with_unknown_stacks(numbers: Fitted, known: Collection[str]) -> Fitted:
    """Numbers in which a stack without rows has the mean factor of those with rows, Megatron's 1 among them."""
    factors = [0.0, *(log(factor) for name, factor in numbers.stacks.items() if name in known)]
    mean = exp(sum(factors) / len(factors))
    return evolve(numbers, stacks={name: value if name in known else mean for name, value in numbers.stacks.items()})


def _least(
    errors: Callable[[np.ndarray], np.ndarray],
    start: np.ndarray,
    weights: np.ndarray,
    prior: tuple[np.ndarray, np.ndarray],
) -> np.ndarray:
    """Logarithms with the least sum of Huber's losses, by Levenberg's steps on reweighted squares.

    ``prior``: the logarithms that are expected, and their standard deviations.
    """
    expected, doubts = prior
    values = start.copy()
    damping = 1e-2
    now = errors(values)
    best = _loss(now, (values - expected) / doubts, weights)
    for _ in range(ROUNDS):
        slopes = np.stack([(errors(values + step) - now) / STEP for step in STEP * np.eye(len(values))], axis=1)
        robust = weights / NOISE**2 / np.maximum(1.0, np.abs(now) / NOISE)
        curvature = slopes.T @ (robust[:, None] * slopes) + np.diag(doubts**-2)
        downhill = -(slopes.T @ (robust * now) + (values - expected) / doubts**2)
        improved = False
        for _ in range(8):
            trial = values + np.linalg.solve(curvature + damping * np.diag(np.diag(curvature)), downhill)
            trial_errors = errors(trial)
            loss = _loss(trial_errors, (trial - expected) / doubts, weights)
            if loss < best:
                improved = best - loss > 1e-6 * best
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
    return float(weights @ of_rows + (away**2).sum() / 2)


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
