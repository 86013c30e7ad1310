"""A checkpoint that one layout writes is read by any other one, and no rank writes or reads more than its part."""

from __future__ import annotations

import _pickle
import pickle
import re
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch.distributed.checkpoint import HuggingFaceStorageReader, load

from layout_runs import LOSS
from moefw.runtime.safetensors_dtypes import DTYPES
from moefw.testing.pool import RankPool
from moefw.training.checkpoint.files import file_of, header, index_of
from moefw.training.checkpoint.manifest import Damage, words
from moefw.training.checkpoint.reading import opened
from resume_pairs import CHUNK_BYTES, LAYOUTS, PAIRS, QUICK, STEP, Pairs, last_good, of_step, refused


@pytest.fixture(scope="module")
def pairs(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pairs]:
    pool = RankPool(4)
    yield Pairs(pool, tmp_path_factory.mktemp("pairs"))
    pool.close()


@pytest.mark.parametrize(
    ("source", "target"),
    [pytest.param(*pair, marks=() if pair in QUICK else pytest.mark.deep, id=" to ".join(pair)) for pair in PAIRS],
)
def test_a_run_goes_on_in_another_layout_from_the_same_bits(pairs: Pairs, source: str, target: str) -> None:
    differing, loss = pairs.deviation(source, target)
    assert differing == []
    assert loss <= LOSS


@pytest.mark.parametrize("layout", LAYOUTS)
def test_no_rank_writes_more_than_a_tenth_above_its_share(pairs: Pairs, layout: str) -> None:
    assert pairs.busiest(layout) <= 1.1


OF_SHARDS = [
    ("pp x FSDP", "FSDP on 3 ranks"),
    ("tp x FSDP x ep", "pp, interleaved"),
    pytest.param("pp x FSDP", "tp x FSDP x ep", marks=pytest.mark.deep),
    pytest.param("tp x FSDP x ep", "dp", marks=pytest.mark.deep),
]


@pytest.mark.parametrize(("source", "target"), OF_SHARDS)
def test_a_rank_reads_the_chunks_that_its_boxes_touch_once_each(pairs: Pairs, source: str, target: str) -> None:
    """No tensor is made that is larger than a part that the rank stores, or than a chunk."""
    for rank in pairs.read(source, target):
        assert len(rank.chunks) == len(set(rank.chunks)) > 100
        assert set(rank.chunks) == rank.touched
        assert rank.allocated <= max(rank.stored, CHUNK_BYTES)


class PickledError(Exception):
    """Something was unpickled."""


def trap_pickle(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let every way into pickle raise."""

    def trap(*arguments: object, **named: object) -> None:
        raise PickledError

    for module in (pickle, _pickle):
        for name in ("load", "loads", "Unpickler", "dump", "dumps", "Pickler"):
            monkeypatch.setattr(module, name, trap)
    for name in ("load", "save"):
        monkeypatch.setattr(torch, name, trap)


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
@pytest.mark.parametrize("layout", LAYOUTS)
def test_pytorchs_reader_reads_the_same_tensors_without_pickle(
    pairs: Pairs, layout: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    pairs.written(layout)
    trap_pickle(monkeypatch)
    folder = of_step(pairs.at(layout))
    ours = opened(folder)
    written = ours.manifest.tensors
    theirs = {name: torch.empty(saved.shape, dtype=DTYPES[saved.dtype]) for name, saved in written.items()}
    described = HuggingFaceStorageReader(str(folder)).read_metadata().state_dict_metadata
    assert {name: tuple(tensor.size) for name, tensor in described.items()} == {
        name: saved.shape for name, saved in written.items()
    }
    load(theirs, storage_reader=HuggingFaceStorageReader(str(folder)), no_dist=True)
    assert [name for name, tensor in theirs.items() if not tensor.equal(ours.read(name))] == []


def flip(folder: Path, name: str) -> str:
    """Flip a bit of the last part of a tensor, and return the file that has it."""
    file, part = [(file, part) for file in opened(folder).files for part in file.parts if part.name == name][-1]
    path = folder / file.file
    data = bytearray(path.read_bytes())
    data[len(header(file.parts)) + part.begin + part.nbytes // 2] ^= 1
    path.write_bytes(data)
    return file.file


@pytest.mark.fault("a bit of a tensor flips that one of two ranks reads", "no rank goes on; file and tensor are named")
def test_damage_that_one_rank_reads_ends_all(pairs: Pairs, tmp_path: Path) -> None:
    pairs.written("dp")
    folder = tmp_path / f"step-{STEP}"
    shutil.copytree(of_step(pairs.at("dp")), folder)
    file = flip(folder, "optimizer/exp_avg/layers.2.moe.experts.7.down_proj.weight")
    said = pairs.pool.run(refused, 2, "ep", folder)
    words = "optimizer state exp_avg of layers.2.moe.experts.7.down_proj.weight"
    assert f"{folder / file} is damaged: {words}." in said[0]
    assert said[0] == said[1]


def test_ranks_share_the_check_of_a_last_good_checkpoint(pairs: Pairs, tmp_path: Path) -> None:
    pairs.written("FSDP on 3 ranks")
    run = tmp_path / "run"
    shutil.copytree(pairs.at("FSDP on 3 ranks"), run)
    steps, passed, files = zip(*pairs.pool.run(last_good, 3, run), strict=True)
    assert set(steps) == {STEP}
    assert set(passed) == {()}
    assert sorted(name for own in files for name in own) == [file_of(rank) for rank in range(3)]


@pytest.mark.fault("a bit of a file of a checkpoint of several ranks flips", "refused; file and tensor are named")
@pytest.mark.parametrize("layout", ["FSDP on 3 ranks", "pp x FSDP"])
def test_a_flipped_bit_in_every_file_is_named_with_its_tensor(pairs: Pairs, layout: str, tmp_path: Path) -> None:
    pairs.written(layout)
    folder = tmp_path / f"step-{STEP}"
    shutil.copytree(of_step(pairs.at(layout)), folder)
    for file in opened(folder).files:
        path = folder / file.file
        whole = path.read_bytes()
        part = file.parts[len(file.parts) // 2]
        data = bytearray(whole)
        data[len(header(file.parts)) + part.begin + part.nbytes // 2] ^= 1
        path.write_bytes(data)
        for check in (lambda: opened(folder).verify(), lambda part=part: opened(folder).read(part.name)):
            with pytest.raises(Damage, match=re.escape(f"{path} is damaged: {words(part.name)}.")):
                check()
        path.write_bytes(whole)
        index = path.with_name(index_of(path.name))
        index.write_bytes(index.read_bytes()[:-1])
        with pytest.raises(Damage, match=re.escape(f"{index} is damaged.")):
            opened(folder)
        index.write_bytes(file.index)
