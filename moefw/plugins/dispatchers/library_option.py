"""Options of built-in dispatchers that can move rows through a library."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterable, Iterator, Sequence
from typing import ClassVar, Literal

from attrs import evolve, field, frozen
from attrs.validators import gt, optional

import moefw
from moefw.core.plugin import Plugin
from moefw.core.site import Site
from moefw.plugins.dispatchers.wire_option import SendsRows


@frozen(kw_only=True)
class CallsLibrary(SendsRows):
    """Dispatcher that can leave the movement of rows to a library."""

    package: ClassVar[str]
    """The library's module; ``install`` says how to install it."""
    install: ClassVar[str]
    packs: ClassVar[bool] = False
    """Whether the library moves packed rows, as bytes."""

    backend: Literal["torch", "library"]
    """Implementation. ``torch``: the algorithm over any process group. ``library``: a package, on GPUs."""
    max_tokens: int | None = field(default=None, validator=optional(gt(0)))
    """Most tokens that a rank ever sends at once, which size the library's buffer.

    An option of ``backend: library`` only.
    """

    def needs(self, site: Site) -> Sequence[moefw.Need]:
        """Also the library's needs of the machine and of the other parts."""
        needs = super().needs(site)
        if self.backend == "torch":
            return needs
        of_library = [
            moefw.need("package", self.package, reason="backend: library calls it", fix=self.install, option="backend"),
            moefw.need(
                "device",
                ("cuda",),
                reason="its kernels run on NVIDIA GPUs",
                fix="Use backend: torch.",
                option="backend",
            ),
        ]
        if self.wire == "high":
            of_library.append(
                moefw.need(
                    "wire",
                    ("bf16",),
                    reason="combine adds up bf16 only",
                    fix="Use precision: {use: bf16}.",
                    option="backend",
                )
            )
        return [*needs, *of_library]

    def check(self, site: Site) -> Iterable[moefw.Problem | Iterator[moefw.Problem]]:
        """Also: packed rows or a layer that the library does not move, ``max_tokens`` without the library."""
        return [*super().check(site), *self._backend_problems(site)]

    def _backend_problems(self, site: Site) -> Sequence[moefw.Problem]:
        if self.backend == "torch":
            return [] if self.max_tokens is None else self._max_tokens_of_torch()
        if self.wire != "high" and not self.packs:
            return [moefw.Problem("rows go through the library in bf16.", "Use wire: high, or backend: torch.", "wire")]
        return self.limits(site)

    def _max_tokens_of_torch(self) -> Sequence[moefw.Problem]:
        """Problems of ``max_tokens`` with ``backend: torch``."""
        return [
            moefw.Problem(
                "max_tokens sizes the library's buffer; backend: torch has none.",
                "Leave max_tokens out, or use backend: library.",
                "max_tokens",
            )
        ]

    def planned_as(self) -> Plugin:
        """The algorithm of the library over any process group, which sends the same rows to the same ranks."""
        return evolve(self, backend="torch", max_tokens=None)

    @abstractmethod
    def limits(self, site: Site) -> Sequence[moefw.Problem]:
        """Problems of a layer that the library does not support."""
