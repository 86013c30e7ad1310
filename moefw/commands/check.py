"""``moefw check``: every problem of a spec at once."""

from __future__ import annotations

import json

import click

from moefw.commands import specs
from moefw.compose.spec.structure import plain
from moefw.core.errors import MoefwError


@click.command()
@click.argument("spec", type=click.Path())
@click.argument("overrides", nargs=-1)
@click.option("--world", type=click.IntRange(min=1), help="Ranks to lay out over; by default the smallest that fits.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object and nothing else.")
def check(spec: str, overrides: tuple[str, ...], world: int | None, as_json: bool) -> int:
    """Report every problem of SPEC (with key=value overrides), without a GPU or a process group.

    Exits with 2 if there is any.
    """
    try:
        assembly = specs.read(spec, overrides, world)
    except MoefwError as error:
        if not as_json:
            raise
        click.echo(json.dumps({"ok": False, "problems": plain(error.problems)}))
        return 2
    layout, resolved = assembly.layout, assembly.resolved()
    if as_json:
        click.echo(
            json.dumps(
                {"ok": True, "problems": [], "notes": assembly.notes, "world": layout.world, "resolved": resolved}
            )
        )
        return 0
    name = click.format_filename(spec)
    sizes = " ".join(f"{axis}={size}" for axis, size in layout.sizes.items())
    click.echo(f"{name} is sound: {layout.world} ranks ({sizes}), {len(assembly.layers)} MoE layers")
    click.echo("  ".join(f"{key}: {resolved[key]['use']}" for key in ("routing", "dispatch", "gemm", "precision")))
    for note in assembly.notes:
        click.echo(note)
    return 0
