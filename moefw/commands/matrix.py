"""``moefw matrix``: which variants of plugins go together."""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterator, Sequence

import click
from attrs import frozen
from rich.console import Console
from rich.table import Table

from moefw.compose.registry import Registry
from moefw.compose.spec.source import counted
from moefw.compose.spec.structure import plain
from moefw.testing.matrix import Matrix, Refusal, survey
from moefw.testing.variants import Variant

HEAD = """# What goes with what

Written by `moefw matrix --markdown`; a test compares. *no*: resolve refuses a spec with both, for the reason
below the table, whatever else stands in it: the plainest other parts, those that either needs, and then each of the
others were tried. What goes together is [held against the dense oracle](combinations.md), outputs and gradients, unless
it needs a GPU or a library; with `pp`, a whole model is held against itself in one stage.
"""


@frozen
class Grid:
    """A table of words under a title; ``notes`` are its footnotes."""

    title: str
    head: Sequence[str]
    rows: Sequence[Sequence[str]]
    notes: Sequence[str] = ()


@click.command()
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object and nothing else.")
@click.option("--markdown", is_flag=True, help="Print the page docs/matrix.md.")
@click.option("--all", "everybody", is_flag=True, help="With the plugins of other distributions.")
def matrix(as_json: bool, markdown: bool, everybody: bool) -> None:
    """Show which variants of plugins go together, and why others do not, by resolving every pair.

    Nothing is started, and this machine is not inspected: the needs of plugins on a machine are listed separately.
    """
    found = survey(Registry(), ours_only=not everybody)
    if as_json:
        click.echo(json.dumps(data(found), indent=2))
    elif markdown:
        click.echo("\n".join(_page(found)), nl=False)
    else:
        _show(found)


def data(found: Matrix) -> dict[str, object]:
    """Return a matrix as plain data."""
    return {
        "pairs": found.pairs,
        "refused": len(found.refusals),
        "share_refused": found.share_refused,
        "sections": {
            section: [
                {
                    "variant": way.label,
                    "spec": way.choice,
                    "distribution": way.distribution,
                    "needs": list(found.needs.get(way, ())),
                }
                for way in ways
            ]
            for section, ways in found.sections.items()
        },
        "refusals": [
            {"variants": {one.section: one.label for one in (refusal.one, refusal.other)}, "reason": refusal.reason}
            for refusal in found.refusals
        ],
        "refused_alone": [
            {"section": way.section, "variant": way.label, "reason": reason} for way, reason in found.alone.items()
        ],
        "problems": plain(found.problems),
    }


def grids(found: Matrix) -> Iterator[Grid]:
    """Yield a table for each pair of sections with refusals. Rows and columns without refusals are merged into one."""
    for (one, here), (other, there) in itertools.combinations(found.sections.items(), 2):
        refused = {
            (refusal.one, refusal.other): refusal
            for refusal in found.refusals
            if (refusal.one.section, refusal.other.section) == (one, other)
        }
        if refused:
            yield _grid(f"{one} x {other}", here, there, refused)


def _grid(
    title: str, here: Sequence[Variant], there: Sequence[Variant], refused: dict[tuple[Variant, Variant], Refusal]
) -> Grid:
    rows = [way for way in here if any(way == one for one, _ in refused)]
    columns = [way for way in there if any(way == other for _, other in refused)]
    notes = list(dict.fromkeys(refusal.reason for refusal in refused.values()))

    def cell(one: Variant, other: Variant) -> str:
        refusal = refused.get((one, other))
        return "yes" if refusal is None else f"no [{notes.index(refusal.reason) + 1}]"

    more, beside = len(here) - len(rows), len(there) - len(columns)
    ending = ["yes"] if beside else []
    body = [[way.label, *(cell(way, column) for column in columns), *ending] for way in rows]
    if more:
        body.append([counted(more, "other"), *("yes" for _ in columns), *ending])
    head = [title, *(column.label for column in columns), *([counted(beside, "other")] if beside else [])]
    return Grid(title, head, body, [f"[{number + 1}] {note}" for number, note in enumerate(notes)])


def _together(found: Matrix) -> str:
    with_refusals = {(refusal.one.section, refusal.other.section) for refusal in found.refusals}
    pairs = [pair for pair in itertools.combinations(found.sections, 2) if pair not in with_refusals]
    return f"everything goes with everything: {', '.join(f'{one} x {other}' for one, other in pairs)}"


def _needs(found: Matrix) -> Grid | None:
    rows = [[f"{way.section}: {way.label}", ", ".join(needs)] for way, needs in found.needs.items()]
    return Grid("needs of the machine", ("variant", "needs"), rows) if rows else None


def _alone(found: Matrix) -> Grid | None:
    rows = [[f"{way.section}: {way.label}", reason] for way, reason in found.alone.items()]
    return Grid("refused with everything", ("variant", "why"), rows) if rows else None


def _show(found: Matrix) -> None:
    console = Console(markup=False, highlight=False)
    click.echo(found.summary())
    click.echo(_together(found))
    for grid in (*grids(found), _needs(found), _alone(found)):
        if grid is not None:
            click.echo()
            if console.is_terminal:
                _print_table(console, grid)
            else:
                _print_lines(grid)
    for problem in found.problems:
        click.echo(f"broken: {problem}")


def _print_table(console: Console, grid: Grid) -> None:
    table = Table(*grid.head)
    for row in grid.rows:
        table.add_row(*row)
    console.print(table)
    for note in grid.notes:
        console.print(note)


def _print_lines(grid: Grid) -> None:
    rows = [grid.head, *grid.rows]
    widths = [max(map(len, column)) for column in zip(*rows)]
    for row in rows:
        click.echo("  ".join(cell.ljust(width) for cell, width in zip(row, widths)).rstrip())
    for note in grid.notes:
        click.echo(note)


def _page(found: Matrix) -> Iterator[str]:
    yield HEAD
    yield f"**{found.summary()}**; {_together(found)}.\n"
    for grid in grids(found):
        yield from _markdown(grid)
    for title, own in (("Needs of the machine", _needs(found)), ("Refused with everything", _alone(found))):
        if own is not None:
            yield f"## {title}\n"
            yield from _markdown(own)
    yield "## The variants\n"
    for section, ways in found.sections.items():
        rows = [[way.label, f"`{json.dumps(way.choice)}`"] for way in ways]
        yield from _markdown(Grid(section, (section, "in a spec"), rows))


def _markdown(grid: Grid) -> Iterator[str]:
    yield f"| {' | '.join(grid.head)} |"
    yield "|" + "---|" * len(grid.head)
    for row in grid.rows:
        yield f"| {' | '.join(row)} |"
    yield ""
    for note in grid.notes:
        yield f"{note}\n"
