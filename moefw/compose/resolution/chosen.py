"""The parts that a spec chooses, with their places in it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import Any

import attrs

from moefw.compose.assembly import ChosenPlugins
from moefw.compose.spec.source import KeyPath
from moefw.core.plugin import Plugin

MEMORY = "memory"
"""The section that chooses any number of parts."""


@attrs.frozen(eq=False)
class Placed:
    """A part, and its path in the spec. It prints as the part's name."""

    path: KeyPath
    part: Any

    @cached_property
    def section(self) -> str:
        """The section of the part. All memory policies have the same one."""
        return section_of(self.path)

    def __str__(self) -> str:
        return str(self.part.name)


@attrs.frozen(kw_only=True)
class Chosen:
    """What a spec chooses, as far as it could be read.

    ``parts``: one of each section, and the memory policies. ``inner``: parts that options of others name. ``unread``:
    sections of which a part could not be read. ``declarations`` and ``presets``, each a preset's name and what it says:
    by path.
    """

    parts: Sequence[Placed]
    inner: Sequence[Placed]
    sections: frozenset[str]
    unread: frozenset[str]
    declarations: Mapping[KeyPath, type[Plugin]]
    presets: Mapping[KeyPath, tuple[str, Mapping[str, Any]]]

    @property
    def everything(self) -> Sequence[Placed]:
        """All parts, also inner ones."""
        return (*self.parts, *self.inner)

    @property
    def policies(self) -> Sequence[Placed]:
        """The memory policies."""
        return [placed for placed in self.parts if placed.section == MEMORY]

    def find(self, section: str) -> Placed | None:
        """The part of a section, None if it could not be read."""
        return next((placed for placed in self.parts if placed.section == section), None)

    def by_section(self) -> ChosenPlugins:
        """Parts by section. All of them could be read."""
        single = {placed.section: placed.part for placed in self.parts if placed.section != MEMORY}
        return ChosenPlugins(**single, memory=tuple(placed.part for placed in self.policies))


def section_of(path: KeyPath) -> str:
    """Section of a path: its last name. A policy of a list is behind it."""
    return next(key for key in reversed(path) if isinstance(key, str))
