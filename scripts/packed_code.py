"""Count what makes code hard to read: unlike values packed into one assignment, and names that say nothing.

Prints packed assignments per 1,000 statements, and the number of variables that are called `found`, `one`, `wanted` or
`given`, for each source root. `--list` prints the place of each.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import click

ROOT = Path(__file__).parent.parent
SOURCE_ROOTS = ("moefw", "kernels")
NAMES_THAT_SAY_NOTHING = frozenset({"found", "one", "wanted", "given"})


def is_packed(node: ast.stmt) -> bool:
    """Whether a statement is `a, b = x, y`. An exchange, `a, b = b, a`, is not, nor is `rows, dim = x.shape`."""
    if not isinstance(node, ast.Assign) or not isinstance(node.value, ast.Tuple):
        return False
    targets = [target for target in node.targets if isinstance(target, ast.Tuple)]
    if not targets or any(isinstance(value, ast.Starred) for value in node.value.elts):
        return False
    names_assigned = sorted(ast.unparse(element) for element in targets[0].elts)
    names_read = sorted(ast.unparse(element) for element in node.value.elts)
    return names_assigned != names_read


def bound_name(node: ast.expr | ast.arg) -> str | None:
    """Name that a node binds; None if it binds none."""
    if isinstance(node, ast.arg):
        return node.arg
    if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
        return node.id
    return None


def sources(source_root: str) -> Iterator[Path]:
    """Yield the Python files of a source root."""
    yield from sorted((ROOT / source_root).rglob("*.py"))


@click.command()
@click.option("--list", "list_places", is_flag=True, help="Print the place of each.")
@click.option("--under", default="", help="Only files whose path begins with this.")
def main(list_places: bool, under: str) -> None:
    """Print both figures for each source root."""
    for source_root in SOURCE_ROOTS:
        num_statements = 0
        packed: list[str] = []
        named: list[str] = []
        for path in sources(source_root):
            relative = path.relative_to(ROOT)
            if not str(relative).startswith(under):
                continue
            for node in ast.walk(ast.parse(path.read_text())):
                if isinstance(node, ast.stmt):
                    num_statements += 1
                    if is_packed(node):
                        packed.append(f"{relative}:{node.lineno}: {ast.unparse(node)}")
                elif isinstance(node, ast.expr | ast.arg) and bound_name(node) in NAMES_THAT_SAY_NOTHING:
                    named.append(f"{relative}:{node.lineno}: {bound_name(node)}")
        if list_places:
            print(*packed, *named, sep="\n")
        if num_statements:
            rate = 1000 * len(packed) / num_statements
            print(
                f"{source_root}: {num_statements} statements, {len(packed)} packed assignments ({rate:.1f} per 1,000), "
                f"{len(named)} variables called {', '.join(sorted(NAMES_THAT_SAY_NOTHING))}"
            )


if __name__ == "__main__":
    main()
