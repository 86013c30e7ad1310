"""The settings of a candidate: values of a spec by their place. Imports no torch."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from copy import deepcopy
from typing import Any, Final

import attrs

from moefw.compose.assembly import Assembly
from moefw.compose.spec.source import KeyPath, Tree

Settings = Mapping[KeyPath, Any]
"""Value of each key that a candidate sets."""
AXES: Final = ("pp", "tp", "cp", "ep", "etp")
"""Sizes of a layout that are searched; the others follow."""
PIPELINE: Final[KeyPath] = ("pipeline",)
MICRO_BATCH: Final[KeyPath] = ("train", "micro_batch")
DISPATCH: Final[KeyPath] = ("dispatch",)
PRECISION: Final[KeyPath] = ("precision",)
MEMORY: Final[KeyPath] = ("memory",)


def with_settings(tree: Tree, settings: Settings) -> Tree:
    """Spec as plain data with settings; ``tree`` stays as it is."""
    changed: Any = deepcopy(tree)
    for (*outer, key), value in settings.items():
        section = changed
        for name in outer:
            if not isinstance(section.get(name), dict):
                section[name] = {}
            section = section[name]
        section[key] = deepcopy(value)
    with_them: Tree = changed
    return with_them


def options_called(part: Any, names: tuple[str, ...], path: KeyPath) -> Iterator[KeyPath]:
    """Yield the places of the options of these names, also of those inside of others."""
    for option in attrs.fields(attrs.resolve_types(type(part))):
        value = getattr(part, option.name)
        if option.name in names:
            yield (*path, option.name)
        elif attrs.has(type(value)):
            yield from options_called(value, names, (*path, option.name))


def axes_of(assembly: Assembly) -> dict[str, KeyPath]:
    """Places of the sizes of a layout that its options name."""
    return {str(path[-1]): path for path in options_called(assembly.parts.parallel, AXES, ("parallel",))}


def pipeline_of(assembly: Assembly) -> tuple[KeyPath, KeyPath]:
    """Places of pp and of the schedule."""
    return axes_of(assembly).get("pp", ("parallel", "pp")), PIPELINE
