"""``sample``: a data source."""

from __future__ import annotations

import os
from pathlib import Path
from typing import ClassVar

import moefw
from attrs import evolve, field, frozen
from attrs.validators import and_, gt, lt, min_len

moefw_api = ">=3,<4"


@frozen(kw_only=True)
class Sample(moefw.DataSourcePlugin):
    """The lines of a file, each a document. Its bytes are the token ids."""

    name: ClassVar[str] = "sample"

    path: str = field(validator=min_len(1))
    """File of the lines."""
    heldout: float = field(default=0.05, validator=and_(gt(0.0), lt(1.0)))
    """Share of lines, at the end, that training never sees."""

    def prepare(self, cache_dir: Path) -> moefw.DataSource:
        """Prepared lines. Raises DataError."""
        from moefw_sample.data_source import SampleSource

        return SampleSource(Path(self.path), self.heldout)

    def anchored(self) -> Sample:
        """Same file, with an absolute path."""
        return evolve(self, path=os.path.abspath(os.path.expanduser(self.path)))


@moefw.hookimpl
def moefw_data_sources() -> list[type[moefw.DataSourcePlugin]]:
    """Declare the data source."""
    return [Sample]
