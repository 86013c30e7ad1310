"""The GEMM ``quack`` over the fake of its library, for machines without a GPU."""

from __future__ import annotations

from collections.abc import Sequence

import fake_quack
from attrs import frozen
from moefw_quack import Quack

import moefw


@frozen
class QuackOnCpu(Quack):
    """``quack``, but for its needs of the machine."""

    def needs(self, site: moefw.Site) -> Sequence[moefw.Need]:
        """Needs of the other parts."""
        return [need for need in super().needs(site) if need.fact not in ("device", "capability", "package")]

    def build(self, context: moefw.BuildContext) -> moefw.ExpertGemm:
        """Experts of one layer, over the fake."""
        fake_quack.install()
        return super().build(context)
