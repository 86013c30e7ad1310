"""``--trace`` of ``moefw train``: what to trace, checked before the run, and the files that are made at its end."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from attrs import frozen

from moefw.compose.assembly import Assembly
from moefw.core.errors import Problem, SpecError, os_reason, printable

if TYPE_CHECKING:
    from moefw.tracing.files import TraceFiles
    from moefw.tracing.options import TraceOptions
    from moefw.tracing.rank_file import RankTrace

STEPS = """Steps to trace, from A to B, such as 10:11.  [default: two steps behind the first three]"""


@frozen(kw_only=True)
class TraceFlags:
    """The options of the command line about traces, as they were given."""

    trace: Path | None
    trace_steps: str | None
    trace_operators: bool
    trace_memory: bool

    def options(self, assembly: Assembly) -> TraceOptions | None:
        """What to trace; None: nothing. Raises SpecError with every problem."""
        problems = [*self._problems(assembly)]
        if problems:
            raise SpecError(problems)
        if self.trace is None:
            return None
        from moefw.tracing.files import TraceFiles
        from moefw.tracing.options import TraceOptions

        return TraceOptions(
            files=TraceFiles(self.trace),
            steps=self._steps,
            operators=self.trace_operators,
            memory=self.trace_memory,
        )

    @property
    def _steps(self) -> range | None:
        """Steps that are named; None: none are. Raises ValueError if they are no range."""
        if self.trace_steps is None:
            return None
        named = re.fullmatch(r"([0-9]+):([0-9]+)", self.trace_steps)
        if named is None:
            raise ValueError("it is not of the form A:B")
        first, last = int(named[1]), int(named[2])
        if first < 1:
            raise ValueError("steps count from 1")
        if last < first:
            raise ValueError("it ends before it begins")
        return range(first, last + 1)

    def _problems(self, assembly: Assembly) -> Iterator[Problem]:
        if self.trace is None:
            given = {
                "--trace-steps": self.trace_steps is not None,
                "--trace-operators": self.trace_operators,
                "--trace-memory": self.trace_memory,
            }
            for name in (name for name, is_given in given.items() if is_given):
                yield Problem(f"{name}: nothing is traced.", "Add --trace FILE.json.")
        else:
            yield from _problems_of_file(self.trace)
            if assembly.spec.train.graphs != "none":
                what = "--trace: a step that is replayed as a graph runs no Python, which is what a trace shows."
                yield Problem(what, "Use train.graphs=none for a traced run.")
        total = assembly.spec.train.steps
        try:
            steps = self._steps
        except ValueError as error:
            fix = f"Name the first and the last step to trace, such as 4:5, of 1 to {total}."
            yield Problem(f"--trace-steps {self.trace_steps}: {error}.", fix)
        else:
            if steps is not None and steps[-1] > total:
                what = f"--trace-steps {self.trace_steps}: train.steps is {total}."
                yield Problem(what, f"Name steps of 1 to {total}, or let train.steps be {steps[-1]} or more.")
        if self.trace_memory and assembly.site.machine.device == "cpu":
            what = "--trace-memory: run.device is cpu, and only PyTorch's allocator of a GPU keeps a history."
            yield Problem(what, "Leave it out; --ledger measures the memory of a rank on a CPU.")


def _problems_of_file(path: Path) -> Iterator[Problem]:
    """Yield what keeps a trace from being written to ``path``."""
    from moefw.tracing.files import SUFFIX, is_trace

    if path.suffix != SUFFIX:
        yield Problem(f"--trace {path}: the file of a trace ends in {SUFFIX}.", f"Use {path.with_suffix(SUFFIX)}.")
        return
    try:
        if path.exists() and not (path.is_file() and is_trace(path)):
            yield Problem(f"--trace {path}: it exists and is no trace.", "Name another file.")
        parent = next(parent for parent in path.absolute().parents if parent.exists())
    except OSError as error:
        reason = os_reason(error)
        yield Problem(f"--trace {path}: {reason}.", "Name a file that can be written.")
        return
    if not parent.is_dir():
        yield Problem(f"--trace {path}: {parent} is no folder.", "Name a file in a folder.")
    elif not os.access(parent, os.W_OK | os.X_OK):
        yield Problem(f"--trace {path}: the folder {parent} cannot be written.", "Name a file that can be written.")


@contextmanager
def traced(options: TraceOptions | None, tell: Callable[[str], None]) -> Iterator[None]:
    """Remove an earlier trace, and make the files of the one that is written inside, however the run ends.

    ``tell`` gets a line about them. Whatever goes wrong in the end costs a line, and no run. Raises SpecError if the
    folder cannot be made, or the earlier trace not be removed.
    """
    if options is None:
        yield
        return
    files = options.files
    try:
        files.spans.mkdir(parents=True, exist_ok=True)
        files.clear()
    except OSError as error:
        reason = os_reason(error)
        raise SpecError(f"--trace {files.whole}: {reason}.", "Name a file that can be written.") from error
    try:
        yield
    finally:
        try:
            ranks = files.finish()
        except Exception as error:
            tell(printable(f"there is no trace: {error}"))
        else:
            tell(_told(files, ranks))


def _told(files: TraceFiles, ranks: Sequence[RankTrace]) -> str:
    """Line about a trace: where it is, and which part of the ranks it has."""
    if not ranks:
        return "there is no trace: no step was traced"
    world = ranks[0].head.world
    of_ranks = "" if len(ranks) == world else f" of {len(ranks)} of {world} ranks"
    return f"the trace{of_ranks} is in {files.whole}, drawn in {files.picture.name}; see https://ui.perfetto.dev"
