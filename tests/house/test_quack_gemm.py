"""The example of a GEMM over a library, ``examples/quack_gemm``, passes its own tests: all of them are run here."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

EXAMPLE = Path(__file__).parents[2] / "examples" / "quack_gemm"
sys.path[:0] = [str(EXAMPLE), str(EXAMPLE / "tests")]
pytest.register_assert_rewrite("test_quack", "test_quack_kernels")

from test_quack import *  # noqa: E402, F403
from test_quack_kernels import *  # noqa: E402, F403


def test_it_imports_no_plugin_of_ours() -> None:
    for path in (EXAMPLE / "moefw_quack").glob("*.py"):
        assert "moefw.plugins" not in path.read_text()
