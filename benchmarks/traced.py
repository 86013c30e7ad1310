"""Counts from torch's profiler: kernel launches, waits of the host, and copies that computation hides."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile, record_function

LAUNCHES = ("cudaLaunchKernel", "cuLaunchKernel")
WAITS = ("cudaStreamSynchronize", "cudaDeviceSynchronize", "cudaEventSynchronize")
COPIES = ("Memcpy HtoD", "Memcpy DtoH")
LABEL = "measured"
Span = tuple[float, float]


def counts(way: Callable[[], object]) -> dict[str, int | None]:
    """Return the kernels that ``way`` launches and the times it makes the host wait, after a run that is not counted.

    None: the profiler reports nothing, because there is no GPU or because it may not be profiled.
    """
    way()
    events, (begin, end) = _traced(way)
    inside = [event.name for event in events if begin <= event.time_range.start <= end]
    launches = sum(name.startswith(LAUNCHES) for name in inside)
    return {"launches": launches or None, "host_waits": sum(map(WAITS.__contains__, inside)) if launches else None}


def hidden_copies(way: Callable[[], object]) -> dict[str, float | None]:
    """Return the milliseconds of copies between host and GPU in ``way``, and their share beside running kernels.

    None: there are no copies, or the profiler reports none.
    """
    way()
    events, _ = _traced(way)
    on_gpu = [event for event in events if event.device_type == DeviceType.CUDA]
    copies = [event for event in on_gpu if event.name.startswith(COPIES)]
    kernels = [event for event in on_gpu if not event.name.startswith(("Memcpy", "Memset")) and event.name != LABEL]
    apart = list(_union(copies))
    busy = list(_union(kernels))
    total = sum(end - begin for begin, end in apart)
    hidden = sum(max(0.0, min(a[1], b[1]) - max(a[0], b[0])) for a in apart for b in busy)
    return {"copies_ms": 1e-3 * total or None, "hidden": hidden / total if total else None}


def _traced(way: Callable[[], object]) -> tuple[list[Any], Span]:
    activities = [ProfilerActivity.CPU, *[ProfilerActivity.CUDA] * torch.cuda.is_available()]
    with profile(activities=activities) as profiler:
        with record_function(LABEL):
            way()
        if torch.cuda.is_available():
            torch.cuda.synchronize()
    events = list(profiler.events())
    label = next(event for event in events if event.name == LABEL and event.device_type == DeviceType.CPU)
    return events, (label.time_range.start, label.time_range.end)


def _union(events: Iterable[Any]) -> Iterator[Span]:
    """Yield the spans in which at least one of the events runs."""
    spans = sorted((event.time_range.start, event.time_range.end) for event in events)
    while spans:
        (begin, end), *spans = spans
        while spans and spans[0][0] <= end:
            end = max(end, spans.pop(0)[1])
        yield begin, end
