"""Distributions whose plugins may be loaded."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping

OURS = "moefw"
"""The distribution of the built-in plugins."""

ALLOWED = "MOEFW_ALLOWED_DISTRIBUTIONS"
"""Environment variable that lists the distributions whose plugins may be loaded in addition to ours. Unset: all.

It is not an option of the spec, because a spec may come from an untrusted source.
"""


def allowed(environment: Mapping[str, str]) -> Callable[[str], bool]:
    """Predicate: whether a distribution may be loaded. Names are normalized (PEP 503)."""
    told = environment.get(ALLOWED)
    if told is None:
        return lambda distribution: True
    names = {_normalized(name.strip()) for name in (OURS, *told.split(","))}
    return lambda distribution: _normalized(distribution) in names


def _normalized(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()
