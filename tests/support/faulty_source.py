"""A distribution with a data source that hangs, exits or allocates too much, on one rank at one read."""

from __future__ import annotations

import ctypes
import os
import signal
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, ClassVar

from attrs import frozen

import moefw
from moefw.core.data import TokenStream
from moefw.core.plugin import DataSourcePlugin
from moefw.plugins.data.text import Text
from moefw.system.stamps import stamp


def _block() -> None:
    end, _ = os.pipe()
    os.read(end, 1)


def _all_memory() -> None:
    import torch

    torch.empty(1 << 50)


FAULTS: Mapping[str, Callable[[], Any]] = {
    "none": lambda: None,
    "sleep": lambda: time.sleep(3600),
    "block": _block,
    "keep the GIL": lambda: ctypes.PyDLL(None).sleep(3600),
    "stop": lambda: os.kill(os.getpid(), signal.SIGSTOP),
    "leave with 0": lambda: os._exit(0),
    "leave with 3": lambda: os._exit(3),
    "sys.exit": lambda: sys.exit(0),
    "all memory": _all_memory,
}


@frozen(kw_only=True)
class Faulty(Text):
    """Text that fails at the ``at``-th read of ``rank``, or with 0 when it is prepared; then ``mark`` is created.

    A rank alone reads eight sequences for a step, one of two ranks four. Three rehearsals read those of the first one.
    """

    name: ClassVar[str] = "faulty"

    fault: str = "none"
    rank: int = 0
    at: int = 33
    mark: str = "/dev/null"

    def happen(self) -> None:
        Path(self.mark).touch()
        FAULTS[self.fault]()

    def prepare(self, cache_dir: Path) -> moefw.DataSource:
        if self.at == 0:
            stamp("preparing data: text.txt")
            self.happen()
        source: Any = super().prepare(cache_dir)
        if int(os.environ.get("RANK", "0")) == self.rank:
            source.train = _Stream(source.train, self)
        return source  # type: ignore[no-any-return]


class _Stream(TokenStream):
    def __init__(self, inner: TokenStream, options: Faulty) -> None:
        self.inner, self.options, self.reads = inner, options, 0

    def __len__(self) -> int:
        return len(self.inner)

    def read(self, start: int, count: int) -> Any:
        self.reads += 1
        if self.reads == self.options.at:
            self.options.happen()
        return self.inner.read(start, count)


@moefw.hookimpl
def moefw_data_sources() -> list[type[DataSourcePlugin]]:
    return [Faulty]


def install(site: Path) -> Path:
    """Write the metadata of an installed distribution and a link to this file; return the folder for PYTHONPATH."""
    info = site / "moefw_faulty-1.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: moefw-faulty\nVersion: 1\n")
    (info / "entry_points.txt").write_text("[moefw]\nfaulty = faulty_source\n")
    (site / "faulty_source.py").symlink_to(__file__)
    return site
