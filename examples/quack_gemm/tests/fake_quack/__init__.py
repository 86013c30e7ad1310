"""A QuACK on a CPU: the signatures of the real one, its demands on operands, and its mathematics in PyTorch."""

import sys
from types import ModuleType

from fake_quack import gemm_interface
from fake_quack.signatures import SNAPSHOT


def install() -> None:
    """Let ``import quack`` find the fake in this process."""
    package = ModuleType("quack")
    package.__dict__.update(__version__=SNAPSHOT["source"]["version"], gemm_interface=gemm_interface)
    sys.modules["quack"] = package
    sys.modules["quack.gemm_interface"] = gemm_interface
