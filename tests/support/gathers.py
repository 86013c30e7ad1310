"""What ranks send each other when FSDP gathers a unit."""

from __future__ import annotations

from typing import Any

from torch.utils._python_dispatch import TorchDispatchMode


class Gathers(TorchDispatchMode):
    """Counts the bytes that a rank contributes to all-gathers."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.nbytes = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace == "c10d":
            assert "gather" in func.name(), func
            self.nbytes += args[1].nbytes
        return func(*args, **(kwargs or {}))
