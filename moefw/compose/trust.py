"""Distributions whose plugins may be loaded."""

from __future__ import annotations

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
    from packaging.utils import canonicalize_name  # 40 ms, which `moefw --help` need not wait for

    names = {canonicalize_name(name.strip()) for name in (OURS, *told.split(","))}
    return lambda distribution: canonicalize_name(distribution) in names
