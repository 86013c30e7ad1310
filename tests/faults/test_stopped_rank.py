"""A rank whose process is stopped in the middle of a run: it is named in time, no process is left, and the run resumes."""

from __future__ import annotations

import signal
import time
from pathlib import Path

import pytest

from kill_chain import EVERY, RANKS, STEPS, Unbroken, train
from training_process import checkpoints, history

TIMEOUT_S = 5.0
NAMED_S = 1.0
"""Seconds after ``run.timeout_s`` by which the rank is named."""

pytestmark = pytest.mark.deep


@pytest.mark.fault(
    "rank {id} is stopped",
    "named within timeout_s + 1 s; all ranks gone 5 s later; resumed to the end of an unbroken run",
)
@pytest.mark.parametrize("rank", range(RANKS))
def test_a_stopped_rank_is_named_in_time(spec: Path, unbroken: Unbroken, tmp_path: Path, rank: int) -> None:
    run_dir, limit = tmp_path / "run", f"run.timeout_s={TIMEOUT_S}"
    with train(spec, run_dir, limit) as run:
        run.wait_for_step(2 * EVERY + rank)
        run.signal_rank(rank, signal.SIGSTOP)
        stopped_s = time.monotonic()
        ended = run.ended()
        named_s = time.monotonic() - stopped_s
        assert not run.orphans()
    assert ended.code == 1
    (line,) = ended.err.splitlines()
    assert line.startswith(f"error: rank {rank} (")
    assert "its process is stopped" in line
    assert named_s < TIMEOUT_S + NAMED_S
    assert (run_dir / "stacks" / f"rank-{rank}.txt").stat().st_size
    with train(spec, run_dir, "--resume=auto") as run:
        ended = run.ended()
    assert ended.code == 0, ended.err
    assert history(run_dir) == unbroken.records
    assert checkpoints(run_dir)[STEPS] == unbroken.tensors[STEPS]
