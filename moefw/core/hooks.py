"""All hooks: one that declares plugins for each kind in the table of ``moefw.core.kinds``, and those below.

A plugin is a module that implements some of them with ``@moefw.hookimpl``. Declaring hooks are called once per process,
when a spec names the plugin. Observers are called once per step. A module that only checks and observes is named in
``run.observers``. No hook is called inside ``forward``. No hook is ``firstresult``: all results count, and two plugins
with one name are an error.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final, Protocol

import pluggy

from moefw.core.kinds import KINDS, Kind
from moefw.core.plugin import Plugin

if TYPE_CHECKING:
    from moefw.core.errors import Problem
    from moefw.core.probes import Probe
    from moefw.core.site import Site

API_VERSION = "3.5"
"""Version of the hook interface. A plugin's ``moefw_api = ">=3,<4"`` is checked against it before use."""

UPGRADE_PAGE: Final = "docs/guides/upgrade.md"
"""Page with a section for each version: what the author of a plugin for the one before changes."""

hookspec = pluggy.HookspecMarker("moefw")
hookimpl = pluggy.HookimplMarker("moefw")


class Assembly(Protocol):
    """Parts that fit: the spec by section, the plugins that it names, the site of the first layer."""

    spec: Any
    parts: Any
    site: Site


def _declaring(kind: Kind) -> Callable[[], Sequence[type[Plugin]]]:
    """Hook that returns the plugins of a kind which a module declares."""

    def declared() -> Sequence[type[Plugin]]:
        raise NotImplementedError

    declared.__name__ = declared.__qualname__ = kind.hook
    declared.__doc__ = f"{kind.summary} (``{kind.section}:``)"
    return hookspec(declared)


@hookspec
def moefw_check(assembly: Assembly) -> Sequence[Problem]:  # type: ignore[empty-body]
    """Problems of the whole assembly that needs and offers cannot express. Called once per resolve."""


@hookspec
def moefw_probes() -> Sequence[Probe]:  # type: ignore[empty-body]
    """Probes of the libraries that a plugin calls, which ``moefw doctor`` runs. Called when the plugin is loaded."""


@hookspec
def moefw_before_step(step: int) -> None:
    """Run on every rank before a training step, counted from 0.

    An observer that raises is reported and not called again.
    """


@hookspec
def moefw_after_step(step: int, metrics: Mapping[str, float]) -> None:
    """Run on every rank after a training step, with a copy of its line in ``metrics.jsonl`` (equal but for times)."""


DECLARING: Final[Mapping[str, Callable[[], Sequence[type[Plugin]]]]] = {
    kind.hook: _declaring(kind) for kind in KINDS.values()
}
"""The hooks that declare plugins, one for each kind."""

OBSERVING: Final = ("moefw_check", "moefw_before_step", "moefw_after_step")
"""The hooks of which an observer, a name of ``run.observers``, implements one or more."""

globals().update(DECLARING)  # pluggy looks for hooks among the names of this module
