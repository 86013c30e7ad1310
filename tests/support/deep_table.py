"""The table of deep tests: what only ``make test-deep`` runs, file by file, read off the markers."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

import pytest
from attrs import frozen
from rich.console import Console
from rich.table import Table

_ROWS = pytest.StashKey["list[Row]"]()


@frozen
class Row:
    """A file of tests, what it says of itself, and how many of its tests are deep."""

    file: str
    subject: str
    num_deep: int
    num_tests: int


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--deep-table", action="store_true", help="print which tests only `make test-deep` runs")


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item], config: pytest.Config) -> None:
    """Count before ``-m`` leaves tests out."""
    if config.getoption("--deep-table"):
        config.stash[_ROWS] = rows(items)


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    if config.getoption("--deep-table"):
        terminalreporter.write_line(render(config.stash[_ROWS]))


def rows(items: Iterable[pytest.Item]) -> list[Row]:
    """A row for each file that has deep tests, in the order of their paths."""
    num_tests = Counter[str]()
    num_deep = Counter[str]()
    subjects: dict[str, str] = {}
    for item in items:
        file = item.nodeid.split("::")[0]
        num_tests[file] += 1
        if item.get_closest_marker("deep") is not None:
            num_deep[file] += 1
            module = item.getparent(pytest.Module)
            docstring = module.obj.__doc__ if module is not None else None
            subjects[file] = " ".join((docstring or "").split("\n\n")[0].split())
    return [Row(file, subjects[file], num_deep[file], num_tests[file]) for file in sorted(num_deep)]


def render(table_rows: list[Row]) -> str:
    """The table as text; its last line counts the deep tests."""
    table = Table("file", "subject", "deep", "of all", expand=True)
    for row in table_rows:
        table.add_row(row.file, row.subject, str(row.num_deep), str(row.num_tests))
    console = Console(width=160, markup=False, highlight=False)
    with console.capture() as captured:
        console.print(table)
    return f"{captured.get()}{sum(row.num_deep for row in table_rows)} deep tests"
