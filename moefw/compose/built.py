"""Parts as plugins build them, held to the contract of their kind. Imports torch with the contract alone."""

from __future__ import annotations

from pkgutil import resolve_name
from typing import Any, Final

from moefw.core.errors import PluginError
from moefw.core.kinds import Kind, kind_of
from moefw.core.plugin import Plugin

MODULES: Final = ("attention", "router", "gemm", "adapter")
"""Kinds whose parts are modules, beside being of the class of their contract."""
STACKED: Final = "build_stacked"
"""The method of adapters that builds those of all experts."""


def require_method(plugin: Plugin, who: object, by: str) -> None:
    """Raise PluginError if a plugin, ``who``, has no method ``by`` of its own: that of the base builds nothing."""
    kind = kind_of(type(plugin))
    if by != "fallback" and getattr(type(plugin), by) is getattr(kind.base, by):
        what = f"{who} has no {by}()."
        raise PluginError(what, f"Write one that returns a {_name_of(_contract(kind, by))}.{_guide(kind)}")


def require_part(plugin: Plugin, who: object, by: str, part: object) -> None:
    """Raise PluginError if what the method ``by`` of a plugin, ``who``, returned is no part of its kind."""
    kind = kind_of(type(plugin))
    for wanted in (_contract(kind, by), *(["torch.nn:Module"] if kind.name in MODULES else [])):
        if not isinstance(part, resolve_name(wanted)):
            returned = "None" if part is None else f"a {type(part).__name__}"
            what = f"{who}, {by}(): it returns {returned}, and not a {_name_of(wanted)}."
            raise PluginError(what, f"Return one.{_guide(kind)}")


def unchecked(plugin: Any, *arguments: Any, by: str = "build") -> Any:
    """What a plugin builds that no registry knows, whatever it is."""
    return getattr(plugin, by)(*arguments)


def _contract(kind: Kind, by: str) -> str:
    """Class of what a method builds, ``module:Class``."""
    assert kind.contract is not None, f"nothing is built of {kind.one}"
    return "moefw.core.contracts:StackedAdapter" if by == STACKED else kind.contract


def _name_of(contract: str) -> str:
    """Name of a class by which authors import it."""
    return contract.replace("moefw.core.contracts:", "moefw.").replace(":", ".")


def _guide(kind: Kind) -> str:
    return f" See docs/{kind.guide}." if kind.guide else ""
