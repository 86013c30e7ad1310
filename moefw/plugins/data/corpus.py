"""Finds the files of a corpus, and reads them in pieces."""

from __future__ import annotations

import codecs
import os
import sysconfig
from collections.abc import Iterator, Sequence
from pathlib import Path

from attrs import evolve, frozen

from moefw.core.errors import DataError, os_reason
from moefw.system.stamps import stamp

PIECE_BYTES = 1 << 22
CACHE_TAG = "CACHEDIR.TAG"
"""A folder that holds a file of this name is a cache, not a source (https://bford.info/cachedir)."""

_NOT_LIBRARY = frozenset({"site-packages", "dist-packages", "test", "tests", "idle_test"})
_BLANK = "holds nothing but white space"


@frozen
class Document:
    """The bytes ``start`` to ``stop`` of a file. ``name`` is its path inside the corpus, with forward slashes."""

    name: str
    path: Path
    start: int
    stop: int
    mtime_ns: int

    @property
    def place(self) -> str:
        """The file."""
        return str(self.path)

    def pieces(self) -> Iterator[bytes]:
        """Yield the bytes in order, about 4 MiB at a time, each piece but the last cut by :func:`text_end`."""
        carry = b""
        left = self.stop - self.start
        try:
            with self.path.open("rb") as file:
                file.seek(self.start)
                while left:
                    stamp(f"preparing data: {self.name}")
                    block = file.read(min(PIECE_BYTES, left))
                    if not block:
                        raise DataError(f"{self.path} became shorter while it was read.", "Run again.")
                    left -= len(block)
                    block = carry + block
                    end = text_end(block) if left else len(block)
                    yield block[:end]
                    carry = block[end:]
        except OSError as error:
            raise unreadable(error, self.path) from error


@frozen
class Corpus:
    """The candidate files of a corpus, sorted by name; they are not yet known to be text.

    ``named`` is True if ``root`` is the one file that the user named.
    """

    root: Path
    files: tuple[Document, ...]
    named: bool


def find_corpus(path: str | None, suffixes: Sequence[str]) -> Corpus:
    """Files at ``path``, found by name and size only; none is opened.

    A folder's hidden files and folders, links to folders, and caches are left out. None means the Python sources of
    the standard library, without its tests. Raises DataError if there are no files.
    """
    try:
        return _find(path, suffixes)
    except OSError as error:
        raise unreadable(error, Path(path or "")) from error


def _find(path: str | None, suffixes: Sequence[str]) -> Corpus:
    if path is None:
        root = Path(sysconfig.get_path("stdlib"))
        files = tuple(_walk(root, suffixes or (".py",), leave_out=_NOT_LIBRARY)) if root.is_dir() else ()
        if not files:
            raise DataError(f"data.path: null means the sources of this Python, and {root} has none.", "Name a path.")
        return Corpus(root, files, named=False)
    root = Path(os.path.abspath(os.path.expanduser(path)))
    if root.is_file():
        return Corpus(root, (_document(root, root.name),), named=True)
    if not root.is_dir():
        what = "is neither a file nor a folder" if root.exists() else "does not exist"
        raise DataError(f"data.path: {root} {what}.", "Name a text file or a folder of text files.")
    files = tuple(_walk(root, suffixes))
    if not files:
        ending = f" that ends in {' or '.join(suffixes)}" if suffixes else ""
        fix = "Hidden files and folders do not count; change data.path, or the endings."
        raise DataError(f"data.path: the folder {root} holds no file{ending}.", fix)
    return Corpus(root, files, named=False)


def text_documents(corpus: Corpus) -> tuple[Document, ...]:
    """Files that are UTF-8 text and not blank, each read once. Raises DataError if there is none."""
    flaws = {file.name: _flaw(file) for file in corpus.files}
    if corpus.named and any(flaws.values()):
        raise DataError(f"data.path: {corpus.root} {flaws[corpus.root.name]}.", "Name a file of UTF-8 text.")
    documents = tuple(file for file in corpus.files if not flaws[file.name])
    if not documents:
        blank = list(flaws.values()).count(_BLANK)
        skipped = f"{len(flaws) - blank} not UTF-8 text, {blank} blank"
        what = f"data.path: the folder {corpus.root} holds no text: {len(flaws)} files were skipped ({skipped})."
        raise DataError(what, "Name a folder of UTF-8 text files.")
    return documents


def text_end(block: bytes) -> int:
    """Where to cut a block of UTF-8 text: after its last line break, else after its last whole character."""
    line_end = block.rfind(b"\n") + 1
    if line_end:
        return line_end
    tail = block[-4:]
    return len(block) - len(tail) + codecs.utf_8_decode(tail, "ignore", False)[1]


def halves(document: Document, share: float) -> tuple[Document, Document]:
    """Cut off the last ``share`` of a document, or up to twice that to cut at a line. Raises DataError if too small.

    Both sides have at least one whole character.
    """
    size = document.stop - document.start
    tail = min(max(1, round(size * share)), size - 1)
    reach = min(max(tail, 4), size - tail, PIECE_BYTES)
    window = evolve(document, start=document.stop - tail - reach, stop=document.stop - tail)
    cut = window.start + text_end(_read(window))
    if cut <= document.start:
        first = _read(evolve(document, stop=min(document.start + 4, document.stop)))
        cut = document.start + len(first.decode("utf-8", "ignore")[:1].encode())
    if not document.start < cut < document.stop:
        what = f"{document.path} has {size} bytes, too few to hold some of them out."
        raise DataError(what, "Name a longer file, or a folder.")
    return evolve(document, stop=cut), evolve(document, start=cut)


def _walk(root: Path, suffixes: Sequence[str], *, leave_out: frozenset[str] = frozenset()) -> Iterator[Document]:
    endings = tuple(f".{suffix.removeprefix('.')}" for suffix in suffixes)
    documents: list[Document] = []

    def fail(error: OSError) -> None:
        raise error

    for folder, folders, names in os.walk(root, onerror=fail):
        here = Path(folder)
        if CACHE_TAG in names and here != root:
            folders.clear()
            continue
        folders[:] = [name for name in folders if not name.startswith(".") and name not in leave_out]
        for name in names:
            path = here / name
            if not name.startswith(".") and (not endings or name.endswith(endings)) and path.is_file():
                documents.append(_document(path, path.relative_to(root).as_posix()))
    yield from sorted(documents, key=lambda file: file.name)


def _document(path: Path, name: str) -> Document:
    stat = path.stat()
    return Document(name, path, 0, stat.st_size, stat.st_mtime_ns)


def _flaw(file: Document) -> str:
    """Why a file is no document; empty if it is one."""
    blank = True
    position = 0
    for piece in file.pieces():
        zero = piece.find(b"\0")
        if zero >= 0:
            return f"holds a zero byte (at byte {position + zero}), so it is not text"
        try:
            text = piece.decode("utf-8")
        except UnicodeDecodeError as error:
            return f"is not UTF-8 text ({error.reason} at byte {position + error.start})"
        blank = blank and (not text or text.isspace())
        position += len(piece)
    return _BLANK if blank else ""


def _read(document: Document) -> bytes:
    return b"".join(document.pieces())


def unreadable(error: OSError, path: Path) -> DataError:
    """Error for a file of a corpus that cannot be read."""
    reason = os_reason(error)
    return DataError(f"{error.filename or path} cannot be read: {reason}.", "Check its permissions.")
