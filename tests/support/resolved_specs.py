"""Specs given as text, resolved or refused, with the installed plugins and more."""

from __future__ import annotations

import types
from collections.abc import Sequence
from typing import Any, ClassVar

import pytest
from attrs import frozen

import moefw
from moefw.compose.assembly import Assembly
from moefw.compose.defaults import defaults
from moefw.compose.registry import Registry
from moefw.compose.resolve import assemble_tree
from moefw.compose.spec.source import Marks, read_yaml
from moefw.core.errors import MoefwError, PlanError, Problem
from moefw.core.plugin import DispatcherPlugin
from moefw.core.site import Machine, Site

REGISTRY = Registry()
DEFAULTS = defaults()


def resolved(
    text: str = "{}",
    *,
    registry: Registry = REGISTRY,
    world: int | None = None,
    machine: Any = None,
    for_run: bool = True,
) -> Assembly:
    """Return the assembly of a spec that is given as text."""
    marks, problems = Marks("spec.yaml"), list[Problem]()
    tree = read_yaml(text, marks, problems)
    machine = machine or Machine()
    return assemble_tree(
        tree,
        marks,
        problems,
        defaults=DEFAULTS,
        registry=registry,
        world=world,
        machine=machine,
        for_run=for_run,
    )


def refused(text: str, kind: type[MoefwError] = PlanError, **kwargs: Any) -> list[Problem]:
    """Return the problems for which a spec is refused."""
    with pytest.raises(MoefwError) as caught:
        resolved(text, **kwargs)
    assert type(caught.value) is kind
    return list(caught.value.problems)


def refusal(text: str, kind: type[MoefwError] = PlanError, **kwargs: Any) -> Problem:
    (problem,) = refused(text, kind, **kwargs)
    return problem


def problems_of(text: str) -> list[str]:
    """Return the problems of a spec, which may have none."""
    try:
        resolved(text)
    except MoefwError as error:
        return [str(problem) for problem in error.problems]
    return []


def registry(**hooks: Sequence[type]) -> Registry:
    """Return the installed plugins and some more, by hook without its prefix."""
    module = types.ModuleType("more_parts")
    for hook, parts in hooks.items():
        setattr(module, f"moefw_{hook}", moefw.hookimpl(lambda parts=parts: parts))
    return Registry([module])


def watched() -> Registry:
    """Return the installed plugins and a dispatcher called watched, whose module observes runs, too."""
    module = types.ModuleType("watched_parts")
    part = frozen(type("Watched", (Plain,), {"name": "watched"}))
    module.moefw_dispatchers = moefw.hookimpl(lambda: [part])  # type: ignore[attr-defined]
    module.moefw_before_step = moefw.hookimpl(lambda step: None)  # type: ignore[attr-defined]
    return Registry([module])


@frozen
class Plain(DispatcherPlugin):
    """Offers the facts that the built-in GEMMs need."""

    name: ClassVar[str] = "plain"
    size: int = 1

    def offers(self, site: Site) -> moefw.Offers:
        return moefw.offers(row_alignment=moefw.ANY, rows=("ragged",), counts=("host", "device"))
