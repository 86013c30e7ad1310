"""``jsonl`` and ``parquet``: tables of documents, one a row."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import ClassVar

from attrs import frozen

import moefw
from moefw.core.plugin import DataSourcePlugin
from moefw.core.site import Site
from moefw.plugins.data.rows.options import Rows
from moefw.plugins.data.tables import INSTALL, PACKAGE


@frozen(kw_only=True)
class JsonLines(Rows):
    """The rows of JSON lines, an object a line; of a folder, those of the files that end in ``.jsonl``.

    Rows without text are skipped: null, white space, a zero byte, half a character. A row is held out by a hash of its
    text, so equal rows are on one side.
    """

    name: ClassVar[str] = "jsonl"
    ending: ClassVar[str] = ".jsonl"

    def prepare(self, cache_dir: Path) -> moefw.DataSource:
        """Prepared data, from ``cache_dir`` if they are there already. Raises DataError."""
        from moefw.plugins.data.rows.read import json_lines, prepare_rows

        return prepare_rows(self, json_lines, cache_dir)


@frozen(kw_only=True)
class Parquet(Rows):
    """The rows of Parquet files; of a folder, those of the files that end in ``.parquet``.

    The column of the text holds strings. Rows without text are skipped, as those of ``jsonl``. A row is held out by a
    hash of its text.
    """

    name: ClassVar[str] = "parquet"
    ending: ClassVar[str] = ".parquet"

    def needs(self, site: Site) -> Sequence[moefw.Need]:
        """Also the need of the library that reads the files."""
        return [*super().needs(site), moefw.need("package", PACKAGE, reason="it reads Parquet files", fix=INSTALL)]

    def prepare(self, cache_dir: Path) -> moefw.DataSource:
        """Prepared data, from ``cache_dir`` if they are there already. Raises DataError."""
        from moefw.plugins.data.rows.read import parquet, prepare_rows

        return prepare_rows(self, parquet, cache_dir)


@moefw.hookimpl
def moefw_data_sources() -> list[type[DataSourcePlugin]]:
    """Declare the data sources."""
    return [JsonLines, Parquet]
