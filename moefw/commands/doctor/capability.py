"""Results of the doctor: a capability, and the error of a probe."""

from __future__ import annotations

from typing import Literal

from attrs import frozen


@frozen
class Capability:
    """A capability that is available, unusable or missing. ``fix``: the action that makes it available."""

    name: str
    state: Literal["available", "unusable", "missing"]
    version: str = ""
    detail: str = ""
    fix: str = ""


class ProbeError(Exception):
    """A fault that a probe has found. ``missing``: the package is installed, but built without the capability."""

    def __init__(self, detail: str, *, missing: bool = False) -> None:
        super().__init__(detail)
        self.missing = missing
