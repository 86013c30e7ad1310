"""Tests the contract of GEMMs for QuACK on a fake of it, and that the fake is like the real one."""

from __future__ import annotations

from moefw.testing import GemmSuite
from quack_on_cpu import QuackOnCpu


class TestQuack(GemmSuite):
    """The contract."""

    plugin = QuackOnCpu
    parts = {"precision": {"use": "bf16"}}
    rtol = {"bf16": 4e-2}
