"""The peak GPU memory of the first steps of a run, measured for its ledger: ``moefw train --ledger``."""

from __future__ import annotations

from typing import Final, final

import torch

from moefw.training import ledger_file
from moefw.training.session import Session

STEPS: Final = 3
"""Steps after which a GPU has reached its peak: the optimizer's states exist from the first step on."""


@final
class MeasuredPeak:
    """Peak of the memory that this rank's GPU has allocated in the first steps that a run trains, from ``start``."""

    def __init__(self, session: Session, *, start: int) -> None:
        self._session = session
        self._first = start
        self._end = min(start + STEPS, session.assembly.spec.train.steps)

    def after(self, step: int) -> str | None:
        """Line about the peak, once it is measured and in the run's ledger; None after other steps."""
        device = self._session.device
        if step + 1 == self._end:
            peak = torch.cuda.max_memory_allocated(device)
            ledger_file.write(self._session.assembly, measured={"peak": peak, "allocator": "cuda"})
            return f"the GPU has allocated at most {peak / 2**30:.4f} GiB"
        if step == self._first:
            # The first step tunes kernels, between whose runs Triton writes over the caches of the GPU.
            torch.cuda.reset_peak_memory_stats(device)
        return None
