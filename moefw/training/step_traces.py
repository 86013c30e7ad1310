"""Traces of some steps of a run on this rank."""

from __future__ import annotations

import socket
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final, final

import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup

from moefw.runtime.parallel.local_shards import sharded_sides
from moefw.tracing.clocks import clock_of
from moefw.tracing.options import TraceOptions
from moefw.tracing.ranges import NvtxRanges, OperatorRanges
from moefw.tracing.rank_file import Head, RankFile
from moefw.tracing.replaced import traced
from moefw.tracing.spans import Span
from moefw.tracing.tracer import Ranges, Tracer
from moefw.training.clock import Clock
from moefw.training.session import Session
from moefw_kernels.devices import is_gpu

MEETINGS: Final = 9
"""How often ranks meet to compare their clocks."""
_BOOT_ID: Final = Path("/proc/sys/kernel/random/boot_id")


@final
class StepTraces:
    """Traces the chosen steps of a run. Nothing is opened before the first of them.

    ``steps``: their numbers, from 1. Use it as a context: what was traced is written when it ends, however that is.
    A trace that cannot be written ends no run: ``tell`` gets a line about it.
    """

    def __init__(
        self,
        session: Session,
        options: TraceOptions,
        steps: range,
        host_group: ProcessGroup | None,
        tell: Callable[[str], None],
    ) -> None:
        self._tell = tell
        self._session = session
        self._options = options
        self._steps = steps
        self._host_group = host_group
        self._file: RankFile | None = None
        self._profiler: Any = None
        self._tracer: Tracer | None = None

    def __enter__(self) -> StepTraces:
        """Begin."""
        return self

    def __exit__(self, *error: object) -> None:
        """Write what has been traced."""
        self._close()

    @contextmanager
    def step(self, number: int, clock: Clock, optimizer: torch.optim.Optimizer) -> Iterator[Clock]:
        """Trace the step that runs inside, if it is one to trace. Yield the clock that its engine is given. Collective.

        ``clock``: what measures its sections.
        """
        if number not in self._steps:
            yield clock
            return
        if self._tracer is None:
            self._tracer = self._open()
        is_sharded = bool(sharded_sides(self._session.layout))
        with traced(self._tracer, number, clock, optimizer=optimizer, is_sharded=is_sharded) as sections:
            yield sections
        if number == self._steps[-1]:
            self._close()
            if self._host_group is not None:
                dist.barrier(group=self._host_group)  # whoever reads the files of all ranks now finds them whole

    def _open(self) -> Tracer:
        """Open this rank's file, and begin what traces besides. Collective: clocks are compared."""
        session = self._session
        device = session.device
        head = Head(
            rank=session.layout.rank,
            world=session.layout.plan.world,
            device=device.type,
            machine=_machine(),
            met_ns=_meet(self._host_group),
        )
        self._file = RankFile(self._options.files.spans, head)
        ranges: list[Ranges] = []
        if is_gpu(device):
            ranges.append(NvtxRanges())
            if self._options.memory:
                torch.cuda.memory._record_memory_history()
        if self._options.operators:
            activities = [torch.profiler.ProfilerActivity.CPU]
            if is_gpu(device):
                activities.append(torch.profiler.ProfilerActivity.CUDA)
            self._profiler = torch.profiler.profile(activities=activities)
            self._profiler.start()
            ranges.append(OperatorRanges())
        return Tracer(clock_of(device), self._write, ranges)

    def _write(self, spans: Iterable[Span]) -> None:
        assert self._file is not None
        self._file.write(spans)

    def _close(self) -> None:
        """Write all that is left."""
        if self._file is None:
            return
        file = self._file
        self._file = None
        try:
            self._write_besides(file.path.stem)
            file.close()
        except (OSError, RuntimeError) as error:  # a device that has failed has no times
            self._tell(f"the trace of rank {self._session.layout.rank} is not written: {error}")

    def _write_besides(self, name: str) -> None:
        """Write what was traced besides spans. ``name``: that of this rank's files."""
        if self._profiler is not None:
            self._profiler.stop()
            folder = self._options.files.operators
            folder.mkdir(parents=True, exist_ok=True)
            self._profiler.export_chrome_trace(str(folder / f"{name}.json"))
        if is_gpu(self._session.device) and self._options.memory:
            folder = self._options.files.memory
            folder.mkdir(parents=True, exist_ok=True)
            torch.cuda.memory._dump_snapshot(str(folder / f"{name}.pickle"))
            torch.cuda.memory._record_memory_history(enabled=None)


def _machine() -> str:
    """Name of what this rank's clock belongs to: since when the machine is up, or its name."""
    try:
        return _BOOT_ID.read_text().strip()
    except OSError:
        return socket.gethostname()


def _meet(group: ProcessGroup | None) -> list[int]:
    """Times at which this rank has met all others, which is nearly the same moment for all. Collective."""
    times = []
    for _ in range(MEETINGS if group is not None else 0):
        dist.barrier(group=group)
        times.append(time.perf_counter_ns())
    return times
