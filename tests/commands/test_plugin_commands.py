"""Commands that plugins add to ``moefw``."""

from __future__ import annotations

import sys
from collections.abc import Callable

import pytest
from click.testing import CliRunner

from moefw.cli import cli, main
from moefw.compose.trust import ALLOWED

Install = Callable[..., None]
ECHO = """
import click, moefw

@click.command()
@click.argument("words", nargs=-1)
def {name}(words):
    "Say words."
    if "fail" in words:
        raise moefw.RunError("it failed.", "Try again.")
    click.echo(" ".join(words))
"""


def error(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    """What a command that fails prints."""
    with pytest.raises(SystemExit) as left:
        main([*arguments])
    assert left.value.code
    return capsys.readouterr().err


def test_a_command_of_a_plugin_runs_and_its_errors_are_messages(
    install: Install, capsys: pytest.CaptureFixture[str]
) -> None:
    install("my-tools", ECHO.format(name="say"), commands=["say"])
    assert CliRunner().invoke(cli, ["say", "a", "b"]).output == "a b\n"
    assert "Say words." in CliRunner().invoke(cli, ["say", "--help"]).output
    assert error(capsys, "say", "fail") == "error: it failed. Try again.\n"


def test_help_lists_it_with_its_origin_and_imports_nothing(install: Install) -> None:
    assert "Commands of plugins" not in CliRunner().invoke(cli, ["--help"]).output
    install("my-tools", ECHO.format(name="say"), commands=["say"])
    assert "Commands of plugins:\n  say  Of my-tools 1.5.\n" in CliRunner().invoke(cli, ["--help"]).output
    assert "my_tools" not in sys.modules


def test_a_built_in_command_is_not_replaced(install: Install) -> None:
    install("my-tools", ECHO.format(name="check"), commands=["check"])
    shown = " ".join(CliRunner().invoke(cli, ["--help"]).output.split())
    assert "Cannot run: the command 'check' of my-tools 1.5 has the name of one of moefw, which stays." in shown
    assert "SPEC" in CliRunner().invoke(cli, ["check", "--help"]).output
    assert "my_tools" not in sys.modules


def test_two_of_one_name_are_refused(install: Install, capsys: pytest.CaptureFixture[str]) -> None:
    install("my-tools", ECHO.format(name="say"), commands=["say"])
    install("your-tools", ECHO.format(name="say"), commands=["say"])
    said = error(capsys, "say", "a")
    assert "two distributions bring a command 'say': my-tools 1.5 and your-tools 1.5." in said


def test_what_is_not_allowed_is_not_imported_and_takes_no_name(
    install: Install, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    install("strange-tools", 'raise AssertionError("imported")\n', commands=["say"])
    monkeypatch.setenv(ALLOWED, "my-tools")
    assert "is of distribution strange-tools 1.5, which is not allowed." in error(capsys, "say")
    assert "strange_tools" not in sys.modules
    install("my-tools", ECHO.format(name="say"), commands=["say"])
    assert CliRunner().invoke(cli, ["say", "a"]).output == "a\n"


@pytest.mark.parametrize(
    ("source", "says"),
    [
        ("import no_such_module", "fails to import: ModuleNotFoundError"),
        ("def say(): pass", "which is no click.Command. Mend or uninstall my-tools."),
    ],
)
def test_a_broken_one_is_named(install: Install, capsys: pytest.CaptureFixture[str], source: str, says: str) -> None:
    install("my-tools", source, commands=["say"])
    said = error(capsys, "say")
    assert said.startswith("error: the command 'say' (distribution my-tools 1.5) ")
    assert says in said
