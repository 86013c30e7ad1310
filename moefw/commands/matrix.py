"""``moefw matrix``: which variants of plugins go together."""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterator, Sequence

import click
from attrs import frozen
from rich.console import Console

from moefw.commands.tables import print_table
from moefw.commands.waiting import waiting
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
    with waiting("resolving every pair of variants"):
        surveyed = survey(Registry(), ours_only=not everybody)
    if as_json:
        click.echo(json.dumps(data(surveyed), indent=2))
    elif markdown:
        click.echo("\n".join(_page(surveyed)), nl=False)
    else:
        _show(surveyed)


def data(matrix: Matrix) -> dict[str, object]:
    """Matrix as plain data."""
    return {
        "pairs": matrix.pairs,
        "refused": len(matrix.refusals),
        "share_refused": matrix.share_refused,
        "sections": {
            section: [
                {
                    "variant": way.label,
                    "spec": way.choice,
                    "distribution": way.distribution,
                    "needs": list(matrix.needs.get(way, ())),
                }
                for way in ways
            ]
            for section, ways in matrix.sections.items()
        },
        "refusals": [
            {
                "variants": {variant.section: variant.label for variant in (refusal.variant, refusal.other)},
                "reason": refusal.reason,
            }
            for refusal in matrix.refusals
        ],
        "refused_alone": [
            {"section": way.section, "variant": way.label, "reason": reason} for way, reason in matrix.alone.items()
        ],
        "problems": plain(matrix.problems),
    }


def grids(matrix: Matrix) -> Iterator[Grid]:
    """Yield a table for each pair of sections with refusals. Rows and columns without refusals are merged into one."""
    for (section, variants), (other, others) in itertools.combinations(matrix.sections.items(), 2):
        refused = {
            (refusal.variant, refusal.other): refusal
            for refusal in matrix.refusals
            if (refusal.variant.section, refusal.other.section) == (section, other)
        }
        if refused:
            yield _grid(f"{section} x {other}", variants, others, refused)


def _grid(
    title: str,
    variants: Sequence[Variant],
    others: Sequence[Variant],
    refused: dict[tuple[Variant, Variant], Refusal],
) -> Grid:
    """Table of the variants of one section by those of another. Variants that go with all are one row, or column."""
    rows = [variant for variant in variants if any(variant == refused_row for refused_row, _ in refused)]
    columns = [variant for variant in others if any(variant == refused_column for _, refused_column in refused)]
    reasons = list(dict.fromkeys(refusal.reason for refusal in refused.values()))

    def cell(row: Variant, column: Variant) -> str:
        refusal = refused.get((row, column))
        return "yes" if refusal is None else f"no [{reasons.index(refusal.reason) + 1}]"

    head = [title, *(column.label for column in columns)]
    body = [[row.label, *(cell(row, column) for column in columns)] for row in rows]
    num_other_rows = len(variants) - len(rows)
    if num_other_rows:
        body.append([counted(num_other_rows, "other"), *("yes" for _ in columns)])
    num_other_columns = len(others) - len(columns)
    if num_other_columns:
        head.append(counted(num_other_columns, "other"))
        for line in body:
            line.append("yes")
    return Grid(title, head, body, [f"[{number + 1}] {reason}" for number, reason in enumerate(reasons)])


def _together(matrix: Matrix) -> str:
    with_refusals = {(refusal.variant.section, refusal.other.section) for refusal in matrix.refusals}
    pairs = [pair for pair in itertools.combinations(matrix.sections, 2) if pair not in with_refusals]
    return f"everything goes with everything: {', '.join(f'{section} x {other}' for section, other in pairs)}"


def _needs(matrix: Matrix) -> Grid | None:
    rows = [[f"{way.section}: {way.label}", ", ".join(needs)] for way, needs in matrix.needs.items()]
    return Grid("needs of the machine", ("variant", "needs"), rows) if rows else None


def _alone(matrix: Matrix) -> Grid | None:
    rows = [[f"{way.section}: {way.label}", reason] for way, reason in matrix.alone.items()]
    return Grid("refused with everything", ("variant", "why"), rows) if rows else None


def _show(matrix: Matrix) -> None:
    console = Console(markup=False, highlight=False)
    click.echo(matrix.summary())
    click.echo(_together(matrix))
    for grid in (*grids(matrix), _needs(matrix), _alone(matrix)):
        if grid is not None:
            click.echo()
            print_table(console, grid.head, grid.rows)
            for note in grid.notes:
                console.print(note, soft_wrap=not console.is_terminal)
    for problem in matrix.problems:
        click.echo(f"broken: {problem}")


def _page(matrix: Matrix) -> Iterator[str]:
    yield HEAD
    yield f"**{matrix.summary()}**; {_together(matrix)}.\n"
    for grid in grids(matrix):
        yield from _markdown(grid)
    for title, own in (("Needs of the machine", _needs(matrix)), ("Refused with everything", _alone(matrix))):
        if own is not None:
            yield f"## {title}\n"
            yield from _markdown(own)
    yield "## The variants\n"
    for section, ways in matrix.sections.items():
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
