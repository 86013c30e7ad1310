"""Model TFLOPS and MFU of a run, from the operations a token that its plan measures.

The plan is made beside the run, by a process of its own (:mod:`moefw.commands.run_plan`): a start waits for nothing.
Steps before it is ready, some seconds of a first run of a spec, have no such figures.
"""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Final, final

from moefw.core.errors import SpecError
from moefw.planner.cluster import with_gpu
from moefw.training import ledger_file

TERA: Final = 1e12


@final
class ModelFlops:
    """Figures of a run with its ledger in the file ``path``. ``name``: what its ranks compute on, as clusters say it.

    A GPU, or a processor with its threads, that no cluster names has no peak that is known: its runs have no MFU. Those
    of a processor are the clusters of the user, whose peaks were measured.
    """

    def __init__(self, path: Path, *, ranks: int, name: str) -> None:
        self._path = path
        self._ranks = ranks
        self._name = name
        self._flops_per_token: float | None = None
        self._peak_tflops: float | None = None
        self._seen: int | None = None
        """When the file that was read last was written, in nanoseconds."""

    def of(self, tokens_per_s: float) -> dict[str, float]:
        """``model_tflops_per_gpu``, of one rank, and ``mfu``, a share of its peak; empty while they are unknown."""
        if self._flops_per_token is None:
            self._look()
        if self._flops_per_token is None:
            return {}
        tflops = tokens_per_s * self._flops_per_token / self._ranks / TERA
        figures = {"model_tflops_per_gpu": tflops}
        if self._peak_tflops is not None:
            figures["mfu"] = tflops / self._peak_tflops
        return figures

    def _look(self) -> None:
        """Read the plan, if there is one since the last look."""
        try:
            written = self._path.stat().st_mtime_ns
        except OSError:
            return
        if written == self._seen:
            return
        self._seen = written
        predicted = ledger_file.read(self._path).get("predicted", {})
        self._flops_per_token = predicted.get("flops_per_token")
        dtype = predicted.get("dtype")
        if dtype is not None:
            self._peak_tflops = self._peak_of(dtype)

    def _peak_of(self, dtype: str) -> float | None:
        """Peak of products of a dtype, of the first cluster that has one; None if none has."""
        try:
            peaks = (cluster.peak_tflops(dtype) for _, cluster in with_gpu(self._name))
            return next((peak for peak in peaks if peak is not None), None)
        except SpecError as error:  # of a file of the user's own: a run does not end for it
            warnings.warn(f"the run has no mfu, as a cluster cannot be read: {error}", stacklevel=2)
            return None
