"""Tables that commands print: framed on a terminal, plain lines elsewhere, so that other programs can read them."""

from __future__ import annotations

from collections.abc import Sequence

import click
from rich.console import Console
from rich.table import Table


def print_table(console: Console, head: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """Print a table, framed if ``console`` is a terminal."""
    if not console.is_terminal:
        print_lines(head, rows)
        return
    table = Table(*head)
    for row in rows:
        table.add_row(*row)
    console.print(table)


def print_lines(head: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """Print the rows of a table as lines, whose columns are aligned."""
    lines = [head, *rows]
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    for line in lines:
        click.echo("  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip())
