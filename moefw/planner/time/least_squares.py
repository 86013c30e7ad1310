"""Costs that together explain measured times, none below zero. Imports no torch."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import combinations

TINY = 1e-12
"""A pivot below this share of a column says that the amounts do not tell two costs apart."""


def costs_of(amounts: Sequence[Sequence[float]], seconds: Sequence[float]) -> tuple[float, ...]:
    """Cost of each kind of amount, in seconds, with the least sum of squared relative errors of all times.

    ``amounts``: for each time how much of each kind it was spent on. With few kinds, all sets of those that cost
    anything are tried.
    """
    shares = [[amount / taken for amount in row] for row, taken in zip(amounts, seconds, strict=True)]
    return min(_candidates(shares), key=lambda costs: _error(shares, costs))


def _candidates(shares: Sequence[Sequence[float]]) -> Iterator[tuple[float, ...]]:
    kinds = range(len(shares[0]))
    for number in range(1, len(kinds) + 1):
        for chosen in combinations(kinds, number):
            solved = _solved([[row[kind] for kind in chosen] for row in shares])
            if solved is not None and min(solved) >= 0:
                costs = dict(zip(chosen, solved, strict=True))
                yield tuple(costs.get(kind, 0.0) for kind in kinds)


def _error(shares: Sequence[Sequence[float]], costs: Sequence[float]) -> float:
    told = (sum(share * cost for share, cost in zip(row, costs, strict=True)) for row in shares)
    return sum((each - 1.0) ** 2 for each in told)


def _solved(shares: Sequence[Sequence[float]]) -> list[float] | None:
    """Solution of the normal equations, by elimination; None if there are several."""
    size = len(shares[0])
    scale = [max(row[kind] for row in shares) for kind in range(size)]
    scaled = [[row[kind] / scale[kind] for kind in range(size)] for row in shares]
    rows = [
        [sum(each[one] * each[other] for each in scaled) for other in range(size)] + [sum(each[one] for each in scaled)]
        for one in range(size)
    ]
    for pivot in range(size):
        if rows[pivot][pivot] < TINY:
            return None
        for below in range(pivot + 1, size):
            factor = rows[below][pivot] / rows[pivot][pivot]
            rows[below] = [value - factor * above for value, above in zip(rows[below], rows[pivot], strict=True)]
    solution = [0.0] * size
    for row in reversed(range(size)):
        known = sum(rows[row][column] * solution[column] for column in range(row + 1, size))
        solution[row] = (rows[row][size] - known) / rows[row][row]
    return [value / scale[kind] for kind, value in enumerate(solution)]
