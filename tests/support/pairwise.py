"""Pairwise test parameters: every two values occur together. ``make test-deep`` tests all combinations."""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from typing import Any

import pytest


def pairwise(*factors: Iterable[Any]) -> list[Any]:
    """Return all combinations of the factors' values; those without a new pair are marked ``deep``."""
    met: set[tuple[tuple[int, str], ...]] = set()
    found = []
    for values in _spread([list(factor) for factor in factors]):
        pairs = set(itertools.combinations(((place, str(value)) for place, value in enumerate(values)), 2))
        found.append(pytest.param(*values, marks=() if pairs - met else pytest.mark.deep))
        met |= pairs
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
