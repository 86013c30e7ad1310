"""Test parameters for ``make test``: those in which every value, or every two values, occur. Others are ``deep``."""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from typing import Any

import pytest


def pairwise(*factors: Iterable[Any]) -> list[Any]:
    """Return all combinations of the factors' values; those without a new pair are marked ``deep``."""
    return _covering(2, factors)


def each_value(*factors: Iterable[Any]) -> list[Any]:
    """Return all combinations of the factors' values; those without a new value are marked ``deep``."""
    return _covering(1, factors)


def deep(*values: Any) -> list[Any]:
    """Return the values as parameters that only ``make test-deep`` tests."""
    return [pytest.param(value, marks=pytest.mark.deep) for value in values]


def quick(values: Iterable[Any], *named: Any) -> list[Any]:
    """Return all values as parameters, of which ``make test`` tests the named ones."""
    return [pytest.param(value, marks=() if value in named else pytest.mark.deep) for value in values]


def _covering(together: int, factors: Iterable[Iterable[Any]]) -> list[Any]:
    met: set[tuple[tuple[int, str], ...]] = set()
    found = []
    for values in _spread([list(factor) for factor in factors]):
        new = set(itertools.combinations(((place, str(value)) for place, value in enumerate(values)), together))
        found.append(pytest.param(*values, marks=() if new - met else pytest.mark.deep))
        met |= new
    return found


def _spread(factors: list[list[Any]]) -> list[tuple[Any, ...]]:
    """Return all combinations, first those in which the last factor's value follows from the others'."""
    *first, last = factors
    places = list(itertools.product(*(range(len(factor)) for factor in first)))
    return [
        (*(factor[place] for factor, place in zip(first, at, strict=True)), last[(sum(at) + turn) % len(last)])
        for turn in range(len(last))
        for at in places
    ]
