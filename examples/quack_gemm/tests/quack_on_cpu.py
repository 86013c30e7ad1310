"""The GEMM ``quack`` without its needs of the machine: over QuACK itself, and over the fake of it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

import fake_quack
from attrs import frozen
from moefw_quack import Quack

import moefw


@frozen
class QuackAnywhere(Quack):
    """``quack`` in the layer cases of suites, which are built on a CPU. Its own name: ``quack`` may be installed."""

    name: ClassVar[str] = "quack-anywhere"

    def needs(self, site: moefw.Site) -> Sequence[moefw.Need]:
        """Needs of the other parts."""
        return [need for need in super().needs(site) if need.fact not in ("device", "capability", "package")]


@frozen
class QuackOnCpu(QuackAnywhere):
    """``quack`` over the fake."""

    name: ClassVar[str] = "quack-on-cpu"

    def build(self, context: moefw.BuildContext) -> moefw.ExpertGemm:
        """Experts of one layer."""
        fake_quack.install()
        return super().build(context)
