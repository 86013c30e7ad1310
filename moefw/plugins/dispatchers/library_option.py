"""Options of built-in dispatchers that can move rows through a library."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, ClassVar, Literal

from attrs import field, frozen
from attrs.validators import gt, optional

import moefw
from moefw.core.site import Site
from moefw.plugins.dispatchers.wire_option import SendsRows


@frozen(kw_only=True)
class CallsLibrary(SendsRows):
    """``backend`` torch: the algorithm over any process group; library: a package that does the same on GPUs.

    ``max_tokens``: the most tokens that a rank ever sends at once. It sizes the library's buffer.
    """

    package: ClassVar[str]
    """The library's module; ``install`` says how to install it."""
    install: ClassVar[str]
    packs: ClassVar[bool] = False
    """Whether the library moves packed rows, as bytes."""

    backend: Literal["torch", "library"]
    max_tokens: int | None = field(default=None, validator=optional(gt(0)))

    def needs(self, site: Site) -> Sequence[moefw.Need]:
        """Return also the library's needs of the machine and of the other parts."""
        needs = super().needs(site)
        if self.backend == "torch":
            return needs
        asks: list[tuple[str, Any, str, str]] = [
            ("package", self.package, "backend: library calls it", self.install),
            ("device", ("cuda",), "its kernels run on NVIDIA GPUs", "Use backend: torch."),
        ]
        if self.wire == "high":
            asks.append(("wire", ("bf16",), "combine adds up bf16 only", "Use precision: {use: bf16}."))
        return [*needs, *(moefw.need(fact, of, reason=why, fix=fix, option="backend") for fact, of, why, fix in asks)]

    def check(self, site: Site) -> Iterable[moefw.Problem | Iterator[moefw.Problem]]:
        """Return also: packed rows or a layer that the library does not move, ``max_tokens`` without the library."""
        return [*super().check(site), *self._of_backend(site)]

    def _of_backend(self, site: Site) -> Sequence[moefw.Problem]:
        if self.backend == "library" and self.wire != "high" and not self.packs:
            what = "rows go through the library in bf16."
            return [moefw.Problem(what, "Use wire: high, or backend: torch.", "wire")]
        if self.backend == "library":
            return self.limits(site)
        if self.max_tokens is None:
            return []
        what = "max_tokens sizes the library's buffer; backend: torch has none."
        return [moefw.Problem(what, "Leave max_tokens out, or use backend: library.", "max_tokens")]

    @abstractmethod
    def limits(self, site: Site) -> Sequence[moefw.Problem]:
        """Return the problems of a layer that the library does not support."""
