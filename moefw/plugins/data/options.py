"""Options that sources share. They determine prepared files."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path

from attrs import field, frozen
from attrs.validators import and_, gt, lt, min_len, optional

import moefw
from moefw.core.errors import closest
from moefw.core.plugin import DataSourcePlugin
from moefw.core.site import Site

NUM_BYTES = 256


@frozen(kw_only=True)
class Tokenized(DataSourcePlugin):
    """Text that is tokenized once, a part of it held out."""

    tokenizer: str = field(default="bytes", validator=min_len(1))
    """Tokenizer: ``bytes``, ``bpe-N`` or the path of a ``tokenizer.json``.

    ``bpe-N`` is a byte-level BPE of N ids, made from the training text.
    """
    heldout: float = field(default=0.05, validator=and_(gt(0.0), lt(1.0)))
    """Share of documents that training never sees; of a single document, the share of its bytes, at its end."""

    @property
    def bpe_size(self) -> int | None:
        """Number of ids of a vocabulary that is made from the text; None: it is not made from it."""
        number = re.fullmatch("bpe-([0-9]{1,9})", self.tokenizer)
        return int(number[1]) if number else None

    def needs_to_train(self, site: Site) -> Sequence[moefw.Need]:
        """Need of bytes, or of a BPE vocabulary, for token ids. Only the file tells those of another."""
        if self.tokenizer == "bytes":
            return [token_ids(self.tokenizer, NUM_BYTES)]
        return [] if self.bpe_size is None else [token_ids(self.tokenizer, self.bpe_size)]

    def check(self, site: Site) -> Sequence[moefw.Problem | Iterator[moefw.Problem]]:
        """Problems of ``bpe-N``: too few ids for all bytes and the end of a text, or a misspelt name."""
        if self.bpe_size is None:
            what = f"{self.tokenizer!r} is neither bytes, nor bpe- and a number, nor the path of a tokenizer.json."
            fix = "Use for example bpe-2048."
            return [moefw.Problem(what, fix, "tokenizer")] if self._is_misspelt_vocabulary else []
        if self.bpe_size > NUM_BYTES:
            return []
        what = f"{self.tokenizer} has no room for all {NUM_BYTES} bytes and the end of a text."
        return [moefw.Problem(what, f"Use bpe-{NUM_BYTES + 1} or more.", "tokenizer")]

    def check_files(self) -> Iterator[moefw.Problem]:
        """Problems of a path or a ``tokenizer.json`` that is not there."""
        path: str | None = getattr(self, "path", None)
        if path is not None:
            yield from missing(path, "path")
        if os.path.isabs(self.absolute_tokenizer) and not self._is_misspelt_vocabulary:
            yield from missing(self.tokenizer, "tokenizer")

    @property
    def _is_misspelt_vocabulary(self) -> bool:
        """Whether the tokenizer looks like ``bpe-N``, and is neither that nor a path."""
        begins_like_one = re.match(r"\s*bpe", self.tokenizer, re.IGNORECASE) is not None
        return begins_like_one and self.bpe_size is None and not re.search(r"/|\.json$", self.tokenizer)

    @property
    def absolute_tokenizer(self) -> str:
        """The tokenizer, as an absolute path if it is a file."""
        names_no_file = self.tokenizer == "bytes" or self.bpe_size is not None
        return self.tokenizer if names_no_file else absolute(self.tokenizer)


@frozen(kw_only=True)
class Options(Tokenized):
    """Options of :class:`moefw.plugins.data.text.Text`."""

    path: str | None = field(default=None, validator=optional(min_len(1)))
    """File or folder of the text. null: the sources of the running Python's standard library."""
    suffixes: tuple[str, ...] = ()
    """Endings of the files of a folder that are read; empty: every file that is UTF-8 text."""


def token_ids(tokenizer: str, count: int) -> moefw.Need:
    """Need of a tokenizer for the ids that it has."""
    fix = f"Use model.vocab_size: {count}."
    return moefw.need("token_ids", count, reason=f"{tokenizer} has them", fix=fix, option="tokenizer")


def missing(path: str, option: str) -> Iterator[moefw.Problem]:
    """Problem of a path that does not exist, with the name like it that does."""
    file = Path(absolute(path))
    if file.exists():
        return
    names: list[str] = []
    with suppress(OSError, ValueError):
        names = os.listdir(file.parent)
    likely = closest(file.name, names)
    fix = f"Did you mean {str(Path(path).with_name(likely))!r}?" if likely else "Correct the path."
    yield moefw.Problem(f"{file} does not exist.", fix, option)


def absolute(path: str) -> str:
    """Path from the root, ``~`` expanded."""
    return os.path.abspath(os.path.expanduser(path))
