"""``moefw plugins``: every plugin by kind, its distribution, and whether it is usable here."""

from __future__ import annotations

import inspect
import itertools
import json
from collections.abc import Iterator, Sequence
from typing import Any, Literal, get_args, get_origin

import attrs
import click
from rich.console import Console
from rich.table import Table

from moefw.commands.facts import page as facts_page
from moefw.commands.kinds import page as kinds_page
from moefw.commands.tables import print_lines
from moefw.compose.machine import lone_site, this_machine
from moefw.compose.registry import Offer, RegisteredPlugin, Registry
from moefw.compose.spec.hints import flow
from moefw.compose.spec.option_texts import option_texts
from moefw.compose.spec.structure import plain
from moefw.core.errors import PluginError, nearest
from moefw.core.kinds import KINDS
from moefw.core.plugin import Plugin
from moefw.core.site import Dims, Site

HEADINGS = ("kind", "name", "distribution", "usable here", "what it is")


@click.command()
@click.argument("name", required=False)
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object and nothing else.")
@click.option("--kinds", is_flag=True, help="Print the page docs/guides/kinds.md: the kinds of plugin.")
@click.option("--facts", is_flag=True, help="Print the page docs/guides/facts.md: the words of offers and needs.")
@click.option("--suites", is_flag=True, help="Print what a test class of each contract suite may set.")
def plugins(name: str | None, as_json: bool, kinds: bool, facts: bool, suites: bool) -> None:
    """List every part by kind: distribution, version, usable here; observers; what is not allowed.

    With NAME, tell of that part alone why it is not usable here, or only in part, and its options. --json tells both
    of all parts.
    """
    if kinds or facts:
        click.echo("\n".join(kinds_page() if kinds else facts_page()))
        return
    if suites:
        from moefw.commands.suites import page as suites_page  # imports torch

        click.echo("\n".join(suites_page()).rstrip())
        return
    registry = Registry()
    problems = registry.load_all()
    dims = Dims(model_dim=256, expert_dim=256, num_experts=16, top_k=4)
    site = lone_site(dims, this_machine())
    listed = [describe(part, site) for part in registry.parts()]
    if name is not None:
        listed = [entry for entry in listed if entry["name"] == name]
        if not listed:
            raise PluginError(f"no part is called {name!r}.", nearest(name, (part.name for part in registry.parts())))
    if as_json:
        others = {"observers": [*map(_origin, registry.observers)], "not_allowed": [*map(_origin, registry.barred)]}
        said = {"warnings": registry.warnings, "problems": plain(problems)}
        click.echo(json.dumps({"plugins": listed, **others, **said}, indent=2, default=str))
        return
    if name is not None:
        click.echo("\n\n".join("\n".join(_page(entry)) for entry in listed))
        return
    console = Console(markup=False, highlight=False)
    if console.is_terminal:
        _print_table(console, listed)
    else:
        print_lines(HEADINGS, [_row(entry) for entry in listed])
    for what, offers in (("observer", registry.observers), ("not allowed", registry.barred)):
        for offer in offers:
            console.print(f"{what}: {' '.join(_origin(offer).values())}", soft_wrap=True)
    for warning in registry.warnings:
        console.print(f"warning: {warning}", soft_wrap=True)
    for problem in problems:
        console.print(f"broken: {problem}", style="bold red", soft_wrap=True)


def describe(part: RegisteredPlugin, site: Site) -> dict[str, Any]:
    """Description of a plugin as plain data.

    ``usable`` is None if it depends on the options; ``options`` holds the defaults, None for those in ``required``;
    ``option_texts`` holds the text under each option's field, if its source is there.
    """
    usable, reason = _usable(part.declaration, site)
    fields = [field for field in attrs.fields(part.declaration) if field.init]
    return {
        "kind": part.kind,
        "name": part.name,
        "distribution": part.distribution,
        "version": part.version,
        "summary": inspect.cleandoc(part.declaration.__doc__ or "").partition("\n")[0],
        "usable": usable,
        "reason": reason,
        "options": {field.name: _default(field) for field in fields},
        "required": [field.name for field in fields if field.default is attrs.NOTHING],
        "option_texts": option_texts(part.declaration),
    }


def _origin(offer: Offer) -> dict[str, str]:
    return {"name": offer.entry.name, "distribution": offer.distribution, "version": offer.version}


def _default(field: attrs.Attribute[Any]) -> Any:
    default: Any = field.default
    if isinstance(default, attrs.Factory):  # type: ignore[arg-type]
        return None if default.takes_self else plain(default.factory())
    return None if default is attrs.NOTHING else plain(default)


def _usable(declaration: type[Plugin], site: Site) -> tuple[bool | None, str]:
    """Try the defaults with every choice of required options. Return all reasons, even if one choice is usable."""
    try:
        lacks = {label: _lack(declaration(**options), site) for label, options in _layer_cases(declaration)}
    except Exception as error:
        return False, f"its declaration raises {type(error).__name__}: {error}"
    if not lacks:
        return None, "that depends on its options"
    reasons = [f"{label}: {lack}" if label else lack for label, lack in lacks.items() if lack]
    return len(reasons) < len(lacks), "; ".join(reasons)


def _layer_cases(declaration: type[Plugin]) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield labelled sets of required options: each choice of a Literal, an empty tuple; none if one has no guess."""
    required = [field for field in attrs.fields(attrs.resolve_types(declaration)) if field.default is attrs.NOTHING]
    choices = [_guesses(field.type) for field in required]
    for values in itertools.product(*choices):
        label = ", ".join(f"{field.name}: {value}" for field, value in zip(required, values) if value != ())
        yield label, {field.alias: value for field, value in zip(required, values)}


def _guesses(kind: Any) -> tuple[Any, ...]:
    if get_origin(kind) is Literal:
        return get_args(kind)
    return ((),) if get_origin(kind) is tuple else ()


def _lack(part: Plugin, site: Site) -> str:
    """Needs of a plugin that the machine does not meet; empty if there are none."""
    machine = site.machine
    lacks = []
    for need in part.needs(site):
        if need.fact == "device" and machine.device not in need.value:
            devices = need.value if isinstance(need.value, str) else " or ".join(need.value)
            lacks.append(f"needs {devices}, this machine has {machine.device}: {need.reason}. {need.fix}".strip())
        if need.fact == "capability" and machine.capability not in (None, *need.value):
            what = f"needs compute capability {' or '.join(need.value)}, this machine has {machine.capability}"
            lacks.append(f"{what}: {need.reason}. {need.fix}".strip())
        if need.fact == "package" and not machine.has_package(need.value):
            lacks.append(f"needs the package {need.value}: {need.reason}. {need.fix}".strip())
    return " ".join(lacks)


def _row(entry: dict[str, Any]) -> tuple[str, ...]:
    distribution = f"{entry['distribution']} {entry['version']}"
    return entry["kind"], entry["name"], distribution, _verdict(entry), entry["summary"]


def _verdict(entry: dict[str, Any]) -> str:
    return {True: "in part" if entry["reason"] else "yes", False: "no", None: "depends"}[entry["usable"]]


def _page(entry: dict[str, Any]) -> Iterator[str]:
    """Yield the lines that describe one plugin."""
    kind = KINDS[entry["kind"]]
    yield f"{entry['name']}, {kind.one} of {entry['distribution']} {entry['version']}: {entry['summary']}"
    yield f"usable here: {_verdict(entry)}{': ' if entry['reason'] else ''}{entry['reason']}"
    for option, default in entry["options"].items():
        value = "required" if option in entry["required"] else flow(default)
        yield f"  {option} ({value}): {entry['option_texts'].get(option, '')}".rstrip(": ")


def _print_table(console: Console, listed: Sequence[dict[str, Any]]) -> None:
    """Print the plugins of each kind under its name. Only summaries are wrapped: names can be copied."""
    rows = [HEADINGS, *map(_row, listed)]
    *names, what = HEADINGS[1:]
    table = Table()
    for index, heading in enumerate(names, start=1):
        table.add_column(heading, no_wrap=True, min_width=max(len(row[index]) for row in rows))
    table.add_column(what)
    styles = {True: "", False: "red", None: "yellow"}
    for kind, group in itertools.groupby(listed, key=lambda entry: entry["kind"]):
        table.add_row(kind, style="bold")
        for entry in group:
            table.add_row(*_row(entry)[1:], style=styles[entry["usable"]])
        table.add_section()
    console.print(table)
    console.print("`moefw plugins NAME` tells why a part is not usable here, and its options.", soft_wrap=True)
