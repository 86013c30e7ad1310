"""Needs that algorithms share. No torch."""

from __future__ import annotations

from collections.abc import Iterator

import moefw
from moefw.core.site import Site


def splits(site: Site) -> bool:
    """Whether ranks of cp share sequences."""
    return site.layout.sizes["cp"] > 1


def core_need(site: Site, *cores: str, reason: str) -> Iterator[moefw.Need]:
    """Yield the need of an attention around one of ``cores``, where ranks of cp share sequences."""
    if splits(site):
        yield moefw.need("core", cores, reason=reason, fix=f"Use an attention with kernel: {cores[0]}, or cp: 1.")
