"""``moefw inspect``: what the checkpoints of a run hold."""

from __future__ import annotations

import fnmatch
import json
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
from attrs import asdict
from rich.console import Console

from moefw.commands.tables import print_table
from moefw.planner.sheets import MIB, unit_for
from moefw.training.resume import candidates

if TYPE_CHECKING:
    from moefw.training.checkpoint.reading import Reader
    from moefw.training.inspection import Inspected
    from moefw.training.records.json_lines import Record


@click.command(name="inspect")
@click.argument("run", type=click.Path())
@click.option("--step", type=click.IntRange(min=0), help="The checkpoint of this step alone; by default all.")
@click.option("--verify", is_flag=True, help="Read all bytes, and compare them with their hashes.")
@click.option("--tensors", metavar="PATTERN", help="List the tensors with such names, as in '*.router.*'.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object and nothing else.")
def inspect_run(run: str, step: int | None, verify: bool, tensors: str | None, as_json: bool) -> int:
    """Tell what the checkpoints of RUN (a run's folder) hold: steps, layouts and sizes, and what is in the last one.

    That is versions and plugins, and tensors by kind; with --tensors also their whole shapes and the parts that files
    hold. Exits with 1 if a checkpoint is damaged.
    """
    from moefw.training import inspection

    run_dir = Path(run)
    starts = inspection.starts_of(run_dir)
    # All checkpoints are candidates for the last good one, the newest first.
    folders = candidates(run_dir, "last-good" if step is None else step)[::-1]
    checkpoints = {number: inspection.inspect(folder, verify=verify) for number, folder in folders}
    steps = [_step(number, checkpoint, starts.get(number, {})) for number, checkpoint in checkpoints.items()]
    readable = {number: checkpoint.reader for number, checkpoint in checkpoints.items() if checkpoint.reader}
    last: dict[str, Any] | None = None
    if readable:
        number = max(readable)
        last = _contents(number, readable[number], starts.get(number, {}), tensors or ("*" if as_json else ""))
    if as_json:
        click.echo(json.dumps({"run": run, "verified": verify, "steps": steps, "last": last}, indent=2))
    else:
        _print_steps(steps)
        if last is not None:
            _print_contents(last)
    return 1 if any(checkpoint.damage for checkpoint in checkpoints.values()) else 0


def _step(number: int, checkpoint: Inspected, start: Record) -> dict[str, Any]:
    """What is told about each checkpoint, as JSON data; null is unknown."""
    from moefw.training import inspection

    reader = checkpoint.reader
    return {
        "step": number,
        "damage": checkpoint.damage or None,
        "format": inspection.format_of(reader) if reader else None,
        "ranks": reader.manifest.origin.world if reader else None,
        "layout": start.get("layout"),
        "files": len(reader.files) if reader else None,
        "bytes": inspection.size_of(reader) if reader else None,
    }


def _contents(number: int, reader: Reader, start: Record, pattern: str) -> dict[str, Any]:
    """What is told about one checkpoint, as JSON data. ``pattern``: of the names of the tensors that are listed."""
    from moefw.training import inspection

    origin = reader.manifest.origin
    boxes = inspection.boxes_in(reader)
    return {
        "step": number,
        "versions": start.get("versions"),
        "plugins": [list(plugin) for plugin in origin.plugins],
        "sequences": origin.sequences,
        "tokenizer": origin.tokenizer or None,
        "frozen": {"folder": origin.base.folder, "freeze": origin.base.freeze} if origin.base else None,
        "kinds": [asdict(held) for held in inspection.held_by(reader)],
        "tensors": [
            {
                "name": name,
                "dtype": saved.dtype,
                "shape": list(saved.shape),
                "parts": [asdict(box) for box in boxes[name]],
            }
            for name, saved in sorted(reader.tensors.items())
            if fnmatch.fnmatchcase(name, pattern)
        ],
    }


def _print_steps(steps: Sequence[dict[str, Any]]) -> None:
    rows = []
    for step in steps:
        layout = " ".join(f"{axis}={size}" for axis, size in (step["layout"] or {}).items())
        known = step["bytes"] is not None
        sizes = [str(step["ranks"]), layout, str(step["files"]), _size(step["bytes"])] if known else [""] * 4
        rows.append([str(step["step"]), *sizes, step["damage"] or ""])
    print_table(_console(), ("step", "ranks", "layout", "files", "size", "damage"), rows)


def _print_contents(last: dict[str, Any]) -> None:
    click.echo(f"\nstep {last['step']}")
    if last["versions"]:
        click.echo(f"versions   {', '.join(f'{name} {version}' for name, version in last['versions'].items())}")
    plugins: dict[str, list[str]] = {}
    for hook, name, distribution, version in last["plugins"]:
        plugins.setdefault(f"{distribution} {version}", []).append(f"{hook.removeprefix('moefw_')} {name}")
    for distribution, names in plugins.items():
        click.echo(f"plugins    of {distribution}: {', '.join(names)}")
    click.echo(f"sequences  {last['sequences']:,} were read")
    if last["frozen"]:
        click.echo(f"frozen     {', '.join(last['frozen']['freeze'])} are in {last['frozen']['folder']}")
    kinds = [
        [kind["kind"], *(f"{kind[key]:,}" for key in ("tensors", "parts", "elements")), _size(kind["nbytes"])]
        for kind in last["kinds"]
    ]
    click.echo()
    print_table(_console(), ("what", "tensors", "parts", "elements", "size"), kinds)
    if last["tensors"]:
        rows = [
            [tensor["name"], tensor["dtype"], _sizes(tensor["shape"]), ", ".join(map(_part, tensor["parts"]))]
            for tensor in last["tensors"]
        ]
        click.echo()
        print_table(_console(), ("tensor", "dtype", "shape", "parts"), rows)


def _part(box: dict[str, Any]) -> str:
    """A part, as the slices of the tensor that a file holds."""
    ends = (first + size for first, size in zip(box["corner"], box["shape"], strict=True))
    slices = ", ".join(f"{first}:{end}" for first, end in zip(box["corner"], ends, strict=True))
    return f"{box['file']} [{slices}]"


def _sizes(shape: Sequence[int]) -> str:
    return " x ".join(map(str, shape)) or "scalar"


def _size(num_bytes: int) -> str:
    if num_bytes < MIB:
        return f"{num_bytes:,} bytes"
    unit, name = unit_for(num_bytes)
    return f"{num_bytes / unit:,.2f} {name}"


def _console() -> Console:
    return Console(markup=False, highlight=False)
