"""The data of several sources as those of one: their streams end to end."""

from __future__ import annotations

import hashlib
import json
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from itertools import accumulate
from pathlib import Path
from typing import final

import numpy as np
from numpy.typing import NDArray

from moefw.core.data import DataSource, TokenStream
from moefw.core.errors import PlanError, Problem
from moefw.runtime.windows import masks_losses, read_ids, read_trained


@final
class Joined(TokenStream):
    """Streams end to end, each from position ``begins[i]`` on; ids are checked. A document ends with its stream."""

    def __init__(self, streams: Sequence[TokenStream], vocab_size: int) -> None:
        self.name = " and ".join(stream.name or type(stream).__name__ for stream in streams)
        self.streams = streams
        self._vocab_size = vocab_size
        *self.begins, self._size = accumulate(map(len, streams), initial=0)
        self._told = all(stream.document_starts(0, 1) is not None for stream in streams)
        self._masks_losses = any(map(masks_losses, streams))

    def __len__(self) -> int:
        """Number of tokens of all streams."""
        return self._size

    def read(self, start: int, count: int) -> NDArray[np.int64]:
        """``count`` ids from ``start``, int64. Raises what the streams raise, and names the stream."""
        parts = [read_ids(stream, at, size, self._vocab_size) for stream, _, at, size in self._parts(start, count)]
        return np.concatenate(parts)

    def document_starts(self, start: int, count: int) -> NDArray[np.int64] | None:
        """Where documents start; None if a stream does not know."""
        if not self._told:
            return None
        parts = [np.empty(0, np.int64)]
        for stream, begin, at, size in self._parts(start, count):
            starts = stream.document_starts(at, size)
            assert starts is not None
            # A stream begins a document, also where it does not say so.
            if at == 0 and not (starts[:1] == 0).any():
                parts.append(np.array([begin], np.int64))
            parts.append(starts + begin)
        return np.concatenate(parts)

    def trained(self, start: int, count: int) -> NDArray[np.bool_] | None:
        """Whether each token is one to predict; None if all are, in all streams."""
        if not self._masks_losses:
            return None
        parts = [np.empty(0, np.bool_)]
        for stream, _, at, size in self._parts(start, count):
            parts.append(read_trained(stream, at, size) if masks_losses(stream) else np.ones(size, np.bool_))
        return np.concatenate(parts)

    def _parts(self, start: int, count: int) -> Iterator[tuple[TokenStream, int, int, int]]:
        """Yield the streams of a range: each with its begin, and the position and number of tokens in it."""
        end = start + count
        for index in range(bisect_right(self.begins, start) - 1, len(self.streams)):
            stream = self.streams[index]
            begin = self.begins[index]
            first = max(start, begin)
            last = min(end, begin + len(stream))
            if first < last:
                yield stream, begin, first - begin, last - first


@final
class BlendSource(DataSource):
    """Sources in the proportions of whole ``weights``. Raises PlanError if they have not one tokenizer."""

    train: Joined

    def __init__(self, sources: Sequence[DataSource], weights: Sequence[int]) -> None:
        first = sources[0]
        if len(sources) > 1:
            _check_tokenizers(sources)
        self.weights = tuple(weights)
        self._sources = sources
        self.vocab_size = first.vocab_size
        self.fingerprint = first.fingerprint
        self.train = Joined([source.train for source in sources], first.vocab_size)
        self.heldout = Joined([source.heldout for source in sources], first.vocab_size)
        digests = [source.digest for source in sources]
        self.digest = hashlib.sha256(json.dumps(digests).encode()).hexdigest() if all(digests) else ""

    @property
    def heldout_bytes(self) -> bytes:  # type: ignore[override]
        """The held-out text of all sources."""
        return b"".join(source.heldout_bytes for source in self._sources)

    @property
    def num_heldout_bytes(self) -> int:
        """The number of its bytes."""
        return sum(source.num_heldout_bytes for source in self._sources)

    def encode(self, text: str) -> list[int]:
        """Ids of text by the tokenizer of all sources."""
        return self._sources[0].encode(text)

    def decode(self, ids: Sequence[int]) -> str:
        """Text of ids by the tokenizer of all sources."""
        return self._sources[0].decode(ids)

    def ask(self, question: str) -> list[int] | None:
        """Ids of a conversation of the first source that has conversations; None: none has."""
        asked = (source.ask(question) for source in self._sources)
        return next((ids for ids in asked if ids is not None), None)

    @property
    def ends(self) -> frozenset[int]:
        """Ids with which texts of any source end."""
        return frozenset[int]().union(*(source.ends for source in self._sources))

    def save_tokenizer(self, folder: Path) -> None:
        """Write the tokenizer of all sources, and what each has beside it, such as a chat template."""
        for source in self._sources:
            source.save_tokenizer(folder)

    def preview(self) -> Sequence[str]:
        """Lines of all sources."""
        return [line for source in self._sources for line in source.preview()]


def _check_tokenizers(sources: Sequence[DataSource]) -> None:
    known = [(source.fingerprint, source.vocab_size) for source in sources]
    fix = "Name one tokenizer in all parts."
    problems = []
    for index, (name, size) in enumerate(known):
        if not name:
            problems.append(Problem("its tokenizer is not known: the source has no fingerprint.", fix, _part(index)))
        elif known[0][0] and (name, size) != known[0]:
            what = f"its tokenizer ({name}, {size} ids) is not that of {_part(0)} ({known[0][0]}, {known[0][1]} ids)."
            problems.append(Problem(what, fix, _part(index)))
    if problems:
        raise PlanError(problems)


def _part(index: int) -> str:
    return f"data.parts[{index}]"
