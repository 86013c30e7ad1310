"""``moefw check``: every problem of a spec at once."""

from __future__ import annotations

import json

import click

from moefw.commands import specs
from moefw.compose.assembly import Assembly
from moefw.compose.spec.source import counted
from moefw.compose.spec.structure import plain
from moefw.core.errors import MoefwError


@click.command()
@click.argument("spec", type=click.Path())
@click.argument("overrides", nargs=-1)
@click.option("--world", type=click.IntRange(min=1), help="Ranks to lay out over; by default the smallest that fits.")
@click.option("--deep", is_flag=True, help="Also build the parts of a rank, up to the first that fails to import.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object and nothing else.")
def check(spec: str, overrides: tuple[str, ...], world: int | None, deep: bool, as_json: bool) -> int:
    """Report every problem of SPEC (with key=value overrides), without a GPU or a process group.

    Exits with 2 if there is any. --deep imports torch and what the parts import to be built, on tensors without memory.
    So does a spec with train.weights, whose folder is compared with the model.
    """
    try:
        assembly = specs.read(spec, overrides, world, files_here=True)
        unread = _compare_weights(assembly) if assembly.spec.train.weights is not None else ""
        unbuilt = _try_to_build(assembly) if deep else ""
    except MoefwError as error:
        if not as_json:
            raise
        click.echo(json.dumps({"ok": False, "problems": plain(error.problems)}))
        return 2
    layout = assembly.layout
    resolved = assembly.resolved()
    warnings = assembly.registry.warnings
    if as_json:
        report = {"ok": True, "problems": [], "notes": assembly.notes, "world": layout.world, "resolved": resolved}
        click.echo(json.dumps({**report, "warnings": warnings, "unbuilt": unbuilt, "unread": unread}))
        return 0
    for warning in warnings:
        click.echo(f"warning: {warning}", err=True)
    name = click.format_filename(spec)
    sizes = " ".join(f"{axis}={size}" for axis, size in layout.sizes.items())
    ranks = counted(layout.world, "rank")
    layers = counted(len(assembly.layers), "MoE layer")
    click.echo(f"{name} is sound: {ranks} ({sizes}), {layers}")
    click.echo("  ".join(f"{key}: {resolved[key]['use']}" for key in ("routing", "dispatch", "gemm", "precision")))
    for note in assembly.notes:
        click.echo(note)
    if unread:
        click.echo(f"train.weights is not compared here: {unread}")
    if deep:
        click.echo(f"not built here: {unbuilt}" if unbuilt else "every part builds")
    return 0


def _compare_weights(assembly: Assembly) -> str:
    from moefw.training.weights_of_a_spec import compare_weights

    return compare_weights(assembly)


def _try_to_build(assembly: Assembly) -> str:
    from moefw.planner.measurement.measure import try_to_build

    return try_to_build(assembly)
