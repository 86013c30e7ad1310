"""``text``: files of text, tokenized once; a run reads the ids that it needs."""

from __future__ import annotations

from pathlib import Path
from typing import ClassVar

from attrs import evolve, frozen

import moefw
from moefw.core.plugin import DataSourcePlugin
from moefw.plugins.data.options import Options, absolute


@frozen(kw_only=True)
class Text(Options):
    """The text in a file or a folder; one file is one document.

    Whether a document is held out depends only on its path inside the folder.
    """

    name: ClassVar[str] = "text"

    def prepare(self, cache_dir: Path) -> moefw.DataSource:
        """Prepared data, from ``cache_dir`` if they are there already. Raises DataError."""
        from moefw.plugins.data.source import prepare_text

        return prepare_text(self, cache_dir)

    def anchored(self) -> Text:
        """Same text and tokenizer, with absolute paths."""
        path = None if self.path is None else absolute(self.path)
        return evolve(self, path=path, tokenizer=self.absolute_tokenizer)


@moefw.hookimpl
def moefw_data_sources() -> list[type[DataSourcePlugin]]:
    """Declare the data source."""
    return [Text]
