"""Folders of prepared data: filled under a temporary name, renamed when complete, checked for damage before use."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from attrs import frozen

from moefw.core.data import TOKENIZER
from moefw.core.errors import DamagedDataError, DataError, os_reason
from moefw.plugins.data.corpus import CACHE_TAG
from moefw.plugins.data.hashed import CHUNK_BYTES, HASH_BYTES, HashedFile, KnownHashes, chunk_hashes, num_chunks
from moefw.system.folders import hidden_name, lock_folder, scratch_folder

TRAIN = "train.bin"
HELDOUT = "heldout.bin"
HELDOUT_TEXT = "heldout.raw"
SEEN = "seen.bin"
"""The hashes of files elsewhere, which become more when the folder is complete."""
_META = "meta.json"
_HASHES = "hashes.bin"
_OWN_HASH = "sha256"
_TAG = "Signature: 8a477f597d28d172789f06886806bc55\n# Made by moefw; may be deleted.\n"


@frozen(kw_only=True)
class Prepared:
    """An intact folder: ``meta`` is the content of ``meta.json``, ``hashes`` are those of all files' chunks."""

    folder: Path
    meta: Mapping[str, Any]
    hashes: bytes

    def open(self, name: str) -> HashedFile:
        """Open a file of the folder. Raises OSError if it is not there."""
        fix = f"Delete the folder {self.folder}: it is made anew from the text."
        hashes = KnownHashes(self._hashes_of(name))
        return HashedFile(self.folder / name, size=self.meta["bytes"][name], hashes=hashes, fix=fix)

    def read(self, name: str) -> bytes:
        """Whole file. Raises DamagedDataError."""
        return self.open(name).read(0, self.meta["bytes"][name])

    @property
    def digest(self) -> str:
        """A hash of all files, and of the tokenizer. ``sample`` is a part of ids that are not in the folder."""
        return _hash([self.meta.get(key) for key in ("tokenizer", "dtype", "bytes", "hashes", "sample")])

    def _hashes_of(self, name: str) -> bytes:
        sizes: Mapping[str, int] = self.meta["bytes"]
        before = sum(num_chunks(sizes[other]) for other in sizes if other < name)
        return self.hashes[before * HASH_BYTES :][: num_chunks(sizes[name]) * HASH_BYTES]


def prepare_folder(cache_dir: Path, identity: Iterable[Any], fill: Callable[[Path], None]) -> Prepared:
    """Data in a folder of the cache, filled in this call unless an earlier one did it.

    Data with another ``identity``, an iterable of plain data, have another folder. Files are written to a temporary
    folder that is renamed when complete, so a process may be killed at any time, and several may prepare at once.
    Raises DataError.
    """
    digest = hashlib.sha256()
    for entry in identity:
        digest.update(json.dumps(entry).encode() + b"\n")
    folder = cache_dir / digest.hexdigest()[:32]
    prepared = open_prepared(folder)
    if prepared is None:
        with new_folder(folder) as partial:
            (partial / CACHE_TAG).write_text(_TAG, encoding="utf-8")
            fill(partial)
        prepared = open_prepared(folder)
    if prepared is None:
        what = f"the prepared data in {folder} have changed as soon as they were written."
        raise DataError(what, "Leave that folder alone, or set MOEFW_CACHE to another one.")
    return prepared


@contextmanager
def kept_in(cache_dir: Path) -> Iterator[None]:
    """Raise an OSError of the cache as a DataError."""
    try:
        yield
    except OSError as error:
        reason = os_reason(error)
        what = f"the prepared data cannot be kept in {cache_dir}: {reason}."
        raise DataError(what, "Set MOEFW_CACHE to a folder that can be written and has room.") from error


def describe(folder: Path, meta: Mapping[str, Any]) -> None:
    """Write ``meta.json`` and ``hashes.bin`` for all files that are in a folder now."""
    files = sorted(path for path in folder.iterdir() if path.name != SEEN)
    hashes = b"".join(map(chunk_hashes, files))
    (folder / _HASHES).write_bytes(hashes)
    sizes = {path.name: path.stat().st_size for path in files}
    chunks = {"chunk_bytes": CHUNK_BYTES, "hashes": hashlib.sha256(hashes).hexdigest()}
    (folder / _META).write_bytes(_written({**meta, "bytes": sizes, **chunks}))


def open_prepared(folder: Path) -> Prepared | None:
    """Data in a folder; None if it is missing, or not as :func:`describe` left it.

    The content of ``tokenizer.json`` is checked here. Other files are checked for size here, for content when read.
    """
    try:
        content = (folder / _META).read_bytes()
        meta = json.loads(content)
        del meta[_OWN_HASH]
        if _written(meta) != content or meta["chunk_bytes"] != CHUNK_BYTES:
            return None
        prepared = Prepared(folder=folder, meta=meta, hashes=(folder / _HASHES).read_bytes())
        if hashlib.sha256(prepared.hashes).hexdigest() != meta["hashes"]:
            return None
        if any((folder / name).stat().st_size != size for name, size in meta["bytes"].items()):
            return None
        if TOKENIZER in meta["bytes"]:
            prepared.read(TOKENIZER)
    except (OSError, DamagedDataError, ValueError, KeyError, TypeError, AttributeError, RecursionError):
        return None
    return prepared


@contextmanager
def new_folder(folder: Path) -> Iterator[Path]:
    """Yield an empty folder. At the end it gets the name ``folder``, or is removed.

    A damaged ``folder`` is replaced; an intact one that another process has put there stays. Folders that killed
    processes of this machine have left in the cache are removed.
    """
    with scratch_folder(folder.parent) as partial:
        yield partial
        with _locked(folder.parent):
            if open_prepared(folder) is None:
                _remove(folder)
                partial.rename(folder)


def _remove(folder: Path) -> None:
    """Rename a damaged folder and delete it, so that no other process sees a part of it."""
    aside = hidden_name(folder.parent)
    with suppress(FileNotFoundError):
        os.rename(folder, aside)
        shutil.rmtree(aside, ignore_errors=True)


@contextmanager
def _locked(folder: Path) -> Iterator[None]:
    """Wait for a lock on a folder and hold it."""
    lock = os.open(folder, os.O_RDONLY)
    try:
        lock_folder(lock)
        yield
    finally:
        os.close(lock)


def _written(meta: Mapping[str, Any]) -> bytes:
    """Content of ``meta.json``: ``meta`` and a hash of it."""
    return (json.dumps({**meta, _OWN_HASH: _hash(meta)}, indent=2) + "\n").encode()


def _hash(data: Any) -> str:
    return hashlib.sha256(json.dumps(data).encode()).hexdigest()
