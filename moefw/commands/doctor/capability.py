"""What the doctor says of one thing, and what a probe says that finds something wrong."""

from __future__ import annotations

from typing import Literal

from attrs import frozen


@frozen
class Capability:
    """One thing that the machine has, has broken, or lacks; ``fix`` is what to do then."""

    name: str
    state: Literal["available", "unusable", "missing"]
    version: str = ""
    detail: str = ""
    fix: str = ""


class ProbeError(Exception):
    """A probe's answer in words of ours. ``missing``: the package is here, but built without what is asked for."""

    def __init__(self, detail: str, *, missing: bool = False) -> None:
        super().__init__(detail)
        self.missing = missing
