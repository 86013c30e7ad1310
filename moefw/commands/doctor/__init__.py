"""``moefw doctor``: checks this machine and its libraries by using them."""

from __future__ import annotations

import json
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from types import MappingProxyType

import click
from attrs import asdict
from rich.console import Console
from rich.table import Table

from moefw.commands.doctor.capability import Capability
from moefw.commands.doctor.children import ask
from moefw.commands.doctor.machine import inspect_machine
from moefw.commands.doctor.probes import DEEP_PROBES, GROUPS, PROBES, probes_of_plugins
from moefw.core.probes import Probe
from moefw.core.site import Machine

TIMEOUT_S = 20.0
DEEP_TIMEOUT_S = 300.0
WORKERS = 2
NEEDED = ("python", "torch", "gloo", "grouped_mm", "safetensors")
"""The capabilities that training needs."""


@click.command()
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object and nothing else.")
@click.option("--deep", is_flag=True, help="Also multiply with each of our kernels, compiled for the GPU, and compare.")
@click.option(
    "--timeout",
    type=click.FloatRange(min=1),
    help=f"Seconds in all.  [default: {TIMEOUT_S:.0f}, with --deep {DEEP_TIMEOUT_S:.0f}]",
)
@click.option(
    "--ranks",
    "spec",
    type=click.Path(),
    metavar="SPEC",
    help="Instead measure how fast the ranks of SPEC, with overrides, reach each other, and name those that are slow.",
)
@click.argument("overrides", nargs=-1)
def doctor(as_json: bool, deep: bool, timeout: float | None, spec: str | None, overrides: tuple[str, ...]) -> int:
    """Tell what is available here, what is installed but unusable and why, and how to install what is missing.

    Exits with 1 if something is not available that training needs. With --ranks, starts the local ranks that the layout
    of SPEC needs, or joins a torchrun or Slurm world when it finds one.
    """
    if spec is not None:
        from moefw.commands.doctor.ranks import measure_ranks

        return measure_ranks(spec, overrides, as_json=as_json)
    if overrides:
        raise click.UsageError("overrides are of a spec: moefw doctor --ranks SPEC key=value ...")
    with Console(stderr=True).status("trying what is installed"):
        if deep:
            capabilities = examine(timeout_s=timeout or DEEP_TIMEOUT_S, also=DEEP_PROBES)
        else:
            capabilities = examine(timeout_s=timeout or TIMEOUT_S)
    stops = [item.name for item in capabilities if item.name in NEEDED and item.state != "available"]
    if as_json:
        click.echo(
            json.dumps({"can_train": not stops, "capabilities": [asdict(item) for item in capabilities]}, indent=2)
        )
    else:
        _print(capabilities)
        click.echo(f"Training cannot run here: see {', '.join(stops)}." if stops else "Training can run here.")
    click.get_current_context().exit(1 if stops else 0)


def examine(*, timeout_s: float, also: Mapping[str, Probe] = MappingProxyType({})) -> list[Capability]:
    """All capabilities, and those of the probes in ``also``, each tried, within about ``timeout_s`` seconds in all."""
    deadline = time.monotonic() + timeout_s
    of_plugins, problems = probes_of_plugins()
    probes = {**PROBES, **also, **{probe.name: probe for probe in of_plugins if probe.name not in PROBES}}
    capabilities = inspect_machine()
    capabilities += [Capability("plugins", "unusable", detail=problem.what, fix=problem.fix) for problem in problems]
    absent = [name for name, probe in probes.items() if not Machine().has_package(probe.package)]
    capabilities += [Capability(name, "missing", fix=probes[name].fix) for name in absent]
    shared_children = [*GROUPS, *((name,) for name in probes if name not in PROBES)]
    groups = [[name for name in group if name not in absent] for group in shared_children]
    with ThreadPoolExecutor(WORKERS) as pool:
        for answers in pool.map(lambda group: ask(group, deadline=deadline), groups):
            capabilities += answers
    order = ["python", *probes]
    return sorted(capabilities, key=lambda item: order.index(item.name) if item.name in order else len(order))


def _print(capabilities: Sequence[Capability]) -> None:
    console = Console(markup=False, highlight=False)
    if console.is_terminal:
        table = Table("capability", "state", "version", "detail")
        styles = {"available": "green", "unusable": "red", "missing": "yellow"}
        for item in capabilities:
            table.add_row(item.name, item.state, item.version, "\n".join(_lines(item)), style=styles[item.state])
        console.print(table)
        return
    name_width = max(len(item.name) for item in capabilities)
    version_width = max(len(item.version) for item in capabilities)
    for item in capabilities:
        head = f"{item.state:<9}  {item.name:<{name_width}}  {item.version:<{version_width}}  "
        first, *more = _lines(item)
        click.echo(f"{head}{first}".rstrip())
        for line in more:
            click.echo(" " * len(head) + line)


def _lines(item: Capability) -> list[str]:
    lines = [item.detail, f"-> {item.fix}" if item.fix else ""]
    return [line for line in lines if line] or [""]
