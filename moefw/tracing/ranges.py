"""The names of spans in other tools: NVIDIA Nsight, and PyTorch's profiler."""

from __future__ import annotations

from typing import Any, final

import torch


@final
class NvtxRanges:
    """Ranges that ``nsys`` records. They begin and end in any thread, as backward has threads of its own."""

    def begin(self, title: str) -> Any:
        """Begin a range."""
        return torch.cuda.nvtx.range_start(title)

    def end(self, begun: Any) -> None:
        """End a range."""
        torch.cuda.nvtx.range_end(begun)


@final
class OperatorRanges:
    """Ranges of ``torch.profiler``."""

    def begin(self, title: str) -> Any:
        """Begin a range."""
        begun = torch.profiler.record_function(title)
        begun.__enter__()
        return begun

    def end(self, begun: Any) -> None:
        """End a range."""
        begun.__exit__(None, None, None)
