"""The documents of a corpus, split into those to train on and those held out."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Protocol

from attrs import frozen

from moefw.plugins.data.corpus import Corpus, Document, halves, text_documents


class TextDocument(Protocol):
    """UTF-8 text. ``place`` says where it is from, in errors."""

    @property
    def place(self) -> str: ...  # noqa: D102

    def pieces(self) -> Iterator[bytes]:
        """Yield the text in order, cut only between characters."""


@frozen(kw_only=True)
class Split:
    """The two sides of a corpus, neither empty. Each iteration reads their documents again, in the same order.

    ``sample`` is documents of ``train``, chosen or ordered by what they are alone, to make a vocabulary of.
    ``num_bytes`` is the text of both sides, ``counts`` the number of documents of each side, and of those skipped.
    """

    train: Iterable[TextDocument]
    heldout: Iterable[TextDocument]
    sample: Iterable[TextDocument]
    num_bytes: int
    counts: Mapping[str, int]


def hash_place(content: bytes) -> float:
    """Number in [0, 1) that is drawn by ``content`` alone."""
    return int.from_bytes(hashlib.sha256(content).digest()[:8], "big") / (1 << 64)


def split_corpus(corpus: Corpus, share: float) -> Split:
    """Sides of a corpus of files, of which each is read once. Raises DataError if none is text."""
    documents = text_documents(corpus)
    train, heldout = split_documents(documents, share)
    mixed = sorted(train, key=_place)
    return Split(
        train=train,
        heldout=heldout,
        sample=mixed,
        num_bytes=sum(document.stop - document.start for document in (*train, *heldout)),
        counts={"train": len(train), "heldout": len(heldout), "skipped": len(corpus.files) - len(documents)},
    )


def split_documents(documents: Sequence[Document], share: float) -> tuple[list[Document], list[Document]]:
    """Documents to train on and those held out, neither empty, each in the order given.

    A document is held out if the hash of its name, scaled to [0, 1), is below ``share``, independent of other
    documents. If that leaves a side empty, the document nearest to it is moved. A single document is cut. Raises
    DataError if it is too small for that.
    """
    if len(documents) == 1:
        head, tail = halves(documents[0], share)
        return [head], [tail]
    places = {document: _place(document) for document in documents}
    ranked = sorted(documents, key=places.__getitem__)
    num_heldout = sum(place < share for place in places.values())
    heldout = set(ranked[: min(max(1, num_heldout), len(ranked) - 1)])
    return [d for d in documents if d not in heldout], [d for d in documents if d in heldout]


def _place(document: Document) -> float:
    return hash_place(document.name.encode("utf-8", "surrogateescape"))
