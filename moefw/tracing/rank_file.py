"""The file of a rank's spans: JSON lines, of which the first says whose they are."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Final, final

from attrs import asdict, frozen

from moefw.tracing.spans import Span

SCHEMA: Final = "moefw-trace/1"
PATTERN: Final = "rank-*.jsonl"


@frozen(kw_only=True)
class Head:
    """The first line of a rank's file.

    ``machine``: what ranks have in common whose clocks are one. ``met_ns``: this rank's time each time that all ranks
    had met, in the order of the meetings.
    """

    rank: int
    world: int
    device: str
    machine: str
    met_ns: Sequence[int]
    schema: str = SCHEMA


@frozen
class RankTrace:
    """The spans of a rank, on its own clock, or on the common one: see :func:`moefw.tracing.whole.aligned`."""

    head: Head
    spans: Sequence[Span]


def path_of(folder: Path, rank: int) -> Path:
    """File of a rank."""
    return folder / f"rank-{rank:05}.jsonl"


@final
class RankFile:
    """Writes the spans of a rank from a thread of its own: training never waits for it, until :meth:`close`."""

    def __init__(self, folder: Path, head: Head) -> None:
        self.path = path_of(folder, head.rank)
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="trace")
        self._written = [self._thread.submit(self._begin, head)]

    def write(self, spans: Iterable[Span]) -> None:
        """Write spans, soon."""
        self._written.append(self._thread.submit(self._append, spans))

    def close(self) -> None:
        """Wait until all is written. Raises OSError if something could not be."""
        self._thread.shutdown()
        written = self._written
        self._written = []
        for lines in written:
            lines.result()

    def _begin(self, head: Head) -> None:
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self.path.write_text(f"{json.dumps(asdict(head))}\n")

    def _append(self, spans: Iterable[Span]) -> None:
        with self.path.open("a") as file:
            file.writelines(f"{json.dumps(span.to_data())}\n" for span in spans)


def read_ranks(folder: Path) -> list[RankTrace]:
    """The ranks that have written into a folder, in order. A line that is cut off is left out, as is all behind it.

    Raises OSError.
    """
    return [trace for path in sorted(folder.glob(PATTERN)) for trace in _read(path)]


def _read(path: Path) -> list[RankTrace]:
    """The trace in a file, if there is one."""
    lines = []
    for line in path.read_text().splitlines():
        try:
            lines.append(json.loads(line))
        except ValueError:
            break
    if not lines or lines[0].get("schema") != SCHEMA:
        return []
    return [RankTrace(Head(**lines[0]), [Span.of_data(line) for line in lines[1:]])]
