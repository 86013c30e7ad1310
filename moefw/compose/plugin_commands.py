"""Commands that plugins add to ``moefw``: entry points of a group of their own, which are listed without an import."""

from __future__ import annotations

import os
from collections.abc import Iterable
from importlib.metadata import EntryPoint, entry_points

import click
from attrs import frozen

from moefw.compose.trust import ALLOWED, OURS, allowed
from moefw.core.errors import PluginError

GROUP = "moefw.commands"
"""The entry-point group. The name of an entry point is that of a command; it names a ``click.Command``."""


@frozen
class PluginCommand:
    """A command by name, and the distributions that bring it: one, or it cannot run."""

    name: str
    entries: tuple[EntryPoint, ...]

    @property
    def origins(self) -> str:
        """The distributions, with versions."""
        return " and ".join(_origin(entry) for entry in self.entries)

    def problem(self, built_in: Iterable[str]) -> PluginError | None:
        """Error that says why the command cannot run; None if it can, as far as is known before it is imported."""
        if self.name in built_in:
            what = f"the command {self.name!r} of {self.origins} has the name of one of {OURS}, which stays."
            return PluginError(what, f"Uninstall {self.origins}, or give its command another name.")
        if len(self.entries) > 1:
            what = f"two distributions bring a command {self.name!r}: {self.origins}."
            return PluginError(what, "Uninstall one of them.")
        if not allowed(os.environ)(_distribution(self.entries[0])):
            what = f"the command {self.name!r} is of distribution {self.origins}, which is not allowed."
            return PluginError(what, f"Name it in {ALLOWED} if you trust its code.")
        return None

    def load(self, built_in: Iterable[str]) -> click.Command:
        """Command, imported. Raises PluginError."""
        problem = self.problem(built_in)
        if problem is not None:
            raise problem
        fix = f"Mend or uninstall {_distribution(self.entries[0])}."
        who = f"the command {self.name!r} (distribution {self.origins})"
        try:
            command = self.entries[0].load()
        except Exception as error:
            raise PluginError(f"{who} fails to import: {type(error).__name__}: {error}.", fix) from error
        if not isinstance(command, click.Command):
            raise PluginError(f"{who} is {command!r}, which is no click.Command.", fix)
        return command


def plugin_commands() -> dict[str, PluginCommand]:
    """Installed commands of plugins, by name. Those of distributions that are not allowed count only if alone."""
    may_load = allowed(os.environ)
    entries: dict[str, list[EntryPoint]] = {}
    for entry in sorted(entry_points(group=GROUP), key=lambda entry: entry.name):
        rivals = entries.setdefault(entry.name, [])
        if not any(_distribution(entry) == _distribution(rival) for rival in rivals):
            rivals.append(entry)
    return {
        name: PluginCommand(name, tuple([entry for entry in rivals if may_load(_distribution(entry))] or rivals[:1]))
        for name, rivals in entries.items()
    }


def _distribution(entry: EntryPoint) -> str:
    return entry.dist.name if entry.dist else "?"


def _origin(entry: EntryPoint) -> str:
    return f"{_distribution(entry)} {entry.dist.version if entry.dist else '?'}"
