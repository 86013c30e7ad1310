"""Probes: what ``moefw doctor`` tries on a machine, each of a library."""

from __future__ import annotations

from collections.abc import Callable

from attrs import frozen


@frozen
class Probe:
    """Probe of a library, under the name that the doctor prints.

    ``run`` returns the version and what works, or raises. It runs in a child, where ``package``, the import name, is
    installed. ``fix`` says how to install ``distribution``, and on which machine.
    """

    name: str
    run: Callable[[], tuple[str, str]]
    package: str
    distribution: str
    fix: str


class ProbeError(Exception):
    """A fault that a probe has found. ``missing``: the package is installed, but built without the capability."""

    def __init__(self, detail: str, *, missing: bool = False) -> None:
        super().__init__(detail)
        self.missing = missing
