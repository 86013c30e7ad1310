"""What a run measures: one JSON object a step in ``metrics.jsonl``, the same scalars for TensorBoard."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterator, Mapping
from numbers import Integral, Real
from pathlib import Path
from types import TracebackType
from typing import Any, Self, final

from moefw.core.errors import DataError


@final
class MetricsLog:
    """Writes ``run_dir/metrics.jsonl`` and ``run_dir/tensorboard``; one process may write at a time.

    A line has left the process when ``write`` returns, so a killed run keeps its lines; TensorBoard follows within
    seconds.
    An existing file is continued, without its last line if that is torn. With ``keep_until``, as after a resume
    from that step, later steps are forgotten, in TensorBoard too.
    """

    def __init__(self, run_dir: Path, *, keep_until: int | None = None) -> None:
        from torch.utils.tensorboard import SummaryWriter

        run_dir.mkdir(parents=True, exist_ok=True)
        path = run_dir / "metrics.jsonl"
        if path.exists():
            _truncate(path, keep_until)
        purge_step = None if keep_until is None else keep_until + 1
        self._lines = path.open("a", buffering=1, encoding="utf-8", newline="\n")
        self._events = SummaryWriter(str(run_dir / "tensorboard"), purge_step=purge_step, flush_secs=10)

    def write(self, record: Mapping[str, object]) -> None:
        """Append one record: ``step`` (int), numbers by name, and nested lists or mappings of numbers.

        What is not finite becomes null. Only numbers directly in the record go to TensorBoard, their names as tags;
        there NaN stays NaN.
        """
        step = record["step"]
        assert isinstance(step, int)
        self._lines.write(json.dumps(_plain(record), allow_nan=False) + "\n")
        for name, value in record.items():
            if name != "step" and isinstance(value, Real) and not isinstance(value, bool):
                self._events.add_scalar(name, float(value), step)

    def close(self) -> None:
        """Flush and close both; closing twice is allowed."""
        self._lines.close()
        self._events.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """Return the records of a ``metrics.jsonl`` in the order of the file; what was not finite is None.

    A torn last line, as a killed run leaves it, is passed over. Raises ``DataError`` where the file is missing or a
    line before the last is damaged.
    """
    if not path.is_file():
        raise DataError(f"{path} does not exist.", "Name the metrics.jsonl of a run that has made a step.")
    return [record for record, _ in _whole_lines(path)]


def _whole_lines(path: Path) -> Iterator[tuple[dict[str, Any], str]]:
    """Yield each record with its line, without the line's end. A torn object never parses: its brace is missing."""
    lines = path.read_text(encoding="utf-8", errors="replace").splitlines()
    for number, line in enumerate(lines, start=1):
        try:
            yield json.loads(line), line
        except json.JSONDecodeError as error:
            if number < len(lines):
                raise DataError(f"{path}:{number}: damaged line: {error}.", "Delete the line.") from error


def _truncate(path: Path, keep_until: int | None) -> None:
    """Replace the file by one without steps after ``keep_until`` and without a torn last line."""
    last = math.inf if keep_until is None else keep_until
    temporary = path.with_name(f".{path.name}.tmp")
    with temporary.open("w", encoding="utf-8", newline="\n") as file:
        file.writelines(f"{line}\n" for record, line in _whole_lines(path) if record["step"] <= last)
        file.flush()
        os.fsync(file.fileno())
    temporary.replace(path)


def _plain(value: object) -> object:
    """Return what JSON can say: Python's numbers for NumPy's, None for what is not finite."""
    match value:
        case Mapping():
            return {key: _plain(item) for key, item in value.items()}
        case list() | tuple():
            return [_plain(item) for item in value]
        case bool():
            return value
        case Integral():
            return int(value)
        case Real():
            return float(value) if math.isfinite(value) else None
        case _:
            return value
