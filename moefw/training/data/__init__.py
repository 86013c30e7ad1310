"""``text``: files of text, tokenized once and mapped into memory."""

from __future__ import annotations

from pathlib import Path
from typing import ClassVar

from attrs import field, frozen
from attrs.validators import and_, gt, lt, min_len, optional

import moefw
from moefw.core.plugin import DataSourcePlugin


@frozen(kw_only=True)
class Text(DataSourcePlugin):
    """The text in a file or a folder; one file is one document.

    ``path`` null: the sources of the running Python's standard library. ``suffixes`` keeps the files of a folder
    that end so; empty, every file that is UTF-8 text. ``tokenizer`` is ``bytes`` or the path of a
    ``tokenizer.json``. ``heldout`` is the share of documents that training never sees (of a single document, the
    share of its bytes, at its end); a document's side depends on its path inside the folder alone.
    """

    name: ClassVar[str] = "text"

    path: str | None = field(default=None, validator=optional(min_len(1)))
    suffixes: tuple[str, ...] = ()
    tokenizer: str = field(default="bytes", validator=min_len(1))
    heldout: float = field(default=0.05, validator=and_(gt(0.0), lt(1.0)))

    def prepare(self, cache_dir: Path) -> moefw.DataSource:
        """Return the prepared data, from ``cache_dir`` if they lie there already. Raises DataError."""
        from moefw.training.data.source import prepare_text

        return prepare_text(self, cache_dir)


@moefw.hookimpl
def moefw_data_sources() -> list[type[DataSourcePlugin]]:
    """Declare the data source."""
    return [Text]
