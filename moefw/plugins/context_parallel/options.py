"""Needs that algorithms share. No torch."""

from __future__ import annotations

from collections.abc import Iterator

import moefw
from moefw.core.site import Site


def splits(site: Site) -> bool:
    """Whether ranks of cp share sequences."""
    return site.layout.sizes["cp"] > 1


def flash_need(site: Site) -> Iterator[moefw.Need]:
    """Yield the need of an attention that PyTorch's flash kernels compute, where ranks of cp share sequences."""
    if splits(site):
        yield moefw.need(
            "core",
            ("sdpa",),
            reason="it computes with PyTorch's flash kernels, whatever function the attention has",
            fix="Use kernel: sdpa if the attention has that option; context_parallel: {use: ulysses}, which calls the"
            " attention's own function; or cp: 1.",
        )
