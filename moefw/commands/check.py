"""``moefw check``: every problem of a spec at once."""

from __future__ import annotations

import json

import click

from moefw.commands import specs
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
        problems = [{"where": p.where, "what": p.what, "fix": p.fix} for p in error.problems]
        click.echo(json.dumps({"ok": False, "problems": problems}))
        return 2
    facts = {layer: dict(placed.facts) for layer, placed in assembly.layers.items()}
    if as_json:
        found = {"ok": True, "problems": [], "world": assembly.layout.world, "resolved": assembly.resolved()}
        click.echo(json.dumps(found))
        return 0
    sizes = " ".join(f"{axis}={size}" for axis, size in assembly.layout.sizes.items())
    click.echo(f"{spec} is sound: {assembly.layout.world} ranks ({sizes}), {len(facts)} layers checked")
    chosen = {name: assembly.resolved()[name]["use"] for name in ("routing", "dispatch", "gemm", "precision")}
    click.echo("  ".join(f"{name}: {use}" for name, use in chosen.items()))
    return 0
