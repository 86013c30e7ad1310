"""Which source each sequence of a blend is from."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from fractions import Fraction
from functools import lru_cache
from math import gcd, lcm
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from numpy.typing import NDArray

LONGEST: Final = 100_000
"""The longest pattern of a blend, in sequences."""


def whole_weights(weights: Iterable[float]) -> tuple[int, ...]:
    """Smallest whole numbers in the proportions of weights, which are taken as they are written: 0.7 : 0.3
    is 7 : 3.
    """
    exact = [Fraction(repr(weight)) for weight in weights]
    scale = lcm(*(weight.denominator for weight in exact))
    whole = [int(weight * scale) for weight in exact]
    return tuple(weight // gcd(*whole) for weight in whole)


@lru_cache(maxsize=4)
def pattern(weights: Sequence[int]) -> NDArray[Any]:
    """Source of each of ``sum(weights)`` sequences, int32; the next ones repeat them.

    A sequence is from the source that is furthest behind its share, the first of several, as in Megatron-LM
    (``build_blending_indices``): its share of the sequences before, of one sequence at the beginning, less its number
    of them. No source is ever ahead of its share by more than one sequence. At the end of the pattern each has exactly
    its weight of sequences, so that repeating it is the same rule.
    """
    import numpy as np

    total = sum(weights)
    counts = [0] * len(weights)
    chosen: list[int] = []
    for number in range(total):
        behind = [weight * max(number, 1) - count * total for weight, count in zip(weights, counts, strict=True)]
        source = behind.index(max(behind))
        counts[source] += 1
        chosen.append(source)
    pattern = np.array(chosen, dtype=np.int32)
    pattern.setflags(write=False)
    return pattern
