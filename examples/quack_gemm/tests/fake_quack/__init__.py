"""A QuACK on a CPU: the signatures of the real one, its demands on operands, and its mathematics in PyTorch."""

import sys
from types import ModuleType

from fake_quack import gemm_interface
from fake_quack.signatures import SNAPSHOT

_PACKAGE = ModuleType("quack")
_PACKAGE.__dict__.update(__version__=SNAPSHOT["source"]["version"], gemm_interface=gemm_interface)
_FAKES = {"quack": _PACKAGE, "quack.gemm_interface": gemm_interface}
_REAL: dict[str, ModuleType] = {}
"""The real modules that the fakes displace: a second import would define the operators of QuACK again."""


def install() -> None:
    """Let ``import quack`` find the fake in this process."""
    if sys.modules.get("quack") is not _PACKAGE:
        _REAL.update({name: sys.modules[name] for name in _FAKES if name in sys.modules})
        sys.modules.update(_FAKES)


def uninstall() -> None:
    """Let ``import quack`` find the real library, if it is there."""
    if sys.modules.get("quack") is _PACKAGE:
        for name in _FAKES:
            del sys.modules[name]
        sys.modules.update(_REAL)
