"""``jsonl`` and ``parquet``: tables of documents, one a row."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, ClassVar

import attrs
from attrs import evolve, frozen
from attrs.validators import min_len

import moefw
from moefw.core.plugin import DataSourcePlugin
from moefw.core.site import Site
from moefw.training.data.options import Tokenized, absolute

PACKAGE = "datasets"
INSTALL = "Install it with: pip install 'moefw[datasets]', or convert the files to JSON lines (use: jsonl)."


@frozen(kw_only=True)
class Rows(Tokenized):
    """Documents in rows: see :class:`JsonLines`."""

    ending: ClassVar[str]

    path: str = attrs.field(validator=min_len(1))
    field: str = attrs.field(default="text", validator=min_len(1))

    def prepare(self, cache_dir: Path) -> moefw.DataSource:
        """Return the prepared data, from ``cache_dir`` if they are there already. Raises DataError."""
        from moefw.training.data.rows.read import prepare_rows

        return prepare_rows(self, cache_dir)

    def anchored(self) -> Any:
        """Return the same rows and tokenizer, with absolute paths."""
        return evolve(self, path=absolute(self.path), tokenizer=self.absolute_tokenizer)


@frozen(kw_only=True)
class JsonLines(Rows):
    """The rows of JSON lines, an object a line; of a folder, those of the files that end in ``.jsonl``.

    ``field`` is the key of the text. Rows without text are skipped: null, white space, a zero byte, half a character.
    A row is held out by a hash of its text, so equal rows are on one side. ``tokenizer`` and ``heldout`` are those of
    ``text``.
    """

    name: ClassVar[str] = "jsonl"
    ending: ClassVar[str] = ".jsonl"


@frozen(kw_only=True)
class Parquet(Rows):
    """The rows of Parquet files, read by Hugging Face's ``datasets``; of a folder, files that end in ``.parquet``.

    ``field`` is the column of the text. Rows without text are skipped, as those of ``jsonl``. A row is held out by a
    hash of its text. ``tokenizer`` and ``heldout`` are those of ``text``.
    """

    name: ClassVar[str] = "parquet"
    ending: ClassVar[str] = ".parquet"

    def needs(self, site: Site) -> Sequence[moefw.Need]:
        """Return also the need of the library that reads the files."""
        return [*super().needs(site), moefw.need("package", PACKAGE, reason="it reads Parquet files", fix=INSTALL)]


@moefw.hookimpl
def moefw_data_sources() -> list[type[DataSourcePlugin]]:
    """Declare the data sources."""
    return [JsonLines, Parquet]
