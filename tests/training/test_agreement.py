"""Ranks exchange data, never code, whatever a peer sends."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from moefw.core.errors import CheckpointError, DataError, MoefwError, RunError
from moefw.runtime.communication.agreement import everywhere, raise_together
from moefw.testing.pool import RankPool

SAID = [{"step": 4, "hash": "ä"}, None, [1.5, "x" * 3000], 0]


def say(world: int) -> list[Any]:
    return everywhere(SAID[dist.get_rank() % len(SAID)], dist.group.WORLD)


@pytest.mark.parametrize("world", [1, 2, 4])
def test_every_rank_learns_what_each_one_says(pool: RankPool, world: int) -> None:
    assert pool.run(say, world, world) == [SAID[:world]] * world


def fail(failing: dict[int, MoefwError]) -> str:
    try:
        raise_together(failing.get(dist.get_rank()), dist.group.WORLD)
    except MoefwError as error:
        where = "" if error.on_every_rank else "here alone, "
        return f"{where}{type(error).__name__}: {error}"
    return "goes on"


def test_the_error_of_one_rank_is_raised_on_all(pool: RankPool) -> None:
    error = DataError("the text is gone.", "Bring it back.")
    assert pool.run(fail, 2, {1: error}) == ["DataError: the text is gone. Bring it back."] * 2
    both = {0: CheckpointError("no step 4."), 1: DataError("no text.")}
    assert pool.run(fail, 2, both) == ["CheckpointError: no step 4."] * 2
    assert pool.run(fail, 2, {}) == ["goes on"] * 2


class Command:
    """Unpickling this runs a command."""

    def __init__(self, path: str) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Any, ...]:
        return os.system, (f"touch {self.path}",)


def meet_a_hostile_peer(how: str, path: str) -> str:
    """Let rank 1 use torch's protocol of pickled objects, or send arbitrary lengths and bytes."""
    if dist.get_rank() == 0:
        try:
            return f"heard {everywhere('hello', dist.group.WORLD)}"
        except RunError as error:
            return str(error)
    if how == "pickle":
        data, _ = dist.distributed_c10d._object_to_tensor(Command(path), torch.device("cpu"), dist.group.WORLD)
        data = torch.nn.functional.pad(data, (0, -len(data) % 4))
        size = torch.tensor([len(data)])
    else:
        size, data = torch.tensor([int(how)]), torch.full((max(int(how), 1),), 0x5B, dtype=torch.uint8)
    sizes = [torch.zeros(1, dtype=torch.int64) for _ in range(2)]
    dist.all_gather(sizes, size.reshape(1))
    if int(size) > 0 and int(size) % 4 == 0:
        longest = -(-max(int(each) for each in sizes) // 4) * 4
        padded = torch.zeros(longest, dtype=torch.uint8)
        padded[: len(data)] = data
        dist.all_gather([torch.empty(longest // 4, dtype=torch.int32) for _ in range(2)], padded.view(torch.int32))
    return "peer"


@pytest.mark.fault("a hostile peer answers: {id}", "it is named, and nothing that it sends is run")
@pytest.mark.parametrize("how", ["pickle", "100000", "0", "-1", "6"])
def test_what_a_hostile_peer_sends_is_not_run(pool: RankPool, tmp_path: Path, how: str) -> None:
    """A pickled command, JSON nested too deeply, no bytes, a negative length, or one that is no whole words."""
    path = tmp_path / "ran"
    heard, _ = pool.run(meet_a_hostile_peer, 2, how, str(path))
    assert "rank 1 of the group" in heard
    assert "where ranks exchange JSON" in heard
    assert not path.exists()
