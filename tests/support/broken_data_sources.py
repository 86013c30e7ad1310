"""Data sources that break their contract in one way each."""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import torch.distributed as dist
from attrs import frozen

import moefw
from moefw.core.plugin import DataSourcePlugin


class Ids(moefw.TokenStream):
    """The bytes of a file in the cache, in lines."""

    def __init__(self, path: Path, plugin: Sound) -> None:
        self.name = str(path)
        self.content = path.read_bytes()
        self.plugin = plugin
        self.reads = 0

    def __len__(self) -> int:
        return len(self.content)

    def read(self, start: int, count: int) -> Any:
        self.reads += 1
        return self.plugin.changed(np.frombuffer(self.content[start : start + count], np.uint8).astype(np.int64), self)

    def document_starts(self, start: int, count: int) -> Any:
        ends = np.flatnonzero(np.frombuffer(self.content, np.uint8) == 10) + 1
        starts = np.array([0, *ends[ends < len(self)]], np.int64)
        return self.plugin.starts(starts[(starts >= start) & (starts < start + count)])

    def trained(self, start: int, count: int) -> Any:
        return self.plugin.predicted(np.frombuffer(self.content[start : start + count], np.uint8) != 10)


class Bytes(moefw.DataSource):
    vocab_size = 256
    fingerprint = "bytes"

    def __init__(self, folder: Path, plugin: Sound) -> None:
        self.train = Ids(folder / "train", plugin)
        self.heldout = Ids(folder / "heldout", plugin)
        self.heldout_bytes = (folder / "heldout").read_bytes()
        self.plugin = plugin

    @property
    def num_heldout_bytes(self) -> int:
        return self.plugin.counted(len(self.heldout_bytes))

    def encode(self, text: str) -> list[int]:
        return self.plugin.encoded(list(text.encode()))

    def decode(self, ids: Sequence[int]) -> str:
        return bytes(ids).decode(errors="replace")


@frozen(kw_only=True)
class Sound(DataSourcePlugin):
    """The first half of a file, and the second: right in every way. Those below change it."""

    name: ClassVar[str] = "sound"
    made: ClassVar[type[Bytes]] = Bytes
    path: str

    def prepare(self, cache_dir: Path) -> moefw.DataSource:
        cache_dir.mkdir(parents=True, exist_ok=True)
        try:
            content = Path(self.path).read_bytes()
        except OSError as error:
            raise self.missing(error) from error
        half = len(content) // 2
        for name, part in (("train", content[:half]), ("heldout", content[half:])):
            self.write(cache_dir / name, part)
        return self.made(cache_dir, self)

    def write(self, path: Path, content: bytes) -> None:
        if not path.exists():
            partial = path.with_name(f"{path.name}.{os.getpid()}")
            partial.write_bytes(content)
            partial.rename(path)

    def missing(self, error: OSError) -> Exception:
        return moefw.DataError(f"{self.path} cannot be read.", "Name a file.")

    def changed(self, ids: Any, stream: Ids) -> Any:
        return ids

    def starts(self, starts: Any) -> Any:
        return starts

    def predicted(self, trained: Any) -> Any:
        return trained

    def counted(self, count: int) -> int:
        return count

    def encoded(self, ids: list[int]) -> list[int]:
        return ids


class _WithErrors(Bytes):
    def decode(self, ids: Sequence[int], errors: str) -> str:  # type: ignore[override]
        return bytes(ids).decode(errors=errors)


@frozen(kw_only=True)
class DecodesByErrors(Sound):
    name: ClassVar[str] = "decodes-by-errors"
    made: ClassVar[type[Bytes]] = _WithErrors


class _TrainOnly(Bytes):
    def __init__(self, folder: Path, plugin: Sound) -> None:
        super().__init__(folder, plugin)
        del self.heldout


@frozen(kw_only=True)
class HoldsOutNothing(Sound):
    name: ClassVar[str] = "holds-out-nothing"
    made: ClassVar[type[Bytes]] = _TrainOnly


class _OfOneToken(Ids):
    def read(self, start: int) -> Any:  # type: ignore[override]
        return super().read(start, 1)


class _InOnes(Bytes):
    def __init__(self, folder: Path, plugin: Sound) -> None:
        super().__init__(folder, plugin)
        self.heldout = _OfOneToken(folder / "heldout", plugin)


@frozen(kw_only=True)
class ReadsOneToken(Sound):
    name: ClassVar[str] = "reads-one-token"
    made: ClassVar[type[Bytes]] = _InOnes


@frozen(kw_only=True)
class MisspellsItsOffer(Sound):
    name: ClassVar[str] = "misspells-its-offer"

    def offers(self, site: moefw.Site) -> moefw.Offers:
        return moefw.offers(rows=("raged",))


@frozen(kw_only=True)
class ReadsInt32(Sound):
    name: ClassVar[str] = "reads-int32"

    def changed(self, ids: Any, stream: Ids) -> Any:
        return ids.astype(np.int32)


@frozen(kw_only=True)
class CountsFromOneThousand(Sound):
    name: ClassVar[str] = "counts-from-one-thousand"

    def changed(self, ids: Any, stream: Ids) -> Any:
        return ids + 1000


@frozen(kw_only=True)
class GoesOnWhereItWas(Sound):
    name: ClassVar[str] = "goes-on-where-it-was"

    def changed(self, ids: Any, stream: Ids) -> Any:
        return (ids + stream.reads) % 256


@frozen(kw_only=True)
class BeginsAtTheFirstRow(Sound):
    """What is read first is read from the beginning, as by an iterator that a resume makes anew."""

    name: ClassVar[str] = "begins-at-the-first-row"

    def changed(self, ids: Any, stream: Ids) -> Any:
        first = np.frombuffer(stream.content[: len(ids)], np.uint8).astype(np.int64)
        return first if stream.reads == 1 else ids


@frozen(kw_only=True)
class DrawsAnOrder(Sound):
    name: ClassVar[str] = "draws-an-order"

    def changed(self, ids: Any, stream: Ids) -> Any:
        return np.random.default_rng().permutation(ids)


@frozen(kw_only=True)
class StartsEverywhere(Sound):
    name: ClassVar[str] = "starts-everywhere"

    def starts(self, starts: Any) -> Any:
        return starts[::-1]


@frozen(kw_only=True)
class PredictsNumbers(Sound):
    name: ClassVar[str] = "predicts-numbers"

    def predicted(self, trained: Any) -> Any:
        return trained.astype(np.int64)


@frozen(kw_only=True)
class PredictsTheFirst(Sound):
    name: ClassVar[str] = "predicts-the-first"

    def predicted(self, trained: Any) -> Any:
        return np.arange(len(trained)) == 0


@frozen(kw_only=True)
class PredictsAtTimes(Sound):
    name: ClassVar[str] = "predicts-at-times"

    def predicted(self, trained: Any) -> Any:
        return trained if len(trained) == 1 else None


@frozen(kw_only=True)
class ForgetsAByte(Sound):
    name: ClassVar[str] = "forgets-a-byte"

    def counted(self, count: int) -> int:
        return count - 1


@frozen(kw_only=True)
class EncodesOutside(Sound):
    name: ClassVar[str] = "encodes-outside"

    def encoded(self, ids: list[int]) -> list[int]:
        return [*ids, 256]


@frozen(kw_only=True)
class WritesAnew(Sound):
    name: ClassVar[str] = "writes-anew"

    def write(self, path: Path, content: bytes) -> None:
        path.unlink(missing_ok=True)
        super().write(path, content)


@frozen(kw_only=True)
class WritesTheTime(Sound):
    name: ClassVar[str] = "writes-the-time"

    def write(self, path: Path, content: bytes) -> None:
        super().write(path, content + str(time.time_ns()).encode())


@frozen(kw_only=True)
class AsksItsRank(Sound):
    name: ClassVar[str] = "asks-its-rank"

    def changed(self, ids: Any, stream: Ids) -> Any:
        rank = dist.get_rank() if dist.is_initialized() else 0
        return (ids + rank) % 256


@frozen(kw_only=True)
class LetsErrorsThrough(Sound):
    name: ClassVar[str] = "lets-errors-through"

    def missing(self, error: OSError) -> Exception:
        return error
