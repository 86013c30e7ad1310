"""The contract of data sources: ``class TestMine(DataSourceSuite): plugin = Mine; files = staticmethod(write)``."""

from __future__ import annotations

import hashlib
import shutil
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, ClassVar, Final

import numpy as np
import pytest
from attrs import evolve, frozen
from numpy.typing import NDArray

from moefw.core.data import DataSource, TokenStream
from moefw.core.errors import DataError
from moefw.core.kinds import kind_of
from moefw.runtime.windows import masks_losses, read_trained
from moefw.testing.layer_case import LayerCase
from moefw.testing.suites.contract import misfits
from moefw.testing.suites.part import MethodChecks

MOST: Final = 1 << 16
"""Number of tokens of a stream that are read."""


@frozen
class _Prepared:
    """Data that are prepared in ``cache``, and the layer case whose spec names them."""

    layer_case: LayerCase
    cache: Path
    data: DataSource

    def streams(self) -> tuple[tuple[str, TokenStream], ...]:
        return ("train", self.data.train), ("heldout", self.data.heldout)


class DataSourceSuite(MethodChecks):
    """Tests a data source against its contract."""

    files: ClassVar[Callable[[Path], Mapping[str, Any]] | None] = None
    """Function that writes files to a folder, and returns the options that name them. None: ``options`` are all."""

    @property
    def part(self) -> Any:
        """The plugin with its options, and those that name files."""
        with self._folders() as (files, _):
            return self.read(self._options(files))

    def _misfits_of_built(self) -> list[str]:
        with self._prepared() as prepared:
            wrong = misfits(prepared.data, DataSource)
            return wrong or [each for _, stream in prepared.streams() for each in misfits(stream, TokenStream)]

    def test_ids_are_those_of_the_vocabulary(self) -> None:
        """A read returns so many ids, int64, from 0 to the size of the vocabulary."""
        with self._prepared() as prepared:
            for side, stream in prepared.streams():
                assert len(stream) > 0, f"{self.plugin.name}: {side} has no tokens."
                ids = _read(stream, 0, MOST)
                count = min(MOST, len(stream))
                right = isinstance(ids, np.ndarray) and ids.dtype == np.int64 and ids.shape == (count,)
                what = f"{ids.dtype} {ids.shape}" if isinstance(ids, np.ndarray) else type(ids).__name__
                assert right, f"{self.plugin.name}: a read of {count} ids of {side} returns {what}."
                size = prepared.data.vocab_size
                inside = ids.min() >= 0 and ids.max() < size
                says = f"{self.plugin.name}: ids of {side} go from {ids.min()} to {ids.max()}"
                assert inside, f"{says}, and the vocabulary has {size}."

    def test_a_read_depends_on_its_position_alone(self) -> None:
        """A run that resumes prepares again and reads from the middle on, and each rank reads other parts."""
        with self._prepared() as prepared:
            resumed = evolve(prepared, data=_prepare(prepared.layer_case, prepared.cache))
            for (side, stream), (_, again) in zip(prepared.streams(), resumed.streams(), strict=True):
                ids = _read(stream, 0, MOST)
                for start in reversed(range(0, len(ids), max(1, len(ids) // 7))):
                    due = ids[start : start + 5]
                    for when, of_run in (("first, by a run that resumes", again), ("alone", stream)):
                        same = np.array_equal(_read(of_run, start, len(due)), due)
                        says = f"{self.plugin.name}: token {start} of {side} is another one if it is read"
                        assert same, f"{says} {when}."

    def test_documents_start_inside_the_range_that_is_asked_for(self) -> None:
        """Starts are ascending positions, and those of a part are among those of the whole."""
        with self._prepared() as prepared:
            for side, stream in prepared.streams():
                count = min(MOST, len(stream))
                whole = stream.document_starts(0, count)
                if whole is None:
                    pytest.skip(f"{self.plugin.name} does not know where documents start")
                ascends = bool((np.diff(whole) > 0).all()) and not ((whole < 0) | (whole >= count)).any()
                assert ascends, f"{self.plugin.name}: document starts of {side} are no ascending positions: {whole}."
                middle = count // 2
                part = stream.document_starts(middle, count - middle)
                same = part is not None and np.array_equal(part, whole[whole >= middle])
                assert same, f"{self.plugin.name}: from token {middle} on, {side} has other document starts."

    def test_tokens_to_predict_are_told_for_each_token_or_for_none(self) -> None:
        """Those of a part are those of the whole, and a stream tells them of every part, or of none."""
        with self._prepared() as prepared:
            for side, stream in prepared.streams():
                count = min(MOST, len(stream))
                middle = count // 2
                parts = [(0, count), (0, 1), (middle, count - middle)]
                told = [stream.trained(*part) is not None for part in parts]
                says = f"{self.plugin.name}: {side} tells which tokens to predict of some parts alone."
                assert len(set(told)) == 1, f"{says} Return None for every range, or for none."
                if not masks_losses(stream):
                    continue
                whole: Any = stream.trained(0, count)
                right = isinstance(whole, np.ndarray) and whole.dtype == np.bool_ and whole.shape == (count,)
                assert right, f"{self.plugin.name}: which of {count} tokens of {side} to predict is no bool for each."
                for start, size in parts:
                    same = np.array_equal(read_trained(stream, start, size), whole[start : start + size])
                    assert same, f"{self.plugin.name}: from token {start} on, {side} predicts other tokens."

    def test_text_becomes_ids_of_the_vocabulary_and_ids_become_text(self) -> None:
        """``generate`` encodes a prompt, and an evaluation divides by the bytes of the held-out text."""
        with self._prepared() as prepared:
            data = prepared.data
            ids = data.encode("one two")
            inside = all(0 <= each < data.vocab_size for each in ids)
            assert inside, f"{self.plugin.name}: encode returns {ids}, and the vocabulary has {data.vocab_size}."
            text = data.decode(_read(data.heldout, 0, 9).tolist())
            assert isinstance(text, str), f"{self.plugin.name}: decode returns {type(text).__name__}, no text."
            count = len(data.heldout_bytes)
            says = f"{self.plugin.name}: num_heldout_bytes is {data.num_heldout_bytes}"
            assert data.num_heldout_bytes == count, f"{says}, and there are {count}."

    def test_data_that_are_prepared_again_are_the_same(self) -> None:
        """In another cache, as on another machine, too."""
        with self._prepared() as prepared:
            before = _digests(prepared.data)
            for place, cache in (("the same cache", prepared.cache), ("an empty cache", prepared.cache / "other")):
                again = _digests(_prepare(prepared.layer_case, cache))
                changed = [name for name, value in before.items() if again[name] != value]
                assert not changed, f"{self.plugin.name}: prepared again in {place}, other {', '.join(changed)}."

    def test_files_in_the_cache_are_used_again(self) -> None:
        """A later run writes none of them anew."""
        with self._prepared() as prepared:
            before = _written(prepared.cache)
            _prepare(prepared.layer_case, prepared.cache)
            after = _written(prepared.cache)
            anew = sorted(path.name for path in after if before.get(path) != after[path])
            assert not anew, f"{self.plugin.name}: prepared again, it writes {', '.join(anew)} anew."

    def test_all_ranks_read_the_same(self) -> None:
        """They prepare at once, in one cache that is empty at first."""
        if 2 not in self.profile.worlds:
            pytest.skip(f"{self.plugin.name} runs on none but {self.profile.worlds} ranks")
        with self._prepared() as prepared:
            first, second = self.pool.run(_digests_of, 2, prepared.layer_case, prepared.cache / "ranks")
            differ = [name for name, value in first.items() if second[name] != value]
            assert not differ, f"{self.plugin.name}: ranks differ in {', '.join(differ)}."

    def test_files_that_are_not_there_are_a_data_error(self) -> None:
        """The error is the user's, and not a fault of the plugin."""
        if type(self).files is None:
            pytest.skip(f"{self.plugin.name} has no files that the suite could remove")
        with self._folders() as (files, cache):
            case = self._case(files)
            shutil.rmtree(files)
            raised: Exception | None = None
            try:
                _prepare(case, cache)
            except Exception as error:
                raised = error
            says = f"{self.plugin.name}: files that are not there raise"
            assert raised is not None, f"{says} nothing."
            assert isinstance(raised, DataError), f"{says} {type(raised).__name__}: {raised}, not DataError."

    @contextmanager
    def _prepared(self) -> Iterator[_Prepared]:
        """Yield prepared data, whose files are removed in the end."""
        with self._folders() as (files, cache):
            case = self._case(files)
            yield _Prepared(case, cache, _prepare(case, cache))

    @contextmanager
    def _folders(self) -> Iterator[tuple[Path, Path]]:
        """Yield folders for files, and for the cache."""
        with tempfile.TemporaryDirectory() as folder:
            files = Path(folder, "files")
            cache = Path(folder, "cache")
            files.mkdir()
            cache.mkdir()
            yield files, cache

    def _options(self, folder: Path) -> dict[str, Any]:
        """The plugin's options; those that name files name some that are written to ``folder``."""
        files = type(self).files
        return {**self.options, **({} if files is None else files(folder))}

    def _case(self, folder: Path) -> LayerCase:
        """Layer case whose spec names files that are written to ``folder``."""
        section = kind_of(self.plugin).spec({"use": self.plugin.name, **self._options(folder)})
        return LayerCase(parts={**self.parts, **section}, plugins=(self.plugin,))


def _prepare(case: LayerCase, cache: Path) -> DataSource:
    assembly = case.resolve()
    data: DataSource = assembly.registry.built(assembly.parts.data, cache, by="prepare")
    return data


def _read(stream: TokenStream, start: int, count: int) -> NDArray[np.int64]:
    """Ids from ``start``, at most so many."""
    return stream.read(start, min(count, len(stream) - start))


def _digests(data: DataSource) -> dict[str, Any]:
    """What ranks agree on, by name."""
    return {
        "digest": data.digest,
        "fingerprint": data.fingerprint,
        "vocab_size": data.vocab_size,
        "ids to train on": hashlib.sha256(_read(data.train, 0, MOST).tobytes()).hexdigest(),
        "ids held out": hashlib.sha256(_read(data.heldout, 0, MOST).tobytes()).hexdigest(),
        "held-out text": hashlib.sha256(data.heldout_bytes).hexdigest(),
    }


def _digests_of(case: LayerCase, cache: Path) -> dict[str, Any]:
    """:func:`_digests` of data that this rank prepares."""
    return _digests(_prepare(case, cache))


def _written(folder: Path) -> dict[Path, tuple[int, int]]:
    """Inode and time of the last write of each file."""
    paths = (path for path in folder.rglob("*") if path.is_file())
    return {path: (path.stat().st_ino, path.stat().st_mtime_ns) for path in paths}
