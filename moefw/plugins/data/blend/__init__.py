"""``blend``: several sources in fixed proportions."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, ClassVar

from attrs import evolve, frozen

import moefw
from moefw.core.choice import PluginChoice, chosen
from moefw.core.plugin import DataSourcePlugin
from moefw.core.site import Site
from moefw.plugins.data.blend.proportions import LONGEST, whole_weights
from moefw.plugins.data.options import Tokenized


@frozen(kw_only=True)
class Blend(DataSourcePlugin):
    """Sequences of several sources, each by its ``weight``.

    Of n sequences of a run, each part has its share to within a few sequences, at every n, and exactly where the
    weights come out even. A part is read in its own order, epoch after epoch. All parts have one tokenizer.
    """

    name: ClassVar[str] = "blend"

    parts: tuple[PluginChoice, ...] = chosen("data_source")
    """Sources, each with its ``weight``: ``[{use: text, path: a, weight: 0.7}, ...]``; none is a blend."""

    @property
    def sources(self) -> Sequence[Any]:
        """The plugins that the parts choose."""
        return self.parts

    def check(self, site: Site) -> Sequence[moefw.Problem | Iterator[moefw.Problem]]:
        """Problems: no part, or a blend as one; a vocabulary of a part's own; weights of no round ratio."""
        return [self._of_parts(), self._of_weights()]

    def _of_parts(self) -> Iterator[moefw.Problem]:
        if not self.sources:
            yield moefw.Problem("a blend has parts.", "Write for example [{use: text, weight: 1}].", "parts")
        for index, part in enumerate(self.sources):
            if isinstance(part, Blend):
                what = "a blend is no part of a blend."
                yield moefw.Problem(what, "Name its parts here, with weights times its weight.", f"parts[{index}].use")
            if isinstance(part, Tokenized) and part.bpe_size and len(self.sources) > 1:
                what = f"{part.tokenizer} makes a vocabulary of this part alone, and all parts need the same one."
                fix = "Name one tokenizer.json in all parts: a run of one source leaves its own in run.dir."
                yield moefw.Problem(what, fix, f"parts[{index}].tokenizer")

    def _of_weights(self) -> Iterator[moefw.Problem]:
        period = sum(whole_weights(part.weight for part in self.sources))
        if period > LONGEST:
            what = f"these weights come out even only after {period:,} sequences, and {LONGEST:,} are the most."
            yield moefw.Problem(what, "Round them, for example to three digits.", "parts")

    def prepare(self, cache_dir: Path) -> moefw.DataSource:
        """Data of all parts. Raises DataError, and PlanError if the parts have different tokenizers."""
        from moefw.plugins.data.blend.source import BlendSource

        weights = whole_weights(part.weight for part in self.sources)
        return BlendSource([part.prepare(cache_dir) for part in self.sources], weights)

    def anchored(self) -> Blend:
        """Same parts, with absolute paths."""
        return evolve(self, parts=tuple(part.anchored() for part in self.sources))


@moefw.hookimpl
def moefw_data_sources() -> list[type[DataSourcePlugin]]:
    """Declare the data source."""
    return [Blend]
