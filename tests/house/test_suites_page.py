"""The page of suites says what a test class may set."""

from __future__ import annotations

from pathlib import Path

from click.testing import CliRunner

import moefw.testing
from moefw.commands.plugins import plugins
from moefw.core.kinds import CERTIFIED

PAGE = (Path(__file__).parents[2] / "docs" / "guides" / "suites.md").read_text()


def test_the_page_has_the_tables_that_the_command_prints() -> None:
    printed = CliRunner().invoke(plugins, ["--suites"]).output
    written = PAGE.partition("<!-- attributes -->\n")[2].partition("<!-- end of attributes -->")[0]
    assert written.strip() == printed.strip(), "put what moefw plugins --suites prints between the comments"


def test_every_setting_of_a_suite_has_a_text() -> None:
    printed = CliRunner().invoke(plugins, ["--suites"]).output
    for kind in CERTIFIED.values():
        suite = getattr(moefw.testing, str(kind.suite))
        for base in suite.__mro__:
            settings = [name for name, text in vars(base).get("__annotations__", {}).items() if "ClassVar" in str(text)]
            missing = [name for name in settings if not name.startswith("_") and f"| `{name}` |" not in printed]
            assert not missing, f"{base.__name__}: write a text under {missing}"
