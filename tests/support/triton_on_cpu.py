"""The GEMM ``triton`` without its needs of the machine: a CPU runs the references of its kernels."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

from attrs import frozen

import moefw
from moefw.plugins.gemm.triton import Triton


@frozen
class TritonOnCpu(Triton):
    """``triton`` in layer cases, which are built on a CPU."""

    name: ClassVar[str] = "triton-on-cpu"

    def needs(self, site: moefw.Site) -> Sequence[moefw.Need]:
        """Needs of the other parts."""
        return [need for need in super().needs(site) if need.fact not in ("device", "capability", "package")]
