"""Ranks resume from the same checkpoint with the same text, or report the difference before the first step."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch.distributed as dist

from moefw.core.errors import MoefwError
from moefw.testing.pool import RankPool
from moefw.training import checkpoint
from moefw.training.checkpoint.manifest import Manifest
from moefw.training.resume import Which

Asked = tuple[str, Which | None, str]
"""View of a rank: its folder of the run, the value of ``--resume``, and the digest of its data."""


def choose(asked: list[Asked]) -> int | str | None:
    folder, which, digest = asked[dist.get_rank()]
    data: Any = SimpleNamespace(train=range(100), digest=digest)
    try:
        chosen = checkpoint.choose_together(Path(folder), which, data, dist.group.WORLD)
    except MoefwError as error:
        return f"{type(error).__name__}: {error}"
    return chosen and chosen.step


@pytest.fixture
def runs(tmp_path: Path) -> dict[str, str]:
    """Folders of a run: two with different checkpoints, a third with another checkpoint of step 4, an empty one."""
    for name, steps, world in (("a", (2, 4), 1), ("b", (2,), 1), ("c", (2, 4), 2), ("none", (), 1)):
        (tmp_path / name / "checkpoints").mkdir(parents=True)
        for step in steps:
            folder = tmp_path / name / "checkpoints" / f"step-{step}"
            folder.mkdir()
            origin = checkpoint.Origin(world=world, plugins=(), tokenizer="bytes", sequences=0)
            (folder / "manifest.json").write_bytes(Manifest(step=step, origin=origin, tensors={}, files={}).sealed())
    return {name: str(tmp_path / name) for name in ("a", "b", "c", "none")}


def test_ranks_that_see_the_same_go_on_together(pool: RankPool, runs: dict[str, str]) -> None:
    for which, step in (("last", 4), (2, 2), ("auto", 4), (None, None)):
        assert pool.run(choose, 2, [(runs["a"], which, "x")] * 2) == [step] * 2
    assert pool.run(choose, 2, [(runs["none"], "auto", "x")] * 2) == [None] * 2


@pytest.mark.fault(
    "ranks find other checkpoints, other data or other wishes ({id})",
    "refused before the first step, with what differs",
)
@pytest.mark.parametrize(
    ("other", "told"),
    [
        (("b", "last", "x"), "rank 1 differs from rank 0 in the step to go on from: 2 instead of 4."),
        (("none", "auto", "x"), "rank 1 differs from rank 0 in the step to go on from: 0 instead of 4."),
        (("c", "last", "x"), "rank 1 differs from rank 0 in the manifest of that checkpoint"),
        (("a", None, "x"), "rank 1 differs from rank 0 in what --resume asks for"),
        (("a", "last", "y"), "rank 1 differs from rank 0 in the prepared data: 'y' instead of 'x'."),
        (("none", "last", "x"), "holds no checkpoint"),
    ],
)
def test_a_rank_that_differs_is_named_on_every_rank(
    pool: RankPool, runs: dict[str, str], other: Asked, told: str
) -> None:
    name, which, digest = other
    found = pool.run(choose, 2, [(runs["a"], "last", "x"), (runs[name], which, digest)])
    assert found[0] == found[1]
    assert told in found[0]
