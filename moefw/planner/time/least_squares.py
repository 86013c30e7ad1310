"""Costs that together explain measured times, none below zero. Imports no torch."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import combinations

ALIKE = 1e-6
"""A singular value below this share of the largest says that the amounts do not tell two costs apart."""


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
    """Costs with which each time is explained best; None if there are several such."""
    import numpy as np  # only machines that were measured need it

    scale = [max(column) for column in zip(*shares, strict=True)]
    scaled = np.array(shares) / scale
    solution, _, rank, _ = np.linalg.lstsq(scaled, np.ones(len(shares)), rcond=ALIKE)
    return None if rank < len(scale) else [float(cost) for cost in solution / scale]
