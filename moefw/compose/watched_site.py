"""A site that notes whether anything reads the number of its layer. Imports no torch."""

from __future__ import annotations

from typing import Any

from attrs import asdict, field, frozen

from moefw.core.site import Site


@frozen(kw_only=True)
class WatchedSite(Site):
    """A site that notes reads of its ``layer``. What was computed of it without one is the same at every layer."""

    reads: list[str] = field(factory=list, eq=False, repr=False)

    @classmethod
    def of(cls, site: Site) -> WatchedSite:
        """Site, watched."""
        return cls(**asdict(site, recurse=False))

    def __getattribute__(self, name: str) -> Any:
        if name == "layer":
            self.reads.append(name)
        return super().__getattribute__(name)

    @property
    def layer_was_read(self) -> bool:
        """Whether anything has read ``layer``, also to compare, copy or print the site."""
        return bool(self.reads)
