"""``text``: files of text, tokenized once; a run reads the ids that it needs."""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from pathlib import Path
from typing import ClassVar

from attrs import evolve, frozen

import moefw
from moefw.core.plugin import DataSourcePlugin
from moefw.core.site import Site
from moefw.training.data.options import Options

NUM_BYTES = 256


@frozen(kw_only=True)
class Text(Options, DataSourcePlugin):
    """The text in a file or a folder; one file is one document.

    ``path`` null: the sources of the running Python's standard library. ``suffixes`` keeps the files of a folder
    with these endings; empty: every file that is UTF-8 text. ``tokenizer`` is ``bytes``, ``bpe-N`` (a byte-level BPE
    of N ids, made from the training text) or the path of a ``tokenizer.json``. ``heldout`` is the share of
    documents that training never sees (of a single document, the share of its bytes, at its end); a document's side
    depends only on its path inside the folder.
    """

    name: ClassVar[str] = "text"

    def needs(self, site: Site) -> Sequence[moefw.Need]:
        """Return the need of a BPE vocabulary for token ids."""
        if self.bpe_size is None:
            return []
        fix = f"Use model.vocab_size: {self.bpe_size}."
        return [
            moefw.need("token_ids", self.bpe_size, reason=f"{self.tokenizer} has them", fix=fix, option="tokenizer")
        ]

    def check(self, site: Site) -> Sequence[moefw.Problem]:
        """Return the problems of ``bpe-N``: too few ids for all bytes and the end of a text, or a misspelt name."""
        if self.bpe_size is None:
            slip = re.match(r"\s*bpe", self.tokenizer, re.IGNORECASE) and not re.search(r"/|\.json$", self.tokenizer)
            what = f"{self.tokenizer!r} is neither bytes, nor bpe- and a number, nor the path of a tokenizer.json."
            return [moefw.Problem(what, "Use for example bpe-2048.", "tokenizer")] if slip else []
        if self.bpe_size > NUM_BYTES:
            return []
        what = f"{self.tokenizer} has no room for all {NUM_BYTES} bytes and the end of a text."
        return [moefw.Problem(what, f"Use bpe-{NUM_BYTES + 1} or more.", "tokenizer")]

    def prepare(self, cache_dir: Path) -> moefw.DataSource:
        """Return the prepared data, from ``cache_dir`` if they are there already. Raises DataError."""
        from moefw.training.data.source import prepare_text

        return prepare_text(self, cache_dir)

    def anchored(self) -> Text:
        """Return the same text and tokenizer, with absolute paths."""
        path = None if self.path is None else _absolute(self.path)
        names_no_file = self.tokenizer == "bytes" or self.bpe_size is not None
        return evolve(self, path=path, tokenizer=self.tokenizer if names_no_file else _absolute(self.tokenizer))


def _absolute(path: str) -> str:
    return os.path.abspath(os.path.expanduser(path))


@moefw.hookimpl
def moefw_data_sources() -> list[type[DataSourcePlugin]]:
    """Declare the data source."""
    return [Text]
