"""Options of sources of rows."""

from __future__ import annotations

from typing import Any, ClassVar

import attrs
from attrs import evolve, frozen
from attrs.validators import min_len

from moefw.plugins.data.options import Tokenized, absolute


@frozen(kw_only=True)
class Rows(Tokenized):
    """Documents in rows. One is held out by a hash of its text, so equal rows are on one side."""

    ending: ClassVar[str]

    path: str = attrs.field(validator=min_len(1))
    """File or folder; of a folder, the files with the ending of the source are read."""
    field: str = attrs.field(default="text", validator=min_len(1))
    """Key or column of the text."""

    def anchored(self) -> Any:
        """Same rows and tokenizer, with absolute paths."""
        return evolve(self, path=absolute(self.path), tokenizer=self.absolute_tokenizer)
