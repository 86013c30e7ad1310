"""Registration of a test's own plugins, which no installed distribution declares."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable
from functools import lru_cache
from types import ModuleType

from moefw.compose.registry import Registry
from moefw.compose.trust import ALLOWED
from moefw.core.hooks import hookimpl
from moefw.core.kinds import kind_of
from moefw.core.plugin import Plugin


def with_plugins(declarations: Iterable[type[Plugin]]) -> Registry:
    """Registry of the installed plugins and these: the same one, and what it has loaded, every time.

    Raises PluginError if two have the same name.
    """
    path = tuple((folder, os.stat(folder).st_mtime_ns) for folder in sys.path if os.path.isdir(folder))
    return _registry(tuple(declarations), path, os.environ.get(ALLOWED))


@lru_cache(64)
def _registry(declarations: tuple[type[Plugin], ...], path: object, allowed: object) -> Registry:
    """Registry of the installed plugins and these. ``path`` and ``allowed`` decide what is installed.

    They are part of the cache's key, not read: a test may install a plugin, or allow other ones, in between.
    """
    registry = Registry()
    for declaration in declarations:
        if declaration.name in registry.names:
            installed = registry.get(kind_of(declaration).name, declaration.name).declaration
            if installed is declaration:
                continue
        registry.register(_module(declaration), "this test", "0")
    return registry


def _module(declaration: type[Plugin]) -> ModuleType:
    """Module that declares a plugin through its hook; a new one if the plugin's own module does not."""
    own = sys.modules.get(declaration.__module__)
    hook = kind_of(declaration).hook
    declares = getattr(own, hook, None)
    if own is not None and declares is not None and declaration in declares():
        return own
    module = ModuleType(f"{declaration.__module__}.{declaration.__qualname__}")

    def declare() -> list[type[Plugin]]:
        return [declaration]

    setattr(module, hook, hookimpl(declare, specname=hook))
    return module
