"""Results of the doctor."""

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
