"""Processor time of the tests, in addition to wall time: that of all processes they started, ended or not."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

TICKS = os.sysconf("SC_CLK_TCK")
KEY = "cpu_seconds"
SPENT: list[float] = []
"""Seconds that each worker has spent."""


def pytest_sessionfinish(session: pytest.Session) -> None:
    told: dict[str, Any] | None = getattr(session.config, "workeroutput", None)
    if told is not None:
        told[KEY] = seconds_of(os.getpid())
    elif not SPENT:
        SPENT.append(seconds_of(os.getpid()))


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node: Any) -> None:
    SPENT.append(getattr(node, "workeroutput", {}).get(KEY, 0.0))


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    wall = time.clock_gettime(time.CLOCK_BOOTTIME) - int(_stat(os.getpid())[19]) / TICKS
    terminalreporter.write_line(f"{wall:.0f} s of wall time, {sum(SPENT):.0f} s of processors")


def seconds_of(process: int) -> float:
    """Return the user and system time of a process and of its children, running or ended."""
    spent = sum(map(int, _stat(process)[11:15])) / TICKS
    return spent + sum(map(seconds_of, _children(process)))


def _stat(process: int) -> list[str]:
    """Return the fields after the name of a process; zeros if it has ended meanwhile."""
    try:
        return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()
    except (FileNotFoundError, ProcessLookupError):
        return ["0"] * 20


def _children(process: int) -> Iterator[int]:
    for task in Path(f"/proc/{process}/task").glob("*/children"):
        try:
            yield from map(int, task.read_text().split())
        except (FileNotFoundError, ProcessLookupError):
            continue
