"""A bound on work that every machine counts alike: lines of Python, not seconds."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any


@contextmanager
def at_most(lines: int) -> Iterator[None]:
    """Fail as soon as the body has run more lines of Python (a turn of a loop is one).

    Raises:
        AssertionError: in the line that is one too many, so that even an endless loop ends.
    """
    left, spent = lines, f"more than {lines:,} lines of Python were run"

    def count(frame: FrameType, event: str, arg: Any) -> Any:
        nonlocal left
        left -= event == "line"
        assert left >= 0, spent
        return count

    before = sys.gettrace()
    sys.settrace(count)
    try:
        yield
    finally:
        sys.settrace(before)
    assert left >= 0, spent
