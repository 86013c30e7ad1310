"""A command that computes for long says so on a terminal."""

from __future__ import annotations

import io
import time

import pytest
from rich.console import Console

from moefw.commands.waiting import waiting


@pytest.mark.parametrize(
    ("terminal", "quiet_s", "shown"), [(True, 0.0, True), (True, 60.0, False), (False, 0.0, False)]
)
def test_what_it_does_is_shown_after_a_while_on_a_terminal(terminal: bool, quiet_s: float, shown: bool) -> None:
    console = Console(force_terminal=terminal, file=io.StringIO(), width=80, _environ={"TERM": "xterm-256color"})
    with waiting("measuring a step", console, quiet_s):
        time.sleep(0.3)
    assert ("measuring a step" in console.file.getvalue()) is shown  # type: ignore[attr-defined]


def test_an_error_inside_ends_it() -> None:
    console = Console(force_terminal=True, file=io.StringIO(), width=80)
    with pytest.raises(ValueError, match="inside"), waiting("measuring", console, 0.0):
        raise ValueError("inside")
