"""``megatron``: a pair of files of Megatron-LM's preprocessing, ``.bin`` and ``.idx``, read where they are."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import ClassVar

from attrs import evolve, field, frozen
from attrs.validators import and_, gt, lt, min_len

import moefw
from moefw.core.plugin import DataSourcePlugin
from moefw.core.site import Site
from moefw.plugins.data.megatron.files import pair
from moefw.plugins.data.options import NUM_BYTES, absolute, missing, token_ids


@frozen(kw_only=True)
class Megatron(DataSourcePlugin):
    """The documents of an indexed dataset of Megatron-LM, already token ids."""

    name: ClassVar[str] = "megatron"

    path: str = field(validator=min_len(1))
    """Path that the two files share, with or without ``.bin`` or ``.idx``."""
    tokenizer: str = field(validator=min_len(1))
    """Tokenizer that made the ids: the path of a ``tokenizer.json``, or ``bytes``."""
    heldout: float = field(default=0.01, validator=and_(gt(0.0), lt(1.0)))
    """Share of tokens, at the end, that training never sees, at most 16,777,216.

    It begins with a document, unless that would leave less than half of it.
    """

    def needs_to_train(self, site: Site) -> Sequence[moefw.Need]:
        """Need of bytes for token ids."""
        return [token_ids(self.tokenizer, NUM_BYTES)] if self.tokenizer == "bytes" else []

    def check(self, site: Site) -> Sequence[moefw.Problem]:
        """Problem of a tokenizer that would be made from text, which is not there."""
        if not re.fullmatch("bpe-[0-9]+", self.tokenizer):
            return []
        what = f"{self.tokenizer} is made from text, and these files hold ids."
        return [moefw.Problem(what, "Name the tokenizer.json that made the ids.", "tokenizer")]

    def check_files(self) -> Iterator[moefw.Problem]:
        """Problems of a file of the pair, or a ``tokenizer.json``, that is not there."""
        for file in pair(self.path):
            yield from missing(str(file), "path")
        if self.tokenizer != "bytes":
            yield from missing(self.tokenizer, "tokenizer")

    def prepare(self, cache_dir: Path) -> moefw.DataSource:
        """Data. The first call checks the whole index; ids are checked as they are read. Raises DataError.

        The ids stay where they are. ``cache_dir`` gets the document starts, the held-out text, and a hash of each part
        of the ids as it is first read.
        """
        from moefw.plugins.data.megatron.source import prepare_megatron

        return prepare_megatron(self.path, self.tokenizer, self.heldout, cache_dir)

    def anchored(self) -> Megatron:
        """Same files and tokenizer, with absolute paths."""
        tokenizer = self.tokenizer if self.tokenizer == "bytes" else absolute(self.tokenizer)
        return evolve(self, path=absolute(self.path), tokenizer=tokenizer)


@moefw.hookimpl
def moefw_data_sources() -> list[type[DataSourcePlugin]]:
    """Declare the data source."""
    return [Megatron]
