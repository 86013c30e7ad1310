"""A rank whose process is stopped in the middle of a run: it is named in time, no process is left, and the run resumes."""

from __future__ import annotations

import re
import signal
from pathlib import Path

import pytest

from kill_chain import EVERY, RANKS, STEPS, Unbroken, train
from moefw.training.faults.patience import LOOK_S
from training_process import checkpoints, history

TIMEOUT_S = 5.0
NAMED_S = TIMEOUT_S + 2 * LOOK_S
"""The most seconds without progress that are told: those that the launcher, which may itself have to wait for a
processor, counts from one look to the next."""
ENDED_S = 60.0
"""Seconds by which the run has ended, on a machine whose processors many share."""

pytestmark = pytest.mark.deep


@pytest.mark.fault(
    "rank {id} is stopped",
    "named after timeout_s; all ranks gone 5 s later; resumed to the end of an unbroken run",
)
@pytest.mark.parametrize("rank", range(RANKS))
def test_a_stopped_rank_is_named_in_time(spec: Path, unbroken: Unbroken, tmp_path: Path, rank: int) -> None:
    run_dir, limit = tmp_path / "run", f"run.timeout_s={TIMEOUT_S}"
    with train(spec, run_dir, limit) as run:
        run.wait_for_step(2 * EVERY + rank)
        run.signal_rank(rank, signal.SIGSTOP)
        ended = run.ended(timeout_s=ENDED_S)
        assert not run.orphans()
    assert ended.code == 1
    (line,) = ended.err.splitlines()
    assert line.startswith(f"error: rank {rank} (")
    assert "its process is stopped" in line
    told_s = re.search(r"no progress for ([\d.]+) s", line)
    assert told_s is not None
    assert TIMEOUT_S <= float(told_s[1]) <= NAMED_S
    assert (run_dir / "stacks" / f"rank-{rank}.txt").stat().st_size
    with train(spec, run_dir, "--resume=auto") as run:
        ended = run.ended()
    assert ended.code == 0, ended.err
    assert history(run_dir) == unbroken.records
    assert checkpoints(run_dir)[STEPS] == unbroken.tensors[STEPS]
