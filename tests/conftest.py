"""Fixtures that all tests share."""

from __future__ import annotations

import gc
import os
import sys
from collections.abc import Generator, Iterator
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path

import hypothesis
import pytest

from bare_runs import make_runs_bare
from moefw.testing.pool import PRELOADED, RankPool, copies_context
from triton_process import begin

PRELOADED += ["bare_runs", "moefw.testing.suites.dispatcher", "moefw.testing.suites.memory_policy"]
"""What runs of tests and ranks of suites import too."""

pytest_plugins = ("cpu_seconds", "deep_table", "fake_deep_ep", "fault_table")

hypothesis.settings.register_profile("ci", derandomize=True, deadline=None, print_blob=True)
hypothesis.settings.register_profile("dev", deadline=None)
hypothesis.settings.load_profile("ci" if os.environ.get("CI") else "dev")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Start with whole runs: their files take longest, and all workers wait for the last file."""
    items.sort(key=lambda item: "training" not in item.path.parts)


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """Search for no garbage while tests are collected, and store their code as pytest rewrites it.

    Modules and tests stay, so later searches exclude them. Rewriting all tests takes four seconds: the next session
    need not, also where PYTHONDONTWRITEBYTECODE keeps Python from storing what it compiles.
    """
    before = sys.dont_write_bytecode
    sys.dont_write_bytecode = False
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()
        gc.enable()
        sys.dont_write_bytecode = before


@pytest.hookimpl(trylast=True)
def pytest_runtest_teardown(item: pytest.Item, nextitem: pytest.Item | None) -> None:
    """Behind the last test of a file, exclude all that is left from later searches for garbage: it is imported, or kept
    for the whole session. In three folders that were measured, searches took a tenth of the processor time.
    """
    if nextitem is not None and nextitem.path != item.path:
        gc.collect()
        gc.freeze()


@pytest.fixture(scope="session", autouse=True)
def _bare_runs() -> None:
    make_runs_bare()


@pytest.fixture(scope="session")
def pool() -> Iterator[RankPool]:
    """Four gloo ranks, started once for all tests."""
    ranks = RankPool(4)
    yield ranks
    ranks.close()


@pytest.fixture(scope="module")
def own_pool() -> Iterator[RankPool]:
    """Four gloo ranks of a module's own, for the counted device, which stays registered in a process."""
    ranks = RankPool(4)
    yield ranks
    ranks.close()


@pytest.fixture(scope="session")
def pool8() -> Iterator[RankPool]:
    """Eight gloo ranks, for the few tests that need them."""
    ranks = RankPool(8)
    yield ranks
    ranks.close()


@pytest.fixture(scope="session")
def interpreter() -> Iterator[ProcessPoolExecutor]:
    """A process in which Triton interprets kernels, started once for all tests."""
    with ProcessPoolExecutor(1, get_context("spawn"), begin, ("1",)) as process:
        yield process


@pytest.fixture(scope="session")
def compiler() -> Iterator[ProcessPoolExecutor]:
    """A process in which Triton compiles kernels, started once for all tests."""
    with ProcessPoolExecutor(1, copies_context(), begin, ("0",)) as process:
        yield process


@pytest.fixture
def empty_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Work in an empty folder."""
    monkeypatch.chdir(tmp_path)
