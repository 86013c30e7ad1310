"""Where the values of a resolved spec came from."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final

from attrs import Factory, frozen

from moefw.compose.spec.source import COMMAND_LINE, KeyPath, Marks, Tree, dotted

DEFAULT: Final = "default"
_ABSENT: Final = object()


@frozen
class Origins:
    """What a user wrote, ``tree``, with its places, and what presets say: ``{path: (name, options below it)}``."""

    marks: Marks = Marks("")
    tree: Tree = Factory(dict)
    presets: Mapping[KeyPath, tuple[str, Mapping[str, Any]]] = Factory(dict)

    def of(self, resolved: Mapping[str, Any]) -> dict[str, str]:
        """Origin of each value of a resolved spec, by key path: ``FILE:LINE``, command line, preset NAME, default."""
        return {dotted(path): self._origin(path, value) for path, value in _leaves(resolved, ())}

    def _origin(self, path: KeyPath, value: object) -> str:
        written = _at(self.tree, path)
        if written is not _ABSENT and (written is not None or value is None):  # elsewhere null leaves the choice open
            place = self.marks.place(path)
            return COMMAND_LINE if place.startswith(COMMAND_LINE) else place.rpartition(":")[0]
        for above, (name, options) in self.presets.items():
            if path[: len(above)] == above and _at(options, path[len(above) :]) is not _ABSENT:
                return f"preset {name}"
        return DEFAULT


def _leaves(value: Any, path: KeyPath) -> Iterator[tuple[KeyPath, object]]:
    """Yield the path and value of everything below that is neither a mapping nor a list, or is empty."""
    inner: Sequence[tuple[str | int, Any]] = ()
    if isinstance(value, Mapping):
        inner = [*value.items()]
    elif isinstance(value, list):
        inner = [*enumerate(value)]
    if not inner:
        yield path, value
    for key, item in inner:
        yield from _leaves(item, (*path, key))


def _at(tree: Any, path: KeyPath) -> object:
    """Value at a path, or ``_ABSENT``."""
    for key in path:
        try:
            tree = tree[key]
        except (KeyError, IndexError, TypeError):
            return _ABSENT
    return tree
