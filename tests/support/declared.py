"""Declarations of plugins that tests make, named after their classes."""

from __future__ import annotations

import re
import sys
from typing import Any, ClassVar

from attrs import frozen

from moefw.core.plugin import Plugin


def named_after(kind: type) -> str:
    """Return ``looks-ahead`` for ``LooksAhead``."""
    return re.sub(r"(?<!^)(?=[A-Z])", "-", kind.__name__).lower()


class NamedAfterItsClass:
    """A plugin whose subclasses are named after their classes."""

    name: ClassVar[str]

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        cls.name = named_after(cls)


def declarations(plugin: type[Plugin], root: type) -> dict[type, type[Plugin]]:
    """Return, for ``root`` and each class under it, a plugin whose ``made`` it is. Ranks find it in the same module."""
    declared = {root: _declared(plugin, root)}
    for kind in root.__subclasses__():
        declared |= declarations(plugin, kind)
    return declared


def _declared(plugin: type[Plugin], made: type) -> type[Plugin]:
    body = {"made": made, "name": named_after(made), "__module__": made.__module__, "__doc__": plugin.__doc__}
    declaration = frozen(type(f"{made.__name__}Plugin", (plugin,), body))
    setattr(sys.modules[made.__module__], declaration.__name__, declaration)
    return declaration
