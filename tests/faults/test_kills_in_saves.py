"""Ranks killed at counted system calls of a save beside steps: the run resumes as if nothing had happened."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import pytest

from kill_chain import EVERY, KillChain, Unbroken, preloaded
from training_process import newest

KILLS = 20

pytestmark = pytest.mark.deep


@pytest.fixture(scope="module")
def chain(spec: Path, unbroken: Unbroken, tmp_path_factory: pytest.TempPathFactory) -> KillChain:
    return KillChain(spec, tmp_path_factory.mktemp("chain") / "run", unbroken)


@pytest.mark.fault(
    "every rank is killed after {id} of 20 parts of a save's system calls",
    "no torn checkpoint is there, no rank is left",
)
@pytest.mark.parametrize("part", range(KILLS))
def test_a_run_killed_inside_a_save_leaves_whole_checkpoints(
    chain: KillChain, part: int, shim: Path, points: Mapping[int, int], tmp_path: Path
) -> None:
    """Each rank is killed at the call of this number, unless the other one has been; rank 1 makes fewer calls."""
    point = 1 + part * points[0] // KILLS
    counted = preloaded(shim, chain.run_dir, newest(chain.run_dir) + EVERY, tmp_path / "log")
    with chain.start({**counted, "FAULT_AT": str(point)}) as run:
        assert run.ended().code == 1
        chain.check(run)
    assert (tmp_path / "log-0").exists()


@pytest.mark.fault("20 kills inside saves", "losses of all steps and the last weights bit-equal to an unbroken run")
def test_a_run_killed_in_save_after_save_ends_as_an_unbroken_one(chain: KillChain) -> None:
    chain.check_end()
