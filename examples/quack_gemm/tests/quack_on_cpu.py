"""The GEMM ``quack`` without its needs of the machine: over QuACK itself, and over the fake of it."""

from __future__ import annotations

from collections.abc import Sequence

import fake_quack
from attrs import frozen
from moefw_quack import Quack

import moefw


@frozen
class QuackAnywhere(Quack):
    """``quack`` in the layer cases of suites, which are built on a CPU."""

    def needs(self, site: moefw.Site) -> Sequence[moefw.Need]:
        """Needs of the other parts."""
        return [need for need in super().needs(site) if need.fact not in ("device", "capability", "package")]


@frozen
class QuackOnCpu(QuackAnywhere):
    """``quack`` over the fake."""

    def build(self, context: moefw.BuildContext) -> moefw.ExpertGemm:
        """Experts of one layer."""
        fake_quack.install()
        return super().build(context)
