"""A choice among the plugins of a kind, in a section of a spec or in an option of a plugin."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from attrs import Factory, field, frozen


@frozen
class PluginChoice:
    """A plugin by name, and the options next to ``use:`` (``preset:`` names a set of options)."""

    use: str
    options: Mapping[str, Any] = Factory(dict)

    def to_data(self) -> dict[str, object]:
        """Mapping as it is written in a file."""
        return {"use": self.use, **self.options}


Choice = PluginChoice
"""Its name for plugins that were written for an API before 4."""


def chosen(kind: str, **kwargs: Any) -> Any:
    """Field that holds a :class:`PluginChoice` among the plugins of a kind (``moefw.core.kinds``), or several.

    As an option of a plugin, it holds several, and the plugins themselves in the place of their choices.
    """
    return field(metadata={"kind": kind}, **kwargs)
