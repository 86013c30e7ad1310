"""Settings of torch that all code of a process shares, and that no plugin may change."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Final

_FRESH: Final = {
    "torch's default dtype": "torch.float32",
    "torch's default device": "cpu",
    "whether gradients are recorded": "True",
    "torch's use of deterministic algorithms": "False",
    "torch's matmul precision": "highest",
}
"""The settings right after torch is imported, as text."""


@contextmanager
def unchanged(blame: Callable[[str], Exception]) -> Iterator[None]:
    """Raise ``blame("it changes ...")`` if the code inside has changed settings."""
    before = _settings()
    yield
    after = _settings()
    changed = [name for name in _FRESH if after[name] != before[name]]
    if changed:
        raise blame(f"it changes {' and '.join(changed)}.")


def _settings() -> Mapping[str, str]:
    """Settings by name. Imports no torch: where nobody has, they are fresh."""
    torch = sys.modules.get("torch")
    if torch is None:
        return _FRESH
    values = (
        torch.get_default_dtype(),
        torch.get_default_device(),
        torch.is_grad_enabled(),
        torch.are_deterministic_algorithms_enabled(),
        torch.get_float32_matmul_precision(),
    )
    return dict(zip(_FRESH, map(str, values), strict=True))
