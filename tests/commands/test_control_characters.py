"""What others wrote, and what a model writes, commands no terminal."""

from __future__ import annotations

import sys
from contextlib import contextmanager
from io import BytesIO, StringIO, TextIOWrapper
from types import SimpleNamespace
from typing import Any

import pytest
from rich.console import Console

from moefw.cli import cli
from moefw.commands import specs
from moefw.core.errors import Problem, printable
from moefw.training import generate, trained
from moefw.training.report import say

TITLE = "\x1b]0;owned\x07 \x1b[31mred\r\n\tGrüße 🙂 \x9b2J"
SHOWN = "\\x1b]0;owned\\x07 \\x1b[31mred\\r\n\tGrüße 🙂 \\x9b2J"


class Standard(TextIOWrapper):
    """Standard output, of which a test says whether it is a terminal."""

    def __init__(self, terminal: bool) -> None:
        super().__init__(BytesIO(), encoding="utf-8", newline="")
        self.terminal = terminal

    def isatty(self) -> bool:
        return self.terminal

    def text(self) -> str:
        self.flush()
        return self.buffer.getvalue().decode()  # type: ignore[attr-defined]


def test_control_characters_and_turns_of_direction_are_escaped() -> None:
    assert printable(TITLE) == SHOWN
    assert printable("\u202egnp.exe\u2066 \u200f\u2028\x7f\x85") == r"\u202egnp.exe\u2066 \u200f\u2028\x7f\x85"
    plain = "a\tb\n\u00a0é 你好 👩\u200d💻 \\x1b"
    assert printable(plain) == plain


@pytest.mark.fault("a model that writes control characters of a terminal", "the terminal shows escapes")
@pytest.mark.parametrize("terminal", [True, False], ids=["terminal", "pipe"])
def test_generated_text_is_escaped_on_a_terminal_and_kept_elsewhere(monkeypatch, terminal: bool) -> None:
    @contextmanager
    def opened(_: Any) -> Any:
        yield SimpleNamespace(model=None, data=SimpleNamespace(encode=list)), 1, []

    run = SimpleNamespace(spec=SimpleNamespace(train=SimpleNamespace(seq_len=8)))
    monkeypatch.setattr(specs, "read_run", lambda *_: run)
    monkeypatch.setattr(trained, "open_trained", opened)
    monkeypatch.setattr(generate, "keeps_past", lambda _: True)
    monkeypatch.setattr(generate, "generate", lambda *_, **__: TITLE)
    standard = Standard(terminal)
    monkeypatch.setattr(sys, "stdout", standard)
    cli.main(["generate", "run", "--prompt", "a"], standalone_mode=False)
    assert standard.text() == (SHOWN if terminal else TITLE) + "\n"


@pytest.mark.parametrize("terminal", [True, False], ids=["terminal", "pipe"])
def test_the_sample_at_the_end_of_a_run_is_escaped_on_a_terminal(terminal: bool) -> None:
    output = StringIO()
    say(Console(file=output, force_terminal=terminal, width=100), "a \x1b]0;owned\x1b\\ b")
    assert ("\x1b" in output.getvalue()) is not terminal
    assert ("\\x1b]0;owned" in output.getvalue()) is terminal


def test_an_error_shows_the_escapes_of_a_name_that_another_wrote() -> None:
    assert str(Problem("no part is called '\x1b[2J'.", "Use\ranother.", "a\u202eb:1")) == (
        r"a\u202eb:1: no part is called '\x1b[2J'. Use\ranother."
    )
