"""The table of faults: the fault of each test marked ``fault``, the promise, and whether it held."""

from __future__ import annotations

from collections.abc import Iterable

import pytest
from attrs import frozen
from rich.console import Console
from rich.table import Table

_FAULT, _PROMISE = "fault", "promise"


@frozen
class Row:
    """A fault, the promised outcome, whether it held, and the seconds that the test took."""

    fault: str
    promise: str
    held: str
    seconds: float


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--fault-table", action="store_true", help="print which promises about faults held")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Add fault and promise to the reports of marked tests; ``{id}`` in them is the parameter's."""
    for item in items:
        for marker in item.iter_markers("fault"):
            words = [text.replace("{id}", _parameter(item)) for text in marker.args]
            item.user_properties += zip((_FAULT, _PROMISE), words, strict=True)
            break


def _parameter(item: pytest.Item) -> str:
    return item.callspec.id if isinstance(item, pytest.Function) and hasattr(item, "callspec") else ""


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    if config.getoption("--fault-table"):
        reports = [report for category in terminalreporter.stats.values() for report in category]
        found = rows(report for report in reports if isinstance(report, pytest.TestReport))
        terminalreporter.write_line(render(found))


def rows(reports: Iterable[pytest.TestReport]) -> list[Row]:
    """Return a row for each marked test, grouped by file."""
    phases: dict[str, list[pytest.TestReport]] = {}
    for report in reports:
        phases.setdefault(report.nodeid, []).append(report)
    found = []
    for own in sorted(phases.values(), key=lambda own: own[0].nodeid.split("::")[0]):
        told = dict(own[0].user_properties)
        if _FAULT in told:
            seconds = sum(report.duration for report in own)
            found.append(Row(str(told[_FAULT]), str(told[_PROMISE]), _outcome(own), seconds))
    return found


def _outcome(phases: list[pytest.TestReport]) -> str:
    outcomes = {report.outcome for report in phases}
    if "failed" in outcomes:
        return "NOT HELD"
    return "skipped" if "skipped" in outcomes else "held"


def render(found: list[Row]) -> str:
    """Return the table as text; its last line counts the faults and the promises that held."""
    table = Table("fault", "promised", "", "s", expand=True)
    for row in found:
        table.add_row(row.fault, row.promise, row.held, f"{row.seconds:.1f}")
    console = Console(width=160, markup=False, highlight=False)
    with console.capture() as captured:
        console.print(table)
    held, skipped = (sum(row.held == word for row in found) for word in ("held", "skipped"))
    rest = f", {skipped} skipped" if skipped else ""
    return f"{captured.get()}{len(found)} faults, {held} held{rest}"
