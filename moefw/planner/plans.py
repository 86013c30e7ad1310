"""The ledger of a spec: from the cache, or measured and then cached. Imports torch only to measure."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from attrs import evolve

from moefw.compose.assembly import Assembly
from moefw.planner import cache as cache_files
from moefw.planner.report import Ledger
from moefw.planner.skew import EVEN, largest_skew


def ledger(
    assembly: Assembly, *, micro_batches: int | None = None, cache: Path | None = None, skew: float | None = None
) -> Ledger:
    """Ledger of a rank. ``micro_batches`` None: as many as the spec has.

    ``cache``: folder of earlier ledgers, under a digest of everything that they depend on; None: measure. ``skew``:
    the memory is that of the rank with most rows, which has so many times the mean; None: routing is even.
    """
    count = assembly.micro_batches if micro_batches is None else micro_batches
    even = _known(assembly, count, cache, None)
    if skew is None:
        return even
    factor = min(skew, largest_skew(assembly))
    if factor == EVEN:
        return evolve(even, skew=EVEN, even_peak_bytes=even.peak_bytes)
    return _known(assembly, count, cache, factor).with_work_of(even)


def _known(assembly: Assembly, count: int, cache: Path | None, skew: float | None) -> Ledger:
    """Ledger of a rank in a step of ``count`` micro-batches, from the cache or measured."""
    if cache is None:
        return _measured(assembly, count, skew)
    path = cache / f"{_digest(assembly, count, skew)}.json"
    stored = _stored(path)
    if stored is not None:
        return stored
    measured = _measured(assembly, count, skew)
    if not measured.unknown:  # what is missing may be installed later
        cache_files.store(path, measured.to_data())
    return measured


def _measured(assembly: Assembly, count: int, skew: float | None) -> Ledger:
    with without_garbage_collection():
        from moefw.planner.measurement.measure import measure

        return measure(assembly, count, skew)


@contextmanager
def without_garbage_collection() -> Iterator[None]:
    """Search for no cycles: imports and a measurement make few, and searching for them takes a tenth of the time."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


def _stored(path: Path) -> Ledger | None:
    """Ledger in a file of the cache; None if it is missing, or not as it was written."""
    data = cache_files.stored(path)
    return None if data is None else Ledger.of_data(data)


def _digest(assembly: Assembly, count: int, skew: float | None) -> str:
    """Hash of what a ledger depends on: spec, world, facts, skew, versions, frozen weights, code of parts and moefw."""
    code = [*cache_files.sources(cache_files.packages(assembly))]
    return cache_files.digest([count, skew, cache_files.identity(assembly), code])
